"""Encoder and decoder layers, stacks of them and the encoder-decoder, written by hand of torch.nn.functional.

Attention is scaled_dot_product_attention: triangle, window and mask go in as one boolean mask, and ALiBi as a float
one, in which -inf hides. Every keyword is there, and autograd has the gradient of every one.
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
Window = tuple[int | None, int | None]
# native_layer_norm keeps mean and 1/deviation in x's own dtype; its backward has nothing else, and sums in it.
_COMMON = Capabilities(saved_statistics="storage", gradient_accumulate="storage")
CAPABILITIES = dict.fromkeys(("encoder_layer", "decoder_layer", "encoder", "decoder", "transformer"), _COMMON)


@dataclass(frozen=True)
class _Options:
    """The keywords of a layer; `causal` goes with its kind."""

    heads: int
    norm: str
    alpha: float
    window: Window | None
    positions: str | None
    mask: Tensor | None
    memory_mask: Tensor | None = None
    causal: bool = False

    def __post_init__(self) -> None:
        if self.norm not in ("post", "pre"):
            raise ValueError(f"norm: got {self.norm!r}, wanted 'post' or 'pre'")
        if self.positions not in (None, "rotary", "alibi"):
            raise ValueError(f"positions: got {self.positions!r}, wanted None, 'rotary' or 'alibi'")


def encoder_layer(
    x: Tensor, params: Params, *, heads: int, norm: str = "post", alpha: float = 1.0, mask: Tensor | None = None,
    window: Window | None = None, positions: str | None = None,
) -> Tensor:  # fmt: skip
    """Self-attention, then the feed-forward sublayer, each in a residual with its norm.

    x[B,T,d], params: attention, norm1, feed_forward, norm2 -> [B,T,d]
    post: norm(alpha x + F(x)); pre: x + F(norm(x))
    Source: Vaswani et al. 2017, section 3.1; Xiong et al. 2020, figure 1. A row that may see nothing attends to 0.
    Raises ValueError for an unknown norm or unknown positions.
    """
    return _layer(x, None, params, _Options(heads, norm, alpha, window, positions, mask))


def decoder_layer(
    x: Tensor, memory: Tensor, params: Params, *, heads: int, norm: str = "post", alpha: float = 1.0,
    mask: Tensor | None = None, memory_mask: Tensor | None = None, window: Window | None = None,
    positions: str | None = None,
) -> Tensor:  # fmt: skip
    """Causal self-attention, attention to memory, then the feed-forward sublayer, each in a residual with its norm.

    x[B,T,d], memory[B,S,d], params: attention, norm1, cross_attention, norm2, feed_forward, norm3 -> [B,T,d]
    post: norm(alpha x + F(x)); pre: x + F(norm(x)), where memory is never normed
    Source: Vaswani et al. 2017, section 3.1. mask, window and positions are those of self-attention.
    Raises ValueError as encoder_layer does.
    """
    return _layer(x, memory, params, _Options(heads, norm, alpha, window, positions, mask, memory_mask, True))


def encoder(
    x: Tensor, params: Params, *, heads: int, norm: str = "post", alpha: float = 1.0, mask: Tensor | None = None,
    window: Window | None = None, positions: str | None = None,
) -> Tensor:  # fmt: skip
    """Encoder layers one after the other, then the final norm where there is one.

    x[B,T,d], params: layers, perhaps norm -> [B,T,d]
    x = layer_n(…layer_1(x)), then norm(x)
    Source: Vaswani et al. 2017, section 3.1. Raises ValueError as encoder_layer does.
    """
    return _stack(x, None, params, _Options(heads, norm, alpha, window, positions, mask))


def decoder(
    x: Tensor, memory: Tensor, params: Params, *, heads: int, norm: str = "post", alpha: float = 1.0,
    mask: Tensor | None = None, memory_mask: Tensor | None = None, window: Window | None = None,
    positions: str | None = None,
) -> Tensor:  # fmt: skip
    """Decoder layers one after the other, all with the same memory, then the final norm where there is one.

    x[B,T,d], memory[B,S,d], params: layers, perhaps norm -> [B,T,d]
    x = layer_n(…layer_1(x, memory)…, memory), then norm(x)
    Source: Vaswani et al. 2017, section 3.1. Raises ValueError as encoder_layer does.
    """
    return _stack(x, memory, params, _Options(heads, norm, alpha, window, positions, mask, memory_mask, True))


def transformer(
    source: Tensor, target: Tensor, params: Params, *, heads: int, norm: str = "post", alpha: Any = 1.0,
    mask: Tensor | None = None, positions: str | None = "sinusoidal",
) -> Tensor:  # fmt: skip
    """The logits of what follows each target token, given those before it and all of the source.

    source[B,S], target[B,T], params: two embeddings, encoder, decoder, perhaps head and embedding_scale -> [B,T,V]
    decoder(embed(target), encoder(embed(source))) w + b; without a head, w is the target's embedding transposed
    Source: Vaswani et al. 2017, section 3. alpha may be a pair, of encoder and decoder; mask[B,S] hides padding.
    Raises ValueError as encoder_layer does.
    """
    first, second = alpha if isinstance(alpha, (tuple, list)) else (alpha, alpha)
    seen, kind = None if mask is None else mask[:, None, None], None if positions == "sinusoidal" else positions
    scale, added = params.get("embedding_scale"), positions == "sinusoidal"
    x = _embedded(source, params["source_embedding"], scale, added)
    memory = _stack(x, None, params["encoder"], _Options(heads, norm, first, None, kind, seen))
    y = _embedded(target, params["target_embedding"], scale, added)
    y = _stack(y, memory, params["decoder"], _Options(heads, norm, second, None, kind, None, seen, True))
    if "head" not in params:
        return F.linear(y, params["target_embedding"])
    return F.linear(y, params["head"]["w"].T, params["head"].get("b"))


def _stack(x: Tensor, memory: Tensor | None, params: Params, options: _Options) -> Tensor:
    for layer in params["layers"]:
        x = _layer(x, memory, layer, options)
    return _normed(x, params["norm"]) if "norm" in params else x


def _layer(x: Tensor, memory: Tensor | None, params: Params, options: _Options) -> Tensor:
    """The sublayers that the weights are of, in the order of their norms."""

    def to_itself(z: Tensor) -> Tensor:
        return _self_attention(z, params["attention"], options)

    def to_memory(z: Tensor) -> Tensor:
        return _cross_attention(z, memory, params["cross_attention"], options)

    def feed_forward(z: Tensor) -> Tensor:
        w = params["feed_forward"]
        return F.linear(F.relu(F.linear(z, w["w1"].T, w.get("b1"))), w["w2"].T, w.get("b2"))

    sublayers = (to_itself, feed_forward) if memory is None else (to_itself, to_memory, feed_forward)
    for number, sublayer in enumerate(sublayers, 1):
        x = _added(x, sublayer, params[f"norm{number}"], options)
    return x


def _added(x: Tensor, sublayer: Callable[[Tensor], Tensor], norm: Params, options: _Options) -> Tensor:
    if options.norm == "pre":
        return x + sublayer(_normed(x, norm))
    return _normed(torch.add(sublayer(x), x, alpha=options.alpha), norm)


def _normed(x: Tensor, norm: Params) -> Tensor:
    """layer_norm, or without a bias rms_norm, whose eps differ."""
    if "bias" in norm:
        return F.layer_norm(x, x.shape[-1:], norm["weight"], norm["bias"], 1e-5)
    return F.rms_norm(x, x.shape[-1:], norm["weight"], 1e-6)


def _self_attention(x: Tensor, w: Params, options: _Options) -> Tensor:
    """Of x[B,T,d] to itself."""
    groups = w["wk"].shape[1] * options.heads // w["wq"].shape[1]
    q, k, v = (_headed(x, w, name, heads) for name, heads in (("q", options.heads), ("k", groups), ("v", groups)))
    ahead = torch.arange(x.shape[1], device=x.device)
    ahead = ahead - ahead[:, None]
    if options.positions == "rotary":
        q, k = _rotary(q), _rotary(k)
    visible = _visible(ahead, options)
    if options.positions == "alibi":
        penalty = (_slopes(options.heads, x.device)[:, None, None] * -ahead.abs()).to(x.dtype)
        visible = penalty if visible is None else penalty.masked_fill(~visible, -torch.inf)
    return _mixed(q, k, v, visible, w)


def _cross_attention(x: Tensor, memory: Tensor, w: Params, options: _Options) -> Tensor:
    """Of x[B,T,d] to memory[B,S,d], whatever the positions of either."""
    groups = w["wk"].shape[1] * options.heads // w["wq"].shape[1]
    k, v = (_headed(memory, w, name, groups) for name in "kv")
    return _mixed(_headed(x, w, "q", options.heads), k, v, options.memory_mask, w)


def _headed(rows: Tensor, w: Params, name: str, heads: int) -> Tensor:
    """[B,T,d] -> [B,heads,T,D], projected."""
    return F.linear(rows, w["w" + name].T, w.get("b" + name)).unflatten(-1, (heads, -1)).transpose(1, 2)


def _mixed(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, w: Params) -> Tensor:
    """The values averaged, joined over the heads and projected."""
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=k.shape[1] < q.shape[1])
    return F.linear(out.transpose(1, 2).flatten(2), w["wo"].T, w.get("bo"))


def _visible(ahead: Tensor, options: _Options) -> Tensor | None:
    """[T,T] or with the mask [B|1,H|1,T,T]: may query i see key j; None where nothing is hidden."""
    left, right = options.window if options.window is not None else (None, None)
    limits = [options.mask] if options.mask is not None else []
    limits += [ahead <= 0] if options.causal else []
    limits += [ahead >= -left] if left is not None else []
    limits += [ahead <= right] if right is not None else []
    visible = limits.pop() if limits else None
    for limit in limits:
        visible = visible & limit
    return visible


def _rotary(x: Tensor) -> Tensor:
    """[B,H,T,D] turned by positions 0 to T - 1; channels j and j + D/2 are a pair."""
    wide = torch.promote_types(x.dtype, torch.float32)
    frequency = 10000.0 ** -(torch.arange(0, x.shape[-1], 2, dtype=torch.float64, device=x.device) / x.shape[-1])
    angle = torch.outer(torch.arange(x.shape[-2], dtype=torch.float64, device=x.device), frequency)
    cos, sin = angle.cos().to(wide), angle.sin().to(wide)
    a, b = x.to(wide).chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)


def _slopes(heads: int, device: torch.device) -> Tensor:
    """2^(-8 h / H) for a power of two, else those of the next lower one and every second of the next higher."""
    power = 1 << heads.bit_length() - 1
    steps = [2 * h for h in range(1, power + 1)] + list(range(1, 2 * (heads - power), 2))
    return 2.0 ** (torch.tensor(steps, dtype=torch.float64, device=device) * (-4.0 / power))


def _embedded(ids: Tensor, table: Tensor, scale: Tensor | None, sinusoids: bool) -> Tensor:
    """[B,T] -> [B,T,d]: rows of the table, scaled, plus sinusoids where they are wanted."""
    x = F.embedding(ids, table)
    x = x if scale is None else x * scale
    if not sinusoids:
        return x
    width = x.shape[2]
    frequency = 10000.0 ** (torch.arange(0, width, 2, dtype=torch.float64, device=x.device) / -width)
    angle = torch.outer(torch.arange(x.shape[1], dtype=torch.float64, device=x.device), frequency)
    return x + torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)[:, :width].to(x.dtype)
