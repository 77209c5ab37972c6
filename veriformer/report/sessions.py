"""Programs of moves written out as a script: the model, each call of its methods, caches as variables."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from veriformer import given_models
from veriformer.models import ModelFacts, ordered
from veriformer.moves import GIVES_LOGITS, Move, Program
from veriformer.operations import OPERATIONS
from veriformer.report.wording import NumpyWords

Variable = Callable[[str], str]
"""An array's name, such as move0.tokens -> the variable that holds it."""


def session_lines(name: str, made: list[str], program: Program, facts: ModelFacts, variable: Variable) -> list[str]:
    """Lines of a function of this name that makes the model, walks through the program and returns all logits."""
    lines = [f"def {name}():", *("    " + line for line in made), "    logits = []"]
    for number, move in enumerate(program):
        lines += ["    " + line for line in move_lines(move, number, facts, variable)]
    return ["", "", *lines, "    return logits", "", ""]


def move_lines(move: Move, number: int, facts: ModelFacts, variable: Variable) -> list[str]:
    """One move: the call, and what becomes of what it gives."""
    call = f"model.{move.word}({', '.join(arguments_of(move, number, facts, variable))})"
    if move.word == "full":
        return [f"logits.append({call})"]
    if move.word in GIVES_LOGITS:
        return [f"found, {kept(move.into)} = {call}", "logits.append(found)"]
    return [f"{kept(move.into)} = {call}"]


def arguments_of(move: Move, number: int, facts: ModelFacts, variable: Variable) -> list[str]:
    """What stands between the brackets of a move's call."""
    arrays = {name: variable(f"move{number}.{name}") for name in move.arrays}
    given, named = ordered(move, facts, arrays, {at: kept(at) for at in (None, move.cache, move.memory)})
    return [*map(str, given), *(f"{word}={array}" for word, array in named.items())]


def kept(number: int | None) -> str:
    """The variable of a cache or memory."""
    return "None" if number is None else f"kept{number}"


def made_lines(operation: str, given: list[str], facts: ModelFacts, words: NumpyWords, dtype: str) -> list[str]:
    """Lines that make the model as it is made here: with weights of its own, in the dtype; in eval mode."""
    if facts.weights:
        model = f"{operation}({', '.join(given)})"
    else:
        called = f"(dtype={words.dtype(dtype)})" if facts.takes_dtype else "()" if facts.factory else ""
        model = f"{operation}{called}"
        model = f"{facts.wrapper}({model})" if facts.wrapper else model
    return ["np.random.seed(0)", *words.made(model, dtype, facts.weights)]


def given_lines(operation: str) -> list[str]:
    """The source of what of ours a function under test is given, and how generated ids are filled up."""
    source = inspect.getsource(given_models.KINDS[OPERATIONS[operation].given]).splitlines()
    filled = [
        "",
        "",
        "def filled(ids, length, pad):",
        "    ids = np.asarray(ids)",
        "    rest = np.full((ids.shape[0], max(length - ids.shape[1], 0)), pad, ids.dtype)",
        "    return np.concatenate([ids, rest], axis=1)",
    ]
    imports = ["from typing import Any", "", "from array_api_compat import array_namespace"]
    return ["", *imports, "", "", *source, *(filled if operation == "generate" else []), "", ""]
