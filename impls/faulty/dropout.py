"""Wrong dropout: one correct implementation with one switch for each mistake."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from veriformer.declarations import Capabilities, Fault

FRAMEWORK = "numpy"
LANES = 4
_HALF = Capabilities(dtypes=("float32", "float16"), extreme_values=True)


def _make(fault: str) -> Callable[..., NDArray]:
    def dropout(x: NDArray, *, rate: float, uniform: NDArray) -> NDArray:
        if fault == "rate_zero_means_half":
            rate = rate or 0.5
        z = x if x.dtype == np.float64 else x.astype(np.float32)
        kept = _kept(uniform, uniform.dtype.type(rate), fault)
        with np.errstate(all="ignore"):
            enlarged = z * z.dtype.type(_factor(rate, fault))
        if fault == "mean_of_row_added":
            enlarged = enlarged + z.mean(axis=-1, keepdims=True) * rate
        if fault == "enlarged_before_dropped":
            with np.errstate(all="ignore"):
                y = enlarged.astype(x.dtype) * kept.astype(x.dtype)
        elif fault == "rate_one_unguarded":
            with np.errstate(all="ignore"):
                y = kept * z / z.dtype.type(1 - rate)
        else:
            y = np.where(kept, enlarged, 0)
        return _tail(z, y, fault).astype(x.dtype)

    dropout.__qualname__ = f"dropout[{fault}]"
    return dropout


def _kept(uniform: NDArray, rate: NDArray, fault: str) -> NDArray:
    if fault == "numbers_of_its_own":
        uniform = np.random.default_rng(uniform.size).random(uniform.shape)
    if fault == "one_number_per_row":
        uniform = np.broadcast_to(uniform[..., :1], uniform.shape)
    if fault == "keeps_what_it_should_drop":
        return uniform < rate
    return uniform > rate if fault == "drops_where_equal" else uniform >= rate


def _factor(rate: float, fault: str) -> float:
    kept = 1 - rate
    if fault == "not_enlarged":
        return 1.0
    if fault == "shrunk":
        return kept
    if fault == "divided_by_the_rate":
        return 1 / rate if rate else 1.0
    if fault == "epsilon_in_the_divisor":
        return 1 / (kept + 1e-6)
    return (1 / kept if kept else 0.0) ** (2 if fault == "enlarged_twice" else 1)


def _tail(z: NDArray, y: NDArray, fault: str) -> NDArray:
    """The result, in which a last group of lanes that is not full may be as it came."""
    if fault != "tail_untouched" or z.size % LANES == 0:
        return y
    full = z.size // LANES * LANES
    return np.concatenate([y.reshape(-1)[:full], z.reshape(-1)[full:]]).reshape(z.shape)


# law that must accuse: {variant: (where it was seen, what is wrong)}
_TABLE: dict[str, dict[str, tuple[str, str]]] = {
    "keeps-exactly-where-uniform-reaches-the-rate": {
        "keeps_what_it_should_drop": ("mutation: the comparison turned round", "kept where uniform < rate"),
        "drops_where_equal": ("mutation: > for >=", "dropped where uniform equals the rate"),
        "numbers_of_its_own": ("nanoGPT#240", "other random numbers than the given ones"),
    },
    "kept-entries-are-enlarged-alike": {
        "not_enlarged": ("mutation: dropout of the first papers", "what is kept keeps its size"),
        "shrunk": ("mutation: scaled at the wrong time", "what is kept is multiplied by 1 - rate"),
        "divided_by_the_rate": ("apex#816", "divided by the rate"),
        "enlarged_twice": ("mutation: scaled by caller and kernel", "divided by (1 - rate)²"),
    },
    "rate-zero-is-the-identity": {
        "rate_zero_means_half": ("annotated-transformer: dropout=0 is not passed on", "0 counts as not given"),
        "epsilon_in_the_divisor": ("mutation: a guard against 0 / 0", "divided by 1 - rate + 1e-6"),
    },
    "rate-one-gives-zeros": {
        "rate_one_unguarded": ("mutation: no guard at all", "0 / 0 at rate 1"),
    },
    "each-entry-by-itself": {
        "one_number_per_row": ("mutation: a mask with a wrong stride", "the row's first number decides for all"),
        "tail_untouched": ("mutation: a loop over whole vectors only", "a last group of less than 4 is copied"),
    },
    "dropped-entries-leave-no-trace": {
        "enlarged_before_dropped": ("mutation: x / (1 - rate) times a mask", "inf times 0 near the largest number"),
        "mean_of_row_added": ("mutation: a correction of the mean", "dropped entries move the others"),
    },
}
_DTYPES = {"enlarged_before_dropped": "float16"}
FAULTS = {
    variant: Fault("dropout", f"dropout/{law}", source, summary, _DTYPES.get(variant, "float32"))
    for law, variants in _TABLE.items()
    for variant, (source, summary) in variants.items()
}
VARIANTS = {variant: {"dropout": _make(variant)} for variant in ("correct", *FAULTS)}
CAPABILITIES = {"dropout": _HALF}
