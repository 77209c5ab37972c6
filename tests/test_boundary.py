"""The boundary: what a hostile function does in our process ends as an outcome with the right words."""

from __future__ import annotations

import os
import random
import signal
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from toys import crossed, implementation, judged, softmax

from veriformer.boundary import Boundary, Request
from veriformer.declarations import Capabilities
from veriformer.targets import Options, load_functions


def test_a_plain_call_gives_float64_values_and_the_name_of_the_dtype() -> None:
    outcome = crossed(softmax)
    assert outcome.kind == "ok" and outcome.dtypes == ("float32",)
    assert outcome.results[0].dtype == np.float64 and outcome.results[0].sum() == pytest.approx(1, rel=1e-6)
    assert (outcome.changed, outcome.aliased, outcome.state, outcome.stale) == ((), (), (), "")


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (None, "returned NoneType, wanted an array of numpy"),
        ((np.ones(3), 1), "returned a tuple of 2, wanted one array; if it is among them, say where with --returns"),
        ([np.ones(3)], "returned a list of 1, wanted one array"),
        ("text", "returned str, wanted an array"),
        (1.5, "returned float, wanted an array"),
        (np.array([None, 1]), "returned ndarray of object, wanted plain real numbers"),
        (np.array(["a"]), "returned ndarray of <U1, wanted plain real numbers"),
        (np.array([1j]), "returned ndarray of complex128, wanted plain real numbers"),
    ],
)
def test_something_else_than_an_array_of_numbers_is_named(returned: Any, words: str) -> None:
    outcome = crossed(lambda x: returned)
    assert outcome.kind == "type" and outcome.message.startswith(words)


@pytest.mark.parametrize("change", ["to_sparse()", "to(torch.complex64)", "to('meta')"])
def test_a_tensor_that_is_not_plain_is_named(change: str) -> None:
    torch = pytest.importorskip("torch")
    outcome = crossed(lambda x: eval(f"x.{change}", {"x": x, "torch": torch}), framework="torch")
    assert outcome.kind == "type" and "wanted plain real numbers" in outcome.message


def test_other_numbers_and_shapes_come_through_for_the_laws_to_judge() -> None:
    assert crossed(lambda x: x.astype(np.float16)).dtypes == ("float16",)
    assert crossed(lambda x: np.argsort(x)).dtypes == ("int64",)
    assert crossed(lambda x: x > 0).dtypes == ("bool",)
    assert crossed(lambda x: np.ones((2, 2))).results[0].shape == (2, 2)


def test_a_wrong_shape_and_a_wrong_dtype_break_the_contract() -> None:
    shape = judged("softmax/returns-an-array", softmax=lambda x: x[:-1])
    dtype = judged("softmax/keeps-the-dtype", softmax=lambda x: x.astype(float))
    assert shape.failure is not None and shape.failure.kind == "shape" and "wanted" in shape.failure.message
    assert dtype.failure is not None and dtype.failure.message == "out is float64, wanted float32"


@pytest.mark.parametrize("error", [ValueError, NotImplementedError, RuntimeError, AssertionError, TypeError])
def test_a_clean_exception_is_a_refusal(error: type[Exception]) -> None:
    outcome = crossed(raising(error("no axes\nsecond line")))
    assert outcome.kind == "refused" and outcome.message == f"{error.__name__}: no axes"


@pytest.mark.parametrize(
    "error", [KeyError, ZeroDivisionError, SystemExit, KeyboardInterrupt, GeneratorExit, MemoryError]
)
def test_any_other_exception_is_an_error_and_goes_no_further(error: type[BaseException]) -> None:
    assert crossed(raising(error(0))).kind == "raised"


def raising(error: BaseException) -> Callable[..., Any]:
    def function(x: np.ndarray) -> Any:
        raise error

    return function


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_leaving_the_process_is_an_error_of_the_item(error: type[BaseException]) -> None:
    row = judged("softmax/equals-the-reference", softmax=raising(error()))
    assert row.verdict == "error" and row.failure is not None and row.failure.message == error.__name__


def test_only_the_users_own_interrupt_ends_the_run() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        judged("softmax/equals-the-reference", softmax=lambda x: os.kill(os.getpid(), signal.SIGINT))
    later = judged("softmax/equals-the-reference", softmax=raising(KeyboardInterrupt()))
    assert later.verdict == "error"
    assert signal.getsignal(signal.SIGINT) is before


def test_changed_inputs_are_named() -> None:
    def mutating(x: np.ndarray) -> np.ndarray:
        out = softmax(x)
        x *= 2
        return out

    assert crossed(mutating).changed == ("x",)


def test_results_that_share_memory_with_inputs_are_named() -> None:
    assert crossed(lambda x: x).aliased == ("x",)
    assert crossed(lambda x: x[::-1]).aliased == ("x",)
    assert crossed(lambda x: x + 0).aliased == ()


def boundary_of(function: Callable[..., Any]) -> Boundary:
    return load_functions({"softmax": function}, Options(framework="numpy"), "toy").boundaries["softmax"]


def test_a_result_that_a_later_call_changes_is_stale() -> None:
    buffer = np.zeros(4, np.float32)

    def reusing(x: np.ndarray) -> np.ndarray:
        buffer[: len(x)] = x
        return buffer[: len(x)].copy() if len(x) == 4 else buffer[: len(x)]

    boundary, request = boundary_of(reusing), Request({"x": np.ones(2)}, {}, "float32", watch=True)
    assert boundary.cross(request).stale == ""
    assert boundary.cross(request).stale == "shares memory with an earlier result"
    assert boundary.cross(Request({"x": np.zeros(4)}, {}, "float32", watch=True)).stale == "changed an earlier result"


@pytest.mark.parametrize(
    ("act", "name"),
    [(np.random.random, "numpy's random state"), (random.random, "Python's random state")],
)
def test_a_changed_random_state_is_named(act: Callable[[], float], name: str) -> None:
    assert crossed(lambda x: softmax(x + 0 * act()).astype(x.dtype)).state == (name,)


def test_numpys_error_handling_is_put_back_even_when_nobody_watches() -> None:
    before = np.geterr()
    boundary_of(lambda x: (np.seterr(all="raise"), x + 1)[1]).cross(Request({"x": np.ones(2)}, {}, "float32"))
    assert np.geterr() == before


def test_torchs_global_state_is_watched_and_its_modes_put_back() -> None:
    torch = pytest.importorskip("torch")

    def meddling(x: Any) -> Any:
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        return torch.rand(3)

    wanted = {"torch's random state", "torch's default dtype", "torch's grad mode"}
    assert set(crossed(meddling, framework="torch").state) == wanted
    assert torch.get_default_dtype() is torch.float32 and torch.is_grad_enabled()


def test_printing_and_warning_stay_inside(capsys: pytest.CaptureFixture[str]) -> None:
    def noisy(x: np.ndarray) -> np.ndarray:
        print("noise")
        warnings.warn("old", DeprecationWarning, stacklevel=1)
        return softmax(x) + np.float32(0) / np.float32(1)

    assert crossed(noisy).kind == "ok" and capsys.readouterr().out == ""


def test_what_the_suite_itself_cannot_build_is_said_so() -> None:
    boundary = boundary_of(lambda x: x)
    outcome = boundary.cross(Request({"x": np.ones(2)}, {"axis": 0}, "float32"))
    assert outcome.kind == "raised" and outcome.message.startswith("the suite could not build the arguments: KeyError")


def test_results_are_taken_from_where_returns_says() -> None:
    options = Options(framework="numpy", returns=("weights", "out"))
    boundary = load_functions({"softmax": lambda x: (None, softmax(x))}, options, "toy").boundaries["softmax"]
    assert boundary.cross(Request({"x": np.ones(2)}, {}, "float32")).results[0].tolist() == [0.5, 0.5]


def test_heads_are_brought_forward_again() -> None:
    declared = {"layout": "BTHD"}
    options = Options(framework="numpy", declare=declared)
    loaded = load_functions({"attention": lambda q, k, v: q + 0}, options, "toy")
    q = np.arange(6.0).reshape(1, 2, 3, 1)
    outcome = loaded.boundaries["attention"].cross(Request({"q": q, "k": q, "v": q}, {}, "float32"))
    assert outcome.results[0].tolist() == q.tolist()
    assert loaded.description.capabilities["attention"] == Capabilities(layout="BTHD")


def test_a_hostile_function_leaves_the_other_operations_alone() -> None:
    toy = implementation(
        softmax=raising(SystemExit(3)), log_softmax=lambda x, *, axis=-1: np.log(softmax(x, axis=axis))
    )
    request = Request({"x": np.ones(2)}, {}, "float32")
    assert toy.call("toy", "softmax", request).kind == "raised"
    assert toy.call("toy", "log_softmax", request).kind == "ok"
