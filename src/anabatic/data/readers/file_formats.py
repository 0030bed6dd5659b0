"""Files of text and rows: plain text, JSONL, JSON arrays, CSV; row by row in bounded memory."""

from __future__ import annotations

import codecs
import csv
import functools
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from json import JSONDecodeError
from pathlib import Path
from typing import IO, Any, TypeVar, cast

from anabatic.core import json_reader, plugins
from anabatic.core.errors import AnabaticError
from anabatic.core.formatting import format_size
from anabatic.data.readers.document import (
    MAX_ROW_BYTES,
    SKIP_HINT,
    WHOLE_FILE,
    ColumnMapping,
    Document,
    FilePiece,
    RowIssue,
)
from anabatic.data.readers.parquet import read_parquet
from anabatic.data.readers.row_parsing import row_to_document

_BLANK = " \t\n\r"
_REST_UNREAD = "no row from there on is read"


class DuplicateKeyError(ValueError):
    """A key that stands twice in one JSON object: one of its values would be lost."""


def reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object, as `object_pairs_hook` of json.

    Raises:
        DuplicateKeyError: names the key.
    """
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise DuplicateKeyError(f'the key "{twice}" stands twice')
    return result


T = TypeVar("T")
RowBuilder = Callable[[Any, str, str], "T | RowIssue | None"]
"""`(row, id, place)` -> what becomes of a row; None: nothing."""


def document_builder(columns: ColumnMapping) -> RowBuilder[Document]:
    """Return what makes documents of rows."""
    return lambda row, doc_id, place: row_to_document(row, doc_id, place, columns)


def read_json(path: Path, name: str, columns: ColumnMapping) -> Iterator[Document | RowIssue]:
    """Yield the documents of a JSON array of objects."""
    return iter_json_rows(path, name, document_builder(columns))


def iter_json_rows(path: Path, name: str, make: RowBuilder[T]) -> Iterator[T | RowIssue]:
    """Yield what `make` makes of the rows of a JSON array of objects; the array is never held whole.

    A file of one object a line is read likewise, whatever it is called.
    """
    decoder = json.JSONDecoder(object_pairs_hook=reject_duplicate_keys)
    with open(path, "rb") as file:
        stream = _JsonStream(file)
        number = 0
        try:
            inside = stream.skip_if_next("[")
            while not stream.skip_if_next("]") and not stream.is_exhausted():
                number += 1
                place = f"{path}: row {number}"
                try:
                    item = make(stream.parse_value(decoder), f"{name}:{number}", place)
                except DuplicateKeyError as error:
                    item = RowIssue(f"{place}: {error}", f"leave one of them, {SKIP_HINT}")
                if item is not None:
                    yield item
                if not stream.skip_if_next(",") and inside and not stream.is_next("]"):
                    raise ValueError("a comma or the closing bracket is missing")
            if not stream.is_exhausted():
                raise ValueError("there is more behind the closing bracket")
        except UnicodeDecodeError as error:
            yield RowIssue(
                f"{path}: row {max(1, number)} or a later one: invalid UTF-8 ({error.reason}); {_REST_UNREAD}",
                "convert the file with `iconv -f OLD_ENCODING -t UTF-8`",
            )
        except (ValueError, RecursionError) as error:
            what = f"{path}: row {number}: broken JSON: {_describe_json_error(error)}; {_REST_UNREAD}"
            yield RowIssue(what, "fix the file from there on")


def _describe_json_error(error: Exception) -> str:
    if not isinstance(error, json.JSONDecodeError):
        return str(error)
    nul = error.doc[error.pos : error.pos + 1] == "\0"
    return "a NUL character" if nul else error.msg.removesuffix(" at")


class _JsonStream:
    """A window on the text of a file, moved on as values are taken."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._text = ""
        self._position = 0
        self._has_more = True

    def _read_block(self) -> bool:
        """Read a block; False at the end of the file."""
        if not self._has_more:
            return False
        block = self._file.read(BLOCK_BYTES)
        self._has_more = bool(block)
        self._text = self._text[self._position :] + self._decoder.decode(block, final=not block)
        self._position = 0
        return self._has_more

    def _skip_whitespace(self) -> None:
        while True:
            while self._position < len(self._text) and self._text[self._position] in _BLANK:
                self._position += 1
            if self._position < len(self._text) or not self._read_block():
                return

    def is_next(self, mark: str) -> bool:
        """True when `mark` comes next."""
        self._skip_whitespace()
        return self._text[self._position : self._position + 1] == mark

    def skip_if_next(self, mark: str) -> bool:
        """Pass over `mark`, if it comes next."""
        found = self.is_next(mark)
        self._position += found
        return found

    def is_exhausted(self) -> bool:
        """True when nothing but blanks is left."""
        self._skip_whitespace()
        return self._position >= len(self._text)

    def parse_value(self, decoder: json.JSONDecoder) -> Any:
        """Take the next JSON value.

        Raises:
            ValueError: it is broken, or longer than `MAX_ROW_BYTES`.
            DuplicateKeyError: it holds a key twice; what comes behind it can be taken.
        """
        self._skip_whitespace()
        twice: DuplicateKeyError | None = None
        while True:
            try:
                value, end = decoder.raw_decode(self._text, self._position)
            except DuplicateKeyError as error:  # the row may continue behind the object that has it
                twice, decoder = error, json.JSONDecoder()
                continue
            except ValueError:
                if len(self._text) - self._position > MAX_ROW_BYTES:
                    raise ValueError(f"the row is longer than {format_size(MAX_ROW_BYTES)}, or not closed") from None
                if not self._read_block():
                    raise
                continue
            if end == len(self._text) and self._read_block():  # a number may continue in the next block
                continue
            self._position = end
            if twice is not None:
                raise twice
            return value


def read_csv(path: Path, name: str, columns: ColumnMapping) -> Iterator[Document | RowIssue]:
    """Yield the documents of a table with a heading."""
    return iter_csv_rows(path, name, document_builder(columns))


def iter_csv_rows(path: Path, name: str, make: RowBuilder[T]) -> Iterator[T | RowIssue]:
    """Yield what `make` makes of the rows of a table with a heading; the delimiter is a tab in `.tsv`, a comma
    elsewhere."""
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    number = 0
    csv.field_size_limit(MAX_ROW_BYTES)
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            rows = csv.reader(file, delimiter=delimiter, strict=True)
            heading = next(rows, [])
            if len(set(heading)) != len(heading):
                twice = next(one for one in heading if heading.count(one) > 1)
                yield RowIssue(f'{path}: the column "{twice}" stands twice in the heading', "rename one of them")
                return
            for number, cells in enumerate(rows, start=1):
                if not cells:
                    continue
                place = f"{path}: row {number} (line {rows.line_num})"
                if len(cells) != len(heading):
                    yield RowIssue(
                        f"{place}: {len(cells)} cells, the heading has {len(heading)}",
                        f'put cells with commas or line ends into "quotes", {SKIP_HINT}',
                    )
                    continue
                if any("\0" in cell for cell in cells):
                    yield RowIssue(
                        f"{place}: a NUL character", f"the file is damaged or no text: write it again, {SKIP_HINT}"
                    )
                    continue
                item = make(dict(zip(heading, cells, strict=True)), f"{name}:{number}", place)
                if item is not None:
                    yield item
    except UnicodeDecodeError as error:
        where = f"{path}: row {number + 1} or a later one: invalid UTF-8 (0x{error.object[error.start]:02x})"
        yield RowIssue(f"{where}; {_REST_UNREAD}", "convert the file with `iconv -f OLD_ENCODING -t UTF-8`")
    except csv.Error as error:
        what = f"{path}: row {number + 1} (up to line {rows.line_num}): broken CSV: {error}; {_REST_UNREAD}"
        yield RowIssue(what, "fix the file from there on")


BLOCK_BYTES = 2**20
"""A text file over `MAX_ROW_BYTES` is read in blocks of about so many bytes; each is a document."""

Reader = Callable[[Path, str, ColumnMapping], Iterator["Document | RowIssue"]]
"""`(path, name, columns)`: `name` is the part of a document's id before the row number."""


def read_text(path: Path, name: str, columns: ColumnMapping) -> Iterator[Document | RowIssue]:
    """Yield a text file as one document; one over `MAX_ROW_BYTES` in blocks of `BLOCK_BYTES`, cut at blank lines."""
    offset, line = 0, 1
    with open(path, "rb") as file:
        blocks = _iter_text_blocks(file) if path.stat().st_size > MAX_ROW_BYTES else iter([file.read()])
        for row, block in enumerate(blocks, start=1):
            nul = block.find(b"\0")
            if nul >= 0:
                yield _binary_file_issue(path, offset + nul, block)
                return
            text = _decode_utf8(block, path, line, offset)
            if isinstance(text, RowIssue):
                yield text
            elif text:
                yield Document(text, None, f"{name}:{row}", source_location=f"{path}: block {row}")
            offset += len(block)
            line += block.count(b"\n")


def _iter_text_blocks(file: IO[bytes]) -> Iterator[bytes]:
    rest = b""
    while chunk := file.read(BLOCK_BYTES):
        buffer = rest + chunk
        cut = _find_block_end(buffer)
        rest = buffer[cut:]
        yield buffer[:cut]
    if rest:
        yield rest


def _find_block_end(buffer: bytes) -> int:
    """Return the end of a block: after a blank line, else a line, else a word, else a character."""
    for mark in (b"\n\n", b"\n", b" "):
        if (found := buffer.rfind(mark)) > 0:
            return found + len(mark)
    end = len(buffer)
    while end > len(buffer) - 4 and buffer[end - 1] & 0xC0 == 0x80:
        end -= 1
    starts_a_character = buffer[end - 1] >= 0xC0
    return end - 1 if starts_a_character and end > 1 else len(buffer)


def read_jsonl(
    path: Path, name: str, columns: ColumnMapping, piece: FilePiece = WHOLE_FILE
) -> Iterator[Document | RowIssue]:
    """Yield the documents of a JSON-lines file, plain or compressed, or of a piece of a plain one."""
    return iter_jsonl_rows(path, name, document_builder(columns), piece)


def iter_jsonl_rows(
    path: Path, name: str, make: RowBuilder[T], piece: FilePiece = WHOLE_FILE
) -> Iterator[T | RowIssue]:
    """Yield what `make` makes of the rows of a JSON-lines file, plain or compressed. Blank lines hold no row."""
    number = piece.first_row
    try:
        with closing(open_lines(path)) as stream:
            if piece.start:
                stream.seek(piece.start)
            for number, offset, line in iter_numbered_lines(stream, piece=piece):
                item = _parse_jsonl_line(path, name, make, number, offset, line)
                if item is not None:
                    yield item
    except (OSError, EOFError, zlib.error) as error:
        yield RowIssue(
            f"{path}: cannot be read after line {number}: {error}",
            "the file is cut short or damaged: fetch or write it again",
        )


def open_lines(path: Path) -> IO[bytes]:
    """Open a file of lines, plain or compressed."""
    if path.suffix.lower() == ".gz":
        return cast("IO[bytes]", gzip.open(path, "rb"))
    if path.suffix.lower() == ".zst":
        import pyarrow

        # zstandard's own stream takes a torn file for a finished one; Arrow's says so.
        return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"))
    return open(path, "rb")


def iter_numbered_lines(
    stream: IO[bytes], limit: int = MAX_ROW_BYTES, piece: FilePiece = WHOLE_FILE
) -> Iterator[tuple[int, int, bytes | int]]:
    """Yield `(line number from 1, byte offset, line)`; of a line over `limit` bytes, only its length.

    No more than `limit` bytes of a line are ever held. `stream` stands at the start of `piece`.
    """
    number, offset = piece.first_row, piece.start
    while (piece.stop is None or offset < piece.stop) and (line := stream.readline(limit + 1)):
        number += 1
        length = len(line)
        if length <= limit:
            yield number, offset, line
        else:
            ended = line.endswith(b"\n")
            del line
            while not ended and (part := stream.readline(BLOCK_BYTES)):
                length += len(part)
                ended = part.endswith(b"\n")
            yield number, offset, length
        offset += length


def _parse_jsonl_line(
    path: Path, name: str, make: RowBuilder[T], number: int, offset: int, line: bytes | int
) -> T | RowIssue | None:
    place = f"{path}: line {number}"
    if isinstance(line, int):
        return RowIssue(
            f"{place}: {format_size(line)} long, more than {format_size(MAX_ROW_BYTES)}",
            f"split the row into documents, one JSON object a line, {SKIP_HINT}",
        )
    if (nul := line.find(b"\0")) >= 0:
        return _binary_file_issue(path, offset + nul, line)
    text = _decode_utf8(line, path, number, offset)
    if isinstance(text, RowIssue):
        return text
    if not text.strip():
        return None
    try:
        row = json_reader.loads_any_depth(text.rstrip("\r\n"), reject_duplicate_keys)
    except ValueError as error:
        if isinstance(error, DuplicateKeyError):
            return RowIssue(f"{place}: {error}", f"leave one of them, {SKIP_HINT}")
        what = str(error)
        if isinstance(error, JSONDecodeError):
            what = f"{error.msg.removesuffix(' at')} at column {error.colno}"
        return RowIssue(f"{place}: broken JSON: {what}", f"write one JSON object a line, {SKIP_HINT}")
    return make(row, f"{name}:{number}", place)


def _decode_utf8(data: bytes, path: Path, line: int, offset: int) -> str | RowIssue:
    """Return the text without a byte order mark; `line` and `offset` are where `data` begins in the file."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line += data.count(b"\n", 0, error.start)
        return RowIssue(
            f"{path}: line {line}: invalid UTF-8 at byte {offset + error.start} (0x{data[error.start]:02x})",
            f"convert the file with `iconv -f OLD_ENCODING -t UTF-8`, {SKIP_HINT}",
        )
    return text.removeprefix("\ufeff") if offset == 0 else text


def _binary_file_issue(path: Path, offset: int, start: bytes) -> RowIssue:
    if start[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return RowIssue(f"{path}: UTF-16, not UTF-8", "convert the file with `iconv -f UTF-16 -t UTF-8`")
    return RowIssue(
        f"{path}: a binary file: NUL byte at byte {offset}",
        "give text in UTF-8; name the files you want with a glob such as 'corpus/**/*.txt'",
    )


READERS: dict[str, Reader] = {
    ".txt": read_text,
    ".md": read_text,
    ".py": read_text,
    ".jsonl": read_jsonl,
    ".jsonl.gz": read_jsonl,
    ".jsonl.zst": read_jsonl,
    ".json": read_json,
    ".csv": read_csv,
    ".tsv": read_csv,
    ".parquet": read_parquet,
}

PIECE_READERS: dict[str, Callable[[Path, str, ColumnMapping, FilePiece], Iterator[Document | RowIssue]]] = {
    ".jsonl": read_jsonl,
    ".parquet": read_parquet,
}
"""Readers of pieces (`file_pieces.cut_file`)."""


def get_reader(path: Path) -> Reader | None:
    """Return the reader of a file's extension, or `None`; upper and lower case are the same.

    Plug-ins of the group `anabatic.readers` add extensions: the name is the extension with its dot, the value a
    function `(path) -> rows`, dictionaries with the columns that a JSON row has. Built-in extensions stay as they are.
    """
    name = path.name.lower()
    for extension in sorted(READERS, key=len, reverse=True):
        if name.endswith(extension):
            return READERS[extension]
    extension = get_plugin_extension(path)
    return functools.partial(_read_with_plugin, extension) if extension else None


def get_plugin_extension(path: Path) -> str:
    """Return the extension by whose name a plug-in reads a file; empty: no plug-in does."""
    name = path.name.lower()
    if any(name.endswith(extension) for extension in READERS):
        return ""
    known = sorted(plugins.list_plugins("anabatic.readers"), key=len, reverse=True)
    return next((extension for extension in known if name.endswith(extension.lower())), "")


def _read_with_plugin(extension: str, path: Path, name: str, columns: ColumnMapping) -> Iterator[Document | RowIssue]:
    make, number = document_builder(columns), 0
    try:
        for row in plugins.load_plugin("anabatic.readers", extension)(path):
            number += 1
            item = make(row, f"{name}:{number}", f"{path}: row {number}")
            if item is not None:
                yield item
    except (AnabaticError, OSError):
        raise
    except Exception as error:  # a third party's reader may raise anything
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        what = f"{path}: row {number + 1}: the reader of {extension} files failed: {reason}; {_REST_UNREAD}"
        yield RowIssue(what, "fix the file, or update the package of the reader")
