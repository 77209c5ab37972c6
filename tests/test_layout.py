"""The package's shape: imports point one way, the wheel holds what git holds, names mean one thing."""

from __future__ import annotations

import ast
import pkgutil
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from toys import ROOT, run_python

import veriformer

FRONT = {"plugin", "cli", "checking", "conform", "report", "catalogue", "demo", "timing", "history", "matrix"}
FRONT |= {"__main__"}
"""Modules of veriformer/ that know the laws; what else lies there is the core."""
DECLARATIONS = {"veriformer.declarations"}
BACKENDS = {"keras_torch.py", "keras_jax.py"}
"""Implementations that choose the backend of one adapter, which must be chosen before the library is imported."""
SHARED = {"veriformer.impls", "veriformer.impls.keras_attention", "veriformer.impls.keras_layers"}
OF_THIS_REPOSITORY = {("benchmarks", name) for name in ("contests", "gates", "gpu", "studies")}
"""What lies in a mapped folder and is not installed."""


def project() -> dict[str, dict[str, object]]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]  # type: ignore[no-any-return]


def sources(folder: str) -> list[Path]:
    """Python files of a folder; symlinked folders are listed where they really are."""
    found = sorted((ROOT / folder).rglob("*.py"))
    return [path for path in found if path == path.resolve()]


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, wherever in the file; `from a import b` counts as a and a.b."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                assert node.level == 1 and path.parent == ROOT / "benchmarks", f"{path}: relative import"
                module = f"veriformer.benchmarks.{module}"
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def layer(module: str) -> str:
    """reference, impls, properties, benchmarks, front or core for a module of ours; an empty string for others."""
    parts = module.split(".")
    if parts[0] != "veriformer" or len(parts) == 1:
        return ""
    if parts[1] in ("reference", "impls", "properties", "benchmarks"):
        return parts[1]
    return "front" if parts[1] in FRONT else "core"


def arrows(folder: str) -> set[tuple[str, str]]:
    """(file, layer) for every import of ours in a folder's files."""
    return {
        (str(path.relative_to(ROOT)), layer(name)) for path in sources(folder) for name in imports(path) if layer(name)
    }


def test_the_reference_imports_math_and_array_api_compat_only() -> None:
    for path in sources("reference"):
        others = {name.split(".")[0] for name in imports(path) if layer(name) != "reference"}
        assert others <= {"__future__", "math", "typing", "collections", "array_api_compat", "veriformer"}, path
    assert {to for _, to in arrows("reference")} <= {"reference"}


def test_implementations_import_the_declarations_only() -> None:
    for path in sources("impls"):
        ours = {name for name in imports(path) if name.split(".")[0] == "veriformer"}
        shared = SHARED if path.name in BACKENDS else set()
        assert {".".join(name.split(".")[:2]) for name in ours - shared} <= DECLARATIONS, path


def test_laws_import_reference_and_core_and_no_front_end() -> None:
    assert {to for _, to in arrows("properties")} <= {"reference", "core", "properties"}


def test_the_core_imports_neither_laws_nor_front_ends() -> None:
    core = {
        (file, to) for file, to in arrows("veriformer") if layer(file.removesuffix(".py").replace("/", ".")) == "core"
    }
    assert {to for file, to in core if not file.endswith("veriformer/__init__.py")} <= {"reference", "core"}
    assert len(core) > 20


def test_benchmarks_are_a_front_that_asv_can_import_beside_any_package() -> None:
    """What asv imports asks nothing of the package while it is imported, nor of another front end at any time."""
    for path in sorted((ROOT / "benchmarks").glob("*.py")):
        assert {layer(name) for name in imports(path)} <= {"", "core", "benchmarks"}, path
        top = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
        assert not any("veriformer" in ast.unparse(node) for node in top), path


def test_the_walk_sees_imports_inside_functions() -> None:
    front = {(file, to) for file, to in arrows("veriformer") if "catalogue" in file}
    assert ("veriformer/catalogue.py", "properties") in front


def test_declarations_need_the_standard_library_alone() -> None:
    names = {name.split(".")[0] for name in imports(ROOT / "veriformer" / "declarations.py")}
    assert names <= sys.stdlib_module_names


def listed_files() -> list[Path]:
    """Files that git holds or would hold, relative to the root."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("no git checkout")
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, check=True, text=True)
    return sorted({Path(name) for name in done.stdout.split("\0") if name and (ROOT / name).exists()})


def wanted_in_wheel(files: list[Path]) -> set[str]:
    """Where the files of the mapped folders belong in the package."""
    mapped = {name: f"veriformer/{name}" for name in ("reference", "impls", "properties", "benchmarks")}
    found = set()
    for path in files:
        top = path.parts[0]
        if top not in (*mapped, "veriformer") or (ROOT / path).is_symlink() or path.parts[:2] in OF_THIS_REPOSITORY:
            continue
        found.add("/".join((mapped.get(top, top), *path.parts[1:])))
    return found


@pytest.mark.skipif(find_spec("setuptools") is None, reason="setuptools is not installed")
def test_the_wheel_holds_what_git_holds(tmp_path: Path) -> None:
    files = listed_files()
    for path in files:
        (tmp_path / "copy" / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / "copy" / path, follow_symlinks=False)
    code = f"from setuptools import build_meta; print(build_meta.build_wheel({str(tmp_path)!r}))"
    done = run_python("-c", code, folder=tmp_path / "copy")
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert held == wanted_in_wheel(files)


def test_every_package_on_disk_is_listed() -> None:
    packages, folders = project()["packages"], project()["package-dir"]
    found = {
        ".".join((name, *path.parent.relative_to(ROOT / folder).parts))  # type: ignore[call-overload]
        for name, folder in folders.items()
        for path in sources(str(folder))
        if path.name == "__init__.py"
    }
    mapped = {name for name in folders if name.startswith("veriformer.benchmarks.")}  # without __init__.py, for asv
    assert found | mapped == set(packages)  # type: ignore[call-overload]


def test_symlinks_lead_editors_to_the_mapped_folders() -> None:
    for name, folder in project()["package-dir"].items():
        place = ROOT / Path(*name.split("."))
        assert place.resolve() == ROOT / str(folder)
        assert place.is_symlink() or place.parent.is_symlink() or name == "veriformer"


def test_every_public_name_is_one_object() -> None:
    first = {name: getattr(veriformer, name) for name in veriformer.__all__}
    assert all(getattr(veriformer, name) is value for name, value in first.items())
    assert set(veriformer.__all__) <= {*veriformer._HOMES, "__version__"} and set(veriformer._HOMES) <= set(first)
    with pytest.raises(AttributeError, match="module 'veriformer' has no attribute 'chek'"):
        veriformer.chek  # noqa: B018


def test_no_submodule_bears_a_public_name() -> None:
    names = {module.name for module in pkgutil.iter_modules(veriformer.__path__)}
    assert not names & set(veriformer.__all__) and "law" in names


def test_importing_the_package_imports_nothing_else() -> None:
    code = "import sys; before = set(sys.modules); import veriformer; print(sorted(set(sys.modules) - before))"
    done = run_python("-c", code, folder=ROOT)
    assert [name for name in ast.literal_eval(done.stdout) if name.startswith("veriformer")] == ["veriformer"]


def test_the_version_is_said_once() -> None:
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert table.get("version", veriformer.__version__) == veriformer.__version__


def test_no_file_is_too_long() -> None:
    folders = ("veriformer", "reference", "properties", "impls", "benchmarks")
    long = [str(p) for folder in folders for p in sources(folder)
            if len(p.read_text().splitlines()) > 400]  # fmt: skip
    assert long == []
