"""The files of a machine: `/`, or another root folder (a mounted container, an unpacked bundle).

Links are followed inside the root, as after chroot(2), so `latest -> /usr/local/Ascend/cann-9.0.0` of a container is
the container's. Nothing here raises: what cannot be read is not there.
"""

from __future__ import annotations

import os
import stat
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

MAX_FILE_BYTES = 1 << 20
"""Of one file; nothing that a check reads is longer."""
MAX_FOLDER_NAMES = 2000
"""Of one folder; no machine has as many devices on its bus. More are left out, and it is said."""
_MAX_LINKS = 40
"""As Linux has it (path_resolution(7))."""


class RootFiles:
    """Files of a root folder. `reads` remembers the answers, for a bundle."""

    def __init__(self, root: str | Path = "/") -> None:
        self.root = os.path.abspath(root)
        self.is_live = self.root == "/"
        self.reads: dict[str, bytes | None] = {}
        """Path -> content; None: only that it exists."""
        self.truncated_folders: dict[str, tuple[int, int]] = {}
        """Folder -> how many of its names were looked at, and how many there are, where that is less than all."""

    def resolve_path(self, path: str) -> str | None:
        """Return where `path` of the machine lies here, all links followed; None: nowhere."""
        pending = [part for part in reversed(PurePosixPath(path).parts) if part not in ("/", ".")]
        done: list[str] = []
        links = 0
        while pending:
            part = pending.pop()
            if part == "..":
                del done[-1:]
                continue
            candidate = os.path.join(self.root, *done, part)
            try:
                target = os.readlink(candidate)
            except OSError:  # no link
                done.append(part)
                continue
            except ValueError:  # a NUL in the name
                return None
            links += 1
            if links > _MAX_LINKS:
                return None
            if target.startswith("/"):
                done = []
            pending += [piece for piece in reversed(PurePosixPath(target).parts) if piece not in ("/", ".")]
        return os.path.join(self.root, *done)

    def _stat_path(self, path: str) -> os.stat_result | None:
        real = self.resolve_path(path)
        if real is None:
            return None
        try:
            return os.stat(real)
        except (OSError, ValueError):
            return None

    def exists(self, path: str) -> bool:
        """Return True if the name exists."""
        found = self._stat_path(path) is not None
        if found:
            self.reads.setdefault(path, None)
        return found

    def is_dir(self, path: str) -> bool:
        """Return True if it is a folder."""
        found = self._stat_path(path)
        return found is not None and stat.S_ISDIR(found.st_mode) and self.exists(path)

    def read_text(self, path: str) -> str | None:
        """Return the start of a file, odd bytes replaced; None when there is none to read."""
        found, real = self._stat_path(path), self.resolve_path(path)
        if found is None or real is None or not stat.S_ISREG(found.st_mode):
            return None
        try:
            with open(os.open(real, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
                data = file.read(MAX_FILE_BYTES)
        except (OSError, ValueError):
            return None
        self.reads[path] = data
        return data.decode("utf-8", "replace").replace("\0", "\n")

    def list_names(self, folder: str, pattern: str = "*") -> list[str]:
        """Return the sorted names in a folder that fit a pattern (`davinci[0-9]*`), the first `MAX_FOLDER_NAMES`."""
        real = self.resolve_path(folder)
        try:
            found = sorted(os.listdir(real)) if real else []
        except (OSError, ValueError):
            return []
        fitting = [name for name in found if fnmatchcase(name, pattern)]
        chosen = fitting[:MAX_FOLDER_NAMES]
        if len(fitting) > len(chosen):
            self.truncated_folders[folder] = (len(chosen), len(fitting))
        for name in chosen:
            self.reads.setdefault(f"{folder}/{name}", None)
        return chosen
