"""A training step in NumPy: AdamW, clipping by the global norm, Noam's schedule; each in three ways of writing.

"optimizer" is the formula, with a norm of scaled entries that never overflows. "optimizer_folded" folds the corrections
into the rate (declared: adam_epsilon = uncorrected) and couples the decay (declared: weight_decay = coupled); it takes
the norms of the arrays first, and divides by norm + 1e-6 (declared). "optimizer_stored" keeps what it has between two
steps in the dtype of its arguments, and moves the averages by differences.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from veriformer.declarations import DTYPES, Capabilities

FRAMEWORK = "numpy"
_WIDENED = {"float64": "float64", "default": "float32"}


def adamw_step(
    param: NDArray,
    grad: NDArray,
    m: NDArray,
    v: NDArray,
    step: int,
    *,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> tuple[NDArray, NDArray, NDArray]:
    """One step of AdamW; 16-bit numbers in float32.

    param[...], grad[...], m[...], v[...], step t from 1 -> (param, m, v)
    m = beta1 m + (1 - beta1) g, v = beta2 v + (1 - beta2) g^2
    param = param (1 - lr weight_decay) - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)
    Source: Loshchilov, Hutter 2019, algorithm 2; Kingma, Ba 2015, algorithm 1.
    """
    theta, g, mean, square = map(_wide, (param, grad, m, v))
    mean = beta1 * mean + (1 - beta1) * g
    square = beta2 * square + (1 - beta2) * (g * g)
    unbiased, deviation = mean / (1 - beta1**step), np.sqrt(square / (1 - beta2**step))
    theta = theta * (1 - lr * weight_decay) - lr * (unbiased / (deviation + eps))
    return theta.astype(param.dtype), mean.astype(m.dtype), square.astype(v.dtype)


def _adam_folded(
    param: NDArray,
    grad: NDArray,
    m: NDArray,
    v: NDArray,
    step: int,
    *,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> tuple[NDArray, NDArray, NDArray]:
    """Adam with an L2 penalty and one rate for both corrections, as in section 2 of Kingma, Ba 2015."""
    theta, g = _wide(param), _wide(grad) + weight_decay * _wide(param)
    mean = beta1 * _wide(m) + (1 - beta1) * g
    square = beta2 * _wide(v) + (1 - beta2) * g**2
    rate = lr * math.sqrt(1 - beta2**step) / (1 - beta1**step)
    theta = theta - rate * mean / (np.sqrt(square) + eps)
    return theta.astype(param.dtype), mean.astype(m.dtype), square.astype(v.dtype)


def _adamw_stored(
    param: NDArray,
    grad: NDArray,
    m: NDArray,
    v: NDArray,
    step: int,
    *,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> tuple[NDArray, NDArray, NDArray]:
    """AdamW whose every array is stored in the dtype of param; numbers that are no arrays are of the wider one."""
    kind, wide = param.dtype, _wide(param).dtype.type

    def scaled(factor: float, array: NDArray) -> NDArray:
        return (wide(factor) * array.astype(wide)).astype(kind)

    mean = m + scaled(1 - beta1, grad - m)
    square = v + scaled(1 - beta2, grad * grad - v)
    deviation = scaled(1 / math.sqrt(1 - beta2**step), np.sqrt(square))
    moved = scaled(lr / (1 - beta1**step), mean / (deviation + np.asarray(eps, kind)))
    return scaled(1 - lr * weight_decay, param) - moved, mean, square


def clip_by_global_norm(grads: list[NDArray], *, max_norm: float) -> list[NDArray]:
    """All gradients times one factor that brings their common norm down to max_norm.

    grads: arrays of any shapes -> a list like it
    g min(1, max_norm / norm), norm = a sqrt(sum (g / a)^2) with a the largest entry
    Source: Pascanu, Mikolov, Bengio 2013, algorithm 1. Norm 0 changes nothing.
    """
    wide = [_wide(g) for g in grads]
    largest = max((float(np.abs(g).max(initial=0.0)) for g in wide), default=0.0)
    if not largest:
        return [g.copy() for g in grads]
    squares = sum(float(np.square(g / g.dtype.type(largest)).sum()) for g in wide)
    factor = min(1.0, max_norm / (largest * math.sqrt(squares)))
    return [(g * g.dtype.type(factor)).astype(given.dtype) for g, given in zip(wide, grads, strict=True)]


def _clip_by_norms(grads: list[NDArray], *, max_norm: float) -> list[NDArray]:
    """Clipping by the norm of the norms, where it exceeds max_norm."""
    norms = [np.linalg.norm(_wide(g).reshape(-1)) for g in grads]
    norm = float(np.linalg.norm(norms))
    factor = max_norm / (norm + 1e-6)
    if not factor < 1:
        return [g.copy() for g in grads]
    return [(_wide(g) * np.float32(factor)).astype(g.dtype) if g.dtype != np.float64 else g * factor for g in grads]


def _clip_stored(grads: list[NDArray], *, max_norm: float) -> list[NDArray]:
    """Clipping of one buffer that holds all gradients, its norm and factor stored in their dtype."""
    flat = np.concatenate([g.reshape(-1) for g in grads])
    norm = np.sqrt(np.square(_wide(flat)).sum()).astype(flat.dtype)
    if norm > 0:
        flat = flat * np.minimum(np.asarray(max_norm, flat.dtype) / norm, flat.dtype.type(1))
    ends = np.cumsum([g.size for g in grads])[:-1]
    return [part.reshape(g.shape).copy() for part, g in zip(np.split(flat, ends), grads, strict=True)]


def noam_schedule(step: int, *, width: int, warmup: int) -> float:
    """The rate that rises up to step `warmup` and then falls with the root of the step.

    width^(-1/2) min(step^(-1/2), step warmup^(-3/2))
    Source: Vaswani et al. 2017, section 5.3. Step 0 gives 0.
    """
    return width**-0.5 * min(step**-0.5, step * warmup**-1.5) if step else 0.0


def _noam_by_ratio(step: int, *, width: int, warmup: int) -> NDArray:
    """The peak rate, times step / warmup before and the root of warmup / step after it."""
    peak = 1 / np.sqrt(np.float64(width) * warmup)
    return np.asarray(peak * (step / warmup if step < warmup else math.sqrt(warmup / step)))


def _noam_single(step: int, *, width: int, warmup: int) -> NDArray:
    """Both powers in float32."""
    s, d, w = (np.float32(number) for number in (step, width, warmup))
    with np.errstate(divide="ignore"):
        return np.asarray(np.power(d, np.float32(-0.5)) * np.minimum(1 / np.sqrt(s), s * w ** np.float32(-1.5)))


def _wide(x: NDArray) -> NDArray:
    return x if x.dtype == np.float64 else x.astype(np.float32)


VARIANTS = {
    "optimizer": {
        "adamw_step": adamw_step,
        "clip_by_global_norm": clip_by_global_norm,
        "noam_schedule": noam_schedule,
    },
    "optimizer_folded": {
        "adamw_step": _adam_folded,
        "clip_by_global_norm": _clip_by_norms,
        "noam_schedule": _noam_by_ratio,
    },
    "optimizer_stored": {
        "adamw_step": _adamw_stored,
        "clip_by_global_norm": _clip_stored,
        "noam_schedule": _noam_single,
    },
}
CAPABILITIES = {
    "optimizer": {
        "adamw_step": Capabilities(dtypes=DTYPES, intermediate=_WIDENED),
        "clip_by_global_norm": Capabilities(dtypes=DTYPES, intermediate=_WIDENED, extreme_values=True),
    },
    "optimizer_folded": {
        "adamw_step": Capabilities(
            dtypes=DTYPES, intermediate=_WIDENED, adam_epsilon="uncorrected", weight_decay="coupled"
        ),
        "clip_by_global_norm": Capabilities(dtypes=DTYPES, intermediate=_WIDENED, clip_epsilon=1e-6),
    },
    "optimizer_stored": {
        "adamw_step": Capabilities(dtypes=DTYPES),
        "clip_by_global_norm": Capabilities(dtypes=DTYPES),
        "noam_schedule": Capabilities(dtypes=("float32",)),
    },
}
