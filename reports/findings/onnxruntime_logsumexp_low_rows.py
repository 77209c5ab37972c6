"""ReduceLogSumExp over the last of two axes is -inf for a low row that begins with -inf.

Library: onnxruntime 1.32.0
Law: logsumexp/equals-the-reference, logsumexp/*
Where: onnxruntime:default
Input: float32 [[-inf, -1000]]
Got: [-inf]
Wanted: [-1000] (the same row without the first axis, or with -inf at its end, gives -1000)
Status: theirs, new
Tracker: none found (https://github.com/microsoft/onnxruntime/issues/28461, closed, is about rows of -inf alone)
Searched: "ReduceLogSumExp returns -inf when first element is -inf" in issues
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
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=11).SerializeToString()
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    return session.run(None, dict(zip(names, arrays, strict=True)))[0]


got = run("ReduceLogSumExp", [np.array([[-np.inf, -1000]], np.float32), np.array([-1])], keepdims=0)
print("got", got, "wanted [-1000]")
sys.exit(0 if got == -1000 else 1)
