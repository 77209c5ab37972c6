"""Wrong clipping by the global norm: one correct implementation with one switch for each mistake."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from veriformer.declarations import Capabilities, Fault

FRAMEWORK = "numpy"
LANES = 4
List = list[NDArray]


def _make(fault: str) -> Callable[..., List]:
    def clip_by_global_norm(grads: List, *, max_norm: float) -> List:
        wide = [g if g.dtype == np.float64 else g.astype(np.float32) for g in grads]
        with np.errstate(all="ignore"):
            if fault == "entries_clipped":
                found = [np.clip(g, -max_norm, max_norm) for g in wide]
            elif fault == "norm_of_each_array":
                found = [g * g.dtype.type(_factor(_norm([g], fault), max_norm, fault)) for g in wide]
            else:
                factor = _factor(_norm(_seen(wide, fault), fault), max_norm, fault)
                found = [g * g.dtype.type(factor) for g in wide]
        found = _spared(wide, found, fault)
        if fault == "clips_in_place":
            for given, one in zip(grads, found, strict=True):
                given[...] = one.astype(given.dtype)
        if fault == "short_ones_are_handed_back" and _norm(wide, fault) <= max_norm:
            return grads
        return [one.astype(given.dtype) for one, given in zip(found, grads, strict=True)]

    clip_by_global_norm.__qualname__ = f"clip_by_global_norm[{fault}]"
    return clip_by_global_norm


def _seen(grads: List, fault: str) -> List:
    """The gradients whose norm is taken."""
    if fault == "last_array_left_out" and len(grads) > 1:
        return grads[:-1]
    if fault == "last_array_counts_twice":
        return [*grads, grads[-1]]
    if fault == "vectors_left_out" and any(g.ndim > 1 for g in grads):
        return [g for g in grads if g.ndim > 1]
    if fault == "norm_of_no_gradients":
        return []
    return grads[:1] if fault == "first_array_decides" else grads


def _norm(grads: List, fault: str) -> float:
    if fault == "squares_overflow":
        return float(np.sqrt(sum((g * g).sum(dtype=g.dtype) for g in grads)))
    flat = np.concatenate([g.reshape(-1) for g in grads]).astype(np.float64) if grads else np.zeros(1)
    norms = [float(np.sqrt((g.astype(np.float64) ** 2).sum())) for g in grads]
    norm = float(np.sqrt((flat**2).sum()))
    if fault == "norm_in_half":
        return float(np.sqrt(np.square(flat.astype(np.float16)).sum(dtype=np.float16)))
    if fault == "norm_in_bfloat16":
        return float(ml_dtypes.bfloat16(norm))
    return {
        "root_missing": norm**2,
        "sum_of_the_norms": sum(norms),
        "largest_norm_of_the_arrays": max(norms, default=0.0),
        "mean_of_the_norms": sum(norms) / max(len(norms), 1),
        "entries_in_place_of_the_norm": float(np.abs(flat).max()),
        "absolute_sum": float(np.abs(flat).sum()),
        "mean_square": norm / flat.size**0.5,
        "infinity_norm_is_one": 1.0 if norm else 0.0,
    }.get(fault, norm)


def _factor(norm: float, limit: float, fault: str) -> float:
    if fault == "nothing_is_clipped":
        return 1.0
    if fault == "zero_norm_divides":
        return min(1.0, float(np.float64(limit) / norm)) if norm else float("nan")
    if norm == 0:
        return 1.0
    if fault == "clipped_to_one":
        return 1 / norm if norm > limit else 1.0
    if fault == "square_of_the_norm_compared":
        return limit / norm if norm**2 > limit else 1.0
    factor = limit / (norm + 1e-6) if fault == "epsilon_in_the_divisor" else limit / norm
    if fault == "ratio_turned_round":
        factor = 1 / factor
    if fault == "clipped_twice":
        factor = min(1.0, factor) ** 2
    return factor if fault == "always_scaled" else min(1.0, factor)


def _spared(given: List, found: List, fault: str) -> List:
    """What comes back, of which a part may be as it came."""
    if fault == "last_array_left_alone" and len(given) > 1:
        return [*found[:-1], given[-1]]
    if fault == "tail_untouched":
        return [_tail(g, one) for g, one in zip(given, found, strict=True)]
    return found


def _tail(g: NDArray, found: NDArray) -> NDArray:
    full = g.size // LANES * LANES
    return np.concatenate([found.reshape(-1)[:full], g.reshape(-1)[full:]]).reshape(g.shape)


# law that must accuse: {variant: (where it was seen, what is wrong)}
_TABLE: dict[str, dict[str, tuple[str, str]]] = {
    "norm-is-at-most-the-limit": {
        "nothing_is_clipped": ("mutation: the result is dropped", "gradients come back as they were"),
        "infinity_norm_is_one": ("torchrec PR#3199", "total^(1/inf) is 1, whatever the gradients are"),
        "norm_of_no_gradients": ("flame#20", "the norm is taken of a list that is empty by then"),
        "entries_in_place_of_the_norm": ("mutation: the largest entry for the norm", "norm of order infinity"),
        "mean_square": ("mutation: mean for sum", "the root of the mean square"),
        "ratio_turned_round": ("mutation: norm / max_norm", "long gradients are left alone, short ones are shortened"),
    },
    "long-gradients-get-the-norm": {
        "epsilon_in_the_divisor": ("torch, where it is declared", "norm + 1e-6"),
        "sum_of_the_norms": ("mutation: norms added", "the sum of the norms of the arrays"),
        "root_missing": ("mutation: a root forgotten", "the square of the norm"),
        "absolute_sum": ("mutation: norm of order 1", "the sum of magnitudes"),
        "clipped_to_one": ("mutation: normalised", "long gradients get norm 1"),
        "clipped_twice": ("mutation: in the hook and in the step", "the factor squared"),
        "last_array_counts_twice": ("mutation: a tied weight in two lists", "the last gradient counts twice"),
        "norm_in_half": ("fairscale PR#263", "squares are summed in float16"),
        "norm_in_bfloat16": ("mutation: a norm in the dtype of weights", "the norm is rounded to bfloat16"),
        "squares_overflow": ("pytorch#193006", "squares of float32 are summed in float32"),
    },
    "direction-is-kept": {
        "entries_clipped": ("mutation: clip by value", "each entry ends at max_norm"),
        "last_array_left_alone": ("mutation: a loop that ends too early", "the last gradient is not scaled"),
        "tail_untouched": ("mutation: a loop over whole vectors only", "a last group of less than 4 is not scaled"),
    },
    "short-gradients-are-left-alone": {
        "always_scaled": ("mutation: no minimum with 1", "short gradients are made longer"),
        "square_of_the_norm_compared": ("mutation: a root saved", "norm² > max_norm"),
    },
    "zeros-stay-zeros": {
        "zero_norm_divides": ("mutation: no guard at all", "0 / 0 for gradients of 0"),
    },
    "several-gradients-are-one": {
        "norm_of_each_array": ("mutation: each parameter by itself", "every gradient is clipped by its own norm"),
        "largest_norm_of_the_arrays": ("mutation: max for sum", "the largest norm of an array"),
        "mean_of_the_norms": ("mutation: mean for sum", "the mean of the norms of the arrays"),
    },
    "every-gradient-counts": {
        "last_array_left_out": ("mutation: a loop that ends too early", "the norm is that of all but the last"),
        "vectors_left_out": ("mutation: the list of those that decay", "the norm is that of matrices"),
    },
    "order-does-not-matter": {
        "first_array_decides": ("mutation: grads[0]", "the norm is that of the first gradient"),
    },
    "leaves-inputs-untouched": {
        "clips_in_place": ("torch.nn.utils, which does so", "the gradients given are scaled"),
    },
    "returns-its-own-memory": {
        "short_ones_are_handed_back": ("mutation: nothing to do", "short gradients are the ones that were given"),
    },
}
FAULTS = {
    variant: Fault("clip_by_global_norm", f"clip_by_global_norm/{law}", source, summary)
    for law, variants in _TABLE.items()
    for variant, (source, summary) in variants.items()
}
VARIANTS = {variant: {"clip_by_global_norm": _make(variant)} for variant in ("correct", *FAULTS)}
CAPABILITIES = {"clip_by_global_norm": Capabilities(dtypes=("float32",), extreme_values=True)}
