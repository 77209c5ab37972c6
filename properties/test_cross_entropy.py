"""Laws of cross entropy that speak of classes: smoothing, shifts, names, absent and hopeless ones."""

from __future__ import annotations

import numpy as np

from veriformer.case import Case
from veriformer.expect import expect_between, expect_finite, expect_same
from veriformer.law import SINGLE, choice, law
from veriformer.properties.claimed import expect_declared_precision
from veriformer.properties.loss_cases import FEW_CLASSES, cross_entropy_cases, dense_loss_cases
from veriformer.properties.loss_changes import (
    UNUSED,
    expect_influence,
    kept_rows,
    losses,
    row_losses,
    shifted,
    targets_of,
    total,
    with_absent,
    with_classes,
)
from veriformer.properties.measured import expect_equal
from veriformer.subject import Subject

MODERATE = ("zipf", "integers", "normal", "halves", "sparse", "constant", "one_hot")
FAR = ("huge", "low", "one_hot", "huge", "ladder")
FAR_SHAPES = ((1, 2), (1, 3), (3, 2), (2, 7), (5, 9), (17, 5), (9, 33), (33, 3), (4, 129), (2, 257))
SMOOTHED = (0.1, 0.4, 0.9)


@law(
    "cross_entropy",
    case=cross_entropy_cases(shapes=FEW_CLASSES, epsilons=(*SMOOTHED, 0.0), infinite=0.0),
    needs={"reduction"},
    source="P33, P34, R39, B067",
    changes=("smoothing",),
    kills=(
        "cross_entropy.py:smoothing_over_the_others",
        "cross_entropy.py:last_class_shares_nothing",
        "cross_entropy.py:epsilon_not_taken_off",
        "cross_entropy.py:mean_before_the_logarithm",
    ),
)
def smoothing_weighs_the_losses_of_all_classes(cross_entropy: Subject, case: Case) -> None:
    """The loss of a row is the mean of the losses that each class would have as its target, weighed as is declared."""
    kept, size = kept_rows(case), case.size("V")
    q, n = targets_of(cross_entropy, case)[kept], int(kept.sum())
    each = case.with_arrays(logits=case["logits"][kept].repeat(size, 0), targets=np.tile(np.arange(size), n))
    hard = row_losses(cross_entropy, each.with_keywords(label_smoothing=0.0, ignore_index=UNUSED))
    weighed = hard.rearranged(lambda array: array.reshape(n, size)) * q
    expect_equal(row_losses(cross_entropy, case)[kept], weighed.rearranged(lambda array: array.sum(-1)))


@law(
    "cross_entropy",
    case=cross_entropy_cases(infinite=0.0, epsilons=(0.0, *SMOOTHED)),
    source="P35, B069, B070",
    relative=False,
    kills=("cross_entropy.py:classes_counted_in_rows", "cross_entropy.py:logarithm_to_base_two"),
)
def uniform_logits_cost_log_v(cross_entropy: Subject, case: Case) -> None:
    """Where all classes have the same logit every kept row costs log V, whatever the smoothing."""
    if kept_rows(case).any():
        uniform = case.with_arrays(logits=case["logits"][:, :1].repeat(case.size("V"), 1))
        wanted = np.where(kept_rows(case), np.log(case.size("V")), 0.0)
        expect_equal(losses(cross_entropy, uniform), total(wanted, case))


@law(
    "cross_entropy",
    case=cross_entropy_cases(infinite=0.0, epsilons=(0.1, 0.4, 0.0, 0.9)),
    source="P32",
    relative=False,
    changes=("smoothing",),
    kills=("cross_entropy.py:entropy_subtracted", "cross_entropy.py:target_has_no_share"),
)
def never_below_the_entropy_of_the_target(cross_entropy: Subject, case: Case) -> None:
    """No loss is below the entropy of the target distribution, not even where softmax is that distribution."""
    if not kept_rows(case).any():
        return
    q = targets_of(cross_entropy, case)
    log_q = np.log(np.where(q > 0, q, 1.0))
    least = total(-(q * log_q).sum(-1), case)
    for logits in (case["logits"], np.where(q > 0, log_q, -60.0)):
        got = losses(cross_entropy, case.with_arrays(logits=logits))
        expect_between(got.value, least, np.inf, got.allowed)


@law(
    "cross_entropy",
    case=cross_entropy_cases(infinite=0.1),
    shift=choice(8.0, -64.0, 1024.0, -8192.0),
    source="P36, R28, R38",
    kills=(
        "cross_entropy.py:maximum_not_subtracted",
        "cross_entropy.py:logits_clipped",
        "cross_entropy.py:tail_counts_phantom_lanes",
        "cross_entropy.py:cap_reaches_phantom_lanes",
    ),
)
def shift_changes_nothing(cross_entropy: Subject, case: Case, shift: float) -> None:
    """The same number added to every logit changes nothing, where the addition is exact."""
    low, high, exact = shifted(case, shift)
    if exact:
        expect_equal(losses(cross_entropy, high), losses(cross_entropy, low))


@law(
    "cross_entropy",
    case=cross_entropy_cases(least=2, infinite=0.1),
    source="P36, R77",
    kills=(
        "cross_entropy.py:last_class_never",
        "cross_entropy.py:targets_in_two_bits",
        "cross_entropy.py:targets_count_from_one",
    ),
)
def classes_are_only_names(cross_entropy: Subject, case: Case) -> None:
    """Classes in another order, with targets and an ignored class named anew, have the same losses."""
    order = case.random().permutation(case.size("V"))
    expect_equal(losses(cross_entropy, with_classes(case, order)), losses(cross_entropy, case))


@law(
    "cross_entropy",
    case=cross_entropy_cases(least=3, epsilons=(0.0,), infinite=0.0),
    which=choice(0, 1, 2),
    source="P40, R32, R38, B071",
    kills=("cross_entropy.py:one_hot_times_logarithm", "cross_entropy.py:minus_infinity_is_finite"),
)
def minus_infinity_equals_deletion(cross_entropy: Subject, case: Case, which: int) -> None:
    """A class of -inf that is nobody's target counts as if the vocabulary did not have it."""
    size, rng = case.size("V"), case.random()
    unwanted = np.setdiff1d(np.arange(size), case["targets"][kept_rows(case)])
    gone = (unwanted, unwanted[-1:], unwanted[rng.random(unwanted.size) < 0.5])[which]
    if not gone.size or gone.size == size or case["label_smoothing"]:
        return
    left = np.setdiff1d(np.arange(size), gone)
    expect_equal(losses(cross_entropy, with_absent(case, gone)), losses(cross_entropy, with_classes(case, left)))


@law(
    "cross_entropy",
    case=cross_entropy_cases(epsilons=(0.0,), infinite=0.0, families=("low", *MODERATE)),
    more=choice(1, 3, 5, 8),
    source="R38, B062, B063",
    kills=("cross_entropy.py:tail_counts_phantom_lanes", "cross_entropy.py:cap_reaches_phantom_lanes"),
)
def a_padded_vocabulary_changes_nothing(cross_entropy: Subject, case: Case, more: int) -> None:
    """More classes, all too far below the others to have any share, change nothing."""
    logits, size = case["logits"], case.size("V")
    far = case.with_arrays(logits=np.full((len(logits), more), logits.min(initial=0.0) - 2000.0))["logits"]
    if case["label_smoothing"] or not logits.size or size <= case["ignore_index"] < size + more:
        return
    if (logits.max(-1) - far[:, 0] > 800).all():
        padded = case.with_arrays(logits=np.concatenate([logits, far], 1))
        expect_equal(losses(cross_entropy, padded), losses(cross_entropy, case))


@law(
    "cross_entropy",
    case=cross_entropy_cases(
        families=FAR, shapes=FAR_SHAPES, infinite=0.0, epsilons=(0.0, 0.1, 0.1), reductions=("mean", "none")
    ),
    source="P38, P03, R13",
    relative=False,
    kills=(
        "cross_entropy.py:logarithm_of_softmax",
        "cross_entropy.py:maximum_not_subtracted",
        "cross_entropy.py:smoothing_summed_in_half",
        "cross_entropy.py:mean_summed_in_half",
    ),
)
def finite_for_finite_logits(cross_entropy: Subject, case: Case) -> None:
    """Finite logits have finite losses, however far apart they are, if the dtype can hold these."""
    if kept_rows(case).any():
        got, bound = cross_entropy(case), cross_entropy.reference(case)
        expect_finite(got[np.abs(bound.value) < cross_entropy.largest / 2])


@law(
    "cross_entropy",
    case=cross_entropy_cases(
        families=("one_hot", "low", "huge", "normal", "large_mean", "ladder"),
        targets=("unlikeliest", "random"),
        infinite=0.0,
    ),
    source="P38",
    relative=False,
    changes=("smoothing",),
    kills=("cross_entropy.py:guard_inside_the_logarithm", "cross_entropy.py:losses_clamped"),
)
def a_hopeless_target_costs_its_distance(cross_entropy: Subject, case: Case) -> None:
    """A loss is at least how far the target lies below the largest logit, and at most log V more."""
    if kept_rows(case).any():
        logits = case["logits"]
        below = (targets_of(cross_entropy, case) * (logits.max(-1, keepdims=True) - logits)).sum(-1)
        more = np.where(kept_rows(case), np.log(case.size("V")), 0.0)
        got = losses(cross_entropy, case)
        expect_between(got.value, total(below, case), total(below + more, case), got.allowed)


@law(
    "cross_entropy",
    case=cross_entropy_cases(least=2, infinite=0.0, families=MODERATE),
    source="P40",
    relative=False,
    changes=("smoothing",),
    kills=("cross_entropy.py:losses_clamped", "cross_entropy.py:infinite_losses_dropped"),
)
def an_impossible_class_costs_infinity(cross_entropy: Subject, case: Case) -> None:
    """A logit of -inf at a class that is wanted, if only through smoothing, makes the loss of that row inf."""
    kept, q = kept_rows(case), targets_of(cross_entropy, case)
    if not kept.any():
        return
    row = int(np.flatnonzero(kept)[0])
    others = np.where(np.arange(case.size("V")) == case["targets"][row], 0.0, q[row])
    column = int(others.argmax()) if others.any() else int(case["targets"][row])
    logits = case["logits"].copy()
    logits[row, column] = -np.inf
    got = cross_entropy(case.with_arrays(logits=logits))
    expect_same(got[row] if got.ndim else got, np.inf)
    expect_finite(np.delete(got, row) if got.ndim else np.zeros(0))


@law(
    "cross_entropy",
    case=cross_entropy_cases(least=2, epsilons=(0.0,), infinite=0.0, families=("normal", "zipf", "integers", "heavy")),
    epsilon=choice(0.1, 0.5, 0.3),
    needs={"label_smoothing", SINGLE},
    source="R09, B058",
    relative=False,
    kills=("cross_entropy.py:smoothing_dropped",),
)
def label_smoothing_has_influence(cross_entropy: Subject, case: Case, epsilon: float) -> None:
    """label_smoothing changes the loss."""
    padded = cross_entropy.capabilities.smoothing == "others_but_padding"
    if padded and (not 0 <= case["ignore_index"] < case.size("V") or case.size("V") < 3):
        return
    expect_influence(cross_entropy, case, case.with_keywords(label_smoothing=epsilon), "label_smoothing")


@law(
    "cross_entropy",
    case=dense_loss_cases(),
    kind="precision",
    needs={"reduction"},
    source="Higham, Mary 2019 (A new approach to probabilistic rounding error analysis)",
    kills=("cross_entropy.py:exponentials_in_half", "cross_entropy.py:normaliser_in_half"),
    changes=("accumulate", "intermediate"),
)
def works_in_the_declared_precision(cross_entropy: Subject, case: Case) -> None:
    """On dense random data errors are no larger than the declared precision typically makes them, and point no way."""
    expect_declared_precision(cross_entropy, case)
