"""Wrong attention_with_lse: one correct implementation with one switch for each mistake about the lse.

Every variant has attention beside it, which is always right, so that the two can be compared.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from veriformer.declarations import Capabilities, Fault

FRAMEWORK = "numpy"
_CAPABLE = Capabilities(rounds_probabilities=False)
CAPABILITIES = {"attention": _CAPABLE, "attention_with_lse": _CAPABLE}


def _make(fault: str) -> Callable[..., tuple[NDArray, NDArray]]:
    def attention_with_lse(
        q: NDArray,
        k: NDArray,
        v: NDArray,
        *,
        mask: NDArray | None = None,
        bias: NDArray | None = None,
        causal: bool = False,
        scale: float | None = None,
        softcap: float | None = None,
        sink: NDArray | None = None,
    ) -> tuple[NDArray, NDArray]:
        with np.errstate(all="ignore"):
            scores, logits = _logits(q, k, mask, bias, causal, scale, softcap, fault)
            value = np.repeat(_wide(v), q.shape[1] // k.shape[1], axis=1)
            out, lse = _out(logits, value, sink, fault), _lse(scores, logits, sink, fault)
        if fault == "lse_queries_before_heads":
            lse = np.ascontiguousarray(lse.swapaxes(1, 2))
        wanted = np.float32 if fault == "lse_always_float32" or q.dtype != np.float64 else np.float64
        return out.astype(q.dtype), lse.astype(wanted)

    attention_with_lse.__qualname__ = f"attention_with_lse[{fault}]"
    return attention_with_lse


def attention(
    q: NDArray,
    k: NDArray,
    v: NDArray,
    *,
    mask: NDArray | None = None,
    bias: NDArray | None = None,
    causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    sink: NDArray | None = None,
) -> NDArray:
    """Attention without the lse, right whatever is wrong with the lse.

    q[B,H,Tq,D], k[B,G,Tk,D], v[B,G,Tk,Dv] -> [B,H,Tq,Dv]
    softmax(cap(q k^T scale) + bias) v over the keys a row may see
    Source: Vaswani et al. 2017, section 3.2.1. A row that may see nothing gives zeros.
    """
    correct = _make("correct")
    return correct(q, k, v, mask=mask, bias=bias, causal=causal, scale=scale, softcap=softcap, sink=sink)[0]


def _logits(
    q: NDArray,
    k: NDArray,
    mask: NDArray | None,
    bias: NDArray | None,
    causal: bool,
    scale: float | None,
    softcap: float | None,
    fault: str,
) -> tuple[NDArray, NDArray]:
    """[B,H,Tq,Tk] twice: what the lse is taken of, and the logits of the output."""
    key = np.repeat(_wide(k), q.shape[1] // k.shape[1], axis=1)
    scores = _wide(q) @ key.swapaxes(-1, -2)
    logits = scores * (q.shape[-1] ** -0.5 if scale is None else float(scale))
    logits = logits if softcap is None else float(softcap) * np.tanh(logits / float(softcap))
    unbiased = logits
    logits = logits if bias is None else logits + _wide(bias)
    queries, keys = logits.shape[2:]
    triangle = np.arange(keys) <= np.arange(queries)[:, None] + keys - queries
    causal_out = causal and fault != "out_not_causal"
    visible = {True: triangle, False: np.ones_like(triangle)}
    hide = [
        np.broadcast_to(visible[c] if mask is None else visible[c] & mask, logits.shape) for c in (causal, causal_out)
    ]
    of_lse = {"lse_before_scale": scores, "lse_without_bias": unbiased}.get(fault, logits)
    of_lse = of_lse if fault == "lse_over_hidden_keys" else np.where(hide[0], of_lse, -np.inf)
    return of_lse, np.where(hide[1], logits, -np.inf)


def _out(logits: NDArray, value: NDArray, sink: NDArray | None, fault: str) -> NDArray:
    m = logits.max(axis=-1, keepdims=True)
    extra = None if sink is None or fault == "sink_ignored" else _wide(sink)[:, None, None]
    extra = extra * 2 if extra is not None and fault == "sink_doubled" else extra
    m = m if extra is None else np.maximum(m, extra)
    m = np.where(np.isneginf(m), 0, m)
    e = np.exp(logits - m)
    s = e.sum(axis=-1, keepdims=True) + (0 if extra is None else np.exp(extra - m))
    return e @ value if fault == "out_not_normalised" else e @ value / np.where(s == 0, 1, s)


def _lse(scores: NDArray, logits: NDArray, sink: NDArray | None, fault: str) -> NDArray:
    m = scores.max(axis=-1, keepdims=True)
    m = np.where(np.isneginf(m), 0, m)
    s = np.exp(scores - m).sum(axis=-1, keepdims=True)
    if fault == "lse_with_sink" and sink is not None:
        s = s + np.exp(_wide(sink)[:, None, None] - m)
    if fault == "lse_mean":
        s = s / np.isfinite(logits).sum(axis=-1, keepdims=True)
    log_s = np.log(s)
    lse = {"lse_of_shifted": log_s, "lse_maximum_alone": m, "lse_base_two": (m + log_s) / np.log(2)}.get(
        fault, m + log_s
    )
    if fault == "lse_zero_on_empty_rows":
        lse = np.where(np.isneginf(lse), 0, lse)
    if fault == "lse_nan_on_empty_rows":
        lse = np.where(np.isneginf(lse), np.nan, lse)
    lse = np.broadcast_to(lse[:, :1], lse.shape) if fault == "lse_of_first_head" else lse
    return lse[..., 0].astype(scores.dtype)


def _wide(x: NDArray) -> NDArray:
    return x if x.dtype == np.float64 else x.astype(np.float32)


# law that must accuse: {variant: (where it was seen, what is wrong)}
_TABLE: dict[str, dict[str, tuple[str, str]]] = {
    "lse-is-the-logsumexp-of-the-logits": {
        "lse_base_two": ("FlashMLA#106", "log2 for the natural logarithm"),
        "lse_before_scale": ("mutation: lse of the raw scores", "the scale is missing in the lse"),
        "lse_without_bias": ("mutation: lse taken before the bias", "the bias is missing in the lse"),
        "lse_over_hidden_keys": ("mutation: lse taken before the mask", "hidden keys count in the lse"),
        "lse_maximum_alone": ("mutation: the maximum saved for the lse", "the logarithm of the sum is missing"),
        "lse_of_first_head": ("mutation: statistics saved without the head index", "every head has head 0's lse"),
        "lse_mean": ("mutation: mean for sum", "the logarithm of the mean"),
    },
    "parts-merge": {
        "lse_of_shifted": ("mutation: the maximum not added back", "log of the sum of shifted exponentials"),
        "out_not_normalised": ("mutation: the last division forgotten", "the output is not divided by the sum"),
    },
    "out-equals-attention": {
        "out_not_causal": ("transformers#30652", "asking for the lse switches causal off in the output"),
    },
    "lse-is-minus-infinity-on-an-empty-row": {
        "lse_zero_on_empty_rows": ("mutation: a guard against log 0", "0 for -inf"),
        "lse_nan_on_empty_rows": ("pytorch#41508", "NaN for -inf"),
    },
    "lse-ignores-the-sink": {
        "lse_with_sink": ("mutation: the sink in the saved denominator", "the sink counts in the lse"),
    },
    "sink-scales-by-sigmoid": {
        "sink_ignored": ("mlx#3452", "the sink has no effect"),
        "sink_doubled": ("mutation: the sink added on two paths", "twice the sink"),
    },
    "returns-an-array": {
        "lse_queries_before_heads": ("mutation: [B,Tq,H] for [B,H,Tq]", "the axes of the lse are exchanged"),
    },
    "keeps-the-dtype": {
        "lse_always_float32": ("mutation: a float32 statistics buffer", "float32 lse beside float64 queries"),
    },
}
FAULTS = {
    variant: Fault(
        operation="attention_with_lse",
        law=f"attention_with_lse/{law}",
        source=source,
        summary=summary,
        dtype="float64" if variant == "lse_always_float32" else "float32",
    )
    for law, variants in _TABLE.items()
    for variant, (source, summary) in variants.items()
}
VARIANTS = {variant: {"attention_with_lse": _make(variant), "attention": attention} for variant in ("correct", *FAULTS)}
