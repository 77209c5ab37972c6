"""`veriformer bench`: who is right is timed beside the baselines, who is wrong is not; table, picture and JSON."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from toys import SOFTMAX, run_python

from veriformer import cli
from veriformer.benchmarks.implementations import IMPLEMENTATIONS
from veriformer.benchmarks.limits import Limits
from veriformer.benchmarks.workloads import BY_ID
from veriformer.calling import UsageError
from veriformer.targets import Options
from veriformer.timing import bench, comparing, entrants, trial
from veriformer.timing.comparing import Comparison, compare

LIMITS = Limits(((2**18, 80e9), (2**28, 10e9)), {"float32": 100e9})
FORWARD = BY_ID["softmax-forward"]
LIBRARY = f"""
{SOFTMAX}
import ctypes, os
from numpy._core.multiarray import get_handler_name
from veriformer.impls import numpy_plain

def twice(x, *, axis=-1):
    return (numpy_plain.softmax(x), numpy_plain.softmax(x))[1]

def wrong(x, *, axis=-1):
    return softmax(x, axis=axis) * 1.001

def raises(x, *, axis=-1):
    raise RuntimeError("no kernel\\nfor this")

def nothing(x, *, axis=-1):
    return "no array"

calls = []

def wears_out(x, *, axis=-1):
    calls.append(1)
    return softmax(x, axis=axis) * (1 if len(calls) < 10 else 1.001)

def gives_up(x, *, axis=-1):
    calls.append(1)
    return softmax(x, axis=axis) if len(calls) < 10 else 1 / 0

def ends(x, *, axis=-1):
    raise SystemExit(3)

def leaves(x, *, axis=-1):
    os._exit(3)

def segfaults(x, *, axis=-1):
    ctypes.string_at(0)

def hangs(x, *, axis=-1):
    while True:
        pass

def leaves_in_gradients(cotangent, x, *, axis=-1):
    os._exit(4)

def cannot_be_counted(x, *, axis=-1):
    if get_handler_name() == "veriformer_counting":
        raise RuntimeError("no memory of this kind")
    return softmax(x, axis=axis)

def prints(x, *, axis=-1):
    print("said in a call")
    return softmax(x, axis=axis)

def heads_last(q, k, v):
    q, k, v = (np.swapaxes(x, 1, 2) for x in (q, k, v))
    return np.swapaxes(softmax(q @ np.swapaxes(k, -1, -2) * q.shape[-1] ** -0.5) @ v, 1, 2)

def loss(logits, targets, *, label_smoothing=0.0, reduction="mean"):
    return np.zeros((), logits.dtype)

def loss_vjp(cotangent, logits, targets, *, label_smoothing=0.0, reduction="mean"):
    rows, classes = logits.shape
    wanted = np.full(logits.shape, label_smoothing / classes, logits.dtype)
    wanted[np.arange(rows), targets] += 1 - label_smoothing
    return ((softmax(logits) - wanted) * cotangent / rows,)

def without_keywords(q, k, v):
    return v

def gelu(x):
    return x
"""


@pytest.fixture(autouse=True)
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with right and wrong functions, one quick baseline, planted limits."""
    (tmp_path / "ours.py").write_text(LIBRARY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(IMPLEMENTATIONS, "softmax", ("numpy:plain",))
    monkeypatch.setattr(bench, "measured", lambda dtypes: LIMITS)
    monkeypatch.setattr(comparing, "SECONDS", 0.1)
    return tmp_path


def run(*words: str) -> int:
    """A command in this process; its exit code."""
    with pytest.raises(SystemExit) as left:
        cli.main(["bench", *words])
    return int(left.value.code or 0)


def at(name: str, most: int = 11) -> Comparison:
    """A softmax of ours.py at softmax-forward."""
    return compare(FORWARD, entrants.opened([f"softmax=ours.py:{name}"], Options()), LIMITS, most)


def test_a_right_target_is_timed_beside_the_baseline(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("softmax=ours.py:softmax", "--workload", "softmax-forward") == 0
    out = capsys.readouterr().out
    assert re.search(r"^> ours.py:softmax +[\d.]+ [µm]s +1.00 +1.5 MiB +[\d.]+ % +0.0\d+$", out, re.M)
    assert re.search(r"^  numpy:plain +[\d.]+ [µm]s +[\d.]+ ", out, re.M)
    assert "80 GB/s hot (256 KiB)" in out and "100 GFLOP/s in float32" in out
    assert max(map(len, out.splitlines())) <= 80
    record = json.loads(Path(".veriformer/bench/bench.json").read_text())
    assert record["schema"] == bench.SCHEMA and record["machine"]["threads"] == 1 and record["machine"]["cpu"]
    (work,) = record["workloads"]
    assert {row["name"] for row in work["entries"] if not row["target"]} == {"numpy:plain"}
    for row in work["entries"]:
        assert row["fraction"] == pytest.approx(work["limit"] / row["seconds"]) and row["worst"] < 1
    assert work["limit"] == pytest.approx(2**20 / LIMITS.bandwidth_at(2**20))
    assert Path(".veriformer/.gitignore").is_file()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("wrong", r"result 0 is 3\.\de\+01 error budgets off at softmax-forward"),
        ("raises", "raised RuntimeError: no kernel"),
        ("nothing", "cannot be judged|shape|raised"),
        ("ends", "raised SystemExit: 3"),
    ],
)
def test_a_wrong_target_is_one_line_and_not_timed(
    name: str, reason: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparing, "in_turn", lambda *rest: pytest.fail("it was timed"))
    Path("out").mkdir()
    Path("out/roofline.svg").write_text("of an earlier run")
    assert run(f"softmax=ours.py:{name}", "--workload", "softmax-forward", "--output", "out") == 1
    out, err = capsys.readouterr()
    (line,) = [line for line in out.splitlines() if line.startswith("WRONG")]
    assert re.search(reason, line) and line.endswith(f"`veriformer check softmax=ours.py:{name}` tells more")
    assert "Traceback" not in out + err and "CPU time  ratio" not in out
    record = json.loads(Path("out/bench.json").read_text())["workloads"][0]
    assert record["entries"] == [] and record["refused"][0]["name"] == f"ours.py:{name}"
    assert not Path("out/roofline.svg").exists()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("leaves", "ended its process (exit code 3)"),
        ("segfaults", "ended its process (SIGSEGV)"),
        ("hangs", "took longer than 2 s"),
    ],
)
def test_who_ends_the_process_or_hangs_is_one_line_beside_who_is_right(
    name: str, reason: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "PATIENCE", 2.0)
    assert run(f"softmax=ours.py:{name}", "softmax=ours.py:softmax", "--workload", "softmax-forward") == 1
    out = capsys.readouterr().out
    (line,) = [line for line in out.splitlines() if line.startswith("WRONG")]
    assert line.startswith(f"WRONG  ours.py:{name} {reason} at softmax-forward; not timed; `veriformer check softmax=")
    assert "> ours.py:softmax" in out and f"> ours.py:{name}" not in out


def test_who_ends_the_process_is_called_at_no_other_workload_and_gradients_are_tried_too(
    library: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (library / "mine.py").write_text(f"{LIBRARY}\nsoftmax_vjp = leaves_in_gradients\n__all__ = ['softmax']\n")
    assert run("mine.py") == 1
    out = capsys.readouterr().out
    assert "WRONG  mine ended its process (exit code 4) at softmax-backward" in out.replace("mine.py ", "mine ")
    assert re.search("not timed: mine(.py)? ended its process .exit code 4. at softmax-backward", out)


def test_a_model_that_ends_the_process_in_a_step_is_one_line(
    library: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (library / "model.py").write_text(
        "import os, numpy as np\nclass Model:\n    vocabulary = 64\n"
        "    def full(self, tokens): return np.zeros((*tokens.shape, 64), np.float32)\n"
        "    def step(self, tokens, cache): return os._exit(6) if cache else (self.full(tokens), 1)\n"
        "def make(params, *, heads): return Model()\n"
    )
    pytest.importorskip("torch")
    assert run("decoder_lm=model.py:make", "--workload", "generate-cached") == 1
    out = capsys.readouterr().out
    assert "WRONG  model.py:make ended its process (exit code 6) at generate-cached" in out


def test_an_import_that_ends_the_process_is_one_line(library: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (library / "gone.py").write_text("import os\nos._exit(5)\n")
    assert run("softmax=gone.py:softmax") == 2
    assert capsys.readouterr().err == "veriformer: importing softmax=gone.py:softmax ended the process (exit code 5)\n"


def test_the_command_that_tells_more_repeats_what_was_said_of_the_target(capsys: pytest.CaptureFixture[str]) -> None:
    said = ("--declare", "max_magnitude=10 000", "--returns", "out", "--accepts", "axis", "--framework", "numpy")
    assert run("softmax=ours.py:wrong", *said[2:], "--workload", "softmax-forward") == 1
    out = capsys.readouterr().out
    assert "`veriformer check softmax=ours.py:wrong --accepts axis --returns out --framework numpy` tells more" in out
    given = cli.build_parser().parse_args(["bench", "x", *said])
    assert cli.flags_of(given).startswith(" --declare 'max_magnitude=10 000' --accepts")


@pytest.mark.parametrize("first", ["wears_out", "gives_up"])
def test_who_stands_behind_a_first_target_that_turns_wrong_is_timed(first: str) -> None:
    found = compare(
        FORWARD, entrants.opened([f"softmax=ours.py:{n}" for n in (first, "softmax")], Options()), LIMITS, 11
    )
    assert [one.name for one in found.refused] == [f"ours.py:{first}"]
    ratios = {row.name: row.ratio for row in found.entries}
    assert ratios.keys() == {"ours.py:softmax", "numpy:plain"} and ratios["ours.py:softmax"] == 1


def test_the_first_target_is_timed_though_all_others_raise() -> None:
    targets = entrants.opened([f"softmax=ours.py:{n}" for n in ("softmax", "gives_up")], Options())
    found = compare(FORWARD, targets, LIMITS, 11, others=False)
    assert [one.name for one in found.refused] == ["ours.py:gives_up"]
    assert [row.name for row in found.entries] == ["ours.py:softmax"]


@pytest.mark.parametrize("command", ["bench", "history", "check"])
def test_only_a_check_that_is_interrupted_has_a_report(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(given: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, f"run_{command}", interrupted)
    with pytest.raises(SystemExit) as left:
        cli.main([command, *(["softmax=ours.py:softmax"] if command == "bench" else [])])
    tail = "; the report holds what was judged" if command == "check" else ""
    assert left.value.code == 130 and capsys.readouterr().err == f"veriformer: interrupted{tail}\n"


def test_a_right_target_beside_a_wrong_one_is_timed_and_the_exit_code_is_1(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("softmax=ours.py:wrong", "softmax=ours.py:softmax", "--workload", "softmax-forward") == 1
    out = capsys.readouterr().out
    assert "> ours.py:softmax" in out and "> ours.py:wrong" not in out and "WRONG  ours.py:wrong" in out


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("wears_out", "in a later call"),
        ("gives_up", "while it was timed"),
        ("cannot_be_counted", "raised RuntimeError: no memory of this kind while its bytes were counted"),
    ],
)
def test_who_is_wrong_later_is_shown_without_a_time(name: str, reason: str) -> None:
    found = at(name)
    assert found.wrong and not found.entries and reason in found.refused[0].line()


def test_what_a_target_prints_stays_out_of_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("softmax=ours.py:prints", "--workload", "softmax-forward") == 0
    assert "said in a call" not in capsys.readouterr().out


def test_heads_after_tokens_are_right_where_that_is_declared() -> None:
    for layout, right in (("BTHD", True), ("BHTD", False)):
        targets = entrants.opened(["attention=ours.py:heads_last"], Options(declare={"layout": layout}))
        found = compare(BY_ID["attention-decode"], targets, LIMITS, 11, others=False)
        assert bool(found.entries) == right and bool(found.refused) != right


def test_a_wrong_loss_with_right_gradients_is_refused() -> None:
    targets = entrants.opened(["cross_entropy=ours.py:loss"], Options())
    found = compare(BY_ID["loss-smoothed"], targets, LIMITS, 11, others=False)
    assert found.wrong and not found.entries and "result 0 is" in found.refused[0].line()


def test_twice_the_work_shows_as_twice_the_time() -> None:
    found = at("twice", most=31)
    rows = {row.name: row for row in found.entries}
    assert rows["ours.py:twice"].ratio == 1 and 0.3 < rows["numpy:plain"].ratio < 0.75
    assert rows["numpy:plain"].bytes < rows["ours.py:twice"].bytes
    for row in found.entries:
        assert row.fraction == pytest.approx(found.limit / row.seconds)


def test_a_target_without_any_baseline_is_timed_alone() -> None:
    targets = entrants.opened(["softmax=ours.py:softmax"], Options())
    (row,) = compare(FORWARD, targets, LIMITS, 11, others=False).entries
    assert row.ratio == 1 and row.pairs == 11 and row.seconds == row.sampled > 0


def test_a_baseline_that_is_a_target_is_there_once() -> None:
    targets = entrants.opened(["numpy:plain", "numpy:plain"], Options())
    (row,) = compare(FORWARD, targets, LIMITS, 11).entries
    assert row.target and row.name == "numpy:plain"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["softmax=ours.py:softmax", "--workload", "softmax-forwrd"], "no workload 'softmax-forwrd'; nearest is 'soft"),
        (["gelu=ours.py:gelu"], "gelu=ours.py:gelu has no operation that is timed; timed are softmax, layer_norm"),
        (
            ["softmax=ours.py:softmax", "--workload", "adamw-step"],
            "has no adamw_step, which adamw-step times; timed of it: softmax-forward, softmax-backward",
        ),
        (
            ["softmax=ours.py:softmax", "--workload", "softmax-backward"],
            "nothing to time: ours.py:softmax has no softmax_vjp (softmax-backward)",
        ),
        (
            ["attention=ours.py:without_keywords", "--workload", "attention-prefill"],
            "nothing to time: ours.py:without_keywords does not take causal (attention-prefill)",
        ),
        (["softmax=ours.py:sofmax"], "ours.py has no attribute 'sofmax'; nearest is 'softmax'"),
        (["softmax=ours.py:softmax", "--declare", "layot=BHTD"], "unknown capability 'layot'"),
        (["softmax=ours.py:softmax", "--workload", ""], "--workload '': wanted the id of a workload"),
        ([], "the following arguments are required: TARGET"),
    ],
)
def test_bad_use_is_one_line_and_exit_code_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*words) == 2
    out, err = capsys.readouterr()
    assert message in err and err.count("\n") == 1 and not out


def test_what_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """threadpoolctl is needed; baselines without their framework are left out, once; so is what needs torch."""
    lacking = {"torch"}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in lacking else find_spec(name))
    monkeypatch.setitem(IMPLEMENTATIONS, "softmax", ("numpy:plain", "torch:functional"))
    monkeypatch.setattr(bench, "one_thread", lambda: None)
    assert run("numpy:plain", "--workload", "softmax-forward", "--workload", "softmax-backward") == 0
    out = capsys.readouterr().out
    assert out.count("baselines of torch: not installed (pip install veriformer[torch])") == 1
    assert "not timed: judging it needs torch: pip install veriformer[torch]" in out and "torch:functional" not in out
    lacking.add("threadpoolctl")
    assert run("numpy:plain") == 2
    assert "bench needs threadpoolctl, which is not installed" in capsys.readouterr().err


def test_a_model_with_weights_of_its_own_is_not_timed(library: Path) -> None:
    pytest.importorskip("torch")
    (library / "model.py").write_text(
        "import numpy as np\nclass Model:\n    vocabulary = 5\n"
        "    def full(self, tokens): return np.zeros((*tokens.shape, 5))\n"
        "    def step(self, tokens, cache): return self.full(tokens), None\nmodel = Model()\n"
    )
    targets = entrants.opened(["decoder_lm=model.py:model"], Options())
    with pytest.raises(UsageError, match="has weights of its own; wanted a factory that takes them"):
        entrants.doable([BY_ID["generate-cached"]], targets)


def test_the_command_runs_in_a_process_of_its_own(library: Path) -> None:
    (library / "mine").mkdir()
    (library / "mine" / "__init__.py").write_text("")
    (library / "mine" / "ops.py").write_text(SOFTMAX)
    words = ("bench", "softmax=mine.ops:softmax", "--workload", "softmax-forward", "--output", "out")
    done: subprocess.CompletedProcess[str] = run_python("-m", "veriformer", *words, folder=library)
    assert done.returncode == 0, done.stderr
    assert "> mine.ops:softmax" in done.stdout and not done.stderr
    record = json.loads((library / "out/bench.json").read_text())
    assert len(record["limits"]["bandwidth"]) == 6 and record["limits"]["peak"]["float32"] > 1e8
    assert all(0 < entry["fraction"] < 1.5 for entry in record["workloads"][0]["entries"])
