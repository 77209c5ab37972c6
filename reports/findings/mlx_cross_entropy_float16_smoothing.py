"""cross_entropy of float16 is infinite where the sum of losses, or with smoothing of all logits, overflows.

Library: mlx 0.32.4
Law: cross_entropy/equals-the-reference, cross_entropy/finite-for-finite-logits,
cross_entropy/smoothing-weighs-the-losses-of-all-classes
Where: mlx:default
Input: float16 logits [[0, 0, 0, 0, 0, 0, 0, 10000]], target 0, label_smoothing 0.1; the mean of three rows [30000, 0],
targets 1
Got: inf; and inf
Wanted: 9875 (0.9 of 10000, and 0.1 of the mean of 10000, …, 10000, 0); and 30000 (means fit float16, sums do not)
Status: theirs, new
Tracker: none found (the function's docstring says that the CPU reduces in the dtype of the logits)
Searched: "mlx.nn.losses.cross_entropy label_smoothing reduction dtype" in documentation
"""

import sys

import mlx.core as mx
import mlx.nn as nn

logits = mx.array([[0.0] * 7 + [10000.0]], mx.float16)
smooth = nn.losses.cross_entropy(logits, mx.array([0]), label_smoothing=0.1, reduction="mean").item()
rows = mx.array([[30000.0, 0.0]] * 3, mx.float16)
mean = nn.losses.cross_entropy(rows, mx.array([1, 1, 1]), reduction="mean").item()
print("got", smooth, "and", mean, "wanted 9875 and 30000")
sys.exit(0 if abs(smooth - 9875) < 16 and abs(mean - 30000) < 32 else 1)
