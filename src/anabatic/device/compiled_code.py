"""Compiled code kept from one start to the next: a store of sealed files, and a folder in which torch works.

Torch trusts what lies in its folder: a library cut short by a full disk or a killed compiler ends the next process with
SIGBUS, and a damaged source file is a syntax error. So each start gets a folder of its own, with the files of the
store whose seals are right, and what was compiled is sealed into the store afterwards. A store that cannot be
written only costs the next start its time.

The store holds code: libraries, sources and pickles. A seal is therefore one that only this user's key can
make (HMAC, RFC 2104), and the key lies outside of the cache: what somebody else has put into the store, or a cache that
was copied from elsewhere, is compiled again and never loaded.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import os
import secrets
import shlex
import shutil
import stat
import struct
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.util import Finalize
from pathlib import Path

from anabatic.core import log, relaunch
from anabatic.core.paths import get_state_root

_SUFFIX = ".sealed"
_HEADER = struct.Struct("<Q32s")
"""Bytes of what follows, and its seal: HMAC-SHA256 of the file's name in the store and of the content."""
_KEY_FILE = "compiled-code.key"
_KEY_BYTES = 32
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
        self._key = read_key()
        self._is_refusal_reported = False

    def load_files(self) -> int:
        """Copy the intact files of the store into the work folder; return how many. Damaged ones are removed."""
        damaged = []
        for sealed in self._iter_sealed():
            name = sealed.relative_to(self.store).with_name(sealed.name.removesuffix(_SUFFIX))
            try:
                content = _unseal(sealed.read_bytes(), name, self._key)
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
                f"{len(damaged)} of the files of compiled code in {self.store} are damaged or not sealed by this user, "
                f"such as {damaged[0].name}: they are compiled again"
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
                header = _HEADER.pack(len(content), _compute_seal(content, name, self._key))
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


def read_key() -> bytes:
    """Return this user's key, made at the first call. One that cannot be kept is good for this process alone."""
    try:
        path = get_state_root() / _KEY_FILE
        if not path.exists():
            _make_key(path)
        with open(path, "rb") as file:
            about = os.fstat(file.fileno())
            key = file.read(_KEY_BYTES + 1)
    except (OSError, RuntimeError) as error:
        log.warn(f"there is no key for compiled code: {error}; what is compiled is not kept for the next start")
        return secrets.token_bytes(_KEY_BYTES)
    if len(key) == _KEY_BYTES and about.st_uid == os.getuid() and not about.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        return key
    log.warn(f"{path} is not used: others can read or write it, or it is damaged")
    log.info(f"hint: rm {shlex.quote(str(path))}; the next start makes a new one and compiles again")
    return secrets.token_bytes(_KEY_BYTES)


def _make_key(path: Path) -> None:
    """Write a new key, whole or not at all; of processes that do so at the same time, the first one wins."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(secrets.token_bytes(_KEY_BYTES))
        with suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _compute_seal(content: bytes, name: Path, key: bytes) -> bytes:
    found = hmac.new(key, name.as_posix().encode("utf-8", "surrogateescape") + b"\0", hashlib.sha256)
    found.update(content)
    return found.digest()


def _unseal(content: bytes, name: Path, key: bytes) -> bytes | None:
    """Return what was sealed; None: it is damaged, or this user has not sealed it under this name."""
    if len(content) < _HEADER.size:
        return None
    size, seal = _HEADER.unpack_from(content)
    content = content[_HEADER.size :]
    is_intact = len(content) == size and hmac.compare_digest(seal, _compute_seal(content, name, key))
    return content if is_intact else None


def _write(path: Path, content: bytes) -> None:
    """Write a file under another name first; it need not be on the disk yet: a checksum tells."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
