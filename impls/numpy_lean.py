"""A decoder-only model in NumPy that spends little beside reading its weights: few calls per token, few copies.

Every layer's weights are packed once, [in, out]: the three projections in one matrix, gate and inner layer in another,
gains of pre-norm's rms norms multiplied into the matrices behind them, whose results are divided by the root. Keys and
values lie in one array that is written in place and doubled where it is full. Queries that share a key head are rows
of one product. bfloat16 and float16 are computed in float32 and rounded at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veriformer.declarations import DTYPES, Capabilities

FRAMEWORK = "numpy"
Params = Mapping[str, Any]
Window = tuple[int | None, int | None]
Linear = tuple[NDArray, NDArray | None]
Norm = tuple[NDArray | None, NDArray | None]
Columns = Callable[[str, NDArray], NDArray]
Piece = tuple[int, int, int, int, NDArray | None]
BLOCK = 128
"""Queries that are taken together at most, so that no more scores than of so many are held."""


@dataclass(slots=True)
class Cache:
    """rows[layers,2,B,G,C,W]: keys and values; the first `length` of C are of tokens, what follows is free."""

    rows: NDArray
    length: int


@dataclass(slots=True)
class Layer:
    """A layer's matrices as they are used, [in, out], each with a bias or None, and what is left of its norms."""

    packed: Linear
    out: Linear
    inner: Linear
    outer: Linear
    norms: tuple[Norm, Norm]


class DecoderLM:
    """A decoder-only model: full, step, crop, reorder. It keeps copies of the weights.

    params: decoder_lm; relu(x w1) w2 becomes (silu(x w1) * (x w3)) w2 where a feed_forward has w3[d,f]. Norms with a
    bias are layer norms, those without are divided by the root mean square. norm: "pre" or "post" (then alpha times
    the residual is added). left: how many tokens before itself a token sees. positions: None, "sinusoidal", "rotary"
    (of that base) or "alibi". max_length: tokens at most. epsilon: of all norms; else 1e-5 and 1e-6 of the others.
    Source: Touvron et al. 2023 (LLaMA), section 2.2; Shazeer 2020 (GLU Variants), section 2; Pope et al. 2022.
    Raises ValueError for a norm, positions or left that it does not know.
    """

    def __init__(
        self, params: Params, *, heads: int, norm: str = "pre", alpha: float = 1.0, left: int | None = None,
        positions: str | None = "rotary", max_length: int | None = None, epsilon: float | None = None,
        base: float = 10000.0,
    ) -> None:  # fmt: skip
        if norm not in ("pre", "post") or positions not in (None, "sinusoidal", "rotary", "alibi"):
            raise ValueError(f"decoder_lm: got norm {norm!r} and positions {positions!r}")
        if left is not None and left < 0:
            raise ValueError(f"decoder_lm: left: got {left}, wanted a number of tokens >= 0, or None")
        self.dtype, params = np.asarray(params["embedding"]).dtype, _wide(params)
        table, first = params["embedding"], params["layers"][0]["attention"]
        self.pre, self.alpha, self.left, self.positions, self.base = norm == "pre", alpha, left, positions, base
        self.vocabulary, self.max_length, self.window = len(table), max_length, None if left is None else left + 1
        self.layer_epsilon, self.rms_epsilon = (1e-5, 1e-6) if epsilon is None else (epsilon, epsilon)
        self.heads, self.width = heads, first["wq"].shape[1] // heads
        self.groups = first["wk"].shape[1] // self.width
        values = first["wv"].shape[1] // self.groups
        self.padded = max(self.width, values) + max(self.width, values) % 2
        self.complex = np.result_type(table.dtype, np.complex64)
        self.table = table * table.dtype.type(params.get("embedding_scale", 1))
        self.layers = [self._packed(layer, values) for layer in params["layers"]]
        head, last = params.get("head") or {"w": table.T}, params.get("norm")
        gain, self.norm = (None, None) if last is None else _split(last, self.pre)
        self.head = _joined({"w": head["w"], "b": head.get("b")}, ("",), gain)
        self.codes = self._coded(np.arange(0))

    def full(self, tokens: NDArray) -> NDArray:
        """What may come after each token, given those up to it.

        tokens[B,T] -> logits[B,T,V]
        stack(embed(tokens)) w + b, causal
        Source: Radford et al. 2019, section 2.3.
        Raises ValueError for tokens that are none, and for more of them than max_length.
        """
        self._check(tokens, 0)
        return self._run(tokens, None, 0, None, None)

    def step(
        self, tokens: NDArray, cache: Cache | None, *, mask: NDArray | None = None, positions: NDArray | None = None
    ) -> tuple[NDArray, Cache]:
        """The same for new tokens after those in the cache, which is written and not to be used again.

        tokens[B,m], mask[B,L+m] and positions[B,m] or None -> logits[B,m,V], the cache
        False in the mask hides a token from all; positions count on from L, the tokens before, by default
        Source: Pope et al. 2022, section 2.1.
        Raises ValueError as full does, and for arrays that do not fit the cache or one another.
        """
        length = 0 if cache is None else cache.length
        self._check(tokens, length)
        batch, new = tokens.shape
        if cache is not None and cache.rows.shape[2] != batch:
            raise ValueError(f"tokens: got {batch} rows, wanted {cache.rows.shape[2]}, as in the cache")
        for name, array, shape in (("mask", mask, (batch, length + new)), ("positions", positions, (batch, new))):
            if array is not None and array.shape != shape:
                raise ValueError(f"{name}: got shape {list(array.shape)}, wanted {list(shape)}")
        rows = self._room(cache, batch, length + new)
        return self._run(tokens, rows, length, mask, positions), Cache(rows, length + new)

    def crop(self, cache: Cache | None, length: int) -> Cache | None:
        """The cache as it was after its first `length` tokens. Raises ValueError where there were fewer."""
        had = 0 if cache is None else cache.length
        if not 0 <= length <= had:
            raise ValueError(f"crop: length: got {length}, wanted 0 to {had}, the tokens of the cache")
        return cache and Cache(cache.rows, length)

    def reorder(self, cache: Cache | None, rows: NDArray) -> Cache | None:
        """The cache whose batch row i is row rows[i] of the given one. Raises ValueError for rows not there."""
        if cache is None:
            return None
        rows, batch = np.asarray(rows), cache.rows.shape[2]
        if rows.ndim != 1 or ((rows < 0) | (rows >= batch)).any():
            raise ValueError(f"reorder: rows: got {rows.tolist()}, wanted numbers from 0 to {batch - 1}")
        return Cache(cache.rows[:, :, rows], cache.length)

    def _check(self, tokens: NDArray, length: int) -> None:
        if tokens.ndim != 2 or tokens.dtype.kind not in "iu":
            raise ValueError(f"tokens: got {tokens.dtype} of shape {tokens.shape}, wanted integers, [batch, time]")
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < self.vocabulary:
            raise ValueError(f"tokens: got one outside the vocabulary, wanted 0 to {self.vocabulary - 1}")
        if self.max_length is not None and length + tokens.shape[1] > self.max_length:
            got = f"{tokens.shape[1]} after {length}"
            raise ValueError(f"tokens: got {got}, wanted at most {self.max_length}, max_length")

    def _room(self, cache: Cache | None, batch: int, total: int) -> NDArray:
        """The cache's array, or one with room for twice as many rows as are needed, where it is full."""
        if cache is not None and cache.rows.shape[4] >= total:
            return cache.rows
        room = self.max_length or 2 * total
        rows = np.empty((len(self.layers), 2, batch, self.groups, room, self.padded), self.table.dtype)
        if cache is not None:
            rows[..., : cache.length, :] = cache.rows[..., : cache.length, :]
        return rows

    def _run(
        self, tokens: NDArray, rows: NDArray | None, length: int, mask: NDArray | None, positions: NDArray | None
    ) -> NDArray:
        """The whole model. rows: where keys and values are put behind `length` others, None for a single use."""
        batch, new = tokens.shape
        x = self.table[tokens.reshape(-1)]
        codes = self._codes(length, new, positions)
        if self.positions == "sinusoidal":
            x = (x.reshape(batch, new, -1) + codes).reshape(batch * new, -1)
        pieces = self._pieces(new, length, mask)
        with np.errstate(over="ignore"):  # of exp(-x) in silu, whose inverse is rightly 0
            for number, layer in enumerate(self.layers):
                y = self._applied(x, layer.packed, layer.norms[0] if self.pre else None)
                y = self._attention(y, tokens.shape, codes, pieces, None if rows is None else rows[number], length)
                x = self._added(x, y, layer.out, layer.norms[0])
                x = self._added(x, self._inner(x, layer), layer.outer, layer.norms[1])
        logits = self._applied(x, self.head, self.norm)
        return logits.astype(self.dtype, copy=False).reshape(batch, new, -1)

    def _attention(
        self, packed: NDArray, shape: tuple[int, ...], codes: NDArray | None, pieces: list[Piece],
        rows: NDArray | None, length: int,
    ) -> NDArray:  # fmt: skip
        """packed[B*m,(H+2G)*W] -> [B*m,H*W]; new keys and values are put behind `length` others in rows[2,B,G,C,W]."""
        (batch, new), heads, groups = shape, self.heads, self.groups
        by_head = packed.reshape(batch, new, heads + 2 * groups, self.padded)
        if self.positions == "rotary":
            pairs = by_head.view(self.complex)[:, :, : heads + groups]
            pairs *= codes
        q = by_head[:, :, :heads].reshape(batch, new, groups, -1, self.padded).transpose(0, 2, 3, 1, 4)
        fresh = by_head[:, :, heads:].reshape(batch, new, 2, groups, -1).transpose(2, 0, 3, 1, 4)
        if rows is not None:
            rows[:, :, :, length : length + new] = fresh
        k, v = fresh if rows is None else rows
        parts = [self._mixed(q, k, v, piece) for piece in pieces]
        o = parts[0] if len(parts) == 1 else np.concatenate(parts, 3)
        return o.transpose(0, 3, 1, 2, 4).reshape(batch * new, -1)

    def _mixed(self, q: NDArray, k: NDArray, v: NDArray, piece: Piece) -> NDArray:
        """Attention of queries a to b of q[B,G,R,m,W], over keys low to end of k[B,G,C,W] and v -> [B,G,R,b-a,W]."""
        a, b, low, end, bias = piece
        some = q[:, :, :, a:b]
        s = some.reshape(*q.shape[:2], -1, q.shape[-1]) @ k[:, :, low:end].swapaxes(-1, -2)
        if bias is not None:
            by_head = s.reshape(*some.shape[:4], end - low)
            by_head += bias
        top = s.max(-1, keepdims=True)
        s -= top if bias is None else np.where(np.isneginf(top), 0, top)
        total = np.exp(s, out=s).sum(-1, keepdims=True)
        o = s @ v[:, :, low:end]
        o /= total if bias is None else np.where(total == 0, 1, total)
        return o.reshape(some.shape)

    def _inner(self, x: NDArray, layer: Layer) -> NDArray:
        """relu(x w1 + b1), or with a gate silu(x w1 + b1) * (x w3 + b3)."""
        y = self._applied(x, layer.inner, layer.norms[1] if self.pre else None)
        width = layer.outer[0].shape[0]
        if y.shape[1] == width:
            return np.maximum(y, 0, out=y)
        gated, gate = y[:, :width], y[:, width:]
        e = np.exp(-gated)
        e += 1
        return np.multiply(np.divide(gated, e, out=e), gate, out=e)

    def _added(self, x: NDArray, y: NDArray, linear: Linear, norm: Norm) -> NDArray:
        """The next residual: x + y w + b, or in post-norm norm(alpha x + y w + b)."""
        y = self._applied(y, linear, None)
        y += x if self.pre or self.alpha == 1 else self.alpha * x
        return y if self.pre else self._normed(y, norm)

    def _applied(self, x: NDArray, linear: Linear, norm: Norm | None) -> NDArray:
        """norm(x) w + b; if the norm's gain is part of w, only the root is left of it, by which x w is divided."""
        weight, bias = linear
        y = np.dot(x if norm is None or norm[0] is None else self._normed(x, norm), weight)
        if norm is not None and norm[0] is None:
            y *= self._scale(x)
        if bias is not None:
            y += bias
        return y

    def _normed(self, x: NDArray, norm: Norm) -> NDArray:
        """Layer norm where there is a bias; else x over its root mean square; times the gain."""
        gain, bias = norm
        if bias is None:
            return np.multiply(y := x * self._scale(x), gain, out=y)
        x = x - x.mean(-1, keepdims=True)
        x /= np.sqrt(np.vecdot(x, x)[:, None] / x.shape[1] + self.layer_epsilon)
        x *= gain
        return np.add(x, bias, out=x)

    def _scale(self, x: NDArray) -> NDArray:
        """[N,1]: one over the root mean square."""
        square = np.vecdot(x, x)[:, None]
        square /= x.shape[1]
        square += self.rms_epsilon
        return 1 / np.sqrt(square, out=square)

    def _pieces(self, new: int, length: int, mask: NDArray | None) -> list[Piece]:
        """Queries a to b, keys low to end that some of them may see, what is added to scores: -inf where hidden."""
        left = length + new if self.left is None else self.left
        if new == 1 and mask is None and self.positions != "alibi":
            return [(0, 1, max(0, length - left), length + 1, None)]
        found: list[Piece] = []
        for a in range(0, new, BLOCK):
            b = min(new, a + BLOCK)
            low, end = max(0, length + a - left), length + b
            behind = np.arange(length + a, end)[:, None] - np.arange(low, end)
            hidden = ((behind < 0) | (behind > left))[None, None, None]
            if mask is not None:
                hidden = hidden | ~mask[:, None, None, None, low:end]
            slope = _slopes(self.heads).reshape(self.groups, -1, 1, 1) if self.positions == "alibi" else 0.0
            found.append((a, b, low, end, np.where(hidden, -np.inf, -slope * behind).astype(self.table.dtype)))
        return found

    def _codes(self, length: int, new: int, positions: NDArray | None) -> NDArray | None:
        """What says where the new tokens are; the table of it is made longer where it ends."""
        if self.codes is None or positions is not None:
            return self._coded(positions)
        if length + new > len(self.codes):
            self.codes = self._coded(np.arange(2 * (length + new)))
        return self.codes[length : length + new]

    def _coded(self, at: NDArray | None) -> NDArray | None:
        """Of positions at[..]: e^(i p base^(-2j/D)) [..,1,W/2] to turn by, or sines and cosines [..,d] to add."""
        if at is None or self.positions not in ("rotary", "sinusoidal"):
            return None
        if self.positions == "rotary":  # the zeros behind each head may be turned as well
            turns = _turns(at, self.padded // 2, self.base ** (-2 / self.width))
            return turns[..., None, :].astype(self.complex)
        width = self.table.shape[1]
        turns = _turns(at, (width + 1) // 2, 10000.0 ** (-2 / width))
        sines = np.stack([turns.imag, turns.real], -1).reshape(*at.shape, 2 * turns.shape[-1])
        return sines[..., :width].astype(self.table.dtype)

    def _packed(self, layer: Params, values: int) -> Layer:
        """A layer's weights as they are used; those of the queries times the scale of attention."""
        w, inner = layer["attention"], layer["feed_forward"]
        sizes = {"q": (self.heads, self.width), "k": (self.groups, self.width), "v": (self.groups, values)}
        first, second = (_split(layer[name], self.pre) for name in ("norm1", "norm2"))

        def columns(name: str, a: NDArray) -> NDArray:
            a = a * self.width**-0.5 if name == "q" else a
            return self._columns(a, *sizes[name], name != "v" and self.positions == "rotary")

        packed, first_inner = _joined(w, "qkv", first[0], columns), "13" if "w3" in inner else "1"
        out = np.ascontiguousarray(self._columns(w["wo"].T, self.heads, values, False).T), w.get("bo")
        inside, outside = _joined(inner, first_inner, second[0]), _joined(inner, "2", None)
        return Layer(packed, out, inside, outside, (first[1], second[1]))

    def _columns(self, a: NDArray, heads: int, width: int, paired: bool) -> NDArray:
        """[..,heads*width] -> [..,heads*W], zeros behind each head; paired: channels j and j + width/2 side by side."""
        a = a.reshape(*a.shape[:-1], heads, width)
        if paired:
            a = a.reshape(*a.shape[:-1], 2, -1).swapaxes(-1, -2).reshape(a.shape)
        a = np.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, self.padded - width)])
        return a.reshape(*a.shape[:-2], -1)


def _split(norm: Params, fold: bool) -> tuple[NDArray | None, Norm]:
    """The gain to be multiplied into the matrix behind a norm, and the gain and bias that remain."""
    folded = fold and "bias" not in norm
    return (norm["weight"], (None, None)) if folded else (None, (norm["weight"], norm.get("bias")))


def _joined(params: Params, names: Sequence[str], gain: NDArray | None, columns: Columns = lambda _, a: a) -> Linear:
    """Matrices side by side, [in, out], their rows times the gain, and their biases, None where there is none."""
    weights = [columns(name, params["w" + name]) for name in names]
    biases = [params.get("b" + name) for name in names]
    joined = np.ascontiguousarray(np.concatenate(weights, 1))  # of transposed matrices they are not
    if gain is not None:
        joined *= gain[:, None]
    if all(bias is None for bias in biases):
        return joined, None
    pairs = zip(names, biases, weights, strict=True)
    rows = [np.zeros(w.shape[1], w.dtype) if b is None else columns(name, b) for name, b, w in pairs]
    return joined, np.concatenate(rows)


def _turns(at: NDArray, count: int, ratio: float) -> NDArray:
    """[..] -> [..,count]: e^(i p ratio^j) of positions p."""
    return np.exp(1j * at[..., None] * ratio ** np.arange(count))


def _slopes(heads: int) -> NDArray:
    """[H]: 2^(-8h/H), h from 1; between two powers of two, those of the lower and every second of the upper."""
    lower = 1 << heads.bit_length() - 1
    first = 2.0 ** (-8 * np.arange(1, lower + 1) / lower)
    return np.concatenate([first, 2.0 ** (-4 * np.arange(1, 2 * lower, 2) / lower)])[:heads]


def _wide(tree: Any) -> Any:
    """Copies of all arrays of the weights in float32, or float64 where they are that."""
    if isinstance(tree, Mapping):
        return {name: _wide(part) for name, part in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [_wide(part) for part in tree]
    return np.array(tree, np.float64 if np.asarray(tree).dtype == np.float64 else np.float32)


def decoder_lm(
    params: Params, *, heads: int, norm: str = "pre", alpha: float = 1.0, window: Window | None = None,
    positions: str | None = "rotary", max_length: int | None = None,
) -> DecoderLM:  # fmt: skip
    """The model of these weights.

    params: decoder_lm; window: (rows before a token that it sees, None or 0)
    Source: Pope et al. 2022, section 2.1.
    Raises ValueError for a norm, positions or a window that it does not know.
    """
    left = None if window is None else window[0]
    return DecoderLM(params, heads=heads, norm=norm, alpha=alpha, left=left, positions=positions, max_length=max_length)


def llama() -> DecoderLM:
    """A small Llama of random weights: rms norms, rotary positions, grouped heads, a gate in the feed-forward.

    Source: Touvron et al. 2023 (LLaMA), section 2.2; Llama 2, section 2.2, for grouped heads.
    """
    width, heads, groups, inner, vocabulary = 32, 4, 2, 48, 50
    rng = np.random.default_rng(0)

    def drawn(*shape: int) -> NDArray:
        rows = rng.standard_normal(shape, np.float32)
        return rows * shape[0] ** -0.5 if len(shape) == 2 else 1 + rows / 8

    def layer() -> Params:
        columns = {"wq": width, "wk": groups * width // heads, "wv": groups * width // heads, "wo": width}
        attention = {name: drawn(width, count) for name, count in columns.items()}
        matrices = {"w1": drawn(width, inner), "w3": drawn(width, inner), "w2": drawn(inner, width)}
        norms = {name: {"weight": drawn(width)} for name in ("norm1", "norm2")}
        return {"attention": attention, "feed_forward": matrices, **norms}

    params = {"embedding": drawn(vocabulary, width) * vocabulary**0.5, "layers": [layer(), layer()]}
    params |= {"norm": {"weight": drawn(width)}, "head": {"w": drawn(width, vocabulary)}}
    return DecoderLM(params, heads=heads, max_length=64)


VARIANTS = {"lean": {"decoder_lm": decoder_lm}, "lean_llama": {"decoder_lm": llama}}
_COMMON = Capabilities(
    dtypes=DTYPES, intermediate={"float64": "float64", "default": "float32"}, rounds_probabilities=False
)
CAPABILITIES = {
    "lean": {"decoder_lm": _COMMON},
    # its weights are drawn in float32, in which it computes
    "lean_llama": {"decoder_lm": Capabilities(dtypes=("float32",))},
}
