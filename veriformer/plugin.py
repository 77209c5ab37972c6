"""The pytest plugin: laws become items of our own class.

Imports neither torch nor hypothesis at the top, so that installing veriformer costs an unrelated
test suite nothing. Every option starts with --veriformer, and there are no fixtures.
"""

from __future__ import annotations

import functools
import json
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from veriformer.running import Item, Row
    from veriformer.timing.entrants import Target

PROPERTIES = (Path(__file__).parent / "properties").resolve()
BENCHMARKS = (Path(__file__).parent / "benchmarks").resolve()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options, all of them under one prefix."""
    group = parser.getgroup("veriformer", "laws for Transformer parts")
    add = group.addoption
    add("--veriformer", action="append", default=[], metavar="TARGET", help="an implementation to judge")
    add("--veriformer-declare", action="append", default=[], metavar="KEY=VALUE", help="a capability")
    add("--veriformer-require", action="append", default=[], metavar="WORDS", help="keywords that must be there")
    add("--veriformer-accepts", action="append", default=None, metavar="WORDS", help="keywords without a signature")
    add("--veriformer-returns", action="append", default=[], metavar="NAMES", help="what a returned tuple holds")
    add("--veriformer-framework", default="", metavar="NAME", help="numpy, torch or jax")
    add("--veriformer-device", default="cpu", metavar="NAME", help="where tensors of torch are, such as cuda")
    add("--veriformer-dtype", action="append", default=[], metavar="NAMES", help="only these dtypes")
    add("--veriformer-effort", default="", choices=["", "look", "smoke", "ci", "deep"], help="look, smoke, ci or deep")
    add("--veriformer-seed", type=int, default=0, metavar="N", help="seed of the search")
    add("--veriformer-max-time", type=float, default=None, metavar="S", help="stop judging after so many seconds")
    add("--veriformer-in-process", action="store_true", help="call targets in this process")
    add("--veriformer-json", default="", metavar="FILE", help="write the JSON report there")


class State:
    """What one pytest run knows: implementations, settings, rows."""

    def __init__(self, config: pytest.Config) -> None:
        from veriformer.checking import Report, Settings, Turn, missing_features, mixed_efforts, open_targets
        from veriformer.cli import installed, options_of
        from veriformer.targets import words

        option = config.getoption
        self.stack, self.turn = ExitStack(), Turn()
        targets = option("--veriformer")
        given = _Given(config)
        settings = Settings(
            option("--veriformer-effort") or "ci", option("--veriformer-seed"), option("--veriformer-max-time"),
            words(option("--veriformer-dtype")), (), words(option("--veriformer-require")),
            bool(targets) and not option("--veriformer-in-process"),
        )  # fmt: skip
        names = targets or installed(("numpy", "torch"), given.device)
        self.report = Report([], list(open_targets(names, options_of(given), settings, self.stack)), settings)
        mixed = not targets and not option("--veriformer-effort")
        self.effort = mixed_efforts(self.report) if mixed else (lambda implementation, operation: settings.effort)
        self.deadline = time.monotonic() + settings.max_time if settings.max_time is not None else float("inf")
        missing = missing_features(self.report.implementations, settings.require)
        if missing:
            raise pytest.UsageError("; ".join(missing))

    def items(self, laws: Any) -> Iterator[Item]:
        """Items for some laws on every implementation."""
        from veriformer.checking import items

        for one in self.report.implementations:
            settings = self.report.settings
            yield from items(
                laws, [one], functools.partial(self.effort, one), settings.seed, self.deadline, settings.dtypes
            )


class _Given:
    """The plugin's options under the command line's names."""

    def __init__(self, config: pytest.Config) -> None:
        option = config.getoption
        self.declare, self.accepts = option("--veriformer-declare"), option("--veriformer-accepts")
        self.returns, self.framework = option("--veriformer-returns"), option("--veriformer-framework")
        self.device = option("--veriformer-device")


STATE = pytest.StashKey[State]()


def targets_in_process(config: pytest.Config) -> list[Target]:
    """The targets of a run, loaded in this process, for the suite that times them; none where none is named.

    Raises UsageError where a target, capability or option cannot be used.
    """
    from veriformer.cli import options_of
    from veriformer.timing.entrants import opened

    targets = config.getoption("--veriformer", [])
    return opened(targets, options_of(_Given(config))) if targets else []


def state_of(config: pytest.Config) -> State:
    """The run's state, made when the first law or target needs it.

    Raises pytest.UsageError where a target, capability or option cannot be used.
    """
    if STATE not in config.stash:
        from veriformer.calling import UsageError

        try:
            config.stash[STATE] = State(config)
        except UsageError as error:
            raise pytest.UsageError(f"veriformer: {error}") from None
    return config.stash[STATE]


def pytest_configure(config: pytest.Config) -> None:
    """Load the targets early, so that a wrong one ends the run with one line."""
    if config.getoption("--veriformer-json"):
        _must_be_writable(config)
    if config.getoption("--veriformer") and not hasattr(config, "workerinput"):
        state_of(config)


def _must_be_writable(config: pytest.Config) -> None:
    from veriformer.calling import UsageError
    from veriformer.report.record import writable

    try:
        writable(Path(config.getoption("--veriformer-json")).resolve())
    except UsageError as error:
        raise pytest.UsageError(f"veriformer: {error}") from None


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the workers."""
    if STATE in config.stash:
        config.stash[STATE].stack.close()


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Where veriformer is, and what the targets are, when there are targets."""
    if not config.getoption("--veriformer"):
        return []
    from veriformer.report.terminal import implementation_lines

    lines = [f"veriformer: {Path(__file__).parent}"]
    if STATE in config.stash:
        for one in config.stash[STATE].report.implementations:
            lines += implementation_lines(one)
    return lines


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Law files, and the suite that times, are collected whatever python_files says (what it admits, pytest does)."""
    if not file_path.name.startswith("test_") or file_path.suffix != ".py":
        return None
    if file_path.parent.resolve() not in (PROPERTIES, BENCHMARKS / "speed"):
        return None
    patterns = parent.config.getini("python_files")
    if any(file_path.match(pattern) for pattern in patterns):
        return None
    return pytest.Module.from_parent(parent, path=file_path)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Of the benchmarks only the suite that times is collected, whatever python_files says."""
    if BENCHMARKS.name not in collection_path.parts:
        return None
    path, speed = collection_path.resolve(), BENCHMARKS / "speed"
    outside = BENCHMARKS in path.parents and path != speed and path.parent != speed
    return True if outside and path.name != "__init__.py" else None


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: Any, name: str, obj: object) -> list[pytest.Item] | None:
    """Laws, and tests made by `conformance`, become items of our class."""
    if type(obj).__module__ == "veriformer.law" and type(obj).__name__ in ("Law", "LawFamily"):
        laws = [obj] if type(obj).__name__ == "Law" else list(obj)  # type: ignore[call-overload]
        state = state_of(collector.config)
        return [
            LawItem.from_parent(collector, name=f"{item.law.id}[{item.implementation.name}-{item.dtype}]", item=item)
            for item in state.items(laws)
        ]
    carried = getattr(getattr(obj, "__func__", obj), "veriformer", None)
    if carried is not None and type(carried).__name__ == "Item":
        return [LawItem.from_parent(collector, name=f"{carried.law.id}[{carried.dtype}]", item=carried)]
    return None


class LawBroken(Exception):
    """Carries the row of a law that does not hold to the report, and where its script is."""

    def __init__(self, row: Row, script: tuple[str, str]) -> None:
        super().__init__(row.law.id)
        self.row, self.script = row, script


class LawItem(pytest.Item):
    """One law on one implementation in one dtype; no fixtures, no traceback."""

    def __init__(self, *, item: Item, **rest: Any) -> None:
        super().__init__(**rest)
        self.item = item

    def runtest(self) -> None:
        """Judge the item and raise, skip or xfail as the verdict says."""
        from veriformer.catalogue import tentative
        from veriformer.checking import RED
        from veriformer.report.kept import keep_if_failed
        from veriformer.report.record import row_record

        turn = self.config.stash[STATE].turn if STATE in self.config.stash else None
        row = turn.run(self.item) if turn else self.item.run()
        self.user_properties.append(("veriformer", json.dumps(row_record(row))))
        if row.verdict in (*RED, "suite_error", "incomplete", "not_run"):
            if tentative(row.law) and row.verdict != "suite_error":
                pytest.xfail("tentative law: not counted yet")
            raise LawBroken(row, keep_if_failed(row, self.item.implementation))
        if row.verdict == "xfail":
            pytest.xfail(row.reason)
        if row.verdict != "pass":
            pytest.skip(f"{row.verdict.replace('_', ' ')}: {row.reason}")

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Our block instead of a traceback."""
        if isinstance(excinfo.value, LawBroken):
            from veriformer.report.terminal import row_text

            return row_text(excinfo.value.row, excinfo.value.script)
        return super().repr_failure(excinfo)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        """Where the item stands in the report."""
        return self.path, None, self.name


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep the rows; under xdist they come from the workers this way too."""
    if report.when == "call" or report.outcome == "skipped":
        _rows.extend(text for key, text in report.user_properties if key == "veriformer" and isinstance(text, str))


_rows: list[str] = []


def pytest_sessionstart(session: pytest.Session) -> None:
    """A run starts without rows."""
    _rows.clear()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Write the JSON report, and refuse to be green when nothing was collected for a target."""
    config = session.config
    if hasattr(config, "workerinput"):
        return
    if config.getoption("--veriformer") and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = 4
    path = config.getoption("--veriformer-json")
    if path:
        from veriformer.checking import Report
        from veriformer.report.record import assemble, header_of_rows, write

        report = config.stash[STATE].report if STATE in config.stash else Report()
        report.complete = exitstatus in (0, 1)
        write(Path(path).resolve(), assemble(header_of_rows(report, _rows), _rows))
