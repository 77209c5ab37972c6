"""torch's scaled_dot_product_attention: the default choice of kernel, and each CPU kernel alone.

torch takes one attn_mask, boolean or added, and not together with is_causal; its causal triangle
starts at the top left. What it lacks (window, softcap, sink) is left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from veriformer.declarations import Capabilities, Expected

FRAMEWORK = "torch"


def _attention(choose: Callable[[], AbstractContextManager[object]], name: str) -> Callable[..., Tensor]:
    def attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        causal: bool = False,
        scale: float | None = None,
    ) -> Tensor:
        """torch.nn.functional.scaled_dot_product_attention.

        q[B,H,Tq,D], k[B,G,Tk,D], v[B,G,Tk,Dv] -> [B,H,Tq,Dv]
        softmax(q k^T scale + bias) v over the keys a row may see; query i sits at i (top left)
        Source: the torch manual, torch.nn.functional.scaled_dot_product_attention.
        Raises ValueError if mask and bias are both given, RuntimeError for what the kernel refuses.
        """
        if mask is not None and bias is not None:
            raise ValueError("mask and bias: torch takes one attn_mask; pass one of them")
        with choose():
            return F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=bias if mask is None else mask,
                is_causal=causal,
                scale=scale,
                enable_gqa=k.shape[1] < q.shape[1],
            )

    attention.__qualname__ = f"attention[{name}]"
    return attention


VARIANTS = {
    "default": {"attention": _attention(nullcontext, "default")},
    "math": {"attention": _attention(lambda: sdpa_kernel(SDPBackend.MATH), "math")},
    "flash": {"attention": _attention(lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION), "flash")},
}
_TORCH = Capabilities(
    causal_alignment="top_left",
    causal_with_mask=False,
    mask_with_bias=False,
    nonpositive_scale=True,
    infinite_bias=True,
)
CAPABILITIES = {
    "default": {"attention": _TORCH},
    "math": {"attention": _TORCH},
    "flash": {
        "attention": dataclasses.replace(
            _TORCH, value_width="equal", strides="last_axis_contiguous", bias_gradient=False
        )
    },
}
_FILLED_BEFORE_SCALING = "the CPU flash kernel fills the causal triangle with -inf before it multiplies by the scale"
_ONE_QUERY_TWO_KEYS = {"q": [[[[0.0]]]], "k": [[[[0.0], [0.0]]]], "v": [[[[0.0], [0.0]]]], "causal": True}
EXPECTED = [
    Expected(
        "attention/zero-scale-averages",
        reason=_FILLED_BEFORE_SCALING,
        link="reports/findings/torch_flash_nonpositive_scale.py",
        case=_ONE_QUERY_TWO_KEYS,
        when={"device": "cpu"},
        where="causal",
        variants=("default", "flash"),
    ),
    Expected(
        "attention/negative-scale-negates-the-query",
        reason=_FILLED_BEFORE_SCALING,
        link="reports/findings/torch_flash_nonpositive_scale.py",
        case={**_ONE_QUERY_TWO_KEYS, "scale": 1.0},
        when={"device": "cpu"},
        where="causal",
        variants=("default", "flash"),
    ),
]
