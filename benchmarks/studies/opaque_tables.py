"""The tables of `benchmarks/studies/opaque.py`, and the constants that its measurements ask for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from opaque_cases import MISTAKES, SCENARIOS

from veriformer.budgets.opaque import NOISE, UNITS

GROUPS = ("float64", "float64, float32 inside", "float32", "bfloat16", "float16")
FACTORS = (0, 1, 2, 4, 8, 16)
HEADROOM = 3
"""A correct model may use one part in this many of its allowance."""


def tables(right: Sequence[Any], bad: Sequence[Any]) -> tuple[list[str], bool]:
    """All tables, and whether every correct model keeps its headroom."""
    good = [m for m in right if np.isfinite(m.apart)]
    kept = max(used(m) for m in good) <= 1 / HEADROOM
    parts = (chosen(good), detected(bad), apart(good), together(good), needed(good, bad), sizes(bad))
    return [line for part in parts for line in part] + not_finite(right), kept


def table(title: str, words: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """A titled Markdown table."""
    lines = [f"| {' | '.join(map(str, row))} |" for row in (header, ["---"] * len(header), *rows)]
    return [f"## {title}", "", words, "", *lines, ""]


def unit_of(group: str) -> str:
    """The dtype whose unit roundoff counts: the coarsest that the model computes in."""
    return group.split(", ")[-1].removesuffix(" inside")


def allowance(measured: Any) -> float:
    """What `opaque_allowance` allows, in units of u max|logit|."""
    return max(UNITS[unit_of(measured.group)], NOISE * noise(measured))


def noise(measured: Any) -> float:
    return float(max(measured.rows, measured.prefixes))


def used(measured: Any) -> float:
    return float(measured.apart / allowance(measured))


def chosen(good: Sequence[Any]) -> list[str]:
    """The constants in force, and how much of the allowance correct models use."""
    rows = [
        [
            group,
            f"{UNITS[unit_of(group)]:g}",
            f"{NOISE:g}",
            len(mine),
            quantiles([used(m) for m in mine], (0.5, 0.99, 1)),
        ]
        for group, mine in grouped(good)
    ]
    words = (
        f"allowance = max(units u max\\|logit\\|, factor × noise). Used: median / 99 % / most; at most 1/{HEADROOM}."
    )
    return table("The constants in force", words, ["dtype", "units", "factor", "comparisons", "used"], rows)


def detected(bad: Sequence[Any]) -> list[str]:
    """Which mistakes exceed the allowance."""

    def cell(what: str, group: str) -> str:
        mine = [m for m in bad if m.what == what and m.group == group]
        models = {m.model for m in mine}
        shares = [np.mean([used(m) > 1 for m in mine if m.model == model]) for model in models]
        return f"{100 * np.mean([used(m) > 1 for m in mine]):.0f} % / {100 * min(shares):.0f} %" if mine else ""

    rows = [[what, *(cell(what, group) for group in GROUPS)] for what in MISTAKES]
    words = "Share of the cases in which the mistake has an effect: of all / of the model where it is least."
    return table("Which mistakes exceed the allowance", words, ["mistake", *GROUPS], rows)


def apart(good: Sequence[Any]) -> list[str]:
    """Noise and differences of each model."""
    header = ["model", "dtype", "noise of rows", "of prefixes", *SCENARIOS, "difference / noise"]
    rows = []
    for model in dict.fromkeys(m.model for m in good):
        for group, mine in grouped([m for m in good if m.model == model]):
            ratios = [m.apart / noise(m) for m in mine if noise(m)]
            parts = [[m.apart for m in mine if m.what == what] for what in SCENARIOS]
            noises = [[m.rows for m in mine], [m.prefixes for m in mine]]
            rows.append([model, group, *(quantiles(values, (0.5, 1)) for values in (*noises, *parts, ratios))])
    words = (
        "Median / largest, in u max\\|logit\\|, u of the coarsest dtype that the model computes in. Noise without the "
        "cache: rows alone, in another order, among others; prefixes against the whole. Difference / noise where "
        "there is noise. Empty: the model refuses."
    )
    return table("Correct models", words, header, rows)


def together(good: Sequence[Any]) -> list[str]:
    """Quantiles over all models, by the largest logit of all and of each position."""
    header = ["dtype", "no noise of rows", "of prefixes", "by the largest of all", "by the largest of the position"]
    rows = []
    for group, mine in grouped(good):
        zeros = [np.mean([getattr(m, name) == 0 for m in mine]) for name in ("rows", "prefixes")]
        cells = [quantiles([getattr(m, name) for m in mine], (0.5, 0.9, 0.99, 1)) for name in ("apart", "by_row")]
        rows.append([group, *(f"{100 * share:.0f} %" for share in zeros), *cells])
    words = (
        "Differences: median / 90 % / 99 % / largest, measured by the largest logit of all, or of the same position."
    )
    return table("All correct models together", words, header, rows)


def needed(good: Sequence[Any], bad: Sequence[Any]) -> list[str]:
    """Units that each factor of the noise needs beside it, and the mistakes that are then detected."""
    header = ["dtype", "noise", *(f"{factor} × noise" for factor in FACTORS)]
    rows = []
    for group, mine in grouped(good):
        mistakes = [m for m in bad if m.group == group and not MISTAKES[m.what].rounds]
        kinds = {"rows": lambda m: m.rows, "prefixes": lambda m: m.prefixes, "both": noise}
        for kind, size in kinds.items():
            cells = []
            for factor in FACTORS:
                wanted = [HEADROOM * m.apart for m in mine if HEADROOM * m.apart > factor * size(m)]
                units = max(wanted, default=0.0)
                cells.append(share(units, [m.apart > max(units, factor * size(m)) for m in mistakes]))
            rows.append([group, kind, *cells])
        units = HEADROOM * max(m.by_row for m in mine)
        rows.append([group, "none, by position", share(units, [m.by_row > units for m in mistakes]), *[""] * 5])
    words = (
        f"Units for correct models to use at most 1/{HEADROOM}, and the share of all mistakes' cases that is then "
        "detected, mistakes of precision apart. By position: each measured by its own largest logit."
    )
    return table("Which constants the correct models need", words, header, rows)


def share(units: float, found: Sequence[bool]) -> str:
    return f"{units:.2g}: {100 * np.mean(found):.1f} %" if found else f"{units:.2g}"


def sizes(bad: Sequence[Any]) -> list[str]:
    """How large mistakes are."""
    rows = [
        [
            what,
            *(
                quantiles([m.apart for m in bad if (m.what, m.group) == (what, group)], (0, 0.1, 0.5))
                for group in GROUPS
            ),
        ]
        for what in MISTAKES
    ]
    words = "Smallest / 10 % / median, in the same units, of the cases in which the mistake has an effect."
    return table("How large mistakes are", words, ["mistake", *GROUPS], rows)


def not_finite(right: Sequence[Any]) -> list[str]:
    """Where a model that should be correct gives NaN at real tokens."""
    places = dict.fromkeys((m.model, m.group, m.what) for m in right if not np.isfinite(m.apart))
    rows = []
    for place in places:
        mine = [np.isfinite(m.apart) for m in right if (m.model, m.group, m.what) == place]
        rows.append([*place, f"{mine.count(False)} of {len(mine)}"])
    words = "Logits of real tokens that are not finite, although `full` is; left out above."
    return table("Not finite", words, ["model", "dtype", "scenario", "comparisons"], rows) if rows else []


def grouped(measured: Sequence[Any]) -> list[tuple[str, list[Any]]]:
    pairs = [(group, [m for m in measured if m.group == group]) for group in GROUPS]
    return [(group, mine) for group, mine in pairs if mine]


def quantiles(values: Sequence[float], at: Sequence[float]) -> str:
    return " / ".join(f"{value:.2g}" for value in np.quantile(values, at)) if len(values) else ""
