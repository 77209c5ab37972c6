"""Planted faults are accused by the law they name, with a small case; what is right is accused of nothing."""

from __future__ import annotations

import functools

import pytest
from toys import faulty, faulty_files

from veriformer.catalogue import all_laws
from veriformer.checking import RED
from veriformer.law import find_laws
from veriformer.running import Item, Row

SMALL = 64
"""A case of at most this many numbers is small."""


@functools.cache
def accusations(file: str) -> dict[str, Row]:
    """The row of the law that each fault of a file names, at the least effort that shows it."""
    rows = {}
    for name, one in faulty(file).items():
        fault = one.description.fault
        if fault is not None:
            (law,) = find_laws(all_laws(), [fault.law])
            for effort in ("smoke", "ci"):
                rows[name] = Item(law, one, fault.dtype, effort).run()
                if rows[name].verdict in RED:
                    break
    return rows


@pytest.mark.parametrize("file", faulty_files())
def test_every_fault_is_accused_by_the_law_it_names(file: str) -> None:
    rows = accusations(file)
    missed = [f"{row.id}: {row.verdict} {row.reason}" for row in rows.values() if row.verdict not in RED]
    assert missed == [] and (rows or file == "controls")


def test_nine_of_ten_faults_end_in_a_small_case() -> None:
    rows = [row for file in faulty_files() for row in accusations(file).values() if row.law.kind != "precision"]
    large = [row.id for row in rows if row.failure is None or row.failure.case.numbers > SMALL]
    share = 1 - len(large) / len(rows)
    assert len(rows) >= 40 and share >= 0.9, f"{share:.0%} of {len(rows)} faults; large: {large}"


def test_no_smallest_case_takes_more_than_200_tries() -> None:
    tries = {row.id: row.failure.tries for file in faulty_files() for row in accusations(file).values() if row.failure}
    assert max(tries.values()) <= 200


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
