"""Attention in NumPy, fast: tiles of scores that stay in the cache, exponentials in place, hidden tiles left out.

Nothing ever holds more than a tile of scores, so that memory grows with the length and not with its square.
bfloat16 (of ml_dtypes) and float16 are widened to float32 and rounded once at the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veriformer.declarations import DTYPES, Capabilities

FRAMEWORK = "numpy"
Window = tuple[int | None, int | None]
Tile = tuple[slice, slice, slice]
"""Sequences, key heads, queries."""
QUERIES, KEYS = 128, 512
"""Rows and columns of a tile of scores: 256 KiB in float32."""
_COMMON = Capabilities(dtypes=DTYPES, intermediate={"float64": "float64", "default": "float32"})
_ATTENTION = replace(_COMMON, nonpositive_scale=True, infinite_bias=True, rounds_probabilities=False)
CAPABILITIES = {
    "attention": _ATTENTION,
    "attention_with_lse": _ATTENTION,
    "cached_attention": replace(_ATTENTION, infinite_bias=False, cache_in_place=True),
}


def attention(
    q: NDArray,
    k: NDArray,
    v: NDArray,
    *,
    mask: NDArray | None = None,
    bias: NDArray | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    sink: NDArray | None = None,
) -> NDArray:
    """Scaled dot-product attention, tile by tile; tiles that are hidden whole are left out.

    q[B,H,Tq,D], k[B,G,Tk,D], v[B,G,Tk,Dv] -> [B,H,Tq,Dv]
    softmax(cap(q k^T scale) + bias) v over the keys a row may see
    Source: Dao et al. 2022, algorithm 1. A row that may see nothing gives zeros.
    """
    return _attend(_Problem.of(q, k, v, mask, bias, causal, scale, window, softcap, sink))[0].astype(q.dtype)


def attention_vjp(cotangent: NDArray, q: NDArray, k: NDArray, v: NDArray, **named: Any) -> tuple[NDArray | None, ...]:
    """The gradients of attention, whose keywords it takes: those of attention_with_lse whose lse nobody uses.

    cotangent[B,H,Tq,Dv] -> those of q, k and v, then of each of mask (None), bias and sink that is given
    Source: Dao et al. 2022, algorithm 4. A row that may see nothing passes nothing on.
    """
    return attention_with_lse_vjp((cotangent, np.zeros(q.shape[:3], _wide(q).dtype)), q, k, v, **named)


def attention_with_lse(
    q: NDArray,
    k: NDArray,
    v: NDArray,
    *,
    mask: NDArray | None = None,
    bias: NDArray | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    sink: NDArray | None = None,
) -> tuple[NDArray, NDArray]:
    """Attention tile by tile, and the logsumexp of each row's logits, without the sink.

    q[B,H,Tq,D], k[B,G,Tk,D], v[B,G,Tk,Dv] -> out[B,H,Tq,Dv], lse[B,H,Tq]
    m' = max(m, max tile), s' = s exp(m - m') + sum exp(tile - m'), o' = o exp(m - m') + exp(tile - m') v
    Source: Dao et al. 2022, algorithm 1. A row that may see nothing gives zeros and -inf.
    """
    out, lse = _attend(_Problem.of(q, k, v, mask, bias, causal, scale, window, softcap, sink))
    return out.astype(q.dtype), lse


def attention_with_lse_vjp(
    cotangents: tuple[NDArray, NDArray], q: NDArray, k: NDArray, v: NDArray, *, mask: NDArray | None = None,
    bias: NDArray | None = None, causal: bool = False, scale: float | None = None, window: Window | None = None,
    softcap: float | None = None, sink: NDArray | None = None,
) -> tuple[NDArray | None, ...]:  # fmt: skip
    """The gradients of attention and of the logsumexp beside it; tiles of probabilities are made anew from it.

    cotangents (do[B,H,Tq,Dv], dlse[B,H,Tq]) -> those of q, k and v, then of mask (None), bias and sink as given
    ds = p (r do v^T - r do o + dlse) with p = exp(logit - lse), r = 1 / (1 + exp(sink - lse)); dv = p^T r do;
    dsink = -sum (1 - r) do o; through the cap 1 - (logit / cap)^2
    Source: Dao et al. 2022, algorithm 4. A row that may see nothing passes nothing on.
    """
    one = _Problem.of(q, k, v, mask, bias, causal, scale, window, softcap, sink)
    out, lse = (one.by_groups(a) for a in _attend(one))
    do, dlse = (one.by_groups(_wide(a)) for a in cotangents)
    delta = np.einsum("...i,...i->...", do, out)
    base, extra = _finite(lse), one.sink[..., 0]  # of a row that sees nothing any share will do: there p = 0, delta = 0
    with np.errstate(over="ignore"):
        share, rest = 1 / (1 + np.exp(extra - base)), 1 / (1 + np.exp(base - extra))
    grads = _backward(one, do * share[..., None], (share * delta - dlse)[..., None], base[..., None], bias)
    grads[0] *= one.scale
    found: list[NDArray | None] = [g.reshape(a.shape).astype(a.dtype) for g, a in zip(grads, (q, k, v), strict=False)]
    found += [] if mask is None else [None]
    found += [] if bias is None else [grads[3].reshape(bias.shape).astype(bias.dtype)]
    found += [] if sink is None else [-(rest * delta).sum((0, 3)).reshape(-1).astype(sink.dtype)]
    return tuple(found)


def cached_attention(
    q: NDArray,
    k_new: NDArray,
    v_new: NDArray,
    k_cache: NDArray,
    v_cache: NDArray,
    lengths: NDArray,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: Window | None = None,
    block_table: NDArray | None = None,
) -> tuple[NDArray, NDArray, NDArray]:
    """New keys and values written behind the valid rows of the given caches, then attention over views of these rows.

    q[B,H,m,D], k_new[B,G,m,D], v_new[B,G,m,Dv], caches [B,G,C,D] and [B,G,C,Dv], lengths[B]
    -> (out[B,H,m,Dv], k_cache, v_cache); with block_table[B,P] the caches are [blocks,G,S,..], and rows are gathered
    row lengths[b] + i = new row i; query i, at that position, sees the rows up to it (causal) or all
    Source: Kwon et al. 2023 (PagedAttention), section 4.1; Pope et al. 2022, section 3.3.
    Raises ValueError where lengths[b] + m exceeds the capacity; the caches are as they were then.
    """
    new, slots = q.shape[2], k_cache.shape[2]
    capacity = slots if block_table is None else slots * block_table.shape[1]
    if int(lengths.max(initial=0)) + new > capacity:
        raise ValueError(f"lengths: got {int(lengths.max())} rows beside {new} new ones, wanted at most {capacity}")
    out = np.empty((*q.shape[:3], v_cache.shape[-1]), q.dtype)
    # sequences of one length are one problem; else each is its own, as the number of its keys is
    together = block_table is None and len(lengths) > 0 and bool((lengths == lengths[0]).all())
    for part in [slice(None)] if together else [slice(b, b + 1) for b in range(len(lengths))]:
        length = int(lengths[part][0])
        pairs = ((k_cache, k_new[part]), (v_cache, v_new[part]))
        if block_table is None:
            k, v = (_appended(cache[part], rows, length) for cache, rows in pairs)
        else:
            k, v = (_appended_blocks(cache, rows, length, block_table[part.start]) for cache, rows in pairs)
        out[part] = attention(q[part], k, v, causal=causal, scale=scale, window=window)
    return out, k_cache, v_cache


def _appended(cache: NDArray, rows: NDArray, length: int) -> NDArray:
    """The valid rows of a cache [B,G,C,D], the new ones written behind the others."""
    total = length + rows.shape[2]
    cache[:, :, length:total] = rows
    return cache[:, :, :total]


def _appended_blocks(cache: NDArray, rows: NDArray, length: int, blocks: NDArray) -> NDArray:
    """The same of a sequence whose rows lie in blocks [G,S,D] of a cache: [1,G,total,D], gathered."""
    slots, total = cache.shape[2], length + rows.shape[2]
    row = np.arange(length, total)
    cache[blocks[row // slots], :, row % slots] = rows[0].swapaxes(0, 1)
    found = cache[blocks[: -(-total // slots)]].swapaxes(0, 1)
    return found.reshape(1, found.shape[0], -1, found.shape[-1])[:, :, :total]


@dataclass(frozen=True)
class _Problem:
    """Attention with its query heads by key head: R = H / G of them share one.

    q[B,G,R,Tq,D], already times the scale; k[B,G,Tk,D], v[B,G,Tk,Dv]; mask and bias spread to [B,G,R,Tq,Tk];
    sink[G,R,1,1], -inf where there is none; left, right: how many keys beside its own a query sees, at most.
    """

    q: NDArray
    k: NDArray
    v: NDArray
    mask: NDArray | None
    bias: NDArray | None
    sink: NDArray
    scale: float
    softcap: float | None
    left: int
    right: int

    @classmethod
    def of(
        cls, q: NDArray, k: NDArray, v: NDArray, mask: NDArray | None, bias: NDArray | None, causal: bool,
        scale: float | None, window: Window | None, softcap: float | None, sink: NDArray | None,
    ) -> _Problem:  # fmt: skip
        """The problem in the operation's own words."""
        groups, length = k.shape[1], q.shape[2] + k.shape[2]
        left, right = (length if side is None else side for side in window or (None, None))
        factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
        grouped = (q.shape[0], groups, q.shape[1] // groups, *q.shape[2:])
        spread = (*grouped[:4], k.shape[2])
        top = np.full(q.shape[1], -np.inf, _wide(q).dtype) if sink is None else _wide(sink)
        mask, bias = (a if a is None else np.broadcast_to(_split(a, groups), spread) for a in (mask, bias))
        query = (_wide(q) * factor).reshape(grouped)
        return cls(
            query, _wide(k), _wide(v), mask, bias, top.reshape(groups, -1, 1, 1), factor,
            softcap if softcap is None else float(softcap), left, min(right, 0) if causal else right,
        )  # fmt: skip

    def scratch(self) -> NDArray:
        """Room for a tile of scores."""
        return np.empty(max(QUERIES, self.q.shape[2]) * KEYS, self.q.dtype)

    def by_head(self, s: NDArray) -> NDArray:
        """[b,g,R*t,keys] -> [b,g,R,t,keys], a view."""
        return s.reshape(*s.shape[:2], self.q.shape[2], -1, s.shape[-1])

    def by_groups(self, a: NDArray) -> NDArray:
        """[B,H,Tq,..] -> [B,G,R,Tq,..]."""
        return a.reshape(*self.q.shape[:4], *a.shape[3:])

    def tiles(self) -> Iterator[Tile]:
        """Sequences, key heads and queries that are worked on at once: several heads only if they are short."""
        batch, groups, ratio, length, _ = self.q.shape
        rows = max(1, QUERIES // ratio)
        several = max(1, QUERIES * KEYS // (ratio * min(rows, length) * min(KEYS, self.k.shape[2]) or 1))
        heads = min(groups, several)
        some = max(1, several // groups)
        for b in range(0, batch, some):
            for g in range(0, groups, heads):
                for start in range(0, length, rows):
                    yield slice(b, b + some), slice(g, g + heads), slice(start, min(start + rows, length))

    def keys(self, rows: slice) -> Iterator[slice]:
        """The tiles of keys of which some query of a tile may see one, by position."""
        ahead = self.k.shape[2] - self.q.shape[3]
        first, end = max(0, rows.start + ahead - self.left), min(self.k.shape[2], rows.stop + ahead + self.right)
        for start in range(first, end, KEYS):
            yield slice(start, min(start + KEYS, end))

    def scores(self, tile: Tile, keys: slice, scratch: NDArray) -> NDArray:
        """cap(q k^T scale), [b,g,R*t,keys] in the scratch: the queries of a key head are rows of one product."""
        b, g, rows = tile
        query, key = _folded(self.q[b, g, :, rows]), self.k[b, g, keys].swapaxes(-1, -2)
        shape = (*query.shape[:3], key.shape[-1])
        s = np.matmul(query, key, out=scratch[: math.prod(shape)].reshape(shape))
        if self.softcap is not None:
            s /= self.softcap
            np.multiply(np.tanh(s, out=s), self.softcap, out=s)
        return s

    def complete(self, s: NDArray, tile: Tile, keys: slice) -> None:
        """The bias added to scores, -inf put where a key is hidden."""
        b, g, rows = tile
        by_head = self.by_head(s)
        if self.bias is not None:
            by_head += self.bias[b, g, :, rows, keys]
        if self.mask is not None:
            np.copyto(by_head, -np.inf, where=~self.mask[b, g, :, rows, keys])
        # positions hide only keys behind the last one of the first query, and those before the first of the last one
        own = np.arange(rows.start, rows.stop)[:, None] + self.k.shape[2] - self.q.shape[3]
        start, end = int(own[0, 0]) + self.right + 1, int(own[-1, 0]) - self.left
        if start < keys.stop:
            key = np.arange(max(start, keys.start), keys.stop)
            np.copyto(by_head[..., -len(key) :], -np.inf, where=key > own + self.right)
        if end > keys.start:
            key = np.arange(keys.start, min(end, keys.stop))
            np.copyto(by_head[..., : len(key)], -np.inf, where=key < own - self.left)


def _attend(one: _Problem) -> tuple[NDArray, NDArray]:
    """The outputs [B,H,Tq,Dv] and logsumexps [B,H,Tq], unrounded."""
    batch, groups, ratio, length, _ = one.q.shape
    heads = groups * ratio
    out = np.empty((*one.q.shape[:4], one.v.shape[-1]), one.q.dtype)
    lse = np.empty((*one.q.shape[:4], 1), one.q.dtype)
    scratch = one.scratch()
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # of what is hidden, and log 0
        for b, g, rows in one.tiles():
            o, m, total = _tile(one, (b, g, rows), scratch)
            place = (b, g, slice(None), rows)
            shape = lse[place].shape
            m, total = m.reshape(shape), total.reshape(shape)
            lse[place] = m + np.log(total)
            # a sink joins at the end, as the logsumexp is without it; by the larger of both, so that none overflows
            top = _finite(np.maximum(m, one.sink[g]))
            fade = np.exp(m - top)
            whole = total * fade + np.exp(one.sink[g] - top)
            np.multiply(o.reshape(out[place].shape), fade / np.where(whole == 0, 1, whole), out=out[place])
    return out.reshape(batch, heads, length, out.shape[-1]), lse.reshape(batch, heads, length)


def _tile(one: _Problem, tile: Tile, scratch: NDArray) -> tuple[NDArray, NDArray, NDArray]:
    """Of a tile of queries the running output [b,g,R*t,Dv], and the running maximum and denominator [b,g,R*t,1]."""
    b, g, rows = tile
    shape = (*one.k[b, g].shape[:2], one.q.shape[2] * (rows.stop - rows.start))
    o, m, total = (np.full((*shape, n), x, one.q.dtype) for n, x in ((one.v.shape[-1], 0), (1, -np.inf), (1, 0)))
    for keys in one.keys(rows):
        s = one.scores(tile, keys, scratch)
        one.complete(s, tile, keys)
        top = np.maximum(m, s.max(-1, keepdims=True))
        base = _finite(top)
        s -= base
        np.exp(s, out=s)
        fade = np.exp(m - base)
        o *= fade
        o += s @ one.v[b, g, keys]
        m, total = top, total * fade + s.sum(-1, keepdims=True)
    return o, m, total


def _backward(one: _Problem, do: NDArray, less: NDArray, base: NDArray, bias: NDArray | None) -> list[NDArray]:
    """The gradients of q[B,G,R,Tq,D] without its scale, of k and v, and of the bias, its heads split (or None)."""
    dq, dk, dv = (np.zeros(a.shape, one.q.dtype) for a in (one.q, one.k, one.v))
    dbias = None if bias is None else np.zeros(_split(bias, one.k.shape[1]).shape, one.q.dtype)
    scratch = one.scratch()
    for tile in one.tiles():
        b, g, rows = tile
        query, given, minus, top = (_folded(a[b, g, :, rows]) for a in (one.q, do, less, base))
        for keys in one.keys(rows):
            s = one.scores(tile, keys, scratch)
            slope = None if one.softcap is None else 1 - np.square(s / one.softcap)
            one.complete(s, tile, keys)
            s -= top
            p = np.exp(s, out=s)
            dv[b, g, keys] += p.swapaxes(-1, -2) @ given
            ds = given @ one.v[b, g, keys].swapaxes(-1, -2)
            ds -= minus
            ds *= p
            if dbias is not None:
                _add_spread(dbias, one.by_head(ds), (b, g, slice(None), rows, keys))
            ds = ds if slope is None else np.multiply(ds, slope, out=ds)
            dq[b, g, :, rows] += (ds @ one.k[b, g, keys]).reshape(dq[b, g, :, rows].shape)
            dk[b, g, keys] += ds.swapaxes(-1, -2) @ query
    return [dq, dk, dv, dbias]


def _add_spread(total: NDArray, part: NDArray, place: tuple[slice, ...]) -> None:
    """Add a part at its place of what is to spread over it: summed over the axes that have length 1 there."""
    spread = tuple(axis for axis, length in enumerate(total.shape) if length == 1)
    here = tuple(slice(None) if axis in spread else one for axis, one in enumerate(place))
    total[here] += part.sum(spread, keepdims=True)


def _split(a: NDArray, groups: int) -> NDArray:
    """[B,H,..] -> [B,G,R,..]; heads of length 1 -> [B,1,1,..]."""
    return a[:, None] if a.shape[1] == 1 else a.reshape(a.shape[0], groups, a.shape[1] // groups, *a.shape[2:])


def _folded(a: NDArray) -> NDArray:
    """[b,g,R,t,D] -> [b,g,R*t,D]."""
    return a.reshape(*a.shape[:2], -1, a.shape[-1])


def _finite(top: NDArray) -> NDArray:
    """0 in place of -inf, so that -inf minus it is -inf and not NaN."""
    return np.where(np.isneginf(top), 0, top)


def _wide(x: NDArray) -> NDArray:
    return x if x.dtype == np.float64 else x.astype(np.float32, copy=False)
