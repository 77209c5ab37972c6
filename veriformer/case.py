"""One generated input: arrays, keywords, dtype and memory layout, small enough to print."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np

from veriformer.operation import LISTED, PARAMS, Operation, patterned
from veriformer.operations import OPERATIONS

LAYOUTS = ("contiguous", "transposed", "strided", "expanded", "offset")
PRINTED = 64
"""A case of at most this many numbers is printed and stored in full."""

NUMPY_DTYPES: dict[str, Any] = {
    "float64": np.float64,
    "float32": np.float32,
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
}


def round_to(values: Any, dtype: str) -> np.ndarray:
    """The values rounded to a dtype, as float64; booleans and whole numbers stay as they are."""
    array = np.asarray(values)
    if array.dtype.kind in "biu":
        return array
    array = np.asarray(array, dtype=np.float64)
    if dtype == "float64":
        return array
    with np.errstate(over="ignore"):
        return array.astype(NUMPY_DTYPES[dtype]).astype(np.float64)


@dataclass(frozen=True, eq=False)
class Case:
    """The arrays (float64, already rounded to dtype, or bool, or int64) and keywords of one call.

    keywords holds what differs from the operation's defaults, and positional scalars. origin says how
    the case was made ("pinned", or the value family and seed).
    """

    operation: str
    arrays: Mapping[str, np.ndarray]
    keywords: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    layout: str = "contiguous"
    origin: str = ""

    def __post_init__(self) -> None:
        table = self.table
        arrays = {}
        for name in sorted(self.arrays, key=place_in(table)):
            if self.arrays[name] is not None and table.knows(name):
                array = np.array(of_kind(table.kind(name), self.arrays[name], self.dtype))
                array.flags.writeable = False
                arrays[name] = array
        object.__setattr__(self, "arrays", arrays)
        keywords = {k: v for k, v in self.keywords.items() if v != table.default(k)}
        object.__setattr__(self, "keywords", keywords)

    @property
    def table(self) -> Operation:
        """The row of the operation table this case belongs to."""
        return OPERATIONS[self.operation]

    def __getitem__(self, name: str) -> Any:
        """An array, or a keyword with its default; None for an option that is not given."""
        if name in self.table.keywords or name in self.table.scalars:
            return self.keywords.get(name, self.table.default(name))
        return self.arrays.get(name)

    @property
    def params(self) -> dict[str, Any]:
        """The weights of a composite as the nested dicts that its function gets."""
        return nested({name: array for name, array in self.arrays.items() if name.startswith(PARAMS)}).get("params", {})  # type: ignore[no-any-return]

    def with_arrays(self, **arrays: Any) -> Case:
        """The same case with other arrays; None takes an option away."""
        return replace(self, arrays={**self.arrays, **arrays})

    def with_keywords(self, **keywords: Any) -> Case:
        """The same case with other keywords."""
        return replace(self, keywords={**self.keywords, **keywords})

    def as_operation(self, operation: str) -> Case:
        """The same arrays and keywords for an operation that shares them."""
        if operation == self.operation:
            return self
        table = OPERATIONS[operation]
        return replace(
            self,
            operation=operation,
            arrays={k: v for k, v in self.arrays.items() if table.knows(k)},
            keywords={k: v for k, v in self.keywords.items() if k in table.keywords or k in table.scalars},
        )

    def with_layout(self, layout: str) -> Case:
        """The same values in another memory layout (one of LAYOUTS)."""
        return replace(self, layout=layout)

    def sizes(self) -> dict[str, int]:
        """Length of every named axis; for a free shape the axes are called 0, 1, …"""
        found: dict[str, int] = {}
        if "heads" in self.keywords and self.table.arrays:
            found["H"] = self.keywords["heads"]
        for name in self.arrays:
            if name not in self.table.options:
                for label, length in zip(self.labels(name), self.arrays[name].shape, strict=True):
                    found.update(solved(label, length, found))
        for name in self.table.options:  # what comes as an option is as long as nothing else, such as a memory
            if name in self.arrays and self.table.kind(name) == "float":
                found = {**dict(zip(self.labels(name), self.arrays[name].shape, strict=True)), **found}
        return found

    def labels(self, name: str) -> list[str]:
        """Names of the axes that an array really has."""
        axes, count = list(self.table.axes(name)), self.arrays[name].ndim
        if axes[:1] == ["..."]:
            owner = (
                name.partition(".")[2] + "." if name.startswith(LISTED) else ""
            )  # each of a list has a shape of its own
            axes[:1] = [f"{owner}{i}" for i in range(count - len(axes) + 1)]
        return axes

    def size(self, axis: str) -> int:
        """Length of one named axis."""
        return self.sizes()[axis]

    @property
    def numbers(self) -> int:
        """How many numbers the arrays hold."""
        return sum(array.size for array in self.arrays.values())

    def random(self, salt: int = 0) -> np.random.Generator:
        """A generator that depends only on the shapes, so that a smaller case stays reproducible."""
        shapes = [n for array in self.arrays.values() for n in array.shape]
        return np.random.default_rng([salt, *shapes, *(int(self.keywords[s]) for s in self.table.scalars)])

    def describe(self) -> str:
        """One line: sizes, keywords and, where they are few, the values."""
        sizes = {axis: n for axis, n in self.sizes().items() if not nameless(axis)}
        parts = []
        if self.table.free:
            first = next(iter(self.table.arrays))
            parts = [f"shape={list(self[first].shape)}"]
            sizes = {axis: n for axis, n in sizes.items() if axis not in self.labels(first)}
        parts += [f"{axis}={n}" for axis, n in sizes.items()]
        parts += [f"{key}={show_keyword(value)}" for key, value in self.keywords.items()]
        if self.layout != "contiguous":
            parts.append(f"layout={self.layout}")
        line = " ".join(parts)
        if not self.arrays:
            return line
        if self.numbers <= PRINTED:
            values = " ".join(f"{name}={show_array(array)}" for name, array in self.arrays.items())
            return f"{line}; {values}"
        options = [name for name in self.table.options if name in self.arrays and name not in self.table.needed]
        return f"{line}{' with ' + ', '.join(options) if options else ''}; {self.numbers} numbers ({self.origin})"

    def to_json(self) -> dict[str, Any]:
        """A JSON record; arrays only while they hold at most PRINTED numbers together."""
        record: dict[str, Any] = {
            "operation": self.operation,
            "dtype": self.dtype,
            "layout": self.layout,
            "origin": self.origin,
            "shapes": {name: list(array.shape) for name, array in self.arrays.items()},
            "keywords": {k: list(v) if isinstance(v, tuple) else v for k, v in self.keywords.items()},
        }
        if self.numbers <= PRINTED:
            record["arrays"] = {name: json_values(array) for name, array in self.arrays.items()}
        return record

    @classmethod
    def from_json(cls, record: Mapping[str, Any], arrays: Mapping[str, np.ndarray] | None = None) -> Case:
        """The case of such a record; arrays come from the record or, for a large one, from a file."""
        shapes = record["shapes"]
        # an axis of length 0 is lost in nested lists, and with it the type, which the table knows
        found = {name: parse_values(values).reshape(shapes[name]) for name, values in record.get("arrays", {}).items()}
        keywords = {k: tuple(v) if isinstance(v, list) else v for k, v in record["keywords"].items()}
        return cls(
            record["operation"],
            {**found, **(arrays or {})},
            keywords,
            record["dtype"],
            record.get("layout", "contiguous"),
            record.get("origin", ""),
        )


def literal_case(operation: str, literal: Mapping[str, Any], dtype: str) -> Case:
    """A case from plain literals such as {"q": [[[[0.0]]]], …, "causal": True}.

    Raises ValueError for a name that is neither an array nor a keyword of the operation, and where
    an array is missing or has the wrong number of axes. A model with weights of its own needs its tokens alone.
    """
    table = OPERATIONS[operation]
    words = dict(literal)
    dtype, layout = words.pop("dtype", dtype), words.pop("layout", "contiguous")
    known = (*table.names, *table.scalars, *table.keywords)
    unknown = [w for w in words if w not in known and not table.knows(w)]
    required = table.required if not table.words or any(word.startswith(PARAMS) for word in words) else ()
    missing = [name for name in (*table.needed, *table.scalars, *required) if name not in words]
    if unknown or missing:
        what = f"{unknown[0]!r} is not one of its names" if unknown else f"{missing[0]!r} is missing"
        raise ValueError(f"case of {operation}: {what}; wanted {', '.join(known)}")
    arrays = {name: parse_values(value) for name, value in words.items() if table.knows(name) and value is not None}
    for name, array in arrays.items():
        axes = table.axes(name)
        if "..." not in axes and array.ndim != len(axes):
            raise ValueError(f"case of {operation}: {name} has {array.ndim} axes, wanted {' '.join(axes)}")
    keywords = {k: tuple(v) if isinstance(v, list) else v for k, v in words.items() if not table.knows(k)}
    return Case(operation, arrays, keywords, dtype, layout, "literal")


def place_in(table: Operation) -> Callable[[str], int]:
    """The order of a case's arrays: that of the table; weights of one name keep the order they came in."""
    order = {name: place for place, name in enumerate(table.names)}
    return lambda name: order.get(patterned(name), len(order))


def of_kind(kind: str, values: Any, dtype: str) -> np.ndarray:
    """The values as booleans, whole numbers, or real numbers rounded to the dtype."""
    if kind == "int":
        return np.asarray(values).astype(np.int64)
    return np.asarray(values).astype(bool) if kind == "bool" else round_to(np.asarray(values, np.float64), dtype)


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dicts of a flat one with dotted names; a level whose names are numbers is a list.

    {"params.wq": a, "params.layers.0.w": b} -> {"params": {"wq": a, "layers": [{"w": b}]}}.
    """
    groups: dict[str, Any] = {}
    for name, value in flat.items():
        head, _, tail = name.partition(".")
        if tail:
            groups.setdefault(head, {})[tail] = value
        else:
            groups[head] = value
    found = {name: nested(value) if isinstance(value, dict) else value for name, value in groups.items()}
    if found and all(name.isdigit() for name in found):
        return [found[name] for name in sorted(found, key=int)]  # type: ignore[return-value]
    return found


def flattened(tree: Any, prefix: str) -> dict[str, Any]:
    """The flat dict of nested ones: the inverse of `nested`."""
    if isinstance(tree, Mapping):
        pairs: Any = tree.items()
    elif isinstance(tree, (list, tuple)):
        pairs = enumerate(tree)
    else:
        return {prefix: tree}
    return {name: value for key, one in pairs for name, value in flattened(one, f"{prefix}.{key}").items()}


def nameless(label: str) -> bool:
    """Whether an axis has a number and no name: one of any leading ones."""
    return label.replace(".", "").isdigit()


def solved(label: str, length: int, known: Mapping[str, int]) -> dict[str, int]:
    """The axes that a label names, from one length: "B+1" is one more than B, in "G*D" one is known already."""
    if label.endswith("+1"):
        return {label[:-2]: length - 1}
    if "*" not in label:
        return {label: length}
    one, other = label.split("*")
    if one in known and known[one]:
        return {other: length // known[one]}
    return {one: length // known[other]} if known.get(other) else {}


def show_number(value: Any) -> str:
    """A number as short as it can be read back: 1 rather than 1.0, 1e-05, T and F for booleans."""
    if isinstance(value, (bool, np.bool_)):
        return "T" if value else "F"
    value = float(value)
    if math.isfinite(value) and value == int(value):
        return str(int(value)) if abs(value) < 1e6 else f"{value:g}"
    return f"{value:.9g}"


def show_array(array: np.ndarray) -> str:
    """Nested brackets with leading axes of length 1 left out, as in [[0,1],[2,3]]."""
    array = np.asarray(array)
    while array.ndim > 1 and array.shape[0] == 1:
        array = array[0]
    if array.ndim == 0:
        return show_number(array)
    inner = (show_array(row) if array.ndim > 1 else show_number(row) for row in array)
    return "[" + ",".join(inner) + "]"


def show_keyword(value: Any) -> str:
    """A keyword's value for a line of text."""
    if isinstance(value, tuple):
        return "(" + ",".join("None" if v is None else str(v) for v in value) + ")"
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def json_values(array: np.ndarray) -> Any:
    """Nested lists in which a number that JSON lacks is a word: "nan", "inf", "-inf"."""
    if array.dtype.kind in "bi":
        return array.tolist()
    return _words(array.tolist())


def _words(values: Any) -> Any:
    if isinstance(values, list):
        return [_words(value) for value in values]
    return values if math.isfinite(values) else str(values)


def parse_values(values: Any) -> np.ndarray:
    """The array of such nested lists; booleans and whole numbers stay what they are."""
    array = np.asarray(values)
    return array if array.dtype.kind in "bi" else array.astype(np.float64)
