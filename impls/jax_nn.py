"""jax.nn's own functions: softmax and its kin, activations, standardize as a norm, dot_product_attention.

JAX has [B,T,H,D], True in a mask may be seen, a causal triangle and a window that start at the top left, and a row that
may see nothing gets the plain mean of all values. Values are as wide as keys. Softmax in attention is float32 in every
dtype: float64 comes out as accurate as float32. "attention" leaves the choice of kernel to JAX, "attention_xla" names
XLA's. All are compiled by jax.jit but for "eager", where each step of softmax is a program of its own, and
"attention_eager", which is there for what the CPU refuses under jit: all of float16 and some shapes of bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
from jax import Array

from veriformer.declarations import Capabilities, Expected

FRAMEWORK = "jax"
DISTRIBUTIONS = ("jax", "jaxlib")


def softmax(x: Array, *, axis: int = -1) -> Array:
    """jax.nn.softmax.

    x[...] -> [...]
    p_i = exp(x_i) / sum_j exp(x_j)
    Source: the JAX manual, jax.nn.softmax. A row of -inf alone gives NaN.
    """
    return jax.nn.softmax(x, axis=axis)


def log_softmax(x: Array, *, axis: int = -1) -> Array:
    """jax.nn.log_softmax.

    x[...] -> [...]
    y_i = x_i - log sum_j exp(x_j)
    Source: the JAX manual, jax.nn.log_softmax. A row of -inf alone gives NaN.
    """
    return jax.nn.log_softmax(x, axis=axis)


def logsumexp(x: Array, *, axis: int = -1) -> Array:
    """jax.nn.logsumexp.

    x[...] -> [... without axis]
    y = log sum_j exp(x_j)
    Source: the JAX manual, jax.nn.logsumexp. A row of -inf alone gives -inf.
    """
    return jax.nn.logsumexp(x, axis=axis)


def gelu(x: Array) -> Array:
    """jax.nn.gelu with approximate=False.

    x[...] -> [...]
    x Phi(x)
    Source: the JAX manual, jax.nn.gelu.
    """
    return jax.nn.gelu(x, approximate=False)


def gelu_approximate(x: Array) -> Array:
    """jax.nn.gelu as it is by default.

    x[...] -> [...]
    x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))
    Source: the JAX manual, jax.nn.gelu.
    """
    return jax.nn.gelu(x)


def relu(x: Array) -> Array:
    """jax.nn.relu.

    x[...] -> [...]
    max(x, 0)
    Source: the JAX manual, jax.nn.relu.
    """
    return jax.nn.relu(x)


def _layer_norm(algorithm: str) -> Callable[..., Array]:
    def layer_norm(x: Array, weight: Array, bias: Array, *, eps: float = 1e-5) -> Array:
        """jax.nn.standardize over the last axis, which has no weight and bias of its own.

        x[..., d], weight[d], bias[d] -> [..., d]
        y = weight (x - mean) / sqrt(variance + eps) + bias
        Source: the JAX manual, jax.nn.standardize, with this algorithm for the variance.
        """
        return jax.nn.standardize(x, epsilon=eps, algorithm=algorithm) * weight + bias

    return layer_norm


def _attention(name: str, implementation: str | None) -> Callable[..., Array]:
    def attention(
        q: Array,
        k: Array,
        v: Array,
        *,
        mask: Array | None = None,
        bias: Array | None = None,
        causal: bool = False,
        scale: float | None = None,
        window: tuple[int | None, int | None] | None = None,
    ) -> Array:
        """jax.nn.dot_product_attention with this implementation.

        q[B,Tq,H,D], k[B,Tk,G,D], v[B,Tk,G,D] -> [B,Tq,H,D]
        softmax(q k^T scale + bias) v over the keys a row may see; query i sits at i (top left)
        Source: the JAX manual, jax.nn.dot_product_attention; masks and biases have four axes there.
        """
        if window is not None:  # a side that is open is as long as the sequences are
            window = tuple(q.shape[1] + k.shape[1] if side is None else side for side in window)
        return jax.nn.dot_product_attention(
            q,
            k,
            v,
            bias=_four(bias),
            mask=_four(mask),
            scale=scale,
            is_causal=causal,
            local_window_size=window,
            implementation=implementation,
        )

    attention.__qualname__ = f"attention[{name}]"
    return attention


def _four(array: Array | None) -> Array | None:
    """The array with axes of length 1 before its own, so that it has four."""
    return None if array is None else array.reshape((1,) * (4 - array.ndim) + array.shape)


def _of(function: Callable[..., Any], *names: str) -> Any:
    """The function compiled, for each value of these keywords."""
    return jax.jit(function, static_argnames=names)


_ATTENTION_WORDS = ("causal", "scale", "window")
VARIANTS: dict[str, dict[str, Callable[..., Any]]] = {
    "functions": {
        "softmax": _of(softmax, "axis"),
        "log_softmax": _of(log_softmax, "axis"),
        "logsumexp": _of(logsumexp, "axis"),
        "gelu": _of(gelu),
        "relu": _of(relu),
    },
    "eager": {"softmax": softmax},
    "approximate": {"gelu": _of(gelu_approximate)},
    "standardize": {"layer_norm": _of(_layer_norm("fast"))},
    "standardize_stable": {"layer_norm": _of(_layer_norm("stable"))},
    "attention": {"attention": _of(_attention("attention", None), *_ATTENTION_WORDS)},
    "attention_eager": {"attention": _attention("attention_eager", None)},
    "attention_xla": {"attention": _of(_attention("attention_xla", "xla"), *_ATTENTION_WORDS)},
}
_EACH = Capabilities(compiles_per_shape=True)
# every step is in the dtype of x, and nothing is widened for it
_IN_STORAGE = replace(_EACH, accumulate="storage", saved_statistics="storage", gradient_accumulate="storage")
_ATTENTION = replace(
    _EACH,
    layout="BTHD",
    causal_alignment="top_left",
    value_width="equal",
    empty_row="mean",
    infinite_bias=True,
    nonpositive_scale=True,
    accumulate={"float64": "float32"},
    intermediate={"float64": "float32"},
)
CAPABILITIES = {
    **{variant: {operation: _EACH for operation in functions} for variant, functions in VARIANTS.items()},
    "functions": {**dict.fromkeys(VARIANTS["functions"], _EACH), "gelu": replace(_EACH, accumulate="storage")},
    "approximate": {"gelu": replace(_EACH, gelu="tanh", accumulate="storage")},
    "standardize": {"layer_norm": _IN_STORAGE},
    "standardize_stable": {"layer_norm": _IN_STORAGE},
    "attention": {"attention": _ATTENTION},
    "attention_eager": {"attention": replace(_ATTENTION, dtypes=("bfloat16", "float16"))},
    "attention_xla": {"attention": _ATTENTION},
}


def _width(x: Any) -> int:
    """The length of the last axis of nested lists."""
    return _width(x[0]) if isinstance(x[0], list) else len(x)


_CANCELLED: list[tuple[str, str, dict[str, Any]]] = [
    ("float32", "equals-the-reference", {"x": [9999.0, 10000.0]}),
    ("float32", "gradient-equals-the-reference", {"x": [10000.0, 10002.0]}),
    ("float32", "mean-is-zero", {"x": [-10000.4130859375, -10000.0]}),
    ("float32", "variance-is-v-over-v-plus-eps", {"x": [10000.0, 10001.0]}),
    ("float32", "shift-changes-nothing", {"x": [0.0, 0.0006683189421892166], "weight": [0.0, 1.0]}),
    ("float32", "channels-permute", {"x": [[[9999.376953125, 10000.0, 9998.3916015625]]], "weight": [0.0, 0.0, 1.0]}),
    (
        "float32",
        "affine-in-weight-and-bias",
        {"x": [10002.0, 10000.6591796875, 9998.3583984375], "weight": [1.5, 0.0, 0.0], "eps": 1e-12},
    ),
    ("float64", "equals-the-reference", {"x": [10000.0, 9999.751638377904], "weight": [0.0, 1.0]}),
    (
        "float64",
        "row-alone-is-the-row-in-its-batch",
        {
            "x": [[10000.0, 10001.66372399139, 10001.0], [0.0, 0.0, 0.0]],
            "weight": [0.0, 1.5, 0.0],
            "bias": [0.0, -1.0, 0.0],
            "eps": 1.0,
        },
    ),
    ("float64", "gradient-equals-the-reference", {"x": [7.3, 7.3, 7.0], "weight": [0.0, 0.0, 1.0]}),
    ("float64", "variance-is-v-over-v-plus-eps", {"x": [0.16566645307617722, 0.16124769565672994]}),
    ("float64", "shift-changes-nothing", {"x": [12345.678, 12346.789, 12345.123]}),
    (
        "float64",
        "channels-permute",
        {"x": [[[10000.241771876877, 10000.235380918737]]], "weight": [0.0, 1.0], "eps": 0.0},
    ),
    ("bfloat16", "variance-is-v-over-v-plus-eps", {"x": [0.1494140625, 0.1376953125]}),
    ("float16", "variance-is-v-over-v-plus-eps", {"x": [1.65625, 1.6123046875]}),
]
_FLAT = [
    "gradient-equals-the-reference",
    "gradient-is-finite",
    "input-gradient-sums-to-zero",
    "gradient-along-the-row-is-what-eps-leaves",
]
_LARGE = ["width-one-gives-the-bias", "width-one-has-no-weight-gradient"]
_OVERFLOWN = [
    *((("standardize", "standardize_stable"), law, {"x": [0.0]}) for law in _FLAT),
    *((("standardize",), law, {"x": [1000.0]}) for law in _LARGE),
    (("standardize", "standardize_stable"), "equals-the-reference", {"x": [10000.0, 0.0], "weight": [0.0, 1.0]}),
]
EXPECTED = [
    Expected(
        f"layer_norm/{law}",
        reason="E[x^2] - E[x]^2 keeps few digits of a variance far below the mean's square, as the manual warns",
        link="reports/findings/jax_standardize_fast_variance.py",
        case={"weight": [1.0] * _width(case["x"]), "bias": [0.0] * _width(case["x"]), **case},
        when={"dtype": dtype},
        variants=("standardize",),
    )
    for dtype, law, case in _CANCELLED
]
EXPECTED += [
    Expected(
        f"layer_norm/{law}",
        reason="in float16 squares above 65504 are infinite, and so is the slope of rsqrt where the variance is 0",
        link="reports/findings/jax_standardize_float16.py",
        case={"weight": [1.0] * _width(case["x"]), "bias": [0.0] * _width(case["x"]), **case},
        when={"dtype": "float16"},
        variants=variants,
    )
    for variants, law, case in _OVERFLOWN
]
EXPECTED.append(
    Expected(
        "gelu/gradient-is-finite",
        reason="the slope of the cube in the approximation is infinite in float16, and 0 times it is NaN",
        link="reports/findings/jax_gelu_float16_gradient.py",
        case={"x": [-148.0]},
        when={"dtype": "float16"},
        variants=("approximate",),
    )
)
EXPECTED += [
    Expected(
        f"attention/{law}",
        reason="the CPU has no such product of matrices, which only shows when all is compiled; eagerly it has one",
        link="reports/findings/jax_attention_half_under_jit.py",
        case={"q": [[[[1.0]]]], "k": [[[[1.0]] * keys]], "v": [[[[1.0]] * keys]], **words},
        when={"dtype": dtype, "device": "cpu"},
        kind=kind,
        variants=("attention", "attention_xla"),
    )
    for law, dtype, kind, keys, words in (
        ("returns-an-array", "float16", "raised", 1, {}),
        ("a-single-key-takes-the-whole-cotangent", "bfloat16", "refused", 1, {}),
        ("hidden-equals-deleted", "bfloat16", "refused", 2, {"mask": [[[[True, False]]]]}),
        ("leading-keys-hidden", "bfloat16", "refused", 2, {}),
    )
]
