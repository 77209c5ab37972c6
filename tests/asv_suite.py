"""asv's suite as asv's own discovery sees it, in a process of its own, and what is refused in it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from toys import run_python

DISCOVER = """
import json, sys
sys.path.insert(0, sys.argv[1])
from asv_runner.benchmarks._base import _get_first_attr
from asv_runner.discovery import disc_benchmarks
found = [
    {"name": one.name, "type": one.type, "unit": one.unit, "params": one.params,
     "version": _get_first_attr(one._attr_sources, "version", None)}
    for one in disc_benchmarks(sys.argv[2])
]
ours = sorted(name for name in sys.modules if name.partition(".")[0] == sys.argv[2].rpartition("/")[2])
print(json.dumps({"benchmarks": found, "modules": ours}))
"""
BETTER_WHEN_MORE = {
    "speedup", "speed", "speeds", "throughput", "second", "ops", "flops", "gflops", "tflops", "flop", "bandwidth",
    "tokens", "efficiency", "fraction", "rate", "hits", "percent", "gain", "score", "accuracy", "bps", "gbps", "hz",
    "faster", "saved", "utilization",
}  # fmt: skip
"""Words of quantities of which more is better; for asv less is always better, and it would call a gain a loss."""


def discovered(folder: Path) -> dict[str, Any]:
    """benchmarks: name, type, unit, params and version of each; modules: what of the folder was imported."""
    done = run_python("-c", DISCOVER, str(folder.parent), str(folder), folder=folder.parent)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def words(text: str) -> set[str]:
    """The words of a name: of tokens_perSecond tokens, per, second; s after a stroke is second."""
    text = re.sub(r"/\s*s(ec)?\b", " second", text)
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", text)
    return {part.lower() for part in (*parts, *re.findall(r"[a-z]+", text.lower()))}


def complaints(benchmarks: list[dict[str, Any]]) -> list[str]:
    """A line for each benchmark whose name or unit says that more is better, or that lacks a version or a unit."""
    found = []
    for one in benchmarks:
        said = words(one["name"].partition(".")[2]) | words("" if one["unit"] == "seconds" else one["unit"])
        said |= {"speedup"} if {"speed", "up"} <= said else set()
        if bad := sorted(said & BETTER_WHEN_MORE):
            found.append(f"{one['name']}: {bad[0]}: for asv less is better; record the cost instead")
        if one["version"] is None:
            found.append(f"{one['name']}: no version: any change of its text would discard its history")
        if one["type"] == "track" and one["unit"] in ("", "unit"):
            found.append(f"{one['name']}: no unit")
    return found
