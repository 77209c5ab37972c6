"""A function of JAX, compiled; its gradients come from JAX:

veriformer check attention=docs/examples/jax_function.py:attention
"""

import functools

import jax
import jax.numpy as jnp


@functools.partial(jax.jit, static_argnames=("causal",))
def attention(q, k, v, *, mask=None, causal=False, scale=None):
    """softmax(q k^T scale) v: q[B,H,Tq,D], k[B,G,Tk,D], v[B,G,Tk,Dv] -> [B,H,Tq,Dv]; rows that see nothing give 0."""
    shared = q.shape[1] // k.shape[1]
    k, v = jnp.repeat(k, shared, 1), jnp.repeat(v, shared, 1)
    scores = q @ k.swapaxes(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    seen = jnp.ones(scores.shape, bool) if mask is None else jnp.broadcast_to(mask, scores.shape)
    if causal:
        seen = seen & jnp.tri(*scores.shape[-2:], scores.shape[-1] - scores.shape[-2], dtype=bool)
    weights = jax.nn.softmax(scores, axis=-1, where=seen)
    return jnp.where(seen.any(-1, keepdims=True), weights @ v, 0)
