"""Adaptive computation time in torch: by cumulative sums, by a masked loop, and by a loop over the rows that still run.

All compute in the dtype they are given; the gradient is autograd's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from veriformer.declarations import Capabilities

FRAMEWORK = "torch"
Halted = tuple[Tensor, Tensor, Tensor]
Step = Callable[[Tensor, int], tuple[Tensor, Tensor]]
_CONTAINED = Capabilities(nan_contained=True)


def adaptive_computation_time(halting: Tensor, states: Tensor, *, epsilon: float = 0.01) -> Halted:
    """Each position's states weighted by halting until it adds up to 1 - epsilon.

    halting[..., M], states[..., M, d] -> (out[..., d], steps[...], remainder[...])
    steps N is the first with h_1 + ... + h_N >= 1 - epsilon, at most M; out = sum of h_n s_n up to N - 1, + R s_N
    with R = 1 - (h_1 + ... + h_(N-1))
    Source: Graves 2016, section 2. States after step N are taken out before they are multiplied.
    """
    total = halting.cumsum(dim=-1)
    stops = total >= 1 - epsilon
    stops[..., -1] = True
    last = stops.int().argmax(dim=-1, keepdim=True)
    before = torch.cat([torch.zeros_like(total[..., :1]), total[..., :-1]], dim=-1)
    remainder = 1 - before.gather(-1, last)
    place = torch.arange(halting.shape[-1], device=halting.device)
    weights = torch.where(place < last, halting, torch.where(place == last, remainder, 0.0))
    kept = states.masked_fill((place > last)[..., None], 0.0)
    return (weights[..., None] * kept).sum(dim=-2), (last + 1)[..., 0], remainder[..., 0]


def act_loop(step: Step, state: Tensor, *, max_steps: int, epsilon: float = 0.01) -> Halted:
    """Every step made and recorded, then their mean by cumulative sums.

    step(state[..., d], n) -> (state, h[...]), state[..., d] -> (out[..., d], steps[...], remainder[...])
    as adaptive_computation_time on the states that the step makes, n = 1, 2, ... max_steps
    Source: Graves 2016, section 2.
    """
    made = []
    for n in range(1, max_steps + 1):
        made.append(step(state, n))
        state = made[-1][0]
    states, halting = zip(*made, strict=True)
    return adaptive_computation_time(torch.stack(halting, dim=-1), torch.stack(states, dim=-2), epsilon=epsilon)


def _masked(halting: Tensor, states: Tensor, *, epsilon: float = 0.01) -> Halted:
    """adaptive_computation_time as a loop in which positions that have halted are masked."""

    def step(_: Tensor, n: int) -> tuple[Tensor, Tensor]:
        return states[..., n - 1, :], halting[..., n - 1]

    return _masked_loop(step, torch.zeros_like(states[..., 0, :]), max_steps=halting.shape[-1], epsilon=epsilon)


def _masked_loop(step: Step, state: Tensor, *, max_steps: int, epsilon: float = 0.01) -> Halted:
    """act_loop with a running mean that positions stop adding to; it ends with the last of them."""
    mean, total = torch.zeros_like(state), torch.zeros_like(state[..., 0])
    remainder = torch.ones_like(total)
    steps = torch.zeros(total.shape, dtype=torch.int64, device=state.device)
    running = torch.ones(total.shape, dtype=torch.bool, device=state.device)
    for n in range(1, max_steps + 1):
        state, h = step(state, n)
        after = total + h
        stops = running & (after >= 1 - epsilon) if n < max_steps else running
        remainder = torch.where(stops, 1 - total, remainder)
        weight = torch.where(stops, remainder, h)
        seen = state.masked_fill(~running[..., None], 0.0)
        mean = torch.where(running[..., None], mean + weight[..., None] * seen, mean)
        total, steps, running = torch.where(running, after, total), steps + running, running & ~stops
        if not running.any():
            break
    return mean, steps, remainder


def _compacted(halting: Tensor, states: Tensor, *, epsilon: float = 0.01) -> Halted:
    """adaptive_computation_time that drops rows as they halt and goes on with the others alone."""
    shape, (size, width) = halting.shape[:-1], states.shape[-2:]
    h, s = halting.reshape(-1, size), states.reshape(-1, size, width)
    rows, total, mean = torch.arange(len(h), device=h.device), h.new_zeros(len(h)), s.new_zeros(len(h), width)
    places, found = [], []
    for n in range(size):
        after = total + h[rows, n]
        stops = after >= 1 - epsilon if n < size - 1 else torch.ones_like(after, dtype=torch.bool)
        left, ends, goes = 1 - total[stops], rows[stops], ~stops
        places.append(ends)
        found.append((mean[stops] + left[:, None] * s[ends, n], torch.full_like(ends, n + 1), left))
        rows = rows[goes]
        mean, total = mean[goes] + h[rows, n, None] * s[rows, n], after[goes]
        if not len(rows):
            break
    order = torch.cat(places).argsort()
    mean, steps, left = (torch.cat(column)[order] for column in zip(*found, strict=True))
    return mean.reshape(*shape, width), steps.reshape(shape), left.reshape(shape)


VARIANTS = {
    "act": {"adaptive_computation_time": adaptive_computation_time, "act_loop": act_loop},
    "act_masked": {"adaptive_computation_time": _masked, "act_loop": _masked_loop},
    "act_compacted": {"adaptive_computation_time": _compacted},
}
CAPABILITIES = {variant: dict.fromkeys(operations, _CONTAINED) for variant, operations in VARIANTS.items()}
