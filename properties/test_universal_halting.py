"""Halting in the Universal Transformer: ranges, what a halted position is to the others, who decides for whom."""

from __future__ import annotations

import numpy as np

from veriformer.case import Case
from veriformer.expect import expect_between, expect_close, expect_same
from veriformer.law import SINGLE, law
from veriformer.properties.attention_cases import PICKS
from veriformer.properties.measured import expect_equal, measure_all
from veriformer.properties.universal_build import ID, B, W, chain, real_tokens
from veriformer.properties.universal_cases import DEFAULT, universal_cases
from veriformer.properties.universal_changes import EVEN, PLAIN, expect_steps, leaving_one_running
from veriformer.subject import Subject


@law(
    ID,
    case=universal_cases(presets=DEFAULT, examples=8),
    needs=PLAIN,
    source="P100, P101, R65",
    relative=False,
    kills=(
        "universal_halting.py:remainder_of_a_single_step_is_zero",
        "universal_halting.py:steps_from_zero",
        "universal_halting.py:left_after_the_last_step",
        "universal.py:one_step_too_many",
    ),
)
def steps_and_remainder_keep_their_ranges(universal: Subject, case: Case) -> None:
    """At real tokens N is a whole number from 1 to M, and R lies above epsilon and is 1 at most, 1 where N = 1."""
    (_, n, r), real = measure_all(universal, case), real_tokens(case)
    expect_between(n.value[real], 1, case["max_steps"], 0.0, what="steps is")
    expect_same(n.value[real], np.round(n.value[real]), what="steps is")
    expect_between(r.value[real], case["epsilon"], 1.0, r.allowed[real], what="remainder is")
    once = real & (n.value == 1)
    expect_same(r.value[once], np.ones(int(once.sum())), what="remainder after a single step is")


@law(
    ID,
    case=universal_cases(presets=DEFAULT, mask=False, memory=False, bare=False, least={"T": 2}),
    needs=EVEN | {SINGLE},
    source="P98, R66, B154, semantics 3.12",
    kills=(
        "universal_halting.py:halted_positions_move_on",
        "universal_halting.py:halted_positions_are_zeros",
        "universal_halting.py:halted_positions_hidden",
    ),
)
def a_halted_position_keeps_its_state_and_stays_a_key(universal: Subject, case: Case) -> None:
    """Where one of two tokens halts at step 1, the other one goes on to see, at every step, the state it had then."""
    made = leaving_one_running(case)
    if made is None:
        return
    first = chain(made, count=1)[:, :, 0]
    state, states = first, [first]
    for n in (2, 3):
        state = np.concatenate([first[:, :1], state[:, 1:]], 1)
        state = chain(made, start=state, first=n, count=1)[:, :, 0]
        states.append(state)
    h = [1 / (1 + np.exp(-(s[0, 1] @ made[W][:, 0] + made[B][0]))) for s in states[:2]]
    weights = np.asarray([*h, 1 - sum(h)])
    results = measure_all(universal, made)
    expect_equal(results[0][0, 0], first[0, 0], what="output of the halted token is")
    expect_equal(
        results[0][0, 1], sum(w * s[0, 1] for w, s in zip(weights, states, strict=True)), what="the other output is"
    )
    expect_steps(results, np.ones((1, 2), bool), np.asarray([1.0, 3.0]), np.asarray([1.0, weights[2]]))


@law(
    ID,
    case=universal_cases(presets=DEFAULT, least={"L": 2}, examples=8),
    pick=PICKS,
    needs=PLAIN,
    source="P101, P103, corpus kind BOUND",
    kills=(
        "universal_halting.py:sum_for_the_remainder",
        "universal_halting.py:remainder_of_a_single_step_is_zero",
    ),
)
def what_is_left_falls_by_what_was_said(universal: Subject, case: Case, pick: int) -> None:
    """Who runs on past a limit leaves more of 1 there than at a later one, and 1 at the first."""
    results = [measure_all(universal, case.with_keywords(max_steps=n)) for n in range(1, case["max_steps"] + 1)]
    final = results[-1][1].value
    for n in range(1, len(results)):
        (_, _, before), (_, _, after) = results[n - 1 : n + 1]
        on = real_tokens(case) & (final > n)
        allowed = before.allowed + after.allowed
        falls = np.maximum(after.value - before.value, 0.0)
        expect_close(falls[on], 0.0, allowed[on], what=f"the growth of remainder from {n} steps to {n + 1} is")
