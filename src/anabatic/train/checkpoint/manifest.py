"""The files of a checkpoint folder: find it, commit it, verify that it is complete. No torch.

A checkpoint is built under another name and renamed; a folder without a valid manifest is not a checkpoint. The
manifest carries a checksum of its own; one without, of an earlier version, is not sealed: its files are compared with
what it says, but nothing tells whether it says what was written.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import threading
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypedDict

from anabatic.core import json_reader, log, paths
from anabatic.core.errors import CheckpointError, DataError
from anabatic.core.paths import RunFolder, fsync_folder, replace_folder

_BLOCK_BYTES = 1 << 20
ByteCallback = Callable[[int], None]
MANIFEST_FILE = "manifest.json"
STATE_FILE = "state.json"
USE_ANOTHER = "use another checkpoint, or copy this one again from where it was written"
NOT_SEALED = f"not sealed: {MANIFEST_FILE} has no checksum of its own"
_SEAL = "sha256"
"""Key of the manifest's own checksum, of everything else in it."""
_CHECKPOINT_NAME = re.compile(r"checkpoint-(\d+)$")
_MANIFEST_FIELDS: dict[str, tuple[type, ...]] = {
    "step": (int,), "saved": (int, float), "world_size": (int,), "strategy": (str,), "command": (str,), _SEAL: (str,),
}  # fmt: skip
"""Keys of the manifest beside `files`, and what they are."""
_MAX_THREADS = 16
"""Threads that remove or read files: a network's disk answers many at a time, and zlib lets go of the interpreter."""


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
        """Return False: the checksum needs the bytes in order."""
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


class WrongSeal(ValueError):
    """A manifest does not match its own checksum."""


def list_checkpoint_folders(root: Path) -> list[tuple[int, Path]]:
    """Return (step, folder) of the checkpoints of a run, oldest first, complete or not."""
    found = [
        (int(match[1]), path) for path in root.glob("checkpoint-*") if (match := _CHECKPOINT_NAME.search(path.name))
    ]
    return sorted(found)


def temporary_path(target: Path) -> Path:
    """Return the name under which a checkpoint is built."""
    return target.with_name(f".{target.name}.tmp")


def remove_temporary_folders(root: Path) -> None:
    """Remove what a killed process has left half-written; only for whoever holds the run folder alone."""
    for path in root.glob(".checkpoint-*.tmp"):
        shutil.rmtree(path, ignore_errors=True)


def commit_checkpoint(
    built: Path,
    target: Path,
    step: int,
    host: str,
    config: Path,
    about: dict[str, Any],
    written: Mapping[str, FileEntry],
) -> None:
    """Write the manifest of the folder `built`, whose files are synced, and rename it to `target`.

    No file is read: whoever wrote it has computed its checksum meanwhile.

    Args:
        host: the content of `state.json`.
        config: the run's settings, which are copied where they are.
        about: how the checkpoint was written: further keys of the manifest.
        written: the files of all ranks.

    Raises:
        CheckpointError: a file that a rank has written is not there, or not as long.
        OSError: the disk is full or refuses writes.
    """
    files = dict(written)
    write_file(built / STATE_FILE, host.encode("utf-8"), files)
    if config.is_file():
        write_file(built / "config.yaml", config.read_bytes(), files)
    for name, entry in files.items():
        problem = _check_file(built / name, entry, False, lambda _: None)
        if problem:
            raise CheckpointError(
                f"{target} is not saved: {name}, which a rank has written, {problem} where rank 0 looks",
                "the run folder must be on a file system that all machines share",
            )
    content = {"step": step, **about, "files": dict(sorted(files.items()))}
    with open(built / MANIFEST_FILE, "w", encoding="utf-8") as file:
        json.dump({_SEAL: _compute_seal(content), **content}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    fsync_folder(built)
    replace_folder(built, target)


def _compute_seal(content: Mapping[str, Any]) -> str:
    """Return the checksum of a manifest: of its values, not of its layout."""
    rest = {key: value for key, value in content.items() if key != _SEAL}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode("ascii")).hexdigest()


def is_sealed(content: Mapping[str, Any]) -> bool:
    """Return whether a manifest that was read carries its own checksum."""
    return content.get(_SEAL) is not None


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint folder.

    Raises:
        OSError: it cannot be read.
        WrongSeal: it does not match its own checksum.
        ValueError, KeyError, TypeError, AttributeError, RecursionError: it is torn, or none of ours.
    """
    content: dict[str, Any] = json_reader.read_json_file(path / MANIFEST_FILE)
    for name, entry in content["files"].items():
        if not isinstance(entry["bytes"], int) or not isinstance(entry["crc32"], int) or "/" in name:
            raise TypeError(name)
    for key, kinds in _MANIFEST_FIELDS.items():
        if not isinstance(content.get(key), (*kinds, type(None))):
            raise TypeError(key)
    if is_sealed(content) and content[_SEAL] != _compute_seal(content):
        raise WrongSeal(path / MANIFEST_FILE)
    return content


def find_faults(
    path: Path, rank: int = 0, ranks: int = 1, checksums: bool = True, advance: ByteCallback = lambda _: None
) -> Iterator[str]:
    """Yield what is wrong with a checkpoint folder.

    Args:
        rank, ranks: one of `ranks` processes looks at all sizes, and at the checksums of its share of the files.
        checksums: read the files; else sizes alone are compared.
        advance: told the bytes that were read.
    """
    try:
        files = read_manifest(path)["files"]
    except OSError as error:
        yield f"{MANIFEST_FILE} cannot be read ({error.strerror})"
        return
    except WrongSeal:
        yield f"{MANIFEST_FILE} does not match its own checksum"
        return
    except (ValueError, KeyError, TypeError, AttributeError):
        yield f"{MANIFEST_FILE} is torn"
        return
    if STATE_FILE not in files:
        yield f"{STATE_FILE} is not in the manifest"
    lock = threading.Lock()

    def advance_alone(num_bytes: int) -> None:
        with lock:
            advance(num_bytes)

    shares = [checksums and number % ranks == rank for number in range(len(files))]
    pool = ThreadPoolExecutor(_MAX_THREADS)
    try:
        problems = pool.map(
            _check_file, (path / name for name in files), files.values(), shares, [advance_alone] * len(files)
        )
        for name, problem in zip(files, problems, strict=True):
            if problem:
                yield f"{name} {problem}"
    finally:
        pool.shutdown(cancel_futures=True)  # who asks for the first fault alone does not wait for all files


def find_first_fault(path: Path, rank: int = 0, ranks: int = 1, checksums: bool = True) -> str:
    """Return the first of the `find_faults` of a checkpoint folder, or an empty string."""
    return next(find_faults(path, rank, ranks, checksums), "")


def _check_file(file: Path, entry: FileEntry, checksum: bool, advance: ByteCallback) -> str:
    try:
        if not file.is_file():
            return "is missing"
        found = file.stat().st_size
        if found != entry["bytes"]:
            return f"has {found} of {entry['bytes']} bytes"
        if checksum and compute_crc32(file, advance) != entry["crc32"]:
            return "does not match its checksum"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return ""


def log_seal(path: Path) -> None:
    """Say where a checkpoint that is used is not sealed."""
    if not is_sealed(read_manifest(path)):
        log.info(f"{path} is {NOT_SEALED}; its files match what it says")


def read_host_state(path: Path) -> dict[str, Any]:
    """Return the host numbers of a whole checkpoint.

    Raises:
        CheckpointError: the file is sealed, but holds something else.
    """
    try:
        content: Any = json_reader.read_json_file(path / STATE_FILE)
        if isinstance(content, dict):
            return content
        fault = f"it is a {type(content).__name__}"
    except ValueError as error:
        fault = str(error)
    raise CheckpointError(f"{path / STATE_FILE} does not hold the numbers of a run: {fault}", USE_ANOTHER)


def resolve_checkpoints(path: Path) -> list[Path]:
    """Return the checkpoints that a user means, oldest first: the one of that name, or all of a run folder.

    Raises:
        DataError: there is none.
    """
    if (path / MANIFEST_FILE).is_file() or (path.is_dir() and _CHECKPOINT_NAME.search(path.name)):
        return [path]
    found = [one for _, one in list_checkpoint_folders(path)] if path.is_dir() else []
    if not found:
        inside = sorted({str(one.parent) for one in path.glob("*/checkpoint-*")}) if path.is_dir() else []
        what = "holds no checkpoint" if path.is_dir() else "is no folder" if path.exists() else "does not exist"
        hint = f"name one of its runs: {', '.join(inside[:4])}" if inside else "give a run folder or a checkpoint in it"
        guess = "" if path.exists() else paths.suggest_folder(str(path))
        raise DataError(f"{path} {what}{guess and '.'}{guess}", hint)
    return found


def find_newest_valid(path: Path) -> Path:
    """Return the newest whole checkpoint that a user means; each broken one that is skipped is logged.

    Raises:
        DataError: there is none.
    """
    known = resolve_checkpoints(path)
    for one in reversed(known):
        problem = find_first_fault(one)
        if not problem:
            log_seal(one)
            return one
        log.warn(f"{one} is not used: {problem}")
    what = f"{path} is not whole" if known == [path] else f"none of the {len(known)} checkpoints in {path} is whole"
    raise DataError(what, "give another run folder or checkpoint")


def remove_old_checkpoints(folder: RunFolder, keep: int, step: int, also: Collection[int] = ()) -> None:
    """Remove all but the newest `keep` checkpoints up to `step`, the one just saved, and those of the steps `also`.

    Later ones, which were skipped as broken, must not count: they would push out the good one.
    """
    for number, path in [entry for entry in list_checkpoint_folders(folder.root) if entry[0] <= step][:-keep]:
        if number not in also:
            _remove_folder(path)


def _remove_folder(path: Path) -> None:
    """Remove a checkpoint, its files side by side: one of thousands of ranks has thousands of files.

    It is renamed first: a process killed meanwhile leaves no half checkpoint, and the next start removes the rest.
    """
    leaving = temporary_path(path)
    try:
        os.replace(path, leaving)
        with ThreadPoolExecutor(_MAX_THREADS) as pool:
            list(pool.map(_unlink_quietly, leaving.iterdir()))
    except OSError as error:
        log.warn(f"{path} cannot be removed: {error.strerror or error}")
    shutil.rmtree(leaving, ignore_errors=True)


def _unlink_quietly(file: Path) -> None:
    with suppress(OSError):  # rmtree gets what is left
        file.unlink()
