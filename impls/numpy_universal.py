"""The Universal Transformer and its dialects in plain NumPy.

Output and halting are running sums, so that no state but the last is held, and the loop ends with the last position
that needs it. float64 and float32 are computed in their own dtype; bfloat16 (of ml_dtypes) and float16 are widened to
float32 and rounded once at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veriformer.declarations import DTYPES, PRESETS, Capabilities

FRAMEWORK = "numpy"
Params = Mapping[str, Any]
Results = tuple[NDArray, NDArray, NDArray]


@dataclass(frozen=True)
class _Style:
    """What presets differ in. signals: the numbers of the first position and step; None: there are none."""

    signals: tuple[int, int] | None = (0, 1)
    again: bool = False
    before: bool = False
    strict: bool = False
    forced: bool = True
    frozen: bool = True
    everybody: bool = False
    output: str = "mean"
    halting: str = "act"


_T2T = _Style(signals=(0, 0), before=True, strict=True, forced=False, frozen=False)
_STYLES = {
    "default": _Style(),
    "graves": _Style(signals=None, again=True),
    "ut_paper_text": _Style(signals=(1, 1), output="last"),
    "t2t_basic": replace(_T2T, output="average"),
    "t2t_accumulated": _T2T,
    "t2t_global": replace(_T2T, output="average", everybody=True),
    "pondernet": _Style(frozen=False, halting="share"),
    "fixed": _Style(frozen=False, halting="never"),
}


def universal_transformer(
    x: NDArray, params: Params, *, heads: int, norm: str = "post", mask: NDArray | None = None, causal: bool = False,
    memory: NDArray | None = None, memory_mask: NDArray | None = None, max_steps: int, epsilon: float = 0.01,
    preset: str = "default",
) -> Results:  # fmt: skip
    """One layer applied again and again, each position until its halting sum reaches 1 - epsilon.

    x[B,T,d], params: layer, halt -> output[B,T,d], steps[B,T], remainder[B,T]
    s = layer(u + P[position] + P[n]), h = sigmoid(s w + b), output = Σ p s
    Source: Dehghani et al. 2019 (Universal Transformers), section 2; Graves 2016, section 2; presets: tensor2tensor,
    Banino et al. 2021. mask[B,T] and memory_mask[B,S]: True = a real token.
    Raises ValueError for an unknown norm or preset, max_steps < 1 and epsilon outside [0, 1).
    """
    if norm not in ("post", "pre") or preset not in _STYLES:
        raise ValueError(f"norm, preset: got {norm!r}, {preset!r}, wanted post or pre, and one of {', '.join(_STYLES)}")
    if max_steps < 1 or not 0 <= epsilon < 1:
        raise ValueError(f"max_steps, epsilon: got {max_steps}, {epsilon}, wanted at least 1, and a number in [0, 1)")
    real = np.ones(x.shape[:2], bool) if mask is None else mask
    w, tokens = _widened(params), np.where(real[..., None], _wide(x), 0)
    sight = real[:, None, None, :]
    if causal or memory is not None:
        sight = sight & np.tri(x.shape[1], dtype=bool)
    seen = None if memory is None else _wide(memory)
    hidden = np.ones((1, 1, 1, 1), bool) if memory_mask is None else memory_mask[:, None, None, :]

    def layer(z: NDArray) -> NDArray:
        return _layer(z, seen, w["layer"], heads, norm, sight, hidden)

    output, steps, remainder = _thought(tokens, real, layer, w["halt"], max_steps, epsilon, _STYLES[preset])
    return output.astype(x.dtype), steps, remainder.astype(x.dtype)


def _thought(
    x: NDArray, real: NDArray, layer: Callable[[NDArray], NDArray], halt: Params, max_steps: int, epsilon: float,
    style: _Style,
) -> Results:  # fmt: skip
    """Step after step until nobody runs."""
    u, output, running = x, np.zeros_like(x), real.copy()
    steps, used, remainder = np.zeros(real.shape, np.int64), np.zeros_like(x[..., 0]), np.zeros_like(x[..., 0])
    left, threshold = np.ones_like(used), np.asarray(1 - epsilon, x.dtype)
    for n in range(1, max_steps + 1):
        if not running.any():
            break
        z = u + x if style.again and n > 1 else u
        z = z if style.signals is None else z + _signals(z, style.signals[0], style.signals[1] + n - 1)
        s = layer(z)
        h = _halting(z if style.before else s, halt, real, style)
        share = h * left if style.halting == "share" else h
        total = used + share
        reached = (total > threshold if style.strict else total >= threshold) & (style.halting == "act")
        stops = running & (reached | (n == max_steps and style.forced))
        p = np.where(stops, left, np.where(running, share, 0))
        remainder = np.where(stops, left, remainder)
        output = _output(output, s, p, stops, running, style)
        used, steps = np.where(running, total, used), steps + running
        left = left * (1 - h) if style.halting == "share" else 1 - used
        u = np.where(running[..., None], s, u) if style.frozen else s
        running = running & ~stops
    return np.where(real[..., None], output, 0), steps, remainder


def _halting(z: NDArray, halt: Params, real: NDArray, style: _Style) -> NDArray:
    """The probability of each position, or the mean over a sequence."""
    y = (z @ halt["w"])[..., 0] + halt.get("b", 0)
    small = np.exp(-np.abs(y))
    h = np.where(y < 0, small, 1) / (1 + small)
    if style.halting == "never":
        return np.zeros_like(h)
    if style.everybody:
        count = np.maximum(real.sum(1, keepdims=True), 1).astype(h.dtype)
        h = np.broadcast_to(np.where(real, h, 0).sum(1, keepdims=True) / count, h.shape)
    return h


def _output(output: NDArray, s: NDArray, p: NDArray, stops: NDArray, running: NDArray, style: _Style) -> NDArray:
    """The output with one more state in it."""
    if style.output == "last":
        return np.where(stops[..., None], s, output)
    kept = 1 - p[..., None] if style.output == "average" else 1
    return np.where(running[..., None], p[..., None] * s + kept * output, output)


def _signals(z: NDArray, position: int, step: int) -> NDArray:
    """[T,d]: sinusoids of the positions from this one on, plus those of the step."""
    channel, places = np.arange(z.shape[2]), np.arange(z.shape[1])[:, None] + position
    rate = 10000.0 ** (-(channel - channel % 2) / z.shape[2])
    waves = [np.where(channel % 2 == 0, np.sin(at * rate), np.cos(at * rate)) for at in (places, step)]
    return (waves[0] + waves[1]).astype(z.dtype)


def _layer(
    x: NDArray, memory: NDArray | None, w: Params, heads: int, norm: str, sight: NDArray, hidden: NDArray
) -> NDArray:
    """Self-attention, attention to memory where there is one, feed-forward, each in a residual with its norm."""
    sublayers: list[Callable[[NDArray], NDArray]] = [lambda z: _attention(z, z, w["attention"], heads, sight)]
    if memory is not None:
        sublayers.append(lambda z: _attention(z, memory, w["cross_attention"], heads, hidden))
    sublayers.append(lambda z: _feed_forward(z, w["feed_forward"]))
    for number, sublayer in enumerate(sublayers, 1):
        scale = w[f"norm{number}"]
        x = x + sublayer(_normed(x, scale)) if norm == "pre" else _normed(x + sublayer(x), scale)
    return x


def _feed_forward(z: NDArray, w: Params) -> NDArray:
    return np.maximum(z @ w["w1"] + w.get("b1", 0), 0) @ w["w2"] + w.get("b2", 0)


def _normed(x: NDArray, w: Params) -> NDArray:
    """Layer norm, or without a bias the root mean square norm."""
    if "bias" not in w:
        return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + 1e-6) * w["weight"]
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt(np.square(centred).mean(-1, keepdims=True) + 1e-5) * w["weight"] + w["bias"]


def _attention(x: NDArray, rows: NDArray, w: Params, heads: int, sight: NDArray) -> NDArray:
    """Attention of x[B,T,d] to rows[B,S,d], each head in turn; a token that sees nothing gets bo."""
    size = w["wq"].shape[1] // heads
    groups = w["wk"].shape[1] // size
    sight = np.broadcast_to(sight, (*sight.shape[:2], x.shape[1], rows.shape[1]))[:, 0]
    q, k, v = (z @ w[f"w{name}"] + w.get(f"b{name}", 0) for z, name in ((x, "q"), (rows, "k"), (rows, "v")))
    found = []
    for h in range(heads):
        one, values = (np.split(part, groups, -1)[h * groups // heads] for part in (k, v))
        scores = q[..., h * size : (h + 1) * size] @ one.swapaxes(1, 2) * size**-0.5
        found.append(_average(np.where(sight, scores, -np.inf), values, sight))
    return np.concatenate(found, -1) @ w["wo"] + w.get("bo", 0)


def _average(scores: NDArray, values: NDArray, sight: NDArray) -> NDArray:
    """Softmax of scores[B,T,S] times values[B,S,…]; what is not finite reaches only those who see it."""
    top = scores.max(-1, keepdims=True, initial=-np.inf)
    shares = np.exp(scores - np.where(np.isneginf(top), 0, top))
    total = shares.sum(-1, keepdims=True)
    shares = shares / np.where(total == 0, 1, total)
    finite = np.isfinite(values)
    out = shares @ np.where(finite, values, 0)
    if not finite.all():
        reached = sight[..., None] & ~finite[:, None]
        out = out + np.where(reached, shares[..., None] * values[:, None], 0).sum(-2)
    return out


def _widened(params: Any) -> Any:
    """Every array of nested dicts, widened."""
    return {name: _widened(part) for name, part in params.items()} if isinstance(params, Mapping) else _wide(params)


def _wide(x: NDArray) -> NDArray:
    return x if x.dtype == np.float64 else x.astype(np.float32)


VARIANTS = {"universal": {"universal_transformer": universal_transformer}}
CAPABILITIES = {
    "universal": {
        "universal_transformer": Capabilities(
            dtypes=DTYPES,
            presets=PRESETS,
            nan_contained=True,
            intermediate={"float64": "float64", "default": "float32"},
            rounds_probabilities=False,
        )
    }
}
