"""Decoder-only models with padding, given positions and windows: where a token stands, and what it may see."""

from __future__ import annotations

import numpy as np

from veriformer.case import Case
from veriformer.law import SINGLE, law
from veriformer.moves import full, step
from veriformer.properties.attention_cases import PICKS
from veriformer.properties.model_cases import decoder_cases
from veriformer.properties.model_padding import Padded, padded_left, padded_right
from veriformer.properties.model_runs import expect_kept, expect_logits, expect_moved, turned_tokens, window_of
from veriformer.subject import Subject

PADDING = frozenset({"step.mask", "step.positions"})
BY_PLACE = (None, "rotary", "sinusoidal")
"""Schemes that go by the given positions alone, wherever a token lies in the cache."""
DECODED = 2
"""Tokens that come one by one after a padded prompt."""


def expect_as_unpadded(lm: Subject, case: Case, padded: Padded) -> None:
    """Every real token of a padded batch has the logits that its row has alone and without padding."""
    rows = [full(row[None]) for row in padded.rows]
    found = lm.run(case, [*padded.moves(lm.capabilities.chunked_steps), *rows])
    together = np.concatenate(found[: -len(rows)], axis=1)
    for number, (row, whole) in enumerate(zip(padded.places, found[-len(rows) :], strict=True)):
        expect_logits(lm, case, together[number, row], whole[0], what=f"row {number} of the padded batch:")


@law(
    "decoder_lm",
    case=decoder_cases(least=4),
    pick=PICKS,
    needs=PADDING,
    source="P72, R44",
    kills=(
        "decoder_lm_window.py:mask_of_the_first_rows",
        "decoder_lm_padding.py:mask_ignored",
        "decoder_lm_window.py:mask_dropped_after_eviction",
        "decoder_lm_padding.py:mask_ignored_in_the_prompt",
        "decoder_lm_padding.py:mask_ignored_after_the_prompt",
    ),
)
def left_padding_changes_nothing(lm: Subject, case: Case, pick: int) -> None:
    """Behind padding, with mask and positions, a prompt and the tokens after it have the logits of the bare row."""
    expect_as_unpadded(lm, case, padded_left(case, pick, DECODED))


@law(
    "decoder_lm",
    case=decoder_cases(least=4, schemes=BY_PLACE, windows=(None,)),
    pick=PICKS,
    needs=PADDING | {"weights"},
    source="P72",
    kills=(
        "decoder_lm_padding.py:padding_taken_for_left",
        "decoder_lm_padding.py:only_leading_padding_masked",
    ),
)
def right_padding_changes_nothing(lm: Subject, case: Case, pick: int) -> None:
    """With padding between a prompt and the tokens after it, all have the logits of the bare row."""
    expect_as_unpadded(lm, case, padded_right(case, pick, DECODED))


@law(
    "decoder_lm",
    case=decoder_cases(least=4),
    pick=PICKS,
    needs=PADDING,
    source="R08",
    kills=(
        "decoder_lm_padding.py:mask_fill_minus_ten",
        "decoder_lm_padding.py:masked_scores_are_zero",
        "decoder_lm_padding.py:mask_after_softmax",
        "decoder_lm_padding.py:first_masked_row_seen",
    ),
)
def masked_tokens_have_no_influence(lm: Subject, case: Case, pick: int) -> None:
    """Other tokens in masked places leave the logits of all real tokens as they are."""
    padded = padded_left(case, pick, DECODED)
    others = padded.with_filler((padded.tokens + 1) % lm.vocabulary(case))
    moves = padded.moves(lm.capabilities.chunked_steps)
    found = lm.run(case, [*moves, *others.moves(lm.capabilities.chunked_steps, first=len(moves))])
    before, after = (np.concatenate(part, axis=1) for part in (found[: len(moves)], found[len(moves) :]))
    for number, row in enumerate(padded.places):
        expect_kept(lm, case, after[number, row], before[number, row])


@law(
    "decoder_lm",
    case=decoder_cases(),
    needs=PADDING,
    source="the convention of step",
    kills=(
        "decoder_lm_padding.py:mask_switches_causal_off",
        "decoder_lm_padding.py:real_length_by_argmin",
        "decoder_lm_padding.py:positions_added_to_the_count",
        "decoder_lm_padding.py:positions_counted_from_one_if_given",
        "decoder_lm_padding.py:positions_reversed_in_a_chunk",
    ),
)
def defaults_may_be_said(lm: Subject, case: Case) -> None:
    """A mask that hides nothing, and positions that count from 0, give what comes without them."""
    tokens = case["tokens"]
    length, batch = tokens.shape[1] - 1, len(tokens)
    count = np.tile(np.arange(length + 1), (batch, 1))
    said = [
        step(tokens[:, :length], None, 0, mask=count[:, :length] >= 0, positions=count[:, :length]),
        step(tokens[:, length:], 0, 1, mask=count >= 0, positions=count[:, length:]),
    ]
    whole, *parts = lm.run(case, [full(tokens), *said])
    expect_logits(lm, case, np.concatenate(parts, axis=1), whole)


@law(
    "decoder_lm",
    case=decoder_cases(schemes=("rotary", "alibi", None)),
    pick=PICKS,
    needs={"step.positions", "weights"},
    source="P72, P42",
    kills=(
        "decoder_lm.py:rotary_turns_queries_only",
        "decoder_lm_padding.py:positions_for_queries_only",
        "decoder_lm.py:rotary_positions_clamped",
        "decoder_lm_padding.py:positions_within_the_count",
        "decoder_lm.py:rotary_angles_in_half",
        "decoder_lm.py:sinusoids_under_any_scheme",
    ),
)
def positions_shift_together(lm: Subject, case: Case, pick: int) -> None:
    """Where distances alone count, positions that all begin later by the same number change nothing."""
    tokens = case["tokens"]
    count = np.tile(np.arange(tokens.shape[1]), (len(tokens), 1))
    whole, shifted = lm.run(case, [full(tokens), step(tokens, None, 0, positions=count + (1, 2, 5, 17)[pick % 4])])
    expect_logits(lm, case, shifted, whole)


@law(
    "decoder_lm",
    case=decoder_cases(schemes=("rotary", "sinusoidal"), windows=(None,), least=3),
    needs={"step.positions", "weights", SINGLE},
    source="the twin of positions-shift-together",
    kills=(
        "decoder_lm.py:rotary_left_out",
        "decoder_lm_padding.py:positions_from_the_mask_alone",
    ),
)
def distances_have_influence(lm: Subject, case: Case) -> None:
    """Positions twice as far apart change the logits of the last token in every row."""
    tokens = case["tokens"]
    if case["positions"] not in ("rotary", "sinusoidal") or (tokens == tokens[:, :1]).all(axis=1).any():
        return
    count = np.tile(np.arange(tokens.shape[1]), (len(tokens), 1))
    whole, spread = lm.run(case, [full(tokens), step(tokens, None, 0, positions=2 * count)])
    expect_moved(whole[:, -1], spread[:, -1], "logits with positions twice as far apart are")


@law(
    "decoder_lm",
    case=decoder_cases(windows=((1, 0), (0, 0), (2, 0)), least=4),
    needs={"window", "weights"},
    source="P71",
    kills=(
        "decoder_lm_window.py:window_left_out",
        "decoder_lm_window.py:window_only_in_steps",
        "decoder_lm_window.py:window_one_wider",
        "decoder_lm_window.py:window_in_the_first_layer_only",
        "decoder_lm_window.py:window_in_every_second_layer",
        "decoder_lm_window.py:window_in_the_first_head_only",
    ),
)
def window_forgets(lm: Subject, case: Case) -> None:
    """Through L layers with a window of W tokens, one L (W - 1) places back or more has no influence."""
    tokens, window = case["tokens"], window_of(lm, case)
    layers = len(case.params["layers"])
    place = layers * (window - 1) + 1 if window else tokens.shape[1]
    if place >= tokens.shape[1]:
        return
    changed = tokens.copy()
    changed[:, 0] = turned_tokens(lm, case)[:, 0]
    length = tokens.shape[1] - 1
    walks = [
        [step(t[:, :length], None, 2 * i), step(t[:, length:], 2 * i, 2 * i + 1)]
        for i, t in enumerate((tokens, changed))
    ]
    before, after, *parts = lm.run(case, [full(tokens), full(changed), *walks[0], *walks[1]])
    expect_kept(lm, case, after[:, place:], before[:, place:])
    expect_kept(lm, case, parts[3], parts[1])


@law(
    "decoder_lm",
    case=decoder_cases(windows=((1, 0), (2, 0), (3, 0)), least=4),
    needs={"window", SINGLE},
    source="P71; the twin of window-forgets",
    kills=(
        "decoder_lm_window.py:window_one_narrower",
        "decoder_lm_window.py:window_halved",
    ),
)
def window_reaches(lm: Subject, case: Case) -> None:
    """The first token of a window of W has influence on the last, in the whole and in the next step."""
    tokens, window = case["tokens"], window_of(lm, case)
    if window is None or not 2 <= window <= tokens.shape[1]:
        return
    changed, last = tokens.copy(), window - 1
    changed[:, 0] = turned_tokens(lm, case)[:, 0]
    found = []
    for i, one in enumerate((tokens, changed)):
        found += [full(one), step(one[:, :last], None, 2 * i), step(one[:, last : last + 1], 2 * i, 2 * i + 1)]
    before, _, stepped, after, _, again = lm.run(case, found)
    for one, other in ((before[:, last], after[:, last]), (stepped[:, 0], again[:, 0])):
        expect_moved(one, other, f"with a window of {window}, logits {last} after a changed token are")


@law(
    "decoder_lm",
    case=decoder_cases(),
    pick=PICKS,
    needs={"weights"},
    source="R77",
    kills=(
        "decoder_lm.py:token_zero_is_padding",
        "decoder_lm.py:token_zero_embeds_zero",
        "decoder_lm.py:token_zero_forbidden",
        "decoder_lm.py:token_one_ends_a_document",
        "decoder_lm.py:ids_wrap_one_early",
    ),
)
def tokens_may_be_renamed(lm: Subject, case: Case, pick: int) -> None:
    """Tokens under other numbers, with their rows of the embedding and columns of the head, have the same logits."""
    order = case.random(pick).permutation(lm.vocabulary(case))
    names = np.argsort(order)
    rows = {"params.embedding": 0, "params.head.w": 1, "params.head.b": 0}
    weights = {name: case[name].take(order, axis) for name, axis in rows.items() if name in case.arrays}
    other = case.with_arrays(tokens=names[case["tokens"]], **weights)
    (whole,), (renamed,) = lm.run(case, [full(case["tokens"])]), lm.run(other, [full(other["tokens"])])
    expect_logits(lm, case, renamed[..., names], whole)
