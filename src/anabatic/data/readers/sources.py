"""From sources to documents, in bounded memory and in an order that depends on names alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Literal

from anabatic.config.sections.common import Data
from anabatic.core import log
from anabatic.core.errors import DataError
from anabatic.data.builtin import stdlib
from anabatic.data.readers.document import (
    ColumnMapping,
    Document,
    Message,
    RowFormat,
    RowIssue,
    SkippedRows,
    is_held_out,
)
from anabatic.data.readers.source_spec import (
    DataSource,
    list_named_files,
    list_source_files,
    parse_source,
    parse_sources,
    source_kind,
)
from anabatic.data.readers.text_and_jsonl import get_reader

__all__ = [
    "Document",
    "SkippedRows",
    "DataSource",
    "read_documents",
    "chain_documents",
    "list_source_files",
    "is_held_out",
    "source_kind",
    "parse_source",
    "parse_sources",
]

Split = Literal["train", "test"]

_DocumentItems = Iterator["Document | RowIssue"]


def _read_files(source: DataSource, data: Data, split: Split, level_field: str) -> _DocumentItems:
    columns = ColumnMapping(data.text_column, tuple(sorted(data.columns.items())), level_field)
    for path, name in list_named_files(source):
        reader = get_reader(path)
        assert reader is not None  # named_files keeps only files that have one
        try:
            yield from reader(path, name, columns)
        except OSError as error:
            raise DataError(f"{path}: {error.strerror or error}", "look at its permissions and its disk") from error


def _read_task(source: DataSource, data: Data, split: Split, level_field: str) -> _DocumentItems:
    from anabatic.data.builtin import synthetic_tasks

    name = source.path.partition(":")[2]
    return _number_conversations(source, synthetic_tasks.generate_task_conversations(name, source.rows, split=split))


def _read_stdlib_chat(source: DataSource, data: Data, split: Split, level_field: str) -> _DocumentItems:
    from anabatic.data.builtin import stdlib_chat

    return _number_conversations(source, stdlib_chat.generate_conversations(source.rows))


def _number_conversations(source: DataSource, conversations: Iterator[list[Message]]) -> _DocumentItems:
    for row, messages in enumerate(conversations, start=1):
        yield Document(None, messages, f"{source.path}:{row}")


_SOURCE_READERS: dict[str, Callable[[DataSource, Data, Split, str], _DocumentItems]] = {
    "file": _read_files,
    "folder": _read_files,
    "glob": _read_files,
    "stdlib": lambda *given: stdlib.read_source_documents(),
    "docs": lambda *given: stdlib.read_doc_documents(),
    "task": _read_task,
    "chat": _read_stdlib_chat,
}


def read_documents(
    source: DataSource, data: Data, *, split: Split = "train", skips: SkippedRows | None = None, level_field: str = ""
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
    skips = SkippedRows() if skips is None else skips
    skipped_before, found, form = skips.count, 0, RowFormat()
    for item in _SOURCE_READERS[source_kind(source)](source, data, split, level_field):
        if isinstance(item, RowIssue):
            item = item.explain_against_format(form)
            if data.on_bad_row == "fail":
                item.raise_error()
            skips.record_issue(item)
            continue
        found, form = found + 1, item.row_format
        yield item
        if found == source.rows:
            break
    _report_skipped(source, found, skips, skips.count - skipped_before)


def _report_skipped(source: DataSource, found: int, skips: SkippedRows, skipped: int) -> None:
    first = f"; first: {skips.examples[0]}" if skipped else ""
    if not found:
        reason = f"all {skipped:,} rows are bad{first}" if skipped else "its files hold no rows"
        raise DataError(f"{source.path}: no document: {reason}", "give text, or rows with a text column or messages")
    if skipped:
        log.warn(f"{source.path}: passed over {skipped:,} bad rows of {found + skipped:,}{first}")
    if source.rows is not None and found < source.rows:
        log.warn(f"{source.path}: {source.rows:,} rows were asked for, it holds {found:,}")


def chain_documents(sources: list[DataSource], data: Data) -> Iterator[Document]:
    """Chain the documents of several sources."""
    return chain.from_iterable(read_documents(source, data) for source in sources)
