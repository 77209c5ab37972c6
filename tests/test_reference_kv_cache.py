"""The reference cached_attention: loops, the uncached whole, blocks, what may never be seen, edges."""

import array_api_strict as strict
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from veriformer.reference import attention, cached_attention, loops_layers

pytestmark = pytest.mark.filterwarnings("error")
SEARCH = settings(max_examples=200, deadline=None, database=None, derandomize=True)
FRAMEWORKS = [np.asarray, torch.tensor, strict.asarray]
NAMES = ("q", "k_new", "v_new", "k_cache", "v_cache", "lengths")

# lengths, new rows m, H, G, D, Dv, capacity C (a multiple of the block's size S), S
SHAPES = [
    ((0,), 1, 1, 1, 1, 1, 1, 1),
    ((0, 3), 2, 2, 1, 2, 3, 6, 3),
    ((5, 0, 2), 3, 4, 2, 3, 2, 8, 4),
    ((2, 4), 1, 2, 2, 2, 2, 6, 2),
    ((4, 1), 0, 2, 1, 1, 2, 4, 2),
    ((3, 1, 2), 4, 3, 1, 2, 1, 9, 3),
]


def problem(shape=SHAPES[2], paged=False, seed=0):
    """The six arrays and block_table or None; rows of the caches beyond the lengths hold NaN."""
    lengths, new, heads, groups, size, values, capacity, block = shape
    generator, batch = np.random.default_rng(seed), len(lengths)
    q, k_new = (generator.normal(size=(batch, n, new, size)) for n in (heads, groups))
    v_new = generator.normal(size=(batch, groups, new, values))
    k_cache, v_cache = (generator.normal(size=(batch, groups, capacity, width)) for width in (size, values))
    for b, n in enumerate(lengths):
        k_cache[b, :, n:] = v_cache[b, :, n:] = np.nan
    table = None
    if paged:
        table = generator.permutation(batch * capacity // block + 1)[: batch * capacity // block]
        table = table.reshape(batch, -1)
        k_cache, v_cache = (in_blocks(cache, table, block) for cache in (k_cache, v_cache))
    return [q, k_new, v_new, k_cache, v_cache, np.asarray(lengths)], table


def in_blocks(cache, table, size):
    """cache[B,G,C,width] cut into blocks of `size` rows that lie where the table says; one more holds NaN."""
    blocks = np.full((table.size + 1, cache.shape[1], size, cache.shape[3]), np.nan)
    for b, row in enumerate(table):
        for place, block in enumerate(row):
            blocks[block] = cache[b, :, place * size : (place + 1) * size]
    return blocks


@st.composite
def cases(draw):
    """The six arrays, keywords; arrays cannot be written to."""
    arrays, table = problem(draw(st.sampled_from(SHAPES)), draw(st.booleans()), draw(st.integers(0, 2**32)))
    for array in arrays:
        array.flags.writeable = False
    return arrays, {
        "block_table": table,
        "causal": draw(st.booleans()),
        "scale": draw(st.sampled_from([None, 0.7, -1.5])),
        "window": draw(st.sampled_from([None, (0, 0), (1, None), (None, 1), (2, 1)])),
    }


def converted(convert, case):
    arrays, keywords = case
    there = {name: convert(a) if isinstance(a, np.ndarray) else a for name, a in keywords.items()}
    return [convert(array) for array in arrays], there


def close(got, wanted):
    """Equal up to 1e-13 of the largest entry; NaN where NaN is wanted."""
    got, wanted = np.asarray(got), np.asarray(wanted, dtype=float)
    largest = np.abs(wanted[~np.isnan(wanted)]).max(initial=1.0)
    np.testing.assert_allclose(got, wanted.reshape(got.shape), rtol=0, atol=1e-13 * largest)


# against the loops and other frameworks


@SEARCH
@given(cases())
def test_equals_the_loops(case):
    arrays, keywords = case
    out, *caches = cached_attention(*arrays, **keywords)
    wanted, *wanted_caches = loops_layers.cached_attention(*arrays, **keywords)
    assert out.shape == (*arrays[0].shape[:3], arrays[2].shape[3])
    close(out, wanted)
    for cache, wanted_cache in zip(caches, wanted_caches, strict=True):
        np.testing.assert_array_equal(cache, wanted_cache)


@SEARCH
@given(cases())
def test_frameworks_agree(case):
    arrays, keywords = case
    wanted = cached_attention(*arrays, **keywords)
    there, those = converted(strict.asarray, case)
    for got, here in zip(cached_attention(*there, **those), wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(got), here)
    there, those = converted(torch.tensor, case)
    for got, here in zip(cached_attention(*there, **those), wanted, strict=True):
        close(got, here)


# what a cache promises


def whole(seed=1, batch=2, length=8):
    generator = np.random.default_rng(seed)
    return [generator.normal(size=(batch, n, length, width)) for n, width in ((4, 3), (2, 3), (2, 5))]


def in_chunks(chunks, starts, q, k, v, k_cache, v_cache, **keywords):
    """cached_attention chunk by chunk, row b from its own start, on rows that follow one another: all outputs."""
    outputs, n = [], 0
    for m in chunks:
        parts = (rows[:, :, n : n + m] for rows in (q, k, v))
        out, k_cache, v_cache = cached_attention(*parts, k_cache, v_cache, np.asarray(starts) + n, **keywords)
        outputs.append(out)
        n += m
    return np.concatenate(outputs, axis=2)


@pytest.mark.parametrize("chunks", [(8,), (1,) * 8, (5, 1, 2), (3, 0, 4, 1)])
@pytest.mark.parametrize("window", [None, (2, None)])
@pytest.mark.parametrize("paged", [False, True])
def test_chunks_give_the_whole(chunks, window, paged):
    q, k, v = whole()
    table = np.asarray([[4, 1, 0], [2, 3, 5]]) if paged else None
    shape = (6, 2, 3) if paged else (2, 2, 9)
    caches = (np.full((*shape, width), np.nan) for width in (3, 5))
    got = in_chunks(chunks, [0, 0], q, k, v, *caches, window=window, block_table=table)
    close(got, attention(q, k, v, causal=True, window=window))


def test_rows_of_the_batch_may_stand_at_different_lengths():
    q, k, v = whole()
    caches = [np.full((2, 2, 11, width), np.nan) for width in (3, 5)]
    for cache, rows in zip(caches, (k, v), strict=True):
        cache[1, :, :3] = rows[1, :, :3]
    later = [np.stack([rows[0, :, :5], rows[1, :, 3:]]) for rows in (q, k, v)]
    got = in_chunks((2, 3), [0, 3], *later, *caches)
    full = attention(q, k, v, causal=True)
    close(got, np.stack([full[0, :, :5], full[1, :, 3:]]))


def test_without_causality_a_chunk_sees_all_of_itself():
    (q, k_new, v_new, k_cache, v_cache, lengths), _ = problem()
    out, k_after, v_after = cached_attention(q, k_new, v_new, k_cache, v_cache, lengths, causal=False)
    for b, n in enumerate(lengths + 3):
        wanted = attention(q[b : b + 1], k_after[b : b + 1, :, :n], v_after[b : b + 1, :, :n])
        np.testing.assert_array_equal(out[b : b + 1], wanted)


@pytest.mark.parametrize("paged", [False, True])
def test_caches_change_in_the_new_rows_alone_and_the_given_ones_not_at_all(paged):
    arrays, table = problem(paged=paged)
    copies = [array.copy() for array in arrays]
    _, *after = cached_attention(*arrays, block_table=table)
    for array, copy in zip(arrays, copies, strict=True):
        np.testing.assert_array_equal(array, copy)
    for before, cache, new in zip(arrays[3:5], after, arrays[1:3], strict=True):
        for b, n in enumerate(arrays[5]):
            for i in range(3):
                block, row = (b, n + i) if table is None else (table[b, (n + i) // 4], (n + i) % 4)
                np.testing.assert_array_equal(cache[block, :, row], new[b, :, i])
                cache[block, :, row] = before[block, :, row]
        np.testing.assert_array_equal(cache, before)
        assert not np.shares_memory(cache, before)


@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e300])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("paged", [False, True])
def test_later_rows_reach_neither_output_nor_gradient(poison, causal, paged):
    """They hold NaN in the problem; here also other numbers."""
    arrays, table = problem(paged=paged)
    results = []
    for content in (0.0, poison):
        changed = [np.where(np.isnan(array), content, array) for array in arrays[:5]]
        results.append(_output_and_gradients(changed, arrays[5], table, causal))
    for clean, poisoned in zip(*results, strict=True):
        assert np.isfinite(clean).all()
        np.testing.assert_array_equal(poisoned, clean)


def _output_and_gradients(arrays, lengths, table, causal):
    inputs = [torch.tensor(array, requires_grad=True) for array in arrays]
    table = None if table is None else torch.tensor(table)
    out, *_ = cached_attention(*inputs, torch.tensor(lengths), causal=causal, block_table=table)
    (out * torch.arange(1.0, out.numel() + 1).reshape(out.shape)).sum().backward()
    return [out.detach().numpy(), *(array.grad.numpy() for array in inputs)]


@pytest.mark.parametrize("convert", FRAMEWORKS)
def test_full_blocks_may_be_shared(convert):
    """Two sequences with the same first four rows, then each its own; unused entries of the table say anything."""
    q, k, v = whole()
    k[1, :, :4], v[1, :, :4] = k[0, :, :4], v[0, :, :4]
    caches = [np.full((4, 2, 4, width), np.nan) for width in (3, 5)]
    for cache, rows in zip(caches, (k, v), strict=True):
        cache[2] = rows[0, :, :4]
    table = np.asarray([[2, 0, -7], [2, 3, 0]])
    new = [rows[:, :, 4:] for rows in (q, k, v)]
    arrays = map(convert, (*new, *caches, np.asarray([4, 4])))
    out, k_after, _ = cached_attention(*arrays, block_table=convert(table))
    close(out, attention(q, k, v, causal=True)[:, :, 4:])
    np.testing.assert_array_equal(np.asarray(k_after)[[2, 1]], caches[0][[2, 1]])


@pytest.mark.parametrize("convert", FRAMEWORKS)
def test_no_new_rows_and_no_rows_at_all(convert):
    for capacity, lengths in ((3, [0, 2]), (0, [0, 0])):
        q, k_new, v_new = (np.ones((2, n, 0, width)) for n, width in ((4, 3), (2, 3), (2, 5)))
        caches = [np.ones((2, 2, capacity, width)) for width in (3, 5)]
        out, *after = cached_attention(*map(convert, (q, k_new, v_new, *caches, np.asarray(lengths))))
        assert out.shape == (2, 4, 0, 5)
        for before, cache in zip(caches, after, strict=True):
            np.testing.assert_array_equal(np.asarray(cache), before)


# gradients


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("keywords", [{}, {"causal": False, "window": (2, 0)}, {"scale": -0.5}])
def test_gradients(paged, keywords):
    """Of the output and of the caches that come back."""
    arrays, table = problem(((2, 0), 2, 2, 1, 2, 1, 4, 2), paged)
    inputs = [torch.tensor(np.nan_to_num(array), requires_grad=True) for array in arrays[:5]]
    table = None if table is None else torch.tensor(table)
    lengths = torch.tensor(arrays[5])
    assert torch.autograd.gradcheck(lambda *a: cached_attention(*a, lengths, block_table=table, **keywords), inputs)


# errors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": np.asarray([5, 6, 2])}, r"lengths: got 9 rows with the new ones, wanted at most 8, the capacity"),
        ({"lengths": np.asarray([5, -1, 2])}, r"lengths: got -1, wanted numbers of rows >= 0"),
        ({"lengths": np.asarray([5, 0])}, r"lengths: got shape \(2,\), wanted \(3,\)"),
        ({"q": np.ones((4, 3, 3))}, r"q: got shape \(4, 3, 3\), wanted 4 axes"),
        ({"k_new": np.ones((3, 1, 3, 3))}, r"k_new: got shape \(3, 1, 3, 3\), wanted \(3, 2, 3, 3\)"),
        ({"k_new": np.ones((3, 2, 1, 3))}, r"k_new: got shape \(3, 2, 1, 3\)"),
        ({"v_new": np.ones((1, 2, 3, 2))}, r"v_new: got shape \(1, 2, 3, 2\), wanted \(3, 2, 3, 2\)"),
        ({"k_cache": np.ones((1, 2, 8, 3))}, r"k_cache: got shape \(1, 2, 8, 3\), wanted \(3, 2, 8, 3\)"),
        ({"v_cache": np.ones((3, 2, 7, 2))}, r"v_cache: got shape \(3, 2, 7, 2\), wanted \(3, 2, 8, 2\)"),
        ({"v_cache": np.ones((3, 2, 8, 1))}, r"v_cache: got shape \(3, 2, 8, 1\)"),
        ({name: np.ones((0, 2, 3, 3)) for name in NAMES[:5]} | {"lengths": np.ones(0)}, r"q: got no batch row"),
        ({"q": np.ones((3, 5, 3, 3))}, r"heads: got 5 of q and 2 of k"),
    ],
)
def test_errors(change, message):
    arguments = dict(zip(NAMES, problem()[0], strict=True)) | change
    with pytest.raises(ValueError, match=f"attention: {message}"):
        cached_attention(**arguments)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([[0, 1], [2, 3]], r"block_table: got shape \(2, 2\), wanted \[3, blocks of a row\]"),
        ([0, 1, 2], r"block_table: got shape \(3,\)"),
        ([[0, 1], [2, 3], [4, 7]], r"block_table: got block 7, wanted 0 to 6"),
        ([[0, -1], [2, 3], [4, 5]], r"block_table: got block -1, wanted 0 to 6"),
        ([[0, 1], [1, 3], [4, 5]], r"block_table: got block 1, which is written, more than once"),
        ([[0, 0], [2, 3], [4, 5]], r"block_table: got block 0, which is written, more than once"),
        ([[0], [2], [4]], r"lengths: got 8 rows with the new ones, wanted at most 4"),
    ],
)
def test_errors_of_tables(table, message):
    arrays, _ = problem(paged=True)
    with pytest.raises(ValueError, match=f"cached_attention: {message}"):
        cached_attention(*arrays, block_table=np.asarray(table))
