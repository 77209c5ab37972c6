"""Wrong stacks of encoder and of decoder layers: one correct implementation with one switch for each mistake.

The variant "correct" has every switch off. Each other variant differs from it by the mistake that its Fault
names and by nothing else; what concerns later layers is right in a stack of one. The layers themselves are right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veriformer.declarations import Capabilities, Fault

FRAMEWORK = "numpy"
Params = Mapping[str, Any]
Window = tuple[int | None, int | None]


@dataclass(frozen=True)
class _How:
    """The keywords of a call."""

    heads: int
    norm: str
    alpha: float
    mask: NDArray | None
    window: Window | None
    positions: str | None
    causal: bool = False
    memory_mask: NDArray | None = None


def _make_encoder(fault: str) -> Callable[..., NDArray]:
    def encoder(
        x: NDArray, params: Params, *, heads: int, norm: str = "post", alpha: float = 1.0, mask: NDArray | None = None,
        window: Window | None = None, positions: str | None = None,
    ) -> NDArray:  # fmt: skip
        w, how = _widened(params), _How(heads, norm, alpha, mask, window, positions)
        kept = _real(mask, x.shape[1]) if fault == "trailing_padding_cropped" else x.shape[1]
        with np.errstate(all="ignore"):
            z = _stack(_wide(x), None, w, how, fault)[:, :kept]
        if fault == "padded_rows_zeroed" and mask is not None and mask.shape[1:3] == (1, 1):
            z = np.where(mask[:, 0, 0, :, None], z, 0)
        return z.astype(x.dtype)

    encoder.__qualname__ = f"encoder[{fault}]"
    return encoder


def _make_decoder(fault: str) -> Callable[..., NDArray]:
    def decoder(
        x: NDArray, memory: NDArray, params: Params, *, heads: int, norm: str = "post", alpha: float = 1.0,
        mask: NDArray | None = None, memory_mask: NDArray | None = None, window: Window | None = None,
        positions: str | None = None,
    ) -> NDArray:  # fmt: skip
        how = _How(heads, norm, alpha, mask, window, positions, True, memory_mask)
        with np.errstate(all="ignore"):
            z = _stack(_wide(x), _wide(memory), _widened(params), how, fault.removeprefix("decoder_"))
        return z.astype(x.dtype)

    decoder.__qualname__ = f"decoder[{fault}]"
    return decoder


def _real(mask: NDArray | None, length: int) -> int:
    """How many positions there are up to the last that is a real token in any sample."""
    if mask is None or mask.shape[1:] != (1, 1, length):
        return length
    return max((int(place) + 1 for place in np.flatnonzero(mask.any((0, 1, 2)))), default=length)


def _stack(x: NDArray, memory: NDArray | None, w: Params, how: _How, fault: str) -> NDArray:
    """The layers in order, then the final norm where there is one."""
    first, layers = x, _ordered(w["layers"], fault)
    if fault == "memory_normed_by_the_final_norm" and memory is not None and "norm" in w:
        memory = _normed(memory, w["norm"])
    if fault == "alpha_of_the_depth":
        how = replace(how, alpha=(2 * len(layers)) ** 0.25)
    if fault == "final_norm_first" and "norm" in w:
        return _through(_normed(x, w["norm"]), memory, layers, how, fault)
    for place, layer in enumerate(layers):
        x = _through(x, memory, [layer], _of_layer(how, place, fault), fault)
        if fault == "final_norm_in_every_layer" and "norm" in w and place < len(layers) - 1:
            x = _normed(x, w["norm"])
        if fault == "memory_replaced" and memory is not None and memory.shape == x.shape:
            memory = x
        if fault == "memory_in_the_first_layer_alone":
            memory = None
    if fault == "input_added_at_the_end":
        x = x + first
    return _ended(x, w, how, fault)


def _ended(x: NDArray, w: Params, how: _How, fault: str) -> NDArray:
    """x after the final norm where there is one."""
    norm = w.get("norm")
    if fault == "final_norm_added" and norm is None:
        norm = {"weight": np.ones(x.shape[-1], x.dtype), "bias": np.zeros(x.shape[-1], x.dtype)}
    if fault == "final_norm_missing" or (fault == "final_norm_in_pre_norm_alone" and how.norm == "post"):
        norm = None
    if fault == "final_norm_of_the_last_layer" and norm is not None and w["layers"]:
        norm = w["layers"][-1]["norm2"]
    return x if norm is None else _normed(x, norm)


def _ordered(layers: Sequence[Params], fault: str) -> list[Params]:
    """Each layer's weights, in the order in which they act."""
    first, found = layers[0], list(layers)
    shared = {
        "feed_forward_of_the_first_layer": ("feed_forward",),
        "attention_of_the_first_layer": ("attention",),
        "norms_of_the_first_layer": ("norm1", "norm2"),
        "cross_attention_of_the_first_layer": ("cross_attention",),
    }.get(fault)
    if shared is not None:
        return [{**layer, **{name: first[name] for name in shared}} for layer in found]
    if fault == "cross_keys_of_the_first_layer":
        kept = {name: array for name, array in first["cross_attention"].items() if name in ("wk", "wv", "bk", "bv")}
        return [{**layer, "cross_attention": {**layer["cross_attention"], **kept}} for layer in found]
    return {
        "first_layer_for_all": [first] * len(found),
        "layers_reversed": found[::-1],
        "last_layer_skipped": found[:-1] or found,
        "first_layer_skipped": found[1:] or found,
        "one_layer_too_many": [*found, found[-1]],
    }.get(fault, found)


def _of_layer(how: _How, place: int, fault: str) -> _How:
    """The keywords as the layer at this place gets them."""
    if fault == "alpha_grows":
        return replace(how, alpha=how.alpha ** (place + 1))
    word = fault.removesuffix("_in_the_first_layer_alone")
    nothing = getattr(_How(how.heads, "post", 1.0, None, None, None), word, None)
    return replace(how, **{word: nothing}) if place and word != fault and hasattr(how, word) else how


def _through(x: NDArray, memory: NDArray | None, layers: Sequence[Params], how: _How, fault: str) -> NDArray:
    """x after these layers, all with one memory."""
    for w in layers:
        norms = ["norm1", "norm2", "norm3"]
        x = _beside(x, lambda z, w=w: _to_itself(z, w["attention"], how), w[norms.pop(0)], how)
        if "cross_attention" in w:
            norm = w[norms.pop(0)]
            if memory is not None:
                x = _beside(x, lambda z, w=w: _to_memory(z, memory, w["cross_attention"], how), norm, how)
        x = _beside(x, lambda z, w=w: _feed_forward(z, w["feed_forward"]), w[norms.pop(0)], how)
    return x


def _beside(x: NDArray, sublayer: Callable[[NDArray], NDArray], norm: Params, how: _How) -> NDArray:
    if how.norm == "pre":
        return x + sublayer(_normed(x, norm))
    return _normed(how.alpha * x + sublayer(x), norm)


def _normed(x: NDArray, w: Params) -> NDArray:
    if "bias" not in w:
        return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + 1e-6) * w["weight"]
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt(np.square(centred).mean(-1, keepdims=True) + 1e-5) * w["weight"] + w["bias"]


def _feed_forward(x: NDArray, w: Params) -> NDArray:
    return np.maximum(x @ w["w1"] + w.get("b1", 0), 0) @ w["w2"] + w.get("b2", 0)


def _to_itself(x: NDArray, w: Params, how: _How) -> NDArray:
    """Self-attention within triangle, window and mask, by positions."""
    q, k, v = _projected(x, x, w, how.heads)
    ahead = np.arange(x.shape[1]) - np.arange(x.shape[1])[:, None]
    left, right = how.window or (None, None)
    visible = ahead <= 0 if how.causal else np.ones_like(ahead, dtype=bool)
    visible = visible if left is None else visible & (ahead >= -left)
    visible = visible if right is None else visible & (ahead <= right)
    bias = np.zeros(1)
    if how.positions == "rotary":
        q, k = _turned(q), _turned(k)
    if how.positions == "alibi":
        bias = _slopes(how.heads)[:, None, None] * -np.abs(ahead)
    return _attended(q, k, v, visible if how.mask is None else visible & how.mask, bias, w)


def _to_memory(x: NDArray, memory: NDArray, w: Params, how: _How) -> NDArray:
    q, k, v = _projected(x, memory, w, how.heads)
    visible = np.ones((1, 1, 1, 1), bool) if how.memory_mask is None else how.memory_mask
    return _attended(q, k, v, visible, np.zeros(1), w)


def _projected(query: NDArray, rows: NDArray, w: Params, heads: int) -> tuple[NDArray, NDArray, NDArray]:
    """q[B,H,T,D], and k[B,H,S,D], v[B,H,S,Dv] repeated for each query head."""
    groups = w["wk"].shape[1] * heads // w["wq"].shape[1]
    found = []
    for name, each, count in (("q", query, heads), ("k", rows, groups), ("v", rows, groups)):
        y = each @ w["w" + name] + w.get("b" + name, 0)
        y = y.reshape(*y.shape[:2], count, -1).swapaxes(1, 2)
        found.append(np.repeat(y, heads // count, 1))
    return found[0], found[1], found[2]


def _attended(q: NDArray, k: NDArray, v: NDArray, visible: NDArray, bias: NDArray, w: Params) -> NDArray:
    """softmax(q kᵀ D^-½ + bias) v over what is visible, joined, times wo, plus bo."""
    s = q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5 + bias.astype(q.dtype)
    visible = np.broadcast_to(visible, s.shape)
    s = np.where(visible, s, -np.inf)
    m = s.max(-1, keepdims=True)
    e = np.exp(s - np.where(np.isneginf(m), 0, m))
    total = e.sum(-1, keepdims=True)
    p = e / np.where(total == 0, 1, total)
    mixed = (p[..., None] * np.where(visible[..., None], v[:, :, None], 0)).sum(-2)
    return mixed.swapaxes(1, 2).reshape(q.shape[0], q.shape[2], -1) @ w["wo"] + w.get("bo", 0)


def _slopes(heads: int) -> NDArray:
    power = 2 ** (heads.bit_length() - 1)
    exponents = [*range(2, 2 * power + 1, 2), *range(1, 2 * (heads - power), 2)]
    return 2.0 ** (-4 * np.array(exponents) / power)


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
    return [_widened(part) for part in params] if isinstance(params, list) else _wide(params)


def _wide(x: NDArray) -> NDArray:
    return x if x.dtype == np.float64 else x.astype(np.float32)


_MAKE = {"encoder": _make_encoder, "decoder": _make_decoder}
# law that must accuse: {variant: (where it was seen, what is wrong)}; the law names the operation
_TABLE: dict[str, dict[str, tuple[str, str]]] = {
    "encoder/layers-run-in-order": {
        "layers_reversed": ("mutation: a stack popped from its end", "the last layer comes first"),
        "one_layer_too_many": ("mutation: range(N + 1)", "the last layer acts twice"),
        "final_norm_first": ("mutation: norm of the embeddings", "the final norm acts on the input"),
        "final_norm_in_every_layer": ("mutation: the norm inside the loop", "the final norm acts after each layer"),
        "window_in_the_first_layer_alone": ("mutation: one windowed layer", "later layers have no window"),
        "positions_in_the_first_layer_alone": ("mutation: positions at the input", "later layers have no positions"),
    },
    "encoder/every-weight-counts": {
        "first_layer_for_all": ("mutation: [layer] * N", "every layer has the weights of the first"),
        "last_layer_skipped": ("mutation: range(N - 1)", "the last layer is left out"),
        "first_layer_skipped": ("mutation: range(1, N)", "the first layer is left out"),
        "attention_of_the_first_layer": ("mutation: late binding in a loop", "one attention for all layers"),
        "feed_forward_of_the_first_layer": ("mutation: a shared module", "one feed-forward sublayer for all layers"),
    },
    "encoder/last-norm-scales-the-output": {
        "final_norm_missing": ("mutation: pre-norm as post-norm", "the final norm is left out"),
        "final_norm_in_pre_norm_alone": ("mutation: a norm only for pre-norm", "post-norm drops its final norm"),
        "final_norm_of_the_last_layer": ("mutation: a norm used again", "the last layer's norm2 is the final norm"),
    },
    "encoder/silent-sublayers-leave-the-norms": {
        "norms_of_the_first_layer": ("mutation: norms made once", "the first layer's norms for all layers"),
        "alpha_in_the_first_layer_alone": ("mutation: a default in the loop", "later layers have alpha 1"),
        "alpha_grows": ("mutation: alpha multiplied in the loop", "layer n has alpha to the power n"),
    },
    "encoder/silent-sublayers-leave-the-input": {
        "final_norm_added": ("pytorch#50086", "a final norm where none is given"),
        "input_added_at_the_end": ("mutation: one residual more", "the stack's input is added to its output"),
    },
    "encoder/alpha-acts-in-post-norm-only": {
        "norm_in_the_first_layer_alone": ("snowfall#184", "later layers are post-norm"),
    },
    "encoder/every-keyword-counts": {
        "alpha_of_the_depth": ("mutation: DeepNorm's own alpha", "(2 N)^¼ whatever is given"),
    },
    "encoder/hidden-tokens-have-no-influence": {
        "mask_in_the_first_layer_alone": ("mutation: the mask consumed", "later layers see what is hidden"),
    },
    "encoder/padding-changes-nothing": {
        "trailing_padding_cropped": ("pytorch#97111", "what is padding in every sample is cut off the result"),
    },
    "encoder/seen-tokens-have-influence": {
        "padded_rows_zeroed": ("mutation: padding filled with 0", "rows that nobody may see are 0 in the result"),
    },
    "decoder/layers-run-in-order": {
        "decoder_layers_reversed": ("mutation: a stack popped from its end", "the last layer comes first"),
        "decoder_positions_in_the_first_layer_alone": ("mutation: positions at the input", "later layers have none"),
    },
    "decoder/every-weight-counts": {
        "decoder_first_layer_for_all": ("mutation: [layer] * N", "every layer has the weights of the first"),
        "decoder_cross_attention_of_the_first_layer": ("mutation: a shared module", "one cross-attention for all"),
    },
    "decoder/last-norm-scales-the-output": {
        "decoder_final_norm_missing": ("mutation: pre-norm as post-norm", "the final norm is left out"),
    },
    "decoder/silent-sublayers-leave-the-input": {
        "decoder_final_norm_added": ("pytorch#50086", "a final norm where none is given"),
    },
    "decoder/hidden-tokens-have-no-influence": {
        "decoder_mask_in_the_first_layer_alone": ("mutation: the mask consumed", "later layers see what is hidden"),
    },
    "decoder/future-has-no-influence": {
        "decoder_causal_in_the_first_layer_alone": ("mutation: one triangle", "later layers see later tokens"),
    },
    "decoder/hidden-memory-has-no-influence": {
        "decoder_memory_mask_in_the_first_layer_alone": ("mutation: the mask consumed", "hidden memory is seen later"),
    },
    "decoder/every-layer-sees-the-memory": {
        "decoder_memory_in_the_first_layer_alone": ("mutation: memory consumed", "later layers skip cross-attention"),
        "decoder_cross_keys_of_the_first_layer": ("mutation: keys of memory kept once", "the first layer's wk and wv"),
    },
    "decoder/prefix-is-enough": {
        "decoder_memory_replaced": ("mutation: a variable used twice", "layer n + 1 attends to what layer n gave"),
    },
    "decoder/equals-the-reference": {
        "decoder_memory_normed_by_the_final_norm": ("mutation: norm of both", "the final norm acts on memory"),
        "decoder_window_in_the_first_layer_alone": ("mutation: one windowed layer", "later layers have no window"),
    },
}
FAULTS: dict[str, Fault] = {}
VARIANTS: dict[str, dict[str, Callable[..., Any]]] = {
    "correct": {operation: make("correct") for operation, make in _MAKE.items()}
}
for _law, _mistakes in _TABLE.items():
    _operation = _law.split("/")[0]
    for _variant, (_source, _summary) in _mistakes.items():
        FAULTS[_variant] = Fault(_operation, _law, _source, _summary)
        VARIANTS[_variant] = {_operation: _MAKE[_operation](_variant)}
CAPABILITIES = dict.fromkeys(_MAKE, Capabilities(nan_contained=True, rounds_probabilities=False))
