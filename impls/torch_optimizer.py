"""torch's own optimisers, clipping and schedules as pure functions: state is put in, and what a step makes comes out.

"optimizer", "optimizer_foreach" and "optimizer_fused" are the three ways of torch.optim.AdamW and of clip_grad_norm_
(which has two); "optimizer_restored" is the fused one with m and v from a checkpoint, which are contiguous whatever the
parameter is. "optimizer_l2" is torch.optim.Adam, whose decay is a gradient (declared: weight_decay = coupled), its rate
a tensor, and so is that of its schedule.

In float16 an eps below 3e-8, such as the default, is 0 but for the fused kernel: a gradient of 0 gives NaN at the first
step, and one of 1e-3 infinity (https://github.com/pytorch/pytorch/issues/147437). The error budgets say undetermined.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from veriformer.declarations import Capabilities, Expected

FRAMEWORK = "torch"
State = tuple[Tensor, Tensor, Tensor]


def _make_step(
    name: str, kind: Any, tensor_rate: bool = False, restored: bool = False, **options: bool
) -> Callable[..., State]:
    def adamw_step(
        param: Tensor,
        grad: Tensor,
        m: Tensor,
        v: Tensor,
        step: int,
        *,
        lr: float,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> State:
        """One step of an optimiser of torch from a given state.

        param[...], grad[...], m[...], v[...], step from 1 -> (param, m, v)
        Source: the torch manual, torch.optim.AdamW and torch.optim.Adam. The arguments are copied, for both are
        changed in place.
        """
        theta, mean, square = (array.clone() for array in (param, m, v))
        if restored:
            mean, square = mean.contiguous(), square.contiguous()
        theta.grad = grad.clone()
        rate = torch.tensor(lr, dtype=torch.float64) if tensor_rate else lr
        own = kind([theta], lr=rate, betas=(beta1, beta2), eps=eps, weight_decay=weight_decay, **options)
        own.state[theta] = {"step": torch.tensor(step - 1.0), "exp_avg": mean, "exp_avg_sq": square}
        own.step()
        return theta, mean, square

    adamw_step.__qualname__ = f"adamw_step[{name}]"
    return adamw_step


def _make_clip(name: str, foreach: bool) -> Callable[..., list[Tensor]]:
    def clip_by_global_norm(grads: list[Tensor], *, max_norm: float) -> list[Tensor]:
        """torch.nn.utils.clip_grad_norm_ on parameters that have these gradients.

        grads: tensors of any shapes -> a list like it
        g min(1, max_norm / (norm + 1e-6))
        Source: the torch manual, torch.nn.utils.clip_grad_norm_.
        """
        params = [torch.zeros_like(g) for g in grads]
        for param, g in zip(params, grads, strict=True):
            param.grad = g.clone()
        torch.nn.utils.clip_grad_norm_(params, max_norm, foreach=foreach)
        return [param.grad for param in params]

    clip_by_global_norm.__qualname__ = f"clip_by_global_norm[{name}]"
    return clip_by_global_norm


def noam_schedule(step: int, *, width: int, warmup: int) -> float:
    """The rate that torch.optim.lr_scheduler.LambdaLR sets at this step.

    width^(-1/2) min(step^(-1/2), step warmup^(-3/2))
    Source: Vaswani et al. 2017, section 5.3; the torch manual, LambdaLR, which counts from last_epoch + 1.
    """

    def factor(count: int) -> float:
        return width**-0.5 * min(count**-0.5, count * warmup**-1.5) if count else 0.0

    optimizer = torch.optim.SGD([{"params": [torch.zeros(1)], "initial_lr": 1.0}], lr=1.0)
    rate: float = LambdaLR(optimizer, factor, last_epoch=step - 1).get_last_lr()[0]
    return rate


def _noam_of_tensors(step: int, *, width: int, warmup: int) -> Tensor:
    """The schedule on a step that is a tensor."""
    count = torch.tensor(step, dtype=torch.float64)
    return width**-0.5 * torch.minimum(count.rsqrt(), count * warmup**-1.5)


_ADAMW, _ADAM = torch.optim.AdamW, torch.optim.Adam
VARIANTS: dict[str, dict[str, Callable[..., Any]]] = {
    "optimizer": {
        "adamw_step": _make_step("optimizer", _ADAMW, foreach=False),
        "clip_by_global_norm": _make_clip("optimizer", False),
        "noam_schedule": noam_schedule,
    },
    "optimizer_foreach": {
        "adamw_step": _make_step("optimizer_foreach", _ADAMW, foreach=True),
        "clip_by_global_norm": _make_clip("optimizer_foreach", True),
    },
    "optimizer_fused": {"adamw_step": _make_step("optimizer_fused", _ADAMW, fused=True)},
    "optimizer_restored": {"adamw_step": _make_step("optimizer_restored", _ADAMW, restored=True, fused=True)},
    "optimizer_l2": {
        "adamw_step": _make_step("optimizer_l2", _ADAM, True, foreach=False),
        "noam_schedule": _noam_of_tensors,
    },
}
_CLIP = {"clip_by_global_norm": Capabilities(clip_epsilon=1e-6, extreme_values=True)}
CAPABILITIES = {
    "optimizer": _CLIP,
    "optimizer_foreach": _CLIP,
    "optimizer_restored": {"adamw_step": Capabilities(dtypes=("float32",))},
    "optimizer_l2": {"adamw_step": Capabilities(weight_decay="coupled")},
}
EXPECTED = [
    Expected(
        "adamw_step/layout-changes-nothing",
        reason="the fused CPU kernel walks through memory and does not look at strides, where that of CUDA raises",
        link="https://github.com/pytorch/pytorch/issues/106951",
        case={
            "param": [[0.0, 0.0], [0.0, 0.0]], "grad": [[1.0, -1.0], [-1.0, -1.0]], "m": [[0.0, 1.0], [0.0, 0.0]],
            "v": [[1.0, 1.0], [1.0, 1.0]], "step": 1, "lr": 1.0,
        },
        variants=("optimizer_restored",),
    ),
    *(
        Expected(
            f"clip_by_global_norm/{law}",
            reason="squares of float32 are summed in float32 and overflow, though the norm does not: all become 0",
            link="https://github.com/pytorch/pytorch/issues/193006",
            case={"grads.0": [3e25, 4e25], "max_norm": 1e25},
            when={"dtype": "float32, bfloat16"},
            where="max_norm > 1e20",
            variants=("optimizer", "optimizer_foreach"),
        )
        for law in ("equals-the-reference", "long-gradients-get-the-norm", "short-gradients-are-left-alone")
    ),
]  # fmt: skip
