"""Recipes for the probabilities of the next token: vocabularies, logits that tie or nearly do, and filters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from veriformer.case import Case, round_to
from veriformer.declarations import Capabilities
from veriformer.law import Domain, Recipe
from veriformer.properties.cases import Shape, bearable, few, pooled, recipe, with_blocks, with_holes
from veriformer.properties.families import fill
from veriformer.properties.rows_cases import plain
from veriformer.reference import softmax

VOCABULARIES = (
    (1,), (2,), (3,), (1, 2), (4,), (5,), (2, 3), (3, 2), (7,), (2, 4), (8,), (9,), (2, 5), (3, 4), (1, 3, 5), (2, 8),
    (17,), (2, 9), (3, 7), (2, 3, 4), (33,), (4, 9), (63,), (64,), (65,), (2, 63), (3, 65), (257,), (2, 256), (1025,),
)  # fmt: skip
"""Shapes of logits, small to large; the tile sizes 8, 16, 32, 64, 256 and 1024 have their neighbours here."""

TILES = ((2,), (3,), (1, 4), (7,), (8,), (9,), (2, 16), (33,), (63,), (64,), (2, 65), (127,), (128,), (257,), (1025,))
"""Shapes around tile sizes."""
LARGE = ((4097,), (2, 4096), (70000,))
"""Vocabularies over which a short sum stands still."""

LOGITS = (
    "zipf", "integers", "normal", "near_ties", "one_hot", "halves", "constant", "sparse", "heavy", "low", "ladder",
    "large_mean", "huge",
)  # fmt: skip
"""Families of logits, in the order in which pinned cases take them."""
MODERATE = ("zipf", "integers", "normal", "halves", "heavy", "sparse")
"""Those whose probabilities mostly stay well above underflow."""

FILTERS = ("k", "p", "kp", "")
"""Which of top_k and top_p are given."""
TEMPERATURES = (1.0, 0.5, 2.0, 0.1, 8.0, 3.0, 0.7)
MASSES = (0.9, 0.5, 0.0, 0.95, 0.3, 1.0, 0.8, 1e-6, 0.99)


def next_token_cases(
    *,
    families: Sequence[str] = LOGITS,
    filters: Sequence[str] = FILTERS,
    temperatures: Sequence[float] = TEMPERATURES,
    masses: Sequence[float] = MASSES,
    shapes: Sequence[Shape] = VOCABULARIES,
    infinite: float = 0.25,
    extras: bool = False,
    least: int = 1,
    rows: int = 1,
    layouts: Sequence[str] = ("contiguous",),
    examples: int = 12,
) -> Recipe:
    """Cases of next_token_probabilities.

    families: of values, "near_ties" and "zipf" among them. filters: taken in turn, as far as they are
    accepted. masses: for top_p, which in every second case lies amid two sums of a row's probabilities
    instead. infinite: the share of -inf in every third case, never a whole row. extras: now and then
    T = 0, where that is declared. least: the smallest vocabulary. rows: the smallest number of rows.
    """

    def admitted(domain: Domain) -> list[Shape]:
        found = with_blocks(shapes, domain)
        return pooled([s for s in found if s[-1] >= least and np.prod(s[:-1]) >= rows], domain)

    def make(domain: Domain, shape: Shape, family: str, other: int, seed: int) -> Case:
        rng, layout = np.random.default_rng([seed, 2]), domain.admitted(layouts)
        x = logit_values(family, seed, shape, domain.dtype)
        if infinite and other % 3 == 2:
            x = with_absent_tokens(x, infinite, seed)
        words = drawn_filters(rng, filters[other % len(filters)], x, masses)
        words["temperature"] = drawn_temperature(domain, rng, temperatures, extras, x)
        if "p" in filters[other % len(filters)] and rng.random() < 0.5:
            words["top_p"] = amid(domain, x, words, rng)
        given = {word: value for word, value in words.items() if word in domain.accepts}
        origin = f"{family} seed {seed}"
        return Case(domain.operation, {"logits": x}, given, domain.dtype, layout[other % len(layout)], origin)

    return recipe(admitted, make, families, examples)


def large_vocabulary_cases() -> Recipe:
    """A few vocabularies of many thousand tokens, with top_p; there is no search beyond them."""
    cases = next_token_cases(
        families=("constant", "zipf", "normal"), filters=("p",), temperatures=(1.0,), masses=(0.5, 0.9, 0.7),
        shapes=LARGE, infinite=0.0, examples=4,
    )  # fmt: skip
    return Recipe(cases.examples, few(cases.examples))


def equal_token_cases() -> Recipe:
    """Rows of V equal logits, V a power of two, and p = m/V: every sum is exact where each share is."""

    def make(domain: Domain, shape: Shape, family: str, other: int, seed: int) -> Case:
        rng, size = np.random.default_rng(seed), shape[-1]
        logits = np.full(shape, float(rng.choice([0.0, 1.0, -3.0, 0.1])))
        words = {"top_p": int(rng.integers(0, size + 1)) / size, "temperature": float(rng.choice([1.0, 2.0, 0.5]))}
        given = {word: value for word, value in words.items() if word in domain.accepts}
        return Case(domain.operation, {"logits": logits}, given, domain.dtype, origin=f"{family} seed {seed}")

    shapes = [(2,), (4,), (2, 2), (8,), (3, 4), (16,), (64,)]
    return recipe(lambda domain: pooled(shapes, domain), make, ("equal",), 12)


def logit_values(family: str, seed: int, shape: Shape, dtype: str) -> np.ndarray:
    """Logits of a family; two of them are of this file."""
    rng = np.random.default_rng(seed)
    if family == "near_ties":
        step = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype]
        return rng.choice([1.0, 1.0, 0.0], shape) + step * rng.integers(0, 3, shape)
    if family == "zipf":
        steepness = float(rng.choice([0.7, 1.0, 2.0]))
        return rng.permuted(np.broadcast_to(-steepness * np.log(np.arange(1, shape[-1] + 1.0)), shape), axis=-1)
    return fill(family, seed, shape, dtype)


def with_absent_tokens(x: np.ndarray, share: float, seed: int) -> np.ndarray:
    """Some logits -inf, never all of a row, nor the first token of a single one, which other layouts repeat."""
    holes = with_holes(x, -1, share, seed)
    if x.size == x.shape[-1]:
        holes[..., :1] = x[..., :1]
    return holes


def drawn_filters(rng: np.random.Generator, letters: str, x: np.ndarray, masses: Sequence[float]) -> dict[str, object]:
    """Values for top_k (from 1 to more than there are) and top_p."""
    words: dict[str, object] = {}
    size = x.shape[-1]
    if "k" in letters:
        counts = (1, 2, max(size // 2, 1), max(size - 1, 1), size, size + 3, int(rng.integers(1, size + 1)))
        words["top_k"] = int(rng.choice(counts))
    if "p" in letters:
        words["top_p"] = float(rng.choice(masses))
    return words


def drawn_temperature(
    domain: Domain, rng: np.random.Generator, temperatures: Sequence[float], extras: bool, x: np.ndarray
) -> float:
    """A temperature that the dtype bears; now and then 0 if that is wished and declared."""
    beyond = domain.capabilities if extras else Capabilities()
    if beyond.zero_temperature and rng.random() < 0.2:
        return 0.0
    return bearable(float(rng.choice(temperatures)), x, domain.dtype)


def amid(domain: Domain, x: np.ndarray, words: dict[str, object], rng: np.random.Generator) -> float:
    """A mass half way between two sums of the most probable tokens of the first row: no rounding moves the cut."""
    first = domain.capabilities.sampling_order == "temperature_first"
    left = words.get("top_k") if "top_k" in domain.accepts else None
    logits = np.sort(round_to(x, domain.dtype).reshape(-1, x.shape[-1])[0])[::-1][:left]
    temperature = words["temperature"] if first and "temperature" in domain.accepts else 1.0
    sums = np.concatenate([[0.0], np.cumsum(softmax(logits, temperature=temperature))])
    cut = int(rng.integers(1, sums.size))
    return float(min((sums[cut - 1] + sums[cut]) / 2, 1.0))


def plain_next_token_probabilities(domain: Domain) -> list[Case]:
    """One, two and three axes of normal logits, no filter."""
    return [plain(domain, i, logits=shape) for i, shape in enumerate(((4,), (3, 8), (2, 3, 16)))]
