"""Plug-ins: parts of other packages, by entry points (https://packaging.python.org/specifications/entry-points/).

A package names them in its pyproject.toml, for example `[project.entry-points."anabatic.rewards"]`.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from anabatic.core.errors import ConfigError

if TYPE_CHECKING:
    from importlib.metadata import Distribution

PluginGroup = Literal[
    "anabatic.callbacks",
    "anabatic.commands",
    "anabatic.readers",
    "anabatic.rewards",
    "anabatic.sinks",
    "anabatic.tasks",
]


@dataclass(frozen=True)
class EntryPoint:
    """A plug-in that a package names, not loaded yet.

    Attributes:
        value: `module:attribute`.
        folder: metadata of the package.
    """

    name: str
    value: str
    folder: Path

    @property
    def module(self) -> str:
        """The module part."""
        return self.value.partition(":")[0]

    @property
    def attr(self) -> str:
        """The attribute part."""
        return self.value.partition(":")[2]

    @property
    def distribution(self) -> Distribution:
        """The package, with its name and version."""
        from importlib.metadata import PathDistribution  # 20 ms, for which `--help` has no use

        return PathDistribution(self.folder)

    def load(self) -> Any:
        """Import and return it."""
        found: Any = importlib.import_module(self.module)
        for attribute in filter(None, self.attr.split(".")):
            found = getattr(found, attribute)
        return found


@functools.cache
def _read_entry_points(group: PluginGroup) -> dict[str, list[EntryPoint]]:
    """Read what `importlib.metadata.entry_points` would, in a tenth of its 80 ms: one look at each file."""
    found: dict[str, list[EntryPoint]] = {}
    seen: set[str] = set()
    for folder in _list_metadata_folders():
        package = folder.name.partition("-")[0]
        if package in seen:  # a package may be found twice on sys.path: the first is imported
            continue
        seen.add(package)
        try:
            text = (folder / "entry_points.txt").read_text(encoding="utf-8")
        except OSError:  # most packages have none
            continue
        for name, value in _parse_group(text, group):
            found.setdefault(name, []).append(EntryPoint(name, value, folder))
    return found


def _list_metadata_folders() -> Iterator[Path]:
    for place in dict.fromkeys(sys.path):
        try:
            names = sorted(os.listdir(place or "."))
        except OSError:  # an archive, or a folder that does not exist
            continue
        yield from (Path(place, name) for name in names if name.endswith((".dist-info", ".egg-info")))


def _parse_group(text: str, group: str) -> Iterator[tuple[str, str]]:
    """Yield (name, value) of one section. https://packaging.python.org/specifications/entry-points/#file-format"""
    section = ""
    for line in map(str.strip, text.splitlines()):
        if line.startswith("["):
            section = line.strip("[] ")
        elif section == group and "=" in line and not line.startswith(("#", ";")):
            name, _, value = line.partition("=")
            yield name.strip(), value.partition("[")[0].strip()  # behind it: extras, which nothing reads any more


def list_plugins(group: PluginGroup) -> list[str]:
    """Return the names of a group's plug-ins, sorted. The packages on the path are read once in a process."""
    return sorted(_read_entry_points(group))


def find_plugin(group: PluginGroup, name: str) -> EntryPoint | None:
    """Return a plug-in, not loaded yet; None: there is none of this name.

    Raises:
        ConfigError: two packages have one of this name.
    """
    points = _read_entry_points(group).get(name, [])
    if len(points) > 1:
        places = ", ".join(f"{point.value} of {point.distribution.name}" for point in points)
        raise ConfigError(
            f'{len(points)} packages have a plug-in "{name}" in {group}: {places}', "uninstall one of them"
        )
    return points[0] if points else None


def load_plugin(group: PluginGroup, name: str) -> Any:
    """Import and return a plug-in; None: there is none of this name.

    Raises:
        ConfigError: two packages have one of this name, or it cannot be imported.
    """
    point = find_plugin(group, name)
    if point is None:
        return None
    try:
        return point.load()
    except Exception as error:  # a third party's module may raise anything
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise ConfigError(
            f'the plug-in "{name}" ({point.value} of {point.distribution.name}) cannot be imported: {reason}',
            f"update or uninstall {point.distribution.name}",
        ) from error


def describe_plugin(group: PluginGroup, name: str) -> str:
    """Return what identifies the code of a plug-in: its object, package and version; empty: there is none."""
    point = find_plugin(group, name)
    if point is None:
        return ""
    return f"{point.value} {point.distribution.name} {point.distribution.version}"
