"""A picture as SVG text: shapes, words, and the axes of a chart. No library draws it, every browser shows it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from xml.sax.saxutils import escape, quoteattr

INK, GREY, PALE = "#222222", "#666666", "#e4e4e4"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
"""Told apart by colour-blind readers as well (Okabe, Ito 2008)."""
Point = tuple[float, float]


class Picture:
    """Shapes in the order in which they are drawn; x to the right, y downward, in pixels."""

    def __init__(self, width: float, height: float, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self.parts: list[str] = []
        self.rect(0, 0, width, height, fill="white")
        self.text(24, 32, title, size=18, weight="bold")

    def add(self, tag: str, content: str = "", **attributes: Any) -> None:
        """An element; attributes with _ for -, numbers shortened."""
        words = " ".join(f"{name.replace('_', '-')}={quoteattr(plain(value))}" for name, value in attributes.items())
        self.parts.append(f"<{tag} {words}>{content}</{tag}>" if content else f"<{tag} {words}/>")

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: float = 13,
        anchor: str = "start",
        fill: str = INK,
        **more: Any,
    ) -> None:
        """Words whose baseline begins, ends or is centred (anchor) at a point; weight="bold", turned=-90."""
        if "weight" in more:
            more["font_weight"] = more.pop("weight")
        if "turned" in more:
            more["transform"] = f"rotate({more.pop('turned')} {plain(x)} {plain(y)})"
        self.add("text", escape(words), x=x, y=y, font_size=size, text_anchor=anchor, fill=fill, **more)

    def line(self, start: Point, end: Point, *, stroke: str = INK, **more: Any) -> None:
        """A straight line."""
        self.add("line", x1=start[0], y1=start[1], x2=end[0], y2=end[1], stroke=stroke, **more)

    def curve(self, points: Sequence[Point], *, stroke: str, width: float = 2.0, **more: Any) -> None:
        """A line through points."""
        at = " ".join(f"{plain(x)},{plain(y)}" for x, y in points)
        self.add("polyline", points=at, fill="none", stroke=stroke, stroke_width=width, stroke_linejoin="round", **more)

    def rect(self, x: float, y: float, width: float, height: float, *, fill: str, **more: Any) -> None:
        """A rectangle by its upper left corner."""
        self.add("rect", x=x, y=y, width=width, height=height, fill=fill, **more)

    def circle(self, x: float, y: float, radius: float, *, fill: str, **more: Any) -> None:
        """A dot."""
        self.add("circle", cx=x, cy=y, r=radius, fill=fill, **more)

    def xml(self) -> str:
        """The file."""
        size = f'width="{plain(self.width)}" height="{plain(self.height)}"'
        box = f'viewBox="0 0 {plain(self.width)} {plain(self.height)}"'
        font = 'font-family="DejaVu Sans, Verdana, Arial, sans-serif"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {box} {font} role="img">'
        return "\n".join([head, f"<title>{escape(self.title)}</title>", *self.parts, "</svg>", ""])


@dataclass
class Axes:
    """A chart's frame inside a picture: where numbers stand, with ticks, grid and labels."""

    picture: Picture
    left: float
    top: float
    width: float
    height: float
    x: tuple[float, float]
    y: tuple[float, float]
    log: bool = False
    """The y axis is logarithmic."""
    log_x: bool = False
    """The x axis is logarithmic."""
    legend: list[tuple[str, str]] = field(default_factory=list)

    def place(self, x: float, y: float) -> Point:
        """The pixel of a point; what lies outside the axes is moved to their edge."""
        across, upward = self._share(x, *self.x, self.log_x), self._share(y, *self.y, self.log)
        return self.left + across * self.width, self.top + (1 - upward) * self.height

    def frame(self, title: str, across: str, upward: str, *, ticks: tuple[Sequence[float], Sequence[float]]) -> None:
        """Title, grid, ticks and the two labels."""
        picture, bottom, right = self.picture, self.top + self.height, self.left + self.width
        picture.text(self.left, self.top - 14, title, size=14, weight="bold")
        for value in ticks[1]:
            _, y = self.place(self.x[0], value)
            picture.line((self.left, y), (right, y), stroke=PALE)
            picture.text(self.left - 8, y + 4.5, said(value), size=12, anchor="end", fill=GREY)
        for value in ticks[0]:
            x, _ = self.place(value, self.y[0])
            picture.line((x, bottom), (x, bottom + 5), stroke=GREY)
            picture.text(x, bottom + 20, said(value), size=12, anchor="middle", fill=GREY)
        picture.curve([(self.left, self.top), (self.left, bottom), (right, bottom)], stroke=GREY, width=1)
        picture.text(self.left + self.width / 2, bottom + 42, across, anchor="middle")
        x = self.left - 44
        picture.text(x, self.top + self.height / 2, upward, anchor="middle", turned=-90)

    def curve(self, points: Sequence[Point], *, stroke: str, **more: Any) -> None:
        """A line through points given in numbers; those that are none are left out."""
        found = [self.place(x, y) for x, y in points if math.isfinite(y)]
        if found:
            self.picture.curve(found, stroke=stroke, **more)

    @staticmethod
    def _share(value: float, low: float, high: float, log: bool) -> float:
        if log:
            value, low, high = (math.log10(max(number, low)) for number in (value, low, high))
        return min(1.0, max(0.0, (value - low) / (high - low)))


def steps_between(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers from low to high, at most so many."""
    size = 10 ** math.floor(math.log10(max(high - low, 1e-9) / most))
    step = next(size * k for k in (1, 2, 5, 10, 20, 50) if (high - low) / (size * k) <= most - 1)
    return [n * step for n in range(math.ceil(low / step), math.floor(high / step) + 1)]


def smooth(values: Sequence[float], keep: float = 0.9) -> list[float]:
    """The running mean of values, without the pull of where it began; numbers that are none are passed over."""
    found, mean, weight = [], 0.0, 0.0
    for value in values:
        if math.isfinite(value):
            mean, weight = keep * mean + (1 - keep) * value, keep * weight + 1 - keep
        found.append(mean / weight if weight else math.nan)
    return found


def mixed(colour: str, share: float) -> str:
    """So much of a colour on white."""
    parts = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(255 + share * (part - 255)):02x}" for part in parts)


def said(value: float) -> str:
    """A tick's number."""
    return f"{value:g}"


def plain(value: object) -> str:
    """A number with at most two decimals, or the words themselves."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, (int, float)) else str(value)
