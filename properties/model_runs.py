"""What laws of models have in common: the error that equal logits may differ by, and walks through a cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from veriformer.budgets.opaque import UNIT, opaque_allowance
from veriformer.case import Case
from veriformer.expect import Refused, expect, expect_close, expect_same
from veriformer.moves import Move, crop, full, reorder, step
from veriformer.operation import PARAMS
from veriformer.properties.model_cases import Go, lengths_of
from veriformer.subject import Subject

DEEP = 4.0
"""Noise of a deep model may be so many times what any model is allowed; what is more is no rounding."""


def noises_of(model: Subject, case: Case, relations: Sequence[str]) -> list[float]:
    """How far logits lie apart that are equal by law and use no cache.

    relations, compared with the batch: "rows", the batch turned round and its rows alone; "prefixes" of the tokens.
    """
    given = {name: array for name, array in case.arrays.items() if not name.startswith(PARAMS)}
    every, last = np.arange(len(next(iter(given.values())))), "target" if "target" in given else "tokens"
    picks = [every[::-1], *(every[i : i + 1] for i in every)] if "rows" in relations else []
    lengths = range(1, given[last].shape[1]) if "prefixes" in relations else range(0)
    moves = [Move("full", given)]
    moves += [Move("full", {name: array[rows] for name, array in given.items()}) for rows in picks]
    moves += [Move("full", {**given, last: given[last][:, :length]}) for length in lengths]
    whole, *others = model.run(case, moves, aside=True)
    parts = [whole[rows] for rows in picks] + [whole[:, :length] for length in lengths]
    return [distance(one, other) for one, other in zip(parts, others, strict=True)]


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """The largest difference; equal infinities have none."""
    return float(np.where(one == other, 0.0, np.abs(one - other)).max(initial=0.0))


def expect_moved(before: np.ndarray, after: np.ndarray, what: str) -> None:
    """At every place some logit is another than before."""
    expect(bool((before != after).any(axis=-1).all()), "no influence", f"{what} as before, wanted a change")


def allowance(model: Subject, case: Case, wanted: np.ndarray, noises: Sequence[float] = ()) -> np.ndarray:
    """How far logits may lie from the wanted ones. A noise far beyond that is a mistake; none gives room beyond DEEP.

    A model with weights of its own is not known to compute in float64 throughout, unless that is declared.
    """
    declared = str(model.capabilities.at("intermediate", case.dtype))
    own = case.dtype if model.domain.provides("weights") else None
    coarsest = own if declared == "storage" else max(declared, case.dtype, key=lambda name: UNIT[name])
    plain = opaque_allowance(wanted, case.dtype, coarsest=coarsest)
    most = DEEP * plain
    room = [noise for noise in noises if noise <= most.max(initial=0.0)]
    found = opaque_allowance(wanted, case.dtype, max(room, default=0.0), coarsest=coarsest)
    return np.minimum(found, most)


def expect_logits(
    model: Subject,
    case: Case,
    got: np.ndarray,
    wanted: np.ndarray,
    *,
    what: str = "",
    noise: Sequence[str] = ("rows", "prefixes"),
) -> None:
    """Logits that are equal by law differ by no more than an opaque model may; wanted come without a cache.

    noise: relations whose own differences may give room, never the one that is judged.
    """
    allowed = allowance(model, case, wanted)
    if not (
        (np.abs(got - wanted) <= allowed) | (got == wanted)
    ).all():  # a deep or sharp model gets what its noise shows
        allowed = allowance(model, case, wanted, noises_of(model, case, noise))
    expect_close(got, wanted, allowed, what=what)


def expect_taken(model: Subject, case: Case, moves: Iterable[Move]) -> None:
    """A program of ordinary moves raises nothing."""
    try:
        model.run(case, moves)
    except Refused as refused:
        expect(False, "raised", str(refused))
    expect(True, "raised", "")


def expect_kept(model: Subject, case: Case, got: np.ndarray, wanted: np.ndarray) -> None:
    """Logits that nothing may have moved: bit for bit, or within the allowance if leak="rounding"."""
    if model.capabilities.leak == "exact":
        expect_same(got, wanted)
    else:
        expect_logits(model, case, got, wanted)


def chunked(model: Subject, case: Case, moves: Iterable[Move]) -> tuple[np.ndarray, np.ndarray]:
    """The logits of the first move, and those of all others one after the other."""
    whole, *parts = model.run(case, moves)
    return whole, np.concatenate(parts, axis=1)


@dataclass
class Walk:
    """A walk written down as moves: after each step stands the whole of what it has seen, by `full`.

    tokens: from which the new ones are taken in turn.
    """

    model: Subject
    tokens: np.ndarray
    seen: np.ndarray = field(init=False)
    cache: int | None = None
    moves: list[Move] = field(default_factory=list)
    taken: int = 0
    given: int = 0

    def __post_init__(self) -> None:
        self.seen = self.tokens[:, :0]

    def go(self, rules: Sequence[Go]) -> Walk:
        """Follow the rules, as far as they can be followed."""
        for word, number in rules:
            getattr(self, "_" + word)(number)
        return self

    def _step(self, number: int) -> None:
        room = self.tokens.shape[1] - self.seen.shape[1]
        if room < 1:
            return
        first = self.cache is None or self.model.capabilities.chunked_steps
        new = self._fresh(1 + number % min(room, 3) if first else 1)
        self.seen = np.concatenate([self.seen, new], axis=1)
        self.moves += [step(new, self.cache, self._number()), full(self.seen)]
        self.cache = self.taken

    def _crop(self, number: int) -> None:
        if self.cache is None or not self.model.domain.provides("crop"):
            return
        length = 1 + number % self.seen.shape[1]
        self.moves.append(crop(self.cache, length, self._number()))
        self.seen, self.cache = self.seen[:, :length], self.taken

    def _reorder(self, number: int) -> None:
        if self.cache is None or not self.model.domain.provides("reorder"):
            return
        rows = np.random.default_rng(number).integers(0, len(self.seen), len(self.seen))
        self.moves.append(reorder(self.cache, rows, self._number()))
        self.seen, self.cache = self.seen[rows], self.taken

    def _new(self, number: int) -> None:
        self.seen, self.cache = self.tokens[:, :0], None

    def _fresh(self, count: int) -> np.ndarray:
        """New tokens for the rows that there are now."""
        places = (self.given + np.arange(count)) % self.tokens.shape[1]
        self.given += count
        return self.tokens[np.arange(len(self.seen)) % len(self.tokens)][:, places]

    def _number(self) -> int:
        self.taken += 1
        return self.taken


def cut_up(model: Subject, case: Case, cut: Sequence[int]) -> list[int]:
    """The lengths of the chunks into which a case's tokens, or its target, are cut."""
    tokens = case["target" if "target" in case.arrays else "tokens"]
    return lengths_of(cut, tokens.shape[1], model.domain)


def turned_tokens(lm: Subject, case: Case) -> np.ndarray:
    """Another token in every place."""
    return np.asarray((case["tokens"] + 1) % lm.vocabulary(case))


def window_of(lm: Subject, case: Case) -> int | None:
    """How many tokens a layer lets a token see, itself among them; None: all."""
    facts = lm.implementation.description.models[lm.operation]
    if not facts.weights:
        return facts.window
    window = case["window"]
    return None if window is None or window[0] is None else window[0] + 1
