"""MultiHeadAttention with unidirectional=1 masks from the top left, but never the last query.

Library: onnxruntime 1.32.0
Law: attention/equals-the-reference, attention/*
Where: onnxruntime:multi_head
Input: com.microsoft.MultiHeadAttention, one head; zero queries, zero keys, v = [[1], [0]]
Got: 0.5 for one query; [1, 0.5] for two
Wanted: the same for the first query either way (a query's mask does not depend on how many follow it)
Status: theirs, new
Tracker: none found (microsoft/onnxruntime issue 29020 is of Attention-23, where one query saw all keys)
Searched: "contrib MultiHeadAttention unidirectional q_len 1 kv_len causal mask ignored", "contrib MultiHeadAttention
    unidirectional causal mask last query not masked CPU" in issues
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


k, v = np.zeros((1, 2, 1), np.float32), np.array([[[1], [0]]], np.float32)
one, two = (
    run("MultiHeadAttention", [k[:, :n], k, v], "com.microsoft", num_heads=1, unidirectional=1).ravel() for n in (1, 2)
)
print("got", one, "for one query and", two, "for two, wanted the same for the first")
sys.exit(0 if one[0] == two[0] else 1)
