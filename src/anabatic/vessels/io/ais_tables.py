"""AIS tables (CSV and Parquet), batch by batch in bounded memory."""

from __future__ import annotations

import codecs
import csv
import io
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from anabatic.core.errors import DataError
from anabatic.vessels.io.bad_rows import BadRowPolicy
from anabatic.vessels.io.column_names import find_columns

BLOCK_BYTES = 4 * 2**20
"""Bytes of a CSV file that are parsed at a time."""
TABLE_SUFFIXES = (".csv", ".tsv", ".csv.gz", ".csv.zst", ".csv.bz2", ".zip", ".parquet")
"""File names that are read as AIS tables."""
_DELIMITERS = ",;\t|"

ArrowColumns = dict[str, Any]
"""Arrow columns by our names."""
ColumnBatch = tuple[ArrowColumns, NDArray[np.int64]]
"""Columns, and the line of each row."""


def read_table(path: Path, renamed: dict[str, str], bad: BadRowPolicy) -> Iterator[ColumnBatch]:
    """Yield the columns of a table that we know, as they stand in the file.

    Args:
        path: the file.
        renamed: our column -> the file's name, as the user gave it.
        bad: what is done with rows that are broken.

    Raises:
        DataError: it is no AIS table, or cannot be read.
    """
    import pyarrow

    batches = _read_parquet(path, renamed) if path.suffix.lower() == ".parquet" else _read_csv(path, renamed, bad)
    try:
        yield from batches
    except (pyarrow.ArrowException, OSError, EOFError, zipfile.BadZipFile, UnicodeDecodeError) as error:
        raise unreadable_file_error(path, error) from error


def unreadable_file_error(path: Path, error: Exception) -> DataError:
    """Return the error for a file that cannot be read to its end."""
    if isinstance(error, FileNotFoundError):
        return DataError(f"{path}: there is no such file", "check the path")
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    if "UTF8" in reason or isinstance(error, UnicodeDecodeError):
        return DataError(f"{path}: invalid UTF-8", "convert it with `iconv -f GB18030 -t UTF-8` or its old encoding")
    return DataError(f"{path}: cannot be read: {reason}", "the file is cut short, damaged or of another kind")


def _read_parquet(path: Path, renamed: dict[str, str]) -> Iterator[ColumnBatch]:
    from pyarrow.parquet import ParquetFile

    with ParquetFile(path, memory_map=True) as file:
        names = find_columns(file.schema_arrow.names, str(path), renamed)
        row = 0
        for batch in file.iter_batches(batch_size=2**16, columns=list(names.values()), use_threads=False):
            lines = np.arange(row, row + batch.num_rows, dtype=np.int64) + 1
            row += batch.num_rows
            yield {ours: _decode_dictionary(batch.column(theirs)) for ours, theirs in names.items()}, lines


def _decode_dictionary(column: Any) -> Any:
    import pyarrow

    return column.dictionary_decode() if pyarrow.types.is_dictionary(column.type) else column


def _read_csv(path: Path, renamed: dict[str, str], bad: BadRowPolicy) -> Iterator[ColumnBatch]:
    from pyarrow import csv as arrow

    heading, delimiter = _read_heading(path)
    names = find_columns(heading, str(path), renamed)
    broken: list[Any] = []

    def collect_broken_row(row: Any) -> str:
        broken.append(row)
        return "skip"

    import pyarrow

    options = arrow.ConvertOptions(
        include_columns=list(names.values()),
        column_types=dict.fromkeys(names.values(), pyarrow.string()),
        strings_can_be_null=True,
    )
    parse = arrow.ParseOptions(delimiter=delimiter, ignore_empty_lines=False, invalid_row_handler=collect_broken_row)
    with _open_file(path) as raw, pyarrow.PythonFile(_Utf8Checker(raw), mode="r") as stream:
        read_options = arrow.ReadOptions(use_threads=False, block_size=BLOCK_BYTES)
        reader = arrow.open_csv(stream, read_options=read_options, parse_options=parse, convert_options=options)
        line = 2
        for batch in reader:
            lines = np.arange(line, line + batch.num_rows + len(broken), dtype=np.int64)
            line += len(lines)
            for row in broken:
                if row.text.strip():
                    what = f"{row.actual_columns} cells, the heading has {row.expected_columns}"
                    bad.report_row(f"{path}: line {row.number}: {what}", "fix the row")
            if broken:
                lines = np.setdiff1d(lines, [row.number for row in broken])
                broken.clear()
            yield {ours: batch.column(theirs) for ours, theirs in names.items()}, lines


def _read_heading(path: Path) -> tuple[list[str], str]:
    """Return the column names and the delimiter."""
    with _open_file(path) as stream:
        start = stream.read(2**16)
    if b"\0" in start:
        raise DataError(f"{path}: a binary file, not a table of text", "give CSV or Parquet")
    line = start.partition(b"\n")[0].decode("utf-8-sig").strip("\r\n")
    if not line.strip():
        raise DataError(f"{path}: no heading in line 1", "the first line names the columns, such as MMSI,LAT,LON")
    delimiter = max(_DELIMITERS, key=line.count)
    try:
        heading = next(csv.reader(io.StringIO(line), delimiter=delimiter))
    except csv.Error as error:
        raise DataError(f"{path}: line 1: broken CSV: {error}", "the first line names the columns") from error
    twice = next((name for name in heading if name and heading.count(name) > 1), None)
    if twice is not None:
        raise DataError(f'{path}: the column "{twice}" stands twice in the heading', "rename one of them")
    return heading, delimiter


class _Utf8Checker(io.RawIOBase):
    """Bytes of a stream, which must be UTF-8: Arrow's parser drops what it calls back about bytes that are not."""

    def __init__(self, stream: IO[bytes]) -> None:
        super().__init__()
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")()

    def readable(self) -> bool:
        """True."""
        return True

    def read(self, size: int = -1) -> bytes:
        """Return at most `size` bytes.

        Raises:
            UnicodeDecodeError: the stream is no UTF-8 there.
        """
        data = self._stream.read(size)
        self._decoder.decode(data, final=not data)
        return data


@contextmanager
def _open_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that may be compressed; of a zip archive, its one table."""
    import pyarrow

    if path.suffix.lower() != ".zip":
        with pyarrow.input_stream(str(path), compression="detect") as stream:
            yield stream
        return
    with zipfile.ZipFile(path) as archive:
        members = [name for name in archive.namelist() if name.lower().endswith((".csv", ".tsv"))]
        if len(members) != 1:
            raise DataError(f"{path}: {len(members)} tables in the archive", "unpack it and name the files")
        with archive.open(members[0]) as member:
            yield member
