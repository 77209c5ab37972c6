"""How far logits lie apart that are equal by law.

`python benchmarks/studies/opaque.py --table FILE` measures and writes.

Correct decoder models with random weights, through their caches and without, and the same models with a planted
mistake. From it come the constants of veriformer/budgets/opaque.py. Wants transformers beside the package.
"""

from __future__ import annotations

import argparse
import platform
import sys
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from opaque_cases import MISTAKES, SCENARIOS, Pair, noise
from opaque_models import subjects
from opaque_tables import tables, unit_of

from veriformer.budgets.opaque import UNIT
from veriformer.declarations import DTYPES

SEEDS = 4
EFFECT = 1e-5
"""A mistake that moves the logits of a float64 model by less than this part of the largest has no effect there."""


@dataclass(frozen=True)
class Measured:
    """One comparison; all sizes in units of u max|logit|, u of the coarsest dtype that the model computes in.

    apart: the largest difference; by_row: the largest, each position measured by its own largest logit.
    rows, prefixes: the noise of whole rows and of prefixes.
    """

    model: str
    group: str
    what: str
    apart: float
    by_row: float
    rows: float
    prefixes: float


def compared(name: str, group: str, what: str, pair: Pair, model: Any) -> Measured:
    """One pair of logits beside the noise of the model on the same tokens."""
    got, wanted, tokens = pair
    unit = UNIT[unit_of(group)]
    size = unit * np.abs(wanted).max()
    difference = np.abs(got - wanted)
    by_row = (difference.max(-1) / (unit * np.abs(wanted).max(-1))).max()
    rows, prefixes = model.noise(tokens)
    return Measured(name, group, what, difference.max() / size, float(by_row), rows / size, prefixes / size)


def group_of(dtype: str, model: Any) -> str:
    """The dtype, and what the model casts to inside if that is coarser."""
    return dtype if model.inside == dtype else f"{dtype}, {model.inside} inside"


def random_of(name: str, case: int) -> np.random.Generator:
    return np.random.default_rng([case, zlib.crc32(name.encode())])


def right(name: str, dtype: str, cases: int) -> Iterator[Measured]:
    """A correct model in every scenario that it can be asked in."""
    group = group_of(dtype, made(name, dtype, 0))
    for what, scenario in SCENARIOS.items():
        for case in range(cases):
            model, rng = made(name, dtype, case % SEEDS), random_of(name, case)
            try:
                pairs = list(scenario(model, model, rng))
            except NotImplementedError:
                continue
            for pair in pairs:
                yield compared(name, group, what, pair, model)


def wrong(name: str, dtype: str, cases: int) -> Iterator[Measured]:
    """A model with each mistake, in the cases in which it has an effect."""
    group = group_of(dtype, made(name, dtype, 0))
    for what, mistake in MISTAKES.items():
        if dtype not in mistake.dtypes or (mistake.widened and made(name, dtype, 0).window is None):
            continue
        for case in range(cases):
            worst = worst_pair(name, dtype, case, what)
            if mistake.rounds or relative(worst_pair(name, "float64", case, what)) > EFFECT:
                yield compared(name, group, what, worst, made(name, dtype, case % SEEDS))


@cache
def worst_pair(name: str, dtype: str, case: int, what: str) -> Pair:
    """The pair of a case that a mistake moves farthest apart."""
    model, mistake = made(name, dtype, case % SEEDS), MISTAKES[what]
    scenario = SCENARIOS[mistake.scenario]
    return max(scenario(model, mistake.steps(model), random_of(name, case)), key=relative)


def relative(pair: Pair) -> float:
    return float(np.abs(pair[0] - pair[1]).max() / np.abs(pair[1]).max())


class Remembering:
    """A model that gives again what `full` gave before for the same tokens, and its noise on them."""

    def __init__(self, model: Any) -> None:
        self.model, self.known = model, {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def full(self, tokens: Any) -> Any:
        key = tokens.shape, tokens.tobytes()
        if key not in self.known:
            self.known[key] = self.model.full(tokens)
        return self.known[key]

    def noise(self, tokens: Any) -> tuple[float, float]:
        key = "noise", tokens.shape, tokens.tobytes()
        if key not in self.known:
            self.known[key] = noise(self, tokens, np.random.default_rng(tokens.ravel()))
        return self.known[key]


@cache
def made(name: str, dtype: str, seed: int) -> Any:
    """A model, or None if it has no such dtype."""
    model = subjects()[name](dtype, seed=seed)
    return model and Remembering(model)


def collected(names: Iterable[str], cases: int) -> tuple[list[Measured], list[Measured]]:
    """All comparisons of correct models, and of models with a mistake."""
    good, bad = [], []
    for name in names:
        count = max(2, cases // 4) if "16 layers" in name else cases
        for dtype in DTYPES:
            if made(name, dtype, 0) is not None:
                good += right(name, dtype, count)
                bad += wrong(name, dtype, count)
        worst_pair.cache_clear()
        made.cache_clear()
        print(f"{name}: {len(good)} and {len(bad)} comparisons", file=sys.stderr, flush=True)
    return good, bad


def head(cases: int) -> list[str]:
    """What was run, with which versions."""
    versions = [f"{m.__name__} {m.__version__}" for m in (torch, transformers, np)]
    return [
        "# How far equal logits of decoder models lie apart", "",
        f"Written by `python benchmarks/studies/opaque.py --cases {cases} --table reports/opaque.md`;",
        "models of transformers with random weights, as in opaque_models.py beside it, and the reference's own;",
        f"Python {platform.python_version()}, {', '.join(versions)}, one thread of a CPU.", "",
    ]  # fmt: skip


def main() -> int:
    """Measure, print, and write where a file is named; 1 if a correct model uses too much of its allowance."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", help="where to write the tables")
    parser.add_argument("--cases", type=int, default=12, help="cases for each model, dtype and scenario")
    parser.add_argument("--models", default="", help="only models whose name holds this")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    good, bad = collected([name for name in subjects() if options.models in name], options.cases)
    lines, kept = tables(good, bad)
    text = "\n".join(head(options.cases) + lines) + "\n"
    print(text)
    if options.table:
        Path(options.table).write_text(text, encoding="utf-8")
    return int(not kept)


if __name__ == "__main__":
    sys.exit(main())
