"""What laws of adaptive computation time do to their cases, and what they allow.

Both operations look alike here: whether all states are given, or the step that makes them. The states of a case are
s^1 … s^M as exact numbers; those that an implementation has may differ by `state_error`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from veriformer.budgets import Precision
from veriformer.budgets.halting import halting_steps
from veriformer.case import Case
from veriformer.expect import expect_same
from veriformer.properties.halting_cases import LOOP
from veriformer.properties.measured import Measured, expect_equal, measure_all
from veriformer.subject import Subject

HALTING = {"adaptive_computation_time": "halting", "act_loop": "step.halting"}
STATES = {"adaptive_computation_time": "states", "act_loop": "step.drive"}
"""Names of the arrays that hold halting, and the states or what drives them."""


@dataclass(frozen=True)
class Halted:
    """The three results of a call, and the step number of each position as an index may be made of it."""

    out: np.ndarray
    steps: np.ndarray
    remainder: np.ndarray
    n: np.ndarray


def halted(act: Subject, case: Case) -> Halted:
    """The results of a call."""
    out, steps, remainder = act(case)
    return Halted(out, steps, remainder, np.clip(np.nan_to_num(steps), 1, size(case)).astype(int))


def proper(case: Case) -> bool:
    """Whether halting lies in [0, 1], epsilon in [0, 1) and all is finite, as it is unless a case was made smaller."""
    h = halting_of(case)
    ranges = bool(((h >= 0) & (h <= 1)).all()) and 0 <= case["epsilon"] < 1 and size(case) >= 1
    return ranges and all(np.isfinite(array).all() for array in case.arrays.values())


def size(case: Case) -> int:
    """How many steps there are at most, M."""
    return int(case["max_steps"]) if case.operation == LOOP else int(case["halting"].shape[-1])


def halting_of(case: Case) -> np.ndarray:
    """h[…, M]."""
    return np.asarray(case[HALTING[case.operation]][..., : size(case)])


def with_halting(case: Case, halting: np.ndarray) -> Case:
    """The case with another halting, of as many steps or more."""
    return case.with_arrays(**{HALTING[case.operation]: halting})


def states_of(case: Case) -> np.ndarray:
    """s[…, M, d]: the states after each step, exactly."""
    if case.operation != LOOP:
        return np.asarray(case["states"])
    state, made = case["state"], []
    for n in range(size(case)):
        state = state / 2 + case["step.drive"][..., n, :]
        made.append(state)
    return np.stack(made, axis=-2)


def state_error(act: Subject, case: Case) -> np.ndarray:
    """How far the states s[…, M, d] that an implementation has may be off: a step rounds what it makes."""
    states = states_of(case)
    if case.operation != LOOP:
        return np.zeros(states.shape)
    rounded, error = act.precision.u_out * np.abs(states) + act.precision.eta, np.zeros(states[..., 0, :].shape)
    found = []
    for n in range(states.shape[-2]):
        error = error / 2 + rounded[..., n, :]
        found.append(error)
    return np.stack(found, axis=-2)


def with_states(case: Case, states: np.ndarray) -> Case:
    """The case with other states s[…, M, d], of any width; a loop begins with zeros and is driven to them."""
    if case.operation != LOOP:
        return case.with_arrays(states=states)
    before = np.concatenate([np.zeros_like(states[..., :1, :]), states[..., :-1, :]], axis=-2)
    return case.with_arrays(**{"step.drive": states - before / 2, "state": np.zeros_like(states[..., 0, :])})


def cut(case: Case, steps: int) -> Case:
    """The case with so many steps at most."""
    if case.operation == LOOP:
        return case.with_keywords(max_steps=steps)
    return case.with_arrays(halting=case["halting"][..., :steps], states=case["states"][..., :steps, :])


def lengthened(case: Case, steps: int) -> Case:
    """The case with so many more steps, which bring something new."""
    halting, states = (case[names[case.operation]] for names in (HALTING, STATES))
    rng = case.random(7)
    more = (
        rng.integers(0, 5, (*halting.shape[:-1], steps)) / 8,
        rng.integers(-9, 10, (*states.shape[:-2], steps, 1)) + 0.0,
    )
    other = np.broadcast_to(more[1], (*states.shape[:-2], steps, states.shape[-1]))
    arrays = {
        HALTING[case.operation]: np.concatenate([halting, more[0]], -1),
        STATES[case.operation]: np.concatenate([states, other], -2),
    }
    longer = case.with_arrays(**arrays)
    return longer.with_keywords(max_steps=size(case) + steps) if case.operation == LOOP else longer


def with_another_end(case: Case, last: np.ndarray, filler: float) -> Case:
    """The case with other states and other halting after step last[…] of each position."""
    halting, states = (case[names[case.operation]] for names in (HALTING, STATES))
    later = np.arange(1, halting.shape[-1] + 1) > last[..., None]
    arrays = {
        HALTING[case.operation]: np.where(later, 1 - halting, halting),
        STATES[case.operation]: np.where(later[..., None], filler, states),
    }
    return case.with_arrays(**arrays)


def with_other_positions(case: Case) -> tuple[Case, np.ndarray]:
    """About half of the positions replaced by quite different ones, and which were left alone."""
    shape = halting_of(case).shape[:-1]
    kept = case.random(1).permutation(int(np.prod(shape))).reshape(shape) % 2 == 0
    arrays = {}
    for name, array in case.arrays.items():
        other = 1 - array if name == HALTING[case.operation] else 3 - 2 * array
        arrays[name] = np.where(kept.reshape(*shape, *(1,) * (array.ndim - len(shape))), array, other)
    return case.with_arrays(**arrays), kept


def steps_of(act: Subject, case: Case) -> tuple[np.ndarray, np.ndarray]:
    """The first and the last step at which each position may halt, given the roundings that are declared."""
    comparison = act.capabilities.halting_comparison
    return halting_steps(halting_of(case), case["epsilon"], act.precision, comparison)


def halts_by_itself(act: Subject, case: Case) -> np.ndarray:
    """Which positions surely reach the threshold, so that no limit stops them."""
    stays = np.concatenate([halting_of(case), np.zeros((*halting_of(case).shape[:-1], 1))], -1)
    comparison = act.capabilities.halting_comparison
    found: np.ndarray = halting_steps(stays, case["epsilon"], act.precision, comparison)[1] <= size(case)
    return found


def weights_of(act: Subject, case: Case) -> tuple[Measured, np.ndarray]:
    """The weight of each step, which unit states show, with the error it may have, and the steps that were taken."""
    many, shape = size(case), halting_of(case).shape[:-1]
    seen = halted(act, with_states(case, np.broadcast_to(np.eye(many), (*shape, many, many))))
    last = np.arange(1, many + 1) == seen.n[..., None]
    allowed = share(many, act.precision) * np.abs(seen.out) + np.where(
        last, left_error(seen.n, act.precision)[..., None], 0
    )
    return Measured(seen.out, allowed + tiny(many, act.precision)), seen.n


def share(many: int, p: Precision) -> float:
    """The error of a mean of so many states, relative to the mean of their sizes: products, sums and its rounding."""
    return float(p.g(many) * (p.u_acc + p.u_store) + p.e + p.u_out)


def left_error(n: Any, p: Precision) -> Any:
    """The error of what is left of 1 for step n: halting summed n - 1 times."""
    return p.g(n - 1) * p.e


def tiny(many: int, p: Precision) -> float:
    """What a mean of so many states may lose by underflow."""
    return float(p.eta + many * (p.eta_mid if p.unfused else p.eta_acc))


def mean_error(act: Subject, case: Case, n: np.ndarray) -> np.ndarray:
    """The error of a mean of the states up to step n[…], whatever the weights are; […, d]."""
    p, states, many = act.precision, np.abs(states_of(case)), size(case)
    counts = (np.arange(1, many + 1) <= n[..., None])[..., None]
    peak, off = (np.where(counts, a, 0.0).max(-2) for a in (states, state_error(act, case)))
    last = np.take_along_axis(states, n[..., None, None] - 1, -2)[..., 0, :]
    return share(many, p) * peak + left_error(n, p)[..., None] * last + off + tiny(many, p)


def expect_unmoved(act: Subject, before: Case, after: Case, kept: np.ndarray, exact: bool = True) -> None:
    """All three results of these positions come out alike: within budget, or bit for bit if exact and leak="exact"."""
    if exact and act.capabilities.leak == "exact":
        for name, first, second in zip(act.results_for(before), act(before), act(after), strict=True):
            expect_same(second[kept], first[kept], what=name)
    else:
        for name, one, other in zip(
            act.results_for(before), measure_all(act, before), measure_all(act, after), strict=True
        ):
            expect_equal(other[kept], one[kept], what=name)
