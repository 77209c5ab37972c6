"""Judge and time the implementations for GPUs, in at most five minutes.

python benchmarks/gpu/run.py [--seconds 300] [--write] [--dry-run]

Judges them by `veriformer check --device cuda`, a part of the pinned cases of every law, then times them. --write puts
what came into reports/gpu.json and reports/gpu.md. --dry-run goes the same way on the CPU, in Triton's interpreter, at
tiny sizes, and writes nothing. Exit code 0; 1 where something is wrong; 4 where not everything could be judged, or
there is no CUDA device.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.metadata
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from page import NOT_RUN, markdown

REPORTS = Path(__file__).parents[2] / "reports"
TIMED = Path(__file__).with_name("timed.py")
DTYPES = "float32,float16,bfloat16"
TARGETS = (("triton",), ("torch_cuda",), ("torch:functional", "torch:rows", "torch:default", "torch:append"))
"""What is judged, in this order, those of a row by one process."""
SHARE = 0.5
"""Of the time for verdicts; the rest is for timing."""
START = 15.0
"""Seconds that a check may take beside its laws: starting, and ending the law that it is at."""
RESERVE = 20.0
"""Seconds before the end in which nothing is begun: what was begun may have to be compiled first."""
BAD = ("fail", "error", "crash", "timeout", "xpass", "suite_error")


def verdicts(device: str, seconds: float, dry: bool) -> list[dict[str, Any]]:
    """One record for each operation of each implementation, or one that says why there is none."""
    end, found = time.monotonic() + seconds, []
    for number, targets in enumerate(TARGETS):
        share = (end - time.monotonic()) / (len(TARGETS) - number) - START
        words = ["--device", device, "--effort", "look", "--dtype", DTYPES, "--timeout", "120"]
        if dry:
            words = ["--effort", "look", "--dtype", "float32", "--law", "sums-to-one", "--in-process"]
        found += checked(targets, words, max(share, 5.0))
    return found


def checked(targets: tuple[str, ...], words: list[str], seconds: float) -> list[dict[str, Any]]:
    """What `veriformer check` says of targets within a time, and a moment more."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "all.json"
        command = [sys.executable, "-m", "veriformer", "check", *targets, *words, "--max-time", f"{seconds:.0f}"]
        command += ["--json", str(path), "--output", folder]
        said = finished(command, seconds + START)
        if not path.exists():
            return [{"target": " ".join(targets), "said": said}]
        report = json.loads(path.read_text())
    return summed(report["rows"])


def times(device: str, seconds: float, dry: bool) -> list[dict[str, Any]]:
    """All rows of timings, by a process that is ended when time is over; if it breaks, it costs the row it is at."""
    from timed import timings

    end, found = time.monotonic() + seconds, []
    while True:
        left = end - time.monotonic()
        words = [device, f"{left - RESERVE:.1f}", str(len(found)), *(["tiny"] if dry else [])]
        rows, again, said = printed([sys.executable, str(TIMED), *words], max(left, 1.0))
        found += rows
        rest = [dataclasses.asdict(row) for row in timings(device, -math.inf, dry, len(found))]
        if not rest:
            return found
        if not again:
            found.append({**rest.pop(0), "said": said})
        if end - time.monotonic() < RESERVE:
            return found + rest


def printed(command: list[str], seconds: float) -> tuple[list[dict[str, Any]], bool, str]:
    """The rows that timed.py prints, whether it is to be called again for those that follow, and how it ended."""
    from timed import AGAIN

    with tempfile.TemporaryFile("w+") as file:
        said = finished(command, seconds, file)
        file.seek(0)
        lines = [line for line in file.read().splitlines(keepends=True) if line.endswith("\n")]
    rows = [json.loads(line) for line in lines if line.startswith("{")]
    return rows, f"{AGAIN}\n" in lines, said


def finished(command: list[str], seconds: float, output: Any = subprocess.DEVNULL) -> str:
    """The last line that a command prints as an error; it is ended, with what it started, when time is over."""
    process = subprocess.Popen(command, stdout=output, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        _, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return f"no answer within {seconds:.0f} s"
    return next(iter(reversed(errors.strip().splitlines())), f"exit code {process.returncode}")


def summed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Verdicts, the worst ratio and what failed, by implementation, operation and dtype."""
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for row in rows:
        key = (row["implementation"], row["operation"], row["dtype"])
        one = found.setdefault(key, {"counts": {}, "ratio": 0.0, "wrong": []})
        one["counts"][row["verdict"]] = one["counts"].get(row["verdict"], 0) + 1
        one["ratio"] = max(one["ratio"], row["ratio"] if isinstance(row["ratio"], (int, float)) else 0.0)
        if row["verdict"] in BAD:
            one["wrong"].append({"law": row["law"], "said": row.get("failure", {}).get("message", row["reason"])})
    names = ("implementation", "operation", "dtype")
    return [{**dict(zip(names, key, strict=True)), **one} for key, one in found.items()]


def facts(device: str) -> dict[str, Any]:
    """What the figures were taken with."""
    import torch
    from timed import l2_bytes

    found: dict[str, Any] = {"device": device, "torch": torch.__version__}
    if device.startswith("cuda"):
        found |= {"gpu": torch.cuda.get_device_name(device), "l2_bytes": l2_bytes(device), "cuda": torch.version.cuda}
    for name in ("triton", "veriformer"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def run(device: str, seconds: float, dry: bool) -> dict[str, Any]:
    """Everything, as the report holds it."""
    start = time.monotonic()
    record: dict[str, Any] = {"facts": facts(device), "verdicts": verdicts(device, seconds * SHARE, dry)}
    record["timings"] = times(device, start + seconds - time.monotonic(), dry)
    return {**record, "seconds": round(time.monotonic() - start, 1), "budget": seconds}


def exit_code(record: dict[str, Any]) -> int:
    """1 where something is wrong, 4 where something could not be judged, else 0."""
    if any(one.get("wrong") for one in record["verdicts"]):
        return 1
    if any(row["said"].startswith("wrong") for row in record["timings"]):
        return 1
    open_ones = [one for one in record["verdicts"] if "said" in one or {"not_run", "incomplete"} & set(one["counts"])]
    return 4 if open_ones else 0


def main() -> int:
    """Judge, time and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0, metavar="S", help="time for all of it (default 300)")
    parser.add_argument("--write", action="store_true", help="write reports/gpu.json and reports/gpu.md")
    parser.add_argument("--dry-run", action="store_true", help="the same on the CPU at tiny sizes, nothing written")
    given = parser.parse_args()
    if given.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # before a kernel is decorated, here and in what is started from here
    else:
        import torch

        if not torch.cuda.is_available():
            print("not run: no CUDA device")
            if given.write and not (REPORTS / "gpu.json").exists():
                (REPORTS / "gpu.md").write_text(NOT_RUN)
            return 4
    record = run("cpu" if given.dry_run else "cuda", given.seconds, given.dry_run)
    print(markdown(record))
    if given.write and not given.dry_run:
        (REPORTS / "gpu.json").write_text(json.dumps(record, indent=1) + "\n")
        (REPORTS / "gpu.md").write_text(markdown(record))
    return exit_code(record)


if __name__ == "__main__":
    sys.exit(main())
