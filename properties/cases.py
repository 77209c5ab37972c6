"""Recipes for the operations that reduce along one axis: the softmax family and LayerNorm."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from hypothesis import strategies as st

from veriformer.budgets import Precision
from veriformer.case import Case
from veriformer.declarations import Capabilities
from veriformer.law import Domain, Recipe
from veriformer.properties.families import FAMILIES, fill

SHAPES = (
    (1,), (2,), (3,), (1, 2), (2, 1), (5,), (2, 3), (3, 2), (4, 5), (2, 3, 4), (7,), (3, 8), (2, 9), (1, 3, 2, 5),
    (4, 1, 3), (16,), (2, 17), (3, 5, 7), (33,), (2, 31), (5, 64), (3, 65), (130,), (2, 127), (2, 257), (1025,),
)  # fmt: skip
"""Shapes of x, small to large; the block edges 8, 32, 64, 128 and 1024 have their neighbours here."""

NORM_SHAPES = (
    (1, 1), (1, 2), (2, 2), (3,), (2, 3), (1, 4), (3, 5), (2, 3, 4), (4, 7), (2, 8), (5, 3), (1, 2, 3, 5), (3, 16),
    (2, 17), (5, 31), (2, 64), (3, 65), (2, 127), (1, 256), (2, 1024),
)  # fmt: skip
"""Shapes of LayerNorm's x; widths 2 to 4 show the variance's divisor."""

TEMPERATURES = (1.0, 2.0, 0.5, 0.1, 8.0, 3.0)
EPSILONS = (1e-5, 1.0, 1e-3, 1e-6, 1e-12)

Shape = tuple[int, ...]
Make = Callable[[Domain, Shape, str, int, int], Case]


def softmax_cases(
    *,
    families: Sequence[str] = tuple(FAMILIES),
    axes: bool = False,
    infinite: float = 0.0,
    always: bool = False,
    extras: bool = False,
    temperatures: Sequence[float] = (1.0,),
    least: int = 1,
    rows: int = 1,
    layouts: Sequence[str] = ("contiguous",),
    examples: int = 10,
) -> Recipe:
    """Cases of softmax, log_softmax and logsumexp.

    axes: any axis is drawn, else the last. infinite: share of entries that are -inf, never a whole
    row, in every second case (always: in each). extras: now and then a whole row of -inf, values near
    the largest number, or T = 0, where these are declared. temperatures: drawn where the domain has
    one. least: the smallest length of the last axis, and of the reduced one. rows: the smallest number
    of rows.
    """

    def shapes(domain: Domain) -> list[Shape]:
        found = with_blocks(SHAPES, domain)
        return pooled([s for s in found if s[-1] >= least and np.prod(s[:-1]) >= rows], domain)

    def make(domain: Domain, shape: Shape, family: str, other: int, seed: int) -> Case:
        x, admitted = fill(family, seed, shape, domain.dtype), domain.admitted(layouts)
        axis = pick_axis(shape, least, rows, other // 3) if axes and "axis" in domain.accepts else -1
        beyond = domain.capabilities if extras else Capabilities()
        if beyond.extreme_values and other % 7 == 5:
            x = near_largest(domain, shape, seed)
        if infinite and (always or other % 2):
            x = with_holes(x, axis, infinite, seed, always)
        if beyond.empty_softmax_row and other % 4 == 3:
            x = with_empty_row(x, axis)
        keywords = {"axis": axis} if "axis" in domain.accepts else {}
        if "temperature" in domain.accepts:
            temperature = 0.0 if beyond.zero_temperature and other % 5 == 4 else temperatures[other % len(temperatures)]
            keywords["temperature"] = bearable(temperature, x, domain.dtype)
        return Case(
            domain.operation, {"x": x}, keywords, domain.dtype, admitted[other % len(admitted)], f"{family} seed {seed}"
        )

    return recipe(shapes, make, families, examples)


def pick_axis(shape: Shape, least: int, rows: int, number: int) -> int:
    """An axis, counted from either end, that is long enough and leaves enough rows."""
    size = int(np.prod(shape))
    fit = [a for a in range(-len(shape), len(shape)) if shape[a] >= least and size >= rows * shape[a]]
    return fit[-1 - number % len(fit)]


def with_holes(x: np.ndarray, axis: int, share: float, seed: int, some: bool = False) -> np.ndarray:
    """Some entries -inf (some: at least one in each row), but never all along the axis."""
    rng = np.random.default_rng([seed, 1])
    holes = np.moveaxis(rng.random(x.shape) < share, axis, -1)
    kept = rng.integers(0, holes.shape[-1], (*holes.shape[:-1], 1))
    if some:
        np.put_along_axis(holes, (kept + 1) % holes.shape[-1], True, -1)
    np.put_along_axis(holes, kept, False, -1)
    return np.where(np.moveaxis(holes, -1, axis), -np.inf, x)


def with_empty_row(x: np.ndarray, axis: int) -> np.ndarray:
    """The first row along the axis all -inf."""
    rows = np.moveaxis(x, axis, -1).copy()
    rows[(0,) * (x.ndim - 1)] = -np.inf
    return np.moveaxis(rows, -1, axis)


def near_largest(domain: Domain, shape: Shape, seed: int) -> np.ndarray:
    """Values near the largest of the dtype, as far as the result and a float64 reference can hold them."""
    rng = np.random.default_rng(seed)
    limit = Precision(domain.dtype).largest
    limit = limit / 4 if domain.dtype == "float64" or domain.operation == "log_softmax" else limit
    return rng.choice([-1.0, 1.0], shape) * rng.choice([1.0, 0.75, 0.5], shape) * limit


def bearable(temperature: float, x: np.ndarray, dtype: str) -> float:
    """The temperature, or 1 where x / T would leave the range of float16."""
    peak = np.abs(x[np.isfinite(x)]).max(initial=0.0)
    return float(temperature) if dtype != "float16" or peak <= 3e4 * temperature or not temperature else 1.0


def layer_norm_cases(
    *,
    families: Sequence[str] = tuple(FAMILIES),
    widths: tuple[int, int] = (1, 10**6),
    rows: int = 1,
    plain: bool = False,
    weights: Sequence[float] = (),
    epsilons: Sequence[float] = EPSILONS,
    layouts: Sequence[str] = ("contiguous",),
    examples: int = 10,
) -> Recipe:
    """Cases of layer_norm.

    families: of values, and "near_epsilon" (a variance within three powers of ten of eps) and "vast"
    (as large as squares can be summed). widths: smallest and largest. rows: the smallest number of
    rows. plain: weight 1 and bias 0. weights: drawn for all channels at once, else a small number for
    each. epsilons: drawn where eps can be given.
    """

    def shapes(domain: Domain) -> list[Shape]:
        found = with_blocks((*NORM_SHAPES, *((n, 1) for n in (3, 33) if widths[1] == 1)), domain)
        return pooled([s for s in found if widths[0] <= s[-1] <= widths[1] and np.prod(s[:-1]) >= rows], domain)

    def make(domain: Domain, shape: Shape, family: str, other: int, seed: int) -> Case:
        usable = [e for e in epsilons if domain.dtype != "float16" or e > 1e-7] or [1e-5]
        eps = float(usable[other % len(usable)]) if "eps" in domain.accepts else 1e-5
        rng, admitted = np.random.default_rng([seed, 1]), domain.admitted(layouts)
        width = shape[-1]
        arrays = {
            "x": norm_values(domain, family, seed, shape, eps),
            "weight": np.ones(width) if plain else rng.integers(-2, 4, width) / 2,
            "bias": np.zeros(width) if plain else rng.integers(-2, 3, width).astype(float),
        }
        if weights:
            arrays["weight"] = np.full(width, weights[other % len(weights)])
        return Case(
            domain.operation,
            arrays,
            {"eps": eps},
            domain.dtype,
            admitted[other % len(admitted)],
            f"{family} seed {seed}",
        )

    return recipe(shapes, make, families, examples)


def norm_values(domain: Domain, family: str, seed: int, shape: Shape, eps: float) -> np.ndarray:
    """Values of a family; two of them need to know more than the shape."""
    rng = np.random.default_rng(seed)
    if family == "near_epsilon":
        size = eps**0.5 * 10 ** rng.uniform(-1.5, 1.5)
        return size * (rng.standard_normal(shape) + float(rng.choice([0.0, 0.0, 3.0])))
    if family == "vast":
        precision = Precision.of(domain.capabilities, domain.dtype)
        sums = Precision(precision.accumulator).largest
        return np.clip(rng.standard_normal(shape), -3, 3) * min(precision.largest / 8, (sums / 64 / shape[-1]) ** 0.5)
    return fill(family, seed, shape, domain.dtype)


def with_blocks(table: Sequence[Shape], domain: Domain) -> list[Shape]:
    """The table and rows around the declared blocks, small to large."""
    edges = [(2, n) for b in domain.capabilities.blocks for n in (b - 1, b, b + 1, 2 * b - 1) if n > 0]
    return sorted(dict.fromkeys([*table, *edges]), key=lambda shape: int(np.prod(shape)))


def pooled(shapes: list[Shape], domain: Domain) -> list[Shape]:
    """At most 12 shapes where each new one is slow."""
    return shapes[:: -(-len(shapes) // 12)] if domain.capabilities.compiles_per_shape and shapes else shapes


def recipe(shapes: Callable[[Domain], list[Shape]], make: Make, families: Sequence[str], examples: int) -> Recipe:
    """Pinned cases walk through shapes, families and options together; the search draws each once."""

    def pinned(domain: Domain) -> list[Case]:
        table = shapes(domain)
        numbers = range(examples if table else 0)
        return [make(domain, table[i * len(table) // examples], families[i % len(families)], i, i) for i in numbers]

    def search(domain: Domain) -> st.SearchStrategy[Case]:
        table = shapes(domain)
        if not table:
            return st.nothing()
        parts = (len(table) - 1, len(families) - 1, 2**16 - 1, 2**16 - 1)
        draws = st.tuples(*(st.integers(0, top) for top in parts))
        return draws.map(lambda d: make(domain, table[d[0]], families[d[1]], d[2], d[3]))

    return Recipe(pinned, search)


def few(examples: Callable[[Domain], list[Case]]) -> Callable[[Domain], st.SearchStrategy[Case]]:
    """A search over a handful of cases."""
    return lambda domain: st.sampled_from(examples(domain))


def plain_attention(domain: Domain) -> list[Case]:
    """Square attention with equal widths (the declared ones, if any)."""
    widths = domain.capabilities.widths
    cases = []
    for i, (batch, heads, length, width) in enumerate([(1, 1, 4, 8), (2, 2, 8, 16), (2, 4, 16, 64)]):
        shape = (batch, heads, length, widths[i % len(widths)] if widths else width)
        arrays = {name: fill("normal", 10 * i + j, shape, domain.dtype) for j, name in enumerate("qkv")}
        cases.append(Case(domain.operation, arrays, {}, domain.dtype, origin=f"normal seed {10 * i}"))
    return cases


def plain_rows(domain: Domain) -> list[Case]:
    """One, two and three axes of normal values, reduced along the last."""
    cases = []
    for i, shape in enumerate([(4,), (3, 8), (2, 3, 16)]):
        arrays = {"x": fill("normal", i, shape, domain.dtype)}
        if domain.operation == "layer_norm":
            arrays |= {"weight": np.ones(shape[-1]), "bias": np.zeros(shape[-1])}
        cases.append(Case(domain.operation, arrays, {}, domain.dtype, origin=f"normal seed {i}"))
    return cases
