"""Wrong attentions over packed sequences: one correct implementation with one switch for each mistake.

The variant "correct" has every switch off, and plain attention beside it. Each other variant differs from it
by the mistake that its Fault names and by nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veriformer.declarations import Capabilities, Fault

FRAMEWORK = "numpy"
Window = tuple[int | None, int | None]


def _make(fault: str) -> Callable[..., NDArray]:
    def varlen_attention(
        q: NDArray, k: NDArray, v: NDArray, q_offsets: NDArray, k_offsets: NDArray, *, causal: bool = False,
        scale: float | None = None, window: Window | None = None,
    ) -> NDArray:  # fmt: skip
        if fault == "k_offsets_ignored":
            k_offsets = np.minimum(q_offsets, len(k))
        if fault == "lengths_taken_for_offsets":
            k_offsets = np.append(0, np.diff(k_offsets))
        keys, values = (a[:, _head_map(q.shape[1], k.shape[1], fault)] for a in (_wide(k), _wide(v)))
        factor = _scale(scale, q.shape[2], fault)
        out = np.zeros((*q.shape[:2], v.shape[2]), keys.dtype)
        with np.errstate(all="ignore"):
            for b in range(len(q_offsets) - (2 if fault == "last_sequence_dropped" and len(q_offsets) > 2 else 1)):
                rows = slice(*q_offsets[b : b + 2])
                at, position, last = _keys_of(b, q_offsets, k_offsets, len(k), fault)
                visible = _visible(position, at, last, causal, window, fault, b)
                mine = _wide(q[rows])
                out[rows] = _attend(mine, keys[at], values[at], visible, factor, fault).astype(out.dtype)
        return out.astype(q.dtype)

    varlen_attention.__qualname__ = f"varlen_attention[{fault}]"
    return varlen_attention


def _keys_of(b: int, q_offsets: NDArray, k_offsets: NDArray, count: int, fault: str) -> tuple[NDArray, NDArray, int]:
    """Rows of the keys of sequence b, the positions of its queries among all keys, and the row after its last key."""
    (first, end), (start, stop) = q_offsets[b : b + 2], k_offsets[b : b + 2]
    if fault == "key_start_off_by_one":
        start = max(start - 1, 0)
    if fault == "key_end_off_by_one":
        stop = min(stop + 1, count)
    if fault == "longest_length_for_all":
        stop = min(start + int(np.diff(k_offsets).max()), count)
    if fault == "last_key_of_each_dropped" and stop - start > 1:
        stop -= 1
    if fault == "starts_where_queries_start":
        start, stop = min(first, count), min(first + stop - start, count)
    lead = stop - (end - first)
    if fault == "causal_top_left":
        lead = start
    if fault == "causal_by_packed_position":
        lead = first
    position = np.arange(end - first) + lead
    if fault in ("sequences_see_each_other", "earlier_sequences_seen"):
        start = 0
        stop = count if fault == "sequences_see_each_other" else stop
    return np.arange(start, stop), position, stop


def _visible(
    position: NDArray, at: NDArray, last: int, causal: bool, window: Window | None, fault: str, b: int
) -> NDArray:
    """[Tq,Tk]: may the query see the key."""
    ahead = at - position[:, None]
    if fault == "causal_first_sequence_only" and b:
        causal = False
    if fault == "causal_always":
        causal = True
    limit = {"causal_strict": -1, "causal_plus_one": 1}.get(fault, 0)
    visible = ahead <= limit if causal else np.ones_like(ahead, dtype=bool)
    if window is None or (fault == "window_needs_causal" and not causal):
        return visible
    if fault == "window_from_the_sequence_start":
        ahead = at - (at.min(initial=last) + np.arange(len(position)))[:, None]
    left, right = window[::-1] if fault == "window_swapped" else window
    if left is not None:
        visible = visible & (ahead >= -left - (fault == "window_one_wider"))
    return visible if right is None else visible & (ahead <= right)


def _attend(q: NDArray, k: NDArray, v: NDArray, visible: NDArray, factor: float, fault: str) -> NDArray:
    """Attention of q[Tq,H,D] over k[Tk,H,D], v[Tk,H,Dv]."""
    s = np.einsum("qhd,khd->hqk", q, k) * factor
    s = np.where(visible, s, -np.inf)
    m = s.max(axis=-1, keepdims=True, initial=-np.inf)
    e = np.exp(s - np.where(np.isneginf(m), 0, m))
    total = e.sum(axis=-1, keepdims=True)
    p = e / (total if fault == "empty_row_nan" else np.where(total == 0, 1, total))
    terms = p.transpose(1, 2, 0)[..., None] * v
    return (terms if fault == "nan_leaks" else np.where((visible | (total == 0)[0])[..., None, None], terms, 0)).sum(1)


def _make_skipping(fault: str) -> Callable[..., NDArray]:
    """Faults that show only where a sequence has no rows."""
    correct = _make("correct")

    def varlen_attention(
        q: NDArray, k: NDArray, v: NDArray, q_offsets: NDArray, k_offsets: NDArray, *, causal: bool = False,
        scale: float | None = None, window: Window | None = None,
    ) -> NDArray:  # fmt: skip
        options: dict[str, Any] = {"causal": causal, "scale": scale, "window": window}
        empty = np.flatnonzero((np.diff(q_offsets) == 0) | (np.diff(k_offsets) == 0))
        out = correct(q, k, v, q_offsets, k_offsets, **options)
        if not len(empty):
            return out
        if fault == "empty_sequence_ends_the_loop":
            out[q_offsets[empty[0]] :] = 0
        if fault == "no_keys_gives_nan":
            for b in np.flatnonzero(np.diff(k_offsets) == 0):
                out[slice(*q_offsets[b : b + 2])] = np.nan
        if fault == "empty_sequence_shifts_the_next":
            kept = np.append(k_offsets[:-1][np.diff(q_offsets) > 0], k_offsets[-1])
            return correct(q, k, v, np.unique(q_offsets), kept, **options)
        return out

    varlen_attention.__qualname__ = f"varlen_attention[{fault}]"
    return varlen_attention


def attention(
    q: NDArray,
    k: NDArray,
    v: NDArray,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: Window | None = None,
) -> NDArray:
    """Attention of a batch, as the packed one of its rows; q[B,H,Tq,D], k[B,G,Tk,D], v[B,G,Tk,Dv] -> [B,H,Tq,Dv]."""
    packed = [a.swapaxes(1, 2).reshape(-1, a.shape[1], a.shape[3]) for a in (q, k, v)]
    offsets = [np.arange(len(a) + 1) * a.shape[2] for a in (q, k)]
    out = _make("correct")(*packed, *offsets, causal=causal, scale=scale, window=window)
    return out.reshape(q.shape[0], q.shape[2], *out.shape[1:]).swapaxes(1, 2).copy()


def _head_map(heads: int, groups: int, fault: str) -> NDArray:
    h = np.arange(heads)
    return h % groups if fault == "gqa_tile" else h // (heads // groups)


def _scale(scale: float | None, width: int, fault: str) -> float:
    if fault == "scale_ignored":
        return float(width**-0.5)
    return float(width**-0.5 if scale is None else scale)


def _wide(x: NDArray) -> NDArray:
    return x if x.dtype == np.float64 else x.astype(np.float32)


# law that must accuse: {variant: (where it was seen, what is wrong)}
_TABLE: dict[str, dict[str, tuple[str, str]]] = {
    "sequences-stand-alone": {
        "sequences_see_each_other": ("nanoVLM#204", "every query sees the keys of all sequences"),
        "longest_length_for_all": ("mutation: max_seqlen for the own length", "a short sequence reads into the next"),
        "starts_where_queries_start": ("mutation: one table of starts", "keys are read from the start of the queries"),
        "causal_by_packed_position": ("mutation: j <= i in the packed buffer", "the triangle ignores where keys start"),
        "lengths_taken_for_offsets": ("transformers#44911", "lengths where offsets are due"),
    },
    "other-sequences-have-no-influence": {
        "earlier_sequences_seen": ("mutation: an upper bound without a lower one", "earlier sequences are seen"),
        "key_start_off_by_one": ("mutation: start - 1", "the last key of the sequence before is seen"),
        "key_end_off_by_one": ("mutation: end + 1", "the first key of the next sequence is seen"),
    },
    "every-key-of-the-sequence-counts-once": {
        "last_sequence_dropped": ("mutation: B - 1 sequences walked", "the last sequence stays 0"),
        "last_key_of_each_dropped": ("mutation: an exclusive end taken twice", "the last key is never seen"),
        "causal_strict": ("mutation: j < i for j <= i", "a query does not see its own position"),
        "causal_always": ("transformers#36150", "causal=False has no effect"),
    },
    "k-offsets-are-their-own": {
        "k_offsets_ignored": ("mutation: self-attention assumed", "keys are cut where queries are"),
    },
    "nan-stays-hidden": {
        "nan_leaks": ("pytorch#101967", "a hidden NaN value is multiplied by 0, which is NaN"),
    },
    "causal-is-the-end-of-the-square": {
        "causal_top_left": ("pytorch#103082", "query i of a sequence sees its keys up to i"),
    },
    "future-has-no-influence": {
        "causal_plus_one": ("mutation: the other off-by-one", "one key of the future is seen"),
        "causal_first_sequence_only": ("mutation: one triangle for a batch", "later sequences are not causal"),
    },
    "window-counts-its-keys": {
        "window_one_wider": ("transformers#39408", "one key too many on the left"),
        "window_needs_causal": ("sglang#39300", "the window is ignored unless causal"),
        "window_from_the_sequence_start": ("keras-hub#1738", "the window ignores that queries sit at the end"),
        "window_swapped": ("mutation: (left, right) read as (right, left)", "left and right exchanged"),
    },
    "grouped-heads-equal-repeated-heads": {
        "gqa_tile": ("onnx#7274", "key heads 0 1 0 1 for 0 0 1 1"),
    },
    "one-sequence-is-attention": {
        "scale_ignored": ("mutation: a keyword that goes nowhere", "the scale is always the default"),
    },
    "empty-row-gives-zeros": {
        "empty_row_nan": ("pytorch#41508", "0 / 0 in a row that may see nothing"),
    },
    "vacant-sequences-change-nothing": {
        "empty_sequence_ends_the_loop": ("mutation: break for continue", "sequences after an empty one stay 0"),
        "empty_sequence_shifts_the_next": ("mutation: empty queries dropped without their keys", "keys are shifted"),
        "no_keys_gives_nan": ("flash-attention#2421", "a sequence without keys gives NaN"),
    },
}
FAULTS = {
    variant: Fault("varlen_attention", f"varlen_attention/{law}", source, summary)
    for law, variants in _TABLE.items()
    for variant, (source, summary) in variants.items()
}
_VACANT = ("empty_sequence_ends_the_loop", "empty_sequence_shifts_the_next", "no_keys_gives_nan")
VARIANTS: dict[str, dict[str, Callable[..., Any]]] = {
    variant: {"varlen_attention": (_make_skipping if variant in _VACANT else _make)(variant)}
    for variant in ("correct", *FAULTS)
}
for _variant in ("correct", "scale_ignored"):
    VARIANTS[_variant]["attention"] = attention
_OWN = Capabilities(nonpositive_scale=True, nan_contained=True, zero_lengths=True, rounds_probabilities=False)
CAPABILITIES = {"varlen_attention": _OWN, "attention": Capabilities(rounds_probabilities=False)}
