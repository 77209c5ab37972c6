"""Softmax, its logarithm and its normaliser.

Conventions:
- An entry of -inf is absent: its probability is exactly 0, and no gradient reaches it.
- A row whose entries are all absent is empty: softmax gives 0 there, the logarithms give -inf.
- The largest entry is subtracted before exp. On paper that changes nothing; in floats it keeps exp
  from overflowing.
- NaN or +inf in a row makes the row NaN (and NumPy warns at +inf).
"""

from __future__ import annotations

import math
from typing import Any

from array_api_compat import array_namespace


def softmax(x: Any, *, axis: int = -1, temperature: float = 1.0) -> Any:
    """Probabilities proportional to exp(x / T).

    x[…, n, …] -> p, like x; p sums to 1 over `axis`.

        p_i = exp(x_i / T) / sum_j exp(x_j / T)

    Source: Hinton, Vinyals, Dean 2015 (Distilling the Knowledge in a Neural Network), section 2.
    Edges: p is 0 at x = -inf and on an empty row; T = 0 is the limit, equal shares for the largest.
    Raises ValueError if T is negative, NaN or infinite.
    """
    if not 0 <= temperature < math.inf:
        raise ValueError(f"softmax: temperature: got {temperature}, wanted a finite number >= 0")
    xp = array_namespace(x)
    e, _ = _exponentials(x, axis, temperature)
    total = xp.sum(e, axis=axis, keepdims=True)
    return e / _one_for_zero(total)


def log_softmax(x: Any, *, axis: int = -1) -> Any:
    """Logarithms of the softmax probabilities, finite even where a probability underflows.

    x[…, n, …] -> log p, like x.

        log p_i = x_i - max(x) - log sum_j exp(x_j - max(x))

    Source: logarithm of `softmax`; the form is the one of Blanchard, Higham, Higham 2021
    (Accurately computing the log-sum-exp and softmax functions), section 3.
    Edges: -inf, with gradient 0, at x = -inf and on an empty row.
    """
    xp = array_namespace(x)
    e, peak = _exponentials(x, axis)
    total = xp.sum(e, axis=axis, keepdims=True)
    absent = x == -math.inf
    gap = xp.where(absent, peak, x) - peak
    return xp.where(absent, -math.inf, gap - xp.log(_one_for_zero(total)))


def logsumexp(x: Any, *, axis: int = -1) -> Any:
    """Logarithm of the summed exponentials.

    x[…, n, …] -> lse[…, …], without `axis`.

        lse = max(x) + log sum_j exp(x_j - max(x))

    Source: Blanchard, Higham, Higham 2021, section 3; its gradient is softmax(x).
    Edges: -inf, with gradient 0, on an empty row.
    """
    xp = array_namespace(x)
    e, peak = _exponentials(x, axis)
    total = xp.sum(e, axis=axis, keepdims=True)
    lse = xp.where(total == 0, -math.inf, peak + xp.log(_one_for_zero(total)))
    return xp.squeeze(lse, axis=axis)


def _exponentials(x: Any, axis: int, temperature: float = 1.0) -> tuple[Any, Any]:
    """exp((x - peak) / T), exactly 0 at -inf, and the peak of each row with `axis` kept.

    At T = 0 only the entries equal to the peak are left, each with exp(0).
    """
    xp = array_namespace(x)
    peak = _peak(x, axis)
    # exp(-750) is 0 in every format. Such entries are selected away first, so that neither x - peak nor
    # the division by T overflows (T < 1e305); halves are compared because their difference never does.
    far = x / 2 - peak / 2 < -375 * temperature
    gap = xp.where(far, peak, x) - peak
    return xp.where(far, 0.0, xp.exp(gap / (temperature or 1.0))), peak


def _peak(x: Any, axis: int) -> Any:
    """The largest entry along `axis`, which is kept; 0 on an empty row, so that it can be subtracted."""
    xp = array_namespace(x)
    if x.shape[axis] == 0:
        return xp.sum(x, axis=axis, keepdims=True)
    peak = xp.max(x, axis=axis, keepdims=True)
    return xp.where(peak == -math.inf, 0.0, peak)


def _one_for_zero(total: Any) -> Any:
    """A divisor that is safe on an empty row, whose total is 0; every other total is at least 1."""
    return array_namespace(total).where(total == 0, 1.0, total)
