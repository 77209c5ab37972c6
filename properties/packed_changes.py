"""What the laws of packed sequences do to a case: pick sequences, cut them, change all others, weigh one key."""

from __future__ import annotations

import numpy as np

from veriformer.case import Case
from veriformer.declarations import Capabilities
from veriformer.properties.attention_changes import magnitudes
from veriformer.properties.attention_family_build import loud_keys
from veriformer.properties.measured import expect_equal, measure
from veriformer.subject import Subject


def sequences(case: Case) -> int:
    """How many sequences are packed. Raises ValueError where the offsets do not end with the rows."""
    if case["q_offsets"][-1] != len(case["q"]) or case["k_offsets"][-1] != len(case["k"]):
        raise ValueError("offsets: wanted them to end with the last row of q and of k")
    return len(case["q_offsets"]) - 1


def rows_of(case: Case, b: int) -> np.ndarray:
    """The rows of q that belong to sequence b."""
    return np.arange(*case["q_offsets"][b : b + 2])


def keys_of(case: Case, b: int) -> np.ndarray:
    """The rows of k and v that belong to sequence b."""
    return np.arange(*case["k_offsets"][b : b + 2])


def some_sequence(case: Case, pick: int) -> int | None:
    """One of the sequences that have queries and keys."""
    full = [b for b in range(sequences(case)) if len(rows_of(case, b)) and len(keys_of(case, b))]
    return int(case.random(pick).choice(full)) if full else None


def only(case: Case, chosen: list[int]) -> Case:
    """The case with these sequences alone, in this order."""
    return gathered(case, [rows_of(case, b) for b in chosen], [keys_of(case, b) for b in chosen])


def gathered(case: Case, rows: list[np.ndarray], keys: list[np.ndarray]) -> Case:
    """Sequences made of these rows of q and of k and v."""
    at, of = np.concatenate(rows).astype(int), np.concatenate(keys).astype(int)
    offsets = [np.cumsum([0, *map(len, side)]) for side in (rows, keys)]
    return case.with_arrays(
        q=case["q"][at], k=case["k"][of], v=case["v"][of], q_offsets=offsets[0], k_offsets=offsets[1]
    )


def with_vacancy(case: Case, b: int, queries: int, keys: int) -> tuple[Case, np.ndarray]:
    """The case with one more sequence before sequence b, of so many queries or keys, and which rows are its own."""
    (at, offsets), (of, key_offsets) = ((case[name][b], case[name]) for name in ("q_offsets", "k_offsets"))
    wider = case.with_arrays(
        q=np.insert(case["q"], [at] * queries, 1.0, 0),
        k=np.insert(case["k"], [of] * keys, 1.0, 0),
        v=np.insert(case["v"], [of] * keys, 1.0, 0),
        q_offsets=np.concatenate([offsets[: b + 1], offsets[b:] + queries]),
        k_offsets=np.concatenate([key_offsets[: b + 1], key_offsets[b:] + keys]),
    )
    extra = np.zeros(len(wider["q"]), bool)
    extra[at : at + queries] = True
    return wider, extra


def spoiled(case: Case, keys: np.ndarray, pick: int) -> Case:
    """The case with other finite keys and values, up to 1e4, where keys[Nk] is True."""
    rng = case.random(pick)
    return case.with_arrays(
        k=np.where(keys[:, None, None], loud_keys(rng, case["q"], case["k"].shape, case.dtype), case["k"]),
        v=np.where(keys[:, None, None], magnitudes(rng, case["v"].shape, 1e4), case["v"]),
    )


def others_spoiled(case: Case, b: int, pick: int) -> Case:
    """The case with other queries, keys and values in every sequence but b."""
    rows, keys = (~np.isin(np.arange(len(case[name])), of(case, b)) for name, of in (("q", rows_of), ("k", keys_of)))
    changed = spoiled(case, keys, pick)
    return changed.with_arrays(q=np.where(rows[:, None, None], case["q"][::-1] + 1, case["q"]))


def expect_counted(varlen: Subject, case: Case, pick: int) -> None:
    """A key of value 1 among zeros shows its weight: 1/n in rows that see it beside n - 1 others, else 0."""
    b = some_sequence(case, pick)
    if b is None:
        return
    rows, keys = rows_of(case, b), keys_of(case, b)
    j = [0, len(keys) - 1, len(keys) // 2][pick % 3]
    value = np.zeros_like(case["v"])
    value[keys[j]] = 1.0
    got = measure(varlen, case.with_arrays(q=np.zeros_like(case["q"]), v=value))
    wanted = np.zeros(len(case["q"]))
    for i, row in enumerate(rows):
        low, high = span(case, first_position(case, b, varlen.capabilities) + i, len(keys))
        wanted[row] = 1 / (high - low + 1) if low <= j <= high else 0.0
    expect_equal(
        got, np.broadcast_to(wanted[:, None, None], got.value.shape), what=f"the weight of key {j} of sequence {b}"
    )


def first_position(case: Case, b: int, capabilities: Capabilities) -> int:
    """Where the first query of sequence b stands among its keys."""
    return 0 if capabilities.causal_alignment == "top_left" else len(keys_of(case, b)) - len(rows_of(case, b))


def span(case: Case, position: int, keys: int) -> tuple[int, int]:
    """The first and the last of so many keys that a query at that position of its sequence may see."""
    left, right = case["window"] or (None, None)
    right = 0 if case["causal"] else right
    low = 0 if left is None else max(position - left, 0)
    return low, keys - 1 if right is None else min(position + right, keys - 1)
