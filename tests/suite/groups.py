"""The groups of tests, read from tests/groups.toml, and which one a test belongs to."""

from __future__ import annotations

import functools
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest requires it on Python 3.10

TESTS = Path(__file__).resolve().parent.parent
ROOT = TESTS.parent
TABLE = TESTS / "groups.toml"
QUICK = "test"
"""The command for everything that is run before each commit."""


@dataclass(frozen=True)
class Group:
    """One row of the table; the columns are described at its top."""

    name: str
    folder: str
    command: str
    session: str
    processes: bool
    pythons: str
    about: str

    @property
    def is_quick(self) -> bool:
        """Whether `make test` runs it."""
        return self.command == QUICK


@functools.cache
def read_groups() -> tuple[Group, ...]:
    """Return the rows in their order.

    Raises:
        TypeError: a row has an unknown column, or lacks one.
    """
    rows = tomllib.loads(TABLE.read_text(encoding="utf-8"))["group"]
    return tuple(Group(**row) for row in rows)


def group_by_name(name: str) -> Group:
    """Return a row.

    Raises:
        KeyError: there is none of that name.
    """
    return {group.name: group for group in read_groups()}[name]


def find_group(path: str, markers: Collection[str] = ()) -> Group | None:
    """Return the group of a test.

    Args:
        path: of its file, relative to the project: `tests/unit/core/test_paths.py`.
        markers: names of its markers; one that is a group without a folder decides.
    """
    for group in read_groups():
        if group.name in markers and not group.folder:
            return group
    for group in read_groups():
        if group.folder and path.startswith(f"tests/{group.folder}/"):
            return group
    return None


def folders_of(names: Collection[str]) -> list[str]:
    """Return the folders in which tests of these groups can be, relative to the project, no folder within another."""
    unmarked = [group for group in read_groups() if not group.processes]
    chosen = {group.folder for group in read_groups() if group.folder and group.name in names}
    if any(group.name in names and not group.folder for group in read_groups()):
        chosen |= {group.folder for group in unmarked}
    inner = {folder for folder in chosen for other in chosen if folder.startswith(f"{other}/")}
    return sorted(f"tests/{folder}" for folder in chosen - inner)
