"""Wrong gradients written out in NumPy (OPERATION_vjp) beside right results: one switch for each mistake."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veriformer.declarations import Capabilities, Fault

FRAMEWORK = "numpy"
MANY = 16
_phi = np.vectorize(lambda x: 0.5 * math.erfc(-x / math.sqrt(2)), otypes=[np.float64])


def layer_norm(x: NDArray, weight: NDArray, bias: NDArray, *, eps: float = 1e-5) -> NDArray:
    """Correct."""
    n, _ = _normal(x - x.mean(axis=-1, keepdims=True), eps)
    return (weight * n + bias).astype(x.dtype)


def _make_layer_norm_vjp(fault: str) -> Callable[..., Any]:
    def vjp(g: NDArray, x: NDArray, weight: NDArray, bias: NDArray, *, eps: float = 1e-5) -> Any:
        z = _packed(x) if fault == "packed_in_forward_only" else x
        n, s = _normal(z - z.mean(axis=-1, keepdims=True), 0.0 if fault == "eps_ignored_in_backward" else eps)
        used = np.broadcast_to(g.reshape(-1, g.shape[-1])[0], g.shape) if fault == "first_cotangent_for_all" else g
        h = used if fault in ("weight_ignored_in_backward", "weight_applied_last") else used * weight
        centre = 0 if fault == "mean_term_dropped" else h.mean(axis=-1, keepdims=True)
        along = 0 if fault == "projection_dropped" else n * (h * n).mean(axis=-1, keepdims=True)
        dx, rows = (h - centre - along) / s, tuple(range(x.ndim - 1))
        dx = weight * dx if fault == "weight_applied_last" else dx
        if fault == "input_overwritten" and x.flags.writeable:
            x[...] = dx
        db = g.mean(axis=rows) if fault == "bias_is_a_mean" else g.sum(axis=rows)
        if fault == "summed_in_storage":
            db = _summed_in(x.dtype, g.reshape(-1, g.shape[-1]))
        return dx.astype(x.dtype), _norm_weight(g, n, z, fault).astype(x.dtype), db.astype(x.dtype)

    return vjp


def _norm_weight(g: NDArray, n: NDArray, x: NDArray, fault: str) -> NDArray:
    """The gradient of a norm's weight."""
    terms, width = g * (x if fault == "weight_from_the_input" else n), x.shape[-1]
    if fault == "rank_two_assumed":
        return terms.reshape(x.shape[0], -1)[:, :width].sum(axis=0) if x.ndim > 1 else terms
    if fault == "weight_over_the_wrong_axis":
        return np.resize(terms.sum(axis=-1), width)
    return terms.reshape(-1, width).sum(axis=0)


def _summed_in(dtype: Any, rows: NDArray) -> NDArray:
    """The sum over rows, rounded to a dtype after each."""
    total = np.zeros(rows.shape[1:], dtype)
    for row in rows:
        total = (total + row.astype(dtype)).astype(dtype)
    return total


def _make_rms_norm(fault: str) -> Callable[..., NDArray]:
    def rms_norm(x: NDArray, weight: NDArray, *, eps: float = 1e-6) -> NDArray:
        n, _ = _normal(x, eps)
        return ((1 + weight if fault == "one_forgotten_in_backward" else weight) * n).astype(x.dtype)

    return rms_norm


def _make_rms_norm_vjp(fault: str) -> Callable[..., Any]:
    def vjp(g: NDArray, x: NDArray, weight: NDArray, *, eps: float = 1e-6) -> Any:
        if fault == "refuses_an_expanded_cotangent" and not g.flags.c_contiguous:
            raise ValueError("view size is not compatible with the strides of the cotangent")
        n, s = _normal(_packed(x) if fault == "packed_in_forward_only" else x, eps)
        if fault == "statistics_in_half":
            s = s.astype(np.float16).astype(x.dtype)
        h = g if fault == "weight_applied_last" else g * weight
        along = 0 if fault == "projection_dropped" else n * (h * n).mean(axis=-1, keepdims=True)
        centre = h.mean(axis=-1, keepdims=True) if fault == "backward_of_layer_norm" else 0
        dx = ((h - centre - along) / s).astype(x.dtype)
        dx = weight * dx if fault == "weight_applied_last" else dx
        if fault == "cotangent_overwritten" and g.flags.writeable:
            g[...] = dx
        if fault == "weight_has_no_gradient":
            return dx, None
        return dx, _norm_weight(g, n, x, fault).astype(x.dtype)

    return vjp


def gelu(x: NDArray) -> NDArray:
    """Correct."""
    return (x.astype(np.float64) * _phi(x.astype(np.float64))).astype(x.dtype)


def _make_gelu_vjp(fault: str) -> Callable[..., Any]:
    def vjp(g: NDArray, x: NDArray) -> Any:
        z = np.clip(x.astype(np.float64), -40, 40)
        phi, bell = _phi(z), np.exp(-z * z / 2) / math.sqrt(2 * math.pi)
        slope = phi + z * bell
        if fault == "slope_half_is_missing":
            slope = 2 * phi + z * bell
        if fault == "bell_does_not_turn":
            slope = phi + bell
        if fault == "without_the_bell":
            slope = phi
        if fault == "slope_in_half":
            slope = phi.astype(np.float16) + (z * bell * (z > -3)).astype(np.float16)
        if fault == "slope_of_the_other_form":
            inner = math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)
            turn = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * z * z) / np.cosh(np.clip(inner, -300, 300)) ** 2
            slope = (1 + np.tanh(inner)) / 2 + z / 2 * turn
        return ((g * slope).astype(x.dtype),)

    return vjp


def relu(x: NDArray) -> NDArray:
    """Correct."""
    return np.maximum(x, np.zeros_like(x))


def _make_relu_vjp(fault: str) -> Callable[..., Any]:
    def vjp(g: NDArray, x: NDArray) -> Any:
        if fault == "straight_through":
            return (g.copy(),)
        left = g * g.dtype.type(0.01) if fault == "leaks_in_backward" else np.zeros_like(g)
        return (np.where(x < 0, g, left) if fault == "mask_inverted" else np.where(x > 0, g, left),)

    return vjp


def feed_forward(x: NDArray, w1: NDArray, b1: NDArray, w2: NDArray, b2: NDArray) -> NDArray:
    """Correct."""
    return (np.maximum(x @ w1 + b1, 0) @ w2 + b2).astype(x.dtype)


def _make_feed_forward_vjp(fault: str) -> Callable[..., Any]:
    def vjp(g: NDArray, x: NDArray, w1: NDArray, b1: NDArray, w2: NDArray, b2: NDArray) -> Any:
        h, rows = x @ w1 + b1, tuple(range(x.ndim - 1))
        dh = g @ w2.T if fault == "relu_skipped_in_backward" else np.where(h > 0, g @ w2.T, 0)
        a = h if fault == "second_weight_from_before_relu" else np.maximum(h, 0)
        square = w1.shape[0] == w1.shape[1]
        dx = dh @ (w1 if fault == "input_through_untransposed_weight" and square else w1.T)
        db1 = dh.sum(axis=rows)
        if fault == "first_bias_over_the_wrong_axis" and dh.ndim == 2 and dh.shape[0] == dh.shape[1]:
            db1 = dh.sum(axis=-1)
        db2 = g.mean(axis=rows) if fault == "second_bias_is_a_mean" else g.sum(axis=rows)
        dw1 = _outer(x, dh, fault == "first_weight_of_the_last_batch")
        return dx, dw1, db1, _outer(a, g, fault == "second_weight_of_the_last_batch"), db2

    return vjp


def _outer(a: NDArray, g: NDArray, last_only: bool) -> NDArray:
    """The gradient of w in a w: a^T g over all rows, or over those of the last batch."""
    if last_only and a.ndim > 2:
        a, g = a[-1], g[-1]
    return a.reshape(-1, a.shape[-1]).T @ g.reshape(-1, g.shape[-1])


def dropout(x: NDArray, *, rate: float, uniform: NDArray) -> NDArray:
    """Correct."""
    return np.where(uniform >= uniform.dtype.type(rate), x / ((1 - rate) or 1.0), 0).astype(x.dtype)


def _make_dropout_vjp(fault: str) -> Callable[..., Any]:
    def vjp(g: NDArray, x: NDArray, *, rate: float, uniform: NDArray) -> Any:
        kept = np.ones(x.shape, bool) if fault == "not_masked_in_backward" else uniform >= uniform.dtype.type(rate)
        factor = {"scaled_by_rate": rate, "not_enlarged_in_backward": 1.0}.get(fault, 1 / ((1 - rate) or 1.0))
        return np.where(kept, g * g.dtype.type(factor), 0).astype(x.dtype), None

    return vjp


def embedding(ids: NDArray, table: NDArray, *, padding_index: int | None = None) -> NDArray:
    """Correct."""
    return table[ids]


def _make_embedding_vjp(fault: str) -> Callable[..., Any]:
    def vjp(g: NDArray, ids: NDArray, table: NDArray, *, padding_index: int | None = None) -> Any:
        flat, rows, dtable = ids.reshape(-1), g.reshape(-1, table.shape[1]), np.zeros_like(table)
        if fault == "first_batch_only" and ids.ndim > 1:
            flat, rows = flat[: ids[0].size], rows[: ids[0].size]
        if fault == "last_repeat_wins":
            dtable[flat] = rows
        else:
            np.add.at(dtable, flat, rows)
        if fault == "mean_of_repeats":
            dtable /= np.maximum(np.bincount(flat, minlength=len(table)), 1)[:, None].astype(table.dtype)
        trained = fault == "padding_row_is_trained_when_many" and flat.size > MANY or fault == "padding_row_is_trained"
        if (padding_index is not None and not trained) or fault == "no_padding_means_all":
            dtable[padding_index] = 0
        if fault == "padding_hides_its_neighbour" and padding_index is not None:
            dtable[padding_index : padding_index + 2] = 0
        return None, dtable

    return vjp


def _normal(z: NDArray, eps: float) -> tuple[NDArray, NDArray]:
    """z over its root mean square, and that root [..., 1]."""
    with np.errstate(all="ignore"):
        s = np.sqrt((z * z).mean(axis=-1, keepdims=True) + z.dtype.type(eps))
        return z / s, s


def _packed(x: NDArray) -> NDArray:
    """What a kernel sees that takes x for packed memory."""
    if x.flags.c_contiguous:
        return x
    base = x
    while isinstance(base.base, np.ndarray):
        base = base.base
    start = (x.__array_interface__["data"][0] - base.__array_interface__["data"][0]) // x.itemsize
    # np.resize repeats a buffer that is too short, where the real mistake reads foreign memory.
    return np.resize(base.ravel(order="K")[max(start, 0) :], x.shape)


_OPERATIONS: dict[str, tuple[Callable[[str], Callable[..., Any]], Callable[[str], Callable[..., Any]]]] = {
    "layer_norm": (lambda fault: layer_norm, _make_layer_norm_vjp),
    "rms_norm": (_make_rms_norm, _make_rms_norm_vjp),
    "gelu": (lambda fault: gelu, _make_gelu_vjp),
    "relu": (lambda fault: relu, _make_relu_vjp),
    "feed_forward": (lambda fault: feed_forward, _make_feed_forward_vjp),
    "dropout": (lambda fault: dropout, _make_dropout_vjp),
    "embedding": (lambda fault: embedding, _make_embedding_vjp),
}
# operation and law that must accuse: {mistake: (where it was seen, what is wrong)}
_TABLE: dict[str, dict[str, tuple[str, str]]] = {
    "layer_norm/input-gradient-sums-to-zero": {
        "mean_term_dropped": ("mutation: backward of a root mean square norm", "the mean of w g is not taken off"),
    },
    "layer_norm/gradient-along-the-row-is-what-eps-leaves": {
        "projection_dropped": ("mutation: deviation taken for a constant", "no share goes through the deviation"),
        "eps_ignored_in_backward": ("TIM-VX#589", "eps is 0 in the backward"),
        "weight_ignored_in_backward": ("unsloth#4533", "dx as if the weight were 1"),
    },
    "layer_norm/jacobian-is-symmetric": {
        "weight_applied_last": ("mutation: order of gain and projection", "dx = w A g for A (w g)"),
    },
    "layer_norm/weight-gradient-obeys-euler": {
        "weight_from_the_input": ("mutation: x for its normal form", "dweight = sum g x"),
        "weight_over_the_wrong_axis": ("mutation: axis of the sum", "summed over channels for rows"),
    },
    "layer_norm/bias-gradient-is-the-sum-of-the-cotangent": {
        "bias_is_a_mean": ("mutation: mean for sum", "dbias is the mean over rows"),
    },
    "layer_norm/gradient-counts-every-row": {
        "summed_in_storage": ("llm.c#428", "sums over rows are held in bfloat16, and stall"),
    },
    "layer_norm/rank-changes-no-gradient": {
        "rank_two_assumed": ("FlagGems#5392", "rows = shape[0] in the backward"),
    },
    "layer_norm/gradient-of-a-row-is-its-own": {
        "first_cotangent_for_all": ("Liger-Kernel#678", "the first row's cotangent is used for all"),
    },
    "layer_norm/backward-leaves-inputs-untouched": {
        "input_overwritten": ("Liger-Kernel#370", "dx is written into x"),
    },
    "layer_norm/gradient-does-not-depend-on-the-layout": {
        "packed_in_forward_only": ("VeOmni#958", "the backward reads a strided x as packed"),
    },
    "rms_norm/gradient-exists": {
        "weight_has_no_gradient": ("unsloth#4533", "None for weight"),
    },
    "rms_norm/weight-gradient-obeys-euler": {
        "cotangent_overwritten": ("Liger-Kernel#370", "dx is written into g before dweight is summed"),
    },
    "rms_norm/gradient-along-the-row-is-what-eps-leaves": {
        "one_forgotten_in_backward": ("Liger-Kernel#85", "the gain is weight in the backward, 1 + weight before"),
        "projection_dropped": ("mutation: root mean square taken for a constant", "no share goes through the root"),
    },
    "rms_norm/jacobian-is-symmetric": {
        "weight_applied_last": ("mutation: order of gain and projection", "dx = w A g for A (w g)"),
    },
    "rms_norm/rank-changes-no-gradient": {
        "rank_two_assumed": ("FlagGems#5392", "rows = shape[0] in the backward"),
    },
    "rms_norm/gradient-does-not-depend-on-the-layout": {
        "refuses_an_expanded_cotangent": ("quack#88", "view() of a cotangent that is expanded"),
        "packed_in_forward_only": ("VeOmni#958", "the backward reads a strided x as packed"),
    },
    "rms_norm/gradient-equals-the-reference": {
        "backward_of_layer_norm": ("mutation: the wrong norm's backward", "the mean of w g is taken off"),
        "statistics_in_half": ("mutation: the root kept in float16", "1/s is rounded for the backward"),
    },
    "gelu/slopes-of-mirrored-inputs-add-up": {
        "slope_half_is_missing": ("mutation: a factor forgotten", "1 + erf for (1 + erf) / 2"),
        "bell_does_not_turn": ("mutation: a factor forgotten", "the density without the factor x"),
    },
    "gelu/slope-changes-sign-at-the-minimum": {
        "without_the_bell": ("mutation: product rule forgotten", "the normal distribution alone"),
        "slope_in_half": ("tt-metal#35971", "of the wrong sign below -3, where float16 terms cancel"),
    },
    "gelu/gradient-equals-the-reference": {
        "slope_of_the_other_form": ("gemma_pytorch#37", "the slope of the tanh form behind the erf form"),
    },
    "relu/gradient-passes-where-the-input-is-positive": {
        "straight_through": ("mutation: a straight-through estimator", "the backward of the identity"),
        "mask_inverted": ("mutation: the comparison turned round", "passes where x < 0"),
        "leaks_in_backward": ("mutation: another activation's backward", "g / 100 where x < 0"),
    },
    "feed_forward/first-layer-obeys-euler": {
        "first_weight_of_the_last_batch": ("mutation: = for +=", "dw1 of the last batch only"),
        "first_bias_over_the_wrong_axis": ("mutation: axis of the sum", "db1 over units where that fits"),
        "input_through_untransposed_weight": ("HF#48154: a weight in the other orientation", "dh w1 for dh w1^T"),
    },
    "feed_forward/second-layer-obeys-euler": {
        "second_weight_of_the_last_batch": ("mutation: = for +=", "dw2 of the last batch only"),
        "second_bias_is_a_mean": ("mutation: mean for sum", "db2 is the mean over rows"),
    },
    "feed_forward/silent-units-get-no-gradient": {
        "relu_skipped_in_backward": ("mutation: a straight-through estimator", "dh is not masked"),
        "second_weight_from_before_relu": ("mutation: the wrong tensor saved", "dw2 = h^T g, h before relu"),
    },
    "dropout/gradient-is-dropout-of-the-cotangent": {
        "scaled_by_rate": ("apex#816", "the gradient is multiplied by the rate"),
        "not_masked_in_backward": ("mutation: a straight-through estimator", "dropped entries get a gradient"),
        "not_enlarged_in_backward": ("mutation: scale in the forward only", "the gradient is not enlarged"),
    },
    "embedding/gradient-gathers-by-id": {
        "last_repeat_wins": ("mutation: = for +=", "of repeated ids the last counts"),
        "mean_of_repeats": ("mutation: scaled by frequency unasked", "of repeated ids the mean counts"),
        "first_batch_only": ("mutation: rank 1 assumed", "ids of the first batch only"),
    },
    "embedding/every-used-row-is-trained": {
        "no_padding_means_all": ("fairseq#4076", "without padding_index no row is trained: dtable[None] = 0"),
    },
    "embedding/padding-row-gets-no-gradient": {
        "padding_row_is_trained": ("fairseq#4633", "padding_index has no effect"),
        "padding_row_is_trained_when_many": ("pytorch#26302", "trained from 17 ids on (there 769)"),
        "padding_hides_its_neighbour": ("mutation: a range one too long", "the next row gets no gradient either"),
    },
}
_SHORT = {"feed_forward": "ffn"}
VARIANTS: dict[str, dict[str, Callable[..., Any]]] = {"correct": {}}
FAULTS: dict[str, Fault] = {}
_DTYPES = {"layer_norm_summed_in_storage": "bfloat16"}
CAPABILITIES = {
    "layer_norm_summed_in_storage": {"layer_norm": Capabilities(dtypes=("float32", "bfloat16"))},
    "rms_norm_one_forgotten_in_backward": {"rms_norm": Capabilities(rms_weight="one_plus")},
}
for _operation, (_make, _make_vjp) in _OPERATIONS.items():
    VARIANTS["correct"] |= {_operation: _make("correct"), f"{_operation}_vjp": _make_vjp("correct")}
for _law, _mistakes in _TABLE.items():
    _operation = _law.split("/")[0]
    _make, _make_vjp = _OPERATIONS[_operation]
    for _mistake, (_source, _summary) in _mistakes.items():
        _variant = f"{_SHORT.get(_operation, _operation)}_{_mistake}"
        FAULTS[_variant] = Fault(_operation, _law, _source, _summary, _DTYPES.get(_variant, "float32"))
        VARIANTS[_variant] = {_operation: _make(_mistake), f"{_operation}_vjp": _make_vjp(_mistake)}
