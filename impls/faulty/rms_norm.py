"""Wrong root mean square norms: one correct implementation with one switch for each mistake."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veriformer.declarations import Capabilities, Fault

FRAMEWORK = "numpy"
BLOCK = 8
_PLAIN = Capabilities(blocks=(4, BLOCK))
_HALF = Capabilities(dtypes=("float32", "float16"), blocks=(4, BLOCK))
_ONE_PLUS = Capabilities(
    dtypes=("float32", "bfloat16"), blocks=(4, BLOCK), rms_weight="one_plus", intermediate="float32"
)


def _make(fault: str) -> Callable[..., NDArray]:
    def rms_norm(x: NDArray, weight: NDArray, *, eps: float = 1e-6) -> NDArray:
        with np.errstate(all="ignore"):
            z = _wide(_read(x, fault))
            if fault == "mean_subtracted" or (fault == "mean_subtracted_when_wide" and x.shape[-1] % BLOCK == 0):
                z = z - z.mean(axis=-1, keepdims=True)
            square = _mean_square(z, fault, x.dtype)
            inverse = _rows(_inverse_root(square, eps, fault), fault)
            return (_gain(weight, fault) * (z * inverse)).astype(x.dtype)

    rms_norm.__qualname__ = f"rms_norm[{fault}]"
    return rms_norm


def _read(x: NDArray, fault: str) -> NDArray:
    if fault != "reads_as_contiguous" or x.flags.c_contiguous:
        return x
    base = x
    while isinstance(base.base, np.ndarray):
        base = base.base
    start = (x.__array_interface__["data"][0] - base.__array_interface__["data"][0]) // x.itemsize
    # np.resize repeats a buffer that is too short, where the real mistake reads foreign memory.
    return np.resize(base.ravel(order="K")[max(start, 0) :], x.shape)


def _mean_square(z: NDArray, fault: str, storage: Any) -> NDArray:
    """The mean square of each row, [..., 1]."""
    width = z.shape[-1]
    axis: tuple[int, ...] = (-1,)
    if fault == "rank_three_flattened" and z.ndim > 2:
        axis = tuple(range(1, z.ndim))
    if fault == "whole_array":
        axis = tuple(range(z.ndim))
    squares = z * z
    if fault == "squares_in_storage":
        squares = squares.astype(storage).astype(z.dtype)
    if fault == "sum_in_storage":
        return squares.sum(axis=-1, keepdims=True).astype(storage).astype(z.dtype) / width
    if fault == "tail_dropped":
        return squares[..., : max(width // 4 * 4, 1)].mean(axis=-1, keepdims=True)
    if fault == "sum_for_mean":
        return squares.sum(axis=-1, keepdims=True)
    if fault == "sample_divisor":
        return squares.sum(axis=-1, keepdims=True) / max(width - 1, 1)
    return squares.mean(axis=axis, keepdims=True)


def _inverse_root(square: NDArray, eps: float, fault: str) -> NDArray:
    eps = {"eps_zero": 0.0, "eps_1e-3": 1e-3, "eps_in_half": float(np.float16(eps))}.get(fault, eps)
    if fault == "eps_outside":
        return 1 / (np.sqrt(square) + eps)
    if fault == "eps_as_floor":
        return 1 / np.maximum(np.sqrt(square), eps)
    return 1 / (square + eps) if fault == "root_omitted" else 1 / np.sqrt(square + eps)


def _rows(statistic: NDArray, fault: str) -> NDArray:
    """The statistic each row uses: its own, unless the index is wrong."""
    if fault != "row_index_wraps":
        return statistic
    flat = statistic.reshape(-1)
    return flat[np.arange(flat.size) % 4].reshape(statistic.shape)


def _gain(weight: NDArray, fault: str) -> NDArray:
    if fault == "one_added_in_storage":
        return _wide((weight + weight.dtype.type(1)).astype(weight.dtype))
    wide = _wide(weight)
    if fault == "weight_rolled":
        return np.roll(wide, 1)
    if fault == "weight_ignored":
        return np.ones_like(wide)
    return 1 + wide if fault in ("weight_plus_one", "one_plus_declared") else wide


def _make_layer_norm(fault: str) -> Callable[..., NDArray]:
    """A layer norm that stands beside a correct rms_norm."""

    def layer_norm(x: NDArray, weight: NDArray, bias: NDArray, *, eps: float = 1e-5) -> NDArray:
        z, width = _wide(x), x.shape[-1]
        mean = z.mean(axis=-1, keepdims=True)
        count = max(width - 1, 1) if fault == "layer_norm_is_unbiased" else width
        variance = ((z - mean) ** 2).sum(axis=-1, keepdims=True) / count
        centred = z if fault == "layer_norm_keeps_the_mean" else z - mean
        return (_wide(weight) * (centred / np.sqrt(variance + eps)) + _wide(bias)).astype(x.dtype)

    layer_norm.__qualname__ = f"layer_norm[{fault}]"
    return layer_norm


def _wide(x: NDArray) -> NDArray:
    return x if x.dtype == np.float64 else x.astype(np.float32)


# law that must accuse: {variant: (where it was seen, what is wrong)}
_TABLE: dict[str, dict[str, tuple[str, str]]] = {
    "mean-square-is-m-over-m-plus-eps": {
        "sample_divisor": ("annotated-transformer#119", "divided by d - 1"),
        "sum_for_mean": ("mutation: the norm for the root mean square", "the sum of squares is not divided by d"),
        "root_omitted": ("TPlinker#37", "divided by the mean square"),
        "mean_subtracted": ("mutation: layer norm under another name", "the mean is subtracted"),
        "mean_subtracted_when_wide": ("burn#5607", "the mean is subtracted where the width is a multiple of 8"),
        "eps_1e-3": ("keras-hub#728", "eps is always 1e-3"),
        "eps_outside": ("mutation: sqrt(m) + eps", "eps is added to the root"),
        "eps_as_floor": ("x-transformers: max(norm, eps)", "eps is a floor of the root and not added"),
    },
    "large-rows-keep-their-size": {
        "squares_in_storage": ("pytorch#133085", "squares are held in float16 and overflow from 256"),
        "sum_in_storage": ("onnxruntime#29043", "the sum of squares is held in float16"),
    },
    "row-of-zeros-gives-zeros": {
        "eps_zero": ("TIM-VX#589", "eps is always 0: 0 / 0 in a row of zeros"),
        "eps_in_half": ("keras#22586", "eps is cast to float16, where 1e-12 is 0"),
    },
    "rows-are-independent": {
        "row_index_wraps": ("apex#411", "the row index wraps (here at 4, there at 65536)"),
        "whole_array": ("mutation: no axis given", "one root mean square for all rows"),
    },
    "rank-changes-nothing": {
        "rank_three_flattened": ("FlagGems#5392", "all axes but the first are one row"),
    },
    "layout-changes-nothing": {
        "reads_as_contiguous": ("kernl#193", "a strided array is read as packed"),
    },
    "channels-permute": {
        "weight_rolled": ("mutation: channel index off by one", "each channel has its neighbour's weight"),
        "tail_dropped": ("mutation: a loop over whole vectors only", "the mean misses a last block of 4"),
    },
    "gain-is-as-declared": {
        "weight_ignored": ("mutation: an accepted argument without effect", "weight has no effect"),
        "weight_plus_one": ("Liger-Kernel#74", "the gain is 1 + weight, undeclared"),
        "gain_without_one": ("axolotl#1886", "the gain is weight where 1 + weight is declared"),
    },
    "equals-the-reference": {
        "one_added_in_storage": ("vllm#3653", "1 + weight is rounded to bfloat16: a small weight is lost"),
    },
}
_DTYPES = {"one_added_in_storage": "bfloat16", "squares_in_storage": "float16", "sum_in_storage": "float16"}
FAULTS = {
    variant: Fault("rms_norm", f"rms_norm/{law}", source, summary, _DTYPES.get(variant, "float32"))
    for law, variants in _TABLE.items()
    for variant, (source, summary) in variants.items()
}
_BESIDE = {
    "layer_norm_is_unbiased": ("annotated-transformer#119", "variance divided by d - 1 beside a mean square by d"),
    "layer_norm_keeps_the_mean": ("mutation: centred for the variance only", "the mean is not subtracted"),
}
VARIANTS: dict[str, dict[str, Callable[..., Any]]] = {
    variant: {"rms_norm": _make(variant)} for variant in ("one_plus_declared", *FAULTS)
}
VARIANTS["correct"] = {"rms_norm": _make("correct"), "layer_norm": _make_layer_norm("correct")}
for _variant, (_source, _summary) in _BESIDE.items():
    _law = "layer_norm/is-rms-norm-after-centring"
    FAULTS[_variant] = Fault("layer_norm", _law, _source, _summary)
    VARIANTS[_variant] = {"rms_norm": _make("correct"), "layer_norm": _make_layer_norm(_variant)}
_OWN = dict.fromkeys(("one_plus_declared", "gain_without_one", "one_added_in_storage"), _ONE_PLUS)
_OWN |= dict.fromkeys(("squares_in_storage", "sum_in_storage"), _HALF)
CAPABILITIES = {variant: {"rms_norm": _OWN.get(variant, _PLAIN)} for variant in VARIANTS}
