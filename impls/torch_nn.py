"""torch.nn.MultiheadAttention along each of its paths, made of the given weights for every call.

It has one width, hence H D = H Dv = d, and as many key heads as query heads. True in its masks hides,
and it has no triangle of its own: is_causal is a hint beside a mask. A mask of keys alone goes in as
key_padding_mask. The fast path is taken in eval mode without gradients, for an even number of heads, where x
and memory are one tensor; asking for weights takes a path without scaled_dot_product_attention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from veriformer.declarations import Capabilities, Expected

FRAMEWORK = "torch"
_BIASES = ("bq", "bk", "bv", "bo")


def _make(name: str, *, fast: bool = False, weights: bool = False, training: bool = False) -> Callable[..., Tensor]:
    def multi_head_attention(
        x: Tensor, memory: Tensor, params: Mapping[str, Tensor], *, heads: int, mask: Tensor | None = None,
        causal: bool = False,
    ) -> Tensor:  # fmt: skip
        """torch.nn.MultiheadAttention.

        x[B,Tq,d], memory[B,Tk,d], params: wq, wk, wv, wo[d,d] and perhaps biases[d] -> [B,Tq,d]
        concat_h(softmax(q_h k_h^T D^-1/2) v_h) wo + bo
        Source: the torch manual, torch.nn.MultiheadAttention. A row that may see nothing gives bo or NaN, by path.
        Raises ValueError where the projections are not [d,d].
        """
        module = _module(x, params, heads).train(training)
        if fast and x.shape == memory.shape and torch.equal(x, memory):
            memory = x
        masks = _masks(mask, causal, (x.shape[0], heads, x.shape[1], memory.shape[1]), x.device)
        arguments = (x, memory, memory)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not fast):
            out: Tensor = torch.func.functional_call(
                module, _weights(params), arguments, {**masks, "need_weights": weights}
            )[0]
        return out

    multi_head_attention.__qualname__ = f"multi_head_attention[{name}]"
    return multi_head_attention


def _module(x: Tensor, params: Mapping[str, Tensor], heads: int) -> nn.MultiheadAttention:
    """A module whose weights are still to be put in place of its own, which take no memory."""
    width = x.shape[-1]
    for name in ("wq", "wk", "wv", "wo"):
        if params[name].shape != (width, width):
            raise ValueError(f"{name}: got shape {list(params[name].shape)}, wanted [{width}, {width}]")
    bias = any(name in params for name in _BIASES)
    return nn.MultiheadAttention(width, heads, bias=bias, batch_first=True, device="meta", dtype=x.dtype)


def _weights(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Ours by torch's names: [out, in], the three projections of the inputs as one, and all biases or none."""
    inner = torch.cat([params["wq"].T, params["wk"].T, params["wv"].T])
    found = {"in_proj_weight": inner, "out_proj.weight": params["wo"].T}
    if any(name in params for name in _BIASES):
        q, k, v, out = (params.get(name, torch.zeros_like(params["wq"][0])) for name in _BIASES)
        found |= {"in_proj_bias": torch.cat([q, k, v]), "out_proj.bias": out}
    return found


def _masks(
    mask: Tensor | None, causal: bool, shape: tuple[int, int, int, int], device: torch.device
) -> dict[str, Tensor]:
    """True = hidden: [B,Tk] for keys alone, [Tq,Tk] for the triangle alone, else [B*H,Tq,Tk]."""
    batch, _, queries, keys = shape
    triangle = torch.ones(queries, keys, dtype=torch.bool, device=device).triu(keys - queries + 1)
    if mask is None:
        return {"attn_mask": triangle} if causal else {}
    if mask.shape[1] == mask.shape[2] == 1:
        padding = {"key_padding_mask": ~mask[:, 0, 0].expand(batch, keys)}
        return {**padding, "attn_mask": triangle} if causal else padding
    hidden = ~mask | triangle if causal else ~mask
    return {"attn_mask": hidden.expand(shape).flatten(0, 1)}


VARIANTS = {
    "train": {"multi_head_attention": _make("train", training=True)},
    "weights": {"multi_head_attention": _make("weights", weights=True)},
    "fast": {"multi_head_attention": _make("fast", fast=True)},
    "fast_weights": {"multi_head_attention": _make("fast_weights", fast=True, weights=True)},
}
_NN = Capabilities(grouped_heads=False, value_width="equal")
_NAN = replace(_NN, empty_row="nan")
CAPABILITIES = {
    "train": {"multi_head_attention": _NN},
    "weights": {"multi_head_attention": _NAN},
    "fast": {"multi_head_attention": replace(_NN, gradients=False)},
    "fast_weights": {"multi_head_attention": replace(_NAN, gradients=False)},
}
_ONE_ROW = {
    "x": [[[1.0, 1.0]]], "memory": [[[1.0, 1.0]]], "heads": 2,
    **{f"params.{name}": [[1.0, 0.0], [0.0, 1.0]] for name in ("wq", "wk", "wv", "wo")},
}  # fmt: skip
_NOTHING_SEEN = {**_ONE_ROW, "mask": [[[[False]]]]}
EXPECTED = [
    Expected(
        "multi_head_attention/empty-row-is-as-declared",
        reason="the fast path gives NaN for a row that sees nothing, where the path with gradients gives bo",
        link="https://github.com/pytorch/pytorch/pull/190486",
        case={**_NOTHING_SEEN, "params.bo": [0.0, 0.0]},
        where="Tq == Tk",
        variants=("fast",),
        kind="not finite",
    ),
    Expected(
        "multi_head_attention/gradient-ignores-unused-empty-rows",
        reason="asked for weights, a row that sees nothing makes the gradient of every projection NaN",
        link="https://github.com/pytorch/pytorch/issues/41508",
        case=_NOTHING_SEEN,
        variants=("weights",),
        kind="not finite",
    ),
]
