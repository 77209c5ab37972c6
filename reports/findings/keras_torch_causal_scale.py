"""On torch, dot_product_attention with is_causal=True and a scale of 0 or below gives NaN in all rows but the last.

Library: keras 3.15.1
Law: attention/zero-scale-averages, attention/negative-scale-negates-the-query
Where: keras_torch:attention, keras_torch:attention_plain
Input: three queries and keys of the number 1, values 1, 3, 4, is_causal=True, scale=0
Got: [nan, nan, 2.667]; on JAX, and with the triangle as a mask, [1, 2, 2.667]
Wanted: [1, 2, 2.667] (a scale of 0 gives the mean of the values that a row may see)
Status: theirs, new (as torch_flash_nonpositive_scale)
Backends: torch
Tracker: none found
Searched: "scaled_dot_product_attention is_causal scale zero negative NaN cpu flash" in issues; the cause is torch's CPU
flash kernel, which fills the triangle with -inf before it multiplies by the scale
"""

import os
import sys

os.environ["KERAS_BACKEND"] = "torch"
import keras
import numpy as np

ones = np.ones((1, 3, 1, 1), "float32")
values = np.array([1.0, 3.0, 4.0], "float32").reshape(1, 3, 1, 1)
out = keras.ops.dot_product_attention(ones, ones, values, scale=0.0, is_causal=True)
got = keras.ops.convert_to_numpy(out).ravel()
wanted = np.array([1.0, 2.0, 8 / 3])
print(f"got {got}, wanted {wanted}")
sys.exit(not np.allclose(got, wanted))
