"""How much of their error budgets correct implementations use: `python benchmarks/studies/ratios.py [FILE]`.

For each operation and dtype, quantiles of a case's worst ratio (error / budget; above 1 is an accusation),
over the pinned and the drawn cases of the laws that compare with the reference, forward and gradients.
"""

from __future__ import annotations

import argparse
import statistics
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings

from veriformer.catalogue import all_laws
from veriformer.checking import Settings, open_targets
from veriformer.declarations import DTYPES
from veriformer.expect import Refused, recording
from veriformer.known import holds
from veriformer.law import Law
from veriformer.operations import OPERATIONS
from veriformer.running import Item
from veriformer.subject import Implementation, attempt
from veriformer.targets import Options

LAWS = ("equals-the-reference", "gradient-equals-the-reference")
HEAD = """# How much of the error budget correct implementations use

Written by `python benchmarks/studies/ratios.py reports/ratios.md`: worst ratio of each case, error divided by
budget, over all implementations that come with the package, seed {seed}, at most {count} drawn cases an item.
Above 1 a law accuses.

"""


def arguments_of(law: Law, implementation: Implementation, dtype: str, seed: int, count: int) -> Iterator[Any]:
    """Pinned arguments, then drawn ones as a run with this seed would begin to draw them."""
    domain = implementation.domain(law.operation, dtype)
    yield from law.pinned(domain)
    drawn: list[Any] = []
    quiet = settings(
        max_examples=count,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    number = zlib.crc32(f"{law.id} {dtype} {seed}".encode())

    def keep(arguments: Any) -> None:
        drawn.append(arguments)

    hypothesis.seed(number)(quiet(given(law.strategy(domain))(keep)))()
    yield from drawn


def ratios(law: Law, implementation: Implementation, dtype: str, seed: int, count: int) -> Iterator[float]:
    """The worst ratio of every case that is judged; inf where the law is broken."""
    item = Item(law, implementation, dtype)
    known = [entry for entry in implementation.description.expected if entry.law == law.id]
    if law.missing(item.domain):
        return
    for arguments in arguments_of(law, implementation, dtype, seed, count):
        if any(not entry.where or holds(entry.where, arguments[0], dtype) for entry in known):
            continue
        with recording() as trial:
            try:
                broken = attempt(law, implementation, dtype, arguments)
            except Refused:
                continue
        if broken is not None or trial.judged:
            yield broken.facts.get("ratio", float("inf")) if broken else trial.ratio


def collected(targets: Sequence[str], seed: int, count: int) -> dict[tuple[str, str, str], list[float]]:
    """Ratios by law name, operation and dtype, over all implementations of the targets."""
    found: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    laws = [law for law in all_laws() if law.name in LAWS]
    with ExitStack() as stack:
        for implementation in open_targets(targets, Options(), Settings(isolate=False), stack):
            for law in laws:
                if law.operation in implementation.description.plans:
                    for dtype in implementation.dtypes(law.operation):
                        found[law.name, law.operation, dtype] += ratios(law, implementation, dtype, seed, count)
    return found


def table(found: dict[tuple[str, str, str], list[float]], name: str) -> list[str]:
    """Markdown lines: one row per operation, median / 99 % / worst per dtype."""
    lines = [f"| {name} | " + " | ".join(DTYPES) + " | cases |", "|---" * (len(DTYPES) + 2) + "|"]
    for operation in OPERATIONS:
        cells = [found.get((name, operation, dtype), []) for dtype in DTYPES]
        if any(cells):
            lines.append(f"| {operation} | " + " | ".join(map(cell, cells)) + f" | {sum(map(len, cells))} |")
    return lines


def cell(values: Sequence[float]) -> str:
    """'median / 99 % / worst' of some ratios."""
    if not values:
        return ""
    ordered = sorted(values)
    high = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return f"{statistics.median(ordered):.2g} / {high:.2g} / {ordered[-1]:.2g}"


def main() -> None:
    """Collect, print, and write where a file is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", nargs="?", help="where to write the tables")
    parser.add_argument("--targets", nargs="*", default=["numpy", "torch"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=40, help="drawn cases for each law, implementation and dtype")
    options = parser.parse_args()
    found = collected(options.targets, options.seed, options.cases)
    parts = ["\n".join(table(found, name)) for name in LAWS]
    text = "median / 99 % / worst\n\n" + "\n\n".join(parts) + "\n"
    print(text)
    if options.file:
        head = HEAD.format(seed=options.seed, count=options.cases)
        Path(options.file).write_text(head + text, encoding="utf-8")


if __name__ == "__main__":
    main()
