"""The git checkout whose history is shown: where it is, its commits, and whether asv may measure them."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from veriformer.calling import UsageError, nearest

OURS = ("reports/performance.md", "reports/performance.html")
"""What `veriformer history` writes into the checkout, beside asv's results."""
NAMED_BY_ASV = ("ALL", "EXISTING", "NEW", "TAGS")
"""Ranges that mean something to asv alone."""


@dataclass(frozen=True)
class Commit:
    """A commit: its hash, the day it was made (year-month-day), the first line of its message."""

    hash: str
    day: str
    subject: str

    @property
    def short(self) -> str:
        """Eight digits, as in the names of asv's files."""
        return self.hash[:8]


@dataclass(frozen=True)
class Checkout:
    """A git checkout with an asv.conf.json: its root, where asv keeps results, where it puts its pages."""

    root: Path
    results: Path
    pages: Path

    def git(self, *arguments: str) -> str | None:
        """What git says, or None where it fails."""
        done = run_git(self.root, arguments)
        return done.stdout if done.returncode == 0 else None


def run_git(folder: Path, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Call git in a folder.

    Raises UsageError where there is no git.
    """
    try:
        return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True)
    except FileNotFoundError:
        raise UsageError("history needs git, which is not installed") from None


def open_checkout(folder: Path) -> Checkout:
    """The checkout that a folder lies in.

    Raises UsageError where it is none, where it is shallow, or where its asv.conf.json is missing or cannot be used.
    """
    done = run_git(folder, ["rev-parse", "--show-toplevel"])
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["git says nothing"])[-1]
        raise UsageError(f"history needs a git checkout, {folder} is none ({last}); go into a clone of veriformer")
    root = Path(done.stdout.strip())
    conf = _configuration(root)
    checkout = Checkout(root, _folder(root, conf, "results_dir", "results"), _folder(root, conf, "html_dir", "html"))
    if (checkout.git("rev-parse", "--is-shallow-repository") or "").strip() == "true":
        raise UsageError("this is a shallow checkout, its past is missing: git fetch --unshallow")
    return checkout


def _folder(root: Path, conf: dict[str, Any], name: str, usual: str) -> Path:
    found = conf.get(name, usual)
    if not isinstance(found, str) or not (root / found).resolve().is_relative_to(root.resolve()):
        raise UsageError(f"{root / 'asv.conf.json'}: {name} is {found!r}, wanted a folder in the checkout")
    return root / found


def _configuration(root: Path) -> dict[str, Any]:
    path = root / "asv.conf.json"
    if not path.is_file():
        raise UsageError(f"no asv.conf.json in {root}; go into a clone of veriformer")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(found, dict):
        raise UsageError(f"{path}: wanted a JSON object, got {type(found).__name__}")
    return found


def branch_of(checkout: Checkout, given: str) -> str:
    """The branch whose commits are meant: the given one (any name of a commit will do), or the one checked out.

    Raises UsageError where HEAD is detached and none is given, where the name is unknown, where there is no commit.
    """
    if given:
        if given.startswith("-") or checkout.git("rev-parse", "--verify", "--quiet", f"{given}^{{commit}}") is None:
            known = (checkout.git("branch", "--format=%(refname:short)") or "").split("\n")
            raise UsageError(f"--branch {given!r}: no such branch{nearest(given, [one for one in known if one])}")
        return given
    name = (checkout.git("symbolic-ref", "--quiet", "--short", "HEAD") or "").strip()
    if not name:
        raise UsageError("HEAD is detached: say whose commits are meant, --branch NAME (or --branch HEAD)")
    if checkout.git("rev-parse", "--verify", "--quiet", "HEAD") is None:
        raise UsageError(f"branch {name!r} has no commits yet")
    return name


def commits_of(checkout: Checkout, branch: str) -> list[Commit]:
    """The commits of a branch along first parents, the oldest first."""
    said = checkout.git("log", "--first-parent", "--reverse", "--format=%H%x09%cs%x09%s", branch, "--") or ""
    return [Commit(*line.split("\t", 2)) for line in said.split("\n") if line]


def refuse_changes(checkout: Checkout) -> None:
    """Raise UsageError where tracked files are changed; results and reports of earlier runs may be."""
    results = checkout.results.relative_to(checkout.root).as_posix()
    others = [f":(exclude){path}" for path in (results, *OURS)]
    said = checkout.git("status", "--porcelain", "--untracked-files=no", "--", ".", *others)
    changed = [line[3:] for line in (said or "").split("\n") if line]
    if changed:
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        raise UsageError(f"asv measures commits, and {changed[0]}{more} is changed: commit or stash first")


def hashes_of(checkout: Checkout, wanted: str, folder: Path) -> list[str] | None:
    """The commits that a range means to asv: hashes, or None where only asv can tell.

    wanted: anything that `git rev-list` takes, one of asv's own words, or HASHFILE: and a file (as seen from folder;
    - is the standard input). Raises UsageError where it means nothing, or no commit.
    """
    if wanted in NAMED_BY_ASV or wanted == "HASHFILE:-":
        return None
    if wanted.startswith("HASHFILE:"):
        return _listed(checkout, folder / wanted.removeprefix("HASHFILE:"))
    try:
        words = shlex.split(wanted)
    except ValueError as error:
        raise UsageError(f"--record {wanted!r}: {error}") from None
    one = ["--max-count=1"] if wanted == "HEAD" else []
    said = checkout.git("rev-list", "--first-parent", *one, *words, "--") if words else None
    if said is None:
        raise UsageError(f"--record {wanted!r}: git knows no such commits; wanted e.g. HEAD^!, main~3..main or a tag")
    if not said:
        raise UsageError(f"--record {wanted!r}: no commit lies in it; A..B means what B has beyond A")
    return said.split()


def _listed(checkout: Checkout, path: Path) -> list[str]:
    try:
        names = path.read_text(encoding="utf-8").split()
    except (OSError, ValueError) as error:
        raise UsageError(f"--record HASHFILE:{path}: {error}") from None
    found = [checkout.git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}") for name in names]
    unknown = [name for name, commit in zip(names, found, strict=True) if commit is None]
    if unknown or not names:
        what = f"no commit {unknown[0]!r}" if unknown else "it is empty"
        raise UsageError(f"--record HASHFILE:{path}: {what}; wanted one commit a line")
    return [commit.strip() for commit in found if commit]
