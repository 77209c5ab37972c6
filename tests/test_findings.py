"""Findings: every script has its facts and still shows its fault; every known fault of a library has a script."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from toys import ROOT

from veriformer.isolate import Remote
from veriformer.libraries import LIBRARIES
from veriformer.targets import Options


def runner() -> ModuleType:
    """reports/findings/run.py as a module."""
    spec = importlib.util.spec_from_file_location("findings_run", ROOT / "reports" / "findings" / "run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


RUN = runner()
FINDINGS = RUN.findings()


@pytest.mark.parametrize("finding", FINDINGS, ids=lambda one: str(one.name))
def test_a_script_stands_alone_and_shows_its_fault(finding: Any) -> None:
    text = RUN.script(finding.name).read_text()
    assert "veriformer" not in RUN.imports(finding.name) and len(text.splitlines()) <= 80
    if finding.missing:
        pytest.skip(f"{', '.join(finding.missing)} not installed")
    result = RUN.run(finding)
    assert result["exit"] == 1 and result["printed"], result
    assert "Traceback" not in "".join(result["printed"]), result


@pytest.mark.parametrize("library", [one for one in LIBRARIES if not one.missing], ids=lambda one: str(one.name))
def test_every_known_fault_of_a_library_has_a_finding(library: Any) -> None:
    lacking = []
    remote = Remote(library.name, Options(), offline=True)  # Keras has one backend in a process
    remote.close()
    for about in remote.descriptions:
        if library.variants and about.name.partition(":")[2] not in library.variants:
            continue
        for entry in about.expected:
            if not any(one.explains(about.name, entry.law) for one in FINDINGS):
                lacking.append(f"{about.name} {entry.law}")
    assert lacking == []


def test_links_to_findings_lead_to_them() -> None:
    for path in sorted((ROOT / "impls").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            value = node.value if isinstance(node, ast.Constant) else None
            if isinstance(value, str) and value.startswith("reports/findings/"):
                assert (ROOT / value).is_file(), f"{path.name}: {value}"


SCRIPT = '''"""One and one is three.

Library: toy 1.0
Law: softmax/sums-to-one
Where: toy:plain, toy:other*
Input: 1,
    and 1
Got: 3
Wanted: 2
Status: theirs, new
Tracker: none found
Searched: "one" in issues
"""
import sys
print("got 3, wanted 2")
sys.exit(1)
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of findings with one script."""
    monkeypatch.setattr(RUN, "FOLDER", tmp_path)
    monkeypatch.setattr(RUN, "REPORTS", tmp_path)
    (tmp_path / "toy_sum.py").write_text(SCRIPT)
    monkeypatch.setattr("sys.argv", ["run.py", "--write"])
    return tmp_path


def test_what_is_fixed_or_unexplained_is_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert RUN.main() == 0
    page = (folder / "findings.md").read_text()
    assert "1 fault, 1 of them new" in page and "exit code 1 with" in page and "got 3, wanted 2" in page
    fault = {"law": "softmax/sums-to-one", "verdict": "xfail", "dtype": "float32"}
    cell = {"library": "toy", "variant": "others", "faults": [fault]}
    (folder / "matrix.json").write_text(RUN.json.dumps({"cells": [cell]}))
    assert RUN.main() == 0
    (folder / "matrix.json").write_text(RUN.json.dumps({"cells": [{**cell, "variant": "third"}]}))
    assert RUN.main() == 1 and "no finding explains toy:third softmax/sums-to-one" in capsys.readouterr().out
    (folder / "matrix.json").unlink()
    (folder / "toy_sum.py").write_text(SCRIPT.replace("sys.exit(1)", "sys.exit(0)"))
    assert RUN.main() == 1 and "toy_sum: exit code 0" in capsys.readouterr().out


def test_a_traceback_shows_nothing(folder: Path) -> None:
    (folder / "toy_sum.py").write_text(SCRIPT.replace("import sys", "import sys, no_such_module_at_all"))
    assert RUN.read("toy_sum").missing == ["no_such_module_at_all"]
    (folder / "toy_sum.py").write_text(SCRIPT.replace("sys.exit(1)", "sys.gone"))
    assert RUN.run(RUN.read("toy_sum"))["exit"] == RUN.DIED
    assert "a traceback with" in RUN.reproduced(RUN.run(RUN.read("toy_sum")))


def test_a_law_by_a_star_explains_what_is_expected_alone(folder: Path) -> None:
    (folder / "toy_sum.py").write_text(SCRIPT.replace("softmax/sums-to-one", "softmax/sums-to-one, softmax/*"))
    one = RUN.read("toy_sum")
    assert one.explains("toy:plain", "softmax/other") and not one.explains("toy:plain", "softmax/other", False)
    assert one.explains("toy:plain", "softmax/sums-to-one", False) and not one.explains("toy:third", "softmax/other")


def test_a_script_runs_on_each_of_its_backends(folder: Path) -> None:
    text = SCRIPT.replace("Tracker:", "Backends: numpy, json, no_such_module_at_all\nTracker:")
    text = text.replace("sys.exit(1)", "import os\nsys.exit(1 if os.environ['KERAS_BACKEND'] == 'numpy' else 3)")
    (folder / "toy_sum.py").write_text(text)
    result = RUN.run(RUN.read("toy_sum"))
    assert result["exit"] == 3 and [line.partition(":")[0] for line in result["printed"]] == ["numpy", "json"]
    (folder / "toy_sum.py").write_text(SCRIPT.replace("Tracker:", "Backends: no_such_module_at_all\nTracker:"))
    assert RUN.read("toy_sum").missing == ["no_such_module_at_all"]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("Law: softmax/sums-to-one\n", "", "lacks Law"),
        ("theirs, new", "ours", "Status is theirs, known or theirs, new"),
        ("none found", "https://example.org/1", "a new one has none found"),
    ],
)
def test_a_script_without_its_facts_is_refused(old: str, new: str, said: str, folder: Path) -> None:
    (folder / "toy_sum.py").write_text(SCRIPT.replace(old, new))
    with pytest.raises(ValueError, match=said):
        RUN.findings()
