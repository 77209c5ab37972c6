"""Gradients of attention: sums and relations that hold without knowing their values.

With ds the gradient by the logits: dq = scale ds k, dk = scale ds^T q, dv = p^T do, and each row of ds sums to 0.
"""

from __future__ import annotations

import numpy as np

from veriformer.case import Case
from veriformer.law import law
from veriformer.oracle import allowed_keys
from veriformer.properties.attention_build import FILLS
from veriformer.properties.attention_cases import PICKS, attention_cases
from veriformer.properties.attention_changes import keep, per_head, some_row, without_undefined_rows
from veriformer.properties.cotangents import cotangent_of, differentiable, graded
from veriformer.properties.measured import Measured, expect_equal
from veriformer.subject import Subject

NEEDS = frozenset({"gradients", "torch"})


def by_group(heads: np.ndarray, case: Case) -> np.ndarray:
    """[B,H,...] -> [B,G,...], summed over the query heads of each group."""
    return heads.reshape(case.size("B"), case.size("G"), -1, *heads.shape[2:]).sum(2)


def inner(array: np.ndarray, gradient: Measured) -> Measured:
    """<array, gradient> of each batch row and head, [B,·,T,D] -> [B,·]."""
    return (gradient * array).rearranged(lambda each: each.sum(tuple(range(2, array.ndim))))


def product(gradient: Measured, rows: np.ndarray) -> Measured:
    """gradient @ rows, in which a row of 0 takes even what is undetermined with it."""
    far = ~np.isfinite(gradient.allowed)
    allowed = np.where(far, 0.0, gradient.allowed) @ np.abs(rows)
    return Measured(gradient.value @ rows, np.where(far.astype(float) @ (rows != 0) > 0, np.inf, allowed))


def twice(gradient: Measured) -> Measured:
    """A gradient beside another of the same sums, which may err as much."""
    return Measured(gradient.value, 2 * gradient.allowed)


def scores(case: Case) -> tuple[np.ndarray, float]:
    """q k^T scale [B,H,Tq,Tk], before the softcap, and the scale."""
    scale = case.size("D") ** -0.5 if case["scale"] is None else case["scale"]
    return case["q"] @ per_head(case, "k").swapaxes(-1, -2) * scale, scale


@law(
    "attention",
    case=attention_cases(sink=False, empty=True),
    pick=PICKS,
    kind="gradient",
    needs=NEEDS,
    source="P57",
    changes=("empty_row",),
    kills=(
        "attention_backward.py:value_weights_unnormalised",
        "attention_backward.py:value_weights_transposed",
        "attention_backward.py:first_row_skipped",
        "attention_backward.py:last_of_odd_rows_skipped",
        "attention_backward.py:rounded_normaliser",
        "attention_backward.py:group_averaged",
    ),
)
def value_gradients_sum_to_the_cotangents(attention: Subject, case: Case, pick: int) -> None:
    """The value gradients of a key head sum to the cotangents of all rows that see something: weights sum to 1."""
    case = without_undefined_rows(case, attention.capabilities)
    seeing = allowed_keys(case, attention.capabilities).any(-1)[..., None]
    cotangent = cotangent_of(case, pick)
    total = graded(attention, case, ("v",), cotangent)["v"].rearranged(lambda each: each.sum(2))
    expect_equal(total, by_group((cotangent * seeing).sum(2), case), what="the sum of the value gradients is")


@law(
    "attention",
    case=attention_cases(sink=False, softcap=False),
    pick=PICKS,
    kind="gradient",
    needs=NEEDS,
    source="P59",
    kills=("attention_backward.py:delta_omitted", "attention_backward.py:tail_keys_skipped"),
)
def key_gradients_sum_to_zero(attention: Subject, case: Case, pick: int) -> None:
    """The key gradients of a head sum to 0: the same vector added to all keys changes nothing."""
    total = graded(attention, case, ("k",), cotangent_of(case, pick))["k"].rearranged(lambda each: each.sum(2))
    expect_equal(total, 0.0, what="the sum of the key gradients is")


@law(
    "attention",
    case=attention_cases(empty=True),
    pick=PICKS,
    kind="gradient",
    needs=NEEDS,
    source="P63",
    changes=("empty_row",),
    kills=("attention_backward.py:scale_missing_in_query", "attention_backward.py:scale_squared_in_key"),
)
def query_and_key_gradients_agree(attention: Subject, case: Case, pick: int) -> None:
    """<q, dq> of the query heads that share a key head equals <k, dk>: both are the scores times their gradient."""
    case = without_undefined_rows(case, attention.capabilities)
    found = graded(attention, case, ("q", "k"), cotangent_of(case, pick))
    by_query = inner(case["q"], found["q"]).rearranged(lambda each: by_group(each, case))
    expect_equal(by_query, inner(case["k"], found["k"]), what="<q, dq> is")


@law(
    "attention",
    case=attention_cases(bias=True, empty=True),
    pick=PICKS,
    kind="gradient",
    needs=NEEDS | {"bias", "bias_gradient"},
    source="P63, P65",
    changes=("empty_row",),
    kills=(
        "attention_backward.py:scale_of_value_width",
        "attention_backward.py:softcap_slope_missing",
        "attention_backward.py:softcap_slope_of_capped",
        "attention_backward.py:bias_gradient_scaled",
    ),
)
def score_gradients_reach_query_and_key(attention: Subject, case: Case, pick: int) -> None:
    """dq = ds k and dk = ds^T q, with ds the gradient of a full bias times the scale and the softcap's slope."""
    case = without_undefined_rows(case, attention.capabilities)
    s, scale = scores(case)
    case = case.with_arrays(bias=np.broadcast_to(case["bias"], s.shape))
    slope = scale * (1.0 if case["softcap"] is None else 1 / np.cosh(np.minimum(np.abs(s / case["softcap"]), 300)) ** 2)
    found = graded(attention, case, ("q", "k", "bias"), cotangent_of(case, pick))
    ds = found["bias"] * slope
    by_queries = product(ds.rearranged(lambda each: each.swapaxes(-1, -2)), case["q"])
    expect_equal(found["q"], product(ds, per_head(case, "k")), what="the gradient of q is")
    expect_equal(found["k"], by_queries.rearranged(lambda each: by_group(each, case)), what="the gradient of k is")


@law(
    "attention",
    case=attention_cases(grouped=True),
    pick=PICKS,
    kind="gradient",
    needs=NEEDS | {"grouped_heads"},
    source="P64",
    kills=(
        "attention_backward.py:group_keeps_last_head",
        "attention_backward.py:group_averaged",
        "attention_backward.py:group_head_by_remainder",
        "vjp.py:attention_vjp_of_query_heads",
    ),
)
def grouped_heads_add_up(attention: Subject, case: Case, pick: int) -> None:
    """A shared key head has the gradients of its copies, one for each query head, added up."""
    cotangent, names = cotangent_of(case, pick), differentiable(case, attention.capabilities)
    spread = case.with_arrays(k=per_head(case, "k"), v=per_head(case, "v"))
    shared, copies = (graded(attention, each, names, cotangent) for each in (case, spread))
    for name in names:
        copy = copies[name].rearranged(lambda each: by_group(each, case)) if name in "kv" else copies[name]
        expect_equal(shared[name], copy, what=f"the gradient of {name} is")


@law(
    "attention",
    case=attention_cases(bias=True, sink=False),
    pick=PICKS,
    kind="gradient",
    needs=NEEDS | {"bias", "bias_gradient"},
    source="P63",
    kills=("attention_backward.py:delta_of_first_head", "attention_backward.py:delta_omitted"),
)
def bias_gradient_rows_sum_to_zero(attention: Subject, case: Case, pick: int) -> None:
    """The bias gradient sums to 0 over the keys: the same number added to a row's logits changes nothing."""
    total = graded(attention, case, ("bias",), cotangent_of(case, pick))["bias"].rearranged(lambda each: each.sum(-1))
    expect_equal(total, 0.0, what="the sum of a row of the bias gradient is")


@law(
    "attention",
    case=attention_cases(bias=True),
    pick=PICKS,
    kind="gradient",
    needs=NEEDS | {"bias", "bias_gradient"},
    source="P63, P57",
    kills=("attention_backward.py:bias_gradient_of_first", "attention_backward.py:bias_gradient_averaged"),
)
def bias_gradient_sums_over_its_axes(attention: Subject, case: Case, pick: int) -> None:
    """A bias of length 1 along some axes has the gradient of its full copy, summed over them."""
    axes = tuple(axis for axis in range(4) if (pick + 1) >> axis & 1)
    thin = case["bias"][tuple(slice(0, 1) if axis in axes else slice(None) for axis in range(4))]
    cotangent, full = cotangent_of(case, pick), np.broadcast_to(thin, (*case["q"].shape[:3], case.size("Tk")))
    one, other = (graded(attention, case.with_arrays(bias=bias), ("bias",), cotangent)["bias"] for bias in (thin, full))
    spread = tuple(axis for axis in range(4) if thin.shape[axis] == 1)
    expect_equal(one, other.rearranged(lambda each: each.sum(spread, keepdims=True)), what="the gradient of bias is")


@law(
    "attention",
    case=attention_cases(sink=True, bias=True, empty=True),
    pick=PICKS,
    kind="gradient",
    needs=NEEDS | {"bias", "bias_gradient", "sink"},
    source="P65",
    kills=(
        "attention_backward.py:sink_ignored",
        "attention_backward.py:sink_gradient_of_first_batch",
        "attention_backward.py:sink_gradient_negated",
    ),
)
def sink_and_bias_gradients_cancel(attention: Subject, case: Case, pick: int) -> None:
    """The sink gradient is minus the sum of the head's bias gradient: one number added to both changes nothing."""
    thin = np.zeros((1, case.size("H"), 1, 1)) + case["bias"][:1, :, :1, :1]
    found = graded(attention, case.with_arrays(bias=thin), ("bias", "sink"), cotangent_of(case, pick))
    expect_equal(found["sink"], found["bias"][0, :, 0, 0] * -1.0, what="the gradient of sink is")


@law(
    "attention",
    case=attention_cases(softcap=True, mask=False, causal=False, window=False),
    pick=PICKS,
    kind="gradient",
    needs=NEEDS | {"softcap"},
    source="P65",
    kills=("attention_backward.py:softcap_slope_missing", "attention_backward.py:softcap_slope_of_capped"),
)
def saturated_softcap_stops_the_gradient(attention: Subject, case: Case, pick: int) -> None:
    """Where every score is 20 times its softcap or more, query and key get nothing but roundings: tanh' < 1e-17."""
    scale = scores(case)[1]
    sign = case.random(pick).choice([-1.0, 1.0], (*case["k"].shape[:3], 1))
    far = 21 * case["softcap"] / (scale * case.size("D"))
    case = case.with_arrays(q=np.ones_like(case["q"]), k=np.broadcast_to(sign * far, case["k"].shape))
    found = graded(attention, case, ("q", "k"), cotangent_of(case, pick))
    for name in ("q", "k"):
        expect_equal(found[name], 0.0, what=f"the gradient of {name} is")


@law(
    "attention",
    case=attention_cases(lonely=True, sink=False),
    pick=PICKS,
    kind="gradient",
    needs=NEEDS,
    source="P56, P14",
    kills=("attention_backward.py:delta_omitted", "attention_backward.py:rounded_normaliser"),
)
def a_single_key_takes_the_whole_cotangent(attention: Subject, case: Case, pick: int) -> None:
    """A row that sees one key passes its cotangent to that value, and nothing to query and keys."""
    allowed = allowed_keys(case, attention.capabilities)
    row = some_row(allowed.sum(-1) == 1, case.random(pick))
    if row is None:
        return
    cotangent = np.zeros((*case["q"].shape[:3], case.size("Dv")))
    cotangent[row] = cotangent_of(case, 5 * pick)[row]
    found = graded(attention, case, ("q", "k", "v"), cotangent)
    values = np.zeros(case["v"].shape)
    values[row[0], row[1] // (case.size("H") // case.size("G")), allowed[row]] = cotangent[row]
    expect_equal(found["v"], values, what="the gradient of v is")
    for name in ("q", "k"):
        expect_equal(found[name], 0.0, what=f"the gradient of {name} is")


@law(
    "attention",
    case=attention_cases(least={"B": 2}, families=(*FILLS, "heavy")),
    pick=PICKS,
    kind="gradient",
    needs=NEEDS,
    source="P20, R02",
    kills=("attention_backward.py:first_batch_normaliser", "vjp.py:attention_vjp_batch_summed"),
)
def batch_rows_have_their_own_gradients(attention: Subject, case: Case, pick: int) -> None:
    """A batch row's query, key and value have the gradients that they have alone."""
    row, cotangent, names = pick % case.size("B"), cotangent_of(case, pick), ("q", "k", "v")
    alone = graded(attention, keep(case, B=[row]), names, cotangent[row : row + 1])
    whole = attention.gradients(case, names, cotangent)
    for name in names:
        if whole[name] is not None:
            expect_equal(twice(alone[name]), whole[name][row : row + 1], what=f"the gradient of {name} is")
