"""Laws of loops of adaptive computation time: the step is asked for its numbers, in order, with its own states."""

from __future__ import annotations

import numpy as np

from veriformer.case import Case
from veriformer.expect import expect, expect_close, expect_same
from veriformer.law import law
from veriformer.properties.halting import cut, halted, halting_of, proper, size, state_error, states_of, with_halting
from veriformer.properties.halting_cases import LOOP, halting_cases
from veriformer.subject import Subject


@law(
    LOOP,
    case=halting_cases(examples=24),
    kind="contract",
    source="the convention of step(state, n)",
    relative=False,
    kills=(
        "act_loop.py:numbers_from_zero",
        "act_loop.py:one_call_more",
        "act_loop.py:limit_is_a_hundred",
    ),
)
def the_step_is_called_with_its_numbers(act_loop: Subject, case: Case) -> None:
    """The step is called with n from 1 to max_steps and no other, whether positions halt at once or never."""
    if not proper(case):
        return
    for h in (halting_of(case), np.zeros(halting_of(case).shape), np.ones(halting_of(case).shape)):
        act_loop(with_halting(case, h))  # a step asked for another number raises
        expect(True, "number", "")


@law(
    LOOP,
    case=halting_cases(examples=16),
    source="P104; states are handed on",
    relative=False,
    kills=(
        "act_loop.py:always_the_first",
        "act_loop.py:always_the_first_state",
        "act_loop.py:mean_goes_on",
        "act_loop.py:limit_is_eight",
        "act_loop.py:running_positions_frozen",
    ),
)
def each_step_is_made_once_in_order(act_loop: Subject, case: Case) -> None:
    """Where nothing halts, what drives step n shows up halved for each step after it, to the bit."""
    if not proper(case):
        return
    many, shape = size(case), halting_of(case).shape[:-1]
    unit = np.broadcast_to(np.eye(many), (*shape, many, many))
    driven = case.with_arrays(**{"step.drive": unit, "state": np.zeros((*shape, many))})
    halves = np.broadcast_to(0.5 ** np.arange(many - 1.0, -1, -1), (*shape, many))
    found = halted(act_loop, with_halting(driven, np.zeros(unit.shape[:-1])))
    expect_same(found.out, halves, what="the output")


@law(
    LOOP,
    case=halting_cases(examples=12),
    source="P104",
    relative=False,
    kills=(
        "act_loop.py:mean_begins_with_the_state",
        "act_loop.py:halting_as_last_weight",
        "act_loop.py:remainders_begin_at_zero",
    ),
)
def one_step_is_that_step(act_loop: Subject, case: Case) -> None:
    """With max_steps = 1 the output is the state after the first step, N = 1 and R = 1."""
    if not proper(case):
        return
    once = cut(case, 1)
    found = halted(act_loop, once)
    expect_close(found.out, states_of(once)[..., 0, :], state_error(act_loop, once)[..., 0, :], what="the output")
    expect_same(found.steps, np.ones(found.steps.shape), what="steps")
    expect_same(found.remainder, np.ones(found.steps.shape), what="remainder")
