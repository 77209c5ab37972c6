"""The reference of an operation under the conventions that an implementation declares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from veriformer import reference
from veriformer.case import nested
from veriformer.declarations import Capabilities
from veriformer.given_models import TableModel
from veriformer.operations import GIVEN, OPERATIONS, PARAMS


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
    }
    return choices.get(operation, {})


def reference_call(
    operation: str, capabilities: Capabilities, arrays: Mapping[str, Any], keywords: Mapping[str, Any]
) -> Any:
    """What the reference makes of arrays of any framework, by their names in the table.

    keywords: those that are given, positional scalars among them. The result is the reference's own.
    """
    table = OPERATIONS[operation]
    positional = [arrays[name] for name in table.arrays] + [keywords[name] for name in table.scalars]
    if "model" in table.positional:
        positional.insert(0, TableModel(arrays[GIVEN + "table"]).step)
    if "params" in table.positional:
        positional.append(nested({n: a for n, a in arrays.items() if n.startswith(PARAMS)})["params"])
    limits = {"max_length"} if table.words else set()  # of a cache, which the whole has none of
    named = {name: value for name, value in keywords.items() if name not in {*table.scalars, *limits}}
    named |= {name: arrays[name] for name in table.options if name in arrays}
    if not table.arrays:
        named["like"] = np.zeros(0)
    function = getattr(reference, "transformer" if operation == "encoder_decoder" else operation)
    return function(*positional, **named, **words_of(operation, capabilities))
