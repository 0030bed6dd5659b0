"""Options and keys of other programs that are typed here out of habit: what each is called, or why it is not needed."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anabatic.config.loading import command_table, validation
from anabatic.config.loading import settings as settings_module
from anabatic.convert import derived_settings, peer_tables, recipe_draft
from anabatic.convert.command_finder import SHARED_NAMES, PeerCommand, PeerOption
from anabatic.core.errors import ConfigError

_TABLE_ORDER = (
    "transformers", "launch", "llamafactory", "swift", "deepspeed", "nanochat", "axolotl", "verl", "lm_eval", "vllm",
)  # fmt: skip
"""Files of the tables; what several of them know is said of the first."""
_BATCH_FACTS = ("micro_rows", "accumulation", "global_rows")
"""Facts of a batch that a sum needs."""


@dataclass(frozen=True)
class ForeignWord:
    """What one option or key of another program is here.

    Attributes:
        original_text: as it was written.
        programs: where it is called so.
        settings: settings here.
        note: what is to be minded, or why there is nothing to set.
        is_needless: it is so here anyway.
    """

    original_text: str
    programs: str
    settings: tuple[str, ...]
    note: str
    is_needless: bool
    has_other_meaning: bool = False
    """Its value means something else here."""

    def format_clause(self, where: validation.SettingNamer) -> str:
        """Return a clause in which `where` writes the settings."""
        if self.settings:
            clause = f"{' and '.join(map(where.format_key, self.settings))} here"
            clause += f": {self.note}" if self.note and self.has_other_meaning else ""
        else:
            clause = "nothing to set here" if self.is_needless else "no counterpart here"
            clause += f": {self.note}" if self.note and self.note != "no counterpart" else ""
        return f'"{self.original_text}" (of {self.programs}): {clause}'


@dataclass
class ForeignMatch:
    """What several words are here.

    Attributes:
        words: those that a table knows, in their order.
        settings: dotted key -> value, for all of them together.
        unknown: names that no table knows.
        problem: why their values cannot be converted; empty where they can.
    """

    words: list[ForeignWord] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    problem: str = ""


def is_known_name(name: str) -> bool:
    """True if a table has an option or key of that name."""
    return any(name in _option_names(file) for file in _TABLE_ORDER)


def option_names(peer: str, name: str) -> bool:
    """True if a program's own table has an option or key of that name."""
    return name in _option_names(peer)


def translate_options(
    command: str, options: Sequence[PeerOption], own_settings: Mapping[str, Any] | None = None
) -> ForeignMatch:
    """Return what options of other programs are called by a command of ours.

    Args:
        command: ours.
        options: what was typed, and does not exist here.
        own_settings: dotted key -> value of what was given in our own words.
    """
    peer = guess_program(option.name for option in options)
    rows = _rows_by_name(peer, command)
    answer = ForeignMatch()
    known = [option for option in options if option.name in rows]
    answer.unknown = [option.name for option in options if option.name not in rows]
    answer.words = [_translate_word(peer, command, rows, option) for option in known]
    try:
        draft = _make_draft(peer, command, rows, known, own_settings or {})
    except ConfigError as error:
        answer.problem = str(error)
        return answer
    given = own_settings or {}
    answer.settings = {key: one.value for key, one in draft.settings.items() if key not in given}
    return answer


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


def _translate_word(
    peer: str, command: str, rows: Mapping[str, peer_tables.MappingRow], option: PeerOption
) -> ForeignWord:
    row = rows[option.name]
    draft = recipe_draft.RecipeDraft(_make_bare_command(peer, []), command)
    programs = _owner_titles(peer, option.name)
    typed = option.original_text.partition("=")[0].partition(" ")[0].rstrip(":")
    note = recipe_draft.row_note(row)
    if row.how in ("lost", "ours", "silent"):
        return ForeignWord(typed, programs, (), note, row.how != "lost")
    if row.only and command not in row.only:
        return ForeignWord(typed, programs, (), f"it belongs to {_format_commands(row.only)}", False)
    try:
        keys = tuple(_make_draft(peer, command, rows, [option], {}).settings)
    except ConfigError:
        keys = ()
    setting = draft.first_setting(row)
    if setting and setting not in keys:
        keys = (setting,)
    if keys:
        another = row.changes or row.how in ("gather", "told")
        return ForeignWord(typed, programs, keys[:2], note, False, another)
    takers = [name for name in command_table.COMMANDS if any(key in _setting_keys(name) for key in row.ours)]
    where = f"`anabatic {command}` has no such setting"
    if row.ours and takers:
        where += f"; {row.ours[0]} belongs to {_format_commands(takers)}"
    return ForeignWord(typed, programs, (), note if row.how == "gather" and not row.ours and note else where, False)


def _format_commands(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in list(names)[:5])


def _setting_keys(command: str) -> set[str]:
    return {key for key, _ in validation.iter_settings(command_table.get_command(command).import_job_class())}


def _make_bare_command(peer: str, options: list[PeerOption]) -> PeerCommand:
    """Return a call that has nothing but its options: no program is behind it whose defaults would count."""
    real = peer if peer in SHARED_NAMES else "deepspeed"
    return PeerCommand(real, "", peer_tables.MappingRow(()), 0, "", options)


def _make_draft(
    peer: str,
    command: str,
    rows: Mapping[str, peer_tables.MappingRow],
    options: Sequence[PeerOption],
    own_settings: Mapping[str, Any],
) -> recipe_draft.RecipeDraft:
    """Return the draft of the options alone, with the sums that need several of them."""
    draft = recipe_draft.RecipeDraft(_make_bare_command(peer, list(options)), command)
    before = {key: value for key, value in own_settings.items() if draft.setting_type(key) is not None}
    defaults = settings_module.flatten_settings(
        settings_module.default_tree(command_table.get_command(command).import_job_class())
    )
    length = "batch.seq_len"
    if length not in before and defaults.get(length) is not None:
        before[length] = defaults[length]
    lengths = {name for name, row in rows.items() if length in row.ours}
    for key, value in before.items():
        if key != length or not any(option.name in lengths for option in options):
            draft.set_setting(key, value, key)
    for option in options:
        recipe_draft.apply_option(draft, rows, option)
    if "micro_rows" in draft.gathered and not {"accumulation", "global_rows"} & set(draft.gathered):
        draft.gathered["accumulation"] = PeerOption("gradient_accumulation_steps", 1, "gradient_accumulation_steps 1")
    if command != "rl" and "micro_rows" not in draft.gathered and "global_rows" not in draft.gathered:
        draft.gathered.pop("accumulation", None)
    derived_settings.add_derived_settings(draft, Path())
    draft.settings = {
        key: one
        for key, one in draft.settings.items()
        if key not in before or one.value != _typed_value(draft, before, key)
    }
    return draft


def _typed_value(draft: recipe_draft.RecipeDraft, before: Mapping[str, Any], key: str) -> Any:
    return recipe_draft.convert_to_type(before[key], draft.setting_type(key), key)
