"""All laws of the suite, and the levels that freeze which of them count."""

from __future__ import annotations

import functools
import importlib
import importlib.resources
import pkgutil
from collections.abc import Iterator
from types import ModuleType

from veriformer.law import Law, LawFamily

LEVEL = "core/4"
"""The level that exit codes and expected failures speak of."""


@functools.cache
def all_laws() -> tuple[Law, ...]:
    """Every law of `veriformer.properties`, in the order in which a run judges them.

    Raises ValueError where two laws bear one id.
    """
    import veriformer.properties as package

    names = sorted(m.name for m in pkgutil.iter_modules(package.__path__) if m.name.startswith("test_"))
    names.sort(key=lambda name: (name != "test_contracts", name != "test_oracle", name))
    found = [law for name in names for law in laws_of(importlib.import_module(f"veriformer.properties.{name}"))]
    ids = [law.id for law in found]
    twice = {one for one in ids if ids.count(one) > 1}
    if twice:
        raise ValueError(f"two laws are called {sorted(twice)[0]}")
    return tuple(found)


def laws_of(module: ModuleType) -> Iterator[Law]:
    """The laws that a module defines."""
    for value in vars(module).values():
        if isinstance(value, Law):
            yield value
        elif isinstance(value, LawFamily):
            yield from value


@functools.cache
def level(name: str = LEVEL) -> frozenset[str]:
    """Ids of the laws that a level counts; laws outside it are tentative: run, shown, not counted."""
    file = importlib.resources.files("veriformer") / "levels" / (name.replace("/", "-") + ".txt")
    lines = file.read_text(encoding="utf-8").splitlines()
    return frozenset(line.strip() for line in lines if line.strip() and not line.startswith("#"))


def tentative(law: Law) -> bool:
    """Whether the law does not count yet."""
    return law.id not in level()
