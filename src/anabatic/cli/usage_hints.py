"""What is typed out of habit from another program, or in the wrong place: what it is here, as a line to copy."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cyclopts import CycloptsError, UnknownOptionError, UnusedCliTokensError

from anabatic.config.loading import command_table, common_settings, validation, yaml_reader
from anabatic.config.sections.common import DEFAULT_SEQ_LEN
from anabatic.convert import file_detection
from anabatic.convert import foreign_options as foreign_options_module
from anabatic.convert.command_finder import PeerOption
from anabatic.core.errors import ConfigError
from anabatic.core.formatting import did_you_mean
from anabatic.recipes import sequence_length

_CONFIG_OPTIONS = ("-c", "--config")
_MAX_EXPLAINED = 6
"""Words that a message explains."""
_MIN_SIMILARITY = 0.75
"""How near a name must be to be meant: a wrong guess is worse than none."""
_OPTION_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_NO_CONVERTER = ("axolotl", "verl")
"""Programs whose files are said in options: `config from-...` does not read them."""


@dataclass
class CommandLine:
    """A command line of ours, in parts.

    Attributes:
        command: name of the command whose options these are.
        head: words up to it.
        known_words: what it understands.
        foreign_options: options that it does not have.
    """

    command: str
    head: list[str]
    known_words: list[str] = field(default_factory=list)
    foreign_options: list[PeerOption] = field(default_factory=list)
    own_settings: dict[str, Any] = field(default_factory=dict)
    config_files: list[str] = field(default_factory=list)

    def format_line(self, more: Sequence[str] = ()) -> str:
        """Return the line with `more` behind it, as it is typed."""
        return shlex.join(["anabatic", *self.head, *self.known_words, *more])


def explain_usage_error(error: CycloptsError, tokens: Sequence[str]) -> ConfigError | None:
    """Return what the words of a line mean that the CLI library does not know; None where nothing tells."""
    if isinstance(error, UnknownOptionError):
        return explain_unknown_option(error, tokens)
    return explain_unused_words(error, tokens) if isinstance(error, UnusedCliTokensError) else None


def explain_unknown_option(error: UnknownOptionError, tokens: Sequence[str]) -> ConfigError | None:
    """Return what an option that does not exist is called here, and the line with all of them put right.

    None for commands that run no job: their options are no settings.
    """
    known = [name for argument in error.argument_collection for name in (*argument.names, *argument.negatives)]
    word = (error.token.keyword or error.token.value).split("=", 1)[0]
    chain = list(error.command_chain or ())
    name = " ".join(chain)
    if name not in command_table.COMMANDS or name == "run":
        return None
    line = parse_line(tokens, name, known)
    return explain_foreign_options(line, word, known, f"see `{common_settings.format_help_command(name)}`")


def explain_unused_words(error: UnusedCliTokensError, tokens: Sequence[str]) -> ConfigError | None:
    """Return what words without an option mean: settings as KEY=VALUE, or a file; None where nothing tells."""
    name = " ".join(error.command_chain or ())
    words = list(error.unused_tokens or ())
    if name not in command_table.COMMANDS or not words:
        return None
    for word in words:
        if file_detection.is_recipe_file(word) and (found := explain_file(word, name, list(tokens))) is not None:
            return found
    if not all(_is_pair(word) for word in words):
        return None
    known = options_of(name)
    line = parse_line(tokens, name, known)
    return explain_foreign_options(
        line, words[0].partition("=")[0], known, f"see `{common_settings.format_help_command(name)}`"
    )


def explain_misplaced_file(file: str, name: str) -> ConfigError:
    """Return whose a YAML file is that stands where a command of ours takes a model or rows."""
    tokens = [*name.split(), file]
    lost = ConfigError(
        f"{file} does not belong to an option. Did you mean -c {file}?",
        _replace_config_words(tokens, file, name, name, ["-c", file]),
    )
    return explain_file(file, name, tokens) or lost


def explain_misread_settings(error: ConfigError, tokens: Sequence[str]) -> ConfigError:
    """Return whose file it is that a message is about, or what a key of another program is called here."""
    if list(tokens[:1]) == ["config"]:
        return error  # it is asked about files, and says itself what they lack
    name = _find_command(error, tokens)
    file = next(
        (token for token in tokens if str(error).startswith(f"{token}:") and file_detection.is_recipe_file(token)), None
    )
    kind = file_detection.detect_file(Path(file)) if file is not None else None
    if (
        file is not None
        and kind is not None
        and not (kind.program == file_detection.OWN_PROGRAM and name in kind.commands)
    ):
        return explain_file(file, name, list(tokens)) or error
    if not isinstance(error, validation.UnknownSetting):
        return error
    key = error.key.rpartition(".")[2].replace("-", "_")
    if not name or name == "run" or not foreign_options_module.is_known_name(key):
        return error
    answer = foreign_options_module.translate_options(name, [PeerOption(key, error.value, error.key)])
    before = str(error).partition(error.key)[0]
    where = validation.SettingNamer()
    inside = [ours for ours, _ in validation.iter_settings(error.root) if ours.rpartition(".")[2] == key]
    if inside and not any(word.settings for word in answer.words):
        return error
    hint = answer.problem or ", ".join(
        f"{ours}: {yaml_reader.dump_scalar(value)}" for ours, value in answer.settings.items()
    )
    hint = f"write {hint}" if answer.settings and not answer.problem else hint or "take the key out"
    return ConfigError(f"{before}unknown setting {'; '.join(word.format_clause(where) for word in answer.words)}", hint)


def _find_command(error: ConfigError, tokens: Sequence[str]) -> str:
    """Return the command whose settings a message is about; empty where none is."""
    if isinstance(error, validation.UnknownSetting):
        return next((row.name for row in command_table.COMMANDS.values() if row.import_job_class() is error.root), "")
    names = (" ".join(tokens[at : at + size]) for at in range(len(tokens)) for size in (2, 1))
    return next((name for name in names if name in command_table.COMMANDS), "")


def options_of(name: str) -> list[str]:
    """Return the options of a command."""
    row = command_table.get_command(name)
    keys = [key for key, _ in validation.iter_settings(row.import_job_class())]
    short = [one for names in row.option_aliases.values() for one in names.split()]
    return [*_CONFIG_OPTIONS, "--dry-run", *short, *map(validation.OptionNamer().format_key, keys)]


def parse_line(tokens: Sequence[str], name: str, known: Collection[str]) -> CommandLine:
    """Part the words of a line: what the command understands, and what it does not."""
    chain = name.split()
    at = next(at for at in range(len(tokens)) if list(tokens[at : at + len(chain)]) == chain) + len(chain)
    line = CommandLine(name, list(tokens[:at]))
    row = command_table.get_command(name)
    options = {
        validation.OptionNamer().format_key(key): key for key, _ in validation.iter_settings(row.import_job_class())
    }
    options |= {one: key for key, names in row.option_aliases.items() for one in names.split()}
    many = {key for key, hint in validation.iter_settings(row.import_job_class()) if _takes_many(hint)}
    rest = list(tokens[at:])
    while rest:
        word, values = rest.pop(0), list[str]()
        option, equals, value = word.partition("=")
        if not word.startswith("-") or not _OPTION_NAME.match(word.lstrip("-")):
            if _is_pair(word) and not row.positional_setting:
                _add_pair(line, word, options)
            else:
                line.known_words.append(word)
            continue
        plain = option.replace("_", "-")
        single = plain in options and options[plain] not in many
        while rest and (not rest[0].startswith("-") or not _OPTION_NAME.match(rest[0].lstrip("-"))):
            if single and (values or equals):
                break
            values.append(rest.pop(0))
        if plain in known or option in known:
            line.known_words += [word, *values]
            if option in _CONFIG_OPTIONS:
                line.config_files += [value] if equals else values
            elif plain in options:
                line.own_settings[options[plain]] = ([value] if equals else values) or ["true"]
        elif option == "--set":
            for pair in [value] if equals else values:
                _add_pair(line, pair, options)
        else:
            given: Any = value if equals else values if len(values) > 1 else values[0] if values else True
            line.foreign_options.append(PeerOption(option.lstrip("-").replace("-", "_"), given, option))
    return line


def _takes_many(hint: Any) -> bool:
    return getattr(validation.strip_optional(hint)[0], "__origin__", None) in (list, dict)


def _is_pair(word: str) -> bool:
    key, equals, _ = word.lstrip("+").partition("=")  # Hydra adds keys with +
    return bool(equals) and _OPTION_NAME.fullmatch(key) is not None and not Path(word).exists()


def _add_pair(line: CommandLine, word: str, options: Mapping[str, str]) -> None:
    """Take KEY=VALUE: a setting of ours, or one of another program."""
    key, _, value = word.lstrip("+").partition("=")
    option = validation.OptionNamer().format_key(key.replace("-", "_"))
    if option in options:
        line.known_words += [option, value]
    else:
        line.foreign_options.append(PeerOption(key.replace("-", "_"), value, key))


def explain_foreign_options(line: CommandLine, word: str, known: Collection[str], see: str) -> ConfigError:
    """Return the error for a line with options that do not exist, and the line put right."""
    own = _read_given_settings(line)
    answer = foreign_options_module.translate_options(line.command, line.foreign_options, own)
    settings: dict[str, Any] = {}
    clauses: list[str] = []
    open_ = False
    by_name = {one.original_text: one for one in answer.words}
    for option in line.foreign_options:
        meant = _match_option_suffix(option.name, known)
        found = by_name.get(option.original_text)
        if found is not None and not (
            meant and not set(meant) & set(map(validation.OptionNamer().format_key, found.settings))
        ):
            mine = f"Did you mean {' or '.join(meant)}?" if meant else ""
            clauses.append(
                f'"{option.original_text}". {mine}' if mine else found.format_clause(validation.OptionNamer())
            )
            continue
        if len(meant) == 1:
            settings[meant[0]] = option.value
        open_ = open_ or len(meant) != 1
        guess = f" Did you mean {' or '.join(meant)}?" if meant else suggest_option(option.original_text, known)
        clauses.append(f'"{option.original_text}".{guess}'.removesuffix("."))
    if not clauses:
        return ConfigError(f"{word} is given as a word; here it is an option", line.format_line())
    if len(clauses) > _MAX_EXPLAINED:
        clauses[_MAX_EXPLAINED:] = [f"and {len(clauses) - _MAX_EXPLAINED} more"]
    hint = see if open_ else answer.problem
    if not hint:
        more = [
            part for key, value in answer.settings.items() for part in _format_setting_words(line.command, key, value)
        ]
        plain = [part for option, value in settings.items() for part in _format_option_words(option, value)]
        hint = line.format_line([*plain, *more])
    what = "option" if line.foreign_options[0].original_text.startswith("-") else "word"
    return ConfigError(f"unknown {what} {'; '.join(clauses)}".removesuffix("."), hint)


def _read_given_settings(line: CommandLine) -> dict[str, Any]:
    """Return what the line says in our own words: its recipes, then its options.

    Raises:
        ConfigError: a recipe cannot be read, or a value is of the wrong type.
    """
    root = command_table.get_command(line.command).import_job_class()
    hints = dict(validation.iter_settings(root))
    given: dict[str, Any] = {}
    for file in line.config_files:
        given |= {
            key: value
            for key, value in file_detection.flatten(yaml_reader.read_yaml(file).tree).items()
            if key in hints
        }
    for key, values in line.own_settings.items():
        hint, _ = validation.strip_optional(hints[key])
        texts = [validation.UntypedText(value) for value in values]
        value = texts if _takes_many(hint) else texts[0]
        given[key] = validation.convert_value(value, hints[key], validation.OptionNamer(), tuple(key.split(".")))
    if "batch.seq_len" in hints and given.get("batch.seq_len") is None:
        positions = sequence_length.max_positions(
            sequence_length.read_local_config(str(given.get("model") or given.get("model.path") or ""))
        )
        if positions is not None:  # as the job itself follows the model
            given["batch.seq_len"] = min(DEFAULT_SEQ_LEN, positions)
    return given


def _match_option_suffix(name: str, known: Collection[str]) -> list[str]:
    """Return the options that are called so inside of a section, or at the top."""
    last = name.replace("_", "-")
    return [one for one in known if one.startswith("--") and one.lstrip("-").rpartition(".")[2] == last]


def suggest_option(word: str, known: Collection[str]) -> str:
    """Return ` Did you mean ...?` with the options of ours that are called so, or the nearest one."""
    inside = _match_option_suffix(word.lstrip("-"), known)
    return (
        f" Did you mean {' or '.join(inside)}?"
        if inside
        else did_you_mean(word.replace("_", "-"), known, _MIN_SIMILARITY)
    )


def _format_option_words(option: str, value: Any) -> list[str]:
    values = value if isinstance(value, list) else [] if value is True else [value]
    return [option, *map(str, values)]


def _format_setting_words(command: str, key: str, value: Any) -> list[str]:
    """Return a setting as words of a line."""
    option = validation.OptionNamer().format_key(key)
    if isinstance(value, bool):
        head, _, last = option.removeprefix("--").rpartition(".")
        return [option] if value else [f"--{head}.no-{last}" if head else f"--no-{last}"]
    if isinstance(value, dict):
        return [option, *(f"{name}={one}" for name, one in value.items())]
    if isinstance(value, list):
        return [option, *(map(str, value) if value else ["[]"])]
    if isinstance(value, float):
        text = str(int(value)) if value.is_integer() and abs(value) < 1e15 else str(value)
        return [option, re.sub(r"e([+-])0+(?=\d)", r"e\1", text)]
    return [option, "null" if value is None else str(value)]


def explain_file(file: str, name: str, tokens: list[str]) -> ConfigError | None:
    """Return whose file it is, and the line that runs or converts it; None where nothing tells.

    Args:
        file: one of the words of the line.
        name: the command that it was given to; empty: none.
        tokens: the line.
    """
    kind = file_detection.detect_file(Path(file))
    if kind is None:
        return None
    if kind.program == file_detection.OWN_PROGRAM:
        return _explain_own_recipe(file, name, tokens, kind)
    shown = ", ".join(kind.evidence[:4])
    if file.endswith(".sh"):
        message = f"{file} is a script of {kind.title} ({shown})"
    else:
        message = f"{file} holds settings of {kind.title} ({shown})"
    if kind.program == "deepspeed" and not file.endswith(".sh"):
        command = name or "sft"
        if "parallel.deepspeed" in dict(
            validation.iter_settings(command_table.get_command(command).import_job_class())
        ):
            return ConfigError(
                message, _replace_config_words(tokens, file, name, command, ["--parallel.deepspeed", file])
            )
    if kind.program in _NO_CONVERTER:
        return _explain_arguments_file(file, kind.commands[0], tokens, message)
    if kind.program in (file_detection.ACCELERATE, "transformers") or (
        kind.program == "deepspeed" and not kind.commands
    ):
        return _explain_arguments_file(file, name or "sft", tokens, message)
    new = f"{Path(file).stem}-anabatic.yaml"
    command = kind.commands[0] or name or "sft"
    convert = shlex.join(["anabatic", "config", f"from-{kind.program}", file])
    use = [*(["-c"] if command != "run" else []), new]
    run = _replace_config_words(tokens, file, name, command, use)
    return ConfigError(message, f"{convert} > {shlex.quote(new)} && {run}")


def _explain_own_recipe(
    file: str, name: str, tokens: list[str], kind: file_detection.DetectedFile
) -> ConfigError | None:
    if name in kind.commands:
        use = [file] if name == "run" else ["-c", file]
        return ConfigError(
            f"{file} does not belong to an option. Did you mean -c {file}?",
            _replace_config_words(tokens, file, name, name, use),
        )
    others = " or ".join(f"`anabatic {one}`" for one in kind.commands[:3])
    command = kind.commands[0]
    use = [file] if command == "run" else ["-c", file]
    not_this = f", not for `anabatic {name}`" if name else ""
    return ConfigError(f"{file} is a recipe for {others}{not_this}", _replace_config_words([], file, "", command, use))


def _explain_arguments_file(file: str, command: str, tokens: list[str], message: str) -> ConfigError:
    """Return the error for a file of arguments, with the line that says the same in options."""
    tree = file_detection.read_tree(Path(file))
    if "actor_rollout_ref" in tree:
        tree = file_detection.flatten(tree)
    if isinstance(entries := tree.get("datasets"), list):  # axolotl's
        files = [one.get("path") for one in entries if isinstance(one, dict)]
        tree = {**tree, "datasets": [str(file) for file in files if file]}
    given = [PeerOption(key.replace("-", "_"), value, key) for key, value in tree.items()]
    answer = foreign_options_module.translate_options(
        command, [one for one in given if foreign_options_module.is_known_name(one.name)]
    )
    if answer.problem:
        return ConfigError(message, answer.problem)
    more = [part for key, value in answer.settings.items() for part in _format_setting_words(command, key, value)]
    return ConfigError(message, _replace_config_words(tokens, file, command, command, more))


def _replace_config_words(tokens: list[str], file: str, name: str, command: str, use: Sequence[str]) -> str:
    """Return the line with other words in the place of `-c FILE`; a line of another command is written anew."""
    chain = name.split()
    starts = [at for at in range(len(tokens)) if chain and tokens[at : at + len(chain)] == chain]
    if not starts or name != command:
        before = tokens[: starts[0]] if starts else []  # launch and plan are given the command behind --
        return shlex.join(["anabatic", *before, *command.split(), *use])
    line = list(tokens)
    at = line.index(file)
    first = at - 1 if at and line[at - 1] in _CONFIG_OPTIONS else at
    before, after = line[:first], line[at + 1 :]
    swallowed = use[:1] == ["-c"] or use[:1] == [file]
    return shlex.join(["anabatic", *before, *use, *after] if swallowed else ["anabatic", *before, *after, *use])
