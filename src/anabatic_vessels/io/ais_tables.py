"""Read AIS tables (CSV and Parquet) in batches, in bounded memory, with their columns found by name."""

from __future__ import annotations

import codecs
import csv
import io
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from anabatic.core.errors import DataError
from anabatic_vessels.io.column_names import ColumnLayout, find_columns
from anabatic_vessels.io.track import BadRowPolicy

BLOCK_BYTES = 4 * 2**20
"""Bytes of a CSV file parsed per batch."""
TABLE_SUFFIXES = (".csv", ".tsv", ".csv.gz", ".csv.zst", ".csv.bz2", ".zip", ".parquet")
"""Suffixes of AIS tables."""
_DELIMITERS = ",;\t|"

ArrowColumns = dict[str, Any]
"""Arrow columns by the names used here."""


class ColumnBatch(NamedTuple):
    """Rows of a file.

    Attributes:
        columns: Arrow columns.
        lines: line number of each row.
        layout: which columns of the file these are.
    """

    columns: ArrowColumns
    lines: NDArray[np.int64]
    layout: ColumnLayout = ColumnLayout()


def read_table(path: Path, column_map: dict[str, str], bad_rows: BadRowPolicy) -> Iterator[ColumnBatch]:
    """Yield the known columns of a table, in batches.

    Args:
        path: the file.
        column_map: column name -> name in the file, set by the user.
        bad_rows: policy for broken rows.

    Raises:
        DataError: the file is not an AIS table, or cannot be read.
    """
    import pyarrow

    batches = (
        _read_parquet(path, column_map) if path.suffix.lower() == ".parquet" else _read_csv(path, column_map, bad_rows)
    )
    try:
        yield from batches
    except (pyarrow.ArrowException, OSError, EOFError, zipfile.BadZipFile, UnicodeDecodeError) as error:
        raise unreadable_file_error(path, error) from error


def unreadable_file_error(path: Path, error: Exception) -> DataError:
    """Return the error for an unreadable file."""
    if isinstance(error, FileNotFoundError):
        return DataError(f"{path}: there is no such file", "check the path")
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    if "UTF8" in reason or isinstance(error, UnicodeDecodeError):
        return DataError(f"{path}: invalid UTF-8", "convert it with `iconv -f GB18030 -t UTF-8` or its old encoding")
    return DataError(f"{path}: cannot be read: {reason}", "the file is cut short, damaged or of another kind")


def _read_parquet(path: Path, column_map: dict[str, str]) -> Iterator[ColumnBatch]:
    from pyarrow.parquet import ParquetFile

    with ParquetFile(path, memory_map=True) as file:
        layout = find_columns(file.schema_arrow.names, str(path), column_map)
        names = layout.names
        row = 0
        for batch in file.iter_batches(
            batch_size=2**16, columns=list(dict.fromkeys(names.values())), use_threads=False
        ):
            lines = np.arange(row, row + batch.num_rows, dtype=np.int64) + 1
            row += batch.num_rows
            columns = {name: _decode_dictionary(batch.column(source_name)) for name, source_name in names.items()}
            yield ColumnBatch(columns, lines, layout)


def _decode_dictionary(column: Any) -> Any:
    import pyarrow

    return column.dictionary_decode() if pyarrow.types.is_dictionary(column.type) else column


def _read_csv(path: Path, column_map: dict[str, str], bad_rows: BadRowPolicy) -> Iterator[ColumnBatch]:
    from pyarrow import csv as arrow

    header, delimiter = _read_heading(path)
    layout = find_columns(header, str(path), column_map)
    names = layout.names
    broken_rows: list[Any] = []

    def collect_broken_row(row: Any) -> str:
        broken_rows.append(row)
        return "skip"

    import pyarrow

    convert_options = arrow.ConvertOptions(
        include_columns=list(dict.fromkeys(names.values())),
        column_types=dict.fromkeys(names.values(), pyarrow.string()),
        strings_can_be_null=True,
    )
    parse_options = arrow.ParseOptions(
        delimiter=delimiter, ignore_empty_lines=False, invalid_row_handler=collect_broken_row
    )
    with _open_file(path) as raw, pyarrow.PythonFile(_Utf8Checker(raw), mode="r") as stream:
        read_options = arrow.ReadOptions(use_threads=False, block_size=BLOCK_BYTES)
        reader = arrow.open_csv(
            stream, read_options=read_options, parse_options=parse_options, convert_options=convert_options
        )
        line = 2
        for batch in reader:
            lines = np.arange(line, line + batch.num_rows + len(broken_rows), dtype=np.int64)
            line += len(lines)
            for row in broken_rows:
                if row.text.strip():
                    reason = f"{row.actual_columns} cells, the heading has {row.expected_columns}"
                    bad_rows.report_row(f"{path}: line {row.number}: {reason}", "fix the row")
            if broken_rows:
                lines = np.setdiff1d(lines, [row.number for row in broken_rows])
                broken_rows.clear()
            columns = {name: batch.column(source_name) for name, source_name in names.items()}
            yield ColumnBatch(columns, lines, layout)


def _read_heading(path: Path) -> tuple[list[str], str]:
    """Return the column names and the delimiter."""
    with _open_file(path) as stream:
        head = stream.read(2**16)
    if b"\0" in head:
        raise DataError(f"{path}: a binary file, not a table of text", "give CSV or Parquet")
    line = head.partition(b"\n")[0].decode("utf-8-sig").strip("\r\n")
    if not line.strip():
        raise DataError(f"{path}: no heading in line 1", "the first line names the columns, such as MMSI,LAT,LON")
    delimiter = max(_DELIMITERS, key=line.count)
    try:
        header = next(csv.reader(io.StringIO(line), delimiter=delimiter))
    except csv.Error as error:
        raise DataError(f"{path}: line 1: broken CSV: {error}", "the first line names the columns") from error
    duplicate = next((name for name in header if name and header.count(name) > 1), None)
    if duplicate is not None:
        raise DataError(f'{path}: the column "{duplicate}" stands twice in the heading', "rename one of them")
    return header, delimiter


class _Utf8Checker(io.RawIOBase):
    """A stream that checks UTF-8: Arrow's parser does not report invalid bytes to its callback."""

    def __init__(self, stream: IO[bytes]) -> None:
        super().__init__()
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")()

    def readable(self) -> bool:
        """Return True."""
        return True

    def read(self, size: int = -1) -> bytes:
        """Return at most `size` bytes.

        Raises:
            UnicodeDecodeError: the bytes are not UTF-8.
        """
        data = self._stream.read(size)
        self._decoder.decode(data, final=not data)
        return data


@contextmanager
def _open_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that may be compressed; in a zip archive, its only table."""
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
