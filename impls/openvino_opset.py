"""OpenVINO on the CPU: operators of opset13, computed in float32 (INFERENCE_PRECISION_HINT).

Every function is a model of sizes that may change, compiled once for each dtype and rank. The CPU plugin computes
float64 in float32, so it is left out. Attention takes one mask (True where a query may attend, or floats that are
added), no grouped heads, no windows, no softcap; its causal triangle starts at the top left, and a mask beside it is
ignored, as the manual says, so it is refused here. A row that may attend to nothing is NaN. Layer norm is MVN, times
the weight, plus the bias.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import openvino
from numpy.typing import NDArray
from openvino import opset13

from veriformer.declarations import Capabilities, Expected

FRAMEWORK = "numpy"
DISTRIBUTIONS = ("openvino",)
_compiled: dict[Any, Any] = {}


def _run(key: tuple[Any, ...], build: Callable[..., Any], *arrays: NDArray) -> NDArray:
    """The output of the model that `build` makes of one parameter for each array; key tells such models apart."""
    signature = (*key, *((array.dtype.name, array.ndim) for array in arrays))
    if signature not in _compiled:
        inputs = [opset13.parameter([-1] * array.ndim, array.dtype) for array in arrays]
        model = openvino.Model([build(*inputs)], inputs, key[0])
        options = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
        _compiled[signature] = openvino.Core().compile_model(model, "CPU", options)
    return np.array(_compiled[signature](list(arrays))[0])


def softmax(x: NDArray, *, axis: int = -1) -> NDArray:
    """Softmax-8. x[...] -> [...]; exp(x) / sum exp(x) over axis. Source: the OpenVINO manual, Softmax-8."""
    return _run(("softmax", axis), lambda node: opset13.softmax(node, axis), x)


def log_softmax(x: NDArray, *, axis: int = -1) -> NDArray:
    """LogSoftmax-5. x[...] -> [...]; x - log sum exp(x) over axis. Source: the OpenVINO manual, LogSoftmax-5."""
    return _run(("log_softmax", axis), lambda node: opset13.log_softmax(node, axis), x)


def layer_norm(x: NDArray, weight: NDArray, bias: NDArray, *, eps: float = 1e-5) -> NDArray:
    """MVN-6 over the last axis, Multiply, Add. x[...,d], weight[d], bias[d] -> [...,d]

    weight (x - mean) / sqrt(variance + eps) + bias. Source: the OpenVINO manual, MVN-6.
    """

    def build(x: Any, weight: Any, bias: Any) -> Any:
        normed = opset13.mvn(x, opset13.constant([-1]), True, eps, "inside_sqrt")
        return opset13.add(opset13.multiply(normed, weight), bias)

    return _run(("layer_norm", eps), build, x, weight, bias)


def gelu(x: NDArray) -> NDArray:
    """Gelu-7 with erf. x[...] -> [...]. Source: the OpenVINO manual, Gelu-7."""
    return _run(("gelu",), lambda node: opset13.gelu(node, "erf"), x)


def gelu_tanh(x: NDArray) -> NDArray:
    """Gelu-7 with tanh. x[...] -> [...]. Source: the OpenVINO manual, Gelu-7."""
    return _run(("gelu_tanh",), lambda node: opset13.gelu(node, "tanh"), x)


def relu(x: NDArray) -> NDArray:
    """ReLU-1. x[...] -> [...]; max(x, 0). Source: the OpenVINO manual, ReLU-1."""
    return _run(("relu",), opset13.relu, x)


def feed_forward(x: NDArray, w1: NDArray, b1: NDArray, w2: NDArray, b2: NDArray) -> NDArray:
    """MatMul, Add, ReLU, MatMul, Add. x[...,d], w1[d,f], b1[f], w2[f,d], b2[d] -> [...,d]

    relu(x w1 + b1) w2 + b2. Source: the OpenVINO manual, MatMul-1.
    """

    def build(x: Any, w1: Any, b1: Any, w2: Any, b2: Any) -> Any:
        inner = opset13.relu(opset13.add(opset13.matmul(x, w1, False, False), b1))
        return opset13.add(opset13.matmul(inner, w2, False, False), b2)

    return _run(("feed_forward",), build, x, w1, b1, w2, b2)


def embedding(ids: NDArray, table: NDArray) -> NDArray:
    """Gather-8. ids[...], table[V,d] -> [...,d]; row ids of table. Source: the OpenVINO manual, Gather-8."""
    return _run(("embedding",), lambda table, ids: opset13.gather(table, ids, opset13.constant(0)), table, ids)


def attention(
    q: NDArray,
    k: NDArray,
    v: NDArray,
    *,
    mask: NDArray | None = None,
    bias: NDArray | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> NDArray:
    """ScaledDotProductAttention-13.

    q[B,H,Tq,D], k[B,H,Tk,D], v[B,H,Tk,Dv] -> [B,H,Tq,Dv]
    softmax(q k^T scale + bias) v over the keys a row may see; query i sits at i (top left)
    Source: the OpenVINO manual, ScaledDotProductAttention-13.
    Raises ValueError if more than one of mask, bias and causal is given.
    """
    given = [one for one in (mask, bias) if one is not None]
    if len(given) + causal > 1:
        raise ValueError("mask, bias, causal: the operator heeds one of them; pass one")
    if scale is not None and not given:
        given = [np.zeros((1, 1, 1, 1), q.dtype)]  # the scale comes after the mask
    factor = [] if scale is None else [np.asarray(scale, q.dtype)]

    def build(q: Any, k: Any, v: Any, *rest: Any) -> Any:
        return opset13.scaled_dot_product_attention(q, k, v, *rest, causal=causal)

    return _run(("attention", causal), build, q, k, v, *given, *factor)


VARIANTS: dict[str, dict[str, Any]] = {
    "default": {
        "softmax": softmax,
        "log_softmax": log_softmax,
        "layer_norm": layer_norm,
        "gelu": gelu,
        "relu": relu,
        "feed_forward": feed_forward,
        "embedding": embedding,
        "attention": attention,
    },
    "tanh": {"gelu": gelu_tanh},
}
_ALL = Capabilities(dtypes=("float32", "float16"))
CAPABILITIES: dict[str, dict[str, Capabilities]] = {
    "default": {
        **dict.fromkeys(VARIANTS["default"], _ALL),
        "attention": replace(
            _ALL,
            causal_alignment="top_left",
            causal_with_mask=False,
            mask_with_bias=False,
            grouped_heads=False,
            empty_row="nan",
        ),
    },
    "tanh": {"gelu": replace(_ALL, gelu="tanh")},
}
EXPECTED: list[Expected] = []
