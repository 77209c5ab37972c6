"""Recipes for a training step: states of an optimiser, lists of gradients, steps of a schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from veriformer.case import Case, round_to
from veriformer.law import Domain, Recipe
from veriformer.operation import LISTED
from veriformer.properties.cases import SHAPES, Shape, pooled, recipe, with_blocks
from veriformer.properties.families import FAMILIES, fill

STEPS = (1, 2, 3, 10, 1000, 100_000)
"""Numbers of a step: the corrections are large at first, then still seen, at last gone; the last needs 17 bits."""
RATES = (1e-3, 0.1, 0.01, 1.0, 0.03125)
DECAYS = (0.0, 0.1, 0.01, 1.0, 0.5)
BETAS = ((0.9, 0.999), (0.9, 0.98), (0.5, 0.9), (0.95, 0.95), (0.75, 0.5), (0.0, 0.999))
EPSILONS = (1e-8, 1e-3, 1e-6, 1e-9, 0.125)
HALF_EPSILONS = (1e-3, 1e-2, 0.125)
"""Those that float16 can add to anything; below 3e-8 they are 0 there."""
_SPECIAL = ("normal", "integers", "near_epsilon", "decades")
GRADIENTS = (*_SPECIAL, *(name for name in FAMILIES if name not in _SPECIAL))
PLAIN = ("normal", "integers", "halves", "constant", "sparse", "heavy")
"""Families of gradients of about 1."""

LISTS: tuple[tuple[Shape, ...], ...] = (
    ((1,),), ((2,),), ((1,), (1,)), ((2,), (1,)), ((3,), (2,)), ((2, 2), (3,)), ((1,), (2, 3)), ((5,), (1, 2), (3,)),
    ((2, 3), ()), ((4, 3), (4,)), ((7,), (2,), (3, 2), (1,)), ((3, 1, 4), (5,)), ((17,), (8,)), ((1,), (33,)),
    ((8, 8), (8,), (8, 3)), ((65,), (2,)), ((5, 31), (31,), (3,)), ((2, 127),), ((257,), (1,), (9, 5)), ((1025,), (4,)),
)  # fmt: skip
"""Shapes of the gradients of one model, small to large; in several the first is not the longest."""
NORMS = (0.5, 2.0, 1e-3, 1.001, 0.999, 1e3, 0.125)
"""max_norm in units of the norm."""

SCHEDULES = (
    (1, 1), (4, 1), (1, 4), (4, 2), (2, 3), (16, 4), (8, 10), (64, 7), (3, 5), (512, 100), (7, 16), (512, 4000),
    (1024, 16000), (4096, 1000), (768, 10_000),
)  # fmt: skip
"""(width, warmup), small to large."""


def adamw_cases(
    *,
    families: Sequence[str] = GRADIENTS,
    steps: Sequence[int] = STEPS,
    rates: Sequence[float] = RATES,
    decays: Sequence[float] = DECAYS,
    epsilons: Sequence[float] = EPSILONS,
    fresh: bool = False,
    least: int = 1,
    layouts: Sequence[str] = ("contiguous",),
    examples: int = 18,
) -> Recipe:
    """Cases of adamw_step; keywords are drawn where they can be given, the first case has the defaults.

    families: of gradients, "near_epsilon" and "decades" among them. fresh: m and v are 0; else they are, but at step 1
    and in some entries, as if gradients of other sizes had come before. least: the smallest number of entries.
    """

    def shapes(domain: Domain) -> list[Shape]:
        return pooled([s for s in with_blocks(SHAPES, domain) if np.prod(s) >= least], domain)

    def make(domain: Domain, shape: Shape, family: str, other: int, seed: int) -> Case:
        rng, admitted, half = np.random.default_rng([seed, 1]), domain.admitted(layouts), domain.dtype == "float16"
        usable = [e for e in epsilons if not half or e >= 1e-3] or HALF_EPSILONS
        beta1, beta2 = BETAS[(other + other // 6) % len(BETAS)]
        words = {
            "lr": float(rates[other % len(rates)]), "beta1": beta1, "beta2": beta2,
            "eps": float(usable[other // 3 % len(usable)]), "weight_decay": float(decays[other // 2 % len(decays)]),
        }  # fmt: skip
        given = {word: value for word, value in words.items() if word in domain.accepts}
        step = int(steps[other % len(steps)])
        g = gradient_values(family, seed, shape, domain.dtype, words["eps"])
        m, v = (np.zeros(shape), np.zeros(shape)) if fresh or step == 1 else history(rng, g, half)
        arrays = {"param": parameters(rng, shape), "grad": g, "m": m, "v": v}
        layout = admitted[other % len(admitted)]
        return Case(domain.operation, arrays, {"step": step, **given}, domain.dtype, layout, f"{family} seed {seed}")

    return recipe(shapes, make, families, examples)


def gradient_values(family: str, seed: int, shape: Shape, dtype: str, eps: float) -> np.ndarray:
    """Values of a family; two are of this file. In float16 they are of a size whose squares it can hold."""
    rng = np.random.default_rng(seed)
    if family == "near_epsilon":
        g = rng.choice([-1.0, 1.0], shape) * eps * 10.0 ** rng.uniform(-2, 2, shape)
    elif family == "decades":
        g = rng.choice([-1.0, 1.0], shape) * 10.0 ** rng.uniform(-12, 12, shape)
    else:
        g = fill(family, seed, shape, dtype)
    if dtype != "float16":
        return g
    return np.sign(g) * np.clip(np.abs(g), 0.05, 100.0)


def parameters(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    """Numbers of about 1, some exactly 0."""
    return np.asarray(rng.integers(-8, 9, shape) / 4 * rng.choice([1.0, 1.0, 16.0]))


def history(rng: np.random.Generator, g: np.ndarray, half: bool) -> tuple[np.ndarray, np.ndarray]:
    """m and v of gradients like these, larger or smaller; a part of the entries has never had one."""
    size = np.abs(g) * rng.choice([1.0, 1.0, 0.25, 8.0], g.shape)
    size = np.where(g == 0, np.abs(g).mean(), size)
    size = np.minimum(size, 100.0) if half else size
    m = size * rng.uniform(-1, 1, g.shape)
    v = m**2 + size**2 * rng.uniform(0.1, 1, g.shape)
    silent = rng.random(g.shape) < 0.1
    return np.where(silent, 0.0, m), np.where(silent, 0.0, v)


def clip_cases(
    *,
    families: Sequence[str] = tuple(FAMILIES),
    norms: Sequence[float] = NORMS,
    lists: Sequence[tuple[Shape, ...]] = LISTS,
    arrays: int = 1,
    extras: bool = False,
    layouts: Sequence[str] = ("contiguous",),
    examples: int = 16,
) -> Recipe:
    """Cases of clip_by_global_norm.

    norms: max_norm in units of the norm, taken in turn. arrays: the smallest number of them. extras: now and then
    gradients whose squares overflow or underflow, but not their norm, where that is declared.
    """

    def shapes(domain: Domain) -> list[Any]:
        edges = [((n,), (2,)) for b in domain.capabilities.blocks for n in (b - 1, b, b + 1) if n > 0]
        return pooled([shapes for shapes in (*lists, *edges) if len(shapes) >= arrays], domain)

    def make(domain: Domain, chosen: Any, family: str, other: int, seed: int) -> Case:
        rng, admitted = np.random.default_rng([seed, 1]), domain.admitted(layouts)
        grads = [fill(family, seed + i, s or (1,), domain.dtype).reshape(s) for i, s in enumerate(chosen)]
        grads = [grads[0], *(g * rng.choice([1.0, 1.0, 0.25, 8.0, 0.0]) for g in grads[1:])]
        beyond = extras and domain.capabilities.extreme_values and other % 3 == 1
        grads = within_reach(grads, domain.dtype, beyond, bool(other % 2))
        found = {f"{LISTED}{i}": g for i, g in enumerate(grads)}
        norm = norm_of([round_to(g, domain.dtype) for g in grads])
        words = {"max_norm": float(norms[other % len(norms)] * norm or 1.0)}
        layout = admitted[other % len(admitted)]
        return Case(domain.operation, found, words, domain.dtype, layout, f"{family} seed {seed}")

    return recipe(shapes, make, families, examples)


def within_reach(grads: list[np.ndarray], dtype: str, beyond: bool, large: bool) -> list[np.ndarray]:
    """The gradients, in float16 small enough for a sum of their squares; or beyond what squares can hold.

    float64 has no room beyond, as the reference is of that dtype; float16 has none below.
    """
    norm = norm_of(grads)
    if not norm:
        return grads
    if dtype == "float16":
        top = 4e4 if beyond else 100.0
        return [g * (top / norm) for g in grads] if norm > top or beyond else grads
    if beyond and dtype != "float64":
        return [g * ((1e30 if large else 1e-30) / norm) for g in grads]
    return grads


def norm_of(grads: Sequence[np.ndarray]) -> float:
    """The root of the sum of all squares, in which none overflows."""
    peak = max((float(np.abs(g).max(initial=0.0)) for g in grads), default=0.0)
    if not peak or not np.isfinite(peak):
        return peak
    return peak * float(sum(((g / peak) ** 2).sum() for g in grads)) ** 0.5


def noam_cases(*, steps: Sequence[str] = (), examples: int = 20) -> Recipe:
    """Cases of noam_schedule.

    steps: where the step lies, in turn: "first", "early" (before the end of the warm-up), "end" (at it or beside it),
    "late"; all of them and 0 if not given.
    """
    places = tuple(steps) or ("first", "early", "end", "late", "zero")

    def make(domain: Domain, shape: Shape, place: str, other: int, seed: int) -> Case:
        width, warmup = shape
        rng = np.random.default_rng([seed, 1])
        step = {
            "zero": 0,
            "first": 1,
            "early": int(rng.integers(1, warmup + 1)),
            "end": max(warmup + int(rng.integers(-1, 2)), 1),
            "late": int(rng.choice([warmup + 1, 2 * warmup, 4 * warmup, warmup + 100_000])),
        }[place]
        words = {"step": step, "width": width, "warmup": warmup}
        return Case(domain.operation, {}, words, domain.dtype, origin="table")

    def pinned(domain: Domain) -> list[Case]:
        return [make(domain, s, p, i, i) for i, (s, p) in enumerate(paired(places, examples))]

    def search(domain: Domain) -> st.SearchStrategy[Case]:
        parts = st.tuples(st.sampled_from(SCHEDULES), st.sampled_from(places), st.integers(0, 2**16 - 1))
        return parts.map(lambda drawn: make(domain, drawn[0], drawn[1], 0, drawn[2]))

    return Recipe(pinned, search)


def paired(places: Sequence[str], examples: int) -> list[tuple[Shape, str]]:
    """Schedules small to large, each with one or two of the places."""
    count = len(SCHEDULES)
    return [(SCHEDULES[i * count // examples], places[(i + i // 5) % len(places)]) for i in range(examples)]


def plain_adamw_step(domain: Domain) -> list[Case]:
    """One, two and three axes of normal values: a first step, and later ones."""
    cases = []
    for i, (shape, step) in enumerate((((4,), 1), ((3, 8), 2), ((2, 3, 16), 10))):
        param, g, m, square = (fill("normal", 10 * i + place, shape, domain.dtype) for place in range(4))
        m, v = (0 * m, 0 * m) if step == 1 else (m, m**2 + square**2)
        arrays = {"param": param, "grad": g, "m": m, "v": v}
        words = {"step": step, "lr": 0.01}
        words |= {"eps": 1e-3} if domain.dtype == "float16" and "eps" in domain.accepts else {}
        cases.append(Case(domain.operation, arrays, words, domain.dtype, origin=f"normal seed {10 * i}"))
    return cases


def plain_clip_by_global_norm(domain: Domain) -> list[Case]:
    """One, two and three arrays of normal values, which are too long."""
    cases = []
    for i, shapes in enumerate((((4,),), ((3, 4), (4,)), ((8, 3), (2, 3, 4), (5,)))):
        arrays = {f"{LISTED}{j}": fill("normal", 10 * i + j, shape, domain.dtype) for j, shape in enumerate(shapes)}
        cases.append(Case(domain.operation, arrays, {"max_norm": 1.0}, domain.dtype, origin=f"normal seed {10 * i}"))
    return cases


def plain_noam_schedule(domain: Domain) -> list[Case]:
    """The first step, one of the warm-up, its end, and one after it."""
    words = ((1, 4, 4), (3, 16, 10), (10, 64, 10), (9000, 512, 4000))
    named = [dict(zip(("step", "width", "warmup"), one, strict=True)) for one in words]
    return [Case(domain.operation, {}, one, domain.dtype, origin="plain") for one in named]
