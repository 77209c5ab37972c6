"""Causal language models of Hugging Face transformers: small ones with random weights, and the caches they take.

A variant is a model, how it attends (eager, sdpa) and its cache: the one that it makes itself, which keeps but the
window where layers have one; "whole", which keeps all; "recording", which keeps all until it is cropped; "static",
with room for CAPACITY tokens. Weights are scaled up, for attention near the average hides mistakes. Softcap and
sinks have no sdpa. crop is left out where the cache says that it cannot: a window without recording.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Cache,
    DynamicCache,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    StaticCache,
)

from veriformer.declarations import Capabilities, Expected

FRAMEWORK = "torch"
DISTRIBUTIONS = ("transformers",)
CAPACITY = 12
SHARP = 4.0
"""By how much random matrices are scaled up."""
_SIZES = {
    "vocab_size": 11,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_GPT2 = {"vocab_size": 11, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 4}
_GPT2 |= {"bos_token_id": None, "eos_token_id": None}
CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_SIZES),
    "qwen3": lambda: Qwen3Config(**_SIZES),
    "mistral": lambda: MistralConfig(**_SIZES, sliding_window=4),
    "gemma2": lambda: Gemma2Config(**_SIZES, sliding_window=4, attn_logit_softcapping=2.0, query_pre_attn_scalar=4),
    "gemma3": lambda: Gemma3TextConfig(**_SIZES, sliding_window=4, layer_types=_TWO, query_pre_attn_scalar=4),
    "gpt_oss": lambda: GptOssConfig(**_SIZES, **_EXPERTS, sliding_window=4, rope_parameters=_PLAIN_ROPE),
    "gpt2": lambda: GPT2Config(**_GPT2),
}
_TWO = ["sliding_attention", "full_attention"]
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def _recording(config: PreTrainedConfig) -> Cache:
    cache = DynamicCache(config=config)
    cache.activate_past_recording()
    return cache


CACHES: dict[str, Callable[[PreTrainedConfig], Cache | None]] = {
    "own": lambda config: None,
    "whole": lambda config: DynamicCache(),
    "recording": _recording,
    "static": lambda config: StaticCache(config=config, max_cache_len=CAPACITY),
}
"""How a session's cache begins; None: the model makes it."""


class Decoder:
    """A causal language model with one kind of cache.

    tokens[B,m], mask[B, tokens so far + m], positions[B,m] -> logits[B,m,V]
    Source: the manual of transformers, Caching; attention_mask counts the cached tokens, position_ids the new ones.
    Raises what the model and its cache raise, IndexError for a token past the end of a static cache.
    """

    def __init__(self, model: PreTrainedModel, cache: str) -> None:
        self.model, self.begin = model, CACHES[cache]
        sliding = bool(getattr(model.config, "sliding_window", None))
        self.vocabulary: int = model.config.vocab_size
        self.window: int | None = model.config.sliding_window if sliding else None
        layers = set(
            getattr(model.config, "layer_types", None) or ["sliding_attention" if sliding else "full_attention"]
        )
        self.max_length = CAPACITY if cache == "static" and "full_attention" in layers else None
        if model.config.model_type == "gpt2":
            self.max_length = self.max_length or model.config.n_positions
        if not sliding or cache in ("whole", "recording"):
            self.crop = self._crop

    def full(self, tokens: Tensor) -> Tensor:
        """Logits[B,T,V] of tokens[B,T], without a cache."""
        return self.model(input_ids=tokens, use_cache=False).logits

    def step(
        self, tokens: Tensor, cache: Cache | None, mask: Tensor | None = None, positions: Tensor | None = None
    ) -> tuple[Tensor, Cache]:
        """Logits[B,m,V] and the cache, which goes on in place."""
        cache = self.begin(self.model.config) if cache is None else cache
        mask = None if mask is None else mask.long()
        out = self.model(input_ids=tokens, attention_mask=mask, position_ids=positions, cache=cache, use_cache=True)
        return out.logits, out.cache

    def reorder(self, cache: Cache, rows: Tensor) -> Cache:
        """Row i from row rows[i], as beam search does it."""
        cache.reorder_cache(rows)
        return cache

    def _crop(self, cache: Cache, length: int) -> Cache:
        cache.crop(min(length - int(cache.get_seq_length()), 0))
        return cache


def _factory(name: str, attention: str, cache: str) -> Callable[[], Decoder]:
    def decoder_lm() -> Decoder:
        chosen = {"attn_implementation": attention} | ({"experts_implementation": "eager"} if name == "gpt_oss" else {})
        model = AutoModelForCausalLM.from_config(CONFIGS[name](), **chosen)
        with torch.no_grad():
            for weight in model.parameters():
                if weight.dim() > 1:
                    weight.mul_(SHARP)
        return Decoder(model.eval(), cache)

    decoder_lm.__qualname__ = f"decoder_lm[{name}, {attention}, {cache}]"
    return decoder_lm


_TABLE = (
    ("llama", "eager", ("own", "static")),
    ("llama", "sdpa", ("own", "static")),
    ("qwen3", "sdpa", ("own",)),
    ("gpt2", "eager", ("own",)),
    ("gpt2", "sdpa", ("own", "static")),
    ("mistral", "eager", ("own",)),
    ("mistral", "sdpa", ("own", "whole", "recording", "static")),
    ("gemma2", "eager", ("own", "recording", "static")),
    ("gemma3", "sdpa", ("own",)),
    ("gpt_oss", "eager", ("own", "static")),
)
"""Models, how they attend, and their caches."""


def _variants() -> dict[str, dict[str, Any]]:
    found = {}
    for name, attention, caches in _TABLE:
        for cache in caches:
            label = "_".join([name, attention, *([cache] if cache != "own" else [])])
            found[label] = {"decoder_lm": _factory(name, attention, cache)}
    return found


VARIANTS = _variants()
# a mixture of experts multiplies the tokens of an expert together, hence another token may change the rounding
CAPABILITIES = {
    name: {"decoder_lm": Capabilities(leak="rounding" if name.startswith("gpt_oss") else "exact")} for name in VARIANTS
}
_IN_SINGLE = tuple(name for name in VARIANTS if "eager" in name and not name.startswith("gpt"))
EXPECTED = [
    Expected(
        "decoder_lm/left-padding-changes-nothing",
        reason="eager attention hides by float64's smallest number, which its softmax in float32 makes -inf: a row of "
        "padding is NaN, and in the next layer NaN times 0 reaches the real tokens",
        link="reports/findings/transformers_eager_float64_padding.py",
        case={"tokens": [[0, 0, 0, 0]]},
        when={"dtype": "float64"},
        variants=_IN_SINGLE,
        kind="not finite",
    ),
]
