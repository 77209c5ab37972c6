"""Laws of gelu and relu."""

from __future__ import annotations

import math

import numpy as np

from veriformer.case import Case
from veriformer.expect import expect_between, expect_close, expect_same
from veriformer.law import choice, law
from veriformer.properties.measured import expect_equal, measure
from veriformer.properties.rows_cases import elementwise_cases
from veriformer.subject import Subject

DEEPEST = 0.1701
"""No form of gelu lies further below relu."""
LOWEST = (-0.7525, -0.7517)
"""Both forms have their minimum between these."""


def by_definition(x: float, form: str) -> float:
    """gelu of one number by Python's own functions."""
    if form == "tanh":
        return x / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return x / 2 * math.erfc(-x / math.sqrt(2))


@law(
    ("gelu", "relu"),
    case=elementwise_cases(),
    source="B118",
    kills=(
        "activations.py:gelu_square_for_cube",
        "activations.py:gelu_half_is_missing",
        "activations.py:gelu_one_plus_tanh_in_half",
        "activations.py:gelu_erf_of_size",
        "activations.py:relu_leaks",
        "activations.py:relu_capped_at_six",
        "activations.py:relu_is_size",
    ),
)
def reflection_leaves_the_input(subject: Subject, case: Case) -> None:
    """f(x) - f(-x) is x."""
    right, left = measure(subject, case), measure(subject, case.with_arrays(x=-case["x"]))
    expect_close(right.value - left.value, case["x"], right.allowed + left.allowed, what="f(x) - f(-x)")


@law(
    "gelu",
    case=elementwise_cases(families=("grid", "normal", "tail", "integers", "ladder")),
    source="Hendrycks, Gimpel 2016; B117, B118",
    relative=False,
    changes=("gelu",),
    kills=(
        "activations.py:gelu_tanh_undeclared",
        "activations.py:gelu_erf_for_tanh",
        "activations.py:gelu_coefficient_misplaced",
        "activations.py:gelu_by_sigmoid",
        "activations.py:gelu_root_of_two_is_missing",
        "activations.py:gelu_is_silu",
        "activations.py:gelu_one_plus_tanh_in_half",
        "activations.py:gelu_tail_is_zero",
        "activations.py:gelu_is_relu",
    ),
)
def has_the_values_of_its_form(gelu: Subject, case: Case) -> None:
    """x/2 (1 + erf(x / sqrt 2)), or its approximation by tanh where that is declared, number by number."""
    x, form = case["x"], gelu.capabilities.gelu
    wanted = np.reshape([by_definition(float(value), form) for value in x.flat], x.shape)
    expect_equal(measure(gelu, case), wanted)


@law(
    "gelu",
    case=elementwise_cases(),
    source="B119",
    relative=False,
    kills=(
        "activations.py:gelu_overflows",
        "activations.py:gelu_is_silu",
        "activations.py:gelu_half_is_missing",
        "activations.py:gelu_erf_by_a_series",
    ),
)
def lies_just_under_relu(gelu: Subject, case: Case) -> None:
    """max(x, 0) - 0.1701 <= gelu(x) <= max(x, 0), finite for every finite x; far from 0 gelu is relu."""
    got, top = measure(gelu, case), np.maximum(case["x"], 0.0)
    gap = np.where(np.abs(case["x"]) < 40, DEEPEST, 0.0)
    expect_between(got.value, top - gap, top, got.allowed)


@law(
    "gelu",
    case=elementwise_cases(families=("grid", "normal", "tail", "ladder")),
    source="B119",
    relative=False,
    kills=("activations.py:gelu_erf_by_a_series", "activations.py:gelu_one_plus_tanh_in_half"),
)
def falls_and_then_rises(gelu: Subject, case: Case) -> None:
    """gelu falls up to -0.7525 and rises from -0.7517 on."""
    x = np.sort(np.concatenate([case["x"].reshape(-1), LOWEST]))
    got = measure(gelu, case.with_arrays(x=x))
    x = case.with_arrays(x=x)["x"]
    steps, allowed = np.diff(got.value), got.allowed[1:] + got.allowed[:-1]
    falling, rising = x[1:] <= LOWEST[0], x[:-1] >= LOWEST[1]
    expect_between(steps[falling], -np.inf, 0.0, allowed[falling], what="a step to the right")
    expect_between(steps[rising], 0.0, np.inf, allowed[rising], what="a step to the right")


@law(
    ("gelu", "relu"),
    case=elementwise_cases(),
    source="R05, R06",
    kills=("activations.py:gelu_tail_untouched", "activations.py:relu_tail_untouched", "activations.py:gelu_by_rows"),
)
def each_entry_by_itself(subject: Subject, case: Case) -> None:
    """Entries in another order and another shape have the same values."""
    order = case.random().permutation(case["x"].size)
    moved = measure(subject, case.with_arrays(x=case["x"].reshape(-1)[order]))
    expect_equal(moved, measure(subject, case).rearranged(lambda array: array.reshape(-1)[order]))


@law(
    "relu",
    case=elementwise_cases(extras=True),
    source="the definition",
    relative=False,
    kills=("activations.py:relu_leaks", "activations.py:relu_is_softplus"),
)
def twice_is_once(relu: Subject, case: Case) -> None:
    """relu of relu is relu, bit for bit."""
    once = relu(case)
    expect_same(relu(case.with_arrays(x=once)), once)


@law(
    "relu",
    case=elementwise_cases(families=("grid", "normal", "integers", "ladder", "large_mean", "low")),
    factor=choice(2.0, 0.5, 64.0, 2.0**-8),
    source="P82",
    relative=False,
    kills=("activations.py:relu_capped_at_six", "activations.py:relu_is_softplus", "activations.py:relu_shifted"),
)
def goes_with_a_positive_factor(relu: Subject, case: Case, factor: float) -> None:
    """relu(a x) is a relu(x) for a > 0, bit for bit where a is a power of two."""
    scaled = case.with_arrays(x=case["x"] * factor)
    exact = (scaled["x"] == case["x"] * factor) & np.isfinite(scaled["x"])
    expect_same(relu(scaled)[exact], (relu(case) * factor)[exact])


@law(
    "gelu",
    case=elementwise_cases(),
    kind="gradient",
    needs={"gradients", "torch"},
    source="B118, R16",
    kills=(
        "rows_vjp.py:gelu_slope_half_is_missing",
        "rows_vjp.py:gelu_bell_does_not_turn",
        "rows_gradient.py:gelu_straight_through",
    ),
)
def slopes_of_mirrored_inputs_add_up(gelu: Subject, case: Case) -> None:
    """The slopes at x and at -x add up to 1, because f(x) - f(-x) is x."""
    cotangent = case.random(3).integers(1, 4, case["x"].shape).astype(float)
    mirrored = case.with_arrays(x=-case["x"])
    (one, e), (other, f) = (gelu.gradients_with_bounds(each, ("x",), cotangent) for each in (case, mirrored))
    if one["x"] is not None and other["x"] is not None:
        allowed = e["x"].allowed + f["x"].allowed
        expect_close(one["x"] + other["x"], cotangent, allowed, what="the sum of the gradients at x and -x is")


@law(
    "gelu",
    case=elementwise_cases(families=("grid", "tail", "normal")),
    kind="gradient",
    needs={"gradients", "torch"},
    source="B119",
    kills=(
        "rows_vjp.py:gelu_without_the_bell",
        "rows_vjp.py:gelu_slope_in_half",
        "rows_gradient.py:gelu_straight_through",
    ),
)
def slope_changes_sign_at_the_minimum(gelu: Subject, case: Case) -> None:
    """The slope is negative left of -0.7525 and positive right of -0.7517."""
    found, bounds = gelu.gradients_with_bounds(case, ("x",), np.ones(case["x"].shape))
    x, slope, allowed = case["x"], found["x"], bounds["x"].allowed
    if slope is not None:
        left, right = x < LOWEST[0], x > LOWEST[1]
        expect_between(slope[left], -np.inf, 0.0, allowed[left], what="the gradient of x")
        expect_between(slope[right], 0.0, np.inf, allowed[right], what="the gradient of x")


@law(
    "relu",
    case=elementwise_cases(),
    kind="gradient",
    needs={"gradients"},
    source="the definition",
    relative=False,
    kills=(
        "rows_vjp.py:relu_straight_through",
        "rows_vjp.py:relu_mask_inverted",
        "rows_vjp.py:relu_leaks_in_backward",
        "rows_gradient.py:relu_mask_of_the_cotangent",
    ),
)
def gradient_passes_where_the_input_is_positive(relu: Subject, case: Case) -> None:
    """The gradient is the cotangent where x > 0 and exactly 0 where x < 0."""
    cotangent = case.random(3).integers(-3, 4, case["x"].shape).astype(float)
    gradient, x = relu.gradients(case, ("x",), cotangent)["x"], case["x"]
    if gradient is not None:
        expect_same(gradient[x != 0], np.where(x > 0, cotangent, 0.0)[x != 0], what="the gradient of x")
