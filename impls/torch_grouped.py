"""torch: attention that does no more work than its mask asks for, and a cache that is written where it lies.

Query heads that share a key head become rows of one product, where torch's enable_gqa takes each head alone. A window
is cut into blocks of queries against the keys that these may see. New keys and values are written behind the valid
rows of given caches, and views of those rows are attended to: nothing is copied but what comes out of a block table.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from veriformer.declarations import Capabilities

FRAMEWORK = "torch"
Window = tuple[int | None, int | None]
BLOCK = 64
"""Queries that are taken together in a window: fewer waste less work on hidden keys, more make fewer calls."""


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, causal: bool = False, scale: float | None = None,
    window: Window | None = None,
) -> Tensor:  # fmt: skip
    """Attention of grouped heads, within a window if there is one.

    q[B,H,Tq,D], k[B,G,Tk,D], v[B,G,Tk,Dv], mask [B or 1,H or 1,Tq or 1,Tk] -> [B,H,Tq,Dv]
    softmax(q k^T scale) v over the keys a row may see; query i sits at Tk - Tq + i (bottom right)
    window: (keys before a query that it sees, keys behind it), None for all
    Source: Ainslie et al. 2023 (GQA), section 2.2; Beltagy et al. 2020 (Longformer), section 3.1. A row that may see
    nothing gives zeros.
    Raises ValueError where G does not divide H, and for a window below 0.
    """
    (queries, keys), (left, right) = (q.shape[2], k.shape[2]), window or (None, None)
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"heads: got {q.shape[1]} of queries and {k.shape[1]} of keys, wanted a multiple of those")
    if min(left or 0, right or 0) < 0:
        raise ValueError(f"window: got {window}, wanted two numbers of keys >= 0, or None for no limit")
    if queries == 0:
        return _rows(q, k, v, None, scale)
    if queries == 1:  # it sits at the last key
        right = None
    elif causal:
        right = 0
    if mask is None and left is None and right is None:
        return _rows(q, k, v, None, scale)
    if mask is not None:
        mask = mask.expand(*mask.shape[:-2], queries, keys)
    if queries == keys and right == 0 and left is None and mask is None and (scale is None or scale > 0):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=k.shape[1] < q.shape[1])
    size = queries if left is None else min(queries, BLOCK)
    bands: dict[tuple[int, int, int], Tensor | None] = {}
    parts = []
    for a in range(0, queries, size):
        b, first = min(queries, a + size), keys - queries + a
        low, high = _span(first, first + b - a, keys, left, right)
        shape = (first - low, b - a, high - low)
        if shape not in bands:
            bands[shape] = _band(*shape, left, right, q.device)
        seen = _both(bands[shape], None if mask is None else mask[..., a:b, low:high])
        parts.append(_rows(q[:, :, a:b], k[:, :, low:high], v[:, :, low:high], seen, scale))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def cached_attention(
    q: Tensor, k_new: Tensor, v_new: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, *,
    causal: bool = True, scale: float | None = None, window: Window | None = None, block_table: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """New keys and values written into the given caches, then attention over views of their valid rows.

    q[B,H,m,D], k_new[B,G,m,D], v_new[B,G,m,Dv], caches [B,G,C,D] and [B,G,C,Dv], lengths[B]
    -> (out[B,H,m,Dv], k_cache, v_cache); with block_table[B,P] the caches are [blocks,G,S,..]
    row lengths[b] + i = new row i; query i, at that position, sees the rows up to it (causal) or all
    Source: Pope et al. 2022, section 3.3; Kwon et al. 2023 (PagedAttention), section 4.1.
    Raises ValueError where lengths[b] + m exceeds the capacity, for lengths below 0, and as attention does.
    """
    new, caches = q.shape[2], (k_cache, v_cache)
    starts = append(k_new, v_new, k_cache, v_cache, lengths, block_table=block_table)
    if block_table is None and len(set(starts)) == 1:
        k, v = (cache[:, :, : starts[0] + new] for cache in caches)
        return attention(q, k, v, causal=causal, scale=scale, window=window), k_cache, v_cache
    outs = []
    for b, start in enumerate(starts):
        table = None if block_table is None else block_table[b]
        k, v = (_valid(cache, b, start + new, table) for cache in caches)
        outs.append(attention(q[b : b + 1], k, v, causal=causal, scale=scale, window=window))
    return torch.cat(outs), k_cache, v_cache


def append(
    k_new: Tensor, v_new: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, *,
    block_table: Tensor | None = None,
) -> list[int]:  # fmt: skip
    """New rows put behind the valid ones, in place; the lengths before, as numbers.

    k_new[B,G,m,D], v_new[B,G,m,Dv], caches, lengths and block_table as of cached_attention
    row lengths[b] + i = new row i
    Source: Pope et al. 2022, section 3.3.
    Raises ValueError where lengths[b] + m exceeds the capacity, or lengths[b] < 0; nothing is written then.
    """
    starts, new, slots = lengths.tolist(), k_new.shape[2], k_cache.shape[2]
    if not starts:
        return starts
    if block_table is None and starts.count(starts[0]) == len(starts) and 0 <= starts[0] <= slots - new:
        k_cache.narrow(2, starts[0], new).copy_(k_new)  # the usual case in as few steps as can be
        v_cache.narrow(2, starts[0], new).copy_(v_new)
        return starts
    capacity = slots if block_table is None else slots * block_table.shape[1]
    if min(starts) < 0:
        raise ValueError(f"lengths: got {min(starts)}, wanted numbers of rows >= 0")
    if max(starts) + new > capacity:
        raise ValueError(f"lengths: got {max(starts)} rows beside {new} new ones, wanted at most {capacity}")
    pairs = ((k_cache, k_new), (v_cache, v_new))
    if block_table is not None:
        position = lengths[:, None] + torch.arange(new, device=lengths.device)
        block = block_table.gather(1, position // slots)
        for cache, rows in pairs:
            cache[block, :, position % slots] = rows.transpose(1, 2)
    else:
        for cache, rows in pairs:
            for b, start in enumerate(starts):
                cache[b, :, start : start + new] = rows[b]
    return starts


def _valid(cache: Tensor, b: int, total: int, table: Tensor | None) -> Tensor:
    """The first rows of a sequence, [1,G,total,..]: a view, or the blocks that its table lists for them."""
    if table is None:
        return cache[b : b + 1, :, :total]
    used = -(-total // cache.shape[2])
    return cache[table[:used]].transpose(0, 1).flatten(1, 2)[None, :, :total]


def _span(first: int, end: int, keys: int, left: int | None, right: int | None) -> tuple[int, int]:
    """The keys that queries at positions first to end may see, one at least."""
    low = 0 if left is None else min(max(0, first - left), keys - 1)
    return low, keys if right is None else max(low + 1, min(keys, end + right))


def _band(
    first: int, queries: int, keys: int, left: int | None, right: int | None, device: torch.device
) -> Tensor | None:
    """[Tq,Tk]: may a query at `first` and on see a key; None where all may see all."""
    last = first + queries - 1
    if (left is None or left >= last) and (right is None or first + right >= keys - 1):
        return None
    behind = torch.arange(first, last + 1, device=device)[:, None] - torch.arange(keys, device=device)
    seen = None if left is None else behind <= left
    return seen if right is None else _both(seen, behind >= -right)


def _both(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return one if other is None else other
    return one & other


def _rows(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, scale: float | None) -> Tensor:
    """One call: heads that share keys are its rows, unless these would need masks of their own."""
    (batch, heads, queries, width), groups = q.shape, k.shape[1]
    if heads == groups or (seen is not None and queries > 1):
        return F.scaled_dot_product_attention(q, k, v, seen, scale=scale, enable_gqa=groups < heads)
    if seen is not None and seen.ndim == 4 and seen.shape[1] > 1:
        seen = seen.reshape(-1, groups, heads // groups, seen.shape[3])
    rows = q.reshape(batch, groups, heads // groups * queries, width)
    return F.scaled_dot_product_attention(rows, k, v, seen, scale=scale).reshape(batch, heads, queries, v.shape[3])


VARIANTS = {"grouped": {"attention": attention}, "append": {"cached_attention": cached_attention}}
CAPABILITIES = {
    "grouped": {"attention": Capabilities(nonpositive_scale=True)},
    # a cache that is written cannot be what gradients flow to
    "append": {
        "cached_attention": Capabilities(
            nonpositive_scale=True, nan_contained=True, cache_in_place=True, gradients=False
        ),
    },
}
