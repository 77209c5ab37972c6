"""torch: the encoder-decoder as a class that holds its weights packed and leaves out the padding of the source.

Tokens are rows [tokens, width] throughout: of the source only the real ones, from the embedding to the keys and
values that the decoder looks at, which come of one product for all its layers. Queries, keys and values come of one
product by a matrix [in, out], put together once; residuals are addends of products, and biases and relu work in
place. Autograd has every gradient, of the weights that were given; whoever changes those makes the object anew.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from veriformer.declarations import Capabilities

FRAMEWORK = "torch"
Params = Mapping[str, Any]
Sizes = list[tuple[int, int]]
"""How rows belong to samples: (samples, tokens of each), in the order of the rows."""
Masks = list[Tensor | None]
INNER_NUMBERS = 2**18
"""Without gradients, so many numbers of the inner feed-forward layer are made at a time: they stay in the cache."""


class _Sight(NamedTuple):
    """What self-attention goes by: samples, a mask or bias for each group of them, the triangle, rotary's tables."""

    sizes: Sizes
    masks: Masks
    causal: bool = False
    turn: tuple[Tensor, Tensor] | None = None


class _Seen(NamedTuple):
    """What cross-attention looks at: keys and values, and the samples of queries and of these rows."""

    kv: Tensor
    mine: Sizes
    theirs: Sizes


class _Attention:
    """Multi-head attention of H query heads and G key heads; a key head serves H/G of the others."""

    def __init__(self, params: Params, heads: int) -> None:
        matrices, biases = [params["wq"], params["wk"], params["wv"]], [params.get(name) for name in ("bq", "bk", "bv")]
        self.widths = [matrix.shape[1] for matrix in matrices]
        self.heads, self.groups = _heads(*self.widths, heads)
        self.even, self.width = len(set(self.widths)) == 1, self.widths[0] // heads
        self.inner, self.inner_bias = torch.cat(matrices, 1), _joined(list(zip(matrices, biases, strict=True)))
        # split once: the backward of a split is one cat, that of slices one matrix of zeros for each
        cuts, bias = [self.widths[0], sum(self.widths[1:])], self.inner_bias
        biases = (None, None) if bias is None else bias.split(cuts)
        self.of_queries, self.of_memory = zip(self.inner.split(cuts, 1), biases, strict=True)
        self.outer, self.outer_bias = params["wo"].contiguous(), params.get("bo")

    def to_itself(self, rows: Tensor, sight: _Sight) -> Tensor:
        """Rows [N,d] to those of their own sample -> [N,H*Dv], not yet projected."""
        packed = _linear(rows, self.inner, self.inner_bias)
        if sight.turn is not None:
            joint = self.widths[0] + self.widths[1]
            turned = packed[:, :joint].unflatten(1, (self.heads + self.groups, -1))
            q, k, v = *_turned(turned, *sight.turn).flatten(1).split(self.widths[:2], 1), packed[:, joint:]
        elif self.even and len(sight.sizes) == 1:
            # the usual case in few steps: where tokens are few, views and names are a third of the time
            samples, tokens = sight.sizes[0]
            q, k, v = packed.view(samples, tokens, 3, self.heads, self.width).permute(2, 0, 3, 1, 4).unbind(0)
            out = F.scaled_dot_product_attention(q, k, v, sight.masks[0], 0.0, sight.causal)
            return out.transpose(1, 2).reshape(samples * tokens, self.widths[2])
        else:
            q, k, v = packed.split(self.widths, 1)
        return self._mixed(q, k, v, sight.sizes, sight.sizes, sight.masks, sight.causal)

    def to_memory(self, rows: Tensor, seen: _Seen) -> Tensor:
        """Rows [N,d] to keys and values [M,G*(D+Dv)] of their own sample -> [N,H*Dv], not yet projected."""
        q = _linear(rows, *self.of_queries)
        return self._mixed(
            q, *seen.kv.split(self.widths[1:], 1), seen.mine, seen.theirs, [None] * len(seen.mine), False
        )

    def _mixed(self, q: Tensor, k: Tensor, v: Tensor, mine: Sizes, theirs: Sizes, masks: Masks, causal: bool) -> Tensor:
        """Each group of samples of one length by itself."""
        heads, counts = (self.heads, self.groups, self.groups), (mine, theirs, theirs)
        parts = [rows.split([n * t for n, t in sizes]) for rows, sizes in zip((q, k, v), counts, strict=True)]
        out = []
        for *rows, one, other, mask in zip(*parts, mine, theirs, masks, strict=True):
            headed = [
                part.view(*size, count, part.shape[1] // count).transpose(1, 2)
                for part, size, count in zip(rows, (one, other, other), heads, strict=True)
            ]
            out.append(self._averaged(*headed, mask, causal))
        return out[0] if len(out) == 1 else torch.cat(out)

    def _averaged(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        """q[n,H,Tq,D], k[n,G,Tk,D], v[n,G,Tk,Dv] -> [n*Tq,H*Dv]."""
        out = F.scaled_dot_product_attention(q, k, v, mask, 0.0, causal, enable_gqa=self.groups < self.heads)
        return out.transpose(1, 2).reshape(q.shape[0] * q.shape[2], self.outer.shape[0])


class _Layer:
    """A layer of either kind on rows."""

    def __init__(self, params: Params, heads: int, norm: str, alpha: float) -> None:
        if norm not in ("post", "pre"):
            raise ValueError(f"norm: got {norm!r}, wanted 'post' or 'pre'")
        self.pre, self.alpha = norm == "pre", 1.0 if norm == "pre" else alpha
        self.attention, self.cross = _Attention(params["attention"], heads), None
        if "cross_attention" in params:
            self.cross = _Attention(params["cross_attention"], heads)
        self.norms = [params[name] for name in ("norm1", "norm2", "norm3") if name in params]
        inner = params["feed_forward"]
        self.w1, self.b1, self.w2, self.b2 = inner["w1"].contiguous(), inner.get("b1"), inner["w2"], inner.get("b2")
        self.chunk = max(1, INNER_NUMBERS // max(1, self.w1.shape[1]))

    def __call__(self, x: Tensor, sight: _Sight, seen: _Seen | None = None) -> Tensor:
        """x[N,d] -> [N,d]; a decoder's layer is told what there is of the memory."""
        mixed = self.attention.to_itself(self._entering(x, 0), sight)
        x = self._leaving(_added(x, mixed, self.attention.outer, self.attention.outer_bias, self.alpha), 0)
        if self.cross is not None and seen is not None:
            mixed = self.cross.to_memory(self._entering(x, 1), seen)
            x = self._leaving(_added(x, mixed, self.cross.outer, self.cross.outer_bias, self.alpha), 1)
        return self._leaving(self._fed(x, self._entering(x, -1)), -1)

    def _entering(self, x: Tensor, number: int) -> Tensor:
        return _normed(x, self.norms[number]) if self.pre else x

    def _leaving(self, x: Tensor, number: int) -> Tensor:
        return x if self.pre else _normed(x, self.norms[number])

    def _fed(self, x: Tensor, entering: Tensor) -> Tensor:
        """alpha x + relu(entering w1 + b1) w2 + b2; without gradients some rows at a time."""
        if torch.is_grad_enabled() or len(x) <= self.chunk:
            return _added(x, _linear(entering, self.w1, self.b1).relu_(), self.w2, self.b2, self.alpha)
        out = x * self.alpha if self.b2 is None else torch.add(self.b2, x, alpha=self.alpha)
        for part, rows in zip(out.split(self.chunk), entering.split(self.chunk), strict=True):
            part.addmm_(_linear(rows, self.w1, self.b1).relu_(), self.w2)
        return out


class _Stack:
    """Layers one after the other, then the final norm where there is one."""

    def __init__(
        self, params: Params, heads: int, norm: str, alpha: float, positions: str | None, causal: bool = False
    ) -> None:
        if positions not in (None, "sinusoidal", "rotary", "alibi"):
            raise ValueError(f"positions: got {positions!r}, wanted None, 'sinusoidal', 'rotary' or 'alibi'")
        self.layers = [_Layer(layer, heads, norm, alpha) for layer in params["layers"]]
        self.last, self.heads, self.positions, self.causal = params.get("norm"), heads, positions, causal

    def sight(self, x: Tensor, tokens: int, at: Tensor, sizes: Sizes) -> _Sight:
        """Of rows x at positions `at` of sequences that are padded to so many tokens, or are as long."""
        turn = self._tables(x, at) if self.positions == "rotary" else None
        if self.positions != "alibi":
            return _Sight(sizes, [None] * len(sizes), self.causal, turn)
        place = torch.arange(tokens, device=x.device)
        ahead = place - place[:, None]
        penalty = (_slopes(self.heads, x.device)[:, None, None] * -ahead.abs()).to(x.dtype)
        penalty = penalty.masked_fill(ahead > 0, -torch.inf) if self.causal else penalty
        return _Sight(sizes, _of_groups(penalty, at, sizes))

    def _tables(self, x: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [N,1,D/2] of rows at positions `at`."""
        width = self.layers[0].attention.width
        frequency = 10000.0 ** -(torch.arange(0, width, 2, dtype=torch.float64, device=x.device) / width)
        angle = torch.outer(at.to(torch.float64), frequency)[:, None]
        wide = torch.promote_types(x.dtype, torch.float32)
        return angle.cos().to(wide), angle.sin().to(wide)

    def __call__(self, rows: Tensor, sight: _Sight, seen: list[_Seen] | None = None) -> Tensor:
        """Rows [N,d] -> [N,d]; seen: what there is of the memory for each layer of a decoder."""
        for number, layer in enumerate(self.layers):
            rows = layer(rows, sight, None if seen is None else seen[number])
        return rows if self.last is None else _normed(rows, self.last)


class PackedTransformer:
    """The encoder-decoder of given weights: two embeddings, encoder, decoder, perhaps head and embedding_scale.

    decoder(embed(target), encoder(embed(source))) w + b; without a head, w is the target's embedding transposed
    Source: Vaswani et al. 2017, section 3. alpha: a number, or a pair (encoder, decoder).
    Raises ValueError for an unknown norm, unknown positions and widths that heads do not divide.
    """

    def __init__(
        self, params: Params, *, heads: int, norm: str = "post", alpha: Any = 1.0, positions: str | None = "sinusoidal"
    ) -> None:
        first, second = alpha if isinstance(alpha, (tuple, list)) else (alpha, alpha)
        self.encoder = _Stack(params["encoder"], heads, norm, first, positions)
        self.decoder = _Stack(params["decoder"], heads, norm, second, positions, causal=True)
        parts = [layer.cross.of_memory for layer in self.decoder.layers]
        self.widths = [matrix.shape[1] for matrix, _ in parts]
        self.memory, self.memory_bias = torch.cat([matrix for matrix, _ in parts], 1), _joined(parts)
        self.tables = [params[f"{name}_embedding"] for name in ("source", "target")]
        self.scale, self.sinusoids = params.get("embedding_scale"), positions == "sinusoidal"
        head = params.get("head", {})
        self.head, self.head_bias = head.get("w", self.tables[1].T), head.get("b")

    def __call__(self, source: Tensor, target: Tensor, real: Tensor | None = None) -> Tensor:
        """source[B,S], target[B,T], real[B,S]: True = a real token of the source -> logits[B,T,V].

        Attention goes sample by sample where sources differ in length; those of one length that lie together at once.
        Raises ValueError for shapes that do not fit one another, and for tokens outside of a vocabulary.
        """
        batch, tokens = target.shape
        if len(source) != batch or (real is not None and real.shape != source.shape):
            got = [list(one.shape) for one in (source, target, real) if one is not None]
            raise ValueError(f"source, target, real: got shapes {got}, wanted [B,S], [B,T], [B,S]")
        ids, at, theirs = _real(source, real)
        x = self._embedded(ids, at, source.shape[1], 0)
        x = self.encoder(x, self.encoder.sight(x, source.shape[1], at, theirs))
        mine, each = [(samples, tokens) for samples, _ in theirs], _linear(x, self.memory, self.memory_bias)
        seen = [_Seen(kv, mine, theirs) for kv in each.split(self.widths, 1)]
        at = torch.arange(tokens, device=target.device).repeat(batch)
        y = self._embedded(target.flatten(), at, tokens, 1)
        y = self.decoder(y, self.decoder.sight(y, tokens, at, [(batch, tokens)]), seen)
        return _linear(y, self.head, self.head_bias).unflatten(0, target.shape)

    def _embedded(self, ids: Tensor, at: Tensor, length: int, which: int) -> Tensor:
        """[N] -> [N,d]: rows of a table, scaled, plus the sinusoids of their positions where they are wanted."""
        try:
            x = F.embedding(ids, self.tables[which])
        except IndexError as error:
            most = len(self.tables[which]) - 1
            raise ValueError(f"tokens: got one outside the vocabulary, wanted 0 to {most}") from error
        x = x if self.scale is None else x * self.scale
        if not self.sinusoids:
            return x
        width = x.shape[1]
        frequency = 10000.0 ** (torch.arange(0, width, 2, dtype=torch.float64, device=x.device) / -width)
        angle = torch.outer(torch.arange(length, dtype=torch.float64, device=x.device), frequency)
        waves = torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)[:, :width].to(x.dtype)
        return x + waves[at]


def _heads(queries: int, keys: int, values: int, heads: int) -> tuple[int, int]:
    """H and G of these widths of the projections."""
    if heads < 1 or queries % heads:
        raise ValueError(f"heads: got {heads}, wanted a divisor of {queries}, the width of wq")
    width = queries // heads
    groups = keys // width
    if groups == 0 or keys % width or heads % groups:
        raise ValueError(f"wk: got width {keys}, wanted {width}, the width of a head, times a divisor of {heads}")
    if values % groups:
        raise ValueError(f"wv: got width {values}, wanted a multiple of {groups}, the key heads of wk")
    return heads, groups


def _joined(parts: list[tuple[Tensor, Tensor | None]]) -> Tensor | None:
    """The biases of matrices side by side, 0 where there is none; None where there are none at all."""
    if all(bias is None for _, bias in parts):
        return None
    return torch.cat([matrix.new_zeros(matrix.shape[1]) if bias is None else bias for matrix, bias in parts])


def _linear(rows: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    return torch.mm(rows, matrix) if bias is None else torch.addmm(bias, rows, matrix)


def _added(x: Tensor, rows: Tensor, matrix: Tensor, bias: Tensor | None, alpha: float) -> Tensor:
    """alpha x + rows matrix + bias."""
    out = torch.addmm(x, rows, matrix, beta=alpha)
    return out if bias is None else out.add_(bias)


def _normed(x: Tensor, norm: Params) -> Tensor:
    """layer_norm, or without a bias rms_norm, whose eps differ."""
    weight, bias = norm["weight"], norm.get("bias")
    return F.rms_norm(x, weight.shape, weight, 1e-6) if bias is None else F.layer_norm(x, weight.shape, weight, bias)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x[N,heads,D] with channels j and j + D/2 turned as a pair."""
    a, b = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)


def _slopes(heads: int, device: torch.device) -> Tensor:
    """2^(-8 h / H) for a power of two, else those of the next lower one and every second of the next higher."""
    power = 1 << heads.bit_length() - 1
    steps = [2 * h for h in range(1, power + 1)] + list(range(1, 2 * (heads - power), 2))
    return 2.0 ** (torch.tensor(steps, dtype=torch.float64, device=device) * (-4.0 / power))


def _real(source: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor, Sizes]:
    """The real tokens of source[B,S], their positions, and how many each sample has."""
    if real is None:
        return source.flatten(), torch.arange(source.shape[1], device=source.device).repeat(len(source)), [source.shape]
    rows = real.flatten().nonzero()[:, 0]
    sizes = [(len(list(same)), length) for length, same in itertools.groupby(real.sum(1).tolist())]
    return source.flatten()[rows], rows % real.shape[1], sizes or [(0, real.shape[1])]


def _of_groups(bias: Tensor, at: Tensor, sizes: Sizes) -> Masks:
    """A bias [H,T,T] that goes by distance, as each group of samples sees it between tokens at these positions."""
    found: Masks = []
    for one, (samples, length) in zip(at.split([n * t for n, t in sizes]), sizes, strict=True):
        place = one.unflatten(0, (samples, length))
        if length == 0 or bool((place[:, -1] - place[:, 0] < length).all()):
            found.append(bias[:, :length, :length])  # no gaps: as good as the first positions
        else:
            found.append(bias[:, place[:, :, None], place[:, None]].movedim(1, 0))
    return found


def transformer(
    params: Params, *, heads: int, norm: str = "post", alpha: Any = 1.0, mask: Tensor | None = None,
    positions: str | None = "sinusoidal",
) -> Callable[..., Tensor]:  # fmt: skip
    """PackedTransformer of source[B,S] and target[B,T] with the mask[B,S] of the source."""
    made = PackedTransformer(params, heads=heads, norm=norm, alpha=alpha, positions=positions)
    return lambda source, target: made(source, target, mask)


VARIANTS = {"packed_models": {"transformer": transformer}}
# native_layer_norm keeps mean and 1/deviation in x's own dtype; its backward has nothing else, and sums in it.
CAPABILITIES = {
    "packed_models": {"transformer": Capabilities(saved_statistics="storage", gradient_accumulate="storage")}
}
