"""Gradients of attention, as far as no error budget is needed: they come, are finite, and stop at hidden keys."""

from __future__ import annotations

import numpy as np

from veriformer.case import Case
from veriformer.expect import expect, expect_different, expect_finite, expect_same
from veriformer.law import law
from veriformer.oracle import allowed_keys
from veriformer.properties.attention_cases import PICKS, attention_cases
from veriformer.properties.attention_changes import evenly, some_row, without_undefined_rows
from veriformer.properties.cotangents import cotangent_of, differentiable
from veriformer.subject import Subject


@law(
    "attention",
    case=attention_cases(),
    kind="gradient",
    needs={"gradients"},
    source="P63",
    relative=False,
    kills=(
        "gradient.py:attention_key_has_no_gradient",
        "gradient.py:attention_bias_has_no_gradient",
        "vjp.py:attention_vjp_without_bias",
    ),
)
def gradient_exists(attention: Subject, case: Case) -> None:
    """Query, key, value, bias and sink each get a gradient of their own shape."""
    for name, gradient in attention.gradients(case, differentiable(case, attention.capabilities)).items():
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
    kills=(
        "gradient.py:attention_softmax_of_empty_rows",
        "gradient.py:attention_recomputed_from_lse",
        "attention_backward.py:without_maximum",
    ),
)
def gradient_is_finite(attention: Subject, case: Case, pick: int) -> None:
    """Gradients are finite, rows that may see nothing included."""
    case = without_undefined_rows(case, attention.capabilities)
    for name, gradient in attention.gradients(
        case, differentiable(case, attention.capabilities), cotangent_of(case, 5 * pick)
    ).items():
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
    kills=(
        "gradient.py:attention_gradient_ignores_the_mask",
        "attention_backward.py:mask_ignored",
        "attention_backward.py:causal_top_left",
        "attention_backward.py:window_ignored",
    ),
)
def gradient_of_hidden_keys_is_zero(attention: Subject, case: Case, pick: int) -> None:
    """The gradient of one row is exactly 0 at keys and values hidden from it, in other heads and batch rows."""
    allowed = allowed_keys(case, attention.capabilities)
    row = some_row(~allowed.all(-1), case.random(pick))
    if row is None:
        return
    cotangent = np.zeros((*case["q"].shape[:3], case.size("Dv")))
    cotangent[row] = cotangent_of(case, 5 * pick)[row]
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


@law(
    "attention",
    case=attention_cases(empty=True),
    pick=PICKS,
    kind="gradient",
    needs={"gradients"},
    source="P63, R14",
    relative=False,
    changes=("empty_row",),
    kills=("attention_backward.py:delta_of_next_row", "attention_backward.py:cotangent_of_first_row"),
)
def rows_without_cotangent_pass_nothing_on(attention: Subject, case: Case, pick: int) -> None:
    """A query whose cotangent is 0 has a gradient of exactly 0, whatever the other rows' cotangents are."""
    case = without_undefined_rows(case, attention.capabilities)
    silent = case.random(pick).permutation(case.size("Tq")) % 2 == pick % 2
    cotangent = np.where(silent[:, None], 0.0, cotangent_of(case, 5 * pick))
    found = attention.gradients(case, ("q",), cotangent)["q"]
    if found is not None:
        found = found[:, :, silent]
        expect_same(found, np.zeros_like(found), what="the gradient of a query without cotangent is")


@law(
    "attention",
    case=attention_cases(some_empty=True),
    kind="gradient",
    needs={"empty rows", "gradients", "sink or zero rows"},
    source="P55",
    relative=False,
    changes=("empty_row",),
    kills=("attention_backward.py:empty_rows_uniform",),
)
def empty_rows_pass_nothing_on(attention: Subject, case: Case) -> None:
    """Rows that may see nothing, and give zeros, pass a gradient of exactly 0 to every array."""
    case = without_undefined_rows(case, attention.capabilities)
    empty = ~allowed_keys(case, attention.capabilities).any(-1)
    if not empty.any():
        return
    cotangent = np.where(empty[..., None], cotangent_of(case, 0), 0.0)
    for name, gradient in attention.gradients(case, differentiable(case, attention.capabilities), cotangent).items():
        if gradient is not None:
            expect_same(gradient, np.zeros_like(gradient), what=f"the gradient of {name} by empty rows is")
