"""Targets: every way to name an implementation, and one line with the nearest name for every wrong one."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from toys import SOFTMAX

from veriformer import cli
from veriformer.boundary import Request
from veriformer.calling import UsageError
from veriformer.declarations import Capabilities, Expected
from veriformer.targets import Loaded, Options, load, load_functions, registered_names

MODULE = f"""{SOFTMAX}
from veriformer.declarations import Capabilities, Expected
FRAMEWORK = "numpy"
CAPABILITIES = {{"softmax": Capabilities(extreme_values=True)}}
EXPECTED = (Expected("softmax/sums-to-one", "a reason"),)
log_softmax = lambda x, *, axis=-1: np.log(softmax(x, axis=axis))

class Kernels:
    @staticmethod
    def softmax(x):
        return softmax(x)

number = 3
"""
VARIANTS = f"""{SOFTMAX}
from veriformer.declarations import Capabilities, Expected, Fault
VARIANTS = {{"plain": {{"softmax": softmax}}, "other": {{"softmax": softmax, "log_softmax": softmax}}}}
CAPABILITIES = {{"other": {{"softmax": Capabilities(dtypes=("float32",))}}}}
EXPECTED = (Expected("a/b", "for one", variants=("other",)), Expected("c/d", "for all"))
FAULTS = {{"other": Fault("softmax", "softmax/sums-to-one", "mutation", "nothing")}}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with modules in it; what was imported is forgotten afterwards."""
    for name, text in (("mine", MODULE), ("many", VARIANTS), ("empty", "x = 1"), ("broken", "import not_there")):
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "exits.py").write_text("raise SystemExit(0)")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("from mine import softmax")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:  # others, such as torch, cannot be imported twice
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def only(target: str, **options: object) -> Loaded:
    (one,) = load(target, Options(**options))  # type: ignore[arg-type]
    return one


def works(one: Loaded, operation: str = "softmax") -> bool:
    outcome = one.boundaries[operation].cross(Request({"x": np.zeros(2)}, {}, "float32"))
    return outcome.kind == "ok" and outcome.results[0].tolist() == [0.5, 0.5]


@pytest.mark.parametrize(
    ("target", "name", "place"),
    [
        ("softmax=mine:softmax", "mine:softmax", ("mine", "softmax")),
        ("softmax=mine.py:softmax", "mine.py:softmax", ("mine.py", "softmax")),
        ("softmax = package:softmax", "package:softmax", ("package", "softmax")),
        ("softmax=mine:Kernels.softmax", "mine:Kernels.softmax", ("mine", "Kernels.softmax")),
    ],
)
def test_a_function_is_named_by_module_or_file(target: str, name: str, place: tuple[str, str]) -> None:
    one = only(target)
    assert one.description.name == name and dict(one.description.places) == {"softmax": place} and works(one)


@pytest.mark.parametrize("target", ["mine", "mine.py", "./mine.py"])
def test_a_module_gives_the_functions_named_like_operations(target: str) -> None:
    about = only(target).description
    assert about.name == target and set(about.plans) == {"softmax", "log_softmax"} and about.framework == "numpy"
    assert about.capabilities["softmax"] == Capabilities(extreme_values=True)
    assert about.capabilities["log_softmax"] == Capabilities()
    assert [entry.law for entry in about.expected] == ["softmax/sums-to-one"]


def test_a_file_sees_its_neighbours(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "beside.py").write_text("answer = 42")
    (folder / "sub" / "uses.py").write_text(f"from beside import answer\n{SOFTMAX}")
    assert works(only("softmax=sub/uses.py:softmax"))
    assert works(only(f"softmax={folder}/sub/uses.py:softmax"))


def test_variants_are_implementations_of_their_own() -> None:
    plain, other = load("many.py", Options())
    assert [plain.description.name, other.description.name] == ["many.py:plain", "many.py:other"]
    assert set(other.description.plans) == {"softmax", "log_softmax"} and set(plain.description.plans) == {"softmax"}
    assert other.description.capabilities["softmax"].dtypes == ("float32",)
    assert plain.description.capabilities["softmax"].dtypes == ()
    assert [e.law for e in plain.description.expected] == ["c/d"] and len(other.description.expected) == 2
    assert other.description.fault is not None and plain.description.fault is None


@pytest.mark.parametrize("target", ["many:other", "many.py:other"])
def test_one_variant_is_picked(target: str) -> None:
    one = only(target)
    assert one.description.name == target and works(one)


def test_registered_names_list_several_modules() -> None:
    assert {"numpy", "torch"} <= set(registered_names())
    names = [one.description.name for one in load("numpy", Options())]
    assert names[:2] == ["numpy:plain", "numpy:blocked"] and len(names) == len(set(names)) > 4
    assert [one.description.name for one in load("numpy:plain", Options())] == ["numpy:plain"]


def test_a_registered_name_of_somebody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    point = importlib.metadata.EntryPoint("ours", "here:MODULES", "veriformer.implementations")
    monkeypatch.setattr("veriformer.targets._registered", lambda: {"ours": point})
    Path("here.py").write_text("MODULES = 'many'")
    assert [one.description.name for one in load("ours", Options())] == ["ours:plain", "ours:other"]


WRONG = [
    ("sotfmax=mine:softmax", "unknown operation 'sotfmax'; nearest is 'softmax'; `veriformer list` shows all"),
    ("softmax=mien:softmax", "no module, file or registered name 'mien'; nearest is 'mine'"),
    ("softmax=mien.py:softmax", "no file mien.py; nearest is 'mine.py'"),
    ("mien.py", "no file mien.py; nearest is 'mine.py'"),
    ("numpyy", "no module, file or registered name 'numpyy'; nearest is 'numpy'"),
    ("softmax=mine:sofmax", "mine has no attribute 'sofmax'; nearest is 'softmax'"),
    ("softmax=mine:Kernels.sofmax", "mine has no attribute 'sofmax'; nearest is 'softmax'"),
    ("softmax=mine:number", "mine:number is a int, wanted something that can be called"),
    ("softmax=mine", "target 'softmax=mine': wanted OPERATION=module:attribute or OPERATION=path/file.py:attribute"),
    ("many.py:othre", "many.py has no variant 'othre'; nearest is 'other'"),
    ("numpy:plian", "numpy has no variant 'plian'; nearest is 'plain'"),
    ("empty", "empty defines no function named like an operation (softmax, log_softmax, logsumexp, layer_norm"),
    ("broken", "importing broken failed: No module named 'not_there'"),
    ("softmax=broken.py:softmax", "importing broken.py failed: ModuleNotFoundError: No module named 'not_there'"),
    ("exits", "importing exits failed: SystemExit: 0"),
    ("exits.py", "importing exits.py failed: SystemExit: 0"),
]


@pytest.mark.parametrize(("target", "words"), WRONG)
def test_a_wrong_target_is_one_line_and_exit_code_2(
    target: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["check", target, "--in-process", "--effort", "smoke"])
    out, err = capsys.readouterr()
    assert left.value.code == 2 and out == ""
    assert err.startswith(f"veriformer: {words}") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--declare", "causal_alignmet=top_left"],
            "unknown capability 'causal_alignmet'; did you mean 'causal_alignment'",
        ),
        (
            ["--declare", "causal_alignment=diagonal"],
            "causal_alignment='diagonal' is not a choice; causal_alignment is one",
        ),
        (["--declare", "causal_alignment"], "--declare 'causal_alignment': wanted KEY=VALUE"),
        (["--framework", "jox"], "framework 'jox' is not known; known are numpy, torch"),
        (["--law", "softmax/sums-to-on"], "unknown law 'softmax/sums-to-on'; nearest is 'softmax/sums-to-one'"),
        (["--dtype", "float31"], "dtype 'float31' is not known; wanted main or some of float64, float32"),
        (["--require", "causl"], "--require 'causl': no operation has it; known are"),
        (["--effort", "hard"], "argument --effort: invalid choice: 'hard'"),
        (["--accepts", "axs"], "--accepts 'axs' has no known meaning; nearest is 'axis'"),
        (["--returns", "lse"], "--returns lse does not name 'out'"),
    ],
)
def test_a_wrong_option_is_one_line_and_exit_code_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["check", "softmax=mine:softmax", "--in-process", "--effort", "smoke", *words])
    err = capsys.readouterr().err
    assert left.value.code == 2 and message in err and err.count("\n") == 1


def test_an_expected_failure_of_no_law_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["check", "many:other", "--in-process", "--effort", "smoke"])
    assert left.value.code == 2
    assert capsys.readouterr().err.startswith("veriformer: Expected('a/b'): there is no such law; nearest is '")


def test_options_reach_the_plan_and_the_capabilities() -> None:
    about = only("softmax=mine:softmax", accepts=("axis",), returns=("lse", "out"), declare={"dtypes": "float32"})
    plan = about.description.plans["softmax"]
    assert plan.accepts == {"axis"} and plan.pick == (1,)
    assert about.description.capabilities["softmax"] == Capabilities(dtypes=("float32",), extreme_values=True)


def test_functions_in_memory_are_named_after_the_first() -> None:
    one = load_functions({"softmax": works}, Options(framework="numpy", accepts=("none",)))
    assert one.description.name == f"{__name__}:works" and one.description.framework == "numpy"
    with pytest.raises(UsageError, match="unknown operation 'sofmax'"):
        load_functions({"sofmax": works}, Options())


def test_a_framework_is_seen_from_the_functions_module() -> None:
    pytest.importorskip("torch")
    Path("uses_torch.py").write_text("import torch\ndef softmax(x): return torch.softmax(x, -1)\n")
    assert only("softmax=uses_torch:softmax").description.framework == "torch"
    assert only("softmax=mine:softmax").description.framework == "numpy"
    assert only("softmax=torch.nn.functional:softmax").description.framework == "torch"
    assert only("softmax=mine:softmax", framework="torch").description.framework == "torch"


def test_an_expected_failure_needs_a_reason() -> None:
    with pytest.raises(ValueError, match="needs a reason"):
        Expected("softmax/sums-to-one", " ")
