"""Whose file a file is: a recipe of ours, or settings of another program, told from its keys."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anabatic.config.loading import command_table, deepspeed_json, settings, validation, yaml_reader
from anabatic.convert import accelerate_config, command_finder, foreign_options, peer_tables
from anabatic.core import json_reader
from anabatic.core.errors import ConfigError

OWN_PROGRAM = "anabatic"
ACCELERATE = "accelerate"
_RECIPE_SUFFIXES = (".yaml", ".yml", ".json")
_NESTED = "verl"
"""Its files are nested: keys in tables are dotted."""
_MIN_FOREIGN_NAMES = 2
"""Names of another program that make a file its own."""


@dataclass(frozen=True)
class DetectedFile:
    """Whose file it is.

    Attributes:
        program: `anabatic`, a file of the tables, `accelerate`, or `transformers` for names that several have.
        commands: of a recipe of ours, those that it is for.
        evidence: what tells so.
    """

    program: str
    commands: tuple[str, ...]
    evidence: tuple[str, ...]

    @property
    def title(self) -> str:
        """How the program is called in messages."""
        return (
            self.program if self.program in (OWN_PROGRAM, ACCELERATE) else peer_tables.load_tables(self.program).title
        )


def is_recipe_file(name: str) -> bool:
    """True for the name of a file that may hold settings or a script, if it is there."""
    return name.endswith((*_RECIPE_SUFFIXES, ".sh")) and Path(name).is_file()


def detect_file(path: Path) -> DetectedFile | None:
    """Return whose file it is, None where nothing tells.

    Raises:
        ConfigError: it cannot be read.
    """
    if path.suffix == ".sh":
        return _detect_script(yaml_reader.read_text(path, "a script"))
    return detect_tree(read_tree(path))


def read_tree(path: Path) -> dict[str, Any]:
    """Return the values of a YAML or JSON file.

    Raises:
        ConfigError: it cannot be read.
    """
    text = yaml_reader.read_text(path)
    if not text.lstrip().startswith(("{", "[")):
        return yaml_reader.parse_yaml(text, str(path)).tree
    try:
        content = json_reader.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}", "give the whole file") from error
    return content if isinstance(content, dict) else {}


def detect_tree(tree: dict[str, Any]) -> DetectedFile | None:
    """Return whose settings these are, None where nothing tells."""
    names = [key.replace("-", "_") for key in tree]
    matching_commands = find_matching_commands(tree)
    if matching_commands:
        return DetectedFile(OWN_PROGRAM, tuple(matching_commands), tuple(names[:4]))
    if accelerate_config.is_config(tree):
        return DetectedFile(ACCELERATE, (), tuple(name for name in names if name in accelerate_config.KEYS))
    nested = [key for key in settings.flatten_settings(tree) if foreign_options.option_names(_NESTED, key)]
    if len(nested) >= _MIN_FOREIGN_NAMES:
        return DetectedFile(_NESTED, (), tuple(nested))
    blocks = [
        key
        for key in tree
        if key in deepspeed_json.DEEPSPEED_KEYS
        and (isinstance(tree[key], dict) or not foreign_options.is_known_name(key))
    ]
    if blocks:
        return DetectedFile("deepspeed", (), tuple(blocks))
    known = [name for name in names if foreign_options.is_known_name(name) and name not in _own_setting_names()]
    if len(known) < _MIN_FOREIGN_NAMES:
        return None
    return DetectedFile(_guess_peer(known), (), tuple(known))


def find_matching_commands(tree: dict[str, Any]) -> list[str]:
    """Return the commands of ours that take every key of a recipe; those for which it is complete, if there are."""
    taken = [name for name in command_table.COMMANDS if tree and accepts_settings(name, tree)]
    complete = [name for name in taken if is_complete_job(name, tree)]
    return complete or taken


def accepts_settings(name: str, tree: dict[str, Any]) -> bool:
    """Return whether a command has all settings of a tree, with values of their types."""
    try:
        validation.check_section(
            tree, command_table.COMMANDS.find_row(name).import_job_class(), validation.SettingNamer()
        )
    except ConfigError:
        return False
    return True


def is_complete_job(name: str, tree: dict[str, Any]) -> bool:
    """Return whether a tree is a whole job of a command."""
    try:
        settings.build_job(name, tree, "")
    except ConfigError:
        return False
    return True


def _own_setting_names() -> set[str]:
    """First parts of the names of our settings."""
    return {
        key.split(".")[0]
        for row in command_table.COMMANDS.values()
        for key, _ in validation.iter_settings(row.import_job_class())
    }


def _guess_peer(some: list[str]) -> str:
    """Return the program with the most of these names; only those that have files of settings."""
    guessed = foreign_options.guess_program(some)
    if guessed in ("llamafactory", "swift", "axolotl"):
        return guessed
    counts = {peer: foreign_options.count_known_names(peer, some) for peer in ("llamafactory", "swift")}
    return (
        guessed
        if guessed == "deepspeed" or min(counts.values()) == max(counts.values())
        else max(counts, key=counts.__getitem__)
    )


def _detect_script(text: str) -> DetectedFile | None:
    for peer in ("swift", "llamafactory", "nanochat", "deepspeed"):
        found = command_finder.find_commands(text, peer).calls
        if found:
            return DetectedFile(peer, (), (found[0].peer_name,))
    return None
