"""Kernels of known precision, right and wrong ones, on dense random data: the rows of `detection.py`.

Every kernel is NumPy or torch in float32, or in bfloat16 with float32 sums; each wrong one makes one
mistake. A row declares the `Precision` that the kernel claims and gives its results with the budget.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from veriformer import budgets, reference
from veriformer.budgets import Bound, Precision
from veriformer.case import round_to

Array = np.ndarray
Made = tuple[tuple[Array, ...], Callable[[Precision], tuple[Bound, ...]]]
Maker = Callable[[np.random.Generator, int], Made]

FLOAT32 = Precision("float32")
FUSED = Precision("bfloat16", intermediate="float32", rounds_probabilities=False)
ROUNDED = Precision("bfloat16", intermediate="float32")
UNFUSED = Precision("bfloat16")


@dataclass(frozen=True)
class Line:
    """One kernel: make gives its results on the data of a seed, and their bounds under a precision.

    demanded: in how many of 8 seeds it must be detected; None for a right one, in none.
    """

    name: str
    precision: Precision
    make: Maker
    demanded: int | None = 8


def rounded(x: Array, unit: float) -> Array:
    """x rounded to nearest at that unit roundoff, in its own dtype."""
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.round(mantissa / unit) * unit, exponent).astype(x.dtype)


TF32, BF16, FP16 = 2.0**-11, 2.0**-8, 2.0**-11


# --- attention ------------------------------------------------------------------------------------

SIZES = ((4, 64, 64, 32), (2, 64, 256, 64), (1, 64, 512, 128), (1, 32, 1024, 256))
"""Heads, queries, keys and width; each seed takes the next."""


def attention_inputs(rng: np.random.Generator, seed: int, dtype: str) -> list[Array]:
    heads, queries, keys, width = SIZES[seed % len(SIZES)]
    return [round_to(rng.normal(size=(1, heads, n, width)), dtype) for n in (queries, keys, keys)]


def attention_kernel(
    q: Array, k: Array, v: Array, *, factor: float = 1.0, inputs: float = 0.0, accumulate: float = 0.0,
    probabilities: float = 0.0, peak: bool = True,
) -> Array:  # fmt: skip
    """softmax(q kᵀ scale) v in float32, with one of its steps in a short dtype, or with one mistake."""
    q, k, v = (a.astype(np.float32) for a in (q, k, v))
    if inputs:
        q, k, v = (rounded(a, inputs) for a in (q, k, v))
    s = matrix_product(q, k.swapaxes(-1, -2), accumulate) * np.float32(factor * q.shape[-1] ** -0.5)
    e = np.exp(s - s.max(axis=-1, keepdims=True)) if peak else np.exp(s)
    total = e.sum(axis=-1, keepdims=True)
    if probabilities:
        e = rounded(e, probabilities)
    return matrix_product(e, v, accumulate) / total


def matrix_product(a: Array, b: Array, accumulate: float) -> Array:
    """a b in float32; with `accumulate`, the running sum is rounded after every 16 terms."""
    if not accumulate:
        return a @ b
    total = np.zeros((*a.shape[:-1], b.shape[-1]), np.float32)
    for start in range(0, a.shape[-1], 16):
        part = slice(start, start + 16)
        total = rounded(total + a[..., part] @ b[..., part, :], accumulate)
    return total


def attention_line(name: str, precision: Precision, demanded: int | None = 8, size: float = 1.0, **fault: Any) -> Line:
    def make(rng: np.random.Generator, seed: int) -> Made:
        q, k, v = attention_inputs(rng, seed, precision.storage)
        q = round_to(q * size, precision.storage)
        with np.errstate(all="ignore"):
            computed = round_to(attention_kernel(q, k, v, **fault), precision.storage)
        return (computed,), lambda p: (budgets.attention(q, k, v, precision=p),)

    return Line(name, precision, make, demanded)


def torch_attention_line(name: str, precision: Precision, backend: SDPBackend) -> Line:
    def make(rng: np.random.Generator, seed: int) -> Made:
        arrays = attention_inputs(rng, seed, precision.storage)
        with sdpa_kernel(backend):
            computed = F.scaled_dot_product_attention(*(tensor(a, precision) for a in arrays))
        return (computed.double().numpy(),), lambda p: (budgets.attention(*arrays, precision=p),)

    return Line(name, precision, make, None)


def leaking_line(weight: float, precision: Precision, demanded: int | None = 8) -> Line:
    """Causal attention in which the next key has a share of `weight`."""

    def make(rng: np.random.Generator, seed: int) -> Made:
        q, k, v = attention_inputs(rng, seed, precision.storage)
        right = reference.attention(q, k, v, causal=True)
        rows = k.shape[2] - q.shape[2] + np.arange(q.shape[2]) + 1
        leaked = np.where((rows < k.shape[2])[:, None], v[:, :, rows % k.shape[2]], right)
        computed = round_to((1 - weight) * right + weight * leaked, precision.storage)
        return (computed,), lambda p: (budgets.attention(q, k, v, causal=True, precision=p),)

    return Line(f"attention, one key too many, weight {weight:.0e}", precision, make, demanded)


def tensor(x: Array, precision: Precision) -> Any:
    return torch.from_numpy(np.ascontiguousarray(x)).to(getattr(torch, precision.storage))


# --- feed-forward ---------------------------------------------------------------------------------


def feed_forward_line(
    name: str, precision: Precision, widths: tuple[int, ...], demanded: int | None = 8, **fault: Any
) -> Line:
    """relu(x w1 + b1) w2 + b2 of width d and inner width d, or 256 if that is less."""

    def make(rng: np.random.Generator, seed: int) -> Made:
        d = widths[seed % len(widths)]
        f = min(d, 256)
        shapes = ((max(8, 4096 // d), d), (d, f), (f,), (f, d), (d,))
        scales = (1.0, d**-0.5, 0.1, f**-0.5, 0.1)
        arrays = [round_to(rng.normal(size=n) * s, precision.storage) for n, s in zip(shapes, scales, strict=True)]
        computed = round_to(feed_forward_kernel(*arrays, **fault), precision.storage)
        return (computed,), lambda p: (budgets.feed_forward(*arrays, precision=p),)

    return Line(name, precision, make, demanded)


def feed_forward_kernel(
    x: Array, w1: Array, b1: Array, w2: Array, b2: Array, *, inputs: float = 0.0, accumulate: float = 0.0,
    by_torch: bool = False,
) -> Array:  # fmt: skip
    x, w1, b1, w2, b2 = (a.astype(np.float32) for a in (x, w1, b1, w2, b2))
    if by_torch:
        t = [torch.from_numpy(a) for a in (x, w1.T.copy(), b1, w2.T.copy(), b2)]
        return F.linear(F.relu(F.linear(*t[:3])), *t[3:]).double().numpy()
    short = (lambda a: rounded(a, inputs)) if inputs else (lambda a: a)
    hidden = np.maximum(matrix_product(short(x), short(w1), accumulate) + b1, 0)
    return matrix_product(short(hidden), short(w2), accumulate) + b2


# --- layer_norm and gelu --------------------------------------------------------------------------


def layer_norm_line(
    name: str, precision: Precision, demanded: int | None = 8, *, size: float = 1.0, mean: float = 0.0, n: int = 512,
    **fault: Any,
) -> Line:  # fmt: skip
    def make(rng: np.random.Generator, seed: int) -> Made:
        x = round_to((rng.normal(size=(16, n)) + mean) * size, precision.storage)
        weight, bias = (
            round_to(1 + 0.1 * rng.normal(size=n), precision.storage),
            round_to(rng.normal(size=n) * 0.1, precision.storage),
        )
        computed = round_to(layer_norm_kernel(x, weight, bias, **fault), precision.storage)
        return (computed,), lambda p: (budgets.layer_norm(x, weight, bias, precision=p),)

    return Line(name, precision, make, demanded)


def layer_norm_kernel(
    x: Array, weight: Array, bias: Array, *, eps: float = 1e-5, outside: bool = False, less: int = 0,
    one_pass: bool = False, by_torch: bool = False, inputs: float = 0.0,
) -> Array:  # fmt: skip
    x, weight, bias = (a.astype(np.float32) for a in (x, weight, bias))
    if by_torch:
        t = [torch.from_numpy(a) for a in (x, weight, bias)]
        return F.layer_norm(t[0], (x.shape[-1],), *t[1:], eps).double().numpy()
    x = rounded(x, inputs) if inputs else x
    mean, short = x.mean(axis=-1, keepdims=True), np.float32(eps)
    centred = x - mean
    v = (
        (x * x).mean(axis=-1, keepdims=True) - mean * mean
        if one_pass
        else (centred * centred).mean(axis=-1, keepdims=True)
    )
    v = v * np.float32(x.shape[-1] / (x.shape[-1] - less))
    with np.errstate(invalid="ignore"):
        return centred / (np.sqrt(v) + short if outside else np.sqrt(v + short)) * weight + bias


def gelu_line(name: str, precision: Precision, demanded: int | None = 8, size: float = 1.0, form: str = "none") -> Line:
    def make(rng: np.random.Generator, seed: int) -> Made:
        x = round_to(rng.normal(size=(64, 64)) * size, precision.storage)
        computed = F.gelu(tensor(x, precision), approximate=form).double().numpy()
        return (computed,), lambda p: (budgets.gelu(x, precision=p),)

    return Line(name, precision, make, demanded)


# --- the table ------------------------------------------------------------------------------------


def float32_lines() -> Iterator[Line]:
    p = FLOAT32
    yield torch_attention_line("attention, torch math", p, SDPBackend.MATH)
    yield torch_attention_line("attention, torch flash", p, SDPBackend.FLASH_ATTENTION)
    yield attention_line("attention, NumPy", p, None)
    for d in (64, 1024, 4096):
        yield feed_forward_line(f"feed_forward, torch, d = {d}", p, (d,), None, by_torch=True)
    for mean in (0, 1, 1000):
        yield layer_norm_line(f"layer_norm, torch, mu/sigma = {mean}", p, None, mean=mean, by_torch=True)
    for size in (1.0, 0.1):
        yield gelu_line(f"gelu, torch, amplitude {size}", p, None, size=size)
    yield attention_line("attention, scale × 1.001", p, factor=1.001)
    yield attention_line("attention, tf32 inputs", p, inputs=TF32)
    yield attention_line("attention, bfloat16 inputs", p, inputs=BF16)
    yield attention_line("attention, bfloat16 accumulator", p, accumulate=BF16)
    yield attention_line("attention, float16 accumulator", p, accumulate=FP16)
    yield attention_line("attention, bfloat16 probabilities", p, probabilities=BF16)
    for d in (64, 1024, 4096):
        yield feed_forward_line(f"feed_forward, tf32 inputs, d = {d}", p, (d,), inputs=TF32)
    yield feed_forward_line("feed_forward, bfloat16 accumulator, d = 4096", p, (4096,), accumulate=BF16)
    for weight in (1e-5, 1e-4, 1e-3, 1e-2):
        yield leaking_line(weight, p)
    yield attention_line("attention, no maximum subtracted, large logits", p, size=100.0, peak=False)
    for size in (0.01, 1.0):
        yield layer_norm_line(f"layer_norm, eps 1e-6 for 1e-5, sigma {size}", p, size=size, eps=1e-6)
        yield layer_norm_line(f"layer_norm, eps outside the root, sigma {size}", p, size=size, outside=True)
    yield layer_norm_line("layer_norm, variance over n - 1, n = 512", p, less=1)
    for mean in (10, 100, 1000):
        demanded = 0 if mean == 10 else 8
        yield layer_norm_line(
            f"layer_norm, one-pass variance, mu/sigma = {mean}", p, demanded, mean=mean, one_pass=True
        )
    yield layer_norm_line("layer_norm, bfloat16 input", p, inputs=BF16)
    for size in (1.0, 0.1):
        yield gelu_line(f"gelu, tanh for erf, amplitude {size}", p, size=size, form="tanh")


def bfloat16_lines() -> Iterator[Line]:
    for level, p in (("rounded weights", ROUNDED), ("unfused", UNFUSED)):
        yield torch_attention_line(f"attention, torch math, {level}", p, SDPBackend.MATH)
        yield torch_attention_line(f"attention, torch flash, {level}", p, SDPBackend.FLASH_ATTENTION)
        yield attention_line(f"attention, NumPy, {level}", p, None, probabilities=BF16)
    yield attention_line("attention, NumPy, fused", FUSED, None)
    for level, p in (("fused", FUSED), ("unfused", UNFUSED)):
        yield feed_forward_line(f"feed_forward, torch, {level}", p, (64, 1024, 4096), None, by_torch=True)
        yield layer_norm_line(f"layer_norm, torch, {level}", p, None, by_torch=True)
        yield gelu_line(f"gelu, torch, {level}", p, None)
    yield from bfloat16_faults(ROUNDED, FUSED, 8, 7)


def unfused_faults() -> Iterator[Line]:
    """The same faults, in kernels that declare every value between two steps to be stored in bfloat16."""
    yield from bfloat16_faults(UNFUSED, UNFUSED, 0, 0)


def bfloat16_faults(attention: Precision, others: Precision, most: int, nearly: int) -> Iterator[Line]:
    rounds = {"probabilities": BF16}
    yield attention_line("attention, scale × 1.01", attention, most, factor=1.01, **rounds)
    yield attention_line("attention, scale × 1.001", attention, nearly, factor=1.001, **rounds)
    # Over 32 channels and 64 keys it rounds two and four times, hardly more than rounded weights do.
    yield attention_line("attention, bfloat16 accumulator", attention, nearly, accumulate=BF16)
    for weight in (1e-2, 1e-3):
        yield leaking_line(weight, attention, most)
    for d in (64, 1024, 4096):
        yield feed_forward_line(f"feed_forward, bfloat16 accumulator, d = {d}", others, (d,), most, accumulate=BF16)
    yield layer_norm_line("layer_norm, variance over n - 1, n = 512", others, most, less=1)
    yield layer_norm_line("layer_norm, eps 1e-6 for 1e-5, sigma 0.1", others, most, size=0.1, eps=1e-6)
    yield gelu_line("gelu, tanh for erf, amplitude 1", others, most, form="tanh")
