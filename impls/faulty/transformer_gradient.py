"""Wrong gradients of the encoder-decoder behind right logits (torch).

The logits of every variant are those of "correct". Only autograd tells them apart: something is cut off from the
result, or a term that is 0 lets a gradient through.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from veriformer.declarations import Capabilities, Fault

FRAMEWORK = "torch"
Params = Mapping[str, Any]


class _Weighted(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(factor)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        return cotangents[0] * ctx.saved_tensors[0], None


def _make(fault: str) -> Callable[..., Tensor]:
    def transformer(
        source: Tensor, target: Tensor, params: Params, *, heads: int, norm: str = "post", mask: Tensor | None = None
    ) -> Tensor:
        seen = None if mask is None else mask[:, None, None, :]
        memory = x = _embedded(source, params, "source_embedding", fault)
        for layer in params["encoder"]["layers"]:
            memory = _layer(memory, layer, heads, norm, seen)
        memory = _final(memory, params["encoder"])
        memory = memory.detach() if fault == "memory_detached" else memory
        if fault == "padding_trained" and mask is not None:
            memory = memory + _nothing(x * ~mask[..., None]).sum(1, keepdim=True)
        y = _embedded(target, params, "target_embedding", fault)
        if fault == "later_tokens_trained":
            y = y + _nothing(y).sum(1, keepdim=True)
        triangle = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).tril()
        for i, layer in enumerate(params["decoder"]["layers"]):
            kept = memory.detach() if fault == "memory_detached_in_later_layers" and i else memory
            y = _layer(y, layer, heads, norm, triangle, kept, seen)
        return _logits(_final(y, params["decoder"]), params, fault)

    transformer.__qualname__ = f"transformer[{fault}]"
    return transformer


def _nothing(x: Tensor) -> Tensor:
    """0, through which a gradient comes back all the same."""
    return x - x.detach()


def _embedded(ids: Tensor, w: Params, name: str, fault: str) -> Tensor:
    table = w[name]
    if fault == "tied_embedding_detached" and name == "target_embedding" and "head" not in w:
        table = table.detach()
    x = table[ids]
    if fault == "zero_row_frozen":
        x = torch.where((ids == 0)[..., None], x.detach(), x)
    if fault == "averaged_over_the_batch":
        x = _Weighted.apply(x, torch.tensor(1 / len(ids), dtype=x.dtype))
    if fault == "last_repeat_wins":
        flat = ids.reshape(-1)
        last = ~(flat[:, None] == flat).triu(1).any(1)
        x = _Weighted.apply(x, last.reshape(*ids.shape, 1).to(x.dtype))
    if "embedding_scale" in w:
        scale = w["embedding_scale"]
        x = _Weighted.apply(x, 1 / scale) * scale if fault == "scale_missing" else x * scale
    channel = torch.arange(x.shape[2])
    angle = torch.arange(x.shape[1])[:, None] * 10000.0 ** (-(channel - channel % 2).double() / x.shape[2])
    return x + torch.where(channel % 2 == 0, angle.sin(), angle.cos()).to(x.dtype)


def _layer(
    x: Tensor, w: Params, heads: int, norm: str, seen: Tensor | None, memory: Tensor | None = None,
    memory_seen: Tensor | None = None,
) -> Tensor:  # fmt: skip
    x = _beside(x, w["norm1"], norm, lambda z: _attention(z, z, w["attention"], heads, seen))
    if memory is not None:
        x = _beside(x, w["norm2"], norm, lambda z: _attention(z, memory, w["cross_attention"], heads, memory_seen))
    f, last = w["feed_forward"], w["norm2"] if memory is None else w["norm3"]
    return _beside(x, last, norm, lambda z: _linear(torch.relu(_linear(z, f["w1"], f.get("b1"))), f["w2"], f.get("b2")))


def _beside(x: Tensor, norm: Params, kind: str, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
    return x + sublayer(_normed(x, norm)) if kind == "pre" else _normed(x + sublayer(x), norm)


def _linear(x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    return x @ matrix if bias is None else x @ matrix + bias


def _attention(x: Tensor, memory: Tensor, w: Params, heads: int, seen: Tensor | None) -> Tensor:
    q = _linear(x, w["wq"], w.get("bq")).unflatten(-1, (heads, -1)).transpose(1, 2)
    groups = w["wk"].shape[1] // q.shape[-1]
    k, v = (_linear(memory, w["w" + n], w.get("b" + n)).unflatten(-1, (groups, -1)).transpose(1, 2) for n in "kv")
    k, v = (a.repeat_interleave(heads // groups, dim=1) for a in (k, v))
    s = q @ k.mT * q.shape[-1] ** -0.5
    s = s if seen is None else s.masked_fill(~seen, -torch.inf)
    return _linear((torch.softmax(s, -1) @ v).transpose(1, 2).flatten(2), w["wo"], w.get("bo"))


def _normed(x: Tensor, w: Params) -> Tensor:
    if "bias" in w:
        return F.layer_norm(x, x.shape[-1:], w["weight"], w["bias"], 1e-5)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * w["weight"]


def _final(x: Tensor, w: Params) -> Tensor:
    return _normed(x, w["norm"]) if "norm" in w else x


def _logits(y: Tensor, w: Params, fault: str) -> Tensor:
    table = w["target_embedding"]
    if "head" not in w:
        return y @ (table.detach() if fault == "tied_head_detached" else table).T
    head = w["head"]["w"]
    if fault == "head_trains_the_table":
        head = head + _nothing(table).T
    return _linear(y, head, w["head"].get("b"))


# law that must accuse: {variant: (where it was seen, what is wrong)}
_TABLE: dict[str, dict[str, tuple[str, str]]] = {
    "gradient-exists": {
        "memory_detached": ("mutation: a frozen encoder", "nothing reaches the encoder"),
    },
    "gradient-of-a-tied-table-is-that-of-both-its-uses": {
        "tied_head_detached": ("mutation: the head copied from the table", "a tied table is trained as a table alone"),
        "tied_embedding_detached": ("mutation: the table copied from the head", "it is trained as a head alone"),
    },
    "gradient-of-tables-gathers-by-token": {
        "zero_row_frozen": ("transformers#10200", "token 0 is taken for padding: its row has no gradient"),
        "last_repeat_wins": ("mutation: assigned, not added", "only the last of equal tokens counts"),
        "scale_missing": ("mutation: scaled forwards only", "the gradient of the tables lacks the scale"),
        "averaged_over_the_batch": ("mutation: mean for sum", "the gradient of the tables is divided by B"),
        "memory_detached_in_later_layers": ("mutation: keys cached without gradient", "one layer alone trains memory"),
    },
    "gradient-reaches-rows-that-count-alone": {
        "padding_trained": ("mutation: backward without the mask", "rows of padding are trained"),
        "head_trains_the_table": ("transformers#43681", "an untied table is trained as if it were tied"),
        "later_tokens_trained": ("mutation: backward without the triangle", "rows of later tokens are trained"),
    },
}
FAULTS = {
    variant: Fault("transformer", f"transformer/{law}", source, summary)
    for law, variants in _TABLE.items()
    for variant, (source, summary) in variants.items()
}
VARIANTS: dict[str, dict[str, Callable[..., Any]]] = {
    variant: {"transformer": _make(variant)} for variant in ("correct", *FAULTS)
}
CAPABILITIES = {"transformer": Capabilities(dtypes=("float64", "float32"))}
