"""Landlock: a process gives up all files but those that it names (landlock(7), linux/landlock.h)."""

from __future__ import annotations

import os
import struct
import sys
import sysconfig
from collections.abc import Sequence

from anabatic.sandbox.isolation import syscalls

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_RIGHTS_SINCE = {1: 0x1FFF, 2: 0x2000, 3: 0x4000, 5: 0x8000}
"""Version of the interface -> the rights to files that it added."""
_NETWORK_SINCE, _NETWORK = 4, 3
_SCOPES_SINCE, _SCOPES = 6, 3
_FILE_RIGHTS = _EXECUTE | _WRITE_FILE | _READ_FILE
_WRITABLE_DEVICES = ("/dev/null", "/dev/full")


def confine_process(folder: str, readable: Sequence[str], devices: Sequence[str]) -> None:
    """Let this process read and run `readable`, and do anything in `folder`, and touch no other file.

    Needs `syscalls.forbid_new_privileges` before it.

    Raises:
        OSError: the kernel refuses, or has no Landlock.
    """
    version = syscalls.landlock_version()
    rights = sum(bits for since, bits in _RIGHTS_SINCE.items() if version >= since)
    network = _NETWORK if version >= _NETWORK_SINCE else 0
    scopes = _SCOPES if version >= _SCOPES_SINCE else 0
    attributes = struct.pack("=QQQ", rights, network, scopes)
    rules = syscalls.landlock_create(attributes[: 24 if scopes else 16 if network else 8])
    try:
        _allow_path(rules, folder, rights)
        for path in readable:
            _allow_path(rules, path, _EXECUTE | _READ_FILE | _READ_DIR)
        for path in devices:
            _allow_path(rules, path, _READ_FILE | (_WRITE_FILE if path in _WRITABLE_DEVICES else 0))
        syscalls.landlock_restrict(rules)
    finally:
        os.close(rules)


def _allow_path(rules: int, path: str, access: int) -> None:
    handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        syscalls.landlock_allow(rules, access if os.path.isdir(path) else access & _FILE_RIGHTS, handle)
    finally:
        os.close(handle)


DEVICE_PATHS = ("/dev/null", "/dev/full", "/dev/urandom", "/dev/random")
"""Without /dev/zero: a mapping of it is memory without a bound (`seccomp.build_filter`)."""
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
