"""Wrong gradients behind right results (torch): of multi-head, packed and cached attention.

The forward result of every variant is that of "correct". Only autograd tells them apart: some inputs are cut
off, and the backward of attention's core is written out, with one switch for each mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from veriformer.declarations import Capabilities, Fault

FRAMEWORK = "torch"
Window = tuple[int | None, int | None]
_OWN = Capabilities(dtypes=("float64", "float32"))
CAPABILITIES = {"multi_head_attention": _OWN, "varlen_attention": _OWN, "cached_attention": _OWN}


class _Core(torch.autograd.Function):
    """softmax(q kᵀ scale) v over visible[B,H,Tq,Tk], as many key as query heads; the backward by hand."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, fault: str) -> Tensor:
        s = (q @ k.mT * scale).masked_fill(~visible, -torch.inf)
        empty = ~visible.any(-1, keepdim=True)
        p = torch.softmax(s.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0)
        ctx.save_for_backward(q, k, v, p, visible)
        ctx.scale, ctx.fault = scale, fault
        return p @ v

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        (q, k, v, p, visible), (g,), fault = ctx.saved_tensors, cotangents, ctx.fault
        if fault == "heads_mask_forgotten":
            p = torch.softmax(q @ k.mT * ctx.scale, -1)
        if fault == "heads_first_sample_probabilities":
            p = p[:1].expand_as(p)
        if fault == "heads_empty_row_from_lse":
            s = (q @ k.mT * ctx.scale).masked_fill(~visible, -torch.inf)
            p = torch.exp(s - torch.logsumexp(s, -1, keepdim=True))
        if fault == "heads_mixed" and g.shape[1] > 1:
            g = g.roll(1, 1)
        dp = g @ v.mT
        ds = p * dp if fault == "heads_row_sum_missing" else p * (dp - (p * dp).sum(-1, keepdim=True))
        scale = 1.0 if fault == "heads_scale_missing" else ctx.scale
        if fault == "varlen_leaks_backwards":
            ds = ds + 0.125 * dp.masked_fill(visible, 0.0)
        dv = p.mT @ g
        if fault == "heads_score_gradient_in_bfloat16":
            ds = ds.bfloat16().to(ds.dtype)
        return ds @ k * scale, ds.mT @ q * scale, dv, None, None, None


_DETACHED = {
    "heads_query_weights_detached": "wq",
    "heads_value_bias_detached": "bv",
    "heads_output_bias_detached": "bo",
}


def _make_heads(fault: str) -> Callable[..., Tensor]:
    def multi_head_attention(
        x: Tensor, memory: Tensor, params: Mapping[str, Tensor], *, heads: int, mask: Tensor | None = None,
        causal: bool = False,
    ) -> Tensor:  # fmt: skip
        w = dict(params)
        cut = {
            "heads_query_weights_detached": "wq",
            "heads_value_bias_detached": "bv",
            "heads_output_bias_detached": "bo",
        }
        if cut.get(fault) in w:
            w[cut[fault]] = w[cut[fault]].detach()
        width = w["wq"].shape[1] // heads
        groups = w["wk"].shape[1] // width
        q = _split(_linear(x, w, "q"), heads)
        from_keys = memory.detach() if fault == "heads_memory_through_values_only" else memory
        from_values = memory.detach() if fault == "heads_memory_through_keys_only" else memory
        k, v = _split(_linear(from_keys, w, "k"), groups), _split(_linear(from_values, w, "v"), groups)
        k, v = (_repeated(a, heads // groups, fault) for a in (k, v))
        shape = (*q.shape[:3], k.shape[2])
        triangle = torch.ones(shape[2:], dtype=torch.bool).tril(shape[3] - shape[2])
        visible = triangle if causal else torch.ones_like(triangle)
        visible = (visible if mask is None else visible & mask).expand(shape)
        out = _Core.apply(q, k, v, visible, width**-0.5, fault)
        if fault == "heads_weights_averaged_over_the_batch":
            w = {**w, "wo": _Scaled.apply(w["wo"], 1 / len(x))}
        return _linear(out.transpose(1, 2).flatten(2), w, "o", fault)

    multi_head_attention.__qualname__ = f"multi_head_attention[{fault}]"
    return multi_head_attention


class _Scaled(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        return cotangents[0] * ctx.factor, None


class _TransposedGradient(torch.autograd.Function):
    """The identity of a square matrix, whose gradient comes out transposed."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor) -> Tensor:
        return matrix.clone()

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        return (cotangents[0].mT.contiguous(),)


def _linear(rows: Tensor, w: Mapping[str, Tensor], name: str, fault: str = "") -> Tensor:
    matrix = w["w" + name]
    if fault == "heads_output_weights_transposed" and matrix.shape[0] == matrix.shape[1]:
        matrix = _TransposedGradient.apply(matrix)
    y = rows @ matrix
    return y + w["b" + name] if "b" + name in w else y


def _split(rows: Tensor, heads: int) -> Tensor:
    return rows.unflatten(-1, (heads, -1)).transpose(1, 2)


def _repeated(rows: Tensor, each: int, fault: str) -> Tensor:
    """[B,G,T,D] -> [B,H,T,D]."""
    if fault == "heads_last_of_group_alone" and each > 1:
        parts = [rows.detach()] * (each - 1) + [rows]
        return torch.stack(parts, 2).flatten(1, 2)
    return rows.repeat_interleave(each, dim=1)


def _make_varlen(fault: str) -> Callable[..., Tensor]:
    def varlen_attention(
        q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor, *, causal: bool = False,
        scale: float | None = None,
    ) -> Tensor:  # fmt: skip
        values = v.detach() if fault == "varlen_values_detached" else v
        rows, keys = torch.arange(len(q)), torch.arange(len(k))
        mine, theirs = (torch.bucketize(*pair, right=True) for pair in ((rows, q_offsets[1:]), (keys, k_offsets[1:])))
        position = rows + (k_offsets - q_offsets)[1:][mine]
        visible = mine[:, None] == theirs
        visible = visible & (keys <= position[:, None]) if causal else visible
        each = q.shape[1] // k.shape[1]
        packed = [q.transpose(0, 1)[None], *(_repeated(a.transpose(0, 1)[None], each, fault) for a in (k, values))]
        factor = q.shape[2] ** -0.5 if scale is None else scale
        return _Core.apply(*packed, visible.expand(1, q.shape[1], -1, -1), factor, fault)[0].transpose(0, 1)

    varlen_attention.__qualname__ = f"varlen_attention[{fault}]"
    return varlen_attention


def _make_cached(fault: str) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    def cached_attention(
        q: Tensor, k_new: Tensor, v_new: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, *,
        causal: bool = True, scale: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        (batch, heads, new, width), capacity = q.shape, k_cache.shape[2]
        if int(lengths.max()) + new > capacity:
            raise ValueError(f"lengths: got {int(lengths.max())} beside {new} new rows, wanted at most {capacity}")
        fresh = v_new.detach() if fault == "cached_values_detached" else v_new
        position = lengths[:, None] + torch.arange(new)
        row = torch.arange(batch)[:, None]
        keys, values = k_cache.clone(), v_cache.clone()
        keys[row, :, position], values[row, :, position] = k_new.transpose(1, 2), fresh.transpose(1, 2)
        seen = torch.arange(capacity) < (lengths + new)[:, None, None]
        visible = (
            seen & (torch.arange(capacity) <= position[..., None]) if causal else seen.expand(batch, new, capacity)
        )
        k, v = (a.repeat_interleave(heads // a.shape[1], dim=1) for a in (keys, values))
        factor = width**-0.5 if scale is None else scale
        out = _Core.apply(q, k, v, visible[:, None].expand(-1, heads, -1, -1), factor, fault)
        if fault == "cached_leaks_backwards":
            out = out + (v.sum(2, keepdim=True) - v.detach().sum(2, keepdim=True))
        return out, keys, values

    cached_attention.__qualname__ = f"cached_attention[{fault}]"
    return cached_attention


_MAKE = {
    "multi_head_attention": _make_heads,
    "varlen_attention": _make_varlen,
    "cached_attention": _make_cached,
}
# law that must accuse: {variant: (where it was seen, what is wrong)}; the law names the operation
_TABLE: dict[str, dict[str, tuple[str, str]]] = {
    "multi_head_attention/gradient-exists": {
        "heads_query_weights_detached": ("mutation: a frozen projection", "wq is cut off from the result"),
        "heads_value_bias_detached": ("mutation: a packed bias copied", "bv is cut off from the result"),
        "heads_output_bias_detached": ("mutation: a bias added in place of a copy", "bo is cut off from the result"),
    },
    "multi_head_attention/gradient-equals-the-reference": {
        "heads_scale_missing": ("mutation: scale applied forwards only", "query and key gradients without the scale"),
        "heads_memory_through_values_only": ("mutation: cached keys", "memory is a constant for the keys"),
        "heads_memory_through_keys_only": (
            "mutation: values cached without gradient",
            "memory is a constant for values",
        ),
        "heads_output_weights_transposed": ("mutation: gᵀ x for xᵀ g", "the gradient of a square wo is transposed"),
        "heads_score_gradient_in_bfloat16": ("mutation: a low-precision backward", "ds is rounded to bfloat16"),
    },
    "multi_head_attention/gradient-of-the-key-bias-vanishes": {
        "heads_row_sum_missing": ("mutation: ds = p dp", "the softmax's own normalisation has no gradient"),
    },
    "multi_head_attention/gradient-of-shared-heads-is-a-sum": {
        "heads_last_of_group_alone": ("levanter#449", "a shared key head gets the last query head's gradient"),
    },
    "multi_head_attention/gradient-of-weights-is-a-sum-over-the-batch": {
        "heads_weights_averaged_over_the_batch": ("mutation: mean for sum", "the gradient of wo is divided by B"),
        "heads_first_sample_probabilities": ("TransformerEngine#3216", "all samples use the first one's weights"),
    },
    "multi_head_attention/gradient-of-a-silent-head-is-zero": {
        "heads_mixed": ("native-sparse-attention-triton#27", "a head gets the gradient of its neighbour"),
    },
    "multi_head_attention/gradient-of-hidden-memory-is-zero": {
        "heads_mask_forgotten": ("mutation: backward without the mask", "gradient flows to hidden rows"),
    },
    "multi_head_attention/gradient-ignores-unused-empty-rows": {
        "heads_empty_row_from_lse": ("pytorch#41508", "exp(s - lse) with lse = -inf: NaN in all weights"),
    },
    "varlen_attention/gradient-stays-in-its-sequence": {
        "varlen_leaks_backwards": ("mutation: a backward without the limits", "gradient flows to other sequences"),
        "varlen_values_detached": ("mutation: a detached cache", "values are cut off from the result"),
    },
    "cached_attention/gradient-reaches-what-is-seen": {
        "cached_leaks_backwards": ("mutation: a backward over the capacity", "gradient flows to rows beyond"),
        "cached_values_detached": ("mutation: a detached append", "new values are cut off from the result"),
    },
}
FAULTS: dict[str, Fault] = {}
VARIANTS: dict[str, dict[str, Callable[..., Any]]] = {
    "correct": {operation: make("correct") for operation, make in _MAKE.items()}
}
for _law, _mistakes in _TABLE.items():
    _operation = _law.split("/")[0]
    for _variant, (_source, _summary) in _mistakes.items():
        FAULTS[_variant] = Fault(_operation, _law, _source, _summary)
        VARIANTS[_variant] = {_operation: _MAKE[_operation](_variant)}
