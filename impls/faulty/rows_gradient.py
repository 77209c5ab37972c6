"""Wrong autograd functions behind right results (torch): each backward makes one mistake.

The forward result of every variant is that of "correct", up to rounding. Only autograd tells them apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from veriformer.declarations import Capabilities, Fault

FRAMEWORK = "torch"
_PLAIN = Capabilities(dtypes=("float64", "float32"))


class _Norm(torch.autograd.Function):
    """weight z / sqrt(mean z² + eps), where z is x, or x less its mean."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, mean: bool, fault: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.mean, ctx.fault = eps, mean, fault
        n, _ = _normal(x, eps, mean)
        return n * (1 + weight if fault == "one_forgotten_in_backward" else weight)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), (g,), fault = ctx.saved_tensors, cotangents, ctx.fault
        width = x.shape[-1]
        if fault == "refuses_an_expanded_cotangent":
            g = g.view(-1, width).view(x.shape)
        z = x.as_strided(x.shape, _packed_strides(x.shape)) if fault == "packed_in_forward_only" else x
        n, s = _normal(z, ctx.eps, ctx.mean)
        h = g * weight
        centre = h.mean(-1, keepdim=True) if ctx.mean and fault != "mean_term_dropped" else 0
        dx = (h - centre - n * (h * n).mean(-1, keepdim=True)) / s
        if fault == "input_overwritten":
            x.detach().copy_(dx)
        if fault == "cotangent_overwritten":
            g.copy_(dx)
        terms = (g * n).reshape(-1, width)
        if fault == "rank_two_assumed" and x.ndim > 1:
            terms = (g * n).reshape(x.shape[0], -1)[:, :width]
        dweight = None if fault == "weight_has_no_gradient" else terms.sum(0)
        return dx, dweight, None, None, None


def _normal(x: Tensor, eps: float, mean: bool) -> tuple[Tensor, Tensor]:
    z = x - x.mean(-1, keepdim=True) if mean else x
    s = (z.square().mean(-1, keepdim=True) + eps).sqrt()
    return z / s, s


def _packed_strides(shape: torch.Size) -> list[int]:
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


def _make_layer_norm(fault: str) -> Callable[..., Tensor]:
    def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float = 1e-5) -> Tensor:
        return _Norm.apply(x, weight, eps, True, fault) + bias

    return layer_norm


def _make_rms_norm(fault: str) -> Callable[..., Tensor]:
    def rms_norm(x: Tensor, weight: Tensor, *, eps: float = 1e-6) -> Tensor:
        if fault == "contiguous_has_no_backward" and x.is_contiguous():
            return _Norm.apply(x.detach(), weight, eps, False, fault)
        if fault == "root_of_zero":
            root = x.square().mean(-1, keepdim=True).sqrt()
            return weight * (x / (root.square() + eps).sqrt())
        return _Norm.apply(x, weight, eps, False, fault)

    return rms_norm


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fault: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.fault = fault
        return torch.nn.functional.gelu(x)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        (x,), (g,) = ctx.saved_tensors, cotangents
        if ctx.fault == "straight_through":
            return g, None
        bell = torch.exp(-x * x / 2) / math.sqrt(2 * math.pi)
        if ctx.fault == "slope_overflows":
            bell = 1 / (torch.exp(x.abs()) ** (x.abs() / 2)) / math.sqrt(2 * math.pi)
            bell = bell * torch.exp(x.abs()) * torch.exp(-x.abs())
        return g * (torch.special.ndtr(x) + x * bell), None


def _make_gelu(fault: str) -> Callable[..., Tensor]:
    return lambda x: _Gelu.apply(x, fault)


class _Relu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fault: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.fault = fault
        return torch.relu(x)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        (x,), (g,) = ctx.saved_tensors, cotangents
        kept = (x > 0) & (g > 0) if ctx.fault == "mask_of_the_cotangent" else x > 0
        return torch.where(kept, g, 0.0), None


def _make_relu(fault: str) -> Callable[..., Tensor]:
    return lambda x: _Relu.apply(x, fault)


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, fault: str) -> Tensor:
        ctx.save_for_backward(x, w1, b1, w2)
        ctx.fault = fault
        return torch.relu(x @ w1 + b1) @ w2 + b2

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        (x, w1, b1, w2), (g,), fault = ctx.saved_tensors, cotangents, ctx.fault
        h = x @ w1 + b1
        through = g.reshape(-1, g.shape[-1])[:1].expand_as(g.reshape(-1, g.shape[-1])).reshape(g.shape)
        dh = (through if fault == "first_cotangent_for_all" else g) @ w2.mT
        dh = dh if fault == "relu_skipped_in_backward" else torch.where(h > 0, dh, 0.0)
        part = -1 if fault == "second_weight_of_the_last_batch" and x.ndim > 2 else slice(None)
        rows = [t.reshape(-1, t.shape[-1]) for t in (x, dh, torch.relu(h)[part], g[part], g)]
        return dh @ w1.mT, rows[0].mT @ rows[1], rows[1].sum(0), rows[2].mT @ rows[3], rows[4].sum(0), None


def _make_feed_forward(fault: str) -> Callable[..., Tensor]:
    def feed_forward(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
        return _FeedForward.apply(x, w1, b1, w2, b2, fault)

    return feed_forward


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rate: float, uniform: Tensor, fault: str) -> Tensor:
        ctx.save_for_backward(uniform)
        ctx.rate, ctx.fault = rate, fault
        return torch.where(uniform >= rate, x / ((1 - rate) or 1.0), 0.0)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        (uniform,), (g,), rate = ctx.saved_tensors, cotangents, ctx.rate
        factor = rate if ctx.fault == "scaled_by_rate" else 1 / ((1 - rate) or 1.0)
        numbers = uniform.flip(-1) if ctx.fault == "other_mask_in_backward" else uniform
        return torch.where(numbers >= rate, g * factor, 0.0), None, None, None


def _make_dropout(fault: str) -> Callable[..., Tensor]:
    def dropout(x: Tensor, *, rate: float, uniform: Tensor) -> Tensor:
        return _Dropout.apply(x, rate, uniform.detach(), fault)

    return dropout


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, ids: Tensor, padding: int | None, fault: str) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.shape, ctx.padding, ctx.fault = table.shape, padding, fault
        return table[ids]

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        (ids,), (g,), fault = ctx.saved_tensors, cotangents, ctx.fault
        flat, rows, dtable = ids.reshape(-1), g.reshape(-1, g.shape[-1]), g.new_zeros(ctx.shape)
        if fault == "summed_in_storage":
            for i, row in zip(flat.tolist(), rows, strict=True):
                dtable[i] = dtable[i] + row
        else:
            wide = dtable.double().index_put_((flat,), rows.double(), accumulate=fault != "last_repeat_wins")
            dtable = wide.to(g.dtype)
        if fault == "scaled_in_backward":
            dtable = dtable * ctx.shape[1] ** 0.5
        if ctx.padding is not None and fault != "padding_row_is_trained":
            dtable[ctx.padding] = 0
        return dtable, None, None, None


def _make_embedding(fault: str) -> Callable[..., Tensor]:
    def embedding(ids: Tensor, table: Tensor, *, padding_index: int | None = None) -> Tensor:
        return _Embedding.apply(table, ids, padding_index, fault)

    return embedding


_MAKE: dict[str, Callable[[str], Callable[..., Tensor]]] = {
    "layer_norm": _make_layer_norm,
    "rms_norm": _make_rms_norm,
    "gelu": _make_gelu,
    "relu": _make_relu,
    "feed_forward": _make_feed_forward,
    "dropout": _make_dropout,
    "embedding": _make_embedding,
}
# operation and law that must accuse: {mistake: (where it was seen, what is wrong)}
_TABLE: dict[str, dict[str, tuple[str, str]]] = {
    "layer_norm/input-gradient-sums-to-zero": {
        "mean_term_dropped": ("mutation: backward of a root mean square norm", "the mean of w g is not taken off"),
    },
    "layer_norm/rank-changes-no-gradient": {
        "rank_two_assumed": ("FlagGems#5392", "rows = shape[0] in the backward"),
    },
    "rms_norm/gradient-exists": {
        "weight_has_no_gradient": ("unsloth#4533", "None for weight"),
        "contiguous_has_no_backward": ("candle#2168", "a contiguous input takes a kernel without backward"),
    },
    "rms_norm/gradient-is-finite": {
        "root_of_zero": ("mutation: the root kept and squared again", "NaN in a row of zeros"),
    },
    "rms_norm/weight-gradient-obeys-euler": {
        "cotangent_overwritten": ("Liger-Kernel#370", "dx is written into g before dweight is summed"),
    },
    "rms_norm/gradient-along-the-row-is-what-eps-leaves": {
        "one_forgotten_in_backward": ("Liger-Kernel#85", "the gain is weight in the backward, 1 + weight before"),
    },
    "rms_norm/rank-changes-no-gradient": {
        "rank_two_assumed": ("FlagGems#5392", "rows = shape[0] in the backward"),
    },
    "rms_norm/gradient-does-not-depend-on-the-layout": {
        "refuses_an_expanded_cotangent": ("quack#88", "view() of a cotangent that is expanded"),
        "packed_in_forward_only": ("VeOmni#958", "the backward reads a strided x as packed"),
    },
    "rms_norm/backward-leaves-inputs-untouched": {
        "input_overwritten": ("Liger-Kernel#370", "dx is written into the saved x"),
    },
    "gelu/slopes-of-mirrored-inputs-add-up": {
        "straight_through": ("mutation: a straight-through estimator", "the backward of the identity"),
    },
    "gelu/gradient-is-finite": {
        "slope_overflows": ("mutation: the density by way of exp(|x|)", "infinity times 0 far from 0"),
    },
    "relu/gradient-passes-where-the-input-is-positive": {
        "mask_of_the_cotangent": ("mutation: guided backpropagation", "a negative cotangent is stopped as well"),
    },
    "feed_forward/silent-units-get-no-gradient": {
        "relu_skipped_in_backward": ("mutation: a straight-through estimator", "dh is not masked"),
    },
    "feed_forward/second-layer-obeys-euler": {
        "second_weight_of_the_last_batch": ("mutation: = for +=", "dw2 of the last batch only"),
    },
    "feed_forward/gradient-of-a-row-is-its-own": {
        "first_cotangent_for_all": ("Liger-Kernel#678", "the first row's cotangent is used for all"),
    },
    "dropout/gradient-is-dropout-of-the-cotangent": {
        "scaled_by_rate": ("apex#816", "the gradient is multiplied by the rate"),
        "other_mask_in_backward": ("mutation: the mask is drawn again", "another mask in the backward"),
    },
    "embedding/gradient-gathers-by-id": {
        "last_repeat_wins": ("mutation: = for +=", "of repeated ids the last counts"),
        "scaled_in_backward": ("HF#43681", "the gradient is multiplied by the root of d"),
    },
    "embedding/gradient-counts-every-row": {
        "summed_in_storage": ("llm.c#428", "sums over repeats are held in bfloat16, and stall"),
    },
    "embedding/padding-row-gets-no-gradient": {
        "padding_row_is_trained": ("fairseq#4633", "padding_index has no effect"),
    },
}
_SHORT = {"feed_forward": "ffn"}
_DTYPES = {"embedding_summed_in_storage": "bfloat16"}
FAULTS: dict[str, Fault] = {}
VARIANTS: dict[str, dict[str, Callable[..., Any]]] = {
    "correct": {operation: make("correct") for operation, make in _MAKE.items()}
}
for _law, _mistakes in _TABLE.items():
    _operation = _law.split("/")[0]
    for _mistake, (_source, _summary) in _mistakes.items():
        _variant = f"{_SHORT.get(_operation, _operation)}_{_mistake}"
        FAULTS[_variant] = Fault(_operation, _law, _source, _summary, _DTYPES.get(_variant, "float32"))
        VARIANTS[_variant] = {_operation: _MAKE[_operation](_mistake)}
CAPABILITIES = {variant: dict.fromkeys(operations, _PLAIN) for variant, operations in VARIANTS.items()}
CAPABILITIES["embedding_summed_in_storage"] = {"embedding": Capabilities(dtypes=("float32", "bfloat16"))}
CAPABILITIES["rms_norm_one_forgotten_in_backward"] = {
    "rms_norm": Capabilities(dtypes=("float64", "float32"), rms_weight="one_plus")
}
