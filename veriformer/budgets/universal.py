"""Budgets of the Universal Transformer: perturbation, and where roundings may choose how many steps are made.

The halting step is a discrete choice, and what one position chooses the others see. So where the sum of halting
probabilities of any position may lie on either side of 1 - epsilon, all results of its sequence are undetermined,
and so are the gradients that it takes part in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np

from veriformer.budgets.bound import Array, Bound, exact
from veriformer.budgets.perturbation import perturbed
from veriformer.budgets.precision import Precision


def universal_transformer(
    function: Callable[[Mapping[str, Any]], tuple[Any, Any, Any, Any]],
    arrays: Mapping[str, Array],
    precision: Precision,
    *,
    epsilon: float,
    cotangents: Sequence[Array | None] | None = None,
    wrt: Sequence[str] = (),
    row_sums: Mapping[str, float] = MappingProxyType({}),
) -> tuple[tuple[Bound, Bound, Bound], dict[str, Bound]]:
    """Values and budgets of the three results, and of the gradients of Σ cotangent · result, as `perturbed` gives them.

    function: takes a mapping from name to torch tensor, returns out[B,T,d], N[B,T], R[B,T] and the halting
    probabilities h[B,T,M]. wrt: names of arrays to differentiate by; "x" and "memory" have one row for each sequence.
    row_sums: as `perturbed` has it.

    N must be right, R = 1 where N = 1, and all three 0 where N = 0, at padding.
    Source: derived; P108.
    Edges: inf (undetermined) in sequences that are `undecided`, and in gradients of weights if there is any.
    Raises ImportError and NotImplementedError as `perturbed` does.
    """

    def followed(tensors: Mapping[str, Any]) -> tuple[Any, Any, Any, Any]:
        out, steps, remainder, halting = function(tensors)
        return out, steps, remainder, halting.cumsum(-1)

    given = None if cotangents is None else (*cotangents, None)
    (out, steps, remainder, sums), gradients = perturbed(
        followed, arrays, precision, cotangents=given, wrt=wrt, row_sums=row_sums
    )
    lost = undecided(sums, steps.value, epsilon, precision)
    remainder = replace(remainder, allowed=np.where(steps.value <= 1, 0.0, remainder.allowed))
    out = replace(out, allowed=np.where(steps.value[..., None] == 0, 0.0, out.allowed))
    results = tuple(_open(bound, lost) for bound in (out, exact(steps.value), remainder))
    any_lost = np.full(1, lost.any())
    opened = {n: _open(b, lost if n in ("x", "memory") else any_lost) for n, b in gradients.items()}
    return results, opened  # type: ignore[return-value]


def undecided(sums: Bound, steps: Array, epsilon: float, precision: Precision) -> Array:
    """In which sequences roundings may choose another halting step.

    sums: H[B,T,M] and its budget, steps: N[B,T] -> bool[B]

        |H_n - (1 - epsilon)| <= its budget + n e + u   for some position and n <= N, n < M

    n e is what another order of the sum may make, u, the roundoff of the coarsest dtype, what rounds the threshold.
    """
    n = np.arange(1, sums.value.shape[-1] + 1)
    decides = (n <= steps[..., None]) & (n < sums.value.shape[-1])
    margin = sums.allowed + n * precision.e + precision.coarsest
    found: Array = (decides & ~(np.abs(sums.value - (1 - epsilon)) > margin)).any((1, 2))
    return found


def _open(bound: Bound, lost: Array) -> Bound:
    """The bound with everything allowed in rows that are lost, one for each entry along the first axis, or in all."""
    return replace(bound, allowed=np.where(lost.reshape(-1, *(1,) * (bound.value.ndim - 1)), np.inf, bound.allowed))
