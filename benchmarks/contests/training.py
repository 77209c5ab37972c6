"""Contests of what training does beside the model: the loss with its gradient, and the optimizer's step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from contest import Call, Contest, Maker, Prepared
from torch import Tensor

SMOOTHING = 0.1
EAGER, COMPILED, FUSED = "torch, F.cross_entropy", "torch.compile, F.cross_entropy", "torch, AdamW(fused=True)"
TENSORS = 48


def _loss(rows: int, classes: int, limit: float) -> Contest:
    """Label-smoothed cross entropy and its gradient."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, classes, generator=generator)
    targets = torch.randint(classes, (rows,), generator=generator)

    def timed(get: Callable[[], Callable[..., Tensor]]) -> Maker:
        def make() -> Call:
            function, given = get(), logits.clone().requires_grad_()

            def call() -> Any:
                loss = function(given, targets, label_smoothing=SMOOTHING)
                return loss, *torch.autograd.grad(loss, given)

            return call

        return make

    def fused() -> Callable[..., Tensor]:
        from veriformer.impls.torch_loss import VARIANTS

        return VARIANTS["loss_fused"]["cross_entropy"]

    size = rows * classes
    return Contest(
        f"loss-{rows}x{classes}", f"cross entropy with smoothing and its gradient, {rows} rows of {classes}, float32",
        ours={"torch:loss_fused": timed(fused)},
        others={
            EAGER: timed(lambda: F.cross_entropy),
            COMPILED: timed(lambda: torch.compile(F.cross_entropy, dynamic=False)),
        },
        limit=limit, against=EAGER, limits={"torch:loss_fused": (1.0, COMPILED)}, flops=9 * size, bytes=8 * size,
    )  # fmt: skip


def _adamw(numbers: int, limit: float) -> Contest:
    """One step of AdamW over many tensors, whose gradients were just written, as backward does."""

    def timed(make_optimizer: Callable[[list[Tensor]], Any]) -> Maker:
        def make() -> Call:
            generator = torch.Generator().manual_seed(0)
            shape = (TENSORS, 1, numbers // TENSORS)
            params = [x.clone().requires_grad_() for x in torch.randn(shape, generator=generator)]
            own = make_optimizer(params)
            for p, g in zip(params, torch.randn(shape, generator=generator), strict=True):
                p.grad = g.clone() if p.grad is None else p.grad.copy_(g)

            def turn() -> None:
                for p in params:
                    assert p.grad is not None
                    p.grad.neg_()

            def step() -> list[Tensor]:
                own.step()
                return params

            return Prepared(turn, step)

        return make

    def flat(params: Iterable[Tensor]) -> Any:
        from veriformer.impls.torch_flat import FlatAdamW

        return FlatAdamW(params, lr=1e-3)

    return Contest(
        f"adamw-{numbers}", f"a step of AdamW, {numbers} numbers in {TENSORS} tensors, gradients just written, float32",
        ours={"torch:flat": timed(flat)},
        others={
            FUSED: timed(lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True)),
            "torch, AdamW(foreach=True)": timed(lambda params: torch.optim.AdamW(params, lr=1e-3, foreach=True)),
            "torch, AdamW": timed(lambda params: torch.optim.AdamW(params, lr=1e-3)),
        },
        limit=limit, against=FUSED, flops=15 * numbers, bytes=28 * numbers,
        tolerance=1e-6,  # of entries up to 5, which a first step moves by 1e-3, decay by up to 5e-5
        note="That gradients of one buffer are zeroed and added to, not replaced, counts in contests of whole steps.",
    )  # fmt: skip


CONTESTS = [_loss(1024, 8192, 0.7), _loss(1024, 1000, 0.75), _adamw(3_200_016, 0.6), _adamw(49_152, 0.6)]
