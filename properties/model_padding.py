"""Batches of prompts of different lengths, padded in front or behind, and the tokens that follow them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from veriformer.case import Case
from veriformer.moves import Move, step


@dataclass(frozen=True, eq=False)
class Padded:
    """tokens, mask, positions[B,T]: a padded batch. prompt: how many of the T come first and together.

    rows: the real tokens of each row. places: where they lie in the batch.
    """

    tokens: np.ndarray
    mask: np.ndarray
    positions: np.ndarray
    prompt: int

    @property
    def places(self) -> list[np.ndarray]:
        """Where the real tokens of each row lie."""
        return [np.flatnonzero(row) for row in self.mask]

    @property
    def rows(self) -> list[np.ndarray]:
        """The real tokens of each row."""
        return [row[places] for row, places in zip(self.tokens, self.places, strict=True)]

    def with_filler(self, filler: np.ndarray) -> Padded:
        """Other tokens[B,T] in the masked places."""
        return replace(self, tokens=np.where(self.mask, self.tokens, filler))

    def moves(self, chunked: bool, first: int = 0) -> list[Move]:
        """The prompt in one step (chunked: in two), then one token at a time."""
        length = self.tokens.shape[1]
        cuts = [0, *((1,) if chunked and self.prompt > 2 else ()), *range(self.prompt, length + 1)]
        moves = []
        for number, (start, end) in enumerate(zip(cuts, cuts[1:], strict=False)):
            some = {"mask": self.mask[:, :end], "positions": self.positions[:, start:end]}
            cache = first + number - 1 if number else None
            moves.append(step(self.tokens[:, start:end], cache, first + number, **some))
        return moves


def padded_left(case: Case, pick: int, decoded: int) -> Padded:
    """The case's tokens with padding in front of each row; `decoded` real tokens come after the prompt."""
    tokens, (batch, length) = case["tokens"], case["tokens"].shape
    prompt = length - decoded
    pads = case.random(pick).integers(0, prompt, batch)
    pads[0] = prompt - 1  # some row is padded, if only one
    count = np.arange(length) - pads[:, None]
    return Padded(tokens, count >= 0, np.maximum(count, 0), prompt)


def padded_right(case: Case, pick: int, decoded: int) -> Padded:
    """The case's tokens with padding at the end of each row's prompt, before the `decoded` ones."""
    tokens, (batch, length) = case["tokens"], case["tokens"].shape
    prompt = length - decoded
    real = case.random(pick).integers(1, prompt + 1, batch)
    real[0] = max(1, prompt - 1)
    place = np.arange(length)
    mask = (place < real[:, None]) | (place >= prompt)
    return Padded(tokens, mask, np.maximum(np.cumsum(mask, axis=1) - 1, 0), prompt)
