"""From logits to text in NumPy: probabilities of the next token by ranks, greedy generation by rows that go on.

float64 and float32 are computed in their own dtype; bfloat16 (of ml_dtypes) and float16 are widened
to float32 and rounded once at the end.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from veriformer.declarations import DTYPES, Capabilities

FRAMEWORK = "numpy"
CAPABILITIES = {
    "next_token_probabilities": Capabilities(
        dtypes=DTYPES,
        intermediate={"float64": "float64", "default": "float32"},
        zero_temperature=True,
        exact_top_k=True,
    ),
}


def next_token_probabilities(
    logits: NDArray, *, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
) -> NDArray:
    """The softmax of the logits over those that the filters leave.

    logits[..., V] -> p[..., V]
    softmax(logits / T) by rank; the first k ranks stay, of these the first whose predecessors have less than p
    Source: Fan, Lewis, Dauphin 2018, section 5; Holtzman et al. 2019, section 3.1.
    Of equal logits the first stay. T = 0 is the limit; top_p = 0 leaves one token.
    """
    z = _cooled(_wide(logits), temperature)
    ranks = np.argsort(-z, axis=-1, kind="stable")
    e = np.exp(np.take_along_axis(z, ranks, -1))
    if top_k is not None:
        e[..., top_k:] = 0
    if top_p is not None:
        mass = np.cumsum(e, axis=-1)
        before = (mass - e) / mass[..., -1:]
        e[..., 1:][before[..., 1:] >= top_p] = 0
    p = np.empty_like(e)
    np.put_along_axis(p, ranks, e / e.sum(axis=-1, keepdims=True), -1)
    return p.astype(logits.dtype)


def generate(model: Any, prompt: NDArray, *, max_length: int, end: int | None = None, pad: int = 0) -> NDArray:
    """The prompt, and the likeliest token after it again and again; rows that have ended leave the model's batch.

    model: a decoder_lm that can reorder, prompt[B,T] -> ids[B,max_length]
    x_n = argmax of the logits after x_0 … x_(n-1), the first of several; after end only pad
    Source: Vaswani et al. 2017, section 3.
    An end in the prompt does not count. Raises ValueError for an empty prompt or one longer than max_length.
    """
    rows, length = prompt.shape
    if not 1 <= length <= max_length:
        raise ValueError(f"prompt: got {length} tokens, wanted 1 to {max_length}")
    ids = np.full((rows, max_length), pad, prompt.dtype)
    ids[:, :length] = prompt
    going, new, cache = np.arange(rows), prompt, None
    for place in range(length, max_length):
        logits, cache = model.step(new, cache)
        chosen = logits[:, -1].argmax(axis=-1)
        ids[going, place] = chosen
        on = np.arange(len(going)) if end is None else np.flatnonzero(chosen != end)
        if not on.size:
            break
        if on.size < going.size:
            cache = model.reorder(cache, on)
        going, new = going[on], chosen[on, None]
    return ids


def _cooled(z: NDArray, temperature: float) -> NDArray:
    """z less its largest, over T; at T = 0 nothing but the largest is left."""
    top = z.max(axis=-1, keepdims=True)
    if temperature == 0:
        return np.where(z == top, z.dtype.type(0), z.dtype.type(-np.inf))
    return (z - top) / z.dtype.type(temperature)


def _wide(x: NDArray) -> NDArray:
    return x if x.dtype == np.float64 else x.astype(np.float32)
