"""Changes of a case along or across the axis that its operation reduces, shared by several laws."""

from __future__ import annotations

from typing import Any

import numpy as np

from veriformer.budgets import Precision
from veriformer.budgets.precision import C
from veriformer.case import Case
from veriformer.expect import expect_same
from veriformer.oracle import shapes
from veriformer.properties.measured import Measured, expect_equal, measure
from veriformer.subject import Subject

GRID = 2.0**20
"""Values are put on multiples of 1 / GRID before a shift, so that float64 holds their sums exactly."""


def axis_of(case: Case) -> int:
    """The axis that the operation reduces, counted from the front."""
    axis = case["axis"] if "axis" in case.table.keywords else -1
    return int(axis) % case["x"].ndim


def rows_of(array: Any, case: Case) -> np.ndarray:
    """An array like x with the reduced axis last; a result without that axis as it is."""
    array = np.asarray(array)
    return np.moveaxis(array, axis_of(case), -1) if array.ndim == case["x"].ndim else array


def with_rows(case: Case, rows: np.ndarray) -> Case:
    """The case with an x whose reduced axis is last in `rows`."""
    return case.with_arrays(x=np.moveaxis(rows, -1, axis_of(case)))


def length(case: Case) -> int:
    """Length of the reduced axis."""
    return int(case["x"].shape[axis_of(case)])


def measure_rows(subject: Subject, case: Case) -> Measured:
    """The result and its error budget, with the reduced axis last."""
    return measure(subject, case).rearranged(lambda array: rows_of(array, case))


def taken(case: Case, order: np.ndarray) -> Case:
    """The case with some entries of the reduced axis, in that order; weight and bias go with them."""
    arrays = {"x": case["x"].take(order, axis_of(case))}
    arrays |= {name: case[name].take(order) for name in ("weight", "bias") if case[name] is not None}
    return case.with_arrays(**arrays)


def shifted(case: Case, shift: float) -> tuple[Case, Case, np.ndarray]:
    """Two cases whose x differ by exactly `shift`, and the rows in which they do.

    A float of the shifted x is chosen first and the shift taken off it again, which is exact for
    nearly all values; the rows come as bool[…], without the reduced axis.
    """
    high = case.with_arrays(x=np.round(case["x"] * GRID) / GRID + shift)
    low = case.with_arrays(x=high["x"] - shift)
    exact = (low["x"] + shift == high["x"]) & ((np.abs(high["x"]) < GRID * 2**12) | (high["x"] == -np.inf))
    return low, high, exact.all(axis_of(case))


def with_other_rows_changed(case: Case) -> tuple[Case, np.ndarray]:
    """About half of the rows replaced by quite different ones, and which rows were left alone."""
    rows = rows_of(case["x"], case)
    kept = case.random(1).permutation(rows[..., 0].size).reshape(rows.shape[:-1]) % 2 == 0
    finite = np.where(rows == -np.inf, 0.0, rows)
    return with_rows(case, np.where(kept[..., None], rows, 3 - 2 * finite[..., ::-1])), kept


def expect_unmoved(subject: Subject, before: Case, after: Case, kept: np.ndarray) -> None:
    """The kept rows of both results are the same bits, or agree where leak="rounding" is declared."""
    one, other = (measure_rows(subject, case)[kept] for case in (before, after))
    if subject.capabilities.leak == "exact":
        expect_same(other.value, one.value)
    else:
        expect_equal(other, one)


def total_budget(n: Any, precision: Precision) -> Any:
    """How far n computed probabilities may sum from 1; n is a number or an array.

        (g(n) + 2 C) u_acc + e log n + [unfused] C u_mid + u_out + n (eta + [unfused] eta_mid)

    An error that is common to a row cancels in e_i / Σ e_j: the maximum, the temperature, the sum's own
    use of the same terms. What stays: summation, division and the result's rounding; and, for terms that
    the sum saw with an earlier maximum, their own exponential and the rounding of t_i, which counts
    Σ p_i |t_i|. That is the entropy less log Σ exp(t_j), so at most log n whatever the logits are.
    """
    p = precision
    underflow = p.eta + (p.eta_mid if p.unfused else 0.0)
    return (p.g(n) + 2 * C) * p.u_acc + p.e * np.log(n) + C * p.u_store + p.u_out + n * underflow


def uneven(case: Case) -> np.ndarray:
    """A cotangent of the first result in which neighbours always differ; for ones softmax has the gradient 0."""
    shape = shapes(case)[0]
    return case.random(2).integers(1, 6, shape) + np.indices(shape).sum(0) % 2 / 2
