"""Which costs of head are above those of base: two tables of results compared, without a measurement.

Bytes and accuracy of fixed inputs are the same in every run on one machine, so there is no noise to allow for. But a
Python number that meets a NumPy array becomes an array without axes, 12 bytes beside float32 (8 of float64, 4 of
float32); generation does that for each of 16 tokens in each of 2 layers. One such number more, 384 bytes, is no copy,
so SCALARS bytes are allowed; a copy of activations takes 2048 and more in every workload. Accuracy is recorded with
four digits (the worst ratio) and three decimals (the bits lost); the last of those may turn over when the reference
or a budget is written otherwise without a change of meaning, hence one unit of it is allowed, and no more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

METRICS = ("track_bytes", "track_worst_ratio", "track_lost_bits")
"""Costs that may not rise, as asv's suites name them."""
SCALARS = 512
"""Bytes that may come in addition."""
RATIO_DIGITS, BITS_DECIMALS = 4, 3
"""What bench_accuracy records."""

Cell = tuple[str, tuple[str, ...]]
"""A benchmark such as bench_costs.SoftmaxForward.track_bytes, and its parameters."""
Cells = Mapping[Cell, float | None]
"""Values; NaN where there is nothing to measure, None where measuring failed."""


def measured(value: float | None) -> bool:
    """Whether a value is a number."""
    return value is not None and not math.isnan(value)


def allowed(cell: Cell, base: float) -> float:
    """The most that head may have where base has this: see above."""
    metric = cell[0].rpartition(".")[2]
    if metric == "track_bytes":
        return base + SCALARS
    unit = 10.0**-BITS_DECIMALS
    if metric == "track_worst_ratio":
        unit = 10.0 ** (math.floor(math.log10(base)) - RATIO_DIGITS + 1) if base > 0 else 0.0
    return base + 1.5 * unit  # half a unit for the decimal numbers' own rounding in binary


@dataclass(frozen=True)
class Rise:
    """A cell whose cost rose, or which head lacks: its value is NaN or None then."""

    cell: Cell
    base: float | None
    head: float | None

    @property
    def lost(self) -> bool:
        """Whether head has no number."""
        return not measured(self.head)


@dataclass(frozen=True)
class Comparison:
    """compared: cells that both have, or base alone. rises: the bad ones. new: in head alone. broken: in neither."""

    compared: int
    rises: tuple[Rise, ...]
    new: tuple[Cell, ...]
    broken: tuple[Cell, ...]

    @property
    def failed(self) -> bool:
        """Whether something rose, or too little was measured."""
        return bool(self.rises) or not self.compared or self.mostly_broken

    @property
    def mostly_broken(self) -> bool:
        """Whether measuring failed in both for more cells than were compared, so that nothing can be concluded."""
        return len(self.broken) > self.compared


def compare(base: Cells, head: Cells) -> Comparison:
    """Head's costs beside base's, cell by cell.

    A cell fails that rose, that base has and head lacks, and whose measuring fails in head but not in base.
    """
    cells = sorted({*base, *head})
    pairs = [Rise(cell, base.get(cell, math.nan), head.get(cell, math.nan)) for cell in cells]
    both = [pair for pair in pairs if measured(pair.base)]
    rises = [pair for pair in pairs if _rose(pair)]
    new = [pair.cell for pair in pairs if not measured(pair.base) and measured(pair.head)]
    broken = [pair.cell for pair in pairs if pair.base is None and pair.head is None]
    anything = any(measured(value) for value in head.values())
    return Comparison(len(both) if anything else 0, tuple(rises), tuple(new), tuple(broken))


def _rose(pair: Rise) -> bool:
    if pair.base is None or math.isnan(pair.base):
        return pair.head is None and pair.base is not None
    return pair.head is None or not pair.head <= allowed(pair.cell, pair.base)
