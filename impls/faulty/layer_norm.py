"""Wrong layer norms: one correct two-pass implementation with one switch for each mistake."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from veriformer.declarations import Capabilities, Fault

FRAMEWORK = "numpy"
BLOCK = 8
CAPABILITIES = {"layer_norm": Capabilities(blocks=(4, BLOCK))}


def _make(fault: str) -> Callable[..., NDArray]:
    def layer_norm(x: NDArray, weight: NDArray, bias: NDArray, *, eps: float = 1e-5) -> NDArray:
        with np.errstate(all="ignore"):
            z = _wide(_read(x, fault))
            z = z.astype(np.float16).astype(z.dtype) if fault == "input_in_half" else z
            mean, variance = _statistics(z, fault)
            inverse = _inverse_deviation(variance, eps, fault)
            mean, inverse = _rows(mean, fault), _rows(inverse, fault)
            return _affine(z, mean, inverse, _wide(weight), _wide(bias), fault).astype(x.dtype)

    layer_norm.__qualname__ = f"layer_norm[{fault}]"
    return layer_norm


def _read(x: NDArray, fault: str) -> NDArray:
    if fault != "reads_as_contiguous" or x.flags.c_contiguous:
        return x
    base = x
    while isinstance(base.base, np.ndarray):
        base = base.base
    start = (x.__array_interface__["data"][0] - base.__array_interface__["data"][0]) // x.itemsize
    # np.resize repeats a buffer that is too short, where the real mistake reads foreign memory.
    return np.resize(base.ravel(order="K")[max(start, 0) :], x.shape)


def _statistics(z: NDArray, fault: str) -> tuple[NDArray, NDArray]:
    """Mean and variance of each row, [..., 1]."""
    width = z.shape[-1]
    axis: tuple[int, ...] = (-1,)
    if fault == "rank_three_flattened" and z.ndim > 2:
        axis = tuple(range(1, z.ndim))
    if fault == "whole_array":
        axis = tuple(range(z.ndim))
    part = z[..., : max(width // 4 * 4, 1)] if fault == "tail_dropped" else z
    mean = np.zeros_like(z[..., :1]) if fault == "mean_omitted" else part.mean(axis=axis, keepdims=True)
    one_pass = fault in ("one_pass", "one_pass_clamped") or (fault == "one_pass_when_wide" and width % BLOCK == 0)
    if one_pass:
        variance = (z * z).mean(axis=-1, keepdims=True) - mean * mean
        return mean, variance if fault == "one_pass" else np.maximum(variance, 0)
    squares = (z - mean) ** 2
    if fault == "squares_in_half":
        squares = squares.astype(np.float16).astype(z.dtype)
    if fault == "sample_variance":
        return mean, squares.sum(axis=-1, keepdims=True) / max(width - 1, 1)
    return mean, squares.mean(axis=axis, keepdims=True)


def _inverse_deviation(variance: NDArray, eps: float, fault: str) -> NDArray:
    eps = {"eps_zero": 0.0, "eps_1e-3": 1e-3, "eps_1e-12": 1e-12}.get(fault, eps)
    if fault == "eps_outside":
        return 1 / (np.sqrt(variance) + eps)
    if fault == "eps_as_floor":
        return 1 / np.sqrt(np.maximum(variance, eps))
    if fault == "squared_for_rooted":
        return 1 / (variance + eps) ** 2
    return 1 / (variance + eps) if fault == "root_omitted" else 1 / np.sqrt(variance + eps)


def _rows(statistic: NDArray, fault: str) -> NDArray:
    """The statistics each row uses: its own, unless the index is wrong."""
    flat = statistic.reshape(-1)
    if fault == "row_index_wraps":
        return flat[np.arange(flat.size) % 4].reshape(statistic.shape)
    return statistic


def _affine(z: NDArray, mean: NDArray, inverse: NDArray, weight: NDArray, bias: NDArray, fault: str) -> NDArray:
    if fault == "folded_into_scale_and_shift":
        return z * (inverse * weight) + (bias - mean * inverse * weight)
    y = (z - mean) * inverse
    if fault == "bias_scaled_by_weight":
        return weight * (y + bias)
    gain = {"weight_ignored": 1.0, "weight_plus_one": 1 + weight, "weight_rolled": np.roll(weight, 1)}.get(
        fault, weight
    )
    return gain * y if fault == "bias_ignored" else gain * y + bias


def _wide(x: NDArray) -> NDArray:
    return x if x.dtype == np.float64 else x.astype(np.float32)


# law that must accuse: {variant: (where it was seen, what is wrong)}
_TABLE: dict[str, dict[str, tuple[str, str]]] = {
    "shift-changes-nothing": {
        "one_pass": ("onnxruntime#28463", "E[x^2] - E[x]^2, which cancels and may turn negative"),
        "one_pass_clamped": ("pytorch#51102", "E[x^2] - E[x]^2 clamped at 0: finite and wrong"),
        "one_pass_when_wide": ("burn#5607", "E[x^2] - E[x]^2 where the width is a multiple of 8"),
    },
    "width-one-gives-the-bias": {
        "folded_into_scale_and_shift": ("pytorch#98075", "x (r w) + (b - m r w), which cancels"),
    },
    "constant-row-gives-the-bias": {
        "eps_zero": ("TIM-VX#589", "eps is always 0: 0 / 0 in a constant row"),
    },
    "variance-is-v-over-v-plus-eps": {
        "sample_variance": ("annotated-transformer#119", "divided by d - 1"),
        "squared_for_rooted": ("TPlinker#37", "exponent 2 for 1/2"),
        "root_omitted": ("mutation: variance for deviation", "divided by the variance"),
        "eps_1e-3": ("keras-hub#728", "eps is always 1e-3"),
        "eps_1e-12": ("keras-hub#728", "eps is always 1e-12"),
        "eps_outside": ("mutation: sqrt(v) + eps", "eps is added to the deviation"),
        "eps_as_floor": ("mutation: max(v, eps)", "eps is a floor and not added"),
        "weight_plus_one": ("Liger-Kernel#74", "the gain is 1 + weight"),
    },
    "mean-is-zero": {
        "mean_omitted": ("mutation: root mean square norm", "the mean is not subtracted"),
        "tail_dropped": ("mutation: a loop over whole vectors only", "the mean misses a last block of 4"),
    },
    "rows-are-independent": {
        "row_index_wraps": ("apex#411", "the row index wraps (here at 4, there at 65536)"),
        "whole_array": ("mutation: no axis given", "one mean and variance for all rows"),
    },
    "rank-changes-nothing": {
        "rank_three_flattened": ("FlagGems#5392", "all axes but the first are one row"),
    },
    "layout-changes-nothing": {
        "reads_as_contiguous": ("kernl#193", "a strided array is read as packed"),
    },
    "affine-in-weight-and-bias": {
        "weight_ignored": ("mutation: an accepted argument without effect", "weight has no effect"),
        "bias_ignored": ("mutation: an accepted argument without effect", "bias has no effect"),
        "bias_scaled_by_weight": ("mutation: brackets", "w (y + b) for w y + b"),
    },
    "channels-permute": {
        "weight_rolled": ("mutation: channel index off by one", "each channel has its neighbour's weight"),
    },
    "equals-the-reference": {
        "input_in_half": ("mutation: float16 input in a float32 kernel", "x is rounded to float16"),
        "squares_in_half": ("pytorch#133085", "squares are held in float16 and overflow from 256"),
    },
}
FAULTS = {
    variant: Fault("layer_norm", f"layer_norm/{law}", source, summary)
    for law, variants in _TABLE.items()
    for variant, (source, summary) in variants.items()
}
VARIANTS = {variant: {"layer_norm": _make(variant)} for variant in ("correct", *FAULTS)}
