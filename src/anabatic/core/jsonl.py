"""Append-only JSON lines: the truth about a run (`metrics.jsonl`, `events.jsonl`)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from anabatic.core.paths import cannot_write


class JsonlWriter:
    """Append one JSON object a line; every line is flushed, so a killed process loses none.

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
        """Append `row`. Not-a-number values are written as `null`: JSON has no word for them."""
        try:
            self._file.write(json.dumps(finite(row), ensure_ascii=False, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise cannot_write(self._path, error) from error

    def close(self) -> None:
        """Close the file."""
        try:
            self._file.close()
        except OSError as error:  # it still holds the row that could not be written
            raise cannot_write(self._path, error) from error


def finite(value: Any) -> Any:
    """Return `value` with every float that is not finite, at any depth, replaced by None."""
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


def _ends_with_newline(path: Path) -> bool:
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON-lines file; a line torn by a crash is passed over."""
    if not path.exists():
        return
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict):
                yield row
