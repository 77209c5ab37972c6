"""Optax's AdamW, Adam and clipping as pure functions: its state is made of ours, and what an update makes comes out.

Optax transforms gradients into updates, which optax.apply_updates adds to the parameters. Its step counts from 0.
Clipping divides by the norm itself, and only where the norm is not below max_norm; norms are sums in the gradients' own
dtype. Optax has no schedule of the first Transformer (noam). All is compiled by jax.jit, rates and other numbers as
arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from veriformer.declarations import Capabilities, Expected

FRAMEWORK = "jax"
DISTRIBUTIONS = ("optax", "jax")
State = tuple[Array, Array, Array]


def _stepped(optimizer: Any, param: Array, grad: Array, m: Array, v: Array, step: int) -> State:
    """The parameter and the moments after one update of an optimizer whose state holds these moments."""

    def ours(state: Any) -> Any:
        is_adam = isinstance(state, optax.ScaleByAdamState)
        return state._replace(count=jnp.asarray(step - 1, jnp.int32), mu=m, nu=v) if is_adam else state

    adam = lambda state: isinstance(state, optax.ScaleByAdamState)  # noqa: E731
    state = jax.tree.map(ours, optimizer.init(param), is_leaf=adam)
    updates, state = optimizer.update(grad, state, param)
    moments = next(part for part in jax.tree.leaves(state, is_leaf=adam) if adam(part))
    return optax.apply_updates(param, updates), moments.mu, moments.nu


def adamw_step(
    param: Array,
    grad: Array,
    m: Array,
    v: Array,
    step: int,
    *,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> State:
    """One update of optax.adamw from a given state.

    param[...], grad[...], m[...], v[...], step from 1 -> (param, m, v)
    Source: the Optax manual, optax.adamw.
    """
    return _stepped(optax.adamw(lr, beta1, beta2, eps, weight_decay=weight_decay), param, grad, m, v, step)


def adam_step(
    param: Array,
    grad: Array,
    m: Array,
    v: Array,
    step: int,
    *,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
) -> State:
    """One update of optax.adam from a given state.

    param[...], grad[...], m[...], v[...], step from 1 -> (param, m, v)
    Source: the Optax manual, optax.adam.
    """
    return _stepped(optax.adam(lr, beta1, beta2, eps), param, grad, m, v, step)


def clip_by_global_norm(grads: list[Array], *, max_norm: float) -> list[Array]:
    """optax.clip_by_global_norm.

    grads: arrays of any shapes -> a list like it
    g where norm < max_norm, else g / norm max_norm
    Source: the Optax manual, optax.clip_by_global_norm.
    """
    transform = optax.clip_by_global_norm(max_norm)
    clipped, _ = transform.update(grads, transform.init(grads))
    return list(clipped)


VARIANTS: dict[str, dict[str, Callable[..., Any]]] = {
    "adamw": {"adamw_step": jax.jit(adamw_step), "clip_by_global_norm": jax.jit(clip_by_global_norm)},
    "adam": {"adamw_step": jax.jit(adam_step)},
}
_EACH = Capabilities(compiles_per_shape=True)
CAPABILITIES = {variant: {operation: _EACH for operation in functions} for variant, functions in VARIANTS.items()}
EXPECTED: list[Expected] = []
