"""Keras 3 on JAX."""

from __future__ import annotations

import os
import sys

_BACKEND = "jax"
if "keras" in sys.modules and sys.modules["keras"].backend.backend() != _BACKEND:
    raise ImportError(f"keras_{_BACKEND}: Keras is imported with another backend; judge the two in runs of their own")
os.environ["KERAS_BACKEND"] = _BACKEND

from veriformer.impls import keras_attention, keras_layers  # noqa: E402

FRAMEWORK = _BACKEND
DISTRIBUTIONS = ("keras", _BACKEND)
VARIANTS = {**keras_layers.VARIANTS, **keras_attention.VARIANTS}
CAPABILITIES = {**keras_layers.CAPABILITIES, **keras_attention.CAPABILITIES}
EXPECTED = [*keras_layers.EXPECTED, *keras_attention.EXPECTED]
