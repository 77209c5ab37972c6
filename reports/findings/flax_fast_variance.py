"""LayerNorm's default variance, E[x^2] - E[x]^2, is wrong by orders of magnitude for rows whose mean is large.

Library: flax 0.12.8
Law: layer_norm/equals-the-reference, layer_norm/mean-is-zero, layer_norm/variance-is-v-over-v-plus-eps,
layer_norm/shift-changes-nothing, layer_norm/affine-in-weight-and-bias, layer_norm/channels-permute,
layer_norm/gradient-equals-the-reference
Where: flax:linen, flax:nnx
Input: x = [10000, 10001, 10002, 10003], float32, epsilon 1e-6
Got: [-1500, -500, 500, 1500], linen and nnx alike
Wanted: [-1.342, -0.447, 0.447, 1.342], as use_fast_variance=False gives (a row comes out with mean 0 and variance 1)
Status: theirs, known
Tracker: https://github.com/google/flax/discussions/1797
Searched: "flax LayerNorm use_fast_variance numerical instability large mean catastrophic cancellation" in issues; the
manual calls it faster and less stable, https://flax.readthedocs.io/en/latest/api_reference/flax.nnx/nn/normalization.html
"""

import sys

import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

x = np.array([10000.0, 10001.0, 10002.0, 10003.0], "float32")
wanted = (x - x.mean(dtype="float64")) / x.std(dtype="float64")
params = {"params": {"scale": jnp.ones(4), "bias": jnp.zeros(4)}}
by_linen = np.asarray(linen.LayerNorm().apply(params, x))
by_nnx = np.asarray(nnx.LayerNorm(4, rngs=nnx.Rngs(0))(jnp.asarray(x)))
exact = np.asarray(linen.LayerNorm(use_fast_variance=False).apply(params, x))
print(f"got {by_linen} (linen), {by_nnx} (nnx), wanted {wanted}; without fast variance {exact}")
sys.exit(not (np.allclose(by_linen, wanted, atol=1e-3) and np.allclose(by_nnx, wanted, atol=1e-3)))
