"""Inner products of a gradient, or of a result, with exact numbers: what the identities of Euler compare."""

from __future__ import annotations

from typing import Any

import numpy as np


def pairing(weights: Any, values: Any, allowed: Any, axis: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The sum of weights times values over one axis or all, and the error it may carry.

    weights: exact. allowed: the error of each value; one that is undetermined does not count where its weight is 0.
    """
    with np.errstate(all="ignore"):
        errors = np.where(np.equal(weights, 0), 0.0, np.abs(weights) * allowed)
    return np.asarray((weights * values).sum(axis)), np.asarray(errors.sum(axis))
