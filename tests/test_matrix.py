"""`veriformer matrix` and `veriformer report`: isolation, resuming, states of cells, differences, merging."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from toys import ROOT, run_python

from veriformer import cli
from veriformer.calling import UsageError
from veriformer.libraries import LIBRARIES, Library
from veriformer.matrix import command, process, units
from veriformer.matrix.cells import cell_of, differences, state_of
from veriformer.matrix.merged import together
from veriformer.matrix.page import markdown

SOFTMAX = """
import numpy as np
from veriformer.declarations import Capabilities, Expected
DISTRIBUTIONS = ("numpy", "no-such-distribution")

def softmax(x, *, axis=-1):
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)

def log_softmax(x, *, axis=-1):
    return np.log(softmax(x, axis=axis))

VARIANTS = {"plain": {"softmax": softmax}, "wrong": {"softmax": lambda x, *, axis=-1: np.exp(x)}}
"""
ABORTS = "import os\nFRAMEWORK = 'numpy'\ndef softmax(x, *, axis=-1):\n    os.abort()\n"
LAWS = "softmax/sums-to-one,softmax/equals-the-reference"
DIES = "import os\nos.abort()\n"
LEAVES = "raise SystemExit(7)\n"


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the matrix know one toy library with adapters of these texts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def make(*texts: str, name: str = "toys_of_matrix") -> list[str]:
        names = [f"{name}_{number}" for number in range(len(texts))]
        for module, text in zip(names, texts, strict=True):
            (tmp_path / f"{module}.py").write_text(text)
        known = (Library(name, "Toys", ("numpy",), "toys"), Library("absent", "Absent", ("no_such_package",), "no"))
        monkeypatch.setattr(units, "LIBRARIES", known)
        monkeypatch.setattr(units, "library_named", lambda word: next((one for one in known if one.name == word), None))
        monkeypatch.setattr(units, "modules_of", lambda _: tuple(names))
        return names

    return make


def matrix(*words: str) -> tuple[int, dict[str, Any]]:
    """The exit code of a quick matrix and what it wrote."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["matrix", "--effort", "look", "--dtype", "float32", "--law", LAWS, *words])
    path = Path(".veriformer/matrix/matrix.json")
    return int(ended.value.code or 0), json.loads(path.read_text()) if path.is_file() else {}


def states(found: dict[str, Any]) -> dict[str, str]:
    return {f"{cell['variant']} {cell['operation']}": cell["state"] for cell in found["cells"]}


def test_right_and_wrong_variants_stand_side_by_side(library: Any, capsys: pytest.CaptureFixture[str]) -> None:
    library(SOFTMAX)
    code, found = matrix()
    assert code == 1 and states(found) == {"plain softmax": "holds", "wrong softmax": "fails"}
    shown = capsys.readouterr().out
    assert "absent: not installed (pip install veriformer[no])" in shown and "FAILS toys_of_matrix:wrong" in shown
    assert found["libraries"][1]["status"] == "not installed" and "numpy" in found["libraries"][0]["versions"]
    assert found["cells"][0]["laws"] == 2 and found["cells"][0]["judged"] > 100
    page = Path(".veriformer/matrix/matrix.md").read_text()
    assert "not installed: `pip install veriformer[no]`" in page and "| wrong | softmax | f32 | FAILS |" in page


def test_crashes_do_not_stop_the_others(library: Any) -> None:
    library(DIES, LEAVES, ABORTS, SOFTMAX)
    code, found = matrix()
    assert code == 1 and states(found)["plain softmax"] == "holds"
    assert states(found)["2 softmax"] == "fails", "a crash in a call is a failure of that cell"
    trouble = found["libraries"][0]["trouble"]
    assert len(trouble) == 2 and "SIGABRT" in trouble[0] and "SystemExit" in trouble[1]


def test_what_did_not_change_is_kept(
    library: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = library(SOFTMAX)
    matrix("toys_of_matrix:plain")
    capsys.readouterr()
    code, _ = matrix("toys_of_matrix:plain")
    assert code == 0 and "kept" in capsys.readouterr().out
    adapter = tmp_path / f"{names[0]}.py"
    adapter.write_text(adapter.read_text() + "\n# changed\n")
    matrix("toys_of_matrix:plain")
    assert "kept" not in capsys.readouterr().out, "another text is judged anew"
    matrix("toys_of_matrix:plain", "--seed", "1")
    assert "kept" not in capsys.readouterr().out, "so is another seed"
    matrix("toys_of_matrix:plain", "--seed", "1", "--effort", "smoke")
    capsys.readouterr()
    matrix("toys_of_matrix:plain", "--seed", "1")
    assert "kept" in capsys.readouterr().out, "a run of another effort takes nothing away"
    monkeypatch.setattr(process, "suite", lambda: "another")
    matrix("toys_of_matrix:plain", "--seed", "1")
    assert "kept" not in capsys.readouterr().out, "other laws judge anew"
    matrix("toys_of_matrix:plain", "--seed", "1", "--fresh")
    assert "kept" not in capsys.readouterr().out


def test_a_killed_run_leaves_no_result_that_is_believed(library: Any, tmp_path: Path) -> None:
    library(SOFTMAX)
    matrix("toys_of_matrix:plain")
    kept = next((tmp_path / ".veriformer" / "matrix").glob("*plain*.json"))
    report = json.loads(kept.read_text())
    kept.write_text(json.dumps({**report, "complete": False, "rows": []}))
    _, found = matrix("toys_of_matrix:plain")
    assert states(found) == {"plain softmax": "holds"}
    kept.write_text(kept.read_text()[:1000])
    _, found = matrix("toys_of_matrix:plain")
    assert states(found) == {"plain softmax": "holds"}


def test_an_interrupt_ends_what_is_running_and_the_next_run_goes_on(library: Any, tmp_path: Path) -> None:
    library(SOFTMAX, "import time, pathlib\npathlib.Path('began').touch()\ntime.sleep(100)\n" + SOFTMAX)
    stop = threading.Event()
    unit = units.Unit("toys_of_matrix", "toys_of_matrix_1", "plain", ("softmax",))
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(process.judge, unit, process.Way("look"), tmp_path, stop)
        while not (tmp_path / "began").exists():
            time.sleep(0.05)
        start = time.monotonic()
        stop.set()
        assert future.result().trouble == "interrupted" and time.monotonic() - start < 5


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["toys"], "unknown library 'toys'; nearest is 'toys_of_matrix'"),
        (["toys_of_matrix:plane"], "toys_of_matrix has no variant 'plane'; nearest is 'toys_of_matrix:plain'"),
        (["absent"], "nothing to judge: none of the chosen libraries is installed"),
        (["--jobs", "0"], "--jobs 0: wanted a whole number from 1"),
        (["--dtype", "float31"], "dtype 'float31' is not known"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    words: list[str], said: str, library: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    library(SOFTMAX)
    code, _ = matrix(*words)
    errors = capsys.readouterr().err
    assert code == 2 and said in errors and errors.count("\n") == 1


def test_composites_are_judged_apart_and_without_a_search() -> None:
    both = units.Unit("toys", "m", "v", ("softmax", "encoder", "decoder_lm"))
    rest, heavy = units.halves(both)
    assert (rest.operations, rest.most) == (("softmax", "decoder_lm"), "deep")
    assert (heavy.operations, heavy.most) == (("encoder",), "smoke")
    way = process.Way("ci")
    assert (way.effort_for(rest), way.effort_for(heavy), process.Way("look").effort_for(heavy)) == (
        "ci",
        "smoke",
        "look",
    )
    for only in (("softmax",), ("encoder",)):
        (one,) = units.halves(units.Unit("toys", "m", "v", only))
        assert one.part == "" and one.most == ("deep" if only == ("softmax",) else "smoke")


def test_a_search_is_made_once_for_what_is_declared_alike_and_a_look_taken_where_shapes_are_compiled(
    library: Any,
) -> None:
    declared = (
        'VARIANTS["scaled"] = {"softmax": lambda x, *, axis=-1, temperature=1.0: softmax(x / temperature, axis=axis)}\n'
        'VARIANTS["slow"] = {"log_softmax": log_softmax}\n'
        'CAPABILITIES = {"slow": {"log_softmax": Capabilities(compiles_per_shape=True)}}\n'
    )
    library(SOFTMAX + declared)
    found, trouble = units.units_of(units.library_named("toys_of_matrix"))
    assert not trouble
    assert {one.variant: one.most for one in found} == {
        "plain": "deep", "wrong": "smoke", "scaled": "deep", "slow": "look",
    }  # fmt: skip


def test_what_costs_most_begins_first() -> None:
    small, large = (units.Unit("toys", "m", name, tuple(name)) for name in ("a", "abcdef"))
    compiled, known = replace(small, most="look"), replace(large, most="smoke")
    way = process.Way("ci")
    assert sorted([known, small, compiled, large], key=way.size_of, reverse=True) == [compiled, large, small, known]


def test_an_adapter_made_of_others_changes_with_them() -> None:
    texts = process._texts("veriformer.impls.keras_torch")
    assert len(texts) > 1 and any("LayerNormalization" in text for text in texts[1:])


def row(verdict: str, judged: int = 5, **more: Any) -> dict[str, Any]:
    """A row of a report as far as cells look at it."""
    return {
        "law": "softmax/sums-to-one", "operation": "softmax", "dtype": "float32", "verdict": verdict, "judged": judged,
        "cases": 1, "refused": 0, "masked": 0, "ratio": 0.5, "effective_bits": None, "seconds": 0.1, "tentative": False,
        "reason": "", "search": "done",
    } | more  # fmt: skip


def test_no_cell_holds_by_absence() -> None:
    assert state_of([row("pass"), row("not_provided", 0)]) == "holds"
    assert state_of([row("not_provided", 0)]) == "nothing"
    assert state_of([row("pass", 0)]) == "nothing"
    assert state_of([row("pass"), row("not_run", 0)]) == "open"
    assert state_of([row("pass"), row("xfail", 0)]) == "known"
    assert state_of([row("pass"), row("xpass"), row("xfail")]) == "fails"
    assert state_of([]) == "nothing"


def cell(variant: str, verdict: str = "pass", library: str = "toys", **capabilities: Any) -> dict[str, Any]:
    facts = {"capabilities": capabilities, "accepts": ["mask", "causal"]}
    return cell_of([row(verdict)], library, variant, "attention", facts) | {"effort": "ci"}


def test_differences_are_of_conforming_cells_that_have_what_they_are_about() -> None:
    cells = [cell("one", causal_alignment="top_left"), cell("two", dtypes=["float32"], infinite_bias=True)]
    found = differences([*cells, cell("broken", "fail", empty_row="nan")])
    assert [one["choice"] for one in found] == ["causal_alignment"], "no dtypes, no bias without bias, no broken cell"
    assert found[0]["values"] == {"top_left": ["toys:one"], "bottom_right": ["toys:two"]}


def one_matrix(*cells: dict[str, Any], status: str = "judged", level: str = "core/9") -> dict[str, Any]:
    names = list(dict.fromkeys(one["library"] for one in cells)) or ["toys"]
    facts = {"status": status, "install": "pip install x", "apart": "", "versions": {"x": "1"}, "trouble": []}
    about = {"veriformer": "0", "python": "3", "numpy": "2", "platform": "P"}
    run = {"created": "2000-01-01T00:00:00", "effort": "ci", "seed": 0, "seconds": 60.0, "environment": about}
    libraries = [{"name": name, "title": name.title(), **facts} for name in names]
    return {"schema": "veriformer/matrix/1", "level": level, "runs": [run], "libraries": libraries, "cells": [*cells]}


def test_environments_are_merged() -> None:
    apart = one_matrix(cell("only", library="shy"))
    here = one_matrix(cell("one"), cell("two"))
    here["libraries"].append({**apart["libraries"][0], "status": "not installed", "versions": {}})
    for order in ([here, apart], [apart, here]):
        merged = together(order)
        assert {one["name"]: one["status"] for one in merged["libraries"]} == {"toys": "judged", "shy": "judged"}
        assert len(merged["cells"]) == 3 and len(merged["runs"]) == 2
        assert "| only | attention |" in markdown(merged)
    again = together([here, one_matrix(cell("two", "fail"))])
    assert {one["variant"]: one["state"] for one in again["cells"]} == {"one": "holds", "two": "fails"}
    with pytest.raises(UsageError, match="levels core/8 and core/9"):
        together([here, one_matrix(level="core/8")])


def test_a_merge_loses_no_trouble_and_mixes_no_versions_and_no_parts() -> None:
    hung = one_matrix(cell("one"))
    hung["libraries"][0]["trouble"] = ["toys:two: no end within 900 s"]
    for pair in ([hung, one_matrix(cell("one"))], [one_matrix(cell("one")), hung]):
        assert together(pair)["libraries"][0]["trouble"] == ["toys:two: no end within 900 s"]
    assert together([hung, one_matrix(cell("two"))])["libraries"][0]["trouble"] == []
    newer = one_matrix(cell("two"))
    newer["libraries"][0]["versions"] = {"toys": "2"}
    assert [one["variant"] for one in together([hung, newer])["cells"]] == ["two"]
    part = one_matrix(cell("one"))
    part["runs"] = [{"laws": ["softmax/sums-to-one"], "dtypes": []}]
    with pytest.raises(UsageError, match="of different laws or dtypes"):
        together([{**hung, "runs": [{"laws": [], "dtypes": []}]}, part])


def test_a_law_leaves_units_out_that_it_does_not_concern(library: Any) -> None:
    library(SOFTMAX + 'VARIANTS["logs"] = {"log_softmax": log_softmax}\n')
    code, found = matrix()
    assert code == 1 and set(states(found)) == {"plain softmax", "wrong softmax"}
    assert found["libraries"][0]["trouble"] == []


def test_a_variant_asked_for_by_name_is_searched(library: Any) -> None:
    library(SOFTMAX)
    one = units.library_named("toys_of_matrix")
    named, _ = command.found_units([(one, "wrong")], process.Way("ci"), 1)
    every, _ = command.found_units([(one, "")], process.Way("ci"), 1)
    assert [unit.most for unit in named] == ["deep"] and [unit.most for unit in every] == ["deep", "smoke"]


def test_report_takes_matrices_and_checks(library: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = library(SOFTMAX)
    matrix("toys_of_matrix:plain")
    with pytest.raises(SystemExit):
        some = ("--effort", "look", "--dtype", "float32", "--law", LAWS)
        cli.main(["check", f"{names[0]}.py:wrong", *some, "--json", "mine.json"])
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        cli.main(["report", ".veriformer/matrix/matrix.json", "mine.json", "--output", "out"])
    found = json.loads((tmp_path / "out" / "matrix.json").read_text())
    assert ended.value.code == 1 and {one["state"] for one in found["cells"]} == {"holds", "fails"}
    for text, said in (
        ("[1]", "is no matrix.json"),
        ('{"schema": "x"}', "is no matrix.json"),
        ('{"schema": "veriformer/matrix/1"}', "or is damaged"),
        ("", "is no matrix.json"),
    ):
        Path("odd.json").write_text(text)
        with pytest.raises(SystemExit) as ended:
            cli.main(["report", "odd.json"])
        assert ended.value.code == 2 and said in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        cli.main(["report", "none.json"])
    assert ended.value.code == 2 and "none.json cannot be read" in capsys.readouterr().err


def test_every_library_is_registered_with_an_extra_of_its_own() -> None:
    for library in LIBRARIES:
        modules = units.modules_of(library)
        assert modules and all((ROOT / "impls" / f"{name.rpartition('.')[2]}.py").is_file() for name in modules)
    done = run_python("-m", "veriformer", "matrix", "--help", folder=ROOT)
    assert done.returncode == 0 and "--jobs" in done.stdout
