"""What asv measured, read from its result files (format 2): one series of values for each benchmark and parameters.

asv keeps a folder for each machine, in it a file for each commit and environment. Metrics that are comparable across
machines (`track_…`) are recorded under the machine name `any`; seconds (`time_…`) under the machine's own.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from veriformer.calling import UsageError
from veriformer.history.checkout import Checkout, Commit

MACHINE = "any"
"""The machine name of comparable results."""
COMPARABLE, SECONDS = "track_", "time_"
"""How the names of benchmarks of either kind begin."""
FORMAT = 2
Key = tuple[str, tuple[str, ...]]
"""A benchmark's name and its parameters."""


@dataclass(frozen=True)
class Benchmark:
    """What asv's benchmarks.json says of one benchmark: `bench_costs.SoftmaxForward.track_cost`.

    parameters: their names; choices: what each may be. version: results of another one are not comparable.
    """

    name: str
    unit: str
    version: str
    parameters: tuple[str, ...]
    choices: tuple[tuple[str, ...], ...]

    @property
    def suite(self) -> str:
        """The module: bench_costs, bench_accuracy, bench_suite."""
        return self.name.partition(".")[0]

    @property
    def subject(self) -> str:
        """What is measured, as its own suite calls it: softmax-forward, an operation such as layer_norm."""
        between = self.name.split(".")[1:-1]
        joint = "-" if self.suite == "bench_costs" else "_"
        words = [re.sub(r"(?<=[a-z0-9])(?=[A-Z])", joint, part).lower() for part in between]
        return ".".join(words).removeprefix("time" + joint)

    @property
    def metric(self) -> str:
        """How it is measured: cost, bytes, worst ratio."""
        return self.name.rpartition(".")[2].partition("_")[2].replace("_", " ")

    @property
    def keys(self) -> Iterator[Key]:
        """Every combination of parameters, in asv's order."""
        return ((self.name, words) for words in itertools.product(*self.choices))


@dataclass(frozen=True)
class Series:
    """One benchmark with one choice of parameters: a value for each commit, None where there is none."""

    benchmark: Benchmark
    parameters: tuple[str, ...]
    values: tuple[float | None, ...]


@dataclass(frozen=True)
class History:
    """Commits that have results, the oldest first; with what each was measured; the series.

    elsewhere: how many commits with results are not among those that were asked for.
    """

    commits: tuple[Commit, ...]
    environments: tuple[str, ...]
    series: tuple[Series, ...]
    elsewhere: int = 0


def read_history(checkout: Checkout, commits: Sequence[Commit], machine: str = MACHINE) -> History:
    """The history of these commits under one machine's name: comparable metrics for `any`, else seconds.

    Raises UsageError where a file is not asv's.
    """
    kind = COMPARABLE if machine == MACHINE else SECONDS
    benchmarks = [one for one in read_benchmarks(checkout.results) if one.name.rpartition(".")[2].startswith(kind)]
    found, environments = _cells(checkout.results / machine, {one.name: one for one in benchmarks})
    kept = [commit for commit in commits if commit.hash in found]
    keys = [(one, key) for one in benchmarks for key in one.keys]
    series = [Series(one, key[1], tuple(found[c.hash].get(key) for c in kept)) for one, key in keys]
    return History(
        tuple(kept),
        tuple(environments[c.hash] for c in kept),
        tuple(series),
        len(found.keys() - {c.hash for c in kept}),
    )


def read_benchmarks(results: Path) -> list[Benchmark]:
    """What benchmarks.json lists, by name; nothing where there is no such file."""
    path = results / "benchmarks.json"
    if not path.is_file():
        return []
    with as_asv_writes(path):
        table = _read(path)
        return [
            Benchmark(
                name,
                str(entry["unit"]),
                str(entry["version"]),
                tuple(entry["param_names"]),
                tuple(tuple(word.strip("'\"") for word in choice) for choice in entry["params"]),
            )
            for name, entry in sorted(table.items())
            if isinstance(entry, dict)
        ]


def _cells(
    folder: Path, benchmarks: Mapping[str, Benchmark]
) -> tuple[dict[str, dict[Key, float | None]], dict[str, str]]:
    """For each commit what was measured, and with what; of several environments the last that ran."""
    found: dict[str, dict[Key, float | None]] = {}
    environments: dict[str, str] = {}
    for record in sorted(read_records(folder), key=lambda record: record.last):
        cells = record.cells(benchmarks)
        if any(value is not None for value in cells.values()):
            found.setdefault(record.commit, {}).update(cells)
            environments[record.commit] = record.environment
    return found, environments


@dataclass(frozen=True)
class Record:
    """One result file: the commit, the environment, and a table for each benchmark.

    A table has asv's columns; a value is a number, NaN (nothing to measure), or None (it failed).
    """

    commit: str
    environment: str
    tables: Mapping[str, Mapping[str, Any]]

    @property
    def last(self) -> float:
        """When its last benchmark began, in milliseconds since 1970."""
        return max((table.get("started_at") or 0 for table in self.tables.values()), default=0)

    def cells(self, benchmarks: Mapping[str, Benchmark]) -> dict[Key, float | None]:
        """The value of every benchmark that is still of the same version; None where it has none."""
        known = {name: table for name, table in self.tables.items() if name in benchmarks}
        return {
            (name, words): None if value is None or value != value else value
            for name, table in known.items()
            if str(table.get("version")) == benchmarks[name].version
            for words, value in values_of(table)
        }


def values_of(table: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], float | None]]:
    """Parameters and value of each cell of a benchmark in a result file.

    Raises TypeError or ValueError where there is something else than numbers, or another count of them.
    """
    words = list(itertools.product(*([word.strip("'\"") for word in choice] for choice in table["params"])))
    values = table["result"] or [None] * len(words)
    if not all(value is None or isinstance(value, (int, float)) for value in values):
        raise TypeError("a result that is no number")
    return zip(words, values, strict=True)


def read_records(folder: Path) -> Iterator[Record]:
    """The result files of a machine.

    Raises UsageError where one is not asv's.
    """
    for path in sorted(folder.glob("*.json")):
        if path.name == "machine.json":
            continue
        with as_asv_writes(path):
            data = _read(path)
            columns, rows = data["result_columns"], data["results"].items()
            tables = {name: dict(zip(columns, row, strict=False)) for name, row in rows}
            for table in tables.values():
                list(values_of(table))
            packages = [f"{name} {data['requirements'].get(name)}" for name in ("torch", "numpy")]
            environment = ", ".join([f"Python {data['python']}", *packages])
            found = Record(data["commit_hash"], environment, tables)
            if not isinstance(found.commit, str) or not isinstance(found.last, (int, float)):
                raise TypeError("commit_hash is no text, or started_at no number")
        yield found


@contextmanager
def as_asv_writes(path: Path) -> Iterator[None]:
    """Turn what goes wrong while a file is taken apart into one line about that file."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        what = f"{type(error).__name__}: {error}"
        raise UsageError(f"{path} is not as asv writes it ({what}); restore it with git, or delete it") from None


def _read(path: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if data["version"] != FORMAT:
        raise ValueError(f"version {data['version']}, wanted {FORMAT}")
    return data
