"""The reference evaluator's Adam returns float64 parameters for float32 ones.

Library: onnx 1.23.2
Law: adamw_step/keeps-the-dtype
Where: onnx:default
Input: one parameter, gradient and both averages of float32 zeros, R = float32 1, T = 1
Got: float64
Wanted: float32 (the output has the type T3 of the parameter; of several tensors it does)
Status: theirs, new
Tracker: none found
Searched: "reference evaluator Adam ai.onnx.preview.training output dtype float64 instead of float32" in issues
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


zeros = np.zeros(1, np.float32)
arrays = [np.array(1, np.float32), np.array(1), zeros, zeros, zeros, zeros]
got = run("Adam", arrays, opset=1, domain="ai.onnx.preview.training", outputs=("x", "v", "h")).dtype
print("got", got, "wanted float32")
sys.exit(0 if got == np.float32 else 1)
