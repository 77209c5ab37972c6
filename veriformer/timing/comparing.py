"""A workload's comparison: who is right is timed, in turn with the target, and held against the machine's limit."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from veriformer.benchmarks.implementations import Absent, Prepared
from veriformer.benchmarks.judging import Wrong
from veriformer.benchmarks.limits import Limits, limit_of
from veriformer.benchmarks.measure import PAIRS, SAMPLE, Pairs, Source, Yardstick, bytes_of, elapsed, in_turn
from veriformer.benchmarks.workloads import Workload
from veriformer.boundary import describe_error
from veriformer.timing.entrants import Target, baseline, baselines, checked, prepared, right

FEWEST = 11
SECONDS = 1.5
"""Seconds that the pairs of two implementations take together, as far as FEWEST pairs allow."""


@dataclass
class Entrant:
    """Someone at a workload.

    worst: of the error budget. words: how the user named the target; empty for a baseline. seconds: of a call, in
    each sample. ratios: that by the first target's. bytes: allocated by a call.
    """

    ready: Prepared
    worst: float
    words: str = ""
    seconds: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    bytes: int = 0


@dataclass(frozen=True)
class Entry:
    """A row of the table.

    ratio: CPU time of a call by that of the first target's, median over pairs taken in turn; spread: its quartiles.
    seconds: of a call, the first target's median times the ratio, so that rows compare though the machine's pace
    changes in between; sampled: the median of its own samples. bytes: allocated by a call. fraction: of the machine's
    limit, the limit by the seconds. worst: of the error budget, NaN where nothing is determined.
    """

    name: str
    target: bool
    seconds: float
    ratio: float
    spread: tuple[float, float]
    bytes: int
    fraction: float
    worst: float
    sampled: float
    pairs: int


@dataclass(frozen=True)
class Refusal:
    """Someone who is wrong and not timed. words: how the user named the target; empty for a baseline."""

    name: str
    reason: str
    words: str = ""

    def line(self, flags: str = "") -> str:
        """What is wrong, and for a target where to learn more; flags: as the user gave them, with a blank before."""
        more = (self.words if "=" in self.words else self.name) + flags
        return f"WRONG  {self.reason}; not timed" + (f"; `veriformer check {more}` tells more" if self.words else "")


@dataclass
class Comparison:
    """What came of a workload. limit: seconds. entries: fastest first. absent: who cannot do it, and why."""

    workload: Workload
    limit: float
    entries: list[Entry] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)

    @property
    def wrong(self) -> bool:
        """Whether a target is wrong."""
        return any(one.words for one in self.refused)


def compare(
    workload: Workload, targets: Sequence[Target], limits: Limits, most: int = PAIRS, others: bool = True
) -> Comparison:
    """Targets beside baselines (others: whether there are any) at one workload; at most so many pairs of each."""
    found = Comparison(workload, limit_of(workload, limits))
    mine = [one for one in targets if workload.operation in one.loaded.boundaries]
    alive = [one for one in mine if _lives(found, one)]
    ours = _admitted(found, [(partial(prepared, one.loaded, workload), one.words) for one in alive])
    names = baselines(workload, [one.name for one in mine]) if ours and others else []
    theirs = _admitted(found, [(partial(baseline, name, workload), "") for name in names])
    while ours and not found.entries:  # again without the first target where that turned out wrong
        _time(found, ours[0], [*ours[1:], *theirs], most)
        _fill(found, ours[0], [*ours, *theirs])
        ours, theirs = _left(found, ours), _left(found, theirs)
    return found


def _lives(found: Comparison, one: Target) -> bool:
    """Whether a target may be called; where its process ended in a first call, the comparison says so."""
    if one.ending is None:
        return True
    reason = f"{one.name} {one.ending.reason} at {one.ending.workload}"
    if one.ending.workload == found.workload.id:
        found.refused.append(Refusal(one.name, reason, one.words))
    else:
        found.absent.append(reason)
    return False


def _left(found: Comparison, entrants: Sequence[Entrant]) -> list[Entrant]:
    """Those who are not refused, with no times yet."""
    return [Entrant(one.ready, one.worst, one.words) for one in entrants if not _out(found, one)]


def _out(found: Comparison, one: Entrant) -> bool:
    return one.ready.name in [refusal.name for refusal in found.refused]


def _admitted(found: Comparison, makers: Sequence[tuple[Callable[[], Prepared], str]]) -> list[Entrant]:
    """Whoever can do the workload and is right; the comparison says why the others are not among them."""
    entrants = []
    for make, words in makers:
        try:
            ready = make()
        except Absent as absent:
            found.absent.append(str(absent))
            continue
        try:
            entrants.append(Entrant(ready, checked(ready).ratio, words))
        except Wrong as wrong:
            found.refused.append(Refusal(ready.name, str(wrong), words))
    return entrants


def _time(found: Comparison, first: Entrant, others: Sequence[Entrant], most: int) -> None:
    """Time each of the others in turn with the first; the first alone in turn with the yardstick."""
    for other in others:
        if _out(found, first):
            return
        taken = _taken(found, other, first, most)
        other.ratios = taken.ratios if taken else []
        _keep(found, other, taken, 0)
        _keep(found, first, taken, 1)
    if not first.seconds and not _out(found, first):
        _keep(found, first, _taken(found, first, None, most), 0)


class Watched:
    """A source that keeps in mind whether it raised."""

    def __init__(self, source: Source) -> None:
        self.source, self.raised = source, False

    def fresh(self, number: int, /) -> Callable[[], Any]:
        """The source's call."""
        call = self._watched(lambda: self.source.fresh(number))
        return lambda: self._watched(call)

    def _watched(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except (Exception, SystemExit):
            self.raised = True
            raise


def _taken(found: Comparison, one: Entrant, other: Entrant | None, most: int) -> Pairs | None:
    """Calls in turn (other: None for the yardstick), as many pairs as there is time for.

    None where one raises, who is refused.
    """
    sources = Watched(one.ready), Watched(other.ready if other else Yardstick())
    try:
        once = max(SAMPLE, *(elapsed([source.fresh(0)]) for source in sources))
        return in_turn(*sources, min(most, max(FEWEST, round(SECONDS / (2 * once)))))
    except (Exception, SystemExit) as error:
        suspect = other if other and sources[1].raised else one
        _refuse(found, suspect, f"{suspect.ready.name} raised {describe_error(error)} while it was timed")
        return None


def _keep(found: Comparison, entrant: Entrant, taken: Pairs | None, side: int) -> None:
    """Keep one side's seconds, and judge the results that were kept of it."""
    if taken is None:
        return
    entrant.seconds += taken.seconds[side]
    try:
        later = [right(entrant.ready, number, returned).ratio for number, returned in taken.kept[side]]
    except Wrong as wrong:
        _refuse(found, entrant, f"{wrong}, in a later call")
        return
    entrant.worst = max(entrant.worst, *later)


def _count(found: Comparison, one: Entrant) -> None:
    """Count its bytes; that is a call more, which may be the first that is wrong, or raise."""
    try:
        one.bytes = bytes_of(one.ready)
    except Wrong as wrong:
        _refuse(found, one, f"{wrong}, in a later call")
    except (Exception, SystemExit) as error:
        _refuse(found, one, f"{one.ready.name} raised {describe_error(error)} while its bytes were counted")


def _refuse(found: Comparison, entrant: Entrant, reason: str) -> None:
    if not _out(found, entrant):
        found.refused.append(Refusal(entrant.ready.name, reason, entrant.words))


def _fill(found: Comparison, first: Entrant, entrants: Sequence[Entrant]) -> None:
    """The rows, fastest first: of who was timed and never found wrong; ratios need the first among them."""
    for one in entrants:
        if one.seconds and not _out(found, one):
            _count(found, one)
    if not _out(found, first):
        unit = statistics.median(first.seconds)
        rows = [_entry(found, one, unit) for one in entrants if one.seconds and not _out(found, one)]
        found.entries = sorted(rows, key=lambda row: row.seconds)


def _entry(found: Comparison, one: Entrant, unit: float) -> Entry:
    """The row of someone; the first, who has no ratios, is 1 to itself. unit: seconds of a call of the first."""
    low, ratio, high = statistics.quantiles(one.ratios or [1.0, 1.0], n=4)
    return Entry(
        one.ready.name, bool(one.words), ratio * unit, ratio, (low, high), one.bytes,
        found.limit / (ratio * unit), one.worst, statistics.median(one.seconds), len(one.seconds),
    )  # fmt: skip
