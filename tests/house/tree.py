"""The files of the project, for the house tests."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest requires it on Python 3.10

ROOT = Path(__file__).resolve().parent.parent.parent
SRC = ROOT / "src" / "anabatic"
"""The main package."""
PACKAGES = tuple(sorted(path for path in (ROOT / "src").glob("anabatic*") if path.is_dir()))
"""It, its guests, and the helpers of tests."""
SHIPPED = tuple(path for path in PACKAGES if path.name != "anabatic_testing")
"""What the wheel holds."""


def sources() -> list[Path]:
    """Return every Python file of the packages."""
    return sorted(file for package in PACKAGES for file in package.rglob("*.py"))


def python_files() -> list[Path]:
    """Return every Python file of the project."""
    folders = [*PACKAGES, ROOT / "tests", ROOT / "benchmarks", ROOT / "scripts"]
    return sorted(file for folder in folders for file in folder.rglob("*.py"))


@functools.cache
def parse(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@functools.cache
def walk(module: ast.Module) -> tuple[ast.AST, ...]:
    """Return all nodes of a syntax tree, as `ast.walk`; a dozen tests look at each."""
    return tuple(ast.walk(module))


def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of a file's syntax tree."""
    return walk(parse(path))


def name(path: Path) -> str:
    """Return a path relative to the project."""
    return path.relative_to(ROOT).as_posix()


def source_name(path: Path) -> str:
    """Return a source file relative to the main package (`core/log.py`); of a guest, relative to `src`."""
    return path.relative_to(SRC if SRC in path.parents else ROOT / "src").as_posix()


def room(path: Path) -> str:
    """Return the room (first folder) of a source file; empty for the package's own files; of a guest: its own name."""
    package, *parts = path.relative_to(ROOT / "src").parts
    if package != SRC.name:
        return package.removeprefix(f"{SRC.name}_")
    return parts[0] if len(parts) > 1 else ""


@functools.cache
def tracked() -> list[Path]:
    """Return the files that git tracks; in an unpacked source archive, all files of the known folders."""
    git = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if git.returncode == 0 and git.stdout:
        found = [ROOT / line for line in git.stdout.split("\0") if line]
    else:
        folders = ("src", "tests", "docs", "scripts", "benchmarks")
        found = [file for folder in folders for file in (ROOT / folder).rglob("*")]
    return [file for file in found if file.is_file() and "__pycache__" not in file.parts]


def text(path: Path) -> str | None:
    """Return the text of a file, or None for a binary one."""
    data = path.read_bytes()
    return None if b"\0" in data else data.decode("utf-8")


def docstrings(tree: ast.Module) -> set[int]:
    """Return the ids of the constants that are texts standing alone: docstrings, also those below a field."""
    return {
        id(node.value)
        for node in walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    }


def read_layers() -> list[str]:
    """Return the layers of the main package's rooms, highest first, as import-linter reads them."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    return list(next(one["layers"] for one in contracts if one.get("containers") == [SRC.name]))
