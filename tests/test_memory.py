"""Budgets are calculated once for the same case, precision and conventions, and forgotten when they are many."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from veriformer import oracle
from veriformer.budgets import Bound, Precision
from veriformer.case import Case
from veriformer.declarations import Capabilities
from veriformer.memory import Memory, key_of

CASE = Case("softmax", {"x": np.array([0.0, 1.0])})


def bound(size: int) -> Bound:
    return Bound(np.zeros(size), np.zeros(size), {})


def test_the_same_case_is_calculated_once() -> None:
    first = oracle.bounds(CASE, Capabilities(), Precision("float32"))
    again = Case("softmax", {"x": np.array([0.0, 1.0])}, origin="elsewhere")
    assert oracle.bounds(again, Capabilities(blocks=(8,)), Precision("float32")) is first
    with pytest.raises(ValueError, match="read-only"):
        first[0].value[0] = 1


@pytest.mark.parametrize(
    "other",
    [
        CASE.with_arrays(x=np.array([0.0, 2.0])),
        CASE.with_arrays(x=np.array([[0.0, 1.0]])),
        CASE.with_keywords(temperature=2.0),
        replace(CASE, operation="log_softmax"),
    ],
)
def test_another_case_has_another_key(other: Case) -> None:
    assert key_of(other) != key_of(CASE)


def test_precision_conventions_and_cotangents_are_part_of_the_key() -> None:
    ones = np.ones(2)
    keys = [key_of(CASE, Precision("float32")), key_of(CASE, Precision("float32", accumulate="bfloat16"))]
    keys += [key_of(CASE, ("x",), (ones,)), key_of(CASE, ("x",), (2 * ones,)), key_of(CASE, ("x",), (ones, None))]
    assert len(set(keys)) == len(keys)
    case = Case("rms_norm", {"x": ones, "weight": ones})
    plain, plus = (oracle.bounds(case, Capabilities(rms_weight=w), Precision("float32")) for w in ("plain", "one_plus"))
    assert (plain[0].value != plus[0].value).all()


def test_the_least_recently_used_is_dropped() -> None:
    memory, made = Memory(numbers=10), []

    def make(name: str) -> Bound:
        made.append(name)
        return bound(2)

    for name in ("a", "b", "a", "c", "a", "b"):
        memory.get(name.encode(), lambda name=name: make(name))  # type: ignore[misc]
    assert made == ["a", "b", "c", "b"] and memory.held <= 10
