"""What the tests of perturbation budgets share: data, ratios, a layer."""

from __future__ import annotations

import numpy as np
import torch

from veriformer.budgets import Precision, error_ratio


def rounded(x, dtype="float32"):
    return torch.from_numpy(np.asarray(x)).to(getattr(torch, dtype)).double().numpy()


def normal(*shape, seed=0, dtype="float32"):
    return rounded(np.random.default_rng([seed, *shape]).normal(size=shape), dtype)


def ratio(computed, bound, dtype="float32"):
    got = computed.detach().double().numpy() if isinstance(computed, torch.Tensor) else computed
    return float(error_ratio(got, bound.value, bound.allowed, Precision(dtype).largest).max(initial=0.0))


def leaves(arrays, dtype="float64"):
    """Tensors of the arrays; the floating ones record gradients."""
    made = {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}
    return {n: t.to(getattr(torch, dtype)).requires_grad_() if t.is_floating_point() else t for n, t in made.items()}


def layer_arrays(batch=2, length=12, width=32, inner=64, seed=0):
    rng = np.random.default_rng(seed)
    d, f = width, inner
    shapes = {f"attention.w{m}": (d, d) for m in "qkvo"} | {f"attention.b{m}": (d,) for m in "qkvo"}
    shapes |= {"feed_forward.w1": (d, f), "feed_forward.b1": (f,), "feed_forward.w2": (f, d), "feed_forward.b2": (d,)}
    arrays = {n: rounded(rng.normal(size=s) / (s[0] ** 0.5 if len(s) > 1 else 4)) for n, s in shapes.items()}
    for i in (1, 2):
        arrays |= {f"norm{i}.weight": rounded(1 + rng.normal(size=d) / 8), f"norm{i}.bias": normal(d, seed=i) / 8}
    return {"x": rounded(rng.normal(size=(batch, length, d))), **arrays}
