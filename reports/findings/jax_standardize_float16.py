"""jax.nn.standardize in float16: a row with deviations above 256 gives zeros or NaN, a constant one a gradient of NaN.

Library: jax 0.10.2
Law: layer_norm/equals-the-reference, layer_norm/gradient-equals-the-reference, layer_norm/gradient-is-finite,
layer_norm/input-gradient-sums-to-zero, layer_norm/gradient-along-the-row-is-what-eps-leaves,
layer_norm/width-one-gives-the-bias, layer_norm/width-one-has-no-weight-gradient,
layer_norm/variance-is-v-over-v-plus-eps
Where: jax:standardize, jax:standardize_stable
Input: x = [10000, 0] and the gradient at x = [0], float16, epsilon 1e-5, algorithm="stable"
Got: [0, 0], for the squares are above 65504, the largest number; a gradient of NaN, for the slope of rsqrt at 1e-5 is
Wanted: [1, -1] and 0, as statistics in float32 give (a row comes out with mean 0 and variance 1)
Status: theirs, new
Tracker: none found
Searched: "jax.nn.standardize float16 overflow variance nan gradient constant input rsqrt" in issues;
https://github.com/jax-ml/jax/issues/30426 is about NaN of the fast algorithm in float32
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

out = np.asarray(jax.nn.standardize(jnp.array([10000, 0], jnp.float16), algorithm="stable"), float)
slope = float(jax.grad(lambda x: jax.nn.standardize(x, algorithm="stable").sum())(jnp.zeros(1, jnp.float16))[0])
print(f"got {out} and a gradient of {slope}, wanted [1, -1] and 0")
sys.exit(not (np.allclose(out, [1, -1], atol=1e-2) and slope == 0))
