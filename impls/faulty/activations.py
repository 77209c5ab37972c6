"""Wrong gelu and relu: one correct implementation of each with one switch for each mistake."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veriformer.declarations import Capabilities, Fault

FRAMEWORK = "numpy"
LANES = 4
_erf = np.vectorize(math.erf, otypes=[np.float64])
_FORMS = {"gelu_tanh_declared", "gelu_erf_for_tanh", "gelu_square_for_cube", "gelu_coefficient_misplaced"}


def _make_gelu(fault: str) -> Callable[..., NDArray]:
    def gelu(x: NDArray) -> NDArray:
        z = x if x.dtype == np.float64 else x.astype(np.float32)
        with np.errstate(all="ignore"):
            y = _gelu(z, fault)
        return _tail(z, y, fault).astype(x.dtype)

    gelu.__qualname__ = f"gelu[{fault}]"
    return gelu


def _gelu(z: NDArray, fault: str) -> NDArray:
    if fault == "gelu_by_sigmoid":
        return z / (1 + np.exp(-1.702 * z))
    if fault == "gelu_is_silu":
        return z / (1 + np.exp(-z))
    if fault == "gelu_is_relu":
        return np.maximum(z, 0)
    if fault == "gelu_half_is_missing":
        return z * (1 + _bell_integral(z, fault))
    if fault == "gelu_one_plus_tanh_in_half":
        return z / 2 * (1 + _bell_integral(z, fault)).astype(np.float16).astype(z.dtype)
    y = z / 2 * (1 + _bell_integral(z, fault))
    return np.where(z < -3, 0, y) if fault == "gelu_tail_is_zero" else y


def _bell_integral(z: NDArray, fault: str) -> NDArray:
    """erf(z / sqrt 2), or what stands for it."""
    root = math.sqrt(2 / math.pi)
    if fault in ("gelu_tanh_undeclared", "gelu_tanh_declared", "gelu_one_plus_tanh_in_half"):
        return np.tanh(root * z * (1 + 0.044715 * z * z))
    if fault == "gelu_square_for_cube":
        return np.tanh(root * (z + 0.044715 * z * z))
    if fault == "gelu_coefficient_misplaced":
        return np.tanh(root * 0.044715 * (z + z * z * z))
    if fault == "gelu_overflows":
        e = np.exp(2 * root * z * (1 + 0.044715 * z * z))
        return (e - 1) / (e + 1)
    if fault == "gelu_erf_by_a_series":
        t = z / math.sqrt(2)
        terms = ((-1) ** k * t ** (2 * k + 1) / (math.factorial(k) * (2 * k + 1)) for k in range(8))
        return 2 / math.sqrt(math.pi) * sum(terms)
    if fault == "gelu_by_rows":
        z = z - z.mean(axis=-1, keepdims=True)
    if fault == "gelu_erf_of_size":
        z = np.abs(z)
    argument = z if fault == "gelu_root_of_two_is_missing" else z / math.sqrt(2)
    return _erf(argument.astype(np.float64)).astype(z.dtype)


def _make_relu(fault: str) -> Callable[..., NDArray]:
    def relu(x: NDArray) -> NDArray:
        zero = np.zeros_like(x)
        if fault == "relu_is_softplus":
            return np.logaddexp(x.astype(np.float64), 0).astype(x.dtype)
        if fault == "relu_is_size":
            return np.abs(x)
        y = np.maximum(x, zero)
        if fault == "relu_leaks":
            y = np.where(x < 0, x * x.dtype.type(0.01), x)
        if fault == "relu_capped_at_six":
            y = np.minimum(y, x.dtype.type(6))
        if fault == "relu_shifted":
            y = np.where(x > 0.5, x, zero)
        return _tail(x, y, fault)

    relu.__qualname__ = f"relu[{fault}]"
    return relu


def _tail(x: NDArray, y: NDArray, fault: str) -> NDArray:
    """The result, in which a last group of lanes that is not full may be as it came."""
    if not fault.endswith("tail_untouched") or x.size % LANES == 0:
        return y
    full = x.size // LANES * LANES
    return np.concatenate([y.reshape(-1)[:full], x.reshape(-1)[full:]]).reshape(x.shape)


# law that must accuse: {variant: (where it was seen, what is wrong)}; the variant names the operation
_TABLE: dict[str, dict[str, tuple[str, str]]] = {
    "has-the-values-of-its-form": {
        "gelu_tanh_undeclared": ("litgpt#1004", "the approximation with tanh, undeclared"),
        "gelu_erf_for_tanh": ("gemma_pytorch#37", "the error function where tanh is declared"),
        "gelu_coefficient_misplaced": ("tvm#16188", "0.044715 stands before the bracket"),
        "gelu_by_sigmoid": ("mutation: a faster approximation", "x sigmoid(1.702 x)"),
        "gelu_root_of_two_is_missing": ("mutation: erf for the normal distribution", "erf(x) for erf(x / sqrt 2)"),
        "gelu_tail_is_zero": ("tt-metal#56517", "0 below -3"),
        "gelu_is_relu": ("mutation: another activation", "max(x, 0)"),
    },
    "lies-just-under-relu": {
        "gelu_overflows": ("mutation: tanh by exponentials", "inf / inf where exp overflows"),
        "gelu_is_silu": ("mutation: another activation", "x sigmoid(x)"),
    },
    "falls-and-then-rises": {
        "gelu_erf_by_a_series": ("mutation: a polynomial beyond its range", "eight terms of the series of erf"),
    },
    "reflection-leaves-the-input": {
        "gelu_square_for_cube": ("tvm#16188", "x + 0.044715 x² for x + 0.044715 x³"),
        "gelu_half_is_missing": ("mutation: a factor forgotten", "x (1 + erf) for x/2 (1 + erf)"),
        "gelu_one_plus_tanh_in_half": ("tt-metal#35971", "1 + tanh is rounded to float16, where it cancels"),
        "gelu_erf_of_size": ("mutation: a table for x >= 0 without the mirrored half", "erf of |x|"),
        "relu_leaks": ("mutation: another activation", "x / 100 where x < 0"),
        "relu_capped_at_six": ("mutation: another activation", "min(max(x, 0), 6)"),
        "relu_is_size": ("mutation: the sign bit cleared", "|x|"),
    },
    "each-entry-by-itself": {
        "gelu_tail_untouched": ("mutation: a loop over whole vectors only", "a last group of less than 4 is copied"),
        "gelu_by_rows": ("mutation: centred by row", "the mean of the row is taken off first"),
        "relu_tail_untouched": ("mutation: a loop over whole vectors only", "a last group of less than 4 is copied"),
    },
    "twice-is-once": {
        "relu_is_softplus": ("mutation: another activation", "log(1 + exp x)"),
    },
    "goes-with-a-positive-factor": {
        "relu_shifted": ("mutation: a threshold that is not 0", "0 up to 1/2"),
    },
}
_MAKE = {"gelu": _make_gelu, "relu": _make_relu}
FAULTS = {
    variant: Fault(variant.split("_")[0], f"{variant.split('_')[0]}/{law}", source, summary)
    for law, variants in _TABLE.items()
    for variant, (source, summary) in variants.items()
}
VARIANTS: dict[str, dict[str, Callable[..., Any]]] = {
    "correct": {operation: make("correct") for operation, make in _MAKE.items()},
    "gelu_tanh_declared": {"gelu": _make_gelu("gelu_tanh_declared")},
}
for _variant, _fault in FAULTS.items():
    VARIANTS[_variant] = {_fault.operation: _MAKE[_fault.operation](_variant)}
CAPABILITIES = {
    variant: {operation: Capabilities(gelu="tanh" if variant in _FORMS else "erf") for operation in operations}
    for variant, operations in VARIANTS.items()
}
