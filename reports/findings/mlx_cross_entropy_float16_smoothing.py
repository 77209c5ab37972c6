"""cross_entropy of float16 with label smoothing is infinite where the sum of all logits overflows.

Library: mlx 0.32.4
Law: cross_entropy/equals-the-reference
Where: mlx:default
Input: float16 logits [[0, 0, 0, 0, 0, 0, 0, 10000]], target 0, label_smoothing 0.1
Got: inf
Wanted: 9875 (0.9 of 10000, and 0.1 of the mean of 10000, …, 10000, 0; the mean fits float16, the sum does not)
Status: theirs, new
Tracker: none found (the function's docstring says that the CPU reduces in the dtype of the logits)
Searched: "mlx.nn.losses.cross_entropy label_smoothing reduction dtype" in documentation
"""

import sys

import mlx.core as mx
import mlx.nn as nn

logits = mx.array([[0.0] * 7 + [10000.0]], mx.float16)
got = nn.losses.cross_entropy(logits, mx.array([0]), label_smoothing=0.1, reduction="mean").item()
print("got", got, "wanted 9875")
sys.exit(0 if abs(got - 9875) < 16 else 1)
