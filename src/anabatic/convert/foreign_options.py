"""Options and keys of other programs that are typed here out of habit: what each is called, or why it is not needed."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from anabatic.config.loading import command_table, validation
from anabatic.convert import peer_tables, recipe_draft
from anabatic.convert.command_finder import SHARED_NAMES

_TABLE_ORDER = (
    "transformers", "launch", "llamafactory", "swift", "deepspeed", "nanochat", "axolotl", "verl", "lm_eval", "vllm",
)  # fmt: skip
"""Files of the tables; what several of them know is said of the first."""


@dataclass(frozen=True)
class ForeignOption:
    """Counterpart of an option or key of another program.

    Attributes:
        programs: where it is called so.
        settings: its setting here, if there is one.
        note: what is to be minded, or why there is nothing to set.
        is_needless: it is so here anyway.
    """

    programs: str
    settings: tuple[str, ...]
    note: str
    is_needless: bool

    def format_clause(self, namer: validation.SettingNamer) -> str:
        """Return `(of ...): --optim.lr here`, in which `namer` writes the setting."""
        if self.settings:
            clause = f"{namer.format_key(self.settings[0])} here"
        else:
            clause = "nothing to set here" if self.is_needless else "no counterpart here"
        note = self.note if self.note != "no counterpart" else ""
        return f"(of {self.programs}): {clause}{f': {note}' if note else ''}"


def is_known_name(name: str) -> bool:
    """True if a table has an option or key of that name."""
    return any(name in _option_names(file) for file in _TABLE_ORDER)


def option_names(peer: str, name: str) -> bool:
    """True if a program's own table has an option or key of that name."""
    return name in _option_names(peer)


def find_option(command: str, name: str) -> ForeignOption | None:
    """Return what an option or key of another program is called by a command of ours; None where no table has it.

    Args:
        command: ours.
        name: without hyphens in front, with `_`.
    """
    peer = guess_program([name])
    row = _rows_by_name(peer, command).get(name)
    if row is None:
        return None
    programs, note = _owner_titles(peer, name), recipe_draft.row_note(row)
    if row.how in ("lost", "ours", "silent"):
        return ForeignOption(programs, (), note, row.how != "lost")
    if row.only and command not in row.only:
        return ForeignOption(programs, (), f"it belongs to {_format_commands(row.only)}", False)
    keys = _setting_keys(command)
    if found := tuple(key for key in row.ours if key in keys)[:1]:
        has_note = row.changes or row.how in ("gather", "told")
        return ForeignOption(programs, found, note if has_note else "", False)
    if row.how == "gather" and not row.ours and note:
        return ForeignOption(programs, (), note, False)
    takers = [other for other in command_table.COMMANDS if any(key in _setting_keys(other) for key in row.ours)]
    where = f"`anabatic {command}` has no such setting"
    if row.ours and takers:
        where += f"; {row.ours[0]} belongs to {_format_commands(takers)}"
    return ForeignOption(programs, (), where, False)


def guess_program(names: Any) -> str:
    """Return the program that has most of these names of its own; `transformers` where they are everyone's."""
    some = set(names)
    everyones = _option_names("transformers") | _option_names("launch")
    counts = {peer: len(some & (_option_names(peer) - everyones | _exclusive_names(peer))) for peer in _TABLE_ORDER[2:]}
    best = max(counts, key=lambda peer: counts[peer])
    return best if counts[best] else "transformers"


def count_known_names(peer: str, names: Any) -> int:
    """Return how many of the names a program knows, those that it shares with others included."""
    shared = SHARED_NAMES.get(peer, "")
    return len(set(names) & (_option_names(peer) | (_option_names(shared) if shared else set())))


@functools.cache
def _option_names(file: str) -> set[str]:
    kinds = peer_tables.load_tables(file).tables.items()
    listed = (row for kind, rows in kinds if kind not in ("commands", "trainers") for row in rows)
    return {name for row in listed for name in row.theirs if len(name) > 1}


def _exclusive_names(peer: str) -> set[str]:
    """Names of the shared table that a program alone has."""
    return set(peer_tables.load_tables("transformers").only.get(peer_tables.load_tables(peer).title, ()))


def _rows_by_name(peer: str, command: str) -> dict[str, peer_tables.MappingRow]:
    """Return name -> row of all tables; the rows of `peer`, and those for this command, are taken first."""
    rows: dict[str, peer_tables.MappingRow] = {}
    files = sorted(_TABLE_ORDER, key=lambda file: (file == peer, -_TABLE_ORDER.index(file)))
    for level in range(3):
        for file in files:
            for table, some in peer_tables.load_tables(file).tables.items():
                fitting = (
                    row
                    for row in some
                    if table not in ("commands", "trainers") and _row_priority(row, command) == level
                )
                rows |= {name: row for row in fitting for name in row.theirs if len(name) > 1}
    return rows


def _row_priority(row: peer_tables.MappingRow, command: str) -> int:
    return 1 if not row.only else 2 if command in row.only else 0


def _owner_titles(peer: str, name: str) -> str:
    """Return whose word it is."""
    if peer != "transformers" and name in _option_names(peer):
        return peer_tables.load_tables(peer).title
    shared = peer_tables.load_tables("transformers")
    if name in _option_names("transformers"):
        owners = [title for title, names in shared.only.items() if name in names]
        if peer_tables.load_tables(peer).title in owners or (
            not owners and SHARED_NAMES.get(peer) and peer in ("swift", "llamafactory")
        ):
            return peer_tables.load_tables(peer).title
        return " and ".join(owners) or shared.title
    return " and ".join(peer_tables.load_tables(file).title for file in _TABLE_ORDER if name in _option_names(file))


def _format_commands(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in list(names)[:5])


def _setting_keys(command: str) -> set[str]:
    return {key for key, _ in validation.iter_settings(command_table.COMMANDS.find_row(command).import_job_class())}
