"""Recipes for multi-head, packed and cached attention: a table of sizes, one draw of flags, families for the values."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from veriformer.case import Case
from veriformer.law import Domain, Recipe
from veriformer.properties.attention_build import Wish
from veriformer.properties.attention_family_build import Flags, Sizes, cached_case, heads_case, packed_case

FILLS = ("integers", "normal", "one_hot", "constant", "large_mean", "sparse", "ladder", "halves")
"""Families of values for tokens, queries, keys and values."""
PLAIN = ("integers", "normal", "one_hot", "halves")
"""Those whose numbers are small."""

Build = Callable[[Domain, Sizes, Flags, Sequence[str], int], Case | None]

HEADS = (
    # B, G, R, Tq, Tk, D, Dv, d
    (1, 1, 1, 1, 1, 1, 1, 1), (1, 1, 1, 1, 2, 1, 1, 1), (1, 1, 1, 2, 2, 1, 1, 2), (1, 2, 1, 1, 2, 1, 1, 2),
    (1, 1, 1, 2, 3, 2, 1, 3), (1, 2, 1, 2, 3, 2, 2, 3), (2, 1, 1, 1, 3, 1, 2, 2), (1, 1, 2, 2, 3, 1, 2, 2),
    (1, 2, 2, 1, 3, 2, 1, 3), (2, 2, 1, 3, 2, 2, 3, 4), (2, 1, 2, 3, 3, 2, 1, 5), (1, 2, 3, 2, 5, 1, 2, 4),
    (1, 3, 2, 4, 3, 2, 1, 3), (2, 2, 2, 3, 4, 3, 2, 6), (3, 2, 1, 4, 4, 2, 2, 4), (2, 3, 1, 5, 7, 2, 4, 6),
    (1, 2, 1, 7, 5, 5, 3, 8), (2, 1, 4, 4, 4, 3, 5, 7), (1, 4, 1, 8, 8, 4, 4, 16), (1, 2, 2, 9, 12, 8, 4, 10),
    (1, 1, 1, 2, 33, 4, 2, 5), (2, 2, 1, 17, 17, 3, 3, 6),
)  # fmt: skip
"""Sizes of multi-head attention, small to large."""

PACKED = (
    # (Tq, Tk) of each sequence; then G, R, D, Dv
    (((1, 1),), (1, 1, 1, 1)), (((1, 2), (1, 1)), (1, 1, 1, 1)), (((2, 2), (1, 2)), (1, 1, 2, 1)),
    (((1, 3), (2, 2)), (2, 1, 1, 2)), (((2, 3), (2, 1), (1, 2)), (1, 2, 2, 1)), (((3, 3), (1, 1)), (2, 2, 1, 2)),
    (((2, 4), (3, 1)), (2, 1, 3, 2)), (((1, 5), (4, 4), (2, 3)), (2, 3, 2, 3)), (((5, 2), (2, 5)), (3, 2, 4, 1)),
    (((1, 1), (1, 1), (1, 1), (2, 2)), (1, 1, 3, 4)), (((4, 7), (7, 4)), (2, 2, 3, 5)),
    (((6, 6), (3, 8)), (1, 4, 5, 3)), (((1, 9), (1, 5), (1, 12)), (2, 2, 8, 4)),
    (((9, 9), (2, 4), (5, 5)), (2, 1, 4, 6)), (((2, 33), (17, 17)), (1, 2, 4, 3)),
)  # fmt: skip
"""Packed sequences, small to large; hardly two of the same length."""

CACHED = (
    # B, G, R, m, C, D, Dv
    (1, 1, 1, 1, 1, 1, 1), (1, 1, 1, 1, 2, 1, 1), (1, 1, 1, 2, 3, 1, 1), (2, 1, 1, 1, 3, 2, 1), (1, 2, 1, 1, 4, 1, 2),
    (1, 1, 2, 2, 4, 2, 1), (2, 1, 1, 2, 5, 1, 2), (2, 2, 2, 1, 3, 2, 3), (1, 2, 3, 3, 6, 1, 2), (3, 1, 2, 2, 6, 2, 3),
    (2, 2, 1, 4, 8, 3, 2), (2, 1, 3, 5, 7, 2, 4), (3, 2, 2, 3, 8, 4, 2), (1, 1, 1, 1, 17, 4, 3), (2, 2, 2, 6, 12, 3, 5),
    (4, 1, 1, 2, 9, 2, 2), (1, 2, 1, 9, 20, 5, 4), (2, 1, 2, 3, 33, 4, 3),
)  # fmt: skip
"""Sizes of cached attention, small to large."""


def multi_head_attention_cases(
    *,
    families: Sequence[str] = FILLS,
    layouts: Sequence[str] = ("contiguous",),
    examples: int = 10,
    empty: bool = False,
    some_empty: bool = False,
    hidden: bool = False,
    least: dict[str, int] | None = None,
    grouped: bool | None = None,
    **flags: bool,
) -> Recipe:
    """Cases of multi_head_attention.

    flags: causal, mask, alone (memory is x), bare (no bias), True always, False never, absent drawn.
    empty: rows that may see nothing are admitted; some_empty: there is one. hidden: some key is hidden
    from some row. least: smallest sizes by axis. grouped: G < H (True), G = H (False). With
    value_width="equal" there is one width: d = H D = H Dv.
    """
    sizes = {"Tk": 2} | (least or {}) if hidden else least or {}
    wish = Wish(empty=empty or some_empty, some_empty=some_empty, hidden=hidden, least=tuple(sorted(sizes.items())))

    def shapes(domain: Domain) -> list[Sizes]:
        rows = list(HEADS) + [(1, 2, 1, 2, n, 2, 2, 4) for n in edges(domain)]
        return fitting([one_width(row, domain) for row in rows], sizes, grouped, domain)

    def words(domain: Domain) -> list[Flags]:
        found = [f for f in combined(("causal", "mask", "alone", "bare"), flags, domain) if not hidden or hides(f)]
        if not domain.capabilities.causal_with_mask:
            found = [f for f in found if not {"causal", "mask"} <= set(f)]
        if not some_empty:
            return found
        triangle = domain.triangle_empties_rows
        return [f for f in found if "mask" in f or triangle and "causal" in f and "alone" not in f]

    def build(domain: Domain, row: Sizes, flags: Flags, fills: Sequence[str], seed: int) -> Case | None:
        return heads_case(domain, wish, row, flags, fills, seed)

    return recipe(shapes, words, build, families, layouts, examples)


def varlen_attention_cases(
    *,
    families: Sequence[str] = FILLS,
    layouts: Sequence[str] = ("contiguous",),
    examples: int = 10,
    empty: bool = False,
    least: int = 1,
    vacant: bool | None = None,
    grouped: bool | None = None,
    **flags: bool,
) -> Recipe:
    """Cases of varlen_attention.

    flags: causal, scale, window, True always, False never, absent drawn. empty: rows that may see
    nothing are admitted. least: the smallest number of sequences. vacant: sequences without rows
    (True: always some; absent: now and then), where zero_lengths is declared.
    """

    def shapes(domain: Domain) -> list[Any]:
        rows = list(PACKED) + [(((2, n), (n, 2)), (1, 1, 2, 2)) for n in edges(domain)]
        rows = [(lengths, narrowed(sizes, domain)) for lengths, sizes in rows if len(lengths) >= least]
        found = [(lengths, sizes) for lengths, sizes in rows if grouped is None or grouped == (sizes[1] > 1)]
        found.sort(key=lambda row: sum(map(sum, row[0])) * int(np.prod(row[1])))
        return found[:12] if domain.capabilities.compiles_per_shape else found

    def words(domain: Domain) -> list[Flags]:
        found = combined(("causal", "scale", "window", "vacant"), {**flags, "vacant": vacant}, domain)
        return found if domain.capabilities.zero_lengths else [f for f in found if "vacant" not in f]

    def build(domain: Domain, row: Any, flags: Flags, fills: Sequence[str], seed: int) -> Case | None:
        zeros = domain.capabilities.empty_row == "zeros"  # of other values this operation has no budget
        return packed_case(domain, row, flags, fills, seed, zeros and (empty or "vacant" in flags))

    return recipe(shapes, words, build, families, layouts, examples)


def cached_attention_cases(
    *,
    families: Sequence[str] = FILLS,
    layouts: Sequence[str] = ("contiguous",),
    examples: int = 10,
    least: dict[str, int] | None = None,
    grouped: bool | None = None,
    room: int = 0,
    filled: bool = False,
    **flags: bool,
) -> Recipe:
    """Cases of cached_attention, whose rows that are not valid hold numbers up to 1e4.

    flags: all (causal=False), scale, window, paged, True always, False never, absent drawn. room: rows
    left free behind the new ones. filled: every batch row has a valid row before the call. Lengths
    differ by batch row; 0 and C - m are among them.
    """

    def shapes(domain: Domain) -> list[Sizes]:
        rows = list(CACHED) + [(2, 1, 1, 2, n + 2, 2, 2) for n in edges(domain)]
        rows = [(*row[:4], max(row[4], row[3] + room + filled), *row[5:]) for row in rows]
        rows = [(row[0], *narrowed(row[1:3], domain), *row[3:5], *narrowed_widths(row[5:], domain)) for row in rows]
        names = ("B", "G", "R", "m", "C", "D", "Dv")
        fit = [row for row in dict.fromkeys(rows) if admits(dict(zip(names, row, strict=True)), least or {}, grouped)]
        fit.sort(key=lambda row: int(np.prod(row)))
        return fit[:12] if domain.capabilities.compiles_per_shape else fit

    def words(domain: Domain) -> list[Flags]:
        return combined(("all", "scale", "window", "paged"), flags, domain)

    def build(domain: Domain, row: Sizes, flags: Flags, fills: Sequence[str], seed: int) -> Case | None:
        return cached_case(domain, row, flags, fills, seed, room, filled)

    return recipe(shapes, words, build, families, layouts, examples)


def plain_multi_head_attention(domain: Domain) -> list[Case]:
    """Self-attention of normal values, as many key heads as query heads, d = H D."""
    rows = [(1, 1, 1, 3, 3, 4, 4, 4), (2, 2, 1, 4, 4, 4, 4, 8), (2, 4, 1, 6, 6, 4, 4, 16)]
    built = [
        heads_case(domain, Wish(), one_width(row, domain), ("alone",), ["normal"] * 2, 10 * i, ("normal",))
        for i, row in enumerate(rows)
    ]
    return [case for case in built if case is not None]


def plain_varlen_attention(domain: Domain) -> list[Case]:
    """Two and three sequences of normal values, as many keys as queries, all heads alike."""
    rows = [((3, 2), (1, 1, 8, 8)), ((4, 1, 6), (2, 1, 8, 8)), ((5, 8), (4, 1, 16, 16))]
    built = [
        packed_case(domain, ([(n, n) for n in lengths], narrowed(sizes, domain)), (), ["normal"] * 3, 10 * i, False)
        for i, (lengths, sizes) in enumerate(rows)
    ]
    return [case for case in built if case is not None]


def plain_cached_attention(domain: Domain) -> list[Case]:
    """One or two new rows of normal values beside a few cached ones."""
    rows = [(1, 1, 1, 1, 4, 8, 8), (2, 2, 1, 2, 8, 8, 8), (2, 4, 1, 1, 12, 16, 16)]
    rows = [(*row[:5], *narrowed_widths(row[5:], domain)) for row in rows]
    built = [cached_case(domain, row, (), ["normal"] * 3, 10 * i, 1, True) for i, row in enumerate(rows)]
    return [case for case in built if case is not None]


def one_width(row: Sizes, domain: Domain) -> Sizes:
    """Sizes of multi-head attention as far as the declared restrictions admit them."""
    batch, groups, repeats, queries, keys, *widths, model = row
    groups, repeats = narrowed((groups, repeats), domain)
    width, value_width = narrowed_widths(tuple(widths), domain)
    if domain.capabilities.value_width == "equal":
        model = groups * repeats * width
    return (batch, groups, repeats, queries, keys, width, value_width, model)


def narrowed(sizes: Sizes, domain: Domain) -> Sizes:
    """G, R and, if given, D, Dv under the declared restrictions."""
    groups, repeats, *widths = sizes
    heads = (groups, repeats) if domain.capabilities.grouped_heads else (groups * repeats, 1)
    return (*heads, *narrowed_widths(tuple(widths), domain)) if widths else heads


def narrowed_widths(widths: Sizes, domain: Domain) -> Sizes:
    """D and Dv under the declared restrictions."""
    width, value_width = widths
    if domain.capabilities.widths:
        width = min(domain.capabilities.widths, key=lambda w: abs(w - width))
    return width, (width if domain.capabilities.value_width == "equal" else value_width)


def fitting(rows: Iterable[Sizes], least: dict[str, int], grouped: bool | None, domain: Domain) -> list[Sizes]:
    """The rows of multi-head sizes that are large enough, small to large."""
    names = ("B", "G", "R", "Tq", "Tk", "D", "Dv", "d")
    found = [row for row in dict.fromkeys(rows) if admits(dict(zip(names, row, strict=True)), least, grouped)]
    found.sort(key=lambda row: int(np.prod(row)))
    return found[:12] if domain.capabilities.compiles_per_shape else found


def admits(sizes: dict[str, int], least: dict[str, int], grouped: bool | None) -> bool:
    """Whether sizes are at least as asked, and the heads grouped or not, as asked."""
    sizes = {**sizes, "H": sizes["G"] * sizes["R"]}
    return all(sizes[axis] >= n for axis, n in least.items()) and grouped in (None, sizes["R"] > 1)


def edges(domain: Domain) -> list[int]:
    """Lengths around the declared block sizes."""
    return [n for block in domain.capabilities.blocks for n in (block - 1, block, block + 1, 2 * block + 1) if n > 0]


def hides(flags: Flags) -> bool:
    """Whether some key can be hidden under these flags."""
    return bool({"causal", "mask"} & set(flags))


NEEDS = {
    "all": "causal", "paged": "block_table", "alone": "", "bare": "", "vacant": "", "pre": "norm", "rms": "",
    "rotary": "positions", "alibi": "positions", "final": "",
}  # fmt: skip
"""Flags that are not keywords by themselves -> the keyword they need, if any."""


def combined(names: Sequence[str], wishes: dict[str, bool | None], domain: Domain) -> list[Flags]:
    """Every combination of flags that the wishes and the domain admit, few flags first."""
    options = []
    for name in names:
        word, wish = NEEDS.get(name, name), wishes.get(name)
        possible = not word or word in domain.accepts
        options.append((False,) if wish is False or not possible else (True,) if wish else (False, True))
    rows = itertools.product(*options)
    return sorted((tuple(n for n, on in zip(names, row, strict=True) if on) for row in rows), key=len)


def recipe(
    shapes: Callable[[Domain], list[Any]],
    words: Callable[[Domain], list[Flags]],
    build: Build,
    families: Sequence[str],
    layouts: Sequence[str],
    examples: int,
    spread: int = 2,
) -> Recipe:
    """Pinned cases walk through sizes, flags and families together; the search draws two numbers.

    spread: after so many times the pinned cases the walk through sizes is over; more than 1 where many do not suit.
    """

    def made(domain: Domain, shape: Any, flags: Flags, picks: Sequence[str], seed: int, layout: str) -> Case | None:
        case = build(domain, shape, flags, picks, seed)
        return None if case is None else case.with_layout(layout)

    def pinned(domain: Domain) -> list[Case]:
        table, options, admitted = shapes(domain), words(domain), domain.admitted(layouts)
        found: list[Case] = []
        for i in range(3 * examples if table and options else 0):
            shape = table[min(i * len(table) // (spread * examples), len(table) - 1)]
            picks = [families[(i + j) % len(families)] for j in range(3)]
            case = made(domain, shape, options[i % len(options)], picks, i, admitted[i % len(admitted)])
            found += [] if case is None else [case]
            if len(found) == examples:
                break
        return found

    def search(domain: Domain) -> st.SearchStrategy[Case]:
        table, options, admitted = shapes(domain), words(domain), domain.admitted(layouts)
        if not table or not options:
            return st.nothing()

        def drawn(draw: tuple[int, int]) -> Case | None:
            rest, shape = divmod(draw[0], len(table))
            layout, flags = divmod(rest, len(options))
            pick, seed = divmod(draw[1], 2**14)
            picks = [families[pick // len(families) ** j % len(families)] for j in range(3)]
            return made(domain, table[shape], options[flags], picks, seed, admitted[layout])

        structure = len(table) * len(options) * len(admitted)
        parts = st.tuples(st.integers(0, structure - 1), st.integers(0, len(families) ** 3 * 2**14 - 1))
        return parts.map(drawn).filter(lambda case: case is not None)  # type: ignore[return-value]

    return Recipe(pinned, search)
