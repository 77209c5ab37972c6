"""torch's own cross_entropy, and losses as they are written by hand, fused, and in other conventions of smoothing.

"loss" is torch's. "loss_gather" picks from log_softmax. "loss_fused" writes the gradient during the forward pass,
some rows at a time; "loss_fused_small" is the same with chunks so small that short inputs have several. "loss_others"
is fairseq's smoothing, "loss_others_but_padding" the annotated Transformer's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from veriformer.declarations import Capabilities, Expected

FRAMEWORK = "torch"
ELEMENTS = 2**17
"""Logits that the fused loss takes at a time: in float32 half a megabyte, which the cache of a core holds."""
FAINT = 1e-30
"""Probabilities below have few digits, or none: logarithms are not taken of them."""
_SMALL, _EDGE = 16, 4
"""Of the variant whose chunks are small: logits at a time, and how many rows and classes fill a chunk together."""


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
    """The loss, and its gradient made beside it: backward only multiplies, and by 1 not even that."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, epsilon: float, ignore_index: int, reduction: str, elements: int
    ) -> Tensor:
        kept, count = _kept(targets, ignore_index)
        share = 1 / max(count, 1) if reduction == "mean" else 1.0
        # divided by the rows, small entries are lost in float16, which a cotangent as of loss scaling would bring back
        ctx.late = share if logits.dtype == torch.float16 else 1.0
        new = torch.empty if kept is None else torch.zeros
        gradient = new(logits.shape, dtype=logits.dtype, device=logits.device)
        loss = _by_chunks(logits, targets, kept, epsilon, elements, gradient, share / ctx.late)
        ctx.save_for_backward(gradient, kept)
        return _summed(loss, count, reduction).to(logits.dtype)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("the gradient of the fused loss has no graph: got create_graph=True, wanted False")
        (gradient, kept), (g,) = ctx.saved_tensors, cotangents
        if g.ndim:
            gradient = gradient * (g if kept is None else torch.where(kept, g, 0.0))[:, None]
        elif (factor := float(g) * ctx.late) != 1.0:
            gradient = gradient * factor
            if kept is not None and not math.isfinite(factor):  # 0 times it is NaN, but an ignored row has no gradient
                gradient.masked_fill_(~kept[:, None], 0.0)
        return gradient, None, None, None, None, None


def _kept(targets: Tensor, ignore_index: int) -> tuple[Tensor | None, int]:
    """Which rows are kept, None for all, and how many."""
    kept = targets != ignore_index
    count = int(kept.sum())
    return None if count == len(targets) else kept, count


def _summed(loss: Tensor, count: int, reduction: str) -> Tensor:
    return loss if reduction == "none" else loss.sum() / (count if reduction == "mean" else 1)


def _by_chunks(
    logits: Tensor,
    targets: Tensor,
    kept: Tensor | None,
    epsilon: float,
    elements: int,
    gradient: Tensor | None = None,
    times: float = 1.0,
) -> Tensor:
    """Losses of all rows (kept: None) or of those kept, in float32 at least; `times` their gradients into `gradient`.

    Rows that are not kept are not read and their gradients not written. Beside the results there is memory for a few
    chunks of about `elements` numbers.
    """
    rows = None if kept is None else kept.nonzero()[:, 0]
    aim = (targets if rows is None else targets[rows])[:, None]
    (count, size), step = (len(aim), logits.shape[1]), max(1, elements // logits.shape[1])
    hit, middle = _wide(logits[:0]).new_empty(2, count, 1)
    scratch = None
    if gradient is None or rows is not None or gradient.dtype != hit.dtype:
        scratch = hit.new_empty(min(step, count), size)
    elsewhere, pull = hit.new_tensor(-epsilon * times / size), hit.new_full((step, 1), (epsilon - 1) * times)
    for start in range(0, count, step):
        now = slice(start, min(start + step, count))
        here = now if rows is None else rows[now]
        z = _wide(logits[here])
        p = gradient[now] if scratch is None else scratch[: len(z)]
        torch.softmax(z, -1, out=p)
        torch.gather(p, 1, aim[now], out=hit[now])
        if epsilon:
            torch.mean(z, -1, keepdim=True, out=middle[now])
        if gradient is not None:
            torch.add(elsewhere, p, alpha=times, out=p).scatter_add_(1, aim[now], pull[: len(z)])
            if scratch is not None:
                gradient[here] = p.to(gradient.dtype)
    found = -hit.log()
    for part in (~(hit[:, 0] >= FAINT)).nonzero()[:, 0].split(step):
        z = _wide(logits[part if rows is None else rows[part]])
        found[part] = torch.logsumexp(z, -1, keepdim=True) - z.gather(1, aim[part])
    if epsilon:
        wanted = _wide(logits.gather(1, aim) if rows is None else logits[rows[:, None], aim])
        found = torch.where(found == torch.inf, found, found + epsilon * (wanted - middle))
    return found[:, 0] if rows is None else found.new_zeros(len(targets)).index_copy_(0, rows, found[:, 0])


def _make_fused(name: str, elements: int) -> Callable[..., Tensor]:
    def cross_entropy(
        logits: Tensor,
        targets: Tensor,
        *,
        label_smoothing: float = 0.0,
        ignore_index: int = -100,
        reduction: str = "mean",
    ) -> Tensor:
        """Losses whose gradient is written during the forward pass, some rows at a time while they are in the cache.

        logits[N,V], targets[N] -> loss[], or loss[N] with reduction none
        loss_n = -log p_n,target + e (logits_n,target - mean logits_n), p_n = softmax(logits_n)
        dlogits_n = p_n - q_n, times the cotangent
        Source: Hsu et al. 2024 (Liger Kernel), section 3.3. The gradient is kept in the dtype of the logits, the only
        array of their size that is made, and only where it will be asked for; there is none of the second order.
        Raises ValueError for logits without two axes, targets of another length, label_smoothing outside [0, 1) and
        an unknown reduction; RuntimeError for a target that is no class, and in a backward with create_graph.
        """
        _check_fused(logits, targets, label_smoothing, reduction)
        if logits.requires_grad and torch.is_grad_enabled():
            loss: Tensor = _Fused.apply(logits, targets, label_smoothing, ignore_index, reduction, elements)
            return loss
        kept, count = _kept(targets, ignore_index)
        losses = _by_chunks(logits, targets, kept, label_smoothing, elements)
        return _summed(losses, count, reduction).to(logits.dtype)

    cross_entropy.__qualname__ = f"cross_entropy[{name}]"
    return cross_entropy


def _check_fused(logits: Tensor, targets: Tensor, epsilon: float, reduction: str) -> None:
    if logits.ndim != 2 or not logits.shape[1]:
        raise ValueError(f"logits: got shape {tuple(logits.shape)}, wanted rows and at least one class")
    if tuple(targets.shape) != (len(logits),):
        raise ValueError(f"targets: got shape {tuple(targets.shape)}, wanted ({len(logits)},), one a row")
    if not 0 <= epsilon < 1:
        raise ValueError(f"label_smoothing: got {epsilon}, wanted 0 <= label_smoothing < 1")
    if reduction not in ("none", "sum", "mean"):
        raise ValueError(f"reduction: got {reduction!r}, wanted none, sum or mean")


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
    "loss_fused": {"cross_entropy": _make_fused("loss_fused", ELEMENTS)},
    "loss_fused_small": {"cross_entropy": _make_fused("loss_fused_small", _SMALL)},
    "loss_others": {"cross_entropy": cross_entropy_others},
    "loss_others_but_padding": {"cross_entropy": cross_entropy_others_but_padding},
}
_WIDENED: dict[str, Any] = {"intermediate": {"float64": "float64", "default": "float32"}}
CAPABILITIES = {
    # the backward of log_softmax is g - exp(y) sum g, with y as it was returned
    "loss": {"cross_entropy": Capabilities(saved_statistics="storage")},
    "loss_gather": {"cross_entropy": Capabilities(**_WIDENED, nan_contained=True)},
    "loss_fused": {"cross_entropy": Capabilities(nan_contained=True)},
    "loss_fused_small": {"cross_entropy": Capabilities(nan_contained=True, blocks=(_EDGE,))},
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
