"""Attention and its surroundings, in plain NumPy: with projections, over packed sequences, over a cache.

float64 and float32 are computed in their own dtype; bfloat16 (of ml_dtypes) and float16 are widened
to float32 and rounded once at the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veriformer.declarations import DTYPES, Capabilities

FRAMEWORK = "numpy"
Params = Mapping[str, NDArray]
Window = tuple[int | None, int | None]
_COMMON = Capabilities(
    dtypes=DTYPES,
    nan_contained=True,
    intermediate={"float64": "float64", "default": "float32"},
    rounds_probabilities=False,
    recomputes_probabilities=False,
)
_PACKED = replace(_COMMON, nonpositive_scale=True, zero_lengths=True)
_SCALED = replace(_COMMON, nonpositive_scale=True)
CAPABILITIES = {
    "attention": _SCALED,
    "multi_head_attention": _COMMON,
    "varlen_attention": _PACKED,
    "cached_attention": _SCALED,
}


def attention(
    q: NDArray,
    k: NDArray,
    v: NDArray,
    *,
    mask: NDArray | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: Window | None = None,
) -> NDArray:
    """Scaled dot-product attention, as the others here use it.

    q[B,H,Tq,D], k[B,G,Tk,D], v[B,G,Tk,Dv] -> [B,H,Tq,Dv]
    softmax(q k^T scale) v over the keys a row may see
    Source: Vaswani et al. 2017, section 3.2.1. A row that may see nothing gives zeros.
    """
    visible = _visible(q.shape[2], k.shape[2], causal, window)
    factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
    visible = visible if mask is None else visible & mask
    return _grouped(*(_wide(a) for a in (q, k, v)), visible, factor).astype(q.dtype)


def multi_head_attention(
    x: NDArray, memory: NDArray, params: Params, *, heads: int, mask: NDArray | None = None, causal: bool = False
) -> NDArray:
    """Attention of several heads, each with its own projection of x and memory.

    x[B,Tq,d], memory[B,Tk,d], params: wq[d,H*D], wk[d,G*D], wv[d,G*Dv], wo[H*Dv,d] and perhaps biases -> [B,Tq,d]
    concat_h(softmax(q_h k_g^T D^-1/2) v_g) wo + bo, q = x wq + bq, k and v likewise of memory
    Source: Vaswani et al. 2017, section 3.2.2. A row that may see nothing gives bo.
    """
    w = {name: _wide(array) for name, array in params.items()}
    q, k, v = _projected(_wide(x), _wide(memory), w, heads)
    visible = _visible_heads(q, k, mask, causal)
    mixed = _joined(_mix(_weights(q, k, visible, q.shape[-1] ** -0.5), v, visible))
    return _linear(mixed, w, "o").astype(x.dtype)


def multi_head_attention_vjp(
    cotangent: NDArray,
    x: NDArray,
    memory: NDArray,
    params: Params,
    *,
    heads: int,
    mask: NDArray | None = None,
    causal: bool = False,
) -> tuple[Any, ...]:
    """The gradients of multi_head_attention, written out.

    cotangent[B,Tq,d] -> those of x, memory and params (a dict), and None for a mask
    ds = p (dp - sum p dp), dq = ds k D^-1/2, dk = ds^T q D^-1/2, dv = p^T do; then through the projections
    Source: Dao et al. 2022, appendix B.2. A row that may see nothing passes nothing on.
    """
    w = {name: _wide(array) for name, array in params.items()}
    inputs, g = {"q": _wide(x), "k": _wide(memory), "v": _wide(memory)}, _wide(cotangent)
    q, k, v = _projected(inputs["q"], inputs["k"], w, heads)
    visible, scale = _visible_heads(q, k, mask, causal), q.shape[-1] ** -0.5
    p = _weights(q, k, visible, scale)
    grads = {"wo": _outer(_joined(p @ v), g), "bo": g.sum((0, 1))}
    do = _split(g @ w["wo"].T, heads)
    dp = do @ v.swapaxes(-1, -2)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) * scale
    groups = w["wk"].shape[1] // q.shape[-1]
    found = {"q": ds @ k, "k": _summed(ds.swapaxes(-1, -2) @ q, groups), "v": _summed(p.swapaxes(-1, -2) @ do, groups)}
    for name, each in found.items():
        each = _joined(each)
        grads["w" + name], grads["b" + name] = _outer(inputs[name], each), each.sum((0, 1))
        found[name] = each @ w["w" + name].T
    grads = {name: grads[name].astype(array.dtype) for name, array in params.items()}
    given = (found["q"].astype(x.dtype), (found["k"] + found["v"]).astype(memory.dtype), grads)
    return given if mask is None else (*given, None)


def varlen_attention(
    q: NDArray,
    k: NDArray,
    v: NDArray,
    q_offsets: NDArray,
    k_offsets: NDArray,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: Window | None = None,
) -> NDArray:
    """Attention within each of several sequences that are packed one after another.

    q[Nq,H,D], k[Nk,G,D], v[Nk,G,Dv], q_offsets[B+1], k_offsets[B+1] -> [Nq,H,Dv]
    rows q_offsets[b] to q_offsets[b+1] - 1 see rows k_offsets[b] to k_offsets[b+1] - 1
    Source: Dao et al., the flash-attention library, flash_attn_varlen_func. A sequence may be empty;
    a row that may see nothing gives zeros.
    """
    out = np.zeros((*q.shape[:2], v.shape[-1]), _wide(q).dtype)
    factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
    for b in range(len(q_offsets) - 1):
        rows, keys = slice(*q_offsets[b : b + 2]), slice(*k_offsets[b : b + 2])
        one = [_wide(a).swapaxes(0, 1)[None] for a in (q[rows], k[keys], v[keys])]
        visible = _visible(one[0].shape[2], one[1].shape[2], causal, window)
        out[rows] = _grouped(*one, visible, factor)[0].swapaxes(0, 1)
    return out.astype(q.dtype)


def cached_attention(
    q: NDArray,
    k_new: NDArray,
    v_new: NDArray,
    k_cache: NDArray,
    v_cache: NDArray,
    lengths: NDArray,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: Window | None = None,
    block_table: NDArray | None = None,
) -> tuple[NDArray, NDArray, NDArray]:
    """New keys and values written behind the valid rows of a cache, then attention over all of them.

    q[B,H,m,D], k_new[B,G,m,D], v_new[B,G,m,Dv], caches [B,G,C,D] and [B,G,C,Dv], lengths[B]
    -> (out[B,H,m,Dv], k_cache, v_cache); with block_table[B,P] the caches are [blocks,G,S,..]
    row lengths[b] + i = new row i; query i, at that position, sees the rows up to it (causal) or all
    Source: Kwon et al. 2023 (PagedAttention), section 4.1. The given caches stay as they are.
    Raises ValueError where lengths[b] + m exceeds the capacity.
    """
    k_cache, v_cache = k_cache.copy(), v_cache.copy()
    new, slots = q.shape[2], k_cache.shape[2]
    capacity = slots if block_table is None else slots * block_table.shape[1]
    if int(lengths.max(initial=0)) + new > capacity:
        raise ValueError(f"lengths: got {int(lengths.max())} rows beside {new} new ones, wanted at most {capacity}")
    out = np.empty((*q.shape[:3], v_cache.shape[-1]), _wide(q).dtype)
    factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
    for b, length in enumerate(lengths):
        total = int(length) + new
        place = _places(b, total, slots, block_table)
        for cache, rows in ((k_cache, k_new), (v_cache, v_new)):
            cache[place[0][length:], :, place[1][length:]] = rows[b].swapaxes(0, 1)
        k, v = (_wide(cache[place[0], :, place[1]]).swapaxes(0, 1)[None] for cache in (k_cache, v_cache))
        out[b] = _grouped(_wide(q[b : b + 1]), k, v, _visible(new, total, causal, window), factor)[0]
    return out.astype(q.dtype), k_cache, v_cache


def _places(b: int, total: int, slots: int, block_table: NDArray | None) -> tuple[NDArray, NDArray]:
    """Where rows 0 to total - 1 of batch row b lie: the cache's first axis, and the slot in it."""
    row = np.arange(total)
    if block_table is None:
        return np.full(total, b), row
    return block_table[b, row // slots], row % slots


def _projected(x: NDArray, memory: NDArray, w: Params, heads: int) -> tuple[NDArray, NDArray, NDArray]:
    """q[B,H,Tq,D], and k[B,H,Tk,D], v[B,H,Tk,Dv] repeated for each query head."""
    width = w["wq"].shape[1] // heads
    groups = w["wk"].shape[1] // width
    q = _split(_linear(x, w, "q"), heads)
    k, v = (_split(_linear(memory, w, name), groups) for name in "kv")
    return q, np.repeat(k, heads // groups, 1), np.repeat(v, heads // groups, 1)


def _linear(rows: NDArray, w: Params, name: str) -> NDArray:
    y = rows @ w["w" + name]
    return y + w["b" + name] if "b" + name in w else y


def _split(rows: NDArray, heads: int) -> NDArray:
    """[B,T,H*D] -> [B,H,T,D]: head h is columns h*D to (h+1)*D - 1."""
    return rows.reshape(*rows.shape[:2], heads, -1).swapaxes(1, 2)


def _joined(rows: NDArray) -> NDArray:
    """[B,H,T,D] -> [B,T,H*D], the heads in order."""
    rows = rows.swapaxes(1, 2)
    return rows.reshape(*rows.shape[:2], -1)


def _visible_heads(q: NDArray, k: NDArray, mask: NDArray | None, causal: bool) -> NDArray:
    visible = _visible(q.shape[2], k.shape[2], causal, None)
    return np.broadcast_to(visible if mask is None else visible & mask, (*q.shape[:3], k.shape[2]))


def _visible(query_length: int, key_length: int, causal: bool, window: Window | None) -> NDArray:
    """[Tq,Tk]: may query i, which sits at i + Tk - Tq, see key j."""
    ahead = np.arange(key_length) - (np.arange(query_length)[:, None] + key_length - query_length)
    left, right = window if window is not None else (None, None)
    visible = ahead <= 0 if causal else np.ones_like(ahead, dtype=bool)
    visible = visible if left is None else visible & (ahead >= -left)
    return visible if right is None else visible & (ahead <= right)


def _grouped(q: NDArray, k: NDArray, v: NDArray, visible: NDArray, scale: float) -> NDArray:
    """Attention of q[B,H,Tq,D] over k[B,G,Tk,D], v[B,G,Tk,Dv], where visible spreads to [B,H,Tq,Tk]."""
    k, v = (np.repeat(a, q.shape[1] // k.shape[1], 1) for a in (k, v))
    visible = np.broadcast_to(visible, (*q.shape[:3], k.shape[2]))
    return _mix(_weights(q, k, visible, scale), v, visible)


def _weights(q: NDArray, k: NDArray, visible: NDArray, scale: float) -> NDArray:
    """The softmax of the visible scores; a row without any is all 0."""
    with np.errstate(invalid="ignore", over="ignore"):
        s = np.where(visible, q @ k.swapaxes(-1, -2) * scale, -np.inf)
    top = s.max(axis=-1, keepdims=True, initial=-np.inf)
    e = np.exp(s - np.where(np.isneginf(top), 0, top))
    total = e.sum(axis=-1, keepdims=True)
    return e / np.where(total == 0, 1, total)


def _mix(weights: NDArray, value: NDArray, visible: NDArray) -> NDArray:
    """weights @ value, in which a hidden value takes no part even if it is NaN (0 * NaN is NaN)."""
    finite = np.isfinite(value)
    out = weights @ np.where(finite, value, 0)
    if finite.all():
        return out
    with np.errstate(invalid="ignore"):
        strange = visible[..., None] & ~finite[..., None, :, :]
        return out + np.where(strange, weights[..., None] * value[..., None, :, :], 0).sum(axis=-2)


def _outer(rows: NDArray, others: NDArray) -> NDArray:
    """sum over batch and time of rows[B,T,a] others[B,T,b] -> [a,b]."""
    return rows.reshape(-1, rows.shape[-1]).T @ others.reshape(-1, others.shape[-1])


def _summed(rows: NDArray, groups: int) -> NDArray:
    """[B,H,T,D] -> [B,G,T,D], summed over the query heads of each group."""
    return rows.reshape(rows.shape[0], groups, -1, *rows.shape[2:]).sum(2)


def _wide(x: NDArray) -> NDArray:
    return x if x.dtype == np.float64 else x.astype(np.float32)
