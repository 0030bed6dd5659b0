"""The locks hold what set-up and the images install: the versions of constraints.txt, with checksums."""

from __future__ import annotations

import base64
import hashlib
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest
import tomli
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from house import tree

EXTRAS = ("dev", "serve")
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
WRITE_ANEW = "python scripts/pin.py --hashes"


class Line(NamedTuple):
    """A pin, with the checksums of a lock or without."""

    name: str
    version: str
    marker: str
    hashes: list[str]


def read_lines(file: str) -> list[Line]:
    """The pins of a file of requirements."""
    text = (tree.ROOT / file).read_text(encoding="utf-8").replace(" \\\n", " ")
    lines = []
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        match = re.fullmatch(r"([a-z0-9-]+)==([^\s;]+)(?:; ([^#]+?))?((?: +--hash=sha256:[0-9a-f]{64})*)", line)
        assert match, f"{file}: {line}"
        hashes = re.findall(r"--hash=sha256:(\w+)", match[4])
        lines.append(Line(match[1], match[2], match[3] or "", hashes))
    return lines


def versions(lines: list[Line], python: str) -> dict[str, str]:
    """Name -> version on a Python; a package has one line there."""
    lines = [line for line in lines if holds(line.marker, python)]
    assert len({line.name for line in lines}) == len(lines)
    return {line.name: line.version for line in lines}


def holds(marker: str, python: str) -> bool:
    """Return whether a marker holds on Linux."""
    return not marker or Marker(marker).evaluate(
        {"python_version": python, "python_full_version": f"{python}.5", "sys_platform": "linux", "extra": ""}
    )


@pytest.mark.parametrize("extra", EXTRAS)
def test_every_package_has_checksums(extra: str) -> None:
    lines = read_lines(f"requirements-{extra}.txt")
    assert len(lines) > 50
    assert not [line.name for line in lines if not line.hashes or len(set(line.hashes)) != len(line.hashes)]
    seen = [digest for line in lines for digest in line.hashes]
    assert len(set(seen)) == len(seen), "a checksum belongs to one file"
    forbidden = ("torch", "nvidia-", "cuda-", "triton")
    assert not [line.name for line in lines if line.name.startswith(forbidden)]


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("extra", EXTRAS)
def test_versions_and_markers_are_those_of_the_constraints(extra: str, python: str) -> None:
    pinned = versions(read_lines("constraints.txt"), python)
    locked = versions(read_lines(f"requirements-{extra}.txt"), python)
    assert locked.items() <= pinned.items(), WRITE_ANEW
    if extra == "dev":
        assert pinned.keys() - locked.keys() == {"torch"}, "a pin that nothing needs, or a lock of before"


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("extra", EXTRAS)
def test_what_pyproject_asks_for_is_locked(extra: str, python: str) -> None:
    document = tomli.loads((tree.ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project = document["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"][extra], *document["build-system"]["requires"]]
    locked = versions(read_lines(f"requirements-{extra}.txt"), python)
    assert len(asked) > 15
    for requirement in map(Requirement, asked):
        name = canonicalize_name(requirement.name)
        if name == "torch" or not holds(str(requirement.marker or ""), python):
            continue
        assert name in locked, WRITE_ANEW
        assert requirement.specifier.contains(locked[name], prereleases=True), name


def test_set_up_reads_the_lock_and_notices_its_changes() -> None:
    script = (tree.ROOT / "scripts" / "setup.sh").read_text(encoding="utf-8")
    assert "--require-hashes --no-deps -r requirements-dev.txt" in script
    (fingerprint,) = re.findall(r"^ +\{ cat (.*?); pwd", script, re.M)
    assert set(fingerprint.split()) == {
        "pyproject.toml",
        "constraints.txt",
        "requirements-dev.txt",
        "scripts/setup.sh",
    }


def make_wheel(folder: Path, name: str) -> str:
    """Write a wheel of one empty module; return its sha256."""
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    files = {
        f"{name}.py": b"",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for file, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        record += f"{file},sha256={digest},{len(content)}\n"
    with zipfile.ZipFile(path, "w") as wheel:
        for file, content in files.items():
            wheel.writestr(file, content)
        wheel.writestr(f"{info}/RECORD", f"{record}{info}/RECORD,,\n")
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.process
@pytest.mark.parametrize("same", [True, False])
def test_pip_refuses_another_file(tmp_path: Path, same: bool) -> None:
    """The form of the locks is one that pip checks."""
    digest = make_wheel(tmp_path, "tinywheel")
    digests = ["0" * 64, digest if same else "f" * 64]
    lock = tmp_path / "lock.txt"
    lock.write_text(" \\\n".join(["tinywheel==1.0", *(f"    --hash=sha256:{digest}" for digest in digests)]) + "\n")
    target = tmp_path / "installed"
    words = ["install", "--require-hashes", "--no-deps", "--no-compile", "--no-index", "--find-links", tmp_path]
    run = subprocess.run(
        [sys.executable, "-m", "pip", "--isolated", *words, "--target", target, "-r", lock],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (run.returncode == 0) == same == (target / "tinywheel.py").exists(), run.stderr
    assert ("DO NOT MATCH THE HASHES" in run.stderr) != same
