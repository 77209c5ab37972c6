"""Correct implementations whose budgets are calibrated by `calibrate.py`, and adversarial data for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from veriformer import reference
from veriformer.case import round_to
from veriformer.impls import numpy_plain
from veriformer.properties.families import FAMILIES, fill
from veriformer.reference import layers

Arrays = dict[str, np.ndarray]
LOW = ("bfloat16", "float16")


@dataclass(frozen=True)
class Subject:
    """One implementation: the reference and the kernel, both on a mapping of tensors, and data for them.

    shapes: sizes of the arrays from a generator, and options. precision: what it declares, and what besides
    in 16 bits. backward: whether it has gradients. known: gradients that are wrong in 16 bits. numpy: the
    kernel takes a cotangent and NumPy arrays, and returns the result and its gradients; 32 and 64 bits.
    """

    name: str
    shapes: Callable[[np.random.Generator], tuple[dict[str, tuple[int, ...]], dict[str, Any]]]
    reference: Callable[..., Any]
    kernel: Callable[..., Any]
    precision: Mapping[str, Any] = field(default_factory=dict)
    low: Mapping[str, Any] = field(default_factory=dict)
    backward: bool = True
    known: tuple[str, ...] = ()
    numpy: bool = False

    def declared(self, dtype: str) -> dict[str, Any]:
        """What it declares for a dtype."""
        return {**self.precision, **(self.low if dtype in LOW else {})}


def length(rng: np.random.Generator, most: int) -> int:
    """A length from 1 to `most`, short ones as frequent as long ones."""
    return int(np.exp(rng.uniform(0, np.log(most + 0.99))))


# --- data -----------------------------------------------------------------------------------------


def rows(rng: np.random.Generator) -> tuple[dict[str, tuple[int, ...]], dict[str, Any]]:
    return {"x": (length(rng, 6), length(rng, 300))}, {}


def normed_rows(rng: np.random.Generator) -> tuple[dict[str, tuple[int, ...]], dict[str, Any]]:
    n, d = length(rng, 40), length(rng, 300)
    return {"x": (n, d), "weight": (d,), "bias": (d,)}, {}


def scaled_rows(rng: np.random.Generator) -> tuple[dict[str, tuple[int, ...]], dict[str, Any]]:
    shapes, options = normed_rows(rng)
    return {name: shapes[name] for name in ("x", "weight")}, options


def heads(rng: np.random.Generator) -> tuple[dict[str, tuple[int, ...]], dict[str, Any]]:
    b, h, queries, keys = int(rng.integers(1, 3)), int(rng.integers(1, 4)), length(rng, 20), length(rng, 60)
    width, values = length(rng, 32), 0
    values = width
    options = {"causal": bool(rng.random() < 0.3)}
    return {"q": (b, h, queries, width), "k": (b, h, keys, width), "v": (b, h, keys, values)}, options


def matrices(rng: np.random.Generator) -> tuple[dict[str, tuple[int, ...]], dict[str, Any]]:
    d, f = length(rng, 64), length(rng, 64)
    return {"x": (length(rng, 30), d), "w1": (d, f), "b1": (f,), "w2": (f, d), "b2": (d,)}, {}


def layer(rng: np.random.Generator) -> tuple[dict[str, tuple[int, ...]], dict[str, Any]]:
    """Not of width 2, where a norm is a sign and its gradient a difference of squares of errors."""
    h = int(rng.choice([1, 2, 4]))
    d, f = h * int(rng.choice([4, 8])), int(rng.choice([8, 24, 48]))
    shapes: dict[str, tuple[int, ...]] = {"x": (int(rng.integers(1, 3)), length(rng, 16), d)}
    shapes |= {f"attention.w{m}": (d, d) for m in "qkvo"} | {f"attention.b{m}": (d,) for m in "qkvo"}
    shapes |= {"feed_forward.w1": (d, f), "feed_forward.b1": (f,), "feed_forward.w2": (f, d), "feed_forward.b2": (d,)}
    shapes |= {f"norm{i}.{part}": (d,) for i in (1, 2) for part in ("weight", "bias")}
    return shapes, {"heads": h, "norm": str(rng.choice(["post", "pre"]))}


def draw(subject: Subject, rng: np.random.Generator, dtype: str) -> tuple[Arrays, dict[str, Any]]:
    """Arrays of one case: each of a family, most of them of the same one; weights mostly ordinary."""
    shapes, options = subject.shapes(rng)
    names, arrays = list(FAMILIES), {}
    common = str(rng.choice(names))
    for name, shape in shapes.items():
        ordinary = name != "x" and "x" in shapes and rng.random() < 0.8
        family = "normal" if ordinary else common if rng.random() < 0.7 else str(rng.choice(names))
        values = fill(family, int(rng.integers(1 << 30)), shape, dtype)
        if ordinary:
            values = values / max(shape[0], 1) ** 0.5 if len(shape) > 1 else 1 + values / 4
        elif rng.random() < 0.5:
            values = values * 10.0 ** rng.uniform(-3, 0.5)
        arrays[name] = round_to(values, dtype)
    return arrays, options


def cotangent(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    family = str(rng.choice(["normal", "normal", "constant", "integers", "one_hot", "large_mean", "sparse", "heavy"]))
    return round_to(fill(family, int(rng.integers(1 << 30)), shape or (1,), dtype).reshape(shape), dtype)


# --- kernels --------------------------------------------------------------------------------------


def sdpa(backend: SDPBackend) -> Callable[..., torch.Tensor]:
    def run(t: Mapping[str, torch.Tensor], causal: bool) -> torch.Tensor:
        mask = None
        queries, keys = t["q"].shape[2], t["k"].shape[2]
        if causal and queries > 0:
            mask = torch.ones(queries, keys, dtype=torch.bool).tril(max(keys - queries, 0))
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(t["q"], t["k"], t["v"], attn_mask=mask)

    return run


def plain_attention(t: Mapping[str, torch.Tensor], causal: bool) -> torch.Tensor:
    """Attention as first written, every step in the storage dtype."""
    s = t["q"] @ t["k"].transpose(-1, -2) * t["q"].shape[-1] ** -0.5
    if causal:
        queries, keys = s.shape[-2:]
        s = s.masked_fill(~torch.ones(queries, keys, dtype=torch.bool).tril(max(keys - queries, 0)), -torch.inf)
    return torch.softmax(s, -1) @ t["v"]


def reference_attention(t: Mapping[str, Any], causal: bool) -> Any:
    queries, keys = t["q"].shape[2], t["k"].shape[2]
    return reference.attention(t["q"], t["k"], t["v"], causal=causal, offset=max(keys - queries, 0))


def reference_norm(t: Mapping[str, Any]) -> Any:
    return reference.layer_norm(t["x"], t["weight"], t["bias"])


def nested(t: Mapping[str, Any]) -> dict[str, Any]:
    params: dict[str, Any] = {}
    for path, array in t.items():
        part, _, name = path.partition(".")
        if name:
            params.setdefault(part, {})[name] = array
    return params


def reference_layer(t: Mapping[str, Any], heads: int, norm: str) -> Any:
    return layers.encoder_layer(t["x"], nested(t), heads=heads, norm=norm)


def plain_layer(backend: SDPBackend) -> Callable[..., torch.Tensor]:
    """The layer from torch's functions, in the storage dtype."""

    def run(t: Mapping[str, torch.Tensor], heads: int, norm: str) -> torch.Tensor:
        def normed(x: torch.Tensor, i: int) -> torch.Tensor:
            return F.layer_norm(x, x.shape[-1:], t[f"norm{i}.weight"], t[f"norm{i}.bias"])

        def attended(x: torch.Tensor) -> torch.Tensor:
            q, k, v = (
                (x @ t[f"attention.w{m}"] + t[f"attention.b{m}"]).unflatten(-1, (heads, -1)).transpose(1, 2)
                for m in "qkv"
            )
            with sdpa_kernel(backend):
                out = F.scaled_dot_product_attention(q, k, v)
            return out.transpose(1, 2).flatten(2) @ t["attention.wo"] + t["attention.bo"]

        def inner(x: torch.Tensor) -> torch.Tensor:
            hidden = torch.relu(x @ t["feed_forward.w1"] + t["feed_forward.b1"])
            return hidden @ t["feed_forward.w2"] + t["feed_forward.b2"]

        x = t["x"]
        if norm == "pre":
            x = x + attended(normed(x, 1))
            return x + inner(normed(x, 2))
        x = normed(x + attended(x), 1)
        return normed(x + inner(x), 2)

    return run


def module_layer(training: bool) -> Callable[..., torch.Tensor]:
    """nn.TransformerEncoderLayer with these weights; in eval mode its fused path."""

    def run(t: Mapping[str, torch.Tensor], heads: int, norm: str) -> torch.Tensor:
        d, f = t["feed_forward.w1"].shape
        module = torch.nn.TransformerEncoderLayer(d, heads, f, 0.0, batch_first=True, norm_first=norm == "pre")
        module = module.to(t["x"].dtype).train(training)
        weights = {
            "self_attn.in_proj_weight": torch.cat([t[f"attention.w{m}"].T for m in "qkv"]),
            "self_attn.in_proj_bias": torch.cat([t[f"attention.b{m}"] for m in "qkv"]),
            "self_attn.out_proj.weight": t["attention.wo"].T,
            "self_attn.out_proj.bias": t["attention.bo"],
            **{f"linear{i}.weight": t[f"feed_forward.w{i}"].T for i in (1, 2)},
            **{f"linear{i}.bias": t[f"feed_forward.b{i}"] for i in (1, 2)},
            **{f"norm{i}.{part}": t[f"norm{i}.{part}"] for i in (1, 2) for part in ("weight", "bias")},
        }
        if training:
            return torch.func.functional_call(module, weights, (t["x"],))
        module.load_state_dict(weights)
        with torch.no_grad():
            return module(t["x"])

    return run


def plain_ffn(t: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return torch.relu(t["x"] @ t["w1"] + t["b1"]) @ t["w2"] + t["b2"]


def one_by_one(terms: np.ndarray) -> np.ndarray:
    """The sum over the last axis from the first term to the last, in the dtype of the terms."""
    if not terms.shape[-1]:
        return terms.sum(-1)
    return np.add.accumulate(terms, axis=-1, dtype=terms.dtype)[..., -1]


def sequential_attention(g: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool) -> Any:
    """Attention and its gradients with every sum taken one by one."""
    scale = np.asarray(q.shape[-1] ** -0.5, q.dtype)
    rows, keys, values = q[:, :, :, None], k[:, :, None], v[:, :, None]
    s = one_by_one(rows * keys) * scale
    if causal:
        s = np.where(np.tril(np.ones(s.shape[-2:], bool), max(s.shape[-1] - s.shape[-2], 0)), s, -np.inf)
    e = np.exp(s - s.max(-1, keepdims=True)).astype(q.dtype)
    p = e / one_by_one(e)[..., None]
    weights = p[..., None]
    slope = one_by_one(g[:, :, :, None] * values)
    ds = (p * (slope - one_by_one(p * slope)[..., None]) * scale)[..., None]
    by_key, by_query = (lambda x: one_by_one(np.moveaxis(x, 3, -1))), (lambda x: one_by_one(np.moveaxis(x, 2, -1)))
    return by_key(weights * values), (by_key(ds * keys), by_query(ds * rows), by_query(weights * g[:, :, :, None]))


def sequential_norm(g: np.ndarray, x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> Any:
    """layer_norm and its gradients with every sum taken one by one."""
    n = np.asarray(x.shape[-1], x.dtype)
    c = x - one_by_one(x)[:, None] / n
    s = np.sqrt(one_by_one(c * c)[:, None] / n + np.asarray(1e-5, x.dtype))
    z, gw = c / s, g * weight
    dx = (gw - one_by_one(gw)[:, None] / n - z * (one_by_one(gw * z)[:, None] / n)) / s
    return z * weight + bias, (dx, one_by_one((g * z).T), one_by_one(g.T))


def numpy_kernel(operation: str, module: Any, **fixed: Any) -> Callable[..., Any]:
    """An implementation of ours with its OPERATION_vjp."""
    forward, backward = getattr(module, operation), getattr(module, f"{operation}_vjp")

    def run(g: np.ndarray, *arrays: np.ndarray, causal: bool | None = None) -> Any:
        options = {} if causal is None else {"mask": causal_mask(*arrays[:2])} if causal else {}
        return forward(*arrays, **fixed, **options), backward(g, *arrays, **fixed, **options)

    return run


def causal_mask(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    queries, keys = q.shape[2], k.shape[2]
    return np.tril(np.ones((1, 1, queries, keys), bool), max(keys - queries, 0))


SAVED = {"saved_statistics": "storage"}
FUSED = {"intermediate": "float32"}
EXACT = {"intermediate": "float32", "rounds_probabilities": False, "recomputes_probabilities": False}
NORM = ("d weight", "d bias")
SUBJECTS = (
    Subject("softmax torch", rows, lambda t: reference.softmax(t["x"]), lambda t: F.softmax(t["x"], -1)),
    Subject(
        "log_softmax torch", rows, lambda t: reference.log_softmax(t["x"]), lambda t: F.log_softmax(t["x"], -1), SAVED
    ),
    Subject(
        "logsumexp torch", rows, lambda t: reference.logsumexp(t["x"]), lambda t: torch.logsumexp(t["x"], -1), SAVED
    ),
    Subject(
        "layer_norm torch",
        normed_rows,
        reference_norm,
        lambda t: F.layer_norm(t["x"], t["x"].shape[-1:], t["weight"], t["bias"], 1e-5),
        SAVED,
        known=NORM,
    ),
    Subject(
        "rms_norm torch",
        scaled_rows,
        lambda t: reference.rms_norm(t["x"], t["weight"]),
        lambda t: F.rms_norm(t["x"], t["x"].shape[-1:], t["weight"], 1e-6),
    ),
    Subject("gelu erf torch", rows, lambda t: reference.gelu(t["x"]), lambda t: F.gelu(t["x"])),
    Subject(
        "gelu tanh torch",
        rows,
        lambda t: reference.gelu(t["x"], form="tanh"),
        lambda t: F.gelu(t["x"], approximate="tanh"),
    ),
    Subject(
        "feed_forward torch",
        matrices,
        lambda t: reference.feed_forward(*(t[name] for name in ("x", "w1", "b1", "w2", "b2"))),
        plain_ffn,
    ),
    Subject("attention torch math", heads, reference_attention, sdpa(SDPBackend.MATH), low=EXACT),
    Subject("attention torch flash", heads, reference_attention, sdpa(SDPBackend.FLASH_ATTENTION), low=FUSED),
    Subject("attention torch plain", heads, reference_attention, plain_attention),
    Subject("layer torch math", layer, reference_layer, plain_layer(SDPBackend.MATH), SAVED, known=NORM),
    Subject("layer torch flash", layer, reference_layer, plain_layer(SDPBackend.FLASH_ATTENTION), SAVED, known=NORM),
    Subject("layer torch nn", layer, reference_layer, module_layer(True), SAVED, known=NORM),
    Subject("layer torch nn eval", layer, reference_layer, module_layer(False), SAVED, backward=False),
    Subject(
        "softmax numpy", rows, lambda t: reference.softmax(t["x"]), numpy_kernel("softmax", numpy_plain), numpy=True
    ),
    Subject("layer_norm numpy", normed_rows, reference_norm, numpy_kernel("layer_norm", numpy_plain), numpy=True),
    Subject("layer_norm sequential", normed_rows, reference_norm, sequential_norm, numpy=True),
    Subject("attention numpy", heads, reference_attention, numpy_kernel("attention", numpy_plain), numpy=True),
    Subject("attention sequential", heads, reference_attention, sequential_attention, numpy=True),
)
