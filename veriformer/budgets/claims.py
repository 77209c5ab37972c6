"""Whether a computation is as precise as it claims to be: statistics of its errors on dense random data.

The worst case of a budget admits errors that no honest computation makes on such data: a sum of n terms
errs by about sqrt(n) roundings and not by n. Here sigma is the budget of `Precision(growth="typical")`,
the size that an error then has. Of any single error it says little, of a thousand together a lot.

Not for data with structure: equal values repeat the same error, which then does not average out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from veriformer.budgets.bound import Array, Bound
from veriformer.budgets.precision import Precision

GAIN_LIMIT = 6.0
"""Standard deviations that a systematic gain may have."""
LEAST = 1000
"""Outputs below which the statistics mean little."""

UNIT = 2.0**-24
"""Unit roundoff at which inputs are moved to see how results respond: small, so that they do so linearly."""

_CLASSES = {"bfloat16": -8.0, "float16 or tf32": -11.0, "float32": -24.0, "float64": -53.0}


def rms_ratio(error: Array, sigma: Array) -> float:
    """The root mean square of the errors in units of what it should be: rms(error) / rms(sigma).

    error, sigma: arrays of one shape; above 1 is a broken claim.
    Edges: nothing undetermined (infinite sigma) counts; 0 where there is no error; inf for NaN.
    """
    error, sigma = _determined(error, sigma)
    size = float((error * error).sum())
    if not math.isfinite(size):
        return math.inf
    allowed = float((sigma * sigma).sum())
    return math.sqrt(size / allowed) if allowed else (math.inf if size else 0.0)


def systematic_gain(error: Array, value: Array, sigma: Array) -> float:
    """How far the results are larger or smaller than the reference as a whole, in its standard deviations.

        gain = <error, value> / <value, value>,   its deviation = sqrt(sum (sigma value)^2) / <value, value>

    error, value, sigma: arrays of one shape; beyond ±`GAIN_LIMIT` the results are off by a factor.
    Edges: as `rms_ratio`.
    """
    error, value, sigma = _determined(error, value, sigma)
    moved, deviation = float((error * value).sum()), math.sqrt(float(((sigma * value) ** 2).sum()))
    if not math.isfinite(moved):
        return math.inf
    return moved / deviation if deviation else (math.inf if moved else 0.0)


def effective_bits(error: Array, response: Array) -> float:
    """log2 of the unit roundoff that a computation behaves like.

    error: what it erred by. response: by how much the exact results move when all inputs, and then the
    results, are rounded at `UNIT` (`rounded_at_random`). A kernel that does that at u, and is exact
    otherwise, gives log2 u; one that rounds only its inputs gives up to a bit less where they dominate.
    Edges: -inf without an error; NaN where nothing moves; inf for an error that is not finite.
    """
    moved, size = float((response * response).sum()), float((error * error).sum())
    if not moved:
        return math.nan
    if not math.isfinite(size):
        return math.inf
    return math.log2(UNIT) + math.log2(size / moved) / 2 if size else -math.inf


def rounded_at_random(x: Array, seed: int) -> Array:
    """x with errors like those of rounding to nearest at `UNIT`, whatever x is a multiple of."""
    _, exponent = np.frexp(x)
    noise = np.random.default_rng(seed).uniform(-UNIT, UNIT, x.shape)
    moved: Array = np.where(x == 0, x, x + np.ldexp(noise, exponent - 1))
    return moved


@dataclass(frozen=True)
class Claim:
    """What the errors on dense data say of a declared precision.

    rms: `rms_ratio`. gain: `systematic_gain`. factor: what the results are off by as a whole. bits:
    `effective_bits`, of a computation declared to work at 2^declared.
    """

    rms: float
    gain: float
    factor: float
    bits: float
    declared: float

    @property
    def holds(self) -> bool:
        """Whether the errors are of the size that they should be, and point no way."""
        return self.rms <= 1 and abs(self.gain) <= GAIN_LIMIT

    @property
    def message(self) -> str:
        """'behaves like u = 2^-11.0 (float16 or tf32), declared 2^-24.0 (float32): errors are 120 times their size'."""
        like = f"behaves like u = {_power(self.bits)}, declared {_power(self.declared)}"
        told = [f"root mean square of the errors {self.rms:.2g} times what is typical, wanted at most 1"] * (
            self.rms > 1
        )
        if abs(self.gain) > GAIN_LIMIT:
            told.append(
                f"results {self.factor:.7g} times as large as they should be, "
                f"{abs(self.gain):.2g} standard deviations off, wanted at most {GAIN_LIMIT:.2g}"
            )
        return f"{like}: {'; '.join(told) or 'as claimed'}"


def judge_claim(
    got: Array, typical: Bound, exact: Callable[[Mapping[str, Array]], Array], inputs: Mapping[str, Array], p: Precision
) -> Claim:
    """Statistics of one result on dense random data.

    got: the result. typical: its bound under `growth="typical"`. exact: the reference as a function of
    the inputs by name. inputs: all arrays; those of real numbers are moved to see how results respond.
    p: what is declared.
    """
    error = got - typical.value
    moved = {n: rounded_at_random(a, i) if a.dtype.kind == "f" else a for i, (n, a) in enumerate(inputs.items())}
    size = float((typical.value**2).sum())
    return Claim(
        rms_ratio(error, typical.allowed),
        systematic_gain(error, typical.value, typical.allowed),
        1 + float((error * typical.value).sum()) / size if size else math.nan,
        effective_bits(error, rounded_at_random(exact(moved), len(moved)) - typical.value),
        math.log2(p.coarsest),
    )


def _power(bits: float) -> str:
    name = precision_name(bits)
    return f"2^{bits:.1f}" + (f" ({name})" if name else "")


def precision_name(bits: float) -> str:
    """The dtype whose unit roundoff is about 2^bits; empty if there is none."""
    near = min(_CLASSES, key=lambda name: abs(_CLASSES[name] - bits))
    return near if abs(_CLASSES[near] - bits) <= 1.5 else ""


def _determined(first: Array, *others: Array) -> tuple[Array, ...]:
    """The arrays without the places where the last one, sigma, is infinite."""
    arrays = np.broadcast_arrays(first, *others)
    judged = ~np.isposinf(arrays[-1])
    return tuple(array[judged] for array in arrays)
