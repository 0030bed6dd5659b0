"""Read JSON of files and of other programs, and append JSON lines: `metrics.jsonl`, `events.jsonl`. Invalid input
raises ValueError.

The reader of Python raises a RecursionError for deep nesting, or, if its limit is higher than that of later code,
returns a value that cannot be traversed.
"""

from __future__ import annotations

import json
import math
import os
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from anabatic.core.errors import DataError
from anabatic.core.paths import make_write_error

MAX_DEPTH = 100
"""Maximum nesting of lists and objects; hand-written files have about ten levels."""
MAX_FILE_BYTES = 1 << 30
"""Maximum bytes of a JSON file."""

PairsHook = Callable[[list[tuple[str, Any]]], Any]


def loads(text: str | bytes, pairs_hook: PairsHook | None = None) -> Any:
    """Parse `text`.

    Args:
        pairs_hook: builds an object from its keys and values, as `object_pairs_hook` of json.

    Raises:
        ValueError: the text is not valid JSON or UTF-8, or is nested deeper than `MAX_DEPTH`.
    """
    value = loads_any_depth(text, pairs_hook)
    return require_shallow(value) if _may_be_deep(text) else value


def loads_any_depth(text: str | bytes, pairs_hook: PairsHook | None = None) -> Any:
    """Parse `text` without our limit of depth: for callers that check the depth as they traverse the value.

    Raises:
        ValueError: the text is not valid JSON or UTF-8, or is nested too deep for the reader of Python.
    """
    try:
        return json.loads(text, object_pairs_hook=pairs_hook)
    except RecursionError as error:
        raise ValueError(f"nested more than {MAX_DEPTH} deep") from error
    except json.JSONDecodeError:
        raise
    except ValueError as error:
        if "integer string conversion" not in str(error):  # invalid UTF-8
            raise
        raise ValueError(f"an integer of more than {sys.get_int_max_str_digits():,} digits") from error


def read_json_file(path: Path) -> Any:
    """Load a JSON file, with or without a byte order mark.

    Raises:
        OSError: the file cannot be opened.
        ValueError: as for `loads`, or the file is larger than `MAX_FILE_BYTES`.
    """
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ValueError(f"{path.stat().st_size:,} bytes, more than {MAX_FILE_BYTES:,}")
    return loads(path.read_text(encoding="utf-8-sig"))


def read_own_object(path: Path, remedy: str) -> dict[str, Any]:
    """Load the JSON object in a file that this program has written.

    Raises:
        DataError: it cannot be read, is damaged, or is no object; `remedy` is the hint.
    """
    try:
        found = read_json_file(path)
        if not isinstance(found, dict):
            raise ValueError("no object")
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}", remedy) from error
    return found


def require_shallow(value: Any) -> Any:
    """Return `value` unchanged after a check of its depth.

    Raises:
        ValueError: its lists and objects are nested deeper than `MAX_DEPTH`.
    """
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        children: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                children.extend(item.values())
            elif isinstance(item, list):
                children.extend(item)
        if not children:
            return value
        level = children
    raise ValueError(f"nested more than {MAX_DEPTH} deep")


def _may_be_deep(text: str | bytes) -> bool:
    """Return whether the text has more than `MAX_DEPTH` opening brackets; counting is cheap compared with parsing."""
    if isinstance(text, bytes):
        return text.count(b"[") + text.count(b"{") > MAX_DEPTH
    return text.count("[") + text.count("{") > MAX_DEPTH


_MAX_LINE_BYTES = 4 << 20
"""Bytes of the longest line that a follower keeps."""


class JsonlWriter:
    """Appends one JSON object per line; every line is flushed, so a killed process loses none.

    Raises:
        Failure: the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        torn = path.exists() and path.stat().st_size > 0 and not _ends_with_newline(path)
        # A lone surrogate (half a character) has no UTF-8; backslashreplace makes it a JSON escape.
        self._file = open(path, "a", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
        if torn:
            self._file.write("\n")

    def write(self, row: dict[str, Any]) -> None:
        """Append `row`. Values that are not finite become `null`: JSON cannot represent them."""
        try:
            self._file.write(json.dumps(replace_nonfinite(row), ensure_ascii=False, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise make_write_error(self._path, error) from error

    def close(self) -> None:
        """Close the file."""
        try:
            self._file.close()
        except OSError as error:  # the buffer still holds the row that could not be written
            raise make_write_error(self._path, error) from error


def to_finite_number(value: object) -> float | None:
    """Return a finite number as float, None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # a whole number of hundreds of digits
        return None


def replace_nonfinite(value: Any) -> Any:
    """Return `value` with None in place of every non-finite float at any depth."""
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    if isinstance(value, dict):
        return {key: replace_nonfinite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [replace_nonfinite(item) for item in value]
    return value


def _open_nonblocking(path: str, flags: int) -> int:
    """Open without waiting for the other end of a pipe."""
    return os.open(path, flags | os.O_NONBLOCK)


def _ends_with_newline(path: Path) -> bool:
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON-lines file; skip lines torn by a crash; yield nothing if the path is not a file."""
    if not path.is_file():
        return
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            row = _parse_object(line)
            if row is not None:
                yield row


class JsonlFollower:
    """Reads new lines of a JSON-lines file, call by call; a file that was rewritten is read again.

    Args:
        path: path of the file; it need not exist yet.
        tail: number of bytes before the end to start at; None: start at the beginning.
        max_bytes: maximum bytes to read per call.

    Attributes:
        offset: bytes read so far.
        bytes_behind: bytes of the file that remain for the next call.
        num_unreadable: complete lines that are not JSON objects.
    """

    def __init__(self, path: Path, *, tail: int | None = None, max_bytes: int = 1 << 20) -> None:
        self._path, self._tail, self._max_bytes = path, tail, max_bytes
        self.offset = self.bytes_behind = self.num_unreadable = 0
        self._inode = -1
        self._rest = b""
        self._lost = False

    def read_new_rows(self) -> tuple[bool, list[dict[str, Any]]]:
        """Return whether the rows read before are outdated, and the new objects.

        An incomplete line waits for its end; a line longer than 4 MiB is dropped. A path that is not a regular file,
        such as a pipe on which a read would block, yields nothing.

        Raises:
            OSError: the file exists and cannot be read.
        """
        restarted = False
        try:
            with open(self._path, "rb", opener=_open_nonblocking) as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode):
                    return False, []
                if status.st_ino != self._inode or status.st_size < self.offset:  # a run that resumed rewrites its rows
                    restarted, self._inode, self._rest, self._lost, self.num_unreadable = (
                        True,
                        status.st_ino,
                        b"",
                        False,
                        0,
                    )
                    self.offset = 0 if self._tail is None else max(0, status.st_size - self._tail)
                file.seek(self.offset)
                chunk = file.read(self._max_bytes)
        except (FileNotFoundError, IsADirectoryError):
            return False, []
        self.offset += len(chunk)
        self.bytes_behind = max(0, status.st_size - self.offset)
        return restarted, self._parse_lines(chunk)

    def _parse_lines(self, chunk: bytes) -> list[dict[str, Any]]:
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if lines and self._lost:  # the end of a line whose beginning was dropped
            del lines[0]
            self._lost = False
            self.num_unreadable += 1
        if len(self._rest) > _MAX_LINE_BYTES:
            self._rest, self._lost = b"", True
        rows = [_parse_object(line) for line in lines]
        self.num_unreadable += rows.count(None)
        return [row for row in rows if row is not None]


def _parse_object(line: str | bytes) -> dict[str, Any] | None:
    """Return the object of a line; None if a crash tore it, or it is not an object."""
    try:
        row = loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
