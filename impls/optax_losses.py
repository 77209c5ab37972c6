"""Optax's cross entropies: from whole numbers, and from smoothed one-hot labels.

All give one loss for each row; means and sums are the caller's. There is no index to ignore, and a mask (where) goes
over classes too; smoothing is a function on the labels, spread over all classes. With labels, a logit of -inf that is
nobody's target gives NaN ("labels"), but for safe_softmax_cross_entropy ("safe_labels"). All is compiled by jax.jit,
which hides that NaN in most dtypes.
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


def _of_labels(loss: Callable[[Array, Array], Array]) -> Callable[..., Array]:
    def cross_entropy(logits: Array, targets: Array, *, label_smoothing: float = 0.0, reduction: str = "mean") -> Array:
        """A loss of Optax on one-hot labels after optax.smooth_labels, reduced.

        logits[N,V], targets[N] -> loss[], or loss[N] with reduction none
        loss_n = -sum_j q_nj log_softmax(x_n)_j,  q_n = (1 - e) one_hot(targets_n) + e / V
        Source: the Optax manual, optax.losses.softmax_cross_entropy, safe_softmax_cross_entropy and smooth_labels.
        """
        labels = jax.nn.one_hot(targets, logits.shape[-1], dtype=logits.dtype)
        return _reduced(loss(logits, optax.smooth_labels(labels, label_smoothing)), reduction)

    return cross_entropy


def _reduced(losses: Array, reduction: str) -> Array:
    return {"none": lambda: losses, "sum": losses.sum, "mean": losses.mean}[reduction]()


_STATIC = ("reduction",)
VARIANTS: dict[str, dict[str, Callable[..., Any]]] = {
    "integer_labels": {"cross_entropy": jax.jit(cross_entropy, static_argnames=_STATIC)},
    "labels": {"cross_entropy": jax.jit(_of_labels(optax.losses.softmax_cross_entropy), static_argnames=_STATIC)},
    "safe_labels": {
        "cross_entropy": jax.jit(_of_labels(optax.losses.safe_softmax_cross_entropy), static_argnames=_STATIC)
    },
}
_EACH = Capabilities(compiles_per_shape=True)
CAPABILITIES = {variant: {"cross_entropy": _EACH} for variant in VARIANTS}
_HIDDEN = {"logits": [[0.0, float("-inf")]], "targets": [0]}
EXPECTED = [
    Expected(
        f"cross_entropy/{law}",
        reason="labels times logarithms: 0 times -inf is NaN; the manual names safe_softmax_cross_entropy for it",
        link="reports/findings/optax_labels_minus_infinity.py",
        case=_HIDDEN,
        when={"dtype": "bfloat16"},  # elsewhere XLA makes a choice of the product with a one-hot label
        variants=("labels",),
    )
    for law in ("equals-the-reference", "finite-on-plain-data", "minus-infinity-equals-deletion")
]
