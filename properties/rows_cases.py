"""Recipes for what is done to each token by itself: rms_norm, gelu and relu, feed_forward, dropout, embedding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from veriformer.case import Case
from veriformer.declarations import Capabilities
from veriformer.law import Domain, Recipe
from veriformer.properties.cases import (
    EPSILONS,
    NORM_SHAPES,
    SHAPES,
    Shape,
    near_largest,
    norm_values,
    pooled,
    recipe,
    with_blocks,
)
from veriformer.properties.families import FAMILIES, fill

FEED_FORWARD_SHAPES = (
    (1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 3), (2, 2, 2), (3, 2, 3), (2, 3, 3), (3, 1, 4, 2), (2, 3, 2, 5),
    (4, 4, 4), (5, 3, 8), (2, 3, 5, 9), (7, 4, 4), (9, 8, 16), (2, 5, 17), (33, 3, 7), (1, 33, 31), (3, 8, 65),
    (65, 5, 4), (2, 130, 3), (3, 16, 127),
)  # fmt: skip
"""Axes of x and, last, the inner width; several with both widths alike, in which a transposed weight still fits.

A row without leading axes is left to a law of its own: torch squeezes its product in place, which the
budgets of gradients cannot follow.
"""

EMBEDDING_SHAPES = (
    (1, 1, 1), (2, 2, 1), (1, 3, 2), (3, 2, 2), (4, 3, 3), (2, 2, 4, 3), (5, 4, 4), (6, 3, 2), (2, 3, 5, 3), (7, 7, 1),
    (3, 1, 2, 3, 4), (12, 5, 5), (40, 3, 2), (8, 17, 5), (5, 7, 33), (3, 5, 33, 3), (20, 258, 1), (2, 9, 300, 2),
    (800, 4, 2),
)  # fmt: skip
"""Axes of ids, then the number of rows and their width; more than 256 rows, and hundreds of ids for a few rows."""

FORWARD = ("normal", "integers", "one_hot", "sparse", "halves", "ladder", "heavy", "constant", "large_mean")
"""Families of x whose products with weights of about 1 stay moderate."""

RATES = (0.5, 0.25, 0.0, 0.75, 0.1, 1.0, 0.125, 0.9)
GRID = 64
"""Uniform numbers are multiples of 1 / GRID: exact in every dtype, and never between a rate and its rounding."""


def rms_norm_cases(
    *,
    families: Sequence[str] = tuple(FAMILIES),
    widths: tuple[int, int] = (1, 10**6),
    rows: int = 1,
    plain: bool = False,
    gains: Sequence[float] = (),
    epsilons: Sequence[float] = (1e-6, *EPSILONS),
    layouts: Sequence[str] = ("contiguous",),
    examples: int = 10,
) -> Recipe:
    """Cases of rms_norm.

    families: as for layer_norm, "near_epsilon" and "vast" included. widths: smallest and largest. rows: the
    smallest number of rows. plain: a gain of 1. gains: drawn for all channels at once, else a small number
    for each; the weight is the gain, or the gain less 1 where that is declared, and then often far below 1.
    epsilons: drawn where eps can be given.
    """

    def shapes(domain: Domain) -> list[Shape]:
        found = with_blocks(NORM_SHAPES, domain)
        return pooled([s for s in found if widths[0] <= s[-1] <= widths[1] and np.prod(s[:-1]) >= rows], domain)

    def make(domain: Domain, shape: Shape, family: str, other: int, seed: int) -> Case:
        # 1/sqrt(eps), the largest slope, stays in the range of the dtype
        usable = [e for e in epsilons if domain.dtype != "float16" or e > 1e-7] or [1e-6]
        eps = float(usable[other % len(usable)]) if "eps" in domain.accepts else 1e-6
        rng, layout = np.random.default_rng([seed, 1]), taking_turns(domain.admitted(layouts), other)
        gain = np.ones(shape[-1]) if plain else rng.integers(-2, 4, shape[-1]) / 2
        gain = np.full(shape[-1], gains[other % len(gains)]) if gains else gain
        weight = gain - 1 if domain.capabilities.rms_weight == "one_plus" else gain
        if domain.capabilities.rms_weight == "one_plus" and not plain and not gains and other % 4:
            weight = rng.integers(-15, 16, shape[-1]) / 1024
        arrays = {"x": norm_values(domain, family, seed, shape, eps), "weight": weight}
        return Case(domain.operation, arrays, {"eps": eps}, domain.dtype, layout, f"{family} seed {seed}")

    return recipe(shapes, make, families, examples)


def elementwise_cases(
    *,
    families: Sequence[str] = ("grid", "tail", *FAMILIES),
    extras: bool = False,
    layouts: Sequence[str] = ("contiguous",),
    examples: int = 12,
) -> Recipe:
    """Cases of gelu and relu.

    families: of values, and "grid" (eighths from -8 to 8) and "tail" (from -12 to -2, where gelu is small).
    extras: now and then values near the largest number, where that is declared.
    """

    def make(domain: Domain, shape: Shape, family: str, other: int, seed: int) -> Case:
        x = elementwise_values(family, seed, shape, domain.dtype)
        if extras and domain.capabilities.extreme_values and other % 7 == 5:
            x = near_largest(domain, shape, seed)
        layout = taking_turns(domain.admitted(layouts), other)
        return Case(domain.operation, {"x": x}, {}, domain.dtype, layout, f"{family} seed {seed}")

    return recipe(lambda domain: pooled(with_blocks(SHAPES, domain), domain), make, families, examples)


def elementwise_values(family: str, seed: int, shape: Shape, dtype: str) -> np.ndarray:
    """Values of a family; two of them know where gelu bends and where it fades."""
    rng = np.random.default_rng(seed)
    if family == "grid":
        return rng.integers(-64, 65, shape) / 8
    if family == "tail":
        return -rng.uniform(2, 12, shape)
    return fill(family, seed, shape, dtype)


def feed_forward_cases(
    *,
    families: Sequence[str] = FORWARD,
    biases: bool = True,
    rows: int = 1,
    inner: int = 1,
    square: bool = False,
    layouts: Sequence[str] = ("contiguous",),
    examples: int = 12,
) -> Recipe:
    """Cases of feed_forward.

    biases: small numbers, else 0. rows: the smallest number of rows. inner: the smallest inner width.
    square: both widths alike.
    """

    def shapes(domain: Domain) -> list[Shape]:
        edges = [(2, n, m) for b in domain.capabilities.blocks for n, m in ((b + 1, b - 1 or 1), (b - 1 or 1, b + 1))]
        found = sorted(dict.fromkeys([*FEED_FORWARD_SHAPES, *edges]), key=lambda shape: int(np.prod(shape)))
        fit = [s for s in found if s[-1] >= inner and np.prod(s[:-2]) >= rows and (s[-1] == s[-2] or not square)]
        return pooled(fit, domain)

    def make(domain: Domain, shape: Shape, family: str, other: int, seed: int) -> Case:
        rng, layout = np.random.default_rng([seed, 1]), taking_turns(domain.admitted(layouts), other)
        width, wide = shape[-2:]
        arrays = {
            "x": fill(family, seed, shape[:-1], domain.dtype),
            "w1": weights(rng, (width, wide), other),
            "b1": rng.integers(-2, 3, wide) / 2 if biases else np.zeros(wide),
            "w2": weights(rng, (wide, width), other),
            "b2": rng.integers(-2, 3, width) / 2 if biases else np.zeros(width),
        }
        return Case(domain.operation, arrays, {}, domain.dtype, layout, f"{family} seed {seed}")

    return recipe(shapes, make, families, examples)


def weights(rng: np.random.Generator, shape: Shape, kind: int) -> np.ndarray:
    """A matrix of halves, or of normal values that keep the size of what they are applied to."""
    return rng.integers(-2, 3, shape) / 2 if kind % 2 else rng.standard_normal(shape) / shape[0] ** 0.5


def dropout_cases(
    *,
    families: Sequence[str] = tuple(FAMILIES),
    rates: Sequence[float] = RATES,
    extras: bool = False,
    layouts: Sequence[str] = ("contiguous",),
    examples: int = 12,
) -> Recipe:
    """Cases of dropout; a part of the uniform numbers equals the rate, where that is a multiple of 1 / GRID.

    rates: drawn in turn. extras: now and then values near the largest number, where that is declared.
    """

    def make(domain: Domain, shape: Shape, family: str, other: int, seed: int) -> Case:
        rng, rate = np.random.default_rng([seed, 1]), float(rates[other % len(rates)])
        x = fill(family, seed, shape, domain.dtype)
        if extras and domain.capabilities.extreme_values and other % 5 == 3:
            x = near_largest(domain, shape, seed)
        uniform = rng.integers(0, GRID, shape) / GRID
        if (rate * GRID).is_integer() and rate < 1:
            uniform = np.where(rng.random(shape) < 0.2, rate, uniform)
        layout = taking_turns(domain.admitted(layouts), other)
        arrays = {"x": x, "uniform": uniform}
        return Case(domain.operation, arrays, {"rate": rate}, domain.dtype, layout, f"{family} seed {seed}")

    return recipe(lambda domain: pooled(with_blocks(SHAPES, domain), domain), make, families, examples)


ID_FAMILIES = ("random", "edges", "equal", "descending", "each_once")


def embedding_cases(
    *,
    ids: Sequence[str] = ID_FAMILIES,
    padding: bool | None = None,
    layouts: Sequence[str] = ("contiguous",),
    examples: int = 12,
) -> Recipe:
    """Cases of embedding; no two rows of a table are alike.

    ids: ways to choose them. padding: padding_index always (True), never (False), or in two cases of three, where it
    can be given; it is among the ids in most of them.
    """

    def make(domain: Domain, shape: Shape, family: str, other: int, seed: int) -> Case:
        rng, layout = np.random.default_rng([seed, 1]), taking_turns(domain.admitted(layouts), other)
        rows, width = shape[-2:]
        chosen = id_values(family, rng, shape[:-2], rows)
        table = fill(("normal", "integers", "ladder", "large_mean")[other % 4], seed, (rows, width), domain.dtype)
        table = table + 8 * np.arange(rows)[:, None]
        given = padding if padding is not None else other % 3 > 0
        index = int(chosen.flat[0]) if other % 4 else rows - 1
        keywords = {"padding_index": index} if given and "padding_index" in domain.accepts else {}
        arrays = {"ids": chosen, "table": table}
        return Case(domain.operation, arrays, keywords, domain.dtype, layout, f"{family} seed {seed}")

    return recipe(lambda domain: pooled(list(EMBEDDING_SHAPES), domain), make, ids, examples)


def id_values(family: str, rng: np.random.Generator, shape: Shape, rows: int) -> np.ndarray:
    """Ids from 0 to rows - 1: any, the first and last only, one only, or each in turn from either end."""
    in_turn = np.arange(int(np.prod(shape))).reshape(shape) % rows
    return {
        "random": rng.integers(0, rows, shape),
        "edges": rng.integers(0, 2, shape) * (rows - 1),
        "equal": np.full(shape, rng.integers(0, rows)),
        "descending": rows - 1 - in_turn,
        "each_once": in_turn,
    }[family]


def taking_turns(values: Sequence[str], number: int) -> str:
    """One of the values, by a number of any size."""
    return values[number % len(values)]


def gain_of(case: Case, capabilities: Capabilities) -> np.ndarray:
    """What rms_norm scales each channel by: the weight, or 1 + weight where that is declared."""
    return case["weight"] + 1 if capabilities.rms_weight == "one_plus" else case["weight"]


def plain_rms_norm(domain: Domain) -> list[Case]:
    """One, two and three axes of normal values, gain 1."""
    weight = 0.0 if domain.capabilities.rms_weight == "one_plus" else 1.0
    shapes = ((4,), (3, 8), (2, 3, 16))
    return [plain(domain, i, x=shape, weight=np.full(shape[-1], weight)) for i, shape in enumerate(shapes)]


def plain_elementwise(domain: Domain) -> list[Case]:
    """One, two and three axes of normal values."""
    return [plain(domain, i, x=shape) for i, shape in enumerate(((4,), (3, 8), (2, 3, 16)))]


def plain_feed_forward(domain: Domain) -> list[Case]:
    """Two and three axes of normal values, the inner width twice or four times the outer."""
    sizes = ((3, 4, 8), (2, 3, 8, 32))
    return [
        plain(domain, i, x=s[:-1], w1=s[-2:], b1=np.zeros(s[-1]), w2=(s[-1], s[-2]), b2=np.zeros(s[-2]))
        for i, s in enumerate(sizes)
    ]


def plain_dropout(domain: Domain) -> list[Case]:
    """One, two and three axes of normal values, half of them dropped."""
    shapes = ((4,), (3, 8), (2, 3, 16))
    uniform = [np.random.default_rng(i).integers(0, GRID, shape) / GRID for i, shape in enumerate(shapes)]
    cases = [plain(domain, i, x=shape, uniform=uniform[i]) for i, shape in enumerate(shapes)]
    return [case.with_keywords(rate=0.5) for case in cases]


def plain_embedding(domain: Domain) -> list[Case]:
    """One and two axes of ids into a table of normal values."""
    sizes = (((4,), 8), ((2, 5), 16))
    ids = [np.random.default_rng(i).integers(0, 10, shape) for i, (shape, _) in enumerate(sizes)]
    return [plain(domain, i, ids=ids[i], table=(10, width)) for i, (_, width) in enumerate(sizes)]


def plain(domain: Domain, seed: int, **arrays: np.ndarray | Shape) -> Case:
    """A case of arrays as they are, and of normal values where a shape is given."""
    filled = {
        name: fill("normal", 10 * seed + place, array, domain.dtype) if isinstance(array, tuple) else array
        for place, (name, array) in enumerate(arrays.items())
    }
    return Case(domain.operation, filled, {}, domain.dtype, origin=f"normal seed {10 * seed}")
