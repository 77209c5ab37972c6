"""The allowance of models without a weight map."""

from __future__ import annotations

import numpy as np
import pytest
from reference_models import VOCABULARY, converted, random_lm

from veriformer import reference
from veriformer.budgets.opaque import COARSEST, NOISE, UNIT, UNITS, opaque_allowance
from veriformer.declarations import DTYPES


@pytest.mark.parametrize("dtype", DTYPES)
def test_units_of_the_largest_logit_are_allowed_whatever_the_noise(dtype):
    logits = np.array([[[0.5, -3.0], [1.0, 0.0]]])
    allowed = opaque_allowance(logits, dtype, coarsest=dtype)
    assert allowed.shape == logits.shape and allowed.dtype == np.float64
    assert np.all(allowed == UNITS[dtype] * UNIT[dtype] * 3.0)


def test_float64_counts_as_float32_unless_it_is_said_to_hold_throughout():
    logits = np.ones((1, 2, 3))
    assert COARSEST == {"float64": "float32"}
    assert np.all(opaque_allowance(logits, "float64") == opaque_allowance(logits, "float32"))
    assert np.all(opaque_allowance(logits, "float64", coarsest="float64") < 1e-12)


def test_noise_counts_where_it_is_larger():
    logits = np.ones((1, 2, 3))
    assert np.all(opaque_allowance(logits, "float32", 1.0) == NOISE)
    assert np.all(opaque_allowance(logits, "float32", 1e-30) == opaque_allowance(logits, "float32"))


def test_what_is_not_finite_has_no_part_in_the_largest_logit_and_noise_that_is_not_finite_allows_everything():
    assert np.all(opaque_allowance(np.array([[np.nan, np.inf, 1.0]]), "float32") == UNITS["float32"] * UNIT["float32"])
    assert np.all(opaque_allowance(np.ones((1, 2)), "float32", np.nan) == np.inf)
    assert np.all(opaque_allowance(np.ones((1, 2)), "float32", np.inf) == np.inf)


def test_no_logits_have_no_allowance():
    assert opaque_allowance(np.zeros((2, 0, 3)), "bfloat16").shape == (2, 0, 3)
    assert np.all(opaque_allowance(np.zeros((1, 3)), "bfloat16") == 0)


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="dtype: got 'int8'.*float64"):
        opaque_allowance(np.ones(3), "int8")
    with pytest.raises(ValueError, match="coarsest: got 'tf32'.*float64"):
        opaque_allowance(np.ones(3), "float32", coarsest="tf32")
    with pytest.raises(ValueError, match=">= 0"):
        opaque_allowance(np.ones(3), "float32", -1.0)


def cached_and_whole(dtype, seed, *, late=0):
    """Logits of the reference's decoder one token at a time, positions `late` from the second on, and at once."""
    tokens = np.random.default_rng(seed).integers(0, VOCABULARY, (2, 9))
    params, cache, parts = converted(lambda array: array.astype(dtype), random_lm(seed, layers=4)), None, []
    for place in range(tokens.shape[1]):
        at = np.full((2, 1), place + (late if place else 0))
        logits, cache = reference.decoder_lm_step(tokens[:, place : place + 1], cache, params, heads=4, at=at)
        parts.append(logits)
    return np.concatenate(parts, axis=1), reference.decoder_lm(tokens, params, heads=4)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_correct_decoder_uses_less_than_a_third_and_a_position_off_by_one_much_more_than_all(dtype, seed):
    parts, whole = cached_and_whole(dtype, seed)
    allowed = opaque_allowance(whole, dtype, coarsest=dtype)
    assert np.abs(parts - whole).max() > 0
    assert np.all(np.abs(parts - whole) < allowed / 3)
    parts, whole = cached_and_whole(dtype, seed, late=1)
    assert np.abs(parts - whole).max() > 10 * allowed.max()
