"""Which output elements a failing comparison speaks of, found by replaying the law on made-up outputs.

Most laws compare affine functions of outputs. Replaying the law with zeros, and with a one in one
place at a time, reads these functions off; a script can then state them without the law.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from veriformer.boundary import Outcome, Request
from veriformer.expect import Broken, Refused, recording
from veriformer.running import Failure, Row
from veriformer.subject import Implementation, attempt

MOST = 400
"""Outputs beyond this many numbers are not traced."""


@dataclass(frozen=True)
class Element:
    """One number among the outputs: call, result (or gradient's name) and index."""

    call: int
    result: int | str
    index: tuple[int, ...]


@dataclass(frozen=True)
class Affine:
    """constant + the sum of factor · element."""

    constant: float
    parts: tuple[tuple[float, Element], ...]


@dataclass(frozen=True)
class Comparison:
    """What the failing comparison compares; other is None where one number had to be finite."""

    got: Affine
    other: Affine | None

    @property
    def last_call(self) -> int:
        """The last call of which a number is compared."""
        parts = [*self.got.parts, *(self.other.parts if self.other else ())]
        return max((element.call for _, element in parts), default=0)


def compare_of(row: Row, implementation: Implementation) -> Comparison | None:
    """The failing comparison as affine functions of the outputs, or None where it is not one."""
    failure = row.failure
    if failure is None or "index" not in failure.facts:
        return None
    outcomes = [call.outcome for call in failure.calls]
    elements = list(elements_of(outcomes))
    if len(elements) > MOST:
        elements = seen_in(elements, failure, outcomes)
    if not elements or len(elements) > MOST:
        return None
    base = values_at(row, implementation, [blank(outcome) for outcome in outcomes])
    if base is None:
        return None
    place, constants = base
    got: list[tuple[float, Element]] = []
    other: list[tuple[float, Element]] = []
    for element in elements:
        seen = values_at(row, implementation, with_one(outcomes, element), place)
        if seen is None:
            return None
        for parts, value, constant in zip((got, other), seen[1], constants, strict=True):
            if value is not None and value != constant:
                parts.append((value - (constant or 0.0), element))
    found = Comparison(
        Affine(constants[0] or 0.0, tuple(got)), None if constants[1] is None else Affine(constants[1], tuple(other))
    )
    return found if agrees(found, failure, outcomes) else None


def seen_in(elements: Sequence[Element], failure: Failure, outcomes: Sequence[Outcome]) -> list[Element]:
    """Those of many elements whose numbers the failure shows: most laws compare two of them as they are."""
    shown = [failure.facts.get(name) for name in ("got", "wanted", "other")]
    return [element for element in elements if value_of(element, outcomes) in shown]


def value_of(element: Element, outcomes: Sequence[Outcome]) -> float:
    """The recorded number of an element."""
    at = outcomes[element.call]
    source = at.results[element.result] if isinstance(element.result, int) else at.gradients[element.result]
    assert source is not None
    return float(source[element.index])


def elements_of(outcomes: Sequence[Outcome]) -> Any:
    """Every element of every result and gradient."""
    for call, outcome in enumerate(outcomes):
        for number, result in enumerate(outcome.results):
            for index in np.ndindex(result.shape):
                yield Element(call, number, index)
        for name, gradient in outcome.gradients.items():
            if gradient is not None:
                for index in np.ndindex(gradient.shape):
                    yield Element(call, name, index)


def blank(outcome: Outcome) -> Outcome:
    """The same outcome with zeros for numbers."""
    gradients = {name: None if g is None else np.zeros_like(g) for name, g in outcome.gradients.items()}
    return replace(outcome, results=tuple(np.zeros_like(r) for r in outcome.results), gradients=gradients)


def with_one(outcomes: Sequence[Outcome], element: Element) -> list[Outcome]:
    """Zeros everywhere but a one at the element."""
    made = [blank(outcome) for outcome in outcomes]
    at = made[element.call]
    target = at.results[element.result] if isinstance(element.result, int) else at.gradients[element.result]
    assert target is not None
    target[element.index] = 1.0
    return made


def values_at(
    row: Row, implementation: Implementation, outcomes: Sequence[Outcome], place: int | None = None
) -> tuple[int, tuple[float, float | None]] | None:
    """The two numbers that the failing comparison sees when the calls return these outcomes."""
    failure = row.failure
    assert failure is not None
    queue = list(outcomes)

    def call(name: str, operation: str, request: Request) -> Outcome:
        return queue.pop(0)

    with recording(keep=True, lenient=True) as trial:
        try:
            attempt(row.law, replace(implementation, call=call, start=None), row.dtype, failure.arguments)
        except (Broken, Refused, IndexError, ArithmeticError, ValueError):
            return None
    number = failure.facts["comparison"] if place is None else place
    if number >= len(trial.compared):
        return None
    got, other = trial.compared[number]
    index = tuple(failure.facts["index"])
    try:
        return number, (float(got[index]), None if other is None else float(other[index]))
    except IndexError:
        return None


def agrees(found: Comparison, failure: Failure, outcomes: Sequence[Outcome]) -> bool:
    """Whether the affine functions give back the numbers of the failure (where these are finite)."""
    for affine, name in ((found.got, "got"), (found.other, "wanted")):
        known = failure.facts.get(name, failure.facts.get("other"))
        if affine is None or known is None or not np.isfinite(known):
            continue
        value = evaluate(affine, outcomes)
        if np.isfinite(value) and abs(value - known) > 1e-9 * max(1.0, abs(known)):
            return False
    return bool(found.got.parts or (found.other and found.other.parts))


def evaluate(affine: Affine, outcomes: Sequence[Outcome]) -> float:
    """The value of an affine function on recorded outcomes."""
    total = affine.constant
    for factor, element in affine.parts:
        total += factor * value_of(element, outcomes)
    return total
