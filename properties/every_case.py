"""Recipes for laws that hold for every operation: its own adversarial cases, and its most ordinary ones."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from veriformer.case import Case
from veriformer.law import Domain, Recipe
from veriformer.operations import OPERATIONS
from veriformer.properties.attention_cases import attention_cases
from veriformer.properties.attention_family_cases import (
    cached_attention_cases,
    multi_head_attention_cases,
    plain_cached_attention,
    plain_multi_head_attention,
    plain_varlen_attention,
    varlen_attention_cases,
)
from veriformer.properties.cases import TEMPERATURES, few, layer_norm_cases, plain_attention, plain_rows, softmax_cases
from veriformer.properties.encoder_decoder_cases import encoder_decoder_cases, plain_encoder_decoder
from veriformer.properties.generate_cases import generate_cases, plain_generate
from veriformer.properties.generation_cases import next_token_cases, plain_next_token_probabilities
from veriformer.properties.halting_cases import halting_cases, plain_halting
from veriformer.properties.layer_cases import layer_cases, plain_layer
from veriformer.properties.loss_cases import cross_entropy_cases, plain_cross_entropy
from veriformer.properties.model_cases import decoder_cases, plain_decoder
from veriformer.properties.optimizer_cases import (
    adamw_cases,
    clip_cases,
    noam_cases,
    plain_adamw_step,
    plain_clip_by_global_norm,
    plain_noam_schedule,
)
from veriformer.properties.position_cases import (
    alibi_bias_cases,
    plain_alibi_bias,
    plain_rotary_embedding,
    plain_sinusoidal_positions,
    rotary_embedding_cases,
    sinusoidal_positions_cases,
)
from veriformer.properties.rows_cases import (
    dropout_cases,
    elementwise_cases,
    embedding_cases,
    feed_forward_cases,
    plain_dropout,
    plain_elementwise,
    plain_embedding,
    plain_feed_forward,
    plain_rms_norm,
    rms_norm_cases,
)
from veriformer.properties.transformer_cases import plain_transformer, transformer_cases
from veriformer.properties.universal_cases import plain_universal, universal_cases

_softmax = functools.partial(softmax_cases, axes=True, temperatures=TEMPERATURES)

GENERAL: dict[str, Callable[..., Recipe]] = {
    "softmax": _softmax,
    "log_softmax": _softmax,
    "logsumexp": _softmax,
    "layer_norm": layer_norm_cases,
    "rms_norm": rms_norm_cases,
    "gelu": elementwise_cases,
    "relu": elementwise_cases,
    "feed_forward": feed_forward_cases,
    "sinusoidal_positions": sinusoidal_positions_cases,
    "rotary_embedding": rotary_embedding_cases,
    "alibi_bias": alibi_bias_cases,
    "attention": attention_cases,
    "attention_with_lse": attention_cases,
    "varlen_attention": varlen_attention_cases,
    "cached_attention": cached_attention_cases,
    "multi_head_attention": multi_head_attention_cases,
    "encoder_layer": layer_cases,
    "decoder_layer": layer_cases,
    "encoder": layer_cases,
    "decoder": layer_cases,
    "decoder_lm": decoder_cases,
    "encoder_decoder": encoder_decoder_cases,
    "generate": generate_cases,
    "adaptive_computation_time": halting_cases,
    "act_loop": halting_cases,
    "next_token_probabilities": next_token_cases,
    "transformer": transformer_cases,
    "universal_transformer": universal_cases,
    "dropout": dropout_cases,
    "embedding": embedding_cases,
    "cross_entropy": cross_entropy_cases,
    "adamw_step": adamw_cases,
    "clip_by_global_norm": clip_cases,
    "noam_schedule": noam_cases,
}
"""What makes the cases of each operation."""

PLAIN: dict[str, Callable[[Domain], list[Case]]] = {
    "softmax": plain_rows,
    "log_softmax": plain_rows,
    "logsumexp": plain_rows,
    "layer_norm": plain_rows,
    "rms_norm": plain_rms_norm,
    "gelu": plain_elementwise,
    "relu": plain_elementwise,
    "feed_forward": plain_feed_forward,
    "sinusoidal_positions": plain_sinusoidal_positions,
    "rotary_embedding": plain_rotary_embedding,
    "alibi_bias": plain_alibi_bias,
    "attention": plain_attention,
    "attention_with_lse": plain_attention,
    "varlen_attention": plain_varlen_attention,
    "cached_attention": plain_cached_attention,
    "multi_head_attention": plain_multi_head_attention,
    "encoder_layer": plain_layer,
    "decoder_layer": plain_layer,
    "encoder": plain_layer,
    "decoder": plain_layer,
    "decoder_lm": plain_decoder,
    "encoder_decoder": plain_encoder_decoder,
    "generate": plain_generate,
    "adaptive_computation_time": plain_halting,
    "act_loop": plain_halting,
    "next_token_probabilities": plain_next_token_probabilities,
    "transformer": plain_transformer,
    "universal_transformer": plain_universal,
    "dropout": plain_dropout,
    "embedding": plain_embedding,
    "cross_entropy": plain_cross_entropy,
    "adamw_step": plain_adamw_step,
    "clip_by_global_norm": plain_clip_by_global_norm,
    "noam_schedule": plain_noam_schedule,
}
"""Two or three of the most ordinary cases of each operation."""

EVERY = tuple(GENERAL)
"""All operations."""
WITH_ARRAYS = tuple(name for name in EVERY if OPERATIONS[name].arrays or OPERATIONS[name].params)
"""Those that are given arrays."""
REAL_VALUED = tuple(name for name in EVERY if OPERATIONS[name].results != ("ids",))
"""Those whose results are not whole numbers."""


def any_cases(**wishes: Any) -> Recipe:
    """Cases of whatever operation the law is about.

    wishes (layouts, examples, families, …) reach the operation's own recipe where it knows them.
    """

    @functools.cache
    def own(operation: str) -> Recipe:
        make = GENERAL[operation]
        known = inspect.signature(make).parameters
        return make(**{name: value for name, value in wishes.items() if name in known})

    return dispatched(own)


def by_operation(recipes: dict[str, Recipe], **wishes: Any) -> Recipe:
    """The recipe of the domain's operation, and the general one where none is given."""
    general = any_cases(**wishes)
    return dispatched(lambda operation: recipes.get(operation, general))


def dispatched(own: Callable[[str], Recipe]) -> Recipe:
    """The recipe that a function gives for the domain's operation."""

    def examples(domain: Domain) -> Any:
        return own(domain.operation).examples(domain)

    def strategy(domain: Domain) -> st.SearchStrategy[Any]:
        return own(domain.operation).strategy(domain)

    return Recipe(examples, strategy)


def turned(cases: Recipe) -> Recipe:
    """The same recipe with its pinned cases in reverse order: a second case beside the first."""
    return Recipe(lambda domain: list(cases.examples(domain))[::-1], cases.strategy)


def plain_cases() -> Recipe:
    """The most ordinary cases: normal values, no options, square, as many key heads as query heads."""

    def examples(domain: Domain) -> list[Case]:
        return PLAIN[domain.operation](domain)

    return Recipe(examples, few(examples))
