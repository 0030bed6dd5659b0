"""From sources to documents, in bounded memory and in an order that depends on names alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Literal

from anabatic.config.shared import Data
from anabatic.core import log
from anabatic.core.errors import DataError
from anabatic.data import stdlib
from anabatic.data.document import Columns, Document, Form, Message, Problem, Skips, is_held_out
from anabatic.data.readers import reader_for
from anabatic.data.spec import Source, files, kind, named_files, parse, parse_all

__all__ = [
    "Document",
    "Skips",
    "Source",
    "documents",
    "documents_of",
    "files",
    "is_held_out",
    "kind",
    "parse",
    "parse_all",
]

Split = Literal["train", "test"]

_Items = Iterator["Document | Problem"]


def _read_files(source: Source, data: Data, split: Split, level_field: str) -> _Items:
    columns = Columns(data.text_column, tuple(sorted(data.columns.items())), level_field)
    for path, name in named_files(source):
        reader = reader_for(path)
        assert reader is not None  # named_files keeps only files that have one
        try:
            yield from reader(path, name, columns)
        except OSError as error:
            raise DataError(f"{path}: {error.strerror or error}", "look at its permissions and its disk") from error


def _read_task(source: Source, data: Data, split: Split, level_field: str) -> _Items:
    from anabatic.data import tasks

    name = source.path.partition(":")[2]
    return _numbered(source, tasks.documents(name, source.rows, split=split))


def _read_chat(source: Source, data: Data, split: Split, level_field: str) -> _Items:
    from anabatic.data import stdlib_chat

    return _numbered(source, stdlib_chat.conversations(source.rows))


def _numbered(source: Source, conversations: Iterator[list[Message]]) -> _Items:
    for row, messages in enumerate(conversations, start=1):
        yield Document(None, messages, f"{source.path}:{row}")


_READ: dict[str, Callable[[Source, Data, Split, str], _Items]] = {
    "file": _read_files,
    "folder": _read_files,
    "glob": _read_files,
    "stdlib": lambda *given: stdlib.sources(),
    "docs": lambda *given: stdlib.docs(),
    "task": _read_task,
    "chat": _read_chat,
}


def documents(
    source: Source, data: Data, *, split: Split = "train", skips: Skips | None = None, level_field: str = ""
) -> Iterator[Document]:
    """Yield a source's documents, in an order that depends only on the names of its files.

    Memory is bounded by one row, or one text file, at a time. Empty files, blank lines and empty texts hold
    no document.

    Args:
        source: what to read.
        data: names the text column and says what happens to a bad row.
        split: `train` or `test` rows of a generated task; other sources are the same for both.
        level_field: column of a file's rows that names their level of difficulty.
        skips: receives the rows passed over under `on_bad_row: skip`; they are also reported as a warning.

    Raises:
        DataError: a path, a file or (under `on_bad_row: fail`) a row cannot be used, or there is no
            document at all.
    """
    skips = Skips() if skips is None else skips
    skipped_before, found, form = skips.count, 0, Form()
    for item in _READ[kind(source)](source, data, split, level_field):
        if isinstance(item, Problem):
            item = item.after(form)
            if data.on_bad_row == "fail":
                item.fail()
            skips.add(item)
            continue
        found, form = found + 1, item.form
        yield item
        if found == source.rows:
            break
    _report(source, found, skips, skips.count - skipped_before)


def _report(source: Source, found: int, skips: Skips, skipped: int) -> None:
    first = f"; first: {skips.examples[0]}" if skipped else ""
    if not found:
        why = f"all {skipped:,} rows are bad{first}" if skipped else "its files hold no rows"
        raise DataError(f"{source.path}: no document: {why}", "give text, or rows with a text column or messages")
    if skipped:
        log.warn(f"{source.path}: passed over {skipped:,} bad rows of {found + skipped:,}{first}")
    if source.rows is not None and found < source.rows:
        log.warn(f"{source.path}: {source.rows:,} rows were asked for, it holds {found:,}")


def documents_of(sources: list[Source], data: Data) -> Iterator[Document]:
    """Chain the documents of several sources."""
    return chain.from_iterable(documents(source, data) for source in sources)
