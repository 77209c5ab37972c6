"""One item: its verdicts, its seeds, expected failures and the conditions they speak of, the time limit."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from toys import cases_of, implementation, judged, row_case, softmax
from veriformer.calling import UsageError
from veriformer.case import Case
from veriformer.checking import Turn
from veriformer.declarations import Expected
from veriformer.expect import expect_close, expect_different, expect_finite, expect_same
from veriformer.law import Law, Recipe, choice, find_laws, law
from veriformer.running import EFFORTS, Item, awake, holds, items

PLAIN = cases_of(row_case(0, 1), row_case(0, 1, 2))


def toy_law(body: Callable[..., None] = lambda softmax, case: expect_finite(softmax(case)), **words: Any) -> Law:
    """A law of softmax with this body."""

    def toy(softmax: Any, case: Case, *others: Any) -> None:
        """A law for a test."""
        body(softmax, case, *others)

    return law("softmax", case=words.pop("case", PLAIN), **words)(toy)  # type: ignore[no-any-return]


def refusing(*lengths: int) -> Callable[..., np.ndarray]:
    def function(x: np.ndarray) -> np.ndarray:
        if len(x) in lengths:
            raise ValueError("this length is not supported")
        return softmax(x)

    return function


def test_a_law_that_holds_passes_and_counts_what_it_judged() -> None:
    row = judged(toy_law(), softmax=softmax)
    assert (row.verdict, row.cases, row.judged, row.refused, row.vacuous) == ("pass", 2, 5, 0, 0)
    assert row.id == "softmax/toy[toy-float32]"


def test_a_broken_law_fails_with_its_case_and_calls() -> None:
    row = judged(toy_law(lambda softmax, case: expect_same(softmax(case), case["x"])), softmax=softmax)
    assert row.verdict == "fail" and row.failure is not None
    assert row.failure.kind == "value" and row.failure.case.describe() == "0=1; x=[0]"
    assert len(row.failure.calls) == 1 and row.failure.origin == "pinned 1"


def test_an_exception_of_the_implementation_is_an_error() -> None:
    def function(x: np.ndarray) -> np.ndarray:
        raise KeyError("axis")

    row = judged(toy_law(), softmax=function)
    assert row.verdict == "error" and row.failure is not None and row.failure.message == "KeyError: 'axis'"


def test_mostly_refused_is_incomplete() -> None:
    row = judged(toy_law(), softmax=refusing(2, 3))
    assert row.verdict == "incomplete" and row.refused == 2
    assert row.reason == "2 of 2 cases refused: ValueError: this length is not supported"


def test_half_refused_still_passes_and_is_counted() -> None:
    row = judged(toy_law(), softmax=refusing(3))
    assert (row.verdict, row.refused, row.judged) == ("pass", 1, 2)


def test_infinite_budgets_alone_are_undetermined() -> None:
    row = judged(toy_law(lambda softmax, case: expect_close(softmax(case), 0, np.inf)), softmax=softmax)
    assert (row.verdict, row.judged, row.undetermined) == ("undetermined", 0, 5)


def test_nothing_judged_is_incomplete() -> None:
    row = judged(toy_law(lambda softmax, case: None), softmax=softmax)
    assert (row.verdict, row.reason, row.vacuous) == ("incomplete", "no case was judged", 2)


def test_what_a_law_needs_and_does_not_get_is_not_provided() -> None:
    row = judged(
        toy_law(needs={"temperature", "axis or temperature", "gradients"}, also=("log_softmax",)), softmax=softmax
    )
    assert row.verdict == "not_provided" and row.cases == 0
    assert row.reason == "needs gradients, temperature, operation log_softmax"


def test_a_law_that_raises_is_the_suites_own_fault() -> None:
    row = judged(toy_law(lambda softmax, case: 1 / 0), softmax=softmax)  # type: ignore[arg-type,return-value]
    assert row.verdict == "suite_error" and "ZeroDivisionError" in row.reason


def test_a_failure_that_does_not_come_again_is_called_that() -> None:
    calls = iter([np.array([np.nan, 1.0])])
    row = judged(toy_law(), softmax=lambda x: next(calls, x))
    assert row.verdict == "fail" and row.failure is not None and row.failure.kind == "not repeatable"
    assert row.failure.message.endswith("the same case passed when it was run again")


def test_a_root_that_fails_on_the_plainest_case_blocks_the_rest() -> None:
    root = toy_law(lambda softmax, case: expect_same(softmax(case), 0 * case["x"]), root=True)
    toy, turn = implementation(softmax=softmax), Turn()
    rows = [turn.run(item) for item in items([toy_law(), root], [toy], "smoke", 0, float("inf"), ["float32"])]
    assert [row.verdict for row in rows] == ["fail", "blocked"]
    assert rows[1].reason == "softmax/toy does not hold"


def test_a_root_that_fails_later_blocks_nothing() -> None:
    root = toy_law(lambda softmax, case: expect_close(case.size("0"), 2, 0), root=True)
    toy, turn = implementation(softmax=softmax), Turn()
    rows = [turn.run(item) for item in items([root, toy_law()], [toy], "smoke", 0, float("inf"), ["float32"])]
    assert [row.verdict for row in rows] == ["fail", "pass"]


def test_the_main_dtype_comes_first_and_roots_before_all() -> None:
    toy, laws = implementation(softmax=softmax), [toy_law(), toy_law(root=True)]
    order = [(item.dtype, item.law.root) for item in items(laws, [toy], "smoke", 0, float("inf"))]
    assert order == [("float32", True), ("float32", False), ("float64", True), ("float64", False)]


def seen(name: str, seed: int, dtype: str = "float32", effort: str = "ci") -> list[Any]:
    """The numbers that a law of this name draws."""
    drawn: list[Any] = []
    numbers = Recipe(lambda domain: [0], lambda domain: st.integers(0, 10**6))
    one = toy_law(lambda softmax, case, n: (drawn.append(n), expect_finite(softmax(case)))[1], n=numbers)
    judged(replace(one, name=name), effort=effort, dtype=dtype, seed=seed, softmax=softmax)
    return drawn


def test_the_same_seed_draws_the_same_cases() -> None:
    assert seen("one", 3) == seen("one", 3)


def test_other_laws_seeds_and_dtypes_draw_other_cases() -> None:
    runs = [seen("one", 3), seen("two", 3), seen("one", 4), seen("one", 3, "float64")]
    assert len({tuple(run[:10]) for run in runs}) == 4


def test_effort_bounds_the_search() -> None:
    pinned, main, other = 2, *EFFORTS["ci"]
    assert len(seen("one", 0, effort="smoke")) == pinned
    assert main / 2 < len(seen("one", 0)) - pinned <= main
    assert other / 2 < len(seen("one", 0, "float64")) - pinned <= other


def test_the_search_finds_what_no_pinned_case_shows() -> None:
    numbers = Recipe(lambda domain: [0], lambda domain: st.integers(0, 1000))
    one = toy_law(
        lambda softmax, case, n: expect_different(n, 0, what="n") if n > 500 else expect_same(n, n), n=numbers
    )
    assert judged(one, effort="ci", softmax=softmax).verdict == "pass"
    wrong = toy_law(lambda softmax, case, n: (softmax(case), expect_close(n > 500, 0, 0))[1], n=numbers)
    row = judged(wrong, effort="ci", softmax=softmax)
    assert row.verdict == "fail" and row.failure is not None and row.failure.origin == "search, seed 0"
    assert judged(wrong, effort="smoke", softmax=softmax).verdict == "pass"


def test_pinned_arguments_of_a_second_recipe_go_round() -> None:
    pairs: list[Any] = []
    cases = cases_of(*(row_case(*range(n)) for n in (1, 2, 3)))
    judged(toy_law(lambda s, case, n: pairs.append((case.size("0"), n)), case=cases, n=choice(7, 8)), softmax=softmax)
    assert pairs == [(1, 7), (2, 8), (3, 7)]


def short() -> Law:
    """Does not hold for rows longer than 2."""
    return toy_law(lambda softmax, case: expect_close(case.size("0") > 2 and softmax(case).size > 0, 0, 0))


def expecting(x: list[float], **words: Any) -> Expected:
    return Expected("softmax/toy", "long rows are known to be wrong", case={"x": x}, **words)


def test_an_expected_failure_that_still_fails_is_xfail_and_the_search_is_off() -> None:
    row = judged(short(), softmax=softmax, expected=[expecting([0, 1, 2])])
    assert (row.verdict, row.reason) == ("xfail", "long rows are known to be wrong")
    assert row.search == "off: long rows are known to be wrong" and row.cases == 0


def test_an_expected_failure_that_is_gone_is_xpass() -> None:
    row = judged(short(), softmax=softmax, expected=[expecting([0, 1])])
    assert row.verdict == "xpass" and row.reason.startswith("no longer fails; remove this entry: long rows")


def test_an_expected_failure_that_is_refused_by_now_is_xpass() -> None:
    row = judged(short(), softmax=refusing(3), expected=[expecting([0, 1, 2])])
    assert row.verdict == "xpass" and row.reason.startswith("refused now (ValueError: this length")


def test_a_failure_that_turns_into_a_refusal_is_not_the_suites_fault() -> None:
    calls = iter(range(5))

    def fickle(x: np.ndarray) -> np.ndarray:
        if next(calls, None) is None:
            raise ValueError("no more")
        return x * np.nan

    assert judged(toy_law(), softmax=fickle).verdict == "fail"


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
    ],
)
def test_an_entry_sleeps_unless_its_conditions_hold(when: dict[str, str], wanted: bool) -> None:
    assert awake(expecting([0.0], when=when), "float32", {"torch": "2.13.0+cpu"}) is wanted


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


ATTENTION = Case(
    "attention",
    {"q": np.ones((1, 1, 2, 4)), "k": np.ones((1, 1, 3, 4)), "v": np.ones((1, 1, 3, 1)), "mask": np.ones((1, 1, 1, 3), bool)},
    {"causal": True, "scale": -1.0},
)  # fmt: skip


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


def test_time_that_is_over_before_the_first_case_is_not_run() -> None:
    toy = implementation(softmax=softmax)
    late = Item(toy_law(), toy, "float32", "smoke", deadline=time.monotonic() - 1)
    assert (late.run().verdict, late.run().reason) == ("not_run", "time limit")
    assert Turn().run(late).verdict == "not_run"


def test_time_that_ends_in_between_is_incomplete() -> None:
    def slow(x: np.ndarray) -> np.ndarray:
        time.sleep(0.05)
        return softmax(x)

    numbers = Recipe(lambda domain: [0], lambda domain: st.integers(0, 10**6))
    one = toy_law(lambda softmax, case, n: expect_finite(softmax(case)), n=numbers)
    row = Item(one, implementation(softmax=slow), "float32", "ci", deadline=time.monotonic() + 0.3).run()
    assert (row.verdict, row.reason) == ("incomplete", "time limit") and 0 < row.judged and row.seconds < 3
    assert row.search == "cut short: time is over"


def test_a_law_needs_a_statement_and_a_known_kind() -> None:
    with pytest.raises(ValueError, match="law <lambda>: wanted a docstring and a kind of contract, hygiene"):
        law("softmax", case=PLAIN)(lambda softmax, case: None)
    with pytest.raises(ValueError, match="got kind='rumour'"):
        law("softmax", case=PLAIN, kind="rumour")(short().function)


def test_laws_are_found_by_id_operation_and_name() -> None:
    laws = [toy_law(), replace(toy_law(), operation="log_softmax")]
    assert find_laws(laws, ["softmax/toy"]) == laws[:1] == find_laws(laws, ["softmax"])
    assert find_laws(laws, ["toy", "softmax"]) == laws
    with pytest.raises(UsageError, match="unknown law 'softmax/toi'; nearest is 'softmax/toy'"):
        find_laws(laws, ["softmax/toi"])
