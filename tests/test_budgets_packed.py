"""Error budgets of attention over packed sequences and over a cache, and of logits under a large softcap."""

from __future__ import annotations

import numpy as np
import pytest
from judging import FUSED, SIXTEEN, cases, data, length, product_one_by_one, rounder, stored, work
from judging import worst as worst_ratio

from veriformer import budgets, reference
from veriformer.budgets import Precision
from veriformer.declarations import DTYPES

KINDS = {"fused": FUSED, "unfused": {}}


def head_by_head(q, k, v, visible, scale, rd, sequential):
    """Attention of q[T,H,D] over k, v[S,G,D] in their dtype, each step passed through rd."""
    out = np.zeros((*q.shape[:2], v.shape[2]), q.dtype)
    dot = product_one_by_one if sequential else np.matmul
    for h in range(q.shape[1]):
        g = h * k.shape[1] // q.shape[1]
        s = rd(dot(rd(q[:, h] * q.dtype.type(scale)), k[:, g].T))
        s = np.where(visible, s, -np.inf).astype(q.dtype)
        peak = s.max(axis=-1, keepdims=True, initial=-np.inf)
        e = rd(np.exp(rd(np.where(visible, s - np.where(peak == -np.inf, 0, peak), -np.inf).astype(q.dtype))))
        total = e.sum(axis=-1, keepdims=True)
        p = rd(e / np.where(total == 0, 1, total))
        out[:, h] = dot(p.astype(q.dtype), v[:, g])
    return out


def visible_from(queries, keys, offset, causal, window):
    ahead = np.arange(keys) - (np.arange(queries)[:, None] + offset)
    visible = np.full(ahead.shape, True) if not causal else ahead <= 0
    left, right = window or (None, None)
    visible &= True if left is None else ahead >= -left
    return visible & (True if right is None else ahead <= right)


def keywords(rng, keys):
    windows = (None, None, (int(rng.integers(keys + 1)), None), (int(rng.integers(keys + 1)), 1))
    return {
        "causal": bool(rng.random() < 0.6),
        "window": windows[rng.integers(4)],
        "scale": None if rng.random() < 0.6 else float(rng.choice([0.05, 0.5])),
    }


def moderate(rng, shape, dtype):
    """Data of any family, made small enough that logits keep a meaning."""
    x = data(rng, shape, dtype)
    return stored(x * min(1.0, 10 ** rng.uniform(0, 1.3) / max(np.abs(x).max(initial=0.0), 1e-30)), dtype)


# --- packed sequences -----------------------------------------------------------------------------


def varlen_case(rng, dtype):
    sequences, (heads, groups) = length(rng, 4), [(1, 1), (4, 2)][rng.integers(2)]
    widths = [length(rng, 24), length(rng, 24)]
    sizes = rng.integers(0, 10, (2, sequences))
    sizes[:, 0] += 1
    offsets = [np.concatenate([[0], np.cumsum(size)]) for size in sizes]
    q = moderate(rng, (offsets[0][-1], heads, widths[0]), dtype)
    k, v = (moderate(rng, (offsets[1][-1], groups, width), dtype) for width in widths)
    return (q, k, v, *offsets), {**keywords(rng, 10), "alignment": str(rng.choice(["bottom_right", "top_left"]))}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_attention_stays_within_its_budget(dtype, kind):
    precision, rd = Precision(dtype, **KINDS[kind]), rounder(dtype, kind == "unfused")
    for index, rng in enumerate(cases(120, "varlen" + kind)):
        arrays, given = varlen_case(rng, dtype)
        bound = budgets.varlen_attention(*arrays, **given, precision=precision)
        (q, k, v), (rows, keys) = (a.astype(work(dtype)) for a in arrays[:3]), arrays[3:]
        out = np.zeros(bound.value.shape)
        scale = q.shape[2] ** -0.5 if given["scale"] is None else given["scale"]
        for b in range(len(rows) - 1):
            mine, theirs = slice(*rows[b : b + 2]), slice(*keys[b : b + 2])
            m, n = rows[b + 1] - rows[b], keys[b + 1] - keys[b]
            offset = n - m if given["alignment"] == "bottom_right" else 0
            visible = visible_from(m, n, offset, given["causal"], given["window"])
            out[mine] = head_by_head(q[mine], k[theirs], v[theirs], visible, scale, rd, index % 2)
        assert worst_ratio(stored(out, dtype), bound, precision) <= 1


def test_the_packed_budget_is_the_budget_of_each_sequence():
    rng, precision = np.random.default_rng(1), Precision("bfloat16")
    q, k, v = rng.normal(size=(7, 2, 4)), rng.normal(size=(9, 1, 4)), rng.normal(size=(9, 1, 3))
    bound = budgets.varlen_attention(
        q, k, v, np.array([0, 3, 7]), np.array([0, 5, 9]), causal=True, precision=precision
    )
    last = [a[None].swapaxes(1, 2) for a in (q[3:], k[5:], v[5:])]
    alone = budgets.attention(*last, causal=True, precision=precision)
    np.testing.assert_allclose(bound.allowed[3:], alone.allowed[0].swapaxes(0, 1), rtol=1e-12)
    np.testing.assert_allclose(sum(bound.terms.values()), bound.allowed, rtol=1e-12)


def test_a_packed_sequence_without_keys_or_rows_is_exact():
    q, k = np.ones((2, 1, 3)), np.ones((2, 1, 3))
    offsets = np.array([0, 2, 2]), np.array([0, 0, 2])
    bound = budgets.varlen_attention(q, k, k, *offsets, precision=Precision("float16"))
    assert (bound.value == 0).all() and (bound.allowed == 0).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_faults_exceed_the_budget(dtype):
    rng, precision = np.random.default_rng(2), Precision(dtype)
    q, k, v = (stored(rng.normal(size=(9, 2, 8)), dtype) for _ in range(3))
    rows, keys = np.array([0, 4, 9]), np.array([0, 3, 9])
    given = {"causal": True, "window": (2, None)}
    bound = budgets.varlen_attention(q, k, v, rows, keys, **given, precision=precision)
    wrong = {
        "offsets of q for k": reference.varlen_attention(q, k, v, rows, rows, **given),
        "top-left": reference.varlen_attention(q, k, v, rows, keys, **given, alignment="top_left"),
        "not causal": reference.varlen_attention(q, k, v, rows, keys, window=(2, None)),
        "window forgotten": reference.varlen_attention(q, k, v, rows, keys, causal=True),
        "sequences see each other": reference.varlen_attention(q, k, v, rows[[0, 2]], keys[[0, 2]], **given),
    }
    for name, answer in wrong.items():
        assert worst_ratio(stored(answer, dtype), bound, precision) > 1, name


# --- cache ----------------------------------------------------------------------------------------


def cached_case(rng, dtype, paged):
    batch, (heads, groups), new = length(rng, 3), [(1, 1), (4, 2)][rng.integers(2)], length(rng, 5)
    width, values = length(rng, 16), length(rng, 16)
    lengths = rng.integers(0, 9, batch)
    block = int(rng.integers(2, 6)) if paged else 9 + new
    pages = -(-(9 + new) // block)
    table = rng.permutation(batch * pages + 1)[: batch * pages].reshape(batch, pages)
    table[:, -1] = np.where(lengths + new <= (pages - 1) * block, 10**6, table[:, -1])
    shapes = [(batch, heads, new, width), (batch, groups, new, width), (batch, groups, new, values)]
    blocks = batch * pages + 1 if paged else batch
    arrays = [moderate(rng, shape, dtype) for shape in shapes]
    arrays += [moderate(rng, (blocks, groups, block, w), dtype) for w in (width, values)]
    return arrays, lengths, {**keywords(rng, 12), "block_table": table if paged else None}


def place_of(b, t, block, table):
    return (b, t) if table is None else (int(table[b, t // block]), t % block)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_cached_attention_stays_within_its_budget(dtype, kind, paged):
    precision, rd = Precision(dtype, **KINDS[kind]), rounder(dtype, kind == "unfused")
    for index, rng in enumerate(cases(60, f"cached{kind}{paged}")):
        arrays, lengths, given = cached_case(rng, dtype, paged)
        bounds = budgets.cached_attention(*arrays, lengths, **given, precision=precision)
        q, k_new, v_new, keys, values = (a.astype(work(dtype)) for a in arrays)
        (batch, _, new, width), block, table = q.shape, keys.shape[2], given["block_table"]
        scale = width**-0.5 if given["scale"] is None else given["scale"]
        out = np.zeros(bounds[0].value.shape)
        for b in range(batch):
            places = [place_of(b, t, block, table) for t in range(lengths[b] + new)]
            for i, (row, slot) in enumerate(places[lengths[b] :]):
                keys[row, :, slot], values[row, :, slot] = k_new[b, :, i], v_new[b, :, i]
            k, v = (np.stack([cache[row, :, slot] for row, slot in places]) for cache in (keys, values))
            visible = visible_from(new, len(places), lengths[b], given["causal"], given["window"])
            out[b] = head_by_head(q[b].swapaxes(0, 1), k, v, visible, scale, rd, index % 2).swapaxes(0, 1)
        for computed, bound in zip((stored(out, dtype), keys, values), bounds, strict=True):
            assert worst_ratio(computed, bound, precision) <= 1
        assert all((bound.allowed == 0).all() for bound in bounds[1:])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cache_faults_exceed_the_budget(dtype):
    rng, precision = np.random.default_rng(4), Precision(dtype)
    q, k_new, v_new, k_cache, v_cache = (stored(rng.normal(size=(2, 2, n, 4)), dtype) for n in (2, 2, 2, 8, 8))
    arrays, lengths = (q, k_new, v_new, k_cache, v_cache), np.array([3, 5])
    out, keys, values = budgets.cached_attention(*arrays, lengths, precision=precision)

    def call(lengths=lengths, **given):
        return [stored(result, dtype) for result in reference.cached_attention(*arrays, lengths, **given)]

    wrong = {
        "not causal": call(causal=False)[0],
        "one length for all": call(np.array([3, 3]))[0],
        "written one row late": call(lengths + 1)[0],
        "window": call(window=(1, None))[0],
    }
    for name, answer in wrong.items():
        assert worst_ratio(answer, out, precision) > 1, name
    assert worst_ratio(call(lengths + 1)[1], keys, precision) == np.inf
    cleared = values.value.copy()
    cleared[0, :, 5:] = 0
    assert worst_ratio(cleared, values, precision) == np.inf


def test_rows_that_are_not_written_keep_even_what_is_no_number():
    cache = np.full((1, 1, 4, 2), np.nan)
    new = np.ones((1, 1, 1, 2))
    out, keys, _ = budgets.cached_attention(new, new, new, cache, cache, np.array([0]), precision=Precision("float32"))
    assert np.isfinite(out.allowed).all() and np.isnan(keys.value[0, 0, 1:]).all()
    assert worst_ratio(keys.value, keys, Precision("float32")) == 0


# --- softcap --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", SIXTEEN)
def test_what_a_stored_quotient_loses_under_a_large_softcap_is_allowed(dtype):
    """In float16 s / softcap is subnormal there: the softcap multiplies what was rounded off."""
    precision, rd = Precision(dtype), rounder(dtype)
    for rng in cases(200, "softcap"):
        softcap = np.float32(10 ** rng.uniform(0, 6.5))
        q, k, v = (stored(rng.normal(size=(1, 1, n, 8)) * 2, dtype).astype(np.float32) for n in (4, 6, 6))
        s = rd(rd(q * np.float32(8**-0.5)) @ k.swapaxes(-1, -2))
        s = rd(rd(np.tanh(rd(s / softcap))) * softcap)
        e = rd(np.exp(rd(s - s.max(-1, keepdims=True))))
        total = e.sum(-1, keepdims=True)
        out, lse = rd(e / total) @ v, (s.max(-1, keepdims=True) + np.log(total))[..., 0]
        wide = [a.astype(np.float64) for a in (q, k, v)]
        bounds = budgets.attention_with_lse(*wide, softcap=float(softcap), precision=precision)
        assert worst_ratio(stored(out, dtype), bounds[0], precision) <= 1
        assert worst_ratio(lse, bounds[1], Precision("float32")) <= 1
