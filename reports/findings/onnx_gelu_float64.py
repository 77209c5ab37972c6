"""Gelu of float64 is as exact as float32: the constants in the body of the function are float32.

Library: onnx 1.23.2
Law: gelu/equals-the-reference, gelu/has-the-values-of-its-form, gelu/falls-and-then-rises,
gelu/works-in-the-declared-precision
Where: onnx:default, onnx:tanh
Input: float64 [-1]
Got: off by some 1e-9
Wanted: -0.15865525393145707 (x (1 + erf(x / sqrt(2))) / 2, in the dtype of the tensor)
Status: theirs, new
Tracker: none found
Searched: "onnx Gelu float64 double precision function body constant float" in issues
"""

import sys

import numpy as np
from onnx import ValueInfoProto, helper
from onnx.reference import ReferenceEvaluator


def run(operator, arrays, opset=23, domain="", outputs=("y",), **attributes):
    names = [f"x{i}" for i in range(len(arrays))]
    node = helper.make_node(operator, names, outputs, domain=domain, **attributes)
    kinds = [helper.np_dtype_to_tensor_dtype(a.dtype) for a in arrays]
    inputs = [helper.make_tensor_value_info(n, k, a.shape) for n, k, a in zip(names, kinds, arrays, strict=True)]
    graph = helper.make_graph([node], "graph", inputs, [ValueInfoProto(name=name) for name in outputs])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid(domain, opset)])
    return ReferenceEvaluator(model).run(None, dict(zip(names, arrays, strict=True)))[0]


got = float(run("Gelu", [np.array([-1.0])], opset=20)[0])
wanted = -0.15865525393145707
print("got", got, "wanted", wanted, "off by", abs(got - wanted))
sys.exit(0 if abs(got - wanted) < 1e-14 else 1)
