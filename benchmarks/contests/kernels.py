"""Contests of single kernels: softmax, layer norm, attention of a whole prompt and of one query.

Ours call torch's kernels, for nothing that torch compiles or offers besides is faster; what is judged is that
nobody else's is, and that our way to them costs next to nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from contest import Call, Contest, Maker
from torch import Tensor

SHAPES = ((128, 512), (2048, 1024), (4096, 512))
"""Rows and their width."""
HEADS, WIDTH = 8, 64
COMPILED, JAX, ORT = "torch.compile, naive", "JAX jit", "ONNX Runtime"


def _ours(module: str, operation: str, variant: str = "") -> Callable[..., Any]:
    """A function of ours, imported when it is asked for."""
    import importlib

    loaded = importlib.import_module(f"veriformer.impls.{module}")
    found: Callable[..., Any] = loaded.VARIANTS[variant][operation] if variant else getattr(loaded, operation)
    return found


def _forward(get: Callable[[], Callable[..., Tensor]], *arrays: Tensor) -> Maker:
    """Maker of a call that computes a function of torch in inference mode."""

    def make() -> Call:
        function = get()

        def call() -> Any:
            with torch.inference_mode():
                return function(*arrays)

        return call

    return make


def _training(get: Callable[[], Callable[..., Tensor]], *arrays: Tensor) -> Maker:
    """Maker of a call that computes a function of torch and the gradients of all its arrays."""

    def make() -> Call:
        function = get()
        given = [array.clone().requires_grad_() for array in arrays]
        cotangent = _normal(*function(*given).shape, seed=1)
        return lambda: torch.autograd.grad(function(*given), given, cotangent)

    return make


def _compiled(function: Callable[..., Tensor]) -> Callable[[], Callable[..., Tensor]]:
    return lambda: torch.compile(function, dynamic=False)


def _jax(get: Callable[[], Callable[..., Any]], *arrays: Tensor, training: bool = False) -> Maker:
    """The same two in JAX."""

    def make() -> Call:
        import jax

        function = get()
        given = [jax.numpy.asarray(array.numpy()) for array in arrays]
        if not training:
            forward = jax.jit(function)
            return lambda: jax.block_until_ready(forward(*given))
        shape = jax.eval_shape(function, *given).shape
        cotangent = jax.numpy.asarray(_normal(*shape, seed=1).numpy())
        backward = jax.jit(lambda g, *xs: jax.vjp(function, *xs)[1](g))
        return lambda: jax.block_until_ready(backward(cotangent, *given))

    return make


def _onnx(operator: str, arrays: Mapping[str, Tensor], attributes: Mapping[str, Any], domain: str = "") -> Maker:
    """Maker of a run of one operator by ONNX Runtime on one thread."""

    def make() -> Call:
        import onnx
        import onnxruntime

        def value(name: str) -> Any:
            return onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None)

        node = onnx.helper.make_node(operator, list(arrays), ["out"], domain=domain, **attributes)
        graph = onnx.helper.make_graph([node], "one", [value(name) for name in arrays], [value("out")])
        versions = [onnx.helper.make_opsetid("", 23), onnx.helper.make_opsetid("com.microsoft", 1)]
        model = onnx.helper.make_model(graph, opset_imports=versions, ir_version=11)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        feed = {name: np.ascontiguousarray(array.numpy()) for name, array in arrays.items()}
        return lambda: session.run(None, feed)[0]

    return make


def _normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------- rows


def _naive_softmax(x: Tensor) -> Tensor:
    e = torch.exp(x - x.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)


def _naive_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    off = x - x.mean(-1, keepdim=True)
    return weight * off * torch.rsqrt((off * off).mean(-1, keepdim=True) + 1e-5) + bias


def _torch_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias)


def _jax_softmax() -> Callable[..., Any]:
    import jax

    return lambda x: jax.nn.softmax(x, axis=-1)


def _jax_norm() -> Callable[..., Any]:
    import jax

    def norm(x: Any, weight: Any, bias: Any) -> Any:
        off = x - x.mean(-1, keepdims=True)
        return weight * off * jax.lax.rsqrt((off * off).mean(-1, keepdims=True) + 1e-5) + bias

    return norm


def _rows(rows: int, width: int, norm: bool, training: bool) -> Contest:
    """Softmax or layer norm of rows, alone or with its gradients."""
    x, weight, bias = _normal(rows, width), 1 + _normal(width, seed=2) / 4, _normal(width, seed=3) / 4
    arrays = (x, weight, bias) if norm else (x,)
    name, plain = ("layer_norm", _torch_norm) if norm else ("softmax", F.softmax)
    timed = _training if training else _forward
    others = {
        f"torch, F.{name}": timed(lambda: plain if norm else (lambda x: F.softmax(x, -1)), *arrays),
        COMPILED: timed(_compiled(_naive_norm if norm else _naive_softmax), *arrays),
        JAX: _jax(_jax_norm if norm else _jax_softmax, *arrays, training=training),
    }
    if not training:
        named = dict(zip(("x", "weight", "bias"), arrays, strict=False))
        others[ORT] = _onnx("LayerNormalization" if norm else "Softmax", named, {"axis": -1})
    direction, passes, work = ("training", 5, 22 if norm else 9) if training else ("forward", 2, 8 if norm else 5)
    return Contest(
        f"{name.replace('_', '-')}-{direction}-{rows}x{width}",
        f"{name} of {rows} rows of {width}{' and its gradients' * training}, float32",
        ours={"torch:functional": timed(lambda: _ours("torch_functional", name), *arrays)}, others=others,
        limit=1.05, flops=work * rows * width, bytes=4 * passes * rows * width,
    )  # fmt: skip


# ----------------------------------------------------------- attention


def _naive_attention(causal: bool) -> Callable[..., Tensor]:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT * q.shape[-1] ** -0.5
        if causal:
            seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
            scores = scores.masked_fill(~seen, -torch.inf)
        return scores.softmax(-1) @ v

    return attention


def _jax_attention(causal: bool) -> Callable[[], Callable[..., Any]]:
    def get() -> Callable[..., Any]:
        import jax

        def attention(q: Any, k: Any, v: Any) -> Any:
            q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
            return jax.nn.dot_product_attention(q, k, v, is_causal=causal).swapaxes(1, 2)

        return attention

    return get


def _contrib_attention(arrays: Mapping[str, Tensor], causal: bool) -> Maker:
    """ONNX Runtime's own operator, whose heads lie side by side; that layout is not paid for here."""
    names = {"q": "query", "k": "key", "v": "value"}
    packed = {names[name]: array.transpose(1, 2).flatten(2) for name, array in arrays.items()}
    attributes = {"num_heads": HEADS, "unidirectional": int(causal)}

    def make() -> Call:
        run = _onnx("MultiHeadAttention", packed, attributes, "com.microsoft")()
        queries = packed["query"].shape[1]
        return lambda: run().reshape(1, queries, HEADS, WIDTH).swapaxes(1, 2)

    return make


def _attention(kind: str, queries: int, keys: int, training: bool = False) -> Contest:
    """Attention of B1 H8 D64: causal where there are as many queries as keys."""
    q, k, v = (_normal(1, HEADS, length, WIDTH, seed=i) for i, length in enumerate((queries, keys, keys)))
    causal, timed, named = queries == keys, _training if training else _forward, {"q": q, "k": k, "v": v}

    def ours(variant: str) -> Callable[[], Callable[..., Tensor]]:
        def get() -> Callable[..., Tensor]:
            attention = _ours("torch_sdpa", "attention", variant)
            return lambda q, k, v: attention(q, k, v, causal=causal)

        return get

    others = {
        "torch, SDPA": timed(
            lambda: lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal), q, k, v
        ),
        COMPILED: timed(_compiled(_naive_attention(causal)), q, k, v),
        JAX: _jax(_jax_attention(causal), q, k, v, training=training),
    }
    if not training:
        others[f"{ORT}, Attention"] = _onnx("Attention", named, {"is_causal": int(causal)})
        others[f"{ORT}, MultiHeadAttention"] = _contrib_attention(named, causal)
    pairs = HEADS * (queries * (queries + 1) / 2 if causal else queries * keys)
    return Contest(
        f"attention-{kind}-{keys}",
        f"{queries} queries over {keys} keys, B1 H{HEADS} D{WIDTH}{', causal' * causal}"
        f"{', and gradients' * training}, float32",
        ours={f"torch:{variant}": timed(ours(variant), q, k, v) for variant in ("default", "flash")}, others=others,
        flops=pairs * (4 * WIDTH + 5) * (3.5 if training else 1),
        bytes=8 * HEADS * WIDTH * (queries + keys) * (3 if training else 1),
    )  # fmt: skip


CONTESTS = [
    *(_rows(*shape, norm, training) for norm in (False, True) for training in (False, True) for shape in SHAPES),
    _attention("prefill", 256, 256),
    _attention("prefill", 1024, 1024),
    _attention("training", 256, 256, training=True),
    *(_attention("decode", 1, length) for length in (512, 2048, 8192)),
]
