"""Equinox's modules with the given weights put into them by eqx.tree_at, mapped over the axes before the last by vmap.

A module takes one sequence or one row. Masks are boolean, True may be seen; a row that may see nothing gets the plain
mean of all values. There is no causal flag, bias or scale, and as many key heads as query heads. Statistics of norms
and the softmax of attention are float32 at least. Rotary embedding turns the pairs (j, j + D/2) at positions 0, 1, ...
All are compiled by jax.jit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from veriformer.declarations import Capabilities, Expected

FRAMEWORK = "jax"
DISTRIBUTIONS = ("equinox", "jax")
Params = Mapping[str, Any]
_LONGEST = 4096
"""Positions that a sequence is made for, at most."""


def _over_rows(module: Callable[[Array], Array], x: Array) -> Array:
    """The module on each row of x[..., d]."""
    return jax.vmap(module)(x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], -1)


def layer_norm(x: Array, weight: Array, bias: Array, *, eps: float = 1e-5) -> Array:
    """equinox.nn.LayerNorm on each row.

    x[..., d], weight[d], bias[d] -> [..., d]
    y = weight (x - mean) / sqrt(variance + eps) + bias
    Source: the Equinox manual, equinox.nn.LayerNorm.
    """
    module = eqx.nn.LayerNorm(x.shape[-1], eps=eps, dtype=x.dtype)
    return _over_rows(eqx.tree_at(lambda m: (m.weight, m.bias), module, (weight, bias)), x)


def rms_norm(x: Array, weight: Array, *, eps: float = 1e-6) -> Array:
    """equinox.nn.RMSNorm without a bias, on each row.

    x[..., d], weight[d] -> [..., d]
    y = weight x / sqrt(mean(x^2) + eps)
    Source: the Equinox manual, equinox.nn.RMSNorm.
    """
    module = eqx.nn.RMSNorm(x.shape[-1], eps=eps, use_bias=False, dtype=x.dtype)
    return _over_rows(eqx.tree_at(lambda m: m.weight, module, weight), x)


def embedding(ids: Array, table: Array) -> Array:
    """equinox.nn.Embedding on each id.

    ids[...], table[V,d] -> [..., d]
    Source: the Equinox manual, equinox.nn.Embedding.
    """
    return jax.vmap(eqx.nn.Embedding(weight=table))(ids.reshape(-1)).reshape(*ids.shape, -1)


def rotary_embedding(x: Array, positions: Array) -> Array:
    """equinox.nn.RotaryPositionalEmbedding by default, on sequences that have the rows of x at their positions.

    x[..., T, D], positions[T] -> [..., T, D]
    Source: the Equinox manual, equinox.nn.RotaryPositionalEmbedding, whose sequences begin at 0.
    Raises ValueError for positions below 0 and above 4095.
    """
    return _turned(x, _places(positions), 10000.0)


def rotary_embedding_second(x: Array, positions: Array, *, base: float = 10000.0) -> Array:
    """The same with theta = base, in a process that has used a module with the default one before.

    x[..., T, D], positions[T] -> [..., T, D]
    Source: the Equinox manual, equinox.nn.RotaryPositionalEmbedding.
    Raises ValueError for positions below 0 and above 4095.
    """
    places = _places(positions)
    eqx.nn.RotaryPositionalEmbedding(x.shape[-1], dtype=x.dtype)(jnp.zeros((_LONGEST, x.shape[-1]), x.dtype))
    return _turned(x, places, base)


def _places(positions: Array) -> tuple[int, ...]:
    places = tuple(int(place) for place in positions)
    if places and not 0 <= min(places) <= max(places) < _LONGEST:
        raise ValueError(f"positions: got {min(places)} to {max(places)}, wanted 0 to {_LONGEST - 1}")
    return places


@partial(jax.jit, static_argnames=("places", "base"))
def _turned(x: Array, places: tuple[int, ...], base: float) -> Array:
    module = eqx.nn.RotaryPositionalEmbedding(x.shape[-1], base, dtype=x.dtype)
    at = jnp.array(places, int)

    def one(rows: Array) -> Array:
        # a sequence holds one row at each position; rows that share one have sequences of their own
        length = max(places, default=0) + 1
        sequences = jax.vmap(lambda place, row: jnp.zeros((length, row.size), row.dtype).at[place].set(row))
        return jax.vmap(lambda place, sequence: module(sequence)[place])(at, sequences(at, rows))

    return jax.vmap(one)(x.reshape(-1, *x.shape[-2:])).reshape(x.shape)


def feed_forward(x: Array, w1: Array, b1: Array, w2: Array, b2: Array) -> Array:
    """equinox.nn.MLP of depth 1, whose activation is relu by default, on each row.

    x[..., d], w1[d,f], b1[f], w2[f,d], b2[d] -> [..., d]
    relu(x w1 + b1) w2 + b2
    Source: the Equinox manual, equinox.nn.MLP; its weights are [out, in].
    """
    (width, inner), out = w1.shape, w2.shape[1]
    module = eqx.nn.MLP(width, out, inner, 1, dtype=x.dtype, key=jax.random.key(0))
    at = lambda m: [part for layer in m.layers for part in (layer.weight, layer.bias)]  # noqa: E731
    return _over_rows(eqx.tree_at(at, module, [w1.T, b1, w2.T, b2]), x)


def _module(params: Params, heads: int) -> Any:
    """equinox.nn.MultiheadAttention of these weights. Raises ValueError for grouped heads."""
    (width, inner), (memory_width, keys), values = params["wq"].shape, params["wk"].shape, params["wv"].shape[1]
    if keys != inner:
        raise ValueError(f"wk: got width {keys}, wanted {inner}, that of wq: heads are not grouped")
    if values % heads:
        raise ValueError(f"wv: got width {values}, wanted a multiple of heads = {heads}")
    has = {name: f"b{letter}" in params for name, letter in zip(_PARTS, "qkvo", strict=True)}
    module = eqx.nn.MultiheadAttention(
        heads,
        width,
        memory_width,
        memory_width,
        params["wo"].shape[1],
        inner // heads,
        values // heads,
        **{f"use_{name}_bias": used for name, used in has.items()},
        dtype=params["wq"].dtype,
        key=jax.random.key(0),
    )
    for name, letter in zip(_PARTS, "qkvo", strict=True):
        put = [params[f"w{letter}"].T, *([params[f"b{letter}"]] if has[name] else [])]
        module = eqx.tree_at(lambda m, n=name: _leaves(getattr(m, f"{n}_proj")), module, put)
    return module


_PARTS = ("query", "key", "value", "output")


def _leaves(linear: Any) -> list[Array]:
    return [linear.weight] if linear.bias is None else [linear.weight, linear.bias]


def multi_head_attention(x: Array, memory: Array, params: Params, *, heads: int, mask: Array | None = None) -> Array:
    """equinox.nn.MultiheadAttention on each sequence of the batch.

    x[B,Tq,d], memory[B,Tk,d], params: wq, wk, wv, wo and perhaps biases -> [B,Tq,d]
    concat_h(softmax(q_h k_h^T D^-1/2) v_h) wo + bo
    Source: the Equinox manual, equinox.nn.MultiheadAttention; a mask is [heads,Tq,Tk] there.
    Raises ValueError for grouped heads.
    """
    module = _module(params, heads)
    if mask is None:
        return jax.vmap(lambda a, b: module(a, b, b))(x, memory)
    full = jnp.broadcast_to(mask, (len(x), heads, x.shape[1], memory.shape[1]))
    return jax.vmap(lambda a, b, allow: module(a, b, b, allow))(x, memory, full)


VARIANTS: dict[str, dict[str, Callable[..., Any]]] = {
    "modules": {name: jax.jit(one) for name, one in (("layer_norm", layer_norm), ("rms_norm", rms_norm))}
    | {"embedding": jax.jit(embedding), "feed_forward": jax.jit(feed_forward)},
    "heads": {"multi_head_attention": jax.jit(multi_head_attention, static_argnames="heads")},
    "rotary": {"rotary_embedding": rotary_embedding},
    "rotary_second": {"rotary_embedding": rotary_embedding_second},
}
_EACH = Capabilities(compiles_per_shape=True)
CAPABILITIES = {
    **{variant: {operation: _EACH for operation in functions} for variant, functions in VARIANTS.items()},
    # the gradient of the table is a scatter that adds in its own dtype
    "modules": {**dict.fromkeys(VARIANTS["modules"], _EACH), "embedding": replace(_EACH, accumulate="storage")},
    "heads": {"multi_head_attention": replace(_EACH, grouped_heads=False, empty_row="mean")},
}
_OF_ANOTHER = "the table of angles is shared by modules of one width and dtype, and forgets which theta it was made for"
_TURNED = {"x": [[0.0, 0.0, 0.0, 1.0]], "positions": [1]}
_APART = {
    "bfloat16": {"x": [[[0.0] * 16], [[0.0] * 13 + [-3.0, 0.0, 0.0]]], "positions": [27], "base": 100.0},
    "float16": {"x": [[[0.0] * 16], [[0.0] * 7 + [-1.0] + [0.0] * 8]], "positions": [10], "base": 500000.0},
}
EXPECTED = [
    Expected(
        f"rotary_embedding/{law}",
        reason=_OF_ANOTHER,
        link="reports/findings/equinox_rope_theta.py",
        case={**_TURNED, **base},
        where=where,
        variants=("rotary_second",),
    )
    for law, base, where in (
        ("equals-the-reference", {"base": 100.0}, "base != 10000"),
        ("gradient-equals-the-reference", {"base": 100.0}, "base != 10000"),
        ("pair-j-turns-by-its-own-angle", {"base": 100.0}, "base != 10000"),
        ("base-matters", {}, ""),
    )
]
EXPECTED += [
    Expected(
        "rotary_embedding/linear-in-x",
        reason=_OF_ANOTHER + "; numbers grow where they should shrink, and so does their rounding",
        link="reports/findings/equinox_rope_theta.py",
        case=case,
        when={"dtype": dtype},
        where="base != 10000",
        variants=("rotary_second",),
    )
    for dtype, case in _APART.items()
]
