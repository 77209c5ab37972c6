"""ReduceLogSumExp of float16 overflows in a model of opset 18: exp is taken of unshifted numbers.

Library: onnxruntime 1.32.0
Law: logsumexp/equals-the-reference, logsumexp/finite-for-finite-input, logsumexp/between-max-and-max-plus-log-n,
logsumexp/shift-adds
Where: onnxruntime:default
Input: float16 [1000], opset 18 (from 713 on)
Got: inf
Wanted: 1000 (log exp(x) of a single number is that number; float32 gives it, and so does opset 23)
Status: theirs, new
Tracker: none found
Searched: "onnxruntime ReduceLogSumExp float16 overflow inf function body" in issues
"""

import sys

import numpy as np
import onnxruntime
from onnx import ValueInfoProto, helper


def run(operator, arrays, domain="", **attributes):
    names = [f"x{i}" for i in range(len(arrays))]
    node = helper.make_node(operator, names, ["y"], domain=domain, **attributes)
    kinds = [helper.np_dtype_to_tensor_dtype(a.dtype) for a in arrays]
    inputs = [helper.make_tensor_value_info(n, k, a.shape) for n, k, a in zip(names, kinds, arrays, strict=True)]
    graph = helper.make_graph([node], "graph", inputs, [ValueInfoProto(name="y")])
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=11).SerializeToString()
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    return session.run(None, dict(zip(names, arrays, strict=True)))[0]


got = run("ReduceLogSumExp", [np.array([1000], np.float16), np.array([-1])], keepdims=0)
print("got", got, "wanted 1000")
sys.exit(0 if got == 1000 else 1)
