"""Wrong backwards of a right softmax, log_softmax, logsumexp and layer_norm (torch), one mistake each.

The forward result of every variant is that of "correct"; only gradients tell them apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from veriformer.declarations import Capabilities, Fault

FRAMEWORK = "torch"
_PLAIN = Capabilities(dtypes=("float64", "float32"))
CAPABILITIES = {"softmax": _PLAIN, "log_softmax": _PLAIN, "logsumexp": _PLAIN, "layer_norm": _PLAIN}


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: int, temperature: float, fault: str) -> Tensor:
        p = torch.softmax(x / temperature, axis)
        ctx.save_for_backward(x, p)
        ctx.axis, ctx.temperature, ctx.fault = axis, temperature, fault
        return p

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        """dx = p (g - <p, g>) / T."""
        (x, p), (g,), fault, axis = ctx.saved_tensors, cotangents, ctx.fault, ctx.axis
        if fault == "softmax_without_maximum":
            e = torch.exp(x / ctx.temperature)
            p = e / e.sum(axis, keepdim=True)
        if fault == "softmax_in_bfloat16":
            p, g = p.bfloat16(), g.bfloat16()
        average = _average(p, g, axis, fault)
        dz = g - average if fault == "softmax_probability_omitted" else p * (g - average)
        powers = {"softmax_temperature_omitted": 0, "softmax_temperature_twice": 2}
        return (dz / ctx.temperature ** powers.get(fault, 1)).to(x.dtype), None, None, None


def _average(p: Tensor, g: Tensor, axis: int, fault: str) -> Tensor:
    """<p, g> along the axis."""
    if fault == "softmax_average_omitted":
        return torch.zeros_like(p)
    if fault == "softmax_plain_average":
        return g.mean(axis, keepdim=True)
    return (p * g).sum(-1 if fault == "softmax_average_over_the_last_axis" else axis, keepdim=True)


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: int, fault: str) -> Tensor:
        y = torch.log_softmax(x, axis)
        ctx.save_for_backward(x, y)
        ctx.axis, ctx.fault = axis, fault
        return y

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        """dx = g - p Σ g."""
        (x, y), (g,), fault = ctx.saved_tensors, cotangents, ctx.fault
        p, total = torch.exp(y), g.sum(ctx.axis, keepdim=True)
        if fault == "log_softmax_without_maximum":
            p = torch.exp(x) / torch.exp(x).sum(ctx.axis, keepdim=True)
        if fault == "log_softmax_sum_omitted":
            total = torch.zeros_like(total)
        if fault == "log_softmax_sum_over_all":
            total = g.sum().expand_as(total)
        return g - p * total, None, None


class _LogSumExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: int, fault: str) -> Tensor:
        y = torch.logsumexp(x, axis)
        ctx.save_for_backward(x, y)
        ctx.axis, ctx.fault = axis, fault
        return y

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        """dx = p g."""
        (x, y), (g,), fault, axis = ctx.saved_tensors, cotangents, ctx.fault, ctx.axis
        p = torch.exp(x - y.unsqueeze(axis))
        if fault == "logsumexp_uniform":
            p = torch.full_like(x, 1 / x.shape[axis])
        if fault == "logsumexp_of_the_largest":
            p = torch.zeros_like(x).scatter(axis, x.argmax(axis, keepdim=True), 1.0)
        if fault == "logsumexp_unnormalised":
            p = torch.exp(x - x.amax(axis, keepdim=True))
        if fault == "logsumexp_cotangent_of_first_row":
            g = g.reshape(-1)[:1].expand(g.numel()).reshape(g.shape)
        return p * g.unsqueeze(axis), None, None


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, fault: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        variance = centred.square().mean(-1, keepdim=True)
        s = (variance + eps).sqrt()
        ctx.save_for_backward(x, weight, centred, s, variance)
        ctx.fault = fault
        return weight * (centred / s) + bias

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        """dx = (h - mean h - n mean(h n)) / s with h = weight g."""
        (x, weight, centred, s, variance), (g,), fault = ctx.saved_tensors, cotangents, ctx.fault
        n, d = centred / s, x.shape[-1]
        h = g if fault == "layer_norm_weight_omitted" else weight * g
        means = h.mean(-1, keepdim=True), (h * n).mean(-1, keepdim=True)
        first, second = means
        if fault == "layer_norm_first_mean_omitted":
            first = torch.zeros_like(first)
        if fault == "layer_norm_second_mean_omitted":
            second = torch.zeros_like(second)
        if fault == "layer_norm_second_mean_unbiased":
            second = second * d / max(d - 1, 1)
        if fault == "layer_norm_eps_omitted":
            s = variance.clamp_min(1e-30).sqrt()
        dx = (h - first - n * second) / s
        if fault == "layer_norm_in_bfloat16":
            dx = dx.bfloat16().to(x.dtype)
        scaled = g * (x if fault == "layer_norm_weight_gradient_of_x" else n)
        return dx, _over_rows(scaled, fault), _over_rows(g, fault), None, None


def _over_rows(terms: Tensor, fault: str) -> Tensor:
    """[..., d] -> [d], summed over all rows."""
    rows = terms.reshape(-1, terms.shape[-1])
    if fault == "layer_norm_rank_two_alone":  # the rows of the first axis, as many as there are
        rows = rows[: terms.shape[0]] if terms.ndim > 1 else rows
    return rows.mean(0) if fault == "layer_norm_rows_averaged" else rows.sum(0)


def _make(operation: str, fault: str) -> Callable[..., Tensor]:
    def softmax(x: Tensor, *, axis: int = -1, temperature: float = 1.0) -> Tensor:
        return _Softmax.apply(x, axis, temperature, fault)

    def log_softmax(x: Tensor, *, axis: int = -1) -> Tensor:
        return _LogSoftmax.apply(x, axis, fault)

    def logsumexp(x: Tensor, *, axis: int = -1) -> Tensor:
        return _LogSumExp.apply(x, axis, fault)

    def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float = 1e-5) -> Tensor:
        return _LayerNorm.apply(x, weight, bias, eps, fault)

    made = {"softmax": softmax, "log_softmax": log_softmax, "logsumexp": logsumexp, "layer_norm": layer_norm}[operation]
    made.__qualname__ = f"{operation}[{fault}]"
    return made


# law that must accuse: {variant: (where it was seen, what is wrong)}; the law names the operation
_TABLE: dict[str, dict[str, tuple[str, str]]] = {
    "softmax/gradient-sums-to-zero": {
        "softmax_average_omitted": ("mutation: the Jacobian's diagonal alone", "dx = p g"),
    },
    "softmax/rows-without-cotangent-pass-nothing-on": {
        "softmax_average_over_the_last_axis": ("mutation: axis ignored by the backward", "<p, g> along the last axis"),
    },
    "softmax/jacobian-is-symmetric": {
        "softmax_probability_omitted": ("mutation: the factor p forgotten", "dx = g - <p, g>"),
        "softmax_plain_average": ("mutation: mean for expectation", "dx = p (g - mean g)"),
    },
    "softmax/gradient-scales-with-the-temperature": {
        "softmax_temperature_omitted": ("mutation: T in the forward alone", "the factor 1/T is left out"),
        "softmax_temperature_twice": ("mutation: T applied twice", "the factor 1/T is squared"),
    },
    "softmax/gradient-is-shift-invariant": {
        "softmax_without_maximum": ("mutation: softmax recomputed plainly", "exp(x) overflows in the backward"),
    },
    "softmax/gradient-equals-the-reference": {
        "softmax_in_bfloat16": ("mutation: a narrow buffer", "the backward computes in bfloat16"),
    },
    "log_softmax/gradient-sums-to-zero": {
        "log_softmax_sum_omitted": ("mutation: the normaliser taken for a constant", "dx = g"),
    },
    "log_softmax/rows-without-cotangent-pass-nothing-on": {
        "log_softmax_sum_over_all": ("mutation: a sum without its axis", "the sum of g over all rows"),
    },
    "log_softmax/gradient-is-shift-invariant": {
        "log_softmax_without_maximum": ("jax#40409, without its length", "exp(x) overflows in the backward"),
    },
    "logsumexp/gradient-sums-to-the-cotangent": {
        "logsumexp_unnormalised": ("mutation: exp for softmax", "dx = exp(x - max x) g"),
    },
    "logsumexp/rows-without-cotangent-pass-nothing-on": {
        "logsumexp_cotangent_of_first_row": ("Liger-Kernel#678", "every row uses the cotangent of the first"),
    },
    "logsumexp/gradient-is-the-softmax": {
        "logsumexp_uniform": ("mutation: a mean's backward", "dx = g / n"),
        "logsumexp_of_the_largest": ("mutation: a maximum's backward", "all of g goes to the largest entry"),
    },
    "layer_norm/gradient-equals-the-reference": {
        "layer_norm_first_mean_omitted": ("mutation: the mean taken for a constant", "mean h is left out"),
        "layer_norm_second_mean_omitted": ("mutation: the deviation taken for a constant", "n mean(h n) is left out"),
        "layer_norm_second_mean_unbiased": ("mutation: n - 1 in the backward alone", "mean(h n) divided by d - 1"),
        "layer_norm_eps_omitted": ("mutation: eps in the forward alone", "the backward's deviation knows no eps"),
        "layer_norm_weight_omitted": ("mutation: h = g", "dx without the weight"),
        "layer_norm_weight_gradient_of_x": ("mutation: x saved for n", "dweight = Σ g x"),
        "layer_norm_rank_two_alone": ("FlagGems#5392", "dweight and dbias of the first rows, right for rank 2"),
        "layer_norm_rows_averaged": ("mutation: mean for sum", "dweight and dbias averaged over rows"),
        "layer_norm_in_bfloat16": ("mutation: a narrow buffer", "dx is rounded to bfloat16"),
    },
}  # fmt: skip
FAULTS: dict[str, Fault] = {}
_RIGHT = {operation: _make(operation, "correct") for operation in CAPABILITIES}
VARIANTS: dict[str, dict[str, Callable[..., Any]]] = {"correct": _RIGHT}
for _law, _mistakes in _TABLE.items():
    _operation = _law.split("/")[0]
    for _variant, (_source, _summary) in _mistakes.items():
        FAULTS[_variant] = Fault(_operation, _law, _source, _summary)
        # a law of two operations needs the other one, right, beside the wrong one
        VARIANTS[_variant] = {**_RIGHT, _operation: _make(_operation, _variant)}
