"""Algorithms that compute a softmax or a norm otherwise than the reference's lines, recognised from outside.

A value carries a role that says how it came about; operations look at the roles of what they take up.
So nothing in the reference has to know of budgets, and a layer is treated like its parts.

    Gap          x - y                       Mean         mean(x) over the last axis
    Exponential  e = exp(Gap)                Centred      c = x - mean(x)
    Total        Σ e                         Square       c², their sums and means, plus eps
    Weights      p = e / Σ e                 Deviation    s = sqrt(Square)
    Peak         max(x)                      Normed       z = c / s, and z / s

Admitted, because kernels in use do it:
- Weights are stored in p.u_probability before they meet the values, and so are gradients of logits.
- With p.recomputes_probabilities the backward finds e (1 + u (|x| + |lse|) + error of x): weights formed once
  more as exp(s - lse), from scores s summed once more, so that they do not sum to 1. And D = Σ_j p_j dP_j,
  where dP_j = Σ_c dO_c v_jc, may be summed the other way round, as rowsum(dO O) from a stored O: all the
  |dO| |v| count.
- With p.saved_statistics the backward finds mean and deviation (of softmax: lse) rounded once more.
- z may be formed as x scale + shift, with shift = -mean / s; Σ g z as Σ g x - mean Σ g; and mean(c), which
  is only 0 up to rounding, may be left out of the gradient of the mean.

A peak that is subtracted has no influence, yet in the reference a gradient passes through it, which sums
the errors of all logits and takes them away from the largest one. No kernel does that: there the versions
stay exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from veriformer.budgets.precision import C
from veriformer.budgets.replicas import Replicas, Rows

if TYPE_CHECKING:
    from veriformer.budgets.rounding import Rounding


@dataclass(eq=False)
class Peak:
    subtracted: bool = False


@dataclass(eq=False)
class Gap:
    x: Rows
    y: Rows
    scale: float
    again: Rows | None
    peak: Peak | None


class Exponential: ...


@dataclass(eq=False)
class Total:
    of: Exponential


@dataclass(eq=False)
class Weights:
    of: Exponential


class Places:
    """Where the peak is: in the backward, where its gradient goes."""


@dataclass(eq=False)
class Mean:
    of: Rows
    error: Rows


@dataclass(eq=False)
class Centred:
    mean: Rows
    error: Rows


class Square: ...


class Deviation: ...


@dataclass(eq=False)
class Normed:
    mass: Rows


@dataclass(eq=False)
class Share:
    """A product whose mass counts in a sum (last_axis: in one over the last axis), and once more in this unit."""

    unit: float
    last_axis: bool


def scaled(made: Replicas, x: Replicas, factor: float) -> None:
    """made = factor x, for a number."""
    made.again = None if x.again is None else x.again * abs(factor)
    if isinstance(x.role, Square):
        made.role = x.role
    elif isinstance(x.role, Gap):
        made.role = replace(x.role, scale=x.role.scale * abs(factor))


def shifted(made: Replicas, x: Replicas, number: float) -> None:
    """made = x + number."""
    if isinstance(x.role, (Square, Deviation)):
        made.role, made.later = x.role, None if x.later is None else x.later + number


def difference(mode: Rounding, made: Replicas, x: Replicas, y: Replicas) -> None:
    """made = x - y."""
    if isinstance(y.role, Mean) and y.role.of is x.rows:
        size = y.rows[:1].abs()
        made.role = Centred(size, y.role.error + size * mode.p.u_statistics)
        made.later = _saved(mode, made.rows, y.rows[:1])
    else:
        made.role = Gap(x.rows[:1], y.rows[:1], 1.0, x.again, y.role if isinstance(y.role, Peak) else None)


def product(mode: Rounding, made: Replicas, a: Replicas, b: Replicas) -> None:
    """made = a b."""
    if a is b:
        made.role = Square()
    elif mode.backward:
        for x, part in ((a, b), (b, a)):
            _gradient(mode, made, x, part)


def _gradient(mode: Rounding, made: Replicas, x: Replicas, part: Replicas) -> None:
    """made = x part in the backward, part from the forward."""
    if isinstance(part.role, Exponential):
        p = mode.p
        made.due.store, made.due.tiny, made.due.bounded = p.u_probability, p.eta_probability, True
    elif isinstance(part.role, Weights) and mode.p.recomputes_probabilities and x.mass is not None:
        unit = mode.p.u_out + mode.p.g(x.terms) * mode.p.u_acc
        made.mass, made.role = x.mass * part.rows[:1].abs(), Share(unit, False)
        if made.shape[-1:] == (1,):
            # a single key: there will be no sum
            made.due.own = made.mass[0] * (unit + mode.p.u_acc)
    elif isinstance(part.role, Normed):
        made.mass, made.role = x.rows[:1].abs() * part.role.mass, Share(0.0, True)
    elif isinstance(part.role, Centred):
        made.excess = (x.rows[:1].abs() * part.role.error).expand_as(made.rows[:1])


def quotient(mode: Rounding, made: Replicas, a: Replicas, b: Replicas) -> None:
    """made = a / b."""
    if isinstance(b.role, Total) and isinstance(a.role, (Exponential, Weights)):
        of = a.role if isinstance(a.role, Exponential) else a.role.of
        if of is b.role.of:
            _weights(mode, made, a, b)
            made.role = Weights(of)
    elif isinstance(b.role, Deviation) and isinstance(a.role, Centred):
        _normed(mode, made, a, b)
    elif isinstance(b.role, Deviation) and isinstance(a.role, Normed):
        made.role = Normed(a.role.mass / b.rows[:1])


def _weights(mode: Rounding, made: Replicas, e: Replicas, of: Replicas) -> None:
    """made = e / Σ e. Undetermined where errors move half of the weights of a row to other keys."""
    made.due.store, made.due.tiny = mode.p.u_probability, mode.p.eta_probability
    made.later = None if e.later is None else e.later / of.rows
    if len(made.rows) > 1:
        moved = (made.rows[1:] - made.rows[:1]).abs().sum_to_size(len(made.rows) - 1, *of.rows.shape[1:])
        lost = (moved > 1).any(0)
        made.rows = undetermined(made.rows, lost)
        made.later = None if made.later is None else undetermined(made.later, lost)


def _normed(mode: Rounding, made: Replicas, c: Replicas, s: Replicas) -> None:
    """made = c / s. Undetermined where the errors of c are as large as half of s."""
    mass = (c.rows[:1].abs() + c.role.mean) / s.rows[:1]
    made.role, made.due.own = Normed(mass), (made.rows[0].abs() + mass[0]) * mode.p.u_acc
    if c.later is not None:
        made.later = c.later / (s.rows if s.later is None else s.later)
    if len(c.rows) > 1:
        moved = ((c.rows[1:] - c.rows[:1]) ** 2).mean(0).mean(-1, keepdim=True)
        lost = moved > (s.rows[0] / 2) ** 2
        made.rows = undetermined(made.rows, lost)
        made.later = None if made.later is None else undetermined(made.later, lost)


def exponential(mode: Rounding, made: Replicas, x: Replicas) -> None:
    """made = exp(x). Undetermined in the backward where exp(x - lse) loses half of its digits' worth.

    A temperature may divide before the peak is subtracted, which rounds x and the peak by themselves.
    """
    made.role = Exponential()
    if not isinstance(x.role, Gap) or mode.backward:
        return
    if math.frexp(x.role.scale)[0] != 0.5:
        size = (x.role.x[0].abs() + x.role.y[0].abs()) * x.role.scale
        made.rows = made.rows * torch.exp(mode.shifts(made.rows[0], torch.nan_to_num(size, posinf=0.0) * mode.p.u_mid))
    if x.role.peak is not None:
        x.role.peak.subtracted = True
    if mode.p.recomputes_probabilities:
        size, peak = (torch.nan_to_num(rows[0].abs() * x.role.scale, posinf=0.0) for rows in (x.role.x, x.role.y))
        lse = peak + math.log(max(size.numel() / max(peak.numel(), 1), 1.0))
        amplitude = (size + lse + C) * mode.p.u_acc
        if x.role.again is not None:
            amplitude = amplitude + x.role.again[0] * x.role.scale
        own = mode.shifts(made.rows[0], amplitude)
        row = mode.shifts(peak, lse * max(mode.p.u_acc, mode.p.u_statistics))
        made.later = undetermined(made.rows * torch.exp(own + row), amplitude > 0.5)


def root(mode: Rounding, made: Replicas, x: Replicas) -> None:
    """made = sqrt(x)."""
    if isinstance(x.role, Square):
        made.role = Deviation()
        made.later = _saved(mode, made.rows, made.rows[:1])


def places(x: Any) -> Places | None:
    """The role of y == x in the backward, where the gradient of a peak is spread over its places."""
    return Places() if isinstance(x, Replicas) and isinstance(x.role, Peak) and x.role.subtracted else None


def peak_gradient(mode: Rounding, rows: Rows) -> Rows:
    """The gradient of a subtracted peak: 0, or the reference's own rounding, which counts in float64.

    It is then that of another version, of the same size but independent of the errors it sums.
    """
    if mode.p.storage != "float64" or len(rows) == 1:
        return rows[:1]
    return torch.cat([rows[:1], rows[1:].roll(1, 0)])


def total(mode: Rounding, made: Replicas, x: Replicas, sizes: Rows) -> None:
    """made = sum of x; sizes: the sum of |x|. Its own rounding is due."""
    if isinstance(x.role, Exponential):
        made.role = Total(x.role)
    elif isinstance(x.role, Square):
        made.role = x.role
    if mode.backward:
        made.mass, made.terms = sizes, x.numel() // max(made.numel(), 1)
    else:
        made.again = torch.as_tensor(made.due.own)[None]


def mean(mode: Rounding, made: Replicas, x: Replicas) -> None:
    """made = mean of x; its own rounding is due."""
    made.role = x.role if isinstance(x.role, Square) else Mean(x.rows, torch.as_tensor(made.due.own))


def undetermined(rows: Rows, where: Rows) -> Rows:
    """The same with NaN in the last version where errors decide the value; what follows from it becomes NaN too."""
    if not bool(where.any()):
        return rows
    return torch.cat([rows[:-1], torch.where(where, math.nan, rows[-1])[None]])


def _saved(mode: Rounding, rows: Rows, size: Rows) -> Rows | None:
    """Rows that are off by one rounding of a statistic of this size, where statistics are saved coarsely."""
    unit = mode.p.u_statistics
    return rows + mode.shifts(size[0], size[0].abs() * unit) if unit and not mode.backward else None
