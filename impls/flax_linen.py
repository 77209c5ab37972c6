"""Flax linen's modules and functions, applied to the given weights under jax.jit.

Flax has [B,T,H,D], True in a mask may be seen, and a row that may see nothing gets the plain mean of all values.
Masks are made by helpers (make_causal_mask, combine_masks); there is no causal flag, no scale, no window, and as many
key heads as query heads. LayerNorm takes E[x^2] - E[x]^2 for the variance unless use_fast_variance=False. A decoding
module has a cache of fixed length and takes one token at a time; it counts on where the cache is full. Statistics of
norms and their gradients are float32 at least. RMSNorm has no bias, gelu approximates by default.
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
from flax import linen as nn
from jax import Array

from veriformer.declarations import Capabilities, Expected

FRAMEWORK = "jax"
DISTRIBUTIONS = ("flax", "jax")
Params = Mapping[str, Any]
_BIASES = ("bq", "bk", "bv", "bo")
_CAPACITY = 24
"""Rows of the cache of a decoder whose length was not said."""


def _layer_norm(name: str, fast: bool) -> Callable[..., Array]:
    def layer_norm(x: Array, weight: Array, bias: Array, *, eps: float = 1e-6) -> Array:
        """flax.linen.LayerNorm over the last axis.

        x[..., d], weight[d], bias[d] -> [..., d]
        y = weight (x - mean) / sqrt(variance + eps) + bias
        Source: the Flax manual, flax.linen.LayerNorm, with use_fast_variance as the name says.
        """
        module = nn.LayerNorm(epsilon=eps, use_fast_variance=fast, dtype=x.dtype)
        return module.apply({"params": {"scale": weight, "bias": bias}}, x)

    layer_norm.__qualname__ = f"layer_norm[{name}]"
    return layer_norm


def rms_norm(x: Array, weight: Array, *, eps: float = 1e-6) -> Array:
    """flax.linen.RMSNorm over the last axis.

    x[..., d], weight[d] -> [..., d]
    y = weight x / sqrt(mean(x^2) + eps)
    Source: the Flax manual, flax.linen.RMSNorm.
    """
    return nn.RMSNorm(epsilon=eps, dtype=x.dtype).apply({"params": {"scale": weight}}, x)


def softmax(x: Array, *, axis: int = -1) -> Array:
    """flax.linen.softmax.

    x[...] -> [...]
    p_i = exp(x_i) / sum_j exp(x_j)
    Source: the Flax manual, flax.linen.activation.
    """
    return nn.softmax(x, axis=axis)


def log_softmax(x: Array, *, axis: int = -1) -> Array:
    """flax.linen.log_softmax.

    x[...] -> [...]
    y_i = x_i - log sum_j exp(x_j)
    Source: the Flax manual, flax.linen.activation.
    """
    return nn.log_softmax(x, axis=axis)


def _gelu(approximate: bool) -> Callable[[Array], Array]:
    def gelu(x: Array) -> Array:
        """flax.linen.gelu.

        x[...] -> [...]
        x Phi(x), or its approximation with tanh
        Source: the Flax manual, flax.linen.gelu.
        """
        return nn.gelu(x, approximate=approximate)

    return gelu


def relu(x: Array) -> Array:
    """flax.linen.relu.

    x[...] -> [...]
    max(x, 0)
    Source: the Flax manual, flax.linen.activation.
    """
    return nn.relu(x)


def feed_forward(x: Array, w1: Array, b1: Array, w2: Array, b2: Array) -> Array:
    """Two flax.linen.Dense with flax.linen.relu between them.

    x[..., d], w1[d,f], b1[f], w2[f,d], b2[d] -> [..., d]
    relu(x w1 + b1) w2 + b2
    Source: the Flax manual, flax.linen.Dense.
    """
    inner = nn.relu(nn.Dense(w1.shape[1]).apply({"params": {"kernel": w1, "bias": b1}}, x))
    return nn.Dense(w2.shape[1]).apply({"params": {"kernel": w2, "bias": b2}}, inner)


def embedding(ids: Array, table: Array) -> Array:
    """flax.linen.Embed.

    ids[...], table[V,d] -> [..., d]
    table_ids
    Source: the Flax manual, flax.linen.Embed.
    """
    return nn.Embed(*table.shape, dtype=table.dtype).apply({"params": {"embedding": table}}, ids)


def _attention(name: str, wide: bool) -> Callable[..., Array]:
    def attention(q: Array, k: Array, v: Array, *, mask: Array | None = None, bias: Array | None = None) -> Array:
        """flax.linen.dot_product_attention.

        q[B,Tq,H,D], k[B,Tk,H,D], v[B,Tk,H,Dv] -> [B,Tq,H,Dv]
        softmax(q k^T D^-1/2 + bias) v over the keys a row may see
        Source: the Flax manual, flax.linen.dot_product_attention, with force_fp32_for_softmax as the name says.
        """
        return nn.dot_product_attention(q, k, v, bias, mask, deterministic=True, force_fp32_for_softmax=wide)

    attention.__qualname__ = f"attention[{name}]"
    return attention


def _heads(params: Params, heads: int) -> dict[str, Any]:
    """Ours by Flax's names and shapes: [in,heads,width], [heads,width]; all biases or none."""
    found = {}
    for ours, theirs in zip("qkvo", ("query", "key", "value", "out"), strict=True):
        kernel, bias, out = params[f"w{ours}"], params.get(f"b{ours}"), ours == "o"
        at = kernel.reshape((heads, -1, kernel.shape[1]) if out else (kernel.shape[0], heads, -1))
        found[theirs] = {"kernel": at}
        if any(name in params for name in _BIASES):
            bias = jnp.zeros_like(kernel[0]) if bias is None else bias
            found[theirs]["bias"] = bias if out else bias.reshape(heads, -1)
    return found


def _module(params: Params, heads: int, **options: Any) -> nn.MultiHeadDotProductAttention:
    """The module of these sizes. Raises ValueError for key heads or values of a width of their own."""
    inner = params["wq"].shape[1]
    for name in ("wk", "wv"):
        if params[name].shape[1] != inner:
            raise ValueError(f"{name}: got width {params[name].shape[1]}, wanted {inner}, that of the queries")
    biases = any(name in params for name in _BIASES)
    return nn.MultiHeadDotProductAttention(
        heads, qkv_features=inner, out_features=params["wo"].shape[1], use_bias=biases, deterministic=True,
        param_dtype=params["wq"].dtype, **options,
    )  # fmt: skip


def _mha(name: str, *, weights: bool = False, wide: bool = False) -> Callable[..., Array]:
    def multi_head_attention(
        x: Array, memory: Array, params: Params, *, heads: int, mask: Array | None = None
    ) -> Array:
        """flax.linen.MultiHeadDotProductAttention.

        x[B,Tq,d], memory[B,Tk,d], params: wq, wk, wv, wo and perhaps biases -> [B,Tq,d]
        concat_h(softmax(q_h k_h^T D^-1/2) v_h) wo + bo
        Source: the Flax manual, flax.linen.MultiHeadDotProductAttention.
        Raises ValueError for grouped heads and for values of another width.
        """
        module = _module(params, heads, force_fp32_for_softmax=wide)
        out, _ = module.apply(
            {"params": _heads(params, heads)}, x, memory, mask=mask, sow_weights=weights, mutable=["intermediates"]
        )
        return out

    multi_head_attention.__qualname__ = f"multi_head_attention[{name}]"
    return multi_head_attention


def _normed(x: Array, params: Params) -> Array:
    """LayerNorm where there is a bias, else RMSNorm, at the eps of our models."""
    if "bias" in params:
        return _layer_norm("stable", False)(x, params["weight"], params["bias"], eps=1e-5)
    return rms_norm(x, params["weight"])


def _run(params: Params, tokens: Array, alpha: float, pre: bool, attend: Callable[[int, Array], Array]) -> Array:
    """The whole model; attend(layer, x) is its self-attention."""
    table = params["embedding"]
    x = embedding(tokens, table) * params.get("embedding_scale", 1.0)
    for number, layer in enumerate(params["layers"]):
        y = attend(number, _normed(x, layer["norm1"]) if pre else x)
        x = x + y if pre else _normed(alpha * x + y, layer["norm1"])
        y = _fed(_normed(x, layer["norm2"]) if pre else x, layer["feed_forward"])
        x = x + y if pre else _normed(alpha * x + y, layer["norm2"])
    x = x if params.get("norm") is None else _normed(x, params["norm"])
    head, own = params.get("head"), {"params": {"embedding": table}}
    if head is None:
        return nn.Embed(*table.shape, dtype=table.dtype).apply(own, x, method=nn.Embed.attend)
    return _dense(x, head["w"], head.get("b"))


@partial(jax.jit, static_argnames=("heads", "pre"))
def _whole(params: Params, tokens: Array, alpha: float, heads: int, pre: bool) -> Array:
    """Every token's logits, with make_causal_mask."""
    mask = nn.make_causal_mask(tokens)

    def attend(number: int, x: Array) -> Array:
        own = params["layers"][number]["attention"]
        return _module(own, heads).apply({"params": _heads(own, heads)}, x, mask=mask)

    return _run(params, tokens, alpha, pre, attend)


@partial(jax.jit, static_argnames=("heads", "pre"))
def _stepped(params: Params, tokens: Array, cache: list[Any], alpha: float, heads: int, pre: bool) -> Any:
    """The logits of one new token, and the caches that decode=True leaves."""
    new: list[Any] = []

    def attend(number: int, x: Array) -> Array:
        own = params["layers"][number]["attention"]
        variables = {"params": _heads(own, heads), "cache": cache[number]}
        out, changed = _module(own, heads, decode=True).apply(variables, x, mutable=["cache"])
        new.append(changed["cache"])
        return out

    return _run(params, tokens, alpha, pre, attend), new


class Decoder:
    """A decoder-only model around MultiHeadDotProductAttention; its caches are those of decode=True."""

    def __init__(self, params: Params, heads: int, norm: str, alpha: float, max_length: int | None) -> None:
        self.params, self.alpha, self.static = params, alpha, {"heads": heads, "pre": norm == "pre"}
        self.vocabulary, self.max_length = len(params["embedding"]), max_length or _CAPACITY

    def full(self, tokens: Array) -> Array:
        """What may come after each token, given those up to it.

        tokens[B,T] -> logits[B,T,V]
        Source: Radford et al. 2019, section 2.3; the Flax manual, flax.linen.make_causal_mask.
        """
        return _whole(self.params, tokens, self.alpha, **self.static)

    def step(self, tokens: Array, cache: list[Any] | None) -> tuple[Array, list[Any]]:
        """The same for one new token after those in the cache.

        tokens[B,1] -> logits[B,1,V], the cache
        Source: the Flax manual, flax.linen.MultiHeadDotProductAttention, decode.
        Raises ValueError for more than one token.
        """
        if cache is None:
            cache = [self._empty(layer["attention"], len(tokens)) for layer in self.params["layers"]]
        return _stepped(self.params, tokens, cache, self.alpha, **self.static)

    def _empty(self, params: Params, batch: int) -> Any:
        """A layer's cache, made by init as the manual has it, without computing anything."""
        x = jax.ShapeDtypeStruct((batch, self.max_length, params["wq"].shape[0]), params["wq"].dtype)
        init = _module(params, self.static["heads"], decode=True).init
        made = jax.eval_shape(init, jax.random.key(0), x)
        return jax.tree.map(lambda one: jnp.zeros(one.shape, one.dtype), made["cache"])


def _dense(x: Array, kernel: Array, bias: Array | None) -> Array:
    params = {"kernel": kernel} if bias is None else {"kernel": kernel, "bias": bias}
    return nn.Dense(kernel.shape[1], use_bias=bias is not None).apply({"params": params}, x)


def _fed(x: Array, params: Params) -> Array:
    inner = nn.relu(_dense(x, params["w1"], params.get("b1")))
    return _dense(inner, params["w2"], params.get("b2"))


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


def decoder_lm(dtype: Any = "float32") -> Decoder:
    """A model with weights of its own and without positions, whose steps are held against its whole.

    dtype: of the weights.
    """
    return Decoder(_weights(dtype), 2, "pre", 1.0, _CAPACITY)


_EAGER: dict[str, dict[str, Callable[..., Any]]] = {
    "linen": {
        "softmax": softmax,
        "log_softmax": log_softmax,
        "layer_norm": _layer_norm("linen", True),
        "rms_norm": rms_norm,
        "gelu": _gelu(False),
        "relu": relu,
        "feed_forward": feed_forward,
        "embedding": embedding,
    },
    "linen_stable": {"layer_norm": _layer_norm("linen_stable", False)},
    "linen_approximate": {"gelu": _gelu(True)},
    "linen_attention": {"attention": _attention("linen_attention", False)},
    "linen_attention_wide": {"attention": _attention("linen_attention_wide", True)},
    "linen_heads": {"multi_head_attention": _mha("linen_heads")},
    "linen_heads_weights": {"multi_head_attention": _mha("linen_heads_weights", weights=True)},
    "linen_decoder": {"decoder_lm": decoder_lm},
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
_ATTENTION = replace(_EACH, layout="BTHD", grouped_heads=False, empty_row="mean", infinite_bias=True)
_HEADS = replace(_EACH, grouped_heads=False, value_width="equal", empty_row="mean")
CAPABILITIES = {
    **{variant: {operation: _EACH for operation in functions} for variant, functions in VARIANTS.items()},
    # every step of gelu is in the dtype of x, and the gradient of the table is a scatter that adds in its own
    "linen": {
        **dict.fromkeys(VARIANTS["linen"], _EACH),
        **dict.fromkeys(("gelu", "embedding"), replace(_EACH, accumulate="storage")),
    },
    "linen_approximate": {"gelu": replace(_EACH, gelu="tanh", accumulate="storage")},
    "linen_attention": {"attention": _ATTENTION},
    "linen_attention_wide": {"attention": _ATTENTION},
    "linen_heads": {"multi_head_attention": _HEADS},
    "linen_heads_weights": {"multi_head_attention": _HEADS},
    "linen_decoder": {"decoder_lm": replace(_EACH, cache="persistent", chunked_steps=False, checks_capacity=False)},
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
        variants=("linen",),
    )
    for dtype, law, case in _LARGE_MEAN
]
EXPECTED = [
    *_FAST,
    Expected(
        "attention/keeps-the-dtype",
        reason="weights that are made in float32 stay there, and so does the result",
        link="reports/findings/flax_fp32_softmax_dtype.py",
        case={"q": [[[[0.0]]]], "k": [[[[0.0]]]], "v": [[[[0.0]]]]},
        when={"dtype": "bfloat16 float16"},
        variants=("linen_attention_wide",),
    ),
]
