"""Decoder layers and stacks of them: which rows of memory a token sees, and in what way they do not matter."""

from __future__ import annotations

import numpy as np

from veriformer.case import Case
from veriformer.expect import expect_different
from veriformer.law import choice, law
from veriformer.properties.attention_cases import PICKS
from veriformer.properties.layer_build import DECODERS, memory_reach
from veriformer.properties.layer_cases import layer_cases
from veriformer.properties.layer_changes import moves, only, spoiled
from veriformer.properties.measured import expect_equal, expect_unmoved, measure
from veriformer.subject import Subject


@law(
    DECODERS,
    case=layer_cases(hidden_memory=True),
    pick=PICKS,
    needs={"memory_mask"},
    source="R48, P54",
    relative=False,
    changes=("leak",),
    kills=(
        "decoder_layers.py:memory_mask_ignored",
        "decoder_layers.py:memory_mask_inverted",
        "decoder_layers.py:memory_mask_of_the_first_query",
        "stacks.py:decoder_memory_mask_in_the_first_layer_alone",
    ),
)
def hidden_memory_has_no_influence(layer: Subject, case: Case, pick: int) -> None:
    """What a row of memory holds changes no bit of the tokens that do not see it, in any layer."""
    seen = memory_reach(case)
    row = int(case.random(pick).choice(np.flatnonzero((~seen).any((0, 1)))))
    changed = spoiled(case, "memory", np.arange(seen.shape[2]) == row, pick)
    expect_unmoved(layer, case, changed, ~seen[:, :, row])


@law(
    DECODERS,
    case=layer_cases(least={"S": 2, "d": 3}),
    pick=PICKS,
    source="P52, P89, R48, corpus item 24",
    relative=False,
    kills=(
        "decoder_layers.py:cross_skipped",
        "decoder_layers.py:cross_causal",
        "decoder_layers.py:cross_with_window",
        "decoder_layers.py:last_of_memory_dropped",
        "decoder_layers.py:memory_cut_to_the_queries",
    ),
)
def seen_memory_has_influence(layer: Subject, case: Case, pick: int) -> None:
    """Every row of memory that its mask shows to a token moves it, also the last one the first, whatever the window."""
    seen, keys = memory_reach(case), case["memory"].shape[1]
    row = [keys - 1, 0, keys // 2][pick % 3]
    moved = moves(layer, case, "memory", row, pick, seen[:, :, row])
    expect_different(moved, 0.0, what=f"row {row} of memory has influence on those that see it")


@law(
    DECODERS,
    case=layer_cases(least={"S": 2}),
    pick=PICKS,
    source="P88",
    kills=(
        "decoder_layers.py:cross_rotated",
        "decoder_layers.py:cross_with_alibi",
        "decoder_layers.py:cross_causal",
        "decoder_layers.py:cross_with_window",
    ),
)
def order_of_memory_does_not_matter(layer: Subject, case: Case, pick: int) -> None:
    """Rows of memory in another order, and their mask with them, change nothing, whatever the positions."""
    order = case.random(pick).permutation(case["memory"].shape[1])
    expect_equal(measure(layer, only(case, {"S": order})), measure(layer, case))


@law(
    DECODERS,
    case=layer_cases(),
    source="P88",
    kills=(
        "decoder_layers.py:cross_with_alibi",
        "decoder_layers.py:cross_with_window",
        "decoder_layers.py:last_of_memory_dropped",
    ),
)
def memory_twice_is_memory_once(layer: Subject, case: Case) -> None:
    """All rows of memory a second time, and their mask with them, change nothing."""
    twice = np.tile(np.arange(case["memory"].shape[1]), 2)
    expect_equal(measure(layer, only(case, {"S": twice})), measure(layer, case))


@law(
    DECODERS,
    case=layer_cases(),
    pick=PICKS,
    more=choice(1, 2, 3),
    needs={"memory_mask"},
    source="P87, corpus item 24",
    kills=(
        "decoder_layers.py:memory_mask_ignored",
        "decoder_layers.py:memory_mask_on_self",
        "decoder_layers.py:mask_for_the_memory_mask",
        "decoder_layers.py:last_of_memory_dropped",
    ),
)
def padding_of_memory_changes_nothing(layer: Subject, case: Case, pick: int, more: int) -> None:
    """However many rows of memory follow that the mask hides from everybody, they change nothing."""
    (batch, keys, width), mask = case["memory"].shape, case["memory_mask"]
    memory = np.concatenate([case["memory"], case.random(pick).standard_normal((batch, more, width))], 1)
    mask = np.ones((1, 1, 1, 1), bool) if mask is None else mask
    shown = np.broadcast_to(mask, (*mask.shape[:3], keys))
    mask = np.concatenate([shown, np.zeros((*mask.shape[:3], more), bool)], 3)
    expect_equal(measure(layer, case.with_arrays(memory=memory, memory_mask=mask)), measure(layer, case))


@law(
    DECODERS,
    case=layer_cases(hidden_memory=True),
    pick=PICKS,
    poison=choice("nan", "inf", "-inf"),
    needs={"memory_mask", "nan_contained"},
    source="P54, R48",
    relative=False,
    changes=("nan_contained", "leak"),
    kills=("decoder_layers.py:nan_of_memory_leaks", "decoder_layers.py:memory_mask_of_the_first_query"),
)
def nan_of_memory_stays_hidden(layer: Subject, case: Case, pick: int, poison: str) -> None:
    """NaN or infinity in a row of memory does not reach the tokens that do not see it."""
    seen = memory_reach(case)
    row = int(case.random(pick).choice(np.flatnonzero((~seen).any((0, 1)))))
    memory = np.where((np.arange(seen.shape[2]) == row)[:, None], float(poison), case["memory"])
    expect_unmoved(layer, case, case.with_arrays(memory=memory), ~seen[:, :, row])
