"""Wrong backwards of a right attention (torch): one autograd Function with one switch for each mistake.

The forward result of every variant is that of "correct"; only gradients tell them apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from veriformer.declarations import Capabilities, Fault

FRAMEWORK = "torch"
_CAPABLE = Capabilities(dtypes=("float64", "float32"))
CAPABILITIES = {"attention": _CAPABLE, "attention_with_lse": _CAPABLE}


@dataclass(frozen=True)
class _Call:
    """What is not differentiated by, and the mistake of the backward."""

    mask: Tensor | None
    causal: bool
    window: tuple[int | None, int | None] | None
    scale: float
    softcap: float | None
    fault: str
    kept: dict[str, Tensor] = field(default_factory=dict)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sink: Tensor | None, call: _Call
    ) -> tuple[Tensor, Tensor]:
        logits, _ = _logits(q, k, bias, call, "")
        p, _, _ = _weights(logits, sink)
        out = p @ _each_head(v, q)
        ctx.save_for_backward(q, k, v, bias, sink, out)
        ctx.call = call
        return out, torch.logsumexp(logits, -1)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        """ds = p (dp - D) + p' dlse, D = rowsum(do out); p' knows no sink."""
        (q, k, v, bias, sink, out), call = ctx.saved_tensors, ctx.call
        fault = call.fault
        do, dlse = _cotangent(cotangents[0], fault), cotangents[1][..., None]
        logits, slope = _logits(q, k, bias, call, fault)
        p, rest = _recomputed(logits, sink, fault)
        delta = _delta(do, out, fault)
        ds = p * (do @ _each_head(v, q).mT - delta) + _lse_part(logits, p, dlse, call)
        ds = _stored(ds, fault)
        dscore = ds * slope * (v.shape[-1] ** -0.5 if fault == "scale_of_value_width" else call.scale)
        dq = dscore @ _each_head(k, q) / (call.scale if fault == "scale_missing_in_query" else 1)
        dk = _grouped(dscore.mT @ q, k, fault) * (call.scale if fault == "scale_squared_in_key" else 1)
        do = do + dlse if fault == "lse_gradient_through_values" else do
        dv = _grouped(_value_weights(p, logits, fault).mT @ do, v, fault)
        dbias = None if bias is None else _unspread(ds, bias, call)
        dsink = None if sink is None else _sink(-(rest * delta), fault)
        if fault == "cotangent_overwritten":
            cotangents[0].copy_(out)
        return _cleared(dq, call), dk, dv, dbias, dsink, None


def _logits(q: Tensor, k: Tensor, bias: Tensor | None, call: _Call, fault: str) -> tuple[Tensor, Tensor]:
    """The logits[B,H,Tq,Tk], -inf where hidden, and the slope of the softcap."""
    s = q @ _each_head(k, q).mT * call.scale
    slope = torch.ones_like(s)
    if call.softcap is not None:
        t = torch.tanh(s / call.softcap)
        slope = 1 - torch.tanh(t).square() if fault == "softcap_slope_of_capped" else 1 - t * t
        slope = torch.ones_like(s) if fault == "softcap_slope_missing" else slope
        s = call.softcap * t
    s = s if bias is None else s + bias
    visible = _visible(q.shape[2], k.shape[2], call, fault)
    if call.mask is not None and fault != "mask_ignored":
        visible = visible & call.mask
    return torch.where(visible, s, -torch.inf), slope


def _visible(queries: int, keys: int, call: _Call, fault: str) -> Tensor:
    offset = 0 if fault == "causal_top_left" else keys - queries
    ahead = torch.arange(keys) - (torch.arange(queries)[:, None] + offset)
    left, right = call.window if call.window and fault != "window_ignored" else (None, None)
    visible = ahead <= 0 if call.causal else torch.ones_like(ahead, dtype=torch.bool)
    visible = visible if left is None else visible & (ahead >= -left)
    return visible if right is None else visible & (ahead <= right)


def _weights(logits: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The weights, the sink's share, and the logarithm of the normaliser."""
    extra = (
        torch.full_like(logits[..., :1], -torch.inf)
        if sink is None
        else sink[:, None, None].expand(logits[..., :1].shape)
    )
    m = torch.maximum(logits.amax(-1, keepdim=True), extra)
    m = torch.where(m == -torch.inf, 0, m)
    e, rest = torch.exp(logits - m), torch.exp(extra - m)
    total = e.sum(-1, keepdim=True) + rest
    total = torch.where(total == 0, 1, total)
    return e / total, rest / total, m + total.log()


def _recomputed(logits: Tensor, sink: Tensor | None, fault: str) -> tuple[Tensor, Tensor]:
    """The weights that the backward uses, and the sink's share."""
    p, rest, norm = _weights(logits, None if fault == "sink_ignored" else sink)
    if fault == "without_maximum":
        p = torch.exp(logits) / torch.exp(logits).sum(-1, keepdim=True)
    if fault == "rounded_normaliser":
        p = torch.exp(logits - norm.half().to(norm.dtype))
    if fault == "first_batch_normaliser":
        p = torch.exp(logits - norm[:1])
    if fault == "first_head_for_all":
        p = p[:, :1].expand_as(p)
    if fault == "empty_rows_uniform":
        p = torch.where((logits == -torch.inf).all(-1, keepdim=True), 1 / logits.shape[-1], p)
    return p, rest


def _cotangent(do: Tensor, fault: str) -> Tensor:
    if fault == "cotangent_viewed":
        return do.view(-1, do.shape[-1]).view(do.shape)
    if fault == "cotangent_read_as_contiguous":
        return do.as_strided(do.shape, torch.empty(do.shape).stride())
    if fault == "cotangent_clipped":
        return do.clamp(-2, 2)
    if fault in ("first_row_skipped", "last_of_odd_rows_skipped"):
        do, rows = do.clone(), do.shape[2]
        do[:, :, slice(0, 1) if fault == "first_row_skipped" else slice(max(rows // 2 * 2, 1), rows)] = 0
    return do[:, :, :1].expand_as(do) if fault == "cotangent_of_first_row" else do


def _delta(do: Tensor, out: Tensor, fault: str) -> Tensor:
    """D[B,H,Tq,1] = rowsum(do out)."""
    delta = (do * out).sum(-1, keepdim=True)
    if fault == "delta_omitted":
        return torch.zeros_like(delta)
    if fault == "delta_of_next_row":
        return delta.roll(1, 2)
    return delta[:, :1].expand_as(delta) if fault == "delta_of_first_head" else delta


def _lse_part(logits: Tensor, p: Tensor, dlse: Tensor, call: _Call) -> Tensor:
    if call.fault == "lse_gradient_dropped":
        return torch.zeros_like(p)
    weights = p if call.fault == "lse_gradient_beside_sink" else _weights(logits, None)[0]
    return weights * dlse / (call.scale if call.fault == "lse_gradient_unscaled" else 1)


def _stored(ds: Tensor, fault: str) -> Tensor:
    if fault == "score_gradient_in_bfloat16":
        return ds.bfloat16().to(ds.dtype)
    if fault == "tail_keys_skipped":
        ds = ds.clone()
        ds[..., max(ds.shape[-1] // 4 * 4, 1) :] = 0
    return ds


def _value_weights(p: Tensor, logits: Tensor, fault: str) -> Tensor:
    if fault == "value_weights_unnormalised":
        return torch.exp(logits - logits.amax(-1, keepdim=True).clamp_min(-1e30))
    if fault == "value_weights_transposed" and p.shape[2] == p.shape[3]:
        return p.mT
    return p


def _each_head(x: Tensor, q: Tensor) -> Tensor:
    """[B,G,Tk,D] -> [B,H,Tk,D]."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def _grouped(grad: Tensor, x: Tensor, fault: str) -> Tensor:
    """[B,H,Tk,D] -> [B,G,Tk,D], summed over the query heads of each group."""
    groups = x.shape[1]
    parts = grad.unflatten(1, (groups, -1))
    if fault == "group_keeps_last_head":
        return parts[:, :, -1]
    if fault == "group_averaged":
        return parts.mean(2)
    if fault == "group_head_by_remainder":
        return grad.unflatten(1, (-1, groups)).sum(1)
    return parts.sum(2)


def _unspread(ds: Tensor, bias: Tensor, call: _Call) -> Tensor:
    """The sum over the axes that the bias was spread along."""
    axes = [axis for axis, length in enumerate(bias.shape) if length == 1]
    ds = ds * call.scale if call.fault == "bias_gradient_scaled" else ds
    if call.fault == "bias_gradient_of_first":
        return ds[tuple(slice(0, length) for length in bias.shape)]
    if call.fault == "bias_gradient_averaged":
        return ds.mean(axes, keepdim=True) if axes else ds
    return ds.sum(axes, keepdim=True) if axes else ds


def _sink(shares: Tensor, fault: str) -> Tensor:
    """The gradient of sink[H] from its parts [B,H,Tq,1]."""
    if fault == "sink_gradient_negated":
        shares = -shares
    return (shares[:1] if fault == "sink_gradient_of_first_batch" else shares).sum((0, 2, 3))


def _cleared(dq: Tensor, call: _Call) -> Tensor:
    if call.fault == "workspace_not_cleared":
        before = call.kept.get("dq")
        dq = dq + before if before is not None and before.shape == dq.shape else dq
        call.kept["dq"] = dq.clone()
    return dq


def _make(fault: str, both: bool) -> Callable[..., Any]:
    kept: dict[str, Tensor] = {}

    def attention(
        q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, bias: Tensor | None = None,
        causal: bool = False, scale: float | None = None, window: tuple[int | None, int | None] | None = None,
        softcap: float | None = None, sink: Tensor | None = None,
    ) -> Any:  # fmt: skip
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        found = _Attention.apply(q, k, v, bias, sink, _Call(mask, causal, window, scale, softcap, fault, kept))
        return found if both else found[0]

    attention.__qualname__ = f"attention[{fault}]"
    return attention


# law that must accuse: {variant: (where it was seen, what is wrong)}; the law names the operation
_TABLE: dict[str, dict[str, tuple[str, str]]] = {
    "attention/key-gradients-sum-to-zero": {
        "delta_omitted": ("mutation: the softmax's Jacobian cut short", "ds = p dp, without D"),
        "tail_keys_skipped": ("mutation: a loop over whole blocks", "the last keys get no score gradient"),
    },
    "attention/rows-without-cotangent-pass-nothing-on": {
        "delta_of_next_row": ("mutation: an index off by one", "D of a neighbouring query"),
        "cotangent_of_first_row": ("Liger-Kernel#678", "every row uses the cotangent of the first"),
    },
    "attention/bias-gradient-rows-sum-to-zero": {
        "delta_of_first_head": ("mutation: a head stride forgotten", "D of head 0 for all heads"),
    },
    "attention/query-and-key-gradients-agree": {
        "scale_missing_in_query": ("mutation: the scale applied to one side", "dq lacks the scale"),
        "scale_squared_in_key": ("mutation: the scale applied twice", "dk has the scale squared"),
    },
    "attention/score-gradients-reach-query-and-key": {
        "scale_of_value_width": ("native-sparse-attention-triton#27", "the backward's scale is Dv^-1/2"),
        "softcap_slope_missing": ("mutation: a straight-through cap", "the slope 1 - tanh^2 is left out"),
        "softcap_slope_of_capped": ("mutation: tanh taken twice", "the slope at the capped score"),
        "bias_gradient_scaled": ("mutation: ds stored after the scale", "the bias gradient has the scale"),
    },
    "attention/grouped-heads-add-up": {
        "group_keeps_last_head": ("levanter#449", "dk and dv of the group's last query head alone"),
        "group_averaged": ("mutation: mean for sum", "dk and dv averaged over the group"),
        "group_head_by_remainder": ("native-sparse-attention-triton#27", "head h adds to key head h mod G"),
    },
    "attention/gradient-of-hidden-keys-is-zero": {
        "mask_ignored": ("mutation: two mask functions", "the backward's weights know no mask"),
        "causal_top_left": ("pytorch#108108, in the backward", "the backward's triangle begins at the top left"),
        "window_ignored": ("mutation: two mask functions", "the backward's weights know no window"),
    },
    "attention/value-gradients-sum-to-the-cotangents": {
        "value_weights_unnormalised": ("mutation: exp for softmax", "dv from weights that do not sum to 1"),
        "value_weights_transposed": ("mutation: right only beyond squares", "dv = p do where p^T do is due"),
        "first_row_skipped": ("mutation: a loop from 1", "query 0 passes nothing back"),
        "last_of_odd_rows_skipped": ("mutation: rows taken in pairs", "an odd last query passes nothing back"),
        "rounded_normaliser": ("mutation: lse saved in half precision", "weights are exp(s - rounded lse)"),
    },
    "attention/empty-rows-pass-nothing-on": {
        "empty_rows_uniform": ("mutation: a softmax of finfo.min alone", "an empty row spreads its cotangent"),
    },
    "attention/bias-gradient-sums-over-its-axes": {
        "bias_gradient_of_first": ("mutation: no reduction", "the gradient of the first of the rows that share it"),
        "bias_gradient_averaged": ("mutation: mean for sum", "the gradient averaged over the rows that share it"),
    },
    "attention/sink-and-bias-gradients-cancel": {
        "sink_ignored": ("mutation: sink in the forward alone", "the backward's weights know no sink"),
        "sink_gradient_of_first_batch": ("mutation: no sum over the batch", "the sink gradient of batch row 0"),
        "sink_gradient_negated": ("mutation: a sign", "+ p_sink D for - p_sink D"),
    },
    "attention/gradient-does-not-depend-on-the-layout": {
        "cotangent_viewed": ("quack#88", "an expanded cotangent is refused"),
        "cotangent_read_as_contiguous": ("flash-attention#355", "strides of the cotangent are ignored"),
    },
    "attention/gradient-is-linear-in-the-cotangent": {
        "cotangent_clipped": ("mutation: clipping left in a kernel", "the cotangent is cut to [-2, 2]"),
        "workspace_not_cleared": ("mutation: a kept buffer", "dq is added to that of the previous call"),
    },
    "attention/backward-leaves-inputs-untouched": {
        "cotangent_overwritten": ("Liger-Kernel#370", "the cotangent's memory is used for something else"),
    },
    "attention/gradient-is-finite": {
        "without_maximum": ("mutation: softmax recomputed plainly", "exp(s) overflows in the backward"),
    },
    "attention/batch-rows-have-their-own-gradients": {
        "first_batch_normaliser": ("TransformerEngine#3216", "row statistics of batch row 0 for all"),
    },
    "attention/gradient-equals-the-reference": {
        "first_head_for_all": ("mutation: a head stride forgotten", "weights of head 0 for all heads"),
        "score_gradient_in_bfloat16": ("mutation: a narrow buffer", "ds is rounded to bfloat16"),
    },
    "attention_with_lse/lse-gradient-by-the-bias-sums-to-its-cotangent": {
        "lse_gradient_dropped": ("mutation: lse taken for a constant", "no gradient through lse"),
        "lse_gradient_beside_sink": ("mutation: one set of weights", "the gradient of lse knows the sink"),
    },
    "attention_with_lse/gradient-through-both-results-equals-the-reference": {
        "lse_gradient_unscaled": ("mutation: lse of scaled scores", "the gradient through lse lacks the scale"),
    },
    "attention_with_lse/lse-has-no-value-gradient": {
        "lse_gradient_through_values": ("mutation: one buffer for both", "dv is that of do + dlse"),
    },
}  # fmt: skip
FAULTS: dict[str, Fault] = {}
_BOTH = {"attention": False, "attention_with_lse": True}
VARIANTS: dict[str, dict[str, Callable[..., Any]]] = {
    "correct": {operation: _make("correct", both) for operation, both in _BOTH.items()}
}
for _law, _mistakes in _TABLE.items():
    _operation = _law.split("/")[0]
    for _variant, (_source, _summary) in _mistakes.items():
        FAULTS[_variant] = Fault(_operation, _law, _source, _summary)
        VARIANTS[_variant] = {_operation: _make(_variant, _BOTH[_operation])}
