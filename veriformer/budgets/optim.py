"""Error budgets of a training step: AdamW, clipping by the global norm, Noam's schedule.

Admitted algorithms of adamw_step: averages as beta m + (1 - beta) g or m + (1 - beta) (g - m); the corrections
on the averages, or moved into the rate and into eps; new averages used before or after they are stored; decay
apart or together with the step. Not admitted: 1 - beta or a correction made of what is held in less
than the accumulator.
Admitted algorithms of clip_by_global_norm: the norm of all entries, or of the norms of all arrays, in any
order; a factor for all, 1 where nothing is to be clipped, or g / norm times max_norm. Not admitted: squares that
overflow.
Admitted algorithms of noam_schedule: powers in any order.

Notation: θ param, g grad, t step, c = 1 - beta^t, q = m/c1 / D, D = sqrt(v/c2) + eps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from veriformer import reference
from veriformer.budgets.bound import Array, Bound, added
from veriformer.budgets.precision import C, Precision


def adamw_step(
    param: Array,
    grad: Array,
    m: Array,
    v: Array,
    step: int,
    *,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decay: str = "decoupled",
    epsilon_place: str = "corrected",
    precision: Precision,
) -> tuple[Bound, Bound, Bound]:
    """Error budgets of adamw_step.

    param, grad, m, v of one shape -> a bound each for param, m and v.

        E_m = u_acc (beta1 (|m| + |g|) + C (|m| + (1 - beta1) |g|)) + (1 - beta1) E_g, and for v with g²
        E_q = (E_m/c1 + |q| E_D) / (D - E_D),   E_θ = lr E_q + C u_acc (lr |q| + |θ| if it decays)

    The first term is what a rounded beta makes of 1 - beta; of c it makes t u_acc beta^t / c. E_D is what ± E_v
    makes of the root. Here E_m and E_v count the storage of both, which may come before they are used.
    [unfused] adds u_mid for each value that may be stored between two steps: a product, a sum, g², root, D, q, and
    a factor such as 1 - lr weight_decay, which torch's foreach rounds to the dtype of what it multiplies.
    Source: derived; Kingma, Ba 2015 (Adam), algorithm 1.
    Edges: nothing is allowed where nothing moves. inf (undetermined) where D may be 0, and where g² or another
    value between two steps may overflow.
    """
    words = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay}
    about, p = _Step(step, **words, decay=decay, place=epsilon_place, p=precision), precision
    with np.errstate(all="ignore"):
        value = reference.adamw_step(param, grad, m, v, step, **words, decay=decay, epsilon_place=epsilon_place)
        penalty = weight_decay * param if decay == "coupled" else np.zeros_like(param)
        g = grad + penalty
        error = _gradient_error(g, penalty, p)
        first = _Average.of(m, g, error, beta1, p)
        second = _Average.of(v, g * g, _square_error(g, error, p), beta2, p)
        moved, lost = about.moved(param, value, first, second)
        over = g * g * (1 + p.e) >= p.largest_mid
        return (
            Bound(value[0], np.where(lost | over, np.inf, added(moved)), moved),
            _stored(value[1], first, np.abs(g) + np.abs(m) >= p.largest_mid, p),
            _stored(value[2], second, over, p),
        )


def clip_by_global_norm(
    grads: list[Array], *, max_norm: float, plus: float = 0.0, precision: Precision
) -> tuple[Bound, ...]:
    """Error budgets of clip_by_global_norm.

    grads: k arrays of n entries together -> a bound for each.

        E_norm = norm ((g(n) + C)/2 u_acc + C u_acc + [unfused] (7 + k)/2 u_mid), and what n squares lose by underflow
        E = |g| (how far min(1, max_norm / (norm + plus)) may be off) + C u_acc |value|

    Stored by the unfused computation: squares, norms of arrays and their squares, norm, norm + plus, factor.
    Source: derived; Higham 2002, section 3.1, for the sum.
    Edges: a factor of 1 may be found as max_norm / max_norm, which need not be 1; nothing is allowed for a gradient of
    0. inf (undetermined) where the norm itself may overflow.
    """
    values = reference.clip_by_global_norm(grads, max_norm=max_norm, plus=plus)
    entries = np.concatenate([np.reshape(g, -1) for g in grads]) if grads else np.zeros(0)
    with np.errstate(all="ignore"):
        factor = _Factor.of(entries, len(grads), max_norm, plus, precision)
        return tuple(factor.bound(g, value, precision) for g, value in zip(grads, values, strict=True))


def noam_schedule(step: int, *, width: int, warmup: int, precision: Precision) -> Bound:
    """Error budget of noam_schedule; storage is the dtype of the rate.

    -> value, allowed, both [].

        E = rate (3 C u_acc + [unfused] C u_mid), and what warmup^(-3/2) loses by underflow

    Source: derived; Vaswani et al. 2017 (Attention Is All You Need), section 5.3, for the rate.
    Edges: exactly 0 is demanded of step 0. inf (undetermined) where the dtype of a stored step does not reach it.
    """
    value, p = np.asarray(reference.noam_schedule(step, width=width, warmup=warmup)), precision
    underflow = p.eta_mid * (1 + step * width**-0.5) if p.unfused else 0.0
    terms = {
        "powers": np.asarray(3 * p.g(C) * p.u_acc * value),
        "storage": np.asarray(p.g(C) * p.u_store * value + (underflow if step else 0.0)),
        "output": np.asarray(p.u_out * value + (p.eta if step else 0.0)),
    }
    lost = p.unfused and max(step, width, warmup) >= p.largest_mid
    return Bound(value, np.asarray(np.inf) if lost else added(terms), terms)


@dataclass(frozen=True)
class _Average:
    """The error of beta old + (1 - beta) new before it is stored, by cause."""

    scalars: Array
    sums: Array
    given: Array

    @classmethod
    def of(cls, old: Array, new: Array, error: Array, beta: float, p: Precision) -> _Average:
        """error: that of `new`, besides what underflows."""
        size = np.abs(old) + (1 - beta) * np.abs(new)
        arithmetic = (p.g(C) * p.u_acc + 3 * p.u_store) * size + np.where(size == 0, 0.0, 3 * _underflow(p))
        return cls(p.u_acc * beta * (np.abs(old) + np.abs(new)), arithmetic, (1 - beta) * error)

    @property
    def error(self) -> Array:
        """All of it."""
        total: Array = self.scalars + self.sums + self.given
        return total

    def stored(self, value: Array, p: Precision) -> Array:
        """All of it, and that of storing the value."""
        total: Array = np.where(self.error == 0, 0.0, self.error + p.u_out * np.abs(value) + p.eta)
        return total


def _gradient_error(g: Array, penalty: Array, p: Precision) -> Array:
    """The error of grad + weight_decay θ; none without a penalty."""
    size = 2 * np.abs(penalty) + np.abs(g)
    error: Array = np.where(penalty == 0, 0.0, (p.u_acc + p.u_store) * size + _underflow(p))
    return error


def _square_error(g: Array, error: Array, p: Precision) -> Array:
    """The error of g², g having this one."""
    square = (2 * np.abs(g) + error) * error + (p.u_acc + p.u_store) * g * g
    total: Array = square + np.where(g == 0, 0.0, _underflow(p))
    return total


def _underflow(p: Precision) -> float:
    """What a value between two steps may lose by underflow."""
    return p.eta_mid if p.unfused else p.eta_acc


def _stored(value: Array, average: _Average, lost: Array, p: Precision) -> Bound:
    """The bound of an average that is returned."""
    terms = {"betas": average.scalars, "arithmetic": average.sums + average.given}
    terms["output"] = average.stored(value, p) - average.error
    return Bound(value, np.where(lost, np.inf, added(terms)), terms)


@dataclass(frozen=True)
class _Step:
    """The numbers of a step, and what roundings make of them."""

    step: int
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decay: str
    place: str
    p: Precision

    def correction(self, beta: float) -> tuple[Any, float]:
        """1 - beta^t and its relative error: t roundings of beta, and those of a power, seen from the difference."""
        power = beta**self.step
        return np.float64(1 - power), self.p.u_acc * ((self.step + C) * power / (1 - power) + C)

    def moved(
        self, param: Array, value: tuple[Array, Array, Array], first: _Average, second: _Average
    ) -> tuple[dict[str, Array], Array]:
        """The terms of param's error, and where nothing is known of param."""
        p, (c1, r1) = self.p, self.correction(self.beta1)
        deviation, off = self.deviation(value[2], second)
        least, mean, stored = deviation - off, value[1] / c1, first.stored(value[1], p)
        q = np.where(mean == 0, 0.0, mean / deviation)
        # lr m may underflow before it is divided by D sqrt(c2), where the corrections are in the rate
        small = least * np.sqrt(self.correction(self.beta2)[0])
        underflow = np.where(stored == 0, 0.0, _underflow(p) * (2 + 2 / small)) * (self.lr > 0)
        steps = self.lr * (p.g(C) * p.u_acc + 4 * p.u_store) * np.abs(q) + underflow
        terms = {
            "mean": self.lr * (stored / c1 + np.abs(mean) * (r1 + p.u_store)) / least,
            "root": self.lr * np.abs(q) * off / least,
            "arithmetic": steps + self.shrinking(param),
        }
        output = (p.u_out + p.u_acc) * np.abs(value[0]) + p.eta
        terms["output"] = np.where(added(terms) == 0, 0.0, output)
        size = np.maximum(np.maximum(np.abs(mean), np.abs(q)), value[2] / self.correction(self.beta2)[0])
        lost = ~(least > 0) | (size * (1 + p.e) >= p.largest_mid) | (value[2] * (1 + p.e) >= p.largest)
        return terms, lost

    def shrinking(self, param: Array) -> Array:
        """The error of param (1 - lr weight_decay); none without decay."""
        decays = self.lr * self.weight_decay if self.decay == "decoupled" else 0.0
        unit = self.p.g(C) * self.p.u_acc + self.p.u_store * (2 + 3 * decays) if decays else 0.0
        error: Array = unit * np.abs(param)
        return error

    def deviation(self, v: Array, average: _Average) -> tuple[Array, Array]:
        """D and its error: what the root makes of v ± E_v, and what comes after it."""
        p, (c2, r2) = self.p, self.correction(self.beta2)
        stored, value = average.stored(v, p), self.root(v, c2)
        off = np.maximum(self.root(v + stored, c2 * (1 - r2)) - value, value - self.root(v - stored, c2 * (1 + r2)))
        # eps itself never underflows where nothing is stored
        still = (v == 0) & (not p.unfused) & (self.eps >= p.eta_acc)
        underflow = np.where(still, 0.0, 2 * _underflow(p) / np.sqrt(c2))
        return value, off + (p.g(C) * p.u_acc + 4 * p.u_store) * value + underflow

    def root(self, square: Array, correction: Any) -> Array:
        """D of an average of squares and a correction; inf where the correction may be 0."""
        correction = np.maximum(correction, 0.0)
        scale = 1.0 if self.place == "corrected" else np.sqrt(correction)
        found: Array = np.sqrt(np.maximum(square, 0.0) / correction) + self.eps / scale
        return np.where(correction > 0, found, np.inf)


@dataclass(frozen=True)
class _Factor:
    """min(1, max_norm / (norm + plus)), between which numbers it may be found, and max_norm where it may be used."""

    value: float
    low: float
    high: float
    limit: float
    lost: bool

    @classmethod
    def of(cls, entries: Array, arrays: int, max_norm: float, plus: float, p: Precision) -> _Factor:
        peak = float(np.abs(entries).max(initial=0.0))
        if not peak:
            return cls(1.0, 1.0, 1.0, 0.0, False)
        norm = peak * float(np.sqrt(((entries / peak) ** 2).sum()))
        low, high = _norm_between(norm, entries.size, arrays, p)
        unit = p.g(C) * p.u_acc + 2 * p.u_store
        above, below = (low + plus) * (1 - unit), (high + plus) * (1 + unit)
        eta = _underflow(p)
        value, *ends = (min(1.0, max_norm / n) if n > 0 else 1.0 for n in (norm + plus, below + eta, above - eta))
        # 1 may be made as max_norm (1 / max_norm)
        least, most = (end * (1 + sign * unit) if end == 1 else end for end, sign in zip(ends, (-1, 1), strict=True))
        return cls(value, least, most, max_norm if ends[0] < 1 else 0.0, high + plus >= p.largest_mid)

    def bound(self, g: Array, value: Array, p: Precision) -> Bound:
        """The bound of one clipped gradient."""
        size, product = np.abs(g), np.abs(value)
        certain = self.value == self.low == self.high == 0
        error = max(self.high - self.value, self.value - self.low)
        underflow = p.eta_mid if p.unfused and not certain else 0.0
        # g may be divided by the norm first, and then be multiplied by the limit
        quotient = np.where(g == 0, 0.0, underflow * self.limit)
        terms = {
            "factor": size * (error + underflow) + quotient,
            "output": np.where(certain | (g == 0), 0.0, (p.u_out + p.u_acc) * product + p.eta),
        }
        return Bound(value, np.where(self.lost & (g != 0), np.inf, added(terms)), terms)


def _norm_between(norm: float, n: int, arrays: int, p: Precision) -> tuple[float, float]:
    """The smallest and the largest norm that may be found; a square that underflows becomes 0, or twice what it is."""
    unit = (p.g(n + C) / 2 + p.g(C)) * p.u_acc + p.u_store * (7 + arrays) / 2
    lost = n * _underflow(p) / norm / norm
    return norm * max(1 - unit, 0.0) * max(1 - lost, 0.0) ** 0.5, norm * (1 + unit) * (1 + min(lost, 1.0)) ** 0.5
