"""Gradients of attention, as far as no error budget is needed: they come, are finite, and stop at hidden keys."""

from __future__ import annotations

import numpy as np

from veriformer.case import Case
from veriformer.expect import expect, expect_different, expect_finite, expect_same
from veriformer.law import law
from veriformer.oracle import allowed_keys
from veriformer.properties.attention_cases import PICKS, attention_cases
from veriformer.properties.attention_changes import evenly, some_row, without_undefined_rows
from veriformer.subject import Subject


@law(
    "attention",
    case=attention_cases(),
    kind="gradient",
    needs={"gradients"},
    source="P63",
    relative=False,
    kills=("gradient.py:attention_key_has_no_gradient", "gradient.py:attention_bias_has_no_gradient"),
)
def gradient_exists(attention: Subject, case: Case) -> None:
    """Query, key, value, bias and sink each get a gradient of their own shape."""
    for name, gradient in attention.gradients(case, differentiable(case)).items():
        expect(gradient is not None, "no gradient", f"{name} got no gradient, wanted one of shape {case[name].shape}")
        same = gradient.shape == case[name].shape
        expect(same, "shape", f"the gradient of {name} has shape {gradient.shape}, wanted {case[name].shape}")


@law(
    "attention",
    case=attention_cases(empty=True),
    pick=PICKS,
    kind="gradient",
    needs={"gradients"},
    source="P55",
    relative=False,
    changes=("empty_row",),
    kills=("gradient.py:attention_softmax_of_empty_rows", "gradient.py:attention_recomputed_from_lse"),
)
def gradient_is_finite(attention: Subject, case: Case, pick: int) -> None:
    """Gradients are finite, rows that may see nothing included."""
    case = without_undefined_rows(case, attention.capabilities)
    for name, gradient in attention.gradients(case, differentiable(case), upstream(case, pick)).items():
        if gradient is not None:
            expect_finite(gradient, what=f"the gradient of {name} is")


@law(
    "attention",
    case=attention_cases(hidden=True),
    pick=PICKS,
    kind="gradient",
    needs={"gradients", "causal or mask or window"},
    source="P50, P54",
    relative=False,
    kills=("gradient.py:attention_gradient_ignores_the_mask",),
)
def gradient_of_hidden_keys_is_zero(attention: Subject, case: Case, pick: int) -> None:
    """The gradient of one row is exactly 0 at keys and values hidden from it, in other heads and batch rows."""
    allowed = allowed_keys(case, attention.capabilities)
    row = some_row(~allowed.all(-1), case.random(pick))
    if row is None:
        return
    cotangent = np.zeros((*case["q"].shape[:3], case.size("Dv")))
    cotangent[row] = upstream(case, pick)[row]
    unseen = np.ones(case["k"].shape[:3], bool)
    unseen[row[0], row[1] // (case.size("H") // case.size("G"))] = ~allowed[row]
    for name, gradient in attention.gradients(case, ("k", "v"), cotangent).items():
        if gradient is not None:
            expect_same(gradient[unseen], np.zeros_like(gradient[unseen]), what=f"the gradient of hidden {name} is")


@law(
    "attention",
    case=attention_cases(),
    kind="gradient",
    needs={"gradients"},
    source="P52, P57",
    relative=False,
    kills=("gradient.py:attention_value_tail_has_no_gradient",),
)
def gradient_reaches_visible_values(attention: Subject, case: Case) -> None:
    """Every value that some row may see gets a gradient: with a zero query, the sum of equal shares of ones."""
    seen = allowed_keys(case, attention.capabilities).any(2)
    seen = seen.reshape(case.size("B"), case.size("G"), -1, case.size("Tk")).any(2)
    gradient = attention.gradients(evenly(case), ("v",))["v"]
    if gradient is not None:
        expect_different(gradient[seen], 0.0, what="a value that is seen has a gradient")


def differentiable(case: Case) -> tuple[str, ...]:
    """Names of the arrays of numbers."""
    return tuple(name for name in case.arrays if name != "mask")


def upstream(case: Case, pick: int) -> np.ndarray:
    """A cotangent of the output, small whole numbers [B,H,Tq,Dv]."""
    return case.random(pick).integers(-3, 4, (*case["q"].shape[:3], case.size("Dv"))).astype(float)
