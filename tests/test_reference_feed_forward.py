"""The reference feed_forward: worked numbers, loops, other frameworks, what it promises."""

import array_api_strict as strict
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from veriformer.reference import feed_forward, loops

pytestmark = pytest.mark.filterwarnings("error")
SEARCH = settings(max_examples=200, deadline=None, database=None, derandomize=True)


@st.composite
def cases(draw):
    """x[…,d], w1[d,f], b1[f], w2[f,d], b2[d]; either bias may be None."""
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    lead = draw(st.sampled_from([(), (3,), (2, 3), (0,)]))
    width, inner = draw(st.sampled_from([(1, 1), (2, 3), (4, 2), (3, 12)]))
    shapes = ((*lead, width), (width, inner), (inner,), (inner, width), (width,))
    case = [generator.normal(size=shape) for shape in shapes]
    for array in case:
        array.flags.writeable = False
    for place in (2, 4):
        if draw(st.booleans()):
            case[place] = None
    return case


def converted(convert, case):
    return [None if array is None else convert(array) for array in case]


def test_worked_numbers():
    x, w1, b1 = np.asarray([1.0, 2.0]), np.asarray([[1.0, 0.0, -1.0], [1.0, -1.0, 1.0]]), np.asarray([0.5, 0.0, -1.0])
    w2, b2 = np.asarray([[1.0, -2.0], [9.0, 9.0], [9.0, 9.0]]), np.asarray([0.25, 1.0])
    np.testing.assert_array_equal(feed_forward(x, w1, b1, w2, b2), [3.75, -6.0])


@SEARCH
@given(cases())
def test_equals_the_loops(case):
    wanted = np.asarray(loops.feed_forward(*case)).reshape(case[0].shape) if case[0].size else case[0]
    atol = 1e-13 * np.abs(wanted).max(initial=1.0)
    np.testing.assert_allclose(feed_forward(*case), wanted, rtol=0, atol=atol)


@SEARCH
@given(cases())
def test_frameworks_agree(case):
    wanted = feed_forward(*case)
    np.testing.assert_array_equal(np.asarray(feed_forward(*converted(strict.asarray, case))), wanted)
    atol = 1e-13 * np.abs(wanted).max(initial=1.0)
    np.testing.assert_allclose(feed_forward(*converted(torch.tensor, case)), wanted, rtol=0, atol=atol)


def arrays(seed=0):
    generator = np.random.default_rng(seed)
    return [generator.normal(size=shape) for shape in ((2, 3, 4), (4, 5), (5,), (5, 4), (4,))]


def test_agrees_with_torch():
    x, w1, b1, w2, b2 = map(torch.tensor, arrays())
    theirs = torch.nn.functional.linear(torch.relu(torch.nn.functional.linear(x, w1.T, b1)), w2.T, b2)
    ours = feed_forward(x, w1, b1, w2, b2)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-13 * theirs.abs().max())


def test_gradients():
    assert torch.autograd.gradcheck(feed_forward, [torch.tensor(a, requires_grad=True) for a in arrays()])


def test_tokens_are_independent():
    x, *weights = arrays()
    before = feed_forward(x, *weights)
    x[0, 1] = np.nan
    after = feed_forward(x, *weights)
    assert np.isnan(after[0, 1]).all()
    after[0, 1] = before[0, 1]
    np.testing.assert_array_equal(after, before)


def test_an_inner_width_of_zero_gives_the_bias():
    b2 = np.asarray([1.0, -2.0])
    y = feed_forward(np.ones((3, 2)), np.ones((2, 0)), np.ones(0), np.ones((0, 2)), b2)
    np.testing.assert_array_equal(y, [b2] * 3)


@pytest.mark.parametrize(
    ("place", "shape", "message"),
    [
        (1, (3, 5), r"w1: got shape \(3, 5\), wanted \(4, 5\)"),
        (2, (1,), r"b1: got shape \(1,\), wanted \(5,\)"),
        (3, (5, 1), r"w2: got shape \(5, 1\), wanted \(5, 4\)"),
        (4, (4, 1), r"b2: got shape \(4, 1\), wanted \(4,\)"),
    ],
)
def test_errors(place, shape, message):
    case = arrays()
    case[place] = np.ones(shape)
    with pytest.raises(ValueError, match=f"feed_forward: {message}"):
        feed_forward(*case)
