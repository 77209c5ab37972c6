"""The unit roundoff that kernels of known precision behave like, at two or three sizes: a table of `detection.py`.

Constant over the sizes: inputs or results are rounded at that u. Growing by about half a bit for each
doubling: the accumulator is. Falling: no lost precision but a bias, such as another divisor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import mean

import numpy as np
from precision_rows import BF16, FP16, TF32, Array, attention_kernel, feed_forward_kernel, layer_norm_kernel

from veriformer import reference
from veriformer.budgets.claims import effective_bits, rounded_at_random
from veriformer.case import round_to

SEEDS = 8
Inputs = Callable[[np.random.Generator, int], list[Array]]
Kernel = Callable[..., Array]


def attention_inputs(rng: np.random.Generator, keys: int) -> list[Array]:
    return [rng.normal(size=(1, 2, n, 64)) for n in (16, keys, keys)]


def feed_forward_inputs(rng: np.random.Generator, d: int) -> list[Array]:
    shapes, scales = ((16, d), (d, 64), (64,), (64, d), (d,)), (1.0, d**-0.5, 0.1, 0.125, 0.1)
    return [rng.normal(size=shape) * scale for shape, scale in zip(shapes, scales, strict=True)]


def layer_norm_inputs(rng: np.random.Generator, n: int) -> list[Array]:
    return [1 + rng.normal(size=(8192 // n, n)), 1 + 0.1 * rng.normal(size=n), 0.1 * rng.normal(size=n)]


FAMILIES: tuple[tuple[str, Inputs, Kernel, Kernel, tuple[int, ...], dict[str, dict[str, object]]], ...] = (
    ("attention, keys", attention_inputs, attention_kernel, reference.attention, (64, 1024), {
        "float32": {}, "tf32 inputs": {"inputs": TF32}, "bfloat16 inputs": {"inputs": BF16},
        "bfloat16 probabilities": {"probabilities": BF16}, "float16 accumulator": {"accumulate": FP16},
        "bfloat16 accumulator": {"accumulate": BF16}, "scale × 1.001": {"factor": 1.001},
    }),
    ("feed_forward, d", feed_forward_inputs, feed_forward_kernel, reference.feed_forward, (64, 512, 4096), {
        "float32": {}, "tf32 inputs": {"inputs": TF32}, "bfloat16 inputs": {"inputs": BF16},
        "float16 accumulator": {"accumulate": FP16}, "bfloat16 accumulator": {"accumulate": BF16},
    }),
    ("layer_norm, n", layer_norm_inputs, layer_norm_kernel, reference.layer_norm, (64, 512, 4096), {
        "float32": {}, "one-pass variance": {"one_pass": True}, "tf32 input": {"inputs": TF32},
        "bfloat16 input": {"inputs": BF16}, "eps 1e-6 for 1e-5": {"eps": 1e-6}, "variance over n - 1": {"less": 1},
    }),
)  # fmt: skip
"""What is measured: inputs of a size, the kernel, the reference, the sizes, and what is switched in the kernel."""


def bits_of(inputs: Inputs, kernel: Kernel, exact: Kernel, size: int, switched: dict[str, object], seed: int) -> float:
    """log2 of the unit roundoff that one kernel behaves like on one seed's data."""
    arrays = [np.array(round_to(a, "float32")) for a in inputs(np.random.default_rng([seed, size]), size)]
    value = exact(*arrays)
    moved = exact(*(rounded_at_random(a, place) for place, a in enumerate(arrays)))
    return effective_bits(kernel(*arrays, **switched) - value, rounded_at_random(moved, len(arrays)) - value)


def bits_table() -> Iterator[str]:
    """One line a kernel: the mean over the seeds at each size, and the largest spread."""
    yield "## The unit roundoff that float32 kernels behave like, log2"
    yield ""
    yield "| kernel | sizes | log2 u at each size | spread over the seeds |"
    yield "|---|---|---|---|"
    for name, inputs, kernel, exact, sizes, kernels in FAMILIES:
        for fault, switched in kernels.items():
            found = [[bits_of(inputs, kernel, exact, n, switched, s) for s in range(SEEDS)] for n in sizes]
            spread = max(max(bits) - min(bits) for bits in found)
            shown = ", ".join(f"{mean(bits):.2f}" for bits in found)
            yield f"| {name}: {fault} | {', '.join(map(str, sizes))} | {shown} | {spread:.2f} |"
    yield ""
