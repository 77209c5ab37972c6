"""One of two processes that alternate: it does one sample of the package's own work when it is asked to.

Run by path with the import path set to a worktree, hence it asks of the package only what every version has. A
question is a line, one of TASKS; an answer is a line of JSON, with "error" where it cannot be done.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

IMPORT = "import time; t = time.process_time(); import veriformer.checking; print(time.process_time() - t)"


def attention(q, k, v, *, mask=None, causal=False, scale=None):  # type: ignore[no-untyped-def]
    """What is judged: scaled dot-product attention, the same in both processes."""
    each, right = q.shape[1] // k.shape[1], k.shape[2] - q.shape[2]
    k, v = np.repeat(k, each, 1), np.repeat(v, each, 1)
    logits = q @ k.swapaxes(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    seen = (np.arange(k.shape[2]) - np.arange(q.shape[2])[:, None] <= right) | (not causal)
    seen = seen if mask is None else seen & mask
    logits = np.where(seen, logits, -np.inf)
    top = logits.max(-1, keepdims=True, initial=-np.inf)
    weights = np.exp(logits - np.where(np.isneginf(top), 0, top))
    total = weights.sum(-1, keepdims=True)
    return (weights / np.where(total == 0, 1, total)).astype(q.dtype) @ v


def imported() -> dict[str, Any]:
    """CPU seconds of importing the package in a fresh interpreter, the way that a command does."""
    done = subprocess.run([sys.executable, "-P", "-c", IMPORT], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    return {"seconds": float(done.stdout)}


def judged() -> dict[str, Any]:
    """CPU seconds of judging one attention function in this process at smoke effort, and how many cases that were."""
    from veriformer.checking import check

    start = time.process_time()
    report = check(attention=attention, effort="smoke", dtypes=["float32"])
    seconds = time.process_time() - start
    red = [row.id for row in report.rows if row.verdict not in ("pass", "not_provided")]
    if red:
        raise RuntimeError(f"a correct function did not pass {red[0]}")
    return {"seconds": seconds, "cases": sum(row.judged for row in report.rows)}


def placed() -> dict[str, Any]:
    """Where the package lies."""
    import veriformer

    return {"place": str(veriformer.__file__)}


TASKS: dict[str, Callable[[], dict[str, Any]]] = {"place": placed, "import": imported, "judge": judged}


def main() -> None:
    """Answer until there are no more questions."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing that is printed elsewhere is an answer
    for line in sys.stdin:
        try:
            answer = TASKS[line.strip()]()
        except Exception as error:  # an older or broken package may raise anything
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
