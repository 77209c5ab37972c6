"""Flax nnx's modules and functions, made of the given weights and run under jax.jit.

Flax has [B,T,H,D], True in a mask may be seen, is_causal starts at the top left, and a row that may see nothing gets
the plain mean of all values. dot_product_attention is jax.nn's, which wants Dv = D and computes scores in float32
whatever comes in, unless the weights are sown: then nnx computes by itself. There is no scale and no window. LayerNorm
takes E[x^2] - E[x]^2 for the variance unless use_fast_variance=False. A decoding module has a cache of fixed length
and takes one token at a time; it counts on where the cache is full.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from veriformer.declarations import Capabilities, Expected

FRAMEWORK = "jax"
DISTRIBUTIONS = ("flax", "jax")
Params = Mapping[str, Any]
_BIASES = ("bq", "bk", "bv", "bo")
_CAPACITY = 24
"""Rows of the cache of a decoder whose length was not said."""
_ZEROS = nnx.initializers.zeros_init()


def _set(module: Any, **weights: Array) -> Any:
    """The module with these weights in place of its own."""
    for name, value in weights.items():
        setattr(module, name, nnx.Param(value))
    return module


def _layer_norm(name: str, fast: bool) -> Callable[..., Array]:
    def layer_norm(x: Array, weight: Array, bias: Array, *, eps: float = 1e-6) -> Array:
        """flax.nnx.LayerNorm over the last axis.

        x[..., d], weight[d], bias[d] -> [..., d]
        y = weight (x - mean) / sqrt(variance + eps) + bias
        Source: the Flax manual, flax.nnx.LayerNorm, with use_fast_variance as the name says.
        """
        module = nnx.LayerNorm(x.shape[-1], epsilon=eps, use_fast_variance=fast, dtype=x.dtype, rngs=nnx.Rngs(0))
        return _set(module, scale=weight, bias=bias)(x)

    layer_norm.__qualname__ = f"layer_norm[{name}]"
    return layer_norm


def rms_norm(x: Array, weight: Array, *, eps: float = 1e-6) -> Array:
    """flax.nnx.RMSNorm over the last axis.

    x[..., d], weight[d] -> [..., d]
    y = weight x / sqrt(mean(x^2) + eps)
    Source: the Flax manual, flax.nnx.RMSNorm.
    """
    return _set(nnx.RMSNorm(x.shape[-1], epsilon=eps, dtype=x.dtype, rngs=nnx.Rngs(0)), scale=weight)(x)


def _dense(x: Array, kernel: Array, bias: Array | None) -> Array:
    own = {"use_bias": bias is not None, "kernel_init": _ZEROS, "param_dtype": kernel.dtype, "rngs": nnx.Rngs(0)}
    module = _set(nnx.Linear(*kernel.shape, **own), kernel=kernel)
    return (module if bias is None else _set(module, bias=bias))(x)


def feed_forward(x: Array, w1: Array, b1: Array, w2: Array, b2: Array) -> Array:
    """Two flax.nnx.Linear with flax.nnx.relu between them.

    x[..., d], w1[d,f], b1[f], w2[f,d], b2[d] -> [..., d]
    relu(x w1 + b1) w2 + b2
    Source: the Flax manual, flax.nnx.Linear.
    """
    return _dense(nnx.relu(_dense(x, w1, b1)), w2, b2)


def embedding(ids: Array, table: Array) -> Array:
    """flax.nnx.Embed.

    ids[...], table[V,d] -> [..., d]
    table_ids
    Source: the Flax manual, flax.nnx.Embed.
    """
    return _embed(table)(ids)


def _embed(table: Array) -> nnx.Embed:
    module = nnx.Embed(*table.shape, dtype=table.dtype, embedding_init=_ZEROS, rngs=nnx.Rngs(0))
    return _set(module, embedding=table)


def _attention(name: str, sown: bool) -> Callable[..., Array]:
    def attention(
        q: Array, k: Array, v: Array, *, mask: Array | None = None, bias: Array | None = None, causal: bool = False
    ) -> Array:
        """flax.nnx.dot_product_attention.

        q[B,Tq,H,D], k[B,Tk,G,D], v[B,Tk,G,Dv] -> [B,Tq,H,Dv]
        softmax(q k^T D^-1/2 + bias) v over the keys a row may see; query i sits at i (top left)
        Source: the Flax manual, flax.nnx.dot_product_attention, whose weights are sown as the name says.
        """
        module = nnx.Module() if sown else None
        return nnx.dot_product_attention(q, k, v, bias, mask, deterministic=True, module=module, is_causal=causal)

    attention.__qualname__ = f"attention[{name}]"
    return attention


def _module(params: Params, heads: int, decode: bool = False) -> nnx.MultiHeadAttention:
    """The module of these weights. Raises ValueError for values of another width."""
    inner, biases = params["wq"].shape[1], any(name in params for name in _BIASES)
    groups = params["wk"].shape[1] * heads // inner
    if params["wv"].shape[1] != params["wk"].shape[1]:
        raise ValueError(f"wv: got width {params['wv'].shape[1]}, wanted {params['wk'].shape[1]}, that of the keys")
    module = nnx.MultiHeadAttention(
        heads, params["wq"].shape[0], inner, params["wo"].shape[1], groups, params["wk"].shape[0],
        use_bias=biases, deterministic=True, decode=decode, kernel_init=_ZEROS, rngs=nnx.Rngs(0),
    )  # fmt: skip
    for name, count in (("query", heads), ("key", groups), ("value", groups), ("out", heads)):
        out, kernel, bias = name == "out", params[f"w{name[0]}"], params.get(f"b{name[0]}")
        shape = (count, -1, kernel.shape[1]) if out else (kernel.shape[0], count, -1)
        _set(getattr(module, name), kernel=kernel.reshape(shape))
        if biases:
            bias = jnp.zeros_like(kernel[0]) if bias is None else bias
            _set(getattr(module, name), bias=bias if out else bias.reshape(count, -1))
    return module


def _mha(name: str, sown: bool) -> Callable[..., Array]:
    def multi_head_attention(
        x: Array, memory: Array, params: Params, *, heads: int, mask: Array | None = None, causal: bool = False
    ) -> Array:
        """flax.nnx.MultiHeadAttention.

        x[B,Tq,d], memory[B,Tk,d], params: wq, wk, wv, wo and perhaps biases -> [B,Tq,d]
        concat_h(softmax(q_h k_g^T D^-1/2) v_g) wo + bo, g = h // (H/G)
        Source: the Flax manual, flax.nnx.MultiHeadAttention.
        Raises ValueError for values of another width than the keys.
        """
        return _module(params, heads)(x, memory, mask=mask, sow_weights=sown, is_causal=causal)

    multi_head_attention.__qualname__ = f"multi_head_attention[{name}]"
    return multi_head_attention


def _normed(x: Array, params: Params) -> Array:
    """LayerNorm where there is a bias, else RMSNorm, at the eps of our models."""
    if "bias" in params:
        return _layer_norm("stable", False)(x, params["weight"], params["bias"], eps=1e-5)
    return rms_norm(x, params["weight"])


def _run(params: Params, tokens: Array, alpha: float, pre: bool, attend: Callable[[int, Array], Array]) -> Array:
    """The whole model; attend(layer, x) is its self-attention."""
    table = _embed(params["embedding"])
    x = table(tokens) * params.get("embedding_scale", 1.0)
    for number, layer in enumerate(params["layers"]):
        inner = layer["feed_forward"]
        y = attend(number, _normed(x, layer["norm1"]) if pre else x)
        x = x + y if pre else _normed(alpha * x + y, layer["norm1"])
        y = nnx.relu(_dense(_normed(x, layer["norm2"]) if pre else x, inner["w1"], inner.get("b1")))
        y = _dense(y, inner["w2"], inner.get("b2"))
        x = x + y if pre else _normed(alpha * x + y, layer["norm2"])
    x = x if params.get("norm") is None else _normed(x, params["norm"])
    head = params.get("head")
    return table.attend(x) if head is None else _dense(x, head["w"], head.get("b"))


@partial(jax.jit, static_argnames=("heads", "pre"))
def _whole(params: Params, tokens: Array, alpha: float, heads: int, pre: bool) -> Array:
    """Every token's logits, with is_causal."""
    return _run(
        params, tokens, alpha, pre,
        lambda number, x: _module(params["layers"][number]["attention"], heads)(x, is_causal=True),
    )  # fmt: skip


@partial(jax.jit, static_argnames=("heads", "pre", "capacity", "causal"))
def _stepped(
    params: Params, tokens: Array, cache: list[Any] | None, alpha: float, heads: int, pre: bool, capacity: int,
    causal: bool,
) -> Any:  # fmt: skip
    """The logits of one new token, and the caches that decode=True leaves."""
    new: list[Any] = []

    def attend(number: int, x: Array) -> Array:
        module = _module(params["layers"][number]["attention"], heads, decode=True)
        module.init_cache((len(x), capacity, x.shape[2]), dtype=x.dtype)
        own = (module.cached_key, module.cached_value, module.cache_index)
        for variable, value in zip(own, cache[number] if cache else (), strict=False):
            variable[...] = value
        out = module(x, is_causal=causal)
        new.append(tuple(variable[...] for variable in own))
        return out

    return _run(params, tokens, alpha, pre, attend), new


class Decoder:
    """A decoder-only model around MultiHeadAttention; its caches are those of decode=True."""

    def __init__(
        self, params: Params, heads: int, norm: str, alpha: float, max_length: int | None, causal: bool
    ) -> None:
        self.params, self.alpha, self.static = params, alpha, {"heads": heads, "pre": norm == "pre"}
        self.vocabulary, self.max_length, self.causal = len(params["embedding"]), max_length or _CAPACITY, causal

    def full(self, tokens: Array) -> Array:
        """What may come after each token, given those up to it.

        tokens[B,T] -> logits[B,T,V]
        Source: Radford et al. 2019, section 2.3; the Flax manual, flax.nnx.MultiHeadAttention.
        """
        return _whole(self.params, tokens, self.alpha, **self.static)

    def step(self, tokens: Array, cache: list[Any] | None) -> tuple[Array, list[Any]]:
        """The same for one new token after those in the cache.

        tokens[B,1] -> logits[B,1,V], the cache
        Source: the Flax manual, flax.nnx.MultiHeadAttention, decode and init_cache.
        Raises ValueError for more than one token.
        """
        return _stepped(
            self.params, tokens, cache, self.alpha, **self.static, capacity=self.max_length, causal=self.causal
        )


def _weights(dtype: Any) -> Params:
    """Two layers of width 8 with two heads, eleven tokens: numbers of a fixed seed."""
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> Array:
        return jnp.asarray(rng.standard_normal(shape) / np.sqrt(shape[0]), dtype)

    def norm() -> Params:
        return {"weight": 1 + draw(8), "bias": draw(8)}

    def layer() -> Params:
        attention = {name: 1.5 * draw(8, 8) for name in ("wq", "wk", "wv", "wo")}
        inner = {"w1": draw(8, 16), "b1": draw(16), "w2": draw(16, 8), "b2": draw(8)}
        return {"attention": attention, "norm1": norm(), "feed_forward": inner, "norm2": norm()}

    return {"embedding": 3 * draw(11, 8), "layers": [layer(), layer()], "norm": norm()}


def _decoder(causal: bool) -> Callable[..., Decoder]:
    def decoder_lm(dtype: Any = "float32") -> Decoder:
        """A model with weights of its own and without positions, whose steps are held against its whole.

        dtype: of the weights.
        """
        return Decoder(_weights(dtype), 2, "pre", 1.0, _CAPACITY, causal)

    return decoder_lm


_EAGER: dict[str, dict[str, Callable[..., Any]]] = {
    "nnx": {
        "layer_norm": _layer_norm("nnx", True),
        "rms_norm": rms_norm,
        "feed_forward": feed_forward,
        "embedding": embedding,
    },
    "nnx_stable": {"layer_norm": _layer_norm("nnx_stable", False)},
    "nnx_attention": {"attention": _attention("nnx_attention", False)},
    "nnx_attention_weights": {"attention": _attention("nnx_attention_weights", True)},
    "nnx_heads": {"multi_head_attention": _mha("nnx_heads", False)},
    "nnx_heads_weights": {"multi_head_attention": _mha("nnx_heads_weights", True)},
    "nnx_decoder": {"decoder_lm": _decoder(False)},
    "nnx_decoder_causal": {"decoder_lm": _decoder(True)},
}
_STATIC = {"axis", "heads", "causal"}
"""Keywords that a compiled function is compiled for; the others are traced."""


def _compiled(operation: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function under jax.jit, as modules are run; a model's steps are left as they are."""
    if operation == "decoder_lm":
        return function
    names = _STATIC & set(inspect.signature(function).parameters)
    return jax.jit(function, static_argnames=sorted(names))


VARIANTS = {
    variant: {operation: _compiled(operation, function) for operation, function in functions.items()}
    for variant, functions in _EAGER.items()
}
_EACH = Capabilities(compiles_per_shape=True)
_SOWN = replace(_EACH, layout="BTHD", causal_alignment="top_left", empty_row="mean", infinite_bias=True)
_ATTENTION = replace(_SOWN, value_width="equal", intermediate={"float64": "float32"}, accumulate={"float64": "float32"})
_SOWN_HEADS = replace(_EACH, causal_alignment="top_left", value_width="equal", empty_row="mean")
_HEADS = replace(_SOWN_HEADS, intermediate={"float64": "float32"}, accumulate={"float64": "float32"})
_DECODER = replace(_EACH, cache="persistent", chunked_steps=False, checks_capacity=False)
CAPABILITIES = {
    **{variant: {operation: _EACH for operation in functions} for variant, functions in VARIANTS.items()},
    # the gradient of the table is a scatter that adds in its own dtype
    "nnx": {**dict.fromkeys(VARIANTS["nnx"], _EACH), "embedding": replace(_EACH, accumulate="storage")},
    "nnx_attention": {"attention": _ATTENTION},
    "nnx_attention_weights": {"attention": _SOWN},
    "nnx_heads": {"multi_head_attention": _HEADS},
    "nnx_heads_weights": {"multi_head_attention": _SOWN_HEADS},
    "nnx_decoder": {"decoder_lm": _DECODER},
    "nnx_decoder_causal": {"decoder_lm": _DECODER},
}
_STEPS = [10000.0, 10001.0, 10002.0, 10003.0]
_LARGE_MEAN = [
    ("float32", "equals-the-reference", {"x": _STEPS}),
    ("float32", "gradient-equals-the-reference", {"x": _STEPS}),
    ("float32", "variance-is-v-over-v-plus-eps", {"x": _STEPS}),
    ("float32", "shift-changes-nothing", {"x": _STEPS}),
    ("float32", "mean-is-zero", {"x": [-10000.4130859375, -10000.0]}),
    ("float32", "channels-permute", {"x": [[[9999.376953125, 10000.0, 9998.3916015625]]], "weight": [0.0, 0.0, 1.0]}),
    (
        "float32",
        "affine-in-weight-and-bias",
        {"x": [10002.0, 10000.6591796875, 9998.3583984375], "weight": [1.5, 0.0, 0.0], "eps": 1e-12},
    ),
    ("float64", "equals-the-reference", {"x": [10000.0, 9999.751638377904]}),
    ("float64", "gradient-equals-the-reference", {"x": [7.3, 7.3, 7.0]}),
    ("float64", "variance-is-v-over-v-plus-eps", {"x": [0.16566645307617722, 0.16124769565672994]}),
    ("float64", "shift-changes-nothing", {"x": [12345.678, 12346.789, 12345.123]}),
    ("float64", "channels-permute", {"x": [10000.241771876877, 10000.235380918737], "eps": 1e-12}),
    ("float16", "equals-the-reference", {"x": [998.0, 1000.0, 1000.0]}),
    ("float16", "gradient-equals-the-reference", {"x": [1000.0, 1000.0, 1002.0]}),
    ("float16", "shift-changes-nothing", {"x": [1000.0, 1000.0, 1002.0]}),
]
_FAST = [
    Expected(
        f"layer_norm/{law}",
        reason="E[x^2] - E[x]^2 keeps few digits of a variance far below the mean's square, as the manual warns",
        link="reports/findings/flax_fast_variance.py",
        case={"weight": [1.0] * len(case["x"]), "bias": [0.0] * len(case.get("weight", case["x"])), **case},
        when={"dtype": dtype},
        variants=("nnx",),
    )
    for dtype, law, case in _LARGE_MEAN
]
_FIRST_KEY_ALONE = [
    Expected(
        f"decoder_lm/{law}",
        reason="is_causal lays a triangle of one row over the whole cache, of which only the first key stays visible",
        link="https://github.com/google/flax/issues/5591",
        case={"tokens": tokens},
        variants=("nnx_decoder_causal",),
    )
    for law, tokens in (
        ("cache-changes-nothing", [[2, 0, 1, 3]]),
        ("new-cache-is-empty", [[2, 0, 1, 3]]),
        ("any-walk-equals-full", [[2, 0, 1, 3]]),
        ("sessions-do-not-interact", [[1, 0]]),
    )
]
_SCALARS = {"q": [[[[1.0]]]], "k": [[[[1.0]] * 2]], "v": [[[[1.0]] * 2]]}
_SMALL_HEADS = {
    "x": [[[1.0]]], "memory": [[[1.0]] * 2], "heads": 1,
    **{f"params.{name}": [[1.0]] for name in ("wq", "wk", "wv", "wo")},
}  # fmt: skip
_NO_SUCH_PRODUCT = [
    Expected(
        law,
        reason="the CPU has no such product of matrices, which only shows when all is compiled; eagerly it has one",
        link="reports/findings/jax_attention_half_under_jit.py",
        case=case,
        when={"dtype": dtype, "device": "cpu"},
        kind=kind,
        variants=("nnx_attention", "nnx_heads"),
    )
    for law, dtype, kind, case in (
        ("attention/returns-an-array", "float16", "raised", _SCALARS),
        ("multi_head_attention/returns-an-array", "float16", "raised", _SMALL_HEADS),
        ("attention/hidden-equals-deleted", "bfloat16", "refused", {**_SCALARS, "mask": [[[[True, False]]]]}),
        ("attention/leading-keys-hidden", "bfloat16", "refused", _SCALARS),
        ("multi_head_attention/gradient-is-linear-in-the-cotangent", "bfloat16", "refused", _SMALL_HEADS),
        ("multi_head_attention/hidden-rows-may-be-deleted", "bfloat16", "refused", _SMALL_HEADS),
    )
]
EXPECTED = [*_FAST, *_NO_SUCH_PRODUCT, *_FIRST_KEY_ALONE]
