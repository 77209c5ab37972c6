"""An encoder layer in float32 torch, forward and backward, right and with one mistake: rows of `detection.py`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import torch
from precision_rows import FLOAT32, Array, Line, Made

from veriformer.budgets import Bound, Precision
from veriformer.budgets.perturbation import perturbed
from veriformer.case import nested, round_to
from veriformer.reference import layers

HEADS, LENGTH, WIDTH, INNER = 4, 64, 128, 256
JUDGED = ("x", "attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "norm1.weight")
"""The gradients that are judged beside the output."""


@cache
def arrays(seed: int) -> dict[str, Array]:
    """The input, the cotangent and all weights, as float64 of float32 values."""
    rng = np.random.default_rng(seed)
    d, f = WIDTH, INNER
    shapes = {"x": (1, LENGTH, d), "feed_forward.w1": (d, f), "feed_forward.b1": (f,), "feed_forward.w2": (f, d)}
    shapes |= {
        "feed_forward.b2": (d,),
        "norm1.weight": (d,),
        "norm1.bias": (d,),
        "norm2.weight": (d,),
        "norm2.bias": (d,),
    }
    shapes |= {f"attention.{name}": (d, d) for name in ("wq", "wk", "wv", "wo")}
    found = {}
    for name, shape in shapes.items():
        values = rng.normal(size=shape)
        if len(shape) == 2:
            values = values * shape[0] ** -0.5
        elif len(shape) == 1:
            values = values * 0.1 + name.endswith("weight")
        found[name] = np.array(round_to(values, "float32"))
    return found | {"cotangent": np.array(round_to(rng.normal(size=(1, LENGTH, d)), "float32"))}


@cache
def bounds(seed: int, precision: Precision) -> tuple[Bound, ...]:
    """The budgets of the output and of the judged gradients; typically, one standard deviation of them."""
    given = dict(arrays(seed))
    cotangent = given.pop("cotangent")
    factor = 1.0 if precision.growth == "typical" else None

    def layer(tensors: Any) -> Any:
        return layers.encoder_layer(tensors["x"], nested(dict(tensors)), heads=HEADS)

    out, gradients = perturbed(layer, given, precision, cotangents=(cotangent,), wrt=JUDGED, factor=factor)
    return (*out, *(gradients[name] for name in JUDGED))


class ShortProduct(torch.autograd.Function):
    """a b with both factors rounded to tf32, here and in the backward."""

    @staticmethod
    def forward(ctx: Any, a: Any, b: Any) -> Any:
        ctx.save_for_backward(a, b)
        return tf32(a) @ tf32(b)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        a, b = ctx.saved_tensors
        left, right = tf32(grad) @ tf32(b).mT, tf32(a).mT @ tf32(grad)
        return left, right.sum(0) if right.ndim > b.ndim else right


def tf32(x: Any) -> Any:
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(torch.round(mantissa * 2**11) / 2**11, exponent)


def encoder_layer(t: dict[str, Any], fault: str = "") -> Any:
    """Post-norm, relu, no biases in attention."""
    dot = ShortProduct.apply if fault == "tf32 inputs" else torch.matmul

    def heads(a: Any) -> Any:
        return a.reshape(1, LENGTH, HEADS, -1).transpose(1, 2)

    def norm(a: Any, name: str) -> Any:
        centred = a - a.mean(-1, keepdim=True)
        v = (centred * centred).sum(-1, keepdim=True) / (WIDTH - (fault == "variance over n - 1"))
        eps = 1e-6 if fault == "eps 1e-6 for 1e-5" else 1e-5
        return centred / (v + eps).sqrt() * t[f"{name}.weight"] + t[f"{name}.bias"]

    q, k, v = (heads(dot(t["x"], t[f"attention.{name}"])) for name in ("wq", "wk", "wv"))
    scale = (WIDTH // HEADS) ** -0.5 * (1.001 if fault == "scale × 1.001" else 1.0)
    p = torch.softmax(dot(q, k.mT) * scale, -1)
    p = p.bfloat16().float() if fault == "bfloat16 probabilities" else p
    x = norm(t["x"] + dot(dot(p, v).transpose(1, 2).reshape(1, LENGTH, WIDTH), t["attention.wo"]), "norm1")
    hidden = torch.relu(dot(x, t["feed_forward.w1"]) + t["feed_forward.b1"])
    return norm(x + dot(hidden, t["feed_forward.w2"]) + t["feed_forward.b2"], "norm2")


def line(fault: str, demanded: int | None) -> Line:
    def make(rng: np.random.Generator, seed: int) -> Made:
        tensors = {name: torch.from_numpy(a).float() for name, a in arrays(seed).items()}
        for name in JUDGED:
            tensors[name].requires_grad_()
        out = encoder_layer(tensors, fault)
        gradients = torch.autograd.grad(out, [tensors[name] for name in JUDGED], tensors["cotangent"])
        return tuple(a.detach().double().numpy() for a in (out, *gradients)), lambda p: bounds(seed, p)

    return Line(f"encoder layer, {fault or 'torch'}", FLOAT32, make, demanded)


def layer_lines() -> Iterator[Line]:
    """Six quantities a line, the largest of each statistic counts."""
    yield line("", None)
    for fault in ("tf32 inputs", "bfloat16 probabilities", "scale × 1.001", "variance over n - 1"):
        yield line(fault, 8)
    yield line("eps 1e-6 for 1e-5", 4)
