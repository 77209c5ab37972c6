"""The gradient of mlx.nn.gelu_approx is NaN in float16 for inputs beyond 147.

Library: mlx 0.32.4
Law: gelu/gradient-is-finite
Where: mlx:approx
Input: x = -148, float16
Got: nan, for 3 x^2, of the slope of the cube, is above 65504, the largest number, and 0 times infinity is NaN
Wanted: 0, as in float32 and by mlx.nn.gelu
Status: theirs, new
Tracker: none found
Searched: "mlx nn.gelu_approx float16 gradient nan overflow cube" in issues; the same in fairseq is
https://github.com/facebookresearch/fairseq/issues/2235
"""

import sys

import mlx.core as mx
import mlx.nn as nn

mx.set_default_device(mx.cpu)
x = mx.array(-148, dtype=mx.float16)
got, exact = mx.grad(nn.gelu_approx)(x).item(), mx.grad(nn.gelu)(x).item()
print(f"got {got}, wanted 0; by gelu {exact}")
sys.exit(got != 0)
