"""What the laws of layers do to a case: silence sublayers, draw weights that hide nothing, change or add tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from veriformer.case import Case, flattened
from veriformer.expect import expect, expect_different
from veriformer.properties.cotangents import differentiable
from veriformer.properties.layer_build import DECODERS, STACKS, depth, seen_tokens
from veriformer.reference.layers import normed
from veriformer.subject import Subject

BRANCHES = ("attention", "cross_attention", "feed_forward")
"""The sublayers; encoder layers have no cross-attention."""
TRIES = 4
"""So often, more strongly each time, something is changed before it has no influence: 16 bits show little."""
_LAST = {"attention": ("wo", "bo"), "cross_attention": ("wo", "bo"), "feed_forward": ("w2", "b2")}


def branches(case: Case) -> tuple[str, ...]:
    """The sublayers of each layer, in order."""
    return BRANCHES if case.operation in DECODERS else (BRANCHES[0], BRANCHES[2])


def prefixes(case: Case) -> list[str]:
    """How the names of each layer's weights begin."""
    return [f"params.layers.{i}." for i in range(depth(case))] if case.operation in STACKS else ["params."]


def silenced(case: Case, *heard: str, layers: Sequence[int] | None = None) -> Case:
    """The case in which sublayers, but for those heard, give 0: in all layers, or in some of them."""
    every = prefixes(case)
    names = [
        f"{every[i]}{branch}.{name}"
        for i in (range(len(every)) if layers is None else layers)
        for branch in branches(case)
        if branch not in heard
        for name in _LAST[branch]
    ]
    return case.with_arrays(**{name: np.zeros_like(case[name]) for name in names if case[name] is not None})


def without_final_norm(case: Case) -> Case:
    """The case without a norm after the stack."""
    return case.with_arrays(**{f"params.norm.{name}": None for name in ("weight", "bias")})


def last_norm(case: Case) -> str:
    """How the names of the weights of the last norm before the result begin; "" in pre-norm without a final one."""
    if "params.norm.weight" in case.arrays:
        return "params.norm."
    return f"{prefixes(case)[-1]}norm{len(branches(case))}." if case["norm"] == "post" else ""


def norms_alone(case: Case) -> np.ndarray:
    """What is left of x where every sublayer of a post-norm layer gives 0: norm after norm of alpha x."""
    x = case["x"]
    for layer in layers_of(case):
        for i in range(len(branches(case))):
            x = normed(case["alpha"] * x, layer[f"norm{i + 1}"])
    return x if "norm" not in case.params else normed(x, case.params["norm"])


def layers_of(case: Case) -> list[dict[str, Any]]:
    """The weights of each layer as nested dicts."""
    return list(case.params["layers"]) if case.operation in STACKS else [case.params]


def with_layers(case: Case, layers: Sequence[Mapping[str, Any]]) -> Case:
    """The case of a stack with these layers for its own."""
    bare = {name: None for name in case.arrays if name.startswith("params.layers.")}
    return case.with_arrays(**bare).with_arrays(**flattened(list(layers), "params.layers"))


def coarse(x: np.ndarray) -> np.ndarray:
    """The nearest multiples of 1/8 up to 8: with whole numbers up to 4 added they are exact in every dtype."""
    return np.clip(np.round(8 * x) / 8, -8.0, 8.0)


def telling(case: Case, pick: int, level: bool = False) -> Case:
    """The case with tokens and weights that hide nothing: dense, and of every two hidden units one is open.

    level: queries are 0, so that scores are equal but for alibi and everything seen weighs much.
    """
    rng, arrays = case.random(pick), {}
    for name, array in case.arrays.items():
        if case.table.kind(name) == "float":
            arrays[name] = drawn(rng, name.rpartition(".")[2], array.shape)
            queries = level and name.rpartition(".")[2] in ("wq", "bq")
            arrays[name] = np.zeros_like(array) if queries else arrays[name]
    return case.with_arrays(**arrays)


def drawn(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Normal numbers of the size that suits tokens, a matrix, a norm's weight or a bias."""
    values = rng.standard_normal(shape)
    if name == "weight":
        return 1.0 + values / 4
    if name == "w1":
        values[:, 1::2] = -values[:, : shape[1] // 2 * 2 : 2]
    return values if name in ("x", "memory") else values * shape[0] ** -0.5 if len(shape) == 2 else values / 4


def nudged(array: np.ndarray, rng: np.random.Generator, size: float) -> np.ndarray:
    """Other numbers, off by about size each."""
    return array + size * rng.choice([-1.0, 1.0], array.shape) * rng.uniform(0.5, 1.5, array.shape)


def moves(
    layer: Callable[[Case], np.ndarray], case: Case, name: str, row: int, pick: int, tokens: np.ndarray
) -> np.ndarray:
    """How far the results at tokens[B,T] move at most where one row of x or memory is turned round and grows."""
    moved = np.zeros(int(tokens.sum()))
    for attempt in range(TRIES):
        drawn = telling(case, pick + 16 * attempt, level=True)
        rows = drawn[name].copy()
        rows[:, row] *= -(2.0 ** (attempt + 1))
        moved = np.maximum(moved, np.abs(layer(drawn.with_arrays(**{name: rows})) - layer(drawn)).max(-1)[tokens])
        if moved.all():
            break
    return moved


def spoiled(case: Case, name: str, rows: np.ndarray, pick: int) -> Case:
    """The case with other finite rows of x or memory where rows[T] or rows[S] is True, far larger than usual."""
    top = 16.0 if case.dtype == "float16" else 1e3
    other = case.random(pick).choice([-1.0, 1.0], case[name].shape) * top
    other = other * case.random(pick + 1).uniform(0.1, 1.0, other.shape)
    return case.with_arrays(**{name: np.where(rows[:, None], other, case[name])})


def only(case: Case, axes: Mapping[str, Sequence[int] | np.ndarray]) -> Case:
    """The case with these indices of B, T or S only, in tokens, memory and masks."""
    arrays = {}
    for name, array in case.arrays.items():
        for place, label in enumerate(case.labels(name)):
            if label in axes and name in ("x", "memory", "mask", "memory_mask"):
                broadcast = "mask" in name and array.shape[place] == 1
                array = array if broadcast else array.take(np.asarray(axes[label]), place)
        arrays[name] = array
    return case.with_arrays(**arrays)


def padded(case: Case, count: int, front: bool, pick: int) -> tuple[Case, np.ndarray]:
    """The case with more tokens in front or behind, hidden from those that it had, and the places of these."""
    batch, length, width = case["x"].shape
    places = np.arange(length) + (count if front else 0)
    x = case.random(pick).standard_normal((batch, length + count, width))
    x[:, places] = case["x"]
    memory_mask = case["memory_mask"]
    if memory_mask is not None and memory_mask.shape[2] > 1:
        memory_mask = memory_mask.take(np.clip(np.arange(length + count) - places[0], 0, length - 1), 2)
    mask = np.ones((batch, 1, 1, length), bool) if case["mask"] is None else case["mask"]
    more = case.with_arrays(x=x, memory_mask=memory_mask, mask=with_padding(mask, places, length + count, keys=True))
    if seen_tokens(more).any(-1).all():
        return more, places
    return more.with_arrays(mask=with_padding(mask, places, length + count, keys=False)), places


def with_padding(mask: np.ndarray, places: np.ndarray, length: int, keys: bool) -> np.ndarray:
    """A mask of longer sequences: of keys alone where it was one and keys is set, else each new token sees itself."""
    if keys and mask.shape[2] == 1:
        wide = np.zeros((*mask.shape[:3], length), bool)
        wide[..., places] = mask
        return wide
    wide = np.broadcast_to(np.eye(length, dtype=bool), (*mask.shape[:2], length, length)).copy()
    wide[:, :, places[:, None], places] = mask
    return wide


def counting(case: Case) -> list[str]:
    """Arrays that decide something: all but the bias of the keys, which adds one number to all scores."""
    return [name for name in differentiable(case) if not name.endswith(".bk")]


def expect_every_gradient(subject: Subject, case: Case, pick: int, telling: Callable[[Case, int], Case]) -> None:
    """Every array that counts gets a gradient of its own shape, not 0 on one of a few cases that hide nothing."""
    largest = dict.fromkeys(counting(case), 0.0)
    for attempt in range(TRIES):
        cotangent = case.random(pick + attempt).standard_normal(case["x"].shape)
        names = tuple(name for name, size in largest.items() if not size)
        for name, gradient in subject.gradients(telling(case, pick + 16 * attempt), names, cotangent).items():
            wanted = case[name].shape
            expect(gradient is not None, "no gradient", f"{name} got no gradient, wanted one of shape {wanted}")
            said = f"the gradient of {name} has shape {gradient.shape}, wanted {wanted}"
            expect(gradient.shape == wanted, "shape", said)
            largest[name] = np.abs(gradient).max()
        if all(largest.values()):
            break
    for name, size in largest.items():
        expect_different(size, 0.0, what=f"{name} gets a gradient")
