"""What the gradients of layer_norm and rms_norm owe beside being right: sums, directions, shapes."""

from __future__ import annotations

import numpy as np

from veriformer.case import Case, round_to
from veriformer.declarations import Capabilities
from veriformer.expect import expect_close, expect_same
from veriformer.law import Recipe, law
from veriformer.properties.attention_cases import PICKS
from veriformer.properties.cases import layer_norm_cases
from veriformer.properties.cotangents import cotangent_of
from veriformer.properties.every_case import dispatched
from veriformer.properties.measured import measure
from veriformer.properties.norm_statistics import deviation
from veriformer.properties.pairings import pairing
from veriformer.properties.rows_cases import gain_of, rms_norm_cases
from veriformer.subject import Subject

MODERATE = ("near_epsilon", "normal", "integers", "near_epsilon", "halves", "heavy", "tiny_variance")
NORMS = ("layer_norm", "rms_norm")


def norm_cases(**wishes: object) -> Recipe:
    """Cases of either norm."""
    made = {"layer_norm": layer_norm_cases(**wishes), "rms_norm": rms_norm_cases(**wishes)}
    return dispatched(made.__getitem__)


def centred(case: Case) -> np.ndarray:
    """What the norm divides: x, less its mean in layer_norm."""
    x: np.ndarray = case["x"]
    return x - x.mean(-1, keepdims=True) if case.operation == "layer_norm" else x


def share_of_epsilon(case: Case, about: Capabilities) -> np.ndarray:
    """How fast each row of the result still grows with the size of its input, [rows]: eps / (v + eps), or its like."""
    square = (centred(case) ** 2).mean(-1)
    if case.operation == "rms_norm":
        return case["eps"] / (square + case["eps"])
    divisor = deviation(square, case.size("d"), case["eps"], about)
    return case["eps"] / (divisor**2 if about.norm_epsilon == "inside" else divisor)


def before_bias(case: Case, y: np.ndarray) -> np.ndarray:
    """The result less its bias."""
    return y - case["bias"] if case.operation == "layer_norm" else y


@law(
    "layer_norm",
    case=layer_norm_cases(families=(*MODERATE, "large_mean")),
    pick=PICKS,
    kind="gradient",
    needs={"gradients", "torch"},
    source="P27, R16",
    relative=False,
    kills=("rows_vjp.py:layer_norm_mean_term_dropped", "rows_gradient.py:layer_norm_mean_term_dropped"),
)
def input_gradient_sums_to_zero(layer_norm: Subject, case: Case, pick: int) -> None:
    """In each row the gradient of x sums to 0, because a shift of the row changes nothing."""
    found, bounds = layer_norm.gradients_with_bounds(case, ("x",), cotangent_of(case, pick))
    if found["x"] is not None:
        expect_close(found["x"].sum(-1), 0.0, bounds["x"].allowed.sum(-1), what="the sum of the gradient over a row")


@law(
    NORMS,
    case=norm_cases(families=MODERATE),
    pick=PICKS,
    kind="gradient",
    needs={"gradients", "torch"},
    source="P27, R16, B029",
    changes=("norm_epsilon", "norm_variance", "rms_weight"),
    kills=(
        "rows_vjp.py:layer_norm_projection_dropped",
        "rows_vjp.py:layer_norm_eps_ignored_in_backward",
        "rows_vjp.py:layer_norm_weight_ignored_in_backward",
        "rows_vjp.py:rms_norm_projection_dropped",
        "rows_vjp.py:rms_norm_one_forgotten_in_backward",
        "rows_gradient.py:rms_norm_one_forgotten_in_backward",
    ),
)
def gradient_along_the_row_is_what_eps_leaves(norm: Subject, case: Case, pick: int) -> None:
    """In each row <dx, x> = <g, y - bias> eps / (v + eps): a row's size matters only as far as eps does."""
    cotangent = cotangent_of(case, pick)
    found, bounds = norm.gradients_with_bounds(case, ("x",), cotangent)
    if found["x"] is None:
        return
    y, share = measure(norm, case), share_of_epsilon(case, norm.capabilities)
    got, allowed = pairing(centred(case), found["x"], bounds["x"].allowed, -1)
    wanted, error = pairing(cotangent, before_bias(case, y.value), y.allowed, -1)
    expect_close(got, wanted * share, allowed + error * share, what="<dx, x> in a row")


@law(
    NORMS,
    case=norm_cases(families=(*MODERATE, "large_mean", "ladder")),
    pick=PICKS,
    kind="gradient",
    needs={"gradients", "torch"},
    source="P27, R16, B025",
    changes=("rms_weight",),
    kills=(
        "rows_vjp.py:layer_norm_weight_from_the_input",
        "rows_vjp.py:layer_norm_weight_over_the_wrong_axis",
        "rows_vjp.py:rms_norm_cotangent_overwritten",
        "rows_gradient.py:rms_norm_cotangent_overwritten",
    ),
)
def weight_gradient_obeys_euler(norm: Subject, case: Case, pick: int) -> None:
    """The result less its bias is linear in the gain: <gain, dweight> = <g, y - bias> over all rows."""
    cotangent = cotangent_of(case, pick)
    found, bounds = norm.gradients_with_bounds(case, ("weight",), cotangent)
    if found["weight"] is None:
        return
    y, gain = measure(norm, case), case["weight"]
    gain = gain_of(case, norm.capabilities) if case.operation == "rms_norm" else gain
    got, allowed = pairing(gain, found["weight"], bounds["weight"].allowed)
    wanted, error = pairing(cotangent, before_bias(case, y.value), y.allowed)
    expect_close(got, wanted, allowed + error, what="<gain, dweight>")


@law(
    NORMS,
    case=norm_cases(families=MODERATE),
    pick=PICKS,
    kind="gradient",
    needs={"gradients", "torch"},
    source="P27",
    changes=("rms_weight",),
    kills=("rows_vjp.py:layer_norm_weight_applied_last", "rows_vjp.py:rms_norm_weight_applied_last"),
)
def jacobian_is_symmetric(norm: Subject, case: Case, pick: int) -> None:
    """In each row <gain a, dx for b> = <gain b, dx for a>: apart from the gain the Jacobian is symmetric."""
    a, b = cotangent_of(case, pick), cotangent_of(case, 5 * pick + 1)
    (one, e), (other, f) = (norm.gradients_with_bounds(case, ("x",), g) for g in (a, b))
    if one["x"] is None or other["x"] is None:
        return
    gain = gain_of(case, norm.capabilities) if case.operation == "rms_norm" else case["weight"]
    got, allowed = pairing(gain * round_to(b, case.dtype), one["x"], e["x"].allowed, -1)
    wanted, error = pairing(gain * round_to(a, case.dtype), other["x"], f["x"].allowed, -1)
    expect_close(got, wanted, allowed + error, what="<gain b, dx for a> in a row")


@law(
    "layer_norm",
    case=layer_norm_cases(),
    kind="gradient",
    needs={"gradients"},
    source="P27, R16",
    relative=False,
    kills=("rows_vjp.py:layer_norm_bias_is_a_mean",),
)
def bias_gradient_is_the_sum_of_the_cotangent(layer_norm: Subject, case: Case) -> None:
    """The gradient of bias is the sum of the cotangent over all rows, bit for bit for small whole numbers."""
    top = max(1, min(3, 200 * case.size("d") // case["x"].size))
    cotangent = case.random(3).integers(-top, top + 1, case["x"].shape).astype(float)
    gradient = layer_norm.gradients(case, ("bias",), cotangent)["bias"]
    if gradient is not None:
        expect_same(gradient, cotangent.reshape(-1, case.size("d")).sum(0), what="the gradient of bias")
