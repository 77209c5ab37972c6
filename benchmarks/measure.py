"""How time and memory are taken: in turn with the yardstick, on fresh inputs, of results that are checked.

CPU time of this process, one thread. A cost is the median over pairs of (a call, the yardstick) taken one right
after the other, which what else the machine does moves little. Every call has inputs that no call had before, so
that nobody can look a result up; results are judged before, and afterwards those of one call in the middle and of the
last.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from .implementations import Prepared
from .judging import Accuracy, accuracy, inputs_of, keeps_contract, worst
from .memory import allocated
from .yardstick import yardstick

PAIRS = 41
NUMBERS = (0, 1)
"""Numbers of the inputs whose results are judged before anything is timed."""
SAMPLE = 0.002
"""Seconds that one sample lasts at least, as far as MOST calls reach."""
MOST = 128
_USED = itertools.count(2)
"""Blocks of MOST numbers; each is used once in a process."""


@dataclass(frozen=True)
class Cost:
    """What a call costs. cost: yardsticks. seconds: CPU seconds, median. accuracy: the worst of what was judged."""

    cost: float
    seconds: float
    accuracy: Accuracy


class Source(Protocol):
    """Where calls come from: `Prepared`, or the yardstick."""

    def fresh(self, number: int, /) -> Callable[[], Any]:
        """A call on inputs of its own."""


class Yardstick:
    """The yardstick as a source of calls; its inputs are always the same."""

    def fresh(self, number: int, /) -> Callable[[], Any]:
        """The yardstick."""
        return yardstick


@dataclass
class Pairs:
    """What was taken of two sources in turn.

    ratios: time of a call of the one by that of a call of the other, one for each pair. seconds: CPU seconds of a
    call of each. kept: (number, result) of each, from a pair in the middle and from the last.
    """

    ratios: list[float] = field(default_factory=list)
    seconds: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    kept: tuple[list[tuple[int, Any]], list[tuple[int, Any]]] = field(default_factory=lambda: ([], []))


def judged(prepared: Prepared, number: int) -> Accuracy:
    """The accuracy of one call; of a training also of the forward pass, which no call returns.

    Raises judging.Wrong where it is wrong, writes into its inputs, or gives another dtype.
    """
    calls = (prepared.forward(), prepared) if prepared.workload.direction == "training" else (prepared,)
    return worst([judged_call(call, number) for call in calls])


def judged_call(prepared: Prepared, number: int) -> Accuracy:
    """The accuracy of one call as it is made, and whether it keeps to its contract."""
    call = prepared.fresh(number)
    before = inputs_of(prepared)
    returned = call()
    keeps_contract(prepared, before, returned)
    return accuracy(prepared, number, returned)


def cost_of(prepared: Prepared, pairs: int = PAIRS) -> Cost:
    """What a call costs, in yardsticks and seconds.

    Raises judging.Wrong where a result before, in between or after is wrong.
    """
    found = [judged(prepared, number) for number in NUMBERS]
    taken = in_turn(prepared, Yardstick(), pairs)
    found += [accuracy(prepared, number, returned) for number, returned in taken.kept[0]]
    return Cost(statistics.median(taken.ratios), statistics.median(taken.seconds[0]), worst(found))


def in_turn(one: Source, other: Source, pairs: int = PAIRS) -> Pairs:
    """Calls of two sources in turn, each pair the other way round than the one before it.

    A sample is as many calls as last SAMPLE together, of either source about as long: where a machine's host takes
    time away in bursts, a shorter sample would be spared more often than a longer one.
    """
    sources, found = (one, other), Pairs()
    once = [min(elapsed([source.fresh(0)]) for _ in range(3)) for source in sources]
    longest = max(SAMPLE, *once)
    counts = [max(1, min(MOST, round(longest / max(seconds, 1e-7)))) for seconds in once]
    for turn in range(pairs):
        number, each = next(_USED) * MOST, [0.0, 0.0]
        for side in (0, 1) if turn % 2 else (1, 0):
            calls = [sources[side].fresh(number - i) for i in range(counts[side])]
            seconds, returned = timed(calls)
            each[side] = seconds / counts[side]
            found.seconds[side].append(each[side])
            if turn in (pairs // 2, pairs - 1):
                found.kept[side].append((number - counts[side] + 1, returned))
        found.ratios.append(each[0] / each[1])
    return found


def timed(calls: list[Callable[[], Any]]) -> tuple[float, Any]:
    """CPU seconds that calls take together, without pauses for garbage, and what the last one returned."""
    enabled, returned = gc.isenabled(), None
    gc.disable()
    try:
        start = time.process_time()
        for call in calls:
            returned = call()
        return time.process_time() - start, returned
    finally:
        if enabled:
            gc.enable()


def elapsed(calls: list[Callable[[], Any]]) -> float:
    """CPU seconds that calls take together."""
    return timed(calls)[0]


def bytes_of(prepared: Prepared) -> int:
    """Bytes that one call allocates for arrays, after two calls that may fill what is kept.

    Raises judging.Wrong where its result is wrong.
    """
    judged(prepared, 0)
    for _ in range(2):
        prepared.fresh(0)()
    return allocated(prepared.fresh(0), prepared.framework.name)
