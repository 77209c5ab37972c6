"""An operation under test as a law sees it: a case in, float64 out, with the reference beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from veriformer import oracle
from veriformer.boundary import Outcome, Request
from veriformer.budgets import Bound, Precision
from veriformer.case import Case, round_to
from veriformer.declarations import Capabilities
from veriformer.expect import Broken, Refused, current
from veriformer.law import Domain, Law
from veriformer.models import ModelFacts
from veriformer.moves import GIVES_LOGITS, Move, Program
from veriformer.operations import OPERATIONS
from veriformer.targets import Description, Options

Caller = Callable[[str, str, Request], Outcome]
"""(implementation name, operation, request) -> outcome, in process or in a worker."""
Starter = Callable[[str, str, Request], Callable[[], Outcome]]
"""The same, but what comes back waits for the outcome; a worker calculates meanwhile."""
Cotangents = np.ndarray | tuple[np.ndarray | None, ...] | None
"""A cotangent of the first result, one for each result (None: it does not count), or None for ones."""


@dataclass(frozen=True)
class Implementation:
    """A description and the way to call it; target and options are what the user wrote, if anything."""

    description: Description
    call: Caller
    target: str = ""
    options: Options = field(default_factory=Options)
    start: Starter | None = None
    label: str = ""
    confirmed: dict[tuple[int, str], bool] = field(default_factory=dict, compare=False, repr=False)
    """Whether expected failures that spread still fail, by entry and dtype."""

    @property
    def name(self) -> str:
        """The name in ids and reports: the description's, unless two implementations share it."""
        return self.label or self.description.name

    def dtypes(self, operation: str) -> tuple[str, ...]:
        """The dtypes to judge in."""
        declared = self.description.capabilities[operation].dtypes
        if operation in self.description.models:
            declared = self.description.models[operation].dtypes
        return declared or OPERATIONS[operation].dtypes or self.description.default_dtypes

    def main_dtype(self, operation: str) -> str:
        """float32, or for a model float64, in which its budget is the narrowest; else the first declared."""
        dtypes, wanted = self.dtypes(operation), "float64" if OPERATIONS[operation].words else "float32"
        return wanted if wanted in dtypes else dtypes[0]

    def domain(self, operation: str, dtype: str) -> Domain:
        """What may be drawn for one operation in one dtype."""
        about = self.description
        return Domain.of(
            operation,
            dtype,
            about.plans[operation],
            about.capabilities[operation],
            framework=about.framework,
            others=tuple(about.plans),
            vjp=operation in about.vjps,
            model=about.models.get(operation),
        )


def writes(capabilities: Capabilities) -> tuple[str, ...]:
    """Names of the inputs that a call may write into and return."""
    return ("k_cache", "v_cache") if capabilities.cache_in_place else ()


def filled(call: Call) -> Outcome:
    """What generation gave, with pad up to max_length: it may end when all rows have ended, or go on with pad."""
    ids, most = call.outcome.results[0], call.case["max_length"]
    if ids.ndim != 2 or ids.shape[1] >= most:
        return call.outcome
    ids = np.pad(ids, ((0, 0), (0, most - ids.shape[1])), constant_values=call.case["pad"])
    return replace(call.outcome, results=(ids,))


@dataclass(frozen=True)
class Call:
    """One call made during an attempt, kept for the report and the script."""

    operation: str
    case: Case
    outcome: Outcome
    gradient: tuple[str, ...] | None = None
    cotangents: tuple[Any, ...] = ()
    program: Program = ()
    aside: bool = False
    """It only helped to say what is allowed."""


def wanted_shapes(call: Call, facts: ModelFacts | None) -> tuple[tuple[int, ...], ...]:
    """The shapes of a call's results: for a model, those of the logits of every full and step.

    Raises Refused for a model that could not be made.
    """
    if facts is None:
        return oracle.shapes(call.case)
    arrays = [move.arrays for move in call.program if move.word in GIVES_LOGITS] or [call.case.arrays]
    tokens = [given["target" if "target" in given else "tokens"] for given in arrays]
    if not facts.weights and facts.width is None:
        raise Refused(facts.trouble)
    width = oracle.vocabulary_of(call.case) if facts.weights else facts.width
    return tuple((*one.shape, width) for one in tokens)


class Subject:
    """One operation of one implementation in one dtype.

    Calling it raises Refused where the implementation declines the case, and Broken where it
    raises, crashes, hangs, or returns something of the wrong type or shape.
    """

    def __init__(self, implementation: Implementation, operation: str, dtype: str) -> None:
        self.implementation, self.operation, self.dtype = implementation, operation, dtype
        self.domain = implementation.domain(operation, dtype)
        self.capabilities = self.domain.capabilities
        self.precision = Precision.of(self.capabilities, dtype)

    @property
    def writes(self) -> tuple[str, ...]:
        """Inputs that a call may write into and return: a cache where that is declared."""
        return writes(self.capabilities)

    @property
    def largest(self) -> float:
        """The dtype's largest number."""
        return float(self.precision.largest)

    def outcome(
        self,
        case: Case,
        gradient: tuple[str, ...] | None = None,
        cotangents: tuple[Any, ...] = (),
        watch: bool = True,
    ) -> Outcome:
        """Everything that came of one call; shape and dtype are not judged here."""
        case = case.as_operation(self.operation)
        return self._begun(case, gradient, cotangents, watch)()

    def _begun(
        self,
        case: Case,
        gradient: tuple[str, ...] | None,
        cotangents: tuple[Any, ...],
        watch: bool,
        program: Program = (),
        aside: bool = False,
    ) -> Callable[[], Outcome]:
        """Begin a call; what comes back waits for its outcome."""
        request = Request(case.arrays, case.keywords, case.dtype, case.layout, gradient, cotangents, watch, program)
        about = self.implementation
        if about.start is None:
            outcome = about.call(about.description.name, self.operation, request)
            return lambda: self._judged(Call(self.operation, case, outcome, gradient, cotangents, program, aside))
        fetch = about.start(about.description.name, self.operation, request)
        return lambda: self._judged(Call(self.operation, case, fetch(), gradient, cotangents, program, aside))

    def run(self, case: Case, moves: Iterable[Move], aside: bool = False) -> tuple[np.ndarray, ...]:
        """The logits of every full and step among the moves of a model, in order.

        case: the weights, where the model is made of given ones. Each logits is [B,m,V], B and m those of the tokens.
        aside: they only help to say what is allowed.
        """
        return self.walked(case, moves, aside=aside).results

    def walked(self, case: Case, moves: Iterable[Move], watch: bool = False, aside: bool = False) -> Outcome:
        """Everything that came of a program of moves."""
        program = tuple(moves)
        outcome = self._begun(case.as_operation(self.operation), None, (), watch, program, aside)()
        shapes = wanted_shapes(Call(self.operation, case, outcome, program=program), self.facts)
        asked = [move for move in program if move.word in GIVES_LOGITS]
        for move, logits, wanted in zip(asked, outcome.results, shapes, strict=True):
            if logits.shape != wanted:
                raise Broken("shape", f"{move.word} gave shape {logits.shape}, wanted {wanted}")
        return outcome

    @property
    def facts(self) -> ModelFacts | None:
        """What is known of a model; None for a function."""
        return self.domain.model

    def vocabulary(self, case: Case) -> int:
        """How many tokens a model knows."""
        own = self.facts is not None and not self.facts.weights
        return (self.facts.vocabulary or 0) if own else oracle.vocabulary_of(case)  # type: ignore[union-attr]

    def shapes(self, case: Case) -> tuple[tuple[int, ...], ...]:
        """The shapes of the results."""
        return wanted_shapes(Call(self.operation, case.as_operation(self.operation), Outcome("ok")), self.facts)

    def _judged(self, call: Call) -> Outcome:
        """The outcome of a call, unless it is a refusal or worse."""
        if self.operation == "generate" and call.outcome.kind == "ok":
            call = replace(call, outcome=filled(call))
        outcome = call.outcome
        current().calls.append(call)
        if outcome.kind == "refused":
            raise Refused(outcome.message)
        if outcome.kind != "ok":
            raise Broken(outcome.kind, outcome.message)
        return outcome

    def __call__(self, case: Case) -> Any:
        """The result as a float64 array, or a tuple where the operation has several."""
        return self._results(case, self._begun(case.as_operation(self.operation), None, (), False))

    def _results(self, case: Case, fetch: Callable[[], Outcome]) -> Any:
        outcome = fetch()
        for name, result, shape in zip(self.results_for(case), outcome.results, self.shapes(case), strict=True):
            if result.shape != shape:
                raise Broken("shape", f"{name} has shape {result.shape}, wanted {shape}")
        return outcome.results if case.table.several else outcome.results[0]

    def with_bounds(self, case: Case) -> tuple[tuple[np.ndarray, ...], tuple[Bound, ...]]:
        """Every result of a call and its bound, calculated while a worker makes the call."""
        case = case.as_operation(self.operation)
        fetch = self._begun(case, None, (), False)
        bounds = self.bounds(case)
        results = self._results(case, fetch)
        return results if isinstance(results, tuple) else (results,), bounds

    def results_for(self, case: Case) -> tuple[str, ...]:
        """Names of the results."""
        return OPERATIONS[self.operation].results_for(case.arrays)

    def reference(self, case: Case) -> Any:
        """The float64 reference with its error budget, under the declared conventions.

        A `Bound`, or a tuple of them where the operation has several results.
        """
        bounds = self.bounds(case)
        return bounds if case.table.several else bounds[0]

    def bounds(self, case: Case) -> tuple[Bound, ...]:
        """The reference of every result, always as a tuple."""
        return oracle.bounds(case.as_operation(self.operation), self.capabilities, self.precision)

    def budget(self, case: Case) -> np.ndarray:
        """The error budget of the first result."""
        return self.bounds(case)[0].allowed

    def gradients(self, case: Case, names: tuple[str, ...], cotangent: Cotangents = None) -> dict[str, Any]:
        """Vector-Jacobian products by the framework's autodiff, for ones or the given cotangent.

        A single cotangent belongs to the first result. An entry is None where no gradient came.
        """
        case = case.as_operation(self.operation)
        return self.outcome(case, names, self._cotangents(case, cotangent), watch=False).gradients

    def _cotangents(self, case: Case, given: Cotangents) -> tuple[np.ndarray | None, ...]:
        """One for each result; None for a result that does not count."""
        if isinstance(given, tuple):
            return given
        shapes = oracle.shapes(case)
        return (np.ones(shapes[0]) if given is None else given, *[None] * (len(shapes) - 1))

    def gradients_with_bounds(
        self, case: Case, names: tuple[str, ...], cotangent: Cotangents = None
    ) -> tuple[dict[str, Any], dict[str, Bound]]:
        """Such products and their bounds, calculated while a worker makes the call. Needs torch.

        The cotangent is rounded to the case's dtype first.
        """
        case = case.as_operation(self.operation)
        cotangents = tuple(None if c is None else round_to(c, case.dtype) for c in self._cotangents(case, cotangent))
        fetch = self._begun(case, names, cotangents, False)
        bounds = oracle.gradient_bounds(case, names, cotangents, self.capabilities, self.precision)
        found = fetch().gradients
        for name, gradient in found.items():
            if gradient is not None and gradient.shape != case[name].shape:
                raise Broken("shape", f"the gradient of {name} has shape {gradient.shape}, wanted {case[name].shape}")
        return found, bounds


def attempt(law: Law, implementation: Implementation, dtype: str, arguments: tuple[Any, ...]) -> Broken | None:
    """Try a law once; Refused passes through."""
    subjects = [Subject(implementation, name, dtype) for name in (law.operation, *law.also)]
    try:
        with np.errstate(all="ignore"):
            law.function(*subjects, *arguments)
    except Broken as broken:
        return broken
    return None
