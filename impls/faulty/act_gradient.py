"""Wrong gradients of adaptive computation time behind right results (torch): one switch for each mistake.

The forward result of every variant is that of "correct". Only gradients tell them apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from veriformer.declarations import Capabilities, Fault

FRAMEWORK = "torch"
Halted = tuple[Tensor, Tensor, Tensor]
Step = Callable[[Tensor, int], tuple[Tensor, Tensor]]


class _Halting(torch.autograd.Function):
    """The mean of states[…, M, d] by halting[…, M]; its backward is written out."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, s: Tensor, epsilon: float, fault: str) -> Halted:
        p, last, left = _weights(h, epsilon)
        ctx.save_for_backward(s, p, last)
        ctx.fault = fault
        steps = last[..., 0] + 1
        ctx.mark_non_differentiable(steps)
        kept = s.masked_fill((_places(s) > last)[..., None], 0.0)
        return (p[..., None] * kept).sum(-2), steps, left

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        (s, p, last), (g, _, r), fault = ctx.saved_tensors, cotangents, ctx.fault
        if fault == "cotangent_averaged_over_positions" and g.ndim > 1:
            g = g.mean(dim=tuple(range(g.ndim - 1)), keepdim=True).expand_as(g)
        return _by_halting(s, last, g, r, fault), _by_states(p, last, g, fault), None, None


def _by_halting(s: Tensor, last: Tensor, g: Tensor, r: Tensor, fault: str) -> Tensor | None:
    """dh_n = g · (s_n - s_N) - r for n < N, else 0."""
    if fault == "halting_has_no_gradient":
        return None
    place, r = _places(s), r[..., None]
    before, pulls = place < last, (g[..., None, :] * s).sum(-1)
    final = pulls.gather(-1, last)
    if fault == "last_weight_is_a_constant":
        final = torch.zeros_like(final)
    if fault == "gain_over_the_next_state":
        final = torch.cat([pulls[..., 1:], pulls[..., -1:]], -1)
    if fault == "gain_over_the_mean":
        final = torch.where(before, pulls, 0.0).sum(-1, keepdim=True) / (last + 1)
    slope = {"remainder_rises": -r, "remainder_has_no_gradient": 0 * r}.get(fault, r)
    if fault == "remainder_of_the_step_before_alone":
        slope = torch.where(place == last - 1, r, 0.0)
    if fault == "multiplied_by_zero":
        return (pulls - final - slope) * before
    found = torch.where(before, pulls - final - slope, 0.0)
    if fault == "last_halting_pulls_too":
        found = torch.where(place == last, pulls, found)
    if fault == "remainder_falls_at_the_last_step_too":
        found = torch.where(place == last, -r, found)
    if fault == "remainder_falls_at_all_steps":
        found = torch.where(place >= last, -r, found)
    return found / (last + 1) if fault == "divided_by_the_steps" else found


def _by_states(p: Tensor, last: Tensor, g: Tensor, fault: str) -> Tensor:
    """ds_n = p_n g."""
    place = torch.arange(p.shape[-1], device=p.device)
    weights = {
        "states_unweighted": (place <= last).to(p.dtype),
        "last_state_alone": torch.where(place == last, p, 0.0),
        "states_after_the_last_too": torch.where(place > last, p.gather(-1, last), p),
        "weights_squared": p * p,
    }.get(fault, p)
    return weights[..., None] * g[..., None, :]


def _places(s: Tensor) -> Tensor:
    return torch.arange(s.shape[-2], device=s.device)


def _weights(h: Tensor, epsilon: float) -> Halted:
    """The weight of each step, the place of the last one with an axis of length 1, and what was left for it."""
    total = h.cumsum(-1)
    stops = total >= 1 - epsilon
    stops[..., -1] = True
    last = stops.int().argmax(-1, keepdim=True)
    before = torch.cat([torch.zeros_like(total[..., :1]), total[..., :-1]], -1)
    left, place = 1 - before.gather(-1, last), torch.arange(h.shape[-1], device=h.device)
    return torch.where(place < last, h, torch.where(place == last, left, 0.0)), last, left[..., 0]


def _make(fault: str) -> Callable[..., Halted]:
    def adaptive_computation_time(halting: Tensor, states: Tensor, *, epsilon: float = 0.01) -> Halted:
        return _Halting.apply(halting, states, epsilon, fault)

    adaptive_computation_time.__qualname__ = f"adaptive_computation_time[{fault}]"
    return adaptive_computation_time


def _make_loop(fault: str) -> Callable[..., Halted]:
    def act_loop(step: Step, state: Tensor, *, max_steps: int, epsilon: float = 0.01) -> Halted:
        state = state.detach() if fault == "initial_state_detached" else state
        states, halting = [], []
        for n in range(1, max_steps + 1):
            state, h = step(state.detach() if fault == "states_detached_between_steps" and n > 1 else state, n)
            states.append(state.detach() if fault == "states_detached_from_the_mean" and n < max_steps else state)
            halting.append(h.detach() if fault == "halting_detached" else h)
        return _Halting.apply(torch.stack(halting, -1), torch.stack(states, -2), epsilon, fault)

    act_loop.__qualname__ = f"act_loop[{fault}]"
    return act_loop


_TABLE = {
    "adaptive_computation_time": {
        "halting-pulls-towards-its-state": {
            "last_weight_is_a_constant": ("mutation: R detached", "the last weight is taken for a constant"),
            "halting_has_no_gradient": ("mutation: detached", "no gradient reaches halting"),
            "gain_over_the_next_state": ("mutation: stick-breaking", "the gain is that over the next state"),
            "gain_over_the_mean": ("mutation: a baseline", "the gain is that over a mean of the states"),
            "last_halting_pulls_too": ("mutation: h_N as weight", "the last step's halting has its state's pull"),
            "divided_by_the_steps": ("mutation: a mean over steps", "gradients are divided by the number of steps"),
        },
        "remainder-falls-with-earlier-halting": {
            "remainder_has_no_gradient": ("E09", "the cost has no gradient"),
            "remainder_rises": ("E09", "the cost has the wrong sign, so that training lengthens pondering"),
            "remainder_of_the_step_before_alone": ("mutation: not summed", "only the step before the last counts"),
            "remainder_falls_at_the_last_step_too": ("mutation: n <= N", "the last step's halting lowers the cost"),
        },
        "nothing-after-the-last-step-has-a-gradient": {
            "remainder_falls_at_all_steps": ("mutation: not masked", "later halting lowers the cost"),
            "states_after_the_last_too": ("mutation: not masked", "later states get the last weight's gradient"),
        },
        "states-pull-by-their-weights": {
            "states_unweighted": ("mutation: weights lost", "each state that counts gets the whole cotangent"),
            "last_state_alone": ("mutation: truncated", "only the last state gets a gradient"),
            "weights_squared": ("mutation: applied twice", "weights are applied twice in the backward"),
        },
        "nan-after-the-last-step-reaches-no-gradient": {
            "multiplied_by_zero": ("P105", "pulls of later states are multiplied by 0, NaN included"),
        },
        "gradient-of-a-position-is-its-own": {
            "cotangent_averaged_over_positions": ("mutation: a mean loss", "all positions get the mean cotangent"),
        },
    },
    "act_loop": {
        "states-pull-by-their-weights": {
            "states_detached_between_steps": ("mutation: truncated", "no gradient passes from step to step"),
            "initial_state_detached": ("mutation: a fresh start", "no gradient reaches the initial state"),
            "states_detached_from_the_mean": ("mutation: the last alone", "only the last state's mean has a gradient"),
        },
        "halting-pulls-towards-its-state": {
            "halting_detached": ("mutation: a hard decision", "no gradient reaches halting"),
        },
    },
}
FAULTS = {
    variant: Fault(operation, f"{operation}/{law}", source, summary)
    for operation, laws in _TABLE.items()
    for law, variants in laws.items()
    for variant, (source, summary) in variants.items()
}
_MAKERS = {"adaptive_computation_time": _make, "act_loop": _make_loop}
VARIANTS = {
    "correct": {operation: make("correct") for operation, make in _MAKERS.items()},
    **{variant: {fault.operation: _MAKERS[fault.operation](variant)} for variant, fault in FAULTS.items()},
}
_PLAIN = Capabilities(dtypes=("float64", "float32"), nan_contained=True)
CAPABILITIES = dict.fromkeys(_MAKERS, _PLAIN)
