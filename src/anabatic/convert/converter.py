"""Convert a command, a script or a file of another program to a recipe, or several commands to a pipeline."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anabatic.config.loading import command_table, deepspeed_json, yaml_reader
from anabatic.convert import accelerate_config, command_finder, derived_settings, peer_tables, recipe_writer
from anabatic.convert.command_finder import PeerCommand, PeerOption
from anabatic.convert.recipe_draft import RecipeDraft, make_draft
from anabatic.core import json_reader
from anabatic.core.errors import ConfigError
from anabatic.core.formatting import did_you_mean, to_valid_utf8

_INTERACTIVE_COMMANDS = ("serve", "chat")
"""Commands that wait for a person: no stages of a pipeline."""


@dataclass
class ConvertedRecipe:
    """A recipe, and what is to be told beside it."""

    text: str
    messages: list[str]


def convert_command(peer: str, words: Sequence[str], command: str | None = None) -> ConvertedRecipe:
    """Return our recipe for another program's command or file.

    Args:
        peer: `swift`, `llamafactory`, `deepspeed` or `nanochat`.
        words: a file, or `-` for standard input; a command as one text; or a command word by word.
        command: ours, where the words leave it open.

    Raises:
        ConfigError: nothing of that program is there, or it cannot be read.
    """
    if command is not None:
        command_table.COMMANDS.find_row(command)
    found, folder = _read_commands(peer, [to_valid_utf8(word) for word in words])
    found, folder = _follow_script(found, folder)
    drafts: list[RecipeDraft] = []
    for call in found.calls:
        _add_file_options(call, folder)
        our_command = command or command_for_call(call)
        if not our_command:
            found.unknown_commands.append(call.peer_name)
            continue
        draft = make_draft(call, _resolve_command(call, our_command))
        derived_settings.add_derived_settings(draft, folder)
        recipe_writer.complete_draft(draft)
        drafts.append(draft)
    if not drafts:
        raise _nothing_found_error(peer, found, " ".join(words))
    stages = [draft for draft in drafts if draft.command not in _INTERACTIVE_COMMANDS]
    if len(drafts) == 1 or not stages:
        draft = drafts[0]
        return ConvertedRecipe(
            recipe_writer.render_recipe(draft, found.unknown_commands), recipe_writer.format_reports(draft.notes)
        )

    later = [draft for draft in drafts if draft.command in _INTERACTIVE_COMMANDS]
    return ConvertedRecipe(
        render_pipeline(stages, later, found.unknown_commands),
        list(dict.fromkeys(line for draft in drafts for line in recipe_writer.format_reports(draft.notes))),
    )


def _read_commands(peer: str, words: list[str]) -> tuple[command_finder.ScriptCommands, Path]:
    """Return the commands, and the folder where names of files in them begin."""
    title = peer_tables.load_tables(peer).title
    if not words or not any(word.strip() for word in words):
        raise ConfigError("nothing to convert", f"give a command of {title} in quotes, or a file that has one")
    if len(words) > 1:
        return command_finder.find_commands(shlex.join(words), peer), Path()
    word = words[0]
    if word == "-":
        return command_finder.find_commands(sys.stdin.read(yaml_reader.MAX_BYTES), peer), Path()
    if peer == "deepspeed" and deepspeed_json.is_preset(word):
        return command_finder.ScriptCommands([_command_from_tree(peer, word, {"deepspeed": word})]), Path()
    path = Path(word)
    if os.path.exists(word) or not any(mark in word for mark in " \n=;"):
        return _read_file(peer, path), path.parent
    return command_finder.find_commands(word, peer), Path()


def _follow_script(found: command_finder.ScriptCommands, folder: Path) -> tuple[command_finder.ScriptCommands, Path]:
    """Return what a script holds where the only command is to run it.

    Raises:
        ConfigError: the script is not here.
    """
    if len(found.calls) != 1 or found.calls[0].row.command != "run":
        return found, folder
    call = found.calls[0]
    name = next(word for word in shlex.split(call.command_line) if word.endswith(".sh"))
    if not (folder / name).is_file():
        raise ConfigError(f"{name} is not here", "give the script itself; or use the recipe `anabatic run speedrun`")
    return _read_file(call.peer, folder / name), folder


def _read_file(peer: str, path: Path) -> command_finder.ScriptCommands:
    if os.path.isdir(path):  # which takes a text that is longer than a name may be, too
        inside = path / "args.json"
        hint = f"give {inside}" if inside.is_file() else "give a file inside it"
        raise ConfigError(f"{path} is a folder", hint)
    text = yaml_reader.read_text(path, "a script, a YAML or a JSON file")
    if path.suffix in (".yaml", ".yml") or (path.suffix == ".json" or text.lstrip().startswith("{")):
        tree = (
            _parse_json(path, text) if text.lstrip().startswith("{") else yaml_reader.parse_yaml(text, str(path)).tree
        )
        if not tree:
            raise ConfigError(f"{path} holds no settings", "give the file that was trained with")
        if peer == "nanochat":
            raise ConfigError(f"{path} holds settings, and nanochat has none in files", "give its script or command")
        if peer == "deepspeed" and accelerate_config.is_config(tree):
            tree = accelerate_config.flatten_config(tree)
        elif peer == "deepspeed":
            if not set(tree).intersection(deepspeed_json.DEEPSPEED_KEYS):
                raise ConfigError(
                    f"{path} has no key of DeepSpeed's: {', '.join(list(tree)[:6])}",
                    f"known: {', '.join(deepspeed_json.DEEPSPEED_KEYS)}",
                )
            tree = {"deepspeed": str(path.name)}
        return command_finder.ScriptCommands([_command_from_tree(peer, str(path), tree)])
    try:
        return command_finder.find_commands(text, peer)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}", error.hint) from error


def _parse_json(path: Path, text: str) -> dict[str, Any]:
    try:
        content = json_reader.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}", "give the whole file") from error
    return dict(content)


def _command_from_tree(peer: str, name: str, tree: dict[str, Any]) -> PeerCommand:
    row = peer_tables.load_tables(peer).tables["commands"][0]
    call = PeerCommand(peer, row.theirs[0], row, 1, name)
    call.options = _tree_to_options(tree)
    call.is_machine_written = Path(name).suffix == ".json"
    return call


def _tree_to_options(tree: dict[str, Any]) -> list[PeerOption]:
    """Return the keys of a file; ms-swift's block ENV holds variables."""
    block = tree.get("ENV")
    if isinstance(block, dict):
        tree = {**{key: value for key, value in tree.items() if key != "ENV"}, **block}
    return [
        PeerOption(key.replace("-", "_"), value, f"{key}: {yaml_reader.dump_scalar(value)}"[:160])
        for key, value in tree.items()
        if value is not None and value != {} and not (isinstance(value, list) and all(one is None for one in value))
    ]


def _add_file_options(call: PeerCommand, folder: Path) -> None:
    """Put the settings of the files that a command names before its options."""
    _add_accelerate_file(call, folder)
    if call.peer not in ("llamafactory", "swift"):
        call.options += [PeerOption("", file, file) for file in call.config_files]
        return
    for file in reversed(call.config_files):
        path = folder / file
        tree = _read_tree(path, "the YAML or JSON file that the command names")
        call.options = [*_tree_to_options(tree), *call.options]


def _read_tree(path: Path, what: str) -> dict[str, Any]:
    text = yaml_reader.read_text(path, what)
    return _parse_json(path, text) if text.lstrip().startswith("{") else yaml_reader.parse_yaml(text, str(path)).tree


def _add_accelerate_file(call: PeerCommand, folder: Path) -> None:
    """Put the settings of `accelerate launch --config_file FILE` before its options, which count more."""
    named = next((one for one in call.options if one.name == "config_file" and isinstance(one.value, str)), None)
    path = accelerate_config.find_file(named.value, folder) if named is not None else None
    if named is None or path is None:
        return
    tree = _read_tree(path, "the YAML or JSON file that the command names")
    if not accelerate_config.is_config(tree):
        return
    settings = [
        PeerOption(one.name, one.value, f"{path.name}: {one.original_text}")
        for one in _tree_to_options(accelerate_config.flatten_config(tree))
    ]
    call.options = [*settings, *(one for one in call.options if one is not named)]


def command_for_call(call: PeerCommand) -> str:
    """Return the command of ours for a call; empty where there is none. A kind of training is one of trainings."""
    if not call.row.command or not command_table.COMMANDS.find_row(call.row.command).is_training:
        return call.row.command
    rows = {
        name: row for row in peer_tables.load_tables(call.peer).all_rows() if row.fact == "kind" for name in row.theirs
    }
    for option in reversed(call.options):  # the last one counts, as for argparse and over a file
        row = rows.get(option.name)
        if row is not None:
            kind = str(option.value)
            if kind not in row.values:
                guess = did_you_mean(kind, row.values)
                raise ConfigError(
                    f"{option.original_text} has no counterpart.{guess}", f"known: {', '.join(row.values)}"
                )
            return str(row.values[kind])
    return call.row.command


def _resolve_command(call: PeerCommand, command: str) -> str:
    """Answers to no file are a conversation; an export that only merges is one too."""
    names = {option.name for option in call.options if str(option.value).lower() != "false"}
    files = {"val_dataset", "dataset", "load_dataset_config", "load_data_args", "inputs"}
    return "chat" if command == "infer" and not names & files else command


def _nothing_found_error(peer: str, found: command_finder.ScriptCommands, text: str) -> ConfigError:
    title = peer_tables.load_tables(peer).title
    known = [
        row.shown.get("en") or row.theirs[0] for row in peer_tables.load_tables(peer).tables["commands"] if row.command
    ]
    others = list(dict.fromkeys(found.unknown_commands))
    hint = f"commands: {', '.join(known).replace('`', '')}"
    if os.path.isfile(text):
        text = Path(text).read_text(encoding="utf-8", errors="replace")
    try:
        other = command_finder.find_owner(peer, text)
    except ConfigError:
        other = ""
    if other:
        hint = f"this is {peer_tables.load_tables(other).title}'s: anabatic config from-{other}"
    found_text = f"; found: {', '.join(others)}"[:200] if others else ""
    return ConfigError(f"no command of {title} that has a counterpart{found_text}", hint)


_STAGE_OUTPUTS = {"tokenizer train": "tokenizer", "pretrain": "model", "sft": "model", "dpo": "model", "rl": "model"}
_STAGE_INPUTS = {"tokenizer": "tokenizer", "tokenizers": "tokenizer", "model": "model", "model.path": "model"}
_PIPELINE_VARIABLES = {
    "TEXT": "text",
    "ROWS.jsonl": "rows",
    "PAIRS.jsonl": "pairs",
    "QUESTIONS.jsonl": "questions",
    "MODEL": "model",
}
"""What stands for a missing setting -> the variable of the pipeline."""


def render_pipeline(stages: list[RecipeDraft], later: list[RecipeDraft], others: list[str]) -> str:
    """Return a pipeline; `later` are commands that wait for a person."""
    names = _name_stages(stages)
    outputs: dict[str, str] = {}
    variables: dict[str, None] = {}
    parts: list[str] = []
    for name, one in zip(names, stages, strict=True):
        one.settings.pop("out", None)
        _fill_stage_inputs(one, outputs, variables)
        parts += [
            "",
            *(f"  # {line}" for line in recipe_writer.wrap_comment(one.call.command_line)),
            *_render_notes(one),
        ]
        parts += [f"  {name}:", f"    command: {one.command}", "    job:"]
        parts += recipe_writer.render_settings(one, "      ") or ["      {}"]
        if one.command in _STAGE_OUTPUTS:
            outputs[_STAGE_OUTPUTS[one.command]] = name
    words = [f"--set {name}=..." for name in variables]
    lines = [
        f"# {' '.join(['anabatic run FILE', *words])}",
        *_render_later_commands(later, outputs),
        *recipe_writer.render_skipped_commands(others),
    ]
    lines += ["out: runs/pipeline"]
    lines += ["vars:", *(f'  {name}: ""' for name in variables)] if variables else []
    return "\n".join([*lines, "stages:", *parts[1:]]) + "\n"


def _name_stages(stages: list[RecipeDraft]) -> list[str]:
    names: list[str] = []
    for one in stages:
        base = one.call.row.stage or one.command.replace(" ", "_")
        name, number = base, 2
        while name in names:
            name, number = f"{base}_{number}", number + 1
        names.append(name)
    return names


def _fill_stage_inputs(one: RecipeDraft, outputs: dict[str, str], variables: dict[str, None]) -> None:
    """Put the stage before, or a variable, where a setting is missing; a pipeline runs on one machine."""
    if one.launch_options:
        note = f"start it by anabatic launch {' '.join(one.launch_options)} -- {one.command} -c FILE"
        one.notes.changed.append(
            f"{one.gathered['nnodes'].original_text}: a pipeline runs on one machine; on several {note}"
        )
        one.set_setting("device.nproc", one.gathered_int("nproc") or 1, one.gathered["nnodes"].original_text)
    for key, value in list(one.placeholders.items()):
        if key in _STAGE_INPUTS and _STAGE_INPUTS[key] in outputs:
            one.placeholders[key] = _match_list(value, f"${{{outputs[_STAGE_INPUTS[key]]}}}")
        else:
            word = value[0] if isinstance(value, list) else value
            name = _PIPELINE_VARIABLES.get(word)
            if name is not None:
                variables[name] = None
                one.placeholders[key] = _match_list(value, f"${{{name}}}")


def _match_list(value: Any, text: str) -> Any:
    return [text] if isinstance(value, list) else text


def _render_notes(one: RecipeDraft) -> Iterator[str]:
    for line in recipe_writer.render_notes(one.notes):
        yield f"  {line}"


def _render_later_commands(later: list[RecipeDraft], outputs: dict[str, str]) -> Iterator[str]:
    for one in later:
        model = f"runs/pipeline/{outputs['model']}" if "model" in outputs else "MODEL"
        words = ["anabatic", *shlex.split(one.command), *(["-m", model] if one.command == "chat" else [model])]
        yield f"# then: {shlex.join(words)}   ({one.call.command_line})"
