"""The reference softmax, log_softmax and logsumexp: worked numbers, loops, other frameworks, edges."""

import array_api_strict as strict
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from veriformer.reference import log_softmax, logsumexp, loops, softmax

pytestmark = pytest.mark.filterwarnings("error")
SEARCH = settings(max_examples=150, deadline=None, database=None, derandomize=True)
INF = np.inf
OPERATIONS = {"softmax": softmax, "log_softmax": log_softmax, "logsumexp": logsumexp}


def close(got, wanted, relative=1e-13):
    """Equal up to `relative` of the largest finite wanted entry; infinities and zeros of a mask exactly."""
    got, wanted = np.asarray(got), np.asarray(wanted, dtype=float)
    assert got.shape == wanted.shape
    finite = np.isfinite(wanted)
    np.testing.assert_array_equal(got[~finite], wanted[~finite])
    largest = np.abs(wanted[finite]).max(initial=0.0)
    np.testing.assert_allclose(got[finite], wanted[finite], rtol=0, atol=relative * largest)


@st.composite
def logits(draw):
    """[2, 3, n] with ties, absent entries, empty rows and, at times, huge entries."""
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    size = (2, 3, draw(st.sampled_from([1, 2, 3, 7])))
    x = generator.integers(-3, 4, size) * draw(st.sampled_from([0.3, 1.0, 37.0, 1e4, 1e300]))
    x[generator.random(size) < draw(st.sampled_from([0.0, 0.3, 0.8]))] = -INF
    if draw(st.booleans()):
        x[1, 2] = -INF
    x.flags.writeable = False
    return x


# worked numbers


@pytest.mark.parametrize(
    ("x", "p"),
    [
        ([10.0, 0.0, 0.0], [0.99990921, 4.53958e-5, 4.53958e-5]),
        ([10 / 8, 0.0, 0.0], [0.6357240, 0.1821380, 0.1821380]),
        ([2.0, 1.0, 0.1, -1.0], [0.6380664, 0.2347315, 0.0954347, 0.0317675]),
    ],
)
def test_softmax_worked_numbers(x, p):
    np.testing.assert_allclose(softmax(np.asarray(x)), p, rtol=0, atol=5.1e-8)


def test_softmax_of_printed_logits():
    p = softmax(np.asarray([0.0172, -0.3558, -0.1536, 0.0199, -0.1594, -0.005]))
    np.testing.assert_allclose(p, [0.1869, 0.1287, 0.1576, 0.1874, 0.1566, 0.1828], rtol=0, atol=1e-4)
    np.testing.assert_allclose(-np.log(p[3]), 1.6745, rtol=0, atol=1e-4)


def test_temperature_eight_is_division_by_eight():
    p = softmax(np.asarray([10.0, 0.0, 0.0]), temperature=8)
    np.testing.assert_allclose(p, [0.6357240, 0.1821380, 0.1821380], rtol=0, atol=5.1e-8)


def test_log_worked_numbers():
    x = np.asarray([2.0, 1.0, 0.1, -1.0])
    np.testing.assert_allclose(np.exp(logsumexp(x)), 11.5803883, rtol=0, atol=5.1e-8)
    np.testing.assert_allclose(-log_softmax(x)[1], 1.4493130, rtol=0, atol=5.1e-8)


@pytest.mark.parametrize(("divisor", "norm"), [(1, 1.435e-4), (8, 0.3922)])
def test_jacobian_worked_norms(divisor, norm):
    """Of p with respect to the logits it is taken of: sharp and scaled."""
    x = torch.tensor([10.0, 0.0, 0.0], dtype=torch.float64) / divisor
    jacobian = torch.autograd.functional.jacobian(softmax, x)
    np.testing.assert_allclose(torch.linalg.norm(jacobian).item(), norm, rtol=5e-4)


# against the loops and other frameworks


@SEARCH
@given(logits(), st.sampled_from([0, 1e-300, 0.25, 1.0, 3.0, 1e300]), st.sampled_from([0, 1, -1]))
def test_softmax_equals_the_loops(x, temperature, axis):
    rows = np.moveaxis(x, -1, axis)
    got = np.moveaxis(softmax(rows, axis=axis, temperature=temperature), axis, -1)
    close(got, loops.softmax(x, temperature=temperature))


@SEARCH
@given(logits(), st.sampled_from([0, 1, -1]))
def test_logarithms_equal_the_loops(x, axis):
    rows = np.moveaxis(x, -1, axis)
    close(np.moveaxis(log_softmax(rows, axis=axis), axis, -1), loops.log_softmax(x))
    close(logsumexp(rows, axis=axis), loops.logsumexp(x))


@pytest.mark.parametrize("name", OPERATIONS)
@SEARCH
@given(x=logits(), axis=st.sampled_from([0, -1]))
def test_frameworks_agree(name, x, axis):
    operation, wanted = OPERATIONS[name], OPERATIONS[name](x, axis=axis)
    np.testing.assert_array_equal(np.asarray(operation(strict.asarray(x), axis=axis)), wanted)
    close(operation(torch.tensor(x), axis=axis), wanted)


@pytest.mark.parametrize("name", OPERATIONS)
def test_agrees_with_torch(name):
    x = torch.linspace(-30, 30, 60, dtype=torch.float64).reshape(3, 4, 5)[:, :, [3, 1, 4, 0, 2]]
    theirs = {"softmax": torch.softmax, "log_softmax": torch.log_softmax, "logsumexp": torch.logsumexp}[name]
    for axis in (0, 1, 2):
        close(OPERATIONS[name](x, axis=axis), theirs(x, axis))


# gradients


@pytest.mark.parametrize("name", OPERATIONS)
def test_gradients_on_full_rows(name):
    x = torch.tensor([[0.3, -1.2, 2.0], [0.5, 0.1, 40.0]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(OPERATIONS[name], (x,))


@pytest.mark.parametrize("temperature", [0.3, 5.0])
def test_gradients_at_a_temperature(temperature):
    x = torch.tensor([[0.3, -1.2, 2.0]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: softmax(x, temperature=temperature), (x,))


@pytest.mark.parametrize("name", OPERATIONS)
def test_no_gradient_reaches_an_absent_entry(name):
    x = torch.tensor([[0.3, -INF, 2.0], [-INF, -INF, -INF]], dtype=torch.float64, requires_grad=True)
    y = OPERATIONS[name](x)
    cotangent = torch.arange(1.0, y.numel() + 1, dtype=x.dtype).reshape(y.shape)
    (gradient,) = torch.autograd.grad(y, x, cotangent)
    np.testing.assert_array_equal(gradient[:, 1], [0, 0])
    np.testing.assert_array_equal(gradient[1], [0, 0, 0])
    assert (gradient[0, [0, 2]] != 0).all()


# edges


def test_absent_entries_and_empty_rows():
    x = np.asarray([[-INF, 5.0, -INF], [-INF, -INF, -INF]])
    np.testing.assert_array_equal(softmax(x), [[0, 1, 0], [0, 0, 0]])
    np.testing.assert_array_equal(log_softmax(x), [[-INF, 0, -INF], [-INF, -INF, -INF]])
    np.testing.assert_array_equal(logsumexp(x), [5, -INF])


def test_absence_equals_deletion():
    x = np.asarray([0.5, -INF, 1.5, -0.25])
    np.testing.assert_array_equal(softmax(x)[[0, 2, 3]], softmax(x[[0, 2, 3]]))
    np.testing.assert_array_equal(logsumexp(x), logsumexp(x[[0, 2, 3]]))


def test_zero_temperature_shares_among_the_largest():
    x = np.asarray([[2.0, 2.0, 1.0], [-INF, -1e308, 1e308], [-INF, -INF, -INF]])
    np.testing.assert_array_equal(softmax(x, temperature=0), [[0.5, 0.5, 0], [0, 0, 1], [0, 0, 0]])


@pytest.mark.parametrize("temperature", [5e-324, 1.0, 1e305])
def test_softmax_over_the_whole_range_of_floats(temperature):
    p = softmax(np.asarray([1.7e308, -1.7e308]), temperature=temperature)
    np.testing.assert_array_equal(p, [1, 0])


def test_softmax_at_the_hottest():
    p = softmax(np.asarray([1e307, -1e307, -INF]), temperature=1e308)
    np.testing.assert_allclose(p, [1 / (1 + np.exp(-0.2)), 1 / (1 + np.exp(0.2)), 0], rtol=1e-15)


def test_log_softmax_where_the_probability_underflows():
    np.testing.assert_array_equal(log_softmax(np.asarray([0.0, -800.0])), [0, -800])


def test_log_softmax_keeps_log_n_beside_large_logits():
    np.testing.assert_allclose(log_softmax(np.full(4, 1e16)), -np.log(4), rtol=1e-15)


def test_nan_is_not_swallowed():
    x = np.asarray([[1.0, np.nan], [1.0, 1.0]])
    for operation in OPERATIONS.values():
        bad = np.isnan(operation(x))
        assert bad[0].all() and not bad[1].any()


def test_axes_of_length_zero():
    for x in (np.zeros((3, 0)), torch.zeros((3, 0)), strict.zeros((3, 0))):
        assert softmax(x).shape == log_softmax(x).shape == (3, 0)
        np.testing.assert_array_equal(np.asarray(logsumexp(x)), [-INF] * 3)
        assert softmax(x, axis=0).shape == (3, 0) and logsumexp(x, axis=0).shape == (0,)


@pytest.mark.parametrize("temperature", [-1.0, np.nan, INF])
def test_temperature_out_of_range_is_an_error(temperature):
    with pytest.raises(ValueError, match=r"temperature: got .*, wanted a finite number >= 0"):
        softmax(np.zeros(2), temperature=temperature)


@pytest.mark.parametrize("name", OPERATIONS)
def test_dtype_is_kept(name):
    assert OPERATIONS[name](np.zeros(2, dtype=np.float32)).dtype == np.float32
    assert OPERATIONS[name](torch.zeros(2, dtype=torch.bfloat16)).dtype == torch.bfloat16
