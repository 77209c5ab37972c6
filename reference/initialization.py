"""Parameters to begin with, as the sources draw them.

Conventions:
- The array API has no random numbers, so a generator is given: anything with `uniform(low, high, size)` and
  `normal(mean, deviation, size)`, as numpy.random.Generator. The parameters are the arrays that it returns.
- Every array is drawn by itself: no two layers begin alike.
- Matrices are uniform with variance 2 / (rows + columns), embeddings normal with variance 1/d, norms the
  identity, biases 0. The gain beta (`deep_norm`) acts on w1, w2, wv and wo alone.
"""

from __future__ import annotations

import math
from typing import Any

from array_api_compat import array_namespace

from veriformer.reference.layers import Params
from veriformer.reference.transformer import both

BASE = {"width": 512, "inner": 2048, "heads": 8, "layers": (6, 6)}
"""The base model of Vaswani et al. 2017, table 3; with one vocabulary of 37,000 it has 63,045,632 parameters."""


def initial_transformer(
    generator: Any, *, vocabulary: int, width: int, inner: int, heads: int, layers: Any, norm: str = "post",
    beta: Any = 1.0, biases: bool = False,
) -> Params:  # fmt: skip
    """Parameters of `transformer`: one table for source, target and head, as embedding scaled by sqrt(width).

    layers, beta: a number, or a pair (encoder, decoder); norm: "pre" gives both stacks a final norm; biases:
    whether attention has any.
    Source: Vaswani et al. 2017 (Attention Is All You Need), sections 3.1 to 3.4; the matrices: `xavier`.
    Raises ValueError for a vocabulary below 1 and heads that do not divide the width.
    """
    table, shape = _table(generator, vocabulary, width), {"width": width, "inner": inner, "heads": heads}
    params = {"source_embedding": table, "target_embedding": table, "embedding_scale": math.sqrt(width)}
    for name, depth, gain in zip(("encoder", "decoder"), both(layers), both(beta), strict=True):
        cross = name == "decoder"
        params[name] = _stack(generator, depth, norm, table, **shape, beta=gain, biases=biases, cross=cross)
    return params


def initial_decoder_lm(
    generator: Any, *, vocabulary: int, width: int, inner: int, heads: int, layers: int, groups: int | None = None,
    norm: str = "pre", beta: float = 1.0, biases: bool = False,
) -> Params:  # fmt: skip
    """Parameters of `decoder_lm`, whose table is its head as well; groups: key heads, as many as heads unless given.

    The other keywords, the source and the errors are those of `initial_transformer`.
    """
    shape = {"width": width, "inner": inner, "heads": heads, "groups": groups}
    table = _table(generator, vocabulary, width)
    return {"embedding": table} | _stack(generator, layers, norm, table, **shape, beta=beta, biases=biases)


def initial_layer(
    generator: Any, *, width: int, inner: int, heads: int, groups: int | None = None, beta: float = 1.0,
    biases: bool = False, cross: bool = False,
) -> Params:  # fmt: skip
    """Parameters of an encoder_layer, or with `cross` of a decoder_layer; otherwise as `initial_decoder_lm`."""
    groups = groups or heads
    if heads < 1 or width % heads or heads % groups:
        raise ValueError(
            f"initial_layer: heads: got {heads}, {groups} of keys, wanted a divisor of width, {width}, and one of that"
        )
    keys = width // heads * groups
    attention = {
        "wq": (width, width, 1.0),
        "wk": (width, keys, 1.0),
        "wv": (width, keys, beta),
        "wo": (width, width, beta),
    }
    layer = {"attention": _drawn(generator, attention, biases)}
    if cross:
        layer["cross_attention"] = _drawn(generator, attention, biases)
    layer["feed_forward"] = _drawn(generator, {"w1": (width, inner, beta), "w2": (inner, width, beta)}, True)
    like = layer["feed_forward"]["w2"]
    return layer | {f"norm{i + 1}": _norm(like) for i in range(len(layer))}


def xavier(generator: Any, rows: int, columns: int, gain: float = 1.0) -> Any:
    """A matrix[rows, columns] that keeps the variance of what passes through it, forward and backward.

        uniform in [-a, a),   a = gain sqrt(6 / (rows + columns))

    Source: Glorot, Bengio 2010 (Understanding the Difficulty of Training Deep Feedforward Neural Networks),
    equation 16; P126.
    """
    bound = gain * math.sqrt(6 / (rows + columns))
    return generator.uniform(-bound, bound, (rows, columns))


def _table(generator: Any, vocabulary: int, width: int) -> Any:
    """table[V, d], normal with variance 1/d."""
    if vocabulary < 1:
        raise ValueError(f"initial parameters: vocabulary: got {vocabulary}, wanted at least 1")
    return generator.normal(0.0, width**-0.5, (vocabulary, width))


def _stack(generator: Any, depth: int, norm: str, table: Any, **shape: Any) -> Params:
    """Layers, each drawn anew, and in pre-norm a final norm."""
    layers = [initial_layer(generator, **shape) for _ in range(depth)]
    return {"layers": layers} | ({"norm": _norm(table)} if norm == "pre" else {})


def _drawn(generator: Any, matrices: dict[str, Any], biases: bool) -> Params:
    """A matrix of each (rows, columns, gain), and a bias of zeros for each if wanted: b1 beside w1."""
    params = {name: xavier(generator, *size) for name, size in matrices.items()}
    if biases:
        params |= {"b" + name[1:]: array_namespace(w).zeros_like(w[0, :]) for name, w in params.items()}
    return params


def _norm(like: Any) -> Params:
    """weight[d] of ones, bias[d] of zeros, beside a matrix of d columns."""
    xp = array_namespace(like)
    return {"weight": xp.ones_like(like[0, :]), "bias": xp.zeros_like(like[0, :])}
