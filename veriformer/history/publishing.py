"""asv's own pages, made to work offline: their scripts come from npm packages instead of other people's servers.

`asv publish` writes an index.html that loads ten scripts and styles from outside; without a network it shows an
error alone. Nothing of npm is committed: packages go to .asv/npm, files beside index.html.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from veriformer.calling import UsageError
from veriformer.history.checkout import Checkout
from veriformer.history.recording import need_asv, run_asv

LIBRARIES = {
    "flot": "flot",
    "blueimp-md5": "blueimp-md5",
    "bootstrap": "bootstrap",
    "jquery": "jquery",
    "stupidtable": "stupid-table-plugin",
}
"""What cdnjs.com calls a library, and its npm package."""
ONLY = {"stupid-table-plugin": "1.1.3"}
"""Packages of which npm has one version alone, whatever a link asks for."""
LOCAL = "lib"
"""The folder beside index.html for what came from packages."""
OUTSIDE = re.compile(r"<(?:script|link)\b[^>]*?\b(?:src|href)=\"((?:https?:)?//[^\"]+)\"[^>]*>")
"""A tag that loads something from another server."""
REMEMBERED = re.compile(r"\s(?:integrity|crossorigin|referrerpolicy)=\"[^\"]*\"")
"""Attributes that are true of the file from outside alone."""
FORMS = (
    (re.compile(r"//cdn\.jsdelivr\.net/npm/(?P<package>(?:@[^/]+/)?[^@/]+)@(?P<version>[^/]+)/(?P<path>.+)"), False),
    (re.compile(r"//cdnjs\.cloudflare\.com/ajax/libs/(?P<package>[^/]+)/(?P<version>[^/]+)/(?P<path>.+)"), True),
    (re.compile(r"//code\.jquery\.com/(?P<path>(?P<package>jquery)-(?P<version>[\d.]+?)(?:\.min)?\.js)"), True),
)
"""How links name a package, a version and a file; whether the package's name must be looked up."""


@dataclass(frozen=True)
class Source:
    """Where a file that a page loads from outside is found: an npm package, its version, a path in it."""

    link: str
    package: str
    version: str
    path: str

    def file(self, modules: Path) -> Path:
        """The file in a node_modules folder; packages may keep it elsewhere, or not shortened.

        Raises UsageError where it is in none of these places.
        """
        full = self.path.replace(".min.", ".")
        bare = re.sub(rf"-{re.escape(self.version)}", "", self.path)
        places = [self.path, full, f"dist/{bare}", f"dist/{self.path}"]
        found = [modules / self.package / place for place in places if (modules / self.package / place).is_file()]
        if not found:
            raise UsageError(f"npm package {self.package} {self.version} holds no {self.path}, which {self.link} is")
        return found[0]


def source_of(link: str) -> Source:
    """The package behind a link.

    Raises UsageError, with the link, where none is known.
    """
    for form, looked_up in FORMS:
        match = form.search(link)
        if match and (not looked_up or match["package"] in LIBRARIES):
            package = LIBRARIES[match["package"]] if looked_up else match["package"]
            return Source(link, package, ONLY.get(package, match["version"]), match["path"])
    raise UsageError(f"asv's page loads {link}, for which no npm package is known: add it to history/publishing.py")


def sources_of(index: Path) -> list[Source]:
    """Everything that a page loads from outside, in its order.

    Raises UsageError where one has no known package.
    """
    return [source_of(match[1]) for match in OUTSIDE.finditer(index.read_text(encoding="utf-8"))]


def localise(index: Path, sources: Sequence[Source], modules: Path) -> None:
    """Copy the files of npm packages beside a page and let it load these.

    Raises UsageError where a package lacks its file.
    """
    local = {}
    for source in sources:
        path = Path(LOCAL, f"{source.package.replace('/', '-')}-{Path(source.path).name}")
        (index.parent / LOCAL).mkdir(exist_ok=True)
        shutil.copyfile(source.file(modules), index.parent / path)
        local[source.link] = path.as_posix()

    def rewritten(match: re.Match[str]) -> str:
        return REMEMBERED.sub("", match[0]).replace(match[1], local[match[1]])

    index.write_text(OUTSIDE.sub(rewritten, index.read_text(encoding="utf-8")), encoding="utf-8")


def install(packages: Sequence[str], folder: Path) -> Path:
    """Install npm packages (name@version) into a folder, all at once since later ones would remove earlier ones.

    Returns its node_modules. Raises UsageError where npm is missing or fails.
    """
    npm = shutil.which("npm")
    if npm is None:
        raise UsageError("asv's pages need scripts from npm, which is not installed: install Node.js")
    folder.mkdir(parents=True, exist_ok=True)
    quiet = ["--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error"]
    done = subprocess.run([npm, "install", "--prefix", str(folder), *quiet, *packages], capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["it says nothing"])[0]
        raise UsageError(f"npm cannot install {' '.join(packages)}: {said}")
    return folder / "node_modules"


def show_pages(checkout: Checkout, opened: bool) -> int:
    """Publish asv's pages, make them work offline, then serve them, or say how; 1 where asv writes none.

    Raises UsageError where asv or npm is missing, or a page loads what no package is known for.
    """
    need_asv()
    index = checkout.pages / "index.html"
    index.unlink(missing_ok=True)
    run_asv(checkout, "publish", "--no-pull")
    if not index.is_file():
        print("veriformer: asv published nothing; see what it says above", file=sys.stderr)
        return 1
    sources = sources_of(index)
    packages = sorted({f"{source.package}@{source.version}" for source in sources})
    localise(index, sources, install(packages, checkout.root / ".asv" / "npm") if packages else Path())
    print(f"asv's pages: {index} (from a server only; they work offline)")
    if not opened:
        print("serve them: asv preview")
        return 0
    return run_asv(checkout, "preview", "--browser")
