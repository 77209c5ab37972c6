"""`veriformer bench`: a table for each workload, a picture, and every number as JSON."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import platform
import shutil
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from veriformer.benchmarks.implementations import one_thread
from veriformer.benchmarks.judging import KEPT
from veriformer.benchmarks.limits import NAMED, Limits, measured
from veriformer.benchmarks.workloads import Workload
from veriformer.boundary import quiet
from veriformer.calling import UsageError
from veriformer.report.record import environment, number, output_folder
from veriformer.report.terminal import console_for
from veriformer.targets import Options
from veriformer.timing.comparing import Comparison, Entry, compare
from veriformer.timing.entrants import Target, doable, frameworks, opened, workloads_of
from veriformer.timing.roofline import roofline
from veriformer.timing.said import duration, percent, rate, share, size, three
from veriformer.timing.trial import tried, workers_of

SCHEMA = "veriformer/bench/1"
LIBRARIES = ("numpy", "torch")


def show_bench(targets: Sequence[str], options: Options, names: Sequence[str], folder: str, flags: str = "") -> int:
    """Compare, show and save: 0, or 1 where a target is wrong at a workload.

    names: of workloads, or none for all that apply. folder: where bench.json and roofline.svg go. flags: what the user
    said about the targets, with a blank before, to be repeated where a command is proposed.
    Raises UsageError for what `workers_of`, `workloads_of` and `doable` refuse, and without threadpoolctl.
    """
    if not importlib.util.find_spec("threadpoolctl"):
        raise UsageError("bench needs threadpoolctl, which is not installed: pip install veriformer[bench]")
    console = console_for()
    mine, workloads = entrants_of(console, targets, options, names)
    place, note = output_folder(folder, "picture and numbers")
    if note:
        console.print(note, soft_wrap=True, markup=False)
    one_thread()
    limits = measured(sorted({one.dtype for one in workloads}))
    header(console, workloads, limits)
    try:
        found = [follow(console, one, mine, limits, flags) for one in workloads]
    finally:
        shutil.rmtree(KEPT, ignore_errors=True)
    files = save(place, found, limits)
    footer(console, found, f"{place}/  ({', '.join(files)})")
    return int(any(one.wrong for one in found))


def entrants_of(
    console: Console, targets: Sequence[str], options: Options, names: Sequence[str]
) -> tuple[list[Target], list[Workload]]:
    """Targets and their workloads, after a first call in a process of its own.

    Imported there first too: an import that ends its process is then an error in one line.
    """
    with waiting(console, "a first call in a process of its own …"), ExitStack() as stack:
        workers = workers_of(targets, options, stack)
        mine = opened(targets, options)
        workloads = workloads_of(mine, names)
        doable(workloads, mine)
        return tried(mine, workers, workloads), workloads


def waiting(console: Console, words: str) -> AbstractContextManager[Any]:
    """Show words while it lasts, on a terminal."""
    return console.status(words) if console.is_terminal else nullcontext()


def header(console: Console, workloads: Sequence[Workload], limits: Limits) -> None:
    """Versions, the machine's limits, and which baselines are not installed."""
    about = environment()
    versions = "  ".join(f"{name} {version}" for name, version in libraries().items())
    console.print(f"[bold]veriformer {about['veriformer']} bench[/]  one thread, CPU time")
    console.print(f"Python {about['python']}  {versions}")
    tiers = ", ".join(f"{rate(limits.bandwidth_at(count))} {name} ({size(count)})" for name, count in NAMED.items())
    console.print(f"memory: {tiers}", soft_wrap=True)
    peaks = ", ".join(f"{three(flops / 1e9)} GFLOP/s in {dtype}" for dtype, flops in limits.peak.items())
    console.print(f"product of matrices: {peaks}")
    for name in frameworks(workloads)[1]:
        console.print(f"baselines of {name}: not installed (pip install veriformer[{name}])", markup=False)


def libraries() -> dict[str, str]:
    """Versions of what baselines are made of."""
    return {name: importlib.metadata.version(name) for name in LIBRARIES if importlib.util.find_spec(name)}


def follow(
    console: Console, workload: Workload, targets: Sequence[Target], limits: Limits, flags: str = ""
) -> Comparison:
    """Compare at one workload, and show what came of it."""
    with waiting(console, f"{workload.id} …"), quiet():
        found = compare(workload, targets, limits)
    console.print(f"\n[bold]{workload.id}[/]  {workload.sizes}  {workload.dtype}", soft_wrap=True)
    if found.entries:
        console.print(table(found.entries))
    for one in found.refused:
        console.print(one.line(flags), style="red" if one.words else "yellow", soft_wrap=True, markup=False)
    for reason in found.absent:
        console.print(f"not timed: {reason}", style="dim", soft_wrap=True, markup=False)
    return found


def table(entries: Sequence[Entry]) -> Table:
    """The rows, fastest first; a mark stands before targets."""
    grid = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    grid.add_column("implementation", overflow="fold")
    for title in ("CPU time", "ratio", "allocates", "of limit", "of budget"):
        grid.add_column(title, justify="right", no_wrap=True)
    for one in entries:
        cells = (duration(one.seconds), f"{one.ratio:.2f}", size(one.bytes), percent(one.fraction), share(one.worst))
        name = Text(f"{'>' if one.target else ' '} {one.name}")
        grid.add_row(name, *cells, style="bold" if one.target else "")
    return grid


def footer(console: Console, found: Sequence[Comparison], files: str) -> None:
    """What the columns mean, and where the files are."""
    if any(one.entries for one in found):
        console.print(
            "\n> target. ratio: CPU time by the first target's, median of pairs taken in turn.\n"
            "of limit: least time that arithmetic or memory traffic takes here, by the time\n"
            "taken. of budget: worst error by what a right implementation may err.\n"
            "allocates: what the target's own framework (NumPy, torch) does, nothing else's."
        )
    console.print(f"\nfiles: {files}", soft_wrap=True, markup=False)


def save(place: Path, found: Sequence[Comparison], limits: Limits) -> list[str]:
    """Write bench.json, and roofline.svg where anything was timed; their names."""
    record = json.dumps(recorded(found, limits), indent=1, ensure_ascii=False)
    (place / "bench.json").write_text(record + "\n", encoding="utf-8")
    picture = place / "roofline.svg"
    if not any(one.entries for one in found):
        picture.unlink(missing_ok=True)  # that of an earlier run would say what does not hold now
        return ["bench.json"]
    picture.write_text(roofline(found, limits), encoding="utf-8")
    return ["roofline.svg", "bench.json"]


def recorded(found: Sequence[Comparison], limits: Limits) -> dict[str, Any]:
    """Every number, with what it was taken on."""
    about = environment()
    machine = {"cpu": processor(), "platform": about["platform"], "threads": 1, "clock": "process_time"}
    return {
        "schema": SCHEMA,
        "versions": {"veriformer": about["veriformer"], "python": about["python"], **libraries()},
        "machine": machine,
        "limits": {"bandwidth": [list(tier) for tier in limits.bandwidth], "peak": dict(limits.peak)},
        "workloads": [comparison_record(one) for one in found],
    }


def comparison_record(found: Comparison) -> dict[str, Any]:
    """One workload as plain JSON values."""
    work = found.workload
    rows = [{**asdict(one), "worst": number(one.worst), "spread": list(one.spread)} for one in found.entries]
    return {
        "id": work.id, "operation": work.operation, "direction": work.direction, "dtype": work.dtype,
        "sizes": work.sizes, "flops": work.flops, "bytes": work.bytes, "limit": found.limit, "entries": rows,
        "refused": [asdict(one) for one in found.refused], "absent": found.absent,
    }  # fmt: skip


def processor() -> str:
    """The processor's name, as far as the system tells."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"
