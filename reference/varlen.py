"""Attention over sequences of different lengths, packed one after the other."""

from __future__ import annotations

from typing import Any

from array_api_compat import array_namespace

from veriformer.reference.attention import Window, attention


def varlen_attention(
    q: Any, k: Any, v: Any, q_offsets: Any, k_offsets: Any, *, causal: bool = False,
    scale: float | None = None, window: Window | None = None, alignment: str = "bottom_right",
) -> Any:  # fmt: skip
    """Attention within each of several packed sequences, which never see one another.

    q[Nq,H,D], k[Nk,G,D], v[Nk,G,Dv], q_offsets[S+1], k_offsets[S+1] -> out[Nq,H,Dv].

        out[a:b] = attention(q[a:b], k[c:d], v[c:d])    for sequence s: a, b = q_offsets[s], q_offsets[s + 1]
                                                                        c, d = k_offsets[s], k_offsets[s + 1]

    causal and window act within a sequence. alignment: "bottom_right" puts its last query beside its
    last key, "top_left" its first query beside its first key.
    Source: Dao et al. 2022 (FlashAttention), whose code has this form; `attention` for one sequence; P51, P54.
    Edges: a sequence without queries takes no rows; one without keys gives 0.
    Raises ValueError for an unknown alignment, offsets that do not run from 0 to the number of rows
    without a step back, and as `attention` does.
    """
    if alignment not in ("bottom_right", "top_left"):
        raise ValueError(f"varlen_attention: alignment: got {alignment!r}, wanted 'bottom_right' or 'top_left'")
    for name, rows in (("q", q), ("k", k), ("v", v)):
        if rows.ndim != 3:
            raise ValueError(
                f"varlen_attention: {name}: got shape {tuple(rows.shape)}, wanted 3 axes: row, head, width"
            )
    if v.shape[0] != k.shape[0]:
        raise ValueError(f"varlen_attention: v: got {v.shape[0]} rows, wanted {k.shape[0]}, as in k")
    starts, key_starts = _numbers("q", q_offsets, q.shape[0]), _numbers("k", k_offsets, k.shape[0])
    if len(starts) != len(key_starts):
        raise ValueError(f"varlen_attention: k_offsets: got {len(key_starts)}, wanted {len(starts)}, as of q")
    xp, out = array_namespace(q), []
    for a, b, c, d in zip(starts, starts[1:], key_starts, key_starts[1:], strict=False):
        rows = (_heads_first(q[a:b, ...]), _heads_first(k[c:d, ...]), _heads_first(v[c:d, ...]))
        offset = 0 if alignment == "top_left" else None
        y = attention(*rows, causal=causal, scale=scale, window=window, offset=offset)
        out.append(xp.moveaxis(y[0, ...], 0, 1))
    return xp.concat(out, axis=0)


def _heads_first(rows: Any) -> Any:
    """rows[T,heads,width] of one sequence -> [1,heads,T,width]."""
    return array_namespace(rows).moveaxis(rows, 1, 0)[None, ...]


def _numbers(name: str, offsets: Any, rows: int) -> list[int]:
    """The offsets as Python numbers; ValueError unless they cut `rows` rows into pieces, in order."""
    if offsets.ndim != 1 or offsets.shape[0] < 2:
        raise ValueError(
            f"varlen_attention: {name}_offsets: got shape {tuple(offsets.shape)}, wanted one axis of at least 2"
        )
    numbers = [int(offsets[s]) for s in range(offsets.shape[0])]
    if numbers[0] != 0 or numbers[-1] != rows or numbers != sorted(numbers):
        raise ValueError(
            f"varlen_attention: {name}_offsets: got {numbers}, wanted numbers in order "
            f"from 0 to {rows}, the rows of {name}"
        )
    return numbers
