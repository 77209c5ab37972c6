"""Wrong loops of adaptive computation time: one correct implementation with one switch for each mistake.

The variant "correct" has every switch off; "recorded" makes all steps first and is as right. Each other variant
differs from "correct" by the mistake that its Fault names and by nothing else.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from veriformer.declarations import Capabilities, Fault

FRAMEWORK = "numpy"
Halted = tuple[NDArray, NDArray, NDArray]
Step = Callable[[NDArray, int], tuple[NDArray, NDArray]]
_LEFT_OVER: dict[tuple[int, ...], NDArray] = {}
_CALLS: dict[str, int] = {}


class _Sums:
    """What a loop carries for each position: mean, halting sum, remainder, steps, and who still runs."""

    def __init__(self, state: NDArray, fault: str) -> None:
        self.fault, shape = fault, state.shape[:-1]
        self.mean = _start(state, fault)
        self.total, self.left = np.zeros(shape, state.dtype), np.ones(shape, state.dtype)
        if fault == "remainders_begin_at_zero":
            self.left = np.zeros(shape, state.dtype)
        self.steps, self.running = np.zeros(shape, np.int64), np.ones(shape, bool)

    def take(self, state: NDArray, h: NDArray, bound: float, last: bool) -> None:
        """Count one step."""
        fault, before = self.fault, self.total
        h = h.mean(keepdims=True) + 0 * h if fault == "mean_over_positions" else h
        after = np.where(self.running, before + h, before)
        stops = self._stops(after, bound, last)
        left = 1 - (after if fault == "left_after_the_last_step" else before)
        if fault != "remainders_begin_at_zero" or self.steps.max() > 0:
            self.left = np.where(stops, left, self.left)
        weight = np.where(stops & (after >= bound) if fault == "no_remainder_at_the_limit" else stops, left, h)
        weight = h if fault == "halting_as_last_weight" else weight
        self._add(weight.astype(state.dtype), state)
        counted = np.ones_like(self.running) if fault == "steps_count_calls" else self.running
        self.steps, self.total, self.running = self.steps + counted, after, self.running & ~stops

    def _stops(self, after: NDArray, bound: float, last: bool) -> NDArray:
        """Which positions halt now."""
        stops = self.running & ((after > bound if self.fault == "strict_undeclared" else after >= bound) | last)
        if self.fault == "stops_with_the_first_position":
            return self.running & stops.any()
        if self.fault == "stops_with_most":
            return self.running & (stops | ((~self.running | stops).mean() > 0.5))
        return self.running & (stops.all() | last) if self.fault == "runs_until_the_last_position" else stops

    def _add(self, weight: NDArray, state: NDArray) -> None:
        """Add a state to the mean of those who run."""
        w, fault = weight[..., None], self.fault
        added = self.mean + w * state
        if fault == "interpolates":
            added = w * state + (1 - w) * self.mean
        if fault == "precedence_slip":
            added = w * state + self.mean * 1 - w
        if fault == "last_state_alone":
            added = state
        runs = self.running[..., None]
        self.mean = (
            self.mean + np.where(runs, w, 0) * state
            if fault == "multiplied_by_zero"
            else np.where(runs, added, self.mean)
        )


def _start(state: NDArray, fault: str) -> NDArray:
    """The mean before the first step."""
    if fault == "mean_begins_with_the_state":
        return state.copy()
    if fault == "mean_kept_between_calls":
        return _LEFT_OVER.get(state.shape, np.zeros_like(state)).astype(state.dtype)
    return np.zeros_like(state)


def _make(fault: str) -> Callable[..., Halted]:
    def act_loop(step: Step, state: NDArray, *, max_steps: int, epsilon: float = 0.01) -> Halted:
        bound = 0.99 if fault == "usual_epsilon_always" else 1 - epsilon
        first, sums, heard = state, _Sums(state, fault), np.zeros(state.shape[:-1], state.dtype)
        for n in range(1, _limit(max_steps, fault) + 1):
            made, h = step(_given(state, first, sums, n, fault), _number(n, fault))
            heard, h = h, heard if fault == "halting_of_the_step_before" else h
            seen = state if fault == "state_before_each_step" else made
            sums.take(seen, h, bound, n == _limit(max_steps, fault))
            state = _next(made, state, sums, first, fault)
            if not sums.running.any() and fault != "recorded":
                break
        if fault == "one_call_more":
            step(state, n + 1)
        return _returned(sums, state, fault)

    act_loop.__qualname__ = f"act_loop[{fault}]"
    return act_loop


def _limit(max_steps: int, fault: str) -> int:
    """How many steps there are at most."""
    return {
        "one_step_short": max(max_steps - 1, 1),
        "limit_is_a_hundred": 100,
        "limit_is_eight": min(max_steps, 8),
    }.get(fault, max_steps)


def _number(n: int, fault: str) -> int:
    """The number that the step is told."""
    return {"numbers_from_zero": n - 1, "always_the_first": 1}.get(fault, n)


def _given(state: NDArray, first: NDArray, sums: _Sums, n: int, fault: str) -> NDArray:
    """The state that the step is given."""
    if fault == "always_the_first_state":
        return first
    return sums.mean if fault == "mean_goes_on" and n > 1 else state


def _next(made: NDArray, state: NDArray, sums: _Sums, first: NDArray, fault: str) -> NDArray:
    """The state that the next step is given."""
    if fault == "running_positions_frozen":
        return np.where(sums.running[..., None], state, made)
    if fault == "first_position_for_all" and made.ndim > 1:
        return np.broadcast_to(made.reshape(-1, made.shape[-1])[0], made.shape).copy()
    if fault == "first_input_added":
        return made + first
    if fault == "state_written_over" and first.flags.writeable:
        first[...] = made
    return made


def _returned(sums: _Sums, state: NDArray, fault: str) -> Halted:
    """The three results as they are handed over."""
    _LEFT_OVER[sums.mean.shape] = sums.mean * 0.5
    out = sums.mean.astype(state.dtype)
    steps, left = sums.steps, sums.left
    if fault == "steps_of_the_limit_are_zero":
        steps = np.where(sums.running, 0, steps)
    if fault == "remainder_is_forgotten":
        left = np.zeros_like(left)
    if fault == "noise_of_the_call_number":
        _CALLS["n"] = _CALLS.get("n", 0) + 1
        out = out * out.dtype.type(1 + 1e-3 * (_CALLS["n"] % 2))
    return out, steps, left.astype(state.dtype)


_TABLE = {
    "weights-sum-to-one": {
        "interpolates": ("B153", "the mean is interpolated: weights shrink again, to 3/4 in all for two halves"),
        "precedence_slip": ("tensor2tensor issue 1004", "prev * 1 - w for prev * (1 - w): a constant too little"),
        "no_remainder_at_the_limit": ("B157", "a position stopped by the limit never gets its remainder"),
        "left_after_the_last_step": ("E12", "the last weight is what is left after the last step"),
        "halting_as_last_weight": ("semantics 4.15", "the last step has its own halting as its weight"),
    },
    "weights-are-halting-then-what-is-left": {
        "last_state_alone": ("B151", "the state after the last step is returned and not the mean"),
        "mean_goes_on": ("mutation: averaged too early", "every step but the first is given the mean so far"),
        "always_the_first": ("mutation: a constant", "every step is told that it is the first"),
    },
    "mean-is-that-of-the-recorded-states": {
        "mean_begins_with_the_state": ("mutation: s^0 counts", "the initial state is added to the mean"),
        "always_the_first_state": ("mutation: not handed on", "every step is given the initial state"),
        "first_input_added": ("looped transformers: input injection", "the initial state is added before each step"),
        "first_position_for_all": ("mutation: broadcast", "all positions go on with the state of the first one"),
        "running_positions_frozen": ("B154, the wrong way round", "positions that run keep their state"),
    },
    "equals-the-reference": {
        "state_before_each_step": ("mutation: one early", "each weight meets the state before its step"),
    },
    "halts-where-the-sum-first-reaches-the-threshold": {
        "halting_of_the_step_before": ("tensor2tensor", "halting is that of the step before"),
        "usual_epsilon_always": ("mutation: a constant", "epsilon is 0.01 whatever is given"),
        "stops_with_the_first_position": ("mutation: any for all", "all positions stop when one has halted"),
        "stops_with_most": ("mutation: a share", "all positions stop when more than half have halted"),
        "runs_until_the_last_position": ("P105", "every position goes on until all have halted"),
        "steps_count_calls": ("mutation: not masked", "steps are counted for positions that have halted too"),
        "mean_over_positions": ("tensor2tensor, global", "halting is averaged over all positions"),
    },
    "a-sum-on-the-threshold-halts": {
        "strict_undeclared": ("E06", "the sum must exceed the threshold, which is not declared"),
    },
    "without-halting-the-last-state-is-all": {
        "one_step_short": ("mutation: range(1, M)", "a step less than there might be"),
    },
    "each-step-is-made-once-in-order": {
        "limit_is_eight": ("mutation: a default wins", "eight steps at most, whatever is given"),
    },
    "ponder-time-has-its-range": {
        "remainders_begin_at_zero": ("sonnet ACTCore", "the remainder of a position that halts at once stays 0"),
        "remainder_is_forgotten": ("semantics 4.15", "the cost is the number of steps alone"),
    },
    "nan-after-the-last-step-stays-there": {
        "multiplied_by_zero": ("P105", "later states are multiplied by 0, NaN included"),
    },
    "the-step-is-called-with-its-numbers": {
        "numbers_from_zero": ("mutation: range(M)", "steps are numbered from 0"),
        "one_call_more": ("mutation: looked ahead", "the step is called once more after the loop has ended"),
        "limit_is_a_hundred": ("E08", "the limit is 100, whatever is given"),
    },
    "repeats-itself": {
        "noise_of_the_call_number": ("mutation: a counter", "every second call is a thousandth larger"),
        "mean_kept_between_calls": ("B155", "the mean begins with a half of that of the call before"),
    },
    "leaves-inputs-untouched": {
        "state_written_over": ("mutation: in place", "the states are written over the initial one"),
    },
}
FAULTS = {
    variant: Fault("act_loop", f"act_loop/{law}", source, summary)
    for law, variants in _TABLE.items()
    for variant, (source, summary) in variants.items()
}
VARIANTS = {variant: {"act_loop": _make(variant)} for variant in ("correct", "recorded", *FAULTS)}
CAPABILITIES = {"act_loop": Capabilities(dtypes=("float64", "float32"), nan_contained=True)}
