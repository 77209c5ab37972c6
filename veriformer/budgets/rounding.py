"""Which rounding each aten operation makes, and a dispatch mode that makes it at random.

Amplitude of the error of a result y, in units of u_acc; |y| and sums of |x| are those of the exact version:

    + - by 1            * / by 2, or 1 where the factor is given; 0 for powers of two
    exp pow             C + 2 |log y|: base 2 multiplies the argument by a rounded log2(e)
    other functions     C; sin, cos and derivatives that cancel: C, absolute
    sum of n terms      g(n) Σ|x|, one more if the terms are products; matrix product likewise
    constants           C + 2 |log c|: tables that the function computes itself, such as frequencies

A value between two steps is stored when an operation takes it up, which costs u_mid where the
computation is unfused. Not stored: means (statistics stay in the accumulator). Products that go
straight into a sum: u_mid Σ|x| on the sum, for factors or products that were rounded before.

Algorithms that compute something else than the reference's lines are recognised by how a value came
about (its role), so that the reference need not know of them:

    e = exp(x - y)      backward finds e (1 + u (|x| + |y|)): weights recomputed as exp(s - lse)
    p = e / Σ e         stored in p.u_probability, and so is the gradient of its logarithm
    Σ (Σ x) p           a double sum may be taken the other way round, as rowsum(dO O) is: Σ Σ |x| p counts
    x - mean(x), sqrt(mean c²)      backward finds the statistics rounded to p.saved_statistics
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from veriformer.budgets.precision import C, Precision
from veriformer.budgets.replicas import Replicas, Rows, Stack, together

_WORDS = 1024


class Signs:
    """Errors in units of what they may be, 1 or 1/2: in half of the runs a function of the value, in half of the place.

    Real rounding repeats itself on equal values (constant and blocky arrays) and does not where equal
    values came from different terms; either alone would miss the other.
    """

    def __init__(self, runs: int) -> None:
        self.keyed, self.free = runs - runs // 2, runs // 2
        self.random = torch.Generator().manual_seed(20240607)
        self.table = torch.cat([torch.zeros(1, _WORDS, dtype=torch.float64), self._draw(self.keyed, _WORDS)])
        self.reel = self._draw(self.free, 1 << 14)

    def _draw(self, runs: int, count: int) -> Rows:
        """Directions for some runs, in each column as many of one kind as of the other.

        Every error is then tried both ways. Two sizes, or else two equal errors would cancel in all
        runs whenever their columns happen to be opposite.
        """
        ranks, random = (
            torch.rand(runs, count, generator=self.random).argsort(0),
            torch.rand(count, generator=self.random),
        )
        signs = torch.where(2 * ranks + (random < 0.5) < runs, 1.0, -1.0).double()
        return signs * torch.where(torch.rand(runs, count, generator=self.random) < 0.5, 1.0, 0.5).double()

    def shifts(self, value: Rows, amplitude: Rows, salt: int) -> Rows:
        """Errors of this amplitude for all versions; none for the first. value, amplitude: one version."""
        if not value.numel():
            return value[None]
        n, salt = value.numel(), (salt * 0x9E3779B1) & 0xFFFFFFFF
        found = torch.empty(1 + self.keyed + self.free, n, dtype=torch.float64)
        # 24 bits of the mantissa: x, -x and 2 x round alike, and so do sums equal but for their order.
        words = value.reshape(-1).contiguous().view(torch.int64)
        words = words.add(1 << 27).bitwise_right_shift_(28).bitwise_and_(0xFFFFFF).bitwise_xor_(salt & 0xFFFFFF)
        words = words.mul_(2654435761).bitwise_right_shift_(20).bitwise_and_(_WORDS - 1)
        torch.index_select(self.table, 1, words, out=found[: self.keyed + 1])
        while self.reel.shape[1] < 2 * n:
            self.reel = torch.cat([self.reel, self._draw(self.free, self.reel.shape[1])], 1)
        start = salt % (self.reel.shape[1] - n)
        found[self.keyed + 1 :] = self.reel[:, start : start + n]
        found *= amplitude.reshape(-1)
        return found.view(-1, *value.shape)


@cache
def signs_for(runs: int) -> Signs:
    """The signs for this many runs, drawn once."""
    return Signs(runs)


class Rounding(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Carries every operation out on all versions, and moves each inexact result but the first version's."""

    def __init__(self, precision: Precision, runs: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.p, self.signs = precision, signs_for(runs)
        self.backward, self.count = False, 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No, because that would import torch.compile, which takes a second."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        rule = _RULES.get(name)
        if rule is None:
            return self._other(name, func, args, kwargs)
        return rule(self, func, args, kwargs)

    def _other(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """Operations that round nothing."""
        if not any(isinstance(a, Replicas) for a in args) and not _holds(args):
            return func(*args, **kwargs)
        if name in _LOOKS:
            return func(*tree_map(lambda a: self.fetch(a)[0] if isinstance(a, Replicas) else a, list(args)), **kwargs)
        if name not in _EXACT:
            raise NotImplementedError(f"perturbed: no rounding rule for {func}; add one in veriformer.budgets.rounding")
        return _wrapped(together(func, self._stacks(args), kwargs))

    # --- values on their way into an operation ----------------------------------------------------

    def settle(self, x: Replicas, store: bool = True) -> None:
        """Make the rounding that a value is still due."""
        unit = x.unit if store else 0.0
        if x.rows.numel() and (isinstance(x.acc, torch.Tensor) or x.acc or unit):
            y = x.rows[0]
            size = y.abs()
            eta = self.p.eta_mid if unit else self.p.eta_acc
            if isinstance(x.acc, torch.Tensor):
                amplitude = size * unit + x.acc if unit else x.acc
            else:
                amplitude = size * (unit + x.acc * self.p.u_acc)
            amplitude = torch.maximum(amplitude, size.clamp(max=eta)).nan_to_num_(0.0, 0.0, 0.0)
            self.count += 1
            shifts = self.signs.shifts(y, amplitude, self.count)
            if x.ranged:
                self._overflow(size, shifts, unit)
            x.rows = x.rows + shifts
            x.later = None if x.later is None else x.later + shifts
        x.acc, x.unit, x.product = 0.0, 0.0, False

    def _overflow(self, size: Rows, shifts: Rows, unit: float) -> None:
        """One version finds NaN, to which infinity leads, where a dtype that may hold the value ends."""
        largest = self.p.largest if unit else self.p.largest_acc
        if float(size.max()) >= largest:
            shifts[-1] = torch.where((size >= largest) & size.isfinite(), math.nan, shifts[-1])

    def fetch(self, x: Any) -> Any:
        """The rows of a settled value, in the backward those that it finds."""
        self.settle(x)
        return x.later if self.backward and x.later is not None else x.rows

    def _stacks(self, args: Any) -> list[Any]:
        return [
            Stack(self.fetch(a)) if isinstance(a, Replicas) else
            [Stack(self.fetch(b)) if isinstance(b, Replicas) else b for b in a] if _is_list(a) else a
            for a in args
        ]  # fmt: skip

    # --- rules ------------------------------------------------------------------------------------

    def structure(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Views and copies: all that is known of a value goes along."""
        x = args[0]
        if not isinstance(x, Replicas):
            return func(*args, **kwargs)
        self.settle(x)

        def shaped(rows: Rows | None) -> Any:
            return None if rows is None else together(func, [Stack(rows), *args[1:]], kwargs)

        made = Replicas(shaped(x.rows), later=shaped(x.later), role=x.role, mass=shaped(x.mass))
        made.excess = shaped(x.excess)
        return made

    def negated(self, func: Any, args: Any, kwargs: Any) -> Any:
        made = self.structure(func, args, kwargs)
        if isinstance(made, Replicas):
            made.mass = None if made.mass is None else made.mass.abs()
            made.excess = None if made.excess is None else made.excess.abs()
            made.role = None
        return made

    def selected(self, func: Any, args: Any, kwargs: Any) -> Any:
        """where: exact. Beside a constant, a part of a softmax or norm stays one, and a product one."""
        if not _holds(args):
            return func(*args, **kwargs)
        condition, a, b = args
        kept = [x for x in (a, b) if isinstance(x, Replicas)]
        lone = kept[0] if len(kept) == 1 and (a if kept[0] is b else b).ndim == 0 else None
        if lone is None:
            return _wrapped(together(func, self._stacks(args), kwargs))
        if isinstance(condition, Replicas) or not lone.product:
            self.settle(lone)
        where = Stack(condition.rows) if isinstance(condition, Replicas) else condition

        def picked(rows: Rows | None) -> Any:
            if rows is None:
                return None
            return together(func, [where, *(Stack(rows) if x is lone else x for x in (a, b))], kwargs)

        made = Replicas(picked(lone.rows), later=picked(lone.later), role=lone.role)
        made.acc, made.unit, made.product, made.excess = lone.acc, lone.unit, lone.product, picked(lone.excess)
        return made

    def rounded(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Elementwise operations."""
        if not _inexact(args):
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        args = [_lifted(a) for a in args]
        made = Replicas(together(func, self._stacks(args), kwargs))
        made.acc, made.unit = self._elementary(name, made.rows[:1], args), self.p.u_store
        return made

    def _elementary(self, name: str, y: Rows, args: Any) -> Any:
        """The amplitude of an elementwise operation."""
        if name in ("add", "sub", "rsub"):
            return 1.0
        if name in ("exp", "exp2", "expm1", "pow"):
            logs = torch.nan_to_num(y.abs().log(), nan=0.0, posinf=0.0, neginf=0.0).abs()
            return (C + 2 * logs)[0] * y[0].abs() * self.p.u_acc
        if name in ("sin", "cos", "erf"):
            return torch.full_like(y[0], C * self.p.u_acc)
        if name in ("tanh_backward", "sigmoid_backward"):
            return (args[0].rows[0].abs() * (C * self.p.u_acc)).expand(y.shape[1:])
        return float(C)

    def multiplied(self, func: Any, args: Any, kwargs: Any) -> Any:
        """mul and div."""
        if not _inexact(args):
            return func(*args, **kwargs)
        a, b = args
        if _power_of_two(b) or _power_of_two(a):
            return self._scaled(func, args, kwargs)
        times = func.overloadpacket.__name__ == "mul"
        constant = max(_constant(a), _constant(b))
        a, b = _lifted(a), _lifted(b)
        made = Replicas(together(func, self._stacks([a, b]), kwargs))
        if "places" in (_kind(a), _kind(b)):
            # The gradient of a subtracted peak is 0; its errors would cancel those that a kernel makes. Those of
            # the reference itself count where it is no more precise than the kernel.
            return Replicas(_unrelated(made.rows) if self.p.storage == "float64" else made.rows[:1])
        if _is_bool(args[0]) or _is_bool(args[1]):
            return made
        made.acc, made.unit = (1.0 if times else 2.0) + constant, self.p.u_store
        made.ranged = not (isinstance(a, Replicas) and isinstance(b, Replicas))
        self._roles(made, a, b, times)
        return made

    def _scaled(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Powers of two are exact; magnitudes that stand behind a role are scaled with it."""
        made = Replicas(together(func, self._stacks(args), kwargs))
        self._scaled_role(made, args[0], args[1], func.overloadpacket.__name__ == "mul")
        if self.backward and args[1] == 1:
            made.acc = 1.0
        return made

    def _scaled_role(self, made: Replicas, a: Any, b: Any, times: bool) -> None:
        """The role of x after a multiplication or division by a number."""
        x, number = (a, b) if isinstance(a, Replicas) else (b, a)
        if isinstance(x, Replicas) and x.role and isinstance(number, (int, float)):
            if x.role[0] == "square":
                made.role = x.role
            if x.role[0] == "gap":
                first, second, scale, peak = x.role[1]
                made.role = ("gap", (first, second, scale * abs(number if times else 1 / number), peak))

    def _roles(self, made: Replicas, a: Any, b: Any, times: bool) -> None:
        """Marks of a product or quotient."""
        made.product = times and isinstance(a, Replicas) and isinstance(b, Replicas)
        kinds = [_kind(a), _kind(b)]
        if times and a is b:
            made.role = ("square", None)
        elif not (isinstance(a, Replicas) and isinstance(b, Replicas)):
            self._scaled_role(made, a, b, times)
        elif not times and kinds[0] in ("exponential", "weights") and kinds[1] == "total" and _of(a) is _of(b):
            made.role, made.unit = ("weights", _of(a)), self.p.u_probability
            made.later = None if a.later is None else a.later / b.rows
        elif not times and kinds == ["centred", "deviation"]:
            self._normed(made, a, b)
        elif not times and kinds == ["normed", "deviation"]:
            made.role = ("normed", _of(a) / b.rows[:1])
        elif times and self.backward:
            self._sizes(made, a, b, kinds)

    def _normed(self, made: Replicas, centred: Replicas, s: Replicas) -> None:
        """(x - mean)/s, which may be taken as x scale + shift, with scale = 1/s and shift = -mean/s."""
        mean, _ = _of(centred)
        mass = (centred.rows[:1].abs() + mean) / s.rows[:1]
        made.acc, made.role = (made.rows[0].abs() + mass[0]) * self.p.u_acc, ("normed", mass)
        later = [x.rows if x.later is None else x.later for x in (centred, s)]
        made.later = later[0] / later[1] if centred.later is not None else None
        if len(centred.rows) > 1:
            # Errors as large as the deviation decide it: the result is undetermined.
            moved = ((centred.rows[1:] - centred.rows[:1]) ** 2).mean(0).mean(-1, keepdim=True)
            lost = moved > (s.rows[0] / 2) ** 2
            made.rows = _lost(made.rows, lost)
            made.later = None if made.later is None else _lost(made.later, lost)

    def _sizes(self, made: Replicas, a: Any, b: Any, kinds: list[str]) -> None:
        """In the backward: D = Σ p dP, which may be formed from O; and dS, which is stored as the weights are."""
        if "exponential" in kinds:
            made.unit = self.p.u_probability
        if self.p.recomputes_probabilities and "weights" in kinds:
            x, p = (a, b) if kinds[1] == "weights" else (b, a)
            if x.mass is not None:
                made.mass, made.role = x.mass * p.rows[:1].abs(), ("share", self.p.u_out)
        elif "normed" in kinds:
            x, z = (a, b) if kinds[1] == "normed" else (b, a)
            made.mass, made.role = x.rows[:1].abs() * _of(z), ("normed share", 0.0)
        elif "centred" in kinds:
            x, c = (a, b) if kinds[1] == "centred" else (b, a)
            made.excess = (x.rows[:1].abs() * _of(c)[1]).expand_as(made.rows[:1])

    def added(self, func: Any, args: Any, kwargs: Any) -> Any:
        """add and sub."""
        if not _inexact(args):
            return func(*args, **kwargs)
        a, b = (_lifted(x) for x in args[:2])
        made = Replicas(together(func, self._stacks([a, b]), kwargs), acc=1.0, unit=self.p.u_store)
        made.ranged = isinstance(a, Replicas) and isinstance(b, Replicas)
        kinds = [_kind(a), _kind(b)]
        made.excess = _plus(*(x.excess if isinstance(x, Replicas) else None for x in (a, b)))
        if kinds[0] in ("square", "deviation") and not isinstance(b, Replicas):
            made.role, made.later = a.role, None if a.later is None else a.later + b
        elif func.overloadpacket.__name__ == "sub" and isinstance(a, Replicas) and isinstance(b, Replicas):
            if kinds[1] == "mean" and _of(b)[0] is a.rows:
                size = b.rows[:1].abs()
                made.role = ("centred", (size, _of(b)[1] + size * self.p.u_statistics))
                made.later = self._resaved(made.rows, b.rows[:1])
            else:
                made.role = ("gap", (a.rows[:1], b.rows[:1], 1.0, _of(b) if kinds[1] == "peak" else None))
        return made

    def _resaved(self, rows: Rows, size: Rows) -> Rows | None:
        """Rows that are off by one rounding of a statistic of this size, where statistics are saved coarsely."""
        unit = self.p.u_statistics
        if not unit or self.backward:
            return None
        self.count += 1
        return rows + self.signs.shifts(size[0], size[0].abs() * unit, self.count)

    def exponential(self, func: Any, args: Any, kwargs: Any) -> Any:
        made = self.rounded(func, args, kwargs)
        x = args[0]
        if isinstance(x, Replicas):
            made.role = ("exponential", object())
            if _kind(x) == "gap" and not self.backward:
                if _of(x)[3] is not None:
                    _of(x)[3].append("subtracted")
                if self.p.recomputes_probabilities:
                    made.later = self._recomputed(made, *_of(x)[:3])
        return made

    def _recomputed(self, e: Replicas, x: Rows, y: Rows, scale: float) -> Rows:
        """exp(x - lse) once more, from x and lse that were rounded apart; |lse| <= |y| + log n."""
        x, y = (torch.nan_to_num(part[0].abs() * scale, posinf=0.0) for part in (x, y))
        lse = y + math.log(max(x.numel() / max(y.numel(), 1), 1.0))
        self.count += 2
        size = (x + lse + C) * self.p.u_acc
        own = self.signs.shifts(e.rows[0], size, self.count - 1)
        row = self.signs.shifts(y, lse * max(self.p.u_acc, self.p.u_statistics), self.count)
        return _lost(e.rows * torch.exp(own + row), size > 0.5)

    def highest(self, func: Any, args: Any, kwargs: Any) -> Any:
        """amax: exact. If it turns out to be subtracted before an exponential, no gradient depends on it."""
        made = self._other("amax", func, args, kwargs)
        if isinstance(made, Replicas):
            made.role = ("peak", [])
        return made

    def equal(self, func: Any, args: Any, kwargs: Any) -> Any:
        """eq: exact. In the backward of amax it finds the places of the maximum."""
        made = self._other("eq", func, args, kwargs)
        if isinstance(made, Replicas) and self.backward:
            peaks = [_of(x) for x in args if _kind(x) == "peak"]
            made.role = ("places", None) if any(peaks) else None
        return made

    def root(self, func: Any, args: Any, kwargs: Any) -> Any:
        made = self.rounded(func, args, kwargs)
        x = args[0]
        if isinstance(x, Replicas) and x.role and x.role[0] == "square":
            made.role = ("deviation", None)
            made.later = self._resaved(made.rows, made.rows[:1])
        return made

    def summed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """sum and mean."""
        x = args[0]
        if not isinstance(x, torch.Tensor) or not x.dtype.is_floating_point:
            return self._other("sum", func, args, kwargs)
        x = _lifted(x)
        raw = x.product and x.later is None
        if not raw:
            self.settle(x)
        rows = x.rows if raw else self.fetch(x)
        made = Replicas(together(func, [Stack(rows), *args[1:]], kwargs))
        mean = func.overloadpacket.__name__ == "mean"
        n = x.numel() // max(made.numel(), 1)
        share = _kind(x) == "share" or (_kind(x) == "normed share" and x.ndim - 1 in _axes(args, x.ndim))
        size = x.mass if share and x.mass is not None else rows[:1].abs()
        total = together(func, [Stack(size), *args[1:]], kwargs)
        p = self.p
        units = (p.g(n) + mean) * p.u_acc
        if raw:
            units += x.acc * p.u_acc + x.unit if not isinstance(x.acc, torch.Tensor) else x.unit
            made.acc = torch.maximum(total[0] * units, total[0].clamp(max=n * p.eta_acc))
        else:
            made.acc = total[0] * units
        if share:
            made.acc = made.acc + total[0] * _of(x)
        if x.excess is not None:
            made.acc = made.acc + together(func, [Stack(x.excess), *args[1:]], kwargs)[0]
        made.unit = 0.0 if mean or _kind(x) == "square" else p.u_store
        made.ranged = True
        self._sum_roles(made, x, mean, total)
        return made

    def _sum_roles(self, made: Replicas, x: Replicas, mean: bool, total: Rows) -> None:
        kind = _kind(x)
        if kind == "exponential":
            made.role = ("total", _of(x))
        elif kind == "square":
            made.role = x.role
        elif mean:
            made.role = ("mean", (x.rows, made.acc))
        if self.backward:
            made.mass = total

    def matrix(self, func: Any, args: Any, kwargs: Any) -> Any:
        """mm and bmm."""
        a, b = (_lifted(x) for x in args)
        stacks = self._stacks([a, b])
        made = Replicas(together(func, stacks, kwargs), unit=self.p.u_store)
        made.ranged = True
        sizes = [Stack(x.rows[:1].abs()) for x in stacks]
        total, n = together(func, sizes, kwargs)[0], a.shape[-1]
        made.acc = torch.maximum(total * (self.p.g(n) * self.p.u_acc), total.clamp(max=n * self.p.eta_acc))
        if self.backward:
            made.mass = total[None]
        return made

    def accumulated(self, func: Any, args: Any, kwargs: Any) -> Any:
        """index_add: rows added up where an index repeats."""
        into, axis, index, source = args
        if not _inexact((into, source)):
            return self._other("index_add", func, args, kwargs)
        into, source = _lifted(into), _lifted(source)
        stacks = self._stacks([into, source])
        made = Replicas(together(func, [stacks[0], axis, index, stacks[1]], kwargs), unit=self.p.u_store)
        sizes = [Stack(x.rows[:1].abs()) for x in stacks]
        n = 1 + (int(index.bincount().max()) if index.numel() else 0)
        made.acc = together(func, [sizes[0], axis, index, sizes[1]], kwargs)[0] * (self.p.g(n) * self.p.u_acc)
        return made


def _kind(x: Any) -> str:
    """Which part of a softmax or norm an argument is; "" for none."""
    return str(x.role[0]) if isinstance(x, Replicas) and x.role else ""


def _of(x: Any) -> Any:
    """What a role refers to."""
    return x.role[1] if isinstance(x, Replicas) and x.role else None


def _plus(a: Rows | None, b: Rows | None) -> Rows | None:
    return b if a is None else a if b is None else a + b


def _axes(args: Any, axes: int) -> list[int]:
    """The axes a sum runs over."""
    given = args[1] if len(args) > 1 and args[1] is not None else []
    return [axis % max(axes, 1) for axis in ([given] if isinstance(given, int) else given)] or list(range(axes))


def _lost(rows: Rows, where: Rows) -> Rows:
    """The same with NaN in the last version where errors decide the value: it and what follows are undetermined."""
    if not bool(where.any()):
        return rows
    return torch.cat([rows[:-1], torch.where(where, math.nan, rows[-1])[None]])


def _unrelated(rows: Rows) -> Rows:
    """Versions with the deviations of other versions: of the same size, and independent of what else moved."""
    return torch.cat([rows[:1], rows[1:].roll(1, 0)]) if len(rows) > 1 else rows


def _holds(args: Any) -> bool:
    return any(isinstance(a, Replicas) or (_is_list(a) and any(isinstance(b, Replicas) for b in a)) for a in args)


def _is_list(a: Any) -> bool:
    return isinstance(a, (list, tuple)) and any(isinstance(b, Replicas) for b in a)


def _inexact(args: Any) -> bool:
    return any(isinstance(a, torch.Tensor) and a.dtype.is_floating_point for a in args)


def _is_bool(a: Any) -> bool:
    return isinstance(a, torch.Tensor) and a.dtype == torch.bool


def _lifted(a: Any) -> Any:
    """A tensor that the function made itself, as a Replicas of one row."""
    if isinstance(a, torch.Tensor) and not isinstance(a, Replicas) and a.dtype.is_floating_point:
        return Replicas(a[None])
    return a


def _power_of_two(a: Any) -> bool:
    return isinstance(a, (int, float)) and a != 0 and math.isfinite(a) and abs(math.frexp(a)[0]) == 0.5


def _constant(a: Any) -> float:
    """Rounding of a constant: of a number 1; of a table, which may be computed as exp(log c), C + 2 |log c|."""
    if isinstance(a, (int, float)):
        return 0.0 if float(a).is_integer() else 1.0
    if not isinstance(a, torch.Tensor) or isinstance(a, Replicas) or not a.dtype.is_floating_point or not a.numel():
        return 0.0
    if bool((a == a.round()).all()):
        return 0.0
    return C + 2 * float(a[a != 0].abs().log().abs().max())


def _wrapped(found: Any) -> Any:
    if isinstance(found, (tuple, list)):
        return type(found)(Replicas(one) for one in found)
    return Replicas(found)


_STRUCTURE = """alias clone contiguous detach expand flip lift_fresh permute reshape _reshape_alias select
slice squeeze t transpose unsqueeze view _unsafe_view _to_copy slice_backward select_backward""".split()
_EXACT = set(
    """abs all amax amin any argmax argmin bitwise_and bitwise_not bitwise_or bitwise_xor cat ceil clamp clamp_max
    clamp_min copysign diagonal eq floor gather ge gt index index_select isfinite isinf isnan le logical_and
    logical_not logical_or logical_xor lt masked_fill max maximum min minimum ne relu repeat roll round
    scatter sign sort split split_with_sizes stack sum threshold_backward topk tril triu trunc unbind
    constant_pad_nd""".split()
)
_LOOKS = set(
    "_local_scalar_dense is_nonzero equal nonzero zeros_like ones_like full_like empty_like new_zeros new_ones "
    "new_full new_empty new_empty_strided".split()
)
_RULES: dict[str, Any] = {
    **dict.fromkeys(_STRUCTURE, Rounding.structure),
    **dict.fromkeys(("mul", "div"), Rounding.multiplied),
    **dict.fromkeys(("add", "sub"), Rounding.added),
    **dict.fromkeys(("sum", "mean"), Rounding.summed),
    **dict.fromkeys(("mm", "bmm"), Rounding.matrix),
    **dict.fromkeys(
        "erf erfc exp2 expm1 log log1p log2 pow reciprocal rsqrt rsub sigmoid sin cos tanh tanh_backward "
        "sigmoid_backward".split(),
        Rounding.rounded,
    ),
    "index_add": Rounding.accumulated,
    "neg": Rounding.negated,
    "where": Rounding.selected,
    "exp": Rounding.exponential,
    "amax": Rounding.highest,
    "eq": Rounding.equal,
    "sqrt": Rounding.root,
}
