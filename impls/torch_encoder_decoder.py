"""torch: the encoder-decoder around scaled_dot_product_attention, with packed projections and grouped heads.

"with_memory" joins old and new rows of the target anew in every step, so that old caches stay valid;
"with_memory_static" appends them in place to tensors that are doubled when they are full.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from veriformer.declarations import Capabilities

FRAMEWORK = "torch"
Params = Mapping[str, Any]
KV = tuple[Tensor, Tensor]
FIRST_ROWS = 4


@dataclass(frozen=True)
class Kept:
    """Keys and values of every decoder layer: of the target so far (a cache), or of the source (a memory).

    The first `length` rows are tokens. mask: which tokens of a source are real, [B,1,1,S], or None.
    """

    layers: list[KV]
    length: int
    batch: int
    mask: Tensor | None = None


class EncoderDecoder:
    """The model of given weights."""

    def __init__(
        self, params: Params, heads: int, norm: str, alpha: tuple[float, float], positions: str | None, static: bool
    ) -> None:
        self.params, self.heads, self.pre, self.positions, self.static = params, heads, norm == "pre", positions, static
        self.alpha = {"encoder": alpha[0], "decoder": alpha[1]}
        self.scale = float(params.get("embedding_scale", 1.0))
        self.vocabulary, self.dtype = len(params["target_embedding"]), params["target_embedding"].dtype
        stacks = (params["encoder"], params["decoder"])
        self.packed = {id(w): _packed(w) for stack in stacks for layer in stack["layers"] for w in _attentions(layer)}

    @torch.no_grad()
    def encode(self, source: Tensor, mask: Tensor | None = None) -> Kept:
        """What the decoder will ask of the source.

        source[B,S], mask[B,S] or None (True = a real token) -> the memory
        k = encoder(embed(source)) wk + bk and v likewise, for each layer of the decoder
        Source: Vaswani et al. 2017, sections 3.1 and 3.2.3.
        Raises ValueError for tokens that are none, and for a mask that does not fit them.
        """
        x = self._embedded("source", source, self.params["source_embedding"], 0)
        if mask is not None and mask.shape != source.shape:
            raise ValueError(f"mask: got shape {list(mask.shape)}, wanted {list(source.shape)}")
        hidden = None if mask is None else mask[:, None, None]
        at = torch.arange(source.shape[1], device=source.device)
        bias = self._bias((at[:, None] - at).abs(), hidden)
        for layer in self.params["encoder"]["layers"]:

            def attention(y: Tensor, w: Params = layer["attention"]) -> Tensor:
                return self._mixed(*self._rows(y, w, at), w, bias)

            x = self._residual(x, layer["norm1"], "encoder", attention)
            x = self._residual(x, layer["norm2"], "encoder", lambda y, w=layer["feed_forward"]: _feed_forward(y, w))
        x = self._normed_last(x, "encoder")
        layers = [self._rows(x, layer["cross_attention"], None)[1:] for layer in self.params["decoder"]["layers"]]
        return Kept(layers, source.shape[1], len(source), hidden)

    @torch.no_grad()
    def full(self, source: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
        """What may come after each token of the target, given those up to it and all of the source.

        source[B,S], target[B,T], mask[B,S] or None -> logits[B,T,V]
        decoder(embed(target), encoder(embed(source))) w + b
        Source: Vaswani et al. 2017, section 3.
        Raises ValueError as encode does.
        """
        return self._decode(target, self.encode(source, mask), 0, lambda number, new: new)

    @torch.no_grad()
    def step(self, tokens: Tensor, memory: Kept, cache: Kept | None) -> tuple[Tensor, Kept]:
        """The same for new tokens of the target after those in the cache.

        tokens[B,m] -> logits[B,m,V], the cache
        Source: Pope et al. 2022, section 2.1.
        Raises ValueError for tokens that are none, and for a memory or cache of another batch.
        """
        length, layers = (0 if cache is None else cache.length), []
        total = length + tokens.shape[1]
        if cache is not None and cache.batch != len(tokens):
            raise ValueError(f"tokens: got {len(tokens)} rows, wanted {cache.batch}, as in the cache")

        def keep(number: int, new: KV) -> KV:
            old = None if cache is None else cache.layers[number]
            layers.append(_appended(old, new, length) if self.static else _joined(old, new))
            return layers[-1][0][:, :, :total], layers[-1][1][:, :, :total]

        return self._decode(tokens, memory, length, keep), Kept(layers, total, len(tokens))

    def crop(self, cache: Kept | None, length: int) -> Kept | None:
        """The cache as it was after its first `length` tokens. Raises ValueError where there were fewer."""
        had = 0 if cache is None else cache.length
        if not 0 <= length <= had:
            raise ValueError(f"crop: length: got {length}, wanted 0 to {had}, the tokens of the cache")
        if cache is None or self.static:
            return cache and Kept(cache.layers, length, cache.batch)
        return Kept([(k[:, :, :length], v[:, :, :length]) for k, v in cache.layers], length, cache.batch)

    def reorder(self, cache: Kept | None, rows: Any) -> Kept | None:
        """The cache or memory whose batch row i is row rows[i] of the given one.

        Raises ValueError for rows that are not there.
        """
        if cache is None:
            return None
        rows = torch.as_tensor(rows, device=self.params["target_embedding"].device)
        if rows.ndim != 1 or bool(((rows < 0) | (rows >= cache.batch)).any()):
            raise ValueError(f"reorder: rows: got {rows.tolist()}, wanted numbers from 0 to {cache.batch - 1}")
        layers = [(k.index_select(0, rows), v.index_select(0, rows)) for k, v in cache.layers]
        mask = None if cache.mask is None else cache.mask.index_select(0, rows)
        return Kept(layers, cache.length, len(rows), mask)

    def _decode(self, tokens: Tensor, memory: Kept, length: int, keep: Callable[[int, KV], KV]) -> Tensor:
        """The decoder on tokens at length, length + 1, …; keep(layer, new rows) gives the rows to look at."""
        x = self._embedded("tokens", tokens, self.params["target_embedding"], length)
        if memory.batch != len(tokens):
            raise ValueError(f"tokens: got {len(tokens)} rows, wanted {memory.batch}, as in the memory")
        at = length + torch.arange(tokens.shape[1], device=tokens.device)
        behind = at[:, None] - torch.arange(length + tokens.shape[1], device=tokens.device)
        bias = self._bias(behind, behind >= 0)
        for number, layer in enumerate(self.params["decoder"]["layers"]):

            def seeing_itself(y: Tensor, w: Params = layer["attention"], number: int = number) -> Tensor:
                q, k, v = self._rows(y, w, at)
                return self._mixed(q, *keep(number, (k, v)), w, bias)

            def seeing_memory(y: Tensor, w: Params = layer["cross_attention"], number: int = number) -> Tensor:
                return self._mixed(self._rows(y, w, None, "q")[0], *memory.layers[number], w, memory.mask)

            x = self._residual(x, layer["norm1"], "decoder", seeing_itself)
            x = self._residual(x, layer["norm2"], "decoder", seeing_memory)
            x = self._residual(x, layer["norm3"], "decoder", lambda y, w=layer["feed_forward"]: _feed_forward(y, w))
        x, head = self._normed_last(x, "decoder"), self.params.get("head")
        return F.linear(x, self.params["target_embedding"]) if head is None else F.linear(x, head["w"].T, head.get("b"))

    def _embedded(self, name: str, tokens: Tensor, table: Tensor, start: int) -> Tensor:
        """Rows of a table, times its scale; plus sinusoids from position start on, if they are the positions."""
        if tokens.ndim != 2 or tokens.is_floating_point():
            raise ValueError(
                f"{name}: got {tokens.dtype} of shape {list(tokens.shape)}, wanted integers, [batch, time]"
            )
        if bool(((tokens < 0) | (tokens >= len(table))).any()):
            raise ValueError(f"{name}: got one outside the vocabulary, wanted 0 to {len(table) - 1}")
        x = F.embedding(tokens, table) * self.scale
        if self.positions != "sinusoidal":
            return x
        i = torch.arange((x.shape[-1] + 1) // 2, device=x.device, dtype=torch.float64)
        at = start + torch.arange(tokens.shape[1], device=x.device)
        angle = at[:, None] * 10000.0 ** (-2 * i / x.shape[-1])
        return x + torch.stack([angle.sin(), angle.cos()], -1).flatten(-2)[:, : x.shape[-1]].to(x.dtype)

    def _residual(self, x: Tensor, norm: Params, side: str, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        return x + sublayer(_normed(x, norm)) if self.pre else _normed(self.alpha[side] * x + sublayer(x), norm)

    def _normed_last(self, x: Tensor, side: str) -> Tensor:
        norm = self.params[side].get("norm")
        return x if norm is None else _normed(x, norm)

    def _rows(self, x: Tensor, w: Params, at: Tensor | None, wanted: str = "qkv") -> tuple[Tensor, ...]:
        """q[B,H,T,D], k[B,G,T,D], v[B,G,T,Dv] from one packed projection; turned by positions if rotary."""
        matrix, bias, cuts = self.packed[id(w)]
        if wanted == "q":
            matrix, bias, cuts = matrix[: cuts[0]], None if bias is None else bias[: cuts[0]], cuts[:1]
        parts = F.linear(x, matrix, bias).split(cuts, -1)
        width = cuts[0] // self.heads
        counts = [part.shape[-1] // width for part in parts]
        counts[2:] = counts[1:2]
        rows = [part.unflatten(-1, (n, -1)).transpose(1, 2) for part, n in zip(parts, counts, strict=True)]
        if at is not None and self.positions == "rotary":
            rows[:2] = [_turned(a, at) for a in rows[:2]]
        return tuple(rows)

    def _mixed(self, q: Tensor, k: Tensor, v: Tensor, w: Params, mask: Tensor | None) -> Tensor:
        """Attention of the heads, joined and projected."""
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=k.shape[1] < q.shape[1])
        return F.linear(out.transpose(1, 2).flatten(2), w["wo"].T, w.get("bo"))

    def _bias(self, behind: Tensor, visible: Tensor | None) -> Tensor | None:
        """What self-attention is given as its mask: booleans, or numbers to add if alibi."""
        if self.positions != "alibi":
            return visible
        slopes = torch.tensor(_slopes(self.heads), dtype=torch.float64, device=behind.device)
        bias = (-slopes[:, None, None] * behind.abs()).to(self.dtype)[None]
        return bias if visible is None else torch.where(visible, bias, float("-inf"))


def _attentions(layer: Params) -> list[Params]:
    return [layer[name] for name in ("attention", "cross_attention") if name in layer]


def _packed(w: Params) -> tuple[Tensor, Tensor | None, list[int]]:
    """Queries, keys and values as one matrix [out, in], with its bias; the widths of the three."""
    matrices, biases = [w["wq"], w["wk"], w["wv"]], [w.get("bq"), w.get("bk"), w.get("bv")]
    bias = None
    if any(b is not None for b in biases):
        bias = torch.cat([m.new_zeros(m.shape[1]) if b is None else b for m, b in zip(matrices, biases, strict=True)])
    return torch.cat(matrices, 1).T.contiguous(), bias, [m.shape[1] for m in matrices]


def _joined(old: KV | None, new: KV) -> KV:
    return new if old is None else (torch.cat([old[0], new[0]], 2), torch.cat([old[1], new[1]], 2))


def _appended(old: KV | None, new: KV, length: int) -> KV:
    """New rows behind the valid ones, in place where there is room."""
    total, kept = length + new[0].shape[2], old
    if kept is None or kept[0].shape[2] < total:
        room = max(total, FIRST_ROWS if kept is None else 2 * kept[0].shape[2])
        kept = tuple(a.new_empty((*a.shape[:2], room, a.shape[3])) for a in new)
    for i, buffer in enumerate(kept):
        if old is not None and buffer is not old[i]:
            buffer[:, :, :length] = old[i][:, :, :length]
        buffer[:, :, length:total] = new[i]
    return kept


def _feed_forward(x: Tensor, w: Params) -> Tensor:
    return F.linear(F.relu(F.linear(x, w["w1"].T, w.get("b1"))), w["w2"].T, w.get("b2"))


def _normed(x: Tensor, w: Params) -> Tensor:
    """Layer norm where there is a bias, else the norm by the root mean square."""
    if "bias" in w:
        return F.layer_norm(x, x.shape[-1:], w["weight"], w["bias"], 1e-5)
    return F.rms_norm(x, x.shape[-1:], w["weight"], 1e-6)


def _turned(x: Tensor, at: Tensor) -> Tensor:
    """x[B,heads,T,D], channels j and j + D/2 of row t turned by at[t] * 10000^(-2j/D); angles in float64."""
    j = torch.arange(x.shape[-1] // 2, device=x.device, dtype=torch.float64)
    angle = at[:, None] * 10000.0 ** (-2 * j / x.shape[-1])
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def _slopes(heads: int) -> list[float]:
    """2^(-8h/H), h from 1; between two powers of two, those of the lower and every second of the upper."""
    if heads & (heads - 1) == 0:
        return [2.0 ** (-8 * h / heads) for h in range(1, heads + 1)]
    lower = 2 ** (heads.bit_length() - 1)
    return _slopes(lower) + _slopes(2 * lower)[::2][: heads - lower]


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
        factors = (alpha[0], alpha[1]) if isinstance(alpha, (tuple, list)) else (alpha, alpha)
        return EncoderDecoder(params, heads, norm, factors, positions, static)

    return encoder_decoder


VARIANTS = {"with_memory": {"encoder_decoder": _make(False)}, "with_memory_static": {"encoder_decoder": _make(True)}}
CAPABILITIES = {
    "with_memory": {"encoder_decoder": Capabilities(cache="persistent")},
    "with_memory_static": {"encoder_decoder": Capabilities()},
}
