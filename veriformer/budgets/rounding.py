"""Which rounding each aten operation makes, and a dispatch mode that makes it in several versions.

The error of a result y, in units of u_acc |y| unless said otherwise; |y| and |x| are the exact version's:

    + -                     1
    * /                     1 and 2; 0 by powers of two; 1 more by other numbers, which may be rounded
    exp pow                 C + 2 |log y|, as base 2 multiplies the argument by a rounded log2(e)
    sin cos erf             C, absolute
    tanh sigmoid backward   C |gradient|
    other functions         C
    sum of n terms          g(n) Σ|x| u_acc, one more for products, and for a mean; matrix products likewise
    tables of constants     C + 2 |log c|, as they may be computed as exp(log c)

and nothing for views, comparisons, selections, maxima, negation. growth "typical": sqrt(n) sqrt(Σ x²).

When an operation takes a value up it is stored, which costs u_mid |y| (and underflow) in the unfused
computation. Means are statistics and stay in the accumulator. Products of arrays that go straight into a
sum cost u_mid Σ|x| there: their factors, or they, may have been stored. A sum, a scaled value and a matrix
product may overflow the dtype they are stored in: what follows is undetermined.

What an algorithm may do otherwise than the reference's lines: `veriformer.budgets.roles`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from veriformer.budgets import roles
from veriformer.budgets.arguments import (
    chosen,
    either,
    has_floats,
    has_versions,
    lifted,
    over_last,
    power_of_two,
    table_rounding,
)
from veriformer.budgets.directions import directions
from veriformer.budgets.precision import C, Precision
from veriformer.budgets.replicas import Due, Replicas, Rows, Stack, together


class Rounding(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Carries every operation out on all versions, and moves each inexact result, except in the first version.

    backward: whether autograd runs; set by who runs it.
    Raises NotImplementedError for an operation that has no rule here.
    """

    def __init__(self, precision: Precision, runs: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.p, self._directions = precision, directions(runs)
        self.backward, self._count = False, 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No, because that would import torch.compile, which takes a second."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One operation, of versions or of constants that the function makes itself."""
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        rule = _RULES.get(name) or (_ROUNDED.get(name) if has_floats(args) else None)  # whole numbers are exact
        return self._exact(name, func, args, kwargs) if rule is None else rule(self, func, args, kwargs)

    # --- values on their way into an operation ----------------------------------------------------

    def shifts(self, value: Rows, amplitude: Rows) -> Rows:
        """Errors of this amplitude, independent of all before."""
        self._count += 1
        return self._directions.shifts(value, amplitude, self._count)

    def settle(self, x: Replicas, *, store: bool = True) -> None:
        """Make the rounding that is due."""
        due, x.due = x.due, Due()
        unit = due.store if store else 0.0
        absolute = isinstance(due.own, torch.Tensor)
        if not x.rows.numel() or not (absolute or due.own or unit):
            return
        y = x.rows[0]
        size = y.abs()
        amplitude = size * unit + due.own if absolute else size * (unit + due.own * self.p.u_acc)
        least = size.clamp(max=due.tiny if unit else self.p.eta_acc)
        shifts = self.shifts(y, torch.maximum(amplitude, least).nan_to_num_(0.0, 0.0, 0.0))
        if due.bounded:
            shifts = self._within_range(size, shifts, self.p.largest if unit else self.p.largest_acc)
        x.rows = x.rows + shifts
        x.later = None if x.later is None else x.later + shifts

    def _within_range(self, size: Rows, shifts: Rows, largest: float) -> Rows:
        """NaN, to which infinity leads, where a dtype that may hold the value ends."""
        if float(size.max()) < largest:
            return shifts
        return roles.undetermined(shifts, (size >= largest) & size.isfinite())

    def fetch(self, x: Replicas) -> Rows:
        """The rows of a settled value: in the backward, those that it finds."""
        self.settle(x)
        return x.later if self.backward and x.later is not None else x.rows

    def _stacked(self, args: Any) -> list[Any]:
        """Arguments with every Replicas, also in lists, as the stack of its versions."""
        return [
            Stack(self.fetch(a)) if isinstance(a, Replicas) else self._stacked(a) if has_versions(a) else a
            for a in args
        ]

    def _stored(self, own: float | Rows = 0.0, *, bounded: bool = False, product: bool = False) -> Due:
        """The rounding of a result that is stored between two steps."""
        return Due(own, self.p.u_store, self.p.eta_mid, bounded, product)

    def _typical(self) -> bool:
        return self.p.growth == "typical"

    # --- exact operations -------------------------------------------------------------------------

    def _exact(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """Operations that round nothing."""
        if not has_versions(args):
            return func(*args, **kwargs)
        if name in _LOOKS:
            return func(*tree_map(lambda a: self.fetch(a)[0] if isinstance(a, Replicas) else a, list(args)), **kwargs)
        if name not in _EXACT and has_floats(args):
            raise NotImplementedError(
                f"perturbed: {func} has no rounding rule; write the function with other operations, "
                "or add a rule to veriformer.budgets.rounding"
            )
        found = together(func, self._stacked(args), kwargs)
        return type(found)(map(Replicas, found)) if isinstance(found, (tuple, list)) else Replicas(found)

    def _same(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Views and copies: all that is known of a value goes along."""
        x = args[0]
        if not isinstance(x, Replicas):
            return func(*args, **kwargs)
        self.settle(x)

        def shaped(rows: Rows | None) -> Any:
            return None if rows is None else together(func, [Stack(rows), *args[1:]], kwargs)

        known = {name: shaped(getattr(x, name)) for name in ("later", "mass", "again", "excess", "unknown", "leading")}
        return Replicas(shaped(x.rows), role=x.role, terms=x.terms, **known)

    def _negated(self, func: Any, args: Any, kwargs: Any) -> Any:
        """neg: magnitudes stay."""
        made = self._same(func, args, kwargs)
        if isinstance(made, Replicas):
            made.role = None
            made.mass, made.excess = (rows if rows is None else rows.abs() for rows in (made.mass, made.excess))
        return made

    def _selected(self, func: Any, args: Any, kwargs: Any) -> Any:
        """where: beside a constant, what is known of a value stays; a product stays one."""
        condition, *pair = args
        versions = [x for x in pair if isinstance(x, Replicas)]
        if len(versions) != 1 or any(x.ndim for x in pair if x is not versions[0]):
            made = self._exact("where", func, args, kwargs)
            if versions:
                made.again = chosen(condition, *(x.again if isinstance(x, Replicas) else None for x in pair))
            return self._disputed(made, condition)
        x = versions[0]
        if isinstance(condition, Replicas) or not x.due.product:
            self.settle(x)
        (where,) = self._stacked([condition])

        def picked(rows: Rows | None) -> Any:
            if rows is None:
                return None
            return together(func, [where, *(Stack(rows) if a is x else a for a in pair)], kwargs)

        known = {name: picked(getattr(x, name)) for name in ("later", "again", "excess")}
        return self._disputed(Replicas(picked(x.rows), due=x.due, role=x.role, **known), condition, x)

    def _disputed(self, made: Any, condition: Any, x: Replicas | None = None) -> Any:
        """Undetermined where it is unknown what is selected, or where x is and versions select otherwise."""
        if not isinstance(condition, Replicas):
            return made
        if condition.unknown is not None:
            made.rows = roles.undetermined(made.rows, condition.unknown[0])
        if x is not None and bool(x.rows[-1:].isnan().any()):
            split = condition.rows.any(0) & ~condition.rows.all(0)
            made.rows = roles.undetermined(made.rows, split & x.rows[-1].isnan())
        return made

    def _highest(self, func: Any, args: Any, kwargs: Any) -> Any:
        """amax."""
        made = self._exact("amax", func, args, kwargs)
        if isinstance(made, Replicas):
            made.role = roles.Peak()
        return made

    def _compared(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Comparisons, and what is made of them: an undetermined number leaves it unknown what is selected."""
        name = func.overloadpacket.__name__
        made = self._exact(name, func, args, kwargs)
        versions = [x for x in args if isinstance(x, Replicas)]
        if not versions:
            return made
        parts = [x.rows[-1:].isnan() if x.dtype.is_floating_point else x.unknown for x in versions]
        there = [part[0].expand(made.shape) for part in parts if part is not None and bool(part.any())]
        made.unknown = torch.stack(there).any(0)[None] if there else None
        if name == "eq" and self.backward:
            made.role = roles.places(args[0]) or roles.places(args[1])
        return made

    # --- elementwise operations -------------------------------------------------------------------

    def _elementary(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Functions of one number, and derivatives that are operations of their own."""
        name, args = func.overloadpacket.__name__, [lifted(a) for a in args]
        made = Replicas(together(func, self._stacked(args), kwargs))
        made.due = self._stored(self._own(name, made.rows[0], args))
        if name == "exp":
            roles.exponential(self, made, args[0])
        elif name == "sqrt":
            roles.root(self, made, args[0])
        return made

    def _own(self, name: str, y: Rows, args: Any) -> Any:
        """The rounding of an elementary function."""
        if name in ("exp", "exp2", "expm1", "pow"):
            size = y.abs()
            logs = size.log().nan_to_num_(0.0, 0.0, 0.0).abs_()
            return (C + 2 * logs) * size * self.p.u_acc
        if name in ("sin", "cos", "erf"):
            return torch.full_like(y, C * self.p.u_acc)
        if name in ("tanh_backward", "sigmoid_backward"):
            return (args[0].rows[0].abs() * (C * self.p.u_acc)).expand_as(y)
        return 1.0 if name == "rsub" else float(C)

    def _added(self, func: Any, args: Any, kwargs: Any) -> Any:
        """add and sub."""
        a, b = (lifted(x) for x in args[:2])
        made = Replicas(together(func, self._stacked([a, b]), kwargs))
        both = isinstance(a, Replicas) and isinstance(b, Replicas)
        made.due = self._stored(1.0, bounded=both)
        made.excess = either(*(x.excess for x in (a, b) if isinstance(x, Replicas)))
        made.again = either(*(x.again for x in (a, b) if isinstance(x, Replicas)))
        made.leading = either(*(x.leading for x in (a, b) if isinstance(x, Replicas) and x.shape == made.shape))
        if isinstance(a, Replicas) and isinstance(b, Replicas):
            if func.overloadpacket.__name__ == "sub":
                roles.difference(self, made, a, b)
        elif isinstance(a, Replicas) and isinstance(b, (int, float)):
            roles.shifted(made, a, b)
        return made

    def _multiplied(self, func: Any, args: Any, kwargs: Any) -> Any:
        """mul and div."""
        if any(isinstance(x, Replicas) and isinstance(x.role, roles.Places) for x in args):
            return Replicas(roles.peak_gradient(self, together(func, self._stacked(args), kwargs)))
        a, b = (lifted(x) for x in args)
        made = Replicas(together(func, self._stacked([a, b]), kwargs))
        times = func.overloadpacket.__name__ == "mul"
        if isinstance(a, Replicas) and isinstance(b, Replicas):
            if a.dtype != torch.bool and b.dtype != torch.bool:
                made.due = self._stored((1.0 if times else 2.0) + table_rounding(args), product=times)
                (roles.product if times else roles.quotient)(self, made, a, b)
            return made
        x, other = (a, b) if isinstance(a, Replicas) else (b, a)
        if isinstance(other, (int, float)):
            self._scaled(made, x, float(other), times)
        return made

    def _scaled(self, made: Replicas, x: Replicas, number: float, times: bool) -> None:
        """A product with a number, or a quotient. A gradient that only passes is rounded all the same."""
        if not power_of_two(number):
            made.due = self._stored((1.0 if times else 2.0) + (not number.is_integer()), bounded=True)
        elif self.backward and number == 1:
            made.due = Due(1.0)
        roles.scaled(made, x, number if times else 1 / number if number else 0.0)

    # --- sums -------------------------------------------------------------------------------------

    def _summed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """sum and mean."""
        if not args[0].dtype.is_floating_point:
            return self._exact("sum", func, args, kwargs)
        x, mean = lifted(args[0]), func.overloadpacket.__name__ == "mean"
        units, rows = self._terms(x)

        def over(rows: Rows) -> Rows:
            found: Rows = together(func, [Stack(rows), *args[1:]], kwargs)
            return found

        share = x.role if isinstance(x.role, roles.Share) and (not x.role.last_axis or over_last(x, args)) else None
        sizes = x.mass if share is not None and x.mass is not None else rows[:1].abs()
        made, total = Replicas(over(rows)), over(sizes)
        n = x.numel() // max(made.numel(), 1)
        made.due = self._sum(n, total, sizes, over, units + mean * self.p.u_acc, mean)
        if share is not None:
            made.due.own = made.due.own + total[0] * share.unit
        if x.excess is not None:
            made.due.own = made.due.own + over(x.excess)[0]
        if mean:
            roles.mean(self, made, x)
        else:
            roles.total(self, made, x, total)
        if mean or isinstance(x.role, roles.Square):
            made.due.store = 0.0
        if self.backward and not over_last(x, args):
            made.leading = total * n
        return made

    def _terms(self, x: Replicas) -> tuple[float, Rows]:
        """What each term of a sum adds to its error, and the terms; products are taken as they are."""
        due = x.due
        if not due.product or x.later is not None or isinstance(due.own, torch.Tensor):
            return 0.0, self.fetch(x)
        return due.own * self.p.u_acc + due.store, x.rows

    def _sum(self, n: int, total: Rows, sizes: Rows, over: Any, units: float, mean: bool) -> Due:
        """The rounding of a sum of n terms with these magnitudes."""
        p = self.p
        own = total[0] * (units + (0.0 if self._typical() else p.g(n) * p.u_acc))
        if self._typical():
            roots = over(sizes * sizes).sqrt()[0] * (n**-0.5 if mean else 1.0)
            own = own + roots * (p.g(n) * p.u_acc)
        own = torch.maximum(own, total[0].clamp(max=n * p.eta_acc))
        return self._stored(own, bounded=True)

    def _matrix(self, func: Any, args: Any, kwargs: Any) -> Any:
        """mm and bmm."""
        a, b = self._stacked([lifted(x) for x in args])
        p, n = self.p, a.rows.shape[-1]
        made = Replicas(together(func, [a, b], kwargs))
        sizes = [x.rows[:1].abs() for x in (a, b)]
        total = sizes[0] @ sizes[1]
        errors = ((sizes[0] ** 2) @ (sizes[1] ** 2)).sqrt() if self._typical() else total
        own = torch.maximum(errors[0] * (p.g(n) * p.u_acc), total[0].clamp(max=n * p.eta_acc))
        made.due = self._stored(own, bounded=True)
        if self.backward:
            made.mass, made.terms = total, n
        else:
            made.again = own[None]
        return made

    def _summed_up(self, func: Any, args: Any, kwargs: Any) -> Any:
        """cumsum: every partial sum is a sum, with the error of the last one's number of terms."""
        x, axis = lifted(args[0]), args[1]
        made = Replicas(together(func, self._stacked([x, axis]), kwargs))
        sizes = together(func, [Stack(x.rows[:1].abs()), axis], kwargs)
        made.due = self._stored(sizes[0] * (self.p.g(x.shape[axis]) * self.p.u_acc))
        return made

    def _added_at(self, func: Any, args: Any, kwargs: Any) -> Any:
        """index_add: rows added up where an index repeats."""
        into, axis, index, source = args
        stacks = self._stacked([lifted(into), lifted(source)])

        def over(into: Stack, source: Stack) -> Rows:
            found: Rows = together(func, [into, axis, index, source], kwargs)
            return found

        n = 1 + (int(index.bincount().max()) if index.numel() else 0)
        sizes = over(*(Stack(x.rows[:1].abs()) for x in stacks))
        return Replicas(over(*stacks), due=self._stored(sizes[0] * (self.p.g(n) * self.p.u_acc)))


_EXACT = frozenset(
    """abs all amax amin any argmax argmin bitwise_and bitwise_not bitwise_or bitwise_xor cat ceil clamp clamp_max
    clamp_min constant_pad_nd copysign diagonal eq floor gather ge gt index index_add index_select isfinite isinf
    isnan le logical_and logical_not logical_or logical_xor lt masked_fill max maximum min minimum ne relu repeat
    roll round scatter sign sort split split_with_sizes stack sum threshold_backward topk tril triu trunc unbind
    where""".split()
)
_LOOKS = frozenset(
    """_local_scalar_dense empty_like equal full_like is_nonzero new_empty new_empty_strided new_full new_ones
    new_zeros nonzero ones_like zeros_like""".split()
)
_RULES: dict[str, Any] = {
    **dict.fromkeys(
        """alias clone contiguous detach expand flip lift_fresh permute reshape _reshape_alias select select_backward
        slice slice_backward squeeze t _to_copy transpose unsqueeze _unsafe_view view""".split(),
        Rounding._same,
    ),
    "amax": Rounding._highest,
    **dict.fromkeys("bitwise_and bitwise_not bitwise_or eq ge gt le lt ne".split(), Rounding._compared),
    "neg": Rounding._negated,
    "where": Rounding._selected,
}
_ROUNDED: dict[str, Any] = {
    **dict.fromkeys(
        """cos erf erfc exp exp2 expm1 log log1p log2 pow reciprocal rsqrt rsub sigmoid sigmoid_backward sin sqrt
        tanh tanh_backward""".split(),
        Rounding._elementary,
    ),
    **dict.fromkeys(("add", "sub"), Rounding._added),
    **dict.fromkeys(("mul", "div"), Rounding._multiplied),
    **dict.fromkeys(("sum", "mean"), Rounding._summed),
    **dict.fromkeys(("mm", "bmm"), Rounding._matrix),
    "cumsum": Rounding._summed_up,
    "index_add": Rounding._added_at,
}
