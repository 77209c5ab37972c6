"""A small git repository with one implementation file, and mistakes to plant in it: what tests of the gates share."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

NORMS = """
import ml_dtypes
import numpy as np


def normal(x, eps):
    c = x - x.mean(-1, keepdims=True)
    v = (c * c).mean(-1, keepdims=True)
    return c / np.sqrt(v + eps)


def layer_norm(x, weight, bias, *, eps=1e-5):
    n = normal(x, eps)
    return weight * n + bias
"""
"""A correct layer norm: numpy:norms."""
PATH = "impls/numpy_norms.py"
PLANTS = {
    "comment": ("n = normal(x, eps)", "n = normal(x, eps)  # each row by itself"),
    "copy": ("n = normal(x, eps)", "n = normal(x.copy(), eps)"),
    "loss": ("n = normal(x, eps)", "n = normal(x, eps)\n    n *= 1 + 1e-6"),
    "bfloat16": ("n = normal(x, eps)", "n = normal(x, eps).astype(ml_dtypes.bfloat16).astype(x.dtype)"),
    "twice": ("    n = normal(x, eps)\n    return weight * n + bias",
              "    for _ in range(2):\n        n = normal(x, eps)\n        y = weight * n + bias\n    return y"),
    "wrong": ("weight * n + bias", "weight * n"),
    "raises": ("    n = normal(x, eps)", "    raise OSError('no such device')"),
    "broken": ("import ml_dtypes", "import ml_dtypes_of_old"),
    "other operation": ("def layer_norm(x, weight, bias, *, eps=1e-5)",
                        "def rms_norm(x, weight, *, eps=1e-6, bias=0)"),
}  # fmt: skip
"""What a commit changes, and into what."""


def planted(name: str) -> str:
    """The file with a change."""
    before, after = PLANTS[name]
    assert before in NORMS
    return NORMS.replace(before, after)


def git(folder: Path, *words: str) -> str:
    """What a git command prints."""
    who = ("-c", "user.name=nobody", "-c", "user.email=nobody@example.invalid", "-c", "init.defaultBranch=main")
    done = subprocess.run(["git", "-C", str(folder), *who, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def commit(folder: Path, files: Mapping[str, str | None]) -> None:
    """A commit with these texts in it; None removes a file."""
    folder.mkdir(exist_ok=True)
    if not (folder / ".git").exists():
        git(folder, "init", "--quiet")
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True) if text is None else path.write_text(text)
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--allow-empty", "--message", "a commit")
