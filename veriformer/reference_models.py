"""The reference's models as objects, so that a law can be tried on them as on anybody's."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from veriformer import reference

WIDTH, HEADS = 8, 2
"""Of the stand-in for a model whose weights nobody knows."""


class _Cached:
    """What can be done with the reference's caches, whichever model they are of."""

    def crop(self, cache: Any, length: int) -> Any:
        """The cache as it was after `length` tokens."""
        return reference.crop(cache, length)

    def reorder(self, cache: Any, rows: Any) -> Any:
        """The cache with batch row i taken from row rows[i]."""
        return reference.reorder(cache, rows)


class ReferenceDecoder(_Cached):
    """The decoder-only model of the reference with a cache; old caches stay valid.

    params: decoder_lm; keywords: heads, norm, alpha, window, positions, max_length. See `reference.decoder_lm`.
    """

    def __init__(self, params: dict[str, Any], *, max_length: int | None = None, **keywords: Any) -> None:
        self.params, self.max_length, self.keywords = params, max_length, keywords

    def full(self, tokens: Any) -> Any:
        """logits[B,T,V]. Raises ValueError for more tokens than max_length."""
        self._fits(tokens.shape[1])
        return reference.decoder_lm(tokens, self.params, **self.keywords)

    def step(self, tokens: Any, cache: Any, *, mask: Any = None, positions: Any = None) -> tuple[Any, Any]:
        """logits[B,m,V] and the cache. Raises ValueError past max_length."""
        return reference.decoder_lm_step(
            tokens, cache, self.params, mask=mask, at=positions, capacity=self.max_length, **self.keywords
        )

    def _fits(self, length: int) -> None:
        if self.max_length is not None and length > self.max_length:
            raise ValueError(f"got {length} tokens, wanted at most {self.max_length}")


class ReferenceEncoderDecoder(_Cached):
    """The encoder-decoder of the reference with a cache. See `reference.transformer`."""

    def __init__(self, params: dict[str, Any], **keywords: Any) -> None:
        self.params, self.keywords = params, keywords

    def full(self, source: Any, target: Any, mask: Any = None) -> Any:
        """logits[B,T,V]."""
        return reference.transformer(source, target, self.params, mask=mask, **self.keywords)

    def encode(self, source: Any, mask: Any = None) -> Any:
        """The memory, with its mask."""
        return reference.transformer_encode(source, self.params, mask=mask, **self.keywords)

    def step(self, tokens: Any, memory: Any, cache: Any) -> tuple[Any, Any]:
        """logits[B,m,V] and the cache."""
        return reference.transformer_step(tokens, memory, cache, self.params, **self.keywords)


MODELS: Mapping[str, Any] = {"decoder_lm": ReferenceDecoder, "encoder_decoder": ReferenceEncoderDecoder}
"""operation -> the reference's factory for it, with weights."""


@functools.cache
def stand_in(
    operation: str, vocabulary: int, window: int | None = None, max_length: int | None = None, source: int | None = None
) -> Any:
    """A model of the reference with weights of its own, for laws on a model whose weights nobody knows.

    window: W tokens, itself among them. source: the vocabulary of the source, if another.
    """
    generator = np.random.default_rng(vocabulary)
    sizes: dict[str, Any] = {
        "width": WIDTH,
        "heads": HEADS,
        "inner": WIDTH,
        "layers": 1,
        "vocabulary": vocabulary,
        "biases": True,
    }
    if operation == "encoder_decoder":
        params = reference.initial_transformer(generator, **{**sizes, "layers": (1, 1)})
        if source:
            params["source_embedding"] = generator.normal(size=(source, WIDTH))
        return ReferenceEncoderDecoder(params, heads=HEADS)
    params = reference.initial_decoder_lm(generator, **sizes)
    seen = None if window is None else (window - 1, 0)
    return ReferenceDecoder(params, heads=HEADS, window=seen, max_length=max_length)


def sample_weights(operation: str) -> Any:
    """The smallest weights that any implementation takes, for a first look at the object that it makes of them."""
    return stand_in(operation, 3).params
