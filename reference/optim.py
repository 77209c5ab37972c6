"""What a training step does once the gradients are there: clip them, choose a rate, move the parameters.

Conventions:
- Steps of the optimiser count from 1, m and v start at 0; the state that a step needs is passed in and out.
- Rates and decay factors are Python numbers, and so is what is made of them alone.
"""

from __future__ import annotations

import math
from typing import Any

from array_api_compat import array_namespace


def adamw_step(
    param: Any,
    grad: Any,
    m: Any,
    v: Any,
    step: int,
    *,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decay: str = "decoupled",
    epsilon_place: str = "corrected",
) -> tuple[Any, Any, Any]:
    """One step of AdamW: parameters shrink a little, then move against the mean gradient over its root mean square.

    param[…], grad[…], m[…], v[…], step t from 1 -> (param, m, v), each like param.

        m = beta1 m + (1 - beta1) g,   v = beta2 v + (1 - beta2) g²
        param = param (1 - lr weight_decay) - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)

    decay: "decoupled" is the above; "coupled" is Adam with an L2 penalty: weight_decay param is added to g instead.
    epsilon_place: "corrected" is the above; "uncorrected" adds eps to sqrt(v) before its correction.
    Source: Loshchilov, Hutter 2019 (Decoupled Weight Decay Regularization), algorithm 2, with the schedule in lr;
    Kingma, Ba 2015 (Adam), algorithm 1, and section 2 for the other place of eps; P109-P113.
    Edges: at eps = 0 a gradient that was always 0 gives 0/0.
    Raises ValueError for arrays of several shapes, step below 1, lr, eps or weight_decay below 0 or infinite, a beta
    outside [0, 1), and an unknown decay or epsilon_place.
    """
    _check_step(param, grad, m, v, step, decay, epsilon_place)
    _check_rates(lr, beta1, beta2, eps, weight_decay)
    xp, coupled = array_namespace(param), decay == "coupled"
    g = grad + weight_decay * param if coupled else grad
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g**2
    correction1, correction2 = 1 - beta1**step, 1 - beta2**step
    if epsilon_place == "corrected":
        deviation = xp.sqrt(v / correction2) + eps
    else:
        deviation = (xp.sqrt(v) + eps) / correction2**0.5
    kept = param if coupled else param * (1 - lr * weight_decay)
    return kept - lr * (m / correction1) / deviation, m, v


def clip_by_global_norm(grads: list[Any], *, max_norm: float, plus: float = 0.0) -> list[Any]:
    """All gradients made shorter by one factor, so that together they are no longer than `max_norm`.

    grads: arrays of any shapes -> a list of arrays like them.

        g = g min(1, max_norm / (norm + plus)),   norm = sqrt(sum g²) over all entries of all arrays

    The entries are divided by the largest before they are squared. On paper that changes nothing; in floats it keeps
    the squares from overflowing.
    Source: Pascanu, Mikolov, Bengio 2013 (On the difficulty of training RNNs), algorithm 1; P115.
    Edges: norm 0 changes nothing, nor does an infinite max_norm; a NaN or an infinity anywhere gives NaN.
    Raises ValueError for a max_norm or plus below 0.
    """
    for name, value in (("max_norm", max_norm), ("plus", plus)):
        if not value >= 0:
            raise ValueError(f"clip_by_global_norm: {name}: got {value}, wanted a number >= 0")
    if not any(math.prod(g.shape) for g in grads):
        return list(grads)
    xp = array_namespace(*grads)
    entries = xp.concat([xp.reshape(g, (-1,)) for g in grads])
    peak = xp.max(xp.abs(entries))
    peak = xp.where(peak == 0, 1.0, peak)
    norm = peak * xp.sqrt(xp.sum((entries / peak) ** 2))
    longer = ~(norm + plus <= max_norm)  # so that NaN is, too
    factor = xp.where(longer, max_norm / xp.where(longer, norm + plus, 1.0), 1.0)
    return [g * factor for g in grads]


def noam_schedule(step: int, *, width: int, warmup: int) -> float:
    """The learning rate that rises linearly up to step `warmup` and then falls with the root of the step.

        rate = width^(-1/2) min(step^(-1/2), step warmup^(-3/2))

    Source: Vaswani et al. 2017 (Attention Is All You Need), section 5.3, equation 3; P114.
    Edges: step 0 gives 0.
    Raises ValueError for a step below 0, and for a width or warmup below 1.
    """
    for name, value, least in (("step", step, 0), ("width", width, 1), ("warmup", warmup, 1)):
        if value < least:
            raise ValueError(f"noam_schedule: {name}: got {value}, wanted at least {least}")
    if step == 0:
        return 0.0
    return float(width**-0.5 * min(step**-0.5, step * warmup**-1.5))


def _check_step(param: Any, grad: Any, m: Any, v: Any, step: int, decay: str, epsilon_place: str) -> None:
    """ValueError for arrays that would broadcast, a correction that would divide by 0, and unknown words."""
    for name, array in (("grad", grad), ("m", m), ("v", v)):
        if tuple(array.shape) != tuple(param.shape):
            raise ValueError(
                f"adamw_step: {name}: got shape {tuple(array.shape)}, wanted {tuple(param.shape)}, that of param"
            )
    if step < 1:
        raise ValueError(f"adamw_step: step: got {step}, wanted at least 1")
    if decay not in ("decoupled", "coupled"):
        raise ValueError(f"adamw_step: decay: got {decay!r}, wanted 'decoupled' or 'coupled'")
    if epsilon_place not in ("corrected", "uncorrected"):
        raise ValueError(f"adamw_step: epsilon_place: got {epsilon_place!r}, wanted 'corrected' or 'uncorrected'")


def _check_rates(lr: float, beta1: float, beta2: float, eps: float, weight_decay: float) -> None:
    """ValueError for rates that would walk uphill or never forget."""
    for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
        if not 0 <= value < math.inf:
            raise ValueError(f"adamw_step: {name}: got {value}, wanted a finite number >= 0")
    for name, value in (("beta1", beta1), ("beta2", beta2)):
        if not 0 <= value < 1:
            raise ValueError(f"adamw_step: {name}: got {value}, wanted a number in [0, 1)")
