"""The files a visitor looks for are there, and text files are clean."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from anabatic import __version__
from house import tree

EXPECTED = (
    "README.md",
    "README.zh.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "CODE_OF_CONDUCT.md",
    "SECURITY.md",
    "LICENSE",
    "Makefile",
    "constraints.txt",
    "requirements-dev.txt",
    "requirements-serve.txt",
    ".ci/run",
    ".pre-commit-config.yaml",
    ".editorconfig",
)
LARGEST = 500_000


@pytest.mark.parametrize("name", EXPECTED)
def test_file_is_there(name: str) -> None:
    assert (tree.ROOT / name).stat().st_size > 0


@pytest.mark.process
@pytest.mark.parametrize("name", [".ci/run", "scripts/setup.sh", "scripts/setup_other.sh"])
def test_scripts_are_sound(name: str) -> None:
    assert os.access(tree.ROOT / name, os.X_OK)
    subprocess.run(["bash", "-n", tree.ROOT / name], check=True)


def test_text_files_are_clean() -> None:
    found = []
    for path in tree.tracked():
        text = tree.text(path)
        if path.stat().st_size > LARGEST:
            found.append(f"{tree.name(path)}: larger than {LARGEST} bytes")
        elif text and re.search(r"[ \t]+$|\r", text, re.M):
            found.append(f"{tree.name(path)}: blanks at the end of a line")
        elif text and not text.endswith("\n"):
            found.append(f"{tree.name(path)}: no newline at the end")
    assert not found


def test_changelog_has_the_version() -> None:
    text = (tree.ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    releases = re.findall(r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?$", text, re.M)
    assert releases[0] == ("Unreleased", "")
    assert all(date for _, date in releases[1:])
    assert __version__ in text


@pytest.mark.process
def test_python_module_is_the_command() -> None:
    run = subprocess.run([sys.executable, "-m", "anabatic", "--version"], capture_output=True, text=True, check=True)
    assert run.stdout.strip().endswith(__version__)
