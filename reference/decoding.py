"""The models of `transformer` token by token: what was computed for earlier tokens is kept.

Conventions:
- A cache is a list of (k[B,G,L,D], v[B,G,L,Dv]), one a layer, and None at first. Keys are kept as they were
  turned by their positions, so that no row ever changes again. Nothing is written in place.
- Tokens may come in chunks of any sizes, a prompt in one or several: the logits are those of the whole.
"""

from __future__ import annotations

from typing import Any

from array_api_compat import array_namespace

from veriformer.reference.attention import Window
from veriformer.reference.layers import KV, Params, places, rows
from veriformer.reference.transformer import both, embed, encoder, in_layers, keys_values_of, padding, stack, to_logits

Cache = list[KV] | None
Memory = tuple[list[KV], Any]


def decoder_lm_step(
    tokens: Any, cache: Cache, params: Params, *, heads: int, norm: str = "pre", alpha: float = 1.0,
    mask: Any = None, window: Window | None = None, positions: str | None = "rotary", at: Any = None,
    capacity: int | None = None,
) -> tuple[Any, list[KV]]:  # fmt: skip
    """The logits of `decoder_lm` for new tokens, given the cache of the tokens before them.

    tokens[B,m], cache of L rows, params: decoder_lm -> logits[B,m,V], cache of L + m rows.

    mask[B, n + m] covers the new tokens and all n before them, also those whose rows were evicted. The new
    tokens stand `at`[B,m] if given, else at n, n + 1, …; without a mask n is L.
    Source: Pope et al. 2022 (Efficiently Scaling Transformer Inference), section 2.1; P66 to P72.
    Edges: m = 0 gives no logits and an equal cache.
    Raises ValueError if L + m exceeds the capacity, for a cache or mask that does not fit, and as `decoder_lm`.
    """
    _check(tokens, cache, mask, capacity)
    kept, new = rows(cache and cache[0]), tokens.shape[1]
    before = kept if mask is None else mask.shape[1] - new
    seen = None if mask is None else mask[:, None, None, before - kept :]
    at = places(tokens, before, at)
    x = embed(tokens, params, "embedding", positions, at)
    x, cache = stack(
        x, params, cache, heads=heads, norm=norm, alpha=alpha, mask=seen, causal=True, window=window,
        positions=in_layers(positions), at=at,
    )  # fmt: skip
    return to_logits(x, params, "embedding"), cache


def transformer_encode(
    source: Any, params: Params, *, heads: int, norm: str = "post", alpha: Any = 1.0, mask: Any = None,
    positions: str | None = "sinusoidal",
) -> Memory:  # fmt: skip
    """All that the decoder of `transformer` ever asks of the source, computed once.

    source[B,S], params: transformer -> (k[B,G,S,D], v[B,G,S,Dv]) for each decoder layer, and the mask[B,S].

    Source: Vaswani et al. 2017 (Attention Is All You Need), section 3.2.3; P74.
    Raises ValueError as `transformer` does.
    """
    x = embed(source, params, "source_embedding", positions)
    memory = encoder(
        x, params["encoder"], heads=heads, norm=norm, alpha=both(alpha)[0], mask=padding(mask, source),
        positions=in_layers(positions),
    )  # fmt: skip
    return keys_values_of(memory, params["decoder"], heads), mask


def transformer_step(
    tokens: Any, memory: Memory, cache: Cache, params: Params, *, heads: int, norm: str = "post",
    alpha: Any = 1.0, positions: str | None = "sinusoidal",
) -> tuple[Any, list[KV]]:  # fmt: skip
    """The logits of `transformer` for new tokens of the target, given the memory and the cache of those before.

    tokens[B,m], memory: from `transformer_encode`, cache of L rows, params: transformer
    -> logits[B,m,V], cache of L + m rows.

    Source: as `decoder_lm_step`.
    Raises ValueError for a cache or memory that does not fit, and as `transformer` does.
    """
    _check(tokens, cache)
    seen, mask = memory
    at = places(tokens, rows(cache and cache[0]))
    x = embed(tokens, params, "target_embedding", positions, at)
    x, cache = stack(
        x, params["decoder"], cache, seen, heads=heads, norm=norm, alpha=both(alpha)[1], causal=True,
        memory_mask=None if mask is None else mask[:, None, None, :], positions=in_layers(positions), at=at,
    )  # fmt: skip
    return to_logits(x, params, "target_embedding"), cache


def crop(cache: Cache, length: int) -> Cache:
    """The cache as it was after its first `length` rows (P69). Raises ValueError if it never had as many."""
    if not 0 <= length <= rows(cache and cache[0]):
        raise ValueError(f"crop: length: got {length}, wanted 0 to {rows(cache and cache[0])}, the rows of the cache")
    return _each(lambda kept: kept[:, :, :length, :], cache)


def evict(cache: Cache, keep: int) -> Cache:
    """The last `keep` rows of the cache, or all if there are fewer.

    A window (W - 1, 0) still sees all it should if W - 1 rows are kept *between* steps: the first token of a
    chunk needs rows that the last one does not (P71). From then on tokens are more than rows: tell
    `decoder_lm_step` where the new ones stand, by `at` or by a mask of all tokens.
    Raises ValueError for a negative number.
    """
    if keep < 0:
        raise ValueError(f"evict: keep: got {keep}, wanted a number of rows >= 0")
    return _each(lambda kept: kept[:, :, max(kept.shape[2] - keep, 0) :, :], cache)


def reorder(cache: Any, order: Any) -> Any:
    """A cache or memory whose batch row i is the given one's row order[i]; rows may be repeated or left out (P70)."""
    return _each(lambda kept: array_namespace(kept).take(kept, order, axis=0), cache)


def _each(function: Any, cache: Any) -> Any:
    """The function of every array in a cache or memory."""
    if isinstance(cache, (list, tuple)):
        return type(cache)(_each(function, part) for part in cache)
    return None if cache is None else function(cache)


def _check(tokens: Any, cache: Cache, mask: Any = None, capacity: int | None = None) -> None:
    """ValueError for what would step past the capacity, or beside the rows that the tokens continue."""
    if tokens.ndim != 2:
        raise ValueError(f"step: tokens: got shape {tuple(tokens.shape)}, wanted 2 axes: batch, time")
    (batch, new), kept = tokens.shape, rows(cache and cache[0])
    if cache and cache[0][0].shape[0] != batch:
        raise ValueError(f"step: cache: got {cache[0][0].shape[0]} batch rows, wanted {batch}, as in tokens")
    if capacity is not None and kept + new > capacity:
        raise ValueError(f"step: tokens: got {new} beside {kept} in the cache, wanted at most {capacity}, the capacity")
    if mask is not None and (mask.ndim != 2 or mask.shape[0] != batch or mask.shape[1] < kept + new):
        raise ValueError(f"step: mask: got shape {tuple(mask.shape)}, wanted ({batch}, {kept + new}) or longer rows")
