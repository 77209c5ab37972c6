"""Decoder-only models with a wrong window: one correct rolling cache with one switch for each mistake.

The variant "correct" has every switch off. Each other variant differs from it by the mistake that its Fault
names and by nothing else; without a window all are right. Between steps each layer keeps the last W - 1 rows, so
that there is no crop but in the variant whose mistake it is.
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
KV = tuple[NDArray, NDArray]
Cache = tuple[list[KV], int]
"""Kept keys and values of every layer, and the tokens so far."""


@dataclass(frozen=True)
class _Now:
    """Of one call: tokens before it, their positions, its mask, and whether it is a step."""

    length: int
    at: NDArray
    mask: NDArray | None
    stepping: bool


class _Model:
    def __init__(
        self, fault: str, params: Params, heads: int, norm: str, alpha: float, window: Window | None,
        positions: str | None,
    ) -> None:  # fmt: skip
        self.params, self.heads, self.positions = params, heads, positions
        self.pre, self.alpha, self.vocabulary = norm == "pre", alpha, len(params["embedding"])
        self.left = None if window is None else window[0]
        self.window = None if self.left is None else self.left + 1
        self.fault = fault if self.left is not None else ""

    def full(self, tokens: NDArray) -> NDArray:
        """tokens[B,T] -> logits[B,T,V]. Raises ValueError for tokens outside the vocabulary."""
        at = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
        return self._run(tokens, [None] * len(self.params["layers"]), _Now(0, at, None, False))[0]

    def step(
        self, tokens: NDArray, cache: Cache | None, *, mask: NDArray | None = None, positions: NDArray | None = None
    ) -> tuple[NDArray, Cache]:
        """tokens[B,m], mask[B,L+m], positions[B,m] -> logits[B,m,V], the cache. Raises ValueError as full does."""
        kept, length = cache or ([None] * len(self.params["layers"]), 0)
        if self.fault == "positions_saturate" and cache is not None:
            length = kept[0][0].shape[2]
            mask = mask if mask is None else mask[:, -length - tokens.shape[1] :]
        at = np.broadcast_to(length + np.arange(tokens.shape[1]), tokens.shape) if positions is None else positions
        logits, rows = self._run(tokens, kept, _Now(length, at, mask, True))
        return logits, (rows, length + tokens.shape[1])

    def reorder(self, cache: Cache, rows: NDArray) -> Cache:
        """The cache whose batch row i is row rows[i] of the given one."""
        layers = [(k[rows], v[rows]) for k, v in cache[0]]
        return layers, layers[0][0].shape[2] if self.fault == "reorder_forgets_what_was_evicted" else cache[1]

    def _run(self, tokens: NDArray, kept: list[KV | None], now: _Now) -> tuple[NDArray, list[KV]]:
        if ((tokens < 0) | (tokens >= self.vocabulary)).any():
            raise ValueError(f"tokens: got one outside the vocabulary, wanted 0 to {self.vocabulary - 1}")
        x, rows = self.params["embedding"][tokens] * self.params.get("embedding_scale", 1), []
        if self.positions == "sinusoidal":
            x = x + _sinusoids(now.at, x.shape[-1]).astype(x.dtype)
        for number, layer in enumerate(self.params["layers"]):
            w, norm1, norm2 = layer["feed_forward"], layer["norm1"], layer["norm2"]
            y = _normed(x, norm1) if self.pre else x
            y, found = self._attention(y, layer["attention"], kept[number], number, now)
            rows.append(found)
            x = x + y if self.pre else _normed(self.alpha * x + y, norm1)
            y = _normed(x, norm2) if self.pre else x
            y = np.maximum(y @ w["w1"] + w.get("b1", 0), 0) @ w["w2"] + w.get("b2", 0)
            x = x + y if self.pre else _normed(self.alpha * x + y, norm2)
        x = _normed(x, self.params["norm"]) if "norm" in self.params else x
        head = self.params.get("head", {"w": self.params["embedding"].T})
        return (x @ head["w"] + head.get("b", 0)).astype(self.params["embedding"].dtype), rows

    def _attention(self, x: NDArray, w: Params, past: KV | None, number: int, now: _Now) -> tuple[NDArray, KV]:
        heads, width = self.heads, w["wq"].shape[1] // self.heads
        groups = w["wk"].shape[1] // width
        q, k, v = (_split(_linear(x, w, name), n) for name, n in (("q", heads), ("k", groups), ("v", groups)))
        late = self.fault == "kept_keys_turned_by_their_slot"
        if self.positions == "rotary":
            q, k = _turned(q, now.at), k if late else _turned(k, now.at)
        rows = (k, v) if past is None else tuple(np.concatenate(pair, 2) for pair in zip(past, (k, v), strict=True))
        if self.fault == "evicts_before_attending" and now.stepping:
            rows = tuple(a[:, :, -max(self.window, 1) :] for a in rows)
        kept = self._kept(rows, number, past is None) if now.stepping else rows
        if late and self.positions == "rotary":
            first = now.at[:, :1] if past is None else np.zeros((len(x), 1), int)
            rows = _turned(rows[0], first + np.arange(rows[0].shape[2])), rows[1]
        k, v = (np.repeat(a, heads // groups, 1) for a in rows)
        row = np.arange(now.length + q.shape[2])[-k.shape[2] :]
        behind = (now.length + np.arange(q.shape[2]))[:, None] - row
        s = q @ k.swapaxes(-1, -2) * width**-0.5
        if self.positions == "alibi":
            s = s - (_slopes(heads)[:, None, None] * np.abs(behind)).astype(s.dtype)
        visible = ((behind >= 0) & self._in_window(behind, row, number, now))[None]
        if now.mask is not None:
            visible = visible & self._mask(now.mask, row)
        mixed = (_softmax(np.where(visible, s, -np.inf)) @ v).swapaxes(1, 2)
        return _linear(mixed.reshape(*mixed.shape[:2], -1), w, "o"), kept

    def _kept(self, rows: KV, number: int, prompt: bool) -> KV:
        """What is left of the rows for the next step."""
        fault, count = self.fault, rows[0].shape[2]
        keep = count if self.left is None else min(self.left, count)
        keep = {
            "evicts_one_too_early": max(keep - 1, 0),
            "steps_see_one_more": min(keep + 1, count),
            "window_one_wider": min(keep + 1, count),
            "window_keeps_the_first_token": count,
            "window_in_blocks": count,
            "window_in_the_first_head_only": count,
            "window_only_with_a_mask": count,
            "evicts_one_row_a_step": max(count - 1, keep) if not prompt else keep,
            "window_only_in_full": count,
            "window_left_out": count,
            "evicts_in_the_first_layer_only": keep if number == 0 else count,
        }.get(fault, keep)
        if not self._masks(number, True):
            keep = count
        k, v = (a[:, :, count - keep :] for a in rows)
        if fault == "evicts_the_newest" or (fault == "a_long_prompt_keeps_its_beginning" and prompt):
            k, v = (a[:, :, :keep] for a in rows)
        if fault == "values_evicted_one_step_late" and count > keep:
            v = rows[1][:, :, count - keep - 1 : count - 1]
        if fault == "kept_rows_in_slot_order" and keep:
            k, v = (np.roll(a, count % keep, 2) for a in (k, v))
        return k, v

    def _masks(self, number: int, stepping: bool) -> bool:
        """Whether this layer has a window."""
        return {
            "window_left_out": False,
            "window_only_in_full": not stepping,
            "window_only_in_steps": stepping,
            "window_in_the_first_layer_only": number == 0,
            "window_in_every_second_layer": number % 2 == 1,
            "window_of_one_ignored": self.left != 0,
        }.get(self.fault, True)

    def _in_window(self, behind: NDArray, row: NDArray, number: int, now: _Now) -> NDArray:
        """[m,R] or [H,m,R]: is the row in the window of the new token."""
        fault, everything = self.fault, np.ones_like(behind, dtype=bool)
        trusting = fault in ("steps_see_one_more", "evicts_one_row_a_step", "evicts_in_the_first_layer_only")
        if self.left is None or not self._masks(number, now.stepping) or (trusting and now.stepping and now.length):
            return everything
        if fault == "window_only_with_a_mask" and now.mask is None:
            return everything
        left = {
            "window_one_wider": self.left + 1,
            "window_one_narrower": max(self.left - 1, 0),
            "window_halved": self.left // 2,
        }.get(fault, self.left)
        if fault == "window_counted_in_the_chunk":
            behind = np.arange(len(behind))[:, None] - np.arange(len(row))
        if fault == "window_in_blocks":
            return row >= (now.length + np.arange(len(behind))[:, None] - left) // 2 * 2
        seen = behind <= left
        if fault == "window_keeps_the_first_token":
            seen = seen | (row == 0)
        if fault == "window_in_the_first_head_only":
            return seen | (np.arange(self.heads) > 0)[:, None, None]
        return seen

    def _mask(self, mask: NDArray, row: NDArray) -> NDArray:
        """[B,1,1,R]: which of the rows are real tokens."""
        if self.fault == "mask_of_the_first_rows":
            row = row - row[0]
        if self.fault == "mask_dropped_after_eviction" and row[0] > 0:
            mask = np.ones_like(mask)
        return mask[:, None, None, row]


class _Cropping(_Model):
    """The mistake: rows that the shorter cache needs may be gone."""

    def crop(self, cache: Cache, length: int) -> Cache:
        """The cache after its first `length` tokens, as far as their rows are left."""
        gone = cache[1] - length
        return [
            (k[:, :, : max(k.shape[2] - gone, 0)], v[:, :, : max(v.shape[2] - gone, 0)]) for k, v in cache[0]
        ], length


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
    made = _Cropping if fault == "crop_to_what_was_evicted" else _Model

    def decoder_lm(
        params: Params, *, heads: int, norm: str = "pre", alpha: float = 1.0, window: Window | None = None,
        positions: str | None = "rotary",
    ) -> _Model:  # fmt: skip
        return made(fault, params, heads, norm, alpha, window, positions)

    decoder_lm.__qualname__ = f"decoder_lm[{fault}]"
    return decoder_lm


# law that must accuse: {variant: (where it was seen, what is wrong)}
_TABLE: dict[str, dict[str, tuple[str, str]]] = {
    "cache-changes-nothing": {
        "steps_see_one_more": ("mlx-lm#390", "a step sees all that is left, which is one row too many"),
        "evicts_one_too_early": ("transformers#37574", "W - 2 rows are kept"),
        "evicts_before_attending": ("semantics 4.12", "the first of a chunk miss rows that the last one evicts"),
        "evicts_one_row_a_step": ("mutation: + 1 for + m", "a chunk evicts one row and sees the others"),
        "evicts_the_newest": ("mutation: [:n] for [-n:]", "the first rows are kept"),
        "evicts_in_the_first_layer_only": ("mutation: one layer looked at", "later layers forget nothing"),
        "a_long_prompt_keeps_its_beginning": ("mutation: a prompt cut at its end", "a prompt keeps its first rows"),
        "values_evicted_one_step_late": ("mutation: two counters", "a key goes with the value before it"),
        "kept_rows_in_slot_order": ("llama.cpp#14081", "rows are read in the order of a ring buffer's slots"),
        "positions_saturate": ("transformers#38156", "positions count the kept rows"),
        "window_only_in_full": ("mutation: a window in one path", "steps see everything"),
        "window_counted_in_the_chunk": ("keras-hub#1738", "the window is counted from the start of the chunk"),
    },
    "any-walk-equals-full": {
        "kept_keys_turned_by_their_slot": ("semantics 3.7: positions renumbered", "kept keys are turned by their slot"),
    },
    "window-forgets": {
        "window_left_out": ("mutation: a keyword that goes nowhere", "everything before a token is seen"),
        "window_only_in_steps": ("mutation: a window in one path", "the whole has no window"),
        "window_one_wider": ("transformers#39408", "W + 1 tokens are seen, whole and in steps"),
        "window_in_the_first_layer_only": ("mutation: the mask not passed on", "later layers see everything"),
        "window_in_every_second_layer": ("mutation: a pattern of layers nobody asked for", "even layers see all"),
        "window_in_the_first_head_only": ("mutation: a mask of one head", "other heads see everything"),
        "window_keeps_the_first_token": ("mutation: a sink nobody asked for", "the first token is always seen"),
        "window_in_blocks": ("mutation: the window's start rounded down", "windows begin at even rows"),
        "window_only_with_a_mask": ("jax#32300", "without a mask there is no window"),
        "window_of_one_ignored": ("mutation: if left for if left is not None", "a window of one token is none"),
    },
    "window-reaches": {
        "window_one_narrower": ("mutation: < for <=", "W - 1 tokens are seen"),
        "window_halved": ("mutation: half of it on each side", "half of the window is seen"),
    },
    "left-padding-changes-nothing": {
        "mask_of_the_first_rows": ("mutation: a mask cut at its end", "kept rows have the mask of evicted ones"),
        "mask_dropped_after_eviction": ("mutation: a mask that fits no more", "after an eviction padding is seen"),
    },
    "reorder-moves-rows": {
        "reorder_forgets_what_was_evicted": ("mutation: rows counted for tokens", "positions count the kept rows"),
    },
    "crop-rolls-back": {
        "crop_to_what_was_evicted": ("mutation: a crop that cannot be", "rows that were evicted do not come back"),
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
