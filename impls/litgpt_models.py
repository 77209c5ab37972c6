"""LitGPT's GPT with set_kv_cache and input_pos, weights of its own; its RMSNorm, rotary tables and chunked loss.

A model has one cache, which a step without one sets anew: several sessions are not possible, nor old caches. The cache
of the whole length is looked at under a mask; "gpt_trimmed" gives input_pos_maxp1, so that what lies beyond is cut
off. A layer with a sliding window keeps a ring of as many rows. Each variant is a kind of model. cos and sin are in
float32, and so is RMSNorm inside, whatever the tensors are. There is no padding, no crop and no reordering.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from litgpt.config import Config
from litgpt.model import GPT, RMSNorm, apply_rope, apply_rope_interleave, build_rope_cache
from litgpt.utils import chunked_cross_entropy
from torch import Tensor

from veriformer.declarations import Capabilities, Expected

FRAMEWORK = "torch"
DISTRIBUTIONS = ("litgpt", "torch")
LENGTH = 16


class Model:
    """GPT by our names; the cache that it hands out is the number of tokens in that of the network."""

    def __init__(self, network: GPT, trimmed: bool) -> None:
        self.network, self.trimmed, self.max_length = network, trimmed, LENGTH
        self.vocabulary = network.config.padded_vocab_size
        every = network.config.sliding_window_indices
        if every and all(every):
            self.window = network.config.sliding_window_size

    @torch.no_grad()
    def full(self, tokens: Tensor) -> Tensor:
        """The logits without a cache.

        tokens[B,T] -> logits[B,T,V]
        Source: litgpt.model.GPT.forward. Raises ValueError for more tokens than block_size.
        """
        logits: Tensor = self.network(tokens)
        return logits

    @torch.no_grad()
    def step(self, tokens: Tensor, cache: int | None) -> tuple[Tensor, int]:
        """The same for the tokens after those in the cache.

        tokens[B,m] -> logits[B,m,V], the number of tokens so far
        Source: litgpt.generate.base. Raises IndexError past the length of the cache.
        """
        if cache is None:
            self.network.set_kv_cache(len(tokens), device=tokens.device, dtype=self.network.lm_head.weight.dtype)
        length = (cache or 0) + tokens.shape[1]
        at = torch.arange(cache or 0, length, device=tokens.device)
        logits: Tensor = self.network(tokens, at, length if self.trimmed else None)
        return logits, length


def _make(name: str, trimmed: bool = False, **options: Any) -> Callable[[], Model]:
    def decoder_lm() -> Model:
        """A model of two layers and four heads of this kind."""
        config = Config(
            n_layer=2, n_head=4, n_embd=16, head_size=8, intermediate_size=24, block_size=LENGTH, vocab_size=11,
            padded_vocab_size=11, **options,
        )  # fmt: skip
        network = GPT(config)
        for parameter in network.parameters():
            parameter.data += 0.2 * torch.randn_like(parameter)
        return Model(network, trimmed)

    decoder_lm.__qualname__ = f"decoder_lm[{name}]"
    return decoder_lm


def rms_norm(x: Tensor, weight: Tensor, *, eps: float = 1e-6) -> Tensor:
    """litgpt.model.RMSNorm.

    x[...,d], weight[d] -> [...,d]
    weight x / sqrt(mean x^2 + eps)
    Source: litgpt.model.RMSNorm.
    """
    with torch.device("meta"):
        module = RMSNorm(x.shape[-1], eps=eps)
    out: Tensor = torch.func.functional_call(module, {"weight": weight}, (x,))
    return out


def _rms_norm_one_plus(x: Tensor, weight: Tensor, *, eps: float = 1e-6) -> Tensor:
    """litgpt.model.RMSNorm with add_unit_offset, as Gemma has it.

    x[...,d], weight[d] -> [...,d]
    (1 + weight) x / sqrt(mean x^2 + eps)
    Source: litgpt.model.RMSNorm.
    """
    with torch.device("meta"):
        module = RMSNorm(x.shape[-1], eps=eps, add_unit_offset=True)
    out: Tensor = torch.func.functional_call(module, {"weight": weight}, (x,))
    return out


def _rotary(turn: Callable[..., Tensor], apart: bool = False) -> Callable[..., Tensor]:
    def rotary_embedding(x: Tensor, positions: Tensor, *, base: float = 10000.0) -> Tensor:
        """litgpt.model's build_rope_cache and apply_rope, or apply_rope_interleave.

        x[...,T,D], positions[T] -> [...,T,D]
        channels turned by position * base^(-2j/D)
        Source: litgpt.model. Raises TypeError for a base that is no whole number, as its annotation says.
        """
        cos, sin = build_rope_cache(int(positions.max()) + 1, x.shape[-1], base=int(base))
        out: Tensor = turn(x.reshape(1, -1, *x.shape[-2:]), cos[positions][None], sin[positions][None])
        # the interleaved one leaves the first of all pairs in front of the second of all
        out = out.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2) if apart else out
        return out.reshape(x.shape)

    return rotary_embedding


def _cross_entropy(chunk: int, split: bool = False) -> Callable[..., Tensor]:
    def cross_entropy(logits: Tensor, targets: Tensor, *, ignore_index: int = -100) -> Tensor:
        """litgpt.utils.chunked_cross_entropy, its mean; a batch of one sequence.

        logits[N,V], targets[N] -> []
        -mean log softmax(logits)[target]
        Source: litgpt.utils.chunked_cross_entropy.
        """
        given: Any = [part[None] for part in logits.split(3)] if split else logits[None]
        out: Tensor = chunked_cross_entropy(given, targets[None], chunk, ignore_index)
        return out

    return cross_entropy


_LLAMA = {"bias": False, "parallel_residual": False, "norm_class_name": "RMSNorm", "mlp_class_name": "LLaMAMLP",
          "rotary_percentage": 1.0}  # fmt: skip
_GEMMA = {**_LLAMA, "mlp_class_name": "GemmaMLP", "gelu_approximate": "tanh", "scale_embeddings": True,
          "n_query_groups": 2, "post_attention_norm": True, "post_mlp_norm": True,
          "attention_scores_scalar": 8}  # fmt: skip
_WINDOW = {"sliding_window_size": 4, "sliding_window_indices": [1, 1]}
OPTIONS: dict[str, dict[str, Any]] = {
    "gpt_llama": _LLAMA,
    "gpt_trimmed": {**_LLAMA, "trimmed": True},
    "gpt_grouped": {**_LLAMA, "n_query_groups": 2},
    "gpt_one_group": {**_LLAMA, "n_query_groups": 1, "trimmed": True},
    "gpt_neox": {"rotary_percentage": 0.25, "parallel_residual": True},
    "gpt_shared_norm": {"rotary_percentage": 1.0, "parallel_residual": True, "shared_attention_norm": True},
    "gpt_qk_norm": {**_LLAMA, "norm_qk": True, "rope_interleave": True},
    "gpt_window": {**_LLAMA, **_WINDOW},
    "gpt_window_alternating": {**_LLAMA, "sliding_window_size": 4, "sliding_window_indices": [1, 0], "trimmed": True},
    "gpt_softcap": {**_GEMMA, "attention_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gpt_gemma": {**_GEMMA, "final_logit_softcapping": 3.0},
}
"""What each model is made with."""
VARIANTS: dict[str, dict[str, Callable[..., Any]]] = {
    **{name: {"decoder_lm": _make(name, **options)} for name, options in OPTIONS.items()},
    "parts": {
        "rms_norm": rms_norm,
        "rotary_embedding": _rotary(apply_rope),
        "cross_entropy": _cross_entropy(0),
    },
    "parts_gemma": {"rms_norm": _rms_norm_one_plus, "rotary_embedding": _rotary(apply_rope_interleave, True)},
    "loss_chunked": {"cross_entropy": _cross_entropy(2)},
    "loss_of_parts": {"cross_entropy": _cross_entropy(2, split=True)},
}
_MODEL = Capabilities(several_sessions=False)
_SINGLE: dict[str, Any] = {"intermediate": {"float64": "float32"},
                           "accumulate": {"float64": "float32"}}  # fmt: skip
CAPABILITIES = {
    **{name: {"decoder_lm": _MODEL} for name in OPTIONS},
    "parts": {
        "rms_norm": Capabilities(**_SINGLE),
        "rotary_embedding": Capabilities(**_SINGLE),
        "cross_entropy": Capabilities(saved_statistics="storage"),
    },
    "parts_gemma": {
        "rms_norm": Capabilities(**_SINGLE, rms_weight="one_plus"),
        "rotary_embedding": Capabilities(**_SINGLE, rotary_pairs="interleaved"),
    },
    "loss_chunked": {"cross_entropy": Capabilities(saved_statistics="storage", all_ignored="zero")},
    "loss_of_parts": {"cross_entropy": Capabilities(saved_statistics="storage", all_ignored="zero")},
}
EXPECTED = [
    *(
        Expected(
            f"decoder_lm/{law}",
            reason="with softcapping the mask of the cache, True and False, is added to the scores as 1 and 0",
            link="https://github.com/Lightning-AI/litgpt/issues/1672",
            case={"tokens": [[2, 0, 1], [1, 4, 0]]},
            variants=("gpt_softcap",),
        )
        for law in ("cache-changes-nothing", "new-cache-is-empty", "any-walk-equals-full")
    ),
    *(
        Expected(
            f"decoder_lm/{law}",
            reason="once the ring of a window is full, the tokens of a chunk see each other, and its first ones miss "
            "what the others have overwritten",
            link="reports/findings/litgpt_window_ring_chunks.py",
            case={"tokens": tokens},
            where="T > 4",
            variants=("gpt_window", "gpt_window_alternating"),
        )
        for law, tokens in (
            ("cache-changes-nothing", [[2, 0, 1, 3, 5, 7, 6, 4, 9, 8, 1, 0, 3, 2, 5, 7]]),
            ("new-cache-is-empty", [[2, 0, 1, 3, 5, 7, 6, 4, 9, 8, 1, 0, 3, 2, 5, 7]]),
            ("any-walk-equals-full", [[0, 0, 0, 0, 1]]),
        )
    ),
    *(
        Expected(
            f"cross_entropy/{law}",
            reason="torch adds up and counts the losses of a mean in float16",
            link="https://github.com/pytorch/pytorch/issues/61523",
            case=case,
            when={"dtype": "float16", "device": "cpu"},
            where=where,
            variants=variants,
        )
        for law, case, where, variants in (
            (
                "finite-for-finite-logits",
                {"logits": [[30000.0, 0.0]] * 3, "targets": [1, 1, 1]},
                "reduction == 'mean' and N > 1",
                ("parts", "loss_chunked", "loss_of_parts"),
            ),
            (
                "the-mean-counts-every-row",
                {"logits": [[0.0, 0.0]] * 65520, "targets": [0] * 65520},
                "N >= 65520",
                ("parts",),
            ),
        )
    ),
]
