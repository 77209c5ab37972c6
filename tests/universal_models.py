"""Small Universal Transformers with random parameters, in which positions halt at different steps."""

from __future__ import annotations

from typing import Any

import numpy as np
from reference_models import random_layer

HEADS, WIDTH = 4, 8


def random_universal(seed: int = 0, *, cross: bool = False, bias: float = -0.5, steep: float = 4.0) -> Any:
    """params of universal_transformer; the halting unit reads about bias, and steep says how much states matter."""
    generator = np.random.default_rng([seed, 7])
    layer, w = random_layer(seed, cross=cross), steep * generator.normal(size=(WIDTH, 1)) / WIDTH**0.5
    centre = layer["norm3" if cross else "norm2"]["bias"] @ w  # what post-norm adds to every state
    return {"layer": layer, "halt": {"w": w, "b": bias - centre}}


def random_states(seed: int, batch: int, length: int) -> np.ndarray:
    return np.random.default_rng([seed, 8]).normal(size=(batch, length, WIDTH))


def with_halting(params: Any, bias: float, steep: float = 0.0) -> Any:
    """The same with another halting unit: the bias alone, or plus some of what it had."""
    return params | {"halt": {"w": steep * params["halt"]["w"], "b": np.asarray([bias])}}
