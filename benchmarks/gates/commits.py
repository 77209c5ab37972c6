"""The two commits that a gate compares, and what git knows of them."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from veriformer.calling import UsageError


@dataclass(frozen=True)
class Commits:
    """Full names of two commits of the checkout at root."""

    root: Path
    base: str
    head: str

    def changed(self, *folders: str) -> list[str]:
        """Paths beneath folders that differ between the two, sorted; a file that was moved counts as two."""
        return git(self.root, "diff", "--no-renames", "--name-only", "-z", self.base, self.head, "--", *folders).split(
            "\0"
        )[:-1]

    def listed(self, commit: str, folder: str) -> list[str]:
        """Paths beneath a folder in one of the two."""
        return git(self.root, "ls-tree", "-r", "--name-only", "-z", commit, "--", f"{folder}/").split("\0")[:-1]

    def text(self, commit: str, path: str) -> str | None:
        """A file as it is in one of the two, or None where that has none of this path."""
        done = _run(self.root, "show", f"{commit}:{path}")
        return done.stdout if done.returncode == 0 else None

    @contextmanager
    def worktree(self, commit: str, folder: Path) -> Iterator[Path]:
        """While it lasts, all files of one of the two lie in a new folder."""
        git(self.root, "worktree", "add", "--detach", "--quiet", str(folder), commit)
        try:
            yield folder
        finally:
            git(self.root, "worktree", "remove", "--force", str(folder))


def asked_for(folder: Path, base: str, head: str) -> Commits:
    """The commits that a user named, in the checkout that holds folder; an empty head is the one checked out.

    Raises UsageError, in one line, where there is no checkout or no such commit, where the working tree differs from
    the commit, and where head is not named although no branch is checked out.
    """
    done = _run(folder, "rev-parse", "--show-toplevel")
    if done.returncode:
        raise UsageError(f"{folder} is in no git checkout: run this in a clone of the repository")
    root = Path(done.stdout.rstrip("\n"))
    if not head and _run(root, "symbolic-ref", "--quiet", "HEAD").returncode:
        raise UsageError("no branch is checked out (detached HEAD): name the second commit too, as in BASE HEAD")
    found = Commits(root, _commit(root, base), _commit(root, head or "HEAD"))
    _refuse_changes(root)
    return found


def _commit(root: Path, name: str) -> str:
    done = _run(root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
    if done.returncode == 0:
        return done.stdout.strip()
    if git(root, "rev-parse", "--is-shallow-repository").strip() == "true":
        raise UsageError(f"this shallow checkout has no commit {name!r}: fetch the history, git fetch --unshallow")
    raise UsageError(f"no commit {name!r} in {root}")


def _refuse_changes(root: Path) -> None:
    # reports/ is what earlier commands wrote; nothing there is measured
    said = git(root, "status", "--porcelain", "-z", "--no-renames", "--", ".", ":(exclude)reports")
    changes = [line[3:] for line in said.split("\0") if line]
    if changes:
        rest = f" and {len(changes) - 1} more" if changes[1:] else ""
        raise UsageError(f"changes that are in no commit ({changes[0]}{rest}): commits are compared; commit first")


def git(root: Path, *words: str) -> str:
    """What a git command prints. Raises RuntimeError with git's own message where it fails."""
    done = _run(root, *words)
    if done.returncode:
        raise RuntimeError(f"git {' '.join(words)} failed: {done.stderr.strip()}")
    return done.stdout


def _run(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    # inside a hook git names its own folders in the environment, which go before -C
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    call = ["git", "-C", str(root), *words]
    try:
        return subprocess.run(call, env=environment, capture_output=True, encoding="utf-8", errors="replace")
    except FileNotFoundError:
        raise UsageError("git is not installed") from None


class Parser(argparse.ArgumentParser):
    """The words that both gates take; an error is one line and exit code 2."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.add_argument("base", metavar="BASE", help="the commit to compare with")
        self.add_argument("head", metavar="HEAD", nargs="?", default="", help="default: the one that is checked out")
        self.add_argument("--bench", metavar="REGEX", default="", help="only what this is found in the name of")

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message}; see --help", file=sys.stderr)
        raise SystemExit(2)


def pattern(bench: str) -> Callable[[str], bool]:
    """Whether a regular expression is found in a name.

    Raises UsageError where it is none.
    """
    try:
        found = re.compile(bench)
    except re.error as error:
        raise UsageError(f"--bench {bench!r} is no regular expression: {error}") from None
    return lambda name: found.search(name) is not None


def ended(prog: str, gate: Callable[[Sequence[str]], int], words: Sequence[str]) -> int:
    """The exit code of a gate; a UsageError becomes one line and 2."""
    try:
        return gate(words)
    except UsageError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
