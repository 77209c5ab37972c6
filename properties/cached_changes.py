"""What the laws of a cache do to a case: find its rows, cut the new ones into chunks, change what must not matter."""

from __future__ import annotations

from typing import Any

import numpy as np

from veriformer.case import Case
from veriformer.properties.attention_changes import magnitudes
from veriformer.properties.attention_family_build import loud_keys
from veriformer.properties.measured import Measured, expect_equal, measure
from veriformer.properties.packed_changes import span
from veriformer.subject import Subject

CACHES = ("k_cache", "v_cache")
Place = tuple[int, int]
"""First axis of a cache, and the slot."""


def capacity(case: Case) -> int:
    """How many rows a sequence can have."""
    blocks = 1 if case["block_table"] is None else case["block_table"].shape[1]
    return int(blocks * case["k_cache"].shape[2])


def places(case: Case, b: int, rows: range) -> list[Place]:
    """Where these rows of batch row b lie."""
    size, table = case["k_cache"].shape[2], case["block_table"]
    return [(b, t) if table is None else (int(table[b, t // size]), t % size) for t in rows]


def old_rows(case: Case, b: int) -> range:
    """The rows of batch row b that are valid before the call."""
    return range(int(case["lengths"][b]))


def new_rows(case: Case, b: int) -> range:
    """The rows of batch row b that the call writes."""
    return range(int(case["lengths"][b]), int(case["lengths"][b]) + case["q"].shape[2])


def evicted_rows(case: Case, b: int) -> range:
    """The rows of batch row b that lie before the window of its first new query."""
    return range(max(int(case["lengths"][b]) - case["window"][0], 0))


def marked(case: Case, kind: Any) -> np.ndarray:
    """The slots [N,S] in which some batch row has such rows (`old_rows`, `new_rows` or `evicted_rows`)."""
    found = np.zeros((case["k_cache"].shape[0], case["k_cache"].shape[2]), bool)
    for b in range(case["q"].shape[0]):
        for place in places(case, b, kind(case, b)):
            found[place] = True
    return found


def spoiled(case: Case, slots: np.ndarray, pick: int) -> Case:
    """The case with other finite rows, up to 1e4, in the slots marked in slots[N,S]."""
    rng, where = case.random(pick), slots[:, None, :, None]
    return case.with_arrays(
        k_cache=np.where(where, loud_keys(rng, case["q"], case["k_cache"].shape, case.dtype), case["k_cache"]),
        v_cache=np.where(where, magnitudes(rng, case["v_cache"].shape, 1e4), case["v_cache"]),
    )


def parts_of(count: int, cut: str, rng: np.random.Generator) -> list[int]:
    """Sizes of the chunks into which `count` new rows are cut."""
    if cut == "singles":
        return [1] * count
    if cut == "prefill, then singles":
        return [max(count - 2, 1), *[1] * min(count - 1, 2)]
    if cut == "one, then the rest":
        return [1, count - 1] if count > 1 else [1]
    sizes: list[int] = []
    while count:
        sizes.append(int(rng.integers(1, count + 1)))
        count -= sizes[-1]
    return sizes


def in_chunks(cached: Subject, case: Case, sizes: list[int]) -> tuple[Measured, Case]:
    """The outputs of consecutive calls, each on the caches that the one before returned, and the case left over."""
    outs, start, rest = [], 0, case
    for size in sizes:
        chunk = slice(start, start + size)
        new = {name: case[name][:, :, chunk] for name in ("q", "k_new", "v_new")}
        results, bounds = cached.with_bounds(rest.with_arrays(**new))
        outs.append(Measured(results[0], bounds[0].allowed))
        start += size
        rest = rest.with_arrays(k_cache=results[1], v_cache=results[2], lengths=rest["lengths"] + size)
    joined = (np.concatenate([getattr(out, name) for out in outs], 2) for name in ("value", "allowed"))
    return Measured(*joined), rest


def batch_rows(case: Case, chosen: list[int]) -> Case:
    """The case with these batch rows; blocks stay where they are."""
    names = ["q", "k_new", "v_new", "lengths", *(CACHES if case["block_table"] is None else ["block_table"])]
    return case.with_arrays(**{name: case[name][chosen] for name in names})


def unpaged(case: Case) -> Case:
    """The same rows in caches without blocks."""
    everything = range(capacity(case))
    caches = {}
    for name in CACHES:
        rows = [
            [case[name][block, :, slot] for block, slot in places(case, b, everything)] for b in range(case.size("B"))
        ]
        caches[name] = np.array(rows).swapaxes(1, 2)
    return case.with_arrays(block_table=None, **caches)


def relocated(case: Case, order: np.ndarray) -> Case:
    """The case with block order[i] at place i, and the table to match."""
    moved = {name: case[name][order] for name in CACHES}
    return case.with_arrays(block_table=np.argsort(order)[case["block_table"]], **moved)


def expect_counted(cached: Subject, case: Case, pick: int) -> None:
    """A row of value 1 among zeros shows its weight: 1/n in rows that see it beside n - 1 others, else 0."""
    rng = case.random(pick)
    b = int(rng.integers(case.size("B")))
    total = new_rows(case, b).stop
    row = [total - 1, 0, int(case["lengths"][b]), int(rng.integers(total))][pick % 4]
    valid = marked(case, old_rows)[:, None, :, None]
    arrays = {"q": np.zeros_like(case["q"]), "v_new": np.zeros_like(case["v_new"])}
    arrays["v_cache"] = np.where(valid, 0.0, case["v_cache"])
    if row < case["lengths"][b]:
        block, slot = places(case, b, range(row, row + 1))[0]
        arrays["v_cache"][block, :, slot] = 1.0
    else:
        arrays["v_new"][b, :, row - int(case["lengths"][b])] = 1.0
    got = measure(cached, case.with_arrays(**arrays))
    wanted = np.zeros(got.value.shape)
    for i, position in enumerate(new_rows(case, b)):
        low, high = span(case, position, total)
        wanted[b, :, i] = 1 / (high - low + 1) if low <= row <= high else 0.0
    expect_equal(got, wanted, what=f"the weight of row {row} of sequence {b}")
