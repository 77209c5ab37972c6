"""Packed sequences: each for itself, whatever lies before and behind it, with its own length and triangle."""

from __future__ import annotations

import numpy as np

from veriformer.case import Case
from veriformer.expect import expect, expect_close, expect_different, expect_same
from veriformer.law import choice, law
from veriformer.properties.attention_cases import PICKS
from veriformer.properties.attention_family_build import seen_in_sequences
from veriformer.properties.attention_family_cases import varlen_attention_cases
from veriformer.properties.measured import expect_equal, expect_unmoved, measure
from veriformer.properties.packed_changes import (
    expect_counted,
    first_position,
    gathered,
    keys_of,
    only,
    others_spoiled,
    rows_of,
    sequences,
    some_sequence,
    spoiled,
    with_vacancy,
)
from veriformer.subject import Subject

FILE = "varlen.py:"


@law(
    "varlen_attention",
    case=varlen_attention_cases(least=2),
    pick=PICKS,
    source="P54, corpus item 19",
    changes=("batch_invariant",),
    kills=tuple(
        FILE + name
        for name in (
            "sequences_see_each_other",
            "longest_length_for_all",
            "starts_where_queries_start",
            "causal_by_packed_position",
            "lengths_taken_for_offsets",
        )
    ),
)
def sequences_stand_alone(varlen: Subject, case: Case, pick: int) -> None:
    """A sequence among others gives what it gives alone."""
    b = some_sequence(case, pick)
    if b is None:
        return
    part, rows = only(case, [b]), rows_of(case, b)
    if varlen.capabilities.batch_invariant:
        expect_same(varlen(part), varlen(case)[rows])
    else:
        expect_equal(measure(varlen, part), measure(varlen, case)[rows])


@law(
    "varlen_attention",
    case=varlen_attention_cases(least=2),
    pick=PICKS,
    source="P54, corpus item 19",
    relative=False,
    changes=("leak",),
    kills=(FILE + "earlier_sequences_seen", FILE + "key_start_off_by_one", FILE + "key_end_off_by_one"),
)
def other_sequences_have_no_influence(varlen: Subject, case: Case, pick: int) -> None:
    """Whatever finite numbers the other sequences hold, a sequence's rows stay the same."""
    b = some_sequence(case, pick)
    if b is not None:
        expect_unmoved(varlen, case, others_spoiled(case, b, pick), rows_of(case, b))


@law(
    "varlen_attention",
    case=varlen_attention_cases(),
    pick=PICKS,
    poison=choice("nan", "inf", "-inf"),
    where=choice("v", "k", "kv"),
    needs={"nan_contained"},
    source="P50, P54",
    relative=False,
    changes=("nan_contained", "leak", "causal_alignment"),
    kills=(FILE + "earlier_sequences_seen", FILE + "nan_leaks"),
)
def nan_stays_hidden(varlen: Subject, case: Case, pick: int, poison: str, where: str) -> None:
    """NaN or infinity in other sequences, or in the future of a causal row, does not reach the row."""
    b = some_sequence(case, pick)
    if b is None:
        return
    rows, seen = rows_of(case, b), keys_of(case, b)
    if case["causal"]:
        now = int(case.random(pick).integers(0, len(rows)))
        rows, seen = rows[: now + 1], seen[: max(now + first_position(case, b, varlen.capabilities) + 1, 0)]
    hidden = ~np.isin(np.arange(len(case["k"])), seen)
    poisoned = {name: np.where(hidden[:, None, None], float(poison), case[name]) for name in where}
    expect_unmoved(varlen, case, case.with_arrays(**poisoned), rows)


@law(
    "varlen_attention",
    case=varlen_attention_cases(window=False),
    pick=PICKS,
    source="P52, P60",
    changes=("causal_alignment",),
    kills=tuple(
        FILE + name for name in ("last_sequence_dropped", "last_key_of_each_dropped", "causal_strict", "causal_always")
    ),
)
def every_key_of_the_sequence_counts_once(varlen: Subject, case: Case, pick: int) -> None:
    """With zero queries each of the n keys that a row may see weighs 1/n, and every other key nothing."""
    expect_counted(varlen, case, pick)


@law(
    "varlen_attention",
    case=varlen_attention_cases(window=True),
    pick=PICKS,
    needs={"window"},
    source="P52, P53, corpus item 12",
    changes=("causal_alignment",),
    kills=tuple(
        FILE + name
        for name in ("window_one_wider", "window_needs_causal", "window_from_the_sequence_start", "window_swapped")
    ),
)
def window_counts_its_keys(varlen: Subject, case: Case, pick: int) -> None:
    """With zero queries each of the n keys in a row's window weighs 1/n; the window is counted in the sequence."""
    expect_counted(varlen, case, pick)


@law(
    "varlen_attention",
    case=varlen_attention_cases(),
    pick=PICKS,
    source="corpus item 19",
    kills=(FILE + "k_offsets_ignored", FILE + "starts_where_queries_start"),
)
def k_offsets_are_their_own(varlen: Subject, case: Case, pick: int) -> None:
    """Keys given twice, each sequence's own behind one another, change nothing without triangle and window."""
    case = case.with_keywords(causal=False, window=None)
    order = [j for b in range(sequences(case)) for j in [*keys_of(case, b)] * 2]
    twice = case.with_arrays(k=case["k"][order], v=case["v"][order], k_offsets=2 * case["k_offsets"])
    expect_equal(measure(varlen, twice), measure(varlen, case))


@law(
    "varlen_attention",
    case=varlen_attention_cases(least=2),
    pick=PICKS,
    source="P49",
    kills=(FILE + "last_sequence_dropped", FILE + "causal_first_sequence_only"),
)
def order_of_sequences_does_not_matter(varlen: Subject, case: Case, pick: int) -> None:
    """Sequences packed in another order give the same rows in that order."""
    order = case.random(pick).permutation(sequences(case))
    rows = np.concatenate([rows_of(case, b) for b in order]).astype(int)
    expect_equal(measure(varlen, only(case, list(order))), measure(varlen, case)[rows])


@law(
    "varlen_attention",
    case=varlen_attention_cases(causal=True, window=False),
    pick=PICKS,
    needs={"causal"},
    source="P51",
    changes=("causal_alignment",),
    kills=(FILE + "causal_top_left",),
)
def causal_is_the_end_of_the_square(varlen: Subject, case: Case, pick: int) -> None:
    """Fewer queries than keys in a sequence: its rows are the last ones of the square problem.

    (The first ones if causal_alignment=top_left; if square, both are cut.)
    """
    rng, alignment = case.random(pick), varlen.capabilities.causal_alignment
    lengths = [min(len(rows_of(case, b)), len(keys_of(case, b))) for b in range(sequences(case))]
    square = gathered(case, *([of(case, b)[:n] for b, n in enumerate(lengths)] for of in (rows_of, keys_of)))
    rows, keys = [], []
    for b, n in enumerate(lengths):
        cut, mine = int(rng.integers(0, max(n, 1))), rows_of(square, b)
        rows.append(mine[cut:] if alignment == "bottom_right" else mine[: n - cut])
        keys.append(keys_of(square, b)[: n - cut] if alignment == "square" else keys_of(square, b))
    expect_equal(measure(varlen, gathered(square, rows, keys)), measure(varlen, square)[np.concatenate(rows)])


@law(
    "varlen_attention",
    case=varlen_attention_cases(causal=True),
    pick=PICKS,
    needs={"causal"},
    source="P50",
    relative=False,
    changes=("causal_alignment", "leak"),
    kills=(FILE + "causal_plus_one", FILE + "causal_first_sequence_only"),
)
def future_has_no_influence(varlen: Subject, case: Case, pick: int) -> None:
    """A row depends on no key of its sequence that lies after its own position."""
    rng = case.random(pick)
    rows, keys = [], []
    for b in range(sequences(case)):
        now = int(rng.integers(0, max(len(rows_of(case, b)), 1)))
        rows.append(rows_of(case, b)[: now + 1])
        keys.append(keys_of(case, b)[max(now + first_position(case, b, varlen.capabilities) + 1, 0) :])
    hidden = np.isin(np.arange(len(case["k"])), np.concatenate(keys))
    expect_unmoved(varlen, case, spoiled(case, hidden, pick), np.concatenate(rows).astype(int))


@law(
    "varlen_attention",
    case=varlen_attention_cases(grouped=True),
    needs={"grouped_heads"},
    source="P64",
    kills=(FILE + "gqa_tile",),
)
def grouped_heads_equal_repeated_heads(varlen: Subject, case: Case) -> None:
    """Each key head serves H/G neighbouring query heads, as if it were repeated for each of them."""
    each = case.size("H") // case.size("G")
    repeated = case.with_arrays(k=np.repeat(case["k"], each, 1), v=np.repeat(case["v"], each, 1))
    expect_equal(measure(varlen, case), measure(varlen, repeated))


@law(
    "varlen_attention",
    case=varlen_attention_cases(),
    pick=PICKS,
    also=("attention",),
    source="P48, P54",
    kills=(FILE + "scale_ignored",),
)
def one_sequence_is_attention(varlen: Subject, attention: Subject, case: Case, pick: int) -> None:
    """A single sequence gives what attention gives for it."""
    b = some_sequence(case, pick)
    if b is None:
        return
    one = only(case, [b])
    batch = {name: one[name].swapaxes(0, 1)[None] for name in "qkv"}
    plain = Case("attention", batch, one.keywords, one.dtype)
    taken = measure(attention, plain)
    expect_equal(measure(varlen, one), taken.rearranged(lambda array: array[0].swapaxes(0, 1)))


@law(
    "varlen_attention",
    case=varlen_attention_cases(causal=True, empty=True, window=False),
    needs={"causal", "empty rows", "zero rows"},
    source="P55",
    relative=False,
    kills=(FILE + "empty_row_nan",),
)
def empty_row_gives_zeros(varlen: Subject, case: Case) -> None:
    """More queries than keys: the leading rows of the sequence see nothing and give 0."""
    if varlen.capabilities.empty_row != "zeros":
        return
    spans = [(rows_of(case, b), keys_of(case, b)[:1]) for b in range(sequences(case))]
    longer = gathered(case, [rows for rows, _ in spans], [keys for _, keys in spans])
    blank = ~np.concatenate([shown.any(-1) for shown in seen_in_sequences(longer, varlen.domain)])
    expect_close(varlen(longer)[blank], 0.0, 0.0, what="a row that sees nothing gives")


@law(
    "varlen_attention",
    case=varlen_attention_cases(vacant=False),
    pick=PICKS,
    vacancy=choice("neither", "keys", "queries"),
    needs={"zero_lengths"},
    source="corpus item 19",
    changes=("zero_lengths",),
    kills=tuple(
        FILE + name for name in ("empty_sequence_ends_the_loop", "empty_sequence_shifts_the_next", "no_keys_gives_nan")
    ),
)
def vacant_sequences_change_nothing(varlen: Subject, case: Case, pick: int, vacancy: str) -> None:
    """A sequence without rows, or with keys alone, leaves the others as they are; one with queries alone gives 0."""
    if vacancy == "queries" and not varlen.domain.longer(case["causal"]):
        return
    b = int(case.random(pick).integers(0, sequences(case)))
    wider, extra = with_vacancy(case, b, 2 * (vacancy == "queries"), 2 * (vacancy == "keys"))
    got, wanted = measure(varlen, wider), measure(varlen, case)
    expect_equal(got[~extra], wanted)
    expect_equal(got[extra], 0.0)


@law(
    "varlen_attention",
    case=varlen_attention_cases(least=2),
    pick=PICKS,
    kind="gradient",
    needs={"gradients"},
    source="P50, P63",
    relative=False,
    kills=("multi_head_gradient.py:varlen_leaks_backwards", "multi_head_gradient.py:varlen_values_detached"),
)
def gradient_stays_in_its_sequence(varlen: Subject, case: Case, pick: int) -> None:
    """The gradient of one sequence's rows is exactly 0 at the rows of all others, and its values have one."""
    b = some_sequence(case, pick)
    if b is None:
        return
    mine = np.zeros((*case["q"].shape[:2], case.size("Dv")))
    mine[rows_of(case, b)] = 1.0
    for name, own in (("q", rows_of(case, b)), ("k", keys_of(case, b)), ("v", keys_of(case, b))):
        gradient = varlen.gradients(case, (name,), mine)[name]
        expect(gradient is not None, "no gradient", f"{name} got no gradient, wanted one of shape {case[name].shape}")
        others = np.delete(gradient, own, 0)
        expect_same(others, np.zeros_like(others), what=f"the gradient of another sequence's {name} is")
    even = varlen.gradients(case.with_arrays(q=np.zeros_like(case["q"])), ("v",), mine)["v"]
    seen = keys_of(case, b)[seen_in_sequences(case, varlen.domain)[b].any(0)]
    expect_different(even[seen], 0.0, what="a value that is seen has a gradient")
