"""The reference embedding and dropout: loops, other frameworks, gradients, edges."""

import array_api_strict as strict
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from veriformer.reference import dropout, embedding, loops

pytestmark = pytest.mark.filterwarnings("error")
SEARCH = settings(max_examples=200, deadline=None, database=None, derandomize=True)
FRAMEWORKS = [np.asarray, torch.tensor, strict.asarray]


@st.composite
def lookups(draw):
    """ids[…], table[V,d], and a padding_index or None."""
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    size, width = draw(st.sampled_from([(1, 1), (5, 3), (2, 4)]))
    ids = generator.integers(0, size, draw(st.sampled_from([(), (4,), (2, 3), (0,), (2, 1, 2)])))
    return np.asarray(ids), generator.normal(size=(size, width)), draw(st.sampled_from([None, 0, size - 1]))


@SEARCH
@given(lookups())
def test_equals_the_loops_in_all_frameworks(case):
    ids, table, padding_index = case
    wanted = np.asarray(loops.embedding(ids, table)).reshape(*ids.shape, table.shape[1])
    for convert in FRAMEWORKS:
        got = embedding(convert(ids), convert(table), padding_index=padding_index)
        np.testing.assert_array_equal(np.asarray(got), wanted)


@pytest.mark.parametrize("padding_index", [None, 2])
def test_values_and_gradients_agree_with_torch(padding_index):
    ids = torch.tensor([[2, 0, 3], [2, 2, 0]])
    results = []
    for function in (embedding, torch.nn.functional.embedding):
        table = torch.linspace(-1, 1, 20, dtype=torch.float64).reshape(4, 5).requires_grad_()
        keyword = "padding_idx" if function is torch.nn.functional.embedding else "padding_index"
        y = function(ids, table, **{keyword: padding_index})
        (y * torch.arange(30.0).reshape(y.shape)).sum().backward()
        results.append((y.detach(), table.grad))
    for ours, theirs in zip(*results, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert results[0][1][2].any() == (padding_index is None) and results[0][1][3].any()


def test_gradients_of_the_table():
    table = torch.linspace(-1, 1, 6, dtype=torch.float64).reshape(3, 2).requires_grad_()
    assert torch.autograd.gradcheck(lambda table: embedding(torch.tensor([2, 0, 2]), table), table)


@pytest.mark.parametrize("convert", FRAMEWORKS)
def test_whatever_a_row_holds_comes_back(convert):
    table = np.asarray([[np.nan, np.inf], [-0.0, 5e-324]])
    got = np.asarray(embedding(convert(np.asarray([1, 0])), convert(table), padding_index=0))
    np.testing.assert_array_equal(got, table[::-1])
    assert np.signbit(got[0, 0])


@pytest.mark.parametrize("convert", FRAMEWORKS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": np.asarray([0, -1])}, r"ids: got -1 to 0, wanted 0 to 2"),
        ({"ids": np.asarray([[3], [1]])}, r"ids: got 1 to 3, wanted 0 to 2"),
        ({"ids": np.asarray([1.0])}, r"ids: got .*float64, wanted integers"),
        ({"ids": np.asarray([True])}, r"ids: got .*bool, wanted integers"),
        ({"padding_index": -1}, r"padding_index: got -1, wanted 0 to 2, or None"),
        ({"padding_index": 3}, r"padding_index: got 3"),
        ({"table": np.ones(3)}, r"table: got shape \(3,\), wanted 2 axes"),
    ],
)
def test_errors_of_embedding(convert, change, message):
    arguments = {"ids": np.asarray([0]), "table": np.ones((3, 2)), **change}
    arguments = {name: convert(a) if isinstance(a, np.ndarray) else a for name, a in arguments.items()}
    with pytest.raises(ValueError, match=f"embedding: {message}"):
        embedding(**arguments)


# dropout


@st.composite
def droppings(draw):
    """x, uniform alike, rate; some numbers fall on the rate itself."""
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    shape = draw(st.sampled_from([(1,), (7,), (2, 3, 4), (0, 2)]))
    return (
        generator.normal(size=shape),
        generator.integers(0, 8, shape) / 8,
        draw(st.sampled_from([0, 0.125, 0.3, 0.5])),
    )


@SEARCH
@given(droppings())
def test_dropout_equals_the_loops_in_all_frameworks(case):
    x, uniform, rate = case
    wanted = np.asarray(loops.dropout(x, rate=rate, uniform=uniform)).reshape(x.shape) if x.size else x
    for convert in FRAMEWORKS:
        got = dropout(convert(x), rate=rate, uniform=convert(uniform))
        np.testing.assert_array_equal(np.asarray(got), wanted)


def test_dropout_keeps_the_mean():
    """1000 equally spaced numbers drop exactly a quarter."""
    y = dropout(np.ones(1000), rate=0.25, uniform=np.arange(1000) / 1000)
    np.testing.assert_allclose(np.mean(y), 1.0, rtol=1e-14)


def test_dropout_at_its_ends():
    x, uniform = np.asarray([np.nan, 3.0]), np.asarray([0.0, 1 - 2**-53])
    np.testing.assert_array_equal(dropout(x, rate=0, uniform=uniform), x)
    np.testing.assert_array_equal(dropout(x, rate=1, uniform=uniform), [0, 0])
    np.testing.assert_array_equal(dropout(x, rate=0.5, uniform=uniform), [0, 6])


def test_gradients_of_dropout():
    x, uniform = torch.tensor([1.0, np.nan, -2.0], dtype=torch.float64), torch.tensor([0.75, 0.125, 0.5])
    x.requires_grad_()
    dropout(x, rate=0.5, uniform=uniform).sum().backward()
    np.testing.assert_array_equal(x.grad, [2, 0, 2])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rate": -0.1}, r"rate: got -0.1, wanted a number from 0 to 1"),
        ({"rate": 1.5}, r"rate: got 1.5"),
        ({"rate": np.nan}, r"rate: got nan"),
        ({"uniform": np.ones(1)}, r"uniform: got shape \(1,\), wanted \(2,\)"),
    ],
)
def test_errors_of_dropout(change, message):
    with pytest.raises(ValueError, match=f"dropout: {message}"):
        dropout(np.ones(2), **{"rate": 0.5, "uniform": np.zeros(2), **change})
