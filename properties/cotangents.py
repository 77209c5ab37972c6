"""Cotangents for laws of gradients: uneven, one-hot, partly zero, constant."""

from __future__ import annotations

import numpy as np

from veriformer.case import Case
from veriformer.oracle import shapes

KINDS = ("integers", "one_hot", "normal", "first_row_zero", "constant")


def cotangent_of(case: Case, pick: int) -> np.ndarray:
    """A cotangent of the first result, of a kind that pick chooses; small numbers, most of them whole.

    Uniform ones would hide mistakes in single rows: the gradient of softmax vanishes for them.
    """
    shape, rng = shapes(case)[0], case.random(pick)
    kind = KINDS[pick % len(KINDS)]
    values = rng.integers(-3, 4, shape).astype(float)
    if kind == "normal":
        return rng.standard_normal(shape)
    if kind == "constant":
        return np.full(shape, float(rng.choice([1.0, -2.0, 3.0])))
    if kind == "one_hot":
        values = np.zeros(shape)
        if values.size:
            values.flat[rng.integers(values.size)] = float(rng.choice([1.0, -2.0]))
    if kind == "first_row_zero" and values.ndim > 1:
        values[(0,) * (values.ndim - 1)] = 0.0
    return values


def differentiable(case: Case) -> tuple[str, ...]:
    """Names of the arrays of a case by which one differentiates."""
    return tuple(name for name in case.table.differentiable if name in case.arrays)
