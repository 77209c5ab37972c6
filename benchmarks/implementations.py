"""The implementations that are timed, of whichever version of the package is installed.

The names are today's; where an earlier version lacks one, or lacks an operation, Absent is raised, which asv shows
as n/a. All that is asked of the package for calling is `veriformer.targets.load` and `veriformer.calling.arguments`
(for models `veriformer.models.model_arguments`), which every version has.
"""

from __future__ import annotations

import copy
import gc
import importlib
import importlib.util
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from .workloads import Workload

IMPLEMENTATIONS: dict[str, tuple[str, ...]] = {
    "softmax": ("numpy:plain", "numpy:blocked", "numpy:fused", "torch:functional"),
    "layer_norm": ("numpy:plain", "numpy:blocked", "numpy:fused", "numpy:rows", "torch:functional", "torch:rows"),
    "attention": (
        "numpy:plain", "numpy:tiled", "numpy:attention",
        "torch:default", "torch:math", "torch:flash", "torch:grouped",
    ),
    "cached_attention": ("numpy:attention", "numpy:tiled", "torch:attention", "torch:append"),
    "encoder_layer": (
        "numpy:transformer", "torch:layers", "torch:packed", "torch:transformer", "torch:transformer_fast",
    ),
    "decoder_layer": (
        "numpy:transformer", "torch:layers", "torch:packed", "torch:transformer", "torch:transformer_fast",
    ),
    "decoder_lm": (
        "numpy:decoder_growing", "numpy:decoder_static", "numpy:decoder_rolling", "numpy:lean",
        "torch:decoder_growing", "torch:decoder_static", "torch:lean",
    ),
    "universal_transformer": ("numpy:universal", "torch:universal", "torch:universal_compacted"),
    "cross_entropy": ("numpy:loss", "torch:loss", "torch:loss_gather", "torch:loss_fused"),
    "adamw_step": (
        "numpy:optimizer", "numpy:optimizer_folded", "numpy:optimizer_stored",
        "torch:optimizer", "torch:optimizer_foreach", "torch:optimizer_fused", "torch:flat",
    ),
}  # fmt: skip
"""Who is timed at each operation."""
LEFT_OUT = {
    ("torch:flex", "attention"): "flex_attention that is not compiled, which its makers mean for debugging alone",
    ("torch:flex_scores", "attention"): "the code of torch:flex with its mask in another place",
    ("numpy:blocked", "attention"): "loops over blocks in Python: 0.3 s a call",
    ("numpy:lean_llama", "decoder_lm"): "the code of numpy:lean with weights of its own",
    ("torch:lean_llama", "decoder_lm"): "the code of torch:lean with weights of its own",
    ("numpy:loss_streamed", "cross_entropy"): "loops over classes in Python",
    ("torch:loss_fused_small", "cross_entropy"): "the code of torch:loss_fused, in chunks too small to be fast",
    ("numpy:loss_others", "cross_entropy"): "the code of numpy:loss under another convention of smoothing",
    ("numpy:loss_others_but_padding", "cross_entropy"): "the code of numpy:loss under another convention of smoothing",
    ("torch:loss_others", "cross_entropy"): "the code of torch:loss under another convention of smoothing",
    ("torch:loss_others_but_padding", "cross_entropy"): "the code of torch:loss under another convention of smoothing",
    (
        "torch:optimizer_restored",
        "adamw_step",
    ): "the code of torch:optimizer, float32 alone, its state saved and loaded",
    ("torch:optimizer_l2", "adamw_step"): "the code of torch:optimizer with another meaning of weight decay",
}
"""Who is not, and why; those of an operation of ACCURACY_ONLY (`inputs`) are not judged either."""


DRAWN = 3
"""How many inputs are drawn; those of further numbers are these with their entries turned round."""


class Absent(NotImplementedError):
    """This version of the package, or this implementation, has nothing to time here."""


_LIMITS: list[Any] = []


def one_thread() -> None:
    """Keep NumPy's and torch's arithmetic on one thread from now on."""
    import threadpoolctl

    if importlib.util.find_spec("torch"):
        import torch

        torch.set_num_threads(1)
    if not _LIMITS:
        _LIMITS.append(threadpoolctl.threadpool_limits(1))


@lru_cache(maxsize=4)
def _loaded(registered: str) -> dict[str, Any]:
    """The implementations behind a registered name, by their own names."""
    try:
        from veriformer.targets import Options, load
    except ImportError as error:
        raise Absent(f"the package cannot be imported: {error}") from error
    return {one.description.name: one for one in load(registered, Options())}


LATER = ("torch._dynamo", "veriformer.oracle", "veriformer.budgets.perturbation", "veriformer.budgets.universal")
"""What is imported only when a first gradient, optimizer step or budget is asked for, and takes up to a second."""


def preload() -> None:
    """Import what every cell needs, in the process that asv's cells begin as copies of; else each takes seconds."""
    for module in LATER:
        with suppress(Exception):  # whoever lacks something is told when it is asked for
            importlib.import_module(module)
    with suppress(Exception):
        for registered in ("numpy", "torch"):
            _loaded(registered)
        one_thread()
    gc.collect()
    gc.freeze()  # or else the first search for garbage in each copy touches, and so copies, all that was imported


def named(name: str, operation: str) -> Any:
    """A loaded implementation of the package by its name, such as torch:default.

    Raises Absent where this version of the package has none of this name, or one without the operation.
    """
    found = _loaded(name.partition(":")[0]).get(name)
    if found is None or operation not in found.boundaries:
        raise Absent(f"{name} has no {operation} in this version")
    return found


def _judges_gradients() -> bool:
    from veriformer import oracle

    return hasattr(oracle, "gradient_bounds")


class Prepared:
    """One implementation at one workload: calls on inputs of their own.

    loaded: as `veriformer.targets.load` gives it. natives: the arrays of the latest fresh call. Raises Absent where
    it lacks the operation, the dtype, or a way to its gradient.
    """

    def __init__(self, loaded: Any, workload: Workload, dtype: str = "") -> None:
        self.workload, self.dtype = workload, dtype or workload.dtype
        self.name, operation = loaded.description.name, workload.operation
        if operation not in loaded.boundaries:
            raise Absent(f"{self.name} has no {operation}")
        self.boundary = loaded.boundaries[operation]
        self.framework, self.capabilities = self.boundary.framework, self.boundary.capabilities
        self.vjp: Any = getattr(self.boundary, "vjp", None)
        self._cases: dict[int, Any] = {}
        self.natives: dict[str, Any] = {}
        self._refuse_what_it_lacks(loaded.description)

    def _refuse_what_it_lacks(self, description: Any) -> None:
        declared = self.capabilities.dtypes or description.default_dtypes
        if self.dtype not in declared:
            raise Absent(f"{self.name} has no {self.dtype}")
        if self.needs_gradient and not _judges_gradients():
            raise Absent("this version has no budgets of gradients")
        if self.needs_gradient and not getattr(self.capabilities, "gradients", True):
            raise Absent(f"{self.name} has no gradients")
        if self.needs_gradient and self.vjp is None and self.framework.name == "numpy":
            raise Absent(f"{self.name} has no {self.workload.operation}_vjp")
        lacking = [word for word in self.case(0).keywords if word not in self._words()]
        if lacking:
            raise Absent(f"{self.name} does not take {lacking[0]}")

    def _words(self) -> set[str]:
        table = self.case(0).table
        return {*self.boundary.plan.keywords, *getattr(table, "scalars", ())}  # the first versions had none

    @property
    def needs_gradient(self) -> bool:
        """Whether a call includes a gradient."""
        return self.workload.direction in ("backward", "training")

    def forward(self) -> Prepared:
        """The same inputs without the gradient, to judge what a training computes on its way and does not return."""
        found = copy.copy(self)
        found.workload = replace(self.workload, direction="forward")
        return found

    def case(self, number: int) -> Any:
        """The inputs of a number as the package's own record of a call, rounded to the dtype, read-only."""
        base = self._base(number)
        return base.with_arrays(**self._turned(base, number)) if number >= DRAWN else base

    def _base(self, number: int) -> Any:
        """The inputs that a number has but for a turn; drawn once."""
        seed = number % DRAWN
        if seed not in self._cases:
            self._cases[seed] = self._drawn(seed)
        return self._cases[seed]

    def _turned(self, base: Any, number: int) -> dict[str, np.ndarray]:
        """The first array of real numbers with all its entries some places further: new values for little time."""
        name = next(name for name, array in base.arrays.items() if array.dtype.kind == "f")
        return {name: np.roll(base.arrays[name], number // DRAWN)}

    def _drawn(self, number: int) -> Any:
        from veriformer.case import Case

        found = Case(self.workload.operation, self.workload.arrays(number), self.workload.keywords, self.dtype)
        if self.workload.prompt:
            return found.with_arrays(tokens=found["tokens"][:, : self.workload.prompt])
        return found

    def cotangent(self, number: int, shape: tuple[int, ...]) -> np.ndarray:
        """What the gradient's result is multiplied with."""
        return np.random.default_rng([number, 1]).standard_normal(shape)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the arrays whose gradients are asked for."""
        case = self.case(0)
        return tuple(name for name in case.arrays if case.table.kind(name) == "float")

    def fresh(self, number: int) -> Callable[[], Any]:
        """A call on fresh arrays with the inputs of a number; building them is not part of it."""
        if self.workload.prompt:
            return self._generation(number)
        positional, named, natives = self._arguments(self._request(number))
        self.natives = natives
        if self.needs_gradient and self.vjp is None:  # before a factory packs weights, which are then recorded
            for name in self.inputs:
                natives[name].requires_grad_(True)
        function = self.boundary.function
        if getattr(self.boundary.plan, "factory", False):
            with self.framework.seeded():
                function, positional = function(positional[-1], **named), positional[:-1]
            named = {}
        forward = lambda: function(*positional, **named)  # noqa: E731
        if not self.needs_gradient:
            return forward
        if self.vjp is not None:
            return self._with_vjp(forward, number, positional, named)
        return self._with_autograd(forward, number, natives)

    def _request(self, number: int) -> Any:
        """The inputs of a number as what is asked of an implementation."""
        from veriformer.boundary import Request

        base = self._base(number)
        turned = self._turned(base, number) if number >= DRAWN else {}
        return Request({**base.arrays, **turned}, base.keywords, base.dtype)

    def _arguments(self, request: Any) -> tuple[list[Any], dict[str, Any], dict[str, Any]]:
        from veriformer.calling import arguments

        return arguments(self.boundary.plan, self.capabilities, self.framework, request)

    def _with_vjp(
        self, forward: Callable[[], Any], number: int, positional: list[Any], named: dict[str, Any]
    ) -> Callable[[], Any]:
        out = np.asarray(self.results(forward())[0])
        cotangent = self.framework.native(self.cotangent(number, out.shape), self.dtype)
        vjp = self.vjp
        if self.workload.direction == "backward":
            return lambda: vjp(cotangent, *positional, **named)
        return lambda: (forward(), vjp(cotangent, *positional, **named))[1]

    def _with_autograd(self, forward: Callable[[], Any], number: int, natives: dict[str, Any]) -> Callable[[], Any]:
        inputs = {name: natives[name] for name in self.inputs}
        gradients, ready = self.framework.gradients, self.results(forward())
        cotangent = self.framework.native(self.cotangent(number, tuple(ready[0].shape)), self.dtype)
        cotangents = [cotangent, *[None] * (len(ready) - 1)]
        if self.workload.direction == "backward":
            return lambda: gradients(ready, cotangents, inputs)
        return lambda: gradients(self.results(forward()), cotangents, inputs)

    def results(self, returned: Any) -> list[Any]:
        """The operation's results among what a function returned."""
        pick = self.boundary.plan.pick
        if pick is not None:
            return [returned[place] for place in pick]
        return list(returned) if isinstance(returned, (tuple, list)) else [returned]

    def heads_first(self, result: Any) -> Any:
        """A result as the reference has it, heads before tokens, where the target declares that they come after."""
        headed = getattr(self.case(0).table, "headed", ())
        if getattr(self.capabilities, "layout", "BHTD") == "BTHD" and headed and getattr(result, "ndim", 0) == 4:
            return self.framework.permute(result, (0, 2, 1, 3))
        return result

    def _generation(self, number: int) -> Callable[[], Any]:
        """Greedy generation by a model made of the weights: tokens[1,length], and the logits that chose them."""
        from veriformer.models import model_arguments

        request, work, facts = self._request(number), self.workload, self.boundary.facts
        positional, named, _ = model_arguments(self.boundary.plan, self.capabilities, self.framework, request, facts)
        with self.framework.seeded():
            model = self.framework.in_eval(self.boundary.function(*positional, **named))
        prompt = request.arrays["tokens"]
        extended = self._one_by_one if work.direction == "generation" else self._anew
        return lambda: extended(model, prompt, work.length)

    def _one_by_one(self, model: Any, tokens: np.ndarray, length: int) -> tuple[np.ndarray, list[Any]]:
        given, cache = tokens, None
        scores: list[Any] = []
        while tokens.shape[1] < length:
            logits, cache = model.step(self.framework.native(given, self.dtype), cache)
            given = self._likeliest(logits, scores)
            tokens = np.concatenate([tokens, given], axis=1)
        return tokens, scores

    def _anew(self, model: Any, tokens: np.ndarray, length: int) -> tuple[np.ndarray, list[Any]]:
        scores: list[Any] = []
        while tokens.shape[1] < length:
            given = self._likeliest(model.full(self.framework.native(tokens, self.dtype)), scores)
            tokens = np.concatenate([tokens, given], axis=1)
        return tokens, scores

    @staticmethod
    def _likeliest(logits: Any, scores: list[Any]) -> np.ndarray:
        scores.append(logits[:, -1])
        return np.asarray(logits[:, -1].argmax(-1)).reshape(-1, 1).astype(np.int64)
