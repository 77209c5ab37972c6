"""Makes kernel.onnx, softmax over the last axis, in the working directory. What is judged is the file:

python docs/examples/onnx_file.py
veriformer check softmax=kernel.onnx
"""

import onnx
from onnx import TensorProto, helper


def main():
    """x[rows, columns] -> out[rows, columns], of any size."""
    shape = ["rows", "columns"]
    graph = helper.make_graph(
        [helper.make_node("Softmax", ["x"], ["out"], axis=-1)],
        "kernel",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, shape)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.checker.check_model(model)
    onnx.save(model, "kernel.onnx")


if __name__ == "__main__":
    main()
