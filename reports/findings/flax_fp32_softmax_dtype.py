"""dot_product_attention of linen with force_fp32_for_softmax=True returns float32 for bfloat16 and float16.

Library: flax 0.12.8
Law: attention/keeps-the-dtype
Where: flax:linen_attention_wide
Input: query, key and value of bfloat16 ones, [1, 1, 1, 1], force_fp32_for_softmax=True
Got: float32: the weights stay in float32, and make the product with the values float32 too
Wanted: bfloat16, as without it (the dtype of the computation is that of the inputs; the softmax alone is to be float32)
Status: theirs, new
Tracker: none found
Searched: "flax MultiHeadDotProductAttention force_fp32_for_softmax output dtype float32 instead of bfloat16" in issues;
https://github.com/google/flax/issues/4008 is about the flag itself
"""

import sys

import jax.numpy as jnp
from flax import linen as nn

x = jnp.ones((1, 1, 1, 1), jnp.bfloat16)
got = nn.dot_product_attention(x, x, x, force_fp32_for_softmax=True).dtype
wanted = nn.dot_product_attention(x, x, x).dtype
print(f"got {got}, wanted {wanted}")
sys.exit(got != wanted)
