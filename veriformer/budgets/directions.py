"""In which direction each version of a computation errs."""

from __future__ import annotations

from functools import cache

import torch

Rows = torch.Tensor

_WORDS = 1024
_SHORTEST = 1 << 14
_SEED = 20240607


class Directions:
    """Errors in units of what they may be: 1 or 1/2, of either sign, for a number of runs.

    In half of the runs they are a function of the value, in the other half of the place. Real rounding
    repeats itself on equal values (constant and blocky arrays), and does not where equal values came
    from different terms; either alone would miss the other.
    """

    def __init__(self, runs: int) -> None:
        self.keyed, self.free = runs - runs // 2, runs // 2
        self._random = torch.Generator().manual_seed(_SEED)
        self._table = torch.cat([torch.zeros(1, _WORDS, dtype=torch.float64), self._draw(self.keyed, _WORDS)])
        self._reel = self._draw(self.free, _SHORTEST)

    def _draw(self, runs: int, count: int) -> Rows:
        """Columns with as many of one sign as of the other, so that every error is tried both ways.

        Two sizes, because two errors of one size would cancel in all runs wherever their columns are
        opposite. Not a continuum: the full size is what discontinuities (relu) must be tried with.
        """
        ranks = torch.rand(runs, count, generator=self._random).argsort(0)
        tie = torch.rand(count, generator=self._random) < 0.5
        signs = torch.where(2 * ranks + tie < runs, 1.0, -1.0)
        sizes = torch.where(torch.rand(runs, count, generator=self._random) < 0.5, 1.0, 0.5)
        return (signs * sizes).to(torch.float64)

    def shifts(self, value: Rows, amplitude: Rows, salt: int) -> Rows:
        """Errors of a value[…] that may be off by amplitude[…]: [1 + runs, …], none for the first version.

        salt: the number of the operation; it makes errors of different operations independent.
        """
        n, salt = value.numel(), (salt * 0x9E3779B1) & 0xFFFFFFFF
        found = torch.empty(1 + self.keyed + self.free, n, dtype=torch.float64)
        if n:
            torch.index_select(self._table, 1, _words(value, salt), out=found[: 1 + self.keyed])
            found[1 + self.keyed :] = self._places(n, salt)
            found *= amplitude.reshape(-1)
        return found.view(1 + self.keyed + self.free, *value.shape)

    def _places(self, n: int, salt: int) -> Rows:
        """n columns that begin somewhere; where does not depend on what was asked for before."""
        enough = max(_SHORTEST, 1 << (2 * n).bit_length())
        while self._reel.shape[1] < enough:
            self._reel = torch.cat([self._reel, self._draw(self.free, self._reel.shape[1])], 1)
        start = salt % (enough - n)
        return self._reel[:, start : start + n]


def _words(value: Rows, salt: int) -> Rows:
    """A column number for each value, from 24 bits of its mantissa: x, -x and 2x round alike.

    So do sums that are equal but for the rounding of the reference itself.
    """
    bits = value.reshape(-1).contiguous().view(torch.int64)
    bits = bits.add(1 << 27).bitwise_right_shift_(28).bitwise_and_(0xFFFFFF).bitwise_xor_(salt & 0xFFFFFF)
    return bits.mul_(2654435761).bitwise_right_shift_(20).bitwise_and_(_WORDS - 1)


@cache
def directions(runs: int) -> Directions:
    """The directions for this many runs, drawn once."""
    return Directions(runs)
