"""ONNX Runtime on the CPU: contributed attention, and graphs such as exporters write, optimised and not.

A graph of ReduceMean, Sub, Pow, … is what layer norm is where a model was exported before the operator was there; the
optimiser fuses such graphs into operators of its own. Sessions have one thread and are made once for each graph, dtype
and rank. The attributes of the contributed operators are float32, as their tensors are. MultiHeadAttention counts its
causal triangle from the top left, GroupQueryAttention after the keys of the past; its heads are multiples of 8 wide.
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
MICROSOFT = "com.microsoft"
Node = tuple[str, str, str, dict[str, Any]]
"""An operator, names of its inputs and of its outputs with blanks between them (- for none), its attributes."""
_sessions: dict[Any, onnxruntime.InferenceSession] = {}


def _session(
    nodes: list[Node], opset: int, kinds: dict[str, tuple[str, int]], results: list[str], domain: str, optimised: bool
) -> onnxruntime.InferenceSession:
    """A session of a graph; kinds are the dtype and rank of each input."""
    made = [
        helper.make_node(op, ["" if n == "-" else n for n in i.split()], o.split(), domain=domain, **attributes)
        for op, i, o, attributes in nodes
    ]
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), [None] * rank)
        for name, (dtype, rank) in kinds.items()
    ]
    graph = helper.make_graph(made, "graph", inputs, [onnx.ValueInfoProto(name=name) for name in results])
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid(MICROSOFT, 1)]
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    levels = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = levels.ORT_ENABLE_ALL if optimised else levels.ORT_DISABLE_ALL
    model = helper.make_model(graph, opset_imports=opsets, ir_version=11).SerializeToString()
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def _compute(
    nodes: list[Node],
    opset: int,
    feeds: dict[str, NDArray],
    results: list[str],
    domain: str = "",
    optimised: bool = True,
) -> list[NDArray]:
    """What a graph gives for these inputs; its session is kept."""
    kinds = {name: (array.dtype.name, array.ndim) for name, array in feeds.items()}
    key = (repr(nodes), opset, tuple(kinds.items()), tuple(results), domain, optimised)
    if key not in _sessions:
        _sessions[key] = _session(nodes, opset, kinds, results, domain, optimised)
    try:
        return list(_sessions[key].run(results, feeds))
    except (Fail, InvalidArgument, Unsupported) as error:  # refusals, but not of Python's own classes
        raise RuntimeError(str(error).strip()) from error


def _run(operator: str, inputs: list[Any], outputs: int, attributes: dict[str, Any]) -> list[Any]:
    """The outputs of one contributed operator; inputs and attributes that are None are left out."""
    given = {name: value for name, value in attributes.items() if value is not None}
    names = [f"input{i}" if array is not None else "-" for i, array in enumerate(inputs)]
    results = [f"output{i}" for i in range(outputs)]
    feeds = {name: array for name, array in zip(names, inputs, strict=True) if array is not None}
    return _compute([(operator, " ".join(names), " ".join(results), given)], 23, feeds, results, MICROSOFT)


def _joined(x: NDArray) -> NDArray:
    """[B,H,T,D] -> [B,T,H*D]."""
    return x.transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], -1)


def _split(x: NDArray, heads: int) -> NDArray:
    """[B,T,H*D] -> [B,H,T,D]."""
    return x.reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3)


def _full(bias: NDArray | None, q: NDArray, k: NDArray) -> NDArray | None:
    """A bias with its last two axes written out."""
    return None if bias is None else np.broadcast_to(bias, (*bias.shape[:2], q.shape[2], k.shape[2]))


def attention_multi_head(
    q: NDArray, k: NDArray, v: NDArray, *, bias: NDArray | None = None, causal: bool = False, scale: float | None = None
) -> NDArray:
    """com.microsoft.MultiHeadAttention, heads in the last axis.

    q[B,H,Tq,D], k[B,H,Tk,D], v[B,H,Tk,Dv], bias[B or 1,H or 1,Tq or 1,Tk or 1] -> [B,H,Tq,Dv]
    Source: ONNX Runtime, ContribOperators.
    """
    inputs = [*(_joined(a) for a in (q, k, v)), None, None, _full(bias, q, k)]
    attributes = {"num_heads": q.shape[1], "unidirectional": int(causal), "scale": scale}
    return _split(_run("MultiHeadAttention", inputs, 1, attributes)[0], q.shape[1])


def attention_grouped(
    q: NDArray,
    k: NDArray,
    v: NDArray,
    *,
    bias: NDArray | None = None,
    sink: NDArray | None = None,
    causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
) -> NDArray:
    """com.microsoft.GroupQueryAttention; the first Tk - Tq keys are those of the past.

    q[B,H,Tq,D], k[B,G,Tk,D], v[B,G,Tk,D], bias[B or 1,H or 1,Tq or 1,Tk or 1], sink[H] -> [B,H,Tq,D]
    Source: ONNX Runtime, ContribOperators. Raises ValueError for more queries than keys.
    """
    past = k.shape[2] - q.shape[2]
    if past < 0:
        raise ValueError(f"{q.shape[2]} queries, {k.shape[2]} keys: a past cannot have {past} keys")
    last, total = np.full(q.shape[0], k.shape[2] - 1, np.int32), np.array(k.shape[2], np.int32)
    inputs = [_joined(q), _joined(k[:, :, past:]), _joined(v[:, :, past:]), k[:, :, :past], v[:, :, :past]]
    inputs += [last, total, None, None, None, _full(bias, q, k), sink]
    attributes: dict[str, Any] = {"num_heads": q.shape[1], "kv_num_heads": k.shape[1], "causal": int(causal)}
    attributes |= {"scale": scale, "softcap": softcap}
    out = _run("GroupQueryAttention", inputs, 3, attributes)[0]
    return _split(out, q.shape[1])


def _exported(optimised: bool) -> dict[str, Any]:
    """Graphs of small operators, such as exporters write, which the optimiser fuses."""

    def layer_norm(x: NDArray, weight: NDArray, bias: NDArray, *, eps: float = 1e-5) -> NDArray:
        """ReduceMean, Sub, Pow, Sqrt, Div, Mul, Add. x[...,d], weight[d], bias[d] -> [...,d]

        Raises ValueError for an eps of which x's dtype, in which a graph has its constants, keeps too little.
        """
        if abs(float(x.dtype.type(eps)) - eps) > eps / 256:
            raise ValueError(f"eps={eps}: a constant of {x.dtype} is {x.dtype.type(eps)}")
        feeds = {"x": x, "weight": weight, "bias": bias, "axes": np.array([-1])}
        feeds |= {"eps": np.asarray(eps, x.dtype), "two": np.asarray(2, x.dtype)}
        nodes: list[Node] = [
            ("ReduceMean", "x axes", "mean", {}),
            ("Sub", "x mean", "apart", {}),
            ("Pow", "apart two", "squares", {}),
            ("ReduceMean", "squares axes", "variance", {}),
            ("Add", "variance eps", "shifted", {}),
            ("Sqrt", "shifted", "deviation", {}),
            ("Div", "apart deviation", "normed", {}),
            ("Mul", "normed weight", "weighted", {}),
            ("Add", "weighted bias", "y", {}),
        ]
        return _compute(nodes, 18, feeds, ["y"], optimised=optimised)[0]

    def gelu(x: NDArray) -> NDArray:
        """Div, Erf, Add, Mul. x[...] -> [...]; x (1 + erf(x / sqrt(2))) / 2"""
        numbers = {"root": 2**0.5, "one": 1.0, "half": 0.5}
        feeds = {"x": x, **{name: np.asarray(value, x.dtype) for name, value in numbers.items()}}
        nodes: list[Node] = [
            ("Div", "x root", "scaled", {}),
            ("Erf", "scaled", "erf", {}),
            ("Add", "erf one", "shifted", {}),
            ("Mul", "x shifted", "product", {}),
            ("Mul", "product half", "y", {}),
        ]
        return _compute(nodes, 18, feeds, ["y"], optimised=optimised)[0]

    def attention(
        q: NDArray, k: NDArray, v: NDArray, *, bias: NDArray | None = None, scale: float | None = None
    ) -> NDArray:
        """Transpose, MatMul, Mul, Add, Softmax, MatMul. q[B,H,Tq,D], k[B,H,Tk,D], v[B,H,Tk,Dv] -> [B,H,Tq,Dv]"""
        if k.shape[1] != q.shape[1]:
            raise ValueError(f"{k.shape[1]} key heads for {q.shape[1]} query heads: MatMul needs as many")
        factor = q.shape[-1] ** -0.5 if scale is None else scale
        feeds = {"q": q, "k": k, "v": v, "factor": np.asarray(factor, q.dtype)} | (
            {} if bias is None else {"bias": bias}
        )
        nodes: list[Node] = [
            ("Transpose", "k", "turned", {"perm": [0, 1, 3, 2]}),
            ("MatMul", "q turned", "products", {}),
            ("Mul", "products factor", "scaled", {}),
            *([] if bias is None else [("Add", "scaled bias", "logits", {})]),
            ("Softmax", "scaled" if bias is None else "logits", "weights", {"axis": -1}),
            ("MatMul", "weights v", "y", {}),
        ]
        return _compute(nodes, 18, feeds, ["y"], optimised=optimised)[0]

    def feed_forward(x: NDArray, w1: NDArray, b1: NDArray, w2: NDArray, b2: NDArray) -> NDArray:
        """MatMul, Add, Relu, MatMul, Add. x[...,d], w1[d,f], b1[f], w2[f,d], b2[d] -> [...,d]"""
        nodes: list[Node] = [
            ("MatMul", "x w1", "product", {}),
            ("Add", "product b1", "inner", {}),
            ("Relu", "inner", "kept", {}),
            ("MatMul", "kept w2", "outer", {}),
            ("Add", "outer b2", "y", {}),
        ]
        feeds = {"x": x, "w1": w1, "b1": b1, "w2": w2, "b2": b2}
        return _compute(nodes, 18, feeds, ["y"], optimised=optimised)[0]

    return {"layer_norm": layer_norm, "gelu": gelu, "attention": attention, "feed_forward": feed_forward}


VARIANTS: dict[str, dict[str, Any]] = {
    "multi_head": {"attention": attention_multi_head},
    "grouped": {"attention": attention_grouped},
    "exported": _exported(optimised=False),
    "exported_optimised": _exported(optimised=True),
}
_ALL = Capabilities(dtypes=("float64", "float32", "float16"))
_SINGLE = replace(_ALL, dtypes=("float32", "float16"))
_EXPORTED = {
    "layer_norm": _ALL,
    "gelu": replace(_SINGLE, accumulate={"float16": "storage"}),
    "attention": replace(_ALL, grouped_heads=False),
    "feed_forward": _ALL,
}
CAPABILITIES: dict[str, dict[str, Capabilities]] = {
    "multi_head": {"attention": replace(_SINGLE, grouped_heads=False, causal_alignment="top_left")},
    "grouped": {
        "attention": replace(_SINGLE, value_width="equal", widths=(8, 16, 32, 64), more_queries_than_keys="never")
    },
    "exported": _EXPORTED,
    "exported_optimised": _EXPORTED,
}
_SEES_ALL = {"q": [[[[0.0]]]], "k": [[[[0.0], [0.0]]]], "v": [[[[1.0], [0.0]]]], "causal": True}
_SQUARE = {"q": [[[[0.0], [0.0]]]], "k": [[[[0.0], [0.0]]]], "v": [[[[0.0], [1.0]]]], "causal": True}
EXPECTED = [
    Expected(
        f"attention/{law}",
        "unidirectional counts from the top left, and leaves the last query unmasked where there are more keys",
        "reports/findings/onnxruntime_multi_head_last_query.py",
        case,
        where=where,
        variants=("multi_head",),
        spreads=law == "equals-the-reference",
    )
    for law, case, where in (
        ("equals-the-reference", _SEES_ALL, "causal and Tq < Tk"),
        ("causal-is-the-end-of-the-square", _SQUARE, "causal"),
        ("queries-are-independent", _SQUARE, "causal"),
    )
]
