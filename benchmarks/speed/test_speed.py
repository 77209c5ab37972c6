"""pytest-benchmark: how fast implementations are here and now, a table for each workload."""

from __future__ import annotations

import time
from typing import Any

import pytest

from veriformer.benchmarks.implementations import IMPLEMENTATIONS, Absent, Prepared, named, one_thread
from veriformer.benchmarks.measure import judged
from veriformer.benchmarks.workloads import WORKLOADS, Workload

CELLS = [(workload, name) for workload in WORKLOADS for name in IMPLEMENTATIONS[workload.operation]]


@pytest.mark.benchmark(timer=time.process_time)
@pytest.mark.parametrize(("workload", "name"), CELLS, ids=[f"{workload.id}-{name}" for workload, name in CELLS])
def test_speed(workload: Workload, name: str, benchmark: Any) -> None:
    """CPU time of a call, on fresh inputs every round; its result must be right."""
    one_thread()
    try:
        prepared = Prepared(named(name, workload.operation), workload)
    except Absent as absent:
        pytest.skip(str(absent))
    judged(prepared, 0)
    benchmark.group = workload.id
    benchmark.pedantic(lambda call: call(), setup=lambda: ((prepared.fresh(0),), {}), rounds=5, iterations=1)
