"""Laws of cross entropy that speak of rows: ignored ones, each by itself, and what becomes of them together."""

from __future__ import annotations

import numpy as np

from veriformer.case import Case
from veriformer.expect import expect_same
from veriformer.law import SINGLE, choice, law
from veriformer.properties.loss_cases import cross_entropy_cases, many_row_cases
from veriformer.properties.loss_changes import (
    added,
    divisor,
    expect_influence,
    filled,
    kept_rows,
    losses,
    parts_of,
    reduced,
    row_losses,
    taken,
    with_other_rows_changed,
)
from veriformer.properties.measured import expect_equal, expect_unmoved
from veriformer.subject import Subject

SOME = ("some", "first", "last")
SUMMED = ("mean", "sum")


@law(
    "cross_entropy",
    case=cross_entropy_cases(rows=2, ignoring=SOME, epsilons=(0.1, 0.0, 0.4)),
    filler=choice(0.0, 3.0, -300.0),
    needs={"ignore_index"},
    source="P37, R08, R34, B053, B054, B065",
    changes=("leak",),
    kills=(
        "cross_entropy.py:smoothing_counts_ignored_rows",
        "cross_entropy.py:smoothing_is_the_mean_of_all_rows",
        "cross_entropy.py:condition_inverted",
    ),
)
def ignored_rows_leave_no_trace(cross_entropy: Subject, case: Case, filler: float) -> None:
    """What the logits of an ignored row are changes nothing."""
    if not kept_rows(case).all():
        expect_unmoved(cross_entropy, case, filled(case, filler))


@law(
    "cross_entropy",
    case=cross_entropy_cases(rows=2, ignoring=SOME, epsilons=(0.1, 0.0, 0.4)),
    filler=choice(np.nan, np.inf, -np.inf),
    needs={"ignore_index", "nan_contained"},
    source="P37",
    relative=False,
    kills=("cross_entropy.py:ignored_rows_times_zero",),
)
def nan_in_an_ignored_row_stays_there(cross_entropy: Subject, case: Case, filler: float) -> None:
    """NaN and infinities in an ignored row change nothing, if that is declared."""
    if not kept_rows(case).all():
        expect_same(cross_entropy(filled(case, filler)), cross_entropy(case))


@law(
    "cross_entropy",
    case=cross_entropy_cases(rows=2, ignoring=SOME, epsilons=(0.1, 0.0, 0.4)),
    needs={"ignore_index"},
    source="P37, R34, B053, B055, B066",
    kills=(
        "cross_entropy.py:divided_by_all_rows",
        "cross_entropy.py:smoothing_is_the_mean_of_all_rows",
        "cross_entropy.py:ignores_nothing_beside_smoothing",
    ),
)
def ignored_rows_can_be_deleted(cross_entropy: Subject, case: Case) -> None:
    """Rows that are ignored are as if they were not there; by itself such a row has the loss 0."""
    kept = kept_rows(case)
    if not kept.any() or kept.all():
        return
    whole, without = losses(cross_entropy, case), losses(cross_entropy, taken(case, np.flatnonzero(kept)))
    if case["reduction"] == "none":
        expect_same(whole.value[~kept], np.zeros((~kept).sum()), what="an ignored row")
        whole = whole[kept]
    expect_equal(whole, without)


@law(
    "cross_entropy",
    case=cross_entropy_cases(ignoring=("all",)),
    needs={"ignore_index"},
    source="P37, B056",
    relative=False,
    changes=("all_ignored",),
    kills=("cross_entropy.py:count_at_least_one", "cross_entropy.py:condition_inverted"),
)
def nothing_kept_gives_what_is_declared(cross_entropy: Subject, case: Case) -> None:
    """Where every row is ignored the mean is NaN, or 0 if that is declared; the sum and the rows are 0."""
    if not kept_rows(case).any():
        expect_same(cross_entropy(case), cross_entropy.reference(case).value)


@law(
    "cross_entropy",
    case=cross_entropy_cases(reductions=SUMMED),
    needs={"reduction"},
    source="P37, P39, B076, B077, B079",
    kills=(
        "cross_entropy.py:sum_is_a_mean",
        "cross_entropy.py:mean_of_the_means_of_chunks",
        "cross_entropy.py:first_row_dropped_but_counted",
        "cross_entropy.py:divided_by_all_rows",
    ),
)
def rows_add_up(cross_entropy: Subject, case: Case) -> None:
    """The sum is that of the losses of the rows, and the mean that over the number of rows kept."""
    if kept_rows(case).any():
        expect_equal(losses(cross_entropy, case), reduced(row_losses(cross_entropy, case), case))


@law(
    "cross_entropy",
    case=cross_entropy_cases(rows=2, reductions=SUMMED),
    source="P39, R36, B077",
    kills=("cross_entropy.py:mean_of_the_means_of_chunks", "cross_entropy.py:last_rows_dropped"),
)
def parts_add_up(cross_entropy: Subject, case: Case) -> None:
    """Sums over the parts of a batch add up to that of the whole, and means weighed by the rows that each part kept."""
    if case["reduction"] == "none" or not kept_rows(case).any():
        return
    counted = case["reduction"] == "sum"
    parts = [taken(case, rows) for rows in parts_of(case, 3)]
    parts = [part for part in parts if counted or kept_rows(part).any()]
    found = [losses(cross_entropy, part) * (divisor(part) / divisor(case)) for part in parts]
    expect_equal(losses(cross_entropy, case), added(found))


@law(
    "cross_entropy",
    case=cross_entropy_cases(),
    times=choice(2, 3),
    source="R35, B066, B079",
    kills=("cross_entropy.py:divided_by_the_classes", "cross_entropy.py:mean_of_the_means_of_chunks"),
)
def a_repeated_batch_has_the_same_mean(cross_entropy: Subject, case: Case, times: int) -> None:
    """A batch written m times over has the same mean, m times the sum, and the same losses m times."""
    if kept_rows(case).any():
        rows = np.tile(np.arange(case.size("N")), times)
        once, again = losses(cross_entropy, case), losses(cross_entropy, taken(case, rows))
        wanted = {"mean": once, "sum": once * times, "none": once.rearranged(lambda array: np.tile(array, times))}
        expect_equal(again, wanted[case["reduction"]])


@law(
    "cross_entropy",
    case=cross_entropy_cases(rows=2, reductions=("none",)),
    needs={"reduction"},
    source="R02, R37, B072, B074, B075",
    changes=("leak",),
    kills=("cross_entropy.py:targets_shifted", "cross_entropy.py:maximum_of_the_batch"),
)
def each_row_by_itself(cross_entropy: Subject, case: Case) -> None:
    """The loss of a row does not depend on the logits and targets of others."""
    if case["reduction"] == "none":
        changed, same = with_other_rows_changed(case)
        expect_unmoved(cross_entropy, case, changed, same)


@law(
    "cross_entropy",
    case=cross_entropy_cases(ignoring=("none",), epsilons=(0.0,), rows=2, least=2, reductions=("sum", "none", "mean")),
    needs={"ignore_index", SINGLE},
    source="R09",
    relative=False,
    kills=("cross_entropy.py:ignores_minus_one_hundred_only",),
)
def ignore_index_has_influence(cross_entropy: Subject, case: Case) -> None:
    """To ignore a class that is a target changes the loss."""
    target = int(case["targets"][0])
    expect_influence(cross_entropy, case, case.with_keywords(ignore_index=target), "ignore_index")


@law(
    "cross_entropy",
    case=cross_entropy_cases(rows=2, reductions=SUMMED),
    needs={"reduction", SINGLE},
    source="R09, B079",
    relative=False,
    kills=("cross_entropy.py:sum_is_a_mean",),
)
def reduction_has_influence(cross_entropy: Subject, case: Case) -> None:
    """The sum is not the mean."""
    if kept_rows(case).any():
        expect_influence(
            cross_entropy, case.with_keywords(reduction="mean"), case.with_keywords(reduction="sum"), "reduction"
        )


@law(
    "cross_entropy",
    case=many_row_cases(),
    source="P37, P39",
    kills=("cross_entropy.py:rows_counted_in_eight_bits",),
)
def the_mean_counts_every_row(cross_entropy: Subject, case: Case) -> None:
    """The mean over thousands of equal rows is the loss of one."""
    same = (case["logits"] == case["logits"][:1]).all() and (case["targets"] == case["targets"][:1]).all()
    if same and kept_rows(case).any() and case["reduction"] == "mean":
        expect_equal(losses(cross_entropy, case), losses(cross_entropy, taken(case, np.arange(1))))
