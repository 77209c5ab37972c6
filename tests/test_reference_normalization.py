"""The reference layer_norm and rms_norm: worked numbers, loops, other frameworks, dialects, edges."""

import array_api_strict as strict
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from veriformer.reference import layer_norm, loops, rms_norm

pytestmark = pytest.mark.filterwarnings("error")
SEARCH = settings(max_examples=200, deadline=None, database=None, derandomize=True)
DIALECTS = [(e, v) for e in ("inside", "outside") for v in ("biased", "unbiased")]

# LN of a 3x4 matrix, eps inside the root, to seven places. Of the matrix itself only what these
# numbers tell is known: row mean and scale are free, and the variance follows from that of LN.
PRINTED = np.asarray(
    [
        [-0.0447301, 0.0233910, -1.4030485, 1.4243876],
        [0.1071708, 1.4895190, -1.2958867, -0.3008031],
        [1.2892749, -1.5134619, 0.2171228, 0.0070642],
    ]
)


def plain(x, **keywords):
    """layer_norm with weight 1 and bias 0."""
    return layer_norm(x, np.ones(x.shape[-1]), np.zeros(x.shape[-1]), **keywords)


def preimage(y, eps):
    """A matrix whose layer norm is y: var(y) = v / (v + eps) gives v, and the mean is at will."""
    w = np.mean(y**2, axis=-1, keepdims=True)
    return y * np.sqrt(eps / (1 - w)) + np.asarray([[0.5], [-2.0], [3.0]])


@st.composite
def cases(draw):
    """x [..., d] of eighths (so that distinct entries are far apart), some rows constant; weight, bias."""
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    shape = (*draw(st.sampled_from([(), (3,), (2, 3)])), draw(st.sampled_from([1, 2, 3, 4, 9])))
    x = generator.integers(-20, 21, shape) / 8 * draw(st.sampled_from([0.001, 1.0, 1000.0]))
    x = np.where(generator.random((*shape[:-1], 1)) < 0.3, generator.integers(-20, 21) / 8, x)
    weight, bias = generator.normal(size=(2, shape[-1]))
    for array in (x, weight, bias):
        array.flags.writeable = False
    return x, weight, bias


dialects = st.fixed_dictionaries(
    {
        "eps": st.sampled_from([0.0, 1e-12, 1e-5, 0.3]),
        "epsilon": st.sampled_from(["inside", "outside"]),
        "variance": st.sampled_from(["biased", "unbiased"]),
    }
)


# worked numbers


def test_worked_row():
    y = plain(np.asarray([1.5, -0.5, 0.8, 2.2]))
    np.testing.assert_allclose(y, [0.50125219, -1.50375656, -0.20050088, 1.20300525], rtol=0, atol=5.1e-9)
    np.testing.assert_allclose(np.mean(y**2), 0.995 / (0.995 + 1e-5), rtol=1e-14)


def test_worked_row_with_eps_outside():
    y = plain(np.asarray([1.5, -0.5, 0.8, 2.2]), epsilon="outside")
    np.testing.assert_allclose(y[0], 0.50124968, rtol=0, atol=5.1e-9)


def test_worked_matrix():
    np.testing.assert_allclose(plain(preimage(PRINTED, 1e-5)), PRINTED, rtol=0, atol=1e-7)


def test_worked_matrix_with_eps_outside():
    """The printed gap between the two forms, 7.4e-6 at most, comes out of the rebuilt matrix."""
    x = preimage(PRINTED, 1e-5)
    gap = np.abs(plain(x, epsilon="outside") - plain(x)).max()
    assert 7.35e-6 < gap < 7.45e-6


@pytest.mark.parametrize(("epsilon", "size"), [("inside", 0.3015), ("outside", 0.9901)])
def test_dialects_differ_at_small_deviation(epsilon, size):
    """sigma = 1e-3, eps = 1e-5."""
    y = plain(np.asarray([5.001, 4.999]), epsilon=epsilon)
    np.testing.assert_allclose(y, [size, -size], rtol=0, atol=5e-5)


def test_unbiased_variance_halves_the_square_at_width_two():
    y = plain(np.asarray([1.0, -1.0]), eps=0.0, variance="unbiased")
    np.testing.assert_allclose(y, np.sqrt([0.5, 0.5]) * [1, -1], rtol=1e-15)


# against the loops and other frameworks


@SEARCH
@given(cases(), dialects)
def test_equals_the_loops(case, dialect):
    x, weight, bias = case
    wanted = np.asarray(loops.layer_norm(x, weight, bias, **dialect)).reshape(x.shape)
    atol = 1e-13 * np.abs(wanted).max(initial=0.0)
    np.testing.assert_allclose(layer_norm(x, weight, bias, **dialect), wanted, rtol=0, atol=atol)


@SEARCH
@given(cases(), dialects)
def test_frameworks_agree(case, dialect):
    wanted = layer_norm(*case, **dialect)
    np.testing.assert_array_equal(np.asarray(layer_norm(*map(strict.asarray, case), **dialect)), wanted)
    atol = 1e-13 * np.abs(wanted).max(initial=0.0)
    np.testing.assert_allclose(layer_norm(*map(torch.tensor, case), **dialect), wanted, rtol=0, atol=atol)


@pytest.mark.parametrize("eps", [1e-5, 0.3])
def test_agrees_with_torch(eps):
    x, weight, bias = torch.linspace(-2, 2, 36, dtype=torch.float64).sin().reshape(6, 6).split([4, 1, 1])
    theirs = torch.nn.functional.layer_norm(x, (6,), weight[0], bias[0], eps)
    np.testing.assert_allclose(layer_norm(x, weight[0], bias[0], eps=eps), theirs, rtol=0, atol=1e-14)


# gradients


@pytest.mark.parametrize(("epsilon", "variance"), DIALECTS)
@pytest.mark.parametrize("eps", [0.0, 0.1])
def test_gradients(eps, epsilon, variance):
    case = [
        torch.tensor(a, dtype=torch.float64, requires_grad=True) for a in ([[0.1, 0.7, -1.0]], [1.0, 2, 3], [0.0, 1, 2])
    ]
    assert torch.autograd.gradcheck(lambda *a: layer_norm(*a, eps=eps, epsilon=epsilon, variance=variance), case)


@pytest.mark.parametrize("epsilon", ["inside", "outside"])
def test_gradient_on_a_constant_row(epsilon):
    """There the deviation is 0 and only the centring acts: (I - 1/d) / sqrt(eps), or / eps."""
    x = torch.full((3,), 2.0, dtype=torch.float64)
    ones = torch.ones_like(x)
    jacobian = torch.autograd.functional.jacobian(lambda x: layer_norm(x, ones, 0 * ones, eps=0.25, epsilon=epsilon), x)
    wanted = (np.eye(3) - 1 / 3) / (0.5 if epsilon == "inside" else 0.25)
    np.testing.assert_allclose(jacobian, wanted, rtol=0, atol=1e-14)


@pytest.mark.parametrize(("epsilon", "variance"), DIALECTS)
@pytest.mark.parametrize("row", [[0.1, 0.1, 0.1], [0.1]])
def test_gradient_without_eps_on_a_constant_row_is_zero(row, epsilon, variance):
    x = torch.tensor(row, dtype=torch.float64, requires_grad=True)
    layer_norm(x, 2 * torch.ones(len(row)), torch.ones(len(row)), eps=0, epsilon=epsilon, variance=variance)[
        0
    ].backward()
    np.testing.assert_array_equal(x.grad, 0 * np.asarray(row))


# edges


@pytest.mark.parametrize(("epsilon", "variance"), DIALECTS)
@pytest.mark.parametrize("width", [1, 2, 3, 10])
def test_constant_row_without_eps_gives_the_bias(width, epsilon, variance):
    bias = np.arange(width) + 0.5
    x = np.full((2, width), 1000.1)
    y = layer_norm(x, np.full(width, 7.0), bias, eps=0.0, epsilon=epsilon, variance=variance)
    np.testing.assert_array_equal(y, [bias, bias])


@pytest.mark.parametrize(("epsilon", "variance"), DIALECTS)
@pytest.mark.parametrize("eps", [0.0, 1e-5])
def test_width_one_gives_the_bias(eps, epsilon, variance):
    y = layer_norm(
        np.asarray([[3.3], [-1e9]]), np.ones(1), np.full(1, 0.25), eps=eps, epsilon=epsilon, variance=variance
    )
    np.testing.assert_array_equal(y, [[0.25], [0.25]])


def test_axes_of_length_zero():
    for x in (np.ones((0, 2, 3)), np.ones((2, 0, 3))):
        assert plain(x).shape == plain(x, eps=0.0).shape == x.shape


def test_rows_are_independent():
    x = np.arange(24.0).reshape(2, 3, 4) ** 2
    np.testing.assert_array_equal(plain(x)[1, 2], plain(x[1, 2]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epsilon": "in"}, r"epsilon: got 'in', wanted 'inside' or 'outside'"),
        ({"variance": 1}, r"variance: got 1, wanted 'biased' or 'unbiased'"),
        ({"eps": -1e-5}, r"eps: got -1e-05, wanted"),
        ({"eps": np.nan}, r"eps: got nan, wanted"),
        ({"weight": np.ones(1)}, r"weight: got shape \(1,\), wanted \(3,\)"),
        ({"bias": np.ones((3, 1))}, r"bias: got shape \(3, 1\), wanted \(3,\)"),
        ({"x": np.ones((2, 0))}, r"x: got shape \(2, 0\), wanted a last axis of at least 1"),
    ],
)
def test_errors(change, message):
    with pytest.raises(ValueError, match=message):
        layer_norm(**{"x": np.ones((2, 3)), "weight": np.ones(3), "bias": np.ones(3), **change})


# rms_norm


rms_dialects = st.fixed_dictionaries(
    {"eps": st.sampled_from([0.0, 1e-12, 1e-6, 0.3]), "weight_form": st.sampled_from(["plain", "one_plus"])}
)


def test_rms_norm_worked_row():
    """3 and 4 have mean square 12.5."""
    y = rms_norm(np.asarray([3.0, 4.0]), np.asarray([1.0, -2.0]), eps=0.0)
    np.testing.assert_allclose(y, [0.848528137423857, -2.262741699796952], rtol=1e-15)
    y = rms_norm(np.asarray([3.0, 4.0]), np.asarray([1.0, -2.0]), eps=3.5, weight_form="one_plus")
    np.testing.assert_array_equal(y, [2 * 3 / 4, -1 * 4 / 4])


@SEARCH
@given(cases(), rms_dialects)
def test_rms_norm_equals_the_loops(case, dialect):
    x, weight, _ = case
    wanted = np.asarray(loops.rms_norm(x, weight, **dialect)).reshape(x.shape)
    atol = 1e-13 * np.abs(wanted).max(initial=0.0)
    np.testing.assert_allclose(rms_norm(x, weight, **dialect), wanted, rtol=0, atol=atol)


@SEARCH
@given(cases(), rms_dialects)
def test_rms_norm_in_all_frameworks(case, dialect):
    case = case[:2]
    wanted = rms_norm(*case, **dialect)
    np.testing.assert_array_equal(np.asarray(rms_norm(*map(strict.asarray, case), **dialect)), wanted)
    atol = 1e-13 * np.abs(wanted).max(initial=0.0)
    np.testing.assert_allclose(rms_norm(*map(torch.tensor, case), **dialect), wanted, rtol=0, atol=atol)


@pytest.mark.parametrize("eps", [1e-6, 0.3])
def test_rms_norm_agrees_with_torch(eps):
    x, weight = torch.linspace(-2, 2, 30, dtype=torch.float64).sin().reshape(5, 6).split([4, 1])
    theirs = torch.nn.functional.rms_norm(x, (6,), weight[0], eps)
    np.testing.assert_allclose(rms_norm(x, weight[0], eps=eps), theirs, rtol=0, atol=1e-14)


def test_rms_norm_is_layer_norm_after_centring():
    x = np.asarray([[0.25, -1.5, 3.0, 0.5], [2.0, 2.0, -4.0, 8.0]])
    centred = x - x.mean(axis=-1, keepdims=True)
    np.testing.assert_allclose(rms_norm(centred, np.ones(4), eps=0.1), plain(x, eps=0.1), rtol=0, atol=1e-15)


@pytest.mark.parametrize("eps", [0.0, 0.1])
@pytest.mark.parametrize("weight_form", ["plain", "one_plus"])
def test_rms_norm_gradients(eps, weight_form):
    case = [torch.tensor(a, dtype=torch.float64, requires_grad=True) for a in ([[0.1, 0.7, -1.0]], [1.0, 2, 3])]
    assert torch.autograd.gradcheck(lambda *a: rms_norm(*a, eps=eps, weight_form=weight_form), case)


@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_rms_norm_of_zeros_is_zero(eps):
    x = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
    y = rms_norm(x, torch.ones(3, dtype=torch.float64), eps=eps)
    y.sum().backward()
    np.testing.assert_array_equal(y.detach(), np.zeros((2, 3)))
    np.testing.assert_allclose(x.grad, np.full((2, 3), 1e3 if eps else 0.0), rtol=1e-15)


def test_rms_norm_of_no_rows():
    assert rms_norm(np.ones((0, 3)), np.ones(3)).shape == (0, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_form": "1+"}, r"rms_norm: weight_form: got '1\+', wanted 'plain' or 'one_plus'"),
        ({"eps": -1e-5}, r"rms_norm: eps: got -1e-05, wanted"),
        ({"eps": np.inf}, r"rms_norm: eps: got inf, wanted"),
        ({"weight": np.ones(1)}, r"rms_norm: weight: got shape \(1,\), wanted \(3,\)"),
        ({"x": np.ones((2, 0))}, r"rms_norm: x: got shape \(2, 0\), wanted a last axis of at least 1"),
    ],
)
def test_rms_norm_errors(change, message):
    with pytest.raises(ValueError, match=message):
        rms_norm(**{"x": np.ones((2, 3)), "weight": np.ones(3), **change})
