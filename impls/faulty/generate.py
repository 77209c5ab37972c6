"""Wrong greedy generation: one correct implementation with one switch for each mistake.

The variant "correct" has every switch off, and "whole", which asks for the logits of all tokens again and again, is
as right. Each other variant differs from "correct" by the mistake that its Fault names and by nothing else.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veriformer.declarations import Capabilities, Fault

FRAMEWORK = "numpy"
_CALLS = itertools.count()


def _make(fault: str) -> Callable[..., NDArray]:
    def generate(model: Any, prompt: NDArray, *, max_length: int, end: int | None = None, pad: int = 0) -> NDArray:
        length = prompt.shape[1]
        if not 1 <= length <= max_length:
            raise ValueError(f"prompt: got {length} tokens, wanted 1 to {max_length}")
        if fault == "full_prompt_returned_itself" and length == max_length:
            return prompt
        ids = _continued(model, prompt, _limit(length, max_length, fault), (end, pad), fault)
        return _returned(ids, length, max_length, pad, fault)

    generate.__qualname__ = f"generate[{fault}]"
    return generate


def _limit(length: int, max_length: int, fault: str) -> int:
    """How many tokens the result has at most."""
    return {
        "one_token_short": max(max_length - 1, length),
        "one_token_more": max_length + 1,
        "limit_counts_new_tokens": length + max_length,
        "one_new_token_at_least": max(max_length, length + 1),
        "prompt_counts_twice": max(max_length - length, length),
    }.get(fault, max_length)


def _continued(model: Any, prompt: NDArray, limit: int, words: tuple[int | None, int], fault: str) -> NDArray:
    """The prompt with choices after it, until every row has ended."""
    (end, pad), length, ids, new, cache = words, prompt.shape[1], prompt.copy(), prompt, None
    ended = _ended_at_first(prompt, end, fault)
    for place in range(length, limit):
        logits, cache = _logits(model, ids, new, cache, pad, fault)
        chosen = _chosen(logits, ids, place, pad, fault)
        if fault == "end_forced_at_the_limit" and end is not None and place == limit - 1:
            chosen = np.full_like(chosen, end)
        before, ended = ended, _ended(ended, chosen, words, place - length, fault)
        token = _written(chosen, before, ended, words, fault)
        ids = np.concatenate([ids, token[:, None]], axis=1)
        new = prompt[:, -1:] if fault == "last_prompt_token_for_ever" else ids[:, -1:]
        if fault == "prompt_is_the_buffer":
            prompt[:] = ids[:, -length:]
        if fault == "cache_moves_without_tokens" and (ended != before).any():
            cache = model.reorder(cache, np.argsort(ended, kind="stable"))
        if _stops(ended, fault):
            break
    return ids


def _logits(model: Any, ids: NDArray, new: NDArray, cache: Any, pad: int, fault: str) -> tuple[NDArray, Any]:
    """What the model says after all tokens so far, and its cache."""
    if fault == "whole":
        return model.full(ids)[:, -1], None
    first = cache is None
    if fault == "cache_dropped":
        cache = None
    if fault == "prompt_fed_again":
        new = ids
    words = {"mask": ids != pad} if fault == "padding_in_the_prompt_hidden" and first else {}
    if fault == "last_token_of_the_prompt_alone" and first:
        new = new[:, -1:]
    if fault == "last_token_of_the_prompt_twice" and first:
        new = np.concatenate([new, new[:, -1:]], axis=1)
    logits, cache = model.step(new, cache, **words)
    return logits[:, 0 if fault == "logits_of_the_first_token" else -1], cache


def _chosen(logits: NDArray, ids: NDArray, place: int, pad: int, fault: str) -> NDArray:
    """The token of each row."""
    logits, rows = logits.copy(), np.arange(len(logits))
    if fault == "padding_never_chosen":
        logits[:, pad] = -np.inf
    if fault == "zero_never_chosen":
        logits[:, 0] = -np.inf
    if fault == "last_never_chosen":
        logits = logits[:, :-1] if logits.shape[1] > 1 else logits
    if fault == "no_token_twice_in_a_row":
        logits[rows, ids[:, -1]] = -np.inf
    if fault == "repeated_tokens_penalised":
        for row in rows:
            logits[row, np.unique(ids[row])] -= 1.5
    if fault == "samples":
        logits = logits + np.random.default_rng([next(_CALLS), place]).gumbel(size=logits.shape)
    if fault == "choice_among_all_rows":
        return np.full(len(rows), logits.argmax() % logits.shape[1])
    if fault == "second_likeliest":
        return np.argsort(-logits, axis=-1, kind="stable")[:, min(1, logits.shape[1] - 1)]
    chosen = np.abs(logits).argmax(-1) if fault == "largest_size" else logits.argmax(-1)
    chosen = logits.argmin(-1) if fault == "least_likely" else chosen
    return np.full_like(chosen, chosen[0]) if fault == "tokens_of_row_0_for_all" else chosen


def _ended_at_first(prompt: NDArray, end: int | None, fault: str) -> NDArray:
    """Which rows have ended before anything is chosen: none."""
    none = np.zeros(len(prompt), bool)
    if end is None:
        return none
    if fault == "end_in_the_prompt_counts":
        return (prompt == end).any(1)
    return prompt[:, -1] == end if fault == "end_last_in_the_prompt_counts" else none


def _ended(ended: NDArray, chosen: NDArray, words: tuple[int | None, int], step: int, fault: str) -> NDArray:
    """Which rows have ended, now that these tokens were chosen."""
    end, pad = words
    if fault == "padding_ends":
        ended = ended | (chosen == pad)
    if end is None or fault == "first_end_ignored" and step == 0:
        return ended
    if fault == "end_of_the_latest_choice_alone":
        return chosen == end
    return ended | (chosen == end)


def _written(chosen: NDArray, before: NDArray, ended: NDArray, words: tuple[int | None, int], fault: str) -> NDArray:
    """The next token of each row: its choice, or padding where it had ended before."""
    end, pad = words
    filler = {"pads_with_end": pad if end is None else end, "pads_with_zero": 0}.get(fault, pad)
    over = {"goes_on_after_end": np.zeros_like(ended), "end_replaced_by_padding": ended}.get(fault, before)
    return np.where(over, filler, chosen)


def _stops(ended: NDArray, fault: str) -> bool:
    """Whether no row goes on."""
    if fault == "stops_with_the_first_end":
        return bool(ended.any())
    return bool(ended[0]) if fault == "stops_with_row_0" else bool(ended.all())


def _returned(ids: NDArray, length: int, max_length: int, pad: int, fault: str) -> NDArray:
    if fault == "new_tokens_alone":
        return ids[:, length:]
    if fault == "padding_in_front":
        rest = max_length - ids.shape[1]
        return np.pad(ids, ((0, 0), (rest, 0)), constant_values=pad)
    return ids.astype(np.int32) if fault == "short_integers" else ids


_TABLE: dict[str, dict[str, tuple[str, str]]] = {
    "begins-with-the-prompt": {
        "new_tokens_alone": ("mutation: the prompt cut off", "only what was chosen is returned"),
        "padding_in_front": ("mutation: rows aligned at the right", "short results are filled up in front"),
    },
    "full-prompt-comes-back": {
        "one_new_token_at_least": ("mutation: a loop that runs once at least", "one token past max_length"),
        "limit_counts_new_tokens": ("mutation: max_new_tokens", "max_length does not count the prompt"),
        "one_token_more": ("mutation: <= for <", "one token past max_length"),
    },
    "longer-limit-only-adds": {
        "one_token_short": ("mutation: the loop ends a token early", "the last token is missing"),
        "prompt_counts_twice": ("mutation: the prompt's length taken off the limit", "max_length - T tokens"),
        "end_forced_at_the_limit": ("mutation: forced_eos_token_id", "the last token is always the end"),
    },
    "each-token-is-the-likeliest": {
        "logits_of_the_first_token": ("mutation: logits[:, 0] for logits[:, -1]", "a prompt's first token decides"),
        "last_token_of_the_prompt_alone": ("mutation: the prompt not given to the model", "only its last token is"),
        "last_token_of_the_prompt_twice": ("mutation: prefill and first step overlap", "its last token is fed twice"),
        "last_prompt_token_for_ever": ("mutation: what was chosen is not fed", "the prompt's last token is, each time"),
        "prompt_fed_again": ("mutation: all tokens and a cache", "every step feeds all tokens so far"),
        "least_likely": ("mutation: argmin", "the smallest logit wins"),
        "second_likeliest": ("mutation: an index off by one in the sorted logits", "the second choice is taken"),
        "largest_size": ("mutation: |logit|", "a large negative logit wins"),
        "no_token_twice_in_a_row": ("mutation: no_repeat_ngram_size=1", "the latest token is never chosen"),
        "repeated_tokens_penalised": ("mutation: a penalty left on", "tokens so far lose 1.5 of their logits"),
        "padding_never_chosen": ("mutation: padding taken out of the vocabulary", "pad is never chosen"),
    },
    "goes-on-from-its-own-result": {
        "cache_dropped": ("mutation: the cache not passed on", "after the prompt only the latest token counts"),
    },
    "only-pad-after-end": {
        "goes_on_after_end": ("ParlAI#2058", "a row that has ended gets choices on and on"),
        "pads_with_end": ("mutation: pad_token_id = eos_token_id", "the end stands where padding is due"),
        "pads_with_zero": ("mutation: a fixed padding", "0 stands where padding is due"),
        "end_of_the_latest_choice_alone": ("mutation: the rows that have ended are not remembered", "rows rise again"),
    },
    "end-only-cuts": {
        "end_replaced_by_padding": ("mutation: the end not written", "padding stands where the end is due"),
        "first_end_ignored": ("vllm PR#46243", "an end at the first step does not end"),
    },
    "end-in-the-prompt-does-not-end": {
        "end_in_the_prompt_counts": ("mutation: all of the row searched for the end", "such rows get padding at once"),
        "end_last_in_the_prompt_counts": ("mutation: the loop's condition before its body", "they get padding at once"),
    },
    "pad-is-no-choice": {
        "padding_ends": ("mutation: end or pad", "a row ends with the padding's token, too"),
        "padding_in_the_prompt_hidden": ("mutation: attention_mask = ids != pad", "such tokens are masked"),
    },
    "row-alone-is-the-row-in-its-batch": {
        "tokens_of_row_0_for_all": ("mutation: one choice for the batch", "every row gets row 0's token"),
        "choice_among_all_rows": ("mutation: argmax of the flat logits", "every row gets the batch's likeliest token"),
        "stops_with_the_first_end": ("mutation: any for all", "one row's end ends the batch"),
        "stops_with_row_0": ("mutation: ended[0]", "row 0's end ends the batch"),
        "cache_moves_without_tokens": ("mutation: ended rows sorted behind, in the cache alone", "rows change caches"),
    },
    "tokens-may-be-renamed": {
        "zero_never_chosen": ("mutation: token 0 taken for padding", "token 0 is never chosen"),
        "last_never_chosen": ("tt-metal#52928", "the last token of the vocabulary is never chosen"),
    },
    "repeats-itself": {
        "samples": ("mutation: do_sample left on", "a token is drawn by its probability"),
    },
    "keeps-the-dtype": {
        "short_integers": ("mutation: token numbers in int32", "ids are int32"),
    },
    "leaves-inputs-untouched": {
        "prompt_is_the_buffer": ("mutation: a rolling buffer", "the prompt is overwritten with the latest tokens"),
    },
    "returns-its-own-memory": {
        "full_prompt_returned_itself": ("mutation: an early return", "with nothing to do the prompt itself comes back"),
    },
}
FAULTS = {
    variant: Fault("generate", f"generate/{law}", source, summary)
    for law, variants in _TABLE.items()
    for variant, (source, summary) in variants.items()
}
VARIANTS: dict[str, dict[str, Callable[..., Any]]] = {
    variant: {"generate": _make(variant)} for variant in ("correct", "whole", *FAULTS)
}
CAPABILITIES = {"generate": Capabilities()}
