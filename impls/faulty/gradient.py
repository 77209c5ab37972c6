"""Wrong gradients behind right results (torch): missing, NaN where nothing is visible, or leaking.

The forward result of every variant is that of "correct", up to rounding. Only autograd tells them apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from veriformer.declarations import Capabilities, Fault

FRAMEWORK = "torch"
_PLAIN = Capabilities(dtypes=("float64", "float32"))
CAPABILITIES = {
    "softmax": _PLAIN,
    "log_softmax": _PLAIN,
    "logsumexp": _PLAIN,
    "layer_norm": _PLAIN,
    "attention": _PLAIN,
}


def _make_softmax(fault: str) -> Callable[..., Tensor]:
    def softmax(x: Tensor, *, axis: int = -1, temperature: float = 1.0) -> Tensor:
        if fault == "softmax_contiguous_has_no_backward" and x.is_contiguous():
            x = x.detach()
        z = x / temperature
        if fault in ("softmax_zero_times_log", "softmax_straight_through"):
            return _SoftmaxBackward.apply(z, axis, fault)
        return _softmax(z, axis)

    softmax.__qualname__ = f"softmax[{fault}]"
    return softmax


def _softmax(z: Tensor, axis: int) -> Tensor:
    e = torch.exp(z - z.detach().amax(dim=axis, keepdim=True))
    return e / e.sum(dim=axis, keepdim=True)


class _SoftmaxBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, axis: int, fault: str) -> Tensor:
        p = _softmax(z, axis)
        ctx.save_for_backward(p)
        ctx.axis, ctx.fault = axis, fault
        return p

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        (p,), (g,) = ctx.saved_tensors, cotangents
        if ctx.fault == "softmax_straight_through":
            return g, None, None
        zero_weight = torch.zeros_like(p)
        dz = p * (g - (p * g).sum(dim=ctx.axis, keepdim=True)) + zero_weight * torch.log(p)
        return dz, None, None


def _make_log_softmax(fault: str) -> Callable[..., Tensor]:
    def log_softmax(x: Tensor, *, axis: int = -1) -> Tensor:
        if fault == "log_softmax_divides_by_probability":
            return _LogSoftmaxBackward.apply(x, axis)
        x = x.detach() if fault == "log_softmax_has_no_backward" else x
        return _log_softmax(x, axis)

    log_softmax.__qualname__ = f"log_softmax[{fault}]"
    return log_softmax


def _log_softmax(x: Tensor, axis: int) -> Tensor:
    z = x - x.detach().amax(dim=axis, keepdim=True)
    return z - torch.exp(z).sum(dim=axis, keepdim=True).log()


class _LogSoftmaxBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: int) -> Tensor:
        y = _log_softmax(x, axis)
        ctx.save_for_backward(y)
        ctx.axis = axis
        return y

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        (y,), (g,) = ctx.saved_tensors, cotangents
        p = torch.exp(y)
        return p * g / p - p * g.sum(dim=ctx.axis, keepdim=True), None


def _make_logsumexp(fault: str) -> Callable[..., Tensor]:
    def logsumexp(x: Tensor, *, axis: int = -1) -> Tensor:
        x = x.detach() if fault == "logsumexp_has_no_backward" else x
        m = x.detach().amax(dim=axis, keepdim=True)
        m = torch.where(m == -torch.inf, torch.zeros_like(m), m)
        return (m + torch.exp(x - m).sum(dim=axis, keepdim=True).log()).squeeze(axis)

    logsumexp.__qualname__ = f"logsumexp[{fault}]"
    return logsumexp


def _make_layer_norm(fault: str) -> Callable[..., Tensor]:
    def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float = 1e-5) -> Tensor:
        weight = weight.detach() if fault == "layer_norm_weight_has_no_gradient" else weight
        bias = bias.detach() if fault == "layer_norm_bias_has_no_gradient" else bias
        if fault == "layer_norm_weight_gradient_folded":
            return _WeightGradient.apply(x, weight, eps) + bias
        normal, _, _ = _normalised(x, eps, fault)
        return normal * weight + bias

    layer_norm.__qualname__ = f"layer_norm[{fault}]"
    return layer_norm


def _normalised(x: Tensor, eps: float, fault: str = "correct") -> tuple[Tensor, Tensor, Tensor]:
    mean = x.mean(dim=-1, keepdim=True)
    variance = (x - mean).square().mean(dim=-1, keepdim=True)
    if fault == "layer_norm_root_of_zero":
        variance = variance.sqrt() ** 2
    inverse = (variance + eps).rsqrt()
    return (x - mean) * inverse, mean, inverse


class _WeightGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        normal, mean, inverse = _normalised(x, eps)
        ctx.save_for_backward(x, weight, normal, mean, inverse)
        return normal * weight

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight, normal, mean, inverse), (g,) = ctx.saved_tensors, cotangents
        rows = tuple(range(x.ndim - 1))
        terms = inverse * (g * x) - mean * inverse * g
        h = g * weight
        dx = (h - h.mean(-1, keepdim=True) - normal * (h * normal).mean(-1, keepdim=True)) * inverse
        return dx, terms.sum(dim=rows) if rows else terms, None


def _make_attention(fault: str) -> Callable[..., Tensor]:
    def attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        causal: bool = False,
        scale: float | None = None,
    ) -> Tensor:
        k = k.detach() if fault == "attention_key_has_no_gradient" else k
        bias = bias.detach() if fault == "attention_bias_has_no_gradient" and bias is not None else bias
        each = q.shape[1] // k.shape[1]
        key, value = k.repeat_interleave(each, dim=1), v.repeat_interleave(each, dim=1)
        if fault == "attention_value_tail_has_no_gradient":
            full = max(v.shape[2] // 4 * 4, 1)
            value = torch.cat([value[:, :, :full], value[:, :, full:].detach()], dim=2)
        logits = q @ key.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
        logits = logits if bias is None else logits + bias
        triangle = torch.ones(logits.shape[2:], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        visible = triangle if causal else torch.ones_like(triangle)
        visible = (visible if mask is None else visible & mask).expand(logits.shape)
        return _weights(logits, visible, fault) @ value

    attention.__qualname__ = f"attention[{fault}]"
    return attention


def _weights(logits: Tensor, visible: Tensor, fault: str) -> Tensor:
    empty = ~visible.any(dim=-1, keepdim=True)
    # Added, not selected: torch.where would stop the NaN on its way back to the logits.
    hidden = logits + torch.where(visible, 0.0, -torch.inf).to(logits.dtype)
    if fault == "attention_softmax_of_empty_rows":
        return torch.where(empty, 0, torch.softmax(hidden, dim=-1))
    if fault == "attention_recomputed_from_lse":
        return torch.where(empty, 0, torch.exp(hidden - torch.logsumexp(hidden, dim=-1, keepdim=True)))
    m = hidden.detach().amax(dim=-1, keepdim=True)
    m = torch.where(empty, 0, m)
    e = torch.where(visible, torch.exp(torch.where(visible, logits - m, 0)), 0)
    weights = e / torch.where(empty, 1, e.sum(dim=-1, keepdim=True))
    if fault == "attention_gradient_ignores_the_mask":
        unmasked = torch.softmax(logits, dim=-1)
        return (weights - unmasked).detach() + unmasked
    return weights


_MAKE = {
    "softmax": _make_softmax,
    "log_softmax": _make_log_softmax,
    "logsumexp": _make_logsumexp,
    "layer_norm": _make_layer_norm,
    "attention": _make_attention,
}
# law that must accuse: {variant: (where it was seen, what is wrong)}; the law names the operation
_TABLE: dict[str, dict[str, tuple[str, str]]] = {
    "softmax/gradient-exists": {
        "softmax_contiguous_has_no_backward": ("candle#2168", "a contiguous input takes a kernel without backward"),
    },
    "softmax/gradient-is-zero-at-minus-infinity": {
        "softmax_zero_times_log": ("optax#1762", "0 times the log of a zero probability is NaN"),
        "softmax_straight_through": ("mutation: a straight-through estimator", "the backward of the identity"),
    },
    "log_softmax/gradient-exists": {
        "log_softmax_has_no_backward": ("candle#2168", "the result is cut off from x"),
    },
    "log_softmax/gradient-is-finite": {
        "log_softmax_divides_by_probability": ("dynet#218", "exp(y) g / exp(y) where exp(y) underflows"),
    },
    "logsumexp/gradient-exists": {
        "logsumexp_has_no_backward": ("candle#2168", "the result is cut off from x"),
    },
    "layer_norm/gradient-exists": {
        "layer_norm_weight_has_no_gradient": ("unsloth#4533", "the backward returns nothing for weight"),
        "layer_norm_bias_has_no_gradient": ("unsloth#4533", "the backward returns nothing for bias"),
    },
    "layer_norm/gradient-is-finite": {
        "layer_norm_root_of_zero": ("mutation: the deviation kept as a root", "NaN where the variance is 0"),
    },
    "layer_norm/width-one-has-no-weight-gradient": {
        "layer_norm_weight_gradient_folded": ("pytorch#188375", "r (g x) - m r g, which cancels at width 1"),
    },
    "attention/gradient-exists": {
        "attention_key_has_no_gradient": ("mutation: a detached cache", "keys are cut off from the result"),
        "attention_bias_has_no_gradient": ("mutation: bias treated as a mask", "bias is cut off from the result"),
    },
    "attention/gradient-is-finite": {
        "attention_softmax_of_empty_rows": ("pytorch#41508", "NaN rows replaced after the softmax: NaN gradient"),
        "attention_recomputed_from_lse": ("flash-attention#334", "exp(s - lse) with lse = -inf: NaN gradient"),
    },
    "attention/gradient-reaches-visible-values": {
        "attention_value_tail_has_no_gradient": ("mutation: a tail block without backward", "the last values get 0"),
    },
    "attention/gradient-of-hidden-keys-is-zero": {
        "attention_gradient_ignores_the_mask": ("mutation: backward without the mask", "gradient flows to hidden keys"),
    },
}
FAULTS: dict[str, Fault] = {}
VARIANTS: dict[str, dict[str, Callable[..., Any]]] = {
    "correct": {operation: make("correct") for operation, make in _MAKE.items()}
}
for _law, _mistakes in _TABLE.items():
    _operation = _law.split("/")[0]
    for _variant, (_source, _summary) in _mistakes.items():
        FAULTS[_variant] = Fault(_operation, _law, _source, _summary)
        VARIANTS[_variant] = {_operation: _MAKE[_operation](_variant)}
