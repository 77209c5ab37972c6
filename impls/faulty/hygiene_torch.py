"""A right softmax that misbehaves around torch: random numbers, defaults, threads, in-place work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from veriformer.declarations import Fault

FRAMEWORK = "torch"


def _make(fault: str) -> Callable[..., Any]:
    def softmax(x: Tensor, *, axis: int = -1, temperature: float = 1.0) -> Any:
        p = torch.softmax(x / temperature, dim=axis)
        if fault == "torch_draws_random_numbers":
            torch.rand(1)
        if fault == "torch_sets_default_dtype":
            torch.set_default_dtype(torch.float64 if torch.get_default_dtype() == torch.float32 else torch.float32)
        if fault == "torch_sets_threads":
            torch.set_num_threads(torch.get_num_threads() % 2 + 1)
        if fault == "torch_writes_its_input":
            with torch.no_grad():
                x.copy_(p)
        return p.detach().numpy() if fault == "torch_returns_numpy" and x.dtype != torch.bfloat16 else p

    softmax.__qualname__ = f"softmax[{fault}]"
    return softmax


# law that must accuse: {variant: (where it was seen, what is wrong)}
_TABLE: dict[str, dict[str, tuple[str, str]]] = {
    "keeps-global-state": {
        "torch_draws_random_numbers": ("mutation: dropout of rate 0", "the global generator advances"),
        "torch_sets_default_dtype": ("mutation: a default changed for convenience", "the default dtype changes"),
        "torch_sets_threads": ("mutation: threads tuned per call", "the number of threads changes"),
    },
    "leaves-inputs-untouched": {
        "torch_writes_its_input": ("mutation: an in-place kernel", "x is overwritten by the result"),
    },
    "returns-an-array": {
        "torch_returns_numpy": ("mutation: a NumPy array for a tensor", "the wrong framework's array"),
    },
}
FAULTS = {
    variant: Fault("softmax", f"softmax/{law}", source, summary)
    for law, variants in _TABLE.items()
    for variant, (source, summary) in variants.items()
}
VARIANTS = {variant: {"softmax": _make(variant)} for variant in ("correct", *FAULTS)}
