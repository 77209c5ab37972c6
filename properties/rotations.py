"""Products and pairs of measured values: what the laws of sinusoids and of the rotary embedding have in common."""

from __future__ import annotations

from typing import Any

import numpy as np

from veriformer.declarations import Capabilities
from veriformer.properties.measured import Measured

ROUNDOFF = 2.0**-53
"""Of the float64 in which laws add up what they measured."""


def product_with(one: Measured, other: Measured) -> Measured:
    """The products of two results, element by element: |a| db + |b| da + da db."""
    a, b = one.allowed, other.allowed
    return Measured(one.value * other.value, np.abs(one.value) * b + np.abs(other.value) * a + a * b)


def squares(one: Measured, other: Measured) -> Measured:
    """The sum of both squares."""
    one, other = product_with(one, one), product_with(other, other)
    return Measured(one.value + other.value, one.allowed + other.allowed)


def products(rows: Measured) -> Measured:
    """The products of all rows with one another: [..., n, d] -> [..., n, n].

    Each may be off by sum |a| db + |b| da + da db, and by the summation here, d roundings of sum |a b|.
    """
    size, error = np.abs(rows.value), rows.allowed
    one_sided = size @ error.swapaxes(-1, -2)
    summed = size.shape[-1] * ROUNDOFF * (size @ size.swapaxes(-1, -2))
    allowed = one_sided + one_sided.swapaxes(-1, -2) + error @ error.swapaxes(-1, -2) + summed
    return Measured(rows.value @ rows.value.swapaxes(-1, -2), allowed)


def angles(sine: Measured, cosine: Measured) -> Measured:
    """The angles of points, in (-pi, pi].

    With errors ds and dc, (s, c) moves by at most |c| ds + |s| dc across its radius and |s| ds + |c| dc along
    it, both times the radius r: it is seen at most atan(across / (r^2 - along)) beside where it is.
    """
    s, c, ds, dc = sine.value, cosine.value, sine.allowed, cosine.allowed
    across, along, size = np.abs(c) * ds + np.abs(s) * dc, np.abs(s) * ds + np.abs(c) * dc, s * s + c * c
    return Measured(np.arctan2(s, c), np.where(along < size, np.arctan2(across, size - along), np.inf))


def members(array: Any, capabilities: Capabilities) -> tuple[Any, Any]:
    """The first and the second channels of the pairs that are turned together, [..., D/2] each."""
    if capabilities.rotary_pairs == "interleaved":
        return array[..., 0::2], array[..., 1::2]
    half = (array.value if isinstance(array, Measured) else array).shape[-1] // 2
    return array[..., :half], array[..., half:]


def joined(first: np.ndarray, second: np.ndarray, capabilities: Capabilities) -> np.ndarray:
    """The inverse of `members`."""
    if capabilities.rotary_pairs == "interleaved":
        return np.stack([first, second], axis=-1).reshape(*first.shape[:-1], -1)
    return np.concatenate([first, second], axis=-1)


def mirrored(array: np.ndarray, capabilities: Capabilities) -> np.ndarray:
    """The members of every pair exchanged, which turns a rotation into its inverse."""
    first, second = members(array, capabilities)
    return joined(second, first, capabilities)


def turned_error(error: np.ndarray, capabilities: Capabilities) -> np.ndarray:
    """How far a turn by any angle may carry an error of its input: the length of the pair's error, in both members."""
    length = np.hypot(*members(error, capabilities))
    return joined(length, length, capabilities)


def angles_between(x: np.ndarray, turned: Measured, capabilities: Capabilities) -> Measured:
    """The angles from the pairs of x, which count as exact, to the turned ones: [..., D] -> [..., D/2].

    (a, b) and (y, z) enclose the angle of (a z - b y, a y + b z), here over a^2 + b^2.
    """
    (a, b), (y, z) = members(x, capabilities), members(turned, capabilities)
    size = a * a + b * b
    a, b = a / np.where(size == 0, 1.0, size), b / np.where(size == 0, 1.0, size)
    sine = Measured(a * z.value - b * y.value, np.abs(a) * z.allowed + np.abs(b) * y.allowed)
    cosine = Measured(a * y.value + b * z.value, np.abs(a) * y.allowed + np.abs(b) * z.allowed)
    return angles(sine, cosine)
