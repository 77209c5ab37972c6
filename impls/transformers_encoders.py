"""Parts of models of Hugging Face transformers: BERT's layer, attention functions, norms, rotary, gelu.

Attention takes one attention_mask. Eager attention adds it: what must not be attended to gets the smallest number of
the dtype, not -inf, and nothing is said of rows without keys: they give the mean, in float16 roughly, and in float64
NaN, where the softmax in float32 makes -inf of that number. Triangle and window are in the mask as well; only sdpa has
a flag is_causal, of which a single query takes no notice. softcap is Gemma 2's, sink GPT-OSS's. Softmax, norms and
angles are in float32, whatever the dtype. BERT's encoder has no norm at its end, hence its layer alone is here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BertConfig, LlamaConfig, activations
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.bert.modeling_bert import BertLayer
from transformers.models.gemma2 import modeling_gemma2 as gemma2
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss
from transformers.models.llama import modeling_llama as llama
from transformers.models.t5.modeling_t5 import T5LayerNorm

from veriformer.declarations import Capabilities, Expected

FRAMEWORK = "torch"
DISTRIBUTIONS = ("transformers",)
Params = Mapping[str, Any]
_LINEAR = {
    "attention.self.query": ("attention", "wq", "bq"),
    "attention.self.key": ("attention", "wk", "bk"),
    "attention.self.value": ("attention", "wv", "bv"),
    "attention.output.dense": ("attention", "wo", "bo"),
    "intermediate.dense": ("feed_forward", "w1", "b1"),
    "output.dense": ("feed_forward", "w2", "b2"),
}
_NORMS = {"attention.output.LayerNorm": "norm1", "output.LayerNorm": "norm2"}


def _added(mask: Tensor | None, like: Tensor) -> Tensor | None:
    """The mask as eager attention wants it: 0, or the smallest number where one may not attend."""
    if mask is None:
        return None
    return torch.zeros(mask.shape, dtype=like.dtype).masked_fill(~mask, torch.finfo(like.dtype).min)


def _layer_weights(params: Params) -> dict[str, Tensor]:
    """Ours by BERT's names: matrices [out, in]; a bias that is not given is 0, for BERT always has one."""
    found = {}
    for name, (part, weight, bias) in _LINEAR.items():
        matrix = params[part][weight]
        given = params[part].get(bias)
        found[f"{name}.weight"] = matrix.T
        found[f"{name}.bias"] = torch.zeros_like(matrix[0]) if given is None else given
    for name, norm in _NORMS.items():
        found |= {f"{name}.{part}": params[norm][part] for part in ("weight", "bias")}
    return found


def _config(x: Tensor, params: Params, heads: int, attention: str) -> BertConfig:
    """A config of these sizes. Raises ValueError for heads that do not make up the width."""
    columns = params["attention"]["wq"].shape[1]
    if columns != x.shape[-1]:
        raise ValueError(f"wq: got {columns} columns, wanted {x.shape[-1]}, as BERT has")
    config = BertConfig(
        hidden_size=x.shape[-1],
        num_attention_heads=heads,
        intermediate_size=params["feed_forward"]["w1"].shape[1],
        hidden_act="relu",
        layer_norm_eps=1e-5,
    )
    config._attn_implementation = attention
    return config


def _encoder_layer(attention: str) -> Callable[..., Tensor]:
    def encoder_layer(x: Tensor, params: Params, *, heads: int, mask: Tensor | None = None) -> Tensor:
        """BertLayer: post-norm.

        x[B,T,d], params: attention, norm1, feed_forward, norm2 -> [B,T,d]
        norm2(y + F(y)) with y = norm1(x + A(x)), F with relu, which a config chooses
        Source: the manual of transformers, BERT; Devlin et al. 2019. Raises ValueError where H D is not d.
        """
        with torch.device("meta"):
            module = BertLayer(_config(x, params, heads, attention)).eval()
        masks = {"attention_mask": mask if attention == "sdpa" else _added(mask, x)}
        return torch.func.functional_call(module, _layer_weights(params), (x,), masks)

    return encoder_layer


def _module(q: Tensor, k: Tensor, **more: Any) -> nn.Module:
    """What the attention functions ask of the layer that calls them."""
    module = nn.Module().eval()
    words = {"num_key_value_groups": q.shape[1] // k.shape[1], "head_dim": q.shape[-1], "is_causal": False, **more}
    for name, value in words.items():
        setattr(module, name, value)
    return module


def _scaling(q: Tensor, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


def attention_eager(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, bias: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:  # fmt: skip
    """eager_attention_forward of Llama, as most models have it.

    q[B,H,Tq,D], k[B,G,Tk,D], v[B,G,Tk,Dv] -> [B,H,Tq,Dv]
    softmax(q k^T scale + attention_mask) v, softmax in float32
    Source: the manual of transformers, Attention interface.
    """
    given = bias if mask is None else _added(mask, q)
    return llama.eager_attention_forward(_module(q, k), q, k, v, given, _scaling(q, scale))[0].transpose(1, 2)


def attention_softcap(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, bias: Tensor | None = None,
    scale: float | None = None, softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """eager_attention_forward of Gemma 2: the scores go through softcap tanh(. / softcap) before the mask is added.

    q[B,H,Tq,D], k[B,G,Tk,D], v[B,G,Tk,Dv] -> [B,H,Tq,Dv]
    Source: the manual of transformers, Gemma 2.
    """
    given = bias if mask is None else _added(mask, q)
    module = _module(q, k)
    return gemma2.eager_attention_forward(module, q, k, v, given, 0.0, scale, softcap)[0].transpose(1, 2)


def attention_sink(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, bias: Tensor | None = None,
    scale: float | None = None, sink: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """eager_attention_forward of GPT-OSS: a logit for each head takes its part of the softmax and gives nothing.

    q[B,H,Tq,D], k[B,G,Tk,D], v[B,G,Tk,Dv], sink[H] -> [B,H,Tq,Dv]
    Source: the manual of transformers, GPT-OSS. Without a sink, -inf stands for it.
    """
    given = bias if mask is None else _added(mask, q)
    sinks = torch.full((q.shape[1],), -torch.inf, dtype=q.dtype) if sink is None else sink
    module = _module(q, k, sinks=sinks)
    return gpt_oss.eager_attention_forward(module, q, k, v, given, _scaling(q, scale))[0].transpose(1, 2)


def attention_sdpa(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, bias: Tensor | None = None,
    causal: bool = False, scale: float | None = None,
) -> Tensor:  # fmt: skip
    """sdpa_attention_forward.

    q[B,H,Tq,D], k[B,G,Tk,D], v[B,G,Tk,Dv] -> [B,H,Tq,Dv]
    Source: the manual of transformers, Attention interface. With a mask or a single query it is never causal.
    """
    given = bias if mask is None else mask
    module = _module(q, k)
    return sdpa_attention_forward(module, q, k, v, given, scaling=scale, is_causal=causal)[0].transpose(1, 2)


def _rms_norm(kind: Callable[..., nn.Module]) -> Callable[..., Tensor]:
    def rms_norm(x: Tensor, weight: Tensor, *, eps: float = 1e-6) -> Tensor:
        """x over the root of its mean square.

        x[...,d], weight[d] -> [...,d]
        x / sqrt(mean(x^2) + eps) times weight (Gemma: 1 + weight), in float32
        Source: the manual of transformers, Llama, T5, Gemma 2; Zhang and Sennrich 2019.
        """
        module = kind(x.shape[-1], eps=eps)
        return torch.func.functional_call(module, {"weight": weight}, (x,))

    return rms_norm


def rotary_embedding(x: Tensor, positions: Tensor, *, base: float = 10000.0) -> Tensor:
    """LlamaRotaryEmbedding and apply_rotary_pos_emb.

    x[...,T,D], positions[T] -> [...,T,D]
    the pair (x_j, x_{j+D/2}) turned by positions base^(-2j/D), angles in float32
    Source: the manual of transformers, Utilities for rotary embedding; Su et al. 2021.
    """
    config = LlamaConfig(head_dim=x.shape[-1], rope_parameters={"rope_type": "default", "rope_theta": base})
    cos, sin = llama.LlamaRotaryEmbedding(config)(x, positions[None])
    flat = x.reshape(1, -1, *x.shape[-2:])
    return llama.apply_rotary_pos_emb(flat, flat, cos, sin)[0].reshape(x.shape)


def _gelu(name: str) -> Callable[[Tensor], Tensor]:
    def gelu(x: Tensor) -> Tensor:
        """ACT2FN of transformers under the name of the variant.

        x[...] -> [...]; x Phi(x), or its approximation with tanh
        Source: the manual of transformers, Custom activations; Hendrycks and Gimpel 2016.
        """
        return activations.ACT2FN[name](x)

    gelu.__qualname__ = f"gelu[{name}]"
    return gelu


VARIANTS: dict[str, dict[str, Any]] = {
    "parts_eager": {
        "attention": attention_eager,
        "encoder_layer": _encoder_layer("eager"),
        "rms_norm": _rms_norm(llama.LlamaRMSNorm),
        "rotary_embedding": rotary_embedding,
        "gelu": _gelu("gelu"),
    },
    "parts_sdpa": {
        "attention": attention_sdpa,
        "encoder_layer": _encoder_layer("sdpa"),
        "rms_norm": _rms_norm(T5LayerNorm),
        "gelu": _gelu("gelu_python"),
    },
    "parts_gemma2": {
        "attention": attention_softcap,
        "rms_norm": _rms_norm(gemma2.Gemma2RMSNorm),
        "gelu": _gelu("gelu_pytorch_tanh"),
    },
    "parts_gpt_oss": {
        "attention": attention_sink,
        "rms_norm": _rms_norm(gpt_oss.GptOssRMSNorm),
        "gelu": _gelu("gelu_new"),
    },
    "parts_fast": {"gelu": _gelu("gelu_fast")},
}
_SINGLE: dict[str, Any] = {"accumulate": {"float64": "float32"}, "intermediate": {"float64": "float32"}}
_BERT = Capabilities(grouped_heads=False, value_width="equal", rms_norms=False, pre_norm=False)
_EAGER = Capabilities(empty_row="undefined", mask_with_bias=False, **_SINGLE)
_SDPA = Capabilities(mask_with_bias=False, causal_with_mask=False, causal_alignment="square")
_NORM = Capabilities(**_SINGLE)
# written out in the dtype of x, 1 + erf and 1 + tanh included; "gelu_fast" has ten digits of sqrt(2 / pi)
_STORED = Capabilities(accumulate="storage")
_TANH = replace(_STORED, gelu="tanh")
_FAST = replace(_TANH, accumulate={"float64": "float32", "bfloat16": "bfloat16", "float16": "float16"})
CAPABILITIES = {
    "parts_eager": {
        "attention": _EAGER,
        "encoder_layer": replace(_BERT, empty_row="undefined"),
        "rms_norm": _NORM,
        "rotary_embedding": Capabilities(**_SINGLE),
    },
    "parts_sdpa": {"attention": _SDPA, "encoder_layer": _BERT, "rms_norm": _NORM, "gelu": _STORED},
    "parts_gemma2": {
        "attention": _EAGER,
        "rms_norm": replace(_NORM, rms_weight="one_plus"),
        "gelu": Capabilities(gelu="tanh"),
    },
    "parts_gpt_oss": {
        "attention": replace(_EAGER, accumulate="float32", intermediate="storage"),
        "rms_norm": _NORM,
        "gelu": _TANH,
    },
    "parts_fast": {"gelu": _FAST},
}
EXPECTED = [
    Expected(
        "gelu/gradient-is-finite",
        reason="the cube of x overflows in float16, and its gradient is infinity times the 0 that tanh has there",
        link="reports/findings/transformers_gelu_new_float16_gradient.py",
        case={"x": [240.0]},
        when={"dtype": "float16"},
        variants=("parts_gpt_oss",),
        kind="not finite",
    ),
]
