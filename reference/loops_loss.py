"""Cross entropy as loops over Python numbers.

A continuation of `loops`, to check the reference: nested lists in, numbers out, and not a line shared
with any file but that one.
"""

from __future__ import annotations

import math
from typing import Any

from veriformer.reference import loops


def cross_entropy(
    logits: Any,
    targets: Any,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    reduction: str = "mean",
    smoothing: str = "all",
    all_ignored: str = "nan",
) -> Any:
    """cross_entropy of nested lists logits[N][V], targets[N] -> a number, or a list of N."""

    def one(row: Any, target: int) -> float:
        log_p = loops.log_softmax([row])[0]
        padding = ignore_index if smoothing == "others_but_padding" else None
        sharing = [i for i in range(len(row)) if smoothing == "all" or i not in (target, padding)]
        loss = [-(1 - label_smoothing) * log_p[target]]
        if label_smoothing:
            loss += [-label_smoothing / len(sharing) * log_p[i] for i in sharing]
        return math.fsum(loss)

    pairs = [(row, int(target)) for row, target in zip(logits, targets, strict=True)]
    losses = [0.0 if target == ignore_index else one(row, target) for row, target in pairs]
    if reduction == "none":
        return losses
    kept = sum(target != ignore_index for _, target in pairs)
    if reduction == "sum":
        return math.fsum(losses)
    if not kept:
        return 0.0 if all_ignored == "zero" else math.nan
    return math.fsum(losses) / kept
