"""Recipes for attention: one table of shapes, one draw of flags, then families fill the arrays."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from veriformer.case import Case
from veriformer.law import Domain, Recipe, choice
from veriformer.properties.attention_build import FILLS, MASKS, Plan, Wish, build

SHAPES = (
    # B, G, R, Tq, Tk, D, Dv: hardly any two axes alike, both Tq < Tk and Tq > Tk, R and G at least 2 together
    (1, 1, 1, 1, 1, 1, 1), (1, 1, 1, 1, 2, 1, 1), (1, 1, 1, 2, 2, 1, 1), (1, 1, 1, 2, 3, 1, 2),
    (1, 1, 1, 3, 2, 1, 2), (2, 1, 1, 1, 3, 2, 1), (1, 2, 1, 2, 3, 1, 1), (1, 1, 2, 1, 4, 2, 3),
    (1, 2, 2, 1, 3, 2, 1), (2, 1, 2, 3, 1, 2, 4), (1, 1, 1, 5, 5, 2, 3), (1, 2, 3, 2, 5, 3, 4),
    (2, 2, 1, 5, 3, 4, 2), (2, 1, 3, 4, 7, 5, 2), (3, 2, 1, 4, 5, 3, 2), (1, 3, 2, 5, 7, 4, 3),
    (2, 2, 2, 6, 3, 5, 4), (2, 3, 1, 3, 8, 5, 10), (1, 2, 2, 9, 9, 8, 5), (2, 2, 2, 4, 9, 3, 5),
    (1, 1, 1, 1, 17, 8, 3), (1, 1, 2, 3, 33, 5, 4), (1, 1, 1, 12, 10, 16, 6), (1, 2, 1, 17, 13, 10, 3),
    (1, 1, 1, 5, 38, 32, 8), (1, 1, 1, 33, 34, 3, 2), (4, 1, 1, 2, 3, 80, 5), (1, 1, 1, 2, 130, 4, 3),
)  # fmt: skip
"""Sizes of the axes, small to large."""

FLAGS = ("causal", "mask", "bias", "scale", "window", "softcap", "sink")
"""What a case may have beside query, key and value."""

PICKS = choice(*range(16))
"""A number with which a law draws what it changes, by `case.random(pick)`."""

SEEDS = 2**14
"""How many different arrays one plan can have."""


def attention_cases(
    *,
    empty: bool = False,
    some_empty: bool = False,
    square: bool | None = None,
    grouped: bool | None = None,
    hidden: bool = False,
    lonely: bool = False,
    families: Sequence[str] = FILLS,
    least: dict[str, int] | None = None,
    layouts: Sequence[str] = ("contiguous",),
    scales: Sequence[float] = Wish.scales,
    examples: int = 6,
    **flags: bool,
) -> Recipe:
    """Cases of attention.

    flags: causal, mask, bias, scale, window, softcap, sink; True always, False never, absent drawn.
    empty: rows that may attend to nothing are admitted; some_empty: there is such a row. square:
    Tq = Tk (True), Tq != Tk (False). grouped: G < H (True), G = H (False). hidden: some key is
    hidden from some row. lonely: some row sees a single key. least: smallest sizes by axis. scales:
    drawn where scale is given. examples: at most so many pinned cases.
    """
    sizes = {"Tk": 2} | (least or {}) if hidden else least or {}
    wish = Wish(
        flags=tuple(sorted(flags.items())),
        empty=empty or some_empty,
        some_empty=some_empty,
        square=square,
        grouped=grouped,
        hidden=hidden,
        lonely=lonely,
        families=tuple(families),
        least=tuple(sorted(sizes.items())),
        layouts=tuple(layouts),
        scales=tuple(scales),
    )

    return Recipe(lambda domain: pinned_cases(domain, wish, examples), lambda domain: drawn_cases(domain, wish))


def shapes_for(domain: Domain, wish: Wish) -> list[tuple[int, ...]]:
    """The table's rows, and rows around declared blocks, that the domain and the wish admit."""
    caps = domain.capabilities
    rows = list(SHAPES)
    for block in caps.blocks:
        for length in (block - 1, block, block + 1, 2 * block + 1):
            rows += [(1, 1, 1, 2, length, 3, 2), (1, 1, 1, length, 3, 2, 1), (1, 2, 2, 3, length, 2, 1)]
    if caps.widths:
        rows = [(*row[:5], caps.widths[i % len(caps.widths)], row[6]) for i, row in enumerate(rows)]
    if caps.value_width == "equal":
        rows = [(*row[:6], row[5]) for row in rows]
    if not caps.grouped_heads:
        rows = [(row[0], row[1] * row[2], 1, *row[3:]) for row in rows]
    if wish.square is True or caps.causal_alignment == "square" and dict(wish.flags).get("causal"):
        rows = [(*row[:4], row[3], *row[5:]) for row in rows]
    fitting = [row for row in dict.fromkeys(rows) if fits(row, wish) and min(row) > 0]
    fitting.sort(key=lambda row: int(np.prod(row)))
    return fitting[:12] if caps.compiles_per_shape else fitting


def fits(row: tuple[int, ...], wish: Wish) -> bool:
    """Whether a row of the table meets the wish."""
    sizes = dict(zip(("B", "G", "R", "Tq", "Tk", "D", "Dv"), row, strict=True))
    sizes["H"] = sizes["G"] * sizes["R"]
    if any(sizes[axis] < n for axis, n in wish.least):
        return False
    if wish.square is False and sizes["Tq"] == sizes["Tk"]:
        return False
    return wish.grouped is None or wish.grouped == (sizes["R"] > 1)


def flags_for(domain: Domain, wish: Wish) -> list[tuple[str, ...]]:
    """Every combination of flags that the domain and the wish admit, few flags first."""
    fixed = dict(wish.flags)
    options = [
        (False,) if fixed.get(flag) is False or flag not in domain.accepts
        else (True,) if fixed.get(flag) else (False, True)
        for flag in FLAGS
    ]  # fmt: skip
    combinations = [tuple(f for f, on in zip(FLAGS, row, strict=True) if on) for row in itertools.product(*options)]
    caps = domain.capabilities
    kept = [c for c in combinations if compatible(c, caps.causal_with_mask, caps.mask_with_bias)]
    if wish.hidden:
        kept = [c for c in kept if {"causal", "mask", "window"} & set(c)]
    if wish.some_empty:
        kept = [c for c in kept if "mask" in c or "causal" in c and domain.triangle_empties_rows]
    return sorted(kept, key=len)


def compatible(flags: Sequence[str], causal_with_mask: bool, mask_with_bias: bool) -> bool:
    """Whether the declared restrictions admit these flags together."""
    if not causal_with_mask and "causal" in flags and ("mask" in flags or "bias" in flags):
        return False
    return mask_with_bias or not ("mask" in flags and "bias" in flags)


def pinned_cases(domain: Domain, wish: Wish, count: int) -> list[Case]:
    """Cases small to large: every single flag on a small shape, then richer ones on larger shapes."""
    shapes, flags, layouts = shapes_for(domain, wish), flags_for(domain, wish), domain.admitted(wish.layouts)
    if not shapes or not flags:
        return []
    cases: dict[object, Case] = {}
    steps = max(count, 1)
    for i in range(3 * steps):
        if len(cases) == steps:
            break
        shape = shapes[min(i * len(shapes) // (2 * steps), len(shapes) - 1)]
        families = tuple(wish.families[(i + j) % len(wish.families)] for j in range(3))
        plan = Plan(
            shape,
            flags[i % len(flags)] if i < len(flags) else flags[(7 * i) % len(flags)],
            families,
            MASKS[i % len(MASKS)],
            i,
            layouts[i % len(layouts)],
        )
        case = build(domain, wish, plan)
        if case is not None:
            cases.setdefault(content(case), case)
    return list(cases.values())


def content(case: Case) -> object:
    """What makes two cases the same."""
    arrays = ((name, array.shape, array.tobytes()) for name, array in case.arrays.items())
    return tuple(case.keywords.items()), case.layout, tuple(arrays)


def drawn_cases(domain: Domain, wish: Wish) -> st.SearchStrategy[Case]:
    """One draw from the table, one from the flags, then families and a seed."""
    shapes, flags = shapes_for(domain, wish), flags_for(domain, wish)
    if not shapes or not flags:
        return st.nothing()
    # Two integers rather than one per choice: each draw has its cost. Hypothesis draws uniformly below 2**24.
    layouts = domain.admitted(wish.layouts)
    structure = len(shapes) * len(flags) * len(MASKS) * len(layouts)
    parts = st.tuples(st.integers(0, structure - 1), st.integers(0, len(wish.families) ** 3 * SEEDS - 1))
    return parts.map(lambda draw: build(domain, wish, planned(shapes, flags, layouts, wish, draw))).filter(
        lambda case: case is not None
    )  # type: ignore[return-value]


def planned(
    shapes: Sequence[Any], flags: Sequence[Any], layouts: Sequence[str], wish: Wish, draw: tuple[int, int]
) -> Plan:
    """The plan that two integers stand for."""
    rest, shape = divmod(draw[0], len(shapes))
    rest, flag = divmod(rest, len(flags))
    layout, mask = divmod(rest, len(MASKS))
    families, seed = divmod(draw[1], SEEDS)
    picks = tuple(wish.families[families // len(wish.families) ** i % len(wish.families)] for i in range(3))
    return Plan(shapes[shape], flags[flag], picks, MASKS[mask], seed, layouts[layout])  # type: ignore[arg-type]
