"""`pytest --pyargs veriformer.benchmarks`: what is collected, what is timed, and who is refused."""

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec

import pytest
from toys import ROOT, SOFTMAX, run_python

from veriformer.benchmarks.workloads import WORKLOADS

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.skipif(find_spec("pytest_benchmark") is None, reason="pytest-benchmark is not installed")
LIBRARY = f"""
{SOFTMAX}
def wrong(x, *, axis=-1):
    return softmax(x, axis=axis) * 1.001

def raises(x, *, axis=-1):
    raise RuntimeError("no kernel")

def columns(x, *, axis=-1):
    return softmax(x, axis=axis), None

calls = []

def gives_up(x, *, axis=-1):
    calls.append(1)
    return softmax(x, axis=axis) if len(calls) < 10 else 1 / 0

def gelu(x):
    return x
"""
QUICK = """
import pytest
from veriformer.benchmarks import limits
limits.TIERS, limits.SIDES, limits.SECONDS = limits.TIERS[:2], (64,), 0.001
"""
"""A conftest that measures the machine's limits quickly."""


RIGHT_AND_WRONG = (
    "--veriformer", "softmax=mylib:softmax", "--veriformer", "softmax=mylib:wrong", "-k", "forward and mylib",
)  # fmt: skip
"""A right and a wrong target, forward."""


@pytest.fixture(autouse=True)
def library(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with right and wrong functions; options from outside are not seen."""
    for name in [name for name in os.environ if name.startswith(("PYTEST_ADDOPTS", "PYTEST_XDIST_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    pytester.makepyfile(mylib=LIBRARY)
    pytester.makeconftest(QUICK)
    pytester.makeini("[pytest]\nfilterwarnings =\n    error\n")


def run(pytester: pytest.Pytester, *words: str) -> pytest.RunResult:
    """pytest on the benchmarks of the installed package, in a process of its own."""
    fixed = ("-p", "no:cacheprovider", "--pyargs", "veriformer.benchmarks")
    return pytester.runpytest_subprocess(*fixed, *words, timeout=120)


def ids(done: pytest.RunResult) -> list[str]:
    return [line.rpartition("::")[2] for line in done.outlines if "::" in line]


def test_a_target_stands_in_a_table_with_the_baselines(pytester: pytest.Pytester) -> None:
    words = ("--veriformer", "softmax=mylib:softmax", "-k", "mylib or numpy:plain")
    done = run(pytester, *words, "--benchmark-json", "all.json", "--benchmark-columns", "min,median")
    done.assert_outcomes(passed=3, skipped=1)
    done.stdout.fnmatch_lines_random(["*benchmark 'softmax-forward': 2 tests*", "*softmax-forward-mylib:softmax*"])
    rows = {row["name"]: row for row in json.loads((pytester.path / "all.json").read_text())["benchmarks"]}
    for name in ("mylib:softmax", "numpy:plain"):
        row = rows[f"test_speed[softmax-forward-{name}]"]
        extra, stats = row["extra_info"], row["stats"]
        assert row["group"] == "softmax-forward" and stats["rounds"] >= 11 and stats["iterations"] == 1
        assert row["options"]["timer"] == "process_time" and row["options"]["disable_gc"]
        assert extra["fraction"] == pytest.approx(extra["limit"] / stats["median"])
        assert extra["flops"] == 5 * 256 * 512 and extra["bytes"] == 2**20 and 0 < extra["worst"] < 1


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("wrong", "result 0 is * error budgets off at softmax-forward"),
        ("raises", "raised RuntimeError: no kernel"),
        ("gives_up", "raised ZeroDivisionError: division by zero while it was timed"),
    ],
)
def test_a_wrong_target_fails_with_one_clear_line(pytester: pytest.Pytester, name: str, reason: str) -> None:
    done = run(pytester, "--veriformer", f"softmax=mylib:{name}", "-k", f"forward and mylib:{name}")
    done.assert_outcomes(failed=1)
    done.stdout.fnmatch_lines(
        [f"WRONG  mylib:{name}*{reason}*not timed; `veriformer check softmax=mylib:{name}` tells*"]
    )
    text = done.stdout.str() + done.stderr.str()
    assert "Traceback" not in text and "During handling" not in text and "benchmark 'softmax-forward'" not in text


def test_options_of_the_plugin_act(pytester: pytest.Pytester) -> None:
    words = ("--veriformer", "softmax=mylib:columns", "-k", "forward and mylib", "--benchmark-disable")
    run(pytester, *words).assert_outcomes(failed=1)
    run(pytester, *words, "--veriformer-returns", "out,other").assert_outcomes(passed=1)


@pytest.mark.parametrize("patterns", ["test_*.py", "check_*.py", "*.py"])
def test_only_workloads_of_operations_that_the_target_has_are_collected(
    pytester: pytest.Pytester, patterns: str
) -> None:
    pytester.makeini(f"[pytest]\npython_files = {patterns}\npython_functions = check_*\nfilterwarnings = error\n")
    done = run(pytester, "--veriformer", "softmax=mylib:softmax", "--collect-only", "-q")
    found = ids(done)
    assert len(found) == len(set(found)) and done.ret == 0
    assert {name.split("[")[0] for name in found} == {"test_speed"}
    assert {name.split("[softmax-")[1].split("-")[0] for name in found} == {"forward", "backward"}
    assert sum("mylib:softmax" in name for name in found) == 2


def test_without_a_target_every_workload_is_collected_and_no_law(pytester: pytest.Pytester) -> None:
    found = ids(run(pytester, "--collect-only", "-q"))
    assert {name.split("[")[0] for name in found} == {"test_speed"}
    assert all(any(f"[{one.id}-" in name for name in found) for one in WORKLOADS)


def test_switched_off_results_are_still_checked(pytester: pytest.Pytester) -> None:
    done = run(pytester, *RIGHT_AND_WRONG, "-p", "no:benchmark", "--strict-markers")
    done.assert_outcomes(passed=1, failed=1)


@pytest.mark.skipif(find_spec("xdist") is None, reason="pytest-xdist is not installed")
def test_two_workers_check_and_time_nothing(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\n")  # pytest-benchmark warns that it is disabled
    done = run(pytester, *RIGHT_AND_WRONG, "-p", "xdist", "-n", "2")
    done.assert_outcomes(passed=1, failed=1, warnings=None)
    assert "benchmark 'softmax-forward'" not in done.stdout.str()


def test_nothing_to_time_is_one_line(pytester: pytest.Pytester) -> None:
    done = run(pytester, "--veriformer", "gelu=mylib:gelu")
    assert done.ret == pytest.ExitCode.INTERRUPTED and "Traceback" not in done.stdout.str()
    done.stdout.fnmatch_lines(["veriformer: gelu=mylib:gelu has no operation that is timed; timed are softmax*"])
    assert run(pytester, "--veriformer", "softmax=mylib:softmax", "-k", "none_such").ret == 4


HIDE = """
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == {name!r} else found(name, *rest)
"""


@pytest.mark.parametrize("name", ["pytest_benchmark", "threadpoolctl"])
def test_what_is_not_installed_is_one_line(pytester: pytest.Pytester, name: str) -> None:
    pytester.makeconftest(HIDE.format(name=name))
    done = run(pytester, "-p", "no:benchmark")
    assert done.ret == pytest.ExitCode.INTERRUPTED and "Traceback" not in done.stdout.str()
    wanted = name.replace("_", "-")
    done.stdout.fnmatch_lines([f"{wanted} is not installed: pip install veriformer[[]bench]"])


def test_the_plugin_is_cheap_to_import_and_the_suites_own_run_has_no_benchmarks() -> None:
    heavy = "{'numpy', 'torch', 'hypothesis', 'pytest_benchmark', 'veriformer.benchmarks', 'veriformer.timing'}"
    done = run_python("-c", f"import sys, veriformer.plugin; print({heavy} & set(sys.modules))", folder=ROOT)
    assert done.stdout == "set()\n", done.stdout + done.stderr
    assert str(ROOT / "benchmarks") not in sys.path
