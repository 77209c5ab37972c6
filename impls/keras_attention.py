"""Keras 3 on the backend that KERAS_BACKEND names: dot_product_attention and the two layers around it.

Registered twice, through `keras_torch` and `keras_jax`, which choose the backend. Keras has [B,T,H,D], its causal
triangle starts at the top left, True in a mask may be seen, and a row that may see nothing gets the plain mean, or 0
where a layer is asked for its scores. Window and sink are lacking, attn_logits_soft_cap is for TPUs alone, and
flash_attention=True is refused on a CPU. Layers are built for every call and given the weights by stateless_call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import keras
from keras import layers, ops

from veriformer.declarations import Capabilities, Expected

FRAMEWORK = keras.backend.backend()
Params = Mapping[str, Any]
_BIASES = ("bq", "bk", "bv", "bo")


def _dtype(x: Any) -> str:
    return str(keras.backend.standardize_dtype(x.dtype))


def _attention(name: str, flash: bool | None) -> Callable[..., Any]:
    def attention(
        q: Any, k: Any, v: Any, *, mask: Any = None, bias: Any = None, causal: bool = False, scale: float | None = None
    ) -> Any:
        """keras.ops.dot_product_attention.

        q[B,Tq,H,D], k[B,Tk,G,D], v[B,Tk,G,Dv] -> [B,Tq,H,Dv]
        softmax(q k^T scale + bias) v over the keys a row may see; query i sits at i (top left)
        Source: the Keras manual, keras.ops.dot_product_attention.
        Raises what the backend raises for a combination that it lacks.
        """
        return ops.dot_product_attention(
            q, k, v, bias=bias, mask=mask, scale=scale, is_causal=causal, flash_attention=flash
        )

    attention.__qualname__ = f"attention[{name}]"
    return attention


def _layer(params: Params, heads: int, groups: int, grouped: bool) -> Any:
    """The layer of these sizes, not yet built."""
    width, of_values = params["wq"].shape[1] // heads, params["wv"].shape[1] // groups
    own = {
        "use_bias": any(name in params for name in _BIASES),
        "kernel_initializer": "zeros",
        "dtype": _dtype(params["wq"]),
    }
    if grouped:
        if of_values != width:
            raise ValueError(f"wv: got heads of width {of_values}, wanted {width}, that of the keys")
        return layers.GroupQueryAttention(width, heads, groups, **own)
    if groups != heads:
        raise ValueError(f"wk: got {groups} key heads, wanted {heads}, as many as query heads")
    return layers.MultiHeadAttention(heads, width, value_dim=of_values, **own)


def _weights(params: Params, heads: int, groups: int, biases: bool) -> list[Any]:
    """Ours in Keras' order and shapes: [in,heads,width], [heads,width]; all biases or none."""
    found = []
    for name, count in zip("qkvo", (heads, groups, groups, heads), strict=True):
        kernel = params[f"w{name}"]
        out = name == "o"
        found.append(ops.reshape(kernel, (count, -1, kernel.shape[1]) if out else (kernel.shape[0], count, -1)))
        if biases:
            bias = params.get(f"b{name}")
            bias = ops.zeros_like(kernel[0]) if bias is None else bias
            found.append(bias if out else ops.reshape(bias, (count, -1)))
    return found


def _mha(name: str, *, grouped: bool = False, scores: bool = False, training: bool = False) -> Callable[..., Any]:
    def multi_head_attention(
        x: Any, memory: Any, params: Params, *, heads: int, mask: Any = None, causal: bool = False
    ) -> Any:
        """keras.layers.MultiHeadAttention or GroupQueryAttention.

        x[B,Tq,d], memory[B,Tk,d], params: wq, wk, wv, wo and perhaps biases -> [B,Tq,d]
        concat_h(softmax(q_h k_g^T D^-1/2) v_g) wo + bo, g = h // (H/G)
        Source: the Keras manual, keras.layers.MultiHeadAttention and GroupQueryAttention.
        Raises ValueError for head counts and widths that the layer lacks.
        """
        groups = params["wk"].shape[1] // (params["wq"].shape[1] // heads)
        layer = _layer(params, heads, groups, grouped)
        layer.build(tuple(x.shape), tuple(memory.shape))
        weights = _weights(params, heads, groups, bool(layer.use_bias))
        out, _ = layer.stateless_call(
            weights, [], x, memory, attention_mask=mask, use_causal_mask=causal,
            return_attention_scores=scores, training=training,
        )  # fmt: skip
        return out[0] if scores else out

    multi_head_attention.__qualname__ = f"multi_head_attention[{name}]"
    return multi_head_attention


VARIANTS: dict[str, dict[str, Callable[..., Any]]] = {
    "attention": {"attention": _attention("attention", None)},
    "attention_plain": {"attention": _attention("attention_plain", False)},
    "heads": {"multi_head_attention": _mha("heads")},
    "heads_scores": {"multi_head_attention": _mha("heads_scores", scores=True)},
    "heads_training": {"multi_head_attention": _mha("heads_training", training=True)},
    "grouped": {"multi_head_attention": _mha("grouped", grouped=True)},
    "grouped_scores": {"multi_head_attention": _mha("grouped_scores", grouped=True, scores=True)},
}
# keras.backend.result_type makes float32 of float64 but on TensorFlow: both compute in float32.
_EACH = Capabilities(
    compiles_per_shape=FRAMEWORK == "jax",
    value_width="equal" if FRAMEWORK == "jax" else "any",
    accumulate={"float64": "float32"},
    intermediate={"float64": "float32"},
)
_ATTENTION = replace(
    _EACH,
    layout="BTHD",
    causal_alignment="top_left",
    # on torch a large number is taken off, of which float16 has none that hides how the logits differ
    empty_row="undefined" if FRAMEWORK == "torch" else "mean",
    mask_with_bias=FRAMEWORK == "jax",
    causal_with_mask=FRAMEWORK == "jax",
    nonpositive_scale=True,
    infinite_bias=True,
)
_HEADS = replace(_EACH, causal_alignment="top_left", grouped_heads=False, empty_row="mean")
_SCORES = replace(_HEADS, empty_row="zeros")
_GROUPED = {"grouped_heads": True, "value_width": "equal"}
CAPABILITIES = {
    "attention": {"attention": _ATTENTION},
    "attention_plain": {"attention": _ATTENTION},
    "heads": {"multi_head_attention": _HEADS},
    "heads_scores": {"multi_head_attention": _SCORES},
    "heads_training": {"multi_head_attention": _HEADS},
    "grouped": {"multi_head_attention": replace(_HEADS, **_GROUPED)},
    "grouped_scores": {"multi_head_attention": replace(_SCORES, **_GROUPED)},
}
_FILLED_BEFORE_SCALING = "torch's CPU flash kernel fills the triangle with -inf before it multiplies by the scale"
_ONE_QUERY_TWO_KEYS = {"q": [[[[0.0]]]], "k": [[[[0.0], [0.0]]]], "v": [[[[0.0], [0.0]]]], "causal": True}
_OF_BOTH = [
    Expected(
        "attention/keeps-the-dtype",
        reason="float32 is made of float64, and returned",
        link="https://github.com/keras-team/keras/issues/23704",
        case={"q": [[[[0.0]]]], "k": [[[[0.0]]]], "v": [[[[0.0]]]]},
        when={"dtype": "float64"},
        variants=("attention", "attention_plain"),
    ),
]
_OF_TORCH = [
    Expected(
        f"attention/{law}",
        reason=_FILLED_BEFORE_SCALING,
        link="reports/findings/keras_torch_causal_scale.py",
        case=case,
        when={"device": "cpu"},
        where="causal",
        variants=("attention", "attention_plain"),
    )
    for law, case in (
        ("zero-scale-averages", _ONE_QUERY_TWO_KEYS),
        ("negative-scale-negates-the-query", {**_ONE_QUERY_TWO_KEYS, "scale": 1.0}),
    )
]
EXPECTED = [*_OF_BOTH, *(_OF_TORCH if FRAMEWORK == "torch" else ())]
