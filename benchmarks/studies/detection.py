"""What each statistic of precision detects: `python benchmarks/studies/detection.py [FILE]` measures and writes tables.

Every fault is tried with eight seeds. worst: the error exceeds the budget somewhere. rms: the root mean
square of the errors exceeds what is typical. gain: the results are off by a common factor. A right
kernel must be detected by none under the precision that it declares. A last table gives the unit
roundoff that kernels behave like.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
import torch
from precision_bits import bits_table
from precision_layers import layer_lines
from precision_rows import Line, bfloat16_lines, float32_lines, unfused_faults

from veriformer.budgets import error_ratio
from veriformer.budgets.claims import GAIN_LIMIT, rms_ratio, systematic_gain

SEEDS = 8
HEAD = (
    "| kernel | worst | rms | gain | at least one | wanted | worst, rms, gain (median; largest of a right one) |",
    "|---|---|---|---|---|---|---|",
)
TABLES = (
    ("float32 kernels", float32_lines),
    ("bfloat16 kernels with float32 sums, under the precision that they should declare", bfloat16_lines),
    ("The same faults under unfused bfloat16: what declaring too much costs", unfused_faults),
    ("An encoder layer in float32, forward and backward", layer_lines),
)


@dataclass(frozen=True)
class Outcome:
    """The three statistics of one kernel with one seed: the largest of all its results."""

    worst: float
    rms: float
    gain: float

    @property
    def found(self) -> tuple[bool, bool, bool]:
        return self.worst > 1, self.rms > 1, self.gain > GAIN_LIMIT


def measure(line: Line, seed: int) -> Outcome:
    """One kernel on one seed's data."""
    rng = np.random.default_rng([seed, *line.name.encode()])
    results, bounds = line.make(rng, seed)
    pairs = zip(bounds(line.precision), bounds(replace(line.precision, growth="typical")), strict=True)
    outcomes = []
    for got, (wide, typical) in zip(results, pairs, strict=True):
        ratio = error_ratio(got, wide.value, wide.allowed, line.precision.largest)
        with np.errstate(invalid="ignore"):
            error = got - wide.value
            gain = systematic_gain(error, wide.value, typical.allowed)
            outcomes.append((float(ratio.max()), rms_ratio(error, typical.allowed), abs(gain)))
    return Outcome(*map(max, zip(*outcomes, strict=True)))


def row(line: Line) -> tuple[str, bool]:
    """One line of the table, and whether the kernel was detected as often as demanded."""
    outcomes = [measure(line, seed) for seed in range(SEEDS)]
    counts = [sum(flags) for flags in zip(*(o.found for o in outcomes), strict=True)]
    together = sum(any(o.found) for o in outcomes)
    right = line.demanded is None
    good = together == 0 if line.demanded is None else together >= line.demanded
    shown = " / ".join(
        f"{(max if right else median)(getattr(o, name) for o in outcomes):.2g}" for name in ("worst", "rms", "gain")
    )
    wanted = "0" if right else f"≥ {line.demanded}" if line.demanded else "any"
    cells = ["**right** " * right + line.name, *map(str, counts), str(together), wanted, shown]
    return "| " + " | ".join(cells) + " |", good


def table(title: str, lines: Iterable[Line]) -> tuple[list[str], list[str]]:
    """A titled table, and the names of the kernels that are not as demanded."""
    text, missed = [f"## {title}", "", *HEAD], []
    for line in lines:
        made, good = row(line)
        text.append(made)
        if not good:
            missed.append(line.name)
    return [*text, ""], missed


def main(arguments: list[str]) -> int:
    """Write the tables to a file, or print them; 1 if a fault is missed or a right kernel accused."""
    torch.set_num_threads(1)
    text = [
        "# What worst, rms and gain detect", "",
        f"Written by `python benchmarks/studies/detection.py`. Of {SEEDS} seeds, in how many each statistic",
        f"detects the kernel: worst > 1, rms > 1, |gain| > {GAIN_LIMIT:.0f} standard deviations.", "",
    ]  # fmt: skip
    missed: list[str] = []
    for title, lines in TABLES:
        made, names = table(title, lines())
        text, missed = text + made, missed + names
    text += bits_table()
    text.append(f"Not as wanted: {', '.join(missed) or 'none'}.")
    if arguments:
        Path(arguments[0]).write_text("\n".join(text) + "\n", encoding="utf-8")
    else:
        print("\n".join(text))
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
