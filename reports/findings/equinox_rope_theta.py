"""A rotary embedding turns by the theta of another one of the same size: the shared table of angles forgets theta.

Library: equinox 0.13.8
Law: rotary_embedding/equals-the-reference, rotary_embedding/gradient-equals-the-reference,
rotary_embedding/pair-j-turns-by-its-own-angle, rotary_embedding/base-matters,
rotary_embedding/linear-in-x
Where: equinox:rotary_second
Input: RotaryPositionalEmbedding(4, theta=10000) on two rows, then RotaryPositionalEmbedding(4, theta=100) on ones(2, 4)
Got: 0.98995 in the second row and column: its pair is turned by 1/100, as theta of the first module says
Wanted: 0.89517, turned by 100^(-1/2) = 1/10, as its own theta says (a call equals the reference whatever came before)
Status: theirs, new
Tracker: none found
Searched: "equinox RotaryPositionalEmbedding theta cache ignored", "RoPE theta cache key bug different theta", "wrong
theta second instance same embedding size" in issues; https://github.com/patrick-kidger/equinox/pull/735 made theta an
argument, and the key of internal_rope_embedding_cache remained (embedding_size, dtype)
"""

import sys

import equinox as eqx
import jax.numpy as jnp
import numpy as np

x = jnp.ones((2, 4))
eqx.nn.RotaryPositionalEmbedding(4, theta=10000.0)(x)
got = np.asarray(eqx.nn.RotaryPositionalEmbedding(4, theta=100.0)(x))[1, 1]
wanted = np.cos(0.1) - np.sin(0.1)
print(f"got {got}, wanted {wanted}; theta of the earlier module gives {np.cos(0.01) - np.sin(0.01)}")
sys.exit(not np.isclose(got, wanted, atol=1e-5))
