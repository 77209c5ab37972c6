"""The Softmax layer over several axes takes exp(x - logsumexp(x)), whose sum is 1 for small numbers alone.

Library: keras 3.15.1
Law: softmax/equals-the-reference, softmax/*
Where: keras_torch:axes, keras_jax:axes
Input: keras.layers.Softmax(axis=(0, 1)) of [[1000, 1000]], float32
Got: 0.49998546 twice: 1000.6931 is rounded as numbers of that size are, and the error goes into the exponent
Wanted: 0.5 twice, as Softmax(axis=1) of the same row gives, which subtracts the maximum and divides by the sum
Status: theirs, new
Backends: torch, jax
Tracker: none found
Searched: "keras Softmax layer tuple axis exp(x - logsumexp) precision large inputs" in issues;
https://github.com/keras-team/keras/issues/20021 is about the axes of a function beside it
"""

import os
import sys

os.environ.setdefault("KERAS_BACKEND", "torch")
import keras
import numpy as np

x = np.full((1, 2), 1000, np.float32)
several, one = (keras.ops.convert_to_numpy(keras.layers.Softmax(axis=axis)(x)) for axis in ((0, 1), 1))
print(f"got {several}, wanted {one}")
sys.exit(np.abs(several - one).max() > 1e-6)
