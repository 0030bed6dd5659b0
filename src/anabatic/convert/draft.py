"""What a command is told, row by row of the tables, as settings of ours and as notes."""

from __future__ import annotations

import re
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from anabatic.config import check, commands
from anabatic.convert import tables
from anabatic.convert.calls import SHARED, Call, Option
from anabatic.core.errors import ConfigError
from anabatic.core.text import did_you_mean

_NOTHING = ("", "false", "none", "null", "0", "no", "[]", "{}")
_YES = {"true": True, "yes": True, "1": True, "on": True, "false": False, "no": False, "0": False, "off": False}
_WORDS = {
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
class Given:
    """A setting of ours, and where its value comes from."""

    value: Any
    origin: str


@dataclass
class Notes:
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
class Draft:
    """A recipe in the making."""

    call: Call
    command: str
    settings: dict[str, Given] = field(default_factory=dict)
    facts: dict[str, Option] = field(default_factory=dict)
    notes: Notes = field(default_factory=Notes)
    open: dict[str, Any] = field(default_factory=dict)
    """Settings that nobody has given and a job cannot do without -> what stands in their place."""
    launch: list[str] = field(default_factory=list)
    """Words of `anabatic launch`, for several machines."""
    others: list[str] = field(default_factory=list)
    """Keys of a file that a program has written, which the tables do not know."""
    variables: list[str] = field(default_factory=list)
    """Variables that are given here as there."""

    def hint(self, key: str) -> Any:
        """Return the type of a setting, None where the command does not have it."""
        return dict(check.leaves(commands.get(self.command).job_class())).get(key)

    def key(self, row: tables.Row) -> str:
        """Return the first setting of a row that the command has."""
        return next((key for key in row.ours if self.hint(key) is not None), "")

    def set(self, key: str, value: Any, origin: str) -> None:
        """Set a value, checked as one of a recipe is.

        Raises:
            ConfigError: it is of another type.
        """
        self.settings[key] = Given(fit(value, self.hint(key), origin), origin)

    def fact(self, name: str) -> Any:
        """Return a gathered value, None where there is none."""
        return self.facts[name].value if name in self.facts else None

    def number(self, name: str, least: int = 1) -> int | None:
        """Return a gathered whole number.

        Raises:
            ConfigError: it is none, or less than `least`.
        """
        if name not in self.facts:
            return None
        one = self.facts[name]
        value: int = fit(one.value, int, one.shown)
        if value < least:
            raise ConfigError(f"{one.shown}: {value} is less than {least}", f"give a whole number from {least}")
        return value


def draft(call: Call, command: str) -> Draft:
    """Return what a call says, with what its program does where nothing is said.

    Raises:
        ConfigError: a value is of the wrong type.
    """
    made = Draft(call, command)
    rows = _rows(call.peer, command)
    told: set[str] = set()
    for option in {one.name or one.shown: one for one in call.options}.values():
        if read(made, rows, option):
            told.update(rows[option.name].theirs)
    if made.others:
        made.notes.unknown.append(f"{len(made.others)} keys: {', '.join(made.others)}")
    if made.fact("kind") == "ppo":
        about = "its critic and reward model have no place here; answers are compared with each other, see rewards"
        made.notes.changed.append(f"{made.facts['kind'].shown}: {about}")
    if (kind := made.fact("kind")) in ("kto", "orpo", "simpo") and "loss_type" not in made.settings:
        made.set("loss_type", kind, made.facts["kind"].shown)
    for key, value in call.row.sets.items():
        if key not in made.settings and made.hint(key) is not None:
            made.set(key, value, f"for {call.theirs}")
    title = tables.load(call.peer).title
    for default in tables.load(call.peer).defaults:
        tuner = made.settings.get("tuner")
        fits = not default.tuner or (tuner is not None and tuner.value == default.tuner)
        fits = fits and not told.intersection(default.unless)
        if default.name not in told and fits and (not default.only or command in default.only):
            _apply(
                made,
                rows[default.name],
                Option(default.name, default.value, f"{title}'s {default.name} {_text(default.value)}"),
            )
    return made


def read(made: Draft, rows: Mapping[str, tables.Row], option: Option) -> bool:
    """Take one option; False where no row knows it, or its value means "not given".

    Raises:
        ConfigError: the value is of the wrong type.
    """
    row = rows.get(option.name)
    if row is None:
        _unknown(made, option, rows)
        return False
    if _word(option.value, row.skip) in row.skip or option.value is None:
        return False
    _apply(made, row, option)
    return True


def _rows(peer: str, command: str) -> dict[str, tables.Row]:
    """Return name -> row; the program's own rows, and those for this command, come first."""
    files = [name for name in ("launch", SHARED[peer], peer) if name]
    rows: dict[str, tables.Row] = {}
    for chosen in (False, True):
        for file in files:
            for table, some in tables.load(file).tables.items():
                fitting = (row for row in some if table != "commands" and bool(row.only) is chosen)
                rows |= {name: row for row in fitting if not row.only or command in row.only for name in row.theirs}
    return rows


def _unknown(made: Draft, option: Option, rows: Mapping[str, tables.Row]) -> None:
    if option.name.isupper():
        return  # a variable of the script's own
    if made.call.written:
        made.others += [option.name] if _text(option.value) not in _NOTHING else []
        return
    if not option.name:
        made.notes.lost.append(f"{option.shown}: a word without an option")
        return
    made.notes.unknown.append(f"{option.shown}.{did_you_mean(option.name, rows, 0.8)}".removesuffix("."))


def _apply(made: Draft, row: tables.Row, option: Option) -> None:
    if _unresolved(option.value):
        named = f"; give {row.ours[0]}" if row.ours else ""
        made.notes.changed.append(f"{option.shown}: only the shell knows this value{named}")
        return
    _HOW[row.how](made, row, option)


def _unresolved(value: Any) -> bool:
    values = value if isinstance(value, list) else [value]
    return any(isinstance(one, str) and ("$" in one or "`" in one) for one in values)


def note_of(row: tables.Row) -> str:
    """Return what is to be minded, without the links of a page."""
    return re.sub(r" ?\(?\[([^\]]*)\]\([^)]*\)+", r" (\1)", row.note.get("en", "")).strip()


def _copy(made: Draft, row: tables.Row, option: Option) -> None:
    key = made.key(row)
    if not key:
        if not option.name.isupper():
            more = f"; {note_of(row)}" if note_of(row) else ""
            made.notes.lost.append(f"{option.shown}: `anabatic {made.command}` has no such setting{more}")
        return
    made.set(key, option.value, option.shown)
    if row.changes:
        made.notes.changed.append(f"{option.shown} -> {key}: {note_of(row)}")


def _values(made: Draft, row: tables.Row, option: Option) -> None:
    text = _word(option.value, (*row.values, *row.near))
    if text in row.near and made.key(row):
        made.set(made.key(row), row.near[text], option.shown)
        made.notes.changed.append(f"{option.shown}: no counterpart; {row.near[text]} is the nearest, and taken")
        return
    if text not in row.values:
        known = ", ".join(row.values)
        made.notes.lost.append(f"{option.shown}: {note_of(row) or 'no counterpart'} (known: {known})")
        return
    value = row.values[text]
    key = made.key(row)
    if value is None:
        return
    try:
        if not key:
            raise ConfigError("no such setting")
        made.set(key, value, option.shown)
    except ConfigError:
        made.notes.lost.append(f"{option.shown}: `anabatic {made.command}` has no such setting or value")
        return
    if row.changes:
        made.notes.changed.append(f"{option.shown} -> {key}: {note_of(row)}")


def _gather(made: Draft, row: tables.Row, option: Option) -> None:
    made.facts[row.fact or row.theirs[0]] = option


def _told(made: Draft, row: tables.Row, option: Option) -> None:
    key = made.key(row) or ", ".join(row.ours)
    made.notes.changed.append(f"{option.shown}: not carried over to {key}: {note_of(row)}")


def _lost(made: Draft, row: tables.Row, option: Option) -> None:
    if _text(option.value) not in _NOTHING:
        made.notes.lost.append(f"{option.shown}: {note_of(row) or 'no counterpart'}".rstrip(": "))


def _ours(made: Draft, row: tables.Row, option: Option) -> None:
    if _text(option.value) not in _NOTHING:
        made.notes.needless.append(f"{option.shown}: {note_of(row)}".rstrip(": "))


_HOW: dict[str, Callable[[Draft, tables.Row, Option], None]] = {
    "copy": _copy,
    "values": _values,
    "gather": _gather,
    "told": _told,
    "lost": _lost,
    "ours": _ours,
    "silent": lambda made, row, option: None,
}


def _text(value: Any) -> str:
    return str(value).lower()


def _word(value: Any, known: Collection[str]) -> str:
    """Return a value as a table has it: `yes` and its like are true where the table does not know them."""
    text = _text(value)
    return text if text in known else _WORDS.get(text, text)


class _Theirs(check.Where):
    """Names a value by what stands in the command or file that is read."""

    def name(self, path: Any) -> str:
        return str(self.prefix(path))


def fit(value: Any, hint: Any, shown: str) -> Any:
    """Return a value, text or typed, as the type of a setting; lists are parted at commas.

    Raises:
        ConfigError: it is of another type.
    """
    inner, optional = check.strip_optional(hint)
    if value is None and optional:
        return None
    if value is True and inner is not bool and not shown.lower().endswith("true"):
        raise ConfigError(f"{shown} has no value", "write it behind the option")
    kind = typing.get_origin(inner) or inner
    if kind is list:
        values = value if isinstance(value, list) else [value]
        value = [_plain(piece, typing.get_args(inner)[0]) for one in values for piece in _parts(one)]
    else:
        value = _plain(value[-1] if isinstance(value, list) and len(value) == 1 else value, kind)
    return check.convert(value, inner, _Theirs(shown), ())


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, str):
        yield from (piece.strip() for piece in value.split(",") if piece.strip())
    else:
        yield value


def _plain(value: Any, kind: Any) -> Any:
    if kind is bool and not isinstance(value, bool):
        return _YES.get(_text(value), value)
    if kind is str and isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and kind in (int, float):
        return check.Text(value)
    return value
