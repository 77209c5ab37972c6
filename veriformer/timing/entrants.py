"""Who is timed at a workload: targets that a user names, the installed baselines, and whether they are right there."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

from veriformer.benchmarks.implementations import IMPLEMENTATIONS, Absent, Prepared, named
from veriformer.benchmarks.judging import Accuracy, Wrong, accuracy, worst
from veriformer.benchmarks.measure import NUMBERS, judged
from veriformer.benchmarks.workloads import WORKLOADS, Workload, workload_named
from veriformer.boundary import describe_error
from veriformer.calling import UsageError
from veriformer.models import ModelBoundary
from veriformer.oracle import COMPOSITES
from veriformer.targets import Loaded, Options, load

TORCH_TO_JUDGE = "judging it needs torch: pip install veriformer[torch]"


@dataclass(frozen=True)
class Ending:
    """Why a target is not called in this process: the workload of its last call elsewhere, and what that came to."""

    workload: str
    reason: str


@dataclass(frozen=True)
class Target:
    """An implementation that a user named. words: as it was named. ending: of its process, in a first call."""

    words: str
    loaded: Loaded
    ending: Ending | None = None

    @property
    def name(self) -> str:
        """The implementation's name in tables."""
        return self.loaded.description.name


def opened(targets: Sequence[str], options: Options) -> list[Target]:
    """Every implementation that targets name, in this process, each once.

    Raises UsageError as `veriformer.targets.load` does.
    """
    found = [Target(words, loaded) for words in targets for loaded in load(words, options)]
    return list({(one.name, *one.loaded.boundaries): one for one in found}.values())


def workloads_of(targets: Sequence[Target], names: Sequence[str] = ()) -> list[Workload]:
    """The workloads that are named, or all, as far as they are of an operation that a target has.

    Raises UsageError, in one line, for an unknown workload, for one whose operation no target has, and where nothing
    that the targets have is timed.
    """
    had = {operation for one in targets for operation in one.loaded.boundaries}
    who = ", ".join(dict.fromkeys(one.words for one in targets))
    for workload in map(known, names):
        if workload.operation not in had:
            raise UsageError(f"{who} has no {workload.operation}, which {workload.id} times; {timed(had)}")
    found = [one for one in WORKLOADS if one.operation in had and (not names or one.id in names)]
    if not found:
        raise UsageError(f"{who} has no operation that is timed; {timed(had)}")
    return found


def known(name: str) -> Workload:
    """The workload of an id. Raises UsageError with the nearest one."""
    try:
        return workload_named(name)
    except ValueError as error:
        raise UsageError(str(error)) from None


def timed(had: set[str]) -> str:
    """What could be asked for instead: the workloads of operations that there are, else the operations."""
    found = [one.id for one in WORKLOADS if one.operation in had]
    return f"timed of it: {', '.join(found)}" if found else f"timed are {', '.join(IMPLEMENTATIONS)}"


def frameworks(workloads: Sequence[Workload]) -> tuple[list[str], list[str]]:
    """The frameworks of the baselines of workloads: those that are installed, and those that are not."""
    names = [name.partition(":")[0] for workload in workloads for name in IMPLEMENTATIONS[workload.operation]]
    found = list(dict.fromkeys(names))
    there = [name for name in found if importlib.util.find_spec(name)]
    return there, [name for name in found if name not in there]


def baselines(workload: Workload, but: Sequence[str] = ()) -> list[str]:
    """Names of the installed baselines of a workload, without those that are targets themselves."""
    there, _ = frameworks([workload])
    names = IMPLEMENTATIONS[workload.operation]
    return [name for name in names if name.partition(":")[0] in there and name not in but]


def baseline(name: str, workload: Workload) -> Prepared:
    """A baseline made ready. Raises Absent where it cannot do the workload."""
    return prepared(named(name, workload.operation), workload)


def prepared(loaded: Loaded, workload: Workload) -> Prepared:
    """An implementation made ready for a workload.

    Raises Absent, saying why, where it lacks something, or where nobody could judge what it gives.
    """
    boundary = loaded.boundaries.get(workload.operation)
    if isinstance(boundary, ModelBoundary) and not boundary.facts.weights:
        wanted = "wanted a factory that takes them: make(params, *, heads, …)"
        raise Absent(f"{loaded.description.name} has weights of its own; {wanted}")
    found = Prepared(loaded, workload)
    if (found.needs_gradient or workload.operation in COMPOSITES) and not importlib.util.find_spec("torch"):
        raise Absent(TORCH_TO_JUDGE)
    return found


def checked(one: Prepared) -> Accuracy:
    """How right two calls on different inputs are.

    Raises Wrong, in one line, where a result is wrong, where the call raises and where it returns something else.
    """
    found = []
    for number in NUMBERS:
        try:
            found.append(judged(one, number))
        except Wrong:
            raise
        except (Exception, SystemExit) as error:
            raise Wrong(f"{one.name}: its call, or reading its result, raised {describe_error(error)}") from error
    return worst(found)


def right(one: Prepared, number: int, returned: object) -> Accuracy:
    """How right one result is. Raises Wrong, in one line, where it is wrong or no result at all."""
    try:
        return accuracy(one, number, returned)
    except Wrong:
        raise
    except Exception as error:
        raise Wrong(f"{one.name}: what it returned cannot be judged: {describe_error(error)}") from error


def doable(workloads: Sequence[Workload], targets: Sequence[Target]) -> None:
    """Raise UsageError, with the reasons, where no target can do any of the workloads."""
    reasons: list[str] = []
    for workload in workloads:
        for one in targets:
            try:
                prepared(one.loaded, workload)
                return
            except Absent as absent:
                reasons.append(f"{absent} ({workload.id})")
    raise UsageError(f"nothing to time: {'; '.join(dict.fromkeys(reasons))}")
