"""Decoder-only models whose steps differ from the whole: one correct model with one switch for each mistake.

The variant "correct" has every switch off. Each other variant differs from it by the mistake that its Fault
names and by nothing else; unless that says otherwise, it is made only where a step follows others.
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
KV = tuple[NDArray, NDArray]
Cache = tuple[list[KV], int, int]
"""Keys and values of every layer, the tokens so far, and how many of them the first step took."""


@dataclass(frozen=True)
class _Now:
    """Of one call: tokens before and in it, positions, the mistake it makes ("" in full and in a first step)."""

    length: int
    new: int
    at: NDArray
    fault: str


class _Model:
    def __init__(
        self, fault: str, kept: dict[Any, Any], params: Params, heads: int, norm: str, alpha: float,
        positions: str | None,
    ) -> None:  # fmt: skip
        self.fault, self.params, self.heads, self.positions = fault, params, heads, positions
        self.pre, self.alpha, self.vocabulary = norm == "pre", alpha, len(params["embedding"])
        self.kept = kept

    def full(self, tokens: NDArray) -> NDArray:
        """tokens[B,T] -> logits[B,T,V]. Raises ValueError for tokens outside the vocabulary."""
        at = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
        return self._run(tokens, [None] * len(self.params["layers"]), _Now(0, tokens.shape[1], at, ""))[0]

    def step(self, tokens: NDArray, cache: Cache | None) -> tuple[NDArray, Cache]:
        """tokens[B,m] -> logits[B,m,V], the cache. Raises ValueError for tokens outside the vocabulary."""
        if self.fault == "prompt_of_one_forgotten" and cache is not None and cache[1] == 1:
            cache = ([(k[:, :, :0], v[:, :, :0]) for k, v in cache[0]], *cache[1:])
        if self.fault == "shape_of_no_cache" and cache is None:
            cache = cache[0][0][0].shape  # type: ignore[index]
        if self.fault == "second_step_raises" and cache is not None:
            raise ValueError("got a cache, wanted none")
        layers, length, prompt = cache or ([None] * len(self.params["layers"]), 0, tokens.shape[1])
        fault, new = self.fault if length or self.fault == "logits_in_one_buffer" else "", tokens.shape[1]
        start = {
            "position_off_by_one_after_the_prompt": length + 1,
            "positions_stay_at_the_prompt": prompt,
            "positions_restart_in_each_step": 0,
        }.get(fault, length)
        at = np.full(new, start) if fault == "a_chunk_stands_at_its_start" else start + np.arange(new)
        logits, rows = self._run(tokens, layers, _Now(length, new, np.broadcast_to(at, tokens.shape), fault))
        if fault == "logits_of_the_last_for_all":
            logits = np.broadcast_to(logits[:, -1:], logits.shape).copy()
        if fault == "logits_in_one_buffer":
            buffer = self.kept.setdefault((logits.shape, logits.dtype), logits)
            buffer[:] = logits
            logits = buffer
        return logits, (rows, length + new, prompt)

    def _run(self, tokens: NDArray, layers: list[KV | None], now: _Now) -> tuple[NDArray, list[KV]]:
        if ((tokens < 0) | (tokens >= self.vocabulary)).any():
            raise ValueError(f"tokens: got one outside the vocabulary, wanted 0 to {self.vocabulary - 1}")
        x, rows, fault = self._embedded(tokens, now), [], now.fault
        for number, layer in enumerate(self.params["layers"]):
            x, kv = self._layer(x, layer, self._past(layers, number, fault), now)
            rows.append(kv)
        if "norm" in self.params and fault != "final_norm_left_out":
            x = self._normed(x, self.params["norm"], fault)
        head = self.params.get("head", {"w": self.params["embedding"].T})
        logits = x @ head["w"] + (0 if fault == "head_bias_left_out" else head.get("b", 0))
        if self.fault == "tokens_written" or now.fault == "tokens_written_by_steps":
            tokens[:] = logits.argmax(-1)
        return logits.astype(self.params["embedding"].dtype), rows

    def _past(self, layers: list[KV | None], number: int, fault: str) -> KV | None:
        """What was kept of one layer."""
        if fault == "values_of_the_first_layer":
            return layers[number][0], layers[0][1]
        return layers[max(0, number - 1) if fault == "cache_of_the_layer_below" else number]

    def _embedded(self, tokens: NDArray, now: _Now) -> NDArray:
        scale = 1 if now.fault == "embedding_scale_left_out" else self.params.get("embedding_scale", 1)
        x, at = self.params["embedding"][tokens] * scale, now.at
        if self.positions != "sinusoidal" or now.fault == "sinusoids_only_in_the_prompt":
            return x
        if now.fault == "sinusoids_restart_in_each_step":
            at = at - now.length
        if self.fault == "table_of_the_call_before":
            at = np.minimum(at, self.kept.get("table", at.max()))
            self.kept["table"] = now.at.max()
        return x + _sinusoids(at, x.shape[-1]).astype(x.dtype)

    def _layer(self, x: NDArray, layer: Params, past: KV | None, now: _Now) -> tuple[NDArray, KV]:
        w, norm1, norm2 = layer["feed_forward"], layer["norm1"], layer["norm2"]
        y = self._normed(x, norm1, now.fault) if self.pre else x
        y, rows = self._attention(y, layer["attention"], past, now)
        alpha = 1 if now.fault == "alpha_left_out" else self.alpha
        x = x + y if self.pre else self._normed(alpha * x + y, norm1, now.fault)
        y = self._normed(x, norm2, now.fault) if self.pre else x
        y = np.maximum(y @ w["w1"] + w.get("b1", 0), 0) @ w["w2"] + w.get("b2", 0)
        return (x + y if self.pre else self._normed(alpha * x + y, norm2, now.fault)), rows

    def _attention(self, x: NDArray, w: Params, past: KV | None, now: _Now) -> tuple[NDArray, KV]:
        fault, heads, width = now.fault, self.heads, w["wq"].shape[1] // self.heads
        groups = w["wk"].shape[1] // width
        q, k, v = (_split(_linear(x, w, name), n) for name, n in (("q", heads), ("k", groups), ("v", groups)))
        if fault == "value_bias_left_out":
            v = _split(x @ w["wv"], groups)
        plain = k
        if self.positions == "rotary" and not (fault == "rotary_left_out_for_one_token" and now.new == 1):
            q, k = _turned(q, now.at), _turned(k, now.at)
        rows = (k, v)
        if past is not None:
            past = self._seen(past, fault)
            rows = tuple(np.concatenate(pair, 2) for pair in zip(past, (k, v), strict=True))
        kept = (np.concatenate([past[0], plain], 2) if past is not None else plain, rows[1])
        kept = kept if self.fault == "keys_kept_before_turning" else rows
        if self.fault == "cache_in_half":
            kept = tuple(a.astype(np.float16).astype(a.dtype) for a in kept)
        each = np.arange(heads)
        each = each % groups if fault == "groups_tiled_with_a_cache" else each // (heads // groups)
        mixed = self._mixed(q, rows[0][:, each], rows[1][:, each], now).swapaxes(1, 2)
        return _linear(mixed.reshape(*mixed.shape[:2], -1), w, "o"), kept

    def _seen(self, past: KV, fault: str) -> KV:
        """What a step makes of the kept rows."""
        k, v = past
        if fault == "kept_keys_turned_again" and self.positions == "rotary":
            k = _turned(k, np.broadcast_to(np.arange(k.shape[2]), (len(k), k.shape[2])))
        if fault == "kept_values_are_the_keys" and k.shape == v.shape:
            v = k
        if fault == "kept_rows_of_the_next_row":
            k, v = np.roll(k, 1, 0), np.roll(v, 1, 0)
        if fault == "kept_rows_of_the_first_row":
            k, v = np.broadcast_to(k[:1], k.shape), np.broadcast_to(v[:1], v.shape)
        return k, v

    def _mixed(self, q: NDArray, k: NDArray, v: NDArray, now: _Now) -> NDArray:
        """Attention of the new queries over all rows, [B,H,m,Dv]."""
        fault, row = now.fault, np.arange(k.shape[2])
        first = k.shape[2] - now.new
        behind = (first + np.arange(now.new))[:, None] - row
        s = q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5
        if fault == "kept_scores_scaled_twice":
            s = np.where(row < first, s * q.shape[-1] ** -0.5, s)
        if self.positions == "alibi" and fault != "alibi_left_out":
            distance = np.abs(np.arange(now.new)[:, None] - row) if fault == "alibi_from_the_chunk" else np.abs(behind)
            s = s - (_slopes(self.heads)[:, None, None] * distance).astype(s.dtype)
        visible = _visible(behind, row, first, fault)
        s = np.where(visible, s, -np.inf)
        if fault == "parts_merged_without_weights":
            return (_softmax(s[..., :first]) @ v[:, :, :first] + _softmax(s[..., first:]) @ v[:, :, first:]) / 2
        if fault == "kept_rows_counted_twice":
            s, v = np.concatenate([s[..., :first], s], -1), np.concatenate([v[:, :, :first], v], 2)
        return _softmax(s) @ v

    def _normed(self, x: NDArray, w: Params, fault: str) -> NDArray:
        x = x - x.mean(-1, keepdims=True) if "bias" in w else x
        v = (x * x).mean(-1, keepdims=True)
        if fault == "norms_over_the_chunk":
            v = np.broadcast_to(v.mean(1, keepdims=True), v.shape)
        return x / np.sqrt(v + (1e-5 if "bias" in w else 1e-6)) * w["weight"] + w.get("bias", 0)


def _visible(behind: NDArray, row: NDArray, first: int, fault: str) -> NDArray:
    """[m,L+m]: may a new token see the row; `first` is the first row of the chunk."""
    return {
        "chunk_sees_only_itself": (behind >= 0) & (row >= first),
        "chunk_sees_only_the_cache": row + 0 * behind < first,
        "chunk_top_left": np.arange(len(behind))[:, None] >= row,
        "chunk_sees_all_of_itself": behind > -np.inf,
        "chunk_does_not_see_itself": behind > 0,
        "last_kept_row_unseen": (behind >= 0) & (row != first - 1),
        "first_kept_row_unseen": (behind >= 0) & (row != 0),
        "one_kept_row_seen": (behind >= 0) & (row >= first - 1),
    }.get(fault, behind >= 0)


def _linear(x: NDArray, w: Params, name: str) -> NDArray:
    return x @ w["w" + name] + w.get("b" + name, 0)


def _split(x: NDArray, heads: int) -> NDArray:
    """[B,T,heads*D] -> [B,heads,T,D]."""
    return x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)


def _turned(x: NDArray, at: NDArray) -> NDArray:
    """x[B,heads,T,D] turned by its positions at[B,T]."""
    half = x.shape[-1] // 2
    angle = at[:, None, :, None] * 10000.0 ** (-np.arange(half) / half)
    cos, sin = np.cos(angle).astype(x.dtype), np.sin(angle).astype(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def _sinusoids(at: NDArray, width: int) -> NDArray:
    """[B,T] -> [B,T,width]."""
    channel = np.arange(width)
    angle = at[..., None] * 10000.0 ** (-(channel - channel % 2) / width)
    return np.where(channel % 2, np.cos(angle), np.sin(angle))


def _slopes(heads: int) -> NDArray:
    """[H]."""
    lower = 1 << heads.bit_length() - 1
    first = 2.0 ** (-8 * np.arange(1, lower + 1) / lower)
    return np.concatenate([first, 2.0 ** (-4 * np.arange(1, 2 * lower, 2) / lower)])[:heads]


def _softmax(s: NDArray) -> NDArray:
    top = s.max(-1, keepdims=True, initial=-np.inf)
    e = np.exp(s - np.where(np.isneginf(top), 0, top))
    total = e.sum(-1, keepdims=True)
    return e / np.where(total == 0, 1, total)


def _make(fault: str) -> Callable[..., _Model]:
    kept: dict[Any, Any] = {}

    def decoder_lm(
        params: Params, *, heads: int, norm: str = "pre", alpha: float = 1.0, positions: str | None = "rotary"
    ) -> _Model:
        return _Model(fault, kept, params, heads, norm, alpha, positions)

    decoder_lm.__qualname__ = f"decoder_lm[{fault}]"
    return decoder_lm


# law that must accuse: {variant: (where it was seen, what is wrong)}
_TABLE: dict[str, dict[str, tuple[str, str]]] = {
    "cache-changes-nothing": {
        "position_off_by_one_after_the_prompt": ("semantics 4.12", "positions go on one too late"),
        "positions_stay_at_the_prompt": (
            "mutation: a length that is not updated",
            "all later steps stand at one place",
        ),
        "positions_restart_in_each_step": ("executorch#2010", "positions count from 0 in every step"),
        "sinusoids_restart_in_each_step": ("x-transformers#219", "sinusoids count from 0 in every step"),
        "sinusoids_only_in_the_prompt": ("mutation: a signal added once", "later steps get no sinusoids"),
        "a_chunk_stands_at_its_start": ("semantics 4.15", "all tokens of a chunk stand where the first does"),
        "chunk_sees_only_itself": ("mutation: attention over the chunk alone", "kept rows are not seen"),
        "chunk_sees_only_the_cache": ("mutation: append after attending", "new rows are not seen"),
        "chunk_top_left": ("pytorch#103082", "the triangle of a step starts at row 0"),
        "chunk_sees_all_of_itself": ("TinyLLM#17", "a chunk after the first is not causal within itself"),
        "chunk_does_not_see_itself": ("mutation: j < i for j <= i in steps", "a new token does not see its own row"),
        "last_kept_row_unseen": ("mutation: length - 1", "the newest kept row is not seen"),
        "first_kept_row_unseen": ("mutation: rows counted from 1", "the oldest kept row is not seen"),
        "one_kept_row_seen": ("mutation: the last row for all rows", "only the newest kept row is seen"),
        "alibi_left_out": ("keras-hub#2861", "no ALiBi beside a cache"),
        "alibi_from_the_chunk": ("keras-hub#2862", "distances are counted from the start of the chunk"),
        "kept_keys_turned_again": ("mutation: rotary over the whole cache", "kept keys are turned in every step"),
        "keys_kept_before_turning": ("semantics P73 in one half", "keys are kept as they were before rotary"),
        "rotary_left_out_for_one_token": ("mutation: a decode kernel without rotary", "one token is not turned"),
        "values_of_the_first_layer": ("mutation: a layer index forgotten", "all layers have the first one's values"),
        "cache_of_the_layer_below": ("mutation: a layer index off by one", "a layer goes on with another's rows"),
        "groups_tiled_with_a_cache": ("onnx#7274 in one path", "key heads 0 1 0 1 for 0 0 1 1 in steps"),
        "kept_values_are_the_keys": ("transformers#34232", "the value cache holds the keys"),
        "kept_rows_of_the_first_row": ("reasoning-from-scratch#33", "every row goes on from the first one's past"),
        "cache_in_half": ("mutation: a cache of lower precision", "rows are kept in float16"),
        "kept_scores_scaled_twice": ("transformers#38290 in one path", "scores of kept rows are scaled twice"),
        "parts_merged_without_weights": ("semantics P61", "cache and chunk are averaged without their sums"),
        "kept_rows_counted_twice": ("mutation: rows appended twice", "kept rows count twice"),
        "logits_of_the_last_for_all": ("mutation: the last position broadcast", "a chunk has its last token's logits"),
        "logits_in_one_buffer": ("mutation: a static output buffer", "a step overwrites the logits of those before"),
        "final_norm_left_out": ("mutation: the last norm left out of steps", "the head sees what was not normed"),
        "norms_over_the_chunk": ("semantics P66: norms per token", "norms divide by the deviation of the chunk"),
        "alpha_left_out": ("mutation: a keyword not passed on to steps", "the residual is not scaled"),
        "embedding_scale_left_out": ("mutation: a scale in one path", "the embedding is not scaled"),
        "head_bias_left_out": ("mutation: a bias in one path", "the head's bias is lost"),
        "value_bias_left_out": ("mutation: a packed bias read short", "values have no bias"),
        "prompt_of_one_forgotten": ("mutation: length > 1 for length > 0", "a first step of one token is forgotten"),
    },
    "rows-do-not-interact": {
        "kept_rows_of_the_next_row": ("mutation: batch index off by one", "a row goes on from another one's past"),
    },
    "history-changes-nothing": {
        "table_of_the_call_before": ("x-transformers#90", "sinusoids end where those of the call before did"),
    },
    "leaves-inputs-untouched": {
        "tokens_written": ("transformers#29680", "full writes what comes next into the given tokens"),
    },
    "steps-are-taken": {
        "shape_of_no_cache": ("mutation: a first step is forgotten", "a step without a cache asks for its shape"),
        "second_step_raises": ("mutation: a check turned round", "a step refuses the cache of the one before"),
    },
    "steps-leave-tokens-untouched": {
        "tokens_written_by_steps": ("transformers#29680", "a step writes what comes next into the given tokens"),
    },
}
FAULTS = {
    variant: Fault("decoder_lm", f"decoder_lm/{law}", source, summary, "float64")
    for law, variants in _TABLE.items()
    for variant, (source, summary) in variants.items()
}
VARIANTS: dict[str, dict[str, Callable[..., Any]]] = {
    variant: {"decoder_lm": _make(variant)} for variant in ("correct", *FAULTS)
}
CAPABILITIES = {"decoder_lm": Capabilities(rounds_probabilities=False, cache="persistent")}
