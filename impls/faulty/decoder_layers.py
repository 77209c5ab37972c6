"""Wrong decoder layers: one correct implementation with one switch for each mistake.

The variant "correct" has every switch off, and "alibi_signed" is as right: a causal query has no key ahead of it.
Each other variant differs from them by the mistake that its Fault names and by nothing else; a mistake that needs a
situation (pre-norm, a mask, memory of the shape of x) is right outside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veriformer.declarations import Capabilities, Fault

FRAMEWORK = "numpy"
Params = Mapping[str, Any]
Window = tuple[int | None, int | None]
Sublayer = Callable[[NDArray, NDArray], NDArray]


@dataclass(frozen=True)
class _How:
    """The keywords of a call, and the mistake that it makes."""

    fault: str
    heads: int
    norm: str
    alpha: float
    mask: NDArray | None
    memory_mask: NDArray | None
    window: Window | None
    positions: str | None


def _make(fault: str) -> Callable[..., NDArray]:
    def decoder_layer(
        x: NDArray, memory: NDArray, params: Params, *, heads: int, norm: str = "post", alpha: float = 1.0,
        mask: NDArray | None = None, memory_mask: NDArray | None = None, window: Window | None = None,
        positions: str | None = None,
    ) -> NDArray:  # fmt: skip
        how = _How(fault, heads, norm, alpha, mask, memory_mask, window, positions)
        with np.errstate(all="ignore"):
            return _layer(_wide(x), _wide(memory), _widened(params), how).astype(x.dtype)

    decoder_layer.__qualname__ = f"decoder_layer[{fault}]"
    return decoder_layer


def _layer(x: NDArray, memory: NDArray, w: Params, how: _How) -> NDArray:
    """The three sublayers in order, each with its norm."""
    sublayers: dict[str, Sublayer] = {
        "self": lambda seen, raw: _to_itself(seen, w["attention"], how),
        "cross": lambda seen, raw: _to_memory(seen, raw, memory, w, how),
        "feed_forward": lambda seen, raw: _feed_forward(seen, w["feed_forward"]),
    }
    order = {
        "cross_before_self": ("cross", "self", "feed_forward"),
        "feed_forward_before_cross": ("self", "feed_forward", "cross"),
    }.get(how.fault, tuple(sublayers))
    norms = ["norm1", "norm2", "norm3"]
    if how.fault == "first_norm_again":
        norms[1] = "norm1"
    if how.fault == "last_norms_swapped":
        norms = ["norm1", "norm3", "norm2"]
    first, total = x, x
    for name, norm in zip(order, norms, strict=True):
        if (how.fault, name) != ("cross_skipped", "cross"):
            kept = {"residual_before_the_norm": total, "residual_of_the_input": first}.get(how.fault, x)
            x, total = _beside(x, kept, sublayers[name], w[norm], how, name)
    return x


def _beside(
    x: NDArray, kept: NDArray, sublayer: Sublayer, norm: Params, how: _How, name: str
) -> tuple[NDArray, NDArray]:
    """x after one sublayer, and the residual sum before any norm; kept is what goes past the sublayer."""
    kept = np.zeros_like(x) if how.fault == f"{name}_residual_missing" else kept
    if how.norm == "pre":
        total = kept + sublayer(_normed(x, norm), x)
        return total, total
    alpha = 1.0 if (how.fault, name) == ("alpha_not_in_cross", "cross") else how.alpha
    total = alpha * kept + sublayer(x, x)
    return _normed(total, norm), total


def _normed(x: NDArray, w: Params) -> NDArray:
    if "bias" not in w:
        return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + 1e-6) * w["weight"]
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt(np.square(centred).mean(-1, keepdims=True) + 1e-5) * w["weight"] + w["bias"]


def _feed_forward(x: NDArray, w: Params) -> NDArray:
    return np.maximum(x @ w["w1"] + w.get("b1", 0), 0) @ w["w2"] + w.get("b2", 0)


def _to_itself(seen: NDArray, w: Params, how: _How) -> NDArray:
    """Self-attention, causal, by positions."""
    q, k, v = _projected(seen, seen, seen, w, how.heads)
    if how.positions == "rotary":
        q, k = _turned(q), _turned(k)
    ahead = np.arange(seen.shape[1]) - np.arange(seen.shape[1])[:, None]
    visible, other = np.broadcast_to(_sight(how, ahead), (*q.shape[:3], seen.shape[1])), how.memory_mask
    if how.mask is not None and how.fault not in ("mask_ignored", "memory_mask_for_the_mask"):
        visible = visible & (~how.mask if how.fault == "mask_inverted" else how.mask)
    if how.fault in ("memory_mask_on_self", "memory_mask_for_the_mask") and other is not None:
        visible = visible & other if other.shape[3] in (1, seen.shape[1]) else visible
    bias = _alibi(how, ahead) if how.positions == "alibi" else np.zeros(1)
    return _attended(q, k, v, visible, bias, w)


def _sight(how: _How, ahead: NDArray) -> NDArray:
    """[T,T]: may query i see key j by their places alone."""
    fault = how.fault
    dropped = {
        "not_causal": True,
        "causal_dropped_with_mask": how.mask is not None,
        "causal_dropped_with_window": how.window is not None,
        "causal_dropped_with_memory_mask": how.memory_mask is not None,
    }.get(fault, False)
    limit = {"causal_strict": -1, "causal_plus_one": 1}.get(fault, 0)
    visible = np.ones_like(ahead, dtype=bool) if dropped else ahead <= limit
    return visible if how.window is None else visible & _within(how.window, ahead)


def _within(window: Window, ahead: NDArray) -> NDArray:
    left, right = window
    visible = np.ones_like(ahead, dtype=bool) if left is None else ahead >= -left
    return visible if right is None else visible & (ahead <= right)


def _to_memory(seen: NDArray, raw: NDArray, memory: NDArray, w: Params, how: _How) -> NDArray:
    """Cross-attention, which knows no positions; raw is what the norm of a pre-norm layer was given."""
    fault, norm = how.fault, w["norm2"]
    own = w["attention"] if fault == "cross_with_the_weights_of_self" else w["cross_attention"]
    if fault == "memory_of_the_first_sample":
        memory = np.broadcast_to(memory[:1], memory.shape)
    if fault == "memory_normed" and how.norm == "pre":
        memory = _normed(memory, norm)
    keys = _normed(memory, norm) if fault == "keys_of_memory_normed" else memory
    keys, values = (
        seen if (fault, seen.shape) == (f"cross_{name}_of_x", memory.shape) else rows
        for name, rows in (("keys", keys), ("values", memory))
    )
    q, k, v = _projected(raw if fault == "cross_queries_not_normed" else seen, keys, values, own, how.heads)
    if fault == "cross_rotated" and how.positions == "rotary":
        q, k = _turned(q), _turned(k)
    ahead = np.arange(k.shape[2]) - np.arange(q.shape[2])[:, None]
    bias = _alibi(how, ahead) if (fault, how.positions) == ("cross_with_alibi", "alibi") else np.zeros(1)
    visible = _seen_of_memory(how, ahead, (*q.shape[:3], k.shape[2]))
    return _attended(q, k, v, visible, bias, own, leaks=fault == "nan_of_memory_leaks")


def _seen_of_memory(how: _How, ahead: NDArray, shape: tuple[int, ...]) -> NDArray:
    """[B,H,T,S]: which rows of memory a token sees."""
    fault, mask, visible = how.fault, how.memory_mask, np.ones(shape, bool)
    if fault == "mask_for_the_memory_mask" and how.mask is not None and how.mask.shape[3] in (1, shape[3]):
        mask = how.mask
    if fault == "cross_causal":
        visible = visible & (ahead <= max(0, shape[3] - shape[2]))
    if fault == "cross_with_window" and how.window is not None:
        visible = visible & _within(how.window, ahead)
    if fault == "memory_cut_to_the_queries":
        visible = visible & (np.arange(shape[3]) < shape[2])
    if fault == "last_of_memory_dropped" and shape[3] > 1:
        visible = visible & (np.arange(shape[3]) < shape[3] - 1)
    if mask is None or fault == "memory_mask_ignored":
        return visible
    changed = {
        "memory_mask_inverted": ~mask,
        "memory_mask_of_the_first_query": mask[:, :, :1],
        "memory_mask_of_the_first_head": mask[:, :1],
        "memory_mask_of_the_first_sample": mask[:1],
    }
    return visible & changed.get(fault, mask)


def _projected(
    query: NDArray, keys: NDArray, values: NDArray, w: Params, heads: int
) -> tuple[NDArray, NDArray, NDArray]:
    """q[B,H,T,D], and k[B,H,S,D], v[B,H,S,Dv] repeated for each query head."""
    groups = w["wk"].shape[1] * heads // w["wq"].shape[1]
    rows = {"q": (query, heads), "k": (keys, groups), "v": (values, groups)}
    found = []
    for name, (each, count) in rows.items():
        y = each @ w["w" + name] + w.get("b" + name, 0)
        y = y.reshape(*y.shape[:2], count, -1).swapaxes(1, 2)
        found.append(np.repeat(y, heads // count, 1))
    return found[0], found[1], found[2]


def _attended(
    q: NDArray, k: NDArray, v: NDArray, visible: NDArray, bias: NDArray, w: Params, *, leaks: bool = False
) -> NDArray:  # fmt: skip
    """softmax(q kᵀ D^-½ + bias) v over what is visible, joined, times wo, plus bo."""
    s = np.where(visible, q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5 + bias.astype(q.dtype), -np.inf)
    m = s.max(-1, keepdims=True)
    e = np.exp(s - np.where(np.isneginf(m), 0, m))
    total = e.sum(-1, keepdims=True)
    p = e / np.where(total == 0, 1, total)
    mixed = (p[..., None] * np.where(visible[..., None] | leaks, v[:, :, None], 0)).sum(-2)
    return mixed.swapaxes(1, 2).reshape(q.shape[0], q.shape[2], -1) @ w["wo"] + w.get("bo", 0)


def _alibi(how: _How, ahead: NDArray) -> NDArray:
    power = 2 ** (how.heads.bit_length() - 1)
    exponents = [*range(2, 2 * power + 1, 2), *range(1, 2 * (how.heads - power), 2)]
    distance = ahead if how.fault == "alibi_signed" else -np.abs(ahead)
    return 2.0 ** (-4 * np.array(exponents) / power)[:, None, None] * distance


def _turned(x: NDArray) -> NDArray:
    """[…,T,D] by its positions; channels j and j + D/2 are a pair."""
    half = x.shape[-1] // 2
    angle = np.arange(x.shape[-2])[:, None] * 1e4 ** (-np.arange(half) / max(half, 1))
    cos, sin = np.cos(angle).astype(x.dtype), np.sin(angle).astype(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


def _widened(params: Any) -> Any:
    if isinstance(params, Mapping):
        return {name: _widened(part) for name, part in params.items()}
    return _wide(params)


def _wide(x: NDArray) -> NDArray:
    return x if x.dtype == np.float64 else x.astype(np.float32)


# law that must accuse: {variant: (where it was seen, what is wrong)}
_TABLE: dict[str, dict[str, tuple[str, str]]] = {
    "silent-sublayers-leave-the-norms": {
        "residual_before_the_norm": ("NeMo#4350", "post-norm: residuals are taken before the norm"),
        "residual_of_the_input": ("mutation: one residual variable", "every residual is the layer's input"),
        "alpha_not_in_cross": ("mutation: two sums of three", "alpha is forgotten beside cross-attention"),
    },
    "silent-sublayers-leave-the-input": {
        "self_residual_missing": ("mutation: x = F(x)", "nothing goes past self-attention"),
        "cross_residual_missing": ("mutation: x = F(x)", "nothing goes past cross-attention"),
        "feed_forward_residual_missing": ("mutation: x = F(x)", "nothing goes past the feed-forward sublayer"),
    },
    "last-norm-scales-the-output": {
        "last_norms_swapped": ("mutation: norms of another order", "norm3 for cross-attention, norm2 at the end"),
    },
    "a-shift-passes-through": {
        "cross_queries_not_normed": ("mutation: x for norm2(x)", "pre-norm: cross-attention sees x itself"),
    },
    "every-weight-counts": {
        "cross_skipped": ("x-transformers#219", "memory is not attended at all"),
        "cross_with_the_weights_of_self": ("mutation: one attention for both", "cross-attention by the other weights"),
        "first_norm_again": ("mlx#1636", "norm1 where norm2 belongs"),
    },
    "a-sublayer-alone-adds-its-result": {
        "memory_normed": ("mutation: norm of all inputs", "pre-norm: memory is normed"),
        "keys_of_memory_normed": ("marian#699", "keys are made of normed memory"),
        "causal_strict": ("mutation: j < i for j <= i", "a token does not see itself"),
    },
    "last-sublayer-takes-both-signs": {
        "feed_forward_before_cross": ("mutation: order of the sublayers", "cross-attention comes last"),
    },
    "future-has-no-influence": {
        "not_causal": ("xformers#103", "later tokens are seen"),
        "causal_plus_one": ("mutation: the other off-by-one", "one later token is seen"),
        "causal_dropped_with_mask": ("keras#23038", "a mask switches causal off"),
        "causal_dropped_with_memory_mask": ("transformers#30652", "a memory_mask switches causal off"),
    },
    "prefix-is-enough": {
        "causal_dropped_with_window": ("mutation: the window in place of the triangle", "a window switches causal off"),
    },
    "hidden-tokens-have-no-influence": {
        "memory_mask_for_the_mask": ("mutation: masks exchanged", "self-attention goes by memory_mask"),
        "mask_ignored": ("mutation: a mask not passed on", "mask has no effect"),
        "mask_inverted": ("torch_brain#74", "True hides"),
    },
    "hidden-memory-has-no-influence": {
        "cross_before_self": ("mutation: order of the sublayers", "memory is attended before the tokens themselves"),
        "memory_mask_ignored": ("mutation: a mask not passed on", "memory_mask has no effect"),
        "memory_mask_inverted": ("torch_brain#74", "True hides"),
        "memory_mask_of_the_first_query": ("hyunwoongko/transformer#40", "every token has token 0's memory_mask"),
    },
    "seen-memory-has-influence": {
        "memory_mask_of_the_first_head": ("mutation: a per-head mask read once", "every head has head 0's"),
    },
    "order-of-memory-does-not-matter": {
        "cross_rotated": ("x-transformers#311", "rotary acts in cross-attention, too"),
        "cross_with_alibi": ("mutation: one bias for both", "ALiBi acts in cross-attention, too"),
        "cross_with_window": ("mutation: one window for both", "the window limits cross-attention, too"),
        "memory_cut_to_the_queries": ("mutation: one length for both", "memory beyond the length of x is not seen"),
    },
    "memory-twice-is-memory-once": {
        "cross_causal": ("mutation: one mask for both", "token i sees memory up to row i"),
        "last_of_memory_dropped": ("mutation: an end that is exclusive", "nobody sees the last row of memory"),
    },
    "padding-of-memory-changes-nothing": {
        "cross_keys_of_x": ("mutation: attention(x, x, memory)", "keys are made of x, values of memory"),
        "cross_values_of_x": ("mutation: attention(x, memory, x)", "values are made of x, keys of memory"),
        "memory_mask_on_self": ("mutation: one mask for both", "memory_mask limits self-attention, too"),
        "mask_for_the_memory_mask": ("mutation: masks exchanged", "cross-attention goes by mask where it fits"),
    },
    "nan-of-memory-stays-hidden": {
        "nan_of_memory_leaks": ("pytorch#101967", "a hidden NaN of memory is multiplied by 0, which is NaN"),
    },
    "batch-rows-are-independent": {
        "memory_of_the_first_sample": ("mutation: the batch forgotten", "batch row 0's memory for all"),
        "memory_mask_of_the_first_sample": ("line/lighthouse#77", "every sample has sample 0's memory_mask"),
    },
}
FAULTS = {
    variant: Fault("decoder_layer", f"decoder_layer/{law}", source, summary)
    for law, variants in _TABLE.items()
    for variant, (source, summary) in variants.items()
}
VARIANTS: dict[str, dict[str, Callable[..., Any]]] = {
    variant: {"decoder_layer": _make(variant)} for variant in ("correct", "alibi_signed", *FAULTS)
}
CAPABILITIES = {"decoder_layer": Capabilities(nan_contained=True, rounds_probabilities=False)}
