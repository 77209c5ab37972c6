"""Cases of generation and of encoder-decoders are what they promise; ties and results cut short are judged fairly."""

from __future__ import annotations

import numpy as np
import pytest
from toys import faulty, implementation, judged

from veriformer.case import Case
from veriformer.law import Domain
from veriformer.oracle import bounds, open_choices
from veriformer.properties.encoder_decoder_cases import encoder_decoder_cases, padding
from veriformer.properties.generate_cases import ENDS, GAP, PADS, SIZES, TABLE, generate_case
from veriformer.subject import Subject


def generate(model, prompt, *, max_length, end=None, pad=0):  # type: ignore[no-untyped-def]
    """Correct, asking for the whole each time; stops as soon as every row has ended."""
    ids, ended = prompt.copy(), np.zeros(len(prompt), bool)
    while ids.shape[1] < max_length and not ended.all():
        chosen = model.full(ids)[:, -1].argmax(-1)
        ids = np.concatenate([ids, np.where(ended, pad, chosen)[:, None]], axis=1)
        ended = ended | (chosen == end if end is not None else False)
    return ids


def domain(**functions) -> Domain:  # type: ignore[no-untyped-def]
    ((name, _),) = functions.items()
    return implementation(**functions).domain(name, "float32")


def gaps(case: Case) -> np.ndarray:
    """Largest less second largest logit at every choice, by scalar loops, as if there were no end."""
    found = []
    for row in case["prompt"].tolist():
        while len(row) < case["max_length"]:
            logits = [sum(column[x] / 2 ** (len(row) - 1 - i) for i, x in enumerate(row)) for column in case[TABLE].T]
            second, first = sorted(logits)[-2:]
            found.append(first - second)
            row = [*row, int(np.argmax(logits))]
    return np.array(found)


@pytest.mark.parametrize("end", ENDS)
def test_no_choice_is_close_whatever_the_end(end: str) -> None:
    able = domain(generate=generate)
    for i, row in enumerate(SIZES):
        case = generate_case(able, row, end, PADS[i % 4], 100 + i)
        assert (gaps(case) >= GAP).all() and not open_choices(case).any(), case.describe()


def test_ends_are_of_the_kind_that_is_asked_for() -> None:
    able, row = domain(generate=generate), (2, 3, 5, 3)
    for seed in range(20):
        first, later = (generate_case(able, row, kind, "zero", seed) for kind in ("first", "later"))
        subject = Subject(implementation(generate=generate), "generate", "float32")
        assert subject(first)[0, 3] == first["end"]
        ends = subject(later)[:, 3:] == later["end"]
        assert ends.any() and len({tuple(places) for places in ends.tolist()}) == 2
        inside = generate_case(able, row, "prompt", "zero", seed)
        assert inside["prompt"][0, -1] == inside["end"]


def test_what_follows_a_tie_is_undetermined_in_its_row_alone() -> None:
    arrays = {"prompt": [[0, 1], [1, 1]], TABLE: [[1.0, 0.0], [2.0, 2.0]]}
    case = Case("generate", {name: np.array(array) for name, array in arrays.items()}, {"max_length": 4, "end": 1})
    subject = Subject(implementation(generate=generate), "generate", "float32")
    (bound,) = bounds(case, subject.capabilities, subject.precision)
    assert np.array_equal(bound.allowed, [[0, 0, 0, 0], [0, 0, np.inf, np.inf]])


def test_a_result_that_ends_early_is_filled_for_the_law_and_on_record() -> None:
    def with_another_pad(model, prompt, *, max_length, end=None, pad=0):  # type: ignore[no-untyped-def]
        return generate(model, prompt, max_length=max_length, end=end, pad=1 - min(pad, 1))

    row = judged("generate/only-pad-after-end", generate=with_another_pad)
    assert row.verdict == "fail" and row.failure is not None
    (call,) = row.failure.calls
    assert call.outcome.results[0].shape[1] == call.case["max_length"]


def test_padding_hides_something_and_leaves_every_row_a_token() -> None:
    for seed in range(60):
        for trailing in (True, False):
            mask = padding((1 + seed % 3, 2 + seed % 4), seed, trailing)
            assert mask.any(1).all() and not mask.all()
            assert not trailing or (mask[:, 1:] <= mask[:, :-1]).all()


def test_sources_are_masked_only_where_that_can_be_said() -> None:
    class Bare:
        vocabulary = 3

        def full(self, source, target):  # type: ignore[no-untyped-def]
            return np.zeros((*target.shape, 3))

        def encode(self, source):  # type: ignore[no-untyped-def]
            return source

        def step(self, tokens, memory, cache):  # type: ignore[no-untyped-def]
            return np.zeros((*tokens.shape, 3)), None

    able = implementation(encoder_decoder=Bare()).domain("encoder_decoder", "float64")
    assert all(case["mask"] is None for case in encoder_decoder_cases(masked=True).examples(able))
    able = faulty("encoder_decoder")["correct"].domain("encoder_decoder", "float64")
    assert all(case["mask"] is not None for case in encoder_decoder_cases(masked=True).examples(able))
