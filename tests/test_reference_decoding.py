"""The reference models with a cache: chunks, what a cache promises, windows, padding, the memory, errors."""

import array_api_strict as strict
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_models import VOCABULARY, close, converted, random_lm, random_transformer

from veriformer.reference import (
    crop,
    decoder_lm,
    decoder_lm_step,
    evict,
    loops_models,
    reorder,
    transformer,
    transformer_encode,
    transformer_step,
)

pytestmark = pytest.mark.filterwarnings("error")
SEARCH = settings(max_examples=60, deadline=None, database=None, derandomize=True)
POSITIONS = (None, "sinusoidal", "rotary", "alibi")
LENGTH = 8


def tokens(seed, *shape):
    return np.random.default_rng(seed).integers(0, VOCABULARY, shape)


@st.composite
def partitions(draw):
    """Sizes of chunks, 0 among them, that make up LENGTH."""
    cuts = sorted(draw(st.lists(st.integers(0, LENGTH), max_size=5)))
    return [b - a for a, b in zip([0, *cuts], [*cuts, LENGTH], strict=True)]


@st.composite
def problems(draw):
    """Chunk sizes; tokens, params and what only the whole model is given; keywords; rows kept between steps or None."""
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    params = random_lm(draw(st.integers(0, 9)), groups=draw(st.sampled_from([1, 2, 4])), head=draw(st.booleans()))
    keywords = {
        "heads": 4,
        "norm": draw(st.sampled_from(["post", "pre"])),
        "positions": draw(st.sampled_from(POSITIONS)),
        "window": draw(st.sampled_from([None, (2, 0)])),
    }
    padding = draw(st.sampled_from([None, np.asarray([[0], [3]]), np.asarray([[1], [0]])]))
    told = {}
    if padding is not None:
        told["mask"] = np.arange(LENGTH)[None] >= padding
        told["at"] = np.maximum(np.arange(LENGTH)[None] - padding, 0)
    kept = draw(st.sampled_from([None, 2, 3])) if keywords["window"] else None
    return draw(partitions()), generator.integers(0, VOCABULARY, (2, LENGTH)), params, told, keywords, kept


def in_chunks(chunks, ids, params, told, keywords, kept=None, cache=None):
    """The logits of the whole from decoder_lm_step, chunk by chunk."""
    parts, n = [], 0
    for m in chunks:
        given = {}
        if "mask" in told:
            given["mask"] = told["mask"][:, : n + m]
        if "at" in told:
            given["at"] = told["at"][:, n : n + m]
        logits, cache = decoder_lm_step(ids[:, n : n + m], cache, params, **given, **keywords)
        cache = cache if kept is None else evict(cache, kept)
        parts.append(logits)
        n += m
    return parts, cache


def told_positions(told, kept):
    """Evicted rows cannot be counted, so the positions are told."""
    return told if kept is None or told else {"at": np.broadcast_to(np.arange(LENGTH), (2, LENGTH))}


@SEARCH
@given(problems())
def test_chunks_give_the_whole(problem):
    chunks, ids, params, told, keywords, kept = problem
    told = told_positions(told, kept)
    wanted = decoder_lm(ids, params, **told, **keywords)
    parts, _ = in_chunks(chunks, ids, params, told, keywords, kept)
    assert [part.shape[1] for part in parts] == chunks
    close(np.concatenate(parts, axis=1), wanted)


@SEARCH
@given(problems())
def test_frameworks_agree(problem):
    chunks, ids, params, told, keywords, kept = problem
    told = told_positions(told, kept)
    wanted, cache = in_chunks(chunks, ids, params, told, keywords, kept)
    for convert in (strict.asarray, torch.tensor):
        there = converted(convert, (ids, params, {name: a.copy() for name, a in told.items()}))
        parts, rows = in_chunks(chunks, *there, keywords, kept)
        same = close if convert is torch.tensor else np.testing.assert_array_equal
        for got, here in zip([*parts, *sum(rows, ())], [*wanted, *sum(cache, ())], strict=True):
            same(np.asarray(got), here)


@pytest.mark.parametrize("positions", POSITIONS)
def test_a_step_equals_the_loops(positions):
    params, ids = random_lm(2), tokens(0, 2, 5)
    _, cache = decoder_lm_step(ids[:, :4], None, params, heads=4, positions=positions)
    logits, _ = decoder_lm_step(ids[:, 4:], cache, params, heads=4, positions=positions)
    close(logits[:, 0], [loops_models.decoder_lm(row, params, heads=4, positions=positions)[-1] for row in ids])


# what a cache promises


def start(length=5, batch=2, **keywords):
    params, ids = random_lm(1), tokens(0, batch, LENGTH)
    _, cache = decoder_lm_step(ids[:, :length], None, params, heads=4, **keywords)
    return params, ids, cache


def test_rows_are_appended_and_never_change():
    params, ids, cache = start()
    copies = [tuple(rows.copy() for rows in kv) for kv in cache]
    _, longer = decoder_lm_step(ids[:, 5:], cache, params, heads=4)
    assert [rows.shape for kv in longer for rows in kv] == [(2, 2, LENGTH, 2)] * 4
    for kv, copy, more in zip(cache, copies, longer, strict=True):
        for rows, old, new in zip(kv, copy, more, strict=True):
            np.testing.assert_array_equal(rows, old)
            np.testing.assert_array_equal(new[:, :, :5], old)


@pytest.mark.parametrize("length", [0, 2, 5])
def test_a_cropped_cache_is_that_of_the_prefix(length):
    params, ids, cache = start()
    fresh = start(length)[2]
    cropped = crop(cache, length)
    for kv, wanted in zip(cropped, fresh, strict=True):
        close(kv[0], wanted[0])
        close(kv[1], wanted[1])
    other = tokens(9, 2, 3)
    got, _ = decoder_lm_step(other, cropped, params, heads=4)
    close(got, decoder_lm(np.concatenate([ids[:, :length], other], axis=1), params, heads=4)[:, length:])


@pytest.mark.parametrize("convert", [np.asarray, strict.asarray, torch.tensor])
def test_rows_of_the_batch_can_be_chosen_anew(convert):
    params, ids, cache = start()
    order = [1, 1, 0]
    there = converted(convert, (ids, params, cache))
    chosen = reorder(there[2], convert(np.asarray(order)))
    got, _ = decoder_lm_step(convert(ids[order, 5:]), chosen, there[1], heads=4)
    close(got, decoder_lm(ids, params, heads=4)[order, 5:])


def test_nothing_can_be_cropped_and_reordered():
    assert crop(None, 0) is None and reorder(None, np.asarray([0])) is None and evict(None, 3) is None


# windows


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("chunks", [(1,) * 8, (4, 3, 1), (6, 2)])
def test_a_window_needs_no_more_rows_than_it_sees(positions, chunks):
    """W = 3: two rows are kept. A mask of all tokens tells the positions as well."""
    params, ids = random_lm(1), tokens(0, 2, LENGTH)
    keywords = {"heads": 4, "window": (2, 0), "positions": positions}
    told = {"mask": np.ones((2, LENGTH), dtype=bool)}
    parts, cache = in_chunks(chunks, ids, params, told, keywords, kept=2)
    assert cache[0][0].shape[2] == 2
    close(np.concatenate(parts, axis=1), decoder_lm(ids, params, **keywords))


def test_rows_evicted_too_early_or_too_many_are_missed():
    params, ids = random_lm(1), tokens(0, 2, LENGTH)
    keywords = {"heads": 4, "window": (2, 0), "positions": "alibi"}
    wanted = decoder_lm(ids, params, **keywords)
    parts, _ = in_chunks((4, 4), ids, params, {}, keywords, kept=1)
    assert np.abs(np.concatenate(parts, axis=1) - wanted).max() > 0.01
    close(parts[0], wanted[:, :4])


def test_a_model_run_on_the_last_window_alone_is_another_one():
    """Two layers look back twice as far as one."""
    params, ids = random_lm(1), tokens(0, 2, LENGTH)
    keywords = {"heads": 4, "window": (2, 0)}
    whole = decoder_lm(ids, params, **keywords)[:, -1]
    assert np.abs(decoder_lm(ids[:, -3:], params, **keywords)[:, -1] - whole).max() > 0.01
    close(decoder_lm(ids[:, -5:], params, **keywords)[:, -1], whole)


def test_positions_must_be_told_after_eviction():
    """The one mistake that nothing can detect: rotary then turns by the wrong angle."""
    params, ids = random_lm(1), tokens(0, 2, LENGTH)
    keywords = {"heads": 4, "window": (2, 0)}
    wanted = decoder_lm(ids, params, **keywords)
    _, cache = decoder_lm_step(ids[:, :7], None, params, **keywords)
    cache = evict(cache, 2)
    untold, _ = decoder_lm_step(ids[:, 7:], cache, params, **keywords)
    assert np.abs(untold - wanted[:, 7:]).max() > 0.01
    told, _ = decoder_lm_step(ids[:, 7:], cache, params, **keywords, at=np.asarray([7]))
    close(told, wanted[:, 7:])


# encoder-decoder


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("positions", POSITIONS)
@settings(SEARCH, max_examples=10)
@given(chunks=partitions(), masked=st.booleans())
def test_encoding_once_and_stepping_is_the_transformer(norm, positions, chunks, masked):
    params = random_transformer(3, layers=(1, 2), norm=norm)
    source, target = tokens(0, 2, 4), tokens(1, 2, LENGTH)
    mask = np.asarray([[True] * 4, [True, True, False, False]]) if masked else None
    keywords = {"heads": 4, "norm": norm, "positions": positions, "alpha": (1.2, 1.4)}
    memory = transformer_encode(source, params, mask=mask, **keywords)
    assert len(memory[0]) == 2 and memory[0][0][0].shape == (2, 4, 4, 2)
    parts, cache, n = [], None, 0
    for m in chunks:
        logits, cache = transformer_step(target[:, n : n + m], memory, cache, params, **keywords)
        parts.append(logits)
        n += m
    close(np.concatenate(parts, axis=1), transformer(source, target, params, mask=mask, **keywords))


@pytest.mark.parametrize("convert", [strict.asarray, torch.tensor])
def test_frameworks_agree_on_encoder_decoders(convert):
    params, source, target = random_transformer(3), tokens(0, 2, 4), tokens(1, 2, 3)
    mask = np.asarray([[True] * 4, [True, True, False, False]])

    def run(source, target, params, mask):
        memory = transformer_encode(source, params, heads=4, mask=mask)
        _, cache = transformer_step(target[:, :1], memory, None, params, heads=4)
        return transformer_step(target[:, 1:], memory, cache, params, heads=4)[0]

    wanted, got = run(source, target, params, mask), run(*converted(convert, (source, target, params, mask)))
    (close if convert is torch.tensor else np.testing.assert_array_equal)(np.asarray(got), wanted)


def test_the_memory_is_reordered_with_its_mask():
    params, source, target = random_transformer(3), tokens(0, 2, 4), tokens(1, 3, 3)
    mask = np.asarray([[True] * 4, [True, True, False, False]])
    order = np.asarray([1, 0, 1])
    memory = reorder(transformer_encode(source, params, heads=4, mask=mask), order)
    got, _ = transformer_step(target, memory, None, params, heads=4)
    close(got, transformer(source[order], target, params, heads=4, mask=mask[order]))
    assert reorder(transformer_encode(source, params, heads=4), order)[1] is None


# errors


def test_errors_of_steps():
    params, ids, cache = start()
    with pytest.raises(ValueError, match="step: tokens: got 3 beside 5 in the cache, wanted at most 7, the capacity"):
        decoder_lm_step(ids[:, 5:], cache, params, heads=4, capacity=7)
    decoder_lm_step(ids[:, 5:], cache, params, heads=4, capacity=8)
    with pytest.raises(ValueError, match="step: tokens: got 8 beside 0 in the cache"):
        decoder_lm_step(ids, None, params, heads=4, capacity=7)
    with pytest.raises(ValueError, match=r"step: tokens: got shape \(3,\), wanted 2 axes"):
        decoder_lm_step(ids[0, 5:], cache, params, heads=4)
    with pytest.raises(ValueError, match="step: cache: got 2 batch rows, wanted 1, as in tokens"):
        decoder_lm_step(ids[:1, 5:], cache, params, heads=4)
    with pytest.raises(ValueError, match="stack: cache: got 1 entries, wanted one for each of 2 layers"):
        decoder_lm_step(ids[:, 5:], cache[:1], params, heads=4)
    for shape in ((2, 3), (2, 7), (1, 8), (2, 1, 1, 8)):
        with pytest.raises(ValueError, match=r"step: mask: got shape \(\d.*\), wanted \(2, 8\) or longer rows"):
            decoder_lm_step(ids[:, 5:], cache, params, heads=4, mask=np.ones(shape, dtype=bool))
    with pytest.raises(ValueError, match="embedding: ids: got 0 to 7, wanted 0 to 6"):
        decoder_lm_step(np.asarray([[7], [0]]), cache, params, heads=4)


def test_errors_of_caches():
    _, _, cache = start()
    for length in (6, -1):
        with pytest.raises(ValueError, match=f"crop: length: got {length}, wanted 0 to 5, the rows of the cache"):
            crop(cache, length)
    with pytest.raises(ValueError, match="evict: keep: got -1, wanted a number of rows >= 0"):
        evict(cache, -1)
    assert evict(cache, 9)[0][0].shape[2] == 5 and evict(cache, 0)[0][0].shape[2] == 0


def test_errors_of_encoder_decoders():
    params, target = random_transformer(3), tokens(1, 2, 3)
    memory = transformer_encode(tokens(0, 1, 4), params, heads=4)
    with pytest.raises(ValueError, match=r"attention: k: got shape \(1, 4, 4, 2\), wanted \(2, 4, 4, 2\)"):
        transformer_step(target, memory, None, params, heads=4)
    with pytest.raises(ValueError, match="stack: memory: got 0 entries, wanted one for each of 1 layers"):
        transformer_step(target, ([], None), None, params, heads=4)
    with pytest.raises(ValueError, match=r"mask: got shape \(1, 3\), wanted \(1, 4\)"):
        transformer_encode(tokens(0, 1, 4), params, heads=4, mask=np.ones((1, 3), dtype=bool))
