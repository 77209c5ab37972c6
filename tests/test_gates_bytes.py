"""The gate on bytes and accuracy catches planted copies and losses: rises.py and bytes_and_accuracy.py."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from planting import NORMS, commit, git, planted

from veriformer.benchmarks import bench_accuracy, bench_costs, judging, measure
from veriformer.benchmarks.gates import bytes_and_accuracy
from veriformer.benchmarks.gates.bytes_and_accuracy import cells_of, gate, selection
from veriformer.benchmarks.gates.rises import METRICS, Cells, compare
from veriformer.benchmarks.implementations import Prepared
from veriformer.benchmarks.workloads import BY_ID
from veriformer.targets import Options, load

BYTES = ("bench_costs.SoftmaxForward.track_bytes", ("numpy:plain",))
RATIO = ("bench_accuracy.Softmax.track_worst_ratio", ("numpy:plain", "float32"))
BITS = ("bench_accuracy.Softmax.track_lost_bits", ("numpy:plain", "float32"))


def costs(folder: Path, text: str) -> dict[Any, float | None]:
    """The three costs of a layer norm, measured as asv's suites do."""
    folder.mkdir(exist_ok=True)
    (folder / "numpy_norms.py").write_text(text)
    prepared = Prepared(load(str(folder / "numpy_norms.py"), Options())[0], BY_ID["layer-norm-forward"])
    found = bench_accuracy.worst_of(prepared)
    try:
        count: float | None = measure.bytes_of(prepared)
    except judging.Wrong:
        count = None
    return {BYTES: count, RATIO: float(f"{found.ratio:.4g}"), BITS: round(found.lost_bits, 3)}


@pytest.mark.parametrize(
    ("plant", "rose"),
    [
        ("comment", set()),
        ("twice", {BYTES}),
        ("copy", {BYTES}),
        ("loss", {RATIO, BITS}),
        ("bfloat16", {BYTES, RATIO, BITS}),
    ],
)
def test_what_is_planted_rises_and_nothing_else(plant: str, rose: set[Any], tmp_path: Path) -> None:
    found = compare(costs(tmp_path / "base", NORMS), costs(tmp_path / "head", planted(plant)))
    assert {rise.cell for rise in found.rises} == rose and found.compared == 3 and found.failed == bool(rose)
    if plant == "copy":
        assert found.rises[0].head - found.rises[0].base == 256 * 512 * 4  # type: ignore[operator]
    if plant == "bfloat16":
        assert [rise.lost for rise in found.rises] == [False, False, True]  # no bytes are counted of what is wrong


def test_less_is_no_rise() -> None:
    found = compare({BYTES: 8, RATIO: 0.5, BITS: 1.0}, {BYTES: 4, RATIO: 0.4, BITS: -2.0})
    assert not found.failed and found.compared == 3


@pytest.mark.parametrize(
    ("cell", "base", "head"), [(BYTES, 1e9, 1e9 + 513), (RATIO, 0.0123, 0.01232), (BITS, 1, 1.002)]
)
def test_a_little_more_is_a_rise(cell: Any, base: float, head: float) -> None:
    assert compare({cell: base}, {cell: head}).failed


@pytest.mark.parametrize(
    ("cell", "base", "head"),
    [(RATIO, 0.01230, 0.01231), (RATIO, 0.0, 0.0), (BITS, -1.0, -0.999), (BITS, 0.1, 0.101), (BYTES, 8, 20)],
)
def test_one_unit_of_the_last_digit_or_a_scalar_is_none(cell: Any, base: float, head: float) -> None:
    assert not compare({cell: base}, {cell: head}).failed


@pytest.mark.parametrize(
    ("base", "head", "failed"),
    [
        (1.0, None, True),
        (1.0, math.nan, True),
        (math.nan, None, True),
        (None, 1.0, False),
        (math.nan, 1.0, False),
        (None, None, False),
        (math.nan, math.nan, False),
    ],
)
def test_cells_that_lack(base: float | None, head: float | None, failed: bool) -> None:
    found = compare({BYTES: 1, RATIO: base}, {BYTES: 1, RATIO: head})
    assert found.failed == failed and len(found.rises) == failed
    assert found.new == ((RATIO,) if head == 1 else ()) and found.broken == ((RATIO,) if base is head is None else ())


def test_cells_of_one_side_alone() -> None:
    assert compare({BYTES: 1, BITS: 1}, {BYTES: 1}).rises[0].cell == BITS
    assert compare({BYTES: 1}, {BYTES: 1, BITS: 1}).new == (BITS,)


@pytest.mark.parametrize(
    ("base", "head"),
    [({}, {}), ({BYTES: 1}, {}), ({}, {BYTES: 1}), ({BYTES: None}, {BYTES: 1}), ({BYTES: 1}, {BYTES: None})],
)
def test_nothing_measured_is_a_failure(base: Cells, head: Cells) -> None:
    found = compare(base, head)
    assert found.failed and not found.compared


def names(suite: Any) -> list[str]:
    """All benchmarks of one of asv's suites, as asv names them."""
    module = suite.__name__.rpartition(".")[2]
    classes = [one for one in vars(suite).values() if isinstance(one, type) and one.__module__ == suite.__name__]
    return [f"{module}.{one.__name__}.{name}" for one in classes for name in dir(one) if re.match("track|time", name)]


def test_asv_is_asked_for_the_costs_that_are_compared() -> None:
    every = [*names(bench_costs), *names(bench_accuracy)]
    chosen = [name for name in every if re.search(selection(""), name)]
    assert {name.rpartition(".")[2] for name in chosen} == set(METRICS) < {name.rpartition(".")[2] for name in every}
    narrow = [name for name in every if re.search(selection("SoftmaxForward|LayerNorm$"), name + "('numpy:rows')")]
    assert narrow == ["bench_costs.SoftmaxForward.track_bytes"]
    assert re.search(selection("numpy:rows"), "bench_costs.LayerNormForward.track_bytes('numpy:rows')")


def write(results: Path, commit: str, cells: Cells) -> None:
    """A result file as asv writes it."""
    columns = ["result", "params", "version", "started_at"]
    rows = {name: [[value], [[repr(word)] for word in words], "1", 1] for (name, words), value in cells.items()}
    data = {"commit_hash": commit, "python": "3.11", "requirements": {}, "result_columns": columns, "results": rows}
    results.mkdir(parents=True, exist_ok=True)
    (results / f"{commit[:8]}-env.json").write_text(json.dumps({**data, "version": 2}))


def test_cells_are_read_as_asv_writes_them(tmp_path: Path) -> None:
    cells: Cells = {BYTES: 8, RATIO: math.nan, BITS: None}
    write(tmp_path, "a" * 40, cells)
    write(tmp_path, "b" * 40, {BYTES: 9})
    found = cells_of(tmp_path, "a" * 40)
    assert found.keys() == cells.keys() and found[BYTES] == 8 and found[BITS] is None
    assert cells_of(tmp_path, "b" * 40) == {BYTES: 9} and cells_of(tmp_path / "none", "a" * 40) == {}


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Call the gate in a repository of two commits, with these results in place of what asv measures."""
    pytest.importorskip("asv")
    commit(tmp_path / "repository", {"a": "1"})
    commit(tmp_path / "repository", {"a": "2"})
    monkeypatch.chdir(tmp_path / "repository")

    def call(base: Cells, head: Cells) -> int:
        for name, cells in (("HEAD~1", base), ("HEAD", head)):
            if cells:
                write(tmp_path / "results", git(tmp_path / "repository", "rev-parse", name).strip(), cells)
        monkeypatch.setattr(bytes_and_accuracy, "measure", lambda *_: tmp_path / "results")
        return gate(["HEAD~1"])

    return call


def test_the_gate_says_what_rose(measured: Any, capsys: pytest.CaptureFixture[str]) -> None:
    long = ("bench_accuracy.UniversalTransformerBackward.track_worst_ratio", ("torch:universal_compacted", "bfloat16"))
    base, head = {BYTES: 8, BITS: 1.204, RATIO: 1, long: 0.5}, {BYTES: 900, BITS: 1.206, RATIO: None, long: 0.6}
    assert measured(base, head) == 1
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    assert (
        re.search(r"1\.204 +1\.206\n", printed)
        and "failed" in printed
        and "4 cells compared: 3 rose, 1 lacking" in printed
    )


def test_the_gate_lets_the_rest_pass(measured: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert measured({BYTES: 8, RATIO: None}, {BYTES: 8, RATIO: None, BITS: 1}) == 0
    assert capsys.readouterr().out.splitlines() == [
        "new in head: Softmax.track_lost_bits numpy:plain, float32",
        "failed in both: Softmax.track_worst_ratio numpy:plain, float32",
        "1 cells compared: 0 rose, 0 lacking in head, 1 failed in both",
    ]


def test_the_gate_fails_where_more_fails_in_both_than_is_compared(measured: Any, capsys: Any) -> None:
    cells: Cells = {BYTES: 8, RATIO: None, BITS: None}
    assert measured(cells, cells) == 1
    assert capsys.readouterr().out.splitlines()[1:] == [
        "1 cells compared: 0 rose, 0 lacking in head, 2 failed in both",
        "more cells failed in both than were compared: see what asv said above",
    ]


def test_the_gate_says_how_many_fail_in_both_where_nothing_was_measured(measured: Any, capsys: Any) -> None:
    assert measured({BYTES: None}, {BYTES: None}) == 1
    assert "1 cells failed in both" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("base", "head"), [({}, {}), ({BYTES: 1}, {}), ({BYTES: 1}, {BYTES: math.nan})])
def test_the_gate_fails_where_nothing_was_measured(base: Cells, head: Cells, measured: Any, capsys: Any) -> None:
    assert measured(base, head) == 1 and "nothing was measured" in capsys.readouterr().out
