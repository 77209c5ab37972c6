"""The report's tables: series grouped by metric, with first and latest value and how they changed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from veriformer.benchmarks.workloads import BY_ID
from veriformer.history.results import Benchmark, History, Series

NOTHING = "–"
SUITES = {"bench_costs": "workload", "bench_accuracy": "operation"}
"""What the benchmarks of a suite are about."""
MEANINGS = {
    "cost": "CPU time of a call by that of the yardstick, a frozen piece of NumPy; a timing, so the same code is now a "
    "little dearer, now cheaper, and more so on a busy machine.",
    "bytes": "What a call allocates; counted, so every difference is one.",
    "worst ratio": "The worst error by the error that the declared precision may make; above 1 is wrong.",
    "lost bits": "The dtype's bits of precision less those that are right on average.",
    "import cost": "CPU time of importing veriformer and its pytest plugin by that of importing NumPy.",
    "judging cost": "CPU time of judging one function at every pinned case, float32.",
    "thousand cases cost": "CPU time of a thousand drawn cases of the oracle law of attention.",
    "isolation cost": "Time of judging in a process of its own by that in the same one.",
    "call": "CPU seconds of a call.",
}
"""What is measured, by metric."""
TIMES = ("cost", "import cost", "judging cost", "thousand cases cost", "isolation cost", "call")
"""Metrics made of times, which a shared machine changes though the code is the same."""
NOISE = 1.5
"""A factor by which such a metric may differ without a meaning."""


@dataclass(frozen=True)
class Row:
    """One line of a table: a series and what is said of it."""

    series: Series

    @property
    def subject(self) -> str:
        """The workload or operation."""
        return self.series.benchmark.subject

    @property
    def parameters(self) -> str:
        """Implementation, and dtype where there is one."""
        return ", ".join(self.series.parameters)

    @cached_property
    def known(self) -> list[float]:
        """The values that there are, the oldest first."""
        return [value for value in self.series.values if value is not None]

    @property
    def since_first(self) -> str:
        """From the first value to the latest."""
        return change(self.known[0], self.known[-1]) if len(self.known) > 1 else NOTHING

    @property
    def since_previous(self) -> str:
        """From the value before to the latest, as words; a dash where the last commit has no value."""
        return change(*self.last_step) if self.last_step else NOTHING

    @property
    def last_step(self) -> tuple[float, float] | None:
        """The value before, and that of the last commit; None where either is missing."""
        if len(self.known) < 2 or self.series.values[-1] is None:
            return None
        return self.known[-2], self.known[-1]


@dataclass(frozen=True)
class Group:
    """One table: a metric of a suite. empty: what never had a value."""

    metric: str
    unit: str
    subject: str
    parameters: str
    rows: tuple[Row, ...]
    empty: tuple[str, ...]

    @property
    def title(self) -> str:
        """The heading."""
        return f"{self.metric.capitalize()} by {self.subject}" if self.subject else self.metric.capitalize()

    @property
    def meaning(self) -> str:
        """A sentence on what is measured, and in what."""
        unit = f" In {self.unit}." if self.unit not in ("", "unit") else ""
        return MEANINGS.get(self.metric, "") + unit

    @property
    def noise(self) -> float:
        """The factor within which two values count as the same."""
        return NOISE if self.metric in TIMES else 1.0

    @property
    def anchor(self) -> str:
        """The heading as a link's target."""
        return self.title.lower().replace(" ", "-")


def groups_of(history: History) -> list[Group]:
    """One group for each suite and metric, rows in the order of workloads."""
    gathered: dict[tuple[str, str], list[Series]] = {}
    for series in sorted(history.series, key=lambda series: _place(series.benchmark)):
        gathered.setdefault((series.benchmark.suite, series.benchmark.metric), []).append(series)
    groups = [_group(suite, metric, members) for (suite, metric), members in gathered.items()]
    return [group for group in groups if group.rows]


def _place(benchmark: Benchmark) -> tuple[int, int, int]:
    """Where a benchmark stands: by suite, metric, workload; what is not known comes last."""
    named = ((benchmark.suite, list(SUITES)), (benchmark.metric, list(MEANINGS)), (benchmark.subject, list(BY_ID)))
    suite, metric, subject = (known.index(name) if name in known else len(known) for name, known in named)
    return suite, metric, subject


def _group(suite: str, metric: str, members: Sequence[Series]) -> Group:
    rows = tuple(Row(series) for series in members if any(value is not None for value in series.values))
    first = members[0].benchmark
    names = ", ".join(first.parameters)
    return Group(metric, first.unit, SUITES.get(suite, ""), names, rows, tuple(_empty(members)))


def _empty(members: Sequence[Series]) -> Iterator[str]:
    """What has no value at any commit: a subject, or some of its parameters, in brackets."""
    gathered: dict[str, list[Series]] = {}
    for series in members:
        gathered.setdefault(series.benchmark.subject, []).append(series)
    for subject, all_of_it in gathered.items():
        without = [" ".join(series.parameters) for series in all_of_it if set(series.values) <= {None}]
        if len(without) == len(all_of_it):
            yield subject
        elif without:
            yield f"{subject} ({', '.join(without)})"


def number(value: float) -> str:
    """A value: whole numbers in full, others with four digits."""
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    return f"{value:,.0f}" if value == round(value) and abs(value) < 1e15 else f"{value:.4g}"


def change(before: float, after: float) -> str:
    """How a value changed, as words: =, +3.1 %, -50 %, ×9.14; the old value where a share means nothing."""
    if before == after:
        return "="
    if before <= 0 or not math.isfinite(after / before):
        return f"from {number(before)}"
    ratio = after / before
    return f"×{ratio:.3g}" if ratio >= 2 else f"{100 * (ratio - 1):+.3g} %"
