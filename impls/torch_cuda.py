"""torch's scaled_dot_product_attention on CUDA, each backend alone: math, flash, efficient, cuDNN.

A backend that a call does not fit is never replaced by another: torch says "No available kernel", which counts as
refused. softmax, layer norm and the rest of torch are the files of the CPU, with --device cuda.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from veriformer.declarations import Capabilities

FRAMEWORK = "torch"


def _on(q: Tensor) -> None:
    if not q.is_cuda:
        raise ValueError(f"device: got {q.device.type}, wanted cuda: these are torch's kernels for a GPU")


def _with_mask(backend: SDPBackend, name: str) -> Callable[..., Tensor]:
    def attention(
        q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, bias: Tensor | None = None,
        causal: bool = False, scale: float | None = None,
    ) -> Tensor:  # fmt: skip
        """torch.nn.functional.scaled_dot_product_attention by one backend of CUDA.

        q[B,H,Tq,D], k[B,G,Tk,D], v[B,G,Tk,Dv] -> [B,H,Tq,Dv]
        softmax(q k^T scale + bias) v over the keys a row may see; query i sits at i (top left)
        Source: the torch manual, torch.nn.functional.scaled_dot_product_attention and torch.nn.attention.SDPBackend.
        Raises ValueError off CUDA and if mask and bias are both given, RuntimeError for what the backend refuses.
        """
        _on(q)
        if mask is not None and bias is not None:
            raise ValueError("mask and bias: torch takes one attn_mask; pass one of them")
        grouped = k.shape[1] < q.shape[1]
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=bias if mask is None else mask, is_causal=causal, scale=scale, enable_gqa=grouped
            )

    attention.__qualname__ = f"attention[{name}]"
    return attention


def _flash(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention by its flash backend, which has no attn_mask.

    q[B,H,Tq,D], k[B,G,Tk,D], v[B,G,Tk,D] -> [B,H,Tq,D]
    softmax(q k^T scale) v over the keys a row may see; query i sits at i (top left)
    Source: Dao 2023 (FlashAttention-2), by the torch manual, torch.nn.attention.SDPBackend.
    Raises ValueError off CUDA, RuntimeError for what the backend refuses.
    """
    _on(q)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=scale, enable_gqa=k.shape[1] < q.shape[1]
        )


VARIANTS = {
    "math": {"attention": _with_mask(SDPBackend.MATH, "math")},
    "flash": {"attention": _flash},
    "efficient": {"attention": _with_mask(SDPBackend.EFFICIENT_ATTENTION, "efficient")},
    "cudnn": {"attention": _with_mask(SDPBackend.CUDNN_ATTENTION, "cudnn")},
}
_ANY = Capabilities(
    devices=("cuda",),
    causal_alignment="top_left",
    causal_with_mask=False,
    mask_with_bias=False,
    nonpositive_scale=True,
    infinite_bias=True,
)
# What the fused backends refuse, as aten/src/ATen/native/transformers/cuda/sdp_utils.cpp has it: a last axis that is
# not contiguous; flash also float32, a value width of its own, the causal triangle where Tq is not Tk; efficient widths
# that are no multiple of 16 bytes; cuDNN float32, a single key, widths that are no multiple of 8 or above 128 (on some
# GPUs 256). Grouped heads are for flash and math alone, as the manual says.
_FUSED = dataclasses.replace(_ANY, strides="last_axis_contiguous", nonpositive_scale=False, infinite_bias=False)
_WIDTHS = (8, 16, 32, 64, 128)
CAPABILITIES = {
    "math": {"attention": _ANY},
    "flash": {
        "attention": dataclasses.replace(
            _FUSED, dtypes=("bfloat16", "float16"), value_width="equal", causal_alignment="square"
        )
    },
    "efficient": {
        "attention": dataclasses.replace(
            _FUSED,
            dtypes=("float32", "bfloat16", "float16"),
            widths=_WIDTHS,
            value_width="equal",
            grouped_heads=False,
        )
    },
    "cudnn": {
        "attention": dataclasses.replace(
            _FUSED, dtypes=("bfloat16", "float16"), widths=_WIDTHS, value_width="equal", grouped_heads=False
        )
    },
}
