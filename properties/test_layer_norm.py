"""Laws of layer_norm."""

from __future__ import annotations

import numpy as np

from veriformer.budgets import Precision
from veriformer.case import Case
from veriformer.expect import expect, expect_between, expect_close, expect_finite, expect_same
from veriformer.law import choice, law
from veriformer.properties.cases import layer_norm_cases
from veriformer.properties.measured import expect_equal, measure
from veriformer.properties.norm_statistics import deviation, exact_variance, is_plain, mean_error, variance_error
from veriformer.properties.rows import expect_unmoved, shifted, taken, uneven, with_other_rows_changed
from veriformer.subject import Subject

NARROW = (
    "near_epsilon",
    "integers",
    "near_epsilon",
    "normal",
    "near_epsilon",
    "tiny_variance",
    "near_epsilon",
    "halves",
)
INPUTS = ("x", "weight", "bias")


@law(
    "layer_norm",
    case=layer_norm_cases(
        plain=True, families=("normal", "near_epsilon", "large_mean", "integers", "halves", "ladder")
    ),
    source="Ba, Kiros, Hinton 2016; P19",
    relative=False,
    kills=("layer_norm.py:mean_omitted", "layer_norm.py:tail_dropped"),
)
def mean_is_zero(layer_norm: Subject, case: Case) -> None:
    """With weight 1 and bias 0 every row has mean 0."""
    if not is_plain(case):
        return
    means = layer_norm(case).mean(-1)
    expect_close(means, 0.0, mean_error(layer_norm.reference(case)), what="the mean of a row")


@law(
    "layer_norm",
    case=layer_norm_cases(plain=True, widths=(2, 64), families=NARROW, examples=24),
    source="Ba, Kiros, Hinton 2016; P19, R22, R25",
    relative=False,
    changes=("norm_epsilon", "norm_variance"),
    kills=(
        "layer_norm.py:sample_variance",
        "layer_norm.py:squared_for_rooted",
        "layer_norm.py:root_omitted",
        "layer_norm.py:eps_1e-3",
        "layer_norm.py:eps_1e-12",
        "layer_norm.py:eps_outside",
        "layer_norm.py:eps_as_floor",
        "layer_norm.py:weight_plus_one",
    ),
)
def variance_is_v_over_v_plus_eps(layer_norm: Subject, case: Case) -> None:
    """With weight 1 and bias 0 a row of variance v gets variance v / (v + eps), or its like in the declared dialect."""
    if not is_plain(case):
        return
    wanted = exact_variance(case, layer_norm.capabilities)
    got = layer_norm(case).var(-1)
    expect_close(got, wanted, variance_error(layer_norm.reference(case)), what="the variance of a row")


@law(
    "layer_norm",
    case=layer_norm_cases(rows=2),
    source="P20, R02",
    changes=("leak",),
    kills=("layer_norm.py:row_index_wraps", "layer_norm.py:whole_array"),
)
def rows_are_independent(layer_norm: Subject, case: Case) -> None:
    """A row's result does not depend on the other rows."""
    changed, kept = with_other_rows_changed(case)
    expect_unmoved(layer_norm, case, changed, kept)


@law(
    "layer_norm",
    case=layer_norm_cases(families=("normal", "integers", "near_epsilon", "halves", "heavy", "large_mean")),
    shift=choice(8.0, -64.0, 1024.0, -4096.0),
    source="P21, R21",
    kills=("layer_norm.py:one_pass", "layer_norm.py:one_pass_clamped", "layer_norm.py:one_pass_when_wide"),
)
def shift_changes_nothing(layer_norm: Subject, case: Case, shift: float) -> None:
    """The same number added to a whole row changes nothing, where the addition is exact."""
    low, high, exact = shifted(case, shift)
    expect_equal(measure(layer_norm, high)[exact], measure(layer_norm, low)[exact])


@law(
    "layer_norm",
    case=layer_norm_cases(families=("near_epsilon", "normal", "integers", "halves", "large_mean")),
    factor=choice(2.0, -1.0, 0.25, -8.0, 64.0),
    needs={"eps"},
    source="P22",
    changes=("norm_epsilon",),
    kills=("layer_norm.py:eps_1e-3", "layer_norm.py:eps_outside"),
)
def scale_rescales_epsilon(layer_norm: Subject, case: Case, factor: float) -> None:
    """layer_norm(a x, eps a²) is layer_norm(x, eps), mirrored at the bias where a < 0; an eps outside goes with |a|."""
    inside = layer_norm.capabilities.norm_epsilon == "inside"
    scaled = case.with_arrays(x=case["x"] * factor)
    scaled = scaled.with_keywords(eps=case["eps"] * (factor * factor if inside else abs(factor)))
    exact = (scaled["x"] / factor == case["x"]).all(-1)
    mirrored = measure(layer_norm, case) * np.sign(factor) + (case["bias"] * (1 - np.sign(factor)))
    expect_equal(measure(layer_norm, scaled)[exact], mirrored[exact])


@law(
    "layer_norm",
    case=layer_norm_cases(families=("constant",)),
    source="P23, R23",
    relative=False,
    kills=("layer_norm.py:eps_zero",),
)
def constant_row_gives_the_bias(layer_norm: Subject, case: Case) -> None:
    """A row of equal numbers gives the bias."""
    got = measure(layer_norm, case)[np.ptp(case["x"], -1) == 0]
    expect_equal(got, np.broadcast_to(case["bias"], got.value.shape))


@law(
    "layer_norm",
    case=layer_norm_cases(plain=True, families=("one_hot", "sparse", "heavy", "normal", "near_epsilon")),
    source="P24",
    relative=False,
    kills=("layer_norm.py:root_omitted",),
)
def bounded_by_root_d(layer_norm: Subject, case: Case) -> None:
    """With weight 1 and bias 0 no entry is larger than the root of d - 1."""
    if not is_plain(case):
        return
    got, limit = measure(layer_norm, case), (case.size("d") - 1) ** 0.5
    expect_between(got.value, -limit, limit, got.allowed)


@law(
    "layer_norm",
    case=layer_norm_cases(plain=True, families=("normal", "near_epsilon", "integers", "halves", "heavy")),
    source="P26",
    changes=("norm_epsilon", "norm_variance"),
    kills=("layer_norm.py:sample_variance", "layer_norm.py:squared_for_rooted"),
)
def again_is_nearly_itself(layer_norm: Subject, case: Case) -> None:
    """With weight 1 and bias 0 a second application divides by the known deviation of the first and does no more."""
    if not is_plain(case):
        return
    once, bound, width = layer_norm(case), layer_norm.reference(case), case.size("d")
    twice = measure(layer_norm, case.with_arrays(x=once))
    variance = exact_variance(case, layer_norm.capabilities)
    least = np.maximum(variance - variance_error(bound), 0.0)
    s, small = (deviation(v, width, case["eps"], layer_norm.capabilities)[..., None] for v in (variance, least))
    carried = mean_error(bound)[..., None] / small + np.abs(once) * (1 / small - 1 / s)
    expect_close(twice.value, once / s, twice.allowed + carried)


@law(
    "layer_norm",
    case=layer_norm_cases(widths=(2, 10**6)),
    source="P28",
    kills=("layer_norm.py:weight_rolled", "layer_norm.py:tail_dropped"),
)
def channels_permute(layer_norm: Subject, case: Case) -> None:
    """Channels in another order, with their weights and biases, give the same numbers in that order."""
    order = case.random().permutation(case.size("d"))
    expect_equal(measure(layer_norm, taken(case, order)), measure(layer_norm, case)[..., order])


@law(
    "layer_norm",
    case=layer_norm_cases(),
    source="P28, R24",
    kills=(
        "layer_norm.py:weight_ignored",
        "layer_norm.py:weight_plus_one",
        "layer_norm.py:bias_ignored",
        "layer_norm.py:bias_scaled_by_weight",
    ),
)
def affine_in_weight_and_bias(layer_norm: Subject, case: Case) -> None:
    """The result is weight times the result for weight 1 and bias 0, plus bias."""
    plain = case.with_arrays(weight=np.ones_like(case["weight"]), bias=np.zeros_like(case["bias"]))
    expect_equal(measure(layer_norm, case), measure(layer_norm, plain) * case["weight"] + case["bias"])


@law(
    "layer_norm",
    case=layer_norm_cases(widths=(1, 1), weights=(1.0, -3.0, 2.0**14)),
    source="P28, B008",
    relative=False,
    kills=("layer_norm.py:folded_into_scale_and_shift",),
)
def width_one_gives_the_bias(layer_norm: Subject, case: Case) -> None:
    """With a single channel the result is the bias, bit for bit, whatever the weight."""
    got = layer_norm(case)
    expect_same(got, np.broadcast_to(case["bias"], got.shape))


@law(
    "layer_norm",
    case=layer_norm_cases(families=("vast", "ladder", "large_mean", "huge"), examples=16),
    source="P29",
    relative=False,
    kills=("layer_norm.py:one_pass",),
)
def finite_for_large_input(layer_norm: Subject, case: Case) -> None:
    """Numbers as large as their squares can be summed give finite results."""
    sums = Precision(layer_norm.precision.accumulator).largest
    if (case["x"] ** 2).sum(-1).max() < sums / 4:
        expect_finite(layer_norm(case))


@law(
    "layer_norm",
    case=layer_norm_cases(),
    source="R05, R26",
    kills=("layer_norm.py:rank_three_flattened",),
)
def rank_changes_nothing(layer_norm: Subject, case: Case) -> None:
    """The leading axes may be cut in any way: each row is normalised by itself."""
    x, width = case["x"], case.size("d")
    got = measure(layer_norm, case).rearranged(lambda array: array.reshape(-1, width))
    for shape in ((-1, width), (1, x.size // width, 1, width), (2, -1, width))[: 3 - x.size // width % 2]:
        other = measure(layer_norm, case.with_arrays(x=x.reshape(shape)))
        expect_equal(other.rearranged(lambda array: array.reshape(-1, width)), got)


@law(
    "layer_norm",
    case=layer_norm_cases(widths=(2, 10**6), families=("normal", "near_epsilon"), layouts=("contiguous", "transposed")),
    kind="gradient",
    needs={"gradients"},
    source="R17, R24",
    relative=False,
    kills=("gradient.py:layer_norm_weight_has_no_gradient", "gradient.py:layer_norm_bias_has_no_gradient"),
)
def gradient_exists(layer_norm: Subject, case: Case) -> None:
    """Gradients with respect to x, weight and bias arrive, and are not zero throughout where they must not be."""
    cotangent = uneven(case)
    found = layer_norm.gradients(case, INPUTS, cotangent)
    influence = {
        "x": False,
        "weight": (cotangent * (case["x"] - case["x"].mean(-1, keepdims=True))).any(),
        "bias": True,
    }
    for name, gradient in found.items():
        expect(gradient is not None, "no gradient", f"no gradient reached {name}, wanted one")
        moves = bool(np.any(gradient)) or not influence[name]
        expect(moves, "no gradient", f"the gradient of {name} is 0 everywhere, wanted a change")


@law(
    "layer_norm",
    case=layer_norm_cases(),
    kind="gradient",
    needs={"gradients"},
    source="R18",
    relative=False,
    kills=("gradient.py:layer_norm_root_of_zero",),
)
def gradient_is_finite(layer_norm: Subject, case: Case) -> None:
    """The gradients with respect to x, weight and bias are finite, for constant rows as well."""
    for name, gradient in layer_norm.gradients(case, INPUTS, uneven(case)).items():
        if gradient is not None:
            expect_finite(gradient, what=f"the gradient of {name}")


@law(
    "layer_norm",
    case=layer_norm_cases(widths=(1, 1)),
    kind="gradient",
    needs={"gradients"},
    source="R16, B009",
    relative=False,
    kills=("gradient.py:layer_norm_weight_gradient_folded",),
)
def width_one_has_no_weight_gradient(layer_norm: Subject, case: Case) -> None:
    """With a single channel the weight has no influence, and its gradient is exactly 0."""
    gradient = layer_norm.gradients(case, ("weight",), uneven(case))["weight"]
    if gradient is not None:
        expect_same(gradient, np.zeros(gradient.shape), what="the gradient of weight")
