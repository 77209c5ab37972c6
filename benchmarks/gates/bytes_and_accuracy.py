"""The gate on bytes and accuracy: `python benchmarks/gates/bytes_and_accuracy.py BASE [HEAD]`.

asv measures both commits, and neither the bytes that a call allocates nor its worst ratio of error to budget nor the
bits that it loses may rise (`rises` says by how little). What base had and head lacks is a failure, and so is nothing
measured, or more cells that fail in both than are compared. asv's exit code is not asked: it is the same for a failed
build and for a slower commit. The environment is that of asv.conf.json; results go to a folder of their own, so nothing
that is committed changes. Exit codes: 0 nothing rose; 1 something rose or too little was measured; 2 usage.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from veriformer.benchmarks.gates.commits import Commits, Parser, asked_for, ended, pattern
from veriformer.benchmarks.gates.rises import METRICS, Cell, Comparison, Rise, compare
from veriformer.calling import UsageError
from veriformer.history.checkout import Checkout
from veriformer.history.recording import make_machine_known, need_asv
from veriformer.history.results import MACHINE, read_records, values_of
from veriformer.report.terminal import console_for

CONFIGURATION = "asv.conf.json"
FOLDERS = ("repo", "benchmark_dir", "env_dir", "html_dir")
"""Entries of the configuration that are relative to it."""


def gate(words: Sequence[str]) -> int:
    """Measure two commits, compare, say what rose; the exit code."""
    parser = Parser(prog="bytes_and_accuracy.py", description=(__doc__ or "").partition("\n")[0])
    given = parser.parse_args(words)
    pattern(given.bench)
    commits = asked_for(Path.cwd(), given.base, given.head)
    need_asv()
    with tempfile.TemporaryDirectory() as folder:
        results = measure(commits, given.bench, Path(folder))
        found = compare(cells_of(results, commits.base), cells_of(results, commits.head))
    return shown(found)


def measure(commits: Commits, bench: str, folder: Path) -> Path:
    """Let asv measure both commits; the folder of their results.

    Raises UsageError where asv has no configuration, or its file of machines cannot be used.
    """
    results, configuration = folder / "results", folder / CONFIGURATION
    configuration.write_text(json.dumps(_configuration(commits.root, results)), encoding="utf-8")
    make_machine_known(Checkout(commits.root, results, folder / "html"))
    hashes = folder / "hashes"
    hashes.write_text("".join(f"{commit}\n" for commit in dict.fromkeys((commits.base, commits.head))))
    call = [sys.executable, "-m", "asv", "run", "--config", str(configuration), "--machine", MACHINE, "--no-pull"]
    call += ["--show-stderr", "--bench", selection(bench), f"HASHFILE:{hashes}"]
    threads = {"OMP_NUM_THREADS": "1", **os.environ}
    subprocess.run(call, stdout=sys.stderr, env=threads)  # its exit code says nothing
    return results / MACHINE


def _configuration(root: Path, results: Path) -> dict[str, Any]:
    """The checkout's configuration for another folder of results."""
    path = root / CONFIGURATION
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    moved = {name: str((root / found[name]).resolve()) for name in FOLDERS if name in found}
    return {**found, **moved, "results_dir": str(results)}


def selection(bench: str) -> str:
    """A regular expression for asv: the costs that are compared, of them those in whose name bench is found."""
    return rf"^(?=.*(?:{bench}))(?=.*\.(?:{'|'.join(METRICS)})\b)"


def cells_of(results: Path, commit: str) -> dict[Cell, float | None]:
    """What asv measured of a commit; nothing where there is no result file.

    Raises UsageError where a file is not asv's.
    """
    records = [record for record in read_records(results) if record.commit == commit]
    return {
        (name, words): value
        for record in records
        for name, table in record.tables.items()
        for words, value in values_of(table)
    }


def shown(found: Comparison) -> int:
    """Print what rose and how much was compared; the exit code."""
    console = console_for()
    if not found.compared:
        broken = f"; {len(found.broken)} cells failed in both"
        console.print(f"nothing was measured in both commits: see what asv said above, or a wider --bench{broken}")
        return 1
    if found.rises:
        console.print(_table(found.rises))
    _mention(console, "new in head", found.new)
    _mention(console, "failed in both", found.broken)
    lost = sum(rise.lost for rise in found.rises)
    counts = f"{len(found.rises) - lost} rose, {lost} lacking in head, {len(found.broken)} failed in both"
    console.print(f"{found.compared} cells compared: {counts}")
    if found.mostly_broken:
        console.print("more cells failed in both than were compared: see what asv said above")
    return int(found.failed)


def _table(rises: Sequence[Rise]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in ("benchmark", "metric", "of"):
        table.add_column(heading, overflow="fold", no_wrap=heading != "of")
    for heading in ("base", "head"):
        table.add_column(heading, justify="right", no_wrap=True)
    for rise in rises:
        subject, _, metric = rise.cell[0].partition(".")[2].rpartition(".")
        name, of = metric.removeprefix("track_").replace("_", " "), " ".join(rise.cell[1])
        table.add_row(subject, name, of, _number(rise.base), _number(rise.head))
    return table


def _number(value: float | None) -> str:
    if value is None:
        return "failed"
    if math.isnan(value):
        return "n/a"
    return str(int(value)) if float(value).is_integer() else f"{value:.6g}"


def _mention(console: Console, what: str, cells: Sequence[Cell]) -> None:
    if cells:
        first = f"{cells[0][0].partition('.')[2]} {', '.join(cells[0][1])}"
        rest = f" and {len(cells) - 1} more" if cells[1:] else ""
        console.print(f"{what}: {first}{rest}", markup=False)


if __name__ == "__main__":
    raise SystemExit(ended("bytes_and_accuracy.py", gate, sys.argv[1:]))
