"""Rows of a table in place of token numbers."""

from __future__ import annotations

from typing import Any

from array_api_compat import array_namespace


def embedding(ids: Any, table: Any, *, padding_index: int | None = None) -> Any:
    """The row of the table that each id names.

    ids[…] of integers, table[V, d] -> y[…, d].

        y = table[ids]

    padding_index changes no value; the gradient of that row is 0.
    Source: Vaswani et al. 2017 (Attention Is All You Need), section 3.4.
    Edges: negative ids do not count from the end.
    Raises ValueError for ids that are not integers from 0 to V - 1, a padding_index that is none of
    these, or a table that is not [V, d].
    """
    _check(ids, table, padding_index)
    xp = array_namespace(table)
    flat = xp.reshape(ids, (-1,))
    rows = xp.take(table, flat, axis=0)
    if padding_index is not None:
        rows = xp.where((flat == padding_index)[:, None], _constant(rows), rows)
    return xp.reshape(rows, (*ids.shape, table.shape[1]))


def _constant(x: Any) -> Any:
    """The same numbers, through which no gradient flows; arrays that record gradients have `detach` for it."""
    return x.detach() if hasattr(x, "detach") else x


def _check(ids: Any, table: Any, padding_index: int | None) -> None:
    """ValueError for what would pick a wrong row without a word."""
    if table.ndim != 2:
        raise ValueError(f"embedding: table: got shape {tuple(table.shape)}, wanted 2 axes: ids, width")
    xp, size = array_namespace(ids), table.shape[0]
    if not xp.isdtype(ids.dtype, "integral"):
        raise ValueError(f"embedding: ids: got {ids.dtype}, wanted integers")
    if bool(xp.any((ids < 0) | (ids >= size))):
        raise ValueError(f"embedding: ids: got {int(xp.min(ids))} to {int(xp.max(ids))}, wanted 0 to {size - 1}")
    if padding_index is not None and not 0 <= padding_index < size:
        raise ValueError(f"embedding: padding_index: got {padding_index}, wanted 0 to {size - 1}, or None")
