"""Error budgets of adaptive computation time: the mean over steps, and where roundings may choose its last step.

Admitted algorithms: halting summed in any order, or taken off 1 step by step; the sum compared with 1 - epsilon,
or what is left with epsilon, either of them rounded; the mean added up in one go or held as a running sum.
Not admitted: weights taken as differences of sums (their error does not shrink with the weight), and sums held
in a shorter dtype than declared.

The halting step is a discrete choice. Where roundings can turn it a row is undetermined: all of its results are.
Where every sum and 1 - epsilon are exact in the coarsest dtype of the computation nothing is open, so that sums
exactly on the threshold are judged.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from veriformer import reference
from veriformer.budgets.bound import Array, Bound, added
from veriformer.budgets.precision import Precision

Bounds = tuple[Bound, Bound, Bound]


def adaptive_computation_time(
    halting: Array, states: Array, *, epsilon: float = 0.01, comparison: str = "at_least", precision: Precision
) -> Bounds:
    """Error budgets of adaptive_computation_time.

    halting[…, M], states[…, M, d] -> bounds of out[…, d], N[…], R[…]

        E_R = g(N - 1) e,   E_out = (g(N) u_acc + e + [unfused] g(N) u_mid) Σ p_n |s^n| + E_R |s^N|

    N must be right. R = 1 is exact where N = 1.
    Source: derived; Graves 2016 (Adaptive Computation Time), section 2, for the weights; P97, P108.
    Edges: inf (undetermined) in all three where `undecided`.
    """
    words: dict[str, Any] = {"epsilon": epsilon, "comparison": comparison}
    weights, steps, _ = reference.halting_weights(halting, **words)
    out, _, remainder = reference.adaptive_computation_time(halting, states, **words)
    p, n = precision, steps[..., None]
    numbers = np.arange(1, halting.shape[-1] + 1)
    sizes = np.abs(np.where((numbers <= n)[..., None], states, 0.0))
    size, last = (weights[..., None] * sizes).sum(-2), np.where((numbers == n)[..., None], sizes, 0.0).sum(-2)
    left = p.g(steps - 1) * p.e * np.maximum(np.abs(remainder), 1)
    mean = {
        "sum": p.g(n) * p.u_acc * size,
        "products": p.e * size,
        "running sum": p.g(n) * p.u_store * size,
        "remainder": left[..., None] * last,
        "output": p.u_out * np.abs(out) + p.eta + n * (p.eta_mid if p.unfused else p.eta_acc),
    }
    rest = {"sum": left, "output": np.where(steps > 1, p.u_out * remainder + p.eta, 0.0)}
    none = {"exact": np.zeros(steps.shape)}
    open_ended = undecided(halting, epsilon, precision, comparison)
    return (
        _open(Bound(out, added(mean), mean), open_ended[..., None]),
        _open(Bound(steps.astype(np.float64), none["exact"], none), open_ended),
        _open(Bound(remainder, added(rest), rest), open_ended),
    )


def act_loop(
    step: Any,
    state: Array,
    *,
    max_steps: int,
    epsilon: float = 0.01,
    comparison: str = "at_least",
    precision: Precision,
) -> Bounds:
    """Error budgets of act_loop on the step that it is given, `GivenStep`.

    step(s[…, d], n) -> s[…, d], h[…]; state[…, d] -> bounds of out[…, d], N[…], R[…]

        e_n = e_(n-1) / 2 + u |s^n|,   E_out = E_out(adaptive_computation_time) + Σ p_n e_n

    e_n is what the states themselves err: the step computes in the storage dtype, and halves what it is given.
    Source: derived.
    Edges: as adaptive_computation_time.
    """
    states, halting, errors, error = [], [], [], np.zeros(state.shape)
    for n in range(1, max_steps + 1):
        state, h = step(state, n)
        error = error / 2 + precision.u_out * np.abs(state) + precision.eta
        states.append(state)
        halting.append(h)
        errors.append(error)
    heard, words = np.stack(halting, -1), dict[str, Any](epsilon=epsilon, comparison=comparison)
    mean, steps, remainder = adaptive_computation_time(heard, np.stack(states, -2), **words, precision=precision)
    weights, _, _ = reference.halting_weights(heard, **words)
    moved = np.where(weights[..., None] > 0, weights[..., None] * np.stack(errors, -2), 0.0).sum(-2)
    terms = {**mean.terms, "states": moved}
    return Bound(mean.value, mean.allowed + moved, terms), steps, remainder


def undecided(halting: Array, epsilon: float, precision: Precision, comparison: str = "at_least") -> Array:
    """Where roundings may choose another halting step; halting[…, M] -> bool[…].

    Source: derived; P108.
    """
    earliest, latest = halting_steps(halting, epsilon, precision, comparison)
    differ: Array = np.asarray(earliest != latest)
    return differ


def halting_steps(
    halting: Array, epsilon: float, precision: Precision, comparison: str = "at_least"
) -> tuple[Array, Array]:
    """The first and the last step that roundings may choose to halt at.

    halting[…, M] -> earliest[…], latest[…], from 1 to M

        the first n at which H_n may reach 1 - epsilon, and the first at which it surely does, given `margins`

    Source: derived; P100, P108.
    """
    total, margin = np.cumsum(halting, -1), margins(halting, epsilon, precision)
    exceeds = np.greater if comparison == "above" else np.greater_equal
    found = []
    for sign in (1, -1):
        with np.errstate(invalid="ignore"):
            sums = total + sign * margin
        reached = exceeds(sums, 1 - epsilon)
        reached[..., -1] = True
        found.append(1 + reached.argmax(-1))
    return found[0], found[1]


def margins(halting: Array, epsilon: float, precision: Precision) -> Array:
    """How far each sum may be off when it is compared with 1 - epsilon.

    halting[…, M] -> [error of H_n and of the threshold; …, M]

        n e unless all of h_1 … h_n are multiples of 2 u,   + u max(epsilon, 1 - epsilon) unless epsilon is one

    u is the roundoff of the coarsest dtype: up to 2, where no sum goes that decides, multiples of 2 u are exact.
    Where halting is not between 0 and 1 the largest of the sums counts in place of 1.
    Source: derived.
    """
    p, numbers = precision, np.arange(1, halting.shape[-1] + 1)
    size = np.maximum.accumulate(np.maximum(np.abs(np.cumsum(halting, -1)), 1), axis=-1)
    exact = np.logical_and.accumulate(_multiple(halting, 2 * p.coarsest) & (size <= 2), axis=-1)
    threshold = 0.0 if _multiple(np.asarray(epsilon), 2 * p.coarsest) else p.coarsest * max(epsilon, 1 - epsilon)
    found: Array = np.where(exact, 0.0, numbers * p.e * size) + threshold
    return found


def _multiple(x: Array, unit: float) -> Array:
    """Whether each number is a whole number of units; NaN and infinity are not."""
    with np.errstate(invalid="ignore"):
        found: Array = np.isfinite(x) & (np.mod(x, unit) == 0)
    return found


def _open(bound: Bound, where: Array) -> Bound:
    """The bound with everything allowed in the rows that are undecided."""
    return replace(bound, allowed=np.where(where, np.inf, bound.allowed))
