"""asv: how accurate results are, one class for each operation, forward and gradients; less is better.

A result that is off by more than its budget is recorded as the ratio above 1 that it is, so that a history shows when
and how far it went wrong, and a gate sees the rise. What has no such number (a wrong shape, NaN, a missing gradient, or
nothing that can be judged) raises judging.Wrong, which asv shows as failed.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from .implementations import Prepared, named, one_thread, preload
from .inputs import BACKWARD, DTYPES, FORWARD, GRADIENT_DTYPES, SEEDS, judged_at
from .judging import Accuracy, Wrong, accuracy, shared, worst
from .workloads import Workload


class _Accuracy:
    """One operation; the parameters are the implementation and the dtype."""

    param_names = ("implementation", "dtype")
    version = "1"
    timeout = 60.0
    subject: Workload
    prepared: Prepared

    def setup(self, implementation: str, dtype: str) -> None:
        """Make the implementation ready; Absent is a NotImplementedError, which asv shows as n/a."""
        one_thread()
        self.prepared = Prepared(named(implementation, self.subject.operation), self.subject, dtype)

    def track_worst_ratio(self, implementation: str, dtype: str) -> float:
        """The largest error by its budget; above 1 is wrong."""
        return float(f"{self._worst().ratio:.4g}")

    track_worst_ratio.unit = "budgets"  # type: ignore[attr-defined]

    def track_lost_bits(self, implementation: str, dtype: str) -> float:
        """The dtype's bits of precision less those that are right on average."""
        return round(self._worst().lost_bits, 3)

    track_lost_bits.unit = "bits"  # type: ignore[attr-defined]

    def _worst(self) -> Accuracy:
        """The worst over the seeds, taken once for both metrics."""
        one = self.prepared
        said = repr((type(self).__name__, one.name, one.dtype))
        return Accuracy(**shared(said, lambda: asdict(worst_of(one))))


def worst_of(prepared: Prepared) -> Accuracy:
    """The worst accuracy over the seeds, whether it is within the budget or not.

    Raises judging.Wrong where a result has no finite error, or nothing of it can be judged.
    """
    found = [accuracy(prepared, number, prepared.fresh(number)(), limit=math.inf) for number in SEEDS]
    if not all(math.isfinite(one.ratio) and math.isfinite(one.lost_bits) for one in found):
        raise Wrong(f"{prepared.name}: no finite error at {prepared.workload.id}, or nothing to judge")
    return worst(found)


def _made(subject: Workload, dtypes: tuple[str, ...]) -> type:
    name = "".join(part.capitalize() for part in subject.operation.split("_"))
    name += "Backward" if subject in BACKWARD else ""
    known: dict[str, Any] = {"subject": subject, "params": (list(judged_at(subject)), list(dtypes))}
    return type(name, (_Accuracy,), {**known, "__module__": __name__, "__doc__": subject.operation})


preload()
for _subjects, _dtypes in ((FORWARD, DTYPES), (BACKWARD, GRADIENT_DTYPES)):
    for _one in _subjects:
        _class = _made(_one, _dtypes)
        globals()[_class.__name__] = _class
