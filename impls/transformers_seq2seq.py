"""Sequence-to-sequence models of Hugging Face transformers: small ones with random weights, eager and sdpa.

T5 has relative positions, RMS norms and no scale; BART absolute positions out of a table of LENGTH rows, and post-norm.
A memory is what the encoder gives, with the mask of its source; the cache is the one that the model makes itself.
Weights are scaled up, for attention near the average hides mistakes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForSeq2SeqLM,
    BartConfig,
    EncoderDecoderCache,
    MarianConfig,
    PreTrainedConfig,
    PreTrainedModel,
    T5Config,
)

from veriformer.declarations import Capabilities

FRAMEWORK = "torch"
DISTRIBUTIONS = ("transformers",)
LENGTH = 32
SHARP = 4.0
"""By how much random matrices are scaled up."""
Memory = tuple[Any, Tensor | None]
_T5 = {"vocab_size": 11, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4}
_BART = {
    "vocab_size": 11,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": LENGTH,
    "pad_token_id": 10,
}
CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "t5": lambda: T5Config(**_T5, pad_token_id=10, decoder_start_token_id=10),
    "t5_gated": lambda: T5Config(**_T5, pad_token_id=10, decoder_start_token_id=10, feed_forward_proj="gated-gelu"),
    "bart": lambda: BartConfig(**_BART),
    "marian": lambda: MarianConfig(**_BART, decoder_start_token_id=10),
}


class EncoderDecoder:
    """A sequence-to-sequence model.

    source[B,S], mask[B,S], target[B,T] -> logits[B,T,V]
    Source: the manual of transformers, Encoder-decoder caching. Raises IndexError past the last row of positions.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.vocabulary: int = model.config.vocab_size
        self.max_length = None if model.config.model_type == "t5" else LENGTH

    def encode(self, source: Tensor, mask: Tensor | None = None) -> Memory:
        """The encoder's output and the mask, which the decoder's attention to it needs as well."""
        mask = None if mask is None else mask.long()
        return self.model.get_encoder()(input_ids=source, attention_mask=mask), mask

    def full(self, source: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
        """Logits[B,T,V] without a cache."""
        mask = None if mask is None else mask.long()
        return self.model(input_ids=source, attention_mask=mask, decoder_input_ids=target, use_cache=False).logits

    def step(
        self, tokens: Tensor, memory: Memory, cache: EncoderDecoderCache | None
    ) -> tuple[Tensor, EncoderDecoderCache]:
        """Logits[B,m,V] and the cache, which goes on in place."""
        encoded, mask = memory
        out = self.model(
            encoder_outputs=encoded, attention_mask=mask, decoder_input_ids=tokens, cache=cache, use_cache=True
        )
        return out.logits, out.cache

    def crop(self, cache: EncoderDecoderCache, length: int) -> EncoderDecoderCache:
        """The first tokens alone; what was made of the memory stays."""
        cache.crop(min(length - int(cache.get_seq_length()), 0))
        return cache

    def reorder(self, cache: EncoderDecoderCache, rows: Tensor) -> EncoderDecoderCache:
        """Row i from row rows[i], as beam search does it."""
        cache.reorder_cache(rows)
        return cache


def _factory(name: str, attention: str) -> Callable[[], EncoderDecoder]:
    def encoder_decoder() -> EncoderDecoder:
        model = AutoModelForSeq2SeqLM.from_config(CONFIGS[name](), attn_implementation=attention)
        with torch.no_grad():
            for weight in model.parameters():
                if weight.dim() > 1:
                    weight.mul_(SHARP)
        return EncoderDecoder(model.eval())

    encoder_decoder.__qualname__ = f"encoder_decoder[{name}, {attention}]"
    return encoder_decoder


_TABLE = (
    ("t5", "eager"),
    ("t5", "sdpa"),
    ("t5_gated", "sdpa"),
    ("bart", "eager"),
    ("bart", "sdpa"),
    ("marian", "sdpa"),
)
VARIANTS = {f"{name}_{attention}": {"encoder_decoder": _factory(name, attention)} for name, attention in _TABLE}
CAPABILITIES = {name: {"encoder_decoder": Capabilities()} for name in VARIANTS}
