"""Small git repositories with result files as asv writes them, for the tests of `veriformer history`."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from veriformer import cli

CONFIGURATION = {"version": 1, "project": "toy", "repo": ".", "results_dir": "reports/asv", "html_dir": ".asv/html"}
COLUMNS = ["result", "params", "version", "started_at", "duration"]
IMPLEMENTATIONS = ["'numpy:plain'", "'torch:functional'"]
COST, BYTES = "bench_costs.SoftmaxForward.track_cost", "bench_costs.SoftmaxForward.track_bytes"
RATIO, TIME = "bench_accuracy.LayerNorm.track_worst_ratio", "bench_costs.TimeSoftmaxForward.time_call"
IMPORT = "bench_suite.track_import_cost"
PARAMETERS = {
    COST: ([IMPLEMENTATIONS], ["implementation"], "yardsticks"),
    BYTES: ([IMPLEMENTATIONS], ["implementation"], "bytes"),
    RATIO: ([["'numpy:plain'"], ["'float32'", "'bfloat16'"]], ["implementation", "dtype"], "budgets"),
    TIME: ([IMPLEMENTATIONS], ["implementation"], "seconds"),
    IMPORT: ([], [], "unit"),
}


def git(root: Path, *words: str) -> str:
    """What git says in a repository whose commits have fixed dates."""
    who = {"GIT_AUTHOR_NAME": "A", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "A", "GIT_COMMITTER_EMAIL": "a@b"}
    when = {"GIT_AUTHOR_DATE": "2026-03-01T12:00:00+0000", "GIT_COMMITTER_DATE": "2026-03-01T12:00:00+0000"}
    done = subprocess.run(
        ["git", *words], cwd=root, env={**os.environ, **who, **when}, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def repository(root: Path, subjects: tuple[str, ...]) -> list[str]:
    """A repository with asv.conf.json and a commit for each subject, on branch main; their hashes."""
    root.mkdir(parents=True, exist_ok=True)
    git(root, "init", "-q", "-b", "main")
    (root / "asv.conf.json").write_text(json.dumps(CONFIGURATION))
    hashes = []
    for number, subject in enumerate(subjects):
        (root / "file").write_text(str(number))
        git(root, "add", "file", "asv.conf.json")
        git(root, "commit", "-q", "-m", subject)
        hashes.append(git(root, "rev-parse", "HEAD"))
    return hashes


def benchmarks(root: Path, version: str = "1", **more: Any) -> None:
    """Write benchmarks.json."""
    table: dict[str, Any] = {
        name: {"name": name, "params": params, "param_names": names, "unit": unit, "version": version, "type": "track"}
        for name, (params, names, unit) in PARAMETERS.items()
    }
    put(root / "reports/asv/benchmarks.json", {**table, "version": 2, **more})


def result(
    root: Path,
    commit: str,
    values: dict[str, list[float | None] | None],
    *,
    machine: str = "any",
    version: str = "1",
    started: float = 1000,
    environment: str = "env",
) -> Path:
    """Write one result file: for each benchmark a value for each choice of parameters."""
    rows = {
        name: [found, PARAMETERS[name][0], version, started, 1.0][: None if found else 4]
        for name, found in values.items()
    }
    path = root / "reports/asv" / machine / f"{commit[:8]}-{environment}.json"
    return put(path, {
        "commit_hash": commit, "env_name": environment, "date": 1, "params": {"machine": machine}, "python": "3.11",
        "requirements": {"torch": "2.13.0", "numpy": "2.4.6"}, "env_vars": {}, "result_columns": COLUMNS,
        "results": rows, "durations": {}, "version": 2,
    })  # fmt: skip


def put(path: Path, data: Any) -> Path:
    """Write JSON and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data))
    return path


def run(*words: str) -> int:
    """The exit code of `veriformer history`."""
    with pytest.raises(SystemExit) as end:
        cli.main(["history", *words])
    assert isinstance(end.value.code, int)
    return end.value.code


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line of a usage error."""
    assert run(*words) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("veriformer: "), lines
    return lines[0]
