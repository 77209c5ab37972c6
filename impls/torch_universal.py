"""The Universal Transformer in torch: all steps for all positions.

Attention is scaled_dot_product_attention with one boolean mask. Halting is summed in float32 at least. Autograd has
every gradient; the number of steps is a constant in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from veriformer.declarations import Capabilities

FRAMEWORK = "torch"
Params = Mapping[str, Any]
Results = tuple[Tensor, Tensor, Tensor]


class _Sight(NamedTuple):
    """Heads, where the norm stands, who is real, which keys a token may see, the memory and which of it is real."""

    heads: int
    norm: str
    real: Tensor
    keys: Tensor
    memory: Tensor | None
    rows: Tensor | None


def universal_transformer(
    x: Tensor, params: Params, *, heads: int, norm: str = "post", mask: Tensor | None = None, causal: bool = False,
    memory: Tensor | None = None, memory_mask: Tensor | None = None, max_steps: int, epsilon: float = 0.01,
) -> Results:  # fmt: skip
    """One layer applied again and again, each position until its halting sum reaches 1 - epsilon.

    x[B,T,d], params: layer, halt -> output[B,T,d], steps[B,T], remainder[B,T]
    s = layer(u + P[position] + P[n]), h = sigmoid(s w + b), output = Σ p s
    Source: Dehghani et al. 2019 (Universal Transformers), section 2; Graves 2016 (Adaptive Computation Time),
    section 2. mask[B,T] and memory_mask[B,S]: True = a real token.
    Raises ValueError for an unknown norm, max_steps < 1 and epsilon outside [0, 1).
    """
    sight = _sight(x, heads, norm, mask, causal, memory, memory_mask, max_steps, epsilon)
    u, running = x.masked_fill(~sight.real[..., None], 0), sight.real
    states, halting, total = [], [], torch.zeros((), dtype=_wide(x))
    for n in range(1, max_steps + 1):
        z = u + _signals(u, n)
        s = _layer(z, params["layer"], sight)
        u = torch.where(running[..., None], s, u)
        halting.append(_halting(s, params["halt"]))
        states.append(u)
        total = total + halting[-1]
        running = running & (total < 1 - epsilon)
    h = torch.stack(halting, -1)
    before = torch.cumsum(h, -1) - h
    steps = 1 + (torch.cumsum(h, -1)[..., :-1] < 1 - epsilon).cumprod(-1).sum(-1)
    n = torch.arange(1, max_steps + 1, device=x.device)
    remainder = (1 - before).gather(-1, steps[..., None] - 1)[..., 0]
    weights = torch.where(n < steps[..., None], h, 0) + F.one_hot(steps - 1, max_steps) * remainder[..., None]
    output = (weights.to(x.dtype)[..., None] * torch.stack(states, -2)).sum(-2)
    return _of_real(sight.real, output, steps, remainder.to(x.dtype))


def _sight(
    x: Tensor, heads: int, norm: str, mask: Tensor | None, causal: bool, memory: Tensor | None,
    memory_mask: Tensor | None, max_steps: int, epsilon: float,
) -> _Sight:  # fmt: skip
    if norm not in ("post", "pre"):
        raise ValueError(f"norm: got {norm!r}, wanted 'post' or 'pre'")
    if max_steps < 1 or not 0 <= epsilon < 1:
        raise ValueError(f"max_steps, epsilon: got {max_steps}, {epsilon}, wanted at least 1, and a number in [0, 1)")
    real = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if mask is None else mask
    keys = real[:, None, None]
    if causal or memory is not None:
        keys = keys & torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
    return _Sight(heads, norm, real, keys, memory, None if memory_mask is None else memory_mask[:, None, None])


def _of_real(real: Tensor, output: Tensor, steps: Tensor, remainder: Tensor) -> Results:
    return output.masked_fill(~real[..., None], 0), steps.masked_fill(~real, 0), remainder.masked_fill(~real, 0)


def _wide(x: Tensor) -> torch.dtype:
    """The dtype in which halting is summed."""
    return torch.promote_types(x.dtype, torch.float32)


def _halting(s: Tensor, halt: Params) -> Tensor:
    """[…,d] -> […], in that dtype."""
    return F.linear(s, halt["w"].T, halt.get("b"))[..., 0].to(_wide(s)).sigmoid()


def _signals(x: Tensor, step: int) -> Tensor:
    """[T,d]: the sinusoids of the positions, plus those of the step."""
    width = x.shape[2]
    rate = 10000.0 ** (torch.arange(0, width, 2, dtype=torch.float64, device=x.device) / -width)
    places = torch.arange(x.shape[1] + 1, dtype=torch.float64, device=x.device)
    places[-1] = step
    angle = torch.outer(places, rate)
    waves = torch.stack([angle.sin(), angle.cos()], -1).flatten(1)[:, :width]
    return (waves[:-1] + waves[-1]).to(x.dtype)


def _layer(x: Tensor, w: Params, sight: _Sight) -> Tensor:
    """x[B,T,d] after one layer."""

    def normed(z: Tensor, name: str) -> Tensor:
        return _normed(z, w[name]) if sight.norm == "pre" else z

    def beside(z: Tensor, y: Tensor, name: str) -> Tensor:
        return z + y if sight.norm == "pre" else _normed(z + y, w[name])

    seen = normed(x, "norm1")
    x, last = beside(x, _attention(seen, seen, w["attention"], sight.heads, sight.keys), "norm1"), "norm2"
    if sight.memory is not None:
        y = _attention(normed(x, "norm2"), sight.memory, w["cross_attention"], sight.heads, sight.rows)
        x, last = beside(x, y, "norm2"), "norm3"
    f = w["feed_forward"]
    y = F.linear(F.relu(F.linear(normed(x, last), f["w1"].T, f.get("b1"))), f["w2"].T, f.get("b2"))
    return beside(x, y, last)


def _normed(x: Tensor, norm: Params) -> Tensor:
    """layer_norm, or without a bias rms_norm, whose eps differ."""
    if "bias" in norm:
        return F.layer_norm(x, x.shape[-1:], norm["weight"], norm["bias"], 1e-5)
    return F.rms_norm(x, x.shape[-1:], norm["weight"], 1e-6)


def _attention(x: Tensor, around: Tensor, w: Params, heads: int, mask: Tensor | None) -> Tensor:
    """Of x[B,T,d] to around[B,S,d]."""
    groups = w["wk"].shape[1] * heads // w["wq"].shape[1]
    q, k, v = (
        F.linear(rows, w[f"w{name}"].T, w.get(f"b{name}")).unflatten(-1, (count, -1)).transpose(1, 2)
        for name, rows, count in (("q", x, heads), ("k", around, groups), ("v", around, groups))
    )
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=groups < heads)
    return F.linear(out.transpose(1, 2).flatten(2), w["wo"].T, w.get("bo"))


VARIANTS = {"universal": {"universal_transformer": universal_transformer}}
# native_layer_norm keeps mean and 1/deviation in x's own dtype; its backward has nothing else, and sums in it.
CAPABILITIES = {
    "universal": {"universal_transformer": Capabilities(saved_statistics="storage", gradient_accumulate="storage")}
}
