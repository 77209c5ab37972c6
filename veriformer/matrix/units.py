"""What there is to judge: the variants of every chosen library that is installed."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass, replace

from veriformer.calling import UsageError, nearest
from veriformer.isolate import Remote, WorkerLost
from veriformer.libraries import LIBRARIES, Library, library_named
from veriformer.operations import OPERATIONS
from veriformer.oracle import COMPOSITES
from veriformer.targets import GROUP, Description, Options


@dataclass(frozen=True)
class Unit:
    """One variant of a library: what one process judges.

    library: its registered name. module: the adapter. variant: empty where the module has none. operations: those
    that are judged together. part: a word for them where the variant's others are judged apart. most: the
    largest effort that is made here, below ci where pinned cases must do (see `units_of` and `halves`). dtypes: of
    the library; empty: all that are claimed.
    """

    library: str
    module: str
    variant: str
    operations: tuple[str, ...]
    part: str = ""
    most: str = "deep"
    dtypes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """`library:variant`, as `veriformer check` takes it."""
        return f"{self.library}:{self.variant or short(self.library, self.module)}"

    @property
    def target(self) -> str:
        """What is judged, by the adapter's own module, so that no other adapter is imported for it."""
        return f"{self.module}:{self.variant}" if self.variant else self.module


def short(library: str, module: str) -> str:
    """What a module without variants is called: its last name without the library's."""
    return module.rpartition(".")[2].removeprefix(f"{library}_")


def chosen(words: Sequence[str]) -> list[tuple[Library, str]]:
    """Libraries, or LIBRARY:VARIANT, that the user named, with the variant or an empty string; all if none is.

    Raises UsageError for a library that nobody knows.
    """
    found = []
    for word in words or [library.name for library in LIBRARIES]:
        name, _, variant = word.partition(":")
        library = library_named(name)
        if library is None:
            raise UsageError(f"unknown library {name!r}{nearest(name, [one.name for one in LIBRARIES])}")
        found.append((library, variant))
    return found


def modules_of(library: Library) -> tuple[str, ...]:
    """The adapters behind a registered name."""
    points = importlib.metadata.entry_points(group=GROUP)
    found = next((point.load() for point in points if point.name == library.name), ())
    return (found,) if isinstance(found, str) else tuple(found)


def units_of(library: Library) -> tuple[list[Unit], list[str]]:
    """The variants that call a library, and a line for each adapter that cannot be imported.

    Of several that declare the same of an operation the first alone is searched. One that compiles for each shape
    gets a look, since every case has a new shape.
    """
    trouble: list[str] = []
    try:
        found = _described(library.name)
    except UsageError as error:
        found, whole = [], str(error)
        for module in modules_of(library):  # one that fails must not hide the others
            try:
                found += _described(module)
            except UsageError as error:
                trouble.append(str(error))
        trouble = trouble or ([] if found else [f"{library.name}: {whole}"])
    mine = [(_unit(library, description), description) for description in found]
    listed = [(unit, _) for unit, _ in mine if not library.variants or unit.name.partition(":")[2] in library.variants]
    return _limited(listed), trouble


def _limited(found: Sequence[tuple[Unit, Description]]) -> list[Unit]:
    units, seen = [], set[str]()
    for unit, about in found:
        declared = {f"{name} {plan.mapping()} {about.capabilities[name]}" for name, plan in about.plans.items()}
        compiled = any(one.compiles_per_shape for one in about.capabilities.values())
        units.append(replace(unit, most="look" if compiled else "smoke" if declared <= seen else "deep"))
        seen |= declared
    return units


def halves(unit: Unit) -> list[Unit]:
    """A variant as one or two: its composites, whose budgets cost far more than a call, are judged without a search."""
    heavy = tuple(name for name in unit.operations if name in COMPOSITES and not OPERATIONS[name].words)
    rest = tuple(name for name in unit.operations if name not in heavy)
    if not heavy or not rest:
        return [_unsearched(unit) if heavy else unit]
    composites = replace(_unsearched(unit), operations=heavy, part="composites")
    return [replace(unit, operations=rest, part="operations"), composites]


def _unsearched(unit: Unit) -> Unit:
    return replace(unit, most="look" if unit.most == "look" else "smoke")


def _described(target: str) -> list[Description]:
    """Raises UsageError, in one line, where the target cannot be imported."""
    try:
        remote = Remote(target, Options(), offline=True)
    except WorkerLost as error:
        raise UsageError(str(error)) from None
    remote.close()
    return list(remote.descriptions)


def _unit(library: Library, description: Description) -> Unit:
    module, expression = next(iter(description.places.values()))
    variant = description.name.rpartition(":")[2] if expression.startswith("VARIANTS") else ""
    return Unit(library.name, module, variant, tuple(description.plans), dtypes=library.dtypes)
