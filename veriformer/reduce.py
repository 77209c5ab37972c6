"""The smallest case that still fails: flags off, sizes down, then simpler values, at most 200 tries."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from veriformer.case import Case
from veriformer.expect import Broken
from veriformer.operation import GIVEN, LISTED, PARAMS
from veriformer.surprises import surprises

TRIES = 200
VISIBLE = 1e-2
"""A wrong value counts as visible when it is off by this share of the values compared."""

OPTIONAL_PART = re.compile(r"\.(head|norm|layers\.(?P<layer>\d+))(?=\.)")
"""Where the name of a weight says that it belongs to something that a composite need not have."""
TOKENS = {"ids": "V", "tokens": "V", "prompt": "V", "source": "Vs", "target": "V", "targets": "V"}
"""Arrays of token numbers -> the axis that has a row for each of them."""
TOKEN_WORDS = ("padding_index", "end", "pad", "ignore_index")
"""Keywords that are such numbers themselves."""
Arguments = tuple[Any, ...]
Attempt = Callable[[Arguments], Broken | None]
Stage = Callable[[Case], Iterator[Case]]


def smallest(arguments: Arguments, broken: Broken, attempt: Attempt) -> tuple[Arguments, Broken, int]:
    """Simplify while the same kind of failure stays.

    One stage after the other, and back to the first after one that helped.
    Returns the arguments, the failure they show and the number of tries.
    """
    tries, improved = 0, True
    while improved and tries < TRIES:
        for stage in STAGES:
            arguments, broken, tries, improved = walked(arguments, broken, attempt, stage, tries)
            if improved:
                break
    return arguments, broken, tries


def walked(
    arguments: Arguments, broken: Broken, attempt: Attempt, stage: Stage, tries: int
) -> tuple[Arguments, Broken, int, bool]:
    """Go through the candidates of a stage, on from one that is taken; also the tries so far, and if any was taken."""
    place, improved, ahead = 0, False, candidates(arguments, (stage,))
    while tries < TRIES and (candidate := next(ahead, None)) is not None:
        place += 1
        if surprises(candidate) > surprises(arguments):
            continue
        tries += 1
        found = attempt(candidate)
        if found is not None and as_clear(found, broken):
            arguments, broken, improved, place = candidate, found, True, place - 1
            ahead = itertools.islice(candidates(arguments, (stage,)), place, None)
    return arguments, broken, tries, improved


def as_clear(found: Broken, before: Broken) -> bool:
    """Whether a failure is of the same kind and no harder to see than the one before."""
    if found.kind != before.kind:
        return False
    return visibility(found) >= min(VISIBLE, visibility(before))


def visibility(broken: Broken) -> float:
    """|got - wanted| as a share of the larger, 1 where there is nothing to compare."""
    got, wanted = broken.facts.get("got"), broken.facts.get("wanted")
    if got is None or wanted is None or not (math.isfinite(got) and math.isfinite(wanted)):
        return 1.0
    return float(abs(got - wanted) / max(abs(got), abs(wanted), 1e-300))


def candidates(arguments: Arguments, stages: Sequence[Stage] = ()) -> Iterator[Arguments]:
    """Simpler arguments of some stages or of all, the boldest first; all of them keep their own shapes consistent."""
    for stage in stages or STAGES:
        for i, value in enumerate(arguments):
            plain = simpler_record if stage is STAGES[-1] else nothing
            for one in stage(value) if isinstance(value, Case) else plain(value):
                yield (*arguments[:i], one, *arguments[i + 1 :])


def nothing(value: Any) -> Iterator[Any]:
    """No candidate."""
    return iter(())


def simpler_record(value: Any) -> Iterator[Any]:
    """A plain value, tuple or dataclass with smaller numbers, or a tuple with fewer of them."""
    if isinstance(value, bool) or value is None:
        return
    if isinstance(value, int):
        yield from (n for n in dict.fromkeys((0, 1, value // 2)) if abs(n) < abs(value))
    elif isinstance(value, float) and math.isfinite(value):
        yield from (x for x in (1.0, 2.0, float(round(value))) if x != value and simplicity(x) < simplicity(value))
    elif isinstance(value, tuple):
        yield from (value[:i] + value[i + 1 :] for i in range(len(value)))
        for i, part in enumerate(value):
            yield from ((*value[:i], smaller, *value[i + 1 :]) for smaller in simpler_record(part))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            for smaller in simpler_record(getattr(value, field.name)):
                yield dataclasses.replace(value, **{field.name: smaller})


def without_extras(case: Case) -> Iterator[Case]:
    """What need not be given taken away: layout, keywords, parts of a composite, options."""
    if case.layout != "contiguous":
        yield case.with_layout("contiguous")
    for name in case.keywords:
        if name in case.table.keywords and name not in case.table.required:
            yield case.with_keywords(**{name: case.table.keywords[name]})
    if "memory" in case.arrays and "memory" in case.table.options:
        yield without_memory(case)
    yield from without_parts(case)
    for name, array in case.arrays.items():
        # without its matrices and the weights of its norms there is no composite
        vital = name.startswith(PARAMS) and (array.ndim > 1 or name.endswith(".weight"))
        vital |= name.startswith(GIVEN) or name.startswith(LISTED) and len(case.arrays) == 1
        if name not in case.table.arrays and name not in case.table.required and not vital:
            yield case.with_arrays(**{name: None})


def without_parts(case: Case) -> Iterator[Case]:
    """Without what a composite need not have: all biases, a head, a final norm, a layer beside others."""
    weights = [name for name in case.arrays if name.startswith(PARAMS)]
    parts: dict[str, list[str]] = {"biases": [name for name in weights if is_bias(case, name)]}
    layers: dict[str, set[str]] = {}
    for name in weights:
        for found in OPTIONAL_PART.finditer(name):
            parts.setdefault(name[: found.end()], []).append(name)
            if found["layer"]:
                layers.setdefault(name[: found.start()], set()).add(name[: found.end()])
    alone = {part for stack in layers.values() if len(stack) == 1 for part in stack}
    for part, names in parts.items():
        if names and part not in alone:
            yield case.with_arrays(**dict.fromkeys(names))


def without_memory(case: Case) -> Case:
    """An encoder_layer made of the decoder_layer: its last norm takes the place of the one behind the memory."""
    layer = f"{PARAMS}layer."
    between = (f"{layer}cross_attention.", f"{layer}norm2.", f"{layer}norm3.")
    going = [name for name in case.arrays if name in ("memory", "memory_mask") or name.startswith(between)]
    last = {name.replace("norm3", "norm2"): case[name] for name in going if name.startswith(between[-1])}
    return case.with_arrays(**{**dict.fromkeys(going), **last})


def is_bias(case: Case, name: str) -> bool:
    """Whether a weight is added to what comes before it."""
    return case[name].ndim == 1 and not name.endswith(".weight")


def simpler_keywords(case: Case) -> Iterator[Case]:
    """Keywords nearer to plain numbers."""
    for name, value in case.keywords.items():
        if isinstance(value, tuple):
            for i, side in enumerate(value):
                for smaller in (None, 0, 1):
                    if side != smaller and (smaller is None or side is None or smaller < side):
                        yield case.with_keywords(**{name: (*value[:i], smaller, *value[i + 1 :])})
        elif isinstance(value, (int, float)):
            for smaller in simpler_record(value):
                if smaller or name not in (*case.table.scalars, "max_steps"):  # lengths are at least 1
                    yield case.with_keywords(**{name: smaller})


def smaller_sizes(case: Case) -> Iterator[Case]:
    """Fewer indices along each axis: one, half, one less; and fewer axes of a free shape."""
    sizes = case.sizes()
    labels = [label for label in sizes if label != "H"]
    if "H" in sizes and "G" in sizes:
        labels.insert(1, "R")
    for label in labels:
        for kept in fewer(axis_size(case, label)):
            yield with_kept(case, label, kept)
    if case.table.free:
        yield from fewer_axes(case)


def fewer_axes(case: Case) -> Iterator[Case]:
    """A free axis of length 1 taken away, unless it is the one that the operation reduces."""
    first, *rest = [name for name in case.table.needed if "..." in case.table.axes(name)]
    x, has_axis = case[first], "axis" in case.table.keywords
    if x.ndim == 1:
        return
    reduced = (case["axis"] if has_axis else -1) % x.ndim
    for place, label in enumerate(case.labels(first)):
        if label.isdigit() and x.shape[place] == 1 and place != reduced:
            smaller = case.with_arrays(**{name: case[name].squeeze(place) for name in (first, *rest)})
            yield smaller.with_keywords(axis=reduced - (place < reduced) - (x.ndim - 1)) if has_axis else smaller


def fewer(length: int) -> Iterator[np.ndarray]:
    """Index sets smaller than `length`: the first, the last, halves, all but one."""
    everything = np.arange(length)
    if length <= 1:
        return
    yield everything[:1]
    yield everything[-1:]
    if length > 3:
        yield everything[: length // 2]
        yield everything[length // 2 :]
    if length > 2:
        yield everything[:-1]
        yield everything[1:]


def axis_size(case: Case, label: str) -> int:
    """Length of a named axis; R is the number of query heads per key head."""
    sizes = case.sizes()
    return sizes["H"] // max(sizes["G"], 1) if label == "R" else sizes[label]


def with_kept(case: Case, label: str, kept: np.ndarray) -> Case:
    """The case with some indices of one axis, in every array that has it.

    R keeps some query heads of every key head, G some key heads with all their query heads.
    """
    if case.operation == "varlen_attention" and label in ("B", "Nq", "Nk"):
        return keep_packed(case, label, kept)
    groups = case.sizes().get("G", 0)
    arrays = {}
    for name, array in case.arrays.items():
        for place, axis in enumerate(case.labels(name)):
            if name in case.table.arrays or array.shape[place] > 1 or name.startswith(PARAMS):
                array = keep_along(case, array, place, axis, label, kept)
        arrays[name] = renumbered(array, kept, axis_size(case, label)) if TOKENS.get(name) == label else array
    smaller = case.with_arrays(**arrays)
    if label in TOKENS.values():
        words = {word: value for word, value in case.keywords.items() if word in TOKEN_WORDS and value is not None}
        size = axis_size(case, label)
        smaller = smaller.with_keywords(**{word: int(renumbered(value, kept, size)) for word, value in words.items()})
    if label == "M" and "max_steps" in case.keywords:
        smaller = smaller.with_keywords(max_steps=min(case["max_steps"], len(kept)))
    if "heads" in case.keywords and label in ("R", "G"):
        heads = len(kept) * (groups if label == "R" else case.sizes()["H"] // groups)
        smaller = smaller.with_keywords(heads=heads)
    return smaller


def renumbered(tokens: Any, kept: np.ndarray, size: int) -> np.ndarray:
    """Token numbers where only some rows of their table are kept; those whose row is gone become 0.

    What is no row's number, such as -100 for a target that is ignored, stays.
    """
    found = np.where(np.isin(tokens, kept), np.searchsorted(kept, tokens), 0)
    return np.where((np.asarray(tokens) >= 0) & (np.asarray(tokens) < size), found, tokens)


def keep_along(case: Case, array: np.ndarray, place: int, axis: str, label: str, kept: np.ndarray) -> np.ndarray:
    """Some indices of one axis of one array, which may hold a product of two axes."""
    if axis == label or axis == "N" and label == "B" and "block_table" not in case.arrays:
        return array.take(kept, place)
    sizes = case.sizes()
    if "*" in axis:
        parts = axis.split("*")
        shape = array.shape
        split = array.reshape(*shape[:place], *(sizes[part] for part in parts), *shape[place + 1 :])
        for i, part in enumerate(parts):
            split = keep_along(case, split, place + i, part, label, kept)
        return split.reshape(*shape[:place], -1, *shape[place + 1 :])
    if axis == "H" and label in ("R", "G"):
        return keep_heads(array, place, label, kept, sizes["G"])
    return array


def keep_heads(array: np.ndarray, place: int, axis: str, kept: np.ndarray, groups: int) -> np.ndarray:
    """Some groups of query heads, or some heads of every group."""
    if array.shape[place] == 1:
        return array
    shape = array.shape
    split = array.reshape(*shape[:place], groups, shape[place] // groups, *shape[place + 1 :])
    split = split.take(kept, place if axis == "G" else place + 1)
    return split.reshape(*shape[:place], -1, *shape[place + 1 :])


def keep_packed(case: Case, label: str, kept: np.ndarray) -> Case:
    """Some sequences of a packed batch with their rows, or some rows, which leaves each sequence its own."""
    arrays: dict[str, Any] = {}
    for side, names in (("q", ("q",)), ("k", ("k", "v"))):
        offsets = case[f"{side}_offsets"]
        owner = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
        rows = np.arange(len(owner))
        if label == "B":
            rows = rows[np.isin(owner, kept)]
        elif label == f"N{side}":
            rows = kept
        lengths = np.bincount(owner[rows], minlength=len(offsets) - 1)
        lengths = lengths[kept] if label == "B" else lengths
        arrays[f"{side}_offsets"] = np.concatenate([[0], np.cumsum(lengths)])
        arrays |= {name: case[name].take(rows, 0) for name in names}
    return case.with_arrays(**arrays)


def simpler_arrays(case: Case) -> Iterator[Case]:
    """Whole arrays of zeros, ones, booleans all True, or integers, or without their common offset."""
    yield from silent_parts(case)
    for name, array in case.arrays.items():
        if array.dtype == bool:
            options = [np.ones_like(array)]
        elif array.dtype.kind == "i":
            options = [] if cuts_rows(case, name) else [np.zeros_like(array)]
        else:
            with np.errstate(all="ignore"):
                options = [np.zeros_like(array), np.ones_like(array), np.round(array), np.sign(array)]
                options += [array - array.min()] if array.size else []
        for option in options:
            if complexity(option) < complexity(array):
                yield case.with_arrays(**{name: option})


def silent_parts(case: Case) -> Iterator[Case]:
    """Zeros for all weights of a stack, a layer or a sublayer together; a composite has too many for one at a time."""
    loud = [name for name, array in case.arrays.items() if name.startswith(PARAMS) and array.any()]
    parts: dict[str, list[str]] = {}
    for name in loud:
        steps = name.split(".")
        for count in range(1, len(steps)):
            parts.setdefault(".".join(steps[:count]), []).append(name)
    for names in sorted(dict.fromkeys(map(tuple, parts.values())), key=len, reverse=True):
        if len(names) > 1:
            yield case.with_arrays(**{name: np.zeros_like(case[name]) for name in names})


def cuts_rows(case: Case, name: str) -> bool:
    """Whether an array says where packed sequences begin, which follows from their lengths."""
    return any(axis.endswith("+1") for axis in case.table.axes(name))


def simpler_numbers(case: Case) -> Iterator[Case]:
    """One number at a time: 0, 1, -1, 2, the nearest integer, a power of ten."""
    for name, array in case.arrays.items():
        if array.size > 64 or cuts_rows(case, name):
            continue
        for place in np.ndindex(array.shape):
            value = array[place]
            for simpler in simpler_values(value):
                if array.dtype.kind == "i" and simpler < 0 <= value:
                    continue  # an index or a length
                changed = array.copy()
                changed[place] = simpler
                yield case.with_arrays(**{name: changed})


def simpler_values(value: Any) -> Iterator[Any]:
    """Values simpler than this one."""
    if isinstance(value, (bool, np.bool_)):
        if not value:
            yield True
        return
    value = float(value)
    options = [0.0, 1.0, -1.0, 2.0]
    if math.isfinite(value):
        options.append(float(round(value)))
        if abs(value) >= 10:
            options.append(math.copysign(10.0 ** round(math.log10(abs(value))), value))
    yield from (option for option in dict.fromkeys(options) if simplicity(option) < simplicity(value))


def simplicity(value: float) -> tuple[int, float]:
    """Smaller is simpler: 0, 1, -1, 2, small integers, powers of ten, integers, the rest."""
    order = {0.0: 0, 1.0: 1, -1.0: 2, 2.0: 3}
    if value in order:
        return order[value], 0.0
    if not math.isfinite(value):
        return 9, 0.0
    if value == round(value) and abs(value) < 10:
        return 4, abs(value)
    if abs(value) >= 10 and f"{abs(value):e}".split("e")[0].strip("0.") == "1":
        return 5, abs(value)
    return (6, abs(value)) if value == round(value) else (7, abs(value))


def complexity(array: np.ndarray) -> int:
    """Sum of the simplicity ranks, by which whole arrays are compared."""
    if array.dtype == bool:
        return int((~array).sum())
    return sum(simplicity(value)[0] for value in array.ravel().tolist())


STAGES: tuple[Stage, ...] = (without_extras, smaller_sizes, simpler_keywords, simpler_arrays, simpler_numbers)
"""Flags off, sizes down, keywords and whole arrays simpler, single numbers simpler."""
