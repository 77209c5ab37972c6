"""Error budgets of attention over packed sequences and over a cache: attention's, sequence by sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from veriformer import reference
from veriformer.budgets.attention import Window, attention
from veriformer.budgets.bound import Array, Bound, exact
from veriformer.budgets.precision import Precision


def varlen_attention(
    q: Array, k: Array, v: Array, q_offsets: Array, k_offsets: Array, *, causal: bool = False,
    scale: float | None = None, window: Window | None = None, alignment: str = "bottom_right",
    precision: Precision,
) -> Bound:  # fmt: skip
    """Error budget of attention over packed sequences.

    q[Nq,H,D], k[Nk,G,D], v[Nk,G,Dv], offsets[B+1] -> value, allowed, both [Nq,H,Dv].

    The budget of `attention` on rows q_offsets[b] to q_offsets[b+1] and the keys of the same sequence.
    Source: as attention.
    Edges: a row that sees no key is exactly 0.
    """
    given: dict[str, Any] = {"causal": causal, "scale": scale, "window": window}
    value = np.asarray(reference.varlen_attention(q, k, v, q_offsets, k_offsets, alignment=alignment, **given))
    parts = []
    for b in range(len(q_offsets) - 1):
        rows, keys = slice(*q_offsets[b : b + 2]), slice(*k_offsets[b : b + 2])
        one = [_batched(array[part]) for array, part in ((q, rows), (k, keys), (v, keys))]
        offset = 0 if alignment == "top_left" else None
        parts.append((rows, attention(*one, **given, offset=offset, precision=precision)))
    return _gathered(value, [((rows,), _unbatched(part)) for rows, part in parts])


def cached_attention(
    q: Array, k_new: Array, v_new: Array, k_cache: Array, v_cache: Array, lengths: Array, *,
    causal: bool = True, scale: float | None = None, window: Window | None = None,
    block_table: Array | None = None, precision: Precision,
) -> tuple[Bound, Bound, Bound]:  # fmt: skip
    """Error budgets of attention over a cache, and of the caches with the new rows.

    q[B,H,m,D], k_new, v_new[B,G,m,D], caches[B,G,C,D] or [blocks,G,S,D] -> out[B,H,m,D] and both caches.

    out: the budget of `attention` with queries at lengths[b] + i, over the rows that are valid after the
    call. The caches: none, because rows are copied; rows that are not written keep what they held.
    Source: as attention.
    """
    given: dict[str, Any] = {"causal": causal, "scale": scale, "window": window}
    results = reference.cached_attention(q, k_new, v_new, k_cache, v_cache, lengths, block_table=block_table, **given)
    out, keys, values = map(np.asarray, results)
    parts: list[tuple[tuple[Any, ...], Bound]] = []
    for b, length in enumerate(int(n) for n in lengths):
        one = slice(b, b + 1)
        k, v = (_valid_rows(cache, b, length + q.shape[2], block_table) for cache in (keys, values))
        parts.append(((one,), attention(q[one], k, v, **given, offset=length, precision=precision)))
    return _gathered(out, parts), exact(keys), exact(values)


def _valid_rows(cache: Array, b: int, count: int, block_table: Array | None) -> Array:
    """The first rows that batch row b holds, [1,G,count,D]."""
    if block_table is None:
        return cache[b : b + 1, :, :count]
    # Entries of the table past the rows in use may name no block at all.
    used = block_table[b, : -(-count // max(cache.shape[2], 1))]
    blocks = [cache[int(block)] for block in used]
    rows: Array = np.concatenate([cache[0][:, :0], *blocks], axis=1)
    return rows[None, :, :count]


def _batched(rows: Array) -> Array:
    """rows[T,H,D] of one sequence as a batch of one, [1,H,T,D]."""
    return np.swapaxes(rows, 0, 1)[None]


def _unbatched(bound: Bound) -> Bound:
    """A bound [1,H,T,D] as rows [T,H,D]."""

    def rows(array: Array) -> Array:
        return np.swapaxes(np.broadcast_to(array, bound.value.shape)[0], 0, 1)

    terms = {name: rows(term) for name, term in bound.terms.items()}
    return Bound(rows(bound.value), rows(bound.allowed), terms)


def _gathered(value: Array, parts: Sequence[tuple[tuple[Any, ...], Bound]]) -> Bound:
    """One bound of the bounds of its parts, which stand at the given places."""
    allowed = np.zeros(value.shape)
    terms = {name: np.zeros(value.shape) for name in (parts[0][1].terms if parts else ())}
    for place, part in parts:
        allowed[place] = part.allowed
        for name, term in part.terms.items():
            terms[name][place] = np.broadcast_to(term, part.value.shape)
    return Bound(value, allowed, terms)
