"""The one place where a case meets an implementation, in process or in a worker.

Arrays go in as float64 values already rounded to the dtype; float64, dtype names and everything
that a well-behaved call must not do come out.
"""

from __future__ import annotations

import contextlib
import io
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from veriformer.calling import CallPlan, arguments
from veriformer.case import flattened
from veriformer.declarations import Capabilities
from veriformer.given_models import replaced
from veriformer.leftovers import spoil
from veriformer.moves import Program
from veriformer.operations import OPERATIONS

Pull = Callable[[Sequence[Any]], dict[str, Any]]
"""From the results' cotangents, None for zeros, to the inputs' gradients by name."""
REFUSALS = (NotImplementedError, ValueError, RuntimeError, AssertionError, TypeError)
"""Exceptions that decline a case cleanly; any other one is an error of the implementation."""


class WrongType(Exception):
    """Something other than the operation's results came back."""


class ProcessEnded(Exception):
    """A process that the implementation is, beside the one that calls it, has ended."""


@dataclass(frozen=True)
class Request:
    """One call. gradient: names of the arrays to differentiate by, or None for the forward pass only.
    program: what a model is asked for one after the other; empty: the logits of the whole.

    watch: look for changed inputs, shared memory and changed global state, which takes longer than
    most calls; modes such as the default dtype are put back in any case.
    """

    arrays: Mapping[str, np.ndarray]
    keywords: Mapping[str, Any]
    dtype: str
    layout: str = "contiguous"
    gradient: tuple[str, ...] | None = None
    cotangents: tuple[np.ndarray | None, ...] = ()
    watch: bool = False
    program: Program = ()


@dataclass
class Outcome:
    """What came of one call.

    kind: ok | refused | raised | type | crash | timeout. changed and aliased name input arrays, changed
    "cotangent" too; state names global state; stale tells that an earlier result changed during this call (these four
    only where the request asked to watch).
    gradients: None where the function gave none for that input.
    """

    kind: str
    message: str = ""
    results: tuple[np.ndarray, ...] = ()
    dtypes: tuple[str, ...] = ()
    gradients: dict[str, np.ndarray | None] = field(default_factory=dict)
    gradient_dtypes: dict[str, str] = field(default_factory=dict)
    changed: tuple[str, ...] = ()
    aliased: tuple[str, ...] = ()
    state: tuple[str, ...] = ()
    stale: str = ""
    seconds: float = 0.0


class Interrupts:
    """Tells a real Ctrl-C from a KeyboardInterrupt that an implementation raises by itself."""

    received = False

    @classmethod
    @contextlib.contextmanager
    def watched(cls) -> Iterator[None]:
        """While it lasts, a real interrupt is marked before it is raised."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.getsignal(signal.SIGINT)
        cls.received = False

        def mark(number: int, frame: Any) -> None:
            cls.received = True
            raise KeyboardInterrupt

        signal.signal(signal.SIGINT, mark)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


@dataclass
class Boundary:
    """One operation of one implementation, in its own process or in ours.

    vjp: its OPERATION_vjp, where there is one; else gradients come from the framework. Keeps the latest
    results, so that a call that writes into an earlier result is seen, and the cotangents that it was given.
    """

    function: Callable[..., Any]
    plan: CallPlan
    capabilities: Capabilities
    framework: Any
    vjp: Callable[..., Any] | None = None
    kept: list[tuple[Any, np.ndarray]] = field(default_factory=list)
    given: list[tuple[Any, bytes]] = field(default_factory=list)
    shape: tuple[int, ...] = ()
    sizes: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)
    """Bytes of each result by those of the inputs, as far as they were seen."""

    def cross(self, request: Request) -> Outcome:
        """Make the call and report on it; only a real interrupt of the user passes through."""
        try:
            positional, named, natives = self._arguments(request)
        except Exception as error:
            return Outcome("raised", f"the suite could not build the arguments: {error!r}")
        for name in () if self.vjp else request.gradient or ():
            self.framework.watch_gradient(natives[name])
        before = {name: self._bytes(native) for name, native in natives.items()} if request.watch else {}
        self.given = []
        self._spoil(natives)
        memory = self.framework.remember()
        state = self.framework.state() if request.watch else {}
        start = time.perf_counter()
        try:
            outcome = self._call(request, positional, named, natives)
            outcome.seconds = time.perf_counter() - start
            now = self.framework.state() if request.watch else {}
        finally:
            self.framework.restore(memory)
        outcome.state = tuple(name for name in state if state[name] != now[name])
        outcome.changed = tuple(name for name, values in before.items() if self._bytes(natives[name]) != values)
        if any(self._bytes(cotangent) != values for cotangent, values in self.given):
            outcome.changed += ("cotangent",)
        return outcome

    def _spoil(self, natives: Mapping[str, Any]) -> None:
        """Let no earlier result lie where a new array is made: blocks as long as the inputs, and as results were."""
        if self.framework.name == "numpy":
            self.shape = tuple(native.nbytes for native in natives.values())
            spoil((*self.shape, *self.sizes.get(self.shape, ())))

    def _arguments(self, request: Request) -> tuple[list[Any], dict[str, Any], dict[str, Any]]:
        """Positional and named arguments, and every array among them by its name."""
        return arguments(self.plan, self.capabilities, self.framework, request)

    def _shared(self, results: list[Any], natives: dict[str, Any]) -> tuple[list[str], str]:
        """Inputs that a result shares memory with, and what became of earlier results."""
        aliased = [n for n, native in natives.items() if any(self.framework.overlap(native, r) for r in results)]
        if any(self.framework.overlap(old, r) for old, _ in self.kept for r in results):
            return aliased, "shares memory with an earlier result"
        if any(self._bytes(old) != values.tobytes() for old, values in self.kept):
            return aliased, "changed an earlier result"
        return aliased, ""

    def _heads_swapped(self, value: Any) -> Any:
        """From BTHD to BHTD, or back, where that layout is declared."""
        headed = OPERATIONS[self.plan.operation].headed
        swapped = headed and self.capabilities.layout == "BTHD" and value.ndim == 4
        return self.framework.permute(value, (0, 2, 1, 3)) if swapped else value

    def _bytes(self, native: Any) -> bytes:
        values: bytes = self.framework.read(native)[0].tobytes()
        return values

    def _call(self, request: Request, positional: list[Any], named: dict[str, Any], natives: dict[str, Any]) -> Outcome:
        try:
            with quiet():
                results, pull = self._results_and_pull(request, positional, named, natives)
                gradients = {}
                if request.gradient is not None:
                    gradients = self._gradients(request, results, positional, named, natives, pull)
        except WrongType as error:
            return Outcome("type", str(error))
        except ProcessEnded as error:
            return Outcome("crash", f"the program {error}")
        except REFUSALS as error:
            return Outcome("refused", describe_error(error))
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and Interrupts.received:
                raise
            return Outcome("raised", describe_error(error))
        try:
            return self._read(request, results, natives, gradients)
        except Exception as error:
            return Outcome("type", f"the result cannot be read: {describe_error(error)}")

    def _results_and_pull(
        self, request: Request, positional: list[Any], named: dict[str, Any], natives: dict[str, Any]
    ) -> tuple[list[Any], Pull | None]:
        """The results, and what gives their gradients in a framework that differentiates functions, not arrays."""
        if request.gradient is None or self.vjp is not None or not hasattr(self.framework, "recorded"):
            return self._results(self._returned(request, positional, named, natives), request), None

        def call(inputs: Mapping[str, Any]) -> list[Any]:
            others = {id(natives[name]): array for name, array in inputs.items()}
            return self._results(self._returned(request, *replaced([positional, named, natives], others)), request)

        results, pull = self.framework.recorded(call, {name: natives[name] for name in request.gradient})
        return results, pull

    def _returned(self, request: Request, positional: list[Any], named: dict[str, Any], natives: dict[str, Any]) -> Any:
        """What the function returns, or what the composite returns that it makes of the weights."""
        if self.plan.factory:
            with self.framework.seeded():  # modules draw weights before they are given ours
                made = self.function(positional[-1], **named)
            return made(*positional[:-1])
        return self.function(*positional, **named)

    def _results(self, returned: Any, request: Request) -> list[Any]:
        """The results in our order. Raises WrongType where something else came."""
        table, pick = OPERATIONS[self.plan.operation], self.plan.pick
        names = table.results_for(request.arrays)
        several, kind = isinstance(returned, (tuple, list)), type(returned).__name__
        if table.number and isinstance(returned, (int, float)) and not isinstance(returned, bool):
            return [self.framework.native(np.asarray(float(returned)), request.dtype)]
        if several and pick is None and not table.several:
            said = f"returned a {kind} of {len(returned)}, wanted one array"
            raise WrongType(f"{said}; if it is among them, say where with --returns out,lse")
        if not several and (pick is not None or table.several):
            raise WrongType(f"returned {kind}, wanted a {'list' if table.listed else 'tuple'}: {', '.join(names)}")
        if several and pick is None and len(returned) != len(names) and table.listed:
            raise WrongType(f"returned a {kind} of {len(returned)}, wanted one of {len(names)}, as were given")
        if several:
            places = pick or tuple(range(len(names)))
            if len(returned) <= max(places):
                raise WrongType(f"returned a {kind} of {len(returned)}, wanted at least {max(places) + 1}")
            results = [returned[i] for i in places]
        else:
            results = [returned]
        for result in results:
            self._check_array(result)
        return results

    def _check_array(self, result: Any) -> None:
        """Raise WrongType for what is no array of real numbers."""
        if not self.framework.is_array(result):
            raise WrongType(f"returned {type(result).__name__}, wanted an array of {self.framework.name}")
        if not self.framework.holds_numbers(result):
            raise WrongType(f"returned {type(result).__name__} of {result.dtype}, wanted plain real numbers")

    def _gradients(
        self,
        request: Request,
        results: list[Any],
        positional: list[Any],
        named: dict[str, Any],
        natives: dict[str, Any],
        pull: Pull | None,
    ) -> dict[str, Any]:
        cotangents = [
            None
            if c is None
            else self._heads_swapped(self.framework.native(c, self.framework.read(r)[1], request.layout))
            for r, c in zip(results, request.cotangents, strict=True)
        ]
        if request.watch:
            self.given = [(c, self._bytes(c)) for c in cotangents if c is not None]
        wanted = request.gradient or ()
        if pull is not None:
            return pull(cotangents)
        if self.vjp is None:
            return self.framework.gradients(results, cotangents, {name: natives[name] for name in wanted})  # type: ignore[no-any-return]
        filled = [self._zeros(r) if c is None else c for r, c in zip(results, cotangents, strict=True)]
        found = self._products(
            self.vjp(filled[0] if len(filled) == 1 else tuple(filled), *positional, **named), natives
        )
        return {name: found[name] for name in wanted}

    def _zeros(self, result: Any) -> Any:
        values, dtype = self.framework.read(result)
        return self.framework.native(np.zeros(values.shape, values.dtype), dtype)

    def _products(self, returned: Any, natives: dict[str, Any]) -> dict[str, Any]:
        """What OPERATION_vjp returned, by the names of the arrays. Raises WrongType where it is something else."""
        table, name = OPERATIONS[self.plan.operation], f"{self.plan.operation}_vjp"
        places = [*table.positional, *(option for option in table.options if option in natives)]
        places = [place for place in places if place not in table.scalars]
        if len(places) == 1 and self.framework.is_array(returned):
            returned = (returned,)
        if not isinstance(returned, (tuple, list)) or not len(table.positional) <= len(returned) <= len(places):
            count = f" of {len(returned)}" if isinstance(returned, (tuple, list)) else ""
            said = f"{name} returned {type(returned).__name__}{count}"
            raise WrongType(f"{said}, wanted a tuple of {len(places)}: {', '.join(places)}; None where there is none")
        found: dict[str, Any] = dict.fromkeys(natives)
        for place, value in zip(places, returned, strict=False):
            found |= flattened(value, place) if place == "params" and value is not None else {place: value}
        for place, value in found.items():
            if value is not None and not self.framework.is_array(value):
                raise WrongType(f"{name} returned {type(value).__name__} for {place}, wanted an array or None")
        return found

    def _read(
        self, request: Request, results: list[Any], natives: dict[str, Any], gradients: dict[str, Any]
    ) -> Outcome:
        aliased, stale = self._shared(results, natives) if request.watch else ([], "")
        results = [self._heads_swapped(result) for result in results]
        swapped = OPERATIONS[self.plan.operation].headed  # masks, biases and sinks keep their axes in every layout
        gradients = {n: self._heads_swapped(g) if n in swapped and g is not None else g for n, g in gradients.items()}
        read = [self.framework.read(result) for result in results]
        if self.framework.name == "numpy":
            self.sizes[self.shape] = tuple(result.nbytes for result in results)
        self.kept = [(r, values.copy()) for r, (values, _) in zip(results, read, strict=True)] if request.watch else []
        products = {n: None if g is None else self.framework.read(g) for n, g in gradients.items()}
        return Outcome(
            "ok",
            results=tuple(values for values, _ in read),
            dtypes=tuple(name for _, name in read),
            gradients={n: None if product is None else product[0] for n, product in products.items()},
            gradient_dtypes={n: product[1] for n, product in products.items() if product is not None},
            aliased=tuple(aliased),
            stale=stale,
        )


def describe_error(error: BaseException) -> str:
    """The exception's type and its first line, in letters that a terminal, a script and XML can hold."""
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    line = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in lines[0][:300])
    return f"{type(error).__name__}: {line}"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """What an implementation prints or warns of does not reach the report."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(_Nowhere()), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        yield


class _Nowhere(io.TextIOBase):
    """Takes any amount of text and keeps none of it."""

    def write(self, text: str) -> int:
        return len(text)
