"""A contest: our implementations and those that a user would pick instead, the same work, timed in turn.

CPU time of this process on one thread, the median of ROUNDS rounds in each of which every entrant takes a sample of
about equal length. Nobody is timed whose results differ from the first entrant's by more than `tolerance`, who raises,
or who has not got what he needs installed.
"""

from __future__ import annotations

import contextlib
import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

ROUNDS = 15
SAMPLE = 0.02
"""Seconds that a sample lasts at least; it is one call at least."""
Call = Callable[[], Any]
Maker = Callable[[], Call]
"""Makes everything that a call needs (weights, compiled code) and returns the call; warming up is not timed."""


@dataclass(frozen=True)
class Prepared:
    """A call that something comes before, each time, which is not timed: what it works on is made anew."""

    prepare: Callable[[], Any]
    call: Call

    def __call__(self) -> Any:
        """Both, one after the other."""
        self.prepare()
        return self.call()


class Unfit(Exception):
    """An entrant that cannot be timed here, and why."""


@dataclass(frozen=True)
class Contest:
    """One piece of work.

    ours, others: makers of calls by name; calls return what the work gives, tensors or arrays, lists or dicts of them.
    limit: what the fastest of ours may take of the fastest of the others, or of `against` alone. tolerance: largest
    difference from the first entrant's results, relative to their largest entry. flops, bytes: least arithmetic and
    memory traffic of a call. rounds: how many. calls: how many calls at most in a sample. note: what else is to be
    known. limits: an own limit and rival by entrant of ours, (limit, rival), besides.

    Raises ValueError where `against` or `limits` name somebody who is no entrant.
    """

    id: str
    what: str
    ours: Mapping[str, Maker]
    others: Mapping[str, Maker]
    limit: float = 1.0
    against: str = ""
    tolerance: float = 1e-4
    flops: float = 0.0
    bytes: float = 0.0
    rounds: int = ROUNDS
    calls: int = 1000
    note: str = ""
    limits: Mapping[str, tuple[float, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rivals = {rival for _, rival in self.limits.values()} | ({self.against} if self.against else set())
        strange = sorted(rivals - {*self.ours, *self.others} | set(self.limits) - set(self.ours))
        if strange or set(self.ours) & set(self.others):
            raise ValueError(f"{self.id}: {strange or 'somebody of ours'}: wanted names of entrants, each once")


@dataclass
class Timed:
    """An entrant's samples: CPU seconds of a call in each round."""

    name: str
    own: bool
    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """CPU seconds of a call."""
        return statistics.median(self.seconds)


@dataclass
class Outcome:
    """What came of a contest. absent: who could not be timed here, and why; wrong: who must not be, and why."""

    contest: Contest
    entrants: list[Timed]
    absent: dict[str, str]
    wrong: dict[str, str] = field(default_factory=dict)

    def ratio(self, name: str, rival: str) -> float:
        """Median over rounds of the time of one by that of the other."""
        return statistics.median(self._ratios(name, rival))

    def quartiles(self, name: str, rival: str) -> tuple[float, float]:
        """Quartiles over rounds of the same."""
        low, high = np.quantile(self._ratios(name, rival), (0.25, 0.75)).tolist()
        return low, high

    def _ratios(self, name: str, rival: str) -> list[float]:
        one, other = (next(e for e in self.entrants if e.name == wanted) for wanted in (name, rival))
        return [a / b for a, b in zip(one.seconds, other.seconds, strict=True)]

    def best(self, own: bool) -> Timed | None:
        """The fastest of ours, or of the others."""
        return min((e for e in self.entrants if e.own == own), key=lambda e: e.median, default=None)


def hold(contest: Contest) -> Outcome:
    """Time everyone who is right, in turn."""
    calls: dict[str, Call] = {}
    outcome = Outcome(contest, [], {})
    _get_ready(contest, calls, outcome)
    outcome.entrants = [Timed(name, name in contest.ours) for name in calls]
    counts = {name: _count(call, contest.calls) for name, call in calls.items()}
    order, shuffling = list(outcome.entrants), random.Random(contest.id)
    for _ in range(contest.rounds):
        shuffling.shuffle(order)  # or else each would always find the caches as the same other one left them
        for one in order:
            one.seconds.append(_sample(calls[one.name], counts[one.name]))
    return outcome


def _get_ready(contest: Contest, calls: dict[str, Call], outcome: Outcome) -> None:
    """Put in the calls of those who give the same results, and why the others are not among them."""
    wanted: list[np.ndarray] | None = None
    for name, make in {**contest.ours, **contest.others}.items():
        try:
            call = make()
            results = flat(call())
        except ImportError as error:
            outcome.absent[name] = f"{error.name or error} is not installed"
        except Unfit as error:
            outcome.absent[name] = str(error)
        except Exception as error:  # whatever one of many programs of others raises; the rest are still timed
            outcome.wrong[name] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:100]}"
        else:
            off = 0.0 if wanted is None else difference(results, wanted)
            if off <= contest.tolerance:
                wanted, calls[name] = results if wanted is None else wanted, call
            else:
                outcome.wrong[name] = f"differs by {off:.1g} from {next(iter(calls))}"


def flat(results: Any) -> list[np.ndarray]:
    """Every array in what a call returned, as float64."""
    if isinstance(results, Mapping):
        results = list(results.values())
    if isinstance(results, (list, tuple)):
        return [array for one in results for array in flat(one)]
    if hasattr(results, "detach"):
        results = results.detach().double()
    return [np.array(results, dtype=np.float64)]


def difference(results: list[np.ndarray], wanted: list[np.ndarray]) -> float:
    """The largest difference of each array, relative to its largest entry; infinite where shapes differ."""
    if [a.shape for a in results] != [a.shape for a in wanted]:
        return float("inf")
    pairs = zip(results, wanted, strict=True)
    found = [float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30)) for a, b in pairs if a.size]
    return float("inf") if any(np.isnan(found)) else max(found, default=0.0)


def _count(call: Call, most: int) -> int:
    """Calls that last SAMPLE together; whoever may be called once only is not tried out."""
    if most == 1:
        return 1
    once = min(_sample(call, 1) for _ in range(3))
    return max(1, min(most, round(SAMPLE / max(once, 1e-7))))


def _sample(call: Call, count: int) -> float:
    """CPU seconds of a call, the mean of so many; those of a prepared one are timed one by one."""
    taken = 0.0
    with _no_pauses():
        if isinstance(call, Prepared):
            for _ in range(count):
                call.prepare()
                start = time.process_time()
                call.call()
                taken += time.process_time() - start
        else:
            start = time.process_time()
            for _ in range(count):
                call()
            taken = time.process_time() - start
    return max(taken, 1e-9) / count


@contextlib.contextmanager
def _no_pauses() -> Iterator[None]:
    """No search for garbage inside."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
