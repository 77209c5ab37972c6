"""The mean of a loss in float16 adds losses, and counts rows, in float16.

Library: keras 3.15.1
Law: cross_entropy/finite-for-finite-logits, cross_entropy/the-mean-counts-every-row
Where: keras_torch:sparse, keras_torch:categorical, keras_jax:sparse, keras_jax:categorical
Input: three rows of logits [30000, 0], label 1; and 65520 rows of logits [0, 0]; dtype="float16", from_logits=True
Got: inf; and 0
Wanted: 30000; and log 2: sum and number of rows are divided in float16, which ends at 65504
Status: theirs, new
Backends: torch, jax
Tracker: none found
Searched: "keras loss reduction sum_over_batch_size float16 overflow inf nan mean of losses mixed_float16" in issues
"""

import os
import sys

os.environ.setdefault("KERAS_BACKEND", "torch")
import keras
import numpy as np

loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, dtype="float16")
few = float(loss(np.ones(3, int), np.array([[30000, 0]] * 3, np.float16)))
many = float(loss(np.ones(65520, int), np.zeros((65520, 2), np.float16)))
print(f"got {few} and {many}, wanted 30000 and {np.log(2)}")
sys.exit(not (abs(few - 30000) < 20 and abs(many - np.log(2)) < 1e-2))
