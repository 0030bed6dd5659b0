"""The storage writer of torch.distributed.checkpoint, with checksums of what it writes.

Imported when the first checkpoint is written: it imports sharded tensors.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter

from anabatic.train.checkpoint.checksums import ChecksumFile, FileEntry


class _ChecksumFileSystem(FileSystem):
    def __init__(self, written: dict[str, FileEntry]) -> None:
        super().__init__()
        self.written = written

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """Yield a file that is checksummed and, at its end, synced."""
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with ChecksumFile(Path(path), self.written) as file:
            yield file

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Rename the file and its entry."""
        super().rename(path, new_path)
        self.written[Path(new_path).name] = self.written.pop(Path(path).name)


class ChecksumStorageWriter(FileSystemWriter):
    """Writes this rank's files of a checkpoint into `folder`.

    Attributes:
        written: the files so far: name -> entry.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, sync_files=False)  # the file syncs itself, with what was still buffered
        self.written: dict[str, FileEntry] = {}
        self.fs = _ChecksumFileSystem(self.written)
