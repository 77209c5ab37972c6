"""The reference varlen_attention: loops, attention on each sequence, other frameworks, edges."""

import array_api_strict as strict
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from veriformer.reference import attention, loops_layers, varlen_attention

pytestmark = pytest.mark.filterwarnings("error")
SEARCH = settings(max_examples=200, deadline=None, database=None, derandomize=True)

# lengths of the sequences in queries and in keys, H, G, D, Dv
PACKINGS = [
    ((1,), (1,), 1, 1, 1, 1),
    ((2, 3), (4, 3), 2, 1, 2, 3),
    ((3, 1, 4), (2, 5, 4), 4, 2, 3, 2),
    ((0, 2, 0), (3, 2, 1), 2, 2, 2, 1),
    ((2, 1, 3), (0, 2, 0), 2, 1, 1, 2),
    ((0, 0), (0, 2), 1, 1, 2, 2),
]


def packed(packing, seed=0):
    """q, k, v, q_offsets, k_offsets."""
    queries, keys, heads, groups, size, values = packing
    generator = np.random.default_rng(seed)
    shapes = ((sum(queries), heads, size), (sum(keys), groups, size), (sum(keys), groups, values))
    return [*(generator.normal(size=shape) for shape in shapes), *(np.cumsum([0, *n]) for n in (queries, keys))]


@st.composite
def cases(draw):
    """The five arrays, keywords; arrays cannot be written to."""
    arrays = packed(draw(st.sampled_from(PACKINGS)), draw(st.integers(0, 2**32)))
    for array in arrays:
        array.flags.writeable = False
    return arrays, {
        "causal": draw(st.booleans()),
        "scale": draw(st.sampled_from([None, 0.7, -1.5])),
        "window": draw(st.sampled_from([None, (None, None), (0, 0), (1, None), (None, 1), (2, 1)])),
        "alignment": draw(st.sampled_from(["bottom_right", "top_left"])),
    }


def close(got, wanted):
    """Equal up to 1e-13 of the largest entry, or of 1."""
    got, wanted = np.asarray(got), np.asarray(wanted, dtype=float)
    np.testing.assert_allclose(got, wanted.reshape(got.shape), rtol=0, atol=1e-13 * np.abs(wanted).max(initial=1.0))


@SEARCH
@given(cases())
def test_equals_the_loops(case):
    arrays, keywords = case
    q, k, v, *_ = arrays
    out = varlen_attention(*arrays, **keywords)
    assert out.shape == (q.shape[0], q.shape[1], v.shape[2])
    # Nested lists forget the widths of an array without rows.
    close(out, loops_layers.varlen_attention(*arrays, **keywords) if len(k) else np.zeros(out.shape))


@SEARCH
@given(cases())
def test_frameworks_agree(case):
    arrays, keywords = case
    wanted = varlen_attention(*arrays, **keywords)
    np.testing.assert_array_equal(np.asarray(varlen_attention(*map(strict.asarray, arrays), **keywords)), wanted)
    close(varlen_attention(*map(torch.tensor, arrays), **keywords), wanted)


@pytest.mark.parametrize("alignment", ["bottom_right", "top_left"])
def test_one_sequence_is_attention(alignment):
    q, k, v, *offsets = packed(((3,), (5,), 4, 2, 3, 2))
    batched = [np.moveaxis(rows, 0, 1)[None] for rows in (q, k, v)]
    wanted = attention(*batched, causal=True, window=(2, None), offset=2 if alignment == "bottom_right" else 0)
    got = varlen_attention(q, k, v, *offsets, causal=True, window=(2, None), alignment=alignment)
    np.testing.assert_array_equal(got, np.moveaxis(wanted[0], 0, 1))


def test_alignments_differ_only_where_lengths_do():
    case = packed(((2, 3), (4, 3), 2, 1, 2, 3))
    bottom, top = (varlen_attention(*case, causal=True, alignment=a) for a in ("bottom_right", "top_left"))
    np.testing.assert_array_equal(bottom[2:], top[2:])
    assert (bottom[:2] != top[:2]).all()


@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e300])
def test_sequences_never_see_one_another(poison):
    q, k, v, *offsets = packed(((3, 1, 4), (2, 5, 4), 4, 2, 3, 2))
    before = varlen_attention(q, k, v, *offsets)
    q[3], k[2:7], v[2:7] = poison, poison, poison
    with np.errstate(all="ignore"):
        after = varlen_attention(q, k, v, *offsets)
    np.testing.assert_array_equal(np.delete(after, 3, axis=0), np.delete(before, 3, axis=0))


@pytest.mark.parametrize("convert", [np.asarray, torch.tensor, strict.asarray])
def test_a_sequence_without_keys_gives_zero(convert):
    q, k, v, *offsets = packed(((2, 1, 3), (0, 2, 0), 2, 1, 1, 2))
    out = np.asarray(varlen_attention(*map(convert, (q, k, v, *offsets)), causal=True))
    np.testing.assert_array_equal(out[[0, 1, 3, 4, 5]], np.zeros((5, 2, 2)))
    assert out[2].all()


@pytest.mark.parametrize("causal", [False, True])
def test_gradients(causal):
    """The first sequence has more queries than keys, so that causality leaves its first query empty."""
    *arrays, q_offsets, k_offsets = map(torch.tensor, packed(((3, 0, 2), (2, 2, 3), 2, 1, 2, 1)))
    inputs = [array.requires_grad_() for array in arrays]
    assert torch.autograd.gradcheck(lambda *a: varlen_attention(*a, q_offsets, k_offsets, causal=causal), inputs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"alignment": "right"}, r"alignment: got 'right', wanted 'bottom_right' or 'top_left'"),
        ({"q": np.ones((1, 5, 2, 2))}, r"q: got shape \(1, 5, 2, 2\), wanted 3 axes"),
        ({"v": np.ones((6, 1, 3))}, r"v: got 6 rows, wanted 7, as in k"),
        ({"q_offsets": np.asarray([0, 5])}, r"k_offsets: got 3, wanted 2, as of q"),
        ({"q_offsets": np.asarray([0, 2, 4])}, r"q_offsets: got \[0, 2, 4\], wanted numbers in order from 0 to 5"),
        ({"q_offsets": np.asarray([1, 2, 5])}, r"q_offsets: got \[1, 2, 5\]"),
        ({"k_offsets": np.asarray([0, 8, 7])}, r"k_offsets: got \[0, 8, 7\], wanted numbers in order from 0 to 7"),
        ({"k_offsets": np.asarray([0])}, r"k_offsets: got shape \(1,\), wanted one axis of at least 2"),
        ({"k_offsets": np.asarray([[0, 7]])}, r"k_offsets: got shape \(1, 2\)"),
    ],
)
def test_errors(change, message):
    names = ("q", "k", "v", "q_offsets", "k_offsets")
    arguments = dict(zip(names, packed(((2, 3), (4, 3), 2, 1, 2, 3)), strict=True)) | change
    with pytest.raises(ValueError, match=f"varlen_attention: {message}"):
        varlen_attention(**arguments)
