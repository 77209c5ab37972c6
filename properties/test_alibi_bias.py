"""Laws of alibi_bias."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from veriformer.case import Case
from veriformer.expect import expect_between, expect_close, expect_same
from veriformer.law import choice, law
from veriformer.properties.measured import Measured, expect_equal, measure
from veriformer.properties.position_cases import alibi_bias_cases
from veriformer.subject import Subject

SMALLEST_SLOPE = 2.0**-8
"""Of the last head of every power of two, and so of any number of heads."""


@law(
    "alibi_bias",
    case=alibi_bias_cases(keys=2),
    source="Press, Smith, Lewis 2021, section 3 and its code; P46",
    relative=False,
    kills=(
        "alibi.py:starts_at_one",
        "alibi.py:floor_division",
        "alibi.py:half_the_rate",
        "alibi.py:heads_reversed",
        "alibi.py:one_slope_for_all",
        "alibi.py:built_over_queries",
        "alibi.py:any_number_as_a_power_of_two",
        "alibi.py:sign_flipped",
    ),
)
def slopes_are_those_of_the_paper(alibi_bias: Subject, case: Case) -> None:
    """From the last key to the one before it a bias falls by its head's slope: 2^(-8h/H) for a power of two."""
    slopes = rises(measure(alibi_bias, case))[:, -1, -1]
    expect_close(slopes.value, paper_slopes(case["heads"]), slopes.allowed, what="the slope of a head is")


@law(
    "alibi_bias",
    case=alibi_bias_cases(),
    source="Press, Smith, Lewis 2021, its code for any number of heads; P46",
    kills=(
        "alibi.py:any_number_as_a_power_of_two",
        "alibi.py:cut_from_the_next_power",
        "alibi.py:extra_slopes_in_a_row",
        "alibi.py:extra_slopes_sorted_in",
        "alibi.py:starts_at_one",
    ),
)
def heads_come_from_powers_of_two(alibi_bias: Subject, case: Case) -> None:
    """A power of two of heads is every second one of twice as many; other heads follow as every second between."""
    heads = case["heads"]
    lower = 1 << (heads.bit_length() - 1)
    got = measure(alibi_bias, case)
    double = measure(alibi_bias, case.with_keywords(heads=2 * lower))
    expect_equal(got[:lower], double[1::2])
    expect_equal(got[lower:], double[0::2][: heads - lower])


@law(
    "alibi_bias",
    case=alibi_bias_cases(),
    source="P46",
    relative=False,
    kills=("alibi.py:query_one_further", "alibi.py:top_left"),
)
def own_key_has_no_bias(alibi_bias: Subject, case: Case) -> None:
    """A query's bias on the key at its own position is exactly 0; the last query stands at the last key."""
    own = alibi_bias(case)[:, behind(case) == 0]
    expect_same(own, np.zeros(own.shape))


@law(
    "alibi_bias",
    case=alibi_bias_cases(queries=2, keys=2),
    source="P46",
    changes=("alibi",),
    kills=("alibi.py:distance_undeclared", "alibi.py:future_clipped", "alibi.py:later_half_steeper"),
)
def rows_differ_by_a_constant(alibi_bias: Subject, case: Case) -> None:
    """All rows of a head are one row plus a constant each; a declared |distance| is mirrored past the own key."""
    steps = rises(measure(alibi_bias, case))
    turns = (behind(case)[:, 1:] < 0) & (alibi_bias.capabilities.alibi == "distance")
    mirrored = steps * np.where(turns, -1.0, 1.0)
    expect_equal(mirrored, mirrored[:, -1:])


@law(
    "alibi_bias",
    case=alibi_bias_cases(queries=2, keys=2),
    source="P46",
    kills=("alibi.py:positions_in_bfloat16", "alibi.py:later_half_steeper"),
)
def translation_changes_nothing(alibi_bias: Subject, case: Case) -> None:
    """The next query has at the next key the bias that this query has at this key."""
    bias = measure(alibi_bias, case)
    expect_equal(bias[:, 1:, 1:], bias[:, :-1, :-1])


@law(
    "alibi_bias",
    case=alibi_bias_cases(keys=2),
    source="P46",
    relative=False,
    kills=("alibi.py:sign_flipped", "alibi.py:neighbour_free", "alibi.py:built_over_queries"),
)
def nearer_keys_weigh_more(alibi_bias: Subject, case: Case) -> None:
    """Among the keys up to a query's own, a nearer one has the larger bias, by 2^-8 at least."""
    steps = rises(measure(alibi_bias, case))[:, behind(case)[:, 1:] >= 0]
    expect_between(steps.value, SMALLEST_SLOPE, np.inf, steps.allowed, what="from a key to the next the bias rises by")


@law(
    "alibi_bias",
    case=alibi_bias_cases(queries=2),
    fewer=choice(1, 2, 3),
    source="P46",
    kills=("alibi.py:top_left", "alibi.py:built_over_queries"),
)
def fewer_queries_are_the_last_rows(alibi_bias: Subject, case: Case, fewer: int) -> None:
    """A call for fewer queries and as many keys gives the last rows."""
    fewer = min(fewer, case["query_length"])
    part = measure(alibi_bias, case.with_keywords(query_length=fewer))
    expect_equal(part, measure(alibi_bias, case)[:, case["query_length"] - fewer :])


@law(
    "alibi_bias",
    case=alibi_bias_cases(),
    more=choice(1, 2, 17),
    source="P46",
    kills=("alibi.py:shrunk_by_length", "alibi.py:top_left"),
)
def more_keys_change_nothing(alibi_bias: Subject, case: Case, more: int) -> None:
    """Keys before the first one leave the biases of the others as they are."""
    longer = measure(alibi_bias, case.with_keywords(key_length=case["key_length"] + more))
    expect_equal(longer[:, :, more:], measure(alibi_bias, case))


def behind(case: Case) -> np.ndarray:
    """Query position less key position, [Tq, Tk]; query i stands at i + Tk - Tq."""
    queries, keys = case["query_length"], case["key_length"]
    return np.subtract.outer(np.arange(keys - queries, keys), np.arange(keys))


def rises(bias: Measured) -> Measured:
    """What each key has more than the one before it, [H, Tq, Tk - 1]."""
    near, far = bias[..., 1:], bias[..., :-1]
    return Measured(near.value - far.value, near.allowed + far.allowed)


def paper_slopes(heads: int) -> np.ndarray:
    """The slopes, as powers of 2 with the exponents -8h/c and then, between them, -8 (h - 1/2)/c."""
    lower = 2 ** (heads.bit_length() - 1)
    halves = [2 * h for h in range(1, lower + 1)] + [2 * h - 1 for h in range(1, heads - lower + 1)]
    return np.array([2.0 ** float(Fraction(-8 * half, 2 * lower)) for half in halves])
