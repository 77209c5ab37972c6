"""Gradients of attention_with_lse: those of its output, and those of the normaliser beside it."""

from __future__ import annotations

import numpy as np

from veriformer.case import Case
from veriformer.expect import expect_same
from veriformer.law import law
from veriformer.oracle import allowed_keys
from veriformer.properties.attention_cases import PICKS, attention_cases
from veriformer.properties.attention_changes import without_undefined_rows
from veriformer.properties.cotangents import cotangent_of, expect_gradients, graded
from veriformer.properties.measured import expect_equal
from veriformer.subject import Subject

NEEDS = frozenset({"gradients", "torch"})


def of_lse(case: Case, pick: int, subject: Subject) -> np.ndarray:
    """A cotangent of lse [B,H,Tq], 0 on empty rows, where lse is -inf and has no derivative."""
    return np.where(allowed_keys(case, subject.capabilities).any(-1), cotangent_of(case, pick, 1), 0.0)


@law(
    "attention_with_lse",
    case=attention_cases(empty=True, examples=12),
    pick=PICKS,
    kind="gradient",
    needs=NEEDS,
    source="P61, P63, R14",
    relative=False,
    changes=("empty_row", "accumulate", "intermediate", "recomputes_probabilities"),
    kills=("attention_backward.py:lse_gradient_dropped", "attention_backward.py:lse_gradient_unscaled"),
)
def gradient_through_both_results_equals_the_reference(attention_with_lse: Subject, case: Case, pick: int) -> None:
    """With a cotangent for lse as well, every array's gradient equals the reference's within its error budget."""
    case = without_undefined_rows(case, attention_with_lse.capabilities)
    expect_gradients(attention_with_lse, case, (cotangent_of(case, pick), of_lse(case, pick, attention_with_lse)))


@law(
    "attention_with_lse",
    case=attention_cases(bias=True, empty=True),
    pick=PICKS,
    kind="gradient",
    needs=NEEDS | {"bias", "bias_gradient"},
    source="P17, P61",
    changes=("empty_row",),
    kills=("attention_backward.py:lse_gradient_dropped", "attention_backward.py:lse_gradient_beside_sink"),
)
def lse_gradient_by_the_bias_sums_to_its_cotangent(attention_with_lse: Subject, case: Case, pick: int) -> None:
    """The gradient of lse by a row's bias is a softmax without the sink: it sums to the cotangent of lse."""
    case = without_undefined_rows(case, attention_with_lse.capabilities)
    case = case.with_arrays(bias=np.broadcast_to(case["bias"], (*case["q"].shape[:3], case.size("Tk"))))
    cotangent = of_lse(case, pick, attention_with_lse)
    found = graded(attention_with_lse, case, ("bias",), (None, cotangent))["bias"]
    expect_equal(
        found.rearranged(lambda each: each.sum(-1)), cotangent, what="the sum of a row of the bias gradient is"
    )


@law(
    "attention_with_lse",
    case=attention_cases(empty=True),
    pick=PICKS,
    kind="gradient",
    needs={"gradients"},
    source="P61",
    relative=False,
    kills=("attention_backward.py:lse_gradient_through_values",),
)
def lse_has_no_value_gradient(attention_with_lse: Subject, case: Case, pick: int) -> None:
    """lse does not depend on the values: their gradient through it is exactly 0."""
    case = without_undefined_rows(case, attention_with_lse.capabilities)
    found = attention_with_lse.gradients(case, ("v",), (None, of_lse(case, pick, attention_with_lse)))["v"]
    if found is not None:
        expect_same(found, np.zeros_like(found), what="the gradient of v is")
