"""Adaptive computation time: a unit of its own decides how many steps a state is computed for.

Conventions:
- Steps count from 1 to M. s^n is the state after step n, h_n in [0, 1] what the halting unit says of it, and
  H_n = h_1 + … + h_n, H_0 = 0.
- The step count N is a constant in the gradient. So d(N + R)/d h_n is -1 for n < N and 0 at N, and with the states
  fixed d out/d h_n is s^n - s^N for n < N and 0 at N.
- What halting and states hold after step N is selected away, not multiplied by 0: NaN there does not matter.
"""

from __future__ import annotations

from typing import Any

from array_api_compat import array_namespace, device


def adaptive_computation_time(
    halting: Any, states: Any, *, epsilon: float = 0.01, comparison: str = "at_least"
) -> tuple[Any, Any, Any]:
    """The mean of the states up to the halting step, weighted by their halting probabilities.

    halting[…,M] in [0, 1], states[…,M,d] -> out[…,d], N[…] int64, R[…].

        out = p_1 s^1 + … + p_N s^N,   p, N and R those of `halting_weights`

    Source: Graves 2016 (Adaptive Computation Time), section 2; P97 to P108.
    Edges: M = 1 gives s^1; halting 0 everywhere gives s^M; N = 1 gives s^1 exactly.
    Raises ValueError as `halting_weights` does and for states that are not one for each halting probability.
    """
    if states.ndim != halting.ndim + 1 or tuple(states.shape[:-1]) != tuple(halting.shape):
        raise ValueError(
            f"adaptive_computation_time: states: got shape {tuple(states.shape)}, wanted {tuple(halting.shape)} "
            "and an axis more, a state for each entry of halting"
        )
    weights, steps, remainder = halting_weights(halting, epsilon=epsilon, comparison=comparison)
    xp = array_namespace(halting, states)
    counts = _numbers(halting) <= steps[..., None]
    states = xp.where(counts[..., None], states, 0.0)
    return xp.sum(weights[..., None] * states, axis=-2), steps, remainder


def halting_weights(halting: Any, *, epsilon: float = 0.01, comparison: str = "at_least") -> tuple[Any, Any, Any]:
    """How much each step counts, how many there are, and what is left for the last of them.

    halting[…,M] in [0, 1] -> p[…,M], N[…] int64, R[…]; p >= 0 sums to 1.

        N = min { n : H_n >= 1 - epsilon  or  n = M },   R = 1 - H_(N-1)
        p_n = h_n for n < N,   p_N = R,   p_n = 0 for n > N

    comparison = "above": H_n > 1 - epsilon, so that a sum exactly on the threshold goes on.
    Source: Graves 2016 (Adaptive Computation Time), section 2; P97, P100.
    Edges: N = 1 has R = 1, whatever h_1; a forced stop at M has R > epsilon.
    Raises ValueError for M = 0, epsilon outside [0, 1), another comparison.
    """
    _check(halting, epsilon, comparison)
    xp, n = array_namespace(halting), _numbers(halting)
    sums = xp.cumulative_sum(halting, axis=-1, include_initial=True)
    before, total = sums[..., :-1], sums[..., 1:]
    reached = total > 1 - epsilon if comparison == "above" else total >= 1 - epsilon
    stops = reached | (n == halting.shape[-1])
    steps = 1 + xp.argmax(xp.astype(stops, xp.int64), axis=-1)
    last = steps[..., None]
    remainder = xp.sum(xp.where(n == last, 1 - before, 0.0), axis=-1)
    weights = xp.where(n < last, halting, xp.where(n == last, 1 - before, 0.0))
    return weights, steps, remainder


def act_loop(
    step: Any,
    state: Any,
    *,
    max_steps: int,
    epsilon: float = 0.01,
    comparison: str = "at_least",
) -> tuple[Any, Any, Any]:
    """One step, repeated on the state it made, and the mean that adaptive computation time takes of the states.

    step(s^(n-1)[…,d], n) -> s^n[…,d], h_n[…]; state: s^0[…,d] -> out[…,d], N[…] int64, R[…].

        s^n, h_n = step(s^(n-1), n),   n = 1 … M = max_steps,   and then `adaptive_computation_time`

    All M steps are made; those after N do not count, so a loop that stops once every row has halted gives the same.
    Source: Graves 2016 (Adaptive Computation Time), sections 2 and 2.1 (the limit M); P105.
    Edges: max_steps = 1 gives s^1.
    Raises ValueError for max_steps < 1 and as `adaptive_computation_time` does.
    """
    if max_steps < 1:
        raise ValueError(f"act_loop: max_steps: got {max_steps}, wanted at least 1")
    xp, states, halting = array_namespace(state), [], []
    for n in range(1, max_steps + 1):
        state, h = step(state, n)
        states.append(state)
        halting.append(h)
    return adaptive_computation_time(
        xp.stack(halting, axis=-1), xp.stack(states, axis=-2), epsilon=epsilon, comparison=comparison
    )


def recurrent_act(
    cell: Any,
    x: Any,
    state: Any,
    *,
    max_steps: int,
    epsilon: float = 0.01,
    comparison: str = "at_least",
) -> tuple[Any, Any, Any, Any]:
    """A recurrent network that may think several steps about each input of a sequence.

    cell(s[…,d], x[…,i+1]) -> s[…,d], y[…,o], h[…]; x[…,T,i], state: s_0[…,d]
    -> y[…,T,o], s_T[…,d], N[…,T] int64, R[…,T].

        s_t^n, y_t^n, h_t^n = cell(s_t^(n-1), [x_t; 1 if n = 1 else 0]),   s_t^0 = s_(t-1)
        s_t = p_1 s_t^1 + … + p_N s_t^N,   y_t likewise

    The flag tells the first look at an input from the later ones; the averaged state is what time goes on with.
    Source: Graves 2016 (Adaptive Computation Time), section 2; P108c.
    Edges: halting 1 at every first step gives the plain recurrent network.
    Raises ValueError for a sequence of no inputs and as `act_loop` does.
    """
    if x.shape[-2] == 0:
        raise ValueError(f"recurrent_act: x: got shape {tuple(x.shape)}, wanted at least one input, T >= 1")
    xp, width, made = array_namespace(x, state), state.shape[-1], []
    for t in range(x.shape[-2]):

        def think(both: Any, n: int, x_t: Any = x[..., t, :]) -> tuple[Any, Any]:
            flag = xp.full_like(x_t[..., :1], 1.0 if n == 1 else 0.0)
            s, y, h = cell(both[..., :width], xp.concat([x_t, flag], axis=-1))
            return xp.concat([s, y], axis=-1), h

        both, steps, remainder = act_loop(think, state, max_steps=max_steps, epsilon=epsilon, comparison=comparison)
        state = both[..., :width]
        made.append((both[..., width:], steps, remainder))
    y, steps, remainder = zip(*made, strict=True)
    return xp.stack(y, axis=-2), state, xp.stack(steps, axis=-1), xp.stack(remainder, axis=-1)


def ponder_cost(steps: Any, remainder: Any, *, mask: Any = None, tau: float = 1.0, reduction: str = "sum") -> Any:
    """What computing costs, so that training may weigh it against the task.

    N[…] int64, R[…], mask[…] bool, True = a real position -> cost, a scalar.

        cost = tau · sum over the real positions of N + R;   reduction = "mean": divided by how many they are

    Source: Graves 2016 (Adaptive Computation Time), section 2; P101, P106.
    Edges: without real positions it is 0; what steps and remainder hold at others does not matter.
    Raises ValueError for shapes that differ or another reduction.
    """
    for name, array in (("remainder", remainder), ("mask", mask)):
        if array is not None and tuple(array.shape) != tuple(steps.shape):
            raise ValueError(
                f"ponder_cost: {name}: got shape {tuple(array.shape)}, wanted {tuple(steps.shape)}, that of steps"
            )
    if reduction not in ("sum", "mean"):
        raise ValueError(f"ponder_cost: reduction: got {reduction!r}, wanted 'sum' or 'mean'")
    xp = array_namespace(remainder)
    real = steps == steps if mask is None else mask
    cost = tau * xp.sum(xp.where(real, xp.astype(steps, remainder.dtype) + remainder, 0.0))
    if reduction == "sum":
        return cost
    return cost / max(int(xp.sum(xp.astype(real, xp.int64))), 1)


def _numbers(halting: Any) -> Any:
    """1, 2, … M, the numbers of the steps of halting[…,M]."""
    return array_namespace(halting).arange(1, halting.shape[-1] + 1, device=device(halting))


def _check(halting: Any, epsilon: float, comparison: str) -> None:
    """ValueError for what has no halting step. That halting lies in [0, 1] is not looked at: a sigmoid gives it."""
    if halting.ndim == 0 or halting.shape[-1] == 0:
        raise ValueError(f"act: halting: got shape {tuple(halting.shape)}, wanted at least one step, M >= 1")
    if not 0 <= epsilon < 1:
        raise ValueError(f"act: epsilon: got {epsilon}, wanted a number in [0, 1)")
    if comparison not in ("at_least", "above"):
        raise ValueError(f"act: comparison: got {comparison!r}, wanted 'at_least' or 'above'")
