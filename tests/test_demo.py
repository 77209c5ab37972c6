"""The demo: its sequences are what they say, training learns, pictures are pictures, and the command ends well."""

from __future__ import annotations

import json
import math
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from veriformer import cli
from veriformer.demo import data, pictures, show, svg, training
from veriformer.demo.tasks import TASKS, Addition, Pointers, Reverse, same
from veriformer.reference.act import ponder_cost
from veriformer.reference.layers import encoder_layer
from veriformer.reference.universal import signals

SVG = "{http://www.w3.org/2000/svg}"


def drawn(seed: int = 0) -> data.Generator:
    return np.random.default_rng(seed)


def value(digits: Any) -> Any:
    return sum(10**i * digits[:, i] for i in range(digits.shape[1]))


def test_reversals_are_reversed_between_start_and_end() -> None:
    batch = data.reversals(drawn(), 50)
    for source, target in zip(batch["source"].tolist(), batch["target"].tolist(), strict=True):
        assert target == [data.START, *reversed(source), data.END] and len(source) == 10
    assert set(batch["source"].ravel()) == set(range(10))


def test_sums_are_right_digit_by_digit() -> None:
    tokens = data.sums(drawn(), 300)["tokens"]
    a, plus, b, equals, c = tokens[:, :3], tokens[:, 3], tokens[:, 4:7], tokens[:, 7], tokens[:, 8:]
    assert set(plus) == {data.PLUS} and set(equals) == {data.EQUALS} and c.shape[1] == 4
    assert np.array_equal(value(c), value(a) + value(b)) and tokens[:, 8:].max() == 9
    assert data.digits(np.array([407]), 4).tolist() == [[7, 0, 4, 0]]


def test_no_training_batch_holds_a_pair_that_is_judged_in_either_order() -> None:
    seen, judged = (data.sums(drawn(), 3000, unseen=unseen)["tokens"] for unseen in (False, True))
    pairs = [{frozenset(pair) for pair in zip(value(t[:, :3]), value(t[:, 4:7]), strict=True)} for t in (seen, judged)]
    assert not pairs[0] & pairs[1] and len(pairs[1]) > 2800
    for tokens, wanted in ((seen, False), (judged, True)):
        a, b = value(tokens[:, :3]), value(tokens[:, 4:7])
        assert set(data.held_out(a, b)) == set(data.held_out(b, a)) == {wanted}
    every = np.arange(1000)
    assert abs(data.held_out(every[:, None], every[None, :]).mean() - data.HELD_OUT) < 0.005


def test_the_task_of_addition_is_judged_on_held_out_pairs() -> None:
    batch = Addition().draw(drawn(), 100, unseen=True)["tokens"]
    assert data.held_out(value(batch[:, :3]), value(batch[:, 4:7])).all()


def test_following_the_pointers_leads_to_the_answers() -> None:
    batch = data.pointers(drawn(), 300)
    for tokens, answers, hops in zip(*(batch[name].tolist() for name in ("tokens", "answers", "hops")), strict=True):
        for cell in range(8):
            at, steps = cell, 0
            while tokens[at] >= data.ANSWERS:
                at, steps = tokens[at] - data.ANSWERS, steps + 1
            assert (tokens[at], steps) == (answers[cell], hops[cell])
        assert sum(token < data.ANSWERS for token in tokens) in (2, 3)
    shares = np.bincount(batch["hops"].ravel()) / batch["hops"].size
    assert len(shares) == data.HOPS + 1 and shares.min() > 0.1


def test_sequences_depend_on_the_seed_and_the_purpose_alone() -> None:
    task = TASKS[0]
    first = task.draw(training.generator(task, 3, 1), 5)["source"]
    assert np.array_equal(first, task.draw(training.generator(task, 3, 1), 5)["source"])
    others = [training.generator(task, 3, 2), training.generator(task, 4, 1), training.generator(TASKS[1], 3, 1)]
    assert not any(np.array_equal(first, task.draw(other, 5)["source"]) for other in others)


def test_rows_are_the_same_only_to_the_last_token() -> None:
    wanted = torch.tensor([[1, 2, 3], [1, 2, 3]])
    assert same(torch.tensor([[1, 2, 3], [1, 2, 0]]), wanted).tolist() == [True, False]
    assert same(wanted[:, :2], wanted).tolist() == [False, False]


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_an_untrained_model_solves_hardly_anything(task: Any) -> None:
    run = training.begin(task, 0)
    with torch.no_grad():
        solved = task.solved(run.flat.params(), training.tensors(task.draw(drawn(), 50, unseen=True)))
    assert solved.shape == (50,) and solved.sum() <= 2


def test_a_vector_holds_a_shared_array_once() -> None:
    params = Reverse().start(drawn())
    flat = training.Flat(params)
    twice = flat.params()
    assert twice["source_embedding"] is twice["target_embedding"] and twice["embedding_scale"] == 32**0.5
    assert len(flat.vector) == sum(leaf.size for leaf in training.leaves(params)) - params["source_embedding"].size
    assert np.array_equal(twice["decoder"]["norm"]["weight"].numpy(), params["decoder"]["norm"]["weight"])
    flat.vector = flat.vector + 1
    assert np.array_equal(flat.params()["head"]["w"].numpy(), params["head"]["w"] + 1)


def small(task: Any, **changes: Any) -> Any:
    """The task with another plan."""
    changed = type(task)()
    changed.plan = replace(task.plan, **changes)
    return changed


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_a_few_steps_lower_the_loss_and_the_same_seed_gives_the_same(task: Any) -> None:
    losses = []
    for steps in (16, 2):
        run = training.begin(small(task, rows=8, warmup=4), 1)
        assert len(list(training.train(run, 1, steps))) == steps == len(run.losses)
        losses.append(run.losses)
    assert losses[0][:2] == losses[1]
    assert np.mean(losses[0][-4:]) < 0.9 * np.mean(losses[0][:3])


def test_the_model_that_halts_makes_all_steps_until_it_is_released() -> None:
    task, run = Pointers(), training.begin(Pointers(), 0)
    batch, params = training.tensors(task.draw(drawn(), 20)), run.flat.params()
    logits, _, (steps, remainder) = task.logits(params, batch, halts=False)  # type: ignore[misc]
    x = params["embedding"][batch["tokens"]]
    for n in range(1, task.max_steps + 1):
        x = encoder_layer(x + signals(x, 0, n), params["layer"], heads=task.heads)
    fixed = (x @ params["head"]["w"] + params["head"]["b"]).reshape(-1, data.ANSWERS)
    assert (steps == task.max_steps).all() and (remainder > 0.9999).all()
    assert torch.allclose(logits, fixed, atol=1e-3) and not torch.equal(logits, fixed)
    assert task.logits(params, batch)[2][0].max() < task.max_steps  # type: ignore[index]


def test_before_the_release_nothing_teaches_the_halting_unit() -> None:
    run = training.begin(small(TASKS[2], rows=8), 0)
    before = {name: part.clone() for name, part in run.flat.params()["halt"].items()}
    list(training.train(run, 0, steps=4))
    assert run.learned_at is None and all(torch.equal(run.flat.params()["halt"][name], before[name]) for name in before)
    run.learned_at = run.step
    list(training.train(run, 0, steps=8))
    assert not torch.equal(run.flat.params()["halt"]["w"], before["w"])


def test_pondering_costs_what_the_reference_says_and_rises(monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[float] = []

    def watched(*rest: Any, tau: float, **more: Any) -> Any:
        rates.append(tau)
        return ponder_cost(*rest, tau=tau, **more)

    monkeypatch.setattr(training, "ponder_cost", watched)
    list(training.train(training.begin(small(TASKS[2], rows=2, decay=12, patience=3), 0), 0, steps=9))
    assert rates == pytest.approx([0.04 * share for share in (0.25, 0.5, 0.75, 1, 1, 1)])


def test_the_rate_rises_stays_and_falls() -> None:
    plan = replace(TASKS[0].plan, rate=1.0, warmup=10, decay=100)
    rates = [training.rate(plan, step, at) for step, at in ((5, None), (500, None), (500, 500), (550, 500), (900, 500))]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 0.525, 0.05])


def test_training_ends_when_enough_is_solved_after_the_rate_has_fallen(monkeypatch: pytest.MonkeyPatch) -> None:
    task = small(TASKS[0], rows=2, learned=99.0, decay=3)
    shares = iter([0.5, 0.998])
    monkeypatch.setattr(training, "CHECKED", 1)
    monkeypatch.setattr(training, "EVERY", 5)
    monkeypatch.setattr(task, "solved", lambda params, batch: torch.tensor(next(shares)), raising=False)
    run = training.begin(task, 0)
    list(training.train(run, 0))
    assert run.learned_at == 1 and run.checks == [(4, 0.5), (9, pytest.approx(0.998))] and run.done


def test_threads_are_what_they_were_afterwards() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(ZeroDivisionError), training.one_thread():
            assert torch.get_num_threads() == 1
            raise ZeroDivisionError
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_the_example_has_chains_of_every_length() -> None:
    rows = torch.tensor([[0] * 8, [0, 0, 0, 1, 1, 2, 2, 3], [0, 0, 1, 1, 2, 3, 3, 3]])
    assert training.instructive(rows) == 2 and training.instructive(rows[:2]) == 0
    steps = torch.tensor([[1] * 8, [1, 1, 1, 2, 2, 2, 2, 4], [1, 1, 2, 2, 2, 3, 3, 3]])
    assert training.means(steps, rows) == [1.0, 2.0, 2.0, 3.25]
    assert training.shares(steps, rows, 4)[3] == [0, 0, 0.75, 0.25]


THOUGHT = pictures.Thought(
    [(step, [4.0, 4.0, math.nan, 4.0]) for step in range(1, 40)], 20, 4, [1.2, 2.0, 2.1, math.nan],
    [[0.8, 0.2, 0, 0], [0, 1.0, 0, 0], [0, 0.9, 0.1, 0], [math.nan] * 4],
    {"tokens": [0, 5, 6, 1, 8, 9, 10, 4], "hops": [0, 1, 2, 0, 1, 2, 3, 0], "answers": [0, 0, 0, 1, 1, 1, 1, 4],
     "steps": [1, 2, 2, 1, 2, 3, 4, 1], "letters": [0, 0, 0, 1, 1, 1, 2, 4]},
)  # fmt: skip


def words(picture: str) -> list[str]:
    """All words of a picture that parses."""
    root = ElementTree.fromstring(picture)
    assert root.tag == f"{SVG}svg" and "nan" not in picture and "inf" not in picture
    return [element.text or "" for element in root.iter(f"{SVG}text")]


def test_the_picture_of_losses_has_a_curve_and_a_name_for_each_task_and_both_axes() -> None:
    curves = [pictures.Curve("a < b & c", [3 / n for n in range(1, 500)], 100), pictures.Curve("two", [1.0, math.nan])]
    picture = pictures.loss_picture(curves, 7)
    found = words(picture)
    assert {"a < b & c", "two", "step", "cross entropy (log scale)", "0.001", "0.1", "400"} <= set(found)
    assert "(seed 7)" in found[0] and picture.count("<polyline") == 1 + 2 * len(curves)
    assert words(pictures.loss_picture([], 0)) and words(pictures.loss_picture([pictures.Curve("one", [2.0])], 0))


def test_the_pictures_of_halting_say_who_halts_when() -> None:
    found = words(pictures.halting_picture(THOUGHT))
    assert {"0 hops", "1 hop", "3 hops", "80 %", "20 %", "90 %", "steps of thought", "hops to the letter"} <= set(found)
    assert words(pictures.halting_picture(pictures.Thought([], None, 4)))
    picture = pictures.example_picture(THOUGHT)
    assert {"→0", "A", "steps of thought", "C ✗"} <= set(words(picture))
    boxes = [e for e in ElementTree.fromstring(picture).iter(f"{SVG}rect") if e.get("rx")]
    dashed = [box for box in boxes if box.get("stroke-dasharray")]
    assert len(boxes) == 32 and len(boxes) - len(dashed) == sum(THOUGHT.example["steps"])


def test_axes_put_numbers_where_they_belong() -> None:
    axes = svg.Axes(svg.Picture(100, 100, ""), 10, 20, 80, 60, (0, 4), (0.01, 100), log=True)
    assert axes.place(2, 1) == (50, 50) and axes.place(4, 100) == (90, 20) and axes.place(9, 0) == (90, 80)
    assert svg.steps_between(0, 899) == [0, 200, 400, 600, 800] and svg.steps_between(0, 1)[-1] == 1
    assert svg.smooth([5.0, 5.0, math.nan, 5.0]) == pytest.approx([5.0] * 4)


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Tasks of a few steps, in a working directory of their own."""
    changes = {"rows": 4, "warmup": 2, "limit": 3, "patience": 2}
    monkeypatch.setattr(show, "TASKS", tuple(small(task, **changes) for task in TASKS))
    monkeypatch.setattr(show, "SAID", 1)
    monkeypatch.setattr(show, "JUDGED", 30)
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    yield tmp_path
    assert torch.get_num_threads() == threads


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as left:
        cli.main(("demo", *arguments))
    return int(left.value.code or 0)


def test_a_model_that_learned_too_little_is_exit_code_1_and_leaves_pictures_and_numbers(
    quick: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--seed", "3") == 1
    out = capsys.readouterr().out
    assert "below 99 %: reverse, addition, pointers (exit code 1)" in out and "hops to the letter" in out
    assert "reverse    step    1  loss " in out and "step    2  " in out and "learned: the rate falls" in out
    assert max(map(len, out.splitlines())) <= 80 and "\x1b" not in out
    folder = quick / ".veriformer" / "demo"
    record = json.loads((folder / "demo.json").read_text())
    assert record["schema"] == "veriformer/demo/1" and record["complete"] is True and record["seed"] == 3
    assert [task["task"] for task in record["tasks"]] == [task.name for task in TASKS] == list(cli.DEMO_TASKS)
    assert all(task["exact_match"] < 0.5 and len(task["losses"]) == 3 for task in record["tasks"])
    halting = record["tasks"][2]["halting"]
    assert len(halting["mean_step_by_hops"]) == 4 and sum(halting["shares_by_hops"][0]) == pytest.approx(1, abs=1e-5)
    for name in record["files"]:
        assert words((folder / name).read_text())
    assert sorted(record["files"]) == ["example.svg", "halting.svg", "loss.svg"]
    assert (quick / ".veriformer" / ".gitignore").read_text() == "*\n"


def test_models_that_solve_their_tasks_are_exit_code_0(
    quick: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for task in show.TASKS:
        solved = {"solved": lambda params, batch: torch.ones(1)}
        monkeypatch.setattr(task, "solved", solved["solved"], raising=False)
    assert run("--task", "addition", "--output", "there") == 0
    out = capsys.readouterr().out
    assert "every task is solved (exit code 0)" in out and "100.0 %" in out and "reverse" not in out
    assert sorted(path.name for path in Path("there").iterdir()) == ["demo.json", "loss.svg"]


def test_ctrl_c_ends_with_what_there_is(
    quick: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*rest: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(show.TASKS[2], "draw", interrupt, raising=False)
    assert run() == 130
    out, err = capsys.readouterr()
    assert err == "veriformer: interrupted; what there is is shown and kept\n"
    assert "reverse 10 letters" in out and "not judged" in out
    record = json.loads(Path(".veriformer/demo/demo.json").read_text())
    assert record["complete"] is False and [task["exact_match"] is None for task in record["tasks"]] == [0, 0, 1]


def test_a_folder_that_cannot_be_written_is_replaced_and_said_once(
    quick: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(quick))
    (quick / "taken").write_text("a file")
    assert run("--task", "reverse", "--output", "taken") == 1
    out = " ".join(capsys.readouterr().out.split())
    assert out.count("taken cannot be written (File exists); pictures and numbers are in ") == 1
    assert (Path(out.rpartition("files: ")[2].split("/ (")[0]) / "loss.svg").is_file()


@pytest.mark.parametrize("words", [["--task", "sorting"], ["--seed", "x"], ["--seed", "-1"], ["--sed", "1"], ["now"]])
def test_a_wrong_option_is_one_line_and_exit_code_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*words) == 2
    err = capsys.readouterr().err
    assert err.startswith("veriformer: ") and err.count("\n") == 1


def test_without_torch_a_line_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert run() == 2
    err = capsys.readouterr().err
    assert err == "veriformer: demo needs torch, which is not installed: pip install veriformer[torch]\n"
