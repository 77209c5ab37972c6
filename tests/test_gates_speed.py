"""The gate on time catches planted slowdowns and leaves the rest alone: benchmarks/gates/speed.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from planting import NORMS, PATH, commit, git, planted
from toys import ROOT

from veriformer.benchmarks.gates.speed import gate

pytest.importorskip("torch")

CHECKING = """
from types import SimpleNamespace

def work():
    return sum(i * i for i in range(40_000))

def check(**_):
    work()
    return SimpleNamespace(rows=[SimpleNamespace(id="a", verdict="pass", judged=1000)])
"""
"""A stand-in for the package: what a process that alternates imports and judges with."""
PACKAGE = {"veriformer/__init__.py": "", "veriformer/checking.py": CHECKING}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a repository is made, and where the test runs."""
    (tmp_path / "repository").mkdir()
    monkeypatch.chdir(tmp_path / "repository")
    return tmp_path / "repository"


def change(folder: Path, before: str | None, after: str | None, path: str = PATH) -> None:
    """Two commits with these texts of one file."""
    commit(folder, {} if before is None else {path: before})
    commit(folder, {path: after})


def test_work_done_twice_is_slower(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(folder, NORMS, planted("twice"))
    assert gate(["HEAD~1"]) == 1
    printed = capsys.readouterr().out
    assert "layer-norm-forward numpy:norms" in printed and "SLOWER" in printed and "1 timed, 1 slower" in printed
    assert max(map(len, printed.splitlines())) <= 80


def test_a_script_says_the_same(folder: Path) -> None:
    change(folder, NORMS, planted("twice"))
    call = [sys.executable, str(ROOT / "benchmarks" / "gates" / "speed.py"), "HEAD~1", "HEAD"]
    done = subprocess.run(call, cwd=folder, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "") and "SLOWER" in done.stdout


@pytest.mark.parametrize("words", [["HEAD~1"], ["HEAD", "HEAD", "--all", "--bench", "norm"]])
def test_the_same_work_is_not_slower(words: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(folder, NORMS, planted("comment"))
    before = list(sys.path)
    assert gate(words) == 0 and "1 timed, 0 slower, 0 failed" in capsys.readouterr().out
    assert sys.path == before


@pytest.mark.parametrize(
    ("plant", "said"),
    [
        ("wrong", "layer-norm-forward numpy:norms: numpy:norms of head: result 0 is"),
        ("raises", "OSError: no such device"),
        ("broken", "impls/numpy_norms.py of head: importing impls/numpy_norms.py failed"),
        ("other operation", "base has it, head has not"),
    ],
)
def test_what_is_wrong_is_a_failure_and_not_timed(plant: str, said: str, folder, capsys) -> None:  # type: ignore[no-untyped-def]
    change(folder, NORMS, planted(plant))
    assert gate(["HEAD~1"]) == 1
    printed = capsys.readouterr().out.replace("\n", " ")
    assert "FAILED" in printed and said in printed and "interval" not in printed


@pytest.mark.parametrize(
    ("plant", "said"),
    [
        ("wrong", "of base: result 0 is"),
        ("raises", "no such device"),
        ("broken", "of base: importing impls/numpy_norms.py failed"),
    ],
)
def test_what_is_wrong_in_base_alone_is_mentioned(plant: str, said: str, folder, capsys) -> None:  # type: ignore[no-untyped-def]
    change(folder, planted(plant), NORMS)
    assert gate(["HEAD~1"]) == 0
    printed = capsys.readouterr().out
    assert said in printed and ": nothing to time against" in printed and "FAILED" not in printed
    assert "no implementation differs" not in printed and "nothing was timed" not in printed


def test_a_file_beside_implementations_is_mentioned(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(folder, "x = 1", "x = 2", path="impls/_shared.py")
    assert gate(["HEAD~1"]) == 0
    assert capsys.readouterr().out == "no workload times an operation of impls/_shared.py\n"


def test_nothing_differs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(folder, NORMS, "nothing of the package", path="README.md")
    assert gate(["HEAD~1"]) == 0 and capsys.readouterr().out == "no implementation differs; nothing to time\n"


@pytest.mark.parametrize(("before", "after", "side"), [(None, NORMS, "head"), (NORMS, None, "base")])
def test_a_file_of_one_side_is_mentioned(before, after, side, folder, capsys) -> None:  # type: ignore[no-untyped-def]
    change(folder, before, after)
    assert gate(["HEAD~1"]) == 0
    printed = capsys.readouterr().out
    assert f"is in {side} alone: nothing to time it against" in printed and "no implementation differs" not in printed


def test_a_file_that_no_workload_times_is_mentioned(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(folder, planted("other operation"), planted("other operation") + "\n# end\n")
    assert gate(["HEAD~1"]) == 0
    assert f"no workload times an operation of {PATH}" in capsys.readouterr().out


def test_nothing_timed_although_something_differs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(folder, NORMS, planted("comment"))
    assert gate(["HEAD~1", "--bench", "attention"]) == 1
    assert "nothing was timed, although something differs" in capsys.readouterr().out


def test_the_package_s_own_speed_is_taken_in_two_processes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commit(folder, PACKAGE)
    commit(folder, {"veriformer/checking.py": CHECKING.replace("    work()", "    work(), work()")})
    assert gate(["HEAD~1", "--bench", "judge"]) == 1
    printed = capsys.readouterr().out
    assert "judge-attention suite" in printed and "thousand-cases" in printed and "1 timed, 1 slower" in printed
    assert git(folder, "worktree", "list").count("\n") == 1


def test_more_laws_are_mentioned_and_no_failure(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commit(folder, PACKAGE)
    more = CHECKING.replace("    work()", "    work(), work()").replace("judged=1000", "judged=2000")
    commit(folder, {"veriformer/checking.py": more})
    assert gate(["HEAD~1", "--bench", "judge"]) == 0
    printed = capsys.readouterr().out
    assert "1 timed, 0 slower" in printed and printed.count("judge-attention suite") == 1
    assert "which never fails: it grows with every law" in printed and "FAILED" not in printed


def test_import_time_of_the_same_package_is_not_slower(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commit(folder, PACKAGE)
    commit(folder, {"veriformer/__init__.py": "# the same\n"})
    assert gate(["HEAD~1", "--bench", "import"]) == 0 and "1 timed, 0 slower" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("head", "said"),
    [
        ({"veriformer/checking.py": "import nowhere"}, "import suite: head: RuntimeError: ModuleNotFoundError"),
        ({"veriformer/__init__.py": None}, "suite: head: the package that is imported lies in"),
        (
            {"veriformer/checking.py": CHECKING.replace("pass", "fail")},
            "judge suite: head: RuntimeError: a correct function did not pass a",
        ),
    ],
)
def test_a_package_that_fails_is_a_failure(head, said, folder, capsys) -> None:  # type: ignore[no-untyped-def]
    commit(folder, PACKAGE)
    commit(folder, head)
    assert gate(["HEAD~1", "--bench", "judge" if said.startswith("judge") else "import"]) == 1
    assert said in capsys.readouterr().out.replace("\n", " ")
