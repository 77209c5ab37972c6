"""x-transformers' decoder-only models, TransformerWrapper around Decoder, with weights of their own.

A cache is what return_intermediates gives. A step is fed the whole prefix and told by cache_age how much of it is new;
"decoder_new_only" is fed the new tokens alone (input_not_include_cache). Masks are those of all keys (of new_only
self_attn_kv_mask), positions those of all keys too (of new_only, the new ones); relative biases, ALiBi and sinusoids
take none of several rows. It has no crop and no reordering; a limit only where positions are learned.
Each variant is an option, or one beside flash=True, which must not change the answer. softmax is in float32 whatever
the tensors are. Every weight is moved at random, since many begin where they have no effect.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from veriformer.declarations import Capabilities, Expected

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # it still compiles a function by torch.jit.script
    from x_transformers import Decoder, TransformerWrapper

FRAMEWORK = "torch"
DISTRIBUTIONS = ("x-transformers", "torch")
TOKENS, LENGTH = 11, 16


@dataclass(frozen=True)
class Cache:
    """Tokens and positions so far, and what the library keeps of them."""

    tokens: Tensor
    positions: Tensor | None
    kept: Any


class Model:
    """TransformerWrapper by our names. window: how many tokens one sees, itself among them."""

    vocabulary = TOKENS

    def __init__(self, network: TransformerWrapper, learned: bool, window: int | None, new_only: bool) -> None:
        self.network, self.window, self.new_only = network, window, new_only
        if learned:
            self.max_length = LENGTH

    @torch.no_grad()
    def full(self, tokens: Tensor) -> Tensor:
        """The logits without a cache.

        tokens[B,T] -> logits[B,T,V]
        Source: the x-transformers README. Raises AssertionError for more tokens than there are learned positions.
        """
        logits: Tensor = self.network(tokens)
        return logits

    @torch.no_grad()
    def step(
        self, tokens: Tensor, cache: Cache | None, *, mask: Tensor | None = None, positions: Tensor | None = None
    ) -> tuple[Tensor, Cache]:
        """The same for the tokens after those in the cache.

        tokens[B,m], mask[B,L+m] and positions[B,m] or None -> logits[B,m,V], the cache
        Source: x_transformers.autoregressive_wrapper. Raises as full does.
        """
        new, places = tokens.shape[1], positions
        if cache is not None:
            tokens = torch.cat([cache.tokens, tokens], 1)
            if positions is not None and cache.positions is not None:
                places = torch.cat([cache.positions, positions], 1)
        said: dict[str, Any] = {}
        if mask is not None:
            said["self_attn_kv_mask" if self.new_only else "mask"] = mask
        if positions is not None:
            said["pos"] = positions if self.new_only else places
        said |= {} if cache is None else {"cache": cache.kept, "cache_age": new}
        given = tokens[:, -new:] if self.new_only else tokens
        logits, kept = self.network(given, return_intermediates=True, input_not_include_cache=self.new_only, **said)
        return logits[:, -new:], Cache(tokens, places, kept)


class Unplaced(Model):
    """The same where the library takes no positions, as beside a relative bias."""

    def step(self, tokens: Tensor, cache: Cache | None, *, mask: Tensor | None = None) -> tuple[Tensor, Cache]:
        """step without positions."""
        return super().step(tokens, cache, mask=mask)


def _make(
    name: str, *, wrapper: dict[str, Any] | None = None, window: int | None = None, new_only: bool = False,
    **options: Any,
) -> Callable[[], Model]:  # fmt: skip
    def decoder_lm() -> Model:
        """A model of two layers and four heads with these options."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            layers = Decoder(dim=16, depth=2, heads=4, attn_dim_head=8, ff_mult=2, **options)
            network = TransformerWrapper(num_tokens=TOKENS, max_seq_len=LENGTH, attn_layers=layers, **wrapper or {})
        for parameter in network.parameters():
            parameter.data += 0.2 * torch.randn_like(parameter)
        sinusoidal = (wrapper or {}).get("scaled_sinu_pos_emb", False)
        learned = not layers.disable_abs_pos_emb and not sinusoidal
        kind = Unplaced if sinusoidal or options.get("rel_pos_bias") or options.get("alibi_pos_bias") else Model
        return kind(network, learned, window, new_only)

    decoder_lm.__qualname__ = f"decoder_lm[{name}]"
    return decoder_lm


_ROTARY = {"rotary_pos_emb": True, "rotary_emb_dim": 8}
_LATENT = {"attn_use_latent_q": True, "attn_dim_latent_q": 8, "attn_use_latent_kv": True, "attn_dim_latent_kv": 8}
OPTIONS: dict[str, dict[str, Any]] = {
    "decoder": {},
    "decoder_flash": {"attn_flash": True},
    "decoder_new_only": {"new_only": True},
    "decoder_rotary": _ROTARY,
    "decoder_rotary_flash": {**_ROTARY, "attn_flash": True},
    "decoder_alibi": {"alibi_pos_bias": True},
    "decoder_alibi_flash": {"alibi_pos_bias": True, "attn_flash": True},
    "decoder_sinusoidal": {"wrapper": {"scaled_sinu_pos_emb": True}},
    "decoder_relative": {"rel_pos_bias": True},
    "decoder_grouped": {"attn_kv_heads": 2},
    "decoder_one_kv_flash": {"attn_one_kv_head": True, "attn_flash": True},
    "decoder_qk_norm": {"attn_qk_norm": True, "attn_qk_norm_dim_scale": True},
    "decoder_softclamp": {"attn_softclamp_logits": True, "attn_logit_softclamp_value": 2.0},
    "decoder_memory_kv": {"attn_num_mem_kv": 3, "attn_flash": True},
    "decoder_window": {"attn_max_attend_past": 3, "window": 4},
    "decoder_window_flash": {"attn_max_attend_past": 3, "attn_flash": True, "window": 4},
    "decoder_sink": {"attn_head_learned_sink": True},
    "decoder_latent": {**_LATENT, "attn_latent_rope_subheads": 2, **_ROTARY},
    "decoder_post_norm": {"pre_norm": False, "use_rmsnorm": True},
    "decoder_residual_streams": {"num_residual_streams": 2, "add_value_residual": True},
    "decoder_data_dependent_alibi": {"attn_data_dependent_alibi": True},
    "decoder_shift_tokens": {"shift_tokens": 1},
    "decoder_orthogonal_values": {"attn_orthog_projected_values": True},
}
"""What each variant is made with."""
VARIANTS = {name: {"decoder_lm": _make(name, **options)} for name, options in OPTIONS.items()}
_KEPT = Capabilities(cache="persistent")
CAPABILITIES = {name: {"decoder_lm": _KEPT} for name in VARIANTS}
_TOKENS = {"tokens": [[2, 0, 1, 3, 5, 7], [1, 4, 0, 6, 2, 9]]}
_STEPS = ("cache-changes-nothing", "new-cache-is-empty", "sessions-do-not-interact", "any-walk-equals-full")
_PADDED = ("left-padding-changes-nothing", "defaults-may-be-said")


def _known(variant: str, laws: Sequence[str], reason: str, finding: str, **more: Any) -> list[Expected]:
    """Failures of a variant wherever these laws look."""
    said = {"case": _TOKENS, "where": "T > 1", **more}
    return [Expected(f"decoder_lm/{law}", reason=reason, link=finding, variants=(variant,), **said) for law in laws]


_FORGETS = "a step makes the biases of its own tokens alone; one is added to every key, several do not fit"
_UNSHIFTED = "a step shifts its own tokens alone: the first gets zeros in place of the token before it"
_WHOLE = "values are projected on those of the whole sequence as one vector, later tokens among them"
_OVERFLOW = "-finfo(float64).max is -inf in the softmax, which is in float32: a row of padding is NaN"
_EAGER = tuple(name for name, said in OPTIONS.items() if not said.get("attn_flash") and "qk_norm" not in name)
EXPECTED = [
    *_known(
        "decoder_data_dependent_alibi", (*_STEPS, "defaults-may-be-said"), _FORGETS,
        "reports/findings/x_transformers_cached_forgetting_alibi.py",
        when={"dtype": "float64, float32"},
    ),
    *_known(
        "decoder_data_dependent_alibi", ("cache-changes-nothing",), _FORGETS,
        "reports/findings/x_transformers_cached_forgetting_alibi.py", when={"dtype": "float16"},
        case={"tokens": [[2, 0, 1, 3, 5, 7, 1, 4, 0, 6, 2, 9]]},
    ),
    *_known(
        "decoder_data_dependent_alibi", ("steps-are-taken",), _FORGETS,
        "reports/findings/x_transformers_cached_forgetting_alibi.py",
        kind="raised",
    ),
    *_known(
        "decoder_data_dependent_alibi", ("left-padding-changes-nothing",), _FORGETS,
        "reports/findings/x_transformers_cached_forgetting_alibi.py", when={"dtype": "float64, float32"},
        case={"tokens": [[2, 0, 1], [1, 4, 0]]},
    ),
    *_known(
        "decoder_data_dependent_alibi", ("masked-tokens-have-no-influence",), _FORGETS,
        "reports/findings/x_transformers_cached_forgetting_alibi.py", when={"dtype": "float64"}, kind="refused",
        where="",
    ),
    *_known(
        "decoder_shift_tokens", _STEPS, _UNSHIFTED, "reports/findings/x_transformers_cached_shift_tokens.py",
    ),
    *_known(
        "decoder_shift_tokens", (*_PADDED, "masked-tokens-have-no-influence"),
        "the shift of a step is given the mask of all keys, which does not fit its own tokens",
        "reports/findings/x_transformers_cached_shift_tokens.py", kind="refused", where="",
    ),
    *_known(
        "decoder_orthogonal_values",
        (*_STEPS, *_PADDED, "prefix-decides", "future-has-no-influence"), _WHOLE,
        "reports/findings/x_transformers_orthogonal_values_leak.py",
    ),
    *_known(
        "decoder_orthogonal_values", ("masked-tokens-have-no-influence",), _WHOLE,
        "reports/findings/x_transformers_orthogonal_values_leak.py", when={"dtype": "float32, bfloat16, float16"},
    ),
    *(
        entry
        for variant in _EAGER
        if variant not in ("decoder_data_dependent_alibi", "decoder_shift_tokens", "decoder_orthogonal_values")
        for entry in _known(
            variant, ("left-padding-changes-nothing",), _OVERFLOW,
            "reports/findings/x_transformers_float64_empty_rows.py",
            when={"dtype": "float64"}, kind="not finite",
        )
        if variant not in ("decoder_alibi", "decoder_relative", "decoder_sinusoidal", "decoder_sink")
    ),
]  # fmt: skip
