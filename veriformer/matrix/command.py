"""`veriformer matrix` judges every installed library; `veriformer report` puts results of several runs together."""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from veriformer.calling import UsageError, nearest
from veriformer.catalogue import all_laws
from veriformer.checking import Settings
from veriformer.law import find_laws
from veriformer.libraries import Library
from veriformer.matrix.cells import cells_of, label
from veriformer.matrix.merged import matrix_of, read, together
from veriformer.matrix.page import ORDER, WORDS, markdown
from veriformer.matrix.process import Judged, Way, judge
from veriformer.matrix.units import Unit, chosen, halves, units_of
from veriformer.report.record import output_folder, write
from veriformer.report.terminal import console_for

COLOURS = {"holds": "green", "known": "yellow", "open": "yellow", "nothing": "yellow", "fails": "bold red"}


def show_matrix(given: Namespace, way: Way) -> int:
    """Judge the chosen libraries, write matrix.json and matrix.md: see `exit_code`.

    given: libraries, jobs, output and fresh as the command line has them. Raises UsageError for an unknown library,
    variant, law or dtype, and where nothing chosen is installed.
    """
    Settings(way.effort, way.seed, way.max_time, way.dtypes, way.laws)
    if given.jobs < 1:
        raise UsageError(f"--jobs {given.jobs}: wanted a whole number from 1")
    picked = chosen(given.libraries)
    libraries = list(dict.fromkeys(library for library, _ in picked))
    place, note = output_folder(given.output, "matrix.json and matrix.md")
    kept, _ = output_folder(given.kept, "results that are kept")
    console = console_for()
    if note:
        console.print(note)
    start = time.monotonic()
    for library in libraries:
        if library.missing:
            apart = f"; in an environment of its own, for {library.apart}" if library.apart else ""
            console.print(f"{library.name}: not installed ({library.install}{apart})", markup=False, soft_wrap=True)
    units, trouble = found_units(picked, way, given.jobs)
    for line in (line for lines in trouble.values() for line in lines):
        console.print(line, markup=False, soft_wrap=True)
    if not units and not any(trouble.values()):
        raise UsageError("nothing to judge: none of the chosen libraries is installed")
    judged = list(shown(console, units, way, kept, given))
    judged.sort(key=lambda one: units.index(one.unit))
    matrix = matrix_of(libraries, judged, trouble, way, time.monotonic() - start)
    finish(console, matrix, place)
    return exit_code(matrix)


def found_units(picked: Sequence[tuple[Library, str]], way: Way, jobs: int) -> tuple[list[Unit], dict[str, list[str]]]:
    """The variants to judge, and lines about adapters that could not be imported, by library.

    Raises UsageError for a variant that a library does not have.
    """
    present = [library for library in dict.fromkeys(library for library, _ in picked) if not library.missing]
    with ThreadPoolExecutor(jobs) as pool:
        described = dict(zip(present, pool.map(units_of, present), strict=True))
    units: dict[Unit, None] = {}
    for library, variant in picked:
        mine, _ = described.get(library, ([], []))
        wanted = [one for one in mine if variant in ("", one.name.partition(":")[2])]
        if variant and library in described and not wanted:
            names = [one.name for one in mine]
            raise UsageError(f"{library.name} has no variant {variant!r}{nearest(f'{library.name}:{variant}', names)}")
        if variant:  # what was asked for by name is searched, whatever else declares the same
            wanted = [replace(one, most="deep") for one in wanted]
        units |= dict.fromkeys(half for one in wanted for half in ([one] if way.laws else halves(one)))
    if way.laws:
        named = {law.operation for law in find_laws(all_laws(), way.laws)}
        concerned = [(unit, tuple(name for name in unit.operations if name in named)) for unit in units]
        units = dict.fromkeys(replace(unit, operations=operations) for unit, operations in concerned if operations)
    return list(units), {library.name: trouble for library, (_, trouble) in described.items()}


def shown(console: Console, units: Sequence[Unit], way: Way, kept: Path, given: Namespace) -> Iterator[Judged]:
    """Judge the variants, so many at a time, with a line for each that is done."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    pool, stop = ThreadPoolExecutor(given.jobs), threading.Event()
    # or what runs would live on
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with Progress(*columns, console=console, transient=True, disable=not sys.stdout.isatty()) as bar:
            task = bar.add_task("variants", total=len(units))
            ordered = sorted(units, key=way.size_of, reverse=True)  # a large one at the end would run alone
            for future in as_completed([pool.submit(judge, unit, way, kept, stop, given.fresh) for unit in ordered]):
                one = future.result()
                bar.update(task, advance=1, description=one.unit.name)
                console.print(line_of(one), soft_wrap=True)
                yield one
    finally:
        stop.set()  # after an interrupt no process may go on that nobody waits for
        pool.shutdown(cancel_futures=True)
        signal.signal(signal.SIGTERM, before)


def line_of(one: Judged) -> str:
    """`torch:math  attention ok  12 s`, with what else there is to say of each operation."""
    if one.report is None:
        return f"[bold red]{one.unit.name}[/]  {escape(one.trouble)}"
    words = []
    for cell in cells_of(one.report, one.unit.name, one.unit.operations):
        colour = COLOURS[cell["state"]]
        words.append(f"{cell['operation']} [{colour}]{WORDS[cell['state']]}[/]")
    return f"{one.unit.name}  {', '.join(words)}  {'kept' if one.kept else format(one.report['seconds'], '.0f') + ' s'}"


def finish(console: Console, matrix: Mapping[str, Any], place: Path) -> None:
    """Write both files, say what fails and how many cells are in which state."""
    write(place / "matrix.json", json.dumps(matrix, indent=1, allow_nan=False) + "\n")
    write(place / "matrix.md", markdown(matrix))
    console.print()
    for cell in matrix["cells"]:
        if cell["state"] in ("fails", "nothing"):
            console.print(f"[bold red]{WORDS[cell['state']]}[/] {label(cell)} {cell['operation']}", soft_wrap=True)
        for fault in cell["faults"] if cell["state"] == "fails" else ():
            if fault["verdict"] not in ("xfail", "incomplete", "not_run"):
                said = f"  {fault['law']} {fault['dtype']}: {fault['message'] or fault['reason']}"
                console.print(said, markup=False, soft_wrap=True)
    grid = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    grid.add_column("cells")
    for word in WORDS.values():
        grid.add_column(word, justify="right")
    for library in matrix["libraries"]:
        states = [cell["state"] for cell in matrix["cells"] if cell["library"] == library["name"]]
        if states:
            grid.add_row(library["name"], *(str(states.count(state) or "") for state in ORDER))
    console.print(grid)
    for line in (line for library in matrix["libraries"] for line in library["trouble"]):
        console.print(line, markup=False, soft_wrap=True)
    for name in ("matrix.json", "matrix.md"):
        console.print(f"written: {place / name}", markup=False, soft_wrap=True)


def exit_code(matrix: Mapping[str, Any]) -> int:
    """1 where a law is broken or a library could not be judged; 4 where something stayed open; else 0."""
    states = {cell["state"] for cell in matrix["cells"]}
    if "fails" in states or any(library["trouble"] for library in matrix["libraries"]):
        return 1
    return 4 if states & {"open", "nothing"} or not states else 0


def show_report(given: Namespace) -> int:
    """Put files of several runs together into matrix.json and matrix.md: see `exit_code`.

    given: files and output as the command line has them. Raises UsageError for a file that is no result of ours.
    """
    matrix = together([read(Path(file)) for file in given.files])
    place, note = output_folder(given.output, "matrix.json and matrix.md")
    console = console_for()
    if note:
        console.print(note)
    finish(console, matrix, place)
    return exit_code(matrix)
