"""What a failure leaves behind: a script that needs nothing of ours, and a file for `veriformer replay`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from veriformer.case import PRINTED, Case, json_values
from veriformer.report import FOLDER
from veriformer.report.record import failure_id, output_folder, plain_value, slug, write
from veriformer.report.script import save, script_of
from veriformer.running import Row
from veriformer.subject import Implementation

Kept = tuple[str, str]
"""A script's path, or why there is none, and the name by which the failure is run again, if it can be."""


def keep_failure(row: Row, implementation: Implementation, folder: Path) -> Kept:
    """Write the script and the replay file of a failing row."""
    name = failure_id(row)
    stem = folder / f"{slug(row.law.name)}-{name}"
    script = str(stem.with_suffix(".py"))
    try:
        save(script_of(row, implementation), stem.with_suffix(".py"))
    except Exception as error:  # one script that cannot be written must not end the run
        script = f"could not be written: {error!r}"
    write(stem.parent / f"{stem.name}.replay.json", json.dumps(replay_record(row, implementation)))
    case = row.failure.case if row.failure else None
    if case is not None and case.numbers > PRINTED:
        np.savez(stem.parent / f"{stem.name}.replay.npz", **dict(case.arrays))  # type: ignore[arg-type]
    return script, name if implementation.target else ""


def keep_if_failed(row: Row, implementation: Implementation) -> Kept:
    """The same in the usual folder, for a row that may have failed without a case."""
    return keep_failure(row, implementation, output_folder(FOLDER)[0]) if row.failure is not None else ("", "")


def replay_record(row: Row, implementation: Implementation) -> dict[str, object]:
    """What is needed to run one failing case again."""
    assert row.failure is not None
    options = implementation.options
    others = [
        full_record(value) if isinstance(value, Case) else plain_value(value) for value in row.failure.arguments[1:]
    ]
    return {
        "law": row.law.id, "implementation": row.implementation, "target": implementation.target, "dtype": row.dtype,
        "options": {
            "accepts": plain_value(options.accepts), "returns": list(options.returns),
            "framework": options.framework, "declare": plain_value(options.declare),
            "device": options.device,
        },
        "case": row.failure.case.to_json(), "others": others,
    }  # fmt: skip


def full_record(case: Case) -> dict[str, object]:
    """A case with all its arrays, however large."""
    return {**case.to_json(), "arrays": {name: json_values(array) for name, array in case.arrays.items()}}
