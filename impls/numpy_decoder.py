"""A decoder-only model with a cache, in plain NumPy, keeping keys and values in three ways.

"decoder_growing" joins old and new rows anew in every step, so that old caches stay valid. "decoder_static"
writes into buffers, of the capacity if there is one, else doubled when they are full. "decoder_rolling" forgets
between steps what its window will never see again, and so has no crop. bfloat16 and float16 are computed in
float32 and rounded at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veriformer.declarations import DTYPES, Capabilities

FRAMEWORK = "numpy"
Params = Mapping[str, Any]
KV = tuple[NDArray, NDArray]
Window = tuple[int | None, int | None]
FIRST_ROWS = 4
"""Rows of a static buffer without a capacity, before it is first doubled."""


@dataclass(frozen=True)
class Cache:
    """What is left of the tokens so far: keys and values of every layer; how many tokens there were, of what batch."""

    layers: tuple[KV, ...]
    length: int
    batch: int


Keep = Callable[["Decoder", KV | None, KV, int], tuple[KV, KV]]
"""(model, what was kept, new rows, tokens before) -> the rows to look at, what to keep."""


@dataclass(frozen=True)
class _Now:
    """Of one call: tokens before it, position numbers of its own, its mask, how to keep rows."""

    length: int
    at: NDArray
    mask: NDArray | None
    keep: Keep


@dataclass(frozen=True)
class Decoder:
    """The model made of weights; keep says how rows are kept from step to step."""

    params: Params
    heads: int
    norm: str
    alpha: float
    left: int | None
    positions: str | None
    max_length: int | None
    dtype: Any
    keep: Keep

    @property
    def vocabulary(self) -> int:
        """V."""
        return int(self.params["embedding"].shape[0])

    @property
    def window(self) -> int | None:
        """How many tokens a token sees in one layer, itself among them; None: all before it."""
        return None if self.left is None else self.left + 1

    def full(self, tokens: NDArray) -> NDArray:
        """What may come after each token, given those up to it.

        tokens[B,T] -> logits[B,T,V]
        stack(embed(tokens)) w + b, causal
        Source: Radford et al. 2019, section 2.3.
        Raises ValueError for tokens that are none, and for more of them than max_length.
        """
        self._check(tokens, 0)
        return self._logits(tokens, None, None, None, _keep_nothing)[0]

    def step(
        self, tokens: NDArray, cache: Cache | None, *, mask: NDArray | None = None, positions: NDArray | None = None
    ) -> tuple[NDArray, Cache]:
        """The same for new tokens after those in the cache.

        tokens[B,m], mask[B,L+m] and positions[B,m] or None -> logits[B,m,V], the cache
        False in the mask hides a token from all; positions count on from L, the tokens before, by default
        Source: Pope et al. 2022, section 2.1.
        Raises ValueError as full does, and for arrays that do not fit the cache or one another.
        """
        length = 0 if cache is None else cache.length
        self._check(tokens, length)
        _check_shapes(tokens, cache, length, mask, positions)
        return self._logits(tokens, cache, mask, positions, self.keep)

    def reorder(self, cache: Cache | None, rows: NDArray) -> Cache | None:
        """The cache whose batch row i is row rows[i] of the given one; rows may repeat or be left out.

        Source: Sutskever et al. 2014, section 3.2 (beam search).
        Raises ValueError for rows that are not there.
        """
        rows = np.asarray(rows)
        if cache is None:
            return None
        if rows.ndim != 1 or not np.issubdtype(rows.dtype, np.integer) or not _within(rows, cache.batch):
            raise ValueError(f"reorder: rows: got {rows.tolist()}, wanted numbers from 0 to {cache.batch - 1}")
        return Cache(tuple((k[rows], v[rows]) for k, v in cache.layers), cache.length, len(rows))

    def _check(self, tokens: NDArray, length: int) -> None:
        if tokens.ndim != 2 or not np.issubdtype(tokens.dtype, np.integer):
            raise ValueError(f"tokens: got {tokens.dtype} of shape {tokens.shape}, wanted whole numbers, [batch, time]")
        if not _within(tokens, self.vocabulary):
            raise ValueError(f"tokens: got one outside the vocabulary, wanted 0 to {self.vocabulary - 1}")
        if self.max_length is not None and length + tokens.shape[1] > self.max_length:
            raise ValueError(
                f"tokens: got {tokens.shape[1]} after {length}, wanted at most {self.max_length}, max_length"
            )

    def _logits(
        self, tokens: NDArray, cache: Cache | None, mask: NDArray | None, positions: NDArray | None, keep: Keep
    ) -> tuple[NDArray, Cache]:
        """The whole model; logits in the dtype of the weights."""
        length, new = (0 if cache is None else cache.length), tokens.shape[1]
        at = np.broadcast_to(length + np.arange(new), tokens.shape) if positions is None else positions
        x = self.params["embedding"][tokens] * self.params.get("embedding_scale", 1)
        if self.positions == "sinusoidal":
            x = x + _sinusoids(at, x.shape[-1]).astype(x.dtype)
        now, layers = _Now(length, at, mask, keep), []
        for number, layer in enumerate(self.params["layers"]):
            x, kept = self._layer(x, layer, None if cache is None else cache.layers[number], now)
            layers.append(kept)
        x = _normed(x, self.params["norm"]) if "norm" in self.params else x
        head = self.params.get("head", {"w": self.params["embedding"].T})
        logits = (x @ head["w"] + head.get("b", 0)).astype(self.dtype)
        return logits, Cache(tuple(layers), length + new, len(tokens))

    def _layer(self, x: NDArray, layer: Params, kept: KV | None, now: _Now) -> tuple[NDArray, KV]:
        """Attention and feed-forward, each beside its residual, with the norm before or after; what to keep."""
        pre = self.norm == "pre"
        q, k, v = self._projected(_normed(x, layer["norm1"]) if pre else x, layer["attention"], now.at)
        rows, kept = now.keep(self, kept, (k, v), now.length)
        y = self._attend(q, *rows, layer["attention"], now)
        x = x + y if pre else _normed(self.alpha * x + y, layer["norm1"])
        y = _feed_forward(_normed(x, layer["norm2"]) if pre else x, layer["feed_forward"])
        return (x + y if pre else _normed(self.alpha * x + y, layer["norm2"])), kept

    def _projected(self, x: NDArray, w: Params, at: NDArray) -> tuple[NDArray, NDArray, NDArray]:
        """q[B,H,m,D], k[B,G,m,D] and v[B,G,m,Dv], the first two turned by their positions if rotary."""
        width = w["wq"].shape[1] // self.heads
        groups = w["wk"].shape[1] // width
        q, k, v = (
            _split(_linear(x, w, name), count) for name, count in (("q", self.heads), ("k", groups), ("v", groups))
        )
        return (_turned(q, at), _turned(k, at), v) if self.positions == "rotary" else (q, k, v)

    def _attend(self, q: NDArray, k: NDArray, v: NDArray, w: Params, now: _Now) -> NDArray:
        """Attention of the new queries over the last rows up to their own, joined and projected."""
        total = now.length + q.shape[2]
        row = np.arange(total - k.shape[2], total)
        behind = (now.length + np.arange(q.shape[2]))[:, None] - row
        visible = behind >= 0 if self.left is None else (behind >= 0) & (behind <= self.left)
        visible = visible[None, None] if now.mask is None else visible & now.mask[:, None, None, row]
        k, v = (np.repeat(a, self.heads // k.shape[1], 1) for a in (k, v))
        s = q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5
        if self.positions == "alibi":
            s = s - (_slopes(self.heads)[:, None, None] * behind).astype(s.dtype)
        mixed = (_softmax(np.where(visible, s, -np.inf)) @ v).swapaxes(1, 2)
        return _linear(mixed.reshape(*mixed.shape[:2], -1), w, "o")


class CroppingDecoder(Decoder):
    """A decoder that keeps every row, and so can go back to any earlier state."""

    def crop(self, cache: Cache | None, length: int) -> Cache | None:
        """The cache as it was after its first `length` tokens.

        Source: Leviathan et al. 2023, algorithm 1, which rolls back rejected tokens.
        Raises ValueError where there were fewer.
        """
        had = 0 if cache is None else cache.length
        if not 0 <= length <= had:
            raise ValueError(f"crop: length: got {length}, wanted 0 to {had}, the tokens of the cache")
        if cache is None or self.keep is _keep_in_buffers:
            return cache and replace(cache, length=length)
        cut = tuple((k[:, :, :length], v[:, :, :length]) for k, v in cache.layers)
        return replace(cache, layers=cut, length=length)


def _keep_nothing(model: Decoder, kept: KV | None, new: KV, length: int) -> tuple[KV, KV]:
    return new, new


def _keep_joined(model: Decoder, kept: KV | None, new: KV, length: int) -> tuple[KV, KV]:
    """All rows, in new arrays."""
    rows = new if kept is None else tuple(np.concatenate(pair, 2) for pair in zip(kept, new, strict=True))
    return rows, rows


def _keep_window(model: Decoder, kept: KV | None, new: KV, length: int) -> tuple[KV, KV]:
    """All rows to look at, as the first of a chunk sees rows that the last one does not; then those the next sees."""
    rows, _ = _keep_joined(model, kept, new, length)
    start = 0 if model.left is None else max(0, rows[0].shape[2] - model.left)
    return rows, tuple(a[:, :, start:] for a in rows)


def _keep_in_buffers(model: Decoder, kept: KV | None, new: KV, length: int) -> tuple[KV, KV]:
    """Rows written behind the valid ones into buffers, which grow where no capacity is given."""
    total = length + new[0].shape[2]
    buffers = tuple(_with_room(kept and kept[i], a, length, total, model.max_length) for i, a in enumerate(new))
    for buffer, a in zip(buffers, new, strict=True):
        buffer[:, :, length:total] = a
    return tuple(buffer[:, :, :total] for buffer in buffers), buffers


def _with_room(buffer: NDArray | None, new: NDArray, length: int, total: int, capacity: int | None) -> NDArray:
    """The buffer [B,G,C,width], or a larger one that holds the same valid rows."""
    if buffer is not None and buffer.shape[2] >= total:
        return buffer
    room = FIRST_ROWS if buffer is None else 2 * buffer.shape[2]
    larger = np.empty((*new.shape[:2], max(room, total) if capacity is None else capacity, new.shape[3]), new.dtype)
    if buffer is not None:
        larger[:, :, :length] = buffer[:, :, :length]
    return larger


def _check_shapes(
    tokens: NDArray, cache: Cache | None, length: int, mask: NDArray | None, positions: NDArray | None
) -> None:
    """ValueError for what would broadcast or be cut into a wrong answer without a word."""
    batch, new = tokens.shape
    if cache is not None and cache.batch != batch:
        raise ValueError(f"tokens: got {batch} rows, wanted {cache.batch}, as in the cache")
    if mask is not None and (mask.shape != (batch, length + new) or mask.dtype != bool):
        raise ValueError(f"mask: got {mask.dtype} of shape {mask.shape}, wanted booleans, {(batch, length + new)}")
    if positions is not None and positions.shape != (batch, new):
        raise ValueError(f"positions: got shape {positions.shape}, wanted {(batch, new)}, one for each token")


def _within(numbers: NDArray, end: int) -> bool:
    return bool(((numbers >= 0) & (numbers < end)).all())


def _feed_forward(x: NDArray, w: Params) -> NDArray:
    return np.maximum(x @ w["w1"] + w.get("b1", 0), 0) @ w["w2"] + w.get("b2", 0)


def _normed(x: NDArray, w: Params) -> NDArray:
    """Layer norm where there is a bias, else the norm by the root mean square."""
    if "bias" not in w:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * w["weight"]
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w["weight"] + w["bias"]


def _linear(x: NDArray, w: Params, name: str) -> NDArray:
    return x @ w["w" + name] + w.get("b" + name, 0)


def _split(x: NDArray, heads: int) -> NDArray:
    """[B,T,heads*D] -> [B,heads,T,D]."""
    return x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)


def _turned(x: NDArray, at: NDArray) -> NDArray:
    """x[B,heads,T,D], channels j and j + D/2 turned by position * 10000^(-2j/D)."""
    half = x.shape[-1] // 2
    angle = at[:, None, :, None] * 10000.0 ** (-np.arange(half) / half)
    cos, sin = np.cos(angle).astype(x.dtype), np.sin(angle).astype(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def _sinusoids(at: NDArray, width: int) -> NDArray:
    """[B,T] -> [B,T,width]: the sine of position * 10000^(-2i/width) in channel 2i, its cosine in 2i + 1."""
    channel = np.arange(width)
    angle = at[..., None] * 10000.0 ** (-(channel - channel % 2) / width)
    return np.where(channel % 2, np.cos(angle), np.sin(angle))


def _slopes(heads: int) -> NDArray:
    """[H]: 2^(-8h/H), h from 1; between two powers of two, those of the lower and every second of the upper."""
    lower = 1 << heads.bit_length() - 1
    first = 2.0 ** (-8 * np.arange(1, lower + 1) / lower)
    return np.concatenate([first, 2.0 ** (-4 * np.arange(1, 2 * lower, 2) / lower)])[:heads]


def _softmax(s: NDArray) -> NDArray:
    """Over the last axis; a row of -inf alone gives zeros."""
    top = s.max(-1, keepdims=True, initial=-np.inf)
    e = np.exp(s - np.where(np.isneginf(top), 0, top))
    total = e.sum(-1, keepdims=True)
    return e / np.where(total == 0, 1, total)


def _wide(tree: Any) -> Any:
    """Every array of the weights in float32, or float64 where it is that."""
    if isinstance(tree, Mapping):
        return {name: _wide(part) for name, part in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [_wide(part) for part in tree]
    return np.asarray(tree, np.float64 if np.asarray(tree).dtype == np.float64 else np.float32)


def _make(keep: Keep) -> Callable[..., Decoder]:
    def decoder_lm(
        params: Params, *, heads: int, norm: str = "pre", alpha: float = 1.0, window: Window | None = None,
        positions: str | None = "rotary", max_length: int | None = None,
    ) -> Decoder:  # fmt: skip
        """The model of these weights.

        params: decoder_lm; window: (rows before a token that it sees, None or 0)
        Raises ValueError for a norm, positions or a window that it does not know.
        """
        if norm not in ("pre", "post") or positions not in (None, "sinusoidal", "rotary", "alibi"):
            raise ValueError(f"decoder_lm: got norm {norm!r} and positions {positions!r}")
        left = None if window is None else window[0]
        if left is not None and left < 0:
            raise ValueError(f"decoder_lm: window: got {window}, wanted a number of rows >= 0")
        dtype = np.asarray(params["embedding"]).dtype
        made = Decoder if keep is _keep_window else CroppingDecoder
        return made(_wide(params), heads, norm, alpha, left, positions, max_length, dtype, keep)

    return decoder_lm


VARIANTS = {
    "decoder_growing": {"decoder_lm": _make(_keep_joined)},
    "decoder_static": {"decoder_lm": _make(_keep_in_buffers)},
    "decoder_rolling": {"decoder_lm": _make(_keep_window)},
}
_COMMON = Capabilities(
    dtypes=DTYPES, intermediate={"float64": "float64", "default": "float32"}, rounds_probabilities=False
)
CAPABILITIES = {
    "decoder_growing": {"decoder_lm": replace(_COMMON, cache="persistent")},
    "decoder_static": {"decoder_lm": _COMMON},
    "decoder_rolling": {"decoder_lm": replace(_COMMON, cache="persistent")},
}
