"""The roofline picture: how far from the machine's limits implementations are, a panel for each workload.

Across: FLOPs for each byte that must be moved. Upward: FLOPs a second. A slanted roof is what a bandwidth allows, the
level one what a product of matrices reaches (Williams et al. 2009).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from veriformer.benchmarks.limits import NAMED, Limits
from veriformer.demo.svg import COLOURS, GREY, INK, Axes, Picture
from veriformer.timing.comparing import Comparison, Entry
from veriformer.timing.said import percent, rate, size

BASELINE, TARGET = COLOURS[0], COLOURS[1]
DASHES = dict(zip(NAMED, ("none", "7 4", "2 4"), strict=True))
WIDE, HIGH, LEFT, TOP = 400, 270, 74, 150
"""Of a panel: its plot's width and height, where it begins."""
ACROSS, DOWN, BETWEEN = WIDE + LEFT + 26, HIGH + 118, 15
"""From one panel to the next, and from one label to the next."""


def roofline(comparisons: Sequence[Comparison], limits: Limits) -> str:
    """The picture as SVG text: a panel for each comparison that has entries, a dot for each of these."""
    found = [one for one in comparisons if one.entries]
    columns = min(2, max(1, len(found)))
    rows = max(1, math.ceil(len(found) / columns))
    title = "How near to the machine's limit"
    picture = Picture(max(560, columns * ACROSS + 20), TOP - 50 + rows * DOWN, title)
    legend(picture, limits, sorted({one.workload.dtype for one in found}))
    across, upward = ranges(found, limits)
    for i, comparison in enumerate(found):
        left, top = LEFT + ACROSS * (i % columns), TOP + DOWN * (i // columns)
        axes = Axes(picture, left, top, WIDE, HIGH, across, upward, log=True, log_x=True)
        panel(axes, comparison, limits)
    return picture.xml()


def ranges(comparisons: Sequence[Comparison], limits: Limits) -> tuple[tuple[float, float], tuple[float, float]]:
    """Of both axes, so that every point, and the corner of every roof, is inside; GFLOP/s upward."""
    intensities = [one.workload.flops / one.workload.bytes for one in comparisons] or [1.0]
    reached = [speed(one, entry) for one in comparisons for entry in one.entries] or [1.0]
    highest = max(limits.peak.values())
    corner = highest / min(bandwidth for _, bandwidth in limits.bandwidth)
    across = min(0.1, *(0.7 * value for value in intensities)), max(100.0, 2 * corner, *(2 * v for v in intensities))
    return across, (0.6 * min(reached), 2 * highest / 1e9)


def powers(low: float, high: float) -> list[float]:
    """The powers of ten from one number to another."""
    return [10.0**n for n in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)]


def speed(comparison: Comparison, entry: Entry) -> float:
    """GFLOP/s: the least arithmetic by the time that was taken."""
    return comparison.workload.flops / entry.seconds / 1e9


def legend(picture: Picture, limits: Limits, dtypes: Sequence[str]) -> None:
    """What lines and dots mean, with the limits in numbers."""
    peaks = ", ".join(f"{limits.peak[dtype] / 1e9:.3g} GFLOP/s in {dtype}" for dtype in dtypes if dtype in limits.peak)
    picture.text(24, 54, f"level roof: product of matrices, {peaks}", size=12, fill=GREY)
    for i, (name, footprint) in enumerate(NAMED.items()):
        x = 24 + 178 * i
        picture.line((x, 72), (x + 26, 72), stroke=INK, stroke_width=1.5, stroke_dasharray=DASHES[name])
        words = f"{name}: {size(footprint)}, {rate(limits.bandwidth_at(footprint))}"
        picture.text(x + 31, 76, words, size=11, fill=GREY)
    for x, colour, radius, words in ((32, TARGET, 6.5, "target"), (122, BASELINE, 4.5, "baseline")):
        picture.circle(x, 95, radius, fill=colour)
        picture.text(x + 12, 99, words, size=12)
    picture.line((220, 95), (244, 95), stroke=GREY, stroke_width=3)
    picture.text(251, 99, "limit at the workload's own bytes = 100 %", size=12)


def panel(axes: Axes, comparison: Comparison, limits: Limits) -> None:
    """One workload: roofs, its own limit, a dot and a label for each entry."""
    work, picture = comparison.workload, axes.picture
    axes.frame("", "FLOPs for each byte", "GFLOP/s", ticks=(powers(*axes.x), powers(*axes.y)))
    picture.text(axes.left, axes.top - 22, work.id, size=14, weight="bold")
    picture.text(axes.left, axes.top - 7, work.sizes, size=11, fill=GREY)
    roofs(axes, limits, work.dtype)
    intensity = work.flops / work.bytes
    x, y = axes.place(intensity, work.flops / comparison.limit / 1e9)
    picture.line((x - 12, y), (x + 12, y), stroke=GREY, stroke_width=3)
    points = [(*axes.place(intensity, speed(comparison, entry)), entry) for entry in comparison.entries]
    rightward = x < axes.left + axes.width / 2
    places = spread([place for _, place, _ in points], BETWEEN, axes.top + 10, axes.top + axes.height - 14)
    drawn = sorted(zip(points, places, strict=True), key=lambda one: one[0][2].target)  # targets above the others
    for (_, at, entry), label in drawn:
        dot(picture, (x, at), label, entry, rightward)


def roofs(axes: Axes, limits: Limits, dtype: str) -> None:
    """The slanted lines of the named tiers, each up to the level one."""
    peak = limits.peak[dtype] / 1e9
    for name, footprint in NAMED.items():
        bandwidth = limits.bandwidth_at(footprint) / 1e9
        start = max(axes.x[0], axes.y[0] / bandwidth)
        corner = peak / bandwidth
        points = [(start, start * bandwidth), (corner, peak)]
        axes.curve(points, stroke=INK, width=1.5, stroke_dasharray=DASHES[name])
    corner = peak / max(limits.bandwidth_at(footprint) / 1e9 for footprint in NAMED.values())
    axes.curve([(corner, peak), (axes.x[1], peak)], stroke=INK, width=1.5)


def dot(picture: Picture, at: tuple[float, float], label: float, entry: Entry, rightward: bool) -> None:
    """An entry: a dot, a thin line to where its label had to go, and the label."""
    x, y = at
    side, anchor = (1, "start") if rightward else (-1, "end")
    colour, weight = (TARGET, "bold") if entry.target else (BASELINE, "normal")
    picture.line((x, y), (x + side * 22, label), stroke=colour, stroke_width=0.8)
    picture.circle(x, y, 6.5 if entry.target else 4.5, fill=colour, stroke="white", stroke_width=1)
    words = f"{entry.name}  {percent(entry.fraction)}"
    halo = {"stroke": "white", "stroke_width": 3, "paint_order": "stroke"}
    fill = TARGET if entry.target else INK
    picture.text(x + side * 26, label + 4, words, size=11.5, anchor=anchor, fill=fill, weight=weight, **halo)


def spread(places: Sequence[float], between: float, low: float, high: float) -> list[float]:
    """Places moved apart, in their order, as little as leaves so much between any two, from low to high."""
    order = sorted(range(len(places)), key=lambda i: places[i])
    between = min(between, (high - low) / max(1, len(places) - 1))
    found = [0.0] * len(places)
    for rank, i in enumerate(order):
        least = found[order[rank - 1]] + between if rank else low
        found[i] = max(places[i], least)
    for rank, i in reversed(list(enumerate(order))):
        most = found[order[rank + 1]] - between if rank + 1 < len(order) else high
        found[i] = min(found[i], most)
    return found
