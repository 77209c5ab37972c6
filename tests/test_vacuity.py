"""No law is empty: each rejects a wrong answer of its own, and judges most of its cases."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from toys import Everything, faulty, faulty_files, implementation

from veriformer.boundary import Outcome, Request
from veriformer.case import Case
from veriformer.catalogue import all_laws
from veriformer.checking import RED, in_process
from veriformer.declarations import Capabilities
from veriformer.impls import numpy_attention, numpy_plain
from veriformer.law import Domain, Law
from veriformer.operations import OPERATIONS
from veriformer.running import Item, Row
from veriformer.subject import Implementation
from veriformer.targets import Options, load, load_functions


def log_softmax_off(x: np.ndarray, *, axis: int = -1) -> np.ndarray:
    return (numpy_plain.log_softmax(x, axis=axis) + 1e-3).astype(x.dtype)


WITHOUT_KILLS: dict[str, tuple[str, dict[str, Callable[..., Any]]]] = {
    "exponential-is-softmax": (
        "it needs softmax and log_softmax side by side, and each planted fault has only one of them",
        {"softmax": numpy_plain.softmax, "log_softmax": log_softmax_off},
    ),
}
"""Laws that reject no planted fault -> why, and functions made up here that they do reject."""


def families() -> dict[str, list[Law]]:
    """Laws that share one function, by their file and name."""
    found: dict[str, list[Law]] = {}
    for law in all_laws():
        found.setdefault(f"{law.function.__module__.rpartition('.')[2]}:{law.name}", []).append(law)
    return found


FAMILIES = families()
KILLS = [(family, kill) for family, laws in FAMILIES.items() for kill in laws[0].kills]
WRONG: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "zeros": np.zeros_like,
    "a constant": lambda result: np.full_like(result, 0.25),
    # a single number has no rows to be exchanged
    "rows rolled by one": lambda result: (
        np.roll(result, 1, -2 if result.ndim > 1 else None) if result.ndim else -result
    ),
}


def verdict(law: Law, implementation: Implementation, dtype: str, *efforts: str) -> str:
    """The law's verdict when run alone, at the first of these efforts that is red."""
    row = Row(law, implementation.name, dtype)
    for effort in efforts:
        row = Item(law, implementation, dtype, effort, reduced=Everything()).run()
        if row.verdict in RED:
            break
    return row.verdict


def plain(operation: str) -> Implementation:
    """The first of our NumPy implementations that has the operation."""
    return next(in_process(one) for one in load("numpy", Options()) if operation in one.description.plans)


def answering(operation: str, change: Callable[[np.ndarray], np.ndarray]) -> Implementation:
    """An implementation with these answers in place of its own."""
    one = plain(operation)

    def call(name: str, operation: str, request: Request) -> Outcome:
        outcome = one.call(name, operation, request)
        return replace(outcome, results=tuple(map(change, outcome.results)))

    return replace(one, call=call)


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_oracle_rejects_a_made_up_answer_on_its_own_cases(operation: str, wrong: str) -> None:
    (law,) = (one for one in all_laws() if one.operation == operation and one.kind == "oracle")
    assert verdict(law, plain(operation), "float32", "smoke") == "pass"
    assert verdict(law, answering(operation, WRONG[wrong]), "float32", "smoke") == "fail"


@pytest.mark.parametrize("result", [0, 1], ids=["out", "lse"])
def test_the_oracle_looks_at_both_results_of_attention_with_lse(result: int) -> None:
    (law,) = (one for one in all_laws() if one.id == "attention_with_lse/equals-the-reference")
    one = plain("attention_with_lse")

    def call(name: str, operation: str, request: Request) -> Outcome:
        results = list((outcome := one.call(name, operation, request)).results)
        results[result] = results[result] + 1
        return replace(outcome, results=tuple(results))

    assert verdict(law, replace(one, call=call), "float32", "smoke") == "fail"


@pytest.mark.parametrize(("family", "kill"), KILLS)
def test_a_law_rejects_alone_the_faults_that_it_names(family: str, kill: str) -> None:
    file, _, variant = kill.partition(".py:")
    if file not in faulty_files():
        pytest.skip("torch is not installed")
    implementation = faulty(file)[variant]
    fault = implementation.description.fault
    assert fault is not None
    (law,) = (law for law in FAMILIES[family] if law.operation == fault.operation)
    assert verdict(law, implementation, fault.dtype, "smoke", "ci") in RED


@pytest.mark.parametrize("name", WITHOUT_KILLS)
def test_a_law_without_a_planted_fault_rejects_a_made_up_one(name: str) -> None:
    (law,) = (law for law in all_laws() if law.name == name)
    assert verdict(law, implementation(**WITHOUT_KILLS[name][1]), "float32", "smoke") == "fail"


def test_every_law_names_a_fault_or_stands_on_the_short_list() -> None:
    silent = {laws[0].name for laws in FAMILIES.values() if not laws[0].kills}
    assert silent == set(WITHOUT_KILLS), f"without kills: {sorted(silent ^ set(WITHOUT_KILLS))}"
    assert all(len(reason) > 20 for reason, _ in WITHOUT_KILLS.values()) and len(WITHOUT_KILLS) <= 5


def test_permutation_equivariance_names_a_fault_in_a_tiled_implementation() -> None:
    (law,) = (one for one in all_laws() if one.id == "attention/permutation-equivariance")
    assert [kill for kill in law.kills if kill.startswith("attention_tiled.py:")]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_laws_judge_most_of_their_own_cases(operation: str) -> None:
    one, mostly_vacuous = plain(operation), []
    for law in all_laws():
        if law.operation == operation and not law.missing(one.domain(operation, "float32")):
            row = Item(law, one, "float32", "smoke").run()
            if row.verdict != "pass" or 2 * (row.vacuous + row.refused) > row.cases:
                mostly_vacuous.append((law.id, row.verdict, row.cases, row.judged, row.vacuous, row.reason))
    assert mostly_vacuous == []


def test_every_law_applies_to_some_correct_implementation() -> None:
    pytest.importorskip("torch")
    ones = [in_process(one) for name in ("numpy", "torch") for one in load(name, Options())]
    ones.append(faulty("gradient")["correct"])
    lacking = {law.id for law in all_laws()}
    for one in ones:
        operations = set(one.description.plans)
        lacking -= {
            law.id
            for law in all_laws()
            if law.operation in operations and not law.missing(one.domain(law.operation, one.main_dtype(law.operation)))
        }
    assert lacking == set()


@pytest.mark.parametrize(("rule", "wanted"), [("zeros", []), ("mean", ["sink or zero rows"]), ({"mask": "nan"}, [])])
def test_a_law_of_rows_of_zeros_is_left_out_where_none_are(rule: Any, wanted: list[str]) -> None:
    (law,) = (one for one in all_laws() if one.id == "attention/empty-rows-pass-nothing-on")
    accepts, able = frozenset({"causal", "mask"}), Capabilities(empty_row=rule)
    assert law.missing(Domain("attention", "float32", accepts, able, vjp=True)) == wanted


LONGER: dict[str, Callable[[Case], bool]] = {
    "attention": lambda case: case.size("Tq") > case.size("Tk"),
    "attention_with_lse": lambda case: case.size("Tq") > case.size("Tk"),
    "multi_head_attention": lambda case: case["x"].shape[1] > case["memory"].shape[1],
    "varlen_attention": lambda case: bool((np.diff(case["q_offsets"]) > np.diff(case["k_offsets"])).any()),
}
"""Whether a case has more queries than keys."""


@pytest.mark.parametrize("operation", LONGER)
def test_more_queries_than_keys_are_not_asked_for_where_they_are_not_accepted(operation: str) -> None:
    found, table = {}, OPERATIONS[operation]
    accepts = frozenset({*table.keywords, *table.options})
    for rule in ("always", "unless_causal", "never"):
        domain = Domain(operation, "float32", accepts, Capabilities(more_queries_than_keys=rule), vjp=True)
        laws = [law for law in all_laws() if law.operation == operation and not law.missing(domain)]
        cases = [case for law in laws for case, *_ in law.pinned(domain)]
        found[rule] = {bool(case["causal"]) for case in cases if LONGER[operation](case)}
    assert found == {"always": {False, True}, "unless_causal": {False}, "never": set()}


def test_a_law_of_empty_rows_is_left_out_where_there_can_be_none() -> None:
    (law,) = (one for one in all_laws() if one.id == "attention/empty-row-is-as-declared")
    for accepts, rule, wanted in (
        ({"causal"}, "always", []),
        ({"causal"}, "unless_causal", ["empty rows"]),
        ({"causal", "mask"}, "never", []),
        ({"mask"}, "always", []),
        (set(), "always", ["empty rows"]),
    ):
        able = Capabilities(more_queries_than_keys=rule)
        assert law.missing(Domain("attention", "float32", frozenset(accepts), able)) == wanted


def longer_refused(name: str, rule: str) -> Callable[..., Any]:
    """One of the right implementations, but for more queries than keys, which it refuses."""
    right = getattr(numpy_plain, name, None) or getattr(numpy_attention, name)

    @functools.wraps(right)
    def refuses(*arrays: Any, **words: Any) -> Any:
        queries, keys = (array.shape[-2] for array in arrays[:2])
        if queries > keys and (rule == "never" or words.get("causal")):
            raise ValueError(f"{queries} queries, {keys} keys")
        return right(*arrays, **words)

    return refuses


@pytest.mark.parametrize("rule", ["unless_causal", "never"])
@pytest.mark.parametrize("name", ["attention", "attention_with_lse", "multi_head_attention"])
def test_what_does_not_take_more_queries_than_keys_is_judged_by_every_law(name: str, rule: str) -> None:
    found = load_functions({name: longer_refused(name, rule)}, Options(declare={"more_queries_than_keys": rule}), "toy")
    one = in_process(found)
    rows = [
        Item(law, one, "float32", "smoke").run()
        for law in all_laws()
        if law.operation == name and not law.missing(one.domain(name, "float32"))
    ]
    assert [(row.law.name, row.verdict, row.refusal) for row in rows if row.verdict != "pass" or row.refused] == []
