"""asv: what veriformer itself costs: its import, judging a function, a thousand cases, a process of its own.

Costs are ratios of two times taken in turn, so that they compare across machines; seconds stay with their machine.
What is judged is judged in copies of this process: each begins with everything imported and no budget calculated yet,
as a user's run does.
"""

from __future__ import annotations

import importlib
import os
import resource
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from .implementations import Absent, one_thread
from .measure import elapsed
from .yardstick import yardstick

TARGETS = {
    "torch attention": "veriformer.impls.torch_sdpa:default",
    "numpy softmax": "softmax=veriformer.impls.numpy_plain:softmax",
}
CASES = 100
"""So many of a thousand cases are run."""
YARDS = 50
"""Yardsticks before, and again after, each run."""


@contextmanager
def older_is_absent() -> Iterator[None]:
    """Raises Absent where an earlier version of the package lacks what is asked of it."""
    try:
        yield
    except (ImportError, AttributeError, TypeError, LookupError) as error:
        raise Absent(f"this version of the package has another interface: {error}") from error


def apart(call: Callable[[], Any]) -> float:
    """CPU seconds of a call in a copy of this process. Raises RuntimeError where the call raises."""
    pid, failed = os.fork(), 1
    if not pid:
        try:
            call()
            failed = 0
        except BaseException:  # of a copy nothing may get out
            traceback.print_exc()
        os._exit(failed)
    _, status, used = os.wait4(pid, 0)
    if status:
        raise RuntimeError(f"a run in a process of its own ended with status {status}; see above")
    return used.ru_utime + used.ru_stime


def used_here_and_apart() -> float:
    """CPU seconds of this process and of those that it waited for."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime


def in_yardsticks(call: Callable[[], Any], runs: int) -> float:
    """CPU time of a call by that of the yardstick before and after it, the median over runs."""
    found = []
    for _ in range(runs):
        before = elapsed([yardstick] * YARDS)
        seconds = apart(call)
        found.append(2 * YARDS * seconds / (before + elapsed([yardstick] * YARDS)))
    return statistics.median(found)


class Judge:
    """A target that is opened and can be judged, float32 alone unless all dtypes are wanted."""

    def __init__(self, target: str, stack: ExitStack, isolate: bool = False, dtypes: tuple[str, ...] = ()) -> None:
        checking, targets = (importlib.import_module(f"veriformer.{name}") for name in ("checking", "targets"))
        self.judge, self.report = checking.judge, checking.Report
        self.settings = checking.Settings(effort="smoke", isolate=isolate)
        self.settings = replace(self.settings, dtypes=dtypes) if dtypes else self.settings
        self.implementations = list(checking.open_targets([target], targets.Options(), self.settings, stack))

    def __call__(self) -> None:
        """Judge it once. Raises RuntimeError where nothing is found right: then little was done."""
        report = self.report([], self.implementations, self.settings)
        for _ in self.judge(report):
            pass
        if not any(row.verdict == "pass" for row in report.rows):
            raise RuntimeError("no law was judged and held")


class Import:
    """What importing the package and its pytest plugin adds to an interpreter that has pytest."""

    version = "1"
    timeout = 120.0
    PAIRS = 9

    def setup(self) -> None:
        """Absent where there is no plugin yet."""
        with older_is_absent():
            importlib.import_module("veriformer.plugin")

    def track_import_cost(self) -> float:
        """CPU time of importing veriformer and veriformer.plugin by that of importing NumPy, in turn."""
        ours, numpy = "import veriformer, veriformer.plugin", "import numpy"
        return round(statistics.median(self.taken(ours) / self.taken(numpy) for _ in range(self.PAIRS)), 3)

    track_import_cost.unit = "imports of NumPy"  # type: ignore[attr-defined]

    def timeraw_import(self) -> tuple[str, str]:
        """Seconds of the same."""
        return "import veriformer, veriformer.plugin", "import pytest"

    timeraw_import.number, timeraw_import.repeat = 1, 5  # type: ignore[attr-defined]

    @staticmethod
    def taken(statement: str) -> float:
        """CPU seconds of an import statement in a fresh interpreter."""
        clock = "time.process_time()"
        code = f"import time, pytest; start = {clock}; {statement}; print({clock} - start)"
        code = code.replace(", pytest", "") if "numpy" in statement else code
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        return float(done.stdout)


class Judging:
    """Judging one function at smoke effort, in process, float32 alone."""

    params = (list(TARGETS),)
    param_names = ("function",)
    version = "1"
    timeout = 300.0
    timer = staticmethod(used_here_and_apart)
    rounds, repeat, number, warmup_time = 1, 1, 1, 0.0

    def setup(self, function: str) -> None:
        """Open the target."""
        one_thread()
        self.stack = ExitStack()
        with older_is_absent():
            self.judge = Judge(TARGETS[function], self.stack, dtypes=("float32",))

    def teardown(self, function: str) -> None:
        """Close it."""
        self.stack.close()

    def track_judging_cost(self, function: str) -> float:
        """CPU time of judging it."""
        return float(f"{in_yardsticks(self.judge, 3):.4g}")

    track_judging_cost.unit = "yardsticks"  # type: ignore[attr-defined]

    def time_judging(self, function: str) -> None:
        """CPU seconds of judging it."""
        apart(self.judge)


class Isolation:
    """A process of its own for what is judged, float32 alone."""

    version = "1"
    timeout = 120.0
    PAIRS = 5

    def setup(self) -> None:
        """Open one attention function twice, and judge it once each, so that budgets are calculated before."""
        one_thread()
        self.stack = ExitStack()
        with older_is_absent():
            target, dtypes = TARGETS["torch attention"], ("float32",)
            self.both = [Judge(target, self.stack, isolate, dtypes) for isolate in (True, False)]
        for judge in self.both:
            judge()

    def teardown(self) -> None:
        """End the process."""
        self.stack.close()

    def track_isolation_cost(self) -> float:
        """Time of judging it there by that of judging it in this process, in turn; time on the clock."""
        pairs = []
        for turn in range(self.PAIRS):
            taken = {place: self.clocked(self.both[place]) for place in ((0, 1) if turn % 2 else (1, 0))}
            pairs.append(taken[0] / taken[1])
        return round(statistics.median(pairs), 3)

    track_isolation_cost.unit = "runs in process"  # type: ignore[attr-defined]

    @staticmethod
    def clocked(judge: Judge) -> float:
        """Seconds on the clock."""
        start = time.perf_counter()
        judge()
        return time.perf_counter() - start


class Cases:
    """A thousand drawn cases of the oracle law of attention, draw and judgement, float32."""

    version = "1"
    timeout = 300.0
    timer = staticmethod(used_here_and_apart)
    rounds, repeat, number, warmup_time = 1, 1, 1, 0.0

    def setup(self) -> None:
        """Open the function and find the law."""
        one_thread()
        self.stack = ExitStack()
        with older_is_absent():
            judge = Judge(TARGETS["torch attention"], self.stack)
            self.run = drawn(judge.implementations[0], CASES)

    def teardown(self) -> None:
        """Close the function."""
        self.stack.close()

    def track_thousand_cases_cost(self) -> float:
        """CPU time of a thousand, by a tenth of them."""
        return float(f"{in_yardsticks(self.run, 3) * 1000 / CASES:.4g}")

    track_thousand_cases_cost.unit = "yardsticks"  # type: ignore[attr-defined]

    def time_hundred_cases(self) -> None:
        """CPU seconds of a hundred."""
        apart(self.run)


def drawn(implementation: Any, cases: int) -> Callable[[], None]:
    """A run of the oracle law of attention on so many cases that are drawn, always the same ones."""
    import hypothesis
    from hypothesis import HealthCheck, Phase, given, settings

    catalogue, law, subject = (
        importlib.import_module(f"veriformer.{name}") for name in ("catalogue", "law", "subject")
    )
    chosen = law.find_laws(catalogue.all_laws(), ["attention/equals-the-reference"])[0]
    strategy, seen = chosen.strategy(implementation.domain("attention", "float32")), [0]
    attempt = subject.attempt

    @hypothesis.seed(0)
    @settings(max_examples=cases, phases=[Phase.generate], database=None, deadline=None,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(strategy)
    def body(arguments: tuple[object, ...]) -> None:
        attempt(chosen, implementation, "float32", arguments)
        seen[0] += 1

    def run() -> None:
        body()
        if seen[0] < cases:
            raise RuntimeError(f"{seen[0]} of {cases} cases were drawn")

    return run
