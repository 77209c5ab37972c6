"""Recipes for adaptive computation time: positions that halt at different steps, at once, on the threshold or never."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from veriformer.case import Case
from veriformer.law import Domain, Recipe
from veriformer.properties.cases import Shape, pooled, recipe
from veriformer.properties.families import fill
from veriformer.properties.rows_cases import taking_turns

ACT, LOOP = "adaptive_computation_time", "act_loop"
BOTH = (ACT, LOOP)
"""The operation that is given all states, and the one that is given the step that makes them."""

HALTING_SHAPES = (
    (1, 1), (2, 1), (1, 2), (3, 1), (2, 2, 1), (1, 3, 2), (3, 2, 2), (2, 4, 1), (2, 3, 3), (5, 2), (2, 1, 5), (3, 4, 2),
    (2, 2, 3, 2), (4, 5, 3), (2, 6, 2), (2, 3, 4, 2), (3, 7, 5), (5, 6, 4), (2, 2, 5, 3), (3, 12, 2), (2, 2, 7, 4),
    (7, 12, 3),
)  # fmt: skip
"""Leading axes, then the number of steps M and the width d, small to large."""

SPEEDS = (
    "mixed", "uniform", "ties", "constant", "tiny", "ones_and_zeros", "beyond", "close", "zeros", "late", "ones",
)  # fmt: skip
"""Families of halting, in the order in which pinned cases take them."""
STATES = ("normal", "integers", "ladder", "large_mean", "halves", "one_hot", "sparse", "heavy", "constant")
"""Families of states."""
EPSILONS = (0.01, 0.1, 0.01, 0.3, 0.001, 0.6)
DYADIC = (0.25, 0.125, 0.0625, 0.5, 0.0)
"""Values of epsilon at which sums of sixteenths lie exactly on the threshold, in every dtype."""
NEAR = (0.1, 0.25, 0.01, 0.0)
"""Values of epsilon that first steps come close to: the usual one, none at all, and others."""
GAPS = (2.0**-4, -(2.0**-6), 2.0**-7, 2.0**-10, -(2.0**-14), 2.0**-14)
"""By how much a first step falls short of the threshold; where it is negative the step goes beyond."""
CONSTANTS = (0.3, 0.25, 0.5, 0.4, 0.125, 0.05, 0.75, 0.2)


def halting_cases(
    *,
    speeds: Sequence[str] = SPEEDS,
    families: Sequence[str] = STATES,
    least: int = 1,
    rows: int = 1,
    widths: tuple[int, int] = (1, 100),
    epsilons: Sequence[float] = EPSILONS,
    layouts: Sequence[str] = ("contiguous",),
    examples: int = 12,
) -> Recipe:
    """Cases of adaptive_computation_time and act_loop.

    speeds: families of halting. families: those of the states, for a loop of what drives them. least: the smallest
    number of steps. rows: the smallest number of positions. widths: the smallest and the largest width of a state.
    epsilons: drawn in turn where epsilon can be given, for exact ties from DYADIC, for close steps from NEAR.
    """

    def shapes(domain: Domain) -> list[Shape]:
        fit = [s for s in HALTING_SHAPES if s[-2] >= least and np.prod(s[:-2]) >= rows]
        return pooled([s for s in fit if widths[0] <= s[-1] <= widths[1]], domain)

    def make(domain: Domain, shape: Shape, speed: str, other: int, seed: int) -> Case:
        chosen = {"ties": DYADIC, "close": NEAR}.get(speed, tuple(epsilons))
        epsilon = chosen[other % len(chosen)] if "epsilon" in domain.accepts else 0.01
        halting = halting_of_speed(speed, np.random.default_rng([seed, 3]), shape[:-1], epsilon)
        values = fill(taking_turns(families, other + seed), seed, shape, domain.dtype)
        layout = taking_turns(domain.admitted(layouts), other)
        return halting_case(domain, halting, values, epsilon, f"{speed} seed {seed}").with_layout(layout)

    return recipe(shapes, make, speeds, examples)


def halting_case(domain: Domain, halting: np.ndarray, values: np.ndarray, epsilon: float, origin: str = "") -> Case:
    """A case of either operation: the values are its states, or what drives them from an initial state of ones."""
    words = {"epsilon": epsilon} if "epsilon" in domain.accepts else {}
    arrays = {"halting": halting, "states": values}
    if domain.operation == LOOP:
        start = np.ones(values[..., 0, :].shape)
        arrays = {"state": start, "step.drive": values, "step.halting": halting}
        words["max_steps"] = halting.shape[-1]
    return Case(domain.operation, arrays, words, domain.dtype, origin=origin)


def halting_of_speed(speed: str, rng: np.random.Generator, shape: Shape, epsilon: float) -> np.ndarray:
    """Halting of one kind; of the first positions one halts at once and one never, where there is room for them."""
    size = shape[-1]
    if speed == "mixed":
        pace = rng.choice([1.0, 0.7, 0.5, 0.3, 0.1, 0.02], (*shape[:-1], 1))
        drawn = pace * rng.uniform(0.5, 1, shape)
        flat = drawn.reshape(-1, size)
        for row, value in zip(flat[1:3], (1.0, 0.3 / size), strict=False):
            row[0], row[1:] = value, 0.3 / size
        return drawn
    if speed == "ties":
        return on_the_threshold(rng, shape, epsilon)
    return {
        "uniform": lambda: rng.random(shape),
        "constant": lambda: np.full(shape, float(rng.choice(CONSTANTS))),
        "tiny": lambda: 10.0 ** -rng.uniform(2, 8, shape),
        "ones_and_zeros": lambda: (rng.random(shape) < 0.3).astype(float),
        "beyond": lambda: 1 - epsilon * rng.choice([0.25, 0.5], shape),
        "close": lambda: close_to_the_threshold(rng, shape, epsilon),
        "zeros": lambda: np.zeros(shape),
        "late": lambda: np.where(np.arange(size) == size - 1, 1.0, rng.uniform(0, 0.5, shape) / size),
        "ones": lambda: np.ones(shape),
    }[speed]()


def on_the_threshold(rng: np.random.Generator, shape: Shape, epsilon: float) -> np.ndarray:
    """Sixteenths whose sum is 1 - epsilon after some step of each position, if there is one before the last.

    After it zeros and sixteenths follow, so that who goes on halts later. At other values of epsilon just sixteenths.
    """
    drawn = rng.integers(0, 9, shape) / 16
    threshold = (1 - epsilon) * 16
    if not threshold.is_integer():
        return drawn
    for row in drawn.reshape(-1, shape[-1]):
        place = int(rng.integers(0, max(shape[-1] - 1, 1)))
        cuts = np.sort(rng.integers(0, int(threshold) + 1, place))
        row[: place + 1] = np.diff(cuts, prepend=0, append=int(threshold)) / 16
        row[place + 1 :] = rng.choice([0.0, 0.0625, 0.5, 1.0], shape[-1] - place - 1)
    return drawn


def close_to_the_threshold(rng: np.random.Generator, shape: Shape, epsilon: float) -> np.ndarray:
    """A first step just short of 1 - epsilon or just beyond it, then any."""
    drawn = rng.random(shape)
    drawn[..., 0] = np.clip(1 - epsilon - rng.choice(GAPS, shape[:-1]), 0, 1)
    return drawn


def plain_halting(domain: Domain) -> list[Case]:
    """Two and three axes of normal states; the speeds differ."""
    cases = []
    for i, shape in enumerate(((4, 3, 2), (2, 3, 4, 5))):
        rng = np.random.default_rng([i, 5])
        halting = rng.uniform(0.1, 0.4, shape[:-1]) + np.where(rng.random((*shape[:-2], 1)) < 0.5, 0.3, 0.0)
        values = fill("normal", i, shape, domain.dtype)
        cases.append(halting_case(domain, halting, values, 0.01, f"normal seed {i}"))
    return cases
