"""Laws of rms_norm, and the one that ties it to layer_norm."""

from __future__ import annotations

import numpy as np

from veriformer.budgets import Precision
from veriformer.case import Case
from veriformer.expect import expect_between, expect_close, expect_finite, expect_same
from veriformer.law import choice, law
from veriformer.properties.cases import layer_norm_cases
from veriformer.properties.measured import expect_equal, measure
from veriformer.properties.norm_statistics import variance_error
from veriformer.properties.rows import expect_unmoved, shifted, taken, with_other_rows_changed
from veriformer.properties.rows_cases import gain_of, rms_norm_cases
from veriformer.subject import Subject

NARROW = ("near_epsilon", "integers", "near_epsilon", "normal", "near_epsilon", "large_mean", "near_epsilon", "huge")


def gain_is_one(case: Case, subject: Subject) -> bool:
    """Whether every channel is left at its own size, so that the rows of the result have known statistics."""
    return bool((gain_of(case, subject.capabilities) == 1).all())


def mean_square(x: np.ndarray) -> np.ndarray:
    """The mean square of each row, by way of its largest entry, so that no square overflows."""
    top = np.maximum(np.abs(x).max(-1, keepdims=True), 1e-300)
    return ((x / top) ** 2).mean(-1) * top[..., 0] ** 2


@law(
    "rms_norm",
    case=rms_norm_cases(plain=True, families=(*NARROW, "vast"), examples=24),
    source="Zhang, Sennrich 2019; P19, R22, R25",
    relative=False,
    kills=(
        "rms_norm.py:sample_divisor",
        "rms_norm.py:sum_for_mean",
        "rms_norm.py:root_omitted",
        "rms_norm.py:mean_subtracted",
        "rms_norm.py:mean_subtracted_when_wide",
        "rms_norm.py:eps_1e-3",
        "rms_norm.py:eps_outside",
        "rms_norm.py:eps_as_floor",
        "rms_norm.py:squares_in_storage",
        "rms_norm.py:tail_dropped",
        "rms_norm.py:weight_plus_one",
    ),
)
def mean_square_is_m_over_m_plus_eps(rms_norm: Subject, case: Case) -> None:
    """With a gain of 1 a row of mean square m gets the mean square m / (m + eps), whatever its size."""
    if not gain_is_one(case, rms_norm):
        return
    m = mean_square(case["x"])
    got = mean_square(rms_norm(case))
    expect_close(got, m / (m + case["eps"]), variance_error(rms_norm.reference(case)), what="the mean square of a row")


@law(
    "rms_norm",
    case=rms_norm_cases(rows=2),
    source="P20, R02",
    changes=("leak",),
    kills=("rms_norm.py:row_index_wraps", "rms_norm.py:whole_array"),
)
def rows_are_independent(rms_norm: Subject, case: Case) -> None:
    """A row's result does not depend on the other rows."""
    changed, kept = with_other_rows_changed(case)
    expect_unmoved(rms_norm, case, changed, kept)


@law(
    "rms_norm",
    case=rms_norm_cases(families=("near_epsilon", "normal", "integers", "halves", "large_mean")),
    factor=choice(2.0, -1.0, 0.25, -8.0, 1024.0),
    needs={"eps"},
    source="P22, R13",
    kills=("rms_norm.py:eps_1e-3", "rms_norm.py:eps_outside", "rms_norm.py:squares_in_storage"),
)
def scale_rescales_epsilon(rms_norm: Subject, case: Case, factor: float) -> None:
    """rms_norm(a x, eps a²) is rms_norm(x, eps), with the sign of a, also where squares are far larger than x."""
    scaled = case.with_arrays(x=case["x"] * factor).with_keywords(eps=case["eps"] * factor * factor)
    exact = (scaled["x"] / factor == case["x"]).all(-1)
    expect_equal(measure(rms_norm, scaled)[exact], (measure(rms_norm, case) * np.sign(factor))[exact])


@law(
    "rms_norm",
    case=rms_norm_cases(families=("vast", "ladder", "large_mean", "huge"), examples=16),
    source="P29, R13",
    relative=False,
    kills=("rms_norm.py:squares_in_storage", "rms_norm.py:sum_in_storage"),
)
def large_rows_keep_their_size(rms_norm: Subject, case: Case) -> None:
    """A row so large that eps does not count has norm sqrt(d) before the gain, as long as its squares can be summed."""
    case = case.with_arrays(weight=case["weight"] * 0 + (rms_norm.capabilities.rms_weight == "plain"))
    sums = Precision(rms_norm.precision.accumulator).largest
    m = mean_square(case["x"])
    fit = (m * case.size("d") < sums / 4) & (m > 1e6 * case["eps"])
    got, bound = mean_square(rms_norm(case)), rms_norm.reference(case)
    expect_close(got[fit], (m / (m + case["eps"]))[fit], variance_error(bound)[fit], what="the mean square of a row")


@law(
    "rms_norm",
    case=rms_norm_cases(families=("constant", "sparse", "one_hot")),
    source="P23, R23, B015",
    relative=False,
    kills=("rms_norm.py:eps_zero", "rms_norm.py:eps_in_half"),
)
def row_of_zeros_gives_zeros(rms_norm: Subject, case: Case) -> None:
    """A row of zeros gives exactly zeros, however small eps > 0 is."""
    if case["eps"] == 0:
        return
    x = case["x"] * (np.indices(case["x"].shape[:-1]).sum(0) % 2)[..., None]
    got = rms_norm(case.with_arrays(x=x))[~x.any(-1)]
    expect_same(got, np.zeros_like(got))


@law(
    "rms_norm",
    case=rms_norm_cases(plain=True, families=("one_hot", "sparse", "heavy", "large_mean", "near_epsilon")),
    source="P24",
    relative=False,
    kills=("rms_norm.py:root_omitted",),
)
def bounded_by_root_d(rms_norm: Subject, case: Case) -> None:
    """With a gain of 1 no entry is larger than the root of d, and each has the sign of its input."""
    if not gain_is_one(case, rms_norm):
        return
    got, limit = measure(rms_norm, case), case.size("d") ** 0.5
    low, high = np.where(case["x"] < 0, -limit, 0.0), np.where(case["x"] > 0, limit, 0.0)
    expect_between(got.value, low, high, got.allowed)


@law(
    "rms_norm",
    case=rms_norm_cases(plain=True, families=("normal", "near_epsilon", "integers", "halves", "heavy")),
    source="P26",
    kills=("rms_norm.py:sample_divisor", "rms_norm.py:root_omitted"),
)
def again_is_nearly_itself(rms_norm: Subject, case: Case) -> None:
    """With a gain of 1 a second application divides by the known root mean square of the first and does no more."""
    if not gain_is_one(case, rms_norm):
        return
    once, bound, m = rms_norm(case), rms_norm.reference(case), mean_square(case["x"])
    twice = measure(rms_norm, case.with_arrays(x=once))
    known = m / (m + case["eps"])
    s = np.sqrt(known + case["eps"])[..., None]
    least = np.sqrt(np.maximum(known - variance_error(bound), 0.0) + case["eps"])[..., None]
    expect_close(twice.value, once / s, twice.allowed + np.abs(once) * (1 / least - 1 / s))


@law(
    "rms_norm",
    case=rms_norm_cases(widths=(2, 10**6)),
    source="P28",
    kills=("rms_norm.py:weight_rolled", "rms_norm.py:tail_dropped"),
)
def channels_permute(rms_norm: Subject, case: Case) -> None:
    """Channels in another order, with their weights, give the same numbers in that order."""
    order = case.random().permutation(case.size("d"))
    expect_equal(measure(rms_norm, taken(case, order)), measure(rms_norm, case)[..., order])


@law(
    "rms_norm",
    case=rms_norm_cases(),
    source="P28, R24, B029",
    changes=("rms_weight",),
    kills=("rms_norm.py:weight_ignored", "rms_norm.py:weight_plus_one", "rms_norm.py:gain_without_one"),
)
def gain_is_as_declared(rms_norm: Subject, case: Case) -> None:
    """The result is the gain times the result for a gain of 1; the gain is weight, or 1 + weight where declared."""
    one_plus = rms_norm.capabilities.rms_weight == "one_plus"
    plain = case.with_arrays(weight=np.full(case.size("d"), 0.0 if one_plus else 1.0))
    expect_equal(measure(rms_norm, case), measure(rms_norm, plain) * gain_of(case, rms_norm.capabilities))


@law(
    "rms_norm",
    case=rms_norm_cases(families=("vast", "ladder", "large_mean", "huge", "normal"), examples=15),
    source="P29",
    relative=False,
    kills=("rms_norm.py:eps_zero",),
)
def finite_for_large_and_for_no_input(rms_norm: Subject, case: Case) -> None:
    """Numbers as large as their squares can be summed give finite results, and so do zeros beside them."""
    sums = Precision(rms_norm.precision.accumulator).largest
    x = case["x"] * (np.indices(case["x"].shape[:-1]).sum(0) % 3 != 1)[..., None]
    if mean_square(x).max() * case.size("d") < sums / 4:
        expect_finite(rms_norm(case.with_arrays(x=x)))


@law(
    "rms_norm",
    case=rms_norm_cases(),
    source="R05, R26",
    kills=("rms_norm.py:rank_three_flattened",),
)
def rank_changes_nothing(rms_norm: Subject, case: Case) -> None:
    """The leading axes may be cut in any way: each row is normalised by itself."""
    x, width = case["x"], case.size("d")
    got = measure(rms_norm, case).rearranged(lambda array: array.reshape(-1, width))
    for shape in ((-1, width), (1, x.size // width, 1, width), (2, -1, width))[: 3 - x.size // width % 2]:
        other = measure(rms_norm, case.with_arrays(x=x.reshape(shape)))
        expect_equal(other.rearranged(lambda array: array.reshape(-1, width)), got)


@law(
    "layer_norm",
    case=layer_norm_cases(families=("normal", "integers", "halves", "near_epsilon", "heavy")),
    shift=choice(0.0, 8.0, -64.0),
    also=("rms_norm",),
    needs={"eps"},
    source="P25",
    changes=("norm_epsilon", "norm_variance", "rms_weight"),
    kills=("rms_norm.py:layer_norm_is_unbiased", "rms_norm.py:layer_norm_keeps_the_mean"),
)
def is_rms_norm_after_centring(layer_norm: Subject, rms_norm: Subject, case: Case, shift: float) -> None:
    """layer_norm of a row of mean 0, and of that row shifted, is its rms_norm, plus the bias."""
    about = layer_norm.capabilities
    if (about.norm_epsilon, about.norm_variance) != ("inside", "biased") or "eps" not in rms_norm.domain.accepts:
        return
    weight, bias = (np.concatenate([case[name], case[name]]) for name in ("weight", "bias"))
    mirrored = np.concatenate([case["x"], -case["x"]], -1)
    both = case.with_arrays(x=mirrored, weight=weight, bias=bias)
    low, high, exact = shifted(both, shift) if shift else (both, both, np.ones(mirrored.shape[:-1], bool))
    exact &= (low["x"] == -np.roll(low["x"], case.size("d"), -1)).all(-1)
    weight = weight - 1 if rms_norm.capabilities.rms_weight == "one_plus" else weight
    alone = Case("rms_norm", {"x": low["x"], "weight": weight}, {"eps": case["eps"]}, case.dtype)
    expect_equal(measure(layer_norm, high)[exact], (measure(rms_norm, alone) + bias)[exact])
