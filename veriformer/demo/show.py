"""Runs the demo's tasks while showing how they learn, and says in the end what they can do."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from veriformer.demo.data import shown
from veriformer.demo.record import save
from veriformer.demo.tasks import TASKS
from veriformer.demo.training import GOOD, JUDGED, Run, begin, judge, one_thread, train
from veriformer.report.record import environment, output_folder
from veriformer.report.terminal import console_for

SAID = 100
"""Steps between two lines where there is no terminal for a bar."""


def show_demo(seed: int, names: Sequence[str], folder: str) -> int:
    """Train, judge, save and show; 0 if every task is solved, 1 if not, 130 if it was interrupted."""
    console, runs = console_for(), []
    place, note = output_folder(folder, "pictures and numbers")
    if note:
        console.print(note)
    header(console, seed)
    interrupted = False
    try:
        with one_thread():
            for task in (task for task in TASKS if task.name in names):
                runs.append(begin(task, seed))
                follow(console, runs[-1], seed)
                judge(runs[-1], seed, JUDGED)
                save(place, runs, seed, complete=False)
    except KeyboardInterrupt:
        interrupted = True
        print("veriformer: interrupted; what there is is shown and kept", file=sys.stderr)
    files = save(place, runs, seed, complete=not interrupted)
    report(console, runs)
    console.print(f"files: {place}/  ({', '.join(files)})", soft_wrap=True)
    return verdict(console, runs, interrupted)


def header(console: Console, seed: int) -> None:
    """What is run, and on what."""
    about = environment()
    console.print(f"[bold]veriformer {about['veriformer']} demo[/]  seed {seed}")
    console.print(f"Python {about['python']}  torch {torch.__version__}  float64  one thread")
    console.print("Models, loss and optimiser are the reference's own; torch differentiates.\n")


def follow(console: Console, run: Run, seed: int) -> None:
    """Train one task, beside a bar, or with a line now and then where the output is no terminal."""
    columns = (
        TextColumn("{task.description:9}"), BarColumn(24), TextColumn("step {task.completed:4}"),
        TextColumn("loss {task.fields[loss]}"), TimeElapsedColumn(),
    )  # fmt: skip
    plain = not console.is_terminal
    with Progress(*columns, console=console, disable=plain) as bar:
        line = bar.add_task(run.task.name, total=run.task.plan.usual, loss="")
        for _ in train(run, seed):
            bar.update(line, completed=run.step, loss=f"{run.mean:.4f}")
            if plain and run.step % SAID == 0:
                console.print(f"{run.task.name:9}  step {run.step:4}  loss {run.mean:.4f}")
            if plain and run.step == run.learned_at:
                console.print(f"{run.task.name:9}  step {run.step:4}  loss {run.mean:.4f}  learned: the rate falls")
        bar.update(line, total=run.step)


def report(console: Console, runs: Sequence[Run]) -> None:
    """The table of tasks, then how long the model that halts thought about what."""
    grid = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    grid.add_column("task")
    grid.add_column("model")
    for name in ("steps", "CPU s", "exact match"):
        grid.add_column(name, justify="right")
    for run in runs:
        exact = "not judged" if run.exact is None else f"{100 * run.exact:.1f} %"
        grid.add_row(run.task.title, run.task.model, str(run.step), f"{run.seconds:.1f}", exact)
    console.print()
    console.print(grid)
    console.print(f"exact match: share of {JUDGED:,} unseen sequences, decoded greedily, all tokens right\n")
    for run in runs:
        if run.by_hops:
            thoughts(console, run)


def thoughts(console: Console, run: Run) -> None:
    """Mean halting step for each chain length, and the steps of one example cell by cell."""
    lengths = map(str, range(len(run.by_hops)))
    rows(console, {"hops to the letter": lengths, "mean halting step": (f"{n:.2f}" for n in run.by_hops)})
    console.print(f"the longest chains are thought about {run.by_hops[-1] - run.by_hops[0]:.2f} steps longer\n")
    about = run.example
    rows(console, {
        "one row, cell": map(str, range(len(about["tokens"]))), "holds": map(shown, about["tokens"]),
        "hops to the letter": map(str, about["hops"]), "steps of thought": map(str, about["steps"]),
        "letter given": map(shown, about["letters"]), "letter wanted": map(shown, about["answers"]),
    })  # fmt: skip
    console.print()


def rows(console: Console, entries: dict[str, Iterable[str]]) -> None:
    """Names on the left, what belongs to them in columns to the right."""
    grid = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False)
    lines = {name: list(values) for name, values in entries.items()}
    grid.add_column()
    for _ in max(lines.values(), key=len):
        grid.add_column(justify="right")
    for name, values in lines.items():
        grid.add_row(name, *values)
    console.print(grid)


def verdict(console: Console, runs: Sequence[Run], interrupted: bool) -> int:
    """The last line, and the exit code."""
    poor = [run.task.name for run in runs if run.exact is not None and run.exact < GOOD]
    if interrupted:
        return 130
    if poor:
        console.print(f"below {100 * GOOD:.0f} %: {', '.join(poor)} (exit code 1)")
        return 1
    console.print("every task is solved (exit code 0)")
    return 0
