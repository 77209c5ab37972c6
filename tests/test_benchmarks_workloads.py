"""Workloads and the yardstick are frozen; their arithmetic and their traffic are counted a second way."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from toys import ROOT

from veriformer.benchmarks.implementations import Prepared, named
from veriformer.benchmarks.inputs import BACKWARD, FORWARD
from veriformer.benchmarks.workloads import BY_ID, WORKLOADS, Workload, workload_named

YARDSTICK = "845f726da2066dd5"
WORKLOAD = {
    "softmax-forward": "7217bdfb655fbfca",
    "softmax-backward": "33af0bc40369f7bc",
    "layer-norm-forward": "d03683319e296607",
    "layer-norm-backward": "0fc4b13901f8b179",
    "attention-prefill": "ae18a72b602d9d4d",
    "attention-decode": "f9f5f9a8a677b866",
    "kv-append": "ed0a23e43ea9f22c",
    "encoder-layer-forward": "4a231f98c987abf0",
    "encoder-layer-training": "13aadf50f362d66a",
    "decoder-layer-forward": "59c4c523fad991a1",
    "decoder-layer-training": "a3f1b89024a9815b",
    "generate-cached": "0102ac1290e1a0bc",
    "generate-uncached": "b42c01fac6d914b1",
    "universal-transformer": "2f28c95d6923bf57",
    "loss-smoothed": "7ffa556ac53f2788",
    "adamw-step": "237447724f43a6d0",
}
"""What each timed workload is; a new one is added here."""
ACCURACY = "3c27ae6e5f9f1af5"


def digest(text: str, arrays: Mapping[str, np.ndarray]) -> str:
    """Of a text and of arrays, to six decimals: the last bit of a logarithm may differ between machines."""
    found = hashlib.sha256(text.encode())
    for name, array in arrays.items():
        found.update(repr((name, array.shape, array.dtype.kind)).encode())
        found.update((np.round(array.astype(float), 6) + 0.0).tobytes())
    return found.hexdigest()[:16]


def identity(one: Workload) -> str:
    """The digest of all that makes a workload what it is, with the inputs of seed 0."""
    facts = (one.id, one.operation, one.direction, one.dtype, one.sizes, one.prompt, one.length, one.flops, one.bytes)
    return digest(repr((facts, sorted(one.keywords.items()))), one.arrays(0))


def code_of(path: str) -> str:
    """A file's code without docstrings and comments."""
    tree = ast.parse((ROOT / path).read_text())
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [one for one in body if not is_text(one)]  # type: ignore[attr-defined]
    return ast.dump(tree)


def is_text(node: ast.AST) -> bool:
    """Whether a statement is a string alone."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def test_the_yardstick_is_frozen() -> None:
    found = digest(code_of("benchmarks/yardstick.py"), {})
    assert found == YARDSTICK, (
        "benchmarks/yardstick.py has changed: all costs recorded so far mean something else. Take the change back, or "
        f"raise `version` of every track_cost, remove the old results, and write {found!r} here."
    )


def test_workloads_are_frozen() -> None:
    found = {one.id: identity(one) for one in WORKLOADS}
    changed = sorted(name for name in found if WORKLOAD.get(name, found[name]) != found[name])
    assert not changed, f"{changed} changed: earlier results are of something else; give each a new id instead"
    new = {name: found[name] for name in found if name not in WORKLOAD}
    assert not new, f"new workloads: add {new} to WORKLOAD"
    gone = sorted(set(WORKLOAD) - set(found))
    assert not gone, f"{gone} are gone: their histories end; if that is meant, remove them from WORKLOAD"


def test_the_inputs_of_accuracy_are_frozen() -> None:
    found = digest(" ".join(identity(one) for one in (*FORWARD, *BACKWARD)), {})
    assert found == ACCURACY, (
        "inputs of benchmarks/inputs.py have changed: accuracies recorded so far are of others. Take the change back, "
        f"or raise `version` in bench_accuracy.py and write {found!r} here (a new operation needs only the latter)."
    )


def test_a_changed_workload_is_another() -> None:
    from dataclasses import replace

    one = BY_ID["attention-prefill"]
    changes = ({"keywords": {"causal": False}}, {"flops": one.flops + 1}, {"dtype": "float64"},
               {"draw": lambda rng: {n: a + 1e-3 for n, a in one.draw(rng).items()}})  # fmt: skip
    assert len({identity(one), *(identity(replace(one, **change)) for change in changes)}) == 5


def test_ids_are_unique_and_an_unknown_one_names_the_nearest() -> None:
    assert len(BY_ID) == len(WORKLOADS)
    with pytest.raises(ValueError, match="no workload 'softmax-foward'; nearest is 'softmax-forward'"):
        workload_named("softmax-foward")


MATMULS = {
    "encoder-layer-forward": "torch:layers", "encoder-layer-training": "torch:layers",
    "decoder-layer-forward": "torch:layers", "decoder-layer-training": "torch:layers",
    "generate-cached": "torch:decoder_growing", "attention-decode": "torch:math",
}  # fmt: skip
"""Workloads that products of matrices make up, by an implementation in which torch counts them."""


@pytest.mark.parametrize("name", MATMULS)
def test_arithmetic_is_what_torch_counts(name: str) -> None:
    counting = pytest.importorskip("torch.utils.flop_counter")
    one = BY_ID[name]
    call = Prepared(named(MATMULS[name], one.operation), one).fresh(0)
    with counting.FlopCounterMode(display=False) as counter:
        call()
    assert 0.9 < one.flops / counter.get_total_flops() < 1.1


def test_arithmetic_of_attention_by_hand() -> None:
    """Two products for each pair that may see each other, five operations of softmax, two FLOPs a product's term."""
    heads, length, width = 4, 128, 64
    pairs = heads * length * (length + 1) / 2
    assert BY_ID["attention-prefill"].flops == pytest.approx(pairs * (4 * width + 5), rel=0.01)
    assert BY_ID["kv-append"].flops == 4 * 8 * 701 * 64


class Counted(np.ndarray):
    """An array that counts the elements of every operation on it and on what comes of it."""

    operations = [0]

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: object, **keywords: Any) -> Any:
        plain = [np.asarray(one) if isinstance(one, Counted) else one for one in inputs]
        if isinstance(keywords.get("out"), tuple):
            keywords["out"] = tuple(np.asarray(one) for one in keywords["out"])
        found = getattr(ufunc, method)(*plain, **keywords)
        self.operations[0] += max(np.size(one) for one in (*plain, found))
        return np.asarray(found).view(Counted)


@pytest.mark.parametrize(
    ("name", "by"),
    [("softmax-forward", "numpy:plain"), ("layer-norm-forward", "numpy:plain"), ("adamw-step", "numpy:optimizer")],
)
def test_arithmetic_element_by_element_is_what_numpy_does(name: str, by: str) -> None:
    one = BY_ID[name]
    prepared = Prepared(named(by, one.operation), one)
    positional, words, _ = prepared._arguments(prepared.case(0))
    Counted.operations[0] = 0
    given = [array.view(Counted) if isinstance(array, np.ndarray) else array for array in positional]
    prepared.boundary.function(*given, **words)
    assert 0.6 < one.flops / Counted.operations[0] < 1.5


@pytest.mark.parametrize("one", WORKLOADS, ids=lambda one: one.id)
def test_traffic_is_at_least_inputs_and_results(one: Workload) -> None:
    """All floating-point inputs are read and all results written; of caches the rows that are seen."""
    arrays = {name: array for name, array in one.arrays(0).items() if array.dtype.kind == "f"}
    if one.id == "kv-append":
        arrays |= {name: arrays[name][:, :, :701] for name in ("k_cache", "v_cache")}
    results = {"adamw-step": 3 * 256 * 256, "kv-append": 0}.get(one.id, 0)
    if one.operation in ("softmax", "layer_norm", "encoder_layer", "decoder_layer", "universal_transformer"):
        results = arrays["x"].size
    least = sum(array.size for array in arrays.values()) + results
    assert one.numbers >= 0.99 * least and one.bytes == 4 * one.numbers
