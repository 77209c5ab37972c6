"""torch: attention, layers and stacks as classes that hold their weights packed.

Tokens are rows [tokens, width]. Queries, keys and values come of one product by a matrix [in, out], put together when
an object is made, those of a memory of one for all layers; residuals are addends of products, and relu works in
place. `PackedEncoder.real` takes padding out once, before the first layer. Autograd has every gradient, of the
weights that were given; whoever changes those makes the object anew: one copy of wq, wk, wv.
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
Window = tuple[int | None, int | None]
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
    """What cross-attention looks at: keys and values, the samples of queries and of these rows, and their masks."""

    kv: Tensor
    mine: Sizes
    theirs: Sizes
    masks: Masks


class _Real(NamedTuple):
    """The real tokens of a batch [B,T]: their places in B*T rows, their positions, and how many each sample has."""

    rows: Tensor
    at: Tensor
    sizes: Sizes

    @classmethod
    def of(cls, real: Tensor) -> _Real:
        rows = real.flatten().nonzero()[:, 0]
        sizes = [(len(list(same)), length) for length, same in itertools.groupby(real.sum(1).tolist())]
        return cls(rows, rows % real.shape[1], sizes or [(0, real.shape[1])])


class PackedAttention:
    """Multi-head attention of given weights, H query heads, G key heads.

    params: wq[d,H*D], wk[d,G*D], wv[d,G*Dv], wo[H*Dv,d], perhaps bq, bk, bv, bo
    concat_h(softmax(q_h k_g^T D^-1/2) v_g) wo + bo
    Source: Vaswani et al. 2017, section 3.2.2; Ainslie et al. 2023 (GQA), section 2.2.
    Raises ValueError for widths that heads do not divide.
    """

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

    def __call__(self, x: Tensor, memory: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        """x[B,Tq,d], memory[B,Tk,d], which may be x itself -> [B,Tq,d].

        mask[B|1,H|1,Tq|1,Tk|1]: True = may attend; causal: the last query stands beside the last key.
        """
        rows, tokens, keys, mine = x.flatten(0, 1), x.shape[1], memory.shape[1], [x.shape[:2]]
        if causal and (mask is not None or tokens != keys):
            triangle = torch.ones(tokens, keys, dtype=torch.bool, device=x.device).tril(keys - tokens)
            mask, causal = (triangle if mask is None else triangle & mask), False
        if memory is x:
            out = self.to_itself(rows, _Sight(mine, [mask], causal))
        else:
            kv = _linear(memory.flatten(0, 1), *self.of_memory)
            out = self.to_memory(rows, _Seen(kv, mine, [memory.shape[:2]], [mask]), causal)
        return _linear(out, self.outer, self.outer_bias).view(*x.shape[:2], self.outer.shape[1])

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

    def to_memory(self, rows: Tensor, seen: _Seen, causal: bool = False) -> Tensor:
        """Rows [N,d] to keys and values [M,G*(D+Dv)] of their own sample -> [N,H*Dv], not yet projected."""
        q = _linear(rows, *self.of_queries)
        return self._mixed(q, *seen.kv.split(self.widths[1:], 1), seen.mine, seen.theirs, seen.masks, causal)

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
        self.attention = PackedAttention(params["attention"], heads)
        self.cross = PackedAttention(params["cross_attention"], heads) if "cross_attention" in params else None
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
        self, params: Params, *, heads: int, norm: str = "post", alpha: float = 1.0, window: Window | None = None,
        positions: str | None = None, causal: bool = False,
    ) -> None:  # fmt: skip
        if positions not in (None, "rotary", "alibi"):
            raise ValueError(f"positions: got {positions!r}, wanted None, 'rotary' or 'alibi'")
        self.layers = [_Layer(layer, heads, norm, alpha) for layer in params["layers"]]
        self.last, self.heads = params.get("norm"), heads
        self.causal, self.window, self.positions = causal, window, positions

    def sight(self, x: Tensor, batch: int, tokens: int, mask: Tensor | None, real: _Real | None = None) -> _Sight:
        """Of rows x: all of batch * tokens, or the real ones."""
        turn, bare = None, mask is None and self.window is None and self.positions != "alibi"
        if self.positions == "rotary":
            turn = self._tables(x, torch.arange(tokens, device=x.device).repeat(batch) if real is None else real.at)
        if self.window is not None or self.positions == "alibi" or self.causal and not bare:
            mask = self._limited(x, tokens, mask)
        sizes, masks = ([(batch, tokens)], [mask]) if real is None else (real.sizes, _of_groups(mask, real))
        return _Sight(sizes, masks, self.causal and bare, turn)

    def _limited(self, x: Tensor, tokens: int, mask: Tensor | None) -> Tensor | None:
        """The mask with triangle and window, or the bias of ALiBi, in which -inf hides."""
        ahead = torch.arange(tokens, device=x.device) - torch.arange(tokens, device=x.device)[:, None]
        left, right = self.window or (None, None)
        limits = [ahead <= 0] if self.causal else []
        limits += [ahead >= -left] if left is not None else []
        limits += [ahead <= right] if right is not None else []
        for limit in limits:
            mask = limit if mask is None else mask & limit
        if self.positions != "alibi":
            return mask
        penalty = (_slopes(self.heads, x.device)[:, None, None] * -ahead.abs()).to(x.dtype)
        return penalty if mask is None else penalty.masked_fill(~mask, -torch.inf)

    def _tables(self, x: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [N,1,D/2] of rows at positions `at`."""
        width = self.layers[0].attention.width
        frequency = 10000.0 ** -(torch.arange(0, width, 2, dtype=torch.float64, device=x.device) / width)
        angle = torch.outer(at.to(torch.float64), frequency)[:, None]
        wide = torch.promote_types(x.dtype, torch.float32)
        return angle.cos().to(wide), angle.sin().to(wide)

    def _ended(self, x: Tensor) -> Tensor:
        return x if self.last is None else _normed(x, self.last)


class PackedEncoder(_Stack):
    """Encoder layers of given weights; params: layers, perhaps norm.

    post: norm(alpha x + F(x)); pre: x + F(norm(x)), for each sublayer F, then the final norm
    Source: Vaswani et al. 2017, section 3.1; Xiong et al. 2020, figure 1.
    Raises ValueError for an unknown norm, unknown positions and widths that heads do not divide.
    """

    def __call__(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x[B,T,d], mask[B|1,H|1,T|1,T|1] -> [B,T,d]."""
        return self._over(x.flatten(0, 1), self.sight(x, len(x), x.shape[1], mask)).view(x.shape)

    def real(self, x: Tensor, real: Tensor) -> Tensor:
        """The same where `real`[B,T] is True, with those tokens for keys; 0 elsewhere, where nothing is calculated.

        x[B,T,d] -> [B,T,d]; attention goes sample by sample, those of one length that lie together at once.
        """
        if real.shape != x.shape[:2]:
            raise ValueError(f"real: got shape {list(real.shape)}, wanted {list(x.shape[:2])}, as of x")
        found = _Real.of(real)
        rows = self._over(x.flatten(0, 1).index_select(0, found.rows), self.sight(x, *real.shape, None, found))
        return rows.new_zeros(real.numel(), rows.shape[1]).index_copy(0, found.rows, rows).unflatten(0, real.shape)

    def _over(self, rows: Tensor, sight: _Sight) -> Tensor:
        for layer in self.layers:
            rows = layer(rows, sight)
        return self._ended(rows)


class PackedDecoder(_Stack):
    """Decoder layers of given weights, all with one memory; params: layers, perhaps norm.

    Norms, source and errors are those of PackedEncoder; self-attention is causal.
    """

    def __init__(self, params: Params, **words: Any) -> None:
        super().__init__(params, causal=True, **words)
        parts = [layer.cross.of_memory for layer in self.layers]
        self.widths = [matrix.shape[1] for matrix, _ in parts]
        self.memory, self.memory_bias = torch.cat([matrix for matrix, _ in parts], 1), _joined(parts)

    def __call__(
        self, x: Tensor, memory: Tensor, mask: Tensor | None = None, memory_mask: Tensor | None = None
    ) -> Tensor:
        """x[B,T,d], memory[B,S,d], mask[B|1,H|1,T|1,T|1], memory_mask[B|1,H|1,T|1,S|1] -> [B,T,d]."""
        rows, theirs, masks = memory.flatten(0, 1), [memory.shape[:2]], [memory_mask]
        if memory_mask is not None and memory_mask.shape[1:3] == (1, 1):  # rows that nobody sees are left out
            real = _Real.of(memory_mask[:, 0, 0].expand(memory.shape[:2]))
            rows, theirs, masks = rows.index_select(0, real.rows), real.sizes, [None] * len(real.sizes)
        each = _linear(rows, self.memory, self.memory_bias).split(self.widths, 1)
        mine = [(samples, x.shape[1]) for samples, _ in theirs]
        sight, y = self.sight(x, len(x), x.shape[1], mask), x.flatten(0, 1)
        for layer, kv in zip(self.layers, each, strict=True):
            y = layer(y, sight, _Seen(kv, mine, theirs, masks))
        return self._ended(y).view(x.shape)


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


def _of_groups(mask: Tensor | None, real: _Real) -> Masks:
    """A mask [T,T] or bias [H,T,T] that goes by distance, as each group of samples sees it between its real tokens."""
    if mask is None:
        return [None] * len(real.sizes)
    found, mask = [], mask if mask.ndim == 3 else mask[None]
    for at, (samples, length) in zip(real.at.split([n * t for n, t in real.sizes]), real.sizes, strict=True):
        place = at.unflatten(0, (samples, length))
        if length == 0 or bool((place[:, -1] - place[:, 0] < length).all()):
            found.append(mask[..., :length, :length])  # no gaps: as good as the first positions
        else:
            found.append(mask[..., place[:, :, None], place[:, None]].movedim(-3, 0))
    return found


def multi_head_attention(
    params: Params, *, heads: int, mask: Tensor | None = None, causal: bool = False
) -> Callable[..., Tensor]:
    """PackedAttention of x[B,Tq,d] and memory[B,Tk,d] with these masks."""
    made = PackedAttention(params, heads)
    return lambda x, memory: made(x, memory, mask, causal)


def encoder(
    params: Params, *, heads: int, norm: str = "post", alpha: float = 1.0, mask: Tensor | None = None,
    window: Window | None = None, positions: str | None = None,
) -> Callable[..., Tensor]:  # fmt: skip
    """PackedEncoder of x[B,T,d] with this mask."""
    made = PackedEncoder(params, heads=heads, norm=norm, alpha=alpha, window=window, positions=positions)
    return lambda x: made(x, mask)


def decoder(
    params: Params, *, heads: int, norm: str = "post", alpha: float = 1.0, mask: Tensor | None = None,
    memory_mask: Tensor | None = None, window: Window | None = None, positions: str | None = None,
) -> Callable[..., Tensor]:  # fmt: skip
    """PackedDecoder of x[B,T,d] and memory[B,S,d] with these masks."""
    made = PackedDecoder(params, heads=heads, norm=norm, alpha=alpha, window=window, positions=positions)
    return lambda x, memory: made(x, memory, mask, memory_mask)


def encoder_layer(
    params: Params, *, heads: int, norm: str = "post", alpha: float = 1.0, mask: Tensor | None = None,
    window: Window | None = None, positions: str | None = None,
) -> Callable[..., Tensor]:  # fmt: skip
    """PackedEncoder of one layer."""
    words: dict[str, Any] = {"norm": norm, "alpha": alpha, "mask": mask, "window": window, "positions": positions}
    return encoder({"layers": [params]}, heads=heads, **words)


def decoder_layer(
    params: Params, *, heads: int, norm: str = "post", alpha: float = 1.0, mask: Tensor | None = None,
    memory_mask: Tensor | None = None, window: Window | None = None, positions: str | None = None,
) -> Callable[..., Tensor]:  # fmt: skip
    """PackedDecoder of one layer."""
    masks: dict[str, Any] = {"mask": mask, "memory_mask": memory_mask, "window": window}
    return decoder({"layers": [params]}, heads=heads, norm=norm, alpha=alpha, positions=positions, **masks)


_MADE = (multi_head_attention, encoder_layer, encoder, decoder_layer, decoder)
VARIANTS = {"packed": {make.__name__: make for make in _MADE}}
# native_layer_norm keeps mean and 1/deviation in x's own dtype; its backward has nothing else, and sums in it.
_NORMED = Capabilities(saved_statistics="storage", gradient_accumulate="storage")
CAPABILITIES = {"packed": {**dict.fromkeys(VARIANTS["packed"], _NORMED), "multi_head_attention": Capabilities()}}
