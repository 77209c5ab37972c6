"""The reference sinusoids, rotations and ALiBi: worked numbers, loops, other frameworks, what they promise."""

import array_api_strict as strict
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from veriformer.reference import alibi_bias, attention, loops, rotary_embedding, sinusoidal_positions

pytestmark = pytest.mark.filterwarnings("error")
SEARCH = settings(max_examples=200, deadline=None, database=None, derandomize=True)
LIKES = [np.zeros(1, dtype=np.float32), torch.zeros(1), strict.zeros(1)]
PAIRS = ["halves", "interleaved"]


def integers(low, high):
    return st.integers(low, high)


@st.composite
def rotations(draw):
    """(x[…,T,D], positions[T]), keywords."""
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    length, width = draw(st.sampled_from([(1, 2), (3, 4), (2, 6), (5, 8), (0, 2)]))
    x = generator.normal(size=(*draw(st.sampled_from([(), (2,), (2, 3)])), length, width))
    positions = generator.integers(-5, draw(st.sampled_from([6, 5000])), length)
    for array in (x, positions):
        array.flags.writeable = False
    keywords = {"base": draw(st.sampled_from([10000.0, 500000.0, 2.0])), "pairs": draw(st.sampled_from(PAIRS))}
    return (x, positions), keywords


# worked numbers


@pytest.mark.parametrize(
    ("width", "row"),
    [
        (1, [0.8414710]),
        (4, [0.8414710, 0.5403023, 0.0099998, 0.9999500]),
        (5, [0.8414710, 0.5403023, 0.0251162, 0.9996845, 0.0006310]),
    ],
)
@pytest.mark.parametrize("like", LIKES)
def test_sinusoids_of_position_one(width, row, like):
    got = sinusoidal_positions(2, width, like=like)
    assert type(got) is type(like)
    np.testing.assert_allclose(np.asarray(got)[1], row, rtol=0, atol=5.1e-8)
    np.testing.assert_array_equal(np.asarray(got)[0], np.arange(1, width + 1) % 2 == 0)


@pytest.mark.parametrize("pairs", PAIRS)
def test_a_quarter_turn(pairs):
    """base = 1 turns every pair by the position itself; nearest to a quarter turn is 33 · 2 pi + 1.57 = 209."""
    x = np.asarray([[1.0, 2.0, 3.0, 4.0]])
    turned = {"halves": [-3.0, -4.0, 1.0, 2.0], "interleaved": [-2.0, 1.0, -4.0, 3.0]}[pairs]
    angle = 209 - 66.5 * np.pi
    wanted = np.cos(angle) * np.asarray(turned) - np.sin(angle) * x[0]
    np.testing.assert_allclose(
        rotary_embedding(x, np.asarray([209]), base=1.0, pairs=pairs)[0], wanted, rtol=0, atol=1e-13
    )


@pytest.mark.parametrize(
    ("heads", "slopes"),
    [
        (1, [2**-8]),
        (2, [2**-4, 2**-8]),
        (3, [2**-4, 2**-8, 2**-2]),
        (6, [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]),
        (8, [2.0**-h for h in range(1, 9)]),
        (12, [*(2.0**-h for h in range(1, 9)), *(2.0 ** -(h - 0.5) for h in (1, 2, 3, 4))]),
    ],
)
def test_slopes(heads, slopes):
    np.testing.assert_allclose(alibi_bias(heads, 2, 2, like=LIKES[0])[:, 1, 0], -np.asarray(slopes), rtol=1e-15)


@pytest.mark.parametrize("like", LIKES)
def test_alibi_of_two_queries_and_three_keys(like):
    signed, distance = (np.asarray(alibi_bias(1, 2, 3, form=form, like=like)) * 256 for form in ("signed", "distance"))
    np.testing.assert_array_equal(signed, [[[-1, 0, 1], [-2, -1, 0]]])
    np.testing.assert_array_equal(distance, [[[-1, 0, -1], [-2, -1, 0]]])
    assert type(alibi_bias(1, 2, 3, like=like)) is type(like)


# against the loops and other frameworks


@SEARCH
@given(integers(0, 5), integers(1, 9), st.sampled_from([0, 1, 7, 1000]))
def test_sinusoids_equal_the_loops(length, width, offset):
    got = [np.asarray(sinusoidal_positions(length, width, offset=offset, like=like)) for like in LIKES]
    wanted = np.asarray(loops.sinusoidal_positions(length, width, offset=offset)).reshape(length, width)
    np.testing.assert_allclose(got[0], wanted, rtol=0, atol=1e-15 * (1 + offset + length))
    np.testing.assert_array_equal(got[2], got[0])
    np.testing.assert_allclose(got[1], got[0], rtol=0, atol=1e-15)


@SEARCH
@given(rotations())
def test_rotations_equal_complex_numbers(case):
    (x, positions), keywords = case
    wanted = np.asarray(loops.rotary_embedding(x, positions, **keywords) if x.size else x).reshape(x.shape)
    atol = 1e-13 * np.abs(x).max(initial=0.0) * (1 + np.abs(positions).max(initial=0) / 100)
    np.testing.assert_allclose(rotary_embedding(x, positions, **keywords), wanted, rtol=0, atol=atol)


@SEARCH
@given(rotations())
def test_frameworks_turn_alike(case):
    arrays, keywords = case
    wanted = rotary_embedding(*arrays, **keywords)
    np.testing.assert_array_equal(np.asarray(rotary_embedding(*map(strict.asarray, arrays), **keywords)), wanted)
    np.testing.assert_allclose(rotary_embedding(*map(torch.tensor, arrays), **keywords), wanted, rtol=0, atol=1e-14)


@SEARCH
@given(integers(1, 17), integers(0, 4), integers(0, 4), st.sampled_from(["signed", "distance"]))
def test_alibi_equals_the_loops(heads, queries, keys, form):
    got = [np.asarray(alibi_bias(heads, queries, keys, form=form, like=like)) for like in LIKES]
    wanted = np.asarray(loops.alibi_bias(heads, queries, keys, form=form)).reshape(heads, queries, keys)
    np.testing.assert_allclose(got[0], wanted, rtol=1e-13)
    np.testing.assert_array_equal(got[1], got[0])
    np.testing.assert_array_equal(got[2], got[0])


# what they promise


def test_a_slice_with_its_offset_is_a_slice_of_the_table():
    whole = sinusoidal_positions(9, 7, like=LIKES[0])
    np.testing.assert_array_equal(sinusoidal_positions(4, 7, offset=5, like=LIKES[0]), whole[5:])


def test_sinusoids_have_constant_length_and_depend_on_distance():
    table = sinusoidal_positions(40, 8, offset=3, like=LIKES[0])
    products = table @ table.T
    for distance in range(40):
        diagonal = np.diagonal(products, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], rtol=0, atol=1e-13)
    np.testing.assert_allclose(np.diagonal(products), 4.0, rtol=1e-14)


@pytest.mark.parametrize("pairs", PAIRS)
def test_rotated_scores_depend_on_the_distance(pairs):
    q, k = np.random.default_rng(1).normal(size=(2, 1, 6))

    def score(m, n):
        at = [np.asarray([position]) for position in (m, n)]
        return np.sum(rotary_embedding(q, at[0], pairs=pairs) * rotary_embedding(k, at[1], pairs=pairs))

    for m, n in ((0, 0), (3, 1), (-2, 5)):
        np.testing.assert_allclose(score(m + 100, n + 100), score(m, n), rtol=0, atol=1e-12)


@pytest.mark.parametrize("pairs", PAIRS)
def test_position_zero_changes_nothing_and_the_opposite_turns_back(pairs):
    x = np.random.default_rng(2).normal(size=(2, 3, 4))
    np.testing.assert_array_equal(rotary_embedding(x, np.zeros(3, dtype=int), pairs=pairs), x)
    there = rotary_embedding(x, np.asarray([1, 20, 300]), pairs=pairs)
    back = rotary_embedding(there, -np.asarray([1, 20, 300]), pairs=pairs)
    np.testing.assert_allclose(back, x, rtol=0, atol=1e-15 * 10)


def test_pairings_are_one_after_a_permutation_of_channels():
    x, positions = np.random.default_rng(3).normal(size=(5, 6)), np.arange(5)
    order = [0, 2, 4, 1, 3, 5]
    np.testing.assert_array_equal(
        rotary_embedding(x, positions, pairs="interleaved")[:, order], rotary_embedding(x[:, order], positions)
    )


def test_angles_are_float64_for_arrays_of_less():
    x = np.ones((1, 2), dtype=np.float32)
    got = rotary_embedding(x, np.asarray([1000001]))
    assert got.dtype == np.float32
    np.testing.assert_allclose(
        got, [[np.cos(1000001) - np.sin(1000001), np.cos(1000001) + np.sin(1000001)]], rtol=0, atol=3e-7
    )


def test_signed_alibi_under_causality_is_a_bias_of_keys_alone():
    q, k, v = np.random.default_rng(4).normal(size=(3, 1, 6, 3, 4))
    bias = alibi_bias(6, 3, 3, like=q)[None]
    by_key = bias[:, :, -1:, :]
    np.testing.assert_allclose(
        attention(q, k, v, bias=bias, causal=True), attention(q, k, v, bias=by_key, causal=True), rtol=0, atol=1e-14
    )


@pytest.mark.parametrize("pairs", PAIRS)
def test_gradients(pairs):
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: rotary_embedding(x, torch.tensor([0, 3, -2]), pairs=pairs), x)


# errors


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (sinusoidal_positions, {"length": -1, "width": 2}, r"length: got -1, wanted at least 0"),
        (sinusoidal_positions, {"length": 2, "width": 0}, r"width: got 0, wanted at least 1"),
        (alibi_bias, {"heads": 0, "query_length": 1, "key_length": 1}, r"heads: got 0, wanted at least 1"),
        (alibi_bias, {"heads": 1, "query_length": -2, "key_length": 1}, r"query_length: got -2, wanted at least 0"),
        (alibi_bias, {"heads": 1, "query_length": 1, "key_length": -1}, r"key_length: got -1, wanted at least 0"),
        (
            alibi_bias,
            {"heads": 1, "query_length": 1, "key_length": 1, "form": "absolute"},
            r"form: got 'absolute', wanted 'signed' or 'distance'",
        ),
    ],
)
def test_errors_of_tables(function, arguments, message):
    with pytest.raises(ValueError, match=message):
        function(**arguments, like=LIKES[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pairs": "half"}, r"pairs: got 'half', wanted 'halves' or 'interleaved'"),
        ({"x": np.ones((3, 5))}, r"x: got shape \(3, 5\), wanted \[…, T, D\] with an even D"),
        ({"x": np.ones(4)}, r"x: got shape \(4,\)"),
        ({"positions": np.arange(1)}, r"positions: got shape \(1,\), wanted \(3,\)"),
        ({"positions": np.ones((3, 1), dtype=int)}, r"positions: got shape \(3, 1\)"),
        ({"base": 0.0}, r"base: got 0.0, wanted a finite number > 0"),
        ({"base": np.nan}, r"base: got nan"),
    ],
)
def test_errors_of_rotations(change, message):
    with pytest.raises(ValueError, match=message):
        rotary_embedding(**{"x": np.ones((3, 4)), "positions": np.arange(3), **change})
