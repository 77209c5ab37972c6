"""What the machine could do at best: memory bandwidth by footprint, and arithmetic in a product of matrices.

Taken in the same run as what is held against it, on one thread, in CPU time (call `implementations.one_thread` before).
Caches make bandwidth a matter of the footprint (by a factor of four to ten), hence it is measured at
TIERS and interpolated. The model is the roofline's (Williams et al. 2009): no call takes less than its arithmetic at
the peak, nor less than its bytes at the bandwidth.
"""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .workloads import Workload

KIB, MIB = 2**10, 2**20
TIERS = (256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
"""Bytes that are touched over and over."""
NAMED = {"hot": TIERS[0], "warm": TIERS[3], "cold": TIERS[-1]}
"""Tiers that have a name."""
SIDES = (128, 256, 512, 1024)
"""Rows of the square matrices that are multiplied."""
SECONDS, SAMPLE, MOST = 0.1, 1e-4, 1.0
"""Seconds for a tier or a side, of a sample at least, and of a product at most: longer ones are not tried."""


@dataclass(frozen=True)
class Limits:
    """bandwidth: (footprint in bytes, bytes a second), footprints ascending. peak: dtype -> FLOPs a second."""

    bandwidth: tuple[tuple[float, float], ...]
    peak: Mapping[str, float]

    def bandwidth_at(self, footprint: float) -> float:
        """Bytes a second for so many bytes: straight lines over the footprint's logarithm, flat outside."""
        sizes, rates = zip(*self.bandwidth, strict=True)
        return float(np.interp(math.log2(max(footprint, 1)), np.log2(sizes), rates))


def limit_of(workload: Workload, limits: Limits) -> float:
    """Seconds that a workload takes at least: its arithmetic at the peak or its bytes at their bandwidth.

    Raises ValueError where the peak of its dtype was not measured.
    """
    if workload.dtype not in limits.peak:
        raise ValueError(f"no peak was measured for {workload.dtype}; there are {', '.join(limits.peak)}")
    arithmetic = workload.flops / limits.peak[workload.dtype]
    return max(arithmetic, workload.bytes / limits.bandwidth_at(workload.bytes))


def measured(dtypes: Iterable[str] = ("float32",)) -> Limits:
    """The limits here and now, in about three seconds; a dtype that is not to be had here is left out."""
    peaks = {dtype: found for dtype in dtypes if (found := peak(dtype)) is not None}
    return Limits(falling([(size, bandwidth(size)) for size in TIERS]), peaks)


def falling(tiers: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Bandwidths that never rise with the footprint: where a smaller one seems slower, the cost of a call was seen."""
    return tuple((size, max(rate for _, rate in tiers[i:])) for i, (size, _) in enumerate(tiers))


def bandwidth(footprint: int) -> float:
    """Bytes a second over a footprint, the better of a triad and of reading alone."""
    return max(footprint / best(call) for call in (triad(footprint), reading(footprint)))


def triad(footprint: int) -> Callable[[], Any]:
    """a = b + s c over three float32 arrays; without torch s is 1, for NumPy would need a second pass."""
    size = footprint // 12
    torch = _torch()
    if torch is None:
        a, b, c = (np.ones(size, np.float32) for _ in range(3))
        return lambda: np.add(b, c, out=a)
    x, y, z = (torch.ones(size, dtype=torch.float32) for _ in range(3))
    return lambda: torch.add(y, z, alpha=0.5, out=x)


def reading(footprint: int) -> Callable[[], Any]:
    """The sum of a float32 array; without torch that of its squares, which BLAS does at full width."""
    torch = _torch()
    if torch is None:
        a = np.ones(footprint // 4, np.float32)
        return lambda: np.dot(a, a)
    x = torch.ones(footprint // 4, dtype=torch.float32)  # not the default, which a target may have changed
    return lambda: x.sum()


def peak(dtype: str) -> float | None:
    """FLOPs a second of a product of square matrices, the best of SIDES; None where a dtype is not to be had."""
    found: list[float] = []
    for side in SIDES:
        call = product(dtype, side)
        if call is None or found and 2 * side**3 / found[-1] > MOST:
            break
        found.append(2 * side**3 / best(call))
    return max(found, default=None)


def product(dtype: str, side: int) -> Callable[[], Any] | None:
    """A product of two square matrices, or None where a dtype is not to be had."""
    torch, rng = _torch(), np.random.default_rng(0)
    one, other = (rng.standard_normal((side, side)) for _ in range(2))
    if torch is not None:
        x, y = (torch.from_numpy(matrix).to(getattr(torch, dtype)) for matrix in (one, other))
        return lambda: torch.matmul(x, y)
    if dtype not in ("float32", "float64"):
        return None
    a, b = one.astype(dtype), other.astype(dtype)
    return lambda: a @ b


def best(call: Callable[[], Any]) -> float:
    """CPU seconds of a call, the least of what fits into SECONDS, at least three samples after a call to warm up."""
    once = min(_sample(call, 1) for _ in range(2))
    count = max(1, round(SAMPLE / once))
    return min(_sample(call, count) for _ in range(max(3, round(SECONDS / (count * once)))))


def _sample(call: Callable[[], Any], count: int) -> float:
    start = time.process_time()
    for _ in range(count):
        call()
    return max(time.process_time() - start, 1e-9) / count


def _torch() -> Any:
    """torch, or None where it is not installed."""
    return importlib.import_module("torch") if importlib.util.find_spec("torch") else None
