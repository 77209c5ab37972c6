"""Laws of the filters of next_token_probabilities: top-k, top-p, and both in their order."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from veriformer.budgets.generation import interval
from veriformer.case import Case
from veriformer.expect import expect_between, expect_close, expect_different, expect_same
from veriformer.law import Domain, Recipe, choice, law
from veriformer.properties.generation_cases import (
    MODERATE,
    TILES,
    equal_token_cases,
    large_vocabulary_cases,
    next_token_cases,
)
from veriformer.properties.measured import expect_equal, measure
from veriformer.properties.rows import total_budget
from veriformer.properties.staying import (
    as_counted,
    choices_of,
    counted,
    masses_of,
    restricted,
    shares_of,
    visible,
    without,
)
from veriformer.subject import Subject

STRONG = {"top_k": 2, "top_p": 0.5, "temperature": 0.25}
"""Each keyword with a value that matters."""


def words_accepted(domain: Domain) -> list[str]:
    """Keywords that the implementation takes."""
    return [word for word in STRONG if word in domain.accepts]


WORDS = Recipe(words_accepted, lambda domain: st.sampled_from(words_accepted(domain)))


@law(
    "next_token_probabilities",
    case=next_token_cases(filters=("k",), least=2),
    needs={"top_k"},
    source="Fan, Lewis, Dauphin 2018; R71",
    kills=(
        "next_token.py:k_plus_one",
        "next_token.py:k_minus_one",
        "next_token.py:k_at_most_eight",
        "next_token.py:k_wraps_around",
        "next_token.py:top_k_of_magnitudes",
    ),
)
def top_k_keeps_the_k_largest(next_token: Subject, case: Case) -> None:
    """The k largest stay, none with less than before, and all others have 0; of equal ones at the cut any."""
    got, shares, found = next_token(case), shares_of(next_token, case), choices_of(next_token, case)
    expect_gone(got, ~found.possible)
    stays = found.sure & visible(next_token, case)
    least, error = (np.where(stays, array, 0.0) for array in (shares.value, shares.allowed))
    expect_between(np.where(stays, got, 0.0), least, np.inf, error, what="a token that stays")


def expect_gone(got: np.ndarray, gone: np.ndarray) -> None:
    """These tokens have exactly 0."""
    expect_same(np.where(gone, got, 0.0), np.zeros(got.shape), what="a token that goes")


@law(
    "next_token_probabilities",
    case=next_token_cases(
        families=("integers", "halves", "near_ties", "constant", "sparse"), filters=("k",), temperatures=(1.0, 2.0, 0.5)
    ),
    needs={"top_k", "exact_top_k"},
    source="R71, B166",
    relative=False,
    kills=("next_token.py:ties_stay_beyond_k", "next_token.py:k_plus_one"),
)
def exactly_k_tokens_stay(next_token: Subject, case: Case) -> None:
    """With exact_top_k, k tokens have a probability, or all that are there, also where several equal the last."""
    present = case["logits"] > -np.inf
    seen = (visible(next_token, case) | ~present).all(-1)
    stay = counted(next_token(case), present)
    wanted = np.minimum(present.sum(-1), case["top_k"] or case.size("V"))
    expect_same(stay[seen], wanted[seen], what="the number of tokens that stay")


@law(
    "next_token_probabilities",
    case=next_token_cases(families=("normal", "integers", "zipf", "low", "huge"), filters=("", "p"), shapes=TILES),
    needs={"top_k"},
    source="P117, B170, B183",
    kills=(
        "next_token.py:half_of_the_indices",
        "next_token.py:greedy_divides_by_minus_one",
        "next_token.py:least_probable_stay",
    ),
)
def top_k_of_one_is_greedy(next_token: Subject, case: Case) -> None:
    """k = 1 gives everything to a token of the largest logit, wherever it stands."""
    single = case.with_keywords(top_k=1)
    got, found = next_token(single), choices_of(next_token, single)
    expect_gone(got, ~found.possible)
    total = np.where(found.possible, got, 0.0).sum(-1)
    expect_close(total, 1.0, total_budget(case.size("V"), next_token.precision), what="the largest")


@law(
    "next_token_probabilities",
    case=next_token_cases(filters=("",)),
    more=choice(0, 1, 1000),
    needs={"top_k or top_p"},
    source="P117",
    kills=("next_token.py:k_wraps_around", "next_token.py:k_at_most_eight", "next_token.py:nucleus_one_too_small"),
)
def filters_that_leave_all_change_nothing(next_token: Subject, case: Case, more: int) -> None:
    """k of at least V, and p = 1, are as none."""
    wide = {"top_k": case.size("V") + more, "top_p": 1.0}
    given = {word: value for word, value in wide.items() if word in next_token.domain.accepts}
    expect_equal(measure(next_token, case.with_keywords(**given)), measure(next_token, case))


@law(
    "next_token_probabilities",
    case=next_token_cases(filters=("", "k")),
    mass=choice(0.0, 1e-9, 1e-5),
    needs={"top_p"},
    source="P117, R72",
    relative=False,
    kills=(
        "next_token.py:empty_nucleus",
        "next_token.py:zero_means_no_top_p",
        "next_token.py:nucleus_one_too_large",
        "next_token.py:ties_stay_beyond_p",
    ),
)
def the_smallest_nucleus_is_greedy(next_token: Subject, case: Case, mass: float) -> None:
    """p near 0 leaves one token, and that is of the largest logit."""
    small = case.with_keywords(top_p=mass)
    got, found = next_token(small), choices_of(next_token, small)
    expect_gone(got, ~found.possible)
    expect_between(counted(got, found.possible), 1, found.most, 0.0, what="the number of tokens that stay")


@law(
    "next_token_probabilities",
    case=next_token_cases(filters=("p", "kp"), least=2),
    needs={"top_p"},
    source="P118, R72",
    kills=(
        "next_token.py:nucleus_one_too_small",
        "next_token.py:p_compared_with_each",
        "next_token.py:nucleus_of_the_rest",
        "next_token.py:temperature_after_filters",
    ),
)
def the_nucleus_has_the_mass(next_token: Subject, case: Case) -> None:
    """What top-p leaves of what top-k left had at least the mass p there."""
    mass, _, error, judged = nucleus_of(next_token, case)
    expect_between(mass[judged], case["top_p"] or 0.0, np.inf, error[judged], what="the mass of what stays")


@law(
    "next_token_probabilities",
    case=next_token_cases(filters=("p", "kp"), least=2),
    needs={"top_p"},
    source="P118, R72, B166",
    kills=(
        "next_token.py:nucleus_one_too_large",
        "next_token.py:ties_stay_beyond_p",
        "next_token.py:top_p_of_unfiltered",
        "next_token.py:temperature_after_filters",
    ),
)
def the_nucleus_is_the_smallest(next_token: Subject, case: Case) -> None:
    """Without the least probable of the tokens that stay, the mass would be less than p."""
    mass, least, error, judged = nucleus_of(next_token, case)
    rest = (mass - least)[judged]
    expect_between(rest, -np.inf, case["top_p"] or 0.0, error[judged], what="the mass without the last")


@law(
    "next_token_probabilities",
    case=large_vocabulary_cases(),
    needs={"top_p"},
    source="R72, B190",
    kills=("next_token.py:mass_in_half", "next_token.py:mass_in_bfloat16"),
)
def large_vocabularies_are_cut_at_the_mass(next_token: Subject, case: Case) -> None:
    """Of many thousand tokens, too, the fewest stay that have the mass p."""
    mass, least, error, judged = nucleus_of(next_token, case)
    expect_between(mass[judged], case["top_p"], np.inf, error[judged], what="the mass of what stays")
    expect_between((mass - least)[judged], -np.inf, case["top_p"], error[judged], what="the mass without the last")


def nucleus_of(next_token: Subject, case: Case) -> tuple[np.ndarray, ...]:
    """Mass of what stays, the least of it (inf if alone), the error of both, and rows in which top-k chose alike."""
    case = as_counted(next_token, case)
    stays = next_token(case) > 0
    counts, error = masses_of(next_token, case)
    least = np.where(stays.sum(-1) > 1, np.where(stays, counts, np.inf).min(-1), np.inf)
    return np.where(stays, counts, 0.0).sum(-1), least, error, (~stays | (counts > 0)).all(-1)


@law(
    "next_token_probabilities",
    case=next_token_cases(filters=("p", "kp", "k"), least=2),
    needs={"top_k or top_p"},
    source="P118",
    kills=(
        "next_token.py:least_probable_stay",
        "next_token.py:mass_in_vocabulary_order",
        "next_token.py:order_not_undone",
        "next_token.py:first_token_always_stays",
    ),
)
def no_token_that_goes_is_likelier(next_token: Subject, case: Case) -> None:
    """Every token that stays has at least the logit of every token that goes."""
    case = as_counted(next_token, case)
    stays, present = next_token(case) > 0, case["logits"] > -np.inf
    below, above = interval(case["logits"], case["temperature"], next_token.precision)
    highest = np.where(present & ~stays, below, -np.inf).max(-1)
    expect_between(highest, -np.inf, np.where(stays, above, np.inf).min(-1), 0.0, what="the likeliest that goes")


@law(
    "next_token_probabilities",
    case=next_token_cases(families=MODERATE, filters=("p", "kp"), masses=(0.3, 0.5, 0.1, 0.8), least=2),
    more=choice(0.1, 0.3, 0.6),
    needs={"top_p"},
    source="P118",
    kills=("next_token.py:nucleus_of_the_rest",),
)
def the_nucleus_grows_with_the_mass(next_token: Subject, case: Case, more: float) -> None:
    """More mass never leaves fewer tokens."""
    low = case["top_p"] or 0.0
    wide = case.with_keywords(top_p=min(low + more, 1.0))
    seen, (_, error) = visible(next_token, case), masses_of(next_token, as_counted(next_token, case))
    apart = wide["top_p"] - low > 2 * error
    growth = counted(next_token(wide), seen) - counted(next_token(case), seen)
    expect_between(growth[apart], 0, np.inf, 0.0, what="the number of tokens more")


@law(
    "next_token_probabilities",
    case=next_token_cases(families=MODERATE, filters=("p",), masses=(0.9, 0.5, 0.7, 0.95), least=2),
    factor=choice(2.0, 4.0, 1.25),
    needs={"top_p", "temperature"},
    source="P118",
    kills=("next_token.py:nucleus_at_inverse_temperature",),
)
def the_nucleus_grows_with_temperature(next_token: Subject, case: Case, factor: float) -> None:
    """A higher temperature never leaves fewer tokens of a mass p, but for those that rounding adds."""
    hot, seen = case.with_keywords(temperature=case["temperature"] * factor), visible(next_token, case)
    found = [choices_of(next_token, one) for one in (case, hot)]
    slack = sum(one.most - one.fewest for one in found)
    growth = counted(next_token(hot), seen) - counted(next_token(case), seen)
    expect_between(growth, 0, np.inf, slack, what="the number of tokens more")


@law(
    "next_token_probabilities",
    case=next_token_cases(filters=("kp",), least=2),
    needs={"top_k", "top_p"},
    source="P124, R80, B168",
    kills=(
        "next_token.py:top_p_of_unfiltered",
        "next_token.py:top_p_before_top_k",
        "next_token.py:top_p_without_renormalised_top_k",
    ),
)
def top_p_counts_what_top_k_leaves(next_token: Subject, case: Case) -> None:
    """Both filters are top-p of the logits that top-k leaves: the others count as if they were -inf."""
    both, left = measure(next_token, case), next_token(without(as_counted(next_token, case), "top_p")) > 0
    one_by_one = next_token(without(restricted(case, left), "top_k"))
    # each is one of the choices that the budget admits
    expect_close(one_by_one, both.value, 2 * both.allowed)


@law(
    "next_token_probabilities",
    case=equal_token_cases(),
    needs={"top_p"},
    source="P118, semantics 3.11: the ascending sum at equality",
    relative=False,
    kills=("next_token.py:one_more_at_equality", "next_token.py:nucleus_one_too_large"),
)
def equal_tokens_are_cut_at_equality(next_token: Subject, case: Case) -> None:
    """Of V equal tokens m stay for p = m/V, where 1/V is what each had; of rounded ones perhaps one more."""
    size, p = case.size("V"), next_token.precision
    exact = p.accumulator == case.dtype and bool((next_token(without(case)) == 1 / size).all())
    wanted = max(1.0, (case["top_p"] or 0.0) * size)
    stay = counted(next_token(case), case["logits"] > -np.inf)
    expect_between(stay, wanted, wanted if exact else wanted + 1, 0.0, what="the number of tokens that stay")


@law(
    "next_token_probabilities",
    case=next_token_cases(families=("zipf", "normal", "integers", "sparse"), filters=("",), least=4),
    word=WORDS,
    needs={"top_k or top_p or temperature"},
    source="R09, B187",
    kills=("next_token.py:filters_without_effect",),
)
def every_word_has_influence(next_token: Subject, case: Case, word: str) -> None:
    """k = 2, p = 1/2 or T = 1/4 gives other probabilities, wherever it must."""
    plain = case.with_keywords(temperature=1.0)
    strong = plain.with_keywords(**{word: STRONG[word]})
    one, other = next_token.reference(strong), next_token.reference(plain)
    sure = np.abs(one.value - other.value) > one.allowed + other.allowed
    expect_different(next_token(strong)[sure], next_token(plain)[sure], what=f"{word} = {STRONG[word]}")
