"""Error budget of cross entropy, from that of log_softmax.

Admitted algorithms: any of log_softmax, then its entries weighed by the target distribution and added up in
any order, or the entry at the target and the sum of all of them weighed apart; the sum of the logits beside
logsumexp in place of the sum of their logarithms; losses of rows added up in any order, then divided. Not
admitted: a number added to probabilities before the logarithm, and counts of rows held in a dtype that ends
below them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from veriformer.budgets.bound import Array, Bound, added
from veriformer.budgets.precision import C, Precision
from veriformer.budgets.softmax import log_softmax
from veriformer.reference import cross_entropy as reference_cross_entropy
from veriformer.reference.loss import smoothed_targets

STORED = 3
"""Values stored between log_softmax and the loss of a row: weight, product and sum; and again for the mean over
rows: sum, number of rows and quotient."""


def cross_entropy(
    logits: Array,
    targets: Array,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    reduction: str = "mean",
    smoothing: str = "all",
    all_ignored: str = "nan",
    precision: Precision,
) -> Bound:
    """Error budget of cross_entropy.

    logits[N,V], targets[N] -> value, allowed, both [] or, with reduction "none", [N].

        E_n = Σ q_k (E_k + [unfused] 4 u_mid |log p_k|) + (g(n) + C) u_acc Σ (q_k |log p_k| + [epsilon > 0] s_k |z_k|)
        E = (Σ E_n + ((g(N) + C) u_acc + [unfused] 3 u_mid) Σ |loss_n|) / N

    E_k is that of log_softmax, q the target distribution, s its smoothing, n the classes in it, N the rows kept.
    Source: derived; the roundings of log_softmax: Blanchard, Higham, Higham 2021.
    Edges: exactly 0 is demanded of an ignored row and of their sum, exactly inf where a wanted class is absent,
    NaN or 0 over nothing. inf (undetermined) where a sum on the way may leave the range of a dtype that may hold it.
    """
    words: dict[str, Any] = dict(label_smoothing=label_smoothing, ignore_index=ignore_index, smoothing=smoothing)
    given = np.asarray(
        reference_cross_entropy(logits, targets, **words, reduction=reduction, all_ignored=all_ignored), np.float64
    )
    kept = targets != ignore_index
    z = np.where(kept[:, None], logits, 0.0)
    q = np.where(kept[:, None], smoothed_targets(targets, z, **words), 0.0)
    with np.errstate(all="ignore"):
        log_p = log_softmax(z, precision=precision)
        loss = (q * np.where(q > 0, -log_p.value, 0.0)).sum(-1)
        rows, sizes = _rows(z, log_p, q, label_smoothing, precision)
        if reduction != "none":
            number = kept.sum() if reduction == "mean" else 1
            rows, sizes = _summed(rows, loss, kept, number, precision), sizes.sum()
        rows["output"] = np.where(rows["rounding"] > 0, precision.u_out * np.abs(given) + precision.eta, 0.0)
        terms = {name: np.where(np.isfinite(given), term, 0.0) for name, term in rows.items()}
        far = precision.unfused & np.isfinite(given) & ~(sizes < precision.largest_mid)
    return Bound(given, np.where(far, np.inf, added(terms)), terms)


def _rows(z: Array, bound: Bound, q: Array, epsilon: float, p: Precision) -> tuple[dict[str, Array], Array]:
    """Contributions to the error of each row's loss, [N]; and the largest that a number on the way to it may be."""
    wanted = (q > 0) & np.isfinite(bound.value)
    q, log_p = np.where(wanted, q, 0.0), np.where(wanted, np.abs(bound.value), 0.0)
    n, cost = wanted.sum(-1), (q * log_p).sum(-1)
    own = q * bound.terms["logits"]
    shared = q * (bound.terms["normaliser"] + bound.terms["subtraction"])
    # a class with the smallest weight has no more than its smoothing
    share = np.where(wanted, np.minimum(q, q.min(-1, keepdims=True, where=wanted, initial=1.0)), 0.0)
    plain = (share * np.abs(np.where(wanted, z, 0.0))).sum(-1) if epsilon else 0.0
    lost = p.eta_mid * (n + log_p.sum(-1)) if p.unfused else 0.0
    terms = {
        "log_softmax": _added_up(own, p) + shared.sum(-1),
        "smoothing": p.g(n + C) * p.u_acc * plain + p.u_acc * 2 * epsilon * log_p.max(-1, initial=0.0),
        "rounding": np.where(n > 0, p.g(n + C) * p.u_acc * cost + (STORED + 1) * p.u_store * cost + lost + p.eta, 0.0),
    }
    return terms, log_p.sum(-1) if epsilon else log_p.max(-1, initial=0.0)


def _summed(rows: dict[str, Array], loss: Array, kept: Array, number: int, p: Precision) -> dict[str, Array]:
    """Contributions to the error of the sum over rows, divided by a number; none where no row is kept."""
    terms = {name: _added_up(term, p) / max(number, 1) for name, term in rows.items()}
    total = np.abs(loss).sum() / max(number, 1)
    terms["rounding"] = terms["rounding"] + (p.g(kept.sum() + C) * p.u_acc + STORED * p.u_store) * total
    return terms


def _added_up(errors: Array, p: Precision) -> Array:
    """Errors of terms that are added up over the last axis: their sum, or typically the root of their squares."""
    total: Array = errors.sum(-1) if p.growth == "worst" else np.sqrt((errors**2).sum(-1))
    return total
