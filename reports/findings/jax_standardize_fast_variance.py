"""jax.nn.standardize's default variance, E[x^2] - E[x]^2, is wrong by orders of magnitude for rows whose mean is large.

Library: jax 0.10.2
Law: layer_norm/equals-the-reference, layer_norm/shift-changes-nothing, layer_norm/mean-is-zero,
    layer_norm/variance-is-v-over-v-plus-eps, layer_norm/channels-permute, layer_norm/affine-in-weight-and-bias,
    layer_norm/row-alone-is-the-row-in-its-batch, layer_norm/width-one-gives-the-bias,
    layer_norm/width-one-has-no-weight-gradient, layer_norm/finite-for-large-input, layer_norm/gradient-is-finite,
    layer_norm/gradient-equals-the-reference, layer_norm/input-gradient-sums-to-zero,
    layer_norm/gradient-along-the-row-is-what-eps-leaves
Where: jax:standardize
Input: x = [10000, 10001, 10002, 10003], float32, epsilon 1e-5
Got: [-474, -158, 158, 474]
Wanted: [-1.342, -0.447, 0.447, 1.342], as algorithm="stable" gives (a row comes out with mean 0 and variance 1)
Status: theirs, known
Tracker: https://github.com/jax-ml/jax/issues/37281
Searched: "jax.nn.standardize variance catastrophic cancellation large mean algorithm stable" in issues
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

x = np.array([10000.0, 10001.0, 10002.0, 10003.0], "float32")
wanted = (x - x.mean(dtype="float64")) / x.std(dtype="float64")
got = np.asarray(jax.nn.standardize(jnp.asarray(x)))
stable = np.asarray(jax.nn.standardize(jnp.asarray(x), algorithm="stable"))
print(f"got {got}, wanted {wanted}; with algorithm='stable' {stable}")
sys.exit(not np.allclose(got, wanted, atol=1e-3))
