"""The Universal Transformer in torch on the rows that still run: halted positions cost nothing, and are still seen.

"universal_compacted": every product, norm and feed-forward sublayer works on packed rows [running, d]; only the
queries of attention are padded, for each sequence to the longest one. Padding never runs.

Keys and values come in one of two ways. Where `shortcut` has nothing to say against it (post-norm) they never see the
signal of the step: with z = u + P[position], for any query q

    softmax over keys of q (z + P[n]) W_K = softmax over keys of q z W_K     every key's logit moves by q P[n] W_K
    p (z + P[n]) W_V W_O = p z W_V W_O + P[n] W_V W_O                        as the weights p sum to 1

so those of a halted position are computed once more, from the state that it keeps, and never again. The biases of
keys and values go the same way: one cancels, the other joins the constant. Otherwise (pre-norm) those of all positions
are computed anew in every step.

Halting is summed in float32 at least. Autograd has every gradient; the number of steps is a constant in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from veriformer.declarations import Capabilities

FRAMEWORK = "torch"
Params = Mapping[str, Any]
Results = tuple[Tensor, Tensor, Tensor]
KV = tuple[Tensor, Tensor]
BLOCK = 8
"""The constants of so many steps are computed together, as one product reads the weights once."""


def shortcut(
    norm: str = "post", *, sink: bool = False, softcap: bool = False, empty_rows: bool = False,
    by_position: bool = False, rotary_by_step: bool = False,
) -> str:  # fmt: skip
    """Why keys and values cannot do without the signal of the step; "" where they can.

    sink: one more logit beside those of the keys; softcap: logits through tanh; empty_rows: queries that may see
    nothing; by_position: a step adds different signals at different positions; rotary_by_step: the number of the
    step turns the keys.
    """
    reasons = {
        "pre-norm: state and signal go through a norm together": norm == "pre",
        "sink: its logit stays where those of the keys move": sink,
        "softcap: tanh lets no common number through": softcap,
        "empty rows: weights that are all 0 let no constant through": empty_rows,
        "signal by position: every key's logit moves by another number": by_position,
        "rotary by step: keys are turned, nothing is added": rotary_by_step,
    }
    return "; ".join(reason for reason, holds in reasons.items() if holds)


@dataclass(frozen=True)
class Cache:
    """Keys and values of earlier tokens.

    rows[R, G·D + G·Dv]: one for each state that a token was seen in, and a first one of zeros for what is no real
    token; at[M,B,L]: which of them a token shows in each step; memory, memory_mask: what cross-attention sees.
    """

    rows: Tensor
    at: Tensor
    memory: KV | None = None
    memory_mask: Tensor | None = None


@dataclass(frozen=True)
class _Sight:
    """Which keys are real, [B,L+T] or None for all, how many are earlier ones, L, and the memory."""

    keys: Tensor | None
    first: int
    causal: bool
    memory: KV | None
    memory_mask: Tensor | None


@dataclass(frozen=True)
class _Running:
    """Slots of who runs among B · longest padded queries, None if they are all, and which keys these may see."""

    slots: Tensor | None
    shape: tuple[int, int]
    mask: Tensor | None
    causal: bool


class UniversalTransformer:
    """One layer applied again and again; the three projections of self-attention are packed into one matrix."""

    def __init__(
        self, params: Params, *, heads: int, norm: str = "post", causal: bool = False, max_steps: int,
        epsilon: float = 0.01,
    ) -> None:  # fmt: skip
        """Packs the weights; under autograd gradients go on to those that were given.

        Raises ValueError for an unknown norm, max_steps < 1, epsilon outside [0, 1), heads that do not divide wq.
        """
        if norm not in ("post", "pre"):
            raise ValueError(f"norm: got {norm!r}, wanted 'post' or 'pre'")
        if max_steps < 1 or not 0 <= epsilon < 1:
            got = f"got {max_steps}, {epsilon}, wanted at least 1, and a number in [0, 1)"
            raise ValueError(f"max_steps, epsilon: {got}")
        self.layer, self.halt, self.heads, self.pre = params["layer"], params["halt"], heads, norm == "pre"
        self.causal, self.max_steps, self.epsilon = causal, max_steps, epsilon
        w = self.layer["attention"]
        self.width = w["wq"].shape[1]
        if heads < 1 or self.width % heads:
            raise ValueError(f"heads: got {heads}, wanted a divisor of {self.width}, the width of wq")
        self.packed = torch.cat([w["wq"], w["wk"], w["wv"]], 1)
        biases = [_plus(w[f"w{name}"].new_zeros(w[f"w{name}"].shape[1]), w.get(f"b{name}")) for name in "kv"]
        self.bias = torch.cat(biases) if "bk" in w or "bv" in w else None
        self.query, self.keys_values = self.packed[:, : self.width], self.packed[:, self.width :]
        # a real token sees itself at least, and what is none never runs: no row of self-attention is empty
        self.keys = _Anew if shortcut(norm) else _Frozen

    def __call__(
        self, x: Tensor, *, mask: Tensor | None = None, memory: Tensor | None = None, memory_mask: Tensor | None = None
    ) -> Results:
        """x[B,T,d], mask[B,T], memory[B,S,d], memory_mask[B,S] -> output[B,T,d], steps[B,T], remainder[B,T].

        s = layer(u + P[position] + P[n]), h = sigmoid(s w + b), output = Σ p s;  True in a mask = a real token
        Source: Dehghani et al. 2019 (Universal Transformers), section 2; Graves 2016 (Adaptive Computation Time),
        section 2. With a memory attention is causal.
        Raises ValueError for masks that do not fit, and a memory where the layer has no cross_attention, or lacks one.
        """
        seen, real = self._memory(memory, memory_mask, len(x))
        causal = self.causal or memory is not None
        return self._run(x, _Sight(_fitting("mask", mask, x.shape[:2]), 0, causal, seen, real))[0]

    def _memory(self, memory: Tensor | None, mask: Tensor | None, batch: int) -> tuple[KV | None, Tensor | None]:
        """Keys and values of the memory, and what of it is real, [B,1,1,S]."""
        w = self.layer.get("cross_attention")
        if (w is None) != (memory is None) or (memory is None and mask is not None):
            got = f"got {'none' if memory is None else 'one'}{'' if mask is None else ' and a mask'}"
            raise ValueError(f"memory: {got}, wanted one if and only if the layer has cross_attention")
        if memory is None or w is None:
            return None, None
        mask = _fitting("memory_mask", mask, (batch, memory.shape[1]))
        rows = torch.cat([_linear(memory, w[f"w{name}"], w.get(f"b{name}")) for name in "kv"], -1)
        return self._split(rows, w), None if mask is None else mask[:, None, None]

    def _split(self, rows: Tensor, w: Params) -> KV:
        """rows[B,K,G·D + G·Dv] -> k[B,G,K,D], v[B,G,K,Dv], views."""
        groups = w["wk"].shape[1] * self.heads // w["wq"].shape[1]
        k, v = rows.split([w["wk"].shape[1], w["wv"].shape[1]], -1)
        return k.unflatten(-1, (groups, -1)).transpose(1, 2), v.unflatten(-1, (groups, -1)).transpose(1, 2)

    def _run(
        self, x: Tensor, sight: _Sight, past: Cache | None = None, keep: bool = False
    ) -> tuple[Results, list[KV]]:  # fmt: skip
        """All steps of new tokens; with `keep`, also which positions show which rows from each step on."""
        flat = torch.arange(x.shape[0] * x.shape[1], device=x.device)
        if sight.keys is not None:
            flat = flat[sight.keys[:, sight.first :].reshape(-1)]
        keys = self.keys(self, x, flat, sight.first, keep)
        halting = _Halting(torch.zeros(len(flat), dtype=_wide(x), device=x.device))
        for n in range(1, self.max_steps + 1):
            if not len(flat) and not keep:
                break
            q, residual, rows = keys.step(n)
            if not len(flat):
                continue
            seen = rows.view(*x.shape[:2], -1)
            seen = seen if past is None else torch.cat([past.rows[past.at[n - 1]], seen], 1)
            s = self._layer(q, residual, seen, _running(flat, x, sight), sight)
            on = halting.step(n, n == self.max_steps, flat, s, self._halting(s), self.epsilon)
            if n < self.max_steps and (len(on) or keep):
                keys.move(flat, s, on)
            flat = flat[on]
        return halting.results(x), keys.kept

    def _layer(self, q: Tensor, residual: Tensor, seen: Tensor, running: _Running, sight: _Sight) -> Tensor:
        """The layer from its queries q[A,H·D] on, residual[A,d], seen[B,K,G·D + G·Dv] -> s[A,d].

        What a product has just made nobody else holds, and autograd does not look at it: it is written in place.
        """
        w, last = self.layer, "norm2"
        y = self._attended(q, self._split(seen, w["attention"]), running, running.mask, running.causal)
        x = self._left((y @ w["attention"]["wo"]).add_(residual), "norm1")
        if sight.memory is not None:
            c, last = w["cross_attention"], "norm3"
            q = _linear(self._entered(x, "norm2"), c["wq"], c.get("bq"))
            y = self._attended(q, sight.memory, running, sight.memory_mask, False)
            x = self._left(_linear(y, c["wo"], c.get("bo")).add_(x), "norm2")
        f = w["feed_forward"]
        y = _linear(self._entered(x, last), f["w1"], f.get("b1")).relu_()
        return self._left(_linear(y, f["w2"], f.get("b2")).add_(x), last)

    def _entered(self, x: Tensor, name: str) -> Tensor:
        return _normed(x, self.layer[name]) if self.pre else x

    def _left(self, x: Tensor, name: str) -> Tensor:
        return x if self.pre else _normed(x, self.layer[name])

    def _halting(self, s: Tensor) -> Tensor:
        """s[A,d] -> h[A], in the dtype in which halting is summed."""
        return _linear(s, self.halt["w"], self.halt.get("b"))[:, 0].to(_wide(s)).sigmoid()

    def _attended(self, q: Tensor, kv: KV, running: _Running, mask: Tensor | None, causal: bool) -> Tensor:
        """Packed queries q[A,H·D] to kv -> [A,H·Dv]."""
        (batch, longest), slots = running.shape, running.slots
        if slots is not None:
            q = q.new_zeros(batch * longest, q.shape[1]).index_copy_(0, slots, q)
        out = F.scaled_dot_product_attention(
            q.view(batch, longest, self.heads, -1).transpose(1, 2), *kv, attn_mask=mask, is_causal=causal,
            enable_gqa=kv[0].shape[1] < self.heads,
        )  # fmt: skip
        out = out.transpose(1, 2).reshape(batch * longest, -1)
        return out if slots is None else out.index_select(0, slots)


class UniversalDecoder(UniversalTransformer):
    """The causal one, some tokens at a time. A cache stays valid after it was passed on."""

    def __init__(
        self, params: Params, *, heads: int, norm: str = "post", max_steps: int, epsilon: float = 0.01
    ) -> None:  # fmt: skip
        """Packs the weights. Raises ValueError as UniversalTransformer does."""
        super().__init__(params, heads=heads, norm=norm, causal=True, max_steps=max_steps, epsilon=epsilon)

    def step(
        self, x: Tensor, cache: Cache | None = None, *, mask: Tensor | None = None, memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
    ) -> tuple[Results, Cache]:  # fmt: skip
        """New tokens x[B,m,d] after the L of the cache -> (output, steps, remainder) of theirs, and the cache of all.

        mask[B,L+m]: True = a real token; memory[B,S,d], memory_mask[B,S]: given with the first tokens, then kept.
        A halted token has one row for all steps to come (post-norm), or one for each of them (pre-norm).
        Source: Dehghani et al. 2019 (Universal Transformers), section 2.2, the state copied after halting.
        Raises ValueError for tensors that do not fit the cache, a memory given with one, and as a call does.
        """
        batch, new = x.shape[:2]
        if cache is None:
            at = torch.zeros(self.max_steps, batch, 0, dtype=torch.int64, device=x.device)
            cache = Cache(x.new_zeros(1, self.keys_values.shape[1]), at, *self._memory(memory, memory_mask, batch))
        elif memory is not None or memory_mask is not None:
            raise ValueError("memory: got one with a cache, wanted it with the first tokens alone")
        steps, rows, first = cache.at.shape
        if (steps, rows) != (self.max_steps, batch):
            raise ValueError(f"cache: got {steps} steps, {rows} batch rows, wanted {self.max_steps}, {batch}")
        mask = _fitting("mask", mask, (batch, first + new))
        sight = _Sight(mask, first, True, cache.memory, cache.memory_mask)
        results, kept = self._run(x, sight, cache if first else None, keep=True)
        at = _numbered([flat for flat, _ in kept], len(cache.rows), cache.at.new_zeros(steps, batch, new))
        found = torch.cat([cache.rows, *(rows for _, rows in kept)])
        return results, replace(cache, rows=found, at=torch.cat([cache.at, at], 2))

    @staticmethod
    def crop(cache: Cache, length: int) -> Cache:
        """The cache as it was after its first `length` tokens; the rows of the others stay where they are."""
        return replace(cache, at=cache.at[:, :, :length])

    @staticmethod
    def reorder(cache: Cache, rows: Tensor) -> Cache:
        """The cache whose batch row i is row rows[i] of the given one; keys and values are shared, not copied."""
        memory, mask = cache.memory, cache.memory_mask
        seen = None if memory is None else (memory[0][rows], memory[1][rows])
        return Cache(cache.rows, cache.at[:, rows], seen, None if mask is None else mask[rows])


class _Frozen:
    """Keys and values without the signal of the step: only those of states that have changed are computed."""

    def __init__(self, model: UniversalTransformer, x: Tensor, flat: Tensor, first: int, keep: bool) -> None:
        self.model, self.keep, (batch, self.length, width) = model, keep, x.shape
        self.places = _sinusoids(torch.arange(first, first + self.length, device=x.device), x)
        self.z = _chosen((x + self.places).reshape(-1, width), flat)
        self.q, rows = (self.z @ model.packed).split([model.width, model.keys_values.shape[1]], 1)
        self.rows = _placed(None, flat, rows, batch * self.length)
        self.kept, self.constants = [(flat, rows)] if keep else [], []  # type: tuple[list[KV], list[KV]]

    def step(self, n: int) -> tuple[Tensor, Tensor, Tensor]:
        """q[A,H·D], residual[A,d] and the rows of all keys, for step n."""
        if len(self.constants) < n:
            self.constants += self._constants(n)
        query, constant = self.constants[n - 1]
        return self.q + query, self.z + constant, self.rows

    def move(self, flat: Tensor, s: Tensor, on: Tensor) -> None:
        """Takes in the new states s[A,d] of flat[A]; on: which of them run on."""
        z = s + self.places[flat % self.length]
        rows = z @ self.model.keys_values
        self.rows = _placed(self.rows, flat, rows, len(self.rows), self.keep)
        self.z = _chosen(z, on)
        self.q = self.z @ self.model.query
        if self.keep:
            self.kept.append((flat, rows))

    def _constants(self, n: int) -> list[KV]:
        """For each of some steps from n on: what is added to queries, and what to the residual."""
        w, heads = self.model.layer["attention"], self.model.heads
        signal = _sinusoids(torch.arange(n, min(n + BLOCK, self.model.max_steps + 1), device=self.z.device), self.z)
        query, value = _linear(signal, w["wq"], w.get("bq")), _linear(signal, w["wv"], w.get("bv"))
        groups = w["wk"].shape[1] * heads // self.model.width
        value = value.unflatten(1, (groups, -1)).repeat_interleave(heads // groups, 1).flatten(1)
        return list(zip(query, _linear(value, w["wo"], w.get("bo")) + signal, strict=True))


class _Anew:
    """Keys and values of all positions in every step, from what the norm makes of state and signals."""

    def __init__(self, model: UniversalTransformer, x: Tensor, flat: Tensor, first: int, keep: bool) -> None:
        self.model, self.keep, self.flat, (batch, self.length, width) = model, keep, flat, x.shape
        self.size = batch * self.length
        self.places = _sinusoids(torch.arange(first, first + self.length, device=x.device), x)
        self.z = _chosen((x + self.places).reshape(-1, width), flat)
        self.on = torch.arange(len(flat), device=x.device)
        self.kept: list[KV] = []

    def step(self, n: int) -> tuple[Tensor, Tensor, Tensor]:
        """q[A,H·D], residual[A,d] and the rows of all keys, for step n."""
        model, w = self.model, self.model.layer["attention"]
        z = self.z + _sinusoids(torch.tensor([n], device=self.z.device), self.z)
        seen, residual = _normed(z, model.layer["norm1"]), _chosen(z, self.on)
        if len(self.on) == len(z):
            q, rows = (seen @ model.packed).split([model.width, model.keys_values.shape[1]], 1)
        else:
            q, rows = seen[self.on] @ model.query, seen @ model.keys_values
        q, rows, residual = _plus(q, w.get("bq")), _plus(rows, model.bias), _plus(residual, w.get("bo"))
        if self.keep:
            self.kept.append((self.flat, rows))
        return q, residual, _placed(None, self.flat, rows, self.size)

    def move(self, flat: Tensor, s: Tensor, on: Tensor) -> None:
        """Takes in the new states s[A,d] of flat[A]; on: which of them run on."""
        self.z = _placed(self.z, self.on, s + self.places[flat % self.length], len(self.z))
        self.on = self.on[on]


@dataclass
class _Halting:
    """What has been decided: contributions p s and remainders by position, and the sums of those that run."""

    total: Tensor
    parts: list[KV] = field(default_factory=list)
    ends: list[tuple[Tensor, Tensor, int]] = field(default_factory=list)

    def step(self, n: int, last: bool, flat: Tensor, s: Tensor, h: Tensor, epsilon: float) -> Tensor:
        """Takes in states s[A,d] and halting probabilities h[A] of flat[A] -> which of them run on."""
        left, total = 1 - self.total, self.total + h
        halts = torch.ones_like(h, dtype=torch.bool) if last else total >= 1 - epsilon
        p = torch.where(halts, left, h)
        self.parts.append((flat, p.to(s.dtype)[:, None] * s))
        ended, on = halts.nonzero()[:, 0], (~halts).nonzero()[:, 0]
        self.ends.append((flat[ended], left[ended], n))
        self.total = total[on]
        return on

    def results(self, x: Tensor) -> Results:
        """output[B,T,d], steps[B,T], remainder[B,T]; 0 where nothing ran."""
        batch, length, width = x.shape
        output, remainder = x.new_zeros(batch * length, width), x.new_zeros(batch * length)
        steps = torch.zeros(batch * length, dtype=torch.int64, device=x.device)
        if self.parts:
            at, parts = (torch.cat(found) for found in zip(*self.parts, strict=True))
            output = output.index_add(0, at, parts)
            remainder = remainder.index_copy(
                0, torch.cat([at for at, _, _ in self.ends]), torch.cat([left for _, left, _ in self.ends]).to(x.dtype)
            )
        for at, _, n in self.ends:
            steps.index_fill_(0, at, n)
        return output.view(x.shape), steps.view(batch, length), remainder.view(batch, length)


def _running(flat: Tensor, x: Tensor, sight: _Sight) -> _Running:
    """Where the positions flat[A] of x[B,T,d] stand among padded queries, and what these may see.

    A slot that nobody has sees everything, so that no weights are undefined.
    """
    batch, length = x.shape[:2]
    row, at = flat // length, flat % length
    slots, shape = None, (batch, length)
    if len(flat) < batch * length:
        counts = torch.bincount(row, minlength=batch)
        shape = (batch, int(counts.max()))
        slots = torch.arange(len(flat), device=x.device) - (counts.cumsum(0) - counts)[row] + row * shape[1]
    ordered = sight.causal and length > 1  # a single new token stands behind all keys
    if ordered and slots is None and not sight.first and sight.keys is None:
        return _Running(slots, shape, None, True)
    mask = None if sight.keys is None else sight.keys[:, None, None]
    if ordered:
        total = sight.first + length
        last = at.new_full((batch * shape[1],), total)
        last[torch.arange(len(flat), device=x.device) if slots is None else slots] = sight.first + at
        behind = torch.arange(total, device=x.device) <= last.view(batch, 1, shape[1], 1)
        mask = behind if mask is None else behind & mask
    return _Running(slots, shape, mask, False)


def _numbered(kept: Sequence[Tensor], start: int, at: Tensor) -> Tensor:
    """at[M,B,m] with the number of each position's row in each step; kept: which got new rows, from `start` on."""
    shown = at[0].reshape(-1)
    for n, one in enumerate(at):
        if n < len(kept):
            shown = shown.index_copy(0, kept[n], torch.arange(start, start + len(kept[n]), device=at.device))
            start += len(kept[n])
        one.copy_(shown.view(one.shape))
    return at


def _placed(into: Tensor | None, flat: Tensor, rows: Tensor, size: int, keep: bool = False) -> Tensor:
    """rows[A,W] at the places flat[A] among `size`, elsewhere what `into` has, or 0.

    `into` is overwritten, unless it is to be kept, or autograd may have kept it for attention's backward.
    """
    if len(flat) == size:
        return rows
    if into is None:
        return rows.new_zeros(size, rows.shape[1]).index_copy_(0, flat, rows)
    if keep or into.requires_grad or rows.requires_grad:
        return into.index_copy(0, flat, rows)
    return into.index_copy_(0, flat, rows)


def _chosen(rows: Tensor, at: Tensor) -> Tensor:
    """The rows at[A], in whose order they are; the rows themselves if it is all of them."""
    return rows if len(at) == len(rows) else rows[at]


def _fitting(name: str, mask: Tensor | None, shape: Sequence[int]) -> Tensor | None:
    """The mask. Raises ValueError where it would be broadcast."""
    if mask is not None and tuple(mask.shape) != tuple(shape):
        raise ValueError(f"{name}: got shape {tuple(mask.shape)}, wanted {tuple(shape)}")
    return mask


def _wide(x: Tensor) -> torch.dtype:
    """The dtype in which halting is summed."""
    return torch.promote_types(x.dtype, torch.float32)


def _plus(x: Tensor, b: Tensor | None) -> Tensor:
    return x if b is None else x + b


def _linear(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    y = x @ w
    return y if b is None else y.add_(b)


def _normed(x: Tensor, norm: Params) -> Tensor:
    """layer_norm, or without a bias rms_norm, whose eps differ."""
    if "bias" in norm:
        return F.layer_norm(x, x.shape[-1:], norm["weight"], norm["bias"], 1e-5)
    return F.rms_norm(x, x.shape[-1:], norm["weight"], 1e-6)


def _sinusoids(places: Tensor, like: Tensor) -> Tensor:
    """places[n] -> [n,d], angles in float64: the sine of place * 10000^(-2i/d) in channel 2i, its cosine in 2i + 1."""
    width = like.shape[-1]
    rate = 10000.0 ** (torch.arange(0, width, 2, dtype=torch.float64, device=like.device) / -width)
    angle = torch.outer(places.to(torch.float64), rate)
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(1)[:, :width].to(like.dtype)


def universal_transformer(
    x: Tensor, params: Params, *, heads: int, norm: str = "post", mask: Tensor | None = None, causal: bool = False,
    memory: Tensor | None = None, memory_mask: Tensor | None = None, max_steps: int, epsilon: float = 0.01,
) -> Results:  # fmt: skip
    """UniversalTransformer, its weights packed for one call: x[B,T,d] -> output[B,T,d], steps[B,T], remainder[B,T].

    Formula, source and errors: there.
    """
    model = UniversalTransformer(
        params, heads=heads, norm=norm, causal=causal, max_steps=max_steps, epsilon=epsilon
    )  # fmt: skip
    return model(x, mask=mask, memory=memory, memory_mask=memory_mask)


VARIANTS = {"universal_compacted": {"universal_transformer": universal_transformer}}
CAPABILITIES = {
    # native_layer_norm keeps mean and 1/deviation in x's own dtype, and its backward has nothing else; how many rows
    # a product has depends on who runs, and its last bit on that
    "universal_compacted": {"universal_transformer": Capabilities(saved_statistics="storage", leak="rounding")}
}
