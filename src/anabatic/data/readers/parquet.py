"""Parquet files, a few hundred rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from anabatic.core.errors import BROKEN_DATA_ERRORS, DataError
from anabatic.core.formatting import format_count
from anabatic.data.readers.document import (
    MAX_ROW_BYTES,
    SKIP_HINT,
    WHOLE_FILE,
    ColumnMapping,
    Document,
    FilePiece,
    RowIssue,
)
from anabatic.data.readers.row_parsing import (
    describe_missing_columns,
    detect_format_name,
    file_column,
    format_column_names,
    hint_missing_columns,
    row_to_document,
    select_needed_columns,
)
from anabatic.data.readers.row_use import is_metadata


def read_parquet(
    path: Path, name: str, settings: ColumnMapping, piece: FilePiece = WHOLE_FILE
) -> Iterator[Document | RowIssue]:
    """Yield the documents of a Parquet file or of a piece of it, reading only the columns that are needed.

    Raises:
        DataError: no column holds text or conversations, or the text column has another type.
    """
    unread: tuple[str, ...] = ()

    def select_columns(schema: Any) -> list[str]:
        nonlocal unread
        selected = _select_columns(path, schema, settings)
        unread = _list_unread_columns(schema, selected)
        return selected

    return iter_parquet_rows(
        path, select_columns, lambda number, row: _parse_parquet_row(path, name, settings, number, row, unread), piece
    )


def iter_parquet_rows(
    path: Path,
    columns: Callable[[Any], list[str] | None],
    make: Callable[[int, dict[str, Any] | UnicodeDecodeError], Any],
    piece: FilePiece = WHOLE_FILE,
) -> Iterator[Any]:
    """Yield what `make` makes of the rows of a Parquet file, by their numbers from 1, a few hundred at a time.

    Args:
        columns: names the columns to read of a schema; None: all.
    """
    number = piece.first_row
    try:
        with closing(_iter_raw_rows(path, columns, piece)) as rows:
            for row in rows:
                number += 1
                item = make(number, row)
                if item is not None:
                    yield item
    except DamagedParquetError as error:
        yield RowIssue(
            f"{path}: cannot be read as Parquet after row {number}: {error}",
            "the file is cut short or damaged: fetch or write it again",
        )


class DamagedParquetError(Exception):
    """A Parquet file cannot be read on; the reason as Arrow names it."""


@contextmanager
def catch_arrow_errors() -> Iterator[None]:
    """Turn what Arrow raises for damaged files into one kind of error; only calls of Arrow may stand inside.

    Raises:
        DamagedParquetError: with the reason in one line.
    """
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError, *BROKEN_DATA_ERRORS) as error:
        raise DamagedParquetError(str(error).splitlines()[0] if str(error) else type(error).__name__) from error


def _iter_raw_rows(
    path: Path, columns: Callable[[Any], list[str] | None], piece: FilePiece
) -> Generator[dict[str, Any] | UnicodeDecodeError, None, None]:
    import pyarrow.parquet

    with ExitStack() as stack:
        with catch_arrow_errors():
            file = stack.enter_context(pyarrow.parquet.ParquetFile(path, memory_map=True))
            schema = file.schema_arrow
            names = schema.names
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise DamagedParquetError(f'the column "{twice}" stands twice')
        selected_columns = columns(schema)
        with catch_arrow_errors():
            groups = None if piece.stop is None else list(range(piece.start, piece.stop))
            batches = file.iter_batches(256, row_groups=groups, columns=selected_columns, use_threads=False)
        while True:
            with catch_arrow_errors():
                batch = next(batches, None)
                rows = [] if batch is None else _rows_of_batch(batch)
            if batch is None:
                return
            yield from rows


def _select_columns(path: Path, schema: Any, settings: ColumnMapping) -> list[str]:
    import pyarrow.types as types

    names: list[str] = schema.names
    form = detect_format_name(names, settings)
    if not form:
        raise DataError(
            f"{path}: {describe_missing_columns(settings, names)}; the file has {format_column_names(names)}",
            hint_missing_columns(settings, names),
        )
    if form != "plain text":
        return select_needed_columns(names, settings)
    text_column = dict(settings.renamed_columns).get(settings.text_column, settings.text_column)
    if text_column not in names:  # a part of a column
        return [file_column(text_column, names)]
    kind = schema.field(text_column).type
    value = kind.value_type if types.is_dictionary(kind) else kind
    if not (types.is_string(value) or types.is_large_string(value) or types.is_string_view(value)):
        raise DataError(
            f'{path}: column "{text_column}" is {kind}, not text',
            f"name the column of the text with --data.text-column NAME; the file has {format_column_names(names)}",
        )
    return [text_column]


def _list_unread_columns(schema: Any, selected: list[str]) -> tuple[str, ...]:
    """Return the columns that nothing reads, without metadata and those that are null throughout."""
    import pyarrow.types as types

    return tuple(
        field.name
        for field in schema
        if field.name not in selected and not is_metadata(field.name) and not types.is_null(field.type)
    )


def _rows_of_batch(batch: Any) -> list[dict[str, Any] | UnicodeDecodeError]:
    try:
        return list(batch.to_pylist())
    except UnicodeDecodeError:  # find out which ones
        return [_row_of_batch(batch, index) for index in range(batch.num_rows)]


def _row_of_batch(batch: Any, index: int) -> dict[str, Any] | UnicodeDecodeError:
    try:
        found: dict[str, Any] = batch.slice(index, 1).to_pylist()[0]
        return found
    except UnicodeDecodeError as error:
        return error


def _parse_parquet_row(
    path: Path,
    name: str,
    settings: ColumnMapping,
    number: int,
    row: dict[str, Any] | UnicodeDecodeError,
    unread: tuple[str, ...],
) -> Document | RowIssue | None:
    place = f"{path}: row {number}"
    if isinstance(row, UnicodeDecodeError):
        return RowIssue(f"{place}: invalid UTF-8 at byte {row.start} of the text", f"write the file again, {SKIP_HINT}")
    text = row.get(settings.text_column)
    if isinstance(text, str) and len(text) > MAX_ROW_BYTES:
        return RowIssue(
            f"{place}: {format_count(len(text))} characters long, more than {format_count(MAX_ROW_BYTES)}",
            f"split the row into documents, {SKIP_HINT}",
        )
    return row_to_document(row, f"{name}:{number}", place, settings, unread)
