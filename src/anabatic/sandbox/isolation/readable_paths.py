"""What a program may read beside its own folder: the interpreter, its standard library, the system's libraries."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Sequence

DEVICE_PATHS = ("/dev/null", "/dev/zero", "/dev/full", "/dev/urandom", "/dev/random")
_LIBRARY_PATHS = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache")


def list_readable_paths(more: Sequence[str]) -> list[str]:
    """Return real files and folders, none below another."""
    paths = sysconfig.get_paths()
    interpreter_paths = [paths["stdlib"], paths["platstdlib"], os.path.join(sys.base_prefix, "lib"), sys.executable]
    found: list[str] = []
    for path in sorted(
        {os.path.realpath(path) for path in (*interpreter_paths, *_LIBRARY_PATHS, *more) if os.path.exists(path)}
    ):
        if not any(path.startswith(upper + "/") for upper in found):
            found.append(path)
    return found


def list_library_links() -> dict[str, str]:
    """Return the system's links that lead to libraries: `/lib64` -> `usr/lib64`."""
    return {path: os.readlink(path) for path in _LIBRARY_PATHS if os.path.islink(path)}


def list_devices() -> list[str]:
    """Return the devices that are there."""
    return [path for path in DEVICE_PATHS if os.path.exists(path)]
