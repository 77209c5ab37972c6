"""JAX behind the interface of `frameworks`, and where its backend keeps a process from being forked.

Importing JAX and setting its options starts no backend; the first array does, and its threads do not live on in a fork.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from veriformer.case import NUMPY_DTYPES
from veriformer.frameworks import Numpy

OPTIONS = {
    "x64 mode": "jax_enable_x64",
    "matmul precision": "jax_default_matmul_precision",
    "dtype promotion": "jax_numpy_dtype_promotion",
    "random generator": "jax_default_prng_impl",
    "NaN checks": "jax_debug_nans",
    "default device": "jax_default_device",
}
"""Options of JAX that change what later calls calculate, by what they are called here."""


def started() -> bool:
    """Whether JAX has a backend in this process, or nobody can tell; False where JAX is not imported."""
    if "jax" not in sys.modules:
        return False
    asked = getattr(sys.modules.get("jax._src.xla_bridge"), "backends_are_initialized", None)
    return asked is None or bool(asked())


class Jax(Numpy):
    """Arrays of JAX on the CPU, in 64-bit mode: its default would silently make float32 of float64."""

    name = "jax"
    default_dtypes = ("float64", "float32", "bfloat16", "float16")

    def __init__(self, device: str = "cpu") -> None:
        try:
            import jax
        except ImportError as error:
            raise ImportError("jax is not installed; install veriformer[jax]") from error
        if device != "cpu":
            raise ValueError(f"device {device!r}: arrays of JAX are judged on the CPU")
        self.jax: Any = jax
        self.jax.config.update("jax_enable_x64", True)
        self.dtypes = {name: getattr(jax.numpy, name) for name in self.default_dtypes}

    def native(self, values: np.ndarray, dtype: str, layout: str = "contiguous") -> Any:
        """A fresh array of that dtype; memory layouts are JAX's own business."""
        if values.dtype.kind in "iu":
            target: Any = np.int64
        else:
            target = bool if values.dtype == bool else NUMPY_DTYPES[dtype]
        # device_put may keep memory of NumPy, hence the copy: the array never shares it with the case
        return self.jax.device_put(np.array(values, target, order="C"), self.jax.local_devices(backend="cpu")[0])

    def is_array(self, value: Any) -> bool:
        """Whether a result is an array of JAX, or what stands for one while it is differentiated."""
        return isinstance(value, self.jax.Array)

    def holds_numbers(self, value: Any) -> bool:
        """Whether an array holds real numbers or booleans, and no complex numbers or random keys."""
        kinds = (self.jax.numpy.floating, self.jax.numpy.integer, np.bool_)
        return any(self.jax.numpy.issubdtype(value.dtype, kind) for kind in kinds)

    def read(self, value: Any) -> tuple[np.ndarray, str]:
        """The result as float64 and the name of its dtype; one NaN for an array that was given away (donated)."""
        if value.is_deleted():
            return np.array(np.nan), "deleted"
        return super().read(value)

    def overlap(self, one: Any, other: Any) -> bool:
        """Never: arrays of JAX do not change, so that nobody can tell whether they share memory."""
        return False

    def permute(self, value: Any, axes: Sequence[int]) -> Any:
        """The axes in another order."""
        return self.jax.numpy.transpose(value, axes)

    def _options(self) -> dict[str, Any]:
        return {key: getattr(self.jax.config, key) for key in OPTIONS.values() if hasattr(self.jax.config, key)}

    def state(self) -> dict[str, Any]:
        """Global state that a call must not change."""
        options = self._options()
        return {
            **super().state(),
            **{f"jax's {name}": options[key] for name, key in OPTIONS.items() if key in options},
        }

    def remember(self) -> Any:
        """What `restore` needs."""
        return super().remember(), self._options()

    def restore(self, memory: Any) -> None:
        """Put back what would disturb later calls."""
        errors, options = memory
        super().restore(errors)
        for key, value in self._options().items():
            if value != options[key]:
                self.jax.config.update(key, options[key])

    def versions(self) -> dict[str, str]:
        """Versions for the header."""
        return {"jax": self.jax.__version__, **super().versions()}

    def castable(self, model: Any) -> bool:
        """Whether a model is a pytree that holds arrays of floating point, as one of Equinox."""
        return any(leaf is not model and self._floating(leaf) for leaf in self.jax.tree.leaves(model))

    def cast(self, model: Any, dtype: str) -> Any:
        """The model with its arrays of floating point in the dtype."""
        target = self.dtypes[dtype]
        return self.jax.tree.map(lambda leaf: leaf.astype(target) if self._floating(leaf) else leaf, model)

    def _floating(self, leaf: Any) -> bool:
        return self.is_array(leaf) and bool(self.jax.numpy.issubdtype(leaf.dtype, self.jax.numpy.floating))

    def recorded(
        self, call: Callable[[Mapping[str, Any]], list[Any]], inputs: Mapping[str, Any]
    ) -> tuple[list[Any], Callable[[Sequence[Any]], dict[str, Any]]]:
        """The results of call(inputs), and the function from their cotangents to vector-Jacobian products.

        JAX differentiates functions, not arrays. A cotangent of None stands for zeros.
        """
        results, pull = self.jax.vjp(lambda given: list(call(given)), dict(inputs))

        def products(cotangents: Sequence[Any]) -> dict[str, Any]:
            pairs = zip(results, cotangents, strict=True)
            filled = [self._seed(result) if cotangent is None else cotangent for result, cotangent in pairs]
            return dict(pull(filled)[0])

        return list(results), products

    def _seed(self, result: Any) -> Any:
        """Zeros as a cotangent; JAX gives those of whole numbers and booleans a dtype of their own."""
        if self._floating(result):
            return self.jax.numpy.zeros_like(result)
        return np.zeros(result.shape, self.jax.dtypes.float0)
