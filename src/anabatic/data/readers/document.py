"""Output of every reader: a document, or an issue with a row."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

from anabatic.core.errors import DataError

Message = dict[str, Any]
"""One turn: `role` and `content`; an assistant's `tool_calls` and `reasoning_content` where there are any."""

MAX_ROW_BYTES = 64 * 2**20
"""Longest row in bytes."""

_JSONL_NAME = re.compile(r"\.jsonl(\.gz|\.zst)?$", re.IGNORECASE)

SKIP_HINT = "or skip such rows with --data.on-bad-row skip"


class FilePiece(NamedTuple):
    """A range of a file.

    Attributes:
        start: first byte, or first row group of a Parquet file.
        stop: the byte or row group behind the last one; None: the file is read to its end.
        first_row: rows (lines) before the piece.
    """

    start: int = 0
    stop: int | None = None
    first_row: int = 0


WHOLE_FILE = FilePiece()


class RowFormat(NamedTuple):
    """Detected format of a row: the name of the format and the columns that were read.

    A column that has another name in the file stands as `ours=theirs`. `unused` are columns with something in them
    that nothing reads, and keys of turns as `messages[].KEY`; without metadata (`row_use`).
    """

    name: str = ""
    columns: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()


@dataclass(frozen=True)
class Document:
    """One unit of text or one conversation; exactly one of `text` and `messages` is set.

    Attributes:
        text: plain text, valid UTF-8 once encoded, never empty.
        messages: the turns of a conversation.
        id: stable name `file:row` (row counted from 1, file relative to its source); decides whether it is
            held out.
        tools: JSON schemas of the functions a conversation may call.
        level: difficulty, where a column for it was asked for; empty: the row has none.
        rejected: of a preference pair, the conversation with the worse answer; `messages` has the better one.
        label: whether a single answer is a good one, where the row says so.
        pictures: paths and data URIs, in the order of the tags in the turns.
        row_format: what the row was taken for; without a name: it was not a row of a file.
        source_location: file (with the path that was read) and row, for messages; empty: `id` says it.
    """

    text: str | None
    messages: list[Message] | None
    id: str
    tools: list[dict[str, Any]] | None = None
    rejected: list[Message] | None = None
    level: str = ""
    row_format: RowFormat = RowFormat()
    source_location: str = field(default="", compare=False)
    label: bool | None = None
    pictures: tuple[str, ...] = ()

    @property
    def location(self) -> str:
        """File and row for messages: `data/chats.json: row 17`, `data/chats.jsonl: line 17`."""
        if self.source_location:
            return self.source_location
        file, _, row = self.id.rpartition(":")
        return f"{file}: {'line' if _JSONL_NAME.search(file) else 'row'} {row}"


@dataclass(frozen=True)
class ColumnMapping:
    """Columns of a file and their meaning.

    Attributes:
        text_column: the plain text.
        renamed_columns: (our name, the file's name) of columns that are called otherwise there.
        level_column: the difficulty; empty: it is not read.
        media_folder: where relative paths of pictures start; None: rows with pictures are refused.
    """

    text_column: str = "text"
    renamed_columns: tuple[tuple[str, str], ...] = ()
    level_column: str = ""
    media_folder: str | None = None


@dataclass(frozen=True)
class RowIssue:
    """A row (or the rest of a file) that cannot be used. `message` names file, line and numbers.

    Attributes:
        location: file and row, of a row without a column of any format.
        columns: what such a row has.
    """

    message: str
    hint: str
    location: str = ""
    columns: tuple[str, ...] = ()

    def explain_against_format(self, form: RowFormat) -> RowIssue:
        """Return the problem as one of a row among others that were taken for `form`."""
        required = [column.rpartition("=")[2] for column in form.columns]
        missing = [f'"{column}"' for column in required if column not in self.columns]
        if not self.location or not missing or form.name == "plain text":
            return self
        present = ", ".join(f'"{column}"' for column in self.columns[:12]) or "no columns"
        what = f"{self.location}: no column {', '.join(missing)}, which the rows before have; the row has {present}"
        return RowIssue(what, f"fix the row, {SKIP_HINT}")

    def raise_error(self) -> NoReturn:
        """Raise the problem as `DataError`."""
        raise DataError(self.message, self.hint)


@dataclass
class SkippedRows:
    """Rows that were skipped under `on_bad_row: skip`.

    Attributes:
        count: how many.
        examples: messages of the first few.
        hint: of the first one.
        quiet: no warning is logged for them.
    """

    count: int = 0
    examples: list[str] = field(default_factory=list)
    hint: str = ""
    quiet: bool = False

    def record_issue(self, problem: RowIssue) -> None:
        """Count one; the first three messages are kept."""
        self.hint = self.hint or problem.hint
        self.count += 1
        if len(self.examples) < 3:
            self.examples.append(problem.message)

    def add(self, other: SkippedRows) -> None:
        """Add what was skipped in the rows behind."""
        self.count += other.count
        self.hint = self.hint or other.hint
        self.examples = (self.examples + other.examples)[:3]


def hash_id(row_id: str) -> bytes:
    """Return the BLAKE2b hash (64 bits) of the id of a row or a document: what is held out depends on it alone."""
    return hashlib.blake2b(row_id.encode("utf-8", "surrogateescape"), digest_size=8).digest()


def is_held_out(doc_id: str, fraction: float) -> bool:
    """Return True for a document of the held-out share; depends on nothing but its id.

    The id's BLAKE2b hash (64 bits) is compared with `fraction` of the hash's range, so that a larger fraction
    holds out a superset and adding files moves no other document.
    """
    return int.from_bytes(hash_id(doc_id), "big") < fraction * 2.0**64
