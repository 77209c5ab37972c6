"""Wrong gradients of cross entropy beside right losses: one switch for each mistake."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veriformer.declarations import Capabilities, Fault

FRAMEWORK = "numpy"
CHUNK = 4


def cross_entropy(
    logits: NDArray, targets: NDArray, *, label_smoothing: float = 0.0, ignore_index: int = -100,
    reduction: str = "mean",
) -> NDArray:  # fmt: skip
    """Correct."""
    kept = targets != ignore_index
    z = np.where(kept[:, None], logits, 0)
    z = z - z.max(axis=-1, keepdims=True)
    log_p = z - np.log(np.exp(z).sum(axis=-1, keepdims=True))
    loss = -np.take_along_axis(log_p, np.where(kept, targets, 0)[:, None], 1)[:, 0]
    if label_smoothing:
        loss = (1 - label_smoothing) * loss - label_smoothing * log_p.mean(axis=-1)
    loss = np.where(kept, loss, 0).astype(logits.dtype)
    if reduction == "none":
        return loss
    with np.errstate(all="ignore"):
        return np.asarray(loss.sum() / loss.dtype.type(kept.sum() if reduction == "mean" else 1))


def _make(fault: str) -> Callable[..., Any]:
    def vjp(
        g: NDArray, logits: NDArray, targets: NDArray, *, label_smoothing: float = 0.0, ignore_index: int = -100,
        reduction: str = "mean",
    ) -> Any:  # fmt: skip
        if fault == "no_gradient_without_reduction" and reduction == "none":
            return None, None
        kept = targets != ignore_index
        passed = fault in ("ignored_rows_times_zero_in_backward", "ignored_rows_are_trained")
        z = logits if passed else np.where(kept[:, None], logits, 0)
        with np.errstate(all="ignore"):
            p, q = _probabilities(z, fault), _wanted(targets, kept, z.shape[1], label_smoothing, fault)
            slope = -p * (1 / p) * (q - p) if fault == "divides_by_the_probability" else p - q
            rows = _each_row(np.asarray(g), kept, reduction, label_smoothing, fault)[:, None]
            found = _masked(rows * slope, rows, kept, label_smoothing, fault).astype(logits.dtype)
        if fault == "last_rows_without_gradient" and len(found) > CHUNK:
            found[len(found) // CHUNK * CHUNK :] = 0
        if fault == "written_into_the_logits" and logits.flags.writeable:
            logits[...] = found
        return (-found if fault == "sign_turned" else found), None

    return vjp


def _probabilities(z: NDArray, fault: str) -> NDArray:
    e = np.exp(z - z.max(axis=-1, keepdims=True))
    total = e.sum(axis=-1, keepdims=True)
    if fault == "probabilities_not_normalised":
        total = total * z.dtype.type(1 + 2.0**-8)
    p = e / total
    return np.maximum(p, z.dtype.type(1e-7)) if fault == "probabilities_floored" else p


def _wanted(targets: NDArray, kept: NDArray, size: int, epsilon: float, fault: str) -> NDArray:
    """The target distribution."""
    at = np.where(kept, targets, 0)
    hit = np.arange(size) == (at[:, None] + (fault == "next_class_in_backward")) % size
    if fault == "smoothing_forgotten_in_backward":
        return hit.astype(float)
    if fault == "smoothing_over_the_others_in_backward" and size > 1:
        return np.where(hit, 1 - epsilon, epsilon / (size - 1))
    kept_share = 1.0 if fault == "target_share_not_taken_off" else 1 - epsilon
    return hit * kept_share + epsilon / size


def _each_row(g: NDArray, kept: NDArray, reduction: str, epsilon: float, fault: str) -> NDArray:
    """The cotangent of each row's loss."""
    g = np.broadcast_to(g, kept.shape)
    if fault == "first_cotangent_for_all" and kept.size:
        g = np.broadcast_to(g[:1], kept.shape)
    if fault == "mean_of_the_cotangent":
        g = np.full_like(g, g.mean())
    if fault == "cotangent_ignored":
        g = np.ones_like(g)
    if reduction != "mean" or fault == "mean_not_divided_in_backward":
        return g
    over_all = fault == "divided_by_all_rows_in_backward"
    over_all |= fault == "smoothing_divided_by_all_rows_in_backward" and epsilon > 0
    count = len(kept) if over_all else int(kept.sum())
    return g / g.dtype.type(count if fault == "zero_by_zero_in_backward" else max(count, 1))


def _masked(found: NDArray, rows: NDArray, kept: NDArray, epsilon: float, fault: str) -> NDArray:
    """The gradient of the rows that count."""
    if fault == "ignored_rows_are_trained":
        return found
    if fault in ("ignored_rows_times_zero_in_backward", "zero_by_zero_in_backward"):
        return found * kept[:, None]
    share = -rows * epsilon / found.shape[1] if fault == "smoothing_in_ignored_rows" else 0
    return np.where(kept[:, None], found, share)


# law that must accuse: {variant: (where it was seen, what is wrong)}
_TABLE: dict[str, dict[str, tuple[str, str]]] = {
    "the-implied-target-is-the-declared-one": {
        "smoothing_over_the_others_in_backward": ("fairseq PR#3182", "shared by V - 1 classes in the backward"),
        "smoothing_forgotten_in_backward": ("Liger-Kernel#243", "the backward does not know of label_smoothing"),
        "next_class_in_backward": ("mutation: an index off by one", "the class after the target is taken off"),
        "sign_turned": ("mutation: q - p for p - q", "the gradient points the other way"),
    },
    "gradient-sums-to-zero": {
        "target_share_not_taken_off": ("mutation: a term added", "1 + e/V is taken off at the target"),
        "probabilities_not_normalised": ("mutation: a stale denominator", "the normaliser is 0.4 % too large"),
    },
    "ignored-rows-get-no-gradient": {
        "ignored_rows_are_trained": ("mutation: a mask in the forward only", "p - q of ignored rows is passed on"),
        "smoothing_in_ignored_rows": ("tinygrad PR#3570", "the smoothing's gradient reaches ignored rows"),
    },
    "nan-in-an-ignored-row-reaches-no-gradient": {
        "ignored_rows_times_zero_in_backward": ("mutation: a mask that multiplies", "0 times NaN"),
    },
    "ignored-rows-change-no-gradient": {
        "divided_by_all_rows_in_backward": ("HF#7546", "divided by all rows in the backward"),
        "smoothing_divided_by_all_rows_in_backward": ("HF#7546", "the same, with smoothing only"),
    },
    "nothing-kept-has-no-gradient": {
        "zero_by_zero_in_backward": ("pytorch#70348", "0 / 0 where no row is kept"),
    },
    "each-row-has-its-own-cotangent": {
        "first_cotangent_for_all": ("Liger-Kernel#678", "the first row's cotangent is used for all"),
        "mean_of_the_cotangent": ("mutation: a scalar expected", "the mean of the cotangent is used for all"),
    },
    "gradient-is-linear-in-the-cotangent": {
        "cotangent_ignored": ("Liger-Kernel#968", "what was made in the forward is not scaled"),
    },
    "the-mean-shares-the-gradient-of-the-sum": {
        "mean_not_divided_in_backward": ("mutation: a factor forgotten", "the gradient of the sum under the mean"),
    },
    "gradients-of-parts-are-parts-of-the-gradient": {
        "last_rows_without_gradient": ("mutation: a loop over whole chunks only", "a last chunk of less than 4 gets 0"),
    },
    "gradient-is-finite": {
        "divides_by_the_probability": ("mutation: -1/p times p (q - p)", "0 times infinity where p underflows"),
    },
    "absent-classes-get-no-gradient": {
        "probabilities_floored": ("mutation: a floor under p", "no probability is below 1e-7"),
    },
    "gradient-exists": {
        "no_gradient_without_reduction": ("Liger-Kernel PR#1298", "None for the rows by themselves"),
    },
    "backward-leaves-inputs-untouched": {
        "written_into_the_logits": ("Liger-Kernel: logits as the buffer of their gradient", "the logits are written"),
    },
}
FAULTS = {
    variant: Fault("cross_entropy", f"cross_entropy/{law}", source, summary)
    for law, variants in _TABLE.items()
    for variant, (source, summary) in variants.items()
}
VARIANTS = {
    variant: {"cross_entropy": cross_entropy, "cross_entropy_vjp": _make(variant)} for variant in ("correct", *FAULTS)
}
CAPABILITIES = {
    variant: {
        "cross_entropy": Capabilities(
            dtypes=("float64", "float32"),
            nan_contained=variant in ("correct", "ignored_rows_times_zero_in_backward"),
        )
    }
    for variant in VARIANTS
}
