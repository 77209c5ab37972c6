"""Gradients of multi-head attention: they come, add up over batch and heads, and stop where nothing is seen."""

from __future__ import annotations

import numpy as np

from veriformer.case import Case
from veriformer.expect import expect, expect_close, expect_different, expect_finite, expect_same
from veriformer.law import law
from veriformer.properties.attention_cases import PICKS
from veriformer.properties.attention_family_build import seen_rows
from veriformer.properties.attention_family_cases import PLAIN, multi_head_attention_cases
from veriformer.properties.cotangents import differentiable
from veriformer.properties.heads_changes import MATRICES, by_heads, weight, widths_of, with_each, with_weights
from veriformer.subject import Subject

NEEDS = {"gradients"}


def faults(*names: str) -> tuple[str, ...]:
    """Variants of impls/faulty/multi_head_gradient.py."""
    return tuple(f"multi_head_gradient.py:heads_{name}" for name in names)


@law(
    "multi_head_attention",
    case=multi_head_attention_cases(),
    kind="gradient",
    needs=NEEDS,
    source="P63",
    relative=False,
    kills=faults("query_weights_detached", "value_bias_detached", "output_bias_detached"),
)
def gradient_exists(multi_head: Subject, case: Case) -> None:
    """x, memory and every weight but the bias of the keys, which changes nothing, get a gradient of their own shape."""
    names = tuple(name for name in differentiable(case) if name != "params.bk")
    for name, gradient in multi_head.gradients(case, names).items():
        expect(gradient is not None, "no gradient", f"{name} got no gradient, wanted one of shape {case[name].shape}")
        same = gradient.shape == case[name].shape
        expect(same, "shape", f"the gradient of {name} has shape {gradient.shape}, wanted {case[name].shape}")


@law(
    "multi_head_attention",
    case=multi_head_attention_cases(bare=False, families=PLAIN),
    pick=PICKS,
    kind="gradient",
    needs={*NEEDS, "biases"},
    source="P59",
    kills=faults("row_sum_missing"),
)
def gradient_of_the_key_bias_vanishes(multi_head: Subject, case: Case, pick: int) -> None:
    """The bias of the keys has gradient 0, since it changes nothing."""
    name = "params.bk"
    found, bounds = multi_head.gradients_with_bounds(case, (name,), upstream(case, pick))
    if found[name] is not None:
        expect_close(found[name], 0.0, bounds[name].allowed, what="the gradient of bk is")


@law(
    "multi_head_attention",
    case=multi_head_attention_cases(grouped=True, families=PLAIN),
    pick=PICKS,
    kind="gradient",
    needs=NEEDS | {"grouped_heads"},
    source="P64",
    kills=faults("last_of_group_alone"),
)
def gradient_of_shared_heads_is_a_sum(multi_head: Subject, case: Case, pick: int) -> None:
    """The gradient of a key head is the sum of those it would have for each of its query heads alone."""
    w, names, cotangent = widths_of(case), ("params.wk", "params.wv"), upstream(case, pick)
    repeated = with_each(case, lambda name, array: np.repeat(array, w.each, -2), "kv")
    (shared, bounds), (single, singles) = (
        multi_head.gradients_with_bounds(one, names, cotangent) for one in (case, repeated)
    )
    for name in names:
        if shared[name] is not None and single[name] is not None:
            parts = (shared[name].shape[0], w.groups, w.each, -1)
            total, slack = (
                array.reshape(parts).sum(2).reshape(shared[name].shape)
                for array in (single[name], singles[name].allowed)
            )
            expect_close(shared[name], total, bounds[name].allowed + slack, what=f"the gradient of {name} is")


@law(
    "multi_head_attention",
    case=multi_head_attention_cases(least={"B": 2}, families=PLAIN),
    pick=PICKS,
    kind="gradient",
    needs=NEEDS,
    source="P63, P64",
    kills=faults("weights_averaged_over_the_batch", "first_sample_probabilities"),
)
def gradient_of_weights_is_a_sum_over_the_batch(multi_head: Subject, case: Case, pick: int) -> None:
    """The gradient of a weight is the sum of those that each batch row gives alone."""
    names, cotangent = tuple(f"params.{name}" for name in MATRICES), upstream(case, pick)
    together, bounds = multi_head.gradients_with_bounds(case, names, cotangent)
    alone = []
    for b in range(len(cotangent)):
        one = case.with_arrays(x=case["x"][b : b + 1], memory=case["memory"][b : b + 1])
        if case["mask"] is not None and len(case["mask"]) > 1:
            one = one.with_arrays(mask=case["mask"][b : b + 1])
        alone.append(multi_head.gradients_with_bounds(one, names, cotangent[b : b + 1]))
    for name in names:
        if together[name] is not None:
            total = sum(found[name] for found, _ in alone)
            slack = sum(bound[name].allowed for _, bound in alone)
            expect_close(together[name], total, bounds[name].allowed + slack, what=f"the gradient of {name} is")


@law(
    "multi_head_attention",
    case=multi_head_attention_cases(least={"G": 2}, families=PLAIN),
    pick=PICKS,
    kind="gradient",
    needs=NEEDS,
    source="P83",
    relative=False,
    kills=faults("mixed"),
)
def gradient_of_a_silent_head_is_zero(multi_head: Subject, case: Case, pick: int) -> None:
    """Heads whose rows of wo are 0 get gradient 0 in wq, wk, wv and their biases; the bv of others gets one."""
    w = widths_of(case)
    silent = pick % w.groups
    heads = np.arange(w.heads) // w.each == silent
    wo = np.where(heads[:, None, None], 0.0, np.abs(by_heads(case, "wo")) + 1)
    quiet = with_weights(case, wo=wo.reshape(case["params.wo"].shape), bv=weight(case, "bv"))
    names = tuple(f"params.{one}" for one in ("wq", "wk", "wv", "bq", "bk", "bv") if quiet[f"params.{one}"] is not None)
    found = multi_head.gradients(quiet, names)
    for name in names:
        if found[name] is not None:
            parts = found[name].reshape(*found[name].shape[:-1], *w.of(name.removeprefix("params.")))
            none = parts[..., heads if name.endswith("q") else [silent], :]
            expect_same(none, np.zeros_like(none), what=f"the gradient of {name} in a silent head is")
            if name == "params.bv":
                others = np.delete(parts, silent, -2)
                expect_different(others, 0.0, what="bv of a head that is heard has a gradient")


@law(
    "multi_head_attention",
    case=multi_head_attention_cases(hidden=True),
    pick=PICKS,
    kind="gradient",
    needs=NEEDS | {"causal or mask"},
    source="P50, P54",
    relative=False,
    kills=faults("mask_forgotten"),
)
def gradient_of_hidden_memory_is_zero(multi_head: Subject, case: Case, pick: int) -> None:
    """The gradient of one output row is exactly 0 at rows of memory that no head of it sees, and in other samples."""
    unseen = ~seen_rows(case, multi_head.capabilities).any(1)
    rows = np.argwhere(unseen.any(-1))
    if not len(rows):
        return
    b, i = case.random(pick).choice(rows)
    cotangent = np.zeros(case["x"].shape)
    cotangent[b, i] = upstream(case, pick)[b, i]
    gradient = multi_head.gradients(case, ("memory",), cotangent)["memory"]
    if gradient is not None:
        hidden = np.ones(gradient.shape[:2], bool)
        hidden[b] = unseen[b, i]
        expect_same(gradient[hidden], np.zeros_like(gradient[hidden]), what="the gradient of hidden memory is")


@law(
    "multi_head_attention",
    case=multi_head_attention_cases(some_empty=True, mask=True, families=PLAIN, least={"B": 2}),
    pick=PICKS,
    kind="gradient",
    needs=NEEDS | {"mask"},
    source="P55, corpus item 6",
    relative=False,
    kills=faults("empty_row_from_lse"),
)
def gradient_ignores_unused_empty_rows(multi_head: Subject, case: Case, pick: int) -> None:
    """Rows that see nothing, and whose outputs nobody uses, leave the gradients finite."""
    used = seen_rows(case, multi_head.capabilities).any(-1).all(1)[..., None]
    cotangent = np.where(used, upstream(case, pick), 0.0)
    for name, gradient in multi_head.gradients(case, differentiable(case), cotangent).items():
        if gradient is not None:
            expect_finite(gradient, what=f"the gradient of {name} is")


def upstream(case: Case, pick: int) -> np.ndarray:
    """A cotangent of the output, small whole numbers [B,Tq,d]."""
    return case.random(pick).integers(-3, 4, case["x"].shape).astype(float)
