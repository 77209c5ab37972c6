"""Laws of adaptive computation time, of given states and of a loop: weights, means, what may have influence."""

from __future__ import annotations

import numpy as np

from veriformer.budgets.precision import C
from veriformer.case import Case, round_to
from veriformer.expect import expect_between, expect_close, expect_different, expect_same
from veriformer.law import SINGLE, choice, law
from veriformer.properties.halting import (
    STATES,
    expect_unmoved,
    halted,
    halting_of,
    halts_by_itself,
    left_error,
    lengthened,
    mean_error,
    proper,
    share,
    size,
    state_error,
    states_of,
    steps_of,
    tiny,
    weights_of,
    with_another_end,
    with_halting,
    with_other_positions,
    with_states,
)
from veriformer.properties.halting_cases import ACT, BOTH, halting_cases
from veriformer.subject import Subject


@law(
    BOTH,
    case=halting_cases(examples=20),
    source="P97, P98, R64, B153, B157",
    relative=False,
    kills=(
        "act.py:interpolates",
        "act.py:precedence_slip",
        "act.py:no_remainder_at_the_limit",
        "act.py:halted_positions_updated_again",
        "act.py:left_after_the_last_step",
        "act.py:halting_as_last_weight",
        "act.py:half_of_the_steps",
        "act.py:sums_cut_off_at_the_threshold",
        "act_loop.py:interpolates",
        "act_loop.py:no_remainder_at_the_limit",
    ),
)
def weights_sum_to_one(act: Subject, case: Case) -> None:
    """Unit states show weights that are >= 0 and sum to 1, and equal states come back, also at a forced stop."""
    if not proper(case):
        return
    weights, n = weights_of(act, case)
    expect_between(weights.value, 0.0, np.inf, 0.0, what="a weight")
    p, many = act.precision, size(case)
    error = share(many, p) + left_error(n, p) + many * tiny(many, p)
    expect_close(weights.value.sum(-1), 1.0, error, what="the sum of the weights")
    states = round_to(states_of(case), case.dtype)
    same = with_states(case, np.broadcast_to(states[..., -1:, :], states.shape))
    found, wanted = halted(act, same).out, states_of(same)[..., 0, :]
    expect_close(found, wanted, mean_error(act, same, n), what="the mean of equal states")


@law(
    BOTH,
    case=halting_cases(examples=20),
    source="P97, R65",
    relative=False,
    kills=(
        "act.py:last_state_alone",
        "act.py:weights_divided_by_their_sum",
        "act.py:equal_weights",
        "act.py:softmax_of_halting",
        "act.py:stick_breaking",
        "act_loop.py:last_state_alone",
        "act_loop.py:always_the_first",
    ),
)
def weights_are_halting_then_what_is_left(act: Subject, case: Case) -> None:
    """Each step before the last has its halting as its weight, the last one the remainder, later ones exactly 0."""
    if not proper(case):
        return
    weights, n = weights_of(act, case)
    remainder, numbers = halted(act, case).remainder, np.arange(1, size(case) + 1)
    last, later = numbers == n[..., None], numbers > n[..., None]
    wanted = np.where(last, remainder[..., None], np.where(later, 0.0, halting_of(case)))
    left = np.where(last, left_error(n, act.precision)[..., None] + act.precision.u_out * np.abs(wanted), 0.0)
    expect_close(weights.value, wanted, np.where(later, 0.0, weights.allowed + left), what="the weight of a step")


@law(
    BOTH,
    case=halting_cases(examples=20),
    source="P99, B151, B153",
    relative=False,
    kills=(
        "act.py:square_root_of_a_mean_of_squares",
        "act.py:precedence_slip",
        "act_loop.py:always_the_first_state",
        "act_loop.py:first_input_added",
        "act_loop.py:first_position_for_all",
        "act_loop.py:running_positions_frozen",
    ),
)
def mean_is_that_of_the_recorded_states(act: Subject, case: Case) -> None:
    """The output is the sum of the recorded states, each times the weight that unit states show for its step."""
    if not proper(case):
        return
    (weights, _), states, off = weights_of(act, case), states_of(case), state_error(act, case)
    seen, p = weights.value[..., None], act.precision
    error = (weights.allowed[..., None] * np.abs(states) + np.abs(seen) * off).sum(-2)
    error = error + share(size(case), p) * (np.abs(seen * states)).sum(-2) + tiny(size(case), p)
    expect_close(halted(act, case).out, (seen * states).sum(-2), error, what="the mean")


@law(
    BOTH,
    case=halting_cases(examples=16),
    source="P99",
    relative=False,
    kills=(
        "act.py:state_after_each_step",
        "act.py:no_remainder_at_the_limit",
        "act_loop.py:mean_begins_with_the_state",
    ),
)
def mean_lies_among_the_states(act: Subject, case: Case) -> None:
    """No channel of the output leaves the range of the states up to the halting step."""
    if not proper(case):
        return
    found = halted(act, case)
    counts = (np.arange(1, size(case) + 1) <= found.n[..., None])[..., None]
    low, high = np.where(counts, states_of(case), np.inf).min(-2), np.where(counts, states_of(case), -np.inf).max(-2)
    expect_between(found.out, low, high, mean_error(act, case, found.n), what="the mean")


@law(
    BOTH,
    case=halting_cases(least=2, speeds=("uniform", "mixed", "tiny", "ties", "constant"), examples=16),
    short=choice(1.0, 0.5),
    source="P104, B157",
    relative=False,
    kills=(
        "act.py:first_step_weighs_its_halting",
        "act.py:steps_from_zero",
        "act.py:remainder_zero_at_once",
        "act_loop.py:halting_of_the_step_before",
    ),
)
def a_certain_first_step_is_all(act: Subject, case: Case, short: float) -> None:
    """Where the first step reaches the threshold, N = 1, R = 1 and the output is the first state, to the bit."""
    if not proper(case):
        return
    halting = halting_of(case).copy()
    halting[..., 0] = 1 - case["epsilon"] * (1 - short)
    certain = with_halting(case, halting)
    at_once = steps_of(act, certain)[1] == 1
    found = halted(act, certain)
    expect_same(found.steps[at_once], np.ones(at_once.sum()), what="steps")
    expect_same(found.remainder[at_once], np.ones(at_once.sum()), what="remainder")
    first, off = (a[..., 0, :][at_once] for a in (states_of(certain), state_error(act, certain)))
    expect_close(found.out[at_once], first, off, what="the output")


@law(
    BOTH,
    case=halting_cases(examples=16),
    source="P104",
    relative=False,
    kills=(
        "act.py:steps_of_the_limit_are_zero",
        "act.py:state_before_each_step",
        "act_loop.py:one_step_short",
    ),
)
def without_halting_the_last_state_is_all(act: Subject, case: Case) -> None:
    """Where halting is 0 throughout, N = M, R = 1 and the output is the last state, to the bit."""
    if not proper(case):
        return
    never = with_halting(case, np.zeros(halting_of(case).shape))
    found, last, off = halted(act, never), states_of(never)[..., -1, :], state_error(act, never)[..., -1, :]
    expect_same(found.steps, np.full(found.steps.shape, float(size(case))), what="steps")
    expect_same(found.remainder, np.ones(found.steps.shape), what="remainder")
    expect_close(found.out, last, off, what="the output")


@law(
    BOTH,
    case=halting_cases(least=2, speeds=("mixed", "uniform", "ties", "beyond", "ones_and_zeros"), examples=16),
    filler=choice(0.0, 1.0, -300.0),
    source="P105, R65, B158",
    relative=False,
    changes=("leak",),
    kills=(
        "act.py:last_state_of_all_added",
        "act.py:halted_positions_updated_again",
        "act.py:runs_until_the_last_position",
    ),
)
def what_follows_the_last_step_has_no_influence(act: Subject, case: Case, filler: float) -> None:
    """Other states and other halting after the step at which a position surely halts change nothing there."""
    if not proper(case):
        return
    _, latest = steps_of(act, case)
    expect_unmoved(act, case, with_another_end(case, latest, filler), latest < size(case))


@law(
    BOTH,
    case=halting_cases(least=2, speeds=("mixed", "uniform", "ties", "beyond", "ones_and_zeros"), examples=12),
    filler=choice(np.nan, np.inf, -np.inf),
    needs={"nan_contained"},
    source="P105",
    relative=False,
    kills=(
        "act.py:multiplied_by_zero",
        "act_loop.py:multiplied_by_zero",
    ),
)
def nan_after_the_last_step_stays_there(act: Subject, case: Case, filler: float) -> None:
    """NaN and infinity in states after the step at which a position surely halts reach no result of it."""
    if not proper(case):
        return
    _, latest = steps_of(act, case)
    numbers = with_another_end(case, latest, 0.0)
    expect_unmoved(act, numbers, with_another_end(case, latest, filler), latest < size(case))


@law(
    BOTH,
    case=halting_cases(least=2, examples=16),
    which=choice(0, 1, 2),
    needs={SINGLE},
    source="dual of P105",
    relative=False,
    kills=("act.py:states_clipped",),
)
def states_that_count_have_influence(act: Subject, case: Case, which: int) -> None:
    """Another state at a step that has a weight moves every channel of the output."""
    if not proper(case):
        return
    weights, _ = weights_of(act, case)
    heavy = np.argsort(-weights.value, axis=-1, kind="stable")[..., min(which, size(case) - 1)]
    place = np.arange(size(case)) == heavy[..., None]
    states = states_of(case)
    peak = np.abs(states).max((-1, -2), keepdims=True)
    name = STATES[case.operation]
    driven = case[name][..., : size(case), :]
    other = np.concatenate([driven + np.where(place[..., None], 1 + peak, 0), case[name][..., size(case) :, :]], -2)
    seen = np.take_along_axis(weights.value, heavy[..., None], -1)[..., 0] > 1 / 64
    before, after = (halted(act, one).out[seen] for one in (case, case.with_arrays(**{name: other})))
    expect_different(after, before, what="the state of a step with a weight changed")


@law(
    BOTH,
    case=halting_cases(least=2, speeds=("mixed", "beyond", "ties", "uniform", "ones"), examples=12),
    steps=choice(1, 3, 8),
    source="P105",
    relative=False,
    kills=(
        "act.py:last_state_of_all_added",
        "act.py:threshold_falls_with_the_limit",
        "act.py:read_backwards",
        "act_loop.py:steps_count_calls",
    ),
)
def more_room_changes_nothing(act: Subject, case: Case, steps: int) -> None:
    """A position that halts by itself has the same results however many more steps there might be."""
    if proper(case):
        # a sum over more steps may be grouped otherwise
        expect_unmoved(act, case, lengthened(case, steps), halts_by_itself(act, case), exact=False)


@law(
    BOTH,
    case=halting_cases(rows=2, examples=16),
    source="P106, R67",
    relative=False,
    changes=("leak",),
    kills=(
        "act.py:mean_over_positions",
        "act.py:summed_over_positions",
        "act.py:steps_of_the_first_position",
        "act_loop.py:mean_over_positions",
        "act_loop.py:stops_with_most",
    ),
)
def positions_are_independent(act: Subject, case: Case) -> None:
    """No result of a position depends on the others, nor on which of them halts last."""
    if proper(case):
        changed, kept = with_other_positions(case)
        expect_unmoved(act, case, changed, kept)


@law(
    BOTH,
    case=halting_cases(rows=2, examples=12),
    source="P106, R67",
    changes=("batch_invariant",),
    kills=(
        "act.py:positions_beyond_four_untouched",
        "act.py:stops_with_the_first_position",
        "act_loop.py:runs_until_the_last_position",
    ),
)
def position_alone_is_the_position_in_its_batch(act: Subject, case: Case) -> None:
    """A position alone has the results that it has among others; bit for bit if batch_invariant."""
    shape = halting_of(case).shape[:-1]
    count = int(np.prod(shape))
    bounds = act.bounds(case)
    among = [array.reshape(count, *array.shape[len(shape) :]) for array in act(case)]
    for row in np.unique([0, count // 2, count - 1]):
        alone = {n: array.reshape(count, *array.shape[len(shape) :])[row] for n, array in case.arrays.items()}
        for name, one, other, bound in zip(
            act.results_for(case), act(case.with_arrays(**alone)), among, bounds, strict=True
        ):
            allowed = 2 * bound.allowed.reshape(other.shape)[row]
            expect_close(one, other[row], 0.0 if act.capabilities.batch_invariant else allowed, what=name)


@law(
    BOTH,
    case=halting_cases(examples=12),
    factor=choice(2.0, -1.0),
    source="linear in the states",
    relative=False,
    kills=(
        "act.py:states_rounded",
        "act.py:states_clipped",
    ),
)
def mean_scales_with_the_states(act: Subject, case: Case, factor: float) -> None:
    """States times 2 or -1 give the output times that, and the same steps and remainders, to the bit."""
    if not proper(case):
        return
    names = ("states",) if case.operation == ACT else ("state", "step.drive")
    scaled = case.with_arrays(**{name: case[name] * factor for name in names})
    one, other = halted(act, case), halted(act, scaled)
    underflow = 0.0 if factor == -1 else (size(case) + C) * tiny(size(case), act.precision)
    expect_close(other.out, one.out * factor, underflow, what="the output")
    expect_same(other.steps, one.steps, what="steps")
    expect_same(other.remainder, one.remainder, what="remainder")


@law(
    BOTH,
    case=halting_cases(widths=(2, 100), examples=12),
    source="each channel by itself",
    relative=False,
    changes=("leak",),
    kills=("act.py:states_centred",),
)
def channels_are_independent(act: Subject, case: Case) -> None:
    """A channel of the output depends on that channel of the states alone, and steps and remainder on none."""
    if not proper(case) or case.size("d") < 2:
        return
    kept = np.arange(case.size("d")) % 2 == 0
    names = ("states",) if case.operation == ACT else ("state", "step.drive")
    changed = case.with_arrays(**{name: np.where(kept, case[name], 3 - 2 * case[name][..., ::-1]) for name in names})
    before, after = halted(act, case), halted(act, changed)
    expect_same(after.steps, before.steps, what="steps")
    expect_same(after.remainder, before.remainder, what="remainder")
    if act.capabilities.leak == "exact":
        expect_same(after.out[..., kept], before.out[..., kept], what="an unchanged channel")
    else:
        allowed = 2 * mean_error(act, case, before.n)[..., kept]
        expect_close(after.out[..., kept], before.out[..., kept], allowed, what="an unchanged channel")
