"""Probabilistic halting, PonderNet's alternative to adaptive computation time: a distribution over the steps.

Conventions:
- lambda_n in [0, 1] is the probability of halting at step n if no earlier step has; p_n that of halting there at all.
- The last step halts for sure, so p sums to 1. A loss is an average over p of the losses of each step, Σ p_n L_n.
"""

from __future__ import annotations

import math
from typing import Any

from array_api_compat import array_namespace, device


def stick_breaking(halting: Any) -> Any:
    """The probability of halting at each step.

    halting: lambda[…,M] -> p[…,M], which sums to 1.

        p_n = lambda_n (1 - lambda_1) … (1 - lambda_(n-1)),   lambda_M = 1, whatever is given

    Source: Banino, Balaguer, Blundell 2021 (PonderNet), section 2; P108b.
    Edges: M = 1 gives 1.
    Raises ValueError for M = 0.
    """
    if halting.ndim == 0 or halting.shape[-1] == 0:
        raise ValueError(f"stick_breaking: halting: got shape {tuple(halting.shape)}, wanted at least one step, M >= 1")
    xp, p = array_namespace(halting), []
    left = xp.ones_like(halting[..., 0])
    for n in range(halting.shape[-1] - 1):
        p.append(left * halting[..., n])
        left = left * (1 - halting[..., n])
    return xp.stack([*p, left], axis=-1)


def geometric_prior(rate: float, steps: int, *, like: Any) -> Any:
    """The geometric distribution, cut off after so many steps.

    -> g[M], M = steps, of the dtype and device of `like`.

        g_n = (1 - rate)^(n-1) / Σ_m (1 - rate)^(m-1)

    Source: Banino, Balaguer, Blundell 2021 (PonderNet), section 2; P108b.
    Edges: rate 1 gives the first step everything.
    Raises ValueError for a rate outside (0, 1] or steps < 1.
    """
    if not 0 < rate <= 1:
        raise ValueError(f"geometric_prior: rate: got {rate}, wanted a number in (0, 1]")
    if steps < 1:
        raise ValueError(f"geometric_prior: steps: got {steps}, wanted at least 1")
    xp = array_namespace(like)
    shares = [(1 - rate) ** n for n in range(steps)]
    return xp.asarray(shares, dtype=like.dtype, device=device(like)) / math.fsum(shares)


def divergence(p: Any, prior: Any) -> Any:
    """How much p costs that departs from the prior: the Kullback-Leibler divergence KL(p || g).

    p[…,M], prior: g[M] or like p -> […].

        KL = Σ_n p_n (log p_n - log g_n),   0 log 0 = 0

    Source: Banino, Balaguer, Blundell 2021 (PonderNet), section 2; P108b.
    Edges: 0 at p = g; a step that p never takes counts nothing; inf (and NumPy warns) for one that only g never takes.
    Raises ValueError for a prior of another number of steps.
    """
    if prior.shape[-1] != p.shape[-1]:
        raise ValueError(f"divergence: prior: got {prior.shape[-1]} steps, wanted {p.shape[-1]}, those of p")
    xp, taken = array_namespace(p), p > 0
    logs = xp.log(xp.where(taken, p, 1.0)) - xp.log(xp.where(taken, prior, 1.0))
    return xp.sum(xp.where(taken, p * logs, 0.0), axis=-1)
