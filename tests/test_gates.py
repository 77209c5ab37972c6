"""The gates' commits and the rule by which times differ: benchmarks/gates/commits.py and rule.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from planting import NORMS, PATH, commit, git, planted

from veriformer.benchmarks.gates.bytes_and_accuracy import gate as bytes_gate
from veriformer.benchmarks.gates.commits import asked_for, ended, pattern
from veriformer.benchmarks.gates.rule import ERROR, LIMIT, MARGIN, Contest, Found, Run, Timing, rank, timed
from veriformer.benchmarks.gates.speed import gate as speed_gate
from veriformer.benchmarks.judging import Wrong
from veriformer.calling import UsageError

GATES = pytest.mark.parametrize("gate", [speed_gate, bytes_gate])


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of two commits, in which the test runs."""
    folder = tmp_path / "repository"
    folder.mkdir()
    commit(folder, {PATH: NORMS})
    commit(folder, {PATH: planted("comment")})
    monkeypatch.chdir(folder)
    return folder


def usage(gate, words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:  # type: ignore[no-untyped-def]
    """The one line of a usage error."""
    assert ended("gate", gate, words) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1 and len(printed.err) < 300
    return printed.err


@GATES
def test_an_unknown_commit_is_a_usage_error(gate, repository: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    assert "no commit 'mian'" in usage(gate, ["mian"], capsys)
    assert "no commit 'f00'" in usage(gate, ["HEAD", "f00"], capsys)
    assert "no commit '--all'" in usage(gate, ["--", "--all"], capsys)


@GATES
def test_a_dirty_tree_is_a_usage_error(gate, repository: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    (repository / "impls" / "numpy_new.py").write_text(NORMS)
    assert "impls/numpy_new.py): commits are compared; commit first" in usage(gate, ["HEAD~1"], capsys)
    (repository / PATH).write_text(NORMS)
    assert "and 1 more" in usage(gate, ["HEAD~1", "HEAD"], capsys)


def test_results_of_earlier_commands_leave_a_tree_clean(repository: Path) -> None:
    (repository / "reports").mkdir()
    (repository / "reports" / "new.json").write_text("{}")
    assert asked_for(repository, "HEAD~1", "").changed("impls") == [PATH]


@GATES
def test_a_detached_head_needs_both_commits(gate, repository: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    git(repository, "checkout", "--quiet", "--detach")
    assert "detached HEAD" in usage(gate, ["HEAD~1"], capsys)
    assert asked_for(repository, "HEAD~1", "HEAD").changed("impls") == [PATH]


@GATES
def test_a_shallow_checkout_without_the_base_is_a_usage_error(gate, repository, tmp_path, monkeypatch, capsys) -> None:  # type: ignore[no-untyped-def]
    git(tmp_path, "clone", "--quiet", "--depth", "1", f"file://{repository}", "shallow")
    monkeypatch.chdir(tmp_path / "shallow")
    assert "git fetch --unshallow" in usage(gate, ["HEAD~1"], capsys)


@GATES
def test_outside_a_checkout_is_a_usage_error(gate, tmp_path, monkeypatch, capsys) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.chdir(tmp_path)
    assert "no git checkout" in usage(gate, ["HEAD~1"], capsys)


@GATES
def test_a_broken_pattern_is_a_usage_error(gate, repository: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    assert "no regular expression" in usage(gate, ["HEAD~1", "--bench", "("], capsys)


@GATES
@pytest.mark.parametrize("words", [[], ["HEAD", "HEAD", "HEAD"], ["HEAD", "--quick"]])
def test_other_words_are_a_usage_error(gate, words: list[str], capsys) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(SystemExit) as left:
        gate(words)
    assert left.value.code == 2 and capsys.readouterr().err.count("\n") == 1


def test_without_asv_s_configuration_bytes_are_not_measured(repository: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    assert "asv.conf.json cannot be read" in usage(bytes_gate, ["HEAD~1"], capsys)


def test_a_worktree_is_gone_afterwards(repository: Path, tmp_path: Path) -> None:
    commits = asked_for(repository, "HEAD~1", "")
    with commits.worktree(commits.base, tmp_path / "tree") as tree:
        assert (tree / PATH).read_text() == NORMS
    assert not tree.exists() and git(repository, "worktree", "list").count("\n") == 1


def test_a_pattern_is_found_anywhere() -> None:
    assert pattern("norm")("layer-norm-forward numpy:rows") and not pattern("^norm")("layer-norm")
    with pytest.raises(UsageError):
        pattern("*")


def test_the_rank_is_that_of_the_sign_test() -> None:
    for count in (41, 60, 101):
        tails = [sum(math.comb(count, i) for i in range(k)) / 2**count for k in range(count)]
        assert tails[rank(count)] <= ERROR < tails[rank(count) + 1]
    with pytest.raises(ValueError, match="too few"):
        rank(9)


def test_an_interval_holds_the_median_as_often_as_it_says() -> None:
    ratios = np.sort(np.exp(np.random.default_rng(1).laplace(0, 0.2, (100_000, 41))), axis=1)
    above = (ratios[:, rank(41) - 1] > 1).mean()
    below = (ratios[:, -rank(41)] < 1).mean()
    assert 0 < above < 1.4 * ERROR and 0 < below < 1.4 * ERROR  # four standard deviations of such a count


def test_fewer_pairs_and_no_times_are_refused() -> None:
    with pytest.raises(ValueError, match="40 pairs, wanted at least 41"):
        Run.of([1.0] * 40)
    for bad in (0.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="no positive number"):
            Run.of([1.0] * 40 + [bad])


def test_slower_takes_a_median_and_an_interval() -> None:
    assert Run(LIMIT + 0.01, MARGIN + 0.01, 2).slower
    assert not Run(LIMIT, 1.2, 2).slower and not Run(1.5, MARGIN, 2).slower


def runs(*medians: float) -> Contest:
    """A contest whose runs have these ratios, one after another."""
    left = iter(medians)
    return Contest("work somebody", "somebody", lambda: {"work": [next(left)] * 41})


@pytest.mark.parametrize(
    ("medians", "verdict", "count"), [([1.1], "ok", 1), ([2, 1.2], "not confirmed", 2), ([2, 1.3], "SLOWER", 2)]
)
def test_what_seems_slower_is_taken_again(medians: list[float], verdict: str, count: int) -> None:
    found = Found()
    timed([runs(*medians)], found)
    assert [(one.verdict, len(one.runs)) for one in found.timings] == [(verdict, count)]
    assert found.failed == (verdict == "SLOWER")


def test_what_raises_is_a_failure() -> None:
    def wrong() -> dict[str, list[float]]:
        raise Wrong("not right")

    found = Found()
    timed([Contest("one", "", wrong), Contest("two", "", lambda: {"work": [1.0]}), runs(2.0)], found)
    assert found.failures[0] == "one: not right" and "1 pairs, wanted at least 41" in found.failures[1]
    assert len(found.failures) == 3 and found.failed and not found.timings  # the third has no second run


def test_nothing_timed_is_a_failure_where_something_was_due() -> None:
    assert not Found().failed and Found(due=True).failed
    assert not Found([Timing("work", "somebody", (Run(1, 1, 1),))], due=True).failed
