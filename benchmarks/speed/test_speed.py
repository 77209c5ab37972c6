"""pytest-benchmark: how fast implementations are here and now, a table for each workload.

    pytest --pyargs veriformer.benchmarks --veriformer attention=mylib.ops:sdpa

shows the targets beside the installed baselines, at the workloads of operations that the targets have; without
--veriformer it is our own implementations. Whoever fails the check of a workload fails its test and is not timed.
Where pytest-benchmark is switched off (-p no:benchmark, --benchmark-disable, pytest -n) results are still checked.
"""

from __future__ import annotations

import importlib.util
import shutil
import time
from collections.abc import Iterator
from functools import cache, partial
from itertools import count
from typing import Any

import pytest

from veriformer.benchmarks.implementations import Absent, Prepared, one_thread
from veriformer.benchmarks.judging import KEPT, Wrong
from veriformer.benchmarks.limits import Limits, limit_of, measured
from veriformer.benchmarks.measure import NUMBERS, elapsed
from veriformer.benchmarks.workloads import WORKLOADS, Workload
from veriformer.boundary import describe_error
from veriformer.calling import UsageError
from veriformer.plugin import targets_in_process
from veriformer.report.record import number
from veriformer.timing.comparing import Refusal
from veriformer.timing.entrants import Target, baseline, baselines, checked, prepared, right, workloads_of

SECONDS, FEWEST, MOST, WARM = 0.5, 11, 101, 3
"""Seconds that the rounds of a test take together, as far as the fewest and most rounds allow; rounds to warm up."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test for each workload and implementation: targets first, then the installed baselines."""
    plugin = metafunc.config.pluginmanager.hasplugin("benchmark")
    needed = ["threadpoolctl"] if plugin else ["pytest_benchmark", "threadpoolctl"]
    for name in needed:
        if not importlib.util.find_spec(name):
            name = name.replace("_", "-")
            raise pytest.Collector.CollectError(f"{name} is not installed: pip install veriformer[bench]")
    try:
        targets = targets_in_process(metafunc.config)
        workloads = workloads_of(targets) if targets else WORKLOADS
    except UsageError as error:
        raise pytest.Collector.CollectError(f"veriformer: {error}") from None
    found = []
    for workload in workloads:
        marks = [pytest.mark.benchmark(group=workload.id, timer=time.process_time, disable_gc=True)] if plugin else []
        for name, make, words in entrants(workload, targets):
            found.append(pytest.param(workload, make, words, id=f"{workload.id}-{name}", marks=marks))
    metafunc.parametrize(("workload", "make", "words"), found)


def entrants(workload: Workload, targets: list[Target]) -> Iterator[tuple[str, Any, str]]:
    """Names, functions that make the implementations ready for a workload, and how the user named them."""
    mine = [one for one in targets if workload.operation in one.loaded.boundaries]
    for one in mine:
        yield one.name, partial(prepared, one.loaded, workload), one.words
    for name in baselines(workload, [one.name for one in mine]):
        yield name, partial(baseline, name, workload), ""


@pytest.fixture
def benchmark(request: pytest.FixtureRequest) -> Any:
    """pytest-benchmark's own, or None where that is switched off."""
    there = request.config.pluginmanager.hasplugin("benchmark")
    return request.getfixturevalue("benchmark") if there else None


@pytest.fixture(scope="module", autouse=True)
def _alone() -> Iterator[None]:
    """One thread from now on; what was kept for judging goes in the end."""
    one_thread()
    yield
    shutil.rmtree(KEPT, ignore_errors=True)


@cache
def limits() -> Limits:
    """The machine's, measured once."""
    return measured(sorted({one.dtype for one in WORKLOADS}))


@pytest.mark.filterwarnings("ignore:Benchmark fixture was not used")  # whoever is wrong is not timed
def test_speed(workload: Workload, make: Any, words: str, benchmark: Any) -> None:
    """CPU time of a call, on fresh inputs every round; results before, and the last one, must be right."""
    try:
        one = make()
    except Absent as absent:
        pytest.skip(str(absent))
    reason = ""
    try:
        judge(one, benchmark)
    except Wrong as wrong:
        reason = str(wrong)
        forget(benchmark)
    if reason:  # outside of the handler, so that pytest shows the line alone
        pytest.fail(Refusal(one.name, reason, words).line(), pytrace=False)


test_speed.__test__ = True  # type: ignore[attr-defined]  # collected whatever python_functions says


def judge(one: Prepared, benchmark: Any) -> None:
    """Check, time, check again, and note what belongs to the numbers. Raises Wrong where a result is wrong."""
    worst = checked(one).ratio
    if benchmark is None:
        return
    worst = max(worst, timed(one, benchmark))
    if benchmark.stats is None:
        return
    work, limit = one.workload, limit_of(one.workload, limits())
    benchmark.extra_info |= {
        "flops": work.flops, "bytes": work.bytes, "limit": limit,
        "fraction": limit / benchmark.stats.stats.median, "worst": number(worst),
    }  # fmt: skip


def forget(benchmark: Any) -> None:
    """Take the times of what turned out wrong from the table and from the JSON."""
    if benchmark is not None and benchmark.stats is not None:
        benchmark.has_error = True
        benchmark.stats.stats.data.clear()


def timed(one: Prepared, benchmark: Any) -> float:
    """Time the rounds; the error of the last result by its budget.

    Raises Wrong where that is wrong, and where a call raises.
    """
    used: list[int] = []
    turns = count(len(NUMBERS))

    def fresh() -> tuple[tuple[Any], dict[str, Any]]:
        used[:] = [next(turns)]
        return (one.fresh(used[0]),), {}

    try:
        once = max(1e-5, elapsed([one.fresh(0)]))
        rounds = min(MOST, max(FEWEST, round(SECONDS / once)))
        returned = benchmark.pedantic(lambda call: call(), setup=fresh, rounds=rounds, warmup_rounds=WARM)
    except (Exception, SystemExit) as error:
        raise Wrong(f"{one.name} raised {describe_error(error)} while it was timed") from error
    return right(one, used[0], returned).ratio
