"""A file of a repository, checked by size and checksum."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from anabatic.core.errors import DataError

_BLOCK_BYTES = 2**20


@dataclass(frozen=True)
class HubFile:
    """One file of a repository.

    Attributes:
        path: relative to the repository.
        size: in bytes.
        checksum: SHA-256, or the id of a git blob (SHA-1); empty: unknown, only the size is checked.
    """

    path: str
    size: int
    checksum: str = ""

    def has_size(self, path: Path) -> bool:
        """Return whether a local copy is there with the size of the file."""
        return path.is_file() and path.stat().st_size == self.size

    def describe_damage(self, path: Path) -> str:
        """Return what differs between the file and its local copy; empty if nothing does."""
        size = path.stat().st_size
        if size != self.size:
            return f"{size:,} of {self.size:,} bytes came"
        if self.checksum and self._hash(path) != self.checksum:
            return "its checksum is another"
        return ""

    def _hash(self, path: Path) -> str:
        if len(self.checksum) == 64:
            digest = hashlib.sha256()
        else:  # git hashes the kind and the size before the content
            digest = hashlib.sha1(f"blob {self.size}\0".encode(), usedforsecurity=False)
        with open(path, "rb") as file:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
        return digest.hexdigest()


def require_safe_path(path: str, where: str) -> None:
    """Refuse paths from a server that lead out of the folder of a repository.

    Raises:
        DataError: the path is absolute, or has a part that is `..` or a character that no such path has.
    """
    is_odd = any(character in path for character in ("\\", "\0", "\n", "\r"))
    if not path or path.startswith("/") or ".." in path.split("/") or is_odd or path[1:2] == ":":
        raise DataError(f"{where} lists the path {path!r}", "do not use this hub")
