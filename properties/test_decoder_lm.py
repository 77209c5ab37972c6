"""Decoder-only models with a cache: however tokens come, the logits are those of the whole."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from veriformer.case import Case
from veriformer.expect import Broken, Refused, expect, listed
from veriformer.law import SINGLE, law
from veriformer.moves import Move, crop, full, reorder, step, steps
from veriformer.properties.attention_cases import PICKS
from veriformer.properties.model_cases import Go, cuts, decoder_cases, walks
from veriformer.properties.model_runs import (
    Walk,
    chunked,
    cut_up,
    expect_kept,
    expect_logits,
    expect_moved,
    expect_taken,
    turned_tokens,
    window_of,
)
from veriformer.subject import Subject


@law(
    "decoder_lm",
    case=decoder_cases(schemes=("rotary",), windows=(None,), examples=4),
    kind="contract",
    root=True,
    source="the convention of step",
    relative=False,
    kills=("decoder_lm_steps.py:shape_of_no_cache", "decoder_lm_steps.py:second_step_raises"),
)
def steps_are_taken(lm: Subject, case: Case) -> None:
    """A first step, a chunk and a token after it, and a crop and a reordering where they are offered raise nothing."""
    tokens, length = case["tokens"], case["tokens"].shape[1]
    if length < 2:
        return
    chunk = 2 if lm.capabilities.chunked_steps else 1
    cuts = [0, 1, *range(1 + chunk, length, chunk), length]
    moves = [full(tokens), *steps(tokens, np.diff(cuts).tolist())]
    last = len(cuts) - 2
    if lm.domain.provides("crop"):
        moves += [crop(last, 1, last + 1), step(tokens[:, 1:2], last + 1, last + 2)]
        last += 2
    moves += [reorder(last, np.arange(len(tokens)), last + 1)] if lm.domain.provides("reorder") else []
    expect_taken(lm, case, moves)


@law(
    "decoder_lm",
    case=decoder_cases(examples=14),
    cut=cuts(),
    source="P66, P71, P73",
    kills=(
        "decoder_lm_steps.py:position_off_by_one_after_the_prompt",
        "decoder_lm_window.py:steps_see_one_more",
        "decoder_lm_cache.py:free_rows_seen",
        "decoder_lm_steps.py:positions_stay_at_the_prompt",
        "decoder_lm_window.py:evicts_one_too_early",
        "decoder_lm_cache.py:written_one_too_far",
    ),
)
def cache_changes_nothing(lm: Subject, case: Case, cut: tuple[int, ...]) -> None:
    """Tokens given in chunks of any lengths, each with the cache of those before, have the logits of the whole."""
    lengths = cut_up(lm, case, cut)
    whole, parts = chunked(lm, case, [full(case["tokens"]), *steps(case["tokens"], lengths)])
    expect_logits(lm, case, parts, whole, what=f"chunks of {lengths}:")


@law(
    "decoder_lm",
    case=decoder_cases(),
    pick=PICKS,
    source="P68",
    kills=(
        "decoder_lm.py:temperature_by_length",
        "decoder_lm.py:padded_to_even",
        "decoder_lm.py:positions_from_the_end",
    ),
)
def prefix_decides(lm: Subject, case: Case, pick: int) -> None:
    """The logits of the first tokens alone are the first logits of all of them."""
    tokens = case["tokens"]
    length = 1 + pick % (tokens.shape[1] - 1)
    whole, part = lm.run(case, [full(tokens), full(tokens[:, :length])])
    expect_logits(lm, case, part, whole[:, :length], noise=("rows",))


@law(
    "decoder_lm",
    case=decoder_cases(),
    pick=PICKS,
    source="P89, P50",
    kills=(
        "decoder_lm.py:not_causal",
        "decoder_lm.py:sees_one_ahead",
        "decoder_lm.py:causal_in_blocks",
        "decoder_lm.py:only_the_first_layer_is_causal",
        "decoder_lm.py:norm_over_time",
    ),
)
def future_has_no_influence(lm: Subject, case: Case, pick: int) -> None:
    """Tokens from some place on leave all logits before it as they are."""
    tokens, others = case["tokens"], turned_tokens(lm, case)
    place = 1 + pick % (tokens.shape[1] - 1)
    changed = np.concatenate([tokens[:, :place], others[:, place:]], axis=1)
    before, after = lm.run(case, [full(tokens), full(changed)])
    expect_kept(lm, case, after[:, :place], before[:, :place])


@law(
    "decoder_lm",
    case=decoder_cases(),
    pick=PICKS,
    needs={SINGLE},
    source="P89; the twin of future-has-no-influence",
    kills=(
        "decoder_lm.py:attention_left_out",
        "decoder_lm.py:sees_itself_only",
        "decoder_lm.py:previous_token_unseen",
        "decoder_lm.py:first_token_unseen",
    ),
)
def past_has_influence(lm: Subject, case: Case, pick: int) -> None:
    """Another token in one place changes the logits there and, unless the window ends there, right after it."""
    tokens = case["tokens"]
    place = pick % (tokens.shape[1] - 1)
    changed = tokens.copy()
    changed[:, place] = turned_tokens(lm, case)[:, place]
    before, after = lm.run(case, [full(tokens), full(changed)])
    for later in (0, 1) if window_of(lm, case) != 1 else (0,):
        at = place + later
        expect_moved(before[:, at], after[:, at], f"logits {later} after a changed token are")


@law(
    "decoder_lm",
    case=decoder_cases(rows=2),
    cut=cuts(),
    source="P70, R76",
    kills=(
        "decoder_lm.py:attention_over_the_batch",
        "decoder_lm_steps.py:kept_rows_of_the_next_row",
        "decoder_lm_cache.py:values_written_to_the_next_row",
        "decoder_lm.py:mean_of_the_batch_left_out",
        "decoder_lm.py:deviation_of_the_batch",
    ),
)
def rows_do_not_interact(lm: Subject, case: Case, cut: tuple[int, ...]) -> None:
    """Other tokens in the other rows of the batch leave a row's logits as they are, in the whole and in steps."""
    tokens, changed = case["tokens"], turned_tokens(lm, case)
    changed[0] = tokens[0]
    lengths = cut_up(lm, case, cut)
    again = steps(changed, lengths, first=len(lengths))
    whole, *parts = lm.run(case, [full(tokens), *steps(tokens, lengths), full(changed), *again])
    count = len(lengths)
    expect_kept(lm, case, parts[count][0], whole[0])
    for before, after in zip(parts[:count], parts[count + 1 :], strict=True):
        expect_kept(lm, case, after[0], before[0])


@law(
    "decoder_lm",
    case=decoder_cases(),
    needs={"crop"},
    pick=PICKS,
    source="P69",
    kills=(
        "decoder_lm_window.py:crop_to_what_was_evicted",
        "decoder_lm_cache.py:crop_does_nothing",
        "decoder_lm_cache.py:crop_keeps_positions",
        "decoder_lm_cache.py:crop_one_too_short",
        "decoder_lm_cache.py:crop_one_too_long",
        "decoder_lm_cache.py:crop_counts_from_the_end",
    ),
)
def crop_rolls_back(lm: Subject, case: Case, pick: int) -> None:
    """After other tokens were taken and cropped away, the rest has the logits that it has without them."""
    tokens, others = case["tokens"], turned_tokens(lm, case)
    length = 1 + pick % (tokens.shape[1] - 1)
    junk = others[:, length:] if lm.capabilities.chunked_steps else others[:, length : length + 1]
    moves = [full(tokens), step(tokens[:, :length], None, 0), step(junk, 0, 1), crop(1, length, 2)]
    rest = [tokens.shape[1] - length] if lm.capabilities.chunked_steps else [1] * (tokens.shape[1] - length)
    for number, size in enumerate(rest):
        moves.append(step(tokens[:, length : length + size], 2 + number, 3 + number))
        length += size
    whole, _, _, *parts = lm.run(case, moves)
    found = np.concatenate(parts, axis=1)
    expect_logits(lm, case, found, whole[:, -found.shape[1] :])


@law(
    "decoder_lm",
    case=decoder_cases(rows=2),
    needs={"reorder"},
    pick=PICKS,
    source="P70",
    kills=(
        "decoder_lm_window.py:reorder_forgets_what_was_evicted",
        "decoder_lm_cache.py:reorder_does_nothing",
        "decoder_lm_cache.py:reorder_of_the_keys_only",
        "decoder_lm_cache.py:reorder_of_the_values_only",
        "decoder_lm_cache.py:reorder_of_the_first_layer_only",
        "decoder_lm_cache.py:reorder_the_other_way",
    ),
)
def reorder_moves_rows(lm: Subject, case: Case, pick: int) -> None:
    """After a reordering, rows repeated and left out, each row goes on as the row it was taken from would have."""
    tokens = case["tokens"]
    rows = case.random(pick).integers(0, len(tokens), len(tokens))
    rows[0] = len(tokens) - 1  # never the order as it was
    length = tokens.shape[1] - 1
    moved = np.concatenate([tokens[rows, :length], tokens[:, length:]], axis=1)
    moves = [full(moved), step(tokens[:, :length], None, 0), reorder(0, rows, 1), step(tokens[:, length:], 1, 2)]
    whole, _, last = lm.run(case, moves)
    expect_logits(lm, case, last, whole[:, length:], what=f"rows {rows.tolist()}:")


@law(
    "decoder_lm",
    case=decoder_cases(),
    cut=cuts(),
    source="corpus: reset and reuse",
    kills=(
        "decoder_lm_cache.py:new_session_goes_on",
        "decoder_lm_cache.py:new_session_keeps_the_length",
        "decoder_lm_cache.py:new_session_keeps_the_position",
    ),
)
def new_cache_is_empty(lm: Subject, case: Case, cut: tuple[int, ...]) -> None:
    """A session that begins without a cache knows nothing of those before it."""
    tokens, others = case["tokens"], turned_tokens(lm, case)
    lengths = cut_up(lm, case, cut)
    moves = [full(tokens), *steps(others, lengths), *steps(tokens, lengths, first=len(lengths))]
    whole, *parts = lm.run(case, moves)
    expect_logits(lm, case, np.concatenate(parts[len(lengths) :], axis=1), whole)


@law(
    "decoder_lm",
    case=decoder_cases(),
    needs={"several_sessions"},
    source="corpus: caches shared by sessions",
    kills=(
        "decoder_lm_cache.py:buffers_shared_by_sessions",
        "decoder_lm_cache.py:position_shared_by_sessions",
    ),
)
def sessions_do_not_interact(lm: Subject, case: Case) -> None:
    """Two sessions that take turns have the logits that each has alone."""
    tokens, others = case["tokens"], turned_tokens(lm, case)
    length = tokens.shape[1] - 1
    first = [step(tokens[:, :length], None, 0), step(others[:, :length], None, 1)]
    second = [step(tokens[:, length:], 0, 2), step(others[:, length:], 1, 3)]
    whole, other, *parts = lm.run(case, [full(tokens), full(others), *first, *second])
    expect_logits(lm, case, np.concatenate([parts[0], parts[2]], axis=1), whole)
    expect_logits(lm, case, np.concatenate([parts[1], parts[3]], axis=1), other)


@law(
    "decoder_lm",
    case=decoder_cases(rows=2, least=3, examples=8),
    rules=walks(),
    source="P66 to P71 together",
    kills=(
        "decoder_lm_window.py:kept_keys_turned_by_their_slot",
        "decoder_lm_cache.py:reorder_undoes_the_crop",
        "decoder_lm_cache.py:order_of_the_last_session_kept",
    ),
)
def any_walk_equals_full(lm: Subject, case: Case, rules: Sequence[Go]) -> None:
    """After any steps, crops, reorderings and new sessions, a step has the logits of all that its cache has seen."""
    walk = Walk(lm, case["tokens"]).go(rules)
    found = lm.run(case, walk.moves) if walk.moves else ()
    for number, (part, whole) in enumerate(zip(found[::2], found[1::2], strict=True)):
        expect_logits(lm, case, part, whole[:, -part.shape[1] :], what=f"step {number + 1} of the walk:")


@law(
    "decoder_lm",
    case=decoder_cases(least=3),
    needs={"persistent"},
    source="P67",
    kills=(
        "decoder_lm_cache.py:one_object_said_to_be_persistent",
        "decoder_lm_cache.py:one_buffer_said_to_be_persistent",
    ),
)
def old_caches_stay_valid(lm: Subject, case: Case) -> None:
    """A cache that was passed on gives the same bits when it is passed again, and so does what came of it."""
    tokens, others = case["tokens"], turned_tokens(lm, case)
    start, end = tokens.shape[1] - 2, tokens.shape[1] - 1
    head, middle, last = step(tokens[:, :start], None, 0), tokens[:, start:end], tokens[:, end:]
    _, first, alone = lm.run(case, [head, step(middle, 0, 1), step(last, 1, 2)])
    forked = [head, step(middle, 0, 1), step(others[:, start:end], 0, 2), step(last, 1, 3), step(middle, 0, 4)]
    _, _, _, went_on, again = lm.run(case, forked)
    expect_kept(lm, case, went_on, alone)
    expect_kept(lm, case, again, first)


@law(
    "decoder_lm",
    case=decoder_cases(),
    cut=cuts(),
    kind="hygiene",
    source="R04",
    relative=False,
    kills=("decoder_lm_steps.py:tokens_written_by_steps",),
)
def steps_leave_tokens_untouched(lm: Subject, case: Case, cut: tuple[int, ...]) -> None:
    """No step changes a bit of the tokens that it is given."""
    changed = lm.walked(case, steps(case["tokens"], cut_up(lm, case, cut)), watch=True).changed
    expect(not changed, "input changed", f"{listed(changed or '-')} changed during a step, wanted it untouched")


@law(
    "decoder_lm",
    case=decoder_cases(limited=True),
    needs={"max_length", "checks_capacity"},
    source="corpus: static caches",
    kills=(
        "decoder_lm_cache.py:overflow_wraps",
        "decoder_lm_cache.py:overflow_overwrites",
        "decoder_lm_cache.py:overflow_drops",
        "decoder_lm_cache.py:capacity_one_too_large",
        "decoder_lm_cache.py:capacity_one_too_small",
    ),
)
def past_the_capacity_is_refused(lm: Subject, case: Case) -> None:
    """A step past max_length raises an exception; one up to it does not."""
    tokens, limit = case["tokens"], limit_of(lm, case)
    if limit is None or limit > tokens.shape[1]:
        return
    lm.run(case, [full(tokens[:, :limit])])
    for lengths in ([limit], [1] * limit):  # some take no chunk of that length, but as many tokens
        try:
            lm.run(case, steps(tokens[:, :limit], lengths))
            break
        except Refused as refused:
            said = str(refused)
    else:
        expect(False, "refused", f"{limit} tokens were refused, wanted room for as many: {said}")
    taken = not raises(
        lm, case, [*steps(tokens[:, :limit], lengths), step(tokens[:, :1], len(lengths) - 1, len(lengths))]
    )
    expect(not taken, "accepted", f"token {limit + 1} was taken, wanted an exception: the cache holds {limit}")


def raises(lm: Subject, case: Case, moves: Sequence[Move]) -> bool:
    """Whether a program ends in an exception, of whatever kind."""
    try:
        lm.run(case, moves)
    except Refused:
        return True
    except Broken as broken:
        if broken.kind != "raised":
            raise
        return True
    return False


def limit_of(lm: Subject, case: Case) -> int | None:
    """The number of tokens that a cache holds."""
    facts = lm.implementation.description.models[lm.operation]
    limit: int | None = case["max_length"] if facts.weights else facts.max_length
    return limit
