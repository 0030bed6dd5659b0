"""Options and keys of other programs that are typed here out of habit: what each is called, or why it is not needed."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anabatic.config import check, commands, load
from anabatic.convert import draft, tables, work
from anabatic.convert.calls import SHARED, Call, Option
from anabatic.core.errors import ConfigError

_ORDER = (
    "transformers", "launch", "llamafactory", "swift", "deepspeed", "nanochat", "axolotl", "verl", "lm_eval", "vllm",
)  # fmt: skip
"""Files of the tables; what several of them know is said of the first."""
_DERIVED = ("micro_rows", "accumulation", "global_rows")
"""Facts of a batch that a sum needs."""


@dataclass(frozen=True)
class Word:
    """What one option or key of another program is here.

    Attributes:
        typed: as it was written.
        programs: where it is called so.
        keys: settings here.
        note: what is to be minded, or why there is nothing to set.
        needless: it is so here anyway.
    """

    typed: str
    programs: str
    keys: tuple[str, ...]
    note: str
    needless: bool
    another: bool = False
    """Its value means something else here."""

    def said(self, where: check.Where) -> str:
        """Return a clause in which `where` writes the settings."""
        if self.keys:
            told = f"{' and '.join(map(where.option, self.keys))} here"
            told += f": {self.note}" if self.note and self.another else ""
        else:
            told = "nothing to set here" if self.needless else "no counterpart here"
            told += f": {self.note}" if self.note and self.note != "no counterpart" else ""
        return f'"{self.typed}" (of {self.programs}): {told}'


@dataclass
class Answer:
    """What several words are here.

    Attributes:
        words: those that a table knows, in their order.
        settings: dotted key -> value, for all of them together.
        unknown: names that no table knows.
        problem: why their values cannot be converted; empty where they can.
    """

    words: list[Word] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    problem: str = ""


def knows(name: str) -> bool:
    """True if a table has an option or key of that name."""
    return any(name in _names(file) for file in _ORDER)


def names(peer: str, name: str) -> bool:
    """True if a program's own table has an option or key of that name."""
    return name in _names(peer)


def look_up(command: str, options: Sequence[Option], own: Mapping[str, Any] | None = None) -> Answer:
    """Return what options of other programs are called by a command of ours.

    Args:
        command: ours.
        options: what was typed, and does not exist here.
        own: dotted key -> value of what was given in our own words.
    """
    peer = likely(option.name for option in options)
    rows = _rows(peer, command)
    answer = Answer()
    known = [option for option in options if option.name in rows]
    answer.unknown = [option.name for option in options if option.name not in rows]
    answer.words = [_word(peer, command, rows, option) for option in known]
    try:
        made = _made(peer, command, rows, known, own or {})
    except ConfigError as error:
        answer.problem = str(error)
        return answer
    given = own or {}
    answer.settings = {key: one.value for key, one in made.settings.items() if key not in given}
    return answer


def likely(names: Any) -> str:
    """Return the program that has most of these names of its own; `transformers` where they are everyone's."""
    some = set(names)
    everyones = _names("transformers") | _names("launch")
    counts = {peer: len(some & (_names(peer) - everyones | _only_of(peer))) for peer in _ORDER[2:]}
    best = max(counts, key=lambda peer: counts[peer])
    return best if counts[best] else "transformers"


def count(peer: str, names: Any) -> int:
    """Return how many of the names a program knows, those that it shares with others included."""
    shared = SHARED.get(peer, "")
    return len(set(names) & (_names(peer) | (_names(shared) if shared else set())))


@functools.cache
def _names(file: str) -> set[str]:
    kinds = tables.load(file).tables.items()
    listed = (row for kind, rows in kinds if kind not in ("commands", "trainers") for row in rows)
    return {name for row in listed for name in row.theirs if len(name) > 1}


def _only_of(peer: str) -> set[str]:
    """Names of the shared table that a program alone has."""
    return set(tables.load("transformers").only.get(tables.load(peer).title, ()))


def _rows(peer: str, command: str) -> dict[str, tables.Row]:
    """Return name -> row of all tables; the rows of `peer`, and those for this command, are taken first."""
    rows: dict[str, tables.Row] = {}
    files = sorted(_ORDER, key=lambda file: (file == peer, -_ORDER.index(file)))
    for level in range(3):
        for file in files:
            for table, some in tables.load(file).tables.items():
                fitting = (
                    row for row in some if table not in ("commands", "trainers") and _level(row, command) == level
                )
                rows |= {name: row for row in fitting for name in row.theirs if len(name) > 1}
    return rows


def _level(row: tables.Row, command: str) -> int:
    return 1 if not row.only else 2 if command in row.only else 0


def _programs(peer: str, name: str) -> str:
    """Return whose word it is."""
    if peer != "transformers" and name in _names(peer):
        return tables.load(peer).title
    shared = tables.load("transformers")
    if name in _names("transformers"):
        owners = [title for title, names in shared.only.items() if name in names]
        if tables.load(peer).title in owners or (not owners and SHARED.get(peer) and peer in ("swift", "llamafactory")):
            return tables.load(peer).title
        return " and ".join(owners) or shared.title
    return " and ".join(tables.load(file).title for file in _ORDER if name in _names(file))


def _word(peer: str, command: str, rows: Mapping[str, tables.Row], option: Option) -> Word:
    row = rows[option.name]
    made = draft.Draft(_call(peer, []), command)
    programs = _programs(peer, option.name)
    typed = option.shown.partition("=")[0].partition(" ")[0].rstrip(":")
    told = draft.note_of(row)
    if row.how in ("lost", "ours", "silent"):
        return Word(typed, programs, (), told, row.how != "lost")
    if row.only and command not in row.only:
        return Word(typed, programs, (), f"it belongs to {_commands(row.only)}", False)
    try:
        keys = tuple(_made(peer, command, rows, [option], {}).settings)
    except ConfigError:
        keys = ()
    here = made.key(row)
    if here and here not in keys:
        keys = (here,)
    if keys:
        another = row.changes or row.how in ("gather", "told")
        return Word(typed, programs, keys[:2], told, False, another)
    takers = [name for name in commands.COMMANDS if any(key in _settings(name) for key in row.ours)]
    where = f"`anabatic {command}` has no such setting"
    if row.ours and takers:
        where += f"; {row.ours[0]} belongs to {_commands(takers)}"
    return Word(typed, programs, (), told if row.how == "gather" and not row.ours and told else where, False)


def _commands(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in list(names)[:5])


def _settings(command: str) -> set[str]:
    return {key for key, _ in check.leaves(commands.get(command).job_class())}


def _call(peer: str, options: list[Option]) -> Call:
    """Return a call that has nothing but its options: no program is behind it whose defaults would count."""
    real = peer if peer in SHARED else "deepspeed"
    return Call(real, "", tables.Row(()), 0, "", options)


def _made(
    peer: str, command: str, rows: Mapping[str, tables.Row], options: Sequence[Option], own: Mapping[str, Any]
) -> draft.Draft:
    """Return the draft of the options alone, with the sums that need several of them."""
    made = draft.Draft(_call(peer, list(options)), command)
    before = {key: value for key, value in own.items() if made.hint(key) is not None}
    defaults = _flat(load.defaults(commands.get(command).job_class()))
    length = "batch.seq_len"
    if length not in before and defaults.get(length) is not None:
        before[length] = defaults[length]
    lengths = {name for name, row in rows.items() if length in row.ours}
    for key, value in before.items():
        if key != length or not any(option.name in lengths for option in options):
            made.set(key, value, key)
    for option in options:
        draft.read(made, rows, option)
    if "micro_rows" in made.facts and not {"accumulation", "global_rows"} & set(made.facts):
        made.facts["accumulation"] = Option("gradient_accumulation_steps", 1, "gradient_accumulation_steps 1")
    if command != "rl" and "micro_rows" not in made.facts and "global_rows" not in made.facts:
        made.facts.pop("accumulation", None)
    work.finish(made, Path())
    made.settings = {
        key: one for key, one in made.settings.items() if key not in before or one.value != _typed(made, before, key)
    }
    return made


def _typed(made: draft.Draft, before: Mapping[str, Any], key: str) -> Any:
    return draft.fit(before[key], made.hint(key), key)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat
