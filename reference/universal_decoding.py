"""The Universal Transformer token by token: what was computed for earlier tokens, in every step, is kept.

Conventions:
- A cache is a list of (k[B,G,L,D], v[B,G,L,Dv]), one a step, and None at first; `crop` and `reorder` of `decoding`
  work on it. Rows are only ever appended.
- Whether a token has halted depends on it and those before it. So its state is final when the next one comes: later
  steps find the state with which it halted, under their own sinusoid, and nothing is computed anew.
"""

from __future__ import annotations

from typing import Any

from veriformer.reference.layers import KV, Params
from veriformer.reference.universal import Result, recur

Cache = list[KV] | None


def universal_step(
    x: Any, cache: Cache, params: Params, *, heads: int, norm: str = "post", mask: Any = None, memory: Any = None,
    memory_mask: Any = None, max_steps: int, epsilon: float = 0.01,
) -> tuple[Result, list[KV]]:  # fmt: skip
    """What the causal `universal_transformer` gives for new tokens, given the cache of the tokens before them.

    x[B,m,d], cache of L rows, params: universal_transformer -> (out[B,m,d], N[B,m], R[B,m]), cache of L + m rows.

    The new tokens stand at positions L, L + 1, …; mask[B, L + m] covers the earlier ones as well.
    Source: Dehghani et al. 2019 (Universal Transformers), section 2.2, with the state copied after halting; P66, P67.
    Edges: max_steps must stay what it was; m = 0 gives no results and an equal cache.
    Raises ValueError for a cache that does not fit, and as `universal_transformer` does.
    """
    for name, got, wanted in (
        ("steps", len(cache or ()), max_steps),
        ("batch rows", cache[0][0].shape[0] if cache else 0, x.shape[0]),
    ):
        if cache and got != wanted:
            raise ValueError(f"universal_step: cache: got {got} {name}, wanted {wanted}")
    return recur(
        x, params, cache, heads=heads, norm=norm, mask=mask, causal=True, memory=memory, memory_mask=memory_mask,
        max_steps=max_steps, epsilon=epsilon,
    )  # fmt: skip
