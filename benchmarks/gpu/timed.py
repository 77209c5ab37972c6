"""What is timed on a GPU, and how: events around each call, inputs that rotate through more memory than the L2 holds.

An implementation is judged first, at a smaller size that takes the same way through its kernels, by the package's
reference and budgets, in memory that NaN has just been freed from; what is wrong is not timed.

python timed.py DEVICE SECONDS FIRST [tiny] prints the rows from number FIRST on, one a line, as JSON. It ends early,
with a line AGAIN, where a row has left the device in a state in which nothing works any more in this process.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from veriformer.benchmarks import judging
from veriformer.benchmarks.implementations import Absent, Prepared
from veriformer.benchmarks.workloads import Workload, normal, rows
from veriformer.boundary import describe_error
from veriformer.frameworks import framework_named
from veriformer.targets import Options, load

CALLS = 100
"""Of each the median is taken."""
MOST_COPIES = 16
AGAIN = "again"
"""What is printed last where the rows that follow need a new process."""
Call = Callable[[], Any]


@dataclass(frozen=True)
class Drawn(Workload):
    """A workload whose inputs, which take longer to draw than to use, are drawn once for all who are timed."""

    def arrays(self, seed: int) -> dict[str, np.ndarray]:
        """The inputs of a seed; those of an earlier workload are forgotten."""
        here = (self.id, self.sizes)
        for key in [key for key in _DRAWN if key[:2] != here]:
            del _DRAWN[key]
        if (*here, seed) not in _DRAWN:
            _DRAWN[*here, seed] = super().arrays(seed)
        return _DRAWN[*here, seed]


_DRAWN: dict[tuple[str, str, int], dict[str, np.ndarray]] = {}


@dataclass(frozen=True)
class Work:
    """One thing to time. timed: at full size; judged: what is judged before. who: names of implementations."""

    timed: Workload
    judged: Workload
    who: tuple[str, ...]


@dataclass
class Row:
    """What came of one implementation at one work in one dtype. seconds: median; ratio: worst error by its budget."""

    work: str
    implementation: str
    dtype: str
    sizes: str
    seconds: float = 0.0
    ratio: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0
    calls: int = 0
    said: str = ""


SDPA = (
    "triton:attention",
    "torch:default",
    "torch_cuda:flash",
    "torch_cuda:cudnn",
    "torch_cuda:efficient",
    "torch_cuda:math",
)


def row_work(operation: str, height: int, width: int, direction: str) -> Work:
    """Softmax or layer norm of rows."""
    softmax = operation == "softmax"

    def made(count: int, name: str) -> Drawn:
        draw = normal(x=(count, width)) if softmax else lambda rng: rows(rng, count, width)
        numbers = count * width * (2 if direction == "forward" else 5)
        return Drawn(name, operation, draw, 0.0, numbers, {}, direction, sizes=f"{count}x{width}")

    name = f"{operation.replace('_', '-')}-{direction}"
    judged = replace(made(8, name), direction="backward" if direction == "training" else direction)
    who = ("triton:kernels", "torch:functional")
    return Work(made(height, name), judged, who if softmax else (*who, "torch:rows"))


def attention_work(name: str, sizes: tuple[int, ...], causal: bool, direction: str) -> Work:
    """Attention of as many queries as keys. sizes: batch, heads, key heads, length, width."""

    def made(batch: int, heads: int, groups: int, length: int, width: int, **more: Any) -> Drawn:
        q, k = (batch, heads, length, width), (batch, groups, length, width)
        pairs = batch * heads * length * (length + 1) / 2 if causal else batch * heads * length**2
        flops, numbers = pairs * (4 * width + 5), 2 * float(np.prod(q) + np.prod(k))
        times = 1.0 if direction == "forward" else 3.5
        words = {"causal": True} if causal else {}
        text = f"B{batch} H{heads} G{groups} N{length} D{width}"
        return Drawn(
            f"{name}-{direction}", "attention", normal(q=q, k=k, v=k), times * flops, times * numbers, words,
            direction, sizes=text,
        )  # fmt: skip

    _, heads, groups, length, width = sizes
    shared = heads // groups
    # gradients are judged against many evaluations of the reference, which takes long at full length
    small = length if direction == "forward" else min(length, 80)
    judged = made(1, shared, 1, small, width)
    judged = replace(judged, direction="backward") if direction == "training" else judged
    return Work(made(*sizes), judged, SDPA)


def cached_work(sizes: tuple[int, ...]) -> Work:
    """One new token of each sequence. sizes: batch, heads, key heads, capacity, width; caches are all but full."""

    def made(batch: int, heads: int, groups: int, capacity: int, width: int) -> Drawn:
        def draw(rng: np.random.Generator) -> dict[str, np.ndarray]:
            one, cache = (batch, groups, 1, width), (batch, groups, capacity, width)
            shapes = {"q": (batch, heads, 1, width), "k_new": one, "v_new": one, "k_cache": cache, "v_cache": cache}
            lengths = capacity - 1 - np.arange(batch) % 7
            return {**{name: rng.standard_normal(shape) for name, shape in shapes.items()}, "lengths": lengths}

        read = batch * groups * capacity * width
        text = f"B{batch} H{heads} G{groups} C{capacity} D{width}"
        flops = 4.0 * batch * heads * capacity * width
        return Drawn("cached-step", "cached_attention", draw, flops, 2 * read, {}, sizes=text)

    batch, heads, groups, capacity, width = sizes
    return Work(made(*sizes), made(2, heads // groups, 1, capacity, width), ("triton:cached", "torch:append"))


def works(tiny: bool) -> list[Work]:
    """All, what tells most first; tiny ones of each kind."""
    length, wide, many = (20, 40, 6) if tiny else (2048, 4096, 4096)
    multi = (1, 1, 1, length, 16) if tiny else (2, 16, 16, length, 64)
    grouped = (1, 2, 1, length, 16) if tiny else (1, 32, 8, length, 128)
    step = (2, 4, 2, length, 16) if tiny else (8, 32, 8, length, 128)
    found = [
        attention_work("attention-causal", multi, True, "forward"),
        cached_work(step),
        row_work("softmax", many, wide, "forward"),
        row_work("layer_norm", many, wide, "forward"),
        attention_work("attention-causal", multi, True, "training"),
        row_work("layer_norm", many, wide, "training"),
        row_work("softmax", many, wide, "training"),
        attention_work("attention-grouped", grouped, True, "forward"),
        attention_work("attention-full", multi, False, "forward"),
    ]
    return found[:5] if tiny else found


def timings(device: str, deadline: float, tiny: bool = False, first: int = 0) -> Iterator[Row]:
    """Rows of all works, 16-bit dtypes first, until time.monotonic() reaches the deadline; then why the others lack.

    first: the number of the first row that is wanted.
    """
    count, dtypes = (1, ("float32",)) if tiny else (CALLS, ("float16", "bfloat16", "float32"))
    every = ((work, dtype, name) for work, dtype in itertools.product(works(tiny), dtypes) for name in work.who)
    for work, dtype, name in itertools.islice(every, first, None):
        row = Row(work.timed.id, name, dtype, work.timed.sizes)
        if time.monotonic() > deadline:
            row.said = "not run: time is over"
        else:
            _fill(row, work, device, count)
        yield row


def _fill(row: Row, work: Work, device: str, count: int) -> None:
    try:
        loaded = _named(row.implementation, device)
        row.ratio = _judged(Prepared(loaded, work.judged, row.dtype), device)
        prepared = Prepared(loaded, work.timed, row.dtype)
        row.seconds = statistics.median(_taken(prepared, device, count))
        row.calls = count
    except judging.Wrong as error:
        row.said = f"wrong: {error}"
    except Absent as error:
        row.said = str(error)
    except Exception as error:
        row.said = describe_error(error)
    one = replace(work.timed, dtype=row.dtype)
    row.flops, row.bytes = one.flops, one.bytes


def _named(name: str, device: str) -> Any:
    """A loaded implementation. Raises Absent where there is none on that device."""
    from veriformer.calling import UsageError

    try:
        (found,) = load(name, Options(device=device))
    except UsageError as error:
        raise Absent(str(error)) from None
    return found


def _judged(prepared: Prepared, device: str) -> float:
    """The worst error by its budget, of a call whose memory held NaN before."""
    first = prepared.fresh(1)()
    results = first.values() if isinstance(first, dict) else prepared.results(first)  # gradients have names
    shapes = [tuple(result.shape) for result in results if result is not None]
    del first, results
    call = prepared.fresh(0)
    before = judging.inputs_of(prepared)
    dirty = [torch.full(shape, float("nan"), device=device) for shape in shapes for _ in range(4)]
    del dirty
    returned = call()
    judging.keeps_contract(prepared, before, returned)
    return float(judging.accuracy(prepared, 0, returned).ratio)


def _taken(prepared: Prepared, device: str, count: int) -> list[float]:
    """Seconds of each of `count` calls in turn on several copies of the inputs."""
    calls = [prepared.fresh(number) for number in range(_copies(prepared.workload, device))]
    for call in itertools.islice(itertools.cycle(calls), 3 + len(calls)):
        call()
    rotated = list(itertools.islice(itertools.cycle(calls), count))
    return _by_events(rotated) if device.startswith("cuda") else _by_clock(rotated)


def _by_events(calls: list[Call]) -> list[float]:
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in calls]
    torch.cuda.synchronize()
    for call, (start, end) in zip(calls, pairs, strict=True):
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in pairs]


def _by_clock(calls: list[Call]) -> list[float]:
    taken = []
    for call in calls:
        start = time.process_time()
        call()
        taken.append(time.process_time() - start)
    return taken


def _copies(one: Workload, device: str) -> int:
    """So many copies of the inputs that they are together twice what the L2 holds."""
    return int(min(max(2 * l2_bytes(device) // max(one.bytes / 2, 1) + 1, 2), MOST_COPIES))


def l2_bytes(device: str) -> int:
    """What the GPU's L2 holds."""
    return int(torch.cuda.get_device_properties(device).L2_cache_size) if device.startswith("cuda") else 0


def main(device: str, seconds: str, first: str, *tiny: str) -> None:
    """Print rows, each as soon as it is there."""
    framework = framework_named("torch", device)
    for row in timings(device, time.monotonic() + float(seconds), bool(tiny), int(first)):
        print(json.dumps(asdict(row)), flush=True)
        if row.said and framework.trouble():
            print(AGAIN, flush=True)
            return


if __name__ == "__main__":
    main(*sys.argv[1:])
