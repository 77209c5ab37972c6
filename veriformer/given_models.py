"""Small models and steps of ours that a function under test is given, in its own framework.

They compute with halves and whole numbers, so that their logits are exact in every dtype.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from array_api_compat import array_namespace


class TableModel:
    """A decoder_lm whose logits depend on all tokens so far, the latest ones most.

        s_n = s_(n-1) / 2 + table[x_n],   logits_n = s_n

    table[V,V]. The cache is s[B,V], and a number of rows that must not change but by `reorder`.
    Raises ValueError for tokens outside the vocabulary, and a cache of another number of rows.
    """

    def __init__(self, table: Any) -> None:
        self.table, self.vocabulary = table, table.shape[0]

    def full(self, tokens: Any) -> Any:
        """logits[B,T,V] of tokens[B,T]."""
        return self.step(tokens, None)[0]

    def step(self, tokens: Any, cache: Any, *, mask: Any = None, positions: Any = None) -> tuple[Any, Any]:
        """logits[B,m,V] and the cache after tokens[B,m]; a token whose mask is False changes nothing."""
        xp, (batch, new) = array_namespace(self.table), tokens.shape
        if cache is not None and cache.shape[0] != batch:
            raise ValueError(f"step: got {batch} rows, wanted {cache.shape[0]}, as in the cache")
        if bool(xp.any((tokens < 0) | (tokens >= self.vocabulary))):
            raise ValueError(f"step: tokens: got one outside the vocabulary of {self.vocabulary}")
        start = xp.zeros((batch, self.vocabulary), dtype=self.table.dtype, device=self.table.device)
        state = start if cache is None else cache
        logits = []
        for i in range(new):
            after = state / 2 + self._rows(tokens[:, i])
            state = after if mask is None else xp.where(mask[:, mask.shape[1] - new + i, None], after, state)
            logits.append(state)
        return xp.stack(logits, axis=1) if logits else self.table[None, :0, :], state

    def crop(self, cache: Any, length: int) -> Any:
        """Nothing is kept from which an earlier state could be told. Raises NotImplementedError."""
        raise NotImplementedError("this model keeps no earlier states")

    def reorder(self, cache: Any, rows: Any) -> Any:
        """The cache with batch row i taken from row rows[i]."""
        return array_namespace(cache).take(cache, rows, axis=0)

    def _rows(self, tokens: Any) -> Any:
        return array_namespace(self.table).take(self.table, tokens, axis=0)


class GivenStep:
    """A step of an ACT loop whose states depend on those before, the latest ones most.

        s_n = s_(n-1) / 2 + drive_n,   h_n = halting_n

    drive[…,M,d], halting[…,M]; called as step(state[…,d], n), n = 1 … M -> (state, halting[…]).
    Raises LookupError for any other n: a loop must not ask for it.
    """

    def __init__(self, drive: Any, halting: Any) -> None:
        self.drive, self.halting = drive, halting

    def __call__(self, state: Any, n: int) -> tuple[Any, Any]:
        """The state after step n, and how much of the position it halts."""
        if not 1 <= n <= self.halting.shape[-1]:
            raise LookupError(f"step: n: got {n}, wanted 1 to {self.halting.shape[-1]}")
        return state / 2 + self.drive[..., n - 1, :], self.halting[..., n - 1]


KINDS: dict[str, type[Any]] = {"model": TableModel, "step": GivenStep}
"""What of ours a function may be given, by the name it has in the table."""


def given(kind: str, arrays: Sequence[Any]) -> Any:
    """The model or step made of these arrays, in the order of the table."""
    return KINDS[kind](*arrays)


def replaced(value: Any, others: Mapping[int, Any]) -> Any:
    """What a function is given, each array that others has by its id() in place of that array."""
    if id(value) in others:
        return others[id(value)]
    if isinstance(value, dict):
        return {key: replaced(one, others) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(replaced(one, others) for one in value)
    if type(value) in KINDS.values():
        made = copy.copy(value)
        vars(made).update(replaced(vars(value), others))
        return made
    return value
