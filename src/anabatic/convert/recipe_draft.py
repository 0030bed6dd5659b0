"""Arguments of a command, row by row of the tables, as settings of ours and as notes."""

from __future__ import annotations

import re
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from anabatic.config.loading import command_table, validation
from anabatic.convert import peer_tables
from anabatic.convert.command_finder import SHARED_NAMES, PeerCommand, PeerOption
from anabatic.core import json_reader
from anabatic.core.errors import ConfigError
from anabatic.core.formatting import did_you_mean

_EMPTY_VALUES = ("", "false", "none", "null", "0", "no", "[]", "{}")
_BOOLEANS = {"true": True, "yes": True, "1": True, "on": True, "false": False, "no": False, "0": False, "off": False}
_BOOLEAN_WORDS = {
    "yes": "true",
    "on": "true",
    "y": "true",
    "t": "true",
    "no": "false",
    "off": "false",
    "n": "false",
    "f": "false",
}
"""What transformers' argument parser and YAML take for true and false, beside these."""


@dataclass
class SettingValue:
    """A setting of ours, and where its value comes from."""

    value: Any
    origin: str


@dataclass
class ConversionNotes:
    """What is to be told beside the recipe.

    Attributes:
        changed: a value that means something else here, or is not carried over.
        lost: what has no counterpart.
        needless: what is so here anyway, or is said in another place.
        unknown: what the tables do not know.
    """

    changed: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    needless: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


@dataclass
class RecipeDraft:
    """A recipe in the making."""

    call: PeerCommand
    command: str
    settings: dict[str, SettingValue] = field(default_factory=dict)
    gathered: dict[str, PeerOption] = field(default_factory=dict)
    notes: ConversionNotes = field(default_factory=ConversionNotes)
    placeholders: dict[str, Any] = field(default_factory=dict)
    """Settings that nobody has given and a job cannot do without -> what stands in their place."""
    launch_options: list[str] = field(default_factory=list)
    """Words of `anabatic launch`, for several machines."""
    unknown_keys: list[str] = field(default_factory=list)
    """Keys of a file that a program has written, which the tables do not know."""
    variables: list[str] = field(default_factory=list)
    """Variables that are given here as there."""

    def setting_type(self, key: str) -> Any:
        """Return the type of a setting, None where the command does not have it."""
        return dict(validation.iter_settings(command_table.COMMANDS.find_row(self.command).import_job_class())).get(key)

    def first_setting(self, row: peer_tables.MappingRow) -> str:
        """Return the first setting of a row that the command has."""
        return next((key for key in row.ours if self.setting_type(key) is not None), "")

    def set_setting(self, key: str, value: Any, origin: str) -> None:
        """Set a value, checked as one of a recipe is.

        Raises:
            ConfigError: it is of another type.
        """
        self.settings[key] = SettingValue(convert_to_type(value, self.setting_type(key), origin), origin)

    def gathered_value(self, name: str) -> Any:
        """Return a gathered value, None where there is none."""
        return self.gathered[name].value if name in self.gathered else None

    def gathered_int(self, name: str, minimum: int = 1) -> int | None:
        """Return a gathered whole number.

        Raises:
            ConfigError: it is none, or less than `minimum`.
        """
        if name not in self.gathered:
            return None
        one = self.gathered[name]
        value: int = convert_to_type(one.value, int, one.original_text)
        if value < minimum:
            raise ConfigError(
                f"{one.original_text}: {value} is less than {minimum}", f"give a whole number from {minimum}"
            )
        return value


def make_draft(call: PeerCommand, command: str) -> RecipeDraft:
    """Return what a call says, with what its program does where nothing is said.

    Raises:
        ConfigError: a value is of the wrong type.
    """
    draft = RecipeDraft(call, command)
    rows = _rows_by_name(call.peer, command)
    noted: set[str] = set()
    given = {one.name or one.original_text: one for one in call.options}
    for option in given.values():
        if _is_repeated(option, rows, given):
            continue
        if apply_option(draft, rows, option):
            noted.update(rows[option.name].theirs)
    if draft.unknown_keys:
        draft.notes.unknown.append(f"{len(draft.unknown_keys)} keys: {', '.join(draft.unknown_keys)}")
    if draft.gathered_value("kind") == "ppo":
        about = "its critic and reward model have no place here; answers are compared with each other, see rewards"
        draft.notes.changed.append(f"{draft.gathered['kind'].original_text}: {about}")
    if (kind := draft.gathered_value("kind")) in ("kto", "orpo", "simpo") and "loss_type" not in draft.settings:
        draft.set_setting("loss_type", kind, draft.gathered["kind"].original_text)
    for key, value in call.row.sets.items():
        if key not in draft.settings and draft.setting_type(key) is not None:
            draft.set_setting(key, value, f"for {call.peer_name}")
    title = peer_tables.load_tables(call.peer).title
    for default in peer_tables.load_tables(call.peer).defaults:
        tuner = draft.settings.get("tuner")
        fits = not default.tuner or (tuner is not None and tuner.value == default.tuner)
        fits = fits and not noted.intersection(default.unless)
        if default.name not in noted and fits and (not default.only or command in default.only):
            _apply_row(
                draft,
                rows[default.name],
                PeerOption(default.name, default.value, f"{title}'s {default.name} {_normalize_text(default.value)}"),
            )
    return draft


def _is_repeated(
    option: PeerOption, rows: Mapping[str, peer_tables.MappingRow], given: Mapping[str, PeerOption]
) -> bool:
    """True for a variable whose value only the shell knows, where an option says the same."""
    row = rows.get(option.name)
    if row is None or not option.name.isupper() or not _has_shell_expansion(option.value):
        return False
    return any(name in given for name in row.theirs if name != option.name)


def apply_option(draft: RecipeDraft, rows: Mapping[str, peer_tables.MappingRow], option: PeerOption) -> bool:
    """Take one option; False where no row knows it, or its value means "not given".

    Raises:
        ConfigError: the value is of the wrong type.
    """
    row = rows.get(option.name)
    if row is None:
        _note_unknown_option(draft, option, rows)
        return False
    if _normalize_word(option.value, row.skip) in row.skip or option.value is None:
        return False
    _apply_row(draft, row, option)
    return True


def _rows_by_name(peer: str, command: str) -> dict[str, peer_tables.MappingRow]:
    """Return name -> row; the program's own rows, and those for this command, come first."""
    files = [name for name in ("launch", SHARED_NAMES[peer], peer) if name]
    rows: dict[str, peer_tables.MappingRow] = {}
    for chosen in (False, True):
        for file in files:
            for table, some in peer_tables.load_tables(file).tables.items():
                fitting = (row for row in some if table != "commands" and bool(row.only) is chosen)
                rows |= {name: row for row in fitting if not row.only or command in row.only for name in row.theirs}
    return rows


def _note_unknown_option(draft: RecipeDraft, option: PeerOption, rows: Mapping[str, peer_tables.MappingRow]) -> None:
    if option.name.isupper():
        return  # a variable of the script's own
    if draft.call.is_machine_written:
        draft.unknown_keys += [option.name] if _normalize_text(option.value) not in _EMPTY_VALUES else []
        return
    if not option.name:
        draft.notes.lost.append(f"{option.original_text}: a word without an option")
        return
    draft.notes.unknown.append(f"{option.original_text}.{did_you_mean(option.name, rows, 0.8)}".removesuffix("."))


def _apply_row(draft: RecipeDraft, row: peer_tables.MappingRow, option: PeerOption) -> None:
    if _has_shell_expansion(option.value):
        place = row.ours[0] if row.ours else row.here.get("en", "").strip("`") if row.how == "gather" else ""
        suggestion = f"; give {place}" if place else ""
        draft.notes.changed.append(f"{option.original_text}: only the shell knows this value{suggestion}")
        return
    _ROW_HANDLERS[row.how](draft, row, option)


def _has_shell_expansion(value: Any) -> bool:
    values = value if isinstance(value, list) else [value]
    return any(isinstance(one, str) and ("$" in one or "`" in one) for one in values)


def row_note(row: peer_tables.MappingRow) -> str:
    """Return what is to be minded, without the links of a page."""
    return re.sub(r" ?\(?\[([^\]]*)\]\([^)]*\)+", r" (\1)", row.note.get("en", "")).strip()


def _copy_value(draft: RecipeDraft, row: peer_tables.MappingRow, option: PeerOption) -> None:
    key = draft.first_setting(row)
    if not key:
        if not option.name.isupper():
            more = f"; {row_note(row)}" if row_note(row) else ""
            draft.notes.lost.append(f"{option.original_text}: `anabatic {draft.command}` has no such setting{more}")
        return
    draft.set_setting(key, option.value, option.original_text)
    if row.changes:
        draft.notes.changed.append(f"{option.original_text} -> {key}: {row_note(row)}")


def _map_value(draft: RecipeDraft, row: peer_tables.MappingRow, option: PeerOption) -> None:
    text = _normalize_word(option.value, (*row.values, *row.near))
    if text in row.near and draft.first_setting(row):
        draft.set_setting(draft.first_setting(row), row.near[text], option.original_text)
        draft.notes.changed.append(
            f"{option.original_text}: no counterpart; {row.near[text]} is the nearest, and taken"
        )
        return
    if text not in row.values:
        known = f" (known: {', '.join(row.values)})" if row.ours else ""
        draft.notes.lost.append(f"{option.original_text}: {row_note(row) or 'no counterpart'}{known}")
        return
    value = row.values[text]
    key = draft.first_setting(row)
    if value is None:
        return
    try:
        if not key:
            raise ConfigError("no such setting")
        draft.set_setting(key, value, option.original_text)
    except ConfigError:
        draft.notes.lost.append(f"{option.original_text}: `anabatic {draft.command}` has no such setting or value")
        return
    if row.changes:
        draft.notes.changed.append(f"{option.original_text} -> {key}: {row_note(row)}")


def _gather_value(draft: RecipeDraft, row: peer_tables.MappingRow, option: PeerOption) -> None:
    draft.gathered[row.fact or row.theirs[0]] = option


def _note_changed(draft: RecipeDraft, row: peer_tables.MappingRow, option: PeerOption) -> None:
    key = draft.first_setting(row) or ", ".join(row.ours)
    draft.notes.changed.append(f"{option.original_text}: not carried over to {key}: {row_note(row)}")


def _note_lost(draft: RecipeDraft, row: peer_tables.MappingRow, option: PeerOption) -> None:
    if _normalize_text(option.value) not in _EMPTY_VALUES:
        draft.notes.lost.append(f"{option.original_text}: {row_note(row) or 'no counterpart'}".rstrip(": "))


def _note_needless(draft: RecipeDraft, row: peer_tables.MappingRow, option: PeerOption) -> None:
    if _normalize_text(option.value) not in _EMPTY_VALUES:
        draft.notes.needless.append(f"{option.original_text}: {row_note(row)}".rstrip(": "))


_ROW_HANDLERS: dict[str, Callable[[RecipeDraft, peer_tables.MappingRow, PeerOption], None]] = {
    "copy": _copy_value,
    "values": _map_value,
    "gather": _gather_value,
    "told": _note_changed,
    "lost": _note_lost,
    "ours": _note_needless,
    "silent": lambda made, row, option: None,
}


def _normalize_text(value: Any) -> str:
    return str(value).lower()


def _normalize_word(value: Any, known: Collection[str]) -> str:
    """Return a value as a table has it: `yes` and its like are true where the table does not know them."""
    text = _normalize_text(value)
    return text if text in known else _BOOLEAN_WORDS.get(text, text)


class _PeerNamer(validation.SettingNamer):
    """Names a value by what stands in the command or file that is read."""

    def format_path(self, path: Any) -> str:
        return str(self.prefix(path))


def read_json_value(option: PeerOption) -> Any:
    """Return the value of an option that is an object of JSON in a command, and may be one already in a file.

    Raises:
        ConfigError: its text is not JSON.
    """
    if not isinstance(option.value, str):
        return option.value
    try:
        return json_reader.loads(option.value)
    except ValueError as error:
        raise ConfigError(f"{option.original_text} cannot be read as JSON: {error}", "write an object") from error


def convert_to_type(value: Any, hint: Any, original: str) -> Any:
    """Return a value, text or typed, as the type of a setting; lists are split at commas.

    Raises:
        ConfigError: it is of another type.
    """
    inner, optional = validation.strip_optional(hint)
    if value is None and optional:
        return None
    if value is True and inner is not bool and not original.lower().endswith("true"):
        raise ConfigError(f"{original} has no value", "write it after the option")
    kind = typing.get_origin(inner) or inner
    if kind is list:
        values = value if isinstance(value, list) else [value]
        value = [_coerce_value(piece, typing.get_args(inner)[0]) for one in values for piece in _split_commas(one)]
    else:
        value = _coerce_value(value[-1] if isinstance(value, list) and len(value) == 1 else value, kind)
    return validation.convert_value(value, inner, _PeerNamer(original), ())


def _split_commas(value: Any) -> Iterator[Any]:
    if isinstance(value, str):
        yield from (piece.strip() for piece in value.split(",") if piece.strip())
    else:
        yield value


def _coerce_value(value: Any, kind: Any) -> Any:
    if kind is bool and not isinstance(value, bool):
        return _BOOLEANS.get(_normalize_text(value), value)
    if kind is str and isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and kind in (int, float):
        return validation.UntypedText(value)
    return value
