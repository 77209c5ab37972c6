"""Scaled dot-product attention: which keys a query sees, what it makes of them.

Conventions:
- Axes: B batch, H query heads, G key heads, Tq queries, Tk keys, D head width, Dv value width.
- Query i stands at position i + offset, key j at position j; by default offset = Tk - Tq, so that the
  last query stands beside the last key.
- What a query does not see is selected away before it is multiplied: NaN in a hidden key or value
  reaches neither the output nor a gradient (0 · NaN would).
- A query that sees nothing (an empty row) gives out 0, lse -inf and gradients 0.

Because of the selection, keys and values are spread to [B,H,Tq,Tk,D]. Queries do not influence one
another: cut a large problem into pieces of queries, giving each piece its `offset`.
"""

from __future__ import annotations

import math
from typing import Any

from array_api_compat import array_namespace, device

from veriformer.reference.softmax import logsumexp, softmax

Window = tuple[int | None, int | None]


def attention(
    q: Any, k: Any, v: Any, *, mask: Any = None, bias: Any = None, causal: bool = False,
    scale: float | None = None, window: Window | None = None, softcap: float | None = None,
    sink: Any = None, offset: int | None = None,
) -> Any:  # fmt: skip
    """Every query's average of the values it sees, weighted by how well their keys match it.

    q[B,H,Tq,D], k[B,G,Tk,D], v[B,G,Tk,Dv] -> out[B,H,Tq,Dv].

        out = softmax(q kᵀ scale) v

    The other keywords, edge cases and errors are those of `attention_with_lse`.
    Source: Vaswani et al. 2017 (Attention Is All You Need), section 3.2.1; P48.
    """
    out, _ = attention_with_lse(
        q, k, v, mask=mask, bias=bias, causal=causal, scale=scale,
        window=window, softcap=softcap, sink=sink, offset=offset,
    )  # fmt: skip
    return out


def attention_with_lse(
    q: Any, k: Any, v: Any, *, mask: Any = None, bias: Any = None, causal: bool = False,
    scale: float | None = None, window: Window | None = None, softcap: float | None = None,
    sink: Any = None, offset: int | None = None,
) -> tuple[Any, Any]:  # fmt: skip
    """Attention, and the logarithm of the summed exponentials of each row's logits.

    q[B,H,Tq,D], k[B,G,Tk,D], v[B,G,Tk,Dv] -> out[B,H,Tq,Dv], lse[B,H,Tq].

        s = scale q·k                  scale: D^-½ unless given
        s = softcap tanh(s / softcap)  if softcap is given
        s = s + bias                   bias: 4-D, each axis full or 1
        s = -inf at hidden keys        mask: the same shapes, True = may attend; causal, window: `visible_keys`
        p = exp(s) / (exp(sink) + sum exp(s)),   out = p v,   lse = log sum exp(s)

    Query head h uses key head h // (H/G). sink[H] is the logit of one more key whose value is 0.
    Source: Vaswani et al. 2017, section 3.2.1; heads: Ainslie et al. 2023 (GQA), section 2.2;
    softcap: Gemma 2 report 2024, section 2; lse: Dao et al. 2022 (FlashAttention), section 3.1;
    sink: Xiao et al. 2023 (Attention Sinks), section 3; P48, P55, P61, P64, P65.
    Edges: a bias of -inf hides as False does; an empty row gives out 0 and lse -inf; lse knows no sink.
    Raises ValueError for shapes that do not fit, a mask that is not boolean, softcap <= 0, a negative window.
    """
    _check(q, k, v, mask, bias, softcap, sink)
    xp = array_namespace(q)
    visible = _visible(q, k, mask, bias, causal, window, offset)
    k, v = _spread(k, q, visible), _spread(v, q, visible)
    s = _logits(q, k, visible, bias, scale, softcap)
    p = softmax(s) if sink is None else _softmax_beside(sink, s)
    return xp.sum(p[..., None] * v, axis=-2), logsumexp(s)


def visible_keys(
    queries: int,
    keys: int,
    *,
    causal: bool = False,
    window: Window | None = None,
    offset: int | None = None,
    like: Any,
) -> Any:
    """Which keys each query may see by their positions alone, True = may attend.

    -> bool[queries, keys], in the framework and on the device of `like`.

        position of query i = i + offset,   distance = j - position
        causal: distance <= 0        window (left, right): -left <= distance <= right, None = unlimited

    offset is the position of query 0: keys - queries unless given (bottom-right), 0 is top-left.
    Source: Vaswani et al. 2017, section 3.2.3; window: Beltagy et al. 2020 (Longformer), section 3.1;
    P50, P51.
    Edges: more queries than keys, bottom-right and causal, leaves the leading rows without a key.
    Raises ValueError for a negative window.
    """
    xp = array_namespace(like)
    left, right = _window(window, causal)
    position = xp.arange(queries, device=device(like)) + (keys - queries if offset is None else offset)
    distance = xp.arange(keys, device=device(like))[None, :] - position[:, None]
    visible = distance == distance
    if left is not None:
        visible = visible & (distance >= -left)
    if right is not None:
        visible = visible & (distance <= right)
    return visible


def _window(window: Window | None, causal: bool) -> Window:
    """(left, right), with causality as the bound that it puts on the right side."""
    left, right = window or (None, None)
    for side in (left, right):
        if side is not None and side < 0:
            raise ValueError(f"window: got {window}, wanted two numbers of keys >= 0, or None for no limit")
    return left, (0 if causal else right)


def _visible(q: Any, k: Any, mask: Any, bias: Any, causal: bool, window: Window | None, offset: int | None) -> Any:
    """Everything that hides a key in one boolean array; its axes B and H may be 1 or missing."""
    visible = visible_keys(q.shape[2], k.shape[2], causal=causal, window=window, offset=offset, like=q)
    if mask is not None:
        visible = visible & mask
    if bias is not None:
        visible = visible & (bias != -math.inf)
    return visible


def _spread(rows: Any, q: Any, visible: Any) -> Any:
    """rows[B,G,Tk,D] as each query sees them, [B,H,Tq,Tk,D]: its own head's rows, 0 for hidden ones."""
    xp = array_namespace(rows)
    rows = xp.repeat(rows, q.shape[1] // rows.shape[1], axis=1)
    return xp.where(visible[..., None], rows[:, :, None, :, :], 0.0)


def _logits(q: Any, k: Any, visible: Any, bias: Any, scale: float | None, softcap: float | None) -> Any:
    """s[B,H,Tq,Tk] from q[B,H,Tq,D] and the keys k[B,H,Tq,Tk,D] that each query sees; -inf at hidden ones."""
    xp = array_namespace(q)
    s = xp.sum(q[:, :, :, None, :] * k, axis=-1) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        s = softcap * xp.tanh(s / softcap)
    if bias is not None:
        s = s + bias
    return xp.where(visible, s, -math.inf)


def _softmax_beside(sink: Any, s: Any) -> Any:
    """Softmax over the keys and one more logit, sink[H], whose share is dropped: rows sum to less than 1."""
    xp = array_namespace(s)
    column = xp.broadcast_to(sink[None, :, None, None], (*s.shape[:3], 1))
    return softmax(xp.concat([s, column], axis=-1))[..., :-1]


def _check(q: Any, k: Any, v: Any, mask: Any, bias: Any, softcap: float | None, sink: Any) -> None:
    """ValueError for what would broadcast or compute into a wrong answer without a word."""
    for name, array in (("q", q), ("k", k), ("v", v)):
        if array.ndim != 4:
            raise ValueError(
                f"attention: {name}: got shape {tuple(array.shape)}, wanted 4 axes: batch, head, time, width"
            )
    (batch, heads, queries, width), (_, groups, keys, _) = q.shape, k.shape
    _check_shape("k", k, (batch, groups, keys, width))
    _check_shape("v", v, (batch, groups, keys, v.shape[3]))
    if groups == 0 or heads % groups:
        raise ValueError(f"attention: heads: got {heads} of q and {groups} of k, wanted a multiple of k's")
    for name, array in (("mask", mask), ("bias", bias)):
        if array is not None:
            _check_broadcast(name, array, (batch, heads, queries, keys))
    if mask is not None and not array_namespace(mask).isdtype(mask.dtype, "bool"):
        raise ValueError(f"attention: mask: got {mask.dtype}, wanted booleans; numbers to be added are a bias")
    if sink is not None:
        _check_shape("sink", sink, (heads,))
    if softcap is not None and not softcap > 0:
        raise ValueError(f"attention: softcap: got {softcap}, wanted a number > 0, or None")


def _check_shape(name: str, array: Any, wanted: tuple[int, ...]) -> None:
    if tuple(array.shape) != wanted:
        raise ValueError(f"attention: {name}: got shape {tuple(array.shape)}, wanted {wanted} to fit q")


def _check_broadcast(name: str, array: Any, full: tuple[int, ...]) -> None:
    fits = array.ndim == 4 and all(size in (1, whole) for size, whole in zip(array.shape, full, strict=True))
    if not fits:
        raise ValueError(f"attention: {name}: got shape {tuple(array.shape)}, wanted {full}, where any axis may be 1")
