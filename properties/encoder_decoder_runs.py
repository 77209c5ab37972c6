"""What laws of encoder-decoders have in common: the moves of a session, and other tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from veriformer.case import Case
from veriformer.moves import Move, steps
from veriformer.subject import Subject


def whole(case: Case) -> Move:
    """full(source, target, mask)."""
    return Move("full", {name: case[name] for name in ("source", "target", "mask") if name in case.arrays})


def encode(case: Case, into: int) -> Move:
    """encode(source, mask), its memory kept as `into`."""
    return Move("encode", {name: case[name] for name in ("source", "mask") if name in case.arrays}, into=into)


def session(case: Case, lengths: Sequence[int], first: int = 0) -> list[Move]:
    """A memory kept as number first, and steps over the target in chunks of these lengths, their caches behind it."""
    return [encode(case, first), *steps(case["target"], lengths, first + 1, memory=first)]


def after(lengths: Sequence[int], first: int = 0) -> int:
    """The first number that such a session leaves free."""
    return first + 1 + len(lengths)


def other_source(model: Subject, case: Case) -> np.ndarray:
    """Another source token in every place."""
    table = case["params.source_embedding"]
    own = model.facts.source_vocabulary if model.facts is not None else None
    size = len(table) if table is not None else own or model.vocabulary(case)
    return np.asarray((case["source"] + 1) % size)


def with_other_source(model: Subject, case: Case) -> Case:
    """The case with another source token in every place, and with every token real."""
    mask = None if case["mask"] is None else np.ones_like(case["mask"])
    return case.with_arrays(source=other_source(model, case), mask=mask)


def other_target(model: Subject, case: Case) -> np.ndarray:
    """Another target token in every place."""
    return np.asarray((case["target"] + 1) % model.vocabulary(case))


def real_places(case: Case) -> list[np.ndarray]:
    """Where each row of the source has its real tokens."""
    mask = np.ones(case["source"].shape, bool) if case["mask"] is None else case["mask"]
    return [np.flatnonzero(row) for row in mask]


def alone(case: Case, row: int) -> Case:
    """One row of the batch, without its padding; its real tokens stand in front."""
    arrays = {name: case[name][row : row + 1] for name in ("source", "target")}
    source = arrays["source"][:, : len(real_places(case)[row])]
    return case.with_arrays(source=source, target=arrays["target"], mask=None)
