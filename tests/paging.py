"""A page of documentation whose every number is checked: its code is run, the rest is compared with what that shows.

Blocks of pycon and console are run, and so is code before an arrow: `1 / 8` → `.125`. A page is cut into sections at
headings of the second level; the code of its beginning runs before that of each section.
"""

from __future__ import annotations

import contextlib
import doctest
import functools
import io
import math
import re
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from toys import ROOT, run_python

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)
PAIR = re.compile(r"`([^`]+)`\s+→\s+`([^`]+)`")
QUOTE = re.compile(r"\*“[^”]*”\*")
"""What others say; its numbers may be wrong."""
TARGET = re.compile(r"(?<=\])\(([^)]*)\)")
"""Where a link leads."""
NUMBER = re.compile(r"(?<![\w.^])[-−]?(?:\d{1,3}(?:,\d{3})+|\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?(?![a-zA-Z_0-9])")
Said = tuple[str, str, str]
"""pycon, console or pair; the code; what it is said to print or to be."""


def sections(path: Path) -> dict[str, str]:
    """Heading -> the text under it; what comes before the first heading goes by an empty one."""
    first, *parts = re.split(r"^## (.*)\n", path.read_text(), flags=re.M)
    return {"": first} | dict(zip(parts[::2], parts[1::2], strict=True))


def numbers(text: str) -> list[str]:
    return [found.removesuffix(".") for found in NUMBER.findall(text)]


def value(number: str) -> float:
    return float(number.replace("−", "-").replace(",", ""))


def rounds_to(exact: float, number: str) -> bool:
    """Whether a number as written is the exact one, rounded to the digits that it has; whole numbers are exact."""
    mantissa, _, power = number.partition("e")
    half = 10.0 ** (int(power or 0) - len(mantissa.partition(".")[2])) / 2
    return math.isclose(exact, value(number), rel_tol=1e-12, abs_tol=half * (1 + 1e-9) if "." in mantissa else 1e-12)


def all_round_to(exact: list[float], text: str) -> bool:
    """Whether the numbers of a text are these, and no others."""
    written = numbers(text)
    return len(exact) == len(written) and all(map(rounds_to, exact, written))


def said(text: str) -> Iterator[Said]:
    """All code of a text and what is said to come of it, in order."""
    for found in re.finditer(f"{BLOCK.pattern}|{PAIR.pattern}", text, re.M | re.S):
        kind, code, expression, wanted = found.groups()
        if expression:
            yield "pair", " ".join(expression.split()), wanted.replace("False", "0").replace("True", "1")
        elif kind == "console":
            line, _, wanted = code.removeprefix("$ ").partition("\n")
            yield kind, line, wanted
        else:
            assert kind == "pycon", f"{kind}: nobody runs such a block"
            yield from ((kind, example.source, example.want) for example in doctest.DocTestParser().get_examples(code))


@functools.cache
def run(*code: tuple[str, str]) -> tuple[list[Any], dict[str, Any]]:
    """What each piece (kind, code) prints, or is, one after the other; the names that they leave."""
    names: dict[str, Any] = {}
    with np.printoptions():
        return [outcome(kind, source, names) for kind, source in code], names


def outcome(kind: str, source: str, names: dict[str, Any]) -> Any:
    if kind == "pair":
        return flat(eval(source, names))
    return command(source)[0] if kind == "console" else printed(source, names)


def printed(source: str, names: dict[str, Any]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as stream:
        exec(compile(source, "page", "single"), names)
    return stream.getvalue()


@functools.cache
def command(line: str) -> tuple[str, str]:
    """What `python … --output FILE` prints in the root of the repository, and what it writes."""
    program, *words, _ = shlex.split(line)
    assert program == "python" and words[-1] == "--output"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "file"
        done = run_python(*words, str(file), folder=ROOT)
        assert done.returncode == 0, done.stderr
        return done.stdout, file.read_text()


def flat(result: Any) -> list[float]:
    """All numbers of a result, in order; False and True count as 0 and 1."""
    if isinstance(result, tuple | list):
        return [number for part in result for number in flat(part)]
    return [float(number) for number in np.ravel(result)]


def prose(text: str) -> str:
    """A section without what is run, what others say, and where links lead."""
    for gone in (BLOCK, PAIR, QUOTE, TARGET):
        text = gone.sub("", text)
    return text


def must_be_shown(number: str) -> bool:
    """Decimals, and whole numbers of three digits or more."""
    return not number.lstrip("-−").isdigit() or abs(value(number)) > 99


def findings(start: str, text: str) -> list[str]:
    """What is wrong in a section: code that gives something else, and numbers in the prose that no code shows."""
    spoken = [*said(start), *said(text)]
    got, _ = run(*(piece[:2] for piece in spoken))
    wrong, shown = [], []
    for (kind, code, wanted), result in zip(spoken, got, strict=True):
        if not (all_round_to(result, wanted) if kind == "pair" else result == wanted):
            wrong.append(f"{code}\n gives {result}\n not {wanted}")
        shown += result if kind == "pair" else [value(number) for number in numbers(result)]
        shown += map(value, numbers(code))
    strange = [n for n in numbers(prose(text)) if must_be_shown(n) and not any(rounds_to(x, n) for x in shown)]
    return wrong + [f"{number}: no code of the section shows it" for number in strange]


def tables(text: str) -> list[list[list[str]]]:
    """The cells of each table, without its two lines of head."""
    found = re.findall(r"(?:^\|.*\|\n)+", text, re.M)
    return [[[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()[2:]] for table in found]


def changed(text: str, worked: bool = False) -> Iterator[tuple[str, str]]:
    """The section with one number wrong in its last digit, and that number with what stands before it.

    The numbers are those of results, of tables if they are `worked` out, and in the prose those that are long
    enough to be unlike any other.
    """
    places, left = [*results(text), *(cells(text) if worked else ())], numbers(prose(text))
    for found in NUMBER.finditer(text):
        number = found[0].removesuffix(".")
        digits = number.partition("e")[0]
        long = number in left and must_be_shown(number) and sum(map(str.isdigit, digits)) > 2
        if long or any(start <= found.start() < end for start, end in places):
            at = found.start() + len(digits) - 1
            yield text[:at] + str((int(text[at]) + 4) % 10) + text[at + 1 :], text[found.start() - 30 : found.end()]


def results(text: str) -> Iterator[tuple[int, int]]:
    """From where to where a section says what code gives."""
    yield from (found.span(2) for found in PAIR.finditer(text))
    for block in BLOCK.finditer(text):
        for line in re.finditer(r"^(?!>>>|\.\.\. |\$ ).+$", block[2], re.M):
            yield block.start(2) + line.start(), block.start(2) + line.end()


def cells(text: str) -> Iterator[tuple[int, int]]:
    """From where to where the rows of tables go, but for their heads and first cells."""
    return (found.span(1) for found in re.finditer(r"^\|[^|\n]*(\|.*\|)$(?!\n\|-)", text, re.M))
