"""The reference as a package: what it exports and what it imports."""

import ast
import importlib
from pathlib import Path

import pytest

import veriformer.reference

FOLDER = Path(veriformer.reference.__file__).parent
ALLOWED = {"__future__", "array_api_compat", "math", "typing", "veriformer.reference"}


@pytest.mark.parametrize("name", veriformer.reference.__all__)
def test_every_export_stays_a_function_after_its_file_is_imported(name):
    for file in FOLDER.glob("*.py"):
        importlib.import_module(f"veriformer.reference.{file.stem}")
        assert callable(getattr(veriformer.reference, name))


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.py")), ids=lambda file: file.name)
def test_reference_imports_only_the_array_api(file):
    nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    ours = {name for name in modules if name.rpartition(".")[0] == "veriformer.reference"}
    assert modules - ours <= ALLOWED


@pytest.mark.parametrize("name", ["loops", "loops_layers", "loops_loss", "loops_models", "loops_universal"])
def test_loops_share_nothing_with_the_rest(name):
    tree = ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8"))
    froms = {
        (node.module, alias.name) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    ours = {("veriformer.reference", loops) for loops in ("loops", "loops_layers", "loops_models")}
    assert froms <= {("__future__", "annotations"), ("typing", "Any")} | ours
