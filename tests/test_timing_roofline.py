"""The roofline picture of `veriformer bench`, and numbers with units."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from veriformer.benchmarks.limits import Limits
from veriformer.benchmarks.workloads import BY_ID
from veriformer.timing import roofline, said
from veriformer.timing.comparing import Comparison, Entry

LIMITS = Limits(((2**18, 80e9), (2**28, 10e9)), {"float32": 100e9})
FORWARD = BY_ID["softmax-forward"]


def row(name: str, seconds: float, target: bool = False) -> Entry:
    return Entry(name, target, seconds, 1.0, (1.0, 1.0), 0, 1e-4 / seconds, 0.1, seconds, 41)


def crowded() -> list[Comparison]:
    names = [f"library:variant_{i}" for i in range(9)]
    rows = [row(name, 1e-3 * (1 + i / 100), i == 4) for i, name in enumerate(names)]
    return [Comparison(FORWARD, 1e-4, rows), Comparison(BY_ID["attention-prefill"], 1e-4, rows[:2])]


SVG = "{http://www.w3.org/2000/svg}"


def test_the_roofline_has_a_dot_and_a_label_for_each_entry_and_no_labels_overlap() -> None:
    found = crowded()
    empty = Comparison(BY_ID["softmax-backward"], 1e-4)
    root = ElementTree.fromstring(roofline.roofline([*found, empty], LIMITS))
    texts = [node for node in root.iter(f"{SVG}text") if (node.text or "").startswith("library:")]
    assert len(texts) == 11 and len(list(root.iter(f"{SVG}circle"))) == 11 + 2  # two in the legend
    assert sum(node.get("font-weight") == "bold" for node in texts) == 1
    heights = sorted(float(node.get("y", "")) for node in texts[:9])
    assert min(b - a for a, b in zip(heights, heights[1:], strict=False)) >= roofline.BETWEEN - 0.1
    words = {node.text for node in root.iter(f"{SVG}text")}
    assert {"softmax-forward", "attention-prefill", "target", "baseline"} <= words and "softmax-backward" not in words
    assert "library:variant_0  10 %" in words and "hot: 256 KiB, 80 GB/s" in words


def test_dots_stand_at_the_workloads_intensity_and_the_speed_reached() -> None:
    found = replace(crowded()[1], entries=[row("one", 1e-3)])
    across, upward = roofline.ranges([found], LIMITS)
    axes = roofline.Axes(roofline.Picture(1, 1, ""), 0, 0, 100, 100, across, upward, log=True, log_x=True)
    work = found.workload
    x, y = axes.place(work.flops / work.bytes, work.flops / 1e-3 / 1e9)
    share = math.log(work.flops / work.bytes / across[0]) / math.log(across[1] / across[0])
    assert x == pytest.approx(100 * share) and 0 < y < 100
    assert axes.place(across[0], upward[1]) == pytest.approx((0, 0))


@pytest.mark.parametrize("places", [[5.0, 5.0, 5.0], [99.0, 98.0], [50.0], [], [0.0, 100.0, 100.0, 1.0]])
def test_places_are_moved_apart_within_bounds_and_keep_their_order(places: list[float]) -> None:
    found = roofline.spread(places, 15, 0, 100)
    order = sorted(range(len(places)), key=lambda i: places[i])
    moved = [found[i] for i in order]
    assert all(b - a >= 15 - 1e-9 for a, b in zip(moved, moved[1:], strict=False))
    assert all(0 <= place <= 100 for place in moved)


def test_numbers_are_short() -> None:
    assert [said.duration(s) for s in (1.234, 1.2e-3, 5.9e-5, 2e-8)] == ["1.23 s", "1.2 ms", "59 µs", "20 ns"]
    assert [said.size(n) for n in (12, 2**10, 1.5 * 2**20, 2**31)] == ["12 B", "1 KiB", "1.5 MiB", "2 GiB"]
    assert [said.share(f) for f in (1.87e-10, 0.00123, 1234, 0, math.nan)] == ["1.9e-10", "0.0012", "1234", "0", "-"]
    assert [said.percent(f) for f in (0.345, 0.00171, 1.2, 0)] == ["34 %", "0.17 %", "120 %", "0 %"]
    assert said.three(math.nan) == "-" and said.rate(15.96e9) == "16 GB/s"
