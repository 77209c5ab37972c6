"""Wrong encoder layers: one correct implementation with one switch for each mistake.

The variant "correct" has every switch off, and "rotary_from_one" is as right: only differences of positions count.
Each other variant differs from them by the mistake that its Fault names and by nothing else; a mistake that needs
a situation (pre-norm, a mask, a window) is right outside it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veriformer.declarations import Capabilities, Fault

FRAMEWORK = "numpy"
Params = Mapping[str, Any]
Window = tuple[int | None, int | None]
_CALLS = itertools.count()


@dataclass(frozen=True)
class _How:
    """The keywords of a call, and the mistake that it makes."""

    fault: str
    heads: int
    norm: str
    alpha: float
    mask: NDArray | None
    window: Window | None
    positions: str | None


def _make(fault: str) -> Callable[..., NDArray]:
    def encoder_layer(
        x: NDArray, params: Params, *, heads: int, norm: str = "post", alpha: float = 1.0,
        mask: NDArray | None = None, window: Window | None = None, positions: str | None = None,
    ) -> NDArray:  # fmt: skip
        how = _How(fault, heads, norm, alpha, mask, window, positions)
        with np.errstate(all="ignore"):
            out = _layer(_wide(x), _widened(params), how).astype(x.dtype)
        if fault == "written_over":
            x[...] = out
        return out

    encoder_layer.__qualname__ = f"encoder_layer[{fault}]"
    return encoder_layer


def _layer(x: NDArray, w: Params, how: _How) -> NDArray:
    """Both sublayers in order, each with its norm."""
    norms, given = [w["norm1"], w["norm2"]], x
    if how.fault == "norms_swapped":
        norms = norms[::-1]
    if how.fault == "first_norm_again":
        norms[1] = norms[0]
    if how.fault == "sublayers_in_parallel" and how.norm == "pre":
        given = _normed(x, norms[1], how)
    sublayers = [
        lambda seen, raw: _to_itself(seen, raw, w["attention"], how),
        lambda seen, raw: _feed_forward(given if how.fault == "sublayers_in_parallel" else seen, w, how),
    ]
    if how.fault == "feed_forward_first":
        sublayers = sublayers[::-1]
    sums = [x]
    for place, (sublayer, norm) in enumerate(zip(sublayers, norms, strict=True)):
        x = _beside(x, sums, norm, sublayer, how, place)
    return x


def _beside(
    x: NDArray, sums: list[NDArray], norm: Params, sublayer: Callable[[NDArray, NDArray], NDArray], how: _How,
    place: int,
) -> NDArray:  # fmt: skip
    """x after one sublayer; sums are the layer's input and the residual sums so far, before any norm."""
    fault, pre = how.fault, how.norm == "pre" and how.fault != "always_post"
    seen = _normed(x, norm, how) if pre and (fault, place) != ("second_norm_forgotten", 1) else x
    y = sublayer(seen, x)
    if fault == "dropout_left_on":
        y = y * (np.random.default_rng(next(_CALLS)).random(y.shape) >= 0.1) / np.asarray(0.9, y.dtype)
    kept = _kept(x, seen, sums, fault, pre, place)
    if fault == "norm_of_the_branch" and not pre:
        return how.alpha * kept + _normed(y, norm, how)
    if fault == "alpha_on_the_branch" and not pre:
        y = how.alpha * y
    sums.append(_alpha(how, pre, place) * kept + y)
    return sums[-1] if pre and fault != "norm_twice" else _normed(sums[-1], norm, how)


def _kept(x: NDArray, seen: NDArray, sums: list[NDArray], fault: str, pre: bool, place: int) -> NDArray:
    """What goes past a sublayer."""
    if fault == ("attention_residual_missing", "feed_forward_residual_missing")[place]:
        return np.zeros_like(x)
    if fault == "residual_in_bfloat16":  # the lower half of a float32 is cut off
        return (x.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32).astype(x.dtype)
    if fault == "residual_of_the_normed" and pre:
        return seen
    return {"residual_before_the_norm": sums[-1], "residual_of_the_input": sums[0]}.get(fault, x)


def _alpha(how: _How, pre: bool, place: int) -> float:
    if pre:
        return how.alpha if how.fault == "alpha_in_pre_norm" else 1.0
    if how.fault == "alpha_in_the_first_sublayer_alone" and place > 0:
        return 1.0
    changed = {"alpha_on_the_branch": 1.0, "alpha_ignored": 1.0, "alpha_squared": how.alpha**2}
    return changed.get(how.fault, how.alpha)


def _normed(x: NDArray, w: Params, how: _How) -> NDArray:
    fault = how.fault
    if "bias" not in w:
        centred = x - x.mean(-1, keepdims=True) if fault == "rms_norm_centred" else x
        return centred / np.sqrt(np.square(centred).mean(-1, keepdims=True) + 1e-6) * w["weight"]
    axes = (1, 2) if fault == "norm_over_time" else (-1,)
    centred = x if fault == "norm_not_centred" else x - x.mean(axes, keepdims=True)
    variance = np.square(centred).mean(axes, keepdims=True)
    if fault == "norm_unbiased":
        variance = variance * (x.shape[-1] / max(x.shape[-1] - 1, 1))
    root = np.sqrt(variance + {"norm_eps_of_rms": 1e-6, "norm_eps_large": 1e-3}.get(fault, 1e-5))
    return centred / root * w["weight"] + (0 if fault == "norm_bias_dropped" else w["bias"])


def _feed_forward(x: NDArray, params: Params, how: _How) -> NDArray:
    fault, w = how.fault, params["feed_forward"]
    if fault == "feed_forward_over_time":
        x = x + np.roll(x, 1, 1) * (np.arange(x.shape[1]) > 0)[:, None]
    inner = x @ w["w1"] + (0 if fault == "inner_bias_dropped" else w.get("b1", 0))
    if fault == "gelu_for_relu":
        inner = inner * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (inner + 0.044715 * inner**3)))
    elif fault != "activation_missing":
        inner = np.maximum(inner, 0.01 * inner if fault == "leaky" else 0)
    y = inner @ w["w2"] + (0 if fault == "outer_bias_dropped" else w.get("b2", 0))
    return np.maximum(y, 0) if fault == "activation_after_w2" else y


def _to_itself(seen: NDArray, raw: NDArray, w: Params, how: _How) -> NDArray:
    """Self-attention; raw is what the norm of a pre-norm layer was given."""
    fault, heads = how.fault, how.heads
    rows = raw if fault == "norm_of_queries_alone" else seen
    if fault == "keys_of_the_first_sample":
        rows = np.broadcast_to(rows[:1], rows.shape)
    groups = w["wk"].shape[1] * heads // w["wq"].shape[1]
    q, k, v = (
        _split(seen, w, "q", heads, fault),
        _split(rows, w, "k", groups, fault),
        _split(rows, w, "v", groups, fault),
    )
    if how.positions == "rotary":
        q, k, v = _rotated(q, k, v, fault)
    h, each = np.arange(heads), heads // groups
    of = h % groups if fault == "gqa_tile" else h // each
    ahead = np.arange(seen.shape[1]) - np.arange(seen.shape[1])[:, None]
    s = _scores(q, k[:, of], ahead, seen.shape[-1], how)
    visible = np.broadcast_to(_sight(how, ahead) & _mask(how.mask, fault), s.shape)
    values = np.where(visible[..., None] | (fault == "nan_leaks"), v[:, of, None], 0)
    joined = (_softmax(s, visible, fault)[..., None] * values).sum(-2).swapaxes(1, 2).reshape(*seen.shape[:2], -1)
    if fault == "output_projection_missing" and joined.shape[-1] == seen.shape[-1]:
        return joined
    return joined @ w["wo"] + w.get("bo", 0)


def _scores(q: NDArray, k: NDArray, ahead: NDArray, model: int, how: _How) -> NDArray:
    """q kᵀ D^-½, and ALiBi's bias; model is the width of a token."""
    fault, width = how.fault, q.shape[-1]
    scale = {"scale_missing": 1.0, "scale_by_model_width": model**-0.5}.get(fault, width**-0.5)
    s = q @ k.swapaxes(-1, -2)
    if how.positions != "alibi" or fault == "alibi_ignored":
        return s * scale
    bias = _alibi(how.heads, ahead, fault).astype(s.dtype)
    return (s + bias) * scale if fault == "alibi_before_scaling" else s * scale + bias


def _split(rows: NDArray, w: Params, name: str, heads: int, fault: str) -> NDArray:
    """[B,T,d] -> [B,heads,T,D], projected."""
    bias = 0 if fault == "projection_biases_dropped" else w.get("b" + name, 0)
    y = rows @ w["w" + name] + bias
    return y.reshape(*y.shape[:2], heads, -1).swapaxes(1, 2)


def _softmax(s: NDArray, visible: NDArray, fault: str) -> NDArray:
    s = np.where(visible, s, np.asarray(-10.0 if fault == "mask_fill_minus_ten" else -np.inf, s.dtype))
    m = s.max(-1, keepdims=True)
    e = np.exp(s - np.where(np.isneginf(m), 0, m))
    total = e.sum(-1, keepdims=True)
    return e / (total if fault == "empty_row_nan" else np.where(total == 0, 1, total))


def _mask(mask: NDArray | None, fault: str) -> NDArray:
    if mask is None or fault == "mask_ignored":
        return np.ones((1, 1, 1, 1), bool)
    changed = {
        "mask_inverted": ~mask,
        "mask_of_the_first_query": mask[:, :, :1],
        "mask_of_the_first_head": mask[:, :1],
        "mask_of_the_first_sample": mask[:1],
    }
    return changed.get(fault, mask)


def _sight(how: _How, ahead: NDArray) -> NDArray:
    """[T,T]: may query i see key j by their places alone."""
    fault, everything = how.fault, np.ones_like(ahead, dtype=bool)
    if how.window is None or fault == "window_ignored" or (fault == "window_needs_a_mask" and how.mask is None):
        return everything
    left, right = how.window
    if left is not None:
        left = max(0, left + {"window_wide": 1, "window_narrow": -1}.get(fault, 0))
    left, right = {
        "window_swapped": (right, left),
        "window_right_dropped": (left, None),
        "window_always_causal": (left, 0),
    }.get(fault, (left, right))
    visible = everything if left is None else ahead >= -left
    return visible if right is None else visible & (ahead <= right)


def _alibi(heads: int, ahead: NDArray, fault: str) -> NDArray:
    power = 2 ** (heads.bit_length() - 1)
    exponents = [*range(2, 2 * power + 1, 2), *range(1, 2 * (heads - power), 2)]
    slopes = 2.0 ** (-4 * np.array(exponents) / power)
    if fault == "alibi_slopes_reversed":
        slopes = slopes[::-1]
    if fault == "alibi_slopes_geometric":
        slopes = 2.0 ** (-8 * np.arange(1, heads + 1) / heads)
    distance = ahead if fault == "alibi_signed" else -np.abs(ahead)
    return (-1 if fault == "alibi_grows" else 1) * slopes[:, None, None] * distance


def _rotated(q: NDArray, k: NDArray, v: NDArray, fault: str) -> tuple[NDArray, NDArray, NDArray]:
    first = {"rotary_from_one": (1, 1), "rotary_keys_ahead": (0, 1)}.get(fault, (0, 0))
    if fault == "rotary_ignored":
        return q, k, v
    k = k if fault == "rotary_on_queries_alone" else _turned(k, first[1], fault)
    return _turned(q, first[0], fault), k, _turned(v, 0, fault) if fault == "rotary_on_values" else v


def _turned(x: NDArray, start: int, fault: str) -> NDArray:
    """[…,T,D] by positions from start on; channels j and j + D/2 are a pair."""
    half = x.shape[-1] // 2
    base = 1e3 if fault == "rotary_base" else 1e4
    angle = (np.arange(x.shape[-2]) + start)[:, None] * base ** (-np.arange(half) / max(half, 1))
    cos, sin = np.cos(angle).astype(x.dtype), np.sin(angle).astype(x.dtype)
    sin = -sin if fault == "rotary_backwards" else sin
    if fault == "rotary_interleaved":
        a, b = x[..., 0::2], x[..., 1::2]
        return np.stack([a * cos - b * sin, a * sin + b * cos], -1).reshape(x.shape)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


def _widened(params: Any) -> Any:
    if isinstance(params, Mapping):
        return {name: _widened(part) for name, part in params.items()}
    return _wide(params)


def _wide(x: NDArray) -> NDArray:
    return x if x.dtype == np.float64 else x.astype(np.float32)


# law that must accuse: {variant: (where it was seen, what is wrong)}
_TABLE: dict[str, dict[str, tuple[str, str]]] = {
    "silent-sublayers-leave-the-norms": {
        "residual_before_the_norm": ("NeMo#4350", "post-norm: the second residual is taken before the first norm"),
        "residual_of_the_input": (
            "mutation: one residual variable for both",
            "the second residual is the layer's input",
        ),
        "norm_of_the_branch": ("mutation: x + norm(F(x))", "post-norm: the norm leaves out the residual"),
        "rms_norm_centred": ("mutation: layer_norm without a bias", "the mean is subtracted where there is no bias"),
        "norm_unbiased": ("annotated-transformer#119", "variance over d - 1"),
        "norm_eps_of_rms": ("keras-hub#728", "layer_norm with the eps of rms_norm"),
        "norm_eps_large": ("keras-hub#728", "layer_norm with eps 1e-3"),
        "alpha_on_the_branch": ("mutation: x + alpha F(x)", "alpha multiplies the sublayer's result"),
        "alpha_squared": ("mutation: alpha applied twice", "the residual counts alpha squared"),
        "alpha_in_the_first_sublayer_alone": ("mutation: one sum of two", "feed-forward without alpha"),
    },
    "silent-sublayers-leave-the-input": {
        "attention_residual_missing": ("mutation: x = F(x)", "nothing goes past self-attention"),
        "feed_forward_residual_missing": ("mutation: x = F(x)", "nothing goes past the feed-forward sublayer"),
        "residual_of_the_normed": ("mutation: x = norm(x) first", "pre-norm: the residual is what was normed"),
        "residual_in_bfloat16": ("mutation: a residual stream in bfloat16", "what goes past loses its lower half"),
        "norm_twice": ("snowfall#184", "pre-norm: each norm acts after the sum, too"),
    },
    "a-shift-passes-through": {
        "norm_of_queries_alone": ("marian#699", "pre-norm: keys and values of what was not normed"),
    },
    "last-norm-scales-the-output": {
        "norms_swapped": ("mutation: norms in the order of another library", "norm2 where norm1 belongs, and back"),
    },
    "post-norm-centres-each-token": {
        "norm_not_centred": ("mutation: rms_norm with a bias", "the mean is not subtracted"),
    },
    "alpha-acts-in-post-norm-only": {
        "alpha_in_pre_norm": ("mutation: alpha whatever the norm", "alpha acts in pre-norm"),
    },
    "every-keyword-counts": {
        "always_post": ("snowfall#184", "norm='pre' has no effect"),
        "alpha_ignored": ("mutation: DeepNorm forgotten", "alpha has no effect"),
        "window_ignored": ("sglang#39300", "the window has no effect"),
        "window_needs_a_mask": ("jax#32300", "without a mask the window has no effect"),
        "alibi_ignored": ("mutation: positions not passed on", "no bias at all"),
        "rotary_ignored": ("mutation: positions not passed on", "nothing is turned"),
    },
    "every-weight-counts": {
        "first_norm_again": ("mlx#1636", "norm1 where norm2 belongs"),
        "second_norm_forgotten": ("mutation: x for norm2(x)", "pre-norm: the feed-forward sublayer sees x itself"),
        "norm_bias_dropped": ("mutation: a norm without shift", "the bias of the norms is lost"),
        "inner_bias_dropped": ("mutation: a linear map without bias", "b1 is lost"),
        "outer_bias_dropped": ("mutation: a linear map without bias", "b2 is lost"),
        "projection_biases_dropped": ("mutation: bias=False whatever is given", "bq, bk and bv are lost"),
        "output_projection_missing": ("mutation: wo taken for the feed-forward", "heads are joined and that is all"),
    },
    "a-sublayer-alone-adds-its-result": {
        "scale_missing": ("mlc-llm#3426", "no scale"),
        "scale_by_model_width": ("FrancescoSaverioZuppichini/ViT#1", "d^-½ for D^-½"),
    },
    "held-back-units-are-silent": {
        "gelu_for_relu": ("mutation: another activation", "gelu where relu is due"),
        "activation_missing": ("mutation: two linear maps", "no activation at all"),
        "leaky": ("mutation: another activation", "a hundredth of negative values passes"),
    },
    "last-sublayer-takes-both-signs": {
        "feed_forward_first": ("mutation: order of the sublayers", "feed-forward, then self-attention"),
        "activation_after_w2": ("Universal-Transformer-Pytorch", "the feed-forward result is rectified"),
    },
    "feed-forward-sees-one-token": {
        "norm_over_time": ("mutation: statistics over two axes", "mean and variance are those of all tokens"),
        "feed_forward_over_time": ("Universal-Transformer-Pytorch", "a convolution: the token before joins in"),
    },
    "hidden-tokens-have-no-influence": {
        "mask_ignored": ("mutation: a mask not passed on", "the mask has no effect"),
        "window_wide": ("transformers#39408", "one key more on the left"),
        "window_right_dropped": ("jax#39576", "keys on the right are not limited"),
    },
    "seen-tokens-have-influence": {
        "mask_inverted": ("torch_brain#74", "True hides"),
        "mask_of_the_first_head": ("mutation: a per-head mask read once", "every head has head 0's mask"),
        "window_swapped": ("mutation: (right, left)", "left and right are exchanged"),
        "window_always_causal": ("mutation: a window of decoders", "nothing on the right is seen"),
    },
    "padding-changes-nothing": {
        "mask_of_the_first_query": ("hyunwoongko/transformer#40", "every query has query 0's mask"),
        "mask_fill_minus_ten": ("nGPT-pytorch#11", "hidden logits are -10 and not -inf"),
    },
    "batch-rows-are-independent": {
        "keys_of_the_first_sample": ("mutation: the batch forgotten", "keys and values of batch row 0 for all"),
        "mask_of_the_first_sample": ("line/lighthouse#77", "every sample has sample 0's mask"),
    },
    "nan-stays-hidden": {
        "nan_leaks": ("pytorch#101967", "a hidden NaN is multiplied by 0, which is NaN"),
    },
    "empty-row-is-as-declared": {
        "empty_row_nan": ("pytorch#41508", "0 / 0 in a row that may see nothing"),
    },
    "equals-the-reference": {
        "sublayers_in_parallel": ("mutation: as in GPT-J", "both sublayers are given the layer's input"),
        "gqa_tile": ("onnx#7274", "key heads 0 1 0 1 for 0 0 1 1"),
        "window_narrow": ("mutation: the other off-by-one", "one key less on the left"),
        "alibi_grows": ("mutation: the sign of the slopes", "far keys get more weight"),
        "alibi_signed": ("mutation: a causal bias in an encoder", "later keys get more weight, not less"),
        "alibi_slopes_reversed": ("mutation: heads in reverse", "head h has the slope of head H - h"),
        "alibi_slopes_geometric": ("mlx#343", "2^(-8 h / H) for any number of heads"),
        "alibi_before_scaling": ("tt-metal#56406", "the bias is multiplied by the scale"),
        "rotary_on_values": ("mutation: one rotation for q, k and v", "values are turned, too"),
        "rotary_on_queries_alone": ("mutation: keys forgotten", "keys are not turned"),
        "rotary_keys_ahead": ("executorch#2010", "keys are turned as if one position later"),
        "rotary_interleaved": ("TransformerLens#365", "pairs (2j, 2j + 1) for (j, j + D/2)"),
        "rotary_backwards": ("mutation: the sign of the sine", "later positions turn the other way"),
        "rotary_base": ("mutation: another base", "base 1000 for 10000"),
    },
    "repeats-itself": {
        "dropout_left_on": ("nanoGPT#240", "a tenth of each sublayer's result is dropped"),
    },
    "leaves-inputs-untouched": {
        "written_over": ("mutation: x += F(x)", "the result is written into x"),
    },
}
FAULTS = {
    variant: Fault("encoder_layer", f"encoder_layer/{law}", source, summary)
    for law, variants in _TABLE.items()
    for variant, (source, summary) in variants.items()
}
VARIANTS: dict[str, dict[str, Callable[..., Any]]] = {
    variant: {"encoder_layer": _make(variant)} for variant in ("correct", "rotary_from_one", *FAULTS)
}
CAPABILITIES = {"encoder_layer": Capabilities(nan_contained=True, rounds_probabilities=False)}
