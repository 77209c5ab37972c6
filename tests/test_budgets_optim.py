"""Error budgets of a training step: right optimisers keep them, in every dtype; wrong ones do not."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from judging import NUMPY, cases, length, one_by_one, plain, rounder, stored, tensor, work, worst

from veriformer import reference
from veriformer.budgets import Precision
from veriformer.budgets.optim import adamw_step, clip_by_global_norm, noam_schedule
from veriformer.declarations import DTYPES

INTERMEDIATE = {"fused": "float32", "unfused": "storage"}
STEPS = (1, 2, 3, 10, 1000, 100_000)
SINGLE = Precision("float32")
INF = float("inf")


def state(rng, dtype):
    """(param, grad, m, v), a step and keywords; in float16 of sizes that its range can hold."""
    n, low = length(rng, 40), -3 if dtype == "float16" else -8
    size = 10.0 ** rng.uniform(low, 1 if dtype == "float16" else 4)
    grad = size * rng.choice([rng.normal(size=n), np.full(n, 1.7), rng.integers(-2, 3, n)])
    param = 10.0 ** rng.uniform(-2, 2) * rng.normal(size=n)
    m, v = np.zeros(n), np.zeros(n)
    step = int(rng.choice(STEPS))
    if step > 1:
        m = size * rng.normal(size=n)
        v = m**2 * rng.choice([0.5, 1.0, 30.0], n) + size**2 * rng.random(n)
    words = {
        "lr": float(rng.choice([1e-3, 0.1, 0.0])),
        "beta1": float(rng.choice([0.9, 0.0, 0.5])),
        "beta2": float(rng.choice([0.999, 0.98, 0.0])),
        "eps": float(rng.choice([1e-8, 1e-3, 1e-6])),
        "weight_decay": float(rng.choice([0.0, 0.01, 1.0])),
    }
    return [stored(array, dtype) for array in (param, grad, m, v)], step, words


def by_hand(arrays, step, rd, *, lr, beta1, beta2, eps, weight_decay, decay, place, form):
    """A step in the dtype of the arrays, every value between two steps stored; four ways to write it."""
    param, g, m, v = arrays
    kind = param.dtype.type
    if decay == "coupled" and weight_decay:
        g = rd(g + rd(kind(weight_decay) * param))
    b1, b2, e, rate = map(kind, (beta1, beta2, eps, lr))
    c1, c2 = kind(1) - b1 ** kind(step), kind(1) - b2 ** kind(step)  # scalars held in the accumulator
    if form == "lerp":
        m, v = rd(m + rd((1 - b1) * rd(g - m))), rd(rd(b2 * v) + rd((1 - b2) * rd(g * g)))
    else:
        m, v = rd(rd(b1 * m) + rd((1 - b1) * g)), rd(rd(b2 * v) + rd(rd((1 - b2) * g) * g))
    if place == "corrected":
        d = rd(rd(rd(np.sqrt(v)) / np.sqrt(c2)) + e) if form == "lerp" else rd(rd(np.sqrt(rd(v / c2))) + e)
    else:
        d = rd(rd(rd(np.sqrt(v)) + e) / np.sqrt(c2))
    if form == "joint":
        update = rd(rd(m / c1) / d)
        if decay == "decoupled" and weight_decay:
            update = rd(update + rd(kind(weight_decay) * param))
        return param - rd(rate * update), m, v
    kept = rd(param * (1 - rate * kind(weight_decay))) if decay == "decoupled" else param
    if form == "moved":  # the corrections are in the rate and in eps
        d = rd(rd(np.sqrt(v)) + (e * np.sqrt(c2) if place == "corrected" else e))
        return kept - rd(rd(rate * np.sqrt(c2) / c1 * m) / d), m, v
    return kept - (rd(rd(rate * rd(m / c1)) / d) if form == "plain" else rd(rate / c1 * rd(m / d))), m, v


@pytest.mark.parametrize("form", ["plain", "lerp", "joint", "moved"])
@pytest.mark.parametrize("kind", INTERMEDIATE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_steps_by_hand_stay_within_the_budget(dtype, kind, form):
    precision, rd, judged = Precision(dtype, intermediate=INTERMEDIATE[kind]), rounder(dtype, kind == "unfused"), 0
    for rng in cases(120, form + kind):
        arrays, step, words = state(rng, dtype)
        decay, place = rng.choice(["decoupled", "coupled"]), rng.choice(["corrected", "uncorrected"])
        with np.errstate(all="ignore"):
            given = [array.astype(work(dtype)) for array in arrays]
            found = by_hand(given, step, rd, **words, decay=decay, place=place, form=form)
        bounds = adamw_step(*arrays, step, **words, decay=decay, epsilon_place=place, precision=precision)
        for name, computed, bound in zip(("param", "m", "v"), found, bounds, strict=True):
            with np.errstate(all="ignore"):
                computed = stored(computed, dtype)
            assert worst(computed, bound, precision) <= 1, (name, arrays, step, words, decay, place)
            judged += int(np.isfinite(bound.allowed).sum())
    assert judged > 1000


def by_torch(optimizer, arrays, step, dtype, **words):
    """A step of torch's own from a given state."""
    param, grad, m, v = (tensor(array, dtype).clone() for array in arrays)
    param.grad = grad
    betas = words.pop("beta1"), words.pop("beta2")
    own = optimizer([param], betas=betas, **words)
    own.state[param] = {"step": torch.tensor(step - 1.0), "exp_avg": m, "exp_avg_sq": v}
    own.step()
    return plain(param), plain(m), plain(v)


@pytest.mark.parametrize("way", ["loop", "foreach", "fused"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_optimisers_of_torch_stay_within_the_budget(dtype, way):
    precision = Precision(dtype)
    options = {"foreach": way == "foreach", "fused": way == "fused"}
    for rng in cases(100, way):
        arrays, step, words = state(rng, dtype)
        coupled = bool(rng.random() < 0.5)
        optimizer, decay = (torch.optim.Adam, "coupled") if coupled else (torch.optim.AdamW, "decoupled")
        bounds = adamw_step(*arrays, step, **words, decay=decay, precision=precision)
        found = by_torch(optimizer, arrays, step, dtype, **words, **options)
        for name, computed, bound in zip(("param", "m", "v"), found, bounds, strict=True):
            assert worst(computed, bound, precision) <= 1, (name, arrays, step, words, decay)


WRONG = {
    "eps before the correction": {"epsilon_place": "uncorrected"},
    "decay coupled": {"decay": "coupled"},
    "no decay": {"weight_decay": 0.0},
    "rate of a thousandth more": {"lr": 1e-2 * 1.001},
    "beta1 0.9001": {"beta1": 0.9001},
    "beta2 0.9991": {"beta2": 0.9991},
    "eps 1e-7": {"eps": 1e-7},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_steps_exceed_the_budget(wrong):
    arrays = [stored(a, "float32") for a in ([1.0, -2.0], [1e-5, 3e-6], [2e-6, 1e-6], [1e-11, 2e-11])]
    words = {"lr": 1e-2, "weight_decay": 0.1}
    found = reference.adamw_step(*arrays, 3, **(words | WRONG[wrong]))
    bounds = adamw_step(*arrays, 3, **words, precision=SINGLE)
    assert max(worst(stored(one, "float32"), bound, SINGLE) for one, bound in zip(found, bounds, strict=True)) > 3


def test_a_step_counted_from_another_number_exceeds_the_budget():
    for step in (1, 2, 10, 1000):
        arrays = [stored([x], "float32") for x in (0.0, 0.5, 0.2, 0.03)]
        (bound, *_), words = adamw_step(*arrays, step, lr=0.1, precision=SINGLE), {"lr": 0.1}
        assert worst(stored(reference.adamw_step(*arrays, step + 1, **words)[0], "float32"), bound, SINGLE) > 2


def bounds_of(param, grad, m, v, step=1, dtype="float32", **words):
    arrays = [stored([x], dtype) for x in (param, grad, m, v)]
    return adamw_step(*arrays, step, **({"lr": 1e-3} | words), precision=Precision(dtype))


def test_nothing_is_allowed_where_nothing_moves():
    for dtype in ("float64", "float32", "bfloat16"):
        assert [b.allowed[0] for b in bounds_of(1.0, 0.0, 0.0, 0.0, dtype=dtype)] == [0, 0, 0]
        assert [b.allowed[0] == 0 for b in bounds_of(1.0, 0.5, 0.1, 0.2, lr=0.0, dtype=dtype)] == [True, False, False]
    shrunk = bounds_of(1.0, 0.0, 0.0, 0.0, weight_decay=0.1)
    assert 0 < shrunk[0].allowed[0] < 1e-6 and shrunk[1].allowed[0] == shrunk[2].allowed[0] == 0


def test_what_may_be_divided_by_0_is_undetermined():
    assert bounds_of(1.0, 1e-3, 0.0, 0.0, dtype="float16")[0].allowed[0] == INF  # g² and eps both underflow
    assert bounds_of(1.0, 1e-3, 0.0, 0.0, dtype="float16", eps=1e-4)[0].allowed[0] == INF  # g² alone
    assert bounds_of(1.0, 0.5, 0.0, 0.0, dtype="float16")[0].allowed[0] < 0.01
    assert bounds_of(1.0, 1e-25, 0.0, 0.0, eps=0.0)[0].allowed[0] == INF
    assert bounds_of(1.0, 0.0, 0.0, 0.0, eps=0.0)[0].allowed[0] == INF
    assert bounds_of(1.0, 1e-15, 0.0, 0.0, eps=0.0)[0].allowed[0] < 1e-6


def test_what_underflows_before_a_division_is_in_the_budget():
    half = Precision("float16", intermediate="storage")
    param = bounds_of(0.0, 0.049987793, 0.0, 0.0, dtype="float16", eps=1.0)[0]
    # (lr sqrt(c2) / c1) m is 1.58e-6
    assert worst(np.array([-4.84585762e-05]), param, half) <= 1 < worst(np.array([-4.3e-05]), param, half)
    (clipped,) = clip_by_global_norm([stored([-100.0, 100.0, 2.90870667e-05], "float16")], max_norm=100, precision=half)
    # g / norm is 2e-7
    assert worst(stored([-70.7, 70.7, 1.79e-05], "float16"), clipped, half) <= 1
    assert worst(stored([-70.7, 70.7, 0.0], "float16"), clipped, half) > 1


def test_squares_that_overflow_are_undetermined_and_their_mean_is_not():
    for dtype, size in (("float32", 1e20), ("float16", 300.0)):
        param, m, v = bounds_of(1.0, size, 0.0, 0.0, dtype=dtype)
        assert param.allowed[0] == v.allowed[0] == INF and m.allowed[0] < size / 100
    assert bounds_of(1.0, 1e18, 0.0, 0.0)[0].allowed[0] < 1e-6


def test_the_terms_add_up_and_betas_dominate_the_first_step():
    for one in bounds_of(1.0, 0.5, 0.2, 0.1, 5, weight_decay=0.1):
        np.testing.assert_allclose(sum(one.terms.values()), one.allowed, rtol=1e-12)
    param, m, v = bounds_of(0.0, 1.0, 0.0, 0.0)
    assert v.dominant((0,)) == "betas" and v.allowed[0] / v.value[0] == pytest.approx(999 * 2**-24, rel=0.02)
    # half of beta2's own 999, half of what C + 1 roundings make of 1 - beta2
    assert param.dominant((0,)) == "root" and param.allowed[0] / 1e-3 == pytest.approx(3000 * 2**-24, rel=0.05)


# --- clipping -------------------------------------------------------------------------------------


def gradients(rng, dtype):
    """One to four gradients and a norm, which they often nearly have."""
    size = 10.0 ** (rng.uniform(-2, 1) if dtype == "float16" else rng.uniform(-12, 12))
    shapes = [(length(rng, 30), *((2,) * rng.integers(0, 2))) for _ in range(rng.integers(1, 5))]
    grads = [
        stored(size * (rng.normal(size=s) if rng.random() < 0.6 else rng.integers(-1, 2, s)), dtype) for s in shapes
    ]
    norm = math.sqrt(sum(float((g**2).sum()) for g in grads))
    return grads, norm * float(rng.choice([0.01, 0.5, 1 - 2**-9, 1.0, 1.01, 7.0])) or 1.0


def clipped(grads, rd, max_norm, plus, form):
    """Clipping in the dtype of the gradients with stored values between."""
    kind = grads[0].dtype.type
    if form == "flat":
        norm = rd(np.sqrt(rd(one_by_one(rd(np.concatenate([g.ravel() for g in grads]) ** 2))[0])))
    else:
        norms = rd(np.array([rd(np.sqrt(rd((rd(g * g)).sum()))) for g in grads]))
        norm = rd(np.sqrt(rd(rd(norms * norms).sum())))
    if form == "by quotients":
        return [g if norm + kind(plus) <= max_norm else rd(g / rd(norm + kind(plus))) * kind(max_norm) for g in grads]
    factor = np.minimum(rd(rd(kind(max_norm)) / rd(norm + kind(plus))), kind(1)) if norm + kind(plus) else kind(1)
    return [g * factor for g in grads]


@pytest.mark.parametrize("plus", [0.0, 1e-6])
@pytest.mark.parametrize("form", ["flat", "by arrays", "by quotients"])
@pytest.mark.parametrize("kind", INTERMEDIATE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_clipping_by_hand_stays_within_the_budget(dtype, kind, form, plus):
    precision, rd = Precision(dtype, intermediate=INTERMEDIATE[kind]), rounder(dtype, kind == "unfused")
    for rng in cases(100, form + kind):
        grads, max_norm = gradients(rng, dtype)
        with np.errstate(all="ignore"):
            found = clipped([g.astype(work(dtype)) for g in grads], rd, max_norm, plus, form)
        bounds = clip_by_global_norm(grads, max_norm=max_norm, plus=plus, precision=precision)
        for computed, bound in zip(found, bounds, strict=True):
            assert worst(stored(computed, dtype), bound, precision) <= 1, (grads, max_norm)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_clipping_by_torch_stays_within_the_budget(dtype, foreach):
    precision = Precision(dtype)
    for rng in cases(100, "torch"):
        grads, max_norm = gradients(rng, dtype)
        params = [torch.zeros(g.shape, dtype=getattr(torch, dtype)) for g in grads]
        for param, g in zip(params, grads, strict=True):
            param.grad = tensor(g, dtype).clone()
        torch.nn.utils.clip_grad_norm_(params, max_norm, foreach=foreach)
        bounds = clip_by_global_norm(grads, max_norm=max_norm, plus=1e-6, precision=precision)
        for param, bound in zip(params, bounds, strict=True):
            assert worst(plain(param.grad), bound, precision) <= 1, (grads, max_norm)


def test_wrong_clipping_exceeds_the_budget():
    grads = [stored([3.0, 0.5], "float32"), stored([[4.0], [1.0]], "float32")]
    norm = math.sqrt(sum(float((g**2).sum()) for g in grads))
    bounds = clip_by_global_norm(grads, max_norm=1.0, precision=SINGLE)
    wrong = {
        "each by itself": [g / math.sqrt(float((g**2).sum())) for g in grads],
        "an epsilon": [g / (norm + 1e-5) for g in grads],
        "the largest entry": [g / 4 for g in grads],
        "the squared norm": [g / norm**2 for g in grads],
        "not at all": grads,
        "entries": [np.clip(g, -1, 1) for g in grads],
    }
    for name, found in wrong.items():
        pairs = zip(found, bounds, strict=True)
        assert max(worst(stored(one, "float32"), bound, SINGLE) for one, bound in pairs) > 1, name


@pytest.mark.parametrize("kind", INTERMEDIATE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_factor_of_one_may_be_the_limit_by_the_limit(dtype, kind):
    precision, rd = Precision(dtype, intermediate=INTERMEDIATE[kind]), rounder(dtype, kind == "unfused")
    for rng in cases(100, "factors" + kind):
        grads = [stored(rng.normal(size=5), dtype)]
        limit = rd(work(dtype)(rng.uniform(20, 90)))
        factors = rd(rd(1 / limit) * limit), rd(float(limit * rng.uniform(1 - precision.u_store, 1)) / limit)
        (bound,) = clip_by_global_norm(grads, max_norm=float(limit), precision=precision)
        for factor in factors:
            assert worst(stored(grads[0] * factor, dtype), bound, precision) <= 1, limit
        assert worst(stored(grads[0] * (1 + 16 * max(precision.u_out, precision.u_acc)), dtype), bound, precision) > 1


def test_what_is_not_clipped_is_as_it_was_but_for_the_rounding_of_its_factor():
    grads = [stored([3.0], "float32"), stored([4.0, 0.0], "float32")]
    for max_norm, few in ((5.1, True), (1e30, True), (INF, True), (5.0, False), (4.9, False)):
        bounds = clip_by_global_norm(grads, max_norm=max_norm, precision=SINGLE)
        assert [bool((b.allowed <= 12 * SINGLE.u_out * np.abs(b.value)).all()) for b in bounds] == [few, few]
    zeros = clip_by_global_norm([np.zeros(3)], max_norm=0.5, precision=SINGLE)[0]
    assert (zeros.value == 0).all() and (zeros.allowed == 0).all()
    assert clip_by_global_norm([], max_norm=1.0, precision=SINGLE) == ()
    assert (clip_by_global_norm(grads, max_norm=1.0, precision=SINGLE)[1].allowed == 0).tolist() == [False, True]


def test_a_norm_that_overflows_is_undetermined_and_squares_that_do_are_not():
    for dtype, sizes, lost in (("float32", (3e25, 4e25), False), ("float32", (3e38, 3e38), True)):
        (bound,) = clip_by_global_norm([stored(sizes, dtype)], max_norm=1.0, precision=Precision(dtype))
        assert np.isinf(bound.allowed).all() == lost
    assert (
        worst(np.zeros(2), clip_by_global_norm([np.array([3e25, 4e25])], max_norm=1.0, precision=SINGLE)[0], SINGLE)
        > 1e4
    )


# --- schedule -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", INTERMEDIATE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_schedules_in_every_dtype_stay_within_the_budget(dtype, kind):
    precision, rd, real = (
        Precision(dtype, intermediate=INTERMEDIATE[kind]),
        rounder(dtype, kind == "unfused"),
        work(dtype),
    )
    for rng in cases(300, kind):
        step, width, warmup = (int(10 ** rng.uniform(0, top)) for top in (6, 4, 5))
        bound = noam_schedule(step, width=width, warmup=warmup, precision=precision)
        s, d, w = (rd(real(number)) for number in (step, width, warmup))
        with np.errstate(all="ignore"):
            one = rd(rd(d ** real(-0.5)) * np.minimum(rd(s ** real(-0.5)), rd(s * rd(w ** real(-1.5)))))
            other = rd(rd(1 / rd(rd(np.sqrt(d)) * rd(np.sqrt(np.maximum(s, w))))) * np.minimum(1, rd(s / w)))
        for rate in (one, other):
            assert worst(stored(rate, dtype), bound, precision) <= 1, (step, width, warmup)


def test_wrong_schedules_exceed_the_budget():
    for step, wrong in ((3, 4), (3, 2), (11, 12), (10, 9)):
        bound = noam_schedule(step, width=64, warmup=10, precision=Precision("float64"))
        rate = reference.noam_schedule(wrong, width=64, warmup=10)
        assert worst(np.asarray(rate), bound, Precision("float64")) > 1e6
    bound = noam_schedule(0, width=64, warmup=10, precision=SINGLE)
    assert bound.value.shape == () and bound.value == bound.allowed == 0
    assert noam_schedule(70_000, width=64, warmup=10, precision=Precision("float16")).allowed == INF
    assert noam_schedule(70_000, width=64, warmup=10, precision=Precision("bfloat16")).allowed < 1e-4


def test_dtypes_of_the_tests_are_all():
    assert set(NUMPY) == set(DTYPES)
