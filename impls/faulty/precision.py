"""Implementations that are right and less precise than they claim: one shorter dtype, or one small factor, each."""

from __future__ import annotations

import math
from collections.abc import Callable

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from veriformer.declarations import Capabilities, Fault

FRAMEWORK = "numpy"
_FUSED = Capabilities(intermediate="float32")
CAPABILITIES = {
    name: _FUSED
    for name in ("softmax", "log_softmax", "logsumexp", "layer_norm", "rms_norm", "gelu", "feed_forward", "attention")
}

_erf = np.vectorize(math.erf, otypes=[float])


def _short(x: NDArray) -> NDArray:
    """Rounded to bfloat16."""
    return x.astype(ml_dtypes.bfloat16).astype(x.dtype)


def _half(x: NDArray) -> NDArray:
    """Rounded to float16."""
    return x.astype(np.float16).astype(x.dtype)


def _tf32(x: NDArray) -> NDArray:
    """Rounded to the 11 bits that a tensor core keeps of a float32 factor."""
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.round(mantissa * 2**11) / 2**11, exponent).astype(x.dtype)


def _wide(x: NDArray) -> NDArray:
    return x if x.dtype == np.float64 else x.astype(np.float32)


def _product(a: NDArray, b: NDArray, rounding: Callable[[NDArray], NDArray] | None = None) -> NDArray:
    """a b; with a rounding, the running sum is rounded after every 16 terms."""
    if rounding is None:
        return a @ b
    total = np.zeros((*a.shape[:-1], b.shape[-1]), a.dtype)
    for start in range(0, a.shape[-1], 16):
        total = rounding(total + a[..., start : start + 16] @ b[..., start : start + 16, :])
    return total


def _sum(x: NDArray, rounding: Callable[[NDArray], NDArray]) -> NDArray:
    """The sum over the last axis, which is kept; the running sum is rounded after every 8 terms."""
    total = np.zeros_like(x[..., :1])
    for start in range(0, x.shape[-1], 8):
        total = rounding(total + x[..., start : start + 8].sum(axis=-1, keepdims=True))
    return total


def _make_softmax(fault: str) -> Callable[..., NDArray]:
    def softmax(x: NDArray, *, axis: int = -1, temperature: float = 1.0) -> NDArray:
        z = np.moveaxis(_wide(x), axis, -1) / _wide(x).dtype.type(temperature)
        e = np.exp(z - z.max(axis=-1, keepdims=True))
        e = _half(e) if fault == "short_exponentials" else e
        return np.ascontiguousarray(np.moveaxis(e / e.sum(axis=-1, keepdims=True), -1, axis)).astype(x.dtype)

    return softmax


def _make_log_sum(fault: str, whole: bool) -> Callable[..., NDArray]:
    def logarithm(x: NDArray, *, axis: int = -1) -> NDArray:
        z = np.moveaxis(_wide(x), axis, -1)
        peak = z.max(axis=-1, keepdims=True)
        e = np.exp(z - peak)
        total = _sum(e, _short) if fault == "short_sum" else e.sum(axis=-1, keepdims=True)
        y = (z - peak) - np.log(total) if whole else (peak + np.log(total))
        y = np.moveaxis(y, -1, axis) if whole else y[..., 0]
        return y.astype(x.dtype)

    return logarithm


def _make_layer_norm(fault: str) -> Callable[..., NDArray]:
    def layer_norm(x: NDArray, weight: NDArray, bias: NDArray, *, eps: float = 1e-5) -> NDArray:
        z = _short(_wide(x)) if fault == "short_input" else _wide(x)
        centred = z - z.mean(axis=-1, keepdims=True)
        less = 1 if fault == "sample_variance" and x.shape[-1] > 1 else 0
        v = (centred * centred).sum(axis=-1, keepdims=True) / (x.shape[-1] - less)
        return (centred / np.sqrt(v + z.dtype.type(eps)) * _wide(weight) + _wide(bias)).astype(x.dtype)

    return layer_norm


def _make_rms_norm(fault: str) -> Callable[..., NDArray]:
    def rms_norm(x: NDArray, weight: NDArray, *, eps: float = 1e-6) -> NDArray:
        z = _wide(x)
        m = (_short(z * z) if fault == "short_squares" else z * z).mean(axis=-1, keepdims=True)
        return (z / np.sqrt(m + z.dtype.type(eps)) * _wide(weight)).astype(x.dtype)

    return rms_norm


def _make_gelu(fault: str) -> Callable[..., NDArray]:
    def gelu(x: NDArray) -> NDArray:
        z = _wide(x)
        inner = np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)) if fault == "tanh_for_erf" else _erf(z / 2**0.5)
        return (z / 2 * (1 + inner)).astype(x.dtype)

    return gelu


def _make_feed_forward(fault: str) -> Callable[..., NDArray]:
    def feed_forward(x: NDArray, w1: NDArray, b1: NDArray, w2: NDArray, b2: NDArray) -> NDArray:
        a, w1, b1, w2, b2 = map(_wide, (x, w1, b1, w2, b2))
        factor = _tf32 if fault == "tf32_inputs" else lambda part: part
        rounding = _short if fault == "short_accumulator" else None
        hidden = np.maximum(_product(factor(a), factor(w1), rounding) + b1, 0)
        return (_product(factor(hidden), factor(w2), rounding) + b2).astype(x.dtype)

    return feed_forward


def _make_attention(fault: str) -> Callable[..., NDArray]:
    def attention(q: NDArray, k: NDArray, v: NDArray, *, scale: float | None = None) -> NDArray:
        dtype, size = q.dtype, q.shape[-1] ** -0.5 if scale is None else scale
        q, k, v = map(_wide, (q, *(np.repeat(a, q.shape[1] // a.shape[1], axis=1) for a in (k, v))))
        if fault == "tf32_inputs":
            q, k, v = map(_tf32, (q, k, v))
        size = size * 1.001 if fault == "scale_off" else size
        rounding = {"short_accumulator": _short, "half_accumulator": _half}.get(fault)
        s = _product(q, k.swapaxes(-1, -2), rounding) * q.dtype.type(size)
        e = np.exp(s - s.max(axis=-1, keepdims=True))
        total = e.sum(axis=-1, keepdims=True)
        return (_product(_short(e) if fault == "short_probabilities" else e, v, rounding) / total).astype(dtype)

    return attention


_MAKE: dict[str, Callable[[str], Callable[..., NDArray]]] = {
    "softmax": _make_softmax,
    "log_softmax": lambda fault: _make_log_sum(fault, True),
    "logsumexp": lambda fault: _make_log_sum(fault, False),
    "layer_norm": _make_layer_norm,
    "rms_norm": _make_rms_norm,
    "gelu": _make_gelu,
    "feed_forward": _make_feed_forward,
    "attention": _make_attention,
}

_LOW = "mutation: a shorter dtype inside than declared"
# operation: {fault: (where it was seen, what is wrong, the dtype in which it shows)}
_TABLE: dict[str, dict[str, tuple[str, str, str]]] = {
    "softmax": {"short_exponentials": (_LOW, "exponentials are held in float16", "float32")},
    "log_softmax": {"short_sum": (_LOW, "the sum of the exponentials is held in bfloat16", "float32")},
    "logsumexp": {"short_sum": (_LOW, "the sum of the exponentials is held in bfloat16", "float32")},
    "layer_norm": {
        "short_input": ("tt-metal#47791", "x is rounded to bfloat16 in a float32 kernel", "float32"),
        "sample_variance": ("annotated-transformer#119", "divided by d - 1, in bfloat16 at d = 512", "bfloat16"),
    },
    "rms_norm": {"short_squares": (_LOW, "squares are rounded to bfloat16", "float32")},
    "gelu": {"tanh_for_erf": ("mutation: the cheaper formula", "tanh for erf, also at an amplitude of 0.1", "float32")},
    "feed_forward": {
        "tf32_inputs": ("mutation: allow_tf32 left on", "factors are rounded to tf32", "float32"),
        "short_accumulator": (_LOW, "running sums are rounded to bfloat16", "float32"),
    },
    "attention": {
        "tf32_inputs": ("mutation: allow_tf32 left on", "factors are rounded to tf32", "float32"),
        "short_accumulator": (_LOW, "running sums are rounded to bfloat16", "float32"),
        "half_accumulator": (_LOW, "running sums are rounded to float16", "float32"),
        "short_probabilities": (_LOW, "weights are rounded to bfloat16 in a float32 kernel", "float32"),
        "scale_off": ("mutation: a rounded constant", "the scale is 1.001 times too large, in bfloat16", "bfloat16"),
    },
}
FAULTS = {
    f"{operation}_{fault}": Fault(operation, f"{operation}/works-in-the-declared-precision", source, summary, dtype)
    for operation, faults in _TABLE.items()
    for fault, (source, summary, dtype) in faults.items()
}
VARIANTS: dict[str, dict[str, Callable[..., NDArray]]] = {
    "correct": {operation: make("") for operation, make in _MAKE.items()},
    **{f"{op}_{fault}": {op: _MAKE[op](fault)} for op, faults in _TABLE.items() for fault in faults},
}
