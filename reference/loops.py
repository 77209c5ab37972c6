"""The core operations once more, as loops over Python numbers, to check the reference itself.

Slow and plain on purpose: nested lists in, nested lists out, and not a line shared with the other
files: what they do with arrays, masks, windows and head maps is done here with `if` and `for`.
Sums are `math.fsum`, which rounds once.
"""

from __future__ import annotations

import math
from typing import Any


def softmax(x: Any, *, temperature: float = 1.0) -> Any:
    """softmax of each row; x: nested lists, the last axis is reduced -> like x."""
    return _each_row(lambda row: _softmax_row(row, temperature), x)


def log_softmax(x: Any) -> Any:
    """log_softmax of each row; x: nested lists, the last axis is reduced -> like x."""
    return _each_row(_log_softmax_row, x)


def logsumexp(x: Any) -> Any:
    """logsumexp of each row; x: nested lists, the last axis is reduced -> without it."""
    return _each_row(_logsumexp_row, x)


def layer_norm(
    x: Any, weight: Any, bias: Any, *, eps: float = 1e-5, epsilon: str = "inside", variance: str = "biased"
) -> Any:
    """layer_norm of each row; x: nested lists […][d], weight[d], bias[d] -> like x."""

    def one(row: list[float]) -> list[float]:
        mean = math.fsum(row) / len(row)
        squares = math.fsum((a - mean) ** 2 for a in row)
        freedom = len(row) - 1 if variance == "unbiased" else len(row)
        v = squares / freedom if freedom else 0.0
        root = math.sqrt(v) + eps if epsilon == "outside" else math.sqrt(v + eps)
        if min(row) == max(row):
            return [float(b) for b in bias]
        return [w * (a - mean) / root + b for a, w, b in zip(row, weight, bias, strict=True)]

    return _each_row(one, x)


def attention(q: Any, k: Any, v: Any, **keywords: Any) -> Any:
    """attention on nested lists q[B][H][Tq][D], k[B][G][Tk][D], v[B][G][Tk][Dv]; Tk >= 1."""
    return attention_with_lse(q, k, v, **keywords)[0]


def attention_with_lse(
    q: Any, k: Any, v: Any, *, mask: Any = None, bias: Any = None, causal: bool = False,
    scale: float | None = None, window: Any = None, softcap: float | None = None,
    sink: Any = None, offset: int | None = None,
) -> tuple[Any, Any]:  # fmt: skip
    """attention and lse[B][H][Tq] on nested lists q[B][H][Tq][D], k[B][G][Tk][D], v[B][G][Tk][Dv]; Tk >= 1."""

    def row(b: int, h: int, i: int) -> tuple[list[float], float]:
        query, g = q[b][h][i], _key_head(h, len(q[b]), len(k[b]))
        keys, values = k[b][g], v[b][g]
        position = i + (len(keys) - len(q[b][h]) if offset is None else offset)
        seen = []
        for j in range(len(keys)):
            added = 0.0 if bias is None else _entry(bias, b, h, i, j)
            allowed = mask is None or _entry(mask, b, h, i, j)
            if allowed and added != -math.inf and _in_reach(position, j, causal, window):
                seen.append((_logit(query, keys[j], scale, softcap) + added, values[j]))
        return _average(seen, len(values[0]), None if sink is None else sink[h])

    rows = [[[row(b, h, i) for i in range(len(q[b][h]))] for h in range(len(q[b]))] for b in range(len(q))]
    out = [[[pair[0] for pair in head] for head in batch] for batch in rows]
    lse = [[[pair[1] for pair in head] for head in batch] for batch in rows]
    return out, lse


def _each_row(function: Any, x: Any) -> Any:
    if len(x) and hasattr(x[0], "__len__"):
        return [_each_row(function, part) for part in x]
    return function([float(a) for a in x])


def _softmax_row(row: list[float], temperature: float) -> list[float]:
    present = [a for a in row if a != -math.inf]
    if not present:
        return [0.0 for _ in row]
    top = max(present)
    if temperature == 0:
        return [1 / row.count(top) if a == top else 0.0 for a in row]
    powers = [math.exp((a - top) / temperature) for a in row]
    return [power / math.fsum(powers) for power in powers]


def _logsumexp_row(row: list[float]) -> float:
    top = max(row, default=-math.inf)
    if top == -math.inf:
        return -math.inf
    return top + math.log(math.fsum(math.exp(a - top) for a in row))


def _log_softmax_row(row: list[float]) -> list[float]:
    top = max(row, default=-math.inf)
    rest = _logsumexp_row([a - top for a in row]) if top > -math.inf else 0.0
    return [a if a == -math.inf else (a - top) - rest for a in row]


def _key_head(head: int, heads: int, groups: int) -> int:
    """The first heads / groups query heads share key head 0, the next ones key head 1, and so on."""
    group = 0
    while (group + 1) * heads <= head * groups:
        group += 1
    return group


def _in_reach(position: int, j: int, causal: bool, window: Any) -> bool:
    if causal and j > position:
        return False
    if window is None:
        return True
    left, right = window
    if j < position:
        return left is None or position - j <= left
    return right is None or j - position <= right


def _entry(array: Any, b: int, h: int, i: int, j: int) -> Any:
    """Element [b, h, i, j] of nested lists in which an axis of length 1 stands for every index."""
    for index in (b, h, i, j):
        array = array[0] if len(array) == 1 else array[index]
    return array


def _logit(query: Any, key: Any, scale: float | None, softcap: float | None) -> float:
    logit = math.fsum(float(a) * float(b) for a, b in zip(query, key, strict=True))
    logit = logit / math.sqrt(len(query)) if scale is None else logit * scale
    return logit if softcap is None else softcap * math.tanh(logit / softcap)


def _average(seen: list[tuple[float, Any]], width: int, sink: float | None) -> tuple[list[float], float]:
    """The weighted average of the seen values and the lse of their logits; the sink only dilutes."""
    if not seen:
        return [0.0] * width, -math.inf
    logits = [logit for logit, _ in seen]
    top = max(logits if sink is None else [*logits, sink])
    weights = [math.exp(logit - top) for logit in logits]
    total = math.fsum(weights if sink is None else [*weights, math.exp(sink - top)])
    out = [
        math.fsum(w * float(value[c]) for w, (_, value) in zip(weights, seen, strict=True)) / total
        for c in range(width)
    ]
    return out, _logsumexp_row(logits)
