"""Encoder-decoders whose steps differ from the whole: one correct model with one switch for each mistake.

The variant "correct" has every switch off. Each other variant differs from it by the mistake that its Fault
names and by nothing else; none of them is made in full.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veriformer.declarations import Capabilities, Fault

FRAMEWORK = "numpy"
Params = Mapping[str, Any]
KV = tuple[NDArray, NDArray]


@dataclass
class _Memory:
    """Keys and values of the source for every decoder layer, which of its tokens are real, what sessions left."""

    layers: list[KV]
    mask: NDArray | None
    used: dict[str, Any] = field(default_factory=dict)


@dataclass
class _Cache:
    """Keys and values of the target so far in every layer, how many tokens that is, where the next one stands."""

    layers: list[KV]
    length: int
    position: int


class _Model:
    def __init__(
        self, fault: str, params: Params, heads: int, norm: str, alpha: tuple[float, float], positions: str | None
    ) -> None:
        self.fault, self.params, self.heads, self.pre, self.positions = fault, params, heads, norm == "pre", positions
        self.alpha, self.vocabulary = alpha, len(params["target_embedding"])
        self.kept: dict[Any, Any] = {}

    def encode(self, source: NDArray, mask: NDArray | None = None) -> _Memory:
        """source[B,S], mask[B,S] or None -> the memory. Raises ValueError for tokens outside the vocabulary."""
        fault = self.fault
        memory = self._encoded(source, mask, fault)
        if fault == "mask_left_out_of_steps":
            memory.mask = None
        if fault == "mask_of_the_first_source":
            memory.mask = self.kept.setdefault(("mask", source.shape), memory.mask)
        if fault == "first_memory_kept":
            return self.kept.setdefault(("memory", source.shape), memory)
        self.kept["last"] = memory
        return memory

    def full(self, source: NDArray, target: NDArray, mask: NDArray | None = None) -> NDArray:
        """source[B,S], target[B,T], mask[B,S] or None -> logits[B,T,V]. Raises ValueError as encode does."""
        return self._run(target, self._encoded(source, mask, ""), None, "")[0]

    def step(self, tokens: NDArray, memory: _Memory, cache: _Cache | None) -> tuple[NDArray, _Cache]:
        """tokens[B,m] -> logits[B,m,V], the cache. Raises ValueError as encode does."""
        fault = self.fault
        if fault == "second_step_raises" and cache is not None:
            raise ValueError("got a cache, wanted none")
        if fault == "last_memory_for_all_sessions":
            memory = self.kept["last"]
        if fault == "cross_rows_kept_in_the_model":
            memory = self.kept.setdefault(("cross", memory.layers[0][0].shape), memory)
        if fault == "cache_kept_in_the_memory":
            cache = memory.used.get("cache")
        if fault == "memory_scaled_by_each_session" and cache is None:
            for k, _ in memory.layers:
                k *= 1.5 if memory.used.get("scaled") else 1
            memory.used["scaled"] = True
        if fault == "position_shared_by_sessions" and cache is not None:
            cache = _Cache(cache.layers, cache.length, self.kept["position"])
        logits, found = self._run(tokens, memory, cache, fault)
        memory.used["cache"], self.kept["position"] = found, found.position
        if fault == "one_object_said_to_be_persistent" and cache is not None:
            cache.layers, cache.length, cache.position = found.layers, found.length, found.position
            return logits, cache
        return logits, found

    def crop(self, cache: _Cache, length: int) -> _Cache:
        """The cache after its first `length` tokens."""
        end = {"crop_does_nothing": cache.length, "crop_one_too_long": min(length + 1, cache.length)}
        length = end.get(self.fault, length)
        position = cache.position if self.fault == "crop_keeps_positions" else length
        return _Cache([(k[:, :, :length], v[:, :, :length]) for k, v in cache.layers], length, position)

    def reorder(self, cache: _Cache, rows: NDArray) -> _Cache:
        """The cache whose batch row i is row rows[i] of the given one."""
        layers = [(k[rows], v if self.fault == "reorder_of_the_keys_only" else v[rows]) for k, v in cache.layers]
        layers = cache.layers if self.fault == "reorder_does_nothing" else layers
        return _Cache(layers, cache.length, cache.position)

    def _encoded(self, source: NDArray, mask: NDArray | None, fault: str) -> _Memory:
        """The encoder; `fault` is empty in full."""
        start = self.kept.get("sources", 0) if fault == "source_positions_go_on" else 0
        self.kept["sources"] = start + source.shape[1]
        x, side = self._embedded(source, "source", start + np.arange(source.shape[1])), self.params["encoder"]
        for layer in side["layers"]:
            x = self._beside(x, layer["norm1"], 0, lambda y, w=layer["attention"]: self._encoding(y, w, mask))
            x = self._beside(x, layer["norm2"], 0, lambda y, w=layer["feed_forward"]: _feed_forward(y, w))
        x = x if "norm" not in side or fault == "encoder_norm_left_out_of_steps" else _normed(x, side["norm"])
        crossing = (layer["cross_attention"] for layer in self.params["decoder"]["layers"])
        return _Memory([self._projected(x, w)[1:] for w in crossing], mask)

    def _run(self, tokens: NDArray, memory: _Memory, cache: _Cache | None, fault: str) -> tuple[NDArray, _Cache]:
        """The decoder; `fault` is empty in full."""
        side, cache, rows = self.params["decoder"], cache or _Cache([], 0, 0), []
        later = fault if cache.length else ""
        start = {
            "positions_restart_in_each_step": 0,
            "position_off_by_one_after_the_first_step": cache.position + 1,
        }.get(later, cache.position)
        at = start + np.arange(tokens.shape[1])
        x = self._embedded(tokens, "target", at)
        for number, layer in enumerate(side["layers"]):
            past = cache.layers[number] if cache.length else None
            if later == "values_of_the_first_layer":
                past = past[0], cache.layers[0][1]
            x = self._beside(
                x, layer["norm1"], 1, lambda y, w=layer["attention"], p=past: self._decoding(y, w, p, at, later, rows)
            )
            if later != "memory_seen_in_the_first_step_only":
                seen = (memory.layers[number], memory.mask, rows[-1], fault)
                x = self._beside(
                    x, layer["norm2"], 1, lambda y, w=layer["cross_attention"], s=seen: self._crossing(y, w, *s)
                )
            x = self._beside(x, layer["norm3"], 1, lambda y, w=layer["feed_forward"]: _feed_forward(y, w))
        x = x if "norm" not in side or later == "final_norm_left_out_of_steps" else _normed(x, side["norm"])
        head = self.params.get("head", {"w": self.params["target_embedding"].T})
        logits = (x @ head["w"] + head.get("b", 0)).astype(self.params["target_embedding"].dtype)
        return logits, _Cache(rows, cache.length + tokens.shape[1], cache.position + tokens.shape[1])

    def _embedded(self, tokens: NDArray, side: str, at: NDArray) -> NDArray:
        table = self.params[side + "_embedding"]
        if ((tokens < 0) | (tokens >= len(table))).any():
            raise ValueError(f"{side}: got a token outside the vocabulary, wanted 0 to {len(table) - 1}")
        x = table[tokens] * self.params.get("embedding_scale", 1)
        return x + _sinusoids(at, x.shape[-1]).astype(x.dtype) if self.positions == "sinusoidal" else x

    def _beside(self, x: NDArray, norm: Params, side: int, sublayer: Callable[[NDArray], NDArray]) -> NDArray:
        """A sublayer beside its residual; side 0 is the encoder, 1 the decoder."""
        return x + sublayer(_normed(x, norm)) if self.pre else _normed(self.alpha[side] * x + sublayer(x), norm)

    def _encoding(self, x: NDArray, w: Params, mask: NDArray | None) -> NDArray:
        (q, k, v), at = self._projected(x, w), np.arange(x.shape[1])
        q, k = (_turned(q, at), _turned(k, at)) if self.positions == "rotary" else (q, k)
        behind = at[:, None] - at
        return self._mixed(q, k, v, w, np.ones_like(behind, bool), mask, np.abs(behind))

    def _decoding(self, x: NDArray, w: Params, past: KV | None, at: NDArray, fault: str, kept: list[KV]) -> NDArray:
        """Causal self-attention; the rows of this layer are added to those kept; no fault in a first step."""
        q, k, v = self._projected(x, w)
        q, k = (_turned(q, at), _turned(k, at)) if self.positions == "rotary" else (q, k)
        rows = (k, v) if past is None else tuple(np.concatenate(pair, 2) for pair in zip(past, (k, v), strict=True))
        kept.append(rows)
        row = np.arange(rows[0].shape[2])
        first = len(row) - q.shape[2]
        behind = row[first:, None] - row
        visible = {
            "chunk_top_left": np.arange(len(behind))[:, None] >= row,
            "chunk_sees_all_of_itself": behind > -np.inf,
            "chunk_sees_only_itself": (behind >= 0) & (row >= first),
            "last_kept_row_unseen": (behind >= 0) & (row != first - 1),
        }.get(fault, behind >= 0)
        return self._mixed(q, *rows, w, visible, None, np.abs(behind))

    def _crossing(self, x: NDArray, w: Params, kv: KV, mask: NDArray | None, rows: KV, fault: str) -> NDArray:
        """Attention to the memory; rows: those of the target so far; `fault` is empty in full."""
        q, total = self._projected(x, w)[0], rows[0].shape[2]
        if fault == "target_rows_join_the_memory":
            kv = tuple(np.concatenate(pair, 2) for pair in zip(kv, rows, strict=True))
            mask = None if mask is None else np.concatenate([mask, np.ones((len(mask), total), bool)], 1)
        at, column = np.arange(total - x.shape[1], total)[:, None], np.arange(kv[0].shape[2])
        visible = {
            "cross_causal_in_steps": at >= column,
            "memory_cut_to_the_target": (column < total) & (at >= 0),
            "memory_cut_to_a_window": (column >= len(column) - 2) & (at >= 0),
        }.get(fault, (column >= 0) & (at >= 0))
        return self._mixed(q, *kv, w, visible, mask, None)

    def _projected(self, x: NDArray, w: Params) -> tuple[NDArray, NDArray, NDArray]:
        """q[B,H,T,D], k[B,G,T,D], v[B,G,T,Dv] of x[B,T,d]."""
        groups = w["wk"].shape[1] * self.heads // w["wq"].shape[1]
        return tuple(
            (x @ w["w" + name] + w.get("b" + name, 0)).reshape(*x.shape[:2], n, -1).swapaxes(1, 2)
            for name, n in (("q", self.heads), ("k", groups), ("v", groups))
        )

    def _mixed(
        self, q: NDArray, k: NDArray, v: NDArray, w: Params, visible: NDArray, mask: NDArray | None, distance: Any
    ) -> NDArray:
        """Attention, joined and projected; mask[B,S] of keys; distance for ALiBi or None."""
        k, v = (np.repeat(a, self.heads // a.shape[1], 1) for a in (k, v))
        s = q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5
        if self.positions == "alibi" and distance is not None:
            s = s - (_slopes(self.heads)[:, None, None] * distance).astype(s.dtype)
        s = np.where(visible if mask is None else visible & mask[:, None, None], s, -np.inf)
        top = s.max(-1, keepdims=True)
        e = np.exp(s - np.where(np.isneginf(top), 0, top))
        p = e / np.where((total := e.sum(-1, keepdims=True)) == 0, 1, total)
        mixed = (p @ v).swapaxes(1, 2)
        return mixed.reshape(*mixed.shape[:2], -1) @ w["wo"] + w.get("bo", 0)


def _normed(x: NDArray, w: Params) -> NDArray:
    x = x - x.mean(-1, keepdims=True) if "bias" in w else x
    eps = 1e-5 if "bias" in w else 1e-6
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * w["weight"] + w.get("bias", 0)


def _feed_forward(x: NDArray, w: Params) -> NDArray:
    return np.maximum(x @ w["w1"] + w.get("b1", 0), 0) @ w["w2"] + w.get("b2", 0)


def _turned(x: NDArray, at: NDArray) -> NDArray:
    """x[B,heads,T,D] turned by positions at[T]."""
    half = x.shape[-1] // 2
    angle = at[:, None] * 10000.0 ** (-np.arange(half) / half)
    cos, sin = np.cos(angle).astype(x.dtype), np.sin(angle).astype(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def _sinusoids(at: NDArray, width: int) -> NDArray:
    """[T] -> [T,width]."""
    channel = np.arange(width)
    angle = at[:, None] * 10000.0 ** (-(channel - channel % 2) / width)
    return np.where(channel % 2, np.cos(angle), np.sin(angle))


def _slopes(heads: int) -> NDArray:
    """[H]."""
    lower = 1 << heads.bit_length() - 1
    first = 2.0 ** (-8 * np.arange(1, lower + 1) / lower)
    return np.concatenate([first, 2.0 ** (-4 * np.arange(1, 2 * lower, 2) / lower)])[:heads]


def _make(fault: str) -> Callable[..., _Model]:
    def encoder_decoder(
        params: Params, *, heads: int, norm: str = "post", alpha: Any = 1.0, positions: str | None = "sinusoidal"
    ) -> _Model:
        factors = tuple(alpha) if isinstance(alpha, (tuple, list)) else (alpha, alpha)
        return _Model(fault, params, heads, norm, factors, positions)

    encoder_decoder.__qualname__ = f"encoder_decoder[{fault}]"
    return encoder_decoder


# law that must accuse: {variant: (where it was seen, what is wrong)}
_TABLE: dict[str, dict[str, tuple[str, str]]] = {
    "cache-changes-nothing": {
        "positions_restart_in_each_step": ("executorch#2010", "positions count from 0 in every step"),
        "position_off_by_one_after_the_first_step": ("semantics 4.12", "positions go on one too late"),
        "chunk_top_left": ("pytorch#103082", "the triangle of a step starts at row 0"),
        "chunk_sees_all_of_itself": ("TinyLLM#17", "a chunk after the first is not causal within itself"),
        "chunk_sees_only_itself": ("mutation: attention over the chunk alone", "kept rows are not seen"),
        "last_kept_row_unseen": ("mutation: length - 1", "the newest kept row is not seen"),
        "values_of_the_first_layer": ("mutation: a layer index forgotten", "all layers have the first one's values"),
        "cross_causal_in_steps": ("TransformerEngine#629 in one path", "a step sees the source up to its position"),
        "memory_cut_to_the_target": ("mutation: one mask for both attentions", "a step sees as much source as target"),
        "memory_cut_to_a_window": ("transformers#46111", "a step sees the end of the source"),
        "memory_seen_in_the_first_step_only": ("mutation: if cache is None", "later steps have no cross-attention"),
        "target_rows_join_the_memory": ("x-transformers#311", "a step sees the target among the source"),
        "encoder_norm_left_out_of_steps": ("mutation: a norm in one path", "the memory is not normed"),
        "final_norm_left_out_of_steps": ("mutation: a norm in one path", "the head sees what was not normed"),
    },
    "steps-are-taken": {
        "second_step_raises": ("mutation: a check turned round", "a step refuses the cache of the one before"),
    },
    "memory-serves-several-sessions": {
        "cache_kept_in_the_memory": ("mutation: one cache for a memory", "a new session goes on with the last one"),
        "memory_scaled_by_each_session": ("mutation: keys scaled in place", "every session scales the keys again"),
    },
    "memory-of-another-source-is-used": {
        "first_memory_kept": ("semantics P74", "a memory is kept by the shape of its source"),
        "cross_rows_kept_in_the_model": ("semantics P74", "the rows of the first memory serve for all"),
        "source_positions_go_on": ("mutation: one counter for all sources", "positions go on from source to source"),
    },
    "sessions-do-not-interact": {
        "last_memory_for_all_sessions": ("mutation: one memory in the model", "steps see the last encoded source"),
        "position_shared_by_sessions": ("mutation: one counter in the model", "positions go on across sessions"),
    },
    "source-padding-changes-nothing": {
        "mask_left_out_of_steps": ("mutation: a mask in one path", "cross-attention in steps sees padding"),
    },
    "crop-rolls-back": {
        "crop_does_nothing": ("mutation: a stub", "everything is kept"),
        "crop_one_too_long": ("mutation: length + 1", "one row too many is kept"),
        "crop_keeps_positions": ("mutation: a counter not set back", "rows are dropped, positions go on"),
    },
    "old-caches-stay-valid": {
        "one_object_said_to_be_persistent": ("mutation: a promise too many", "old and new cache are one object"),
    },
    "reorder-moves-rows": {
        "reorder_does_nothing": ("mutation: a stub", "rows stay as they are"),
        "mask_of_the_first_source": ("x-transformers#90", "the mask of the first source is kept"),
        "reorder_of_the_keys_only": ("mutation: values forgotten", "values stay as they are"),
    },
}
FAULTS = {
    variant: Fault("encoder_decoder", f"encoder_decoder/{law}", source, summary, "float64")
    for law, variants in _TABLE.items()
    for variant, (source, summary) in variants.items()
}
VARIANTS: dict[str, dict[str, Callable[..., Any]]] = {
    variant: {"encoder_decoder": _make(variant)} for variant in ("correct", *FAULTS)
}
CAPABILITIES = {"encoder_decoder": Capabilities(rounds_probabilities=False, cache="persistent")}
