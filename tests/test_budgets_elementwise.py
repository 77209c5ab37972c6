"""Error budgets of rms_norm, the activations, feed_forward, dropout and embedding: right kernels keep them, wrong ones
do not."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from judging import SIXTEEN, cases, data, length, one_by_one, plain, product_one_by_one, rounder, stored, tensor, work
from judging import worst as worst_ratio

from veriformer import budgets, reference
from veriformer.budgets import Precision
from veriformer.declarations import DTYPES

INTERMEDIATE = {"fused": "float32", "unfused": "storage"}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def seeded(*shape):
    return np.random.default_rng(7).normal(size=shape)


# --- rms_norm -------------------------------------------------------------------------------------


def rms_norm_case(rng, dtype):
    n, eps = length(rng, 512), float(rng.choice([1e-12, 1e-6, 1e-3]))
    return data(rng, (3, n), dtype), stored(rng.normal(size=n) * 2, dtype), eps


def naive_rms_norm(x, weight, eps, form, rd, sequential):
    squares = x * x
    total = one_by_one(squares) if sequential else squares.sum(axis=-1, keepdims=True)
    inverse = 1 / np.sqrt(total / x.dtype.type(x.shape[-1]) + x.dtype.type(eps))
    return rd(x * inverse) * (rd(1 + weight) if form == "one_plus" else weight)


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_rms_norm_stays_within_its_budget(dtype):
    precision = Precision(dtype)
    for rng in cases(250, "rms"):
        x, weight, eps = rms_norm_case(rng, dtype)
        computed = F.rms_norm(tensor(x, dtype), (x.shape[-1],), tensor(weight, dtype), eps)
        assert worst_ratio(plain(computed), budgets.rms_norm(x, weight, eps=eps, precision=precision), precision) <= 1


@pytest.mark.parametrize("form", ["plain", "one_plus"])
@pytest.mark.parametrize("kind", INTERMEDIATE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_by_hand_stays_within_its_budget(dtype, kind, form):
    precision, rd = Precision(dtype, intermediate=INTERMEDIATE[kind]), rounder(dtype, kind == "unfused")
    for rng in cases(120, kind + form):
        x, weight, eps = rms_norm_case(rng, dtype)
        bound = budgets.rms_norm(x, weight, eps=eps, weight_form=form, precision=precision)
        narrow = [a.astype(work(dtype)) for a in (x, weight)]
        for sequential in (False, True):
            computed = stored(naive_rms_norm(*narrow, eps, form, rd, sequential), dtype)
            assert worst_ratio(computed, bound, precision) <= 1


def rms_norm_faults():
    """x (deviation 0.01), weight and wrong answers."""
    x, weight = stored(seeded(4, 512) * 0.01, "float32"), stored(1 + 0.1 * seeded(512), "float32")
    m = (x * x).mean(-1, keepdims=True)
    return x, weight, {
        "eps outside": weight * x / (np.sqrt(m) + 1e-6),
        "eps forgotten": weight * x / np.sqrt(m),
        "eps of layer_norm": weight * x / np.sqrt(m + 1e-5),
        "mean subtracted": reference.layer_norm(x, weight, 0 * weight, eps=1e-6),
        "sum over n - 1": weight * x / np.sqrt(m * 512 / 511 + 1e-6),
        "one plus weight": (1 + weight) * x / np.sqrt(m + 1e-6),
        "bfloat16 input": reference.rms_norm(stored(x, "bfloat16"), weight),
        "bfloat16 squares": weight * x / np.sqrt(stored(x * x, "bfloat16").mean(-1, keepdims=True) + 1e-6),
    }  # fmt: skip


@pytest.mark.parametrize("fault", rms_norm_faults()[2])
def test_rms_norm_faults_exceed_the_float32_budget(fault):
    x, weight, faults = rms_norm_faults()
    precision = Precision("float32")
    bound = budgets.rms_norm(x, weight, precision=precision)
    assert worst_ratio(stored(faults[fault], "float32"), bound, precision) > 1


@pytest.mark.parametrize("dtype", SIXTEEN)
def test_gross_rms_norm_faults_exceed_the_unfused_budget(dtype):
    x, weight = stored(seeded(4, 64) + 1, dtype), stored(seeded(64), dtype)
    precision = Precision(dtype)
    bound = budgets.rms_norm(x, weight, precision=precision)
    for wrong in (reference.layer_norm(x, weight, 0 * weight, eps=1e-6), x * weight, (1 + weight) * bound.value):
        assert worst_ratio(stored(wrong, dtype), bound, precision) > 1


def test_rms_norm_is_undetermined_where_squares_overflow_or_vanish():
    weight = np.ones(2)
    precision = Precision("float32")
    x = np.array([[1e20, 1.0], [1e-25, 1e-25], [0.0, 0.0], [1.0, 0.0]])
    allowed = budgets.rms_norm(x, weight, eps=0.0, precision=precision).allowed
    assert np.isinf(allowed[:2]).all() and (allowed[2] == 0).all() and allowed[3, 1] == 0 and 0 < allowed[3, 0] < 1e-5
    short = Precision("float16", accumulate="storage")
    assert np.isinf(budgets.rms_norm(np.array([[300.0, 1.0]]), weight, precision=short).allowed).all()
    assert np.isfinite(budgets.rms_norm(np.array([[300.0, 1.0]]), weight, precision=Precision("float16")).allowed).all()


# --- activations ----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["erf", "tanh"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_gelu_stays_within_its_budget(dtype, form):
    theirs = {"erf": "none", "tanh": "tanh"}[form]
    for rng in cases(300, "gelu"):
        x = data(rng, (2, length(rng, 256)), dtype)
        computed = plain(F.gelu(tensor(x, dtype), approximate=theirs))
        for kind in INTERMEDIATE.values():
            precision = Precision(dtype, intermediate=kind)
            assert worst_ratio(computed, budgets.gelu(x, form=form, precision=precision), precision) <= 1


@pytest.mark.parametrize("form", ["erf", "tanh"])
@pytest.mark.parametrize("kind", INTERMEDIATE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gelu_by_hand_stays_within_its_budget(dtype, kind, form):
    precision, rd = Precision(dtype, intermediate=INTERMEDIATE[kind]), rounder(dtype, kind == "unfused")
    for rng in cases(200, "hand"):
        x = data(rng, (2, length(rng, 256)), dtype)
        t = torch.from_numpy(x.astype(work(dtype)))
        inner = (
            torch.erf(t * math.sqrt(0.5))
            if form == "erf"
            else torch.tanh(math.sqrt(2 / math.pi) * (t + 0.044715 * t**3))
        )
        y = rd((t * (1 + inner)).numpy()) / 2
        assert worst_ratio(stored(y, dtype), budgets.gelu(x, form=form, precision=precision), precision) <= 1


@pytest.mark.parametrize("intermediate", INTERMEDIATE.values())
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_other_form_and_neighbours_of_gelu_exceed_the_budget_at_amplitude_one(dtype, intermediate):
    x, precision = stored(seeded(64, 64), dtype), Precision(dtype, intermediate=intermediate)
    wrong = {
        "tanh for erf": reference.gelu(x, form="tanh"),
        "1.702 sigmoid": x / (1 + np.exp(-1.702 * x)),
        "silu": x / (1 + np.exp(-x)),
        "relu": np.maximum(x, 0),
    }
    bound = budgets.gelu(x, precision=precision)
    for name, answer in wrong.items():
        assert worst_ratio(stored(answer, dtype), bound, precision) > 1, name
    other = budgets.gelu(x, form="tanh", precision=precision)
    assert worst_ratio(stored(bound.value, dtype), other, precision) > 1


def test_tanh_for_erf_exceeds_the_float32_budget_at_amplitude_a_tenth():
    x, precision = stored(seeded(64, 64) * 0.1, "float32"), Precision("float32")
    wrong = stored(reference.gelu(x, form="tanh"), "float32")
    assert worst_ratio(wrong, budgets.gelu(x, precision=precision), precision) > 1


def test_relu_is_exact():
    x = np.array([-1.0, 0.0, 2.5, np.nan])
    bound = budgets.relu(x, precision=Precision("bfloat16"))
    assert worst_ratio(np.array([-0.0, 0.0, 2.5, np.nan]), bound, Precision("bfloat16")) == 0
    assert worst_ratio(np.array([-0.01, 0.0, 2.5, np.nan]), bound, Precision("bfloat16")) == np.inf


def feed_forward_case(rng, dtype):
    d, f = length(rng, 96), length(rng, 192)
    size = float(10 ** rng.uniform(-3, 1))
    x = data(rng, (3, d), dtype)
    w1, b1, w2, b2 = (data(rng, shape, dtype) for shape in ((d, f), (f,), (f, d), (d,)))
    return [stored(a * min(1.0, s), dtype) for a, s in zip((x, w1, b1, w2, b2), (size, size, 1, size, 1), strict=True)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_feed_forward_stays_within_its_budget(dtype):
    precision, judged = Precision(dtype), 0
    for rng in cases(250, "ffn"):
        arrays = feed_forward_case(rng, dtype)
        x, w1, b1, w2, b2 = (tensor(a, dtype) for a in arrays)
        bound = budgets.feed_forward(*arrays, precision=precision)
        judged += np.isfinite(bound.allowed).sum() / bound.allowed.size
        for computed in (F.linear(F.relu(F.linear(x, w1.T, b1)), w2.T, b2), F.relu(x @ w1 + b1) @ w2 + b2):
            assert worst_ratio(plain(computed), bound, precision) <= 1
    assert judged > 200


@pytest.mark.parametrize("kind", INTERMEDIATE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_feed_forward_summed_one_by_one_stays_within_its_budget(dtype, kind):
    precision, rd = Precision(dtype, intermediate=INTERMEDIATE[kind]), rounder(dtype, kind == "unfused")
    for rng in cases(150, "ffn by hand"):
        arrays = feed_forward_case(rng, dtype)
        x, w1, b1, w2, b2 = (a.astype(work(dtype)) for a in arrays)
        with np.errstate(all="ignore"):
            hidden = np.maximum(rd(rd(product_one_by_one(x, w1)) + b1), 0)
            computed = rd(product_one_by_one(hidden, w2)) + b2
        bound = budgets.feed_forward(*arrays, precision=precision)
        assert worst_ratio(stored(computed, dtype), bound, precision) <= 1


def feed_forward_faults():
    rng = np.random.default_rng(5)
    shapes = ((16, 64), (64, 256), (256,), (256, 64), (64,))
    x, w1, b1, w2, b2 = (stored(rng.normal(size=s) * s[0] ** -0.5, "float32") for s in shapes)
    right = lambda **new: reference.feed_forward(**({"x": x, "w1": w1, "b1": b1, "w2": w2, "b2": b2} | new))  # noqa: E731
    hidden = x @ w1 + b1
    return (x, w1, b1, w2, b2), {
        "first bias forgotten": right(b1=0 * b1),
        "second bias forgotten": right(b2=0 * b2),
        "gelu": reference.gelu(hidden) @ w2 + b2,
        "no activation": hidden @ w2 + b2,
        "relu after the second product too": np.maximum(right(), 0),
        "bfloat16 input": right(x=stored(x, "bfloat16"), w1=stored(w1, "bfloat16")),
        "bfloat16 hidden": stored(np.maximum(hidden, 0), "bfloat16") @ w2 + b2,
        "one hidden unit lost": np.maximum(hidden, 0)[:, :-1] @ w2[:-1] + b2,
    }


@pytest.mark.parametrize("fault", feed_forward_faults()[1])
def test_feed_forward_faults_exceed_the_float32_budget(fault):
    arrays, faults = feed_forward_faults()
    precision = Precision("float32")
    bound = budgets.feed_forward(*arrays, precision=precision)
    assert worst_ratio(stored(faults[fault], "float32"), bound, precision) > 1


def test_a_hidden_value_that_overflows_is_undetermined_only_if_it_may_be_stored():
    x, w1, w2 = np.array([[300.0]]), np.array([[300.0]]), np.array([[1e-3]])
    for precision, lost in ((Precision("float16"), True), (Precision("float16", intermediate="float32"), False)):
        bound = budgets.feed_forward(x, w1, np.zeros(1), w2, np.zeros(1), precision=precision)
        assert np.isinf(bound.allowed).all() == lost


# --- dropout and embedding ------------------------------------------------------------------------


def dropout_case(rng, dtype):
    rate = float(rng.choice([0.0, 0.1, 0.3, 0.5, 0.75, 0.9, 0.999, 1.0]))
    shape = (3, length(rng, 128))
    return data(rng, shape, dtype), rate, np.minimum(stored(rng.random(shape), dtype), 0.99)


@pytest.mark.parametrize("kind", INTERMEDIATE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dropout_by_hand_stays_within_its_budget(dtype, kind):
    precision, narrow = Precision(dtype, intermediate=INTERMEDIATE[kind]), work(dtype)
    rd = rounder(dtype, kind == "unfused")
    for rng in cases(300, "dropout"):
        x, rate, uniform = dropout_case(rng, dtype)
        bound = budgets.dropout(x, rate=rate, uniform=uniform, precision=precision)
        short = narrow(rate)
        with np.errstate(all="ignore"):
            divided, multiplied = x.astype(narrow) / (1 - short), x.astype(narrow) * rd(1 / (1 - short))
        for scaled, kept in ((divided, uniform >= rate), (multiplied, uniform >= stored(rate, dtype))):
            assert worst_ratio(stored(np.where(kept, scaled, 0), dtype), bound, precision) <= 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_dropout_scales_within_the_budget(dtype):
    precision = Precision(dtype)
    for rng in cases(200, "torch dropout"):
        x, rate, _ = dropout_case(rng, dtype)
        torch.manual_seed(int(rng.integers(1 << 30)))
        computed = F.dropout(tensor(x, dtype), rate)
        torch.manual_seed(torch.initial_seed())
        kept = plain(F.dropout(tensor(np.ones(x.shape), dtype), rate)) != 0
        uniform = np.where(kept, (1 + rate) / 2, rate / 2)  # the same choice, by numbers far from the rate
        bound = budgets.dropout(x, rate=rate, uniform=uniform, precision=precision)
        assert worst_ratio(plain(computed), bound, precision) <= 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_dropout_faults_exceed_the_budget(dtype):
    x, rng, precision = stored(seeded(8, 64), dtype), np.random.default_rng(3), Precision(dtype)
    uniform = stored(rng.integers(0, 64, x.shape) / 64, dtype)
    bound = budgets.dropout(x, rate=0.25, uniform=uniform, precision=precision)
    kept = uniform >= 0.25
    wrong = {
        "not scaled": np.where(kept, x, 0),
        "times the kept share": np.where(kept, x * 0.75, 0),
        "divided by the rate": np.where(kept, x / 0.25, 0),
        "keeps the others": np.where(kept, 0, x / 0.75),
        "greater, not greater or equal": np.where(uniform > 0.25, x / 0.75, 0),
        "identity": x,
    }
    for name, answer in wrong.items():
        assert worst_ratio(stored(answer, dtype), bound, precision) > 1, name


def test_dropout_is_exact_at_its_ends_and_undetermined_only_on_a_rounded_edge():
    x, precision = seeded(3), Precision("float32")
    edge = float(np.float32(0.7))
    uniform = np.array([0.1, edge, 0.9])
    assert (budgets.dropout(x, rate=0.0, uniform=uniform, precision=precision).allowed == 0).all()
    gone = budgets.dropout(x, rate=1.0, uniform=uniform, precision=precision)
    assert (gone.value == 0).all() and (gone.allowed == 0).all()
    assert np.isinf(budgets.dropout(x, rate=0.7, uniform=uniform, precision=precision).allowed).tolist() == [0, 1, 0]
    exact_rate = budgets.dropout(x, rate=0.5, uniform=np.array([0.5, 0.25, 0.75]), precision=precision)
    assert np.isfinite(exact_rate.allowed).all() and exact_rate.value[0] == 2 * x[0]


def test_embedding_is_exact():
    table, ids, precision = seeded(5, 3), np.array([[4, 0], [0, 2]]), Precision("float16")
    bound = budgets.embedding(ids, table, padding_index=0, precision=precision)
    assert worst_ratio(table[ids], bound, precision) == 0
    assert worst_ratio(table[ids - 1], bound, precision) == np.inf
    assert worst_ratio(np.where((ids == 0)[..., None], 0, table[ids]), bound, precision) == np.inf
