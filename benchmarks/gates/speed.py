"""The gate on time: `python benchmarks/gates/speed.py BASE [HEAD]` fails where HEAD is slower than BASE.

Every implementation file that differs is loaded in both versions into this process, under two names, and called in
turn at each workload that it has an operation for. If anything else of the package differs, its own speed (import,
judging one attention function, a thousand cases) is taken in two processes that alternate. Results are judged before,
in between and after; wrong ones are a failure and not timed, but what is wrong in base alone is only mentioned. `rule`
says when something is slower, and how often that is a false alarm. Judging the whole function is only mentioned, since
it takes longer with every law. Exit codes: 0 nothing is slower, or nothing that
could be timed differs; 1 something is slower or wrong, or nothing was timed although something differs; 2 usage.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.table import Table

from veriformer.benchmarks.gates import files, suite
from veriformer.benchmarks.gates.commits import Commits, Parser, asked_for, ended, pattern
from veriformer.benchmarks.gates.rule import Contest, Found, Timing, Wanted, timed
from veriformer.benchmarks.implementations import one_thread
from veriformer.report.terminal import console_for


def gate(words: Sequence[str]) -> int:
    """Time two commits and say what was found; the exit code."""
    parser = Parser(prog="speed.py", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--all", action="store_true", help="also what does not differ")
    given = parser.parse_args(words)
    wanted = pattern(given.bench)
    commits = asked_for(Path.cwd(), given.base, given.head)
    found = Found()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        timed(contests(commits, given.all, wanted, Path(folder), stack, found), found)
    return shown(found)


def contests(
    commits: Commits, everything: bool, wanted: Wanted, folder: Path, stack: ExitStack, found: Found
) -> Iterator[Contest]:
    """All there is to time, cheap things first."""
    one_thread()
    found.untimed += files.others_of(commits)
    for path in files.files_of(commits, everything):
        yield from files.contests_of(commits, path, folder, wanted, found)
    if everything or commits.changed(*suite.FOLDERS):
        yield from suite.contests_of(commits, folder / "trees", wanted, stack, found)


def shown(found: Found) -> int:
    """Print what was found; the exit code."""
    console = console_for()
    if found.timings:
        console.print(_table(found.timings))
    for line in [*found.remarks, *(f"FAILED {failure}" for failure in found.failures)]:
        console.print(line, soft_wrap=True, markup=False)
    if found.untimed:
        console.print(f"no workload times an operation of {', '.join(found.untimed)}", markup=False)
    slower = sum(timing.slower for timing in found.timings)
    if found.timings:
        console.print(f"{len(found.timings)} timed, {slower} slower, {len(found.failures)} failed")
    elif found.due and not found.unmatched:
        console.print("nothing was timed, although something differs that can be")
    elif not (found.failures or found.remarks or found.untimed):
        console.print("no implementation differs; nothing to time")
    return int(found.failed)


def _table(timings: Sequence[Timing]) -> Table:
    """The last run of each: an interval of 99.8 % around the median ratio, head by base."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in ("workload", "implementation"):
        table.add_column(heading, no_wrap=True)
    for heading in ("head/base", "interval"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for timing in timings:
        run = timing.runs[-1]
        numbers = (f"{run.median:.2f}", f"{run.low:.2f}-{run.high:.2f}")
        table.add_row(timing.what, timing.who, *numbers, timing.verdict, style="red" if timing.slower else "")
    return table


if __name__ == "__main__":
    raise SystemExit(ended("speed.py", gate, sys.argv[1:]))
