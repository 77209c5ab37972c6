"""The reference of adaptive computation time: worked numbers, scalar loops, frameworks, gradients, edges, errors."""

import itertools

import array_api_strict as strict
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from veriformer.reference import (
    act_loop,
    adaptive_computation_time,
    halting_weights,
    ponder_cost,
    recurrent_act,
)

pytestmark = pytest.mark.filterwarnings("error")
SEARCH = settings(max_examples=150, deadline=None, database=None, derandomize=True)
FRAMEWORKS = [np.asarray, strict.asarray, torch.tensor]
LADDER = (0.0, 1e-12, 0.99, 0.5, 0.995, 1.0)
"""Halting probabilities: none, tiny, exactly the threshold, a half, beyond the threshold, certain."""
COMPARISONS = ("at_least", "above")


def by_hand(halting, epsilon, comparison):
    """p, N and R of one row, one step after another."""
    total, p = 0.0, []
    for n, h in enumerate(halting, start=1):
        before, total = total, total + h
        reached = total > 1 - epsilon if comparison == "above" else total >= 1 - epsilon
        if reached or n == len(halting):
            left = 1 - before
            return [*p, left] + [0.0] * (len(halting) - n), n, left
        p.append(h)
    raise AssertionError


@st.composite
def cases(draw):
    """halting[…,M], states[…,M,d], epsilon."""
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    lead, steps = draw(st.sampled_from([(), (3,), (2, 3), (0,)])), draw(st.integers(1, 7))
    halting = generator.random((*lead, steps)) * draw(st.sampled_from([1.0, 0.5, 0.1, 0.0]))
    if draw(st.booleans()):
        halting = generator.choice(LADDER, (*lead, steps))
    states = generator.standard_normal((*lead, steps, draw(st.integers(1, 4))))
    for array in (halting, states):
        array.flags.writeable = False
    return halting, states, draw(st.sampled_from([0.01, 0.0, 0.25, 0.9]))


# worked numbers


@pytest.mark.parametrize(
    ("constant", "steps", "remainder"),
    [(0.3, 4, 0.1), (0.25, 4, 0.25), (0.5, 2, 0.5), (0.05, 20, 0.05), (0.995, 1, 1.0), (0.0, 50, 1.0)],
)
def test_constant_halting(constant, steps, remainder):
    weights, found, left = halting_weights(np.full((2, 50), constant))
    np.testing.assert_array_equal(found, [steps, steps])
    np.testing.assert_allclose(left, [remainder] * 2, rtol=1e-14)
    np.testing.assert_allclose(weights.sum(-1), [1, 1], rtol=1e-15)


def test_a_sum_exactly_on_the_threshold_stops_unless_it_must_lie_above():
    halting = np.asarray([[0.5, 0.25, 0.25, 1.0], [0.75, 0.0, 0.25, 1.0], [0.5, 0.125, 0.5, 1.0]])
    np.testing.assert_array_equal(halting_weights(halting, epsilon=0.25)[1], [2, 1, 3])
    np.testing.assert_array_equal(halting_weights(halting, epsilon=0.25, comparison="above")[1], [3, 3, 3])


def test_the_sum_is_compared_and_not_the_remainder():
    """1 - .5 - .49 is .010000000000000009, above .01; .5 + .49 is the same number as 1 - .01."""
    assert halting_weights(np.asarray([0.5, 0.49, 0.5]))[1] == 2
    assert halting_weights(np.asarray([0.5, 0.49, 0.5]), comparison="above")[1] == 3


def test_effective_weights():
    np.testing.assert_allclose(halting_weights(np.asarray([0.5, 0.6]))[0], [0.5, 0.5], rtol=1e-15)
    np.testing.assert_allclose(halting_weights(np.full(10, 0.1))[0], np.full(10, 0.1), rtol=1e-14)
    np.testing.assert_allclose(halting_weights(np.full(3, 0.1))[0], [0.1, 0.1, 0.8], rtol=1e-15)


def test_nothing_below_the_resolution_of_floats_keeps_the_loop_from_ending():
    _, steps, remainder = halting_weights(np.full(9, 1e-300))
    assert (steps, remainder) == (9, 1.0)


# against a scalar loop and other frameworks


@pytest.mark.parametrize("comparison", COMPARISONS)
@pytest.mark.parametrize("steps", range(1, 7))
def test_weights_equal_the_scalar_loop_on_the_ladder(steps, comparison):
    halting = np.asarray(list(itertools.product(LADDER, repeat=steps)))[:: 1 if steps < 5 else 7]
    for epsilon in (0.01, 0.0, 0.5):
        found = halting_weights(halting, epsilon=epsilon, comparison=comparison)
        wanted = [by_hand(row, epsilon, comparison) for row in halting.tolist()]
        for got, column in zip(found, zip(*wanted, strict=True), strict=True):
            np.testing.assert_array_equal(got, np.asarray(column))


@SEARCH
@given(cases(), st.sampled_from(COMPARISONS))
def test_equals_the_scalar_loop(case, comparison):
    halting, states, epsilon = case
    out, steps, remainder = adaptive_computation_time(halting, states, epsilon=epsilon, comparison=comparison)
    assert steps.dtype == np.int64
    for row in np.ndindex(halting.shape[:-1]):
        p, n, left = by_hand(halting[row].tolist(), epsilon, comparison)
        mean = [sum(p[k] * s for k, s in enumerate(channel)) for channel in states[row].T.tolist()]
        np.testing.assert_allclose(out[row], mean, rtol=0, atol=1e-14)
        assert (steps[row], remainder[row]) == (n, left)


@SEARCH
@given(cases(), st.sampled_from(COMPARISONS))
def test_frameworks_agree(case, comparison):
    halting, states, epsilon = case
    words = {"epsilon": epsilon, "comparison": comparison}
    wanted = adaptive_computation_time(halting, states, **words)
    for convert in FRAMEWORKS[1:]:
        found = adaptive_computation_time(convert(halting), convert(states), **words)
        for got, right in zip(found, wanted, strict=True):
            np.testing.assert_allclose(np.asarray(got), right, rtol=0, atol=1e-14)
        assert found[1].dtype in (strict.int64, torch.int64)


@SEARCH
@given(cases())
def test_weights_are_a_distribution_and_follow_the_step_law(case):
    halting, _, epsilon = case
    p, steps, remainder = halting_weights(halting, epsilon=epsilon)
    np.testing.assert_allclose(p.sum(-1), np.ones(steps.shape), rtol=0, atol=1e-15)
    assert (p >= 0).all() and (1 <= steps).all() and (steps <= halting.shape[-1]).all()
    assert (remainder > epsilon).all() and (remainder[steps == 1] == 1).all()
    cost = steps + remainder
    assert (cost <= halting.shape[-1] + 1).all() and (cost[steps == 1] == 2).all()


# gradients


def gradients(halting, states, result):
    halting, states = (torch.tensor(a, dtype=torch.float64, requires_grad=True) for a in (halting, states))
    found = adaptive_computation_time(halting, states)[result]
    return torch.autograd.grad(found.sum(), (halting, states), allow_unused=True)


def test_gradcheck():
    generator = torch.Generator().manual_seed(0)
    halting = torch.rand((2, 3, 5), dtype=torch.float64, generator=generator) * 0.6
    halting[0, 0, 0], halting[0, 1] = 1.0, 0.01
    states = torch.randn((2, 3, 5, 2), dtype=torch.float64, generator=generator)
    halting.requires_grad_(), states.requires_grad_()
    assert torch.autograd.gradcheck(lambda h, s: adaptive_computation_time(h, s)[::2], (halting, states))


def test_gradient_of_the_remainder_is_minus_one_before_the_last_step():
    halting = [[0.3, 0.3, 0.5, 0.3], [1.0, 0.2, 0.2, 0.2], [0.1, 0.1, 0.1, 0.1]]
    by_halting, by_states = gradients(halting, np.ones((3, 4, 1)), 2)
    np.testing.assert_array_equal(by_halting, [[-1, -1, 0, 0], [0, 0, 0, 0], [-1, -1, -1, 0]])
    assert by_states is None


def test_gradient_of_the_mean_is_the_difference_to_the_last_state():
    states = np.asarray([[[1.0], [2.0], [4.0], [8.0]]] * 2)
    by_halting, by_states = gradients([[0.3, 0.3, 0.5, 0.3], [1.0, 0.2, 0.2, 0.2]], states, 0)
    np.testing.assert_array_equal(by_halting, [[-3, -2, 0, 0], [0, 0, 0, 0]])
    np.testing.assert_allclose(by_states[..., 0], [[0.3, 0.3, 0.4, 0], [1, 0, 0, 0]], rtol=1e-15)


def test_gradient_of_the_ponder_cost_by_a_bias_is_not_positive():
    bias = torch.tensor(-1.0, dtype=torch.float64, requires_grad=True)
    halting = torch.sigmoid(torch.linspace(-2, 2, 5, dtype=torch.float64).flip(0) * 0.3 + bias)
    _, steps, remainder = halting_weights(halting)
    (slope,) = torch.autograd.grad(ponder_cost(steps, remainder), bias)
    before = halting[: int(steps) - 1].detach()
    np.testing.assert_allclose(slope, -(before * (1 - before)).sum(), rtol=1e-14)


def test_what_comes_after_the_last_step_does_not_matter():
    halting, states = np.asarray([[0.5, 0.5, 0.5]] * 2), np.ones((2, 3, 2))
    wrecked = halting.copy(), states.copy()
    wrecked[0][:, 2], wrecked[1][:, 2] = [np.nan, np.inf], np.nan
    for got, right in zip(adaptive_computation_time(*wrecked), adaptive_computation_time(halting, states), strict=True):
        np.testing.assert_array_equal(got, right)
    for got, right in zip(gradients(*wrecked, 0), gradients(halting, states, 0), strict=True):
        np.testing.assert_array_equal(got, right)


# the loop


def halver(drive, halting):
    """step(state, n): half the state and what is due at n."""
    return lambda state, n: (state / 2 + drive[..., n - 1, :], halting[..., n - 1])


@pytest.mark.parametrize("convert", FRAMEWORKS)
def test_loop_is_the_mean_of_the_recorded_states(convert):
    generator = np.random.default_rng(3)
    drive, halting, state = generator.normal(size=(2, 5, 3)), generator.random((2, 5)) * 0.5, np.ones((2, 3))
    states = []
    for n in range(5):
        state = state / 2 + drive[:, n]
        states.append(state)
    wanted = adaptive_computation_time(halting, np.stack(states, axis=1))
    found = act_loop(halver(convert(drive), convert(halting)), convert(np.ones((2, 3))), max_steps=5)
    for got, right in zip(found, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(got), right, rtol=0, atol=1e-15)


def test_loop_counts_from_one_and_makes_every_step():
    seen = []

    def step(state, n):
        seen.append(n)
        return state + 1, np.ones(2)

    out, steps, remainder = act_loop(step, np.zeros((2, 1)), max_steps=3)
    assert seen == [1, 2, 3]
    np.testing.assert_array_equal(out, [[1], [1]])
    np.testing.assert_array_equal((steps, remainder), [[1, 1], [1, 1]])


def test_loop_of_one_step_is_that_step():
    out, steps, remainder = act_loop(lambda s, n: (3 * s, np.zeros(())), np.asarray([2.0]), max_steps=1)
    assert (out, steps, remainder) == (6.0, 1, 1.0)


# the recurrent network


def cell(halting):
    """s' = s/2 + x, marked by the flag; y = -s'; halting by a function of the flag."""

    def make(state, seen):
        x, flag = seen[..., :-1], seen[..., -1:]
        after = state / 2 + x + 10 * flag
        return after, -after[..., :1], halting(flag[..., 0])

    return make


@pytest.mark.parametrize("convert", FRAMEWORKS)
def test_recurrent_network_that_halts_at_once_is_the_plain_one(convert):
    generator = np.random.default_rng(4)
    x, state = generator.normal(size=(2, 3, 4)), generator.normal(size=(2, 4))
    y, last, steps, remainder = recurrent_act(cell(lambda flag: flag), convert(x), convert(state), max_steps=5)
    for t in range(3):
        state = state / 2 + x[:, t] + 10
        np.testing.assert_allclose(np.asarray(y)[:, t], -state[:, :1], rtol=1e-14)
    np.testing.assert_allclose(np.asarray(last), state, rtol=1e-14)
    np.testing.assert_array_equal(np.asarray(steps), np.ones((2, 3)))
    np.testing.assert_array_equal(np.asarray(remainder), np.ones((2, 3)))


def test_recurrent_network_flags_the_first_look_and_goes_on_with_the_averaged_state():
    x, state = np.asarray([[1.0], [2.0]]), np.asarray([4.0])
    y, last, steps, remainder = recurrent_act(cell(lambda flag: 0 * flag + 0.4), x, state, max_steps=3)
    for t in range(2):
        thought = []
        for n in range(3):
            state = state / 2 + x[t] + (10 if n == 0 else 0)
            thought.append(state)
        state = 0.4 * thought[0] + 0.4 * thought[1] + 0.2 * thought[2]
        np.testing.assert_allclose(y[t], -state, rtol=1e-14)
    np.testing.assert_allclose(last, state, rtol=1e-14)
    np.testing.assert_array_equal(steps, [3, 3])
    np.testing.assert_allclose(remainder, [0.2, 0.2], rtol=1e-14)


# the ponder cost


@pytest.mark.parametrize("convert", FRAMEWORKS)
def test_ponder_cost(convert):
    steps, remainder = convert(np.asarray([[2, 3], [1, 4]])), convert(np.asarray([[0.5, 0.25], [1.0, np.inf]]))
    mask = convert(np.asarray([[True, True], [True, False]]))
    assert float(ponder_cost(steps, remainder, mask=mask)) == 7.75
    assert float(ponder_cost(steps, remainder, mask=mask, tau=0.01)) == pytest.approx(0.0775)
    assert float(ponder_cost(steps, remainder, mask=mask, reduction="mean")) == pytest.approx(7.75 / 3)
    assert float(ponder_cost(steps, remainder)) == np.inf
    none = convert(np.zeros((2, 2), bool))
    assert float(ponder_cost(steps, remainder, mask=none, reduction="mean")) == 0
    assert ponder_cost(steps, remainder).dtype == remainder.dtype


# errors


@pytest.mark.parametrize("epsilon", [-0.01, 1.0, 2.0, np.nan])
def test_epsilon_out_of_range_is_an_error(epsilon):
    with pytest.raises(ValueError, match=r"epsilon: got .*, wanted a number in \[0, 1\)"):
        halting_weights(np.ones((2, 3)), epsilon=epsilon)


def test_no_step_is_an_error():
    for halting in (np.ones((2, 0)), np.ones(())):
        with pytest.raises(ValueError, match=r"halting: got shape .*, wanted at least one step"):
            halting_weights(halting)
    with pytest.raises(ValueError, match="max_steps: got 0, wanted at least 1"):
        act_loop(lambda state, n: (state, state), np.ones(2), max_steps=0)
    with pytest.raises(ValueError, match="wanted at least one input"):
        recurrent_act(cell(lambda flag: flag), np.ones((0, 1)), np.ones(1), max_steps=2)


def test_another_comparison_is_an_error():
    with pytest.raises(ValueError, match="comparison: got 'ge', wanted 'at_least' or 'above'"):
        halting_weights(np.ones(3), comparison="ge")


@pytest.mark.parametrize("shape", [(2, 3), (3, 2, 4), (2, 1, 4), (1, 2, 3, 4), (3, 4)])
def test_states_that_do_not_fit_are_an_error(shape):
    with pytest.raises(ValueError, match=r"states: got shape .*, wanted \(2, 3\) and an axis more"):
        adaptive_computation_time(np.ones((2, 3)), np.ones(shape))


def test_ponder_cost_refuses_what_does_not_fit():
    steps, one = np.ones((2, 3), np.int64), np.ones((2, 3))
    with pytest.raises(ValueError, match="remainder: got shape"):
        ponder_cost(steps, one[:1])
    with pytest.raises(ValueError, match="mask: got shape"):
        ponder_cost(steps, one, mask=np.ones(3, bool))
    with pytest.raises(ValueError, match="reduction: got 'none'"):
        ponder_cost(steps, one, reduction="none")
