"""Optax's cross entropy: from whole numbers, and from smoothed one-hot labels.

Both give one loss for each row; means and sums are the caller's. There is no index to ignore, and a mask (where) goes
over classes too; smoothing is a function on the labels, spread over all classes. Both are compiled by jax.jit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax
from jax import Array

from veriformer.declarations import Capabilities, Expected

FRAMEWORK = "jax"
DISTRIBUTIONS = ("optax", "jax")


def cross_entropy(logits: Array, targets: Array, *, reduction: str = "mean") -> Array:
    """optax.softmax_cross_entropy_with_integer_labels, reduced.

    logits[N,V], targets[N] -> loss[], or loss[N] with reduction none
    loss_n = log sum_j exp(x_nj) - x_n,target
    Source: the Optax manual, optax.losses.softmax_cross_entropy_with_integer_labels.
    """
    return _reduced(optax.softmax_cross_entropy_with_integer_labels(logits, targets), reduction)


def cross_entropy_of_labels(
    logits: Array, targets: Array, *, label_smoothing: float = 0.0, reduction: str = "mean"
) -> Array:
    """optax.softmax_cross_entropy of one-hot labels after optax.smooth_labels, reduced.

    logits[N,V], targets[N] -> loss[], or loss[N] with reduction none
    loss_n = -sum_j q_nj log_softmax(x_n)_j,  q_n = (1 - e) one_hot(targets_n) + e / V
    Source: the Optax manual, optax.losses.softmax_cross_entropy and smooth_labels.
    """
    labels = jax.nn.one_hot(targets, logits.shape[-1], dtype=logits.dtype)
    return _reduced(optax.softmax_cross_entropy(logits, optax.smooth_labels(labels, label_smoothing)), reduction)


def _reduced(losses: Array, reduction: str) -> Array:
    return {"none": lambda: losses, "sum": losses.sum, "mean": losses.mean}[reduction]()


_STATIC = ("reduction",)
VARIANTS: dict[str, dict[str, Callable[..., Any]]] = {
    "integer_labels": {"cross_entropy": jax.jit(cross_entropy, static_argnames=_STATIC)},
    "smoothed_labels": {"cross_entropy": jax.jit(cross_entropy_of_labels, static_argnames=_STATIC)},
}
_EACH = Capabilities(compiles_per_shape=True)
CAPABILITIES = {variant: {"cross_entropy": _EACH} for variant in VARIANTS}
EXPECTED: list[Expected] = []
