"""Laws of next_token_probabilities: a distribution over what stays, cooled or heated; tokens and rows by themselves."""

from __future__ import annotations

import numpy as np

from veriformer.case import Case
from veriformer.expect import expect_between, expect_close, expect_same
from veriformer.law import choice, law
from veriformer.properties.generation_cases import MODERATE, next_token_cases
from veriformer.properties.measured import expect_equal, expect_unmoved, measure
from veriformer.properties.rows import total_budget
from veriformer.properties.staying import (
    choices_of,
    likeliest,
    restricted,
    shares_of,
    shifted,
    taken,
    visible,
    with_other_rows_changed,
    without,
)
from veriformer.subject import Subject

SMALL = ("integers", "constant", "one_hot", "halves")


@law(
    "next_token_probabilities",
    case=next_token_cases(extras=True),
    source="P118, B186",
    relative=False,
    kills=("next_token.py:not_renormalised", "next_token.py:empty_nucleus"),
)
def sums_to_one(next_token: Subject, case: Case) -> None:
    """The probabilities of a row sum to 1, whatever the filters leave."""
    present = (case["logits"] > -np.inf).sum(-1)
    totals = next_token(case).sum(-1)
    expect_close(totals, 1.0, total_budget(present, next_token.precision), what="the sum of a row")


@law(
    "next_token_probabilities",
    case=next_token_cases(families=("low", "zipf", "integers", "huge", "normal"), infinite=0.4, extras=True),
    source="R73, B183",
    relative=False,
    kills=("next_token.py:minus_infinity_is_finite", "next_token.py:greedy_divides_by_minus_one"),
)
def minus_infinity_is_never_chosen(next_token: Subject, case: Case) -> None:
    """A logit of -inf has probability exactly 0, none is below 0, and none is NaN."""
    got = next_token(case)
    expect_between(got, 0.0, np.inf, 0.0)
    absent = np.where(case["logits"] == -np.inf, got, 0.0)
    expect_same(absent, np.zeros(got.shape), what="a token of -inf")


@law(
    "next_token_probabilities",
    case=next_token_cases(),
    source="P117, P118, B168",
    kills=(
        "next_token.py:empty_nucleus",
        "next_token.py:least_probable_stay",
        "next_token.py:top_p_without_renormalised_top_k",
    ),
)
def the_likeliest_token_stays(next_token: Subject, case: Case) -> None:
    """No filter drops the token of the largest logit or lowers its probability; of equal ones it may be any."""
    got, shares, first = next_token(case), shares_of(next_token, case), choices_of(next_token, case).first
    least = np.where(first, shares.value, np.inf).min(-1)
    error = np.where(first, shares.allowed, 0.0).max(-1)
    expect_between(np.where(first, got, 0.0).sum(-1), least, np.inf, error, what="the likeliest")


@law(
    "next_token_probabilities",
    case=next_token_cases(),
    source="P118",
    kills=(
        "next_token.py:not_renormalised",
        "next_token.py:softmax_of_probabilities",
        "next_token.py:temperature_after_softmax",
    ),
)
def what_stays_keeps_its_ratios(next_token: Subject, case: Case) -> None:
    """The tokens that stay have the softmax of their logits over T, as if there were no others."""
    got, p = next_token(case), next_token.precision
    stays = got > 0
    alone = next_token.reference(without(restricted(case, stays)))
    # what underflows is not seen to stay, but it counts in the sum
    unseen = (~stays & (case["logits"] > -np.inf)).sum(-1, keepdims=True) * max(p.eta, p.eta_mid)
    expect_close(got, alone.value, alone.allowed + unseen * alone.value)


@law(
    "next_token_probabilities",
    case=next_token_cases(families=("integers", "zipf", "normal", "halves", "heavy"), least=2),
    temperature=choice(2.0, 0.5, 4.0, 0.25),
    needs={"temperature"},
    source="P124, P08",
    relative=False,
    changes=("sampling_order",),
    kills=("next_token.py:temperature_multiplies", "next_token.py:temperature_after_filters"),
)
def temperature_is_inverse_scale(next_token: Subject, case: Case, temperature: float) -> None:
    """Logits at T, filters included, are logits / T at 1, bit for bit; if T comes last, it moves nothing that stays."""
    cooled, plain = (case.with_keywords(temperature=t) for t in (temperature, 1.0))
    if next_token.capabilities.sampling_order == "temperature_last":
        seen = visible(next_token, cooled) & visible(next_token, plain)
        expect_same((next_token(cooled) > 0)[seen], (next_token(plain) > 0)[seen], what="whether a token stays")
        return
    divided = plain.with_arrays(logits=case["logits"] / temperature)
    exact = (divided["logits"] * temperature == case["logits"]).all(-1)
    expect_same(next_token(cooled)[exact], next_token(divided)[exact])


@law(
    "next_token_probabilities",
    case=next_token_cases(families=MODERATE, filters=("k",), least=2),
    temperature=choice(0.5, 4.0, 0.25),
    needs={"temperature", "top_k"},
    source="P117",
    kills=("next_token.py:temperature_scales_k",),
)
def temperature_moves_nothing_that_top_k_leaves(next_token: Subject, case: Case, temperature: float) -> None:
    """The k largest are the same tokens at every temperature, but for what rounding ties."""
    one, other = (case.with_keywords(temperature=t) for t in (1.0, temperature))
    judged = np.ones(case["logits"].shape, bool)
    for each in (one, other):
        found = choices_of(next_token, each)
        judged &= visible(next_token, each) & (found.sure == found.possible)
    expect_same((next_token(other) > 0)[judged], (next_token(one) > 0)[judged], what="whether a token stays")


@law(
    "next_token_probabilities",
    case=next_token_cases(families=SMALL),
    needs={"temperature"},
    source="P117, R80",
    relative=False,
    kills=("next_token.py:temperature_floor", "next_token.py:temperature_multiplies"),
)
def cold_is_greedy(next_token: Subject, case: Case) -> None:
    """At a temperature near 0 the tokens of the largest logit have everything, whatever the filters."""
    cold, p, wins, logits = 2.0**-10, next_token.precision, likeliest(case), case["logits"]
    top, size = logits.max(-1, keepdims=True), logits.shape[-1]
    # the others are this far below, less their rounding
    gap = (top - np.where(wins, -np.inf, logits).max(-1, keepdims=True)) / cold
    slack = 2 * p.u_mid * np.abs(np.where(logits > -np.inf, logits, 0.0)).max(-1, keepdims=True) / cold
    left = size * np.exp(slack - gap * (1 - 2 * p.e))
    got = next_token(case.with_keywords(temperature=cold))
    expect_close(np.where(wins, 0.0, got), 0.0, left + p.eta, what="a lesser token")
    total = np.where(wins, got, 0.0).sum(-1)
    expect_close(total, 1.0, total_budget(size, p) + left[..., 0], what="the sum of the largest")


@law(
    "next_token_probabilities",
    case=next_token_cases(families=("integers", "zipf", "normal", "halves", "low"), temperatures=(1.0, 2.0, 0.5)),
    shift=choice(8.0, -64.0, 1024.0),
    source="P04",
    kills=("next_token.py:logits_clipped",),
)
def shift_changes_nothing(next_token: Subject, case: Case, shift: float) -> None:
    """The same number added to every logit of a row changes nothing, where the addition is exact."""
    low, high, exact = shifted(case, shift)
    expect_equal(measure(next_token, high)[exact], measure(next_token, low)[exact])


@law(
    "next_token_probabilities",
    case=next_token_cases(families=("zipf", "normal", "integers", "sparse", "heavy", "one_hot"), least=2),
    source="R77, B170",
    kills=(
        "next_token.py:order_not_undone",
        "next_token.py:half_of_the_indices",
        "next_token.py:mass_in_vocabulary_order",
        "next_token.py:first_token_always_stays",
    ),
)
def tokens_are_only_names(next_token: Subject, case: Case) -> None:
    """Logits in another order give the same probabilities in that order."""
    order = case.random().permutation(case.size("V"))
    expect_equal(measure(next_token, taken(case, order)), measure(next_token, case)[..., order])


@law(
    "next_token_probabilities",
    case=next_token_cases(rows=2, families=("zipf", "normal", "integers", "halves", "sparse")),
    source="R02",
    changes=("leak",),
    kills=(
        "next_token.py:top_k_of_the_batch",
        "next_token.py:nucleus_of_the_first_row",
        "next_token.py:normaliser_of_the_batch",
    ),
)
def rows_are_independent(next_token: Subject, case: Case) -> None:
    """A row's probabilities do not depend on the other rows."""
    changed, kept = with_other_rows_changed(case)
    expect_unmoved(next_token, case, changed, kept)


@law(
    "next_token_probabilities",
    case=next_token_cases(families=("zipf", "low", "integers", "normal", "huge", "near_ties"), infinite=0.0, least=2),
    left=choice(0, 1, 2),
    source="P07, R06",
    kills=("next_token.py:absent_lanes_count", "next_token.py:minus_infinity_is_finite"),
)
def minus_infinity_equals_deletion(next_token: Subject, case: Case, left: int) -> None:
    """A token of -inf counts as if the vocabulary did not have it."""
    size, rng = case.size("V"), case.random()
    some = np.sort(rng.permutation(size)[: rng.integers(1, size + 1)])
    kept = (np.arange(size - 1, size), some, np.arange(size - 1))[left]
    masked = measure(next_token, restricted(case, np.isin(np.arange(size), kept)))
    expect_equal(masked[..., kept], measure(next_token, taken(case, kept)))
