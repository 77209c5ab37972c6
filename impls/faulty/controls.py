"""Right implementations that look wrong: an honest suite stays green on every variant here.

Some are mistakes that cancel (a constant on a whole row of logits), some are other orders of rounding,
some are conventions that CAPABILITIES declares. Each has the keywords in which it is right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veriformer.declarations import Capabilities

FRAMEWORK = "numpy"
_LOG2_E = 1.4426950408889634


def _make_softmax(way: str) -> Callable[..., NDArray]:
    def softmax(x: NDArray, *, axis: int = -1, temperature: float = 1.0) -> NDArray:
        z = np.moveaxis(_wide(x, way), axis, -1)
        t = float(temperature)
        if way == "softmax_minus_infinity_is_finite":
            z = np.maximum(z, z.dtype.type(-1e30))
        if way == "softmax_times_reciprocal":
            z = z * (1 / t)
            e = np.exp(z - z.max(axis=-1, keepdims=True))
        elif way == "softmax_shifted_before_dividing":
            e = np.exp((z - z.max(axis=-1, keepdims=True)) / t)
        else:
            z = z / t
            e = np.exp(z - z.max(axis=-1, keepdims=True))
        p = e / _sum(e, way)
        return np.ascontiguousarray(np.moveaxis(p, -1, axis)).astype(x.dtype)

    return softmax


def _make_log_softmax(way: str) -> Callable[..., NDArray]:
    def log_softmax(x: NDArray, *, axis: int = -1) -> NDArray:
        z = _wide(x, way)
        m = z.max(axis=axis, keepdims=True)
        lse = m + np.log(np.exp(z - m).sum(axis=axis, keepdims=True))
        return (z - lse).astype(x.dtype)

    return log_softmax


def _make_layer_norm(way: str) -> Callable[..., NDArray]:
    def layer_norm(x: NDArray, weight: NDArray, bias: NDArray, *, eps: float = 1e-5) -> NDArray:
        z, width = _wide(x, way), x.shape[-1]
        mean = z.sum(axis=-1, keepdims=True) * (1 / width)
        if way == "layer_norm_one_pass_in_float64":
            wide = x.astype(np.float64)
            mean = wide.mean(axis=-1, keepdims=True)
            variance = np.maximum((wide * wide).mean(axis=-1, keepdims=True) - mean * mean, 0)
            mean, variance = mean.astype(np.float32), variance.astype(np.float32)
        elif way == "layer_norm_unbiased_declared":
            variance = np.square(z - mean).sum(axis=-1, keepdims=True) / max(width - 1, 1)
        else:
            variance = np.square(z - mean).mean(axis=-1, keepdims=True)
        if way == "layer_norm_eps_outside_declared":
            inverse = 1 / (np.sqrt(variance) + eps)
        else:
            inverse = 1 / np.sqrt(variance + eps)
        y = (z - mean) * inverse
        return (_wide(weight, way) * y + _wide(bias, way)).astype(x.dtype)

    return layer_norm


def _make_attention(way: str) -> Callable[..., NDArray]:
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
    ) -> NDArray:
        if way == "bthd_declared":
            q, k, v = (np.swapaxes(x, 1, 2) for x in (q, k, v))
        out, _ = _attention(q, k, v, mask, bias, causal, scale, window, way)
        return np.ascontiguousarray(out.swapaxes(1, 2)) if way == "bthd_declared" else out

    return attention


def _sink_by_sigmoid(
    q: NDArray,
    k: NDArray,
    v: NDArray,
    *,
    mask: NDArray | None = None,
    causal: bool = False,
    scale: float | None = None,
    sink: NDArray | None = None,
) -> NDArray:
    out, lse = _attention(q, k, v, mask, None, causal, scale, None, "sink_by_sigmoid")
    if sink is None:
        return out
    with np.errstate(over="ignore"):
        share = 1 / (1 + np.exp(_wide(sink, "")[:, None] - lse))
    return (_wide(out, "") * share[..., None]).astype(q.dtype)


def _attention(
    q: NDArray,
    k: NDArray,
    v: NDArray,
    mask: NDArray | None,
    bias: NDArray | None,
    causal: bool,
    scale: float | None,
    window: tuple[int | None, int | None] | None,
    way: str,
) -> tuple[NDArray, NDArray]:
    each = q.shape[1] // k.shape[1]
    query, key, value = _wide(q, way), *(np.repeat(_wide(x, way), each, axis=1) for x in (k, v))
    visible = _visible(q.shape[2], k.shape[2], causal, window, mask, way)
    logits = _logits(query, key, q.shape[-1] ** -0.5 if scale is None else float(scale), way)
    logits = logits if bias is None else logits + _wide(bias, way)
    if way == "row_constant_added":
        logits = logits + (1 + np.arange(q.shape[2])[:, None] % 2).astype(logits.dtype)
    if way == "visible_entries_plus_one" and causal:
        logits = logits + 1
    if way == "additive_mask_declared" and mask is not None:
        logits = logits + _wide(mask, way)
    visible = np.broadcast_to(visible, logits.shape)
    logits = np.where(visible, logits, np.asarray(-1e30 if way == "hidden_is_finite" else -np.inf, logits.dtype))
    return _finish(logits, value, visible, way, q.dtype)


def _visible(queries: int, keys: int, causal: bool, window: Any, mask: NDArray | None, way: str) -> NDArray:
    offset = 0 if way == "top_left_declared" else keys - queries
    ahead = np.arange(keys) - (np.arange(queries)[:, None] + offset)
    left, right = window or (None, None)
    visible = (ahead <= 0) | (not causal)
    visible = visible if left is None else visible & (ahead >= -left)
    visible = visible if right is None else visible & (ahead <= right)
    if mask is None:
        return visible
    if way == "additive_mask_declared":
        return visible & ~np.isneginf(_wide(mask, way))
    return visible & (~mask if way == "drop_declared" else mask)


def _logits(query: NDArray, key: NDArray, scale: float, way: str) -> NDArray:
    if way == "query_prescaled":
        return (query * scale) @ key.swapaxes(-1, -2)
    if way == "root_of_scale_on_both":
        return (query * scale**0.5) @ (key * scale**0.5).swapaxes(-1, -2)
    if way == "sums_in_order":
        scores = np.zeros((*query.shape[:3], key.shape[2]), query.dtype)
        for d in range(query.shape[-1]):
            scores = scores + query[..., :, None, d] * key[..., None, :, d]
        return scores * scale
    return query @ key.swapaxes(-1, -2) * scale


def _finish(logits: NDArray, value: NDArray, visible: NDArray, way: str, dtype: Any) -> tuple[NDArray, NDArray]:
    empty = ~visible.any(axis=-1, keepdims=True)
    if way == "powers_of_two":
        logits = logits * _LOG2_E
    m = np.where(empty, 0, logits.max(axis=-1, keepdims=True))
    e = np.exp2(logits - m) if way == "powers_of_two" else np.exp(logits - m)
    s = _sum(e, way)
    with np.errstate(divide="ignore"):
        lse = (m + np.log(s))[..., 0]
    if way == "normalised_first":
        out = (e / np.where(s == 0, 1, s)) @ value
    elif way == "sums_in_order":
        out = np.zeros((*e.shape[:3], value.shape[-1]), e.dtype)
        for j in reversed(range(e.shape[-1])):
            out = out + e[..., j, None] * value[..., j, None, :]
        out = out / np.where(s == 0, 1, s)
    else:
        out = e @ value / np.where(s == 0, 1, s)
    fills = {"empty_mean_declared": value.mean(axis=-2, keepdims=True), "empty_nan_declared": np.nan}
    return np.where(empty, fills[way], out).astype(dtype) if way in fills else out.astype(dtype), lse


def _sum(e: NDArray, way: str) -> NDArray:
    if way not in ("sums_in_order", "softmax_sums_in_order"):
        return e.sum(axis=-1, keepdims=True)
    s = np.zeros_like(e[..., :1])
    for j in range(e.shape[-1]):
        s = s + e[..., j, None]
    return s


def _wide(x: NDArray, way: str) -> NDArray:
    return x if x.dtype == np.float64 else x.astype(np.float64 if way.endswith("float64") else np.float32)


_SOFTMAX = (
    "softmax_times_reciprocal",
    "softmax_shifted_before_dividing",
    "softmax_sums_in_order",
    "softmax_minus_infinity_is_finite",
    "softmax_in_float64",
)
_LAYER_NORM = (
    "layer_norm_one_pass_in_float64",
    "layer_norm_eps_outside_declared",
    "layer_norm_unbiased_declared",
    "layer_norm_in_float64",
)
_ATTENTION = (
    "row_constant_added",  # vllm#945
    "visible_entries_plus_one",  # tinygrad#2425
    "query_prescaled",
    "root_of_scale_on_both",
    "powers_of_two",
    "sums_in_order",
    "normalised_first",
    "hidden_is_finite",
    "attention_in_float64",
    "top_left_declared",
    "drop_declared",
    "additive_mask_declared",
    "bthd_declared",
    "empty_mean_declared",
    "empty_nan_declared",
)
VARIANTS: dict[str, dict[str, Callable[..., NDArray]]] = {
    **{way: {"softmax": _make_softmax(way)} for way in _SOFTMAX},
    "log_softmax_minus_lse": {"log_softmax": _make_log_softmax("log_softmax_minus_lse")},
    **{way: {"layer_norm": _make_layer_norm(way)} for way in _LAYER_NORM},
    **{way: {"attention": _make_attention(way)} for way in _ATTENTION},
    "sink_by_sigmoid": {"attention": _sink_by_sigmoid},  # torchtitan#2211
}
CAPABILITIES = {
    "layer_norm_one_pass_in_float64": {"layer_norm": Capabilities(dtypes=("float32",))},
    "layer_norm_eps_outside_declared": {"layer_norm": Capabilities(norm_epsilon="outside")},
    "layer_norm_unbiased_declared": {"layer_norm": Capabilities(norm_variance="unbiased")},
    "top_left_declared": {"attention": Capabilities(causal_alignment="top_left")},
    "drop_declared": {"attention": Capabilities(mask_means="drop")},
    "additive_mask_declared": {"attention": Capabilities(mask_means="additive")},
    "bthd_declared": {"attention": Capabilities(layout="BTHD")},
    "empty_mean_declared": {"attention": Capabilities(empty_row="mean")},
    "empty_nan_declared": {"attention": Capabilities(empty_row="nan")},
}
