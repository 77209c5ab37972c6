"""Sequences of the three tasks, drawn at random: reversals, sums, and chains of pointers.

Everything is a dict of integer arrays[rows, …], drawn by a numpy.random.Generator that is given.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Batch = dict[str, Any]
Generator = np.random.Generator

LETTERS, LENGTH = 10, 10
START, END = LETTERS, LETTERS + 1
"""Tokens of reversals: ten letters, the start and the end of a target."""

DIGITS, PLUS, EQUALS = 3, 10, 11
QUESTION = 2 * DIGITS + 2
"""Tokens of sums are the digits, + and =; so many of them come before the answer."""
HELD_OUT = 0.1
"""The share of pairs that no training batch holds."""

CELLS, ANSWERS, HOPS = 8, 5, 3
"""Pointers: cells of a row, letters that one can end at, and the longest chain."""


def reversals(generator: Generator, rows: int) -> Batch:
    """Letters, and the target that a decoder is to write: the start, the letters from the last to the first, the end.

    -> source[rows, 10], target[rows, 12].
    """
    source = generator.integers(0, LETTERS, (rows, LENGTH))
    edge = np.ones((rows, 1), dtype=source.dtype)
    return {"source": source, "target": np.concatenate([START * edge, source[:, ::-1], END * edge], axis=1)}


def sums(generator: Generator, rows: int, *, unseen: bool = False) -> Batch:
    """Additions a + b = c of numbers below 1000, digits from the ones upward, so that a carry is known when needed.

    -> tokens[rows, 12]: three digits, +, three digits, =, four digits.

    Training has the pairs that are not `held_out`; unseen: only those that are.
    """
    top, found = 10**DIGITS, np.zeros((0, 2), dtype=np.int64)
    while len(found) < rows:
        pairs = generator.integers(0, top, (rows, 2))
        found = np.concatenate([found, pairs[held_out(pairs[:, 0], pairs[:, 1]) == unseen]])
    a, b = found[:rows].T
    sign = np.ones((rows, 1), dtype=np.int64)
    parts = [digits(a, DIGITS), PLUS * sign, digits(b, DIGITS), EQUALS * sign, digits(a + b, DIGITS + 1)]
    return {"tokens": np.concatenate(parts, axis=1)}


def held_out(a: Any, b: Any) -> Any:
    """Whether a pair is kept from training: by a hash, the same for (a, b) and (b, a), in every run."""
    pair = np.minimum(a, b) * 10**DIGITS + np.maximum(a, b)
    return (pair * 2654435761) % 2**32 < HELD_OUT * 2**32


def digits(number: Any, count: int) -> Any:
    """number[rows] -> its decimal digits[rows, count], the ones first."""
    return number[:, None] // 10 ** np.arange(count) % 10


def pointers(generator: Generator, rows: int) -> Batch:
    """Rows of cells, each a letter or the number of another cell; who follows the numbers ends at a letter.

    -> tokens[rows, 8]: 0 to 4 a letter, 5 + i the number of cell i; answers[rows, 8]: the letter that each
    cell's chain ends at; hops[rows, 8]: how long the chain is, 0 to 3.

    Two or three cells are letters. Of the others each draws how far from a letter its target is, then the
    target, so that long chains are not rare.
    """
    row, order = np.arange(rows), generator.permuted(np.tile(np.arange(CELLS), (rows, 1)), axis=1)
    letters = generator.integers(2, 4, rows)
    tokens, answers = np.zeros((2, rows, CELLS), dtype=np.int64)
    hops = np.full((rows, CELLS), -1)
    for k in range(CELLS):
        here, letter, is_letter = order[:, k], generator.integers(0, ANSWERS, rows), k < letters
        to = _target(generator, hops)
        tokens[row, here] = np.where(is_letter, letter, ANSWERS + to)
        answers[row, here] = np.where(is_letter, letter, answers[row, to])
        hops[row, here] = np.where(is_letter, 0, hops[row, to] + 1)
    return {"tokens": tokens, "answers": answers, "hops": hops}


def _target(generator: Generator, hops: Any) -> Any:
    """A cell for each row to point at, by hops[rows, 8] of the cells that are filled, -1 of the others."""
    wanted = np.minimum(generator.integers(0, HOPS, len(hops)), hops.max(axis=1))
    chance = np.where(hops == wanted[:, None], generator.random(hops.shape), -1.0)
    return chance.argmax(axis=1)


def shown(token: int) -> str:
    """A token of `pointers` for people: A to E, or an arrow and the number of the cell."""
    return "ABCDE"[token] if token < ANSWERS else f"→{token - ANSWERS}"
