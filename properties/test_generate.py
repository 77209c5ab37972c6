"""Greedy generation: the likeliest token again and again, an end that ends its own row, padding that means nothing."""

from __future__ import annotations

import numpy as np

from veriformer.case import Case
from veriformer.expect import expect, expect_same
from veriformer.law import law
from veriformer.properties.attention_cases import PICKS
from veriformer.properties.generate_cases import TABLE, generate_cases, logits_of
from veriformer.properties.measured import Measured, expect_equal, measure
from veriformer.subject import Subject

ENDED = ("later", "first")
"""Kinds of ends that some row reaches."""


def faults(*names: str) -> tuple[str, ...]:
    """Variants of impls/faulty/generate.py."""
    return tuple(f"generate.py:{name}" for name in names)


@law(
    "generate",
    case=generate_cases(),
    kind="contract",
    relative=False,
    source="P119",
    kills=faults("new_tokens_alone", "padding_in_front"),
)
def begins_with_the_prompt(generate: Subject, case: Case) -> None:
    """The result begins with the prompt, whatever tokens it holds."""
    expect_same(generate(case)[:, : length_of(case)], case["prompt"])


@law(
    "generate",
    case=generate_cases(),
    kind="contract",
    relative=False,
    source="P119, R78",
    kills=faults("one_new_token_at_least", "one_token_more", "limit_counts_new_tokens"),
)
def full_prompt_comes_back(generate: Subject, case: Case) -> None:
    """A prompt as long as max_length is the result."""
    expect_same(generate(case.with_keywords(max_length=length_of(case))), case["prompt"])


@law(
    "generate",
    case=generate_cases(least=1),
    relative=False,
    source="P116",
    kills=faults(
        "logits_of_the_first_token",
        "last_token_of_the_prompt_alone",
        "last_token_of_the_prompt_twice",
        "last_prompt_token_for_ever",
        "prompt_fed_again",
        "least_likely",
        "second_likeliest",
        "largest_size",
        "no_token_twice_in_a_row",
        "repeated_tokens_penalised",
    ),
)
def each_token_is_the_likeliest(generate: Subject, case: Case) -> None:
    """Every token after the prompt, up to a row's end, has the largest of the logits after all tokens before it."""
    ids, start, table = generate(case), length_of(case), case[TABLE]
    free = ~after_end(ids, case)[:, start:]
    known = (ids == np.round(ids)) & (ids >= 0) & (ids < len(table))
    expect(bool(known[:, start:][free].all()), "token", f"a token outside the vocabulary of {len(table)} was chosen")
    tokens = np.where(known, ids, 0).astype(int)
    logits = logits_of(table, tokens[:, :-1])[:, start - 1 :]
    chosen = np.take_along_axis(logits, tokens[:, start:, None], -1)[..., 0]
    said = "the logit of the chosen token is"
    expect_same(np.where(free, chosen, 0), np.where(free, logits.max(-1), 0), what=said)


@law(
    "generate",
    case=generate_cases(ends=ENDED, least=1),
    needs={"end"},
    kind="contract",
    relative=False,
    source="P119",
    kills=faults("goes_on_after_end", "pads_with_end", "pads_with_zero", "end_of_the_latest_choice_alone"),
)
def only_pad_after_end(generate: Subject, case: Case) -> None:
    """After the first end behind the prompt a row holds nothing but pad."""
    ids = generate(case)
    rest = ids[after_end(ids, case)]
    expect_same(rest, np.full(rest.shape, case["pad"]), what="after the end stands")


@law(
    "generate",
    case=generate_cases(ends=("first", "later", "prompt"), least=1),
    needs={"end"},
    source="P119, R76",
    kills=faults("end_replaced_by_padding", "first_end_ignored", "stops_with_the_first_end"),
)
def end_only_cuts(generate: Subject, case: Case) -> None:
    """With an end every row is what it is without one, up to its first end behind the prompt, then pad."""
    ids, whole = measure(generate, case), measure(generate, case.with_keywords(end=None))
    after = after_end(whole.value, case)
    wanted = Measured(np.where(after, case["pad"], whole.value), np.where(after, 0, whole.allowed))
    expect_equal(ids, wanted)


@law(
    "generate",
    case=generate_cases(ends=("prompt",), least=1),
    needs={"end"},
    source="semantics of generate",
    kills=faults("end_in_the_prompt_counts", "end_last_in_the_prompt_counts"),
)
def end_in_the_prompt_does_not_end(generate: Subject, case: Case) -> None:
    """A row whose prompt holds the end goes on as if there were no end, for a token at least."""
    place = length_of(case)
    with_end, without = (measure(generate, one) for one in (case, case.with_keywords(end=None)))
    expect_equal(with_end[:, place], without[:, place])


@law(
    "generate",
    case=generate_cases(least=1),
    pick=PICKS,
    needs={"pad"},
    source="P119, R77",
    kills=faults("padding_ends", "padding_never_chosen", "padding_in_the_prompt_hidden"),
)
def pad_is_no_choice(generate: Subject, case: Case, pick: int) -> None:
    """Another padding, be it a token that is chosen too, leaves all but what stands after ends as it is."""
    size = len(case[TABLE])
    ids, again = (measure(generate, one) for one in (case, case.with_keywords(pad=(case["pad"] + 1 + pick) % size)))
    padded = after_end(ids.value, case)
    expect_equal(again.rearranged(lambda a: np.where(padded, 0, a)), ids.rearranged(lambda a: np.where(padded, 0, a)))


@law(
    "generate",
    case=generate_cases(ends=("later", "first", "none"), rows=2, least=1),
    source="P120, R76",
    kills=faults(
        "tokens_of_row_0_for_all",
        "choice_among_all_rows",
        "stops_with_the_first_end",
        "stops_with_row_0",
        "cache_moves_without_tokens",
    ),
)
def row_alone_is_the_row_in_its_batch(generate: Subject, case: Case) -> None:
    """A prompt alone gives what it gives among others, whether these have ended or not."""
    among = measure(generate, case)
    for row in range(len(case["prompt"])):
        alone = case.with_arrays(prompt=case["prompt"][row : row + 1])
        expect_equal(measure(generate, alone), among[row : row + 1], what=f"row {row} alone:")


@law(
    "generate",
    case=generate_cases(least=2),
    pick=PICKS,
    source="R78",
    kills=faults("one_token_short", "prompt_counts_twice", "end_forced_at_the_limit"),
)
def longer_limit_only_adds(generate: Subject, case: Case, pick: int) -> None:
    """A smaller max_length gives the first tokens of what the larger one gives."""
    limit = limit_of(case, pick)
    short, long = (measure(generate, one) for one in (case.with_keywords(max_length=limit), case))
    expect_equal(short, long[:, :limit])


@law(
    "generate",
    case=generate_cases(ends=("none",), least=2),
    pick=PICKS,
    source="P121",
    kills=faults("cache_dropped", "last_prompt_token_for_ever"),
)
def goes_on_from_its_own_result(generate: Subject, case: Case, pick: int) -> None:
    """Without an end, a result given as the prompt is continued as it would have been at once."""
    first = generate(case.with_keywords(max_length=limit_of(case, pick)))
    expect_equal(measure(generate, case.with_arrays(prompt=first.astype(int))), measure(generate, case))


@law(
    "generate",
    case=generate_cases(),
    pick=PICKS,
    source="R77",
    kills=faults("zero_never_chosen", "last_never_chosen", "pads_with_zero"),
)
def tokens_may_be_renamed(generate: Subject, case: Case, pick: int) -> None:
    """Other numbers for the tokens, in the model, the prompt, end and pad, give the same tokens under these numbers."""
    table, ids = case[TABLE], measure(generate, case)
    names = case.random(pick).permutation(len(table))
    if not generate.domain.provides("pad"):  # 0 stays what fills up
        names = np.concatenate([[0], 1 + case.random(pick).permutation(len(table) - 1)])
    old = np.argsort(names)
    renamed = case.with_arrays(**{"prompt": names[case["prompt"]], TABLE: table[old][:, old]})
    words = {word: int(names[case[word]]) for word in ("end", "pad") if case[word] is not None}
    known = (ids.value >= 0) & (ids.value < len(table))
    wanted = np.where(known, names[np.where(known, ids.value, 0).astype(int)], ids.value)
    expect_equal(measure(generate, renamed.with_keywords(**words)), Measured(wanted, ids.allowed))


def length_of(case: Case) -> int:
    """The length of the prompt."""
    return int(case["prompt"].shape[1])


def limit_of(case: Case, pick: int) -> int:
    """A max_length below the case's that leaves room for a token."""
    length = length_of(case)
    return length + 1 + pick % max(case["max_length"] - length - 1, 1)


def after_end(ids: np.ndarray, case: Case) -> np.ndarray:
    """Which places come after the first end behind the prompt."""
    ends = (ids == case["end"]) & (np.arange(ids.shape[1]) >= length_of(case))
    return np.cumsum(ends, axis=1) - ends > 0
