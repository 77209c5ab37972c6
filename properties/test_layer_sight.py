"""Layers and stacks: which tokens see which through masks, windows and causality, and that others need not be there."""

from __future__ import annotations

import numpy as np

from veriformer.case import Case
from veriformer.expect import expect_close, expect_different, expect_same
from veriformer.law import choice, law
from veriformer.oracle import empty_row_rule
from veriformer.properties.attention_cases import PICKS
from veriformer.properties.attention_family_cases import PLAIN
from veriformer.properties.layer_build import DECODERS, reach, seen_tokens
from veriformer.properties.layer_cases import LAYERED, layer_cases
from veriformer.properties.layer_changes import moves, only, padded, spoiled
from veriformer.properties.measured import expect_equal, expect_unmoved, measure
from veriformer.subject import Subject


@law(
    LAYERED,
    case=layer_cases(hidden=True),
    pick=PICKS,
    needs={"mask or window"},
    source="P54, P50",
    relative=False,
    changes=("leak",),
    kills=(
        "layers.py:mask_ignored",
        "layers.py:mask_inverted",
        "layers.py:window_ignored",
        "layers.py:window_wide",
        "layers.py:window_right_dropped",
        "decoder_layers.py:memory_mask_for_the_mask",
        "decoder_layers.py:causal_dropped_with_window",
        "stacks.py:mask_in_the_first_layer_alone",
        "stacks.py:window_in_the_first_layer_alone",
        "stacks.py:decoder_mask_in_the_first_layer_alone",
    ),
)
def hidden_tokens_have_no_influence(layer: Subject, case: Case, pick: int) -> None:
    """What a token holds changes no bit of those that do not see it, by mask, window or causality, in any layer."""
    seen = reach(case)
    token = int(case.random(pick).choice(np.flatnonzero((~seen).any((0, 1)))))
    changed = spoiled(case, "x", np.arange(seen.shape[2]) == token, pick)
    expect_unmoved(layer, case, changed, ~seen[:, :, token])


@law(
    LAYERED,
    case=layer_cases(least={"T": 2, "d": 3}),
    pick=PICKS,
    source="P52",
    relative=False,
    kills=(
        "layers.py:mask_inverted",
        "layers.py:window_swapped",
        "layers.py:window_always_causal",
        "stacks.py:padded_rows_zeroed",
    ),
)
def seen_tokens_have_influence(layer: Subject, case: Case, pick: int) -> None:
    """Each token moves all those that see it."""
    seen, token = reach(case), pick % case["x"].shape[1]
    moved = moves(layer, case, "x", token, pick, seen[:, :, token])
    expect_different(moved, 0.0, what=f"token {token} has influence on those that see it")


@law(
    DECODERS,
    case=layer_cases(least={"T": 2}),
    pick=PICKS,
    source="P50, P89",
    relative=False,
    changes=("leak",),
    kills=(
        "decoder_layers.py:not_causal",
        "decoder_layers.py:causal_plus_one",
        "decoder_layers.py:causal_dropped_with_mask",
        "decoder_layers.py:causal_dropped_with_memory_mask",
        "stacks.py:decoder_causal_in_the_first_layer_alone",
    ),
)
def future_has_no_influence(layer: Subject, case: Case, pick: int) -> None:
    """Whatever later tokens hold, the results up to a token keep every bit."""
    length = case["x"].shape[1]
    now = int(case.random(pick).integers(0, length - 1))
    expect_unmoved(layer, case, spoiled(case, "x", np.arange(length) > now, pick), np.s_[:, : now + 1])


@law(
    DECODERS,
    case=layer_cases(least={"T": 2}),
    pick=PICKS,
    source="P68",
    kills=(
        "decoder_layers.py:cross_causal",
        "decoder_layers.py:cross_values_of_x",
        "decoder_layers.py:causal_dropped_with_window",
        "stacks.py:decoder_memory_replaced",
    ),
)
def prefix_is_enough(layer: Subject, case: Case, pick: int) -> None:
    """The first tokens alone give what they give in front of others."""
    length = int(case.random(pick).integers(1, case["x"].shape[1]))
    expect_equal(measure(layer, only(case, {"T": range(length)})), measure(layer, case)[:, :length])


@law(
    ("encoder_layer", "encoder"),
    case=layer_cases(window=False, rotary=False, alibi=False, least={"T": 2}),
    pick=PICKS,
    source="P49",
    kills=(
        "layers.py:feed_forward_over_time",
        "layers.py:mask_of_the_first_query",
    ),
)
def permutation_equivariance(layer: Subject, case: Case, pick: int) -> None:
    """Without window and positions, tokens in another order, and the mask with them, have their results in it."""
    order = case.random(pick).permutation(case["x"].shape[1])
    expect_equal(measure(layer, only(case, {"T": order})), measure(layer, case)[:, order])


@law(
    LAYERED,
    case=layer_cases(),
    pick=PICKS,
    needs={"mask", "causal_with_mask"},
    source="P87, P72, R44",
    kills=(
        "layers.py:mask_ignored",
        "layers.py:mask_fill_minus_ten",
        "layers.py:rotary_on_queries_alone",
        "layers.py:rotary_on_values",
        "decoder_layers.py:mask_for_the_memory_mask",
        "decoder_layers.py:memory_mask_on_self",
        "stacks.py:trailing_padding_cropped",
    ),
)
def padding_changes_nothing(layer: Subject, case: Case, pick: int) -> None:
    """More tokens in front or behind that the mask hides from all others change nothing, whatever the positions."""
    more, places = padded(case, 1 + pick // 2 % 3, pick % 2 == 0, pick)
    expect_equal(measure(layer, more)[:, places], measure(layer, case))


@law(
    LAYERED,
    case=layer_cases(least={"B": 2}),
    pick=PICKS,
    source="P30, R02",
    changes=("batch_invariant",),
    kills=(
        "layers.py:keys_of_the_first_sample",
        "layers.py:mask_of_the_first_sample",
        "decoder_layers.py:memory_of_the_first_sample",
        "decoder_layers.py:memory_mask_of_the_first_sample",
    ),
)
def batch_rows_are_independent(layer: Subject, case: Case, pick: int) -> None:
    """A batch row alone gives what it gives among others."""
    row = int(case.random(pick).integers(case["x"].shape[0]))
    alone = only(case, {"B": [row]})
    if layer.capabilities.batch_invariant:
        expect_same(layer(alone), layer(case)[row : row + 1])
    else:
        expect_equal(measure(layer, alone), measure(layer, case)[row : row + 1])


@law(
    ("encoder_layer", "decoder_layer"),
    case=layer_cases(some_empty=True, mask=True, families=PLAIN),
    needs={"mask", "causal_with_mask", "zero rows or nan rows"},
    source="P55",
    relative=False,
    changes=("empty_row",),
    kills=("layers.py:empty_row_nan",),
)
def empty_row_is_as_declared(layer: Subject, case: Case) -> None:
    """A head that may see nothing gives 0, so that bo is left where all heads do, or what empty_row declares."""
    empty, rule = ~seen_tokens(case).any(-1).all(1), empty_row_rule(case, layer.capabilities)
    if rule == "nan":
        expect_close(layer(case)[empty], np.nan, 0.0, what="a token of which some head sees nothing gives")
    if rule == "zeros":
        expect_equal(measure(layer, case)[empty], layer.reference(case).value[empty])


@law(
    LAYERED,
    case=layer_cases(hidden=True),
    pick=PICKS,
    poison=choice("nan", "inf", "-inf"),
    needs={"mask or window", "nan_contained"},
    source="P50, P54",
    relative=False,
    changes=("nan_contained", "leak"),
    kills=("layers.py:nan_leaks", "layers.py:mask_of_the_first_query", "decoder_layers.py:not_causal"),
)
def nan_stays_hidden(layer: Subject, case: Case, pick: int, poison: str) -> None:
    """NaN or infinity in a token does not reach those that do not see it."""
    seen = reach(case)
    token = int(case.random(pick).choice(np.flatnonzero((~seen).any((0, 1)))))
    x = np.where((np.arange(seen.shape[2]) == token)[:, None], float(poison), case["x"])
    expect_unmoved(layer, case, case.with_arrays(x=x), ~seen[:, :, token])
