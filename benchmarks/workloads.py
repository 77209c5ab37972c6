"""What is timed: frozen workloads, each an operation with sizes, inputs, least arithmetic and least memory traffic.

No timing, no framework, nothing of the package under test: only NumPy. Names of arrays and keywords are those of
the package's calling conventions (`veriformer list OPERATION`), weights have dotted names. Both front ends, asv's
suites and the pytest-benchmark suite, are made of WORKLOADS. FLOPs count a multiplication and an addition as two;
bytes are what must be read and written once if nothing is kept in caches (kernel folklore; the roofline's two axes,
Williams et al. 2009).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]
SIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number."""
HALTING_STEPS = 6


@dataclass(frozen=True)
class Workload:
    """One thing to time.

    direction: "forward", "backward" (vector-Jacobian product; by autograd the forward is done before, a function
    OPERATION_vjp does what it needs of it itself), "training" (both),
    "generation" (greedy, one step a token) or "generation-uncached" (greedy, the whole for each token).
    flops: least arithmetic. numbers: how many of the dtype must be read or written at least. draw: float64 arrays
    by name, from a generator of random numbers. prompt, length: of a generation.
    """

    id: str
    operation: str
    draw: Callable[[np.random.Generator], Arrays]
    flops: float
    numbers: float
    keywords: Mapping[str, Any] = field(default_factory=dict)
    direction: str = "forward"
    dtype: str = "float32"
    sizes: str = ""
    prompt: int = 0
    length: int = 0

    @property
    def bytes(self) -> float:
        """Bytes that must be read or written at least."""
        return self.numbers * SIZES[self.dtype]

    def arrays(self, seed: int) -> Arrays:
        """The inputs of a seed, float64, the same ones on every machine and in every version of the package."""
        return self.draw(np.random.default_rng([seed, *self.id.encode()]))


def normal(**shapes: tuple[int, ...]) -> Callable[[np.random.Generator], Arrays]:
    """Inputs of normal numbers."""
    return lambda rng: {name: rng.standard_normal(shape) for name, shape in shapes.items()}


def rows(rng: np.random.Generator, count: int, width: int) -> Arrays:
    """Rows for a norm, with a weight and a bias."""
    x = rng.standard_normal((count, width)) * 3 + 1
    return {"x": x, "weight": 1 + rng.standard_normal(width) / 4, "bias": rng.standard_normal(width) / 4}


def linear(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """A matrix that keeps the size of what it multiplies."""
    matrix: np.ndarray = rng.standard_normal((rows, columns)) * rows**-0.5
    return matrix


def layer(rng: np.random.Generator, prefix: str, width: int, inner: int, cross: bool = False) -> Arrays:
    """The weights of an encoder layer, or with cross of a decoder layer; [in, out]."""
    found: Arrays = {}
    for part in ("attention", "cross_attention") if cross else ("attention",):
        for name in "qkvo":
            found[f"{prefix}{part}.w{name}"] = linear(rng, width, width)
            found[f"{prefix}{part}.b{name}"] = rng.standard_normal(width) / 8
    for name, shape in {"1": (width, inner), "2": (inner, width)}.items():
        found[f"{prefix}feed_forward.w{name}"] = linear(rng, *shape)
        found[f"{prefix}feed_forward.b{name}"] = rng.standard_normal(shape[1]) / 8
    for i in range(3 if cross else 2):
        found[f"{prefix}norm{i + 1}.weight"] = 1 + rng.standard_normal(width) / 8
        found[f"{prefix}norm{i + 1}.bias"] = rng.standard_normal(width) / 8
    return found


BATCH, LENGTH, WIDTH, HEADS, INNER = 2, 32, 128, 4, 512
"""Sizes of the layers: about a millisecond of one core forward."""
DEPTH, VOCABULARY, MODEL, FEED, PROMPT, TOKENS = 2, 64, 64, 128, 4, 20
"""Sizes of the model that generates: TOKENS is the length with the prompt."""


def encoder_inputs(rng: np.random.Generator) -> Arrays:
    """Tokens and the weights of an encoder layer."""
    return {"x": rng.standard_normal((BATCH, LENGTH, WIDTH)), **layer(rng, "params.", WIDTH, INNER)}


def decoder_inputs(rng: np.random.Generator) -> Arrays:
    """Tokens, a memory and the weights of a decoder layer."""
    x, memory = (rng.standard_normal((BATCH, LENGTH, WIDTH)) for _ in range(2))
    return {"x": x, "memory": memory, **layer(rng, "params.", WIDTH, INNER, cross=True)}


def model_inputs(rng: np.random.Generator) -> Arrays:
    """Tokens (of which the first PROMPT are the prompt) and the weights of a decoder-only model."""
    found = {
        "tokens": rng.integers(0, VOCABULARY, (1, TOKENS)),
        "params.embedding": rng.standard_normal((VOCABULARY, MODEL)),
    }
    for i in range(DEPTH):
        found |= layer(rng, f"params.layers.{i}.", MODEL, FEED)
    return {**found, "params.head.w": linear(rng, MODEL, VOCABULARY)}


def universal_inputs(rng: np.random.Generator) -> Arrays:
    """Tokens and the weights of a Universal Transformer whose positions halt after two to five steps."""
    halting = {"params.halt.w": linear(rng, MODEL, 1) / 2, "params.halt.b": np.array([-0.8])}
    return {"x": rng.standard_normal((BATCH, 16, MODEL)), **layer(rng, "params.layer.", MODEL, FEED), **halting}


def optimizer_inputs(rng: np.random.Generator) -> Arrays:
    """A parameter, its gradient and both moments after a hundred steps."""
    param, grad, m = (rng.standard_normal((256, 256)) for _ in range(3))
    return {"param": param, "grad": grad, "m": m / 10, "v": rng.random((256, 256)) / 10}


def append_inputs(rng: np.random.Generator) -> Arrays:
    """One new token of eight heads and a cache with room for 1024, of which 700 are taken."""
    one, cache = (1, 8, 1, 64), (1, 8, 1024, 64)
    found = {name: rng.standard_normal(one) for name in ("q", "k_new", "v_new")}
    found |= {name: rng.standard_normal(cache) for name in ("k_cache", "v_cache")}
    return {**found, "lengths": np.array([700])}


def loss_inputs(rng: np.random.Generator) -> Arrays:
    """Logits of 64 tokens over 1000 classes."""
    return {"logits": rng.standard_normal((64, 1000)) * 2, "targets": rng.integers(0, 1000, 64)}


def _layer_flops(tokens: int, keys: int, width: int, inner: int) -> float:
    """Projections, attention and feed-forward of one layer of self-attention over `keys` tokens."""
    return 8 * tokens * width**2 + 4 * tokens * keys * width + 4 * tokens * width * inner


def _layer_weights(width: int, inner: int, attentions: int = 1) -> float:
    return attentions * (4 * width**2 + 4 * width) + 2 * width * inner + inner + width + (attentions + 1) * 2 * width


T, D_ALL = BATCH * LENGTH, WIDTH
ENCODER_FLOPS = _layer_flops(T, LENGTH, WIDTH, INNER)
ENCODER_NUMBERS = 2 * T * WIDTH + _layer_weights(WIDTH, INNER)
DECODER_FLOPS = ENCODER_FLOPS + 8 * T * WIDTH**2 + 4 * T * LENGTH * WIDTH
DECODER_NUMBERS = 3 * T * WIDTH + _layer_weights(WIDTH, INNER, 2)
MODEL_WEIGHTS = DEPTH * _layer_weights(MODEL, FEED) + MODEL * VOCABULARY
NEW = TOKENS - PROMPT
STEP_FLOPS = DEPTH * _layer_flops(1, (PROMPT + TOKENS) // 2, MODEL, FEED) + 2 * MODEL * VOCABULARY
UNIVERSAL_FLOPS = 3 * _layer_flops(BATCH * 16, 16, MODEL, FEED)

WORKLOADS: tuple[Workload, ...] = (
    Workload(
        "softmax-forward", "softmax", normal(x=(256, 512)), 5 * 256 * 512, 2 * 256 * 512, sizes="256 rows of 512"
    ),
    Workload(
        "softmax-backward", "softmax", normal(x=(256, 512)), 4 * 256 * 512, 3 * 256 * 512,
        direction="backward", sizes="256 rows of 512",
    ),
    Workload(
        "layer-norm-forward", "layer_norm", lambda rng: rows(rng, 256, 512), 8 * 256 * 512, 2 * 256 * 512 + 1024,
        sizes="256 rows of 512",
    ),
    Workload(
        "layer-norm-backward", "layer_norm", lambda rng: rows(rng, 256, 512), 14 * 256 * 512, 3 * 256 * 512 + 2048,
        direction="backward", sizes="256 rows of 512",
    ),
    Workload(
        "attention-prefill", "attention", normal(q=(1, 4, 128, 64), k=(1, 4, 128, 64), v=(1, 4, 128, 64)),
        (4 * 4 * 128 * 128 * 64 + 5 * 4 * 128 * 128) / 2, 4 * 4 * 128 * 64,
        keywords={"causal": True}, sizes="4 heads of 64, 128 tokens, causal",
    ),
    Workload(
        "attention-decode", "attention", normal(q=(1, 8, 1, 64), k=(1, 8, 512, 64), v=(1, 8, 512, 64)),
        4 * 8 * 512 * 64, 2 * 8 * 512 * 64, sizes="8 heads of 64, one query, 512 keys",
    ),
    Workload(
        "kv-append", "cached_attention", append_inputs, 4 * 8 * 701 * 64, 2 * 8 * 701 * 64,
        sizes="8 heads of 64, one token into a cache of 700 of 1024",
    ),
    Workload(
        "encoder-layer-forward", "encoder_layer", encoder_inputs, ENCODER_FLOPS, ENCODER_NUMBERS,
        keywords={"heads": HEADS}, sizes="2 x 32 tokens of 128, 4 heads, 512 inside",
    ),
    Workload(
        "encoder-layer-training", "encoder_layer", encoder_inputs, 3 * ENCODER_FLOPS, 3 * ENCODER_NUMBERS,
        keywords={"heads": HEADS}, direction="training", sizes="2 x 32 tokens of 128, 4 heads, 512 inside",
    ),
    Workload(
        "decoder-layer-forward", "decoder_layer", decoder_inputs, DECODER_FLOPS, DECODER_NUMBERS,
        keywords={"heads": HEADS}, sizes="2 x 32 tokens and memory of 128, 4 heads, 512 inside",
    ),
    Workload(
        "decoder-layer-training", "decoder_layer", decoder_inputs, 3 * DECODER_FLOPS, 3 * DECODER_NUMBERS,
        keywords={"heads": HEADS}, direction="training", sizes="2 x 32 tokens and memory of 128, 4 heads, 512 inside",
    ),
    Workload(
        "generate-cached", "decoder_lm", model_inputs, (NEW + PROMPT) * STEP_FLOPS, NEW * MODEL_WEIGHTS,
        keywords={"heads": HEADS}, direction="generation", prompt=PROMPT, length=TOKENS,
        sizes="16 tokens after 4, 2 layers of 64, 64 words",
    ),
    Workload(
        "generate-uncached", "decoder_lm", model_inputs, (NEW + PROMPT) * STEP_FLOPS, NEW * MODEL_WEIGHTS,
        keywords={"heads": HEADS}, direction="generation-uncached", prompt=PROMPT, length=TOKENS,
        sizes="16 tokens after 4, 2 layers of 64, 64 words",
    ),
    Workload(
        "universal-transformer", "universal_transformer", universal_inputs, UNIVERSAL_FLOPS,
        2 * BATCH * 16 * MODEL + _layer_weights(MODEL, FEED),
        keywords={"heads": HEADS, "max_steps": HALTING_STEPS}, sizes="2 x 16 tokens of 64, at most 6 steps",
    ),
    Workload(
        "loss-smoothed", "cross_entropy", loss_inputs, 9 * 64 * 1000, 3 * 64 * 1000,
        keywords={"label_smoothing": 0.1}, direction="training", sizes="64 tokens, 1000 classes, smoothing 0.1",
    ),
    Workload(
        "adamw-step", "adamw_step", optimizer_inputs, 15 * 256 * 256, 7 * 256 * 256,
        keywords={"step": 100, "lr": 1e-3, "beta1": 0.9, "beta2": 0.98, "eps": 1e-9, "weight_decay": 0.01},
        sizes="a parameter of 256 x 256",
    ),
)  # fmt: skip
"""Every workload, in the order in which it is shown."""

BY_ID = {workload.id: workload for workload in WORKLOADS}


def workload_named(name: str) -> Workload:
    """The workload of an id.

    Raises ValueError, in one line with the nearest id, where there is none.
    """
    import difflib

    if name not in BY_ID:
        near = difflib.get_close_matches(name, list(BY_ID), 1, 0.0)[0]
        raise ValueError(f"no workload {name!r}; nearest is {near!r}")
    return BY_ID[name]
