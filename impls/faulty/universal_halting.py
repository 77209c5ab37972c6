"""Wrong halting in Universal Transformers: who runs, for how long, what each step counts, what the others see of it.

One correct implementation with one switch for each mistake. The variant "correct" has every switch off; each other
one differs from it by the mistake that its Fault names and by nothing else. A sum that must exceed the threshold in
place of reaching it is none of them: where that differs, roundings decide, and nobody is accused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from veriformer.declarations import Capabilities, Fault

FRAMEWORK = "numpy"
Params = Mapping[str, Any]
Results = tuple[NDArray, NDArray, NDArray]
_CARRIED: dict[tuple[int, ...], NDArray] = {}


def _make(fault: str) -> Callable[..., Results]:
    def universal_transformer(
        x: NDArray, params: Params, *, heads: int, norm: str = "post", mask: NDArray | None = None,
        causal: bool = False, memory: NDArray | None = None, memory_mask: NDArray | None = None, max_steps: int,
        epsilon: float = 0.01, preset: str = "default",
    ) -> Results:  # fmt: skip
        real = np.ones(x.shape[:2], bool) if mask is None else mask
        w, seen = _widened(params), None if memory is None else _wide(memory)
        rows = (np.ones((1, 1), bool) if memory_mask is None else memory_mask)[:, None, :]
        order = np.tri(x.shape[1], dtype=bool) if causal or memory is not None else np.ones((1, 1), bool)

        def layer(z: NDArray, keys: NDArray) -> NDArray:
            return _layer(z, seen, w["layer"], heads, norm, keys[:, None, :] & order, rows)

        tokens = np.where(real[..., None], _wide(x), 0)
        with np.errstate(all="ignore"):
            output, n, r = _thought(
                tokens, real, layer, w["halt"], max_steps, _threshold(epsilon, fault), preset, fault
            )
        return output.astype(x.dtype), n, r.astype(x.dtype)

    universal_transformer.__qualname__ = f"universal_transformer[{fault}]"
    return universal_transformer


def _threshold(epsilon: float, fault: str) -> float:
    """What the sum of halting probabilities must reach."""
    return {
        "epsilon_ignored": 0.99,
        "halts_at_one": 1.0,
        "halts_at_half": 0.5,
        "epsilon_for_the_threshold": epsilon,
    }.get(fault, 1 - epsilon)


def _thought(
    x: NDArray, real: NDArray, layer: Callable[[NDArray, NDArray], NDArray], halt: Params, max_steps: int,
    threshold: float, preset: str, fault: str,
) -> Results:  # fmt: skip
    """Step after step; p of a halted position is 0."""
    u, output, running, keys = x, np.zeros_like(x), real.copy(), real
    steps, used, left = np.zeros(real.shape, np.int64), np.zeros_like(x[..., 0]), np.zeros_like(x[..., 0])
    for n in range(1, max_steps + 1):
        z = u + _signals(u, n)
        s = layer(z, keys)
        h = _heard(x, u, z, s, halt, real, fault)
        h = _of_preset(h, used, preset, fault)
        total = _total(used, h, fault)
        reached = (total >= np.asarray(threshold, x.dtype)) & (preset == "default")
        stops = _stops(h, running, real, reached, n == max_steps, fault)
        p = _weight(h, used, stops, running, n == max_steps, reached, preset, fault)
        left = np.where(stops, 1 - (np.minimum(total, 1) if fault == "left_after_the_last_step" else used), left)
        if fault == "halted_positions_run_again" and running.any():
            p, steps = np.where(running, p, left), steps + (real & ~running)
            output = output + np.where((real & ~running)[..., None], p[..., None] * s, 0)
        awake = running.any() & (fault == "live_until_all_have_halted")
        output = s if awake else _output(output, s, p, stops, running, fault)
        used = np.where(running, used + h if fault == "nothing_summed" else total, used)
        steps = steps + running
        moving = running | awake | (fault == "halted_positions_move_on")
        u = np.where(moving[..., None], s, x * 0 if fault == "halted_positions_are_zeros" else u)
        running = running & ~stops
        keys = running if fault == "halted_positions_hidden" else real
    return _returned(output, steps, left, used, real, max_steps, fault)


def _heard(x: NDArray, u: NDArray, z: NDArray, s: NDArray, halt: Params, real: NDArray, fault: str) -> NDArray:
    """The halting probability of each position."""
    read = {"read_before_the_step": z, "read_off_the_state_before": u, "read_off_the_input": x}.get(fault, s)
    y = (read @ halt["w"])[..., 0] + (0 if fault == "bias_dropped" else halt.get("b", 0))
    if fault == "bias_of_one_added":
        y = y + 1
    h = 1 / (1 + np.exp(-np.clip(y, -80, 80)))
    if fault == "hard_sigmoid":
        h = np.clip(0.5 + 0.2 * y, 0, 1)
    if fault in ("mean_over_the_sequence", "mean_over_the_batch"):
        axes = 1 if fault == "mean_over_the_sequence" else (0, 1)
        count = np.maximum(real.sum(axes, keepdims=True), 1).astype(h.dtype)
        h = np.broadcast_to(np.where(real, h, 0).sum(axes, keepdims=True) / count, h.shape)
    return np.broadcast_to(h[:1], h.shape) if fault == "halting_of_the_first_sequence" else h


def _of_preset(h: NDArray, used: NDArray, preset: str, fault: str) -> NDArray:
    """How likely it is to halt at this step."""
    if preset == "fixed" and fault != "fixed_listens":
        return np.zeros_like(h)
    return h * (1 - used) if preset == "pondernet" else h


def _total(used: NDArray, h: NDArray, fault: str) -> NDArray:
    if fault == "summed_in_bfloat16":
        return (used + h).astype(ml_dtypes.bfloat16).astype(h.dtype)
    return h if fault == "nothing_summed" else used + h


def _stops(h: NDArray, running: NDArray, real: NDArray, reached: NDArray, last: bool, fault: str) -> NDArray:
    """Who takes the last step now."""
    if fault == "all_stop_with_the_first":
        reached = np.broadcast_to((reached & real).any(1, keepdims=True), reached.shape)
    if fault == "small_halting_never_stops":
        reached = reached & (h > 0.2)
    if fault == "all_stop_with_the_last":
        reached = np.broadcast_to((reached | ~running).all(1, keepdims=True), reached.shape)
    return running & (reached | last)


def _weight(
    h: NDArray, used: NDArray, stops: NDArray, running: NDArray, last: bool, reached: NDArray, preset: str, fault: str
) -> NDArray:
    """How much this step counts."""
    rest = 1 - used
    if fault == "halting_as_last_weight" or (fault == "no_remainder_at_the_limit" and last):
        rest = np.where(reached & (fault != "halting_as_last_weight"), rest, h)
    if fault == "pondernet_may_never_halt" and preset == "pondernet":
        rest = h
    p = np.where(stops, rest, np.where(running, h, 0))
    return np.where(running, 1, 0).astype(h.dtype) if fault == "steps_count_alike" else p


def _output(output: NDArray, s: NDArray, p: NDArray, stops: NDArray, running: NDArray, fault: str) -> NDArray:
    """The output with one more state in it."""
    p = p[..., None]
    if fault == "last_state":
        return np.where(stops[..., None], s, output)
    if fault == "live_until_all_have_halted":
        return output
    if fault == "last_state_of_all":
        return s
    if fault == "interpolates":
        return np.where(running[..., None], p * s + (1 - p) * output, output)
    if fault == "precedence_slip":
        return np.where(running[..., None], p * s + (output * 1 - p), output)
    return output + np.where(running[..., None], p * s, 0)


def _returned(
    output: NDArray, steps: NDArray, left: NDArray, used: NDArray, real: NDArray, max_steps: int, fault: str
) -> Results:
    if fault == "remainder_of_a_single_step_is_zero":
        left = np.where(steps == 1, 0, left)
    if fault == "sum_for_the_remainder":
        left = np.minimum(used, 1) * real
    if fault == "remainder_carried_over":  # the buffer of the call before
        before = _CARRIED.get(left.shape, np.zeros_like(left)).astype(left.dtype)
        _CARRIED[left.shape] = left
        left = np.maximum(left, before) * real
    if fault == "divided_by_the_steps":
        output = output / np.maximum(steps, 1)[..., None].astype(output.dtype)
    if fault == "steps_from_zero":
        steps = np.maximum(steps - 1, 0)
    if fault == "steps_of_the_slowest":
        steps = steps.max(1, keepdims=True) * real
    if fault == "steps_are_the_limit":
        steps = max_steps * real.astype(np.int64)
    return np.where(real[..., None], output, 0), steps, left


def _signals(u: NDArray, n: int) -> NDArray:
    channel, places = np.arange(u.shape[2]), np.arange(u.shape[1])[:, None]
    rate = 10000.0 ** (-(channel - channel % 2) / u.shape[2])
    waves = [np.where(channel % 2 == 0, np.sin(at * rate), np.cos(at * rate)) for at in (places, n)]
    return (waves[0] + waves[1]).astype(u.dtype)


def _layer(
    x: NDArray, memory: NDArray | None, w: Params, heads: int, norm: str, sight: NDArray, rows: NDArray
) -> NDArray:
    sublayers: list[Callable[[NDArray], NDArray]] = [lambda s: _attention(s, s, w["attention"], heads, sight)]
    if memory is not None:
        sublayers.append(lambda s: _attention(s, memory, w["cross_attention"], heads, rows))
    sublayers.append(lambda s: _feed_forward(s, w["feed_forward"]))
    for number, sublayer in enumerate(sublayers, 1):
        scale = w[f"norm{number}"]
        x = x + sublayer(_normed(x, scale)) if norm == "pre" else _normed(x + sublayer(x), scale)
    return x


def _feed_forward(z: NDArray, w: Params) -> NDArray:
    return np.maximum(z @ w["w1"] + w.get("b1", 0), 0) @ w["w2"] + w.get("b2", 0)


def _normed(x: NDArray, w: Params) -> NDArray:
    if "bias" not in w:
        return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + 1e-6) * w["weight"]
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt(np.square(centred).mean(-1, keepdims=True) + 1e-5) * w["weight"] + w["bias"]


def _attention(x: NDArray, rows: NDArray, w: Params, heads: int, sight: NDArray) -> NDArray:
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
    out = shares / np.where(total == 0, 1, total) @ v
    return out.swapaxes(1, 2).reshape(*x.shape[:2], -1) @ w["wo"] + w.get("bo", 0)


def _widened(params: Any) -> Any:
    return {name: _widened(part) for name, part in params.items()} if isinstance(params, Mapping) else _wide(params)


def _wide(x: NDArray) -> NDArray:
    return x if x.dtype == np.float64 else x.astype(np.float32)


_T2T = "tensor2tensor universal_transformer_util.py"
_TABLE: dict[str, dict[str, tuple[str, str]]] = {
    "silent-layers-leave-input-and-signals": {
        "interpolates": ("tensor2tensor#1337 (B153)", "output = p s + (1 - p) output: weights do not sum to 1"),
        "precedence_slip": ("tensor2tensor#1004", "output * 1 - p for output * (1 - p)"),
        "last_state": ("Universal-Transformer-Pytorch#1 (B151)", "the state at which a position halted, not the mean"),
        "halting_as_last_weight": ("Graves 2016, section 2", "h_N in place of R"),
        "divided_by_the_steps": ("mutation: a mean twice", "the mean is divided by N"),
        "steps_count_alike": ("mutation: states added up", "every step counts 1"),
    },
    "every-keyword-counts": {
        "epsilon_ignored": ("mutation: a constant for a keyword", "the threshold is 0.99 whatever epsilon is"),
    },
    "an-even-unit-halts-everybody-at-the-same-step": {
        "summed_in_bfloat16": ("semantics E08", "sums of halting are held in bfloat16"),
        "halts_at_one": ("mutation: epsilon forgotten", "the sum must reach 1"),
        "halts_at_half": ("mutation: a step halts if it is likely to", "the sum must reach 0.5"),
        "epsilon_for_the_threshold": ("mutation: epsilon for 1 - epsilon", "the sum must reach epsilon"),
        "nothing_summed": ("mutation: h for H", "h_n itself must reach the threshold"),
        "hard_sigmoid": ("mutation: another squashing", "a clipped line for the sigmoid"),
        "bias_of_one_added": ("Graves 2016, section 4: b_h starts at 1", "the bias is one larger"),
        "bias_dropped": ("semantics E10", "the halting unit has no bias"),
        "left_after_the_last_step": ("semantics E12", "R is what is left after step N, not before"),
        "steps_from_zero": ("mutation: n from 0", "N is one smaller"),
        "small_halting_never_stops": ("mutation: h looked at beside H", "who halts at a step says more than 0.2 there"),
    },
    "who-never-halts-makes-all-steps": {
        "no_remainder_at_the_limit": (f"{_T2T} (B157)", "a stop at max_steps is given h in place of what is left"),
    },
    "who-halts-at-once-makes-one-step": {
        "last_state_of_all": ("mutation: the loop's last state", "the output is the state after max_steps"),
        "steps_are_the_limit": ("mutation: max_steps for N", "N is max_steps"),
    },
    "steps-and-remainder-keep-their-ranges": {
        "remainder_of_a_single_step_is_zero": ("sonnet v1 ACTCore", "R stays 0 where N = 1"),
    },
    "a-halted-position-keeps-its-state-and-stays-a-key": {
        "halted_positions_move_on": (
            f"{_T2T}; Universal-Transformer-Pytorch#9 (B154)",
            "halted positions are moved on",
        ),
        "halted_positions_are_zeros": ("mutation: a state multiplied by running", "a halted position's state is 0"),
        "halted_positions_hidden": ("mutation: expert choice", "a halted position is no key any more"),
    },
    "future-has-no-influence": {
        "mean_over_the_sequence": (f"{_T2T}: act_global", "one halting probability for a sequence, the mean"),
        "all_stop_with_the_first": ("mutation: any for each", "a sequence stops when one position does"),
        "live_until_all_have_halted": ("semantics 3.13: evolve and last", "all move on until all have halted"),
        "all_stop_with_the_last": ("mutation: all for each", "positions go on until all have halted"),
        "steps_of_the_slowest": ("mutation: one N for a sequence", "N is the largest of the sequence"),
    },
    "sequences-are-independent": {
        "mean_over_the_batch": ("corpus kind BATCH", "one halting probability for a batch, the mean"),
        "halting_of_the_first_sequence": ("mutation: the batch forgotten", "sequence 0 decides for all"),
        "halted_positions_run_again": (
            "port 18020375153 (B158)",
            "while anybody runs, who has halted is given the last weight again",
        ),
    },
    "what-is-left-falls-by-what-was-said": {
        "sum_for_the_remainder": ("semantics E09", "the sum of the halting probabilities in place of R"),
    },
    "equals-the-reference": {
        "read_before_the_step": (_T2T, "h is read off what the step is given"),
        "read_off_the_state_before": ("mutation: u for s", "h is read off the state before the step, without signals"),
        "read_off_the_input": ("mutation: x for s", "h is read off x at every step"),
    },
    "repeats-itself": {
        "remainder_carried_over": ("keras-transformer#3 (B155)", "what the call before left is in the remainder"),
    },
    "a-fixed-number-of-steps-is-made-whatever-halting-says": {
        "fixed_listens": ("mutation: a preset half done", "in the preset fixed halting weighs the states"),
    },
    "pondernet-expects-over-all-steps": {
        "pondernet_may_never_halt": ("mutation: lambda_M as it is", "the last step is not sure to halt"),
    },
}
FAULTS = {
    variant: Fault("universal_transformer", f"universal_transformer/{law}", source, summary)
    for law, variants in _TABLE.items()
    for variant, (source, summary) in variants.items()
}
VARIANTS: dict[str, dict[str, Callable[..., Any]]] = {
    variant: {"universal_transformer": _make(variant)} for variant in ("correct", *FAULTS)
}
CAPABILITIES = {
    "universal_transformer": Capabilities(rounds_probabilities=False, presets=("default", "fixed", "pondernet"))
}
