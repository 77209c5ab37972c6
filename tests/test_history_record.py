"""`veriformer history --record`: when it refuses, what it asks of asv, how it counts what asv did; asv is a fake."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import histories
import pytest
from histories import BYTES, COST, RATIO, benchmarks, git, put, refused, repository, result

from veriformer.benchmarks import bench_accuracy, bench_costs
from veriformer.history import publishing, recording
from veriformer.history.checkout import open_checkout
from veriformer.history.recording import FACTS, QUICK, QUICK_CELLS

Calls = list[tuple[str, ...]]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of three commits, a home with asv's machine file in it, and asv as far as it is looked for."""
    place = tmp_path / "clone"
    repository(place, ("one", "two", "three"))
    benchmarks(place)
    put(tmp_path / ".asv-machine.json", {"version": 1, "any": FACTS})
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(place)
    monkeypatch.setattr(recording, "find_spec", lambda name: name)
    return place


def asv(monkeypatch: pytest.MonkeyPatch, act: Callable[[], Any] = lambda: None, code: int = 0) -> Calls:
    """Put a fake in asv's place; what it is called with."""
    calls: Calls = []

    def called(checkout: object, *words: str) -> int:
        calls.append(words)
        act()
        return code

    for module in (recording, publishing):
        monkeypatch.setattr(module, "run_asv", called)
    return calls


def measuring(root: Path, **values: list[float | None] | None) -> Callable[[], Any]:
    """An act of asv: results of the last commit, as of now."""
    names = {"cost": COST, "bytes": BYTES, "ratio": RATIO}
    found = {names[name]: value for name, value in values.items()}
    return lambda: result(root, git(root, "rev-parse", "HEAD"), found, started=1000 * time.time() + 1)


run = partial(histories.run, "--no-open")


def test_the_last_commit_is_measured_counted_and_reported(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = asv(monkeypatch, measuring(root, cost=[1.0, math.nan], bytes=[5.0, None], ratio=None), code=1)
    assert run("--record") == 0
    assert calls == [("run", "--machine", "any", "--bench", r"\.track_", "--", "HEAD^!")]
    said = capsys.readouterr().out
    assert re.search(rf"{git(root, 'rev-parse', 'HEAD')[:8]} +2 +1 +3\n", said) and "2 cells measured" in said
    assert f"failed: {BYTES} torch:functional" in said and (root / "reports/performance.md").is_file()


def test_results_of_earlier_runs_are_not_counted(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result(root, git(root, "rev-parse", "HEAD"), {COST: [1.0, 2.0]}, started=1000 * time.time() - 5000)
    asv(monkeypatch)
    assert run("--record") == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and "asv measured nothing, 0 cells failed" in lines[0] and "asv run 'HEAD^!'" in lines[0]
    assert not (root / "reports/performance.md").exists()


def test_cells_that_failed_are_not_measured_whatever_asv_says(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asv(monkeypatch, measuring(root, cost=None, bytes=[math.nan, math.nan]))
    assert run("--record") == 1 and "measured nothing, 2 cells failed" in capsys.readouterr().err


def test_a_commit_that_got_nothing_is_shown_beside_one_that_did(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asv(monkeypatch, measuring(root, cost=[1.0, 2.0]))
    assert run("--record", "HEAD~2..HEAD") == 0
    assert re.search(rf"{git(root, 'rev-parse', 'HEAD~1')[:8]} +0 +0 +0\n", capsys.readouterr().out)


def test_many_failures_are_counted_and_a_few_named(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recording, "FEW", 1)
    asv(monkeypatch, measuring(root, cost=[1.0, None], bytes=None))
    assert run("--record") == 0
    said = capsys.readouterr().out
    assert said.count("failed: bench_costs") == 1 and "failed: 2 more" in said


def test_a_quick_run_is_a_part_and_names_what_there_is(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = asv(monkeypatch, measuring(root, cost=[1.0, 2.0]))
    assert run("--record", "main", "--quick") == 0
    assert calls[0][4:] == (QUICK_CELLS, "--", "main")
    assert all(hasattr(bench_costs, name) or hasattr(bench_accuracy, name) for name in QUICK)
    assert re.search(QUICK_CELLS, COST) and not re.search(QUICK_CELLS, COST.replace("Forward", "Backward"))
    assert not re.search(QUICK_CELLS, "bench_costs.TimeSoftmaxForward.time_call")


def test_files_of_commits(root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    calls = asv(monkeypatch, measuring(root, cost=[1.0, 2.0]))
    (root / "hashes").write_text(git(root, "rev-parse", "HEAD") + "\nHEAD~1\n")
    assert run("--record", "HASHFILE:hashes") == 0 and calls[0][-1] == f"HASHFILE:{root}/hashes"
    (root / "hashes").write_text("abcdef\n")
    assert "no commit 'abcdef'; wanted one commit a line" in refused(capsys, "--record", "HASHFILE:hashes")
    (root / "hashes").write_text("\n")
    assert "it is empty" in refused(capsys, "--record", "HASHFILE:hashes")
    assert "No such file" in refused(capsys, "--record", "HASHFILE:none")


@pytest.mark.parametrize("wanted", ["ALL", "NEW", "EXISTING", "TAGS", "HEAD", "main~2..main", "--merges --all main"])
def test_what_asv_takes_is_passed_on(root: Path, monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    calls = asv(monkeypatch, measuring(root, cost=[1.0, 2.0]))
    if "--merges" in wanted:
        git(root, "checkout", "-q", "-b", "side", "HEAD~1")
        git(root, "merge", "-q", "--no-ff", "-m", "merge", "main")
    assert run(f"--record={wanted}") == 0 and calls[0][-1] == wanted


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ("mian~3..mian", "git knows no such commits; wanted e.g. HEAD^!"), ("HEAD..HEAD", "no commit lies in it"),
        ("--merges main", "no commit lies in it"), ("'", "No closing quotation"), ("", "git knows no such commits"),
        ("--nonsense", "git knows no such commits"),
    ],
)  # fmt: skip
def test_ranges_that_mean_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], wanted: str, said: str
) -> None:
    calls = asv(monkeypatch)
    assert said in refused(capsys, f"--record={wanted}") and calls == []


def test_changes_that_are_not_committed(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asv(monkeypatch, measuring(root, cost=[1.0, 2.0]))
    (root / "untracked").write_text("x")
    git(root, "add", "reports")
    git(root, "commit", "-q", "-m", "results")
    assert run("--record") == 0, "untracked files, and what the command itself writes, are no changes"
    (root / "file").write_text("changed")
    assert "asv measures commits, and file is changed: commit or stash first" in refused(capsys, "--record")
    put(root / "asv.conf.json", {"results_dir": "reports/asv"})
    assert "asv.conf.json and 1 more is changed" in refused(capsys, "--record")


def test_without_asv(root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(recording, "find_spec", lambda name: None)
    for option in ("--record", "--asv"):
        assert refused(capsys, option).endswith("asv is not installed: pip install veriformer[bench]")


@pytest.mark.parametrize("text", ["{", "[]", '{"version": 0}', '{"any": {}}'])
def test_a_machine_file_that_is_broken_or_of_another_format(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    path = root.parent / ".asv-machine.json"
    path.write_text(text)
    calls = asv(monkeypatch)
    said = refused(capsys, "--record")
    assert str(path) in said and "mend it, or move it away" in said and calls == [] and path.read_text() == text


@pytest.mark.parametrize("before", [None, {}, {"host": {"machine": "host"}}, {"any": {**FACTS, "cpu": "a fact"}}])
def test_a_missing_entry_of_the_machine_is_written_and_others_are_kept(
    root: Path, monkeypatch: pytest.MonkeyPatch, before: dict[str, Any] | None
) -> None:
    pytest.importorskip("asv", reason="asv writes its own machine file")
    path = root.parent / ".asv-machine.json"
    path.unlink()
    if before is not None:
        put(path, {"version": 1, **before})
    asv(monkeypatch, measuring(root, cost=[1.0, 2.0]))
    assert run("--record") == 0
    assert json.loads(path.read_text()) == {**(before or {}), "version": 1, "any": FACTS}


def test_a_machine_file_that_asv_does_not_write(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (root.parent / ".asv-machine.json").unlink()
    monkeypatch.setattr(sys, "executable", "false")
    assert "asv did not write the machine 'any'" in refused(capsys, "--record")


def test_asv_runs_in_the_root_on_one_thread(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def called(words: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        seen.update(options, words=words)
        return subprocess.CompletedProcess(words, 3)

    checkout = open_checkout(root)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(recording.subprocess, "run", called)
    assert recording.run_asv(checkout, "check") == 3
    assert seen["words"] == [sys.executable, "-m", "asv", "check"] and seen["cwd"] == root
    assert seen["env"]["OMP_NUM_THREADS"] == "1"
