"""How Hypothesis is run: what a seed decides, and the settings of a search."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis.internal.conjecture import providers


@contextlib.contextmanager
def no_foreign_constants() -> Iterator[None]:
    """While it lasts, a seed alone decides what is drawn.

    Hypothesis mixes numbers from the source of every loaded local module into one draw in twenty, so
    that the same seed would give other cases in another process.
    """
    name = "_maybe_draw_constant"
    provider = getattr(providers, "HypothesisProvider", None)
    before = getattr(provider, name, None)
    if before is None:
        yield
        return
    setattr(provider, name, lambda self, *rest, **words: None)
    try:
        yield
    finally:
        setattr(provider, name, before)


def search_settings(examples: int) -> Any:
    """Generation alone, seeded from outside: our own reducer makes cases smaller, and nothing is stored."""
    return settings(
        max_examples=examples,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        derandomize=False,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
        report_multiple_bugs=False,
    )
