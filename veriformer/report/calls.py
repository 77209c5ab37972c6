"""Calls written out as a script: imports, literal arrays in their memory layout, keywords in their own words."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from veriformer.boundary import Request
from veriformer.calling import arguments
from veriformer.external import PREFIX
from veriformer.given_models import KINDS
from veriformer.hugging_face import wrapper_lines
from veriformer.models import model_arguments, program_of
from veriformer.operation import PARAMS
from veriformer.operations import OPERATIONS
from veriformer.report.programs import called_line, speaking_lines
from veriformer.report.sessions import given_lines, made_lines, session_lines
from veriformer.report.wording import NumpyWords
from veriformer.running import Failure, Row
from veriformer.subject import Call, Implementation
from veriformer.targets import VJP

PATIENCE = 30


@dataclass
class Literal:
    """Stands for an array while `calling.arguments` converts: its values, written down later."""

    values: np.ndarray
    dtype: str
    layout: str


@dataclass
class Given:
    """Stands for a model or step of ours: the name of its class, and the arrays that it is made of."""

    kind: str
    arrays: Sequence[Literal]


class Writing:
    """A framework whose arrays are literals."""

    def native(self, values: np.ndarray, dtype: str, layout: str) -> Literal:
        """A literal of these values."""
        return Literal(values, "int64" if values.dtype.kind == "i" else dtype, layout)

    def given(self, kind: str, arrays: Sequence[Literal]) -> Given:
        """What stands for the model or step that a function is given."""
        return Given(KINDS[kind].__name__, arrays)


@dataclass
class Script:
    """The text of a script and the arrays that are too large to stand in it."""

    lines: list[str] = field(default_factory=list)
    data: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The script's text."""
        return "\n".join(self.lines) + "\n"


def preamble(row: Row, failure: Failure, words: NumpyWords, large: bool, implementation: Implementation) -> list[str]:
    """Docstring and imports, and the function under test as `function` (one for each operation)."""
    text = [f"{row.law.id} does not hold for {row.implementation} in {row.dtype}.", "", row.law.statement]
    text += [f"Case: {failure.case.describe()}", f"Got: {failure.message}", ""]
    text += ["Exit code 1 while the fault is there, 0 once it is gone."]
    wrapper = textwrap.TextWrapper(110, break_long_words=False, break_on_hyphens=False)
    # a docstring is quoted text: nothing in it may end it or be read as an escape
    safe = [part.replace("\\", "/").replace('"""', "'''") for line in text for part in (wrapper.wrap(line) or [""])]
    lines = ['"""' + safe[0], *safe[1:], '"""', "", "import importlib", "import importlib.util", "import math"]
    lines += ["import signal", "import sys", "", "import numpy as np"]
    lines += words.imports(row.dtype)
    lines += ["", *words.settings(), "inf, nan = math.inf, math.nan", f"sys.path.insert(0, {os.getcwd()!r})"]
    lines += [f"signal.alarm({PATIENCE})  # a call that hangs ends the script"]
    if large:
        lines += ["data = np.load(__file__.removesuffix('.py') + '.npz')"]
    for operation in dict.fromkeys(call.operation for call in failure.calls):
        lines += given_lines(operation) if OPERATIONS[operation].given else []
        facts = implementation.description.models.get(operation)
        lines += wrapper_lines(facts.wrapper) if facts is not None and facts.wrapper else []
    lines += speaking_lines(implementation, PATIENCE)
    for operation in dict.fromkeys(call.operation for call in failure.calls):
        lines += function_lines(implementation, operation)
        graded = any(call.operation == operation and call.gradient is not None for call in failure.calls)
        if graded and operation in implementation.description.vjps:
            lines += function_lines(implementation, operation + VJP)
    return [*lines, ""]


def function_lines(implementation: Implementation, operation: str) -> list[str]:
    """Lines that bind the function of one operation to its name."""
    place = implementation.description.places.get(operation)
    if place is None:
        return [f"{operation} = None  # a function in memory: put it here", f"assert {operation}, 'no function given'"]
    where, expression = place
    if where.startswith(PREFIX):
        return [called_line(expression)]
    if where.endswith(".onnx"):
        return expression.splitlines()
    if not where.endswith(".py"):
        return [f"{operation} = importlib.import_module({where!r}).{expression}"]
    path = str(Path(where).resolve())
    return [
        f"sys.path.insert(0, {str(Path(path).parent)!r})",
        f"spec = importlib.util.spec_from_file_location('target', {path!r})",
        "target = importlib.util.module_from_spec(spec)",
        "sys.modules['target'] = target",
        "spec.loader.exec_module(target)",
        f"{operation} = target.{expression}",
    ]


def variable(name: str, number: int) -> str:
    """The variable that holds an array of the call with this number."""
    return f"{name.replace('.', '_')}{number}"


def written(value: Any, words: dict[int, str]) -> str:
    """An argument as source: the variable of an array, nested dicts and lists of them, or a plain value."""
    if id(value) in words:
        return words[id(value)]
    if isinstance(value, Given):
        return f"{value.kind}({', '.join(written(one, words) for one in value.arrays)})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {written(one, words)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(written(one, words) for one in value) + "]"
    return repr(value)


class Body:
    """Writes calls and checks into a script."""

    def __init__(self, script: Script, implementation: Implementation, words: NumpyWords, large: bool) -> None:
        self.script, self.implementation, self.words, self.large = script, implementation, words, large
        self.names: dict[str, str] = {}

    def line(self, *lines: str) -> None:
        """Add lines."""
        self.script.lines += lines

    def calls(self, calls: Sequence[Call]) -> None:
        """Write every call, its results as results1, results2, …"""
        for number, call in enumerate(calls, 1):
            self.line(*self.inputs(call, number))
            self.line(self.call_line(call, number))
            self.line(*self.gradient_lines(call, number))

    def _parts(self, call: Call) -> tuple[list[Literal], dict[str, Any], dict[str, Literal]]:
        about = self.implementation.description
        case = call.case
        request = Request(
            case.arrays, case.keywords, case.dtype, case.layout, call.gradient, call.cotangents, program=call.program
        )
        plan, capabilities = about.plans[call.operation], about.capabilities[call.operation]
        if call.operation in about.models:
            return model_arguments(plan, capabilities, Writing(), request, about.models[call.operation])
        return arguments(plan, capabilities, Writing(), request)

    def inputs(self, call: Call, number: int) -> list[str]:
        """Lines that make the call's arrays."""
        _, _, natives = self._parts(call)
        lines = []
        for name, literal in natives.items():
            word = variable(name, number)
            lines.append(f"{word} = {self.array(literal, word)}")
            lines += self.words.watched(word) if name in self.graded(call) else []
        return [*lines, *self.session(call, number)]

    def graded(self, call: Call) -> tuple[str, ...]:
        """The arrays by which the framework differentiates a call."""
        return () if call.operation in self.implementation.description.vjps else call.gradient or ()

    def session(self, call: Call, number: int) -> list[str]:
        """Lines of the function that walks through a program, where the call is one."""
        facts = self.implementation.description.models.get(call.operation)
        if facts is None:
            return []
        program = program_of(Request(call.case.arrays, {}, call.case.dtype, program=call.program))
        given = self.given(call, number)
        made = made_lines(call.operation, given, facts, self.words, call.case.dtype)
        return session_lines(f"session{number}", made, program, facts, lambda name: variable(name, number))

    def call_line(self, call: Call, number: int) -> str:
        """The call itself, its results put into our order, and recorded where it is differentiated."""
        line, graded = self._call_line(call, number), self.graded(call)
        return self.words.called(line, number, [variable(name, number) for name in graded]) if graded else line

    def _call_line(self, call: Call, number: int) -> str:
        if call.operation in self.implementation.description.models:
            return f"results{number} = session{number}()"
        plan = self.implementation.description.plans[call.operation]
        text = f"{call.operation}({', '.join(self.given(call, number))})"
        if plan.factory:
            inputs = [variable(name, number) for name in OPERATIONS[call.operation].arrays]
            rest = self.given(call, number)[len(inputs) :]
            text = f"{call.operation}({', '.join(rest)})({', '.join(inputs)})"
        if plan.pick is not None:
            return f"results{number} = [{text}[i] for i in {list(plan.pick)}]"
        if call.operation == "generate":
            text = f"filled({text}, {call.case['max_length']}, {call.case['pad']})"
        if call.case.table.several:
            return f"results{number} = {text}"
        return f"results{number} = [{self._array(text, call) if call.case.table.number else text}]"

    def _array(self, text: str, call: Call) -> str:
        """An expression for what is returned, as an array where it is a plain number."""
        return f"{self.words.number(call.case.dtype)} if isinstance(r, (int, float)) else r for r in [{text}]"

    def given(self, call: Call, number: int) -> list[str]:
        """The arguments of a call, as they stand between its brackets."""
        positional, named, natives = self._parts(call)
        words = {id(literal): variable(name, number) for name, literal in natives.items()}
        return [written(value, words) for value in positional] + [
            f"{key}={written(value, words)}" for key, value in named.items()
        ]

    def swapped(self, call: Call) -> bool:
        """Whether the function wants its heads after the positions."""
        return (
            bool(OPERATIONS[call.operation].headed)
            and self.implementation.description.capabilities[call.operation].layout == "BTHD"
        )

    def gradient_lines(self, call: Call, number: int) -> list[str]:
        """Lines that take the gradients the law asked for."""
        return [*self.cotangent_lines(call, number), *self.product_lines(call, number)]

    def cotangents(self, call: Call, number: int) -> dict[int, str]:
        """The variables of the cotangents, by the place of the result they belong to."""
        places = [place for place, values in enumerate(call.cotangents) if values is not None]
        given = places if call.gradient is not None else []
        return {place: f"cotangent{number}" + (f"_{place}" if place else "") for place in given}

    def cotangent_lines(self, call: Call, number: int) -> list[str]:
        """Lines that make the cotangents."""
        return [
            f"{name} = {self.cotangent(call, place, name)}" for place, name in self.cotangents(call, number).items()
        ]

    def product_lines(self, call: Call, number: int) -> list[str]:
        """Lines that take the gradients for these cotangents."""
        if call.gradient is None:
            return []
        if call.operation in self.implementation.description.vjps:
            return [self.vjp_line(call, number), *self.named_lines(call, number)]
        inputs = {name: variable(name, number) for name in call.gradient}
        return self.words.products(number, inputs, self.cotangents(call, number), self.seeds(call, number))

    def seeds(self, call: Call, number: int) -> list[str]:
        """A cotangent for each result; of those that do not count they are zeros."""
        names, dtypes = self.cotangents(call, number), call.outcome.dtypes
        results = range(len(call.cotangents))
        known = [dtypes[i] if i < len(dtypes) else call.case.dtype for i in results]
        return [names.get(i, self.words.seed(f"results{number}[{i}]", known[i])) for i in results]

    def cotangent(self, call: Call, place: int, name: str) -> str:
        """An expression for the cotangent of one result."""
        values = np.asarray(call.cotangents[place])
        if self.swapped(call) and values.ndim == 4:
            values = values.transpose(0, 2, 1, 3)
        dtype = call.outcome.dtypes[place] if call.outcome.dtypes else call.case.dtype
        return self.array(Literal(values, dtype, call.case.layout), name)

    def vjp_line(self, call: Call, number: int) -> str:
        """The line that asks OPERATION_vjp; cotangents of results that do not count are zeros."""
        names, zeros = self.cotangents(call, number), self.words.zeros
        results = range(len(call.case.table.results))
        seeds = [names.get(i, f"{zeros}(results{number}[{i}])") for i in results]
        seed = f"({', '.join(seeds)})" if len(seeds) > 1 else seeds[0]
        return f"found = {call.operation}{VJP}({', '.join([seed, *self.given(call, number)])})"

    def named_lines(self, call: Call, number: int) -> list[str]:
        """Lines that give what OPERATION_vjp returned the names of the arrays."""
        table = OPERATIONS[call.operation]
        places = [name for name in (*table.arrays, *table.options) if name in call.case.arrays]
        places[len(table.arrays) : len(table.arrays)] = ["params"] if "params" in table.positional else []
        weights = [name for name in call.gradient or () if name.startswith(PARAMS)]
        parts = [[int(part) if part.isdigit() else part for part in name.split(".")[1:]] for name in weights]
        steps = ["".join(f"[{part!r}]" for part in path) for path in parts]
        return [
            f"gradients{number} = dict(zip({places!r}, found))",
            *(
                f"gradients{number}[{name!r}] = gradients{number}['params']{step}"
                for name, step in zip(weights, steps, strict=True)
            ),
        ]

    def array(self, literal: Literal, name: str) -> str:
        """An expression for an array: its numbers, or its place in the data file."""
        values = literal.values
        if self.large:
            self.script.data[name] = values
            source = f"data[{name!r}]"
        else:
            source = repr(values.tolist())
        made = self.words.array(source, "bool" if values.dtype == bool else literal.dtype)
        return self.words.laid_out(made, values, literal.layout)
