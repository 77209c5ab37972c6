"""The Universal Transformer: who sees whom, in states and in halting: the future, padding, the batch, the memory."""

from __future__ import annotations

import numpy as np

from veriformer.case import Case
from veriformer.expect import expect_different, expect_same
from veriformer.law import choice, law
from veriformer.properties.attention_cases import PICKS
from veriformer.properties.layer_changes import TRIES
from veriformer.properties.measured import expect_equal, measure, measure_all
from veriformer.properties.universal_build import ID, real_tokens, seen
from veriformer.properties.universal_cases import DEFAULT, NOT_GLOBAL, universal_cases
from veriformer.properties.universal_changes import (
    EVEN,
    LAYER,
    NAMES,
    PLAIN,
    even_mean,
    expect_all_equal,
    expect_all_unmoved,
    padded,
    silenced,
    silent_states,
    spoiled,
    taken,
    telling,
)
from veriformer.subject import Subject

FUTURE = universal_cases(presets=NOT_GLOBAL, causal=True, least={"T": 2}, examples=8)
"""Cases in which a token may not see those after it, in dialects in which each position halts for itself."""


@law(
    ID,
    case=FUTURE,
    pick=PICKS,
    needs={"causal"},
    source="P50, P108a, R67, semantics 3.13",
    relative=False,
    changes=("leak",),
    kills=(
        "universal.py:causal_ignored",
        "universal.py:causal_plus_one",
        "universal.py:decoder_sees_the_future",
        "universal_halting.py:mean_over_the_sequence",
        "universal_halting.py:all_stop_with_the_first",
        "universal_halting.py:all_stop_with_the_last",
        "universal_halting.py:steps_of_the_slowest",
    ),
)
def future_has_no_influence(universal: Subject, case: Case, pick: int) -> None:
    """If causal, whatever later tokens hold and whenever they halt, output, steps and remainder keep every bit."""
    batch, length = case["x"].shape[:2]
    now = int(case.random(pick).integers(0, length - 1))
    later = np.broadcast_to(np.arange(length) > now, (batch, length))
    expect_all_unmoved(universal, case, spoiled(case, "x", later, pick), np.s_[:, : now + 1])


@law(
    ID,
    case=FUTURE,
    pick=PICKS,
    needs={"causal"},
    source="P68, P108a, semantics 3.13",
    kills=(
        "universal.py:causal_ignored",
        "universal.py:decoder_sees_the_future",
        "universal_halting.py:mean_over_the_sequence",
        "universal_halting.py:all_stop_with_the_first",
        "universal_halting.py:halted_positions_run_again",
    ),
)
def prefix_is_enough(universal: Subject, case: Case, pick: int) -> None:
    """If causal, the first tokens alone give what they give in front of others."""
    length = int(case.random(pick).integers(1, case["x"].shape[1]))
    few = taken(case, T=range(length))
    expect_all_equal(measure_all(universal, few), measure_all(universal, case), ..., np.s_[:, :length])


@law(
    ID,
    case=universal_cases(presets=DEFAULT, least={"T": 2, "d": 3}),
    pick=PICKS,
    needs=PLAIN,
    source="P52",
    relative=False,
    kills=(
        "universal.py:always_causal",
        "universal.py:padding_of_the_first_sequence",
    ),
)
def seen_tokens_have_influence(universal: Subject, case: Case, pick: int) -> None:
    """Each real token moves all those that see it."""
    visible = seen(case)
    token = pick % case["x"].shape[1]
    rows = visible[:, :, token]
    moved = np.zeros(int(rows.sum()))
    for attempt in range(TRIES):
        drawn = telling(case, pick + 16 * attempt)
        x = drawn["x"].copy()
        x[:, token] *= -(2.0 ** (attempt + 1))
        difference = np.abs(universal(drawn.with_arrays(x=x))[0] - universal(drawn)[0]).max(-1)
        moved = np.maximum(moved, difference[rows])
        if moved.all():
            break
    expect_different(moved, 0.0, what=f"token {token} has influence on those that see it")


@law(
    ID,
    case=universal_cases(hidden=True, examples=8),
    pick=PICKS,
    needs={"mask"},
    source="P54, P87, P106, B162",
    relative=False,
    changes=("leak",),
    kills=("universal.py:padding_read",),
)
def padding_has_no_influence(universal: Subject, case: Case, pick: int) -> None:
    """Whatever padding holds, output, steps and remainder of every token keep every bit."""
    expect_all_unmoved(universal, case, spoiled(case, "x", ~real_tokens(case), pick))


@law(
    ID,
    case=universal_cases(hidden=True, examples=8),
    needs={"mask"},
    source="DESIGN section 5",
    relative=False,
    kills=(
        "universal.py:padding_reported",
        "universal.py:padding_keeps_its_tokens",
        "universal.py:padding_counted",
    ),
)
def padding_gives_zeros(universal: Subject, case: Case) -> None:
    """What is no real token has output, steps and remainder 0."""
    for name, result in zip(NAMES, universal(case), strict=True):
        blank = result[~real_tokens(case)]
        expect_same(blank, np.zeros_like(blank), what=f"{name} at padding is")


@law(
    ID,
    case=universal_cases(),
    pick=PICKS,
    more=choice(1, 3, 2),
    needs={"mask"},
    source="P87, P106, R67, B162",
    kills=(
        "universal.py:padding_attended",
        "universal.py:padding_read",
    ),
)
def more_padding_changes_nothing(universal: Subject, case: Case, pick: int, more: int) -> None:
    """However many tokens follow that are no real ones, the results of the real ones stay."""
    length, longer = case["x"].shape[1], padded(case, more, pick)
    expect_all_equal(measure_all(universal, longer), measure_all(universal, case), np.s_[:, :length], ...)


@law(
    ID,
    case=universal_cases(hidden=True),
    poison=choice("nan", "inf", "-inf"),
    needs={"mask", "nan_contained"},
    source="P54, P50",
    relative=False,
    changes=("nan_contained", "leak"),
    kills=("universal.py:padding_multiplied_by_zero",),
)
def nan_of_padding_stays_hidden(universal: Subject, case: Case, poison: str) -> None:
    """NaN or infinity at padding reaches nobody."""
    expect_all_unmoved(universal, case, spoiled(case, "x", ~real_tokens(case), 0, float(poison)))


@law(
    ID,
    case=universal_cases(least={"B": 2}),
    pick=PICKS,
    source="P30, P106, R02, R67",
    changes=("batch_invariant",),
    kills=(
        "universal.py:padding_of_the_first_sequence",
        "universal.py:memory_of_the_first_sequence",
        "universal.py:memory_mask_of_the_first_sequence",
        "universal_halting.py:mean_over_the_batch",
        "universal_halting.py:halting_of_the_first_sequence",
        "universal_halting.py:halted_positions_run_again",
    ),
)
def sequences_are_independent(universal: Subject, case: Case, pick: int) -> None:
    """A sequence alone gives what it gives among others, whenever those halt."""
    row = int(case.random(pick).integers(case["x"].shape[0]))
    alone = taken(case, B=[row])
    if universal.capabilities.batch_invariant:
        for name, one, all_rows in zip(NAMES, universal(alone), universal(case), strict=True):
            expect_same(one, all_rows[row : row + 1], what=f"{name} is")
    else:
        expect_all_equal(measure_all(universal, alone), measure_all(universal, case), ..., np.s_[row : row + 1])


@law(
    ID,
    case=universal_cases(least={"B": 2}),
    pick=PICKS,
    source="P106, R67",
    relative=False,
    changes=("leak",),
    kills=(
        "universal.py:memory_of_the_first_sequence",
        "universal_halting.py:mean_over_the_batch",
        "universal_halting.py:halting_of_the_first_sequence",
    ),
)
def other_sequences_have_no_influence(universal: Subject, case: Case, pick: int) -> None:
    """Whatever the other sequences of a batch hold, the results of one keep every bit."""
    batch = case["x"].shape[0]
    row = int(case.random(pick).integers(batch))
    others = np.arange(batch)[:, None] != row
    changed = spoiled(case, "x", others, pick)
    if case["memory"] is not None:
        changed = spoiled(changed, "memory", others, pick)
    expect_all_unmoved(universal, case, changed, np.s_[row])


@law(
    ID,
    case=universal_cases(hidden_memory=True, examples=8),
    pick=PICKS,
    needs={"causal", "memory", "memory_mask"},
    source="R48, P54",
    relative=False,
    changes=("leak",),
    kills=("universal.py:memory_mask_ignored",),
)
def hidden_memory_has_no_influence(universal: Subject, case: Case, pick: int) -> None:
    """Whatever rows of the memory hold that are no real ones, no result changes a bit."""
    expect_all_unmoved(universal, case, spoiled(case, "memory", ~case["memory_mask"], pick))


@law(
    ID,
    case=universal_cases(hidden_memory=True),
    poison=choice("nan", "inf", "-inf"),
    needs={"causal", "memory", "memory_mask", "nan_contained"},
    source="R48, P54",
    relative=False,
    changes=("nan_contained", "leak"),
    kills=("universal.py:hidden_memory_multiplied_by_zero",),
)
def nan_of_memory_stays_hidden(universal: Subject, case: Case, poison: str) -> None:
    """NaN or infinity in rows of the memory that are no real ones reaches nobody."""
    expect_all_unmoved(universal, case, spoiled(case, "memory", ~case["memory_mask"], 0, float(poison)))


@law(
    ID,
    case=universal_cases(presets=DEFAULT, causal=True, memory=True, least={"S": 2, "d": 3}),
    pick=PICKS,
    needs=PLAIN | {"causal", "memory"},
    source="P52, P89, R48",
    relative=False,
    kills=("universal.py:last_of_memory_dropped",),
)
def seen_memory_has_influence(universal: Subject, case: Case, pick: int) -> None:
    """Every real row of the memory moves every real token, the last one the first."""
    keys = case["memory"].shape[1]
    row = [keys - 1, 0, keys // 2][pick % 3]
    shown = np.ones(case["memory"].shape[:2], bool) if case["memory_mask"] is None else case["memory_mask"]
    rows = real_tokens(case) & shown[:, row, None]
    moved = np.zeros(int(rows.sum()))
    for attempt in range(TRIES):
        drawn = telling(case, pick + 16 * attempt)
        memory = drawn["memory"].copy()
        memory[:, row] *= -(2.0 ** (attempt + 1))
        difference = np.abs(universal(drawn.with_arrays(memory=memory))[0] - universal(drawn)[0]).max(-1)
        moved = np.maximum(moved, difference[rows])
        if moved.all():
            break
    expect_different(moved, 0.0, what=f"row {row} of the memory has influence")


@law(
    ID,
    case=universal_cases(causal=True, memory=True, least={"S": 2}),
    pick=PICKS,
    needs={"causal", "memory"},
    source="P88",
    kills=("universal.py:cross_causal",),
)
def order_of_memory_does_not_matter(universal: Subject, case: Case, pick: int) -> None:
    """Rows of the memory in another order, and their mask with them, change nothing."""
    order = case.random(pick).permutation(case["memory"].shape[1])
    expect_all_equal(measure_all(universal, taken(case, S=order)), measure_all(universal, case))


@law(
    ID,
    case=universal_cases(pace="even", presets=DEFAULT, pre=True, causal=True, memory=True, least={"L": 2}),
    needs=EVEN | {"norm", "pre_norm", "causal", "memory"},
    source="P90, semantics 3.12",
    kills=("universal.py:memory_in_the_first_step_alone",),
)
def every_step_sees_the_memory(universal: Subject, case: Case) -> None:
    """In pre-norm, where only attention to the memory sounds, evenly, every step adds what it gives."""
    part = f"{LAYER}cross_attention."
    level = {part + name: np.zeros_like(case[part + name]) for name in ("wq", "bq") if case[part + name] is not None}
    case = silenced(case, "cross_attention").with_arrays(**level)
    expect_equal(measure(universal, case), even_mean(case, silent_states(case, seen_on_average(case))))


def seen_on_average(case: Case) -> np.ndarray:
    """[B,1,d]: what attention to the memory gives where all real rows weigh the same."""
    w, memory = case.params["layer"]["cross_attention"], case["memory"]
    mask = np.ones(memory.shape[:2]) if case["memory_mask"] is None else case["memory_mask"].astype(float)
    mean = (mask[..., None] * memory).sum(1, keepdims=True) / mask.sum(1)[:, None, None]
    v = mean @ w["wv"] + w.get("bv", 0.0)
    groups = w["wk"].shape[1] * case["heads"] // w["wq"].shape[1]
    each = v.reshape(*v.shape[:2], groups, -1).repeat(case["heads"] // groups, 2)
    added: np.ndarray = each.reshape(*v.shape[:2], -1) @ w["wo"] + w.get("bo", 0.0)
    return added
