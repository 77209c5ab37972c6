"""The reference generation: probabilities of the next token, samples, greedy and beam search, start and end, errors."""

import math

import array_api_strict as strict
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_models import VOCABULARY, close, converted, random_lm, random_transformer

from veriformer.reference import (
    beam_search,
    decoder_lm,
    decoder_lm_step,
    generate,
    greedy,
    log_softmax,
    loops_models,
    next_token_probabilities,
    reorder,
    sample,
    softmax,
    transformer,
    transformer_encode,
    transformer_step,
)

pytestmark = pytest.mark.filterwarnings("error")
SEARCH = settings(max_examples=200, deadline=None, database=None, derandomize=True)
FRAMEWORKS = [np.asarray, strict.asarray, torch.tensor]


@st.composite
def choices(draw):
    """logits[2,V] without two that are equal or almost, keywords."""
    size = draw(st.sampled_from([1, 2, 5, 9]))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    logits = draw(st.sampled_from([0.1, 1.0, 30.0])) * generator.permuted(
        np.arange(2.0 * size).reshape(2, size), axis=1
    )
    logits = logits + generator.uniform(-0.01, 0.01, logits.shape)
    if draw(st.booleans()) and size > 1:
        logits[1, generator.integers(size)] = -math.inf
    return logits, {
        "temperature": draw(st.sampled_from([0.0, 0.3, 1.0, 7.0])),
        "top_k": draw(st.sampled_from([None, 1, 2, 4, 20])),
        "top_p": draw(st.sampled_from([None, 0.0, 0.3, 0.77, 0.9999, 1.0])),
        "order": draw(st.sampled_from(["temperature_first", "temperature_last"])),
        "exactly_k": draw(st.booleans()),
    }


# probabilities


@SEARCH
@given(choices())
def test_probabilities_equal_the_loops(case):
    logits, keywords = case
    wanted = [loops_models.next_token_probabilities(row, **keywords) for row in logits]
    close(next_token_probabilities(logits, **keywords), wanted)


@SEARCH
@given(choices())
def test_frameworks_agree(case):
    logits, keywords = case
    wanted = next_token_probabilities(logits, **keywords)
    np.testing.assert_array_equal(np.asarray(next_token_probabilities(strict.asarray(logits), **keywords)), wanted)
    close(next_token_probabilities(torch.tensor(logits), **keywords), wanted)


@SEARCH
@given(choices())
def test_what_stays_is_renormalised_and_its_ratios_kept(case):
    logits, keywords = case
    p, plain = next_token_probabilities(logits, **keywords), softmax(logits, temperature=keywords["temperature"])
    close(p.sum(axis=-1), np.ones(2))
    stays = p > 0
    kept = np.where(stays, plain, 0)
    close(p, kept / kept.sum(axis=-1, keepdims=True))
    if keywords["top_p"] not in (None, 1.0) and keywords["top_k"] is None and keywords["order"] == "temperature_first":
        mass = kept.sum(axis=-1)
        assert (mass >= keywords["top_p"] - 1e-12).all()
        least = np.where(stays, plain, 1).min(axis=-1)
        assert ((mass - least < keywords["top_p"]) | (stays.sum(axis=-1) == 1)).all()


def test_what_changes_nothing():
    logits = np.random.default_rng(0).normal(size=(3, 6))
    for keywords in ({}, {"top_k": 6}, {"top_k": 60}, {"top_p": 1.0}, {"top_k": 6, "top_p": 1.0}):
        np.testing.assert_array_equal(next_token_probabilities(logits, **keywords), softmax(logits))


@pytest.mark.parametrize("keywords", [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.0}, {"top_p": 1e-9}])
def test_ways_to_be_greedy(keywords):
    logits = np.random.default_rng(0).normal(size=(3, 6))
    p = next_token_probabilities(logits, **keywords)
    np.testing.assert_array_equal(p, np.eye(6)[np.argmax(logits, axis=-1)])
    np.testing.assert_array_equal(sample(p, np.asarray([0.0, 0.5, 0.99])), greedy(logits))


@pytest.mark.parametrize("convert", FRAMEWORKS)
def test_golden_nucleus(convert):
    """Two tokens have .8 together; of equal ones the first stay, and two quarters are enough for a half."""
    p = np.asarray([0.15, 0.5, 0.05, 0.3])
    for top_p, wanted in [(0.79, [0, 0.625, 0, 0.375]), (0.81, [0.15 / 0.95, 0.5 / 0.95, 0, 0.3 / 0.95])]:
        close(next_token_probabilities(convert(np.log(p)), top_p=top_p), wanted)
    equal = convert(np.zeros(4))
    close(next_token_probabilities(equal, top_p=0.5), [0.5, 0.5, 0, 0])
    close(next_token_probabilities(equal, top_k=2), [0.25] * 4)
    close(next_token_probabilities(equal, top_k=2, exactly_k=True), [0.5, 0.5, 0, 0])


def test_golden_order():
    """Temperature comes before top-p: of the same logits it leaves two tokens, or three."""
    logits = np.log([0.6, 0.3, 0.1])
    assert (next_token_probabilities(logits, top_p=0.85) > 0).tolist() == [True, True, False]
    assert (next_token_probabilities(logits, top_p=0.85, temperature=3.0) > 0).all()
    assert (next_token_probabilities(logits, top_p=0.85, temperature=3.0, order="temperature_last") > 0).sum() == 2
    # top-k comes before top-p: of the two that it leaves, one has two thirds.
    assert (next_token_probabilities(logits, top_p=0.65) > 0).tolist() == [True, True, False]
    assert (next_token_probabilities(logits, top_p=0.65, top_k=2) > 0).tolist() == [True, False, False]


# samples


@pytest.mark.parametrize("convert", FRAMEWORKS)
def test_golden_samples(convert):
    """The first token whose cumulated probability is more than the number, so never one of probability 0."""
    p = [0.0, 0.25, 0.25, 0.0, 0.5, 0.0]
    numbers = [0.0, 0.2499, 0.25, 0.4999, 0.5, 0.75, 1 - 2**-53]
    got = sample(convert(np.asarray([p] * 7)), convert(np.asarray(numbers)))
    assert [int(got[i]) for i in range(7)] == [1, 1, 2, 2, 4, 4, 4]


def test_the_largest_number_picks_a_token_though_roundings_miss_one():
    generator = np.random.default_rng(0)
    for scale in (1 - 1e-15, 1, 1 + 1e-15):
        p = softmax(generator.normal(size=(500, 9))) * scale
        p[:, -1] = 0
        picked = sample(p / p.sum(axis=-1, keepdims=True), np.full(500, 1 - 2**-53))
        assert (picked == 7).all()


def test_numbers_spread_evenly_pick_as_often_as_probable():
    p = softmax(np.random.default_rng(0).normal(size=5))
    numbers = (np.arange(10000) + 0.5) / 10000
    counts = np.bincount(sample(np.broadcast_to(p, (10000, 5)), numbers), minlength=5)
    assert np.abs(counts - 10000 * p).max() <= 1


# greedy generation


@pytest.mark.parametrize("convert", FRAMEWORKS)
def test_of_equal_logits_the_first_is_taken(convert):
    logits = convert(np.asarray([[1.0, 3.0, 3.0, 3.0], [0.0, 0.0, 0.0, 0.0], [-np.inf, -2.0, -1.0, -1.0]]))
    assert [int(i) for i in greedy(logits)] == [1, 0, 2]


def language_model(params, convert=np.asarray):
    params = converted(convert, params)
    return lambda tokens, cache: decoder_lm_step(tokens, cache, params, heads=4)


def prompts(seed, *shape):
    return np.random.default_rng(seed).integers(0, VOCABULARY, shape)


@pytest.mark.parametrize("convert", FRAMEWORKS)
@pytest.mark.parametrize("end", [None, *range(VOCABULARY)])
def test_greedy_generation_equals_the_loops(convert, end):
    """Row by row, without a cache; after the end there is only padding."""
    params, prompt = random_lm(4), prompts(1, 3, 2)
    rows = [
        loops_models.generate(
            lambda tokens: loops_models.decoder_lm(tokens, params, heads=4), row, max_length=8, end=end
        )
        for row in prompt
    ]
    length = max(len(row) for row in rows)
    wanted = [row + [9] * (length - len(row)) for row in rows]
    got = generate(language_model(params, convert), convert(prompt), max_length=8, end=end, pad=9)
    np.testing.assert_array_equal(np.asarray(got), wanted)


def script(*rows):
    """A model that says what is written, whatever it is told; -1 is never looked at."""
    table, said = np.asarray(rows), []

    def step(tokens, cache):
        cache = (cache or 0) + tokens.shape[1]
        said.append(tokens.copy())
        logits = np.zeros((*tokens.shape, VOCABULARY))
        logits[np.arange(len(table)), -1, table[:, cache - 1]] = 1.0
        return logits, cache

    return step, said


def test_golden_generation():
    """Prompt of two tokens; 6 ends: at once in row 1, in row 0 after two more, where all ends."""
    step, said = script([-1, 3, 5, 6, 2, 2], [-1, 6, 1, 2, 3, 4])
    got = generate(step, np.asarray([[0, 1], [0, 6]]), max_length=9, end=6, pad=2)
    np.testing.assert_array_equal(got, [[0, 1, 3, 5, 6], [0, 6, 6, 2, 2]])
    assert [tokens.tolist() for tokens in said] == [[[0, 1], [0, 6]], [[3], [6]], [[5], [2]]]


def test_the_length_counts_the_prompt():
    step, _ = script([-1, 3, 5, 4, 2, 2])
    prompt = np.asarray([[0, 1]])
    for length, wanted in [(2, [0, 1]), (3, [0, 1, 3]), (5, [0, 1, 3, 5, 4])]:
        assert generate(step, prompt, max_length=length, end=6)[0].tolist() == wanted


def test_rows_are_generated_as_if_alone():
    """Chosen so that the largest logits lie apart; rows that end change nothing for the others."""
    params, prompt = random_lm(4), prompts(1, 4, 2)
    step = language_model(params)
    for end in range(VOCABULARY):
        together = generate(step, prompt, max_length=9, end=end, pad=9)
        for row, all_of_it in zip(prompt, together, strict=True):
            alone = generate(step, row[None], max_length=9, end=end, pad=9)[0]
            np.testing.assert_array_equal(all_of_it[: len(alone)], alone)
            assert (all_of_it[len(alone) :] == 9).all()


@pytest.mark.parametrize("positions", [None, "sinusoidal", "rotary", "alibi"])
def test_prompts_of_different_lengths_are_padded_in_front(positions):
    params, rows = random_lm(4), [prompts(5, 1, 1), prompts(6, 1, 4), prompts(7, 1, 3)]
    prompt = np.concatenate([np.pad(row, ((0, 0), (4 - row.shape[1], 0))) for row in rows])
    mask = np.concatenate([np.pad(row >= 0, ((0, 0), (4 - row.shape[1], 0))) for row in rows])

    def padded(tokens, cache):
        length = tokens.shape[1] + (0 if cache is None else cache[0][0].shape[2])
        seen = np.pad(mask, ((0, 0), (0, length - 4)), constant_values=True)
        at = np.maximum(np.cumsum(seen, axis=1) - 1, 0)[:, -tokens.shape[1] :]
        return decoder_lm_step(tokens, cache, params, heads=4, positions=positions, mask=seen, at=at)

    def plain(tokens, cache):
        return decoder_lm_step(tokens, cache, params, heads=4, positions=positions)

    together = generate(padded, prompt, max_length=9)
    for got, row in zip(together, rows, strict=True):
        np.testing.assert_array_equal(got[4:], generate(plain, row, max_length=row.shape[1] + 5)[0, row.shape[1] :])


def test_generation_can_be_continued():
    step, prompt = language_model(random_lm(4)), prompts(1, 2, 2)
    first = generate(step, prompt, max_length=5)
    np.testing.assert_array_equal(generate(step, first, max_length=9), generate(step, prompt, max_length=9))


def test_sampling_takes_a_number_for_each_row_and_token():
    params, prompt = random_lm(4), prompts(1, 2, 2)
    uniform = np.random.default_rng(0).uniform(size=(2, 9))

    def choose(logits, n):
        return sample(next_token_probabilities(logits, temperature=2.0, top_k=5, top_p=0.9), uniform[:, n])

    got = generate(language_model(params), prompt, max_length=9, choose=choose)
    for n in range(2, 9):
        logits = decoder_lm(got[:, :n], params, heads=4)[:, -1]
        np.testing.assert_array_equal(got[:, n], choose(logits, n))
    assert (got != generate(language_model(params), prompt, max_length=9)).any()


def test_the_log_probability_of_what_was_generated_is_that_of_forcing_it():
    params, prompt = random_lm(4), prompts(1, 2, 2)
    step = language_model(params)
    for row in prompt:
        ((continuation, score),) = beam_search(step, row, beams=1, max_length=7)
        whole = np.concatenate([row, continuation])[None]
        log_p = log_softmax(decoder_lm(whole, params, heads=4))[0]
        close(score, sum(log_p[i, whole[0, i + 1]] for i in range(1, 6)))


def test_an_encoder_decoder_translates_token_by_token():
    """Start token 0, end token 1; the memory is computed once."""
    params = random_transformer(3)
    source, mask = prompts(0, 3, 4), np.asarray([[True] * 4, [True, True, False, False], [True, False, True, True]])
    memory = transformer_encode(source, params, heads=4, mask=mask)

    def step(tokens, cache):
        return transformer_step(tokens, memory, cache, params, heads=4)

    got = generate(step, np.zeros((3, 1), dtype=np.int64), max_length=8, end=1, pad=2)
    forced = np.argmax(transformer(source, got, params, heads=4, mask=mask), axis=-1)
    for row, wanted in zip(got, forced, strict=True):
        length = row.tolist().index(1) + 1 if 1 in row.tolist() else len(row)
        np.testing.assert_array_equal(row[1:length], wanted[: length - 1])
        assert (row[length:] == 2).all()


# beam search


@pytest.mark.parametrize("length_penalty", [0.0, 0.6, 2.0])
@pytest.mark.parametrize("end", [None, 2])
def test_enough_beams_find_the_best_of_all_sequences(length_penalty, end):
    """5 tokens, 3 rounds: 125 sequences; if one of the tokens ends, 1 + 4 + 16 · 5."""
    params = random_lm(6, layers=1)
    params["embedding"] = params["embedding"][:5]
    keywords = {"max_length": 5, "end": end, "length_penalty": length_penalty}
    wanted = loops_models.every_sequence(
        lambda tokens: loops_models.decoder_lm(tokens, params, heads=4), [3, 1], **keywords
    )
    got = beam_search(language_model(params), np.asarray([3, 1]), beams=125, **keywords)
    assert len(got) == len(wanted) == (125 if end is None else 1 + 4 + 16 * 5)
    assert [tokens for tokens, _ in got] == [tokens for tokens, _ in wanted]
    close([score for _, score in got], [score for _, score in wanted])


@pytest.mark.parametrize("convert", FRAMEWORKS)
@pytest.mark.parametrize("end", [None, *range(VOCABULARY)])
def test_one_beam_is_greedy(convert, end):
    step = language_model(random_lm(4), convert)
    for row in prompts(1, 3, 2):
        ((tokens, _),) = beam_search(step, convert(row), beams=1, max_length=7, end=end)
        wanted = generate(step, convert(row[None]), max_length=7, end=end)
        assert tokens == [int(wanted[0, n]) for n in range(2, wanted.shape[1])]


def tree(tokens, cache):
    """A model of three tokens, the last of which ends, made to deceive the greedy: .6 .4 | .4 .3 .3 or .1 .9 | end."""
    chances = {1: [[0.6, 0.4, 0.0]], 2: {0: [0.4, 0.3, 0.3], 1: [0.1, 0.9, 0.0]}}
    cache = np.zeros((len(tokens), 1, 1)) if cache is None else cache + 1
    depth = int(cache[0, 0, 0]) + 1
    rows = chances[1] * len(tokens) if depth == 1 else [chances[2][t] for t in tokens[:, 0]] if depth == 2 else None
    rows = rows or [[0.0, 0.0, 1.0]] * len(tokens)
    with np.errstate(divide="ignore"):
        return np.log(np.asarray(rows))[:, None], cache


def test_golden_beams():
    """Greedy goes to 0 and 0, of .24; two beams find 1 and 1, of .36; an end is penalised less if it is late."""
    start = np.asarray([0])
    assert beam_search(tree, start, beams=1, max_length=4, end=2)[0][0] == [0, 0, 2]
    (best, score), (second, _) = beam_search(tree, start, beams=2, max_length=4, end=2)
    assert best == [1, 1, 2] and second == [0, 0, 2]
    close(score, math.log(0.36))
    found = dict((tuple(t), s) for t, s in beam_search(tree, start, beams=9, max_length=4, end=2, length_penalty=1.0))
    close(found[0, 2], math.log(0.18) / (7 / 6))
    close(found[1, 1, 2], math.log(0.36) / (8 / 6))
    assert set(found) == {(0, 2), (0, 0, 2), (0, 1, 2), (1, 0, 2), (1, 1, 2)}


def test_beams_of_an_encoder_decoder():
    params = random_transformer(3)
    memory = transformer_encode(prompts(0, 1, 4), params, heads=4)

    def step(tokens, cache):
        spread = reorder(memory, np.zeros(tokens.shape[0], dtype=np.int64))
        return transformer_step(tokens, spread, cache, params, heads=4)

    found = beam_search(step, np.asarray([0]), beams=3, max_length=5, end=1, length_penalty=0.6)
    assert [score for _, score in found] == sorted((score for _, score in found), reverse=True)
    for tokens, score in found:
        target = np.asarray([[0, *tokens]])
        log_p = log_softmax(transformer(prompts(0, 1, 4), target, params, heads=4))[0]
        total = sum(log_p[i, token] for i, token in enumerate(tokens))
        close(score, total / ((5 + len(tokens)) / 6) ** 0.6)


# errors


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"temperature": -1.0}, "temperature: got -1.0, wanted a finite number >= 0"),
        ({"top_k": 0}, "top_k: got 0, wanted at least 1, or None"),
        ({"top_p": 1.5}, "top_p: got 1.5, wanted a number from 0 to 1, or None"),
        ({"top_p": -0.1}, "top_p: got -0.1, wanted"),
        ({"top_p": math.nan}, "top_p: got nan, wanted"),
        ({"order": "last"}, "order: got 'last', wanted temperature_first or …_last"),
    ],
)
def test_errors_of_probabilities(keywords, message):
    with pytest.raises(ValueError, match=message):
        next_token_probabilities(np.zeros((2, 3)), **keywords)


def test_an_empty_vocabulary():
    with pytest.raises(ValueError, match=r"next_token_probabilities: logits: got shape \(2, 0\), wanted V >= 1"):
        next_token_probabilities(np.zeros((2, 0)))
    with pytest.raises(ValueError, match=r"greedy: logits: got shape \(2, 0\), wanted V >= 1"):
        greedy(np.zeros((2, 0)))


def test_errors_of_samples():
    p = np.full((2, 2), 0.5)
    for number in (1.0, -0.1):
        with pytest.raises(ValueError, match=r"sample: uniform: got a number outside, wanted numbers in \[0, 1\)"):
            sample(p, np.asarray([0.5, number]))
    with pytest.raises(ValueError, match=r"sample: uniform: got shape \(1,\), wanted \(2,\)"):
        sample(p, np.asarray([0.5]))
    with pytest.raises(ValueError, match="sample: p: got a row without any probability"):
        sample(np.asarray([[0.5, 0.5], [0.0, 0.0]]), np.asarray([0.5, 0.5]))


def test_errors_of_generation():
    step, _ = script([-1, 3])
    for shape in ((1, 0), (1, 5), (3,)):
        with pytest.raises(ValueError, match=r"generate: prompt: got shape \(.*\), wanted \[B, T\], T from 1 to 4"):
            generate(step, np.zeros(shape, dtype=np.int64), max_length=4)
    for shape in ((0,), (3,), (1, 2)):
        with pytest.raises(ValueError, match=r"beam_search: prompt: got shape \(.*\), wanted \[T\], T from 1 to 2"):
            beam_search(step, np.zeros(shape, dtype=np.int64), beams=1, max_length=2)
    with pytest.raises(ValueError, match="beam_search: beams: got 0, wanted at least 1"):
        beam_search(step, np.asarray([0]), beams=0, max_length=4)
