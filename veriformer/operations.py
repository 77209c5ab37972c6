"""The operations and their calling conventions: the table that third parties write against.

Axes: B batch, H query heads, G key/value heads (H % G == 0), Tq and Tk lengths, D head width,
Dv value width, d model width, f inner width, V vocabulary. "..." is any number of leading axes. Where an
axis is a product ("H*D") or differs by one ("B+1"), the parts are lengths of their own. N counts the
rows of a cache: B, or its blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from veriformer.operation import PARAMS, Operation

_BOOLEAN_MASK = {"mask": "bool"}
_ATTENTION: dict[str, Any] = {
    "arrays": {"q": "B H Tq D", "k": "B G Tk D", "v": "B G Tk Dv"},
    "options": {"mask": "B H Tq Tk", "bias": "B H Tq Tk", "sink": "H"},
    "keywords": {"causal": False, "scale": None, "window": None, "softcap": None},
    "kinds": _BOOLEAN_MASK,
}
_ATTENTION_WEIGHTS = {
    "wq": "d H*D",
    "wk": "d G*D",
    "wv": "d G*Dv",
    "wo": "H*Dv d",
    "bq": "H*D",
    "bk": "G*D",
    "bv": "G*Dv",
    "bo": "d",
}
_NORM = {"weight": "d", "bias": "d"}
_FEED_FORWARD = {"w1": "d f", "b1": "f", "w2": "f d", "b2": "d"}


def _within(**parts: Mapping[str, str]) -> dict[str, str]:
    """The arrays of several parts, by dotted names."""
    return {f"{part}.{name}": axes for part, arrays in parts.items() for name, axes in arrays.items()}


_ENCODER_LAYER = _within(attention=_ATTENTION_WEIGHTS, norm1=_NORM, feed_forward=_FEED_FORWARD, norm2=_NORM)
_DECODER_LAYER = _within(
    attention=_ATTENTION_WEIGHTS,
    norm1=_NORM,
    cross_attention=_ATTENTION_WEIGHTS,
    norm2=_NORM,
    feed_forward=_FEED_FORWARD,
    norm3=_NORM,
)


def _stack(layer: Mapping[str, str]) -> dict[str, str]:
    """The arrays of a list of layers with a final norm."""
    return {f"layers.*.{name}": axes for name, axes in layer.items()} | _within(norm=_NORM)


_TRANSFORMER = {
    "source_embedding": "Vs d",
    "target_embedding": "V d",
    "embedding_scale": "",
    **_within(encoder=_stack(_ENCODER_LAYER), decoder=_stack(_DECODER_LAYER), head={"w": "d V", "b": "V"}),
}
_DECODER_LM = {
    "embedding": "V d",
    "embedding_scale": "",
    **_stack(_ENCODER_LAYER),
    **_within(head={"w": "d V", "b": "V"}),
}
_LAYER_KEYWORDS: dict[str, Any] = {"heads": None, "norm": "post", "alpha": 1.0, "window": None, "positions": None}
_HEADS = frozenset({"heads"})


def _composite(
    name: str,
    arrays: Mapping[str, str],
    weights: Mapping[str, str],
    keywords: Mapping[str, Any],
    required: frozenset[str] = _HEADS,
    **rest: Any,
) -> Operation:
    """An operation with weights; its masks are boolean, and a scale of embeddings has no gradient."""
    kinds = {"mask": "bool", "memory_mask": "bool", "params.embedding_scale": "constant", **rest.pop("kinds", {})}
    return Operation(
        name,
        arrays,
        keywords,
        kinds=kinds,
        params={PARAMS + key: axes for key, axes in weights.items()},
        required=required,
        **rest,
    )


_HALTING: dict[str, Any] = {"results": ("output", "steps", "remainder")}


OPERATIONS: dict[str, Operation] = {
    operation.name: operation
    for operation in (
        Operation(
            "softmax", {"x": "..."}, {"axis": -1, "temperature": 1.0}, meaning="exp(x/T) / sum exp(x/T) over axis"
        ),
        Operation("log_softmax", {"x": "..."}, {"axis": -1}, meaning="x - log sum exp(x) over axis"),
        Operation("logsumexp", {"x": "..."}, {"axis": -1}, meaning="log sum exp(x) over axis, which is dropped"),
        Operation(
            "layer_norm",
            {"x": "... d", "weight": "d", "bias": "d"},
            {"eps": 1e-5},
            meaning="weight (x - mean) / sqrt(variance + eps) + bias over the last axis",
        ),
        Operation(
            "rms_norm",
            {"x": "... d", "weight": "d"},
            {"eps": 1e-6},
            meaning="weight x / sqrt(mean x² + eps) over the last axis",
        ),
        Operation("gelu", {"x": "..."}, meaning="x Φ(x), Φ the normal distribution"),
        Operation("relu", {"x": "..."}, meaning="max(x, 0)"),
        Operation(
            "feed_forward",
            {"x": "... d", "w1": "d f", "b1": "f", "w2": "f d", "b2": "d"},
            meaning="relu(x w1 + b1) w2 + b2",
        ),
        Operation(
            "sinusoidal_positions",
            scalars=("length", "width"),
            keywords={"offset": 0},
            dtypes=("float32",),
            meaning="sine in channel 2i and cosine in channel 2i+1 of position · 10000^(-2i/width); [length, width]",
        ),
        Operation(
            "rotary_embedding",
            {"x": "... T D", "positions": "T"},
            {"base": 10000.0},
            kinds={"positions": "int"},
            meaning="the pair (x_j, x_{j+D/2}) turned by the angle position · base^(-2j/D)",
        ),
        Operation(
            "alibi_bias",
            scalars=("heads", "query_length", "key_length"),
            dtypes=("float32",),
            meaning="-m_h (query position - key position), query i at i + Tk - Tq; [H, Tq, Tk]",
        ),
        Operation("attention", **_ATTENTION, meaning="softmax(q k^T scale) v over the keys a row may see"),
        Operation(
            "attention_with_lse",
            **_ATTENTION,
            results=("out", "lse"),
            meaning="attention, and the log of the summed exponentials of each row's logits, without the sink",
        ),
        Operation(
            "varlen_attention",
            {"q": "Nq H D", "k": "Nk G D", "v": "Nk G Dv", "q_offsets": "B+1", "k_offsets": "B+1"},
            {"causal": False, "scale": None, "window": None},
            kinds={"q_offsets": "int", "k_offsets": "int"},
            meaning="attention within each packed sequence: rows offsets[b] up to offsets[b+1]",
        ),
        Operation(
            "cached_attention",
            {
                "q": "B H m D",
                "k_new": "B G m D",
                "v_new": "B G m Dv",
                "k_cache": "N G C D",
                "v_cache": "N G C Dv",
                "lengths": "B",
            },
            {"causal": True, "scale": None, "window": None},
            {"block_table": "B P"},
            results=("out", "k_cache", "v_cache"),
            kinds={"lengths": "int", "block_table": "int", "k_cache": "constant", "v_cache": "constant"},
            meaning="new keys and values written at lengths[b]+i, then attention over the cache up to there",
        ),
        _composite(
            "multi_head_attention",
            {"x": "B Tq d", "memory": "B Tk d"},
            _ATTENTION_WEIGHTS,
            {"heads": None, "causal": False},
            options={"mask": "B H Tq Tk"},
            meaning="attention by heads of x wq + bq, memory wk + bk and memory wv + bv, joined, times wo, + bo",
        ),
        _composite(
            "encoder_layer",
            {"x": "B T d"},
            _ENCODER_LAYER,
            _LAYER_KEYWORDS,
            options={"mask": "B H T T"},
            meaning="self-attention, then feed-forward, each in a residual with its norm after (post) or before (pre)",
        ),
        _composite(
            "decoder_layer",
            {"x": "B T d", "memory": "B S d"},
            _DECODER_LAYER,
            _LAYER_KEYWORDS,
            options={"mask": "B H T T", "memory_mask": "B H T S"},
            meaning="causal self-attention, attention to memory, feed-forward, each in a residual with its norm",
        ),
        _composite(
            "encoder",
            {"x": "B T d"},
            _stack(_ENCODER_LAYER),
            _LAYER_KEYWORDS,
            options={"mask": "B H T T"},
            meaning="encoder layers one after the other, then the final norm, if there is one",
        ),
        _composite(
            "decoder",
            {"x": "B T d", "memory": "B S d"},
            _stack(_DECODER_LAYER),
            _LAYER_KEYWORDS,
            options={"mask": "B H T T", "memory_mask": "B H T S"},
            meaning="decoder layers one after the other, all on one memory, then the final norm, if there is one",
        ),
        _composite(
            "transformer",
            {"source": "B S", "target": "B T"},
            _TRANSFORMER,
            {"heads": None, "norm": "post", "alpha": 1.0, "positions": "sinusoidal"},
            options={"mask": "B S"},
            kinds={"source": "int", "target": "int"},
            meaning="logits of what follows each target token, given those before it and all of the source",
        ),
        _composite(
            "decoder_lm",
            {"tokens": "B T"},
            _DECODER_LM,
            {"heads": None, "norm": "pre", "alpha": 1.0, "window": None, "positions": "rotary", "max_length": None},
            kinds={"tokens": "int"},
            words=("full", "step", "crop", "reorder"),
            meaning="full(tokens) -> logits of what follows each; step(tokens, cache) -> the same with a cache, and it",
        ),
        _composite(
            "encoder_decoder",
            {"source": "B S", "target": "B T"},
            _TRANSFORMER,
            {"heads": None, "norm": "post", "alpha": 1.0, "positions": "sinusoidal"},
            options={"mask": "B S"},
            kinds={"source": "int", "target": "int"},
            words=("full", "encode", "step", "crop", "reorder"),
            meaning="full(source, target) -> logits; encode(source) -> memory; step(tokens, memory, cache)",
        ),
        Operation(
            "generate",
            {"prompt": "B T"},
            {"max_length": None, "end": None, "pad": 0},
            results=("ids",),
            kinds={"prompt": "int", "model.table": "constant"},
            params={"model.table": "V V"},
            required=frozenset({"max_length"}),
            dtypes=("float32",),
            meaning="prompt and the likeliest token after it, again and again, up to max_length; after end only pad",
        ),
        Operation(
            "next_token_probabilities",
            {"logits": "... V"},
            {"temperature": 1.0, "top_k": None, "top_p": None},
            kinds={"logits": "constant"},
            meaning="softmax(logits/T) over the k largest, of these the fewest whose mass is at least p, renormalised",
        ),
        Operation(
            "adaptive_computation_time",
            {"halting": "... M", "states": "... M d"},
            {"epsilon": 0.01},
            **_HALTING,
            meaning="states weighted by halting until it adds up to 1 - epsilon; the last one gets what is left of 1",
        ),
        Operation(
            "act_loop",
            {"state": "... d"},
            {"max_steps": None, "epsilon": 0.01},
            params={"step.drive": "... M d", "step.halting": "... M"},
            required=frozenset({"max_steps"}),
            **_HALTING,
            meaning="the same of the states that step(state, n) -> (state, halting) gives for n = 1, 2, …",
        ),
        _composite(
            "universal_transformer",
            {"x": "B T d"},
            _within(layer=_DECODER_LAYER, halt={"w": "d 1", "b": "1"}),
            {
                "heads": None,
                "norm": "post",
                "causal": False,
                "max_steps": None,
                "epsilon": 0.01,
                "preset": "default",
            },
            required=_HEADS | {"max_steps"},
            options={"mask": "B T", "memory": "B S d", "memory_mask": "B S"},
            **_HALTING,
            meaning="one layer applied again and again, each position until its halting sum reaches 1 - epsilon",
        ),
        Operation(
            "cross_entropy",
            {"logits": "N V", "targets": "N"},
            {"label_smoothing": 0.0, "ignore_index": -100, "reduction": "mean"},
            kinds={"targets": "int"},
            results=("loss",),
            meaning="-sum of q log_softmax(logits), q the targets smoothed; mean over targets other than ignore_index",
        ),
        Operation(
            "adamw_step",
            {"param": "...", "grad": "...", "m": "...", "v": "..."},
            {"lr": None, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0},
            scalars=("step",),
            required=frozenset({"lr"}),
            results=("param", "m", "v"),
            kinds=dict.fromkeys(("param", "grad", "m", "v"), "constant"),
            meaning="m and v averaged, param (1 - lr weight_decay) - lr m' / (sqrt(v') + eps), m' and v' unbiased",
        ),
        Operation(
            "clip_by_global_norm",
            keywords={"max_norm": None},
            required=frozenset({"max_norm"}),
            params={"grads.*": "..."},
            kinds={"grads.*": "constant"},
            results=("grads.*",),
            meaning="all gradients times min(1, max_norm / their common norm)",
        ),
        Operation(
            "noam_schedule",
            scalars=("step",),
            keywords={"width": None, "warmup": None},
            required=frozenset({"width", "warmup"}),
            results=("rate",),
            dtypes=("float64",),
            meaning="width^-0.5 min(step^-0.5, step warmup^-1.5), 0 at step 0",
        ),
        Operation(
            "dropout",
            {"x": "..."},
            {"rate": None},
            {"uniform": "..."},
            required=frozenset({"rate", "uniform"}),
            kinds={"uniform": "constant"},
            meaning="x / (1 - rate) where uniform >= rate, else 0",
        ),
        Operation(
            "embedding",
            {"ids": "...", "table": "V d"},
            {"padding_index": None},
            kinds={"ids": "int"},
            meaning="row ids of table; the row padding_index gets no gradient",
        ),
    )
}
