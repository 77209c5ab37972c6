"""MultiHeadAttention with unidirectional=1 masks from the top left, but never the last query.

Library: onnxruntime 1.32.0
Law: attention/equals-the-reference, attention/*
Where: onnxruntime:multi_head
Input: com.microsoft.MultiHeadAttention, one head; two zero queries, three zero keys, v = [[1], [10], [100]]
Got: [1, 37]: the first query sees one key, as from the top left, and the last all three
Wanted: [1, 5.5] from the top left, or [5.5, 37] from the bottom right (a later query sees one key more)
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


k, v = np.zeros((1, 3, 1), np.float32), np.array([[[1], [10], [100]]], np.float32)
got = run("MultiHeadAttention", [k[:, :2], k, v], "com.microsoft", num_heads=1, unidirectional=1).ravel()
wanted = ([1, 5.5], [5.5, 37])
print(f"got {got}, wanted {wanted[0]} or {wanted[1]}")
sys.exit(0 if any(np.allclose(got, one) for one in wanted) else 1)
