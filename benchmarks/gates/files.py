"""Implementation files of two commits side by side: loaded by path in one process, called in turn."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from veriformer.benchmarks.gates.commits import Commits
from veriformer.benchmarks.gates.rule import Contest, Found, Unmatched, Wanted
from veriformer.benchmarks.implementations import LEFT_OUT, Absent, Prepared
from veriformer.benchmarks.judging import Wrong, accuracy
from veriformer.benchmarks.measure import NUMBERS, in_turn, judged
from veriformer.benchmarks.workloads import WORKLOADS, Workload
from veriformer.boundary import describe_error
from veriformer.calling import UsageError
from veriformer.targets import Loaded, Options, load

FOLDER = "impls"
SIDES = ("base", "head")
TIMED = frozenset(workload.operation for workload in WORKLOADS)


def files_of(commits: Commits, everything: bool) -> list[str]:
    """Implementation files that differ between the commits, or all those of head."""
    named = commits.listed(commits.head, FOLDER) if everything else commits.changed(FOLDER)
    return [name for name in named if Path(name).parent == Path(FOLDER) and _is_implementation(name)]


def others_of(commits: Commits) -> list[str]:
    """Other files beside implementations that differ: nothing loads them by themselves."""
    named = [Path(name) for name in commits.changed(FOLDER) if name.endswith(".py")]
    return [str(path) for path in named if path.parent.name != "faulty" and str(path) not in files_of(commits, False)]


def _is_implementation(name: str) -> bool:
    return name.endswith(".py") and not Path(name).name.startswith("_")


@dataclass(frozen=True)
class Both:
    """One implementation of base and head at one workload."""

    base: Prepared
    head: Prepared

    def take(self) -> Mapping[str, Sequence[float]]:
        """Ratios of one run of pairs.

        Raises Wrong where a result before, in between or after is wrong, and Unmatched where base begins with one.
        """
        for number in NUMBERS:
            judged(self.head, number)
        try:
            for number in NUMBERS:
                judged(self.base, number)
        except (Exception, SystemExit) as error:
            raise Unmatched(str(error) if isinstance(error, Wrong) else describe_error(error)) from error
        taken = in_turn(self.head, self.base)
        for one, kept in zip((self.head, self.base), taken.kept, strict=True):
            for number, returned in kept:
                accuracy(one, number, returned)
        return {self.base.workload.id: taken.ratios}


@contextmanager
def import_path_kept() -> Iterator[None]:
    """Loading a file puts its folder on the import path; afterwards that is as it was."""
    before = list(sys.path)
    try:
        yield
    finally:
        sys.path[:] = before


def contests_of(commits: Commits, path: str, folder: Path, wanted: Wanted, found: Found) -> Iterator[Contest]:
    """What there is to time in a file of both commits; what there is not goes to found.

    folder: where both versions are written.
    """
    if commits.text(commits.base, path) is None or commits.text(commits.head, path) is None:
        side = "head" if commits.text(commits.base, path) is None else "base"
        found.remarks.append(f"{path} is in {side} alone: nothing to time it against")
        return
    sides = [_loaded(commits, side, path, folder, found) for side in SIDES]
    base, head = sides
    if base and head:
        if not any(TIMED & one.boundaries.keys() for side in sides for one in side.values()):
            found.untimed.append(path)
            return
        found.due = True
        yield from _cells(base, head, wanted, found)


def _loaded(commits: Commits, side: str, path: str, folder: Path, found: Found) -> dict[str, Loaded]:
    """The implementations of one version of a file, by the names that they are registered under."""
    place = folder / side / Path(path).name
    place.parent.mkdir(exist_ok=True)
    place.write_text(commits.text(getattr(commits, side), path) or "", encoding="utf-8")
    try:
        with import_path_kept():
            loaded = load(str(place), Options())
    except UsageError as error:
        said = f"{path} of {side}: {str(error).replace(str(place), path)}"
        found.unmatch(said) if side == "base" else found.failures.append(said)
        return {}
    framework, _, tail = Path(path).stem.partition("_")
    named = {}
    for one in loaded:
        label = f"{framework}:{one.description.name.removeprefix(str(place)).lstrip(':') or tail}"
        named[label] = Loaded(replace(one.description, name=f"{label} of {side}"), one.boundaries)
    return named


def _cells(base: dict[str, Loaded], head: dict[str, Loaded], wanted: Wanted, found: Found) -> Iterator[Contest]:
    for label in sorted(base.keys() | head.keys()):
        for workload in WORKLOADS:
            if (label, workload.operation) not in LEFT_OUT and wanted(f"{workload.id} {label}"):
                yield from _cell(label, workload, (base.get(label), head.get(label)), found)


def _cell(
    label: str, workload: Workload, sides: tuple[Loaded | None, Loaded | None], found: Found
) -> Iterator[Contest]:
    base, head = (_prepared(one, workload) for one in sides)
    where = f"{workload.id} {label}"
    if isinstance(base, Prepared) and isinstance(head, Prepared):
        yield Contest(where, label, Both(base, head).take)
    elif isinstance(base, Prepared):
        found.failures.append(f"{where}: base has it, head has not ({head})")
    elif isinstance(head, Prepared):
        found.remarks.append(f"{where} is new: nothing to time it against")


def _prepared(loaded: Loaded | None, workload: Workload) -> Prepared | str:
    """Ready to be called, or why not."""
    if loaded is None:
        return "no such variant"
    try:
        return Prepared(loaded, workload)
    except Absent as absent:
        return str(absent)
