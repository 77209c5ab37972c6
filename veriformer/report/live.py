"""Run a report's items while showing and storing them: JSON after each item, scripts, the terminal."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from veriformer.calling import UsageError
from veriformer.catalogue import tentative
from veriformer.checking import RED, Report, chosen_laws, items, judge
from veriformer.report import terminal
from veriformer.report.kept import keep_failure
from veriformer.report.record import Writer, output_folder, writable, write
from veriformer.running import Row


def show_run(report: Report, folder: str, whole: str | None, junit: str | None) -> None:
    """Run everything, with a progress bar on a terminal, then print the view."""
    for file in (whole, junit):
        if file:
            writable(Path(file))
    console = terminal.console_for()
    place, note = output_folder(folder)
    if note:
        console.print(note)
    terminal.header(console, report)
    store = Store(report, place, Path(whole) if whole else None)
    laws = chosen_laws(report.settings)
    total = sum(1 for _ in items(laws, report.implementations, "smoke", 0, 0.0, report.settings.dtypes))
    if not total:
        operations = {operation for one in report.implementations for operation in one.description.plans}
        judged = {op: ", ".join(one.dtypes(op)) for one in report.implementations for op in one.description.plans}
        known = "; ".join(f"{operation} is judged in {judged[operation]}" for operation in sorted(operations))
        raise UsageError(f"none of the chosen laws and dtypes applies: {known}")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=console, transient=True, disable=not sys.stdout.isatty()) as bar:
            task = bar.add_task("laws", total=total)
            for row in judge(report):
                store.add(row)
                bar.update(task, advance=1, description=row.law.id)
    finally:
        store.writer.finish()
    if junit:
        write(Path(junit), junit_text(report))
    for implementation in report.implementations:
        terminal.table(console, report, implementation)
    terminal.failures(console, report, store.scripts)
    terminal.summary(console, report)
    console.print(f"report: {place}/", soft_wrap=True)


class Store:
    """Writes rows as they come, with a script and a replay file for each failure."""

    def __init__(self, report: Report, folder: Path, whole: Path | None = None) -> None:
        self.folder, self.report = folder, report
        self.writer = Writer(report, folder, whole)
        self.by_name = {one.name: one for one in report.implementations}
        self.scripts: dict[str, tuple[str, str]] = {}

    def add(self, row: Row) -> None:
        """Store a row."""
        script, name = "", ""
        if row.failure is not None and row.verdict in (*RED, "suite_error"):
            script, name = keep_failure(row, self.by_name[row.implementation], self.folder)
            self.scripts[row.id] = (script, name)
        self.writer.add(row, script, name)


def junit_text(report: Report) -> str:
    """The report as JUnit XML, one test case per item."""
    suite = ElementTree.Element("testsuite", name="veriformer", tests=str(len(report.rows)))
    for row in report.rows:
        case = ElementTree.SubElement(
            suite, "testcase", classname=row.law.operation, name=row.id, time=f"{row.seconds:.3f}"
        )
        if row.verdict in RED and not tentative(row.law):
            text = row.failure.message if row.failure else row.reason
            ElementTree.SubElement(case, "failure", message=text, type=row.verdict)
        elif row.verdict == "suite_error":
            ElementTree.SubElement(case, "error", message=row.reason)
        elif row.verdict not in ("pass",):
            ElementTree.SubElement(case, "skipped", message=f"{row.verdict}: {row.reason}")
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"
