"""Wrong decoder-only models, whole and in steps alike: one correct model with one switch for each mistake.

The variant "correct" has every switch off. Each other variant differs from it by the mistake that its Fault
names and by nothing else. full is one step without a cache, so that all of these mistakes agree with themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veriformer.declarations import Capabilities, Fault

FRAMEWORK = "numpy"
Params = Mapping[str, Any]
Cache = tuple[list[tuple[NDArray, NDArray]], NDArray]
"""Keys and values of every layer, and the tokens before."""


class _Model:
    def __init__(self, fault: str, params: Params, heads: int, norm: str, alpha: float, positions: str | None) -> None:
        self.fault, self.params, self.heads, self.positions = fault, params, heads, positions
        self.pre, self.alpha = norm == "pre", 1.0 if fault == "alpha_ignored" else alpha
        self.vocabulary = len(params["embedding"])

    def full(self, tokens: NDArray) -> NDArray:
        """tokens[B,T] -> logits[B,T,V]. Raises ValueError for tokens outside the vocabulary."""
        if self.fault == "padded_to_even" and tokens.shape[1] % 2:
            return self.step(np.concatenate([np.zeros_like(tokens[:, :1]), tokens], 1), None)[0][:, 1:]
        return self.step(tokens, None)[0]

    def step(self, tokens: NDArray, cache: Cache | None, *, positions: NDArray | None = None) -> tuple[NDArray, Cache]:
        """tokens[B,m], positions[B,m] or None -> logits[B,m,V], the cache. Raises ValueError for no such tokens."""
        if ((tokens < 0) | (tokens >= self.vocabulary)).any():
            raise ValueError(f"tokens: got one outside the vocabulary, wanted 0 to {self.vocabulary - 1}")
        kept, before = cache or ([None] * len(self.params["layers"]), tokens[:, :0])
        at = np.broadcast_to(before.shape[1] + np.arange(tokens.shape[1]), tokens.shape)
        at = at if positions is None else positions
        so_far = np.concatenate([before, tokens], 1)
        x, rows, visible = self._embedded(tokens, at), [], self._visible(so_far, tokens.shape[1])
        for number, layer in enumerate(self._layers()):
            seen = visible
            if self.fault == "only_the_first_layer_is_causal" and number:
                seen = np.ones_like(visible)
            x, kv = self._layer(x, layer, kept[number], at, seen)
            rows.append(kv)
        if "norm" in self.params and self.fault != "final_norm_forgotten":
            x = self._normed(x, self.params["norm"])
        return self._logits(x).astype(self.params["embedding"].dtype), (rows, so_far)

    def _layers(self) -> list[Params]:
        layers = self.params["layers"]
        if self.fault == "layers_in_reverse":
            return layers[::-1]
        if self.fault == "layers_share_the_first":
            return layers[:1] * len(layers)
        return layers[:1] if self.fault == "one_layer_run" else layers

    def _embedded(self, tokens: NDArray, at: NDArray) -> NDArray:
        fault, table = self.fault, self.params["embedding"]
        scale = self.params.get("embedding_scale", 1)
        if fault == "ids_wrap_one_early":
            tokens = tokens % max(1, self.vocabulary - 1)
        x = table[tokens] * (1 if fault == "sinusoids_before_the_scale" else scale)
        if fault == "token_zero_embeds_zero":
            x = np.where((tokens == 0)[..., None], 0, x)
        if fault == "positions_from_the_end":
            at = at - at.shape[1] + 16
        if fault == "mean_of_the_batch_left_out" and len(x) > 1:
            x = x - x.mean(0)
        if self.positions == "sinusoidal" or fault == "sinusoids_under_any_scheme":
            x = x + _sinusoids(at + (fault == "sinusoids_from_one"), x.shape[-1], fault).astype(x.dtype)
        return x * scale if fault == "sinusoids_before_the_scale" else x

    def _layer(
        self, x: NDArray, layer: Params, kept: tuple[NDArray, NDArray] | None, at: NDArray, visible: NDArray
    ) -> tuple[NDArray, tuple[NDArray, NDArray]]:
        fault, w = self.fault, layer["feed_forward"]
        second = layer["norm1" if fault == "first_norm_used_twice" else "norm2"]
        y = self._normed(x, layer["norm1"]) if self.pre else x
        y, rows = self._attention(y, x, layer["attention"], kept, at, visible)
        x = self._beside(x, y, layer["norm1"])
        y = self._normed(x, second) if self.pre else x
        y = np.maximum(y @ w["w1"] + w.get("b1", 0), 0) @ w["w2"] + w.get("b2", 0)
        return self._beside(x, np.maximum(y, 0) if fault == "activation_after_w2" else y, second), rows

    def _beside(self, x: NDArray, y: NDArray, norm: Params) -> NDArray:
        """The residual sum."""
        if self.pre:
            x = self._normed(x, norm) if self.fault == "residual_of_the_normed" else x
            return (self.alpha if self.fault == "alpha_in_pre_norm" else 1) * x + y
        if self.fault == "post_norm_before_the_sum":
            return self.alpha * x + self._normed(y, norm)
        return self._normed(self.alpha * x + y, norm)

    def _attention(
        self, x: NDArray, raw: NDArray, w: Params, kept: tuple[NDArray, NDArray] | None, at: NDArray, visible: NDArray
    ) -> tuple[NDArray, tuple[NDArray, NDArray]]:
        fault, heads = self.fault, self.heads
        width = w["wq"].shape[1] // heads
        groups = w["wk"].shape[1] // width
        q = _split(_linear(x, w, "q"), heads, fault)
        k, v = (_split(_linear(raw if fault == "only_queries_are_normed" else x, w, n), groups, fault) for n in "kv")
        if self.positions == "rotary" and fault != "rotary_left_out":
            q, k = _turned(q, at, fault), k if fault == "rotary_turns_queries_only" else _turned(k, at, fault)
            v = _turned(v, at, fault) if fault == "rotary_turns_values" and v.shape == k.shape else v
        rows = (k, v) if kept is None else tuple(np.concatenate(pair, 2) for pair in zip(kept, (k, v), strict=True))
        each = np.arange(heads)
        k, v = (a[:, each % groups if fault == "groups_tiled" else each // (heads // groups)] for a in rows)
        if fault == "attention_over_the_batch" and len(q) > 1:
            q, k, v = (np.roll(a, shift, 0) for a, shift in ((q, 0), (k, 1), (v, 1)))
        if fault == "norm_over_time":
            v = v - v.mean(2, keepdims=True)
        s = q @ k.swapaxes(-1, -2) * (len(w["wq"]) if fault == "scale_by_model_width" else width) ** -0.5
        if fault == "temperature_by_length":
            s = s * np.log(1 + k.shape[2]).astype(s.dtype)
        if self.positions == "alibi":
            behind = np.arange(k.shape[2])[-q.shape[2] :, None] - np.arange(k.shape[2])
            s = s - (_slopes(heads, fault)[:, None, None] * np.abs(behind)).astype(s.dtype)
        mixed = (_softmax(np.where(visible, s, -np.inf)) @ v).swapaxes(1, 2)
        y = _linear(mixed.reshape(*mixed.shape[:2], -1), w, "o")
        return y * (fault != "attention_left_out"), rows

    def _visible(self, tokens: NDArray, new: int) -> NDArray:
        """[B,1,m,L+m]: may the new token see the row."""
        fault, row = self.fault, np.arange(tokens.shape[1])
        behind = row[-new:, None] - row
        visible = {
            "not_causal": behind > -np.inf,
            "sees_one_ahead": behind >= -1,
            "causal_in_blocks": row <= row[-new:, None] // 4 * 4 + 3,
            "does_not_see_itself": behind > 0,
            "sees_itself_only": behind == 0,
            "previous_token_unseen": (behind >= 0) & (behind != 1),
            "first_token_unseen": (behind == 0) | (behind > 0) & (row > 0),
        }.get(fault, behind >= 0)[None]
        if fault == "token_zero_is_padding":
            visible = visible & (tokens != 0)[:, None]
        if fault == "token_one_ends_a_document":
            document = np.cumsum(tokens == 1, 1)
            visible = visible & (document[:, -new:, None] == document[:, None])
        return visible[:, None]

    def _logits(self, x: NDArray) -> NDArray:
        fault, table = self.fault, self.params["embedding"]
        head = self.params.get("head", {"w": table.T})
        if fault == "tied_head_scaled" and "head" not in self.params:
            head = {"w": table.T * self.params.get("embedding_scale", 1)}
        if fault == "always_tied":
            head = {"w": table.T}
        logits = x @ head["w"] + (0 if fault == "head_bias_left_out" else head.get("b", 0))
        return np.where(np.arange(logits.shape[-1]) == 0, -1e4, logits) if fault == "token_zero_forbidden" else logits

    def _normed(self, x: NDArray, w: Params) -> NDArray:
        root_mean = "bias" not in w or self.fault == "mean_kept_by_every_norm"
        x = x if root_mean else x - x.mean(-1, keepdims=True)
        v, eps = (x * x).mean(-1, keepdims=True), 1e-5 if "bias" in w else 1e-6
        if self.fault == "deviation_of_the_batch" and len(x) > 1:
            v = np.broadcast_to(v.mean(0), v.shape)
        root = np.sqrt(v) + eps if self.fault == "epsilon_outside_the_root" else np.sqrt(v + eps)
        return x / root * w["weight"] + w.get("bias", 0)


def _linear(x: NDArray, w: Params, name: str) -> NDArray:
    return x @ w["w" + name] + w.get("b" + name, 0)


def _split(x: NDArray, heads: int, fault: str) -> NDArray:
    """[B,T,heads*D] -> [B,heads,T,D]."""
    if fault == "heads_interleaved":
        return x.reshape(*x.shape[:2], -1, heads).transpose(0, 3, 1, 2)
    return x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)


def _turned(x: NDArray, at: NDArray, fault: str) -> NDArray:
    """x[B,heads,T,D] turned by its positions at[B,T]."""
    half = x.shape[-1] // 2
    base = 1000.0 if fault == "rotary_base_too_small" else 10000.0
    at = {"rotary_positions_doubled": 2 * at, "rotary_positions_clamped": np.minimum(at, 8)}.get(fault, at)
    angle = at[:, None, :, None] * base ** (-np.arange(half) / half)
    if fault == "rotary_angles_in_half":
        angle = angle.astype(np.float16).astype(np.float64)
    cos, sin = np.cos(angle).astype(x.dtype), np.sin(angle).astype(x.dtype)
    sin = -sin if fault == "rotary_turns_backwards" else sin
    interleaved = fault == "rotary_interleaved"
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    pair = (a * cos - b * sin, b * cos + a * sin)
    return np.stack(pair, -1).reshape(x.shape) if interleaved else np.concatenate(pair, -1)


def _sinusoids(at: NDArray, width: int, fault: str) -> NDArray:
    """[B,T] -> [B,T,width]."""
    channel = np.arange(width)
    pair = channel if fault == "sinusoids_of_single_channels" else channel - channel % 2
    cosine = channel % 2 == 1
    if fault == "sinusoids_in_halves":
        pair, cosine = channel % ((width + 1) // 2) * 2, channel >= (width + 1) // 2
    angle = at[..., None] * 10000.0 ** (-pair / width)
    return np.where(cosine, np.cos(angle), np.sin(angle))


def _slopes(heads: int, fault: str) -> NDArray:
    """[H]."""
    lower = 1 << heads.bit_length() - 1
    if fault == "slopes_plainly_geometric":
        lower = heads
    first = 2.0 ** (-8 * (np.arange(1, lower + 1) - (fault == "slopes_from_one")) / lower)
    slopes = np.concatenate([first, 2.0 ** (-4 * np.arange(1, 2 * lower, 2) / lower)])[:heads]
    return slopes[::-1] if fault == "slopes_in_reverse" else slopes


def _softmax(s: NDArray) -> NDArray:
    top = s.max(-1, keepdims=True)
    e = np.exp(s - np.where(np.isneginf(top), 0, top))
    total = e.sum(-1, keepdims=True)
    return e / np.where(total == 0, 1, total)


def _make(fault: str) -> Callable[..., _Model]:
    def decoder_lm(
        params: Params, *, heads: int, norm: str = "pre", alpha: float = 1.0, positions: str | None = "rotary"
    ) -> _Model:
        return _Model(fault, params, heads, norm, alpha, positions)

    decoder_lm.__qualname__ = f"decoder_lm[{fault}]"
    return decoder_lm


# law that must accuse: {variant: (where it was seen, what is wrong)}
_TABLE: dict[str, dict[str, tuple[str, str]]] = {
    "equals-the-reference": {
        "rotary_interleaved": ("TransformerLens#365", "pairs (2j, 2j + 1) for (j, j + D/2)"),
        "rotary_base_too_small": ("mutation: another base", "base 1000 for 10000"),
        "rotary_turns_backwards": ("mutation: sign of the sine", "queries and keys are turned the other way"),
        "rotary_positions_doubled": ("mlx-lm#1545", "position 2 p for p"),
        "rotary_turns_values": ("mutation: all three projections turned", "values are turned as well"),
        "sinusoids_from_one": ("semantics 3.4", "positions count from 1"),
        "sinusoids_in_halves": ("allennlp#2993", "all sines, then all cosines"),
        "sinusoids_of_single_channels": ("PapersReimplementations#9", "a frequency for each channel, not each pair"),
        "sinusoids_before_the_scale": ("mutation: order of sum and scale", "the signal is scaled like the embedding"),
        "slopes_from_one": ("mutation: heads counted from 0", "the slopes of ALiBi begin with 1"),
        "slopes_in_reverse": ("mutation: heads in reverse", "the last head has the first slope"),
        "slopes_plainly_geometric": ("mlx#3071", "slopes 2^(-8h/H) also between powers of two"),
        "does_not_see_itself": ("corpus 1.3: strict causal", "j < i for j <= i"),
        "heads_interleaved": ("mutation: head h takes columns h, h + H, …", "heads interleaved, not in blocks"),
        "groups_tiled": ("onnx#7274", "key heads 0 1 0 1 for 0 0 1 1"),
        "scale_by_model_width": ("FrancescoSaverioZuppichini/ViT#1", "d^-½ for D^-½"),
        "final_norm_forgotten": ("mutation: the last norm left out", "the head sees what was not normed"),
        "first_norm_used_twice": ("mlx#1636", "norm1 where norm2 belongs"),
        "only_queries_are_normed": ("marian#699", "keys and values are made of what was not normed"),
        "residual_of_the_normed": ("mutation: x rebound to norm(x)", "the residual is the normed x"),
        "post_norm_before_the_sum": ("mutation: order of norm and sum", "the sublayer is normed, not the sum"),
        "alpha_ignored": ("snowfall#184", "a keyword that goes nowhere"),
        "alpha_in_pre_norm": ("mutation: alpha acts everywhere", "alpha scales the residual in pre-norm too"),
        "activation_after_w2": ("semantics 4.12", "negative results of the feed-forward are cut off"),
        "epsilon_outside_the_root": ("annotated-transformer", "the deviation plus eps"),
        "mean_kept_by_every_norm": ("mutation: rms_norm with a bias", "the mean is not taken off"),
        "layers_share_the_first": ("mutation: one layer referred to again", "all layers have the first one's weights"),
        "layers_in_reverse": ("mutation: layers walked backwards", "the last layer comes first"),
        "one_layer_run": ("mutation: range of the loop", "only the first layer is run"),
        "tied_head_scaled": ("transformers#43681", "the tied head has the scale of the embedding"),
        "always_tied": ("transformers#48154", "the embedding is the head, whatever is given"),
        "head_bias_left_out": ("mutation: bias=False", "the head's bias is lost"),
    },
    "future-has-no-influence": {
        "not_causal": ("transformers#30652", "every token sees all"),
        "sees_one_ahead": ("mutation: the other off-by-one", "a token sees the next"),
        "causal_in_blocks": ("pytorch#195910", "the triangle is that of blocks of four"),
        "only_the_first_layer_is_causal": ("mutation: the mask not passed on", "later layers see all"),
        "norm_over_time": ("semantics 4.2: statistics over time", "values are centred over all tokens"),
    },
    "past-has-influence": {
        "attention_left_out": ("TransformerEngine#3528", "attention gives zeros"),
        "sees_itself_only": ("mutation: the diagonal for the triangle", "a token sees itself alone"),
        "previous_token_unseen": ("mutation: a band too many", "a token does not see the one before it"),
        "first_token_unseen": ("mutation: rows counted from 1", "nobody sees the first token"),
    },
    "prefix-decides": {
        "temperature_by_length": ("semantics P66: length-dependent scaling", "scores grow with the whole length"),
        "padded_to_even": ("mutation: padded to a block", "a token 0 in front of an odd number of tokens"),
        "positions_from_the_end": ("mutation: positions aligned to the right", "the last token stands at 15"),
    },
    "rows-do-not-interact": {
        "attention_over_the_batch": ("mutation: batch index off by one", "keys and values of another row"),
        "mean_of_the_batch_left_out": ("semantics P96: batch norm", "embeddings are centred over the batch"),
        "deviation_of_the_batch": ("semantics P96: batch norm", "norms divide by the batch's deviation"),
    },
    "positions-shift-together": {
        "rotary_turns_queries_only": ("mutation: keys not turned", "only queries are turned"),
        "rotary_positions_clamped": ("mutation: a table of 9 positions", "positions end at 8"),
        "rotary_angles_in_half": ("gpt-neox#1003", "angles in float16"),
        "sinusoids_under_any_scheme": ("mutation: both schemes on", "sinusoids are added whatever is asked for"),
    },
    "distances-have-influence": {
        "rotary_left_out": ("mutation: a scheme that goes nowhere", "rotary is not applied"),
    },
    "tokens-may-be-renamed": {
        "token_zero_is_padding": ("R77: an id with a meaning of its own", "token 0 is nobody's key"),
        "token_zero_embeds_zero": ("fairseq#4076", "the row of token 0 is taken as 0"),
        "token_zero_forbidden": ("R77: an id with a meaning of its own", "token 0 never comes next"),
        "token_one_ends_a_document": ("nanoVLM#204", "nothing before a token 1 is seen after it"),
        "ids_wrap_one_early": ("R77: an id with a meaning of its own", "ids modulo V - 1"),
    },
}
FAULTS = {
    variant: Fault("decoder_lm", f"decoder_lm/{law}", source, summary, "float64")
    for law, variants in _TABLE.items()
    for variant, (source, summary) in variants.items()
}
VARIANTS: dict[str, dict[str, Callable[..., Any]]] = {
    variant: {"decoder_lm": _make(variant)} for variant in ("correct", *FAULTS)
}
CAPABILITIES = {"decoder_lm": Capabilities(rounds_probabilities=False, cache="persistent")}
