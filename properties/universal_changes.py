"""What laws of the Universal Transformer do to a case, and what it should give where that can be written down."""

from __future__ import annotations

from typing import Any

import numpy as np

from veriformer.case import Case
from veriformer.expect import expect_close, expect_same
from veriformer.law import Domain
from veriformer.properties.layer_changes import drawn
from veriformer.properties.measured import Measured, expect_equal, measure_all
from veriformer.properties.transformer_changes import LAST, silent
from veriformer.properties.universal_build import SURE, B, W, chain, halted, layer_of, real_tokens
from veriformer.reference.layers import normed
from veriformer.reference.universal import signals
from veriformer.subject import Subject

PLAIN = {"preset default"}
EVEN = PLAIN | {"biases"}
"""What a law needs that speaks of the default, and one that writes the halting unit's bias."""
LAYER = "params.layer."
NAMES = ("output", "steps", "remainder")
FAR = 10.0
"""A logit of a halting probability that is past the threshold, or that the sum of a few does not get there."""


def silenced(case: Case, *heard: str) -> Case:
    """The case in which all sublayers, but for those heard, give 0."""
    return silent(case, LAYER, [name for name in LAST if name not in heard])


def with_halting(case: Case, logit: float) -> Case:
    """The case with a halting unit that sees nothing: sigmoid(logit) for everybody at every step."""
    return case.with_arrays(**{W: np.zeros_like(case[W]), B: np.full(1, logit)})


def at_once(case: Case, domain: Domain) -> Case:
    """The case in which everybody halts at the first step, whatever bfloat16 makes of the threshold."""
    case = with_halting(case, SURE)
    return case.with_keywords(epsilon=0.3) if "epsilon" in domain.accepts else case


def telling(case: Case, pick: int) -> Case:
    """The case with tokens and weights that hide nothing; two or three steps decide."""
    rng, arrays = case.random(pick), {}
    for name, array in case.arrays.items():
        if case.table.kind(name) == "float":
            arrays[name] = drawn(rng, name.rpartition(".")[2], array.shape)
    if B in arrays:
        arrays[B] = -0.5 + arrays[B] / 4
    return case.with_arrays(**arrays)


def taken(case: Case, **indices: Any) -> Case:
    """The case with these indices of B, T or S only, in tokens, memory and masks."""
    arrays = {}
    for name in ("x", "memory", "mask", "memory_mask"):
        if case[name] is not None:
            array = case[name]
            for place, label in enumerate(case.labels(name)):
                if label in indices:
                    array = array.take(np.asarray(indices[label]), place)
            arrays[name] = array
    return case.with_arrays(**arrays)


def spoiled(case: Case, name: str, rows: np.ndarray, pick: int, poison: float | None = None) -> Case:
    """The case with other numbers in x or memory where rows[B,T] or rows[B,S] is True, far larger than usual."""
    top = 16.0 if case.dtype == "float16" else 1e3
    other = case.random(pick).choice([-1.0, 1.0], case[name].shape) * top
    other = other * case.random(pick + 1).uniform(0.1, 1.0, other.shape) if poison is None else poison
    return case.with_arrays(**{name: np.where(rows[..., None], other, case[name])})


def padded(case: Case, count: int, pick: int) -> Case:
    """The case with more tokens behind, none of them real."""
    batch, length, width = case["x"].shape
    x = np.concatenate([case["x"], case.random(pick).standard_normal((batch, count, width))], 1)
    mask = np.concatenate([real_tokens(case), np.zeros((batch, count), bool)], 1)
    return case.with_arrays(x=x, mask=mask)


# --- what should come out -------------------------------------------------------------------------


def even_weights(case: Case) -> tuple[np.ndarray, int, float]:
    """p[N], N and R of a halting unit that sees nothing."""
    h, last, threshold = float(1 / (1 + np.exp(-case[B][0]))), case["max_steps"], 1 - case["epsilon"]
    n = next((n for n in range(1, last) if n * h >= threshold), last)
    remainder = 1 - (n - 1) * h
    return np.asarray([h] * (n - 1) + [remainder]), n, remainder


def even_mean(case: Case, states: np.ndarray) -> np.ndarray:
    """The output of states s[B,T,M,d] under such a unit; 0 at padding."""
    weights, n, _ = even_weights(case)
    mean: np.ndarray = (weights[:, None] * states[:, :, :n]).sum(2)
    return np.where(real_tokens(case)[..., None], mean, 0.0)


def silent_states(case: Case, added: np.ndarray | float = 0.0) -> np.ndarray:
    """s[B,T,M,d] where every sublayer gives 0, but for a last one that adds the same at every step, in pre-norm."""
    layer, u, found = layer_of(case), case["x"], []
    norms = [part for name, part in sorted(layer.items()) if name.startswith("norm")]
    for n in range(1, case["max_steps"] + 1):
        u = u + signals(u, 0, n) + added
        if case["norm"] == "post":
            for norm in norms[: 2 + (case["memory"] is not None)]:
                u = normed(u, norm)
        found.append(u)
    return np.stack(found, 2)


def leaving_one_running(case: Case) -> Case | None:
    """Two tokens of which the first halts at step 1 and the other at none of three; None where no unit does that.

    The unit is solved for: it must tell s^1 of the first token from s^1 and s^2 of the second one.
    """
    case = taken(case, B=[0], T=[0, 1]).with_keywords(max_steps=3, causal=False)
    first = chain(case, count=1)[:, :, 0]
    second = chain(case, start=first, first=2, count=1)[:, :, 0]
    points = np.stack([first[0, 0], first[0, 1], second[0, 1]])
    unit = np.linalg.lstsq(np.hstack([points, np.ones((3, 1))]), np.asarray([FAR, -FAR, -FAR]), rcond=None)[0]
    case = case.with_arrays(**{W: unit[:-1, None], B: unit[-1:]})
    sums = halted(case)[1]
    clear = sums[0, 0, 0] > 1 - case["epsilon"] / 4 and sums[0, 1, 1] < (1 - case["epsilon"]) / 4
    return case if clear and np.abs(unit).max() < 1e3 else None


# --- comparing all three results ------------------------------------------------------------------


def expect_all_equal(
    one: tuple[Measured, ...], other: tuple[Measured, ...], rows: Any = ..., others: Any = None
) -> None:
    """All three results, at these tokens, differ by no more than their budgets."""
    for name, a, b in zip(NAMES, one, other, strict=True):
        expect_equal(a[rows], b[rows if others is None else others], what=f"{name} is")


def expect_all_unmoved(universal: Subject, case: Case, changed: Case, rows: Any = ...) -> None:
    """All three results, at these tokens, come out alike: bit for bit, or within budget if leak="rounding"."""
    if universal.capabilities.leak == "exact":
        for name, before, after in zip(NAMES, universal(case), universal(changed), strict=True):
            expect_same(after[rows], before[rows], what=f"{name} is")
    else:
        expect_all_equal(measure_all(universal, changed), measure_all(universal, case), rows)


def expect_steps(results: tuple[Measured, ...], rows: np.ndarray, steps: Any, remainder: Any) -> None:
    """N and R at these tokens."""
    _, n, r = results
    expect_close(n.value[rows], steps, n.allowed[rows], what="steps is")
    expect_close(r.value[rows], remainder, r.allowed[rows], what="remainder is")
