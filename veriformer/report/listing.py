"""`veriformer laws` and `veriformer list`: what there is, with one line each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from veriformer.calling import ALIASES, UsageError, names_of, nearest, signature_of
from veriformer.catalogue import all_laws, tentative
from veriformer.declarations import Capabilities
from veriformer.dialect import words_of
from veriformer.law import Law
from veriformer.libraries import library_named
from veriformer.operation import GIVEN, LISTED, PARAMS, Operation
from veriformer.operations import OPERATIONS
from veriformer.report.terminal import NAMES, console_for, two_columns
from veriformer.targets import registered_names


def list_laws() -> int:
    """Every law with its statement, by operation."""
    console = console_for()
    for operation in OPERATIONS:
        mine = [law for law in all_laws() if law.operation == operation]
        console.print(f"[bold]{operation}[/]: {len(mine)} laws")
        two_columns(console, [("  " + law.name, law.statement) for law in mine], 38)
        console.print()
    console.print(f"{len(all_laws())} laws; `veriformer laws ID` explains one")
    return 0


def explain_laws(wanted: str) -> int:
    """Everything about the laws that a word selects.

    Raises UsageError where it selects none.
    """
    found = [law for law in all_laws() if wanted in (law.id, law.name, law.operation)]
    found = found or [law for law in all_laws() if wanted in law.id]
    if not found:
        raise UsageError(f"no law {wanted!r}{nearest(wanted, [law.id for law in all_laws()])}")
    console = console_for()
    for law in found:
        console.print(f"[bold]{law.id}[/]")
        two_columns(console, law_facts(law), 10)
        console.print()
    return 0


def law_facts(law: Law) -> list[tuple[str, str]]:
    """What there is to say about a law."""
    facts = [
        ("  says", law.statement),
        ("  kind", law.kind + (", tentative: not counted yet" if tentative(law) else "")),
    ]
    if law.source:
        facts.append(("  source", law.source))
    if law.needs:
        facts.append(("  needs", ", ".join(sorted(law.needs))))
    if law.also:
        facts.append(("  also", "uses " + ", ".join(law.also)))
    if law.changes:
        facts.append(("  declare", "changed by " + ", ".join(law.changes)))
    if law.kills:
        facts.append(("  rejects", ", ".join(law.kills)))
    return facts


def about_registered(name: str) -> str:
    """What a registered name stands for, and how to have it where it is not there."""
    library = library_named(name)
    if library is None:
        return ""
    return library.title + (f": not installed, {library.install}" if library.missing else "")


def about(table: Operation) -> list[str]:
    """Lines about one operation: its call, its meaning, the weights it is given."""
    lines = [signature_of(table, shapes=True), table.meaning]
    for prefix in (PARAMS, *GIVEN):
        parts = [
            f"{name[len(prefix) :]}[{', '.join(a.split())}]"
            for name, a in table.params.items()
            if name.startswith(prefix)
        ]
        lines += [f"{prefix[:-1]}: {', '.join(parts)}"] if parts else []
    if table.listed:
        lines.append(f"{LISTED[:-1]}: a list of arrays of any shapes; returns a list like it")
    return [*lines, f"returns ({', '.join(table.results)})"] if len(table.results) > 1 else lines


def list_operation(name: str) -> int:
    """What there is to one operation: its call, its laws, names and declarable choices.

    Raises UsageError for an unknown one.
    """
    if name not in OPERATIONS:
        raise UsageError(f"no operation {name!r}{nearest(name, list(OPERATIONS))}; `veriformer list` shows all")
    console, table = console_for(), OPERATIONS[name]
    laws = [law for law in all_laws() if law.operation == name]
    words = [word for word in (*table.options, *table.keywords) if word in ALIASES]
    console.print(f"[bold]{name}[/]")
    two_columns(console, [("", line) for line in about(table)], 2)
    understood = [(f"  {word}", ", ".join(names_of(word, table))) for word in words]
    for title, rows in (
        ("names that are understood", understood),
        ("choices[/] (--declare KEY=VALUE; `veriformer list` shows all)", choices(dialects(name))),
    ):
        if rows:
            console.print(f"\n[bold]{title}")
            two_columns(console, rows, 20)
    console.print(f"\n[bold]{len(laws)} laws[/]")
    two_columns(console, [("  " + law.name, law.statement) for law in laws], 38)
    return 0


def dialects(operation: str) -> list[str]:
    """Names of the capabilities that change what the reference computes."""
    plain, found = words_of(operation, Capabilities()), []
    for name, choice in Capabilities.__dataclass_fields__.items():
        others = choice.metadata["allowed"] or ((1.0,) if isinstance(choice.default, float) else ())
        changed: list[dict[str, Any]] = [{name: other} for other in others]
        if any(words_of(operation, replace(Capabilities(), **one)) != plain for one in changed):
            found.append(name)
    return found


def choices(names: Iterable[str]) -> list[tuple[str, str]]:
    """Capabilities with what may be declared."""
    rows = []
    for name in names:
        metadata = Capabilities.__dataclass_fields__[name].metadata
        allowed = [str(a).lower() if isinstance(a, bool) else str(a) for a in metadata["allowed"] or ()]
        rows.append((f"  {name}", metadata["text"] + (f" [{' | '.join(allowed)}]" if allowed else "")))
    return rows


def list_everything() -> int:
    """Operations with their signatures, registered implementations, aliases and capabilities."""
    console = console_for()
    console.print("[bold]operations[/]")
    rows = [(f"  {name}", "\n".join(about(table))) for name, table in OPERATIONS.items()]
    two_columns(console, rows, NAMES + 2)
    console.print("\n[bold]registered implementations[/]")
    two_columns(console, [("  " + name, about_registered(name)) for name in registered_names()], 20)
    console.print("\n[bold]names that are understood[/]")
    two_columns(console, [(f"  {ours}", ", ".join(names)) for ours, names in ALIASES.items()], 20)
    console.print("\n[bold]capabilities[/] (--declare KEY=VALUE)")
    two_columns(console, choices(Capabilities.__dataclass_fields__), 20)
    return 0
