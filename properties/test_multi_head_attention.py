"""Multi-head attention: every head for itself, each with its own columns and rows of the weights; what memory does."""

from __future__ import annotations

import numpy as np

from veriformer import reference
from veriformer.case import Case
from veriformer.expect import expect_close, expect_finite, expect_same
from veriformer.law import choice, law
from veriformer.oracle import empty_row_rule
from veriformer.properties.attention_cases import PICKS
from veriformer.properties.attention_family_build import seen_rows
from veriformer.properties.attention_family_cases import multi_head_attention_cases
from veriformer.properties.heads_changes import (
    expect_unmoved,
    loud,
    only_head,
    regauged,
    reordered,
    spoiled,
    unaffected,
    weight,
    widths_of,
    with_each,
    with_memory,
    with_weights,
)
from veriformer.properties.measured import expect_equal, measure
from veriformer.subject import Subject

PLAIN = ("integers", "normal", "one_hot", "halves")
"""Families whose numbers are small."""


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
    wanted = reference.attention(q, k, k, mask=case["mask"], causal=case["causal"])
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
    case=multi_head_attention_cases(causal=False, least={"Tk": 2}),
    pick=PICKS,
    source="P49, P88",
    kills=faults("recency_kept", "keys_from_x"),
)
def order_of_memory_does_not_matter(multi_head: Subject, case: Case, pick: int) -> None:
    """Rows of memory in another order, and the mask with them, change nothing; rows of x permute the output."""
    rng, mask = case.random(pick), case["mask"]
    keys, queries = rng.permutation(case["memory"].shape[1]), rng.permutation(case["x"].shape[1])
    moved = case.with_arrays(x=case["x"][:, queries], memory=case["memory"][:, keys])
    if mask is not None:
        mask = mask if mask.shape[2] == 1 else mask[:, :, queries]
        moved = moved.with_arrays(mask=mask if mask.shape[3] == 1 else mask[..., keys])
    expect_equal(measure(multi_head, moved), measure(multi_head, case)[:, queries])


@law(
    "multi_head_attention",
    case=multi_head_attention_cases(),
    pick=PICKS,
    source="P52, P60",
    kills=faults("memory_ignored", "causal_strict", "causal_always", "last_head_dropped"),
)
def every_row_of_memory_counts_once(multi_head: Subject, case: Case, pick: int) -> None:
    """With zero queries each of the n rows of memory that a head may see weighs 1/n, and every other row nothing."""
    w, (batch, keys, model) = widths_of(case), case["memory"].shape
    row = [keys - 1, 0, keys // 2][pick % 3]
    memory, first = np.zeros((batch, keys, model)), np.zeros((model, 1))
    memory[:, row, 0], first[0] = 1.0, 1.0
    lit = with_weights(with_each(case, lambda name, array: array * 0), wv=np.repeat(first, w.groups * w.value_width, 1))
    lit = with_weights(lit, wo=np.ones_like(case["params.wo"]), bo=None)
    ahead = np.arange(keys) - np.arange(case["x"].shape[1])[:, None] - keys + case["x"].shape[1]
    seen = (ahead <= 0) | (not case["causal"]) | np.zeros((batch, w.heads, 1, 1), bool)
    seen = seen if case["mask"] is None else seen & case["mask"]
    wanted = w.value_width * (seen[..., row] / seen.sum(-1)).sum(1)
    got = measure(multi_head, with_memory(lit, memory))
    expect_equal(got, wanted[..., None], what=f"the weights of row {row}, summed over the heads' channels,")


@law(
    "multi_head_attention",
    case=multi_head_attention_cases(causal=True, least={"Tq": 2, "Tk": 2}),
    pick=PICKS,
    needs={"causal"},
    source="P50",
    relative=False,
    changes=("leak",),
    kills=faults("causal_plus_one"),
)
def future_has_no_influence(multi_head: Subject, case: Case, pick: int) -> None:
    """Output row i depends only on rows j <= i + (Tk - Tq) of memory."""
    queries, keys = case["x"].shape[1], case["memory"].shape[1]
    now = int(case.random(pick).integers(0, queries - 1))
    changed = spoiled(case, np.arange(keys) > now + keys - queries, pick)
    expect_unmoved(multi_head, case, changed, np.broadcast_to(np.arange(queries) <= now, case["x"].shape[:2]))


@law(
    "multi_head_attention",
    case=multi_head_attention_cases(causal=True, least={"Tq": 2}),
    pick=PICKS,
    needs={"causal"},
    source="P51",
    kills=faults("causal_top_left"),
)
def causal_is_the_end_of_the_square(multi_head: Subject, case: Case, pick: int) -> None:
    """Fewer rows of x than of memory: they are the last ones of the square problem."""
    if multi_head.capabilities.causal_alignment == "square":
        return
    length = min(case["x"].shape[1], case["memory"].shape[1])
    square = case.with_arrays(x=case["x"][:, :length], memory=case["memory"][:, :length], mask=None)
    cut = int(case.random(pick).integers(1, length))
    part = square.with_arrays(x=square["x"][:, cut:])
    expect_equal(measure(multi_head, part), measure(multi_head, square)[:, cut:])


@law(
    "multi_head_attention",
    case=multi_head_attention_cases(hidden=True, mask=True),
    source="P53",
    needs={"mask"},
    kills=faults("causal_dropped_with_mask"),
)
def masks_combine(multi_head: Subject, case: Case) -> None:
    """Causal and mask together hide what a single mask of the same rows hides."""
    one = case.with_arrays(mask=seen_rows(case)).with_keywords(causal=False)
    expect_equal(measure(multi_head, case), measure(multi_head, one))


@law(
    "multi_head_attention",
    case=multi_head_attention_cases(mask=True),
    needs={"mask"},
    source="P53, corpus item 17",
    kills=faults("mask_inverted"),
)
def all_true_mask_changes_nothing(multi_head: Subject, case: Case) -> None:
    """A mask that hides nothing gives what no mask gives."""
    case = case.with_arrays(mask=np.ones_like(case["mask"]))
    expect_equal(measure(multi_head, case), measure(multi_head, case.with_arrays(mask=None)))


@law(
    "multi_head_attention",
    case=multi_head_attention_cases(hidden=True),
    pick=PICKS,
    needs={"causal or mask"},
    source="P54",
    relative=False,
    changes=("leak",),
    kills=faults("mask_fill_minus_ten", "mask_of_the_first_query"),
)
def hidden_rows_have_no_influence(multi_head: Subject, case: Case, pick: int) -> None:
    """Whatever finite numbers hidden rows of memory hold, the outputs that do not see them stay the same."""
    hidden = hidden_somewhere(case, pick)
    expect_unmoved(multi_head, case, spoiled(case, hidden, pick), unaffected(case, hidden) & hidden.any())


@law(
    "multi_head_attention",
    case=multi_head_attention_cases(hidden=True),
    pick=PICKS,
    poison=choice("nan", "inf", "-inf"),
    needs={"causal or mask", "nan_contained"},
    source="P50, P54",
    relative=False,
    changes=("nan_contained", "leak"),
    kills=faults("nan_leaks"),
)
def nan_stays_hidden(multi_head: Subject, case: Case, pick: int, poison: str) -> None:
    """NaN or infinity in hidden rows of memory does not reach the outputs that do not see them."""
    hidden = hidden_somewhere(case, pick)
    poisoned = with_memory(case, np.where(hidden[:, None], float(poison), case["memory"]))
    expect_unmoved(multi_head, case, poisoned, unaffected(case, hidden) & hidden.any())


@law(
    "multi_head_attention",
    case=multi_head_attention_cases(mask=False, causal=False, least={"Tk": 2}),
    pick=PICKS,
    needs={"mask"},
    source="P54",
    kills=faults("mask_after_softmax"),
)
def hidden_rows_may_be_deleted(multi_head: Subject, case: Case, pick: int) -> None:
    """Rows of memory hidden from everybody might as well not be there."""
    rng, keys = case.random(pick), case["memory"].shape[1]
    stay = np.sort(rng.permutation(keys)[: int(rng.integers(1, keys))])
    hidden = case.with_arrays(mask=np.isin(np.arange(keys), stay)[None, None, None])
    expect_equal(measure(multi_head, hidden), measure(multi_head, case.with_arrays(memory=case["memory"][:, stay])))


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
    case=multi_head_attention_cases(some_empty=True, families=PLAIN),
    needs={"causal or mask"},
    source="P55",
    relative=False,
    changes=("empty_row",),
    kills=faults("empty_row_nan", "empty_row_mean"),
)
def empty_row_is_as_declared(multi_head: Subject, case: Case) -> None:
    """A head that may see nothing gives 0, so that bo is left where all heads do, or what empty_row declares."""
    empty, rule = ~seen_rows(case).any(-1).all(1), empty_row_rule(case, multi_head.capabilities)
    if rule == "nan":
        expect_close(multi_head(case)[empty], np.nan, 0.0, what="a row of which some head sees nothing gives")
    if rule == "zeros":
        expect_equal(measure(multi_head, case)[empty], multi_head.reference(case).value[empty])


@law(
    "multi_head_attention",
    case=multi_head_attention_cases(families=PLAIN),
    source="P08, corpus item 5",
    relative=False,
    kills=faults("no_maximum", "scores_in_half"),
)
def large_scores_stay_finite(multi_head: Subject, case: Case) -> None:
    """Queries and keys of some hundreds, whose products a 16-bit dtype cannot hold, give finite results."""
    expect_finite(multi_head(loud(case)))


def hidden_somewhere(case: Case, pick: int) -> np.ndarray:
    """The rows of memory [Tk] hidden from every head of one query, drawn among those from which some are hidden."""
    hidden = ~seen_rows(case).any(1)
    rows = np.argwhere(hidden.any(-1))
    if not len(rows):
        return np.zeros(hidden.shape[-1], bool)
    found: np.ndarray = hidden[tuple(case.random(pick).choice(rows))]
    return found
