"""Budgets that were calculated before: implementations are judged on the same cases, and budgets cost the most."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from veriformer.budgets import Bound, Precision
from veriformer.case import Case

NUMBERS = 1 << 23
"""How many numbers are kept at most: a few tens of megabytes."""


class Memory:
    """Results by a key, the least recently used ones dropped first."""

    def __init__(self, numbers: int = NUMBERS) -> None:
        self.limit, self.held = numbers, 0
        self.kept: OrderedDict[bytes, tuple[Any, int]] = OrderedDict()

    def get(self, key: bytes, make: Callable[[], Any]) -> Any:
        """What was made for this key, now or before."""
        if key in self.kept:
            self.kept.move_to_end(key)
            return self.kept[key][0]
        made = make()
        size = numbers_in(made)
        self.kept[key] = made, size
        self.held += size
        while self.held > self.limit and len(self.kept) > 1:
            self.held -= self.kept.popitem(last=False)[1][1]
        return made


def key_of(case: Case, *rest: Any) -> bytes:
    """What tells one calculation from another: the case's content, and arrays or plain values beside it."""
    digest = hashlib.blake2b(digest_size=16)
    words = tuple(sorted(case.keywords.items()))
    for value in (case.operation, words, *(part for pair in case.arrays.items() for part in pair), *rest):
        for part in flat(value):
            is_array = isinstance(part, np.ndarray)
            digest.update(repr((part.shape, part.dtype.str) if is_array else part).encode())
            digest.update(np.ascontiguousarray(part).tobytes() if is_array else b"")
    return digest.digest()


def flat(value: Any) -> Iterable[Any]:
    """The arrays in a tuple one by one, what a precision comes to; anything else as it is."""
    if isinstance(value, Precision):
        return value.effective
    return value if isinstance(value, tuple) and any(isinstance(one, np.ndarray) for one in value) else (value,)


def numbers_in(made: Any) -> int:
    """How many numbers bounds hold, in tuples and mappings of them; nobody may write into these from now on."""
    if isinstance(made, Bound):
        for array in (made.value, made.allowed):
            if isinstance(array, np.ndarray):
                array.flags.writeable = False
        return (2 + len(made.terms)) * made.value.size
    parts = made.values() if isinstance(made, Mapping) else made
    return sum(map(numbers_in, parts))
