"""torch's own cross_entropy, and losses as they are written by hand, fused, and in other conventions of smoothing.

"loss" is torch's. "loss_gather" picks from log_softmax. "loss_fused" makes the gradient in the forward,
some rows at a time. "loss_others" is fairseq's smoothing, "loss_others_but_padding" the annotated
Transformer's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from veriformer.declarations import Capabilities, Expected

FRAMEWORK = "torch"
ROWS = 4
"""Rows that the fused loss takes at a time."""


def cross_entropy(
    logits: Tensor, targets: Tensor, *, label_smoothing: float = 0.0, ignore_index: int = -100, reduction: str = "mean"
) -> Tensor:
    """torch.nn.functional.cross_entropy.

    logits[N,V], targets[N] -> loss[], or loss[N] with reduction none
    q_n = (1 - e) one_hot(targets_n) + e / V
    Source: the torch manual, torch.nn.functional.cross_entropy. The mean over no row is NaN.
    """
    return F.cross_entropy(
        logits, targets, label_smoothing=label_smoothing, ignore_index=ignore_index, reduction=reduction
    )


def cross_entropy_gather(
    logits: Tensor, targets: Tensor, *, label_smoothing: float = 0.0, ignore_index: int = -100, reduction: str = "mean"
) -> Tensor:
    """The entry of log_softmax at the target, mixed with the mean of all; 16-bit numbers in float32.

    logits[N,V], targets[N] -> loss[], or loss[N] with reduction none
    loss_n = -(1 - e) log_p_n,target - e mean log_p_n
    Source: Szegedy et al. 2016, section 7. Rows of ignore_index are left out before anything is done with them.
    """
    kept = targets != ignore_index
    log_p = F.log_softmax(torch.where(kept[:, None], _wide(logits), 0.0), dim=-1)
    loss = -log_p.gather(1, torch.where(kept, targets, 0)[:, None])[:, 0]
    if label_smoothing:
        loss = (1 - label_smoothing) * loss - label_smoothing * log_p.mean(-1)
    return _reduced(torch.where(kept, loss, 0.0), kept, reduction).to(logits.dtype)


class _Fused(torch.autograd.Function):
    """Losses of all rows; their gradient is made beside them and kept in place of the logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, epsilon: float, ignore_index: int) -> Tensor:
        kept, size = targets != ignore_index, logits.shape[1]
        loss, gradient = _wide(logits).new_zeros(len(targets)), torch.zeros_like(logits)
        for start in range(0, len(targets), ROWS):
            rows = start + kept[start : start + ROWS].nonzero()[:, 0]
            z, at = _wide(logits[rows]), targets[rows][:, None]
            top = z.amax(-1, keepdim=True)
            e = torch.exp(z - top)
            total = e.sum(-1, keepdim=True)
            far = (top - z.gather(1, at) + total.log())[:, 0]
            p = e / total
            if epsilon:
                far = (1 - epsilon) * far + epsilon * (top + total.log() - z.mean(-1, keepdim=True))[:, 0]
                p -= epsilon / size
            loss[rows] = far
            gradient[rows] = p.scatter_add(1, at, torch.full_like(far, epsilon - 1)[:, None]).to(logits.dtype)
        ctx.save_for_backward(gradient, kept)
        return loss

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        (gradient, kept), (g,) = ctx.saved_tensors, cotangents
        # where nothing is kept the mean's cotangent is divided by 0
        passed = torch.where(kept[:, None], gradient * g[:, None], 0.0)
        return passed.to(gradient.dtype), None, None, None


def cross_entropy_fused(
    logits: Tensor, targets: Tensor, *, label_smoothing: float = 0.0, ignore_index: int = -100, reduction: str = "mean"
) -> Tensor:
    """Losses whose gradient is computed in the forward, a few rows at a time.

    logits[N,V], targets[N] -> loss[], or loss[N] with reduction none
    loss_n = (1 - e) (lse_n - logits_n,target) + e (lse_n - mean logits_n); dlogits_n = p_n - q_n, times the cotangent
    Source: Hsu et al. 2024 (Liger Kernel), section 3.3. The gradient is kept in the dtype of the logits.
    """
    loss = _Fused.apply(logits, targets, label_smoothing, ignore_index)
    return _reduced(loss, targets != ignore_index, reduction).to(logits.dtype)


def cross_entropy_others(
    logits: Tensor, targets: Tensor, *, label_smoothing: float = 0.0, ignore_index: int = -100, reduction: str = "mean"
) -> Tensor:
    """Smoothing over the classes other than the target, as fairseq writes it; 16-bit numbers in float32.

    logits[N,V], targets[N] -> loss[], or loss[N] with reduction none
    loss_n = -(1 - e - e') log_p_n,target - e' sum log_p_n, e' = e / (V - 1)
    Source: Ott et al. 2019 (fairseq), label_smoothed_nll_loss.
    """
    log_p = F.log_softmax(_wide(logits), dim=-1)
    ignored = targets == ignore_index
    loss = -log_p.gather(1, targets.masked_fill(ignored, 0)[:, None])[:, 0]
    if label_smoothing:
        share = label_smoothing / (logits.shape[1] - 1)
        loss = (1 - label_smoothing - share) * loss - share * log_p.sum(-1)
    return _reduced(loss.masked_fill(ignored, 0.0), ~ignored, reduction).to(logits.dtype)


def cross_entropy_others_but_padding(
    logits: Tensor, targets: Tensor, *, label_smoothing: float = 0.0, ignore_index: int = -100, reduction: str = "mean"
) -> Tensor:
    """Smoothing over the classes other than the target and the padding class, as the annotated Transformer has it.

    logits[N,V], targets[N] -> loss[], or loss[N] with reduction none
    q_n is 1 - e at the target, 0 at ignore_index and e / (V - 2) elsewhere; the mean over no row is 0
    Source: Rush 2018 (The Annotated Transformer), section Label Smoothing, less the entropy of q.
    """
    log_p, kept = F.log_softmax(logits, dim=-1), targets != ignore_index
    q = torch.full_like(log_p, label_smoothing / max(logits.shape[1] - 2, 1))
    q.scatter_(1, torch.where(kept, targets, 0)[:, None], 1 - label_smoothing)
    q = q.masked_fill(torch.arange(logits.shape[1], device=q.device) == ignore_index, 0.0).masked_fill(
        ~kept[:, None], 0.0
    )
    loss = (q * -log_p.masked_fill(q == 0, 0.0)).sum(-1)
    return loss.sum() / kept.sum().clamp(min=1) if reduction == "mean" else _reduced(loss, kept, reduction)


def _reduced(loss: Tensor, kept: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return loss
    return loss.sum() / kept.sum() if reduction == "mean" else loss.sum()


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


VARIANTS = {
    "loss": {"cross_entropy": cross_entropy},
    "loss_gather": {"cross_entropy": cross_entropy_gather},
    "loss_fused": {"cross_entropy": cross_entropy_fused},
    "loss_others": {"cross_entropy": cross_entropy_others},
    "loss_others_but_padding": {"cross_entropy": cross_entropy_others_but_padding},
}
_WIDENED: dict[str, Any] = {"intermediate": {"float64": "float64", "default": "float32"}}
CAPABILITIES = {
    # the backward of log_softmax is g - exp(y) sum g, with y as it was returned
    "loss": {"cross_entropy": Capabilities(saved_statistics="storage")},
    "loss_gather": {"cross_entropy": Capabilities(**_WIDENED, nan_contained=True)},
    "loss_fused": {"cross_entropy": Capabilities(nan_contained=True, blocks=(ROWS,))},
    "loss_others": {"cross_entropy": Capabilities(**_WIDENED, smoothing="others")},
    "loss_others_but_padding": {
        "cross_entropy": Capabilities(
            dtypes=("float64", "float32", "bfloat16"),  # float16 does not hold sums of losses
            smoothing="others_but_padding",
            all_ignored="zero",
            saved_statistics="storage",
        )
    },
}
_HALF = {"dtype": "float16"}
EXPECTED = [
    Expected(
        "cross_entropy/finite-for-finite-logits",
        reason="smoothing adds up the logarithms of all classes in float16: inf beyond 65504, with 8192 classes always",
        link="https://github.com/huggingface/transformers/issues/10674",
        case={"logits": [[40000.0, 0.0, 0.0]], "targets": [0], "label_smoothing": 0.1},
        when=_HALF,
        where="label_smoothing > 0",
        variants=("loss",),
    ),
    Expected(
        "cross_entropy/finite-for-finite-logits",
        reason="the mean adds up the losses in float16 before it divides: inf beyond 65504",
        link="https://github.com/pytorch/pytorch/issues/61523",
        case={"logits": [[30000.0, 0.0]] * 3, "targets": [1, 1, 1]},
        when=_HALF,
        where="reduction == 'mean' and N > 1",
        variants=("loss",),
    ),
    Expected(
        "cross_entropy/the-mean-counts-every-row",
        reason="the rows are counted in float16: from 65520 on that is inf, and the mean 0",
        link="https://github.com/pytorch/pytorch/issues/61523",
        case={"logits": [[0.0, 0.0]] * 65520, "targets": [0] * 65520},
        when=_HALF,
        where="N >= 65520",
        variants=("loss",),
    ),
]
