"""Wrong ends of encoder-decoders: tables of tokens, their scale, sinusoids and the head.

One correct implementation with one switch for each mistake. The variant "correct" has every switch off; each other
variant differs from it by the mistake that its Fault names and by nothing else. A mistake that needs a situation
(tables of the same size, as many tokens as channels) is right outside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veriformer.declarations import Capabilities, Fault

FRAMEWORK = "numpy"
Params = Mapping[str, Any]


def _make(fault: str) -> Callable[..., NDArray]:
    def transformer(
        source: NDArray, target: NDArray, params: Params, *, heads: int, norm: str = "post", mask: NDArray | None = None
    ) -> NDArray:
        w, dtype = _widened(params), params["target_embedding"].dtype
        real = np.ones(source.shape, bool) if mask is None else mask
        if fault == "zero_is_padding":
            kept = real & (source != 0)
            real = np.where(kept.any(1, keepdims=True), kept, real)
        seen = real[:, None, None, :]
        x, y = _embedded(source, w, "source", fault), _embedded(target, w, "target", fault)
        for layer in w["encoder"]["layers"]:
            x = _layer(x, layer, heads, norm, seen)
        memory, triangle = _final(x, w["encoder"], fault), np.tri(target.shape[1], dtype=bool)
        for layer in w["decoder"]["layers"]:
            y = _layer(y, layer, heads, norm, triangle, memory, seen)
        return _logits(_final(y, w["decoder"], fault), w, fault).astype(dtype)

    transformer.__qualname__ = f"transformer[{fault}]"
    return transformer


def _embedded(ids: NDArray, w: Params, side: str, fault: str) -> NDArray:
    """[B,T] -> [B,T,d]: rows of the table, times the scale, plus sinusoids."""
    table = w[f"{side}_embedding"]
    if fault == "source_from_the_target_table" and ids.max() < len(w["target_embedding"]):
        table = w["target_embedding"]
    scale = _scale(w, side, table.shape[1], fault)
    x = table[ids] * scale
    if fault == "target_row_zero_is_padding" and side == "target":
        x = x * (ids != 0)[..., None]
    if fault == "target_without_positions" and side == "target":
        return x.astype(table.dtype)
    signal = _sinusoids(ids.shape[1], x.shape[2], fault)
    return (x + signal * (scale if fault == "scale_of_the_sinusoids_too" else 1)).astype(table.dtype)


def _scale(w: Params, side: str, width: int, fault: str) -> Any:
    scale = w.get("embedding_scale", 1.0)
    return {
        "scale_forgotten": 1.0,
        "scale_of_the_source_alone": scale if side == "source" else 1.0,
        "scale_of_the_target_alone": scale if side == "target" else 1.0,
        "scale_twice": scale * scale,
        "scale_of_the_width_always": width**0.5,
    }.get(fault, scale)


def _sinusoids(length: int, width: int, fault: str) -> NDArray:
    """What is added at each position, [T,d]."""
    channel, half = np.arange(width), -(-width // 2)
    pair, cosine = channel // 2, channel % 2 == 1
    if fault == "sines_then_cosines":
        pair, cosine = channel % half, channel >= half
    if fault == "odd_width_ends_in_a_cosine" and width % 2:
        cosine = cosine | (channel == width - 1)
    exponent = 2 * pair / width
    if fault == "wavelengths_squared":
        exponent = 2 * exponent
    if fault == "exponent_floored":
        exponent = 2 * pair // width
    if fault == "divisor_without_the_first_pair" and width > 3:
        exponent = pair / (width // 2 - 1)
    position = np.arange(length) + (fault == "positions_from_one")
    angle = position[:, None] * 10000.0**-exponent
    return np.where(cosine, np.cos(angle), np.sin(angle))


def _layer(
    x: NDArray, w: Params, heads: int, norm: str, seen: NDArray, memory: NDArray | None = None,
    memory_seen: NDArray | None = None,
) -> NDArray:  # fmt: skip
    def beside(x: NDArray, name: str, sublayer: Callable[[NDArray], NDArray]) -> NDArray:
        return x + sublayer(_normed(x, w[name])) if norm == "pre" else _normed(x + sublayer(x), w[name])

    x = beside(x, "norm1", lambda z: _attention(z, z, w["attention"], heads, seen))
    if memory is None:
        return beside(x, "norm2", lambda z: _feed_forward(z, w["feed_forward"]))
    x = beside(x, "norm2", lambda z: _attention(z, memory, w["cross_attention"], heads, memory_seen))
    return beside(x, "norm3", lambda z: _feed_forward(z, w["feed_forward"]))


def _attention(x: NDArray, memory: NDArray, w: Params, heads: int, seen: NDArray | None) -> NDArray:
    width = w["wq"].shape[1] // heads
    groups = w["wk"].shape[1] // width
    q = (x @ w["wq"] + w.get("bq", 0)).reshape(*x.shape[:2], groups, heads // groups, width)
    k, v = ((memory @ w["w" + n] + w.get("b" + n, 0)).reshape(*memory.shape[:2], groups, -1) for n in "kv")
    scores = np.einsum("btgrd,bsgd->bgrts", q, k) * width**-0.5
    scores = np.where(np.broadcast_to(seen, (len(x), 1, *scores.shape[3:]))[:, :, None], scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isneginf(top), 0, top))
    total = weights.sum(-1, keepdims=True)
    mixed = np.einsum("bgrts,bsgd->btgrd", weights / np.where(total == 0, 1, total), v)
    return mixed.reshape(*x.shape[:2], -1) @ w["wo"] + w.get("bo", 0)


def _feed_forward(x: NDArray, w: Params) -> NDArray:
    return np.maximum(x @ w["w1"] + w.get("b1", 0), 0) @ w["w2"] + w.get("b2", 0)


def _normed(x: NDArray, w: Params) -> NDArray:
    if "bias" not in w:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * w["weight"]
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * w["weight"] + w["bias"]


def _final(x: NDArray, w: Params, fault: str) -> NDArray:
    """The final norm of a stack, where there is one."""
    if "norm" in w:
        return _normed(x, w["norm"])
    ones = np.ones_like(x[0, 0])
    return _normed(x, {"weight": ones, "bias": 0 * ones}) if fault == "final_norm_never_absent" else x


def _logits(y: NDArray, w: Params, fault: str) -> NDArray:
    """The head, or without one the target's table transposed."""
    head = {"w": _tied(w, fault).T} if "head" not in w or fault == "head_ignored" else w["head"]
    found = y @ head["w"] + (0 if fault == "head_bias_forgotten" else head.get("b", 0))
    if fault == "log_probabilities_for_logits":
        top = found.max(-1, keepdims=True)
        return found - top - np.log(np.exp(found - top).sum(-1, keepdims=True))
    if fault == "first_logit_is_minus_infinity":
        found[..., 0] = -np.inf
    return found / y.shape[-1] ** 0.5 if fault == "logits_over_the_root_of_the_width" else found


def _tied(w: Params, fault: str) -> NDArray:
    """The table whose transpose is the head."""
    source, table = w["source_embedding"], w["target_embedding"]
    if fault == "tied_head_not_transposed" and table.shape[0] == table.shape[1]:
        return table.T
    if fault == "tied_head_of_the_source" and source.shape == table.shape:
        return source
    return table * w.get("embedding_scale", 1.0) if fault == "scale_of_the_tied_head_too" else table


def _widened(params: Any) -> Any:
    if isinstance(params, Mapping):
        return {name: _widened(part) for name, part in params.items()}
    if isinstance(params, (list, tuple)):
        return [_widened(part) for part in params]
    return params if params.dtype == np.float64 else params.astype(np.float32)


# law that must accuse: {variant: (where it was seen, what is wrong)}
_TABLE: dict[str, dict[str, tuple[str, str]]] = {
    "silent-layers-leave-the-embedded-target": {
        "target_without_positions": ("mutation: positions for the encoder alone", "the target has no sinusoids"),
        "positions_from_one": ("fairseq", "sinusoids begin at position 1"),
        "sines_then_cosines": ("allennlp#2993", "sines and cosines in halves"),
        "wavelengths_squared": ("PapersReimplementations#9", "the exponent is doubled"),
        "exponent_floored": ("LoFTR#41", "the exponent is a whole number"),
        "divisor_without_the_first_pair": ("tensor2tensor", "the exponent is i / (width / 2 - 1)"),
        "odd_width_ends_in_a_cosine": ("pyaptamer#527", "the last channel of an odd width is a cosine"),
        "scale_of_the_width_always": ("transformers#29402", "embeddings times the root of the width, unasked"),
        "final_norm_never_absent": ("pytorch#50086", "a norm of ones behind stacks that have none"),
        "logits_over_the_root_of_the_width": ("T5", "logits divided by the root of the width"),
    },
    "source-tokens-are-only-names": {
        "zero_is_padding": ("mutation: padding by number", "token 0 is hidden, whatever the mask says"),
    },
    "target-tokens-are-only-names": {
        "target_row_zero_is_padding": ("fairseq#4076", "target token 0 has no embedding"),
        "first_logit_is_minus_infinity": ("mutation: padding is never generated", "token 0 cannot follow"),
    },
    "unnamed-rows-have-no-influence": {
        "source_from_the_target_table": ("transformers#48154", "source tokens pick rows of the target's table"),
    },
    "embedding-scale-multiplies-both-tables": {
        "scale_forgotten": ("mutation: scale not passed on", "embedding_scale has no effect"),
        "scale_of_the_source_alone": ("mutation: one embedding scaled", "the target is not scaled"),
        "scale_of_the_target_alone": ("mutation: one embedding scaled", "the source is not scaled"),
        "scale_twice": ("mutation: scaled table, scaled again", "the square of the scale"),
        "scale_of_the_sinusoids_too": ("mutation: (x + positions) scale", "sinusoids are scaled as well"),
    },
    "tied-head-is-the-transposed-table": {
        "tied_head_not_transposed": ("mutation: [out, in] read as [in, out]", "a square tied head is not transposed"),
        "tied_head_of_the_source": ("transformers#43681", "the source's table, if it fits, is the head"),
        "scale_of_the_tied_head_too": ("transformers#43681", "the tied head is scaled"),
    },
    "head-is-applied-last": {
        "head_bias_forgotten": ("mutation: a head without bias", "head.b is lost"),
        "log_probabilities_for_logits": ("mutation: log_softmax left on", "log-probabilities are returned"),
        "head_ignored": ("mutation: tied whatever is given", "the table is the head although there is one"),
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
