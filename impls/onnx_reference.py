"""ONNX's reference evaluator: what the operators of the standard say, carried out by NumPy.

Every function is a graph of one operator (feed_forward: of five), made once for each dtype, rank and set of attributes.
Attributes are float32, whatever the tensors are: norms and Adam, whose defaults 1e-5 and 0.9 float32 cannot hold, are
left out in float64. Sums are made in the dtype of the tensors, which for norms is not what the standard says. Softmax
has no temperature, cross entropy no smoothing.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper
from onnx.reference import ReferenceEvaluator

from veriformer.declarations import DTYPES, Capabilities, Expected

FRAMEWORK = "numpy"
DISTRIBUTIONS = ("onnx",)
TRAINING = "ai.onnx.preview.training"


@lru_cache(maxsize=512)
def _graph(
    operator: str, opset: int, kinds: tuple[tuple[str, int] | None, ...], outputs: int, attributes: tuple[Any, ...]
) -> ReferenceEvaluator:
    """An evaluator of one operator; kinds are the dtype and rank of each input, None for one that is left out."""
    domain = TRAINING if operator == "Adam" else ""
    names = [f"input{i}" if kind else "" for i, kind in enumerate(kinds)]
    results = [f"output{i}" for i in range(outputs)]
    node = helper.make_node(operator, names, results, domain=domain, **dict(attributes))
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(kind[0])), [None] * kind[1])
        for name, kind in zip(names, kinds, strict=True)
        if kind
    ]
    graph = helper.make_graph([node], operator, inputs, [onnx.ValueInfoProto(name=name) for name in results])
    return ReferenceEvaluator(helper.make_model(graph, opset_imports=[helper.make_opsetid(domain, opset)]))


def _run(operator: str, opset: int, inputs: list[Any], outputs: int = 1, **attributes: Any) -> list[Any]:
    """The outputs of one operator; inputs and attributes that are None are left out."""
    given = tuple(sorted((name, value) for name, value in attributes.items() if value is not None))
    kinds = tuple(None if array is None else (array.dtype.name, array.ndim) for array in inputs)
    feeds = {f"input{i}": array for i, array in enumerate(inputs) if array is not None}
    return list(_graph(operator, opset, kinds, outputs, given).run(None, feeds))


def softmax(x: NDArray, *, axis: int = -1) -> NDArray:
    """Softmax-13. x[...] -> [...]; exp(x) / sum exp(x) over axis. Source: the ONNX operators, Softmax."""
    return _run("Softmax", 13, [x], axis=axis)[0]


def log_softmax(x: NDArray, *, axis: int = -1) -> NDArray:
    """LogSoftmax-13. x[...] -> [...]; x - log sum exp(x) over axis. Source: the ONNX operators, LogSoftmax."""
    return _run("LogSoftmax", 13, [x], axis=axis)[0]


def logsumexp(x: NDArray, *, axis: int = -1) -> NDArray:
    """ReduceLogSumExp-18. x[...] -> [...] without axis; log sum exp(x). Source: the ONNX operators, ReduceLogSumExp."""
    return _run("ReduceLogSumExp", 18, [x, np.array([axis])], keepdims=0)[0]


def layer_norm(x: NDArray, weight: NDArray, bias: NDArray, *, eps: float = 1e-5) -> NDArray:
    """LayerNormalization-17 over the last axis. x[...,d], weight[d], bias[d] -> [...,d]

    weight (x - mean) / sqrt(variance + eps) + bias. Source: the ONNX operators, LayerNormalization.
    """
    return _run("LayerNormalization", 17, [x, weight, bias], axis=-1, epsilon=eps)[0]


def rms_norm(x: NDArray, weight: NDArray, *, eps: float = 1e-6) -> NDArray:
    """RMSNormalization-23 over the last axis. x[...,d], weight[d] -> [...,d]

    weight x / sqrt(mean x² + eps). Source: the ONNX operators, RMSNormalization.
    """
    return _run("RMSNormalization", 23, [x, weight], axis=-1, epsilon=eps)[0]


def gelu(x: NDArray) -> NDArray:
    """Gelu-20. x[...] -> [...]; x (1 + erf(x / sqrt(2))) / 2. Source: the ONNX operators, Gelu."""
    return _run("Gelu", 20, [x], approximate="none")[0]


def gelu_tanh(x: NDArray) -> NDArray:
    """Gelu-20 by tanh. x[...] -> [...]. Source: the ONNX operators, Gelu, approximate = tanh."""
    return _run("Gelu", 20, [x], approximate="tanh")[0]


def relu(x: NDArray) -> NDArray:
    """Relu-14. x[...] -> [...]; max(x, 0). Source: the ONNX operators, Relu."""
    return _run("Relu", 14, [x])[0]


def feed_forward(x: NDArray, w1: NDArray, b1: NDArray, w2: NDArray, b2: NDArray) -> NDArray:
    """MatMul-13, Add-14 and Relu-14. x[...,d], w1[d,f], b1[f], w2[f,d], b2[d] -> [...,d]

    relu(x w1 + b1) w2 + b2. Source: the ONNX operators, MatMul.
    """
    inner = relu(_run("Add", 14, [_run("MatMul", 13, [x, w1])[0], b1])[0])
    return _run("Add", 14, [_run("MatMul", 13, [inner, w2])[0], b2])[0]


def embedding(ids: NDArray, table: NDArray) -> NDArray:
    """Gather-13. ids[...], table[V,d] -> [...,d]; row ids of table. Source: the ONNX operators, Gather."""
    return _run("Gather", 13, [table, ids], axis=0)[0]


def cross_entropy(logits: NDArray, targets: NDArray, *, ignore_index: int = -100, reduction: str = "mean") -> NDArray:
    """SoftmaxCrossEntropyLoss-13. logits[N,V], targets[N] -> [] or [N]

    -log_softmax(logits)[target]. Source: the ONNX operators, SoftmaxCrossEntropyLoss.
    """
    attributes = {"ignore_index": ignore_index, "reduction": reduction}
    return _run("SoftmaxCrossEntropyLoss", 13, [logits, targets], **attributes)[0]


def cross_entropy_log_prob(
    logits: NDArray, targets: NDArray, *, ignore_index: int = -100, reduction: str = "mean"
) -> NDArray:
    """The same, asked for its second output too, which changes nothing of the first."""
    attributes = {"ignore_index": ignore_index, "reduction": reduction}
    return _run("SoftmaxCrossEntropyLoss", 13, [logits, targets], 2, **attributes)[0]


def adamw_step(
    param: NDArray,
    grad: NDArray,
    m: NDArray,
    v: NDArray,
    step: int,
    *,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> tuple[NDArray, NDArray, NDArray]:
    """Adam of ai.onnx.preview.training: decay is added to the gradient, eps to the root of v itself.

    param[...], grad[...], m[...], v[...] -> param, m, v
    param - lr sqrt(1 - beta2^step) / (1 - beta1^step) m / (sqrt(v) + eps). Source: the ONNX operators, Adam.
    """
    rate = np.asarray(lr, dtype=param.dtype)
    attributes = {"alpha": beta1, "beta": beta2, "epsilon": eps, "norm_coefficient": weight_decay}
    new, first, second = _run("Adam", 1, [rate, np.asarray(step), param, grad, m, v], 3, **attributes)
    return new, first, second


VARIANTS: dict[str, dict[str, Any]] = {
    "default": {
        "softmax": softmax,
        "log_softmax": log_softmax,
        "logsumexp": logsumexp,
        "layer_norm": layer_norm,
        "rms_norm": rms_norm,
        "gelu": gelu,
        "relu": relu,
        "feed_forward": feed_forward,
        "embedding": embedding,
        "cross_entropy": cross_entropy,
        "adamw_step": adamw_step,
    },
    "log_prob": {"cross_entropy": cross_entropy_log_prob},
    "tanh": {"gelu": gelu_tanh},
}
_ALL = Capabilities(dtypes=DTYPES, accumulate={"bfloat16": "storage", "float16": "storage"})
_NORM = Capabilities(dtypes=DTYPES[1:])  # stash_type says that sums are float32
CAPABILITIES: dict[str, dict[str, Capabilities]] = {
    "default": {
        **dict.fromkeys(VARIANTS["default"], _ALL),
        "layer_norm": _NORM,
        "rms_norm": _NORM,
        "adamw_step": Capabilities(dtypes=("float32",), adam_epsilon="uncorrected", weight_decay="coupled"),
    },
    "log_prob": {"cross_entropy": _ALL},
    "tanh": {"gelu": replace(_ALL, gelu="tanh")},
}


def _dense(*shape: int) -> list[Any]:
    """Standard normal numbers, for a law on dense data."""
    return list(np.random.default_rng(0).standard_normal(shape).tolist())


def _known(
    reason: str,
    link: str,
    dtypes: str,
    cases: dict[str, dict[str, Any]],
    variants: tuple[str, ...],
    **more: Any,
) -> list[Expected]:
    when = {"dtype": dtypes}
    return [Expected(law, reason, link, case, when, variants=variants, **more) for law, case in cases.items()]


_LOG_OF_SOFTMAX = "log(softmax(x)) is -inf where softmax underflows"
_STABLE = "https://github.com/onnx/onnx/pull/8423"
_STASH = "the first stage of a norm is made in the tensors' dtype, though stash_type asks for float32"
_STASHED = "https://github.com/onnx/onnx/pull/8439"
_SUMS = "bfloat16 is summed up in bfloat16, where 256 + 1 is 256"
_FAR = {"logits": [[1000.0, 0.0]], "targets": [1]}
EXPECTED = [
    *_known(
        _LOG_OF_SOFTMAX,
        _STABLE,
        " ".join(DTYPES),
        {"log_softmax/equals-the-reference": {"x": [0.0, 1000.0]}},
        ("default",),
        kind="not finite",
        spreads=True,
    ),
    *_known(
        _LOG_OF_SOFTMAX,
        _STABLE,
        " ".join(DTYPES),
        {"cross_entropy/equals-the-reference": _FAR},
        ("default", "log_prob"),
        kind="not finite",
        spreads=True,
    ),
    *_known(
        _LOG_OF_SOFTMAX,
        _STABLE,
        "float32",
        {"cross_entropy/reduction-has-influence": {"logits": [[1000.0, 0.0]] * 2, "targets": [1, 1]}},
        ("default", "log_prob"),
        kind="no influence",
    ),
    *_known(
        _LOG_OF_SOFTMAX,
        _STABLE,
        " ".join(DTYPES),
        {"cross_entropy/smoothing-weighs-the-losses-of-all-classes": {**_FAR, "targets": [0]}},
        ("default", "log_prob"),
    ),
    *_known(
        _STASH,
        _STASHED,
        "float16",
        {
            "layer_norm/equals-the-reference": {"x": [0.0, 1000.0], "weight": [0.0, 1.0], "bias": [0.0, 0.0]},
            "rms_norm/equals-the-reference": {"x": [1000.0], "weight": [1.0]},
        },
        ("default",),
        spreads=True,
    ),
    *_known(
        _STASH,
        _STASHED,
        "float16",
        {
            "layer_norm/layout-changes-nothing": {
                "x": [[0.0, 0.0, 0.0], [1000.0, 1000.5, 998.5]],
                "weight": [0.0, 0.0, 1.0],
                "bias": [0.0] * 3,
            }
        },
        ("default",),
    ),
    *_known(
        _STASH,
        _STASHED,
        "bfloat16",
        {
            "layer_norm/equals-the-reference": {
                "x": [3.0, 3.0, 2.0, 2.0, 2.0],
                "weight": [0.0] * 4 + [1.0],
                "bias": [0.0] * 4 + [1.0],
            },
            "rms_norm/equals-the-reference": {"x": [3.328125] * 59, "weight": [1.0] * 59, "eps": 1.0},
        },
        ("default",),
        spreads=True,
    ),
    *_known(
        _SUMS,
        "reports/findings/onnx_reference_bfloat16_sums.py",
        "bfloat16",
        {
            "softmax/works-in-the-declared-precision": {"x": _dense(8, 512)},
            "log_softmax/works-in-the-declared-precision": {"x": _dense(8, 512)},
        },
        ("default",),
    ),
    *_known(
        "constants of the body of Gelu are float32",
        "reports/findings/onnx_gelu_float64.py",
        "float64",
        {
            "gelu/equals-the-reference": {"x": [-2.0]},
            "gelu/has-the-values-of-its-form": {"x": [-5.0]},
            "gelu/works-in-the-declared-precision": {"x": _dense(64, 64)},
        },
        ("tanh",),
    ),
    *_known(
        "constants of the body of Gelu are float32",
        "reports/findings/onnx_gelu_float64.py",
        "float64",
        {
            "gelu/equals-the-reference": {"x": [-1.0]},
            "gelu/has-the-values-of-its-form": {"x": [-1.0]},
            "gelu/falls-and-then-rises": {"x": [-5.38215312471576, -5.395155752344187]},
            "gelu/works-in-the-declared-precision": {"x": _dense(64, 64)},
        },
        ("default",),
    ),
    *_known(
        "the rate, a float32, makes new parameters float64",
        "reports/findings/onnx_reference_adam_dtype.py",
        "float32",
        {"adamw_step/keeps-the-dtype": {"param": [0.0], "grad": [0.0], "m": [0.0], "v": [0.0], "step": 1, "lr": 1.0}},
        ("default",),
    ),
]
