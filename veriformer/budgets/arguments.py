"""What a rounding rule asks of the arguments of an operation."""

from __future__ import annotations

import math
from typing import Any

import torch

from veriformer.budgets.precision import C
from veriformer.budgets.replicas import Replicas, Rows


def has_versions(args: Any) -> bool:
    """Whether a list of arguments, or a list in it, holds a Replicas."""
    return isinstance(args, (tuple, list)) and any(isinstance(a, Replicas) or has_versions(a) for a in args)


def has_floats(args: Any) -> bool:
    """Whether any argument is an array of floating-point numbers."""
    return any(isinstance(a, torch.Tensor) and a.dtype.is_floating_point for a in args)


def lifted(a: Any) -> Any:
    """An array that the function made itself, as a Replicas of one version."""
    return Replicas(a[None]) if isinstance(a, torch.Tensor) and not isinstance(a, Replicas) else a


def chosen(condition: Any, a: Rows | None, b: Rows | None) -> Rows | None:
    """What where makes of something known of its branches, in the exact version."""
    if a is None and b is None:
        return None
    where = condition.rows[:1] if isinstance(condition, Replicas) else condition
    return torch.where(where, 0.0 if a is None else a, 0.0 if b is None else b)


def either(*parts: Rows | None) -> Rows | None:
    """The sum of those that are there."""
    there = [part for part in parts if part is not None]
    return sum(there[1:], there[0]) if there else None


def power_of_two(number: float) -> bool:
    """Whether a product with this number is exact."""
    return number != 0 and math.isfinite(number) and abs(math.frexp(number)[0]) == 0.5


def table_rounding(args: Any) -> float:
    """The rounding of a table of constants among the factors; whole numbers have none."""
    found = 0.0
    for a in args:
        if isinstance(a, torch.Tensor) and not isinstance(a, Replicas) and a.numel() and a.dtype.is_floating_point:
            if not bool((a == a.round()).all()):
                found = C + 2 * float(a[a != 0].abs().log().abs().max())
    return found


def over_last(x: Replicas, args: Any) -> bool:
    """Whether a sum runs over the last axis of x."""
    axes = args[1] if len(args) > 1 else None
    axes = [axes] if isinstance(axes, int) else axes
    return not axes or (x.ndim - 1) in [axis % x.ndim for axis in axes]
