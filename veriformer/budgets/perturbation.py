"""Budgets of composites and of all gradients: the reference evaluated several times over, each rounding made at random.

Chaining closed-form bounds loses a factor of 100 and more per layer; running the reference with errors in
it keeps their correlations, and autograd carries the same through to every gradient. All runs are one:
tensors hold every version of themselves (`replicas`), a dispatch mode sees each operation, forward and
backward (`rounding`), so that the reference is not touched, not even where kernels in use compute a
softmax or a norm in another way (`roles`).

Calibrated by `python benchmarks/studies/calibrate.py --seeds 80 --first 5000 --table reports/calibration.md` on
adversarial data: 17 280 results and gradients of correct 32 and 64-bit kernels need a factor of at most 2.9,
and 11 735 in 16 bits one of 5.2, but for one, an unfused bfloat16 attention with scores so large that their
rounding alone decides which key wins; the runs did not see it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from veriformer.budgets.bound import Array, Bound, added
from veriformer.budgets.precision import Precision

RUNS = 16
FACTOR, FACTOR_LOW = 4.0, 6.0
"""Budget in units of the deviations seen; the second one for gradients in 16 bits."""
_SINGLE = 2.0**-24
SEEN = 0.375
"""The largest deviation counts like so many times itself: jumps (relu) that few runs see are allowed."""
MOST = 3.0
"""What the other elements of a row may add is so many times an element's own deviation: a large channel says
nothing of a small one, but 16 runs may all be too good to one element."""


def perturbed(
    function: Callable[[Mapping[str, Any]], Any],
    arrays: Mapping[str, Array],
    precision: Precision,
    *,
    cotangents: Sequence[Array | None] | None = None,
    wrt: Sequence[str] = (),
    runs: int = RUNS,
    factor: float | None = None,
    row_sums: Mapping[str, float] = MappingProxyType({}),
) -> tuple[tuple[Bound, ...], dict[str, Bound]]:
    """Values and error budgets of a function's results, and of the gradients of Σ cotangent · result.

    function: takes a mapping from name to torch tensor, float64 or as in `arrays`, and returns a tensor
    or a tuple of tensors. arrays: float64, boolean or integer. cotangents: one for each result, None
    for a result that does not count; all None: no gradients. wrt: names of arrays to differentiate by.
    -> a Bound for each result, a Bound for each name in wrt. factor: None takes FACTOR or FACTOR_LOW. row_sums: the
    unit roundoff in which the gradient of a name may be summed over rows, where that is none of the precision's.

        y_r = function with every inexact step moved by ±(its rounding error at most), r = 1 … runs
        d² = mean_r |y_r - y|²,   m² = mean d² over the last axis, at most (3 d)²
        E = factor max(sqrt((d² + m²)/2), 3/8 max_r |y_r - y|)

    and for a gradient that is a sum over n rows held in a unit of its own, E + unit n Σ |part|.

    Source: Stott Parker 1997 (Monte Carlo Arithmetic) for the idea; the sizes of the roundings are those of
    `veriformer.budgets.rounding`.
    Edges: a gradient that does not exist is 0. Where y is 0 and no run moves it (hidden keys) nothing but
    underflow is allowed. inf (undetermined) where a run is not finite. Memory: runs + 1 times the reference's.
    Raises ImportError without torch, NotImplementedError for an operation that has no rounding rule.
    """
    try:
        import torch
    except ImportError as error:
        raise ImportError("budgets of gradients and composites need torch; install veriformer[torch]") from error
    from veriformer.budgets.rounding import Rounding

    mode = Rounding(precision, runs)
    tensors = {name: _tensor(array) for name, array in arrays.items()}
    for name in wrt:
        tensors[name].requires_grad_()
    with mode, torch.set_grad_enabled(bool(wrt)):
        found = function(tensors)
        results = (found,) if isinstance(found, torch.Tensor) else tuple(found)
        gradients = _gradients(mode, results, cotangents, [tensors[name] for name in wrt])
    bounds = tuple(_bound(_rows(mode, y), precision, factor or FACTOR) for y in results)
    factor = factor or (FACTOR_LOW if precision.u_out > _SINGLE else FACTOR)
    named = dict(zip(wrt, gradients, strict=True))
    rows = {n: np.zeros((1, *tensors[n].shape)) if g is None else _rows(mode, g) for n, g in named.items()}
    ready = {name: _bound(moved, precision, factor) for name, moved in rows.items()}
    return bounds, ready | {n: _summed(ready[n], named[n], unit) for n, unit in row_sums.items() if n in ready}


def _tensor(array: Array) -> Any:
    """An array as all versions of it, which are still equal; integers and booleans as they are."""
    import torch

    from veriformer.budgets.replicas import Replicas

    tensor = torch.from_numpy(np.array(array, order="C"))
    return Replicas(tensor[None]) if tensor.is_floating_point() else tensor


def _gradients(mode: Any, results: Sequence[Any], cotangents: Sequence[Array | None] | None, wrt: list[Any]) -> Any:
    """The gradients by autograd; None where the results do not depend on an array."""
    import torch

    given = cotangents or [None] * len(results)
    pairs = [(y, c) for y, c in zip(results, given, strict=True) if c is not None and y.requires_grad]
    if not pairs or not wrt:
        return [None] * len(wrt)
    mode.backward = True
    return torch.autograd.grad([y for y, _ in pairs], wrt, [_tensor(c) for _, c in pairs], allow_unused=True)


def _rows(mode: Any, y: Any) -> Array:
    """All versions of a result, without the storage rounding that every result is granted."""
    from veriformer.budgets.replicas import Replicas

    if not isinstance(y, Replicas):
        rows: Array = y.detach()[None].numpy().astype(np.float64)
        return rows
    mode.settle(y, store=False)
    rows = y.rows.numpy().astype(np.float64)
    return rows


def _summed(bound: Bound, gradient: Any, unit: float) -> Bound:
    """The bound of a gradient that may be summed over rows in another unit roundoff; growth is the worst case's.

    Source: Higham 2002 (Accuracy and Stability of Numerical Algorithms), section 4.2.
    """
    leading = getattr(gradient, "leading", None)
    if leading is None:
        return bound
    error = unit * leading[0].numpy()
    return Bound(bound.value, bound.allowed + error, {**bound.terms, "sums over rows": error})


def _bound(rows: Array, p: Precision, factor: float) -> Bound:
    """The budget of one result from its versions; row 0 is the value."""
    value, shifts = rows[0], rows[1:] - rows[:1]
    with np.errstate(all="ignore"):
        still = (rows == value).all(axis=0) | np.isnan(rows).all(axis=0)
        spread = np.where(still, 0.0, _rms(shifts, 0))
        pooled = _rms(np.where(np.isfinite(spread), spread, 0.0), -1) if value.ndim else spread
        pooled = np.where(still, pooled, np.minimum(pooled, MOST * spread))
        moved = _rms(np.stack([spread, np.where(still & (value == 0), 0.0, pooled)]), 0)
        moved = factor * np.maximum(moved, SEEN * np.abs(shifts).max(axis=0, initial=0.0))
        terms = {"roundings": moved, "output": p.u_out * np.abs(value) + p.eta}
        terms = {name: np.where(np.isfinite(value), term, 0.0) for name, term in terms.items()}
        allowed = added(terms)
    return Bound(value, np.where(np.isnan(allowed), np.inf, allowed), terms)


def _rms(shifts: Array, axis: int) -> Array:
    """Root of the mean square along an axis, which is dropped if it is the first; squares must not underflow."""
    largest = np.abs(shifts).max(axis=axis, keepdims=True, initial=0.0)
    scale = np.where(largest > 0, largest, 1.0)
    squares = ((shifts / scale) ** 2).sum(axis=axis, keepdims=True) / max(shifts.shape[axis], 1)
    found: Array = scale * np.sqrt(squares)
    return found[0] if axis == 0 else found
