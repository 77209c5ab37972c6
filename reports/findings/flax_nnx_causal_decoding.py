"""MultiHeadAttention of nnx, decoding with is_causal=True, sees the first token of its cache and no other.

Library: flax 0.12.8
Law: decoder_lm/cache-changes-nothing, decoder_lm/new-cache-is-empty, decoder_lm/any-walk-equals-full,
decoder_lm/sessions-do-not-interact
Where: flax:nnx_decoder_causal
Input: one head of width 2, two tokens fed one by one with decode=True and is_causal=True
Got: the second output is that of attending to the first token alone: a triangle [1, length] is laid over the cache
Wanted: the second row of the whole (a cache changes nothing), as is_causal=False gives
Status: theirs, known
Tracker: https://github.com/google/flax/issues/5591
Searched: "flax nnx MultiHeadAttention decode is_causal only attends first key cache" in issues
"""

import sys

import jax.numpy as jnp
import numpy as np
from flax import nnx

module = nnx.MultiHeadAttention(1, 2, decode=False, rngs=nnx.Rngs(0))
x = jnp.array([[[1.0, 0.0], [0.0, 1.0]]])
whole = np.asarray(module(x, is_causal=True))
steps = {}
for causal in (True, False):
    module.init_cache(x.shape)
    one = [np.asarray(module(x[:, t : t + 1], decode=True, is_causal=causal)) for t in range(2)]
    steps[causal] = np.concatenate(one, 1)
print(f"got {steps[True][0, 1]}, wanted {whole[0, 1]}; without is_causal {steps[False][0, 1]}")
sys.exit(not np.allclose(steps[True], whole, atol=1e-5))
