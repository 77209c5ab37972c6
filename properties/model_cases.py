"""Recipes for models: weights where the suite gives them, tokens of any length, chunks, and walks through a cache."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from veriformer.case import Case
from veriformer.law import SHORT, Domain, Recipe

SIZES = (
    # B, T, V, layers, G, R, D, f
    (1, 2, 3, 1, 1, 1, 4, 3), (1, 3, 4, 1, 1, 2, 2, 3), (2, 2, 3, 1, 1, 1, 4, 3), (1, 4, 5, 2, 1, 2, 2, 4),
    (2, 3, 4, 1, 2, 1, 2, 5), (2, 4, 3, 2, 1, 2, 4, 3), (3, 3, 5, 1, 2, 2, 2, 4), (2, 5, 4, 2, 2, 1, 4, 6),
    (1, 6, 3, 2, 2, 2, 2, 4), (2, 6, 7, 3, 1, 2, 4, 5), (3, 5, 6, 2, 2, 3, 2, 7), (2, 8, 5, 2, 2, 2, 4, 8),
    (1, 9, 8, 1, 2, 1, 6, 4), (2, 12, 6, 2, 1, 3, 4, 6),
)  # fmt: skip
"""Sizes of models and tokens, small to large; for a model with weights of its own B and T alone count.

A width of 2 is left out: a norm makes two such channels 1 and -1, whatever they were.
"""
SCHEMES = ("rotary", "sinusoidal", "alibi", None)
"""Ways of telling a decoder-only model where its tokens stand."""
WINDOWS = (None, (1, 0), (2, None), (0, 0), (3, 0))

Sizes = tuple[int, ...]
Build = Callable[[Domain, Sizes, int, int], Case]
EXAMPLES = 6


def decoder_cases(
    *,
    schemes: Sequence[str | None] = SCHEMES,
    windows: Sequence[Any] = WINDOWS,
    rows: int = 1,
    least: int = 2,
    limited: bool = False,
    examples: int = EXAMPLES,
) -> Recipe:
    """Cases of decoder_lm: tokens, and the weights and keywords of a model where these are given.

    schemes, windows: choices of positions and window. rows, least: the smallest batch and number of tokens.
    limited: the cache has no room for more tokens than there are.
    """

    def sizes(domain: Domain) -> list[Sizes]:
        if limited and domain.model is not None and not domain.model.weights:
            return [(1, domain.model.max_length or 0, *SIZES[0][2:])]
        return [row for row in SIZES if row[0] >= rows and least <= row[1] <= longest(domain)]

    def build(domain: Domain, row: Sizes, choice: int, seed: int) -> Case:
        tokens = tokens_of(row[:2], vocabulary(domain, row[2]), seed)
        case = Case(domain.operation, {"tokens": tokens}, {}, domain.dtype, origin=f"tokens seed {seed}")
        if domain.model is None or not domain.model.weights:
            return case
        case = with_model(case, domain, row, choice, seed, schemes, windows)
        return case.with_keywords(max_length=row[1]) if limited else case

    return recipe(sizes, build, examples)


def longest(domain: Domain) -> int:
    """How many tokens a model of this domain is given at most."""
    own = domain.model.max_length if domain.model is not None else None
    return min(own or SHORT, SHORT)


def vocabulary(domain: Domain, wanted: int) -> int:
    """The vocabulary of a model with weights of its own, or the wanted one."""
    own = None if domain.model is None or domain.model.weights else domain.model.vocabulary
    return own or wanted


def tokens_of(shape: tuple[int, ...], size: int, seed: int) -> np.ndarray:
    """Tokens of all the vocabulary, now and then few of it, so that they repeat."""
    rng = np.random.default_rng([seed, 7])
    return rng.integers(0, min(size, 2) if seed % 4 == 3 else size, shape)


def with_model(
    case: Case, domain: Domain, row: Sizes, choice: int, seed: int, schemes: Sequence[Any], windows: Sequence[Any]
) -> Case:
    """The case with weights and with the keywords that the implementation takes."""
    weights = decoder_weights(row, choice, seed, domain)
    keywords: dict[str, Any] = {"heads": row[4] * row[5]}
    options = {
        "positions": schemes[choice % len(schemes)],
        "window": windows[choice // 2 % len(windows)],
        "norm": ("pre", "post")[choice % 3 == 2],
        "alpha": 1.5 if choice % 6 in (3, 5) else 1.0,  # in pre-norm, where it does not act, as well
    }
    keywords |= {name: value for name, value in options.items() if name in domain.accepts}
    return case.with_arrays(**weights).with_keywords(**keywords)


def decoder_weights(row: Sizes, choice: int, seed: int, domain: Domain) -> dict[str, np.ndarray]:
    """Weights of a decoder_lm: matrices that keep the size of what they multiply, norms about the identity."""
    _, _, size, layers, groups, repeats, width, inner = row
    groups, repeats = (groups * repeats, 1) if not domain.capabilities.grouped_heads else (groups, repeats)
    model = groups * repeats * width
    draw = Draw(np.random.default_rng([seed, 3]), domain.dtype)
    found = {"params.embedding": draw((size, model), 1.0)}
    if choice % 3 == 1:
        found["params.embedding_scale"] = np.array(1.5)
    for i in range(layers):
        found |= layer_weights(f"params.layers.{i}", (groups, repeats, width, model, inner), choice % 2 == 0, draw)
    if choice % 4 != 3:
        found |= norm_weights("params.norm", model, draw)
    if choice % 2:
        found["params.head.w"] = draw((model, size), model**-0.5)
        found |= {"params.head.b": draw((size,), 0.5)} if domain.capabilities.biases else {}
    return found


class Draw:
    """Random numbers of a size, rounded to the dtype by the case that holds them."""

    def __init__(self, rng: np.random.Generator, dtype: str) -> None:
        self.rng, self.dtype = rng, dtype

    def __call__(self, shape: tuple[int, ...], size: float) -> np.ndarray:
        return self.rng.normal(size=shape) * size


def layer_weights(
    name: str, sizes: tuple[int, ...], biased: bool, draw: Draw, cross: bool = False
) -> dict[str, np.ndarray]:
    """Weights of an encoder layer, or with cross of a decoder layer, under a dotted name."""
    groups, repeats, width, model, inner = sizes
    heads = groups * repeats
    shapes = {
        "wq": (model, heads * width),
        "wk": (model, groups * width),
        "wv": (model, groups * width),
        "wo": (heads * width, model),
    }
    found = {}
    for part in ("attention", "cross_attention") if cross else ("attention",):
        for matrix, shape in shapes.items():
            found[f"{name}.{part}.{matrix}"] = draw(shape, 1.5 * shape[0] ** -0.5)
            if biased:
                found[f"{name}.{part}.b{matrix[1]}"] = draw(shape[1:], 0.3)
    found[f"{name}.feed_forward.w1"] = draw((model, inner), 1.5 * model**-0.5)
    found[f"{name}.feed_forward.b1"] = draw((inner,), 0.3)
    found[f"{name}.feed_forward.w2"] = draw((inner, model), inner**-0.5)
    found[f"{name}.feed_forward.b2"] = draw((model,), 0.3)
    for i in range(3 if cross else 2):
        found |= norm_weights(f"{name}.norm{i + 1}", model, draw)
    return found


def norm_weights(name: str, model: int, draw: Draw) -> dict[str, np.ndarray]:
    """Weight and bias of a norm, about 1 and 0."""
    return {f"{name}.weight": 1 + draw((model,), 0.2), f"{name}.bias": draw((model,), 0.2)}


def recipe(sizes: Callable[[Domain], list[Sizes]], build: Build, examples: int) -> Recipe:
    """A recipe whose pinned cases go through the sizes and the choices in turn."""

    def pinned(domain: Domain) -> list[Case]:
        table = sizes(domain)
        return [build(domain, table[i % len(table)], i, i) for i in range(examples)] if table else []

    def strategy(domain: Domain) -> st.SearchStrategy[Case]:
        table = sizes(domain)
        if not table:
            return st.nothing()
        pick = st.sampled_from(list(itertools.product(table, range(30))))
        return st.tuples(pick, st.integers(0, 2**20)).map(lambda both: build(domain, *both[0], both[1]))

    return Recipe(pinned, strategy)


def plain_decoder(domain: Domain) -> list[Case]:
    """The most ordinary cases of decoder_lm."""
    return list(decoder_cases(schemes=("rotary",), windows=(None,), examples=2).examples(domain))


CUTS = ((1,) * SHORT, (2,), (1, 2), (3, 1, 1), (1,), (2, 2, 2, 2))


def cuts() -> Recipe:
    """Lengths of chunks; what is left after them is a last one."""
    drawn = st.lists(st.integers(1, 4), max_size=5).map(tuple)
    return Recipe(lambda domain: CUTS, lambda domain: drawn)


def lengths_of(cut: Sequence[int], length: int, domain: Domain) -> list[int]:
    """The lengths of chunks that make up `length`; where a step takes one token, all but the first are 1."""
    found: list[int] = []
    for chunk in cut:
        if sum(found) < length:
            found.append(max(1, min(chunk, length - sum(found))))
    rest = length - sum(found)
    if not domain.capabilities.chunked_steps:
        first = found[0] if found else rest
        return [first] + [1] * (length - first)
    return found + [rest] if rest else found


Go = tuple[str, int]
"""One thing to do on a walk: "step", "crop", "reorder" or "new"; the number picks how far, among what is possible."""

WALKS: tuple[tuple[Go, ...], ...] = (
    (("step", 1), ("step", 0)),
    (("step", 2), ("crop", 1), ("step", 1)),
    (("step", 1), ("reorder", 1), ("step", 1)),
    (("step", 2), ("new", 0), ("step", 0), ("step", 1)),
    (("step", 3), ("crop", 0), ("step", 1), ("reorder", 2), ("step", 0), ("crop", 2), ("step", 0)),
    (("step", 0), ("reorder", 5), ("crop", 0), ("step", 2), ("new", 0), ("step", 1), ("step", 0)),
)


def walks() -> Recipe:
    """Walks through a cache: random rules, each applied to whatever state the ones before it have left."""

    def strategy(domain: Domain) -> st.SearchStrategy[Any]:
        words = ["step", "step", "new", *(word for word in ("crop", "reorder") if domain.provides(word))]
        rule = st.tuples(st.sampled_from(words), st.integers(0, 7))
        return st.lists(rule, min_size=2, max_size=8).map(tuple)

    return Recipe(lambda domain: WALKS, strategy)
