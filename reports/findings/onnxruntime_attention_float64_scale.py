"""Attention of float64 multiplies by roots of the scale that are float32, so it is as exact as float32.

Library: onnxruntime 1.32.0
Law: attention/equals-the-reference, attention/works-in-the-declared-precision, cached_attention/equals-the-reference
Where: onnxruntime:default, onnxruntime:packed, onnxruntime:scores, onnxruntime:past, onnxruntime:lengths
Input: float64 q = [1, 1], k = [[1, 1], [0, 0]], v = [[1], [0]], no scale given
Got: off by some 1e-9
Wanted: 1 / (1 + exp(-sqrt(2))) (the default scale is 1 / sqrt(head size), in the tensors' dtype)
Status: theirs, new
Tracker: none found
Searched: "Attention double float64 precision scale computed in float" in issues
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


q, k = np.array([[[[1.0, 1.0]]]]), np.array([[[[1.0, 1.0], [0.0, 0.0]]]])
got = run("Attention", [q, k, np.array([[[[1.0], [0.0]]]])]).item()
wanted = 1 / (1 + np.exp(-np.sqrt(2)))
print("got", got, "wanted", wanted, "off by", abs(got - wanted))
sys.exit(0 if abs(got - wanted) < 1e-14 else 1)
