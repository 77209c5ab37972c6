"""Recipes for encoder and decoder layers and stacks of them: a table of sizes, one draw of flags, value families."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from veriformer.case import Case
from veriformer.law import Domain, Recipe
from veriformer.properties.attention_build import Wish
from veriformer.properties.attention_family_build import Flags
from veriformer.properties.attention_family_cases import PLAIN, admits, combined, edges, one_width, recipe
from veriformer.properties.layer_build import DECODERS, STACKS, Sizes, layer_case

LAYERED = ("encoder_layer", "decoder_layer", "encoder", "decoder")
"""The operations that these recipes are for."""
FILLS = ("integers", "normal", "one_hot", "halves", "sparse", "ladder")
"""Families of values for tokens and memory."""

LAYERS = (
    # B, G, R, T, S, D, Dv, d, f
    (1, 1, 1, 1, 1, 1, 1, 3, 1), (1, 1, 1, 2, 1, 1, 1, 3, 1), (1, 1, 1, 1, 2, 2, 1, 3, 2), (2, 1, 1, 2, 2, 1, 2, 3, 1),
    (1, 2, 1, 2, 3, 1, 1, 3, 2), (1, 1, 2, 3, 2, 2, 1, 3, 2), (2, 1, 1, 3, 2, 2, 1, 4, 3), (1, 2, 1, 2, 4, 2, 3, 4, 5),
    (2, 1, 2, 3, 2, 1, 2, 4, 3), (2, 2, 1, 3, 4, 1, 2, 3, 5), (1, 2, 2, 4, 3, 2, 1, 4, 5), (2, 1, 2, 2, 3, 3, 1, 5, 4),
    (3, 1, 1, 3, 3, 3, 2, 5, 4), (2, 1, 3, 4, 3, 2, 1, 4, 6), (1, 3, 1, 4, 5, 2, 2, 6, 5), (2, 2, 2, 3, 4, 2, 3, 5, 4),
    (2, 2, 1, 5, 3, 4, 2, 8, 6), (1, 2, 2, 6, 5, 3, 4, 7, 8),
)  # fmt: skip
"""Sizes of layers, small to large."""

NAMES = ("B", "G", "R", "T", "S", "D", "Dv", "d", "f", "L")
"""Letters of the sizes; L is the number of layers."""
FLAGS = ("pre", "alpha", "rms", "bare", "mask", "memory_mask", "window", "rotary", "alibi", "final")
"""What a case may have beside its tokens."""
APART = ({"pre", "alpha"}, {"rotary", "alibi"})
"""Flags of which a case has one at most; alpha decides nothing in pre-norm."""


def layer_cases(
    *,
    families: Sequence[str] = FILLS,
    layouts: Sequence[str] = ("contiguous",),
    examples: int = 7,
    hidden: bool = False,
    hidden_memory: bool = False,
    some_empty: bool = False,
    least: dict[str, int] | None = None,
    grouped: bool | None = None,
    **flags: bool,
) -> Recipe:
    """Cases of encoder_layer, decoder_layer, encoder or decoder, whichever the law is about.

    flags: pre (norm="pre", else "post"), alpha (not 1), rms (norms without a bias), bare (biases missing), mask,
    memory_mask, window, rotary, alibi, final (a norm after the stack), True always, False never, absent drawn
    where the operation has them. hidden: some token has no influence on some other, through all layers.
    hidden_memory: some row of memory has none on some token. some_empty: a head sees nothing at some token; else
    each sees something. least: smallest sizes by axis, L for layers. grouped: G < H (True), G = H (False).
    No norm divides by almost nothing, and numbers stay small enough for float16.
    """
    wish = Wish(empty=some_empty, some_empty=some_empty)
    smallest = {**({"T": 2} if hidden else {}), **({"S": 2} if hidden_memory else {}), **(least or {})}

    def shapes(domain: Domain) -> list[Sizes]:
        return table(domain, smallest, grouped)

    def words(domain: Domain) -> list[Flags]:
        asked = {**flags, **({"memory_mask": True} if hidden_memory else {})}
        return options(domain, asked, hidden)

    def build(domain: Domain, row: Sizes, flags: Flags, fills: Sequence[str], seed: int) -> Case | None:
        sizes = fitted(domain, row, flags)
        return None if sizes is None else layer_case(domain, wish, (hidden, hidden_memory), sizes, flags, fills, seed)

    return recipe(shapes, words, build, families, layouts, examples, spread=1)


def table(domain: Domain, least: dict[str, int], grouped: bool | None) -> list[Sizes]:
    """The sizes that the domain and a law admit, small to large; stacks have one layer or two.

    d = 2 is left out: a norm makes two channels 1 and -1 whatever they were, and its gradient is all rounding.
    """
    rows = [*LAYERS, *((1, 2, 1, n, n + 1, 2, 2, 4, 3) for n in edges(domain))]
    depths = (1, 2) if domain.operation in STACKS else (1,)
    found = [Sizes(*row, n) for row in rows for n in depths if (fit := fitted(domain, Sizes(*row, n), ())) is not None
             and fit.model != 2 and admits(dict(zip(NAMES, fit, strict=True)), least, grouped)]  # fmt: skip
    found.sort(key=lambda row: row.layers * int(np.prod(row[:9])) ** 0.5)
    return found[:12] if domain.capabilities.compiles_per_shape else found


def fitted(domain: Domain, sizes: Sizes, flags: Flags) -> Sizes | None:
    """Sizes under the declared restrictions; None where rotary positions find no even width."""
    width = sizes.width + (sizes.width % 2 if "rotary" in flags else 0)
    fit = Sizes(*one_width((*sizes[:5], width, *sizes[6:8]), domain), *sizes[8:])
    return None if "rotary" in flags and fit.width % 2 else fit


def options(domain: Domain, wishes: dict[str, bool], hidden: bool) -> list[Flags]:
    """Combinations of flags, plain ones first, then such that neighbours have little in common."""
    capabilities, decoder = domain.capabilities, domain.operation in DECODERS
    barred = {"final": domain.operation not in STACKS, "memory_mask": not decoder, "rms": not capabilities.rms_norms}
    barred |= {"mask": decoder and not capabilities.causal_with_mask, "pre": not capabilities.pre_norm}
    if not capabilities.post_norm:
        wishes = {**wishes, "pre": True}
    if any(wishes.get(name) and off for name, off in barred.items() if name in FLAGS and name != "final"):
        return []
    found = combined(FLAGS, {**wishes, **{name: False for name, off in barred.items() if off}}, domain)
    found = [f for f in found if not any(pair <= set(f) for pair in APART)]
    found = [f for f in found if not hidden or decoder or {"mask", "window"} & set(f)]
    return [found[i] for i in sorted(range(len(found)), key=lambda i: i * 0.6180339887 % 1)]


def plain_layer(domain: Domain) -> list[Case]:
    """Two and three tokens of normal values, as many key heads as query heads, d = H D, norm="post" if it may be."""
    rows = [(1, 1, 1, 2, 3, 4, 4, 4, 6), (2, 2, 1, 3, 2, 4, 4, 8, 8), (2, 4, 1, 4, 5, 4, 4, 16, 16)]
    flags = () if domain.capabilities.post_norm else ("pre",)
    built = []
    for i, row in enumerate(rows):
        sizes = fitted(domain, Sizes(*row, 1 + (i > 0 and domain.operation in STACKS)), ())
        built.append(sizes and layer_case(domain, Wish(), (False, False), sizes, flags, PLAIN[1:2] * 2, 10 * i))
    return [case for case in built if case is not None]
