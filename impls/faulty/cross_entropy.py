"""Wrong cross entropy: one correct implementation with one switch for each mistake."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from veriformer.declarations import Capabilities, Fault

FRAMEWORK = "numpy"
LANES, CHUNK = 4, 4


def _make(fault: str) -> Callable[..., NDArray]:
    def cross_entropy(
        logits: NDArray, targets: NDArray, *, label_smoothing: float = 0.0, ignore_index: int = -100,
        reduction: str = "mean",
    ) -> NDArray:  # fmt: skip
        if fault == "targets_written" and (targets == ignore_index).any():
            targets[targets == ignore_index] = 0
        epsilon = 0.0 if fault == "smoothing_dropped" else label_smoothing
        kept = _kept(targets, ignore_index, epsilon, fault)
        at = np.where(kept, _targets(targets, fault), 0) % logits.shape[1]
        with np.errstate(all="ignore"):
            log_p = _log_softmax(_given(logits, kept, fault), fault)
            hard = _hard(log_p, at, fault)
            loss = _smoothed(hard, log_p, at, epsilon, fault)
            if fault == "infinite_losses_dropped":
                loss = np.where(np.isinf(loss), 0, loss)
            if fault == "ignored_rows_times_zero":
                loss = loss * kept
            elif fault.startswith("smoothing_") and epsilon and fault.endswith("rows"):
                loss = np.where(kept, (1 - epsilon) * hard, 0) + _unmasked(log_p, kept, epsilon, fault)
            else:
                loss = np.where(kept, loss, 0)
            return _reduced(loss, kept, reduction, logits.shape[1], fault).astype(logits.dtype)

    cross_entropy.__qualname__ = f"cross_entropy[{fault}]"
    return cross_entropy


def _kept(targets: NDArray, ignore_index: int, epsilon: float, fault: str) -> NDArray:
    """Rows that count."""
    if fault == "condition_inverted" and (targets == ignore_index).any():
        return targets == ignore_index
    if fault == "ignores_minus_one_hundred_only":
        return targets >= 0
    if fault == "ignores_nothing_beside_smoothing" and epsilon:
        return np.ones(targets.shape, bool)
    return targets != ignore_index


def _targets(targets: NDArray, fault: str) -> NDArray:
    if fault == "targets_in_two_bits":
        return targets & 3
    if fault == "targets_shifted":
        return np.where(np.roll(targets, -1) >= 0, np.roll(targets, -1), targets)
    return targets - 1 if fault == "targets_count_from_one" else targets


def _given(logits: NDArray, kept: NDArray, fault: str) -> NDArray:
    """The logits that are looked at."""
    z = logits if logits.dtype == np.float64 else logits.astype(np.float32)
    if fault == "minus_infinity_is_finite":
        z = np.where(np.isneginf(z), z.dtype.type(-1e3), z)
    if fault == "logits_clipped":
        z = np.where(np.isneginf(z), z, np.clip(z, -50, 50))
    lets_through = fault in ("ignored_rows_times_zero", "condition_inverted") or fault.endswith("rows")
    return z if lets_through else np.where(kept[:, None], z, 0)


def _log_softmax(z: NDArray, fault: str) -> NDArray:
    m = z.max() if fault == "maximum_of_the_batch" else z.max(axis=-1, keepdims=True)
    m = 0 if fault == "maximum_not_subtracted" else m
    e = np.exp(z - m)
    e = _in_half(e) if fault == "exponentials_in_half" else e
    total = e.sum(axis=-1, keepdims=True)
    total = _in_half(total) if fault == "normaliser_in_half" else total
    lanes = -z.shape[-1] % LANES
    if fault == "tail_counts_phantom_lanes":
        total = total + lanes * np.exp(-m)
    if fault == "cap_reaches_phantom_lanes":
        total = total + lanes * np.exp(-30 - m)
    if fault == "last_class_never" and z.shape[-1] > 1:
        total = total - e[:, -1:] * (1 - 2.0**-10)
    if fault == "logarithm_of_softmax":
        return np.log(e / total)
    if fault == "guard_inside_the_logarithm":
        return np.log(e / total + z.dtype.type(1e-8))
    log_p = z - m - np.log(total)
    if fault == "losses_clamped":
        log_p = np.maximum(log_p, -100)
    return log_p / z.dtype.type(np.log(2)) if fault == "logarithm_to_base_two" else log_p


def _hard(log_p: NDArray, at: NDArray, fault: str) -> NDArray:
    if fault == "one_hot_times_logarithm":
        return -((np.arange(log_p.shape[1]) == at[:, None]) * log_p).sum(axis=-1)
    return -np.take_along_axis(log_p, at[:, None], 1)[:, 0]


def _smoothed(hard: NDArray, log_p: NDArray, at: NDArray, epsilon: float, fault: str) -> NDArray:
    """The loss of each row, its target smoothed."""
    size = log_p.shape[1]
    if fault == "classes_counted_in_rows":
        return hard if not epsilon else (1 - epsilon) * hard - epsilon / len(log_p) * log_p.sum(axis=-1)
    if not epsilon:
        return hard
    if fault == "smoothing_over_the_others":
        share = epsilon / max(size - 1, 1)
        return (1 - epsilon - share) * hard - share * log_p.sum(axis=-1)
    if fault == "last_class_shares_nothing" and size > 1:
        return (1 - epsilon) * hard - epsilon * log_p[:, :-1].mean(axis=-1)
    if fault == "target_has_no_share":
        return (1 - epsilon - epsilon / size) * hard - epsilon * log_p.mean(axis=-1)
    if fault == "epsilon_not_taken_off":
        return hard - epsilon * log_p.mean(axis=-1)
    if fault == "mean_before_the_logarithm":
        return (1 - epsilon) * hard - epsilon * np.log(np.exp(log_p).mean(axis=-1))
    if fault == "smoothing_summed_in_half":
        return (1 - epsilon) * hard - epsilon / size * _in_half(log_p.sum(axis=-1))
    loss = (1 - epsilon) * hard - epsilon * log_p.mean(axis=-1)
    if fault == "entropy_subtracted":
        q = np.where(np.arange(size) == at[:, None], 1 - epsilon, 0) + epsilon / size
        loss = loss + (q * np.log(q)).sum(axis=-1)
    return loss


def _in_half(sums: NDArray) -> NDArray:
    return sums.astype(np.float16).astype(sums.dtype)


def _unmasked(log_p: NDArray, kept: NDArray, epsilon: float, fault: str) -> NDArray:
    """The smoothing of all rows, in which those that are ignored have a part; their own is given to the kept ones."""
    spread = -epsilon * log_p.mean(axis=-1)
    if fault == "smoothing_counts_ignored_rows":
        return spread
    return np.where(kept, spread.mean(), 0)


def _reduced(loss: NDArray, kept: NDArray, reduction: str, size: int, fault: str) -> NDArray:
    if reduction == "none":
        return loss
    if fault == "last_rows_dropped" and len(loss) > CHUNK:
        loss = np.where(np.arange(len(loss)) < len(loss) // CHUNK * CHUNK, loss, 0)
    if reduction == "sum" and fault != "sum_is_a_mean":
        return np.asarray(loss.sum())
    if fault == "mean_of_the_means_of_chunks":
        chunks = [slice(start, start + CHUNK) for start in range(0, len(loss), CHUNK)]
        means = [loss[chunk].sum() / kept[chunk].sum() for chunk in chunks if kept[chunk].any()]
        return np.asarray(np.mean(means) if means else np.nan, loss.dtype)
    count = int(kept.sum())
    if fault == "first_row_dropped_but_counted" and len(loss) > 1:
        loss = loss[1:]
    number = {
        "divided_by_all_rows": len(loss) if count else 0,
        "divided_by_the_classes": size if count else 0,
        "count_at_least_one": max(count, 1),
        "rows_counted_in_eight_bits": min(count, 256),
    }.get(fault, count)
    total = _in_half(loss.sum()) if fault == "mean_summed_in_half" else loss.sum()
    return np.asarray(total / loss.dtype.type(number))


# law that must accuse: {variant: (where it was seen, what is wrong)}
_TABLE: dict[str, dict[str, tuple[str, str]]] = {
    "smoothing-weighs-the-losses-of-all-classes": {
        "smoothing_over_the_others": ("fairseq PR#3182", "shared by V - 1 classes, which is not declared"),
        "last_class_shares_nothing": ("mutation: a padding class that is none", "the last class gets no share"),
        "epsilon_not_taken_off": ("mutation: a term added", "the hard loss keeps its full weight"),
        "mean_before_the_logarithm": ("mutation: log and mean change places", "log of the mean probability"),
    },
    "uniform-logits-cost-log-v": {
        "classes_counted_in_rows": ("tensorflow#32231", "the number of classes is read off the wrong axis"),
        "logarithm_to_base_two": ("mutation: bits for nats", "logarithm to base 2"),
    },
    "never-below-the-entropy-of-the-target": {
        "entropy_subtracted": ("tensor2tensor: padded_cross_entropy", "less the entropy of the smoothed target"),
        "target_has_no_share": ("mutation: 1 - e at the target, e/V elsewhere", "weights that sum to 1 - e/V"),
    },
    "shift-changes-nothing": {
        "maximum_not_subtracted": ("FasterTransformer#43", "exp of the logits as they are"),
        "logits_clipped": ("mutation: a guard against overflow", "logits are clipped at 50"),
        "tail_counts_phantom_lanes": ("verl PR#5349", "a last group of lanes that is not full counts as logits of 0"),
        "cap_reaches_phantom_lanes": ("unsloth PR#10616", "such lanes count as logits of -30, the soft cap of -inf"),
    },
    "classes-are-only-names": {
        "last_class_never": ("mutation: < V - 1", "the last class has hardly a part in the normaliser"),
        "targets_in_two_bits": ("mutation: a narrow integer", "targets modulo 4"),
        "targets_count_from_one": ("mutation: an index that counts from 1", "the class before the target"),
    },
    "minus-infinity-equals-deletion": {
        "one_hot_times_logarithm": ("annotated-transformer#38", "0 times -inf is added up"),
        "minus_infinity_is_finite": ("mutation: a finite stand-in", "-inf is read as -1000, above very low logits"),
    },
    "finite-for-finite-logits": {
        "logarithm_of_softmax": ("tinygrad#219", "log of a probability that underflows"),
        "smoothing_summed_in_half": ("HF#10674", "the sum over the vocabulary is stored in float16"),
        "mean_summed_in_half": ("pytorch#61523", "the sum over rows is stored in float16"),
    },
    "a-hopeless-target-costs-its-distance": {
        "guard_inside_the_logarithm": ("S0: log(p + 1e-8)", "no loss is above 18.4"),
        "losses_clamped": ("mutation: the clamp of binary cross entropy", "no logarithm is below -100"),
    },
    "an-impossible-class-costs-infinity": {
        "infinite_losses_dropped": ("mutation: zero_infinity of another loss", "inf counts as 0"),
    },
    "label-smoothing-has-influence": {
        "smoothing_dropped": ("Liger-Kernel#243", "label_smoothing is accepted and not passed on"),
    },
    "ignored-rows-leave-no-trace": {
        "smoothing_counts_ignored_rows": ("pytorch#73205", "ignored rows have a part in the smoothing"),
        "smoothing_is_the_mean_of_all_rows": ("tinygrad PR#3570", "the smoothing is averaged over all rows"),
        "condition_inverted": ("sockeye#200", "what should be ignored is kept, and the rest ignored"),
    },
    "nan-in-an-ignored-row-stays-there": {
        "ignored_rows_times_zero": ("mutation: a mask that multiplies", "0 times NaN"),
    },
    "ignored-rows-can-be-deleted": {
        "divided_by_all_rows": ("HF#7546", "divided by all rows, ignored ones too"),
        "ignores_nothing_beside_smoothing": ("pytorch#69339", "with smoothing an ignored row counts as class 0"),
    },
    "nothing-kept-gives-what-is-declared": {
        "count_at_least_one": ("torchtune#2341", "0 over at least 1, which is not declared"),
    },
    "rows-add-up": {
        "sum_is_a_mean": ("OpenNMT-py PR#526", "reduction is not looked at: always the mean"),
        "first_row_dropped_but_counted": ("HF PR#46204", "rows are counted before the shift drops the first"),
    },
    "parts-add-up": {
        "mean_of_the_means_of_chunks": ("torchtune PR#1875", "means of 4 rows each are averaged"),
        "last_rows_dropped": ("mutation: a loop over whole chunks only", "a last chunk of less than 4 is not added"),
    },
    "a-repeated-batch-has-the-same-mean": {
        "divided_by_the_classes": ("mutation: the mean over the wrong axis", "the sum is divided by V"),
    },
    "each-row-by-itself": {
        "targets_shifted": ("HF#47394", "a row's target is that of the next row"),
        "maximum_of_the_batch": ("mutation: max over all axes", "the largest logit of the batch is subtracted"),
    },
    "ignore-index-has-influence": {
        "ignores_minus_one_hundred_only": ("mutation: a constant", "only what is below 0 is ignored"),
    },
    "the-mean-counts-every-row": {
        "rows_counted_in_eight_bits": ("mutation: a count held in bfloat16", "the count of rows stands still at 256"),
    },
    "works-in-the-declared-precision": {
        "exponentials_in_half": ("mutation: a shorter dtype inside than declared", "exponentials are held in float16"),
        "normaliser_in_half": ("mutation: a shorter dtype inside than declared", "their sum is held in float16"),
    },
    "leaves-inputs-untouched": {
        "targets_written": ("mutation: masked_fill_ on the argument", "ignored targets are overwritten with 0"),
    },
}
_DTYPES = {"smoothing_summed_in_half": "float16", "mean_summed_in_half": "float16"}
FAULTS = {
    variant: Fault("cross_entropy", f"cross_entropy/{law}", source, summary, _DTYPES.get(variant, "float32"))
    for law, variants in _TABLE.items()
    for variant, (source, summary) in variants.items()
}
VARIANTS = {variant: {"cross_entropy": _make(variant)} for variant in ("correct", *FAULTS)}
CAPABILITIES = {
    variant: {
        "cross_entropy": Capabilities(
            dtypes=("float64", "float32", "float16"),
            intermediate={"float64": "float64", "default": "float32"},
            nan_contained=variant in ("correct", "ignored_rows_times_zero"),
        )
    }
    for variant in VARIANTS
}
