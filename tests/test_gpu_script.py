"""The script for a machine with a GPU: all of its way on the CPU, and what it says where there is no GPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from toys import ROOT, run_python

pytest.importorskip("torch")

SCRIPT = str(ROOT / "benchmarks" / "gpu" / "run.py")
VERDICTS = [
    {"implementation": "a:b", "operation": "softmax", "dtype": "float16", "counts": {"pass": 2}, "ratio": 0.5,
     "wrong": []},
    {"target": "c", "said": "no answer within 5 s"},
]  # fmt: skip


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "gpu"))
    for name in ("run", "page", "timed"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import run

    yield run
    for name in ("run", "page", "timed"):
        sys.modules.pop(name, None)


def test_a_dry_run_judges_and_times_everything(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed (pip install veriformer[triton])")
    done = run_python(SCRIPT, "--dry-run", "--seconds", "300", folder=tmp_path)
    assert done.returncode == 4 and done.stderr == "", done.stdout + done.stderr
    assert "| triton:kernels | softmax | float32 | 1 pass |" in done.stdout
    assert "- torch_cuda: not judged: veriformer: torch_cuda works on cuda, not on cpu" in done.stdout
    lines = done.stdout.partition("## Times")[2].splitlines()
    said = {line for line in lines if line.startswith("- ") and "works on cuda, not on cpu" not in line}
    assert said == set()
    tables = done.stdout.split("### ")[1:]
    assert len(tables) == 5 and all("| triton:" in table and "| torch:" in table for table in tables)
    assert "says nothing of speed" in done.stdout and list(tmp_path.iterdir()) == []


def test_without_a_gpu_it_says_so_in_one_line_and_writes_that_only_where_nothing_was_run(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(script, "REPORTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["run.py", "--write"])
    assert script.main() == 4 and capsys.readouterr().out == "not run: no CUDA device\n"
    assert (tmp_path / "gpu.md").read_text() == script.NOT_RUN
    (tmp_path / "gpu.json").write_text("{}")
    (tmp_path / "gpu.md").write_text("what was run")
    assert script.main() == 4 and (tmp_path / "gpu.md").read_text() == "what was run"


def test_the_committed_page_says_what_was_run(script: Any) -> None:
    reports = ROOT / "reports"
    assert (reports / "gpu.json").exists() or (reports / "gpu.md").read_text() == script.NOT_RUN


def test_exit_codes(script: Any) -> None:
    good, silent = VERDICTS
    row = {"said": ""}
    assert script.exit_code({"verdicts": [good], "timings": [row]}) == 0
    assert script.exit_code({"verdicts": [good, silent], "timings": [row]}) == 4
    assert script.exit_code({"verdicts": [good | {"counts": {"not_run": 1}}], "timings": [row]}) == 4
    assert script.exit_code({"verdicts": [good | {"wrong": [{}]}, silent], "timings": [row]}) == 1
    assert script.exit_code({"verdicts": [good], "timings": [{"said": "wrong: 3 budgets off"}]}) == 1


def test_what_takes_too_long_is_ended(script: Any) -> None:
    sleeps = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert script.finished(sleeps, 0.5) == "no answer within 0 s"
    says = [sys.executable, "-c", "import sys; print('one\\ntwo', file=sys.stderr)"]
    assert script.finished(says, 30) == "two"


BREAKS = """
import ctypes, json, sys, time
first = int(sys.argv[3])
for number in range(first, 6):
    if number == 1:
        ctypes.string_at(0)
    if number == 4:
        time.sleep(60)
    print(json.dumps({"number": number, "said": "CUDA error" if number == 2 else ""}), flush=True)
    if number == 2:
        print("again")
        break
"""


def test_a_row_that_breaks_or_hangs_costs_itself(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "breaks.py").write_text(BREAKS)
    monkeypatch.setattr(script, "TIMED", tmp_path / "breaks.py")
    monkeypatch.setattr(script, "RESERVE", 3.0)
    rows = script.times("cpu", 12.0, True)
    assert [row.get("number") for row in rows[:5]] == [0, None, 2, 3, None]
    assert rows[1]["said"] == "exit code -11" and rows[4]["said"].startswith("no answer within")
    assert {row["said"] for row in rows[5:]} == {"not run: time is over"} and len(rows) > 6


def test_failures_are_on_the_page_with_what_they_say(script: Any) -> None:
    rows = [
        {"implementation": "a:b", "operation": "softmax", "dtype": "float16", "law": "softmax/sums-to-one",
         "verdict": verdict, "ratio": ratio, "reason": "", **more}
        for verdict, ratio, more in [("pass", 0.5, {}), ("fail", 7.0, {"failure": {"message": "got 2, wanted 1"}})]
    ]  # fmt: skip
    (one,) = script.summed(rows)
    assert one["counts"] == {"pass": 1, "fail": 1} and one["ratio"] == 7.0
    record = {"facts": {"device": "cuda", "l2_bytes": 2**20}, "seconds": 1, "budget": 2, "verdicts": [one, VERDICTS[1]]}
    timed = {"work": "w", "sizes": "8x8", "dtype": "float16", "flops": 1e6, "bytes": 1e6, "ratio": 0.1, "said": ""}
    slow, fast = ({**timed, "implementation": name, "seconds": s, "calls": 100} for name, s in (("x", 2.0), ("y", 1.0)))
    late = {**timed, "implementation": "z", "seconds": 0.0, "calls": 0, "said": "not run: time is over"}
    page = script.markdown(record | {"timings": [slow, fast, late]})
    assert "- **a:b float16 softmax/sums-to-one**: got 2, wanted 1" in page
    assert "- c: not judged: no answer within 5 s" in page and "- z: not run: time is over" in page
    assert page.index("| y | 1e+06 µs | 1.00 |") < page.index("| x | 2e+06 µs | 2.00 |")
