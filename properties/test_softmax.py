"""Laws of softmax, and those that log_softmax and logsumexp share with it."""

from __future__ import annotations

import numpy as np

from veriformer.case import Case
from veriformer.expect import expect, expect_between, expect_close, expect_finite, expect_same
from veriformer.law import choice, law
from veriformer.properties.cases import TEMPERATURES, softmax_cases
from veriformer.properties.measured import expect_equal, measure
from veriformer.properties.rows import (
    expect_unmoved,
    length,
    measure_rows,
    rows_of,
    shifted,
    taken,
    total_budget,
    uneven,
    with_other_rows_changed,
    with_rows,
)
from veriformer.subject import Subject

FAMILY = ("softmax", "log_softmax", "logsumexp")
FAR = ("huge", "low", "ladder", "large_mean", "one_hot")


@law(
    "softmax",
    case=softmax_cases(axes=True, infinite=0.3, extras=True, temperatures=TEMPERATURES),
    source="Bridle 1990; P01",
    relative=False,
    kills=("softmax.py:softmax_tail_dropped", "softmax.py:softmax_epsilon_in_denominator"),
)
def sums_to_one(softmax: Subject, case: Case) -> None:
    """The probabilities of a row sum to 1."""
    visible = (rows_of(case["x"], case) > -np.inf).sum(-1)
    some = visible > 0
    totals = rows_of(softmax(case), case).sum(-1)
    expect_close(totals[some], 1.0, total_budget(visible[some], softmax.precision), what="the sum of a row")


@law(
    "softmax",
    case=softmax_cases(axes=True, infinite=0.3, extras=True, temperatures=TEMPERATURES),
    source="P02",
    relative=False,
    kills=("softmax.py:softmax_tail_dropped", "softmax.py:softmax_finite_minus_infinity"),
)
def lies_between_zero_and_one(softmax: Subject, case: Case) -> None:
    """A probability is never below 0 and never above 1; at -inf it is exactly 0."""
    got = measure(softmax, case)
    expect_between(got.value, 0.0, np.inf, 0.0)
    expect_between(got.value, -np.inf, 1.0, got.allowed)
    absent = got.value[case["x"] == -np.inf]
    expect_same(absent, np.zeros(absent.shape))


@law(
    FAMILY,
    case=softmax_cases(axes=True, families=FAR, extras=True, temperatures=(1.0, 0.5, 4.0)),
    source="P03, P18, R13",
    relative=False,
    kills=(
        "softmax.py:softmax_no_maximum",
        "softmax.py:log_softmax_no_maximum",
        "softmax.py:log_softmax_log_of_softmax",
        "softmax.py:logsumexp_no_maximum",
        "softmax.py:logsumexp_largest_magnitude",
    ),
)
def finite_for_finite_input(subject: Subject, case: Case) -> None:
    """Finite logits give finite results, however large or far below zero they are."""
    result, rows = rows_of(subject(case), case), rows_of(case["x"], case)
    expect_finite(result[np.isfinite(rows).all(-1)])


@law(
    ("softmax", "log_softmax"),
    case=softmax_cases(infinite=0.2, temperatures=(1.0, 2.0, 0.5)),
    shift=choice(8.0, -64.0, 1024.0, -8192.0),
    source="P04, R28",
    kills=("softmax.py:softmax_logits_clipped", "softmax.py:log_softmax_maximum_not_subtracted"),
)
def shift_changes_nothing(subject: Subject, case: Case, shift: float) -> None:
    """The same number added to every logit of a row changes nothing, where the addition is exact."""
    low, high, exact = shifted(case, shift)
    expect_equal(measure(subject, high)[exact], measure(subject, low)[exact])


@law(
    "softmax",
    case=softmax_cases(axes=True, families=("low",)),
    source="R06, R28",
    relative=False,
    kills=("softmax.py:softmax_tail_counts_phantom_lanes",),
)
def low_rows_keep_their_mass(softmax: Subject, case: Case) -> None:
    """A row whose logits all lie far below zero still sums to 1: absent lanes do not count as 0."""
    totals = rows_of(softmax(case), case).sum(-1)
    expect_close(totals, 1.0, total_budget(length(case), softmax.precision), what="the sum of a row")


@law(
    "softmax",
    case=softmax_cases(axes=True, infinite=0.2, least=2, temperatures=TEMPERATURES),
    source="P05",
    kills=("softmax.py:softmax_nothing_rescaled", "softmax.py:softmax_tail_dropped"),
)
def permutation_equivariance(softmax: Subject, case: Case) -> None:
    """Logits in another order give the same probabilities in that order."""
    order = case.random().permutation(length(case))
    expect_equal(measure_rows(softmax, taken(case, order)), measure_rows(softmax, case)[..., order])


@law(
    "softmax",
    case=softmax_cases(axes=True, infinite=0.2, least=2, temperatures=TEMPERATURES),
    source="P06",
    kills=("softmax.py:softmax_axis_always_last",),
)
def order_is_kept(softmax: Subject, case: Case) -> None:
    """Of two logits in a row the larger has the larger probability."""
    bound = softmax.reference(case)
    # The normaliser is common to the row, hence only what is each entry's own may turn the order.
    own = rows_of(bound.terms["logits"] + bound.terms["output"], case)
    order = np.argsort(rows_of(case["x"], case), axis=-1)
    got, own = (np.take_along_axis(a, order, -1) for a in (rows_of(softmax(case), case), own))
    expect_between(np.diff(got), 0.0, np.inf, own[..., 1:] + own[..., :-1], what="the step to the next larger logit")


@law(
    FAMILY,
    case=softmax_cases(axes=True, least=2, temperatures=TEMPERATURES),
    left=choice(0, 1, 2),
    source="P07, R32",
    kills=(
        "softmax.py:softmax_empty_block_unguarded",
        "softmax.py:softmax_finite_minus_infinity",
        "softmax.py:log_softmax_empty_block_unguarded",
        "softmax.py:logsumexp_empty_block_unguarded",
    ),
)
def minus_infinity_equals_deletion(subject: Subject, case: Case, left: int) -> None:
    """An entry of -inf counts as if it were not there."""
    n, rng = length(case), case.random()
    some = np.sort(rng.permutation(n)[: rng.integers(1, max(n, 2))])
    kept = (np.arange(n - 1, n), np.arange(1), some)[left]
    hidden = np.where(np.isin(np.arange(n), kept), 0.0, -np.inf)
    masked = measure_rows(subject, with_rows(case, rows_of(case["x"], case) + hidden))
    if subject.operation != "logsumexp":
        absent = masked.value[..., hidden < 0]
        expect_same(absent, np.full(absent.shape, 0.0 if subject.operation == "softmax" else -np.inf))
        masked = masked[..., kept]
    expect_equal(masked, measure_rows(subject, taken(case, kept)))


@law(
    "softmax",
    case=softmax_cases(axes=True, infinite=0.2, temperatures=TEMPERATURES),
    times=choice(2, 3, 5),
    source="P16",
    kills=("softmax.py:softmax_tail_dropped", "softmax.py:softmax_tail_counts_phantom_lanes"),
)
def duplicates_share(softmax: Subject, case: Case, times: int) -> None:
    """A row written m times over gives each copy the m-th part."""
    order = np.tile(np.arange(length(case)), times)
    expect_equal(measure_rows(softmax, taken(case, order)), measure_rows(softmax, case)[..., order] * (1 / times))


@law(
    FAMILY,
    case=softmax_cases(axes=True, infinite=0.2, temperatures=TEMPERATURES),
    needs={"axis"},
    source="R05",
    kills=(
        "softmax.py:softmax_axis_always_last",
        "softmax.py:log_softmax_axis_always_last",
        "softmax.py:logsumexp_axis_always_last",
    ),
)
def axes_are_alike(subject: Subject, case: Case) -> None:
    """Along any axis it gives what it gives along the last one of the transposed array."""
    last = case.with_arrays(x=rows_of(case["x"], case)).with_keywords(axis=-1)
    expect_equal(measure_rows(subject, case), measure(subject, last))


@law(
    FAMILY,
    case=softmax_cases(axes=True, infinite=0.2, rows=2, temperatures=TEMPERATURES),
    source="P20, R02",
    changes=("leak",),
    kills=(
        "softmax.py:softmax_denominator_of_first_row",
        "softmax.py:log_softmax_axis_always_last",
        "softmax.py:logsumexp_axis_always_last",
    ),
)
def rows_are_independent(subject: Subject, case: Case) -> None:
    """A row's result does not depend on the other rows."""
    changed, kept = with_other_rows_changed(case)
    expect_unmoved(subject, case, changed, kept)


@law(
    FAMILY,
    case=softmax_cases(
        axes=True, least=2, families=("normal", "integers", "sparse"), layouts=("contiguous", "transposed")
    ),
    kind="gradient",
    needs={"gradients"},
    source="P14, R17",
    relative=False,
    kills=(
        "gradient.py:softmax_contiguous_has_no_backward",
        "gradient.py:log_softmax_has_no_backward",
        "gradient.py:logsumexp_has_no_backward",
    ),
)
def gradient_exists(subject: Subject, case: Case) -> None:
    """The gradient with respect to x arrives, and is not zero throughout."""
    if length(case) < 2:
        return
    found = subject.gradients(case, ("x",), uneven(case))["x"]
    expect(found is not None, "no gradient", "no gradient reached x, wanted one")
    expect(bool(np.any(found)), "no gradient", "the gradient of x is 0 everywhere, wanted a change")


@law(
    FAMILY,
    case=softmax_cases(axes=True, infinite=0.3, extras=True, temperatures=(1.0, 0.5)),
    kind="gradient",
    needs={"gradients"},
    source="R18",
    relative=False,
    kills=("gradient.py:log_softmax_divides_by_probability",),
)
def gradient_is_finite(subject: Subject, case: Case) -> None:
    """The gradient is finite, beside entries of -inf as well."""
    found = subject.gradients(case, ("x",), uneven(case))["x"]
    if found is not None:
        expect_finite(found, what="the gradient of x")


@law(
    "softmax",
    case=softmax_cases(axes=True, infinite=0.4, always=True, least=2, temperatures=(1.0, 0.5)),
    kind="gradient",
    needs={"gradients"},
    source="P14",
    relative=False,
    kills=(
        "gradient.py:softmax_zero_times_log",
        "gradient.py:softmax_straight_through",
    ),
)
def gradient_is_zero_at_minus_infinity(softmax: Subject, case: Case) -> None:
    """No gradient reaches an entry of -inf."""
    found = softmax.gradients(case, ("x",), uneven(case))["x"]
    if found is not None:
        absent = found[case["x"] == -np.inf]
        expect_same(absent, np.zeros(absent.shape), what="the gradient of x")
