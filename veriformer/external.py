"""Implementations that are programs of their own, in any language: `attention=subprocess:node kernels.js`.

The program is started once for each process that makes calls, with one thread, and answers lines of JSON on its
standard input by lines of JSON on its standard output. What it prints for people goes to standard error. It is ended
with the process that started it; at the end of its standard input it should end by itself. First it says what it has:

    -> {"call": "hello", "protocol": 1}
    <- {"operations": {"attention": ["mask", "causal", "scale"], "attention_vjp": []}, "dtypes": ["float32"]}

Each operation with the keywords that it takes; an OPERATION_vjp gives its gradients. Optional are `dtypes` (float64
and float32 if absent) and `declare`, capabilities as `--declare` takes them. Then the calls:

    -> {"call": "attention", "dtype": "float32", "keywords": {"causal": true, "scale": null},
        "arrays": "/tmp/…/in.npz", "results": "/tmp/…/out.npz"}
    <- {"ok": true}                 or {"refused": "no masks"}, or {"error": "what went wrong"}

`keywords` holds every keyword that the program named, but for the arrays among them that are given, and positional
numbers such as length; null means not given, and numbers that JSON lacks are the words "inf", "-inf" and "nan".
`arrays` holds the arrays that are given, by name, weights by dotted names such as params.wq. The program writes
`results` before it answers: its results by name (out, lse, …), or in their order under any other names. For
OPERATION_vjp the arrays hold the `cotangent` as well (of several results cotangent.0, cotangent.1, …), and the results
are gradients by the names of the arrays, those without one left out.

Both files are NumPy's .npz: a zip archive of .npy entries, stored, not compressed, whose sizes stand in the archive's
central directory. Arrays are contiguous in C order, little-endian: float64 `<f8`, float32 `<f4`, float16 `<f2`, whole
numbers `<i8`, booleans `|b1`; where the dtype is bfloat16, real numbers are its bits in `<u2`, both ways.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import select
import shlex
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

from veriformer.boundary import ProcessEnded, WrongType, describe_error
from veriformer.calling import UsageError, nearest
from veriformer.case import flattened, nested
from veriformer.declarations import Capabilities
from veriformer.operations import OPERATIONS
from veriformer.processes import ONE_THREAD, die_with_parent, exit_words

PREFIX = "subprocess:"
"""What a target begins with that is a program."""
PROTOCOL = 1
PATIENCE = 60.0
"""Seconds in which a program must say what it has."""
VJP = "_vjp"
LONGEST = 1 << 16
"""Bytes of a line that are read; no answer is longer."""


class ProgramError(Exception):
    """The program says that something went wrong, or does not keep to the protocol."""


class External:
    """A program and what it says it has. Calls start it where it does not run in this process yet."""

    def __init__(self, command: str) -> None:
        """Start the program and ask what it has. Raises UsageError, in one line."""
        self.command, self.words = command, command_words(command)
        self.folder = tempfile.mkdtemp(prefix="veriformer-")
        self.running: list[tuple[int, subprocess.Popen[bytes]]] = []
        weakref.finalize(self, leave, self.running, self.folder, os.getpid())
        try:
            said = self._hello()
        except (ProgramError, ProcessEnded) as error:
            raise UsageError(f"{command} {error}; wanted one line of JSON in answer to hello") from None
        finally:
            stop(self.running)
        self.operations, self.dtypes, self.declare = said

    def _hello(self) -> tuple[dict[str, list[str]], tuple[str, ...], dict[str, Any]]:
        answer = self.ask({"call": "hello", "protocol": PROTOCOL}, PATIENCE)
        operations, dtypes, declare = (answer.get(key) or kind() for key, kind in HELLO.items())
        lists = operations.values() if isinstance(operations, dict) else [None]
        if not all(isinstance(words, list) and all(isinstance(word, str) for word in words) for words in lists):
            raise ProgramError('said something else than {"operations": {NAME: [KEYWORDS]}}')
        if not operations or not isinstance(dtypes, list) or not isinstance(declare, dict):
            raise ProgramError("named no operations, or something else than lists and objects")
        return operations, tuple(dtypes), declare

    def ask(self, message: Mapping[str, Any], patience: float | None = None) -> dict[str, Any]:
        """One question and its answer.

        Raises ProcessEnded where the program ends or says nothing in time, and ProgramError where its answer is
        no JSON object; it is started anew for the next question then.
        """
        process = self._started()
        assert process.stdin is not None and process.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError):  # what it said last may tell why
                process.stdin.write(json.dumps(message).encode() + b"\n")
                process.stdin.flush()
            if patience is not None and not select.select([process.stdout], [], [], patience)[0]:
                raise ProcessEnded(f"said nothing within {patience:.3g} s")
            line = process.stdout.readline(LONGEST)
            if not line:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    raise ProcessEnded(f"ended ({exit_words(process.wait(10))})")
                raise ProcessEnded("closed its output but goes on")
            return read_answer(line)
        except BaseException:
            stop(self.running)
            raise

    def _started(self) -> subprocess.Popen[bytes]:
        """The program, started where this process has not; a fork leaves that of its parent alone."""
        if not self.running or self.running[0][0] != os.getpid():
            try:
                process = subprocess.Popen(
                    self.words,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    env={**os.environ, **dict.fromkeys(ONE_THREAD, "1"), "MALLOC_PERTURB_": "1"},
                    preexec_fn=die_with_parent,
                )
            except OSError as error:
                raise UsageError(f"{self.command}: {self.words[0]} cannot be started: {error.strerror}") from None
            self.running[:] = [(os.getpid(), process)]
        return self.running[0][1]

    def call(self, name: str, dtype: str, arrays: Mapping[str, np.ndarray], keywords: Mapping[str, Any]) -> Any:
        """The arrays that the program writes in answer to a call, by name.

        Raises NotImplementedError where it refuses, ProgramError where it says error, and WrongType for results
        that cannot be read.
        """
        given, results = (Path(self.folder) / file for file in ("in.npz", "out.npz"))
        results.unlink(missing_ok=True)
        np.savez(given, **{key: as_sent(array) for key, array in arrays.items()})  # type: ignore[arg-type]
        words = {key: as_word(value) for key, value in keywords.items()}
        message = {"call": name, "dtype": dtype, "keywords": words, "arrays": str(given), "results": str(results)}
        answer = self.ask(message)
        if "refused" in answer:
            raise NotImplementedError(str(answer["refused"]))
        if "error" in answer or not answer.get("ok"):
            raise ProgramError(str(answer.get("error", f"answered {json.dumps(answer)[:200]}")))
        return read_results(results, dtype)


def stop(running: list[tuple[int, subprocess.Popen[bytes]]]) -> None:
    """End a program, if this process has started it: it may do so by itself at the end of its input."""
    while running:
        owner, process = running.pop()
        if owner != os.getpid():
            continue
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]
        try:
            process.wait(0.5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def leave(running: list[tuple[int, subprocess.Popen[bytes]]], folder: str, owner: int) -> None:
    """End the program and remove its folder; where the process is a fork, the folder is its parent's."""
    stop(running)
    if owner == os.getpid():
        shutil.rmtree(folder, ignore_errors=True)


HELLO = {"operations": dict, "dtypes": list, "declare": dict}


def command_words(command: str) -> list[str]:
    """The words of a command. Raises UsageError for none, and for a program that is not there."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UsageError(f"{PREFIX}{command}: {error}") from None
    if not words:
        raise UsageError(f"{PREFIX} wants a command, as in attention=subprocess:node kernels.js")
    if shutil.which(words[0]) is None:
        there = Path(words[0]).is_file()
        what = "cannot be run: chmod +x, or name its interpreter" if there else "is no program that can be found"
        raise UsageError(f"{PREFIX}{command}: {words[0]} {what}")
    return words


def read_answer(line: bytes) -> dict[str, Any]:
    """The JSON object of a line. Raises ProgramError for anything else."""
    try:
        answer = json.loads(line)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        text = ascii(line.decode(errors="replace").rstrip()[:60])
        raise ProgramError(f"printed {text} on stdout, which is for answers in JSON; print to stderr")
    return answer


def read_results(path: Path, dtype: str) -> dict[str, np.ndarray]:
    """The arrays of a file by name, bits of bfloat16 as such. Raises WrongType where it cannot be read."""
    try:
        with np.load(path, allow_pickle=False) as found:
            arrays = {name: found[name] for name in found.files}
    except FileNotFoundError:
        raise WrongType("the program answered without writing its results") from None
    except Exception as error:
        raise WrongType(f"the program's results cannot be read: {describe_error(error)}") from None
    bits = dtype == "bfloat16"
    return {
        key: array.view(ml_dtypes.bfloat16) if bits and array.dtype == np.uint16 else array
        for key, array in arrays.items()
    }


def as_sent(value: Any) -> np.ndarray:
    """An array as it is written: contiguous, bfloat16 as its bits."""
    array = np.array(value, order="C")
    return array.view(np.uint16) if array.dtype == ml_dtypes.bfloat16 else array


def as_word(value: Any) -> Any:
    """A keyword's value as JSON has it."""
    if isinstance(value, (tuple, list)):
        return [as_word(one) for one in value]
    if isinstance(value, np.generic):
        value = value.item()
    return value if not isinstance(value, float) or np.isfinite(value) else str(value)


def function_of(program: External, operation: str, words: Iterable[str]) -> Callable[..., Any]:
    """A function that calls the program; every keyword is given in every call."""
    table = OPERATIONS[operation]

    def function(*positional: Any, **keywords: Any) -> Any:
        found = program.call(operation, *sorted_out(operation, positional, keywords))
        arrays = flattened(positional[0], "grads") if table.listed else ()
        results = in_order(found, table.results_for(arrays))
        return results if table.several else results[0]

    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in table.positional]
    for name in words:
        if not name.isidentifier() or name in table.positional:
            raise UsageError(f"{program.command}: {operation} names the keyword {name!r}, which it cannot have")
        parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY))
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return function


def vjp_of(program: External, operation: str) -> Callable[..., Any]:
    """The OPERATION_vjp that calls the program."""
    table = OPERATIONS[operation]

    def function(cotangent: Any, *positional: Any, **keywords: Any) -> Any:
        dtype, arrays, rest = sorted_out(operation, positional, keywords)
        found = program.call(operation + VJP, dtype, {**flattened(cotangent, "cotangent"), **arrays}, rest)
        if strange := set(found) - set(arrays):
            raise WrongType(f"{operation}{VJP} gave {min(strange)!r}; gradients have the names of the arrays")
        places = [name for name in table.positional if name not in table.scalars]
        places += [name for name, value in keywords.items() if isinstance(value, np.ndarray)]
        gradients = nested(found)
        return tuple(gradients.get(name) for name in places)

    return function


def sorted_out(
    operation: str, positional: Iterable[Any], keywords: Mapping[str, Any]
) -> tuple[str, dict[str, np.ndarray], dict[str, Any]]:
    """The dtype, the arrays by name and what is no array, of a call's arguments."""
    given: dict[str, Any] = {**dict(zip(OPERATIONS[operation].positional, positional, strict=True)), **keywords}
    flat = {key: one for name, value in given.items() for key, one in parts(value, name).items()}
    arrays = {name: value for name, value in flat.items() if isinstance(value, np.ndarray)}
    rest = {name: value for name, value in flat.items() if name not in arrays}
    real = [array.dtype for array in arrays.values() if array.dtype.kind not in "biu"]
    return str(real[0]) if real else (OPERATIONS[operation].dtypes or ("float32",))[0], arrays, rest


def parts(value: Any, name: str) -> dict[str, Any]:
    """The arrays inside an argument by dotted names, or the argument itself."""
    within = isinstance(value, Mapping) or isinstance(value, list) and any(isinstance(v, np.ndarray) for v in value)
    return flattened(value, name) if within else {name: value}


def in_order(found: Mapping[str, np.ndarray], names: Iterable[str]) -> list[np.ndarray]:
    """Results in our order: by name where they have our names, else as they were written."""
    wanted = list(names)
    if all(name in found for name in wanted):
        return [found[name] for name in wanted]
    if len(found) != len(wanted):
        raise WrongType(f"the program wrote {', '.join(found) or 'nothing'}, wanted {', '.join(wanted)}")
    return list(found.values())


def offered(place: str, operation: str = "") -> tuple[dict[str, Callable[..., Any]], ModuleType, Capabilities]:
    """The functions of a program, all or one operation's, what stands for their module, and what it declares.

    Raises UsageError for what cannot be started, does not say what it has, or has nothing of that name.
    """
    program = External(place.removeprefix(PREFIX).strip())
    has = list(program.operations)
    names = [name for name in has if not operation or name in (operation, operation + VJP)]
    if operation and operation not in names:
        raise UsageError(f"{program.command} has no {operation}; it has {', '.join(has)}")
    functions = {name: _made(program, name) for name in names}
    module = ModuleType("subprocess")
    try:
        return functions, module, Capabilities.parse({"dtypes": program.dtypes, **program.declare})
    except (ValueError, TypeError) as error:
        raise UsageError(f"{program.command}: {error}") from None


def _made(program: External, name: str) -> Callable[..., Any]:
    """The function of that name. Raises UsageError where no program can have it."""
    operation = name.removesuffix(VJP)
    if operation not in OPERATIONS or operation not in program.operations:
        raise UsageError(f"{program.command} names {name!r}, which is no operation{nearest(name, list(OPERATIONS))}")
    if OPERATIONS[operation].words or OPERATIONS[operation].given:
        raise UsageError(f"{program.command}: {operation} is, or is given, an object; that takes Python")
    if name != operation:
        return vjp_of(program, operation)
    return function_of(program, name, program.operations[name])
