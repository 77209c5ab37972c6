"""Dropout whose random numbers are given, so that results can be compared exactly."""

from __future__ import annotations

from typing import Any

from array_api_compat import array_namespace


def dropout(x: Any, *, rate: float, uniform: Any) -> Any:
    """Entries dropped with probability `rate`, the others enlarged so that the mean stays.

    x[…], uniform[…] in [0, 1) -> y, like x.

        y = x / (1 - rate) where uniform >= rate, else 0

    Source: Srivastava et al. 2014 (Dropout), section 10; P125.
    Edges: rate 0 gives x itself, rate 1 gives 0; what a dropped entry holds does not matter.
    Raises ValueError for a rate outside [0, 1] or a uniform that is not like x.
    """
    if not 0 <= rate <= 1:
        raise ValueError(f"dropout: rate: got {rate}, wanted a number from 0 to 1")
    if tuple(uniform.shape) != tuple(x.shape):
        raise ValueError(
            f"dropout: uniform: got shape {tuple(uniform.shape)}, wanted {tuple(x.shape)}, a number for each entry of x"
        )
    xp = array_namespace(x)
    return xp.where(uniform >= rate, x / ((1 - rate) or 1.0), 0.0)
