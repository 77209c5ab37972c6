"""The command line: what it prints, what it leaves behind, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from toys import SOFTMAX, run_python

from veriformer import cli
from veriformer.catalogue import all_laws
from veriformer.report import record

WRONG = SOFTMAX.replace("return e /", "return 2 * e /")
LAW = "softmax/equals-the-reference"
QUICK = ("--in-process", "--effort", "smoke", "--dtype", "float32")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, everything_counts: None) -> Path:
    """A working directory with a right and a wrong softmax."""
    (tmp_path / "right.py").write_text(SOFTMAX)
    (tmp_path / "wrong.py").write_text(WRONG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def run(*words: str) -> int:
    """A command in this process; its exit code."""
    with pytest.raises(SystemExit) as left:
        cli.main(words)
    return int(left.value.code or 0)


def check(target: str, *words: str, laws: Sequence[str] = (LAW,)) -> int:
    return run("check", target, *QUICK, *(word for law in laws for word in ("--law", law)), *words)


def command(*words: str, folder: Path, **more: Any) -> subprocess.CompletedProcess[str]:
    return run_python("-m", "veriformer", *words, folder=folder, **more)


def test_exit_codes_0_1_and_4(capsys: pytest.CaptureFixture[str]) -> None:
    assert check("softmax=right.py:softmax") == 0
    assert "every law that applies holds (exit code 0)" in capsys.readouterr().out
    assert check("softmax=wrong.py:softmax") == 1
    assert "something is wrong (exit code 1)" in capsys.readouterr().out
    assert check("softmax=right.py:softmax", "--require", "temperature") == 4
    out = capsys.readouterr().out
    assert "right.py:softmax: softmax does not take temperature, which is required" in out and "(exit code 4)" in out


def test_a_fault_of_the_suite_is_exit_code_3(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("veriformer.oracle.bounds", lambda *rest: 1 / 0)
    assert check("softmax=right.py:softmax") == 3
    out = capsys.readouterr().out
    assert "the suite itself is at fault; please report it (exit code 3)" in out and "ZeroDivisionError" in out


def test_the_report_is_written_in_one_file_for_each_implementation_and_in_one_for_all(folder: Path) -> None:
    (folder / "two.py").write_text(
        f"{SOFTMAX}\nVARIANTS = {{'a': {{'softmax': softmax}}, 'b': {{'softmax': softmax}}}}"
    )
    assert check("two.py", "--json", "all.json", "--output", "out") == 0
    whole = json.loads(Path("all.json").read_text())
    assert whole["schema"] == "veriformer/report/1" and whole["complete"] is True and whole["exit_code"] == 0
    assert [row["implementation"] for row in whole["rows"]] == ["two.py:a", "two.py:b"]
    (one,) = json.loads(Path("out/two.py-a.json").read_text())["implementations"]
    assert one["name"] == "two.py:a" and one["operations"]["softmax"]["mapping"] == "axis"
    assert not [name for name in os.listdir("out") if name.startswith(".")]


def test_a_failure_is_in_the_report_with_its_script_and_replay(capsys: pytest.CaptureFixture[str]) -> None:
    assert check("softmax=wrong.py:softmax", "--json", "all.json") == 1
    (row,) = json.loads(Path("all.json").read_text())["rows"]
    failure = row["failure"]
    assert row["verdict"] == "fail" and failure["case"]["arrays"] == {"x": [0.0]} and failure["facts"]["got"] == 2
    assert Path(failure["script"]).is_file() and failure["calls"][0]["results"] == [[2.0]]
    out = capsys.readouterr().out
    assert f"script {failure['script']}" in out and f"again veriformer replay {failure['replay']}" in out


def test_replay_is_1_while_the_law_is_broken_and_0_afterwards(capsys: pytest.CaptureFixture[str]) -> None:
    assert check("softmax=wrong.py:softmax", "--json", "all.json") == 1
    name = json.loads(Path("all.json").read_text())["rows"][0]["failure"]["replay"]
    capsys.readouterr()
    assert run("replay", name) == 1
    assert "got   2 at [0], wanted 1 ±" in capsys.readouterr().out
    Path("wrong.py").write_text(SOFTMAX)
    assert run("replay", name) == 0
    assert "the law holds for this case" in capsys.readouterr().out


def test_replay_of_something_unknown_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("replay", "abc123") == 2
    assert capsys.readouterr().err == "veriformer: no failure 'abc123'; .veriformer holds no failures\n"


@pytest.mark.parametrize("words", [["--json", "no/such/folder/all.json"], ["--junitxml", "no/such/folder/all.xml"]])
def test_a_report_that_cannot_be_written_is_a_usage_error(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert check("softmax=right.py:softmax", *words) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"veriformer: {words[1]} cannot be written") and err.count("\n") == 1


def test_an_output_folder_that_cannot_be_written_is_replaced_and_said_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    (folder / "taken").write_text("a file")
    assert check("softmax=right.py:softmax", "--output", "taken") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert out.count("taken cannot be written (File exists); reports and scripts are in ") == 1
    other = out.rpartition("report: ")[2].rstrip("/")
    assert json.loads(next(Path(other).glob("*.json")).read_text())["complete"]


def test_junit_parses_and_counts_what_the_report_counts() -> None:
    laws = [LAW, "returns-an-array", "softmax/temperature-matters"]
    assert check("softmax=wrong.py:softmax", "--junitxml", "all.xml", laws=laws) == 1
    suite = ElementTree.parse("all.xml").getroot()
    assert (suite.tag, suite.get("tests")) == ("testsuite", "3")
    found = {case.get("name", "").split("[")[0]: [child.tag for child in case] for case in suite}
    assert found == {"softmax/returns-an-array": [], LAW: ["failure"], "softmax/temperature-matters": ["skipped"]}


def test_junit_of_odd_messages_parses(folder: Path) -> None:
    (folder / "odd.py").write_text("def softmax(x):\n    raise ArithmeticError('\\x00\\x1b[31m<&>\\ud800 ü')\n")
    assert check("softmax=odd.py:softmax", "--junitxml", "all.xml", "--json", "all.json") == 1
    assert ElementTree.parse("all.xml").getroot().get("tests") == "1"
    (row,) = json.loads(Path("all.json").read_text())["rows"]
    assert row["failure"]["message"] == "ArithmeticError: \\x00\\x1b[31m<&>\\ud800 ü"
    compile(Path(row["failure"]["script"]).read_text(), "script", "exec")


def test_the_report_is_valid_after_every_item(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, whole = [], Path("all.json")
    write = record.write

    def watched(path: Path, text: str) -> None:
        write(path, text)
        if path.name == whole.name:
            rows.append(len(json.loads(whole.read_text())["rows"]))

    monkeypatch.setattr(record, "write", watched)
    assert check("softmax=right.py:softmax", "--json", "all.json", laws=[LAW, "sums-to-one", "order-is-kept"]) == 0
    assert rows == sorted(rows) and set(rows) == {0, 1, 2, 3}


KILLS_ITSELF = f"""
import os, signal
{SOFTMAX}
right, calls = softmax, []

def softmax(x, *, axis=-1):
    calls.append(1)
    if len(calls) > 60:
        os.kill(os.getpid(), signal.SIGKILL)
    return right(x, axis=axis)
"""


def test_a_killed_run_leaves_a_valid_report(folder: Path) -> None:
    (folder / "kills.py").write_text(KILLS_ITSELF)
    words = ("--effort", "smoke", "--in-process", "--json", "all.json")
    done = command("check", "softmax=kills.py:softmax", *words, folder=folder)
    assert done.returncode == -signal.SIGKILL
    for path in (folder / "all.json", folder / ".veriformer" / "kills.py-softmax.json"):
        report = json.loads(path.read_text())
        assert report["complete"] is False and report["exit_code"] is None and report["rows"]


SLOW = SOFTMAX.replace("    e =", "    import time; time.sleep(0.05)\n    e =")


def test_ctrl_c_ends_with_one_line_and_the_report_of_what_was_judged(folder: Path) -> None:
    (folder / "slow.py").write_text(SLOW)
    words = ["check", "softmax=slow.py:softmax", "--json", "all.json"]
    process = subprocess.Popen(
        [sys.executable, "-m", "veriformer", *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while process.poll() is None and not (folder / "all.json").is_file():
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130 and err == "veriformer: interrupted; the report holds what was judged\n"
    assert json.loads((folder / "all.json").read_text())["complete"] is False


LONG = """
{softmax}
log_softmax = lambda x, *, axis=-1: 2 * np.log(softmax(x, axis=axis))
"""


def test_piped_output_is_plain_and_80_columns_wide(folder: Path) -> None:
    (folder / "lib.py").write_text(LONG.format(softmax=WRONG))
    words = ("--effort", "smoke", "--declare", "extreme_values=true", "--declare", "dtypes=float32,float64")
    laws = ("--law", "returns-an-array", "--law", "equals-the-reference", "--law", "sums-to-one")
    done = command("check", "lib.py", *words, *laws, folder=folder, env={"TERM": "xterm-256color"})
    assert done.returncode == 1 and done.stderr == "" and "\x1b" not in done.stdout and "\r" not in done.stdout
    lines = done.stdout.splitlines()
    long = [line for line in lines if len(line) > 80 and "; worst " not in line and " laws hold" not in line]
    assert long == []
    assert [line for line in lines if line.startswith("FAIL ")]


def test_a_reader_that_goes_away_is_no_traceback(folder: Path) -> None:
    script = f"{sys.executable} -m veriformer laws | head -n 1"
    done = subprocess.run(["bash", "-c", script], cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("softmax: ") and done.stderr == ""


def test_laws_are_listed_and_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("laws") == 0
    out = capsys.readouterr().out
    assert f"{len(all_laws())} laws; `veriformer laws ID` explains one" in out
    assert all(law.name in out for law in all_laws())
    assert run("laws", "softmax/sums-to-one") == 0
    out = capsys.readouterr().out
    assert out.startswith("softmax/sums-to-one\n") and "says" in out and "rejects" in out
    assert run("laws", "sum-to-two") == 2
    assert capsys.readouterr().err.startswith("veriformer: no law 'sum-to-two'; nearest is '")


def test_list_shows_operations_registered_names_aliases_and_capabilities(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("list") == 0
    out = capsys.readouterr().out
    for word in (
        "attention_with_lse",
        "x_transformers",
        "PyTorch",
        "softmax_scale",
        "causal_alignment",
        "[bottom_right | top_left",
    ):
        assert word in out


def test_list_shows_one_operation_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("list", "softmax") == 0
    out = capsys.readouterr().out
    assert out.startswith("softmax\n") and "tau" in out and "sums-to-one" in out and "attention" not in out
    assert "choices" not in out and "names that are understood" in out
    assert run("list", "clip_by_global_norm") == 0
    out = capsys.readouterr().out
    assert "grads: a list of arrays" in out and "clip_epsilon" in out and "halting_comparison" not in out
    assert run("list", "relu") == 0 and "names that are understood" not in capsys.readouterr().out
    assert run("list", "softmaxx") == 2
    assert capsys.readouterr().err.startswith("veriformer: no operation 'softmaxx'; nearest is 'softmax'")


@pytest.mark.parametrize("words", [["chek"], [], ["check", "--efort", "ci"], ["check", "--seed", "x"], ["replay"]])
def test_a_wrong_command_is_one_line_and_exit_code_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*words) == 2
    err = capsys.readouterr().err
    assert err.startswith("veriformer: ") and err.count("\n") == 1 and "--help" in err


def test_pyproject_declares_and_the_command_line_overrules(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "pyproject.toml").write_text('[tool.veriformer.declare]\ndtypes = ["float64"]\nextreme_values = true\n')
    assert check("softmax=right.py:softmax", "--declare", "dtypes=float32") == 0
    assert "declares dtypes=float32, extreme_values=true" in " ".join(capsys.readouterr().out.split())
    (folder / "pyproject.toml").write_text("[tool.veriformer")
    assert check("softmax=right.py:softmax") == 2
    assert capsys.readouterr().err.startswith("veriformer: pyproject.toml cannot be read: ")


def test_the_seed_of_a_deep_run_is_drawn_and_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli.secrets, "randbelow", lambda top: 4711)
    words = ["check", "softmax=right.py:softmax", "--in-process", "--law", LAW, "--max-time", "0"]
    assert run(*words, "--effort", "deep") == 4
    assert "effort deep  seed 4711" in capsys.readouterr().out
    assert run(*words) == 4 and "effort ci  seed 0" in capsys.readouterr().out


def test_version() -> None:
    assert run("--version") == 0
