"""The framework that a function under test is written in, by what it is and what it speaks of."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from typing import Any

from veriformer.frameworks import FRAMEWORKS

ON_JAX = frozenset({"jax", "jaxlib", "flax", "equinox", "optax"})
"""Packages whose functions take arrays of JAX."""


def framework_of(function: Any, module: Any) -> str:
    """The framework a function is written in: its module's FRAMEWORK, else a look at its globals.

    A framework that has not been imported by now cannot be the function's.
    """
    declared = getattr(module, "FRAMEWORK", None)
    if declared:
        return str(declared)
    if not {"torch", "jax"} & sys.modules.keys():
        return "numpy"
    while isinstance(function, functools.partial):
        function = function.func
    if "jax" in sys.modules and {_root(type(function)), _root(function)} & ON_JAX:
        return "jax"
    if "torch" in sys.modules and _of_torch(function):
        return "torch"
    kind = function if isinstance(function, type) else type(function)
    if kind.__module__ not in ("builtins", "functools") and not hasattr(function, "__code__"):
        return _framework_of_class(kind, function, module)
    plain = getattr(function, "__wrapped__", function)
    plain = getattr(plain, "__func__", plain)
    names = getattr(plain, "__globals__", None) or vars(module)
    used = _owners(names[name] for name in _used(plain, names))
    # what the function uses decides; where that tells nothing, what its module holds
    return _first(used or _owners(names.values()))


def _root(value: Any) -> str:
    """The package that a function or class says it is of."""
    return _first_part(getattr(value, "__module__", ""))


def _first_part(name: Any) -> str:
    return name.split(".")[0] if isinstance(name, str) else ""


def _of_torch(function: Any) -> bool:
    """Whether a function is one of torch itself, a method of its tensors, or a module."""
    torch = sys.modules["torch"]
    bound = getattr(function, "__self__", None)
    if _root(function) == "torch" or (bound is not None and type(bound).__module__.startswith("torch")):
        return True
    if issubclass(function if isinstance(function, type) else type(function), torch.nn.Module):
        return True
    return function is getattr(torch.nn.functional, getattr(function, "__name__", ""), None)


def _first(owners: set[str]) -> str:
    """The framework that a function with these owners takes arrays of; all of them have NumPy's beside their own."""
    return next((name for name in ("torch", "jax") if name in owners), "numpy")


def _framework_of_class(kind: type, model: Any, module: Any) -> str:
    """The framework of a model's class: of what it holds, or of what its methods speak of."""
    methods = [value for value in vars(kind).values() if hasattr(value, "__code__")]
    names = [method.__globals__[name] for method in methods for name in _used(method, method.__globals__)]
    held = [type(value) for value in vars(model).values()] if hasattr(model, "__dict__") else []
    return _first(_owners([*names, *held, *kind.__mro__]) or _owners(vars(module).values()))


def _used(function: Any, names: dict[str, Any], depth: int = 3) -> set[str]:
    """Global names that a function speaks of, also through functions of its own module."""
    code = getattr(function, "__code__", None)
    if code is None:
        return set()
    found, codes = set(), [code]
    while codes:
        one = codes.pop()
        found |= {name for name in one.co_names if name in names}
        codes += [const for const in one.co_consts if hasattr(const, "co_names")]
    for name in list(found) if depth else []:
        found |= _used(names[name], names, depth - 1) if getattr(names[name], "__globals__", None) is names else set()
    return found


def _owners(values: Iterable[Any]) -> set[str]:
    """The frameworks that modules, functions and classes among the values belong to."""
    found = set()
    for value in list(values):
        owner = getattr(value, "__name__", None) if hasattr(value, "__loader__") else getattr(value, "__module__", None)
        # a jitted function says that it is of the user's module, and only its type that it is JAX's
        roots = {_first_part(owner), _root(type(value))}
        found |= {_first_part(owner)} & set(FRAMEWORKS)
        found |= {"jax"} if roots & ON_JAX else set()
        found |= {"torch"} if "transformers" in roots else set()
    return found
