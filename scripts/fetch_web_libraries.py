"""Fetch the libraries that the chat page uses for Markdown, maths and colours of code, with npm.

usage: python scripts/fetch_web_libraries.py               fetch what is missing; nothing if all is right
       python scripts/fetch_web_libraries.py --check       only say whether all is right; status 1 if not
       python scripts/fetch_web_libraries.py --sbom FILE   add the libraries to a list of components (CycloneDX, JSON)

Versions and checksums are in src/anabatic/infer/web/libraries.json. To take another version, change it there, with
`npm view NAME@VERSION dist.integrity` and the `sha256sum` of each file in the archive that `npm pack` fetches.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zlib
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MAX_ARCHIVE_BYTES = 32 << 20
MAX_FILE_BYTES = 4 << 20
NPM_SECONDS = 180
_RETRIES = ("--fetch-retries=1", "--fetch-timeout=30000")


class FetchError(Exception):
    """Why the libraries could not be fetched, and what to do."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


def load_libraries_module() -> ModuleType:
    """Return `anabatic.infer.web.libraries` without installing or importing the package around it."""
    path = ROOT / "src" / "anabatic" / "infer" / "web" / "libraries.py"
    spec = importlib.util.spec_from_file_location("web_libraries", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def pack_archives(libraries: list[Any], folder: Path) -> dict[str, Path]:
    """Let npm fetch the archives into `folder`. Return them by name of the package.

    Raises:
        FetchError: there is no npm, or it failed.
    """
    npm = shutil.which("npm")
    if npm is None:
        raise FetchError(
            "npm is not installed", "install Node.js with npm, then: python scripts/fetch_web_libraries.py"
        )
    names = [f"{library.package}@{library.version}" for library in libraries]
    # In an empty folder: no .npmrc but the user's own is read.
    command = [npm, "pack", "--json", "--ignore-scripts", *_RETRIES, "--pack-destination", str(folder), *names]
    try:
        run = subprocess.run(
            command,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=NPM_SECONDS,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired as error:
        raise FetchError(
            f"npm did not answer within {NPM_SECONDS} s", "check the network and npm's registry"
        ) from error
    if run.returncode:
        lines = [line for line in run.stderr.splitlines() if line.strip() and "complete log" not in line]
        reason = "; ".join(lines[:3]) or "no message"
        raise FetchError(
            f"npm pack ended with status {run.returncode}: {reason}", "check the network and npm's registry"
        )
    # npm's names of scoped packages differ between versions of npm; the archives are told apart by their checksums.
    found = {compute_integrity(path): path for path in folder.glob("*.tgz")}
    archives = {}
    for library in libraries:
        if library.integrity not in found:
            raise FetchError(
                f"{library.package}@{library.version}: none of the {len(found)} archives that npm fetched has the "
                f"checksum {library.integrity[:20]}... of libraries.json",
                "the registry has another content under this version: do not use it, and check npm's registry",
            )
        archives[library.package] = found[library.integrity]
    return archives


def compute_integrity(path: Path) -> str:
    """Return the checksum of an archive as npm writes it."""
    if path.stat().st_size > MAX_ARCHIVE_BYTES:
        return f"more than {MAX_ARCHIVE_BYTES >> 20} MiB"
    return "sha512-" + base64.b64encode(hashlib.sha512(path.read_bytes()).digest()).decode()


def extract_files(library: Any, archive: Path, folder: Path) -> None:
    """Write the files of the table, and no others, from an archive into `folder`.

    Raises:
        FetchError: the archive is damaged, or a file is missing, too large or another one.
    """
    wanted = dict(library.sha256)
    label = f"{library.package}@{library.version}"
    try:
        with tarfile.open(archive, "r:gz") as file:
            for member in file:
                # The first folder is named `package` by convention only.
                source = member.name.partition("/")[2]
                if source not in wanted or not member.isreg():
                    continue
                if member.size > MAX_FILE_BYTES:
                    raise FetchError(f"{label}: {source} has {member.size:,} bytes", "check libraries.json")
                stream = file.extractfile(member)
                content = stream.read() if stream else b""
                if hashlib.sha256(content).hexdigest() != wanted.pop(source):
                    raise FetchError(
                        f"{label}: {source} has another checksum than in libraries.json", "correct the table"
                    )
                path = library.find_path(source, folder)
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(content)
    except (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise FetchError(f"{label}: the archive is damaged: {error}", "fetch it again") from error
    if wanted:
        raise FetchError(f"{label}: the archive has no {', '.join(sorted(wanted))}", "correct libraries.json")


def fetch_libraries(libraries: list[Any], folder: Path) -> None:
    """Fetch all libraries; `folder` is replaced as a whole, or stays as it is.

    Raises:
        FetchError, OSError
    """
    with tempfile.TemporaryDirectory(prefix=".libraries-", dir=folder.parent) as temporary:
        downloads, fresh, old = (Path(temporary) / name for name in ("downloads", "fresh", "old"))
        downloads.mkdir()
        fresh.mkdir()
        archives = pack_archives(libraries, downloads)
        for library in libraries:
            extract_files(library, archives[library.package], fresh)
        if folder.exists():
            folder.rename(old)
        fresh.rename(folder)


def add_to_sbom(libraries: list[Any], path: Path) -> None:
    """Add the libraries to the components of a CycloneDX document."""
    document = json.loads(path.read_text(encoding="utf-8"))
    for library in libraries:
        address = f"pkg:npm/{library.package.replace('@', '%40')}@{library.version}"
        digest = base64.b64decode(library.integrity.partition("-")[2]).hex()
        document.setdefault("components", []).append(
            {
                "type": "library",
                "bom-ref": address,
                "name": library.package,
                "version": library.version,
                "purl": address,
                "hashes": [{"alg": "SHA-512", "content": digest}],
                "licenses": [{"license": {"id": library.licence}}],
            }
        )
    temporary = path.with_name(path.name + ".partial")
    temporary.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def main(words: list[str]) -> int:
    module = load_libraries_module()
    libraries, folder = module.read_table(), module.FOLDER
    if len(words) == 2 and words[0] == "--sbom":
        add_to_sbom(libraries, Path(words[1]))
        return 0
    if words not in ([], ["--check"]):
        sys.stderr.write(__doc__ or "")
        return 2
    wrong = module.find_wrong_files(libraries, folder)
    if not wrong:
        return 0
    try:
        if words == ["--check"]:
            raise FetchError(
                f"{len(wrong)} files of the page libraries are missing or changed, for example {wrong[0].name}",
                "python scripts/fetch_web_libraries.py",
            )
        fetch_libraries(libraries, folder)
    except (FetchError, OSError) as error:
        hint = getattr(error, "hint", "check the rights and the space of the folder")
        sys.stderr.write(f"error: {error}\nhint: {hint}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
