"""What becomes of the values: averages, in any order, each row, head and batch for itself."""

from __future__ import annotations

import numpy as np

from veriformer.case import Case
from veriformer.expect import expect_between, expect_close
from veriformer.law import choice, law
from veriformer.oracle import allowed_keys
from veriformer.properties.attention_cases import PICKS, attention_cases
from veriformer.properties.attention_changes import (
    edge_key,
    expect_independent,
    keep,
    per_head,
    weighing,
    whole,
)
from veriformer.properties.measured import expect_equal, measure
from veriformer.subject import Subject


@law(
    "attention",
    case=attention_cases(examples=12),
    source="P56",
    kills=("attention.py:logits_in_half",),
)
def output_lies_between_the_values(attention: Subject, case: Case) -> None:
    """In each channel the output lies between the least and the largest value that the row may see.

    (With a sink, 0 is one of them.)
    """
    seen, values = allowed_keys(case, attention.capabilities)[..., None], per_head(case, "v")[:, :, None]
    low, high = np.where(seen, values, np.inf).min(3), np.where(seen, values, -np.inf).max(3)
    if case["sink"] is not None:
        low, high = np.minimum(low, 0), np.maximum(high, 0)
    out = measure(attention, case)
    expect_between(out.value, low, high, out.allowed)


@law(
    "attention",
    case=attention_cases(sink=False),
    pick=PICKS,
    factor=choice(-1.0, 2.0, 0.5, -4.0),
    source="P57",
    kills=("attention_tiled.py:denominator_not_rescaled",),
)
def affine_in_values(attention: Subject, case: Case, pick: int, factor: float) -> None:
    """Values a v + c give a out + c, with one c for all keys."""
    case = case.with_arrays(v=whole(case["v"]))
    shift = case.random(pick).integers(-8, 9, case.size("Dv"))
    expect_equal(
        measure(attention, case.with_arrays(v=case["v"] * factor + shift)), measure(attention, case) * factor + shift
    )


@law(
    "attention",
    case=attention_cases(causal=False, window=False, least={"Tk": 2}),
    pick=PICKS,
    order=choice("keys", "queries", "both"),
    source="P49",
    kills=("attention.py:recency_kept", "attention_tiled.py:nothing_rescaled", "attention_tiled.py:tail_dropped"),
)
def permutation_equivariance(attention: Subject, case: Case, pick: int, order: str) -> None:
    """Queries in another order give the outputs in that order; keys with their values in another order change nothing.

    (Mask and bias are put in the same order.)
    """
    rng, queries, keys = case.random(pick), np.arange(case.size("Tq")), np.arange(case.size("Tk"))
    queries = rng.permutation(queries) if order != "keys" else queries
    keys = rng.permutation(keys) if order != "queries" else keys
    expect_equal(measure(attention, keep(case, Tq=queries, Tk=keys)), measure(attention, case)[:, :, queries])


@law(
    "attention",
    case=attention_cases(),
    pick=PICKS,
    source="P49",
    kills=("attention_tiled.py:score_tail_dropped", "attention_tiled.py:value_tail_dropped"),
)
def channels_permute(attention: Subject, case: Case, pick: int) -> None:
    """Channels of query and key in another order change nothing; those of the values permute the output's."""
    inner, outer = (case.random(pick).permutation(case.size(axis)) for axis in ("D", "Dv"))
    expect_equal(measure(attention, keep(case, D=inner, Dv=outer)), measure(attention, case)[..., outer])


@law(
    "attention",
    case=attention_cases(causal=False, window=False),
    pick=PICKS,
    source="P62",
    kills=("attention_tiled.py:tail_counts_phantom_keys", "attention_tiled.py:nothing_rescaled"),
)
def duplicate_keys_count_twice(attention: Subject, case: Case, pick: int) -> None:
    """A key given twice, with its value, has its odds doubled: the weight p becomes 2p / (1 + p)."""
    key = edge_key(allowed_keys(case, attention.capabilities), case.random(pick))
    lit = weighing(case, key)
    once, twice = measure(attention, lit), measure(attention, keep(lit, Tk=[*range(case.size("Tk")), key]))
    p = np.clip(once.value, 0, 1)
    # d/dp 2p / (1 + p) is at most 2.
    expect_close(twice.value, 2 * p / (1 + p), twice.allowed + 2 * once.allowed, what="the weight of both")


@law(
    "attention",
    case=attention_cases(least={"Tq": 2}),
    pick=PICKS,
    source="P50",
    changes=("batch_invariant",),
    kills=("attention.py:mask_first_query", "attention.py:sink_skipped_for_one_query"),
)
def queries_are_independent(attention: Subject, case: Case, pick: int) -> None:
    """A query alone, or among fewer others, gives the same row."""
    if attention.capabilities.causal_alignment == "square":
        case = case.with_keywords(causal=False)
    rng, length = case.random(pick), case.size("Tq")
    count = int(rng.integers(1, length))
    if not case["causal"] and case["window"] is None:
        rows = np.sort(rng.permutation(length)[:count])
    elif attention.capabilities.causal_alignment == "top_left":
        rows = np.arange(count)
    else:
        rows = np.arange(length - count, length)
    expect_independent(attention, keep(case, Tq=rows), case, np.s_[:, :, rows])


@law(
    "attention",
    case=attention_cases(least={"B": 2}),
    pick=PICKS,
    source="P64",
    changes=("batch_invariant",),
    kills=(
        "attention.py:mask_of_another_sample",
        "attention.py:mask_first_sample",
        "attention_tiled.py:denominator_of_first_sample",
    ),
)
def batch_rows_are_independent(attention: Subject, case: Case, pick: int) -> None:
    """A batch row alone gives what it gives among others."""
    row = int(case.random(pick).integers(case.size("B")))
    expect_independent(attention, keep(case, B=[row]), case, np.s_[row : row + 1])


@law(
    "attention",
    case=attention_cases(least={"H": 2}),
    pick=PICKS,
    source="P64",
    changes=("batch_invariant",),
    kills=(
        "attention.py:mask_first_head",
        "attention.py:bias_first_head",
        "attention.py:heads_reversed",
        "attention.py:sink_first_head",
    ),
)
def heads_are_independent(attention: Subject, case: Case, pick: int) -> None:
    """A head alone, with its key head h // (H/G), gives what it gives among others."""
    head = int(case.random(pick).integers(case.size("H")))
    group, member = divmod(head, case.size("H") // case.size("G"))
    expect_independent(attention, keep(case, G=[group], R=[member]), case, np.s_[:, head : head + 1])


@law(
    "attention",
    case=attention_cases(grouped=True),
    needs={"grouped_heads"},
    source="P64",
    kills=(
        "attention.py:gqa_tile",
        "attention.py:gqa_values_tiled",
        "attention.py:gqa_swapped_divisor",
        "attention.py:gqa_first_group",
    ),
)
def grouped_heads_equal_repeated_heads(attention: Subject, case: Case) -> None:
    """Each key head serves H/G neighbouring query heads, as if it were repeated for each of them."""
    repeated = case.with_arrays(k=per_head(case, "k"), v=per_head(case, "v"))
    expect_equal(measure(attention, case), measure(attention, repeated))
