"""docs/reading.md: its code prints what it says, its numbers come from that code, its tables are worked out again."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from paging import TARGET, all_round_to, changed, command, findings, run, said, sections, tables
from toys import ROOT

from veriformer.reference import adamw_step

PAGE = ROOT / "docs" / "reading.md"
PARTS = sections(PAGE)
Cells = list[list[list[str]]]
Worked = Iterator[tuple[str, list[float]]]
"""Cells of tables, and the numbers that belong there."""


def jacobian(cells: Cells, names: dict[str, Any]) -> Worked:
    """p_i (δ_ij - p_j): on the diagonal p - p², beside it 0 - p_i p_j, or the result alone."""
    e = [math.exp(2), math.exp(1), 1.0]
    p = [number / sum(e) for number in e]
    for i, row in enumerate(cells[0]):
        for j, cell in enumerate(row[1:4]):
            terms = [p[i], p[i]] if i == j else [0.0, p[i], p[j]]
            yield cell, [*(terms if "=" in cell else []), p[i] * ((i == j) - p[j])]
        yield row[4], [0.0]


def four_tokens(cells: Cells, names: dict[str, Any]) -> Worked:
    given, worked = cells
    q, k, v = ([[float(entry) for entry in row] for row in names[name]] for name in ("q", "k", "v"))
    for i, row in enumerate(worked):
        products = [sum(a * b for a, b in zip(q[i], k[j], strict=True)) for j in range(i + 1)]
        e = [math.exp(product / 2) for product in products]
        p = [number / sum(e) for number in e] + [0.0] * (3 - i)
        out = [sum(p[j] * v[j][c] for j in range(4)) for c in range(2)]
        yield from zip(given[i], ([i], q[i], k[i], v[i]), strict=True)
        yield from zip(row, ([i], products, [product / 2 for product in products], e, p, out), strict=True)
        assert [cell.count("–") for cell in row] == [0, 3 - i, 3 - i, 3 - i, 0, 0]


def two_norms(cells: Cells, names: dict[str, Any]) -> Worked:
    *tokens, means, variances, first, second = cells[0]
    x = [[float(entry) for entry in row] for row in names["x"]]
    for row, entries in zip(tokens, x, strict=True):
        mean, variance = mean_and_variance(entries)
        along = [(entry - mean) / math.sqrt(variance) for entry in entries]
        yield from zip(row[1:], (*([entry] for entry in entries), [mean], [variance], along), strict=True)
    for channel in range(3):
        mean, variance = mean_and_variance([entries[channel] for entries in x])
        yield means[channel + 1], [mean]
        yield variances[channel + 1], [variance]
        for row, entries in zip((first, second), x, strict=True):
            yield row[channel + 1], [(entries[channel] - mean) / math.sqrt(variance or 1.0)]


def mean_and_variance(entries: list[float]) -> tuple[float, float]:
    mean = sum(entries) / len(entries)
    return mean, sum((entry - mean) ** 2 for entry in entries) / len(entries)


WORKED = {
    "Softmax and its slope, by hand": jacobian,
    "Attention over four tokens, by hand": four_tokens,
    "LayerNorm and BatchNorm on the same numbers": two_norms,
}
"""Sections whose tables are worked out here without the reference."""


def wrong(heading: str, text: str) -> list[str]:
    """All that is wrong in a section."""
    found = findings(PARTS[""] if heading else "", text)
    if heading not in WORKED:
        return found
    _, names = run(*(piece[:2] for piece in [*said(PARTS[""]), *said(text)]))
    right = WORKED[heading](tables(text), names)
    return found + [f"{cell!r} should be {numbers}" for cell, numbers in right if not all_round_to(numbers, cell)]


@pytest.mark.parametrize("heading", PARTS)
def test_every_number_is_right(heading: str) -> None:
    assert wrong(heading, PARTS[heading]) == []


@pytest.mark.parametrize("heading", PARTS)
def test_a_wrong_digit_is_found(heading: str) -> None:
    tries = list(changed(PARTS[heading], heading in WORKED))
    assert [place for text, place in tries if not wrong(heading, text)] == []
    assert len(tries) > 8 or heading in ("", "Reading order", "Letters")


def test_a_number_of_the_prose_needs_code() -> None:
    assert findings("", "About 3.14159.") == ["3.14159: no code of the section shows it"]
    assert not findings("", "About 3.1416: `22 / 7 - 0.0012645` → `3.1416`")
    assert findings("", "`1 / 3` → `.334`") and findings("", "`1 / 3` → `.33 .33`")
    assert findings("", "```pycon\n>>> print(1 / 8)\n0.126\n```")
    assert not findings("", "*“Exactly 22/7 or 3.999.”*")


def test_the_reading_order_names_every_module_once_after_those_it_needs() -> None:
    order = re.findall(r"^\d+\. \[(\w+)\]\(\.\./reference/\1\.py\): ", PARTS["Reading order"], re.M)
    assert sorted(order) == sorted(path.stem for path in (ROOT / "reference").glob("*.py") if path.stem != "__init__")
    assert re.findall(r"^(\d+)\. ", PARTS["Reading order"], re.M) == [str(i + 1) for i in range(len(order))]
    for i, name in enumerate(order):
        assert needed_by(name) <= set(order[:i]), name


def needed_by(name: str) -> set[str]:
    """The modules of the reference that one of them imports."""
    ours, needed = "veriformer.reference", set()
    for node in ast.walk(ast.parse((ROOT / "reference" / f"{name}.py").read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == ours:
            needed |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and str(node.module).startswith(ours):
            needed.add(str(node.module).removeprefix(f"{ours}."))
    return needed


def test_the_letters_of_every_axis_are_explained() -> None:
    explained = {word for row in tables(PARTS["Letters"])[0] for word in re.findall(r"\w+", row[0])}
    used = set()
    for path in (ROOT / "reference").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.FunctionDef):
                for axes in re.findall(r"\w\[([^\]]*)\]", ast.get_docstring(node) or ""):
                    used |= set(re.findall(r"\b[A-Z]\w*", axes))
    assert len(used) > 15 and used - explained == set()


def test_links_lead_somewhere() -> None:
    links = TARGET.findall(PAGE.read_text())
    assert len(links) > 20 and all((PAGE.parent / link).exists() for link in links)
    assert "](docs/reading.md)" in (ROOT / "README.md").read_text()


def test_the_picture_is_what_the_command_draws() -> None:
    line = re.search(r"^\$ (python .*)$", PAGE.read_text(), re.M)
    assert line and line[1].endswith(" --output docs/variance_growth.svg")
    _, picture = command(line[1])
    assert picture == (ROOT / "docs" / "variance_growth.svg").read_text()


def test_steps_of_adam_grow_as_the_page_says() -> None:
    """Gradients that grow by beta2/beta1 a step bring its length near the bound."""
    for beta2, bound in ((0.98, 1.698), (0.999, 7.270)):
        state, step = np.zeros((3, 1)), 0.0
        for t in range(1, 3001):
            before, gradient = state[0], np.array([(beta2 / 0.9) ** (t - 3000)])
            state = np.stack(adamw_step(before, gradient, *state[1:], t, lr=1.0, beta2=beta2, eps=0.0))
            step = float(before[0] - state[0, 0])
        assert bound * 0.97 < step <= bound
