"""What Triton's interpreter hides, made visible: where a kernel reads, what it leaves out, and in which order it works.

python tests/triton_guarded.py reads a list of [FOLDER, CALL, DTYPE] as JSON, and prints what is true of each call of
CALLS by the implementations in that folder: "right" of a plain run (inputs lie between zeros, new memory is zero); that
something else comes out where inputs lie between NaN ("tail"), new memory is NaN ("memory") or programs run from the
last to the first ("order"); and that a program uses what another one of its launch writes ("shared").
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton_quick  # noqa: F401  (the interpreter is chosen before a kernel is decorated)
from torch import Tensor
from triton.runtime import interpreter

BUILDER = interpreter.interpreter_builder
PADDING = 4096
"""Entries before and behind an input: more than any block reaches over its end."""
NAN = float("nan")


def between(values: Tensor, filler: float) -> Tensor:
    """The same values in the middle of a storage of fillers."""
    storage = torch.full((values.numel() + 2 * PADDING,), filler).to(values.dtype)
    storage[PADDING:-PADDING] = values.flatten()
    return storage[PADDING:-PADDING].view(values.shape)


@contextlib.contextmanager
def new_memory(filler: float) -> Iterator[None]:
    """New memory for real numbers holds fillers."""
    places = ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty"))
    before = [getattr(owner, name) for owner, name in places]

    def filled(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def filled_anew(*arguments: Any, **words: Any) -> Tensor:
            made = make(*arguments, **words)
            return made.fill_(filler) if made.is_floating_point() else made

        return filled_anew

    for (owner, name), make in zip(places, before, strict=True):
        setattr(owner, name, filled(make))
    try:
        yield
    finally:
        for (owner, name), make in zip(places, before, strict=True):
            setattr(owner, name, make)


@contextlib.contextmanager
def from_last_to_first() -> Iterator[None]:
    """Programs get each other's numbers, so that the last one runs first."""
    plain = BUILDER.set_grid_idx
    BUILDER.set_grid_idx = lambda *place: plain(*(n - 1 - i for n, i in zip(BUILDER.grid_dim, place, strict=True)))
    try:
        yield
    finally:
        del BUILDER.set_grid_idx


@contextlib.contextmanager
def watched() -> Iterator[list[str]]:
    """Conflicts between programs of one launch: what one writes, another may neither read nor write."""
    written: dict[int, tuple[int, ...]] = {}
    read: dict[int, set[tuple[int, ...]]] = {}
    conflicts: list[str] = []
    load, store, begin = BUILDER.create_masked_load, BUILDER.create_masked_store, BUILDER.set_grid_dim

    def on_load(pointers: Any, mask: Any, *rest: Any) -> Any:
        here = BUILDER.grid_idx
        for place in places(pointers, mask):
            read.setdefault(place, set()).add(here)
            if written.get(place, here) != here:
                conflicts.append(f"program {here} reads what {written[place]} writes")
        return load(pointers, mask, *rest)

    def on_store(pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        here = BUILDER.grid_idx
        for place in places(pointers, mask):
            if written.setdefault(place, here) != here or read.get(place, {here}) != {here}:
                conflicts.append(f"program {here} writes what {written[place]} or another uses")
        return store(pointers, value, mask, *rest)

    def on_launch(*sizes: int) -> None:
        written.clear()
        read.clear()
        begin(*sizes)

    BUILDER.create_masked_load, BUILDER.create_masked_store, BUILDER.set_grid_dim = on_load, on_store, on_launch
    try:
        yield conflicts
    finally:
        del BUILDER.create_masked_load, BUILDER.create_masked_store, BUILDER.set_grid_dim


def places(pointers: Any, mask: Any) -> list[int]:
    """The addresses that are really used."""
    return np.broadcast_to(pointers.data, mask.data.shape)[mask.data.astype(bool)].tolist()  # type: ignore[no-any-return]


Arrays = dict[str, Tensor]


def rows() -> Arrays:
    """More rows than a tile holds, of a width that is no power of two."""
    return {"x": torch.randn(37, 133), "weight": torch.randn(133), "bias": torch.randn(133)}


def heads() -> Arrays:
    """More queries than keys, so that under the causal mask whole blocks of them see nothing; grouped heads."""
    sizes = {"q": (1, 2, 37, 20), "k": (1, 1, 19, 20), "v": (1, 1, 19, 9)}
    return {name: torch.randn(size) for name, size in sizes.items()}


def caches() -> Arrays:
    """Three new tokens of two sequences, whose keys are read in parts; the second sequence fills its cache."""
    sizes = {"q": (2, 2, 3, 20), "k_new": (2, 1, 3, 20), "v_new": (2, 1, 3, 9)}
    sizes |= {"k_cache": (2, 1, 50, 20), "v_cache": (2, 1, 50, 9)}
    return {name: torch.randn(size) for name, size in sizes.items()}


def graded(function: Callable[..., Tensor]) -> Callable[..., list[Tensor]]:
    """The result and the gradients of all arrays."""

    def call(**arrays: Tensor) -> list[Tensor]:
        leaves = [x.requires_grad_() for x in arrays.values()]
        y = function(*leaves)
        cotangent = (torch.arange(y.numel()) % 7 - 2.0).view(y.shape).to(y.dtype)  # the same in every dtype
        return [y.detach(), *torch.autograd.grad(y, leaves, cotangent)]

    return call


def softmax_by_hand(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def layer_norm_by_hand(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.nn.functional.layer_norm(x, weight.shape, weight, bias)


def attention_by_hand(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """With zeros where nothing is seen; one key head."""
    weights = torch.where(seen, (q @ k.mT * q.shape[3] ** -0.5).exp(), 0.0)
    return weights / weights.sum(-1, keepdim=True).clamp_min(1e-30) @ v


def cached_by_hand(q: Tensor, k_new: Tensor, v_new: Tensor, k_cache: Tensor, v_cache: Tensor) -> list[Tensor]:
    k_cache, v_cache = k_cache.clone(), v_cache.clone()
    out = []
    for b, length in enumerate(LENGTHS):
        k_cache[b, :, length : length + 3], v_cache[b, :, length : length + 3] = k_new[b], v_new[b]
        seen = torch.arange(50) <= length + torch.arange(3)[:, None]
        out.append(attention_by_hand(q[b : b + 1], k_cache[b : b + 1], v_cache[b : b + 1], seen))
    return [torch.cat(out), k_cache, v_cache]


LENGTHS = (11, 47)
CAUSAL = torch.ones(37, 19, dtype=torch.bool).tril(19 - 37)
THIRDS = (torch.arange(19) % 3 > 0)[None, None, None]
Call = Callable[..., list[Tensor]]
CALLS: dict[str, tuple[str, Callable[[], Arrays], Callable[[Any], Call], Call]] = {
    "softmax": (
        "triton_kernels.py", lambda: {"x": rows()["x"]}, lambda module: graded(module.softmax), graded(softmax_by_hand),
    ),
    "layer_norm": (
        "triton_kernels.py", rows, lambda module: graded(module.layer_norm), graded(layer_norm_by_hand),
    ),
    "attention": (
        "triton_attention.py", heads, lambda module: graded(lambda *qkv: module.attention(*qkv, causal=True)),
        graded(lambda *qkv: attention_by_hand(*qkv, CAUSAL)),
    ),
    "masked": (
        "triton_attention.py", heads, lambda module: graded(lambda *qkv: module.attention(*qkv, mask=THIRDS)),
        graded(lambda *qkv: attention_by_hand(*qkv, THIRDS)),
    ),
    "cached": (
        "triton_cached.py", caches,
        lambda module: lambda **arrays: list(module.cached_attention(*arrays.values(), torch.tensor(LENGTHS))),
        cached_by_hand,
    ),
}  # fmt: skip
"""name -> (the file, inputs, the call that a module makes, what is right)."""


def module_at(path: Path) -> Any:
    """The module in a file; the interpreter reads the source there."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def findings(folder: str, name: str, dtype: str) -> dict[str, bool]:
    """What is true of a call."""
    file, inputs, made, by_hand = CALLS[name]
    arrays = {n: x.to(getattr(torch, dtype)) for n, x in inputs().items()}
    call = made(module_at(Path(folder) / file))

    def results(filler: float = 0.0, memory: float = 0.0) -> list[Tensor]:
        with new_memory(memory):
            return [x.clone() for x in call(**{n: between(x, filler) for n, x in arrays.items()})]

    with watched() as conflicts:
        plain = results()
    with from_last_to_first():
        turned = results()
    found = {"tail": results(filler=NAN), "memory": results(memory=NAN), "order": turned}
    wanted = by_hand(**{n: x.double() for n, x in arrays.items()})
    errors = [(x - y).abs().max() / y.abs().max() for x, y in zip(plain, wanted, strict=True)]
    unlike = {how: not all(map(torch.equal, plain, other)) for how, other in found.items()}
    return {"right": bool(max(errors) < 0.01), **unlike, "shared": bool(conflicts)}


def main() -> None:
    """Answer the list on standard input."""
    torch.manual_seed(0)
    print(json.dumps([findings(*one) for one in json.load(sys.stdin)]))


if __name__ == "__main__":
    main()
