"""Laws that log_softmax and logsumexp have to themselves; those shared with softmax are in test_softmax.py."""

from __future__ import annotations

import numpy as np

from veriformer.case import Case
from veriformer.expect import expect_between, expect_close
from veriformer.law import choice, law
from veriformer.properties.cases import softmax_cases
from veriformer.properties.measured import Measured, expect_equal, measure
from veriformer.properties.rows import axis_of, length, measure_rows, rows_of, shifted, taken
from veriformer.subject import Subject


@law(
    "log_softmax",
    case=softmax_cases(axes=True, infinite=0.3),
    source="P18",
    relative=False,
    kills=(
        "softmax.py:log_softmax_base_two",
        "softmax.py:log_softmax_maximum_not_subtracted",
        "softmax.py:log_softmax_tail_dropped",
    ),
)
def exponentials_sum_to_one(log_softmax: Subject, case: Case) -> None:
    """The exponentials of a row sum to 1."""
    got = exponentials(log_softmax, case)
    expect_close(got.value.sum(-1), 1.0, got.allowed.sum(-1), what="the sum of exponentials")


def exponentials(log_softmax: Subject, case: Case) -> Measured:
    """exp(log_softmax), with the reduced axis last."""
    bound = log_softmax.reference(case)
    error = np.exp(bound.value + bound.allowed) - np.exp(bound.value)
    return Measured(rows_of(np.exp(log_softmax(case)), case), rows_of(error, case))


@law(
    "log_softmax",
    case=softmax_cases(axes=True, infinite=0.3),
    source="P18",
    relative=False,
    kills=("softmax.py:log_softmax_tail_dropped",),
)
def never_positive(log_softmax: Subject, case: Case) -> None:
    """A logarithm of a probability is never above 0."""
    got = measure(log_softmax, case)
    expect_between(got.value, -np.inf, 0.0, got.allowed)


@law(
    "log_softmax",
    case=softmax_cases(axes=True, infinite=0.3),
    source="P18",
    kills=("softmax.py:log_softmax_maximum_not_subtracted",),
)
def again_changes_nothing(log_softmax: Subject, case: Case) -> None:
    """log_softmax of a log_softmax is the same log_softmax."""
    once = log_softmax(case)
    twice = measure(log_softmax, case.with_arrays(x=once))
    # The second call takes off the logarithm of the sum that the first one's exponentials have.
    drift = np.log1p(exponentials(log_softmax, case).allowed.sum(-1))
    expect_close(twice.value, once, twice.allowed + np.expand_dims(drift, axis_of(case)))


@law(
    "log_softmax",
    case=softmax_cases(axes=True, infinite=0.3),
    also=("softmax",),
    source="R30",
)
def exponential_is_softmax(log_softmax: Subject, softmax: Subject, case: Case) -> None:
    """The exponential of log_softmax is softmax."""
    expect_equal(exponentials(log_softmax, case), measure_rows(softmax, case))


@law(
    "logsumexp",
    case=softmax_cases(axes=True, infinite=0.3),
    source="P17",
    relative=False,
    kills=("softmax.py:logsumexp_mean_for_sum", "softmax.py:logsumexp_base_two"),
)
def between_max_and_max_plus_log_n(logsumexp: Subject, case: Case) -> None:
    """max x <= logsumexp(x) <= max x + log n, where n counts the entries above -inf."""
    rows = rows_of(case["x"], case)
    top, n = rows.max(-1), (rows > -np.inf).sum(-1)
    got = measure(logsumexp, case)
    expect_between(got.value, top, top + np.log(n), got.allowed)


@law(
    "logsumexp",
    case=softmax_cases(infinite=0.2),
    shift=choice(8.0, -64.0, 1024.0, -8192.0),
    source="P17",
    kills=("softmax.py:logsumexp_tail_counts_phantom_lanes",),
)
def shift_adds(logsumexp: Subject, case: Case, shift: float) -> None:
    """The same number added to every entry of a row is added to its logsumexp."""
    low, high, exact = shifted(case, shift)
    expect_equal(measure(logsumexp, high)[exact], measure(logsumexp, low)[exact] + shift)


@law(
    "logsumexp",
    case=softmax_cases(axes=True, least=2),
    source="P15, R29",
    kills=("softmax.py:logsumexp_tail_dropped",),
)
def merges(logsumexp: Subject, case: Case) -> None:
    """logsumexp over the logsumexps of two parts is that of the whole."""
    if length(case) < 2:
        return
    cut = int(case.random().integers(1, length(case)))
    parts = np.split(np.arange(length(case)), [cut])
    left, right = (measure(logsumexp, taken(case, part)) for part in parts)
    merged = measure(logsumexp, case.with_arrays(x=np.stack([left.value, right.value], axis_of(case))))
    # logsumexp moves no further than the largest move of an entry.
    carried = np.maximum(left.allowed, right.allowed)
    expect_equal(Measured(merged.value, merged.allowed + carried), measure(logsumexp, case))


@law(
    "logsumexp",
    case=softmax_cases(axes=True, infinite=0.2),
    times=choice(2, 3, 5),
    source="P16",
    kills=("softmax.py:logsumexp_maximum_alone", "softmax.py:logsumexp_base_two"),
)
def duplicates_add_log_m(logsumexp: Subject, case: Case, times: int) -> None:
    """A row written m times over has log m added to its logsumexp."""
    copies = taken(case, np.tile(np.arange(length(case)), times))
    expect_equal(measure(logsumexp, copies), measure(logsumexp, case) + np.log(times))


@law(
    "logsumexp",
    case=softmax_cases(axes=True, infinite=0.2, least=2),
    source="P05",
    kills=("softmax.py:logsumexp_nothing_rescaled",),
)
def permutation_changes_nothing(logsumexp: Subject, case: Case) -> None:
    """The order of the entries does not matter."""
    order = case.random().permutation(length(case))
    expect_equal(measure(logsumexp, taken(case, order)), measure(logsumexp, case))
