"""Memory that holds an earlier result: filled before each call, so that one which returns it unwritten is wrong.

NumPy keeps freed blocks below 1024 bytes for the next array of the same size, and the C library up to 1032; larger
ones, and all of torch, are filled by `processes.fill_memory`.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

KEPT = 8
"""One more than the blocks of a size that are kept."""
LARGEST = 1032
_FILLED = np.full(LARGEST, 0xFE, np.uint8)
_COPIED: dict[int, list[np.ndarray]] = {}


def spoil(sizes: Iterable[int]) -> None:
    """Fill what is kept of blocks of these sizes in bytes with 0xFE: huge numbers, or NaN in float16."""
    for size in {size for size in sizes if 0 < size <= LARGEST}:
        if size not in _COPIED:
            _COPIED[size] = [_FILLED[:size]] * KEPT
        list(map(np.ndarray.copy, _COPIED[size]))
