"""Laws of softmax's temperature."""

from __future__ import annotations

import numpy as np

from veriformer.case import Case
from veriformer.expect import expect_between, expect_close, expect_different, expect_same
from veriformer.law import choice, law
from veriformer.properties.cases import softmax_cases
from veriformer.properties.rows import axis_of, length, measure_rows, rows_of, total_budget
from veriformer.subject import Subject

SMALL = ("integers", "constant", "one_hot", "halves")


@law(
    "softmax",
    case=softmax_cases(axes=True, infinite=0.2, least=2, families=("integers", "normal", "halves", "heavy")),
    temperature=choice(2.0, 0.5, 4.0, 0.25),
    needs={"temperature"},
    source="Hinton, Vinyals, Dean 2015; P08",
    relative=False,
    kills=("softmax.py:softmax_temperature_inverted", "softmax.py:softmax_temperature_after_softmax"),
)
def temperature_is_inverse_scale(softmax: Subject, case: Case, temperature: float) -> None:
    """softmax(x, T) = softmax(x / T), bit for bit where T is a power of two and x / T is exact."""
    divided = case.with_arrays(x=case["x"] / temperature)
    exact = (divided["x"] * temperature == case["x"]).all(axis_of(case))
    got, wanted = softmax(case.with_keywords(temperature=temperature)), softmax(divided)
    expect_same(rows_of(got, case)[exact], rows_of(wanted, case)[exact])


@law(
    "softmax",
    case=softmax_cases(axes=True, least=3, families=("integers", "normal", "one_hot", "halves")),
    needs={"temperature"},
    source="P09, R09",
    kills=("softmax.py:softmax_temperature_ignored",),
)
def temperature_matters(softmax: Subject, case: Case) -> None:
    """Another temperature gives other probabilities, unless all logits of the row are equal."""
    cold, warm = case.with_keywords(temperature=0.5), case.with_keywords(temperature=4.0)
    one, other = softmax.reference(cold), softmax.reference(warm)
    sure = np.abs(one.value - other.value) > one.allowed + other.allowed
    expect_different(softmax(cold)[sure], softmax(warm)[sure], what="T = 4 for T = 0.5")


@law(
    "softmax",
    case=softmax_cases(axes=True, families=SMALL),
    needs={"temperature"},
    source="P10",
    relative=False,
    kills=("softmax.py:softmax_maximum_not_scaled", "softmax.py:softmax_temperature_ignored"),
)
def cold_limit(softmax: Subject, case: Case) -> None:
    """At a temperature near 0 the largest logits of a row share everything equally."""
    cold, p = 2.0**-10, softmax.precision
    rows = rows_of(case["x"], case)
    top = rows.max(-1, keepdims=True)
    wins = rows == top
    share = wins / wins.sum(-1, keepdims=True)
    # Equal logits stay equal when they are scaled and rounded; the others are this far below, less their rounding.
    gap = (top - np.where(wins, -np.inf, rows).max(-1, keepdims=True)) / cold
    slack = 2 * p.u_mid * np.abs(rows).max(-1, keepdims=True) / cold
    left = length(case) * np.exp(slack - gap * (1 - 2 * p.e))
    got = rows_of(softmax(case.with_keywords(temperature=cold)), case)
    expect_close(got, share, share * total_budget(length(case), p) + left + p.eta)


@law(
    "softmax",
    case=softmax_cases(axes=True, families=("normal", *SMALL)),
    temperature=choice(64.0, 1024.0),
    needs={"temperature"},
    source="P11",
    kills=("softmax.py:softmax_temperature_inverted", "softmax.py:softmax_temperature_ignored"),
)
def hot_limit(softmax: Subject, case: Case, temperature: float) -> None:
    """At a high temperature all entries of a row come near equal shares: |p - 1/n| <= (exp(range / T) - 1) / n."""
    n, rows = length(case), rows_of(case["x"], case)
    spread = np.expm1(np.ptp(rows, -1, keepdims=True) / temperature) / n
    got = measure_rows(softmax, case.with_keywords(temperature=temperature))
    expect_close(got.value, np.full(rows.shape, 1 / n), spread + got.allowed)


@law(
    "softmax",
    case=softmax_cases(axes=True, infinite=0.2, least=2, temperatures=(1.0, 0.5, 2.0)),
    factor=choice(2.0, 4.0, 1.25),
    needs={"temperature"},
    source="P12",
    kills=("softmax.py:softmax_temperature_inverted",),
)
def entropy_grows_with_temperature(softmax: Subject, case: Case, factor: float) -> None:
    """The entropy of a row never falls when the temperature rises."""
    cool = measure_rows(softmax, case)
    warm = measure_rows(softmax, case.with_keywords(temperature=case["temperature"] * factor))
    # |surprise(p) - surprise(p + d)| <= surprise(|d|), which grows up to |d| = 1/e (Fannes 1973).
    small = np.maximum(cool.allowed, warm.allowed) < np.exp(-1)
    slack = np.where(small, surprise(cool.allowed) + surprise(warm.allowed), np.inf).sum(-1)
    gain = (surprise(warm.value) - surprise(cool.value)).sum(-1)
    expect_between(gain, 0.0, np.inf, slack, what="the gain of entropy")


def surprise(p: np.ndarray) -> np.ndarray:
    """-p log p, and 0 at 0."""
    return -p * np.log(np.where(p > 0, p, 1.0))


@law(
    "softmax",
    case=softmax_cases(axes=True, infinite=0.2, least=2, temperatures=(1.0, 0.5, 2.0)),
    step=choice(0.5, 2.0, 0.0625),
    source="P13",
    kills=("softmax.py:softmax_temperature_inverted",),
)
def distance_shrinks(softmax: Subject, case: Case, step: float) -> None:
    """Probabilities move, summed over a row, at most by the largest move of a logit over T."""
    moved = case.with_arrays(x=case["x"] + step * case.random().choice([-1.0, 1.0], case["x"].shape))
    one, other = measure_rows(softmax, case), measure_rows(softmax, moved)
    present = case["x"] > -np.inf
    move = np.where(present, np.abs(np.where(present, moved["x"], 0.0) - np.where(present, case["x"], 0.0)), 0.0)
    reach = rows_of(move, case).max(-1) / case["temperature"]
    distance = np.abs(one.value - other.value).sum(-1)
    expect_between(distance, 0.0, reach, (one.allowed + other.allowed).sum(-1), what="the distance")
