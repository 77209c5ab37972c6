"""Laws of dropout with given uniform numbers."""

from __future__ import annotations

import numpy as np

from veriformer.case import Case
from veriformer.expect import expect_close, expect_same
from veriformer.law import choice, law
from veriformer.properties.measured import expect_equal, measure
from veriformer.properties.rows_cases import GRID, dropout_cases
from veriformer.subject import Subject

POWERS = {0.0: 1.0, 0.5: 2.0, 0.75: 4.0}
"""Rates by which the kept entries are enlarged by a power of two, without rounding."""


def proper(case: Case) -> bool:
    """Whether x is finite and the uniform numbers lie in [0, 1), as they do unless a case was made smaller."""
    return bool(np.isfinite(case["x"]).all() and (case["uniform"] >= 0).all() and (case["uniform"] < 1).all())


@law(
    "dropout",
    case=dropout_cases(rates=(0.5, 0.75, 0.0), extras=True),
    source="P125, R50",
    relative=False,
    kills=(
        "dropout.py:keeps_what_it_should_drop",
        "dropout.py:drops_where_equal",
        "dropout.py:not_enlarged",
        "dropout.py:divided_by_the_rate",
        "dropout.py:shrunk",
        "dropout.py:one_number_per_row",
        "dropout.py:numbers_of_its_own",
        "dropout.py:tail_untouched",
        "dropout.py:enlarged_before_dropped",
    ),
)
def keeps_exactly_where_uniform_reaches_the_rate(dropout: Subject, case: Case) -> None:
    """Entries are x / (1 - rate) where uniform >= rate, ties included, and 0 elsewhere, to the bit for these rates."""
    if proper(case) and case["rate"] in POWERS:
        enlarged = case["x"] * POWERS[case["rate"]]
        enlarged[np.abs(enlarged) > dropout.largest] *= np.inf
        expect_same(dropout(case), np.where(case["uniform"] >= case["rate"], enlarged, 0.0))


@law(
    "dropout",
    case=dropout_cases(
        rates=(0.25, 0.1, 0.5, 0.9, 0.125, 0.75), families=("normal", "integers", "constant", "large_mean")
    ),
    source="P125, R50",
    kills=(
        "dropout.py:not_enlarged",
        "dropout.py:divided_by_the_rate",
        "dropout.py:shrunk",
        "dropout.py:enlarged_twice",
    ),
)
def kept_entries_are_enlarged_alike(dropout: Subject, case: Case) -> None:
    """What is kept times (1 - rate) is what came in, and what is dropped is exactly 0."""
    if not proper(case) or case["rate"] == 1:
        return
    got, clear = measure(dropout, case), np.abs(case["uniform"] - case["rate"]) * GRID > 0.1
    kept, dropped = clear & (case["uniform"] > case["rate"]), clear & (case["uniform"] < case["rate"])
    expect_equal(got[kept] * (1 - case["rate"]), case["x"][kept])
    expect_same(got.value[dropped], np.zeros_like(got.value[dropped]))


@law(
    "dropout",
    case=dropout_cases(rates=(0.0,), extras=True),
    source="P125, P85, R50, B124",
    relative=False,
    kills=("dropout.py:rate_zero_means_half", "dropout.py:epsilon_in_the_divisor"),
)
def rate_zero_is_the_identity(dropout: Subject, case: Case) -> None:
    """At rate 0 the result is x, bit for bit, whatever the uniform numbers are."""
    if proper(case):
        expect_same(dropout(case.with_keywords(rate=0.0)), case["x"])


@law(
    "dropout",
    case=dropout_cases(rates=(1.0,), extras=True),
    source="P125, R50",
    relative=False,
    kills=("dropout.py:rate_one_unguarded",),
)
def rate_one_gives_zeros(dropout: Subject, case: Case) -> None:
    """At rate 1 the result is 0 throughout."""
    if proper(case):
        got = dropout(case.with_keywords(rate=1.0))
        expect_same(got, np.zeros_like(got))


@law(
    "dropout",
    case=dropout_cases(rates=(0.25, 0.5, 0.75, 0.125)),
    source="P125",
    relative=False,
    kills=("dropout.py:not_enlarged", "dropout.py:keeps_what_it_should_drop", "dropout.py:enlarged_twice"),
)
def mean_is_kept(dropout: Subject, case: Case) -> None:
    """Ones, and uniform numbers that are spread evenly, give the mean 1."""
    if case["rate"] not in (0.25, 0.5, 0.75, 0.125):
        return
    even = case.random().permutation(np.arange(GRID) / GRID)
    got = measure(dropout, case.with_arrays(x=np.ones(GRID), uniform=even))
    expect_close(got.value.mean(), 1.0, got.allowed.mean(), what="the mean")


@law(
    "dropout",
    case=dropout_cases(),
    source="R02, R06",
    kills=("dropout.py:one_number_per_row", "dropout.py:tail_untouched", "dropout.py:numbers_of_its_own"),
)
def each_entry_by_itself(dropout: Subject, case: Case) -> None:
    """Entries in another order and shape, with their uniform numbers, have the same values."""
    if not proper(case):
        return
    order = case.random().permutation(case["x"].size)
    arrays = {name: array.reshape(-1)[order] for name, array in case.arrays.items()}
    moved = measure(dropout, case.with_arrays(**arrays))
    expect_equal(moved, measure(dropout, case).rearranged(lambda array: array.reshape(-1)[order]))


@law(
    "dropout",
    case=dropout_cases(rates=(0.5, 0.25, 0.75, 0.125), extras=True),
    filler=choice(0.0, 1.0, -300.0),
    source="R08",
    relative=False,
    kills=("dropout.py:enlarged_before_dropped", "dropout.py:mean_of_row_added"),
)
def dropped_entries_leave_no_trace(dropout: Subject, case: Case, filler: float) -> None:
    """What stands in the dropped entries changes no bit of the result."""
    changed = case.with_arrays(x=np.where(case["uniform"] < case["rate"], filler, case["x"]))
    if proper(case) and proper(changed):
        expect_same(dropout(case), dropout(changed))


@law(
    "dropout",
    case=dropout_cases(families=("normal", "integers", "constant", "ladder", "large_mean")),
    kind="gradient",
    needs={"gradients"},
    source="B126, R50",
    kills=(
        "rows_vjp.py:dropout_scaled_by_rate",
        "rows_vjp.py:dropout_not_masked_in_backward",
        "rows_vjp.py:dropout_not_enlarged_in_backward",
        "rows_gradient.py:dropout_scaled_by_rate",
        "rows_gradient.py:dropout_other_mask_in_backward",
    ),
)
def gradient_is_dropout_of_the_cotangent(dropout: Subject, case: Case) -> None:
    """dropout is linear: the gradient keeps, drops and enlarges the cotangent as the result does x."""
    if not proper(case):
        return
    cotangent = case.random(3).integers(-3, 4, case["x"].shape).astype(float)
    gradient = dropout.gradients(case, ("x",), cotangent)["x"]
    if gradient is not None:
        same = measure(dropout, case.with_arrays(x=cotangent))
        expect_close(gradient, same.value, 2 * same.allowed, what="the gradient of x")
