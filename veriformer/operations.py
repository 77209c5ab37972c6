"""The operations and their calling conventions: the table that third parties write against.

Axes: B batch, H query heads, G key/value heads (H % G == 0), Tq and Tk lengths, D head width,
Dv value width, d model width. "..." is any number of leading axes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Operation:
    """One named calling convention.

    arrays: the positional arrays and their axes. options: the keyword arrays and their axes (in
    mask and bias each axis may also be 1). keywords: the scalars and their defaults.
    results: names of what is returned.
    """

    name: str
    arrays: Mapping[str, str]
    keywords: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)
    results: tuple[str, ...] = ("out",)
    meaning: str = ""

    def axes(self, array: str) -> tuple[str, ...]:
        """Names of the axes of one array, "..." standing for any leading ones."""
        return tuple((self.arrays.get(array) or self.options[array]).split())

    @property
    def names(self) -> tuple[str, ...]:
        """Every array's name, positional ones first."""
        return (*self.arrays, *self.options)


_ATTENTION: dict[str, Any] = {
    "arrays": {"q": "B H Tq D", "k": "B G Tk D", "v": "B G Tk Dv"},
    "options": {"mask": "B H Tq Tk", "bias": "B H Tq Tk", "sink": "H"},
    "keywords": {"causal": False, "scale": None, "window": None, "softcap": None},
}

OPERATIONS: dict[str, Operation] = {
    operation.name: operation
    for operation in (
        Operation(
            "softmax", {"x": "..."}, {"axis": -1, "temperature": 1.0}, meaning="exp(x/T) / sum exp(x/T) over axis"
        ),
        Operation("log_softmax", {"x": "..."}, {"axis": -1}, meaning="x - log sum exp(x) over axis"),
        Operation("logsumexp", {"x": "..."}, {"axis": -1}, meaning="log sum exp(x) over axis, which is dropped"),
        Operation(
            "layer_norm",
            {"x": "... d", "weight": "d", "bias": "d"},
            {"eps": 1e-5},
            meaning="weight (x - mean) / sqrt(variance + eps) + bias over the last axis",
        ),
        Operation("attention", **_ATTENTION, meaning="softmax(q k^T scale) v over the keys a row may see"),
        Operation(
            "attention_with_lse",
            **_ATTENTION,
            results=("out", "lse"),
            meaning="attention, and the log of the summed exponentials of each row's logits, without the sink",
        ),
    )
}
