"""How time and memory are taken: in turn with the yardstick, on fresh inputs, of results that are checked.

CPU time of this process, one thread. A cost is the median over pairs of (a call, the yardstick) taken one right
after the other, which what else the machine does moves little. Every call has inputs of its own, which alternate
between NUMBERS; results are judged before, and afterwards those of one call in the middle and of the last.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .implementations import Prepared
from .judging import Accuracy, accuracy
from .memory import allocated
from .yardstick import yardstick

PAIRS = 41
NUMBERS = (0, 1, 2)
"""Inputs that calls alternate between."""
SAMPLE = 0.002
"""Seconds that one sample lasts at least, as far as MOST calls reach."""
MOST = 16


@dataclass(frozen=True)
class Cost:
    """What a call costs. cost: yardsticks. seconds: CPU seconds, median. accuracy: the worst of what was judged."""

    cost: float
    seconds: float
    accuracy: Accuracy


def judged(prepared: Prepared, number: int) -> Accuracy:
    """The accuracy of one call. Raises judging.Wrong where it is wrong."""
    return accuracy(prepared, number, prepared.fresh(number)())


def cost_of(prepared: Prepared, pairs: int = PAIRS) -> Cost:
    """What a call costs, in yardsticks and seconds.

    Raises judging.Wrong where a result before, in between or after is wrong.
    """
    found = [judged(prepared, number) for number in NUMBERS[:2]]
    once, unit = elapsed([prepared.fresh(0)]), min(elapsed([yardstick]) for _ in range(5))
    count = max(1, min(MOST, math.ceil(SAMPLE / max(once, 1e-7))))
    units = max(4, round(count * once / unit))
    kept: dict[int, tuple[int, Any]] = {}
    ratios, times = [], []
    for turn in range(pairs):
        number = NUMBERS[turn % len(NUMBERS)]
        mine, other, returned = one_pair([prepared.fresh(number) for _ in range(count)], units, bool(turn % 2))
        ratios.append(mine / count / (other / units))
        times.append(mine / count)
        if turn in (pairs // 2, pairs - 1):
            kept[turn] = number, returned
    found += [accuracy(prepared, number, returned) for number, returned in kept.values()]
    worst = Accuracy(max(a.ratio for a in found), max(a.lost_bits for a in found))
    return Cost(statistics.median(ratios), statistics.median(times), worst)


def one_pair(calls: list[Callable[[], Any]], units: int, last: bool) -> tuple[float, float, Any]:
    """CPU seconds of calls and of so many yardsticks, whichever first, and what the last call returned.

    There are as many yardsticks as take as long as the calls: where a machine's host takes time away in bursts,
    a shorter sample would be spared more often than a longer one.
    """
    other = elapsed([yardstick] * units) if last else 0.0
    mine, returned = timed(calls)
    return mine, other if last else elapsed([yardstick] * units), returned


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
