"""Normalisation over the last axis, one token at a time."""

from __future__ import annotations

import math
from typing import Any

from array_api_compat import array_namespace


def layer_norm(
    x: Any, weight: Any, bias: Any, *, eps: float = 1e-5, epsilon: str = "inside", variance: str = "biased"
) -> Any:
    """Each row brought to mean 0 and variance about 1, then scaled and shifted channel by channel.

    x[…, d], weight[d], bias[d] -> y, like x.

        mu = mean(x),   v = mean((x - mu)^2),   y = weight (x - mu) / sqrt(v + eps) + bias

    epsilon: "inside" is the root above, "outside" divides by sqrt(v) + eps.
    variance: "biased" is the mean above, "unbiased" divides the sum of squares by d - 1.
    Source: Ba, Kiros, Hinton 2016 (Layer Normalization), section 3; eps as in P19, inside.
    Edges: y = bias where v = 0, also at eps = 0 (0/0 counts as 0), and so at d = 1; there the
    unbiased variance, 0/0, is defined as 0.
    Raises ValueError for an unknown dialect, a negative eps, or a weight or bias that is not [d].
    """
    if epsilon not in ("inside", "outside"):
        raise ValueError(f"layer_norm: epsilon: got {epsilon!r}, wanted 'inside' or 'outside'")
    if variance not in ("biased", "unbiased"):
        raise ValueError(f"layer_norm: variance: got {variance!r}, wanted 'biased' or 'unbiased'")
    _check("layer_norm", x, eps, weight=weight, bias=bias)
    xp = array_namespace(x)
    centred = x - xp.mean(x, axis=-1, keepdims=True)
    v = _variance(centred, variance)
    if eps == 0:
        # The mean of equal numbers need not round to them, and 0/0 must not become noise/noise.
        flat = (v == 0) | xp.all(x == x[..., :1], axis=-1, keepdims=True)
        centred, v = xp.where(flat, 0.0, centred), xp.where(flat, 1.0, v)
    root = xp.sqrt(v + eps) if epsilon == "inside" else _sqrt(v) + eps
    return weight * (centred / root) + bias


def rms_norm(x: Any, weight: Any, *, eps: float = 1e-6, weight_form: str = "plain") -> Any:
    """Each row divided by its root mean square, then scaled channel by channel; the mean stays where it is.

    x[…, d], weight[d] -> y, like x.

        y = weight x / sqrt(mean(x^2) + eps)

    weight_form: "plain" is the weight above, "one_plus" scales by 1 + weight.
    Source: Zhang, Sennrich 2019 (Root Mean Square Layer Normalization), section 4; 1 + weight as in
    the Gemma report 2024; P22, P24, P25.
    Edges: y = 0 on a row of zeros, also at eps = 0 (0/0 counts as 0).
    Raises ValueError for an unknown weight_form, a negative eps, or a weight that is not [d].
    """
    if weight_form not in ("plain", "one_plus"):
        raise ValueError(f"rms_norm: weight_form: got {weight_form!r}, wanted 'plain' or 'one_plus'")
    _check("rms_norm", x, eps, weight=weight)
    xp = array_namespace(x)
    square = xp.mean(x * x, axis=-1, keepdims=True)
    if eps == 0:
        x, square = xp.where(square == 0, 0.0, x), xp.where(square == 0, 1.0, square)
    return (weight if weight_form == "plain" else 1 + weight) * (x / xp.sqrt(square + eps))


def _variance(centred: Any, variance: str) -> Any:
    """The mean square of a centred row; unbiased, its sum of squares over d - 1. The axis is kept."""
    xp = array_namespace(centred)
    width = centred.shape[-1]
    count = width if variance == "biased" else max(width - 1, 1)
    return xp.sum(centred * centred, axis=-1, keepdims=True) / count


def _sqrt(v: Any) -> Any:
    """The square root, with gradient 0 at 0 instead of an infinite one."""
    xp = array_namespace(v)
    return xp.where(v == 0, 0.0, xp.sqrt(xp.where(v == 0, 1.0, v)))


def _check(operation: str, x: Any, eps: float, **channels: Any) -> None:
    """ValueError for what would broadcast or branch into a wrong answer without a word."""
    if not 0 <= eps < math.inf:
        raise ValueError(f"{operation}: eps: got {eps}, wanted a finite number >= 0")
    width = x.shape[-1]
    if width == 0:
        raise ValueError(f"{operation}: x: got shape {tuple(x.shape)}, wanted a last axis of at least 1")
    for name, array in channels.items():
        if tuple(array.shape) != (width,):
            raise ValueError(
                f"{operation}: {name}: got shape {tuple(array.shape)}, wanted ({width},) as in x's last axis"
            )
