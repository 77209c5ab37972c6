"""Run one item (one law, one implementation, one dtype): pinned cases, search, reduction, verdict."""

from __future__ import annotations

import contextlib
import functools
import time
import traceback
import zlib
from dataclasses import dataclass, replace
from typing import Any

import hypothesis
from hypothesis import given
from hypothesis.errors import Unsatisfiable

from veriformer.boundary import Interrupts
from veriformer.calling import UsageError
from veriformer.case import Case, literal_case
from veriformer.declarations import Expected
from veriformer.expect import Broken, Refused, Trial, recording
from veriformer.guard import reference_keeps
from veriformer.known import SLOW, Known, known_of
from veriformer.law import JUDGED_BESIDE_REFERENCE, ORACLES, Domain, Law
from veriformer.oracle import COMPOSITES
from veriformer.reduce import smallest
from veriformer.searching import no_foreign_constants, search_settings
from veriformer.subject import Implementation, attempt

EFFORTS = {"look": (0, 0), "smoke": (0, 0), "ci": (50, 15), "deep": (2000, 500)}
"""Searched cases in the main dtype and in each other one; the pinned cases come on top, for a look some of them."""

VERDICTS = (
    "pass",
    "fail",
    "error",
    "crash",
    "timeout",
    "incomplete",
    "undetermined",
    "blocked",
    "not_provided",
    "not_run",
    "xfail",
    "xpass",
    "suite_error",
)
FIRST = "pinned 1"
"""Where a failure on the plainest case comes from."""
CUT, ENDED = "cut short: time is over", "ended at a known failure"
REFUSED = "refused"
"""Kind of an expected failure that is a refusal."""
_VERDICT_OF = {"raised": "error", "crash": "crash", "timeout": "timeout"}


@dataclass
class Failure:
    """The minimal failing arguments and what they show."""

    kind: str
    message: str
    facts: dict[str, Any]
    arguments: tuple[Any, ...]
    calls: tuple[Any, ...]
    origin: str
    tries: int = 0

    @property
    def case(self) -> Case:
        """The case of the failing attempt."""
        return self.arguments[0]  # type: ignore[no-any-return]


@dataclass
class Row:
    """The verdict on one item and the counts behind it."""

    law: Law
    implementation: str
    dtype: str
    verdict: str = "not_run"
    reason: str = ""
    cases: int = 0
    judged: int = 0
    refused: int = 0
    vacuous: int = 0
    masked: int = 0
    undetermined: int = 0
    ratio: float = 0.0
    bits: float | None = None
    seconds: float = 0.0
    refusal: str = ""
    failure: Failure | None = None
    expected: Expected | None = None
    withheld: bool = False
    search: str = "done"

    @property
    def id(self) -> str:
        """`law[implementation-dtype]`."""
        return f"{self.law.id}[{self.implementation}-{self.dtype}]"


class _Stop(BaseException):
    """Ends a search at its first failure; a BaseException passes straight through Hypothesis."""


class _Known(BaseException):
    """Ends a search at a failure that is known from another law."""


class _OutOfTime(BaseException):
    """Ends a search when the run's time is over."""


@dataclass
class Item:
    """One law bound to one implementation and dtype. `run()` gives its `Row`."""

    law: Law
    implementation: Implementation
    dtype: str
    effort: str = "ci"
    seed: int = 0
    deadline: float = float("inf")
    reduced: frozenset[str] = frozenset()
    """Kinds of failure that already have a minimal case for this operation, and are slow to provoke."""

    def __post_init__(self) -> None:
        self.domain: Domain = self.implementation.domain(self.law.operation, self.dtype)
        self.masking: Expected | None = None

    @functools.cached_property
    def known(self) -> Known:
        """What is known of it; not looked up for items that are only counted."""
        about = self.implementation.description
        return known_of(self.law, about.expected, self.dtype, about.versions)

    @property
    def id(self) -> str:
        """`law[implementation-dtype]`."""
        return f"{self.law.id}[{self.implementation.name}-{self.dtype}]"

    def run(self) -> Row:
        """Judge the item; only a real interrupt of the user leaves early."""
        start = time.monotonic()
        row = Row(self.law, self.implementation.name, self.dtype)
        try:
            with Interrupts.watched():
                self._run(row)
        except UsageError:
            raise
        except Exception:
            row.verdict, row.reason = "suite_error", traceback.format_exc()
        row.seconds = time.monotonic() - start
        return row

    def _run(self, row: Row) -> None:
        missing = self.law.missing(self.domain)
        if missing:
            row.verdict, row.reason = "not_provided", "needs " + ", ".join(missing)
            return
        self.known = replace(self.known, spread=tuple(filter(self._still, self.known.spread)))
        known, blind = self._check_expected(row), self.known.blind
        if blind is None:
            self._judge(row)
        else:
            row.search = "off: " + blind.reason
        if row.verdict == "not_run":
            row.verdict, row.reason = verdict_of(row)
        if known is None and row.masked and not row.cases:
            row.expected, row.verdict = row.expected or self.masking, "pass"
        if known is None and row.expected is not None and row.verdict == "pass":
            row.verdict, row.reason = "xfail", row.expected.reason
        # a search that was left open stays open; one with every case masked had nothing to do
        if known and (known[0] != "xfail" or row.verdict == "pass" or blind or not row.cases):
            row.verdict, row.reason = known

    def _judge(self, row: Row) -> None:
        found = self._pinned(row) or self._search(row)
        if found is None:
            return
        arguments, broken, origin = found
        if self.law.kind in JUDGED_BESIDE_REFERENCE and not self._reference_keeps(arguments):
            row.verdict, row.reason = "suite_error", f"the reference breaks this law too: {arguments[0].describe()}"
            return
        tries = 0
        # a statistic of many numbers says nothing of few
        fixed = broken.kind == "not repeatable" or self.law.kind == "precision"
        if not fixed and broken.kind not in self.reduced:
            arguments, broken, tries = smallest(arguments, broken, self._smaller)
        row.failure = self._failure(arguments, broken, origin, tries)
        row.verdict = _VERDICT_OF.get(broken.kind, "fail")

    def _failure(self, arguments: tuple[Any, ...], broken: Broken, origin: str, tries: int) -> Failure:
        """Make the last attempt once more, so that its calls are on record."""
        again = None
        with recording(keep=True) as trial, contextlib.suppress(Refused):
            again = self._broken(arguments)
        shown = again if again is not None and again.kind == broken.kind else broken
        return Failure(shown.kind, shown.message, shown.facts, arguments, tuple(trial.calls), origin, tries)

    def _broken(self, arguments: tuple[Any, ...]) -> Broken | None:
        return attempt(self.law, self.implementation, self.dtype, arguments)

    def _quietly(self, arguments: tuple[Any, ...]) -> Broken | None:
        """An attempt that is not counted; one that cannot be judged is none."""
        with recording():
            try:
                return self._broken(arguments)
            except Exception:
                return None

    def _smaller(self, arguments: tuple[Any, ...]) -> Broken | None:
        """For the reducer, whose candidates may not suit the law: then the reference breaks it too."""
        broken = self._quietly(arguments)
        return broken if broken is not None and self._reference_keeps(arguments) else None

    def _reference_keeps(self, arguments: tuple[Any, ...]) -> bool:
        """Whether the law speaks of these arguments at all: the reference must keep it."""
        return reference_keeps(self.law, self.implementation, self.dtype, arguments)

    def _attempt(self, row: Row, arguments: tuple[Any, ...]) -> Broken | None:
        """One counted attempt. Raises _OutOfTime when the run's time is over, _Known as that says."""
        if time.monotonic() > self.deadline:
            raise _OutOfTime
        if mask := self.known.mask(arguments, self.law.operation):
            row.masked += 1
            self.masking = self.masking or mask
            return None
        row.cases += 1
        with recording() as trial:
            try:
                broken = self._broken(arguments)
            except Refused as refused:
                row.refused += 1
                row.refusal = row.refusal or str(refused)
                return None
        cause = broken and self.known.cause(broken.kind)
        if broken and cause:
            row.expected, row.cases, row.masked = cause, row.cases - 1, row.masked + 1
            if broken.kind in SLOW:
                raise _Known
            return None
        count(row, trial)
        return broken

    def _pinned(self, row: Row) -> tuple[Any, Broken, str] | None:
        try:
            for number, arguments in enumerate(self.law.pinned(self.domain)):
                if number % self._stride:
                    continue
                broken = self._attempt(row, arguments)
                if broken:
                    return self._repeated(arguments, broken, f"pinned {number + 1}")
        except _Known:
            row.search = ENDED
        except _OutOfTime:
            row.search = CUT
        return None

    @property
    def _stride(self) -> int:
        """Every how many pinned cases one is taken: what relates results shows in the main dtype first."""
        main = self.dtype == self.implementation.main_dtype(self.law.operation)
        brief = self.effort in ("look", "smoke")
        if self.law.kind not in ("metamorphic", "gradient"):
            return 1
        if main:
            return 3 if self.effort == "look" else 1
        return 4 if brief and self.law.operation in COMPOSITES else 3 if self.effort == "look" else 2

    def _repeated(self, arguments: Any, broken: Broken, origin: str) -> tuple[Any, Broken, str]:
        """A failure that does not come again is reported as that."""
        if broken.kind in self.reduced:
            return arguments, broken, origin
        for _ in range(3):
            if self._quietly(arguments) is not None:
                return arguments, broken, origin
        said = f"{broken.message}; the same case passed when it was run again"
        return arguments, Broken("not repeatable", said, **broken.facts), origin

    def _search(self, row: Row) -> tuple[Any, Broken, str] | None:
        main = self.dtype == self.implementation.main_dtype(self.law.operation)
        budget = EFFORTS[self.effort][0 if main else 1]
        if not budget or row.search != "done":
            return None
        found: list[tuple[Any, Broken]] = []

        def body(arguments: tuple[Any, ...]) -> None:
            before = row.judged + row.undetermined + row.refused + row.masked
            broken = self._attempt(row, arguments)
            if broken:
                found.append((arguments, broken))
                raise _Stop
            if row.judged + row.undetermined + row.refused + row.masked == before:
                hypothesis.reject()

        seed = zlib.crc32(f"{self.law.id} {self.dtype} {self.seed}".encode())
        try:
            with no_foreign_constants():
                hypothesis.seed(seed)(search_settings(budget)(given(self.law.strategy(self.domain))(body)))()
        except _Stop:
            arguments, broken = found[0]
            return self._repeated(arguments, broken, f"search, seed {self.seed}")
        except _Known:
            row.search = ENDED
        except _OutOfTime:
            row.search = CUT
        except Unsatisfiable:
            row.search = "no suitable cases"
        return None

    def _check_expected(self, row: Row) -> tuple[str, str] | None:
        """Run the pinned case of each entry: xfail while it fails beside any example, xpass when it no longer does."""
        state: tuple[str, str] | None = None
        for entry in self.known.own:
            row.expected = entry
            if entry.case is None:
                raise UsageError(f"Expected({entry.law!r}) needs a pinned case")
            try:
                case = literal_case(self.law.operation, entry.case, self.dtype)
            except ValueError as error:
                raise UsageError(f"Expected({entry.law!r}): {error}") from error
            broken, others, refusal = None, [], ""
            for others in self._beside():
                try:
                    with recording():
                        broken = self._broken((case, *others))
                except Refused as refused:
                    refusal = str(refused)
                if broken is not None:
                    break
            if broken is None and refusal and entry.kind == REFUSED:
                state = ("xfail", entry.reason)
                continue
            if broken is None and refusal:
                return "xpass", f"refused now ({refusal}); remove this entry: {entry.reason}"
            if broken is None:
                return "xpass", f"no longer fails; remove this entry: {entry.reason}"
            if broken.kind != entry.kind if entry.kind else broken.kind in _VERDICT_OF:
                row.failure = self._failure((case, *others), broken, "expected failure", 0)
                said = f"fails otherwise than expected ({entry.kind or 'a wrong result'}): {entry.reason}"
                return _VERDICT_OF.get(broken.kind, "fail"), said
            state = ("xfail", entry.reason)
        return state

    def _still(self, entry: Expected) -> bool:
        """Whether an entry of the oracle's still fails; else nothing spreads from it."""
        done, key, oracle = self.implementation.confirmed, (id(entry), self.dtype), ORACLES.get(self.law.operation)
        if key not in done and oracle is not None:
            item = Item(oracle, self.implementation, self.dtype)
            item.known = Known((entry,), (), self.dtype)
            state = item._check_expected(Row(oracle, self.implementation.name, self.dtype))
            done[key] = state is not None and state[0] == "xfail"
        return done.get(key, False)

    def _beside(self) -> list[list[Any]]:
        """What a pinned case is tried with: the examples of the law's other recipes, the first of each first."""
        tables = [recipe.examples(self.domain) for name, recipe in self.law.recipes.items() if name != "case"]
        return [[table[i % len(table)] for table in tables] for i in range(max(map(len, tables), default=1))]


def count(row: Row, trial: Trial) -> None:
    """Add what an attempt judged to the row."""
    row.judged += trial.judged
    row.undetermined += trial.undetermined
    row.vacuous += not (trial.judged or trial.undetermined)
    row.ratio = max(row.ratio, trial.ratio)
    if trial.bits is not None:
        row.bits = trial.bits if row.bits is None else max(row.bits, trial.bits)


def verdict_of(row: Row) -> tuple[str, str]:
    """pass, undetermined or incomplete, from the counts of an item without a failure."""
    if row.search == CUT:
        return "not_run" if not row.judged else "incomplete", "time limit"
    if row.cases and row.refused * 2 > row.cases:
        return "incomplete", f"{row.refused} of {row.cases} cases refused: {row.refusal}"
    if row.judged:
        return "pass", ""
    if row.undetermined:
        return "undetermined", "every case is too ill-conditioned to judge"
    return "incomplete", "no case was judged"


__all__ = ["EFFORTS", "VERDICTS", "Failure", "Item", "Row", "verdict_of"]
