"""The report as files: Markdown to read in a clone and review in a diff, and one plain HTML page with curves."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from veriformer.calling import UsageError
from veriformer.history.curves import BLOCKS, GAP, HEIGHT, WIDTH, blocks, line
from veriformer.history.results import History
from veriformer.history.tables import NOISE, NOTHING, Group, groups_of, number

TITLE = "Performance and accuracy of past commits"
COMMAND = "veriformer history"
READING = (
    "Less is better everywhere.",
    "First and latest are a row's first and latest value among the commits below; since first is latest against first; "
    f"at the last commit is that commit's value against the row's value before it ({NOTHING}: there is none).",
    "A curve has one place for each commit, the oldest first.",
    "It spans a row's least and greatest value; values within a quarter of one another lie about the middle.",
    f"Less than a factor {NOISE} in a cost of time means nothing on a shared machine.",
)
"""How to read the tables."""
MEANT = re.compile(r"[\\`*<|\[\]]|\b_|_\b")
"""What means something in Markdown; an underscore inside a word does not."""


def plain(words: str) -> str:
    """Words as Markdown that shows them as they are."""
    return MEANT.sub(r"\\\g<0>", words)


def markdown(history: History) -> str:
    """The report of comparable metrics as Markdown."""
    groups = groups_of(history)
    curve = f"In curves `{BLOCKS[0]}` is least and `{BLOCKS[-1]}` is most; `{GAP}`: nothing measured."
    parts = [
        f"# {TITLE}",
        f"Made by `{COMMAND}` from asv's results.",
        "\n".join(f"- {one}" for one in (*READING, curve)),
    ]
    parts += ["## Commits", *_commits(history)]
    for group in groups:
        parts += [f"## {group.title}", *_table(group)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _commits(history: History) -> list[str]:
    lines = ["| commit | date | measured with | subject |", "|---|---|---|---|"]
    for commit, environment in zip(history.commits, history.environments, strict=True):
        lines.append(f"| {commit.short} | {commit.day} | {environment} | {plain(commit.subject)} |")
    return ["\n".join(lines)]


def _table(group: Group) -> list[str]:
    heads = (
        group.subject or "what",
        group.parameters or "with",
        "first",
        "latest",
        "since first",
        "at the last commit",
    )
    lines = ["| " + " | ".join((*heads, "curve")) + " |", "|---|---|--:|--:|--:|--:|---|"]
    for row in group.rows:
        values = (number(row.known[0]), number(row.known[-1]), row.since_first, row.since_previous)
        cells = (plain(row.subject), plain(row.parameters), *values, f"`{blocks(row.series.values)}`")
        lines.append("| " + " | ".join(cells) + " |")
    missing = "Never with a value: " + plain("; ".join(group.empty)) + "." if group.empty else ""
    return [group.meaning, "\n".join(lines), missing]


def page(history: History, own: History | None = None) -> str:
    """The report as one HTML page; own: seconds of this machine, for a page that stays on it."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("veriformer.history", ".")
    found = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    parts = [_part("", history)] + ([_part("this machine: ", own)] if own else [])
    template = found.get_template("page.html")
    return template.render(
        title=TITLE, command=COMMAND, reading=READING, parts=parts, number=number, width=WIDTH, height=HEIGHT
    )


def _part(prefix: str, history: History) -> dict[str, Any]:
    """What the template shows of one history: its commits, and each group's rows with their curves."""
    tables = [(group, [(row, line(row.series.values)) for row in group.rows]) for group in groups_of(history)]
    return {
        "prefix": prefix,
        "commits": list(zip(history.commits, history.environments, strict=True)),
        "tables": tables,
    }


def write(path: Path, text: str) -> Path:
    """Write a file and the folders above it.

    Raises UsageError where that cannot be.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"the report cannot be written: {error}") from None
    return path


def summary(groups: Sequence[Group]) -> list[tuple[str, int, int, int, int]]:
    """For each group: its title, how many rows it has, how many rose, fell and stayed at the last commit.

    Values within the metric's noise are the same.
    """
    found = []
    for group in groups:
        steps = [row.last_step for row in group.rows if row.last_step]
        rose = sum(after > group.noise * before for before, after in steps)
        fell = sum(before > group.noise * after for before, after in steps)
        found.append((group.title, len(group.rows), rose, fell, len(steps) - rose - fell))
    return found
