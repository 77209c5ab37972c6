"""Error budgets of layer_norm and rms_norm.

Admitted algorithms of layer_norm: two passes, Welford's update, pairwise or shifted versions of them.
Mean and deviation are statistics: they are kept in the accumulator, whatever is stored between
steps. Not admitted: mean(x²) - mean(x)², whose error grows with the square of mean/deviation.
Admitted algorithms of rms_norm: mean of the squares, or sqrt(d) over the norm; the same on
statistics. Not admitted: squares in a dtype that is shorter than the accumulator.
"""

from __future__ import annotations

import numpy as np

from veriformer import reference
from veriformer.budgets.bound import Array, Bound, added
from veriformer.budgets.precision import C, Precision


def layer_norm(
    x: Array,
    weight: Array,
    bias: Array,
    *,
    eps: float = 1e-5,
    epsilon: str = "inside",
    variance: str = "biased",
    precision: Precision,
) -> Bound:
    """Error budget of layer_norm.

    x[…, d], weight[d], bias[d] -> value, allowed, both like x.

        s = sqrt(v + eps) or sqrt(v) + eps,   z = (x - mu)/s
        k = error of the mean in units of s,   r = relative error of s, at most
        E = |weight| ((|z| + k)/(1 - r) - |z| + C u_acc |z|) + u_acc (C |weight z| + |bias|)
            + [unfused] |weight| (C u_mid |z| + eta (1 + 1/s))

    Source: Chan, Golub, LeVeque 1983 (Algorithms for computing the sample variance), for
    the error of the statistics.
    Edges: inf (undetermined) where the mean may be wrong by half a deviation.
    """
    value = reference.layer_norm(x, weight, bias, eps=eps, epsilon=epsilon, variance=variance)
    p = precision
    with np.errstate(all="ignore"):
        z, s, k, r = _statistics(x, eps, epsilon, variance, p)
        size, weight = np.abs(z), np.abs(weight)
        scaled = weight * size
        grown = 1 / (1 - r)
        terms = {
            "mean": weight * (k * grown),
            "variance": scaled * (grown - 1),
            "arithmetic": p.g(2 * C) * p.u_acc * scaled + p.u_acc * np.abs(bias),
            # Stored: x - mu, which also enters the variance, its product with 1/s, and that with weight.
            "storage": p.g(C) * p.u_store * scaled + (weight * (p.eta_mid * (1 + 1 / s)) if p.unfused else 0.0),
            "output": p.u_out * np.abs(value) + p.eta,
        }
        allowed = added(terms)
        allowed = np.where((k >= 0.5) | (r >= 0.5), np.inf, allowed)
    return Bound(value, allowed, terms)


def rms_norm(x: Array, weight: Array, *, eps: float = 1e-6, weight_form: str = "plain", precision: Precision) -> Bound:
    """Error budget of rms_norm.

    x[…, d], weight[d] -> value, allowed, both like x.

        m = mean x²,   s = sqrt(m + eps),   y = weight x/s or (1 + weight) x/s
        r = relative error of s, from (g(d) + C) u_acc m + u_acc eps + underflow of the squares
        E = |y| (1/(1 - r) - 1 + C u_acc) + [unfused] (3 u_mid |y| + eta |gain| (1 + sqrt(d)))

    Stored by the unfused computation: x/s, or x over its norm and sqrt(d) times that, and 1 + weight.
    Source: derived; Higham 2002 (Accuracy and Stability of Numerical Algorithms), section 3.1, for the sum.
    Edges: 0 is exact. inf (undetermined) where the sum of the squares may overflow the accumulator, and
    where squares that underflow may change s by half.
    """
    value = reference.rms_norm(x, weight, eps=eps, weight_form=weight_form)
    p, n = precision, x.shape[-1]
    with np.errstate(all="ignore"):
        total = (x * x).sum(axis=-1, keepdims=True)
        m = total / n
        dm = p.g(n + C) * p.u_acc * m + p.u_acc * eps + 2 * p.eta_acc
        # A row of zeros with eps = 0 is 0/0, which counts as 0.
        r = np.where(m == 0, 0.0, 1 - np.sqrt(np.maximum(1 - dm / (m + eps), 0.0)))
        size, gain = np.abs(value), np.abs(weight + 1 if weight_form == "one_plus" else weight)
        terms = {
            "squares": size * (1 / (1 - r) - 1),
            "arithmetic": p.g(C) * p.u_acc * size,
            "storage": p.g(3) * p.u_store * size + (p.eta_mid * gain * (1 + n**0.5) if p.unfused else 0.0),
            "output": p.u_out * size + p.eta,
        }
        terms = {name: np.where(value == 0, 0.0, term) for name, term in terms.items()}
        lost = (r >= 0.5) | ~(total < p.largest_acc)
    return Bound(value, np.where(lost & (value != 0), np.inf, added(terms)), terms)


def _statistics(x: Array, eps: float, epsilon: str, variance: str, p: Precision) -> tuple[Array, Array, Array, Array]:
    """z, s, the error k of the mean in units of s, and the relative error r of s.

    The mean is wrong by m = g(n) u_acc mean|x| + u_acc |mu|. Two passes then see v + m²; Welford's
    update errs by m sqrt(v). Both are within dv = (g(n) + C) u_acc v + m sqrt(v) + m².
    """
    n = x.shape[-1]
    mu = x.mean(axis=-1, keepdims=True)
    centred = x - mu
    correction = n / max(n - 1, 1) if variance == "unbiased" else 1.0
    v = (centred * centred).mean(axis=-1, keepdims=True) * correction
    m = p.u_acc * (p.g(n) * np.abs(x).mean(axis=-1, keepdims=True) + np.abs(mu))
    root, spread = np.sqrt(v), m * correction**0.5
    dv = p.g(n + C) * p.u_acc * v + spread * root + spread * spread + p.eta_acc
    if epsilon == "inside":
        s = np.sqrt(v + eps)
        r = 1 - np.sqrt(np.maximum(1 - dv / (s * s), 0.0))
    else:
        s = root + eps
        r = np.where(v > dv, root - np.sqrt(np.maximum(v - dv, 0.0)), np.sqrt(dv)) / s
    # A row of zeros with eps = 0 is 0/0, which counts as 0; any other constant row is undetermined there.
    flat = s == 0
    s = np.where(flat, 1.0, s)
    return np.where(flat, 0.0, centred / s), s, np.where(flat & (m > 0), np.inf, m / s), np.where(flat, 0.0, r)
