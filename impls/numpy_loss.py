"""Cross entropy in plain NumPy and its gradient, in each convention of label smoothing; and streamed, block by block.

float64 and float32 are computed in their own dtype; bfloat16 (of ml_dtypes) and float16 are widened
to float32 and rounded once at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veriformer.declarations import DTYPES, Capabilities

FRAMEWORK = "numpy"
BLOCK = 4
_ALL, _OTHERS, _OTHERS_BUT_PADDING = 0, 1, 2
"""How many classes fewer than V share label_smoothing."""


def cross_entropy(
    logits: NDArray, targets: NDArray, *, label_smoothing: float = 0.0, ignore_index: int = -100,
    reduction: str = "mean",
) -> NDArray:  # fmt: skip
    """The surprise at the targets, with label_smoothing spread over all classes.

    logits[N,V], targets[N] -> loss[], or loss[N] with reduction none
    loss_n = -sum_i q_ni log softmax(logits_n)_i, q_n = (1 - e) one_hot(targets_n) + e / V
    Source: Szegedy et al. 2016, section 7. Rows of ignore_index are 0 and not counted; the mean over no row is NaN.
    """
    return _cross_entropy(logits, targets, label_smoothing, ignore_index, reduction, _ALL)


def cross_entropy_vjp(
    cotangent: NDArray, logits: NDArray, targets: NDArray, *, label_smoothing: float = 0.0, ignore_index: int = -100,
    reduction: str = "mean",
) -> tuple[NDArray, None]:  # fmt: skip
    """The gradient of cross_entropy.

    cotangent[] or [N], logits[N,V], targets[N] -> (dlogits[N,V], None)
    dlogits_n = g_n (softmax(logits_n) - q_n), g_n the cotangent, divided by the number of kept rows for the mean
    Source: Szegedy et al. 2016, section 7. Rows of ignore_index get 0.
    """
    return _vjp(cotangent, logits, targets, label_smoothing, ignore_index, reduction, _ALL), None


def cross_entropy_others(
    logits: NDArray, targets: NDArray, *, label_smoothing: float = 0.0, ignore_index: int = -100,
    reduction: str = "mean",
) -> NDArray:  # fmt: skip
    """The same, with label_smoothing spread over the classes other than the target.

    logits[N,V], targets[N] -> loss[], or loss[N] with reduction none
    q_n is 1 - e at the target and e / (V - 1) elsewhere
    Source: Vaswani et al. 2017, section 5.4, as tensor2tensor and fairseq read it.
    """
    return _cross_entropy(logits, targets, label_smoothing, ignore_index, reduction, _OTHERS)


def cross_entropy_others_vjp(
    cotangent: NDArray, logits: NDArray, targets: NDArray, *, label_smoothing: float = 0.0, ignore_index: int = -100,
    reduction: str = "mean",
) -> tuple[NDArray, None]:  # fmt: skip
    """The gradient of cross_entropy_others.

    cotangent[] or [N], logits[N,V], targets[N] -> (dlogits[N,V], None)
    dlogits_n = g_n (softmax(logits_n) - q_n)
    Source: Szegedy et al. 2016, section 7.
    """
    return _vjp(cotangent, logits, targets, label_smoothing, ignore_index, reduction, _OTHERS), None


def cross_entropy_others_but_padding(
    logits: NDArray, targets: NDArray, *, label_smoothing: float = 0.0, ignore_index: int = -100,
    reduction: str = "mean",
) -> NDArray:  # fmt: skip
    """The same, with label_smoothing spread over the classes other than the target and the padding class.

    logits[N,V], targets[N] -> loss[], or loss[N] with reduction none
    q_n is 1 - e at the target, 0 at ignore_index and e / (V - 2) elsewhere
    Source: Rush 2018 (The Annotated Transformer), section Label Smoothing. The mean over no row is 0.
    """
    loss = _cross_entropy(logits, targets, label_smoothing, ignore_index, reduction, _OTHERS_BUT_PADDING)
    return np.where((targets == ignore_index).all(), np.zeros_like(loss), loss)


def cross_entropy_others_but_padding_vjp(
    cotangent: NDArray, logits: NDArray, targets: NDArray, *, label_smoothing: float = 0.0, ignore_index: int = -100,
    reduction: str = "mean",
) -> tuple[NDArray, None]:  # fmt: skip
    """The gradient of cross_entropy_others_but_padding.

    cotangent[] or [N], logits[N,V], targets[N] -> (dlogits[N,V], None)
    dlogits_n = g_n (softmax(logits_n) - q_n)
    Source: Szegedy et al. 2016, section 7.
    """
    return _vjp(cotangent, logits, targets, label_smoothing, ignore_index, reduction, _OTHERS_BUT_PADDING), None


def cross_entropy_streamed(
    logits: NDArray, targets: NDArray, *, label_smoothing: float = 0.0, ignore_index: int = -100,
    reduction: str = "mean",
) -> NDArray:  # fmt: skip
    """The same as cross_entropy in one pass over blocks of classes, as fused kernels do it.

    logits[N,V], targets[N] -> loss[], or loss[N] with reduction none
    loss_n = (1 - e) (lse_n - logits_n,target) + e (lse_n - mean logits_n), lse from a running maximum and sum
    Source: Milakov and Gimelshein 2018, algorithm 3; Hsu et al. 2024 (Liger Kernel), section 3.3.
    """
    kept = targets != ignore_index
    z = np.where(kept[:, None], _wide(logits), 0)
    m, s, total = _running(z)
    lse = m + np.log(s)
    loss = lse - np.take_along_axis(z, np.where(kept, targets, 0)[:, None], 1)[:, 0]
    if label_smoothing:
        loss = (1 - label_smoothing) * loss + label_smoothing * (lse - total / z.shape[1])
    return _reduced(np.where(kept, loss, 0), kept, reduction).astype(logits.dtype)


def cross_entropy_streamed_vjp(
    cotangent: NDArray, logits: NDArray, targets: NDArray, *, label_smoothing: float = 0.0, ignore_index: int = -100,
    reduction: str = "mean",
) -> tuple[NDArray, None]:  # fmt: skip
    """The gradient of cross_entropy_streamed, block by block from the running maximum and sum.

    cotangent[] or [N], logits[N,V], targets[N] -> (dlogits[N,V], None)
    dlogits_n = g_n (exp(logits_n - m_n) / s_n - q_n)
    Source: Hsu et al. 2024 (Liger Kernel), section 3.3.
    """
    kept, size = targets != ignore_index, logits.shape[1]
    z = np.where(kept[:, None], _wide(logits), 0)
    (m, s, _), g = _running(z), _each_row(cotangent, kept, reduction)
    found = np.zeros_like(z)
    for start in range(0, size, BLOCK):
        block = slice(start, start + BLOCK)
        q = _target_distribution(targets, size, label_smoothing, ignore_index, _ALL, z.dtype)[:, block]
        found[:, block] = g[:, None] * (np.exp(z[:, block] - m[:, None]) / s[:, None] - q)
    return np.where(kept[:, None], found, 0).astype(logits.dtype), None


def _cross_entropy(
    logits: NDArray, targets: NDArray, epsilon: float, ignore_index: int, reduction: str, fewer: int
) -> NDArray:
    kept = targets != ignore_index
    z = np.where(kept[:, None], _wide(logits), 0)
    t = z - z.max(axis=-1, keepdims=True)
    log_p = t - np.log(np.exp(t).sum(axis=-1, keepdims=True))
    q = _target_distribution(targets, z.shape[1], epsilon, ignore_index, fewer, z.dtype)
    loss = (q * np.where(q > 0, -log_p, 0)).sum(axis=-1)
    return _reduced(np.where(kept, loss, 0), kept, reduction).astype(logits.dtype)


def _vjp(
    cotangent: NDArray, logits: NDArray, targets: NDArray, epsilon: float, ignore_index: int, reduction: str, fewer: int
) -> NDArray:
    kept = targets != ignore_index
    z = np.where(kept[:, None], _wide(logits), 0)
    e = np.exp(z - z.max(axis=-1, keepdims=True))
    p = e / e.sum(axis=-1, keepdims=True)
    q = _target_distribution(targets, z.shape[1], epsilon, ignore_index, fewer, z.dtype)
    g = _each_row(cotangent, kept, reduction)
    return np.where(kept[:, None], g[:, None] * (p - q), 0).astype(logits.dtype)


def _target_distribution(
    targets: NDArray, size: int, epsilon: float, ignore_index: int, fewer: int, dtype: np.dtype
) -> NDArray:
    """q[N,V]: 1 - e at the target, and e shared by V, V - 1 or V - 2 classes."""
    classes = np.arange(size)
    hit = classes == targets[:, None]
    sharing = np.ones_like(hit) if fewer == _ALL else ~hit
    if fewer == _OTHERS_BUT_PADDING:
        sharing &= classes != ignore_index
    share = epsilon / (size - fewer) if epsilon else 0.0
    return np.where(hit, 1 - epsilon, 0).astype(dtype) + np.where(sharing, share, 0).astype(dtype)


def _reduced(loss: NDArray, kept: NDArray, reduction: str) -> NDArray:
    if reduction == "none":
        return loss
    total = loss.sum()
    return np.asarray(total / total.dtype.type(kept.sum()) if reduction == "mean" else total)


def _each_row(cotangent: NDArray, kept: NDArray, reduction: str) -> NDArray:
    """The cotangent of each row's loss, [N]."""
    g = np.broadcast_to(_wide(np.asarray(cotangent)), kept.shape)
    return g / g.dtype.type(max(kept.sum(), 1)) if reduction == "mean" else g


def _running(z: NDArray) -> tuple[NDArray, NDArray, NDArray]:
    """Maximum, sum of exp(z - maximum) and sum of z over the classes, in one pass; each [N]."""
    m, s, total = np.full_like(z[:, 0], -np.inf), np.zeros_like(z[:, 0]), np.zeros_like(z[:, 0])
    for start in range(0, z.shape[1], BLOCK):
        block = z[:, start : start + BLOCK]
        new = np.maximum(m, block.max(axis=1))
        safe = np.where(np.isneginf(new), 0, new)
        s = s * np.exp(m - safe) + np.exp(block - safe[:, None]).sum(axis=1)
        m, total = new, total + block.sum(axis=1)
    return m, s, total


def _wide(x: NDArray) -> NDArray:
    return x if x.dtype == np.float64 else x.astype(np.float32)


VARIANTS: dict[str, dict[str, Callable[..., Any]]] = {
    "loss": {"cross_entropy": cross_entropy, "cross_entropy_vjp": cross_entropy_vjp},
    "loss_streamed": {"cross_entropy": cross_entropy_streamed, "cross_entropy_vjp": cross_entropy_streamed_vjp},
    "loss_others": {"cross_entropy": cross_entropy_others, "cross_entropy_vjp": cross_entropy_others_vjp},
    "loss_others_but_padding": {
        "cross_entropy": cross_entropy_others_but_padding,
        "cross_entropy_vjp": cross_entropy_others_but_padding_vjp,
    },
}
_WIDENED: dict[str, Any] = {
    "dtypes": DTYPES,
    "intermediate": {"float64": "float64", "default": "float32"},
    "nan_contained": True,
}
CAPABILITIES = {
    "loss": {"cross_entropy": Capabilities(**_WIDENED)},
    "loss_streamed": {"cross_entropy": Capabilities(**_WIDENED, blocks=(BLOCK,))},
    "loss_others": {"cross_entropy": Capabilities(**_WIDENED, smoothing="others")},
    "loss_others_but_padding": {
        "cross_entropy": Capabilities(**_WIDENED, smoothing="others_but_padding", all_ignored="zero")
    },
}
