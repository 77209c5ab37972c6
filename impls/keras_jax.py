"""Keras 3 on JAX."""

from __future__ import annotations

import os
import sys

_BACKEND = "jax"
if "keras" in sys.modules and sys.modules["keras"].backend.backend() != _BACKEND:
    raise ImportError(f"keras_{_BACKEND}: Keras is imported with another backend; judge the two in runs of their own")
os.environ["KERAS_BACKEND"] = _BACKEND

from veriformer.impls import keras_layers  # noqa: E402

FRAMEWORK = keras_layers.FRAMEWORK
DISTRIBUTIONS = keras_layers.DISTRIBUTIONS
VARIANTS = keras_layers.VARIANTS
CAPABILITIES = keras_layers.CAPABILITIES
EXPECTED: list[object] = []
