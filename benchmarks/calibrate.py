"""How much of their perturbation budget correct implementations use: `python benchmarks/calibrate.py`.

Each implementation runs forward and backward on adversarial data in every dtype, under the Precision it
should declare. A line of the table is one quantity of one implementation in one dtype:

    cases       how many were judged
    median, p99, max        of the largest ratio error / budget of each case; above 1 a correct kernel is accused
    factor      the smallest factor (`veriformer.budgets.perturbation`) that would have let all cases pass
    open        share of elements with an infinite budget
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from veriformer import reference
from veriformer.budgets import Bound, Precision, error_ratio
from veriformer.budgets.perturbation import perturbed
from veriformer.case import round_to
from veriformer.declarations import DTYPES
from veriformer.properties.families import FAMILIES, fill
from veriformer.reference import layers

Arrays = dict[str, np.ndarray]
LOW = ("bfloat16", "float16")


@dataclass(frozen=True)
class Subject:
    """One implementation: the reference and the kernel, both on a mapping of tensors, and data for them.

    shapes: sizes of the arrays from a generator and options. precision: what it declares. families: of
    which data. backward: whether it has gradients in that form.
    """

    name: str
    shapes: Callable[[np.random.Generator], tuple[dict[str, tuple[int, ...]], dict[str, Any]]]
    reference: Callable[..., Any]
    kernel: Callable[..., Any]
    precision: Mapping[str, Any] = field(default_factory=dict)
    dtypes: tuple[str, ...] = DTYPES
    backward: bool = True
    scale: Callable[[str, np.ndarray, float], np.ndarray] = lambda name, values, size: values


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
    h = int(rng.choice([1, 2, 4]))
    d, f = h * int(rng.choice([2, 4, 8])), int(rng.choice([8, 24, 48]))
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


SAVED = {"saved_statistics": "storage"}
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
        lambda t: reference.layer_norm(t["x"], t["weight"], t["bias"]),
        lambda t: F.layer_norm(t["x"], t["x"].shape[-1:], t["weight"], t["bias"], 1e-5),
        SAVED,
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
    Subject("attention torch math", heads, reference_attention, sdpa(SDPBackend.MATH)),
    Subject("attention torch flash", heads, reference_attention, sdpa(SDPBackend.FLASH_ATTENTION)),
    Subject("attention torch plain", heads, reference_attention, plain_attention),
    Subject("layer torch plain math", layer, reference_layer, plain_layer(SDPBackend.MATH), SAVED),
    Subject("layer torch plain flash", layer, reference_layer, plain_layer(SDPBackend.FLASH_ATTENTION), SAVED),
    Subject("layer torch nn", layer, reference_layer, module_layer(True), SAVED),
    Subject("layer torch nn eval", layer, reference_layer, module_layer(False), SAVED, backward=False),
)


# --- judging --------------------------------------------------------------------------------------


def measured(
    subject: Subject, dtype: str, seed: int, **changes: Any
) -> Iterator[tuple[str, np.ndarray, Bound, Precision]]:
    """Each quantity of one case: its name, what the kernel gave, its bound and precision."""
    rng = np.random.default_rng([seed, *subject.name.encode()])
    arrays, options = draw(subject, rng, dtype)
    precision = Precision(dtype, **{**subject.precision, **changes})
    native = {
        name: torch.from_numpy(array).to(getattr(torch, dtype)).requires_grad_(subject.backward)
        for name, array in arrays.items()
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        y = subject.kernel(native, **options)
    given = cotangent(rng, tuple(y.shape), dtype)
    wrt = tuple(arrays) if subject.backward else ()
    (bound,), gradients = perturbed(
        lambda t: subject.reference(t, **options), arrays, precision, cotangents=[given], wrt=wrt
    )
    yield "out", plain(y), bound, precision
    if wrt:
        found = torch.autograd.grad(y, list(native.values()), torch.from_numpy(given).to(y.dtype))
        for name, gradient in zip(wrt, found, strict=True):
            yield f"d {name.rpartition('.')[2] if '.' in name else name}", plain(gradient), gradients[name], precision


def plain(t: torch.Tensor) -> np.ndarray:
    return t.detach().to(torch.float64).numpy()


def factor_needed(computed: np.ndarray, bound: Bound, factor: float) -> float:
    """The factor at which the worst element would have passed."""
    with np.errstate(all="ignore"):
        excess = np.abs(computed - bound.value) - bound.terms["output"]
        needed = np.where(excess > 0, excess * factor / bound.terms["roundings"], 0.0)
    judged = np.isfinite(bound.allowed) & np.isfinite(bound.value) & np.isfinite(computed)
    return float(np.where(judged, needed, 0.0).max(initial=0.0))


def table(seeds: range, only: str, dtypes: tuple[str, ...], factor: float = 4.0, **changes: Any) -> list[str]:
    """The lines of the table."""
    lines = [f"{'':44}{'cases':>7}{'median':>9}{'p99':>9}{'max':>9}{'factor':>9}{'open':>8}"]
    for subject in SUBJECTS:
        if only not in subject.name:
            continue
        for dtype in (d for d in dtypes if d in subject.dtypes):
            found: dict[str, list[tuple[float, float, float]]] = {}
            for seed in seeds:
                for name, computed, bound, p in measured(subject, dtype, seed, **changes):
                    ratio = error_ratio(computed, bound.value, bound.allowed, p.largest).max(initial=0.0)
                    share = float(np.isposinf(bound.allowed).mean()) if bound.allowed.size else 0.0
                    found.setdefault(name, []).append((float(ratio), factor_needed(computed, bound, factor), share))
            for name, values in found.items():
                ratios, factors, shares = (np.array(column) for column in zip(*values, strict=True))
                lines.append(
                    f"{subject.name:24}{dtype:9} {name:10}{len(ratios):7}{np.median(ratios):9.3f}"
                    f"{np.quantile(ratios, 0.99):9.3f}{ratios.max():9.3g}{factors.max():9.3g}{shares.mean():8.3f}"
                )
                print(lines[-1], flush=True)
    return lines


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", metavar="FILE", help="write the table here too")
    parser.add_argument("--seeds", type=int, default=40, help="cases of each implementation and dtype")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--only", default="", metavar="NAME", help="implementations whose name contains this")
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    given = parser.parse_args()
    torch.set_num_threads(1)
    lines = table(range(given.first, given.first + given.seeds), given.only, tuple(given.dtypes.split(",")))
    if given.table:
        with open(given.table, "w", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
