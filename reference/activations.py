"""Elementwise nonlinearities."""

from __future__ import annotations

import math
from typing import Any

from array_api_compat import array_namespace, device


def relu(x: Any) -> Any:
    """The positive part of each entry.

    x[…] -> y, like x.

        y = max(x, 0)

    Source: Vaswani et al. 2017 (Attention Is All You Need), section 3.3.
    Edges: the gradient at 0 is 0; NaN stays NaN.
    """
    return array_namespace(x).where(x <= 0, 0.0, x)


def gelu(x: Any, *, form: str = "erf") -> Any:
    """Each entry times the probability that a standard normal number lies below it.

    x[…] -> y, like x.

        erf:   y = x/2 (1 + erf(x / sqrt(2)))
        tanh:  y = x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))

    The forms differ by at most 4.8e-4.
    Source: Hendrycks, Gimpel 2016 (Gaussian Error Linear Units), section 2.
    Edges: far out the limits, 0 and x, are reached exactly; -inf itself gives NaN (infinity times 0), and
    beyond 1e102 the cube overflows, which changes nothing (NumPy warns in both cases).
    Raises ValueError for an unknown form.
    """
    if form not in ("erf", "tanh"):
        raise ValueError(f"gelu: form: got {form!r}, wanted 'erf' or 'tanh'")
    if form == "erf":
        return x / 2 * (1 + _erf(x / math.sqrt(2)))
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
    return x / 2 * (1 + array_namespace(x).tanh(inner))


def _erf(x: Any) -> Any:
    """The error function: the framework's own where it has one (the standard has none), else number by number."""
    xp = array_namespace(x)
    if hasattr(xp, "erf"):
        return xp.erf(x)
    flat = xp.reshape(x, (-1,))
    numbers = [math.erf(float(flat[i])) for i in range(flat.shape[0])]
    return xp.reshape(xp.asarray(numbers, dtype=x.dtype, device=device(x)), x.shape)
