"""One item: its verdicts, its seeds, expected failures and the conditions they speak of, the time limit."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from toys import PLAIN, ROOT, cases_of, implementation, judged, refusing, row_case, run_python, softmax, toy_law

from veriformer.calling import UsageError
from veriformer.checking import Turn, items
from veriformer.expect import expect_close, expect_different, expect_finite, expect_same
from veriformer.law import Recipe, choice, find_laws, law
from veriformer.running import EFFORTS, Item


def test_a_law_that_holds_passes_and_counts_what_it_judged() -> None:
    row = judged(toy_law(), softmax=softmax)
    assert (row.verdict, row.cases, row.judged, row.refused, row.vacuous) == ("pass", 2, 5, 0, 0)
    assert row.id == "softmax/toy[toy-float32]"


def test_a_broken_law_fails_with_its_case_and_calls() -> None:
    row = judged(toy_law(lambda softmax, case: expect_same(softmax(case), case["x"])), softmax=softmax)
    assert row.verdict == "fail" and row.failure is not None
    assert row.failure.kind == "value" and row.failure.case.describe() == "shape=[2]; x=[0,1]"
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


def test_a_failure_that_turns_into_a_refusal_is_not_the_suites_fault() -> None:
    calls = iter(range(5))

    def fickle(x: np.ndarray) -> np.ndarray:
        if next(calls, None) is None:
            raise ValueError("no more")
        return x * np.nan

    assert judged(toy_law(), softmax=fickle).verdict == "fail"


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


DRAWS = """
import sys
sys.path.insert(0, {tests!r})
import test_running
{more}
print(test_running.seen("one", 3))
"""


def test_the_same_seed_draws_the_same_cases_whatever_else_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text(f"NUMBERS = {list(range(1000, 3000, 7))}")
    (tmp_path / "few.py").write_text(DRAWS.format(tests=str(ROOT / "tests"), more=""))
    (tmp_path / "many.py").write_text(DRAWS.format(tests=str(ROOT / "tests"), more="import other"))
    few, many = (run_python(f"{name}.py", folder=tmp_path) for name in ("few", "many"))
    assert few.returncode == 0 and few.stdout == many.stdout and few.stdout.count(",") > 20


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
    row = Item(one, implementation(softmax=slow), "float32", "ci", deadline=time.monotonic() + 1).run()
    assert (row.verdict, row.reason) == ("incomplete", "time limit") and 0 < row.judged and row.seconds < 10
    assert row.search == "cut short: time is over"


def test_a_law_needs_a_statement_and_a_known_kind() -> None:
    with pytest.raises(ValueError, match="law <lambda>: wanted a docstring and a kind of contract, hygiene"):
        law("softmax", case=PLAIN)(lambda softmax, case: None)
    with pytest.raises(ValueError, match="got kind='rumour'"):
        law("softmax", case=PLAIN, kind="rumour")(toy_law().function)


def test_laws_are_found_by_id_operation_and_name() -> None:
    laws = [toy_law(), replace(toy_law(), operation="log_softmax")]
    assert find_laws(laws, ["softmax/toy"]) == laws[:1] == find_laws(laws, ["softmax"])
    assert find_laws(laws, ["toy", "softmax"]) == laws
    with pytest.raises(UsageError, match="unknown law 'softmax/toi'; nearest is 'softmax/toy'"):
        find_laws(laws, ["softmax/toi"])


@pytest.mark.parametrize(
    ("kind", "effort", "dtype", "cases"),
    [
        ("metamorphic", "smoke", "float32", 4),
        ("metamorphic", "look", "float32", 2),
        ("metamorphic", "smoke", "float64", 2),
        ("metamorphic", "look", "float64", 2),
        ("contract", "look", "float64", 4),
    ],
)
def test_a_look_takes_every_third_pinned_case_of_relations(kind: str, effort: str, dtype: str, cases: int) -> None:
    four = cases_of(*(row_case(*range(length)) for length in (1, 2, 3, 4)))
    assert judged(toy_law(case=four, kind=kind), effort=effort, dtype=dtype, softmax=softmax).cases == cases
