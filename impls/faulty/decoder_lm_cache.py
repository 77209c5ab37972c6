"""Decoder-only models with a wrong cache: one correct static cache with one switch for each mistake.

The variant "correct" has every switch off. Each other variant differs from it by the mistake that its Fault
names and by nothing else. Rows are written in place into buffers of the capacity, or of two rows that are
doubled where there is no capacity; full uses no cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veriformer.declarations import Capabilities, Fault

FRAMEWORK = "numpy"
Params = Mapping[str, Any]
KV = tuple[NDArray, NDArray]


@dataclass
class _Cache:
    """Buffers of keys and values of every layer, how many of their rows are valid, and where the next token stands."""

    buffers: list[list[NDArray]] = field(default_factory=list)
    lengths: list[list[int]] = field(default_factory=list)
    position: int = 0
    longest: int = 0


class _Model:
    def __init__(
        self, fault: str, params: Params, heads: int, norm: str, alpha: float, positions: str | None,
        max_length: int | None,
    ) -> None:  # fmt: skip
        self.fault, self.params, self.heads, self.positions = fault, params, heads, positions
        self.pre, self.alpha, self.max_length = norm == "pre", alpha, max_length
        self.vocabulary, self.last, self.order = len(params["embedding"]), _Cache(), None
        self.shared: dict[Any, Any] = {}

    def full(self, tokens: NDArray) -> NDArray:
        """tokens[B,T] -> logits[B,T,V]. Raises ValueError for tokens that are none, and for more than max_length."""
        self._check(tokens, 0, stepping=False)
        return self._run(tokens, 0, lambda number, new: (new, 0))

    def step(self, tokens: NDArray, cache: _Cache | None) -> tuple[NDArray, _Cache]:
        """tokens[B,m] -> logits[B,m,V], the cache. Raises ValueError as full does."""
        cache = self._begun(tokens) if cache is None else cache
        if self.fault == "one_buffer_said_to_be_persistent":
            cache = _Cache(cache.buffers, [list(pair) for pair in cache.lengths], cache.position, cache.longest)
        if self.fault == "position_shared_by_sessions":
            cache.position = self.shared.get("position", 0)
        self._check(tokens, cache.position)
        new, position = tokens.shape[1], cache.position
        logits = self._run(tokens, position, lambda number, rows: self._appended(cache, number, rows))
        cache.position = self.shared["position"] = position + new
        cache.longest = max(cache.longest, cache.position)
        self.last = cache
        return logits, cache

    def crop(self, cache: _Cache, length: int) -> _Cache:
        """The cache after its first `length` tokens. Raises ValueError where there were fewer."""
        fault, had = self.fault, cache.position
        if not 0 <= length <= had:
            raise ValueError(f"crop: length: got {length}, wanted 0 to {had}")
        length = {
            "crop_does_nothing": had,
            "crop_one_too_short": max(length - 1, 0),
            "crop_one_too_long": min(length + 1, had),
            "crop_counts_from_the_end": had - length,
            "crop_to_one_ignored": had if length == 1 else length,
        }.get(fault, length)
        for number, (lengths, buffers) in enumerate(zip(cache.lengths, cache.buffers, strict=True)):
            if fault == "crop_of_the_first_layer_only" and number:
                continue
            for which, buffer in enumerate(buffers):
                if fault == "crop_from_the_front":
                    buffer[:, :, :length] = buffer[:, :, had - length : had].copy()
                if fault == "crop_clears_and_keeps_the_length":
                    buffer[:, :, length:] = 0
                elif not (fault == "crop_of_the_keys_only" and which):
                    lengths[which] = length
        cache.position = had if fault == "crop_keeps_positions" else length
        return cache

    def reorder(self, cache: _Cache, rows: NDArray) -> _Cache:
        """The cache whose batch row i is row rows[i] of the given one."""
        fault, rows, buffers = self.fault, np.asarray(rows), []
        rows = {
            "reorder_does_nothing": np.arange(len(rows)),
            "reorder_the_other_way": np.argsort(rows, kind="stable"),
            "reorder_in_order": np.sort(rows),
            "reorder_without_repeats": np.argsort(np.argsort(rows, kind="stable"), kind="stable"),
        }.get(fault, rows)
        self.order = rows
        for number, (k, v) in enumerate(cache.buffers):
            if fault == "reorder_of_the_first_layer_only" and number:
                buffers.append([k, v])
                continue
            if fault == "reorder_row_by_row_in_place":
                for i, row in enumerate(rows):
                    k[i], v[i] = k[row], v[row]
                buffers.append([k, v])
                continue
            both = [k if fault == "reorder_of_the_values_only" else k[rows], v[rows]]
            if fault == "reorder_of_the_keys_only":
                both[1] = v
            if fault == "reorder_takes_values_from_keys" and k.shape == v.shape:
                both[1] = k[rows]
            buffers.append(both)
        position = cache.position + (fault == "reorder_moves_positions")
        lengths = [list(pair) for pair in cache.lengths]
        if fault == "reorder_undoes_the_crop":
            lengths, position = [[cache.longest] * 2 for _ in lengths], cache.longest
        return _Cache(buffers, lengths, position, cache.longest)

    def _check(self, tokens: NDArray, length: int, stepping: bool = True) -> None:
        if ((tokens < 0) | (tokens >= self.vocabulary)).any():
            raise ValueError(f"tokens: got one outside the vocabulary, wanted 0 to {self.vocabulary - 1}")
        total = length + tokens.shape[1] - (self.fault == "capacity_one_too_large")
        if self.fault == "capacity_one_too_small" and stepping:
            total += 1
        if self.max_length is not None and total > self.max_length and not self.fault.startswith("overflow"):
            raise ValueError(f"tokens: got {tokens.shape[1]} after {length}, wanted at most {self.max_length}")

    def _begun(self, tokens: NDArray) -> _Cache:
        """The cache of a new session."""
        if self.fault == "new_session_goes_on" and self.last.buffers and len(self.last.buffers[0][0]) == len(tokens):
            return self.last
        count, fresh = len(self.params["layers"]), _Cache()
        fresh.buffers, fresh.lengths = [[] for _ in range(count)], [[0, 0] for _ in range(count)]
        if self.fault == "buffers_shared_by_sessions":
            fresh.buffers = self.shared.setdefault(len(tokens), fresh.buffers)
        if self.fault == "new_session_keeps_the_position":
            fresh.position = self.last.position
        if self.fault == "new_session_keeps_the_length" and self.last.buffers:
            if len(self.last.buffers[0][0]) == len(tokens):
                fresh.buffers = [[np.zeros_like(a) for a in pair] for pair in self.last.buffers]
                fresh.lengths = [list(pair) for pair in self.last.lengths]
        return fresh

    def _appended(self, cache: _Cache, number: int, new: KV) -> tuple[KV, int]:
        """All rows to look at, the new ones written, and which of them the first new one is."""
        fault, m = self.fault, new[0].shape[2]
        first = cache.lengths[number][0]
        if self.order is not None and fault == "order_of_the_last_session_kept" and first == 0:
            new = tuple(a[self.order] if len(self.order) == len(a) else a for a in new)
        seen = []
        for which, a in enumerate(new):
            length = cache.lengths[number][which]
            buffer = self._with_room(cache.buffers[number], which, a, length)
            start = self._start(length, number, m, buffer.shape[2])
            self._write(buffer, start, a, which)
            cache.lengths[number][which] = length + (1 if fault == "length_grows_by_one" else m)
            seen.append(buffer)
        end = seen[0].shape[2] if fault == "free_rows_seen" else first + m
        return tuple(a[:, :, :end] for a in seen), first

    def _start(self, length: int, number: int, m: int, room: int) -> int:
        """The slot of the first new row."""
        start = {
            "written_one_too_far": length + 1,
            "written_over_the_last": max(length - 1, 0),
            "one_row_written_at_zero": 0 if m == 1 else length,
            "each_layer_behind_the_one_below": length + number * m,
        }.get(self.fault, length)
        return max(0, min(start, room - m)) if self.fault not in ("overflow_wraps", "overflow_drops") else start

    def _write(self, buffer: NDArray, start: int, a: NDArray, which: int) -> None:
        fault, m = self.fault, a.shape[2]
        slots = start + np.arange(m)
        if fault == "overflow_wraps":
            slots = slots % buffer.shape[2]
        if fault == "overflow_drops":
            slots = slots[slots < buffer.shape[2]]
        if fault == "chunk_written_backwards":
            slots = slots[::-1]
        if fault == "only_the_last_row_written":
            slots, a = slots[-1:], a[:, :, -1:]
        if fault == "values_written_to_the_next_row" and which:
            a = np.roll(a, 1, 0)
        if fault == "first_row_written_to_all":
            a = np.broadcast_to(a[:1], a.shape)
        buffer[:, :, slots] = a[:, :, : len(slots)]

    def _with_room(self, buffers: list[NDArray], which: int, a: NDArray, length: int) -> NDArray:
        """The buffer [B,G,C,width] with room for new rows; a larger one holds the same valid rows."""
        old, total = buffers[which] if which < len(buffers) else None, length + a.shape[2]
        if old is not None and (old.shape[2] >= total or self.max_length is not None):
            return old
        room = max(total, 2 if old is None else 2 * old.shape[2])
        if self.max_length is not None:
            room = self.max_length + (self.fault == "capacity_one_too_large")
        larger = np.zeros((*a.shape[:2], room, a.shape[3]), a.dtype)
        lost = self.fault == "growth_loses_rows" or (self.fault == "growth_moves_keys_only" and which)
        if old is not None and not lost:
            larger[:, :, : old.shape[2]] = old
        buffers[which:] = [larger, *buffers[which + 1 :]]
        return larger

    def _run(self, tokens: NDArray, position: int, keep: Callable[[int, KV], tuple[KV, int]]) -> NDArray:
        """The whole model; keep(layer, new rows) gives the rows to look at and which is the first new one."""
        at = position + np.arange(tokens.shape[1])
        x = self.params["embedding"][tokens] * self.params.get("embedding_scale", 1)
        if self.positions == "sinusoidal":
            x = x + _sinusoids(at, x.shape[-1]).astype(x.dtype)
        for number, layer in enumerate(self.params["layers"]):
            w, norm1, norm2 = layer["feed_forward"], layer["norm1"], layer["norm2"]
            y = self._attention(_normed(x, norm1) if self.pre else x, layer["attention"], at, number, keep)
            x = x + y if self.pre else _normed(self.alpha * x + y, norm1)
            y = _normed(x, norm2) if self.pre else x
            y = np.maximum(y @ w["w1"] + w.get("b1", 0), 0) @ w["w2"] + w.get("b2", 0)
            x = x + y if self.pre else _normed(self.alpha * x + y, norm2)
        x = _normed(x, self.params["norm"]) if "norm" in self.params else x
        head = self.params.get("head", {"w": self.params["embedding"].T})
        return (x @ head["w"] + head.get("b", 0)).astype(self.params["embedding"].dtype)

    def _attention(
        self, x: NDArray, w: Params, at: NDArray, number: int, keep: Callable[[int, KV], tuple[KV, int]]
    ) -> NDArray:
        heads, width = self.heads, w["wq"].shape[1] // self.heads
        groups = w["wk"].shape[1] // width
        q, k, v = (_split(_linear(x, w, name), n) for name, n in (("q", heads), ("k", groups), ("v", groups)))
        if self.positions == "rotary":
            q, k = _turned(q, at), _turned(k, at)
        (k, v), first = keep(number, (k, v))
        k, v = (np.repeat(a, heads // groups, 1) for a in (k, v))
        row, total = np.arange(k.shape[2]), first + q.shape[2]
        behind = (first + np.arange(q.shape[2]))[:, None] - row
        s = q @ k.swapaxes(-1, -2) * width**-0.5
        if self.positions == "alibi":
            s = s - (_slopes(heads)[:, None, None] * np.abs(behind)).astype(s.dtype)
        s = np.where((behind >= 0) | (row >= total), s, -np.inf)
        e = np.exp(s - s.max(-1, keepdims=True))
        mixed = (e / e.sum(-1, keepdims=True) @ v).swapaxes(1, 2)
        return _linear(mixed.reshape(*mixed.shape[:2], -1), w, "o")


def _normed(x: NDArray, w: Params) -> NDArray:
    x = x - x.mean(-1, keepdims=True) if "bias" in w else x
    eps = 1e-5 if "bias" in w else 1e-6
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * w["weight"] + w.get("bias", 0)


def _linear(x: NDArray, w: Params, name: str) -> NDArray:
    return x @ w["w" + name] + w.get("b" + name, 0)


def _split(x: NDArray, heads: int) -> NDArray:
    """[B,T,heads*D] -> [B,heads,T,D]."""
    return x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)


def _turned(x: NDArray, at: NDArray) -> NDArray:
    """x[B,heads,T,D] turned by positions at[T]."""
    half = x.shape[-1] // 2
    angle = at[:, None] * 10000.0 ** (-np.arange(half) / half)
    cos, sin = np.cos(angle).astype(x.dtype), np.sin(angle).astype(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def _sinusoids(at: NDArray, width: int) -> NDArray:
    """[T] -> [T,width]."""
    channel = np.arange(width)
    angle = at[:, None] * 10000.0 ** (-(channel - channel % 2) / width)
    return np.where(channel % 2, np.cos(angle), np.sin(angle))


def _slopes(heads: int) -> NDArray:
    """[H]."""
    lower = 1 << heads.bit_length() - 1
    first = 2.0 ** (-8 * np.arange(1, lower + 1) / lower)
    return np.concatenate([first, 2.0 ** (-4 * np.arange(1, 2 * lower, 2) / lower)])[:heads]


def _make(fault: str) -> Callable[..., _Model]:
    def decoder_lm(
        params: Params, *, heads: int, norm: str = "pre", alpha: float = 1.0, positions: str | None = "rotary",
        max_length: int | None = None,
    ) -> _Model:  # fmt: skip
        return _Model(fault, params, heads, norm, alpha, positions, max_length)

    decoder_lm.__qualname__ = f"decoder_lm[{fault}]"
    return decoder_lm


# law that must accuse: {variant: (where it was seen, what is wrong)}
_TABLE: dict[str, dict[str, tuple[str, str]]] = {
    "cache-changes-nothing": {
        "free_rows_seen": ("transformers#45940", "the whole capacity is attended"),
        "written_one_too_far": ("mutation: length + 1", "new rows begin one slot too late"),
        "written_over_the_last": ("mutation: last valid row for length", "the last row is overwritten"),
        "one_row_written_at_zero": ("mutation: slots counted in the chunk", "a single row goes to slot 0"),
        "each_layer_behind_the_one_below": ("transformers#38156", "every layer moves the one length on"),
        "chunk_written_backwards": ("mutation: a reversed index", "the rows of a chunk lie in reverse order"),
        "only_the_last_row_written": ("mutation: [:, -1:] left from decoding", "a chunk leaves its last row alone"),
        "first_row_written_to_all": ("mutation: a batch index of 0", "every row keeps the first one's keys"),
        "length_grows_by_one": ("mutation: + 1 for + m", "a chunk counts as one row"),
        "growth_loses_rows": ("mutation: a larger buffer not filled", "rows are lost when the buffer grows"),
        "growth_moves_keys_only": ("llama.cpp#12253", "values are lost when the buffer grows"),
    },
    "rows-do-not-interact": {
        "values_written_to_the_next_row": ("mutation: batch index off by one", "values go to the next batch row"),
    },
    "crop-rolls-back": {
        "crop_does_nothing": ("mutation: a stub", "everything is kept"),
        "crop_keeps_positions": ("mutation: a counter not set back", "rows are dropped, positions go on"),
        "crop_one_too_short": ("mutation: length - 1", "one row too few is kept"),
        "crop_one_too_long": ("mutation: length + 1", "one row too many is kept"),
        "crop_counts_from_the_end": ("mutation: rows to drop for rows to keep", "`length` rows are dropped"),
        "crop_to_one_ignored": ("mutation: length > 1 for length > 0", "a crop to one row does nothing"),
        "crop_from_the_front": ("mutation: [-length:] for [:length]", "the last rows are kept, not the first"),
        "crop_of_the_first_layer_only": ("mutation: one layer looked at", "later layers keep all rows"),
        "crop_of_the_keys_only": ("mutation: values forgotten", "values keep all rows"),
        "crop_clears_and_keeps_the_length": ("transformers#48509", "rows are zeroed, the length stays"),
    },
    "reorder-moves-rows": {
        "reorder_does_nothing": ("mutation: a stub", "rows stay as they are"),
        "reorder_of_the_keys_only": ("mutation: values forgotten", "values stay as they are"),
        "reorder_of_the_values_only": ("mutation: keys forgotten", "keys stay as they are"),
        "reorder_of_the_first_layer_only": ("mutation: one layer looked at", "later layers stay as they are"),
        "reorder_the_other_way": ("mutation: scatter for gather", "row rows[i] is row i of the given one"),
        "reorder_in_order": ("mutation: a sorted index", "rows in ascending order"),
        "reorder_without_repeats": ("mutation: ranks for rows", "no row is repeated or left out"),
        "reorder_row_by_row_in_place": ("mutation: rows read after they were written", "rows are copied in turn"),
        "reorder_takes_values_from_keys": ("transformers#34232", "values are taken from the keys"),
        "reorder_moves_positions": ("mutation: a reordering counted as a step", "positions go on one too late"),
    },
    "new-cache-is-empty": {
        "new_session_goes_on": ("mutation: one cache in the model", "a new session goes on with the last one"),
        "new_session_keeps_the_length": ("transformers#48809", "rows are zeroed, the length stays"),
        "new_session_keeps_the_position": ("mutation: a counter not set back", "positions go on"),
    },
    "sessions-do-not-interact": {
        "buffers_shared_by_sessions": ("mutation: one buffer in the model", "sessions write to the same rows"),
        "position_shared_by_sessions": ("mutation: one counter in the model", "positions count all sessions' tokens"),
    },
    "any-walk-equals-full": {
        "reorder_undoes_the_crop": ("mutation: the longest length copied", "cropped rows come back"),
        "order_of_the_last_session_kept": ("mutation: a row table in the model", "a new session is reordered as well"),
    },
    "old-caches-stay-valid": {
        "one_object_said_to_be_persistent": ("mutation: a promise too many", "old and new cache are one object"),
        "one_buffer_said_to_be_persistent": ("mutation: a promise too many", "old and new cache share rows"),
    },
    "past-the-capacity-is-refused": {
        "overflow_wraps": ("mutation: a ring buffer nobody asked for", "rows beyond the end overwrite the first"),
        "overflow_overwrites": ("mutation: an index clamped for safety", "the last rows are overwritten"),
        "overflow_drops": ("mutation: out of range writes ignored", "rows that do not fit are lost"),
        "capacity_one_too_large": ("mutation: > for >=", "one token more is taken"),
        "capacity_one_too_small": ("mutation: >= for >", "the last token that there is room for is refused"),
    },
}
FAULTS = {
    variant: Fault("decoder_lm", f"decoder_lm/{law}", source, summary, "float64")
    for law, variants in _TABLE.items()
    for variant, (source, summary) in variants.items()
}
VARIANTS: dict[str, dict[str, Callable[..., Any]]] = {
    variant: {"decoder_lm": _make(variant)} for variant in ("correct", *FAULTS)
}
_STATIC = {"decoder_lm": Capabilities(rounds_probabilities=False)}
_PERSISTENT = {"decoder_lm": Capabilities(rounds_probabilities=False, cache="persistent")}
CAPABILITIES = {**_STATIC, **dict.fromkeys(_TABLE["old-caches-stay-valid"], _PERSISTENT)}
