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

Halting is summed in float32 at least. Autograd has every gradient, but None for a bias that cancels; the number of
steps is a constant in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from veriformer.declarations import Capabilities

FRAMEWORK = "torch"
Params = Mapping[str, Any]
Results = tuple[Tensor, Tensor, Tensor]
KV = tuple[Tensor, Tensor]
Queries = tuple[Tensor | None, int, Tensor | None, bool]
BLOCK = 8  # steps whose constants are computed together, as one product reads the weights once


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
            raise ValueError(f"max_steps, epsilon: got {max_steps}, {epsilon}, wanted >= 1, a number in [0, 1)")
        self.layer, self.halt, self.heads, self.pre = params["layer"], params["halt"], heads, norm == "pre"
        self.causal, self.max_steps, self.epsilon = causal, max_steps, epsilon
        w = self.layer["attention"]
        width = w["wq"].shape[1]
        if heads < 1 or width % heads:
            raise ValueError(f"heads: got {heads}, wanted a divisor of {width}, the width of wq")
        self.groups = w["wk"].shape[1] * heads // width
        self.packed = torch.cat([w[f"w{name}"] for name in "qkv"], 1)
        biases = [w.get(f"b{name}", w[f"w{name}"].new_zeros(w[f"w{name}"].shape[1])) for name in "qkv"]
        self.cuts = (width, self.packed.shape[1] - width)
        (self.query, self.pair), self.biases = self.packed.split(self.cuts, 1), torch.cat(biases).split(self.cuts)
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
        cache, mask = self._empty(x, memory, memory_mask), _fitting("mask", mask, x.shape[:2])
        return self._run(x, mask, self.causal or memory is not None, cache, keep=False)[0]

    def step(
        self, x: Tensor, cache: Cache | None = None, *, mask: Tensor | None = None, memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
    ) -> tuple[Results, Cache]:  # fmt: skip
        """New tokens x[B,m,d] after the L of the cache -> (output, steps, remainder) of theirs, and the cache of all.

        Causal. mask[B,L+m]: True = a real token; memory[B,S,d], memory_mask[B,S]: given with the first tokens alone.
        A halted token has one row for all steps to come (post-norm), or one for each of them (pre-norm); caches
        stay valid after they were passed on.
        Source: Dehghani et al. 2019 (Universal Transformers), section 2.2, the state copied after halting.
        Raises ValueError for tensors that do not fit the cache, a memory given with one, and as a call does.
        """
        if cache is None:
            cache = self._empty(x, memory, memory_mask)
        elif memory is not None or memory_mask is not None:
            raise ValueError("memory: got one with a cache, wanted it with the first tokens alone")
        steps, batch, first = cache.at.shape
        if (steps, batch) != (self.max_steps, len(x)):
            raise ValueError(f"cache: got {steps} steps, {batch} batch rows, wanted {self.max_steps}, {len(x)}")
        mask = _fitting("mask", mask, (batch, first + x.shape[1]))
        results, kept = self._run(x, mask, True, cache, keep=True)
        at = _numbered([flat for flat, _ in kept], len(cache.rows), cache.at.new_zeros(steps, *x.shape[:2]))
        rows = torch.cat([cache.rows, *(found for _, found in kept)])
        return results, replace(cache, rows=rows, at=torch.cat([cache.at, at], 2))

    def _empty(self, x: Tensor, memory: Tensor | None, mask: Tensor | None) -> Cache:
        """The cache of no tokens, and the memory."""
        w, batch = self.layer.get("cross_attention"), len(x)
        if (w is None) != (memory is None) or (memory is None and mask is not None):
            got = f"got {'none' if memory is None else 'one'}{'' if mask is None else ' and a mask'}"
            raise ValueError(f"memory: {got}, wanted one if and only if the layer has cross_attention")
        none = torch.zeros(self.max_steps, batch, 0, dtype=torch.int64, device=x.device)
        cache = Cache(x.new_zeros(1, self.cuts[1]), none)
        if memory is None or w is None:
            return cache
        mask = _fitting("memory_mask", mask, (batch, memory.shape[1]))
        seen = torch.cat([_linear(memory, w[f"w{name}"], w.get(f"b{name}")) for name in "kv"], -1)
        return replace(cache, memory=self._split(seen, w), memory_mask=None if mask is None else mask[:, None, None])

    def _split(self, rows: Tensor, w: Params) -> KV:
        """rows[B,K,G·D + G·Dv] -> k[B,G,K,D], v[B,G,K,Dv], views."""
        groups, cuts = w["wk"].shape[1] * self.heads // w["wq"].shape[1], [w[name].shape[1] for name in ("wk", "wv")]
        return tuple(part.unflatten(-1, (groups, -1)).transpose(1, 2) for part in rows.split(cuts, -1))

    def _run(
        self, x: Tensor, mask: Tensor | None, causal: bool, cache: Cache, keep: bool
    ) -> tuple[Results, list[KV]]:  # fmt: skip
        """All steps of new tokens; with `keep`, also which of them show which rows from each step on."""
        first, flat = cache.at.shape[2], torch.arange(x.shape[0] * x.shape[1], device=x.device)
        flat = flat if mask is None else flat[mask[:, first:].reshape(-1)]
        keys, wide = self.keys(self, x, flat, first, keep), torch.promote_types(x.dtype, torch.float32)
        total, made = flat.new_zeros(len(flat), dtype=wide), [(flat[:0], x.new_zeros(0, x.shape[2]), x.new_zeros(0))]
        for n in range(1, self.max_steps + 1):
            if not (len(flat) or keep):
                break
            q, residual, rows = keys.step(n)
            if not len(flat):
                continue
            seen = rows.view(*x.shape[:2], -1)
            seen = torch.cat([cache.rows[cache.at[n - 1]], seen], 1) if first else seen
            s = self._layer(q, residual, seen, _queries(flat, x, first, mask, causal), cache)
            h = _linear(s, self.halt["w"], self.halt.get("b"))[:, 0].to(wide).sigmoid()
            left, total = 1 - total, total + h
            halts = (total >= 1 - self.epsilon) | (n == self.max_steps)
            made.append((flat, torch.where(halts, left, h).to(x.dtype)[:, None] * s, torch.where(halts, left, 0)))
            on = (~halts).nonzero()[:, 0]
            if n < self.max_steps and (len(on) or keep):
                keys.move(flat, s, on)
            flat, total = flat[on], total[on]
        return _results(x, made), keys.kept

    def _layer(self, q: Tensor, residual: Tensor, seen: Tensor, queries: Queries, cache: Cache) -> Tensor:
        """The layer from its queries q[A,H·D] on, residual[A,d], seen[B,K,G·D + G·Dv] -> s[A,d].

        What a product has just made nobody else holds, and autograd does not look at it: it is written in place.
        """
        w, last, (slots, longest, mask, causal) = self.layer, "norm2", queries
        y = self._attended(q, self._split(seen, w["attention"]), slots, longest, mask, causal)
        x = self._left((y @ w["attention"]["wo"]).add_(residual), "norm1")
        if cache.memory is not None:
            c, last = w["cross_attention"], "norm3"
            q = _linear(self._entered(x, "norm2"), c["wq"], c.get("bq"))
            y = self._attended(q, cache.memory, slots, longest, cache.memory_mask)
            x = self._left(_linear(y, c["wo"], c.get("bo")).add_(x), "norm2")
        f = w["feed_forward"]
        y = _linear(self._entered(x, last), f["w1"], f.get("b1")).relu_()
        return self._left(_linear(y, f["w2"], f.get("b2")).add_(x), last)

    def _entered(self, x: Tensor, name: str) -> Tensor:
        return _normed(x, self.layer[name]) if self.pre else x

    def _left(self, x: Tensor, name: str) -> Tensor:
        return x if self.pre else _normed(x, self.layer[name])

    def _attended(
        self, q: Tensor, kv: KV, slots: Tensor | None, longest: int, mask: Tensor | None, causal: bool = False
    ) -> Tensor:  # fmt: skip
        """Packed queries q[A,H·D] to kv -> [A,H·Dv]; the other words are those of _queries."""
        size = len(kv[0]) * longest
        if slots is not None:
            q = q.new_zeros(size, q.shape[1]).index_copy_(0, slots, q)
        out = F.scaled_dot_product_attention(
            q.view(-1, longest, self.heads, q.shape[1] // self.heads).transpose(1, 2), *kv, attn_mask=mask,
            is_causal=causal, enable_gqa=kv[0].shape[1] < self.heads,
        )  # fmt: skip
        out = out.transpose(1, 2).reshape(size, -1)
        return out if slots is None else out.index_select(0, slots)


class _Keys:
    """Keys and values of new tokens, of which flat[R] are real; z[A,d]: u + P[position]; kept: what a cache gets."""

    def __init__(self, model: UniversalTransformer, x: Tensor, flat: Tensor, first: int, keep: bool) -> None:
        self.model, self.keep, self.flat, (batch, self.length, width) = model, keep, flat, x.shape
        self.places, self.size = _sinusoids(first, self.length, x), batch * self.length
        self.z = _chosen((x + self.places).reshape(-1, width), flat)
        self.kept: list[KV] = []


class _Frozen(_Keys):
    """Without the signal of the step: only those of states that have changed are computed."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.q, rows = (self.z @ self.model.packed).split(self.model.cuts, 1)
        self.rows, self.constants = _placed(None, self.flat, rows, self.size), []
        if self.keep:
            self.kept.append((self.flat, rows))

    def step(self, n: int) -> tuple[Tensor, Tensor, Tensor]:
        """q[A,H·D], residual[A,d] and the rows of all keys, for step n."""
        if len(self.constants) < n:
            self.constants += self._constants(n)
        query, constant = self.constants[n - 1]
        return self.q + query, self.z + constant, self.rows

    def move(self, flat: Tensor, s: Tensor, on: Tensor) -> None:
        """Takes in the new states s[A,d] of flat[A]; on: which of them run on."""
        z = s + self.places.index_select(0, flat % self.length)
        rows = z @ self.model.pair
        self.rows = _placed(self.rows, flat, rows, self.size, self.keep)
        self.z = _chosen(z, on)
        self.q = self.z @ self.model.query
        if self.keep:
            self.kept.append((flat, rows))

    def _constants(self, n: int) -> list[KV]:
        """For each of some steps from n on: what is added to queries, and what to the residual."""
        w, groups = self.model.layer["attention"], self.model.groups
        signal = _sinusoids(n, min(BLOCK, self.model.max_steps + 1 - n), self.z)
        query, value = _linear(signal, w["wq"], w.get("bq")), _linear(signal, w["wv"], w.get("bv"))
        value = value.unflatten(1, (groups, -1)).repeat_interleave(self.model.heads // groups, 1).flatten(1)
        return list(zip(query, _linear(value, w["wo"], w.get("bo")) + signal, strict=True))


class _Anew(_Keys):
    """All of them in every step, from what the norm makes of states and signals."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.on = torch.arange(len(self.flat), device=self.flat.device)

    def step(self, n: int) -> tuple[Tensor, Tensor, Tensor]:
        """As that of _Frozen."""
        model, bo = self.model, self.model.layer["attention"].get("bo")
        z = self.z + _sinusoids(n, 1, self.z)
        seen, residual = _normed(z, model.layer["norm1"]), _chosen(z, self.on)
        q = _linear(_chosen(seen, self.on), model.query, model.biases[0])
        rows = _linear(seen, model.pair, model.biases[1])
        if self.keep:
            self.kept.append((self.flat, rows))
        return q, residual if bo is None else residual + bo, _placed(None, self.flat, rows, self.size)

    def move(self, flat: Tensor, s: Tensor, on: Tensor) -> None:
        """As that of _Frozen."""
        s = s + self.places.index_select(0, flat % self.length)
        self.z, self.on = _placed(self.z, self.on, s, len(self.z)), self.on[on]


def _results(x: Tensor, made: list[Results]) -> Results:
    """output[B,T,d], steps[B,T], remainder[B,T] of positions, p s and remainders of each step; 0 where nothing ran."""
    size = x.shape[0] * x.shape[1]
    output, remainder = x.new_zeros(size, x.shape[2]), x.new_zeros(size)
    at, parts, left = (torch.cat(found) for found in zip(*made, strict=True))
    output, remainder = output.index_add(0, at, parts), remainder.index_add(0, at, left.to(x.dtype))
    steps = torch.bincount(at, minlength=size)
    return output.view(x.shape), steps.view(x.shape[:2]), remainder.view(x.shape[:2])


def _queries(flat: Tensor, x: Tensor, first: int, mask: Tensor | None, causal: bool) -> Queries:
    """Where the positions flat[A] of x[B,T,d] stand among padded queries, and which of first + T keys these see.

    -> slots[A] among B · longest queries, None if they are all; longest; mask[B,1,longest|1,first + T] or None; whether
    the triangle says it all. A slot that nobody has sees all real keys, so that no weights are undefined.
    """
    (batch, length), mine = x.shape[:2], torch.arange(len(flat), device=x.device)
    row, at, slots, longest = flat // length, flat % length, None, length
    if len(flat) < batch * length:
        counts = torch.bincount(row, minlength=batch)
        longest = int(counts.max())
        slots = mine = mine - (counts.cumsum(0) - counts)[row] + row * longest
    mask = None if mask is None else mask[:, None, None]
    if not causal or length == 1:  # a single new token stands behind all keys
        return slots, longest, mask, False
    if slots is None and not first and mask is None:
        return None, longest, None, True
    last = at.new_full((batch * longest,), first + length)
    last[mine] = first + at
    behind = torch.arange(first + length, device=x.device) <= last.view(batch, 1, longest, 1)
    return slots, longest, behind if mask is None else behind & mask, False


def _numbered(kept: Sequence[Tensor], start: int, at: Tensor) -> Tensor:
    """at[M,B,m], in which the number of each position's row is put; kept: which get new rows, from `start` on."""
    shown = at[0].flatten().clone()
    for n in range(len(at)):
        if n < len(kept):
            shown[kept[n]] = torch.arange(start, start + len(kept[n]), device=at.device)
            start += len(kept[n])
        at[n] = shown.view(at[n].shape)
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
    return rows if len(at) == len(rows) else rows.index_select(0, at)


def _fitting(name: str, mask: Tensor | None, shape: Sequence[int]) -> Tensor | None:
    """The mask. Raises ValueError where it would be broadcast."""
    if mask is not None and tuple(mask.shape) != tuple(shape):
        raise ValueError(f"{name}: got shape {tuple(mask.shape)}, wanted {tuple(shape)}")
    return mask


def _linear(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    y = x @ w
    return y if b is None else y.add_(b)


def _normed(x: Tensor, norm: Params) -> Tensor:
    """layer_norm, or without a bias rms_norm, whose eps differ."""
    if "bias" in norm:
        return F.layer_norm(x, x.shape[-1:], norm["weight"], norm["bias"], 1e-5)
    return F.rms_norm(x, x.shape[-1:], norm["weight"], 1e-6)


def _sinusoids(first: int, count: int, like: Tensor) -> Tensor:
    """Of places first, first + 1, … -> [count,d]: sines of place * 10000^(-2i/d) in channel 2i, cosines in 2i + 1."""
    kind, width = {"dtype": torch.float64, "device": like.device}, like.shape[-1]
    places, powers = torch.arange(first, first + count, **kind), torch.arange(0, width, 2, **kind) / -width
    angle = torch.outer(places, 10000.0**powers)
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(1)[:, :width].to(like.dtype)


def universal_transformer(
    x: Tensor, params: Params, *, heads: int, norm: str = "post", mask: Tensor | None = None, causal: bool = False,
    memory: Tensor | None = None, memory_mask: Tensor | None = None, max_steps: int, epsilon: float = 0.01,
) -> Results:  # fmt: skip
    """UniversalTransformer, which has formula, source and errors, its weights packed for one call."""
    model = UniversalTransformer(params, heads=heads, norm=norm, causal=causal, max_steps=max_steps, epsilon=epsilon)
    return model(x, mask=mask, memory=memory, memory_mask=memory_mask)


VARIANTS = {"universal_compacted": {"universal_transformer": universal_transformer}}
# native_layer_norm saves and sums in x's dtype; a product's last bit depends on how many rows it has, who run
_OWN = Capabilities(saved_statistics="storage", gradient_accumulate="storage", leak="rounding")
CAPABILITIES = {"universal_compacted": {"universal_transformer": _OWN}}
