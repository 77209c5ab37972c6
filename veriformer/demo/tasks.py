"""The three tasks: which model of the reference learns what, how it is asked, and how its training is planned.

A task draws batches, gives the parameters to begin with, the logits to train on, and says which sequences of a
batch the model solves when it writes the answer itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import torch

from veriformer.demo import data
from veriformer.demo.data import Batch, Generator
from veriformer.reference.decoding import decoder_lm_step, transformer_encode, transformer_step
from veriformer.reference.embedding import embedding
from veriformer.reference.feed_forward import linear
from veriformer.reference.generation import generate, greedy
from veriformer.reference.initialization import initial_decoder_lm, initial_layer, initial_transformer, xavier
from veriformer.reference.layers import Params
from veriformer.reference.positions import sinusoidal_positions
from veriformer.reference.transformer import decoder_lm, transformer
from veriformer.reference.universal import universal_transformer

Halting = tuple[Any, Any] | None
"""Steps and remainder of every position, from a model that halts."""


@dataclass(frozen=True)
class Plan:
    """How a task is trained, all with one rhythm.

    The rate rises over `warmup` steps and stays until the running mean of the loss is below `learned`, or for
    `patience` steps. From then on it falls by a cosine over `decay` steps, and training ends as soon as enough
    sequences are solved, at the latest after `limit` steps. A model that halts thinks all the steps it may until
    its rate falls, and only then decides for itself; what a step costs, `ponder`, rises over `decay / 3` steps.
    Trained with halting from the start it would mostly learn to halt before it has learned what to think.
    """

    rate: float
    rows: int
    warmup: int
    learned: float
    decay: int
    patience: int
    limit: int
    usual: int
    """Steps that it mostly takes, for the progress bar."""
    ponder: float = 0.0


class Task(Protocol):
    """What training needs to know."""

    name: str
    title: str
    model: str
    plan: Plan

    def start(self, generator: Generator) -> Params:
        """Parameters to begin with, NumPy arrays."""

    def draw(self, generator: Generator, rows: int, *, unseen: bool = False) -> Batch:
        """Sequences to train on, or to be judged on."""

    def logits(self, params: Params, batch: Batch, *, halts: bool = True) -> tuple[Any, Any, Halting]:
        """What the model says of a batch: logits[N,V], targets[N], and how it halted."""

    def solved(self, params: Params, batch: Batch) -> Any:
        """Which sequences the model gets right to the last token when it writes them itself: bool[rows]."""


class Reverse:
    """Letters come out in reverse: what each token looks at stands elsewhere each time, in the encoder."""

    name, title, model = "reverse", "reverse 10 letters", "encoder-decoder"
    plan = Plan(rate=4e-3, rows=64, warmup=50, learned=0.15, decay=75, patience=500, limit=800, usual=220)
    vocabulary = data.END + 1
    shape: ClassVar[dict[str, Any]] = {"heads": 4, "norm": "pre"}

    def start(self, generator: Generator) -> Params:
        """One layer each, pre-norm, a head of its own."""
        params = initial_transformer(generator, vocabulary=self.vocabulary, width=32, inner=64, layers=1, **self.shape)
        return params | {"head": head(generator, 32, self.vocabulary)}

    def draw(self, generator: Generator, rows: int, *, unseen: bool = False) -> Batch:
        """Of 10^10 sequences hardly any comes twice, so unseen ones are drawn alike."""
        return data.reversals(generator, rows)

    def logits(self, params: Params, batch: Batch, *, halts: bool = True) -> tuple[Any, Any, Halting]:
        """Every token of the target from those before it."""
        source, target = batch["source"], batch["target"]
        logits = transformer(source, target[:, :-1], params, **self.shape)
        return logits.reshape(-1, self.vocabulary), target[:, 1:].reshape(-1), None

    def solved(self, params: Params, batch: Batch) -> Any:
        """Written from the start token on, token by token through the cache, up to the end token."""
        target, memory = batch["target"], transformer_encode(batch["source"], params, **self.shape)

        def step(tokens: Any, cache: Any) -> Any:
            return transformer_step(tokens, memory, cache, params, **self.shape)

        return same(generate(step, target[:, :1], max_length=target.shape[1], end=data.END, pad=data.END), target)


class Addition:
    """Digits of a sum: each needs two digits far apart and the carry of those before."""

    name, title, model = "addition", "add two 3-digit numbers", "decoder-only"
    plan = Plan(rate=4e-3, rows=32, warmup=50, learned=0.15, decay=150, patience=1000, limit=1400, usual=600)
    vocabulary, heads = data.EQUALS + 1, 12

    def start(self, generator: Generator) -> Params:
        """Two layers, rotary positions, many narrow heads, a head of its own for the logits."""
        params = initial_decoder_lm(
            generator, vocabulary=self.vocabulary, width=48, inner=96, layers=2, heads=self.heads
        )  # fmt: skip
        return params | {"head": head(generator, 48, self.vocabulary)}

    def draw(self, generator: Generator, rows: int, *, unseen: bool = False) -> Batch:
        """Training and judging share no pair of numbers."""
        return data.sums(generator, rows, unseen=unseen)

    def logits(self, params: Params, batch: Batch, *, halts: bool = True) -> tuple[Any, Any, Halting]:
        """Every digit of the answer from what stands before it; the question itself cannot be foreseen."""
        tokens, first = batch["tokens"], data.QUESTION
        logits = decoder_lm(tokens[:, :-1], params, heads=self.heads)[:, first - 1 :, :]
        return logits.reshape(-1, self.vocabulary), tokens[:, first:].reshape(-1), None

    def solved(self, params: Params, batch: Batch) -> Any:
        """The question is the prompt, the answer is written token by token through the cache."""
        tokens = batch["tokens"]

        def step(new: Any, cache: Any) -> Any:
            return decoder_lm_step(new, cache, params, heads=self.heads)

        return same(generate(step, tokens[:, : data.QUESTION], max_length=tokens.shape[1]), tokens)


class Pointers:
    """Every cell names the letter that its chain ends at: long chains need more steps of the one layer."""

    name, title, model = "pointers", "follow chains of pointers", "Universal Transformer, ACT"
    plan = Plan(
        rate=5e-3, rows=32, warmup=100, learned=0.06, decay=300, patience=1000, limit=1600, usual=850, ponder=0.04
    )
    width, heads, max_steps = 32, 2, 4

    def start(self, generator: Generator) -> Params:
        """One layer, post-norm, a halting unit, and a table in which the numbers of cells begin as their sinusoids.

        Those are moved by half the channels: the sinusoids that the model adds differ mostly in the first
        channels, so where a cell stands and where it points can be told apart.
        """
        width = self.width
        letters = generator.normal(0.0, 0.5**0.5, (data.ANSWERS, width))
        numbers = np.roll(sinusoidal_positions(data.CELLS, width, like=letters), width // 2, axis=1)
        return {
            "embedding": np.concatenate([letters, numbers]),
            "layer": initial_layer(generator, width=width, inner=2 * width, heads=self.heads, beta=0.5),
            "halt": head(generator, width, 1),
            "head": head(generator, width, data.ANSWERS),
        }

    def draw(self, generator: Generator, rows: int, *, unseen: bool = False) -> Batch:
        """Of more than 10^7 rows hardly any comes twice, so unseen ones are drawn alike."""
        return data.pointers(generator, rows)

    def logits(self, params: Params, batch: Batch, *, halts: bool = True) -> tuple[Any, Any, Halting]:
        """The letter of every cell at once. Unless it halts, the halting unit is held near 0: all steps are made."""
        x = embedding(batch["tokens"], params["embedding"])
        params = params if halts else params | {"halt": never(params["halt"])}
        y, steps, remainder = universal_transformer(x, params, heads=self.heads, max_steps=self.max_steps)
        logits = linear(y, params["head"]["w"], params["head"]["b"])
        return logits.reshape(-1, data.ANSWERS), batch["answers"].reshape(-1), (steps, remainder)

    def solved(self, params: Params, batch: Batch) -> Any:
        """All eight letters of a row."""
        return same(self.read(params, batch)[0], batch["answers"])

    def read(self, params: Params, batch: Batch) -> tuple[Any, Any]:
        """The letters that the model gives and the steps that it takes for them, both [rows, 8]."""
        logits, _, halting = self.logits(params, batch)
        assert halting is not None
        return greedy(logits).reshape(batch["tokens"].shape), halting[0]


TASKS: tuple[Task, ...] = (Reverse(), Addition(), Pointers())


def head(generator: Generator, width: int, classes: int) -> Params:
    """A linear layer to begin with."""
    return {"w": xavier(generator, width, classes), "b": np.zeros(classes)}


def never(halt: Params) -> Params:
    """A halting unit that says 6e-6, whatever it sees."""
    return {"w": torch.zeros_like(halt["w"]), "b": torch.full_like(halt["b"], -12.0)}


def same(written: Any, wanted: Any) -> Any:
    """Which rows agree to the last token; those that ended early do not."""
    if written.shape != wanted.shape:
        short = wanted.shape[1] - written.shape[1]
        written = torch.nn.functional.pad(written, (0, short), value=-1)
    return (written == wanted).all(dim=1)
