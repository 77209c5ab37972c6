"""What a person sees: header, a line per law, failures as blocks, counts, and what was not tested."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from veriformer.budgets.claims import precision_name
from veriformer.case import PRINTED, show_array
from veriformer.catalogue import LEVEL, tentative
from veriformer.checking import RED, Report
from veriformer.declarations import DTYPES
from veriformer.law import SINGLE, Law
from veriformer.moves import said
from veriformer.operations import OPERATIONS
from veriformer.report.record import environment
from veriformer.running import Failure, Row
from veriformer.subject import Call, Implementation

BLOCKS = 3
"""Failures shown in full for one operation of one implementation; the rest are named."""
NAMES = max(map(len, OPERATIONS))
"""Width of the longest operation's name."""
WORDS = {"pass": "ok", "not_provided": "-", "incomplete": "open", "undetermined": "open", "suite_error": "SUITE"}
COLOURS = {"pass": "green", "xfail": "yellow", "not_provided": "dim", "blocked": "dim", "not_run": "yellow"}


def console_for(file: Any = None, width: int | None = None) -> Console:
    """A console that is plain where the output is not a terminal."""
    return Console(file=file, width=width, highlight=False, soft_wrap=False, emoji=False)


def plain(report: Report) -> str:
    """The whole view as plain text, 80 columns wide."""
    console = Console(file=io.StringIO(), width=80, highlight=False, emoji=False, color_system=None)
    header(console, report)
    for implementation in report.implementations:
        table(console, report, implementation)
    failures(console, report, {})
    summary(console, report)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def row_text(row: Row, script: tuple[str, str] = ("", "")) -> str:
    """One failure as plain text, for pytest; script: its path, and the failure's name for replay."""
    console = Console(file=io.StringIO(), width=100, highlight=False, emoji=False, color_system=None)
    block(console, row, (), script)
    return console.file.getvalue().rstrip()  # type: ignore[attr-defined,no-any-return]


def header(console: Console, report: Report) -> None:
    """Versions, settings, and each implementation with its mapping and capabilities."""
    about, settings = environment(), report.settings
    console.print(
        f"[bold]veriformer {about['veriformer']}[/]  level {LEVEL}  effort {settings.effort}  seed {settings.seed}"
        + (f"  dtypes {', '.join(settings.dtypes)}" if settings.dtypes else "")
    )
    console.print(f"Python {about['python']}  numpy {about['numpy']}  threads {threads(report)}")
    for implementation in report.implementations:
        first, *lines = implementation_lines(implementation)
        console.print(Text(first), soft_wrap=True)
        two_columns(console, [tuple(line.split(": ", 1)) for line in lines], NAMES + 2)  # type: ignore[misc]
    console.print()


def two_columns(console: Console, rows: Sequence[tuple[str, str]], width: int) -> None:
    """Names on the left, their meaning on the right, folded beside them; a longer name has a line of its own."""
    for long, group in groupby(rows, key=lambda row: len(row[0]) > width):
        for part in [[row] for row in group] if long else [list(group)]:
            if long:
                console.print(Text(part[0][0]))
            console.print(_grid([("" if long else name, text) for name, text in part], width))


def _grid(rows: Sequence[tuple[str, str]], width: int) -> Table:
    """Two columns without a frame, the first of this width."""
    grid = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, show_header=False, show_edge=False)
    grid.add_column(width=width, overflow="fold")
    grid.add_column(overflow="fold")
    for name, text in rows:
        grid.add_row(Text(name), Text(text))
    return grid


def threads(report: Report) -> str:
    """Threads the implementation may use."""
    return "1" if report.settings.isolate else environment()["threads"]


def implementation_lines(implementation: Implementation) -> Iterable[str]:
    """Name and framework, then one line for each operation: what it takes and declares."""
    about = implementation.description
    version, device = about.versions.get(about.framework, ""), about.versions.get("device", "")
    yield f"{implementation.name}  {about.framework} {version}" + (f" on {device}" if device else "")
    for operation, plan in about.plans.items():
        changed = about.capabilities[operation].changed()
        words = [f"takes {plan.mapping()}"] if plan.mapping() else ["takes arrays only"]
        if operation in about.models:
            words = [about.models[operation].says(), *([f"takes {plan.mapping()}"] if plan.mapping() else [])]
        words += ["declares " + ", ".join(f"{k}={show(v)}" for k, v in changed.items())] if changed else []
        yield f"  {operation}: " + "; ".join(words)


def show(value: Any) -> str:
    """A capability's value as it is written on the command line, or by dtype."""
    if isinstance(value, Mapping):
        return " ".join(f"{key}:{one}" for key, one in value.items())
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def table(console: Console, report: Report, implementation: Implementation) -> None:
    """One line per law, one column per dtype: ok, the worst ratio, or the verdict."""
    for operation in implementation.description.plans:
        rows = [r for r in report.rows if r.implementation == implementation.name and r.law.operation == operation]
        shown = [row for row in rows if row.verdict != "not_provided"]
        if not shown:
            continue
        dtypes = [dtype for dtype in DTYPES if any(row.dtype == dtype for row in shown)]
        grid = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
        grid.add_column(Text(f"{operation}  ({implementation.name})"), overflow="fold", ratio=1)
        for dtype in dtypes:
            grid.add_column(dtype, justify="right", no_wrap=True)
        for law in dict.fromkeys(row.law for row in shown):
            cells = [cell(next((r for r in shown if r.law is law and r.dtype == d), None)) for d in dtypes]
            grid.add_row(Text(law.name + (" (tentative)" if tentative(law) else "")), *cells)
        console.print(grid)
        console.print(Text(summary_line(rows, operation)), soft_wrap=True)
        console.print()


def cell(row: Row | None) -> Text:
    """The shortest true word on one item."""
    if row is None:
        return Text("")
    if row.verdict == "pass" and row.ratio > 0:
        return Text(f"{row.ratio:.2g}", "green")
    word = WORDS.get(row.verdict, row.verdict.upper() if row.verdict in RED else row.verdict)
    return Text(word, COLOURS.get(row.verdict, "bold red"))


def summary_line(rows: Sequence[Row], operation: str) -> str:
    """'attention: 38 laws hold, 0 fail; not tested: window, sink (not provided); worst 0.31 of the budget'."""
    words = law_words(rows)
    good = words.count("holds")
    parts = [f"{operation}: {good} law{'s' * (good != 1)} hold{'s' * (good == 1)}, {words.count('fails')} fail"]
    parts += [f"{words.count(w)} {w}" for w in ("known to fail", "left open", "blocked", "not run") if w in words]
    lacking = not_provided(rows)
    if lacking:
        parts.append(f"not tested: {', '.join(lacking)} (not provided)")
    refused, cases = sum(row.refused for row in rows), sum(row.cases for row in rows)
    if refused:
        parts.append(f"{refused} of {cases} cases refused")
    worst = max((row.ratio for row in rows), default=0.0)
    if worst:
        parts.append(f"worst {worst:.2g} of the budget")
    measured = {row.dtype: row.bits for row in rows if row.bits is not None}
    if measured:
        likes = {dtype: f"2^{bits:.1f}" + in_brackets(precision_name(bits)) for dtype, bits in measured.items()}
        said = ", ".join(like + (f" in {dtype}" if len(likes) > 1 else "") for dtype, like in likes.items())
        parts.append(f"behaves like u = {said}")
    return "; ".join(parts)


def in_brackets(name: str) -> str:
    """' (tf32)', or nothing for nothing."""
    return f" ({name})" if name else ""


def law_words(rows: Sequence[Row]) -> list[str]:
    """One word for each law, over all its dtypes: the most serious one."""
    by_law: dict[str, set[str]] = {}
    for row in rows:
        by_law.setdefault(row.law.id, set()).add(row.verdict)
    return [word for verdicts in by_law.values() if (word := one_word(verdicts))]


def one_word(verdicts: set[str]) -> str:
    """fails, left open, blocked, not run, known to fail, holds, or nothing where the law does not apply."""
    if verdicts & {*RED, "suite_error"}:
        return "fails"
    for verdict, word in (("incomplete", "left open"), ("undetermined", "left open"), ("blocked", "blocked"),
                          ("not_run", "not run"), ("xfail", "known to fail"), ("pass", "holds")):  # fmt: skip
        if verdict in verdicts:
            return word
    return ""


def not_provided(rows: Sequence[Row]) -> list[str]:
    """Keywords and features that kept laws from being run."""
    words: dict[str, None] = {}
    for row in rows:
        if row.verdict == "not_provided":
            needed = row.reason.removeprefix("needs ")
            for word in needed.split(", ") if needed != row.reason else (row.reason,):
                if word != SINGLE:  # the law was run in another dtype
                    words.setdefault(word)
    order = [*OPERATIONS[rows[0].law.operation].options, *OPERATIONS[rows[0].law.operation].keywords] if rows else []
    return sorted(words, key=lambda word: (order.index(word) if word in order else len(order), word))


def failures(console: Console, report: Report, scripts: dict[str, tuple[str, str]]) -> None:
    """Blocks for the failures, the most specific first, the rest of one cause folded to a count.

    scripts: item id -> (script path, replay id).
    """
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in report.rows:
        if row.verdict in (*RED, "suite_error"):
            groups.setdefault((row.implementation, row.law.operation), []).append(row)
    for rows in groups.values():
        laws = list(dict.fromkeys(row.law for row in sorted(rows, key=rank)))
        shown = in_full(laws)
        for law in shown:
            mine = [row for row in rows if row.law is law]
            block(console, mine[0], [row.dtype for row in mine[1:]], scripts.get(mine[0].id, ("", "")))
        rest = [law.name for law in laws if law not in shown]
        if rest:
            said = f"and {len(rest)} more law{'s' * (len(rest) > 1)} of {laws[0].operation} "
            said += f"fail{'s' * (len(rest) == 1)} for {rows[0].implementation}: "
            two_columns(console, [("", said + ", ".join(rest))], 8)
        console.print()


def in_full(laws: Sequence[Law]) -> list[Law]:
    """The laws to show in full: the most specific ones, and the oracle and the precision where they fail."""
    oracle = [law for law in laws if law.kind in ("oracle", "precision")]
    others = [law for law in laws if law not in oracle]
    return others[: BLOCKS - len(oracle)] + oracle


def rank(row: Row) -> tuple[int, int]:
    """Crashes and contracts, then metamorphic laws, gradients, the oracle; withheld ones last."""
    order = {"contract": 0, "hygiene": 1, "metamorphic": 2, "gradient": 3, "oracle": 4, "precision": 5}
    return (6 if row.withheld else order[row.law.kind], len(row.failure.case.describe()) if row.failure else 0)


def block(console: Console, row: Row, others: Sequence[str], script: tuple[str, str]) -> None:
    """One failure as in the README."""
    title = (
        f"[bold red]{escape(row.verdict.upper())}[/]  {escape(row.law.id)}  {escape(row.implementation)}  {row.dtype}"
    )
    console.print(title, soft_wrap=True)
    lines = [("law", f"{row.law.statement}  ({row.law.source})" if row.law.source else row.law.statement)]
    if row.failure:
        lines += failure_lines(row.failure)
    if row.reason:
        lines.append(("why", row.reason))
    if others:
        lines.append(("also", "fails in " + ", ".join(others)))
    if script[0]:
        lines.append(("script", script[0]))
    if script[1]:
        lines.append(("again", f"veriformer replay {script[1]}"))
    grid = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, show_header=False, show_edge=False)
    grid.add_column(width=9, justify="right", style="dim")
    grid.add_column(overflow="fold")
    for key, text in lines:
        grid.add_row(key, Text(text))
    console.print(grid)


def failure_lines(failure: Failure) -> list[tuple[str, str]]:
    """The case, or the calls where the law compares several, and what came."""
    calls = list(dict.fromkeys(called(call) for call in failure.calls if not call.aside))
    if len(calls) < 2:
        return [("case", calls[0] if calls else failure.case.describe()), ("got", failure.message)]
    lines = [(f"call {number}", line) for number, line in enumerate(calls[:3], 1)]
    return [*lines, ("got", failure.message)]


def called(call: Call) -> str:
    """A call's case, and its cotangent where that is short."""
    given = next((c for c in call.cotangents if c is not None), None) if call.gradient else None
    short = given is not None and np.size(given) <= PRINTED
    tail = f" cotangent={show_array(np.asarray(given))}" if short else ""
    return call.case.describe() + tail + (f"; {said(call.program)}" if call.program else "")


def summary(console: Console, report: Report) -> None:
    """Counts per verdict, domains to declare, and what the exit code means."""
    for line in report.missing:
        console.print(Text(line, "yellow"))
    for line in suggestions(report):
        console.print(Text(line, "yellow"), soft_wrap=True)
    counts = ", ".join(f"{n} {verdict.replace('_', ' ')}" for verdict, n in report.counts().items())
    console.print(f"{counts or 'nothing was run'}  in {report.seconds:.1f} s")
    meaning = {
        0: "every law that applies holds",
        1: "something is wrong",
        3: "the suite itself is at fault; please report it",
        4: "not everything asked for could be judged",
    }
    colour = {0: "bold green", 1: "bold red"}.get(report.exit_code, "bold yellow")
    console.print(f"[{colour}]{meaning[report.exit_code]}[/] (exit code {report.exit_code})")


def suggestions(report: Report) -> list[str]:
    """Lines about items that were mostly refused, with a declaration to paste where one explains it."""
    lines = list(dtype_lines(report))
    open_rows: dict[tuple[str, str], list[Row]] = {}
    for row in report.rows:
        if row.verdict == "incomplete" and row.refused:
            open_rows.setdefault((row.implementation, row.law.id), []).append(row)
    for (name, law), rows in open_rows.items():
        hint = declaration(rows[0])
        tail = f"; if that is meant: {hint}" if hint else ""
        lines.append(f"{name} {law} in {', '.join(row.dtype for row in rows)}: {rows[0].reason}{tail}")
    return lines[:12]


def dtype_lines(report: Report) -> Iterable[str]:
    """A declaration for implementations that run in some dtypes only."""
    roots = [row for row in report.rows if row.law.root]
    for name, operation in dict.fromkeys((row.implementation, row.law.operation) for row in roots):
        mine = [row for row in roots if (row.implementation, row.law.operation) == (name, operation)]
        good = list(dict.fromkeys(row.dtype for row in mine if row.verdict == "pass"))
        raised = [row for row in mine if row.failure is not None and row.failure.kind == "raised"]
        if good and raised:
            yield f"{name}: {operation} runs in some dtypes only; if that is meant: --declare dtypes={','.join(good)}"


def declaration(row: Row) -> str:
    """A declaration that would take the refused cases out of the domain, or an empty string."""
    said = row.refusal.lower()
    if "causal" in said and ("mask" in said or "bias" in said):
        return "--declare causal_with_mask=false"
    sizes = ("size of tensor", "broadcast", "shape", "must match", "expected size")
    if row.law.operation.startswith("attention") and any(word in said for word in sizes):
        return "--declare grouped_heads=false"
    return ""
