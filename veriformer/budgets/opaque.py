"""Error budget of models whose weights nobody maps: two evaluations that are equal by law may differ by this much.

Without weights there is no reference to derive a budget from. What is known is the unit roundoff u, how large the
logits are, and how far apart the model's own evaluations lie that are equal by law and do not use what is judged.
The constants are measured: `python benchmarks/studies/opaque.py --table reports/opaque.md`, on random models of 2
and 16 layers, with sharp attention and with sums split by shape among them.
"""

from __future__ import annotations

import numpy as np

from veriformer.budgets.bound import Array

UNIT = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Unit roundoff of the dtype that a model computes in."""

UNITS = {"float64": 4096.0, "float32": 1024.0, "float16": 32.0, "bfloat16": 24.0}
"""Unit roundoffs of the largest |logit| that are allowed whatever the noise.

Between what correct models need and what mistakes make, which are far apart down to float32 and meet in bfloat16:
there the smallest mistakes are only found where the logits react more strongly.
"""

NOISE = 8.0
"""How many times the noise is allowed.

Noise says how deep and how sharp a model is. Prefixes say it best; rows alone or in a batch often agree to the bit.
"""

COARSEST = {"float64": "float32"}
"""The coarsest dtype that a model is taken to compute in, where that is not its own.

Widespread models take statistics and softmax in float32 whatever their dtype; a float64 result then moves by a unit
of float32 as soon as one such rounding falls otherwise.
"""

MARK = 1e4
"""A logit so many times larger than a quarter of the others is none."""


def opaque_allowance(logits: Array, dtype: str, noise: float = 0.0, *, coarsest: str | None = None) -> Array:
    """How far the logits of two evaluations that are equal by law may lie apart, element by element.

    logits[…,V] of the evaluation that does not use what is judged; noise: the largest difference among evaluations
    that are equal by law and do not use it either: rows alone, in their batch, in another order, and prefixes;
    coarsest: the coarsest dtype that the model computes in, if not as in COARSEST -> allowance, like logits.

        A = max(UNITS u max|logits|, NOISE noise),   UNITS and u of the coarsest dtype

    The largest of all logits is the scale: errors measured by the largest of each position scatter more. Marks such as
    -1e9 for a token that must not come are none: what exceeds a quarter of the others MARK times has no part in it.
    Source: measured, see above.
    Edges: no logits, no allowance; noise that is not finite allows everything; logits that are not finite have no
    part in the maximum.
    Raises ValueError for an unknown dtype, and for negative noise.
    """
    inside = coarsest or COARSEST.get(dtype, dtype)
    for name, value in (("dtype", dtype), ("coarsest", inside)):
        if value not in UNIT:
            raise ValueError(f"opaque_allowance: {name}: got {value!r}, wanted one of {', '.join(UNIT)}")
    if noise < 0:
        raise ValueError(f"opaque_allowance: noise: got {noise}, wanted a difference >= 0")
    if not np.isfinite(noise):
        return np.full(np.shape(logits), np.inf)
    room = max(UNITS[inside] * UNIT[inside] * scale_of(logits), NOISE * float(noise))
    return np.full(np.shape(logits), room)


def scale_of(logits: Array) -> float:
    """The largest |logit|, marks left out; 0 where there is none."""
    sizes = np.sort(np.abs(logits[np.isfinite(logits)]))
    sizes = sizes[sizes > 0]
    if not sizes.size:
        return 0.0
    return float(sizes[sizes <= MARK * sizes[(sizes.size - 1) // 4]].max())
