"""Log files as streams of bytes: files, folders, `.gz`, pipes; what cannot be read is named, never guessed."""

from __future__ import annotations

import gzip
import os
import re
import stat
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from anabatic.core.errors import DataError
from anabatic.core.formatting import did_you_mean

BLOCK_BYTES = 1 << 21
"""Bytes read at a time."""
MAX_LINE_BYTES = 1 << 20
"""A line that is longer is cut: memory stays bounded."""
_HEAD_BYTES = 1 << 13
_MAX_CONTROL_FRACTION = 0.05
"""Share of control bytes from which a file is no text: a log that was cut off by a power failure holds some zeros."""
_CONTROL_BYTES = bytes(byte for byte in range(32) if byte not in b"\t\n\v\f\r\b\a\x1b")
_LOG_NAME = re.compile(
    r"(?:\.(?:log|out|err|txt)(?:\.\d+)?|^stdout|^stderr|^slurm-[\w.-]+|^plog-[\w.-]+)(?:\.gz)?$", re.IGNORECASE
)
_RANK_NAME = re.compile(r"rank[-_]?(\d{1,6})(?!\d)", re.IGNORECASE)
_TORCHRUN_NAME = re.compile(r"/(\d{1,6})/(?:stdout|stderr)\.log$")
_PIPE_FOLDERS = ("/dev/fd/", "/proc/", "/dev/stdin")


@dataclass(frozen=True)
class LogFile:
    """One file to read, or standard input."""

    name: str
    path: Path | None
    rank: int | None = None
    """Facts from the file's name."""
    is_named: bool = True
    """Not found in a folder: when it cannot be read, that is an error."""


@dataclass
class LogSelection:
    """Files to read, and files left out with the reason."""

    files: list[LogFile] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def collect_logs(words: tuple[str, ...]) -> LogSelection:
    """Return the logs that `words` name: files, folders, `-`; nothing names CANN's own folder.

    Raises:
        DataError: a name leads nowhere, to something that is no file, or to a folder without a log.
    """
    logs = LogSelection()
    seen: set[tuple[int, int]] = set()
    for word in words or _list_default_folders():
        if word == "-":
            logs.files.append(LogFile("standard input", None))
            continue
        if not word.strip():
            raise DataError("a name is empty", "a variable of the shell may not be set")
        path = Path(word)
        for one in _list_log_files(path, logs.notes):
            status = one.stat()
            if (status.st_dev, status.st_ino) not in seen:
                seen.add((status.st_dev, status.st_ino))
                logs.files.append(LogFile(str(one), one, parse_rank(one), one == path))
    return logs


def default_folders() -> list[Path]:
    """Return where CANN writes, the first that counts first (hicann/runtime, ASCEND_PROCESS_LOG_PATH)."""
    env_folder = os.environ.get("ASCEND_PROCESS_LOG_PATH")
    work = os.environ.get("ASCEND_WORK_PATH")
    return [Path(env_folder)] if env_folder else [Path(work) / "log"] if work else [Path.home() / "ascend" / "log"]


def parse_rank(path: Path) -> int | None:
    """Return the rank that a file's name tells: `rank-3.log`, torchrun's `.../3/stderr.log`."""
    found = _RANK_NAME.search(path.name) or _TORCHRUN_NAME.search(str(path))
    return int(found[1]) if found else None


def read_blocks(log: LogFile, notes: list[str]) -> Iterator[bytes]:
    """Yield the log in blocks that end at line breaks.

    Args:
        log: the file.
        notes: where a file that ends early leaves a line, or one in a folder that cannot be read.

    Raises:
        DataError: a file that was named cannot be opened, or is no text.
    """
    try:
        with _open_log(log) as raw, _open_decompressed(raw) as stream:
            if problem := _detect_non_text(_peek_bytes(stream, _HEAD_BYTES)):
                raise DataError(f"{log.name} is {problem[0]}", problem[1])
            yield from _read_whole_lines(stream)
    except DataError as error:
        if log.is_named:
            raise
        notes.append(f"{error}")
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        notes.append(f"{log.name} ends early ({error}); what came before was read")
    except OSError as error:
        problem_text = f"cannot read {log.name}: {error.strerror or error}"
        if log.is_named:
            raise DataError(problem_text, "check its permissions, or copy it to where you can read it") from error
        notes.append(problem_text)


@contextmanager
def _open_log(log: LogFile) -> Iterator[BinaryIO]:
    if log.path is None:
        yield sys.stdin.buffer
    else:
        with open(log.path, "rb") as stream:
            yield stream


@contextmanager
def _open_decompressed(raw: BinaryIO) -> Iterator[BinaryIO | gzip.GzipFile]:
    if _peek_bytes(raw, 2) != b"\x1f\x8b":
        yield raw
    else:
        with gzip.GzipFile(fileobj=raw) as stream:
            yield stream


def _peek_bytes(stream: Any, num_bytes: int) -> bytes:
    head: bytes = stream.peek(num_bytes)[:num_bytes]
    return head


def _read_whole_lines(stream: BinaryIO | gzip.GzipFile) -> Iterator[bytes]:
    rest = b""
    while data := stream.read(BLOCK_BYTES):
        data = rest + data
        cut = data.rfind(b"\n") + 1
        if not cut and len(data) < MAX_LINE_BYTES:
            rest = data
            continue
        cut = cut or len(data)
        yield data[:cut]
        rest = data[cut:]
    if rest:
        yield rest


def _detect_non_text(head: bytes) -> tuple[str, str] | None:
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "UTF-16", "convert it first: iconv -f UTF-16 -t UTF-8 LOG | anabatic explain -"
    if len(head) - len(head.translate(None, _CONTROL_BYTES)) > _MAX_CONTROL_FRACTION * len(head):
        return "binary, no log", "give the text that the job printed, or a folder of logs"
    return None


def _list_default_folders() -> tuple[str, ...]:
    folders = default_folders()
    found = tuple(str(folder) for folder in folders if folder.is_dir())
    if not found:
        raise DataError(
            f"no log named, and {folders[0]} does not exist",
            "anabatic explain train.log, a folder of logs, or - for standard input",
        )
    return found


def _list_log_files(path: Path, notes: list[str]) -> list[Path]:
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}", _suggest_name(path)) from error
    if stat.S_ISDIR(mode):
        return _list_folder_logs(path, notes)
    # A pipe of the shell, as in `explain <(ssh host cat log)`, ends; a named one may wait for ever for a writer.
    if stat.S_ISREG(mode) or str(path).startswith(_PIPE_FOLDERS) or path == Path("/dev/null"):
        return [path]
    kind = "a pipe" if stat.S_ISFIFO(mode) else "no regular file"
    raise DataError(f"{path} is {kind}", f"send its text: cat {path} | anabatic explain -")


def _list_folder_logs(folder: Path, notes: list[str]) -> list[Path]:
    found: list[Path] = []

    def record_error(error: OSError) -> None:
        notes.append(f"cannot read {error.filename}: {error.strerror}")

    for root, folders, names in os.walk(folder, onerror=record_error):
        folders.sort()
        paths = (Path(root, name) for name in sorted(names) if _LOG_NAME.search(name))
        found += [path for path in paths if path.is_file()]
    if not found:
        refused = f" ({notes[-1]})" if notes else ""
        raise DataError(f"{folder} holds no log{refused}", "logs end in .log, .out, .err or .txt, also with .gz")
    return found


def _suggest_name(path: Path) -> str:
    parent = path.parent
    names = os.listdir(parent) if parent.is_dir() and os.access(parent, os.R_OK) else []
    return (
        did_you_mean(path.name, names).strip() or "give a log file, a folder of logs, a code, or - for standard input"
    )
