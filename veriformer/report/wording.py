"""How a script says things in the framework of the function under test: arrays, gradients, memory, global state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from veriformer.layouts import constant_axis


class NumpyWords:
    """The words of NumPy. there: the last argument of what makes a tensor elsewhere, such as ", device='cuda'"."""

    kind = "(np.ndarray, np.generic)"
    zeros = "np.zeros_like"
    leaves_fork = True
    """A child of the script can be a fork of it."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self.there = f", device={device!r}" if device != "cpu" else ""

    def imports(self, dtype: str) -> list[str]:
        """Lines that import the framework, after NumPy."""
        return ["import ml_dtypes"] if dtype == "bfloat16" else []

    def settings(self) -> list[str]:
        """Lines after the imports."""
        return []

    def dtype(self, name: str) -> str:
        """A dtype as an expression."""
        return f"{'ml_dtypes' if name == 'bfloat16' else 'np'}.{name}"

    def array(self, source: str, dtype: str) -> str:
        """An expression for an array of these numbers; dtype: a name, or bool."""
        return f"np.array({source}, dtype={'bool' if dtype == 'bool' else self.dtype(dtype)})"

    def number(self, dtype: str) -> str:
        """An expression for the plain number r as an array."""
        return f"{self.dtype(dtype)}(r)"

    def laid_out(self, made: str, values: np.ndarray, layout: str) -> str:
        """The expression in a memory layout."""
        if values.ndim == 0 or layout in ("contiguous", "") or values.dtype.kind == "i":
            return made
        if layout == "transposed" and values.ndim > 1:
            return self.transposed(made)
        if layout == "offset":
            return self.offset(made)
        if layout == "expanded":
            axis = constant_axis(values)
            return made if axis is None else self.expanded(made, axis, tuple(values.shape))
        return self.strided(made)

    def transposed(self, made: str) -> str:
        """The expression with its last two axes swapped in memory."""
        return f"np.ascontiguousarray({made}.swapaxes(-1, -2)).swapaxes(-1, -2)"

    def offset(self, made: str) -> str:
        """The expression, not at the beginning of its memory."""
        return f"np.concatenate([(x := {made})[:1], x])[1:]"

    def expanded(self, made: str, axis: int, shape: tuple[int, ...]) -> str:
        """The expression with one row standing for all along an axis."""
        return f"np.broadcast_to({made}.take([0], {axis}), {shape})"

    def strided(self, made: str) -> str:
        """The expression as every other element of its memory."""
        return f"np.repeat({made}, 2, -1)[..., ::2]"

    def watched(self, word: str) -> list[str]:
        """Lines after an array by which a gradient is wanted."""
        return []

    def called(self, line: str, number: int, inputs: Sequence[str]) -> str:
        """The line of a call, whose gradients by these variables are wanted later."""
        return line

    def products(
        self, number: int, inputs: Mapping[str, str], cotangents: Mapping[int, str], seeds: list[str]
    ) -> list[str]:
        """Lines that take the gradients. inputs: name -> variable. seeds: a cotangent for each result."""
        return []

    def seed(self, result: str, dtype: str) -> str:
        """Zeros as the cotangent of a result of that dtype."""
        return f"{self.zeros}({result})"

    def doubles(self, value: str) -> str:
        """An expression for an array's numbers in float64."""
        return f"np.asarray({value}, dtype=float)"

    def overlap(self, one: str, other: str) -> str:
        """An expression for whether two arrays share memory."""
        return f"np.may_share_memory({one}, {other})"

    def state(self) -> list[str]:
        """Expressions for the framework's global state, beside NumPy's and Python's."""
        return []

    def made(self, model: str, dtype: str, weights: bool) -> list[str]:
        """Lines that make a model, from an expression for it. weights: it is given weights."""
        return [f"model = {model}"]


class TorchWords(NumpyWords):
    """The words of torch."""

    kind = "torch.Tensor"
    zeros = "torch.zeros_like"

    def imports(self, dtype: str) -> list[str]:
        """Lines that import the framework, after NumPy."""
        return ["import torch"]

    def dtype(self, name: str) -> str:
        """A dtype as an expression."""
        return f"torch.{name}"

    def array(self, source: str, dtype: str) -> str:
        """An expression for a tensor of these numbers; dtype: a name, or bool."""
        return f"torch.tensor({source}, dtype={self.dtype(dtype)}{self.there})"

    def number(self, dtype: str) -> str:
        """An expression for the plain number r as a tensor."""
        return self.array("r", dtype)

    def transposed(self, made: str) -> str:
        """The expression with its last two axes swapped in memory."""
        return f"{made}.mT.contiguous().mT"

    def offset(self, made: str) -> str:
        """The expression, not at the beginning of its memory."""
        return f"torch.cat([(x := {made})[:1], x])[1:]"

    def expanded(self, made: str, axis: int, shape: tuple[int, ...]) -> str:
        """The expression with one row standing for all along an axis."""
        return f"{made}.narrow({axis}, 0, 1).expand({shape})"

    def strided(self, made: str) -> str:
        """The expression as every other element of its memory."""
        return f"{made}.repeat_interleave(2, -1)[..., ::2]"

    def watched(self, word: str) -> list[str]:
        """Lines after a tensor by which a gradient is wanted."""
        return [f"{word}.requires_grad_()"]

    def products(
        self, number: int, inputs: Mapping[str, str], cotangents: Mapping[int, str], seeds: list[str]
    ) -> list[str]:
        """Lines that take the gradients; one of which nothing depends has none."""
        pairs = ", ".join(f"(results{number}[{i}], {name})" for i, name in cotangents.items())
        return [
            f"found = [None] * {len(inputs)}",
            f"pairs = [(result, weight) for result, weight in [{pairs}] if result.requires_grad]",
            "if pairs:",
            "    outs, weights = zip(*pairs)",
            f"    found = torch.autograd.grad(outs, [{', '.join(inputs.values())}], weights, allow_unused=True)",
            f"gradients{number} = dict(zip({list(inputs)!r}, found))",
        ]

    def doubles(self, value: str) -> str:
        """An expression for a tensor's numbers in float64."""
        return f"{value}.detach(){'.cpu()' if self.there else ''}.double().numpy()"

    def overlap(self, one: str, other: str) -> str:
        """An expression for whether two tensors share memory."""
        return f"{one}.untyped_storage().data_ptr() == {other}.untyped_storage().data_ptr()"

    def state(self) -> list[str]:
        """Expressions for the framework's global state, beside NumPy's and Python's."""
        modes = ("get_default_dtype", "get_num_threads", "get_float32_matmul_precision", "is_grad_enabled")
        parts = ["torch.random.get_rng_state().tolist()", *(f"torch.{mode}()" for mode in modes)]
        parts += ["torch.are_deterministic_algorithms_enabled()"]
        cuda = [f"torch.cuda.get_rng_state({self.device!r}).tolist()"] if self.device.startswith("cuda") else []
        return [*parts, *cuda]

    def made(self, model: str, dtype: str, weights: bool) -> list[str]:
        """Lines that make a model with its modules in the dtype and in eval mode."""
        cast = "" if weights else f".to({self.dtype(dtype)})"
        default = [] if weights else [f"torch.set_default_dtype({self.dtype(dtype)})"]
        return [
            "torch.manual_seed(0)",
            "torch.set_grad_enabled(False)",
            *default,
            f"model = {model}",
            "for part in [model, *getattr(model, '__dict__', {}).values()]:",
            "    if isinstance(part, torch.nn.Module):",
            f"        part{cast}.eval()",
        ]


class JaxWords(NumpyWords):
    """The words of JAX, which differentiates functions, keeps memory to itself, and does not live on in a fork."""

    kind = "jax.Array"
    zeros = "jnp.zeros_like"
    leaves_fork = False

    def imports(self, dtype: str) -> list[str]:
        """Lines that import the framework, after NumPy."""
        return ["import jax", "import jax.numpy as jnp"]

    def settings(self) -> list[str]:
        """Lines after the imports."""
        return ["jax.config.update('jax_platforms', 'cpu')", "jax.config.update('jax_enable_x64', True)"]

    def dtype(self, name: str) -> str:
        """A dtype as an expression."""
        return f"jnp.{name}"

    def array(self, source: str, dtype: str) -> str:
        """An expression for an array of these numbers; dtype: a name, or bool."""
        return f"jnp.array({source}, dtype={'bool' if dtype == 'bool' else self.dtype(dtype)})"

    def laid_out(self, made: str, values: np.ndarray, layout: str) -> str:
        """The expression as it is: there are no layouts."""
        return made

    def called(self, line: str, number: int, inputs: Sequence[str]) -> str:
        """The line of a call that also gives the function of its vector-Jacobian products."""
        words, call = ", ".join(inputs), line.removeprefix(f"results{number} = ")
        return f"results{number}, pull{number} = jax.vjp(lambda {words}: list({call}), {words})"

    def products(
        self, number: int, inputs: Mapping[str, str], cotangents: Mapping[int, str], seeds: list[str]
    ) -> list[str]:
        """Lines that take the gradients."""
        return [f"gradients{number} = dict(zip({list(inputs)!r}, pull{number}([{', '.join(seeds)}])))"]

    def seed(self, result: str, dtype: str) -> str:
        """Zeros as the cotangent of a result; of whole numbers and booleans it has a dtype of its own."""
        if "float" in dtype:
            return f"jnp.zeros_like({result})"
        return f"np.zeros({result}.shape, jax.dtypes.float0)"

    def overlap(self, one: str, other: str) -> str:
        """False: arrays that do not change need no memory of their own."""
        return "False"

    def state(self) -> list[str]:
        """Expressions for the framework's global state, beside NumPy's and Python's."""
        names = ("enable_x64", "default_matmul_precision", "numpy_dtype_promotion", "default_prng_impl", "debug_nans")
        return [f"jax.config.jax_{name}" for name in names]

    def made(self, model: str, dtype: str, weights: bool) -> list[str]:
        """Lines that make a model; one that is a pytree has its arrays cast."""
        if weights:
            return super().made(model, dtype, weights)
        return [
            f"model = {model}",
            "if not isinstance(jax.tree.leaves(model)[0], type(model)):",
            "    floating = lambda a: isinstance(a, jax.Array) and jnp.issubdtype(a.dtype, jnp.floating)",
            f"    model = jax.tree.map(lambda a: a.astype({self.dtype(dtype)}) if floating(a) else a, model)",
        ]


WORDS = {"numpy": NumpyWords, "torch": TorchWords, "jax": JaxWords}
"""The words of each framework."""
