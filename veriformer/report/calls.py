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
from veriformer.given_models import KINDS
from veriformer.layouts import constant_axis
from veriformer.models import model_arguments, program_of
from veriformer.operation import PARAMS
from veriformer.operations import OPERATIONS
from veriformer.report.sessions import given_lines, made_lines, session_lines
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


def preamble(row: Row, failure: Failure, torch: bool, large: bool, implementation: Implementation) -> list[str]:
    """Docstring and imports, and the function under test as `function` (one for each operation)."""
    text = [f"{row.law.id} does not hold for {row.implementation} in {row.dtype}.", "", row.law.statement]
    text += [f"Case: {failure.case.describe()}", f"Got: {failure.message}", ""]
    text += ["Exit code 1 while the fault is there, 0 once it is gone."]
    wrapper = textwrap.TextWrapper(110, break_long_words=False, break_on_hyphens=False)
    # a docstring is quoted text: nothing in it may end it or be read as an escape
    safe = [part.replace("\\", "/").replace('"""', "'''") for line in text for part in (wrapper.wrap(line) or [""])]
    lines = ['"""' + safe[0], *safe[1:], '"""', "", "import importlib", "import importlib.util", "import math"]
    lines += ["import signal", "import sys", "", "import numpy as np"]
    bfloat = row.dtype == "bfloat16" and not torch
    lines += ["import torch"] if torch else ["import ml_dtypes"] if bfloat else []
    lines += ["", "inf, nan = math.inf, math.nan", f"sys.path.insert(0, {os.getcwd()!r})"]
    lines += [f"signal.alarm({PATIENCE})  # a call that hangs ends the script"]
    if large:
        lines += ["data = np.load(__file__.removesuffix('.py') + '.npz')"]
    for operation in dict.fromkeys(call.operation for call in failure.calls):
        lines += given_lines(operation) if OPERATIONS[operation].given else []
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

    def __init__(self, script: Script, implementation: Implementation, torch: bool, large: bool) -> None:
        self.script, self.implementation, self.torch, self.large = script, implementation, torch, large
        device = implementation.description.device
        self.there = f", device={device!r}" if device != "cpu" else ""
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
            graded = name in (call.gradient or ()) and call.operation not in self.implementation.description.vjps
            if graded and self.torch:
                lines.append(f"{word}.requires_grad_()")
        return [*lines, *self.session(call, number)]

    def session(self, call: Call, number: int) -> list[str]:
        """Lines of the function that walks through a program, where the call is one."""
        facts = self.implementation.description.models.get(call.operation)
        if facts is None:
            return []
        program = program_of(Request(call.case.arrays, {}, call.case.dtype, program=call.program))
        given = self.given(call, number)
        made = made_lines(call.operation, given, facts, self.torch, call.case.dtype)
        return session_lines(f"session{number}", made, program, facts, lambda name: variable(name, number))

    def call_line(self, call: Call, number: int) -> str:
        """The call itself, its results put into our order."""
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
        dtype, module = call.case.dtype, "ml_dtypes" if call.case.dtype == "bfloat16" else "np"
        made = f"torch.tensor(r, dtype=torch.{dtype}{self.there})" if self.torch else f"{module}.{dtype}(r)"
        return f"{made} if isinstance(r, (int, float)) else r for r in [{text}]"

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
        inputs = ", ".join(variable(name, number) for name in call.gradient)
        pairs = ", ".join(f"(results{number}[{i}], {name})" for i, name in self.cotangents(call, number).items())
        return [
            f"found = [None] * {len(call.gradient)}",
            f"pairs = [(result, weight) for result, weight in [{pairs}] if result.requires_grad]",
            "if pairs:",
            "    outs, weights = zip(*pairs)",
            f"    found = torch.autograd.grad(outs, [{inputs}], weights, allow_unused=True)",
            f"gradients{number} = dict(zip({list(call.gradient)!r}, found))",
        ]

    def cotangent(self, call: Call, place: int, name: str) -> str:
        """An expression for the cotangent of one result."""
        values = np.asarray(call.cotangents[place])
        if self.swapped(call) and values.ndim == 4:
            values = values.transpose(0, 2, 1, 3)
        dtype = call.outcome.dtypes[place] if call.outcome.dtypes else call.case.dtype
        return self.array(Literal(values, dtype, call.case.layout), name)

    def vjp_line(self, call: Call, number: int) -> str:
        """The line that asks OPERATION_vjp; cotangents of results that do not count are zeros."""
        names, zeros = self.cotangents(call, number), "torch.zeros_like" if self.torch else "np.zeros_like"
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
        boolean = values.dtype == bool
        if self.large:
            self.script.data[name] = values
            source = f"data[{name!r}]"
        else:
            source = repr(values.tolist())
        if self.torch:
            kind = "torch.bool" if boolean else f"torch.{literal.dtype}"
            made = f"torch.tensor({source}, dtype={kind}{self.there})"
        else:
            module = "ml_dtypes" if literal.dtype == "bfloat16" else "np"
            made = f"np.array({source}, dtype={'bool' if boolean else f'{module}.{literal.dtype}'})"
        return self.laid_out(made, literal)

    def laid_out(self, made: str, literal: Literal) -> str:
        """The expression in the literal's memory layout."""
        values, layout = literal.values, literal.layout
        if values.ndim == 0 or layout in ("contiguous", "") or values.dtype.kind == "i":
            return made
        if layout == "transposed" and values.ndim > 1:
            return (
                f"{made}.mT.contiguous().mT"
                if self.torch
                else f"np.ascontiguousarray({made}.swapaxes(-1, -2)).swapaxes(-1, -2)"
            )
        if layout == "offset":
            return (
                f"torch.cat([(x := {made})[:1], x])[1:]"
                if self.torch
                else f"np.concatenate([(x := {made})[:1], x])[1:]"
            )
        if layout == "expanded":
            axis = constant_axis(values)
            if axis is None:
                return made
            shape = tuple(values.shape)
            return (
                f"{made}.narrow({axis}, 0, 1).expand({shape})"
                if self.torch
                else f"np.broadcast_to({made}.take([0], {axis}), {shape})"
            )
        return f"{made}.repeat_interleave(2, -1)[..., ::2]" if self.torch else f"np.repeat({made}, 2, -1)[..., ::2]"
