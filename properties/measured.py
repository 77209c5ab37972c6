"""Results as they came, each with the error it may carry, so that relations of two read like mathematics.

    expect_equal(measure(attention, scaled), measure(attention, case) * 2)

The error of a sum, a product with an exact factor or a part follows from those of the operands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from veriformer.case import Case
from veriformer.expect import expect_close, expect_same
from veriformer.subject import Subject


@dataclass(frozen=True)
class Measured:
    """Computed values and the error budget of each; plain numbers beside it count as exact."""

    value: np.ndarray
    allowed: np.ndarray

    def __getitem__(self, index: Any) -> Measured:
        return Measured(self.value[index], self.allowed[index])

    def rearranged(self, change: Callable[[np.ndarray], np.ndarray]) -> Measured:
        """The values and their errors picked, moved or repeated alike."""
        return Measured(change(self.value), change(self.allowed))

    def __add__(self, shift: Any) -> Measured:
        return Measured(self.value + shift, self.allowed)

    def __mul__(self, factor: Any) -> Measured:
        return Measured(self.value * factor, weighed(self.allowed, factor))


def weighed(allowed: np.ndarray, factor: Any) -> np.ndarray:
    """The error of a product with an exact factor; 0 takes even an undetermined one with it."""
    return np.where(np.asarray(factor) == 0, 0.0, allowed * np.abs(factor))


def measure(subject: Subject, case: Case) -> Measured:
    """The first result of a call and its budget."""
    return measure_all(subject, case)[0]


def measure_all(subject: Subject, case: Case) -> tuple[Measured, ...]:
    """Every result of a call and their budgets."""
    results, bounds = subject.with_bounds(case)
    return tuple(Measured(got, bound.allowed) for got, bound in zip(results, bounds, strict=True))


def expect_equal(one: Measured, other: Measured | Any, *, what: str = "") -> None:
    """Two results that are equal by law, or a result and an exact value, differ by no more than their budgets."""
    if not isinstance(other, Measured):
        other = Measured(np.asarray(other, float), np.zeros(()))
    expect_close(one.value, other.value, one.allowed + other.allowed, what=what)


def expect_unmoved(subject: Subject, case: Case, changed: Case, rows: Any = ...) -> None:
    """These rows of the first result come out alike: bit for bit, or within budget if leak="rounding"."""
    if subject.capabilities.leak == "exact":
        before, after = (subject(one) for one in (case, changed))
        first, second = (found[0] if isinstance(found, tuple) else found for found in (before, after))
        expect_same(second[rows], first[rows])
    else:
        expect_equal(measure(subject, changed)[rows], measure(subject, case)[rows])
