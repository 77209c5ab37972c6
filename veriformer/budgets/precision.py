"""What an implementation claims of its arithmetic, as numbers the error budgets are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from veriformer.declarations import Capabilities

C = 4
"""Roundings allowed to an elementary function, or to a handful of elementwise operations."""

# float64 doubled: the reference errs as much.
_ROUNDOFF = {"float64": 2.0**-52, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
# Smallest normal number, because subnormals may be flushed to 0. float16 subnormals are in everyday
# use and never flushed: half of the smallest.
_UNDERFLOW = {"float64": 2.0**-1022, "float32": 2.0**-126, "float16": 2.0**-25, "bfloat16": 2.0**-126}
_LARGEST = {
    "float64": (2 - 2.0**-52) * 2.0**1023,
    "float32": (2 - 2.0**-23) * 2.0**127,
    "float16": 65504.0,
    "bfloat16": (2 - 2.0**-7) * 2.0**127,
}


@dataclass(frozen=True)
class Precision:
    """The roundings a computation may make.

    storage: dtype of arguments and results. accumulate: dtype of sums, statistics and elementary
    functions (always float64 for float64 storage; `of` says float32 for storage where a float64 result is
    declared to be made of sums in it). intermediate: dtype in which values between two
    steps may be stored; "storage" is the unfused computation, "float32" the fused one.
    rounds_probabilities: attention weights may be rounded to storage before they meet the values.
    recomputes_probabilities: the backward may recompute attention weights as exp(s - lse), which does not
    make them sum to 1, and the mean of their gradient from the output.
    saved_statistics: dtype in which a norm keeps mean and deviation for its backward, or "storage".
    float64 is counted twice, because the reference is a float64 computation too.
    growth: "worst" counts n units of roundoff for a sum of n terms, and adds up errors. "typical" is
    the standard deviation instead: sqrt(n) units, errors added as roots of sums of squares, and u/sqrt(3)
    for a rounding to nearest, uniform up to u. It fits dense random data only.
    Source: Higham 2002 (Accuracy and Stability of Numerical Algorithms), section 3.1, for n;
    Higham, Mary 2019 (A new approach to probabilistic rounding error analysis) for sqrt(n).
    Raises ValueError for an unknown dtype or growth.
    """

    storage: str
    accumulate: str = "float32"
    intermediate: str = "storage"
    rounds_probabilities: bool = True
    growth: str = "worst"
    saved_statistics: str = "float32"
    recomputes_probabilities: bool = True

    def __post_init__(self) -> None:
        dtypes = tuple(_ROUNDOFF)
        choices = {
            "storage": dtypes,
            "accumulate": (*dtypes, "storage"),
            "intermediate": (*dtypes, "storage"),
            "saved_statistics": (*dtypes, "storage"),
            "growth": ("worst", "typical"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"Precision: {name}: got {getattr(self, name)!r}, wanted one of {', '.join(allowed)}")

    @classmethod
    def of(cls, capabilities: Capabilities, dtype: str, *, growth: str = "worst") -> Precision:
        """The precision that an implementation declares for one dtype.

        accumulate={"float64": "float32"} says of float64 that its results are no better than float32's.
        """
        declared = capabilities.accumulate
        single = dtype == "float64" and isinstance(declared, Mapping) and declared.get(dtype) == "float32"
        return cls(
            "float32" if single else dtype,
            accumulate=capabilities.at("accumulate", dtype),
            intermediate=capabilities.at("intermediate", dtype),
            rounds_probabilities=capabilities.at("rounds_probabilities", dtype),
            growth=growth,
            saved_statistics=capabilities.at("saved_statistics", dtype),
            recomputes_probabilities=capabilities.at("recomputes_probabilities", dtype),
        )

    @cached_property
    def accumulator(self) -> str:
        """The dtype sums are held in: float64 whenever storage is, else what is declared."""
        if self.storage == "float64" or self.accumulate == "storage":
            return self.storage
        return self.accumulate

    @cached_property
    def _intermediate(self) -> str:
        return self.storage if self.intermediate == "storage" or self.storage == "float64" else self.intermediate

    @cached_property
    def effective(self) -> tuple[Any, ...]:
        """What budgets depend on: two declarations may come to the same, as a shorter intermediate does for float64."""
        probabilities = self.u_probability, self.eta_probability, self.recomputes_probabilities
        return self.storage, self.accumulator, self._intermediate, self.growth, self.u_statistics, *probabilities

    @cached_property
    def u_out(self) -> float:
        """Unit roundoff of results."""
        return self._nearest(self.storage)

    @cached_property
    def u_acc(self) -> float:
        """Unit roundoff of sums and elementary functions."""
        return _ROUNDOFF[self.accumulator]

    @cached_property
    def u_mid(self) -> float:
        """Unit roundoff of values stored between two steps."""
        return self._nearest(self._intermediate)

    @cached_property
    def unfused(self) -> bool:
        """Whether values between two steps may be stored more coarsely than sums are held."""
        return self.u_mid > self.u_acc

    @cached_property
    def u_store(self) -> float:
        """What storing one more value between two steps adds: u_mid if unfused, else 0."""
        return self.u_mid if self.unfused else 0.0

    @cached_property
    def _stores_probabilities(self) -> bool:
        """Whether attention weights may be rounded to storage; where sums are held in no wider dtype, always."""
        return self.rounds_probabilities or self.u_out <= self.u_acc

    @cached_property
    def u_probability(self) -> float:
        """Unit roundoff of attention weights where they meet the values; 0 if they stay in a wider accumulator."""
        return max(self.u_out if self._stores_probabilities else 0.0, self.u_store)

    @cached_property
    def u_statistics(self) -> float:
        """Unit roundoff of a norm's statistics as its backward finds them; 0 if they stay in the accumulator."""
        saved = self.storage if self.saved_statistics == "storage" else self.saved_statistics
        return _ROUNDOFF[saved] if self.storage != "float64" and _ROUNDOFF[saved] > self.u_acc else 0.0

    @cached_property
    def e(self) -> float:
        """The coarser of u_acc and u_mid."""
        return max(self.u_acc, self.u_mid)

    @cached_property
    def coarsest(self) -> float:
        """Unit roundoff of the coarsest dtype that the computation may use anywhere."""
        return max(_ROUNDOFF[dtype] for dtype in (self.storage, self.accumulator, self._intermediate))

    @cached_property
    def eta(self) -> float:
        """Absolute error of a result by underflow."""
        return _UNDERFLOW[self.storage]

    @cached_property
    def eta_acc(self) -> float:
        """Absolute error of a term of a sum by underflow."""
        return _UNDERFLOW[self.accumulator]

    @cached_property
    def eta_mid(self) -> float:
        """Absolute error of a value stored between two steps, by underflow."""
        return _UNDERFLOW[self._intermediate]

    @cached_property
    def eta_probability(self) -> float:
        """Absolute error of an attention weight by underflow."""
        return max(self.eta_mid, self.eta if self._stores_probabilities else 0.0)

    @cached_property
    def largest(self) -> float:
        """Largest finite number of the storage dtype."""
        return _LARGEST[self.storage]

    @cached_property
    def largest_acc(self) -> float:
        """Largest finite number of sums and statistics."""
        return _LARGEST[self.accumulator]

    @cached_property
    def largest_mid(self) -> float:
        """Largest finite number that every step of the computation can hold."""
        return min(_LARGEST[self.accumulator], _LARGEST[self._intermediate])

    @cached_property
    def beside(self) -> str:
        """The dtype of a statistic returned beside the result: float32 where storage is a 16-bit dtype."""
        return self.storage if self.storage == "float64" else "float32"

    @cached_property
    def u_beside(self) -> float:
        """Unit roundoff of such a statistic."""
        return self._nearest(self.beside)

    @cached_property
    def eta_beside(self) -> float:
        """Absolute error of such a statistic by underflow."""
        return _UNDERFLOW[self.beside]

    def g(self, n: Any) -> Any:
        """Size of n roundings together, as in a sum of n terms, in units of one; n is a number or an array."""
        return n if self.growth == "worst" else n**0.5

    def _nearest(self, dtype: str) -> float:
        """Size of one rounding to nearest."""
        return _ROUNDOFF[dtype] if self.growth == "worst" else _ROUNDOFF[dtype] / 3**0.5

    def product(self, a: Any, b: Any) -> Any:
        """Size of Σ_j a_ij b_jk for errors of size a[…,m,n] and factors of size b[…,n,k]: |a| |b|, or the root of
        the sum of squares."""
        return a @ b if self.growth == "worst" else np.sqrt((a * a) @ (b * b))
