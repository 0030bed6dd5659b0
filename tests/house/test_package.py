"""What is built from the sources holds what it must, and nothing else."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

import anabatic
from anabatic.config.loading import json_schema
from anabatic.core import extras
from anabatic.infer.web import libraries
from house import tree
from unit.web_libraries import NEEDS_LIBRARIES

OWN_IMPORTS = {
    "recipes/serve.py",
    "anabatic_studio/server.py",  # the whole module belongs to the extra
    "launch/schedulers/ray_node.py",  # the actor, which runs where ray is
    "monitor/sources/nvml.py",  # no error: the devices are shown as unreadable
}


PLACES = tuple(f"{package.name}/" for package in tree.SHIPPED) + ("anabatic-",)
"""Folders of the wheel: the packages, and its metadata."""


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


@pytest.mark.process
def test_wheel_holds_the_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
    expected = {
        path.relative_to(tree.ROOT / "src").as_posix()
        for path in tree.tracked()
        if any(package in path.parents for package in tree.SHIPPED)
    }
    assert expected <= names
    assert "anabatic/py.typed" in names
    assert not [name for name in names if name.endswith((".webp", ".png"))], (
        "pictures of the docs are not for `anabatic help`"
    )
    foreign = [name for name in names if not name.startswith(PLACES)]
    assert not foreign


@pytest.mark.process
def test_wheel_names_its_licence_and_command(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        (metadata,) = (name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
        (entry,) = (name for name in file.namelist() if name.endswith(".dist-info/entry_points.txt"))
        text, commands = file.read(metadata).decode(), file.read(entry).decode()
    assert "License-Expression: Apache-2.0" in text
    assert "Requires-Python: <3.15,>=3.10" in text
    assert "anabatic = anabatic.cli.app:main" in commands


@pytest.mark.process
@NEEDS_LIBRARIES
def test_wheel_holds_the_libraries_of_the_page_with_their_licences(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        contents = {name: file.read(name) for name in file.namelist() if "/web/libraries/" in name}
    table = libraries.read_table()
    for library in table:
        for source, digest in library.sha256.items():
            name = library.find_path(source).relative_to(tree.SRC).as_posix()
            assert hashlib.sha256(contents[f"anabatic/{name}"]).hexdigest() == digest
        licence = library.find_path(library.licence_file).relative_to(tree.ROOT).as_posix()
        assert any(found.endswith(f".dist-info/licenses/{licence}") for found in contents)
    assert len(contents) == sum(len(library.sha256) + 1 for library in table)


@pytest.mark.process
@pytest.mark.parametrize("change", ["missing", "other"])
def test_a_release_needs_the_libraries_of_the_page(archive: Path, tmp_path: Path, change: str) -> None:
    with tarfile.open(archive) as file:
        file.extractall(tmp_path, filter="data")
    (root,) = tmp_path.iterdir()
    folder = root / "src" / "anabatic" / "infer" / "web" / "libraries"
    if change == "missing":
        shutil.rmtree(folder, ignore_errors=True)
    else:
        (folder / "temml").mkdir(parents=True, exist_ok=True)
        (folder / "temml" / "temml.min.js").write_text("stolen = 1")
    code = "import sys, hatchling.build as b; print(b.build_wheel(sys.argv[1]))"
    command = [sys.executable, "-c", code, tmp_path]
    run = subprocess.run(
        command, cwd=root, env={**os.environ, "ANABATIC_REQUIRE_WEB_LIBRARIES": "1"}, capture_output=True, text=True
    )
    assert run.returncode and "run python scripts/fetch_web_libraries.py" in run.stderr
    subprocess.run(command, cwd=root, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        assert not [name for name in file.namelist() if "/web/libraries/" in name]


@pytest.mark.process
def test_wheel_holds_the_documentation(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
    sections = ("guides", "concepts", "reference")
    pages = [
        page for code in ("en", "zh") for name in sections for page in (tree.ROOT / "docs" / code / name).glob("*.md")
    ]
    assert len(pages) > 90
    assert {f"anabatic/{page.relative_to(tree.ROOT).as_posix()}" for page in pages} <= names


@pytest.mark.process
def test_wheel_of_the_checkout_is_that_of_the_archive(wheel: Path, tmp_path: Path) -> None:
    code = "import sys, hatchling.build as b; print(b.build_wheel(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", code, tmp_path], cwd=tree.ROOT, check=True, capture_output=True)
    (direct,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(direct) as other:
        assert {name: one.getinfo(name).CRC for name in one.namelist()} == {
            name: other.getinfo(name).CRC for name in other.namelist()
        }


@pytest.mark.process
@pytest.mark.parametrize("repository", ["", "https://example.org/owner/anabatic"])
def test_description_and_addresses(repository: str, tmp_path: Path) -> None:
    """No relative link is left; pictures and links lead to the repository that makes the release."""
    code = "import sys, hatchling.build as b; print(b.prepare_metadata_for_build_wheel(sys.argv[1]))"
    environment = {**os.environ, "ANABATIC_REPOSITORY": repository, "GITHUB_REPOSITORY": ""}
    subprocess.run(
        [sys.executable, "-c", code, tmp_path], cwd=tree.ROOT, check=True, capture_output=True, env=environment
    )
    (file,) = tmp_path.glob("*.dist-info/METADATA")
    head, _, text = file.read_text(encoding="utf-8").partition("\n\n")
    assert "Author: anabatic contributors" in head and "Description-Content-Type: text/markdown" in head
    links = re.findall(r"\]\(([^)]*)\)", text)
    assert ("## Quick start" in text) and all(link.startswith(("https://", "http://", "#")) for link in links)
    assert bool(re.search(r"^Project-URL: Issues, https://example.org/owner/anabatic/issues$", head, re.M)) is bool(
        repository
    )
    assert bool([link for link in links if link.startswith(f"{repository}/raw/main/docs/en/assets/")]) is bool(
        repository
    )


def test_workflows_are_pinned() -> None:
    """Actions by commit, programs by version: a tag can be moved."""
    for file in sorted((tree.ROOT / ".github" / "workflows").glob("*.yml")):
        text = file.read_text(encoding="utf-8")
        for used in re.findall(r"uses: (.*)", text):
            own = re.fullmatch(r"\./\.github/workflows/\w+\.yml|\./packaging/github-action", used)
            assert own or re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40} # v[\d.]+", used), f"{file.name}: {used}"
        for line in re.findall(r"pip install (?!--)(.*)", text):
            assert all("==" in word for word in line.split()), f"{file.name}: {line}"


def test_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((tree.ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (citation["version"], citation["license"]) == (anabatic.__version__, "Apache-2.0")


def test_release_notes_are_the_part_of_the_version(tmp_path: Path) -> None:
    script = tree.ROOT / "scripts" / "release_notes.py"
    spec = importlib.util.spec_from_file_location("release_notes", script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = "# Changelog\n\n## [Unreleased]\n\nx\n\n## [0.2.0] - 2026-12-01\n\n### Added\n\n- a\n\n## [0.1.0]\n\n- b\n"
    assert module.find_notes(text, "0.2.0") == "### Added\n\n- a"
    assert module.find_notes(text, "0.1.0") == "- b" and module.find_notes(text, "0.3.0") == ""


@pytest.mark.parametrize("name", ["bug", "request"])
def test_issue_forms(name: str) -> None:
    form = yaml.safe_load((tree.ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml").read_text(encoding="utf-8"))
    ids = [part["id"] for part in form["body"] if part["type"] != "markdown"]
    assert len(set(ids)) == len(ids) and form["name"] and form["description"]
    if name == "bug":
        assert "anabatic doctor --bundle" in str(form)


@pytest.mark.process
def test_wheel_holds_the_schemas_of_recipes(wheel: Path) -> None:
    """They are made when it is built: git ignores them."""
    ignored = (tree.ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    assert "src/anabatic/config/schemas/" in ignored
    with zipfile.ZipFile(wheel) as file:
        for command, path in json_schema.list_schema_files().items():
            name = path.relative_to(tree.ROOT / "src").as_posix()
            assert file.read(name).decode() == json_schema.render_schema(command)


@pytest.mark.process
def test_sdist_holds_what_tests_need(archive: Path) -> None:
    with tarfile.open(archive) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    needed = {
        "pyproject.toml",
        "Makefile",
        "constraints.txt",
        "requirements-dev.txt",
        "requirements-serve.txt",
        "README.md",
        "LICENSE",
        "CITATION.cff",
        "hatch_build.py",
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
    for path in tree.sources():
        for node in tree.nodes(path):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if any(name.partition(".")[0] in extras.OPTIONAL_PACKAGES for name in names):
                found.append(path)
    others = {tree.source_name(path) for path in found if server not in path.parents}
    assert others == OWN_IMPORTS
