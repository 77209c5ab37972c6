"""The pictures that a demo leaves behind: how the loss fell, and for what the model learned to think longer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from veriformer.demo.data import shown
from veriformer.demo.svg import COLOURS, GREY, INK, PALE, Axes, Picture, mixed, smooth, steps_between


@dataclass(frozen=True)
class Curve:
    """A task's loss after each step, and the step from which on its rate fell."""

    name: str
    losses: Sequence[float]
    learned_at: int | None = None


@dataclass(frozen=True)
class Thought:
    """What is known of halting: during training, (step, mean for each chain length); on the judged, `spread`."""

    history: Sequence[tuple[int, Sequence[float]]]
    learned_at: int | None
    most: int
    means: Sequence[float] = ()
    spread: Sequence[Sequence[float]] = ()
    example: dict[str, list[int]] = field(default_factory=dict)


def loss_picture(curves: Sequence[Curve], seed: int) -> str:
    """The losses on a logarithmic axis: each step thin, the running mean thick, a ring where the rate falls."""
    picture = Picture(860, 460, f"Small models of the reference learn (seed {seed})")
    longest = max([1, *(len(curve.losses) for curve in curves)])
    axes = Axes(picture, 80, 90, 590, 300, (0, longest), (3e-4, 5.0), log=True)
    ticks = (steps_between(0, longest), (1e-3, 1e-2, 1e-1, 1))
    axes.frame("Loss while training", "step", "cross entropy (log scale)", ticks=ticks)
    for colour, curve in zip(COLOURS, curves, strict=False):
        points = list(enumerate(curve.losses, 1))
        axes.curve(points, stroke=mixed(colour, 0.3), width=1)
    for row, (colour, curve) in enumerate(zip(COLOURS, curves, strict=False)):
        means = smooth(curve.losses)
        axes.curve(list(enumerate(means, 1)), stroke=colour, width=2.5)
        if curve.learned_at:
            x, y = axes.place(curve.learned_at, means[curve.learned_at - 1])
            picture.circle(x, y, 5, fill="white", stroke=colour, stroke_width=2.5)
        legend(picture, 694, 100 + 24 * row, colour, curve.name)
    below = 100 + 24 * len(curves) + 10
    picture.circle(706, below, 5, fill="white", stroke=GREY, stroke_width=2.5)
    for i, words in enumerate(("learned: the rate", "falls from here on")):
        picture.text(724, below + 4 + 17 * i, words, size=12, fill=GREY)
    return picture.xml()


def legend(picture: Picture, x: float, y: float, colour: str, words: str) -> None:
    """One entry."""
    picture.line((x, y), (x + 24, y), stroke=colour, stroke_width=3)
    picture.text(x + 30, y + 4.5, words)


def halting_picture(thought: Thought) -> str:
    """Steps of thought by chain length: their mean while training, and how they are spread in the end."""
    picture = Picture(940, 470, "Longer chains are thought about for longer")
    history(picture, thought)
    if thought.spread:
        spread(picture, thought)
    return picture.xml()


def history(picture: Picture, thought: Thought) -> None:
    """On the left: mean halting steps over training."""
    longest = max([1, *(step for step, _ in thought.history)])
    axes = Axes(picture, 80, 90, 400, 300, (0, longest), (0.8, thought.most + 0.2))
    ticks = (steps_between(0, longest), range(1, thought.most + 1))
    axes.frame("Mean halting step while training", "step of training", "steps of thought", ticks=ticks)
    if thought.learned_at:
        (x, low), (_, high) = axes.place(thought.learned_at, 0), axes.place(thought.learned_at, 99)
        picture.line((x, low), (x, high), stroke=GREY, stroke_dasharray="5 4")
        for i, words in enumerate(("all steps are made", "until it is learned")):
            picture.text(x - 8, low - 58 + 17 * i, words, size=12, anchor="end", fill=GREY)
        for i, words in enumerate(("halts", "by itself")):
            picture.text(x + 8, low - 58 + 17 * i, words, size=12, fill=GREY)
    for hops, colour in enumerate(COLOURS):
        means = smooth([of[hops] for _, of in thought.history])
        axes.curve([(step, mean) for (step, _), mean in zip(thought.history, means, strict=True)], stroke=colour)
        legend(picture, 498, 100 + 24 * hops, colour, f"{hops} hop{'s' * (hops != 1)}")


def spread(picture: Picture, thought: Thought) -> None:
    """On the right: a row of squares for each chain length, darker the more cells halt at that step."""
    size, left, top = 62, 660, 90
    picture.text(left, top - 14, "In the end, on unseen rows", size=14, weight="bold")
    for hops, (colour, of, mean) in enumerate(zip(COLOURS, thought.spread, thought.means, strict=True)):
        y = top + size * 1.1 * (len(thought.spread) - 1 - hops)
        picture.text(left - 10, y + size / 2 + 4.5, str(hops), size=12, anchor="end", fill=GREY)
        for n, share in enumerate(share if math.isfinite(share) else 0.0 for share in of):
            picture.rect(left + size * n, y, size - 3, size - 3, fill=mixed(colour, share), stroke=PALE)
            if share >= 0.005:
                fill = "white" if share > 0.5 else INK
                at = (left + size * (n + 0.5) - 1.5, y + size / 2 + 3)
                picture.text(*at, f"{100 * share:.0f} %", size=12, anchor="middle", fill=fill)
        if math.isfinite(mean):
            x = left + size * (mean - 0.5) - 1.5
            picture.add("path", d=f"M{x - 6:.1f} {y + size + 4:.1f} l6 -9 l6 9 z", fill=INK)
    bottom = top + size * 1.1 * len(thought.spread)
    for n in range(thought.most):
        picture.text(left + size * (n + 0.5) - 1.5, bottom + 14, str(n + 1), size=12, anchor="middle", fill=GREY)
    picture.text(left + size * thought.most / 2, bottom + 38, "halts at step   (▲ mean)", anchor="middle")
    picture.text(left - 34, top + (bottom - top) / 2, "hops to the letter", anchor="middle", turned=-90)


def example_picture(thought: Thought) -> str:
    """One row of cells: what each holds, how far it is from its letter, and how many steps it was thought about."""
    about, cell, left = thought.example, 84, 150
    cells, top = len(about["tokens"]), 60
    picture = Picture(left + cell * cells + 30, 450, "One row of cells: a step of thought is a box")
    for n in range(thought.most):
        y = top + 42 * (thought.most - 1 - n)
        picture.text(left - 14, y + 24, f"step {n + 1}", size=12, anchor="end", fill=GREY)
        for i in range(cells):
            colour = COLOURS[about["hops"][i]]
            made = about["steps"][i] > n
            more = {} if made else {"stroke_dasharray": "3 4"}
            fill, stroke = (mixed(colour, 0.75), colour) if made else ("white", "#bbbbbb")
            picture.rect(left + cell * i + 8, y, cell - 16, 34, fill=fill, stroke=stroke, rx=4, **more)
    table(picture, about, left, cell, top + 42 * thought.most + 22)
    return picture.xml()


def table(picture: Picture, about: dict[str, list[int]], left: float, cell: float, top: float) -> None:
    """Below the boxes: cell number, content, hops, steps, and the letter that the model gave."""
    right = [a == b for a, b in zip(about["letters"], about["answers"], strict=True)]
    rows = {
        "cell": [str(i) for i in range(len(right))],
        "holds": [shown(token) for token in about["tokens"]],
        "hops to the letter": [str(n) for n in about["hops"]],
        "steps of thought": [str(n) for n in about["steps"]],
        "letter given": [shown(n) + ("" if ok else " ✗") for n, ok in zip(about["letters"], right, strict=True)],
    }
    for row, (name, entries) in enumerate(rows.items()):
        y = top + 28 * row
        picture.line((20, y + 9), (left + cell * len(right), y + 9), stroke=PALE)
        picture.text(left - 14, y, name, size=12, anchor="end", fill=GREY)
        for i, words in enumerate(entries):
            bold = {"weight": "bold"} if name == "holds" else {}
            picture.text(left + cell * (i + 0.5), y, words, size=15, anchor="middle", **bold)
    notes = ("→5 points at cell 5. Who follows the arrows ends at a letter, which the model is to name for every cell.",
             "Colours are those of the chain lengths in halting.svg.")  # fmt: skip
    for i, words in enumerate(notes):
        picture.text(24, top + 28 * len(rows) + 12 + 18 * i, words, size=12, fill=GREY)
