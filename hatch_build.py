"""Metadata that depends on where a release is made: the long description, and the addresses of the project.

The addresses are those of the repository that builds the release (GITHUB_SERVER_URL and GITHUB_REPOSITORY, set by
GitHub Actions; ANABATIC_REPOSITORY=https://... elsewhere). Links of the README are relative to the repository: on a
package index they lead there, and without an address they are plain text.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_IMAGE = re.compile(r"!\[([^]]*)\]\((?!https?:)([^)]+)\)\n*")
_LINK = re.compile(r"(?<!!)\[([^]]*)\]\((?!https?:|#)([^)]+)\)")
_CHINESE_LINK = "[中文](README.zh.md)"


class ProjectMetadata(MetadataHookInterface):
    """Fills `readme` and `urls` of the project table."""

    def update(self, metadata: dict[str, Any]) -> None:
        repository = find_repository(os.environ)
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": make_description(text, repository)}
        metadata["urls"] = make_urls(repository) if repository else {}


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
