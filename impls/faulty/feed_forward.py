"""Wrong feed-forward layers: one correct implementation with one switch for each mistake."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from veriformer.declarations import Capabilities, Fault

FRAMEWORK = "numpy"
BLOCK = 4
CAPABILITIES = {"feed_forward": Capabilities(blocks=(BLOCK,))}
_erf = np.vectorize(math.erf, otypes=[np.float64])


def _make(fault: str) -> Callable[..., NDArray]:
    def feed_forward(x: NDArray, w1: NDArray, b1: NDArray, w2: NDArray, b2: NDArray) -> NDArray:
        square = w1.shape[0] == w1.shape[1]
        w1 = w1.T if fault == "first_weight_transposed" and square else _read(w1, fault)
        w2 = w2.T if fault == "second_weight_transposed" and square else w2
        rows = x[:1] if fault == "rank_three_takes_the_first" and x.ndim > 2 else x
        rows = rows.reshape(-1, x.shape[-1])
        with np.errstate(all="ignore"):
            hidden = _hidden(rows, w1, b1, fault)
            y = _second(hidden, w2, b2, fault)
        y = y + rows if fault == "residual_added" else y
        if fault == "row_tail_dropped":
            y[max(len(y) // BLOCK * BLOCK, 1) :] = 0
        if fault == "last_row_of_block_reused":
            y = y[np.minimum(np.arange(len(y)), BLOCK - 1)]
        return np.resize(y, x.shape).astype(x.dtype)

    feed_forward.__qualname__ = f"feed_forward[{fault}]"
    return feed_forward


def _read(w: NDArray, fault: str) -> NDArray:
    if fault != "weight_read_as_packed" or w.flags.c_contiguous:
        return w
    base = w
    while isinstance(base.base, np.ndarray):
        base = base.base
    # np.resize repeats a buffer that is too short, where the real mistake reads foreign memory.
    return np.resize(base.ravel(order="K"), w.shape)


def _hidden(rows: NDArray, w1: NDArray, b1: NDArray, fault: str) -> NDArray:
    if fault == "width_three_convolution":
        before, after = np.zeros_like(rows), np.zeros_like(rows)
        before[1:], after[:-1] = rows[:-1], rows[1:]
        rows = (before + rows + after) / 3
    bias = {
        "first_bias_ignored": np.zeros_like(b1),
        "first_bias_after_the_activation": np.zeros_like(b1),
        "first_bias_rolled": np.roll(b1, 1),
        "first_bias_always_one": np.ones_like(b1),
    }.get(fault, b1)
    a = _activation(rows @ w1 + bias, fault)
    if fault == "hidden_in_half":
        a = a.astype(np.float16).astype(rows.dtype)
    return a + b1 if fault == "first_bias_after_the_activation" else a


def _activation(h: NDArray, fault: str) -> NDArray:
    if fault == "activation_is_missing":
        return h
    if fault == "gelu_for_relu":
        return (h / 2 * (1 + _erf(h / math.sqrt(2)))).astype(h.dtype)
    if fault == "softplus_for_relu":
        return np.logaddexp(h, 0).astype(h.dtype)
    if fault == "hidden_units_leak":
        return np.where(h > 0, h, h / 100)
    a = np.maximum(h, 0)
    return np.minimum(a, 6) if fault == "hidden_capped_at_six" else a


def _second(hidden: NDArray, w2: NDArray, b2: NDArray, fault: str) -> NDArray:
    if fault == "unit_tail_dropped":
        full = max(len(w2) // BLOCK * BLOCK, 1)
        hidden, w2 = hidden[:, :full], w2[:full]
    y = hidden @ w2
    if fault == "second_bias_in_the_activation":
        return np.maximum(y, 0) + b2
    y = y if fault == "second_bias_ignored" else y + b2
    return np.maximum(y, 0) if fault == "relu_after_the_second_layer" else y


# law that must accuse: {variant: (where it was seen, what is wrong)}
_TABLE: dict[str, dict[str, tuple[str, str]]] = {
    "both-signs-come-out": {
        "relu_after_the_second_layer": ("Universal-Transformer-Pytorch: positionwise FFN", "relu after w2 as well"),
        "second_bias_in_the_activation": ("mutation: the activation a step late", "relu(a w2) + b2"),
    },
    "positions-are-alike": {
        "width_three_convolution": ("Universal-Transformer-Pytorch: conv FFN", "each token sees its neighbours"),
        "row_tail_dropped": ("mutation: a loop over whole blocks only", "the last rows stay 0"),
        "rank_three_takes_the_first": ("FlagGems#5392", "of several batches the first is repeated"),
    },
    "rows-are-independent": {
        "last_row_of_block_reused": ("mutation: the row index stops at the block's end", "rows from 4 on are row 3"),
    },
    "hidden-units-permute": {
        "first_weight_transposed": ("HF#48154: a weight in the other orientation", "x w1^T where w1 is square"),
        "second_weight_transposed": ("HF#48154: a weight in the other orientation", "a w2^T where w2 is square"),
        "unit_tail_dropped": ("mutation: a loop over whole blocks only", "the last hidden units are left out"),
        "first_bias_rolled": ("mutation: channel index off by one", "each unit has its neighbour's bias"),
    },
    "goes-with-both-weights": {
        "gelu_for_relu": ("HF#29402", "gelu for relu"),
        "softplus_for_relu": ("mutation: another activation", "log(1 + exp h)"),
        "hidden_capped_at_six": ("mutation: another activation", "min(max(h, 0), 6)"),
        "first_bias_always_one": ("HF#143: a parameter filled anew", "b1 is 1"),
    },
    "silent-second-layer-gives-its-bias": {
        "second_bias_ignored": ("mutation: an accepted argument without effect", "b2 has no effect"),
        "residual_added": ("mutation: the residual inside the sublayer", "x is added to the result"),
    },
    "silent-units-can-be-removed": {
        "activation_is_missing": ("mutation: two linear layers", "no activation"),
        "first_bias_after_the_activation": ("mutation: order of bias and activation", "relu(x w1) + b1"),
        "first_bias_ignored": ("mutation: an accepted argument without effect", "b1 has no effect"),
        "hidden_units_leak": ("mutation: another activation", "h / 100 where h < 0"),
    },
    "layout-changes-nothing": {
        "weight_read_as_packed": ("kernl#193", "a transposed w1 is read as packed"),
    },
    "equals-the-reference": {
        "hidden_in_half": ("mutation: a float16 buffer in a float32 kernel", "hidden values are rounded to float16"),
    },
}
FAULTS = {
    variant: Fault("feed_forward", f"feed_forward/{law}", source, summary)
    for law, variants in _TABLE.items()
    for variant, (source, summary) in variants.items()
}
VARIANTS = {variant: {"feed_forward": _make(variant)} for variant in ("correct", *FAULTS)}
