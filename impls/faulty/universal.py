"""Wrong Universal Transformers: signals, layer, sight and number of steps; halting is right (`universal_halting`).

One correct implementation with one switch for each mistake. The variant "correct" has every switch off; each other
one differs from it by the mistake that its Fault names and by nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veriformer.declarations import Capabilities, Fault

FRAMEWORK = "numpy"
Params = Mapping[str, Any]
Results = tuple[NDArray, NDArray, NDArray]


@dataclass(frozen=True)
class _How:
    """What a step needs beside the state, and the mistake that the call makes."""

    fault: str
    w: Params
    heads: int
    norm: str
    real: NDArray
    sight: NDArray
    memory: NDArray | None
    rows: NDArray


def _make(fault: str) -> Callable[..., Results]:
    def universal_transformer(
        x: NDArray, params: Params, *, heads: int, norm: str = "post", mask: NDArray | None = None,
        causal: bool = False, memory: NDArray | None = None, memory_mask: NDArray | None = None, max_steps: int,
        epsilon: float = 0.01,
    ) -> Results:  # fmt: skip
        real = np.ones(x.shape[:2], bool) if mask is None else mask
        if fault == "padding_of_the_first_sequence":
            real = np.broadcast_to(real[:1], real.shape)
        seen = None if memory is None else _wide(memory)
        if fault == "last_of_memory_dropped" and seen is not None and seen.shape[1] > 1:
            seen, memory_mask = seen[:, :-1], None if memory_mask is None else memory_mask[:, :-1]
        rows = np.ones((1, 1), bool) if memory_mask is None or fault == "memory_mask_ignored" else memory_mask
        rows = rows[:1] if fault == "memory_mask_of_the_first_sequence" else rows
        if fault == "memory_of_the_first_sequence" and seen is not None:
            seen = np.broadcast_to(seen[:1], seen.shape)
        sight = _sight(x.shape[1], real, causal, memory is not None, fault)
        rows = rows[:, None, :]
        if fault == "cross_causal" and seen is not None:
            rows = rows & np.tri(x.shape[1], seen.shape[1], dtype=bool)
        how = _How(fault, _widened(params), heads, norm, real, sight, seen, rows)
        steps = {"one_step_too_many": max_steps + 1, "one_step_too_few": max(max_steps - 1, 1)}.get(fault, max_steps)
        with np.errstate(all="ignore"):
            output, n, remainder = _thought(_tokens(x, real, fault), how, steps, epsilon)
        return output.astype(x.dtype), n, remainder.astype(x.dtype)

    universal_transformer.__qualname__ = f"universal_transformer[{fault}]"
    return universal_transformer


def _tokens(x: NDArray, real: NDArray, fault: str) -> NDArray:
    if fault == "padding_multiplied_by_zero":
        return _wide(x) * real[..., None]
    if fault == "padding_read":
        return _wide(x)
    return np.where(real[..., None], _wide(x), 0)


def _sight(length: int, real: NDArray, causal: bool, cross: bool, fault: str) -> NDArray:
    """[B,T,T]: may token i see token j."""
    padded = np.ones_like(real) if fault in ("padding_attended", "padding_read") else real
    sight = np.broadcast_to(padded[:, None, :], (len(real), length, length))
    told = (causal and fault != "causal_ignored") or cross or fault == "always_causal"
    if cross and fault == "decoder_sees_the_future":
        told = False
    order = np.tri(length, dtype=bool)
    if fault == "causal_plus_one":
        order = np.tri(length, k=1, dtype=bool)
    if fault == "causal_strict":
        order = np.tri(length, k=-1, dtype=bool) | (np.arange(length) + np.arange(length)[:, None] == 0)
    return sight & order if told else sight


def _thought(x: NDArray, how: _How, max_steps: int, epsilon: float) -> Results:
    """Step after step; p of a halted position is 0."""
    fault, real = how.fault, how.real
    u, output = x, np.zeros_like(x)
    running = np.ones_like(real) if fault in ("padding_reported", "padding_counted") else real.copy()
    steps, used, remainder = np.zeros(real.shape, np.int64), np.zeros_like(x[..., 0]), np.zeros_like(x[..., 0])
    for n in range(1, max_steps + 1):
        s = _layer(_signalled(u, n, fault), u, how, n)
        y = (s @ how.w["halt"]["w"])[..., 0] + how.w["halt"].get("b", 0)
        h = 1 / (1 + np.exp(-np.clip(y, -80, 80)))
        total = used + h
        stops = running & ((total >= np.asarray(1 - epsilon, x.dtype)) | (n == max_steps))
        p = np.where(stops, 1 - used, np.where(running, h, 0))
        remainder = np.where(stops, 1 - used, remainder)
        output = output + np.where(running[..., None], p[..., None] * s, 0)
        used, steps = used + np.where(running, h, 0), steps + running
        u = np.where(running[..., None], s, u)
        running = running & ~stops
    return _returned(output, steps, remainder, how)


def _returned(output: NDArray, steps: NDArray, remainder: NDArray, how: _How) -> Results:
    fault, real = how.fault, how.real[..., None]
    if fault == "normed_at_the_end":
        output = np.where(real, _normed(output, how.w["layer"]["norm2"]), 0)
    if fault == "padding_keeps_its_tokens":
        output = np.where(real, output, np.ones_like(output))
    if fault == "padding_counted":  # the output alone is right
        return np.where(real, output, 0), steps, remainder
    return output, steps, remainder


def _signalled(u: NDArray, n: int, fault: str) -> NDArray:
    """The state plus the sinusoids of position and step."""
    channel, start = np.arange(u.shape[2]), 1 if fault == "positions_from_one" else 0
    rate = 10000.0 ** (-(channel - channel % 2) / u.shape[2])
    if fault == "frequencies_of_half_the_width":
        rate = rate**2
    places = np.arange(u.shape[1])[:, None] + start
    waves = []
    for at in (places, np.asarray(n - 1 if fault == "steps_from_zero" else n)):
        wave = np.where(channel % 2 == 0, np.sin(at * rate), np.cos(at * rate))
        if fault == "sines_before_cosines":
            wave = np.concatenate([wave[..., 0::2], wave[..., 1::2]], -1)
        waves.append(wave.astype(u.dtype))
    position, step = waves
    if fault == "positions_missing" or (fault == "positions_at_the_input_alone" and n > 1):
        position = position * 0
    if fault == "steps_missing" or (fault == "step_added_once" and n > 1):
        step = step * 0
    if fault == "step_added_to_the_first_position":
        step = np.where(places == start, step, 0)
    if fault == "signals_in_the_first_step_alone" and n > 1:
        return u
    return u + (position * step if fault == "signals_multiplied" else position + step)


def _layer(z: NDArray, before: NDArray, how: _How, n: int) -> NDArray:
    """One layer on z; before is the state without signals."""
    w, fault = how.w["layer"], how.fault
    sublayers: list[Callable[[NDArray], NDArray]] = [
        lambda s: _attention(s, s, w["attention"], how.heads, how.sight, fault)
    ]
    if how.memory is not None:
        memory = how.memory * 0 if fault == "memory_in_the_first_step_alone" and n > 1 else how.memory
        sublayers.append(lambda s: _attention(s, memory, w["cross_attention"], how.heads, how.rows, fault))
    sublayers.append(lambda s: _feed_forward(s, w["feed_forward"], fault))
    x = z
    for number, sublayer in enumerate(sublayers, 1):
        scale = w["norm1" if fault == "first_norm_in_later_steps" and n > 1 else f"norm{number}"]
        kept = before if fault == "signals_beside_the_residual" and number == 1 else x
        if how.norm == "pre" and fault != "norm_always_post":
            x = kept + sublayer(_normed(x, scale))
        else:
            x = _normed(kept + sublayer(x), scale)
    return x


def _feed_forward(z: NDArray, w: Params, fault: str) -> NDArray:
    if fault == "feed_forward_over_time":
        z = z + np.roll(z, 1, 1) * (np.arange(z.shape[1]) > 0)[:, None]
    y = np.maximum(z @ w["w1"] + w.get("b1", 0), 0) @ w["w2"] + w.get("b2", 0)
    return np.maximum(y, 0) if fault == "activation_after_w2" else y


def _normed(x: NDArray, w: Params) -> NDArray:
    if "bias" not in w:
        return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + 1e-6) * w["weight"]
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt(np.square(centred).mean(-1, keepdims=True) + 1e-5) * w["weight"] + w["bias"]


def _attention(x: NDArray, rows: NDArray, w: Params, heads: int, sight: NDArray, fault: str) -> NDArray:
    """Attention of x[B,T,d] to rows[B,S,d]; what is not seen is selected away."""
    size = w["wq"].shape[1] // heads
    groups = w["wk"].shape[1] // size
    q, k, v = (z @ w[f"w{name}"] + w.get(f"b{name}", 0) for z, name in ((x, "q"), (rows, "k"), (rows, "v")))
    q, k, v = (a.reshape(*a.shape[:2], n, -1).swapaxes(1, 2) for a, n in ((q, heads), (k, groups), (v, groups)))
    k, v = (a.repeat(heads // groups, 1) for a in (k, v))
    scores = np.where(sight[:, None], q @ k.swapaxes(-1, -2) * size**-0.5, -np.inf)
    top = scores.max(-1, keepdims=True)
    shares = np.exp(scores - np.where(np.isneginf(top), 0, top))
    total = shares.sum(-1, keepdims=True)
    shares = shares / np.where(total == 0, 1, total)
    seen = np.broadcast_to(sight[:, None, :, :, None], (*shares.shape, 1))
    every = fault == ("padding_multiplied_by_zero" if x is rows else "hidden_memory_multiplied_by_zero")
    out = np.where(seen | every, shares[..., None] * v[:, :, None], 0).sum(-2)
    return out.swapaxes(1, 2).reshape(*x.shape[:2], -1) @ w["wo"] + w.get("bo", 0)


def _widened(params: Any) -> Any:
    return {name: _widened(part) for name, part in params.items()} if isinstance(params, Mapping) else _wide(params)


def _wide(x: NDArray) -> NDArray:
    return x if x.dtype == np.float64 else x.astype(np.float32)


_TABLE: dict[str, dict[str, tuple[str, str]]] = {
    "silent-layers-leave-input-and-signals": {
        "steps_missing": ("semantics E13", "no signal of the step"),
        "steps_from_zero": ("tensor2tensor universal_transformer_util.py", "the first step adds row 0"),
        "step_added_once": ("mutation: the signal outside the loop", "the signal of step 1 is added, and that is all"),
        "step_added_to_the_first_position": ("mutation: a missing broadcast", "the step is told to position 0 alone"),
        "positions_at_the_input_alone": ("semantics E13", "positions are added in step 1 alone"),
        "positions_from_one": ("arXiv 1807.03819, section 2.1: i counted from 1", "the first position adds row 1"),
        "signals_in_the_first_step_alone": ("semantics E13", "neither signal is added after step 1"),
        "signals_beside_the_residual": ("mutation: x + F(x + P)", "attention sees the signals, the residual does not"),
        "signals_multiplied": ("mutation: * for +", "position and step are multiplied with one another"),
        "sines_before_cosines": ("tensor2tensor get_timing_signal_1d", "all sines stand before all cosines"),
        "frequencies_of_half_the_width": ("mutation: 2i for i twice", "frequencies fall twice as fast"),
    },
    "positions-tell-equal-tokens-apart": {
        "positions_missing": ("mutation: the step's signal alone", "no signal of positions"),
    },
    "a-single-step-is-one-layer": {
        "normed_at_the_end": ("tensor2tensor universal_transformer_util.py: layer_preprocess", "the output is normed"),
        "norm_always_post": ("mutation: norm not passed on", "norm='pre' has no effect"),
        "activation_after_w2": ("Universal-Transformer-Pytorch", "the feed-forward result is rectified"),
        "feed_forward_over_time": ("Universal-Transformer-Pytorch", "a convolution: the token before joins in"),
        "causal_strict": ("semantics E21", "a token does not see itself, but for the first"),
    },
    "who-never-halts-makes-all-steps": {
        "first_norm_in_later_steps": ("mutation: weights that are not shared", "later steps take norm1 everywhere"),
        "one_step_too_few": ("mutation: range(1, max_steps)", "max_steps - 1 steps"),
        "one_step_too_many": ("mutation: range(max_steps + 1)", "max_steps + 1 steps"),
    },
    "future-has-no-influence": {
        "causal_ignored": ("mutation: a keyword not passed on", "causal has no effect without a memory"),
        "causal_plus_one": ("semantics E46", "a token sees the next one"),
        "decoder_sees_the_future": ("mutation: an encoder with cross-attention", "with a memory, all is seen"),
    },
    "seen-tokens-have-influence": {
        "always_causal": ("mutation: an encoder made of a decoder", "nobody sees later tokens"),
    },
    "padding-has-no-influence": {
        "padding_read": ("corpus kind MASKED", "padding is a key like any other"),
    },
    "more-padding-changes-nothing": {
        "padding_attended": ("corpus kind MASKED", "padding is a key, as a token of zeros"),
    },
    "padding-gives-zeros": {
        "padding_reported": ("corpus kind MASKED", "padding is thought about and returned"),
        "padding_keeps_its_tokens": ("mutation: ones for zeros", "the output at padding is 1"),
        "padding_counted": ("tensor2tensor universal_transformer.py (B162)", "padding has steps and remainder"),
    },
    "sequences-are-independent": {
        "padding_of_the_first_sequence": ("line/lighthouse#77", "every sequence has the mask of sequence 0"),
        "memory_of_the_first_sequence": ("mutation: the batch forgotten", "every sequence sees memory 0"),
        "memory_mask_of_the_first_sequence": ("line/lighthouse#77", "every sequence has memory_mask of sequence 0"),
    },
    "nan-of-padding-stays-hidden": {
        "padding_multiplied_by_zero": ("pytorch#101967", "padding is multiplied by 0, and 0 times NaN is NaN"),
    },
    "seen-memory-has-influence": {
        "last_of_memory_dropped": ("corpus item 24", "the last row of the memory is left out"),
    },
    "order-of-memory-does-not-matter": {
        "cross_causal": ("mutation: one mask for both", "token i sees rows 0 to i of the memory"),
    },
    "nan-of-memory-stays-hidden": {
        "hidden_memory_multiplied_by_zero": ("pytorch#101967", "a hidden value is multiplied by 0, and NaN stays NaN"),
    },
    "hidden-memory-has-no-influence": {
        "memory_mask_ignored": ("corpus item 24", "memory_mask has no effect"),
    },
    "every-step-sees-the-memory": {
        "memory_in_the_first_step_alone": ("mutation: a memory used up", "after step 1 the memory is zeros"),
    },
}  # fmt: skip
FAULTS = {
    variant: Fault("universal_transformer", f"universal_transformer/{law}", source, summary)
    for law, variants in _TABLE.items()
    for variant, (source, summary) in variants.items()
}
VARIANTS: dict[str, dict[str, Callable[..., Any]]] = {
    variant: {"universal_transformer": _make(variant)} for variant in ("correct", *FAULTS)
}
CAPABILITIES = {"universal_transformer": Capabilities(nan_contained=True, rounds_probabilities=False)}
