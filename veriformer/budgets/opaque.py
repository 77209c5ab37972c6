"""Error budget of models whose weights nobody maps: two evaluations that are equal by law may differ by this much.

The constants are preliminary.
"""

from __future__ import annotations

import numpy as np

from veriformer.budgets.bound import Array

UNIT = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Unit roundoff of the dtype that the model computes in."""

UNITS = {"float64": 4096.0, "float32": 256.0, "float16": 32.0, "bfloat16": 32.0}
"""Unit roundoffs of the largest |logit| that are allowed whatever the noise."""

NOISE = 8.0
"""How many times the noise of equal evaluations is allowed beside that."""


def opaque_allowance(logits: Array, dtype: str, noise: float = 0.0) -> Array:
    """How far the logits of two evaluations that are equal by law may lie apart, element by element.

    logits[…,V] of the evaluation that does not use the feature under test, noise: the largest difference among
    evaluations that are equal by law and do not use it either -> allowance, like logits.

        A = max(UNITS[dtype] u max|logits|, NOISE noise)

    Source: measured.
    Edges: no logits, no allowance; noise that is not finite allows everything; logits that are not finite have no
    part in the maximum.
    Raises ValueError for an unknown dtype, and for negative noise.
    """
    if dtype not in UNIT:
        raise ValueError(f"opaque_allowance: dtype: got {dtype!r}, wanted one of {', '.join(UNIT)}")
    if noise < 0:
        raise ValueError(f"opaque_allowance: noise: got {noise}, wanted a difference >= 0")
    if not np.isfinite(noise):
        return np.full(np.shape(logits), np.inf)
    size = np.abs(np.where(np.isfinite(logits), logits, 0.0)).max(initial=0.0)
    return np.full(np.shape(logits), max(UNITS[dtype] * UNIT[dtype] * float(size), NOISE * float(noise)))
