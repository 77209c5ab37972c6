"""Recipes for generation: tables whose two largest logits never tie on the way, ends and padding of every kind."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from veriformer.case import Case
from veriformer.law import Domain, Recipe

TABLE = "model.table"
"""The array that makes the model which generation is given."""
SIZES = (
    # B, T, V, new tokens
    (1, 1, 2, 1), (2, 2, 3, 3), (1, 2, 3, 2), (2, 1, 4, 4), (1, 3, 4, 0), (3, 2, 3, 5), (2, 3, 5, 3), (1, 4, 2, 6),
    (3, 1, 6, 6), (2, 4, 5, 6), (3, 4, 6, 4),
)  # fmt: skip
"""Sizes of prompts, vocabularies and what is to come, small to large."""
ENDS = ("later", "none", "first", "prompt", "never")
"""Kinds of the token that ends a row: chosen by some rows sooner than by others, not given, row 0's first choice,
one of the prompt's, never chosen."""
PADS = ("zero", "chosen", "end", "last")
"""Kinds of padding: the default, a token that is chosen too, the end itself, the last of the vocabulary."""
GAP = 0.125
"""By how much the largest logit exceeds the second at least."""
ROOM = 100
"""So many tables are tried until one has that gap."""

Sizes = tuple[int, int, int, int]


def generate_cases(
    *,
    ends: Sequence[str] = ENDS,
    rows: int = 1,
    least: int = 0,
    layouts: Sequence[str] = ("contiguous",),
    examples: int = 10,
) -> Recipe:
    """Cases of generate: a prompt, the table of the model, max_length, and perhaps end and pad.

    ends: kinds among ENDS, of which "none" alone is left where end cannot be given. rows, least: the smallest
    batch and number of new tokens.
    """
    table = [row for row in SIZES if row[0] >= rows and row[3] >= least]

    def build(domain: Domain, row: Sizes, end: str, pad: str, seed: int) -> Case:
        admitted = domain.admitted(layouts)
        return generate_case(domain, row, end, pad, seed).with_layout(admitted[seed % len(admitted)])

    def kinds(domain: Domain) -> Sequence[str]:
        return ends if domain.provides("end") else ("none",)

    def pinned(domain: Domain) -> list[Case]:
        known = kinds(domain)
        return [
            build(domain, table[i % len(table)], known[i % len(known)], PADS[i % 3 if i % 5 else 3], i)
            for i in range(examples)
        ]

    def strategy(domain: Domain) -> st.SearchStrategy[Case]:
        pick = st.sampled_from(list(itertools.product(table, kinds(domain), PADS)))
        return st.tuples(pick, st.integers(0, 2**20)).map(lambda both: build(domain, *both[0], both[1]))

    return Recipe(pinned, strategy)


def plain_generate(domain: Domain) -> list[Case]:
    """One row without an end, and several that end at different places."""
    later = "later" if domain.provides("end") else "none"
    return [
        generate_case(domain, (1, 2, 4, 3), "none", "zero", 0),
        generate_case(domain, (3, 2, 5, 4), later, "zero", 1),
    ]


def generate_case(domain: Domain, row: Sizes, end: str, pad: str, seed: int) -> Case:
    """One case of these sizes; where there is no end or padding of the kind, there is none or the default."""
    batch, length, size, new = row
    table, ids = clear_path(row, seed)
    chosen = ids[:, length:]
    token = end_of_kind(end, ids[:, :length], chosen, size)
    keywords: dict[str, int | None] = {"max_length": length + new}
    keywords |= {"end": token} if domain.provides("end") else {}
    keywords |= {"pad": pad_of_kind(pad, token, chosen, size)} if domain.provides("pad") else {}
    arrays = {"prompt": ids[:, :length], TABLE: table}
    return Case("generate", arrays, keywords, domain.dtype, origin=f"end {end}, pad {pad}, seed {seed}")


def clear_path(row: Sizes, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A table of halves and the ids that its greedy choices give, none of them close.

    Rows get different tokens, and one of them several, unless half of the tries have not shown any such.
    """
    batch, length, size, new = row
    for attempt in range(ROOM):
        rng = np.random.default_rng([seed, attempt, 11])
        # a token is followed by itself less often than by others
        table = (rng.integers(-8, 9, (size, size)) - rng.integers(0, 9) * np.eye(size, dtype=int)) / 2
        ids, gap = continued(table, rng.integers(0, size, (batch, length)), new)
        chosen = ids[:, length:]
        varied = batch == 1 or len(np.unique(chosen, axis=0)) > 1
        varied = varied and (new == 1 or bool((chosen != chosen[:, :1]).any()))
        if gap >= GAP and (varied or not new or attempt > ROOM // 2):
            break
    return table, ids


def continued(table: np.ndarray, ids: np.ndarray, new: int) -> tuple[np.ndarray, float]:
    """ids[B,T] with so many greedy choices after them, and the smallest gap between the two largest logits."""
    gap = np.inf
    for _ in range(new):
        logits = logits_of(table, ids)[:, -1]
        second, first = np.sort(logits, axis=-1)[:, -2:].T
        gap = min(gap, float((first - second).min()))
        ids = np.concatenate([ids, logits.argmax(-1)[:, None]], axis=1)
    return ids, gap


def logits_of(table: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """What the model of a table gives after each token: half of what it gave before, plus the token's row; [B,T,V]."""
    state, found = np.zeros((len(tokens), len(table))), []
    for column in tokens.T:
        state = state / 2 + table[column]
        found.append(state)
    return np.stack(found, axis=1) if found else np.zeros((len(tokens), 0, len(table)))


def end_of_kind(kind: str, prompt: np.ndarray, chosen: np.ndarray, size: int) -> int | None:
    """The token that ends a row; None where no token is of the kind."""
    if kind == "none":
        return None
    if kind == "prompt":
        return int(prompt[0, -1])
    if kind == "never":
        missing = np.setdiff1d(np.arange(size), chosen)
        return int(missing[-1]) if missing.size else None
    if not chosen.size:
        return int(prompt[0, 0])
    if kind == "first":
        return int(chosen[0, 0])
    return max(np.unique(chosen).tolist(), key=lambda token: variety(chosen, token))


def variety(chosen: np.ndarray, token: int) -> tuple[int, int]:
    """How many places there are at which rows would end, and how late the last of them is; never counts as one."""
    width = chosen.shape[1]
    places = [int(np.argmax(row == token)) if token in row else width for row in chosen]
    return len(set(places)), max((place for place in places if place < width - 1), default=-1)


def pad_of_kind(kind: str, end: int | None, chosen: np.ndarray, size: int) -> int:
    """The padding; a token that some row chooses, if there is one beside the end."""
    if kind == "chosen":
        others = chosen[chosen != end]
        return int(others[0]) if others.size else 0
    if kind == "end" and end is not None:
        return end
    return size - 1 if kind == "last" else 0
