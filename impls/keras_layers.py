"""Keras 3 on the backend that KERAS_BACKEND names: its functions, layers, losses and optimizers.

Registered twice, through `keras_torch` and `keras_jax`, which choose the backend. Layers are built for every call and
the given weights put in place of their own by stateless_call. It lacks temperature, padding_index and smoothing beside
ignore_class; a mean over nothing is 0; Adam's epsilon is beside the root of v as it is. In float64 whatever asks
keras.backend.result_type for its dtype computes in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import keras
from keras import layers, losses, ops, optimizers

from veriformer.declarations import Capabilities, Expected

FRAMEWORK = keras.backend.backend()
DISTRIBUTIONS = ("keras", FRAMEWORK)


def _dtype(x: Any) -> str:
    return str(keras.backend.standardize_dtype(x.dtype))


def _called(layer: Any, weights: list[Any], *inputs: Any, **keywords: Any) -> Any:
    """What a built layer makes of the inputs with these weights in place of its own."""
    return layer.stateless_call(weights, [], *inputs, **keywords)[0]


def softmax(x: Any, *, axis: int = -1) -> Any:
    """keras.ops.softmax.

    x[...] -> [...]
    p_i = exp(x_i) / sum_j exp(x_j)
    Source: the Keras manual, keras.ops.softmax. A row of -inf alone gives NaN.
    """
    return ops.softmax(x, axis=axis)


def softmax_layer(x: Any, *, axis: int = -1) -> Any:
    """keras.layers.Softmax without a mask; the formula and the source as for the function."""
    return _called(layers.Softmax(axis=axis, dtype=_dtype(x)), [], x)


def softmax_axes(x: Any, *, axis: int = -1) -> Any:
    """keras.layers.Softmax over a list of axes, which takes another path from two of them on.

    x[...] -> [...]
    exp(x - logsumexp(x)); the second axis has length 1
    Source: the Keras manual, keras.layers.Softmax.
    """
    at = axis % x.ndim
    inner = _called(layers.Softmax(axis=(at, at + 1), dtype=_dtype(x)), [], ops.expand_dims(x, at + 1))
    return ops.squeeze(inner, at + 1)


def log_softmax(x: Any, *, axis: int = -1) -> Any:
    """keras.ops.log_softmax.

    x[...] -> [...]
    y_i = x_i - log sum_j exp(x_j)
    Source: the Keras manual, keras.ops.log_softmax. A row of -inf alone gives NaN.
    """
    return ops.log_softmax(x, axis=axis)


def logsumexp(x: Any, *, axis: int = -1) -> Any:
    """keras.ops.logsumexp.

    x[...] -> [... without axis]
    y = log sum_j exp(x_j)
    Source: the Keras manual, keras.ops.logsumexp.
    """
    return ops.logsumexp(x, axis=axis)


def layer_norm(x: Any, weight: Any, bias: Any, *, eps: float = 1e-5) -> Any:
    """keras.layers.LayerNormalization over the last axis.

    x[..., d], weight[d], bias[d] -> [..., d]
    y = weight (x - mean) / sqrt(variance + eps) + bias
    Source: the Keras manual, keras.layers.LayerNormalization, whose own epsilon is 0.001.
    """
    layer = layers.LayerNormalization(axis=-1, epsilon=eps, dtype=_dtype(x))
    layer.build(tuple(x.shape))
    return _called(layer, [weight, bias], x)


def rms_norm(x: Any, weight: Any, *, eps: float = 1e-6) -> Any:
    """keras.layers.RMSNormalization over the last axis.

    x[..., d], weight[d] -> [..., d]
    y = weight x / sqrt(mean(x^2) + eps)
    Source: the Keras manual, keras.layers.RMSNormalization.
    """
    layer = layers.RMSNormalization(axis=-1, epsilon=eps, dtype=_dtype(x))
    layer.build(tuple(x.shape))
    return _called(layer, [weight], x)


def _gelu(approximate: bool) -> Callable[[Any], Any]:
    def gelu(x: Any) -> Any:
        """keras.ops.gelu.

        x[...] -> [...]
        x Phi(x), or its approximation with tanh
        Source: the Keras manual, keras.ops.gelu, which approximates by default.
        """
        return ops.gelu(x, approximate=approximate)

    return gelu


def relu(x: Any) -> Any:
    """keras.ops.relu.

    x[...] -> [...]
    max(x, 0)
    Source: the Keras manual, keras.ops.relu.
    """
    return ops.relu(x)


def feed_forward(x: Any, w1: Any, b1: Any, w2: Any, b2: Any) -> Any:
    """Two keras.layers.Dense, the first with activation="relu".

    x[..., d], w1[d,f], b1[f], w2[f,d], b2[d] -> [..., d]
    relu(x w1 + b1) w2 + b2
    Source: the Keras manual, keras.layers.Dense.
    """
    for kernel, bias, activation in ((w1, b1, "relu"), (w2, b2, None)):
        layer = layers.Dense(kernel.shape[1], activation, kernel_initializer="zeros", dtype=_dtype(x))
        layer.build(tuple(x.shape))
        x = _called(layer, [kernel, bias], x)
    return x


def embedding(ids: Any, table: Any) -> Any:
    """keras.layers.Embedding.

    ids[...], table[V,d] -> [..., d]
    table_ids
    Source: the Keras manual, keras.layers.Embedding.
    """
    layer = layers.Embedding(*table.shape, embeddings_initializer="zeros", dtype=_dtype(table))
    layer.build()
    return _called(layer, [table], ids)


_REDUCTIONS = {"mean": "sum_over_batch_size", "sum": "sum", "none": "none"}


def cross_entropy_sparse(logits: Any, targets: Any, *, ignore_index: int = -100, reduction: str = "mean") -> Any:
    """keras.losses.SparseCategoricalCrossentropy.

    logits[N,V], targets[N] -> loss[], or loss[N] with reduction none
    -log_softmax(logits)_target
    Source: the Keras manual, keras.losses.SparseCategoricalCrossentropy.
    """
    loss = losses.SparseCategoricalCrossentropy(
        from_logits=True, ignore_class=ignore_index, reduction=_REDUCTIONS[reduction], dtype=_dtype(logits)
    )
    return loss(targets, logits)


def cross_entropy_categorical(
    logits: Any, targets: Any, *, label_smoothing: float = 0.0, reduction: str = "mean"
) -> Any:
    """keras.losses.CategoricalCrossentropy of keras.ops.one_hot.

    logits[N,V], targets[N] -> loss[], or loss[N] with reduction none
    -sum q log_softmax(logits), q = (1 - e) one_hot(target) + e / V
    Source: the Keras manual, keras.losses.CategoricalCrossentropy.
    """
    loss = losses.CategoricalCrossentropy(
        from_logits=True, label_smoothing=label_smoothing, reduction=_REDUCTIONS[reduction], dtype=_dtype(logits)
    )
    return loss(ops.one_hot(targets, logits.shape[1], dtype=_dtype(logits)), logits)


@contextmanager
def _default_dtype(dtype: str) -> Any:
    """keras.config.floatx, in which an optimizer keeps its rate."""
    before = keras.config.floatx()
    keras.config.set_floatx(dtype)
    try:
        yield
    finally:
        keras.config.set_floatx(before)


def adamw_step(
    param: Any,
    grad: Any,
    m: Any,
    v: Any,
    step: int,
    *,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-7,
    weight_decay: float = 0.0,
) -> tuple[Any, Any, Any]:
    """One step of keras.optimizers.AdamW, whose variables are set to the given state.

    param[...], grad[...], m[...], v[...], step from 1 -> (param, m, v)
    theta - lr wd theta - lr sqrt(1 - beta2^t) / (1 - beta1^t) m / (sqrt(v) + eps)
    Source: the Keras manual, keras.optimizers.AdamW. The arguments are copied, for a step works in place.
    """
    with _default_dtype(_dtype(param)):
        optimizer = optimizers.AdamW(lr, weight_decay, beta1, beta2, eps)
        theta = keras.Variable(ops.copy(param), dtype=_dtype(param), name="theta")
        optimizer.build([theta])
        given = {"iteration": step - 1, "theta_momentum": m, "theta_velocity": v}
        own = {variable.name: variable for variable in optimizer.variables}
        for name, value in given.items():
            own[name].assign(value)
        optimizer.apply([grad])
    return tuple(ops.copy(own_.value) for own_ in (theta, own["theta_momentum"], own["theta_velocity"]))


def clip_by_global_norm(grads: list[Any], *, max_norm: float) -> list[Any]:
    """keras.optimizers.SGD(1.0, global_clipnorm=max_norm), which makes of zeros what it clips, negated.

    grads: arrays of any shapes -> a list like it
    g max_norm min(1 / norm, 1 / max_norm)
    Source: the Keras manual, keras.optimizers.Optimizer, global_clipnorm.
    """
    with _default_dtype(_dtype(grads[0])):
        optimizer = optimizers.SGD(1.0, global_clipnorm=max_norm)
        params = [keras.Variable(ops.zeros_like(g), dtype=_dtype(g)) for g in grads]
        optimizer.build(params)
        optimizer.apply(list(grads))
    return [-param.value for param in params]


VARIANTS: dict[str, dict[str, Callable[..., Any]]] = {
    "functions": {
        "softmax": softmax,
        "log_softmax": log_softmax,
        "logsumexp": logsumexp,
        "gelu": _gelu(False),
        "relu": relu,
    },
    "approximate": {"gelu": _gelu(True)},
    "layers": {
        "softmax": softmax_layer,
        "layer_norm": layer_norm,
        "rms_norm": rms_norm,
        "feed_forward": feed_forward,
        "embedding": embedding,
    },
    "axes": {"softmax": softmax_axes},
    "sparse": {"cross_entropy": cross_entropy_sparse},
    "categorical": {"cross_entropy": cross_entropy_categorical},
    "optimizer": {"adamw_step": adamw_step, "clip_by_global_norm": clip_by_global_norm},
}
_EACH = Capabilities(compiles_per_shape=FRAMEWORK == "jax")
# keras.backend.result_type makes float32 of float64 but on TensorFlow: whatever asks it computes in float32.
_FLOAT32 = {"accumulate": {"float64": "float32"}, "intermediate": {"float64": "float32"}}
_DEMOTED = replace(_EACH, **_FLOAT32)
# gradients of torch's logsumexp are made of its result, and those of a table are added up in the table's dtype
_KEPT = replace(_EACH, saved_statistics="storage") if FRAMEWORK == "torch" else _EACH
_ADDED = replace(_EACH, accumulate={"bfloat16": "storage", "float16": "storage"})
CAPABILITIES: dict[str, dict[str, Capabilities]] = {
    **{variant: {operation: _EACH for operation in functions} for variant, functions in VARIANTS.items()},
    "functions": {**dict.fromkeys(VARIANTS["functions"], _EACH), "logsumexp": _KEPT},
    "approximate": {"gelu": replace(_EACH, gelu="tanh")},
    "layers": {
        "softmax": _EACH,
        "layer_norm": _DEMOTED,
        "rms_norm": _DEMOTED,
        "feed_forward": _DEMOTED,
        "embedding": _ADDED,
    },
    "sparse": {"cross_entropy": replace(_DEMOTED, all_ignored="zero")},
    "categorical": {"cross_entropy": _DEMOTED},
    "optimizer": {"adamw_step": replace(_EACH, adam_epsilon="uncorrected"), "clip_by_global_norm": _DEMOTED},
}

_ZERO_TIMES_INFINITY = "a target of 0 is multiplied by a log-probability of -inf"
_OF_BOTH = [
    Expected(
        f"cross_entropy/{law}",
        reason=_ZERO_TIMES_INFINITY,
        link="reports/findings/keras_categorical_minus_infinity.py",
        case={"logits": [[0.0, -math.inf]], "targets": [0]},
        variants=("categorical", "sparse") if FRAMEWORK == "jax" else ("categorical",),
        kind="not finite",
    )
    for law in ("finite-on-plain-data", "minus-infinity-equals-deletion", "equals-the-reference")
]
_OF_BOTH += [
    Expected(
        "softmax/equals-the-reference",
        reason="exp(x - logsumexp(x)): what is rounded of a large logsumexp goes into the exponent",
        link="reports/findings/keras_softmax_several_axes.py",
        case={"x": [1000.0, 1000.0]},
        variants=("axes",),
        spreads=True,
    ),
    Expected(
        "cross_entropy/keeps-the-dtype",
        reason="float32 is made of float64, and returned",
        link="reports/findings/keras_float64_is_float32.py",
        case={"logits": [[0.0]], "targets": [0]},
        when={"dtype": "float64"},
        variants=("sparse", "categorical"),
    ),
    Expected(
        "cross_entropy/equals-the-reference",
        reason="labels are made numbers of the loss's dtype, and bfloat16 has no 257",
        link="reports/findings/keras_sparse_labels_bfloat16.py",
        case={"logits": [[0.0] * 257 + [10.0]], "targets": [257]},
        when={"dtype": "bfloat16"},
        where="V > 256",
        variants=("sparse",),
        spreads=True,
    ),
    Expected(
        "cross_entropy/finite-for-finite-logits",
        reason="the mean of a loss in float16 is a sum in float16",
        link="reports/findings/keras_loss_half_mean.py",
        case={"logits": [[30000.0, 0.0]] * 3, "targets": [1, 1, 1]},
        when={"dtype": "float16"},
        variants=("sparse", "categorical"),
        kind="not finite",
    ),
    Expected(
        "cross_entropy/the-mean-counts-every-row",
        reason="the rows of a mean are counted in float16",
        link="reports/findings/keras_loss_half_mean.py",
        case={"logits": [[0.0, 0.0]] * 65520, "targets": [1] * 65520},
        when={"dtype": "float16"},
        variants=("sparse", "categorical"),
    ),
    Expected(
        "adamw_step/equals-the-reference",
        reason="beta2 has the parameter's dtype: 0.999 is 1 in bfloat16, and 0.99902 in float16",
        link="reports/findings/keras_adam_half_betas.py",
        case={"param": [0.0], "grad": [1.0], "m": [0.0], "v": [0.0], "step": 1, "lr": 1.0},
        when={"dtype": "bfloat16 float16"},
        variants=("optimizer",),
        spreads=True,
    ),
    Expected(
        "adamw_step/everything-given-has-influence",
        reason="beta2 has the parameter's dtype: 0.999 is 1 in bfloat16, and the step is 0",
        link="reports/findings/keras_adam_half_betas.py",
        case={"param": [0.0], "grad": [1.0], "m": [0.0], "v": [0.0], "step": 1, "lr": 1.0, "eps": 1.0},
        when={"dtype": "bfloat16"},
        variants=("optimizer",),
        kind="no influence",
    ),
    Expected(
        "clip_by_global_norm/equals-the-reference",
        reason="the inverse of the limit is made in float16",
        link="reports/findings/keras_clip_float16.py",
        case={"grads.0": [7.0], "max_norm": 90905.0},
        when={"dtype": "float16"},
        variants=("optimizer",),
        spreads=True,
    ),
]
_OF_TORCH = [
    Expected(
        "layer_norm/width-one-has-no-weight-gradient",
        reason="torch's kernel takes the difference of two roundings of r g x, which is not exactly 0",
        link="https://github.com/pytorch/pytorch/issues/188375",
        case={"x": [13.0], "weight": [1.0], "bias": [0.0]},
        variants=("layers",),
    ),
]
_ONE = {"weight": [0.0], "bias": [0.0]}
_OF_JAX = [
    Expected(
        f"layer_norm/{law}",
        reason="x s - mean s, of which XLA rounds the first product not by itself",
        link="reports/findings/keras_layer_norm_folded.py",
        case=case,
        when=when,
        variants=("layers",),
    )
    for law, when, case in (
        ("width-one-gives-the-bias", {}, {"x": [10000.0], "weight": [1.0], "bias": [1.0], "eps": 1e-12}),
        ("width-one-has-no-weight-gradient", {"dtype": "float64 float32"}, {**_ONE, "x": [[0.0], [816.7567138671875]]}),
    )
]
EXPECTED = [*_OF_BOTH, *(_OF_TORCH if FRAMEWORK == "torch" else _OF_JAX)]
