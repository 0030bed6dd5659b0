"""From what somebody has, a command, a script or a file, to the recipe, or to a pipeline of several commands."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anabatic.config import commands, deepspeed, yaml_file
from anabatic.convert import calls, recipe, tables, work
from anabatic.convert.calls import Call, Option
from anabatic.convert.draft import Draft, draft
from anabatic.core import json_text
from anabatic.core.errors import ConfigError
from anabatic.core.text import did_you_mean, utf8

_NEVER_ENDS = ("serve", "chat")
"""Commands that wait for a person: no stages of a pipeline."""


@dataclass
class Made:
    """A recipe, and what is to be told beside it."""

    text: str
    reports: list[str]


def convert(peer: str, words: Sequence[str], command: str | None = None) -> Made:
    """Return our recipe for what another program is told.

    Args:
        peer: `swift`, `llamafactory`, `deepspeed` or `nanochat`.
        words: a file, or `-` for standard input; a command as one text; or a command word by word.
        command: ours, where the words leave it open.

    Raises:
        ConfigError: nothing of that program is there, or it cannot be read.
    """
    if command is not None:
        commands.get(command)
    found, folder = _read(peer, [utf8(word) for word in words])
    found, folder = _followed(found, folder)
    drafts: list[Draft] = []
    for call in found.calls:
        _add_files(call, folder)
        ours = command or command_of_call(call)
        if not ours:
            found.others.append(call.theirs)
            continue
        made = draft(call, _settled(call, ours))
        work.finish(made, folder)
        recipe.complete(made)
        drafts.append(made)
    if not drafts:
        raise _nothing(peer, found, " ".join(words))
    stages = [made for made in drafts if made.command not in _NEVER_ENDS]
    if len(drafts) == 1 or not stages:
        made = drafts[0]
        return Made(recipe.show(made, found.others), recipe.reports(made.notes))
    from anabatic.convert import pipeline

    later = [made for made in drafts if made.command in _NEVER_ENDS]
    return Made(
        pipeline.show(stages, later, found.others),
        list(dict.fromkeys(line for made in drafts for line in recipe.reports(made.notes))),
    )


def _read(peer: str, words: list[str]) -> tuple[calls.Found, Path]:
    """Return the commands, and the folder where names of files in them begin."""
    title = tables.load(peer).title
    if not words or not any(word.strip() for word in words):
        raise ConfigError("nothing to convert", f"give a command of {title} in quotes, or a file that has one")
    if len(words) > 1:
        return calls.find(shlex.join(words), peer), Path()
    word = words[0]
    if word == "-":
        return calls.find(sys.stdin.read(yaml_file.MAX_BYTES), peer), Path()
    if peer == "deepspeed" and deepspeed.is_name(word):
        return calls.Found([_file_call(peer, word, {"deepspeed": word})]), Path()
    path = Path(word)
    if os.path.exists(word) or not any(mark in word for mark in " \n=;"):
        return _of_file(peer, path), path.parent
    return calls.find(word, peer), Path()


def _followed(found: calls.Found, folder: Path) -> tuple[calls.Found, Path]:
    """Return what a script holds where the only command is to run it.

    Raises:
        ConfigError: the script is not here.
    """
    if len(found.calls) != 1 or found.calls[0].row.command != "run":
        return found, folder
    call = found.calls[0]
    name = next(word for word in shlex.split(call.typed) if word.endswith(".sh"))
    if not (folder / name).is_file():
        raise ConfigError(f"{name} is not here", "give the script itself; or use recipes/speedrun.yaml")
    return _of_file(call.peer, folder / name), folder


def _of_file(peer: str, path: Path) -> calls.Found:
    if os.path.isdir(path):  # which takes a text that is longer than a name may be, too
        inside = path / "args.json"
        hint = f"give {inside}" if inside.is_file() else "give a file inside it"
        raise ConfigError(f"{path} is a folder", hint)
    text = yaml_file.text(path, "a script, a YAML or a JSON file")
    if path.suffix in (".yaml", ".yml") or (path.suffix == ".json" or text.lstrip().startswith("{")):
        tree = _json(path, text) if text.lstrip().startswith("{") else yaml_file.parse(text, str(path)).tree
        if not tree:
            raise ConfigError(f"{path} holds no settings", "give the file that was trained with")
        if peer == "nanochat":
            raise ConfigError(f"{path} holds settings, and nanochat has none in files", "give its script or command")
        if peer == "deepspeed":
            if not set(tree).intersection(deepspeed.KEYS):
                raise ConfigError(
                    f"{path} has no key of DeepSpeed's: {', '.join(list(tree)[:6])}",
                    f"known: {', '.join(deepspeed.KEYS)}",
                )
            tree = {"deepspeed": str(path.name)}
        return calls.Found([_file_call(peer, str(path), tree)])
    try:
        return calls.find(text, peer)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}", error.hint) from error


def _json(path: Path, text: str) -> dict[str, Any]:
    try:
        content = json_text.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}", "give the whole file") from error
    return dict(content)


def _file_call(peer: str, name: str, tree: dict[str, Any]) -> Call:
    row = tables.load(peer).tables["commands"][0]
    call = Call(peer, row.theirs[0], row, 1, name)
    call.options = _options(tree)
    call.written = Path(name).suffix == ".json"
    return call


def _options(tree: dict[str, Any]) -> list[Option]:
    """Return the keys of a file; ms-swift's block ENV holds variables."""
    block = tree.get("ENV")
    if isinstance(block, dict):
        tree = {**{key: value for key, value in tree.items() if key != "ENV"}, **block}
    return [
        Option(key.replace("-", "_"), value, f"{key}: {yaml_file.scalar(value)}"[:160])
        for key, value in tree.items()
        if value is not None and value != [] and value != {}
    ]


def _add_files(call: Call, folder: Path) -> None:
    """Put the settings of the files that a command names before its options."""
    if call.peer not in ("llamafactory", "swift"):
        call.options += [Option("", file, file) for file in call.files]
        return
    for file in reversed(call.files):
        path = folder / file
        text = yaml_file.text(path, "the YAML or JSON file that the command names")
        tree = _json(path, text) if text.lstrip().startswith("{") else yaml_file.parse(text, str(path)).tree
        call.options = [*_options(tree), *call.options]


def command_of(peer: str, tree: dict[str, Any]) -> str:
    """Return the command of ours for a file of settings.

    Raises:
        ConfigError: the kind of training that it names has no counterpart.
    """
    return command_of_call(_file_call(peer, "", tree))


def command_of_call(call: Call) -> str:
    """Return the command of ours for a call; empty where there is none. A kind of training is one of trainings."""
    if not call.row.command or not commands.get(call.row.command).trains:
        return call.row.command
    rows = {name: row for row in tables.load(call.peer).rows() if row.fact == "kind" for name in row.theirs}
    for option in call.options:
        row = rows.get(option.name)
        if row is not None:
            kind = str(option.value)
            if kind not in row.values:
                guess = did_you_mean(kind, row.values)
                raise ConfigError(f"{option.shown} has no counterpart.{guess}", f"known: {', '.join(row.values)}")
            return str(row.values[kind])
    return call.row.command


def _settled(call: Call, command: str) -> str:
    """Answers to no file are a conversation; an export that only merges is one all the same."""
    names = {option.name for option in call.options if str(option.value).lower() != "false"}
    files = {"val_dataset", "dataset", "load_dataset_config", "load_data_args", "inputs"}
    return "chat" if command == "infer" and not names & files else command


def _nothing(peer: str, found: calls.Found, text: str) -> ConfigError:
    title = tables.load(peer).title
    known = [row.shown.get("en") or row.theirs[0] for row in tables.load(peer).tables["commands"] if row.command]
    others = list(dict.fromkeys(found.others))
    hint = f"commands: {', '.join(known).replace('`', '')}"
    if os.path.isfile(text):
        text = Path(text).read_text(encoding="utf-8", errors="replace")
    try:
        other = calls.owner(peer, text)
    except ConfigError:
        other = ""
    if other:
        hint = f"this is {tables.load(other).title}'s: anabatic config from-{other}"
    told = f"; found: {', '.join(others)}"[:200] if others else ""
    return ConfigError(f"no command of {title} that has a counterpart{told}", hint)
