"""dot_product_attention under jit refuses float16 on the CPU, and bfloat16 for some shapes; called eagerly it works.

Library: jax 0.10.2
Law: attention/returns-an-array, attention/a-single-key-takes-the-whole-cotangent, attention/hidden-equals-deleted,
attention/leading-keys-hidden, multi_head_attention/returns-an-array,
multi_head_attention/gradient-is-linear-in-the-cotangent, multi_head_attention/hidden-rows-may-be-deleted
Where: jax:attention, jax:attention_xla, flax:nnx_attention, flax:nnx_heads
Input: query, key and value of ones, [1, 2, 1, 2] in float16 and [1, 1, 1, 1] in bfloat16, under jax.jit on the CPU
Got: "The precision 'F16_F16_F32' is not supported by dot_general on CPU"; "Algorithm not supported by the
ElementalIrEmitter: ALG_DOT_BF16_BF16_F32"
Wanted: ones (compiling a function does not take away dtypes or shapes). The fallback to the default precision is a try
around the einsum; under jit the error comes later, when the whole is compiled
Status: theirs, known
Tracker: https://github.com/keras-team/keras-hub/pull/2354
Searched: "Algorithm not supported by the ElementalIrEmitter ALG_DOT_BF16_BF16_F32", "dot_product_attention fails under
jit on CPU float16 bfloat16 fallback" in issues; keras-hub works around float16 and keras#21112 saw bfloat16 on a T4
"""

import os
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp

faults = 0
for dtype, shape in (("float16", (1, 2, 1, 2)), ("bfloat16", (1, 1, 1, 1))):
    x = jnp.ones(shape, dtype)
    print(dtype, "eagerly:", jax.nn.dot_product_attention(x, x, x).ravel())
    try:
        print(dtype, "under jit:", jax.jit(jax.nn.dot_product_attention)(x, x, x).ravel())
    except Exception as error:
        faults += 1
        print(dtype, "under jit:", str(error).splitlines()[0])
sys.exit(faults > 0)
