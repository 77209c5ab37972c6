"""Error budgets at their edges: what is exact, what is undetermined, and how errors are counted."""

from __future__ import annotations

import importlib

import ml_dtypes
import numpy as np
import pytest

from veriformer import budgets
from veriformer.budgets import Precision, error_ratio
from veriformer.declarations import DTYPES, Capabilities

NUMPY = {"float64": np.float64, "float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
FUSED = {"intermediate": "float32", "rounds_probabilities": False}


def stored(x, dtype):
    """x rounded to a dtype, as float64."""
    return np.asarray(x).astype(NUMPY[dtype]).astype(np.float64)


def seeded(*shape):
    return np.random.default_rng(7).normal(size=shape)


def worst(computed, bound, precision):
    ratio = error_ratio(np.asarray(computed, dtype=np.float64), bound.value, bound.allowed, precision.largest)
    return float(ratio.max(initial=0.0))


def test_nothing_is_allowed_where_an_entry_is_absent():
    x, precision = np.array([[0.0, -np.inf, 1.0], [-np.inf] * 3]), Precision("bfloat16")
    probability, logarithm = budgets.softmax(x, precision=precision), budgets.log_softmax(x, precision=precision)
    for bound in (probability, logarithm):
        assert (bound.allowed[x == -np.inf] == 0).all() and (bound.allowed[x > -np.inf] > 0).all()
    assert logarithm.value[0, 1] == -np.inf
    total = budgets.logsumexp(x, precision=precision)
    assert total.allowed[1] == 0 and total.allowed[0] > 0
    assert worst(np.where(x == -np.inf, 1e-30, probability.value), probability, precision) == np.inf


def test_a_probability_that_underflows_may_be_reached_by_a_rounded_logit():
    x, precision = np.array([-1e4, -1e4 - 40.0]), Precision("bfloat16", intermediate="bfloat16")
    bound = budgets.softmax(x, temperature=0.01, precision=precision)
    assert bound.value[1] == 0 and bound.allowed[1] == pytest.approx(1.0)


def test_cold_limit_shares_among_the_largest():
    x, precision = np.array([1.0, 3.0, 3.0]), Precision("float32")
    bound = budgets.softmax(x, temperature=0.0, precision=precision)
    assert bound.value.tolist() == [0, 0.5, 0.5] and bound.allowed[0] == 0 and 0 < bound.allowed[1] < 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
def test_constant_values_and_a_single_key_leave_only_the_rounding_of_the_sums(dtype):
    q, k = stored(seeded(1, 2, 5, 16) * 10, dtype), stored(seeded(1, 2, 6, 16) * 10, dtype)
    precision, v = Precision(dtype), np.full((1, 2, 6, 4), 3.0)
    for bound in (
        budgets.attention(q, k, v, precision=precision),
        budgets.attention(q, k[:, :, :1], v[:, :, :1], precision=precision),
        budgets.attention(q, k, v, window=(0, 0), precision=precision),
    ):
        unit = max(precision.u_acc * 12, precision.u_out * 4)
        assert (bound.allowed <= 3 * unit * 3).all() and (bound.allowed > 0).sum() >= 40


def test_an_empty_row_is_exact_and_hidden_content_costs_nothing():
    q, k, v = seeded(1, 1, 4, 8), seeded(1, 1, 2, 8), seeded(1, 1, 2, 3)
    precision = Precision("float16")
    out, lse = budgets.attention_with_lse(q, k, v, causal=True, sink=np.ones(1), precision=precision)
    assert (out.value[:, :, :2] == 0).all() and (out.allowed[:, :, :2] == 0).all() and (out.allowed[:, :, 2:] > 0).all()
    assert (lse.value[:, :, :2] == -np.inf).all() and (lse.allowed[:, :, :2] == 0).all()
    mask = np.array([True, False])[None, None, None]
    wild_k, wild_v = k.copy(), v.copy()
    wild_k[:, :, 1], wild_v[:, :, 1] = np.nan, np.inf
    tame = budgets.attention_with_lse(q, k[:, :, :1], v[:, :, :1], precision=precision)
    wild = budgets.attention_with_lse(q, wild_k, wild_v, mask=mask, precision=precision)
    for one, other in zip(tame, wild, strict=True):
        np.testing.assert_allclose(other.allowed, one.allowed, rtol=1e-12)


def test_a_bias_of_minus_infinity_hides():
    q, k, v = seeded(1, 1, 3, 4), seeded(1, 1, 5, 4), seeded(1, 1, 5, 2)
    mask = np.random.default_rng(1).random((1, 1, 3, 5)) < 0.5
    precision = Precision("float32")
    hidden = budgets.attention(q, k, v, bias=np.where(mask, 0.0, -np.inf), precision=precision)
    masked = budgets.attention(q, k, v, mask=mask, bias=np.zeros((1, 1, 3, 5)), precision=precision)
    np.testing.assert_allclose(hidden.allowed, masked.allowed, rtol=1e-12)


def test_an_overflowing_score_is_undetermined_only_if_it_may_be_stored():
    q, k, v = np.full((1, 1, 1, 4), 300.0), np.full((1, 1, 2, 4), 300.0), np.ones((1, 1, 2, 2))
    k[..., 1, :] = 200
    stores, fused = Precision("float16"), Precision("float16", **FUSED)
    bound = budgets.attention(q, k, v, scale=1.0, precision=stores)
    assert budgets.undetermined(bound) == 2 and worst(np.full((1, 1, 1, 2), np.nan), bound, stores) == 0
    assert budgets.undetermined(budgets.attention(q, k, v, scale=1.0, precision=fused)) == 0


def test_layer_norm_is_undetermined_where_the_mean_is_not_known():
    x, precision = np.array([[1000.0, 1000.0], [1.0, -1.0]]), Precision("float32")
    bound = budgets.layer_norm(x, np.ones(2), np.zeros(2), eps=1e-12, precision=precision)
    assert np.isinf(bound.allowed[0]).all() and (bound.allowed[1] < 1e-5).all()


def test_long_problems_are_cut_without_a_trace(monkeypatch):
    rng = np.random.default_rng(5)
    q, k, v = rng.normal(size=(1, 2, 9, 8)), rng.normal(size=(1, 1, 7, 8)), rng.normal(size=(1, 1, 7, 3))
    mask = rng.random((1, 2, 9, 7)) < 0.7
    given = {"causal": True, "window": (3, 1), "bias": rng.normal(size=(1, 1, 9, 7)), "mask": mask, "sink": np.ones(2)}
    whole = budgets.attention_with_lse(q, k, v, **given, precision=Precision("float32"))
    # The package's name `attention` is the function, so the module is asked for by its path.
    monkeypatch.setattr(importlib.import_module("veriformer.budgets.attention"), "_BLOCK", 300)
    cut = budgets.attention_with_lse(q, k, v, **given, precision=Precision("float32"))
    for one, other in zip(whole, cut, strict=True):
        np.testing.assert_allclose(other.allowed, one.allowed, rtol=1e-12)
        assert other.terms.keys() == one.terms.keys() and other.terms["sums"].shape == one.value.shape


def test_terms_add_up_and_name_the_dominant_one():
    x = stored(seeded(2, 9) * 5, "float32")
    for bound in (
        budgets.softmax(x, precision=Precision("float32")),
        budgets.log_softmax(x, precision=Precision("bfloat16")),
        budgets.logsumexp(x, precision=Precision("float16")),
        budgets.layer_norm(x, x[0], x[1], precision=Precision("bfloat16")),
        budgets.attention(x[None, None], x[None, None], x[None, None], precision=Precision("float32")),
    ):
        np.testing.assert_allclose(sum(bound.terms.values()), bound.allowed, rtol=1e-12)
    far = budgets.layer_norm(x + 1e4, x[0], x[1], precision=Precision("float32"))
    assert far.dominant((0, 0)) in ("mean", "variance")


def test_the_budget_of_a_relation_is_the_sum_of_both():
    x = stored(seeded(3, 5), "float32")
    one = budgets.softmax(x, precision=Precision("float32"))
    other = budgets.softmax(x + 1, precision=Precision("float32"))
    both = budgets.sum_of(one, other)
    np.testing.assert_array_equal(both.allowed, one.allowed + other.allowed)
    assert both.terms.keys() == one.terms.keys()


# --- ratio and precision --------------------------------------------------------------------------


def test_error_ratio_at_its_edges():
    inf, nan = np.inf, np.nan
    rows = [  # computed, value, allowed, ratio; largest is 100
        (1.0, 1.0, 0.0, 0.0),
        (1.5, 1.0, 1.0, 0.5),
        (1.5, 1.0, 0.0, inf),
        (inf, inf, 0.0, 0.0),
        (-inf, inf, 0.0, inf),
        (nan, nan, 0.0, 0.0),
        (nan, 1.0, 1.0, inf),
        (1.0, nan, 1.0, inf),
        (inf, 1.0, 1.0, inf),
        (-100.0, -inf, 0.0, inf),  # the most negative number is not -inf
        (nan, 1.0, inf, 0.0),
        (inf, 99.5, 1.0, 0.5),  # it may round to infinity
        (100.0, 150.0, 1.0, 0.0),
        (-inf, 99.5, 1.0, 199.5),  # the wrong end of the range
        (-inf, -99.5, 1.0, 0.5),
        (nan, 99.5, 1.0, inf),
    ]
    computed, value, allowed, ratio = (np.array(column) for column in zip(*rows, strict=True))
    np.testing.assert_array_equal(error_ratio(computed, value, allowed, 100.0), ratio)


def test_precision_speaks_the_declared_dtypes():
    low, mixed = Precision("bfloat16"), Precision("bfloat16", intermediate="float32")
    assert (low.u_out, low.u_acc, low.u_mid, low.e) == (2.0**-8, 2.0**-24, 2.0**-8, 2.0**-8)
    assert low.unfused and not mixed.unfused and mixed.e == 2.0**-24
    assert mixed.u_probability == 2.0**-8 and Precision("bfloat16", **FUSED).u_probability == 0
    double = Precision("float64")
    assert double.accumulator == "float64" and double.u_out == double.u_acc == 2.0**-52
    assert Precision("float16").eta == 2.0**-25 and Precision("float16").largest == 65504
    assert (low.beside, double.beside) == ("float32", "float64")
    assert low.g(9) == 9 and Precision("bfloat16", growth="typical").g(9) == 3


def test_precision_of_capabilities():
    capabilities = Capabilities(accumulate={"bfloat16": "bfloat16"}, intermediate={"float16": "float32"})
    assert Precision.of(capabilities, "bfloat16") == Precision("bfloat16", "bfloat16")
    assert Precision.of(capabilities, "float16") == Precision("float16", intermediate="float32")
    assert Precision.of(capabilities, "float64").u_acc == 2.0**-52


@pytest.mark.parametrize("wrong", [{"storage": "int8"}, {"accumulate": "fp32"}, {"growth": "average"}])
def test_precision_names_the_choices(wrong):
    with pytest.raises(ValueError, match="wanted one of"):
        Precision(**({"storage": "float32"} | wrong))


def test_float64_made_of_float32_is_judged_as_float32():
    single = Capabilities(accumulate={"float64": "float32"})
    assert Precision.of(single, "float64") == Precision("float32")
    assert Precision.of(single, "bfloat16") == Precision("bfloat16")
    assert Precision.of(Capabilities(accumulate="float32"), "float64").u_acc == 2.0**-52  # said of no dtype
