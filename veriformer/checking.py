"""Run laws on targets and sum up: `check(...) -> Report`, the engine behind every front end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from veriformer.boundary import Outcome, Request
from veriformer.calling import UsageError, nearest
from veriformer.catalogue import all_laws, tentative
from veriformer.declarations import DTYPES
from veriformer.isolate import Remote, WorkerLost
from veriformer.law import Law, find_laws
from veriformer.operation import MAIN
from veriformer.operations import OPERATIONS
from veriformer.oracle import COMPOSITES
from veriformer.running import EFFORTS, FIRST, Item, Row
from veriformer.subject import Implementation
from veriformer.targets import Loaded, Options, load, load_functions

DEFAULT_TARGETS = ("numpy", "torch")
RED = ("fail", "error", "crash", "timeout", "xpass")
OPEN = ("incomplete", "undetermined", "not_run")
RELATIVE = ("metamorphic", "hygiene", "gradient")
"""Kinds of laws that may compare two results with a budget that comes from the reference."""


@dataclass
class Settings:
    """How a run is done. effort: look | smoke | ci | deep. max_time: seconds, or None. dtypes: all if empty.

    timeout, import_timeout: seconds for a call and for an import. offline: targets have no network.
    """

    effort: str = "ci"
    seed: int = 0
    max_time: float | None = None
    dtypes: tuple[str, ...] = ()
    laws: tuple[str, ...] = ()
    require: tuple[str, ...] = ()
    isolate: bool = True
    timeout: float = 20.0
    import_timeout: float | None = None
    offline: bool = False

    def __post_init__(self) -> None:
        if self.offline and not self.isolate:
            raise UsageError("--offline goes with a process of its own: leave out --in-process")
        for word, value in (("timeout", self.timeout), ("import-timeout", self.import_timeout)):
            if value is not None and not 1e-3 <= value < math.inf:
                raise UsageError(f"--{word} {value}: wanted seconds, at least a thousandth")
        if self.effort not in EFFORTS:
            raise UsageError(f"effort {self.effort!r} is not known; wanted one of {', '.join(EFFORTS)}")
        for dtype in self.dtypes:
            if dtype not in (MAIN, *DTYPES):
                raise UsageError(f"dtype {dtype!r} is not known; wanted {MAIN} or some of {', '.join(DTYPES)}")


@dataclass
class Report:
    """The rows of a run and what they come to.

    ok: whether the exit code is 0. Printing it shows the summary; `failures` holds the red rows.
    """

    rows: list[Row] = field(default_factory=list)
    implementations: list[Implementation] = field(default_factory=list)
    settings: Settings = field(default_factory=Settings)
    missing: list[str] = field(default_factory=list)
    complete: bool = False
    seconds: float = 0.0

    @property
    def counted(self) -> list[Row]:
        """Rows of laws that belong to the level."""
        return [row for row in self.rows if not tentative(row.law)]

    @property
    def failures(self) -> list[Row]:
        """Counted rows that are red."""
        return [row for row in self.counted if row.verdict in RED]

    @property
    def exit_code(self) -> int:
        """See `exit_code_of`."""
        return exit_code_of([row.verdict for row in self.counted], self.missing)

    @property
    def ok(self) -> bool:
        """Whether everything asked for was judged and holds."""
        return self.exit_code == 0

    def counts(self) -> dict[str, int]:
        """Rows per verdict, red ones first."""
        verdicts = [row.verdict for row in self.rows]
        order = [*RED, "suite_error", "blocked", *OPEN, "xfail", "pass", "not_provided"]
        return {name: verdicts.count(name) for name in order if name in verdicts}

    def __str__(self) -> str:
        from veriformer.report.terminal import plain

        return plain(self)


def exit_code_of(verdicts: Sequence[str], missing: Sequence[str] = ()) -> int:
    """3 the suite is at fault; 1 something is wrong; 4 not everything asked for was judged; 0.

    verdicts: of the rows that count. missing: what was required and is not there.
    """
    found = set(verdicts)
    if "suite_error" in found:
        return 3
    if found & set(RED):
        return 1
    return 4 if found & {"incomplete", "not_run"} or missing or not found & {"pass", "xfail"} else 0


def check(
    *targets: str,
    effort: str = "ci",
    seed: int = 0,
    laws: Sequence[str] = (),
    dtypes: Sequence[str] = (),
    declare: Mapping[str, Any] | None = None,
    require: Sequence[str] = (),
    accepts: Sequence[str] | None = None,
    returns: Sequence[str] = (),
    framework: str = "",
    device: str = "cpu",
    max_time: float | None = None,
    isolate: bool = True,
    **operations: Callable[..., Any],
) -> Report:
    """Judge implementations and return a `Report`.

    targets: `OPERATION=module:attribute`, a module, a file or a registered name; they are called in
    a process of their own unless isolate is False. operations: functions in memory, such as
    `check(attention=my_attention)`; they are called in this process.
    Raises UsageError with one line that says what to do.
    """
    settings = Settings(
        effort, seed, max_time, listed(dtypes), listed(laws), listed(require), isolate and bool(targets),
    )  # fmt: skip
    if not targets and not operations:
        raise UsageError("nothing to check; wanted a target, as in check('torch'), or check(attention=my_attention)")
    options = Options(None if accepts is None else tuple(accepts), tuple(returns), framework, declare or {}, device)
    with ExitStack() as stack:
        implementations = list(open_targets(targets, options, settings, stack)) if targets else []
        if operations:
            implementations.append(in_process(load_functions(operations, options)))
        report = Report([], implementations, settings)
        for _ in judge(report):
            pass
    return report


def listed(words: Sequence[str]) -> tuple[str, ...]:
    """Words as a tuple; a single one may stand by itself."""
    return (words,) if isinstance(words, str) else tuple(words)


def open_targets(
    targets: Iterable[str], options: Options, settings: Settings, stack: ExitStack
) -> Iterator[Implementation]:
    """The implementations of all targets, each with a name of its own; workers are closed with the stack."""
    names: set[str] = set()
    for one in _opened(targets, options, settings, stack):
        label = one.name if one.name not in names else f"{one.name} ({', '.join(one.description.plans)})"
        while label in names:
            label += "'"
        names.add(label)
        yield replace(one, label=label)


def _opened(targets: Iterable[str], options: Options, settings: Settings, stack: ExitStack) -> Iterator[Implementation]:
    for target in targets:
        if not settings.isolate:
            yield from (vetted(in_process(one, target, options)) for one in load(target, options))
            continue
        try:
            remote = Remote(target, options, settings.timeout, settings.import_timeout, settings.offline)
        except WorkerLost as error:
            raise UsageError(str(error)) from None
        stack.callback(remote.close)
        for description in remote.descriptions:
            yield vetted(Implementation(description, remote.call, target, options, remote.start))


def vetted(implementation: Implementation) -> Implementation:
    """The implementation itself.

    Raises UsageError where one of its expected failures names a law that does not exist.
    """
    ids = [law.id for law in all_laws()]
    for entry in implementation.description.expected:
        if entry.law not in ids:
            raise UsageError(f"Expected({entry.law!r}): there is no such law{nearest(entry.law, ids)}")
    return implementation


def in_process(loaded: Loaded, target: str = "", options: Options | None = None) -> Implementation:
    """An implementation called in this process."""

    def call(name: str, operation: str, request: Request) -> Outcome:
        return loaded.boundaries[operation].cross(request)

    return Implementation(loaded.description, call, target, options or Options())


def chosen_laws(settings: Settings) -> Sequence[Law]:
    """The laws of a run.

    Raises UsageError for an unknown id.
    """
    return find_laws(all_laws(), settings.laws) if settings.laws else all_laws()


Efforts = Callable[[Implementation, str], str]
"""(implementation, operation) -> effort."""


def mixed_efforts(report: Report) -> Efforts:
    """ci for the first implementation of each operation and framework, smoke for the others.

    The budgets of composites cost far more: smoke for the first, a look at the others.
    """
    full: set[str] = set()
    seen: set[tuple[str, str]] = set()
    for one in report.implementations:
        pairs = {(operation, one.description.framework) for operation in one.description.plans}
        if pairs - seen:
            full.add(one.name)
            seen |= pairs

    def effort(implementation: Implementation, operation: str) -> str:
        wanted, other = ("smoke", "look") if operation in COMPOSITES else (report.settings.effort, "smoke")
        return wanted if implementation.name in full else other

    return effort


def judge(report: Report) -> Iterator[Row]:
    """Run every item of a report's implementations, adding rows as they come."""
    settings = report.settings
    laws = chosen_laws(settings)
    report.missing = missing_features(report.implementations, settings.require)
    start, turn = time.monotonic(), Turn()
    deadline = start + settings.max_time if settings.max_time is not None else float("inf")
    for implementation in report.implementations:
        for item in items(laws, [implementation], settings.effort, settings.seed, deadline, settings.dtypes):
            row = turn.run(item)
            report.rows.append(row)
            report.seconds = time.monotonic() - start
            yield row
    report.complete = True


def items(
    laws: Sequence[Law],
    implementations: Sequence[Implementation],
    effort: str | Callable[[str], str],
    seed: int,
    deadline: float,
    dtypes: Sequence[str] = (),
) -> Iterator[Item]:
    """Every item, in the order to run: main dtypes first, and contract roots before all else.

    effort: for all, or by the operation.
    """
    effort_of = effort if callable(effort) else lambda operation: effort
    for implementation in implementations:
        pairs = [(op, dtype) for op in implementation.description.plans for dtype in implementation.dtypes(op)]
        pairs.sort(key=lambda pair: pair[1] != implementation.main_dtype(pair[0]))
        for operation, dtype in pairs:
            main = MAIN in dtypes and dtype == implementation.main_dtype(operation)
            if not dtypes or dtype in dtypes or main:
                mine = [law for law in laws if law.operation == operation]
                for law in sorted(mine, key=lambda law: not law.root):
                    yield Item(law, implementation, dtype, effort_of(operation), seed, deadline)


class Turn:
    """Runs items in order, knowing which contract roots and oracles have failed so far."""

    def __init__(self) -> None:
        self.roots: dict[tuple[str, str, str, bool], Row] = {}
        self.oracles: set[tuple[str, str, str]] = set()
        self.ended: dict[tuple[str, str, str], frozenset[str]] = {}

    def run(self, item: Item) -> Row:
        """Run an item unless a contract root of the same operation and dtype does not hold."""
        place = (item.implementation.name, item.law.operation, item.dtype)
        graded = "gradients" in item.law.needs
        for root in (self.roots.get((*place, False)), self.roots.get((*place, True)) if graded else None):
            if root is not None:
                return block(item, root)
        if time.monotonic() > item.deadline:
            return Row(item.law, item.implementation.name, item.dtype, "not_run", "time limit")
        item.reduced = self.ended.get(place, frozenset())
        row = item.run()
        if row.verdict in ("crash", "timeout"):
            self.ended[place] = item.reduced | {row.verdict}
        # a root that holds on the plainest case leaves the rest something to judge
        plain = row.failure is not None and row.failure.origin == FIRST
        known = row.verdict == "xfail" and item.known.blind is not None
        if row.law.root and (plain or known):
            self.roots[(*place, graded)] = row
        if row.law.kind == "oracle" and row.verdict in ("fail", "xfail"):
            self.oracles.add(place)
        row.withheld = place in self.oracles and row.law.relative and row.law.kind in RELATIVE and row.verdict == "fail"
        return row


def block(item: Item, root: Row) -> Row:
    """The row of an item that cannot be judged because a contract root does not hold, as expected or not."""
    if root.verdict == "xfail":
        said = f"{root.law.name} is expected to fail"
        return Row(item.law, item.implementation.name, item.dtype, "not_provided", said)
    return Row(item.law, item.implementation.name, item.dtype, "blocked", f"{root.law.id} does not hold")


def missing_features(implementations: Sequence[Implementation], require: Sequence[str]) -> list[str]:
    """Lines about required keywords that no operation under test takes.

    Raises UsageError for a word that no operation knows.
    """
    known = sorted({word for op in OPERATIONS.values() for word in (*op.keywords, *op.options)})
    lines = []
    for word in require:
        if word not in known:
            raise UsageError(f"--require {word!r}: no operation has it; known are {', '.join(known)}")
        for implementation in implementations:
            for operation, plan in implementation.description.plans.items():
                table = OPERATIONS[operation]
                if word in (*table.keywords, *table.options) and word not in plan.accepts:
                    lines.append(f"{implementation.name}: {operation} does not take {word}, which is required")
    return lines
