"""Wrong attentions of the fused kind: mistakes of tiling, of tails, of strides and of kept buffers.

One correct implementation walks the keys in blocks with running statistics; each variant other than
"correct" differs from it by the mistake that its Fault names. Keywords: mask, causal and scale.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from veriformer.declarations import Capabilities, Fault

FRAMEWORK = "numpy"
BLOCK = 4
CAPABILITIES = {"attention": Capabilities(blocks=(BLOCK,), nonpositive_scale=True, rounds_probabilities=False)}
_CAUSAL_BUFFER = {"length": 0}


def _make(fault: str) -> Callable[..., NDArray]:
    def attention(
        q: NDArray,
        k: NDArray,
        v: NDArray,
        *,
        mask: NDArray | None = None,
        causal: bool = False,
        scale: float | None = None,
    ) -> NDArray:
        factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
        with np.errstate(all="ignore"):
            return _attention(*(_wide(_read(x, fault)) for x in (q, k, v)), mask, causal, factor, fault).astype(q.dtype)

    attention.__qualname__ = f"attention_tiled[{fault}]"
    return attention


def _attention(
    q: NDArray, k: NDArray, v: NDArray, mask: NDArray | None, causal: bool, scale: float, fault: str
) -> NDArray:
    each = q.shape[1] // k.shape[1]
    key, value = np.repeat(k, each, axis=1), np.repeat(v, each, axis=1)
    width = q.shape[-1] // BLOCK * BLOCK if fault == "score_tail_dropped" else q.shape[-1]
    logits = q[..., :width] @ key[..., :width].swapaxes(-1, -2) * scale
    seen = _visible(logits.shape, mask, causal, fault)
    out = _walk(np.where(seen, logits, -np.inf), value, seen, fault)
    if fault == "value_tail_dropped":
        out[..., out.shape[-1] // BLOCK * BLOCK :] = 0
    if fault == "empty_row_blanks_its_head":
        out = np.where(seen.any(axis=-1).all(axis=-1)[..., None, None], out, 0)
    return out


def _read(x: NDArray, fault: str) -> NDArray:
    if fault == "reads_as_contiguous" and not x.flags.c_contiguous:
        base = x
        while isinstance(base.base, np.ndarray):
            base = base.base
        start = (x.__array_interface__["data"][0] - base.__array_interface__["data"][0]) // x.itemsize
        # np.resize repeats a buffer that is too short, where the real mistake reads foreign memory.
        return np.resize(base.ravel(order="K")[max(start, 0) :], x.shape)
    if fault == "inner_stride_assumed" and x.strides[-1] > x.itemsize:
        return np.lib.stride_tricks.as_strided(x, strides=(*x.strides[:-1], x.itemsize))
    return x


def _visible(shape: tuple[int, ...], mask: NDArray | None, causal: bool, fault: str) -> NDArray:
    queries, keys = shape[2:]
    longest = keys
    if fault == "causal_buffer_kept":
        longest, _CAUSAL_BUFFER["length"] = max(_CAUSAL_BUFFER["length"], keys), keys
    ahead = np.arange(keys) - (np.arange(queries)[:, None] + longest - queries)
    visible = ahead <= 0 if causal else np.ones_like(ahead, dtype=bool)
    return np.broadcast_to(visible if mask is None else visible & mask, shape)


def _walk(logits: NDArray, value: NDArray, seen: NDArray, fault: str) -> NDArray:
    """Softmax times value with running maximum m, denominator s and output o over blocks of keys."""
    keys = logits.shape[-1]
    o, s = np.zeros((*logits.shape[:3], value.shape[-1]), logits.dtype), np.zeros_like(logits[..., :1])
    m = np.full_like(s, -np.inf)
    for start in range(0, keys - keys % BLOCK if fault == "tail_dropped" else keys, BLOCK):
        span = slice(start, start + BLOCK)
        block = logits[..., span]
        if fault == "block_skipped_if_any_hidden":
            block = np.where(seen[..., span].all(axis=-1, keepdims=True), block, -np.inf)
        if fault == "tail_counts_phantom_keys" and block.shape[-1] < BLOCK:
            phantoms = np.zeros((*block.shape[:-1], BLOCK - block.shape[-1]), block.dtype)
            block = np.concatenate([block, phantoms], axis=-1)
        new = np.maximum(m, block.max(axis=-1, keepdims=True))
        safe = new if fault == "first_block_unguarded" else np.where(np.isneginf(new), 0, new)
        e, fade = np.exp(block - safe), np.exp(m - safe)
        part = e[..., : value[..., span, :].shape[-2]] @ value[..., span, :]
        o = o * (1 if fault == "nothing_rescaled" else fade) + part
        s = s * (1 if fault in ("nothing_rescaled", "denominator_not_rescaled") else fade)
        s, m = s + e.sum(axis=-1, keepdims=True), new
    s = np.broadcast_to(s[:1], s.shape) if fault == "denominator_of_first_sample" else s
    return o / np.where(s == 0, 1, s)


def _wide(x: NDArray) -> NDArray:
    return x if x.dtype == np.float64 else x.astype(np.float32)


# law that must accuse: {variant: (where it was seen, what is wrong)}
_TABLE: dict[str, dict[str, tuple[str, str]]] = {
    "visible-keys-have-influence": {
        "tail_dropped": ("pytorch#159247", "a last block that is not full is skipped"),
    },
    "hidden-equals-deleted": {
        "block_skipped_if_any_hidden": ("mutation: any for all in a block skip", "one hidden key hides its block"),
    },
    "low-logits-keep-their-mass": {
        "tail_counts_phantom_keys": ("pytorch#169222", "a last block counts absent keys as score 0"),
    },
    "leading-keys-hidden": {
        "first_block_unguarded": ("pytorch#109517", "-inf minus -inf when the first block is hidden"),
    },
    "permutation-equivariance": {
        "nothing_rescaled": ("mutation: a growing maximum forgotten", "earlier blocks keep the old maximum"),
    },
    "affine-in-values": {
        "denominator_not_rescaled": ("mutation: half of the rescaling", "the denominator keeps the old maximum"),
    },
    "single-visible-key-gives-its-value": {
        "value_tail_dropped": ("vllm#34570", "value widths are written in fours; the rest stays 0"),
    },
    "equals-the-reference": {
        "score_tail_dropped": ("vllm#34570", "widths are read in fours; the rest of q and k is not"),
    },
    "layout-changes-nothing": {
        "reads_as_contiguous": ("pytorch#181133", "strided arrays are read as packed"),
        "inner_stride_assumed": ("pytorch#187506", "the last axis is read with stride 1"),
    },
    "batch-rows-are-independent": {
        "denominator_of_first_sample": ("TransformerEngine#3216", "row statistics of sample 0 are reused"),
    },
    "empty-row-leaves-others-alone": {
        "empty_row_blanks_its_head": ("mutation: early exit for a whole tile", "one empty row zeroes its head"),
    },
    "history-changes-nothing": {
        "causal_buffer_kept": ("x-transformers#90", "the triangle of a longer previous call is cut short"),
    },
}
FAULTS = {
    variant: Fault(operation="attention", law=f"attention/{law}", source=source, summary=summary)
    for law, variants in _TABLE.items()
    for variant, (source, summary) in variants.items()
}
VARIANTS = {variant: {"attention": _make(variant)} for variant in ("correct", *FAULTS)}
