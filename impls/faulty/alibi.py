"""Wrong ALiBi biases: one correct table with one switch for each mistake."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from veriformer.declarations import Fault

FRAMEWORK = "numpy"


def _make(fault: str) -> Callable[..., NDArray]:
    def alibi_bias(heads: int, query_length: int, key_length: int) -> NDArray:
        slopes = _slopes(heads, fault).astype(np.float32)
        behind = _behind(query_length, key_length, fault).astype(np.float32)
        if fault == "one_slope_for_all":
            slopes[:] = slopes[0]
        bias = -slopes[:, None, None] * behind
        if fault == "sign_flipped":
            bias = -bias
        if fault == "future_clipped":
            bias = np.minimum(bias, 0)
        if fault == "later_half_steeper":
            bias = np.where(np.arange(query_length)[:, None] > query_length // 2, 2 * bias, bias)
        return bias.astype(np.float32)

    alibi_bias.__qualname__ = f"alibi_bias[{fault}]"
    return alibi_bias


def _behind(queries: int, keys: int, fault: str) -> NDArray:
    """Query position less key position, [Tq, Tk]."""
    if fault == "built_over_queries" and queries == 1:
        return np.zeros((1, keys))
    first = 0 if fault == "top_left" else keys - queries
    position, key = np.arange(first, first + queries), np.arange(keys)
    if fault == "query_one_further":
        position = position + 1
    if fault == "positions_in_bfloat16":
        position, key = _bfloat16(position), _bfloat16(key)
    behind = np.subtract.outer(position, key)
    if fault == "distance_undeclared":
        return np.abs(behind)
    if fault == "shrunk_by_length":
        return behind / keys
    return np.sign(behind) * np.maximum(np.abs(behind) - 1, 0) if fault == "neighbour_free" else behind


def _slopes(heads: int, fault: str) -> NDArray:
    """m_h: those of the next lower power of two, then every second one of twice that."""
    power = 1 << (heads.bit_length() - 1)
    if fault == "any_number_as_a_power_of_two":
        return 2.0 ** (-8 * np.arange(1, heads + 1) / heads)
    if fault == "cut_from_the_next_power":
        upper = power if power == heads else 2 * power
        return 2.0 ** (-8 * np.arange(1, heads + 1) / upper)
    if fault == "starts_at_one":
        return 2.0 ** (-8 * np.arange(heads) / heads) if power == heads else _slopes(heads, "correct")
    if fault == "floor_division":
        return 2.0 ** (-(8 // power) * np.arange(1.0, heads + 1))
    rate = 4 if fault == "half_the_rate" else 8
    slopes = 2.0 ** (-rate * np.arange(1, power + 1) / power)
    between = 2.0 ** (-rate * np.arange(1, 2 * power + 1) / (2 * power))
    between = between if fault == "extra_slopes_in_a_row" else between[0::2]
    slopes = np.concatenate([slopes, between[: heads - power]])
    if fault == "extra_slopes_sorted_in":
        return -np.sort(-slopes)
    if fault == "heads_reversed":
        return slopes[::-1].copy()
    return slopes.astype(np.float16) if fault == "slopes_in_half" else slopes


def _bfloat16(values: NDArray) -> NDArray:
    """Rounded to 8 significant bits, ties away from zero."""
    mantissa, exponent = np.frexp(values.astype(np.float64))
    return np.ldexp(np.floor(np.abs(mantissa) * 256 + 0.5) * np.sign(mantissa), exponent - 8)


# law that must accuse: {variant: (where it was seen, what is wrong)}
_TABLE: dict[str, dict[str, tuple[str, str]]] = {
    "slopes-are-those-of-the-paper": {
        "starts_at_one": ("mutation: heads counted from 0", "the first slope is 1 and not 2^(-8/H)"),
        "floor_division": ("mutation: 8 // H for 8 / H", "the exponent is a whole number"),
        "half_the_rate": ("mutation: 4 for 8", "the last slope is 2^-4 and not 2^-8"),
        "heads_reversed": ("mutation: order of the heads", "the first head is the slowest"),
        "one_slope_for_all": ("mutation: a slope without its head axis", "every head has the first slope"),
        "built_over_queries": ("keras-hub#2861", "keys are counted as queries: one query gets no bias"),
    },
    "heads-come-from-powers-of-two": {
        "any_number_as_a_power_of_two": ("mutation: no case for other numbers of heads", "2^(-8h/H) for all H"),
        "cut_from_the_next_power": ("mutation: next higher power, cut", "the first slopes of the higher power"),
        "extra_slopes_in_a_row": ("mutation: every one for every second", "the extra slopes repeat what is there"),
        "extra_slopes_sorted_in": ("mutation: slopes sorted", "extra slopes stand between the others"),
    },
    "own-key-has-no-bias": {
        "query_one_further": ("vllm#945", "the distance is one too large"),
    },
    "fewer-queries-are-the-last-rows": {
        "top_left": ("mutation: query i at i", "query 0 stands at key 0 whatever the lengths"),
    },
    "nearer-keys-weigh-more": {
        "sign_flipped": ("mutation: a missing minus", "far keys are preferred"),
        "neighbour_free": ("mutation: distance less 1", "the key before the query costs nothing"),
    },
    "rows-differ-by-a-constant": {
        "distance_undeclared": ("mutation: |distance|", "later keys are penalised too, and that is not declared"),
        "future_clipped": ("mutation: only the causal half filled in", "later keys get 0"),
    },
    "translation-changes-nothing": {
        "positions_in_bfloat16": ("mutation: positions of the model's dtype", "positions above 256 are rounded"),
        "later_half_steeper": ("mutation: two kernels for two parts", "rows of the later half have twice the slope"),
    },
    "more-keys-change-nothing": {
        "shrunk_by_length": ("mutation: distances as a share of the length", "distances are divided by Tk"),
    },
    "equals-the-reference": {
        "slopes_in_half": ("mutation: slopes kept short", "slopes are rounded to float16"),
    },
}
FAULTS = {
    variant: Fault("alibi_bias", f"alibi_bias/{law}", source, summary)
    for law, variants in _TABLE.items()
    for variant, (source, summary) in variants.items()
}
VARIANTS = {variant: {"alibi_bias": _make(variant)} for variant in ("correct", *FAULTS)}
