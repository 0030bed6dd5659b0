"""Resized pictures kept on disk, so that later epochs decode nothing: by the bytes of a picture and how it is resized.

An entry is a file of its own, written under another name and renamed, so that ranks share the folder. It begins with a
checksum of the rest: one that is torn or changed is made again. When the folder is full, nothing more is kept: epochs
read every picture once, so that what would be thrown away is what comes next.
"""

from __future__ import annotations

import hashlib
import threading
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from anabatic.core import log
from anabatic.core.errors import Failure
from anabatic.core.paths import write_atomic

_CHECK_BYTES, _SIZE_BYTES = 4, 8
"""Of the checksum, and of the height and width of a sheet, whose number is one byte."""
_RECOUNT_SHARE = 0.02
"""Of the limit: after so much was written here, what other ranks wrote is counted too."""

Sheets = list[np.ndarray]
"""Uint8 `[height, width, 3]` each: a picture in the sizes in which it is cut into patches."""


@dataclass(eq=False)
class PictureCache:
    """Resized pictures in a folder; used by several threads and processes.

    Args:
        folder: made when it is needed.
        limit: bytes of all its files.
    """

    folder: Path
    limit: int
    _used: float | None = field(default=None, init=False)
    _written: int = field(default=0, init=False)
    _is_closed: bool = field(default=False, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def name_entry(self, data: bytes, settings: Sequence[object]) -> Path:
        """Return the file of a picture.

        Args:
            data: bytes of the picture's file; settings: what else decides the result.
        """
        digest = hashlib.blake2b(repr(tuple(settings)).encode(), digest_size=16)
        digest.update(data)
        name = digest.hexdigest()
        return self.folder / name[:2] / name

    def find_sheets(self, entry: Path) -> Sheets | None:
        """Return what is kept of a picture; None: nothing, or it is damaged."""
        try:
            content = entry.read_bytes()
        except OSError:  # most often it is not there; whatever else it is, the picture itself is read
            return None
        body = memoryview(content)[_CHECK_BYTES:]
        if not body or zlib.crc32(body).to_bytes(_CHECK_BYTES, "big") != content[:_CHECK_BYTES]:
            return None
        start = 1 + _SIZE_BYTES * body[0]
        sizes = np.frombuffer(body[1:start], np.uint32).reshape(-1, 2).tolist()
        values, sheets = np.frombuffer(body[start:], np.uint8), []
        for height, width in sizes:
            sheets.append(values[: 3 * height * width].reshape(height, width, 3))
            values = values[3 * height * width :]
        return sheets

    def keep_sheets(self, entry: Path, sheets: Sheets) -> None:
        """Keep a picture, if there is room; a folder that cannot be written is a warning, once."""
        sizes = np.array([sheet.shape[:2] for sheet in sheets], np.uint32)
        body = b"".join([bytes([len(sheets)]), sizes.tobytes(), *(sheet.tobytes() for sheet in sheets)])
        if not self._take_room(len(body) + _CHECK_BYTES):
            return
        try:
            entry.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(entry, zlib.crc32(body).to_bytes(_CHECK_BYTES, "big") + body, is_synced=False)
        except (OSError, Failure) as error:
            self._close(f"{error}; ANABATIC_CACHE and data.cache name the folder")

    def _take_room(self, size: int) -> bool:
        with self._lock:
            if self._is_closed:
                return False
            if self._used is None or self._written > _RECOUNT_SHARE * self.limit:
                # what other threads are about to write is not on the disk yet
                self._used, self._written = max(self._used or 0.0, self._count_bytes()), 0
            if self._used + size <= self.limit:
                self._used += size
                self._written += size
                return True
        self._close(f"it has {self.limit / 2**30:g} GiB, vision.cache_gib; later pictures are decoded in every epoch")
        return False

    def _count_bytes(self) -> int:
        total = 0
        for file in self.folder.glob("*/*"):
            try:
                total += file.stat().st_size
            except FileNotFoundError:  # another rank has renamed it
                continue
        return total

    def _close(self, reason: str) -> None:
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
        if not was_closed:
            log.warn(f"the cache of pictures {self.folder} grows no more: {reason}")
