"""Softmax and norms in NumPy, fast: rows in blocks that stay in the cache, arithmetic in place, sums by einsum.

bfloat16 (of ml_dtypes) and float16 are widened to float32 and rounded once at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from veriformer.declarations import DTYPES, Capabilities

FRAMEWORK = "numpy"
NUMBERS = 1 << 15
"""Entries of a block of rows that is worked on at once: 128 KiB in float32."""
_COMMON = Capabilities(dtypes=DTYPES, intermediate={"float64": "float64", "default": "float32"})
CAPABILITIES = {
    "softmax": replace(_COMMON, empty_softmax_row=True),
    "layer_norm": _COMMON,
    "rms_norm": _COMMON,
}


def softmax(x: NDArray, *, axis: int = -1, temperature: float = 1.0) -> NDArray:
    """The softmax of x over one axis, in place in the result, some rows at a time.

    x[...] -> [...]
    p_i = exp((x_i - max x) / T) / sum_j exp((x_j - max x) / T)
    Source: Bridle 1990. A row of -inf alone gives zeros.
    Raises ValueError for a temperature that is not above 0.
    """
    _check_temperature(temperature)
    rows = _rows(x, axis)
    out = np.empty_like(rows)
    for part in _parts(rows):
        z = _wide(rows[part])
        _softmax(z, temperature, out[part] if out.dtype == z.dtype else np.empty_like(z), out[part])
    return _unrowed(out, x, axis)


def softmax_vjp(cotangent: NDArray, x: NDArray, *, axis: int = -1, temperature: float = 1.0) -> tuple[NDArray]:
    """The gradient of softmax.

    cotangent g[...], x[...] -> (dx[...],)
    dx_i = p_i (g_i - sum_j p_j g_j) / T
    Source: Bridle 1990, equation 7.
    Raises ValueError for a temperature that is not above 0.
    """
    _check_temperature(temperature)
    rows, given = _rows(x, axis), _rows(cotangent, axis)
    out = np.empty_like(rows)
    for part in _parts(rows):
        z, g = _wide(rows[part]), _wide(given[part])
        p = np.empty_like(z)
        _softmax(z, temperature, p, p)
        dx = g - np.einsum("ij,ij->i", p, g)[:, None]
        dx *= p
        out[part] = np.divide(dx, float(temperature), out=dx)
    return (_unrowed(out, x, axis),)


def layer_norm(x: NDArray, weight: NDArray, bias: NDArray, *, eps: float = 1e-5) -> NDArray:
    """Each row brought to mean 0 and variance near 1, then scaled and shifted by channel; some rows at a time.

    x[..., d], weight[d], bias[d] -> [..., d]
    y = weight (x - mean) / sqrt(variance + eps) + bias, variance = mean (x - mean)^2
    Source: Ba, Kiros, Hinton 2016, equations 3 and 4. A constant row gives the bias.
    """
    rows, scale, shift = _rows(x), _wide(weight), _wide(bias)
    out = np.empty_like(rows)
    for part in _parts(rows):
        y, _ = _normal(_centred(_wide(rows[part])), eps)
        y *= scale
        out[part] = np.add(y, shift, out=y)
    return out.reshape(x.shape)


def layer_norm_vjp(
    cotangent: NDArray, x: NDArray, weight: NDArray, bias: NDArray, *, eps: float = 1e-5
) -> tuple[NDArray, NDArray, NDArray]:
    """The gradient of layer_norm: that of a root mean square norm, centred before and after.

    cotangent g[..., d], x[..., d], weight[d], bias[d] -> (dx[..., d], dweight[d], dbias[d])
    dx = t - mean t with t = (h - n mean(h n)) / s, h = weight g; dweight = sum g n and dbias = sum g over all rows
    Source: Ba, Kiros, Hinton 2016, equations 3 and 4, differentiated.
    """
    dx, dweight, dbias = _norm_vjp(cotangent, x, weight, eps, centred=True)
    return dx, dweight.astype(weight.dtype), dbias.astype(bias.dtype)


def rms_norm(x: NDArray, weight: NDArray, *, eps: float = 1e-6) -> NDArray:
    """Each row divided by its root mean square, then scaled by channel; some rows at a time.

    x[..., d], weight[d] -> [..., d]
    y = weight x / sqrt(mean x^2 + eps)
    Source: Zhang, Sennrich 2019, equation 4. A row of zeros gives zeros.
    """
    rows, scale = _rows(x), _wide(weight)
    out = np.empty_like(rows)
    for part in _parts(rows):
        z = _wide(rows[part])
        y, _ = _normal(z, eps)
        out[part] = np.multiply(y, scale, out=y)
    return out.reshape(x.shape)


def rms_norm_vjp(cotangent: NDArray, x: NDArray, weight: NDArray, *, eps: float = 1e-6) -> tuple[NDArray, NDArray]:
    """The gradient of rms_norm.

    cotangent g[..., d], x[..., d], weight[d] -> (dx[..., d], dweight[d])
    dx = (h - n mean(h n)) / s with h = weight g, n = x / s, s = sqrt(mean x^2 + eps); dweight = sum g n over all rows
    Source: Zhang, Sennrich 2019, section 3, differentiated.
    """
    dx, dweight, _ = _norm_vjp(cotangent, x, weight, eps, centred=False)
    return dx, dweight.astype(weight.dtype)


def _softmax(z: NDArray, temperature: float, e: NDArray, out: NDArray) -> None:
    """Softmax of rows z[n,d] into out, by way of e, which may be the same."""
    with np.errstate(over="ignore"):
        np.subtract(z, _finite(z.max(-1, keepdims=True)), out=e)
        if temperature != 1:
            e /= float(temperature)
    np.exp(e, out=e)
    total = e.sum(-1, keepdims=True)
    np.multiply(e, 1 / np.where(total == 0, 1, total), out=e)
    if out is not e:
        out[...] = e


def _finite(top: NDArray) -> NDArray:
    """0 in place of -inf, so that -inf minus it is -inf and not NaN."""
    return np.where(np.isneginf(top), 0, top)


def _norm_vjp(
    cotangent: NDArray, x: NDArray, weight: NDArray, eps: float, centred: bool
) -> tuple[NDArray, NDArray, NDArray]:
    """The gradients of x, weight and a bias."""
    rows, given, scale = _rows(x), _rows(cotangent), _wide(weight)
    dx, dweight, dbias = np.empty_like(rows), np.zeros_like(scale), np.zeros_like(scale)
    for part in _parts(rows):
        z, g = _wide(rows[part]), _wide(given[part])
        n, s = _normal(_centred(z) if centred else z, eps)
        dweight += np.einsum("ij,ij->j", g, n)
        dbias += g.sum(0)
        h = g * scale
        h = _centred(h) if centred else h
        n *= _mean(h, n)
        h -= n
        h /= s
        dx[part] = _centred(h) if centred else h
    return dx.reshape(x.shape), dweight, dbias


def _centred(z: NDArray) -> NDArray:
    return z - z.mean(-1, keepdims=True)


def _normal(z: NDArray, eps: float) -> tuple[NDArray, NDArray]:
    """Rows over their root mean square, and that root."""
    s = np.sqrt(_mean(z, z) + eps)
    return z / s, s


def _mean(a: NDArray, b: NDArray) -> NDArray:
    """[n,d], [n,d] -> [n,1], the mean of products, without a product in memory."""
    return np.einsum("ij,ij->i", a, b)[:, None] / a.shape[-1]


def _rows(x: NDArray, axis: int = -1) -> NDArray:
    """[n,d] with d the axis."""
    moved = np.moveaxis(x, axis, -1)
    return moved.reshape(-1, moved.shape[-1])


def _unrowed(rows: NDArray, like: NDArray, axis: int) -> NDArray:
    """The reverse of _rows."""
    moved = np.moveaxis(like, axis, -1)
    return np.moveaxis(rows.reshape(moved.shape), -1, axis)


def _parts(rows: NDArray) -> Iterator[slice]:
    """Blocks of rows that stay in the cache."""
    count = max(1, NUMBERS // max(rows.shape[1], 1))
    for start in range(0, len(rows), count):
        yield slice(start, start + count)


def _check_temperature(temperature: float) -> None:
    if not temperature > 0:
        raise ValueError(f"temperature: got {temperature}, wanted a number above 0")


def _wide(x: NDArray) -> NDArray:
    return x if x.dtype == np.float64 else x.astype(np.float32, copy=False)
