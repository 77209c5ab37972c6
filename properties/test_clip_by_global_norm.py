"""Laws of clip_by_global_norm: one factor for all gradients, and none where they are short."""

from __future__ import annotations

import numpy as np

from veriformer.case import Case
from veriformer.expect import expect_between, expect_close, expect_different, expect_same
from veriformer.law import choice, law
from veriformer.operation import LISTED
from veriformer.properties.measured import Measured, expect_equal, measure_all
from veriformer.properties.optimizer_cases import clip_cases, norm_of
from veriformer.subject import Subject

TOO_LONG = (0.5, 1e-3, 0.125, 0.9)
"""max_norm in units of a norm that is larger."""
MODERATE = ("normal", "integers", "halves", "heavy", "sparse", "one_hot", "constant")


def faults(*names: str) -> tuple[str, ...]:
    """Variants of impls/faulty/clip.py."""
    return tuple(f"clip.py:{name}" for name in names)


def sound(case: Case) -> bool:
    """Whether all gradients are finite, as they are unless a case was made smaller."""
    return bool(all(np.isfinite(g).all() for g in case.arrays.values()) and 0 < case["max_norm"] < np.inf)


def gradients(case: Case) -> list[np.ndarray]:
    """The arrays in order."""
    return list(case.arrays.values())


def with_gradients(case: Case, grads: list[np.ndarray]) -> Case:
    """The case with this list in place of its own."""
    none = dict.fromkeys(case.arrays)
    return case.with_arrays(**(none | {f"{LISTED}{i}": g for i, g in enumerate(grads)}))


def joined(found: tuple[Measured, ...]) -> Measured:
    """All entries of all arrays in one row."""
    return Measured(*(np.concatenate([part.reshape(-1) for part in parts]) for parts in _parts(found)))


def _parts(found: tuple[Measured, ...]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    return [one.value for one in found], [one.allowed for one in found]


@law(
    "clip_by_global_norm",
    case=clip_cases(extras=True),
    source="Pascanu, Mikolov, Bengio 2013, algorithm 1; R62",
    relative=False,
    kills=faults(
        "nothing_is_clipped",
        "norm_of_each_array",
        "largest_norm_of_the_arrays",
        "mean_of_the_norms",
        "last_array_left_out",
        "vectors_left_out",
        "entries_in_place_of_the_norm",
        "norm_in_half",
        "infinity_norm_is_one",
        "norm_of_no_gradients",
    ),
)
def norm_is_at_most_the_limit(clip_by_global_norm: Subject, case: Case) -> None:
    """Clipped gradients are together no longer than max_norm."""
    if sound(case):
        got = joined(measure_all(clip_by_global_norm, case))
        error = norm_of([got.allowed]) if np.isfinite(got.allowed).all() else np.inf
        expect_between(norm_of([got.value]), 0.0, case["max_norm"], error, what="the norm")


@law(
    "clip_by_global_norm",
    case=clip_cases(norms=TOO_LONG, extras=True),
    source="Pascanu, Mikolov, Bengio 2013, algorithm 1; R62",
    relative=False,
    changes=("clip_epsilon",),
    kills=faults(
        "epsilon_in_the_divisor",
        "sum_of_the_norms",
        "root_missing",
        "squares_overflow",
        "clipped_to_one",
        "mean_square",
        "absolute_sum",
        "norm_in_bfloat16",
        "last_array_counts_twice",
    ),
)
def long_gradients_get_the_norm(clip_by_global_norm: Subject, case: Case) -> None:
    """Gradients longer than max_norm get that norm, less what is added to the norm that divides them."""
    norm = norm_of(gradients(case))
    if sound(case) and norm > case["max_norm"]:
        got = joined(measure_all(clip_by_global_norm, case))
        error = norm_of([got.allowed]) if np.isfinite(got.allowed).all() else np.inf
        wanted = case["max_norm"] * norm / (norm + clip_by_global_norm.capabilities.clip_epsilon)
        expect_close(norm_of([got.value]), wanted, error, what="the norm")


@law(
    "clip_by_global_norm",
    case=clip_cases(extras=True),
    source="P115, R62",
    relative=False,
    kills=faults(
        "norm_of_each_array",
        "entries_clipped",
        "last_array_left_alone",
        "vectors_left_out",
        "tail_untouched",
    ),
)
def direction_is_kept(clip_by_global_norm: Subject, case: Case) -> None:
    """All entries of all gradients are multiplied by one factor, which lies between 0 and 1."""
    if not sound(case):
        return
    given = np.concatenate([g.reshape(-1) for g in gradients(case)])
    got, largest = joined(measure_all(clip_by_global_norm, case)), int(np.argmax(np.abs(given)))
    peak, clipped = given[largest], got[largest : largest + 1]
    expect_equal(got * peak, Measured(clipped.value * given, clipped.allowed * np.abs(given)), what="the product")
    expect_between(clipped.value * np.sign(peak), 0.0, abs(peak), clipped.allowed, what="the largest entry")


@law(
    "clip_by_global_norm",
    case=clip_cases(extras=True),
    longer=choice(2.0, 1.01, 1e3, 8.0),
    source="P115, R62",
    relative=False,
    changes=("clip_epsilon",),
    kills=faults(
        "always_scaled",
        "epsilon_in_the_divisor",
        "sum_of_the_norms",
        "squares_overflow",
        "root_missing",
        "last_array_counts_twice",
        "absolute_sum",
    ),
)
def short_gradients_are_left_alone(clip_by_global_norm: Subject, case: Case, longer: float) -> None:
    """Gradients shorter than max_norm come back as they were, but for roundings of a factor 1."""
    norm = norm_of(gradients(case)) + clip_by_global_norm.capabilities.clip_epsilon
    free = case.with_keywords(max_norm=longer * norm or 1.0)
    if sound(case):
        for got, given in zip(measure_all(clip_by_global_norm, free), gradients(case), strict=True):
            expect_equal(got, given)


@law(
    "clip_by_global_norm",
    case=clip_cases(families=MODERATE),
    factor=choice(4.0, 0.25, 2.0**20, 2.0**-20, 2.0**48, 2.0**-40),
    source="P115, B146, R62",
    changes=("clip_epsilon",),
    kills=faults("clipped_to_one", "infinity_norm_is_one", "root_missing"),
)
def scaled_gradients_are_clipped_alike(clip_by_global_norm: Subject, case: Case, factor: float) -> None:
    """c times the gradients, with c times max_norm, give c times the result, as far as nothing is added to the norm."""
    if not sound(case):
        return
    factor = factor if case.dtype != "float16" else 0.25
    norm, plus = norm_of(gradients(case)), clip_by_global_norm.capabilities.clip_epsilon
    if norm == 0 or factor <= 0:
        return
    limit = case["max_norm"] / (norm + plus) * (factor * norm + plus)
    large = with_gradients(case, [factor * g for g in gradients(case)]).with_keywords(max_norm=limit)
    if norm_of(gradients(large)) != factor * norm:
        return  # something was lost by underflow
    pairs = zip(measure_all(clip_by_global_norm, large), measure_all(clip_by_global_norm, case), strict=True)
    for got, wanted in pairs:
        expect_equal(got, wanted * factor)


@law(
    "clip_by_global_norm",
    case=clip_cases(families=MODERATE, norms=(0.5, 0.125, 2.0)),
    limit=choice(1.0, 0.5, 1e-3, 1e3),
    source="R62",
    relative=False,
    kills=faults("zero_norm_divides"),
)
def zeros_stay_zeros(clip_by_global_norm: Subject, case: Case, limit: float) -> None:
    """Gradients that are all 0 come back as 0, whatever max_norm is."""
    if sound(case):
        none = with_gradients(case, [0 * g for g in gradients(case)])
        for got in clip_by_global_norm(none.with_keywords(max_norm=limit)):
            expect_same(got, np.zeros(got.shape))


@law(
    "clip_by_global_norm",
    case=clip_cases(arrays=2, norms=(0.5, 0.125, 2.0, 1e-3, 1.001)),
    source="P115, R62",
    kills=faults(
        "norm_of_each_array",
        "sum_of_the_norms",
        "largest_norm_of_the_arrays",
        "mean_of_the_norms",
        "last_array_left_out",
        "last_array_left_alone",
        "vectors_left_out",
    ),
)
def several_gradients_are_one(clip_by_global_norm: Subject, case: Case) -> None:
    """A list of gradients is clipped as one row of all their entries."""
    if sound(case):
        row = np.concatenate([g.reshape(-1) for g in gradients(case)])
        (whole,) = measure_all(clip_by_global_norm, with_gradients(case, [row]))
        expect_equal(joined(measure_all(clip_by_global_norm, case)), whole)


@law(
    "clip_by_global_norm",
    case=clip_cases(),
    source="R02, R57",
    kills=faults("first_array_decides", "last_array_left_out", "last_array_counts_twice", "tail_untouched"),
)
def order_does_not_matter(clip_by_global_norm: Subject, case: Case) -> None:
    """Gradients in another order, and entries in another order and shape, are clipped alike."""
    if not sound(case):
        return
    grads, rng = gradients(case), case.random()
    order, moves = rng.permutation(len(grads)), [rng.permutation(g.size) for g in grads]
    other = with_gradients(case, [grads[i].reshape(-1)[moves[i]] for i in order])
    before, after = measure_all(clip_by_global_norm, case), measure_all(clip_by_global_norm, other)
    for place, i in enumerate(order):
        expect_equal(after[place], before[i].rearranged(lambda a, i=i: a.reshape(-1)[moves[i]]))


@law(
    "clip_by_global_norm",
    case=clip_cases(arrays=2, norms=(0.5, 0.125, 0.9)),
    source="R09, B149",
    kills=faults("first_array_decides", "norm_of_each_array", "vectors_left_out", "norm_of_no_gradients"),
)
def every_gradient_counts(clip_by_global_norm: Subject, case: Case) -> None:
    """Where one gradient grows, the others become shorter, whichever it is."""
    if not sound(case):
        return
    grads, before = gradients(case), clip_by_global_norm(case)
    for place in range(len(grads)):
        other = with_gradients(case, [g if i != place else 4 * g + 1 for i, g in enumerate(grads)])
        pairs = zip(clip_by_global_norm.bounds(case), clip_by_global_norm.bounds(other), strict=True)
        sure = [np.abs(a.value - b.value) > a.allowed + b.allowed for a, b in pairs]
        for i, moved in enumerate(clip_by_global_norm(other)):
            if i != place:
                expect_different(moved[sure[i]], before[i][sure[i]], what=f"another gradient {place}")


@law(
    "clip_by_global_norm",
    case=clip_cases(families=MODERATE, norms=(0.5, 0.125, 2.0, 0.9)),
    less=choice(0.5, 0.25, 0.75),
    source="P115, R62",
    kills=faults("clipped_to_one", "clipped_twice", "nothing_is_clipped"),
)
def results_are_proportional_to_the_limit(clip_by_global_norm: Subject, case: Case, less: float) -> None:
    """A long gradient that is clipped at half the max_norm comes back half as long."""
    norm, plus = norm_of(gradients(case)), clip_by_global_norm.capabilities.clip_epsilon
    if not sound(case) or norm == 0 or less <= 0:
        return
    low = case.with_keywords(max_norm=min(case["max_norm"], norm) * less)
    # the factor at the lower limit by that at the higher one, of which each is at most 1
    ratio = min(1.0, low["max_norm"] / (norm + plus)) / min(1.0, case["max_norm"] / (norm + plus))
    for got, wanted in zip(measure_all(clip_by_global_norm, low), measure_all(clip_by_global_norm, case), strict=True):
        expect_equal(got, wanted * ratio)
