"""Rows of a file as they are: every column, nothing made of them. For tasks, whose templates name the columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from anabatic.core.errors import DataError
from anabatic.data.chat.turn_fields import BadRowError, check_json_values, json_type_name
from anabatic.data.readers.document import RowIssue
from anabatic.data.readers.file_formats import RowBuilder, T, iter_csv_rows, iter_json_rows, iter_jsonl_rows
from anabatic.data.readers.parquet import iter_parquet_rows
from anabatic.data.readers.row_parsing import reject_media
from anabatic.data.vision.row_pictures import PICTURE_COLUMNS

_HINT = "fix the row, or fetch the file again"


class RawRow(NamedTuple):
    """A row: its columns, file and row for messages, and the folder of the file."""

    columns: dict[str, Any]
    location: str
    folder: str = ""


def _build_raw_row(folder: str, has_pictures: bool, row: Any, _: str, place: str) -> RawRow | RowIssue:
    if not isinstance(row, dict):
        return RowIssue(f"{place}: the row is {json_type_name(row)}, not an object", _HINT)
    try:
        plain = {key: value for key, value in row.items() if not has_pictures or key not in PICTURE_COLUMNS}
        reject_media(plain)
        check_json_values(plain, "the row")
    except BadRowError as error:
        return RowIssue(f"{place}: {error}", error.hint or _HINT)
    return RawRow(row, place, folder)


def _iter_parquet(path: Path, name: str, make: RowBuilder[T]) -> Iterator[T | RowIssue]:
    def convert_row(number: int, row: dict[str, Any] | UnicodeDecodeError) -> T | RowIssue | None:
        place = f"{path}: row {number}"
        if isinstance(row, UnicodeDecodeError):
            return RowIssue(f"{place}: invalid UTF-8", _HINT)
        return make(row, f"{name}:{number}", place)

    return iter_parquet_rows(path, lambda schema: None, convert_row)


_ROW_READERS: dict[str, Callable[..., Iterator[Any]]] = {
    ".jsonl": iter_jsonl_rows,
    ".jsonl.gz": iter_jsonl_rows,
    ".jsonl.zst": iter_jsonl_rows,
    ".json": iter_json_rows,
    ".csv": iter_csv_rows,
    ".tsv": iter_csv_rows,
    ".parquet": _iter_parquet,
}
SUPPORTED_EXTENSIONS = tuple(_ROW_READERS)


def get_row_reader(path: Path) -> Callable[..., Iterator[Any]] | None:
    """Return what reads the rows of a file's extension as `(path, name, make)`, or `None`."""
    name = path.name.lower()
    ending = next((ending for ending in sorted(_ROW_READERS, key=len, reverse=True) if name.endswith(ending)), None)
    return None if ending is None else _ROW_READERS[ending]


def read_raw_rows(path: Path, has_pictures: bool = False) -> Iterator[RawRow]:
    """Yield the rows of a file, in its order.

    Args:
        has_pictures: rows may have columns of pictures; else such rows are refused.

    Raises:
        DataError: it is not there, of another kind or damaged; it holds no row.
    """
    read_rows = get_row_reader(path)
    if read_rows is None:
        raise DataError(f"{path} has another format", f"rows are read from {', '.join(SUPPORTED_EXTENSIONS)}")
    found, build = 0, partial(_build_raw_row, str(path.absolute().parent), has_pictures)
    try:
        for item in read_rows(path, path.name, build):
            if isinstance(item, RowIssue):
                raise DataError(item.message, item.hint)
            found += 1
            yield item
    except OSError as error:
        raise DataError(
            f"{path}: {error.strerror or error}", "look at its name, its permissions and its disk"
        ) from error
    if not found:
        raise DataError(f"{path} holds no row", "give a file with rows")
