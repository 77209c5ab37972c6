"""Gradients of the softmax family: what holds of them without knowing their values."""

from __future__ import annotations

import numpy as np

from veriformer.case import Case, round_to
from veriformer.expect import expect_same
from veriformer.law import choice, law
from veriformer.properties.attention_cases import PICKS
from veriformer.properties.cases import softmax_cases
from veriformer.properties.cotangents import cotangent_of, graded
from veriformer.properties.measured import Measured, expect_equal
from veriformer.properties.rows import rows_of, shifted, with_rows
from veriformer.subject import Subject

FAMILY = ("softmax", "log_softmax", "logsumexp")
TEMPERATURES = (1.0, 0.5, 3.0)
NEEDS = frozenset({"gradients", "torch"})


def cotangent_for(case: Case, pick: int) -> np.ndarray:
    """A cotangent, 0 where log_softmax is -inf and has no derivative."""
    cotangent = cotangent_of(case, pick)
    return np.where(case["x"] == -np.inf, 0.0, cotangent) if case.operation == "log_softmax" else cotangent


def row_gradients(subject: Subject, case: Case, cotangent: np.ndarray) -> Measured:
    """The gradient by x and its error budget, with the reduced axis last."""
    return graded(subject, case, ("x",), cotangent)["x"].rearranged(lambda array: rows_of(array, case))


def summed(rows: Measured, weights: np.ndarray | float = 1.0) -> Measured:
    """The sum of weights · rows over the last axis."""
    return (rows * weights).rearranged(lambda each: each.sum(-1))


@law(
    ("softmax", "log_softmax"),
    case=softmax_cases(axes=True, infinite=0.2, temperatures=TEMPERATURES),
    pick=PICKS,
    kind="gradient",
    needs=NEEDS,
    source="P14, R16",
    kills=(
        "softmax_backward.py:softmax_average_omitted",
        "softmax_backward.py:softmax_average_over_the_last_axis",
        "softmax_backward.py:log_softmax_sum_omitted",
        "vjp.py:softmax_vjp_overwrites_the_cotangent",
    ),
)
def gradient_sums_to_zero(subject: Subject, case: Case, pick: int) -> None:
    """The gradient of a row sums to 0, because adding one number to all its logits changes nothing."""
    expect_equal(summed(row_gradients(subject, case, cotangent_for(case, pick))), 0.0, what="the sum of a row is")


@law(
    "logsumexp",
    case=softmax_cases(axes=True, infinite=0.2),
    pick=PICKS,
    kind="gradient",
    needs=NEEDS,
    source="P17",
    kills=(
        "softmax_backward.py:logsumexp_unnormalised",
        "softmax_backward.py:logsumexp_cotangent_of_first_row",
        "vjp.py:logsumexp_vjp_forgets_the_cotangent",
    ),
)
def gradient_sums_to_the_cotangent(logsumexp: Subject, case: Case, pick: int) -> None:
    """The gradient of a row sums to its cotangent: a number added to all logits is added to the result."""
    cotangent = cotangent_for(case, pick)
    expect_equal(summed(row_gradients(logsumexp, case, cotangent)), cotangent, what="the sum of a row is")


@law(
    "logsumexp",
    case=softmax_cases(axes=True, infinite=0.2),
    pick=PICKS,
    also=("softmax",),
    kind="gradient",
    needs=NEEDS,
    source="P17, R30",
    kills=("softmax_backward.py:logsumexp_uniform", "softmax_backward.py:logsumexp_of_the_largest"),
)
def gradient_is_the_softmax(logsumexp: Subject, softmax: Subject, case: Case, pick: int) -> None:
    """The gradient is the softmax of the row times the cotangent."""
    cotangent = cotangent_for(case, pick)
    results, bounds = softmax.with_bounds(case.as_operation("softmax"))
    wanted = Measured(*(rows_of(part, case) for part in (results[0], bounds[0].allowed)))
    expect_equal(row_gradients(logsumexp, case, cotangent), wanted * cotangent[..., None])


@law(
    "softmax",
    case=softmax_cases(axes=True, infinite=0.2, temperatures=TEMPERATURES),
    pick=PICKS,
    other=choice(5, 0, 7, 2),
    kind="gradient",
    needs=NEEDS,
    source="P14",
    kills=(
        "softmax_backward.py:softmax_probability_omitted",
        "softmax_backward.py:softmax_plain_average",
        "vjp.py:softmax_vjp_plain_average",
    ),
)
def jacobian_is_symmetric(softmax: Subject, case: Case, pick: int, other: int) -> None:
    """The gradient for a, weighed by b, is the gradient for b, weighed by a."""
    a, b = (cotangent_for(case, number) for number in (pick, other + 16))
    one, two = (row_gradients(softmax, case, cotangent) for cotangent in (a, b))
    expect_equal(summed(one, rows_of(b, case)), summed(two, rows_of(a, case)), what="b J a is")


@law(
    FAMILY,
    case=softmax_cases(infinite=0.2, temperatures=TEMPERATURES),
    shift=choice(8.0, -64.0, 1024.0, -8192.0),
    kind="gradient",
    needs=NEEDS,
    source="P04, R28",
    kills=("softmax_backward.py:softmax_without_maximum", "softmax_backward.py:log_softmax_without_maximum"),
)
def gradient_is_shift_invariant(subject: Subject, case: Case, shift: float) -> None:
    """The same number added to every logit of a row leaves its gradient as it is, where the addition is exact."""
    low, high, exact = shifted(case, shift)
    cotangent = cotangent_for(case, 0)
    one, two = (row_gradients(subject, each, cotangent)[exact] for each in (low, high))
    expect_equal(two, one)


@law(
    "softmax",
    case=softmax_cases(axes=True, infinite=0.2),
    factor=choice(2.0, 0.25, 8.0),
    pick=PICKS,
    kind="gradient",
    needs=NEEDS | {"temperature"},
    source="P10, P14",
    kills=("softmax_backward.py:softmax_temperature_omitted", "softmax_backward.py:softmax_temperature_twice"),
)
def gradient_scales_with_the_temperature(softmax: Subject, case: Case, factor: float, pick: int) -> None:
    """T times the gradient at temperature T is the gradient for x / T at temperature 1; powers of two, exact ones."""
    cotangent = cotangent_for(case, pick)
    divided = round_to(case["x"] / factor, case.dtype)
    warm = case.with_arrays(x=divided * factor).with_keywords(temperature=factor)
    cold = case.with_arrays(x=divided).with_keywords(temperature=1.0)
    exact = rows_of(warm["x"] == cold["x"] * factor, case).all(-1)
    one, two = (row_gradients(softmax, each, cotangent)[exact] for each in (warm, cold))
    expect_equal(one * factor, two)


@law(
    FAMILY,
    case=softmax_cases(axes=True, infinite=0.2, rows=2, temperatures=TEMPERATURES),
    pick=PICKS,
    kind="gradient",
    needs={"gradients"},
    source="P20, R02",
    relative=False,
    kills=(
        "softmax_backward.py:softmax_average_over_the_last_axis",
        "softmax_backward.py:logsumexp_cotangent_of_first_row",
        "softmax_backward.py:log_softmax_sum_over_all",
    ),
)
def rows_without_cotangent_pass_nothing_on(subject: Subject, case: Case, pick: int) -> None:
    """A row whose cotangent is 0 has a gradient of exactly 0, whatever the other rows' cotangents are."""
    rows = rows_of(case["x"], case)
    silent = case.random(pick).permutation(rows[..., 0].size).reshape(rows.shape[:-1]) % 2 == 0
    cotangent = cotangent_for(case, 5 * pick)
    if subject.operation == "logsumexp":
        cotangent = np.where(silent, 0.0, cotangent)
    else:
        cotangent = with_rows(case, np.where(silent[..., None], 0.0, rows_of(cotangent, case)))["x"]
    found = subject.gradients(case, ("x",), cotangent)["x"]
    if found is not None:
        found = rows_of(found, case)[silent]
        expect_same(found, np.zeros(found.shape), what="the gradient of a row without cotangent is")
