"""Adaptive computation time in plain NumPy: all positions at once, and one position after the other.

float64 and float32 are computed in their own dtype; bfloat16 (of ml_dtypes) and float16 are widened
to float32 and rounded once at the end. A loop hands its step the states as it got them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veriformer.declarations import DTYPES, Capabilities

FRAMEWORK = "numpy"
Halted = tuple[NDArray, NDArray, NDArray]
Step = Callable[[NDArray, int], tuple[NDArray, NDArray]]
_WIDENED = Capabilities(
    dtypes=DTYPES, intermediate={"float64": "float64", "default": "float32"}, nan_contained=True, batch_invariant=True
)
CAPABILITIES = {
    variant: {"adaptive_computation_time": _WIDENED, "act_loop": _WIDENED} for variant in ("act", "act_by_position")
}


def adaptive_computation_time(halting: NDArray, states: NDArray, *, epsilon: float = 0.01) -> Halted:
    """Each position's states weighted by halting until it adds up to 1 - epsilon.

    halting[..., M], states[..., M, d] -> (out[..., d], steps[...], remainder[...])
    steps N is the first with h_1 + ... + h_N >= 1 - epsilon, at most M; out = sum of h_n s_n up to N - 1, + R s_N
    with R = 1 - (h_1 + ... + h_(N-1))
    Source: Graves 2016, section 2. What comes after step N is left out, whatever it holds.
    """
    p, last, left = _weights(_wide(halting), epsilon)
    counts = np.arange(halting.shape[-1]) <= last[..., None]
    kept = np.where(counts[..., None], _wide(states), np.zeros((), _wide(states).dtype))
    out = (p[..., None] * kept).sum(axis=-2)
    return out.astype(states.dtype), last + 1, left.astype(halting.dtype)


def adaptive_computation_time_vjp(
    cotangents: Halted, halting: NDArray, states: NDArray, *, epsilon: float = 0.01
) -> tuple[NDArray, NDArray]:
    """The gradient of adaptive_computation_time, in which N is a constant.

    cotangents (g[..., d], of steps, r[...]), halting[..., M], states[..., M, d] -> (dhalting, dstates)
    dh_n = g . (s_n - s_N) - r for n < N, else 0; ds_n = p_n g
    Source: Graves 2016, section 2.2.
    """
    g, r, h, s = _wide(cotangents[0]), _wide(cotangents[2]), _wide(halting), _wide(states)
    p, last, _ = _weights(h, epsilon)
    before = np.arange(h.shape[-1]) < last[..., None]
    final = np.take_along_axis(s, last[..., None, None], axis=-2)
    rise = np.where(before[..., None], s, final) - final
    dh = np.where(before, (rise * g[..., None, :]).sum(axis=-1) - r[..., None], np.zeros((), h.dtype))
    return dh.astype(halting.dtype), (p[..., None] * g[..., None, :]).astype(states.dtype)


def act_loop(step: Step, state: NDArray, *, max_steps: int, epsilon: float = 0.01) -> Halted:
    """Steps until every position has halted, with a running mean.

    step(state[..., d], n) -> (state, h[...]), state[..., d] -> (out[..., d], steps[...], remainder[...])
    as adaptive_computation_time on the states that the step makes, n = 1, 2, ... max_steps
    Source: Graves 2016, section 2.
    """
    wide, shape = _wide(state).dtype, state.shape[:-1]
    out, total, left = np.zeros(state.shape, wide), np.zeros(shape, wide), np.ones(shape, wide)
    steps, running = np.zeros(shape, np.int64), np.ones(shape, bool)
    for n in range(1, max_steps + 1):
        state, h = step(state, n)
        after = np.where(running, total + _wide(h), total)
        stops = running & ((after >= 1 - epsilon) | (n == max_steps))
        left = np.where(stops, 1 - total, left)
        p = np.where(stops, left, _wide(h))
        out = np.where(running[..., None], out + p[..., None] * _wide(state), out)
        steps, total, running = steps + running, after, running & ~stops
        if not running.any():
            break
    return out.astype(state.dtype), steps, left.astype(state.dtype)


def _weights(h: NDArray, epsilon: float) -> Halted:
    """The weight of each step, the place of the last one, and what was left for it."""
    total = np.cumsum(h, axis=-1)
    stops = total >= 1 - epsilon
    stops[..., -1] = True
    last = stops.argmax(axis=-1)
    places = np.arange(h.shape[-1])
    before = np.concatenate([np.zeros_like(total[..., :1]), total[..., :-1]], axis=-1)
    left = 1 - np.take_along_axis(before, last[..., None], axis=-1)
    p = np.where(places < last[..., None], h, np.where(places == last[..., None], left, np.zeros((), h.dtype)))
    return p, last, left[..., 0]


def _by_position(halting: NDArray, states: NDArray, *, epsilon: float = 0.01) -> Halted:
    """adaptive_computation_time of one position after the other, each until it halts; what is left is counted down."""
    h, s = _wide(halting), _wide(states)
    out, left = np.zeros((*h.shape[:-1], s.shape[-1]), s.dtype), np.zeros(h.shape[:-1], h.dtype)
    steps = np.zeros(h.shape[:-1], np.int64)
    for row in np.ndindex(h.shape[:-1]):
        steps[row], left[row] = _accumulate(h[row], s[row], out[row], epsilon)
    return out.astype(states.dtype), steps, left.astype(halting.dtype)


def _accumulate(h: NDArray, s: NDArray, out: NDArray, epsilon: float) -> tuple[int, Any]:
    """Add the mean of one position's states to out[d]; the number of steps and the remainder."""
    left = h.dtype.type(1)
    for n in range(len(h) - 1):
        if left - h[n] <= epsilon:
            out += left * s[n]
            return n + 1, left
        out += h[n] * s[n]
        left = left - h[n]
    out += left * s[-1]
    return len(h), left


def _loop_by_position(step: Step, state: NDArray, *, max_steps: int, epsilon: float = 0.01) -> Halted:
    """act_loop that records all steps first and then looks at one position after the other."""
    states, halting = [], []
    for n in range(1, max_steps + 1):
        state, h = step(state, n)
        states.append(state)
        halting.append(h)
    return _by_position(np.stack(halting, axis=-1), np.stack(states, axis=-2), epsilon=epsilon)


def _wide(x: NDArray) -> NDArray:
    return x if x.dtype == np.float64 else x.astype(np.float32)


VARIANTS = {
    "act": {
        "adaptive_computation_time": adaptive_computation_time,
        "adaptive_computation_time_vjp": adaptive_computation_time_vjp,
        "act_loop": act_loop,
    },
    "act_by_position": {"adaptive_computation_time": _by_position, "act_loop": _loop_by_position},
}
