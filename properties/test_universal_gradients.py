"""Gradients of the Universal Transformer: of pondering, through all steps, to nobody who has no influence."""

from __future__ import annotations

import numpy as np

from veriformer.case import Case
from veriformer.expect import expect_between, expect_different, expect_same
from veriformer.law import law
from veriformer.oracle import shapes
from veriformer.properties.attention_cases import PICKS
from veriformer.properties.cotangents import graded
from veriformer.properties.layer_changes import expect_every_gradient
from veriformer.properties.measured import expect_equal
from veriformer.properties.universal_build import ID, B, W, real_tokens, seen
from veriformer.properties.universal_cases import DEFAULT, LEAST, NOT_GLOBAL, universal_cases
from veriformer.properties.universal_changes import (
    EVEN,
    FAR,
    LAYER,
    PLAIN,
    even_weights,
    silenced,
    telling,
    with_halting,
)
from veriformer.subject import Subject


@law(
    ID,
    case=universal_cases(presets=DEFAULT, bare=False, least={"L": 2}, examples=5),
    kind="gradient",
    needs=EVEN | {"gradients"},
    source="P102, R68",
    relative=False,
    kills=(
        "universal_gradient.py:remainder_detached",
        "universal_gradient.py:pondering_gets_dearer",
    ),
)
def pondering_gets_cheaper_with_the_halting_bias(universal: Subject, case: Case) -> None:
    """The gradient of the sum of all N + R by the halting bias is never positive, and negative where some N > 1."""
    shape = shapes(case)[2]
    found = graded(universal, case, (B,), (None, None, np.ones(shape)))[B]
    expect_between(found.value, -np.inf, 0.0, found.allowed, what="the gradient of the halting bias is")
    _, steps, remainder = universal.bounds(case)
    told = np.isfinite(steps.allowed).all() and ((steps.value > 1) & (remainder.value < 0.99)).any()
    if told:
        expect_different(found.value, 0.0, what="the halting bias gets a gradient of the remainder")


@law(
    ID,
    case=universal_cases(pace="even", presets=DEFAULT, pre=True, least={"L": 2}, examples=5),
    pick=PICKS,
    kind="gradient",
    needs=EVEN | {"norm", "pre_norm", "gradients"},
    source="P81, P91, P102",
    relative=False,
    kills=(
        "universal_gradient.py:steps_detached",
        "universal_gradient.py:states_detached_in_the_mean",
        "universal_gradient.py:gradient_of_the_last_step_alone",
    ),
)
def gradient_passes_through_all_steps(universal: Subject, case: Case, pick: int) -> None:
    """In pre-norm, where every sublayer gives 0, that of x is the cotangent, and b2 counts n times in the nth state."""
    case, real = silenced(case), real_tokens(case)[..., None]
    name = f"{LAYER}feed_forward.b2"
    case = case.with_arrays(**{name: np.zeros(case["x"].shape[2])})
    cotangent = case.random(pick).integers(-3, 4, case["x"].shape).astype(float)
    found = graded(universal, case, ("x", name), (cotangent, None, None))
    weights, n, _ = even_weights(case)
    expect_equal(found["x"], np.where(real, cotangent, 0.0), what="the gradient of x is")
    mean = float(weights @ np.arange(1, n + 1))
    expect_equal(found[name], mean * np.where(real, cotangent, 0.0).sum((0, 1)), what=f"the gradient of {name} is")


@law(
    ID,
    case=universal_cases(presets=DEFAULT, bare=False, mask=False, memory_mask=False, least=LEAST, examples=4),
    pick=PICKS,
    kind="gradient",
    needs=PLAIN | {"gradients"},
    source="R17",
    relative=False,
    kills=(
        "universal_gradient.py:halting_unit_detached",
        "universal_gradient.py:halting_detached_in_the_mean",
        "universal_gradient.py:queries_detached",
        "universal_gradient.py:inner_bias_detached",
        "universal_gradient.py:norm_weight_detached",
        "universal_gradient.py:memory_detached",
    ),
)
def gradient_reaches_every_weight(universal: Subject, case: Case, pick: int) -> None:
    """x, memory and every weight but the bias of the keys get a gradient of their own shape that is not 0."""
    expect_every_gradient(universal, case, pick, telling)


@law(
    ID,
    case=universal_cases(presets=NOT_GLOBAL, causal=True, least={"T": 2}),
    pick=PICKS,
    kind="gradient",
    needs={"gradients", "causal"},
    source="P50, P54, P106",
    relative=False,
    kills=(
        "universal_gradient.py:tokens_pooled",
        "universal_gradient.py:padding_trained",
    ),
)
def gradient_of_unseen_tokens_is_zero(universal: Subject, case: Case, pick: int) -> None:
    """The gradient of one token's output and remainder is exactly 0 at later tokens, padding and other sequences."""
    (b, i), rng = case.random(pick).choice(np.argwhere(real_tokens(case))), case.random(pick + 1)
    out, remainder = np.zeros(case["x"].shape), np.zeros(case["x"].shape[:2])
    out[b, i], remainder[b, i] = rng.integers(1, 4, case["x"].shape[2]), 1.0
    gradient = universal.gradients(case, ("x",), (out, None, remainder))["x"]
    if gradient is not None:
        hidden = np.ones(gradient.shape[:2], bool)
        hidden[b] = ~seen(case)[b, i]
        expect_same(gradient[hidden], np.zeros_like(gradient[hidden]), what="the gradient of unseen tokens is")


@law(
    ID,
    case=universal_cases(presets=DEFAULT, bare=False, least={"L": 2}, examples=5),
    pick=PICKS,
    kind="gradient",
    needs=EVEN | {"gradients"},
    source="P102",
    relative=False,
    kills=(
        "universal_gradient.py:last_weight_of_halting",
        "universal_gradient.py:remainder_of_all_halting",
    ),
)
def who_halts_at_once_teaches_the_halting_unit_nothing(universal: Subject, case: Case, pick: int) -> None:
    """Where everybody halts at step 1, the gradient of the halting unit is exactly 0: h_N has no influence."""
    case, rng = with_halting(case, FAR), case.random(pick)
    cotangents = (rng.integers(1, 4, case["x"].shape).astype(float), None, np.ones(case["x"].shape[:2]))
    for name, gradient in universal.gradients(case, (W, B), cotangents).items():
        if gradient is not None:
            expect_same(gradient, np.zeros_like(case[name]), what=f"the gradient of {name} is")
