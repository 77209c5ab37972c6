"""LayerNormalization on JAX takes x s - mean s instead of (x - mean) s: a row of one number does not give the bias.

Library: keras 3.15.1
Law: layer_norm/width-one-gives-the-bias, layer_norm/width-one-has-no-weight-gradient
Where: keras_jax:layers
Input: keras.ops.layer_normalization of float32 [[10000]], gamma 1, beta 1, epsilon 1e-12, on JAX under jit
Got: 0: mean s is rounded, and x s, in one fused operation with the sum, is not
Wanted: 1, the bias: x - mean is 0
Status: theirs, new
Backends: jax
Tracker: none found
Searched: "keras LayerNormalization jax jit x * inv + (beta - mean * inv) cancellation large mean precision constant
input nonzero" in issues; https://github.com/tensorflow/tensorflow/issues/117318 is the same of batch normalization
"""

import os
import sys

os.environ["KERAS_BACKEND"] = "jax"
import jax
import jax.numpy as jnp
import keras

x, one = jnp.array([[10000]], jnp.float32), jnp.ones(1, jnp.float32)


def norm(x, gamma, beta):
    return keras.ops.layer_normalization(x, gamma, beta, axis=-1, epsilon=1e-12)


got = jax.jit(norm)(x, one, one).item()
print(f"got {got}, wanted 1")
sys.exit(got != 1)
