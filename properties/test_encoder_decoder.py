"""Encoder-decoders with a memory and a cache: what steps see of the source and of each other."""

from __future__ import annotations

import numpy as np

from veriformer.case import Case
from veriformer.law import SINGLE, law
from veriformer.moves import Move, crop, reorder, step, steps
from veriformer.properties.attention_cases import PICKS
from veriformer.properties.encoder_decoder_cases import encoder_decoder_cases, plain_encoder_decoders
from veriformer.properties.encoder_decoder_runs import (
    after,
    alone,
    encode,
    other_source,
    other_target,
    real_places,
    session,
    whole,
    with_other_source,
)
from veriformer.properties.model_cases import cuts
from veriformer.properties.model_runs import cut_up, expect_kept, expect_logits, expect_moved, expect_taken
from veriformer.subject import Subject

MASKS = {"full.mask", "encode.mask"}
"""What must take a mask where sources are padded."""


def faults(*names: str) -> tuple[str, ...]:
    """Variants of impls/faulty/encoder_decoder.py."""
    return tuple(f"encoder_decoder.py:{name}" for name in names)


def step_faults(*names: str) -> tuple[str, ...]:
    """Variants of impls/faulty/encoder_decoder_steps.py."""
    return tuple(f"encoder_decoder_steps.py:{name}" for name in names)


@law(
    "encoder_decoder",
    case=plain_encoder_decoders(),
    kind="contract",
    root=True,
    source="the convention of step",
    relative=False,
    kills=step_faults("second_step_raises"),
)
def steps_are_taken(model: Subject, case: Case) -> None:
    """Encoding, a first step and one after it raise nothing."""
    if case["target"].shape[1] > 1:
        expect_taken(model, case, session(case, [1, 1]))


@law(
    "encoder_decoder",
    case=encoder_decoder_cases(examples=12),
    cut=cuts(),
    source="P66, P74, P116",
    kills=step_faults(
        "positions_restart_in_each_step",
        "position_off_by_one_after_the_first_step",
        "chunk_top_left",
        "chunk_sees_all_of_itself",
        "chunk_sees_only_itself",
        "last_kept_row_unseen",
        "values_of_the_first_layer",
        "memory_cut_to_a_window",
        "memory_seen_in_the_first_step_only",
        "target_rows_join_the_memory",
        "mask_left_out_of_steps",
    ),
)
def cache_changes_nothing(model: Subject, case: Case, cut: tuple[int, ...]) -> None:
    """Target tokens in chunks of any lengths, with the memory and the cache, have the logits of the whole."""
    lengths = cut_up(model, case, cut)
    logits, *parts = model.run(case, [whole(case), *session(case, lengths)])
    expect_logits(model, case, np.concatenate(parts, axis=1), logits, what=f"chunks of {lengths}:")


@law(
    "encoder_decoder",
    case=encoder_decoder_cases(),
    cut=cuts(),
    source="P74",
    kills=step_faults("cache_kept_in_the_memory", "memory_scaled_by_each_session"),
)
def memory_serves_several_sessions(model: Subject, case: Case, cut: tuple[int, ...]) -> None:
    """Two targets one after the other, with one memory and each with a cache of its own, have their own logits."""
    other, lengths = case.with_arrays(target=other_target(model, case)), cut_up(model, case, cut)
    moves = [*session(other, lengths), *steps(case["target"], lengths, after(lengths), memory=0)]
    expect_sessions(model, [other, case], moves)


@law(
    "encoder_decoder",
    case=encoder_decoder_cases(),
    cut=cuts(),
    source="P74, P89",
    kills=step_faults("first_memory_kept", "cross_rows_kept_in_the_model", "source_positions_go_on"),
)
def memory_of_another_source_is_used(model: Subject, case: Case, cut: tuple[int, ...]) -> None:
    """After another source was encoded, and its memory used, each session has the logits of its own source."""
    other, lengths = with_other_source(model, case), cut_up(model, case, cut)
    moves = [*session(other, lengths), *session(case, lengths, after(lengths))]
    expect_sessions(model, [other, case], moves)


@law(
    "encoder_decoder",
    case=encoder_decoder_cases(),
    needs={"several_sessions"},
    source="corpus: caches of sessions",
    kills=step_faults("last_memory_for_all_sessions", "position_shared_by_sessions"),
)
def sessions_do_not_interact(model: Subject, case: Case) -> None:
    """Two sessions with a memory each that take turns have the logits that each has alone."""
    other = with_other_source(model, case).with_arrays(target=other_target(model, case))
    length = case["target"].shape[1] - 1
    moves = [whole(case), whole(other), encode(case, 0), encode(other, 1)]
    for place, first, memory in ((0, 2, 0), (0, 3, 1), (length, 4, 0), (length, 5, 1)):
        tokens = (case, other)[memory]["target"][:, place : place + length if place == 0 else None]
        moves.append(step(tokens, first - 2 if place else None, first, memory=memory))
    one, two, *parts = model.run(case, moves)
    expect_logits(model, case, np.concatenate(parts[::2], axis=1), one)
    expect_logits(model, other, np.concatenate(parts[1::2], axis=1), two)


@law(
    "encoder_decoder",
    case=encoder_decoder_cases(masked=True, trailing=True),
    cut=cuts(),
    needs=MASKS,
    source="P87, item 24 of the corpus",
    kills=faults(
        "mask_ignored",
        "mask_left_out_of_the_encoder",
        "mask_left_out_of_the_memory",
        "mask_inverted",
        "mask_of_the_first_row",
        "mask_of_the_longest_row",
        "mask_on_the_queries",
    )
    + step_faults("mask_left_out_of_steps"),
)
def source_padding_changes_nothing(model: Subject, case: Case, cut: tuple[int, ...]) -> None:
    """Sources padded to one length, and masked, have the logits that each has alone, in the whole and in steps."""
    lengths = cut_up(model, case, cut)
    logits, *parts = model.run(case, [whole(case), *session(case, lengths)])
    stepped = np.concatenate(parts, axis=1)
    for row in range(len(logits)):
        (wanted,) = model.run(case, [whole(alone(case, row))])
        for what, found in ((f"row {row}:", logits), (f"row {row} in steps:", stepped)):
            expect_logits(model, case, found[row : row + 1], wanted, what=what, noise=("prefixes",))


@law(
    "encoder_decoder",
    case=encoder_decoder_cases(masked=False),
    cut=cuts(),
    needs=MASKS,
    source="semantics of mask",
    kills=faults("mask_inverted", "encoder_causal_with_a_mask", "token_zero_is_padding"),
)
def full_mask_is_no_mask(model: Subject, case: Case, cut: tuple[int, ...]) -> None:
    """A mask that is True everywhere gives what no mask gives, in the whole and in steps."""
    masked, lengths = case.with_arrays(mask=np.ones(case["source"].shape, bool)), cut_up(model, case, cut)
    wanted, logits, *parts = model.run(case, [whole(case), whole(masked), *session(masked, lengths)])
    expect_logits(model, case, logits, wanted)
    expect_logits(model, case, np.concatenate(parts, axis=1), wanted)


@law(
    "encoder_decoder",
    case=encoder_decoder_cases(masked=True),
    cut=cuts(),
    needs=MASKS,
    source="P87",
    kills=faults("mask_fill_minus_ten", "mask_after_softmax", "mask_in_the_first_layer_only")
    + step_faults("mask_left_out_of_steps"),
)
def masked_source_has_no_influence(model: Subject, case: Case, cut: tuple[int, ...]) -> None:
    """Other tokens under the mask change no logits, in the whole and in steps."""
    lengths = cut_up(model, case, cut)
    changed = case.with_arrays(source=np.where(case["mask"], case["source"], other_source(model, case)))
    expect_unchanged(model, case, changed, lengths)


@law(
    "encoder_decoder",
    case=encoder_decoder_cases(examples=8),
    pick=PICKS,
    needs={SINGLE},
    source="P89; the twin of masked-source-…",
    kills=faults("cross_attention_left_out", "memory_seen_by_the_first_token_only", "memory_of_the_first_row"),
)
def source_has_influence(model: Subject, case: Case, pick: int) -> None:
    """Another real token in one row of the source changes that row's logits at every target token."""
    changed, row = case["source"].copy(), pick % len(case["source"])
    places = real_places(case)[row]
    place = places[pick // 2 % len(places)]
    changed[row, place] = other_source(model, case)[row, place]
    before, now = model.run(case, [whole(case), whole(case.with_arrays(source=changed))])
    expect_moved(before[row], now[row], "logits after another source token are")


@law(
    "encoder_decoder",
    case=encoder_decoder_cases(least=1),
    needs={SINGLE},
    source="P89, item 24 of the corpus",
    kills=faults("source_cut_by_one", "everything_causal", "cross_attention_causal")
    + step_faults("memory_cut_to_the_target"),
)
def last_source_token_is_seen_at_once(model: Subject, case: Case) -> None:
    """Another last real token of the source changes the logits of the first step already."""
    changed, others = case["source"].copy(), other_source(model, case)
    for row, places in enumerate(real_places(case)):
        changed[row, places[-1]] = others[row, places[-1]]
    first, other = case["target"][:, :1], case.with_arrays(source=changed)
    (before,) = model.run(case, [encode(case, 0), step(first, None, 1, memory=0)])
    (now,) = model.run(case, [encode(other, 0), step(first, None, 1, memory=0)])
    expect_moved(before, now, "the first logits after another last source token are")


@law(
    "encoder_decoder",
    case=encoder_decoder_cases(),
    pick=PICKS,
    source="P89, P50",
    kills=faults("target_not_causal", "target_sees_one_ahead"),
)
def future_has_no_influence(model: Subject, case: Case, pick: int) -> None:
    """Target tokens from some place on leave all logits before it as they are."""
    target, others = case["target"], other_target(model, case)
    place = 1 + pick % (target.shape[1] - 1)
    changed = case.with_arrays(target=np.concatenate([target[:, :place], others[:, place:]], axis=1))
    before, now = model.run(case, [whole(case), whole(changed)])
    expect_kept(model, case, now[:, :place], before[:, :place])


@law(
    "encoder_decoder",
    case=encoder_decoder_cases(),
    pick=PICKS,
    needs={SINGLE},
    source="P89; the twin of future-has-no-influence",
    kills=faults("target_sees_itself_only", "first_target_token_unseen"),
)
def past_has_influence(model: Subject, case: Case, pick: int) -> None:
    """Another target token in one place changes the logits there and at every place after it."""
    target = case["target"].copy()
    place = pick % (target.shape[1] - 1)
    target[:, place] = other_target(model, case)[:, place]
    before, now = model.run(case, [whole(case), whole(case.with_arrays(target=target))])
    expect_moved(before[:, place:], now[:, place:], "logits from another target token on are")


@law(
    "encoder_decoder",
    case=encoder_decoder_cases(),
    pick=PICKS,
    source="P68",
    kills=faults("temperature_by_length", "positions_from_the_end"),
)
def prefix_decides(model: Subject, case: Case, pick: int) -> None:
    """The logits of the first target tokens alone are the first logits of all of them."""
    length = 1 + pick % (case["target"].shape[1] - 1)
    short = case.with_arrays(target=case["target"][:, :length])
    logits, part = model.run(case, [whole(case), whole(short)])
    expect_logits(model, case, part, logits[:, :length], noise=("rows",))


@law(
    "encoder_decoder",
    case=encoder_decoder_cases(rows=2),
    cut=cuts(),
    source="P70, P87",
    kills=faults("memory_of_the_next_row", "mean_of_the_batch_left_out"),
)
def rows_do_not_interact(model: Subject, case: Case, cut: tuple[int, ...]) -> None:
    """Other sources, targets and masks of other rows leave a row's logits as they are, in the whole and in steps."""
    lengths = cut_up(model, case, cut)
    arrays = {"source": other_source(model, case), "target": other_target(model, case)}
    arrays |= {} if case["mask"] is None else {"mask": np.ones_like(case["mask"])}
    for name, array in arrays.items():
        array[0] = case[name][0]
    expect_unchanged(model, case, case.with_arrays(**arrays), lengths, rows=1)


@law(
    "encoder_decoder",
    case=encoder_decoder_cases(),
    needs={"crop"},
    pick=PICKS,
    source="P69",
    kills=step_faults("crop_does_nothing", "crop_one_too_long", "crop_keeps_positions"),
)
def crop_rolls_back(model: Subject, case: Case, pick: int) -> None:
    """After other tokens were taken and cropped away, the rest has the logits that it has without them."""
    target, others = case["target"], other_target(model, case)
    length = 1 + pick % (target.shape[1] - 1)
    junk = others[:, length:] if model.capabilities.chunked_steps else others[:, length : length + 1]
    moves = [whole(case), encode(case, 0), step(target[:, :length], None, 1, memory=0), step(junk, 1, 2, memory=0)]
    moves += [crop(2, length, 3), step(target[:, length : length + 1], 3, 4, memory=0)]
    logits, _, _, found = model.run(case, moves)
    expect_logits(model, case, found, logits[:, length : length + 1])


@law(
    "encoder_decoder",
    case=encoder_decoder_cases(rows=2),
    needs={"reorder"},
    pick=PICKS,
    source="P70",
    kills=step_faults("reorder_does_nothing", "reorder_of_the_keys_only", "mask_of_the_first_source"),
)
def reorder_moves_rows(model: Subject, case: Case, pick: int) -> None:
    """A reordered cache goes on, with the memory of its rows' sources, as the rows it was taken from would have."""
    target, length = case["target"], case["target"].shape[1] - 1
    rows = case.random(pick).integers(0, len(target), len(target))
    rows[0] = len(target) - 1  # never the order as it was
    sources = {name: case[name][rows] for name in ("source", "mask") if case[name] is not None}
    moved = case.with_arrays(**sources, target=np.concatenate([target[rows, :length], target[:, length:]], axis=1))
    moves = [whole(moved), encode(case, 0), step(target[:, :length], None, 1, memory=0), reorder(1, rows, 2)]
    moves += [encode(moved, 3), step(target[:, length:], 2, 4, memory=3)]
    logits, _, last = model.run(case, moves)
    expect_logits(model, moved, last, logits[:, length:], what=f"rows {rows.tolist()}:")


@law(
    "encoder_decoder",
    case=encoder_decoder_cases(least=3),
    needs={"persistent"},
    source="P67",
    kills=step_faults("one_object_said_to_be_persistent", "cache_kept_in_the_memory"),
)
def old_caches_stay_valid(model: Subject, case: Case) -> None:
    """A cache that was passed on gives the same bits when it is passed again, and so does what came of it."""
    target, others = case["target"], other_target(model, case)
    start, end = target.shape[1] - 2, target.shape[1] - 1
    middle, last = target[:, start:end], target[:, end:]
    head = [encode(case, 0), step(target[:, :start], None, 1, memory=0), step(middle, 1, 2, memory=0)]
    _, first, alone_on = model.run(case, [*head, step(last, 2, 3, memory=0)])
    forked = [step(others[:, start:end], 1, 3, memory=0), step(last, 2, 4, memory=0), step(middle, 1, 5, memory=0)]
    _, _, _, went_on, again = model.run(case, [*head, *forked])
    expect_kept(model, case, went_on, alone_on)
    expect_kept(model, case, again, first)


def expect_sessions(model: Subject, cases: list[Case], moves: list[Move]) -> None:
    """Sessions one after the other have the logits that the whole of their cases has."""
    found = model.run(cases[0], moves)
    count = len(found) // len(cases)
    for place, case in enumerate(cases):
        (wanted,) = model.run(case, [whole(case)])
        parts = found[place * count : (place + 1) * count]
        expect_logits(model, case, np.concatenate(parts, axis=1), wanted, what=f"session {place + 1}:")


def expect_unchanged(model: Subject, case: Case, changed: Case, lengths: list[int], rows: int | None = None) -> None:
    """The first rows of all logits come out alike, in the whole and in steps."""
    before, now = (model.run(case, [whole(one), *session(one, lengths)]) for one in (case, changed))
    for first, second in zip(before, now, strict=True):
        expect_kept(model, case, second[:rows], first[:rows])
