"""Cotangents for laws of gradients, and gradients with the error that each may carry."""

from __future__ import annotations

from typing import Any

import numpy as np

from veriformer.case import Case, round_to
from veriformer.declarations import Capabilities
from veriformer.expect import expect, expect_within
from veriformer.oracle import shapes
from veriformer.properties.measured import Measured
from veriformer.subject import Subject

KINDS = ("integers", "one_hot", "normal", "first_row_zero", "constant")


def cotangent_of(case: Case, pick: int, result: int = 0) -> np.ndarray:
    """A cotangent of one result, of a kind that pick chooses; small numbers of the dtype, most of them whole.

    Uniform ones would hide mistakes in single rows: the gradient of softmax vanishes for them.
    """
    shape, rng = shapes(case)[result], case.random(pick)
    kind = KINDS[pick % len(KINDS)]
    values = rng.integers(-3, 4, shape).astype(float)
    if kind == "normal":
        return round_to(rng.standard_normal(shape), case.dtype)
    if kind == "constant":
        return np.full(shape, float(rng.choice([1.0, -2.0, 3.0])))
    if kind == "one_hot":
        values = np.zeros(shape)
        if values.size:
            values.flat[rng.integers(values.size)] = float(rng.choice([1.0, -2.0]))
    if kind == "first_row_zero" and values.ndim > 1:
        values[(0,) * (values.ndim - 1)] = 0.0
    return values


def differentiable(case: Case, capabilities: Capabilities | None = None) -> tuple[str, ...]:
    """Names of the arrays of a case by which one differentiates, less a bias where its gradient is not on offer."""
    names = [name for name in case.arrays if case.table.kind(name) == "float"]
    barred = capabilities is not None and not capabilities.bias_gradient
    return tuple(name for name in names if not (barred and name == "bias" and name in case.table.options))


def graded(subject: Subject, case: Case, names: tuple[str, ...], cotangent: Any) -> dict[str, Measured]:
    """Gradients by some arrays and their error budgets; one that does not exist is exactly 0.

    Where a gradient may leave the range of the dtype it is undetermined.
    """
    found, bounds = subject.gradients_with_bounds(case, names, cotangent)
    measured = {}
    for name in names:
        gradient, bound = found[name], bounds[name]
        if gradient is None:
            measured[name] = Measured(np.zeros(bound.value.shape), np.zeros(bound.value.shape))
        else:
            far = np.abs(bound.value) + bound.allowed >= subject.largest
            measured[name] = Measured(gradient, np.where(far, np.inf, bound.allowed))
    return measured


def expect_gradients(subject: Subject, case: Case, cotangent: Any) -> None:
    """The gradient by every array lies within the bound of the reference; without one, the reference's must be 0."""
    names = differentiable(case, subject.capabilities)
    found, bounds = subject.gradients_with_bounds(case, names, cotangent)
    for name in names:
        gradient, bound = found[name], bounds[name]
        if gradient is None:
            nothing = bool((np.abs(bound.value) <= bound.allowed).all())  # but for the reference's own rounding
            expect(nothing, "no gradient", f"no gradient reached {name}, and it is not 0 everywhere")
        else:
            expect_within(gradient, bound, largest=subject.largest, what=f"the gradient of {name} is")
