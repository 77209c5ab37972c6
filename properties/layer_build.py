"""Concrete cases of encoder and decoder layers and of stacks of them, from sizes, flags, families and a seed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from veriformer.case import Case
from veriformer.dialect import reference_call
from veriformer.law import Domain
from veriformer.oracle import allowed_keys
from veriformer.properties.attention_build import MASKS, Wish, make_mask, settled
from veriformer.properties.attention_family_build import MATRICES, Flags, scale_and_window, weights
from veriformer.properties.families import fill

DECODERS = ("decoder_layer", "decoder")
"""Operations whose layers are causal and look at a memory."""
STACKS = ("encoder", "decoder")
"""Operations of several layers."""
LARGEST = 6.0
"""Tokens are scaled down to this, and matrices so that they make at most twice as much of a row's largest entry."""
STEEP = 200.0
"""A result that moves so many times as far as x stands behind a norm that divides by almost nothing."""


class Sizes(NamedTuple):
    """B, G, H/G, T, S, D, Dv, d, f and the number of layers."""

    batch: int
    groups: int
    repeats: int
    length: int
    memory: int
    width: int
    value_width: int
    model: int
    inner: int
    layers: int

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.groups * self.repeats


def layer_case(
    domain: Domain, wish: Wish, hidden: tuple[bool, bool], sizes: Sizes, flags: Flags, fills: Sequence[str], seed: int,
) -> Case | None:  # fmt: skip
    """One case of a layer or a stack, or None where it cannot meet the wish.

    hidden: whether a token must be hidden from another, and whether a row of memory from a token, through all layers.
    """
    for families in (fills, ("normal",) * 2):
        case = drawn_case(domain, sizes, flags, families, seed)
        shown = None if case is None else sighted(case, wish, hidden, domain, np.random.default_rng([seed, 4]))
        if shown is not None and is_gentle(shown, domain):
            return shown
    return None


def drawn_case(domain: Domain, sizes: Sizes, flags: Flags, fills: Sequence[str], seed: int) -> Case:
    """Arrays and keywords by their flags; what its masks hide is not settled yet."""
    rng, dtype = np.random.default_rng(seed), domain.dtype
    arrays = {"x": steady(fill(fills[0], seed, (sizes.batch, sizes.length, sizes.model), dtype))}
    if domain.operation in DECODERS:
        arrays["memory"] = steady(fill(fills[1], seed + 1, (sizes.batch, sizes.memory, sizes.model), dtype))
    for i in range(sizes.layers):
        prefix = f"params.layers.{i}." if domain.operation in STACKS else "params."
        arrays |= {prefix + name: array for name, array in layer_weights(domain, sizes, flags, seed + 101 * i).items()}
    if "final" in flags:
        arrays |= {f"params.norm.{name}": array for name, array in norm_weights(rng, sizes.model, flags).items()}
    for name, keys in (("mask", sizes.length), ("memory_mask", sizes.memory)):
        if name in flags:
            kind = MASKS[(seed + len(name)) % len(MASKS)]
            arrays[name] = make_mask(kind, rng, (sizes.batch, sizes.heads, sizes.length, keys))
    words = {"heads": sizes.heads, **dialect(rng, sizes.length, flags)}
    return Case(domain.operation, arrays, words, dtype, origin=f"{'/'.join(dict.fromkeys(fills[:2]))} seed {seed}")


def dialect(rng: np.random.Generator, length: int, flags: Flags) -> dict[str, Any]:
    """Values of the keywords that are on."""
    found: dict[str, Any] = {"norm": "pre"} if "pre" in flags else {}
    for name in ("rotary", "alibi"):
        found |= {"positions": name} if name in flags else {}
    if "alpha" in flags:
        found["alpha"] = float(rng.choice([2.0, 0.5, 1.5, 1.8612]))
    return {**found, **scale_and_window(tuple(f for f in flags if f == "window"), rng, length)}


def layer_weights(domain: Domain, sizes: Sizes, flags: Flags, seed: int) -> dict[str, np.ndarray]:
    """The weights of one layer by dotted names."""
    rng, decoder = np.random.default_rng([seed, 3]), domain.operation in DECODERS
    found = {}
    for place, name in enumerate(("attention", "cross_attention") if decoder else ("attention",)):
        made = weights(domain, sizes[:8], bare_part(flags, seed, "attention"), MATRICES, seed + 20 * place)
        found |= {f"{name}.{key.removeprefix('params.')}": bounded(array) for key, array in made.items()}
    for i, (name, shape) in enumerate({"1": (sizes.model, sizes.inner), "2": (sizes.inner, sizes.model)}.items()):
        found[f"feed_forward.w{name}"] = bounded(fill(MATRICES[(seed + i) % 3], seed + 50 + i, shape, domain.dtype))
        if domain.capabilities.biases and "bare" not in bare_part(flags, seed, "feed_forward"):
            found[f"feed_forward.b{name}"] = rng.integers(-2, 3, shape[1]) / 2
    for i in range(3 if decoder else 2):
        found |= {f"norm{i + 1}.{name}": array for name, array in norm_weights(rng, sizes.model, flags).items()}
    return found


def bare_part(flags: Flags, seed: int, part: str) -> Flags:
    """The flags of one part: "bare" takes the biases from all parts, or from one alone."""
    kept = ("", "feed_forward", "attention")[seed % 3]
    return tuple(f for f in flags if f != "bare" or part != kept)


def norm_weights(rng: np.random.Generator, width: int, flags: Flags) -> dict[str, np.ndarray]:
    """The weights of one norm; without a bias ("rms") it is rms_norm."""
    found = {"weight": rng.choice([-1.0, 0.5, 1.0, 1.5, 2.0], width)}
    return found if "rms" in flags else {**found, "bias": rng.integers(-2, 3, width) / 4}


def steady(x: np.ndarray) -> np.ndarray:
    """Tokens by a power of two smaller, so that none is larger than LARGEST."""
    top = float(np.abs(x).max(initial=0.0))
    return x * 2.0 ** -np.ceil(np.log2(top / LARGEST)) if top > LARGEST else x


def bounded(matrix: np.ndarray) -> np.ndarray:
    """A matrix by a power of two smaller, so that no column adds up to more than 2; a vector as it is."""
    top = float(np.abs(matrix).sum(0).max(initial=0.0)) if matrix.ndim == 2 else 0.0
    return matrix * 2.0 ** -np.ceil(np.log2(top / 2)) if top > 2 else matrix


def seen_tokens(case: Case) -> np.ndarray:
    """Which tokens each head of self-attention sees at each token, bool[B,H,T,T]."""
    return allowed_keys(as_attention(case, "mask"))


def seen_memory(case: Case) -> np.ndarray:
    """Which rows of memory each head of cross-attention sees at each token, bool[B,H,T,S]."""
    return allowed_keys(as_attention(case, "memory_mask"))


def reach(case: Case) -> np.ndarray:
    """On which tokens of x each token of the result depends after all layers, bool[B,T,T]."""
    near = seen_tokens(case).any(1) | np.eye(case["x"].shape[1], dtype=bool)
    found = near
    for _ in range(depth(case) - 1):
        found = found @ near
    return found


def memory_reach(case: Case) -> np.ndarray:
    """On which rows of memory each token of the result depends after all layers, bool[B,T,S]."""
    near, seen = seen_tokens(case).any(1) | np.eye(case["x"].shape[1], dtype=bool), seen_memory(case).any(1)
    found = seen
    for _ in range(depth(case) - 1):
        found = near @ found | seen
    return found


def depth(case: Case) -> int:
    """The number of layers."""
    return len(case.params["layers"]) if case.operation in STACKS else 1


def as_attention(case: Case, mask: str) -> Case:
    """A case of attention without content that sees what self-attention or, by its mask, cross-attention sees."""
    own = mask == "mask"
    (batch, queries), keys = case["x"].shape[:2], case["x" if own else "memory"].shape[1]
    q, k = (np.zeros((batch, case["heads"], length, 1)) for length in (queries, keys))
    words = {"causal": case.operation in DECODERS, "window": case["window"]} if own else {}
    return Case("attention", {"q": q, "k": k, "v": k, "mask": case[mask]}, words, case.dtype)


def sighted(case: Case, wish: Wish, hidden: tuple[bool, bool], domain: Domain, rng: np.random.Generator) -> Case | None:
    """The case whose masks meet the wish; None where they cannot."""
    for name, own in (("mask", True), ("memory_mask", False)):
        if own or domain.operation in DECODERS:
            shown = settled(as_attention(case, name), wish, domain, rng) if case[name] is not None else None
            case = case if shown is None else case.with_arrays(**{name: shown["mask"]})
    if hidden[0] and reach(case).all():
        case = with_hidden_token(case, rng)
    if hidden[1] and memory_reach(case).all():
        case = case.with_arrays(memory_mask=without_key(case["memory_mask"], case["memory"].shape[1], rng))
    return None if hidden[0] and reach(case).all() else case


def with_hidden_token(case: Case, rng: np.random.Generator) -> Case:
    """The case with a token that no other one sees: by the mask, else by the window."""
    if case["mask"] is None:
        return case if case["window"] is None else case.with_keywords(window=(0, 0))
    length = case["x"].shape[1]
    mask = np.broadcast_to(case["mask"], (*case["mask"].shape[:2], length, length)) | np.eye(length, dtype=bool)
    token = int(rng.integers(length))
    mask[int(rng.integers(len(mask))), :, np.arange(length) != token, token] = False
    return case.with_arrays(mask=mask)


def without_key(mask: np.ndarray, keys: int, rng: np.random.Generator) -> np.ndarray:
    """A mask with one key hidden from everybody in one row of the batch, and another one open."""
    mask = np.repeat(mask, keys // mask.shape[3], 3)
    row, (key, other) = int(rng.integers(len(mask))), rng.permutation(keys)[:2]
    mask[row, ..., key], mask[row, ..., other] = False, True
    return mask


def is_gentle(case: Case, domain: Domain) -> bool:
    """Whether a small change of x changes the result moderately: no norm divides by almost nothing."""
    step = 2.0**-20 * np.random.default_rng(0).choice([-1.0, 1.0], case["x"].shape)
    with np.errstate(all="ignore"):
        before, after = (
            reference_call(case.operation, domain.capabilities, {**case.arrays, "x": x}, case.keywords)
            for x in (case["x"], case["x"] + step)
        )
    return bool(np.abs(after - before).max() <= STEEP * 2.0**-20)
