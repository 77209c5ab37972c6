"""Adam and AdamW of a bfloat16 variable do not move it: beta_2 = 0.999 becomes 1, and the rate 0. In float16 it is off.

Library: keras 3.15.1
Law: adamw_step/equals-the-reference, adamw_step/*
Where: keras_torch:optimizer, keras_jax:optimizer
Input: the first step of AdamW(1.0) for a bfloat16 variable of [0], gradient [1]
Got: 0: the step is multiplied by sqrt(1 - beta_2^t), where beta_2 has the variable's dtype
Wanted: -1, as with beta_2=0.99 or a float32 variable
Status: theirs, known
Backends: torch, jax
Tracker: https://github.com/keras-team/keras-hub/issues/2629
Searched: "keras Adam optimizer bfloat16 float16 variables beta_2 0.999 rounds to 1 no update weights do not change" in
issues; https://github.com/keras-team/keras/pull/21238 is the same of Lamb
"""

import os
import sys

os.environ.setdefault("KERAS_BACKEND", "torch")
import keras


def step(dtype):
    variable = keras.Variable(keras.ops.zeros(1, dtype=dtype), dtype=dtype)
    optimizer = keras.optimizers.AdamW(1.0)
    optimizer.build([variable])
    optimizer.apply([keras.ops.ones(1, dtype=dtype)])
    return float(keras.ops.convert_to_numpy(keras.ops.cast(variable.value, "float32"))[0])


got, wanted = step("bfloat16"), step("float32")
print(f"got {got}, wanted {wanted}")
sys.exit(abs(got - wanted) > 0.02)
