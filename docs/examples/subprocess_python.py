"""Attention as a program of its own: NumPy, and nothing of veriformer.

veriformer check "attention=subprocess:python docs/examples/subprocess_python.py"

Each line on standard input is a question in JSON, each line on standard output its answer. Arrays come and go in .npz
files, which the question names. What is for people goes to standard error.
"""

import json
import sys

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


OPERATIONS = {"attention": attention}
KEYWORDS = {"attention": ["mask", "causal", "scale"]}


def answer(question):
    """What is said to one question."""
    if question["call"] == "hello":
        return {"operations": KEYWORDS, "dtypes": ["float64", "float32"]}
    words = {name: float(w) if isinstance(w, str) else w for name, w in question["keywords"].items()}  # inf, nan
    arrays = dict(np.load(question["arrays"]))
    np.savez(question["results"], out=OPERATIONS[question["call"]](**arrays, **words))
    return {"ok": True}


if __name__ == "__main__":
    for line in sys.stdin:
        try:
            said = answer(json.loads(line))
        except Exception as error:
            said = {"error": repr(error)}
        print(json.dumps(said), flush=True)
