"""Recipes for the encoder-decoder: a table of sizes, then one seed draws the dialect, tokens, padding and weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from veriformer.case import Case
from veriformer.law import Domain, Recipe
from veriformer.properties.attention_family_build import weights
from veriformer.properties.attention_family_cases import admits, edges, narrowed
from veriformer.properties.families import fill

AXES = ("B", "S", "T", "G", "R", "D", "Dv", "d", "f", "Vs", "V", "encoder", "decoder")
SIZES = (
    (1, 2, 1, 1, 1, 2, 1, 2, 1, 3, 2, 1, 1), (1, 3, 2, 1, 1, 2, 2, 3, 2, 2, 3, 1, 1),
    (2, 2, 1, 1, 1, 1, 2, 2, 2, 3, 4, 1, 1), (1, 2, 3, 2, 1, 2, 1, 3, 3, 4, 3, 1, 1),
    (2, 3, 2, 1, 2, 2, 2, 4, 2, 5, 3, 1, 1), (2, 2, 3, 1, 1, 2, 3, 4, 3, 3, 4, 1, 2),
    (2, 3, 4, 2, 1, 1, 2, 3, 4, 4, 5, 2, 1), (2, 4, 2, 1, 2, 2, 1, 5, 3, 4, 2, 2, 2),
    (2, 4, 3, 2, 2, 2, 2, 8, 6, 5, 4, 1, 2), (3, 2, 4, 1, 3, 2, 3, 4, 5, 4, 4, 2, 1),
    (2, 3, 3, 2, 1, 4, 3, 8, 4, 3, 5, 1, 1), (2, 4, 1, 2, 1, 2, 4, 6, 5, 5, 3, 2, 3),
)  # fmt: skip
"""Lengths of the axes AXES, and how many layers there are, small to large."""

FLAGS = {
    "mask": 0.7, "scaled": 0.4, "tied": 0.4, "pre": 0.5, "alpha": 0.4, "bare": 0.2, "rms": 0.15, "encoder_norm": 0.5,
    "decoder_norm": 0.5,
}  # fmt: skip
"""What a case may have -> how often it has it, where a law does not say."""
WORDS = {"mask": "mask", "pre": "norm", "alpha": "alpha"}
"""Flags that stand for a keyword."""
POSITIONS = ("sinusoidal", None, "sinusoidal", "rotary", "sinusoidal", "alibi")
"""What becomes of positions, the default most often."""
ALPHAS = (1.5, (1.25, 2.0), 0.75, (2.0, 0.5))
MATRICES = ("normal", "integers", "halves", "one_hot", "sparse")
"""Families of values for matrices and tables."""
SEEDS = 2**20


@dataclass(frozen=True)
class Wish:
    """What a law asks of its cases; flags are on (True), off (False), or drawn (absent)."""

    families: tuple[str, ...] = MATRICES
    positions: tuple[str | None, ...] = POSITIONS
    hidden: bool = False
    flags: tuple[tuple[str, bool], ...] = ()


def transformer_cases(
    *,
    families: Sequence[str] = MATRICES,
    layouts: Sequence[str] = ("contiguous",),
    examples: int = 8,
    least: dict[str, int] | None = None,
    positions: Sequence[str | None] = POSITIONS,
    hidden: bool = False,
    grouped: bool | None = None,
    **flags: bool,
) -> Recipe:
    """Cases of transformer; the rows of a batch have padding of their own, and each has a real token.

    flags: mask, scaled (embedding_scale), tied (no head), pre, alpha (other than 1), bare (few biases or none), rms,
    encoder_norm and decoder_norm (final norms), True always, False never, absent drawn. least: smallest sizes by
    axis. positions: drawn in turn, where they can be given. hidden: some source token is padding. grouped: G < H
    (True), G = H (False).
    """
    floor = {"S": 2} | (least or {}) if hidden else least or {}
    given = {**flags, "mask": True} if hidden else flags
    wish = Wish(tuple(families), tuple(positions), hidden, tuple(sorted(given.items())))

    def made(domain: Domain, row: Sequence[int], seed: int) -> Case:
        admitted = domain.admitted(layouts)
        return transformer_case(domain, wish, row, seed).with_layout(admitted[seed % len(admitted)])

    def pinned(domain: Domain) -> list[Case]:
        table = sizes(domain, floor, grouped)
        return [made(domain, table[i * len(table) // examples], i) for i in range(examples if table else 0)]

    def search(domain: Domain) -> st.SearchStrategy[Case]:
        table = sizes(domain, floor, grouped)
        draws = st.tuples(st.sampled_from(table), st.integers(0, SEEDS - 1)) if table else st.nothing()
        return draws.map(lambda draw: made(domain, *draw))

    return Recipe(pinned, search)


def sizes(domain: Domain, least: dict[str, int], grouped: bool | None) -> list[tuple[int, ...]]:
    """The rows of the table, and rows around declared blocks, that the domain and the law admit."""
    around = [(1, s, t, 1, 1, 2, 2, 2, 1, 3, 2, 1, 1) for n in edges(domain) for s, t in ((n, 2), (2, n))]
    rows = [(*row[:3], *narrowed(row[3:7], domain), *row[7:]) for row in (*SIZES, *around)]
    if domain.capabilities.value_width == "equal":
        rows = [(*row[:7], row[3] * row[4] * row[5], *row[8:]) for row in rows]
    found = [row for row in dict.fromkeys(rows) if admits(dict(zip(AXES, row, strict=True)), least, grouped)]
    return found[:12] if domain.capabilities.compiles_per_shape else found


def transformer_case(domain: Domain, wish: Wish, row: Sequence[int], seed: int) -> Case:
    """One case of these sizes."""
    size, rng = dict(zip(AXES, row, strict=True)), np.random.default_rng([seed, 3])
    flags = drawn_flags(domain, wish, rng)
    arrays: dict[str, Any] = {
        "source": tokens(rng, (size["B"], size["S"]), size["Vs"], seed),
        "target": tokens(rng, (size["B"], size["T"]), size["V"], seed),
        "mask": padding(rng, size["B"], size["S"], wish.hidden) if "mask" in flags else None,
    }
    family = wish.families[seed % len(wish.families)]
    arrays |= {f"params.{name}": a for name, a in model(domain, wish, size, row, flags, seed).items()}
    keywords: dict[str, Any] = {"heads": size["G"] * size["R"]}
    keywords |= {"norm": "pre"} if "pre" in flags else {}
    keywords |= {"alpha": ALPHAS[seed % len(ALPHAS)]} if "alpha" in flags else {}
    if "positions" in domain.accepts:
        chosen = wish.positions[seed % len(wish.positions)]
        keywords["positions"] = None if chosen == "rotary" and size["D"] % 2 else chosen
    return Case(domain.operation, arrays, keywords, domain.dtype, origin=f"{family} seed {seed}")


def drawn_flags(domain: Domain, wish: Wish, rng: np.random.Generator) -> set[str]:
    """The flags that are on: as the law says, else drawn; what the domain lacks is off."""
    said = dict(wish.flags)
    drawn = {flag: share > rng.random() for flag, share in FLAGS.items()}
    able = domain.capabilities
    barred = {"rms": not able.rms_norms, "pre": not able.pre_norm}
    on = {flag for flag in FLAGS if said.get(flag, drawn[flag]) and not barred.get(flag)}
    on |= set() if able.post_norm else {"pre"}
    return {flag for flag in on if flag not in WORDS or WORDS[flag] in domain.accepts}


def tokens(rng: np.random.Generator, shape: tuple[int, int], rows: int, seed: int) -> np.ndarray:
    """Token numbers from 0 to rows - 1; of every third seed the first and the last only."""
    return rng.integers(0, 2, shape) * (rows - 1) if seed % 3 == 2 else rng.integers(0, rows, shape)


def padding(rng: np.random.Generator, batch: int, length: int, hidden: bool) -> np.ndarray:
    """mask[B,S] with a real token in every row: padding behind, in front, or anywhere; alone, never all in front."""
    mask = np.ones((batch, length), bool)
    for b in range(batch):
        kind = int(rng.integers(3))
        count = int(rng.integers(1, length)) if length > 1 and rng.random() < 0.75 else length
        mask[b] = np.arange(length) < count
        if kind == 1 and batch > 1:
            mask[b] = mask[b, ::-1]
        if kind == 2:
            mask[b, 1:] = rng.permutation(mask[b, 1:])
    if hidden and mask.all():
        mask[int(rng.integers(batch)), -1] = False
    return mask


def model(
    domain: Domain, wish: Wish, size: dict[str, int], row: Sequence[int], flags: set[str], seed: int
) -> dict[str, np.ndarray]:
    """The weights by dotted names; no two rows of a table are alike."""
    rng, d, dtype = np.random.default_rng([seed, 4]), size["d"], domain.dtype
    found: dict[str, np.ndarray] = {}
    for i, (name, rows) in enumerate((("source_embedding", size["Vs"]), ("target_embedding", size["V"]))):
        table = fill(wish.families[(seed + i) % len(wish.families)], seed + 20 + i, (rows, d), dtype)
        found[name] = table + (np.arange(rows)[:, None] % d == np.arange(d)) * (1 + np.arange(rows)[:, None] // d)
    if "scaled" in flags:
        found["embedding_scale"] = np.asarray((2.0, 0.5, d**0.5, 3.0)[seed % 4])
    for i, stack in enumerate(("encoder", "decoder")):
        for n in range(size[stack]):
            parts = layer(domain, wish, row, flags, 100 * seed + 10 * n + 50 * i, stack == "decoder")
            found |= {f"{stack}.layers.{n}.{name}": array for name, array in parts.items()}
        if f"{stack}_norm" in flags:
            found |= {f"{stack}.norm.{name}": array for name, array in norm(rng, d, flags).items()}
    if "tied" not in flags:
        found["head.w"] = matrix(wish, (d, size["V"]), seed, dtype)
        if has_biases(domain, flags):
            found["head.b"] = rng.integers(-2, 3, size["V"]) / 2
    return found


def layer(
    domain: Domain, wish: Wish, row: Sequence[int], flags: set[str], seed: int, cross: bool
) -> dict[str, np.ndarray]:
    """The weights of one layer; with `cross` those of the decoder."""
    batch, s, t, groups, repeats, width, value_width, d, f, *_ = row
    rng, heads = np.random.default_rng([seed, 5]), (batch, groups, repeats, t, s, width, value_width, d)
    told = ("bare",) if "bare" in flags else ()
    found: dict[str, np.ndarray] = {}
    for i, name in enumerate(("attention", "cross_attention")[: 1 + cross]):
        made = weights(domain, heads, told, wish.families, seed + 3 * i)
        found |= {f"{name}.{key.removeprefix('params.')}": array for key, array in made.items()}
    for i in range(2 + cross):
        found |= {f"norm{i + 1}.{name}": array for name, array in norm(rng, d, flags).items()}
    for i, shape in enumerate(((d, f), (f, d)), 1):
        found[f"feed_forward.w{i}"] = matrix(wish, shape, seed + i, domain.dtype)
        if has_biases(domain, flags):
            found[f"feed_forward.b{i}"] = rng.integers(-2, 3, shape[1]) / 2
    return found


def has_biases(domain: Domain, flags: set[str]) -> bool:
    """Whether the matrices outside attention come with biases."""
    return domain.capabilities.biases and "bare" not in flags


def norm(rng: np.random.Generator, width: int, flags: set[str]) -> dict[str, np.ndarray]:
    """A norm's weight, never 0, and its bias, without which it is rms_norm."""
    found = {"weight": rng.choice([-1.0, 0.5, 1.0, 1.5, 2.0], width), "bias": rng.integers(-2, 3, width) / 2}
    return {"weight": found["weight"]} if "rms" in flags else found


def matrix(wish: Wish, shape: tuple[int, int], seed: int, dtype: str) -> np.ndarray:
    """A matrix that keeps the size of what it multiplies."""
    return fill(wish.families[seed % len(wish.families)], seed, shape, dtype) * 2.0 ** -round(np.log2(shape[0]) / 2)


def plain_transformer(domain: Domain) -> list[Case]:
    """One and two layers of normal values, as many key heads as query heads, d = H D, the usual keywords."""
    off = tuple((flag, False) for flag in FLAGS)
    wish = Wish(families=("normal",), positions=("sinusoidal",), flags=off)
    rows = [(1, 3, 2, 1, 1, 4, 4, 4, 8, 5, 4, 1, 1), (2, 4, 3, 2, 1, 4, 4, 8, 12, 5, 6, 2, 1)]
    rows = [(*row[:3], *narrowed(row[3:7], domain), *row[7:]) for row in rows]
    rows = [(*row[:7], row[3] * row[4] * row[5], *row[8:]) for row in rows]
    return [transformer_case(domain, wish, row, 10 * i) for i, row in enumerate(rows)]
