"""Changes of a case of cross entropy, and what its declared target distribution is: shared by several laws."""

from __future__ import annotations

from typing import Any

import numpy as np

from veriformer.case import Case
from veriformer.expect import expect_different
from veriformer.properties.measured import Measured
from veriformer.reference import softmax
from veriformer.reference.loss import smoothed_targets
from veriformer.subject import Subject

GRID = 2.0**10
"""Logits are put on multiples of 1 / GRID before a shift."""
UNUSED = -100
"""An id that is no class."""


def kept_rows(case: Case) -> np.ndarray:
    """Rows whose target is not ignored, [N]."""
    kept: np.ndarray = case["targets"] != case["ignore_index"]
    return kept


def targets_of(subject: Subject, case: Case) -> np.ndarray:
    """The distribution that softmax should be under the declared smoothing, [N,V]; 0 in ignored rows."""
    q = smoothed_targets(
        case["targets"],
        np.zeros(case["logits"].shape),
        label_smoothing=case["label_smoothing"],
        ignore_index=case["ignore_index"],
        smoothing=subject.capabilities.smoothing,
    )
    return np.where(kept_rows(case)[:, None], q, 0.0)


def probabilities(case: Case) -> np.ndarray:
    """softmax of the logits, exactly enough; of zeros in ignored rows."""
    found: np.ndarray = softmax(np.where(kept_rows(case)[:, None], case["logits"], 0.0))
    return found


def divisor(case: Case) -> int:
    """What the sum over rows is divided by: the number of kept ones under the mean."""
    return max(int(kept_rows(case).sum()), 1) if case["reduction"] == "mean" else 1


def losses(subject: Subject, case: Case) -> Measured:
    """The result and its error budget; undetermined where it may leave the range of the dtype."""
    results, (bound,) = subject.with_bounds(case)
    far = np.isfinite(bound.value) & (np.abs(bound.value) + bound.allowed >= subject.largest)
    return Measured(results[0], np.where(far, np.inf, bound.allowed))


def row_losses(subject: Subject, case: Case) -> Measured:
    """The loss of every row and its error budget."""
    return losses(subject, case.with_keywords(reduction="none"))


def total(rows: np.ndarray, case: Case) -> np.ndarray:
    """Numbers of all rows under the case's reduction."""
    return rows if case["reduction"] == "none" else np.asarray(rows.sum() / divisor(case))


def reduced(rows: Measured, case: Case) -> Measured:
    """Losses of all rows, and their errors, under the case's reduction, added up without rounding."""
    return rows.rearranged(lambda array: total(array, case))


def added(parts: list[Measured]) -> Measured:
    """The sum of several results, and of their errors."""
    return Measured(sum((part.value for part in parts), np.zeros(())), sum((p.allowed for p in parts), np.zeros(())))


def taken(case: Case, rows: np.ndarray) -> Case:
    """The case with some rows, in that order."""
    return case.with_arrays(logits=case["logits"][rows], targets=case["targets"][rows])


def with_classes(case: Case, order: np.ndarray) -> Case:
    """The case with some classes, in that order; targets and an ignored class are named anew.

    Raises ValueError where a class that is wanted goes; an ignored one that goes gets an id that is no class.
    """
    size = case["logits"].shape[1]
    names = np.full(size, UNUSED)
    names[order] = np.arange(order.size)

    def named(ids: Any) -> np.ndarray:
        inside = (np.asarray(ids) >= 0) & (np.asarray(ids) < size)
        return np.where(inside, names[np.where(inside, ids, 0)], ids)

    # an id beyond the last class must not become a class
    ignored = int(named(case["ignore_index"]))
    targets = np.where(kept_rows(case), named(case["targets"]), ignored)
    if (targets[kept_rows(case)] < 0).any():
        raise ValueError("a class that is wanted goes")
    renamed = case.with_arrays(logits=case["logits"][:, order], targets=targets)
    return renamed.with_keywords(ignore_index=ignored)


def with_absent(case: Case, classes: np.ndarray) -> Case:
    """The case with -inf for some classes."""
    logits = case["logits"].copy()
    logits[:, classes] = -np.inf
    return case.with_arrays(logits=logits)


def with_other_rows_changed(case: Case) -> tuple[Case, np.ndarray]:
    """About half of the rows replaced by quite different ones with other targets, and which rows were left alone."""
    logits, targets = case["logits"], case["targets"]
    same = case.random(1).permutation(targets.size) % 2 == 0
    finite = np.where(logits == -np.inf, 0.0, logits)
    others = np.where(kept_rows(case), (targets + 1) % case.size("V"), targets)
    changed = {
        "logits": np.where(same[:, None], logits, 3 - 2 * finite[:, ::-1]),
        "targets": np.where(same, targets, others),
    }
    return case.with_arrays(**changed), same


def shifted(case: Case, shift: float) -> tuple[Case, Case, bool]:
    """Two cases whose logits differ by exactly a shift, and whether they do."""
    high = case.with_arrays(logits=np.round(case["logits"] * GRID) / GRID + shift)
    low = case.with_arrays(logits=high["logits"] - shift)
    return low, high, bool((low["logits"] + shift == high["logits"]).all())


def parts_of(case: Case, count: int) -> list[np.ndarray]:
    """The rows cut into so many parts of uneven lengths, and one of nothing but ignored rows, if there are any."""
    kept, rng = kept_rows(case), case.random(4)
    left, ignored = np.flatnonzero(kept), np.flatnonzero(~kept)
    cuts = np.sort(rng.integers(0, left.size + 1, count - 1))
    parts = [part for part in np.split(left, cuts) if part.size]
    some = ignored[: (ignored.size + 1) // 2]
    if parts:
        parts[0] = np.concatenate([parts[0], ignored[some.size :]])
    return [part for part in (*parts, some) if part.size]


def filled(case: Case, value: float) -> Case:
    """The case with something else in its ignored rows: the value, then neighbours of it."""
    size = case["logits"].shape[1]
    other = value + np.arange(size) if np.isfinite(value) else np.full(size, value)
    return case.with_arrays(logits=np.where(kept_rows(case)[:, None], case["logits"], other))


def expect_influence(subject: Subject, case: Case, changed: Case, word: str) -> None:
    """The results differ wherever the reference's do by more than roundings."""
    one, other = subject.reference(case), subject.reference(changed)
    if one.value.shape == other.value.shape:
        clear = np.abs(one.value - other.value) > 2 * (one.allowed + other.allowed)
        expect_different(subject(changed)[clear], subject(case)[clear], what=f"{word} has an influence")
