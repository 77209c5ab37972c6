"""MLX on the CPU: mlx.core, mlx.core.fast, mlx.nn and mlx.optimizers.

NumPy arrays go in and come out; bfloat16 is that of ml_dtypes. float64 is there on the CPU, with exponentials that are
as exact as float32, and is left out. 16 bits are summed up in 16 bits where nothing else is asked for or said.
Attention wants a scale, takes one mask (the word "causal", booleans where True may attend, or floats that are added),
puts the causal triangle at the bottom right, and gives the mean of all values where a row may attend to nothing.
There are no windows and no softcap. Rotary embedding takes offsets, one for each example of a batch. Gradients are
those of mlx.core.vjp. AdamW corrects its averages only if asked to; clipping adds 1e-6 to the norm.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import ml_dtypes
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optimizers
import numpy as np
from numpy.typing import NDArray

from veriformer.declarations import DTYPES, Capabilities, Expected

FRAMEWORK = "numpy"
DISTRIBUTIONS = ("mlx",)
_BFLOAT = np.dtype(ml_dtypes.bfloat16)


def _given(value: Any) -> Any:
    """An array of NumPy as one of MLX, also those in a dict or a list; anything else as it is."""
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], np.ndarray):
        return [_given(one) for one in value]
    if isinstance(value, dict):
        return {name: _given(one) for name, one in value.items()}
    if not isinstance(value, (np.ndarray, np.generic)):
        return value
    value = np.asarray(value)
    if value.dtype == _BFLOAT:
        return mx.array(value.astype(np.float32)).astype(mx.bfloat16)
    return mx.array(value, dtype=getattr(mx, "bool_" if value.dtype == bool else value.dtype.name))


def _returned(value: Any) -> Any:
    """The other way."""
    if isinstance(value, (list, tuple)):
        return type(value)(_returned(one) for one in value)
    if value is None:
        return None
    return np.array(value.astype(mx.float32)).astype(_BFLOAT) if value.dtype == mx.bfloat16 else np.array(value)


def _numpy(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with arrays of NumPy."""

    @functools.wraps(function)
    def called(*arrays: Any, **words: Any) -> Any:
        answer = function(*map(_given, arrays), **{name: _given(value) for name, value in words.items()})
        return _returned(answer)

    return called


def _vjp(function: Callable[..., Any]) -> Callable[..., Any]:
    """Its gradients by mlx.core.vjp: of each array of real numbers, None for the others."""

    def products(cotangent: NDArray, *arrays: NDArray, **words: Any) -> tuple[Any, ...]:
        options = [name for name in inspect.signature(function).parameters if words.get(name) is not None]
        named = {name: _given(words[name]) for name in options if isinstance(words[name], np.ndarray)}
        every = [*map(_given, arrays), *named.values()]
        real = [i for i, array in enumerate(every) if mx.issubdtype(array.dtype, mx.floating)]

        def of_the_real(*given: mx.array) -> Any:
            filled = [given[real.index(i)] if i in real else array for i, array in enumerate(every)]
            return function(*filled[: len(arrays)], **words | dict(zip(named, filled[len(arrays) :], strict=True)))

        _, found = mx.vjp(of_the_real, [every[i] for i in real], [_given(cotangent)])
        return tuple(_returned(found[real.index(i)]) if i in real else None for i in range(len(every)))

    return products


def softmax(x: mx.array, *, axis: int = -1) -> mx.array:
    """mlx.core.softmax. x[...] -> [...]; exp(x) / sum exp(x) over axis. Source: the MLX manual."""
    return mx.softmax(x, axis)


def softmax_precise(x: mx.array, *, axis: int = -1) -> mx.array:
    """mlx.core.softmax with precise=True, which accumulates 16 bits in float32. Source: the MLX manual."""
    return mx.softmax(x, axis, precise=True)


def logsumexp(x: mx.array, *, axis: int = -1) -> mx.array:
    """mlx.core.logsumexp. x[...] -> [...] without axis; log sum exp(x). Source: the MLX manual."""
    return mx.logsumexp(x, axis)


def log_softmax(x: mx.array, *, axis: int = -1) -> mx.array:
    """mlx.nn.log_softmax. x[...] -> [...]; x - log sum exp(x) over axis. Source: the MLX manual."""
    return nn.log_softmax(x, axis)


def layer_norm(x: mx.array, weight: mx.array, bias: mx.array, *, eps: float = 1e-5) -> mx.array:
    """mlx.core.fast.layer_norm. x[...,d], weight[d], bias[d] -> [...,d]. Source: the MLX manual."""
    return mx.fast.layer_norm(x, weight, bias, eps)


def rms_norm(x: mx.array, weight: mx.array, *, eps: float = 1e-6) -> mx.array:
    """mlx.core.fast.rms_norm. x[...,d], weight[d] -> [...,d]. Source: the MLX manual."""
    return mx.fast.rms_norm(x, weight, eps)


def gelu(x: mx.array) -> mx.array:
    """mlx.nn.gelu. x[...] -> [...]; x (1 + erf(x / sqrt(2))) / 2. Source: the MLX manual."""
    return nn.gelu(x)


def gelu_tanh(x: mx.array) -> mx.array:
    """mlx.nn.gelu_approx. x[...] -> [...]; the form with tanh. Source: the MLX manual."""
    return nn.gelu_approx(x)


def relu(x: mx.array) -> mx.array:
    """mlx.nn.relu. x[...] -> [...]; max(x, 0). Source: the MLX manual."""
    return nn.relu(x)


def feed_forward(x: mx.array, w1: mx.array, b1: mx.array, w2: mx.array, b2: mx.array) -> mx.array:
    """mlx.core.addmm and relu. x[...,d], w1[d,f], b1[f], w2[f,d], b2[d] -> [...,d]. Source: the MLX manual."""
    rows = x.reshape(-1, x.shape[-1])
    return mx.addmm(b2, nn.relu(mx.addmm(b1, rows, w1)), w2).reshape(x.shape)


def embedding(ids: mx.array, table: mx.array) -> mx.array:
    """The indexing of mlx.nn.Embedding. ids[...], table[V,d] -> [...,d]. Source: the MLX manual."""
    layer = nn.Embedding(*table.shape)
    layer.weight = table
    return layer(ids)


def attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    mask: mx.array | None = None,
    bias: mx.array | None = None,
    sink: mx.array | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> mx.array:
    """mlx.core.fast.scaled_dot_product_attention.

    q[B,H,Tq,D], k[B,G,Tk,D], v[B,G,Tk,Dv] -> [B,H,Tq,Dv]
    softmax(q k^T scale + bias) v over the keys a row may see; query i sits at i + Tk - Tq
    Source: the MLX manual. Raises ValueError if more than one of mask, bias and causal is given.
    """
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=factor, mask=_mask(mask, bias, causal), sinks=sink)


def _mask(mask: mx.array | None, bias: mx.array | None, causal: bool) -> mx.array | str | None:
    masks = [one for one in (mask, bias, "causal" if causal else None) if one is not None]
    if len(masks) > 1:
        raise ValueError("mask, bias, causal: MLX takes one mask; pass one of them")
    return masks[0] if masks else None


def _rotary(traditional: bool) -> Callable[..., mx.array]:
    def rotary_embedding(x: mx.array, positions: mx.array, *, base: float = 10000.0) -> mx.array:
        """mlx.core.fast.rope, each position an example of one token with an offset of its own.

        x[...,T,D], positions[T] -> [...,T,D]; pairs turned by position base^(-2j/D). Source: the MLX manual.
        """
        T, D = x.shape[-2:]
        rows = x.reshape(-1, T, 1, D).transpose(1, 0, 2, 3)
        turned = mx.fast.rope(rows, D, traditional=traditional, base=base, scale=1.0, offset=positions)
        return turned.transpose(1, 0, 2, 3).reshape(x.shape)

    return rotary_embedding


def rotary_embedding_runs(x: mx.array, positions: mx.array, *, base: float = 10000.0) -> mx.array:
    """The same, with one call and one offset for each run of positions that follow one another."""
    places = positions.tolist()
    starts = [i for i in range(len(places)) if i == 0 or places[i] != places[i - 1] + 1]
    rows = x.reshape(1, -1, *x.shape[-2:])
    parts = [
        mx.fast.rope(part, x.shape[-1], traditional=False, base=base, scale=1.0, offset=places[start])
        for start, part in zip(starts, mx.split(rows, starts[1:], axis=2), strict=True)
    ]
    return mx.concatenate(parts, axis=2).reshape(x.shape)


def multi_head_attention(
    x: mx.array,
    memory: mx.array,
    params: Mapping[str, mx.array],
    *,
    heads: int,
    mask: mx.array | None = None,
    causal: bool = False,
) -> mx.array:
    """mlx.nn.MultiHeadAttention.

    x[B,Tq,d], memory[B,Tk,d], params: wq, wk, wv, wo, biases -> [B,Tq,d]. Source: the MLX manual.
    Raises ValueError if mask and causal are given.
    """
    wide, values = params["wq"].shape[1], params["wv"].shape[1]
    layer = nn.MultiHeadAttention(
        wide, heads, x.shape[-1], memory.shape[-1], value_dims=values, value_output_dims=params["wo"].shape[1]
    )
    places = {"q": layer.query_proj, "k": layer.key_proj, "v": layer.value_proj, "o": layer.out_proj}
    for letter, linear in places.items():
        linear.weight = params[f"w{letter}"].T
        if f"b{letter}" in params:
            linear.bias = params[f"b{letter}"]
    return layer(x, memory, memory, mask=_mask(mask, None, causal))


def cross_entropy(
    logits: mx.array, targets: mx.array, *, label_smoothing: float = 0.0, reduction: str = "mean"
) -> mx.array:
    """mlx.nn.losses.cross_entropy. logits[N,V], targets[N] -> [] or [N]. Source: the MLX manual."""
    return nn.losses.cross_entropy(logits, targets, label_smoothing=label_smoothing, reduction=reduction)


def adamw_step(
    param: mx.array,
    grad: mx.array,
    m: mx.array,
    v: mx.array,
    step: int,
    *,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> tuple[mx.array, mx.array, mx.array]:
    """mlx.optimizers.AdamW with bias_correction. param[...], grad[...], m[...], v[...] -> param, m, v."""
    optimizer = optimizers.AdamW(lr, [beta1, beta2], eps, weight_decay, bias_correction=True)
    optimizer.init({"one": param})
    optimizer.state["one"] = {"m": m, "v": v}
    optimizer.state["step"] = mx.array(step - 1, mx.uint64)
    new = optimizer.apply_gradients({"one": grad}, {"one": param})["one"]
    return new, optimizer.state["one"]["m"], optimizer.state["one"]["v"]


def clip_by_global_norm(grads: list[mx.array], *, max_norm: float) -> list[mx.array]:
    """mlx.optimizers.clip_grad_norm. A list of arrays -> the same, times min(1, max_norm / (norm + 1e-6))."""
    return list(optimizers.clip_grad_norm(grads, max_norm)[0])


_GRADED = {
    "softmax": softmax,
    "log_softmax": log_softmax,
    "logsumexp": logsumexp,
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "gelu": gelu,
    "relu": relu,
    "feed_forward": feed_forward,
    "embedding": embedding,
    "attention": attention,
    "rotary_embedding": _rotary(traditional=False),
    "cross_entropy": cross_entropy,
}
_OTHERS = {
    "multi_head_attention": multi_head_attention,
    "adamw_step": adamw_step,
    "clip_by_global_norm": clip_by_global_norm,
}


def _variant(graded: Mapping[str, Callable[..., Any]], others: Mapping[str, Callable[..., Any]]) -> dict[str, Any]:
    functions = {name: _numpy(function) for name, function in {**graded, **others}.items()}
    return {**functions, **{f"{name}_vjp": _vjp(function) for name, function in graded.items()}}


VARIANTS = {
    "default": _variant(_GRADED, _OTHERS),
    "precise": _variant({"softmax": softmax_precise}, {}),
    "traditional": _variant({"rotary_embedding": _rotary(traditional=True)}, {}),
    "runs": _variant({"rotary_embedding": rotary_embedding_runs}, {}),
    "approx": _variant({"gelu": gelu_tanh}, {}),
}
_ALL = Capabilities(dtypes=DTYPES[1:], accumulate={"bfloat16": "storage", "float16": "storage"})
_WIDE = Capabilities(dtypes=DTYPES[1:])
_ATTENTION = replace(_WIDE, causal_with_mask=False, mask_with_bias=False, empty_row="mean")
CAPABILITIES = {
    "default": {
        **dict.fromkeys((*_GRADED, *_OTHERS), _ALL),
        "layer_norm": _WIDE,
        "rms_norm": _WIDE,
        "attention": _ATTENTION,
        "multi_head_attention": replace(_ATTENTION, grouped_heads=False),
        "clip_by_global_norm": replace(_ALL, clip_epsilon=1e-6),
    },
    "precise": {"softmax": _WIDE},
    "traditional": {"rotary_embedding": replace(_ALL, rotary_pairs="interleaved")},
    "runs": {"rotary_embedding": _ALL},
    "approx": {"gelu": replace(_ALL, gelu="tanh")},
}
_PATTERNLESS = (1.5 * np.sin(np.arange(1.0, 4097.0) ** 2)).reshape(8, 512).tolist()
EXPECTED = [
    Expected(
        "gelu/gradient-is-finite",
        "the slope of the cube in the approximation is infinite in float16, and 0 times it is NaN",
        "reports/findings/mlx_gelu_float16_gradient.py",
        {"x": [-148.0]},
        {"dtype": "float16"},
        variants=("approx",),
    ),
    Expected(
        "cross_entropy/equals-the-reference",
        "label smoothing takes the mean of the logits by a sum in their dtype",
        "reports/findings/mlx_cross_entropy_float16_smoothing.py",
        {"logits": [[0.0] * 7 + [10000.0]], "targets": [0], "label_smoothing": 0.1},
        {"dtype": "float16"},
        "label_smoothing > 0",
        ("default",),
    ),
    Expected(
        "cross_entropy/smoothing-weighs-the-losses-of-all-classes",
        "label smoothing takes the mean of the logits by a sum in their dtype",
        "reports/findings/mlx_cross_entropy_float16_smoothing.py",
        {"logits": [[0.0, 0.0, 0.0, 14896.0, 0.0, 0.0]], "targets": [0], "label_smoothing": 0.4},
        {"dtype": "float16"},
        variants=("default",),
        kind="not finite",
    ),
    Expected(
        "cross_entropy/finite-for-finite-logits",
        "the mean of the losses is a sum in float16",
        "reports/findings/mlx_cross_entropy_float16_smoothing.py",
        {"logits": [[30000.0, 0.0]] * 3, "targets": [1, 1, 1]},
        {"dtype": "float16"},
        variants=("default",),
        kind="not finite",
    ),
    Expected(
        "softmax/works-in-the-declared-precision",
        "without precise=True bfloat16 is summed up in bfloat16, where 256 + 1 is 256",
        "https://github.com/ml-explore/mlx/pull/4178",
        {"x": _PATTERNLESS},
        {"dtype": "bfloat16"},
        variants=("default",),
    ),
    Expected(
        "log_softmax/equals-the-reference",
        "a compiled function whose sum or maximum is over an axis of one element ends the process on the CPU",
        "reports/findings/mlx_compiled_single_element.py",
        {"x": [[0.0]]},
        where="axis_length == 1",
        variants=("default",),
        kind="crash",
        spreads=True,
    ),
    Expected(
        "log_softmax/minus-infinity-equals-deletion",
        "where all but one are deleted, a sum is over an axis of one element, which ends the process on the CPU",
        "reports/findings/mlx_compiled_single_element.py",
        {"x": [[0.0, 1.0]]},
        variants=("default",),
        kind="crash",
    ),
]
