"""Recipes for what tells a model where a token stands: sinusoidal_positions, rotary_embedding, alibi_bias."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from veriformer.case import Case
from veriformer.law import Domain, Recipe
from veriformer.properties.cases import Shape, pooled, recipe
from veriformer.properties.families import FAMILIES, fill

SINUSOID_SHAPES = (
    (1, 1), (1, 2), (2, 1), (2, 2), (3, 2), (2, 3), (3, 3), (3, 4), (4, 2), (2, 5), (5, 4), (4, 6), (7, 3), (3, 8),
    (5, 7), (9, 6), (4, 16), (17, 5), (8, 12), (33, 4), (3, 65), (6, 64), (130, 2), (12, 33), (2, 257), (65, 10),
    (300, 6), (5, 512),
)  # fmt: skip
"""(length, width), small to large."""

OFFSETS = (0, 1, 3, 254, 17, 1000, 2047, 70_000)
"""254 and 2047 are followed by the first whole numbers that bfloat16 and float16 lack."""

ROTARY_SHAPES = (
    (1, 2), (2, 2), (1, 4), (3, 2), (2, 4), (3, 1, 2), (2, 3, 4), (4, 6), (1, 5, 2), (2, 3, 8), (1, 2, 3, 4), (5, 16),
    (2, 2, 4, 6), (3, 3, 8), (2, 5, 10), (2, 1, 3, 2, 4), (1, 3, 7, 12), (3, 64), (17, 14), (2, 33, 4), (2, 4, 5, 32),
    (65, 6), (1, 2, 9, 80), (2, 3, 128), (1, 1, 4, 256),
)  # fmt: skip
"""Shapes of x, small to large; the two last axes are tokens and channels."""

BASES = (10000.0, 100.0, 500_000.0, 10000.0, 2.0)
FAR = 100_000

ALIBI_HEADS = (1, 2, 3, 4, 6, 8, 12, 5, 7, 16, 9, 10, 17, 11, 13, 14, 15, 32, 24, 64)
ALIBI_LENGTHS = (
    (1, 1), (1, 2), (2, 2), (1, 3), (2, 3), (3, 3), (3, 2), (1, 5), (4, 2), (2, 5), (5, 5), (4, 7), (7, 3), (1, 33),
    (9, 17), (5, 65), (2, 300),
)  # fmt: skip
"""(query_length, key_length), small to large; 300 keys are more than bfloat16 can count."""

Walk = Callable[[np.random.Generator, int], np.ndarray]

WALKS: dict[str, Walk] = {
    "counting": lambda rng, n: np.arange(n),
    "later": lambda rng, n: np.arange(n) + int(rng.choice([1, 2, 5, 254, 2047])),
    "zero": lambda rng, n: np.zeros(n),
    "shuffled": lambda rng, n: rng.permutation(n + 1)[:n],
    "jumps": lambda rng, n: np.sort(rng.permutation(4 * n)[:n]) + 1,
    "restarting": lambda rng, n: np.arange(n) % (n // 2 + 1),
    "padded": lambda rng, n: np.maximum(np.arange(n) - n // 3, 0),
    "still": lambda rng, n: np.full(n, rng.integers(1, 30)),
    "one": lambda rng, n: np.ones(n),
    "far": lambda rng, n: rng.integers(0, FAR, n),
}
"""Positions of n tokens: in order, from an offset, all alike, packed, padded on the left, anywhere up to 100 000."""


def sinusoidal_positions_cases(
    *,
    length: int = 1,
    parity: int | None = None,
    widths: tuple[int, int] = (1, 10**6),
    offsets: Sequence[int] = OFFSETS,
    examples: int = 14,
) -> Recipe:
    """Cases of sinusoidal_positions.

    length: the smallest. parity: only even (0) or odd (1) widths. widths: smallest and largest. offsets:
    drawn where an offset can be given.
    """

    def shapes(domain: Domain) -> list[Shape]:
        edges = [s for n in block_edges(domain) for s in ((n, 4), (3, n))]
        found = sorted(dict.fromkeys([*SINUSOID_SHAPES, *edges]), key=lambda shape: shape[0] * shape[1])
        fit = [s for s in found if s[0] >= length and widths[0] <= s[1] <= widths[1]]
        return pooled([s for s in fit if parity is None or s[1] % 2 == parity], domain)

    def make(domain: Domain, shape: Shape, family: str, other: int, seed: int) -> Case:
        keywords = {"length": shape[0], "width": shape[1]}
        if "offset" in domain.accepts:
            keywords["offset"] = offsets[other % len(offsets)]
        return Case(domain.operation, {}, keywords, domain.dtype, origin="table")

    return recipe(shapes, make, ("",), examples)


def rotary_embedding_cases(
    *,
    families: Sequence[str] = tuple(FAMILIES),
    walks: Sequence[str] = tuple(WALKS),
    bases: Sequence[float] = BASES,
    tokens: int = 1,
    width: int = 2,
    rows: int = 1,
    axes: int = 2,
    layouts: Sequence[str] = ("contiguous",),
    examples: int = 18,
) -> Recipe:
    """Cases of rotary_embedding.

    walks: kinds of positions. bases: drawn where a base can be given. tokens, width, rows, axes: the
    smallest number of tokens, of channels, of rows (all but the last axis) and of axes.
    """

    def shapes(domain: Domain) -> list[Shape]:
        edges = [s for n in block_edges(domain) for s in ((2, n, 4), (3, n + n % 2))]
        found = sorted(dict.fromkeys([*ROTARY_SHAPES, *edges]), key=lambda shape: int(np.prod(shape)))
        if domain.capabilities.widths:
            found = [(*s[:-1], d) for s, d in zip(found, len(found) * domain.capabilities.widths, strict=False)]
        fit = [s for s in found if s[-2] >= tokens and s[-1] >= width and len(s) >= axes]
        return pooled([s for s in fit if np.prod(s[:-1]) >= rows and s[-1] % 2 == 0], domain)

    def make(domain: Domain, shape: Shape, family: str, other: int, seed: int) -> Case:
        walk, admitted = walks[other % len(walks)], domain.admitted(layouts)
        arrays = {
            "x": fill(family, seed, shape, domain.dtype),
            "positions": WALKS[walk](np.random.default_rng([seed, 1]), shape[-2]),
        }
        keywords = {"base": bases[other // 2 % len(bases)]} if "base" in domain.accepts else {}
        layout = admitted[other % len(admitted)]
        return Case(domain.operation, arrays, keywords, domain.dtype, layout, f"{family} {walk} seed {seed}")

    return recipe(shapes, make, families, examples)


def alibi_bias_cases(
    *, queries: int = 1, keys: int = 1, heads: Sequence[int] = ALIBI_HEADS, examples: int = 20
) -> Recipe:
    """Cases of alibi_bias; queries and keys: the smallest numbers of them."""

    def lengths(domain: Domain) -> list[Shape]:
        edges = [s for n in block_edges(domain) for s in ((2, n), (n, n + 1))]
        found = sorted(dict.fromkeys([*ALIBI_LENGTHS, *edges]), key=lambda shape: shape[0] * shape[1])
        return pooled([s for s in found if s[0] >= queries and s[1] >= keys], domain)

    def make(domain: Domain, shape: Shape, family: str, other: int, seed: int) -> Case:
        keywords = {"heads": heads[other % len(heads)], "query_length": shape[0], "key_length": shape[1]}
        return Case(domain.operation, {}, keywords, domain.dtype, origin="table")

    return recipe(lengths, make, ("",), examples)


def block_edges(domain: Domain) -> list[int]:
    """Sizes around the declared blocks."""
    return [n for b in domain.capabilities.blocks for n in (b - 1, b, b + 1, 2 * b - 1) if n > 0]


def plain_sinusoidal_positions(domain: Domain) -> list[Case]:
    """Even widths and an odd one, from position 0."""
    return [
        Case(domain.operation, {}, {"length": length, "width": width}, domain.dtype, origin="plain")
        for length, width in ((4, 8), (8, 16), (3, 5))
    ]


def plain_rotary_embedding(domain: Domain) -> list[Case]:
    """Two, three and four axes of normal values, tokens in order."""
    cases = []
    for i, shape in enumerate([(4, 8), (2, 3, 4), (1, 2, 6, 16)]):
        widths = domain.capabilities.widths
        shape = (*shape[:-1], widths[i % len(widths)]) if widths else shape
        arrays = {"x": fill("normal", i, shape, domain.dtype), "positions": np.arange(shape[-2])}
        cases.append(Case(domain.operation, arrays, {}, domain.dtype, origin=f"normal seed {i}"))
    return cases


def plain_alibi_bias(domain: Domain) -> list[Case]:
    """Square, for a power of two of heads, and a longer memory."""
    names = ("heads", "query_length", "key_length")
    return [
        Case(domain.operation, {}, dict(zip(names, sizes, strict=True)), domain.dtype, origin="plain")
        for sizes in ((4, 4, 4), (8, 6, 6), (2, 3, 5))
    ]
