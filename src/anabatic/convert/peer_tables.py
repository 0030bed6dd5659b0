"""The tables of `peers/`: what another program calls a thing, and what it is here.

One file for each program, and one for what several of them share. The guides' tables are written from the same rows by
scripts/migration_tables.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from anabatic.config.loading import yaml_reader

TABLES_FOLDER = Path(__file__).with_name("peers")
ROW_ACTIONS = ("copy", "values", "gather", "told", "lost", "ours", "silent")
"""copy: the value is carried over; values: by the row's own list; gather: it is needed for a sum; told: the setting is
named, the value is not carried over; lost: there is no counterpart; ours: it is so here anyway; silent: not even that
is worth a word."""


@dataclass(frozen=True)
class MappingRow:
    """One line of a table."""

    theirs: tuple[str, ...]
    """Names there; of an option without its hyphens, with `_`."""
    ours: tuple[str, ...] = ()
    """Settings here; the first that a command has is meant."""
    command: str = ""
    """Command here, where `theirs` are commands."""
    how: str = "copy"
    values: dict[Any, Any] = field(default_factory=dict)
    """Value there -> here; null: nothing to set."""
    near: dict[str, Any] = field(default_factory=dict)
    """Value there -> the nearest one here, which a note names."""
    fact: str = ""
    """Under which name a gathered value is kept."""
    skip: tuple[str, ...] = ()
    """Values that mean "not given"."""
    only: tuple[str, ...] = ()
    """Commands of ours for which the row holds; empty: all."""
    changes: bool = False
    """The note says that the value means something else here."""
    sets: dict[str, Any] = field(default_factory=dict)
    """Of a command: settings where nothing is said."""
    open: dict[str, Any] = field(default_factory=dict)
    """Of a command: what stands for settings that it finds by itself."""
    stage: str = ""
    """Of a command: its name in a pipeline."""
    shown: dict[str, str] = field(default_factory=dict)
    """How `theirs` stands in the guides, by language; default: the names."""
    here: dict[str, str] = field(default_factory=dict)
    """How `ours` stands in the guides, by language."""
    note: dict[str, str] = field(default_factory=dict)
    """By language: what is to be minded."""


@dataclass(frozen=True)
class PeerDefault:
    """What a program does where nothing is said."""

    name: str
    value: Any
    only: tuple[str, ...] = ()
    tuner: str = ""
    """It holds for this kind of training alone."""
    unless: tuple[str, ...] = ()
    """It does not hold beside these."""


@dataclass(frozen=True)
class PeerTables:
    """One file of `peers/`."""

    id: str
    title: str
    tables: dict[str, tuple[MappingRow, ...]]
    defaults: tuple[PeerDefault, ...]
    names: dict[str, str]
    """Names of models there -> repositories."""
    seq_len: int
    """Tokens of a row where nothing is said."""
    datasets: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Names of data sets there -> entries as in a dataset_info.json."""
    only: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Of the table of shared names: those that only some of the programs have -> title -> names."""

    def all_rows(self) -> tuple[MappingRow, ...]:
        """Return the rows of all tables."""
        return tuple(row for table in self.tables.values() for row in table)


@cache
def load_tables(peer: str) -> PeerTables:
    """Return a file of `peers/`."""
    content = yaml_reader.read_own_yaml(TABLES_FOLDER / f"{peer}.yaml")
    return PeerTables(
        id=peer,
        title=content["title"],
        tables={name: tuple(map(_parse_row, rows)) for name, rows in content["tables"].items()},
        defaults=tuple(_parse_default(one) for one in content.get("defaults", ())),
        names=content.get("names", {}),
        seq_len=content.get("seq_len", 2048),
        datasets={str(name): dict(entry) for name, entry in content.get("datasets", {}).items()},
        only={title: tuple(names) for title, names in content.get("only", {}).items()},
    )


def _parse_row(entry: dict[str, Any]) -> MappingRow:
    our_settings = tuple(entry.get("ours", ()))
    examples = entry.get("shown", {})
    how = entry.get("how") or ("values" if "values" in entry else "copy" if our_settings else "lost")
    return MappingRow(
        theirs=tuple(map(str, entry["theirs"])),
        ours=our_settings,
        command=entry.get("command", ""),
        how=how,
        values={_normalize_text(key): value for key, value in entry.get("values", {}).items()},
        near={_normalize_text(key): value for key, value in entry.get("near", {}).items()},
        fact=entry.get("fact", ""),
        skip=tuple(map(_normalize_text, entry.get("skip", ()))),
        only=tuple(entry.get("only", ())),
        changes=entry.get("changes", False),
        sets=entry.get("sets", {}),
        open=entry.get("open", {}),
        stage=entry.get("stage", ""),
        shown=examples if isinstance(examples, dict) else dict.fromkeys(("en", "zh"), examples),
        here=entry.get("here", {}),
        note={language: entry[language] for language in ("en", "zh") if language in entry},
    )


def _parse_default(entry: dict[str, Any]) -> PeerDefault:
    only, unless = tuple(entry.get("only", ())), tuple(entry.get("unless", ()))
    return PeerDefault(entry["name"], entry["value"], only, entry.get("tuner", ""), unless)


def _normalize_text(value: Any) -> str:
    """Return a value as it is compared: `True`, `true` and true are one."""
    return str(value).lower()
