"""What a calling convention is: its arrays, keywords and results, and what their names say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

PARAMS = "params."
"""Arrays whose names begin so are the weights of a composite: the function gets them as nested dicts."""
GIVEN = ("model.", "step.")
"""Arrays whose names begin so make a small model or step of ours (`given_models`), which the function gets first."""
LISTED = "grads."
"""Arrays whose names begin so are given, and returned, as a list."""
WHOLE = ("ids", "steps")
"""Results that are whole numbers."""
MAIN = "main"
"""Stands for each operation's main dtype where dtypes are chosen."""


@dataclass(frozen=True)
class Operation:
    """One named calling convention.

    arrays: the positional arrays and their axes. scalars: positional whole numbers after them. options: the
    keyword arrays and their axes (in mask and bias each axis may also be 1).
    keywords: the scalars and their defaults. required: keywords and options without a default. kinds:
    what arrays hold if not real numbers, "bool" or "int"; "constant" are real numbers without a
    gradient. params: weights of a composite, by dotted name ("*" for any number), and their axes; those
    in a list and biases may be absent. results: names of what is returned; "*" stands for one array of a list
    for each that was given. dtypes: those judged, where they do not follow from what the framework has.
    """

    name: str
    arrays: Mapping[str, str] = field(default_factory=dict)
    keywords: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)
    results: tuple[str, ...] = ("out",)
    meaning: str = ""
    scalars: tuple[str, ...] = ()
    required: frozenset[str] = frozenset()
    kinds: Mapping[str, str] = field(default_factory=dict)
    params: Mapping[str, str] = field(default_factory=dict)
    dtypes: tuple[str, ...] = ()
    words: tuple[str, ...] = ()

    def axes(self, array: str) -> tuple[str, ...]:
        """Names of the axes of one array, "..." standing for any leading ones."""
        if inner(array):
            return tuple(self.params[patterned(array)].split())
        return tuple((self.arrays.get(array) or self.options[array]).split())

    @property
    def names(self) -> tuple[str, ...]:
        """Every array's name: positional ones, weights, options."""
        return (*self.arrays, *self.params, *self.options)

    def knows(self, array: str) -> bool:
        """Whether there may be an array of this name."""
        return array in self.arrays or array in self.options or patterned(array) in self.params

    @property
    def positional(self) -> tuple[str, ...]:
        """What is passed by position; "params", "grads" and what is given stand for all arrays whose names begin so."""
        groups = {name.partition(".")[0] + "." for name in self.params}
        first = [prefix[:-1] for prefix in (*GIVEN, LISTED) if prefix in groups]
        return (*first, *self.arrays, *self.scalars, *(("params",) if PARAMS in groups else ()))

    @property
    def given(self) -> str:
        """What of ours the function is given, a "model" or a "step"; empty for most."""
        return next((prefix[:-1] for prefix in GIVEN if any(name.startswith(prefix) for name in self.params)), "")

    @property
    def several(self) -> bool:
        """Whether a tuple or list is returned."""
        return len(self.results) > 1 or self.listed

    @property
    def listed(self) -> bool:
        """Whether a list of arrays is given, and one like it returned."""
        return self.results[0].startswith(LISTED)

    @property
    def number(self) -> bool:
        """Whether the result is a single number, which need not be an array."""
        return self.results == ("rate",)

    def results_for(self, arrays: Iterable[str]) -> tuple[str, ...]:
        """Names of what is returned where these arrays are given."""
        if self.listed:
            return tuple(name for name in arrays if name.startswith(LISTED))
        return self.results

    def kind(self, array: str) -> str:
        """What an array holds: "float", "constant", "int" or "bool"."""
        return self.kinds.get(patterned(array), "float")

    def default(self, word: str) -> Any:
        """A keyword's default; None for a scalar and where a keyword is required."""
        return self.keywords.get(word)

    def result_dtype(self, result: str, dtype: str) -> str:
        """The dtype of a result where the inputs have this one."""
        if result in WHOLE:
            return "int64"
        return "float32" if result == "lse" and dtype in ("float16", "bfloat16") else dtype

    @property
    def free(self) -> bool:
        """Whether the first array may have any shape, or any leading axes."""
        return bool(self.arrays) and next(iter(self.arrays.values())).startswith("...")

    @property
    def headed(self) -> tuple[str, ...]:
        """Names of the arrays that hold heads before positions, which another layout swaps."""
        four = {name: axes.split() for name, axes in self.arrays.items()}
        return tuple(name for name, axes in four.items() if len(axes) == 4 and axes[1] in ("H", "G"))

    @property
    def needed(self) -> tuple[str, ...]:
        """Names of the arrays without which there is no case."""
        return (*self.arrays, *(name for name in self.options if name in self.required))

    @property
    def differentiable(self) -> tuple[str, ...]:
        """Names of the arrays by which one differentiates."""
        return tuple(name for name in self.names if self.kind(name) == "float")


def inner(name: str) -> bool:
    """Whether an array is a part of what is passed, such as a weight or a number of a given model."""
    return name.startswith((PARAMS, LISTED, *GIVEN))


def patterned(name: str) -> str:
    """A weight's name with "*" for every number: params.layers.0.norm1.weight is params.layers.*.norm1.weight."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
