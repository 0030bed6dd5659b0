"""What is built from the sources holds what it must, and nothing else."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from anabatic.core import extras
from house import tree

OWN_IMPORTS = {
    "recipes/serve.py",
    "studio/server.py",  # the whole module belongs to the extra
    "launch/schedulers/ray_cluster.py",  # the actor, which runs where ray is
    "monitor/sources/nvml.py",  # no error: the devices are shown as unreadable
}


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


def test_optional_packages_are_those_of_the_extras() -> None:
    """What the code imports with a hint is in the extra that the hint names."""
    project = (tree.ROOT / "pyproject.toml").read_text(encoding="utf-8")
    block = project.partition("[project.optional-dependencies]\n")[2].partition("dev = [")[0]
    declared = {
        (re.split(r"[><=]", package)[0], name)
        for name, packages in re.findall(r"^(\w+) = \[(.*?)\]", block, re.M | re.S)
        if name != "trajectory"
        for package in re.findall(r'"([^"]+)"', packages)
    }
    assert declared == {row for row in extras.OPTIONAL_PACKAGES.values() if row[1]}


def test_optional_packages_are_imported_in_one_way() -> None:
    """No module imports one by itself, except where the whole module belongs to the extra."""
    server = tree.SRC / "infer" / "server"
    found = []
    for path in tree.SRC.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if any(name.partition(".")[0] in extras.OPTIONAL_PACKAGES for name in names):
                found.append(path)
    others = {path.relative_to(tree.SRC).as_posix() for path in found if server not in path.parents}
    assert others == OWN_IMPORTS
