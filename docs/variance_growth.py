"""What depth does to the numbers of a token, in post-norm and in pre-norm: a table, and a picture of it.

    python docs/variance_growth.py --output docs/variance_growth.svg

Random tokens pass through a stack of the reference's encoder layers as they are drawn at the beginning, without
training. After each layer two figures are taken, and averaged over several draws of tokens and parameters: the
variance of a token's channels, and the correlation of the numbers with those that went in.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from veriformer.reference import encoder_layer, initial_layer

DEPTH, DRAWS = 24, 8
TOKENS = {"batch": 4, "length": 16, "width": 64}
NORMS = {"post": ("post-norm", "#0072b2", ""), "pre": ("pre-norm", "#d55e00", "7 4")}
"""Name, colour and dashes of each curve: they differ in print without colours too."""
Curves = dict[str, np.ndarray]


def measure() -> dict[str, Curves]:
    """{"variance" or "correlation": {"post" or "pre": a number after each of 0 … DEPTH layers}}."""
    figures = np.array([[list(passage(np.random.default_rng(draw), norm)) for norm in NORMS] for draw in range(DRAWS)])
    means = figures.mean(axis=0)
    return {
        name: {norm: means[i, :, column] for i, norm in enumerate(NORMS)}
        for column, name in enumerate(("variance", "correlation"))
    }


def passage(generator: np.random.Generator, norm: str) -> Iterator[tuple[float, float]]:
    """Variance, and correlation with the input, before the first layer and after each one."""
    width = TOKENS["width"]
    x = start = generator.normal(size=tuple(TOKENS.values()))
    for layer in range(DEPTH + 1):
        if layer:
            x = encoder_layer(x, initial_layer(generator, width=width, inner=4 * width, heads=4), heads=4, norm=norm)
        yield x.var(axis=-1).mean(), np.corrcoef(x.ravel(), start.ravel())[0, 1]


def table(figures: dict[str, Curves]) -> str:
    """The figures after some of the layers, a line each."""
    columns = [(name, norm) for name in figures for norm in NORMS]
    head = "layers" + "".join(f"{f'{name} {norm}':>18}" for name, norm in columns)
    lines = [
        f"{layer:6}" + "".join(f"{round(figures[name][norm][layer], 2) + 0.0:18.2f}" for name, norm in columns)
        for layer in (0, 1, 2, 4, 8, 16, 24)
    ]
    return "\n".join([head, *lines])


def picture(figures: dict[str, Curves]) -> str:
    """Both figures over the number of layers as SVG, side by side."""
    left = panel(figures["variance"], 60, "variance of a token's channels", [0, 5, 10, 15, 20, 25])
    right = panel(figures["correlation"], 440, "correlation with the input", [0, 0.2, 0.4, 0.6, 0.8, 1])
    return "\n".join(
        [
            '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 330" width="760" height="330"',
            '     font-family="sans-serif" font-size="13" fill="#222">',
            "<title>Post-norm keeps the variance at 1 and forgets the input; pre-norm grows and remembers</title>",
            '<rect width="760" height="330" fill="white"/>',
            *legend(),
            *left,
            *right,
            "</svg>\n",
        ]
    )


def panel(curves: Curves, x0: int, title: str, ticks: list[float]) -> Iterator[str]:
    """One pair of axes, 290 by 210, with its curves; x0 is where the vertical axis stands."""
    top, bottom, width = 60, 270, 290

    def across(layer: float) -> float:
        return x0 + width * layer / DEPTH

    def up(value: float) -> float:
        return bottom - (bottom - top) * value / ticks[-1]

    yield f'<text x="{x0}" y="{top - 14}" font-weight="bold">{title}</text>'
    for tick in ticks:
        yield f'<path d="M{x0} {up(tick):.1f}h{width}" stroke="#ddd"/>'
        yield f'<text x="{x0 - 8}" y="{up(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>'
    yield f'<path d="M{x0} {top}V{bottom}H{x0 + width}" fill="none" stroke="#222"/>'
    for layer in range(0, DEPTH + 1, 4):
        yield f'<path d="M{across(layer):.1f} {bottom}v5" stroke="#222"/>'
        yield f'<text x="{across(layer):.1f}" y="{bottom + 20}" text-anchor="middle">{layer}</text>'
    yield f'<text x="{across(DEPTH / 2):.1f}" y="{bottom + 42}" text-anchor="middle">layers passed</text>'
    for norm, curve in curves.items():
        points = " ".join(f"{across(layer):.1f},{up(value):.1f}" for layer, value in enumerate(curve))
        yield f'<polyline points="{points}" {stroke(norm)}/>'


def legend() -> Iterator[str]:
    """A piece of each curve and its name."""
    for i, (norm, (name, _, _)) in enumerate(NORMS.items()):
        x = 60 + 150 * i
        yield f'<path d="M{x} 18h34" {stroke(norm)}/>'
        yield f'<text x="{x + 42}" y="22">{name}</text>'


def stroke(norm: str) -> str:
    """How a norm's curve is drawn."""
    _, colour, dashes = NORMS[norm]
    return f'fill="none" stroke="{colour}" stroke-width="2.5" stroke-dasharray="{dashes or "none"}"'


def main() -> None:
    """Print the table; write the picture where it is wanted."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the picture there, as SVG")
    output = parser.parse_args().output
    figures = measure()
    print(table(figures))
    if output:
        output.write_text(picture(figures))


if __name__ == "__main__":
    main()
