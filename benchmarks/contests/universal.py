"""Contests of the compacted Universal Transformer with those that compute all steps for all positions.

Both sides run as many steps as the halting unit says, and it is part of the work. How many each position makes is
drawn from a geometric distribution cut off at STEPS, and written into the inputs and weights: in post-norm the
difference of two channels doubles in every step until the unit sees it, in pre-norm a channel counts up to 0 as the
signals of position and step, cosines of nearly 0, are added to it.

limit: the least time that skipping could take is mean(N) / STEPS of what the dense ones take; SHARE of that gain is
wanted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from contest import Call, Contest
from torch import Tensor

from veriformer.impls import torch_universal, torch_universal_compacted

WIDTH, HEADS, INNER, STEPS, LENGTH = 256, 8, 1024, 6, 128
EVEN, ODD, COUNTER = WIDTH - 4, WIDTH - 2, WIDTH - 1
"""Channels of slow sines, whose difference the unit reads in post-norm, and of the slowest cosine, for pre-norm."""
GAIN = 6.0
"""What the last norm multiplies the two by, so that their difference doubles in spite of the division by both norms."""
SHARE = {"post": 0.7, "pre": 0.6}
CAP = {"post": 0.93, "pre": 0.76}
"""Share of the gain that is possible at most: keys and values are projected N + 1 times, or STEPS times (pre-norm)."""
Params = Mapping[str, Any]
Results = tuple[Tensor, Tensor, Tensor]


def _drawn(batch: int, norm: str) -> tuple[Tensor, Params]:
    """x[B,T,d] and weights."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def linear(rows: int, columns: int) -> Tensor:
        return normal(rows, columns) / math.sqrt(rows)

    attention = {f"w{name}": linear(WIDTH, WIDTH) for name in "qkvo"}
    attention |= {f"b{name}": normal(WIDTH) / 8 for name in "qkvo"}
    feed = {"w1": linear(WIDTH, INNER), "b1": normal(INNER) / 8, "w2": linear(INNER, WIDTH), "b2": normal(WIDTH) / 8}
    for quiet in (attention["wo"], attention["bo"], feed["w2"], feed["b2"]):  # leave the unit's channels alone
        quiet[..., [EVEN, ODD, COUNTER]] = 0
    norms = [{"weight": torch.ones(WIDTH), "bias": torch.zeros(WIDTH)} for _ in range(2)]
    x, unit = normal(batch, LENGTH, WIDTH), torch.zeros(WIDTH, 1)
    steps = (1 - (1 - torch.rand(batch, LENGTH, generator=generator)).log2()).floor().clamp(max=STEPS)
    if norm == "post":
        norms[1]["weight"][[EVEN, ODD]] = GAIN
        x[..., ODD], x[..., EVEN] = 2 ** (-steps - 0.5), -(2 ** (-steps - 0.5))
        unit[ODD], unit[EVEN], bias = 20, -20, -20.0
    else:
        x[..., COUNTER], unit[COUNTER], bias = 1 - 2 * steps, 10, 0.0
    layer = {"attention": attention, "norm1": norms[0], "feed_forward": feed, "norm2": norms[1]}
    return x, {"layer": layer, "halt": {"w": unit, "b": torch.tensor([bias])}}


class _Dense:
    """All steps for all positions, as fast as we know how to: packed projections, attention without a mask."""

    def __init__(self, params: Params, norm: str) -> None:
        self.layer, self.halt, self.pre = params["layer"], params["halt"], norm == "pre"
        w = self.layer["attention"]
        self.packed = torch.cat([w[f"w{name}"] for name in "qkv"], 1)
        self.bias = torch.cat([w[f"b{name}"] for name in "qkv"])

    def __call__(self, x: Tensor) -> Results:
        u, running, total, output = (
            x,
            torch.ones(x.shape[:2], dtype=torch.bool),
            x.new_zeros(x.shape[:2]),
            x.new_zeros(1),
        )
        remainder, steps = torch.ones_like(total), torch.zeros(x.shape[:2], dtype=torch.int64)
        places = _signals(torch.arange(x.shape[1]))
        for n in range(1, STEPS + 1):
            s = self._step(u + (places + _signals(torch.tensor([n]))))
            h = (s @ self.halt["w"] + self.halt["b"])[..., 0].sigmoid()
            left, total = 1 - total, total + h
            stops = running & (total >= 0.99) if n < STEPS else running
            p = torch.where(stops, left, torch.where(running, h, 0.0))
            output, u = output + p[..., None] * s, torch.where(running[..., None], s, u)
            remainder, steps = torch.where(stops, left, remainder), steps + running
            running = running & ~stops
        return output, steps, remainder

    def _step(self, z: Tensor) -> Tensor:
        w, (batch, length, width) = self.layer, z.shape
        z = z.view(-1, width)
        q, k, v = (self._entered(z, "norm1") @ self.packed).add_(self.bias).view(batch, length, 3, HEADS, -1).unbind(2)
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        y = y.transpose(1, 2).reshape(-1, width)
        z = self._left((y @ w["attention"]["wo"]).add_(w["attention"]["bo"]).add_(z), "norm1")
        f = w["feed_forward"]
        y = (self._entered(z, "norm2") @ f["w1"]).add_(f["b1"]).relu_()
        return self._left((y @ f["w2"]).add_(f["b2"]).add_(z), "norm2").view(batch, length, width)

    def _entered(self, z: Tensor, name: str) -> Tensor:
        return self._normed(z, name) if self.pre else z

    def _left(self, z: Tensor, name: str) -> Tensor:
        return z if self.pre else self._normed(z, name)

    def _normed(self, z: Tensor, name: str) -> Tensor:
        return F.layer_norm(z, (WIDTH,), self.layer[name]["weight"], self.layer[name]["bias"])


def _signals(places: Tensor) -> Tensor:
    """[n] -> [n,d]."""
    angle = torch.outer(places.double(), 10000.0 ** (torch.arange(0, WIDTH, 2).double() / -WIDTH))
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(1).float()


def _compacted(params: Params, norm: str) -> Callable[[Tensor], Results]:
    return torch_universal_compacted.UniversalTransformer(params, heads=HEADS, norm=norm, max_steps=STEPS)


def _masked(params: Params, norm: str) -> Callable[[Tensor], Results]:
    return lambda x: torch_universal.universal_transformer(x, params, heads=HEADS, norm=norm, max_steps=STEPS)


def _forward(make: Callable[[Params, str], Callable[[Tensor], Results]], batch: int, norm: str) -> Call:
    x, params = _drawn(batch, norm)
    model = make(params, norm)

    def call() -> Results:
        with torch.inference_mode():
            return model(x)

    return call


def _training(make: Callable[[Params, str], Callable[[Tensor], Results]], batch: int, norm: str) -> Call:
    """The model packs its weights in every call, as they change between two steps of training."""
    x, params = _drawn(batch, norm)
    weights = [one for one in _leaves(params) if one is not params["layer"]["attention"]["bk"]]
    cotangent = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))

    def call() -> list[Tensor]:
        for one in weights:
            one.requires_grad_(True)
        output, _, remainder = make(params, norm)(x)
        loss = (output * cotangent).sum() + remainder.sum()
        return [output, *torch.autograd.grad(loss, weights)]

    return call


def _leaves(tree: Any) -> list[Tensor]:
    return [tree] if isinstance(tree, Tensor) else [one for part in tree.values() for one in _leaves(part)]


def _contest(batch: int, norm: str, direction: str) -> Contest:
    run = {"forward": _forward, "training": _training}[direction]
    x, params = _drawn(batch, norm)
    with torch.inference_mode():
        steps = _masked(params, norm)(x)[1].double().mean().item()
    why = "once more for who has halted" if norm == "post" else "anew for all in every step"
    told = f"Mean N {steps:.3f} of {STEPS}; keys and values are projected {why}, which caps the gain at {CAP[norm]:.0%}"
    limit = steps / (SHARE[norm] * STEPS) if batch > 1 else 1.0
    told += f" of {STEPS / steps:.2f}" + (f"; {SHARE[norm]:.0%} of it is the limit." if batch > 1 else ".")
    token = 2 * (4 * WIDTH**2 + 2 * WIDTH * INNER) + 4 * LENGTH * WIDTH
    again = 4 * WIDTH**2 * (1 if norm == "post" else STEPS - steps)
    return Contest(
        f"universal-{direction}-{norm}-b{batch}",
        f"Universal Transformer, {direction}, {norm}-norm, B{batch} T{LENGTH} d{WIDTH} H{HEADS} f{INNER}, float32",
        ours={"torch:universal_compacted": lambda: run(_compacted, batch, norm)},
        others={
            "torch:universal (dense, masked)": lambda: run(_masked, batch, norm),
            "dense, packed": lambda: run(_Dense, batch, norm),
        },
        limit=limit, flops=(3 if direction == "training" else 1) * batch * LENGTH * (steps * token + again),
        tolerance=1e-3, note=told,
    )  # fmt: skip


CONTESTS = [
    _contest(batch, norm, direction)
    for batch, norm in ((8, "post"), (8, "pre"), (1, "post"))
    for direction in ("forward", "training")
]
