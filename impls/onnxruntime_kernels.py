"""ONNX Runtime on the CPU, operator by operator of the ONNX standard.

Every function is a graph of one operator, made into a session of one thread once for each dtype, rank and set of
attributes. Attributes are float32, whatever the tensors are, so in float64 a scale or softcap that float32 cannot hold
is refused, and norms, whose eps is 1e-5, are left out. There are no gelu and rotary embedding of float64,
and NumPy's bfloat16 is not taken. A mask is True where a query may attend, or floats that are added; not both. The
standard lets its axes be broadcast, the kernel only those of batch and heads. The causal triangle starts at the top
left unless there are keys of the past or counts of valid keys, which put it at the bottom right.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import helper
from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidArgument
from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented as Unsupported

from veriformer.declarations import Capabilities, Expected

FRAMEWORK = "numpy"
DISTRIBUTIONS = ("onnxruntime", "onnx")
Window = tuple[int | None, int | None]
_sessions: dict[Any, onnxruntime.InferenceSession] = {}


def _session(
    operator: str, opset: int, kinds: tuple[tuple[str, int] | None, ...], outputs: int, attributes: dict[str, Any]
) -> onnxruntime.InferenceSession:
    """A session of one operator; kinds are the dtype and rank of each input, None for one that is left out."""
    names = [f"input{i}" if kind else "" for i, kind in enumerate(kinds)]
    results = [f"output{i}" for i in range(outputs)]
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(kind[0])), [None] * kind[1])
        for name, kind in zip(names, kinds, strict=True)
        if kind
    ]
    node = helper.make_node(operator, names, results, **attributes)
    graph = helper.make_graph([node], operator, inputs, [onnx.ValueInfoProto(name=name) for name in results])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=11)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _run(operator: str, opset: int, inputs: list[Any], outputs: int = 1, **attributes: Any) -> list[Any]:
    """The outputs of one operator; inputs and attributes that are None are left out."""
    given = {name: value for name, value in attributes.items() if value is not None}
    kinds = tuple(None if array is None else (array.dtype.name, array.ndim) for array in inputs)
    key = (operator, opset, kinds, outputs, tuple(given.items()))
    feeds = {f"input{i}": array for i, array in enumerate(inputs) if array is not None}
    if key not in _sessions:
        _sessions[key] = _session(operator, opset, kinds, outputs, given)
    try:
        return list(_sessions[key].run(None, feeds))
    except (Fail, InvalidArgument, Unsupported) as error:  # refusals, but not of Python's own classes
        raise RuntimeError(str(error).strip()) from error


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


def _mask(mask: NDArray | None, bias: NDArray | None, q: NDArray, k: NDArray) -> NDArray | None:
    """attn_mask with its last two axes written out, as the kernel wants it.

    The standard lets them be broadcast: `reports/findings/onnxruntime_attention_mask_axes.py`.
    """
    if mask is not None and bias is not None:
        raise ValueError("mask and bias: ONNX takes one attn_mask; pass one of them")
    given = bias if mask is None else mask
    return None if given is None else np.broadcast_to(given, (*given.shape[:2], q.shape[2], k.shape[2]))


def _attention(outputs: int, packed: bool) -> Any:
    def attention(
        q: NDArray,
        k: NDArray,
        v: NDArray,
        *,
        mask: NDArray | None = None,
        bias: NDArray | None = None,
        causal: bool = False,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> NDArray:
        """Attention-23; outputs: 4 also asks for the logits; packed: heads in the last axis.

        q[B,H,Tq,D], k[B,G,Tk,D], v[B,G,Tk,Dv] -> [B,H,Tq,Dv]
        softmax(softcap tanh(q k^T scale / softcap) + bias) v over the keys a row may see; query i sits at i (top left)
        Source: the ONNX operators, Attention. Raises ValueError if mask and bias are both given.
        """
        attributes: dict[str, Any] = {"is_causal": int(causal), "scale": scale, "softcap": softcap}
        heads, groups = q.shape[1], k.shape[1]
        arrays = [_joined(a) for a in (q, k, v)] if packed else [q, k, v]
        attributes |= {"q_num_heads": heads, "kv_num_heads": groups} if packed else {}
        out = _run("Attention", 23, [*arrays, _mask(mask, bias, q, k)], outputs, **attributes)[0]
        return _split(out, heads) if packed else out

    return attention


def _joined(x: NDArray) -> NDArray:
    """[B,H,T,D] -> [B,T,H*D]."""
    return x.transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], -1)


def _split(x: NDArray, heads: int) -> NDArray:
    """[B,T,H*D] -> [B,H,T,D]."""
    return x.reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3)


def attention_past(
    q: NDArray,
    k: NDArray,
    v: NDArray,
    *,
    mask: NDArray | None = None,
    bias: NDArray | None = None,
    causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
) -> NDArray:
    """Attention-23 whose first Tk - Tq keys and values are those of the past, so that query i sits at i + Tk - Tq.

    q[B,H,Tq,D], k[B,G,Tk,D], v[B,G,Tk,Dv], mask or bias[B or 1,H or 1,Tq or 1,Tk] -> [B,H,Tq,Dv]
    Source: the ONNX operators, Attention.
    Raises ValueError where causal is to leave more queries than keys, since no past is shorter than nothing.
    """
    past = k.shape[2] - q.shape[2]
    if past < 0 and causal:
        raise ValueError(f"{q.shape[2]} queries, {k.shape[2]} keys: a past cannot have {past} keys")
    past = max(past, 0)
    inputs = [q, k[:, :, past:], v[:, :, past:], _mask(mask, bias, q, k), k[:, :, :past], v[:, :, :past]]
    return _run("Attention", 23, inputs, 3, is_causal=int(causal), scale=scale, softcap=softcap)[0]


def attention_lengths(
    q: NDArray,
    k: NDArray,
    v: NDArray,
    *,
    mask: NDArray | None = None,
    bias: NDArray | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: Window | None = None,
    softcap: float | None = None,
) -> NDArray:
    """Attention-25 told that all Tk keys are valid (nonpad_kv_seqlen), so that query i sits at i + Tk - Tq.

    q[B,H,Tq,D], k[B,G,Tk,D], v[B,G,Tk,Dv], mask or bias[B or 1,H or 1,Tq or 1,Tk] -> [B,H,Tq,Dv]
    Source: the ONNX operators, Attention.
    """
    left, right = window or (None, None)
    attributes = {"left_window_size": left, "right_window_size": right}
    inputs = [q, k, v, _mask(mask, bias, q, k), None, None, np.full(q.shape[0], k.shape[2])]
    return _run("Attention", 25, inputs, is_causal=int(causal), scale=scale, softcap=softcap, **attributes)[0]


def cached_attention(
    q: NDArray,
    k_new: NDArray,
    v_new: NDArray,
    k_cache: NDArray,
    v_cache: NDArray,
    lengths: NDArray,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: Window | None = None,
) -> tuple[NDArray, NDArray, NDArray]:
    """TensorScatter-24, then Attention-25 over the caches with counts of valid keys.

    q[B,H,m,D], k_new[B,G,m,D], v_new[B,G,m,Dv], k_cache[B,G,C,D], v_cache[B,G,C,Dv], lengths[B] -> out, both caches
    Source: the ONNX operators, Attention (the second use of a cache) and TensorScatter.
    """
    k_cache, v_cache = (
        _run("TensorScatter", 24, [cache, new, lengths])[0] for cache, new in ((k_cache, k_new), (v_cache, v_new))
    )
    left, right = window or (None, None)
    attributes = {"left_window_size": left, "right_window_size": right, "is_causal": int(causal), "scale": scale}
    inputs = [q, k_cache, v_cache, None, None, None, lengths + q.shape[2]]
    return _run("Attention", 25, inputs, **attributes)[0], k_cache, v_cache


def _rotary(interleaved: bool, packed: bool) -> Any:
    def rotary_embedding(x: NDArray, positions: NDArray, *, base: float = 10000.0) -> NDArray:
        """RotaryEmbedding-23; packed: [N,T,D] and position_ids, else [N,1,T,D] and a row of angles for each position.

        x[...,T,D], positions[T] -> [...,T,D]; pairs turned by position base^(-2j/D)
        Source: the ONNX operators, RotaryEmbedding.
        """
        T, D = x.shape[-2:]
        angles = positions[:, None] * float(base) ** (-2.0 * np.arange(D // 2) / D)
        cos, sin = np.cos(angles).astype(x.dtype), np.sin(angles).astype(x.dtype)
        rows = x.reshape(-1, T, D) if packed else x.reshape(-1, 1, T, D)
        if packed:
            inputs = [rows, cos, sin, np.tile(np.arange(T), (len(rows), 1))]
            return _run("RotaryEmbedding", 23, inputs, interleaved=int(interleaved), num_heads=1)[0].reshape(x.shape)
        inputs = [rows, *(np.tile(part, (len(rows), 1, 1)) for part in (cos, sin))]
        return _run("RotaryEmbedding", 23, inputs, interleaved=int(interleaved))[0].reshape(x.shape)

    return rotary_embedding


VARIANTS: dict[str, dict[str, Any]] = {
    "default": {
        "softmax": softmax,
        "log_softmax": log_softmax,
        "logsumexp": logsumexp,
        "layer_norm": layer_norm,
        "rms_norm": rms_norm,
        "gelu": gelu,
        "relu": relu,
        "embedding": embedding,
        "cross_entropy": cross_entropy,
        "rotary_embedding": _rotary(interleaved=False, packed=False),
        "attention": _attention(1, packed=False),
    },
    "packed": {"attention": _attention(1, packed=True), "rotary_embedding": _rotary(interleaved=False, packed=True)},
    "scores": {"attention": _attention(4, packed=False), "cross_entropy": cross_entropy_log_prob},
    "past": {"attention": attention_past},
    "lengths": {"attention": attention_lengths, "cached_attention": cached_attention},
    "interleaved": {"rotary_embedding": _rotary(interleaved=True, packed=False)},
    "interleaved_packed": {"rotary_embedding": _rotary(interleaved=True, packed=True)},
    "tanh": {"gelu": gelu_tanh},
}
_ALL = Capabilities(dtypes=("float64", "float32", "float16"))
_SINGLE = replace(_ALL, dtypes=("float32", "float16"))
# an attribute is a float32, and so is its root, which Attention takes of the scale
_SCALED = replace(_ALL, accumulate={"float64": "float32"}, intermediate={"float64": "float32"})
_ATTENTION = replace(_SCALED, causal_alignment="top_left", mask_with_bias=False, infinite_bias=True)
_BOTTOM = replace(_ATTENTION, causal_alignment="bottom_right")
_TURNED = replace(_SINGLE, rotary_pairs="interleaved")
CAPABILITIES: dict[str, dict[str, Capabilities]] = {
    "default": {
        **dict.fromkeys(VARIANTS["default"], _ALL),
        "gelu": _SINGLE,
        "layer_norm": _SINGLE,
        "rms_norm": _SINGLE,
        "rotary_embedding": _SINGLE,
        "attention": _ATTENTION,
    },
    "packed": {"attention": _ATTENTION, "rotary_embedding": _SINGLE},
    "scores": {"attention": _ATTENTION, "cross_entropy": _ALL},
    "past": {"attention": replace(_BOTTOM, more_queries_than_keys="unless_causal")},
    "lengths": {"attention": _BOTTOM, "cached_attention": _SCALED},
    "interleaved": {"rotary_embedding": _TURNED},
    "interleaved_packed": {"rotary_embedding": _TURNED},
    "tanh": {"gelu": replace(_SINGLE, gelu="tanh")},
}
_LOW = "reports/findings/onnxruntime_logsumexp_low_rows.py"
_HALF = "reports/findings/onnxruntime_logsumexp_float16.py"
_INF = float("inf")
EXPECTED = [
    *(
        Expected(
            law,
            "a row that begins with -inf is shifted by 0 instead of by its maximum",
            _LOW,
            case,
            {"dtype": "float64 float32"},
            variants=("default",),
            kind=kind,
            spreads=bool(kind),
        )
        for law, case, kind in (
            ("logsumexp/equals-the-reference", {"x": [[-_INF, -1000.0]]}, "not finite"),
            ("logsumexp/permutation-changes-nothing", {"x": [[-1e5] * 4 + [-_INF] + [-1e5] * 2, [0.0] * 7]}, ""),
        )
    ),
    *(
        Expected(
            law,
            "ReduceLogSumExp of float16 takes exp of unshifted numbers",
            _HALF,
            {"x": [705.0]} if "shift" in law else {"x": [1000.0]},
            {"dtype": "float16"},
            variants=("default",),
        )
        for law in (
            "logsumexp/equals-the-reference",
            "logsumexp/finite-for-finite-input",
            "logsumexp/between-max-and-max-plus-log-n",
            "logsumexp/shift-adds",
        )
    ),
]
