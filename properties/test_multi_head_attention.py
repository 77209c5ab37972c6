"""Multi-head attention: every head for itself, with its own columns and rows of the weights; what biases add."""

from __future__ import annotations

import numpy as np

from veriformer import reference
from veriformer.case import Case
from veriformer.expect import expect_close, expect_finite, expect_same
from veriformer.law import law
from veriformer.properties.attention_cases import PICKS
from veriformer.properties.attention_family_cases import PLAIN, multi_head_attention_cases
from veriformer.properties.heads_changes import (
    first_position,
    loud,
    only_head,
    regauged,
    reordered,
    weight,
    widths_of,
    with_each,
    with_weights,
)
from veriformer.properties.measured import expect_equal, measure
from veriformer.subject import Subject


def faults(*names: str) -> tuple[str, ...]:
    """Variants of impls/faulty/multi_head.py."""
    return tuple(f"multi_head.py:{name}" for name in names)


@law(
    "multi_head_attention",
    case=multi_head_attention_cases(least={"H": 2}, families=PLAIN),
    source="P83",
    kills=faults(
        "heads_interleaved",
        "heads_cut_across_time",
        "heads_joined_in_reverse",
        "joined_interleaved",
        "join_without_swapping",
        "activation_after_wo",
    ),
)
def heads_add_up(multi_head: Subject, case: Case) -> None:
    """The output is the sum of what each head gives while all weights of the others are 0, and bo."""
    parts = [measure(multi_head, only_head(case, head)) for head in range(case["heads"])]
    total, together = sum(part.value for part in parts) + weight(case, "bo"), measure(multi_head, case)
    expect_close(together.value, total, together.allowed + sum(part.allowed for part in parts), what="all heads give")


@law(
    "multi_head_attention",
    case=multi_head_attention_cases(grouped=False, families=PLAIN),
    source="P83, P48",
    kills=faults(
        "scale_by_model_width",
        "scale_over_all_heads",
        "scale_missing",
        "scale_twice",
        "softmax_over_heads",
        "softmax_over_queries",
    ),
)
def identity_weights_leave_attention(multi_head: Subject, case: Case) -> None:
    """With identity matrices and no biases each head is attention of its own channels: x D^-½ memory^T, then memory."""
    heads, w = case["heads"], widths_of(case)
    model = heads * w.width
    x, memory = (np.resize(case[name], (*case[name].shape[:2], model)) for name in ("x", "memory"))
    bare = with_weights(
        case, **dict.fromkeys(("bq", "bk", "bv", "bo")), **dict.fromkeys(("wq", "wk", "wv", "wo"), np.eye(model))
    )
    bare = bare.with_arrays(x=x, memory=memory)
    q, k = (rows.reshape(*rows.shape[:2], heads, -1).swapaxes(1, 2) for rows in (bare["x"], bare["memory"]))
    offset = first_position(case, multi_head.capabilities)
    wanted = reference.attention(q, k, k, mask=case["mask"], causal=case["causal"], offset=offset)
    expect_equal(measure(multi_head, bare), wanted.swapaxes(1, 2).reshape(x.shape))


@law(
    "multi_head_attention",
    case=multi_head_attention_cases(least={"H": 2}),
    pick=PICKS,
    source="P83",
    kills=faults("mask_of_the_first_head", "value_heads_reversed", "heads_cut_across_time"),
)
def heads_may_change_places(multi_head: Subject, case: Case, pick: int) -> None:
    """Heads in another order, in wq, wk, wv, in the rows of wo and in the mask alike, change nothing."""
    rng, w = case.random(pick), widths_of(case)
    members = np.array([rng.permutation(w.each) for _ in range(w.groups)])
    expect_equal(measure(multi_head, reordered(case, rng.permutation(w.groups), members)), measure(multi_head, case))


@law(
    "multi_head_attention",
    case=multi_head_attention_cases(least={"D": 2}),
    pick=PICKS,
    source="P60, P83",
    kills=faults("norm_of_queries_and_keys", "heads_interleaved"),
)
def query_key_gauge(multi_head: Subject, case: Case, pick: int) -> None:
    """For each key head: wq A and wk A^-T, with the biases alike, give what wq and wk give."""
    expect_equal(measure(multi_head, regauged(case, case.random(pick), False)), measure(multi_head, case))


@law(
    "multi_head_attention",
    case=multi_head_attention_cases(least={"Dv": 2}),
    pick=PICKS,
    source="P83",
    kills=faults("heads_joined_in_reverse", "joined_interleaved"),
)
def value_output_gauge(multi_head: Subject, case: Case, pick: int) -> None:
    """For each key head: wv B and B^-1 wo, with bv B, give what wv and wo give."""
    expect_equal(measure(multi_head, regauged(case, case.random(pick), True)), measure(multi_head, case))


@law(
    "multi_head_attention",
    case=multi_head_attention_cases(),
    needs={"biases"},
    pick=PICKS,
    source="P83",
    kills=faults("value_bias_dropped", "value_bias_of_the_keys", "value_bias_rolled"),
)
def value_bias_adds_its_image(multi_head: Subject, case: Case, pick: int) -> None:
    """The bias of the values adds bv wo to every row, exactly as much as a constant value would."""
    bias = case.random(pick).integers(-2, 3, case["params.wv"].shape[1]).astype(float)
    with_bias, without = with_weights(case, bv=bias), with_weights(case, bv=np.zeros_like(bias))
    spread = np.repeat(bias.reshape(widths_of(case).groups, -1), widths_of(case).each, 0).ravel()
    expect_equal(measure(multi_head, with_bias), measure(multi_head, without) + spread @ case["params.wo"])


@law(
    "multi_head_attention",
    case=multi_head_attention_cases(),
    needs={"biases"},
    pick=PICKS,
    source="the operation's calling convention",
    kills=faults("output_bias_dropped", "output_bias_before_wo", "output_bias_per_head"),
)
def output_bias_comes_last(multi_head: Subject, case: Case, pick: int) -> None:
    """bo is added to every row of the output, once."""
    bias = case.random(pick).integers(-2, 3, case["params.wo"].shape[1]).astype(float)
    with_bias, without = with_weights(case, bo=bias), with_weights(case, bo=np.zeros_like(bias))
    expect_equal(measure(multi_head, with_bias), measure(multi_head, without) + bias)


@law(
    "multi_head_attention",
    case=multi_head_attention_cases(),
    needs={"biases"},
    pick=PICKS,
    source="P59",
    kills=faults("value_bias_of_the_keys", "norm_of_queries_and_keys"),
)
def key_bias_has_no_influence(multi_head: Subject, case: Case, pick: int) -> None:
    """Every bias of the keys gives the same: it adds one number to all scores of a row."""
    bias = case.random(pick).integers(-2, 3, case["params.wk"].shape[1]).astype(float)
    with_bias, without = with_weights(case, bk=bias), with_weights(case, bk=np.zeros_like(bias))
    expect_equal(measure(multi_head, with_bias), measure(multi_head, without))


@law(
    "multi_head_attention",
    case=multi_head_attention_cases(least={"B": 2}),
    pick=PICKS,
    source="P64",
    changes=("batch_invariant",),
    kills=faults("batch_and_time_swapped", "mask_of_another_sample"),
)
def batch_rows_are_independent(multi_head: Subject, case: Case, pick: int) -> None:
    """A batch row alone gives what it gives among others."""
    b = int(case.random(pick).integers(case["x"].shape[0]))
    alone = case.with_arrays(x=case["x"][b : b + 1], memory=case["memory"][b : b + 1])
    if case["mask"] is not None and case["mask"].shape[0] > 1:
        alone = alone.with_arrays(mask=case["mask"][b : b + 1])
    if multi_head.capabilities.batch_invariant:
        expect_same(multi_head(alone), multi_head(case)[b : b + 1])
    else:
        expect_equal(measure(multi_head, alone), measure(multi_head, case)[b : b + 1])


@law(
    "multi_head_attention",
    case=multi_head_attention_cases(grouped=True),
    needs={"grouped_heads"},
    source="P64",
    kills=faults("gqa_tile", "gqa_first_group"),
)
def grouped_weights_equal_repeated_weights(multi_head: Subject, case: Case) -> None:
    """A key head shared by H/G neighbouring query heads is as good as one of its own for each of them."""
    each = widths_of(case).each
    repeated = with_each(case, lambda name, array: np.repeat(array, each, -2), "kv")
    expect_equal(measure(multi_head, case), measure(multi_head, repeated))


@law(
    "multi_head_attention",
    case=multi_head_attention_cases(families=PLAIN),
    source="P08, corpus item 5",
    relative=False,
    changes=("intermediate",),
    kills=faults("no_maximum", "scores_in_half"),
)
def large_scores_stay_finite(multi_head: Subject, case: Case) -> None:
    """Queries and keys of some hundreds give finite results; of 32 where scores may be stored in float16."""
    expect_finite(multi_head(loud(case, 1024.0 if multi_head.precision.largest_mid > 1e6 else 32.0)))
