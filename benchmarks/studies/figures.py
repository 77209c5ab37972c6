"""How fast the suite itself is: `python benchmarks/studies/figures.py [FILE]` measures and writes a table.

Times are CPU or wall seconds of this machine at this moment; ratios are taken interleaved in one run.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings

from veriformer.catalogue import all_laws
from veriformer.checking import Report, Settings, judge, open_targets
from veriformer.law import find_laws
from veriformer.subject import attempt
from veriformer.targets import Options

TARGET = "veriformer.impls.torch_sdpa:default"
ROUNDS = 7


class Bench:
    """One torch attention function, opened and warmed up, so that imports and first calls do not count."""

    def __init__(self, isolate: bool, stack: ExitStack) -> None:
        self.settings = Settings(effort="smoke", isolate=isolate)
        self.implementations = list(open_targets([TARGET], Options(), self.settings, stack))
        self.seconds("smoke")

    def seconds(self, effort: str) -> float:
        """Wall seconds to judge it."""
        report = Report([], self.implementations, replace(self.settings, effort=effort))
        start = time.perf_counter()
        for _ in judge(report):
            pass
        return time.perf_counter() - start


def oracle_case(cases: int = 400) -> float:
    """Median seconds of one searched case of the oracle law, its draw included."""
    law = find_laws(all_laws(), ["attention/equals-the-reference"])[0]
    chosen = Settings(isolate=False)
    with ExitStack() as stack:
        implementation = next(iter(open_targets([TARGET], Options(), chosen, stack)))
        strategy = law.strategy(implementation.domain("attention", "float32"))
        stamps: list[float] = []

        @hypothesis.seed(0)
        @settings(max_examples=cases, phases=[Phase.generate], database=None, deadline=None,
                  suppress_health_check=list(HealthCheck))  # fmt: skip
        @given(strategy)
        def body(arguments: tuple[object, ...]) -> None:
            attempt(law, implementation, "float32", arguments)
            stamps.append(time.perf_counter())

        body()
    return statistics.median(b - a for a, b in zip(stamps[:-1], stamps[1:], strict=True))


def imported(module: str) -> float:
    """Median seconds that importing a module adds to a fresh interpreter with pytest imported."""
    code = f"import pytest, time; t = time.perf_counter(); import {module}; print(time.perf_counter() - t)"
    texts = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(5)]
    return statistics.median(float(text.stdout) for text in texts)


def measurements() -> list[tuple[str, str, str]]:
    """Every figure with what is wanted of it."""
    with ExitStack() as stack:
        apart, inside = Bench(True, stack), Bench(False, stack)
        pairs = [(apart.seconds("smoke"), inside.seconds("smoke")) for _ in range(ROUNDS)]
        smoke = statistics.median(one for one, _ in pairs)
        cost = statistics.median(one / other for one, other in pairs)
        ci = apart.seconds("ci")
    return [
        ("smoke of one torch attention function, isolated", f"{smoke:.2f} s", "2 s"),
        ("ci of the same", f"{ci:.1f} s", "25 s"),
        ("one oracle case with its draw, median", f"{1e3 * oracle_case():.2f} ms", "3 ms"),
        (f"isolated against in process, smoke, median of {ROUNDS} pairs", f"{cost:.2f}", "1.20"),
        ("importing the plugin alone", f"{1e3 * imported('veriformer.plugin'):.0f} ms", "50 ms"),
    ]


def main() -> None:
    """Measure, print, and write the table where a file is named."""
    rows = measurements()
    lines = ["| what | measured | wanted at most |", "|---|---|---|"]
    lines += [f"| {what} | {measured} | {wanted} |" for what, measured, wanted in rows]
    text = "\n".join(lines) + "\n"
    print(text)
    if len(sys.argv) > 1:
        head = "# How fast the suite is\n\nWritten by `python benchmarks/studies/figures.py reports/figures.md`.\n\n"
        Path(sys.argv[1]).write_text(head + text, encoding="utf-8")


if __name__ == "__main__":
    main()
