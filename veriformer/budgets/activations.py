"""Error budgets of gelu, relu and the feed-forward layer.

Admitted algorithms of gelu: x/2 (1 + erf(x/√2)), or with tanh, as declared, evaluated in the
accumulator. Not admitted: 1 + erf, or its argument, stored in a shorter dtype; the other form.
Admitted algorithms of feed_forward: either sum in any order, the bias added first, last or apart.
"""

from __future__ import annotations

import numpy as np

from veriformer import reference
from veriformer.budgets.bound import Array, Bound, added, exact
from veriformer.budgets.precision import Precision

C_GELU = 8
"""Roundings allowed to gelu in units of |x|: argument, erf or tanh, the sum with 1, and two products."""


def gelu(x: Array, *, form: str = "erf", precision: Precision) -> Bound:
    """Error budget of gelu.

    x -> value, allowed, both like x.

        E = 8 u_acc |x| + [unfused] (u_mid |y| + eta)

    Absolute in |x|, because 1 + erf cancels far below 0. Stored by the unfused computation: x/2, or
    y before its last factor; not 1 + erf, whose rounding would count as much as |x|.
    Source: derived; Hendrycks, Gimpel 2016 (Gaussian Error Linear Units), section 2, for both forms.
    Edges: 0 is exact.
    """
    value = reference.gelu(x, form=form)
    p = precision
    size = np.abs(value)
    terms = {
        "cancellation": p.g(C_GELU) * p.u_acc * np.abs(x),
        "storage": p.u_store * size + (p.eta_mid if p.unfused else 0.0),
        "output": p.u_out * size + p.eta,
    }
    terms = {name: np.where(x == 0, 0.0, term) for name, term in terms.items()}
    return Bound(value, added(terms), terms)


def relu(x: Array, *, precision: Precision) -> Bound:
    """Error budget of relu: none, because nothing is rounded.

    x -> value, allowed, both like x.
    Source: derived.
    Edges: NaN stays NaN.
    """
    return exact(reference.relu(x))


def feed_forward(x: Array, w1: Array, b1: Array, w2: Array, b2: Array, *, precision: Precision) -> Bound:
    """Error budget of the feed-forward layer, relu(x w1 + b1) w2 + b2.

    x[…, d], w1[d, f], b1[f], w2[f, d], b2[d] -> value, allowed, both like x.

        E_h = (g(d) + 1) u_acc (|x| |w1| + |b1|) + d eta + [unfused] (u_mid (|x w1| + |h|) + 2 eta)
        E_a = min(E_h, max(h + E_h, 0))                     what relu leaves of it
        E   = E_a |w2| + (g(f) + 1) u_acc ((a + E_a) |w2| + |b2|) + f eta + [unfused] (u_mid |a w2| + eta)

    Stored by the unfused computation: either product before its bias, and h.
    Source: derived; Higham 2002 (Accuracy and Stability of Numerical Algorithms), section 3.1, for the sums.
    Edges: inf (undetermined) where a hidden value or a product may overflow a dtype that may hold it.
    """
    value = reference.feed_forward(x, w1, b1, w2, b2)
    p = precision
    with np.errstate(all="ignore"):
        product = x @ w1
        h, h_error, h_size = product + b1, *_affine_error(np.abs(x), w1, b1, product, p)
        if p.unfused:
            h_error = h_error + p.u_mid * np.abs(h) + p.eta_mid
        a, a_error = np.maximum(h, 0.0), np.minimum(h_error, np.maximum(h + h_error, 0.0))
        error, size = _affine_error(a + a_error, w2, b2, a @ w2, p)
        terms = {
            "hidden": p.product(a_error, np.abs(w2)),
            "sums": error,
            "output": p.u_out * np.abs(value) + p.eta,
        }
        lost = ~(h_size < p.largest_mid).all(axis=-1, keepdims=True) | ~(size < p.largest_mid)
    return Bound(value, np.where(lost, np.inf, added(terms)), terms)


def _affine_error(x: Array, w: Array, b: Array, product: Array, p: Precision) -> tuple[Array, Array]:
    """The error of x w + b, whose product is given, and the largest that a partial sum may be; x is of sizes, >= 0."""
    n, w, b = w.shape[0], np.abs(w), np.abs(b)
    size = x @ w + b
    error = p.g(n + 1) * p.u_acc * (p.product(x, w) + b) + n * p.eta_acc
    if p.unfused:
        error = error + p.u_mid * np.abs(product) + p.eta_mid
    return error, size
