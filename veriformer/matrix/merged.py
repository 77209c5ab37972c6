"""matrix.json: written by `veriformer matrix`, read and put together by `veriformer report`."""

from __future__ import annotations

import datetime
import json
import resource
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from veriformer.calling import UsageError
from veriformer.catalogue import LEVEL
from veriformer.libraries import Library
from veriformer.matrix.cells import cells_of
from veriformer.matrix.process import Judged, Way
from veriformer.report.record import SCHEMA, environment

MATRIX = "veriformer/matrix/1"


def matrix_of(
    libraries: Sequence[Library],
    judged: Sequence[Judged],
    trouble: Mapping[str, Sequence[str]],
    way: Way,
    seconds: float,
) -> dict[str, Any]:
    """The matrix of one environment, as plain JSON values.

    trouble: lines about adapters that could not be imported, by library.
    """
    cells = [
        cell
        for one in judged
        if one.report is not None
        for cell in cells_of(one.report, one.unit.name, one.unit.operations)
    ]
    return {
        "schema": MATRIX,
        "level": LEVEL,
        "runs": [
            {
                "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "effort": way.effort,
                "seed": way.seed,
                "laws": list(way.laws),
                "dtypes": list(way.dtypes),
                "units": len(judged),
                "kept": sum(one.kept for one in judged),
                "seconds": round(seconds, 1),
                "cpu_seconds": round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime, 1),
                "environment": environment(),
            }
        ],
        "libraries": [_library(library, judged, trouble.get(library.name, ())) for library in libraries],
        "cells": cells,
    }


def _library(library: Library, judged: Sequence[Judged], trouble: Sequence[str]) -> dict[str, Any]:
    mine = [one for one in judged if one.unit.library == library.name]
    versions: dict[str, str] = {}
    for one in mine:
        versions |= one.report["implementations"][0]["versions"] if one.report is not None else {}
    lines = [*trouble, *(f"{one.unit.name}: {one.trouble}" for one in mine if one.report is None)]
    return {
        "name": library.name,
        "title": library.title,
        "status": "not installed" if library.missing else "judged" if mine else "not judged",
        "install": library.install,
        "apart": library.apart,
        "versions": versions,
        "trouble": lines,
    }


def read(path: Path) -> dict[str, Any]:
    """A matrix, or the report of a check as a matrix of its implementations.

    Raises UsageError for a file that is neither, and for a report that a killed run left behind.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        schema = found["schema"]
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        schema = ""
    wanted = {MATRIX: ("level", "runs", "libraries", "cells"), SCHEMA: ("level", "complete", "settings", "rows")}
    if schema not in wanted or not all(key in found for key in wanted[schema]):
        raise UsageError(f"{path} is no matrix.json and no JSON report of veriformer check, or is damaged")
    if not found.get("complete", True):
        raise UsageError(f"{path} is of a run that did not end; run that check again")
    return dict(found) if schema == MATRIX else _matrix_of_check(found)


def _matrix_of_check(report: Mapping[str, Any]) -> dict[str, Any]:
    """The report of a check in the form of a matrix: each implementation is a library, or a variant of one."""
    libraries: dict[str, dict[str, Any]] = {}
    cells: list[dict[str, Any]] = []
    for about in report["implementations"]:
        name = about["name"].partition(":")[0]
        rows = [row for row in report["rows"] if row["implementation"] == about["name"]]
        cells += cells_of({**report, "implementations": [about], "rows": rows}, about["name"])
        libraries.setdefault(name, {"name": name, "title": name, "status": "judged", "install": "", "apart": "",
                                    "versions": dict(about["versions"]), "trouble": []})  # fmt: skip
    settings = report["settings"]
    run = {"created": report["created"], "effort": settings["effort"], "seed": settings["seed"]}
    run |= {"laws": settings["laws"], "dtypes": settings["dtypes"]}
    run |= {"seconds": report["seconds"], "environment": report["environment"]}
    return {
        "schema": MATRIX,
        "level": report["level"],
        "runs": [run],
        "libraries": [*libraries.values()],
        "cells": cells,
    }


def together(matrices: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Several matrices as one: a library judged anywhere is judged, and the last of two equal cells stays.

    Of a library that was judged in two versions the cells of the last one stay, and no trouble is lost but that of
    a variant which was judged after all.

    Raises UsageError for matrices of different levels, whose counts do not compare, and of different choices of laws
    or dtypes, of which a part would take the place of the whole.
    """
    matrices = list(matrices)
    levels = sorted({matrix["level"] for matrix in matrices})
    if len(levels) > 1:
        raise UsageError(f"the files are of levels {' and '.join(levels)}; judge both by one version of veriformer")
    asked = {(*run.get("laws", ()), *run.get("dtypes", ())) for matrix in matrices for run in matrix["runs"]}
    if len(asked) > 1:
        raise UsageError("the files are of different laws or dtypes (--law, --dtype); judge all by the same")
    libraries: dict[str, dict[str, Any]] = {}
    cells: dict[tuple[str, str, str], Any] = {}
    for matrix in matrices:
        for library in matrix["libraries"]:
            known = libraries.get(library["name"], library)
            better = known if library["status"] != "judged" else library
            if known["status"] == library["status"] == "judged" and known["versions"] != library["versions"]:
                cells = {place: cell for place, cell in cells.items() if place[0] != library["name"]}
            trouble = list(dict.fromkeys([*known["trouble"], *library["trouble"]]))
            libraries[library["name"]] = {**better, "trouble": trouble}
        for cell in matrix["cells"]:
            cells[cell["library"], cell["variant"], cell["operation"]] = cell
    judged = {f"{library}:{variant}" for library, variant, _ in cells}
    for library in libraries.values():
        library["trouble"] = [line for line in library["trouble"] if line.partition(": ")[0] not in judged]
    order = list(libraries)
    runs = [run for matrix in matrices for run in matrix["runs"]]
    found = sorted(cells.values(), key=lambda cell: order.index(cell["library"]))
    return {
        "schema": MATRIX, "level": levels[0], "runs": runs, "libraries": [*libraries.values()], "cells": found,
    }  # fmt: skip
