"""Dense random cases for the statistics of precision: standard normal, fixed seeds, at least a thousand outputs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from hypothesis import strategies as st

from veriformer.case import Case
from veriformer.law import Domain, Recipe

Arrays = dict[str, np.ndarray]
Fill = Callable[[np.random.Generator, int, Domain], Arrays]


def dense_cases() -> Recipe:
    """Two cases of each operation that computes; there is no search, because its data has structure."""

    def examples(domain: Domain) -> list[Case]:
        fill = DENSE[domain.operation]
        return [
            Case(domain.operation, fill(np.random.default_rng(seed), seed, domain), {}, domain.dtype,
                 origin=f"standard normal seed {seed}")
            for seed in range(2)
        ]  # fmt: skip

    return Recipe(examples, lambda domain: st.nothing())


def _rows(rng: np.random.Generator, seed: int, domain: Domain) -> Arrays:
    """x of many short rows, then of a few long ones."""
    return {"x": rng.standard_normal(((48, 48), (8, 512))[seed])}


def _many_rows(rng: np.random.Generator, seed: int, domain: Domain) -> Arrays:
    """The same where a row has only one result."""
    return {"x": rng.standard_normal(((2048, 16), (1024, 96))[seed])}


def _elements(rng: np.random.Generator, seed: int, domain: Domain) -> Arrays:
    """x of two amplitudes, 1 and a tenth."""
    return {"x": rng.standard_normal((64, 64)) * (1.0, 0.1)[seed]}


def _normalised(rng: np.random.Generator, seed: int, domain: Domain) -> Arrays:
    """Rows of two widths, a weight near 1 (or near 0 where 1 is added to it), a small bias."""
    width = (64, 512)[seed]
    near = 0.0 if domain.operation == "rms_norm" and domain.capabilities.rms_weight == "one_plus" else 1.0
    arrays = {"x": rng.standard_normal((32, width)), "weight": near + 0.1 * rng.standard_normal(width)}
    return arrays if domain.operation == "rms_norm" else arrays | {"bias": 0.1 * rng.standard_normal(width)}


def _feed_forward(rng: np.random.Generator, seed: int, domain: Domain) -> Arrays:
    """Weights that keep the size of what passes, at inner widths below and above the outer one."""
    d, f = ((64, 128), (256, 192))[seed]
    return {
        "x": rng.standard_normal((32, d)),
        "w1": rng.standard_normal((d, f)) * d**-0.5,
        "b1": rng.standard_normal(f) * 0.1,
        "w2": rng.standard_normal((f, d)) * f**-0.5,
        "b2": rng.standard_normal(d) * 0.1,
    }


def _attention(rng: np.random.Generator, seed: int, domain: Domain) -> Arrays:
    """Two lengths of keys, at a declared width or one of ours."""
    heads, queries, keys, width = ((4, 48, 64, 64), (2, 64, 256, 64))[seed]
    widths = domain.capabilities.widths
    width = widths[seed % len(widths)] if widths else width
    return {
        name: rng.standard_normal((1, heads, n, width)) for name, n in zip("qkv", (queries, keys, keys), strict=True)
    }


DENSE: dict[str, Fill] = {
    "softmax": _rows,
    "log_softmax": _rows,
    "logsumexp": _many_rows,
    "layer_norm": _normalised,
    "rms_norm": _normalised,
    "gelu": _elements,
    "feed_forward": _feed_forward,
    "attention": _attention,
}
"""What fills the arrays of a case: (generator, number of the case, domain) -> arrays by name."""
