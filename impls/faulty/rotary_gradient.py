"""Wrong gradients of the rotary embedding behind right results (torch): each backward makes one mistake."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from veriformer.declarations import Capabilities, Fault

FRAMEWORK = "torch"
CAPABILITIES = {"rotary_embedding": Capabilities(intermediate={"float64": "float64", "default": "float32"})}


def _make(fault: str) -> Callable[..., Tensor]:
    def rotary_embedding(x: Tensor, positions: Tensor, *, base: float = 10000.0) -> Tensor:
        if fault == "no_gradient":
            x = x.detach()
        if fault == "first_half_detached":
            half = x.shape[-1] // 2
            x = torch.cat([x[..., :half].detach(), x[..., half:]], dim=-1)
        return _Rotary.apply(x, positions, base, fault)

    rotary_embedding.__qualname__ = f"rotary_embedding[{fault}]"
    return rotary_embedding


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, positions: Tensor, base: float, fault: str) -> Tensor:
        ctx.save_for_backward(positions)
        ctx.base, ctx.fault = base, fault
        return _turned(x, _angles(positions, x.shape[-1], base))

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        (positions,), (g,), fault = ctx.saved_tensors, cotangents, ctx.fault
        if fault == "straight_through":
            return g, None, None, None
        base = 10000.0 if fault == "base_forgotten" else ctx.base
        positions = torch.arange(len(positions)) if fault == "positions_forgotten" else positions
        angle = _angles(positions, g.shape[-1], base)
        if fault == "angles_in_half":
            angle = angle.half().to(angle.dtype)
        if fault == "interleaved_backward":
            order = torch.arange(g.shape[-1]).reshape(-1, 2).T.reshape(-1)
            return _turned(g[..., order], -angle)[..., order.argsort()], None, None, None
        dx = _turned(g, angle if fault == "turned_forwards" else -angle)
        if fault == "summed_over_the_batch" and dx.ndim > 2:
            dx = dx.sum(0, keepdim=True).expand_as(dx).clone()
        if fault == "last_token_left_out":
            dx[..., -1, :] = g[..., -1, :]
        return dx, None, None, None


def _angles(positions: Tensor, width: int, base: float) -> Tensor:
    return torch.outer(positions.double(), float(base) ** -(torch.arange(0, width, 2).double() / width))


def _turned(x: Tensor, angle: Tensor) -> Tensor:
    z = x if x.dtype == torch.float64 else x.float()
    cos, sin = angle.cos().to(z.dtype), angle.sin().to(z.dtype)
    a, b = z.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)


# law that must accuse: {variant: (where it was seen, what is wrong)}
_TABLE: dict[str, dict[str, tuple[str, str]]] = {
    "gradient-turns-back": {
        "no_gradient": ("mutation: a detached input", "no gradient reaches x"),
        "first_half_detached": ("mutation: detach to save memory", "the first half of the channels gets no gradient"),
        "straight_through": ("mutation: the identity for a rotation", "the cotangent is passed on as it is"),
        "turned_forwards": ("mutation: the forward kernel for the backward", "the cotangent is turned the same way"),
        "base_forgotten": ("mutation: base not saved", "the backward turns by base 10000"),
        "positions_forgotten": ("mutation: positions not saved", "the backward turns by 0, 1, 2, …"),
        "angles_in_half": ("gpt-neox#1003, in the backward", "angles of the backward are float16"),
        "interleaved_backward": ("TransformerLens#365, in the backward", "the backward pairs neighbours"),
        "summed_over_the_batch": ("mutation: a reduction too many", "every batch row gets the sum of all gradients"),
        "last_token_left_out": ("mutation: a loop one short", "the gradient of the last token is not turned"),
    },
}
FAULTS = {
    variant: Fault("rotary_embedding", f"rotary_embedding/{law}", source, summary)
    for law, variants in _TABLE.items()
    for variant, (source, summary) in variants.items()
}
VARIANTS = {variant: {"rotary_embedding": _make(variant)} for variant in ("correct", *FAULTS)}
