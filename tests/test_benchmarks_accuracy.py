"""asv's accuracy and its suite of the suite: who is judged, what is recorded of the wrong, what older versions give."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from toys import ROOT, run_python

pytest.importorskip("torch")

from veriformer.benchmarks import bench_accuracy, bench_costs, bench_suite, implementations, judging  # noqa: E402
from veriformer.benchmarks.implementations import IMPLEMENTATIONS, LEFT_OUT, Absent, Prepared, named  # noqa: E402
from veriformer.benchmarks.inputs import ACCURACY_ONLY, BACKWARD, FORWARD, FORWARD_ONLY, judged_at  # noqa: E402
from veriformer.benchmarks.workloads import BY_ID, WORKLOADS  # noqa: E402
from veriformer.targets import Options, load, load_functions  # noqa: E402

REGISTERED = {
    (one.description.name, operation)
    for target in ("numpy", "torch") for one in load(target, Options()) for operation in one.boundaries
}  # fmt: skip


def test_every_implementation_of_a_covered_operation_is_listed_or_left_out_with_a_reason() -> None:
    timed = {(name, operation) for operation, names in IMPLEMENTATIONS.items() for name in names}
    judged = {(name, operation) for operation, names in ACCURACY_ONLY.items() for name in names}
    assert not timed & judged and not timed & set(LEFT_OUT)
    assert timed | judged | set(LEFT_OUT) <= REGISTERED
    assert all(reason for reason in LEFT_OUT.values())
    for operations, found in ((set(IMPLEMENTATIONS), timed), ({one.operation for one in FORWARD}, timed | judged)):
        offered = {(name, operation) for name, operation in REGISTERED if operation in operations}
        assert offered == {pair for pair in found | set(LEFT_OUT) if pair[1] in operations}


def test_all_that_is_timed_is_judged_and_classes_are_named_by_operation() -> None:
    assert {one.operation for one in WORKLOADS} <= {one.operation for one in FORWARD}
    classes = {name for name, value in vars(bench_accuracy).items() if isinstance(value, type) and name[0] != "_"}
    assert {"Softmax", "SoftmaxBackward", "MultiHeadAttention", "EncoderLayerBackward"} <= classes
    assert len([name for name in classes if hasattr(getattr(bench_accuracy, name), "subject")]) == len(
        (*FORWARD, *BACKWARD)
    )


def test_only_those_without_gradients_are_not_asked_for_them() -> None:
    for one in BACKWARD:
        operation = one.operation
        for name in (*IMPLEMENTATIONS.get(operation, ()), *ACCURACY_ONLY.get(operation, ())):
            try:
                Prepared(named(name, operation), one)
                assert (name, operation) not in FORWARD_ONLY and name in judged_at(one)
            except Absent:
                assert (name, operation) in FORWARD_ONLY and name not in judged_at(one)


def cell(name: str, *parameters: str) -> Any:
    """A cell of the accuracy suite that is set up."""
    found = getattr(bench_accuracy, name)()
    found.setup(*parameters)
    return found


def wrongly(function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The cell of a softmax of ours, whose results no cell before it has left."""
    loaded = load_functions({"softmax": function}, Options(), "mine")
    monkeypatch.setattr(bench_accuracy, "named", lambda *_: loaded)
    monkeypatch.setattr(bench_accuracy, "shared", lambda _, make: make())
    return cell("Softmax", "mine", "float32")


def plain(x: Any, *, axis: int = -1) -> Any:
    import numpy as np

    e = np.exp(x - x.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


def test_what_is_right_costs_less_than_a_budget() -> None:
    one = cell("Softmax", "torch:functional", "float32")
    ratio, bits = one.track_worst_ratio("", ""), one.track_lost_bits("", "")
    assert 0 < ratio < 1 and -2 <= bits < 2 and ratio == float(f"{ratio:.4g}")


def test_a_loss_of_accuracy_shows_in_both_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    right = wrongly(plain, monkeypatch)
    wrong = wrongly(lambda x, *, axis=-1: plain(x, axis=axis) * (1 + 1e-3), monkeypatch)
    assert right.track_worst_ratio("", "") < 1 < 10 < wrong.track_worst_ratio("", "")
    assert wrong.track_lost_bits("", "") > right.track_lost_bits("", "") + 5


@pytest.mark.parametrize("function", [
    lambda x, *, axis=-1: plain(x, axis=axis) * math.nan,
    lambda x, *, axis=-1: plain(x, axis=axis)[:1],
], ids=["nan", "shape"])  # fmt: skip
def test_what_has_no_number_fails(function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(judging.Wrong, match="mine"):
        wrongly(function, monkeypatch).track_worst_ratio("", "")


def test_nothing_to_judge_is_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_accuracy, "accuracy", lambda *_, **__: judging.Accuracy(math.nan, 0.0))
    with pytest.raises(judging.Wrong, match="or nothing to judge"):
        wrongly(plain, monkeypatch).track_worst_ratio("", "")


def test_what_an_implementation_lacks_is_absent() -> None:
    for name, parameters in {
        "Softmax": ("numpy:plane", "float32"), "Gelu": ("numpy:plain", "float32"), "AdamwStep": ("numpy:plain", "x"),
        "SoftmaxBackward": ("numpy:blocked", "float32"),
    }.items():  # fmt: skip
        with pytest.raises(NotImplementedError):
            cell(name, *parameters)


FORKED = """
import os, sys
from veriformer.benchmarks import bench_accuracy, judging
print(judging.KEPT)
def cell():
    one = bench_accuracy.UniversalTransformer(); one.setup("numpy:universal", "float32")
    print(one.track_worst_ratio("", ""), len(list(judging.KEPT.iterdir())))
for _ in range(2):
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        if _:  # the second one finds all it needs
            judging.pickle.dumps = None
        cell(); sys.stdout.flush(); os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
"""


def test_copies_of_a_process_share_bounds_and_leave_nothing() -> None:
    done = run_python("-c", FORKED, folder=ROOT)
    assert done.returncode == 0, done.stderr
    folder, first, second = done.stdout.splitlines()
    assert first == second and first.endswith(" 4") and not Path(folder).exists()


def test_what_a_killed_process_left_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for name in (f"veriformer-bounds-{gone.pid}-1", f"veriformer-bounds-{os.getppid()}-1", "veriformer-bounds-x"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(judging, "KEPT", tmp_path / "veriformer-bounds-mine")
    assert judging.shared("one", lambda: 1) == judging.shared("one", lambda: 2) == 1
    assert not (tmp_path / f"veriformer-bounds-{gone.pid}-1").exists() and len(list(tmp_path.iterdir())) == 3


@pytest.fixture
def older(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes the package lack a module, as an earlier version might, or what a registered name gave."""

    def lacks(module: str, **instead: Any) -> None:
        implementations._loaded.cache_clear()
        there = types.ModuleType(module)
        vars(there).update(instead)
        monkeypatch.setitem(sys.modules, module, there if instead else None)

    yield lacks  # type: ignore[misc]
    implementations._loaded.cache_clear()


def first_cells() -> list[tuple[type, tuple[str, ...]]]:
    """One cell of each class of asv's suites."""
    found = []
    for module in (bench_accuracy, bench_costs):
        for name, value in vars(module).items():
            if isinstance(value, type) and name[0] != "_" and hasattr(value, "params"):
                found.append((value, tuple(values[0] for values in value.params)))
    return found


@pytest.mark.parametrize("lacking", [
    {}, {"Options": Options}, {"Options": Options, "load": lambda *_: []},
    {"Options": Options, "load": lambda *_: [load_functions({"relu": lambda x: x}, Options(), "numpy:plain")]},
], ids=["no module", "no function", "nothing registered", "another operation"])  # fmt: skip
def test_older_versions_of_the_package_are_absent(lacking: dict[str, Any], older: Callable[..., None]) -> None:
    older("veriformer.targets", **lacking)
    cells = first_cells()
    assert len(cells) > 50
    for kind, parameters in cells:
        with pytest.raises(Absent):
            kind().setup(*parameters)


@pytest.mark.parametrize("module", ["checking", "targets", "catalogue", "subject"])
def test_the_suite_itself_is_absent_from_older_versions(module: str, older: Callable[..., None]) -> None:
    older(f"veriformer.{module}", nothing=None)
    with pytest.raises(Absent, match="another interface"):
        bench_suite.Cases().setup()
    if module in ("checking", "targets"):
        for one, parameters in ((bench_suite.Judging(), ("numpy softmax",)), (bench_suite.Isolation(), ())):
            with pytest.raises(Absent, match="another interface"):
                one.setup(*parameters)


def test_no_plugin_is_absent(older: Callable[..., None]) -> None:
    older("veriformer.plugin")
    with pytest.raises(Absent, match="another interface"):
        bench_suite.Import().setup()


def test_the_suite_itself_has_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_suite, "CASES", 3)
    monkeypatch.setattr(bench_suite.Import, "PAIRS", 1)
    one = bench_suite.Cases()
    one.setup()
    assert one.track_thousand_cases_cost() > 0
    one.teardown()
    assert bench_suite.Import().track_import_cost() > 0


def test_a_run_that_fails_or_judges_nothing_has_no_cost() -> None:
    with pytest.raises(RuntimeError, match="ended with status"):
        bench_suite.apart(lambda: 1 / 0)
    with bench_suite.ExitStack() as stack:
        judge = bench_suite.Judge(bench_suite.TARGETS["numpy softmax"], stack, dtypes=("float32",))
        judge.judge = lambda report: iter(())
        with pytest.raises(RuntimeError, match="no law was judged and held"):
            judge()


def test_a_dtype_that_is_not_there_is_absent() -> None:
    with pytest.raises(Absent, match="numpy:plain has no int8"):
        Prepared(named("numpy:plain", "softmax"), BY_ID["softmax-forward"], "int8")
