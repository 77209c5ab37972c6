"""Cross entropy from logits is NaN where a class that is nobody's target has the logit -inf.

Library: keras 3.15.1
Law: cross_entropy/minus-infinity-equals-deletion, cross_entropy/finite-on-plain-data,
cross_entropy/equals-the-reference
Where: keras_torch:categorical, keras_jax:categorical, keras_jax:sparse
Input: logits [[0, -inf]], one-hot target [[1, 0]]
Got: nan, on torch and on JAX: the target's 0 is multiplied by the class's log-probability, -inf
(on JAX outside of jit; on a CPU XLA drops a product with a one-hot target, and the compiled loss is 0)
Wanted: 0, as the sparse loss gives on torch, but not on JAX (a class without probability may as well not be there)
Status: theirs, new
Backends: torch, jax
Tracker: none found
Searched: "keras CategoricalCrossentropy from_logits=True NaN when logits contain -inf masked classes" in issues; "keras
cross entropy 0 * -inf nan one-hot target log_softmax masked logits -inf torch backend" in issues (optax had the same,
https://github.com/google-deepmind/optax/issues/896; keras#23551 is about predictions that sum to 0)
"""

import os
import sys

os.environ.setdefault("KERAS_BACKEND", "torch")
import keras
import numpy as np

logits = np.array([[0.0, -np.inf]], "float32")
got = [
    float(keras.losses.CategoricalCrossentropy(from_logits=True)(np.array([[1.0, 0.0]], "float32"), logits)),
    float(keras.losses.SparseCategoricalCrossentropy(from_logits=True)(np.array([0]), logits)),
]
print(f"got {got[0]}, sparse {got[1]}, wanted 0 of both, on {keras.backend.backend()}")
sys.exit(not np.allclose(got, 0, atol=1e-6))
