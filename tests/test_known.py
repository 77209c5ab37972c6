"""Expected failures: strict, asleep unless their conditions hold, and blind only where they say so."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from toys import cases_of, implementation, judged, refusing, row_case, softmax, toy_law

from veriformer import running
from veriformer.calling import UsageError
from veriformer.case import Case
from veriformer.catalogue import all_laws
from veriformer.checking import Turn, items
from veriformer.declarations import Expected
from veriformer.expect import expect_close, expect_finite
from veriformer.known import awake, holds
from veriformer.law import Law, Recipe, find_laws
from veriformer.running import Item


def short() -> Law:
    """Does not hold for rows longer than 2."""
    return toy_law(lambda softmax, case: expect_close(case.size("0") > 2 and softmax(case).size > 0, 0, 0))


def expecting(x: list[float], **words: Any) -> Expected:
    return Expected("softmax/toy", "long rows are known to be wrong", case={"x": x}, **words)


def test_an_expected_failure_that_still_fails_is_xfail_and_the_search_is_off() -> None:
    row = judged(short(), softmax=softmax, expected=[expecting([0, 1, 2])])
    assert (row.verdict, row.reason) == ("xfail", "long rows are known to be wrong")
    assert row.search == "off: long rows are known to be wrong" and row.cases == 0


def test_a_pinned_case_may_fail_beside_any_example_of_what_else_is_drawn() -> None:
    law = toy_law(lambda softmax, case, pick: expect_close(pick == 2 and softmax(case).size > 0, 0, 0))
    law = replace(law, recipes={**law.recipes, "pick": Recipe(lambda _: (0, 1, 2), lambda _: st.integers(0, 2))})
    assert judged(law, softmax=softmax, expected=[expecting([0, 1])]).verdict == "xfail"
    never = replace(law, recipes={**law.recipes, "pick": Recipe(lambda _: (0, 1), lambda _: st.integers(0, 1))})
    assert judged(never, softmax=softmax, expected=[expecting([0, 1])]).verdict == "xpass"


def test_an_expected_failure_that_is_gone_is_xpass() -> None:
    row = judged(short(), softmax=softmax, expected=[expecting([0, 1])])
    assert row.verdict == "xpass" and row.reason.startswith("no longer fails; remove this entry: long rows")


def test_an_expected_failure_that_is_refused_by_now_is_xpass() -> None:
    row = judged(short(), softmax=refusing(3), expected=[expecting([0, 1, 2])])
    assert row.verdict == "xpass" and row.reason.startswith("refused now (ValueError: this length")


def test_a_refusal_may_be_what_is_expected() -> None:
    entry = expecting([0, 1, 2], kind="refused")
    row = judged(short(), softmax=refusing(3), expected=[entry])
    assert (row.verdict, row.reason) == ("xfail", "long rows are known to be wrong")
    right = toy_law(lambda softmax, case: expect_finite(softmax(case)))
    assert judged(right, softmax=softmax, expected=[entry]).verdict == "xpass"
    row = judged(short(), softmax=softmax, expected=[entry])
    assert row.verdict == "fail" and row.reason.startswith("fails otherwise than expected (refused)")


def test_a_contract_root_that_is_expected_to_fail_leaves_its_dtype_out() -> None:
    root = toy_law(lambda softmax, case: expect_close(case.size("0") > 2 and softmax(case).size > 0, 0, 0), root=True)
    entry = expecting([0, 1, 2], when={"dtype": "float32"})
    for where, wanted in (("", "not_provided"), ("axis < 0", "pass")):
        toy = implementation(softmax=softmax, expected=[replace(entry, where=where)])
        other = replace(toy_law(lambda softmax, case: expect_finite(softmax(case))), name="other")
        turn, laws = Turn(), [other, root]
        rows = [turn.run(item) for item in items(laws, [toy], "smoke", 0, float("inf"))]
        assert [(row.dtype, row.verdict) for row in rows] == [
            ("float32", "xfail"), ("float32", wanted), ("float64", "fail"), ("float64", "pass"),
        ]  # fmt: skip


def wrong(x: np.ndarray, *, axis: int = -1) -> np.ndarray:
    """Rows of more than two numbers sum to 2."""
    return softmax(x, axis=axis) * (1 + (x.shape[axis] > 2))


def summing(**words: Any) -> Law:
    """Rows sum to 1."""
    body = lambda softmax, case: expect_close(np.asarray(softmax(case)).sum(), 1, 1e-5)  # noqa: E731
    return toy_law(body, **{"kind": "metamorphic", **words})


all_laws()  # defines the oracles, without which nothing spreads


def spreading(case: list[float], **words: Any) -> Expected:
    about = {"reason": "long rows", "case": {"x": case}, "spreads": True, **words}
    return Expected("softmax/equals-the-reference", **about)


def test_what_spreads_makes_failures_of_other_laws_known_and_the_search_goes_on() -> None:
    row = judged(summing(), softmax=wrong, expected=[spreading([0, 1, 2])])
    assert (row.verdict, row.reason, row.search) == ("xfail", "long rows", "done")
    assert row.masked and row.judged and row.failure is None
    row = judged(toy_law(kind="metamorphic"), softmax=wrong, expected=[spreading([0, 1, 2])])
    assert (row.verdict, row.expected, row.masked) == ("pass", None, 0)


def test_what_spreads_stays_within_its_operation_its_dtype_its_kind_and_its_condition() -> None:
    for entry in (
        replace(spreading([0, 1, 2]), law="attention/equals-the-reference"),
        replace(spreading([0, 1, 2]), spreads=False),
        spreading([0, 1, 2], when={"dtype": "float64"}),
        spreading([0, 1, 2], kind="crash"),
        spreading([0, 1, 2], kind="not finite"),
        spreading([0, 1, 2], where="axis > 0"),
    ):
        assert judged(summing(), softmax=wrong, expected=[entry]).verdict == "fail"
    row = judged(summing(), softmax=wrong, expected=[spreading([0, 1, 2], where="axis < 0")])
    assert (row.verdict, row.cases) == ("xfail", 0) and row.masked


def test_an_entry_whose_case_no_longer_fails_does_not_spread() -> None:
    assert judged(summing(), softmax=wrong, expected=[spreading([0, 1])]).verdict == "fail"


@pytest.mark.parametrize("words", [{"kind": "contract"}, {"kind": "hygiene"}, {"root": True}])
def test_wrong_numbers_spread_to_laws_of_numbers_alone(words: dict[str, Any]) -> None:
    assert judged(summing(**words), softmax=wrong, expected=[spreading([0, 1, 2])]).verdict == "fail"


def test_a_root_that_fails_is_no_reason_to_leave_out_the_law_that_owns_the_entry() -> None:
    toy = implementation(softmax=lambda x, *, axis=-1: wrong(x, axis=axis)[..., :-1], expected=[spreading([0, 1, 2])])
    laws = find_laws(all_laws(), ["softmax/returns-an-array", "softmax/equals-the-reference"])
    rows = [Turn().run(item) for item in items(laws, [toy], "smoke", 0, float("inf"), ["float32"])]
    assert rows[0].verdict == "fail"


def test_what_else_keeps_a_law_from_passing_is_not_hidden() -> None:
    law = replace(summing(), recipes={"case": cases_of(row_case(0, 1, 2), row_case(0), row_case(0, 1, 2, 3, 4))})
    one = lambda x, *, axis=-1: refusing(1, 5)(x) * (1 + (x.shape[axis] > 2))  # noqa: E731
    row = judged(law, softmax=one, expected=[spreading([0, 1, 2])])
    assert (row.verdict, row.refused, row.masked) == ("incomplete", 2, 1)


def test_a_slow_failure_that_spreads_is_provoked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "SLOW", ("value",))
    row = judged(summing(), softmax=wrong, expected=[spreading([0, 1, 2])])
    assert (row.verdict, row.masked, row.search) == ("xfail", 1, "ended at a known failure")


def test_a_condition_may_speak_of_the_length_of_the_axis_and_counts_for_every_case_of_a_law() -> None:
    row = judged(summing(), softmax=wrong, expected=[spreading([0, 1, 2], where="axis_length > 2")])
    assert (row.verdict, row.masked, row.cases) == ("pass", 1, 1)
    body = lambda softmax, case, other: expect_close(np.asarray(softmax(other)).sum(), 1, 1e-5)  # noqa: E731
    short, long = cases_of(row_case(0, 1)), cases_of(row_case(0, 1, 2))
    two = replace(summing(), function=body, recipes={"case": short, "other": long})
    assert judged(two, softmax=wrong).verdict == "fail"
    row = judged(two, softmax=wrong, expected=[spreading([0, 1, 2], where="axis_length > 2")])
    assert row.verdict == "xfail" and row.masked and not row.cases


def test_a_where_condition_leaves_the_rest_to_be_judged() -> None:
    long = cases_of(row_case(0, 1), row_case(0, 1, 2), row_case(0, 1, 2, 3))
    one = replace(short(), recipes={"case": long})
    narrow = judged(one, softmax=softmax, expected=[expecting([0, 1, 2], where="axis < 0 and dtype == 'float32'")])
    assert (narrow.verdict, narrow.masked, narrow.cases) == ("xfail", 3, 0)
    wrong = judged(one, softmax=softmax, expected=[expecting([0, 1, 2], where="axis > 0")])
    assert wrong.verdict == "fail" and wrong.masked == 0


@pytest.mark.parametrize(
    ("when", "wanted"),
    [
        ({}, True),
        ({"dtype": "float32"}, True),
        ({"dtype": "bfloat16, float16"}, False),
        ({"torch": "<2.14"}, True),
        ({"torch": "<2.14", "dtype": "float64"}, False),
        ({"torch": ">=2.14"}, False),
        ({"numpy": ">=1"}, False),
        ({"jax": ">=0.9"}, True),
    ],
)
def test_an_entry_sleeps_unless_its_conditions_hold(when: dict[str, str], wanted: bool) -> None:
    assert awake(expecting([0.0], when=when), "float32", {"torch": "2.13.0+cpu", "jax": "0.9.1.dev3"}) is wanted


def test_a_sleeping_entry_changes_nothing() -> None:
    row = judged(short(), softmax=softmax, expected=[expecting([0, 1, 2], when={"dtype": "float64"})])
    assert row.verdict == "fail" and row.expected is None


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (expecting([0.0], when={"torch": "new"}), "when torch='new' is no version condition"),
        (Expected("softmax/toy", "why"), "needs a pinned case"),
        (Expected("softmax/toy", "why", case={"y": [0]}), "'y' is not one of its names"),
        (expecting([0, 1, 2], where="axis <"), "where='axis <' cannot be read"),
    ],
)
def test_an_entry_that_cannot_be_read_is_a_usage_error(entry: Expected, words: str) -> None:
    toy = implementation(softmax=softmax, expected=[entry])
    toy = replace(toy, description=replace(toy.description, versions={"torch": "2.13.0"}))
    with pytest.raises(UsageError, match=words):
        Item(short(), toy, "float32", "smoke").run()


SHAPES = {"q": (1, 1, 2, 4), "k": (1, 1, 3, 4), "v": (1, 1, 3, 1)}
ATTENTION = Case(
    "attention",
    {"mask": np.ones((1, 1, 1, 3), bool), **{name: np.ones(shape) for name, shape in SHAPES.items()}},
    {"causal": True, "scale": -1.0},
)


@pytest.mark.parametrize(
    ("condition", "wanted"),
    [
        ("causal and scale <= 0", True),
        ("causal and not scale <= 0", False),
        ("scale == -1.0 or softcap > 0", True),
        ("softcap > 0", False),
        ("softcap == None", True),
        ("Tq < Tk", True),
        ("2 <= Tk < 3", False),
        ("mask and not bias", True),
        ("dtype != 'bfloat16'", True),
        ("scale < +1", True),
        ("window == None and D >= 4", True),
    ],
)
def test_conditions_speak_of_keywords_options_sizes_and_dtype(condition: str, wanted: bool) -> None:
    assert holds(condition, ATTENTION, "float32") is wanted


@pytest.mark.parametrize(
    "condition",
    ["causal +", "clausal", "print(1)", "scale + 1 > 0", "q[0] > 1", "dtype < 3", "1 if causal else 2", "D in (4,)"],
)
def test_any_other_condition_is_a_usage_error(condition: str) -> None:
    with pytest.raises(UsageError, match="cannot be read .* names are dtype, causal, scale, window"):
        holds(condition, ATTENTION, "float32")


def test_another_kind_of_failure_than_the_expected_one_is_red() -> None:
    def raising(x: np.ndarray) -> np.ndarray:
        raise KeyError("gone")

    row = judged(short(), softmax=raising, expected=[expecting([0, 1, 2])])
    assert row.verdict == "error" and row.reason.startswith("fails otherwise than expected (a wrong result)")
    assert row.failure is not None and row.failure.message == "KeyError: 'gone'"
