"""The reference evaluator's LogSoftmax and SoftmaxCrossEntropyLoss are infinite for finite logits.

Library: onnx 1.23.2
Law: log_softmax/equals-the-reference, log_softmax/*, cross_entropy/equals-the-reference, cross_entropy/*
Where: onnx:default, onnx:log_prob
Input: float32 [[0, 1000]]
Got: [[-inf, 0]]
Wanted: [[-1000, 0]] (x - log sum exp(x); a probability that underflows has a finite logarithm)
Status: theirs, known
Tracker: https://github.com/onnx/onnx/pull/8423
Searched: "reference evaluator LogSoftmax -inf large logits" in issues
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


got = run("LogSoftmax", [np.array([[0, 1000]], np.float32)], axis=-1)
print("got", got, "wanted [[-1000, 0]]")
sys.exit(0 if np.isfinite(got).all() else 1)
