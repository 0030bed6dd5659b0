"""Pieces of large files: ranges of lines of a JSON-lines file, row groups of a Parquet file; other files stay whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from anabatic.data.readers.document import WHOLE_FILE, FilePiece
from anabatic.data.readers.parquet import DamagedParquetError, catch_arrow_errors

_BLOCK_BYTES = 2**22


def cut_file(path: Path, piece_bytes: int, advance: Callable[[], None]) -> list[FilePiece]:
    """Cut a file into pieces of about `piece_bytes`; their rows, one piece after the other, are those of the file.

    A JSON-lines file is read once, for the numbers of its lines; `advance` is called after each block.

    Raises:
        OSError: the file cannot be read.
    """
    suffix = path.suffix.lower()
    if path.stat().st_size < 2 * piece_bytes or suffix not in (".jsonl", ".parquet"):
        return [WHOLE_FILE]
    return _cut_lines(path, piece_bytes, advance) if suffix == ".jsonl" else _cut_row_groups(path, piece_bytes)


def _cut_lines(path: Path, piece_bytes: int, advance: Callable[[], None]) -> list[FilePiece]:
    pieces: list[FilePiece] = []
    position = start = lines = first_row = 0
    with open(path, "rb") as file:
        while block := file.read(_BLOCK_BYTES):
            counted = 0
            while (wanted := start + piece_bytes - position) < len(block):
                found = block.find(b"\n", max(counted, wanted))
                if found < 0:
                    break
                lines += block.count(b"\n", counted, found + 1)
                counted = found + 1
                pieces.append(FilePiece(start, position + counted, first_row))
                start, first_row = position + counted, lines
            lines += block.count(b"\n", counted)
            position += len(block)
            advance()
    return [*pieces, FilePiece(start, position, first_row)] if position > start else pieces


def _cut_row_groups(path: Path, piece_bytes: int) -> list[FilePiece]:
    import pyarrow.parquet

    try:
        with catch_arrow_errors():
            meta = pyarrow.parquet.read_metadata(path)
            rows = [meta.row_group(number).num_rows for number in range(meta.num_row_groups)]
    except DamagedParquetError:  # the reader says what is wrong with it
        return [WHOLE_FILE]
    pieces: list[FilePiece] = []
    start = first_row = counted = 0
    bytes_per_row = path.stat().st_size / max(1, sum(rows))
    for number, in_group in enumerate(rows, start=1):
        counted += in_group
        if (counted - first_row) * bytes_per_row >= piece_bytes or number == len(rows):
            pieces.append(FilePiece(start, number, first_row))
            start, first_row = number, counted
    return pieces or [WHOLE_FILE]
