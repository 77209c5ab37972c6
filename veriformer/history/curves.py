"""Small curves: a series of values as block characters, and as the points of an SVG line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

BLOCKS = "▁▂▃▄▅▆▇█"
GAP = "·"
FLAT = 0.25
"""A curve spans at least this share of its greatest value, so that a little noise does not look like a mountain."""
WIDTH, HEIGHT, MARGIN = 180.0, 34.0, 4.0
Values = Sequence[float | None]


def heights(values: Values) -> list[float | None]:
    """Each value's height from 0 (the least) to 1 (the greatest); None where there is none.

    Values within FLAT of one another lie about the middle; infinite ones at the edge.
    """
    finite = [value for value in values if value is not None and math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    span = max(high - low, FLAT * max(abs(low), abs(high))) or 1.0
    bottom = (low + high - span) / 2
    return [None if value is None else min(1.0, max(0.0, (value - bottom) / span)) for value in values]


def blocks(values: Values) -> str:
    """One character for each value: higher is more; a dot where there is none."""
    last = len(BLOCKS) - 1
    return "".join(GAP if height is None else BLOCKS[round(height * last)] for height in heights(values))


@dataclass(frozen=True)
class Line:
    """An SVG curve: dots (x, y, place among the values), and polylines between neighbours that have values."""

    dots: tuple[tuple[float, float, int], ...]
    pieces: tuple[str, ...]


def line(values: Values) -> Line:
    """The curve of values within WIDTH x HEIGHT, broken where there is none."""
    step = (WIDTH - 2 * MARGIN) / max(1, len(values) - 1)
    dots: list[tuple[float, float, int]] = []
    pieces: list[list[str]] = [[]]
    for place, height in enumerate(heights(values)):
        if height is None:
            pieces.append([])
            continue
        x, y = round(MARGIN + place * step, 1), round(HEIGHT - MARGIN - height * (HEIGHT - 2 * MARGIN), 1)
        dots.append((x, y, place))
        pieces[-1].append(f"{x},{y}")
    return Line(tuple(dots), tuple(" ".join(piece) for piece in pieces if len(piece) > 1))
