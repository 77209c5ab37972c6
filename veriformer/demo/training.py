"""Training on the reference itself: its models, its loss, its optimiser; torch only differentiates."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from veriformer.demo import data
from veriformer.demo.data import Batch
from veriformer.demo.tasks import Halting, Plan, Pointers, Task
from veriformer.reference.act import ponder_cost
from veriformer.reference.layers import Params
from veriformer.reference.loss import cross_entropy
from veriformer.reference.optim import adamw_step, clip_by_global_norm

JUDGED = 1000
"""Fresh sequences that decide how good a model is."""
GOOD = 0.99
"""The share of them that is to be right to the last token."""
CHECKED, ENOUGH, EVERY = 500, 0.998, 25
"""Training ends when so large a share of so many other sequences is right, which is looked at every so many steps."""
FLOOR = 0.05
"""What the rate falls to, as a share of its height."""


class Flat:
    """Parameters, nested as the reference wants them, as views of one vector: one step of the optimiser moves all.

    An array that stands in several places, such as a shared table, is in the vector once.
    """

    def __init__(self, params: Params) -> None:
        self.tree = params
        self.arrays = {id(leaf): leaf for leaf in leaves(params)}
        self.sizes = [array.size for array in self.arrays.values()]
        self.vector = torch.from_numpy(np.concatenate([array.ravel() for array in self.arrays.values()]))

    def params(self, vector: Any = None) -> Params:
        """The parameters that a vector holds, by default its own."""
        parts = torch.split(self.vector if vector is None else vector, self.sizes)
        views = {key: part.view(self.arrays[key].shape) for key, part in zip(self.arrays, parts, strict=True)}
        return nested(self.tree, views)  # type: ignore[no-any-return]


def leaves(tree: Any) -> Iterator[Any]:
    """The arrays of nested dicts and lists; plain numbers are none."""
    if isinstance(tree, (dict, list)):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from leaves(part)
    elif isinstance(tree, np.ndarray):
        yield tree


def nested(tree: Any, views: dict[int, Any]) -> Any:
    """The tree with a view in place of each array."""
    if isinstance(tree, dict):
        return {name: nested(part, views) for name, part in tree.items()}
    if isinstance(tree, list):
        return [nested(part, views) for part in tree]
    return views.get(id(tree), tree)


@dataclass
class Run:
    """One task being trained, and what has come of it so far."""

    task: Task
    flat: Flat
    step: int = 0
    learned_at: int | None = None
    """The step from which on the rate falls, and the halting unit, where there is one, decides."""
    mean: float = math.nan
    """The running mean of the loss."""
    done: bool = False
    seconds: float = 0.0
    exact: float | None = None
    losses: list[float] = field(default_factory=list)
    checks: list[tuple[int, float]] = field(default_factory=list)
    halting: list[tuple[int, list[float]]] = field(default_factory=list)
    """Mean halting step for each chain length, averaged over EVERY / 5 steps of training."""
    by_hops: list[float] = field(default_factory=list)
    spread: list[list[float]] = field(default_factory=list)
    """Of the judged: the mean halting step for each chain length, and which share of them halts after 1, 2, … steps."""
    example: dict[str, list[int]] = field(default_factory=dict)


@contextmanager
def one_thread() -> Iterator[None]:
    """Small arrays are slower with more, and CPU time then means the same everywhere."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def begin(task: Task, seed: int) -> Run:
    """A task with its first parameters."""
    return Run(task, Flat(task.start(generator(task, seed, 0))))


def train(run: Run, seed: int, steps: int | None = None) -> Iterator[Run]:
    """Train until the task is learned, or for so many steps; yields after every one."""
    task, plan, vector = run.task, run.task.plan, run.flat.vector
    m, v = torch.zeros_like(vector), torch.zeros_like(vector)
    drawn, others = generator(task, seed, 1), generator(task, seed, 2)
    while not run.done and run.step < (steps or plan.limit):
        began, run.step = time.process_time(), run.step + 1
        batch = tensors(task.draw(drawn, plan.rows))
        gradient = differentiate(run, batch)
        vector, m, v = adamw_step(
            run.flat.vector, gradient, m, v, run.step, lr=rate(plan, run.step, run.learned_at), beta2=0.98, eps=1e-9
        )
        run.flat.vector = vector
        if run.learned_at is None and (run.mean < plan.learned or run.step >= plan.patience):
            run.learned_at = run.step
        if ripe(run):
            check(run, tensors(task.draw(others, CHECKED, unseen=True)))
        run.seconds += time.process_time() - began
        yield run


def differentiate(run: Run, batch: Batch) -> Any:
    """The clipped gradient of a batch's loss; the loss and how the model halted are noted."""
    task, plan, halts = run.task, run.task.plan, run.learned_at is not None
    vector = run.flat.vector.detach().requires_grad_()
    logits, targets, halting = task.logits(run.flat.params(vector), batch, halts=halts)
    loss = cross_entropy(logits, targets)
    note(run, float(loss.detach()), batch, halting)
    if halting is not None and run.learned_at is not None:
        tau = plan.ponder * min(1.0, 3 * (run.step - run.learned_at) / plan.decay)
        loss = loss + ponder_cost(*halting, tau=tau, reduction="mean")
    (gradient,) = torch.autograd.grad(loss, vector)
    (gradient,) = clip_by_global_norm([gradient], max_norm=1.0)
    return gradient


def note(run: Run, loss: float, batch: Batch, halting: Halting) -> None:
    """Keep what the curves show."""
    run.losses.append(loss)
    run.mean = loss if math.isnan(run.mean) else 0.95 * run.mean + 0.05 * loss
    if halting is not None:
        run.halting.append((run.step, means(halting[0], batch["hops"])))


def rate(plan: Plan, step: int, learned_at: int | None) -> float:
    """The rate of a step: up over the warm-up, then constant, down by a cosine once the task is learned, then low."""
    fallen = 0.0 if learned_at is None else min(1.0, (step - learned_at) / plan.decay)
    height = FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * fallen))
    return plan.rate * min(1.0, step / plan.warmup) * height


def ripe(run: Run) -> bool:
    """Whether the rate has fallen, and it is time to look how many sequences the model solves."""
    since = -1 if run.learned_at is None else run.step - run.learned_at - run.task.plan.decay
    return since >= 0 and since % EVERY == 0


def check(run: Run, batch: Batch) -> None:
    """Whether the task is learned, by sequences that are neither trained on nor judged."""
    with torch.no_grad():
        share = float(run.task.solved(run.flat.params(), batch).double().mean())
    run.checks.append((run.step, share))
    run.done = share >= ENOUGH


def judge(run: Run, seed: int, rows: int) -> None:
    """How many fresh sequences the model solves, and for which of them it thinks longer."""
    began, task = time.process_time(), run.task
    batch = tensors(task.draw(generator(task, seed, 3), rows, unseen=True))
    with torch.no_grad():
        params = run.flat.params()
        run.exact = float(task.solved(params, batch).double().mean())
        if isinstance(task, Pointers):
            letters, steps = task.read(params, batch)
            run.by_hops = means(steps, batch["hops"])
            run.spread = shares(steps, batch["hops"], task.max_steps)
            row = instructive(batch["hops"])
            run.example = {name: batch[name][row].tolist() for name in ("tokens", "hops", "answers")}
            run.example |= {"steps": steps[row].tolist(), "letters": letters[row].tolist()}
    run.seconds += time.process_time() - began


def means(steps: Any, hops: Any) -> list[float]:
    """The mean halting step of the cells with chains of 0, 1, … 3 hops; NaN where there are none."""
    return [float(steps[hops == n].double().mean()) for n in range(data.HOPS + 1)]


def shares(steps: Any, hops: Any, most: int) -> list[list[float]]:
    """For each chain length: which share of the cells halts after 1, 2, … `most` steps."""
    return [
        [float((steps[hops == length] == n).double().mean()) for n in range(1, most + 1)]
        for length in range(data.HOPS + 1)
    ]


def instructive(hops: Any) -> int:
    """The first row in which every chain length occurs, and the longest one twice; else the first row."""
    whole = torch.stack([(hops == n).sum(dim=1) >= (2 if n == data.HOPS else 1) for n in range(data.HOPS + 1)])
    return int(whole.all(dim=0).double().argmax())


def tensors(batch: Batch) -> Batch:
    """Arrays as torch has them."""
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in batch.items()}


def generator(task: Task, seed: int, purpose: int) -> data.Generator:
    """Random numbers for one purpose of one task: the same whatever else runs."""
    return np.random.default_rng([seed, sum(map(ord, task.name)), purpose])
