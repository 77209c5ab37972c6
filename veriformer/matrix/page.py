"""The matrix as Markdown: what holds at a glance, each cell with its counts, differences, faults."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from veriformer.declarations import DTYPES
from veriformer.matrix.cells import differences, label

MEANT = re.compile(r"[\\`*<|\[\]]|\b_|_\b")
"""What means something in Markdown; an underscore inside a word does not."""
WORDS = {"holds": "ok", "known": "known", "open": "open", "nothing": "not judged", "fails": "FAILS"}
ORDER = tuple(WORDS)
"""States from the best to the worst; the overview shows the worst of a library's variants."""
SHORT = {"float64": "f64", "float32": "f32", "bfloat16": "bf16", "float16": "f16"}
READING = (
    "A cell is one operation of one variant of a library, judged in the dtypes that are named.",
    "ok: every law that applies holds. known: laws fail only where a fault is declared with its reason; the table of "
    "faults says where a search was off, or ended there. FAILS: a law is broken. open: laws that "
    "could not be judged, for most of their cases were refused or time was over. not judged: no case was.",
    "laws: laws that held with at least one judged case. numbers: elements of results that were judged, over all "
    "cases. refused: cases declined by an exception, such as options that a library does not take together.",
    "effort: ci, pinned cases and a search; smoke, every pinned case, for what an earlier variant declares alike and "
    "for composites, whose budgets cost many runs of the reference; look, some of them, where each shape is compiled.",
    "worst: the largest error as a share of the derived error budget; above 1 would be a failure.",
)
"""How to read the tables."""


GLANCE = "The word for the worst of a library's variants, and how many variants there are."


def plain(words: str) -> str:
    """Words as Markdown that shows them as they are."""
    return MEANT.sub(r"\\\g<0>", words)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """A Markdown table; numbers: places of columns that are aligned to the right."""
    lines = ["| " + " | ".join(heads) + " |"]
    lines.append("|" + "|".join("--:" if place in numbers else "---" for place in range(len(heads))) + "|")
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def markdown(matrix: Mapping[str, Any]) -> str:
    """The whole page."""
    parts = ["# Compatibility matrix", _made(matrix), "\n".join(f"- {one}" for one in READING)]
    parts += ["## Libraries", _libraries(matrix), "## At a glance", GLANCE, _overview(matrix)]
    for library in matrix["libraries"]:
        cells = [cell for cell in matrix["cells"] if cell["library"] == library["name"]]
        if cells:
            parts += [f"## {library['title']}", _cells(cells)]
    parts += ["## Where conforming libraries differ", *_differences(matrix["cells"])]
    parts += ["## Faults", *_faults(matrix["cells"])]
    return "\n\n".join(parts) + "\n"


def _made(matrix: Mapping[str, Any]) -> str:
    lines = [f"Made by `veriformer matrix` and `veriformer report`, level {matrix['level']}."]
    for run in matrix["runs"]:
        about, cpu = run["environment"], run.get("cpu_seconds", 0) / 60
        took = f"{run['seconds'] / 60:.0f} minutes" + (f" ({cpu:.0f} of CPU)" if cpu else "")
        took += f" for {run['units']} variants" if run.get("units") else ""
        took += f", {run['kept']} of them kept from earlier runs" if run.get("kept") else ""
        lines.append(
            f"Run of {run['created'][:10]}: effort {run['effort']}, seed {run['seed']}, {took}; "
            f"veriformer {about['veriformer']}, Python {about['python']}, numpy {about['numpy']}, {about['platform']}."
        )
    return "\n".join(lines)


def _libraries(matrix: Mapping[str, Any]) -> str:
    rows = []
    for library in matrix["libraries"]:
        cells = [cell for cell in matrix["cells"] if cell["library"] == library["name"]]
        counts = [str(sum(cell["state"] == state for cell in cells) or "") for state in ORDER]
        versions = ", ".join(f"{name} {version}" for name, version in library["versions"].items())
        status = versions if library["status"] == "judged" else f"{library['status']}: `{library['install']}`"
        apart = f" in an environment of its own: {library['apart']}" if library["apart"] else ""
        status += apart if library["status"] != "judged" else ""
        status += "; ".join(["", *map(plain, library["trouble"])])
        rows.append((f"{library['title']} (`{library['name']}`)", status, str(len(cells) or ""), *counts,
                     f"{sum(cell['judged'] for cell in cells):,}" if cells else ""))  # fmt: skip
    heads = ("library", "versions", "cells", *WORDS.values(), "numbers")
    return table(heads, rows, range(2, 9))


def _overview(matrix: Mapping[str, Any]) -> str:
    """Operations by libraries: the worst word among a library's variants, with how many there are."""
    libraries = [
        one["name"] for one in matrix["libraries"] if any(c["library"] == one["name"] for c in matrix["cells"])
    ]
    rows = []
    for operation in sorted({cell["operation"] for cell in matrix["cells"]}):
        row = [operation]
        for name in libraries:
            mine = [c for c in matrix["cells"] if c["library"] == name and c["operation"] == operation]
            worst = max((cell["state"] for cell in mine), key=ORDER.index, default="")
            row.append(f"{WORDS[worst]} {len(mine)}" if mine else "")
        rows.append(row)
    return table(("operation", *libraries), rows)


def _cells(cells: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for cell in cells:
        counts = cell["counts"]
        left = {name: counts[name] for name in counts if name not in ("pass", "not_provided")}
        said = ", ".join(f"{count} {name}" for name, count in left.items())
        dtypes = " ".join(SHORT[name] for name in DTYPES if name in cell["dtypes"])
        row = (cell["variant"], cell["operation"], dtypes, WORDS[cell["state"]], cell["effort"])
        numbers = (cell["cases"], cell["refused"], f"{cell['judged']:,}", f"{cell['worst_ratio']:.2g}")
        rows.append((*row, str(cell["laws"]), said, *map(str, numbers)))
    heads = (
        "variant",
        "operation",
        "dtypes",
        "",
        "effort",
        "laws",
        "other verdicts",
        "cases",
        "refused",
        "numbers",
        "worst",
    )
    return table(heads, rows, (5, 7, 8, 9, 10))


def _differences(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """One table for each operation: the choice, each value, and who declares it."""
    found = differences(cells)
    parts = ["Each is a choice that is declared and judged as declared; none is a fault."]
    for operation in sorted({one["operation"] for one in found}):
        rows = [
            (f"{one['choice']}: {plain(one['meaning'])}" if first else "", plain(value), _folded(names))
            for one in found
            if one["operation"] == operation
            for first, (value, names) in zip([True] + [False] * len(one["values"]), one["values"].items(), strict=False)
        ]
        parts += [f"### {operation}", table(("choice", "value", "who"), rows)]
    return parts


def _folded(names: Sequence[str]) -> str:
    """`torch: default, math; jax: xla`."""
    by_library: dict[str, list[str]] = {}
    for name in names:
        library, _, variant = name.partition(":")
        by_library.setdefault(library, []).append(variant)
    return "; ".join(f"{library}: {', '.join(variants)}" for library, variants in by_library.items())


def _faults(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """Every row that does not hold, those of one reason together."""
    groups: dict[tuple[str, str, str, str], dict[str, dict[str, None]]] = {}
    for cell in cells:
        for fault in cell["faults"]:
            key = (cell["library"], fault["verdict"], fault["reason"] or fault["message"], fault["link"])
            group = groups.setdefault(key, {"cells": {}, "laws": {}, "dtypes": {}, "search": {}})
            group["cells"].setdefault(label(cell).partition(":")[2])
            group["laws"].setdefault(fault["law"])
            group["dtypes"].setdefault(SHORT[fault["dtype"]])
            if fault["search"].startswith("off"):
                group["search"].setdefault("search off")
    rows = []
    for (library, verdict, reason, link), group in groups.items():
        laws, where = ", ".join(group["laws"]), ", ".join([*group["dtypes"], *group["search"]])
        rows.append((library, ", ".join(group["cells"]), laws, where, verdict, plain(reason) + _linked(link)))
    heads = ("library", "variants", "laws", "dtypes", "verdict", "why")
    return [table(heads, rows)] if rows else ["None."]


def _linked(link: str) -> str:
    """The link in brackets; files of this folder are linked from here."""
    return f" ([{link.rpartition('/')[2]}]({link.removeprefix('reports/')}))" if link else ""
