"""Every operation in plain NumPy, one line of the formula per line of code.

float64 and float32 are computed in their own dtype; bfloat16 (of ml_dtypes) and float16 are widened
to float32 and rounded once at the end.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from veriformer.declarations import DTYPES, Capabilities

FRAMEWORK = "numpy"
_WIDENED = {"float64": "float64", "default": "float32"}
_SOFTMAX = Capabilities(
    dtypes=DTYPES, empty_softmax_row=True, zero_temperature=True, extreme_values=True, intermediate=_WIDENED
)
_PLAIN = Capabilities(dtypes=DTYPES, intermediate=_WIDENED)
_ATTENTION = Capabilities(
    dtypes=DTYPES,
    nonpositive_scale=True,
    nan_contained=True,
    infinite_bias=True,
    intermediate=_WIDENED,
    rounds_probabilities=False,
)
CAPABILITIES = {
    "softmax": _SOFTMAX,
    "log_softmax": _PLAIN,
    "logsumexp": _PLAIN,
    "layer_norm": _PLAIN,
    "attention": _ATTENTION,
    "attention_with_lse": _ATTENTION,
}


def softmax(x: NDArray, *, axis: int = -1, temperature: float = 1.0) -> NDArray:
    """The softmax of x over one axis.

    x[...] -> [...]
    p_i = exp((x_i - max x) / T) / sum_j exp((x_j - max x) / T)
    Source: Bridle 1990. T = 0 shares the mass among the largest; a row of -inf alone gives zeros.
    """
    z = _wide(x)
    with np.errstate(over="ignore"):
        z = z - _finite_max(z, axis)
    e = (z == 0).astype(z.dtype) if temperature == 0 else _exp(z, temperature)
    total = e.sum(axis=axis, keepdims=True)
    return (e / np.where(total == 0, 1, total)).astype(x.dtype)


def softmax_vjp(cotangent: NDArray, x: NDArray, *, axis: int = -1, temperature: float = 1.0) -> tuple[NDArray]:
    """The gradient of softmax.

    cotangent g[...], x[...] -> (dx[...],)
    dx_i = p_i (g_i - sum_j p_j g_j) / T
    Source: Bridle 1990, equation 7. T = 0, which is constant wherever it has a gradient, gives zeros.
    """
    g, p = _wide(cotangent), softmax(_wide(x), axis=axis, temperature=temperature)
    if temperature == 0:
        return (np.zeros_like(x),)
    return ((p * (g - (p * g).sum(axis=axis, keepdims=True)) / float(temperature)).astype(x.dtype),)


def log_softmax(x: NDArray, *, axis: int = -1) -> NDArray:
    """The logarithm of softmax, without ever forming a probability that underflows.

    x[...] -> [...]
    y_i = (x_i - max x) - log sum_j exp(x_j - max x)
    Source: Blanchard, Higham, Higham 2021, section 3. A row of -inf alone gives -inf.
    """
    z = _wide(x)
    z = z - _finite_max(z, axis)
    with np.errstate(divide="ignore"):
        log_total = np.log(np.exp(z).sum(axis=axis, keepdims=True))
    return (z - np.where(np.isneginf(log_total), 0, log_total)).astype(x.dtype)


def log_softmax_vjp(cotangent: NDArray, x: NDArray, *, axis: int = -1) -> tuple[NDArray]:
    """The gradient of log_softmax.

    cotangent g[...], x[...] -> (dx[...],)
    dx_i = g_i - p_i sum_j g_j
    Source: the derivative of x_i - log sum_j exp(x_j).
    """
    g, p = _wide(cotangent), softmax(_wide(x), axis=axis)
    return ((g - p * g.sum(axis=axis, keepdims=True)).astype(x.dtype),)


def logsumexp(x: NDArray, *, axis: int = -1) -> NDArray:
    """The logarithm of the sum of exponentials over one axis, which is dropped.

    x[...] -> [... without axis]
    y = max x + log sum_j exp(x_j - max x)
    Source: Blanchard, Higham, Higham 2021, section 2. A row of -inf alone gives -inf.
    """
    z = _wide(x)
    m = _finite_max(z, axis)
    with np.errstate(divide="ignore"):
        y = m + np.log(np.exp(z - m).sum(axis=axis, keepdims=True))
    return np.asarray(y.squeeze(axis), dtype=x.dtype)


def logsumexp_vjp(cotangent: NDArray, x: NDArray, *, axis: int = -1) -> tuple[NDArray]:
    """The gradient of logsumexp: the softmax, as often as the cotangent says.

    cotangent g[... without axis], x[...] -> (dx[...],)
    dx_i = g p_i
    Source: Blanchard, Higham, Higham 2021, section 2. A row of -inf alone gets zeros.
    """
    return ((np.expand_dims(_wide(cotangent), axis) * softmax(_wide(x), axis=axis)).astype(x.dtype),)


def layer_norm(x: NDArray, weight: NDArray, bias: NDArray, *, eps: float = 1e-5) -> NDArray:
    """Each row brought to mean 0 and variance near 1, then scaled and shifted by channel.

    x[..., d], weight[d], bias[d] -> [..., d]
    y = weight (x - mean) / sqrt(variance + eps) + bias, variance = mean (x - mean)^2
    Source: Ba, Kiros, Hinton 2016, equations 3 and 4. A constant row gives the bias.
    """
    z = _wide(x)
    centred = z - z.mean(axis=-1, keepdims=True)
    variance = (centred * centred).mean(axis=-1, keepdims=True)
    return (_wide(weight) * (centred / np.sqrt(variance + eps)) + _wide(bias)).astype(x.dtype)


def layer_norm_vjp(
    cotangent: NDArray, x: NDArray, weight: NDArray, bias: NDArray, *, eps: float = 1e-5
) -> tuple[NDArray, NDArray, NDArray]:
    """The gradient of layer_norm.

    cotangent g[..., d], x[..., d], weight[d], bias[d] -> (dx[..., d], dweight[d], dbias[d])
    dx = (h - mean h - n mean(h n)) / s with h = weight g, n = (x - mean) / s, s = sqrt(variance + eps)
    dweight = sum g n and dbias = sum g over all rows
    Source: Ba, Kiros, Hinton 2016, equations 3 and 4, differentiated. A single channel gets dx = dweight = 0.
    """
    g, z = _wide(cotangent), _wide(x)
    centred = z - z.mean(axis=-1, keepdims=True)
    s = np.sqrt((centred * centred).mean(axis=-1, keepdims=True) + eps)
    n, h = centred / s, _wide(weight) * g
    dx = (h - h.mean(axis=-1, keepdims=True) - n * (h * n).mean(axis=-1, keepdims=True)) / s
    rows = tuple(range(x.ndim - 1))
    return dx.astype(x.dtype), (g * n).sum(axis=rows).astype(weight.dtype), g.sum(axis=rows).astype(bias.dtype)


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
    """Scaled dot-product attention.

    q[B,H,Tq,D], k[B,G,Tk,D], v[B,G,Tk,Dv] -> [B,H,Tq,Dv]
    softmax(cap(q k^T scale) + bias) v over the keys a row may see
    Source: Vaswani et al. 2017, section 3.2.1. A row that may see nothing gives zeros; NaN in a hidden
    key or value stays there.
    """
    return attention_with_lse(
        q, k, v, mask=mask, bias=bias, causal=causal, scale=scale, window=window, softcap=softcap, sink=sink
    )[0]


def attention_vjp(
    cotangent: NDArray,
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
) -> tuple[NDArray | None, ...]:
    """The gradients of attention: those of attention_with_lse whose lse nobody uses.

    cotangent[B,H,Tq,Dv] -> those of q, k and v, then of each of mask (None), bias and sink that is given
    Source: Dao et al. 2022, appendix B.2. A row that may see nothing passes nothing on.
    """
    return attention_with_lse_vjp(
        (cotangent, np.zeros_like(cotangent[..., 0])),
        q, k, v, mask=mask, bias=bias, causal=causal, scale=scale, window=window, softcap=softcap, sink=sink,
    )  # fmt: skip


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
    """Attention, and the logsumexp of each row's logits, without the sink.

    q[B,H,Tq,D], k[B,G,Tk,D], v[B,G,Tk,Dv] -> out[B,H,Tq,Dv], lse[B,H,Tq]
    lse_i = log sum_j exp(logit_ij); out_i = sum_j exp(logit_ij) v_j / (exp(lse_i) + exp(sink))
    Source: Dao et al. 2022, algorithm 1. A row that may see nothing gives zeros and -inf.
    """
    key, value = (np.repeat(_wide(a), q.shape[1] // max(k.shape[1], 1), axis=1) for a in (k, v))
    visible = _visible(q.shape[2], k.shape[2], causal, window)
    visible = visible if mask is None else visible & mask
    visible = visible if bias is None else visible & ~np.isneginf(_wide(bias))
    with np.errstate(invalid="ignore", over="ignore"):
        logits = _wide(q) @ key.swapaxes(-1, -2) * _scale(q, scale)
        logits = logits if softcap is None else float(softcap) * np.tanh(logits / float(softcap))
        logits = logits if bias is None else logits + _wide(bias)
    visible = np.broadcast_to(visible, logits.shape)
    logits = np.where(visible, logits, -np.inf)
    m = np.max(logits, axis=-1, keepdims=True, initial=-np.inf)
    top = m if sink is None else np.maximum(m, _wide(sink)[:, None, None])
    top = np.where(np.isneginf(top), 0, top)
    e = np.exp(logits - top)
    total = e.sum(axis=-1, keepdims=True)
    extra = 0 if sink is None else np.exp(_wide(sink)[:, None, None] - top)
    weights = e / np.where(total + extra == 0, 1, total + extra)
    return _mix(weights, value, visible).astype(q.dtype), _lse(logits, m).astype(_lse_dtype(q))


def attention_with_lse_vjp(
    cotangents: tuple[NDArray, NDArray],
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
) -> tuple[NDArray | None, ...]:
    """The gradients of attention and of the logsumexp beside it, written out.

    cotangents (do[B,H,Tq,Dv], dlse[B,H,Tq]) -> those of q, k and v, then of mask (None), bias and sink as given
    ds = p (dp - sum p dp) + p' dlse, dp = do v^T, p' without the sink; dv = p^T do; dsink = -p_sink sum p dp;
    through the cap 1 - tanh^2
    Source: Dao et al. 2022, appendix B.2. A row that may see nothing passes nothing on.
    """
    heads, g, dlse = q.shape[1], *map(_wide, cotangents)
    query, key, value = (_wide(q), *(np.repeat(_wide(a), heads // k.shape[1], axis=1) for a in (k, v)))
    visible = _visible(q.shape[2], k.shape[2], causal, window)
    visible = visible if mask is None else visible & mask
    visible = visible if bias is None else visible & ~np.isneginf(_wide(bias))
    bent = query @ key.swapaxes(-1, -2) * _scale(q, scale)
    slope = np.ones_like(bent)
    if softcap is not None:
        t = np.tanh(bent / float(softcap))
        bent, slope = float(softcap) * t, 1 - t * t
    logits = np.where(visible, bent if bias is None else bent + _wide(bias), -np.inf)
    extra = -np.inf if sink is None else _wide(sink)[:, None, None]
    top = np.maximum(logits.max(axis=-1, keepdims=True, initial=-np.inf), extra)
    top = np.where(np.isneginf(top), 0, top)
    e, rest = np.exp(logits - top), np.exp(extra - top)
    total = e.sum(axis=-1, keepdims=True) + rest
    p, rest = (part / np.where(total == 0, 1, total) for part in (e, rest))
    dp = g @ value.swapaxes(-1, -2)
    mean = (p * dp).sum(axis=-1, keepdims=True)
    ds = p * (dp - mean) + softmax(logits) * dlse[..., None]
    dscore = ds * slope * _scale(q, scale)
    grads = [dscore @ key, _group_sum(dscore.swapaxes(-1, -2) @ query, k), _group_sum(p.swapaxes(-1, -2) @ g, v)]
    found: list[NDArray | None] = [each.astype(a.dtype) for each, a in zip(grads, (q, k, v), strict=True)]
    found += [] if mask is None else [None]
    found += [] if bias is None else [_unbroadcast(ds, bias.shape).astype(bias.dtype)]
    found += [] if sink is None else [-(rest * mean).sum(axis=(0, 2, 3)).astype(sink.dtype)]
    return tuple(found)


def _visible(query_length: int, key_length: int, causal: bool, window: tuple | None) -> NDArray:
    """[Tq,Tk]: may query i, which sits at i + Tk - Tq, see key j."""
    ahead = np.arange(key_length) - (np.arange(query_length)[:, None] + key_length - query_length)
    left, right = window if window is not None else (None, None)
    visible = ahead <= 0 if causal else np.ones_like(ahead, dtype=bool)
    visible = visible if left is None else visible & (ahead >= -left)
    return visible if right is None else visible & (ahead <= right)


def _scale(q: NDArray, scale: float | None) -> float:
    return max(q.shape[-1], 1) ** -0.5 if scale is None else float(scale)


def _mix(weights: NDArray, value: NDArray, visible: NDArray) -> NDArray:
    """weights @ value, in which a hidden value takes no part even if it is NaN (0 * NaN is NaN)."""
    finite = np.isfinite(value)
    out = weights @ np.where(finite, value, 0)
    if finite.all():
        return out
    with np.errstate(invalid="ignore"):
        strange = np.where(
            visible[..., None] & ~finite[..., None, :, :], weights[..., None] * value[..., None, :, :], 0
        )
        return out + strange.sum(axis=-2)


def _group_sum(grad: NDArray, rows: NDArray) -> NDArray:
    """[B,H,Tk,D] -> [B,G,Tk,D]: summed over the query heads that share a key head."""
    return grad.reshape(*rows.shape[:2], -1, *rows.shape[2:]).sum(axis=2)


def _unbroadcast(grad: NDArray, shape: tuple[int, ...]) -> NDArray:
    """The sum over axes that were spread from length 1."""
    spread = tuple(axis for axis, length in enumerate(shape) if length == 1)
    return grad.sum(axis=spread, keepdims=True)


def _lse(logits: NDArray, m: NDArray) -> NDArray:
    m = np.where(np.isneginf(m), 0, m)
    with np.errstate(divide="ignore"):
        return (m + np.log(np.exp(logits - m).sum(axis=-1, keepdims=True)))[..., 0]


def _finite_max(z: NDArray, axis: int) -> NDArray:
    """The maximum over an axis, 0 in place of -inf, so that -inf minus it is -inf and not NaN."""
    m = z.max(axis=axis, keepdims=True)
    return np.where(np.isneginf(m), 0, m)


def _exp(z: NDArray, temperature: float) -> NDArray:
    with np.errstate(over="ignore"):  # a difference beyond the dtype is -inf, whose exponential is rightly 0
        return np.exp(z / float(temperature))


def _wide(x: NDArray) -> NDArray:
    return x if x.dtype == np.float64 else x.astype(np.float32)


def _lse_dtype(q: NDArray) -> np.dtype:
    return np.dtype(np.float64) if q.dtype == np.float64 else np.dtype(np.float32)
