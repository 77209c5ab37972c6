"""What a model is asked for in one request: calls of its methods, with caches and memories as numbers.

The objects stay beside the model. A program is plain data, so that it crosses to a worker whole, can be
made smaller, and can be written down as a script.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from veriformer.case import PRINTED, show_array

GIVES_LOGITS = ("full", "step")
"""Words that give logits; what the others give is kept under its number and nothing else is known of it."""


@dataclass(frozen=True, eq=False)
class Move:
    """One call of a method of a model.

    word: the method. arrays: its arrays by their parameters' names: tokens[B,m], source, target, mask,
    positions, rows. cache, memory: numbers of what earlier moves gave, or None. into: the number under
    which the cache or memory that this one gives is kept. length: that of crop.
    """

    word: str
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    cache: int | None = None
    memory: int | None = None
    into: int | None = None
    length: int | None = None


Program = tuple[Move, ...]


def full(tokens: np.ndarray) -> Move:
    """full(tokens[B,T]) of a decoder-only model."""
    return Move("full", {"tokens": tokens})


def step(
    tokens: np.ndarray, cache: int | None, into: int, *, memory: int | None = None, **arrays: np.ndarray | None
) -> Move:
    """step(tokens[B,m], [memory,] cache, mask=, positions=), its cache kept as `into`."""
    given = {name: array for name, array in arrays.items() if array is not None}
    return Move("step", {"tokens": tokens, **given}, cache, memory, into)


def steps(tokens: np.ndarray, lengths: Sequence[int], first: int = 0, memory: int | None = None) -> list[Move]:
    """Steps over tokens[B,T] in chunks of these lengths, from nothing; their caches are number first, first + 1, …"""
    moves, start = [], 0
    for i, length in enumerate(lengths):
        cache = first + i - 1 if i else None
        moves.append(step(tokens[:, start : start + length], cache, first + i, memory=memory))
        start += length
    return moves


def crop(cache: int, length: int, into: int) -> Move:
    """crop(cache, length)."""
    return Move("crop", {}, cache, None, into, length)


def reorder(cache: int, rows: np.ndarray, into: int) -> Move:
    """reorder(cache, rows[B'])."""
    return Move("reorder", {"rows": rows}, cache, None, into)


def said(program: Sequence[Move]) -> str:
    """A program in one line, such as 'full(4), step(3), crop(2)': the methods, and how many tokens they take.

    Where there are few numbers they stand there themselves: 'full([0,1]), step([0]), crop(1)'.
    """
    few = sum(array.size for move in program for array in move.arrays.values()) <= PRINTED
    return ", ".join(_said(move, few) for move in program)


def _said(move: Move, few: bool) -> str:
    if few or move.word == "reorder":
        given = [
            show_array(array) if name in _TOKENS else f"{name}={show_array(array)}"
            for name, array in move.arrays.items()
        ]
        return f"{move.word}({', '.join([*given, *([str(move.length)] if move.length is not None else [])])})"
    tokens = next((move.arrays[name] for name in ("target", "tokens", "source") if name in move.arrays), None)
    return f"{move.word}({move.length if tokens is None else tokens.shape[1]})"


_TOKENS = ("target", "tokens", "source", "rows")
"""Arrays that come first and need no name."""
