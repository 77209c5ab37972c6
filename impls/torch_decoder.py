"""torch: a decoder-only model around scaled_dot_product_attention, with packed projections and grouped heads.

"decoder_growing" joins old and new rows anew in every step, so that old caches stay valid. "decoder_static" appends
in place to tensors of the whole capacity, or of FIRST_ROWS rows that are doubled where no capacity is given.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from veriformer.declarations import Capabilities

FRAMEWORK = "torch"
Params = Mapping[str, Any]
Window = tuple[int | None, int | None]
FIRST_ROWS = 4


@dataclass(frozen=True)
class Cache:
    """Every layer's keys and values; the first `length` rows are tokens, what follows is free."""

    layers: list[tuple[Tensor, Tensor]]
    length: int
    batch: int


@dataclass(frozen=True)
class Layer:
    """Weights of one layer as they are used: [out, in], the three projections in one."""

    packed: tuple[Tensor, Tensor | None]
    out: tuple[Tensor, Tensor | None]
    inner: tuple[tuple[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]
    norms: tuple[Params, Params]
    cuts: tuple[int, int, int]


class DecoderLM:
    """The model of given weights, of which it keeps copies."""

    def __init__(
        self, params: Params, heads: int, norm: str, alpha: float, left: int | None, positions: str | None,
        max_length: int | None, static: bool,
    ) -> None:  # fmt: skip
        self.heads, self.pre, self.alpha, self.left, self.positions = heads, norm == "pre", alpha, left, positions
        self.max_length, self.window, self.static = max_length, None if left is None else left + 1, static
        self.table, self.scale = params["embedding"], float(params.get("embedding_scale", 1.0))
        self.vocabulary, self.dtype = len(self.table), self.table.dtype
        self.layers, self.norm = [_packed(layer) for layer in params["layers"]], params.get("norm")
        head = params.get("head")
        self.head = (self.table, None) if head is None else (head["w"].T, head.get("b"))

    @torch.no_grad()
    def full(self, tokens: Tensor) -> Tensor:
        """What may come after each token, given those up to it.

        tokens[B,T] -> logits[B,T,V]
        stack(embed(tokens)) w + b, causal
        Source: Radford et al. 2019, section 2.3.
        Raises ValueError for tokens that are none, and for more of them than max_length.
        """
        self._check(tokens, 0)
        return self._run(tokens, 0, None, None, lambda number, k, v: (k, v))

    @torch.no_grad()
    def step(
        self, tokens: Tensor, cache: Cache | None, *, mask: Tensor | None = None, positions: Tensor | None = None
    ) -> tuple[Tensor, Cache]:
        """The same for new tokens after those in the cache.

        tokens[B,m], mask[B,L+m] and positions[B,m] or None -> logits[B,m,V], the cache
        False in the mask hides a token from all; positions count on from L, the tokens before, by default
        Source: Pope et al. 2022, section 2.1.
        Raises ValueError as full does, and for tensors that do not fit the cache or one another.
        """
        length, (batch, new) = (0 if cache is None else cache.length), tokens.shape
        self._check(tokens, length)
        for name, tensor, shape in (("mask", mask, (batch, length + new)), ("positions", positions, (batch, new))):
            if tensor is not None and tensor.shape != shape:
                raise ValueError(f"{name}: got shape {list(tensor.shape)}, wanted {list(shape)}")
        if cache is not None and cache.batch != batch:
            raise ValueError(f"tokens: got {batch} rows, wanted {cache.batch}, as in the cache")
        layers: list[tuple[Tensor, Tensor]] = []

        def keep(number: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            old = None if cache is None else cache.layers[number]
            kept = self._appended(old, (k, v), length) if self.static else _joined(old, (k, v))
            layers.append(kept)
            return kept[0][:, :, : length + new], kept[1][:, :, : length + new]

        logits = self._run(tokens, length, mask, positions, keep)
        return logits, Cache(layers, length + new, batch)

    def crop(self, cache: Cache | None, length: int) -> Cache | None:
        """The cache as it was after its first `length` tokens. Raises ValueError where there were fewer."""
        had = 0 if cache is None else cache.length
        if not 0 <= length <= had:
            raise ValueError(f"crop: length: got {length}, wanted 0 to {had}, the tokens of the cache")
        if cache is None or self.static:
            return cache and Cache(cache.layers, length, cache.batch)
        return Cache([(k[:, :, :length], v[:, :, :length]) for k, v in cache.layers], length, cache.batch)

    def reorder(self, cache: Cache | None, rows: Any) -> Cache | None:
        """The cache whose batch row i is row rows[i] of the given one. Raises ValueError for rows not there."""
        rows = torch.as_tensor(rows, device=self.table.device)
        if cache is None:
            return None
        if rows.ndim != 1 or bool(((rows < 0) | (rows >= cache.batch)).any()):
            raise ValueError(f"reorder: rows: got {rows.tolist()}, wanted numbers from 0 to {cache.batch - 1}")
        layers = [(k.index_select(0, rows), v.index_select(0, rows)) for k, v in cache.layers]
        return Cache(layers, cache.length, len(rows))

    def _check(self, tokens: Tensor, length: int) -> None:
        if tokens.ndim != 2 or tokens.is_floating_point():
            raise ValueError(
                f"tokens: got {tokens.dtype} of shape {list(tokens.shape)}, wanted integers, [batch, time]"
            )
        if bool(((tokens < 0) | (tokens >= self.vocabulary)).any()):
            raise ValueError(f"tokens: got one outside the vocabulary, wanted 0 to {self.vocabulary - 1}")
        if self.max_length is not None and length + tokens.shape[1] > self.max_length:
            raise ValueError(
                f"tokens: got {tokens.shape[1]} after {length}, wanted at most {self.max_length}, max_length"
            )

    def _run(
        self, tokens: Tensor, length: int, mask: Tensor | None, positions: Tensor | None,
        keep: Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]],
    ) -> Tensor:  # fmt: skip
        """The whole model; keep(layer, k, v) gives the rows to look at."""
        new = tokens.shape[1]
        at = length + torch.arange(new, device=tokens.device) if positions is None else positions
        at = at.expand(tokens.shape)
        x = F.embedding(tokens, self.table) * self.scale
        if self.positions == "sinusoidal":
            x = x + _sinusoids(at, x.shape[-1]).to(x.dtype)
        visible = self._visible(new, length, mask, tokens.device)
        turn = _rotation(at, self.layers[0].cuts[0] // self.heads, x.dtype) if self.positions == "rotary" else None
        for number, layer in enumerate(self.layers):
            y = self._attention(x if not self.pre else _normed(x, layer.norms[0]), layer, number, visible, turn, keep)
            x = x + y if self.pre else _normed(self.alpha * x + y, layer.norms[0])
            first, second = layer.inner
            y = F.linear(F.relu(F.linear(x if not self.pre else _normed(x, layer.norms[1]), *first)), *second)
            x = x + y if self.pre else _normed(self.alpha * x + y, layer.norms[1])
        return F.linear(x if self.norm is None else _normed(x, self.norm), *self.head)

    def _attention(
        self, x: Tensor, layer: Layer, number: int, visible: Tensor | None, turn: tuple[Tensor, Tensor] | None,
        keep: Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]],
    ) -> Tensor:  # fmt: skip
        """x[B,m,d] -> [B,m,d]; visible: mask or bias, None for the plain triangle of a square."""
        q, k, v = F.linear(x, *layer.packed).split(layer.cuts, -1)
        groups = layer.cuts[1] * self.heads // layer.cuts[0]
        q, k, v = (a.unflatten(-1, (n, -1)).transpose(1, 2) for a, n in ((q, self.heads), (k, groups), (v, groups)))
        if turn is not None:
            q, k = _turned(q, *turn), _turned(k, *turn)
        k, v = keep(number, k, v)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=visible, is_causal=visible is None, enable_gqa=groups < self.heads
        )
        return F.linear(out.transpose(1, 2).flatten(2), *layer.out)

    def _visible(self, new: int, length: int, mask: Tensor | None, device: torch.device) -> Tensor | None:
        """[B,1,m,L+m] of booleans, or with alibi [B,H,m,L+m] of numbers to add; None where is_causal says it all."""
        if length == 0 and mask is None and self.left is None and self.positions != "alibi":
            return None
        rows = torch.arange(length + new, device=device)
        behind = rows[length:, None] - rows
        visible = (behind >= 0) & (behind <= (length + new if self.left is None else self.left))
        visible = visible[None, None] if mask is None else visible & mask[:, None, None]
        if self.positions != "alibi":
            return visible
        bias = -torch.tensor(_slopes(self.heads), dtype=torch.float64, device=device)[:, None, None] * behind
        return bias.to(self.dtype).expand(len(visible), -1, -1, -1).masked_fill(~visible, float("-inf"))

    def _appended(
        self, old: tuple[Tensor, Tensor] | None, new: tuple[Tensor, Tensor], length: int
    ) -> tuple[Tensor, Tensor]:
        """The cache of a layer after new rows were written behind the valid ones, in place where there is room."""
        total, kept = length + new[0].shape[2], list(old or ())
        if old is None or old[0].shape[2] < total:
            room = self.max_length or max(total, FIRST_ROWS if old is None else 2 * old[0].shape[2])
            kept = [a.new_empty((*a.shape[:2], room, a.shape[3])) for a in new]
            for buffer, rows in zip(kept, old or (), strict=False):
                buffer[:, :, :length] = rows[:, :, :length]
        for buffer, rows in zip(kept, new, strict=True):
            buffer[:, :, length:total] = rows
        return kept[0], kept[1]


def _joined(old: tuple[Tensor, Tensor] | None, new: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return new if old is None else (torch.cat([old[0], new[0]], 2), torch.cat([old[1], new[1]], 2))


def _packed(layer: Params) -> Layer:
    """One layer's weights as they are used."""
    w, inner = layer["attention"], layer["feed_forward"]
    biases = [w.get(name) for name in ("bq", "bk", "bv")]
    matrices = [w[name] for name in ("wq", "wk", "wv")]
    if all(bias is None for bias in biases):
        bias = None
    else:
        bias = torch.cat([m.new_zeros(m.shape[1]) if b is None else b for b, m in zip(biases, matrices, strict=True)])
    return Layer(
        (torch.cat(matrices, 1).T.contiguous(), bias),
        (w["wo"].T, w.get("bo")),
        ((inner["w1"].T, inner.get("b1")), (inner["w2"].T, inner.get("b2"))),
        (layer["norm1"], layer["norm2"]),
        (matrices[0].shape[1], matrices[1].shape[1], matrices[2].shape[1]),
    )


def _normed(x: Tensor, w: Params) -> Tensor:
    """Layer norm where there is a bias, else the norm by the root mean square."""
    if "bias" in w:
        return F.layer_norm(x, x.shape[-1:], w["weight"], w["bias"], 1e-5)
    return F.rms_norm(x, x.shape[-1:], w["weight"], 1e-6)


def _rotation(at: Tensor, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of position * 10000^(-2j/width), [B,1,T,width/2]; angles in float64."""
    j = torch.arange(width // 2, device=at.device, dtype=torch.float64)
    angle = at[:, None, :, None] * 10000.0 ** (-2 * j / width)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x[B,heads,T,D] with channels j and j + D/2 turned."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def _sinusoids(at: Tensor, width: int) -> Tensor:
    """[B,T] -> [B,T,width]: the sine of position * 10000^(-2i/width) in channel 2i, its cosine in 2i + 1."""
    i = torch.arange((width + 1) // 2, device=at.device, dtype=torch.float64)
    angle = at[..., None] * 10000.0 ** (-2 * i / width)
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(-2)[..., :width]


def _slopes(heads: int) -> list[float]:
    """2^(-8h/H), h from 1; between two powers of two, those of the lower and every second of the upper."""
    if heads & (heads - 1) == 0:
        return [2.0 ** (-8 * h / heads) for h in range(1, heads + 1)]
    lower = 2 ** (heads.bit_length() - 1)
    return [*_slopes(lower), *itertools.islice(_slopes(2 * lower), 0, 2 * (heads - lower), 2)]


def _make(static: bool) -> Callable[..., DecoderLM]:
    def decoder_lm(
        params: Params, *, heads: int, norm: str = "pre", alpha: float = 1.0, window: Window | None = None,
        positions: str | None = "rotary", max_length: int | None = None,
    ) -> DecoderLM:  # fmt: skip
        """The model of these weights.

        params: decoder_lm; window: (rows before a token that it sees, None or 0)
        Raises ValueError for a norm, positions or a window that it does not know.
        """
        if norm not in ("pre", "post") or positions not in (None, "sinusoidal", "rotary", "alibi"):
            raise ValueError(f"decoder_lm: got norm {norm!r} and positions {positions!r}")
        left = None if window is None else window[0]
        if left is not None and left < 0:
            raise ValueError(f"decoder_lm: window: got {window}, wanted a number of rows >= 0")
        return DecoderLM(params, heads, norm, alpha, left, positions, max_length, static)

    return decoder_lm


VARIANTS = {"decoder_growing": {"decoder_lm": _make(False)}, "decoder_static": {"decoder_lm": _make(True)}}
CAPABILITIES = {
    "decoder_growing": {"decoder_lm": Capabilities(cache="persistent")},
    "decoder_static": {"decoder_lm": Capabilities()},
}
