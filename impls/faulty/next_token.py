"""Wrong probabilities of the next token: one correct implementation by ranks with one switch for each mistake."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from veriformer.declarations import Capabilities, Fault

FRAMEWORK = "numpy"
LANES, CANDIDATES = 8, 8


def _make(fault: str) -> Callable[..., NDArray]:
    def next_token_probabilities(
        logits: NDArray, *, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
    ) -> NDArray:
        z = logits if logits.dtype == np.float64 else logits.astype(np.float32)
        if fault == "minus_infinity_is_finite":
            z = np.where(np.isneginf(z), z.dtype.type(-1e4), z)
        if fault == "filters_without_effect":
            top_k = top_p = None
        with np.errstate(all="ignore"):
            scaled = _scaled(z, temperature, fault)
            ranks = _ranks(scaled, fault)
            s = np.take_along_axis(scaled, ranks, -1)
            stays = _filtered(s, temperature, top_k, top_p, logits.dtype, fault)
            if fault == "first_token_always_stays":
                stays |= ranks == 0
            if fault == "temperature_after_filters":
                s = s / s.dtype.type(temperature)
            p = _placed(_shares(s, stays, temperature, fault), ranks, top_k is not None or top_p is not None, fault)
            if fault == "greedy_divides_by_minus_one" and top_k == 1:
                p = p + 0 * np.exp(z / z.dtype.type(-1))
        if fault == "filters_in_place" and not stays.all():
            logits[_placed(stays, ranks, False, fault) == 0] = -np.inf
        return p.astype(logits.dtype)

    next_token_probabilities.__qualname__ = f"next_token_probabilities[{fault}]"
    return next_token_probabilities


def _scaled(z: NDArray, temperature: float, fault: str) -> NDArray:
    """z / T."""
    if fault in ("temperature_after_softmax", "temperature_after_filters"):
        return z
    if fault == "temperature_multiplies":
        return z * z.dtype.type(temperature)
    if fault == "temperature_floor":
        temperature = max(temperature, 0.05)
    scaled = z / z.dtype.type(temperature)
    return np.where(np.isneginf(scaled), scaled, np.clip(scaled, -50, 50)) if fault == "logits_clipped" else scaled


def _ranks(z: NDArray, fault: str) -> NDArray:
    """The tokens, the likeliest first."""
    keys = {"top_k_of_magnitudes": -np.abs(z), "least_probable_stay": z}.get(fault, -z)
    if fault == "mass_in_vocabulary_order":
        return np.broadcast_to(np.arange(z.shape[-1]), z.shape).copy()
    return np.argsort(keys, axis=-1, kind="stable")


def _filtered(
    s: NDArray, temperature: float, top_k: int | None, top_p: float | None, dtype: np.dtype, fault: str
) -> NDArray:
    """Which of the ranks stay after both filters."""
    everything = np.ones(s.shape, bool)
    by_k = everything if top_k is None else _top_k(s, top_k, temperature, fault)
    if top_p is None or fault == "zero_means_no_top_p" and not top_p:
        return by_k.copy()
    counted = everything if fault in ("top_p_of_unfiltered", "top_p_before_top_k") else by_k
    stays = by_k & _top_p(s, counted, top_p, temperature, dtype, fault)
    if fault == "nucleus_of_the_first_row":
        stays = np.broadcast_to(stays.reshape(-1, s.shape[-1])[0], s.shape).copy()
    return stays


def _top_k(s: NDArray, k: int, temperature: float, fault: str) -> NDArray:
    size = s.shape[-1]
    if fault == "mass_in_vocabulary_order":
        return np.argsort(np.argsort(-s, axis=-1, kind="stable"), axis=-1) < k
    if fault == "ties_stay_beyond_k":
        return s >= s[..., min(k, size) - 1, None]
    if fault == "top_k_of_the_batch":
        return (s >= np.sort(s, axis=None)[::-1][min(k, s.size) - 1]) | (np.arange(size) == 0)
    k = {
        "k_plus_one": k + 1,
        "k_minus_one": max(k - 1, 1),
        "k_at_most_eight": min(k, CANDIDATES),
        "k_wraps_around": (k - 1) % size + 1,
        "temperature_scales_k": max(int(k * temperature), 1),
    }.get(fault, k)
    return np.broadcast_to(np.arange(size) < k, s.shape)


def _top_p(s: NDArray, counted: NDArray, p: float, temperature: float, dtype: np.dtype, fault: str) -> NDArray:
    """The ranks before which less than p of what is counted lies, and the first."""
    if fault == "nucleus_at_inverse_temperature":
        s = s * s.dtype.type(temperature) ** 2
    e = np.where(counted, np.exp(s - s.max(axis=-1, keepdims=True)), 0)
    total = np.exp(s - s.max(axis=-1, keepdims=True)).sum(axis=-1, keepdims=True)
    if fault == "top_p_without_renormalised_top_k":
        return np.cumsum((e / total)[..., ::-1], axis=-1)[..., ::-1] > 1 - p
    share = e / e.sum(axis=-1, keepdims=True)
    stays = _within(share, _cumulated(share, dtype, fault), 1 - p if fault == "nucleus_of_the_rest" else p, fault)
    if fault != "empty_nucleus":
        stays[..., 0] = True
    if fault == "ties_stay_beyond_p":
        stays = share >= np.where(stays, share, 2).min(-1, keepdims=True)
    return stays


def _cumulated(share: NDArray, dtype: np.dtype, fault: str) -> NDArray:
    """The mass up to each rank."""
    sums = {"mass_in_half": np.dtype(np.float16), "mass_in_bfloat16": dtype}.get(fault, share.dtype)
    return np.add.accumulate(share.astype(sums), axis=-1).astype(share.dtype)


def _within(share: NDArray, mass: NDArray, p: float, fault: str) -> NDArray:
    before = mass - share
    if fault in ("mass_in_half", "mass_in_bfloat16"):
        before = np.concatenate([np.zeros_like(mass[..., :1]), mass[..., :-1]], axis=-1)
    if fault == "nucleus_one_too_small":
        return mass <= p
    if fault == "nucleus_one_too_large":
        return np.concatenate([before[..., :1], before[..., :-1]], axis=-1) < p
    if fault == "p_compared_with_each":
        return share >= p
    return before <= p if fault == "one_more_at_equality" else before < p


def _shares(s: NDArray, stays: NDArray, temperature: float, fault: str) -> NDArray:
    """The softmax of what stays, 0 for the rest."""
    top = s.max(axis=-1, keepdims=True)
    e = np.exp(s - np.where(np.isneginf(top), 0, top))
    kept = np.where(stays, e, 0)
    total = (e if fault == "not_renormalised" else kept).sum(axis=-1, keepdims=True)
    if fault == "absent_lanes_count" and s.shape[-1] % LANES:
        total = total + (LANES - s.shape[-1] % LANES) * np.exp(-top)
    if fault == "normaliser_of_the_batch":
        total = total.sum() * np.ones_like(total)
    p = kept / np.where(total == 0, 1, total)
    if fault == "softmax_of_probabilities":
        again = np.where(stays, np.exp(p), 0)
        p = again / again.sum(axis=-1, keepdims=True)
    return p / p.dtype.type(temperature) if fault == "temperature_after_softmax" else p


def _placed(p: NDArray, ranks: NDArray, filtered: bool, fault: str) -> NDArray:
    """What the ranks have, by token."""
    if fault == "order_not_undone" and filtered:
        return p
    if fault == "half_of_the_indices" and filtered:
        ranks = ranks % ((ranks.shape[-1] + 1) // 2)
    out = np.zeros_like(p)
    np.put_along_axis(out, ranks, p, -1)
    return out


# law that must accuse: {variant: (where it was seen, what is wrong)}
_TABLE: dict[str, dict[str, tuple[str, str]]] = {
    "sums-to-one": {
        "not_renormalised": ("transformers PR#19143", "what stays keeps the probability it had before the filters"),
    },
    "minus-infinity-is-never-chosen": {
        "minus_infinity_is_finite": ("mutation: a finite stand-in", "-inf is read as -1e4, above very low logits"),
        "greedy_divides_by_minus_one": ("vllm#22180", "T = -1 marks greedy rows and turns -inf into +inf"),
    },
    "the-likeliest-token-stays": {
        "empty_nucleus": ("mutation: no token is kept by force", "p = 0 leaves nothing"),
        "least_probable_stay": ("mutation: sorted the other way", "ranks count from the least probable token"),
        "top_p_without_renormalised_top_k": ("mlx-lm PR#388", "the k probabilities, not renormalised, miss 1 - p"),
    },
    "what-stays-keeps-its-ratios": {
        "softmax_of_probabilities": ("mutation: softmax in filter and in sampler", "softmax is taken twice"),
        "temperature_after_softmax": ("mutation: order of scale and softmax", "p / T for softmax(z / T)"),
    },
    "temperature-is-inverse-scale": {
        "temperature_multiplies": ("mutation: multiplied where it divides", "z T for z / T"),
        "temperature_after_filters": ("mutation: an order that is not declared", "top-p counts the mass at T = 1"),
    },
    "temperature-moves-nothing-that-top-k-leaves": {
        "temperature_scales_k": ("mutation: two arguments in one formula", "k T tokens stay"),
    },
    "cold-is-greedy": {
        "temperature_floor": ("mutation: a guard against division by 0", "no temperature is below 0.05"),
    },
    "shift-changes-nothing": {
        "logits_clipped": ("mutation: a guard against overflow", "scaled logits are clipped at 50"),
    },
    "tokens-are-only-names": {
        "order_not_undone": ("mutation: probabilities left in sorted order", "the likeliest comes first"),
        "first_token_always_stays": ("mutation: the token kept by force is token 0", "token 0 is never dropped"),
    },
    "rows-are-independent": {
        "top_k_of_the_batch": ("mutation: top-k of a flattened array", "the k-th largest of all rows is the threshold"),
        "nucleus_of_the_first_row": ("mutation: a mask without its batch axis", "row 0 says how many stay"),
        "normaliser_of_the_batch": ("mutation: a sum over all axes", "the batch sums to 1"),
    },
    "minus-infinity-equals-deletion": {
        "absent_lanes_count": ("verl#5349", "a last group of lanes that is not full counts as logits of 0"),
    },
    "top-k-keeps-the-k-largest": {
        "k_plus_one": ("mesh-transformer-jax#164", "k + 1 tokens stay"),
        "k_minus_one": ("mutation: < for <=", "k - 1 tokens stay"),
        "k_at_most_eight": ("mutation: a candidate buffer", "no more than 8 tokens stay"),
        "top_k_of_magnitudes": ("mutation: |z| for z", "the k largest in magnitude stay"),
    },
    "exactly-k-tokens-stay": {
        "ties_stay_beyond_k": (
            "flashinfer PR#3774",
            "what equals the k-th stays as well, though exactly k is declared",
        ),
    },
    "top-k-of-one-is-greedy": {
        "half_of_the_indices": ("tt-metal#52928", "an index buffer of half the vocabulary is used twice"),
    },
    "filters-that-leave-all-change-nothing": {
        "k_wraps_around": ("mutation: an index modulo V", "k of more than V starts again from 1"),
    },
    "the-smallest-nucleus-is-greedy": {
        "zero_means_no_top_p": ("mutation: if top_p", "p = 0 counts as not given"),
    },
    "the-nucleus-has-the-mass": {
        "nucleus_one_too_small": ("mutation: mass <= p", "the token that reaches p goes"),
        "p_compared_with_each": ("mutation: no cumulative sum", "tokens of at least p stay"),
    },
    "the-nucleus-is-the-smallest": {
        "nucleus_one_too_large": ("mutation: shifted twice", "one more token stays"),
        "ties_stay_beyond_p": ("flashinfer PR#3774", "what equals the last of the nucleus stays as well"),
    },
    "large-vocabularies-are-cut-at-the-mass": {
        "mass_in_half": ("Megatron-LM PR#7182, in float16", "the mass is summed in float16"),
        "mass_in_bfloat16": ("Megatron-LM PR#7182", "the mass is summed in bfloat16 and stands still"),
    },
    "no-token-that-goes-is-likelier": {
        "mass_in_vocabulary_order": ("mutation: the sort forgotten", "the mass is summed in the order of the tokens"),
    },
    "the-nucleus-grows-with-the-mass": {
        "nucleus_of_the_rest": ("mutation: 1 - p for p", "the mass is 1 - p"),
    },
    "the-nucleus-grows-with-temperature": {
        "nucleus_at_inverse_temperature": ("mutation: multiplied where it divides", "the mass is counted at 1 / T"),
    },
    "top-p-counts-what-top-k-leaves": {
        "top_p_of_unfiltered": ("mutation: probabilities from before top-k", "p is a part of all tokens"),
        "top_p_before_top_k": ("mutation: the filters change places", "top-p first"),
    },
    "equal-tokens-are-cut-at-equality": {
        "one_more_at_equality": ("mutation: <= for <", "a token stays before which there is exactly p"),
    },
    "every-word-has-influence": {
        "filters_without_effect": ("LMOps#272", "the filters are not used"),
    },
    "leaves-inputs-untouched": {
        "filters_in_place": ("transformers PR#29680", "-inf is written into the logits that were given"),
    },
}
_DTYPES = {"mass_in_bfloat16": "bfloat16"}
FAULTS = {
    variant: Fault(
        "next_token_probabilities",
        f"next_token_probabilities/{law}",
        source,
        summary,
        _DTYPES.get(variant, "float32"),
    )
    for law, variants in _TABLE.items()
    for variant, (source, summary) in variants.items()
}
LAST = "temperature_last_declared"
VARIANTS = {variant: {"next_token_probabilities": _make(variant)} for variant in ("correct", *FAULTS)}
VARIANTS[LAST] = {"next_token_probabilities": _make("temperature_after_filters")}
_CORRECT = {"dtypes": ("float32", "bfloat16"), "intermediate": "float32", "exact_top_k": True}
CAPABILITIES = {
    "next_token_probabilities": Capabilities(**_CORRECT),
    LAST: {"next_token_probabilities": Capabilities(**_CORRECT, sampling_order="temperature_last")},
}
