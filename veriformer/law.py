"""Laws: precise statements about an operation, with recipes for their cases and a check.

    @law("attention", case=attention_cases(causal=True), needs={"causal"}, source="P50")
    def future_has_no_influence(attention, case):
        \"\"\"Output row i depends only on keys j <= i + (Tk - Tq).\"\"\"
        ...

The function's name becomes the law's id (`attention/future-has-no-influence`), its docstring the
statement that users see. A law fails only through the `expect…` functions of `veriformer.expect`.
"""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from veriformer.calling import CallPlan, UsageError
from veriformer.declarations import DTYPES, Capabilities
from veriformer.models import ModelFacts
from veriformer.operations import OPERATIONS

KINDS = ("contract", "hygiene", "metamorphic", "gradient", "oracle", "precision")
"""Kinds of laws."""
ORACLE = "equals-the-reference"
ORACLES: dict[str, Law] = {}
"""The law `equals-the-reference` of each operation, as soon as it is defined."""
JUDGED_BESIDE_REFERENCE = ("metamorphic", "gradient", "oracle", "precision")
"""Kinds that the reference must keep on a case before anyone is accused with it."""


SINGLE = "float32 or float64"
"""What laws need that want a change to be seen: 16 bits may round it away."""
SHORT = 12
"""Models are given no more tokens than this, but for those that fill a cache."""
FILLED = 512
"""A cache that holds more tokens than this is not filled up to see whether it refuses the next one."""


@dataclass(frozen=True)
class Domain:
    """What may be drawn for one operation of one implementation in one dtype."""

    operation: str
    dtype: str
    accepts: frozenset[str]
    capabilities: Capabilities
    framework: str = "numpy"
    others: tuple[str, ...] = ()
    vjp: bool = False
    model: ModelFacts | None = None

    @classmethod
    def of(cls, operation: str, dtype: str, plan: CallPlan, capabilities: Capabilities, **rest: Any) -> Domain:
        """The domain of an implementation's plan and capabilities."""
        return cls(operation, dtype, plan.accepts, capabilities, **rest)

    def admitted(self, layouts: Sequence[str]) -> tuple[str, ...]:
        """Those of some memory layouts that the implementation accepts; one that is written to has no stride of 0."""
        if self.capabilities.cache_in_place:
            layouts = [layout for layout in layouts if layout != "expanded"]
        if self.capabilities.strides == "any":
            return tuple(layouts)
        return tuple(layout for layout in layouts if layout in ("contiguous", "offset"))

    def longer(self, causal: bool) -> bool:
        """Whether attention may have more queries than keys."""
        rule = self.capabilities.more_queries_than_keys
        return rule == "always" or rule == "unless_causal" and not causal

    @property
    def triangle_empties_rows(self) -> bool:
        """Whether causal alone may leave rows that see nothing: the first ones, where there are more than keys."""
        return self.capabilities.causal_alignment == "bottom_right" and self.longer(causal=True)

    def provides(self, word: str) -> bool:
        """Whether a keyword, option, extra, "gradients" or "torch" (where one judges) is there, or this is the dtype.

        "empty rows": attention may be asked for rows that may see nothing. "zero rows", "nan rows": what these are, at
        least for some kind of mask. Of a model: also a method ("crop"), what one takes ("step.mask"), "weights", if it
        is made of given ones, and "persistent", if its caches are. Of a Universal Transformer: "preset fixed", a
        dialect.
        """
        table = OPERATIONS[self.operation]
        if self.model is not None and (known := self._of_model(self.model, word)) is not None:
            return known
        if word in table.options or word in table.keywords:
            return word in self.accepts
        if word in DTYPES:
            return word == self.dtype
        if word.startswith("preset "):
            return word.removeprefix("preset ") in self.capabilities.presets
        if word == "gradients":
            return self.capabilities.gradients and (self.framework in ("torch", "jax") or self.vjp)
        if word == "empty rows":
            return "mask" in self.accepts or "causal" in self.accepts and self.triangle_empties_rows
        if word in ("zero rows", "nan rows"):
            rule, wanted = self.capabilities.empty_row, {"zero rows": "zeros"}.get(word, "nan")
            return wanted in ((rule,) if isinstance(rule, str) else (*rule.values(), rule.get("default", "zeros")))
        if word == "torch":
            return importlib.util.find_spec("torch") is not None
        return bool(getattr(self.capabilities, word))

    def _of_model(self, model: ModelFacts, word: str) -> bool | None:
        """What is known of a model under a word, or None."""
        method, _, taken = word.partition(".")
        if word == "weights":
            return model.weights
        if word == "persistent":
            return self.capabilities.cache == "persistent"
        if method in OPERATIONS[self.operation].words:
            return taken in model.takes.get(method, ()) if taken else method in model.words
        if model.weights or word not in ("window", "max_length"):
            return None
        found = getattr(model, word)
        return found is not None and found <= (SHORT if word == "window" else FILLED)


@dataclass(frozen=True)
class Recipe:
    """How values for one parameter of a law are made.

    examples: the pinned ones, small to large. strategy: the search. Both depend on the domain, so
    that what an implementation lacks is never drawn.
    """

    examples: Callable[[Domain], Sequence[Any]]
    strategy: Callable[[Domain], st.SearchStrategy[Any]]


def choice(*values: Any) -> Recipe:
    """A recipe that takes one of a few values."""
    return Recipe(lambda domain: values, lambda domain: st.sampled_from(values))


@dataclass(frozen=True, eq=False)
class Law:
    """One law of one operation. See `law` for the fields."""

    operation: str
    name: str
    statement: str
    function: Callable[..., None]
    recipes: dict[str, Recipe]
    kind: str = "metamorphic"
    needs: frozenset[str] = frozenset()
    also: tuple[str, ...] = ()
    source: str = ""
    root: bool = False
    relative: bool = True
    kills: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        """`operation/name-with-hyphens`."""
        return f"{self.operation}/{self.name}"

    def missing(self, domain: Domain) -> list[str]:
        """What the law needs and the implementation does not provide."""
        table = OPERATIONS[self.operation]
        needs = set(self.needs)
        if "params" in table.positional and not (table.words and self.kind != "oracle"):
            needs.add("torch")  # its budget is made there
        if table.words and self.kind == "oracle":
            needs.add("weights")
        lacking = [word for word in sorted(needs) if not any(map(domain.provides, word.split(" or ")))]
        return lacking + [f"operation {name}" for name in self.also if name not in domain.others]

    def pinned(self, domain: Domain) -> list[tuple[Any, ...]]:
        """The pinned arguments: the first recipe's examples, the others' in turn beside them."""
        columns = [list(recipe.examples(domain)) for recipe in self.recipes.values()]
        if not all(columns):
            return []
        rows = len(columns[0])
        return [tuple(column[i % len(column)] for column in columns) for i in range(rows)]

    def strategy(self, domain: Domain) -> st.SearchStrategy[tuple[Any, ...]]:
        """The search over all parameters."""
        return st.tuples(*(recipe.strategy(domain) for recipe in self.recipes.values()))


@dataclass(frozen=True)
class LawFamily:
    """The same law for several operations."""

    laws: tuple[Law, ...] = field(default=())

    def __iter__(self) -> Iterator[Law]:
        return iter(self.laws)


def law(
    operations: str | Sequence[str],
    *,
    case: Recipe,
    kind: str = "metamorphic",
    needs: Iterable[str] = (),
    also: Sequence[str] = (),
    source: str = "",
    root: bool = False,
    relative: bool = True,
    kills: Sequence[str] = (),
    changes: Sequence[str] = (),
    **others: Recipe,
) -> Callable[[Callable[..., None]], Any]:
    """Make a law of a function (subject, [other subjects,] case, …).

    operations: one name, or several for a `LawFamily`. case and others: recipes, by parameter name.
    needs: keywords, options, extras or "gradients" without which the law does not apply. also:
    further operations of the same implementation that the function gets after its own. root: a
    contract without which the rest is not run. relative: two outputs are compared with a budget that
    comes from the reference; such a failure is shown last while the oracle fails. kills: faults (`file:variant` under
    `impls/faulty/`) that this law rejects when run alone. changes: capabilities that change it.
    """

    def make(function: Callable[..., None]) -> Any:
        name = function.__name__.replace("_", "-")
        statement = " ".join((function.__doc__ or "").split())
        if not statement or kind not in KINDS:
            raise ValueError(f"law {name}: wanted a docstring and a kind of {', '.join(KINDS)}, got kind={kind!r}")

        def one(operation: str) -> Law:
            made = Law(
                operation,
                name,
                statement,
                function,
                {"case": case, **others},
                kind,
                frozenset(needs),
                tuple(also),
                source,
                root,
                relative,
                tuple(kills),
                tuple(changes),
            )
            if name == ORACLE:
                ORACLES[operation] = made
            return made

        return one(operations) if isinstance(operations, str) else LawFamily(tuple(map(one, operations)))

    return make


def find_laws(laws: Sequence[Law], ids: Iterable[str]) -> list[Law]:
    """The laws with these ids; an operation's name or a bare law name selects all that bear it.

    Raises UsageError for an id that matches nothing, naming the nearest.
    """
    chosen: list[Law] = []
    for wanted in ids:
        found = [one for one in laws if wanted in (one.id, one.operation, one.name)]
        if not found:
            near = difflib.get_close_matches(wanted, [one.id for one in laws], 1, 0.0)
            raise UsageError(f"unknown law {wanted!r}; nearest is {near[0]!r}; `veriformer laws` lists all")
        chosen += [one for one in found if one not in chosen]
    return chosen
