"""Wrong encoder-decoders: one correct implementation with one switch for each mistake.

The variant "correct" has every switch off. Each other variant differs from it by the mistake that its Fault
names and by nothing else; a mistake that needs a situation (as many source as target tokens, two layers) is right
outside it. What is wrong at the ends of the model stands in `transformer_tokens`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veriformer.declarations import Capabilities, Fault

FRAMEWORK = "numpy"
Params = Mapping[str, Any]


@dataclass(frozen=True)
class _How:
    """The keywords of one stack, and the mistake."""

    heads: int
    norm: str
    alpha: float
    positions: str | None
    fault: str
    mask: NDArray | None = None


def _make(fault: str) -> Callable[..., NDArray]:
    def transformer(
        source: NDArray, target: NDArray, params: Params, *, heads: int, norm: str = "post", alpha: Any = 1.0,
        mask: NDArray | None = None, positions: str | None = "sinusoidal",
    ) -> NDArray:  # fmt: skip
        w, dtype = _widened(params), params["target_embedding"].dtype
        if norm not in ("post", "pre") or positions not in (None, "sinusoidal", "rotary", "alibi"):
            raise ValueError(f"norm={norm!r}, positions={positions!r}: wanted post or pre, sinusoidal, rotary, alibi")
        first, second = _alphas(alpha, fault)
        how = _How(heads, norm, first, positions, fault)
        mask = _source_mask(mask, fault)
        if fault == "target_shifted_again":
            target = np.concatenate([target[:, :1], target[:, :-1]], 1)
        memories = _encoded(source, mask, w, replace(how, mask=mask))
        y = _decoded(target, source, memories, mask, w, replace(how, alpha=second))
        return _logits(y, w).astype(dtype)

    transformer.__qualname__ = f"transformer[{fault}]"
    return transformer


def _alphas(alpha: Any, fault: str) -> tuple[float, float]:
    pair = isinstance(alpha, (tuple, list))
    first, second = alpha if pair else (alpha, alpha)
    if fault == "alpha_of_the_encoder_for_both":
        return first, first
    if fault == "alpha_pair_swapped":
        return second, first
    if fault == "one_alpha_for_the_encoder_alone" and not pair:
        return first, 1.0
    return first, second


def _source_mask(mask: NDArray | None, fault: str) -> NDArray | None:
    """Which source tokens are real, [B,S]."""
    if mask is None:
        return None
    if fault == "mask_inverted":
        return ~mask
    if fault == "mask_of_the_first_row":
        return np.broadcast_to(mask[:1], mask.shape)
    return mask


def _encoded(source: NDArray, mask: NDArray | None, w: Params, how: _How) -> list[NDArray]:
    """The output of every encoder layer, the last one after the final norm; before them the input."""
    fault, x = how.fault, _embedded(source, w, "source_embedding", how, mask)
    seen = None if mask is None else mask[:, None, None, :]
    if fault == "encoder_mask_ignored":
        seen = None
    if fault == "mask_of_queries" and seen is not None:
        seen = seen.swapaxes(2, 3)
    if fault == "padding_zeroed_not_hidden":
        seen = None
    if fault == "encoder_causal":
        triangle = np.tri(x.shape[1], dtype=bool)[None, None]
        seen = triangle if seen is None else seen & triangle
    found = [x]
    for layer in w["encoder"]["layers"]:
        x = _layer(x, layer, how, seen)
        if fault == "padding_zeroed_not_hidden" and mask is not None:
            x = x * mask[..., None]
        found.append(x)
    found[-1] = _final(x, w["encoder"], "encoder", how)
    return found


def _decoded(
    target: NDArray, source: NDArray, memories: list[NDArray], mask: NDArray | None, w: Params, how: _How
) -> NDArray:
    fault, length = how.fault, target.shape[1]
    y = _embedded(target, w, "target_embedding", how, None)
    seen: NDArray = np.tri(length, k=int(fault == "target_sees_one_ahead"), dtype=bool)[None, None]
    if fault == "target_sees_the_future":
        seen = np.ones_like(seen)
    if fault == "target_sees_itself_alone":
        seen = np.eye(length, dtype=bool)[None, None]
    if fault == "target_masked_like_the_source" and mask is not None and mask.shape[1] >= length:
        seen = seen & mask[:, None, None, :length]
    for i, layer in enumerate(w["decoder"]["layers"]):
        y = _layer(y, layer, how, seen, _memory(memories, i, fault), _memory_seen(mask, y, source, fault), i)
    return _final(y, w["decoder"], "decoder", how)


def _memory(memories: list[NDArray], layer: int, fault: str) -> NDArray:
    """What a decoder layer looks at."""
    if fault == "decoder_sees_the_encoders_input":
        return memories[0]
    if fault == "decoder_layer_sees_its_encoder_layer":
        return memories[min(layer + 1, len(memories) - 1)]
    if fault == "memory_of_the_next_row":
        return np.roll(memories[-1], 1, 0)
    return memories[-1]


def _memory_seen(mask: NDArray | None, y: NDArray, source: NDArray, fault: str) -> NDArray:
    """Which source tokens each target token sees, [B,1,T,S] or less."""
    length, (batch, size) = y.shape[1], source.shape
    seen: NDArray = np.ones((batch, 1, 1, size), bool) if mask is None else mask[:, None, None, :]
    if fault in ("cross_mask_ignored", "padding_zeroed_not_hidden"):
        return np.ones_like(seen)
    if fault == "cross_mask_of_the_next_row":
        return np.roll(seen, 1, 0)
    if fault == "cross_sees_the_first_token_alone":
        return seen & (np.cumsum(seen, -1) == 1)
    if fault == "cross_causal":
        ahead = np.arange(size) - np.arange(length)[:, None]
        return seen & (ahead <= max(size - length, 0))
    if fault == "cut_to_the_first_row":
        real = np.flatnonzero(seen[0, 0, 0])
        return seen & (np.arange(size) <= real[-1])
    return seen


def _layer(
    x: NDArray, w: Params, how: _How, seen: NDArray | None, memory: NDArray | None = None,
    memory_seen: NDArray | None = None, place: int = 0,
) -> NDArray:  # fmt: skip
    """One layer; without memory it has no cross-attention."""
    x = _beside(x, w["norm1"], how, lambda z: _attention(z, z, w["attention"], how, seen, own=True, to=memory))
    if memory is not None and not (how.fault == "memory_for_the_first_layer_alone" and place):
        if how.fault == "memory_normed_again" and how.norm == "pre":
            memory = _normed(memory, w["norm2"])
        if how.fault == "memory_forgotten_at_equal_lengths" and memory.shape == x.shape:
            memory = x
        x = _beside(x, w["norm2"], how, lambda z: _attention(z, memory, w["cross_attention"], how, memory_seen))
    last = w["norm2"] if "norm3" not in w else w["norm3"]
    return _beside(x, last, how, lambda z: _feed_forward(z, w["feed_forward"]))


def _beside(x: NDArray, norm: Params, how: _How, sublayer: Callable[[NDArray], NDArray]) -> NDArray:
    if how.norm == "pre":
        alpha = how.alpha if how.fault == "alpha_in_pre_norm_too" else 1.0
        return alpha * x + sublayer(_normed(x, norm))
    return _normed(how.alpha * x + sublayer(x), norm)


def _attention(
    x: NDArray, memory: NDArray, w: Params, how: _How, seen: NDArray | None, own: bool = False,
    to: NDArray | None = None,
) -> NDArray:  # fmt: skip
    """own: self-attention, which positions act in; to: the decoder's."""
    q = _split(x @ w["wq"] + w.get("bq", 0), how.heads)
    groups = w["wk"].shape[1] // q.shape[-1]
    k, v = (_split(memory @ w["w" + name] + w.get("b" + name, 0), groups) for name in "kv")
    if own and how.positions == "rotary" and how.fault != "rotary_forgotten":
        q, k = _turned(q), _turned(k)
    of = np.arange(how.heads) // (how.heads // groups)
    s = q @ k[:, of].swapaxes(-1, -2) * q.shape[-1] ** -0.5
    if how.fault == "scores_grow_with_length" and not own:
        s = s * np.log(max(s.shape[-1], 2))
    if own and how.positions == "alibi":
        ahead = np.arange(s.shape[-1]) - np.arange(s.shape[-2])[:, None]
        signed = how.fault == "alibi_signed_in_the_encoder" and to is None
        s = s + (_slopes(how.heads)[:, None, None] * (ahead if signed else -np.abs(ahead))).astype(s.dtype)
    if seen is not None:
        s = np.where(seen, s, -np.inf)
    top = s.max(-1, keepdims=True)
    e = np.exp(s - np.where(np.isneginf(top), 0, top))
    total = e.sum(-1, keepdims=True)
    out = (e / np.where(total == 0, 1, total)) @ v[:, of]
    return out.swapaxes(1, 2).reshape(*x.shape[:2], -1) @ w["wo"] + w.get("bo", 0)


def _split(rows: NDArray, heads: int) -> NDArray:
    """[B,T,H*D] -> [B,H,T,D]."""
    if rows.shape[-1] % heads:
        raise ValueError(f"heads: got {heads}, wanted a divisor of {rows.shape[-1]}")
    return rows.reshape(*rows.shape[:2], heads, -1).swapaxes(1, 2)


def _turned(x: NDArray) -> NDArray:
    half = x.shape[-1] // 2
    angle = np.arange(x.shape[-2])[:, None] * 10000.0 ** (-np.arange(half) / max(half, 1))
    cos, sin = np.cos(angle).astype(x.dtype), np.sin(angle).astype(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


def _slopes(heads: int) -> NDArray:
    power = 1 << (heads.bit_length() - 1)
    exponents = np.append(np.arange(2, 2 * power + 1, 2), np.arange(1, 2 * (heads - power), 2))
    return np.exp2(-4.0 * exponents / power)


def _feed_forward(x: NDArray, w: Params) -> NDArray:
    return np.maximum(x @ w["w1"] + w.get("b1", 0), 0) @ w["w2"] + w.get("b2", 0)


def _normed(x: NDArray, w: Params) -> NDArray:
    if "bias" not in w:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * w["weight"]
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred * centred).mean(-1, keepdims=True) + 1e-5) * w["weight"] + w["bias"]


def _final(x: NDArray, w: Params, stack: str, how: _How) -> NDArray:
    """The final norm of a stack, where there is one."""
    if "norm" not in w:
        return x
    if how.fault == f"{stack}_norm_missing":
        return x
    x = _normed(x, w["norm"])
    return _normed(x, w["norm"]) if how.fault == f"{stack}_norm_twice" else x


def _embedded(ids: NDArray, w: Params, name: str, how: _How, mask: NDArray | None) -> NDArray:
    """[B,T] -> [B,T,d]: rows of the table, times the scale, plus sinusoids."""
    x = w[name][ids] * w.get("embedding_scale", 1.0)
    if how.positions != "sinusoidal" and how.fault != "sinusoids_always":
        return x
    if how.fault == "source_without_positions" and name == "source_embedding":
        return x
    position = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
    if how.fault == "positions_skip_padding" and mask is not None:
        position = np.maximum(np.cumsum(mask, 1) - 1, 0)
    channel = np.arange(x.shape[2])
    angle = position[..., None] * 10000.0 ** (-(channel - channel % 2) / x.shape[2])
    return x + np.where(channel % 2 == 1, np.cos(angle), np.sin(angle)).astype(x.dtype)


def _logits(y: NDArray, w: Params) -> NDArray:
    """The head, or without one the target's table transposed."""
    head = w.get("head", {"w": w["target_embedding"].T})
    return y @ head["w"] + head.get("b", 0)


def _widened(params: Any) -> Any:
    if isinstance(params, Mapping):
        return {name: _widened(part) for name, part in params.items()}
    if isinstance(params, (list, tuple)):
        return [_widened(part) for part in params]
    return params if params.dtype == np.float64 else params.astype(np.float32)


# law that must accuse: {variant: (where it was seen, what is wrong)}
_TABLE: dict[str, dict[str, tuple[str, str]]] = {
    "padding-has-no-influence": {
        "encoder_mask_ignored": ("mutation: the mask kept for the decoder", "the encoder sees padding"),
        "mask_of_queries": ("hyunwoongko/transformer#40", "the mask hides queries, not keys, in the encoder"),
        "cross_mask_ignored": ("mutation: memory without its mask", "the decoder sees padding"),
    },
    "padding-behind-changes-nothing": {
        "padding_zeroed_not_hidden": ("mutation: x * mask for a mask", "padding is 0 and yet weighs something"),
    },
    "all-true-mask-changes-nothing": {"mask_inverted": ("torch_brain#74", "True hides")},
    "batch-rows-are-independent": {
        "mask_of_the_first_row": ("mutation: mask[0]", "all rows have the padding of row 0"),
        "memory_of_the_next_row": ("mutation: batch rows mixed up", "a target looks at the memory of another source"),
        "cross_mask_of_the_next_row": ("line/lighthouse#77", "a target looks by the mask of another source"),
        "cut_to_the_first_row": ("pytorch#97111", "memory ends where the first source ends"),
    },
    "every-logit-sees-every-real-source-token": {
        "cross_causal": ("TransformerEngine#629", "cross-attention is causal"),
        "memory_forgotten_at_equal_lengths": ("mutation: self-attention assumed", "S = T: keys are the target's own"),
    },
    "real-source-tokens-weigh-the-same": {
        "cross_sees_the_first_token_alone": ("mutation: a summary token", "only the first source token is seen"),
        "memory_for_the_first_layer_alone": ("mutation: memory passed once", "later layers have no cross-attention"),
        "positions_skip_padding": ("mutation: cumsum of the mask", "positions count real tokens, not places"),
        "source_without_positions": ("mutation: positions for the decoder alone", "the source has no sinusoids"),
        "alpha_in_pre_norm_too": ("mutation: DeepNorm everywhere", "alpha scales the residual of pre-norm"),
    },
    "order-of-the-source-needs-positions": {
        "encoder_causal": ("mutation: one mask for both stacks", "the encoder is causal"),
        "sinusoids_always": ("mutation: positions=None not passed on", "sinusoids whatever positions is"),
    },
    "repeated-source-changes-nothing": {
        "scores_grow_with_length": ("mutation: logits times log S", "cross-attention sharpens with the source"),
    },
    "alibi-reads-the-source-either-way": {
        "alibi_signed_in_the_encoder": ("mutation: the decoder's bias", "later tokens get a bonus in the encoder"),
    },
    "future-has-no-influence": {
        "target_sees_the_future": ("xformers#103", "the decoder is not causal"),
        "target_sees_one_ahead": ("mutation: off by one", "a target token sees the next one"),
    },
    "target-tokens-up-to-now-weigh-the-same": {
        "target_sees_itself_alone": ("mutation: an identity mask", "earlier target tokens are not seen"),
        "target_masked_like_the_source": ("mutation: one mask for both", "the source's padding hides target tokens"),
    },
    "target-token-moves-its-own-logits": {
        "target_shifted_again": ("transformers#47394", "the model shifts what the caller has shifted"),
    },
    "every-decoder-layer-sees-the-last-encoder-layer": {
        "decoder_sees_the_encoders_input": ("mutation: memory = embedding", "the encoder is not used"),
        "decoder_layer_sees_its_encoder_layer": ("a textbook, E36", "layer l looks at encoder layer l"),
        "memory_normed_again": ("marian#699", "pre-norm: memory is normed like a query"),
    },
    "encoder-norm-comes-before-cross-attention": {
        "encoder_norm_missing": ("mutation: a stack without its final norm", "memory is not normed"),
        "encoder_norm_twice": ("pytorch#50086", "memory is normed twice"),
    },
    "decoder-norm-comes-before-the-head": {
        "decoder_norm_missing": ("a textbook, E42", "the head sees the bare residual stream"),
        "decoder_norm_twice": ("pytorch#50086", "what the head sees is normed twice"),
    },
    "alpha-is-one-number-or-one-for-each-stack": {
        "alpha_of_the_encoder_for_both": ("mutation: alpha[0]", "the decoder has the encoder's alpha"),
        "alpha_pair_swapped": ("mutation: (decoder, encoder)", "each stack has the other's alpha"),
        "one_alpha_for_the_encoder_alone": ("mutation: a number read once", "a number is not the decoder's"),
    },
    "equals-the-reference": {
        "rotary_forgotten": ("mutation: positions not passed to layers", "positions=rotary has no effect"),
    },
}
FAULTS = {
    variant: Fault("transformer", f"transformer/{law}", source, summary)
    for law, variants in _TABLE.items()
    for variant, (source, summary) in variants.items()
}
VARIANTS: dict[str, dict[str, Callable[..., Any]]] = {
    variant: {"transformer": _make(variant)} for variant in ("correct", *FAULTS)
}
CAPABILITIES = {"transformer": Capabilities(rounds_probabilities=False)}
