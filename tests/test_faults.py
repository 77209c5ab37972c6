"""Planted faults are accused by the law they name, with a small case; what is right is accused of nothing."""

from __future__ import annotations

from typing import Any

import pytest
from toys import Everything, faulty, faulty_files

from veriformer.catalogue import all_laws
from veriformer.checking import RED
from veriformer.declarations import Fault
from veriformer.law import find_laws
from veriformer.oracle import COMPOSITES
from veriformer.reduce import TRIES
from veriformer.running import Item, Row
from veriformer.subject import Implementation

SMALL = 64
"""A case of at most this many numbers is small."""


def accused(one: Implementation, fault: Fault, smallest: bool) -> Row:
    """The row of the law that a fault names, at the least effort that shows it."""
    (law,) = find_laws(all_laws(), [fault.law])
    row = Row(law, one.name, fault.dtype)
    for effort in ("smoke", "ci"):
        row = Item(law, one, fault.dtype, effort, reduced=frozenset() if smallest else Everything()).run()
        if row.verdict in RED:
            break
    return row


def chosen_to_be_small(faults: list[tuple[Implementation, Fault]]) -> list[tuple[bool, Any]]:
    """Every third fault, of composites every twelfth: to make a case small takes far longer than to find it."""
    steps = [12 if fault.operation in COMPOSITES else 3 for _, fault in faults]
    return [(place % step == 0, fault) for place, (step, fault) in enumerate(zip(steps, faults, strict=True))]


@pytest.mark.parametrize("file", faulty_files())
def test_every_fault_is_accused_by_the_law_it_names_most_with_a_small_case(file: str) -> None:
    faults = [(one, one.description.fault) for one in faulty(file).values() if one.description.fault is not None]
    rows = [(accused(one, fault, chosen), chosen) for chosen, (one, fault) in chosen_to_be_small(faults)]
    missed = [f"{row.id}: {row.verdict} {row.reason}" for row, _ in rows if row.verdict not in RED]
    assert missed == [] and (rows or file == "controls")
    small = [row for row, reduced in rows if reduced and row.failure and row.law.kind != "precision"]
    large = [row.id for row in small if row.failure.case.numbers > SMALL]
    assert len(large) <= max(1, len(small) // 10), f"{len(large)} of {len(small)} are large: {large}"
    assert all(row.failure.tries <= TRIES for row in small)


@pytest.mark.parametrize("file", faulty_files())
def test_what_is_right_is_accused_of_nothing(file: str) -> None:
    right = [one for one in faulty(file).values() if one.description.fault is None]
    wrong = []
    for one in right:
        for law in all_laws():
            if law.operation in one.description.plans:
                row = Item(law, one, one.main_dtype(law.operation), "smoke").run()
                if row.verdict not in ("pass", "not_provided"):
                    wrong.append(f"{row.id}: {row.verdict} {row.reason} {row.failure and row.failure.message}")
    assert right and wrong == []


def test_every_fault_says_where_it_was_seen_and_what_it_does() -> None:
    for file in faulty_files():
        for name, one in faulty(file).items():
            fault = one.description.fault
            assert fault is None or fault.source and fault.summary and fault.operation in one.description.plans, name
