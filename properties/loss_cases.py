"""Recipes for cross entropy: logits, targets at the ends of the vocabulary, ignored rows, smoothing, reductions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from veriformer.case import Case
from veriformer.law import Domain, Recipe
from veriformer.properties.cases import Shape, few, pooled, recipe, with_blocks
from veriformer.properties.generation_cases import LOGITS, logit_values
from veriformer.properties.rows_cases import plain
from veriformer.reference.loss import SMOOTHING

LOSS_SHAPES = (
    (1, 2), (2, 2), (1, 3), (3, 2), (2, 3), (4, 2), (3, 3), (2, 4), (5, 2), (4, 3), (3, 1), (2, 7), (5, 3), (3, 5),
    (2, 8), (6, 3), (2, 9), (3, 7), (9, 4), (4, 16), (17, 5), (3, 33), (33, 3), (2, 65), (5, 31), (65, 3), (3, 127),
    (257, 2), (2, 256), (4, 257), (2, 1025),
)  # fmt: skip
"""Rows and classes, small to large; the tile sizes 8, 16, 32, 64, 128, 256 and 1024 have their neighbours here."""
FEW_CLASSES = ((2, 2), (3, 2), (2, 3), (4, 2), (3, 3), (5, 3), (4, 4), (2, 7), (3, 7), (6, 7), (9, 5), (5, 9))
"""Vocabularies in which a wrong share of label_smoothing is far off."""
MANY_ROWS = ((300, 2), (3000, 2), (70000, 2))
"""More rows than bfloat16 counts one by one, and more than float16 has numbers for."""

TARGETS = ("random", "edges", "unlikeliest", "descending", "likeliest", "equal")
"""How targets are chosen: any, the first and last class only, those of the smallest or largest logit, in turn."""
EPSILONS = (0.0, 0.1, 0.0, 0.4)
REDUCTIONS = ("mean", "sum", "none")
IGNORING = ("some", "none", "first", "last", "some")
"""Which rows are ignored; there is also "all"."""
OUTSIDE = (-100, -1, -7)
"""Ids of ignored rows that are no class; V is another one, and then there are the classes 0, V - 1 and V // 2."""


def cross_entropy_cases(
    *,
    families: Sequence[str] = LOGITS,
    shapes: Sequence[Shape] = LOSS_SHAPES,
    epsilons: Sequence[float] = EPSILONS,
    reductions: Sequence[str] = REDUCTIONS,
    ignoring: Sequence[str] = IGNORING,
    targets: Sequence[str] = TARGETS,
    infinite: float = 0.2,
    least: int = 1,
    rows: int = 1,
    layouts: Sequence[str] = ("contiguous",),
    examples: int = 12,
) -> Recipe:
    """Cases of cross_entropy; unless all rows are ignored at least one is kept.

    families: of logits. epsilons: label_smoothing, taken in turn as far as the classes suffice for the declared
    smoothing. ignoring: rows. infinite: the share of -inf, in every fourth case, among classes that are not wanted.
    least: the smallest number of classes. rows: the smallest number of rows.
    """

    def admitted(domain: Domain) -> list[Shape]:
        edges = [(b + 1, b - 1 or 1) for b in domain.capabilities.blocks]
        found = with_blocks((*shapes, *edges) if shapes is LOSS_SHAPES else shapes, domain)
        return pooled([s for s in found if s[0] >= rows and s[1] >= least], domain)

    def make(domain: Domain, shape: Shape, family: str, other: int, seed: int) -> Case:
        rng, size = np.random.default_rng([seed, 3]), shape[1]
        epsilon = drawn_epsilon(domain, epsilons, size, other)
        ignored = drawn_id(domain, epsilon, size, other)
        logits = logit_values(family, seed, shape, domain.dtype)
        wanted = target_values(targets[other % len(targets)], rng, logits, ignored)
        goes = ignored_rows(ignoring[other % len(ignoring)], rng, shape[0])
        if "ignore_index" in domain.accepts:
            wanted = np.where(goes, ignored, wanted)
        if infinite and not epsilon and other % 4 == 2:
            logits = with_absent_classes(logits, wanted, infinite, rng)
        words = {
            "label_smoothing": epsilon,
            "ignore_index": ignored,
            "reduction": reductions[(other // 2) % len(reductions)],
        }
        given = {word: value for word, value in words.items() if word in domain.accepts}
        layout = domain.admitted(layouts)
        arrays = {"logits": logits, "targets": wanted}
        origin = f"{family} seed {seed}"
        return Case(domain.operation, arrays, given, domain.dtype, layout[other % len(layout)], origin)

    return recipe(admitted, make, families, examples)


def many_row_cases() -> Recipe:
    """A few cases of thousands of equal rows under the mean; there is no search beyond them."""
    cases = cross_entropy_cases(
        families=("constant",), shapes=MANY_ROWS, reductions=("mean",), ignoring=("none",), targets=("equal",),
        infinite=0.0, examples=3,
    )  # fmt: skip
    return Recipe(cases.examples, few(cases.examples))


def dense_loss_cases() -> Recipe:
    """Two cases of a thousand rows and more, standard normal, plain and smoothed; there is no search."""

    def examples(domain: Domain) -> list[Case]:
        cases = []
        for seed, (rows, size, epsilon) in enumerate(((2048, 16, 0.0), (1024, 96, 0.1))):
            rng = np.random.default_rng(seed)
            arrays = {"logits": rng.standard_normal((rows, size)), "targets": rng.integers(1, size, rows)}
            words = {"reduction": "none", "label_smoothing": epsilon, "ignore_index": 0}
            given = {word: value for word, value in words.items() if word in domain.accepts}
            cases.append(Case(domain.operation, arrays, given, domain.dtype, origin=f"standard normal seed {seed}"))
        return cases

    return Recipe(examples, lambda domain: st.nothing())


def drawn_epsilon(domain: Domain, epsilons: Sequence[float], size: int, other: int) -> float:
    """A label_smoothing, 0 where there is no class to share it, or one class alone."""
    enough = size > max(SMOOTHING.index(domain.capabilities.smoothing), 1)
    return epsilons[other % len(epsilons)] if enough and "label_smoothing" in domain.accepts else 0.0


def drawn_id(domain: Domain, epsilon: float, size: int, other: int) -> int:
    """An ignore_index: a class if that is the padding class, else any number; -100 where it cannot be given."""
    if "ignore_index" not in domain.accepts:
        return -100
    classes = (0, size - 1, size // 2)
    if domain.capabilities.smoothing == "others_but_padding" and epsilon:
        return classes[other % 3]
    numbers = (*OUTSIDE, size, *classes) if size > 1 else OUTSIDE
    return numbers[other % len(numbers)]


def target_values(kind: str, rng: np.random.Generator, logits: np.ndarray, ignored: int) -> np.ndarray:
    """A class for each row, none of them the ignored one."""
    rows, size = logits.shape
    found = {
        "random": rng.integers(0, size, rows),
        "edges": rng.integers(0, 2, rows) * (size - 1),
        "unlikeliest": logits.argmin(-1),
        "descending": size - 1 - np.arange(rows) % size,
        "likeliest": logits.argmax(-1),
        "equal": np.full(rows, rng.integers(0, size)),
    }[kind]
    return np.where(found == ignored, (found + 1) % size, found)


def ignored_rows(kind: str, rng: np.random.Generator, rows: int) -> np.ndarray:
    """Which rows are ignored; unless it is all, at least one is not."""
    if kind == "some":
        goes = rng.random(rows) < 0.4
        goes[rng.integers(rows)] = False
        return goes
    places = np.arange(rows)
    goes = {"none": places < 0, "first": places == 0, "last": places == rows - 1, "all": places >= 0}[kind]
    return goes if kind == "all" or rows > 1 else places < 0


def with_absent_classes(logits: np.ndarray, targets: np.ndarray, share: float, rng: np.random.Generator) -> np.ndarray:
    """Some logits -inf, but for those of the targets and, in ignored rows, the first."""
    holes = rng.random(logits.shape) < share
    size = logits.shape[1]
    inside = (targets >= 0) & (targets < size)
    np.put_along_axis(holes, np.where(inside, targets, 0)[:, None], False, 1)
    return np.where(holes, -np.inf, logits)


def plain_cross_entropy(domain: Domain) -> list[Case]:
    """Normal logits, every row kept, no keyword."""
    shapes = ((2, 3), (4, 7), (8, 16))
    targets = [np.random.default_rng(i).integers(0, size, rows) for i, (rows, size) in enumerate(shapes)]
    return [plain(domain, i, logits=shape, targets=targets[i]) for i, shape in enumerate(shapes)]
