"""Attention's logits with their errors, and the weights they lead to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from veriformer import reference
from veriformer.budgets.bound import Array
from veriformer.budgets.precision import C, Precision


@dataclass(frozen=True)
class Logits:
    """Logits [B,H,Tq,Tk] and the errors they may carry; both 0 where hidden.

    A = |scale| |q|·|k|
    score:    x = (g(D) + C) u_acc A + [unfused] (u_mid (|s| + 2 A) + eta max(1, sqrt|scale|) (Σ|q| + Σ|k|))
    softcap:  x <- c tanh(|s|/c) - c tanh((|s| - x)/c) + C (u_acc + [unfused] u_mid) |s'| + [unfused] (2 c + 1) eta
    bias:     x <- x + u_acc (|s + b| + |b|) + [unfused] u_mid |s + b|

    Stored by the unfused computation: q and k with their shares of the scale, the score, the score
    plus bias, and the four steps of the softcap, of which s/c and its tanh may underflow before they
    are multiplied by c. |b| by itself admits logits in base 2, where the bias is multiplied by log2(e).
    n: visible keys of each row [B,H,Tq,1]. overflow: rows [B,H,Tq] of which a logit, or a partial sum
    of it, may be infinite in a dtype that may hold it.
    """

    visible: Array
    value: Array
    error: Array
    n: Array
    overflow: Array
    precision: Precision

    @classmethod
    def of(cls, q: Array, k: Array, keywords: Mapping[str, Any], p: Precision) -> Logits:
        """Logits of q[B,H,Tq,D] and k[B,G,Tk,D] under the keywords of `attention`."""
        visible = _visible(q, k, keywords)
        scale = q.shape[3] ** -0.5 if keywords["scale"] is None else keywords["scale"]
        value, error, size = _scores(q, k, scale, visible, p)
        if keywords["softcap"] is not None:
            value, error = _capped(value, error, keywords["softcap"], p)
        if keywords["bias"] is not None:
            b = np.where(visible, keywords["bias"], 0.0)
            value = value + b
            error = error + p.u_acc * np.abs(b) + (p.u_acc + p.u_store) * np.abs(value)
        highest = np.maximum(size, np.abs(value) + error).max(axis=-1, initial=0.0)
        return cls(visible, value, error, visible.sum(axis=-1, keepdims=True), ~(highest < p.largest_mid), p)

    def beside(self, sink: Array, lse: Array) -> Logits:
        """The same with one more column, the sink's: x = C u_acc (|sink| + |lse|).

        Admits base 2, and the sink as a factor sigmoid(lse - sink) afterwards.
        """
        column = np.broadcast_to(sink[:, None, None], (*self.value.shape[:3], 1))
        error = self.precision.g(C) * self.precision.u_acc * (np.abs(column) + np.abs(lse)[..., None])
        return Logits(
            np.concatenate([self.visible, np.broadcast_to(True, column.shape)], axis=-1),
            np.concatenate([self.value, column], axis=-1),
            np.concatenate([self.error, np.where(self.n > 0, error, 0.0)], axis=-1),
            self.n + 1,
            self.overflow,
            self.precision,
        )

    @cached_property
    def weights(self) -> tuple[Array, Array, Array]:
        """Softmax w of the logits, its logarithm, and x, the error of each computed logarithm.

        x adds to the error of the logit that of its exponential, u (|t| + C) + 2 u_acc |t|, where
        t = logit - largest logit and u = max(u_acc, [unfused] u_mid). The second |t| admits base 2,
        where t is multiplied by a rounded log2(e).
        """
        p = self.precision
        logits = np.where(self.visible, self.value, -np.inf)
        peak = logits.max(axis=-1, keepdims=True, initial=-np.inf)
        t = np.where(self.visible, logits - peak, 0.0)
        e = np.where(self.visible, np.exp(t), 0.0)
        # A row that sees anything has a total of at least 1, its largest term.
        total = np.maximum(e.sum(axis=-1, keepdims=True), 1.0)
        unit = max(p.u_acc, p.u_store)
        x = np.where(self.visible, self.error + p.g(C) * unit - (unit + 2 * p.u_acc) * t, 0.0)
        return e / total, np.where(self.visible, t - np.log(total), -np.inf), x


def _visible(q: Array, k: Array, keywords: Mapping[str, Any]) -> Array:
    """Everything that hides a key, in one boolean array [B,H,Tq,Tk]."""
    places = {name: keywords[name] for name in ("causal", "window", "offset")}
    visible = reference.visible_keys(q.shape[2], k.shape[2], **places, like=q)
    if keywords["mask"] is not None:
        visible = visible & keywords["mask"]
    if keywords["bias"] is not None:
        visible = visible & (keywords["bias"] != -np.inf)
    spread: Array = visible & np.ones((*q.shape[:3], k.shape[2]), dtype=bool)
    return spread


def _scores(q: Array, k: Array, scale: float, visible: Array, p: Precision) -> tuple[Array, Array, Array]:
    """Scores, their errors, and the largest that a number on the way to each may be."""
    k = np.repeat(k, q.shape[1] // k.shape[1], axis=1) if q.shape[1] > k.shape[1] else k
    turned = k.swapaxes(-1, -2)
    value = np.where(visible, scale * (q @ turned), 0.0)
    q_size, k_size = np.abs(q), np.abs(turned)
    size = np.where(visible, abs(scale) * (q_size @ k_size), 0.0)
    spread = size if p.growth == "worst" else np.where(visible, abs(scale) * p.product(q_size, k_size), 0.0)
    error = p.g(q.shape[3] + C) * p.u_acc * spread
    if p.unfused:
        lost = q_size.sum(axis=-1)[..., :, None] + k_size.sum(axis=-2)[..., None, :]
        lost = np.where(visible, p.eta_mid * max(1.0, abs(scale) ** 0.5) * lost, 0.0)
        error = error + p.u_mid * (np.abs(value) + p.g(2) * spread) + lost
    if abs(scale) > 1:
        # Either side may carry the scale.
        highest = np.maximum(
            q_size.max(axis=-1, initial=0.0)[..., None], k_size.max(axis=-2, initial=0.0)[..., None, :]
        )
        size = np.maximum(size, np.where(visible, abs(scale) * highest, 0.0))
    return value, error, size


def _capped(value: Array, error: Array, softcap: float, p: Precision) -> tuple[Array, Array]:
    """softcap tanh(s / softcap) and its error, which tanh changes most on the side of 0."""
    size = np.abs(value)
    capped = softcap * np.tanh(size / softcap)
    moved = capped - softcap * np.tanh((size - error) / softcap)
    underflow = (2 * softcap + 1) * p.eta_mid if p.unfused else 0.0
    return np.copysign(capped, value), moved + p.g(C) * (p.u_acc + p.u_store) * capped + underflow
