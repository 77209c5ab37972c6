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


def rms_norm(x: Any, weight: Any, *, eps: float = 1e-6, weight_form: str = "plain") -> Any:
    """rms_norm of each row; x: nested lists […][d], weight[d] -> like x."""

    def one(row: list[float]) -> list[float]:
        root = math.sqrt(math.fsum(a * a for a in row) / len(row) + eps)
        gains = [float(w) + 1 if weight_form == "one_plus" else float(w) for w in weight]
        return [w * a / root if a else 0.0 for a, w in zip(row, gains, strict=True)]

    return _each_row(one, x)


def relu(x: Any) -> Any:
    """relu of each entry; x: nested lists -> like x."""
    return _each_row(lambda row: [max(0.0, a) for a in row], x)


def gelu(x: Any, *, form: str = "erf") -> Any:
    """gelu of each entry, by the tail of the normal distribution or as x times a sigmoid; x: nested lists -> like x."""

    def one(a: float) -> float:
        if form == "erf":
            return 0.5 * a * math.erfc(-a * math.sqrt(0.5))
        return a / (1 + math.exp(-math.sqrt(8 / math.pi) * (a + 0.044715 * a**3)))

    return _each_row(lambda row: [one(a) for a in row], x)


def feed_forward(x: Any, w1: Any, b1: Any, w2: Any, b2: Any) -> Any:
    """feed_forward of each row; x: nested lists […][d], w1[d][f], b1[f] or None, w2[f][d], b2[d] or None -> like x."""
    return _each_row(lambda row: affine([max(0.0, a) for a in affine(row, w1, b1)], w2, b2), x)


def affine(row: Any, w: Any, b: Any = None) -> list[float]:
    """The row vector times w[n][m], plus b[m] if given."""
    columns = range(len(w[0]))
    return [
        math.fsum([*(float(a) * float(w[i][j]) for i, a in enumerate(row)), 0.0 if b is None else b[j]])
        for j in columns
    ]


def sinusoidal_positions(length: int, width: int, *, offset: int = 0) -> Any:
    """sinusoidal_positions as nested lists [length][width]."""
    return [
        [
            math.cos(p / 10000 ** ((c - 1) / width)) if c % 2 else math.sin(p / 10000 ** (c / width))
            for c in range(width)
        ]
        for p in range(offset, offset + length)
    ]


def rotary_embedding(x: Any, positions: Any, *, base: float = 10000.0, pairs: str = "halves") -> Any:
    """rotary_embedding by complex numbers; x: nested lists […][T][D], positions[T] -> like x."""
    if hasattr(x[0][0], "__len__"):
        return [rotary_embedding(part, positions, base=base, pairs=pairs) for part in x]
    return [_turned([float(a) for a in row], int(p), base, pairs) for row, p in zip(x, positions, strict=True)]


def alibi_bias(heads: int, query_length: int, key_length: int, *, form: str = "signed") -> Any:
    """alibi_bias as nested lists [heads][query_length][key_length]."""

    def one(slope: float, i: int, j: int) -> float:
        back = i + key_length - query_length - j
        return -slope * (abs(back) if form == "distance" else back)

    return [
        [[one(slope, i, j) for j in range(key_length)] for i in range(query_length)] for slope in _alibi_slopes(heads)
    ]


def embedding(ids: Any, table: Any) -> Any:
    """The rows of table[V][d] that the nested lists of ids name -> […][d]."""
    if hasattr(ids, "__len__") and (not hasattr(ids, "shape") or ids.shape):
        return [embedding(part, table) for part in ids]
    return [float(a) for a in table[int(ids)]]


def dropout(x: Any, *, rate: float, uniform: Any) -> Any:
    """dropout of nested lists x under the numbers of uniform, nested alike -> like x."""
    if hasattr(x[0], "__len__"):
        return [dropout(part, rate=rate, uniform=numbers) for part, numbers in zip(x, uniform, strict=True)]
    return [float(a) / (1 - rate) if u >= rate else 0.0 for a, u in zip(x, uniform, strict=True)]


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


def _turned(row: list[float], position: int, base: float, pairs: str) -> list[float]:
    """Pair j, as a complex number, times e^(i angle)."""
    turned, half = list(row), len(row) // 2
    for j in range(half):
        a, b = (j, j + half) if pairs == "halves" else (2 * j, 2 * j + 1)
        angle = position / base ** (j / half)
        number = complex(row[a], row[b]) * complex(math.cos(angle), math.sin(angle))
        turned[a], turned[b] = number.real, number.imag
    return turned


def _alibi_slopes(heads: int) -> list[float]:
    """Powers of 2^(-8/heads), or those of a lower number of heads and then every second one of twice that."""
    power = 1
    while 2 * power <= heads:
        power *= 2
    start = 0.5 ** (8 / power)
    slopes = [start**h for h in range(1, power + 1)]
    return slopes if power == heads else slopes + _alibi_slopes(2 * power)[::2][: heads - power]


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
