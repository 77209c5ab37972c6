"""Recipes for encoder-decoders: source and target of unlike lengths, padding, weights where the suite gives them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from veriformer.case import Case
from veriformer.law import Domain, Recipe
from veriformer.properties.model_cases import (
    EXAMPLES,
    Draw,
    Sizes,
    layer_weights,
    longest,
    norm_weights,
    recipe,
    tokens_of,
    vocabulary,
)

SIZES = (
    # B, S, T, V, Vs, encoder layers, decoder layers, G, R, D, f
    (1, 2, 3, 3, 4, 1, 1, 1, 1, 4, 3), (2, 3, 2, 4, 3, 1, 1, 1, 2, 2, 3), (1, 3, 4, 3, 5, 1, 1, 2, 1, 2, 3),
    (2, 4, 3, 5, 5, 1, 2, 1, 2, 2, 4), (2, 3, 3, 4, 3, 2, 1, 2, 1, 2, 5), (3, 2, 4, 3, 4, 1, 1, 1, 2, 4, 3),
    (1, 5, 3, 5, 4, 1, 1, 2, 2, 2, 4), (2, 5, 4, 4, 6, 2, 2, 2, 1, 4, 6), (1, 3, 5, 3, 3, 1, 2, 2, 2, 2, 4),
    (2, 4, 6, 6, 5, 2, 2, 1, 2, 4, 5), (3, 6, 4, 5, 5, 1, 1, 2, 3, 2, 7), (1, 5, 8, 5, 4, 2, 1, 2, 2, 4, 6),
)  # fmt: skip
"""Sizes of models and tokens, small to large; for a model with weights of its own B, S and T alone count."""
SCHEMES = ("sinusoidal", "rotary", None, "alibi")
"""Ways of telling the model where tokens stand."""
BIAS = re.compile(r"\.b[qkvo12]?$")
"""Ends of the names of biases, those of norms apart."""


def encoder_decoder_cases(
    *,
    masked: bool | None = None,
    trailing: bool = False,
    schemes: Sequence[str | None] = SCHEMES,
    rows: int = 1,
    least: int = 2,
    examples: int = EXAMPLES,
) -> Recipe:
    """Cases of encoder_decoder: source, target, perhaps a mask, and the weights and keywords where these are given.

    masked: some source token is padding (True), there is no mask (False), now and then (None), in each case only
    where full and encode take a mask. trailing: padding is at the end. rows, least: the smallest batch and number of
    target tokens.
    """

    def sizes(domain: Domain) -> list[Sizes]:
        most = longest(domain)
        return [row for row in SIZES if row[0] >= rows and row[1] <= most and least <= row[2] <= most]

    def build(domain: Domain, row: Sizes, choice: int, seed: int) -> Case:
        wanted = masked if masked is not None else choice % 2 == 1
        case = with_tokens(domain, row, seed)
        if wanted and domain.provides("full.mask") and domain.provides("encode.mask"):
            case = case.with_arrays(mask=padding(row[:2], seed, trailing))
        weights = domain.model is None or domain.model.weights
        return with_model(case, domain, row, choice, seed, schemes) if weights else case

    return recipe(sizes, build, examples)


def with_tokens(domain: Domain, row: Sizes, seed: int) -> Case:
    """A case of source[B,S] and target[B,T]."""
    batch, source, target, size, source_size, *_ = row
    arrays = {
        "source": tokens_of((batch, source), source_vocabulary(domain, source_size), seed + 1),
        "target": tokens_of((batch, target), vocabulary(domain, size), seed),
    }
    return Case(domain.operation, arrays, {}, domain.dtype, origin=f"tokens seed {seed}")


def source_vocabulary(domain: Domain, wanted: int) -> int:
    """The vocabulary of the source: what a model with weights of its own says, else that of the target."""
    own = domain.model.source_vocabulary if domain.model is not None and not domain.model.weights else None
    return own or vocabulary(domain, wanted)


def padding(shape: Sequence[int], seed: int, trailing: bool) -> np.ndarray:
    """mask[B,S] with a real token in every row and padding in one at least: behind, before or anywhere."""
    (batch, length), rng = shape, np.random.default_rng([seed, 13])
    counts = rng.integers(1, length + 1, batch)
    if (counts == length).all():
        counts[rng.integers(batch)] -= 1
    mask = np.arange(length) < counts[:, None]
    if trailing:
        return mask
    turns = seed % 3
    return mask[:, ::-1] if turns == 1 else rng.permuted(mask, axis=1) if turns == 2 else mask


def with_model(case: Case, domain: Domain, row: Sizes, choice: int, seed: int, schemes: Sequence[Any]) -> Case:
    """The case with weights and with the keywords that the implementation takes."""
    able = domain.capabilities
    norm = "pre" if able.pre_norm and (choice % 3 == 1 or not able.post_norm) else "post"
    options = {
        "positions": schemes[choice % len(schemes)],
        "norm": norm,
        "alpha": {5: 1.5, 11: (1.25, 0.75)}.get(choice % 12, 1.0),
    }
    keywords: dict[str, Any] = {"heads": row[7] * row[8]}
    keywords |= {name: value for name, value in options.items() if name in domain.accepts}
    return case.with_arrays(**model_weights(row, choice, seed, domain)).with_keywords(**keywords)


def model_weights(row: Sizes, choice: int, seed: int, domain: Domain) -> dict[str, np.ndarray]:
    """Weights of a transformer: matrices that keep the size of what they multiply, norms about the identity."""
    _, _, _, size, source_size, *depths, groups, repeats, width, inner = row
    groups, repeats = (groups * repeats, 1) if not domain.capabilities.grouped_heads else (groups, repeats)
    model = groups * repeats * width
    draw = Draw(np.random.default_rng([seed, 3]), domain.dtype)
    found = {"params.source_embedding": draw((source_size, model), 1.0)}
    found["params.target_embedding"] = draw((size, model), 1.0)
    if choice % 4 == 1:
        found["params.embedding_scale"] = np.array(1.5)
    for side, (stack, depth) in enumerate(zip(("encoder", "decoder"), depths, strict=True)):
        for i in range(depth):
            shape = (groups, repeats, width, model, inner)
            found |= layer_weights(f"params.{stack}.layers.{i}", shape, choice % 2 == 0, draw, cross=bool(side))
        if (choice + side) % 3:
            found |= norm_weights(f"params.{stack}.norm", model, draw)
    if choice % 3:
        found |= {"params.head.w": draw((model, size), model**-0.5), "params.head.b": draw((size,), 0.5)}
    biased = domain.capabilities.biases
    return {name: array for name, array in found.items() if biased or not BIAS.search(name)}


def plain_encoder_decoders() -> Recipe:
    """The most ordinary cases, as a recipe."""
    return Recipe(plain_encoder_decoder, lambda domain: st.sampled_from(plain_encoder_decoder(domain)))


def plain_encoder_decoder(domain: Domain) -> list[Case]:
    """The most ordinary cases: no padding, sinusoids."""
    return list(encoder_decoder_cases(masked=False, schemes=("sinusoidal",), examples=2).examples(domain))
