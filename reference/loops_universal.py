"""The Universal Transformer and its dialects as loops over Python numbers.

The continuation of `loops_models`, to check the reference: one sequence at a time, one position at a time, and each
position's halting followed by itself.
"""

from __future__ import annotations

import math
from typing import Any

from veriformer.reference import loops, loops_models


def universal_transformer(
    x: Any, params: Any, *, heads: int, norm: str = "post", mask: Any = None, causal: bool = False, memory: Any = None,
    memory_mask: Any = None, max_steps: int, epsilon: float = 0.01, halting: str = "act", read: str = "after",
    comparison: str = "at_least", forced: str = "remainder", scope: str = "position", state: str = "copy",
    output: str = "mean_field", again: bool = False, position: Any = 0, step: Any = 1,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """universal_transformer, or a dialect of it, on nested lists x[T][d], mask[T] -> out[T][d], N[T], R[T]."""
    tokens = [i for i in range(len(x)) if mask is None or mask[i]]
    x = [[float(a) if i in tokens else 0.0 for a in row] for i, row in enumerate(x)]
    layer = {"heads": heads, "norm": norm, "mask": mask, "memory_mask": memory_mask}
    u, h, s = x, [[] for _ in x], [[] for _ in x]
    for n in range(1, max_steps + 1):
        z = [_plus(u[i], x[i]) if again and n > 1 else u[i] for i in range(len(x))]
        for i, row in enumerate(z):
            row = row if position is None else _plus(row, _sinusoid(position + i, row))
            z[i] = row if step is None else _plus(row, _sinusoid(step + n - 1, row))
        new = loops_models.layer(z, memory, params["layer"], causal=causal or memory is not None, **layer)
        p = [_halting(row, params["halt"]) for row in (new if read == "after" else z)]
        if scope == "global":
            p = [sum(p[i] for i in tokens) / max(len(tokens), 1)] * len(x)
        for i in range(len(x)):
            h[i].append(0.0 if halting == "never" else p[i])
            s[i].append(new[i])
        halted = [state == "copy" and _stop(h[i][:-1], epsilon, comparison) is not None for i in range(len(x))]
        u = [u[i] if halted[i] else new[i] for i in range(len(x))]
    return _results(s, h, tokens, epsilon, halting, comparison, forced, state, output)


def _results(
    s: Any, h: Any, tokens: Any, epsilon: float, halting: str, comparison: str, forced: str, state: str, output: str
) -> tuple[Any, Any, Any]:
    """Each position's output, N and R from its states s[T][M][d] and halting probabilities h[T][M]."""
    width, results = len(s[0][0]), []
    stops = [_stop(h[i], epsilon, comparison) for i in range(len(s))]
    counts = [len(h[i]) if stops[i] is None or halting == "stick_breaking" else stops[i] for i in range(len(s))]
    end = max((counts[i] for i in tokens), default=0)
    for i in range(len(s)):
        count, weights = counts[i], h[i][: counts[i]]
        if i not in tokens:
            results.append(([0.0] * width, 0, 0.0))
            continue
        remainder = 1 - math.fsum(weights[:-1])
        if halting == "stick_breaking":
            weights = [a * math.prod(1 - b for b in weights[:n]) for n, a in enumerate(weights)]
            remainder = 1 - math.fsum(weights[:-1])
        if stops[i] is None and forced == "none":
            remainder = 0.0
        else:
            weights = [*weights[:-1], remainder]
        rows = s[i][:count]
        if output == "last":
            out = s[i][(count if state == "copy" else end) - 1]
        elif output == "ema":
            out = [0.0] * width
            for w, row in zip(weights, rows, strict=True):
                out = [w * a + (1 - w) * b for a, b in zip(row, out, strict=True)]
        else:
            out = [math.fsum(w * row[c] for w, row in zip(weights, rows, strict=True)) for c in range(width)]
        results.append((out, count, remainder))
    out, steps, remainders = zip(*results, strict=True)
    return list(out), list(steps), list(remainders)


def _stop(h: Any, epsilon: float, comparison: str) -> int | None:
    """The first n at which h_1 + … + h_n reaches (or, "above", passes) 1 - epsilon; None if there is none."""
    total = 0.0
    for n, a in enumerate(h, 1):
        total += a
        if total > 1 - epsilon if comparison == "above" else total >= 1 - epsilon:
            return n
    return None


def _halting(row: Any, halt: Any) -> float:
    (y,) = loops.affine(row, halt["w"], halt.get("b"))
    return 1 / (1 + math.exp(-y)) if y > 0 else math.exp(y) / (1 + math.exp(y))


def _sinusoid(number: int, row: Any) -> list[float]:
    return list(loops.sinusoidal_positions(1, len(row), offset=number)[0])


def _plus(row: Any, other: Any) -> list[float]:
    return [a + b for a, b in zip(row, other, strict=True)]
