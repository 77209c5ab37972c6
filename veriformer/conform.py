"""`veriformer.conformance(attention=sdpa)`: a test class for somebody's own suite, in three lines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from veriformer.checking import RED, Settings, chosen_laws, in_process, items, listed, vetted
from veriformer.report.kept import keep_if_failed
from veriformer.report.terminal import row_text
from veriformer.running import Item
from veriformer.targets import Options, load, load_functions


def conformance(
    target: str = "",
    *,
    declare: Mapping[str, Any] | None = None,
    expected: Sequence[Any] = (),
    effort: str = "ci",
    seed: int = 0,
    laws: Sequence[str] = (),
    dtypes: Sequence[str] = (),
    accepts: Sequence[str] | None = None,
    returns: Sequence[str] = (),
    framework: str = "",
    device: str = "cpu",
    **operations: Callable[..., Any],
) -> type:
    """A class of tests, one for each law and dtype, that any pytest collects.

        TestConformance = veriformer.conformance(attention=sdpa)

    operations: functions by operation; or target: what `veriformer check` takes. declare:
    capabilities. expected: `Expected` entries. The functions are called in this process.
    Raises UsageError for an unknown operation, capability, law (also in `expected`) or target.
    """
    options = Options(None if accepts is None else tuple(accepts), tuple(returns), framework, declare or {}, device)
    loaded = load(target, options) if target else []
    if operations:
        loaded = [*loaded, load_functions(operations, options)]
    settings = Settings(effort, seed, None, listed(dtypes), listed(laws))
    body: dict[str, Any] = {"__doc__": "Laws of the operations given to veriformer.conformance."}
    for one in loaded:
        known = (*one.description.expected, *expected)
        one = replace(one, description=replace(one.description, expected=known))
        for item in items(
            chosen_laws(settings), [vetted(in_process(one))], effort, seed, float("inf"), settings.dtypes
        ):
            body[_method_name(item, len(loaded) > 1)] = staticmethod(_test(item))
    return type("Conformance", (), body)


def _method_name(item: Item, several: bool) -> str:
    words = f"test_{item.law.id}_{item.dtype}" + (f"_{item.implementation.name}" if several else "")
    return "".join(letter if letter.isalnum() else "_" for letter in words)


def _test(item: Item) -> Callable[[], None]:
    """A plain test function; with the plugin it becomes an item of ours."""

    def test() -> None:
        import pytest

        row = item.run()
        if row.verdict in (*RED, "suite_error", "incomplete"):
            raise AssertionError("\n" + row_text(row, keep_if_failed(row, item.implementation)))
        if row.verdict == "xfail":
            pytest.xfail(row.reason)
        if row.verdict != "pass":
            pytest.skip(f"{row.verdict.replace('_', ' ')}: {row.reason}")

    test.veriformer = item  # type: ignore[attr-defined]
    test.__doc__ = item.law.statement
    return test
