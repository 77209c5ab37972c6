"""Wrong OPERATION_vjp beside a right OPERATION in NumPy: mistakes of gradients that are written by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veriformer.declarations import Capabilities, Fault

FRAMEWORK = "numpy"
_PLAIN = Capabilities(dtypes=("float64", "float32"))
CAPABILITIES = {"softmax": _PLAIN, "logsumexp": _PLAIN, "layer_norm": _PLAIN, "attention": _PLAIN}


def softmax(x: NDArray, *, axis: int = -1, temperature: float = 1.0) -> NDArray:
    """p_i = exp(x_i / T) / sum_j exp(x_j / T)."""
    e = np.exp((x - x.max(axis=axis, keepdims=True)) / float(temperature))
    return e / e.sum(axis=axis, keepdims=True)


def _softmax_vjp(fault: str) -> Callable[..., Any]:
    def softmax_vjp(cotangent: NDArray, x: NDArray, *, axis: int = -1, temperature: float = 1.0) -> Any:
        """dx = p (g - <p, g>) / T."""
        p, g = softmax(x, axis=axis, temperature=temperature), cotangent
        if fault == "softmax_vjp_raises":
            raise TypeError("softmax_vjp() got an unexpected keyword argument")
        if fault == "softmax_vjp_plain_average":
            return (p * (g - g.mean(axis=axis, keepdims=True)) / float(temperature),)
        if fault == "softmax_vjp_overwrites_the_cotangent":
            g *= p
            return ((g - g.sum(axis=axis, keepdims=True) * g) / float(temperature),)
        return (p * (g - (p * g).sum(axis=axis, keepdims=True)) / float(temperature),)

    return softmax_vjp


def logsumexp(x: NDArray, *, axis: int = -1) -> NDArray:
    """y = log sum_j exp(x_j)."""
    m = x.max(axis=axis, keepdims=True)
    return np.asarray((m + np.log(np.exp(x - m).sum(axis=axis, keepdims=True))).squeeze(axis), dtype=x.dtype)


def _logsumexp_vjp(fault: str) -> Callable[..., Any]:
    def logsumexp_vjp(cotangent: NDArray, x: NDArray, *, axis: int = -1) -> tuple[NDArray]:
        """dx = p g."""
        g = np.ones_like(cotangent) if fault == "logsumexp_vjp_forgets_the_cotangent" else cotangent
        return (softmax(x, axis=axis) * np.expand_dims(g, axis),)

    return logsumexp_vjp


def layer_norm(x: NDArray, weight: NDArray, bias: NDArray, *, eps: float = 1e-5) -> NDArray:
    """y = weight (x - mean) / sqrt(variance + eps) + bias."""
    return weight * _normal(x, eps)[0] + bias


def _normal(x: NDArray, eps: float) -> tuple[NDArray, NDArray]:
    centred = x - x.mean(axis=-1, keepdims=True)
    s = np.sqrt((centred * centred).mean(axis=-1, keepdims=True) + x.dtype.type(eps))
    return centred / s, s


def _layer_norm_vjp(fault: str) -> Callable[..., Any]:
    def layer_norm_vjp(cotangent: NDArray, x: NDArray, weight: NDArray, bias: NDArray, *, eps: float = 1e-5) -> Any:
        """dx = (h - mean h - n mean(h n)) / s with h = weight g, dweight = sum g n, dbias = sum g."""
        n, s = _normal(x, eps)
        h = weight * cotangent
        dx = (h - h.mean(axis=-1, keepdims=True) - n * (h * n).mean(axis=-1, keepdims=True)) / s
        rows = tuple(range(x.ndim - 1))
        if fault == "layer_norm_vjp_of_each_row":
            return dx, cotangent * n, cotangent
        dweight, dbias = (cotangent * n).sum(axis=rows), cotangent.sum(axis=rows)
        if fault == "layer_norm_vjp_in_float64":
            return tuple(np.asarray(each, dtype=np.float64) for each in (dx, dweight, dbias))
        return (dx, dbias, dweight) if fault == "layer_norm_vjp_swaps_weight_and_bias" else (dx, dweight, dbias)

    return layer_norm_vjp


def attention(
    q: NDArray, k: NDArray, v: NDArray, *, mask: NDArray | None = None, bias: NDArray | None = None,
    causal: bool = False, scale: float | None = None,
) -> NDArray:  # fmt: skip
    """softmax(q k^T scale + bias) v over the keys a row may see."""
    return _attention_weights(q, k, mask, bias, causal, scale) @ _each_head(v, q)


def _attention_weights(
    q: NDArray, k: NDArray, mask: NDArray | None, bias: NDArray | None, causal: bool, scale: float | None
) -> NDArray:
    s = q @ _each_head(k, q).swapaxes(-1, -2) * _factor(q, scale)
    s = s if bias is None else s + bias
    visible = np.tri(*s.shape[2:], k=k.shape[2] - q.shape[2], dtype=bool) | (not causal)
    s = np.where(visible if mask is None else visible & mask, s, -np.inf)
    m = s.max(axis=-1, keepdims=True)
    e = np.exp(s - np.where(np.isneginf(m), 0, m))
    total = e.sum(axis=-1, keepdims=True)
    return e / np.where(total == 0, 1, total)


def _attention_vjp(fault: str) -> Callable[..., Any]:
    def attention_vjp(
        cotangent: NDArray, q: NDArray, k: NDArray, v: NDArray, *, mask: NDArray | None = None,
        bias: NDArray | None = None, causal: bool = False, scale: float | None = None,
    ) -> tuple[NDArray | None, ...]:  # fmt: skip
        """ds = p (dp - sum p dp), dq = ds k scale, dk = ds^T q scale, dv = p^T do, each key head's summed."""
        p, g = _attention_weights(q, k, mask, bias, causal, scale), cotangent
        if fault == "attention_vjp_scales_query_in_place":
            q *= q.dtype.type(_factor(q, scale))
        dp = g @ _each_head(v, q).swapaxes(-1, -2)
        ds = p * (dp - (p * dp).sum(axis=-1, keepdims=True))
        dq = ds @ _each_head(k, q) * _factor(q, scale)
        scaled = q if fault == "attention_vjp_scales_query_in_place" else q * _factor(q, scale)
        dk, dv = ds.swapaxes(-1, -2) @ scaled, p.swapaxes(-1, -2) @ g
        if fault != "attention_vjp_of_query_heads":
            dk, dv = (each.reshape(*a.shape[:2], -1, *a.shape[2:]).sum(axis=2) for each, a in ((dk, k), (dv, v)))
        if fault == "attention_vjp_batch_summed":
            dk, dv = (np.broadcast_to(each.sum(axis=0), each.shape) for each in (dk, dv))
        if fault == "attention_vjp_is_short":
            return dq, dk
        found = [dq, dk, dv] + ([] if mask is None else [None])
        if bias is not None:
            axes = tuple(axis for axis, length in enumerate(bias.shape) if length == 1)
            found.append(None if fault == "attention_vjp_without_bias" else ds.sum(axis=axes, keepdims=True))
        return tuple(found)

    return attention_vjp


def _each_head(x: NDArray, q: NDArray) -> NDArray:
    """[B,G,Tk,D] -> [B,H,Tk,D]."""
    return np.repeat(x, q.shape[1] // x.shape[1], axis=1)


def _factor(q: NDArray, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else float(scale)


_FORWARD = {"softmax": softmax, "logsumexp": logsumexp, "layer_norm": layer_norm, "attention": attention}
_MAKE = {
    "softmax": _softmax_vjp, "logsumexp": _logsumexp_vjp, "layer_norm": _layer_norm_vjp, "attention": _attention_vjp,
}  # fmt: skip
# law that must accuse: {variant: (where it was seen, what is wrong)}; the law names the operation
_TABLE: dict[str, dict[str, tuple[str, str]]] = {
    "softmax/returns-gradients": {
        "softmax_vjp_raises": ("mutation: a keyword that the backward lacks", "every backward raises"),
    },
    "layer_norm/returns-gradients": {
        "layer_norm_vjp_in_float64": ("mutation: NumPy's default dtype", "gradients in float64 for any input"),
    },
    "attention/returns-gradients": {
        "attention_vjp_is_short": ("mutation: the value's gradient forgotten", "two gradients for three arrays"),
    },
    "softmax/jacobian-is-symmetric": {
        "softmax_vjp_plain_average": ("mutation: mean for expectation", "dx = p (g - mean g)"),
    },
    "softmax/gradient-sums-to-zero": {
        "softmax_vjp_overwrites_the_cotangent": ("Liger-Kernel#370", "p g is written into g and read as g again"),
    },
    "logsumexp/gradient-sums-to-the-cotangent": {
        "logsumexp_vjp_forgets_the_cotangent": ("mutation: a derivative, no product", "dx = p whatever g is"),
    },
    "layer_norm/gradient-equals-the-reference": {
        "layer_norm_vjp_of_each_row": ("mutation: no sum over rows", "dweight and dbias have the shape of x"),
        "layer_norm_vjp_swaps_weight_and_bias": ("mutation: the order of a tuple", "dbias stands where dweight is due"),
    },
    "attention/grouped-heads-add-up": {
        "attention_vjp_of_query_heads": ("levanter#449", "dk and dv have a row for each query head"),
    },
    "attention/batch-rows-have-their-own-gradients": {
        "attention_vjp_batch_summed": ("mutation: a sum too many", "dk and dv are summed over the batch"),
    },
    "attention/backward-leaves-inputs-untouched": {
        "attention_vjp_scales_query_in_place": ("mutation: in-place scaling", "the query is multiplied by the scale"),
    },
    "attention/gradient-exists": {
        "attention_vjp_without_bias": ("mutation: bias treated as a mask", "None for the gradient of bias"),
    },
}  # fmt: skip
FAULTS: dict[str, Fault] = {}
VARIANTS: dict[str, dict[str, Callable[..., Any]]] = {
    "correct": _FORWARD | {operation + "_vjp": make("correct") for operation, make in _MAKE.items()}
}
for _law, _mistakes in _TABLE.items():
    _operation = _law.split("/")[0]
    for _variant, (_source, _summary) in _mistakes.items():
        FAULTS[_variant] = Fault(_operation, _law, _source, _summary)
        VARIANTS[_variant] = {_operation: _FORWARD[_operation], _operation + "_vjp": _MAKE[_operation](_variant)}
