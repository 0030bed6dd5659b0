"""Checksums of files: computed while a file is written, or by reading it. No torch."""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict

_BLOCK_BYTES = 1 << 20
ByteCallback = Callable[[int], None]


class FileEntry(TypedDict):
    """What a manifest says of a file."""

    bytes: int
    crc32: int


class ChecksumFile(io.BufferedWriter):
    """A new file that counts and checksums what is written to it, in order, and is synced when it is closed.

    The checksum is that of the bytes in memory. Reading the file back would only seal what arrived on the disk, and
    right after the write it comes from the page cache.

    Args:
        written: gets the entry of the file under its name when it has been closed.

    Raises:
        OSError: the disk is full or refuses writes.
    """

    def __init__(self, path: Path, written: dict[str, FileEntry]) -> None:
        super().__init__(io.FileIO(path, "wb"), _BLOCK_BYTES)
        self._path, self._written = path, written
        self._bytes = self._crc32 = 0

    def write(self, data: Any, /) -> int:
        """Append the bytes."""
        view = memoryview(data).cast("B")
        self._crc32 = zlib.crc32(view, self._crc32)
        self._bytes += len(view)
        return super().write(view)

    def seekable(self) -> bool:
        """No: a checksum is of bytes in order."""
        return False

    def seek(self, offset: int, origin: int = 0, /) -> int:
        """Refuse.

        Raises:
            UnsupportedOperation: always.
        """
        raise io.UnsupportedOperation(f"{self._path.name} is written in order")

    def close(self) -> None:
        """Flush, sync and close the file."""
        if self.closed:
            return
        try:
            self.flush()
            os.fsync(self.fileno())
            self._written[self._path.name] = {"bytes": self._bytes, "crc32": self._crc32}
        finally:
            super().close()


def write_file(path: Path, content: bytes, written: dict[str, FileEntry]) -> None:
    """Write and sync a whole file; note its entry."""
    with ChecksumFile(path, written) as file:
        file.write(content)


def compute_crc32(path: Path, advance: ByteCallback = lambda _: None) -> int:
    """Return the checksum of a file.

    Args:
        advance: told the bytes that were read.
    """
    value = 0
    with open(path, "rb") as file:
        while block := file.read(_BLOCK_BYTES):
            value = zlib.crc32(block, value)
            advance(len(block))
    return value
