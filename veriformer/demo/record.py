"""What a demo leaves behind: demo.json, valid at any moment, and the pictures beside it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from veriformer.demo.pictures import Curve, Thought, example_picture, halting_picture, loss_picture
from veriformer.demo.tasks import Pointers
from veriformer.demo.training import GOOD, JUDGED, Run
from veriformer.report.record import environment, write

SCHEMA = "veriformer/demo/1"


def save(folder: Path, runs: Sequence[Run], seed: int, *, complete: bool) -> list[str]:
    """Write the record and the pictures; the names of the files."""
    pictures = drawn(runs, seed)
    for name, text in pictures.items():
        write(folder / name, text)
    record = {
        "schema": SCHEMA, "complete": complete, "seed": seed, "judged": JUDGED, "wanted": GOOD,
        "environment": environment() | {"torch": torch.__version__},
        "files": list(pictures), "tasks": [task_record(run) for run in runs],
    }  # fmt: skip
    write(folder / "demo.json", json.dumps(whole(record), indent=1, allow_nan=False) + "\n")
    return [*pictures, "demo.json"]


def drawn(runs: Sequence[Run], seed: int) -> dict[str, str]:
    """File name -> picture; those of halting only where a model halts."""
    trained = [run for run in runs if run.losses]
    curves = [Curve(run.task.name, run.losses, run.learned_at) for run in trained]
    pictures = {"loss.svg": loss_picture(curves, seed)} if curves else {}
    for run in trained:
        if isinstance(run.task, Pointers):
            thought = Thought(
                run.halting, run.learned_at, run.task.max_steps, run.by_hops, run.spread, run.example
            )  # fmt: skip
            pictures["halting.svg"] = halting_picture(thought)
            if run.example:
                pictures["example.svg"] = example_picture(thought)
    return pictures


def task_record(run: Run) -> dict[str, Any]:
    """One task as plain JSON values."""
    record = {
        "task": run.task.name, "title": run.task.title, "model": run.task.model,
        "parameters": len(run.flat.vector), "steps": run.step, "learned_at": run.learned_at,
        "cpu_seconds": run.seconds, "exact_match": run.exact, "checks": run.checks, "losses": run.losses,
    }  # fmt: skip
    if run.halting:
        record["halting"] = {
            "max_steps": run.task.max_steps if isinstance(run.task, Pointers) else None,
            "mean_step_by_hops": run.by_hops, "shares_by_hops": run.spread, "example": run.example,
            "while_training": run.halting,
        }  # fmt: skip
    return record


def whole(value: Any) -> Any:
    """JSON values: numbers to six digits, null for those that are none."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: whole(part) for name, part in value.items()}
    return [whole(part) for part in value] if isinstance(value, (list, tuple)) else value
