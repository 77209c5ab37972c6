"""Recipes for the Universal Transformer: a table of sizes, one draw of flags, value families."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from veriformer.case import Case
from veriformer.declarations import PRESETS
from veriformer.law import Domain, Recipe
from veriformer.properties.attention_family_build import Flags
from veriformer.properties.attention_family_cases import PLAIN, admits, combined, edges, recipe
from veriformer.properties.layer_build import Sizes
from veriformer.properties.layer_cases import FILLS, NAMES, fitted
from veriformer.properties.universal_build import Wish, means_of, universal_case

UNIVERSAL = (
    # B, G, R, T, S, D, Dv, d, f, M
    (1, 1, 1, 1, 1, 1, 1, 3, 1, 1), (1, 1, 1, 1, 2, 1, 1, 3, 1, 2), (1, 1, 1, 2, 1, 1, 1, 3, 2, 2),
    (1, 1, 1, 2, 2, 2, 1, 3, 2, 3), (2, 1, 1, 2, 1, 1, 2, 3, 2, 2), (1, 2, 1, 3, 2, 1, 1, 3, 2, 2),
    (1, 1, 2, 2, 3, 2, 1, 4, 3, 3), (2, 2, 1, 3, 2, 2, 1, 4, 3, 2), (1, 2, 1, 3, 4, 2, 3, 4, 5, 3),
    (2, 1, 2, 2, 3, 1, 2, 5, 3, 3), (2, 2, 1, 3, 2, 1, 2, 3, 4, 4), (3, 1, 1, 2, 3, 2, 1, 4, 2, 3),
    (1, 2, 2, 4, 3, 2, 1, 5, 4, 2), (2, 1, 1, 4, 2, 2, 2, 6, 5, 3), (1, 1, 1, 5, 4, 3, 2, 8, 6, 4),
    (1, 1, 1, 1, 1, 1, 1, 3, 2, 8), (1, 1, 1, 2, 1, 1, 1, 4, 2, 7),
)  # fmt: skip
"""Sizes, small to large but for two that leave room for many small halting probabilities; the last is max_steps."""
FLAG_NAMES = ("pre", "rms", "bare", "causal", "mask", "memory", "memory_mask")
"""What a case may have beside its tokens."""
NOT_GLOBAL = tuple(preset for preset in PRESETS if preset != "t2t_global")
"""Presets in which each position halts for itself."""
DEFAULT = ("default",)
LEAST = {"T": 2, "S": 2, "d": 3, "f": 2, "L": 2}
"""Below these sizes some weights decide nothing."""


def universal_cases(
    *,
    families: Sequence[str] = FILLS,
    layouts: Sequence[str] = ("contiguous",),
    examples: int = 6,
    pace: str = "mixed",
    hidden: bool = False,
    hidden_memory: bool = False,
    presets: Sequence[str] = PRESETS,
    least: dict[str, int] | None = None,
    most: dict[str, int] | None = None,
    grouped: bool | None = None,
    **flags: bool,
) -> Recipe:
    """Cases of universal_transformer; a memory makes them causal, as a decoder is.

    flags: pre (norm="pre", else "post"), rms (norms without a bias), bare (biases missing), causal, mask, memory,
    memory_mask, True always, False never, absent drawn where the operation has them. pace: how positions halt,
    "mixed", "none" before the last step, or "even", all alike. hidden: some token is padding. hidden_memory: some row
    of memory is. presets: those that the law speaks of, as far as they are declared. least, most: sizes by axis, L
    for max_steps. grouped: G < H (True), G = H (False).
    """
    wish = Wish(pace, hidden, hidden_memory, tuple(presets))
    smallest = {**({"T": 2} if hidden else {}), **({"S": 2} if hidden_memory else {}), **(least or {})}
    asked = {
        **flags,
        **({"mask": True} if hidden else {}),
        **({"memory": True, "memory_mask": True} if hidden_memory else {}),
    }
    asked |= {"bare": False} if pace != "mixed" else {}

    def shapes(domain: Domain) -> list[Sizes]:
        rows = table(domain, smallest, most or {}, grouped)
        return rows if set(presets) & set(domain.capabilities.presets) else []

    def words(domain: Domain) -> list[Flags]:
        return options(domain, asked)

    def build(domain: Domain, row: Sizes, flags: Flags, fills: Sequence[str], seed: int) -> Case | None:
        return universal_case(means_of(domain), wish, row, flags, tuple(fills), seed)

    return recipe(shapes, words, build, families, layouts, examples, spread=1)


def table(domain: Domain, least: dict[str, int], most: dict[str, int], grouped: bool | None) -> list[Sizes]:
    """The sizes that the domain and a law admit, small to large; a norm leaves nothing of one or two channels."""
    rows = [*UNIVERSAL, *((1, 2, 1, n, n + 1, 2, 2, 4, 3, 2) for n in edges(domain))]
    found = []
    for row in rows:
        fit = fitted(domain, Sizes(*row), ())
        sizes = dict(zip(NAMES, fit or (), strict=False))
        if fit is not None and fit.model > 2 and admits(sizes, least, grouped) and not exceeds(sizes, most):
            found.append(fit)
    found.sort(key=lambda row: row.layers * int(np.prod(row[:9])) ** 0.5)
    return found[:12] if domain.capabilities.compiles_per_shape else found


def exceeds(sizes: dict[str, int], most: dict[str, int]) -> bool:
    """Whether some axis is too long."""
    return any(sizes[axis] > n for axis, n in most.items())


def options(domain: Domain, wishes: dict[str, bool]) -> list[Flags]:
    """Combinations of flags, plain ones first, then such that neighbours have little in common."""
    capabilities = domain.capabilities
    barred = {"rms": not capabilities.rms_norms, "pre": not capabilities.pre_norm}
    barred |= {"bare": not capabilities.biases and not wishes.get("bare")}
    if not capabilities.post_norm:
        wishes = {**wishes, "pre": True}
    if any(wishes.get(name) and off for name, off in barred.items()):
        return []
    found = combined(FLAG_NAMES, {**wishes, **{name: False for name, off in barred.items() if off}}, domain)
    found = [f for f in found if fits(set(f)) and (capabilities.causal_with_mask or not {"causal", "mask"} <= set(f))]
    return [found[i] for i in sorted(range(len(found)), key=lambda i: i * 0.6180339887 % 1)]


def fits(flags: set[str]) -> bool:
    """Whether these flags go together: a memory_mask needs a memory, a memory makes causal."""
    return ("memory_mask" not in flags or "memory" in flags) and ("memory" not in flags or "causal" in flags)


def plain_universal(domain: Domain) -> list[Case]:
    """Two and three tokens of normal values, as many key heads as query heads, d = H D, the usual keywords."""
    rows = [(1, 1, 1, 2, 2, 4, 4, 4, 6, 2), (2, 2, 1, 3, 2, 4, 4, 8, 8, 3)]
    flags = () if domain.capabilities.post_norm else ("pre",)
    wish = Wish(presets=tuple(domain.capabilities.presets[:1]))
    built = []
    for i, row in enumerate(rows):
        sizes = fitted(domain, Sizes(*row), ())
        built.append(sizes and universal_case(means_of(domain), wish, sizes, flags, PLAIN[1:2] * 2, 10 * i))
    return [case for case in built if case is not None]
