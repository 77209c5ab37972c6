"""Gradients of what works on each row by itself: they exist, are finite, and keep to their rows."""

from __future__ import annotations

import numpy as np

from veriformer.budgets.precision import C, Precision
from veriformer.case import Case
from veriformer.expect import expect, expect_close, expect_finite, expect_same
from veriformer.law import law
from veriformer.properties.attention_cases import PICKS
from veriformer.properties.cotangents import cotangent_of, differentiable
from veriformer.properties.every_case import by_operation
from veriformer.properties.rows import uneven, with_other_rows_changed
from veriformer.properties.rows_cases import (
    dropout_cases,
    elementwise_cases,
    embedding_cases,
    feed_forward_cases,
    rms_norm_cases,
)
from veriformer.subject import Subject

NEW = ("rms_norm", "gelu", "relu", "feed_forward", "dropout", "embedding")
WITH_WEIGHTS = ("layer_norm", "rms_norm", "feed_forward")
BOTH_LAYOUTS = ("contiguous", "transposed")
ROWS = 1000
MANY_TIMES = {"layer_norm": ("bias", "x"), "feed_forward": ("b2", "x"), "embedding": ("table", "ids")}
"""What gets the plain sum of the cotangents, and what has a row for each of them."""


@law(
    NEW,
    case=by_operation(
        {
            "rms_norm": rms_norm_cases(layouts=BOTH_LAYOUTS),
            "gelu": elementwise_cases(layouts=BOTH_LAYOUTS),
            "relu": elementwise_cases(layouts=BOTH_LAYOUTS),
            "feed_forward": feed_forward_cases(layouts=BOTH_LAYOUTS),
            "dropout": dropout_cases(rates=(0.5, 0.25), layouts=BOTH_LAYOUTS),
            "embedding": embedding_cases(layouts=BOTH_LAYOUTS),
        }
    ),
    kind="gradient",
    needs={"gradients"},
    source="R17, B026, B027",
    relative=False,
    kills=("rows_vjp.py:rms_norm_weight_has_no_gradient", "rows_gradient.py:rms_norm_contiguous_has_no_backward"),
)
def gradient_exists(subject: Subject, case: Case) -> None:
    """Every array of numbers that has an influence gets a gradient of its own shape."""
    names = differentiable(case)
    for name, gradient in subject.gradients(case, names, uneven(case)).items():
        expect(gradient is not None, "no gradient", f"no gradient reached {name}, wanted one")
        same = gradient.shape == case[name].shape
        expect(same, "shape", f"the gradient of {name} has shape {gradient.shape}, wanted {case[name].shape}")


@law(
    NEW,
    case=by_operation({"feed_forward": feed_forward_cases(families=("normal", "integers", "one_hot", "sparse"))}),
    kind="gradient",
    needs={"gradients"},
    source="R18",
    relative=False,
    kills=("rows_gradient.py:rms_norm_root_of_zero", "rows_gradient.py:gelu_slope_overflows"),
)
def gradient_is_finite(subject: Subject, case: Case) -> None:
    """Gradients are finite, for rows of zeros and far from 0 as well."""
    case = with_a_row_of_zeros(case) if case.operation == "rms_norm" else case
    for name, gradient in subject.gradients(case, differentiable(case), uneven(case)).items():
        if gradient is not None:
            expect_finite(gradient, what=f"the gradient of {name}")


def with_a_row_of_zeros(case: Case) -> Case:
    """The case with its first row 0, and an eps no smaller than usual, so that 1/sqrt(eps) is moderate."""
    x = case["x"].copy()
    x[(0,) * (x.ndim - 1)] = 0.0
    return case.with_arrays(x=x).with_keywords(eps=max(case["eps"], 1e-6))


@law(
    WITH_WEIGHTS,
    case=by_operation({}, rows=2),
    pick=PICKS,
    kind="gradient",
    needs={"gradients", "torch"},
    source="P20, R02, B057",
    changes=("leak",),
    kills=("rows_vjp.py:layer_norm_first_cotangent_for_all", "rows_gradient.py:ffn_first_cotangent_for_all"),
)
def gradient_of_a_row_is_its_own(subject: Subject, case: Case, pick: int) -> None:
    """The gradient of a row of x depends on that row and its cotangent, not on the others."""
    changed, kept = with_other_rows_changed(case)
    cotangent = cotangent_of(case, pick)
    other = np.where(kept[..., None], cotangent, 2 - cotangent[..., ::-1])
    before, bounds = subject.gradients_with_bounds(case, ("x",), cotangent)
    after = subject.gradients(changed, ("x",), other)
    if before["x"] is None or after["x"] is None:
        return
    if subject.capabilities.leak == "exact":
        expect_same(after["x"][kept], before["x"][kept], what="the gradient of x in an unchanged row is")
    else:
        expect_close(after["x"][kept], before["x"][kept], 2 * bounds["x"].allowed[kept], what="the gradient of x")


@law(
    WITH_WEIGHTS,
    case=by_operation({}),
    pick=PICKS,
    kind="gradient",
    needs={"gradients", "torch"},
    source="R05, B019",
    kills=(
        "rows_vjp.py:layer_norm_rank_two_assumed",
        "rows_vjp.py:rms_norm_rank_two_assumed",
        "rows_gradient.py:rms_norm_rank_two_assumed",
    ),
)
def rank_changes_no_gradient(subject: Subject, case: Case, pick: int) -> None:
    """The leading axes may be cut in any way: every gradient stays as it is."""
    width, names = case["x"].shape[-1], differentiable(case)
    count = case["x"].size // width
    cotangent = cotangent_of(case, pick)
    first, bounds = subject.gradients_with_bounds(case, names, cotangent)
    for shape in ((count, width), (1, count, 1, width), (2, -1, width))[: 3 - count % 2]:
        cut = case.with_arrays(x=case["x"].reshape(shape))
        for name, found in subject.gradients(cut, names, cotangent.reshape(shape)).items():
            if found is not None and first[name] is not None:
                allowed = 2 * bounds[name].allowed
                expect_close(found.reshape(allowed.shape), first[name], allowed, what=f"the gradient of {name}")


@law(
    ("layer_norm", "feed_forward", "embedding"),
    case=by_operation({}, layouts=("contiguous",)),
    kind="gradient",
    needs={"gradients"},
    source="R16, B033",
    relative=False,
    changes=("accumulate", "intermediate", "gradient_accumulate"),
    kills=("rows_vjp.py:layer_norm_summed_in_storage", "rows_gradient.py:embedding_summed_in_storage"),
)
def gradient_counts_every_row(subject: Subject, case: Case) -> None:
    """What a thousand rows add to alike, each a 7, has the gradient 7000: sums over rows do not stall."""
    name, first = MANY_TIMES[case.operation]
    rows = case[first].reshape(-1) if first == "ids" else case[first].reshape(-1, case.size("d"))
    many = case.with_arrays(**{first: np.broadcast_to(rows[:1], (ROWS, *rows.shape[1:]))})
    found = subject.gradients(many, (name,), np.full((ROWS, case.size("d")), 7.0))[name]
    if found is not None:
        p, total = subject.precision, 7.0 * ROWS
        found, padded = (found[many["ids"][0]], case["padding_index"]) if first == "ids" else (found, None)
        wanted = 0.0 if padded is not None and padded == many["ids"][0] else total
        sums = Precision(case.dtype, accumulate=subject.capabilities.at("gradient_accumulate", case.dtype))
        allowed = total * (p.g(ROWS) * max(p.u_acc, sums.u_acc) + C * p.u_store + p.u_out)
        expect_close(found, wanted, allowed, what=f"the gradient of {name}")
