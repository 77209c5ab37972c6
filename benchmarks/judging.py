"""Whether what a timed call gave is right, and how near: by the reference and the budgets of the package.

No time is taken of what is wrong. Two numbers describe an accuracy, both costs: the worst ratio of error to budget
(above 1 is wrong; it moves too when a budget does), and the bits lost, the dtype's precision less the bits that are
right on average, which only the results move.
"""

from __future__ import annotations

import atexit
import hashlib
import math
import os
import pickle
import secrets
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .implementations import Prepared

BITS = {"float64": 53, "float32": 24, "bfloat16": 8, "float16": 11}
"""Bits of precision: the unit roundoff is 2 ** -BITS."""
EXACT = 2.0
"""So many bits more than a dtype has are shown where results are better, or exact."""
_MARK = "veriformer-bounds-"
KEPT = Path(tempfile.gettempdir()) / f"{_MARK}{os.getpid()}-{secrets.token_hex(4)}"
"""Where bounds are kept for processes that begin as copies of this one, as asv's do: composites take seconds."""
_OWNER = os.getpid()


@atexit.register
def _removed() -> None:
    if os.getpid() == _OWNER:  # copies of this process leave it to the next one
        shutil.rmtree(KEPT, ignore_errors=True)


def swept() -> None:
    """Remove what processes left that were killed, as asv's server of cells is in the end."""
    for path in KEPT.parent.glob(f"{_MARK}*"):
        owner = path.name.removeprefix(_MARK).partition("-")[0]
        try:
            os.kill(int(owner), 0)
        except ProcessLookupError:
            shutil.rmtree(path, ignore_errors=True)
        except (ValueError, PermissionError):
            continue  # another user's, or none of ours


class Wrong(Exception):
    """What a call gave is not right."""


@dataclass(frozen=True)
class Accuracy:
    """ratio: the worst error by its budget, or NaN where nothing is determined. lost_bits: see above."""

    ratio: float
    lost_bits: float


def worst(found: Sequence[Accuracy]) -> Accuracy:
    """The worst of several."""
    return Accuracy(max(a.ratio for a in found), max(a.lost_bits for a in found))


def accuracy(prepared: Prepared, number: int, returned: Any, limit: float = 1.0) -> Accuracy:
    """How right the result of `prepared.fresh(number)()` is.

    Raises Wrong for a wrong shape and for an error of more than `limit` budgets.
    """
    if prepared.workload.prompt:
        pairs = _generated(prepared, number, returned)
    elif prepared.needs_gradient:
        pairs = _gradients(prepared, number, returned)
    else:
        pairs = _forward(prepared, number, returned)
    return _worst(pairs, prepared, limit)


def inputs_of(prepared: Prepared) -> dict[str, bytes]:
    """The bits of the arrays that the latest fresh call was given, without caches that it may write into."""
    framework, given = prepared.framework, dict(prepared.natives)
    for name in ("k_cache", "v_cache") if getattr(prepared.capabilities, "cache_in_place", False) else ():
        given.pop(name, None)
    return {name: framework.read(native)[0].tobytes() for name, native in given.items()}


def keeps_contract(prepared: Prepared, before: dict[str, bytes], returned: Any) -> None:
    """Raise Wrong where a call has written into its inputs, or where real results have another dtype than they."""
    now = inputs_of(prepared)
    changed = [name for name in before if now[name] != before[name]]
    if changed:
        raise Wrong(f"{prepared.name} wrote into its input {changed[0]}")
    if prepared.workload.prompt or prepared.needs_gradient:
        return
    for result in prepared.results(returned):
        name = prepared.framework.read(result)[1]
        if name.startswith(("float", "bfloat")) and name != prepared.dtype:
            raise Wrong(f"{prepared.name} returned {name}, wanted {prepared.dtype}")


Pair = tuple[str, np.ndarray, Any]
"""A result's name, its values in float64, and the bound of it."""


def _forward(prepared: Prepared, number: int, returned: Any) -> list[Pair]:
    from veriformer import oracle

    case = prepared.case(number)
    bounds = _kept(prepared, number, lambda: oracle.bounds(case, prepared.capabilities, _precision(prepared)))
    results = [prepared.heads_first(result) for result in prepared.results(returned)]
    return _read(prepared, results, [f"result {i}" for i in range(len(bounds))], bounds)


def _gradients(prepared: Prepared, number: int, returned: Any) -> list[Pair]:
    from veriformer import oracle
    from veriformer.case import flattened, round_to

    case, names = prepared.case(number), prepared.inputs
    shapes = oracle.shapes(case)
    cotangents = (
        round_to(prepared.cotangent(number, shapes[0]), prepared.dtype),
        *[None] * (len(shapes) - 1),
    )
    bounds = _kept(
        prepared,
        number,
        lambda: oracle.gradient_bounds(case, names, cotangents, prepared.capabilities, _precision(prepared)),
    )
    if not isinstance(returned, dict):
        places = [name for name in case.table.positional if name not in case.table.scalars]
        given = returned if isinstance(returned, (tuple, list)) else (returned,)
        found: dict[str, Any] = {}
        for place, value in zip(places, given, strict=False):
            found |= flattened(value, place) if place == "params" else {place: value}
        returned = found
    lacking = [name for name in names if returned.get(name) is None]
    if lacking:
        raise Wrong(f"{prepared.name}: no gradient for {lacking[0]}")
    return _read(prepared, [returned[name] for name in names], list(names), [bounds[name] for name in names])


def _generated(prepared: Prepared, number: int, returned: Any) -> list[Pair]:
    """The logits that chose each token, against those of the reference for the same tokens."""
    from veriformer import oracle

    tokens, scores = returned
    start, case = prepared.workload.prompt, prepared.case(number).with_arrays(tokens=tokens)
    key = hashlib.sha256(tokens.tobytes()).hexdigest()
    bound = _kept(prepared, number, lambda: oracle.bounds(case, prepared.capabilities, _precision(prepared)), key)[0]
    from dataclasses import replace

    part = replace(bound, value=bound.value[:, start - 1 : -1], allowed=bound.allowed[:, start - 1 : -1])
    found = np.stack([prepared.framework.read(one)[0] for one in scores], axis=1)
    if (found.argmax(-1) != tokens[:, start:]).any():
        raise Wrong(f"{prepared.name}: a token is not the likeliest")
    return [("logits", found, part)]


def _read(prepared: Prepared, results: list[Any], names: list[str], bounds: Any) -> list[Pair]:
    if len(results) != len(bounds):
        raise Wrong(f"{prepared.name} returned {len(results)} results, wanted {len(bounds)}")
    pairs = []
    for name, result, bound in zip(names, results, bounds, strict=True):
        values = np.asarray(prepared.framework.read(result)[0], np.float64)
        if values.shape != np.shape(bound.value):
            raise Wrong(f"{prepared.name}: shape {values.shape}, wanted {np.shape(bound.value)}")
        pairs.append((name, values, bound))
    return pairs


def _precision(prepared: Prepared) -> Any:
    from veriformer.budgets import Precision

    return Precision.of(prepared.capabilities, prepared.dtype)


def _kept(prepared: Prepared, number: int, make: Callable[[], Any], key: str = "") -> Any:
    """Bounds that another process may have made."""
    work = prepared.workload
    said = repr((work.id, work.direction, number, prepared.dtype, prepared.capabilities, _precision(prepared), key))
    return shared(said, make)


def shared(said: str, make: Callable[[], Any]) -> Any:
    """What `make` gives, from whichever process that began as a copy of this one made it first under this name."""
    path = KEPT / hashlib.sha256(said.encode()).hexdigest()
    if path.exists():
        return pickle.loads(path.read_bytes())
    with np.errstate(all="ignore"):
        found = make()
    if not KEPT.exists():
        swept()
        KEPT.mkdir(mode=0o700, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}")
    part.write_bytes(pickle.dumps(found))
    part.replace(path)
    return found


def _worst(pairs: list[Pair], prepared: Prepared, limit: float) -> Accuracy:
    from veriformer.budgets import error_ratio

    largest = _precision(prepared).largest
    sizes = [rms(np.asarray(bound.value, float)) for _, _, bound in pairs]
    least = max(sizes) * 2.0 ** -BITS[prepared.dtype]  # less is 0 but for roundings, as the gradient of a key's bias
    worst, lost = math.nan, -EXACT
    for (name, found, bound), size in zip(pairs, sizes, strict=True):
        value, allowed = np.asarray(bound.value, float), np.asarray(bound.allowed, float)
        ratios = np.asarray(error_ratio(found, value, allowed, largest))[np.isfinite(allowed)]
        if ratios.size:
            top = float(np.where(np.isnan(ratios), np.inf, ratios).max())
            if top > limit:
                raise Wrong(f"{prepared.name}: {name} is {top:.1e} error budgets off at {prepared.workload.id}")
            worst = top if math.isnan(worst) else max(worst, top)
        if size > least:
            lost = max(lost, lost_bits(found, value, prepared.dtype))
    return Accuracy(worst, lost)


def rms(values: np.ndarray) -> float:
    """Root of the mean square; 0 of nothing."""
    return float(np.sqrt(np.mean(np.square(values)))) if values.size else 0.0


def lost_bits(found: np.ndarray, value: np.ndarray, dtype: str) -> float:
    """The dtype's bits less those that are right: log2 of the rms error by the rms value, in unit roundoffs."""
    size, error = rms(value), rms(found - value)
    if not math.isfinite(error):
        return math.inf
    if size == 0 or error == 0:
        return -EXACT
    return max(-EXACT, math.log2(error / size) + BITS[dtype])
