"""`veriformer history`: what it reads of asv's results, the tables and curves made of it, and its bad uses."""

from __future__ import annotations

import json
import math
import platform
import re
import sys
import webbrowser
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import histories
import pytest
from histories import BYTES, COST, IMPORT, RATIO, TIME, benchmarks, git, refused, repository, result, run

from veriformer.history import command
from veriformer.history.checkout import commits_of, open_checkout
from veriformer.history.curves import blocks, heights, line
from veriformer.history.results import History, read_history
from veriformer.history.tables import change, groups_of, number
from veriformer.history.written import markdown, page, plain

SUBJECTS = ("first", "second | with `ticks` and <tags>", "third", "fourth")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of four commits, of which the first, second and fourth have results."""
    place = tmp_path / "clone"
    one, two, _, four = repository(place, SUBJECTS)
    benchmarks(place)
    result(place, one, {COST: [2.0, 1.0], BYTES: [100, 4000], RATIO: [0.25, None], IMPORT: [3.0]})
    result(place, two, {COST: [2.0, math.nan], BYTES: [100, 1000], RATIO: [0.5, 0.1]})
    result(place, four, {COST: [1.0, 4.0], BYTES: [104, 1000], RATIO: [0.25, 0.1]})
    monkeypatch.chdir(place)
    monkeypatch.setattr(platform, "node", lambda: "host")
    monkeypatch.setattr(webbrowser, "open", lambda _: pytest.fail("opened a browser"))
    return place


def history(root: Path, branch: str = "main", machine: str = "any") -> History:
    checkout = open_checkout(root)
    return read_history(checkout, commits_of(checkout, branch), machine)


def test_commits_with_results_are_in_order_and_those_without_are_no_place(root: Path) -> None:
    found = history(root)
    assert [commit.subject for commit in found.commits] == [SUBJECTS[i] for i in (0, 1, 3)]
    assert found.commits[0].day == "2026-03-01" and found.elsewhere == 0
    assert set(found.environments) == {"Python 3.11, torch 2.13.0, numpy 2.4.6"}


def test_series_have_a_value_for_each_commit_and_none_for_what_failed_or_is_absent(root: Path) -> None:
    values = {(one.benchmark.name, *one.parameters): one.values for one in history(root).series}
    assert values[COST, "numpy:plain"] == (2.0, 2.0, 1.0)
    assert values[COST, "torch:functional"] == (1.0, None, 4.0)
    assert values[RATIO, "numpy:plain", "bfloat16"] == (None, 0.1, 0.1)
    assert values[(IMPORT,)] == (3.0, None, None)
    assert not any(name == TIME for name, *_ in values)


def test_results_of_another_version_of_a_benchmark_are_left_out(root: Path) -> None:
    last = git(root, "rev-parse", "HEAD")
    result(root, last, {COST: [7.0, 7.0], BYTES: [104, 1000]}, version="0")
    found = {(one.benchmark.name, *one.parameters): one.values for one in history(root).series}
    assert found[COST, "numpy:plain"] == (2.0, 2.0)


def test_of_two_environments_the_one_that_ran_last_counts(root: Path) -> None:
    last = git(root, "rev-parse", "HEAD")
    result(root, last, {COST: [5.0, 5.0]}, started=2000, environment="a-newer")
    result(root, last, {COST: [6.0, 6.0]}, started=10, environment="z-older")
    found = {(one.benchmark.name, *one.parameters): one.values for one in history(root).series}
    assert found[COST, "numpy:plain"][-1] == 5.0 and found[BYTES, "numpy:plain"][-1] == 104


def test_only_first_parents_count_and_other_results_are_said_to_be_elsewhere(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    git(root, "checkout", "-q", "-b", "side", "HEAD~1")
    (root / "other").write_text("x")
    git(root, "add", "other")
    git(root, "commit", "-q", "-m", "side")
    aside = git(root, "rev-parse", "HEAD")
    result(root, aside, {COST: [9.0, 9.0]})
    git(root, "checkout", "-q", "main")
    git(root, "merge", "-q", "--no-ff", "-m", "merge", "side")
    found = history(root)
    assert aside not in [commit.hash for commit in found.commits] and found.elsewhere == 1
    assert run("--no-open") == 0 and "1 more with results is not on main" in capsys.readouterr().out
    assert history(root, "side").commits[-1].hash == aside


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 8], "▁▂▃▄▅▆▇█"),
        ([8, None, 1], "█·▁"),
        ([5, 5], "▅▅"),
        ([0, 0], "▅▅"),
        ([100, 101, 100], "▄▅▄"),
        ([1, math.inf, 2], "▁██"),
        ([None, None], "··"),
        ([-1, 1], "▁█"),
        ([], ""),
    ],
)
def test_curves_of_blocks(values: list[float | None], wanted: str) -> None:
    assert blocks(values) == wanted


def test_curves_are_broken_where_a_value_is_missing() -> None:
    found = line([1.0, 2.0, None, 4.0, None, 2.0, 2.0])
    assert [piece.count(",") for piece in found.pieces] == [2, 2]
    assert [place for *_, place in found.dots] == [0, 1, 3, 5, 6]
    up = {place: y for _, y, place in found.dots}
    assert up[3] < up[1] < up[0], "more is higher, which is a smaller y"
    assert heights([3.0]) == [0.5] and line([]).dots == ()


@pytest.mark.parametrize(
    ("before", "after", "wanted"),
    [
        (2, 1, "-50 %"), (1, 1.03, "+3 %"), (1, 9.14, "×9.14"), (4, 4, "="), (0, 3, "from 0"), (-1, 2, "from -1"),
        (4194304, 4194368, "+0.00153 %"), (1, math.inf, "from 1"), (5, 0, "-100 %"),
    ],
)  # fmt: skip
def test_changes_in_either_direction(before: float, after: float, wanted: str) -> None:
    assert change(before, after) == wanted


def test_numbers() -> None:
    assert [number(n) for n in (4194304, 0.12345, 12.345678, 0, math.inf)] == ["4,194,304", "0.1235", "12.35", "0", "∞"]


def table(text: str, title: str) -> list[list[str]]:
    """The cells of a table in the Markdown report, without its head."""
    part = text.partition(f"## {title}\n")[2].partition("\n## ")[0]
    rows = [row for row in part.splitlines() if row.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows[2:]]


def test_the_markdown_report(root: Path) -> None:
    text = markdown(history(root))
    assert text.startswith("# Performance") and "Made by `veriformer history`" in text and "Less is better" in text
    commits = table(text, "Commits")
    assert [row[1] for row in commits] == ["2026-03-01"] * 3
    assert commits[1][3] == r"second \| with \`ticks\` and \<tags>"
    plain_cost, torch_cost = table(text, "Cost by workload")
    assert plain_cost == ["softmax-forward", "numpy:plain", "2", "1", "-50 %", "-50 %", "`██▁`"]
    assert torch_cost == ["softmax-forward", "torch:functional", "1", "4", "×4", "×4", "`▁·█`"]
    assert table(text, "Bytes by workload")[0][2:6] == ["100", "104", "+4 %", "+4 %"]
    assert table(text, "Bytes by workload")[1][2:6] == ["4,000", "1,000", "-75 %", "="]
    assert table(text, "Worst ratio by operation")[1][:3] == ["layer_norm", "numpy:plain, bfloat16", "0.1"]
    assert table(text, "Import cost")[0][2:6] == ["3", "3", "–", "–"]
    assert text.index("## Cost by") < text.index("## Bytes by") < text.index("## Worst ratio") < text.index("## Import")


def test_what_never_had_a_value_is_named(root: Path) -> None:
    for path in (root / "reports/asv/any").glob("*.json"):
        data = json.loads(path.read_text())
        data["results"][COST][0][1] = None
        path.write_text(json.dumps(data))
    assert "Never with a value: softmax-forward (torch:functional)." in markdown(history(root))
    table = json.loads((root / "reports/asv/benchmarks.json").read_text())
    name = COST.replace("Softmax", "LayerNorm")
    histories.put(root / "reports/asv/benchmarks.json", {**table, name: {**table[COST], "name": name}})
    text = markdown(history(root))
    assert "Never with a value: softmax-forward (torch:functional); layer-norm-forward." in text
    assert text.count("layer-norm-forward") == 1 and "layer-norm-forward" in page(history(root))


def test_the_report_is_the_same_whenever_and_wherever_it_is_made(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("--no-open") == 0
    before = [(root / path).read_text() for path in command.OURS]
    (root / "reports").joinpath("deeper").mkdir()
    monkeypatch.chdir(root / "reports/deeper")
    monkeypatch.setattr(platform, "node", lambda: "elsewhere")
    assert run("--no-open") == 0
    assert [(root / path).read_text() for path in command.OURS] == before
    assert not any(str(root) in text or "host" in text for text in before)


def test_the_page_is_whole_in_itself_with_values_on_its_dots(root: Path) -> None:
    text = page(history(root))
    assert "<script" not in text and "http" not in text and "src=" not in text
    tree = ElementTree.fromstring(re.sub(r"<meta[^>]*>|<!doctype html>", "", text))
    titles = [element.text or "" for element in tree.iter("title")][1:]
    assert len(titles) == sum(value is not None for one in history(root).series for value in one.values)
    assert any(title.endswith("2026-03-01: 4 yardsticks") for title in titles)
    links = [element.get("href", "")[1:] for element in tree.iter("a")]
    assert set(links) == {element.get("id") for element in tree.iter("h2")} and len(links) == len(set(links)) == 5
    assert "&lt;tags&gt;" in text


def test_times_of_this_machine_are_shown_on_a_page_that_is_not_committed(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    last = git(root, "rev-parse", "HEAD")
    result(root, last, {TIME: [0.004321, 0.001], COST: [77.0, 77.0]}, machine="host")
    assert run("--no-open") == 0
    committed = [(root / path).read_text() for path in command.OURS]
    own = (root / ".veriformer/performance.html").read_text()
    assert not any("0.004321" in text or "this machine" in text for text in committed)
    assert "0.004321 seconds" in own and "this machine: Call by workload" in own and "77" not in own
    assert "yardsticks" in own and (root / ".veriformer/.gitignore").is_file()
    assert ".veriformer/performance.html" in capsys.readouterr().out


def test_what_the_command_says_fits_eighty_columns_and_names_its_files(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--no-open") == 0
    said = capsys.readouterr().out.splitlines()
    assert max(map(len, said)) <= 80 and "3 commits have results on main" in said[0]
    assert re.split(r"  +", next(row for row in said if row.startswith("Cost")).strip())[1:] == ["2", "1", "1", "0"]
    assert [row for row in said if row.startswith("written")] == [f"written: {path}" for path in command.OURS]


def test_times_within_noise_count_as_the_same_and_what_is_counted_does_not(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    last = git(root, "rev-parse", "HEAD")
    for cost, wanted in (
        (2.9, ["0", "0", "1"]),
        (1.4, ["0", "0", "1"]),
        (3.1, ["1", "0", "0"]),
        (1.3, ["0", "1", "0"]),
    ):
        result(root, last, {COST: [cost, None], BYTES: [101, 1000], RATIO: [0.25, 0.1001]}, started=5000)
        assert run("--no-open") == 0
        rows = {
            row[0]: row[2:] for row in map(re.compile("  +").split, capsys.readouterr().out.splitlines()) if row[2:]
        }
        assert [one.strip() for one in rows["Cost by workload"]] == wanted
        assert [one.strip() for one in rows["Bytes by workload"]] == ["1", "0", "1"]
        assert [one.strip() for one in rows["Worst ratio by operation"]] == ["1", "1", "0"]
    assert markdown(history(root)).count("Less than a factor 1.5 in a cost of time means nothing") == 1


def test_one_commit_is_said_as_one_and_paths_outside_are_absolute(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in sorted((root / "reports/asv/any").glob("*-env.json")):
        if not place.name.startswith(git(root, "rev-parse", "HEAD")[:8]):
            place.unlink()
    (root / "deeper").mkdir()
    monkeypatch.chdir(root / "deeper")
    assert run("--no-open") == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("1 commit has results on main, the last ")
    written = [row for row in said if row.startswith("written")]
    assert written == [f"written: {root.resolve() / path}" for path in command.OURS]


def opener(monkeypatch: pytest.MonkeyPatch, works: bool) -> list[str]:
    opened: list[str] = []
    kept: Callable[[str], bool] = lambda url: not opened.append(url) and works  # type: ignore[func-returns-value]  # noqa: E731
    monkeypatch.setattr(webbrowser, "open", kept)
    return opened


def test_the_page_is_opened_where_there_is_a_screen(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = opener(monkeypatch, works=True)
    monkeypatch.setenv("DISPLAY", ":0")
    assert run() == 0 and opened == [(root / "reports/performance.html").resolve().as_uri()]


@pytest.mark.parametrize("screen", [True, False])
def test_its_path_is_said_where_there_is_no_screen_or_no_browser(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], screen: bool
) -> None:
    opened = opener(monkeypatch, works=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.setenv("DISPLAY", ":0" if screen else "")
    assert run() == 0 and len(opened) == screen
    assert re.search(r"no browser to open it in: \S+/reports/performance.html", capsys.readouterr().out)


def test_words_that_mean_something_in_markdown_are_shown_as_they_are() -> None:
    assert plain("a|b `c` *d* <e> [f] log_softmax __init__") == (r"a\|b \`c\` \*d\* \<e> \[f\] log_softmax \__init_\_")


# Bad use


def test_outside_of_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert "needs a git checkout" in refused(capsys)


def test_without_git(root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", "")
    assert "git, which is not installed" in refused(capsys)


def test_without_a_configuration_of_asv(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "asv.conf.json").write_text("[")
    assert "asv.conf.json cannot be read as JSON" in refused(capsys)
    (root / "asv.conf.json").write_text("[]")
    assert "wanted a JSON object, got list" in refused(capsys)
    (root / "asv.conf.json").unlink()
    assert "no asv.conf.json in" in refused(capsys)


def test_a_shallow_checkout(root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    shallow = root.parent / "shallow"
    git(root, "clone", "-q", "--depth", "1", root.as_uri(), str(shallow))
    monkeypatch.chdir(shallow)
    assert "git fetch --unshallow" in refused(capsys)


def test_a_detached_head_needs_a_branch(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    git(root, "checkout", "-q", "--detach", "HEAD~1")
    assert "HEAD is detached" in refused(capsys) and not (root / "reports/performance.md").exists()
    assert (
        run("--no-open", "--branch", "HEAD") == 0 and len(table((root / command.OURS[0]).read_text(), "Commits")) == 2
    )
    assert (
        run("--no-open", "--branch", "main") == 0 and len(table((root / command.OURS[0]).read_text(), "Commits")) == 3
    )


def test_an_unknown_branch(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "--branch", "mian").endswith("no such branch; nearest is 'main'")
    assert "no such branch" in refused(capsys, "--branch=--all")


def test_a_branch_without_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    repository(tmp_path, ())
    monkeypatch.chdir(tmp_path)
    assert "'main' has no commits yet" in refused(capsys)


def test_no_results_yet(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    git(root, "checkout", "-q", "--orphan", "fresh")
    git(root, "commit", "-q", "-m", "fresh")
    assert "no results yet for fresh (3 commits have some elsewhere): veriformer history --record" in refused(capsys)
    (root / "reports/asv/benchmarks.json").unlink()
    assert "no results yet for main: veriformer history --record" in refused(capsys, "--branch", "main")


def test_files_that_are_not_as_asv_writes_them(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = next((root / "reports/asv/any").glob("*-env.json"))
    good = json.loads(path.read_text())
    for bad, what in (
        ("{", "JSONDecodeError"), (json.dumps({**good, "version": 1}), "version 1, wanted 2"),
        (json.dumps({**good, "results": {COST: [[1.0], [histories.IMPLEMENTATIONS]]}}), "ValueError"),
        (json.dumps({name: value for name, value in good.items() if name != "commit_hash"}), "commit_hash"),
        ("[]", "TypeError"), (json.dumps({**good, "commit_hash": [1]}), "commit_hash is no text"),
        (json.dumps({**good, "results": {COST: [["a", 2], [histories.IMPLEMENTATIONS], "1", 1]}}), "no number"),
        (json.dumps({**good, "results": {COST: [[1, 2], [histories.IMPLEMENTATIONS], "1", "now"]}}), "started_at"),
        ("[" * 100_000, "RecursionError"),
    ):  # fmt: skip
        path.write_text(bad)
        said = refused(capsys)
        assert str(path) in said and what in said and "restore it with git" in said


@pytest.mark.parametrize("folder", [5, "../results", "/results"])
def test_results_that_do_not_lie_in_the_checkout(
    root: Path, folder: object, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "asv.conf.json").write_text(json.dumps({**histories.CONFIGURATION, "results_dir": folder}))
    assert f"results_dir is {folder!r}, wanted a folder in the checkout" in refused(capsys)


def test_a_report_that_cannot_be_written(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "reports/performance.md").mkdir()
    assert "the report cannot be written" in refused(capsys) and (root / "reports/performance.md").is_dir()


@pytest.mark.parametrize(
    ("words", "wanted"),
    [(["--quick"], "goes with --record"), (["--asv", "--branch", "main"], "--branch is for the report")],
)
def test_options_that_do_not_go_together(
    root: Path, capsys: pytest.CaptureFixture[str], words: list[str], wanted: str
) -> None:
    assert wanted in refused(capsys, *words)


def test_a_group_has_its_own_table(root: Path) -> None:
    groups = groups_of(history(root))
    assert [(one.metric, one.subject, one.parameters) for one in groups] == [
        ("cost", "workload", "implementation"), ("bytes", "workload", "implementation"),
        ("worst ratio", "operation", "implementation, dtype"), ("import cost", "", ""),
    ]  # fmt: skip
