"""The reference evaluator's Attention gives every query the causal mask of the first where attn_mask has one row.

Library: onnx 1.23.2
Law: attention/equals-the-reference, attention/*
Where: onnx:attention, onnx:packed, onnx:scores, onnx:past, onnx:lengths
Input: two queries, two keys, all zero; v = [[0], [1]]; attn_mask [[[[True, True]]]], is_causal=1
Got: [[0], [0]]
Wanted: [[0], [0.5]] (attn_mask may be broadcast, so a row of True is no mask at all; query 1 sees both keys)
Status: theirs, new
Tracker: none found
Searched: "Attention reference is_causal attn_mask broadcast query axis" in issues;
"op_attention _apply_causal attn_mask shape (1, kv) only first row" in issues
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


q = np.zeros((1, 1, 2, 1), np.float32)
v = np.array([[[[0], [1]]]], np.float32)
got = run("Attention", [q, q, v, np.ones((1, 1, 1, 2), bool)], is_causal=1)
print("got", got.ravel(), "wanted [0, 0.5]")
sys.exit(0 if got[0, 0, 1, 0] == 0.5 else 1)
