"""Contests of those who have NumPy and no torch: attention, norms, softmax and cached decoding on one thread.

Rivals are the formulas as one writes them in NumPy; ONNX Runtime and JAX, which are packages of their own, are shown
beside them, and so are our loops for numba.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from contest import Call, Contest, Maker

from veriformer.impls import numpy_attention, numpy_decoder, numpy_fused, numpy_lean, numpy_plain, numpy_tiled

PLAIN, NUMBA = "plain NumPy", "numba_rows, extra"
HEADS, WIDTH, INNER, LAYERS, VOCABULARY, PROMPT = 8, 256, 1024, 4, 1000, 16


def drawn(*shape: int, seed: int = 0) -> np.ndarray:
    """Normal numbers in float32."""
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def numba_rows(operation: str, *arrays: np.ndarray) -> Maker:
    """Our loops that numba compiles."""

    def make() -> Call:
        from veriformer.impls import numba_rows

        function = getattr(numba_rows, operation)
        return lambda: function(*arrays)

    return make


def jitted(function: Callable[[Any], Callable[..., Any]], *arrays: np.ndarray) -> Maker:
    """A function of jax.numpy, compiled, on arrays of JAX, to its end."""

    def make() -> Call:
        import jax

        compiled, given = jax.jit(function(jax)), [jax.numpy.asarray(array) for array in arrays]
        return lambda: compiled(*given).block_until_ready()

    return make


def onnx(operator: str, outputs: int, arrays: dict[str, np.ndarray], **attributes: Any) -> Maker:
    """A session of ONNX Runtime with one node on one thread, as the manual says."""

    def make() -> Call:
        import onnxruntime
        from onnx import TensorProto, helper

        def info(name: str, shape: Any) -> Any:
            return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)

        node = helper.make_node(operator, list(arrays), [f"y{i}" for i in range(outputs)], **attributes)
        inputs = [info(name, array.shape) for name, array in arrays.items()]
        graph = helper.make_graph([node], operator, inputs, [info("y0", None)])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
        return lambda: session.run(None, arrays)[0]

    return make


def _jax_attention(jax: Any) -> Callable[..., Any]:
    def attention(q: Any, k: Any, v: Any) -> Any:
        found = jax.nn.dot_product_attention(*(a.swapaxes(1, 2) for a in (q, k, v)), is_causal=True)
        return found.swapaxes(1, 2)

    return attention


def _attention(length: int) -> Contest:
    width = 64
    q, k, v = (drawn(1, HEADS, length, width, seed=seed) for seed in range(3))
    return Contest(
        f"numpy-prefill-{length}", f"causal attention, {HEADS} heads of width {width}, {length} tokens, float32",
        ours={"numpy:tiled": lambda: lambda: numpy_tiled.attention(q, k, v, causal=True)},
        others={
            PLAIN: lambda: lambda: numpy_plain.attention(q, k, v, causal=True),
            "onnxruntime, Attention": onnx("Attention", 1, {"q": q, "k": k, "v": v}, is_causal=1),
            "jax.jit, dot_product_attention": jitted(_jax_attention, q, k, v),
        },
        against=PLAIN, flops=2.0 * HEADS * length**2 * width, bytes=16.0 * HEADS * length * width,
        note=f"{PLAIN}: numpy:plain, the whole matrix of scores at once.",
    )  # fmt: skip


def _jax_norm(jax: Any) -> Callable[..., Any]:
    def layer_norm(x: Any, weight: Any, bias: Any) -> Any:
        centred = x - x.mean(-1, keepdims=True)
        return weight * centred * jax.lax.rsqrt((centred * centred).mean(-1, keepdims=True) + 1e-5) + bias

    return layer_norm


def _layer_norm(rows: int, width: int) -> Contest:
    x, weight, bias = drawn(rows, width), 1 + drawn(width, seed=1) / 4, drawn(width, seed=2) / 4
    return Contest(
        f"numpy-layer-norm-{rows}x{width}", f"layer norm of {rows} rows of {width}, float32",
        ours={
            "numpy:fused": lambda: lambda: numpy_fused.layer_norm(x, weight, bias),
            NUMBA: numba_rows("layer_norm", x, weight, bias),
        },
        others={
            PLAIN: lambda: lambda: numpy_plain.layer_norm(x, weight, bias),
            "onnxruntime": onnx("LayerNormalization", 1, {"x": x, "weight": weight, "bias": bias}, epsilon=1e-5),
            "jax.jit": jitted(_jax_norm, x, weight, bias),
        },
        against=PLAIN, limits={"numpy:fused": (1.0, PLAIN)}, flops=8.0 * rows * width, bytes=8.0 * rows * width,
    )  # fmt: skip


def _softmax(rows: int, width: int) -> Contest:
    x = drawn(rows, width)
    return Contest(
        f"numpy-softmax-{rows}x{width}", f"softmax of {rows} rows of {width}, float32",
        ours={"numpy:fused": lambda: lambda: numpy_fused.softmax(x)},
        others={
            PLAIN: lambda: lambda: numpy_plain.softmax(x),
            "onnxruntime": onnx("Softmax", 1, {"x": x}, axis=-1),
            "jax.jit": jitted(lambda jax: jax.nn.softmax, x),
        },
        against=PLAIN, flops=5.0 * rows * width, bytes=8.0 * rows * width,
    )  # fmt: skip


def _step(length: int) -> Contest:
    width, copied = 64, "numpy:attention, which copies the caches"
    new = [drawn(1, HEADS, 1, width, seed=seed) for seed in range(3)]
    caches = [drawn(1, HEADS, length + 64, width, seed=seed) for seed in (3, 4)]
    arrays = (*new, *caches, np.array([length]))
    return Contest(
        f"numpy-cached-step-{length}", f"one token behind {length} and its attention, {HEADS} heads of width {width}",
        ours={
            "numpy:tiled": lambda: lambda: numpy_tiled.cached_attention(*arrays),
            NUMBA: numba_rows("cached_attention", *arrays),
        },
        others={copied: lambda: lambda: numpy_attention.cached_attention(*arrays)},
        limits={"numpy:tiled": (1.0, copied)}, flops=4.0 * HEADS * width * length, bytes=8.0 * HEADS * width * length,
    )  # fmt: skip


def _weights() -> dict[str, Any]:
    """Of a decoder-only model with rms norms and without biases."""
    rng = np.random.default_rng(0)

    def linear(rows: int, columns: int) -> np.ndarray:
        return rng.standard_normal((rows, columns), np.float32) * np.float32(rows**-0.5)

    def gain() -> dict[str, np.ndarray]:
        return {"weight": 1 + rng.standard_normal(WIDTH, np.float32) / 8}

    def layer() -> dict[str, Any]:
        return {
            "attention": {f"w{name}": linear(WIDTH, WIDTH) for name in "qkvo"},
            "norm1": gain(),
            "feed_forward": {"w1": linear(WIDTH, INNER), "w2": linear(INNER, WIDTH)},
            "norm2": gain(),
        }

    layers = [layer() for _ in range(LAYERS)]
    table = rng.standard_normal((VOCABULARY, WIDTH), np.float32)
    return {"embedding": table, "layers": layers, "norm": gain(), "head": {"w": linear(WIDTH, VOCABULARY)}}


def _generated(model: Any, prompt: np.ndarray, count: int) -> Call:
    """The likeliest token, one at a time."""

    def call() -> np.ndarray:
        logits, cache = model.step(prompt, None)
        found = [logits[:, -1:].argmax(2)]
        for _ in range(count - 1):
            logits, cache = model.step(found[-1], cache)
            found.append(logits.argmax(2))
        return np.concatenate(found, 1)

    return call


def _decoding(batch: int, count: int) -> Contest:
    weights, prompt = _weights(), np.random.default_rng(1).integers(0, VOCABULARY, (batch, PROMPT))
    numbers = LAYERS * (4 * WIDTH**2 + 2 * WIDTH * INNER) + WIDTH * VOCABULARY
    static = numpy_decoder.VARIANTS["decoder_static"]["decoder_lm"]
    return Contest(
        f"numpy-generate-{count}-batch-{batch}",
        f"greedy generation of {count} tokens after {PROMPT}, batch {batch}, {LAYERS} layers, d {WIDTH}, f {INNER}, "
        f"{HEADS} heads, float32; tokens identical",
        ours={"numpy:lean": lambda: _generated(numpy_lean.decoder_lm(weights, heads=HEADS), prompt, count)},
        others={"numpy:decoder_static": lambda: _generated(static(weights, heads=HEADS), prompt, count)},
        tolerance=0.5 / VOCABULARY, calls=1, flops=2.0 * batch * count * numbers, bytes=4.0 * count * numbers,
        note="The floor is that of reading the weights for each token, or of multiplying with them.",
    )  # fmt: skip


CONTESTS = [
    _attention(256),
    _attention(1024),
    _layer_norm(2048, 1024),
    _softmax(2048, 1024),
    _step(1024),
    _decoding(1, 128),
    _decoding(8, 128),
]
