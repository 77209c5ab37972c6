"""asv's suite: it is found, says what it costs in, runs in the pinned environment, and lists what pytest's does."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from asv_suite import complaints, discovered
from packaging.requirements import Requirement
from toys import ROOT, run_python

from veriformer.benchmarks.bench_costs import class_name
from veriformer.benchmarks.implementations import IMPLEMENTATIONS
from veriformer.benchmarks.workloads import WORKLOADS

pytestmark = pytest.mark.skipif(find_spec("asv_runner") is None, reason="asv is not installed")
PLANTED = """
class Planted:
    version = "1"
    def track_speed_up(self): return 1
    track_speed_up.unit = "yardsticks"
    def track_cost(self): return 1
    track_cost.unit = "GFLOP/s"
    def track_tokens_per_second(self): return 1
    track_tokens_per_second.unit = "x"
    def track_hits(self): return 1
    track_hits.unit = "x"
    def track_worst(self): return 1
    def track_bytes(self): return 1
    track_bytes.unit = "bytes"
    def time_call(self): pass

class Unversioned:
    def time_call(self): pass
"""


@pytest.fixture(scope="module")
def suite() -> dict[str, Any]:
    """What asv finds."""
    return discovered(ROOT / "benchmarks")


def test_asv_finds_every_kind_of_benchmark_and_imports_no_subfolder(suite: dict[str, Any]) -> None:
    modules = {one["name"].split(".")[0] for one in suite["benchmarks"]}
    assert modules == {"bench_accuracy", "bench_costs", "bench_suite"}
    folders = [path.name for path in (ROOT / "benchmarks").iterdir() if path.is_dir()]
    assert {"speed", "studies"} <= set(folders)
    assert not [name for name in suite["modules"] if len(name.split(".")) > 2 or name.split(".")[-1] in folders]


def test_all_benchmarks_are_costs_with_a_unit_and_a_version(suite: dict[str, Any]) -> None:
    assert complaints(suite["benchmarks"]) == [] and len(suite["benchmarks"]) > 100


def test_names_and_units_of_which_more_is_better_are_refused(tmp_path: Path) -> None:
    (tmp_path / "planted").mkdir()
    (tmp_path / "planted" / "__init__.py").write_text("")
    (tmp_path / "planted" / "bench_planted.py").write_text(PLANTED)
    found = complaints(discovered(tmp_path / "planted")["benchmarks"])
    assert {line.split(":")[0].removeprefix("bench_planted.") for line in found} == {
        "Planted.track_speed_up", "Planted.track_cost", "Planted.track_tokens_per_second", "Planted.track_hits",
        "Planted.track_worst", "Unversioned.time_call",
    }  # fmt: skip


@pytest.mark.parametrize(
    "unit", ["GB/s", "tokens/s", "ops", "GFLOPs", "speedup", "speed-up", "items per second", "fraction of the limit"]
)
def test_units_of_which_more_is_better(unit: str) -> None:
    one = {"name": "a.A.track_it", "type": "track", "unit": unit, "version": "1"}
    assert "for asv less is better" in " ".join(complaints([one]))


@pytest.mark.parametrize(
    "unit", ["yardsticks", "bytes", "bits", "budgets", "imports of NumPy", "seconds", "operations"]
)
def test_units_of_which_less_is_better(unit: str) -> None:
    assert complaints([{"name": "a.A.track_worst_ratio", "type": "track", "unit": unit, "version": "1"}]) == []


def test_both_front_ends_list_the_same_cells(suite: dict[str, Any]) -> None:
    pytest.importorskip("pytest_benchmark")
    words = ("-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", "--pyargs", "veriformer.benchmarks")
    done = run_python(*words, folder=ROOT)
    speed = set(re.findall(r"test_speed\[(.+)\]", done.stdout))
    assert done.returncode == 0 and speed, done.stdout + done.stderr
    assert speed == {f"{one.id}-{name}" for one in WORKLOADS for name in IMPLEMENTATIONS[one.operation]}
    costs = {one["name"]: one["params"] for one in suite["benchmarks"] if one["name"].startswith("bench_costs.")}
    assert costs == dict(listed())


def listed() -> Iterator[tuple[str, list[list[str]]]]:
    """The benchmarks that bench_costs should have by the tables."""
    for one in WORKLOADS:
        names = [[repr(name) for name in IMPLEMENTATIONS[one.operation]]]
        for method in ("track_cost", "track_bytes"):
            yield f"bench_costs.{class_name(one)}.{method}", names
        yield f"bench_costs.Time{class_name(one)}.time_call", names


TIMED = """
import json, statistics, sys
sys.path.insert(0, sys.argv[1])
from asv_runner.discovery import get_benchmark_from_name
one = get_benchmark_from_name(sys.argv[1] + "/benchmarks", "bench_costs.TimeSoftmaxForward.time_call-0")
one.set_cache(None)
assert not one.do_setup()
print(json.dumps(statistics.median(one.do_run()["samples"])))
"""


def test_both_front_ends_take_about_the_same_time(tmp_path: Path) -> None:
    """CPU time by asv and by pytest-benchmark, within a factor of 2; a busy machine gets a second try."""
    pytest.importorskip("pytest_benchmark")
    ratios = [by_asv() / by_pytest(tmp_path / "speed.json")]
    if not 0.5 < ratios[0] < 2:
        ratios.append(by_asv() / by_pytest(tmp_path / "speed.json"))
    assert any(0.5 < ratio < 2 for ratio in ratios), ratios


def by_asv() -> float:
    """CPU seconds of softmax of numpy:plain."""
    done = run_python("-c", TIMED, str(ROOT), folder=ROOT)
    assert done.returncode == 0, done.stderr
    return float(done.stdout.splitlines()[-1])


def by_pytest(record: Path) -> float:
    """The same by pytest-benchmark."""
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--pyargs", "veriformer.benchmarks")
    done = run_python(*words, "-k", "softmax-forward and plain", f"--benchmark-json={record}", folder=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    (one,) = json.loads(record.read_text())["benchmarks"]
    return float(one["stats"]["median"])


def pinned() -> dict[str, str]:
    """name -> version in constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


def test_asvs_environment_has_every_core_dependency_as_ci_has_it() -> None:
    config = json.loads((ROOT / "asv.conf.json").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {Requirement(text).name for text in project["dependencies"]} | {"torch", "threadpoolctl"}
    asked = config["matrix"]["req"]
    assert set(asked) == wanted
    assert asked == {name: [pinned()[name]] for name in wanted}
    assert "pythons" not in config  # that which asv runs in, or else only machines that have this one can measure
    assert config["launch_method"] == "forkserver"  # or else each cell imports torch anew, which takes seconds
