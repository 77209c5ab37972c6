"""torch modules as targets for operations with weights: a map says where each weight belongs.

TestConformance = veriformer.conformance(
    multi_head_attention=veriformer.torch_module(
        lambda heads, d_model: MyAttention(d_model, heads),
        map={"wq": "q_proj.weight.T", "bq": "q_proj.bias", …},
    )
)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from veriformer.calling import ALIASES, UsageError, nearest
from veriformer.operation import PARAMS
from veriformer.operations import OPERATIONS
from veriformer.weight_map import module_weights, read_map

FRAMEWORK = "torch"
OPERATION = "multi_head_attention"
MEMORY = ("memory", "key", "value", "kv", "context", "encoder_hidden_states", "key_value_states")
"""Names under which a module may take the memory; all of them that it has are given it."""
MASKS = ("mask", "attn_mask", "attention_mask")
FACTORY_WORDS = {
    "H": (*ALIASES["heads"], "num_attention_heads"),
    "d": ("d", "d_model", "dim", "embed_dim", "hidden_size", "model_width"),
    "G": ("key_heads", "kv_heads", "num_kv_heads", "n_kv_heads", "num_key_value_heads"),
    "D": ("head_dim", "head_width"),
}
"""Sizes that a factory may ask for, and the names under which it may."""

Call = Callable[[Any, Any, Any, Any, bool], Any]
"""(module, x, memory, mask, causal) -> output."""


def torch_module(
    factory: Callable[..., Any],
    map: Mapping[str, str],
    *,
    call: Call | None = None,
    accepts: Sequence[str] | None = None,
) -> Callable[..., Any]:
    """A target for multi_head_attention made of an nn.Module whose weights the suite sets.

    factory: a module class or a function; it is given the sizes that its parameters name (heads or
    num_heads, d_model or embed_dim, key_heads or num_kv_heads, head_dim), and called once for each
    set of shapes. map: our weights (wq, wk, wv, wo, bq, bk, bv, bo) -> the module's parameters, as in
    "q_proj.weight.T" or "in_proj_weight[d:2*d].T"; `.T` transposes, and rows may be cut with numbers
    and the sizes d, H, G, D and Dv. Every parameter of the module must be reached. call: how x,
    memory, mask and causal are passed, (module, x, memory, mask, causal) -> output; by default by the
    names of forward's parameters, the first of which is x. accepts: "mask" and "causal", as far as the
    module can do them; by default what forward names where that can be read, else both.

    Gradients reach the weights, since these stand in for the module's own during the call. The module
    is in eval mode and of x's dtype. A result that is a tuple counts by its first entry. A module that
    takes no memory is asked only where memory equals x.

    Raises UsageError for a map that cannot be read or names unknown weights, and, when it is called, for
    parameters that do not exist (naming the nearest), are not reached, or have another shape.
    """
    places = read_map(map, [name.removeprefix(PARAMS) for name in OPERATIONS[OPERATION].params])
    built: dict[Any, Any] = {}

    def multi_head_attention(
        x: Any, memory: Any, params: Mapping[str, Any], *, heads: int, mask: Any = None, causal: bool = False
    ) -> Any:
        from torch.func import functional_call

        sizes = _sizes(x, params, heads)
        key = (x.dtype, x.device, heads, *((name, array.shape) for name, array in params.items()))
        if key not in built:
            built[key] = _build(factory, sizes, x, call or _call_by_names)
        weights = module_weights(built[key].module, places, params, sizes)
        weights = {f"module.{name}": array for name, array in weights.items()}
        result = functional_call(built[key], weights, (x, memory, mask, causal))
        return result[0] if isinstance(result, (tuple, list)) else result

    target: Any = multi_head_attention
    target.__signature__ = _signature(_accepted(factory, call) if accepts is None else tuple(accepts))
    target.__wrapped__ = factory  # tells the framework, by what the factory uses
    target.__qualname__ = f"torch_module({getattr(factory, '__qualname__', 'factory')})"
    return multi_head_attention


def _accepted(factory: Callable[..., Any], call: Call | None) -> tuple[str, ...]:
    """What can be passed on, as far as a class tells; a function and a call of the user's own are trusted."""
    if call is not None or not hasattr(factory, "forward"):
        return ("mask", "causal")
    names = inspect.signature(factory.forward).parameters
    found = {"mask": any(name in MASKS for name in names), "causal": any(name in ALIASES["causal"] for name in names)}
    return tuple(word for word, there in found.items() if there)


def _signature(accepts: Sequence[str]) -> inspect.Signature:
    kinds, defaults = inspect.Parameter, {"mask": None, "causal": False}
    for word in accepts:
        if word not in defaults:
            raise UsageError(f"accepts: got {word!r}, wanted 'mask', 'causal', both or neither")
    parameters = [kinds(name, kinds.POSITIONAL_OR_KEYWORD) for name in ("x", "memory", "params")]
    parameters.append(kinds("heads", kinds.KEYWORD_ONLY))
    return inspect.Signature([*parameters, *(kinds(w, kinds.KEYWORD_ONLY, default=defaults[w]) for w in accepts)])


def _sizes(x: Any, params: Mapping[str, Any], heads: int) -> dict[str, int]:
    """Sizes by their letters in the table of operations."""
    width = params["wq"].shape[1] // heads
    groups = params["wk"].shape[1] // width
    return {"d": x.shape[-1], "H": heads, "G": groups, "D": width, "Dv": params["wv"].shape[1] // groups}


def _build(factory: Callable[..., Any], sizes: Mapping[str, int], x: Any, call: Call) -> Any:
    """The module that the factory makes, in eval mode, in another one that calls it; no random state is used up."""
    import torch

    class Called(torch.nn.Module):
        def __init__(self, module: Any) -> None:
            super().__init__()
            self.module = module

        def forward(self, *arguments: Any) -> Any:
            return call(self.module, *arguments)

    with torch.random.fork_rng(devices=[x.device] if x.device.type == "cuda" else []):
        module = factory(**_factory_words(factory, sizes))
    if not isinstance(module, torch.nn.Module):
        raise UsageError(f"torch_module: the factory made a {type(module).__name__}, wanted an nn.Module")
    return Called(module.to(x.device, x.dtype)).eval().requires_grad_(False)


def _factory_words(factory: Callable[..., Any], sizes: Mapping[str, int]) -> dict[str, int]:
    """The sizes that a factory's parameters name. Raises UsageError for one that it needs and nobody knows."""
    words = {name: size for size, names in FACTORY_WORDS.items() for name in names}
    found = {}
    for name, parameter in inspect.signature(factory).parameters.items():
        if name in words:
            found[name] = sizes[words[name]]
        elif _needed(parameter):
            said = f"torch_module: {name!r} of the factory is no known size{nearest(name, list(words))}"
            raise UsageError(f"{said}; wrap it, as in lambda heads, d_model: Module(…)")
    return found


def _needed(parameter: inspect.Parameter) -> bool:
    """Whether a call must give it."""
    several = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return parameter.default is parameter.empty and not several


def _call_by_names(module: Any, x: Any, memory: Any, mask: Any, causal: bool) -> Any:
    """Call a module as the names of forward's parameters tell. Raises NotImplementedError for what it cannot take."""
    import torch

    named: dict[str, Any] = {}
    for parameter in list(inspect.signature(module.forward).parameters.values())[1:]:
        name = parameter.name
        if name in MEMORY:
            named[name] = memory
        elif name in ALIASES["causal"]:
            named[name] = causal
        elif name in MASKS:
            named |= {name: mask} if mask is not None or _needed(parameter) else {}
        elif _needed(parameter):
            raise UsageError(
                f"torch_module: forward needs {name!r}; say call=lambda module, x, memory, mask, causal: …"
            )
    if mask is not None and not any(name in MASKS for name in named):
        raise NotImplementedError("forward has no parameter for a mask")
    if causal and not any(name in ALIASES["causal"] for name in named):
        raise NotImplementedError("forward has no parameter for causal")
    if not any(name in MEMORY for name in named) and not (x.shape == memory.shape and torch.equal(x, memory)):
        raise NotImplementedError("forward has no parameter for memory: it attends to x alone")
    return module(x, **named)
