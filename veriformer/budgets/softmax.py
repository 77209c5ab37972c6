"""Error budgets of softmax, log_softmax and logsumexp.

Admitted algorithms: subtract the maximum (or an earlier maximum, corrected later), take exponentials,
sum in any order, divide, or multiply by the reciprocal. log_softmax may also subtract logsumexp(x)
unshifted. Not admitted: no maximum subtracted; softmax as exp(x - logsumexp(x)).

Notation: t = (x - max x)/T, d_j = error of the computed logarithm of a term, p = softmax(x/T).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from veriformer import reference
from veriformer.budgets.bound import Array, Bound, added
from veriformer.budgets.precision import C, Precision


def softmax(x: Array, *, axis: int = -1, temperature: float = 1.0, precision: Precision) -> Bound:
    """Error budget of softmax.

    x[…, n, …] -> value, allowed, both like x.

        p'_i = p_i exp(δ_i) / Σ p_j exp(δ_j) with |δ_j| <= d_j, so |log p'_i - log p_i| <= D_i,
        D_i = d_i + log Σ p_j exp(d_j) + (g(n) + C) u_acc,   E_i = p_i expm1(D_i), at most 1

    Source: Blanchard, Higham, Higham 2021 (Accurately computing the log-sum-exp and softmax
    functions), with the first-order Σ p_j d_j replaced by what it approximates.
    Edges: nothing is allowed at x = -inf, nor in a row of -inf alone.
    """
    value = reference.softmax(x, axis=axis, temperature=temperature)
    with np.errstate(all="ignore"):
        row = _Row.of(x, axis, temperature, precision)
        shared = row.shared + precision.g(row.n + C) * precision.u_acc
        total = row.d + shared
        error = value * np.expm1(total)
        if total.max(initial=0.0) > 0.5:
            # p may underflow to 0 in float64 and still be reached: work from log p.
            error = np.where(total > 0.5, np.minimum(1.0, np.exp(row.log_p + total)), error)
        # Exponentials stored coarsely lose what underflows: in each term, and through the sum in all.
        underflow = precision.eta + (1 + row.n * value) * (precision.eta_mid if precision.unfused else 0.0)
        terms = {
            "logits": error * (row.d / total),
            "normaliser": error * (shared / total),
            "output": precision.u_out * value + underflow,
        }
    return _bound(value, terms, row.visible)


def log_softmax(x: Array, *, axis: int = -1, precision: Precision) -> Bound:
    """Error budget of log_softmax.

    x[…, n, …] -> value, allowed, both like x.

        L = log Σ exp(t_j),   E_i = d_i + log Σ p_j exp(d_j) + (g(n) + C) u_acc + C u_acc L
                                    + e (2 L + |lse| + |t_i| + [unfused] 1)

    Source: Blanchard, Higham, Higham 2021. The |lse| term admits x - logsumexp(x).
    Edges: exactly -inf is demanded at x = -inf.
    """
    value = reference.log_softmax(x, axis=axis)
    p = precision
    with np.errstate(all="ignore"):
        row = _Row.of(x, axis, 1.0, p)
        unfused = 1.0 if p.unfused else 0.0
        terms = {
            "logits": row.d + p.e * np.abs(row.t),
            "normaliser": row.shared + p.g(row.n + C) * p.u_acc + p.g(C) * p.u_acc * row.log_sum + p.e * unfused,
            "subtraction": p.e * (2 * row.log_sum + np.abs(row.peak + row.log_sum)),
            "output": p.u_out * np.abs(value) + p.eta,
        }
    return _bound(value, terms, row.visible)


def logsumexp(x: Array, *, axis: int = -1, precision: Precision) -> Bound:
    """Error budget of logsumexp.

    x[…, n, …] -> value, allowed, both without `axis`.

        E = log Σ p_j exp(d_j) + (g(n) + C) u_acc + e (C |lse - max x| + [unfused] 1)

    Source: Blanchard, Higham, Higham 2021.
    Edges: exactly -inf is demanded of a row of -inf alone.
    """
    value = reference.logsumexp(x, axis=axis)
    p = precision
    with np.errstate(all="ignore"):
        row = _Row.of(x, axis, 1.0, p)
        unfused = 1.0 if p.unfused else 0.0
        terms = {
            "logits": np.squeeze(row.shared, axis),
            "normaliser": np.squeeze(p.g(row.n + C) * p.u_acc + p.e * (p.g(C) * row.log_sum + unfused), axis),
            "output": p.u_out * np.abs(value) + p.eta,
        }
    return _bound(value, terms, value > -np.inf)


def log_mean_exp(p: Array, log_p: Array, d: Array, axis: int, precision: Precision) -> Array:
    """log Σ p_j exp(d_j) along `axis`, which is kept: how far errors d move the normaliser of p at most.

    At least Σ p_j d_j, which it is for small d; log p takes over where a large d may raise a p that
    underflows. Typically the root of Σ (p_j d_j)².
    """
    if precision.growth == "typical":
        typical: Array = np.sqrt(((p * d) ** 2).sum(axis=axis, keepdims=True))
        return typical
    if d.max(initial=0.0) <= 0.5:
        moved: Array = np.log1p((p * np.expm1(d)).sum(axis=axis, keepdims=True))
    else:
        moved = np.maximum(np.logaddexp.reduce(log_p + d, axis=axis, keepdims=True), 0.0)
    return moved


@dataclass(frozen=True)
class _Row:
    """The quantities that the three budgets share; n, peak, log_sum and shared keep the axis."""

    visible: Array
    n: Array
    t: Array
    d: Array
    peak: Array
    log_sum: Array
    log_p: Array
    shared: Array

    @classmethod
    def of(cls, x: Array, axis: int, temperature: float, precision: Precision) -> _Row:
        peak = x.max(axis=axis, keepdims=True, initial=-np.inf)
        visible = x > -np.inf if temperature else x == peak
        peak = np.where(peak == -np.inf, 0.0, peak)
        t = (np.where(visible, x, peak) - peak) / (temperature or 1.0)
        e = np.where(visible, np.exp(t), 0.0)
        total = e.sum(axis=axis, keepdims=True)
        log_sum = np.log(np.maximum(total, 1.0))
        d = logit_error(t, peak, temperature, precision)
        log_p = np.where(visible, t - log_sum, -np.inf)
        shared = log_mean_exp(e / np.maximum(total, 1.0), log_p, d, axis, precision)
        return cls(visible, visible.sum(axis=axis, keepdims=True), t, d, peak, log_sum, log_p, shared)


def logit_error(t: Array, peak: Array, temperature: float, precision: Precision) -> Array:
    """d = (e + 2 u_acc) |t| + C u_acc + [unfused] C u_mid, and with a temperature, u_mid (|s| + |max s|) + 2 e |t|.

    t is rounded once; base 2, which is what hardware has, multiplies it by a rounded log2(e).
    s = x/T may be stored before the maximum is subtracted; T itself and its reciprocal may be rounded,
    which moves all s by one factor, so t by that factor.
    """
    size = np.abs(t)
    d: Array = (precision.e + 2 * precision.u_acc) * size + precision.g(C) * (precision.u_acc + precision.u_store)
    if temperature not in (0.0, 1.0):
        top = peak / temperature
        d = d + precision.u_mid * (np.abs(t + top) + np.abs(top)) + 2 * precision.e * size
    return d


def _bound(value: Array, terms: dict[str, Array], visible: Array) -> Bound:
    """The bound made of its terms, all 0 where nothing is visible."""
    terms = {name: np.where(visible, term, 0.0) for name, term in terms.items()}
    return Bound(value, added(terms), terms)
