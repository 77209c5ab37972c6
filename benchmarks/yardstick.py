"""The yardstick: a frozen piece of work whose time is the unit of every cost.

A cost is the time of a call divided by the time of the yardstick, both taken in turn in one process, so that it
hardly depends on the machine or on what else that does. Frozen: changing a line here makes all earlier costs
incomparable (tests/test_benchmarks.py holds its digest). It is no reference and judges nothing.
"""

from __future__ import annotations

import numpy as np

SIZE = 160
_RNG = np.random.default_rng(2017)
A, B = (_RNG.standard_normal((SIZE, SIZE), dtype=np.float32) for _ in range(2))


def yardstick() -> np.ndarray:
    """Softmax over the rows of a product of two matrices, float32[160,160]: some arithmetic, some exp, some memory."""
    scores = A @ B
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    found: np.ndarray = weights / weights.sum(-1, keepdims=True)
    return found
