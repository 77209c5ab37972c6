"""Error budgets of the sinusoids, the rotary embedding and ALiBi: right tables keep them, wrong ones do not."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from judging import SIXTEEN, cases, data, length, plain, rounder, stored, tensor, work
from judging import worst as worst_ratio

from veriformer import budgets, reference
from veriformer.budgets import Precision
from veriformer.declarations import DTYPES

F32 = Precision("float32")
FARTHEST = {"float64": 10**9, "float32": 10**6, "bfloat16": 10**6, "float16": 10**6}


def angles(positions, width, base=10000.0, form="power", dtype=np.float32):
    """position · base^(-2i/width) in a short dtype, by several ways that are all right."""
    exponent = np.arange(0, width, 2).astype(dtype) / dtype(width)
    frequency = {
        "power": lambda: 1 / dtype(base) ** exponent,
        "exponential": lambda: np.exp(-exponent * dtype(math.log(base))),
        "exponential of the step": lambda: np.exp(
            np.arange(0, width, 2).astype(dtype) * dtype(-math.log(base) / width)
        ),
        "base 2": lambda: np.exp2(-exponent * dtype(math.log2(base))),
    }[form]()
    return positions.astype(dtype)[:, None] * frequency


FORMS = ("power", "exponential", "exponential of the step", "base 2")


# --- sinusoids ------------------------------------------------------------------------------------


def table_of(angle, width):
    table = np.zeros((angle.shape[0], width), angle.dtype)
    table[:, 0::2] = np.sin(angle)
    table[:, 1::2] = np.cos(angle)[:, : width // 2]
    return table


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_sinusoids_by_every_right_way_stay_within_their_budget(dtype, form):
    precision = Precision(dtype)
    for rng in cases(150, form):
        rows, width = length(rng, 64), length(rng, 256)
        offset = int(10 ** rng.uniform(0, math.log10(FARTHEST[dtype]))) - 1
        bound = budgets.sinusoidal_positions(rows, width, offset=offset, precision=precision)
        angle = angles(offset + np.arange(rows), width, form=form, dtype=work(dtype))
        assert worst_ratio(table_of(angle, width), bound, precision) <= 1
        by_torch = torch.stack([torch.sin(torch.from_numpy(angle)), torch.cos(torch.from_numpy(angle))], -1)
        assert worst_ratio(plain(by_torch.flatten(1)[:, :width]), bound, precision) <= 1


def test_sinusoid_faults_exceed_the_budget():
    width, positions = 64, np.arange(512)
    bound = budgets.sinusoidal_positions(512, width, precision=F32)
    exponent = np.arange(0, width, 2) / width
    good = angles(positions, width, dtype=np.float64)
    wrong = {
        "base 1000": angles(positions, width, base=1000.0, dtype=np.float64),
        "base 9999": angles(positions, width, base=9999.0, dtype=np.float64),
        "exponent i/width": positions[:, None] * 10000.0 ** -(exponent / 2),
        "exponent of t2t": positions[:, None] * 10000.0 ** -(np.arange(width // 2) / (width // 2 - 1)),
        "positions from 1": good + 10000.0**-exponent,
        "bfloat16 frequencies": positions[:, None] * stored(10000.0**-exponent, "bfloat16"),
        "bfloat16 angles": stored(good, "bfloat16"),
        "float16 angles": stored(good, "float16"),
    }
    for name, angle in wrong.items():
        assert worst_ratio(stored(table_of(angle, width), "float32"), bound, F32) > 1, name
    halves = np.concatenate([np.sin(good), np.cos(good)], axis=-1)
    swapped = table_of(good, width)[:, np.arange(width) ^ 1]
    for answer in (halves, swapped, stored(table_of(good, width), "bfloat16")):
        assert worst_ratio(stored(answer, "float32"), bound, F32) > 1


def test_sinusoids_stay_between_one_and_minus_one_however_far():
    bound = budgets.sinusoidal_positions(2, 8, offset=10**9, precision=F32)
    assert (bound.allowed <= 1 + np.abs(bound.value)).all() and (bound.allowed[:, 0] > 0.9).all()
    assert (budgets.sinusoidal_positions(1, 8, precision=F32).allowed < 1e-6).all()


# --- rotary embedding -----------------------------------------------------------------------------


def turn(x, angle, pairs, rd=lambda x: x):
    """The rotation in the dtype of x, sine and cosine and both products passed through rd."""
    cos, sin = rd(np.cos(angle)).astype(x.dtype), rd(np.sin(angle)).astype(x.dtype)
    half = x.shape[-1] // 2
    one, two = (slice(half), slice(half, None)) if pairs == "halves" else (slice(0, None, 2), slice(1, None, 2))
    y, a, b = np.empty_like(x), x[..., one], x[..., two]
    y[..., one], y[..., two] = rd(a * cos) - rd(b * sin), rd(a * sin) + rd(b * cos)
    return y


def rotary_case(rng, dtype):
    rows, width = length(rng, 24), 2 * length(rng, 64)
    positions = rng.integers(0, 10 ** rng.integers(1, 7), rows) * rng.choice([-1, 1])
    return data(rng, (2, rows, width), dtype), positions, float(rng.choice([1.0, 100.0, 1e4, 5e5]))


@pytest.mark.parametrize("pairs", ["halves", "interleaved"])
@pytest.mark.parametrize("kind", ["fused", "unfused"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_embedding_by_every_right_way_stays_within_its_budget(dtype, kind, pairs):
    precision = Precision(dtype, intermediate={"fused": "float32", "unfused": "storage"}[kind])
    rd = rounder(dtype, kind == "unfused")
    for index, rng in enumerate(cases(200, kind + pairs)):
        x, positions, base = rotary_case(rng, dtype)
        angle = angles(positions, x.shape[-1], base, FORMS[index % 4], work(dtype))
        bound = budgets.rotary_embedding(x, positions, base=base, pairs=pairs, precision=precision)
        computed = stored(turn(x.astype(work(dtype)), angle, pairs, rd), dtype)
        assert worst_ratio(computed, bound, precision) <= 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_rotary_embedding_of_model_libraries_stays_within_its_budget(dtype):
    """x cos + rotate_half(x) sin, with tables in the dtype of x."""
    precision = Precision(dtype)
    for rng in cases(200, "rotate_half"):
        x, positions, base = rotary_case(rng, dtype)
        angle = torch.from_numpy(angles(positions, x.shape[-1], base, dtype=work(dtype)))
        table, t = torch.cat([angle, angle], -1), tensor(x, dtype)
        a, b = t.chunk(2, -1)
        computed = t * table.cos().to(t.dtype) + torch.cat([-b, a], -1) * table.sin().to(t.dtype)
        bound = budgets.rotary_embedding(x, positions, base=base, precision=precision)
        assert worst_ratio(plain(computed), bound, precision) <= 1


def rotary_faults(dtype):
    x, positions, width = np.random.default_rng(7).normal(size=(2, 16, 32)), 10000 - np.arange(16), 32
    x, good = stored(x, dtype), angles(positions, width, dtype=np.float64)
    exponent = np.arange(0, width, 2) / width
    turned = {
        "base 1000": angles(positions, width, base=1000.0, dtype=np.float64),
        "positions from 1": good + 10000.0**-exponent,
        "turned backwards": -good,
        "not turned": 0 * good,
        "exponent i/width": positions[:, None] * 10000.0 ** -(exponent / 2),
        "bfloat16 positions": stored(positions, "bfloat16")[:, None] * 10000.0**-exponent,
        "bfloat16 frequencies": positions[:, None] * stored(10000.0**-exponent, "bfloat16"),
        "float16 angles": stored(good, "float16"),
        "bfloat16 angles": stored(good, "bfloat16"),
    }
    answers = {name: turn(x, angle, "halves") for name, angle in turned.items()}
    return x, positions, answers | {"interleaved for halves": turn(x, good, "interleaved")}


@pytest.mark.parametrize("dtype", ["float32", *SIXTEEN])
@pytest.mark.parametrize("fault", rotary_faults("float32")[2])
def test_rotary_faults_exceed_the_budget_at_position_ten_thousand(fault, dtype):
    x, positions, faults = rotary_faults(dtype)
    precision = Precision(dtype)
    bound = budgets.rotary_embedding(x, positions, precision=precision)
    assert worst_ratio(stored(faults[fault], dtype), bound, precision) > 1


def test_low_precision_tables_exceed_the_fused_budget_only():
    x, positions, _ = rotary_faults("bfloat16")
    right = turn(
        x, stored(angles(positions, 32, dtype=np.float64), "float64"), "halves", lambda a: stored(a, "bfloat16")
    )
    for intermediate, admitted in (("storage", True), ("float32", False)):
        precision = Precision("bfloat16", intermediate=intermediate)
        bound = budgets.rotary_embedding(x, positions, precision=precision)
        assert (worst_ratio(stored(right, "bfloat16"), bound, precision) <= 1) == admitted


def test_rotary_embedding_leaves_pairs_of_zeros_alone():
    x = np.array([[0.0, 1.0, 0.0, 0.0]])
    bound = budgets.rotary_embedding(x, np.array([3]), precision=F32)
    assert (bound.allowed[0, [0, 2]] == 0).all() and (bound.allowed[0, [1, 3]] > 0).all()


# --- ALiBi ----------------------------------------------------------------------------------------


def published_slopes(heads, dtype):
    """The slopes as powers of a ratio, multiplied up in a short dtype."""

    def of_power(n):
        ratio = dtype(2 ** -(2 ** -(math.log2(n) - 3)))
        return [ratio ** dtype(h) for h in range(1, n + 1)]

    lower = 2 ** int(math.log2(heads))
    return np.array(of_power(lower) + of_power(2 * lower)[0::2][: heads - lower], dtype)


@pytest.mark.parametrize("form", ["signed", "distance"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_alibi_stays_within_its_budget(dtype, form):
    precision, narrow = Precision(dtype), work(dtype)
    for rng in cases(150, form):
        heads, queries, keys = length(rng, 48), length(rng, 40), length(rng, 40)
        distance = np.arange(queries)[:, None] + keys - queries - np.arange(keys)
        distance = (np.abs(distance) if form == "distance" else distance).astype(narrow)
        computed = -published_slopes(heads, narrow)[:, None, None] * distance
        bound = budgets.alibi_bias(heads, queries, keys, form=form, precision=precision)
        assert worst_ratio(computed, bound, precision) <= 1
        product = np.cumprod(np.full(heads, narrow(2 ** (-8 / heads))), dtype=narrow)
        if heads & (heads - 1) == 0:
            assert worst_ratio(-product[:, None, None] * distance, bound, precision) <= 1


@pytest.mark.parametrize("heads", [2, 6, 8, 12])
def test_alibi_faults_exceed_the_budget(heads):
    bound = budgets.alibi_bias(heads, 5, 9, precision=F32)
    distance = np.arange(5)[:, None] + 4 - np.arange(9)
    slopes = -bound.value[:, 0, 0] / 4
    every = -slopes[:, None, None]
    wrong = {
        "top-left": every * (distance - 4),
        "absolute": every * np.abs(distance),
        "positive": -every * distance,
        "slopes from 1": every * 2.0 ** (8 / heads) * distance,
        "reversed heads": every[::-1] * distance,
        "slopes off by 2^-14": every * distance * (1 + 2.0**-14),
    }
    for name, answer in wrong.items():
        assert worst_ratio(stored(answer, "float32"), bound, F32) > 1, name
    if heads & (heads - 1):
        plain_powers = 2.0 ** (-8 * np.arange(1, heads + 1) / heads)
        assert worst_ratio(stored(-plain_powers[:, None, None] * distance, "float32"), bound, F32) > 1


def test_alibi_is_exact_at_distance_zero():
    bound = budgets.alibi_bias(3, 4, 4, precision=F32)
    assert (bound.allowed[:, np.arange(4), np.arange(4)] == 0).all() and (bound.allowed > 0).sum() == 36
    assert reference.alibi_bias(3, 4, 4, like=np.zeros(())).shape == bound.value.shape
