"""What a compiler adds to NumPy: norms and attention of a few queries over a cache, as loops that numba compiles.

An extra beside numpy:fused and numpy:tiled, not behind the name `numpy`: numba is another package, and the first call
of each dtype and layout compiles for a second or more. Softmax is not here: its exponentials are no faster.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from veriformer.declarations import Capabilities

FRAMEWORK = "numpy"
Window = tuple[int | None, int | None]
# sums in any order and fused products, or no sum is vectorized; NaN and infinities keep their meaning
_compiled: Any = numba.njit(fastmath={"reassoc", "contract"}, nogil=True)
_COMMON = Capabilities(dtypes=("float64", "float32"), intermediate={"float64": "float64", "default": "float32"})
CAPABILITIES = {
    "layer_norm": _COMMON,
    "rms_norm": _COMMON,
    "cached_attention": Capabilities(
        dtypes=("float64", "float32"),
        intermediate={"float64": "float64", "default": "float32"},
        rounds_probabilities=False,
        nonpositive_scale=True,
        cache_in_place=True,
    ),
}


def layer_norm(x: NDArray, weight: NDArray, bias: NDArray, *, eps: float = 1e-5) -> NDArray:
    """Each row brought to mean 0 and variance near 1, then scaled and shifted by channel.

    x[..., d], weight[d], bias[d] -> [..., d]
    y = weight (x - mean) / sqrt(variance + eps) + bias, variance = mean (x - mean)^2
    Source: Ba, Kiros, Hinton 2016, equations 3 and 4. A constant row gives the bias.
    """
    rows = _plain(x).reshape(-1, x.shape[-1])
    out = np.empty_like(rows)
    _layer_norm(rows, _plain(weight), _plain(bias), rows.dtype.type(eps), out)
    return out.reshape(x.shape)


def rms_norm(x: NDArray, weight: NDArray, *, eps: float = 1e-6) -> NDArray:
    """Each row divided by its root mean square, then scaled by channel.

    x[..., d], weight[d] -> [..., d]
    y = weight x / sqrt(mean x^2 + eps)
    Source: Zhang, Sennrich 2019, equation 4. A row of zeros gives zeros.
    """
    rows = _plain(x).reshape(-1, x.shape[-1])
    out = np.empty_like(rows)
    _rms_norm(rows, _plain(weight), rows.dtype.type(eps), out)
    return out.reshape(x.shape)


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
) -> tuple[NDArray, NDArray, NDArray]:
    """New keys and values written behind the valid rows of the given caches, then attention over these rows.

    q[B,H,m,D], k_new[B,G,m,D], v_new[B,G,m,Dv], caches [B,G,C,D] and [B,G,C,Dv], lengths[B]
    -> (out[B,H,m,Dv], k_cache, v_cache)
    row lengths[b] + i = new row i; query i, at that position, sees the rows up to it (causal) or all
    Source: Pope et al. 2022, section 2.1. A row that may see nothing gives zeros.
    Raises ValueError where lengths[b] + m exceeds the capacity; the caches are as they were then.
    """
    new, capacity = q.shape[2], k_cache.shape[2]
    if int(lengths.max(initial=0)) + new > capacity:
        raise ValueError(f"lengths: got {int(lengths.max())} rows beside {new} new ones, wanted at most {capacity}")
    for b, length in enumerate(lengths.tolist()):
        k_cache[b, :, length : length + new], v_cache[b, :, length : length + new] = k_new[b], v_new[b]
    left, right = (capacity if side is None else side for side in window or (None, None))
    factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
    out = np.zeros((*q.shape[:3], v_cache.shape[-1]), q.dtype)
    _attend(_plain(q * q.dtype.type(factor)), k_cache, v_cache, lengths, left, min(right, 0) if causal else right, out)
    return out, k_cache, v_cache


def _plain(a: NDArray) -> NDArray:
    """Contiguous and writable, so that the loops are compiled once a dtype."""
    return np.require(a, requirements=["C", "W"])


@_compiled
def _layer_norm(x: Any, weight: Any, bias: Any, eps: Any, out: Any) -> None:
    rows, width = x.shape
    zero, count = x.dtype.type(0), x.dtype.type(width)
    for i in range(rows):
        mean, square = zero, zero
        for j in range(width):
            mean += x[i, j]
        mean /= count
        for j in range(width):
            square += (x[i, j] - mean) * (x[i, j] - mean)
        root = np.sqrt(square / count + eps)
        for j in range(width):
            out[i, j] = (x[i, j] - mean) / root * weight[j] + bias[j]


@_compiled
def _rms_norm(x: Any, weight: Any, eps: Any, out: Any) -> None:
    rows, width = x.shape
    zero, count = x.dtype.type(0), x.dtype.type(width)
    for i in range(rows):
        square = zero
        for j in range(width):
            square += x[i, j] * x[i, j]
        root = np.sqrt(square / count + eps)
        for j in range(width):
            out[i, j] = x[i, j] / root * weight[j]


@_compiled
def _attend(q: Any, k: Any, v: Any, lengths: Any, left: int, right: int, out: Any) -> None:
    batch, heads, new, width = q.shape
    ratio = heads // k.shape[1]
    s = np.empty(k.shape[2], q.dtype)
    zero = q.dtype.type(0)
    for b in range(batch):
        for h in range(heads):
            keys, values = k[b, h // ratio], v[b, h // ratio]
            for i in range(new):
                own = lengths[b] + i
                first, end = max(0, own - left), min(lengths[b] + new, own + right + 1)
                if first >= end:
                    continue
                top, total = -q.dtype.type(np.inf), zero
                for j in range(first, end):
                    dot = zero
                    for c in range(width):
                        dot += q[b, h, i, c] * keys[j, c]
                    s[j] = dot
                    top = max(top, dot)
                for j in range(first, end):
                    s[j] = math.exp(s[j] - top)
                    total += s[j]
                for j in range(first, end):
                    for c in range(values.shape[1]):
                        out[b, h, i, c] += s[j] * values[j, c]
                for c in range(values.shape[1]):
                    out[b, h, i, c] /= total
