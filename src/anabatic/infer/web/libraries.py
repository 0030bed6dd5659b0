"""Libraries of the chat page by others: which files they are, and whether those that lie here are the right ones.

`libraries.json` names the npm packages with their versions and checksums. `scripts/fetch_web_libraries.py` fetches
them, `hatch_build.py` puts them into the wheel, and pages use what is there. All three load this file by itself, so it
imports the standard library only.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

TABLE = Path(__file__).with_name("libraries.json")
FOLDER = Path(__file__).with_name("libraries")
"""Folder of the fetched files; not in git."""
PATH_PREFIX = "/assets/"
"""Paths of the server below which these files are; they need no key, like the page that loads them."""


@dataclass(frozen=True)
class WebLibrary:
    """One npm package.

    Attributes:
        integrity: of its archive, as npm writes it: `sha512-` and base64 (https://www.w3.org/TR/SRI/).
        scripts: paths inside the package that the page runs; none: its code is part of another library here, and only
            the licence is needed.
        sha256: hexadecimal checksum of each script and of the licence, by path inside the package.
    """

    package: str
    version: str
    licence: str
    integrity: str
    scripts: tuple[str, ...]
    licence_file: str
    sha256: dict[str, str]

    def find_path(self, source: str, folder: Path = FOLDER) -> Path:
        """Return where a file of the package lies below `folder`: one folder per package, without its subfolders."""
        return folder / self.package.lstrip("@").replace("/", "-") / source.rpartition("/")[2]

    def is_right(self, source: str, folder: Path = FOLDER) -> bool:
        """Return whether a file is there and has the checksum of the table."""
        try:
            content = self.find_path(source, folder).read_bytes()
        except OSError:
            return False
        return hashlib.sha256(content).hexdigest() == self.sha256[source]


def read_table(path: Path = TABLE) -> list[WebLibrary]:
    """Return the libraries in the order in which a page loads them."""
    rows = json.loads(path.read_text(encoding="utf-8"))["libraries"]
    return [WebLibrary(**{**row, "scripts": tuple(row["scripts"])}) for row in rows]


def find_wrong_files(libraries: Iterable[WebLibrary], folder: Path = FOLDER) -> list[Path]:
    """Return the files that are missing or have another checksum."""
    return [
        library.find_path(source, folder)
        for library in libraries
        for source in library.sha256
        if not library.is_right(source, folder)
    ]


@dataclass(frozen=True)
class LibraryBundle:
    """The scripts of all libraries as one file, each after its licence."""

    content: bytes

    @cached_property
    def digest(self) -> str:
        """SHA-256 in hexadecimal."""
        return hashlib.sha256(self.content).hexdigest()

    @cached_property
    def integrity(self) -> str:
        """SHA-256 as `integrity` of a script and as source in a Content-Security-Policy."""
        return f"sha256-{base64.b64encode(bytes.fromhex(self.digest)).decode()}"

    @cached_property
    def compressed(self) -> bytes:
        """The content in gzip; the same bytes at each start."""
        return gzip.compress(self.content, 9, mtime=0)

    @property
    def path(self) -> str:
        """Its path at the server, from the page's; a new content has a new name, so browsers may keep it."""
        return f"{PATH_PREFIX[1:]}libraries-{self.digest[:16]}.js"


def bundle_scripts(libraries: Iterable[WebLibrary], folder: Path = FOLDER) -> LibraryBundle | None:
    """Return the scripts of the libraries of which every file is right; None if there are none."""
    parts = []
    for library in libraries:
        if not all(library.is_right(source, folder) for source in library.sha256):
            continue
        licence = library.find_path(library.licence_file, folder).read_text(encoding="utf-8").replace("*/", "* /")
        parts.append(f"/*! {library.package} {library.version}, {library.licence}\n\n{licence.strip()}\n*/\n")
        parts += [f"{library.find_path(source, folder).read_text(encoding='utf-8')}\n;\n" for source in library.scripts]
    return LibraryBundle("".join(parts).encode()) if parts else None
