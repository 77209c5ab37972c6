"""`veriformer history --asv`: asv's pages with scripts from npm packages. asv and npm are fakes."""

from __future__ import annotations

import stat
from functools import partial
from pathlib import Path
from typing import Any

import histories
import pytest
from histories import git, put, repository

from veriformer.calling import UsageError
from veriformer.history import publishing, recording
from veriformer.history.publishing import install, localise, source_of, sources_of

INDEX = """<html><head>
<script src="https://code.jquery.com/jquery-3.3.1.min.js" integrity="sha256-a=" crossorigin="anonymous" onerror="f()"></script>
<script src="https://cdnjs.cloudflare.com/ajax/libs/flot/0.8.3/jquery.flot.time.min.js" referrerpolicy="no-referrer"></script>
<script language="javascript" type="text/javascript" src="jquery.flot.axislabels.js"></script>
<script src="https://cdnjs.cloudflare.com/ajax/libs/stupidtable/1.0.1/stupidtable.min.js"></script>
<script src="//cdn.jsdelivr.net/npm/@some/one@1.0.0/js/one.js"></script>
<link rel="stylesheet" href="https://cdn.jsdelivr.net/npm/bootstrap@3.1.1/dist/css/bootstrap.min.css" integrity="sha256-b=">
<link href="asv.css" rel="stylesheet"/>
</head><body><a href="https://github.com/airspeed-velocity/asv/">asv</a></body></html>
"""  # noqa: E501
FILES = (
    "jquery/dist/jquery.min.js", "flot/jquery.flot.time.js", "stupid-table-plugin/stupidtable.min.js",
    "@some/one/js/one.js", "bootstrap/dist/css/bootstrap.min.css",
)  # fmt: skip
PACKAGES = ["@some/one@1.0.0", "bootstrap@3.1.1", "flot@0.8.3", "jquery@3.3.1", "stupid-table-plugin@1.1.3"]


@pytest.fixture
def modules(tmp_path: Path) -> Path:
    """A node_modules folder with the files that INDEX loads."""
    folder = tmp_path / "npm/node_modules"
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


@pytest.fixture
def index(tmp_path: Path) -> Path:
    path = tmp_path / "html/index.html"
    path.parent.mkdir()
    path.write_text(INDEX)
    return path


run = partial(histories.run, "--asv")


def test_packages_and_versions_are_those_that_the_page_asks_for(index: Path) -> None:
    assert sorted(f"{source.package}@{source.version}" for source in sources_of(index)) == PACKAGES


def test_a_localised_page_loads_nothing_from_outside(index: Path, modules: Path) -> None:
    localise(index, sources_of(index), modules)
    text = index.read_text()
    assert sources_of(index) == [] and "integrity" not in text and "crossorigin" not in text
    assert 'src="lib/jquery-jquery-3.3.1.min.js" onerror="f()"' in text
    assert '<a href="https://github.com/airspeed-velocity/asv/">' in text and 'src="jquery.flot.axislabels.js"' in text
    copied = sorted(path.read_text() for path in (index.parent / "lib").iterdir())
    assert copied == sorted(FILES) and all(path.name in text for path in (index.parent / "lib").iterdir())


@pytest.mark.parametrize(
    "link",
    ["https://cdnjs.cloudflare.com/ajax/libs/unheard/1.0/of.js", "https://example.invalid/x.js", "//a.b/jquery-1.js"],
)
def test_a_link_without_a_known_package_is_named(index: Path, link: str) -> None:
    index.write_text(INDEX.replace("https://code.jquery.com/jquery-3.3.1.min.js", link))
    with pytest.raises(UsageError, match="no npm package is known") as error:
        sources_of(index)
    assert f"loads {link}," in str(error.value)


def test_a_package_without_the_file_is_named(index: Path, modules: Path) -> None:
    (modules / FILES[0]).unlink()
    with pytest.raises(UsageError, match=r"npm package jquery 3\.3\.1 holds no jquery-3\.3\.1\.min\.js"):
        localise(index, sources_of(index), modules)
    assert source_of("//cdn.jsdelivr.net/npm/a@2/b.js").path == "b.js"


def fake_npm(folder: Path, body: str) -> None:
    folder.mkdir(exist_ok=True)
    path = folder / "npm"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_npm_is_called_once_for_all_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_npm(tmp_path / "bin", f'echo "$@" >> {tmp_path}/calls')
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert install(["a@1", "b@2"], tmp_path / "npm") == tmp_path / "npm/node_modules"
    (call,) = (tmp_path / "calls").read_text().splitlines()
    assert call.startswith(f"install --prefix {tmp_path}/npm ") and call.endswith(" a@1 b@2") and "--ignore-scr" in call


def test_npm_missing_or_failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(UsageError, match="npm, which is not installed: install Node.js"):
        install(["a@1"], tmp_path / "npm")
    fake_npm(tmp_path / "bin", "echo 'npm error no network' >&2; exit 1")
    with pytest.raises(UsageError, match="npm cannot install a@1: npm error no network"):
        install(["a@1"], tmp_path / "npm")


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, modules: Path) -> list[Any]:
    """A checkout in which asv publishes INDEX, and npm has everything; the calls of both."""
    root, calls = tmp_path / "clone", []  # type: ignore[var-annotated]
    repository(root, ("one",))
    monkeypatch.chdir(root)

    def asv(checkout: Any, *words: str) -> int:
        calls.append(words)
        if words[0] == "publish":
            put(checkout.pages / "index.html", "")
            (checkout.pages / "index.html").write_text(INDEX)
        return 0

    monkeypatch.setattr(recording, "find_spec", lambda name: name)
    monkeypatch.setattr(publishing, "run_asv", asv)
    monkeypatch.setattr(publishing, "install", lambda packages, folder: calls.append((packages, folder)) or modules)
    return calls


def test_pages_are_published_localised_and_served(
    published: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run() == 0
    npm = tmp_path / "clone/.asv/npm"
    assert published == [("publish", "--no-pull"), (PACKAGES, npm), ("preview", "--browser")]
    assert sources_of(tmp_path / "clone/.asv/html/index.html") == []


def test_pages_are_not_served_where_nothing_is_to_open(
    published: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--no-open") == 0 and [words[0] for words in published][-1] != "preview"
    assert "serve them: asv preview" in capsys.readouterr().out


def test_a_detached_head_is_no_hindrance_to_asv(published: list[Any]) -> None:
    git(Path.cwd(), "checkout", "-q", "--detach")
    assert run("--no-open") == 0


def test_nothing_published_is_a_failure(
    published: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put(Path.cwd() / ".asv/html/index.html", "left by an earlier run")
    monkeypatch.setattr(publishing, "run_asv", lambda *_: 0)
    assert run("--no-open") == 1 and "asv published nothing" in capsys.readouterr().err
