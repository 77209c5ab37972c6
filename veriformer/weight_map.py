"""Which parameter of a torch module holds which of our weights, transposed or as some of its rows."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from veriformer.calling import UsageError, nearest


@dataclass(frozen=True)
class Place:
    """A parameter of the module, perhaps some of its rows only, perhaps transposed; start and stop are expressions."""

    parameter: str
    start: str = ""
    stop: str = ""
    turned: bool = False


@dataclass(frozen=True)
class Piece:
    """Rows start to stop of a parameter, and the array for them."""

    ours: str
    start: int
    stop: int
    array: Any


_PLACE = re.compile(r"([A-Za-z_][\w.]*?)(?:\[([^:\]]*):([^:\]]*)\])?(\.T)?")
_OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
}  # fmt: skip


def read_map(texts: Mapping[str, str], known: Sequence[str]) -> dict[str, Place]:
    """The places of a map such as {"wq": "q_proj.weight.T", "bk": "in_proj_bias[d:2*d]"}.

    Raises UsageError for text that is no place, for a weight that is not known, naming the nearest, and
    where a matrix is missing.
    """
    for ours in texts:
        if ours not in known:
            raise UsageError(f"map: {ours!r} is no weight here{nearest(ours, list(known))}")
    lacking = [name for name in known if name.startswith("w") and name not in texts]
    if lacking:
        raise UsageError(f"map: {lacking[0]!r} is missing; wanted {', '.join(known)}, biases as far as there are any")
    return {ours: _place(ours, text) for ours, text in texts.items()}


def _place(ours: str, text: str) -> Place:
    found = _PLACE.fullmatch(text.strip())
    if found is None:
        wanted = "wanted a parameter such as q_proj.weight.T or in_proj_weight[0:d].T"
        raise UsageError(f"map: {ours!r}: cannot read {text!r}; {wanted}")
    parameter, start, stop, turned = found.groups()
    return Place(parameter, (start or "").strip(), (stop or "").strip(), turned is not None)


def module_weights(
    module: Any, places: Mapping[str, Place], params: Mapping[str, Any], sizes: Mapping[str, int]
) -> dict[str, Any]:
    """The module's parameters, by their dotted names, made of our weights; an absent bias is 0.

    Raises UsageError for a parameter that does not exist (naming the nearest), that nothing reaches or
    that has another shape, and NotImplementedError for a bias without a place.
    """
    for ours in params:
        if ours not in places:
            raise NotImplementedError(f"map has no entry for {ours!r}, which the module is taken to lack")
    wanted = dict(module.named_parameters())
    pieces: dict[str, list[Piece]] = {}
    for ours, place in places.items():
        if place.parameter in wanted:
            piece = _piece(ours, place, wanted[place.parameter], params.get(ours), sizes)
            pieces.setdefault(place.parameter, []).append(piece)
        elif ours in params:
            where = f"the module has no parameter {place.parameter!r}{nearest(place.parameter, list(wanted))}"
            raise UsageError(f"map: {ours!r}: {where}")
    for name in wanted:
        if name not in pieces:
            raise UsageError(f"map: nothing reaches the module's {name!r}; wanted an entry whose value is {name!r}")
    return {name: _joined(name, wanted[name], parts) for name, parts in pieces.items()}


def _piece(ours: str, place: Place, target: Any, array: Any, sizes: Mapping[str, int]) -> Piece:
    start, stop = _row(ours, place.start, sizes, 0), _row(ours, place.stop, sizes, target.shape[0])
    if array is None:
        return Piece(ours, start, stop, target.new_zeros((max(stop - start, 0), *target.shape[1:])))
    return Piece(ours, start, stop, array.T if place.turned else array)


def _joined(name: str, target: Any, pieces: list[Piece]) -> Any:
    """One parameter of its rows, which the pieces must cover without a gap."""
    import torch

    at, width = 0, tuple(target.shape[1:])
    pieces = sorted(pieces, key=lambda piece: piece.start)
    for piece in pieces:
        shape, wanted = tuple(piece.array.shape), (piece.stop - piece.start, *width)
        if piece.start != at:
            raise UsageError(f"map: {piece.ours!r} starts at row {piece.start} of {name!r}, wanted row {at}")
        if shape != wanted:
            said = f"map: {piece.ours!r} gives {name!r} the shape {shape}, wanted {wanted}"
            if shape[::-1] == wanted:
                raise UsageError(f"{said}; is .T missing, or too many?")
            raise ValueError(
                f"{said}; a module that has no such sizes declares value_width=equal or grouped_heads=false"
            )
        at = piece.stop
    if at != target.shape[0]:
        raise UsageError(f"map: {name!r} has {target.shape[0]} rows, of which only {at} are reached")
    return pieces[0].array if len(pieces) == 1 else torch.cat([piece.array for piece in pieces])


def _row(ours: str, text: str, sizes: Mapping[str, int], default: int) -> int:
    """The row that an expression such as 2*d or (H+G)*D stands for."""
    if not text:
        return default

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.Name) and node.id in sizes:
            return sizes[node.id]
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        raise SyntaxError

    try:
        return value(ast.parse(text, mode="eval").body)
    except SyntaxError:
        wanted = f"wanted numbers and {', '.join(sizes)}, joined by + - * //"
        raise UsageError(f"map: {ours!r}: cannot read {text!r}; {wanted}") from None
