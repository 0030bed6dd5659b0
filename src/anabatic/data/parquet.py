"""Parquet files, a few hundred rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from anabatic.core.errors import BROKEN, DataError
from anabatic.core.text import count
from anabatic.data.document import MAX_ROW, SKIP_HINT, Columns, Document, Problem
from anabatic.data.rows import format_name, listed, missing, missing_hint, needed, to_document


def read_parquet(path: Path, name: str, settings: Columns) -> Iterator[Document | Problem]:
    """Yield the documents of a Parquet file, reading only the columns that are needed.

    Raises:
        DataError: no column holds text or conversations, or the text column has another type.
    """
    return parquet_items(
        path,
        lambda schema: _parquet_columns(path, schema, settings),
        lambda number, row: _parquet_row(path, name, settings, number, row),
    )


def parquet_items(
    path: Path,
    columns: Callable[[Any], list[str] | None],
    make: Callable[[int, dict[str, Any] | UnicodeDecodeError], Any],
) -> Iterator[Any]:
    """Yield what `make` makes of the rows of a Parquet file, by their numbers from 1, a few hundred at a time.

    Args:
        columns: names the columns to read of a schema; None: all.
    """
    number = 0
    try:
        with closing(_rows(path, columns)) as rows:
            for row in rows:
                number += 1
                item = make(number, row)
                if item is not None:
                    yield item
    except Damaged as error:
        yield Problem(
            f"{path}: cannot be read as Parquet after row {number}: {error}",
            "the file is cut short or damaged: fetch or write it again",
        )


class Damaged(Exception):
    """A Parquet file cannot be read on; the reason as Arrow names it."""


@contextmanager
def damage() -> Iterator[None]:
    """Turn what Arrow raises for damaged files into one kind of error; only calls of Arrow may stand inside.

    Raises:
        Damaged: with the reason in one line.
    """
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError, *BROKEN) as error:
        raise Damaged(str(error).splitlines()[0] if str(error) else type(error).__name__) from error


def _rows(
    path: Path, columns: Callable[[Any], list[str] | None]
) -> Generator[dict[str, Any] | UnicodeDecodeError, None, None]:
    import pyarrow.parquet

    with ExitStack() as stack:
        with damage():
            file = stack.enter_context(pyarrow.parquet.ParquetFile(path, memory_map=True))
            schema = file.schema_arrow
            names = schema.names
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise Damaged(f'the column "{twice}" stands twice')
        wanted = columns(schema)
        with damage():
            batches = file.iter_batches(batch_size=256, columns=wanted, use_threads=False)
        while True:
            with damage():
                batch = next(batches, None)
                rows = [] if batch is None else _batch_rows(batch)
            if batch is None:
                return
            yield from rows


def _parquet_columns(path: Path, schema: Any, settings: Columns) -> list[str]:
    import pyarrow.types as types

    names: list[str] = schema.names
    form = format_name(names, settings)
    if not form:
        raise DataError(
            f"{path}: {missing(settings, names)}; the file has {listed(names)}", missing_hint(settings, names)
        )
    if form != "plain text":
        return needed(names, settings)
    theirs = dict(settings.names).get(settings.text, settings.text)
    kind = schema.field(theirs).type
    value = kind.value_type if types.is_dictionary(kind) else kind
    if not (types.is_string(value) or types.is_large_string(value) or types.is_string_view(value)):
        raise DataError(
            f'{path}: column "{theirs}" is {kind}, not text',
            f"name the column of the text with --data.text-column NAME; the file has {listed(names)}",
        )
    return [theirs]


def _batch_rows(batch: Any) -> list[dict[str, Any] | UnicodeDecodeError]:
    try:
        return list(batch.to_pylist())
    except UnicodeDecodeError:  # find out which ones
        return [_batch_row(batch, index) for index in range(batch.num_rows)]


def _batch_row(batch: Any, index: int) -> dict[str, Any] | UnicodeDecodeError:
    try:
        found: dict[str, Any] = batch.slice(index, 1).to_pylist()[0]
        return found
    except UnicodeDecodeError as error:
        return error


def _parquet_row(
    path: Path, name: str, settings: Columns, number: int, row: dict[str, Any] | UnicodeDecodeError
) -> Document | Problem | None:
    place = f"{path}: row {number}"
    if isinstance(row, UnicodeDecodeError):
        return Problem(f"{place}: invalid UTF-8 at byte {row.start} of the text", f"write the file again, {SKIP_HINT}")
    text = row.get(settings.text)
    if isinstance(text, str) and len(text) > MAX_ROW:
        return Problem(
            f"{place}: {count(len(text))} characters long, more than {count(MAX_ROW)}",
            f"split the row into documents, {SKIP_HINT}",
        )
    return to_document(row, f"{name}:{number}", place, settings)
