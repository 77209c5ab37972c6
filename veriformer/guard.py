"""Before anyone is accused: does the law hold for the reference on the same case?

A law that the reference breaks as well says nothing about an implementation. The reducer stays
among cases on which the reference keeps the law, and a failure on any other is the suite's fault.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

import numpy as np

from veriformer import oracle
from veriformer.boundary import Boundary, Outcome, Request
from veriformer.budgets import Precision
from veriformer.calling import CallPlan
from veriformer.case import Case, flattened, round_to
from veriformer.declarations import Capabilities
from veriformer.dialect import reference_call
from veriformer.expect import recording
from veriformer.frameworks import framework_named
from veriformer.law import Law
from veriformer.models import ModelBoundary, ModelFacts
from veriformer.operations import OPERATIONS
from veriformer.reference_models import MODELS, stand_in
from veriformer.subject import Implementation, attempt


class Unknown(Exception):
    """The reference cannot be asked here."""


def reference_keeps(law: Law, implementation: Implementation, dtype: str, arguments: tuple[Any, ...]) -> bool:
    """Whether the reference, under the implementation's own conventions, keeps the law on these arguments.

    True where only torch could tell and torch is absent.
    """
    about = implementation.description
    capabilities = about.capabilities

    def call(name: str, operation: str, request: Request) -> Outcome:
        if operation in about.models:
            return walked(operation, about.models[operation], request)
        if request.gradient is not None:
            return differentiated(operation, capabilities[operation], request)
        case = Case(operation, request.arrays, request.keywords, request.dtype)
        try:
            return computed(case, capabilities[operation])
        except ValueError as error:  # as a law may want it
            return Outcome("refused", str(error))

    with recording():
        try:
            return attempt(law, replace(implementation, call=call, start=None), dtype, arguments) is None
        except Unknown:
            return True
        except Exception:  # refused, or a law that such arguments do not suit
            return False


def walked(operation: str, facts: ModelFacts, request: Request) -> Outcome:
    """What the reference's model gives for a program of moves, rounded: of the given weights, or of its own."""
    model = MODELS[operation]
    if not facts.weights:
        model = stand_in(operation, facts.width or 1, facts.window, facts.max_length, facts.source_vocabulary)
    methods = (word for word in OPERATIONS[operation].words if hasattr(model, word))
    takes = {word: {extra: extra for extra in found} for word, found in facts.takes.items()}
    known = replace(facts, words=tuple(methods), takes=takes)
    plan = CallPlan(operation, {word: word for word in OPERATIONS[operation].keywords})
    boundary = ModelBoundary(model, plan, Capabilities(), framework_named("numpy"), facts=known)
    exact = boundary.cross(replace(request, dtype="float64"))
    results = tuple(round_to(result, request.dtype) for result in exact.results)
    return replace(exact, results=results, dtypes=(request.dtype,) * len(results))


def computed(case: Case, capabilities: Capabilities) -> Outcome:
    """The reference's results, rounded as the implementation's would be."""
    precision = Precision.of(capabilities, case.dtype)
    values = values_of(case, capabilities, precision)
    dtypes = [case.table.result_dtype(name, case.dtype) for name in case.table.results_for(case.arrays)]
    results = tuple(round_to(np.asarray(v), dtype) for v, dtype in zip(values, dtypes, strict=True))
    return Outcome("ok", results=results, dtypes=tuple(dtypes))


def values_of(case: Case, capabilities: Capabilities, precision: Precision) -> list[Any]:
    """The reference's results in float64."""
    if case.operation in oracle.ATTENTIONS:  # what an empty row gives is declared
        return [bound.value for bound in oracle.bounds(case, capabilities, precision)]
    if case.operation == "generate":
        return [oracle.generated(case)]
    found = reference_call(case.operation, capabilities, case.arrays, case.keywords)
    return list(found) if isinstance(found, (tuple, list)) else [found]


def differentiated(operation: str, capabilities: Capabilities, request: Request) -> Outcome:
    """The reference in torch, with the gradients that the request asks for. Raises Unknown without torch."""
    if importlib.util.find_spec("torch") is None:
        raise Unknown
    table = OPERATIONS[operation]

    def function(*positional: Any, **named: Any) -> Any:
        ours, positional = (positional[:1], positional[1:]) if table.given else ((), positional)
        arrays = dict(zip(table.arrays, positional, strict=False))
        arrays |= {name: getattr(one, name.partition(".")[2]) for one in ours for name in table.params}
        arrays |= flattened(positional[-1], "params") if "params" in table.positional else {}
        arrays |= {name: named.pop(name) for name in table.options if name in named}
        return reference_call(operation, capabilities, arrays, named)

    plan = CallPlan(operation, {word: word for word in (*table.options, *table.keywords)})
    exact = Boundary(function, plan, Capabilities(), framework_named("torch")).cross(replace(request, dtype="float64"))
    gradients = {name: None if g is None else round_to(g, request.dtype) for name, g in exact.gradients.items()}
    results = tuple(round_to(result, request.dtype) for result in exact.results)
    return replace(
        exact,
        results=results,
        dtypes=tuple(table.result_dtype(name, request.dtype) for name in table.results),
        gradients=gradients,
        gradient_dtypes=dict.fromkeys(exact.gradient_dtypes, request.dtype),
    )
