"""Statistics of precision: honest kernels keep their claims on dense data, and what they detect they name."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from judging import FUSED, plain, stored, tensor

from veriformer import budgets
from veriformer.budgets import Bound, Precision
from veriformer.budgets.claims import (
    GAIN_LIMIT,
    Claim,
    effective_bits,
    judge_claim,
    precision_name,
    rms_ratio,
    rounded_at_random,
    systematic_gain,
)
from veriformer.declarations import DTYPES

SEEDS = range(12)


def nearest(x, unit):
    """x rounded to nearest at a unit roundoff."""
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.round(mantissa / unit) * unit, exponent)


# --- the statistics -------------------------------------------------------------------------------


def test_rms_ratio_at_its_edges():
    one = np.ones(4)
    assert rms_ratio(2 * one, one) == 2 and rms_ratio(0 * one, 0 * one) == 0 and rms_ratio(one, 0 * one) == np.inf
    assert rms_ratio(np.array([np.nan, 0.0]), np.ones(2)) == np.inf
    assert rms_ratio(np.array([np.nan, 1.0]), np.array([np.inf, 1.0])) == 1  # undetermined does not count


def test_a_common_factor_is_seen_long_before_it_is_larger_than_the_errors():
    rng = np.random.default_rng(5)
    value, sigma = rng.normal(size=10**4), np.full(10**4, 0.01)
    noise = rng.normal(size=10**4) * sigma
    assert abs(systematic_gain(noise, value, sigma)) < 3
    assert systematic_gain(noise + 0.001 * value, value, sigma) > GAIN_LIMIT
    assert systematic_gain(noise - 0.001 * value, value, sigma) < -GAIN_LIMIT
    assert rms_ratio(noise + 0.001 * value, sigma) < 1.02
    assert systematic_gain(value * np.nan, value, sigma) == np.inf
    assert systematic_gain(0 * value, value, 0 * sigma) == 0 and systematic_gain(value, value, 0 * sigma) == np.inf


@pytest.mark.parametrize("bits", [8, 11, 17, 24])
def test_a_kernel_that_rounds_inputs_and_results_is_read_at_that_precision(bits):
    x, w = np.random.default_rng(2).normal(size=(64, 48)), np.random.default_rng(3).normal(size=(48, 40))
    computed = nearest(nearest(x, 2.0**-bits) @ nearest(w, 2.0**-bits), 2.0**-bits)
    response = rounded_at_random(rounded_at_random(x, 0) @ rounded_at_random(w, 1), 2) - x @ w
    assert effective_bits(computed - x @ w, response) == pytest.approx(-bits, abs=0.15)


def test_effective_bits_at_their_edges():
    one = np.ones(3)
    assert effective_bits(0 * one, one) == -np.inf and math.isnan(effective_bits(one, 0 * one))
    assert effective_bits(one * np.inf, one) == np.inf


@pytest.mark.parametrize(
    ("bits", "name"), [(-8.4, "bfloat16"), (-11.5, "float16 or tf32"), (-23.0, "float32"), (-16.0, ""), (-4.0, "")]
)
def test_the_nearest_dtype_is_named_only_if_it_is_near(bits, name):
    assert precision_name(bits) == name


def test_rounding_at_random_is_as_large_as_rounding():
    x = np.random.default_rng(4).normal(size=10**4)
    moved, rounding = rounded_at_random(x, 1) - x, nearest(x, 2.0**-24) - x
    assert np.abs(moved / x).max() <= 2.0**-24 and (rounded_at_random(np.zeros(3), 1) == 0).all()
    assert np.sqrt((moved**2).mean()) == pytest.approx(np.sqrt((rounding**2).mean()), rel=0.05)


def test_a_claim_says_what_it_is():
    claim = Claim(rms=122.0, gain=2.0, factor=1.0, bits=-11.4, declared=-24.0)
    assert not claim.holds and claim.message.startswith(
        "behaves like u = 2^-11.4 (float16 or tf32), declared 2^-24.0 (float32): root mean square of the errors 1.2e+02"
    )
    off = Claim(rms=0.5, gain=-9.0, factor=0.999, bits=-9.0, declared=-8.0)
    assert not off.holds and "results 0.999 times as large" in off.message and "root mean" not in off.message
    assert Claim(1.0, 6.0, 1.0, -24.0, -24.0).holds


# --- honest kernels -------------------------------------------------------------------------------


def dense(op, seed, dtype):
    """The arrays of one case, the kernel of torch and the budget, as functions of arrays and a precision."""
    rng = np.random.default_rng([seed, len(op)])
    n = (16, 64, 300)[seed % 3]
    normal = lambda *shape: rng.normal(size=shape)  # noqa: E731
    table = {
        "softmax": ([normal(2000 // n + 8, n)], lambda x: F.softmax(x, -1), budgets.softmax),
        "log_softmax": ([normal(2000 // n + 8, n)], lambda x: F.log_softmax(x, -1), budgets.log_softmax),
        "logsumexp": ([normal(1500, n)], lambda x: torch.logsumexp(x, -1), budgets.logsumexp),
        "layer_norm": (
            [normal(2000 // n + 8, n), 1 + normal(n) / 10, normal(n) / 10],
            lambda x, w, b: F.layer_norm(x, w.shape, w, b),
            budgets.layer_norm,
        ),
        "rms_norm": (
            [normal(2000 // n + 8, n), 1 + normal(n) / 10],
            lambda x, w: F.rms_norm(x, w.shape, w, 1e-6),
            budgets.rms_norm,
        ),
        "gelu": ([normal(40, 40) * 10.0 ** -(seed % 3)], F.gelu, budgets.gelu),
        "feed_forward": (
            [normal(2000 // n + 8, n), normal(n, 48) * n**-0.5, normal(48) / 10, normal(48, n) / 7, normal(n) / 10],
            lambda x, w1, b1, w2, b2: F.relu(x @ w1 + b1) @ w2 + b2,
            budgets.feed_forward,
        ),
        "attention": (
            [normal(1, 2, 24, 32), normal(1, 2, n, 32), normal(1, 2, n, 32)],
            F.scaled_dot_product_attention,
            budgets.attention,
        ),
    }
    arrays, kernel, budget = table[op]
    return [stored(a, dtype) for a in arrays], kernel, budget


OPERATIONS = ("softmax", "log_softmax", "logsumexp", "layer_norm", "rms_norm", "gelu", "feed_forward", "attention")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPERATIONS)
def test_kernels_of_torch_keep_their_claim(op, dtype):
    p = Precision(dtype, growth="typical")
    for seed in SEEDS:
        arrays, kernel, budget = dense(op, seed, dtype)
        bound = budget(*arrays, precision=p)
        error = plain(kernel(*(tensor(a, dtype) for a in arrays))) - bound.value
        assert error.size >= 1000 and rms_ratio(error, bound.allowed) <= 1
        assert abs(systematic_gain(error, bound.value, bound.allowed)) <= GAIN_LIMIT


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("op", OPERATIONS)
def test_a_result_that_is_only_rounded_keeps_the_fused_claim(op, dtype):
    """What is left when the inside is exact: the rounding of the result must be within its own size."""
    p = Precision(dtype, **FUSED, growth="typical")
    for seed in SEEDS:
        arrays, _, budget = dense(op, seed, dtype)
        bound = budget(*arrays, precision=p)
        error = stored(bound.value, dtype) - bound.value
        assert 0.4 < rms_ratio(error, bound.allowed) <= 1
        assert abs(systematic_gain(error, bound.value, bound.allowed)) <= GAIN_LIMIT


@pytest.mark.parametrize("op", OPERATIONS)
def test_a_float32_kernel_with_tf32_inputs_is_named(op):
    p = Precision("float32")
    for seed in range(3):
        arrays, kernel, budget = dense(op, seed, "float32")
        got = plain(kernel(*(tensor(nearest(a, 2.0**-11), "float32") for a in arrays)))
        typical = budget(*arrays, precision=Precision("float32", growth="typical"))

        def exact(moved, budget=budget):
            return budget(*moved.values(), precision=p).value

        claim = judge_claim(got, typical, exact, {str(i): a for i, a in enumerate(arrays)}, p)
        assert claim.rms > 3 and not claim.holds
        # logsumexp averages the errors of its inputs away, so that it behaves better than they are
        assert op in ("logsumexp", "log_softmax") or -12.5 < claim.bits < -10.5


def test_what_is_typical_is_less_than_the_worst_case():
    for op in OPERATIONS:
        for dtype in DTYPES:
            arrays, _, budget = dense(op, 1, dtype)
            bounds = [budget(*arrays, precision=Precision(dtype, growth=growth)) for growth in ("worst", "typical")]
            assert all(isinstance(b, Bound) for b in bounds) and (bounds[1].allowed <= bounds[0].allowed).all()
            assert (bounds[1].allowed > 0).all()
