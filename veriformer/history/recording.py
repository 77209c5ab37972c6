"""Measuring commits: `asv run` of the comparable metrics, and a count of what it really measured.

asv's exit code says nothing: it is the same for a failed build, for nothing to measure and for a slower commit.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from rich.table import Table

from veriformer.calling import UsageError
from veriformer.history.checkout import Checkout, hashes_of, refuse_changes
from veriformer.history.results import COMPARABLE, MACHINE, read_records, values_of
from veriformer.report.terminal import console_for

FACTS = {name: MACHINE for name in ("machine", "os", "arch", "cpu", "num_cpu", "ram")}
"""What asv is told of the machine `any`: no facts of a host."""
QUICK = (
    *("SoftmaxForward", "LayerNormForward", "AttentionPrefill", "AttentionDecode", "EncoderLayerForward"),
    *("Softmax", "LayerNorm", "Attention", "EncoderLayer"),
)
"""Workloads (costs) and operations (accuracy) of a quick recording."""
ALL_CELLS, QUICK_CELLS = rf"\.{COMPARABLE}", rf"\.({'|'.join(QUICK)})\.{COMPARABLE}"
"""Which benchmarks asv runs."""
FEW = 5


def need_asv() -> None:
    """Raise UsageError where asv is not installed."""
    if find_spec("asv") is None:
        raise UsageError("asv is not installed: pip install veriformer[bench]")


def run_asv(checkout: Checkout, *words: str) -> int:
    """Run asv in the root of the checkout, its output shown; its exit code, which says little."""
    sys.stdout.flush()
    threads = {"OMP_NUM_THREADS": "1", **os.environ}
    return subprocess.run([sys.executable, "-m", "asv", *words], cwd=checkout.root, env=threads).returncode


def record(checkout: Checkout, wanted: str, quick: bool) -> int:
    """Measure the commits of a range under the machine `any`; 0, or 1 where asv measured nothing.

    Raises UsageError where asv is missing or its machine file is broken, tracked files are changed, or the range
    means nothing.
    """
    need_asv()
    refuse_changes(checkout)
    asked = hashes_of(checkout, wanted, Path.cwd())
    if wanted.startswith("HASHFILE:") and asked:
        wanted = f"HASHFILE:{Path.cwd() / wanted.removeprefix('HASHFILE:')}"
    make_machine_known(checkout)
    words = ["run", "--machine", MACHINE, "--bench", QUICK_CELLS if quick else ALL_CELLS]
    began = time.time()
    run_asv(checkout, *words, "--", wanted)
    return show_tally(tally(checkout.results / MACHINE, 1000 * began), asked, wanted)


def make_machine_known(checkout: Checkout) -> None:
    """Write asv's entry of the machine `any`, without which asv asks questions.

    Raises UsageError where asv's machine file is broken or of another format.
    """
    path = Path.home() / ".asv-machine.json"
    if _machines(path).get(MACHINE) == FACTS:
        return
    options = [word for name, value in FACTS.items() for word in (f"--{name}", value)]
    subprocess.run([sys.executable, "-m", "asv", "machine", *options], cwd=checkout.root, capture_output=True)
    if _machines(path).get(MACHINE) != FACTS:
        raise UsageError(f"asv did not write the machine {MACHINE!r} to {path}; see what `asv machine` says")


def _machines(path: Path) -> dict[str, object]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found, dict) and found.get("version") == 1:
            return found
        problem = "wanted an object with version 1"
    except (OSError, ValueError) as error:
        problem = str(error)
    raise UsageError(f"asv's machine file {path} cannot be used ({problem}): mend it, or move it away for a new one")


@dataclass
class Tally:
    """Cells of one commit: measured, with nothing to measure, and failed (by name)."""

    measured: int = 0
    absent: int = 0
    failed: tuple[str, ...] = ()


def tally(folder: Path, since: float) -> dict[str, Tally]:
    """What each commit got since a moment (milliseconds since 1970).

    Raises UsageError where a result file is not asv's.
    """
    found: dict[str, Tally] = {}
    for record in read_records(folder):
        fresh = {name: table for name, table in record.tables.items() if (table.get("started_at") or 0) >= since}
        cells = [
            (" ".join((name, *words)), value) for name, table in fresh.items() for words, value in values_of(table)
        ]
        if cells:
            count = found.setdefault(record.commit, Tally())
            count.measured += sum(value is not None and value == value for _, value in cells)
            count.absent += sum(value is not None and value != value for _, value in cells)
            count.failed += tuple(name for name, value in cells if value is None)
    return found


def show_tally(found: dict[str, Tally], asked: Sequence[str] | None, wanted: str) -> int:
    """Say what was measured, commit by commit; 1 where it is nothing."""
    total = sum(count.measured for count in found.values())
    failed = [name for count in found.values() for name in count.failed]
    if not total:
        more = f"see above, or for more asv run '{wanted}' --machine {MACHINE} --verbose --show-stderr"
        print(f"veriformer: asv measured nothing, {len(failed)} cells failed: {more}", file=sys.stderr)
        return 1
    console = console_for()
    console.print(_grid({**{commit: Tally() for commit in asked or ()}, **found}))
    for name in failed[:FEW]:
        console.print(f"failed: {name}", soft_wrap=True)
    if len(failed) > FEW:
        console.print(f"failed: {len(failed) - FEW} more")
    console.print(f"{total} cells measured\n")
    return 0


def _grid(counts: dict[str, Tally]) -> Table:
    grid = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    grid.add_column("commit")
    for head in ("cells measured", "nothing to measure", "failed"):
        grid.add_column(head, justify="right")
    for commit, count in counts.items():
        grid.add_row(commit[:8], str(count.measured), str(count.absent), str(len(count.failed)))
    return grid
