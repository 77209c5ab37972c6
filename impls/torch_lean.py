"""torch: a decoder-only model that spends little beside reading its weights: few kernels and few checks per token.

Every layer's weights are packed once, [in, out]: the three projections in one matrix, gate and inner layer in another,
gains of pre-norm's rms norms multiplied into the matrices behind them. Keys and values of all layers lie in one tensor
that is written in place and doubled where it is full. Queries that share a key head become rows of one product.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from veriformer.declarations import Capabilities

FRAMEWORK = "torch"
Params = Mapping[str, Any]
Window = tuple[int | None, int | None]
Linear = tuple[Tensor, Tensor | None]
Norm = tuple[Tensor | None, Tensor | None]
Pieces = list[tuple[int, int, int, Tensor | None]]
INTEGERS = (torch.int64, torch.int32)
BLOCK = 64
"""Queries that are taken together at least where a window hides most keys from each."""


@dataclass(slots=True)
class Cache:
    """rows[layers,B,2G,C,W]: keys, then values; the first `length` of C are of tokens, what follows is free."""

    rows: Tensor
    length: int


@dataclass(slots=True)
class Layer:
    """A layer's matrices as they are used, [in, out], each with a bias or None, and what is left of its norms."""

    packed: Linear
    out: Linear
    inner: Linear
    outer: Linear
    norms: tuple[Norm, Norm]


class DecoderLM:
    """A decoder-only model: full, step, crop, reorder. It keeps copies of the weights.

    params: those of decoder_lm, matrices [in, out]; a feed_forward with w3[d,f] is (silu(x w1) * (x w3)) w2, without
    it relu(x w1) w2. Norms with a bias are layer norms, others divide by the root mean square.
    norm: "pre" or "post" (then alpha times the residual is added). left: how many tokens before itself a token sees.
    positions: None, "sinusoidal", "rotary" (of that base) or "alibi". max_length: tokens at most. epsilon: of all
    norms; by default 1e-5 of layer norms and 1e-6 of the others.
    Source: Touvron et al. 2023 (LLaMA), section 2.2; Shazeer 2020 (GLU Variants), section 2; Pope et al. 2022.
    Raises ValueError for a norm, positions or left that it does not know, and heads that do not divide the widths.
    """

    def __init__(
        self, params: Params, *, heads: int, norm: str = "pre", alpha: float = 1.0, left: int | None = None,
        positions: str | None = "rotary", max_length: int | None = None, epsilon: float | None = None,
        base: float = 10000.0,
    ) -> None:  # fmt: skip
        if norm not in ("pre", "post") or positions not in (None, "sinusoidal", "rotary", "alibi"):
            raise ValueError(f"decoder_lm: got norm {norm!r} and positions {positions!r}")
        if left is not None and left < 0:
            raise ValueError(f"decoder_lm: left: got {left}, wanted a number of tokens >= 0, or None")
        table, first = params["embedding"].detach(), params["layers"][0]["attention"]
        self.pre, self.alpha, self.left, self.positions, self.base = norm == "pre", alpha, left, positions, base
        self.vocabulary, self.max_length = len(table), max_length
        self.layer_epsilon, self.rms_epsilon = (1e-5, 1e-6) if epsilon is None else (epsilon, epsilon)
        queries, keys, values = (first[name].shape[1] for name in ("wq", "wk", "wv"))
        if heads < 1 or queries % (heads * (1 + (positions == "rotary"))) or queries % keys or heads * keys % queries:
            raise ValueError(f"decoder_lm: got {heads} heads in widths {queries}, {keys}, wanted whole (rotary: even)")
        self.heads, self.width, self.groups = heads, queries // heads, heads * keys // queries
        values //= self.groups
        self.padded = max(self.width, values) + max(self.width, values) % 2
        self.scale, self.narrow = self.width**-0.5, table.element_size() == 2
        wide = torch.float32 if self.narrow else table.dtype
        self.small = torch.full((1, 1), (table.shape[1] * self.rms_epsilon) ** 0.5, dtype=wide, device=table.device)
        self.table = table * float(params.get("embedding_scale", 1.0))
        self.layers = [self._packed(layer, values) for layer in params["layers"]]
        head, last = params.get("head") or {"w": table.T}, params.get("norm")
        gain, self.norm = (None, None) if last is None else _split(last, self.pre)
        self.head = _joined({"w": head["w"], "b": head.get("b")}, ("",), gain)
        self.codes = self._coded(torch.arange(0, device=table.device))

    def full(self, tokens: Tensor) -> Tensor:
        """What may come after each token, given those up to it.

        tokens[B,T] -> logits[B,T,V]
        stack(embed(tokens)) w + b, causal
        Source: Radford et al. 2019, section 2.3.
        Raises ValueError for tokens that are none, and for more of them than max_length.
        """
        self._check(tokens, 0)
        return self._run(tokens, None, 0, None, None)

    def step(
        self, tokens: Tensor, cache: Cache | None, *, mask: Tensor | None = None, positions: Tensor | None = None
    ) -> tuple[Tensor, Cache]:
        """The same for new tokens after those in the cache, which is written and not to be used again.

        tokens[B,m], mask[B,L+m] and positions[B,m] or None -> logits[B,m,V], the cache
        False in the mask hides a token from all; positions count on from L, the tokens before, by default
        Source: Pope et al. 2022, section 2.1.
        Raises ValueError as full does, for tensors that do not fit the cache or one another, and another model's cache.
        """
        length = 0 if cache is None else cache.length
        batch, new = self._check(tokens, length)
        wanted = (len(self.layers), batch, 2 * self.groups)
        if cache is not None and cache.rows.shape[:3] != wanted:
            raise ValueError(f"cache: got layers, batch, heads {tuple(cache.rows.shape[:3])}, wanted {wanted}")
        for name, tensor, shape in (("mask", mask, (batch, length + new)), ("positions", positions, (batch, new))):
            if tensor is not None and tensor.shape != shape:
                raise ValueError(f"{name}: got shape {list(tensor.shape)}, wanted {list(shape)}")
        rows = self._room(cache, batch, length + new)
        return self._run(tokens, rows, length, mask, positions), Cache(rows, length + new)

    def crop(self, cache: Cache | None, length: int) -> Cache | None:
        """The cache as it was after its first `length` tokens. Raises ValueError where there were fewer."""
        had = 0 if cache is None else cache.length
        if not 0 <= length <= had:
            raise ValueError(f"crop: length: got {length}, wanted 0 to {had}, the tokens of the cache")
        return cache and Cache(cache.rows, length)

    def reorder(self, cache: Cache | None, rows: Any) -> Cache | None:
        """The cache whose batch row i is row rows[i] of the given one. Raises ValueError for rows not there."""
        if cache is None:
            return None
        rows, batch = torch.as_tensor(rows, device=self.table.device), cache.rows.shape[1]
        if rows.ndim != 1 or rows.dtype not in INTEGERS or bool(((rows < 0) | (rows >= batch)).any()):
            raise ValueError(f"reorder: rows: got {rows.tolist()}, wanted numbers from 0 to {batch - 1}")
        return Cache(cache.rows.index_select(1, rows), cache.length)

    def _check(self, tokens: Tensor, length: int) -> torch.Size:
        """What costs little; a token outside the vocabulary is found by looking it up."""
        if tokens.ndim != 2 or tokens.dtype not in INTEGERS:
            raise ValueError(f"tokens: got {tokens.dtype} {list(tokens.shape)}, wanted int64 or int32, [batch, time]")
        if self.max_length is not None and (new := tokens.shape[1]) + length > self.max_length:
            raise ValueError(f"tokens: got {new} after {length}, wanted at most {self.max_length}, max_length")
        return tokens.shape

    def _room(self, cache: Cache | None, batch: int, total: int) -> Tensor:
        """The cache's tensor, or one with room for twice as many rows as are needed, where it is full."""
        if cache is not None and cache.rows.shape[3] >= total:
            return cache.rows
        room = self.max_length or 2 * total
        rows = self.table.new_empty((len(self.layers), batch, 2 * self.groups, room, self.padded))
        if cache is not None:
            rows[..., : cache.length, :] = cache.rows[..., : cache.length, :]
        return rows

    def _run(self, tokens: Tensor, *place: Any) -> Tensor:
        if not tokens.numel():
            return self.table.new_empty(*tokens.shape, self.head[0].shape[1])
        with torch.inference_mode():
            x = self._hidden(tokens, *place)
        with torch.no_grad():  # logits are an ordinary tensor again
            return _applied(x, self.head).view(*tokens.shape, -1)

    def _hidden(
        self, tokens: Tensor, rows: Tensor | None, length: int, mask: Tensor | None, positions: Tensor | None
    ) -> Tensor:
        """What the head is given, [B*m,d]. rows: where keys and values go, behind `length` others; None: nowhere."""
        (batch, new), total = tokens.shape, length + tokens.shape[1]
        try:
            x = torch.embedding(self.table, tokens)
        except IndexError as error:
            raise ValueError(f"tokens: got one outside the vocabulary, wanted 0 to {self.vocabulary - 1}") from error
        codes, pieces = self._codes(length, new, positions), self._pieces(new, length, mask)
        x = (x + codes if self.positions == "sinusoidal" else x).view(batch * new, -1)
        homes: Any = itertools.repeat((None, None, None))
        if rows is not None:
            low, groups = pieces[0][2], self.groups
            parts = (rows[..., length:total, :], rows[:, :, :groups, low:total], rows[:, :, groups:, low:total])
            homes = zip(*(part.unbind(0) for part in parts), strict=True)
        for layer, home in zip(self.layers, homes, strict=False):
            y = _applied(self._normed(x, layer.norms[0]) if self.pre else x, layer.packed)
            y = self._attention(y, (batch, new), codes, pieces, *home)
            x = self._added(x, y, layer.out, layer.norms[0])
            y = self._inner(self._normed(x, layer.norms[1]) if self.pre else x, layer)
            x = self._added(x, y, layer.outer, layer.norms[1])
        return x if self.norm is None else self._normed(x, self.norm)

    def _attention(
        self, packed: Tensor, shape: tuple[int, int], codes: Tensor | None, pieces: Pieces, slot: Tensor | None,
        k: Tensor | None, v: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """packed[B*m,(H+2G)*W] -> [B*m,H*W]; slot[B,2G,m,W] is where new rows go, k and v[B,G,n,W] all in sight."""
        (batch, new), heads, groups = shape, self.heads, self.groups
        if self.positions == "rotary" and codes is not None:
            packed = _turned(packed, codes)
        rows = packed.view(batch, -1, 1, self.padded) if new == 1 else packed.view(batch, new, -1, self.padded)
        q, fresh = (rows if new == 1 else rows.transpose(1, 2)).split((heads, 2 * groups), 1)
        if slot is None or k is None or v is None:
            k, v = fresh.split(groups, 1)
        else:
            slot.copy_(fresh)
        if new == 1:
            seen = pieces[0][3]
            if groups < heads:
                q = q.view(batch, groups, heads // groups, -1)
                seen = seen if seen is None or seen.shape[1] == 1 else seen.view(-1, *q.shape[1:3], seen.shape[3])
            return F.scaled_dot_product_attention(q, k, v, seen, scale=self.scale).reshape(batch, -1)
        start, end = pieces[0][2], k.shape[2] - new  # where k and v begin
        parts = [
            F.scaled_dot_product_attention(
                q[:, :, a:b], k[:, :, low - start : end + b], v[:, :, low - start : end + b], seen,
                is_causal=seen is None, scale=self.scale, enable_gqa=groups < heads,
            )
            for a, b, low, seen in pieces
        ]  # fmt: skip
        return (parts[0] if len(parts) == 1 else torch.cat(parts, 2)).transpose(1, 2).reshape(batch * new, -1)

    def _inner(self, x: Tensor, layer: Layer) -> Tensor:
        """relu(x w1 + b1), or with a gate silu(x w1 + b1) * (x w3 + b3)."""
        y = _applied(x, layer.inner)
        if y.shape[1] == layer.outer[0].shape[0]:
            return y.relu_()
        y, gate = y.chunk(2, 1)
        return F.silu(y, inplace=True).mul_(gate)

    def _added(self, x: Tensor, y: Tensor, linear: Linear, norm: Norm) -> Tensor:
        """The next residual: x + y w + b, or in post-norm norm(alpha x + y w + b)."""
        weight, bias = linear
        x = x.addmm_(y, weight) if self.pre else torch.mul(x, self.alpha).addmm_(y, weight)
        x = x if bias is None else x.add_(bias)
        return x if self.pre else self._normed(x, norm)

    def _normed(self, x: Tensor, norm: Norm) -> Tensor:
        """Layer norm where there is a bias; else x / sqrt(|x|^2 + d eps), the gain times sqrt(d) here or folded."""
        gain, bias = norm
        if bias is not None:
            return F.layer_norm(x, x.shape[1:], gain, bias, self.layer_epsilon)
        rows = x.float() if self.narrow else x
        y = rows / torch.hypot(torch.linalg.vector_norm(rows, 2, 1, True), self.small)
        y = y if gain is None else y.mul_(gain)
        return y.to(x.dtype) if self.narrow else y

    def _pieces(self, new: int, length: int, mask: Tensor | None) -> Pieces:
        """Blocks of queries: a to b, the first key in sight, and which they see of those on (None: all up to them)."""
        left = length + new if self.left is None else self.left
        plain = mask is None and self.positions != "alibi"
        if plain and (new == 1 or (length == 0 and left >= new - 1)):
            return [(0, new, max(0, length - left) if new == 1 else 0, None)]
        size = new if left >= length + new else max(BLOCK, left + 1)
        found: Pieces = []
        for a in range(0, new, size):
            b, low = min(new, a + size), max(0, length + a - left)
            found.append((a, b, low, self._visible(length + a, length + b, low, left, mask)))
        return found

    def _visible(self, start: int, end: int, low: int, left: int, mask: Tensor | None) -> Tensor:
        """Keys low to end for queries start to end: [B,1,m,n] of booleans, or with alibi [B,H,m,n] of numbers."""
        device = self.table.device
        behind = torch.arange(start, end, device=device)[:, None] - torch.arange(low, end, device=device)
        visible = ((behind >= 0) & (behind <= left))[None, None]
        visible = visible if mask is None else visible & mask[:, None, None, low:end]
        if self.positions != "alibi":
            return visible
        bias = -torch.tensor(_slopes(self.heads), dtype=torch.float64, device=device)[:, None, None] * behind
        return bias.to(self.table.dtype).expand(len(visible), -1, -1, -1).masked_fill(~visible, float("-inf"))

    def _codes(self, length: int, new: int, positions: Tensor | None) -> Tensor | None:
        """What says where the new tokens are; the table of it is made longer where it ends."""
        if self.codes is None or positions is not None:
            return self._coded(positions)
        if length + new > len(self.codes):
            self.codes = self._coded(torch.arange(2 * (length + new), device=self.table.device))
        return self.codes[length : length + new]

    def _coded(self, at: Tensor | None) -> Tensor | None:
        """Of positions at[..]: what to turn all heads by, e^(i p base^(-2j/D)) [..,(H+2G)*W/2], or to add, [..,d]."""
        if at is None or self.positions not in ("rotary", "sinusoidal"):
            return None
        if self.positions == "sinusoidal":
            d = self.table.shape[1]
            angle = at[..., None] * 10000.0 ** (-2 * torch.arange((d + 1) // 2, device=at.device).double() / d)
            return torch.stack([angle.sin(), angle.cos()], -1).flatten(-2)[..., :d].to(self.table.dtype)
        j = torch.arange(self.padded // 2, device=at.device).double()
        angle = at[..., None] * self.base ** (-2 * j / self.width)
        turned = torch.arange(self.heads + 2 * self.groups, device=at.device) < self.heads + self.groups
        angle = torch.where(turned[:, None], angle[..., None, :], 0.0).flatten(-2)  # values stay as they are
        return torch.polar(torch.ones_like(angle), angle).to(self.small.dtype.to_complex())

    def _packed(self, layer: Params, values: int) -> Layer:
        """A layer's weights as they are used."""
        w, inner = layer["attention"], layer["feed_forward"]
        sizes = {"q": (self.heads, self.width), "k": (self.groups, self.width), "v": (self.groups, values)}
        out = self._columns(w["wo"].detach().T, self.heads, values, False).T.contiguous()
        first, second = (_split(layer[name], self.pre) for name in ("norm1", "norm2"))

        def columns(name: str, a: Tensor) -> Tensor:
            return self._columns(a, *sizes[name], name != "v" and self.positions == "rotary")

        return Layer(
            _joined(w, "qkv", first[0], columns),
            (out, None if w.get("bo") is None else w["bo"].detach().clone()),
            _joined(inner, "13" if "w3" in inner else "1", second[0]),
            _joined(inner, "2", None),
            (first[1], second[1]),
        )

    def _columns(self, a: Tensor, heads: int, width: int, paired: bool) -> Tensor:
        """[..,heads*width] -> [..,heads*W], zeros behind each head; paired: channels j and j + width/2 side by side."""
        a = a.unflatten(-1, (heads, width))
        if paired:
            a = a.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
        return F.pad(a, (0, self.padded - width)).flatten(-2)


def _split(norm: Params, fold: bool) -> tuple[Tensor | None, Norm]:
    """The gain to be multiplied into the matrix behind a norm, and the gain and bias that remain."""
    gain = norm["weight"].detach()
    if "bias" in norm:
        return None, (gain.clone(), norm["bias"].detach().clone())
    gain = gain * len(gain) ** 0.5
    return (gain, (None, None)) if fold else (None, (gain, None))


def _joined(
    params: Params, names: Sequence[str], gain: Tensor | None, columns: Callable[[str, Tensor], Tensor] = lambda _, a: a
) -> Linear:
    """Matrices side by side, [in, out], their rows times the gain, and their biases, None where there is none."""
    weights = {name: columns(name, params["w" + name].detach()) for name in names}
    biases = {name: params.get("b" + name) for name in names}
    joined = torch.cat(list(weights.values()), 1)
    if gain is not None:
        joined *= gain[:, None]
    if all(bias is None for bias in biases.values()):
        return joined, None
    rows = [weights[n].new_zeros(len(weights[n].T)) if b is None else columns(n, b.detach()) for n, b in biases.items()]
    return joined, torch.cat(rows)


def _applied(x: Tensor, linear: Linear) -> Tensor:
    """x[N,in] w + b; the bias in place, because addmm begins with a copy of it."""
    y = torch.mm(x, linear[0])
    return y if linear[1] is None else y.add_(linear[1])


def _turned(x: Tensor, turns: Tensor) -> Tensor:
    """x[B*m,n] with pairs turned as complex numbers, in place but for 16 bits, which torch has no such numbers of."""
    wide = x.float() if x.element_size() == 2 else x
    wide.view(turns.dtype).view(-1, *turns.shape[-2:]).mul_(turns)
    return wide if wide is x else wide.to(x.dtype)


def _slopes(heads: int) -> list[float]:
    """2^(-8h/H), h from 1; between two powers of two, those of the lower and every second of the upper."""
    lower = 1 << heads.bit_length() - 1
    steps = [*range(2, 2 * lower + 1, 2), *range(1, 2 * (heads - lower), 2)]
    return [2.0 ** (-4 * step / lower) for step in steps]


def decoder_lm(
    params: Params, *, heads: int, norm: str = "pre", alpha: float = 1.0, window: Window | None = None,
    positions: str | None = "rotary", max_length: int | None = None,
) -> DecoderLM:  # fmt: skip
    """The model of these weights.

    params: decoder_lm; window: (rows before a token that it sees, None or 0)
    Source: Pope et al. 2022, section 2.1.
    Raises ValueError for a norm, positions or a window that it does not know.
    """
    left = None if window is None else window[0]
    return DecoderLM(params, heads=heads, norm=norm, alpha=alpha, left=left, positions=positions, max_length=max_length)


def llama(dtype: torch.dtype = torch.float32) -> DecoderLM:
    """A small Llama of random weights: rms norms, rotary positions, grouped heads, a gate in the feed-forward.

    Source: Touvron et al. 2023 (LLaMA), section 2.2; Llama 2, section 2.2, for grouped heads.
    """
    d, f, vocabulary = 32, 48, 50
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        rows = torch.randn(shape, generator=generator, dtype=torch.float64)
        return (rows * shape[0] ** -0.5 if len(shape) == 2 else 1 + rows / 8).to(dtype)

    def layer() -> Params:
        return {
            "attention": {"wq": drawn(d, d), "wk": drawn(d, d // 2), "wv": drawn(d, d // 2), "wo": drawn(d, d)},
            "feed_forward": {"w1": drawn(d, f), "w3": drawn(d, f), "w2": drawn(f, d)},
            "norm1": {"weight": drawn(d)}, "norm2": {"weight": drawn(d)},
        }  # fmt: skip

    params = {"embedding": drawn(vocabulary, d) * vocabulary**0.5, "layers": [layer(), layer()]}
    params |= {"norm": {"weight": drawn(d)}, "head": {"w": drawn(d, vocabulary)}}
    return DecoderLM(params, heads=4, max_length=64)


VARIANTS = {"lean": {"decoder_lm": decoder_lm}, "lean_llama": {"decoder_lm": llama}}
CAPABILITIES = {"lean": {"decoder_lm": Capabilities()}, "lean_llama": {"decoder_lm": Capabilities()}}
