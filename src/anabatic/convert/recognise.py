"""Whose file a file is: a recipe of ours, or settings of another program, told from its keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anabatic.config import check, commands, deepspeed, load, yaml_file
from anabatic.convert import calls, foreign, make, tables
from anabatic.core import json_text
from anabatic.core.errors import ConfigError

OURS = "anabatic"
ACCELERATE = "accelerate"
_RECIPES = (".yaml", ".yml", ".json")
_ACCELERATE = ("compute_environment", "distributed_type", "main_training_function", "machine_rank")
_NESTED = "verl"
"""Its files are nested: keys in tables are dotted."""
_AXOLOTL = {"dpo": "dpo", "ipo": "dpo", "kto": "dpo", "orpo": "dpo", "simpo": "dpo", "grpo": "rl"}
"""Its key `rl` -> a command of ours."""
_LEAST = 2
"""Names of another program that make a file its own."""


@dataclass(frozen=True)
class Kind:
    """Whose file it is.

    Attributes:
        program: `anabatic`, a file of the tables, `accelerate`, or `transformers` for names that several have.
        commands: ours that it is for.
        keys: what tells so.
    """

    program: str
    commands: tuple[str, ...]
    keys: tuple[str, ...]

    @property
    def title(self) -> str:
        """How the program is called in messages."""
        return self.program if self.program in (OURS, ACCELERATE) else tables.load(self.program).title


def is_recipe(name: str) -> bool:
    """True for the name of a file that may hold settings or a script, if it is there."""
    return name.endswith((*_RECIPES, ".sh")) and Path(name).is_file()


def kind_of(path: Path) -> Kind | None:
    """Return whose file it is, None where nothing tells.

    Raises:
        ConfigError: it cannot be read.
    """
    if path.suffix == ".sh":
        return _script(yaml_file.text(path, "a script"))
    return kind_of_tree(tree_of(path))


def tree_of(path: Path) -> dict[str, Any]:
    """Return the values of a YAML or JSON file.

    Raises:
        ConfigError: it cannot be read.
    """
    text = yaml_file.text(path)
    if not text.lstrip().startswith(("{", "[")):
        return yaml_file.parse(text, str(path)).tree
    try:
        content = json_text.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}", "give the whole file") from error
    return content if isinstance(content, dict) else {}


def kind_of_tree(tree: dict[str, Any]) -> Kind | None:
    """Return whose settings these are, None where nothing tells."""
    names = [key.replace("-", "_") for key in tree]
    ours = fitting(tree)
    if ours:
        return Kind(OURS, tuple(ours), tuple(names[:4]))
    if sum(name in _ACCELERATE for name in names) >= _LEAST:
        return Kind(ACCELERATE, (), tuple(name for name in names if name in _ACCELERATE))
    nested = [key for key in flatten(tree) if foreign.names(_NESTED, key)]
    if len(nested) >= _LEAST:
        return Kind(_NESTED, ("rl",), tuple(nested))
    blocks = [key for key in tree if key in deepspeed.KEYS and (isinstance(tree[key], dict) or not foreign.knows(key))]
    if blocks:
        return Kind("deepspeed", ("sft",), tuple(blocks))
    known = [name for name in names if foreign.knows(name) and name not in _own_names()]
    if len(known) < _LEAST:
        return None
    peer = _peer(known, tree)
    return Kind(peer, (_command(peer, tree),), tuple(known))


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return dotted key -> value of a nested mapping."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + str(key): value}
    return flat


def fitting(tree: dict[str, Any]) -> list[str]:
    """Return the commands of ours that take every key of a recipe; those for which it is complete, if there are."""
    taken = [name for name in commands.COMMANDS if tree and takes_settings(name, tree)]
    whole = [name for name in taken if is_complete(name, tree)]
    return whole or taken


def takes_settings(name: str, tree: dict[str, Any]) -> bool:
    """Return whether a command has all settings of a tree, with values of their types."""
    try:
        check.section(tree, commands.get(name).job_class(), check.Where())
    except ConfigError:
        return False
    return True


def is_complete(name: str, tree: dict[str, Any]) -> bool:
    """Return whether a tree is a whole job of a command."""
    try:
        load.build(name, tree, "")
    except ConfigError:
        return False
    return True


def _own_names() -> set[str]:
    """First parts of the names of our settings."""
    return {key.split(".")[0] for row in commands.COMMANDS.values() for key, _ in check.leaves(row.job_class())}


def _peer(names: Iterable[str], tree: dict[str, Any]) -> str:
    """Return the program with the most of these names; only those that have files of settings."""
    some = list(names)
    own = foreign.likely(some)
    if own in ("llamafactory", "swift", "axolotl"):
        return own
    counts = {peer: foreign.count(peer, some) for peer in ("llamafactory", "swift")}
    return (
        own
        if own == "deepspeed" or min(counts.values()) == max(counts.values())
        else max(counts, key=counts.__getitem__)
    )


def _command(peer: str, tree: dict[str, Any]) -> str:
    """Return the command of ours that a file of settings asks for."""
    if peer == "axolotl":
        return _AXOLOTL.get(str(tree.get("rl") or "").lower(), "sft")
    if peer not in ("llamafactory", "swift"):
        return "sft"
    return make.command_of(peer, tree)


def _script(text: str) -> Kind | None:
    for peer in ("swift", "llamafactory", "nanochat", "deepspeed"):
        found = calls.find(text, peer).calls
        if found:
            return Kind(peer, (make.command_of_call(found[0]),), (found[0].theirs,))
    return None
