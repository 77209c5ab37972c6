"""What a whole run comes to: exit codes, the order and the meaning of verdicts, `check` and its report."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toys import SOFTMAX, implementation, softmax

import veriformer
from veriformer.calling import UsageError
from veriformer.catalogue import all_laws
from veriformer.checking import RED, Report, Settings, check, judge, missing_features
from veriformer.law import find_laws
from veriformer.report.terminal import summary_line
from veriformer.running import VERDICTS, Row

LAW = "softmax/equals-the-reference"
pytestmark = pytest.mark.usefixtures("everything_counts")


def report_of(*verdicts: str, missing: tuple[str, ...] = ()) -> Report:
    law = find_laws(all_laws(), [LAW])[0]
    return Report([Row(law, "toy", "float32", verdict) for verdict in verdicts], missing=list(missing))


@pytest.mark.parametrize(
    ("verdicts", "code"),
    [
        (("pass",), 0),
        (("pass", "not_provided", "xfail"), 0),
        (("xfail",), 0),
        (("pass", "undetermined"), 0),
        (("pass", "fail"), 1),
        (("pass", "error"), 1),
        (("pass", "crash"), 1),
        (("pass", "timeout"), 1),
        (("pass", "xpass"), 1),
        (("fail", "blocked", "incomplete"), 1),
        (("pass", "suite_error", "fail"), 3),
        (("pass", "incomplete"), 4),
        (("pass", "not_run"), 4),
        (("undetermined",), 4),
        (("undetermined", "not_provided"), 4),
        (("not_provided",), 4),
        ((), 4),
    ],
)
def test_the_exit_code_is_the_first_that_applies(verdicts: tuple[str, ...], code: int) -> None:
    report = report_of(*verdicts)
    assert report.exit_code == code and report.ok is (code == 0)


def test_a_required_keyword_that_is_absent_is_exit_code_4() -> None:
    assert report_of("pass", missing=("toy: softmax does not take axis",)).exit_code == 4
    assert report_of("fail", missing=("toy: softmax does not take axis",)).exit_code == 1
    lines = missing_features([implementation(softmax=lambda x: x)], ["axis", "causal"])
    assert lines == ["toy: softmax does not take axis, which is required"]
    with pytest.raises(UsageError, match="--require 'axes': no operation has it; known are alpha, axis, base"):
        missing_features([], ["axes"])


def test_every_verdict_is_counted_and_red_ones_come_first() -> None:
    counts = report_of(*VERDICTS).counts()
    assert set(counts) == set(VERDICTS) and list(counts)[: len(RED)] == list(RED)


def test_tentative_laws_are_run_and_shown_but_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("veriformer.catalogue.level", lambda name="": frozenset({"softmax/sums-to-one"}))
    report = check(softmax=lambda x: x * 0 + 1, effort="smoke", laws=[LAW, "softmax/sums-to-one"], dtypes=["float32"])
    assert [row.verdict for row in report.rows] == ["fail", "fail"] and len(report.failures) == 1
    assert "equals-the-reference (tentative)" in str(report)


def quick(function: Any = softmax, **words: Any) -> Report:
    words = {"effort": "smoke", "dtypes": ["float32"], "laws": [LAW, "returns-an-array", "softmax/sums-to-one"]} | words
    return check(softmax=function, framework="numpy", **words)


def test_check_judges_a_function_in_memory() -> None:
    report = quick()
    assert report.exit_code == 0 and report.ok and report.complete and not report.failures
    assert [row.verdict for row in report.rows] == ["pass"] * 3
    assert [row.law.name for row in report.rows][0] == "returns-an-array"


def doubled(x: np.ndarray, *, axis: int = -1) -> np.ndarray:
    return softmax(2 * x, axis=axis)


def test_a_wrong_function_is_red_and_its_report_says_where() -> None:
    report = quick(doubled)
    assert report.exit_code == 1 and [row.law.id for row in report.failures] == [LAW]
    text = str(report)
    assert "FAIL  softmax/equals-the-reference" in text and "case shape=[2]; x=" in text and "exit code 1" in text
    assert max(map(len, text.splitlines())) <= 80 and "\x1b" not in text


def test_metamorphic_messages_wait_while_the_oracle_fails() -> None:
    rows = quick(lambda x, *, axis=-1: x * 0, laws=[LAW, "softmax/sums-to-one"]).rows
    assert {row.law.name: (row.verdict, row.withheld) for row in rows} == {
        "equals-the-reference": ("fail", False),
        "sums-to-one": ("fail", find_laws(all_laws(), ["softmax/sums-to-one"])[0].relative),
    }


def test_a_broken_contract_blocks_what_hangs_on_it() -> None:
    report = quick(lambda x: None)
    assert report.counts() == {"fail": 1, "blocked": 2} and report.exit_code == 1


def test_the_report_says_what_was_not_tested() -> None:
    report = quick(lambda x: softmax(x), laws=["softmax"])
    assert "not tested: axis, temperature, gradients (not provided)" in " ".join(str(report).split())


def test_what_is_known_to_fail_is_not_counted_among_what_holds() -> None:
    rows = [Row(law, "toy", "float32", verdict) for law, verdict in zip(all_laws(), ("xfail", "pass"), strict=False)]
    assert summary_line(rows, "softmax") == "softmax: 1 law holds, 0 fail; 1 known to fail"


def test_check_takes_targets_in_a_worker_and_declarations(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SOFTMAX)
    words: dict[str, Any] = {"effort": "smoke", "laws": [LAW], "declare": {"dtypes": ("float32",)}}
    report = check(f"softmax={tmp_path}/mine.py:softmax", **words)
    assert report.ok and [row.dtype for row in report.rows] == ["float32"] and report.settings.isolate


def test_the_time_limit_leaves_the_rest_unjudged() -> None:
    def slow(x: np.ndarray) -> np.ndarray:
        time.sleep(0.02)
        return softmax(x)

    start = time.monotonic()
    report = quick(slow, laws=["softmax"], effort="ci", max_time=0.3)
    assert report.exit_code == 4 and report.complete and time.monotonic() - start < 15
    assert report.rows[-1].verdict == "not_run" and report.rows[-1].reason == "time limit"


def test_rows_come_one_by_one_and_a_run_that_stops_early_is_not_complete() -> None:
    report = Report([], [implementation(softmax=softmax)], Settings("smoke", dtypes=("float32",)))
    first = next(judge(report))
    assert first.law.root and report.rows == [first] and not report.complete


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"effort": "hard"}, "effort 'hard' is not known; wanted one of look, smoke, ci, deep"),
        ({"dtypes": ["float8"]}, "dtype 'float8' is not known"),
        ({"laws": ["softmax/sums-to-two"]}, "unknown law 'softmax/sums-to-two'; nearest is 'softmax/sums-to-one'"),
        ({"declare": {"layot": "BTHD"}}, "softmax: unknown capability 'layot'; did you mean 'layout'"),
        ({"require": ["axes"]}, "--require 'axes': no operation has it"),
    ],
)
def test_what_cannot_be_done_is_a_usage_error(words: dict[str, Any], message: str) -> None:
    with pytest.raises(veriformer.UsageError, match=message):
        quick(**words)


def test_the_public_check_is_this_one() -> None:
    assert veriformer.check is check and veriformer.Report is Report
    with pytest.raises(UsageError, match="unknown operation 'sofmax'; nearest is 'softmax'"):
        veriformer.check(sofmax=softmax)
