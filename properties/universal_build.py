"""Concrete cases of the Universal Transformer, from sizes, flags, families and a seed.

The halting step is a choice that roundings may turn. So the halting unit of a case is chosen among several, by what
the reference then does: every sum that decides keeps a distance from the threshold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from veriformer.case import Case
from veriformer.declarations import PRESETS, Capabilities
from veriformer.law import Domain
from veriformer.properties.attention_family_build import Flags
from veriformer.properties.families import fill
from veriformer.properties.layer_build import STEEP, Sizes, layer_weights, steady
from veriformer.properties.transformer_cases import padding
from veriformer.reference.layers import Params, block
from veriformer.reference.universal import sight, signals
from veriformer.reference.universal_dialects import dialect_and_halting

ID = "universal_transformer"
EPSILONS = (0.01, 0.1, 0.3, 0.02)
MARGINS = {"float64": 0.02, "float32": 0.02, "float16": 0.04, "bfloat16": 0.1}
"""How far every sum of halting probabilities that decides stays from the threshold; less than float16 asks for more."""
W, B = "params.halt.w", "params.halt.b"
"""Names of the halting unit's weights."""
TRIED = 3
"""So many halting units, those that look best, are tried."""
SURE = 24.0
"""A logit of a halting probability that is 0 or 1 but for roundings, also of float32."""


@dataclass(frozen=True)
class Wish:
    """What a law asks of its cases beside flags.

    pace: "mixed" (positions halt at several steps, if they can be made to), "none" (nobody halts before the last),
    "even" (all at the same step: the unit sees nothing, and has a bias). hidden, hidden_memory: some row is no real
    one. presets: those that the law speaks of.
    """

    pace: str = "mixed"
    hidden: bool = False
    hidden_memory: bool = False
    presets: tuple[str, ...] = PRESETS


class Means(NamedTuple):
    """What of a domain decides a case: the dtype, whether there are biases, the declared presets, and an epsilon."""

    dtype: str
    biases: bool
    presets: tuple[str, ...]
    epsilon: bool


def means_of(domain: Domain) -> Means:
    """What of a domain decides a case."""
    able = domain.capabilities
    return Means(domain.dtype, able.biases, able.presets, "epsilon" in domain.accepts)


@lru_cache(maxsize=1024)
def universal_case(
    means: Means, wish: Wish, sizes: Sizes, flags: Flags, fills: tuple[str, ...], seed: int
) -> Case | None:
    """One case, or None where halting finds no distance from the threshold; sizes.layers is max_steps.

    Kept, because many laws ask for the same ones and the reference runs several times for each.
    """
    for families in (fills, ("normal",) * 2):
        case = drawn_case(means, wish, sizes, flags, families, seed)
        paced = with_pace(case, wish.pace, MARGINS[means.dtype], seed)
        if paced is not None:
            return paced
    return None


def drawn_case(means: Means, wish: Wish, sizes: Sizes, flags: Flags, fills: Sequence[str], seed: int) -> Case:
    """Arrays and keywords by their flags; the bias of the halting unit is 0."""
    rng, dtype = np.random.default_rng([seed, 6]), means.dtype
    arrays = {"x": steady(fill(fills[0], seed, (sizes.batch, sizes.length, sizes.model), dtype))}
    kind = "encoder_layer"
    if "memory" in flags:
        kind = "decoder_layer"
        arrays["memory"] = steady(fill(fills[1], seed + 1, (sizes.batch, sizes.memory, sizes.model), dtype))
    layers = Domain(kind, dtype, frozenset(), Capabilities(biases=means.biases))
    arrays |= {f"params.layer.{name}": array for name, array in layer_weights(layers, sizes, flags, seed).items()}
    arrays[W] = rng.choice([-1.0, -0.5, 0.5, 1.0], (sizes.model, 1)) * sizes.model**-0.5
    if means.biases and ("bare" not in flags or seed % 2):
        arrays[B] = np.zeros(1)
    if "mask" in flags:
        arrays["mask"] = padding(rng, sizes.batch, sizes.length, wish.hidden)
    if "memory_mask" in flags:
        arrays["memory_mask"] = padding(rng, sizes.batch, sizes.memory, wish.hidden_memory)
    words: dict[str, Any] = {"heads": sizes.heads, "max_steps": sizes.layers, "preset": preset_of(means, wish, seed)}
    words |= {"norm": "pre"} if "pre" in flags else {}
    words |= {"causal": True} if "causal" in flags else {}
    words |= {"epsilon": EPSILONS[seed % len(EPSILONS)]} if means.epsilon else {}
    return Case(ID, arrays, words, dtype, origin=f"{'/'.join(dict.fromkeys(fills[:2]))} seed {seed}")


def preset_of(means: Means, wish: Wish, seed: int) -> str:
    """One of the declared presets that the law speaks of, the first of them every second time."""
    known = [preset for preset in wish.presets if preset in means.presets]
    return known[0] if seed % 2 == 0 else known[seed // 2 % len(known)]


def with_pace(case: Case, pace: str, margin: float, seed: int) -> Case | None:
    """The case with a halting unit of this pace, whose sums keep the margin; None if none of those tried does.

    Halting units are compared on states that nobody's halting has frozen, which are made only once.
    """
    candidates = list(units(case, pace, seed))
    states = chain(case) if pace == "mixed" else np.repeat(case["x"][:, :, None], case["max_steps"], 2)
    found = [(variety(one, sums_on(one, states), margin), one) for one in candidates]
    found = sorted([(kinds, -place, one) for place, (kinds, one) in enumerate(found) if kinds], key=lambda f: f[:2])
    for _, _, one in found[: -TRIED - 1 : -1]:
        if variety(one, halted(one)[1], margin) and is_gentle(one):
            return one
    return None


def units(case: Case, pace: str, seed: int) -> Iterator[Case]:
    """The case with one halting unit after the other."""
    nothing, has_bias = np.zeros_like(case[W]), case[B] is not None
    if pace == "even":
        for logit in np.roll([-1.5, 0.25, -0.75, 1.0, -2.5, 2.0, -0.25], -(seed % 7)):
            yield case.with_arrays(**{W: nothing, B: np.full(1, logit)})
    elif pace == "none":
        yield case.with_arrays(**{W: nothing, B: np.full(1, -SURE)})
    else:
        for steep in (2, 4, -3, 8, -1, 0.5):
            for logit in (-0.5, 0.5, -1.5, 0.0, -2.5, 1.5):
                yield case.with_arrays(**{W: steep * case[W], B: np.full(1, logit) if has_bias else None})


def chain(case: Case, start: np.ndarray | None = None, first: int = 1, count: int | None = None) -> np.ndarray:
    """The states s[B,T,count,d] after steps first, first + 1, … from a state (x) on, with nobody halting."""
    named = {name: case[name] for name in ("mask", "causal", "memory", "memory_mask", "heads")}
    real, seen, masks = sight(case["x"], case.params, 0, **named)
    u, found = np.where(real[..., None], case["x"] if start is None else start, 0.0), []
    with np.errstate(all="ignore"):
        for n in range(first, first + (case["max_steps"] if count is None else count)):
            z = u + signals(u, 0, n)
            u, _ = block(z, layer_of(case), None, seen, heads=case["heads"], norm=case["norm"], **masks)
            found.append(u)
    return np.stack(found, 2)


def sums_on(case: Case, states: np.ndarray) -> np.ndarray:
    """H[B,T,M] of the case's halting unit on these states."""
    bias = 0.0 if case[B] is None else case[B]
    found: np.ndarray = np.cumsum(1 / (1 + np.exp(-(states @ case[W])[..., 0] - bias)), -1)
    return found


def variety(case: Case, sums: np.ndarray, margin: float) -> int:
    """At how many steps real positions halt; 0 where a sum that decides is within the margin of the threshold."""
    last, threshold = sums.shape[-1], 1 - case["epsilon"]
    if case["preset"] in ("pondernet", "fixed"):
        return 1
    steps = 1 + (sums[..., :-1] < threshold).cumprod(-1).sum(-1)
    n = np.arange(1, last + 1)
    decides = (n <= steps[..., None]) & (n < last) & real_tokens(case)[..., None]
    return 0 if (np.abs(sums - threshold)[decides] < margin).any() else len(np.unique(steps[real_tokens(case)]))


def halted(case: Case) -> tuple[tuple[np.ndarray, np.ndarray, np.ndarray], np.ndarray]:
    """The reference's results, and its sums of halting probabilities H[B,T,M]."""
    named = {**case.keywords, **{name: case[name] for name in case.table.options if name in case.arrays}}
    with np.errstate(all="ignore"):
        result, halting = dialect_and_halting(case["x"], case.params, **named)
    return result, halting.cumsum(-1)


def is_gentle(case: Case) -> bool:
    """Whether a small change of x changes the results moderately: no norm divides by almost nothing."""
    step = 2.0**-20 * np.random.default_rng(0).choice([-1.0, 1.0], case["x"].shape)
    moved = replace(case, dtype="float64").with_arrays(x=case["x"] + step)
    (before, steps, _), (after, others, _) = (halted(one)[0] for one in (case, moved))
    return bool((steps == others).all() and np.abs(after - before).max(initial=0.0) <= STEEP * 2.0**-20)


def real_tokens(case: Case) -> np.ndarray:
    """Which tokens are real, bool[B,T]."""
    return np.ones(case["x"].shape[:2], bool) if case["mask"] is None else np.asarray(case["mask"])


def layer_of(case: Case) -> Params:
    """The weights of the layer."""
    layer: Params = case.params["layer"]
    return layer


def causal(case: Case) -> bool:
    """Whether tokens see nothing of later ones; a decoder_layer always is."""
    return bool(case["causal"]) or case["memory"] is not None


def seen(case: Case) -> np.ndarray:
    """Which tokens each real token sees, itself among them, bool[B,T,T]."""
    real, length = real_tokens(case), case["x"].shape[1]
    order = np.tri(length, dtype=bool) if causal(case) else np.ones((length, length), bool)
    return np.asarray(order & real[:, None] & real[..., None])
