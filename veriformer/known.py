"""When an expected failure is awake, and which cases it takes out of the search."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from veriformer.calling import UsageError
from veriformer.case import Case
from veriformer.declarations import Expected
from veriformer.law import JUDGED_BESIDE_REFERENCE, ORACLE, Law

SLOW = ("crash", "timeout")
"""Kinds of failure that are slow to provoke: seen once, a search need not see them again."""


NUMERIC = ("value", "not finite", "precision")
"""Kinds of failure that are wrong numbers."""


@dataclass(frozen=True)
class Known:
    """What is known of one law in one dtype. own: entries of the law. spread: of its oracle, that spread."""

    own: tuple[Expected, ...]
    spread: tuple[Expected, ...]
    dtype: str

    @property
    def blind(self) -> Expected | None:
        """The entry that leaves no case to be judged, if there is one."""
        return next((entry for entry in self.own if not entry.where), None)

    def mask(self, arguments: Sequence[Any], operation: str) -> Expected | None:
        """The entry by which a law's case, or another one that it is given, is one of those that are known to fail."""

        def within(where: str) -> bool:
            cases = (one for one in arguments if isinstance(one, Case) and one.operation == operation)
            return any(holds(where, case, self.dtype) for case in cases)

        return next((entry for entry in (*self.own, *self.spread) if entry.where and within(entry.where)), None)

    def cause(self, kind: str) -> Expected | None:
        """The entry of the oracle's that accounts for a failure of this kind: it names it, or wrong numbers if none."""
        same = (entry for entry in self.spread if not entry.where)
        return next((entry for entry in same if (kind == entry.kind if entry.kind else kind in NUMERIC)), None)


def known_of(law: Law, expected: Sequence[Expected], dtype: str, versions: Any) -> Known:
    """The entries that are awake for a law. Wrong numbers spread to laws of numbers, no failure to a contract root."""
    mine = [entry for entry in expected if awake(entry, dtype, versions)]
    oracle = f"{law.operation}/{ORACLE}"
    numbers = law.kind in JUDGED_BESIDE_REFERENCE
    spread = (e for e in mine if e.spreads and e.law == oracle != law.id and not law.root)
    return Known(
        tuple(e for e in mine if e.law == law.id), tuple(e for e in spread if numbers or e.kind in SLOW), dtype
    )


def awake(entry: Expected, dtype: str, versions: Any) -> bool:
    """Whether the conditions of an expected failure hold here.

    Raises UsageError for a version condition that cannot be read.
    """
    for key, wanted in entry.when.items():
        if key == "dtype":
            if dtype not in re.split(r"[,\s]+", wanted):
                return False
            continue
        if key == "device":
            if re.split(r"[:,]", versions.get("device", "cpu"))[0] not in re.split(r"[,\s]+", wanted):
                return False
            continue
        try:
            specifier = SpecifierSet(wanted)
        except InvalidSpecifier:
            raise UsageError(f"Expected({entry.law!r}): when {key}={wanted!r} is no version condition") from None
        if key not in versions or not specifier.contains(versions[key].split("+")[0], prereleases=True):
            return False
    return True


_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.Eq: operator.eq, ast.NotEq: operator.ne,
}  # fmt: skip
_UNARY: dict[type, Callable[..., Any]] = {ast.Not: operator.not_, ast.USub: operator.neg, ast.UAdd: operator.pos}


def holds(condition: str, case: Case, dtype: str) -> bool:
    """Whether a `where` condition over keywords, options and sizes holds, e.g. "causal and scale <= 0".

    axis_length is the length of the axis that the keyword axis names.

    Raises UsageError for anything but names, numbers, comparisons, and, or, not.
    """
    names: dict[str, Any] = {"dtype": dtype, **{word: case[word] for word in case.table.keywords}, **case.sizes()}
    names |= {name: name in case.arrays for name in case.table.options}
    if isinstance(names.get("axis"), int):
        names["axis_length"] = case["x"].shape[names["axis"]]
    try:
        return bool(_evaluate(ast.parse(condition, mode="eval").body, names))
    except (SyntaxError, KeyError, TypeError) as error:
        raise UsageError(f"where={condition!r} cannot be read ({error}); names are {', '.join(names)}") from None


def _evaluate(node: ast.AST, names: dict[str, Any]) -> Any:
    if isinstance(node, ast.BoolOp):
        parts = (_evaluate(part, names) for part in node.values)
        return all(parts) if isinstance(node.op, ast.And) else any(parts)
    if isinstance(node, ast.UnaryOp):
        return _UNARY[type(node.op)](_evaluate(node.operand, names))
    if isinstance(node, ast.Compare):
        return _compare(node, names)
    if isinstance(node, ast.Name):
        return names[node.id]
    if isinstance(node, ast.Constant):
        return node.value
    raise KeyError(type(node).__name__)


def _compare(node: ast.Compare, names: dict[str, Any]) -> bool:
    values = [_evaluate(part, names) for part in (node.left, *node.comparators)]
    for op, left, right in zip(node.ops, values[:-1], values[1:], strict=True):
        if left is None or right is None:
            if not isinstance(op, (ast.Eq, ast.NotEq)) or not _OPERATORS[type(op)](left, right):
                return False
        elif not _OPERATORS[type(op)](left, right):
            return False
    return True
