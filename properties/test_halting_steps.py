"""Laws of the steps that adaptive computation time takes, and of what is left for the last of them."""

from __future__ import annotations

import numpy as np

from veriformer.case import Case
from veriformer.expect import expect_between, expect_close, expect_same
from veriformer.law import Domain, Recipe, choice, law
from veriformer.properties.cases import few
from veriformer.properties.halting import (
    cut,
    halted,
    halting_of,
    left_error,
    lengthened,
    mean_error,
    proper,
    size,
    states_of,
    steps_of,
    with_halting,
)
from veriformer.properties.halting_cases import BOTH, CONSTANTS, halting_case, halting_cases
from veriformer.subject import Subject

MANY = 600
"""So many steps of a 512th each: a sum in 8 bits stands still at a half."""


def many_steps(domain: Domain) -> list[Case]:
    """Two positions of a 512th and a 256th in each of many steps."""
    halting = np.stack([np.full(MANY, 2.0**-9), np.full(MANY, 2.0**-8)])
    values = np.broadcast_to(np.arange(MANY) % 7, (2, MANY))[..., None].astype(float)
    return [halting_case(domain, halting, values, epsilon, "a 512th each") for epsilon in (0.25, 0.125)]


@law(
    BOTH,
    case=halting_cases(examples=24),
    source="P100, R63",
    relative=False,
    changes=("halting_comparison",),
    kills=(
        "act.py:read_before_the_step",
        "act.py:epsilon_ignored",
        "act.py:usual_epsilon_always",
        "act.py:usual_epsilon_for_none",
        "act.py:threshold_a_little_lower",
        "act.py:one_step_too_many",
        "act.py:one_step_too_few",
        "act.py:each_step_by_itself",
        "act.py:stops_when_the_state_repeats",
        "act_loop.py:usual_epsilon_always",
        "act_loop.py:steps_count_calls",
    ),
)
def halts_where_the_sum_first_reaches_the_threshold(act: Subject, case: Case) -> None:
    """N is the first n with h_1 + … + h_n >= 1 - epsilon, else M; where roundings may decide, either step is right."""
    if proper(case):
        (earliest, latest), found = steps_of(act, case), halted(act, case).steps
        expect_between(found, earliest, latest, 0.0, what="steps")
        expect_same(found, np.round(found), what="steps")


@law(
    BOTH,
    case=halting_cases(speeds=("ties",), least=2, examples=16),
    source="E06, E07, P100",
    needs={"epsilon"},
    relative=False,
    changes=("halting_comparison",),
    kills=(
        "act.py:strict_undeclared",
        "act_loop.py:strict_undeclared",
    ),
)
def a_sum_on_the_threshold_halts(act: Subject, case: Case) -> None:
    """A sum of exactly 1 - epsilon halts, or goes on where it must lie above; a sum of sixteenths has no rounding."""
    if not proper(case):
        return
    sums, threshold = np.cumsum(halting_of(case), -1), 1 - case["epsilon"]
    whole = bool((halting_of(case) * 16 % 1 == 0).all()) and case["epsilon"] * 16 % 1 == 0
    above = act.capabilities.halting_comparison == "above"
    goes_on = (sums <= threshold if above else sums < threshold)[..., :-1].sum(-1) + 1
    on = (sums == threshold).any(-1) & whole
    expect_same(halted(act, case).steps[on], goes_on[on], what="steps")


@law(
    BOTH,
    case=halting_cases(speeds=("constant",), examples=12),
    constant=choice(*CONSTANTS),
    source="P103",
    relative=False,
    kills=(
        "act.py:halting_clipped",
        "act.py:one_step_too_few",
        "act_loop.py:one_step_short",
    ),
)
def constant_halting_counts_its_multiples(act: Subject, case: Case, constant: float) -> None:
    """Halting c at every step gives N = min(M, ceil((1 - epsilon) / c)) and R = 1 - (N - 1) c."""
    if not proper(case):
        return
    same = with_halting(case, np.full(halting_of(case).shape, constant))
    c = float(halting_of(same).flat[0])
    ratio = (1 - same["epsilon"]) / c
    earliest, latest = steps_of(act, same)
    judged = (earliest == latest) & (abs(ratio - round(ratio)) > 1e-9)
    n, found, p = min(size(case), int(np.ceil(ratio))), halted(act, same), act.precision
    expect_close(found.steps[judged], float(n), 0.0, what="steps")
    left = 1 - (n - 1) * c
    expect_close(found.remainder[judged], left, left_error(n, p) + p.u_out * left * (n > 1), what="remainder")


@law(
    BOTH,
    case=halting_cases(examples=20),
    source="P100, P101, R63",
    relative=False,
    kills=(
        "act.py:remainder_is_the_sum_of_weights",
        "act.py:remainder_is_the_sum_of_halting",
        "act.py:remainder_of_the_next_step",
        "act.py:remainder_at_most_the_last_halting",
    ),
)
def remainder_is_what_earlier_steps_leave(act: Subject, case: Case) -> None:
    """R = 1 - (h_1 + … + h_(N-1)), which is exactly 1 for N = 1."""
    if not proper(case):
        return
    found, p = halted(act, case), act.precision
    before = np.where(np.arange(1, size(case) + 1) < found.n[..., None], halting_of(case), 0.0).sum(-1)
    allowed = left_error(found.n, p) + np.where(found.n > 1, p.u_out * np.abs(1 - before) + p.eta, 0.0)
    expect_close(found.remainder, 1 - before, allowed, what="remainder")


@law(
    BOTH,
    case=halting_cases(examples=16),
    source="P101",
    relative=False,
    kills=(
        "act.py:remainder_zero_at_once",
        "act.py:remainder_is_forgotten",
        "act_loop.py:remainders_begin_at_zero",
        "act_loop.py:remainder_is_forgotten",
    ),
)
def ponder_time_has_its_range(act: Subject, case: Case) -> None:
    """N + R is exactly 2 for N = 1, and from N + epsilon to N + 1 for more steps, so never more than M + 1."""
    if not proper(case):
        return
    found, p = halted(act, case), act.precision
    one, m = found.n == 1, size(case)
    expect_close((found.steps + found.remainder)[one], 2.0, 0.0, what="steps and remainder together")
    off = left_error(found.n + 1, p) + p.u_out + p.coarsest + p.eta
    low, high = found.steps + case["epsilon"], np.minimum(found.steps, m) + 1.0
    total = (found.steps + found.remainder)[~one]
    expect_between(total, low[~one], high[~one], off[~one], what="steps and remainder together")


@law(
    BOTH,
    case=halting_cases(examples=12),
    factor=choice(2.0, 4.0, 30.0),
    needs={"epsilon"},
    source="P107",
    relative=False,
    kills=("act.py:epsilon_is_the_threshold",),
)
def larger_epsilon_never_halts_later(act: Subject, case: Case, factor: float) -> None:
    """A larger epsilon takes no position more steps."""
    larger = case.with_keywords(epsilon=min(case["epsilon"] * factor + 0.01, 0.96875))
    if proper(case) and larger["epsilon"] >= case["epsilon"]:
        expect_between(halted(act, larger).steps, 1.0, halted(act, case).steps, 0.0, what="steps")


@law(
    BOTH,
    case=halting_cases(least=2, speeds=("ones_and_zeros", "mixed", "uniform", "ties", "late"), examples=24),
    place=choice(-1, 0, 1, 2),
    source="P107",
    relative=False,
    kills=("act.py:halting_divided_by_its_sum",),
)
def more_halting_never_halts_later(act: Subject, case: Case, place: int) -> None:
    """A larger halting probability at one step takes no position more steps."""
    if not proper(case):
        return
    more = halting_of(case).copy()
    more[..., place % size(case)] = np.minimum(more[..., place % size(case)] + 0.5, 1.0)
    expect_between(halted(act, with_halting(case, more)).steps, 1.0, halted(act, case).steps, 0.0, what="steps")


@law(
    BOTH,
    case=halting_cases(least=2, examples=16),
    which=choice(1, 2, 3),
    source="P105, P107",
    relative=False,
    kills=(
        "act.py:threshold_falls_with_the_limit",
        "act.py:steps_from_zero",
    ),
)
def less_room_only_cuts(act: Subject, case: Case, which: int) -> None:
    """With k steps at most a position takes as many as it would have, or k."""
    if not proper(case):
        return
    (earliest, latest), steps = steps_of(act, case), max(size(case) - which, 1)
    clear = earliest == latest
    whole, short = halted(act, case), halted(act, cut(case, steps))
    expect_same(short.steps[clear], np.minimum(whole.steps, steps)[clear], what="steps")


@law(
    BOTH,
    case=halting_cases(examples=12),
    steps=choice(1, 4),
    source="P107",
    relative=False,
    kills=(
        "act.py:read_backwards",
        "act.py:threshold_falls_with_the_limit",
    ),
)
def more_room_never_halts_earlier(act: Subject, case: Case, steps: int) -> None:
    """More steps at most take no position fewer."""
    if not proper(case):
        return
    earliest, latest = steps_of(act, case)
    clear = earliest == latest
    found, more = halted(act, case).steps, halted(act, lengthened(case, steps)).steps
    expect_between(more[clear], found[clear], np.inf, 0.0, what="steps")


@law(
    BOTH,
    case=halting_cases(speeds=("ties",), least=3, examples=16),
    needs={"epsilon"},
    source="P108",
    relative=False,
    kills=(
        "act.py:each_step_by_itself",
        "act.py:interpolates",
        "act.py:halting_as_last_weight",
        "act_loop.py:last_state_alone",
    ),
)
def crossing_the_threshold_adds_a_step(act: Subject, case: Case) -> None:
    """A sum short of 1 - epsilon takes one step more than a sum beyond it, and what is left moves to the new state."""
    if not proper(case) or size(case) < 3:
        return
    short, over = (crossing(case, second) for second in (0.375, 0.5))
    one, other, states = halted(act, over), halted(act, short), states_of(case)
    expect_same(other.steps, one.steps + 1, what="steps")
    left = 1 - 0.3125 - 0.375
    allowed = mean_error(act, over, one.n) + mean_error(act, short, other.n)
    moved = left * (states[..., 2, :] - states[..., 1, :])
    expect_close(other.out - one.out, moved, allowed, what="the difference of the outputs")


def crossing(case: Case, second: float) -> Case:
    """The case with sums of 5/16, that and a second number, and more than 1, beside a threshold of 3/4."""
    halting = np.ones(halting_of(case).shape)
    halting[..., 0], halting[..., 1] = 0.3125, second
    return with_halting(case.with_keywords(epsilon=0.25), halting)


@law(
    BOTH,
    case=Recipe(many_steps, few(many_steps)),
    source="E08",
    relative=False,
    changes=("accumulate", "intermediate"),
    kills=(
        "act.py:summed_in_eight_bits",
        "act_loop.py:limit_is_eight",
    ),
)
def many_small_steps_add_up(act: Subject, case: Case) -> None:
    """Halting of a 512th, hundreds of times, adds up to 1 - epsilon as it should, in the declared precision."""
    if proper(case):
        earliest, latest = steps_of(act, case)
        expect_between(halted(act, case).steps, earliest, latest, 0.0, what="steps")
