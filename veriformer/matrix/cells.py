"""From the report of a check to the cells of the matrix: one operation of one variant each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from veriformer.checking import RED
from veriformer.declarations import DTYPES, Capabilities

OPEN = ("incomplete", "not_run")
MEANS = ("dtypes", "devices", "widths", "blocks", "strides", "compiles_per_shape")
"""Capabilities that say where an implementation works, not what it calculates."""
ABOUT = {
    "causal_alignment": frozenset({"causal"}),
    "causal_with_mask": frozenset({"causal", "mask"}),
    "mask_with_bias": frozenset({"mask", "bias"}),
    "mask_means": frozenset({"mask"}),
    "empty_row": frozenset({"mask"}),
    "nonpositive_scale": frozenset({"scale"}),
    "scale_power_of_two": frozenset({"scale"}),
    "infinite_bias": frozenset({"bias"}),
    "bias_gradient": frozenset({"bias"}),
    "smoothing": frozenset({"label_smoothing"}),
    "all_ignored": frozenset({"ignore_index"}),
    "weight_decay": frozenset({"weight_decay"}),
    "zero_temperature": frozenset({"temperature"}),
}
"""Keywords that a choice is about; without them it says nothing of an implementation."""


def cells_of(report: Mapping[str, Any], unit: str, only: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The cells of a check's report of one implementation, as plain JSON values.

    unit: library:variant. only: operations; all if empty.
    """
    library, _, variant = unit.partition(":")
    return [
        {
            **cell_of([row for row in report["rows"] if row["operation"] == name], library, variant, name, facts),
            "effort": report["settings"]["effort"],
        }
        for name, facts in report["implementations"][0]["operations"].items()
        if not only or name in only
    ]


def cell_of(
    rows: Sequence[Mapping[str, Any]], library: str, variant: str, operation: str, facts: Mapping[str, Any]
) -> dict[str, Any]:
    """One cell: how many laws and cases, the worst ratio, and every failure, expected or not."""
    counted = [row for row in rows if not row["tentative"]]
    ratios = [row["ratio"] for row in counted if row["verdict"] == "pass" and isinstance(row["ratio"], float)]
    verdicts = [row["verdict"] for row in counted]
    return {
        "library": library,
        "variant": variant,
        "operation": operation,
        "state": state_of(counted),
        "dtypes": [dtype for dtype in DTYPES if any(row["dtype"] == dtype for row in rows)],
        "laws": len({row["law"] for row in counted if row["verdict"] == "pass"}),
        "counts": {verdict: verdicts.count(verdict) for verdict in sorted(set(verdicts))},
        "cases": sum(row["cases"] for row in counted),
        "judged": sum(row["judged"] for row in counted),
        "refused": sum(row["refused"] for row in counted),
        "masked": sum(row["masked"] for row in counted),
        "worst_ratio": max(ratios, default=0.0),
        "effective_bits": {row["dtype"]: row["effective_bits"] for row in counted if row["effective_bits"] is not None},
        "seconds": round(sum(row["seconds"] for row in counted), 1),
        "choices": dict(facts["capabilities"]),
        "takes": list(facts["accepts"]),
        "faults": [fault_of(row) for row in counted if row["verdict"] in (*RED, "xfail", "suite_error", *OPEN)],
    }


def state_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """fails | open | known | holds | nothing: the most serious thing there is to say of a cell's rows.

    known: nothing fails but what is declared with a reason. open: some laws could not be judged, most cases
    refused or out of time. nothing: no case was judged at all, which is never called holding.
    """
    verdicts = {row["verdict"] for row in rows}
    if verdicts & {*RED, "suite_error"}:
        return "fails"
    if not sum(row["judged"] for row in rows) and "xfail" not in verdicts:
        return "nothing"
    if verdicts & set(OPEN):
        return "open"
    return "known" if "xfail" in verdicts else "holds"


def fault_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """What a row that does not hold says: the case and message of a failure, reason and link of an expected one."""
    failure, expected = row.get("failure", {}), row.get("expected", {})
    return {
        "law": row["law"],
        "dtype": row["dtype"],
        "verdict": row["verdict"],
        "reason": last_line(row["reason"]),
        "case": failure.get("line", ""),
        "message": failure.get("message", ""),
        "link": expected.get("link", ""),
        "search": row["search"],
    }


def last_line(text: str) -> str:
    """The last line of a traceback, or the line itself."""
    lines = text.strip().splitlines()
    return lines[-1] if lines else ""


def differences(cells: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Where conforming cells differ: operation, choice, its meaning, and the cells by the value that they declare.

    Cells that fail say nothing of what conforms, nor do those that lack what a choice is about.
    """
    found = []
    conforming = [cell for cell in cells if cell["state"] in ("holds", "known")]
    for operation in dict.fromkeys(cell["operation"] for cell in conforming):
        for name, choice in Capabilities.__dataclass_fields__.items():
            mine = [cell for cell in conforming if cell["operation"] == operation and _speaks(cell, name)]
            values: dict[str, list[str]] = {}
            for cell in mine:
                values.setdefault(said(cell["choices"].get(name, choice.default)), []).append(label(cell))
            if len(values) > 1:
                text = choice.metadata["text"]
                found.append({"operation": operation, "choice": name, "meaning": text, "values": values})
    return found


def _speaks(cell: Mapping[str, Any], name: str) -> bool:
    """Whether a choice means anything to a cell."""
    return name not in MEANS and ABOUT.get(name, frozenset()) <= set(cell["takes"])


def label(cell: Mapping[str, Any]) -> str:
    """`library:variant`."""
    return f"{cell['library']}:{cell['variant']}"


def said(value: Any) -> str:
    """A declared value in a few words."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {one}" for key, one in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "any"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
