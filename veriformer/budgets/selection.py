"""Error budgets of what mostly picks and hardly computes: dropout and embedding."""

from __future__ import annotations

import numpy as np

from veriformer import reference
from veriformer.budgets.bound import Array, Bound, added, exact
from veriformer.budgets.precision import C, Precision
from veriformer.case import round_to


def dropout(x: Array, *, rate: float, uniform: Array, precision: Precision) -> Bound:
    """Error budget of dropout with given uniform numbers.

    x, uniform like x -> value, allowed, both like x.

        y = x / (1 - rate) where uniform >= rate, else 0
        E = |y| (u_acc (rate/(1 - rate) + C) + [unfused] u_mid)

    rate/(1 - rate) is what a rounded rate makes of 1 - rate. Stored by the unfused computation: the
    factor 1/(1 - rate).
    Source: derived; Srivastava et al. 2014 (Dropout), section 10, for the scaling by 1/(1 - rate); P125.
    Edges: what is dropped is exactly 0; rate 0 changes nothing. inf (undetermined) where uniform lies
    between the rate and what the accumulator or the storage dtype makes of it: either choice is right.
    """
    value = reference.dropout(x, rate=rate, uniform=uniform)
    p = precision
    size = np.abs(value)
    unit = 0.0 if rate == 0 else p.u_acc * (rate / max(1 - rate, 1e-300) + C)
    terms = {
        "factor": unit * size,
        "storage": (p.u_store if rate else 0.0) * size,
        "output": np.where((value != 0) & (rate != 0), p.u_out * size + p.eta, 0.0),
    }
    return Bound(value, np.where(_on_the_edge(uniform, rate, p), np.inf, added(terms)), terms)


def _on_the_edge(uniform: Array, rate: float, p: Precision) -> Array:
    """Where a rate that is rounded before the comparison may choose otherwise; never for a rate that needs none."""
    seen = [float(round_to(rate, dtype)) for dtype in (p.storage, p.accumulator)]
    low, high = min(rate, *seen), max(rate, *seen)
    edge: Array = (uniform >= low) & (uniform <= high) & (low < high)
    return edge


def embedding(ids: Array, table: Array, *, padding_index: int | None = None, precision: Precision) -> Bound:
    """Error budget of embedding: none, because rows are copied.

    ids[…], table[V, d] -> value, allowed, both […, d].
    Source: derived.
    Edges: padding_index changes no value.
    """
    return exact(reference.embedding(ids, table, padding_index=padding_index))
