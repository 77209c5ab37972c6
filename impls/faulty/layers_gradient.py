"""Wrong gradients of layers and stacks behind right results (torch).

The results of every variant are those of "correct". Only autograd tells them apart: something is cut off from the
result, counts more than once, or lets a gradient through where nothing is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from veriformer.declarations import Capabilities, Fault

FRAMEWORK = "torch"
Params = Mapping[str, Any]
_DETACHED = {
    "queries_detached": "attention.wq",
    "value_bias_detached": "attention.bv",
    "memory_keys_detached": "cross_attention.wk",
    "first_matrix_detached": "feed_forward.w1",
    "outer_bias_detached": "feed_forward.b2",
    "norm_weight_detached": "norm1.weight",
    "norm_bias_detached": "norm2.bias",
}
"""Variants that cut one weight off from the result."""


class _Weighted(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        return cotangents[0] * ctx.factor, None


def _make(operation: str, fault: str) -> Callable[..., Tensor]:
    stacked = not operation.endswith("_layer")

    def encode(x: Tensor, params: Params, *, heads: int, norm: str = "post", mask: Tensor | None = None) -> Tensor:
        return _stack(x, None, params if stacked else {"layers": [params]}, heads, norm, mask, None, fault)

    def decode(
        x: Tensor, memory: Tensor, params: Params, *, heads: int, norm: str = "post", mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        triangle = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        seen = triangle if mask is None else mask & triangle
        w = params if stacked else {"layers": [params]}
        return _stack(x, memory, w, heads, norm, seen, memory_mask, fault)

    made = decode if operation.startswith("decoder") else encode
    made.__qualname__ = f"{operation}[{fault}]"
    return made


def _stack(
    x: Tensor, memory: Tensor | None, w: Params, heads: int, norm: str, seen: Tensor | None,
    memory_seen: Tensor | None, fault: str,
) -> Tensor:  # fmt: skip
    """The layers in order, then the final norm where there is one."""
    tokens = x
    for i, layer in enumerate(w["layers"]):
        kept = memory
        if memory is not None and (fault == "memory_detached" or (fault == "later_memory_detached" and i)):
            kept = memory.detach()
        x = x.detach() if fault == "input_of_later_layers_detached" and i else x
        x = _layer(x, kept, _cut(layer, fault), heads, norm, seen, memory_seen, fault)
    if fault == "tokens_pooled":
        x = x + _nothing(tokens).sum(1, keepdim=True)
    if fault == "memory_pooled" and memory is not None:
        x = x + _nothing(memory).sum(1, keepdim=True)
    final = w.get("norm")
    if final is not None and fault == "final_norm_detached":
        final = {name: part.detach() for name, part in final.items()}
    return x if final is None else _normed(x, final, fault)


def _cut(layer: Params, fault: str) -> Params:
    """The weights of a layer, of which one may be cut off from the result."""
    part, _, name = _DETACHED.get(fault, "").partition(".")
    if name not in layer.get(part, {}):
        return layer
    return {**layer, part: {**layer[part], name: layer[part][name].detach()}}


def _nothing(x: Tensor) -> Tensor:
    """0, through which a gradient comes back all the same."""
    return x - x.detach()


def _layer(
    x: Tensor, memory: Tensor | None, w: Params, heads: int, norm: str, seen: Tensor | None,
    memory_seen: Tensor | None, fault: str,
) -> Tensor:  # fmt: skip
    sublayers = [lambda z: _attention(z, z, w["attention"], heads, seen, fault)]
    if memory is not None:
        sublayers.append(lambda z: _attention(z, memory, w["cross_attention"], heads, memory_seen, fault))
    f = w["feed_forward"]
    sublayers.append(lambda z: _linear(torch.relu(_linear(z, f["w1"], f.get("b1"))), f["w2"], f.get("b2")))
    for i, sublayer in enumerate(sublayers):
        scale = w[f"norm{i + 1}"]
        y = sublayer(_normed(x, scale, fault) if norm == "pre" else x)
        z = x.detach() if (fault, i) == ("residual_detached", len(sublayers) - 1) else x
        z = _Weighted.apply(z, 2.0) if fault == "residual_counted_twice" and i == 0 else z
        x = z + y if norm == "pre" else _normed(z + y, scale, fault)
    return x


def _linear(x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    return x @ matrix if bias is None else x @ matrix + bias


def _attention(x: Tensor, memory: Tensor, w: Params, heads: int, seen: Tensor | None, fault: str) -> Tensor:
    q = _linear(x, w["wq"], w.get("bq")).unflatten(-1, (heads, -1)).transpose(1, 2)
    groups = w["wk"].shape[1] // q.shape[-1]
    k, v = (_linear(memory, w["w" + n], w.get("b" + n)).unflatten(-1, (groups, -1)).transpose(1, 2) for n in "kv")
    k, v = (a.repeat_interleave(heads // groups, dim=1) for a in (k, v))
    s = q @ k.mT * q.shape[-1] ** -0.5
    p = _probabilities(s, seen, fault)
    p = p.detach() if fault == "scores_detached" else p
    mixed = p @ v
    if fault == "hidden_values_trained" and seen is not None:
        mixed = mixed + ~seen * torch.ones_like(p) @ _nothing(v)
    return _linear(mixed.transpose(1, 2).flatten(2), w["wo"], w.get("bo"))


def _probabilities(s: Tensor, seen: Tensor | None, fault: str) -> Tensor:
    """softmax over the keys that are seen, 0 where none is."""
    if seen is None:
        return torch.softmax(s, -1)
    if fault == "empty_row_replaced":
        return torch.softmax(s + torch.zeros_like(s).masked_fill(~seen, -torch.inf), -1).nan_to_num(0.0)
    hidden = s.masked_fill(~seen, -torch.inf)
    empty = ~seen.any(-1, keepdim=True)
    return torch.softmax(hidden.masked_fill(empty, 0.0), -1).masked_fill(~seen, 0.0)


def _normed(x: Tensor, w: Params, fault: str) -> Tensor:
    if "bias" not in w:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * w["weight"]
    if fault == "statistics_detached":
        mean, variance = x.mean(-1, keepdim=True).detach(), x.var(-1, keepdim=True, correction=0).detach()
        return (x - mean) * torch.rsqrt(variance + 1e-5) * w["weight"] + w["bias"]
    return F.layer_norm(x, x.shape[-1:], w["weight"], w["bias"], 1e-5)


# law that must accuse: {variant: (where it was seen, what is wrong)}; the law names the operation
_TABLE: dict[str, dict[str, tuple[str, str]]] = {
    "encoder_layer/gradient-reaches-every-weight": {
        "queries_detached": ("mutation: scores without gradient", "wq is not trained"),
        "value_bias_detached": ("mutation: a bias kept as a buffer", "bv is not trained"),
        "first_matrix_detached": ("mutation: a frozen layer", "w1 is not trained"),
        "outer_bias_detached": ("mutation: a bias kept as a buffer", "b2 is not trained"),
        "norm_weight_detached": ("unsloth#4533", "the weight of norm1 is not trained"),
        "norm_bias_detached": ("mutation: a bias kept as a buffer", "the bias of norm2 is not trained"),
        "scores_detached": ("mutation: attention weights kept for a plot", "wq and wk are not trained"),
    },
    "encoder_layer/gradient-passes-silent-sublayers": {
        "residual_detached": ("candle#2168", "nothing comes back past the last sublayer"),
        "residual_counted_twice": ("Liger#370", "what comes back past self-attention is added twice"),
    },
    "encoder_layer/gradient-of-hidden-tokens-is-zero": {
        "hidden_values_trained": ("mutation: backward without the mask", "values that are hidden get a gradient"),
        "tokens_pooled": ("mutation: a mean over time kept for nothing", "every token gets the sum of all gradients"),
    },
    "encoder_layer/gradient-ignores-unused-empty-rows": {
        "empty_row_replaced": ("pytorch#41508", "NaN is replaced by 0 in the result; its gradient stays NaN"),
    },
    "encoder_layer/gradient-equals-the-reference": {
        "statistics_detached": ("mutation: mean and variance as constants", "layer_norm without its own gradient"),
    },
    "decoder_layer/gradient-reaches-every-weight": {
        "memory_detached": ("mutation: a frozen encoder", "nothing reaches memory"),
        "memory_keys_detached": ("mutation: keys of memory kept without gradient", "wk of memory is not trained"),
    },
    "decoder_layer/gradient-passes-silent-sublayers": {
        "memory_pooled": (
            "mutation: a mean of memory kept for nothing",
            "memory gets a gradient without cross-attention",
        ),
    },
    "encoder/gradient-reaches-every-weight": {
        "input_of_later_layers_detached": ("mutation: a checkpoint cut off", "one layer alone is trained"),
        "final_norm_detached": ("unsloth#4533", "the final norm is not trained"),
    },
    "decoder/gradient-equals-the-reference": {
        "later_memory_detached": ("mutation: keys cached without gradient", "one layer alone trains memory"),
    },
}
FAULTS: dict[str, Fault] = {}
VARIANTS: dict[str, dict[str, Callable[..., Any]]] = {
    "correct": {name: _make(name, "correct") for name in ("encoder_layer", "decoder_layer", "encoder", "decoder")}
}
for _law, _mistakes in _TABLE.items():
    _operation = _law.split("/")[0]
    for _variant, (_source, _summary) in _mistakes.items():
        FAULTS[_variant] = Fault(_operation, _law, _source, _summary)
        VARIANTS[_variant] = {_operation: _make(_operation, _variant)}
CAPABILITIES = dict.fromkeys(VARIANTS["correct"], Capabilities(recomputes_probabilities=False))
