"""Libraries of the chat page: fetched by checksum or not at all."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from anabatic.infer.web import libraries
from house import tree

SCRIPT = "scripts/fetch_web_libraries.py"
WEB = Path("src", "anabatic", "infer", "web")
FILES = {
    "one": {"dist/one.min.js": b"one = 1", "LICENSE": b"Licence of one"},
    "@two/parts": {"parts/two.js": b"two = 2", "LICENSE.txt": b"Licence of two"},
}
NPM = """#!/bin/sh
while [ $# -gt 0 ]; do
  [ "$1" = --pack-destination ] && folder=$2
  shift
done
cp "$ARCHIVES"/*.tgz "$folder"/
"""


def pack(path: Path, files: dict[str, bytes], others: list[tarfile.TarInfo] | None = None) -> None:
    with tarfile.open(path, "w:gz") as file:
        for member in others or []:
            file.addfile(member, io.BytesIO(b"x" * member.size) if member.size else None)
        for name, content in files.items():
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))


class Checkout:
    """What the script needs of a clone, an `npm` that copies archives of this test, and these archives."""

    def __init__(self, root: Path) -> None:
        self.root, self.archives, self.programs = root / "a clone", root / "archives", root / "programs"
        for folder in (self.root / "scripts", self.root / WEB, self.archives, self.programs):
            folder.mkdir(parents=True)
        for name in (SCRIPT, WEB / "libraries.py"):
            shutil.copy(tree.ROOT / name, self.root / name)
        for tool in ("sh", "cp"):
            (self.programs / tool).symlink_to(shutil.which(tool) or "")
        self.write_npm(NPM)
        for package, files in FILES.items():
            pack(self.find_archive(package), files)
        self.write_table()

    @property
    def folder(self) -> Path:
        return self.root / WEB / "libraries"

    def find_archive(self, package: str) -> Path:
        return self.archives / f"{package.strip('@').replace('/', '-')}-1.0.0.tgz"

    def write_npm(self, text: str) -> None:
        (self.programs / "npm").write_text(text)
        (self.programs / "npm").chmod(0o755)

    def write_table(self, **changes: Any) -> None:
        rows = []
        for package, files in FILES.items():
            digest = hashlib.sha512(self.find_archive(package).read_bytes()).digest()
            script, licence = files
            row = {
                "package": package,
                "version": "1.0.0",
                "licence": "MIT",
                "integrity": f"sha512-{base64.b64encode(digest).decode()}",
                "scripts": [script],
                "licence_file": licence,
                "sha256": {name: hashlib.sha256(content).hexdigest() for name, content in files.items()},
            }
            rows.append({**row, **changes.get(package, {})})
        (self.root / WEB / "libraries.json").write_text(json.dumps({"libraries": rows}))

    def fetch(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": str(self.programs), "ARCHIVES": str(self.archives), "HOME": str(self.root)}
        command = [sys.executable, self.root / SCRIPT, *words]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)

    def read_folder(self) -> dict[str, bytes]:
        files = [path for path in self.folder.rglob("*") if path.is_file()]
        return {path.relative_to(self.folder).as_posix(): path.read_bytes() for path in files}

    def list_leftovers(self) -> set[str]:
        return {path.name for path in (self.root / WEB).iterdir()} - {
            "libraries",
            "libraries.json",
            "libraries.py",
            "__pycache__",
        }


RIGHT = {
    "one/one.min.js": b"one = 1",
    "one/LICENSE": b"Licence of one",
    "two-parts/two.js": b"two = 2",
    "two-parts/LICENSE.txt": b"Licence of two",
}


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


@pytest.mark.process
def test_the_named_files_are_fetched_once(checkout: Checkout) -> None:
    assert checkout.fetch("--check").returncode == 1
    run = checkout.fetch()
    assert (run.returncode, run.stderr) == (0, "")
    assert checkout.read_folder() == RIGHT and not checkout.list_leftovers()
    (checkout.programs / "npm").unlink()
    assert checkout.fetch().returncode == 0 and checkout.fetch("--check").returncode == 0


@pytest.mark.process
def test_a_changed_file_is_replaced(checkout: Checkout) -> None:
    checkout.fetch()
    (checkout.folder / "one" / "one.min.js").write_text("stolen = 1")
    (checkout.folder / "old").mkdir()
    run = checkout.fetch("--check")
    assert run.returncode == 1 and "one.min.js" in run.stderr and SCRIPT in run.stderr
    assert checkout.fetch().returncode == 0
    assert checkout.read_folder() == RIGHT and not (checkout.folder / "old").exists()


def link(name: str, target: str) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = tarfile.SYMTYPE, target
    return member


def blank(name: str, size: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size = size
    return member


def make_other_content(checkout: Checkout) -> None:
    pack(checkout.find_archive("one"), {**FILES["one"], "dist/one.min.js": b"stolen = 1"})


def make_other_file(checkout: Checkout) -> None:
    make_other_content(checkout)
    checkout.write_table()


def make_link(checkout: Checkout) -> None:
    pack(checkout.find_archive("one"), {"LICENSE": b"Licence of one"}, [link("package/dist/one.min.js", "/etc/passwd")])
    checkout.write_table()


def make_huge_file(checkout: Checkout) -> None:
    pack(checkout.find_archive("one"), FILES["one"], [blank("package/dist/one.min.js", 5 << 20)])
    checkout.write_table()


def make_torn_archive(checkout: Checkout) -> None:
    archive = checkout.find_archive("one")
    archive.write_bytes(archive.read_bytes()[:-40])
    checkout.write_table()


def make_no_archive(checkout: Checkout) -> None:
    archive = checkout.find_archive("one")
    archive.write_bytes(b"<html>log in</html>")
    checkout.write_table()


@pytest.mark.process
@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (make_other_content, "one@1.0.0: none of the 2 archives that npm fetched has the checksum sha512-"),
        (make_other_file, "one@1.0.0: dist/one.min.js has another checksum"),
        (make_link, "one@1.0.0: the archive has no dist/one.min.js"),
        (make_huge_file, "one@1.0.0: dist/one.min.js has 5,242,880 bytes"),
        (make_torn_archive, "one@1.0.0: the archive is damaged"),
        (make_no_archive, "one@1.0.0: the archive is damaged"),
        (lambda checkout: (checkout.programs / "npm").unlink(), "npm is not installed"),
        (lambda checkout: checkout.write_npm("#!/bin/sh\necho 'npm error network closed' >&2\nexit 7\n"), "status 7"),
        (lambda checkout: checkout.write_npm("#!/bin/sh\nexit 0\n"), "none of the 0 archives"),
    ],
)
def test_what_goes_wrong_changes_nothing(checkout: Checkout, break_it: Any, message: str) -> None:
    checkout.fetch()
    changed = checkout.folder / "two-parts" / "two.js"
    changed.write_bytes(b"changed")
    break_it(checkout)
    run = checkout.fetch()
    assert run.returncode == 1
    assert run.stderr.startswith("error: ") and message in run.stderr and "\nhint: " in run.stderr
    assert "Traceback" not in run.stderr and len(run.stderr.splitlines()) == 2
    assert checkout.read_folder() == {**RIGHT, "two-parts/two.js": b"changed"} and not checkout.list_leftovers()


@pytest.mark.process
def test_other_members_of_an_archive_are_not_written(checkout: Checkout) -> None:
    others = [
        blank("../../evil.js", 3),
        blank("/tmp/evil.js", 3),
        blank("package/../../../evil.js", 3),
        link("package/x", "/"),
    ]
    pack(checkout.find_archive("one"), FILES["one"], others)
    checkout.write_table()
    assert checkout.fetch().returncode == 0
    assert checkout.read_folder() == RIGHT
    assert not list(checkout.root.parent.rglob("evil.js"))


@pytest.mark.process
def test_components_of_a_release(checkout: Checkout, tmp_path: Path) -> None:
    path = tmp_path / "anabatic.cdx.json"
    path.write_text(json.dumps({"bomFormat": "CycloneDX", "components": [{"name": "torch"}]}))
    assert checkout.fetch("--sbom", path).returncode == 0
    components = json.loads(path.read_text())["components"]
    assert [row["name"] for row in components] == ["torch", "one", "@two/parts"]
    assert components[2]["purl"] == "pkg:npm/%40two/parts@1.0.0"
    expected = hashlib.sha512(checkout.find_archive("one").read_bytes()).hexdigest()
    assert components[1]["hashes"] == [{"alg": "SHA-512", "content": expected}]


def test_table_names_exact_versions_and_licences() -> None:
    table = libraries.read_table()
    assert {"markdown-it", "temml", "@highlightjs/cdn-assets"} <= {row.package for row in table}
    for row in table:
        assert re.fullmatch(r"\d+\.\d+\.\d+", row.version)
        assert len(base64.b64decode(row.integrity.removeprefix("sha512-"), validate=True)) == 64
        assert {*row.scripts, row.licence_file} == set(row.sha256)
    paths = [row.find_path(source) for row in table for source in row.sha256]
    assert len(set(paths)) == len(paths)


def test_bundle_is_small_and_has_the_licences() -> None:
    table = libraries.read_table()
    if libraries.find_wrong_files(table):
        pytest.skip("the libraries of the page were not fetched: python scripts/fetch_web_libraries.py")
    bundle = libraries.bundle_scripts(table)
    assert bundle is not None and len(bundle.compressed) < 150_000
    text = bundle.content.decode()
    assert all(f"/*! {row.package} {row.version}, {row.licence}\n" in text for row in table)
    assert text.count("THE SOFTWARE IS PROVIDED") >= 6 and "Redistributions in binary form" in text


@pytest.mark.process
def test_bundle_leaves_out_what_is_not_right(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    table = libraries.read_table(checkout.root / WEB / "libraries.json")
    assert libraries.bundle_scripts(table, checkout.folder) is None
    checkout.fetch()
    (checkout.folder / "one" / "LICENSE").unlink()
    bundle = libraries.bundle_scripts(table, checkout.folder)
    assert bundle is not None and b"two = 2" in bundle.content and b"one = 1" not in bundle.content


@pytest.mark.process
def test_setup_goes_on_without_the_libraries(tmp_path: Path) -> None:
    """The function of set-up by itself: one line, and no second try with the same table."""
    text = (tree.ROOT / "scripts" / "setup.sh").read_text(encoding="utf-8")
    part = text[text.index("LIBRARIES=src/") : text.index("# --- the steps")]
    checkout = Checkout(tmp_path)
    (checkout.programs / "npm").unlink()
    (checkout.root / ".venv").mkdir()
    say = "say() { printf 'setup: %s\\n' \"$*\"; }"
    program = f"set -euo pipefail\n{say}\nVENV_PYTHON={sys.executable}\n{part}\nfetch_libraries\nfetch_libraries\n"
    environment = {**os.environ, "PATH": os.pathsep.join([str(checkout.programs), "/usr/bin", "/bin"])}
    if shutil.which("npm", path="/usr/bin:/bin"):
        checkout.write_npm("#!/bin/sh\nexit 9\n")
    run = subprocess.run(
        ["bash", "-c", program],
        cwd=checkout.root,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert run.returncode == 0, run.stderr
    assert len(run.stdout.splitlines()) == 1 and "will show text without Markdown" in run.stdout
