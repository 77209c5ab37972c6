"""What accuracy is taken of: frozen small inputs for each operation, forward and gradients, and who is judged.

Small, because the budgets of composites and of gradients come from evaluating the reference many times over. What is
timed (`workloads`) has inputs of its own, at which its results are judged too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .implementations import IMPLEMENTATIONS
from .workloads import Arrays, Workload, layer, linear, normal, rows

DTYPES = ("float64", "float32", "bfloat16", "float16")
"""Every dtype that is judged, forward."""
GRADIENT_DTYPES = ("float32", "bfloat16")
"""Those whose gradients are judged: the usual one, and that of the largest errors."""
SEEDS = (0, 1, 2)
"""Of each operation the worst of so many inputs counts."""
ACCURACY_ONLY: dict[str, tuple[str, ...]] = {
    "log_softmax": ("numpy:plain", "numpy:blocked", "torch:functional"),
    "logsumexp": ("numpy:plain", "numpy:blocked", "torch:functional"),
    "rms_norm": ("numpy:fused", "numpy:rows", "torch:rows"),
    "gelu": ("numpy:rows", "torch:rows"),
    "feed_forward": ("numpy:rows", "torch:rows"),
    "rotary_embedding": (
        "numpy:positions", "numpy:positions_complex",
        "torch:positions", "torch:positions_complex", "torch:positions_stored",
    ),
    "attention": ("numpy:blocked",),
    "multi_head_attention": (
        "numpy:attention",
        "torch:attention", "torch:packed", "torch:train", "torch:weights", "torch:fast", "torch:fast_weights",
    ),
    "varlen_attention": ("numpy:attention", "torch:attention", "torch:one_call", "torch:nested"),
    "cross_entropy": ("numpy:loss_streamed",),
    "next_token_probabilities": ("numpy:generation", "torch:generation"),
    "adaptive_computation_time": (
        "numpy:act", "numpy:act_by_position", "torch:act", "torch:act_masked", "torch:act_compacted",
    ),
}  # fmt: skip
"""Who is judged and not timed."""


FORWARD_ONLY = {
    ("numpy:blocked", "softmax"), ("numpy:blocked", "layer_norm"), ("numpy:blocked", "attention"),
    ("numpy:attention", "attention"), ("torch:fast", "multi_head_attention"),
    ("torch:fast_weights", "multi_head_attention"),
    ("numpy:transformer", "encoder_layer"), ("numpy:transformer", "decoder_layer"),
    ("torch:transformer_fast", "encoder_layer"), ("torch:transformer_fast", "decoder_layer"),
}  # fmt: skip
"""Who has no gradients."""


def judged_at(one: Workload) -> tuple[str, ...]:
    """The names of all implementations whose accuracy is taken on an operation's inputs."""
    names = (*IMPLEMENTATIONS.get(one.operation, ()), *ACCURACY_ONLY.get(one.operation, ()))
    return tuple(name for name in names if one.direction != "backward" or (name, one.operation) not in FORWARD_ONLY)


WIDTH, HEADS, INNER, VOCABULARY = 32, 4, 64, 40
"""Sizes of layers and models."""


def subject(
    operation: str, draw: Callable[[np.random.Generator], Arrays], direction: str = "forward", prompt: int = 0,
    length: int = 0, **keywords: Any,
) -> Workload:  # fmt: skip
    """Inputs of an operation; neither time nor arithmetic is of interest."""
    name = f"accuracy-{operation}-{direction}"
    return Workload(name, operation, draw, 0.0, 0.0, keywords, direction, prompt=prompt, length=length)


def rms_inputs(rng: np.random.Generator) -> Arrays:
    """Rows and a weight."""
    return {name: array for name, array in rows(rng, 16, 256).items() if name != "bias"}


def feed_forward_inputs(rng: np.random.Generator) -> Arrays:
    """Tokens, two matrices and their biases."""
    found = {"x": rng.standard_normal((16, WIDTH))}
    for name, shape in {"1": (WIDTH, INNER), "2": (INNER, WIDTH)}.items():
        found |= {f"w{name}": linear(rng, *shape), f"b{name}": rng.standard_normal(shape[1]) / 8}
    return found


def rotary_inputs(rng: np.random.Generator) -> Arrays:
    """Tokens at positions up to some thousands, where angles are large."""
    return {"x": rng.standard_normal((2, 3, 16, 32)), "positions": np.sort(rng.integers(0, 4000, 16))}


def heads_inputs(rng: np.random.Generator) -> Arrays:
    """Tokens, a memory and the weights of attention by heads."""
    found = {"x": rng.standard_normal((2, 12, WIDTH)), "memory": rng.standard_normal((2, 9, WIDTH))}
    for name in "qkvo":
        found |= {f"params.w{name}": linear(rng, WIDTH, WIDTH), f"params.b{name}": rng.standard_normal(WIDTH) / 8}
    return found


def varlen_inputs(rng: np.random.Generator) -> Arrays:
    """Three packed sequences of 9, 1 and 14 queries over 11, 6 and 14 keys."""
    q = rng.standard_normal((24, 4, 16))
    k, v = (rng.standard_normal((31, 4, 16)) for _ in range(2))
    return {"q": q, "k": k, "v": v, "q_offsets": np.array([0, 9, 10, 24]), "k_offsets": np.array([0, 11, 17, 31])}


def cached_inputs(rng: np.random.Generator) -> Arrays:
    """Two new tokens of each of two sequences, and caches with room for 48."""
    found = {name: rng.standard_normal((2, 2, 2, 32)) for name in ("q", "k_new", "v_new")}
    found |= {name: rng.standard_normal((2, 2, 48, 32)) for name in ("k_cache", "v_cache")}
    return {**found, "lengths": np.array([40, 17])}


def encoder_inputs(rng: np.random.Generator) -> Arrays:
    """Tokens and the weights of an encoder layer."""
    return {"x": rng.standard_normal((2, 12, WIDTH)), **layer(rng, "params.", WIDTH, INNER)}


def decoder_inputs(rng: np.random.Generator) -> Arrays:
    """Tokens, a memory and the weights of a decoder layer."""
    x, memory = (rng.standard_normal((2, length, WIDTH)) for length in (12, 9))
    return {"x": x, "memory": memory, **layer(rng, "params.", WIDTH, INNER, cross=True)}


def model_inputs(rng: np.random.Generator) -> Arrays:
    """Tokens and the weights of a decoder-only model of two layers."""
    found: Arrays = {"tokens": rng.integers(0, VOCABULARY, (1, 12))}
    found["params.embedding"] = rng.standard_normal((VOCABULARY, WIDTH))
    for i in range(2):
        found |= layer(rng, f"params.layers.{i}.", WIDTH, INNER)
    return {**found, "params.head.w": linear(rng, WIDTH, VOCABULARY)}


def universal_inputs(rng: np.random.Generator) -> Arrays:
    """Tokens and the weights of a Universal Transformer whose positions halt at the third step, as no rounding changes.

    Each step adds about 0.4, so that sums are far from 1 - epsilon in any dtype: else nothing could be judged.
    """
    halting = {"params.halt.w": linear(rng, WIDTH, 1) / 16, "params.halt.b": np.array([-0.4])}
    return {"x": rng.standard_normal((2, 8, WIDTH)), **layer(rng, "params.layer.", WIDTH, INNER), **halting}


def loss_inputs(rng: np.random.Generator) -> Arrays:
    """Logits of 24 tokens over 200 classes."""
    return {"logits": rng.standard_normal((24, 200)) * 2, "targets": rng.integers(0, 200, 24)}


def optimizer_inputs(rng: np.random.Generator) -> Arrays:
    """A parameter, its gradient and both moments after a hundred steps."""
    param, grad, m = (rng.standard_normal((32, 32)) for _ in range(3))
    return {"param": param, "grad": grad, "m": m / 10, "v": rng.random((32, 32)) / 10}


def logits_inputs(rng: np.random.Generator) -> Arrays:
    """Logits of 12 tokens over 100 words."""
    return {"logits": rng.standard_normal((12, 100)) * 2}


def halting_inputs(rng: np.random.Generator) -> Arrays:
    """Halting probabilities and states of eight positions, at most six steps."""
    return {"halting": rng.uniform(0.05, 0.6, (8, 6)), "states": rng.standard_normal((8, 6, 16))}


ATTENTION = normal(q=(1, 2, 48, 32), k=(1, 2, 48, 32), v=(1, 2, 48, 32))
SMOOTHING, STEPS = 0.1, 6

FORWARD: tuple[Workload, ...] = (
    subject("softmax", normal(x=(32, 256))),
    subject("log_softmax", normal(x=(32, 256))),
    subject("logsumexp", normal(x=(32, 256))),
    subject("layer_norm", lambda rng: rows(rng, 16, 256)),
    subject("rms_norm", rms_inputs),
    subject("gelu", lambda rng: {"x": rng.standard_normal((32, 64)) * 2}),
    subject("feed_forward", feed_forward_inputs),
    subject("rotary_embedding", rotary_inputs),
    subject("attention", ATTENTION, causal=True),
    subject("varlen_attention", varlen_inputs),
    subject("cached_attention", cached_inputs),
    subject("multi_head_attention", heads_inputs, heads=HEADS),
    subject("encoder_layer", encoder_inputs, heads=HEADS),
    subject("decoder_layer", decoder_inputs, heads=HEADS),
    subject("decoder_lm", model_inputs, "generation", prompt=4, length=12, heads=HEADS),
    subject("universal_transformer", universal_inputs, heads=HEADS, max_steps=STEPS),
    subject("cross_entropy", loss_inputs, label_smoothing=SMOOTHING),
    subject("adamw_step", optimizer_inputs, step=100, lr=1e-3, beta2=0.98, eps=1e-9, weight_decay=0.01),
    subject("next_token_probabilities", logits_inputs, temperature=0.8, top_k=30, top_p=0.9),
    subject("adaptive_computation_time", halting_inputs),
)
"""Results are judged, of models the logits of every step."""
BACKWARD: tuple[Workload, ...] = (
    subject("softmax", normal(x=(16, 64)), "backward"),
    subject("layer_norm", lambda rng: rows(rng, 8, 64), "backward"),
    subject("rms_norm", lambda rng: {n: a for n, a in rows(rng, 8, 64).items() if n != "bias"}, "backward"),
    subject("gelu", normal(x=(16, 64)), "backward"),
    subject("feed_forward", feed_forward_inputs, "backward"),
    subject("attention", normal(q=(1, 2, 16, 16), k=(1, 2, 16, 16), v=(1, 2, 16, 16)), "backward", causal=True),
    subject("multi_head_attention", heads_inputs, "backward", heads=HEADS),
    subject("encoder_layer", encoder_inputs, "backward", heads=HEADS),
    subject("decoder_layer", decoder_inputs, "backward", heads=HEADS),
    subject("cross_entropy", loss_inputs, "backward", label_smoothing=SMOOTHING),
)
"""Gradients of all arrays are judged."""
