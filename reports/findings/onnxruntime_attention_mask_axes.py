"""Attention-23 refuses a mask with one row for all queries, though attn_mask may be broadcast.

Library: onnxruntime 1.32.0
Law: attention/returns-an-array
Where: none: impls/onnxruntime_kernels.py writes masks out
Input: Attention of float32 zeros, two queries, two keys, attn_mask [[[[True, True]]]] of shape [1, 1, 1, 2]
Got: an error of the node: the mask's shape is not what it wants
Wanted: zeros (attn_mask is to be broadcastable to [batch, heads, queries, keys], as [1, 1, 2, 2] is)
Status: theirs, new
Tracker: none found
Searched: "onnxruntime Attention opset 23 attn_mask broadcast query dimension 1 CPU error" in issues;
https://github.com/microsoft/onnxruntime/issues/12149 asks the same of the contributed Attention
"""

import sys

import numpy as np
import onnxruntime
from onnx import TensorProto, ValueInfoProto, helper

names = ("q", "k", "v", "mask")
inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 1, 2, 1]) for name in names[:3]]
inputs.append(helper.make_tensor_value_info("mask", TensorProto.BOOL, [1, 1, None, 2]))
graph = helper.make_graph([helper.make_node("Attention", names, ["y"])], "graph", inputs, [ValueInfoProto(name="y")])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11).SerializeToString()
options = onnxruntime.SessionOptions()
options.log_severity_level = 4
session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
feeds = dict.fromkeys(names[:3], np.zeros((1, 1, 2, 1), np.float32))
faults = 0
for rows in (2, 1):
    try:
        print(f"mask of {rows} rows:", session.run(None, {**feeds, "mask": np.ones((1, 1, rows, 2), bool)})[0].ravel())
    except Exception as error:
        faults += 1
        print(f"mask of {rows} rows:", "refused,", " ".join(str(error).split()[-8:]))
sys.exit(faults > 0)
