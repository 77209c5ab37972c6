"""A script per failure: literal inputs, literal expectations, no oracle and nothing of ours.

It exits with 1 while the fault is there and with 0 once it is gone.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from veriformer.case import PRINTED
from veriformer.operations import OPERATIONS
from veriformer.report.calls import PATIENCE, Body, Script, preamble, variable
from veriformer.report.trace import Affine, Comparison, Element, compare_of
from veriformer.report.wording import WORDS
from veriformer.running import Failure, Row
from veriformer.subject import Call, Implementation, wanted_shapes, writes

RETURNED = 77
"""How the child of a script ends after a call that used to end it."""


def script_of(row: Row, implementation: Implementation) -> Script:
    """The script of a failing row."""
    failure = row.failure
    assert failure is not None
    script = Script()
    large = sum(call.case.numbers for call in failure.calls) > PRINTED
    about = implementation.description
    words = WORDS[about.framework](about.device)
    script.lines += preamble(row, failure, words, large, implementation)
    body = Checks(script, implementation, words, large)
    comparison = compare_of(row, implementation)
    if comparison is not None:
        body.calls(failure.calls[: comparison.last_call + 1])  # later ones only helped to say what is allowed
        body.compare(comparison, failure)
    else:
        body.judge_call(failure)
    return script


class Checks(Body):
    """Writes the check that ends a script."""

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
        headed = element.result in OPERATIONS[call.operation].headed or isinstance(element.result, int)
        if self.swapped(call) and len(index) == 4 and headed:
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
        if failure.kind in ("crash", "timeout"):
            self._ended(failure)
            return
        if failure.kind == "raised":
            self.calls(calls[:-1])
            self.line(*self.inputs(calls[-1], len(calls)), "try:", "    " + self.call_line(calls[-1], len(calls)))
            self.line(*("    " + line for line in self.gradient_lines(calls[-1], len(calls))))
            self.line(
                "except BaseException as error:", "    print('raised', repr(error))", "    sys.exit(1)", "sys.exit(0)"
            )
            return
        special = {
            "type": self._type,
            "shape": self._shape,
            "dtype": self._dtype,
            "input changed": self._mutated,
            "aliased": self._aliased,
            "state changed": self._state,
            "stale": self._stale,
            "no gradient": self._gradient,
            "accepted": self._accepted,
        }
        special.get(failure.kind, self._recorded)(failure)

    def _ended(self, failure: Failure) -> None:
        """The call ends or hangs its process, so it is made in a child."""
        inside = Body(Script(), self.implementation, self.words, self.large)
        inside.calls(failure.calls)
        self.script.data |= inside.script.data
        if not self.words.leaves_fork:
            self.line(
                "import os", "import subprocess", "", "if len(sys.argv) > 1:  # the call ends or hangs its process"
            )
            self.line(*("    " + line for line in inside.script.lines), f"    os._exit({RETURNED})")
            self.line("signal.alarm(0)", "child = subprocess.run([sys.executable, __file__, 'child'])")
            self.line(f"returned = child.returncode == {RETURNED}")
            self.end("returned", "'the call returned:', returned")
            return
        self.line("import os", "", "signal.alarm(0)", "child = os.fork()  # the call ends or hangs its process")
        self.line("if child == 0:", f"    signal.alarm({PATIENCE})", *("    " + line for line in inside.script.lines))
        self.line(f"    os._exit({RETURNED})", f"returned = os.waitstatus_to_exitcode(os.wait()[1]) == {RETURNED}")
        self.end("returned", "'the call returned:', returned")

    def _type(self, failure: Failure) -> None:
        call = failure.calls[-1]
        self.line(*self.inputs(call, 1), self.call_line(call, 1))
        kind = self.words.kind
        if call.gradient is not None and call.operation in self.implementation.description.vjps:
            self.line(*self.cotangent_lines(call, 1), self.vjp_line(call, 1))
            self.line(f"fine = isinstance(found, (tuple, list)) and len(found) >= {len(call.case.table.positional)}")
            self.line(f"fine = fine and all(g is None or isinstance(g, ({kind}, dict)) for g in found)")
            self.end("fine", "'gradients are a', type(found).__name__")
            return
        shown = "'returned', [type(r).__name__ for r in results1]"
        if not call.case.table.several or self.implementation.description.plans[call.operation].pick is not None:
            self.end(f"all(isinstance(r, {kind}) for r in results1)", shown)
            return
        count = len(call.case.table.results_for(call.case.arrays))
        self.line("fine = isinstance(results1, (tuple, list))", "results1 = list(results1) if fine else [results1]")
        exactly = "==" if call.case.table.listed else ">="
        self.line(f"fine = fine and len(results1) {exactly} {count}")
        self.end(f"fine and all(isinstance(r, {kind}) for r in results1)", shown + f", 'wanted {count} arrays'")

    def _shape(self, failure: Failure) -> None:
        call = failure.calls[-1]
        self.line(*self.inputs(call, 1), self.call_line(call, 1))
        facts = self.implementation.description.models.get(call.operation)
        shapes = [list(shape) for shape in wanted_shapes(call, facts)]
        for shape in shapes if self.swapped(call) else ():
            if len(shape) == 4:
                shape[1], shape[2] = shape[2], shape[1]
        self.line(*self.gradient_lines(call, 1))
        self.line(f"wanted = {[tuple(shape) for shape in shapes]}", "got = [tuple(r.shape) for r in results1]")
        for name in call.gradient or ():
            self.line(f"wanted.append(tuple({variable(name, 1)}.shape))")
            self.line(f"got.append(wanted[-1] if gradients1[{name!r}] is None else tuple(gradients1[{name!r}].shape))")
        self.end("got == wanted", "'shapes', got, 'wanted', wanted")

    def _dtype(self, failure: Failure) -> None:
        call = failure.calls[-1]
        self.line(*self.inputs(call, 1), self.call_line(call, 1))
        table = OPERATIONS[call.operation]
        wanted = [table.result_dtype(name, call.case.dtype) for name in table.results_for(call.case.arrays)]
        self.line(*self.gradient_lines(call, 1))
        self.line(f"wanted = {wanted}", "got = [str(r.dtype).removeprefix('torch.') for r in results1]")
        if call.gradient is not None:
            self.line(f"found = [gradients1[name] for name in {list(call.gradient)} if gradients1[name] is not None]")
            self.line("got += [str(g.dtype).removeprefix('torch.') for g in found]")
            self.line(f"wanted += [{call.case.dtype!r}] * len(found)")
        self.end("got == wanted", "'dtypes', got, 'wanted', wanted")

    def _bits(self, value: str) -> str:
        return f"{self.words.doubles(value)}.tobytes()"

    def kept(self, call: Call) -> list[str]:
        """Names of the inputs that a call must leave alone."""
        about = self.implementation.description
        free = writes(about.capabilities[call.operation])
        return [name for name in self._parts(call)[2] if name not in free]

    def _accepted(self, failure: Failure) -> None:
        """The last call had to be refused."""
        last = len(failure.calls)
        self.calls(failure.calls[:-1])
        self.line(*self.inputs(failure.calls[-1], last), "try:", "    " + self.call_line(failure.calls[-1], last))
        self.line("except Exception as error:", "    print('refused', repr(error))", "    sys.exit(0)")
        self.line("print('taken, wanted an exception')", "sys.exit(1)")

    def _mutated(self, failure: Failure) -> None:
        call = failure.calls[-1]
        self.line(*self.inputs(call, 1), *self.cotangent_lines(call, 1))
        names = [*(variable(name, 1) for name in self.kept(call)), *self.cotangents(call, 1).values()]
        self.line(f"before = [{', '.join(map(self._bits, names))}]", self.call_line(call, 1))
        self.line(*self.product_lines(call, 1))
        self.line(f"after = [{', '.join(map(self._bits, names))}]")
        self.end("before == after", "'inputs kept:', before == after")

    def _aliased(self, failure: Failure) -> None:
        call = failure.calls[-1]
        self.line(*self.inputs(call, 1), self.call_line(call, 1))
        pairs = [self.words.overlap("r", variable(name, 1)) for name in self.kept(call)]
        self.line(f"shared = any({' or '.join(pairs)} for r in results1)")
        self.end("not shared", "'a result shares memory with an input:', shared")

    def _stale(self, failure: Failure) -> None:
        first, second = failure.calls[-2:] if len(failure.calls) > 1 else (failure.calls[-1],) * 2
        self.line(*self.inputs(first, 1), self.call_line(first, 1), f"before = {self._bits('results1[0]')}")
        self.line(*self.inputs(second, 2), self.call_line(second, 2), f"after = {self._bits('results1[0]')}")
        self.line(f"kept = before == after and not ({self.words.overlap('results1[0]', 'results2[0]')})")
        self.end("kept", "'the first result stays as it was, in its own memory:', kept")

    def _state(self, failure: Failure) -> None:
        call = failure.calls[-1]
        parts = [
            "np.random.get_state()[1].tobytes()",
            "np.random.get_state()[2]",
            "repr(random.getstate())",
            "np.geterr()",
        ]
        parts += self.words.state()
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
            "# the law relates these outputs in a way that is not written out here; the wrong ones are on record",
        )
        checks = []
        for number, call in enumerate(failure.calls, 1):
            outputs = {f"results{number}[{i}]": result for i, result in enumerate(call.outcome.results)}
            for name, gradient in call.outcome.gradients.items():
                if gradient is None:
                    checks.append(f"gradients{number}[{name!r}] is None")
                else:
                    outputs[f"gradients{number}[{name!r}]"] = gradient
            for i, (value, output) in enumerate(outputs.items()):
                if self.large:
                    self.script.data[f"recorded{number}_{i}"] = output
                    recorded = f"data['recorded{number}_{i}']"
                else:
                    recorded = f"np.array({output.tolist()!r})"
                checks.append(f"np.array_equal({self.words.doubles(value)}, {recorded}, equal_nan=True)")
        self.line("same = [", *(f"    {check}," for check in checks), "]")
        self.end("not all(same)", "'outputs equal the wrong ones on record:', same")


def save(script: Script, path: Path) -> None:
    """Write the script, and its data beside it."""
    path.write_text(script.text, encoding="utf-8")
    if script.data:
        np.savez(path.with_suffix(".npz"), **script.data)  # type: ignore[arg-type]
