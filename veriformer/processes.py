"""Processes that must not outlive ours: the groups they are in, the kernel's help, exit codes in words."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_DEATH_SIGNAL, _ADOPT = 1, 36
"""prctl's words for a signal at the parent's death, and for becoming the parent of orphaned descendants."""
_LINUX = sys.platform == "linux"
_LIBRARY = ctypes.CDLL(None, use_errno=True) if _LINUX else None
"""The C library, loaded before any fork."""


def exit_words(code: int) -> str:
    """An exit code as people say it, with the signal's name."""
    if code < 0:
        with contextlib.suppress(ValueError):
            return signal.Signals(-code).name
        return f"signal {-code}"
    return f"exit code {code}"


def die_with_parent() -> None:
    """Have the kernel end this process when the one that started it ends, however that comes; on Linux only."""
    if _LIBRARY is not None:
        _LIBRARY.prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


def lead() -> None:
    """Make this process the first of a group, which `end` ends with it, and have it die with its parent."""
    die_with_parent()
    with contextlib.suppress(PermissionError):  # it leads a session already
        os.setpgid(0, 0)


def adopt() -> None:
    """Become the parent of descendants whose own parent ends, so that `end_children` finds them; on Linux only."""
    if _LIBRARY is not None:
        _LIBRARY.prctl(_ADOPT, 1, 0, 0, 0)


def end(pid: int) -> None:
    """End a process and the group that it leads, if it leads one."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def end_children() -> None:
    """End every descendant of this process, also those that left its group, as far as the kernel names them."""
    while found := _children():
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in found:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _children() -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    except OSError:
        return []


def give_up_first() -> None:
    """Let the kernel take this process, not the one that judges, where memory runs out; on Linux only."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def fill_memory() -> None:
    """Have the C library fill all memory that it hands out with 0xFE, so that no earlier result lies in it.

    In float64, float32 and bfloat16 that is a huge number, in float16 it is NaN. With glibc only.
    """
    with contextlib.suppress(AttributeError):
        if _LIBRARY is not None:
            _LIBRARY.mallopt(-6, 0x01)  # M_PERTURB: what is freed gets the byte, what is handed out its complement
