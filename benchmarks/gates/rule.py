"""When two times differ: ratios of pairs, an interval that assumes no distribution, and a second look.

Times of a shared machine have no known distribution, but pairs taken one right after the other have a ratio whose
median hardly moves. With n independent ratios, the k-th smallest lies above their true median only if fewer than k
of them lie below it, which has the probability sum over i < k of C(n, i) / 2^n, whatever the distribution (the sign
test turned round; David and Nagaraja, Order Statistics, 3rd edition 2003, section 7.1). `rank` is the largest k for
which that is at most ERROR.

A cell is slower if, in each of two runs of pairs, taken apart from one another,
- the median ratio, head by base, is above LIMIT, and
- the k-th smallest ratio is above MARGIN.

False alarms. Code that is unchanged has a true median of 1, plus what its place in memory does: the same source
loaded twice can differ by some per cent (Mytkowicz, Diwan, Hauswirth, Sweeney, ASPLOS 2009), and MARGIN allows 10. As
long as the true median is at most MARGIN, one run fires with a probability of at most ERROR = 0.001, both with at
most 0.000001, and any of 100 cells with at most 0.0001. That is for independent pairs. Bursts of other work outlast a
pair, so pairs are not quite independent; against that stand the order within a pair, which alternates, the time
between the two runs, and LIMIT: of 180 medians of unchanged code, taken on two cores at a load of 2.3 to 3.8, all
were between 0.91 and 1.14, and the largest lower end of an interval was 1.02.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from veriformer.benchmarks.judging import Wrong
from veriformer.benchmarks.measure import PAIRS
from veriformer.boundary import describe_error

LIMIT = 1.25
"""Less is not called slower: shared machines do not tell it from noise (others' gates at 1.1 fire on every tenth)."""
MARGIN = 1.1
"""What unchanged code may differ by, loaded twice."""
ERROR = 0.001
"""With what probability one end of an interval lies beyond the true median."""


def rank(count: int) -> int:
    """The largest k such that the k-th smallest of count ratios is above the true median with probability ERROR.

    Raises ValueError where even the smallest is above it more often.
    """
    below, k = 0.0, 0
    while (below := below + math.comb(count, k) / 2**count) <= ERROR:
        k += 1
    if k == 0:
        raise ValueError(f"{count} pairs are too few for an interval")
    return k


@dataclass(frozen=True)
class Run:
    """One run of pairs: the median of their ratios, head by base, and the interval of the true median."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, ratios: Sequence[float]) -> Run:
        """Raises ValueError for fewer than PAIRS ratios, and for one that is no positive number."""
        if len(ratios) < PAIRS:
            raise ValueError(f"{len(ratios)} pairs, wanted at least {PAIRS}")
        if not all(0 < ratio < math.inf for ratio in ratios):
            raise ValueError("a ratio of times that is no positive number: a sample was too short for the clock")
        ordered, k = sorted(ratios), rank(len(ratios))
        return cls(statistics.median(ordered), ordered[k - 1], ordered[-k])

    @property
    def slower(self) -> bool:
        """Whether head seems slower in this run."""
        return self.median > LIMIT and self.low > MARGIN


class Unmatched(Exception):
    """Base is wrong or broken, so there is nothing to time head against: no fault of head."""


Wanted = Callable[[str], bool]
"""Whether a user wants a contest of this name."""


@dataclass(frozen=True)
class Contest:
    """Something of both commits to time: its name, what is timed and whose it is, and how to take pairs.

    take: ratios, head by base, of one run, by what is timed; it may raise anything, which is a failure. remarked: of
    these, why what is timed never fails, but is only mentioned.
    """

    name: str
    who: str
    take: Callable[[], Mapping[str, Sequence[float]]]
    remarked: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Timing:
    """What was found: one run, or two where the first seemed slower."""

    what: str
    who: str
    runs: tuple[Run, ...]

    @property
    def slower(self) -> bool:
        """Whether head is slower."""
        return len(self.runs) > 1 and all(run.slower for run in self.runs)

    @property
    def verdict(self) -> str:
        """In words."""
        if self.slower:
            return "SLOWER"
        return "not confirmed" if len(self.runs) > 1 else "ok"


@dataclass
class Found:
    """All timings; failures and remarks, a line each.

    untimed: files without an operation that any workload times. due: whether anything differs that can be timed.
    unmatched: whether something of base was wrong or broken.
    """

    timings: list[Timing] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    untimed: list[str] = field(default_factory=list)
    due: bool = False
    unmatched: bool = False

    def unmatch(self, what: str) -> None:
        """Remark on something of base that nothing can be timed against."""
        self.remarks.append(f"{what}: nothing to time against")
        self.unmatched = True

    @property
    def failed(self) -> bool:
        """Whether anything is slower or wrong, or was due and not timed."""
        nothing = self.due and not (self.timings or self.unmatched)
        return nothing or bool(self.failures) or any(timing.slower for timing in self.timings)


def timed(contests: Iterable[Contest], found: Found) -> None:
    """Take every contest; once more, after all of them, what seemed slower."""
    again: list[tuple[Contest, list[Timing]]] = []
    for contest in contests:
        runs = _runs(contest, found)
        for what, why in contest.remarked.items():
            if run := runs.pop(what, None):
                numbers = f"{run.median:.2f} of base's ({run.low:.2f}-{run.high:.2f})"
                found.remarks.append(f"{what} {contest.who}: {numbers}, which never fails: {why}")
        first = [Timing(what, contest.who, (run,)) for what, run in runs.items()]
        found.timings += [timing for timing in first if not timing.runs[0].slower]
        if doubtful := [timing for timing in first if timing.runs[0].slower]:
            again.append((contest, doubtful))
    for contest, doubtful in again:
        second = _runs(contest, found)
        found.timings += [
            Timing(one.what, one.who, (*one.runs, second[one.what])) for one in doubtful if one.what in second
        ]


def _runs(contest: Contest, found: Found) -> dict[str, Run]:
    try:
        return {what: Run.of(ratios) for what, ratios in contest.take().items()}
    except Unmatched as unmatched:
        found.unmatch(f"{contest.name}: {unmatched}")
        return {}
    except (Exception, SystemExit) as error:  # an implementation may raise whatever it likes
        what = str(error) if isinstance(error, Wrong) else describe_error(error)
        found.failures.append(f"{contest.name}: {what}")
        return {}
