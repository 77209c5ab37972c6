"""Cross entropy between softmax and the targets of classification, smoothed or not."""

from __future__ import annotations

import math
from typing import Any

from array_api_compat import array_namespace, device

from veriformer.reference.softmax import log_softmax

SMOOTHING = ("all", "others", "others_but_padding")
"""Who shares label_smoothing: V, V - 1 or V - 2 classes."""
REDUCTIONS = ("mean", "sum", "none")
NOTHING = {"nan": math.nan, "zero": 0.0}
"""all_ignored -> the mean over no row."""


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
    """The mean surprise at the targets, if tokens are drawn from softmax.

    logits[N,V], targets[N] of integers -> loss, a number; reduction = "none": loss[N].

        loss_n = -sum_i q_ni log p_ni,   p = softmax(logits)
        q_n = (1 - epsilon) one_hot(targets_n) + epsilon u_n,   epsilon = label_smoothing

    u is uniform over the classes that smoothing names: "all", the "others" than the target, or of these
    all but the padding class ignore_index ("others_but_padding").
    A row whose target is ignore_index is not kept: its loss is 0 whatever its logits are, and the mean is
    the sum over the number of kept rows.
    Source: Szegedy et al. 2016 (Rethinking the Inception Architecture for Computer Vision), section 7; P31 to P40.
    Edges: 0 log 0 = 0; a class with p = 0 and q > 0 makes the loss inf. The mean over nothing is NaN, or 0
    (all_ignored = "zero"); its gradient is 0.
    Raises ValueError for arrays of other shapes, targets that are neither classes nor ignore_index,
    label_smoothing outside [0, 1) or without a class to go to, and other words.
    """
    _check_arrays(logits, targets, ignore_index)
    _check_words(label_smoothing, reduction, smoothing, all_ignored)
    xp, kept = array_namespace(logits), targets != ignore_index
    words: dict[str, Any] = {"label_smoothing": label_smoothing, "ignore_index": ignore_index, "smoothing": smoothing}
    q = smoothed_targets(targets, logits, **words)
    log_p = log_softmax(xp.where(kept[:, None], logits, 0.0))
    surprise = xp.where(q > 0, -log_p, 0.0)
    loss = xp.where(kept, xp.sum(q * surprise, axis=-1), 0.0)
    if reduction == "none":
        return loss
    total, count = xp.sum(loss), xp.sum(xp.astype(kept, loss.dtype))
    if reduction == "sum":
        return total
    return xp.where(count == 0, NOTHING[all_ignored], total / xp.where(count == 0, 1.0, count))


def smoothed_targets(
    targets: Any, logits: Any, *, label_smoothing: float = 0.0, ignore_index: int = -100, smoothing: str = "all"
) -> Any:
    """The distribution q that softmax(logits) should be.

    targets[N], logits[N,V] -> q[N,V].

        q_n = (1 - epsilon) one_hot(targets_n) + epsilon u_n

    Source, edges, errors: `cross_entropy`.
    """
    xp, size = array_namespace(logits), logits.shape[1]
    classes = xp.arange(size, device=device(logits))
    target = classes == targets[:, None]
    sharing = target | True if smoothing == "all" else ~target
    if smoothing == "others_but_padding":
        sharing = sharing & (classes != ignore_index)
    q = (1 - label_smoothing) * xp.astype(target, logits.dtype)
    if label_smoothing == 0:
        return q
    number = size - SMOOTHING.index(smoothing)
    _check_sharing(number, ignore_index, size, smoothing)
    return q + (label_smoothing / number) * xp.astype(sharing, logits.dtype)


def _check_arrays(logits: Any, targets: Any, ignore_index: int) -> None:
    """ValueError for what would pick a wrong class without a word."""
    if logits.ndim != 2:
        raise ValueError(f"cross_entropy: logits: got shape {tuple(logits.shape)}, wanted 2 axes: rows, classes")
    rows, size = logits.shape
    if tuple(targets.shape) != (rows,):
        raise ValueError(f"cross_entropy: targets: got shape {tuple(targets.shape)}, wanted ({rows},), one a row")
    xp = array_namespace(targets)
    if not xp.isdtype(targets.dtype, "integral"):
        raise ValueError(f"cross_entropy: targets: got {targets.dtype}, wanted integers")
    astray = (targets != ignore_index) & ((targets < 0) | (targets >= size))
    if bool(xp.any(astray)):
        first = int(targets[int(xp.argmax(xp.astype(astray, xp.int8)))])
        raise ValueError(f"cross_entropy: targets: got {first}, wanted 0 to {size - 1}, or {ignore_index} to ignore")


def _check_words(label_smoothing: float, reduction: str, smoothing: str, all_ignored: str) -> None:
    """ValueError for keywords that are none."""
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"cross_entropy: label_smoothing: got {label_smoothing}, wanted 0 <= label_smoothing < 1")
    for name, word, words in (
        ("reduction", reduction, REDUCTIONS),
        ("smoothing", smoothing, SMOOTHING),
        ("all_ignored", all_ignored, tuple(NOTHING)),
    ):
        if word not in words:
            raise ValueError(f"cross_entropy: {name}: got {word!r}, wanted one of {', '.join(words)}")


def _check_sharing(number: int, ignore_index: int, size: int, smoothing: str) -> None:
    """ValueError where epsilon has no class to go to, or there is no padding class."""
    if smoothing == "others_but_padding" and not 0 <= ignore_index < size:
        raise ValueError(f"cross_entropy: ignore_index: got {ignore_index}, wanted the padding class, 0 to {size - 1}")
    if number < 1:
        raise ValueError(f"cross_entropy: logits: got {size} classes, wanted one more to share label_smoothing")
