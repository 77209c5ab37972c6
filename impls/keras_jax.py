"""Keras 3 on JAX: functions and layers under jax.jit, as Keras itself runs them in fit and predict.

Losses are called eagerly: compiled for a CPU, XLA drops the products with 0 that make the cross entropy NaN.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

import jax

_BACKEND = "jax"
if "keras" in sys.modules and sys.modules["keras"].backend.backend() != _BACKEND:
    raise ImportError(f"keras_{_BACKEND}: Keras is imported with another backend; judge the two in runs of their own")
os.environ["KERAS_BACKEND"] = _BACKEND

from veriformer.impls import keras_attention, keras_layers  # noqa: E402

FRAMEWORK = _BACKEND
DISTRIBUTIONS = ("keras", _BACKEND)
_TRACED = {"mask", "bias", "scale"}


def _compiled(operation: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function compiled for each value of its keywords; losses, and optimizers, which work in place, are not."""
    if operation in ("adamw_step", "clip_by_global_norm", "cross_entropy"):
        return function
    keywords = (word for word in inspect.signature(function).parameters.values() if word.kind is word.KEYWORD_ONLY)
    return jax.jit(function, static_argnames=[word.name for word in keywords if word.name not in _TRACED])


VARIANTS = {
    variant: {operation: _compiled(operation, function) for operation, function in functions.items()}
    for variant, functions in {**keras_layers.VARIANTS, **keras_attention.VARIANTS}.items()
}
CAPABILITIES = {**keras_layers.CAPABILITIES, **keras_attention.CAPABILITIES}
EXPECTED = [*keras_layers.EXPECTED, *keras_attention.EXPECTED]
