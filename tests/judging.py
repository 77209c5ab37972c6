"""Kernels and data by which the tests judge error budgets: what several of them share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np

from veriformer.budgets import Bound, Precision, error_ratio
from veriformer.case import round_to
from veriformer.properties.families import FAMILIES, fill

NUMPY = {"float64": np.float64, "float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
FUSED = {"intermediate": "float32", "rounds_probabilities": False}
SIXTEEN = ("bfloat16", "float16")


def stored(x: Any, dtype: str) -> np.ndarray:
    """x rounded to a dtype, as float64."""
    return np.array(round_to(np.asarray(x, np.float64), dtype))


def tensor(x: np.ndarray, dtype: str) -> Any:
    """x as a tensor of that dtype."""
    import torch

    return torch.from_numpy(np.ascontiguousarray(x)).to(getattr(torch, dtype))


def plain(result: Any) -> np.ndarray:
    """A tensor as float64."""
    return result.double().numpy()


def work(dtype: str) -> Any:
    """The dtype in which a kernel computes on arguments of that dtype."""
    return np.float64 if dtype == "float64" else np.float32


def rounder(dtype: str, unfused: bool = True) -> Callable[[np.ndarray], np.ndarray]:
    """Stores one value between two steps of an unfused kernel, which computes on in float32."""
    if not unfused or dtype not in SIXTEEN:
        return lambda x: x

    def store(x: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            return np.asarray(x, dtype=np.float32).astype(NUMPY[dtype]).astype(np.float32)

    return store


def one_by_one(terms: np.ndarray) -> np.ndarray:
    """The sum over the last axis, which is kept, from the first term to the last in the dtype of the terms."""
    return np.add.accumulate(terms, axis=-1, dtype=terms.dtype)[..., -1:]


def product_one_by_one(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a[m,n] b[n,k] with each sum from the first term to the last."""
    total = np.zeros((*a.shape[:-1], b.shape[1]), a.dtype)
    for i in range(a.shape[-1]):
        total = total + a[..., i, None] * b[i]
    return total


def worst(computed: Any, bound: Bound, precision: Precision) -> float:
    """The largest error in budgets."""
    computed = np.asarray(computed, np.float64)
    assert computed.shape == bound.value.shape == bound.allowed.shape
    ratio = error_ratio(computed, bound.value, bound.allowed, precision.largest)
    return float(ratio.max(initial=0.0))


def data(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Values of any family, rounded to the dtype."""
    family = list(FAMILIES)[rng.integers(len(FAMILIES))]
    return stored(np.clip(fill(family, int(rng.integers(1 << 30)), shape, dtype), -6e4, 6e4), dtype)


def length(rng: np.random.Generator, most: int) -> int:
    """A length from 1 to most, short ones as often as long ones."""
    return int(np.exp(rng.uniform(0, np.log(most + 0.99))))


def cases(count: int, name: str) -> Iterator[np.random.Generator]:
    """Generators of independent cases, the same in every run."""
    return (np.random.default_rng([index, *name.encode()]) for index in range(count))
