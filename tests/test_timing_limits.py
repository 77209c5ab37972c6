"""The machine's limits: bandwidth by footprint, peaks, and the least time of a workload, with planted numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from veriformer.benchmarks import limits
from veriformer.benchmarks.limits import Limits, limit_of
from veriformer.benchmarks.workloads import Workload, normal

MIB = 2**20
PLANTED = Limits(((MIB, 80e9), (4 * MIB, 40e9), (64 * MIB, 10e9)), {"float32": 100e9})


def workload(flops: float, numbers: float, dtype: str = "float32") -> Workload:
    return Workload("planted", "softmax", normal(x=(1,)), flops, numbers, dtype=dtype)


def test_bandwidth_is_a_straight_line_over_the_footprints_logarithm_and_flat_outside() -> None:
    assert PLANTED.bandwidth_at(MIB) == 80e9 and PLANTED.bandwidth_at(2 * MIB) == pytest.approx(60e9)
    assert PLANTED.bandwidth_at(16 * MIB) == pytest.approx(25e9)
    assert PLANTED.bandwidth_at(1) == PLANTED.bandwidth_at(0) == 80e9 and PLANTED.bandwidth_at(1e12) == 10e9


def test_the_limit_is_the_larger_of_arithmetic_and_memory_at_the_workloads_own_footprint() -> None:
    assert limit_of(workload(1e9, 1000), PLANTED) == pytest.approx(1e-2)
    assert limit_of(workload(1, MIB), PLANTED) == pytest.approx(4 * MIB / 40e9)
    assert limit_of(workload(1, MIB / 4), PLANTED) == pytest.approx(MIB / 80e9)


def test_a_dtype_without_a_peak_is_named() -> None:
    with pytest.raises(ValueError, match="no peak was measured for float64; there are float32"):
        limit_of(workload(1, 1, "float64"), PLANTED)


def test_a_smaller_footprint_is_never_slower() -> None:
    assert limits.falling([(1, 5.0), (2, 7.0), (4, 3.0), (8, 4.0)]) == ((1, 7.0), (2, 7.0), (4, 4.0), (8, 4.0))


def test_the_better_of_triad_and_reading_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "triad", lambda footprint: "triad")
    monkeypatch.setattr(limits, "reading", lambda footprint: "reading")
    monkeypatch.setattr(limits, "best", {"triad": 2.0, "reading": 0.5}.__getitem__)
    assert limits.bandwidth(1000) == 2000


def test_the_peak_is_the_best_side_and_a_long_product_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    rates, tried = {128: 1e9, 256: 3e9, 512: 2e9, 1024: 1e9}, []

    def planted(call: int) -> float:
        tried.append(call)
        return 2 * call**3 / rates[call]

    monkeypatch.setattr(limits, "product", lambda dtype, side: side)
    monkeypatch.setattr(limits, "best", planted)
    assert limits.peak("float32") == pytest.approx(3e9) and tried == [128, 256, 512]  # 2 * 1024**3 / 2e9 is over 1 s


@pytest.fixture(params=["torch", "numpy alone"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With torch, and as if it were not installed."""
    if request.param == "torch":
        pytest.importorskip("torch")
    else:
        monkeypatch.setattr(limits, "_torch", lambda: None)
    return str(request.param)


def test_limits_are_measured(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TIERS", (2**16, 2**18))
    monkeypatch.setattr(limits, "SIDES", (32, 64))
    monkeypatch.setattr(limits, "SECONDS", 0.002)
    found = limits.measured(("float32", "bfloat16"))
    assert [size for size, _ in found.bandwidth] == [2**16, 2**18]
    assert all(1e8 < rate < 1e13 for _, rate in found.bandwidth)
    assert found.peak.keys() == ({"float32", "bfloat16"} if library == "torch" else {"float32"})
    assert all(1e6 < rate < 1e14 for rate in found.peak.values())


@pytest.mark.parametrize(("make", "times"), [(limits.triad, 3), (limits.reading, 1)])
def test_a_call_touches_the_footprint(make: Callable[[int], Callable[[], Any]], times: int, library: str) -> None:
    call = make(12 * 100)
    found = np.asarray(call())
    numbers = found.size if times == 3 else float(found)
    assert numbers == (100 if times == 3 else 300)
    if times == 3:
        assert np.allclose(found, 1.5 if library == "torch" else 2.0)


def test_a_target_that_changes_the_default_dtype_does_not_change_the_footprint() -> None:
    torch = pytest.importorskip("torch")
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert limits.triad(1200)().dtype == limits.reading(1200)().dtype == torch.float32
    finally:
        torch.set_default_dtype(before)
