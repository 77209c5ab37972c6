"""Whether a Transformer part is right: laws, minimal counterexamples, derived error budgets."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Capabilities", "Expected", "Report", "UsageError", "__version__", "check", "conformance", "torch_module"]

if TYPE_CHECKING:
    from veriformer.calling import UsageError
    from veriformer.checking import Report, check
    from veriformer.conform import conformance
    from veriformer.declarations import Capabilities, Expected
    from veriformer.modules import torch_module

_HOMES = {
    "Capabilities": "veriformer.declarations",
    "Expected": "veriformer.declarations",
    "Report": "veriformer.checking",
    "UsageError": "veriformer.calling",
    "check": "veriformer.checking",
    "conformance": "veriformer.conform",
    "torch_module": "veriformer.modules",
}


def __getattr__(name: str) -> Any:
    # lazily, so that importing the pytest plugin costs an unrelated test suite nothing
    if name not in _HOMES:
        raise AttributeError(f"module 'veriformer' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
