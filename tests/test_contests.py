"""The runner of contests: who is timed, how ratios come about, what is said of limits, and its command line."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from toys import ROOT

from veriformer.benchmarks.limits import Limits

CONTESTS = ROOT / "benchmarks" / "contests"
OPTIONAL = ("transformers", "jax", "onnx", "onnxruntime", "numba", "triton")
"""What no topic may need to be listed."""
MACHINE = Limits(((1.0, 1e9), (1e9, 1e9)), {"float32": 1e10})
OWN = ("contest", "written", "run")


@pytest.fixture(scope="module", autouse=True)
def modules() -> Iterator[dict[str, ModuleType]]:
    """The runner's own modules, which import one another as scripts do; the process is left as it was."""
    before = dict(os.environ)
    sys.path.insert(0, str(CONTESTS))
    try:
        yield {name: importlib.import_module(name) for name in OWN}
    finally:
        sys.path.remove(str(CONTESTS))
        for name in OWN:
            sys.modules.pop(name, None)
        os.environ.clear()
        os.environ.update(before)


def gives(value: Any, work: int = 1) -> Callable[[], Callable[[], Any]]:
    """Maker of a call that sums numbers so many times and returns a value."""

    def make() -> Callable[[], Any]:
        numbers = np.ones(20000)

        def call() -> Any:
            for _ in range(work):
                numbers.sum()
            return value

        return call

    return make


def lacking() -> Callable[[], Any]:
    raise ModuleNotFoundError("No module named 'absentee'", name="absentee")


def failing() -> Callable[[], Any]:
    raise RuntimeError("no such kernel\nsecond line")


@pytest.fixture
def held(modules: dict[str, ModuleType]) -> Callable[..., Any]:
    """The outcome of a contest between entrants by name."""

    def hold(ours: dict[str, Any], others: dict[str, Any], **words: Any) -> Any:
        module = modules["contest"]
        return module.hold(module.Contest("toy", "sums", ours, others, **{"rounds": 15, **words}))

    return hold


def test_work_done_twice_takes_about_twice_as_long(held: Callable[..., Any]) -> None:
    outcome = held({"ours": gives(1.0, 20)}, {"twice": gives(1.0, 40)})
    assert 1.5 < outcome.ratio("twice", "ours") < 2.6
    assert [len(one.seconds) for one in outcome.entrants] == [15, 15] and outcome.best(own=False).name == "twice"


def test_who_is_wrong_is_named_and_not_timed(held: Callable[..., Any], modules: dict[str, ModuleType]) -> None:
    makers = {
        "right": gives({"a": np.array([1.0, 100.0]), "b": [2.0]}),
        "near": gives((np.array([1.0, 100.0 + 1e-5]), 2.0)),
        "off": gives([np.array([1.0, 101.0]), 2.0]),
        "shape": gives([np.array([[1.0, 100.0]]), 2.0]),
        "nan": gives([np.array([1.0, np.nan]), 2.0]),
        "fails": failing,
        "absent": lacking,
    }
    outcome = held({"right": makers.pop("right")}, makers, rounds=1)
    assert [one.name for one in outcome.entrants] == ["right", "near"]
    assert outcome.absent == {"absent": "absentee is not installed"}
    assert outcome.wrong == {
        "off": "differs by 0.01 from right",
        "shape": "differs by inf from right",
        "nan": "differs by inf from right",
        "fails": "RuntimeError: no such kernel",
    }


def test_unfit_entrants_give_their_reason(held: Callable[..., Any], modules: dict[str, ModuleType]) -> None:
    def unfit() -> Callable[[], Any]:
        raise modules["contest"].Unfit("this processor has no such instruction")

    outcome = held({"ours": gives(1.0)}, {"other": unfit}, rounds=1)
    assert outcome.absent == {"other": "this processor has no such instruction"} and not outcome.wrong


def test_what_is_prepared_is_not_timed(held: Callable[..., Any], modules: dict[str, ModuleType]) -> None:
    order: list[str] = []

    def make() -> Any:
        heavy, light = gives(1.0, 400)(), gives(1.0, 20)()
        return modules["contest"].Prepared(
            lambda: (order.append("prepare"), heavy()), lambda: (order.append("call"), light())[1]
        )

    outcome = held({"ours": make}, {"other": gives(1.0, 20)}, calls=20)
    assert outcome.ratio("ours", "other") < 3
    assert order[::2] == ["prepare"] * (len(order) // 2) and order[1::2] == ["call"] * (len(order) // 2)


def test_a_contest_names_only_its_entrants(modules: dict[str, ModuleType]) -> None:
    Contest = modules["contest"].Contest
    for words in ({"against": "nobody"}, {"limits": {"nobody": (1.0, "b")}}, {"limits": {"a": (1.0, "nobody")}}):
        with pytest.raises(ValueError, match=r"toy: \['nobody'\]: wanted names of entrants"):
            Contest("toy", "sums", {"a": gives(1)}, {"b": gives(1)}, **words)
    with pytest.raises(ValueError, match="somebody of ours: wanted names of entrants, each once"):
        Contest("toy", "sums", {"a": gives(1)}, {"a": gives(1)})


def outcome_of(modules: dict[str, ModuleType], seconds: dict[str, list[float]], **words: Any) -> Any:
    """An outcome of a, b (ours) and c, d (others) that took so long; who is left out was not timed."""
    module = modules["contest"]
    contest = module.Contest(
        "toy", "sums", {name: gives(1) for name in "ab"}, {name: gives(1) for name in "cd"}, **words
    )
    timed = [module.Timed(name, name in "ab", taken) for name, taken in seconds.items()]
    return module.Outcome(contest, timed, {name: "gone is not installed" for name in "abcd" if name not in seconds})


def test_limits_hold_the_fastest_of_either_side_against_each_other(modules: dict[str, ModuleType]) -> None:
    seconds = {"a": [3.0, 3.0, 3.0], "b": [2.0, 1.0, 2.0], "c": [4.0, 4.0, 4.0], "d": [5.0, 1.0, 5.0]}
    judged, written = modules["written"].judged, outcome_of(modules, seconds)
    quartiles = {"low": 0.375, "high": 0.5}
    assert judged(written) == [{"name": "b", "rival": "c", "ratio": 0.5, "limit": 1.0, **quartiles}]
    other = outcome_of(modules, seconds, against="d", limit=0.3, limits={"a": (0.5, "c"), "b": (0.9, "a")})
    found = {(one["name"], one["rival"]): (one["ratio"], one["limit"]) for one in judged(other)}
    assert found == {
        ("b", "d"): (0.4, 0.3),
        ("a", "c"): (0.75, 0.5),
        ("b", "a"): (pytest.approx(2 / 3), 0.9),
    }
    assert modules["written"].unjudged(other) == []


def test_a_limit_between_lower_quartile_and_median_is_level(modules: dict[str, ModuleType]) -> None:
    written = modules["written"]
    for seconds, word in (([1.0, 1.2, 0.8], "kept"), ([1.1, 1.2, 0.8], "level"), ([1.1, 1.2, 1.05], "missed")):
        (judged,) = written.judged(outcome_of(modules, {"a": seconds, "c": [1.0, 1.0, 1.0]}))
        assert written.verdict(judged) == word


def test_a_limit_without_its_rival_is_not_judged_and_said_so(modules: dict[str, ModuleType]) -> None:
    written = modules["written"]
    outcome = outcome_of(modules, {"a": [1.0], "b": [2.0], "d": [3.0]}, against="c", limits={"b": (0.9, "d")})
    assert [(one["name"], one["rival"]) for one in written.judged(outcome)] == [("b", "d")]
    assert written.unjudged(outcome) == ["a / c, limit 1: c not timed"]
    alone = outcome_of(modules, {"a": [1.0]})
    assert written.judged(alone) == []
    assert written.unjudged(alone) == ["a / the best of the others, limit 1: the best of the others not timed"]
    ours_gone = outcome_of(modules, {"c": [1.0]})
    assert written.unjudged(ours_gone) == ["the best of ours / c, limit 1: the best of ours not timed"]


def test_the_floor_is_the_larger_of_arithmetic_and_traffic(modules: dict[str, ModuleType]) -> None:
    floor = modules["written"].floor
    for flops, traffic, wanted in ((1e10, 1e6, 1.0), (1e6, 1e9, 1.0), (0.0, 0.0, 0.0)):
        assert floor(outcome_of(modules, {"a": [1.0]}, flops=flops, bytes=traffic), MACHINE) == wanted


def test_the_page_has_every_contest_and_every_verdict(
    modules: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, record = modules["run"], modules["written"].record
    monkeypatch.setattr(run, "REPORTS", tmp_path)
    kept = record(
        outcome_of(modules, {"a": [1e-3], "c": [2e-3]}, note="Said beside."), MACHINE, {"cpu": "x", "load": 0}
    )
    missed = record(outcome_of(modules, {"a": [3.0], "c": [2.0]}, against="c", limits={"a": (1.0, "d")}), MACHINE, {})
    run.store({"one": kept})
    run.store({"two": missed})
    page, missed_row = (tmp_path / "speed.md").read_text(), "| two | a | c | 1.500 (1.50 to 1.50) | 1 | **missed** |"
    assert "| one | a | c | 0.500 (0.50 to 0.50) | 1 | kept |" in page and missed_row in page
    assert "| two | a / d, limit 1: d not timed | | | | not judged |" in page
    assert "## one" in page and "## two" in page and "Said beside." in page and "| **a** | 1 ms | 0.500 |" in page
    assert "Not timed: b: gone is not installed; d: gone is not installed." in page and "cpu x, load 0" in page
    run.store({}, only={"two"})
    assert list(json.loads((tmp_path / "speed.json").read_text())) == ["two"]
    assert "## one" not in (tmp_path / "speed.md").read_text()


def test_the_terminal_shows_everyone_in_80_columns(
    modules: dict[str, ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = outcome_of(modules, {"a": [1e-3], "c": [2e-3]}, limits={"a": (1.0, "d")})
    modules["run"].shown(outcome, modules["written"].record(outcome, MACHINE, {}))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80 and lines[0] == "toy: sums"
    assert [line.split()[:2] for line in lines[1:3]] == [["*", "a"], ["c", "2.0000"]]
    assert "    a / c: 0.500, limit 1, kept" in lines and "    not judged: a / d, limit 1: d not timed" in lines


def run_script(*arguments: str, without: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """benchmarks/contests/run.py, in a Python in which some packages cannot be imported."""
    code = (
        f"import runpy, sys; sys.modules.update(dict.fromkeys({without!r})); sys.argv[1:] = {list(arguments)!r}; "
        f"sys.path.insert(0, {str(CONTESTS)!r}); runpy.run_path({str(CONTESTS / 'run.py')!r}, run_name='__main__')"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)


def test_every_topic_lists_its_contests_without_optional_packages() -> None:
    pytest.importorskip("torch")
    done = run_script("--list", without=OPTIONAL)
    assert done.returncode == 0, done.stderr
    ids = [line.split()[0] for line in done.stdout.splitlines()]
    assert len(set(ids)) == len(ids) and {"loss-1024x8192", "attention-decode-512"} <= set(ids)


@pytest.mark.parametrize(
    ("topic", "said"),
    [("kernel", "no topic 'kernel'; topics: kernels, "), ("training:nothing", "no contest of training has 'nothing'")],
)
def test_an_unknown_topic_is_one_line_and_exit_code_2(topic: str, said: str) -> None:
    pytest.importorskip("torch")
    done = run_script(topic)
    assert done.returncode == 2 and done.stderr.startswith(said) and len(done.stderr.splitlines()) == 1
    assert not done.stdout


def test_misses_and_wrong_entrants_are_exit_code_1(
    modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    run, Contest = modules["run"], modules["contest"].Contest
    monkeypatch.setattr(run, "measured", lambda: MACHINE)
    monkeypatch.setattr(sys, "argv", ["run.py"])
    fast, slow, wrong = gives(1.0, 5), gives(1.0, 50), gives(2.0, 50)
    for others, said, code in (
        ({"slow": slow}, "1 contests, 0 limits missed, 0 entrants wrong", 0),
        ({"slow": slow, "wrong": wrong}, "1 contests, 0 limits missed, 1 entrants wrong", 1),
        ({"very fast": gives(1.0, 1)}, "1 contests, 1 limits missed, 0 entrants wrong", 1),
    ):
        one = Contest("toy", "sums", {"fast": fast}, others, rounds=3)
        monkeypatch.setattr(run, "contests", lambda topics, one=one: [one])
        assert run.main() == code
        assert capsys.readouterr().out.splitlines()[-1] == said
