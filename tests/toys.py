"""Small functions to judge, and short ways to judge them: what several tests of the suite share."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from veriformer.boundary import Outcome, Request
from veriformer.case import Case
from veriformer.catalogue import all_laws
from veriformer.checking import in_process
from veriformer.declarations import Expected
from veriformer.expect import expect_finite
from veriformer.law import Law, Recipe, find_laws, law
from veriformer.running import Item, Row
from veriformer.subject import Implementation
from veriformer.targets import Options, load, load_functions

ROOT = Path(__file__).resolve().parent.parent

SOFTMAX = """
import numpy as np

def softmax(x, *, axis=-1):
    e = np.exp(x - x.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)
"""
"""A correct module, as text that tests write into a file and change."""


def softmax(x: np.ndarray, *, axis: int = -1) -> np.ndarray:
    """Correct."""
    e = np.exp(x - x.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


def attention_with(fault: str = "") -> Callable[..., np.ndarray]:
    """Attention, correct but for one named mistake."""

    def attention(q, k, v, *, mask=None, causal=False, scale=None):  # type: ignore[no-untyped-def]
        heads, each, right = np.arange(q.shape[1]), q.shape[1] // k.shape[1], k.shape[2] - q.shape[2]
        head = heads % k.shape[1] if fault == "tiled heads" else heads // each
        logits = q @ k[:, head].swapaxes(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
        ahead = np.arange(k.shape[2]) - np.arange(q.shape[2])[:, None]
        visible = (ahead <= (0 if fault == "top left" else right)) | (not causal)
        if mask is not None:
            visible = visible & (~mask if fault == "mask inverted" else mask)
        logits = np.where(visible, logits, -np.inf)
        top = np.zeros(1) if fault == "no maximum" else logits.max(-1, keepdims=True)
        weights = np.exp(logits - np.where(np.isneginf(top), 0, top))
        total = weights.sum(-1, keepdims=True)
        out = weights @ v[:, head] / np.where(total == 0, 1, total)
        if fault == "head 2, row 4":
            out[:, 2:3, 4:5] += 1
        return out.astype(q.dtype)

    return attention


def implementation(*, expected: Sequence[Expected] = (), **functions: Callable[..., Any]) -> Implementation:
    """An implementation of functions in memory, called in this process as NumPy's."""
    loaded = load_functions(functions, Options(framework="numpy"), "toy")
    return in_process(replace(loaded, description=replace(loaded.description, expected=tuple(expected))))


def judged(law: Law | str, *, effort: str = "smoke", dtype: str = "float32", seed: int = 0, **rest: Any) -> Row:
    """The row of one law, given itself or its id, on functions in memory."""
    one = find_laws(all_laws(), [law])[0] if isinstance(law, str) else law
    return Item(one, implementation(**rest), dtype, effort, seed).run()


def cases_of(*cases: Case) -> Recipe:
    """A recipe of these cases and no search beyond them."""
    return Recipe(lambda domain: cases, lambda domain: st.sampled_from(cases))


def row_case(*values: float, dtype: str = "float32") -> Case:
    """A softmax case of one row."""
    return Case("softmax", {"x": np.array(values)}, dtype=dtype)


PLAIN = cases_of(row_case(0, 1), row_case(0, 1, 2))
"""Two short rows."""


def toy_law(body: Callable[..., None] = lambda softmax, case: expect_finite(softmax(case)), **words: Any) -> Law:
    """A law of softmax with this body: a contract, in which the reference has no say, unless a kind is given."""

    def toy(softmax: Any, case: Case, *others: Any) -> None:
        """A law for a test."""
        body(softmax, case, *others)

    words = {"case": PLAIN, "kind": "contract"} | words
    return law("softmax", **words)(toy)  # type: ignore[no-any-return]


def refusing(*lengths: int) -> Callable[..., np.ndarray]:
    """A softmax that declines rows of these lengths."""

    def function(x: np.ndarray) -> np.ndarray:
        if len(x) in lengths:
            raise ValueError("this length is not supported")
        return softmax(x)

    return function


def crossed(
    function: Callable[..., Any], values: Sequence[float] = (0.0, 1.0, 2.0), framework: str = "numpy"
) -> Outcome:
    """What the boundary makes of one softmax call."""
    boundary = load_functions({"softmax": function}, Options(framework=framework), "toy").boundaries["softmax"]
    return boundary.cross(Request({"x": np.array(values)}, {}, "float32", watch=True))


def run_python(*arguments: str, folder: Path, **rest: Any) -> subprocess.CompletedProcess[str]:
    """python with these arguments in a folder, its output captured, without options from outside."""
    outside = ("COLUMNS", "PYTEST_ADDOPTS", "PYTEST_XDIST_")  # a pytest inside is no worker of the one outside
    environment = {key: value for key, value in os.environ.items() if not key.startswith(outside)}
    environment |= {"OMP_NUM_THREADS": "1", "TERM": "dumb"} | rest.pop("env", {})
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True,
        stdin=rest.pop("stdin", None if "input" in rest else subprocess.DEVNULL), timeout=120, **rest,
    )  # fmt: skip


class Everything(frozenset):  # type: ignore[type-arg]
    """As the kinds of failure that need no smallest case: all of them, for tests that ask for the verdict alone."""

    def __contains__(self, kind: object) -> bool:
        return True


def faulty_files() -> list[str]:
    """Names of the files under impls/faulty that hold faults or controls; those for torch only where it is there."""
    files = sorted((ROOT / "impls" / "faulty").glob("[!_]*.py"))
    found = [path for path in files if find_spec("torch") or "import torch" not in path.read_text()]
    return [path.stem for path in found if path.stem != "crash"]


@functools.cache
def faulty(file: str) -> dict[str, Implementation]:
    """The variants of one of these files, by name, called in this process."""
    loaded = load(f"veriformer.impls.faulty.{file}", Options())
    return {one.description.name.partition(":")[2]: in_process(one) for one in loaded}
