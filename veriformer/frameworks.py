"""NumPy and torch behind one small interface: make arrays, read them, watch memory and global state.

JAX has the same one in `jax_arrays`.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from veriformer.case import NUMPY_DTYPES
from veriformer.devices import named, random_state, trouble, usable
from veriformer.given_models import given
from veriformer.layouts import constant_axis, lay_out

FRAMEWORKS = ("numpy", "torch", "jax")


def framework_named(name: str, device: str = "cpu") -> Any:
    """The framework of that name with its arrays on a device, imported only now.

    Raises ValueError for a name outside FRAMEWORKS and for a device that is not there, and ImportError with the
    extra's name where the package is absent.
    """
    if name == "numpy":
        if device != "cpu":
            raise ValueError(f"device {device!r}: arrays of NumPy are on the CPU")
        return Numpy()
    if name == "torch":
        return Torch(device)
    if name == "jax":
        from veriformer.jax_arrays import Jax

        return Jax(device)
    raise ValueError(f"framework {name!r} is not known; known are {', '.join(FRAMEWORKS)}")


class Numpy:
    """NumPy arrays; bfloat16 comes from ml_dtypes."""

    name = "numpy"
    default_dtypes: tuple[str, ...] = ("float64", "float32")
    dtypes = NUMPY_DTYPES

    def native(self, values: np.ndarray, dtype: str, layout: str = "contiguous") -> Any:
        """A fresh array of that dtype and layout."""
        if values.dtype.kind == "i":
            return values.astype(np.int64)
        target = bool if values.dtype == bool else NUMPY_DTYPES[dtype]
        axis = constant_axis(values) if layout == "expanded" else None
        if axis is not None:
            return np.broadcast_to(values.take([0], axis).astype(target), values.shape)
        return lay_out(values.astype(target), layout, lambda shape: self._fill(np.empty(shape, target)))

    @staticmethod
    def _fill(buffer: np.ndarray) -> np.ndarray:
        buffer[...] = True if buffer.dtype == bool else np.array(777.0).astype(buffer.dtype)
        return buffer

    def is_array(self, value: Any) -> bool:
        """Whether a result is an array (a NumPy scalar counts as one without axes)."""
        return isinstance(value, (np.ndarray, np.generic))

    def holds_numbers(self, value: Any) -> bool:
        """Whether an array holds real numbers or booleans, and no objects, text or complex numbers."""
        return value.dtype.kind in "biuf" or str(value.dtype) in NUMPY_DTYPES

    def read(self, value: Any) -> tuple[np.ndarray, str]:
        """The result as float64 and the name of its dtype."""
        array = np.asarray(value)
        name = str(array.dtype)
        return np.array(array) if array.dtype.kind in "biu" else np.array(array, dtype=np.float64), name

    def overlap(self, one: Any, other: Any) -> bool:
        """Whether two arrays share memory."""
        return isinstance(one, np.ndarray) and isinstance(other, np.ndarray) and np.may_share_memory(one, other)

    def permute(self, value: Any, axes: Sequence[int]) -> Any:
        """The axes in another order."""
        return np.transpose(value, axes)

    def state(self) -> dict[str, Any]:
        """Global state that a call must not change."""
        kind, keys, position, *_ = np.random.get_state(legacy=True)
        return {
            "numpy's random state": (kind, np.asarray(keys).tobytes(), position),
            "Python's random state": random.getstate(),
        }

    def remember(self) -> Any:
        """What `restore` needs."""
        return np.geterr()

    def restore(self, memory: Any) -> None:
        """Put back what would disturb later calls; random states need it only where they are watched."""
        np.seterr(**memory)

    def versions(self) -> dict[str, str]:
        """Versions for the header."""
        return {"numpy": np.__version__}

    def trouble(self) -> str:
        """Why nothing more can be called; memory of the CPU never says."""
        return ""

    def given(self, kind: str, arrays: Sequence[Any]) -> Any:
        """A small model or step of ours that a function under test is given."""
        return given(kind, arrays)

    def in_dtype(self, dtype: str) -> Any:
        """A context in which a model is made; NumPy has no default to set."""
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def seeded(self) -> Iterator[None]:
        """A context in which random numbers begin as after seed(0), and go on after it as if nothing had been."""
        before = np.random.get_state()
        np.random.seed(0)
        try:
            yield
        finally:
            np.random.set_state(before)

    def castable(self, model: Any) -> bool:
        """Whether `cast` does anything."""
        return False

    def in_eval(self, model: Any) -> Any:
        """The model as it is; NumPy has no modes."""
        return model

    def cast(self, model: Any, dtype: str) -> Any:
        """The model as it is; nobody knows where it keeps its weights."""
        return model

    def watch_gradient(self, native: Any) -> None:
        """NumPy does not record what is done with an array."""

    def gradients(self, *_: Any) -> Any:
        """NumPy has no gradients; an implementation gives OPERATION_vjp."""
        raise NotImplementedError("NumPy has no gradients; give OPERATION_vjp")


class Torch:
    """torch tensors on the CPU or another device."""

    name = "torch"
    default_dtypes = ("float64", "float32", "bfloat16", "float16")

    def __init__(self, device: str = "cpu") -> None:
        try:
            import torch
        except ImportError as error:
            raise ImportError("torch is not installed; install veriformer[torch]") from error
        self.torch, self.device = torch, usable(torch, device)
        self.dtypes = {name: getattr(torch, name) for name in self.default_dtypes}

    def native(self, values: np.ndarray, dtype: str, layout: str = "contiguous") -> Any:
        """A fresh tensor of that dtype and layout."""
        torch = self.torch
        if values.dtype.kind == "i":
            return torch.from_numpy(np.array(values, np.int64, order="C")).to(self.device)
        target = torch.bool if values.dtype == bool else self.dtypes[dtype]
        axis = constant_axis(values) if layout == "expanded" else None
        if axis is not None:
            small = torch.from_numpy(np.array(values.take([0], axis), order="C")).to(self.device, target)
            return small.expand(values.shape)
        # torch.tensor copies, hence the tensor never shares memory with the case
        tensor = torch.from_numpy(np.array(values, order="C")).to(self.device, target)
        fill = True if target is torch.bool else 777.0
        return lay_out(tensor, layout, lambda shape: torch.full(shape, fill, dtype=target, device=self.device))

    def is_array(self, value: Any) -> bool:
        """Whether a result is a tensor."""
        return isinstance(value, self.torch.Tensor)

    def holds_numbers(self, value: Any) -> bool:
        """Whether a tensor is an ordinary dense one of real numbers or booleans."""
        dense = value.layout is self.torch.strided and not (value.is_quantized or value.is_nested or value.is_meta)
        return bool(dense and not value.is_complex())

    def read(self, value: Any) -> tuple[np.ndarray, str]:
        """The result as float64 and the name of its dtype."""
        name = str(value.dtype).removeprefix("torch.")
        value = value.detach().to("cpu")
        if value.is_floating_point():
            value = value.to(self.torch.float64)
        return value.contiguous().clone().numpy(), name

    def _span(self, value: Any) -> tuple[int, int]:
        storage = value.untyped_storage()
        return storage.data_ptr(), storage.data_ptr() + storage.nbytes()

    def overlap(self, one: Any, other: Any) -> bool:
        """Whether two tensors share storage."""
        if not (self.is_array(one) and self.is_array(other)) or not one.numel() or not other.numel():
            return False
        (a, b), (c, d) = self._span(one), self._span(other)
        return a < d and c < b

    def permute(self, value: Any, axes: Sequence[int]) -> Any:
        """The axes in another order."""
        return value.permute(*axes)

    def state(self) -> dict[str, Any]:
        """Global state that a call must not change."""
        names = ("default dtype", "thread count", "matmul precision", "grad mode", "deterministic mode")
        modes = {f"torch's {name}": value for name, value in zip(names, self._modes(), strict=True)}
        return {
            **Numpy().state(),
            "torch's random state": self.torch.random.get_rng_state().numpy().tobytes(),
            **random_state(self.torch, self.device),
            **modes,
        }

    def remember(self) -> Any:
        """What `restore` needs."""
        return Numpy().remember(), self._modes()

    def _modes(self) -> tuple[Any, ...]:
        torch = self.torch
        return (
            torch.get_default_dtype(),
            torch.get_num_threads(),
            torch.get_float32_matmul_precision(),
            torch.is_grad_enabled(),
            torch.are_deterministic_algorithms_enabled(),
        )

    def restore(self, memory: Any) -> None:
        """Put back what would disturb later calls; random states need it only where they are watched."""
        torch, (errors, modes) = self.torch, memory
        Numpy().restore(errors)
        # only what changed: some of the setters import large parts of torch
        setters = (
            torch.set_default_dtype,
            torch.set_num_threads,
            torch.set_float32_matmul_precision,
            torch.set_grad_enabled,
            torch.use_deterministic_algorithms,
        )
        for setter, before, now in zip(setters, modes, self._modes(), strict=True):
            if before != now:
                setter(before)

    def versions(self) -> dict[str, str]:
        """Versions for the header."""
        found = {"torch": self.torch.__version__, "numpy": np.__version__}
        found |= named(self.torch, self.device)
        return found

    def trouble(self) -> str:
        """Why nothing more can be called, as after a kernel that reads where it must not; "" where all is well."""
        return trouble(self.torch, self.device)

    def given(self, kind: str, arrays: Sequence[Any]) -> Any:
        """A small model or step of ours that a function under test is given."""
        return given(kind, arrays)

    @contextlib.contextmanager
    def in_dtype(self, dtype: str) -> Iterator[None]:
        """A context in which a model is made and asked: weights without a dtype of their own get this one."""
        before = self.torch.get_default_dtype()
        self.torch.set_default_dtype(self.dtypes[dtype])
        try:
            with self.torch.no_grad():
                yield
        finally:
            self.torch.set_default_dtype(before)

    def cast(self, model: Any, dtype: str) -> Any:
        """The model with its modules, itself or those that it holds, in the dtype and in eval mode."""
        for part in self._modules(model):
            part.to(self.device, self.dtypes[dtype])
        return self.in_eval(model)

    def in_eval(self, model: Any) -> Any:
        """The model with its modules in eval mode."""
        for part in self._modules(model):
            part.eval()
        return model

    @contextlib.contextmanager
    def seeded(self) -> Iterator[None]:
        """A context in which random numbers begin as after manual_seed(0), and later go on as if nothing had been."""
        devices = [self.torch.device(self.device)] if self.device.startswith("cuda") else []
        with Numpy().seeded(), self.torch.random.fork_rng(devices=devices):
            self.torch.manual_seed(0)
            yield

    def castable(self, model: Any) -> bool:
        """Whether there are modules to cast."""
        return bool(self._modules(model))

    def _modules(self, value: Any, depth: int = 4) -> list[Any]:
        """A module, or the modules that an object holds, also in its lists, dicts and objects of its own."""
        if isinstance(value, self.torch.nn.Module):
            return [value]
        if isinstance(value, dict):
            parts = list(value.values())
        elif isinstance(value, (list, tuple)):
            parts = list(value)
        else:
            parts = list(getattr(value, "__dict__", {}).values()) if not isinstance(value, type) else []
        return [found for part in parts for found in self._modules(part, depth - 1)] if depth else []

    def watch_gradient(self, native: Any) -> None:
        """Let autograd record what is done with a tensor."""
        native.requires_grad_(True)

    def gradients(self, results: Sequence[Any], cotangents: Sequence[Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Vector-Jacobian products by autograd; None where the result does not depend on an input."""
        pairs = [(r, c) for r, c in zip(results, cotangents, strict=True) if c is not None and r.requires_grad]
        if not pairs:
            return dict.fromkeys(inputs)
        outs, grads = zip(*pairs, strict=True)
        found = self.torch.autograd.grad(outs, list(inputs.values()), grads, allow_unused=True)
        return dict(zip(inputs, found, strict=True))
