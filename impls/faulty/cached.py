"""Wrong attentions over a cache: one correct implementation with one switch for each mistake.

The variant "correct" has every switch off. Each other variant differs from it by the mistake that its Fault
names and by nothing else. Rows of a sequence are reached through a table of blocks; without one, each batch
row is a block of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veriformer.declarations import Capabilities, Fault

FRAMEWORK = "numpy"
Window = tuple[int | None, int | None]


@dataclass(frozen=True)
class _Options:
    causal: bool
    scale: float
    window: Window | None
    fault: str


def _make(fault: str) -> Callable[..., tuple[NDArray, NDArray, NDArray]]:
    kept: dict[Any, NDArray] = {}

    def cached_attention(
        q: NDArray, k_new: NDArray, v_new: NDArray, k_cache: NDArray, v_cache: NDArray, lengths: NDArray, *,
        causal: bool = True, scale: float | None = None, window: Window | None = None,
        block_table: NDArray | None = None,
    ) -> tuple[NDArray, NDArray, NDArray]:  # fmt: skip
        factor = q.shape[3] ** -0.5 if scale is None or fault == "scale_ignored" else float(scale)
        o = _Options(causal, factor, window, fault)
        table = np.arange(len(q))[:, None] if block_table is None else block_table
        if fault == "block_table_ignored":
            table = np.arange(table.size).reshape(table.shape)
        lengths = _lengths(lengths, q.shape[2], k_cache.shape[2] * table.shape[1], o)
        if fault == "lengths_of_the_first_call":
            lengths = kept.setdefault(lengths.shape, lengths)
        k_cache, v_cache = k_cache.copy(), v_cache.copy()
        out = np.zeros((*q.shape[:3], v_cache.shape[3]), _wide(q).dtype)
        with np.errstate(all="ignore"):
            for b in range(len(q)):
                new = (
                    k_new[b],
                    k_new[b] if fault == "values_from_the_keys" and k_new.shape == v_new.shape else v_new[b],
                )
                out[b] = _row(b, _wide(q[b]), new, (k_cache, v_cache), table, int(lengths[b]), o)
        if fault == "clears_what_lies_beyond" and block_table is None:
            for b, length in enumerate(lengths):
                k_cache[b, :, length + q.shape[2] :] = 0
        return out.astype(q.dtype), k_cache, v_cache

    cached_attention.__qualname__ = f"cached_attention[{fault}]"
    return cached_attention


def _lengths(lengths: NDArray, new: int, capacity: int, o: _Options) -> NDArray:
    """The valid rows of each batch row. Raises ValueError where the new ones do not fit."""
    if o.fault == "overflow_clamped":
        return np.minimum(lengths, capacity - new)
    if lengths.max() + new > capacity and o.fault not in ("overflow_wraps", "overflow_drops"):
        raise ValueError(f"lengths: got {lengths.max()} rows beside {new} new ones, wanted at most {capacity}")
    return {
        "first_length_for_all": np.full_like(lengths, lengths[0]),
        "longest_length_for_all": np.full_like(lengths, lengths.max()),
        "lengths_counted_from_one": np.maximum(lengths - 1, 0),
    }.get(o.fault, lengths)


def _row(
    b: int, q: NDArray, new: tuple[NDArray, NDArray], caches: tuple[NDArray, NDArray], table: NDArray,
    length: int, o: _Options,
) -> NDArray:  # fmt: skip
    """The new rows of one sequence written, then its queries q[H,m,D] over what they see."""
    size, fault = caches[0].shape[2], o.fault
    total, capacity = length + q.shape[1], size * table.shape[1]
    at = np.arange(length, total)
    if fault == "written_one_too_far":
        at = np.minimum(at + 1, capacity - 1)
    if fault == "written_backwards":
        at = at[::-1]
    if fault == "overflow_wraps":
        at = at % capacity
    if fault == "overflow_drops":
        total = min(total, capacity)
        at, new = at[at < capacity], (new[0][:, : capacity - length], new[1][:, : capacity - length])
    before = [_read(cache, b, table, capacity, fault) for cache in caches]
    for cache, rows in zip(caches, new, strict=True):
        _write(cache, b, table, at, rows, fault)
    k, v = before if fault == "new_rows_after_attending" else [_read(c, b, table, capacity, fault) for c in caches]
    if fault == "reads_the_next_batch_row":
        v = _read(caches[1], (b + 1) % len(table), table, capacity, fault)
    return _attend(q, k, v, length, total, o)


def _place(b: int, table: NDArray, row: NDArray, size: int, fault: str) -> tuple[NDArray, NDArray]:
    """Block and slot of each row of a sequence."""
    block, slot = row // size, row % size
    if fault == "blocks_and_slots_swapped" and table.shape[1] > 1:
        block, slot = row % table.shape[1], np.minimum(row // table.shape[1], size - 1)
    if fault == "block_of_the_first_row" and len(table) > 1:
        b = 0
    blocks = table[b, block]
    if fault == "shared_blocks_belong_to_one" and b:
        blocks = np.where(np.isin(blocks, table[:b]), table[b].max(), blocks)
    return blocks, slot


def _read(cache: NDArray, b: int, table: NDArray, capacity: int, fault: str) -> NDArray:
    """All rows of a sequence, [G,C,width]."""
    block, slot = _place(b, table, np.arange(capacity), cache.shape[2], fault)
    return _wide(cache[block, :, slot]).swapaxes(0, 1)


def _write(cache: NDArray, b: int, table: NDArray, at: NDArray, rows: NDArray, fault: str) -> None:
    block, slot = _place(b, table, at, cache.shape[2], fault)
    if fault == "block_start_overwritten" and table.shape[1] > 1:
        slot = np.arange(len(slot)) % cache.shape[2]
    cache[block, :, slot] = rows.swapaxes(0, 1)
    if fault == "rounds_what_it_holds":
        cache[b] = cache[b].astype(np.float16).astype(cache.dtype)
    if fault == "slot_zero_overwritten":
        cache[block[0], :, 0] = rows[:, 0]


def _attend(q: NDArray, k: NDArray, v: NDArray, length: int, total: int, o: _Options) -> NDArray:
    """q[H,m,D], which stand at length + i, over k[G,C,D], v[G,C,Dv], of which the first `total` rows count."""
    fault, h = o.fault, np.arange(len(q))
    heads = h % len(k) if fault == "gqa_tile" else h // (len(q) // len(k))
    visible = _visible(q.shape[1], k.shape[1], length, total, o)
    s = q @ k[heads].swapaxes(-1, -2) * o.scale
    if fault == "stale_rows_are_finite":
        s = np.where(np.arange(k.shape[1]) < total, s, -1.0)
        s = np.where(visible | (np.arange(k.shape[1]) >= total), s, -np.inf)
    else:
        s = np.where(visible, s, -np.inf)
    m = s.max(axis=-1, keepdims=True)
    e = np.exp(s - np.where(np.isneginf(m), 0, m))
    p = e / np.where((total := e.sum(axis=-1, keepdims=True)) == 0, 1, total)
    terms = p[..., None] * v[heads][:, None]
    return (terms if fault in ("nan_leaks", "stale_rows_are_finite") else np.where(visible[..., None], terms, 0)).sum(
        -2
    )


def _visible(new: int, capacity: int, length: int, total: int, o: _Options) -> NDArray:
    """[m,C]: may new query i see row j."""
    fault, j = o.fault, np.arange(capacity)
    start = {"chunk_top_left": 0, "positions_of_the_longest": capacity - new}.get(fault, length)
    position = np.full(new, start) if fault == "chunk_position_constant" else start + np.arange(new)
    ahead = j - position[:, None]
    causal = o.causal
    if fault == "chunk_sees_its_future" and new > 1:
        causal = False
    if fault == "causal_only_when_empty":
        causal = causal and length == 0
    if fault == "causal_always":
        causal = True
    limit = {"causal_strict": -1, "causal_plus_one": 1}.get(fault, 0)
    visible = (ahead <= limit if causal else np.ones_like(ahead, dtype=bool)) & (j < total)
    if fault == "stale_rows_seen":
        visible = ahead <= 0 if causal and new > 1 else np.ones_like(visible)
    if fault == "cached_rows_forgotten":
        visible = visible & (j >= length)
    return visible & _in_window(ahead, j, length, total, o)


def _in_window(ahead: NDArray, j: NDArray, length: int, total: int, o: _Options) -> NDArray:
    everything = np.ones_like(ahead, dtype=bool)
    if o.window is None or (o.fault == "window_ignored_for_one_row" and len(ahead) == 1):
        return everything
    left, right = o.window
    if left is not None:
        left += {"window_one_wider": 1, "window_one_narrower": -1}.get(o.fault, 0)
    if o.fault == "window_evicts_before_attending" and left is not None:
        return everything & (j >= total - 1 - left) & (ahead <= (np.inf if right is None else right))
    if o.fault == "window_from_the_chunk_start":
        ahead = j - np.arange(len(ahead))[:, None]
    if o.fault == "window_only_in_the_cache" and left is not None:
        return everything & ((ahead >= -left) | (j >= length)) & (ahead <= (np.inf if right is None else right))
    everything = everything if left is None else everything & (ahead >= -left)
    return everything if right is None else everything & (ahead <= right)


def _wide(x: NDArray) -> NDArray:
    return x if x.dtype == np.float64 else x.astype(np.float32)


# law that must accuse: {variant: (where it was seen, what is wrong)}
_TABLE: dict[str, dict[str, tuple[str, str]]] = {
    "chunks-make-no-difference": {
        "chunk_top_left": ("LLMs-from-scratch#697", "the triangle of a chunk starts at key 0"),
        "chunk_sees_its_future": ("TinyLLM#17", "a chunk of several rows is not causal within itself"),
        "causal_only_when_empty": ("TinyLLM#17", "causal only where the cache was empty"),
        "chunk_position_constant": ("semantics 4.15", "all queries of a chunk stand where the first does"),
        "window_evicts_before_attending": ("semantics 3.7", "early queries miss keys that the last one evicts"),
        "window_only_in_the_cache": ("mutation: new rows are always seen", "no window within the chunk"),
        "new_rows_after_attending": ("mutation: append after attending", "the new rows are not seen"),
    },
    "new-rows-are-stored": {
        "written_one_too_far": ("mutation: length + 1", "new rows start one row too late"),
        "written_backwards": ("mutation: a reversed index", "the new rows lie in reverse order"),
        "first_length_for_all": ("reasoning-from-scratch#33", "every batch row is as long as the first"),
        "longest_length_for_all": ("unsloth#3699", "every batch row is as long as the longest"),
        "lengths_counted_from_one": ("mutation: last valid row for length", "the last valid row is overwritten"),
        "values_from_the_keys": ("transformers#34232", "the value cache gets the keys"),
    },
    "other-rows-stay": {
        "slot_zero_overwritten": ("mutation: slot 0 used as a scratch", "the first slot of the block changes"),
        "block_start_overwritten": ("mutation: slots counted in the chunk", "a chunk goes to the block's start"),
        "rounds_what_it_holds": ("mutation: a cache of lower precision", "old rows are rounded once more"),
        "clears_what_lies_beyond": ("mutation: a tail zeroed for safety", "free slots are overwritten"),
    },
    "rows-beyond-have-no-influence": {
        "stale_rows_seen": ("transformers#45940", "the whole capacity is attended"),
        "stale_rows_are_finite": ("mutation: a finite logit for free slots", "free slots keep some weight"),
    },
    "nan-beyond-stays-there": {
        "nan_leaks": ("pytorch#101967", "NaN in a free slot is multiplied by 0, which is NaN"),
    },
    "every-row-counts-once": {
        "causal_plus_one": ("mutation: the other off-by-one", "the row after its own is seen"),
        "causal_strict": ("mutation: j < i for j <= i", "a query does not see its own row"),
        "causal_always": ("transformers#36150", "causal=False has no effect"),
        "cached_rows_forgotten": ("mutation: attention over the chunk alone", "cached rows are not seen"),
        "positions_of_the_longest": ("mutation: queries at the end of the buffer", "positions ignore the length"),
    },
    "window-counts-its-rows": {
        "window_one_wider": ("mlx-lm#390", "one key too many"),
        "window_one_narrower": ("transformers#37574", "the oldest key leaves one step early"),
        "window_from_the_chunk_start": ("keras-hub#1738", "the window is counted in the chunk"),
    },
    "batch-rows-are-independent": {
        "reads_the_next_batch_row": ("mutation: batch index off by one", "values of the next batch row"),
        "block_of_the_first_row": ("mutation: one block table for all", "every batch row uses the first one's blocks"),
    },
    "blocks-may-lie-anywhere": {
        "block_table_ignored": ("llama.cpp#12253", "blocks are taken in the order in which they lie"),
    },
    "pages-hold-the-same-rows": {
        "blocks_and_slots_swapped": ("mutation: div and mod exchanged", "row t is slot t div P of block t mod P"),
    },
    "full-blocks-may-be-shared": {
        "shared_blocks_belong_to_one": (
            "mutation: one owner for each block",
            "only the first row reads a shared block",
        ),
    },
    "rows-before-the-window-have-no-influence": {
        "window_ignored_for_one_row": (
            "mutation: a decode kernel without window",
            "decoding one row ignores the window",
        ),
    },
    "grouped-heads-equal-repeated-heads": {
        "gqa_tile": ("onnx#7274", "key heads 0 1 0 1 for 0 0 1 1"),
    },
    "scale-is-inverse-temperature": {
        "scale_ignored": ("mutation: a keyword that goes nowhere", "the scale is always the default"),
    },
    "too-many-rows-are-refused": {
        "overflow_wraps": ("mutation: a ring buffer nobody asked for", "rows beyond the end overwrite the first"),
        "overflow_clamped": ("mutation: an index clamped for safety", "the last rows are overwritten"),
        "overflow_drops": ("mutation: out of range writes ignored", "rows that do not fit are lost"),
    },
    "writes-the-caches-it-was-given": {
        "copies_declared_in_place": (
            "mutation: a copy where in place is promised",
            "the given caches stay as they were",
        ),
    },
    "equals-the-reference": {
        "lengths_of_the_first_call": ("transformers#48509", "the lengths of an earlier call are kept"),
    },
}
FAULTS = {
    variant: Fault("cached_attention", f"cached_attention/{law}", source, summary)
    for law, variants in _TABLE.items()
    for variant, (source, summary) in variants.items()
}
VARIANTS: dict[str, dict[str, Callable[..., Any]]] = {
    variant: {"cached_attention": _make(variant)} for variant in ("correct", *FAULTS)
}
_PLAIN = Capabilities(nonpositive_scale=True, nan_contained=True, rounds_probabilities=False)
CAPABILITIES = {
    "cached_attention": _PLAIN,
    "copies_declared_in_place": {"cached_attention": replace(_PLAIN, cache_in_place=True)},
}
