"""The error budget of the probabilities of the next token: right kernels keep it, whichever choice they make."""

from __future__ import annotations

import numpy as np
import pytest
from judging import cases, one_by_one, rounder, stored, work, worst

from veriformer import budgets, reference
from veriformer.budgets import Precision
from veriformer.budgets.generation import choices, mass_error
from veriformer.declarations import DTYPES
from veriformer.properties.generation_cases import LOGITS, logit_values

INTERMEDIATE = {"fused": "float32", "unfused": "storage"}
SINGLE = Precision("float32")
INF = float("inf")


def next_token_case(rng, dtype):
    """Logits of any family and keywords."""
    size = int(rng.choice([1, 2, 3, 5, 9, 33, 200]))
    x = logit_values(str(rng.choice(LOGITS)), int(rng.integers(1 << 30)), (2, size), dtype)
    x[1, rng.random(size) < 0.2 * (size > 1)] = -INF
    x[1, int(rng.integers(size))] = 1.0
    words = {
        "temperature": float(rng.choice([1.0, 1.0, 0.5, 3.0])),
        "top_k": [None, 1, 2, size, int(rng.integers(1, size + 1))][rng.integers(5)],
        "top_p": [None, 0.0, 0.5, 1.0, float(rng.random())][rng.integers(5)],
    }
    return stored(np.clip(x, -2e4, 2e4, where=x > -INF, out=x), dtype), words


def shares(s, rd, axis=-1):
    """Softmax with every step stored; the sum from the first to the last."""
    e = rd(np.exp(rd(s - s.max(axis=axis, keepdims=True))))
    return rd(e / rd(one_by_one(e)))


def by_masks(x, rd, temperature, top_k, top_p):
    """Filters write -inf over the logits, the mass counts from the least probable; ties at k stay."""
    s = rd(x / x.dtype.type(temperature))
    if top_k is not None:
        s = np.where(s < np.sort(s)[..., -min(top_k, s.shape[-1])][..., None], -INF, s).astype(x.dtype)
    if top_p is not None:
        rising = np.argsort(s, axis=-1, kind="stable")
        goes = rd(np.cumsum(shares(np.take_along_axis(s, rising, -1), rd), axis=-1)) <= rd(x.dtype.type(1 - top_p))
        goes[..., -1] = False
        mask = np.zeros_like(goes)
        np.put_along_axis(mask, rising, goes, -1)
        s = np.where(mask, -INF, s).astype(x.dtype)
    return shares(s, rd)


def by_probabilities(x, rd, temperature, top_k, top_p):
    """Filters cut stored probabilities by rank and renormalise each time, equal ones in the order of the vocabulary."""
    p = shares(rd(x / x.dtype.type(temperature)), rd)
    falling = np.argsort(-p, axis=-1, kind="stable")
    v = np.take_along_axis(p, falling, -1)
    if top_k is not None:
        v[..., top_k:] = 0
        v = rd(v / rd(one_by_one(v)))
    if top_p is not None:
        before = rd(rd(np.cumsum(v, axis=-1)) - v)
        v[..., 1:][before[..., 1:] >= top_p] = 0
        v = rd(v / rd(one_by_one(v)))
    out = np.zeros_like(p)
    np.put_along_axis(out, falling, v, -1)
    return out


@pytest.mark.parametrize("kernel", [by_masks, by_probabilities])
@pytest.mark.parametrize("kind", INTERMEDIATE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_filters_by_hand_stay_within_the_budget(dtype, kind, kernel):
    precision, rd = Precision(dtype, intermediate=INTERMEDIATE[kind]), rounder(dtype, kind == "unfused")
    for rng in cases(150, kind):
        x, words = next_token_case(rng, dtype)
        with np.errstate(all="ignore"):
            computed = stored(kernel(x.astype(work(dtype)), rd, **words), dtype)
        bound = budgets.next_token_probabilities(x, **words, precision=precision)
        assert worst(computed, bound, precision) <= 1, (x, words)


def test_without_a_choice_the_budget_is_that_of_softmax_over_what_stays():
    x = stored(np.array([[3.0, 1.0, 2.0, -1.0], [0.0, 5.0, -INF, 1.0]]), "float32")
    for words in ({}, {"top_k": 2}, {"top_p": 0.7}, {"top_k": 2, "top_p": 0.99, "temperature": 0.5}):
        bound = budgets.next_token_probabilities(x, **words, precision=SINGLE)
        stays = np.where(bound.value > 0, x, -INF)
        alone = budgets.softmax(stays, temperature=words.get("temperature", 1.0), precision=SINGLE)
        np.testing.assert_array_equal(bound.allowed, alone.allowed)
        assert (bound.terms["choice"] == 0).all() and (bound.allowed[bound.value == 0] == 0).all()


def admitted(x, computed, **words):
    bound = budgets.next_token_probabilities(np.array(x), **words, precision=SINGLE)
    return worst(np.array(computed), bound, SINGLE) <= 1


def test_either_choice_is_admitted_at_a_tie_and_no_third():
    third, half = 1 / 3, 0.5
    assert admitted([0.0, 0.0, 0.0, -5.0], [half, half, 0, 0], top_k=2)
    assert admitted([0.0, 0.0, 0.0, -5.0], [0, half, half, 0], top_k=2)
    assert admitted([0.0, 0.0, 0.0, -5.0], [third, third, third, 0], top_k=2)
    assert not admitted([0.0, 0.0, 0.0, -5.0], [0.3, 0.3, 0.3, 0.1], top_k=2)
    assert admitted([0.0, 0.0, 0.0, -5.0], [0, half, half, 0], top_k=2, exactly_k=True)
    assert not admitted([2.0, 0.0, 0.0], reference.softmax(np.array([2.0, 0.0, 0.0])), top_k=2, exactly_k=True)
    assert admitted([2.0, 0.0, 0.0], reference.softmax(np.array([2.0, 0.0, 0.0])), top_k=2)


def test_a_mass_at_the_cut_admits_both_sides_and_one_beside_it_does_not():
    x = np.log([0.5, 0.25, 0.15, 0.1])
    for mass, sizes in ((0.75, (2, 3)), (0.7, (2,)), (0.8, (3,)), (0.5, (1, 2)), (0.0, (1,)), (0.9, (3, 4))):
        for size in (1, 2, 3, 4):
            computed = np.where(np.arange(4) < size, np.exp(x), 0.0)
            computed /= computed.sum()
            assert admitted(x, computed, top_p=mass) == (size in sizes), (mass, size)


def test_temperature_comes_first_or_last():
    x = np.log([0.6, 0.3, 0.1])
    words = {"temperature": 3.0, "top_p": 0.85, "precision": SINGLE}
    assert choices(x, **words).most == 3 and choices(x, **words, order="temperature_last").most == 2
    last = budgets.next_token_probabilities(x, **words, order="temperature_last")
    assert last.value[2] == last.allowed[2] == 0 and (last.allowed[:2] < 1e-5).all()


def test_t_0_shares_among_the_largest_and_an_empty_row_has_nothing():
    bound = budgets.next_token_probabilities(np.array([1.0, 2.0, 2.0]), temperature=0.0, precision=SINGLE)
    assert bound.value.tolist() == [0, 0.5, 0.5] and bound.allowed[0] == 0
    empty = budgets.next_token_probabilities(np.array([-INF, -INF]), top_k=1, top_p=0.3, precision=SINGLE)
    assert (empty.value == 0).all() and (empty.allowed == 0).all()


def test_the_error_of_a_mass_grows_with_the_vocabulary_and_with_what_is_stored():
    def error(size, dtype, **rest):
        return float(mass_error(np.zeros(size), 1.0, Precision(dtype, **rest)))

    assert error(10, "float32") < 1e-5 < error(1000, "float32") < 2e-4
    assert error(10, "bfloat16", intermediate="float32") == error(10, "float32")
    assert 0.01 < error(10, "bfloat16") < 0.1


@pytest.mark.parametrize("dtype", DTYPES)
def test_gross_mistakes_exceed_the_budget_in_every_dtype(dtype):
    precision, x = Precision(dtype), stored(np.array([2.0, 1.0, 0.0, -1.0, -2.0]), dtype)
    plain = reference.softmax(x)
    wrong = {
        "not renormalised": ({"top_k": 3}, np.where(x >= 0, plain, 0)),
        "k + 1": ({"top_k": 2}, reference.next_token_probabilities(x, top_k=3)),
        "one too many": ({"top_p": 0.75}, reference.next_token_probabilities(x, top_k=3)),
        "one too few": ({"top_p": 0.75}, reference.next_token_probabilities(x, top_k=1)),
        "filters ignored": ({"top_k": 1}, plain),
        "temperature ignored": ({"temperature": 2.0}, plain),
    }
    for name, (words, computed) in wrong.items():
        bound = budgets.next_token_probabilities(x, **words, precision=precision)
        assert worst(stored(computed, dtype), bound, precision) > 1, name
