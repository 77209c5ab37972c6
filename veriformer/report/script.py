"""A script per failure: literal inputs, literal expectations, no oracle and nothing of ours.

It exits with 1 while the fault is there and with 0 once it is gone.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from veriformer import oracle
from veriformer.boundary import Request
from veriformer.calling import arguments
from veriformer.case import PRINTED
from veriformer.frameworks import constant_axis
from veriformer.report.trace import Affine, Comparison, Element, compare_of
from veriformer.running import Failure, Row
from veriformer.subject import Call, Implementation

PATIENCE = 30


@dataclass
class Literal:
    """Stands for an array while `calling.arguments` converts: its values, written down later."""

    values: np.ndarray
    dtype: str
    layout: str
    graded: bool = False

    def requires_grad_(self, on: bool) -> None:
        """Remember that a gradient is asked for."""
        self.graded = on


class Writing:
    """A framework whose arrays are literals."""

    def native(self, values: np.ndarray, dtype: str, layout: str) -> Literal:
        """A literal of these values."""
        return Literal(values, dtype, layout)

    def permute(self, value: Literal, axes: Sequence[int]) -> Literal:
        """The axes in another order."""
        return replace(value, values=value.values.transpose(axes))

    def contiguous(self, value: Literal) -> Literal:
        """The same literal; layout is kept apart."""
        return value


@dataclass
class Script:
    """The text of a script and the arrays that are too large to stand in it."""

    lines: list[str] = field(default_factory=list)
    data: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The script's text."""
        return "\n".join(self.lines) + "\n"


def script_of(row: Row, implementation: Implementation) -> Script:
    """The script of a failing row."""
    failure = row.failure
    assert failure is not None
    script = Script()
    large = sum(call.case.numbers for call in failure.calls) > PRINTED
    torch = implementation.description.framework == "torch"
    script.lines += preamble(row, failure, torch, large, implementation)
    body = Body(script, implementation, torch, large)
    comparison = compare_of(row, implementation)
    if comparison is not None:
        body.calls(failure.calls)
        body.compare(comparison, failure)
    else:
        body.judge_call(failure)
    return script


def preamble(row: Row, failure: Failure, torch: bool, large: bool, implementation: Implementation) -> list[str]:
    """Docstring and imports, and the function under test as `function` (one for each operation)."""
    text = [f"{row.law.id} does not hold for {row.implementation} in {row.dtype}.", "", row.law.statement]
    text += [f"Case: {failure.case.describe()}", f"Got: {failure.message}", ""]
    text += ["Exit code 1 while the fault is there, 0 once it is gone."]
    # a docstring is quoted text: nothing in it may end it or be read as an escape
    safe = [
        part.replace("\\", "/").replace('"""', "'''") for line in text for part in (textwrap.wrap(line, 110) or [""])
    ]
    lines = ['"""' + safe[0], *safe[1:], '"""', "", "import importlib", "import importlib.util", "import math"]
    lines += ["import signal", "import sys", "", "import numpy as np"]
    bfloat = row.dtype == "bfloat16" and not torch
    lines += ["import torch"] if torch else ["import ml_dtypes"] if bfloat else []
    lines += ["", "inf, nan = math.inf, math.nan", f"sys.path.insert(0, {os.getcwd()!r})"]
    lines += [f"signal.alarm({PATIENCE})  # a call that hangs ends the script"]
    if large:
        lines += ["data = np.load(__file__.removesuffix('.py') + '.npz')"]
    for operation in dict.fromkeys(call.operation for call in failure.calls):
        lines += function_lines(implementation, operation)
    return [*lines, ""]


def function_lines(implementation: Implementation, operation: str) -> list[str]:
    """Lines that bind the function of one operation to its name."""
    place = implementation.description.places.get(operation)
    if place is None:
        return [f"{operation} = None  # a function in memory: put it here", f"assert {operation}, 'no function given'"]
    where, expression = place
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


class Body:
    """Writes calls and checks into a script."""

    def __init__(self, script: Script, implementation: Implementation, torch: bool, large: bool) -> None:
        self.script, self.implementation, self.torch, self.large = script, implementation, torch, large
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
        request = Request(case.arrays, case.keywords, case.dtype, case.layout, call.gradient, call.cotangents)
        return arguments(about.plans[call.operation], about.capabilities[call.operation], Writing(), request)

    def inputs(self, call: Call, number: int) -> list[str]:
        """Lines that make the call's arrays."""
        _, _, natives = self._parts(call)
        lines = []
        for name, literal in natives.items():
            lines.append(f"{name}{number} = {self.array(literal, f'{name}{number}')}")
            if literal.graded:
                lines.append(f"{name}{number}.requires_grad_()")
        return lines

    def call_line(self, call: Call, number: int) -> str:
        """The call itself, its results put into our order."""
        positional, named, natives = self._parts(call)
        words = {id(literal): f"{name}{number}" for name, literal in natives.items()}
        given = [words[id(literal)] for literal in positional]
        given += [f"{key}={words.get(id(value), repr(value))}" for key, value in named.items()]
        plan = self.implementation.description.plans[call.operation]
        text = f"{call.operation}({', '.join(given)})"
        if plan.pick is not None:
            return f"results{number} = [{text}[i] for i in {list(plan.pick)}]"
        several = call.operation == "attention_with_lse"
        return f"results{number} = {text}" if several else f"results{number} = [{text}]"

    def gradient_lines(self, call: Call, number: int) -> list[str]:
        """Lines that take the gradients the law asked for."""
        if call.gradient is None:
            return []
        inputs = ", ".join(f"{name}{number}" for name in call.gradient)
        seed = Literal(
            np.asarray(call.cotangents[0]), call.outcome.dtypes[0] if call.outcome.dtypes else call.case.dtype, ""
        )
        weight = self.array(seed, f"cotangent{number}")
        return [
            f"cotangent{number} = {weight}",
            f"found = torch.autograd.grad(results{number}[0], [{inputs}], cotangent{number}, allow_unused=True)",
            f"gradients{number} = dict(zip({list(call.gradient)!r}, found))",
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
            made = f"torch.tensor({source}, dtype={kind})"
        else:
            module = "ml_dtypes" if literal.dtype == "bfloat16" else "np"
            made = f"np.array({source}, dtype={'bool' if boolean else f'{module}.{literal.dtype}'})"
        return self.laid_out(made, literal)

    def laid_out(self, made: str, literal: Literal) -> str:
        """The expression in the literal's memory layout."""
        values, layout = literal.values, literal.layout
        if values.ndim == 0 or layout in ("contiguous", ""):
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

    def compare(self, comparison: Comparison, failure: Failure) -> None:
        """The comparison that failed, in literal terms."""
        facts = failure.facts
        self.line("", f"got = {self.affine(comparison.got, failure)}")
        if comparison.other is None:
            self.end("math.isfinite(got)", "'got', got, 'wanted a finite number'")
            return
        if comparison.other.parts:
            self.line(f"wanted = {self.affine(comparison.other, failure)}")
        else:
            self.line(f"wanted = {facts.get('wanted', comparison.other.constant)!r}")
        if failure.kind == "no influence":
            self.end("got != wanted", "'got', got, 'both times, wanted a change'")
            return
        self.line(f"allowed = {facts['allowed']!r}")
        fine = "got == wanted or abs(got - wanted) <= allowed or (math.isnan(got) and math.isnan(wanted))"
        self.end(fine, "'got', got, 'wanted', wanted, 'allowed error', allowed")

    def affine(self, affine: Affine, failure: Failure) -> str:
        """An affine function of output elements as an expression."""
        parts = []
        for factor, element in affine.parts:
            text = self.element(element, failure)
            parts.append(text if factor == 1 else f"-{text}" if factor == -1 else f"{factor!r} * {text}")
        if affine.constant or not parts:
            parts.append(repr(affine.constant))
        return " + ".join(parts)

    def element(self, element: Element, failure: Failure) -> str:
        """One element of one call's output."""
        call = failure.calls[element.call]
        index = list(element.index)
        swapped = self.implementation.description.capabilities[call.operation].layout == "BTHD"
        if swapped and len(index) == 4 and (element.result in (0, "q", "k", "v")):
            index[1], index[2] = index[2], index[1]
        place = f"[{', '.join(map(str, index))}]" if index else ""
        number = element.call + 1
        owner = (
            f"gradients{number}[{element.result!r}]"
            if isinstance(element.result, str)
            else f"results{number}[{element.result}]"
        )
        return f"float({owner}{place})"

    def end(self, fine: str, shown: str) -> None:
        """Print what was seen and leave with the verdict."""
        self.line(f"print({shown})", f"sys.exit(0 if {fine} else 1)")

    def judge_call(self, failure: Failure) -> None:
        """A check for a failure that is not a comparison of numbers."""
        calls = failure.calls
        if failure.kind in ("raised", "crash", "timeout"):
            self.calls(calls[:-1])
            self.line(*self.inputs(calls[-1], len(calls)), "try:", "    " + self.call_line(calls[-1], len(calls)))
            self.line(*("    " + line for line in self.gradient_lines(calls[-1], len(calls))))
            self.line(
                "except BaseException as error:", "    print('raised', repr(error))", "    sys.exit(1)", "sys.exit(0)"
            )
            return
        special = {"type": self._type, "shape": self._shape, "dtype": self._dtype, "mutated": self._mutated,
                   "aliased": self._aliased, "state": self._state, "stale": self._stale, "no gradient": self._gradient}  # fmt: skip
        special.get(failure.kind, self._recorded)(failure)

    def _type(self, failure: Failure) -> None:
        self.line(*self.inputs(failure.calls[-1], 1), self.call_line(failure.calls[-1], 1))
        kind = "torch.Tensor" if self.torch else "(np.ndarray, np.generic)"
        self.end(f"all(isinstance(r, {kind}) for r in results1)", "'returned', [type(r).__name__ for r in results1]")

    def _shape(self, failure: Failure) -> None:
        call = failure.calls[-1]
        self.line(*self.inputs(call, 1), self.call_line(call, 1))
        shapes = [list(shape) for shape in oracle.shapes(call.case.as_operation(call.operation))]
        if self.implementation.description.capabilities[call.operation].layout == "BTHD":
            shapes[0][1], shapes[0][2] = shapes[0][2], shapes[0][1]
        self.line(f"wanted = {[tuple(shape) for shape in shapes]}", "got = [tuple(r.shape) for r in results1]")
        self.end("got == wanted", "'shapes', got, 'wanted', wanted")

    def _dtype(self, failure: Failure) -> None:
        call = failure.calls[-1]
        self.line(*self.inputs(call, 1), self.call_line(call, 1))
        wanted = [call.case.dtype for _ in call.outcome.dtypes]
        if len(wanted) > 1 and call.case.dtype in ("float16", "bfloat16"):
            wanted[1] = "float32"
        self.line(f"wanted = {wanted}", "got = [str(r.dtype).removeprefix('torch.') for r in results1]")
        self.end("got == wanted", "'dtypes', got, 'wanted', wanted")

    def _bits(self, value: str) -> str:
        return f"np.asarray({value}.detach().double() if hasattr({value}, 'detach') else {value}).tobytes()"

    def _mutated(self, failure: Failure) -> None:
        call = failure.calls[-1]
        self.line(*self.inputs(call, 1))
        names = [f"{name}1" for name in call.case.arrays]
        self.line(f"before = [{', '.join(map(self._bits, names))}]", self.call_line(call, 1))
        self.line(f"after = [{', '.join(map(self._bits, names))}]")
        self.end("before == after", "'inputs kept:', before == after")

    def _overlap(self, one: str, other: str) -> str:
        if self.torch:
            return f"{one}.untyped_storage().data_ptr() == {other}.untyped_storage().data_ptr()"
        return f"np.may_share_memory({one}, {other})"

    def _aliased(self, failure: Failure) -> None:
        call = failure.calls[-1]
        self.line(*self.inputs(call, 1), self.call_line(call, 1))
        pairs = [self._overlap("r", f"{name}1") for name in call.case.arrays]
        self.line(f"shared = any({' or '.join(pairs)} for r in results1)")
        self.end("not shared", "'a result shares memory with an input:', shared")

    def _stale(self, failure: Failure) -> None:
        first, second = failure.calls[-2:] if len(failure.calls) > 1 else (failure.calls[-1],) * 2
        self.line(*self.inputs(first, 1), self.call_line(first, 1), f"before = {self._bits('results1[0]')}")
        self.line(*self.inputs(second, 2), self.call_line(second, 2), f"after = {self._bits('results1[0]')}")
        self.line(f"kept = before == after and not ({self._overlap('results1[0]', 'results2[0]')})")
        self.end("kept", "'the first result stays as it was, in its own memory:', kept")

    def _state(self, failure: Failure) -> None:
        call = failure.calls[-1]
        parts = [
            "np.random.get_state()[1].tobytes()",
            "np.random.get_state()[2]",
            "repr(random.getstate())",
            "np.geterr()",
        ]
        if self.torch:
            parts += [
                "torch.random.get_rng_state().tolist()",
                "torch.get_default_dtype()",
                "torch.get_num_threads()",
                "torch.get_float32_matmul_precision()",
                "torch.is_grad_enabled()",
                "torch.are_deterministic_algorithms_enabled()",
            ]
        self.line("import random", "", "", "def state():", f"    return [{', '.join(parts)}]", "", "")
        self.line(*self.inputs(call, 1), "before = state()", self.call_line(call, 1), "kept = before == state()")
        self.end("kept", "'global state kept:', kept")

    def _gradient(self, failure: Failure) -> None:
        self.calls(failure.calls)
        last = len(failure.calls)
        self.line(f"lacking = [name for name, g in gradients{last}.items() if g is None]")
        self.end("not lacking", "'no gradient for', lacking")

    def _recorded(self, failure: Failure) -> None:
        """No simpler statement is known: the fault is there while the outputs are the recorded ones."""
        self.calls(failure.calls)
        self.line(
            "",
            "# the relation between these outputs is more than a comparison of numbers; the wrong outputs are on record",
        )
        checks = []
        for number, call in enumerate(failure.calls, 1):
            for i, result in enumerate(call.outcome.results):
                if self.large:
                    self.script.data[f"recorded{number}_{i}"] = result
                    recorded = f"data['recorded{number}_{i}']"
                else:
                    recorded = f"np.array({result.tolist()!r})"
                value = f"results{number}[{i}]"
                checks.append(
                    f"np.array_equal(np.asarray({value}.detach().double() if hasattr({value}, 'detach') else {value}, dtype=float), {recorded}, equal_nan=True)"
                )
        self.line("same = [", *(f"    {check}," for check in checks), "]")
        self.end("not all(same)", "'outputs equal the wrong ones on record:', same")


def save(script: Script, path: Path) -> None:
    """Write the script, and its data beside it."""
    path.write_text(script.text, encoding="utf-8")
    if script.data:
        np.savez(path.with_suffix(".npz"), **script.data)
