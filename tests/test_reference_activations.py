"""The reference relu and gelu: worked numbers, loops, other frameworks, both forms, edges."""

import array_api_strict as strict
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from veriformer.reference import gelu, loops, relu

pytestmark = pytest.mark.filterwarnings("error")
SEARCH = settings(max_examples=200, deadline=None, database=None, derandomize=True)
FORMS = ["erf", "tanh"]
FUNCTIONS = {
    "relu": (relu, loops.relu),
    "erf": (gelu, loops.gelu),
    "tanh": (lambda x: gelu(x, form="tanh"), lambda x: loops.gelu(x, form="tanh")),
}


@st.composite
def arrays(draw):
    """x of any rank from 1 to 3, small and large entries, some of them 0."""
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    x = generator.normal(size=draw(st.sampled_from([(1,), (5,), (2, 3), (2, 1, 4)])))
    x = x * draw(st.sampled_from([1e-30, 0.01, 1.0, 7.0])) * (generator.random(x.shape) < 0.9)
    x.flags.writeable = False
    return x


# worked numbers


@pytest.mark.parametrize(
    ("form", "wanted"),
    [
        ("erf", [-0.0040496941, -0.1586552539, 0.0, 0.8413447461, 2.9959503059]),
        ("tanh", [-0.0036373921, -0.1588080094, 0.0, 0.8411919906, 2.9963626079]),
    ],
)
def test_worked_numbers(form, wanted):
    y = gelu(np.asarray([-3.0, -1.0, 0.0, 1.0, 3.0]), form=form)
    np.testing.assert_allclose(y, wanted, rtol=0, atol=5.1e-11)


def test_the_forms_differ_by_less_than_stated():
    x = np.linspace(-8, 8, 20001)
    gap = np.abs(gelu(x) - gelu(x, form="tanh")).max()
    assert 4.7e-4 < gap < 4.8e-4


def test_relu_of_numbers():
    np.testing.assert_array_equal(relu(np.asarray([-np.inf, -2.0, 0.0, 3.0, np.inf])), [0, 0, 0, 3, np.inf])


# against the loops and other frameworks


@pytest.mark.parametrize("name", FUNCTIONS)
@SEARCH
@given(x=arrays())
def test_equals_the_loops(name, x):
    ours, theirs = FUNCTIONS[name]
    wanted = np.asarray(theirs(x))
    np.testing.assert_allclose(ours(x), wanted, rtol=0, atol=1e-15 * np.abs(x).max())


@pytest.mark.parametrize("name", FUNCTIONS)
@SEARCH
@given(x=arrays())
def test_frameworks_agree(name, x):
    function, _ = FUNCTIONS[name]
    wanted = function(x)
    np.testing.assert_array_equal(np.asarray(function(strict.asarray(x))), wanted)
    np.testing.assert_allclose(function(torch.tensor(x)), wanted, rtol=0, atol=1e-15 * np.abs(x).max())


@pytest.mark.parametrize("form", FORMS)
def test_gelu_agrees_with_torch(form):
    x = torch.linspace(-9, 9, 1001, dtype=torch.float64)
    theirs = torch.nn.functional.gelu(x, approximate="none" if form == "erf" else "tanh")
    np.testing.assert_allclose(gelu(x, form=form), theirs, rtol=0, atol=2e-15)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("convert", [np.asarray, torch.tensor, strict.asarray])
def test_the_dtype_and_the_shape_stay(form, convert):
    for shape in ((), (0, 3), (2, 1)):
        x = convert(np.ones(shape, dtype=np.float32))
        y = gelu(x, form=form)
        assert y.dtype == relu(x).dtype == x.dtype and tuple(y.shape) == tuple(relu(x).shape) == shape


# gradients


@pytest.mark.parametrize("form", FORMS)
def test_gradients(form):
    x = torch.linspace(-5, 5, 11, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: gelu(x, form=form), x)


def test_gradient_of_relu():
    x = torch.tensor([-1.0, 0.0, 2.0], dtype=torch.float64, requires_grad=True)
    relu(x).sum().backward()
    np.testing.assert_array_equal(x.grad, [0.0, 0.0, 1.0])


# edges


@pytest.mark.parametrize("name", FUNCTIONS)
def test_nan_stays_and_infinity_stays(name):
    y = FUNCTIONS[name][0](np.asarray([np.nan, np.inf]))
    np.testing.assert_array_equal(y, [np.nan, np.inf])


@pytest.mark.parametrize("form", FORMS)
def test_large_entries(form):
    np.testing.assert_array_equal(gelu(np.asarray([1e100, -1e100, 40.0, -40.0]), form=form), [1e100, 0, 40, 0])


def test_errors():
    with pytest.raises(ValueError, match=r"gelu: form: got 'exact', wanted 'erf' or 'tanh'"):
        gelu(np.ones(2), form="exact")
