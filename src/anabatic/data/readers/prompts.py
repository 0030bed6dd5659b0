"""Rows that ask for an answer: conversations, questions and texts, without what a row itself answers."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from anabatic.core import json_reader
from anabatic.core.errors import DataError
from anabatic.core.formatting import did_you_mean
from anabatic.data.chat.conversation_formats import extract_prompt
from anabatic.data.chat.turn_fields import BadRowError, check_json_values, require_encodable_text
from anabatic.data.readers import raw_rows, sources
from anabatic.data.readers.document import ColumnMapping, Message, RowIssue
from anabatic.data.readers.file_formats import iter_numbered_lines, open_lines, reject_duplicate_keys
from anabatic.data.readers.row_parsing import (
    format_column_names,
    get_nested,
    locate_media,
    rename_columns,
    require_object,
    take_pictures,
)
from anabatic.data.readers.row_use import find_unused
from anabatic.hub.dataset_name import is_dataset_spec

_LINE_EXTENSIONS = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".txt")
SUPPORTED_EXTENSIONS = (*_LINE_EXTENSIONS, ".json", ".csv", ".tsv", ".parquet")
_HINT = "fix the row, or skip such rows with --on-bad-row skip"
_PROMPT_COLUMNS = ("prompt", "query", "question", "instruction", "text")
_LABEL_COLUMNS = ("response", "output", "completion", "answer", "label")
_ANSWER_COLUMNS = ("answer", "solution", "ground_truth", "reward_model.ground_truth")
"""Columns with the right answer; the last one is verl's."""
_READ_COLUMNS = ("messages", "conversations", *_PROMPT_COLUMNS[:-1], "input", "system", "history", "tools")


@dataclass(frozen=True)
class PromptRow:
    """One row.

    Attributes:
        id: `file:line`, the file as it was named.
        messages: turns that an answer follows; None: `text` is to be continued.
        label: what the row itself answers.
        answer: what a right answer is: of a column that holds nothing else, or `label`.
        unused: columns with something in them that are none of these.
        row: as the file has it, columns renamed.
        pictures: paths and data URIs, in the order of the tags in the turns.
    """

    id: str
    messages: list[Message] | None
    text: str = ""
    tools: list[dict[str, Any]] | None = None
    label: str | None = None
    answer: str | None = None
    unused: tuple[str, ...] = ()
    row: dict[str, Any] = field(default_factory=dict)
    pictures: tuple[str, ...] = ()

    @property
    def location(self) -> str:
        """File and line for messages."""
        file, _, line = self.id.rpartition(":")
        return f"{file}: line {line}"


def read_prompts(
    files: list[str], columns: dict[str, str], media_folder: str | None = None
) -> Iterator[PromptRow | RowIssue]:
    """Yield the rows of files, or what is wrong with one, in bounded memory. Blank lines ask nothing.

    Args:
        files: paths, or names of data sets of a hub, whose files are downloaded when their turn comes.
        columns: our name of a column -> its name in the files.
        media_folder: where relative paths of pictures start, empty: the folder of the rows' file; None: rows with
            pictures are refused.

    Raises:
        DataError: a file is not there, cannot be read to its end, or has another format.
    """
    local = {file: _check_prompt_file(file) for file in files if not is_hub_file(file)}
    names = ColumnMapping("text", tuple(sorted(columns.items())), media_folder=media_folder)
    for file in files:
        if file in local:
            yield from _read_file(file, local[file], names)
        else:
            yield from _read_hub_rows(sources.parse_source(file), names)


def is_hub_file(file: str) -> bool:
    """Return whether a name is that of a data set on a hub, and not of a file here."""
    return is_dataset_spec(file) and not os.path.lexists(file)


def _read_hub_rows(source: sources.DataSource, columns: ColumnMapping) -> Iterator[PromptRow | RowIssue]:
    repo = sources.resolve_hub_source(source).name.repo_name
    files = sources.iter_named_files(source)
    rows = (row for path, name in files for row in _read_file(f"{repo}/{name}", path, columns))
    yield from islice(rows, source.rows)


def _read_file(file: str, path: Path, columns: ColumnMapping) -> Iterator[PromptRow | RowIssue]:
    columns = locate_media(columns, path)
    if path.name.lower().endswith(_LINE_EXTENSIONS):
        yield from _read_lines(file, path, columns)
        return
    read_rows = raw_rows.get_row_reader(path)
    assert read_rows is not None  # both lists have the same extensions
    try:
        yield from read_rows(path, file, partial(_build_row_or_issue, columns))
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}", "look at its permissions and its disk") from error


def _build_row_or_issue(columns: ColumnMapping, row: Any, name: str, place: str) -> PromptRow | RowIssue:
    try:
        check_json_values(row, "the row")
        return _build_prompt_row(row, name, columns)
    except BadRowError as error:
        return RowIssue(f"{place}: {error}", error.hint or _HINT)


def _read_lines(file: str, path: Path, columns: ColumnMapping) -> Iterator[PromptRow | RowIssue]:
    number = 0
    try:
        with closing(open_lines(path)) as stream:
            for number, _, line in iter_numbered_lines(stream):
                found = _parse_line(file, path, number, line, columns)
                if found is not None:
                    yield found
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read after line {number}: {error}", "write the file again") from error


def _check_prompt_file(file: str) -> Path:
    path = Path(file).expanduser()
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        near = did_you_mean(path.name, [one.name for one in path.parent.iterdir()]) if path.parent.is_dir() else ""
        raise DataError(f"{path} {what}.{near}", f"name files that end in {', '.join(SUPPORTED_EXTENSIONS)}")
    if not path.name.lower().endswith(SUPPORTED_EXTENSIONS):
        raise DataError(f"{path} has another format", f"name files that end in {', '.join(SUPPORTED_EXTENSIONS)}")
    return path


def _parse_line(
    file: str, path: Path, number: int, line: bytes | int, columns: ColumnMapping
) -> PromptRow | RowIssue | None:
    place = f"{path}: line {number}"
    if isinstance(line, int):
        return RowIssue(f"{place}: {line:,} bytes long", "split the row")
    try:
        text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        if not text.strip():
            return None
        if path.name.lower().endswith(".txt"):
            stripped = text.rstrip("\r\n")
            return PromptRow(f"{file}:{number}", [{"role": "user", "content": stripped}], stripped)
        return _build_prompt_row(json_reader.loads(text, reject_duplicate_keys), f"{file}:{number}", columns)
    except UnicodeDecodeError as error:
        return RowIssue(f"{place}: invalid UTF-8 at byte {error.start} of the line", _HINT)
    except BadRowError as error:
        return RowIssue(f"{place}: {error}", error.hint or _HINT)
    except ValueError as error:
        return RowIssue(f"{place}: broken JSON: {error}", f"write one JSON object a line; {_HINT}")


def _build_prompt_row(row: Any, name: str, columns: ColumnMapping) -> PromptRow:
    given = rename_columns(require_object(row), columns)
    row, pictures = take_pictures(given, columns, "--on-bad-row skip")
    label_column, label = _find_text(row, _LABEL_COLUMNS)
    answer_column, answer = _find_text(row, _ANSWER_COLUMNS)
    nested = [theirs.partition(".")[0] for _, theirs in columns.renamed_columns]
    labels = (answer_column.partition(".")[0] or label_column, *nested)
    prompt = extract_prompt(row)
    if prompt is None:
        text = row.get("text")
        if not isinstance(text, str) or not text:
            empty = next((key for key in _PROMPT_COLUMNS if row.get(key) == ""), None)
            if empty:
                raise BadRowError(f'column "{empty}" is empty: nothing is asked')
            raise BadRowError(
                f"nothing is asked: no messages, conversations, prompt, query, question, instruction or text;"
                f" the row has {format_column_names(row)}"
            )
        text = require_encodable_text(text, 'column "text"')
        unused = find_unused(row, ("text", *labels))
        return PromptRow(name, None, text, None, *_prefer_each(label, answer), unused, given)
    turns = prompt.messages
    if turns[-1]["role"] == "assistant":
        turns, label = turns[:-1], str(turns[-1]["content"])
        labels = (answer_column.partition(".")[0], *nested)
    if not turns or turns[-1]["role"] in ("system", "developer"):
        raise BadRowError("no user's turn comes before the answer")
    unused = find_unused(row, (*_READ_COLUMNS, *labels))
    return PromptRow(
        name, turns, str(turns[-1]["content"]), prompt.tools, *_prefer_each(label, answer), unused, given, pictures
    )


def _prefer_each(label: str | None, answer: str | None) -> tuple[str | None, str | None]:
    """Return both, each in place of the other that is not there."""
    return answer if label is None else label, label if answer is None else answer


def _find_text(row: dict[str, Any], columns: tuple[str, ...]) -> tuple[str, str | None]:
    """Return the first column with a text or a number in it, and that; none: an empty name."""
    for name in columns:
        with suppress(LookupError):
            if (text := _label_as_text(get_nested(row, name))) is not None:
                return name, text
    return "", None


def _label_as_text(value: Any) -> str | None:
    """Return a text, or a number as one."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    return value if isinstance(value, str) else None
