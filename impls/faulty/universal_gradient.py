"""Wrong gradients of Universal Transformers behind right results (torch).

The results of every variant are those of "correct". Only autograd tells them apart: something is cut off from the
result, counts with another sign or more than once, or lets a gradient through where nothing is seen.
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
Results = tuple[Tensor, Tensor, Tensor]
_DETACHED = {
    "halting_unit_detached": "halt.w",
    "queries_detached": "layer.attention.wq",
    "inner_bias_detached": "layer.feed_forward.b1",
    "norm_weight_detached": "layer.norm1.weight",
}
"""Variants that cut one weight off from the result."""


class _Weighted(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        return cotangents[0] * ctx.factor, None


def _make(fault: str) -> Callable[..., Results]:
    def universal_transformer(
        x: Tensor, params: Params, *, heads: int, norm: str = "post", mask: Tensor | None = None,
        causal: bool = False, memory: Tensor | None = None, memory_mask: Tensor | None = None, max_steps: int,
        epsilon: float = 0.01,
    ) -> Results:  # fmt: skip
        w = _cut(params, fault)
        real = torch.ones(x.shape[:2], dtype=torch.bool) if mask is None else mask
        order = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        keys = real[:, None, None] & order if causal or memory is not None else real[:, None, None]
        seen = memory.detach() if memory is not None and fault == "memory_detached" else memory
        rows = None if memory_mask is None else memory_mask[:, None, None]

        def layer(z: Tensor, n: int) -> Tensor:
            once = fault == "gradient_of_the_last_step_alone" and n < max_steps
            return _layer(z, seen, _without_gradient(w["layer"]) if once else w["layer"], heads, norm, keys, rows)

        h, s = _states(x.masked_fill(~real[..., None], 0), real, layer, w["halt"], max_steps, epsilon, fault)
        output, steps, remainder = _mean(h, s, epsilon, fault)
        if fault == "tokens_pooled":
            output = output + _nothing(x.nan_to_num()).sum(1, keepdim=True)
        if fault == "padding_trained":
            output = output + _nothing(x.nan_to_num()).mean((0, 1))
        return (
            output.masked_fill(~real[..., None], 0),
            steps.masked_fill(~real, 0),
            remainder.masked_fill(~real, 0).to(x.dtype),
        )

    universal_transformer.__qualname__ = f"universal_transformer[{fault}]"
    return universal_transformer


def _states(
    x: Tensor, real: Tensor, layer: Callable[[Tensor, int], Tensor], halt: Params, max_steps: int, epsilon: float,
    fault: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """h[B,T,M] and s[B,T,M,d]."""
    u, running, total, halting, states = x, real, 0.0, [], []
    for n in range(1, max_steps + 1):
        z = (u.detach() if fault == "steps_detached" and n > 1 else u) + _signals(u, n)
        s = layer(z, n)
        read = s.detach() if fault == "states_detached_for_halting" else s
        halting.append(F.linear(read, halt["w"].T, halt.get("b"))[..., 0].float().sigmoid())
        kept = u.detach() if fault == "kept_states_detached" else u
        u = torch.where(running[..., None], s, kept)
        states.append(s)
        total = total + halting[-1]
        running = running & (total < 1 - epsilon)
    return torch.stack(halting, -1), torch.stack(states, -2)


def _mean(h: Tensor, s: Tensor, epsilon: float, fault: str) -> Results:
    """Graves' mean; N is a constant in the gradient."""
    total = torch.cumsum(h, -1)
    steps = 1 + (total[..., :-1] < 1 - epsilon).cumprod(-1).sum(-1)
    remainder = (1 - total + h).gather(-1, steps[..., None] - 1)[..., 0]
    shown = remainder
    if fault == "remainder_detached":
        shown = remainder.detach()
    if fault == "pondering_gets_dearer":
        shown = _Weighted.apply(remainder, -1.0)
    if fault == "remainder_of_all_halting":
        shown = remainder + _nothing(h).sum(-1)
    inner = h.detach() if fault == "halting_detached_in_the_mean" else h
    rest = remainder.detach() if fault in ("halting_detached_in_the_mean", "last_weight_detached") else remainder
    if fault == "last_weight_of_halting":
        rest = remainder.detach() + _nothing(h.gather(-1, steps[..., None] - 1)[..., 0])
    n = torch.arange(1, h.shape[-1] + 1)
    p = torch.where(n < steps[..., None], inner, 0) + F.one_hot(steps - 1, h.shape[-1]) * rest[..., None]
    states = s.masked_fill((n > steps[..., None])[..., None], 0)
    states = states.detach() if fault == "states_detached_in_the_mean" else states
    return (p.to(s.dtype)[..., None] * states).sum(-2), steps, shown


def _cut(params: Params, fault: str) -> Params:
    """The weights, of which one may be cut off from the result."""
    path = _DETACHED.get(fault, "").split(".")
    return _replaced(params, path) if path[0] else params


def _replaced(tree: Params, path: list[str]) -> Params:
    if path[0] not in tree:
        return tree
    part = tree[path[0]]
    return {**tree, path[0]: part.detach() if len(path) == 1 else _replaced(part, path[1:])}


def _without_gradient(tree: Any) -> Any:
    return (
        {name: _without_gradient(part) for name, part in tree.items()} if isinstance(tree, Mapping) else tree.detach()
    )


def _nothing(x: Tensor) -> Tensor:
    """0, through which a gradient comes back all the same."""
    return x - x.detach()


def _signals(x: Tensor, step: int) -> Tensor:
    width = x.shape[2]
    rate = 10000.0 ** (torch.arange(0, width, 2, dtype=torch.float64) / -width)
    waves = []
    for places in (torch.arange(x.shape[1], dtype=torch.float64), torch.tensor([step], dtype=torch.float64)):
        angle = torch.outer(places, rate)
        waves.append(torch.stack([angle.sin(), angle.cos()], -1).flatten(1)[:, :width])
    return (waves[0] + waves[1]).to(x.dtype)


def _layer(
    x: Tensor, memory: Tensor | None, w: Params, heads: int, norm: str, keys: Tensor, rows: Tensor | None
) -> Tensor:
    sublayers = [lambda z: _attention(z, z, w["attention"], heads, keys)]
    if memory is not None:
        sublayers.append(lambda z: _attention(z, memory, w["cross_attention"], heads, rows))
    f = w["feed_forward"]
    sublayers.append(lambda z: F.linear(F.relu(F.linear(z, f["w1"].T, f.get("b1"))), f["w2"].T, f.get("b2")))
    for number, sublayer in enumerate(sublayers, 1):
        scale = w[f"norm{number}"]
        x = x + sublayer(_normed(x, scale)) if norm == "pre" else _normed(x + sublayer(x), scale)
    return x


def _normed(x: Tensor, norm: Params) -> Tensor:
    if "bias" in norm:
        return F.layer_norm(x, x.shape[-1:], norm["weight"], norm["bias"], 1e-5)
    return F.rms_norm(x, x.shape[-1:], norm["weight"], 1e-6)


def _attention(x: Tensor, around: Tensor, w: Params, heads: int, mask: Tensor | None) -> Tensor:
    groups = w["wk"].shape[1] * heads // w["wq"].shape[1]
    q, k, v = (
        F.linear(rows, w[f"w{name}"].T, w.get(f"b{name}")).unflatten(-1, (count, -1)).transpose(1, 2)
        for name, rows, count in (("q", x, heads), ("k", around, groups), ("v", around, groups))
    )
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=groups < heads)
    return F.linear(out.transpose(1, 2).flatten(2), w["wo"].T, w.get("bo"))


_TABLE: dict[str, dict[str, tuple[str, str]]] = {
    "pondering-gets-cheaper-with-the-halting-bias": {
        "remainder_detached": ("mutation: the cost of N alone", "the remainder has no gradient"),
        "pondering_gets_dearer": ("semantics E09", "the gradient of the remainder has the other sign"),
    },
    "gradient-passes-through-all-steps": {
        "steps_detached": ("mutation: truncated after one step", "a step passes no gradient to the one before"),
        "states_detached_in_the_mean": ("mutation: states taken as they are", "the mean passes no gradient to states"),
        "gradient_of_the_last_step_alone": ("mutation: weights shared in name", "only the last step trains the layer"),
    },
    "gradient-reaches-every-weight": {
        "halting_unit_detached": ("mutation: the unit in no_grad", "the matrix of the halting unit has no gradient"),
        "halting_detached_in_the_mean": ("arXiv 1807.03819: last state", "the output passes no gradient to halting"),
        "queries_detached": ("mutation: a weight in no_grad", "the matrix of the queries has no gradient"),
        "inner_bias_detached": ("mutation: a weight in no_grad", "b1 has no gradient"),
        "norm_weight_detached": ("mutation: a weight in no_grad", "the weight of norm1 has no gradient"),
        "memory_detached": ("mutation: an encoder that is not trained", "the memory has no gradient"),
    },
    "gradient-of-unseen-tokens-is-zero": {
        "tokens_pooled": ("mutation: a leak that cancels", "every token of a sequence gets every gradient"),
        "padding_trained": ("mutation: a leak that cancels", "every token of a batch gets every gradient"),
    },
    "who-halts-at-once-teaches-the-halting-unit-nothing": {
        "last_weight_of_halting": ("mutation: h_N for R", "the last weight passes its gradient to h_N"),
        "remainder_of_all_halting": ("semantics E09", "the remainder passes its gradient to every h"),
    },
    "gradient-equals-the-reference": {
        "last_weight_detached": ("mutation: R as a constant", "the last weight passes no gradient to the h before"),
        "kept_states_detached": (
            "mutation: a kept state is a constant",
            "who sees a halted position does not train it",
        ),
        "states_detached_for_halting": ("mutation: halting reads a constant", "halting passes no gradient to states"),
    },
}
FAULTS = {
    variant: Fault("universal_transformer", f"universal_transformer/{law}", source, summary)
    for law, variants in _TABLE.items()
    for variant, (source, summary) in variants.items()
}
VARIANTS: dict[str, dict[str, Callable[..., Any]]] = {
    variant: {"universal_transformer": _make(variant)} for variant in ("correct", *FAULTS)
}
CAPABILITIES = {
    "universal_transformer": Capabilities(dtypes=("float32", "bfloat16", "float16"), saved_statistics="storage")
}
