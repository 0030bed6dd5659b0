"""JSON arrays and CSV tables, row by row in bounded memory."""

from __future__ import annotations

import codecs
import csv
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, TypeVar

from anabatic.core.text import size
from anabatic.data.document import MAX_ROW, SKIP_HINT, Columns, Document, Problem
from anabatic.data.rows import to_document

BLOCK = 2**20
_BLANK = " \t\n\r"
_NO_MORE = "no row from there on is read"


class Twice(ValueError):
    """A key that stands twice in one JSON object: one of its values would be lost."""


def no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object, as `object_pairs_hook` of json.

    Raises:
        Twice: names the key.
    """
    made = dict(pairs)
    if len(made) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise Twice(f'the key "{twice}" stands twice')
    return made


T = TypeVar("T")
Make = Callable[[Any, str, str], "T | Problem | None"]
"""`(row, id, place)` -> what becomes of a row; None: nothing."""


def maker(columns: Columns) -> Make[Document]:
    """Return what makes documents of rows."""
    return lambda row, doc_id, place: to_document(row, doc_id, place, columns)


def read_json(path: Path, name: str, columns: Columns) -> Iterator[Document | Problem]:
    """Yield the documents of a JSON array of objects."""
    return json_items(path, name, maker(columns))


def json_items(path: Path, name: str, make: Make[T]) -> Iterator[T | Problem]:
    """Yield what `make` makes of the rows of a JSON array of objects; the array is never held whole.

    A file of one object a line is read likewise, whatever it is called.
    """
    decoder = json.JSONDecoder(object_pairs_hook=no_key_twice)
    with open(path, "rb") as file:
        stream = _Characters(file)
        number = 0
        try:
            inside = stream.skip("[")
            while not stream.skip("]") and not stream.ended():
                number += 1
                place = f"{path}: row {number}"
                try:
                    item = make(stream.value(decoder), f"{name}:{number}", place)
                except Twice as error:
                    item = Problem(f"{place}: {error}", f"leave one of them, {SKIP_HINT}")
                if item is not None:
                    yield item
                if not stream.skip(",") and inside and not stream.peek("]"):
                    raise ValueError("a comma or the closing bracket is missing")
            if not stream.ended():
                raise ValueError("there is more behind the closing bracket")
        except UnicodeDecodeError as error:
            yield Problem(
                f"{path}: row {max(1, number)} or a later one: invalid UTF-8 ({error.reason}); {_NO_MORE}",
                "convert the file with `iconv -f OLD_ENCODING -t UTF-8`",
            )
        except (ValueError, RecursionError) as error:
            what = f"{path}: row {number}: broken JSON: {_what(error)}; {_NO_MORE}"
            yield Problem(what, "mend the file from there on")


def _what(error: Exception) -> str:
    if not isinstance(error, json.JSONDecodeError):
        return str(error)
    nul = error.doc[error.pos : error.pos + 1] == "\0"
    return "a NUL character" if nul else error.msg.removesuffix(" at")


class _Characters:
    """A window on the text of a file, moved on as values are taken."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._decode = codecs.getincrementaldecoder("utf-8-sig")()
        self._text = ""
        self._at = 0
        self._more = True

    def _fill(self) -> bool:
        """Read a block; False at the end of the file."""
        if not self._more:
            return False
        block = self._file.read(BLOCK)
        self._more = bool(block)
        self._text = self._text[self._at :] + self._decode.decode(block, final=not block)
        self._at = 0
        return self._more

    def _blanks(self) -> None:
        while True:
            while self._at < len(self._text) and self._text[self._at] in _BLANK:
                self._at += 1
            if self._at < len(self._text) or not self._fill():
                return

    def peek(self, mark: str) -> bool:
        """True when `mark` comes next."""
        self._blanks()
        return self._text[self._at : self._at + 1] == mark

    def skip(self, mark: str) -> bool:
        """Pass over `mark`, if it comes next."""
        found = self.peek(mark)
        self._at += found
        return found

    def ended(self) -> bool:
        """True when nothing but blanks is left."""
        self._blanks()
        return self._at >= len(self._text)

    def value(self, decoder: json.JSONDecoder) -> Any:
        """Take the next JSON value.

        Raises:
            ValueError: it is broken, or longer than `MAX_ROW`.
            Twice: it holds a key twice; what comes behind it can be taken.
        """
        self._blanks()
        twice: Twice | None = None
        while True:
            try:
                value, end = decoder.raw_decode(self._text, self._at)
            except Twice as error:  # the row may go on behind the object that has it
                twice, decoder = error, json.JSONDecoder()
                continue
            except ValueError:
                if len(self._text) - self._at > MAX_ROW:
                    raise ValueError(f"the row is longer than {size(MAX_ROW)}, or not closed") from None
                if not self._fill():
                    raise
                continue
            if end == len(self._text) and self._fill():  # a number may go on in the next block
                continue
            self._at = end
            if twice is not None:
                raise twice
            return value


def read_csv(path: Path, name: str, columns: Columns) -> Iterator[Document | Problem]:
    """Yield the documents of a table with a heading."""
    return csv_items(path, name, maker(columns))


def csv_items(path: Path, name: str, make: Make[T]) -> Iterator[T | Problem]:
    """Yield what `make` makes of the rows of a table with a heading; the delimiter is a tab in `.tsv`, a comma
    elsewhere."""
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    number = 0
    csv.field_size_limit(MAX_ROW)
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            rows = csv.reader(file, delimiter=delimiter, strict=True)
            heading = next(rows, [])
            if len(set(heading)) != len(heading):
                twice = next(one for one in heading if heading.count(one) > 1)
                yield Problem(f'{path}: the column "{twice}" stands twice in the heading', "rename one of them")
                return
            for number, cells in enumerate(rows, start=1):
                if not cells:
                    continue
                place = f"{path}: row {number} (line {rows.line_num})"
                if len(cells) != len(heading):
                    yield Problem(
                        f"{place}: {len(cells)} cells, the heading has {len(heading)}",
                        f'put cells with commas or line ends into "quotes", {SKIP_HINT}',
                    )
                    continue
                if any("\0" in cell for cell in cells):
                    yield Problem(
                        f"{place}: a NUL character", f"the file is damaged or no text: write it again, {SKIP_HINT}"
                    )
                    continue
                item = make(dict(zip(heading, cells, strict=True)), f"{name}:{number}", place)
                if item is not None:
                    yield item
    except UnicodeDecodeError as error:
        where = f"{path}: row {number + 1} or a later one: invalid UTF-8 (0x{error.object[error.start]:02x})"
        yield Problem(f"{where}; {_NO_MORE}", "convert the file with `iconv -f OLD_ENCODING -t UTF-8`")
    except csv.Error as error:
        what = f"{path}: row {number + 1} (up to line {rows.line_num}): broken CSV: {error}; {_NO_MORE}"
        yield Problem(what, "mend the file from there on")
