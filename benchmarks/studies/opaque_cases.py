"""Evaluations of a decoder model that are equal by law, and steps that make one mistake.

A scenario runs a model through its cache and gives what came out beside what `full` gives without one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

LONGEST = 16
PAD = 0
Pair = tuple[Any, Any, Any]
"""Logits through the cache, logits of `full`, and the tokens[B,T] that `full` was given."""


def cuts(rng: np.random.Generator, length: int, *, least: int = 1) -> list[int]:
    """Lengths of random chunks of so many tokens: at least `least` chunks where there are as many tokens."""
    count = rng.integers(min(least, length), length + 1)
    places = rng.choice(np.arange(1, length), count - 1, replace=False)
    return [int(size) for size in np.diff([0, *sorted(places), length])]


def consume(model: Any, tokens: Any, chunks: list[int], cache: Any = None, **row: Any) -> tuple[Any, Any]:
    """Logits of all tokens in chunks, and the cache; mask[B,T] and positions[B,T] are those of all tokens."""
    out, start = [], 0
    for size in chunks:
        given = {}
        if row:
            given = {"mask": row["mask"][:, : start + size], "positions": row["positions"][:, start : start + size]}
        logits, cache = model.step(tokens[:, start : start + size], cache, **given)
        out.append(logits)
        start += size
    return np.concatenate(out, axis=1), cache


def draw(model: Any, rng: np.random.Generator) -> Any:
    """tokens[B,T] of 1 to 4 rows and 2 to LONGEST tokens."""
    return tokens_of(model, rng, int(rng.integers(1, 5)), int(rng.integers(2, LONGEST + 1)))


def tokens_of(model: Any, rng: np.random.Generator, batch: int, length: int) -> Any:
    return rng.integers(1, model.vocabulary, (batch, length))


def one_at_a_time(model: Any, steps: Any, rng: np.random.Generator) -> Iterator[Pair]:
    """Every token in a step of its own."""
    tokens = draw(model, rng)
    yield consume(steps, tokens, [1] * tokens.shape[1])[0], model.full(tokens), tokens


def in_chunks(model: Any, steps: Any, rng: np.random.Generator) -> Iterator[Pair]:
    """At least two chunks of random sizes."""
    tokens = draw(model, rng)
    yield consume(steps, tokens, cuts(rng, tokens.shape[1], least=2))[0], model.full(tokens), tokens


def cropped(model: Any, steps: Any, rng: np.random.Generator) -> Iterator[Pair]:
    """Some tokens, then others that are taken back, then the rest."""
    tokens = draw(model, rng)
    length = tokens.shape[1]
    kept = int(rng.integers(1, length))
    taken_back = tokens_of(model, rng, len(tokens), int(rng.integers(1, 5)))
    before, cache = consume(steps, tokens[:, :kept], cuts(rng, kept))
    _, cache = consume(steps, taken_back, cuts(rng, taken_back.shape[1]), cache)
    after, _ = consume(steps, tokens[:, kept:], cuts(rng, length - kept), steps.crop(cache, kept))
    yield np.concatenate([before, after], axis=1), model.full(tokens), tokens


def reordered(model: Any, steps: Any, rng: np.random.Generator) -> Iterator[Pair]:
    """Some tokens, then a random choice of the rows, then the rest."""
    tokens = draw(model, rng)
    batch, length = tokens.shape
    kept = int(rng.integers(1, length))
    rows = rng.integers(0, batch, batch)
    _, cache = consume(steps, tokens[:, :kept], cuts(rng, kept))
    tokens = np.concatenate([tokens[rows, :kept], tokens[:, kept:]], axis=1)
    after, _ = consume(steps, tokens[:, kept:], cuts(rng, length - kept), steps.reorder(cache, rows))
    yield after, model.full(tokens)[:, kept:], tokens


def left_padded(model: Any, steps: Any, rng: np.random.Generator) -> Iterator[Pair]:
    """Rows of different lengths with pads before them, told by mask and positions, against each row alone."""
    tokens = draw(model, rng)
    batch, length = tokens.shape
    pads = rng.integers(0, length, batch)
    pads[rng.integers(batch)] = rng.integers(1, length)
    real = np.arange(length) >= pads[:, None]
    positions = np.maximum(np.arange(length) - pads[:, None], 0)
    padded = np.where(real, tokens, PAD)
    out, _ = consume(steps, padded, cuts(rng, length), mask=real, positions=positions)
    for row, pad in enumerate(pads):
        alone = tokens[row : row + 1, pad:]
        yield out[row : row + 1, pad:], model.full(alone), alone


SCENARIOS: dict[str, Callable[..., Iterator[Pair]]] = {
    "one at a time": one_at_a_time,
    "chunks": in_chunks,
    "crop": cropped,
    "reorder": reordered,
    "left padding": left_padded,
}


def noise(model: Any, tokens: Any, rng: np.random.Generator) -> tuple[float, float]:
    """The largest difference among evaluations by `full` that are equal by law: of whole rows, and of prefixes.

    Rows alone, in another order, among others; and the same rows cut after some tokens.
    """
    base, (batch, length) = model.full(tokens), tokens.shape
    order = rng.permutation(batch)
    others = np.concatenate([tokens_of(model, rng, int(rng.integers(1, 4)), length), tokens])
    rows = [np.abs(model.full(tokens[b : b + 1]) - base[b : b + 1]).max() for b in range(batch)]
    rows.append(np.abs(model.full(tokens[order]) - base[order]).max())
    rows.append(np.abs(model.full(others)[-batch:] - base).max())
    ends = {1, int(rng.integers(1, length + 1)), max(length - 1, 1)}
    return float(max(rows)), float(max(np.abs(model.full(tokens[:, :end]) - base[:, :end]).max() for end in ends))


@dataclass(frozen=True)
class Call:
    """One step: its arguments in full, and how many tokens were consumed before."""

    model: Any
    tokens: Any
    cache: Any
    length: int
    mask: Any
    positions: Any


def late_positions(call: Call) -> Call:
    """After the first chunk every token stands one place too far."""
    return replace(call, positions=call.positions + (call.length > 0))


def last_key_dropped(call: Call) -> Call:
    """The newest of the cached tokens is not seen."""
    return hidden(call, call.length - 1) if call.length > 1 else call


def first_key_dropped(call: Call) -> Call:
    """The oldest of the cached tokens is not seen."""
    return hidden(call, 0) if call.length > 1 else call


def hidden(call: Call, place: int) -> Call:
    mask = call.mask.copy()
    mask[:, place] = False
    return replace(call, mask=mask)


def pads_seen(call: Call) -> Call:
    """The mask is ignored."""
    return replace(call, mask=np.ones_like(call.mask))


def rows_swapped(call: Call) -> Call:
    """After every chunk the rows of the cache move on by one."""
    rows = np.roll(np.arange(len(call.tokens)), 1)
    return replace(call, cache=call.model.reorder(call.cache, rows)) if call.length else call


def kept_in(dtype: str) -> Callable[[Call], Call]:
    """The cache is kept in a coarser dtype."""

    def change(call: Call) -> Call:
        return replace(call, cache=call.model.rounded(call.cache, dtype)) if call.length else call

    return change


class Mistaken:
    """The steps of a model with one mistake; a cache is the model's own with the number of tokens consumed."""

    def __init__(self, model: Any, change: Callable[[Call], Call]) -> None:
        self.model, self.change = model, change

    def step(self, tokens: Any, cache: Any, *, mask: Any = None, positions: Any = None) -> tuple[Any, Any]:
        inner, length = cache or (None, 0)
        batch, new = tokens.shape
        if mask is None:
            mask = np.ones((batch, length + new), bool)
        if positions is None:
            positions = np.tile(np.arange(length, length + new), (batch, 1))
        call = self.change(Call(self.model, tokens, inner, length, mask, positions))
        logits, inner = self.model.step(tokens, call.cache, mask=call.mask, positions=call.positions)
        return logits, (inner, length + new)


@dataclass(frozen=True)
class Mistake:
    """What is changed, in which scenario it matters, or by how much the window is widened; rounds: it only rounds."""

    change: Callable[[Call], Call] = lambda call: call
    scenario: str = "chunks"
    widened: int = 0
    dtypes: tuple[str, ...] = ("float64", "float32", "bfloat16", "float16")
    rounds: bool = False

    def steps(self, model: Any) -> Any:
        return Mistaken(model.other_window(self.widened) if self.widened else model, self.change)


MISTAKES = {
    "positions late by one after the first chunk": Mistake(late_positions),
    "newest cached key dropped": Mistake(last_key_dropped),
    "oldest cached key dropped": Mistake(first_key_dropped),
    "window one too wide": Mistake(widened=1),
    "window one too narrow": Mistake(widened=-1),
    "mask of left pads ignored": Mistake(pads_seen, "left padding"),
    "rows of the cache swapped": Mistake(rows_swapped),
    "cache kept in bfloat16": Mistake(kept_in("bfloat16"), rounds=True, dtypes=("float64", "float32")),
    "cache kept in float32": Mistake(kept_in("float32"), rounds=True, dtypes=("float64",)),
}
