"""The feed-forward sublayer, the same for every token."""

from __future__ import annotations

from typing import Any

from veriformer.reference.activations import relu


def feed_forward(x: Any, w1: Any, b1: Any, w2: Any, b2: Any) -> Any:
    """Each token widened, rectified and narrowed again, on its own.

    x[…, d], w1[d, f], b1[f], w2[f, d], b2[d] -> y, like x.

        y = relu(x w1 + b1) w2 + b2

    A bias that is None is absent.
    Source: Vaswani et al. 2017 (Attention Is All You Need), section 3.3; P82.
    Edges: f = 0 gives b2; there is no activation after w2.
    Raises ValueError for weights that do not fit x or one another.
    """
    _check(x, w1, b1, w2, b2)
    return linear(relu(linear(x, w1, b1)), w2, b2)


def linear(x: Any, w: Any, b: Any = None) -> Any:
    """x w + b; x[…, n], w[n, m], b[m] or None -> […, m]."""
    y = x @ w
    return y if b is None else y + b


def _check(x: Any, w1: Any, b1: Any, w2: Any, b2: Any) -> None:
    """ValueError for what would broadcast into a wrong answer without a word."""
    width, inner = x.shape[-1], w1.shape[-1]
    wanted = {"w1": (w1, (width, inner)), "b1": (b1, (inner,)), "w2": (w2, (inner, width)), "b2": (b2, (width,))}
    for name, (array, shape) in wanted.items():
        if array is not None and tuple(array.shape) != shape:
            raise ValueError(f"feed_forward: {name}: got shape {tuple(array.shape)}, wanted {shape} to fit x and w1")
