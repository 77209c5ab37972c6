"""The command line: `veriformer check | laws | list | replay | demo | bench | history | matrix | report`."""

from __future__ import annotations

import argparse
import json
import secrets
import shlex
import sys
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import veriformer
from veriformer.calling import UsageError, nearest
from veriformer.operation import MAIN
from veriformer.report import FOLDER
from veriformer.targets import Options, words

FIRST_LOOK = MAIN
"""The dtype of a check without targets; naming an effort or a dtype asks for more."""
EFFORT_WORDS = ("look", "smoke", "ci", "deep")
"""From the quickest to the most thorough, known here without importing the laws."""
DEMO_TASKS = ("reverse", "addition", "pointers")
"""What `veriformer demo` trains, known here without importing torch."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and leave with its exit code; a usage error is one line and exit code 2."""
    parser = build_parser()
    given = parser.parse_args(arguments)
    try:
        code = given.run(given)
    except UsageError as error:
        print(f"veriformer: {error}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        tails = {run_check: "; the report holds what was judged", run_matrix: "; the same command goes on from here"}
        tail = tails.get(given.run, "")
        print(f"veriformer: interrupted{tail}", file=sys.stderr)
        code = 130
    except BrokenPipeError:
        sys.stderr.close()
        code = 141
    except Exception:
        traceback.print_exc()
        print("veriformer: the suite itself is at fault; please report the lines above", file=sys.stderr)
        code = 3
    raise SystemExit(code)


class _Parser(argparse.ArgumentParser):
    """argparse, but errors are one line."""

    def error(self, message: str) -> Any:
        raise SystemExit(_usage(f"{message}; see `{self.prog} --help`"))


def _usage(message: str) -> int:
    print(f"veriformer: {message}", file=sys.stderr)
    return 2


def build_parser() -> argparse.ArgumentParser:
    """The parser with every command."""
    parser = _Parser(prog="veriformer", description="Tells whether a Transformer part is right.")
    parser.add_argument("--version", action="version", version=f"veriformer {veriformer.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=_Parser)
    add_check(commands)
    laws = commands.add_parser("laws", help="list the laws, or explain one")
    laws.add_argument("id", nargs="?", help="a law's id, an operation, or a word in an id")
    laws.set_defaults(run=run_laws)
    listing = commands.add_parser("list", help="list operations, registered implementations, capabilities")
    listing.add_argument("operation", nargs="?", help="one operation alone: its call, its laws, names understood")
    listing.set_defaults(run=run_list)
    replay = commands.add_parser("replay", help="run one failing case again")
    replay.add_argument("id", help="the short name printed with a failure")
    replay.add_argument("--output", default=FOLDER, metavar="DIR", help="where the failure was written")
    replay.set_defaults(run=run_replay)
    add_demo(commands)
    add_bench(commands)
    add_history(commands)
    add_matrix(commands)
    return parser


def add_check(commands: Any) -> None:
    """The options of `veriformer check`."""
    check = commands.add_parser("check", help="judge implementations")
    add = check.add_argument
    add("targets", nargs="*", metavar="TARGET", help="OPERATION=module:attribute, a module, a file, a registered name")
    add_target_options(add)
    add("--require", action="append", default=[], metavar="WORDS", help="keywords whose absence is exit code 4")
    add("--law", action="append", default=[], metavar="ID", help="only these laws (ids, names or operations)")
    add("--dtype", action="append", default=[], metavar="NAMES", help="only these dtypes")
    add(
        "--effort",
        default="",
        choices=EFFORT_WORDS,
        help="look: some pinned cases; smoke: all; ci: and a search; deep: a long one",
    )
    add("--seed", type=int, default=None, metavar="N", help="seed of the search (default 0; at random for deep)")
    add("--max-time", type=float, default=None, metavar="S", help="stop after so many seconds")
    add("--timeout", type=float, default=20.0, metavar="S", help="a call that takes longer is a hang")
    add("--import-timeout", type=float, default=None, metavar="S", help="an import that takes longer is a hang (300)")
    add("--offline", action="store_true", help="targets have no network; reaching for it is an error that says so")
    add("--device", default="cpu", metavar="NAME", help="where tensors of torch are, such as cuda (default cpu)")
    add("--in-process", action="store_true", help="call the implementation in this process")
    add("--output", default=FOLDER, metavar="DIR", help=f"where reports and scripts go (default {FOLDER})")
    add("--json", metavar="FILE", help="the whole report in one file")
    add("--junitxml", metavar="FILE", help="the report as JUnit XML")
    check.set_defaults(run=run_check)


def add_target_options(add: Any) -> None:
    """What can be said about targets, read by `options_of`; add is a parser's add_argument."""
    add("--declare", action="append", default=[], metavar="KEY=VALUE", help="a capability, see `veriformer list`")
    add("--accepts", action="append", metavar="WORDS", help="keywords a function without a signature takes, or none")
    add("--returns", action="append", default=[], metavar="NAMES", help="what a returned tuple holds, e.g. out,lse")
    add("--framework", default="", help="numpy, torch or jax; else seen from the function's module")


def add_demo(commands: Any) -> None:
    """The options of `veriformer demo`."""
    demo = commands.add_parser("demo", help="train three small models of the reference until they solve their tasks")
    demo.add_argument("--seed", type=int, default=0, metavar="N", help="seed of weights and sequences (default 0)")
    demo.add_argument("--task", default="all", choices=[*DEMO_TASKS, "all"], help="only this task")
    demo.add_argument(
        "--output", default=f"{FOLDER}/demo", metavar="DIR", help=f"where pictures go (default {FOLDER}/demo)"
    )
    demo.set_defaults(run=run_demo)


def add_bench(commands: Any) -> None:
    """The options of `veriformer bench`."""
    bench = commands.add_parser("bench", help="how fast an implementation is beside others, if it is right")
    add = bench.add_argument
    add("targets", nargs="+", metavar="TARGET", help="as for check")
    add("--workload", action="append", default=[], metavar="ID", help="only these workloads")
    add_target_options(add)
    add(
        "--output", default=f"{FOLDER}/bench", metavar="DIR", help=f"where picture and JSON go (default {FOLDER}/bench)"
    )
    bench.set_defaults(run=run_bench)


def add_history(commands: Any) -> None:
    """The options of `veriformer history`."""
    history = commands.add_parser("history", help="performance and accuracy of this repository's commits")
    add = history.add_argument
    add("--record", nargs="?", const="HEAD^!", metavar="RANGE", help="measure these commits first (default: the last)")
    add("--quick", action="store_true", help="with --record: only a part of the workloads")
    add("--branch", default="", metavar="NAME", help="whose commits (default: the branch that is checked out)")
    add("--asv", action="store_true", help="asv's own pages, made to work offline, instead")
    add("--no-open", action="store_true", help="open nothing")
    history.set_defaults(run=run_history)


def add_matrix(commands: Any) -> None:
    """The options of `veriformer matrix` and `veriformer report`."""
    matrix = commands.add_parser("matrix", help="judge every library that is installed, one variant at a time")
    add = matrix.add_argument
    add("libraries", nargs="*", metavar="LIBRARY", help="only these, as in torch or torch:math (default: all)")
    add("--effort", default="ci", choices=EFFORT_WORDS, help="as for check (default ci)")
    add("--seed", type=int, default=0, metavar="N", help="seed of the search (default 0)")
    add("--law", action="append", default=[], metavar="ID", help="only these laws (ids, names or operations)")
    add("--dtype", action="append", default=[], metavar="NAMES", help="only these dtypes")
    add("--max-time", type=float, default=None, metavar="S", help="no more laws of a variant after so many seconds")
    add("--jobs", type=int, default=2, metavar="N", help="variants that are judged at the same time (default 2)")
    add("--fresh", action="store_true", help="judge again what was judged before and has not changed")
    add(
        "--output", default=f"{FOLDER}/matrix", metavar="DIR",
        help=f"where matrix.json and matrix.md go (default {FOLDER}/matrix)",
    )  # fmt: skip
    matrix.set_defaults(run=run_matrix, kept=f"{FOLDER}/matrix")
    report = commands.add_parser("report", help="put results of several runs or environments together")
    report.add_argument("files", nargs="+", metavar="FILE", help="matrix.json of matrix, or what check --json wrote")
    report.add_argument(
        "--output", default=f"{FOLDER}/matrix", metavar="DIR",
        help=f"where matrix.json and matrix.md go (default {FOLDER}/matrix)",
    )  # fmt: skip
    report.set_defaults(run=run_report)


def run_check(given: argparse.Namespace) -> int:
    """Judge the targets, show and store what came of it."""
    from veriformer.checking import DEFAULT_TARGETS, Report, Settings, open_targets
    from veriformer.report.live import show_run

    bare = not given.targets
    first_look = bare and not given.effort and not given.dtype
    effort = given.effort or ("look" if first_look else "smoke" if bare else "ci")
    seed = given.seed if given.seed is not None else secrets.randbelow(10**6) if effort == "deep" else 0
    options = options_of(given)
    dtypes = (FIRST_LOOK,) if first_look else words(given.dtype)
    settings = Settings(
        effort,
        seed,
        given.max_time,
        dtypes,
        words(given.law),
        words(given.require),
        not given.in_process,
        given.timeout,
        given.import_timeout,
        given.offline,
    )
    with ExitStack() as stack:
        targets = given.targets or installed(DEFAULT_TARGETS, given.device)
        implementations = list(open_targets(targets, options, settings, stack))
        report = Report([], implementations, settings)
        show_run(report, given.output, given.json, given.junitxml)
    return report.exit_code


def installed(names: Sequence[str], device: str = "cpu") -> list[str]:
    """The default targets whose framework is there and has arrays on the device; a line says which is not there."""
    import importlib.util

    names = [name for name in names if name != "numpy" or device == "cpu"]
    found = [name for name in names if name == "numpy" or importlib.util.find_spec(name)]
    for name in names:
        if name not in found:
            print(f"{name}: not installed (pip install veriformer[{name}])")
    return found


def options_of(given: Any) -> Options:
    """The options for targets, pyproject.toml's [tool.veriformer] declarations first.

    given has declare, accepts, returns and framework as the command line gives them.

    Raises UsageError for a declaration without "=".
    """
    declare = project_table().get("declare", {})
    if not isinstance(declare, dict):
        raise UsageError("pyproject.toml: [tool.veriformer.declare] is a table of KEY = VALUE")
    declare = dict(declare)
    for pair in given.declare:
        key, equals, value = pair.partition("=")
        if not equals:
            raise UsageError(f"--declare {pair!r}: wanted KEY=VALUE, as in --declare causal_alignment=top_left")
        declare[key.strip()] = value.strip()
    accepts = None if given.accepts is None else words(given.accepts)
    return Options(accepts, words(given.returns), given.framework, declare, getattr(given, "device", "cpu"))


def project_table() -> dict[str, Any]:
    """[tool.veriformer] of the pyproject.toml in the working directory.

    Raises UsageError where that file cannot be read.
    """
    import tomllib

    path = Path("pyproject.toml")
    if not path.is_file():
        return {}
    try:
        return dict(tomllib.loads(path.read_text(encoding="utf-8")).get("tool", {}).get("veriformer", {}))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"pyproject.toml cannot be read: {error}") from None


def run_laws(given: argparse.Namespace) -> int:
    """List the laws, or explain the ones that a word selects."""
    from veriformer.report.listing import explain_laws, list_laws

    return list_laws() if given.id is None else explain_laws(given.id)


def run_list(given: argparse.Namespace) -> int:
    """List operations, registered implementations and capabilities, or what there is to one operation."""
    from veriformer.report.listing import list_everything, list_operation

    return list_everything() if given.operation is None else list_operation(given.operation)


def run_replay(given: argparse.Namespace) -> int:
    """Run one failing case again: 1 while it fails, 0 once it holds."""
    from veriformer.report.replay import replay

    found = sorted(Path(given.output).glob(f"*-{given.id}.replay.json"))
    if not found:
        known = [
            path.name.removesuffix(".replay.json").rpartition("-")[2]
            for path in Path(given.output).glob("*.replay.json")
        ]
        tail = nearest(given.id, known) if known else f"; {given.output} holds no failures"
        raise UsageError(f"no failure {given.id!r}{tail}")
    return replay(json.loads(found[0].read_text(encoding="utf-8")), found[0])


def run_bench(given: argparse.Namespace) -> int:
    """Time the targets beside installed baselines: 0, or 1 where one is wrong and was not timed."""
    from veriformer.timing.bench import show_bench

    if not all(words([one]) for one in given.workload):
        raise UsageError("--workload '': wanted the id of a workload, or no --workload for all")
    return show_bench(given.targets, options_of(given), words(given.workload), given.output, flags_of(given))


def flags_of(given: argparse.Namespace) -> str:
    """What the user said about targets, to be repeated in a command: each option with a blank before."""
    said = [(f"--{name}", value) for name in ("declare", "accepts", "returns") for value in getattr(given, name) or ()]
    said += [("--framework", given.framework)] if given.framework else []
    return "".join(f" {flag} {shlex.quote(value)}" for flag, value in said)


def run_history(given: argparse.Namespace) -> int:
    """Write and open the report on past commits, or asv's pages."""
    from veriformer.history.command import show_history

    return show_history(given)


def run_matrix(given: argparse.Namespace) -> int:
    """Judge every installed library: 0 where nothing fails but what is known, 1, or 4 where something stayed open."""
    from veriformer.matrix.command import show_matrix
    from veriformer.matrix.process import Way

    way = Way(given.effort, given.seed, words(given.dtype), words(given.law), given.max_time)
    return show_matrix(given, way)


def run_report(given: argparse.Namespace) -> int:
    """Put results together: 0, 1 or 4 as for matrix."""
    from veriformer.matrix.command import show_report

    return show_report(given)


def run_demo(given: argparse.Namespace) -> int:
    """Train the demo's tasks: 0 if all are solved, 1 if not."""
    import importlib.util

    if given.seed < 0:
        raise UsageError(f"--seed {given.seed}: wanted a whole number from 0")
    if importlib.util.find_spec("torch") is None:
        raise UsageError("demo needs torch, which is not installed: pip install veriformer[torch]")
    from veriformer.demo.show import show_demo

    return show_demo(given.seed, DEMO_TASKS if given.task == "all" else (given.task,), given.output)


if __name__ == "__main__":
    main()
