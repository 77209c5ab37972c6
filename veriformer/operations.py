"""The operations and their calling conventions: the table that third parties write against.

Axes: B batch, H query heads, G key/value heads (H % G == 0), Tq and Tk lengths, D head width,
Dv value width, d model width, f inner width, V vocabulary. "..." is any number of leading axes. Where an
axis is a product ("H*D") or differs by one ("B+1"), the parts are lengths of their own. N counts the
rows of a cache: B, or its blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PARAMS = "params."
"""Arrays whose names begin so are the weights of a composite: the function gets them as nested dicts."""
GIVEN = "model."
"""Arrays whose names begin so make a small model of ours (`given_models`), which the function gets first."""
MAIN = "main"
"""Stands for each operation's main dtype where dtypes are chosen."""


@dataclass(frozen=True)
class Operation:
    """One named calling convention.

    arrays: the positional arrays and their axes. scalars: positional whole numbers, where there are no
    arrays. options: the keyword arrays and their axes (in mask and bias each axis may also be 1).
    keywords: the scalars and their defaults. required: keywords and options without a default. kinds:
    what arrays hold if not real numbers, "bool" or "int"; "constant" are real numbers without a
    gradient. params: weights of a composite, by dotted name ("*" for any number), and their axes; those
    in a list and biases may be absent. results: names of what is returned. dtypes: those judged, where
    they do not follow from what the framework has.
    """

    name: str
    arrays: Mapping[str, str] = field(default_factory=dict)
    keywords: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)
    results: tuple[str, ...] = ("out",)
    meaning: str = ""
    scalars: tuple[str, ...] = ()
    required: frozenset[str] = frozenset()
    kinds: Mapping[str, str] = field(default_factory=dict)
    params: Mapping[str, str] = field(default_factory=dict)
    dtypes: tuple[str, ...] = ()
    words: tuple[str, ...] = ()

    def axes(self, array: str) -> tuple[str, ...]:
        """Names of the axes of one array, "..." standing for any leading ones."""
        if inner(array):
            return tuple(self.params[patterned(array)].split())
        return tuple((self.arrays.get(array) or self.options[array]).split())

    @property
    def names(self) -> tuple[str, ...]:
        """Every array's name: positional ones, weights, options."""
        return (*self.arrays, *self.params, *self.options)

    def knows(self, array: str) -> bool:
        """Whether there may be an array of this name."""
        return array in self.arrays or array in self.options or patterned(array) in self.params

    @property
    def positional(self) -> tuple[str, ...]:
        """What is passed by position; "params" and "model" stand for all arrays whose names begin so."""
        groups = {name.partition(".")[0] for name in self.params}
        first, last = (("model",) if "model" in groups else ()), (("params",) if "params" in groups else ())
        return (*first, *self.arrays, *self.scalars, *last)

    def kind(self, array: str) -> str:
        """What an array holds: "float", "constant", "int" or "bool"."""
        return self.kinds.get(array, "float")

    def default(self, word: str) -> Any:
        """A keyword's default; None for a scalar and where a keyword is required."""
        return self.keywords.get(word)

    def result_dtype(self, result: str, dtype: str) -> str:
        """The dtype of a result where the inputs have this one."""
        if result == "ids":
            return "int64"
        return "float32" if result == "lse" and dtype in ("float16", "bfloat16") else dtype

    @property
    def free(self) -> bool:
        """Whether the first array may have any shape, or any leading axes."""
        return bool(self.arrays) and next(iter(self.arrays.values())).startswith("...")

    @property
    def headed(self) -> tuple[str, ...]:
        """Names of the arrays that hold heads before positions, which another layout swaps."""
        four = {name: axes.split() for name, axes in self.arrays.items()}
        return tuple(name for name, axes in four.items() if len(axes) == 4 and axes[1] in ("H", "G"))

    @property
    def needed(self) -> tuple[str, ...]:
        """Names of the arrays without which there is no case."""
        return (*self.arrays, *(name for name in self.options if name in self.required))

    @property
    def differentiable(self) -> tuple[str, ...]:
        """Names of the arrays by which one differentiates."""
        return tuple(name for name in self.names if self.kind(name) == "float")


def inner(name: str) -> bool:
    """Whether an array is a part of what is passed, a weight or a number of a given model, and not passed alone."""
    return name.startswith((PARAMS, GIVEN))


def patterned(name: str) -> str:
    """A weight's name with "*" for every number: params.layers.0.norm1.weight is params.layers.*.norm1.weight."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


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
    name: str, arrays: Mapping[str, str], weights: Mapping[str, str], keywords: Mapping[str, Any], **rest: Any
) -> Operation:
    """An operation with weights; its masks are boolean, and a scale of embeddings has no gradient."""
    kinds = {"mask": "bool", "memory_mask": "bool", "params.embedding_scale": "constant", **rest.pop("kinds", {})}
    return Operation(
        name,
        arrays,
        keywords,
        kinds=kinds,
        params={PARAMS + key: axes for key, axes in weights.items()},
        required=_HEADS,
        **rest,
    )


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
