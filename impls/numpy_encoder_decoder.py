"""The encoder-decoder token by token, in plain NumPy: the memory is computed once, the target's rows are kept.

"with_memory" joins old and new rows anew in every step, so that old caches stay valid;
"with_memory_static" writes into buffers that are doubled when they are full. bfloat16 and float16 are
computed in float32 and rounded at the end.
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
FIRST_ROWS = 4
"""Rows of a static buffer before it is first doubled."""


@dataclass(frozen=True)
class Memory:
    """All that the decoder asks of a source: keys and values for each of its layers, and which tokens are real."""

    layers: tuple[KV, ...]
    mask: NDArray | None
    batch: int


@dataclass(frozen=True)
class Cache:
    """Keys and values of the target so far, in each layer; how many tokens, of what batch."""

    layers: tuple[KV, ...]
    length: int
    batch: int


@dataclass(frozen=True)
class EncoderDecoder:
    """The model made of weights."""

    params: Params
    heads: int
    norm: str
    alpha: tuple[float, float]
    positions: str | None
    dtype: Any
    static: bool

    @property
    def vocabulary(self) -> int:
        """V, that of the target."""
        return int(self.params["target_embedding"].shape[0])

    def encode(self, source: NDArray, mask: NDArray | None = None) -> Memory:
        """What the decoder will ask of the source.

        source[B,S], mask[B,S] or None (True = a real token) -> the memory
        k = encoder(embed(source)) wk + bk and v likewise, for each layer of the decoder
        Source: Vaswani et al. 2017, sections 3.1 and 3.2.3.
        Raises ValueError for tokens that are none, and for a mask that does not fit them.
        """
        self._check("source", source, self.params["source_embedding"])
        if mask is not None and (mask.shape != source.shape or mask.dtype != bool):
            raise ValueError(f"mask: got {mask.dtype} of shape {mask.shape}, wanted booleans, {source.shape}")
        side, hidden = self.params["encoder"], None if mask is None else mask[:, None, None]
        x = self._embedded(source, "source_embedding", 0)
        for layer in side["layers"]:
            x = self._residual(
                x, layer["norm1"], 0, lambda y, w=layer["attention"]: self._self_attention(y, w, None, hidden)[0]
            )
            x = self._residual(x, layer["norm2"], 0, lambda y, w=layer["feed_forward"]: _feed_forward(y, w))
        x = _normed(x, side["norm"]) if "norm" in side else x
        layers = (layer["cross_attention"] for layer in self.params["decoder"]["layers"])
        return Memory(tuple(self._keys_values(x, w) for w in layers), mask, len(source))

    def full(self, source: NDArray, target: NDArray, mask: NDArray | None = None) -> NDArray:
        """What may come after each token of the target, given those up to it and all of the source.

        source[B,S], target[B,T], mask[B,S] or None -> logits[B,T,V]
        decoder(embed(target), encoder(embed(source))) w + b
        Source: Vaswani et al. 2017, section 3.
        Raises ValueError as encode does.
        """
        return self.step(target, self.encode(source, mask), None)[0]

    def step(self, tokens: NDArray, memory: Memory, cache: Cache | None) -> tuple[NDArray, Cache]:
        """The same for new tokens of the target after those in the cache.

        tokens[B,m] -> logits[B,m,V], the cache
        Source: Pope et al. 2022, section 2.1.
        Raises ValueError for tokens that are none, and for a memory or cache of another batch.
        """
        self._check("tokens", tokens, self.params["target_embedding"])
        for name, batch in (("memory", memory.batch), ("cache", len(tokens) if cache is None else cache.batch)):
            if batch != len(tokens):
                raise ValueError(f"tokens: got {len(tokens)} rows, wanted {batch}, as in the {name}")
        length, side, layers = (0 if cache is None else cache.length), self.params["decoder"], []
        x = self._embedded(tokens, "target_embedding", length)
        for number, layer in enumerate(side["layers"]):
            kept = None if cache is None else cache.layers[number]
            x, kept = self._decoder_layer(x, layer, memory.layers[number], memory.mask, kept, length)
            layers.append(kept)
        x = _normed(x, side["norm"]) if "norm" in side else x
        head = self.params.get("head", {"w": self.params["target_embedding"].T})
        logits = (x @ head["w"] + head.get("b", 0)).astype(self.dtype)
        return logits, Cache(tuple(layers), length + tokens.shape[1], len(tokens))

    def crop(self, cache: Cache | None, length: int) -> Cache | None:
        """The cache as it was after its first `length` tokens. Raises ValueError where there were fewer."""
        had = 0 if cache is None else cache.length
        if not 0 <= length <= had:
            raise ValueError(f"crop: length: got {length}, wanted 0 to {had}, the tokens of the cache")
        if cache is None or self.static:
            return cache and replace(cache, length=length)
        return Cache(tuple((k[:, :, :length], v[:, :, :length]) for k, v in cache.layers), length, cache.batch)

    def reorder(self, cache: Any, rows: NDArray) -> Any:
        """The cache or memory whose batch row i is row rows[i] of the given one.

        Raises ValueError for rows that are not there.
        """
        if cache is None:
            return None
        rows = np.asarray(rows)
        if rows.ndim != 1 or not ((rows >= 0) & (rows < cache.batch)).all():
            raise ValueError(f"reorder: rows: got {rows.tolist()}, wanted numbers from 0 to {cache.batch - 1}")
        layers = tuple((k[rows], v[rows]) for k, v in cache.layers)
        if isinstance(cache, Memory):
            return Memory(layers, None if cache.mask is None else cache.mask[rows], len(rows))
        return Cache(layers, cache.length, len(rows))

    def _check(self, name: str, tokens: NDArray, table: NDArray) -> None:
        if tokens.ndim != 2 or not np.issubdtype(tokens.dtype, np.integer):
            raise ValueError(f"{name}: got {tokens.dtype} of shape {tokens.shape}, wanted whole numbers, [batch, time]")
        if not ((tokens >= 0) & (tokens < len(table))).all():
            raise ValueError(f"{name}: got one outside the vocabulary, wanted 0 to {len(table) - 1}")

    def _embedded(self, tokens: NDArray, table: str, start: int) -> NDArray:
        """Rows of a table, times its scale; plus sinusoids from position start on, if they are the positions."""
        x = self.params[table][tokens] * self.params.get("embedding_scale", 1)
        if self.positions != "sinusoidal":
            return x
        return x + _sinusoids(start + np.arange(tokens.shape[1]), x.shape[-1]).astype(x.dtype)

    def _residual(self, x: NDArray, norm: Params, side: int, sublayer: Callable[[NDArray], NDArray]) -> NDArray:
        """A sublayer beside its residual, the norm before or after it; side 0 is the encoder, 1 the decoder."""
        if self.norm == "pre":
            return x + sublayer(_normed(x, norm))
        return _normed(self.alpha[side] * x + sublayer(x), norm)

    def _decoder_layer(
        self, x: NDArray, layer: Params, memory: KV, mask: NDArray | None, kept: KV | None, length: int
    ) -> tuple[NDArray, KV]:
        """Self-attention, attention to the memory, feed-forward; what to keep of this layer."""
        found: list[KV] = []

        def seeing_itself(y: NDArray) -> NDArray:
            y, now = self._self_attention(y, layer["attention"], (kept, length), None)
            found.append(now)
            return y

        def seeing_memory(y: NDArray) -> NDArray:
            w, visible = layer["cross_attention"], np.ones((1, 1, 1, memory[0].shape[2]), bool)
            q = _split(_linear(y, w, "q"), self.heads)
            return self._mixed(q, memory, w, visible if mask is None else mask[:, None, None], None)

        x = self._residual(x, layer["norm1"], 1, seeing_itself)
        x = self._residual(x, layer["norm2"], 1, seeing_memory)
        return self._residual(x, layer["norm3"], 1, lambda y: _feed_forward(y, layer["feed_forward"])), found[0]

    def _self_attention(
        self, x: NDArray, w: Params, past: tuple[KV | None, int] | None, mask: NDArray | None
    ) -> tuple[NDArray, KV]:
        """Of tokens that stand after the past, causal unless that is None (the encoder's); what to keep."""
        kept, length = past or (None, 0)
        at, q = length + np.arange(x.shape[1]), _split(_linear(x, w, "q"), self.heads)
        k, v = self._keys_values(x, w)
        if self.positions == "rotary":
            q, k = _turned(q, at), _turned(k, at)
        rows, kept = self._joined(kept, (k, v), length) if past else ((k, v), None)
        behind = at[:, None] - np.arange(rows[0].shape[2])
        visible = (behind >= 0 if past else np.ones_like(behind, bool))[None, None]
        bias = -_slopes(self.heads)[:, None, None] * np.abs(behind) if self.positions == "alibi" else None
        return self._mixed(q, rows, w, visible if mask is None else visible & mask, bias), kept

    def _joined(self, kept: KV | None, new: KV, length: int) -> tuple[KV, KV]:
        """All rows of the target so far, and what to keep."""
        if not self.static:
            rows = new if kept is None else tuple(np.concatenate(pair, 2) for pair in zip(kept, new, strict=True))
            return rows, rows
        total = length + new[0].shape[2]
        buffers = kept or tuple(np.empty((*a.shape[:2], max(FIRST_ROWS, total), a.shape[3]), a.dtype) for a in new)
        while buffers[0].shape[2] < total:
            buffers = tuple(np.concatenate([buffer, np.empty_like(buffer)], 2) for buffer in buffers)
        for buffer, a in zip(buffers, new, strict=True):
            buffer[:, :, length:total] = a
        return tuple(buffer[:, :, :total] for buffer in buffers), buffers

    def _keys_values(self, x: NDArray, w: Params) -> KV:
        """k[B,G,T,D] and v[B,G,T,Dv] of x[B,T,d]."""
        groups = w["wk"].shape[1] * self.heads // w["wq"].shape[1]
        return _split(_linear(x, w, "k"), groups), _split(_linear(x, w, "v"), groups)

    def _mixed(self, q: NDArray, kv: KV, w: Params, visible: NDArray, bias: NDArray | None) -> NDArray:
        """Attention of q[B,H,T,D] over rows of keys and values, joined and projected."""
        k, v = (np.repeat(a, self.heads // a.shape[1], 1) for a in kv)
        s = q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5
        s = s if bias is None else s + bias.astype(s.dtype)
        mixed = (_softmax(np.where(visible, s, -np.inf)) @ v).swapaxes(1, 2)
        return _linear(mixed.reshape(*mixed.shape[:2], -1), w, "o")


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
    """x[B,heads,T,D], channels j and j + D/2 of row t turned by at[t] * 10000^(-2j/D)."""
    half = x.shape[-1] // 2
    angle = at[:, None] * 10000.0 ** (-np.arange(half) / half)
    cos, sin = np.cos(angle).astype(x.dtype), np.sin(angle).astype(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def _sinusoids(at: NDArray, width: int) -> NDArray:
    """[T] -> [T,width]: the sine of position * 10000^(-2i/width) in channel 2i, its cosine in 2i + 1."""
    channel = np.arange(width)
    angle = at[:, None] * 10000.0 ** (-(channel - channel % 2) / width)
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


def _make(static: bool) -> Callable[..., EncoderDecoder]:
    def encoder_decoder(
        params: Params, *, heads: int, norm: str = "post", alpha: Any = 1.0, positions: str | None = "sinusoidal"
    ) -> EncoderDecoder:
        """The model of these weights.

        params: transformer; alpha: a number, or a pair (encoder, decoder)
        Raises ValueError for a norm or positions that it does not know.
        """
        if norm not in ("pre", "post") or positions not in (None, "sinusoidal", "rotary", "alibi"):
            raise ValueError(f"encoder_decoder: got norm {norm!r} and positions {positions!r}")
        factors = tuple(alpha) if isinstance(alpha, (tuple, list)) else (alpha, alpha)
        dtype = np.asarray(params["target_embedding"]).dtype
        return EncoderDecoder(_wide(params), heads, norm, factors, positions, dtype, static)

    return encoder_decoder


VARIANTS = {"with_memory": {"encoder_decoder": _make(False)}, "with_memory_static": {"encoder_decoder": _make(True)}}
_COMMON = Capabilities(
    dtypes=DTYPES, intermediate={"float64": "float64", "default": "float32"}, rounds_probabilities=False
)
CAPABILITIES = {
    "with_memory": {"encoder_decoder": replace(_COMMON, cache="persistent")},
    "with_memory_static": {"encoder_decoder": _COMMON},
}
