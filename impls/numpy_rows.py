"""What a Transformer does to one token at a time, in plain NumPy, with the gradients written out.

float64 and float32 are computed in their own dtype; bfloat16 (of ml_dtypes) and float16 are widened
to float32 and rounded once at the end. layer_norm stands beside rms_norm, which it is after centring.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from veriformer.declarations import DTYPES, Capabilities

FRAMEWORK = "numpy"
_WIDENED = {"float64": "float64", "default": "float32"}
_PLAIN = Capabilities(dtypes=DTYPES, intermediate=_WIDENED)
CAPABILITIES = {
    "layer_norm": _PLAIN,
    "rms_norm": _PLAIN,
    "gelu": _PLAIN,
    "relu": Capabilities(dtypes=DTYPES, intermediate=_WIDENED, extreme_values=True),
    "feed_forward": _PLAIN,
    "dropout": Capabilities(dtypes=DTYPES, intermediate=_WIDENED, extreme_values=True),
    "embedding": Capabilities(dtypes=DTYPES, intermediate=_WIDENED, extreme_values=True),
}
_phi = np.vectorize(lambda x: 0.5 * math.erfc(-x / math.sqrt(2)), otypes=[np.float64])


def layer_norm(x: NDArray, weight: NDArray, bias: NDArray, *, eps: float = 1e-5) -> NDArray:
    """Each row brought to mean 0 and variance near 1, then scaled and shifted by channel.

    x[..., d], weight[d], bias[d] -> [..., d]
    y = weight c / sqrt(mean c^2 + eps) + bias, c = x - mean x, from differences to the first entry
    Source: Ba, Kiros, Hinton 2016, equations 3 and 4; Chan, Golub, LeVeque 1983, section 3, for the shift.
    A constant row gives the bias.
    """
    n, _ = _normal(_centred(_wide(x)), eps)
    return (_wide(weight) * n + _wide(bias)).astype(x.dtype)


def layer_norm_vjp(
    cotangent: NDArray, x: NDArray, weight: NDArray, bias: NDArray, *, eps: float = 1e-5
) -> tuple[NDArray, NDArray, NDArray]:
    """The gradient of layer_norm: that of a root mean square norm, centred.

    cotangent g[..., d], x[..., d], weight[d], bias[d] -> (dx[..., d], dweight[d], dbias[d])
    dx = t - mean t with t = (h - n mean(h n)) / s, h = weight g; dweight = sum g n and dbias = sum g over all rows
    Source: the chain rule. The projection is made after the division, so that rounding leaves no mean behind.
    """
    g = _wide(cotangent)
    n, s = _normal(_centred(_wide(x)), eps)
    h = _wide(weight) * g
    h = h - h.mean(axis=-1, keepdims=True)
    dx = _centred((h - n * (h * n).mean(axis=-1, keepdims=True)) / s)
    return dx.astype(x.dtype), _over_rows(g * n, weight), _over_rows(g, bias)


def rms_norm(x: NDArray, weight: NDArray, *, eps: float = 1e-6) -> NDArray:
    """Each row divided by its root mean square, then scaled by channel.

    x[..., d], weight[d] -> [..., d]
    y = weight x / sqrt(mean x^2 + eps)
    Source: Zhang, Sennrich 2019, equation 4. A row of zeros gives zeros.
    """
    n, _ = _normal(_wide(x), eps)
    return (_wide(weight) * n).astype(x.dtype)


def rms_norm_vjp(cotangent: NDArray, x: NDArray, weight: NDArray, *, eps: float = 1e-6) -> tuple[NDArray, NDArray]:
    """The gradient of rms_norm.

    cotangent g[..., d], x[..., d], weight[d] -> (dx[..., d], dweight[d])
    dx = (h - n mean(h n)) / s with h = weight g, n = x / s, s = sqrt(mean x^2 + eps); dweight = sum g n over all rows
    Source: Zhang, Sennrich 2019, section 3, differentiated.
    """
    g = _wide(cotangent)
    n, s = _normal(_wide(x), eps)
    h = _wide(weight) * g
    dx = (h - n * (h * n).mean(axis=-1, keepdims=True)) / s
    return dx.astype(x.dtype), _over_rows(g * n, weight)


def gelu(x: NDArray) -> NDArray:
    """Each entry times the probability that a standard normal number lies below it.

    x[...] -> [...]
    y = x Phi(x), Phi by the complementary error function, which keeps the small values on the left
    Source: Hendrycks, Gimpel 2016, section 2.
    """
    z = x.astype(np.float64)
    return (z * _phi(z)).astype(x.dtype)


def gelu_vjp(cotangent: NDArray, x: NDArray) -> tuple[NDArray]:
    """The gradient of gelu.

    cotangent g[...], x[...] -> (dx[...],)
    dx = g (Phi(x) + x exp(-x^2 / 2) / sqrt(2 pi))
    Source: Hendrycks, Gimpel 2016, section 2, differentiated. Far from 0 the second term underflows, rightly, to 0.
    """
    z = x.astype(np.float64)
    near = np.clip(z, -40, 40)
    slope = _phi(z) + near * np.exp(-near * near / 2) / math.sqrt(2 * math.pi)
    return ((cotangent.astype(np.float64) * slope).astype(x.dtype),)


def relu(x: NDArray) -> NDArray:
    """The positive part.

    x[...] -> [...]
    y = max(x, 0)
    Source: Nair, Hinton 2010. NaN stays NaN.
    """
    return np.maximum(x, np.zeros_like(x))


def relu_vjp(cotangent: NDArray, x: NDArray) -> tuple[NDArray]:
    """The gradient of relu, 0 at 0.

    cotangent g[...], x[...] -> (dx[...],)
    dx = g where x > 0, else 0
    Source: Nair, Hinton 2010.
    """
    return (np.where(x > 0, cotangent, np.zeros_like(cotangent)),)


def feed_forward(x: NDArray, w1: NDArray, b1: NDArray, w2: NDArray, b2: NDArray) -> NDArray:
    """The position-wise feed-forward layer.

    x[..., d], w1[d, f], b1[f], w2[f, d], b2[d] -> [..., d]
    y = relu(x w1 + b1) w2 + b2
    Source: Vaswani et al. 2017, equation 2.
    """
    hidden = np.maximum(_wide(x) @ _wide(w1) + _wide(b1), 0)
    return (hidden @ _wide(w2) + _wide(b2)).astype(x.dtype)


def feed_forward_vjp(
    cotangent: NDArray, x: NDArray, w1: NDArray, b1: NDArray, w2: NDArray, b2: NDArray
) -> tuple[NDArray, ...]:
    """The gradient of feed_forward.

    cotangent g[..., d], x[..., d], w1[d, f], b1[f], w2[f, d], b2[d] -> gradients of x, w1, b1, w2 and b2
    dh = g w2^T where x w1 + b1 > 0, else 0; dx = dh w1^T, dw1 = x^T dh, db1 = sum dh
    dw2 = relu(x w1 + b1)^T g, db2 = sum g, sums over all rows
    Source: Vaswani et al. 2017, equation 2, differentiated.
    """
    g = _wide(cotangent).reshape(-1, x.shape[-1])
    rows = _wide(x).reshape(-1, x.shape[-1])
    h = rows @ _wide(w1) + _wide(b1)
    dh = np.where(h > 0, g @ _wide(w2).T, 0)
    dx = (dh @ _wide(w1).T).reshape(x.shape).astype(x.dtype)
    dw2 = np.maximum(h, 0).T @ g
    return dx, (rows.T @ dh).astype(w1.dtype), _over_rows(dh, b1), dw2.astype(w2.dtype), _over_rows(g, b2)


def dropout(x: NDArray, *, rate: float, uniform: NDArray) -> NDArray:
    """Entries whose uniform number lies below the rate dropped, the others enlarged.

    x[...], uniform[...] -> [...]
    y = x / (1 - rate) where uniform >= rate, else 0
    Source: Srivastava et al. 2014, section 10, scaled at training time. Rate 0 gives x, rate 1 zeros.
    """
    kept = uniform >= uniform.dtype.type(rate)
    return np.where(kept, _wide(x) / ((1 - float(rate)) or 1.0), 0).astype(x.dtype)


def dropout_vjp(cotangent: NDArray, x: NDArray, *, rate: float, uniform: NDArray) -> tuple[NDArray, None]:
    """The gradient of dropout, which is linear: the same entries of the cotangent dropped and enlarged.

    cotangent g[...], x[...], uniform[...] -> (dx[...], None)
    dx = g / (1 - rate) where uniform >= rate, else 0
    Source: Srivastava et al. 2014, section 5.
    """
    return dropout(cotangent, rate=rate, uniform=uniform), None


def embedding(ids: NDArray, table: NDArray, *, padding_index: int | None = None) -> NDArray:
    """The row of the table that each id names.

    ids[...], table[V, d] -> [..., d]
    y = table[ids]
    Source: Mikolov et al. 2013. padding_index changes no value.
    Raises ValueError for an id that is not in 0 .. V - 1; NumPy would count a negative one from the end.
    """
    if ids.size and not 0 <= ids.min() <= ids.max() < len(table):
        raise ValueError(f"embedding: ids from {ids.min()} to {ids.max()}, wanted 0 to {len(table) - 1}")
    return table[ids]


def embedding_vjp(
    cotangent: NDArray, ids: NDArray, table: NDArray, *, padding_index: int | None = None
) -> tuple[None, NDArray]:
    """The gradient of embedding: each row of the table gathers the cotangents of its ids.

    cotangent g[..., d], ids[...], table[V, d] -> (None, dtable[V, d])
    dtable[r] = sum of g where ids = r; 0 for the padding row
    Source: the derivative of one_hot(ids) table.
    """
    dtable = np.zeros(table.shape, _wide(table).dtype)
    np.add.at(dtable, ids.reshape(-1), _wide(cotangent).reshape(-1, table.shape[1]))
    if padding_index is not None:
        dtable[padding_index] = 0
    return None, dtable.astype(table.dtype)


def _centred(z: NDArray) -> NDArray:
    """z less its mean over the last axis; differences to the first entry are summed, which are exact if it is alone."""
    from_first = z - z[..., :1]
    return from_first - from_first.mean(axis=-1, keepdims=True)


def _normal(z: NDArray, eps: float) -> tuple[NDArray, NDArray]:
    """z over its root mean square, and that root [..., 1]."""
    s = np.sqrt((z * z).mean(axis=-1, keepdims=True) + eps)
    return z / s, s


def _over_rows(terms: NDArray, like: NDArray) -> NDArray:
    """The sum over every axis but the last, in the dtype of `like`."""
    return terms.sum(axis=tuple(range(terms.ndim - 1))).astype(like.dtype)


def _wide(x: NDArray) -> NDArray:
    return x if x.dtype == np.float64 else x.astype(np.float32)
