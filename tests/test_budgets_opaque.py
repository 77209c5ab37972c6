"""The allowance of models without a weight map."""

from __future__ import annotations

import numpy as np
import pytest

from veriformer.budgets.opaque import NOISE, UNIT, UNITS, opaque_allowance
from veriformer.declarations import DTYPES


@pytest.mark.parametrize("dtype", DTYPES)
def test_units_of_the_largest_logit_are_allowed_whatever_the_noise(dtype):
    logits = np.array([[[0.5, -3.0], [1.0, 0.0]]])
    allowed = opaque_allowance(logits, dtype)
    assert allowed.shape == logits.shape and allowed.dtype == np.float64
    assert np.all(allowed == UNITS[dtype] * UNIT[dtype] * 3.0)


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
    with pytest.raises(ValueError, match="int8.*float64"):
        opaque_allowance(np.ones(3), "int8")
    with pytest.raises(ValueError, match=">= 0"):
        opaque_allowance(np.ones(3), "float32", -1.0)
