"""Rows of a file as they are: every column, nothing made of them. For tasks, whose templates name the columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from anabatic.core.errors import DataError
from anabatic.data.document import Problem
from anabatic.data.parquet import parquet_items
from anabatic.data.readers import jsonl_items
from anabatic.data.rows import no_media
from anabatic.data.tables import csv_items, json_items
from anabatic.data.turn_fields import BadRow, check_values, kind_of

_HINT = "mend the row, or fetch the file again"


class RawRow(NamedTuple):
    """A row: its columns, and file and row for messages."""

    columns: dict[str, Any]
    place: str


def _row(row: Any, _: str, place: str) -> RawRow | Problem:
    if not isinstance(row, dict):
        return Problem(f"{place}: the row is {kind_of(row)}, not an object", _HINT)
    try:
        no_media(row)
        check_values(row, "the row")
    except BadRow as error:
        return Problem(f"{place}: {error}", error.hint or _HINT)
    return RawRow(row, place)


def _parquet(path: Path, name: str, make: Callable[[Any, str, str], RawRow | Problem]) -> Iterator[RawRow | Problem]:
    def of(number: int, row: dict[str, Any] | UnicodeDecodeError) -> RawRow | Problem:
        place = f"{path}: row {number}"
        return (
            Problem(f"{place}: invalid UTF-8", _HINT) if isinstance(row, UnicodeDecodeError) else make(row, "", place)
        )

    return parquet_items(path, lambda schema: None, of)


_READ: dict[str, Callable[..., Iterator[RawRow | Problem]]] = {
    ".jsonl": jsonl_items,
    ".jsonl.gz": jsonl_items,
    ".jsonl.zst": jsonl_items,
    ".json": json_items,
    ".csv": csv_items,
    ".tsv": csv_items,
    ".parquet": _parquet,
}
ENDINGS = tuple(_READ)


def read(path: Path) -> Iterator[RawRow]:
    """Yield the rows of a file, in its order.

    Raises:
        DataError: it is not there, of another kind or damaged; it holds no row.
    """
    ending = next((one for one in sorted(_READ, key=len, reverse=True) if path.name.lower().endswith(one)), None)
    if ending is None:
        raise DataError(f"{path} is of another kind", f"rows are read from {', '.join(ENDINGS)}")
    found = 0
    try:
        for item in _READ[ending](path, path.name, _row):
            if isinstance(item, Problem):
                raise DataError(item.message, item.hint)
            found += 1
            yield item
    except OSError as error:
        raise DataError(
            f"{path}: {error.strerror or error}", "look at its name, its permissions and its disk"
        ) from error
    if not found:
        raise DataError(f"{path} holds no row", "give a file with rows")
