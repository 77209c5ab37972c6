"""Run the scripts of this folder, each a real fault of a library, and write reports/findings.md.

    python reports/findings/run.py             run all that can run here, say which reproduce
    python reports/findings/run.py NAME ...    these only
    python reports/findings/run.py --write     and write findings.json and findings.md beside this folder

A script imports its library alone, exits with 1 while the fault is there and with 0 once it is gone. Its docstring has
a title and the fields below; one of Keras may name Backends, each of which it is run on. Results of other
environments stay in findings.json until their library is here.
Exit code: 1 where a script did not end with 1, or a faulty cell of reports/matrix.json has no script; else 0.
"""

from __future__ import annotations

import argparse
import ast
import fnmatch
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
REPORTS = FOLDER.parent
FIELDS = ("Library", "Law", "Where", "Input", "Got", "Wanted", "Status", "Tracker", "Searched")
OPTIONAL = ("Backends",)
STATUS = ("theirs, known", "theirs, new")
RED = ("fail", "error", "crash", "timeout", "xpass", "xfail", "suite_error")
PATIENCE = 300
DIED = -2
"""In place of an exit code: a traceback, which ends a script with 1 as well, shows nothing."""


@dataclass(frozen=True)
class Finding:
    """One script. fields: the lines of its docstring by their first word."""

    name: str
    title: str
    fields: Mapping[str, str]

    def listed(self, field: str) -> list[str]:
        """The comma-separated words of a field."""
        return [word.strip() for word in self.fields.get(field, "").split(",") if word.strip()]

    @property
    def missing(self) -> list[str]:
        """Modules that the script imports, or backends of which it needs one, and that are not here."""
        lacks = sorted(name for name in imports(self.name) if importlib.util.find_spec(name) is None)
        return lacks or ([] if self.backends else self.listed("Backends"))

    @property
    def backends(self) -> list[str]:
        """What it is run on, of what is here; an empty word where it names none."""
        named = self.listed("Backends")
        return [name for name in named if importlib.util.find_spec(name)] if named else [""]

    @property
    def versions(self) -> dict[str, str]:
        """Versions of the libraries that the script imports."""
        known = importlib.metadata.packages_distributions()
        modules = imports(self.name) | set(filter(None, self.backends))
        names = {name for module in modules for name in known.get(module, ())}
        return {name: importlib.metadata.version(name) for name in sorted(names)}

    def explains(self, cell: str, law: str, expected: bool = True) -> bool:
        """Whether this is the cause of a law's failure in a cell such as torch:math.

        A `*` in Where stands for any words; in Law it does so for failures that are expected, and for no others.
        """
        laws = [word for word in self.listed("Law") if expected or "*" not in word]
        return any(fnmatch.fnmatch(law, word) for word in laws) and any(
            fnmatch.fnmatch(cell, word) for word in self.listed("Where")
        )


def script(name: str) -> Path:
    """The file of a finding."""
    return FOLDER / f"{name}.py"


def imports(name: str) -> set[str]:
    """Top-level modules outside the standard library that a script imports."""
    found = set()
    for node in ast.walk(ast.parse(script(name).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    return found - set(sys.stdlib_module_names)


def read(name: str) -> Finding:
    """The finding of a script. Raises ValueError for a docstring without a title or a field."""
    text = ast.get_docstring(ast.parse(script(name).read_text(encoding="utf-8"))) or ""
    title, _, rest = text.partition("\n")
    parts = re.split(rf"^({'|'.join(FIELDS + OPTIONAL)}):", rest, flags=re.MULTILINE)
    fields = {key: " ".join(value.split()) for key, value in zip(parts[1::2], parts[2::2], strict=True)}
    lacks = [field for field in FIELDS if not fields.get(field)]
    if not title or lacks:
        raise ValueError(f"{name}: the docstring lacks {', '.join(lacks) or 'a title'}")
    if not fields["Status"].startswith(STATUS):
        raise ValueError(f"{name}: Status is {' or '.join(STATUS)}, got {fields['Status']!r}")
    if fields["Status"].startswith(STATUS[0]) == fields["Tracker"].startswith("none"):
        raise ValueError(f"{name}: a known fault has a link under Tracker, a new one has none found")
    return Finding(name, title.rstrip("."), fields)


def findings() -> list[Finding]:
    """Every script of the folder but this one."""
    return [read(path.stem) for path in sorted(FOLDER.glob("*.py")) if path.stem != Path(__file__).stem]


def run(finding: Finding) -> dict[str, Any]:
    """Run a script, on each of its backends: its exit code, the first that is not 1 of several, and what it printed."""
    done = {backend: once(finding.name, backend) for backend in finding.backends}
    codes = [code for code, _ in done.values()]
    lines = [f"{backend}: {line}" if backend else line for backend, (_, said) in done.items() for line in said]
    return {"exit": next((c for c in codes if c != 1), 1), "printed": lines, "versions": finding.versions}


def once(name: str, backend: str) -> tuple[int, list[str]]:
    """Run a script once: its exit code, or DIED, and the last lines that it printed."""
    words = [sys.executable, str(script(name))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"} | ({"KERAS_BACKEND": backend} if backend else {})
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, env=environment)
        code, output, errors = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired:
        code, output, errors = -1, "", f"no end within {PATIENCE} s"
    if code == 1 and "Traceback (most recent call last)" in errors:
        code, output = DIED, ""
    return code, (output if output.strip() else errors).strip().splitlines()[-8:]


def unexplained(matrix: Mapping[str, Any], known: Sequence[Finding]) -> Iterator[str]:
    """Faulty rows of the matrix that no finding explains."""
    for cell in matrix["cells"]:
        name = f"{cell['library']}:{cell['variant']}"
        for fault in cell["faults"]:
            expected = fault["verdict"] == "xfail"
            if fault["verdict"] in RED and not any(one.explains(name, fault["law"], expected) for one in known):
                yield f"{name} {fault['law']} ({fault['dtype']}, {fault['verdict']})"


def page(known: Sequence[Finding], results: Mapping[str, Any]) -> str:
    """findings.md."""
    new = sum(one.fields["Status"] == STATUS[1] for one in known)
    lines = [
        "# Faults found in libraries",
        "Made by `python reports/findings/run.py --write`. Each has a script in `reports/findings/` that imports the "
        "library alone, exits with 1 while the fault is there and with 0 once it is gone. Known: a public tracker "
        "has it, the library's or that of a project that met it. New: the searches that are named found nothing.",
        f"{len(known)} fault{'s' * (len(known) != 1)}, {new} of them new.",
    ]
    rows = ["| fault | library | status | reproduced |", "|---|---|---|---|"]
    for one in known:
        status, title = one.fields["Status"].partition("(")[0].strip(), plain(one.title)
        facts = (one.fields["Library"], status, reproduced(results.get(one.name)))
        rows.append(f"| [{title}](#{anchor(one)}) | " + " | ".join(facts) + " |")
    lines.append("\n".join(rows))
    for one in known:
        lines += [f"## {anchor(one)}", f"{plain(one.title)}."]
        facts = [f"- {field}: {linked(one.fields[field])}" for field in FIELDS + OPTIONAL if field in one.fields]
        facts.append(f"- Script: [`{one.name}.py`](findings/{one.name}.py), {reproduced(results.get(one.name))}")
        lines.append("\n".join(facts))
        printed = results.get(one.name, {}).get("printed", [])
        lines += ["```\n" + "\n".join(printed) + "\n```"] if printed else []
    return "\n\n".join(lines) + "\n"


def anchor(finding: Finding) -> str:
    """Its heading, and with it the place in the page."""
    return finding.name.replace("_", "-")


def reproduced(result: Mapping[str, Any] | None) -> str:
    """Such as `exit code 1 with torch 2.13.0`."""
    if result is None:
        return "not run"
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    ended = "a traceback" if result["exit"] == DIED else f"exit code {result['exit']}"
    return f"{ended} with {versions}"


def plain(words: str) -> str:
    """Words as Markdown that shows them as they are."""
    return re.sub(r"[\\`*<|\[\]]|\b_|_\b", r"\\\g<0>", words)


def linked(words: str) -> str:
    """Words with their addresses as links."""
    return re.sub(r"https?://[^\s,;)]+", lambda found: f"<{found.group()}>", plain(words).replace("\\_", "_"))


def main() -> int:
    """Run, print, perhaps write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    known, kept = findings(), REPORTS / "findings.json"
    unknown = set(given.names) - {one.name for one in known}
    if unknown:
        parser.error(f"no finding {', '.join(sorted(unknown))}")
    results = json.loads(kept.read_text(encoding="utf-8")) if kept.is_file() else {}
    wrong = 0
    for one in known:
        if given.names and one.name not in given.names:
            continue
        if one.missing:
            print(f"{one.name}: {', '.join(one.missing)} not installed here")
            continue
        results[one.name] = run(one)
        wrong += results[one.name]["exit"] != 1
        print(f"{one.name}: {reproduced(results[one.name])}")
    results = {one.name: results[one.name] for one in known if one.name in results}
    matrix = REPORTS / "matrix.json"
    if matrix.is_file():
        for line in unexplained(json.loads(matrix.read_text(encoding="utf-8")), known):
            wrong += 1
            print(f"no finding explains {line}")
    if given.write:
        kept.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        (REPORTS / "findings.md").write_text(page(known, results), encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
