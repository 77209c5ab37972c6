"""Wrong adaptive computation time of given states: one correct implementation with one switch for each mistake.

The variant "correct" has every switch off, "strict" is as right for those who declare it. Each other variant differs
from "correct" by the mistake that its Fault names and by nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from veriformer.declarations import Capabilities, Fault

FRAMEWORK = "numpy"
Halted = tuple[NDArray, NDArray, NDArray]
_CARRIED: dict[tuple[int, ...], NDArray] = {}
_BUFFERS: dict[tuple[int, ...], NDArray] = {}


def _make(fault: str) -> Callable[..., Halted]:
    def adaptive_computation_time(halting: NDArray, states: NDArray, *, epsilon: float = 0.01) -> Halted:
        h, bound = _heard(halting, fault), _threshold(epsilon, fault)
        total = _sums(h, fault)
        last = _last(h, total, states, bound, fault)
        p, left = _weights(h, total, last, bound, fault)
        out = _mean(p, states, last, fault)
        return _returned(out.astype(states.dtype), last, left.astype(halting.dtype), p, h, fault)

    adaptive_computation_time.__qualname__ = f"adaptive_computation_time[{fault}]"
    return adaptive_computation_time


def _heard(h: NDArray, fault: str) -> NDArray:
    """Halting as it is read."""
    if fault == "mean_over_positions" and h.ndim > 1:
        return np.broadcast_to(h.mean(axis=tuple(range(h.ndim - 1)), keepdims=True), h.shape).astype(h.dtype)
    if fault == "read_before_the_step":
        return np.concatenate([np.zeros_like(h[..., :1]), h[..., :-1]], axis=-1)
    if fault == "read_backwards":
        return h[..., ::-1]
    if fault == "halting_divided_by_its_sum":
        return h / np.maximum(h.sum(axis=-1, keepdims=True), 1).astype(h.dtype)
    return np.clip(h, 0.01, 0.2).astype(h.dtype) if fault == "halting_clipped" else h


def _threshold(epsilon: float, fault: str) -> float:
    """What the sum must reach."""
    return {
        "epsilon_ignored": 1.0,
        "usual_epsilon_always": 0.99,
        "usual_epsilon_for_none": 1 - (epsilon or 0.01),
        "threshold_a_little_lower": 1 - epsilon - 1e-4,
        "epsilon_is_the_threshold": epsilon,
    }.get(fault, 1 - epsilon)


def _sums(h: NDArray, fault: str) -> NDArray:
    """Halting summed up to each step."""
    if fault == "summed_over_positions" and h.ndim > 1:
        return np.cumsum(h, axis=-2)
    if fault != "summed_in_eight_bits":
        return np.cumsum(h, axis=-1)
    total, found = np.zeros_like(h[..., 0]), []
    for n in range(h.shape[-1]):
        total = _short(total + h[..., n])
        found.append(total)
    return np.stack(found, axis=-1)


def _short(x: NDArray) -> NDArray:
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.round(mantissa * 256) / 256, exponent).astype(x.dtype)


def _last(h: NDArray, total: NDArray, states: NDArray, bound: float, fault: str) -> NDArray:
    """The place of the step at which each position halts, from 0."""
    stops = total > bound if fault in ("strict", "strict_undeclared") else total >= bound
    if fault == "each_step_by_itself":
        stops = h >= bound
    if fault == "threshold_falls_with_the_limit":
        stops = total >= bound / max(h.shape[-1] - 2, 1)
    if fault == "stops_when_the_state_repeats":
        stops = stops | np.concatenate(
            [np.zeros_like(stops[..., :1]), (states[..., 1:, :] == states[..., :-1, :]).all(-1)], axis=-1
        )
    stops[..., -1] = True
    last = stops.argmax(axis=-1)
    most = h.shape[-1] - 1
    if fault == "one_step_too_many":
        return np.minimum(last + 1, most)
    if fault == "one_step_too_few":
        return np.maximum(last - 1, 0)
    shared = {"stops_with_the_first_position": last.min, "runs_until_the_last_position": last.max}.get(fault)
    if fault == "steps_of_the_first_position":
        return np.full_like(last, last.flat[0])
    return np.full_like(last, shared()) if shared else last


def _weights(h: NDArray, total: NDArray, last: NDArray, bound: float, fault: str) -> tuple[NDArray, NDArray]:
    """The weight of each step, and what is left for the last one."""
    place, at = np.arange(h.shape[-1]), last[..., None]
    before = np.concatenate([np.zeros_like(h[..., :1]), total[..., :-1]], axis=-1)
    left = 1 - np.take_along_axis(total if fault == "left_after_the_last_step" else before, at, -1)
    if fault == "no_remainder_at_the_limit":
        left = np.where(np.take_along_axis(total, at, -1) >= bound, left, 0).astype(h.dtype)
    final = left
    if fault in ("halting_as_last_weight", "no_remainder_at_the_limit"):
        limited = np.take_along_axis(total, at, -1) < bound
        own = np.take_along_axis(h, at, -1)
        final = own if fault == "halting_as_last_weight" else np.where(limited, own, left)
    if fault == "first_step_weighs_its_halting":
        final = np.where((at == 0) & (h.shape[-1] > 1), h[..., :1], left)
    later = left if fault == "halted_positions_updated_again" else np.zeros((), h.dtype)
    p = np.where(place < at, h, np.where(place == at, final, later)).astype(h.dtype)
    return _otherwise(p, h, total, at, bound, fault).astype(h.dtype), left[..., 0]


def _otherwise(p: NDArray, h: NDArray, total: NDArray, at: NDArray, bound: float, fault: str) -> NDArray:
    """Weights by a wrong formula."""
    counts = np.arange(h.shape[-1]) <= at
    if fault == "interpolates":
        return p * np.flip(
            np.cumprod(np.flip(1 - np.roll(p, -1, -1) * (np.arange(p.shape[-1]) < p.shape[-1] - 1), -1), -1), -1
        )
    if fault == "sums_cut_off_at_the_threshold":
        return np.where(counts, np.diff(np.minimum(total, bound), axis=-1, prepend=0), 0)
    if fault == "weights_divided_by_their_sum":
        kept = np.where(counts, h, 0)
        whole = kept.sum(axis=-1, keepdims=True)
        return np.where(whole > 0, kept / np.where(whole > 0, whole, 1), p)
    if fault == "equal_weights":
        return np.where(counts, 1 / (at + 1), 0)
    if fault == "softmax_of_halting":
        kept = np.where(counts, np.exp(h), 0)
        return kept / kept.sum(axis=-1, keepdims=True)
    if fault == "stick_breaking":
        rest = np.cumprod(1 - h, axis=-1)
        share = h * np.concatenate([np.ones_like(h[..., :1]), rest[..., :-1]], axis=-1)
        last = np.take_along_axis(np.concatenate([np.ones_like(h[..., :1]), rest], axis=-1), at, -1)
        return np.where(np.arange(h.shape[-1]) < at, share, np.where(counts, last, 0))
    return p


def _mean(p: NDArray, s: NDArray, last: NDArray, fault: str) -> NDArray:
    """The states, each times its weight."""
    at, place, all_states = last[..., None, None], np.arange(s.shape[-2]), s
    if fault == "last_state_alone":
        return np.take_along_axis(s, at, -2)[..., 0, :]
    if fault == "state_before_each_step":
        s = np.concatenate([s[..., :1, :], s[..., :-1, :]], axis=-2)
    if fault == "state_after_each_step":
        s = np.concatenate([s[..., 1:, :], s[..., -1:, :]], axis=-2)
    if fault == "states_clipped":
        s = np.clip(s, -2, 2)
    if fault == "states_rounded":
        s = np.round(s * 100) / s.dtype.type(100)
    if fault == "states_centred" and s.shape[-1] > 1:
        s = s - s.mean(axis=-1, keepdims=True) * s.dtype.type(1e-2)
    if fault not in ("multiplied_by_zero", "halted_positions_updated_again"):
        s = np.where((place <= last[..., None])[..., None], s, np.zeros((), s.dtype))
    if fault == "half_of_the_steps" and s.shape[-2] > 3:
        p = np.where(place < s.shape[-2] // 2, p, 0).astype(p.dtype)
    out = (p[..., None] * s).sum(axis=-2)
    if fault == "square_root_of_a_mean_of_squares":
        out = np.sign(out) * np.sqrt((p[..., None] * s * s).sum(axis=-2))
    if fault == "last_state_of_all_added":
        out = out + s.dtype.type(0.01) * all_states[..., -1, :]
    if fault == "precedence_slip":
        out = out - p.sum(axis=-1)[..., None]
    if fault == "positions_beyond_four_untouched":
        flat = out.reshape(-1, out.shape[-1])
        flat[len(flat) // 4 * 4 if len(flat) > 4 else len(flat) :] = 0
    return out


def _returned(out: NDArray, last: NDArray, left: NDArray, p: NDArray, h: NDArray, fault: str) -> Halted:
    """The three results as they are handed over."""
    steps = last.astype(np.int64) + 1
    if fault == "remainder_zero_at_once":
        left = np.where(steps == 1, 0, left)
    if fault == "remainder_of_the_next_step":
        left = 1 - np.take_along_axis(np.cumsum(h, -1), last[..., None], -1)[..., 0]
    if fault == "remainder_is_the_sum_of_weights":
        left = p.sum(axis=-1)
    if fault == "remainder_is_the_sum_of_halting":
        left = np.take_along_axis(np.cumsum(h, -1), last[..., None], -1)[..., 0]
    if fault == "remainder_is_forgotten":
        left = np.zeros_like(left)
    if fault == "remainder_at_most_the_last_halting":
        left = np.minimum(left, np.take_along_axis(h, last[..., None], -1)[..., 0] + left.dtype.type(0.25))
    if fault == "remainder_added_to_the_last_call":
        left = left + _CARRIED.get(left.shape, np.zeros_like(left)) * left.dtype.type(0.5)
        _CARRIED[left.shape] = left
    if fault == "steps_from_zero":
        steps = steps - 1
    if fault == "steps_of_the_limit_are_zero":
        steps = np.where(steps == h.shape[-1], 0, steps)
    if fault == "result_is_a_buffer":
        out = _kept(out)
    kind = {"steps_in_32_bits": np.int32, "steps_are_real": out.dtype}.get(fault, np.int64)
    return out, steps.astype(kind), left.astype(out.dtype)


def _kept(out: NDArray) -> NDArray:
    """The result in memory that the next call of this shape writes again."""
    buffer = _BUFFERS.setdefault(out.shape, np.zeros(out.shape, np.float64))
    if buffer.dtype != out.dtype:
        buffer = _BUFFERS[out.shape] = np.zeros(out.shape, out.dtype)
    buffer[...] = out
    return buffer


_TABLE = {
    "weights-sum-to-one": {
        "interpolates": ("B153", "the mean is interpolated: weights shrink again, to 3/4 in all for two halves"),
        "precedence_slip": ("tensor2tensor issue 1004", "prev * 1 - w for prev * (1 - w): a constant too little"),
        "no_remainder_at_the_limit": ("B157", "a position stopped by the limit never gets its remainder"),
        "halted_positions_updated_again": ("B158", "a position that has halted gets its remainder at later steps too"),
        "left_after_the_last_step": ("E12", "the last weight is what is left after the last step"),
        "halting_as_last_weight": ("semantics 4.15", "the last step has its own halting as its weight"),
        "half_of_the_steps": ("mutation: a tile of steps", "of more than three steps only the first half is added up"),
        "sums_cut_off_at_the_threshold": ("mutation: a clamp", "weights are differences of sums up to 1 - epsilon"),
    },
    "weights-are-halting-then-what-is-left": {
        "last_state_alone": ("B151", "the state after the last step is returned and not the mean"),
        "weights_divided_by_their_sum": ("mutation: normalised", "halting up to the last step divided by its sum"),
        "equal_weights": ("mutation: the mean", "every step counts alike"),
        "softmax_of_halting": ("mutation: softmax", "weights are a softmax of halting"),
        "stick_breaking": ("PonderNet", "halting is a probability given that no step before has halted"),
    },
    "mean-lies-among-the-states": {
        "state_after_each_step": ("mutation: one late", "each weight meets the state after the next step"),
    },
    "equals-the-reference": {
        "state_before_each_step": ("mutation: one early", "each weight meets the state before its step"),
    },
    "halts-where-the-sum-first-reaches-the-threshold": {
        "read_before_the_step": ("tensor2tensor", "halting is read before the step, one step late"),
        "epsilon_ignored": ("E07", "the sum must reach 1"),
        "usual_epsilon_always": ("mutation: a constant", "epsilon is 0.01 whatever is given"),
        "usual_epsilon_for_none": ("mutation: epsilon or 0.01", "epsilon = 0 is taken for 0.01"),
        "threshold_a_little_lower": ("mutation: 1e-4 against roundings", "the sum must reach 1 - epsilon - 1e-4"),
        "one_step_too_many": ("semantics 4.15", "one step more than it takes"),
        "one_step_too_few": ("semantics 4.15", "one step less than it takes"),
        "each_step_by_itself": ("mutation: not summed", "a step halts where its own halting reaches the threshold"),
        "stops_with_the_first_position": ("mutation: any for all", "all positions stop when one has halted"),
        "runs_until_the_last_position": ("P105", "every position goes on until all have halted"),
        "stops_when_the_state_repeats": ("Huginn's exit", "a state that repeats halts, whatever halting says"),
    },
    "a-sum-on-the-threshold-halts": {
        "strict_undeclared": ("E06", "the sum must exceed the threshold, which is not declared"),
    },
    "many-small-steps-add-up": {
        "summed_in_eight_bits": ("E08", "halting is summed in 8 bits, where it stands still at a half"),
    },
    "constant-halting-counts-its-multiples": {
        "halting_clipped": ("mutation: kept off 0 and 1", "halting is clipped to 0.01 … 0.2"),
    },
    "a-certain-first-step-is-all": {
        "first_step_weighs_its_halting": ("mutation: N = 1", "a step beyond the threshold weighs its own halting"),
        "steps_from_zero": ("semantics 4.15", "steps count from 0"),
    },
    "without-halting-the-last-state-is-all": {
        "steps_of_the_limit_are_zero": ("mutation: written at a halt", "a position stopped by the limit has no steps"),
    },
    "ponder-time-has-its-range": {
        "remainder_zero_at_once": ("sonnet ACTCore", "the remainder of a position that halts at once stays 0"),
        "remainder_is_forgotten": ("semantics 4.15", "the cost is the number of steps alone"),
    },
    "remainder-is-what-earlier-steps-leave": {
        "remainder_is_the_sum_of_weights": ("E09", "the cost is the sum of the weights, always 1"),
        "remainder_is_the_sum_of_halting": ("E09", "the cost is the sum of halting, which training lowers"),
        "remainder_of_the_next_step": ("E12", "the remainder is taken after the last step, where it is negative"),
        "remainder_at_most_the_last_halting": ("mutation: clipped", "the remainder is clipped near the last halting"),
    },
    "larger-epsilon-never-halts-later": {
        "epsilon_is_the_threshold": ("mutation: not taken from 1", "the sum must reach epsilon"),
    },
    "more-halting-never-halts-later": {
        "halting_divided_by_its_sum": ("mutation: normalised first", "halting is divided by its sum over all steps"),
    },
    "more-room-never-halts-earlier": {
        "read_backwards": ("mutation: from the end", "halting is read from the last step"),
    },
    "less-room-only-cuts": {
        "threshold_falls_with_the_limit": ("mutation: the limit counts", "the threshold depends on the limit"),
    },
    "what-follows-the-last-step-has-no-influence": {
        "last_state_of_all_added": ("mutation: a residual", "a hundredth of the state after step M is added"),
    },
    "nan-after-the-last-step-stays-there": {
        "multiplied_by_zero": ("P105", "later states are multiplied by 0, NaN included"),
    },
    "positions-are-independent": {
        "mean_over_positions": ("tensor2tensor, global", "halting is averaged over all positions"),
        "summed_over_positions": ("mutation: axis", "halting is summed over positions"),
        "steps_of_the_first_position": ("mutation: row 0", "all positions halt where the first one does"),
    },
    "position-alone-is-the-position-in-its-batch": {
        "positions_beyond_four_untouched": ("mutation: tiles of four", "positions after the last four are left 0"),
    },
    "states-that-count-have-influence": {
        "states_clipped": ("mutation: clipped", "states are clipped to 2"),
    },
    "mean-is-that-of-the-recorded-states": {
        "square_root_of_a_mean_of_squares": (
            "mutation: another mean",
            "the root of the mean of squares, with its sign",
        ),
    },
    "mean-scales-with-the-states": {
        "states_rounded": ("mutation: a grid", "states are rounded to multiples of a hundredth"),
    },
    "channels-are-independent": {
        "states_centred": ("mutation: channels meet", "a part of the mean over channels is taken off"),
    },
    "repeats-itself": {
        "remainder_added_to_the_last_call": ("B155", "remainders are not reset between calls"),
    },
    "returns-its-own-memory": {
        "result_is_a_buffer": ("B155", "the mean lies in memory of the call before"),
    },
    "keeps-the-dtype": {
        "steps_in_32_bits": ("mutation: narrow", "steps are int32"),
        "steps_are_real": ("tensor2tensor, n_updates", "steps are real numbers"),
    },
}
FAULTS = {
    variant: Fault("adaptive_computation_time", f"adaptive_computation_time/{law}", source, summary)
    for law, variants in _TABLE.items()
    for variant, (source, summary) in variants.items()
}
VARIANTS = {variant: {"adaptive_computation_time": _make(variant)} for variant in ("correct", "strict", *FAULTS)}
_PLAIN = Capabilities(dtypes=("float64", "float32"), nan_contained=True)
CAPABILITIES = {variant: {"adaptive_computation_time": _PLAIN} for variant in VARIANTS}
CAPABILITIES["strict"] = {"adaptive_computation_time": replace(_PLAIN, halting_comparison="above")}
