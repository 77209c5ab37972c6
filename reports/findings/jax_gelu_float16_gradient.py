"""The gradient of jax.nn.gelu, as it is by default, is NaN in float16 for inputs beyond 147.

Library: jax 0.10.2
Law: gelu/gradient-is-finite
Where: jax:approximate
Input: x = -148, float16, approximate=True (the default)
Got: nan, for 3 x^2, of the slope of the cube, is above 65504, the largest number, and 0 times infinity is NaN
Wanted: 0, as in float32 and with approximate=False (numbers as large as their squares can be summed give finite ones)
Status: theirs, new
Tracker: none found
Searched: "jax.nn.gelu float16 gradient nan large negative input tanh approximation overflow" and "jax.nn.gelu bfloat16
accuracy approximate" in issues; the same in fairseq is https://github.com/facebookresearch/fairseq/issues/2235
"""

import sys

import jax
import jax.numpy as jnp

x = jnp.float16(-148)
got, exact = float(jax.grad(jax.nn.gelu)(x)), float(jax.grad(lambda x: jax.nn.gelu(x, approximate=False))(x))
print(f"got {got}, wanted 0; with approximate=False {exact}")
sys.exit(got != 0)
