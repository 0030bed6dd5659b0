"""The groups of tests, read from tests/groups.toml, and which one a test belongs to."""

from __future__ import annotations

import functools
import sys
from collections.abc import Collection
from dataclasses import dataclass, fields
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest requires it on Python 3.10

TESTS = Path(__file__).resolve().parent.parent
ROOT = TESTS.parent
TABLE = TESTS / "groups.toml"
PROCESS = "process"
"""The marker, and the group that it moves a test to."""
QUICK = "test"
"""The command for everything that is run before each commit."""


class SuiteError(Exception):
    """What is wrong with the files of the test suite itself, and what to do."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(f"{message}\nhint: {hint}")


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
        """Return whether `make test` runs it."""
        return self.command == QUICK


@functools.cache
def read_groups() -> tuple[Group, ...]:
    """Return the rows in their order.

    Raises:
        SuiteError: it cannot be read, or a row has an unknown column or lacks one.
    """
    try:
        rows = tomllib.loads(TABLE.read_text(encoding="utf-8"))["group"]
    except (OSError, KeyError, tomllib.TOMLDecodeError) as error:
        raise SuiteError(f"{TABLE.relative_to(ROOT)}: {error}", "git diff tests/groups.toml") from error
    wanted = {column.name for column in fields(Group)}
    for number, row in enumerate(rows, start=1):
        if wrong := wanted ^ row.keys():
            what = (
                f"row {number} ({row.get('name', 'no name')}): unknown or missing columns: {', '.join(sorted(wrong))}"
            )
            raise SuiteError(f"{TABLE.relative_to(ROOT)}: {what}", f"a row has {', '.join(sorted(wanted))}")
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
        markers: names of its markers; `process` counts where the folder's group may start no processes.
    """
    for group in read_groups():
        if group.folder and path.startswith(f"tests/{group.folder}/"):
            return group if group.processes or PROCESS not in markers else group_by_name(PROCESS)
    return None


def folders_of(names: Collection[str]) -> list[str]:
    """Return the folders in which tests of these groups can be, relative to the project, no folder within another."""
    unmarked = [group for group in read_groups() if not group.processes]
    chosen = {group.folder for group in read_groups() if group.folder and group.name in names}
    if any(group.name in names and not group.folder for group in read_groups()):
        chosen |= {group.folder for group in unmarked}
    inner = {folder for folder in chosen for other in chosen if folder.startswith(f"{other}/")}
    return sorted(f"tests/{folder}" for folder in chosen - inner)
