"""dot_product_attention of float64 tensors computes in float32 and returns float32, on torch and on JAX.

Library: keras 3.15.1
Law: attention/keeps-the-dtype, cross_entropy/keeps-the-dtype
Where: keras_*:attention, keras_*:attention_plain, keras_*:sparse, keras_*:categorical
Input: query, key and value float64, each the one number 7.3
Got: 7.300000190734863 as float32: keras.backend.result_type("float64") is "float32" but on TensorFlow
Wanted: 7.3 as float64 (a result has the dtype of the first input)
Status: theirs, known
Backends: torch, jax
Tracker: https://github.com/keras-team/keras/issues/23704
Searched: "keras result_type float64 returns float32 torch backend jax float64 inputs downcast ops" in issues
"""

import os
import sys

os.environ.setdefault("KERAS_BACKEND", "torch")
if os.environ["KERAS_BACKEND"] == "jax":
    os.environ["JAX_ENABLE_X64"] = "1"
import keras
import numpy as np

keras.config.set_floatx("float64")
x = keras.ops.convert_to_tensor(np.full((1, 1, 1, 1), 7.3), dtype="float64")
out = keras.ops.convert_to_numpy(keras.ops.dot_product_attention(x, x, x))
print(f"got {float(out.item())!r} of {out.dtype}, wanted 7.3 of float64")
sys.exit(out.dtype != np.float64 or out.item() != 7.3)
