"""Error budget of the probabilities of the next token: softmax over what the filters leave, and what they may leave.

Which tokens stay is a choice that roundings can turn: logits as near to one another as their errors may
change places, and the mass that top-p counts is known up to the error of its terms. Every choice within
these errors is admitted, and for top-k also that all tokens equal to the last one stay, unless exactly k is
declared.

Admitted algorithms: ranks by logits, by scaled logits or by probabilities; the mass counted from the most
or the least probable token, in sums that are held in the accumulator. Not admitted: sums of probabilities
held in a shorter dtype than declared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from veriformer import reference
from veriformer.budgets.bound import Array, Bound, added
from veriformer.budgets.precision import C, Precision
from veriformer.budgets.softmax import logit_error, softmax

FIRST = "temperature_first"


def next_token_probabilities(
    logits: Array,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    order: str = FIRST,
    exactly_k: bool = False,
    precision: Precision,
) -> Bound:
    """Error budget of next_token_probabilities.

    logits[…, V] -> value, allowed, both like logits.

        E_i = E_i(softmax over all that may stay) (S_max / S_min)² + max |p_i - value_i| over the choices

    S is the sum of the exponentials of what stays, between S_min and S_max whatever the choice; where the
    roundings leave no choice E is the budget of softmax over what stays.
    Source: derived; the set: `choices`, the roundings: `softmax`.
    Edges: nothing is allowed at -inf, nor for a token that certainly goes.
    """
    words: dict[str, Any] = dict(temperature=temperature, top_k=top_k, top_p=top_p, order=order, exactly_k=exactly_k)
    value = reference.next_token_probabilities(logits, **words)
    found = choices(logits, **words, precision=precision)
    most = softmax(np.where(found.possible, logits, -np.inf), temperature=temperature, precision=precision)
    e, _ = _scaled(logits, temperature, precision)
    with np.errstate(all="ignore"):
        low, high, stretch = _shares(np.exp(e), found)
        spread = np.where(found.possible, np.maximum(high - value, value - low), 0.0)
        terms = {name: np.where(term == 0, 0.0, term * stretch**2) for name, term in most.terms.items()}
        terms["choice"] = np.where(found.open[..., None], spread, 0.0)
    return Bound(value, np.minimum(added(terms), 1 + most.allowed), terms)


@dataclass(frozen=True)
class Choices:
    """What the filters may leave of each row: between fewest[…] and most[…] tokens.

    sure[…, V]: tokens that stay whatever the choice. possible[…, V]: those that may stay. first[…, V]:
    those that may count as the most probable one. open[…]: whether there is a choice at all.
    """

    fewest: Array
    most: Array
    sure: Array
    possible: Array
    first: Array

    @property
    def open(self) -> Array:
        """Where there is a choice, [...]."""
        differ: Array = (self.sure != self.possible).any(-1)
        return differ


def choices(
    logits: Array,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    order: str = FIRST,
    exactly_k: bool = False,
    precision: Precision,
) -> Choices:
    """Which tokens may stay and which must, if each logit is known up to its error.

    logits[…, V] -> Choices.

    Two tokens may change places where their logarithms t ± d overlap, d as in `softmax`, or where both
    underflow; top-p cuts where the mass comes within `mass_error` of it.
    Source: derived.
    """
    temperature = temperature if order == FIRST else 1.0
    t, _ = _scaled(logits, temperature, precision)
    parts = (t, *interval(logits, temperature, precision))
    rows = [_Ranks.of(*row) for row in zip(*(a.reshape(-1, a.shape[-1]) for a in parts), strict=True)]
    counts = [row.left_by_top_k(top_k, exactly_k) for row in rows]
    if top_p is not None:
        left = np.stack([row.places < most for row, (_, most) in zip(rows, counts, strict=True)]).reshape(t.shape)
        errors = mass_error(np.where(left, logits, -np.inf), temperature, precision).reshape(-1)
        counts = [row.left_by_top_p(*n, top_p, float(e)) for row, n, e in zip(rows, counts, errors, strict=True)]
    masks = [row.choice(*n) for row, n in zip(rows, counts, strict=True)]
    sure, possible, first = (np.stack(mask).reshape(t.shape) for mask in zip(*masks, strict=True))
    fewest, most = (np.array(n).reshape(t.shape[:-1]) for n in zip(*counts, strict=True))
    return Choices(fewest, most, sure, possible, first)


def interval(logits: Array, temperature: float, precision: Precision) -> tuple[Array, Array]:
    """Between which two numbers the logarithm of a token's share may be found, the likeliest one's at about 0.

    logits[…, V] -> two arrays like logits: t - d and t + d with t = (logits - max)/T and d as in `softmax`.
    What may underflow begins at -inf and reaches at least up to the smallest number.
    Source: derived.
    """
    t, d = _scaled(logits, temperature, precision)
    floor = np.log(precision.eta_mid if precision.unfused else precision.eta_acc)
    return np.where(t - d < floor, -np.inf, t - d), np.maximum(t + d, floor)


def mass_error(logits: Array, temperature: float, precision: Precision) -> Array:
    """How far the mass of some of the most probable tokens may be off, whichever they are.

    logits[…, V], -inf for what is absent -> [...].

        Σ E_i(softmax) + (g(n) + 2 C) u_acc + [unfused] (C u_mid + n eta_mid)

    The sum, 1 - p, the comparison and every probability may be rounded; counted from the least probable
    token, what is missing to 1 counts as well.
    Source: derived.
    """
    p, n = precision, (logits > -np.inf).sum(-1)
    terms = softmax(logits, temperature=temperature, precision=p).terms
    own = (terms["logits"] + terms["normaliser"]).sum(-1)
    stored = C * p.u_store + n * (p.eta_mid if p.unfused else 0.0)
    error: Array = np.minimum(own, 1.0) + (p.g(n) + 2 * C) * p.u_acc + stored
    return error


def _scaled(logits: Array, temperature: float, precision: Precision) -> tuple[Array, Array]:
    """(logits - max)/T and the error of each; -inf for what is absent, and for all but the largest at T = 0."""
    peak = logits.max(axis=-1, keepdims=True, initial=-np.inf)
    visible = logits > -np.inf if temperature else (logits == peak) & (logits > -np.inf)
    peak = np.where(peak == -np.inf, 0.0, peak)
    t = (np.where(visible, logits, peak) - peak) / (temperature or 1.0)
    return np.where(visible, t, -np.inf), logit_error(t, peak, temperature, precision)


def _shares(e: Array, found: Choices) -> tuple[Array, Array, Array]:
    """The least and the largest share of each token among what may stay, and Σ e over that by the smallest sum."""
    maybe = found.possible & ~found.sure
    least = np.where(maybe, e, np.inf).min(-1, initial=np.inf)
    missing = found.fewest - found.sure.sum(-1)
    smallest = np.where(found.sure, e, 0.0).sum(-1) + np.where(missing > 0, missing * least, 0.0)
    falling = -np.sort(-np.where(found.possible, e, 0.0), axis=-1)
    last = np.maximum(found.most - 1, 0)[..., None]
    largest = np.take_along_axis(np.cumsum(falling, -1), last, -1)
    low = np.where(found.sure, e / largest, 0.0)
    high = np.where(found.possible, np.minimum(e / smallest[..., None], 1.0), 0.0)
    return low, high, np.where(found.open, falling.sum(-1) / smallest, 1.0)[..., None]


@dataclass(frozen=True)
class _Ranks:
    """What is present of one row, the largest first: t, and how many tokens come before each.

    places[V]: the rank of each token, V for what is absent. at_least counts those that certainly come
    before, at_most those that may, itself included.
    """

    places: Array
    t: Array
    at_least: Array
    at_most: Array

    @classmethod
    def of(cls, t: Array, below: Array, above: Array) -> _Ranks:
        falling = np.argsort(-t, kind="stable")
        present = falling[t[falling] > -np.inf]
        places = np.full(t.size, t.size)
        places[present] = np.arange(present.size)
        low, high = below[present], above[present]
        at_least = present.size - np.searchsorted(np.sort(low), high, side="right")
        at_most = present.size - np.searchsorted(np.sort(high), low, side="left")
        return cls(places, t[present], at_least, at_most)

    def left_by_top_k(self, k: int | None, exactly: bool) -> tuple[int, int]:
        """The fewest and the most tokens that top-k leaves: k, or also those that may equal the last of them."""
        n = self.t.size
        if k is None or k >= n:
            return n, n
        return k, k if exactly else int(self.at_most[k - 1])

    def left_by_top_p(self, fewest: int, most: int, mass: float, error: float) -> tuple[int, int]:
        """The same once the rest is cut off where the mass may be reached, at the earliest and at the latest."""
        if not self.t.size:
            return 0, 0
        total = np.cumsum(np.exp(self.t))
        early = 1 + np.searchsorted(total[:fewest], (mass - error) * total[fewest - 1])
        late = 1 + np.searchsorted(total[:most], (mass + error) * total[most - 1])
        return min(int(early), fewest), min(int(late), most)

    def choice(self, fewest: int, most: int) -> tuple[Array, Array, Array]:
        """Masks of the tokens that must stay, that may stay, and that may come first."""
        at = np.minimum(self.places, max(self.t.size - 1, 0))
        present = self.places < self.places.size
        if not self.t.size:
            return present, present, present
        return (
            present & (self.at_most[at] <= fewest),
            present & (self.at_least[at] < most),
            present & (self.at_least[at] == 0),
        )
