"""Calls that are not arrays in, one array out: lists, scalars beside arrays, plain numbers, given steps, dialects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from veriformer.boundary import Outcome, Request
from veriformer.calling import UsageError
from veriformer.case import Case
from veriformer.declarations import PRESETS, Capabilities
from veriformer.dialect import reference_call
from veriformer.given_models import GivenStep
from veriformer.operations import OPERATIONS
from veriformer.oracle import shapes
from veriformer.reduce import candidates
from veriformer.targets import Options, load_functions

GRADS = {"grads.0": np.array([3.0]), "grads.1": np.array([[4.0, 0.0]])}
STEP = {
    "state": np.zeros((2, 1)),
    "step.drive": np.arange(6.0).reshape(2, 3, 1),
    "step.halting": np.array([[0.5, 0.5, 0.5], [1.0, 0.0, 0.0]]),
}


def crossed(
    operation: str, function: Callable[..., Any], arrays: dict[str, np.ndarray], framework: str = "numpy", **rest: Any
) -> Outcome:
    """What the boundary makes of one call; rest: keywords, and what the request asks for."""
    asked = {name: rest.pop(name) for name in ("gradient", "cotangents") if name in rest}
    boundary = load_functions({operation: function}, Options(framework=framework), "toy").boundaries[operation]
    return boundary.cross(Request(arrays, rest, "float32", watch=True, **asked))


def test_a_list_goes_in_and_a_list_of_as_many_comes_back() -> None:
    def clip(grads: list[np.ndarray], *, max_norm: float) -> list[np.ndarray]:
        norm = np.sqrt(sum((g * g).sum() for g in grads))
        return [g * np.float32(min(1.0, max_norm / norm)) for g in grads]

    outcome = crossed("clip_by_global_norm", clip, GRADS, max_norm=1.0)
    assert outcome.kind == "ok" and [r.shape for r in outcome.results] == [(1,), (1, 2)]
    np.testing.assert_allclose(outcome.results[1], [[0.8, 0.0]], rtol=1e-6)
    one = crossed("clip_by_global_norm", clip, {"grads.0": GRADS["grads.0"]}, max_norm=1.0)
    assert len(one.results) == 1
    fewer = crossed("clip_by_global_norm", lambda grads, *, max_norm: grads[:1], GRADS, max_norm=1.0)
    assert fewer.kind == "type" and fewer.message == "returned a list of 1, wanted one of 2, as were given"
    bare = crossed("clip_by_global_norm", lambda grads, *, max_norm: grads[0], GRADS, max_norm=1.0)
    assert bare.kind == "type" and bare.message == "returned ndarray, wanted a list: grads.0, grads.1"


def test_the_lists_of_a_case_shrink_one_by_one() -> None:
    case = Case("clip_by_global_norm", GRADS, {"max_norm": 0.5})
    found = [one for (one,) in candidates((case,))]
    assert {tuple(one.arrays) for one in found} == {("grads.0", "grads.1"), ("grads.0",), ("grads.1",)}
    assert {one["grads.1"].shape for one in found if "grads.1" in one.arrays} >= {(1, 2), (1, 1)}
    assert all("max_norm" in one.keywords for one in found)
    assert case.describe() == "max_norm=0.5; grads.0=[3] grads.1=[4,0]"


def test_a_scalar_stands_behind_the_arrays() -> None:
    seen = []

    def adamw_step(param, grad, m, v, step, *, lr, beta1=0.9):  # type: ignore[no-untyped-def]
        seen.append((step, lr, beta1))
        return param + 1, m + 1, v + 1

    arrays = {name: np.zeros(2) for name in ("param", "grad", "m", "v")}
    outcome = crossed("adamw_step", adamw_step, arrays, step=3, lr=0.1)
    assert outcome.kind == "ok" and seen == [(3, 0.1, 0.9)]
    assert [r.tolist() for r in outcome.results] == [[1, 1]] * 3


@pytest.mark.parametrize("made", [float, np.float64, lambda x: np.array(x), int])
def test_a_schedule_may_give_a_plain_number(made: Callable[[float], Any]) -> None:
    outcome = crossed("noam_schedule", lambda step, *, width, warmup: made(step), {}, step=2, width=4, warmup=3)
    assert outcome.kind == "ok" and outcome.results[0].shape == () and outcome.results[0] == 2
    assert shapes(Case("noam_schedule", {}, {"step": 2, "width": 4, "warmup": 3})) == ((),)
    wrong = crossed("noam_schedule", lambda step, *, width, warmup: True, {}, step=2, width=4, warmup=3)
    assert wrong.kind == "type"


def act_loop(step: Any, state: Any, *, max_steps: int, epsilon: float = 0.01) -> tuple[Any, Any, Any]:
    """Correct for these cases, in either framework: everything halts where its sum reaches 1."""
    output, total, steps, rest = state * 0, 0 * state[..., 0], 0 * state[..., 0], 0 * state[..., 0]
    for n in range(1, max_steps + 1):
        state, h = step(state, n)
        running = total < 1 - epsilon
        last = running & ((total + h >= 1 - epsilon) | (n == max_steps))
        weight = running * (last * (1 - total) + ~last * h)
        output, rest = output + weight[..., None] * state, rest + last * (1 - total)
        total, steps = total + running * h, steps + running
    return output, (steps.long() if hasattr(steps, "long") else steps.astype(np.int64)), rest


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_a_step_of_ours_is_given_in_the_framework_of_the_target(framework: str) -> None:
    pytest.importorskip(framework)
    outcome = crossed("act_loop", act_loop, STEP, framework, max_steps=3)
    assert outcome.kind == "ok" and outcome.dtypes == ("float32", "int64", "float32")
    assert outcome.results[1].tolist() == [2, 1]
    wanted = reference_call("act_loop", Capabilities(), STEP, {"max_steps": 3})
    for got, value in zip(outcome.results, wanted, strict=True):
        np.testing.assert_allclose(got, value)


def test_gradients_reach_what_the_given_step_is_made_of() -> None:
    pytest.importorskip("torch")
    cotangents = (np.ones((2, 1)), None, None)
    outcome = crossed(
        "act_loop", act_loop, STEP, "torch", max_steps=3, gradient=tuple(STEP), cotangents=cotangents
    )  # fmt: skip
    assert outcome.kind == "ok"
    assert outcome.gradients["step.drive"][1].ravel().tolist() == [1, 0, 0]  # type: ignore[index]


def test_a_given_step_refuses_numbers_that_no_loop_should_ask_for() -> None:
    step = GivenStep(STEP["step.drive"], STEP["step.halting"])
    state, halting = step(STEP["state"], 2)
    assert state.ravel().tolist() == [1, 4] and halting.tolist() == [0.5, 0]
    for n in (0, 4):
        with pytest.raises(LookupError, match=f"step: n: got {n}, wanted 1 to 3"):
            step(STEP["state"], n)
    outcome = crossed("act_loop", lambda step, state, *, max_steps: step(state, 0), STEP, max_steps=3)
    assert outcome.kind == "raised"


def test_fewer_steps_of_a_case_stay_within_those_that_there_are() -> None:
    case = Case("act_loop", STEP, {"max_steps": 3})
    shorter = [one for (one,) in candidates((case,)) if one["step.halting"].shape[-1] < 3]
    assert shorter and all(one["max_steps"] <= one["step.halting"].shape[-1] for one in shorter)


def test_a_dialect_that_is_declared_need_not_be_a_keyword() -> None:
    table = OPERATIONS["universal_transformer"]
    assert "preset" in table.keywords and Capabilities(presets=PRESETS).presets == PRESETS
    with pytest.raises(ValueError, match="presets: 'graphs' is not known; known are default, graves"):
        Capabilities.parse({"presets": "default,graphs"})
    with pytest.raises(ValueError, match="clip_epsilon='much': wanted a number"):
        Capabilities.parse({"clip_epsilon": "much"})
    assert Capabilities.parse({"clip_epsilon": "1e-6"}).clip_epsilon == 1e-6
    seen = []
    x = {"x": np.zeros((1, 1, 3))}
    crossed("universal_transformer", lambda x, params, *, heads, max_steps: seen.append(heads),
            x | {"params.halt.w": np.zeros((3, 1))}, heads=1, max_steps=1, preset="fixed")  # fmt: skip
    assert seen == [1]


def test_an_unknown_parameter_of_an_optimizer_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="no parameter for 'lr', which every call gives"):
        load_functions({"adamw_step": lambda param, grad, m, v, step: param}, Options(), "toy")
