"""The error budgets of adaptive computation time: right kernels keep them, and what roundings may decide is open."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from judging import NUMPY, cases, rounder, stored, work, worst

from veriformer import budgets
from veriformer.budgets import Precision
from veriformer.budgets.halting import margins, undecided
from veriformer.declarations import DTYPES
from veriformer.given_models import GivenStep

INTERMEDIATE = {"fused": "float32", "unfused": "storage"}
SINGLE = Precision("float32")
EPSILONS = (0.01, 0.25, 0.0, 2.0**-6, 0.5, 0.9)


def halting_case(rng, dtype):
    """halting[2,M], states[2,M,3] and epsilon; ties, near ties, slow and fast rows."""
    size = int(rng.integers(1, 13))
    halting = rng.random((2, size)) * rng.choice([1.0, 0.3, 0.05])
    if rng.random() < 0.5:
        halting = rng.choice([0.0, 1 / 8, 1 / 4, 1 / 2, 1.0, 1e-5], (2, size), p=[0.15, 0.25, 0.25, 0.2, 0.1, 0.05])
    if rng.random() < 0.2:
        halting = np.full((2, size), rng.choice([0.1, 0.3, 0.33, 0.495, 0.99, 1.0]))
    states = rng.standard_normal((2, size, 3)) * rng.choice([1e-3, 1.0, 100.0]) + rng.choice([0.0, 50.0])
    return stored(halting, dtype), stored(states, dtype), float(rng.choice(EPSILONS))


def summed(halting, states, rd, epsilon, comparison, tree):
    """The sum of halting, stored after each step or added up in pairs; then one weighted sum."""
    total = [halting[0]]
    for n in range(1, len(halting)):
        total.append(rd(pairwise(halting[: n + 1]) if tree else total[-1] + halting[n]))
    threshold = halting.dtype.type(1 - epsilon)
    threshold = rd(threshold)
    for n, _ in enumerate(halting):
        if (total[n] > threshold if comparison == "above" else total[n] >= threshold) or n == len(halting) - 1:
            break
    left = rd(halting.dtype.type(1) - total[n - 1]) if n else halting.dtype.type(1)
    p = np.append(halting[:n], left)
    terms = [rd(p[k] * states[k]) for k in range(n + 1)]
    return sum(terms[1:], terms[0]), n + 1, left


def pairwise(x):
    """The sum of the even places plus that of the odd ones."""
    return x[0] if len(x) == 1 else pairwise(x[::2]) + pairwise(x[1::2])


def taken_off(halting, states, rd, epsilon, comparison):
    """What is left of 1, step by step, compared with epsilon; the mean as a running sum that is stored."""
    left, bound, out = halting.dtype.type(1), rd(halting.dtype.type(epsilon)), np.zeros_like(states[0])
    for n, h in enumerate(halting):
        after = rd(left - h)
        if (after < bound if comparison == "above" else after <= bound) or n == len(halting) - 1:
            return rd(out + rd(left * states[n])), n + 1, left
        out, left = rd(out + rd(h * states[n])), after
    raise AssertionError


KERNELS = {
    "in order": partial(summed, tree=False),
    "in pairs": partial(summed, tree=True),
    "taken off": taken_off,
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("kind", INTERMEDIATE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_by_hand_stay_within_the_budget(dtype, kind, kernel):
    precision, rd = Precision(dtype, intermediate=INTERMEDIATE[kind]), rounder(dtype, kind == "unfused")
    open_ended = rows = 0
    for rng in cases(150, kind + kernel):
        halting, states, epsilon = halting_case(rng, dtype)
        words = {"epsilon": epsilon, "comparison": str(rng.choice(["at_least", "above"]))}
        found = [
            KERNELS[kernel](h.astype(work(dtype)), s.astype(work(dtype)), rd, **words)
            for h, s in zip(halting, states, strict=True)
        ]
        bounds = budgets.adaptive_computation_time(halting, states, **words, precision=precision)
        for column, bound in zip(zip(*found, strict=True), bounds, strict=True):
            computed = stored(np.asarray(column, dtype=np.float64), dtype)
            assert worst(computed, bound, precision) <= 1, (halting, states, words)
        open_ended, rows = open_ended + np.isinf(bounds[1].allowed).sum(), rows + 2
    assert open_ended < rows * (0.35 if dtype == "bfloat16" else 0.2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_exact_ties_are_decided_and_others_are_not(dtype):
    precision = Precision(dtype)
    ties = np.asarray([[0.5, 0.25, 0.25, 1.0], [0.75, 0.0, 0.25, 1.0], [0.25, 0.25, 0.25, 0.25]])
    assert not undecided(ties, 0.25, precision).any()
    assert not margins(ties, 0.25, precision).any()
    for comparison, steps in (("at_least", [2, 1, 3]), ("above", [3, 3, 4])):
        bounds = budgets.adaptive_computation_time(
            ties, np.ones((3, 4, 1)), epsilon=0.25, comparison=comparison, precision=precision
        )
        np.testing.assert_array_equal(bounds[1].value, steps)
        np.testing.assert_array_equal(bounds[1].allowed, 0)
    near = stored([[0.3, 0.69, 0.5, 0.5], [0.99, 0.1, 0.1, 0.1], [0.3, 0.3, 0.3, 0.09]], dtype)
    np.testing.assert_array_equal(undecided(near, 0.01, precision), [True, True, False])


def test_all_results_of_an_undecided_row_are_open():
    halting = stored([[0.495, 0.495, 0.2], [0.3, 0.3, 0.3]], "float32")
    bounds = budgets.adaptive_computation_time(halting, np.ones((2, 3, 4)), precision=SINGLE)
    for bound in bounds:
        assert np.isinf(bound.allowed[0]).all() and np.isfinite(bound.allowed[1]).all()


def test_a_step_that_halts_for_sure_closes_what_comes_after():
    halting = np.asarray([[1.0, 0.0, 0.99, 0.3], [0.995, 0.99, 0.99, 0.99]])
    assert not undecided(halting, 0.01, SINGLE).any()


def test_the_last_step_is_no_choice():
    assert not undecided(np.asarray([[0.5, 0.49]]), 0.01, SINGLE).any()
    assert not undecided(np.asarray([[0.99]]), 0.01, SINGLE).any()


def test_what_follows_the_last_step_opens_nothing():
    halting = np.asarray([[0.5, 0.5, np.nan, np.inf], [0.5, 0.5, np.inf, 1.0]])
    assert not undecided(halting, 0.01, SINGLE).any()
    states = np.asarray([[[1.0], [2.0], [np.nan], [np.inf]]] * 2)
    bounds = budgets.adaptive_computation_time(halting, states, precision=SINGLE)
    assert all(np.isfinite(bound.allowed).all() and np.isfinite(bound.value).all() for bound in bounds)


def test_halting_outside_of_its_range_has_wider_margins():
    """No implementation is asked for more there than its sums can hold."""
    halting = np.asarray([[300.0, -299.0, 0.5], [0.5, 0.25, 0.125]])
    np.testing.assert_array_equal(margins(halting, 0.25, SINGLE) > 1e-5, [[True] * 3, [False] * 3])


def test_one_step_has_all_of_the_weight():
    bounds = budgets.adaptive_computation_time(np.asarray([[1.0, 0.5]]), np.ones((1, 2, 1)), precision=SINGLE)
    assert (bounds[2].value, bounds[2].allowed) == (1, 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_loop_in_the_dtype_of_its_step_stays_within_the_budget(dtype):
    """In 16 bits the states round at every step, which the mean alone would not be allowed."""
    precision, needed = Precision(dtype), 0.0
    for rng in cases(60, "loop"):
        halting, drive, epsilon = halting_case(rng, dtype)
        state = stored(rng.standard_normal((2, 3)), dtype)
        step, size = GivenStep(drive, halting), halting.shape[-1]
        bounds = budgets.act_loop(step, state, max_steps=size, epsilon=epsilon, precision=precision)
        ours = GivenStep(drive.astype(NUMPY[dtype]), halting.astype(NUMPY[dtype]))
        states, s = [], state.astype(NUMPY[dtype])
        for n in range(1, size + 1):
            s, _ = ours(s, n)
            states.append(s.astype(work(dtype)))
        made = np.stack(states, axis=1)
        for row in range(2):
            out, steps, left = summed(
                halting[row].astype(work(dtype)), made[row], lambda x: x, epsilon, "at_least", False
            )
            for computed, bound in zip((out, steps, left), bounds, strict=True):
                got = stored(np.asarray(computed, np.float64), dtype)
                one = budgets.Bound(bound.value[row], bound.allowed[row], {})
                assert worst(got, one, precision) <= 1, (halting, drive, state, epsilon)
        alone = budgets.adaptive_computation_time(
            halting, made.astype(np.float64), epsilon=epsilon, precision=precision
        )
        needed = max(needed, float(np.nanmax(np.abs(alone[0].value - bounds[0].value) / alone[0].allowed)))
    assert dtype == "float64" or needed > 0.3
