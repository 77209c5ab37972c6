"""What attention's laws do to a case: change what must not matter, cut out what stands alone, weigh one key."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from veriformer.case import Case
from veriformer.declarations import Capabilities
from veriformer.expect import expect_same
from veriformer.oracle import allowed_keys, empty_row_rule
from veriformer.properties.attention_build import opened
from veriformer.properties.measured import expect_equal, measure
from veriformer.reduce import with_kept
from veriformer.subject import Subject

Row = tuple[int, int, int]
"""Batch, head and query."""


def whole(array: np.ndarray, largest: int = 8) -> np.ndarray:
    """The nearest small whole numbers, whose sums are exact in every dtype."""
    return np.clip(np.round(array), -largest, largest)


def keep(case: Case, **kept: Sequence[int] | np.ndarray) -> Case:
    """The case with only these indices of the named axes: B, G, R (heads of each group), Tq, Tk, D or Dv."""
    for axis, indices in kept.items():
        case = with_kept(case, axis, np.asarray(indices))
    return case


def answerable(attention: Subject, case: Case, keys: int) -> Case:
    """The case, without the queries beyond so many keys where no more than these are accepted."""
    return case if attention.domain.longer(case["causal"]) else keep(case, Tq=np.arange(case.size("Tq"))[:keys])


def evenly(case: Case) -> Case:
    """The case with nothing that tells one visible key from another: a zero query, no bias, no sink."""
    return case.with_arrays(q=np.zeros_like(case["q"]), bias=None, sink=None)


def weighing(case: Case, key: int) -> Case:
    """The case with value 1 at one key and 0 at all others: the output is that key's weight."""
    value = np.zeros_like(case["v"])
    value[:, :, key] = 1.0
    return case.with_arrays(v=value)


def some_row(rows: np.ndarray, rng: np.random.Generator) -> Row | None:
    """One of the rows marked in rows[B,H,Tq], None where there is none."""
    found = np.argwhere(rows)
    return tuple(map(int, found[rng.integers(len(found))])) if len(found) else None  # type: ignore[return-value]


def edge_key(allowed: np.ndarray, rng: np.random.Generator) -> int:
    """The first or the last key that some row of allowed[B,H,Tq,Tk] may see."""
    row = some_row(allowed.any(-1), rng)
    return int(np.flatnonzero(allowed[row])[rng.integers(-1, 1)]) if row is not None else 0


def lone_row(case: Case, row: Row, keys: np.ndarray) -> Case:
    """One row over those keys only, nothing hidden from it."""
    group, member = divmod(row[1], case.size("H") // case.size("G"))
    lone = keep(case, B=[row[0]], G=[group], R=[member], Tq=[row[2]], Tk=keys)
    return lone.with_arrays(mask=None).with_keywords(causal=False, window=None)


def expect_independent(attention: Subject, part: Case, case: Case, index: object) -> None:
    """A part computed alone equals that part of the whole: within budget, bit for bit if batch_invariant."""
    if attention.capabilities.batch_invariant:
        expect_same(attention(part), attention(case)[index])
    else:
        expect_equal(measure(attention, part), measure(attention, case)[index])


def hidden_values_count(case: Case, capabilities: Capabilities) -> bool:
    """Whether an empty row is declared to be anything but zeros or NaN, hence may look at hidden values."""
    return case["sink"] is None and empty_row_rule(case, capabilities) in ("mean", "undefined")


def own_rows(case: Case, capabilities: Capabilities) -> np.ndarray:
    """Rows [B,H,Tq] that what they see determines: all, less empty ones declared to look elsewhere."""
    seeing = allowed_keys(case, capabilities).any(-1)
    return seeing if hidden_values_count(case, capabilities) else np.ones_like(seeing)


def rows_without(case: Case, capabilities: Capabilities, keys: np.ndarray) -> np.ndarray:
    """Rows [B,H,Tq] that see none of the keys marked in keys[Tk]; no row where no key is marked."""
    return ~(allowed_keys(case, capabilities) & keys).any(-1) & own_rows(case, capabilities) & keys.any()


def spoiled(case: Case, keys: np.ndarray, rng: np.random.Generator) -> Case:
    """The case with other finite keys and values, up to 1e4, where keys[Tk] is True.

    Keys stay small enough for their products with the queries to be finite in the dtype.
    """
    limit = 2e3 if case.dtype == "float16" else 1e8
    top = min(1e4, limit / max(1.0, float(np.abs(case["q"]).max(initial=0)) * case.size("D")))
    return case.with_arrays(
        k=np.where(keys[:, None], magnitudes(rng, case["k"].shape, top), case["k"]),
        v=np.where(keys[:, None], magnitudes(rng, case["v"].shape, 1e4), case["v"]),
    )


def magnitudes(rng: np.random.Generator, shape: tuple[int, ...], top: float) -> np.ndarray:
    """Numbers of either sign, spread over five powers of ten up to top."""
    return rng.choice([-1.0, 1.0], shape) * top * 10.0 ** rng.uniform(-5, 0, shape)


def per_head(case: Case, name: str) -> np.ndarray:
    """k or v as every query head sees it, [B,H,Tk,D or Dv]."""
    return np.repeat(case[name], case.size("H") // case.size("G"), 1)


def visible_mean(case: Case, capabilities: Capabilities) -> np.ndarray:
    """The plain mean of the values that each row sees, [B,H,Tq,Dv]."""
    allowed = allowed_keys(case, capabilities).astype(float)
    return allowed @ per_head(case, "v") / allowed.sum(-1, keepdims=True)


def loud(case: Case, top: float) -> Case:
    """The case with queries so large that products with keys reach top, or what float16 can hold."""
    top = min(top, 2e3) if case.dtype == "float16" else top
    reach = float(np.abs(case["q"]).max(initial=0) * np.abs(case["k"]).max(initial=0)) * case.size("D")
    if not reach:
        return case
    # small keys would call for queries that the dtype cannot hold
    largest = 3e4 if case.dtype == "float16" else 1e30
    factor = min(top / reach, largest / float(np.abs(case["q"]).max()))
    return case.with_arrays(q=case["q"] * factor)


def without_undefined_rows(case: Case, capabilities: Capabilities) -> Case:
    """The case itself, or with its empty rows opened where they are not declared to be zeros."""
    empty = ~allowed_keys(case, capabilities).any(-1)
    if not empty.any() or case["sink"] is not None or empty_row_rule(case, capabilities) == "zeros":
        return case
    case = opened(case, capabilities)
    return case if allowed_keys(case, capabilities).any(-1).all() else case.with_keywords(causal=False)
