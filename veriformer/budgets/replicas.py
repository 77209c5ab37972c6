"""A torch tensor that stands for several versions of itself, and aten operations on all of them at once.

`Replicas` has the shape of one version; its `rows` have one more axis in front: row 0 is the exact
version, the others are perturbed ones. A single row stands for versions that are all equal. Autograd
works above it and sees one ordinary tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

Rows = torch.Tensor


@dataclass
class Due:
    """A rounding that is made when an operation takes the value up; sums take products as they are.

    own: that of the operation, in units of u_acc |y|, or in absolute numbers. store, tiny: unit roundoff
    and underflow of storing the value. bounded: the dtype's range counts. product: of two arrays.
    """

    own: float | Rows = 0.0
    store: float = 0.0
    tiny: float = 0.0
    bounded: bool = False
    product: bool = False


class Replicas(torch.Tensor):
    """The versions of one tensor, and what is known of how they came about.

    rows[R, …]: the versions. due: the rounding still to be made. later[R, …]: what the backward finds in
    place of rows, where an algorithm recomputes or saves coarsely. role: which part of a softmax or norm
    this is (`roles`). mass[1, …], terms: magnitudes that a sum was made of, even where they cancelled, and
    how many. again[1, …]: the error of a sum that is taken once more.
    excess[1, …]: what an algorithm may leave out of a mean over the last axis. unknown[1, …]: of booleans,
    where the numbers they compare are undetermined. leading[1, …]: of gradients that the backward sums over rows, the
    number of rows times the sum of magnitudes.
    """

    rows: Rows
    due: Due
    later: Rows | None
    role: Any
    mass: Rows | None
    terms: int
    again: Rows | None
    excess: Rows | None
    unknown: Rows | None
    leading: Rows | None

    @staticmethod
    def __new__(cls, rows: Rows, **known: Any) -> Replicas:
        """A tensor of the shape of one row, without storage of its own."""
        made: Replicas = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, rows.shape[1:], dtype=rows.dtype, device=rows.device
        )
        return made

    def __init__(
        self,
        rows: Rows,
        *,
        due: Due | None = None,
        later: Rows | None = None,
        role: Any = None,
        mass: Rows | None = None,
        terms: int = 0,
        again: Rows | None = None,
        excess: Rows | None = None,
        unknown: Rows | None = None,
        leading: Rows | None = None,
    ) -> None:
        self.rows, self.due, self.later = rows, due or Due(), later
        self.role, self.mass, self.terms, self.again = role, mass, terms, again
        self.excess, self.unknown, self.leading = excess, unknown, leading

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Never reached: an active `Rounding` takes every operation first."""
        raise RuntimeError(f"{func} on the versions of a tensor outside of perturbed()")


def rank(x: Any) -> int:
    """Number of axes of one version."""
    return x.ndim if isinstance(x, torch.Tensor) else 0


def spread(rows: Rows, count: int) -> Rows:
    """A single row repeated, where an operation cannot broadcast it."""
    return rows if rows.shape[0] == count else rows.expand(count, *rows.shape[1:])


def together(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """func on all versions at once; in args the rows of every Replicas are a `Stack`."""
    name = func.overloadpacket.__name__
    special = _SPECIAL.get(name)
    if special is not None:
        return special(func, args, kwargs)
    places = _AXES.get(name)
    if places is not None:
        return _along(func, args, kwargs, places)
    return mapped(func, args, kwargs)


class Stack:
    """Rows on their way into an operation: an argument that has the extra axis."""

    __slots__ = ("rows",)

    def __init__(self, rows: Rows) -> None:
        self.rows = rows


def mapped(func: Any, args: Any, kwargs: Any) -> Any:
    """func on one version after the other, for operations that have no rule of their own here."""
    leaves, spec = tree_flatten((list(args), kwargs))
    count = max(leaf.rows.shape[0] for leaf in leaves if isinstance(leaf, Stack))

    def version(i: int) -> Any:
        chosen = [leaf.rows[min(i, len(leaf.rows) - 1)] if isinstance(leaf, Stack) else leaf for leaf in leaves]
        some, named = tree_unflatten(chosen, spec)
        return func(*some, **named)

    found = [version(i) for i in range(count)]
    if isinstance(found[0], torch.Tensor):
        return torch.stack(found)
    return type(found[0])(torch.stack(parts) for parts in zip(*found, strict=True))


def _elementwise(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Operations that broadcast: the extra axis is kept in front of all others."""
    most = max(_rank(a) for a in args)
    return func(*(_lifted(a, most) for a in args), **kwargs)


def _rank(a: Any) -> int:
    return a.rows.ndim - 1 if isinstance(a, Stack) else rank(a)


def _lifted(a: Any, most: int) -> Any:
    if not isinstance(a, Stack):
        return a
    rows, missing = a.rows, most - a.rows.ndim + 1
    return rows.reshape(rows.shape[0], *(1,) * missing, *rows.shape[1:]) if missing else rows


def _along(func: Any, args: Sequence[Any], kwargs: dict[str, Any], places: tuple[int, ...]) -> Any:
    """Operations on one tensor along axes, which move by one."""
    first, axes = args[0], _rank(args[0])
    if axes == 0 or any(isinstance(a, Stack) for a in args[1:]):
        return mapped(func, args, kwargs)
    given = [first.rows, *args[1:]]
    for place in places:
        if place < len(given):
            given[place] = _moved(given[place], axes)
    return func(*given, **kwargs)


def _reduced(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Reductions over some axes, or over all where none is named."""
    if len(args) == 1 and "dim" not in kwargs:
        rows = args[0].rows
        return getattr(torch, func.overloadpacket.__name__)(rows.reshape(rows.shape[0], -1), 1)
    return _along(func, args, kwargs, (1,))


def _moved(axis: Any, axes: int) -> Any:
    if isinstance(axis, int):
        return axis % axes + 1
    axis = range(axes) if axis is None or len(axis) == 0 else axis
    return [one % axes + 1 for one in axis]


def _shaped(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    rows = args[0].rows
    return rows.reshape(rows.shape[0], *args[1]) if rows.numel() else rows.new_zeros(_full(rows, args[1]))


def _full(rows: Rows, shape: Sequence[int]) -> list[int]:
    return [rows.shape[0], *rows.new_empty((0, *rows.shape[1:]))[:0].sum(0).reshape(tuple(shape)).shape]


def _expanded(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return _lifted(args[0], len(args[1])).expand(-1, *args[1])


def _permuted(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    axes = _rank(args[0])
    return args[0].rows.permute(0, *(axis % axes + 1 for axis in args[1]))


def _turned(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return args[0].rows.transpose(-1, -2) if _rank(args[0]) == 2 else args[0].rows


def _unsqueezed(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return args[0].rows.unsqueeze(args[1] % (_rank(args[0]) + 1) + 1)


def _squeezed(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    rows = args[0].rows
    if len(args) == 1:
        return rows.reshape(rows.shape[0], *(n for n in rows.shape[1:] if n != 1))
    return _along(func, args, kwargs, (1,))


def _joined(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """cat and stack: every part needs the extra axis, in full."""
    parts = args[0]
    axis = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    count = max(p.rows.shape[0] for p in parts if isinstance(p, Stack))
    axes = _rank(parts[0]) + (func.overloadpacket.__name__ == "stack")
    rows = [spread(p.rows if isinstance(p, Stack) else p[None], count) for p in parts]
    return func(rows, axis % axes + 1)


def _back_into(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """slice_backward, select_backward: zeros of the former shape with the gradient in its place."""
    rows, sizes, axis = args[0].rows, args[1], args[2]
    return func(rows, [rows.shape[0], *sizes], axis % len(sizes) + 1, *args[3:], **kwargs)


def _added_at(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """index_add: rows of the source are added to those that an index, the same for all versions, names."""
    into, axis, index, source = args
    count = max(a.rows.shape[0] for a in (into, source) if isinstance(a, Stack))
    axes = _rank(into)
    into, source = (spread(a.rows if isinstance(a, Stack) else a[None], count) for a in (into, source))
    return func(into.contiguous(), axis % axes + 1, index, source, **kwargs)


def _multiplied(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    a, b = (x.rows if isinstance(x, Stack) else x for x in args)
    return a @ b


_Rule = Callable[[Any, Sequence[Any], dict[str, Any]], Any]

_SPECIAL: dict[str, _Rule] = {
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "_reshape_alias"), _shaped),
    **dict.fromkeys(("slice_backward", "select_backward"), _back_into),
    **dict.fromkeys(("mm", "bmm"), _multiplied),
    **dict.fromkeys(("cat", "stack"), _joined),
    **dict.fromkeys(("sum", "mean", "amax", "amin", "all", "any"), _reduced),
    "expand": _expanded,
    "index_add": _added_at,
    "permute": _permuted,
    "t": _turned,
    "unsqueeze": _unsqueezed,
    "squeeze": _squeezed,
}

_AXES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("cumsum", "flip", "select", "slice", "index_select"), (1,)),
    "transpose": (1, 2),
}

_ELEMENTWISE = """
abs add alias bitwise_and bitwise_not bitwise_or bitwise_xor ceil clamp clamp_max clamp_min clone copysign cos
detach div eq erf erfc exp exp2 expm1 floor ge gt isfinite isinf isnan le log log1p log2 logical_and logical_not
logical_or logical_xor lt masked_fill maximum minimum mul ne neg pow reciprocal relu round rsqrt rsub
sigmoid sign sin sqrt sub tanh tanh_backward sigmoid_backward threshold_backward trunc where
_to_copy contiguous lift_fresh
""".split()
_SPECIAL |= dict.fromkeys(_ELEMENTWISE, _elementwise)
