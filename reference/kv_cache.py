"""Attention beside a cache: the keys and values of earlier tokens are kept, those of new ones appended.

Conventions:
- lengths[b] rows of batch row b are valid before the call. New row i is written at position
  lengths[b] + i, where its query stands too.
- Nothing is written in place: the caches that come back are new arrays, the given ones stay as they are.
- Rows after the newly written ones are cut off before anything is computed: whatever they hold, even
  NaN, never reaches out. They come back unchanged.
"""

from __future__ import annotations

from typing import Any

from array_api_compat import array_namespace

from veriformer.reference.attention import Window, attention


def cached_attention(
    q: Any, k_new: Any, v_new: Any, k_cache: Any, v_cache: Any, lengths: Any, *, causal: bool = True,
    scale: float | None = None, window: Window | None = None, block_table: Any = None,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Attention of new queries over the cached and the new keys, and the caches with the new rows.

    q[B,H,m,D], k_new[B,G,m,D], v_new[B,G,m,Dv], k_cache[B,G,C,D], v_cache[B,G,C,Dv], lengths[B]
    -> out[B,H,m,Dv], k_cache, v_cache.

        k_cache[b, :, n : n + m] = k_new[b],   v_cache likewise,   n = lengths[b]
        out[b] = attention(q[b], k_cache[b, :, : n + m], v_cache[b, :, : n + m], offset=n)

    A query at position n + i sees rows up to its own if causal, else all n + m, and of these those in
    the window. With block_table[B,P] the caches are [blocks,G,S,D]: row t of b is row t mod S of block
    block_table[b, t div S]; entries of the table beyond row n + m - 1 are not read.
    Source: Pope et al. 2022 (Efficiently Scaling Transformer Inference), section 2.1; blocks: Kwon et al.
    2023 (PagedAttention), section 4.1; P66, P67.
    Edges: m = 0 gives an empty out and the caches as they were.
    Raises ValueError if n + m exceeds C, or P·S; if n is negative; for shapes that do not fit, blocks
    that do not exist, or a block that is written for one sequence and listed once more.
    """
    _check(q, k_new, v_new, k_cache, v_cache, lengths, block_table)
    new, size = q.shape[2], k_cache.shape[2]
    starts, tables = _starts(lengths), _tables(block_table, q.shape[0])
    tables = [_used(table, n + new, size) for table, n in zip(tables, starts, strict=True)]
    written = [table[n // size :] if new else [] for table, n in zip(tables, starts, strict=True)]
    _check_blocks(tables, written, k_cache.shape[0])
    xp, out = array_namespace(q), []
    k_blocks, v_blocks = _blocks(k_cache), _blocks(v_cache)
    for b, (n, table) in enumerate(zip(starts, tables, strict=True)):
        k = _append(k_blocks, table, n, k_new[b, ...])
        v = _append(v_blocks, table, n, v_new[b, ...])
        row = (q[b : b + 1, ...], k[None, ...], v[None, ...])
        out.append(attention(*row, causal=causal, scale=scale, window=window, offset=n))
    return xp.concat(out, axis=0), xp.stack(k_blocks), xp.stack(v_blocks)


def _append(blocks: list[Any], table: list[int], n: int, new: Any) -> Any:
    """The n valid rows of one sequence and its new ones, [G,n+m,width]; its blocks in the list are replaced."""
    xp, m, size = array_namespace(new), new.shape[1], blocks[0].shape[1]
    if m == 0 and n == 0:
        return new
    old = xp.concat([blocks[block] for block in table], axis=1)
    rows = xp.concat([old[:, :n, :], new, old[:, n + m :, :]], axis=1)
    for place, block in enumerate(table):
        blocks[block] = rows[:, place * size : (place + 1) * size, :]
    return rows[:, : n + m, :]


def _blocks(cache: Any) -> list[Any]:
    """The blocks [G,S,width] of a cache [blocks,G,S,width]; without paging each batch row is one block."""
    return [cache[block, ...] for block in range(cache.shape[0])]


def _starts(lengths: Any) -> list[int]:
    """The lengths as Python numbers."""
    starts = [int(lengths[b]) for b in range(lengths.shape[0])]
    if min(starts) < 0:
        raise ValueError(f"cached_attention: lengths: got {min(starts)}, wanted numbers of rows >= 0")
    return starts


def _tables(block_table: Any, batch: int) -> list[list[int]]:
    """The blocks of each sequence, in order, as Python numbers."""
    if block_table is None:
        return [[b] for b in range(batch)]
    return [[int(block_table[b, place]) for place in range(block_table.shape[1])] for b in range(batch)]


def _used(table: list[int], rows: int, size: int) -> list[int]:
    """The blocks of `size` rows that the first `rows` rows of a sequence lie in."""
    if rows > len(table) * size:
        raise ValueError(
            f"cached_attention: lengths: got {rows} rows with the new ones, wanted at most {len(table) * size}, "
            "the capacity of the cache; give a larger cache"
        )
    return table[: -(-rows // max(size, 1))]


def _check_blocks(tables: list[list[int]], written: list[list[int]], blocks: int) -> None:
    """ValueError for a block that does not exist, or that is written for one sequence and listed once more."""
    listed = [block for table in tables for block in table]
    for block in listed:
        if not 0 <= block < blocks:
            raise ValueError(f"cached_attention: block_table: got block {block}, wanted 0 to {blocks - 1}")
    for block in (block for part in written for block in part):
        if listed.count(block) > 1:
            raise ValueError(
                f"cached_attention: block_table: got block {block}, which is written, more than once; "
                "wanted sequences that share only blocks that are full"
            )


def _check(q: Any, k_new: Any, v_new: Any, k_cache: Any, v_cache: Any, lengths: Any, block_table: Any) -> None:
    """ValueError for shapes that would broadcast or be cut into a wrong answer without a word."""
    for name, array in (("q", q), ("v_new", v_new), ("k_cache", k_cache)):
        if array.ndim != 4:
            raise ValueError(f"cached_attention: {name}: got shape {tuple(array.shape)}, wanted 4 axes")
    (batch, _, new, width), (blocks, groups, size, _), values = q.shape, k_cache.shape, v_new.shape[3]
    if block_table is None:
        blocks = batch
    wanted = {
        "k_new": (k_new, (batch, groups, new, width)),
        "v_new": (v_new, (batch, groups, new, values)),
        "k_cache": (k_cache, (blocks, groups, size, width)),
        "v_cache": (v_cache, (blocks, groups, size, values)),
        "lengths": (lengths, (batch,)),
    }
    for name, (array, shape) in wanted.items():
        if tuple(array.shape) != shape:
            raise ValueError(f"cached_attention: {name}: got shape {tuple(array.shape)}, wanted {shape} to fit q")
    if batch == 0:
        raise ValueError("cached_attention: q: got no batch row, wanted at least 1")
    if block_table is not None and (block_table.ndim != 2 or block_table.shape[0] != batch):
        raise ValueError(
            f"cached_attention: block_table: got shape {tuple(block_table.shape)}, wanted [{batch}, blocks of a row]"
        )
