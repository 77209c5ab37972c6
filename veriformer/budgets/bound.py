"""A reference value with the error it may be missed by, and how much of that error was used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Bound:
    """What a result should be, and the error that a correct computation may make there.

    value: the reference, float64. allowed: error budget >= 0, float64, of the shape of value; 0
    demands equality, inf means undetermined (the inputs decide nothing at this precision).
    terms: contributions by cause; they add up to allowed, except where a limit that holds anyway
    (a probability is at most 1, an average lies between the values) made allowed smaller.
    """

    value: Array
    allowed: Array
    terms: Mapping[str, Array]

    def dominant(self, index: tuple[int, ...]) -> str:
        """The name of the largest contribution to the budget at one index."""
        return max(
            self.terms, key=lambda name: float(np.broadcast_to(self.terms[name], self.value.shape)[index]), default=""
        )


def error_ratio(computed: Array, value: Array, allowed: Array, largest: float) -> Array:
    """Error in units of what is allowed: |computed - value| / allowed.

    computed, value, allowed: arrays of one shape -> ratio, of the same shape; above 1 is a failure.
    largest: largest finite number of the dtype of `computed`.
    Source: the residual ratios of LAPACK's test suite, made componentwise.
    Edges: 0 where both are equal, both are the same infinity or both are NaN; inf where only one is
    finite, or where nothing is allowed and they differ. Where a finite |value| + allowed reaches
    `largest`, infinity of its sign and `largest` count as the same. 0 where allowed is inf (undetermined): count
    those with `undetermined`.
    """
    with np.errstate(all="ignore"):
        over = np.isfinite(value) & (np.abs(value) + allowed >= largest)
        if over.any():
            computed = np.where(over, np.clip(computed, -largest, largest), computed)
            value = np.where(over, np.clip(value, -largest, largest), value)
        error = np.abs(computed - value)
        ratio = np.where(error == 0, 0.0, error / allowed)
    fine = (computed == value) | (np.isnan(computed) & np.isnan(value)) | np.isposinf(allowed)
    return np.where(fine, 0.0, np.where(np.isnan(ratio), np.inf, ratio))


def undetermined(bound: Bound) -> int:
    """How many elements of a result the inputs leave undetermined at this precision."""
    return int(np.isposinf(bound.allowed).sum())


def added(terms: Mapping[str, Array]) -> Array:
    """The sum of all contributions."""
    return reduce(np.add, terms.values())


def exact(value: Array) -> Bound:
    """The budget of a result that is picked and not computed: nothing is allowed."""
    none = np.zeros(value.shape)
    return Bound(value, none, {"exact": none})


def sum_of(one: Bound, other: Bound) -> Bound:
    """The budget of a relation: two results that should be equal may differ by the sum of their budgets.

    one, other: bounds of shapes that broadcast -> Bound with the value of `one`.
    Judge with error_ratio(result of one, result of the other, allowed, largest).
    """
    names = dict.fromkeys((*one.terms, *other.terms))
    none = np.zeros(())
    terms = {name: one.terms.get(name, none) + other.terms.get(name, none) for name in names}
    return Bound(one.value, one.allowed + other.allowed, terms)
