"""Gradients of every operation: equal to the reference's, linear in the cotangent, whatever the layout."""

from __future__ import annotations

from hypothesis import strategies as st

from veriformer.case import LAYOUTS, Case
from veriformer.expect import Refused, expect, expect_close, listed
from veriformer.law import Domain, Recipe, choice, law
from veriformer.operations import OPERATIONS
from veriformer.oracle import shapes
from veriformer.properties.attention_cases import PICKS, attention_cases
from veriformer.properties.attention_changes import without_undefined_rows
from veriformer.properties.cotangents import cotangent_of, differentiable, expect_gradients, graded
from veriformer.properties.every_case import EVERY, by_operation, plain_cases
from veriformer.properties.universal_cases import universal_cases
from veriformer.subject import Subject

SMOOTH = tuple(name for name in EVERY if OPERATIONS[name].differentiable and not OPERATIONS[name].words)


def gradient_cases(examples: int) -> Recipe:
    """Cases of every operation, so many of them pinned; their budgets cost more than all the rest."""
    attention = attention_cases(empty=True, examples=examples)
    several = {"attention": attention, "attention_with_lse": attention}
    several["universal_transformer"] = universal_cases(examples=min(examples, 6))  # as deep as several layers
    return by_operation(several, examples=examples)


def other_layouts(domain: Domain) -> tuple[str, ...]:
    """The memory layouts beside the contiguous one that an implementation accepts."""
    return domain.admitted(LAYOUTS[1:])


def settled(subject: Subject, case: Case) -> Case:
    """The case without rows whose value nobody defines."""
    defined = subject.operation.startswith("attention") and case["sink"] is None
    return without_undefined_rows(case, subject.capabilities) if defined else case


@law(
    SMOOTH,
    case=plain_cases(),
    kind="contract",
    root=True,
    needs={"gradients"},
    source="the convention of OPERATION_vjp",
    relative=False,
    kills=("vjp.py:softmax_vjp_raises", "vjp.py:attention_vjp_is_short", "vjp.py:layer_norm_vjp_in_float64"),
)
def returns_gradients(subject: Subject, case: Case) -> None:
    """The gradients of an ordinary call arrive, each of the shape and dtype of its array."""
    names = differentiable(case, subject.capabilities)
    try:
        outcome = subject.outcome(case, names, (cotangent_of(case, 0), *[None] * (len(shapes(case)) - 1)))
    except Refused as refused:
        expect(False, "raised", f"the backward of an ordinary call is refused: {refused}")
        return
    for name, gradient in outcome.gradients.items():
        if gradient is not None:
            same = gradient.shape == case[name].shape
            expect(same, "shape", f"the gradient of {name} has shape {gradient.shape}, wanted {case[name].shape}")
            dtype = outcome.gradient_dtypes[name]
            expect(dtype == case.dtype, "dtype", f"the gradient of {name} is {dtype}, wanted {case.dtype}")
    expect(any(g is not None for g in outcome.gradients.values()), "no gradient", "no gradient at all, wanted some")


@law(
    SMOOTH,
    case=gradient_cases(12),
    pick=PICKS,
    kind="gradient",
    needs={"gradients", "torch"},
    source="R14, P14, P27, P63",
    relative=False,
    changes=("accumulate", "intermediate", "saved_statistics", "recomputes_probabilities"),
    kills=(
        "softmax_backward.py:softmax_in_bfloat16",
        "softmax_backward.py:layer_norm_first_mean_omitted",
        "softmax_backward.py:layer_norm_second_mean_omitted",
        "softmax_backward.py:layer_norm_second_mean_unbiased",
        "softmax_backward.py:layer_norm_eps_omitted",
        "softmax_backward.py:layer_norm_weight_omitted",
        "softmax_backward.py:layer_norm_weight_gradient_of_x",
        "softmax_backward.py:layer_norm_rank_two_alone",
        "softmax_backward.py:layer_norm_rows_averaged",
        "softmax_backward.py:layer_norm_in_bfloat16",
        "attention_backward.py:first_head_for_all",
        "attention_backward.py:score_gradient_in_bfloat16",
        "vjp.py:layer_norm_vjp_of_each_row",
        "vjp.py:layer_norm_vjp_swaps_weight_and_bias",
    ),
)
def gradient_equals_the_reference(subject: Subject, case: Case, pick: int) -> None:
    """Every array's gradient equals the reference's within the error that the declared precision may make."""
    case = settled(subject, case)
    expect_gradients(subject, case, cotangent_of(case, pick))


@law(
    SMOOTH,
    case=gradient_cases(4),
    pick=PICKS,
    factor=choice(2.0, -1.0, 3.0),
    kind="gradient",
    needs={"gradients", "torch"},
    source="R15",
    kills=("attention_backward.py:cotangent_clipped", "attention_backward.py:workspace_not_cleared"),
)
def gradient_is_linear_in_the_cotangent(subject: Subject, case: Case, pick: int, factor: float) -> None:
    """The gradient for a + c b is the gradient for a plus c times the gradient for b."""
    case = settled(subject, case)
    names = differentiable(case, subject.capabilities)
    one, other = (cotangent_of(case, 5 * (pick + extra)) for extra in (0, 1))  # whole numbers: the sum is exact
    a, b = (graded(subject, case, names, cotangent) for cotangent in (one, other))
    both = subject.gradients(case, names, one + factor * other)
    for name in names:
        if both[name] is not None:
            # what a sum may err is at most what its parts may: each rounding is counted twice
            wanted, allowed = a[name].value + factor * b[name].value, a[name].allowed + abs(factor) * b[name].allowed
            expect_close(both[name], wanted, 2 * allowed, largest=subject.largest, what=f"the gradient of {name} is")


@law(
    SMOOTH,
    case=gradient_cases(6),
    layout=Recipe(other_layouts, lambda domain: st.sampled_from(other_layouts(domain))),
    kind="gradient",
    needs={"gradients", "torch"},
    source="R03",
    kills=("attention_backward.py:cotangent_viewed", "attention_backward.py:cotangent_read_as_contiguous"),
)
def gradient_does_not_depend_on_the_layout(subject: Subject, case: Case, layout: str) -> None:
    """Inputs and cotangents in another memory layout have the gradients of a contiguous copy."""
    case = settled(subject, case)
    names, cotangent = differentiable(case, subject.capabilities), cotangent_of(case, 4 if layout == "expanded" else 0)
    packed, bounds = subject.gradients_with_bounds(case, names, cotangent)
    viewed = case.with_layout(layout)
    subject(viewed)  # refused without a gradient: then this layout is not taken at all
    try:
        found = subject.gradients(viewed, names, cotangent)
    except Refused as refused:
        expect(False, "raised", f"the backward refuses what the forward takes: {refused}")
        return
    for name in names:
        expect((found[name] is None) == (packed[name] is None), "no gradient", f"{name} has no gradient in one layout")
        if found[name] is not None:
            allowed = 2 * bounds[name].allowed
            expect_close(found[name], packed[name], allowed, largest=subject.largest, what=f"the gradient of {name} is")


@law(
    SMOOTH,
    case=gradient_cases(6),
    kind="hygiene",
    needs={"gradients"},
    source="R04",
    relative=False,
    kills=(
        "attention_backward.py:cotangent_overwritten",
        "vjp.py:attention_vjp_scales_query_in_place",
        "vjp.py:softmax_vjp_overwrites_the_cotangent",
        "rows_vjp.py:layer_norm_input_overwritten",
        "rows_gradient.py:rms_norm_input_overwritten",
    ),
)
def backward_leaves_inputs_untouched(subject: Subject, case: Case) -> None:
    """The backward changes no bit of the inputs and of the cotangent, but for a cache where that is declared."""
    cotangents = (cotangent_of(case, 0), *[None] * (len(shapes(case)) - 1))
    outcome = subject.outcome(case, differentiable(case, subject.capabilities), cotangents)
    changed = [name for name in outcome.changed if name not in subject.writes]
    expect(not changed, "input changed", f"{listed(changed or '-')} changed in the backward, wanted it untouched")
