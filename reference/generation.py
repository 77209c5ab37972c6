"""From logits to text: probabilities of the next token, a choice among them, one token after another.

Conventions:
- A model is a function step(tokens[B,m], cache) -> (logits[B,m,V], cache) whose cache is None at first, such
  as `decoder_lm_step` or `transformer_step` with the other arguments filled in.
- The prompt holds the start token, or more; an end token in it does not count.
- Of equal choices the smallest token number is taken.
"""

from __future__ import annotations

import math
from typing import Any

from array_api_compat import array_namespace, device

from veriformer.reference.decoding import reorder
from veriformer.reference.softmax import log_softmax, softmax


def next_token_probabilities(
    logits: Any,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    order: str = "temperature_first",
    exactly_k: bool = False,
) -> Any:
    """Softmax over the tokens that top-k and then top-p leave.

    logits[…,V] -> p[…,V].

        p = softmax(logits / T)
        top_k: only the k largest stay, and those equal to the last of them, or of these the first (exactly_k)
        top_p: of these only the most probable stay, the fewest whose mass is >= top_p, at least one

    What stays is renormalised. order = "temperature_last": top_p counts the mass at T = 1.
    Source: temperature: `softmax`; top-k: Fan, Lewis, Dauphin 2018 (Hierarchical Neural Story Generation),
    section 5; top-p: Holtzman et al. 2019 (The Curious Case of Neural Text Degeneration), section 3.1; P117, P118.
    Edges: T = 0 is the limit; top_k >= V and top_p = 1 change nothing; -inf is never chosen.
    Raises ValueError for an empty vocabulary, temperature < 0, top_k < 1, top_p outside [0, 1], another order.
    """
    xp, size = array_namespace(logits), logits.shape[-1]
    if size == 0:
        raise ValueError(f"next_token_probabilities: logits: got shape {tuple(logits.shape)}, wanted V >= 1")
    if top_k is not None and top_k < 1:
        raise ValueError(f"next_token_probabilities: top_k: got {top_k}, wanted at least 1, or None")
    if top_p is not None and not 0 <= top_p <= 1:
        raise ValueError(f"next_token_probabilities: top_p: got {top_p}, wanted a number from 0 to 1, or None")
    if order not in ("temperature_first", "temperature_last"):
        raise ValueError(f"next_token_probabilities: order: got {order!r}, wanted temperature_first or …_last")
    if top_k is not None and top_k < size:
        least = xp.sort(logits, axis=-1, descending=True)[..., top_k - 1 : top_k]
        goes = _rank(logits) >= top_k if exactly_k else logits < least
        logits = xp.where(goes, -math.inf, logits)
    if top_p is not None and top_p < 1:
        p = softmax(logits, temperature=temperature if order == "temperature_first" else 1.0)
        logits = xp.where(_nucleus(p, top_p), logits, -math.inf)
    return softmax(logits, temperature=temperature)


def sample(p: Any, uniform: Any) -> Any:
    """The token that a number from [0, 1) picks.

    p[…,V], uniform[…] -> tokens[…].

        smallest i with p_0 + … + p_i > uniform      (relative to the sum of all, which may miss 1 by roundings)

    Source: inversion of the distribution function: Devroye 1986 (Non-Uniform Random Variate Generation),
    section III.2.1; P123.
    Edges: a token of probability 0 is never picked.
    Raises ValueError for numbers outside [0, 1), one not given for each row, or a row of zeros.
    """
    xp = array_namespace(p)
    if tuple(uniform.shape) != tuple(p.shape[:-1]):
        raise ValueError(f"sample: uniform: got shape {tuple(uniform.shape)}, wanted {tuple(p.shape[:-1])}")
    if bool(xp.any((uniform < 0) | (uniform >= 1))):
        raise ValueError("sample: uniform: got a number outside, wanted numbers in [0, 1)")
    cumulative = xp.cumulative_sum(p, axis=-1)
    if not bool(xp.all(cumulative[..., -1] > 0)):
        raise ValueError("sample: p: got a row without any probability, wanted rows that sum to 1")
    passed = cumulative <= uniform[..., None] * cumulative[..., -1:]
    return xp.sum(xp.astype(passed, xp.int64), axis=-1)


def greedy(logits: Any, n: int = 0) -> Any:
    """The token of the largest logit, the first of several; logits[…,V] -> tokens[…], whatever n is."""
    xp, size = array_namespace(logits), logits.shape[-1]
    if size == 0:
        raise ValueError(f"greedy: logits: got shape {tuple(logits.shape)}, wanted V >= 1")
    largest = logits == xp.max(logits, axis=-1, keepdims=True)
    return xp.min(xp.where(largest, xp.arange(size, device=device(logits)), size), axis=-1)


def generate(
    step: Any, prompt: Any, *, max_length: int, end: int | None = None, pad: int = 0, choose: Any = greedy
) -> Any:
    """The prompt, continued token by token until every row has ended.

    step: the model, prompt[B,T], T >= 1 -> tokens[B, <= max_length].

        x_n = choose(logits after x_0 … x_(n-1), n)

    choose(logits[B,V], n) -> tokens[B]; sampling is
    `lambda logits, n: sample(next_token_probabilities(logits, …), uniform[:, n])`.
    A row that has got its `end` is filled up with `pad`; it changes nothing in the others.
    Source: Vaswani et al. 2017 (Attention Is All You Need), section 3 (auto-regressive); P116, P119 to P121.
    Edges: max_length counts the prompt; equal to T, it gives the prompt.
    Raises ValueError for an empty prompt or one longer than max_length.
    """
    if prompt.ndim != 2 or not 1 <= prompt.shape[1] <= max_length:
        raise ValueError(f"generate: prompt: got shape {tuple(prompt.shape)}, wanted [B, T], T from 1 to {max_length}")
    xp, tokens, new, cache = array_namespace(prompt), prompt, prompt, None
    ended = prompt[:, 0] != prompt[:, 0]
    while tokens.shape[1] < max_length and not bool(xp.all(ended)):
        logits, cache = step(new, cache)
        chosen = xp.where(ended, pad, xp.astype(choose(logits[:, -1, :], tokens.shape[1]), prompt.dtype))
        if end is not None:
            ended = ended | (chosen == end)
        new = chosen[:, None]
        tokens = xp.concat([tokens, new], axis=1)
    return tokens


def beam_search(
    step: Any, prompt: Any, *, beams: int, max_length: int, end: int | None = None, length_penalty: float = 0.0
) -> list[tuple[list[int], float]]:
    """The best continuations of one prompt that can be found by keeping `beams` of them at a time.

    step: the model, prompt[T], T >= 1 -> (tokens after the prompt, score) of each, best first.

        score(y) = log p(y | prompt) / ((5 + |y|) / 6)^length_penalty

    Each round, every sequence is continued by every token; of the results, and of the sequences that have
    ended, the `beams` of the highest score stay.
    Source: Meister, Vieira, Cotterell 2020 (Best-First Beam Search), algorithm 1; score: Wu et al. 2016
    (Google's Neural Machine Translation System), section 7.
    Edges: one beam is greedy; beams >= V^rounds find the best of all sequences.
    Raises ValueError for beams < 1, and for prompts as `generate` does.
    """
    if beams < 1:
        raise ValueError(f"beam_search: beams: got {beams}, wanted at least 1")
    if prompt.ndim != 1 or not 1 <= prompt.shape[0] <= max_length:
        raise ValueError(f"beam_search: prompt: got shape {tuple(prompt.shape)}, wanted [T], T from 1 to {max_length}")

    xp, new, cache, best = array_namespace(prompt), prompt[None, :], None, [([], 0.0, 0)]
    for _ in range(max_length - prompt.shape[0]):
        logits, cache = step(new, cache)
        best = _continued(best, log_softmax(logits[:, -1, :]), end)
        best = sorted(best, key=lambda beam: _score(beam, length_penalty), reverse=True)[:beams]
        going = [(tokens[-1], row) for tokens, _, row in best if row is not None]
        if not going:
            break
        new = xp.asarray([[token] for token, _ in going], dtype=prompt.dtype, device=device(prompt))
        cache = reorder(cache, xp.asarray([row for _, row in going], device=device(prompt)))
    return [(beam[0], _score(beam, length_penalty)) for beam in best]


def _continued(beams: list[Any], log_p: Any, end: int | None) -> list[Any]:
    """Beams (tokens, log p, row of log_p[rows,V] or None if ended), those with a row continued by every token."""
    out, going = [], 0
    for tokens, total, row in beams:
        if row is None:
            out.append((tokens, total, None))
            continue
        for token, gain in enumerate(float(log_p[going, i]) for i in range(log_p.shape[1])):
            if gain > -math.inf:
                out.append(([*tokens, token], total + gain, None if token == end else going))
        going += 1
    return out


def _score(beam: Any, length_penalty: float) -> float:
    """The log probability of a beam, made up for its length."""
    return beam[1] / ((5 + len(beam[0])) / 6) ** length_penalty


def _nucleus(p: Any, mass: float) -> Any:
    """Which tokens of p[…,V] are among the fewest most probable ones that together have the mass."""
    xp = array_namespace(p)
    falling = xp.sort(p, axis=-1, descending=True)
    before = xp.cumulative_sum(falling, axis=-1, include_initial=True)[..., :-1]
    needed = xp.sum(xp.astype((before == 0) | (before < mass), xp.int64), axis=-1, keepdims=True)
    return _rank(p) < needed


def _rank(x: Any) -> Any:
    """How many entries of x[…,V] come before each if the largest comes first; of equal ones the first does."""
    xp = array_namespace(x)
    return xp.argsort(xp.argsort(x, axis=-1, descending=True, stable=True), axis=-1)
