"""Operations that compute the right thing and misbehave around it (NumPy).

They touch their inputs, share memory, remember, draw random numbers, or return something else than
one array. The variant "correct" of each operation does none of this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veriformer.declarations import Fault

FRAMEWORK = "numpy"
_BUFFERS: dict[Any, NDArray] = {}
_NOISE = np.random.default_rng(0)


def _make_softmax(fault: str) -> Callable[..., Any]:
    def softmax(x: NDArray, *, axis: int = -1, temperature: float = 1.0) -> Any:
        z = (x if x.dtype == np.float64 else x.astype(np.float32)) / float(temperature)
        e = np.exp(z - z.max(axis=axis, keepdims=True))
        stale = _stale_tail(e, axis) if fault == "softmax_keeps_a_longer_buffer" else 0
        p = (e / (e.sum(axis=axis, keepdims=True) + stale)).astype(x.dtype)
        if fault == "softmax_draws_random_numbers":
            np.random.random()
        if fault == "softmax_adds_noise":
            p = (p * (1 + 1e-3 * _NOISE.random(p.shape))).astype(x.dtype)
        return _return_softmax(p, x, axis, fault)

    softmax.__qualname__ = f"softmax[{fault}]"
    return softmax


def _stale_tail(e: NDArray, axis: int) -> float:
    """What an earlier, longer row left behind in the kept buffer, whose front now holds this one."""
    size = e.shape[axis]
    kept = np.zeros(max(size, _BUFFERS.get("row", np.zeros(0)).size))
    kept[: _BUFFERS.get("row", kept).size] = _BUFFERS.get("row", kept)
    kept[:size], _BUFFERS["row"] = np.moveaxis(e, axis, -1).reshape(-1, size)[0], kept
    return float(kept[size:].sum())


def _return_softmax(p: NDArray, x: NDArray, axis: int, fault: str) -> Any:
    if fault == "softmax_subtracts_in_place":
        x -= x.max(axis=axis, keepdims=True)
    if fault == "softmax_returns_its_input":
        x[...] = p
        return x
    if fault == "softmax_reuses_its_result":
        buffer = _BUFFERS.setdefault((p.shape, p.dtype), np.empty_like(p))
        buffer[...] = p
        return buffer
    if fault == "softmax_returns_float64":
        return p.astype(np.float64)
    if fault == "softmax_returns_none":
        return None
    return {"softmax_returns_a_list": p.tolist(), "softmax_returns_a_tuple": (p,)}.get(fault, p)


def _make_logsumexp(fault: str) -> Callable[..., Any]:
    def logsumexp(x: NDArray, *, axis: int = -1) -> Any:
        if fault == "logsumexp_returns_a_view" and x.shape[axis] == 1:
            return np.squeeze(x, axis)
        z = x if x.dtype == np.float64 else x.astype(np.float32)
        m = z.max(axis=axis, keepdims=True)
        y = (m + np.log(np.exp(z - m).sum(axis=axis, keepdims=True))).astype(x.dtype)
        if fault == "logsumexp_keeps_the_axis":
            return y
        return float(y.ravel()[0]) if fault == "logsumexp_returns_a_number" else y.squeeze(axis)[...].copy()

    logsumexp.__qualname__ = f"logsumexp[{fault}]"
    return logsumexp


def _make_layer_norm(fault: str) -> Callable[..., Any]:
    def layer_norm(x: NDArray, weight: NDArray, bias: NDArray, *, eps: float = 1e-5) -> Any:
        z, w, b = (a if a.dtype == np.float64 else a.astype(np.float32) for a in (x, weight, bias))
        centred = z - z.mean(axis=-1, keepdims=True)
        y = w * (centred / np.sqrt((centred * centred).mean(axis=-1, keepdims=True) + eps)) + b
        if fault == "layer_norm_weight_updated":
            weight *= 1 + 2.0**-7
        if fault == "layer_norm_refuses_batches" and x.ndim > 2:
            raise ValueError("x: got more than 2 axes, wanted 1 or 2; flatten the batch")
        return y.astype(x.dtype).ravel() if fault == "layer_norm_flattens" else y.astype(x.dtype)

    layer_norm.__qualname__ = f"layer_norm[{fault}]"
    return layer_norm


def _make_attention(fault: str) -> Callable[..., Any]:
    def attention(
        q: NDArray,
        k: NDArray,
        v: NDArray,
        *,
        mask: NDArray | None = None,
        causal: bool = False,
        scale: float | None = None,
    ) -> Any:
        factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
        visible = np.arange(k.shape[2]) <= np.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2]
        visible = visible if causal else np.ones_like(visible)
        visible = visible if mask is None else visible & mask
        out = _attend(q, k, v, visible, factor)
        if fault == "attention_uses_mask_as_scratch" and mask is not None:
            mask ^= True
        if fault == "attention_scales_query_in_place":
            q *= 2
        if fault == "attention_returns_weights_too":
            return out, visible
        return out[:, 0] if fault == "attention_drops_the_head_axis" else out

    attention.__qualname__ = f"attention[{fault}]"
    return attention


def _attend(q: NDArray, k: NDArray, v: NDArray, visible: NDArray, factor: float) -> NDArray:
    a, b, c = (x if x.dtype == np.float64 else x.astype(np.float32) for x in (q, k, v))
    b, c = (np.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (b, c))
    logits = np.where(visible, a @ b.swapaxes(-1, -2) * factor, -np.inf)
    m = logits.max(axis=-1, keepdims=True)
    e = np.exp(logits - np.where(np.isneginf(m), 0, m))
    s = e.sum(axis=-1, keepdims=True)
    return (e @ c / np.where(s == 0, 1, s)).astype(q.dtype)


_MAKE = {
    "softmax": _make_softmax,
    "logsumexp": _make_logsumexp,
    "layer_norm": _make_layer_norm,
    "attention": _make_attention,
}
# law that must accuse: {variant: (where it was seen, what is wrong)}; the law names the operation
_TABLE: dict[str, dict[str, tuple[str, str]]] = {
    "softmax/leaves-inputs-untouched": {
        "softmax_subtracts_in_place": ("mutation: x -= max", "x is shifted in place"),
    },
    "softmax/returns-its-own-memory": {
        "softmax_returns_its_input": ("mutation: out=x", "the result is written into x and x is returned"),
        "softmax_reuses_its_result": ("mutation: a kept output buffer", "the next call overwrites this result"),
    },
    "softmax/keeps-global-state": {
        "softmax_draws_random_numbers": ("mutation: dropout of rate 0", "the global generator advances"),
    },
    "softmax/repeats-itself": {
        "softmax_adds_noise": ("mutation: dropout left on", "two equal calls differ by up to 1e-3"),
    },
    "softmax/history-changes-nothing": {
        "softmax_keeps_a_longer_buffer": ("x-transformers#90", "the tail of an earlier, longer row is summed"),
    },
    "softmax/keeps-the-dtype": {
        "softmax_returns_float64": ("mutation: a float64 constant", "float64 for the dtype of x"),
    },
    "softmax/returns-an-array": {
        "softmax_returns_none": ("mutation: a forgotten return", "None"),
        "softmax_returns_a_list": ("mutation: tolist", "nested lists"),
        "softmax_returns_a_tuple": ("mutation: a trailing comma", "a tuple of one array"),
    },
    "logsumexp/returns-its-own-memory": {
        "logsumexp_returns_a_view": ("mutation: a shortcut for length 1", "a view of x where the axis has length 1"),
    },
    "logsumexp/returns-an-array": {
        "logsumexp_keeps_the_axis": ("mutation: keepdims", "the reduced axis stays with length 1"),
        "logsumexp_returns_a_number": ("mutation: item()", "the first row's result as a Python float"),
    },
    "layer_norm/leaves-inputs-untouched": {
        "layer_norm_weight_updated": ("mutation: a training step in the forward pass", "weight grows with each call"),
    },
    "layer_norm/returns-an-array": {
        "layer_norm_flattens": ("mutation: ravel", "one axis for the axes of x"),
        "layer_norm_refuses_batches": ("mutation: rank assumed 2", "more than two axes raise"),
    },
    "attention/leaves-inputs-untouched": {
        "attention_uses_mask_as_scratch": ("mutation: mask inverted in place", "the mask is overwritten"),
        "attention_scales_query_in_place": ("mutation: q *= scale", "q is scaled in place"),
    },
    "attention/returns-an-array": {
        "attention_returns_weights_too": ("mutation: need_weights left on", "a pair for one array"),
        "attention_drops_the_head_axis": ("mutation: squeeze", "[B,Tq,Dv] for [B,H,Tq,Dv]"),
    },
}
FAULTS: dict[str, Fault] = {}
VARIANTS: dict[str, dict[str, Callable[..., Any]]] = {
    "correct": {operation: make("correct") for operation, make in _MAKE.items()}
}
for _law, _mistakes in _TABLE.items():
    _operation = _law.split("/")[0]
    for _variant, (_source, _summary) in _mistakes.items():
        FAULTS[_variant] = Fault(_operation, _law, _source, _summary)
        VARIANTS[_variant] = {_operation: _MAKE[_operation](_variant)}
