"""`veriformer history`: measures commits where asked to, then writes and opens the report, or asv's pages."""

from __future__ import annotations

import os
import platform
import sys
import webbrowser
from argparse import Namespace
from pathlib import Path

from rich.table import Table

from veriformer.calling import UsageError
from veriformer.history.checkout import OURS, Checkout, branch_of, commits_of, open_checkout
from veriformer.history.publishing import show_pages
from veriformer.history.recording import record
from veriformer.history.results import MACHINE, History, read_history
from veriformer.history.tables import groups_of
from veriformer.history.written import markdown, page, summary, write
from veriformer.report import FOLDER
from veriformer.report.record import output_folder
from veriformer.report.terminal import console_for


def show_history(given: Namespace) -> int:
    """Run the command: 0, or 1 where asv measured or published nothing.

    given: record (a range or None), quick, branch, asv, no_open, as the command line has them. Raises UsageError for
    options that do not go together, a checkout without a usable past, and a branch without results.
    """
    if given.quick and given.record is None:
        raise UsageError("--quick is a way to measure: it goes with --record")
    if given.asv and given.branch:
        raise UsageError("--branch is for the report: asv's pages follow the branches in asv.conf.json")
    checkout = open_checkout(Path.cwd())
    branch = "" if given.asv else branch_of(checkout, given.branch)
    if given.record is not None and (code := record(checkout, given.record, given.quick)):
        return code
    if given.asv:
        return show_pages(checkout, opened=not given.no_open)
    return show_report(checkout, branch, opened=not given.no_open)


def show_report(checkout: Checkout, branch: str, opened: bool) -> int:
    """Write the report's files, say what changed at the last commit, open the page.

    Raises UsageError where no commit of the branch has results.
    """
    commits = commits_of(checkout, branch)
    history = read_history(checkout, commits)
    if not history.commits:
        others = f" ({counted(history.elsewhere)} some elsewhere)" if history.elsewhere else ""
        raise UsageError(f"no results yet for {branch}{others}: veriformer history --record")
    # What a host is called may be the word for all of them; then there is nothing of its own.
    own = read_history(checkout, commits, platform.node()) if platform.node() not in ("", MACHINE) else None
    paths = [checkout.root / path for path in OURS]
    shown = paths[1]
    write(paths[0], markdown(history))
    write(paths[1], page(history))
    if own and own.commits:
        folder, note = output_folder(str(checkout.root / FOLDER), "pages with this machine's times")
        paths.append(shown := write(folder / "performance.html", page(history, own)))
        if note:
            print(note)
    say(history, branch, paths)
    if opened and not open_page(shown):
        print(f"no browser to open it in: {shown}")
    return 0


def say(history: History, branch: str, paths: list[Path]) -> None:
    """A few lines: how many commits, what rose and fell at the last one, which files were written."""
    console = console_for()
    last = history.commits[-1]
    said = f"{counted(len(history.commits))} results on {branch}, the last {last.short} of {last.day}"
    console.print(said, soft_wrap=True, markup=False)
    if history.elsewhere:
        verb = "is" if history.elsewhere == 1 else "are"
        console.print(f"{history.elsewhere} more with results {verb} not on {branch}", soft_wrap=True, markup=False)
    grid = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    grid.add_column("at the last commit")
    for head in ("rows", "rose", "fell", "same"):
        grid.add_column(head, justify="right")
    for title, *counts in summary(groups_of(history)):
        grid.add_row(title, *map(str, counts))
    console.print(grid)
    for path in paths:
        console.print(f"written: {seen_from_here(path)}", soft_wrap=True, markup=False)


def counted(commits: int) -> str:
    """Such as "1 commit has" or "3 commits have"."""
    return "1 commit has" if commits == 1 else f"{commits} commits have"


def seen_from_here(path: Path) -> Path:
    """A path beneath the working directory as seen from there, any other one as absolute."""
    here, whole = Path.cwd().resolve(), path.resolve()
    return whole.relative_to(here) if whole.is_relative_to(here) else whole


def open_page(path: Path) -> bool:
    """Open a page in the browser; False where there is no screen, or no browser."""
    if sys.platform.startswith("linux") and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        return False
    return webbrowser.open(path.resolve().as_uri())
