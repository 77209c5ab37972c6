"""Attentions that raise, exit, die, hang or print: for tests of the isolation, never run by default.

There are no FAULTS here: what must be seen is a verdict (error, crash, timeout), not a law.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
import warnings
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

FRAMEWORK = "numpy"
ABORT_FROM_KEYS = 5
HANG_FROM_QUERIES = 7


def _make(act: Callable[[int, int], object]) -> Callable[..., NDArray]:
    def attention(
        q: NDArray,
        k: NDArray,
        v: NDArray,
        *,
        causal: bool = False,
        scale: float | None = None,
    ) -> NDArray:
        act(q.shape[2], k.shape[2])
        key, value = (np.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (k, v))
        logits = q @ key.swapaxes(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
        triangle = np.arange(k.shape[2]) <= np.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2]
        logits = np.where(triangle | (not causal), logits, -np.inf)
        m = logits.max(axis=-1, keepdims=True)
        e = np.exp(logits - np.where(np.isneginf(m), 0, m))
        s = e.sum(axis=-1, keepdims=True)
        return (e @ value / np.where(s == 0, 1, s)).astype(q.dtype)

    return attention


def _raise(queries: int, keys: int) -> None:
    raise RuntimeError(f"got {queries} queries and {keys} keys; this implementation always raises")


def _exit(queries: int, keys: int) -> None:
    sys.exit(3)


def _exit_at_once(queries: int, keys: int) -> None:
    os._exit(0)


def _interrupt(queries: int, keys: int) -> None:
    raise KeyboardInterrupt


def _segfault(queries: int, keys: int) -> None:
    ctypes.string_at(0)


def _abort(queries: int, keys: int) -> None:
    if keys >= ABORT_FROM_KEYS:
        os.abort()


def _hang(queries: int, keys: int) -> None:
    while queries >= HANG_FROM_QUERIES:
        time.sleep(0.01)


def _recurse(queries: int, keys: int) -> None:
    _recurse(queries, keys)


def _print(queries: int, keys: int) -> None:
    print("attention", queries, keys)
    print("attention", queries, keys, file=sys.stderr)


def _write(queries: int, keys: int) -> None:
    os.write(1, b"raw bytes on descriptor 1\n")


def _warn(queries: int, keys: int) -> None:
    warnings.warn("this attention is deprecated", DeprecationWarning, stacklevel=3)


VARIANTS = {
    name: {"attention": _make(act)}
    for name, act in {
        "correct": lambda queries, keys: None,
        "raises": _raise,
        "exits": _exit,
        "exits_at_once": _exit_at_once,
        "interrupts": _interrupt,
        "segfaults": _segfault,
        "aborts_from_five_keys": _abort,
        "hangs_from_seven_queries": _hang,
        "recurses": _recurse,
        "prints": _print,
        "writes_to_descriptor": _write,
        "warns": _warn,
    }.items()
}
