"""What the rows of a layer norm with weight 1 and bias 0 are known to have: their mean and variance, with errors."""

from __future__ import annotations

import numpy as np

from veriformer.budgets import Bound
from veriformer.case import Case
from veriformer.declarations import Capabilities


def is_plain(case: Case) -> bool:
    """Whether weight is 1 and bias 0, so that the rows of the result have known statistics."""
    return bool((case["weight"] == 1).all() and (case["bias"] == 0).all())


def deviation(variance: np.ndarray, width: int, eps: float, capabilities: Capabilities) -> np.ndarray:
    """What a row of that biased variance is divided by, in the declared dialect."""
    if capabilities.norm_variance == "unbiased":
        variance = variance * width / max(width - 1, 1)
    return np.sqrt(variance + eps) if capabilities.norm_epsilon == "inside" else np.sqrt(variance) + eps


def exact_variance(case: Case, capabilities: Capabilities) -> np.ndarray:
    """The biased variance that each output row has: v / (v + eps), or its like in the declared dialect."""
    x = case["x"]
    variance = x.var(-1)
    return variance / deviation(variance, x.shape[-1], case["eps"], capabilities) ** 2


def mean_error(bound: Bound) -> np.ndarray:
    """How far the mean of each output row may be from 0.

    A wrong deviation scales the row and leaves its mean at 0; every other error may point the same way.
    """
    own = sum(np.broadcast_to(term, bound.value.shape) for name, term in bound.terms.items() if name != "variance")
    return np.where(np.isfinite(bound.allowed), own, np.inf).mean(-1)


def variance_error(bound: Bound) -> np.ndarray:
    """How far the variance of each output row may be off: 2 mean |z d| + mean d² for errors d of z.

    An error of the mean that is common to the row would cancel. It counts all the same: x r - mean r, with
    the product rounded, errs by as much in each entry by itself.
    """
    error = bound.allowed
    return (2 * np.abs(bound.value) * error + error * error).mean(-1)
