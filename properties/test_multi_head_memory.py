"""Multi-head attention: which rows of memory a query sees, and that all others might as well not be there."""

from __future__ import annotations

import numpy as np

from veriformer.case import Case
from veriformer.expect import expect_close
from veriformer.law import choice, law
from veriformer.oracle import empty_row_rule
from veriformer.properties.attention_cases import PICKS
from veriformer.properties.attention_family_build import seen_rows
from veriformer.properties.attention_family_cases import PLAIN, multi_head_attention_cases
from veriformer.properties.heads_changes import (
    first_position,
    spoiled,
    unaffected,
    widths_of,
    with_each,
    with_memory,
    with_weights,
)
from veriformer.properties.measured import expect_equal, expect_unmoved, measure
from veriformer.subject import Subject


def faults(*names: str) -> tuple[str, ...]:
    """Variants of impls/faulty/multi_head.py."""
    return tuple(f"multi_head.py:{name}" for name in names)


@law(
    "multi_head_attention",
    case=multi_head_attention_cases(causal=False, least={"Tk": 2}),
    pick=PICKS,
    source="P49, P88",
    kills=faults("recency_kept", "keys_from_x"),
)
def order_of_memory_does_not_matter(multi_head: Subject, case: Case, pick: int) -> None:
    """Rows of memory in another order, and the mask with them, change nothing; rows of x permute the output."""
    rng, mask = case.random(pick), case["mask"]
    keys, queries = rng.permutation(case["memory"].shape[1]), rng.permutation(case["x"].shape[1])
    moved = case.with_arrays(x=case["x"][:, queries], memory=case["memory"][:, keys])
    if mask is not None:
        mask = mask if mask.shape[2] == 1 else mask[:, :, queries]
        moved = moved.with_arrays(mask=mask if mask.shape[3] == 1 else mask[..., keys])
    expect_equal(measure(multi_head, moved), measure(multi_head, case)[:, queries])


@law(
    "multi_head_attention",
    case=multi_head_attention_cases(),
    pick=PICKS,
    source="P52, P60",
    kills=faults("memory_ignored", "causal_strict", "causal_always", "last_head_dropped"),
)
def every_row_of_memory_counts_once(multi_head: Subject, case: Case, pick: int) -> None:
    """With zero queries each of the n rows of memory that a head may see weighs 1/n, and every other row nothing."""
    w, (batch, keys, model) = widths_of(case), case["memory"].shape
    row = [keys - 1, 0, keys // 2][pick % 3]
    memory, first = np.zeros((batch, keys, model)), np.zeros((model, 1))
    memory[:, row, 0], first[0] = 1.0, 1.0
    lit = with_weights(with_each(case, lambda name, array: array * 0), wv=np.repeat(first, w.groups * w.value_width, 1))
    lit = with_weights(lit, wo=np.ones_like(case["params.wo"]), bo=None)
    position = np.arange(case["x"].shape[1]) + first_position(case, multi_head.capabilities)
    ahead = np.arange(keys) - position[:, None]
    seen = (ahead <= 0) | (not case["causal"]) | np.zeros((batch, w.heads, 1, 1), bool)
    seen = seen if case["mask"] is None else seen & case["mask"]
    wanted = w.value_width * (seen[..., row] / seen.sum(-1)).sum(1)
    got = measure(multi_head, with_memory(lit, memory))
    expect_equal(got, wanted[..., None], what=f"the weights of row {row}, summed over the heads' channels,")


@law(
    "multi_head_attention",
    case=multi_head_attention_cases(causal=True, least={"Tq": 2, "Tk": 2}),
    pick=PICKS,
    needs={"causal"},
    source="P50",
    relative=False,
    changes=("leak", "causal_alignment"),
    kills=faults("causal_plus_one"),
)
def future_has_no_influence(multi_head: Subject, case: Case, pick: int) -> None:
    """Output row i depends only on rows j <= i + (Tk - Tq) of memory."""
    queries, keys = case["x"].shape[1], case["memory"].shape[1]
    now = int(case.random(pick).integers(0, queries - 1))
    changed = spoiled(case, np.arange(keys) > now + first_position(case, multi_head.capabilities), pick)
    expect_unmoved(multi_head, case, changed, np.broadcast_to(np.arange(queries) <= now, case["x"].shape[:2]))


@law(
    "multi_head_attention",
    case=multi_head_attention_cases(causal=True, least={"Tq": 2}),
    pick=PICKS,
    needs={"causal"},
    source="P51",
    changes=("causal_alignment",),
    kills=faults("causal_top_left"),
)
def causal_is_the_end_of_the_square(multi_head: Subject, case: Case, pick: int) -> None:
    """Fewer rows of x than of memory: they are the last ones of the square problem.

    (The first ones if causal_alignment=top_left; if square, fewer rows of memory too.)
    """
    alignment = multi_head.capabilities.causal_alignment
    length = min(case["x"].shape[1], case["memory"].shape[1])
    square = case.with_arrays(x=case["x"][:, :length], memory=case["memory"][:, :length], mask=None)
    cut = int(case.random(pick).integers(1, length))
    rows = np.s_[:, cut:] if alignment == "bottom_right" else np.s_[:, : length - cut]
    part = square.with_arrays(x=square["x"][rows])
    part = part.with_arrays(memory=part["memory"][rows]) if alignment == "square" else part
    expect_equal(measure(multi_head, part), measure(multi_head, square)[rows])


@law(
    "multi_head_attention",
    case=multi_head_attention_cases(hidden=True, mask=True),
    source="P53",
    needs={"mask"},
    kills=faults("causal_dropped_with_mask"),
)
def masks_combine(multi_head: Subject, case: Case) -> None:
    """Causal and mask together hide what a single mask of the same rows hides."""
    one = case.with_arrays(mask=seen_rows(case, multi_head.capabilities)).with_keywords(causal=False)
    expect_equal(measure(multi_head, case), measure(multi_head, one))


@law(
    "multi_head_attention",
    case=multi_head_attention_cases(mask=True),
    needs={"mask"},
    source="P53, corpus item 17",
    kills=faults("mask_inverted"),
)
def all_true_mask_changes_nothing(multi_head: Subject, case: Case) -> None:
    """A mask that hides nothing gives what no mask gives."""
    case = case.with_arrays(mask=np.ones_like(case["mask"]))
    expect_equal(measure(multi_head, case), measure(multi_head, case.with_arrays(mask=None)))


@law(
    "multi_head_attention",
    case=multi_head_attention_cases(hidden=True),
    pick=PICKS,
    needs={"causal or mask"},
    source="P54",
    relative=False,
    changes=("leak",),
    kills=faults("mask_fill_minus_ten", "mask_of_the_first_query"),
)
def hidden_rows_have_no_influence(multi_head: Subject, case: Case, pick: int) -> None:
    """Whatever finite numbers hidden rows of memory hold, the outputs that do not see them stay the same."""
    hidden = hidden_somewhere(multi_head, case, pick)
    expect_unmoved(multi_head, case, spoiled(case, hidden, pick), unaffected(case, multi_head.capabilities, hidden))


@law(
    "multi_head_attention",
    case=multi_head_attention_cases(hidden=True),
    pick=PICKS,
    poison=choice("nan", "inf", "-inf"),
    needs={"causal or mask", "nan_contained"},
    source="P50, P54",
    relative=False,
    changes=("nan_contained", "leak"),
    kills=faults("nan_leaks"),
)
def nan_stays_hidden(multi_head: Subject, case: Case, pick: int, poison: str) -> None:
    """NaN or infinity in hidden rows of memory does not reach the outputs that do not see them."""
    hidden = hidden_somewhere(multi_head, case, pick)
    poisoned = with_memory(case, np.where(hidden[:, None], float(poison), case["memory"]))
    expect_unmoved(multi_head, case, poisoned, unaffected(case, multi_head.capabilities, hidden))


@law(
    "multi_head_attention",
    case=multi_head_attention_cases(mask=False, causal=False, least={"Tk": 2}),
    pick=PICKS,
    needs={"mask"},
    source="P54",
    kills=faults("mask_after_softmax"),
)
def hidden_rows_may_be_deleted(multi_head: Subject, case: Case, pick: int) -> None:
    """Rows of memory hidden from everybody might as well not be there."""
    rng, keys = case.random(pick), case["memory"].shape[1]
    stay = np.sort(rng.permutation(keys)[: int(rng.integers(1, keys))])
    if not multi_head.domain.longer(causal=False):
        case = case.with_arrays(x=case["x"][:, : len(stay)])
    hidden = case.with_arrays(mask=np.isin(np.arange(keys), stay)[None, None, None])
    expect_equal(measure(multi_head, hidden), measure(multi_head, case.with_arrays(memory=case["memory"][:, stay])))


@law(
    "multi_head_attention",
    case=multi_head_attention_cases(some_empty=True, families=PLAIN),
    needs={"empty rows", "zero rows or nan rows"},
    source="P55",
    relative=False,
    changes=("empty_row",),
    kills=faults("empty_row_nan", "empty_row_mean"),
)
def empty_row_is_as_declared(multi_head: Subject, case: Case) -> None:
    """A head that may see nothing gives 0, so that bo is left where all heads do, or what empty_row declares."""
    capabilities = multi_head.capabilities
    empty, rule = ~seen_rows(case, capabilities).any(-1).all(1), empty_row_rule(case, capabilities)
    if rule == "nan":
        expect_close(multi_head(case)[empty], np.nan, 0.0, what="a row of which some head sees nothing gives")
    if rule == "zeros":
        expect_equal(measure(multi_head, case)[empty], multi_head.reference(case).value[empty])


def hidden_somewhere(multi_head: Subject, case: Case, pick: int) -> np.ndarray:
    """The rows of memory [Tk] hidden from every head of one query, drawn among those from which some are hidden."""
    hidden = ~seen_rows(case, multi_head.capabilities).any(1)
    rows = np.argwhere(hidden.any(-1))
    if not len(rows):
        return np.zeros(hidden.shape[-1], bool)
    found: np.ndarray = hidden[tuple(case.random(pick).choice(rows))]
    return found
