"""Plug-ins: parts of other packages, by entry points (https://packaging.python.org/specifications/entry-points/).

A package names them in its pyproject.toml, for example `[project.entry-points."anabatic.rewards"]`.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Literal

from anabatic.core.errors import ConfigError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

PluginGroup = Literal["anabatic.callbacks", "anabatic.readers", "anabatic.rewards", "anabatic.sinks", "anabatic.tasks"]


@functools.cache
def _read_entry_points(group: PluginGroup) -> dict[str, list[EntryPoint]]:
    import importlib.metadata  # 20 ms, for which `--help` has no use

    found: dict[str, list[EntryPoint]] = {}
    for point in importlib.metadata.entry_points(group=group):
        known = found.setdefault(point.name, [])
        if all(point.value != other.value for other in known):  # a package may be found twice on sys.path
            known.append(point)
    return found


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
        places = ", ".join(f"{point.value} of {_get_package(point)}" for point in points)
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
            f'the plug-in "{name}" ({point.value} of {_get_package(point)}) cannot be imported: {reason}',
            f"update or uninstall {_get_package(point)}",
        ) from error


def describe_plugin(group: PluginGroup, name: str) -> str:
    """Return what identifies the code of a plug-in: its object, package and version; empty: there is none."""
    point = find_plugin(group, name)
    if point is None:
        return ""
    return f"{point.value} {_get_package(point)} {point.dist.version if point.dist is not None else ''}"


def _get_package(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "a package"
