"""Gradients of cross entropy: the target distribution that they imply, rows that get none, cotangents of rows."""

from __future__ import annotations

import numpy as np

from veriformer.case import Case
from veriformer.expect import expect, expect_finite, expect_same
from veriformer.law import choice, law
from veriformer.properties.attention_cases import PICKS
from veriformer.properties.cotangents import cotangent_of, graded
from veriformer.properties.loss_cases import FEW_CLASSES, cross_entropy_cases
from veriformer.properties.loss_changes import (
    divisor,
    filled,
    kept_rows,
    parts_of,
    probabilities,
    taken,
    targets_of,
    with_absent,
)
from veriformer.properties.measured import Measured, expect_equal
from veriformer.subject import Subject

NEEDS = frozenset({"gradients", "torch"})
SOME = ("some", "first", "last")
SUMMED = ("mean", "sum")
MODERATE = ("zipf", "integers", "normal", "halves", "sparse", "one_hot", "constant")
WHAT = "the gradient of logits"


def gradient(subject: Subject, case: Case, cotangent: np.ndarray) -> Measured:
    """The gradient by the logits and its error budget, [N,V]."""
    return graded(subject, case, ("logits",), cotangent)["logits"]


def plainly(subject: Subject, case: Case, cotangent: np.ndarray) -> np.ndarray:
    """The gradient by the logits alone; zeros where there is none."""
    found = subject.gradients(case, ("logits",), cotangent)["logits"]
    return np.zeros(case["logits"].shape) if found is None else np.asarray(found)


@law(
    "cross_entropy",
    case=cross_entropy_cases(shapes=FEW_CLASSES, epsilons=(0.1, 0.4, 0.0, 0.9), infinite=0.0, families=MODERATE),
    kind="gradient",
    needs=NEEDS,
    source="P31, P34, R33, B067",
    changes=("smoothing",),
    kills=(
        "cross_entropy_gradient.py:smoothing_over_the_others_in_backward",
        "cross_entropy_gradient.py:smoothing_forgotten_in_backward",
        "cross_entropy_gradient.py:next_class_in_backward",
        "cross_entropy_gradient.py:sign_turned",
    ),
)
def the_implied_target_is_the_declared_one(cross_entropy: Subject, case: Case) -> None:
    """softmax less the gradient of a row's loss is the target distribution: not negative, of sum 1, and as declared."""
    kept, ones = kept_rows(case), np.ones(case["targets"].shape if case["reduction"] == "none" else ())
    if kept.any():
        rows = gradient(cross_entropy, case, ones) * divisor(case)
        implied = Measured(probabilities(case) - rows.value, rows.allowed)
        expect_equal(implied[kept], targets_of(cross_entropy, case)[kept], what="the implied target is")


@law(
    "cross_entropy",
    case=cross_entropy_cases(),
    pick=PICKS,
    kind="gradient",
    needs=NEEDS,
    source="P31, R16",
    kills=(
        "cross_entropy_gradient.py:target_share_not_taken_off",
        "cross_entropy_gradient.py:probabilities_not_normalised",
    ),
)
def gradient_sums_to_zero(cross_entropy: Subject, case: Case, pick: int) -> None:
    """The gradient of a row sums to 0, because adding one number to all its logits changes nothing."""
    rows = gradient(cross_entropy, case, cotangent_of(case, pick))
    expect_equal(rows.rearranged(lambda array: array.sum(-1)), 0.0, what="the sum of a row is")


@law(
    "cross_entropy",
    case=cross_entropy_cases(rows=2, ignoring=SOME),
    kind="gradient",
    needs={"gradients", "ignore_index"},
    source="P31, P37, B053, B054",
    relative=False,
    kills=(
        "cross_entropy_gradient.py:ignored_rows_are_trained",
        "cross_entropy_gradient.py:smoothing_in_ignored_rows",
    ),
)
def ignored_rows_get_no_gradient(cross_entropy: Subject, case: Case) -> None:
    """The gradient of an ignored row is exactly 0."""
    ignored = ~kept_rows(case)
    found = plainly(cross_entropy, case, cotangent_of(case, 4))
    expect_same(found[ignored], np.zeros(found[ignored].shape), what=WHAT)


@law(
    "cross_entropy",
    case=cross_entropy_cases(rows=2, ignoring=SOME),
    filler=choice(np.nan, np.inf, -np.inf),
    kind="gradient",
    needs={"gradients", "ignore_index", "nan_contained"},
    source="P37",
    relative=False,
    kills=("cross_entropy_gradient.py:ignored_rows_times_zero_in_backward",),
)
def nan_in_an_ignored_row_reaches_no_gradient(cross_entropy: Subject, case: Case, filler: float) -> None:
    """NaN and infinities in an ignored row leave its gradient 0 and all others as they were, if that is declared."""
    cotangent = cotangent_of(case, 4)
    expect_same(plainly(cross_entropy, filled(case, filler), cotangent), plainly(cross_entropy, case, cotangent))


@law(
    "cross_entropy",
    case=cross_entropy_cases(rows=2, ignoring=SOME, examples=8),
    kind="gradient",
    needs=NEEDS | {"ignore_index"},
    source="P37, R34, B066",
    kills=(
        "cross_entropy_gradient.py:divided_by_all_rows_in_backward",
        "cross_entropy_gradient.py:smoothing_divided_by_all_rows_in_backward",
    ),
)
def ignored_rows_change_no_gradient(cross_entropy: Subject, case: Case) -> None:
    """The gradient of the rows that are kept is what it is without the others."""
    kept = kept_rows(case)
    if kept.any() and not kept.all():
        alone, cotangent = taken(case, np.flatnonzero(kept)), cotangent_of(case, 4)
        few = cotangent[kept] if case["reduction"] == "none" else cotangent
        expect_equal(gradient(cross_entropy, case, cotangent)[kept], gradient(cross_entropy, alone, few))


@law(
    "cross_entropy",
    case=cross_entropy_cases(ignoring=("all",)),
    kind="gradient",
    needs={"gradients", "ignore_index"},
    source="P31, B056",
    relative=False,
    kills=("cross_entropy_gradient.py:zero_by_zero_in_backward",),
)
def nothing_kept_has_no_gradient(cross_entropy: Subject, case: Case) -> None:
    """Where every row is ignored the gradient is 0, though the mean be NaN."""
    if not kept_rows(case).any():
        expect_same(plainly(cross_entropy, case, cotangent_of(case, 4)), np.zeros(case["logits"].shape), what=WHAT)


@law(
    "cross_entropy",
    case=cross_entropy_cases(rows=2, reductions=("none",), examples=8),
    pick=PICKS,
    kind="gradient",
    needs=NEEDS | {"reduction"},
    source="R15, B057",
    kills=(
        "cross_entropy_gradient.py:first_cotangent_for_all",
        "cross_entropy_gradient.py:mean_of_the_cotangent",
    ),
)
def each_row_has_its_own_cotangent(cross_entropy: Subject, case: Case, pick: int) -> None:
    """Without reduction the gradient of a row is its own cotangent times what it is for ones."""
    if case["reduction"] == "none":
        cotangent = cotangent_of(case, pick)
        unit = gradient(cross_entropy, case, np.ones(cotangent.shape))
        expect_equal(gradient(cross_entropy, case, cotangent), unit * cotangent[:, None])


@law(
    "cross_entropy",
    case=cross_entropy_cases(reductions=SUMMED, examples=8),
    kind="gradient",
    needs=NEEDS | {"reduction"},
    source="P31, P39",
    kills=(
        "cross_entropy_gradient.py:mean_not_divided_in_backward",
        "cross_entropy_gradient.py:divided_by_all_rows_in_backward",
    ),
)
def the_mean_shares_the_gradient_of_the_sum(cross_entropy: Subject, case: Case) -> None:
    """The gradient of the mean is that of the sum over the number of rows kept."""
    count = int(kept_rows(case).sum())
    if count:
        one, other = (gradient(cross_entropy, case.with_keywords(reduction=r), np.ones(())) for r in SUMMED)
        expect_equal(one * count, other)


@law(
    "cross_entropy",
    case=cross_entropy_cases(rows=3, reductions=("sum", "mean"), examples=6),
    kind="gradient",
    needs=NEEDS,
    source="P39, R36, B077",
    kills=("cross_entropy_gradient.py:last_rows_without_gradient",),
)
def gradients_of_parts_are_parts_of_the_gradient(cross_entropy: Subject, case: Case) -> None:
    """The parts of a batch have together the gradient of the whole, a mean weighed by the rows that each part kept."""
    count = int(kept_rows(case).sum())
    if case["reduction"] == "none" or not count:
        return
    whole = gradient(cross_entropy, case, np.ones(()))
    for rows in parts_of(case, 3):
        part = taken(case, rows)
        weight = kept_rows(part).sum() / count if case["reduction"] == "mean" else 1.0
        if weight:
            expect_equal(gradient(cross_entropy, part, np.ones(())) * weight, whole[rows])


@law(
    "cross_entropy",
    case=cross_entropy_cases(families=("huge", "low", "one_hot", "ladder", "normal"), infinite=0.3),
    kind="gradient",
    needs={"gradients"},
    source="P38, R18, B071",
    relative=False,
    kills=("cross_entropy_gradient.py:divides_by_the_probability",),
)
def gradient_is_finite(cross_entropy: Subject, case: Case) -> None:
    """The gradient is finite, far from the target and beside classes of -inf as well."""
    ones = np.ones(case["targets"].shape if case["reduction"] == "none" else ())
    expect_finite(plainly(cross_entropy, case, ones), what=WHAT)


@law(
    "cross_entropy",
    case=cross_entropy_cases(least=3, epsilons=(0.0,), infinite=0.0, families=MODERATE),
    kind="gradient",
    needs={"gradients"},
    source="P40",
    relative=False,
    kills=("cross_entropy_gradient.py:probabilities_floored",),
)
def absent_classes_get_no_gradient(cross_entropy: Subject, case: Case) -> None:
    """A class of -inf that is nobody's target gets exactly 0."""
    unwanted = np.setdiff1d(np.arange(case.size("V")), case["targets"][kept_rows(case)])
    if unwanted.size and not case["label_smoothing"]:
        found = plainly(cross_entropy, with_absent(case, unwanted[:1]), cotangent_of(case, 4))
        expect_same(found[:, unwanted[0]], np.zeros(len(found)), what=WHAT)


@law(
    "cross_entropy",
    case=cross_entropy_cases(least=2, families=MODERATE, infinite=0.0, layouts=("contiguous", "transposed")),
    kind="gradient",
    needs={"gradients"},
    source="R17",
    relative=False,
    kills=("cross_entropy_gradient.py:no_gradient_without_reduction",),
)
def gradient_exists(cross_entropy: Subject, case: Case) -> None:
    """The gradient with respect to the logits arrives, and is not zero throughout."""
    if kept_rows(case).any() and np.abs(probabilities(case) - targets_of(cross_entropy, case)).max() > 0.01:
        ones = np.ones(case["targets"].shape if case["reduction"] == "none" else ())
        found = cross_entropy.gradients(case, ("logits",), ones)["logits"]
        expect(found is not None, "no gradient", "no gradient reached logits, wanted one")
        expect(bool(np.any(found)), "no gradient", "the gradient of logits is 0 everywhere, wanted a change")
