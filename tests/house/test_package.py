"""What is built from the sources holds what it must, and nothing else."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from house import tree


def pip(*words: str | Path) -> None:
    """Run pip without network and without an isolated build environment."""
    run = subprocess.run([sys.executable, "-m", "pip", *words], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source archive."""
    pytest.importorskip("hatchling", reason="hatchling is not installed (it is in the dev extra)")
    out = tmp_path_factory.mktemp("sdist")
    code = "import sys, hatchling.build as b; print(b.build_sdist(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", code, out], cwd=tree.ROOT, check=True, capture_output=True)
    (found,) = out.glob("*.tar.gz")
    return found


@pytest.fixture(scope="module")
def wheel(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the source archive as an installer would."""
    out = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-index", "--no-build-isolation", "--no-deps", "--quiet", "--wheel-dir", out, archive)
    (found,) = out.glob("*.whl")
    return found


def test_wheel_holds_the_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
    expected = {
        "anabatic/" + path.relative_to(tree.SRC).as_posix() for path in tree.tracked() if tree.SRC in path.parents
    }
    assert expected <= names
    assert "anabatic/py.typed" in names
    foreign = [name for name in names if not name.startswith(("anabatic/", "anabatic-"))]
    assert not foreign


def test_wheel_names_its_licence_and_command(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        (metadata,) = (name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
        (entry,) = (name for name in file.namelist() if name.endswith(".dist-info/entry_points.txt"))
        text, commands = file.read(metadata).decode(), file.read(entry).decode()
    assert "License-Expression: Apache-2.0" in text
    assert "Requires-Python: <3.14,>=3.10" in text
    assert "anabatic = anabatic.cli.app:main" in commands


def test_sdist_holds_what_tests_need(archive: Path) -> None:
    with tarfile.open(archive) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    needed = {
        "pyproject.toml",
        "Makefile",
        "constraints.txt",
        "README.md",
        "LICENSE",
        "tests/conftest.py",
        "scripts/setup.sh",
    }
    assert needed <= names
    assert not [name for name in names if "__pycache__" in name or name.startswith((".venv", "runs"))]
