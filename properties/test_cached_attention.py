"""A cache: chunks make no difference, rows lie where they belong and stay, what lies beyond them never matters."""

from __future__ import annotations

import numpy as np

from veriformer.case import Case
from veriformer.expect import Broken, Refused, expect, expect_different, expect_same
from veriformer.law import choice, law
from veriformer.properties.attention_cases import PICKS
from veriformer.properties.attention_family_cases import cached_attention_cases
from veriformer.properties.cached_changes import (
    CACHES,
    batch_rows,
    capacity,
    evicted_rows,
    expect_counted,
    in_chunks,
    marked,
    new_rows,
    old_rows,
    parts_of,
    places,
    relocated,
    spoiled,
    unpaged,
)
from veriformer.properties.measured import expect_equal, expect_unmoved, measure
from veriformer.subject import Subject

CUTS = choice("prefill, then singles", "one, then the rest", "uneven", "singles")
"""Ways to cut the new rows into chunks."""


def faults(*names: str) -> tuple[str, ...]:
    """Variants of impls/faulty/cached.py."""
    return tuple(f"cached.py:{name}" for name in names)


@law(
    "cached_attention",
    case=cached_attention_cases(all=False, least={"m": 2}, examples=12),
    pick=PICKS,
    cut=CUTS,
    source="P66, P71",
    kills=faults(
        "chunk_top_left",
        "chunk_sees_its_future",
        "causal_only_when_empty",
        "chunk_position_constant",
        "window_evicts_before_attending",
        "window_only_in_the_cache",
        "new_rows_after_attending",
    ),
)
def chunks_make_no_difference(cached: Subject, case: Case, pick: int, cut: str) -> None:
    """However a sequence is cut into calls, each on the caches that the last one returned, the outputs are the same."""
    parts = parts_of(case["q"].shape[2], cut, case.random(pick))
    expect_equal(in_chunks(cached, case, parts)[0], measure(cached, case))


@law(
    "cached_attention",
    case=cached_attention_cases(),
    source="P67",
    relative=False,
    kills=faults(
        "written_one_too_far",
        "written_backwards",
        "first_length_for_all",
        "longest_length_for_all",
        "lengths_counted_from_one",
        "values_from_the_keys",
    ),
)
def new_rows_are_stored(cached: Subject, case: Case) -> None:
    """Row lengths[b] + i of both caches is new row i, bit for bit."""
    _, *caches = cached(case)
    for b in range(case.size("B")):
        for i, (block, slot) in enumerate(places(case, b, new_rows(case, b))):
            for cache, name in zip(caches, ("k_new", "v_new"), strict=True):
                expect_same(cache[block, :, slot], case[name][b, :, i], what=f"row {i} of {name}[{b}] is stored as")


@law(
    "cached_attention",
    case=cached_attention_cases(room=1),
    source="P67",
    relative=False,
    kills=faults("slot_zero_overwritten", "block_start_overwritten", "rounds_what_it_holds", "clears_what_lies_beyond"),
)
def other_rows_stay(cached: Subject, case: Case) -> None:
    """Every row of the caches that is not written stays the same, bit for bit, whether it is in use or not."""
    _, *caches = cached(case)
    others = ~marked(case, new_rows)
    for cache, name in zip(caches, CACHES, strict=True):
        kept, before = (array.swapaxes(1, 2)[others] for array in (cache, case[name]))
        expect_same(kept, before, what=f"a row of {name} that is not written is")


@law(
    "cached_attention",
    case=cached_attention_cases(room=1),
    pick=PICKS,
    source="P54, P69",
    relative=False,
    changes=("leak",),
    kills=faults("stale_rows_seen", "stale_rows_are_finite"),
)
def rows_beyond_have_no_influence(cached: Subject, case: Case, pick: int) -> None:
    """Whatever finite numbers lie behind the valid rows and in unused blocks, out is the same."""
    expect_unmoved(cached, case, spoiled(case, ~marked(case, old_rows), pick))


@law(
    "cached_attention",
    case=cached_attention_cases(room=1),
    poison=choice("nan", "inf", "-inf"),
    where=choice("v", "k", "kv"),
    needs={"nan_contained"},
    source="P50, P54",
    relative=False,
    changes=("nan_contained", "leak"),
    kills=faults("nan_leaks", "stale_rows_seen"),
)
def nan_beyond_stays_there(cached: Subject, case: Case, poison: str, where: str) -> None:
    """NaN or infinity behind the valid rows does not reach out."""
    beyond = ~marked(case, old_rows)[:, None, :, None]
    poisoned = {f"{name}_cache": np.where(beyond, float(poison), case[f"{name}_cache"]) for name in where}
    expect_unmoved(cached, case, case.with_arrays(**poisoned))


@law(
    "cached_attention",
    case=cached_attention_cases(window=False),
    pick=PICKS,
    source="P52, P60",
    kills=faults(
        "causal_strict", "causal_plus_one", "causal_always", "cached_rows_forgotten", "positions_of_the_longest"
    ),
)
def every_row_counts_once(cached: Subject, case: Case, pick: int) -> None:
    """With zero queries each of the n rows that a query may see weighs 1/n: those up to its own, or all."""
    expect_counted(cached, case, pick)


@law(
    "cached_attention",
    case=cached_attention_cases(window=True),
    pick=PICKS,
    needs={"window"},
    source="P52, P71, corpus item 12",
    kills=faults("window_one_wider", "window_one_narrower", "window_from_the_chunk_start"),
)
def window_counts_its_rows(cached: Subject, case: Case, pick: int) -> None:
    """With zero queries each of the n rows in a query's window weighs 1/n, and every other row nothing."""
    expect_counted(cached, case, pick)


@law(
    "cached_attention",
    case=cached_attention_cases(window=True, all=False, room=1, filled=True),
    pick=PICKS,
    needs={"window"},
    source="P71",
    relative=False,
    changes=("leak",),
    kills=faults("window_ignored_for_one_row", "window_one_wider"),
)
def rows_before_the_window_have_no_influence(cached: Subject, case: Case, pick: int) -> None:
    """Rows that lie before every new query's window may be evicted: whatever they hold, out is the same."""
    left = min(case["window"][0] or 0, 2)
    case = case.with_keywords(window=(left, case["window"][1]))
    expect_unmoved(cached, case, spoiled(case, marked(case, evicted_rows), pick))


@law(
    "cached_attention",
    case=cached_attention_cases(least={"B": 2}),
    pick=PICKS,
    source="P64, P70",
    changes=("batch_invariant",),
    kills=faults("reads_the_next_batch_row", "block_of_the_first_row", "first_length_for_all"),
)
def batch_rows_are_independent(cached: Subject, case: Case, pick: int) -> None:
    """A batch row alone, with its own length, gives what it gives among others."""
    b = int(case.random(pick).integers(case.size("B")))
    alone = batch_rows(case, [b])
    if cached.capabilities.batch_invariant:
        expect_same(cached(alone)[0], cached(case)[0][b : b + 1])
    else:
        expect_equal(measure(cached, alone), measure(cached, case)[b : b + 1])


@law(
    "cached_attention",
    case=cached_attention_cases(least={"B": 2}, paged=False),
    pick=PICKS,
    source="P70",
    kills=faults("reads_the_next_batch_row", "first_length_for_all"),
)
def batch_rows_reorder(cached: Subject, case: Case, pick: int) -> None:
    """Batch rows selected, reordered and repeated, as a beam search does, give their own outputs and caches."""
    chosen = [int(b) for b in case.random(pick).integers(0, case.size("B"), case.size("B") + 1)]
    for one, all_rows in zip(cached(batch_rows(case, chosen))[1:], cached(case)[1:], strict=True):
        expect_same(one, all_rows[chosen])
    expect_equal(measure(cached, batch_rows(case, chosen)), measure(cached, case)[chosen])


@law(
    "cached_attention",
    case=cached_attention_cases(paged=True),
    pick=PICKS,
    needs={"block_table"},
    source="corpus item 10",
    kills=faults("block_table_ignored"),
)
def blocks_may_lie_anywhere(cached: Subject, case: Case, pick: int) -> None:
    """Blocks moved elsewhere, and the table with them, give the same outputs and the same caches, moved."""
    order = case.random(pick).permutation(case["k_cache"].shape[0])
    moved = relocated(case, order)
    expect_equal(measure(cached, moved), measure(cached, case))
    for there, here in zip(cached(moved)[1:], cached(case)[1:], strict=True):
        expect_same(there, here[order])


@law(
    "cached_attention",
    case=cached_attention_cases(paged=True),
    needs={"block_table"},
    source="Kwon et al. 2023, section 4.1",
    kills=faults("blocks_and_slots_swapped", "block_start_overwritten"),
)
def pages_hold_the_same_rows(cached: Subject, case: Case) -> None:
    """A cache in blocks, read through its table, gives what the same rows give in one piece."""
    expect_equal(measure(cached, case), measure(cached, unpaged(case)))


@law(
    "cached_attention",
    case=cached_attention_cases(paged=True, filled=True, least={"B": 2}),
    needs={"block_table"},
    source="Kwon et al. 2023, section 4.4",
    kills=faults("shared_blocks_belong_to_one"),
)
def full_blocks_may_be_shared(cached: Subject, case: Case) -> None:
    """Sequences with the same beginning may share the blocks that it fills, as if each had a copy."""
    case = case.with_arrays(lengths=np.full_like(case["lengths"], case["lengths"].max()))
    full = int(case["lengths"][0]) // case["k_cache"].shape[2]
    table = case["block_table"]
    shared = np.concatenate([np.repeat(table[:1, :full], len(table), 0), table[:, full:]], 1)
    copies = {name: case[name].copy() for name in CACHES}
    for cache in copies.values():
        cache[table[:, :full]] = cache[shared[:, :full]]
    if full:
        expect_equal(measure(cached, case.with_arrays(block_table=shared)), measure(cached, case.with_arrays(**copies)))


@law(
    "cached_attention",
    case=cached_attention_cases(grouped=True),
    needs={"grouped_heads"},
    source="P64",
    kills=faults("gqa_tile"),
)
def grouped_heads_equal_repeated_heads(cached: Subject, case: Case) -> None:
    """Each key head serves H/G neighbouring query heads, as if it were repeated for each of them."""
    each = case.size("H") // case.size("G")
    names = ("k_new", "v_new", *CACHES)
    repeated = case.with_arrays(**{name: np.repeat(case[name], each, 1) for name in names})
    expect_equal(measure(cached, case), measure(cached, repeated))


@law(
    "cached_attention",
    case=cached_attention_cases(scale=True),
    factor=choice(2.0, 0.5, 4.0),
    needs={"scale"},
    source="P60",
    kills=faults("scale_ignored"),
)
def scale_is_inverse_temperature(cached: Subject, case: Case, factor: float) -> None:
    """The scale taken c times as large does what queries c times as large do."""
    scale = case["scale"] or 1.0
    louder, scaled = case.with_arrays(q=case["q"] * factor), case.with_keywords(scale=scale * factor)
    expect_equal(measure(cached, scaled), measure(cached, louder.with_keywords(scale=scale)))


@law(
    "cached_attention",
    case=cached_attention_cases(),
    kind="contract",
    needs={"cache_in_place"},
    source="the operation's calling convention",
    relative=False,
    changes=("cache_in_place",),
    kills=faults("copies_declared_in_place"),
)
def writes_the_caches_it_was_given(cached: Subject, case: Case) -> None:
    """Declared to work in place, a call puts the new rows into the given caches and returns these."""
    fresh = case.with_arrays(**{name: np.full_like(case[name], 7.0) for name in ("k_new", "v_new")})
    fresh = fresh.with_arrays(**{name: np.zeros_like(case[name]) for name in CACHES})
    outcome = cached.outcome(fresh)
    for name in CACHES:
        expect(name in outcome.changed, "input kept", f"{name} is as it was before the call, wanted the new rows in it")
        expect(name in outcome.aliased, "not aliased", f"the {name} that came back is another array than the one given")


@law(
    "cached_attention",
    case=cached_attention_cases(),
    pick=PICKS,
    kind="contract",
    needs={"checks_capacity"},
    source="the operation's calling convention",
    relative=False,
    changes=("checks_capacity",),
    kills=faults("overflow_wraps", "overflow_clamped", "overflow_drops"),
)
def too_many_rows_are_refused(cached: Subject, case: Case, pick: int) -> None:
    """More new rows than there is room for are refused with an exception, not stored somewhere else."""
    lengths = case["lengths"].copy()
    lengths[pick % len(lengths)] = capacity(case) - case["q"].shape[2] + 1
    try:
        cached.outcome(case.with_arrays(lengths=lengths), watch=False)
    except (Refused, Broken) as said:
        raises = isinstance(said, Refused) or said.kind == "raised"
        expect(raises, getattr(said, "kind", "accepted"), f"{said}, wanted an exception")
        return
    place = f"lengths[{pick % len(lengths)}] = {lengths[pick % len(lengths)]}"
    rows = f"{lengths[pick % len(lengths)] + case['q'].shape[2]} rows"
    expect(False, "accepted", f"{place}: {rows} were taken, wanted an exception: there is room for {capacity(case)}")


@law(
    "cached_attention",
    case=cached_attention_cases(filled=True),
    pick=PICKS,
    source="P69",
    changes=("leak",),
    kills=faults("stale_rows_seen"),
)
def going_back_leaves_no_trace(cached: Subject, case: Case, pick: int) -> None:
    """A cache that is used and then taken back to shorter lengths, or to 0, serves as one that never was longer."""
    shorter = case["lengths"] * 0 if pick % 2 else case.random(pick).integers(0, case["lengths"] + 1)
    _, keys, values = cached(case)
    back = case.with_arrays(lengths=shorter)
    expect_unmoved(cached, back, back.with_arrays(k_cache=keys, v_cache=values))


@law(
    "cached_attention",
    case=cached_attention_cases(room=1, filled=True),
    pick=PICKS,
    kind="gradient",
    needs={"gradients"},
    source="P50, P52",
    relative=False,
    kills=("multi_head_gradient.py:cached_leaks_backwards", "multi_head_gradient.py:cached_values_detached"),
)
def gradient_reaches_what_is_seen(cached: Subject, case: Case, pick: int) -> None:
    """The last query's gradient is exactly 0 at rows beyond and in other sequences, and reaches the rows it sees."""
    b = int(case.random(pick).integers(case.size("B")))
    case = case.with_keywords(window=None)
    mine = np.zeros((*case["q"].shape[:3], case["v_new"].shape[3]))
    mine[b, :, -1] = 1.0
    found = dict.fromkeys(("v_cache", "k_cache"))
    found |= cached.gradients(case, ("v_new", *(name for name in found if name not in cached.writes)), mine)
    expect(found["v_new"] is not None, "no gradient", f"v_new got none, wanted one of shape {case['v_new'].shape}")
    seen = np.zeros((case["k_cache"].shape[0], case["k_cache"].shape[2]), bool)
    for place in places(case, b, old_rows(case, b)):
        seen[place] = True
    for name in CACHES:
        if found[name] is not None:
            rows = found[name].swapaxes(1, 2)
            expect_same(rows[~seen], np.zeros_like(rows[~seen]), what=f"the gradient of an unseen row of {name} is")
    even = cached.gradients(case.with_arrays(q=np.zeros_like(case["q"])), ("v_new", "v_cache"), mine)
    expect_different(even["v_new"][b], 0.0, what="a new row that is seen has a gradient")
    expect_different(even["v_cache"].swapaxes(1, 2)[seen], 0.0, what="a cached row that is seen has a gradient")
