"""Gradients of adaptive computation time: N is a constant, what is left of 1 goes to the last step."""

from __future__ import annotations

import numpy as np

from veriformer.budgets.precision import C
from veriformer.case import Case
from veriformer.expect import expect, expect_close, expect_same
from veriformer.law import choice, law
from veriformer.oracle import shapes
from veriformer.properties.attention_cases import PICKS
from veriformer.properties.cotangents import cotangent_of, differentiable
from veriformer.properties.halting import (
    HALTING,
    STATES,
    halted,
    left_error,
    proper,
    size,
    state_error,
    states_of,
    steps_of,
    tiny,
    weights_of,
    with_another_end,
    with_other_positions,
)
from veriformer.properties.halting_cases import BOTH, LOOP, halting_cases
from veriformer.subject import Subject

Gradients = dict[str, np.ndarray]


def pulled(act: Subject, case: Case, out: np.ndarray | None, remainder: np.ndarray | None) -> Gradients:
    """The gradients for cotangents of output and remainder; one that does not exist is 0."""
    found = act.gradients(case, differentiable(case), (out, None, remainder))
    for name, gradient in found.items():
        same = gradient is None or gradient.shape == case[name].shape
        expect(same, "shape", f"the gradient of {name} has another shape than {name}, {case[name].shape}")
    return {name: np.zeros(case[name].shape) if one is None else one for name, one in found.items()}


def whole_numbers(case: Case, pick: int) -> np.ndarray:
    """A cotangent of the remainder: whole numbers, none of them 0."""
    rng = case.random(pick + 11)
    return np.asarray(rng.choice([-3.0, -1.0, 1.0, 2.0], shapes(case)[2]))


def numbered(case: Case, n: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which steps come before the last one, n[…], and which after it; bool[…, M]."""
    numbers = np.arange(1, size(case) + 1)
    return numbers < n[..., None], numbers > n[..., None]


@law(
    BOTH,
    case=halting_cases(examples=16),
    pick=PICKS,
    kind="gradient",
    needs={"gradients"},
    source="P102, R68",
    relative=False,
    kills=(
        "act_gradient.py:remainder_rises",
        "act_gradient.py:remainder_has_no_gradient",
        "act_gradient.py:remainder_of_the_step_before_alone",
        "act_gradient.py:remainder_falls_at_the_last_step_too",
    ),
)
def remainder_falls_with_earlier_halting(act: Subject, case: Case, pick: int) -> None:
    """The remainder's slope by halting is -1 before the last step and 0 from it on; the states do not move it."""
    if not proper(case):
        return
    n, r = halted(act, case).n, whole_numbers(case, pick)
    found, (before, _) = pulled(act, case, None, r), numbered(case, n)
    off = np.where(before, left_error(n, act.precision)[..., None] * np.abs(r)[..., None], 0.0)
    by_halting = found.pop(HALTING[case.operation])[..., : size(case)]
    expect_close(by_halting, np.where(before, -r[..., None], 0.0), off, what="the gradient of halting is")
    for name, gradient in found.items():
        expect_same(gradient, np.zeros(gradient.shape), what=f"the gradient of {name} is")


@law(
    BOTH,
    case=halting_cases(examples=16),
    pick=PICKS,
    kind="gradient",
    needs={"gradients"},
    source="P102",
    relative=False,
    kills=(
        "act_gradient.py:last_weight_is_a_constant",
        "act_gradient.py:gain_over_the_next_state",
        "act_gradient.py:gain_over_the_mean",
        "act_gradient.py:divided_by_the_steps",
        "act_gradient.py:halting_detached",
    ),
)
def halting_pulls_towards_its_state(act: Subject, case: Case, pick: int) -> None:
    """The output's slope by h_n is s^n - s^N before the last step N, and exactly 0 from it on."""
    if not proper(case):
        return
    n, g, states = halted(act, case).n, cotangent_of(case, pick)[..., None, :], states_of(case)
    last = n[..., None, None] - 1
    final, (before, _) = np.take_along_axis(states, last, -2), numbered(case, n)
    gain = np.where(before, (g * (states - final)).sum(-1), 0.0)
    sizes = (np.abs(g) * (np.abs(states) + np.abs(final))).sum(-1)
    off = state_error(act, case)
    off = (np.abs(g) * (off + np.take_along_axis(off, last, -2))).sum(-1)
    p, width = act.precision, states.shape[-1]
    share = p.g(width) * (p.u_acc + p.u_store) + C * max(p.e, p.u_out)
    allowed = np.where(before, share * sizes + off + (width + C) * tiny(size(case), p), 0.0)
    found = pulled(act, case, g[..., 0, :], None)[HALTING[case.operation]][..., : size(case)]
    expect_close(found, gain, allowed, what="the gradient of halting is")


@law(
    BOTH,
    case=halting_cases(examples=16),
    pick=PICKS,
    kind="gradient",
    needs={"gradients"},
    source="P102, P99",
    relative=False,
    kills=(
        "act_gradient.py:states_unweighted",
        "act_gradient.py:last_state_alone",
        "act_gradient.py:weights_squared",
        "act_gradient.py:states_detached_between_steps",
        "act_gradient.py:initial_state_detached",
    ),
)
def states_pull_by_their_weights(act: Subject, case: Case, pick: int) -> None:
    """The output's slope by each state is the weight that unit states show, halved for each step a loop makes on it."""
    if not proper(case):
        return
    (weights, _), g, p = weights_of(act, case), cotangent_of(case, pick), act.precision
    handed = passed_on(case)
    shares, errors = weights.value @ handed, weights.allowed @ handed
    found = pulled(act, case, g, None)
    name = STATES[case.operation]
    parts = [(name, found[name][..., : size(case), :], slice(1, None), g[..., None, :])]
    if case.operation == LOOP:
        parts.append(("state", found["state"][..., None, :], slice(1), g[..., None, :]))
    for name, gradient, place, one in parts:
        wanted, error = shares[..., place, None] * one, errors[..., place, None] * np.abs(one)
        off = (size(case) + C) * (max(p.e, p.u_out) * np.abs(wanted) + tiny(1, p))
        expect_close(gradient, wanted, error + off, what=f"the gradient of {name} is")


def passed_on(case: Case) -> np.ndarray:
    """How much of state n each state m holds, [M, 1 + M]; a loop halves all it is given, the initial state first."""
    steps = np.arange(1, size(case) + 1)
    if case.operation != LOOP:
        return np.eye(size(case), size(case) + 1, 1)
    ago = steps[:, None] - np.arange(size(case) + 1)
    return np.where(ago >= 0, 0.5 ** np.maximum(ago, 0), 0.0)


@law(
    BOTH,
    case=halting_cases(least=2, speeds=("mixed", "uniform", "beyond", "ties", "ones_and_zeros"), examples=16),
    pick=PICKS,
    kind="gradient",
    needs={"gradients"},
    source="P102, P105",
    relative=False,
    kills=(
        "act_gradient.py:states_after_the_last_too",
        "act_gradient.py:remainder_falls_at_all_steps",
        "act_gradient.py:last_halting_pulls_too",
    ),
)
def nothing_after_the_last_step_has_a_gradient(act: Subject, case: Case, pick: int) -> None:
    """States after the last step have a gradient of exactly 0; so has halting from that step on, all of it at N = 1."""
    if not proper(case):
        return
    n, g, r = halted(act, case).n, cotangent_of(case, pick), whole_numbers(case, pick)
    found, (before, after) = pulled(act, case, g, r), numbered(case, n)
    halting = found[HALTING[case.operation]][..., : size(case)][~before]
    expect_same(halting, np.zeros(halting.shape), what="the gradient of halting is")
    states = found[STATES[case.operation]][..., : size(case), :][after]
    expect_same(states, np.zeros(states.shape), what="the gradient of a later state is")


@law(
    BOTH,
    case=halting_cases(least=2, speeds=("mixed", "uniform", "beyond", "ties", "ones_and_zeros"), examples=12),
    pick=PICKS,
    filler=choice(np.nan, np.inf),
    kind="gradient",
    needs={"gradients", "nan_contained"},
    source="P105",
    relative=False,
    kills=("act_gradient.py:multiplied_by_zero",),
)
def nan_after_the_last_step_reaches_no_gradient(act: Subject, case: Case, pick: int, filler: float) -> None:
    """NaN in states after the step at which a position surely halts changes no gradient, to the bit."""
    if not proper(case):
        return
    g, r, (_, latest) = cotangent_of(case, pick), whole_numbers(case, pick), steps_of(act, case)
    one, other = (pulled(act, with_another_end(case, latest, x), g, r) for x in (0.0, filler))
    for name, gradient in one.items():
        expect_same(other[name], gradient, what=f"the gradient of {name} is")


@law(
    BOTH,
    case=halting_cases(rows=2, examples=12),
    pick=PICKS,
    kind="gradient",
    needs={"gradients"},
    source="P106",
    relative=False,
    kills=("act_gradient.py:cotangent_averaged_over_positions",),
)
def gradient_of_a_position_is_its_own(act: Subject, case: Case, pick: int) -> None:
    """The gradients of a position do not depend on the other positions and their cotangents, to the bit."""
    if not proper(case):
        return
    changed, kept = with_other_positions(case)
    g, r = cotangent_of(case, pick), whole_numbers(case, pick)
    others = np.where(kept[..., None], g, 2 - g[..., ::-1]), np.where(kept, r, 5.0)
    before, after = pulled(act, case, g, r), pulled(act, changed, *others)
    for name, gradient in before.items():
        expect_same(after[name][kept], gradient[kept], what=f"the gradient of {name} is")
