"""The package's own speed in two commits: a process for each, beside its worktree, asked in turn.

What is no self-contained file cannot be loaded twice into one process, hence processes that alternate.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from veriformer.benchmarks.gates.commits import Commits
from veriformer.benchmarks.gates.rule import Contest, Found, Wanted
from veriformer.benchmarks.measure import PAIRS

FOLDERS = ("veriformer", "reference", "properties", "benchmarks")
"""What the package is made of, beside implementations."""
WHO = "suite"
WORKER = Path(__file__).with_name("worker.py")


class Lost(Exception):
    """A process cannot do what it was asked, or is gone."""


@dataclass(frozen=True)
class Worker:
    """A process that answers questions about one side, base or head."""

    side: str
    process: subprocess.Popen[str]

    def ask(self, question: str) -> dict[str, Any]:
        """Its answer. Raises Lost where it has none."""
        ask, answers = self.process.stdin, self.process.stdout
        assert ask is not None and answers is not None
        try:
            ask.write(f"{question}\n")
            ask.flush()
        except BrokenPipeError:
            raise Lost(f"{self.side}: the process has ended") from None
        line = answers.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": "the process has ended"}
        if "error" in answer:
            raise Lost(f"{self.side}: {answer['error']}")
        return answer


@contextmanager
def worker(side: str, tree: Path) -> Iterator[Worker]:
    """A process whose package is that of a worktree. Raises Lost where it has another one."""
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    environment = {**kept, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    call = [sys.executable, "-P", str(WORKER)]
    pipe = subprocess.PIPE
    with subprocess.Popen(call, stdin=pipe, stdout=pipe, text=True, env=environment, cwd=tree.parent) as process:
        found = Worker(side, process)
        try:
            place = Path(found.ask("place")["place"]).resolve()
            if not place.is_relative_to(tree.resolve()):
                raise Lost(f"{side}: the package that is imported lies in {place.parent}, not in {tree}")
            yield found
        finally:
            process.kill()


@contextmanager
def both_workers(commits: Commits, folder: Path) -> Iterator[tuple[Worker, Worker]]:
    """A process for base and one for head, while it lasts."""
    with ExitStack() as stack:
        trees = [
            (side, stack.enter_context(commits.worktree(commit, folder / side)))
            for side, commit in (("base", commits.base), ("head", commits.head))
        ]
        base, head = (stack.enter_context(worker(side, tree)) for side, tree in trees)
        yield base, head


def contests_of(commits: Commits, folder: Path, wanted: Wanted, stack: ExitStack, found: Found) -> Iterator[Contest]:
    """What the two processes can both do; what they cannot goes to found. The processes end with the stack."""
    found.due = True
    questions = {f"{question} {WHO}": question for question in RATIOS if wanted(f"{question} {WHO}")}
    if not questions:
        return
    try:
        base, head = stack.enter_context(both_workers(commits, folder))
    except Lost as lost:
        found.failures.append(f"{WHO}: {lost}")
        return
    for name, question in questions.items():
        if _both_can(base, head, question, found):
            ratios = RATIOS[question]
            take = lambda q=question, r=ratios: r(answers_in_turn(base, head, q))  # noqa: E731
            yield Contest(name, WHO, take, REMARKED if question == "judge" else {})


def _both_can(base: Worker, head: Worker, question: str, found: Found) -> bool:
    """Whether both answer; the first answer is not timed, since caches are empty."""
    for side, lines, tail in ((head, found.failures, ""), (base, found.remarks, ": nothing to time against")):
        try:
            side.ask(question)
        except Lost as lost:
            lines.append(f"{question} {WHO}: {lost}{tail}")
            return False
    return True


Answers = list[tuple[dict[str, Any], dict[str, Any]]]
"""What base and head answered, pair by pair."""


def answers_in_turn(base: Worker, head: Worker, question: str, pairs: int = PAIRS) -> Answers:
    """Answers of both in turn, each pair the other way round than the one before it."""
    found = []
    for turn in range(pairs):
        if turn % 2:
            found.append((base.ask(question), head.ask(question)))
        else:
            later = head.ask(question)
            found.append((base.ask(question), later))
    return found


def _import_ratios(answers: Answers) -> Mapping[str, Sequence[float]]:
    return {"import": [head["seconds"] / base["seconds"] for base, head in answers]}


def _judge_ratios(answers: Answers) -> Mapping[str, Sequence[float]]:
    """Time of the whole, and of a case."""
    whole = [head["seconds"] / base["seconds"] for base, head in answers]
    cases = [base["cases"] / head["cases"] for base, head in answers]
    return {"judge-attention": whole, "thousand-cases": [a * b for a, b in zip(whole, cases, strict=True)]}


REMARKED = {"judge-attention": "it grows with every law; thousand-cases does not"}
"""What is not held against head, and why."""
RATIOS: dict[str, Callable[[Answers], Mapping[str, Sequence[float]]]] = {
    "import": _import_ratios,
    "judge": _judge_ratios,
}
