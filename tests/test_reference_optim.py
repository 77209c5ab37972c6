"""The reference of a training step: worked numbers, loops, torch's own optimisers, what is promised, errors."""

import itertools
import math

import array_api_strict as strict
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from veriformer.reference.optim import adamw_step, clip_by_global_norm, noam_schedule

pytestmark = pytest.mark.filterwarnings("error")
SEARCH = settings(max_examples=150, deadline=None, database=None, derandomize=True)
STEPS = (1, 2, 3, 10, 1000, 100_000)
BOTH = list(itertools.product(("decoupled", "coupled"), ("corrected", "uncorrected")))
RATE = {"lr": 1e-3}


@st.composite
def states(draw):
    """(param, grad, m, v), step, and keywords."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    shape = draw(st.sampled_from([(), (3,), (2, 3), (2, 1, 4)]))
    size = 10.0 ** draw(st.integers(-6, 4))
    param, grad, m = rng.normal(size=shape), size * rng.normal(size=shape), size * rng.normal(size=shape)
    arrays = param, grad, m, np.asarray(size * size * rng.random(size=shape) + m**2)
    words = {
        "lr": draw(st.sampled_from([1e-3, 0.1, 0.0])),
        "beta1": draw(st.sampled_from([0.9, 0.0, 0.5])),
        "beta2": draw(st.sampled_from([0.999, 0.98, 0.0])),
        "eps": draw(st.sampled_from([1e-8, 1e-3])),
        "weight_decay": draw(st.sampled_from([0.0, 0.01, 1.0])),
    }
    return tuple(map(np.asarray, arrays)), draw(st.sampled_from(STEPS)), words


def close(got, wanted, relative=1e-13):
    """Equal up to `relative` of each wanted number, or of the largest."""
    got, wanted = np.asarray(got), np.asarray(wanted, dtype=float)
    assert got.shape == wanted.shape
    np.testing.assert_allclose(got, wanted, rtol=relative, atol=relative * np.abs(wanted).max(initial=0.0))


def ones(*values):
    return tuple(np.asarray([value]) for value in values)


def moved(grad, step=1, m=0.0, v=0.0, **words):
    """By how much a parameter of 0 moves."""
    return float(adamw_step(*ones(0.0, grad, m, v), step, **(RATE | words))[0][0])


# worked numbers


def test_a_first_step_worked_by_hand():
    param, m, v = adamw_step(*ones(2.0, 0.5, 0.0, 0.0), 1, lr=0.1, weight_decay=0.1)
    np.testing.assert_allclose([m[0], v[0]], [0.05, 0.00025], rtol=1e-14)
    np.testing.assert_allclose(param[0], 2 * 0.99 - 0.1 * 0.5 / (0.5 + 1e-8), rtol=1e-14)


def test_a_second_step_worked_by_hand():
    param, m, v = adamw_step(*ones(1.0, -1.0, 0.05, 0.00025), 2, lr=0.1)
    np.testing.assert_allclose([m[0], v[0]], [-0.055, 0.00124975], rtol=1e-14)
    np.testing.assert_allclose(
        param[0], 1 + 0.1 * (0.055 / 0.19) / (math.sqrt(0.00124975 / 0.001999) + 1e-8), rtol=1e-13
    )


def test_the_first_step_is_as_large_as_the_rate_unless_eps_is_seen():
    np.testing.assert_allclose(moved(1e-9), -0.0909e-3, rtol=1e-3)
    np.testing.assert_allclose(moved(1e-9), -1e-3 * 1e-9 / (1e-9 + 1e-8), rtol=1e-12)
    for size in (1e-3, 1.0, 1e12):
        np.testing.assert_allclose([moved(size), moved(-size)], [-1e-3, 1e-3], rtol=2e-5)


def test_eps_before_the_correction_is_31_times_as_large_at_step_1():
    np.testing.assert_allclose(moved(1e-8, epsilon_place="uncorrected"), -1e-3 / (1 + 0.001**-0.5), rtol=1e-12)


@pytest.mark.parametrize(("width", "warmup", "step", "rate"), [
    (512, 4000, 4000, 6.98771e-4), (512, 4000, 1, 1.746928e-7), (512, 4000, 100_000, 1.397542e-4), (4, 1, 1, 0.5),
    (1, 4, 4, 0.5), (1, 4, 2, 0.25), (1, 4, 16, 0.25), (512, 4000, 0, 0.0),
])  # fmt: skip
def test_noam_worked_numbers(width, warmup, step, rate):
    np.testing.assert_allclose(noam_schedule(step, width=width, warmup=warmup), rate, rtol=1e-6)


def test_clipping_worked_numbers():
    grads = [np.asarray([3.0]), np.asarray([[4.0, 0.0]])]
    for got, wanted in zip(clip_by_global_norm(grads, max_norm=1.0), ([0.6], [[0.8, 0.0]]), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-15)
    np.testing.assert_allclose(clip_by_global_norm(grads, max_norm=1.0, plus=5.0)[0], [0.3], rtol=1e-15)
    assert [g.tolist() for g in clip_by_global_norm(grads, max_norm=5.0)] == [[3.0], [[4.0, 0.0]]]


def test_the_largest_step_that_the_averages_admit():
    """|step| <= lr sqrt(sum a²/b), a and b the weights of the averages; 7.270 and 1.698 in the limit."""
    for beta2, limit, steps in ((0.98, 1.698, 400), (0.999, 7.270, 9000)):
        bound = 0.1 / math.sqrt((1 - beta2) * (1 - 0.81 / beta2))
        np.testing.assert_allclose(bound, limit, rtol=1e-3)
        m = v = np.zeros(1)
        for t in range(steps - 399, steps + 1):  # what came long before is 0 beside the rest
            grad = np.asarray([(beta2 / 0.9) ** (t - steps)])
            step, m, v = adamw_step(np.zeros(1), grad, m, v, t, lr=1.0, beta2=beta2, eps=0.0)
        assert 0.99 * limit < abs(step[0]) < limit * 1.001


# against loops and torch


def loop_step(param, grad, m, v, step, lr, beta1, beta2, eps, weight_decay, decay, epsilon_place):
    """One number's step, in Python."""
    if decay == "coupled":
        grad += weight_decay * param
    else:
        param *= 1 - lr * weight_decay
    m, v = beta1 * m + (1 - beta1) * grad, beta2 * v + (1 - beta2) * grad * grad
    if epsilon_place == "corrected":
        return param - lr * m / (1 - beta1**step) / (math.sqrt(v / (1 - beta2**step)) + eps), m, v
    return param - lr * math.sqrt(1 - beta2**step) / (1 - beta1**step) * m / (math.sqrt(v) + eps), m, v


@pytest.mark.parametrize(("decay", "place"), BOTH)
@SEARCH
@given(states())
def test_steps_equal_the_loop(decay, place, state):
    arrays, step, words = state
    words = {**words, "decay": decay, "epsilon_place": place}
    got = adamw_step(*arrays, step, **words)
    flat = [loop_step(*map(float, values), step, **words) for values in zip(*(a.ravel() for a in arrays), strict=True)]
    for one, wanted in zip(got, zip(*flat, strict=True), strict=True):
        close(one, np.reshape(wanted, arrays[0].shape))


@pytest.mark.parametrize(("optimizer", "decay"), [(torch.optim.AdamW, "decoupled"), (torch.optim.Adam, "coupled")])
@SEARCH
@given(states())
def test_steps_equal_torch(optimizer, decay, state):
    arrays, step, words = state
    param, grad, m, v = (torch.tensor(array) for array in arrays)
    param.grad = grad
    betas = words["beta1"], words["beta2"]
    own = optimizer([param], lr=words["lr"], betas=betas, eps=words["eps"], weight_decay=words["weight_decay"])
    own.state[param] = {"step": torch.tensor(step - 1.0), "exp_avg": m, "exp_avg_sq": v}
    own.step()
    for got, theirs in zip(adamw_step(*arrays, step, **words, decay=decay), (param, m, v), strict=True):
        close(got, theirs.numpy(), 1e-12)


@SEARCH
@given(states())
def test_frameworks_step_alike(state):
    arrays, step, words = state
    wanted = adamw_step(*arrays, step, **words)
    for got, one in zip(adamw_step(*map(strict.asarray, arrays), step, **words), wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(got), one)
    for got, one in zip(adamw_step(*map(torch.tensor, arrays), step, **words), wanted, strict=True):
        close(got, one)


@st.composite
def gradients(draw):
    """One to three gradients of different shapes and sizes, and a norm that some exceed."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    shapes = draw(st.sampled_from([[(3,)], [(), (2, 3)], [(2,), (1, 4), (2, 2, 2)]]))
    size = 10.0 ** draw(st.sampled_from([-300, -30, -3, 0, 4, 300]))
    return [np.asarray(size * rng.normal(size=shape)) for shape in shapes], size * draw(
        st.sampled_from([0.1, 1.0, 9.0])
    )


@SEARCH
@given(gradients())
def test_clipping_equals_the_loop_and_frameworks_agree(case):
    grads, max_norm = case
    norm = math.hypot(*(float(x) for g in grads for x in g.ravel()))
    got = clip_by_global_norm(grads, max_norm=max_norm)
    theirs = clip_by_global_norm(list(map(strict.asarray, grads)), max_norm=max_norm)
    tensors = clip_by_global_norm(list(map(torch.tensor, grads)), max_norm=max_norm)
    for one, g, other, tensor in zip(got, grads, theirs, tensors, strict=True):
        close(one, g * min(1.0, max_norm / norm))
        close(np.asarray(other), one)
        close(tensor, one)


@pytest.mark.parametrize("max_norm", [0.5, 3.0, 100.0])
def test_clipping_equals_torch(max_norm):
    grads = [torch.arange(-3.0, 3.0, dtype=torch.float64).reshape(2, 3), torch.tensor([0.5, -2.0], dtype=torch.float64)]
    params = [torch.zeros_like(g) for g in grads]
    for param, g in zip(params, grads, strict=True):
        param.grad = g.clone()
    torch.nn.utils.clip_grad_norm_(params, max_norm)
    for got, param in zip(clip_by_global_norm(grads, max_norm=max_norm, plus=1e-6), params, strict=True):
        close(got, param.grad.numpy())


def test_noam_equals_torch():
    theirs = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(theirs, lambda s: 16**-0.5 * min((s or 1e-9) ** -0.5, s * 7**-1.5))
    for step in range(30):
        np.testing.assert_allclose(noam_schedule(step, width=16, warmup=7), schedule.get_last_lr()[0], rtol=1e-14)
        theirs.step()
        schedule.step()


@pytest.mark.parametrize(("decay", "place"), BOTH)
def test_gradients_of_a_step(decay, place):
    tensors = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in ([0.3, -1.0], [0.5, 2.0], [0.1, 0.2])]
    v = torch.tensor([0.3, 4.0], dtype=torch.float64, requires_grad=True)
    words = {"lr": 0.1, "weight_decay": 0.1, "decay": decay, "epsilon_place": place}
    assert torch.autograd.gradcheck(lambda *a: adamw_step(*a, 3, **words), (*tensors, v))


# what is promised


def test_a_constant_gradient_moves_by_the_rate_at_every_step():
    param, m, v, grad = np.zeros(3), np.zeros(3), np.zeros(3), np.asarray([1e-5, -1.0, 300.0])
    for t in range(1, 30):
        param, m, v = adamw_step(param, grad, m, v, t, lr=0.01, eps=0.0)
        np.testing.assert_allclose(param, -0.01 * t * np.sign(grad), rtol=1e-12)
        np.testing.assert_allclose(m, (1 - 0.9**t) * grad, rtol=1e-12)
        np.testing.assert_allclose(v, (1 - 0.999**t) * grad**2, rtol=1e-12)


def test_decoupled_decay_leaves_the_averages_alone_and_coupled_decay_is_a_gradient():
    arrays = ones(2.0, 0.0, 0.0, 0.0)
    param, m, v = adamw_step(*arrays, 1, lr=0.1, weight_decay=0.5)
    assert (param[0], m[0], v[0]) == (1.9, 0, 0)
    param, m, v = adamw_step(*arrays, 1, lr=0.1, weight_decay=0.5, decay="coupled")
    np.testing.assert_allclose([param[0], m[0], v[0]], [1.9, 0.1, 0.001], rtol=1e-7)
    assert adamw_step(*ones(20.0, 0.0, 0.0, 0.0), 1, lr=0.1, weight_decay=0.5, decay="coupled")[0] == pytest.approx(
        19.9
    )


def test_noam_has_its_peak_at_the_end_of_the_warm_up():
    rates = [noam_schedule(s, width=8, warmup=10) for s in range(41)]
    assert max(rates) == rates[10] == pytest.approx((8 * 10) ** -0.5)
    np.testing.assert_allclose(rates[:11], np.arange(11) * rates[1], rtol=1e-14)
    np.testing.assert_allclose(rates[40], rates[10] / 2, rtol=1e-14)
    assert isinstance(rates[0], float)


def test_clipping_at_its_edges():
    zero, g = np.zeros((2, 2)), np.asarray([3.0, 4.0])
    np.testing.assert_array_equal(clip_by_global_norm([zero], max_norm=0.0)[0], zero)
    np.testing.assert_array_equal(clip_by_global_norm([g], max_norm=0.0)[0], [0, 0])
    np.testing.assert_array_equal(clip_by_global_norm([g], max_norm=math.inf)[0], g)
    np.testing.assert_array_equal(clip_by_global_norm([g], max_norm=5.0)[0], g)
    assert clip_by_global_norm([], max_norm=1.0) == []
    empty, other = clip_by_global_norm([np.zeros((0, 3)), g], max_norm=1.0)
    assert empty.shape == (0, 3) and other[0] == pytest.approx(0.6)
    assert clip_by_global_norm([np.zeros((0, 3))], max_norm=1.0)[0].shape == (0, 3)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_not_swallowed(bad):
    with np.errstate(invalid="ignore"):
        one, other = clip_by_global_norm([np.asarray([bad, 1.0]), np.asarray([1.0])], max_norm=9.0)
    assert np.isnan(one).all() and np.isnan(other).all()


def test_inputs_stay_and_dtypes_are_kept():
    for dtype in (torch.float32, torch.bfloat16):
        state = [torch.tensor([1.0, 2.0], dtype=dtype) for _ in range(4)]
        found = (*adamw_step(*state, 2, lr=0.1, weight_decay=0.1), *clip_by_global_norm(state, max_norm=1.0))
        assert all(array.dtype == dtype for array in found)
        assert all(array.tolist() == [1.0, 2.0] for array in state)


# errors


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"step": 0}, "step: got 0, wanted at least 1"),
        ({"lr": -0.1}, "lr: got -0.1, wanted a finite number >= 0"),
        ({"lr": math.nan}, "lr: got nan"),
        ({"eps": -1e-8}, "eps: got -1e-08"),
        ({"weight_decay": math.inf}, "weight_decay: got inf"),
        ({"beta1": 1.0}, r"beta1: got 1.0, wanted a number in \[0, 1\)"),
        ({"beta2": -0.1}, "beta2: got -0.1"),
        ({"decay": "l2"}, "decay: got 'l2', wanted 'decoupled' or 'coupled'"),
        ({"epsilon_place": "inside"}, "epsilon_place: got 'inside'"),
    ],
)
def test_a_bad_step_is_an_error(words, said):
    step = words.pop("step", 1)
    with pytest.raises(ValueError, match=f"adamw_step: {said}"):
        adamw_step(*ones(1.0, 1.0, 0.0, 0.0), step, **(RATE | words))


@pytest.mark.parametrize("place", [1, 2, 3])
def test_arrays_of_several_shapes_are_an_error(place):
    arrays = [np.zeros((2, 3))] * 4
    arrays[place] = np.zeros(3)
    name = ("param", "grad", "m", "v")[place]
    with pytest.raises(ValueError, match=rf"adamw_step: {name}: got shape \(3,\), wanted \(2, 3\)"):
        adamw_step(*arrays, 1, lr=0.1)


@pytest.mark.parametrize(("step", "width", "warmup", "said"), [
    (-1, 8, 4, "step: got -1, wanted at least 0"), (1, 0, 4, "width: got 0, wanted at least 1"),
    (1, 8, 0, "warmup: got 0, wanted at least 1"),
])  # fmt: skip
def test_a_bad_schedule_is_an_error(step, width, warmup, said):
    with pytest.raises(ValueError, match=f"noam_schedule: {said}"):
        noam_schedule(step, width=width, warmup=warmup)


@pytest.mark.parametrize("words", [{"max_norm": -1.0}, {"max_norm": math.nan}, {"max_norm": 1.0, "plus": -1e-6}])
def test_a_bad_norm_is_an_error(words):
    with pytest.raises(ValueError, match="clip_by_global_norm: .*: got .*, wanted a number >= 0"):
        clip_by_global_norm([np.ones(2)], **words)
