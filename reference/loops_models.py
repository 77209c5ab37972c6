"""The decoder layer, the models and generation as loops over Python numbers, without a cache.

The continuation of `loops_layers`, to check the reference: one sequence at a time, nested lists in, nested
lists out, and every token's logits from all of the tokens before it once more.
"""

from __future__ import annotations

import math
from typing import Any

from veriformer.reference import loops, loops_layers


def layer(
    x: Any, memory: Any, params: Any, *, heads: int, norm: str, alpha: float = 1.0, mask: Any = None,
    memory_mask: Any = None, causal: bool = False, window: Any = None, positions: Any = None, at: Any = None,
) -> Any:  # fmt: skip
    """An encoder or decoder layer on nested lists x[T][d], memory[S][d] or None; mask[T], memory_mask[S] -> like x."""

    def attending(x: Any) -> Any:
        where = range(len(x)) if at is None else at
        return _self_attention(x, params["attention"], heads, mask, causal, window, positions, where)

    def looking(x: Any) -> Any:
        seen = None if memory_mask is None else [[[memory_mask]]]
        return loops_layers.multi_head_attention([x], [memory], params["cross_attention"], heads=heads, mask=seen)[0]

    def feeding(x: Any) -> Any:
        inner = params["feed_forward"]
        return loops.feed_forward(x, inner["w1"], inner.get("b1"), inner["w2"], inner.get("b2"))

    for number, sublayer in enumerate([attending, feeding] if memory is None else [attending, looking, feeding], 1):
        weights = params[f"norm{number}"]
        if norm == "pre":
            x = _sum(x, 1.0, sublayer(_normed(x, weights)))
        else:
            x = _normed(_sum(x, alpha, sublayer(x)), weights)
    return x


def stack(x: Any, memory: Any, params: Any, **keywords: Any) -> Any:
    """Layers one after the other and the final norm, if any; x[T][d] -> like x."""
    for weights in params["layers"]:
        x = layer(x, memory, weights, **keywords)
    return _normed(x, params["norm"]) if "norm" in params else x


def transformer(
    source: Any, target: Any, params: Any, *, heads: int, norm: str = "post", alpha: Any = (1.0, 1.0),
    mask: Any = None, positions: Any = "sinusoidal",
) -> Any:  # fmt: skip
    """transformer on lists of numbers source[S], target[T], mask[S] -> logits[T][V]."""
    inside = None if positions == "sinusoidal" else positions
    same = {"heads": heads, "norm": norm, "positions": inside}
    x = _embedded(source, params, "source_embedding", positions, range(len(source)))
    memory = stack(x, None, params["encoder"], alpha=alpha[0], mask=mask, **same)
    x = _embedded(target, params, "target_embedding", positions, range(len(target)))
    x = stack(x, memory, params["decoder"], alpha=alpha[1], memory_mask=mask, causal=True, **same)
    return _logits(x, params, "target_embedding")


def decoder_lm(
    tokens: Any, params: Any, *, heads: int, norm: str = "pre", alpha: float = 1.0, mask: Any = None,
    window: Any = None, positions: Any = "rotary", at: Any = None,
) -> Any:  # fmt: skip
    """decoder_lm on a list of numbers tokens[T], mask[T], at[T] -> logits[T][V]."""
    at = range(len(tokens)) if at is None else at
    x = _embedded(tokens, params, "embedding", positions, at)
    x = stack(
        x, None, params, heads=heads, norm=norm, alpha=alpha, mask=mask, causal=True, window=window,
        positions=None if positions == "sinusoidal" else positions, at=at,
    )  # fmt: skip
    return _logits(x, params, "embedding")


def next_token_probabilities(
    logits: Any,
    *,
    temperature: float = 1.0,
    top_k: Any = None,
    top_p: Any = None,
    order: str = "temperature_first",
    exactly_k: bool = False,
) -> Any:
    """next_token_probabilities of one row logits[V] -> p[V]; of equal tokens the first stay."""
    falling = sorted(range(len(logits)), key=lambda i: -float(logits[i]))
    stays = [i for i in falling if top_k is None or float(logits[i]) >= float(logits[falling[: int(top_k)][-1]])]
    stays = stays[: int(top_k)] if exactly_k and top_k is not None else stays
    p = _shares(logits, stays, temperature if order == "temperature_first" else 1.0)
    mass, few = 0.0, []
    for i in stays:
        if few and top_p is not None and mass >= top_p:
            break
        few.append(i)
        mass += p[i]
    return _shares(logits, few, temperature)


def generate(model: Any, prompt: Any, *, max_length: int, end: Any = None) -> list[int]:
    """The greedy continuation of the list prompt[T] by model(tokens) -> logits[T][V], up to the end token."""
    tokens = [int(token) for token in prompt]
    while len(tokens) < max_length and (len(tokens) == len(prompt) or tokens[-1] != end):
        logits = [float(a) for a in model(tokens)[-1]]
        tokens.append(logits.index(max(logits)))
    return tokens


def every_sequence(
    model: Any, prompt: Any, *, max_length: int, end: Any = None, length_penalty: float = 0.0
) -> list[tuple[list[int], float]]:
    """Every continuation of the list prompt[T] with its score, as beam_search has them, best first."""

    def continued(tokens: list[int], total: float) -> Any:
        new = tokens[len(prompt) :]
        if len(tokens) == max_length or (new and new[-1] == end):
            return [(new, total / ((5 + len(new)) / 6) ** length_penalty)]
        gains = loops.log_softmax(model(tokens)[-1])
        return [found for token, gain in enumerate(gains) for found in continued([*tokens, token], total + gain)]

    return sorted(continued([int(token) for token in prompt], 0.0), key=lambda found: -found[1])


def _self_attention(
    x: Any, params: Any, heads: int, mask: Any, causal: bool, window: Any, positions: Any, at: Any
) -> Any:
    """Self-attention of x[T][d], queries and keys turned or logits lowered as positions say -> like x."""
    size = len(params["wq"][0]) // heads
    q, k, v = (
        _heads(x, params, "q", size),
        _heads(x, params, "k", size),
        _heads(x, params, "v", len(params["wo"]) // heads),
    )
    if positions == "rotary":
        q, k = ([loops.rotary_embedding(head, at) for head in part] for part in (q, k))
    bias = [loops.alibi_bias(heads, len(x), len(x), form="distance")] if positions == "alibi" else None
    seen = None if mask is None else [[[mask]]]
    out = loops.attention([q], [k], [v], mask=seen, bias=bias, causal=causal, window=window)[0]
    rows = [[a for head in out for a in head[i]] for i in range(len(x))]
    return [loops.affine(row, params["wo"], params.get("bo")) for row in rows]


def _heads(x: Any, params: Any, which: str, width: int) -> Any:
    """x[T][d] by the matrix and bias of q, k or v, cut into heads of that width: [heads][T][width]."""
    rows = [loops.affine(row, params["w" + which], params.get("b" + which)) for row in x]
    return [[row[start : start + width] for row in rows] for start in range(0, len(rows[0]), width)]


def _embedded(tokens: Any, params: Any, name: str, positions: Any, at: Any) -> Any:
    scale, out = float(params.get("embedding_scale", 1.0)), []
    for token, p in zip(tokens, at, strict=True):
        row = [scale * a for a in loops.embedding(token, params[name])]
        if positions == "sinusoidal":
            row = [a + b for a, b in zip(row, loops.sinusoidal_positions(1, len(row), offset=int(p))[0], strict=True)]
        out.append(row)
    return out


def _logits(x: Any, params: Any, name: str) -> Any:
    if "head" in params:
        return [loops.affine(row, params["head"]["w"], params["head"].get("b")) for row in x]
    return [[math.fsum(a * float(b) for a, b in zip(row, other, strict=True)) for other in params[name]] for row in x]


def _shares(logits: Any, stays: Any, temperature: float) -> list[float]:
    """Softmax over the tokens that stay, 0 for the others."""
    kept = [float(a) if i in stays else -math.inf for i, a in enumerate(logits)]
    return loops.softmax(kept, temperature=temperature)


def _normed(x: Any, weights: Any) -> Any:
    if "bias" in weights:
        return loops.layer_norm(x, weights["weight"], weights["bias"])
    return loops.rms_norm(x, weights["weight"])


def _sum(x: Any, alpha: float, y: Any) -> Any:
    return [[alpha * a + b for a, b in zip(row, other, strict=True)] for row, other in zip(x, y, strict=True)]
