"""Encoder and decoder layers, stacks of them, and the encoder-decoder, in plain NumPy.

Queries, keys and values of self-attention come of one product with their three matrices side by side, and query
heads that share a key head are an axis of their own, so that nothing is repeated. float64 and float32 are computed
in their own dtype; bfloat16 (of ml_dtypes) and float16 are widened to float32 and rounded once at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veriformer.declarations import DTYPES, Capabilities

FRAMEWORK = "numpy"
Params = Mapping[str, Any]
Window = tuple[int | None, int | None]
_COMMON = Capabilities(
    dtypes=DTYPES,
    nan_contained=True,
    intermediate={"float64": "float64", "default": "float32"},
    rounds_probabilities=False,
    recomputes_probabilities=False,
)
CAPABILITIES = dict.fromkeys(("encoder_layer", "decoder_layer", "encoder", "decoder", "transformer"), _COMMON)


@dataclass(frozen=True)
class _Dialect:
    """What the keywords say, the same for every layer of a stack; causal is said by the kind of layer."""

    heads: int
    norm: str
    alpha: float
    mask: NDArray | None
    window: Window | None
    positions: str | None
    causal: bool = False
    memory_mask: NDArray | None = None

    def __post_init__(self) -> None:
        if self.norm not in ("post", "pre"):
            raise ValueError(f"norm: got {self.norm!r}, wanted 'post' or 'pre'")
        if self.positions not in (None, "rotary", "alibi"):
            raise ValueError(f"positions: got {self.positions!r}, wanted None, 'rotary' or 'alibi'")


def encoder_layer(
    x: NDArray, params: Params, *, heads: int, norm: str = "post", alpha: float = 1.0, mask: NDArray | None = None,
    window: Window | None = None, positions: str | None = None,
) -> NDArray:  # fmt: skip
    """Self-attention, then the feed-forward sublayer, each in a residual with its norm.

    x[B,T,d], params: attention, norm1, feed_forward, norm2 -> [B,T,d]
    post: norm(alpha x + F(x)); pre: x + F(norm(x))
    Source: Vaswani et al. 2017, section 3.1; Xiong et al. 2020, figure 1. A row that may see nothing attends to 0.
    Raises ValueError for an unknown norm or unknown positions.
    """
    how = _Dialect(heads, norm, alpha, mask, window, positions)
    return _layer(_wide(x), None, _widened(params), how).astype(x.dtype)


def decoder_layer(
    x: NDArray, memory: NDArray, params: Params, *, heads: int, norm: str = "post", alpha: float = 1.0,
    mask: NDArray | None = None, memory_mask: NDArray | None = None, window: Window | None = None,
    positions: str | None = None,
) -> NDArray:  # fmt: skip
    """Causal self-attention, attention to memory, then the feed-forward sublayer, each in a residual with its norm.

    x[B,T,d], memory[B,S,d], params: attention, norm1, cross_attention, norm2, feed_forward, norm3 -> [B,T,d]
    post: norm(alpha x + F(x)); pre: x + F(norm(x)), where memory is never normed
    Source: Vaswani et al. 2017, section 3.1. mask, window and positions are those of self-attention.
    Raises ValueError as encoder_layer does.
    """
    how = _Dialect(heads, norm, alpha, mask, window, positions, True, memory_mask)
    return _layer(_wide(x), _wide(memory), _widened(params), how).astype(x.dtype)


def encoder(
    x: NDArray, params: Params, *, heads: int, norm: str = "post", alpha: float = 1.0, mask: NDArray | None = None,
    window: Window | None = None, positions: str | None = None,
) -> NDArray:  # fmt: skip
    """Encoder layers one after the other, then the final norm where there is one.

    x[B,T,d], params: layers, perhaps norm -> [B,T,d]
    x = layer_n(…layer_1(x)), then norm(x)
    Source: Vaswani et al. 2017, section 3.1. Raises ValueError as encoder_layer does.
    """
    how = _Dialect(heads, norm, alpha, mask, window, positions)
    return _stack(_wide(x), None, _widened(params), how).astype(x.dtype)


def decoder(
    x: NDArray, memory: NDArray, params: Params, *, heads: int, norm: str = "post", alpha: float = 1.0,
    mask: NDArray | None = None, memory_mask: NDArray | None = None, window: Window | None = None,
    positions: str | None = None,
) -> NDArray:  # fmt: skip
    """Decoder layers one after the other, all with the same memory, then the final norm where there is one.

    x[B,T,d], memory[B,S,d], params: layers, perhaps norm -> [B,T,d]
    x = layer_n(…layer_1(x, memory)…, memory), then norm(x)
    Source: Vaswani et al. 2017, section 3.1. Raises ValueError as encoder_layer does.
    """
    how = _Dialect(heads, norm, alpha, mask, window, positions, True, memory_mask)
    return _stack(_wide(x), _wide(memory), _widened(params), how).astype(x.dtype)


def transformer(
    source: NDArray, target: NDArray, params: Params, *, heads: int, norm: str = "post", alpha: Any = 1.0,
    mask: NDArray | None = None, positions: str | None = "sinusoidal",
) -> NDArray:  # fmt: skip
    """The logits of what follows each target token, given those before it and all of the source.

    source[B,S], target[B,T], params: two embeddings, encoder, decoder, perhaps head and embedding_scale -> [B,T,V]
    decoder(embed(target), encoder(embed(source))) w + b; without a head, w is the target's embedding transposed
    Source: Vaswani et al. 2017, section 3. alpha may be a pair, of encoder and decoder; mask[B,S] hides padding.
    Raises ValueError as encoder_layer does.
    """
    w, dtype = _widened(params), params["target_embedding"].dtype
    of_encoder, of_decoder = alpha if isinstance(alpha, (tuple, list)) else (alpha, alpha)
    seen, inside = None if mask is None else mask[:, None, None, :], None if positions == "sinusoidal" else positions
    how = _Dialect(heads, norm, of_encoder, seen, None, inside)
    memory = _stack(_embedded(source, w, "source_embedding", positions), None, w["encoder"], how)
    how = _Dialect(heads, norm, of_decoder, None, None, inside, True, seen)
    y = _stack(_embedded(target, w, "target_embedding", positions), memory, w["decoder"], how)
    head = w.get("head", {"w": w["target_embedding"].T})
    return (y @ head["w"] + head.get("b", 0)).astype(dtype)


def _stack(x: NDArray, memory: NDArray | None, w: Params, how: _Dialect) -> NDArray:
    for layer in w["layers"]:
        x = _layer(x, memory, layer, how)
    return _normed(x, w["norm"]) if "norm" in w else x


def _layer(x: NDArray, memory: NDArray | None, w: Params, how: _Dialect) -> NDArray:
    """One layer; without memory it has no cross-attention, and one norm less."""
    x = _beside(x, w["norm1"], how, lambda z: _to_itself(z, w["attention"], how))
    if memory is not None:
        x = _beside(x, w["norm2"], how, lambda z: _to_memory(z, memory, w["cross_attention"], how))
    last = w["norm2"] if memory is None else w["norm3"]
    return _beside(x, last, how, lambda z: _feed_forward(z, w["feed_forward"]))


def _beside(x: NDArray, norm: Params, how: _Dialect, sublayer: Callable[[NDArray], NDArray]) -> NDArray:
    """A sublayer beside its residual connection, with its norm before or after."""
    if how.norm == "pre":
        return x + sublayer(_normed(x, norm))
    return _normed(how.alpha * x + sublayer(x), norm)


def _normed(x: NDArray, w: Params) -> NDArray:
    """Layer norm, or without a bias the root mean square norm."""
    if "bias" not in w:
        return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + 1e-6) * w["weight"]
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt(np.square(centred).mean(-1, keepdims=True) + 1e-5) * w["weight"] + w["bias"]


def _feed_forward(x: NDArray, w: Params) -> NDArray:
    inner = np.maximum(x @ w["w1"] + w.get("b1", 0), 0)
    return inner @ w["w2"] + w.get("b2", 0)


def _to_itself(x: NDArray, w: Params, how: _Dialect) -> NDArray:
    """Attention of x[B,T,d] to itself, within mask and window, by its positions."""
    q, k, v = np.split(_projected(x, w, "qkv"), np.cumsum([w["wq"].shape[1], w["wk"].shape[1]]), axis=-1)
    q, k, v = _headed(q, k, v, how.heads)
    length, bias = x.shape[1], None
    ahead = np.arange(length) - np.arange(length)[:, None]
    if how.positions == "rotary":
        q, k = _turned(q), _turned(k)
    if how.positions == "alibi":
        bias = (_slopes(how.heads)[:, None, None] * -np.abs(ahead)).astype(x.dtype)
    left, right = how.window if how.window is not None else (None, None)
    visible = (ahead >= (-length if left is None else -left)) & (ahead <= (length if right is None else right))
    visible = visible & (ahead <= 0) if how.causal else visible
    return _mixed(q, k, v, visible if how.mask is None else visible & how.mask, bias, w)


def _to_memory(x: NDArray, memory: NDArray, w: Params, how: _Dialect) -> NDArray:
    """Attention of x[B,T,d] to memory[B,S,d], of which it sees all that memory_mask allows."""
    k, v = np.split(_projected(memory, w, "kv"), [w["wk"].shape[1]], axis=-1)
    visible = np.ones((1, 1, 1, 1), bool) if how.memory_mask is None else how.memory_mask
    return _mixed(*_headed(_projected(x, w, "q"), k, v, how.heads), visible, None, w)


def _projected(x: NDArray, w: Params, names: str) -> NDArray:
    """x[B,T,d] times these matrices side by side, plus their biases; one that is not there is 0."""
    y = x @ np.concatenate([w["w" + name] for name in names], axis=1)
    if any("b" + name in w for name in names):
        y = y + np.concatenate([w.get("b" + name, np.zeros(w["w" + name].shape[1], x.dtype)) for name in names])
    return y


def _headed(q: NDArray, k: NDArray, v: NDArray, heads: int) -> tuple[NDArray, NDArray, NDArray]:
    """q[B,G,R,T,D], k[B,G,1,S,D] and v[B,G,1,S,Dv]: query head g R + r uses key head g.

    Raises ValueError where the widths do not fit these heads.
    """
    width = q.shape[-1] // heads
    groups = k.shape[-1] // width if width else 0
    if not groups or q.shape[-1] % heads or k.shape[-1] % width or heads % groups or v.shape[-1] % groups:
        raise ValueError(f"heads: got {heads} for widths {q.shape[-1]}, {k.shape[-1]} and {v.shape[-1]}")
    q = q.reshape(*q.shape[:2], groups, heads // groups, width).transpose(0, 2, 3, 1, 4)
    k, v = (a.reshape(*a.shape[:2], groups, 1, -1).transpose(0, 2, 3, 1, 4) for a in (k, v))
    return q, k, v


def _mixed(q: NDArray, k: NDArray, v: NDArray, visible: NDArray, bias: NDArray | None, w: Params) -> NDArray:
    """The values that each query sees, averaged, joined over the heads, times wo, plus bo."""
    batch, groups, each, queries, width = q.shape
    shape = (groups, each, queries, k.shape[3])
    scores = q @ k.swapaxes(-1, -2) * width**-0.5
    scores = scores if bias is None else scores + bias.reshape(shape)
    seen = np.broadcast_to(visible, (batch, groups * each, *shape[2:])).reshape(batch, *shape)
    out = _averaged(_weights(scores, seen), v, seen)
    joined = out.transpose(0, 3, 1, 2, 4).reshape(batch, queries, -1)
    return joined @ w["wo"] + w.get("bo", 0)


def _weights(scores: NDArray, seen: NDArray) -> NDArray:
    """The softmax over what is seen; a row that sees nothing is all 0."""
    scores = np.where(seen, scores, -np.inf)
    top = scores.max(-1, keepdims=True, initial=-np.inf)
    shares = np.exp(scores - np.where(np.isneginf(top), 0, top))
    total = shares.sum(-1, keepdims=True)
    return shares / np.where(total == 0, 1, total)


def _averaged(weights: NDArray, values: NDArray, seen: NDArray) -> NDArray:
    """weights @ values; a value that is not finite reaches only those who see it (0 times NaN is NaN)."""
    finite = np.isfinite(values)
    out = weights @ np.where(finite, values, 0)
    if not finite.all():
        reached = seen[..., None] & ~finite[..., None, :, :]
        out = out + np.where(reached, weights[..., None] * values[..., None, :, :], 0).sum(-2)
    return out


def _turned(x: NDArray) -> NDArray:
    """Rotary embedding of x[…,T,D] at positions 0 to T - 1; channels j and j + D/2 are a pair."""
    half = x.shape[-1] // 2
    angle = np.arange(x.shape[-2])[:, None] * 10000.0 ** (-np.arange(half) / half)
    cos, sin = np.cos(angle).astype(x.dtype), np.sin(angle).astype(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, first * sin + second * cos], -1)


def _slopes(heads: int) -> NDArray:
    """ALiBi's rates: of the next lower power of two, then every second of the one above."""
    power = 1 << (heads.bit_length() - 1)
    exponents = np.append(np.arange(2, 2 * power + 1, 2), np.arange(1, 2 * (heads - power), 2))
    return np.exp2(-4.0 * exponents / power)


def _embedded(ids: NDArray, w: Params, name: str, positions: str | None) -> NDArray:
    """[B,T] -> [B,T,d]: rows of the table, scaled, plus sinusoids where they are the positions."""
    x = w[name][ids] * w.get("embedding_scale", 1.0)
    if positions != "sinusoidal":
        return x
    channel = np.arange(x.shape[2])
    angle = np.arange(x.shape[1])[:, None] * 10000.0 ** (-(channel - channel % 2) / x.shape[2])
    return x + np.where(channel % 2 == 0, np.sin(angle), np.cos(angle)).astype(x.dtype)


def _widened(params: Any) -> Any:
    """Every array of nested dicts and lists, widened; a plain number stays one."""
    if isinstance(params, Mapping):
        return {name: _widened(part) for name, part in params.items()}
    if isinstance(params, (list, tuple)):
        return [_widened(part) for part in params]
    return _wide(params) if isinstance(params, np.ndarray) else params


def _wide(x: NDArray) -> NDArray:
    return x if x.dtype == np.float64 else x.astype(np.float32)
