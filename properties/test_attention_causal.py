"""What a causal row may see: nothing later, everything earlier, and where the triangle ends."""

from __future__ import annotations

import numpy as np

from veriformer.case import Case
from veriformer.expect import expect_different
from veriformer.law import law
from veriformer.oracle import allowed_keys, query_offset
from veriformer.properties.attention_cases import PICKS, attention_cases
from veriformer.properties.attention_changes import (
    edge_key,
    evenly,
    keep,
    own_rows,
    per_head,
    spoiled,
    weighing,
)
from veriformer.properties.measured import expect_equal, expect_unmoved, measure
from veriformer.subject import Subject


@law(
    "attention",
    case=attention_cases(causal=True, empty=True, least={"Tq": 2, "Tk": 2}),
    pick=PICKS,
    needs={"causal"},
    source="P50",
    relative=False,
    changes=("causal_alignment", "leak", "empty_row"),
    kills=(
        "attention.py:causal_plus_one",
        "attention.py:causal_group_of_four",
        "attention.py:causal_needs_mask",
        "attention.py:causal_offset_clamped",
    ),
)
def future_has_no_influence(attention: Subject, case: Case, pick: int) -> None:
    """Output row i depends only on keys j <= i + (Tk - Tq)."""
    rng, offset = case.random(pick), query_offset(case, attention.capabilities)
    rows, keys = np.arange(case.size("Tq")), np.arange(case.size("Tk"))
    before_last = np.flatnonzero(rows + offset < len(keys) - 1)
    if not len(before_last):
        return
    now = rng.choice(before_last)
    changed = spoiled(case, keys > now + offset, rng)
    expect_unmoved(attention, case, changed, own_rows(case, attention.capabilities) & (rows <= now))


@law(
    "attention",
    case=attention_cases(),
    pick=PICKS,
    source="P52",
    relative=False,
    changes=("causal_alignment",),
    kills=(
        "attention.py:causal_strict",
        "attention.py:causal_always",
        "attention.py:causal_gives_zeros",
        "attention_tiled.py:tail_dropped",
    ),
)
def visible_keys_have_influence(attention: Subject, case: Case, pick: int) -> None:
    """Every key that a row may see changes that row: with a zero query, value 1 among zeros shows."""
    allowed = allowed_keys(case, attention.capabilities)
    key = edge_key(allowed, case.random(pick))
    shown = attention(weighing(evenly(case), key))
    expect_different(
        shown[allowed[..., key]], 0.0, what=f"key {key} is visible there, its value is 1, all others are 0"
    )


@law(
    "attention",
    case=attention_cases(lonely=True, square=True, sink=False),
    source="P50, P56",
    changes=("causal_alignment",),
    kills=("attention.py:scale_after_softmax", "attention_tiled.py:value_tail_dropped"),
)
def single_visible_key_gives_its_value(attention: Subject, case: Case) -> None:
    """A row that may see one key only returns the value of that key."""
    allowed = allowed_keys(case, attention.capabilities)
    alone = allowed.sum(-1) == 1
    expect_equal(measure(attention, case)[alone], (allowed @ per_head(case, "v"))[alone])


@law(
    "attention",
    case=attention_cases(causal=True, square=True, least={"Tq": 2}),
    pick=PICKS,
    needs={"causal"},
    source="P51",
    changes=("causal_alignment",),
    kills=("attention.py:causal_top_left",),
)
def causal_is_the_end_of_the_square(attention: Subject, case: Case, pick: int) -> None:
    """Fewer queries than keys: the rows are the last ones of the square problem.

    (The first ones if causal_alignment=top_left; if square, fewer keys too.)
    """
    length, alignment = case.size("Tq"), attention.capabilities.causal_alignment
    cut = int(case.random(pick).integers(0, length - 1)) + 1
    rows = np.arange(cut, length) if alignment == "bottom_right" else np.arange(cut)
    part = keep(case, Tq=rows, Tk=rows) if alignment == "square" else keep(case, Tq=rows)
    expect_equal(measure(attention, part), measure(attention, case)[:, :, rows])
