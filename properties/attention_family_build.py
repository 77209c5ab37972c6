"""Concrete cases of multi-head, packed and cached attention from sizes, flags, families and a seed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from veriformer.case import Case
from veriformer.declarations import Capabilities
from veriformer.law import Domain
from veriformer.oracle import allowed_keys
from veriformer.properties.attention_build import MASKS, Wish, lengths_for, make_mask, settled, tamed
from veriformer.properties.attention_changes import magnitudes
from veriformer.properties.families import fill

MATRICES = ("normal", "integers", "sparse", "one_hot", "halves")
"""Families of values for matrices."""

Sizes = tuple[int, ...]
Flags = tuple[str, ...]


def heads_case(
    domain: Domain, wish: Wish, row: Sizes, flags: Flags, fills: Sequence[str], seed: int,
    matrices: Sequence[str] = MATRICES,
) -> Case | None:  # fmt: skip
    """One case of multi_head_attention, or None where it cannot meet the wish."""
    batch, groups, repeats, queries, keys, _, _, model = row
    rng, heads = np.random.default_rng(seed), groups * repeats
    queries, keys = lengths_for(queries, keys, flags, wish, domain)
    if "alone" in flags or domain.capabilities.causal_alignment == "square" and "causal" in flags:
        queries = keys = max(queries, keys)
    x = fill(fills[0], seed, (batch, queries, model), domain.dtype)
    memory = x if "alone" in flags else fill(fills[1], seed + 1, (batch, keys, model), domain.dtype)
    arrays = {"x": x, "memory": memory, **weights(domain, row, flags, matrices, seed)}
    arrays = tamed_weights(arrays, heads, domain.dtype)
    if "mask" in flags:
        arrays["mask"] = make_mask(MASKS[seed % len(MASKS)], rng, (batch, heads, queries, keys))
    origin = f"{'/'.join(dict.fromkeys(fills[:2]))} seed {seed}"
    case = Case(domain.operation, arrays, {"heads": heads, "causal": "causal" in flags}, domain.dtype, origin=origin)
    shown = settled(seen_as_attention(case), wish, domain, rng)
    return None if shown is None else case.with_arrays(mask=shown["mask"])


def seen_as_attention(case: Case) -> Case:
    """A case of attention without content in which every head and query sees what it sees here."""
    batch, queries, keys, heads = (case.size(axis) for axis in ("B", "Tq", "Tk", "H"))
    q, k = np.zeros((batch, heads, queries, 1)), np.zeros((batch, heads, keys, 1))
    return Case("attention", {"q": q, "k": k, "v": k, "mask": case["mask"]}, {"causal": case["causal"]}, case.dtype)


def seen_rows(case: Case, capabilities: Capabilities) -> np.ndarray:
    """Which rows of memory each head sees at each query of multi_head_attention, bool[B,H,Tq,Tk]."""
    return allowed_keys(seen_as_attention(case), capabilities)


def weights(domain: Domain, row: Sizes, flags: Flags, families: Sequence[str], seed: int) -> dict[str, np.ndarray]:
    """Matrices that keep the size of what they multiply, and small biases; "bare": none, or none after wo."""
    dtype = domain.dtype
    _, groups, repeats, _, _, width, value_width, model = row
    heads = groups * repeats
    shapes = {
        "wq": (model, heads * width), "wk": (model, groups * width), "wv": (model, groups * value_width),
        "wo": (heads * value_width, model),
    }  # fmt: skip
    found, rng = {}, np.random.default_rng([seed, 2])
    for i, (name, shape) in enumerate(shapes.items()):
        size = 2.0 ** -round(np.log2(shape[0]) / 2)
        found[f"params.{name}"] = fill(families[(seed + i) % len(families)], seed + 10 + i, shape, dtype) * size
        if domain.capabilities.biases and ("bare" not in flags or seed % 2 and name != "wo"):
            found[f"params.b{name[1]}"] = rng.integers(-2, 3, shape[1]) / 2
    return found


def tamed_weights(arrays: dict[str, np.ndarray], heads: int, dtype: str) -> dict[str, np.ndarray]:
    """The same arrays with weights so small that projections, scores, results and gradients keep inside the dtype.

    Factors are powers of two. Scores are at most 1e4, 2e3 in bfloat16, and 256 in float16, which does not hold
    what a backward makes of larger ones.
    """
    arrays, width = dict(arrays), arrays["params.wq"].shape[1] // heads
    score, values, results = {
        "float16": (256.0, 256.0, 64.0),
        "bfloat16": (2e3, 2e3, 2e4),
    }.get(dtype, (1e4, 1e6, 1e7))

    def shrink(name: str, rows: np.ndarray, limit: float) -> float:
        bias = arrays.get(f"params.b{name}", np.zeros(1))
        top = float((np.abs(rows).max((0, 1)) @ np.abs(arrays[f"params.w{name}"]) + np.abs(bias)).max())
        factor = min(1.0, 2.0 ** -np.ceil(np.log2(top / limit))) if top > 0 else 1.0
        for part in (f"params.w{name}", f"params.b{name}"):
            if part in arrays:
                arrays[part] = arrays[part] * factor
        return top * factor

    for name, rows in (("q", arrays["x"]), ("k", arrays["memory"])):
        shrink(name, rows, (score / width) ** 0.5)
    top = shrink("v", arrays["memory"], values)
    shrink("o", np.full((1, 1, arrays["params.wo"].shape[0]), top), results)
    return arrays


def packed_case(domain: Domain, row: Any, flags: Flags, fills: Sequence[str], seed: int, empty: bool) -> Case | None:
    """One case of varlen_attention; without `empty` every row sees something."""
    lengths, (groups, repeats, width, value_width) = row
    rng, alignment = np.random.default_rng(seed), domain.capabilities.causal_alignment
    pairs = [list(pair) for pair in lengths]
    if "causal" in flags and alignment == "square":
        pairs = [[max(pair)] * 2 for pair in pairs]
    longer = domain.longer("causal" in flags)
    if not longer or not empty and alignment == "bottom_right" and {"causal", "window"} & set(flags):
        pairs = [sorted(pair) for pair in pairs]
    if "vacant" in flags:
        vacancies = [[0, 0], [0, 2], [2, 0]] if longer else [[0, 0], [0, 2]]
        pairs.insert(seed // 3 % (len(pairs) + 1), vacancies[seed % len(vacancies)])
    q_offsets, k_offsets = (np.concatenate([[0], np.cumsum(side)]) for side in zip(*pairs, strict=True))
    q = fill(fills[0], seed, (q_offsets[-1], groups * repeats, width), domain.dtype)
    k = fill(fills[1], seed + 1, (k_offsets[-1], groups, width), domain.dtype)
    q, k = tamed(q, k, domain.dtype)
    v = fill(fills[2], seed + 2, (k_offsets[-1], groups, value_width), domain.dtype)
    keywords = {"causal": "causal" in flags, **scale_and_window(flags, rng, max(max(pair) for pair in pairs))}
    arrays = {"q": q, "k": k, "v": v, "q_offsets": q_offsets, "k_offsets": k_offsets}
    case = Case(domain.operation, arrays, keywords, domain.dtype, origin=f"{'/'.join(fills)} seed {seed}")
    if empty or all(shown.any(-1).all() for shown in seen_in_sequences(case, domain)):
        return case
    return case.with_keywords(window=None)


def seen_in_sequences(case: Case, domain: Domain) -> list[np.ndarray]:
    """Which keys of its own sequence each row may see, bool[Tq,Tk] for every sequence."""
    found = []
    for queries, keys in zip(np.diff(case["q_offsets"]), np.diff(case["k_offsets"]), strict=True):
        q, k = np.zeros((1, 1, int(queries), 1)), np.zeros((1, 1, int(keys), 1))
        one = Case("attention", {"q": q, "k": k, "v": k}, {"causal": case["causal"], "window": case["window"]})
        found.append(allowed_keys(one, domain.capabilities)[0, 0])
    return found


def cached_case(
    domain: Domain, row: Sizes, flags: Flags, fills: Sequence[str], seed: int, room: int, filled: bool
) -> Case | None:
    """One case of cached_attention."""
    batch, groups, repeats, new, capacity, width, value_width = row
    rng, dtype = np.random.default_rng(seed), domain.dtype
    lengths = start_lengths(rng, batch, int(filled), capacity - new - room, seed)
    q = fill(fills[0], seed, (batch, groups * repeats, new, width), dtype)
    keys = fill(fills[1], seed + 1, (batch, groups, capacity + new, width), dtype)
    q, keys = tamed(q, keys, dtype)
    values = fill(fills[2], seed + 2, (batch, groups, capacity + new, value_width), dtype)
    stale = (np.arange(capacity) >= lengths[:, None])[:, None, :, None]
    k_cache = np.where(stale, loud_keys(rng, q, keys[:, :, new:].shape, dtype), keys[:, :, new:])
    v_cache = np.where(stale, magnitudes(rng, values[:, :, new:].shape, 1e4), values[:, :, new:])
    arrays = {
        "q": q, "k_new": keys[:, :, :new], "v_new": values[:, :, :new], "k_cache": k_cache, "v_cache": v_cache,
        "lengths": lengths,
    }  # fmt: skip
    keywords = {"causal": "all" not in flags, **scale_and_window(flags, rng, new + 1)}
    case = Case(domain.operation, arrays, keywords, dtype, origin=f"{'/'.join(fills)} seed {seed}")
    return paged(case, int(rng.integers(1, 4)), rng) if "paged" in flags else case


def start_lengths(rng: np.random.Generator, batch: int, low: int, high: int, seed: int) -> np.ndarray:
    """Valid rows before the call, from low to high; the first batch row is at one end, the second at the other."""
    lengths = rng.integers(low, high + 1, batch)
    ends = (low, high) if seed % 2 else (high, low)
    lengths[: min(batch, 2)] = ends[: min(batch, 2)]
    return lengths


def loud_keys(rng: np.random.Generator, q: np.ndarray, shape: Sizes, dtype: str) -> np.ndarray:
    """Keys up to 1e4, as far as their products with the queries stay inside the dtype."""
    limit = 2e3 if dtype == "float16" else 1e8
    return magnitudes(rng, shape, min(1e4, limit / max(1.0, float(np.abs(q).max(initial=0)) * q.shape[-1])))


def paged(case: Case, size: int, rng: np.random.Generator) -> Case:
    """The case with its caches cut into blocks of that many rows, shuffled, with two blocks that nobody uses."""
    batch, count = case.size("B"), -(-case["k_cache"].shape[2] // size)
    table = rng.permutation(batch * count + 2)[: batch * count].reshape(batch, count)
    arrays: dict[str, np.ndarray] = {"block_table": table}
    for name in ("k_cache", "v_cache"):
        rows = case[name]
        short = count * size - rows.shape[2]
        rows = np.concatenate([rows, magnitudes(rng, (*rows.shape[:2], short, rows.shape[3]), 1e2)], 2)
        blocks = magnitudes(rng, (batch * count + 2, rows.shape[1], size, rows.shape[3]), 1e2)
        cut = rows.reshape(*rows.shape[:2], count, size, -1)
        blocks[table] = cut.swapaxes(1, 2)
        arrays[name] = blocks
    return case.with_arrays(**arrays)


def scale_and_window(flags: Flags, rng: np.random.Generator, length: int) -> dict[str, Any]:
    """Values of the two keywords where they are on."""
    found: dict[str, Any] = {}
    if "scale" in flags:
        found["scale"] = float(rng.choice([1.0, 0.5, 0.25, 2.0, 0.1]))
    if "window" in flags:
        sides, pick = [None, 0, 1, max(length - 2, 1)], int(rng.integers(1, 16))
        found["window"] = (sides[pick % 4], sides[pick // 4])
    return found
