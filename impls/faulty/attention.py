"""Wrong attentions: one correct implementation with one switch for each mistake of meaning.

The variant "correct" has every switch off. Each other variant differs from it by the mistake that its
Fault names and by nothing else; a mistake that needs a situation (a mask, a window, more
keys than queries) is right outside it. Mistakes of tiling and memory are in attention_tiled.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veriformer.declarations import Capabilities, Fault

FRAMEWORK = "numpy"
CAPABILITIES = {
    "attention": Capabilities(
        nonpositive_scale=True, nan_contained=True, infinite_bias=True, rounds_probabilities=False
    )
}


@dataclass(frozen=True)
class _Options:
    mask: NDArray | None
    bias: NDArray | None
    causal: bool
    scale: float
    window: tuple[int | None, int | None] | None
    softcap: float | None
    sink: NDArray | None


def _make(fault: str) -> Callable[..., NDArray]:
    def attention(
        q: NDArray,
        k: NDArray,
        v: NDArray,
        *,
        mask: NDArray | None = None,
        bias: NDArray | None = None,
        causal: bool = False,
        scale: float | None = None,
        window: tuple[int | None, int | None] | None = None,
        softcap: float | None = None,
        sink: NDArray | None = None,
    ) -> NDArray:
        factor = _scale(scale, q.shape, v.shape[-1], fault)
        options = _Options(mask, bias, causal, factor, window, softcap, sink)
        with np.errstate(all="ignore"):
            return _attention(q, k, v, options, fault).astype(q.dtype)

    attention.__qualname__ = f"attention[{fault}]"
    return attention


def _attention(q: NDArray, k: NDArray, v: NDArray, o: _Options, fault: str) -> NDArray:
    q, k, v = (_wide(x) for x in (q, k, v))
    heads, groups = q.shape[1], k.shape[1]
    key = k[:, _head_map(heads, groups, "correct" if fault == "gqa_values_tiled" else fault)]
    value = v[:, _head_map(heads, groups, "gqa_tile" if fault == "gqa_values_tiled" else fault)]
    shape = (*q.shape[:3], k.shape[2])
    visible = _visible(shape, o, fault)
    logits = _logits(q, key, o, fault)
    fill = _fill(o, fault)
    if fault != "mask_after_softmax":
        logits = np.where(visible, logits, np.asarray(fill, logits.dtype))
    seen = visible if np.isneginf(fill) else np.ones_like(visible)
    out = _softmax_times(logits, value, seen, _sink(o, shape, fault), fault)
    if fault == "causal_gives_zeros" and o.causal:
        return out * 0
    return out * o.scale if fault == "scale_after_softmax" else out


def _head_map(heads: int, groups: int, fault: str) -> NDArray:
    h, each = np.arange(heads), heads // groups
    if fault == "heads_reversed":
        return groups - 1 - h // each
    if groups < heads:
        if fault == "gqa_tile":
            return h % groups
        if fault == "gqa_first_group":
            return h * 0
        if fault == "gqa_swapped_divisor":
            return np.minimum(h // groups, groups - 1)
    return h // each


def _scale(scale: float | None, shape: tuple[int, ...], value_width: int, fault: str) -> float:
    heads, width = shape[1], shape[-1]
    default = {
        "default_scale_one": 1.0,
        "default_scale_inverse_width": 1 / width,
        "scale_over_all_heads": (heads * width) ** -0.5,
        "scale_from_padded_width": (-(-width // 8) * 8) ** -0.5,
        "scale_from_value_width": value_width**-0.5,
    }.get(fault, width**-0.5)
    factor = default if scale is None or (fault == "scale_zero_is_default" and not scale) else float(scale)
    return {"scale_ignored": 1.0, "scale_twice": factor * factor, "scale_sign_lost": abs(factor)}.get(fault, factor)


def _logits(q: NDArray, key: NDArray, o: _Options, fault: str) -> NDArray:
    scores = q @ key.swapaxes(-1, -2)
    bias = _bias(o, scores.shape, fault)
    if fault == "softcap_before_scale":
        scores = _cap(scores, o.softcap, fault) * o.scale
    elif fault == "bias_before_softcap":
        return _cap(scores * o.scale + bias, o.softcap, fault)
    else:
        scores = _cap(scores * o.scale, o.softcap, fault)
    scores = scores + bias
    if fault == "mask_added" and o.mask is not None:
        scores = scores + o.mask
    if fault == "recency_kept":
        scores = scores + 0.01 * np.arange(scores.shape[-1])
    return scores.astype(np.float16).astype(q.dtype) if fault == "logits_in_half" else scores.astype(q.dtype)


def _cap(scores: NDArray, softcap: float | None, fault: str) -> NDArray:
    if softcap is None or fault == "softcap_ignored":
        return scores
    cap = float(softcap)
    if fault == "softcap_clips":
        return np.clip(scores, -cap, cap)
    x = scores / cap
    if fault == "softcap_overflows":
        return cap * (np.exp(x) - np.exp(-x)) / (np.exp(x) + np.exp(-x))
    return np.tanh(x) if fault == "softcap_factor_missing" else cap * np.tanh(x)


def _bias(o: _Options, shape: tuple[int, ...], fault: str) -> Any:
    dropped = fault == "bias_as_boolean" or (fault == "bias_dropped_with_mask" and o.mask is not None)
    if o.bias is None or dropped:
        return 0
    bias = np.broadcast_to(_wide(o.bias), shape)
    if fault == "bias_first_head":
        bias = bias[:, :1]
    if fault == "bias_infinity_clipped":
        bias = np.maximum(bias, bias.dtype.type(-10))
    return {"bias_scaled": bias * o.scale, "bias_negated": -bias}.get(fault, bias)


def _visible(shape: tuple[int, ...], o: _Options, fault: str) -> NDArray:
    """[B,H,Tq,Tk]: may the query see the key."""
    right = shape[3] - shape[2]
    offset = {"causal_top_left": 0, "causal_offset_clamped": max(right, 0)}.get(fault, right)
    i, j = np.arange(shape[2])[:, None], np.arange(shape[3])
    ahead = j - (i + offset)
    limit = {"causal_strict": -1, "causal_plus_one": 1, "causal_group_of_four": 3 - i % 4}.get(fault, 0)
    triangle = ahead <= limit if _is_causal(o, fault) else np.ones(shape[2:], dtype=bool)
    mask = _mask(o, shape, fault)
    if fault == "causal_or_mask" and o.causal and o.mask is not None:
        combined = triangle | mask
    else:
        combined = triangle & mask
    if fault == "bias_as_boolean" and o.bias is not None:
        combined = combined & (o.bias != 0)
    return combined & _window(j - i if fault == "window_from_row_zero" else ahead, o, fault)


def _is_causal(o: _Options, fault: str) -> bool:
    return {
        "causal_always": True,
        "causal_needs_mask": o.causal and o.mask is not None,
        "causal_dropped_with_mask": o.causal and o.mask is None,
        "causal_dropped_with_window": o.causal and o.window is None,
    }.get(fault, o.causal)


def _mask(o: _Options, shape: tuple[int, ...], fault: str) -> NDArray:
    if o.mask is None or fault == "mask_added":
        return np.ones(shape, dtype=bool)
    mask = np.broadcast_to(o.mask, shape)
    if fault == "mask_transposed" and shape[2] == shape[3]:
        return mask.swapaxes(-1, -2)
    if fault == "mask_of_another_sample":
        b, h = np.arange(shape[0])[:, None], np.arange(shape[1])
        return mask[(b * shape[1] + h) % shape[0], h]
    first = {"mask_first_sample": mask[:1], "mask_first_head": mask[:, :1], "mask_first_query": mask[:, :, :1]}
    return np.broadcast_to({**first, "mask_inverted": ~mask}.get(fault, mask), shape)


def _window(ahead: NDArray, o: _Options, fault: str) -> NDArray:
    needs = {"window_needs_mask": o.mask is not None, "window_needs_causal": o.causal}
    if o.window is None or not needs.get(fault, True):
        return np.ones_like(ahead, dtype=bool)
    left, right = o.window
    if fault == "window_swapped":
        left, right = right, left
    if fault == "window_right_needs_causal" and not o.causal:
        right = None
    if fault == "window_none_is_zero":
        left, right = left or 0, right or 0
    if left is not None:
        left += {"window_one_wider": 1, "window_one_narrower": -1}.get(fault, 0)
    return (True if left is None else ahead >= -left) & (ahead <= np.inf if right is None else ahead <= right)


def _fill(o: _Options, fault: str) -> float:
    """The logit of a hidden key."""
    if fault == "softcap_after_mask" and o.softcap is not None:
        return -float(o.softcap)
    if fault == "mask_before_scale":
        return -np.inf * o.scale
    return {"mask_fill_minus_ten": -10.0, "empty_row_mean": -1e30}.get(fault, -np.inf)


def _sink(o: _Options, shape: tuple[int, ...], fault: str) -> NDArray | None:
    if o.sink is None or fault == "sink_ignored" or (fault == "sink_skipped_for_one_query" and shape[2] == 1):
        return None
    sink = _wide(o.sink)[None, :, None, None]
    first = np.broadcast_to(sink[:, :1], sink.shape)
    beside_one = np.logaddexp(sink, 0)
    return {"sink_scaled": sink * o.scale, "sink_first_head": first, "sink_plus_one": beside_one}.get(
        fault, sink
    ).astype(sink.dtype)


def _softmax_times(logits: NDArray, value: NDArray, seen: NDArray, sink: NDArray | None, fault: str) -> NDArray:
    m = logits.max(axis=-1, keepdims=True)
    m = m if sink is None else np.maximum(m, sink)
    m = np.where(np.isneginf(m) | (fault == "no_maximum"), 0, m)
    e = np.exp(logits - m)
    s = e.sum(axis=-1, keepdims=True) + (0 if sink is None else np.exp(sink - m))
    terms = e[..., None] * value[..., None, :, :]
    out = (terms if fault == "nan_leaks" else np.where(seen[..., None], terms, 0)).sum(axis=-2)
    return out / (s if fault == "empty_row_nan" else np.where(s == 0, 1, s))


def _wide(x: NDArray) -> NDArray:
    return x if x.dtype == np.float64 else x.astype(np.float32)


# law that must accuse: {variant: (where it was seen, what is wrong)}
_TABLE: dict[str, dict[str, tuple[str, str]]] = {
    "causal-is-the-end-of-the-square": {
        "causal_top_left": ("pytorch#103082", "query i sees keys up to i, wherever the cache ends"),
    },
    "future-has-no-influence": {
        "causal_offset_clamped": ("mlx#2835", "more queries than keys: aligned at the top left"),
        "causal_plus_one": ("mutation: the other off-by-one of a triangle", "one key of the future is seen"),
        "causal_group_of_four": ("pytorch#195910", "the bound is computed once per group of four queries"),
        "causal_needs_mask": ("xformers#103", "causal is skipped when no mask is given"),
    },
    "visible-keys-have-influence": {
        "causal_strict": ("mutation: j < i for j <= i, which never leaks", "a query does not see its own position"),
        "causal_always": ("transformers#36150", "causal=False has no effect"),
        "causal_gives_zeros": ("TransformerEngine#3528", "causal output is zero throughout"),
    },
    "masks-combine": {
        "causal_dropped_with_mask": ("keras#23038", "a mask switches causal off"),
        "causal_or_mask": ("mutation: | for & where masks meet", "a key is seen if either mask allows it"),
        "causal_dropped_with_window": ("mutation: a window replaces the triangle", "a window switches causal off"),
    },
    "all-true-mask-changes-nothing": {
        "mask_inverted": ("torch_brain#74", "True hides"),
    },
    "hidden-content-has-no-influence": {
        "mask_added": ("openvino#31630", "a boolean mask is added to the logits as 0 and 1"),
        "mask_fill_minus_ten": ("nGPT-pytorch#11", "hidden logits are -10 and not -inf"),
        "mask_transposed": ("hyunwoongko/transformer#40", "in a square the mask is read along the query axis"),
        "mask_first_query": ("mutation: the mask of one query used for all", "every query has query 0's mask"),
        "softcap_after_mask": ("onnx#7865", "the cap turns the -inf of hidden logits into -cap"),
    },
    "hidden-equals-deleted": {
        "mask_after_softmax": ("mutation: weights zeroed, not renormalised", "hidden keys stay in the denominator"),
    },
    "nan-stays-hidden": {
        "nan_leaks": ("pytorch#101967", "a hidden NaN value is multiplied by 0, which is NaN"),
    },
    "batch-rows-are-independent": {
        "mask_of_another_sample": ("line/lighthouse#77", "mask repeated for heads in the wrong order"),
        "mask_first_sample": ("mutation: the mask of one sample used for all", "every sample has sample 0's mask"),
    },
    "heads-are-independent": {
        "mask_first_head": ("mutation: a per-head mask read once", "every head has head 0's mask"),
        "bias_first_head": ("mutation: a per-head bias read once", "every head has head 0's bias"),
        "heads_reversed": ("mutation: a consistent permutation of heads", "query heads meet the wrong key heads"),
    },
    "grouped-heads-equal-repeated-heads": {
        "gqa_tile": ("onnx#7274", "key heads 0 1 0 1 for 0 0 1 1"),
        "gqa_values_tiled": ("axlearn#842", "value heads 0 1 0 1 for 0 0 1 1, key heads right"),
        "gqa_swapped_divisor": ("native-sparse-attention-triton#27", "head index divided by G and not H / G"),
        "gqa_first_group": ("mutation: groups read as multi-query", "all query heads use key head 0"),
    },
    "bias-multiplies-odds": {
        "bias_scaled": ("tt-metal#56406", "the bias is scaled with the scores"),
        "bias_negated": ("mutation: sign of a distance penalty", "the bias is subtracted"),
        "bias_as_boolean": ("pytorch#92554", "the float bias is read as a boolean mask"),
    },
    "equals-the-reference": {
        "bias_dropped_with_mask": ("mutation: mask and bias share one argument", "a mask switches the bias off"),
        "bias_before_softcap": ("mutation: order of cap and bias", "the bias is capped with the scores"),
        "softcap_before_scale": ("mutation: order of cap and scale", "unscaled scores are capped"),
        "softcap_clips": ("mutation: a hard cap", "scores are clipped and not bent"),
        "logits_in_half": ("mutation: float16 scores in a float32 kernel", "logits are rounded to float16"),
    },
    "window-equals-mask": {
        "window_right_needs_causal": ("jax#39576", "the right side is unlimited unless causal"),
        "window_needs_mask": ("jax#32300", "the window is ignored without a mask"),
        "window_one_wider": ("transformers#39408", "one key too many on the left"),
        "window_one_narrower": ("mutation: the other off-by-one of a window", "one key too few on the left"),
        "window_needs_causal": ("sglang#39300", "the window is ignored unless causal"),
        "window_from_row_zero": ("keras-hub#1738", "the window ignores that queries sit at the end"),
        "window_swapped": ("mutation: (left, right) read as (right, left)", "left and right exchanged"),
        "window_none_is_zero": ("mutation: None is falsy", "an unlimited side is read as 0"),
    },
    "empty-row-is-as-declared": {
        "empty_row_nan": ("pytorch#41508", "0 / 0 in a row that may see nothing"),
        "empty_row_mean": ("pytorch#110213", "a finite fill gives an empty row the mean of all values"),
    },
    "softcap-bounds-the-odds": {
        "softcap_ignored": ("mutation: an accepted option without effect", "softcap has no effect"),
    },
    "large-softcap-changes-nothing": {
        "softcap_factor_missing": ("mutation: tanh(s / c) without c", "logits lie between -1 and 1"),
    },
    "scale-is-inverse-temperature": {
        "scale_twice": ("transformers#38290", "the scale is applied to q and again to the scores"),
    },
    "scale-matters": {
        "scale_ignored": ("mlc-llm#3426", "the scale is always 1"),
    },
    "default-scale-is-inverse-root-width": {
        "default_scale_one": ("mutation: no default scale", "1 where no scale is given"),
        "default_scale_inverse_width": ("mutation: the root forgotten", "1 / D where no scale is given"),
        "scale_over_all_heads": ("FrancescoSaverioZuppichini/ViT#1", "the width of all heads together"),
        "scale_from_padded_width": ("llama.cpp#20031", "the width padded to a multiple of 8"),
        "scale_from_value_width": ("mutation: Dv for D", "the width of the values"),
    },
    "single-visible-key-gives-its-value": {
        "scale_after_softmax": ("FrancescoSaverioZuppichini/ViT#2", "the weights are multiplied by the scale again"),
    },
    "zero-scale-averages": {
        "mask_before_scale": ("pytorch is_causal with scale 0, found by this suite", "0 times -inf is NaN"),
        "scale_zero_is_default": ("mutation: 0 is falsy", "scale 0 is read as no scale"),
    },
    "negative-scale-negates-the-query": {
        "scale_sign_lost": ("pytorch#105202", "the root of |scale| on each side loses the sign"),
    },
    "sink-equals-an-extra-key-of-value-zero": {
        "sink_skipped_for_one_query": ("mlx#3452", "the sink is ignored for a single query"),
        "sink_scaled": ("mutation: the sink scaled like a score", "the sink is multiplied by the scale"),
        "sink_first_head": ("mutation: per-head sinks read once", "every head has head 0's sink"),
        "sink_ignored": ("mutation: an accepted option without effect", "the sink has no effect"),
    },
    "low-sink-changes-nothing": {
        "sink_plus_one": ("mutation: softmax-off-by-one left on", "1 is added to the denominator beside the sink"),
    },
    "infinite-bias-equals-mask": {
        "bias_infinity_clipped": ("mutation: the bias clamped to keep it finite", "a bias of -inf counts as -10"),
    },
    "large-logits-stay-finite": {
        "softcap_overflows": ("vllm#56579", "tanh from exponentials: NaN beyond 88 caps"),
        "no_maximum": ("FasterTransformer#43", "exponentials of the logits themselves"),
    },
    "permutation-equivariance": {
        "recency_kept": ("mutation: a position bias left on", "later keys get larger logits"),
    },
}
FAULTS = {
    variant: Fault(operation="attention", law=f"attention/{law}", source=source, summary=summary)
    for law, variants in _TABLE.items()
    for variant, (source, summary) in variants.items()
}
VARIANTS = {variant: {"attention": _make(variant)} for variant in ("correct", *FAULTS)}
