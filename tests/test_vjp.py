"""Gradients by OPERATION_vjp: found beside its operation, called with the same arguments, judged like autodiff."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from toys import implementation, judged, softmax

from veriformer.boundary import Outcome, Request
from veriformer.calling import UsageError
from veriformer.case import flattened, nested
from veriformer.targets import Options, load, load_functions

ONES = np.ones((1, 1, 2, 1))


def softmax_vjp(cotangent: np.ndarray, x: np.ndarray, *, axis: int = -1) -> tuple[np.ndarray]:
    p = softmax(x, axis=axis)
    return (p * (cotangent - (p * cotangent).sum(axis, keepdims=True)),)


def crossed(**functions: Any) -> Outcome:
    """The gradient of softmax by x, for the cotangent (1, 0)."""
    boundary = load_functions(functions, Options(framework="numpy"), "toy").boundaries["softmax"]
    return boundary.cross(
        Request({"x": np.array([0.0, 0.0])}, {}, "float32", gradient=("x",), cotangents=(np.array([1.0, 0.0]),))
    )


def test_the_vjp_beside_an_operation_gives_its_gradients() -> None:
    outcome = crossed(softmax=softmax, softmax_vjp=softmax_vjp)
    assert outcome.kind == "ok" and np.allclose(outcome.gradients["x"], [0.25, -0.25])


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (1.5, "softmax_vjp returned float, wanted a tuple of 1: x; None where there is none"),
        ((np.ones(2), np.ones(2)), "softmax_vjp returned tuple of 2, wanted a tuple of 1: x"),
        ((1.0,), "softmax_vjp returned float for x, wanted an array or None"),
    ],
)
def test_a_vjp_that_returns_something_else_is_named(returned: Any, words: str) -> None:
    outcome = crossed(softmax=softmax, softmax_vjp=lambda cotangent, x, axis=-1: returned)
    assert outcome.kind == "type" and outcome.message.startswith(words)


def test_a_single_gradient_may_come_without_a_tuple() -> None:
    outcome = crossed(
        softmax=softmax, softmax_vjp=lambda cotangent, x, axis=-1: softmax_vjp(cotangent, x, axis=axis)[0]
    )
    assert outcome.kind == "ok" and outcome.gradient_dtypes == {"x": "float32"}


def test_a_vjp_without_its_operation_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="softmax_vjp without softmax"):
        load_functions({"layer_norm": softmax, "softmax_vjp": softmax_vjp}, Options())


def test_a_module_and_a_bare_function_bring_their_vjp(tmp_path: Any, monkeypatch: Any) -> None:
    (tmp_path / "ops_with_vjp.py").write_text(
        "def softmax(x):\n    return x\n\n\ndef softmax_vjp(cotangent, x):\n    return (cotangent,)\n"
    )
    monkeypatch.chdir(tmp_path)
    for target in ("ops_with_vjp.py", "softmax=ops_with_vjp.py:softmax"):
        (one,) = load(target, Options())
        assert one.description.vjps == {"softmax"} and one.boundaries["softmax"].vjp is not None


def test_gradient_laws_judge_a_vjp() -> None:
    pytest.importorskip("torch")
    row = judged("softmax/gradient-equals-the-reference", softmax=softmax, softmax_vjp=softmax_vjp, dtype="float64")
    assert row.verdict == "pass" and row.judged > 50
    wrong = judged(
        "softmax/gradient-equals-the-reference",
        softmax=softmax,
        softmax_vjp=lambda cotangent, x, axis=-1: (softmax(x, axis=axis) * cotangent,),
    )
    assert wrong.verdict == "fail" and wrong.failure is not None and wrong.failure.case.numbers <= 2


def test_without_a_vjp_numpy_has_no_gradient_laws() -> None:
    assert judged("softmax/gradient-equals-the-reference", softmax=softmax).verdict == "not_provided"
    one = implementation(softmax=softmax, softmax_vjp=softmax_vjp)
    assert one.domain("softmax", "float32").provides("gradients")


def test_weights_are_nested_and_flattened_again() -> None:
    flat = {"params.wq": 1, "params.layers.0.w": 2, "params.layers.1.w": 3}
    tree = nested(flat)["params"]
    assert tree == {"wq": 1, "layers": [{"w": 2}, {"w": 3}]} and flattened(tree, "params") == flat
