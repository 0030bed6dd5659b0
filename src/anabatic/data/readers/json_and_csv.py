"""JSON arrays and CSV tables, row by row in bounded memory."""

from __future__ import annotations

import codecs
import csv
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, TypeVar

from anabatic.core.formatting import format_size
from anabatic.data.readers.document import MAX_ROW_BYTES, SKIP_HINT, ColumnMapping, Document, RowIssue
from anabatic.data.readers.row_parsing import row_to_document

BLOCK_BYTES = 2**20
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
            except DuplicateKeyError as error:  # the row may go on behind the object that has it
                twice, decoder = error, json.JSONDecoder()
                continue
            except ValueError:
                if len(self._text) - self._position > MAX_ROW_BYTES:
                    raise ValueError(f"the row is longer than {format_size(MAX_ROW_BYTES)}, or not closed") from None
                if not self._read_block():
                    raise
                continue
            if end == len(self._text) and self._read_block():  # a number may go on in the next block
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
