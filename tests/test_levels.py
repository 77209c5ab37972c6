"""Levels: frozen lists of law ids that exit codes and expected failures speak of."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest
from toys import ROOT

from veriformer.catalogue import LEVEL, all_laws, level, tentative
from veriformer.declarations import DTYPES, PRESETS, Capabilities
from veriformer.law import KINDS
from veriformer.models import STEP_WORDS
from veriformer.operations import OPERATIONS

FROZEN = {
    "core/1": "ae709066ba5569da",
    "core/2": "1ece63f98bdca8f7",
    "core/3": "f55e4aa9df141617",
    "core/4": "22759de3b705d9ce",
}
"""Level -> digest of its sorted ids. A level that was released is never edited; laws that are new wait for the next."""

LEVELS = sorted((ROOT / "veriformer" / "levels").glob("*.txt"))


def ids_of(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]


def digest(name: str) -> str:
    return hashlib.sha256("\n".join(sorted(level(name))).encode()).hexdigest()[:16]


@pytest.mark.parametrize("path", LEVELS, ids=lambda path: path.stem)
def test_every_id_of_a_level_exists_and_stands_there_once(path: Path) -> None:
    ids = ids_of(path)
    assert sorted(set(ids)) == sorted(ids) == sorted(line.strip() for line in ids)
    assert set(ids) <= {one.id for one in all_laws()}


@pytest.mark.parametrize("name", FROZEN)
def test_a_released_level_does_not_change(name: str) -> None:
    assert digest(name) == FROZEN[name], f"{name} has {len(level(name))} ids and digest {digest(name)}"


def test_every_level_is_recorded_here_and_the_current_one_is_there() -> None:
    assert {path.stem for path in LEVELS} == {name.replace("/", "-") for name in FROZEN}
    assert LEVEL in FROZEN


def test_no_two_laws_bear_one_id() -> None:
    ids = [one.id for one in all_laws()]
    assert len(ids) == len(set(ids)) >= 150


def test_ids_statements_and_kinds_are_well_formed() -> None:
    for one in all_laws():
        assert re.fullmatch(r"[a-z_]+/[a-z]+(-[a-z]+)*", one.id) and one.operation in OPERATIONS, one.id
        assert one.statement.rstrip(")").endswith(".") and one.kind in KINDS, one.id
        assert one.source, one.id


def test_a_law_outside_the_level_is_tentative() -> None:
    outside = [one for one in all_laws() if one.id not in level(LEVEL)]
    inside = [one for one in all_laws() if one.id in level(LEVEL)]
    assert inside and all(map(tentative, outside)) and not any(map(tentative, inside))


def test_every_operation_has_an_oracle_law_and_one_contract_root() -> None:
    for operation in OPERATIONS:
        mine = [one for one in all_laws() if one.operation == operation]
        assert [one.name for one in mine if one.kind == "oracle"] == ["equals-the-reference"]
        assert [one.name for one in mine if one.root][:1] == ["returns-an-array"]
        assert {one.name for one in mine if one.root} <= {"returns-an-array", "returns-gradients", "steps-are-taken"}


def test_laws_of_one_id_in_two_files_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    first = all_laws()[0]
    monkeypatch.setattr("veriformer.catalogue.laws_of", lambda module: [first])
    with pytest.raises(ValueError, match=f"two laws are called {first.id}"):
        all_laws.__wrapped__()


def test_words_that_a_law_needs_are_known() -> None:
    known = {word for table in OPERATIONS.values() for word in (*table.options, *table.keywords)}
    known |= {
        "gradients",
        "torch",
        "weights",
        "persistent",
        "empty rows",
        "zero rows",
        "nan rows",
        *DTYPES,
        *Capabilities.__dataclass_fields__,
    }
    known |= {f"preset {preset}" for preset in PRESETS}
    methods = {word for table in OPERATIONS.values() for word in table.words}
    known |= methods | {f"{method}.{word}" for method in methods for word in STEP_WORDS}
    for one in all_laws():
        assert {word for words in one.needs for word in words.split(" or ")} <= known, one.id
        assert set(one.also) <= set(OPERATIONS) and set(one.changes) <= set(Capabilities.__dataclass_fields__), one.id
        assert one.recipes["case"] is next(iter(one.recipes.values())), one.id
