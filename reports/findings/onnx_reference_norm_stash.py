"""The reference evaluator's norms square in the input's dtype, though stash_type=1 asks for float32.

Library: onnx 1.23.2
Law: layer_norm/equals-the-reference, layer_norm/layout-changes-nothing, layer_norm/*, rms_norm/equals-the-reference,
rms_norm/*
Where: onnx:default
Input: RMSNormalization of float16 [[1000]], weight [1]
Got: [[0]]
Wanted: [[1]] (x / sqrt(mean x² + eps); 1000² fits float32, in which the standard has this stage computed)
Status: theirs, known
Tracker: https://github.com/onnx/onnx/pull/8439
Searched: "LayerNormalization RMSNormalization stash_type float16 computed in input type" in issues
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


got = run("RMSNormalization", [np.array([[1000]], np.float16), np.ones(1, np.float16)])
print("got", got, "wanted [[1]]")
sys.exit(0 if got == 1 else 1)
