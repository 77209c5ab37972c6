"""The libraries whose parts can be judged by name: what each is, what it needs, what is there.

A registered name such as `jax` stands for adapters in `impls/` that call a library. Nothing here imports one.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Library:
    """A library as the compatibility matrix knows it.

    name: its registered name. title: what its makers call it. packages: import names that must be found. extra: `pip
    install veriformer[extra]` provides it, perhaps several. variants: those of the registered name that are to be
    judged; empty: all. dtypes: those that it is judged in; empty: all that it claims. apart: why it needs an
    environment of its own; empty: it does not.
    """

    name: str
    title: str
    packages: tuple[str, ...]
    extra: str
    variants: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    apart: str = ""

    @property
    def missing(self) -> tuple[str, ...]:
        """Packages that are not there."""
        return tuple(name for name in self.packages if importlib.util.find_spec(name) is None)

    @property
    def install(self) -> str:
        """The command that provides it."""
        return f"pip install veriformer[{self.extra}]"


LIBRARIES = (
    Library(
        "torch",
        "PyTorch",
        ("torch",),
        "torch",
        variants=(
            "functional",
            "rows",
            "default",
            "math",
            "flash",
            "flex",
            "flex_scores",
            "one_call",
            "nested",
            "train",
            "weights",
            "fast",
            "fast_weights",
            "transformer",
            "transformer_fast",
            "transformer_nested",
            "loss",
            "optimizer",
            "optimizer_foreach",
            "optimizer_fused",
            "optimizer_l2",
        ),
    ),
    Library(
        "transformers",
        "Hugging Face Transformers",
        ("transformers", "torch"),
        "transformers",
    ),
    Library("x_transformers", "x-transformers", ("x_transformers", "torch"), "x-transformers"),
    Library("onnx", "ONNX reference evaluator", ("onnx",), "onnx"),
    Library("onnxruntime", "ONNX Runtime", ("onnxruntime", "onnx"), "onnx"),
    Library("jax", "JAX", ("jax",), "jax", dtypes=("float32", "bfloat16", "float16")),
    Library("flax", "Flax", ("flax", "jax"), "flax", dtypes=("float32", "bfloat16")),
    Library("equinox", "Equinox", ("equinox", "jax"), "equinox", dtypes=("float32", "bfloat16")),
    Library("optax", "Optax", ("optax", "jax"), "optax", dtypes=("float32", "bfloat16")),
    Library("keras_torch", "Keras on PyTorch", ("keras", "torch"), "keras,torch"),
    Library(
        "keras_jax",
        "Keras on JAX",
        ("keras", "jax"),
        "keras,jax",
        # options that are Keras's own are crossed on PyTorch, where no shape is compiled
        variants=("functions", "layers", "axes", "sparse", "optimizer", "attention", "heads", "grouped"),
        dtypes=("float32",),
    ),
    Library("mlx", "MLX", ("mlx",), "mlx"),
    Library("openvino", "OpenVINO", ("openvino",), "openvino"),
    Library(
        "litgpt",
        "LitGPT",
        ("litgpt", "torch"),
        "litgpt",
        apart="it wants an older huggingface-hub than transformers does",
    ),
)
"""Every library of the matrix, in the order in which it shows them."""


def library_named(name: str) -> Library | None:
    """The library behind a registered name, or None."""
    return next((library for library in LIBRARIES if library.name == name), None)


def versions_of(distributions: Iterable[str]) -> dict[str, str]:
    """The versions of distributions that are installed."""
    found = {}
    for name in distributions:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
