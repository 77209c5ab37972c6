"""Error budgets of attention.

Admitted algorithms: scores from q·k with the scale on either side or split between both, one pass or
tiles with a running maximum, base e or base 2, weights rounded to storage where declared, the sink as
one more logit or as a factor sigmoid(lse - sink) afterwards. Not admitted: no maximum subtracted.

Notation: l = logits after scale, softcap, bias; p their softmax over visible keys (and the sink);
x = error of a computed logit, plus the relative error of its exponential.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from veriformer import reference
from veriformer.budgets.bound import Array, Bound, added
from veriformer.budgets.logits import Logits
from veriformer.budgets.precision import C, Precision
from veriformer.budgets.softmax import log_mean_exp

Window = tuple[int | None, int | None]

# Elements of [B,H,Tq,Tk,Dv] held at once; queries do not influence one another and are cut to fit.
_BLOCK = 1 << 20


def attention(q: Array, k: Array, v: Array, *, precision: Precision, **keywords: Any) -> Bound:
    """Error budget of attention's output; axes, formula, keywords and edges are those of `attention_with_lse`."""
    return _joined([_out_bound(piece, precision) for piece in _pieces(q, k, v, precision, **keywords)])


def attention_with_lse(q: Array, k: Array, v: Array, *, precision: Precision, **keywords: Any) -> tuple[Bound, Bound]:
    """Error budgets of attention's output and of its log-sum-exp.

    q[B,H,Tq,D], k[B,G,Tk,D], v[B,G,Tk,Dv] -> out[B,H,Tq,Dv], lse[B,H,Tq]. keywords: those of
    `reference.attention`.

        out' - out = Σ p_j exp(δ_j) (v_j - out) / Σ p_j exp(δ_j) with |δ_j| <= x_j, so
        E = Σ p_j expm1(x_j) |v_j - out| / Σ p_j exp(-x_j)             at most max v - min v
            + (g(n) + C) u_acc (Σ p_j |v_j| + |out|)                    sums
            + [weights rounded] u (Σ p_j |v_j| + |out|)                 probabilities
            + eta Σ (|v_j| + |out|)                                     underflow
        E_lse = log Σ p_j exp(x_j) + (g(n) + C) u_acc + C u_acc (|lse - max l| + |lse|)
            + [unfused] u_mid (C |lse - max l| + |lse|) + [weights rounded] u

    The sums run over the visible keys and, for out, the sink, a key of value 0. The common normaliser
    cancels, hence v_j - out: constant values are nearly exact. x: `Logits.weights`.
    Source: derived; Higham 2002, section 3.1, for the sums.
    Edges: nothing is allowed on an empty row. inf (undetermined) where a logit may overflow a dtype
    that may hold it. lse is float32 beside a 16-bit q.
    """
    pieces = list(_pieces(q, k, v, precision, **keywords))
    out = _joined([_out_bound(piece, precision) for piece in pieces])
    return out, _joined([_lse_bound(piece, precision) for piece in pieces])


@dataclass(frozen=True)
class _Piece:
    """What is known of some of the queries; v [B,H,Tk,Dv] is spread over the query heads."""

    out: Array
    lse: Array
    v: Array
    logits: Logits
    sink: Array | None


def _pieces(
    q: Array,
    k: Array,
    v: Array,
    precision: Precision,
    *,
    mask: Array | None = None,
    bias: Array | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    sink: Array | None = None,
    offset: int | None = None,
) -> Iterator[_Piece]:
    """The problem cut into pieces of queries small enough to be spread over keys and widths."""
    offset = k.shape[2] - q.shape[2] if offset is None else offset
    row = q.shape[0] * q.shape[1] * k.shape[2] * max(v.shape[3], q.shape[3])
    step = max(1, _BLOCK // max(row, 1))
    fixed = {"causal": causal, "scale": scale, "window": window, "softcap": softcap, "sink": sink}
    values = np.repeat(v, q.shape[1] // v.shape[1], axis=1) if q.shape[1] > v.shape[1] else v
    if not np.isfinite(values).all():
        values = np.where(np.isfinite(values), values, 0.0)  # no row that sees one has a finite output to judge
    for start in range(0, max(q.shape[2], 1), step):
        rows = slice(start, start + step)
        given: dict[str, Any] = {
            **fixed,
            "mask": _rows(mask, rows),
            "bias": _rows(bias, rows),
            "offset": offset + start,
        }
        with np.errstate(all="ignore"):
            out, lse = reference.attention_with_lse(q[:, :, rows], k, v, **given)
            logits = Logits.of(q[:, :, rows], k, given, precision)
        yield _Piece(out, lse, values, logits, sink)


def _rows(array: Array | None, rows: slice) -> Array | None:
    """The rows of a mask or bias that belong to some queries; an axis of 1 belongs to all."""
    return array if array is None or array.shape[2] == 1 else array[:, :, rows]


def _joined(parts: list[Bound]) -> Bound:
    """One bound of the bounds of consecutive pieces."""
    if len(parts) == 1:
        return parts[0]
    terms = {name: np.concatenate([part.terms[name] for part in parts], axis=2) for name in parts[0].terms}
    value = np.concatenate([part.value for part in parts], axis=2)
    return Bound(value, np.concatenate([part.allowed for part in parts], axis=2), terms)


def _out_bound(piece: _Piece, p: Precision) -> Bound:
    """The budget of the output."""
    out, v, logits = piece.out, piece.v, piece.logits
    if piece.sink is not None:
        logits = logits.beside(piece.sink, piece.lse)
        v = np.concatenate([v, np.zeros((*v.shape[:2], 1, v.shape[3]))], axis=2)
    with np.errstate(all="ignore"):
        weights, log_weights, x = logits.weights
        v_size, out_size = np.abs(v), np.abs(out)
        size = p.product(weights, v_size) + out_size
        seen = logits.visible.astype(np.float64) @ v_size + logits.n * out_size
        underflow = (2 if p.unfused else 1) * p.eta_probability
        terms = {
            "logits": _moved(out, v, weights, log_weights, x, logits.visible, p),
            "sums": (p.g(logits.n + C) * p.u_acc) * size,
            "probabilities": p.u_probability * _weighed(weights, v_size, out_size, p),
            "underflow": underflow * seen + p.eta_acc * logits.n,
            "output": p.u_out * out_size + p.eta,
        }
    return _bound(out, terms, piece.logits.n > 0, logits.overflow[..., None])


def _weighed(weights: Array, v: Array, out: Array, p: Precision) -> Array:
    """What one relative error in each weight makes of the average, and, through the normaliser, of all of it.

    Unless the normaliser itself is stored, its share averages out too.
    """
    shared = out if p.growth == "worst" or p.unfused else out * np.sqrt((weights * weights).sum(-1, keepdims=True))
    weighed: Array = p.product(weights, v) + shared
    return weighed


def _moved(out: Array, v: Array, weights: Array, log_weights: Array, x: Array, visible: Array, p: Precision) -> Array:
    """How far wrong logits move the average: Σ p_j expm1(x_j) |v_j - out| / Σ p_j exp(-x_j)."""
    raised = weights * np.expm1(x)
    large = x.max(initial=0.0) > 0.5
    if large:
        # A weight may underflow to 0 in float64 and still be reached: work from its logarithm.
        raised = np.where(x > 0.5, np.exp(np.minimum(log_weights + x, 300.0)), raised)
    raised = raised / np.maximum((weights * np.exp(-x)).sum(axis=-1, keepdims=True), 1e-150)
    distance = np.abs(v[:, :, None] - out[:, :, :, None])
    moved: Array = p.product(raised[..., None, :], distance)[..., 0, :]
    if large:
        # Whatever the weights become, the average stays between the values.
        seen = visible[..., None]
        highest = np.where(seen, v[:, :, None], -np.inf).max(axis=3, initial=-np.inf)
        lowest = np.where(seen, v[:, :, None], np.inf).min(axis=3, initial=np.inf)
        moved = np.minimum(moved, np.maximum(highest - lowest, 0.0))
    return moved


def _lse_bound(piece: _Piece, p: Precision) -> Bound:
    """The budget of lse, which is a float32 statistic beside a 16-bit result and knows no sink."""
    lse, logits = piece.lse, piece.logits
    with np.errstate(all="ignore"):
        weights, log_weights, x = logits.weights
        peak = np.where(logits.visible, logits.value, -np.inf).max(axis=-1, initial=-np.inf)
        log_sum, size = lse - peak, np.abs(lse)
        terms = {
            "logits": log_mean_exp(weights, log_weights, x, -1, p)[..., 0],
            "sums": (p.g(logits.n[..., 0] + C) + p.g(C) * (log_sum + size)) * p.u_acc,
            # The normaliser may be summed from the very weights that are rounded for the product with v.
            "storage": p.u_store * (p.g(C) * log_sum + size) + p.u_probability,
            "output": p.u_beside * size + p.eta_beside,
        }
    return _bound(lse, terms, logits.n[..., 0] > 0, logits.overflow)


def _bound(value: Array, terms: dict[str, Array], alive: Array, overflow: Array) -> Bound:
    """The bound made of its terms: nothing on an empty row, nor where the value itself is infinite or NaN."""
    judged = alive & np.isfinite(value)
    if not judged.all():
        terms = {name: np.where(judged, term, 0.0) for name, term in terms.items()}
    allowed = added(terms)
    return Bound(value, np.where(overflow & judged, np.inf, allowed) if overflow.any() else allowed, terms)
