"""One concrete case of attention from its plan: arrays by family, options by flag, masks that meet the wish."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from veriformer.case import Case
from veriformer.declarations import Capabilities
from veriformer.law import Domain
from veriformer.oracle import allowed_keys, query_offset
from veriformer.properties.families import fill
from veriformer.reduce import with_kept

MASKS = ("random", "lengths", "leading", "rows", "one", "broadcast")
"""Kinds of masks: independent entries; a length per batch row; the first keys hidden; whole rows; one hidden key."""

FILLS = ("integers", "normal", "constant", "one_hot", "large_mean", "ladder", "sparse", "halves")
"""Families of values for query, key and value."""


@dataclass(frozen=True)
class Wish:
    """What a law asks of its cases: flags that must be on (True), off (False), or are drawn (absent)."""

    flags: tuple[tuple[str, bool], ...] = ()
    empty: bool = False
    some_empty: bool = False
    square: bool | None = None
    grouped: bool | None = None
    hidden: bool = False
    lonely: bool = False
    families: tuple[str, ...] = FILLS
    least: tuple[tuple[str, int], ...] = ()
    layouts: tuple[str, ...] = ("contiguous",)
    scales: tuple[float, ...] = (1.0, 0.5, 0.25, 2.0, 0.1)


@dataclass(frozen=True)
class Plan:
    """Everything that determines one case; a case is its plan made concrete."""

    shape: tuple[int, ...]
    flags: tuple[str, ...]
    families: tuple[str, str, str]
    mask: str
    seed: int
    layout: str = "contiguous"


def build(domain: Domain, wish: Wish, plan: Plan) -> Case | None:
    """The case of a plan, or None where it cannot meet the wish."""
    batch, groups, repeats, queries, keys, width, value_width = plan.shape
    rng = np.random.default_rng(plan.seed)
    queries, keys = lengths_for(queries, keys, plan.flags, wish, domain)
    heads = groups * repeats
    arrays: dict[str, Any] = {
        "q": fill(plan.families[0], plan.seed, (batch, heads, queries, width), domain.dtype),
        "k": fill(plan.families[1], plan.seed + 1, (batch, groups, keys, width), domain.dtype),
        "v": fill(plan.families[2], plan.seed + 2, (batch, groups, keys, value_width), domain.dtype),
    }
    arrays["q"], arrays["k"] = tamed(arrays["q"], arrays["k"], domain.dtype)
    keywords = keyword_values(plan.flags, wish, rng, keys)
    if "bias" in plan.flags:
        arrays["bias"] = broadcast_some(rng, rng.integers(-2, 3, (batch, heads, queries, keys)).astype(float), 4)
    if "sink" in plan.flags:
        arrays["sink"] = rng.integers(-2, 3, heads).astype(float)
    if "mask" in plan.flags:
        arrays["mask"] = make_mask(plan.mask, rng, (batch, heads, queries, keys))
    origin = f"{'/'.join(plan.families)} seed {plan.seed}"
    case = Case(domain.operation, arrays, keywords, domain.dtype, plan.layout, origin)
    return settled(case, wish, domain, rng)


def lengths_for(queries: int, keys: int, flags: Sequence[str], wish: Wish, domain: Domain) -> tuple[int, int]:
    """Tq and Tk, changed where the domain does not take them, or a causal case could not meet the wish with them."""
    if queries > keys and not domain.longer("causal" in flags):
        keys = queries + 1
    if "causal" not in flags:
        return queries, keys
    alignment, least = domain.capabilities.causal_alignment, dict(wish.least)
    shortest = 2 if wish.hidden else max(least.get("Tq", 1), least.get("Tk", 1))
    if alignment == "square":
        return (max(keys, shortest),) * 2
    if alignment == "top_left":
        return queries, keys
    if wish.some_empty and "mask" not in flags:
        return max(queries, keys) + (queries == keys), min(queries, keys)
    if queries > keys and not wish.empty:
        queries, keys = keys, queries
    return max(queries, shortest), max(keys, shortest)


def tamed(query: np.ndarray, key: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Query and key small enough that their products stay well inside the dtype."""
    limit = 2e3 if dtype == "float16" else 1e8
    top = float(np.abs(query).max(initial=0) * np.abs(key).max(initial=0)) * query.shape[-1]
    if top <= limit:
        return query, key
    factor = np.sqrt(limit / top)
    return query * factor, key * factor


def keyword_values(flags: Sequence[str], wish: Wish, rng: np.random.Generator, keys: int) -> dict[str, Any]:
    """Values of the scalar keywords that are on."""
    found: dict[str, Any] = {}
    if "causal" in flags:
        found["causal"] = True
    if "scale" in flags:
        found["scale"] = float(rng.choice(wish.scales))
    if "softcap" in flags:
        found["softcap"] = float(rng.choice([1.0, 2.0, 5.0, 30.0]))
    if "window" in flags:
        sides = [None, 0, 1, max(keys - 2, 1)]
        pick = int(rng.integers(1, 16))
        found["window"] = (sides[pick % 4], sides[pick // 4])
    return found


def broadcast_some(rng: np.random.Generator, values: np.ndarray, axes: int = 3) -> np.ndarray:
    """Some of the first axes cut to length 1, as masks and biases may have them."""
    for axis in range(axes):
        if rng.random() < 0.3:
            values = values.take([0], axis)
    return values


def make_mask(kind: str, rng: np.random.Generator, shape: tuple[int, int, int, int]) -> np.ndarray:
    """A mask of one of the kinds in MASKS; True = may attend."""
    batch, _, queries, keys = shape
    if kind == "lengths":
        lengths = rng.integers(1, keys + 1, batch)
        return (np.arange(keys) < lengths[:, None])[:, None, None, :]
    if kind == "leading":
        hidden = int(rng.integers(0, keys))
        return np.broadcast_to(np.arange(keys) >= hidden, (1, 1, 1, keys)).copy()
    if kind == "one":
        mask = np.ones(shape, bool)
        mask[..., int(rng.integers(0, keys))] = False
        return mask
    if kind == "rows":
        mask = rng.random(shape) < 0.7
        mask[..., int(rng.integers(0, queries)), :] = False
        return mask
    mask = rng.random(shape) < 0.6
    return broadcast_some(rng, mask) if kind == "broadcast" else mask


def settled(case: Case, wish: Wish, domain: Domain, rng: np.random.Generator) -> Case | None:
    """The case made to meet the wish about what rows see; None where that fails."""
    allowed = allowed_keys(case, domain.capabilities)
    if not wish.empty and not allowed.any(-1).all():
        case = opened(case, domain.capabilities)
        allowed = allowed_keys(case, domain.capabilities)
        if not allowed.any(-1).all():
            return None
    if wish.some_empty and allowed.any(-1).all():
        if case["mask"] is None:  # a triangle that starts at the top left leaves no row empty
            return None
        case = closed(case, rng)
    if wish.hidden and allowed.all():
        case = concealed(case, rng)
        allowed = allowed_keys(case, domain.capabilities)
        if allowed.all() or not (wish.empty or allowed.any(-1).all()):
            return None
    if wish.lonely and not (allowed.sum(-1) == 1).any():
        return secluded(case, allowed, rng)
    return case


def closed(case: Case, rng: np.random.Generator) -> Case:
    """The case with one row of its mask hidden entirely; its other queries keep what they see."""
    mask = np.repeat(case["mask"], case.size("Tq") // case["mask"].shape[2], 2)
    mask[tuple(int(rng.integers(0, n)) for n in mask.shape[:3])] = False
    return case.with_arrays(mask=mask)


def concealed(case: Case, rng: np.random.Generator) -> Case:
    """The case with something hidden: an entry of its mask, else all but the nearest of the past keys."""
    if case["mask"] is None:
        return case.with_keywords(window=(0, None)) if case["window"] is not None else case
    mask = np.repeat(case["mask"], case.size("Tk"), 3) if case["mask"].shape[3] == 1 else case["mask"].copy()
    mask[tuple(int(rng.integers(0, n)) for n in mask.shape)] = False
    return case.with_arrays(mask=mask)


def secluded(case: Case, allowed: np.ndarray, rng: np.random.Generator) -> Case:
    """The case with one row that sees a single key: by its mask, else because there is no other key."""
    if case["mask"] is None:
        return with_kept(with_kept(case, "Tk", np.arange(1)), "Tq", np.arange(1))
    mask = np.broadcast_to(case["mask"], allowed.shape).copy()
    row = tuple(int(rng.integers(0, n)) for n in allowed.shape[:3])
    mask[row] = np.arange(allowed.shape[3]) == rng.choice(np.flatnonzero(allowed[row]))
    return case.with_arrays(mask=mask)


def opened(case: Case, capabilities: Capabilities) -> Case:
    """Each row's mask opened at one key that causal and window let it see; the window is dropped if it must."""
    if case["window"] is not None:
        bare = allowed_keys(case.with_arrays(mask=None), capabilities)
        if not bare.any(-1).all():
            case = case.with_keywords(window=None)
    if case["mask"] is None:
        return case
    offset = query_offset(case, capabilities)
    positions = np.clip(np.arange(case.size("Tq")) + offset, 0, case.size("Tk") - 1)
    mask = case["mask"].copy()
    rows = mask.shape[2]
    if rows == 1 and (case["causal"] or case["window"] is not None):
        mask = np.repeat(mask, case.size("Tq"), 2)
        rows = case.size("Tq")
    mask[..., np.arange(rows), positions[:rows]] = True
    return case.with_arrays(mask=mask)
