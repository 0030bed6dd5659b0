"""What depends on where a release is made: the long description, addresses of the project, libraries of the web page.

The addresses are those of the repository that builds the release (GITHUB_SERVER_URL and GITHUB_REPOSITORY, set by
GitHub Actions; ANABATIC_REPOSITORY=https://... elsewhere). Links of the README are relative to the repository: on a
package index they lead there, and without an address they are plain text.

The JSON schemas of recipes are written from the settings, which needs PyYAML.

The libraries of the chat page (scripts/fetch_web_libraries.py) and their licences are part of the archives if they were
fetched. With ANABATIC_REQUIRE_WEB_LIBRARIES=1 there is no build without them.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

_IMAGE = re.compile(r"!\[([^]]*)\]\((?!https?:)([^)]+)\)\n*")
_LINK = re.compile(r"(?<!!)\[([^]]*)\]\((?!https?:|#)([^)]+)\)")
_CHINESE_LINK = "[中文](README.zh.md)"


REQUIRE_VARIABLE = "ANABATIC_REQUIRE_WEB_LIBRARIES"
_OWN_LICENCE = "Apache-2.0"


class ProjectMetadata(MetadataHookInterface):
    """Fills `readme`, `urls`, `license` and `license-files` of the project table."""

    def update(self, metadata: dict[str, Any]) -> None:
        repository = find_repository(os.environ)
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": make_description(text, repository)}
        metadata["urls"] = make_urls(repository) if repository else {}
        files, licences = find_web_libraries(self.root)
        metadata["license"] = " AND ".join([_OWN_LICENCE, *sorted(licences)])
        metadata["license-files"] = ["LICENSE", *(name for name in files if "/LICENSE" in name)]


class GeneratedFiles(BuildHookInterface):
    """Adds the files that git ignores: libraries, each with the checksum of the table, and JSON schemas, made here."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        files, _ = find_web_libraries(self.root)
        if not files and version != "editable" and os.environ.get(REQUIRE_VARIABLE, "") not in ("", "0"):
            raise RuntimeError(
                f"{REQUIRE_VARIABLE} is set, and libraries of the chat page are missing or changed: "
                "run python scripts/fetch_web_libraries.py"
            )
        groups = self.metadata.core.entry_points
        build_data["artifacts"] += [f"/{name}" for name in (*files, *write_schemas(self.root, groups))]


def write_schemas(root: str, groups: dict[str, dict[str, str]]) -> list[str]:
    """Write the JSON schemas of recipes, which editors read, and return their files, relative to `root`.

    Args:
        groups: entry points of the project, which is not installed yet: packages of commands are found by them.

    Raises:
        RuntimeError: the package cannot be imported, for example without PyYAML.
    """
    source = Path(root, "src")
    code = "from anabatic.config.loading import json_schema; json_schema.write_schema_files()"
    with tempfile.TemporaryDirectory() as installed:
        folder = Path(installed, "anabatic-0.dist-info")
        folder.mkdir()
        sections = [
            "\n".join([f"[{group}]", *(f"{name} = {value}" for name, value in points.items())])
            for group, points in groups.items()
        ]
        (folder / "entry_points.txt").write_text("\n".join(sections), encoding="utf-8")
        # The last leads to what pip has put beside an isolated build.
        paths = [str(source), installed, os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONDONTWRITEBYTECODE": "1"}
        run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    if run.returncode:
        raise RuntimeError(f"the schemas of recipes cannot be written (needs PyYAML):\n{run.stderr}")
    return [file.relative_to(root).as_posix() for file in sorted(source.glob("*/config/schemas/*.json"))]


def find_web_libraries(root: str) -> tuple[list[str], set[str]]:
    """Return the fetched files, relative to `root`, and their licences (SPDX); nothing if one is missing or changed."""
    path = Path(root, "src", "anabatic", "infer", "web", "libraries.py")
    spec = importlib.util.spec_from_file_location("web_libraries", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    table = module.read_table()
    if module.find_wrong_files(table):
        return [], set()
    files = [library.find_path(source).relative_to(root).as_posix() for library in table for source in library.sha256]
    return files, {library.licence for library in table}


def find_repository(environment: Any) -> str:
    """Return the address of the repository, without a slash at its end; empty if it is not known."""
    given: str = environment.get("ANABATIC_REPOSITORY", "")
    if not given and environment.get("GITHUB_REPOSITORY"):
        given = f"{environment.get('GITHUB_SERVER_URL', 'https://github.com')}/{environment['GITHUB_REPOSITORY']}"
    return given.rstrip("/")


def make_urls(repository: str) -> dict[str, str]:
    """Return the addresses by the labels that PyPI knows (packaging.python.org, well-known project URLs)."""
    return {
        "Homepage": repository,
        "Documentation": f"{repository}/blob/main/docs/en/index.md",
        "Repository": f"{repository}.git",
        "Issues": f"{repository}/issues",
        "Changelog": f"{repository}/blob/main/CHANGELOG.md",
    }


def make_description(text: str, repository: str) -> str:
    """Return the README with absolute links, or without links and pictures where there is no address."""
    if not repository:
        text = _IMAGE.sub("", text.replace(f"{_CHINESE_LINK}\n\n", ""))
        return _LINK.sub(lambda match: match[1], text)
    text = _IMAGE.sub(lambda match: f"![{match[1]}]({repository}/raw/main/{match[2]})\n\n", text)
    return _LINK.sub(lambda match: f"[{match[1]}]({repository}/blob/main/{match[2]})", text)
