"""The Triton implementations in an interpreter that prepares the language once for each kernel.

It replaces all of the language for each function that a kernel calls, and tl.sum and tl.max are such too: with that
left out, and what is to be replaced looked up once, a small program takes a fifth of the time.
"""

from __future__ import annotations

import inspect
import os
from types import SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import triton.language as tl  # noqa: E402
from triton.runtime import interpreter  # noqa: E402

_found: dict[Any, list[tuple[str, Any]]] = {}
_patch_lang = interpreter._patch_lang
_BOTH = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
"""A function that knows the language under both of the names by which kernels and tl.sum know it."""


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    if package not in _found:
        _found[package] = [pair for pair in inspect.getmembers(package) if tl.core.is_builtin(pair[1])]
    for name, member in _found[package]:
        interpreter._patch_attr(package, name, member, builder, scope)


def _call(self: Any, *arguments: Any, **words: Any) -> Any:
    return self.rewrite()(*arguments, **words)


interpreter._patch_builtin = _patch_builtin
interpreter._patch_lang = lambda kernel: _patch_lang(_BOTH)
interpreter.InterpretedFunction.__call__ = _call  # type: ignore[method-assign]

from veriformer.impls import triton_attention, triton_cached, triton_kernels  # noqa: E402

FRAMEWORK = "torch"
VARIANTS = {
    "kernels": {"softmax": triton_kernels.softmax, "layer_norm": triton_kernels.layer_norm},
    "attention": {"attention": triton_attention.attention},
    "cached": {"cached_attention": triton_cached.cached_attention},
}
CAPABILITIES = {
    "kernels": triton_kernels.CAPABILITIES,
    "attention": triton_attention.CAPABILITIES,
    "cached": triton_cached.CAPABILITIES,
}
