"""What set-up says on machines where it cannot work, and that it is quick where it has worked."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from house import tree

TOOLS = ("bash", "dirname", "sed", "cat", "cut", "sha256sum", "head", "grep", "rm", "env", "flock", "tr")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what set-up reads, in a folder with a space in its name."""
    folder = tmp_path / "a checkout"
    (folder / "scripts").mkdir(parents=True)
    for name in ("pyproject.toml", "constraints.txt", "requirements-dev.txt", "Makefile", "scripts/setup.sh"):
        shutil.copy(tree.ROOT / name, folder / name)
    return folder


def setup(checkout: Path, pythons: dict[str, str], **variables: str) -> subprocess.CompletedProcess[str]:
    """Run set-up where PATH has only basic tools and the given fake interpreters (name -> shell script)."""
    path = checkout / "bin"
    path.mkdir()
    for tool in TOOLS:
        if found := shutil.which(tool):
            (path / tool).symlink_to(found)
    for name, script in pythons.items():
        (path / name).write_text(f"#!/bin/sh\n{script}\n")
        (path / name).chmod(0o755)
    environment = {"PATH": str(path), "HOME": os.environ.get("HOME", "/"), **variables}
    return subprocess.run(
        [checkout / "scripts" / "setup.sh"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


OLD = 'case "$1" in --version) echo Python 3.8.10;; *) exit 1;; esac'
NO_VENV = 'case "$2" in *ensurepip*) exit 1;; *) exit 0;; esac'


@pytest.mark.process
@pytest.mark.parametrize(
    ("pythons", "error", "hint"),
    [
        ({}, "no Python 3.10-3.14 found", "make demo PYTHON="),
        (
            {"python3": OLD},
            "no Python 3.10-3.14 found; seen: python3 (Python 3.8.10)",
            "apt-get install python3",
        ),
        ({"python3": NO_VENV}, "python3 cannot make virtual environments", "apt-get install python3-venv"),
    ],
)
def test_no_python(checkout: Path, pythons: dict[str, str], error: str, hint: str) -> None:
    run = setup(checkout, pythons)
    assert run.returncode == 2, run.stderr
    assert f"error: {error}" in run.stderr
    assert hint in run.stderr
    assert not (checkout / ".venv").exists()


@pytest.mark.process
def test_named_python_is_checked(checkout: Path) -> None:
    run = setup(checkout, {"mine": OLD}, PYTHON="mine")
    assert run.returncode == 2
    assert "PYTHON=mine is not a working Python 3.10-3.14" in run.stderr


def make_working_python(folder: Path, lock_status: int) -> str:
    """A script that answers as a Python would, writes what pip is asked to `folder`/calls, and installs nothing."""
    mkdir, link = shutil.which("mkdir"), shutil.which("ln")
    return f"""
case "$*" in
  "-m venv .venv") {mkdir} -p .venv/bin; {link} -s "$0" .venv/bin/python ;;
  "-m pip install "*)
    shift 2; echo "$@" >>'{folder}/calls'
    case "$*" in *requirements-dev.txt*) exit {lock_status} ;; esac ;;
  *"m.version('torch').partition"*) exit 1 ;;
esac
"""


@pytest.mark.process
def test_dev_is_installed_by_checksum_and_before_torch(checkout: Path) -> None:
    torch = re.findall(r"^torch==(.*)$", (checkout / "constraints.txt").read_text(encoding="utf-8"), re.M)[0]
    run = setup(checkout, {"python3": make_working_python(checkout, 0)})
    assert run.returncode == 0, run.stderr
    pip = "install --no-compile -c constraints.txt"
    assert (checkout / "calls").read_text().splitlines() == [
        f"{pip} --require-hashes --no-deps -r requirements-dev.txt",
        f"{pip} --no-deps torch=={torch}+cpu",
        f"{pip} --no-deps --no-build-isolation -e .",
    ]
    stamp = (checkout / ".venv" / "setup-dev.stamp").read_text()
    assert len(stamp.strip()) == 64


@pytest.mark.process
def test_a_file_with_another_checksum_ends_set_up(checkout: Path) -> None:
    run = setup(checkout, {"python3": make_working_python(checkout, 1)})
    assert run.returncode == 2
    assert "error: pip could not install requirements-dev.txt" in run.stderr and "\nhint: " in run.stderr
    assert len((checkout / "calls").read_text().splitlines()) == 1
    assert not list((checkout / ".venv").glob("*.stamp"))


def test_constraints_cover_every_requirement() -> None:
    """A package without a pin would be another one tomorrow."""
    text = (tree.ROOT / "constraints.txt").read_text(encoding="utf-8")
    pinned = {normal(line) for line in text.splitlines() if "==" in line}
    project = (tree.ROOT / "pyproject.toml").read_text(encoding="utf-8")
    lists = [re.search(rf"^{name} = \[\n(.*?)^\]", project, re.M | re.S) for name in ("dependencies", "dev")]
    wanted = {normal(line) for found in lists if found for line in re.findall(r'"([^"]+)"', found.group(1))}
    assert len(wanted) > 20
    assert not wanted - pinned, "write constraints.txt anew with scripts/pin.py"


def normal(requirement: str) -> str:
    """Return the name in `Name>=1.2; marker` as indexes write it."""
    return re.split(r"[<>=;\[ ]", requirement, maxsplit=1)[0].lower().replace("_", "-")
