"""Compiled code kept from one start to the next: a store of sealed files, and a folder in which torch works.

Torch trusts what lies in its folder: a library cut short by a full disk or a killed compiler ends the next process with
SIGBUS, and a damaged source file is a syntax error. So each start gets a folder of its own, with the files of the
store whose checksums are right, and what was compiled is sealed into the store afterwards. A store that cannot be
written only costs the next start its time.
"""

from __future__ import annotations

import itertools
import os
import shlex
import shutil
import struct
import tempfile
import uuid
import zlib
from collections.abc import Iterator
from multiprocessing.util import Finalize
from pathlib import Path

from anabatic.core import log, relaunch

_SUFFIX = ".sealed"
_HEADER = struct.Struct("<QI")
"""Bytes and CRC-32 of what follows."""
_LOCK_SUFFIX = ".lock"
"""Torch's own locks are empty and belong to the folder in which they lie."""
_MAX_STORE_BYTES = 256 * 1024**2
"""The files that are oldest are removed above it; a model of four layers has 1.6 MB."""


class CompiledCode:
    """The code that this process has compiled or found.

    Args:
        store: folder of sealed files, shared by all processes.
        work: folder in which torch reads and writes; None: a new one, removed at the end of this process. Processes
            must not share one: a library that another is still writing would be sealed.
    """

    def __init__(self, store: Path, work: Path | None = None) -> None:
        self.store = store
        self.work = work or _make_work_folder()
        self._known: set[Path] = set()
        self._is_refusal_reported = False

    def load_files(self) -> int:
        """Copy the intact files of the store into the work folder; return how many. Damaged ones are removed."""
        damaged = []
        for sealed in self._iter_sealed():
            name = sealed.relative_to(self.store).with_name(sealed.name.removesuffix(_SUFFIX))
            try:
                content = _unseal(sealed.read_bytes())
            except FileNotFoundError:  # another process has removed it
                continue
            except OSError as error:
                log.warn(f"{sealed} cannot be read: {error.strerror}")
                continue
            if content is None:
                damaged.append(sealed)
                continue
            if not (self.work / name).exists():
                _write(self.work / name, content)
            self._known.add(name)
        if damaged:
            log.warn(
                f"{len(damaged)} of the files of compiled code in {self.store} are damaged, such as {damaged[0].name}: "
                f"they are compiled again"
            )
            for sealed in damaged:
                self._try_to_remove(sealed)
        return len(self._known)

    def save_new_files(self) -> None:
        """Seal the files that are new in the work folder into the store."""
        new = [path for path in self.work.rglob("*") if path.is_file() and path.suffix != _LOCK_SUFFIX]
        new = [path for path in new if path.relative_to(self.work) not in self._known and not path.name.startswith(".")]
        try:
            for path in new:
                name = path.relative_to(self.work)
                content = path.read_bytes()
                header = _HEADER.pack(len(content), zlib.crc32(content))
                _write((self.store / name).with_name(name.name + _SUFFIX), header + content)
                self._known.add(name)
            if new:
                self._remove_oldest()
        except OSError as error:
            if not self._is_refusal_reported:
                self._is_refusal_reported = True
                log.warn(f"compiled code cannot be stored in {self.store}: {error.strerror or error}")
                log.info(
                    "hint: the next start compiles again; ANABATIC_CACHE=FOLDER names a folder that can be written"
                )

    def _iter_sealed(self) -> Iterator[Path]:
        return (path for path in sorted(self.store.rglob(f"*{_SUFFIX}")) if path.is_file())

    def _try_to_remove(self, sealed: Path) -> None:
        try:
            sealed.unlink(missing_ok=True)
        except OSError as error:
            log.info(f"hint: rm -r {shlex.quote(str(self.store))}, which was refused here: {error.strerror}")

    def _remove_oldest(self) -> None:
        newest_first = sorted(((path.stat(), path) for path in self._iter_sealed()), key=lambda one: -one[0].st_mtime)
        sizes = itertools.accumulate(stat.st_size for stat, _ in newest_first)
        for size, (_, path) in zip(sizes, newest_first, strict=True):
            if size > _MAX_STORE_BYTES:
                path.unlink(missing_ok=True)


def _make_work_folder() -> Path:
    reports = relaunch.get_reports_folder()  # a launcher removes what it holds, also after SIGKILL
    work = Path(tempfile.mkdtemp(prefix="anabatic-compiled-", dir=reports))
    Finalize(None, shutil.rmtree, args=(work,), kwargs={"ignore_errors": True}, exitpriority=0)  # in forked stages too
    return work


def _unseal(content: bytes) -> bytes | None:
    """Return what was sealed; None: it is damaged."""
    if len(content) < _HEADER.size:
        return None
    size, checksum = _HEADER.unpack_from(content)
    content = content[_HEADER.size :]
    return content if len(content) == size and zlib.crc32(content) == checksum else None


def _write(path: Path, content: bytes) -> None:
    """Write a file under another name first; it need not be on the disk yet: a checksum tells."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
