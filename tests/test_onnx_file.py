"""An ONNX file as a target: inputs by name or place, sizes it takes, messages, and a script that stands alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from veriformer import cli
from veriformer.calling import UsageError
from veriformer.onnx_file import load_graph

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

FLOAT, BOOL = onnx.TensorProto.FLOAT, onnx.TensorProto.BOOL


def save(
    path: Path, nodes: list[tuple[str, str, str, dict[str, Any]]], inputs: dict[str, tuple[int, Any]], *outputs: str
) -> str:
    """A file with a graph of these nodes; inputs are types and shapes."""
    make = onnx.helper
    made = [make.make_node(op, i.split(), o.split(), **attributes) for op, i, o, attributes in nodes]
    given = [make.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in inputs.items()]
    results = [make.make_tensor_value_info(name, FLOAT, None) for name in outputs or ("y",)]
    graph = make.make_graph(made, "graph", given, results)
    onnx.save(make.make_model(graph, opset_imports=[make.make_opsetid("", 23)], ir_version=10), str(path))
    return str(path)


def check(*words: str) -> Any:
    """The exit code of a look."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["check", *words, "--effort", "look"])
    return ended.value.code


def heads(*names: str) -> dict[str, tuple[int, Any]]:
    return {name: (FLOAT, [None] * 4) for name in names}


SOFTMAX = [("Softmax", "input", "y", {"axis": -1})]
FUSED = [("Attention", "query key value attn_mask", "y", {})]


def test_a_softmax_of_two_axes_takes_rows_of_any_shape(tmp_path: Path) -> None:
    place = save(tmp_path / "softmax.onnx", SOFTMAX, {"input": (FLOAT, ["rows", "columns"])})
    assert load_graph("softmax", place).capabilities.dtypes == ("float32",)
    assert check(f"softmax={place}", "--output", str(tmp_path)) == 0


def test_attention_is_judged_with_its_mask(tmp_path: Path) -> None:
    inputs = {**heads("query", "key", "value"), "attn_mask": (BOOL, [None] * 4)}
    place = save(tmp_path / "attention.onnx", FUSED, inputs)
    words = ["--law", "equals-the-reference", "--require", "mask", "--output", str(tmp_path)]
    assert check(f"attention={place}", *words) == 0


def test_a_missing_scale_is_found_by_a_script_that_stands_alone(tmp_path: Path) -> None:
    nodes = [
        ("Transpose", "key", "turned", {"perm": [0, 1, 3, 2]}),
        ("MatMul", "query turned", "logits", {}),
        ("Softmax", "logits", "weights", {"axis": -1}),
        ("MatMul", "weights value", "y", {}),
    ]
    place = save(tmp_path / "attention.onnx", nodes, heads("query", "key", "value"))
    assert check(f"attention={place}", "--law", "equals-the-reference", "--output", str(tmp_path)) == 1
    script = next(tmp_path.glob("*.py"))
    assert "veriformer" not in script.read_text().split('"""')[2]
    assert subprocess.run([sys.executable, str(script)], capture_output=True, cwd=tmp_path).returncode == 1


def test_keywords_are_inputs_without_axes_or_with_one(tmp_path: Path) -> None:
    nodes = [("Mul", "x weight", "a", {}), ("Add", "a bias", "b", {}), ("Add", "b epsilon", "y", {})]
    inputs = {"x": (FLOAT, None), "weight": (FLOAT, ["d"]), "bias": (FLOAT, ["d"]), "epsilon": (FLOAT, [1])}
    graph = load_graph("layer_norm", save(tmp_path / "norm.onnx", nodes, inputs))
    one = np.ones((1, 2), np.float32)
    assert graph.function(one, one[0], one[0], eps=0.5).tolist() == [[2.5, 2.5]]
    assert graph.capabilities.dtypes == ("float32",)


def test_what_a_case_leaves_out_changes_nothing(tmp_path: Path) -> None:
    nodes = [("Where", "mask bias bias", "a", {}), ("Mul", "a scale", "b", {}), ("MatMul", "b v", "y", {})]
    inputs = {**heads("q", "k", "v", "bias"), "mask": (BOOL, [None] * 4), "scale": (FLOAT, [])}
    graph = load_graph("attention", save(tmp_path / "attention.onnx", nodes, inputs))
    q = np.ones((1, 1, 2, 4), np.float32)
    assert graph.function(q, q, q, mask=None, bias=None, scale=None).shape == (1, 1, 2, 4)
    assert graph.capabilities.mask_means == "attend"


def test_results_are_found_by_name(tmp_path: Path) -> None:
    nodes = [("Identity", "q", "lse", {}), ("Identity", "v", "out", {})]
    graph = load_graph("attention_with_lse", save(tmp_path / "both.onnx", nodes, heads("q", "k", "v"), "lse", "out"))
    zero, one = np.zeros((1, 1, 1, 1), np.float32), np.ones((1, 1, 1, 1), np.float32)
    assert [float(result.item()) for result in graph.function(zero, zero, one)] == [1, 0]


def test_sizes_that_the_file_fixes_are_refused_with_what_to_do(tmp_path: Path) -> None:
    half = {name: (FLOAT, [1, None, None, 8]) for name in ("q", "k", "v")}
    graph = load_graph("attention", save(tmp_path / "half.onnx", [("Identity", "v", "y", {})], half))
    assert graph.capabilities.widths == (8,)
    two = np.zeros((2, 1, 1, 8), np.float32)
    with pytest.raises(ValueError, match="fixes axis 0 of 'q' at 1, this case has 2: export it with dynamic axes"):
        graph.function(two, two, two)


def refuse(operation: str, place: str) -> str:
    with pytest.raises(UsageError) as error:
        load_graph(operation, place)
    return str(error.value)


def test_files_that_are_none(tmp_path: Path) -> None:
    place = save(tmp_path / "softmax.onnx", SOFTMAX, {"input": (FLOAT, None)})
    (tmp_path / "text.onnx").write_text("no graph")
    assert "softmax.onnx'" in refuse("softmax", str(tmp_path / "sofmax.onnx"))
    assert "is not an ONNX file" in refuse("softmax", str(tmp_path / "text.onnx"))
    assert "must become an input" in refuse("layer_norm", place)
    assert "takes arrays" in refuse("encoder_layer", place)
    fixed = save(tmp_path / "fixed.onnx", SOFTMAX, {"input": (FLOAT, [2, 3])})
    assert "fixes every size (input[2, 3])" in refuse("softmax", fixed)


def test_inputs_that_fit_nothing(tmp_path: Path) -> None:
    inputs = {**heads("query", "key", "value"), "attn_msk": (BOOL, [None] * 4)}
    odd = save(tmp_path / "odd.onnx", [("Identity", "value", "y", {})], inputs)
    assert "'attn_msk' has no known meaning in attention; nearest is 'att" in refuse("attention", odd)
    flat = {name: (FLOAT, [None] * 3) for name in ("q", "k", "v")}
    text = refuse("attention", save(tmp_path / "flat.onnx", [("Identity", "v", "y", {})], flat))
    assert "has 3 axes, q of attention has 4: [B, H, Tq, D]" in text


def test_data_in_another_file_must_be_there(tmp_path: Path) -> None:
    make = onnx.helper
    weight = onnx.numpy_helper.from_array(np.ones(512, np.float32), "weight")
    info = make.make_tensor_value_info
    graph = make.make_graph(
        [make.make_node("Mul", ["x", "weight"], ["y"])],
        "g",
        [info("x", FLOAT, None)],
        [info("y", FLOAT, None)],
        [weight],
    )
    model = make.make_model(graph, opset_imports=[make.make_opsetid("", 23)], ir_version=10)
    onnx.save(model, str(tmp_path / "big.onnx"), save_as_external_data=True, location="big.data", size_threshold=0)
    (tmp_path / "big.data").unlink()
    assert "keeps 'weight' in big.data, which is not beside it" in refuse("relu", str(tmp_path / "big.onnx"))
