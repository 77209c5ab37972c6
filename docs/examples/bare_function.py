"""A bare function of NumPy, nothing added for veriformer:

veriformer check attention=docs/examples/bare_function.py:attention
"""

import numpy as np


def attention(q, k, v, *, mask=None, causal=False, scale=None):
    """softmax(q k^T scale) v: q[B,H,Tq,D], k[B,G,Tk,D], v[B,G,Tk,Dv] -> [B,H,Tq,Dv]; rows that see nothing give 0."""
    shared = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, shared, 1), np.repeat(v, shared, 1)
    scores = q @ k.swapaxes(-1, -2) * q.dtype.type(q.shape[-1] ** -0.5 if scale is None else scale)
    seen = np.ones(scores.shape, bool) if mask is None else np.broadcast_to(mask, scores.shape)
    if causal:
        seen = seen & np.tri(*scores.shape[-2:], scores.shape[-1] - scores.shape[-2], dtype=bool)
    scores = np.where(seen, scores, -np.inf)
    top = scores.max(-1, keepdims=True, initial=-np.inf)
    weights = np.exp(scores - np.where(np.isfinite(top), top, 0))
    total = weights.sum(-1, keepdims=True)
    return weights @ v / np.where(total == 0, 1, total)
