"""Rows of JSON, JSON lines, CSV and Parquet files: text or conversation, and is it well formed?"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from anabatic.core import json_reader
from anabatic.core.formatting import did_you_mean, parse_whole
from anabatic.data.chat import conversation_formats
from anabatic.data.chat.conversation_formats import FORMATS, ConversationFormat, detect_format
from anabatic.data.chat.turn_fields import BadRowError, json_type_name, require_encodable_text, require_turn_order
from anabatic.data.readers.document import SKIP_HINT, ColumnMapping, Document, RowFormat, RowIssue
from anabatic.data.readers.row_use import find_unused, find_unused_keys, require_names_put_in

_CONVERSATION_HINT = 'a conversation needs "messages": [{"role": "user", "content": "..."}, ...]'


def row_to_document(
    row: Any, doc_id: str, place: str, columns: ColumnMapping, unread: tuple[str, ...] = ()
) -> Document | RowIssue | None:
    """Return a row as text or conversation, `None` when its text is empty, or what is wrong with it.

    The text column wins over conversations, but for `messages`.

    Args:
        row: the parsed row.
        doc_id: id of the document.
        place: file and line, as it appears in messages.
        columns: which column holds what.
        unread: columns of the file that the row is without, because nothing reads them.
    """
    try:
        row = require_object(row)
        row = rename_columns(row, columns)
        form = detect_format(row)
        if columns.text_column in row and (form is None or row.get("messages") is None):
            reject_media(row, "--data.on-bad-row skip")
            unused = (*find_unused(row, (columns.text_column, *_other_used_columns(columns))), *unread)
            return _text_to_document(row[columns.text_column], doc_id, place, columns, unused)
        if form is not None:
            turns_row, pictures = take_pictures(row, columns, "--data.on-bad-row skip")
            document = form.parse_row(turns_row)
            for turns in (document.messages, document.rejected or []):
                require_turn_order(turns)
                require_names_put_in(turns)
            level = _read_level(row, columns)
            used = (*form.required_columns, *form.optional_columns, *_other_used_columns(columns))
            label = read_label(row)
            unused = find_unused(row, used if label is None else (*used, *_LABEL_COLUMNS))
            of_turns = find_unused_keys([*document.messages, *(document.rejected or ())])
            row_format = _describe_row_format(form, tuple(row), columns, (*unused, *of_turns, *unread))
            return Document(
                None,
                document.messages,
                doc_id,
                document.tools,
                document.rejected,
                level,
                row_format,
                place,
                label,
                pictures,
            )
    except BadRowError as error:
        return RowIssue(
            f"{place}: {error}",
            error.hint or f"fix the row, or skip such rows with --data.on-bad-row skip; {_CONVERSATION_HINT}",
        )
    what = f"{place}: {describe_missing_columns(columns, row)}; the row has {format_column_names(row)}"
    partial_formats, _ = _find_partial_formats(row)
    return RowIssue(what, hint_missing_columns(columns, row), "" if partial_formats else place, tuple(row))


def locate_media(columns: ColumnMapping, path: Path) -> ColumnMapping:
    """Return the mapping for a file of rows, whose pictures are next to it unless they have a folder."""
    return replace(columns, media_folder=str(path.absolute().parent)) if columns.media_folder == "" else columns


def take_pictures(row: dict[str, Any], columns: ColumnMapping, skip: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the row with tags in place of its pictures, and the pictures.

    Args:
        skip: the setting that skips rows with pictures.

    Raises:
        BadRowError: it has pictures or videos, and the job reads none; or sound.
    """
    if columns.media_folder is None:
        reject_media(row, skip)
        return row, ()
    from anabatic.data.vision import row_pictures

    return row_pictures.take_pictures(row, columns.media_folder)


def _read_level(row: dict[str, Any], columns: ColumnMapping) -> str:
    value = row.get(columns.level_column) if columns.level_column else None
    if value is not None and not isinstance(value, (str, int)):
        raise BadRowError(f'column "{columns.level_column}" is {json_type_name(value)}, not the name of a level')
    return "" if value is None else require_encodable_text(str(value), f'column "{columns.level_column}"')


def require_object(row: Any) -> dict[str, Any]:
    """Return a row as an object; a list of turns is a conversation.

    Raises:
        BadRowError: it is neither.
    """
    if conversation_formats.is_list_of_turns(row):
        return {"messages": row}
    if not isinstance(row, dict):
        raise BadRowError(f"the row is {json_type_name(row)}, not an object")
    return row


_LABEL_COLUMNS = ("label", "kto_tag")
"""Columns that mark a single answer as good or bad, of TRL and ms-swift, and of LLaMA-Factory."""
_LABEL_WORDS = {"true": True, "false": False}


def read_label(row: Mapping[str, Any]) -> bool | None:
    """Return whether the row says that its answer is a good one; None: it does not say. Tables have it as a word."""
    for name in _LABEL_COLUMNS:
        value = row.get(name)
        label = _LABEL_WORDS.get(value.strip().lower()) if isinstance(value, str) else value
        if isinstance(label, bool):
            return label
        if name == "kto_tag" and label in (0, 1) and isinstance(label, (int, float)):
            return bool(label)
    return None


def _other_used_columns(columns: ColumnMapping) -> tuple[str, ...]:
    """Return what is read beside a format: the level, and what `data.columns` takes a part of."""
    nested = (name.partition(".")[0] for _, name in columns.renamed_columns)
    read = conversation_formats.MEDIA_COLUMNS if columns.media_folder is None else conversation_formats.SEEING_COLUMNS
    return (columns.level_column, *read, *nested)


def reject_media(row: Mapping[str, Any], skip: str = "") -> None:
    """Refuse a row with pictures, video or sound.

    Args:
        skip: the setting that passes over such rows, if there is one.

    Raises:
        BadRowError: it has such a column, and something in it.
    """
    if name := conversation_formats.find_media_column(row):
        hint = (
            f"{conversation_formats.TEXT_ONLY_HINT}, or pass over the others with {skip}"
            if skip
            else conversation_formats.TEXT_ONLY_HINT
        )
        raise BadRowError(f'column "{name}" holds pictures, video or sound, which are not supported', hint)


def rename_columns(row: dict[str, Any], columns: ColumnMapping) -> dict[str, Any]:
    """Return a row under the names that the formats know.

    Raises:
        BadRowError: a column that `data.columns` names is not there.
    """
    if not columns.renamed_columns:
        return row
    found = {}
    for standard_name, file_name in columns.renamed_columns:
        try:
            found[standard_name] = get_nested(row, file_name)
        except LookupError:
            raise BadRowError(
                f'no column "{file_name}", which data.columns.{standard_name} names; the row has'
                f" {format_column_names(row)}"
                f"{did_you_mean(file_name, row)}"
            ) from None
    taken = {file_name for _, file_name in columns.renamed_columns}
    return {**{key: value for key, value in row.items() if key not in taken}, **found}


def get_nested(row: Mapping[str, Any], name: str) -> Any:
    """Return the value of a column, or of a name in it: `reward_model.ground_truth`, `answers.text.0`.

    Raises:
        LookupError: there is none.
    """
    if name in row or "." not in name:
        return row[name]
    value: Any = row
    for part in name.split("."):
        if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):  # tables have it as JSON
            try:
                value = json_reader.loads(value)
            except ValueError:
                raise KeyError(name) from None
        if isinstance(value, list) and (place := parse_whole(part)) is not None:
            value = value[place]
        elif isinstance(value, Mapping):
            value = value[part]
        else:
            raise KeyError(name)
    return value


def file_column(name: str, columns: Collection[str]) -> str:
    """Return the column of a file in which a name of `data.columns` lies."""
    return name if name in columns else name.partition(".")[0]


@functools.lru_cache(maxsize=256)
def _describe_row_format(
    form: ConversationFormat | None,
    columns: tuple[str, ...],
    settings: ColumnMapping,
    unused: tuple[str, ...] = (),
) -> RowFormat:
    """Describe rows with these columns (under our names); without a format they are plain text."""
    wanted_columns = (settings.text_column,) if form is None else (*form.required_columns, *form.optional_columns)
    file_name = dict(settings.renamed_columns)
    used = (f"{name}={file_name[name]}" if name in file_name else name for name in columns if name in wanted_columns)
    return RowFormat("plain text" if form is None else form.name, tuple(used), unused)


def detect_format_name(columns: list[str], settings: ColumnMapping) -> str:
    """Return the format of a table with these columns; empty: none that is known."""
    names = [one for one, file_name in settings.renamed_columns if file_column(file_name, columns) in columns]
    known = [*names, *(name for name in columns if name not in dict(settings.renamed_columns).values())]
    form = detect_format(known)
    if settings.text_column in known and (form is None or "messages" not in known):
        return "plain text"
    return form.name if form else ""


def select_needed_columns(columns: list[str], settings: ColumnMapping) -> list[str]:
    """Return the columns of a table that reading its rows takes."""
    wanted_columns = {
        *_LABEL_COLUMNS,
        settings.text_column,
        settings.level_column,
        *conversation_formats.SEEING_COLUMNS,
        *(name for form in FORMATS for name in (*form.required_columns, *form.optional_columns)),
    }
    renamed = {file_column(theirs, columns) for ours, theirs in settings.renamed_columns if ours in wanted_columns}
    moved = {theirs for _, theirs in settings.renamed_columns}
    return [name for name in columns if name in renamed or (name in wanted_columns and name not in moved)]


def describe_missing_columns(columns: ColumnMapping, present: Mapping[str, Any] | list[str]) -> str:
    """Return what is missing when neither the text column nor a whole conversation is there."""
    partial_formats, absent = _find_partial_formats(present)
    if not absent:
        return f'no column "{columns.text_column}"'
    return f"no column {_join_with_or(absent)}, which goes with {_join_with_or(partial_formats)}"


def hint_missing_columns(columns: ColumnMapping, present: Mapping[str, Any] | list[str]) -> str:
    """Return what to do about it."""
    _, absent = _find_partial_formats(present)
    known = {
        columns.text_column,
        *(name for form in FORMATS for name in (*form.required_columns, *form.optional_columns)),
    }
    unknown_name = next(
        (standard_name for standard_name, _ in columns.renamed_columns if standard_name not in known), None
    )
    if unknown_name is not None:
        guess = did_you_mean(unknown_name, known)
        ours = ", ".join(sorted(known))
        return f'data.columns is OUR_NAME=NAME, and none of ours is "{unknown_name}".{guess} Ours: {ours}'
    if absent:
        return f"if it is called otherwise: --data.columns {absent[0]}=NAME; or fix the row, {SKIP_HINT}"
    nearest = did_you_mean(columns.text_column, present)
    return (
        f"name the column of the text with --data.text-column NAME.{nearest} Columns of conversations that are called"
        f" otherwise: --data.columns query=NAME response=NAME. Otherwise: {_CONVERSATION_HINT}"
    )


def _find_partial_formats(present: Mapping[str, Any] | list[str]) -> tuple[list[str], list[str]]:
    """Return the columns of formats that are there in part, and those that would make them whole."""
    partly = [form for form in FORMATS if any(name in present for name in form.required_columns)]
    partial_formats = dict.fromkeys(name for form in partly for name in form.required_columns if name in present)
    absent = dict.fromkeys(name for form in partly for name in form.required_columns if name not in present)
    return list(partial_formats), list(absent)


def _join_with_or(names: list[str]) -> str:
    return " or ".join(f'"{name}"' for name in names)


def format_column_names(columns: Mapping[str, Any] | list[str]) -> str:
    """Return column names for a message, at most twelve."""
    names = [f'"{name}"' for name in columns]
    if not names:
        return "no columns"
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")


def _text_to_document(
    value: Any, doc_id: str, place: str, columns: ColumnMapping, unused: tuple[str, ...]
) -> Document | None:
    column = columns.text_column
    if not isinstance(value, str):
        raise BadRowError(f'column "{column}" is {json_type_name(value)}, not text')
    form = _describe_row_format(None, (column,), columns, unused)
    return (
        Document(require_encodable_text(value, column), None, doc_id, row_format=form, source_location=place)
        if value
        else None
    )
