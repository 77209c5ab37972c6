"""The reference of an operation under the conventions that an implementation declares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from veriformer import reference
from veriformer.case import nested
from veriformer.declarations import Capabilities
from veriformer.given_models import given
from veriformer.operation import LISTED, PARAMS
from veriformer.operations import OPERATIONS

TABLES = ("sinusoidal_positions", "alibi_bias")
"""Operations that make a table of numbers alone; the reference asks for an array like which it should be."""


def words_of(operation: str, capabilities: Capabilities) -> dict[str, Any]:
    """The reference's own keywords, which stand for declared choices."""
    top_left = capabilities.causal_alignment == "top_left"
    if operation == "layer_norm":
        return {"epsilon": capabilities.norm_epsilon, "variance": capabilities.norm_variance}
    if operation in ("attention", "attention_with_lse", "multi_head_attention"):
        return {"offset": 0} if top_left else {}
    if operation == "varlen_attention":
        return {"alignment": "top_left"} if top_left else {}
    choices: dict[str, dict[str, Any]] = {
        "rms_norm": {"weight_form": capabilities.rms_weight},
        "gelu": {"form": capabilities.gelu},
        "rotary_embedding": {"pairs": capabilities.rotary_pairs},
        "alibi_bias": {"form": capabilities.alibi},
        "next_token_probabilities": {
            "order": capabilities.sampling_order,
            "exactly_k": capabilities.exact_top_k,
        },
        "cross_entropy": {"smoothing": capabilities.smoothing, "all_ignored": capabilities.all_ignored},
        "adamw_step": {"decay": capabilities.weight_decay, "epsilon_place": capabilities.adam_epsilon},
        "clip_by_global_norm": {"plus": capabilities.clip_epsilon},
        "adaptive_computation_time": {"comparison": capabilities.halting_comparison},
        "act_loop": {"comparison": capabilities.halting_comparison},
    }
    return choices.get(operation, {})


def positional_of(operation: str, arrays: Mapping[str, Any], keywords: Mapping[str, Any]) -> list[Any]:
    """The arguments that the reference's function and its budget take by position."""
    table = OPERATIONS[operation]
    positional = [arrays[name] for name in table.arrays] + [keywords[name] for name in table.scalars]
    if table.given:
        ours = given(table.given, [arrays[name] for name in table.params])
        positional.insert(0, ours.step if table.given == "model" else ours)
    if table.listed:
        positional.insert(0, [array for name, array in arrays.items() if name.startswith(LISTED)])
    if "params" in table.positional:
        positional.append(nested({n: a for n, a in arrays.items() if n.startswith(PARAMS)})["params"])
    return positional


def reference_call(
    operation: str, capabilities: Capabilities, arrays: Mapping[str, Any], keywords: Mapping[str, Any]
) -> Any:
    """What the reference makes of arrays of any framework, by their names in the table.

    keywords: those that are given, positional scalars among them. The result is the reference's own.
    """
    table = OPERATIONS[operation]
    positional = positional_of(operation, arrays, keywords)
    limits = {"max_length"} if table.words else set()  # of a cache, which the whole has none of
    named = {name: value for name, value in keywords.items() if name not in {*table.scalars, *limits}}
    named |= {name: arrays[name] for name in table.options if name in arrays}
    if operation in TABLES:
        named["like"] = np.zeros(0)
    renamed = {"encoder_decoder": "transformer"}
    if named.get("preset", "default") != "default":
        renamed["universal_transformer"] = "universal_dialect"
    function = getattr(reference, renamed.get(operation, operation))
    return function(*positional, **named, **words_of(operation, capabilities))
