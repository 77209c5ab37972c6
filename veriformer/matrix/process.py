"""One variant judged by `veriformer check` in a process of its own, and what is kept of it for the next time."""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import veriformer
from veriformer.libraries import versions_of
from veriformer.matrix.units import Unit
from veriformer.processes import ONE_THREAD
from veriformer.report.record import slug, write
from veriformer.running import EFFORTS

GRACE = 300.0
"""Seconds beyond the time limit that a process may take to import its library and to write what it found."""
PATIENCE = 120.0
"""Seconds for a call: the first one of a library may import and compile a lot, beside other variants."""
WITHOUT_LIMIT = 3600.0
"""Seconds that a process may take where no limit is given."""


APART = ("impls", "matrix", "report", "history", "timing", "demo", "benchmarks")
"""Folders of ours that have no part in a verdict; of impls/ each report depends on its own adapter."""
BENEATH = ("numpy", "torch", "jaxlib", "mlx-cpu", "onnx", "hypothesis")
"""Packages that results depend on beside those that an adapter names."""
COMPILED = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
"""What one process compiles with XLA the others need not: variants of several libraries call the same functions."""


@dataclass(frozen=True)
class Way:
    """How the variants are judged. effort, seed, dtypes and laws as for check; max_time: seconds for each, or None.

    No unit gets more effort than its most.
    """

    effort: str = "ci"
    seed: int = 0
    dtypes: tuple[str, ...] = ()
    laws: tuple[str, ...] = ()
    max_time: float | None = None

    def effort_for(self, unit: Unit) -> str:
        """The effort for a unit."""
        return min(self.effort, unit.most, key=list(EFFORTS).index)

    def size_of(self, unit: Unit) -> tuple[bool, int, int]:
        """What a unit costs, roughly: whether it compiles each shape, its effort, how many operations it has."""
        return unit.most == "look", list(EFFORTS).index(self.effort_for(unit)), len(unit.operations)


@dataclass(frozen=True)
class Judged:
    """What became of a variant: the report of the check, or trouble in one line. kept: from an earlier run."""

    unit: Unit
    report: Mapping[str, Any] | None
    trouble: str = ""
    kept: bool = False


def judge(unit: Unit, way: Way, folder: Path, stop: threading.Event, fresh: bool = False) -> Judged:
    """Judge a variant, unless the folder holds a complete report of the same code, versions and way.

    stop: ends the process early when it is set.
    """
    place = folder / f"{_file(unit, way)}.json"
    key = key_of(unit, way)
    if not fresh and (report := _kept(place, key)) is not None:
        return Judged(unit, report, kept=True)
    place.unlink(missing_ok=True)
    trouble = _run(unit, way, folder, place, stop)
    report = _read(place)
    if report is None or not report.get("complete"):
        return Judged(unit, None, trouble or "the process ended before its report was complete")
    write(place.with_suffix(".key"), json.dumps({"key": key, "versions": _versions(report)}))
    return Judged(unit, report)


def key_of(unit: Unit, way: Way) -> str:
    """What a kept report must agree with: the adapter's text, laws and suite, what is installed, what was asked."""
    asked = (
        unit.target,
        unit.operations,
        way.effort_for(unit),
        way.seed,
        way.dtypes or unit.dtypes,
        way.laws,
        way.max_time,
    )
    said = [suite(), sys.version, repr(versions_of(BENEATH)), repr(asked), *_texts(unit.module)]
    return hashlib.sha256("\n".join(said).encode()).hexdigest()


@functools.cache
def suite() -> str:
    """A digest of everything here that has a part in a verdict."""
    root = Path(veriformer.__file__).parent
    paths = (path.relative_to(root) for path in root.rglob("*.py"))
    texts = (f"{path} {(root / path).read_text(encoding='utf-8')}" for path in paths if path.parts[0] not in APART)
    return hashlib.sha256("\n".join(sorted(texts)).encode()).hexdigest()


def _texts(module: str) -> list[str]:
    """The text of an adapter, then those of the adapters that it is made of."""
    spec = importlib.util.find_spec(module)
    text = Path(spec.origin).read_text(encoding="utf-8") if spec is not None and spec.origin else ""
    package = module.rpartition(".")[0]
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
    names = [node.module for node in nodes if node.module and package and node.module.startswith(f"{package}.")]
    names += [f"{package}.{one.name}" for node in nodes if node.module == package for one in node.names]
    return [text, *(part for name in dict.fromkeys(names) for part in _texts(name))]


def _file(unit: Unit, way: Way) -> str:
    """A name that no run of another effort, or of some laws or dtypes alone, has."""
    part = "some" if way.laws or way.dtypes or way.max_time is not None else ""
    return slug(f"{unit.name} {unit.part} {way.effort_for(unit)} {part}")


def _versions(report: Mapping[str, Any]) -> dict[str, str]:
    return dict(report["implementations"][0]["versions"])


def _kept(place: Path, key: str) -> Mapping[str, Any] | None:
    """An earlier report, if it is complete and nothing it depends on has changed."""
    report, about = _read(place), _read(place.with_suffix(".key"))
    if report is None or about is None or not report.get("complete") or about.get("key") != key:
        return None
    now = versions_of(about["versions"])
    return report if all(about["versions"][name] == version for name, version in now.items()) else None


def _read(place: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(place.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _words(unit: Unit, way: Way, folder: Path, place: Path) -> list[str]:
    words = [
        sys.executable,
        "-m",
        "veriformer",
        "check",
        unit.target,
        "--offline",
        "--timeout",
        str(PATIENCE),
        "--effort",
        way.effort_for(unit),
    ]
    words += ["--seed", str(way.seed), "--json", str(place), "--output", str(folder / _file(unit, way))]
    words += [] if way.max_time is None else ["--max-time", str(way.max_time)]
    laws = way.laws or (unit.operations if unit.part else ())
    for flag, values in (("--dtype", way.dtypes or unit.dtypes), ("--law", laws)):
        words += [word for value in values for word in (flag, value)]
    return words


def _run(unit: Unit, way: Way, folder: Path, place: Path, stop: threading.Event) -> str:
    """Run the check; the last line it wrote to standard error where it did not end as it should, else nothing."""
    cache = (folder / "compiled").absolute()
    limit = WITHOUT_LIMIT if way.max_time is None else way.max_time + GRACE
    with (folder / f"{_file(unit, way)}.log").open("w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(
            _words(unit, way, folder, place),
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log,
            env={**os.environ, **dict.fromkeys(ONE_THREAD, "1"), **COMPILED, "JAX_COMPILATION_CACHE_DIR": str(cache)},
            start_new_session=True,
        )  # fmt: skip
        try:
            code = _code(process, limit, stop)
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if code is None:
            return "interrupted" if stop.is_set() else f"no end within {limit:.0f} s"
        log.seek(0)
        lines = [line.strip() for line in log if line.strip()]
    if code in (0, 1, 4):
        return ""
    return lines[-1] if lines else f"the process ended with {code}"


def _code(process: subprocess.Popen[bytes], limit: float, stop: threading.Event) -> int | None:
    """The exit code, or None where the time or the run is over first."""
    end = time.monotonic() + limit
    while time.monotonic() < end and not stop.is_set():
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(0.2)
    return None
