"""The same operations walked block by block with running statistics, as fused kernels do it.

Nothing ever holds a whole row of scores: each block of keys updates a running maximum, a running
denominator and a running output. Blocks are tiny, so that short inputs cross their edges.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from veriformer.declarations import DTYPES, Capabilities

FRAMEWORK = "numpy"
KEY_BLOCK = 4
QUERY_BLOCK = 3
_WIDENED = {"float64": "float64", "default": "float32"}
_ROW = Capabilities(dtypes=DTYPES, blocks=(KEY_BLOCK,), intermediate=_WIDENED, empty_softmax_row=True)
_NORM = Capabilities(dtypes=DTYPES, blocks=(KEY_BLOCK,), intermediate=_WIDENED)
_ATTENTION = Capabilities(
    dtypes=DTYPES,
    blocks=(QUERY_BLOCK, KEY_BLOCK),
    nonpositive_scale=True,
    nan_contained=True,
    batch_invariant=True,
    intermediate=_WIDENED,
    rounds_probabilities=False,
)
CAPABILITIES = {
    "softmax": _ROW,
    "log_softmax": _ROW,
    "logsumexp": _ROW,
    "layer_norm": _NORM,
    "attention": _ATTENTION,
    "attention_with_lse": _ATTENTION,
}


def softmax(x: NDArray, *, axis: int = -1, temperature: float = 1.0) -> NDArray:
    """The softmax of x over one axis, its denominator gathered in one pass over blocks.

    x[...] -> [...]
    p_i = exp((x_i - m) / T) / s, with m and s the running maximum and denominator
    Source: Milakov and Gimelshein 2018, algorithm 3. A row of -inf alone gives zeros.
    """
    z = np.moveaxis(_wide(x), axis, -1) / float(temperature)
    m, s = _running(z)
    p = np.exp(z - m) / np.where(s == 0, 1, s)
    return np.ascontiguousarray(np.moveaxis(p, -1, axis)).astype(x.dtype)


def log_softmax(x: NDArray, *, axis: int = -1) -> NDArray:
    """The logarithm of softmax from the running maximum and denominator.

    x[...] -> [...]
    y_i = (x_i - m) - log s
    Source: Milakov and Gimelshein 2018, algorithm 3. A row of -inf alone gives -inf.
    """
    z = np.moveaxis(_wide(x), axis, -1)
    m, s = _running(z)
    y = (z - m) - np.log(np.where(s == 0, 1, s))
    return np.ascontiguousarray(np.moveaxis(y, -1, axis)).astype(x.dtype)


def logsumexp(x: NDArray, *, axis: int = -1) -> NDArray:
    """The logarithm of the sum of exponentials over one axis, which is dropped.

    x[...] -> [... without axis]
    y = m + log s, with m and s the running maximum and denominator
    Source: Milakov and Gimelshein 2018, algorithm 3. A row of -inf alone gives -inf.
    """
    m, s = _running(np.moveaxis(_wide(x), axis, -1))
    with np.errstate(divide="ignore"):
        return np.asarray((m + np.log(s))[..., 0], dtype=x.dtype)


def layer_norm(x: NDArray, weight: NDArray, bias: NDArray, *, eps: float = 1e-5) -> NDArray:
    """Each row brought to mean 0 and variance near 1; block statistics are merged pairwise.

    x[..., d], weight[d], bias[d] -> [..., d]
    y = weight (x - mean) / sqrt(M2 / d + eps) + bias
    Source: Chan, Golub, LeVeque 1983, equations 1.5. A constant row gives the bias.
    """
    z = _wide(x)
    count, mean, m2 = 0, np.zeros_like(z[..., :1]), np.zeros_like(z[..., :1])
    for start in range(0, z.shape[-1], KEY_BLOCK):
        block = z[..., start : start + KEY_BLOCK]
        size = block.shape[-1]
        block_mean = block.mean(axis=-1, keepdims=True)
        block_m2 = ((block - block_mean) ** 2).sum(axis=-1, keepdims=True)
        step = block_mean - mean
        mean = mean + step * (size / (count + size))
        m2 = m2 + block_m2 + step * step * (count * size / (count + size))
        count += size
    y = _wide(weight) * ((z - mean) / np.sqrt(m2 / count + eps)) + _wide(bias)
    return y.astype(x.dtype)


def attention(
    q: NDArray,
    k: NDArray,
    v: NDArray,
    *,
    mask: NDArray | None = None,
    bias: NDArray | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sink: NDArray | None = None,
) -> NDArray:
    """Scaled dot-product attention, tile by tile.

    q[B,H,Tq,D], k[B,G,Tk,D], v[B,G,Tk,Dv] -> [B,H,Tq,Dv]
    softmax(cap(q k^T scale) + bias) v over the keys a row may see
    Source: Dao et al. 2022, algorithm 1. A row that may see nothing gives zeros.
    """
    return attention_with_lse(
        q, k, v, mask=mask, bias=bias, causal=causal, scale=scale, window=window, softcap=softcap, sink=sink
    )[0]


def attention_with_lse(
    q: NDArray,
    k: NDArray,
    v: NDArray,
    *,
    mask: NDArray | None = None,
    bias: NDArray | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sink: NDArray | None = None,
) -> tuple[NDArray, NDArray]:
    """Attention tile by tile, and the logsumexp of each row's logits, without the sink.

    q[B,H,Tq,D], k[B,G,Tk,D], v[B,G,Tk,Dv] -> out[B,H,Tq,Dv], lse[B,H,Tq]
    m' = max(m, max block), s' = s exp(m - m') + sum exp(block - m'), o' = o exp(m - m') + exp(block - m') v
    Source: Dao et al. 2022, algorithm 1. A row that may see nothing gives zeros and -inf.
    """
    batch, heads, length, _ = q.shape
    wide = np.float64 if q.dtype == np.float64 else np.float32
    out, lse = np.zeros((batch, heads, length, v.shape[-1]), wide), np.full((batch, heads, length), -np.inf, wide)
    shape = (batch, heads, length, k.shape[2])
    whole = tuple(None if a is None else np.broadcast_to(a, shape) for a in (mask, bias))
    for b, h, rows in _tiles(batch, heads, length):
        g = h // (heads // k.shape[1])
        mask_tile, bias_tile = (None if a is None else a[b, h, rows] for a in whole)
        ahead = np.arange(k.shape[2]) - (np.arange(length)[rows, None] + k.shape[2] - length)
        visible = _visible(ahead, causal, window, mask_tile)
        terms = (q.shape[-1] ** -0.5 if scale is None else float(scale), softcap, bias_tile)
        o, m, s = _tile(_wide(q[b, h, rows]), _wide(k[b, g]), _wide(v[b, g]), visible, terms)
        with np.errstate(divide="ignore"):
            lse[b, h, rows] = (m + np.log(s))[:, 0]
        out[b, h, rows] = _normalised(o, m, s, None if sink is None else _wide(sink[h]))
    return out.astype(q.dtype), lse


def _tiles(batch: int, heads: int, length: int) -> Iterator[tuple[int, int, slice]]:
    for b in range(batch):
        for h in range(heads):
            for start in range(0, length, QUERY_BLOCK):
                yield b, h, slice(start, start + QUERY_BLOCK)


def _tile(q: NDArray, k: NDArray, v: NDArray, visible: NDArray, terms: tuple) -> tuple[NDArray, NDArray, NDArray]:
    """Running output, maximum (0 while nothing was seen) and denominator of one tile of queries."""
    o = np.zeros((q.shape[0], v.shape[-1]), q.dtype)
    m, s = np.full((q.shape[0], 1), -np.inf, q.dtype), np.zeros((q.shape[0], 1), q.dtype)
    for start in range(0, k.shape[0], KEY_BLOCK):
        keys = slice(start, start + KEY_BLOCK)
        seen = visible[:, keys]
        if not seen.any():
            continue
        logits = np.where(seen, _logits(q, k[keys], keys, terms), -np.inf)
        new = np.maximum(m, logits.max(axis=-1, keepdims=True))
        safe = np.where(np.isneginf(new), 0, new)
        e, fade = np.exp(logits - safe), np.exp(m - safe)
        with np.errstate(invalid="ignore"):
            parts = np.where(seen[:, :, None], e[:, :, None] * v[None, keys], 0)
        o, s, m = o * fade + parts.sum(axis=1), s * fade + e.sum(axis=-1, keepdims=True), new
    return o, np.where(np.isneginf(m), 0, m), s


def _logits(q: NDArray, k: NDArray, keys: slice, terms: tuple) -> NDArray:
    scale, softcap, bias = terms
    # A product and a sum over the last axis, not a matmul: BLAS picks its order of summation by the
    # number of rows, and a row would then depend on its company.
    with np.errstate(invalid="ignore", over="ignore"):
        logits = (q[:, None, :] * k[None, :, :]).sum(axis=-1) * scale
        logits = logits if softcap is None else float(softcap) * np.tanh(logits / float(softcap))
        return logits if bias is None else logits + _wide(bias[:, keys])


def _visible(ahead: NDArray, causal: bool, window: tuple | None, mask: NDArray | None) -> NDArray:
    """ahead[rows,Tk], how far a key is ahead of the query -> may it be seen."""
    left, right = window if window is not None else (None, None)
    visible = np.ones(ahead.shape, dtype=bool) if mask is None else mask.copy()
    if causal:
        visible &= ahead <= 0
    if left is not None:
        visible &= ahead >= -left
    if right is not None:
        visible &= ahead <= right
    return visible


def _normalised(o: NDArray, m: NDArray, s: NDArray, sink: NDArray | None) -> NDArray:
    """o / (s + exp(sink - m)), moved to the larger of m and sink so that neither overflows."""
    if sink is None:
        return o / np.where(s == 0, 1, s)
    top = np.maximum(np.where(s == 0, sink, m), sink)
    fade = np.where(s == 0, 0, np.exp(np.minimum(m - top, 0)))
    return o * fade / (s * fade + np.exp(sink - top))


def _running(z: NDArray) -> tuple[NDArray, NDArray]:
    """Maximum (0 for a row of -inf alone) and sum of exp(z - maximum) over the last axis, in one pass."""
    m, s = np.full_like(z[..., :1], -np.inf), np.zeros_like(z[..., :1])
    for start in range(0, z.shape[-1], KEY_BLOCK):
        block = z[..., start : start + KEY_BLOCK]
        new = np.maximum(m, block.max(axis=-1, keepdims=True))
        safe = np.where(np.isneginf(new), 0, new)
        s = s * np.exp(m - safe) + np.exp(block - safe).sum(axis=-1, keepdims=True)
        m = new
    return np.where(np.isneginf(m), 0, m), s


def _wide(x: NDArray) -> NDArray:
    return x if x.dtype == np.float64 else x.astype(np.float32)
