"""Hidden keys: as if they did not exist, however they are hidden; and rows from which everything is hidden."""

from __future__ import annotations

import math

import numpy as np

from veriformer.case import Case
from veriformer.expect import expect_close, expect_different
from veriformer.law import choice, law
from veriformer.oracle import allowed_keys, query_offset
from veriformer.properties.attention_build import closed
from veriformer.properties.attention_cases import PICKS, attention_cases
from veriformer.properties.attention_changes import (
    answerable,
    evenly,
    keep,
    lone_row,
    rows_without,
    some_row,
    spoiled,
    weighing,
)
from veriformer.properties.measured import expect_equal, expect_unmoved, measure
from veriformer.subject import Subject

HIDING = {"causal or mask or window"}


@law(
    "attention",
    case=attention_cases(hidden=True),
    pick=PICKS,
    needs=HIDING,
    source="P54",
    kills=("attention.py:mask_after_softmax", "attention_tiled.py:block_skipped_if_any_hidden"),
)
def hidden_equals_deleted(attention: Subject, case: Case, pick: int) -> None:
    """A row comes out as if the keys hidden from it did not exist."""
    allowed = allowed_keys(case, attention.capabilities)
    row = some_row(allowed.any(-1) & ~allowed.all(-1), case.random(pick))
    if row is not None:
        lone = lone_row(case, row, np.flatnonzero(allowed[row]))
        expect_equal(measure(attention, lone)[0, 0, 0], measure(attention, case)[row])


@law(
    "attention",
    case=attention_cases(hidden=True, empty=True),
    pick=PICKS,
    needs=HIDING,
    source="P54",
    relative=False,
    changes=("leak", "empty_row"),
    kills=(
        "attention.py:mask_added",
        "attention.py:mask_fill_minus_ten",
        "attention.py:mask_transposed",
        "attention.py:mask_first_query",
        "attention.py:softcap_after_mask",
    ),
)
def hidden_content_has_no_influence(attention: Subject, case: Case, pick: int) -> None:
    """Whatever finite numbers hidden keys and values hold, the rows that do not see them stay the same."""
    rng = case.random(pick)
    hidden = hidden_somewhere(attention, case, rng)
    rows = rows_without(case, attention.capabilities, hidden)
    expect_unmoved(attention, case, spoiled(case, hidden, rng), rows)


@law(
    "attention",
    case=attention_cases(hidden=True, empty=True),
    pick=PICKS,
    poison=choice(math.nan, math.inf, -math.inf),
    where=choice("v", "k", "kv"),
    needs=HIDING | {"nan_contained"},
    source="P50, P54",
    relative=False,
    changes=("nan_contained", "leak", "empty_row"),
    kills=("attention.py:nan_leaks",),
)
def nan_stays_hidden(attention: Subject, case: Case, pick: int, poison: float, where: str) -> None:
    """NaN or infinity in hidden keys and values does not reach the rows that do not see them."""
    hidden = hidden_somewhere(attention, case, case.random(pick))
    poisoned = {name: np.where(hidden[:, None], poison, case[name]) for name in where}
    rows = rows_without(case, attention.capabilities, hidden)
    expect_unmoved(attention, case, case.with_arrays(**poisoned), rows)


@law(
    "attention",
    case=attention_cases(hidden=True),
    needs={"mask"},
    source="P53",
    changes=("causal_alignment", "mask_means"),
    kills=(
        "attention.py:causal_dropped_with_mask",
        "attention.py:causal_or_mask",
        "attention.py:causal_dropped_with_window",
    ),
)
def masks_combine(attention: Subject, case: Case) -> None:
    """Causal, window and mask together hide what a single mask of the same keys hides."""
    case = case if attention.capabilities.mask_with_bias else case.with_arrays(bias=None)
    one = case.with_arrays(mask=allowed_keys(case, attention.capabilities))
    expect_equal(measure(attention, case), measure(attention, one.with_keywords(causal=False, window=None)))


@law(
    "attention",
    case=attention_cases(mask=True, bias=False),
    needs={"mask", "bias", "infinite_bias"},
    source="P53",
    kills=("attention.py:bias_infinity_clipped",),
)
def infinite_bias_equals_mask(attention: Subject, case: Case) -> None:
    """A bias of -inf hides a key as False in the mask does."""
    added = case.with_arrays(mask=None, bias=np.where(case["mask"], 0.0, -np.inf))
    expect_equal(measure(attention, case), measure(attention, added))


@law(
    "attention",
    case=attention_cases(mask=True),
    needs={"mask"},
    source="P53",
    kills=("attention.py:mask_inverted", "attention.py:mask_added"),
)
def all_true_mask_changes_nothing(attention: Subject, case: Case) -> None:
    """A mask that hides nothing gives what no mask gives."""
    case = case.with_arrays(mask=np.ones_like(case["mask"]))
    expect_equal(measure(attention, case), measure(attention, case.with_arrays(mask=None)))


@law(
    "attention",
    case=attention_cases(mask=True, hidden=True),
    pick=PICKS,
    needs={"mask"},
    source="P52",
    relative=False,
    kills=("attention.py:mask_first_query", "attention.py:mask_of_another_sample"),
)
def mask_hides(attention: Subject, case: Case, pick: int) -> None:
    """A mask that hides a key changes something: with a zero query, its value 1 among zeros is gone."""
    bare = case.with_arrays(mask=None)
    gone = allowed_keys(bare, attention.capabilities) & ~allowed_keys(case, attention.capabilities)
    row = some_row(gone.any(-1), case.random(pick))
    if row is None:
        return
    key = int(np.flatnonzero(gone[row])[0])
    masked, plain = attention(weighing(evenly(case), key)), attention(weighing(evenly(bare), key))
    expect_different(masked[gone[..., key]], plain[gone[..., key]], what=f"the mask hides key {key}, of value 1")


@law(
    "attention",
    case=attention_cases(window=True, mask=False, bias=False),
    needs={"window", "mask"},
    source="P53",
    changes=("causal_alignment",),
    kills=(
        "attention.py:window_right_needs_causal",
        "attention.py:window_needs_mask",
        "attention.py:window_one_wider",
        "attention.py:window_one_narrower",
        "attention.py:window_needs_causal",
        "attention.py:window_from_row_zero",
        "attention.py:window_swapped",
        "attention.py:window_none_is_zero",
    ),
)
def window_equals_mask(attention: Subject, case: Case) -> None:
    """window = (left, right) leaves the keys from left before to right after the position i + (Tk - Tq)."""
    left, right = (math.inf if side is None else side for side in case["window"] or (None, None))
    right = min(right, 0) if case["causal"] else right
    position = np.arange(case.size("Tq"))[:, None] + query_offset(case, attention.capabilities)
    distance = np.arange(case.size("Tk")) - position
    band = case.with_arrays(mask=((-left <= distance) & (distance <= right))[None, None])
    expect_equal(measure(attention, case), measure(attention, band.with_keywords(window=None, causal=False)))


@law(
    "attention",
    case=attention_cases(window=True),
    spare=choice(0, 1, 1000),
    needs={"window"},
    source="P53",
    kills=("attention.py:causal_dropped_with_window",),
)
def wide_window_changes_nothing(attention: Subject, case: Case, spare: int) -> None:
    """A window that reaches beyond every key gives what no window gives."""
    side = max(case.size("Tq"), case.size("Tk")) + spare
    wide, none = case.with_keywords(window=(side, side)), case.with_keywords(window=None)
    expect_equal(measure(attention, wide), measure(attention, none))


@law(
    "attention",
    case=attention_cases(some_empty=True),
    needs={"empty rows"},
    source="P55",
    relative=False,
    changes=("empty_row",),
    kills=("attention.py:empty_row_nan", "attention.py:empty_row_mean"),
)
def empty_row_is_as_declared(attention: Subject, case: Case) -> None:
    """A row that may see nothing gives 0, or what empty_row declares."""
    empty = ~allowed_keys(case, attention.capabilities).any(-1)
    wanted = attention.reference(case)
    expect_close(attention(case)[empty], wanted.value[empty], wanted.allowed[empty], what="empty row gives")


@law(
    "attention",
    case=attention_cases(mask=True, least={"Tq": 2}),
    pick=PICKS,
    needs={"mask"},
    source="P55",
    kills=("attention_tiled.py:empty_row_blanks_its_head",),
)
def empty_row_leaves_others_alone(attention: Subject, case: Case, pick: int) -> None:
    """Hiding everything from one row does not change the others."""
    with_empty = closed(case, case.random(pick))
    others = allowed_keys(with_empty, attention.capabilities).any(-1)
    expect_equal(measure(attention, with_empty)[others], measure(attention, case)[others])


@law(
    "attention",
    case=attention_cases(mask=True, causal=False, window=False, least={"Tk": 2}),
    pick=PICKS,
    needs={"mask"},
    source="P54",
    kills=("attention_tiled.py:first_block_unguarded",),
)
def leading_keys_hidden(attention: Subject, case: Case, pick: int) -> None:
    """Hiding the first keys from every row, whole blocks of them included, equals deleting them."""
    keys = np.arange(case.size("Tk"))
    first = int(case.random(pick).integers(1, len(keys)))
    case = answerable(attention, case, len(keys) - first)
    hidden = case.with_arrays(mask=(keys >= first)[None, None, None, :])
    deleted = keep(case.with_arrays(mask=None), Tk=keys[first:])
    expect_equal(measure(attention, hidden), measure(attention, deleted))


def hidden_somewhere(attention: Subject, case: Case, rng: np.random.Generator) -> np.ndarray:
    """The keys [Tk] hidden from one row, which is drawn among those from which some are hidden."""
    allowed = allowed_keys(case, attention.capabilities)
    row = some_row(~allowed.all(-1), rng)
    return np.zeros(allowed.shape[-1], bool) if row is None else ~allowed[row]
