"""The JSON report: schema `veriformer/report/1`, rewritten whole after each item, valid at any moment."""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import os
import platform
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np

import veriformer
from veriformer.calling import UsageError
from veriformer.case import Case
from veriformer.catalogue import LEVEL, tentative
from veriformer.checking import Report, exit_code_of
from veriformer.declarations import Expected
from veriformer.report import FOLDER
from veriformer.running import Failure, Row
from veriformer.subject import Call, Implementation

SCHEMA = "veriformer/report/1"
FEW = 16
"""Results of a call are stored while they hold at most this many numbers."""


def row_record(row: Row, script: str = "", replay: str = "") -> dict[str, Any]:
    """One row as plain JSON values."""
    record: dict[str, Any] = {
        "law": row.law.id, "operation": row.law.operation, "kind": row.law.kind, "statement": row.law.statement,
        "source": row.law.source, "implementation": row.implementation, "dtype": row.dtype,
        "verdict": row.verdict, "reason": row.reason, "tentative": tentative(row.law),
        "cases": row.cases, "judged": row.judged, "refused": row.refused, "vacuous": row.vacuous,
        "masked": row.masked, "undetermined": row.undetermined, "ratio": number(row.ratio),
        "effective_bits": row.bits,
        "seconds": round(row.seconds, 4), "search": row.search, "withheld": row.withheld,
    }  # fmt: skip
    if row.expected:
        record["expected"] = expected_record(row.expected)
    if row.failure:
        record["failure"] = failure_record(row.failure) | {"script": script, "replay": replay}
    return record


def failure_record(failure: Failure) -> dict[str, Any]:
    """The minimal case of a failure, what it shows and the calls it takes."""
    return {
        "kind": failure.kind, "message": failure.message, "origin": failure.origin, "tries": failure.tries,
        "facts": {key: plain_value(value) for key, value in failure.facts.items()},
        "case": failure.case.to_json(), "line": failure.case.describe(),
        "others": [plain_value(value) for value in failure.arguments[1:]],
        "calls": [call_record(call) for call in failure.calls],
    }  # fmt: skip


def call_record(call: Call) -> dict[str, Any]:
    """One call; results only where they are few."""
    few = sum(result.size for result in call.outcome.results) <= FEW
    results = [plain_value(result) for result in call.outcome.results] if few else []
    return {"operation": call.operation, "line": call.case.describe(), "outcome": call.outcome.kind, "results": results}


def expected_record(entry: Expected) -> dict[str, Any]:
    """An expected failure as it was declared."""
    return {
        "law": entry.law,
        "reason": entry.reason,
        "link": entry.link,
        "when": dict(entry.when),
        "where": entry.where,
    }


def plain_value(value: Any) -> Any:
    """A value as JSON has it; what is not finite becomes a word."""
    if isinstance(value, np.ndarray):
        return plain_value(value.tolist())
    if isinstance(value, np.generic):
        return plain_value(value.item())
    if isinstance(value, float):
        return number(value)
    if isinstance(value, (list, tuple)):
        return [plain_value(one) for one in value]
    if isinstance(value, Mapping):
        return {str(key): plain_value(one) for key, one in value.items()}
    if isinstance(value, Case):
        return value.to_json()
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def number(value: float) -> float | str:
    """The number, or "nan", "inf", "-inf"."""
    return float(value) if math.isfinite(value) else str(float(value))


def header_record(report: Report) -> dict[str, Any]:
    """Everything but the rows."""
    settings = report.settings
    return {
        "schema": SCHEMA,
        "level": LEVEL,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "complete": report.complete,
        "exit_code": report.exit_code if report.complete else None,
        "counts": report.counts(),
        "missing": report.missing,
        "seconds": round(report.seconds, 3),
        "settings": {
            "effort": settings.effort, "seed": settings.seed, "max_time": settings.max_time,
            "isolate": settings.isolate, "laws": list(settings.laws), "dtypes": list(settings.dtypes),
        },
        "environment": environment(),
        "implementations": [implementation_record(one) for one in report.implementations],
    }  # fmt: skip


def header_of_rows(report: Report, rows: Sequence[str]) -> dict[str, Any]:
    """The header where rows exist only as text, as they do when several processes share a run."""
    records = [json.loads(row) for row in rows]
    verdicts = [record["verdict"] for record in records]
    code = exit_code_of([record["verdict"] for record in records if not record["tentative"]], report.missing)
    return header_record(report) | {
        "exit_code": code if report.complete else None,
        "counts": {name: verdicts.count(name) for name in dict.fromkeys(verdicts)},
        "seconds": round(sum(record["seconds"] for record in records), 3),
    }


def environment() -> dict[str, str]:
    """What the judging side ran on."""
    return {
        "veriformer": veriformer.__version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "numpy": np.__version__,
        "hypothesis": hypothesis.__version__,
        "threads": os.environ.get("OMP_NUM_THREADS", "default"),
    }


def implementation_record(implementation: Implementation) -> dict[str, Any]:
    """An implementation with its parameter mapping and the capabilities in force."""
    about = implementation.description
    return {
        "name": implementation.name,
        "target": implementation.target,
        "framework": about.framework,
        "versions": dict(about.versions),
        "device": about.device,
        "operations": {
            operation: {
                "accepts": sorted(plan.accepts),
                "mapping": plan.mapping(),
                "dtypes": list(implementation.dtypes(operation)),
                "capabilities": plain_value(about.capabilities[operation].changed()),
            }
            for operation, plan in about.plans.items()
        },
    }


def slug(text: str) -> str:
    """The text as a file name."""
    return re.sub(r"[^A-Za-z0-9.-]+", "-", text).strip("-") or "report"


def failure_id(row: Row) -> str:
    """A short name for a failing item, the same in every run."""
    return hashlib.sha1(row.id.encode(), usedforsecurity=False).hexdigest()[:6]


class Writer:
    """Keeps JSON files in step with a report: one for each implementation, and perhaps one for all.

    Rows are serialised once; a file is replaced by renaming, so that a reader and a killed run
    always find a valid one, with complete = false until the end.
    """

    def __init__(self, report: Report, folder: Path, whole: Path | None = None) -> None:
        self.report, self.folder, self.whole = report, folder, whole
        self.rows: dict[str, list[str]] = {one.name: [] for one in report.implementations}
        self.paths: dict[str, Path] = {}
        for name in self.rows:
            path = folder / f"{slug(name)}.json"
            taken = path in self.paths.values()
            self.paths[name] = folder / f"{slug(name)}-{len(self.paths)}.json" if taken else path
        self.all: list[str] = []
        self.finish()

    def add(self, row: Row, script: str = "", replay: str = "") -> None:
        """Add a row and rewrite the files it belongs to."""
        text = json.dumps(row_record(row, script, replay), allow_nan=False)
        self.rows[row.implementation].append(text)
        self.all.append(text)
        self._write(row.implementation)

    def finish(self) -> None:
        """Rewrite every file with the final header."""
        for name in self.rows:
            self._write(name)

    def _write(self, name: str) -> None:
        header = header_record(self.report)
        mine = {**header, "implementations": [i for i in header["implementations"] if i["name"] == name]}
        write(self.paths[name], assemble(mine, self.rows[name]))
        if self.whole:
            write(self.whole, assemble(header, self.all))


def assemble(header: Mapping[str, Any], rows: list[str]) -> str:
    """The file's text from the header and rows that are text already."""
    head = json.dumps(header, indent=1, allow_nan=False)
    return head[:-2] + ',\n "rows": [\n  ' + ",\n  ".join(rows) + "\n ]\n}\n"


def write(path: Path, text: str) -> None:
    """Replace a file in one step."""
    temporary = path.with_name(f".writing-{os.getpid()}-{path.name}")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def writable(path: Path) -> None:
    """Nothing, where a file can be written there.

    Raises UsageError where it cannot, before anything is judged.
    """
    try:
        if path.is_dir():
            raise IsADirectoryError(0, "it is a folder")
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}; name a file in a folder that exists") from None


def output_folder(wanted: str, what: str = "reports and scripts") -> tuple[Path, str]:
    """The folder for what a command leaves behind, and a line to print where it could not be the wanted one."""
    path = Path(wanted)
    try:
        ours = [home for home in (path, path.parent) if home.name == FOLDER and not home.exists()]
        path.mkdir(parents=True, exist_ok=True)
        for home in ours:  # nobody commits what one run left behind
            (home / ".gitignore").write_text("*\n", encoding="utf-8")
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        other = Path(tempfile.mkdtemp(prefix="veriformer-"))
        return other, f"{wanted} cannot be written ({error.strerror}); {what} are in {other}"
    return path, ""
