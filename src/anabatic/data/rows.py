"""Rows of JSON, JSON lines, CSV and Parquet files: text or conversation, and is it well formed?"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from anabatic.core.text import did_you_mean
from anabatic.data import media
from anabatic.data.document import SKIP_HINT, Columns, Document, Form, Problem
from anabatic.data.formats import FORMATS, Format, find
from anabatic.data.turn_fields import BadRow, encodable, kind_of
from anabatic.data.turn_order import require_order

_SHAPE = 'a conversation needs "messages": [{"role": "user", "content": "..."}, ...]'


def to_document(row: Any, doc_id: str, place: str, columns: Columns) -> Document | Problem | None:
    """Return a row as text or conversation, `None` when its text is empty, or what is wrong with it.

    The text column wins over conversations, but for `messages`.

    Args:
        row: the parsed row.
        doc_id: id of the document.
        place: file and line, as it appears in messages.
        columns: which column holds what.
    """
    try:
        if not isinstance(row, dict):
            raise BadRow(f"the row is {kind_of(row)}, not an object")
        row = renamed(row, columns)
        form = find(row)
        if columns.text in row and (form is None or row.get("messages") is None):
            no_media(row, "data.on_bad_row: skip")
            return _text(row[columns.text], doc_id, place, columns)
        if form is not None:
            no_media(row, "data.on_bad_row: skip")
            made = form.read(row)
            for turns in (made.messages, made.rejected or []):
                require_order(turns)
            level = _level(row, columns)
            told = _form(form, tuple(row), columns)
            return Document(None, made.messages, doc_id, made.tools, made.rejected, level, told, place, _label(row))
    except BadRow as error:
        return Problem(
            f"{place}: {error}",
            error.hint or f"mend the row, or pass over such rows with data.on_bad_row: skip; {_SHAPE}",
        )
    what = f"{place}: {missing(columns, row)}; the row has {listed(row)}"
    begun, _ = _begun(row)
    return Problem(what, missing_hint(columns, row), "" if begun else place, tuple(row))


def _level(row: dict[str, Any], columns: Columns) -> str:
    value = row.get(columns.level) if columns.level else None
    if value is not None and not isinstance(value, (str, int)):
        raise BadRow(f'column "{columns.level}" is {kind_of(value)}, not the name of a level')
    return "" if value is None else encodable(str(value), f'column "{columns.level}"')


def _label(row: dict[str, Any]) -> bool | None:
    """`label` as TRL and ms-swift have it, `kto_tag` as LLaMA-Factory."""
    found = [row[name] for name in ("label", "kto_tag") if isinstance(row.get(name), bool)]
    return found[0] if found else None


def no_media(row: Mapping[str, Any], skip: str = "") -> None:
    """Refuse a row with pictures, video or sound.

    Args:
        skip: the setting that passes over such rows, if there is one.

    Raises:
        BadRow: it has such a column, and something in it.
    """
    if name := media.column(row):
        hint = f"{media.HINT}, or pass over the others with {skip}" if skip else media.HINT
        raise BadRow(f'column "{name}" holds pictures, video or sound, which are not supported', hint)


def renamed(row: dict[str, Any], columns: Columns) -> dict[str, Any]:
    """Return a row under the names that the formats know.

    Raises:
        BadRow: a column that `data.columns` names is not there.
    """
    if not columns.names:
        return row
    for ours, theirs in columns.names:
        if theirs not in row:
            raise BadRow(
                f'no column "{theirs}", which data.columns.{ours} names; the row has {listed(row)}'
                f"{did_you_mean(theirs, row)}"
            )
    taken = {theirs for _, theirs in columns.names}
    rest = {key: value for key, value in row.items() if key not in taken}
    return {**rest, **{ours: row[theirs] for ours, theirs in columns.names}}


@functools.lru_cache(maxsize=256)
def _form(form: Format | None, columns: tuple[str, ...], settings: Columns) -> Form:
    """What is said of rows with these columns (under our names); without a format they are plain text."""
    wanted = (settings.text,) if form is None else (*form.needs, *form.takes)
    theirs = dict(settings.names)
    used = (f"{name}={theirs[name]}" if name in theirs else name for name in columns if name in wanted)
    return Form("plain text" if form is None else form.name, tuple(used))


def format_name(columns: list[str], settings: Columns) -> str:
    """Return the format of a table with these columns; empty: none that is known."""
    names = [ours for ours, theirs in settings.names if theirs in columns]
    known = [*names, *(name for name in columns if name not in dict(settings.names).values())]
    form = find(known)
    if settings.text in known and (form is None or "messages" not in known):
        return "plain text"
    return form.name if form else ""


def needed(columns: list[str], settings: Columns) -> list[str]:
    """Return the columns of a table that reading its rows takes."""
    ours = {theirs: ours for ours, theirs in settings.names}
    wanted = {
        settings.text,
        settings.level,
        *media.COLUMNS,
        *(name for form in FORMATS for name in (*form.needs, *form.takes)),
    }
    return [name for name in columns if ours.get(name, name) in wanted]


def missing(columns: Columns, there: Mapping[str, Any] | list[str]) -> str:
    """Return what is missing when neither the text column nor a whole conversation is there."""
    begun, absent = _begun(there)
    if not absent:
        return f'no column "{columns.text}"'
    return f"no column {_either(absent)}, which goes with {_either(begun)}"


def missing_hint(columns: Columns, there: Mapping[str, Any] | list[str]) -> str:
    """Return what to do about it."""
    _, absent = _begun(there)
    known = {columns.text, *(name for form in FORMATS for name in (*form.needs, *form.takes))}
    strange = next((ours for ours, _ in columns.names if ours not in known), None)
    if strange is not None:
        guess = did_you_mean(strange, known)
        return (
            f'data.columns is OUR_NAME=NAME, and none of ours is "{strange}".{guess} Ours: {", ".join(sorted(known))}'
        )
    if absent:
        return f"if it is called otherwise: --data.columns {absent[0]}=NAME; or mend the row, {SKIP_HINT}"
    nearest = did_you_mean(columns.text, there)
    return (
        f"name the column of the text with --data.text-column NAME.{nearest} Columns of conversations that are called"
        f" otherwise: --data.columns query=NAME response=NAME. Otherwise: {_SHAPE}"
    )


def _begun(there: Mapping[str, Any] | list[str]) -> tuple[list[str], list[str]]:
    """Return the columns of formats that are there in part, and those that would make them whole."""
    partly = [form for form in FORMATS if any(name in there for name in form.needs)]
    begun = dict.fromkeys(name for form in partly for name in form.needs if name in there)
    absent = dict.fromkeys(name for form in partly for name in form.needs if name not in there)
    return list(begun), list(absent)


def _either(names: list[str]) -> str:
    return " or ".join(f'"{name}"' for name in names)


def listed(columns: Mapping[str, Any] | list[str]) -> str:
    """Return column names for a message, at most twelve."""
    names = [f'"{name}"' for name in columns]
    if not names:
        return "no columns"
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")


def _text(value: Any, doc_id: str, place: str, columns: Columns) -> Document | None:
    column = columns.text
    if not isinstance(value, str):
        raise BadRow(f'column "{column}" is {kind_of(value)}, not text')
    form = _form(None, (column,), columns)
    return Document(encodable(value, column), None, doc_id, form=form, at=place) if value else None
