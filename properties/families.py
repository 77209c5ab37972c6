"""Families of values: each fills an array from a seed and is made to catch one kind of mistake."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Fill = Callable[[np.random.Generator, tuple[int, ...], str], np.ndarray]

LOW_RANGE = ("float16",)


def reach(dtype: str, usual: float) -> float:
    """A magnitude that is moderate in this dtype: float16 ends at 65504."""
    return min(usual, 1e3) if dtype in LOW_RANGE else usual


def integers(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Small integers, many of them equal: ties, and readable failures."""
    return rng.integers(-3, 4, shape).astype(float)


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Independent standard normal values."""
    return rng.standard_normal(shape)


def constant(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """One value everywhere."""
    return np.full(shape, float(rng.choice([0.0, 1.0, -2.0, 0.1, 7.3])))


def one_hot(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Zeros with a single larger value in each row."""
    values = np.zeros(shape)
    if values.size:
        places = rng.integers(0, shape[-1], (*shape[:-1], 1))
        np.put_along_axis(values, places, float(rng.choice([1.0, 5.0, 12.0])), -1)
    return values


def large_mean(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """A large common offset under small differences: cancellation."""
    offset = float(rng.choice([10.0, 100.0, reach(dtype, 1e4)])) * float(rng.choice([-1.0, 1.0]))
    return offset + rng.standard_normal(shape)


def tiny_variance(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Differences near the square root of the usual epsilon."""
    return float(rng.choice([0.0, 1.0])) + rng.standard_normal(shape) * 10.0 ** rng.uniform(-5, -1)


def ladder(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Magnitudes over many powers of ten in one array."""
    top = np.log10(reach(dtype, 1e3))
    return rng.choice([-1.0, 1.0], shape) * 10.0 ** rng.uniform(-4, top, shape)


def low(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Everything far below zero, also below any finite stand-in for minus infinity."""
    return -float(rng.choice([60.0, 900.0, 2e4 if dtype in LOW_RANGE else 2e5])) + rng.integers(-3, 4, shape)


def sparse(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Mostly zeros."""
    return rng.standard_normal(shape) * (rng.random(shape) < 0.2) * 4


def halves(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Two blocks of equal values along the last axis."""
    values = np.full(shape, float(rng.choice([0.1, 1.0, 3.3])))
    values[..., shape[-1] // 2 :] = float(rng.choice([-0.7, 0.3, 2.0]))
    return values


def heavy(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """A heavy tail: a few values far larger than the rest."""
    return np.clip(rng.standard_t(1.5, shape), -60, 60)


def huge(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Either sign, all far from zero, and far apart."""
    return rng.choice([-1.0, 1.0], shape) * 10.0 ** rng.uniform(2.5, 4 if dtype in LOW_RANGE else 6, shape)


FAMILIES: dict[str, Fill] = {
    "integers": integers,
    "normal": normal,
    "constant": constant,
    "one_hot": one_hot,
    "large_mean": large_mean,
    "tiny_variance": tiny_variance,
    "ladder": ladder,
    "low": low,
    "sparse": sparse,
    "halves": halves,
    "heavy": heavy,
    "huge": huge,
}
"""Every family by name; the order is from simple to strange."""


def fill(family: str, seed: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """The values of one family, as float64 not yet rounded to the dtype."""
    return FAMILIES[family](np.random.default_rng(seed), shape, dtype)
