"""asv: what a call costs in yardsticks and in bytes; one class for each workload, made from the table of workloads.

Less is better in all of them. CPU seconds are recorded too, under the machine's own name.
"""

from __future__ import annotations

import time
from typing import Any

from .implementations import IMPLEMENTATIONS, Prepared, named, one_thread, preload
from .measure import bytes_of, cost_of, judged
from .workloads import WORKLOADS, Workload


def class_name(workload: Workload) -> str:
    """The id of a workload as the name of a class: softmax-forward is SoftmaxForward."""
    return "".join(part.capitalize() for part in workload.id.split("-"))


class _Workload:
    """One workload; the parameter is the implementation."""

    param_names = ("implementation",)
    version = "1"
    timeout = 120.0
    workload: Workload
    prepared: Prepared

    def setup(self, implementation: str) -> None:
        """Make the implementation ready; Absent is a NotImplementedError, which asv shows as n/a."""
        one_thread()
        self.prepared = Prepared(named(implementation, self.workload.operation), self.workload)


class _Costs(_Workload):
    def track_cost(self, implementation: str) -> float:
        """CPU time of a call by that of the yardstick."""
        return round(cost_of(self.prepared).cost, 3)

    track_cost.unit = "yardsticks"  # type: ignore[attr-defined]

    def track_bytes(self, implementation: str) -> int:
        """Bytes that a call allocates."""
        return bytes_of(self.prepared)

    track_bytes.unit = "bytes"  # type: ignore[attr-defined]


class _Times(_Workload):
    timer = staticmethod(time.process_time)
    rounds, repeat, sample_time, warmup_time = 2, (3, 10, 1.0), 0.01, 0.05

    def setup(self, implementation: str) -> None:
        """As for costs, and a first call that must be right."""
        super().setup(implementation)
        judged(self.prepared, 0)
        self.call = self.prepared.fresh(0)

    def time_call(self, implementation: str) -> None:
        """CPU seconds of a call."""
        self.call()


def _made(base: type, prefix: str, workload: Workload) -> type:
    known: dict[str, Any] = {"workload": workload, "params": (list(IMPLEMENTATIONS[workload.operation]),)}
    name = prefix + class_name(workload)
    return type(name, (base,), {**known, "__module__": __name__, "__doc__": workload.sizes})


preload()
for _one in WORKLOADS:
    for _made_class in (_made(_Costs, "", _one), _made(_Times, "Time", _one)):
        globals()[_made_class.__name__] = _made_class
