"""A first call of every target in a process of its own: whoever ends its process, or hangs, is not called in ours."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from veriformer.benchmarks.implementations import Absent, Prepared
from veriformer.benchmarks.workloads import Workload
from veriformer.boundary import Outcome, Request
from veriformer.checking import Settings, open_targets
from veriformer.moves import steps
from veriformer.subject import Implementation
from veriformer.targets import Options
from veriformer.timing.entrants import Ending, Target, prepared

PATIENCE = 20.0
"""Seconds that a first call may take."""
Workers = dict[tuple[str, str], Implementation]
"""By how a target was named, and its implementation's name."""


def workers_of(targets: Sequence[str], options: Options, stack: ExitStack) -> Workers:
    """Every implementation that targets name, each target imported by a process that ends with the stack.

    Raises UsageError as `veriformer.targets.load` does, and where the import ends the process or hangs.
    """
    settings = Settings(isolate=True, timeout=PATIENCE)
    return {
        (words, one.description.name): one
        for words in dict.fromkeys(targets)
        for one in open_targets([words], options, settings, stack)
    }


def tried(targets: Sequence[Target], workers: Workers, workloads: Sequence[Workload]) -> list[Target]:
    """The targets after a first call of each at its workloads, with the ending of those that did not survive it."""
    return [replace(one, ending=ending(one, workers[one.words, one.name], workloads)) for one in targets]


def ending(target: Target, worker: Implementation, workloads: Sequence[Workload]) -> Ending | None:
    """How the process of a target ended, at the first workload where it did; None where it lives on."""
    for workload in workloads:
        try:
            ready = prepared(target.loaded, workload)
        except Absent:
            continue
        outcome = called(ready, worker)
        if outcome.kind == "crash":
            return Ending(workload.id, f"ended its process ({outcome.message.rpartition(': ')[2]})")
        if outcome.kind == "timeout":
            return Ending(workload.id, f"took longer than {PATIENCE:.3g} s")
    return None


def called(ready: Prepared, worker: Implementation) -> Outcome:
    """What came of one call, and where gradients are timed, of one for gradients too.

    Of models what the workload makes of them: two steps, or the whole's logits.
    """
    case, name, operation = ready.case(0), ready.name, ready.workload.operation
    program = (
        tuple(steps(case["tokens"], [ready.workload.prompt - 1, 1])) if ready.workload.direction == "generation" else ()
    )
    request = Request(case.arrays, case.keywords, case.dtype, program=program)
    outcome = worker.call(name, operation, request)
    if outcome.kind != "ok" or not ready.needs_gradient:
        return outcome
    first, *others = outcome.results
    cotangents = (ready.cotangent(0, first.shape), *[None] * len(others))
    return worker.call(name, operation, replace(request, gradient=ready.inputs, cotangents=cotangents))
