"""global_clipnorm in float16 changes gradients shorter than the limit, since it multiplies by 1 / limit in float16.

Library: keras 3.15.1
Law: clip_by_global_norm/equals-the-reference, clip_by_global_norm/*
Where: keras_torch:optimizer, keras_jax:optimizer
Input: SGD(1.0, global_clipnorm=90905) of a float16 variable of [0], gradient [7]
Got: -7.0156 on torch, -inf on JAX: 1 / 90905 is below the numbers that float16 has in full
Wanted: -7: the norm is below the limit
Status: theirs, new
Backends: torch, jax
Tracker: none found
Searched: "keras global_clipnorm float16 clip_by_global_norm scale precision gradients changed below norm" in issues
"""

import os
import sys

os.environ.setdefault("KERAS_BACKEND", "torch")
import keras

variable = keras.Variable(keras.ops.zeros(1, dtype="float16"), dtype="float16")
optimizer = keras.optimizers.SGD(1.0, global_clipnorm=90905)
optimizer.build([variable])
optimizer.apply([keras.ops.full((1,), 7, dtype="float16")])
got = float(keras.ops.convert_to_numpy(variable.value)[0])
print(f"got {got}, wanted -7")
sys.exit(got != -7)
