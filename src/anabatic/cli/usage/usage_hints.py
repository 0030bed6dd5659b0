"""Hints for options of other programs and misplaced arguments: the correct command line to copy."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anabatic.cli.parsing.command_line import UnknownOptionError, UnusedWordsError, UsageError
from anabatic.config.loading import command_table, common_settings, shipped_recipes, validation, yaml_reader
from anabatic.config.sections.common import DEFAULT_SEQ_LEN
from anabatic.convert import accelerate_config, file_detection
from anabatic.convert import foreign_options as foreign_options_module
from anabatic.convert.command_finder import PeerOption
from anabatic.core.errors import ConfigError
from anabatic.core.formatting import did_you_mean
from anabatic.plan import model_facts

_CONFIG_OPTIONS = ("-c", "--config")
_MAX_EXPLAINED = 6
"""Maximum options that a message explains."""
_MIN_SIMILARITY = 0.75
"""Minimum similarity of a suggested name: a wrong guess is worse than none."""
_OPTION_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_NO_CONVERTER = ("axolotl", "verl")
"""Programs whose files are translated to options, because `config from-...` does not read them."""


@dataclass
class CommandLine:
    """A parsed command line of this program.

    Attributes:
        command: name of the command.
        head: tokens up to the command.
        known_words: tokens that the command accepts.
        foreign_options: options that the command does not have.
    """

    command: str
    head: list[str]
    known_words: list[str] = field(default_factory=list)
    foreign_options: list[PeerOption] = field(default_factory=list)
    own_settings: dict[str, Any] = field(default_factory=dict)
    config_files: list[str] = field(default_factory=list)

    def format_line(self, extra_args: Sequence[str] = ()) -> str:
        """Return the command line with `extra_args` appended."""
        return shlex.join(["anabatic", *self.head, *self.known_words, *extra_args])


def explain_usage_error(error: UsageError, tokens: Sequence[str]) -> ConfigError | None:
    """Return the error for options or arguments that a command rejects; None without an explanation."""
    if isinstance(error, UnknownOptionError):
        return explain_unknown_option(error, tokens)
    return explain_unused_words(error, tokens) if isinstance(error, UnusedWordsError) else None


_MOVED_OPTIONS = {("serve", "--runs"): "training runs are shown by another command: anabatic studio FOLDER"}
"""(command, option that it had before) -> hint."""


def explain_unknown_option(error: UnknownOptionError, tokens: Sequence[str]) -> ConfigError | None:
    """Return the error for an unknown option, with the corrected command line.

    None for commands that run no job: their options are not settings.
    """
    known, option, name = error.interface.option_names, error.option, error.command
    if name not in command_table.COMMANDS or name == "run":
        return None
    if (name, option) in _MOVED_OPTIONS:
        return ConfigError(f'unknown option "{option}"', _MOVED_OPTIONS[name, option])
    line = parse_line(tokens, name, known)
    return explain_foreign_options(line, option, known, f"see `{common_settings.format_help_command(name)}`")


def explain_unused_words(error: UnusedWordsError, tokens: Sequence[str]) -> ConfigError | None:
    """Return the error for unused arguments: KEY=VALUE settings or a file; None without an explanation."""
    name, unused = error.command, error.words
    if name not in command_table.COMMANDS:
        return None
    for token in unused:
        if file_detection.is_recipe_file(token) and (file_error := explain_file(token, name, list(tokens))) is not None:
            return file_error
    if not all(_is_pair(token) for token in unused):
        return None
    known = options_of(name)
    line = parse_line(tokens, name, known)
    return explain_foreign_options(
        line, unused[0].partition("=")[0], known, f"see `{common_settings.format_help_command(name)}`"
    )


def explain_misplaced_file(file: str, name: str) -> ConfigError:
    """Return the error for a YAML file in the place of a model or rows, with the program it belongs to."""
    tokens = [*name.split(), file]
    fallback = ConfigError(
        f"{file} does not belong to an option. Did you mean -c {file}?",
        _replace_config_words(tokens, file, name, name, ["-c", file]),
    )
    return explain_file(file, name, tokens) or fallback


def explain_misread_settings(error: ConfigError, tokens: Sequence[str]) -> ConfigError:
    """Return the error for a file or a key of another program, or `error` itself."""
    if list(tokens[:1]) == ["config"]:
        return error  # the command checks files and reports their errors itself
    name = _find_command(error, tokens)
    file = next(
        (token for token in tokens if str(error).startswith(f"{token}:") and file_detection.is_recipe_file(token)), None
    )
    detected = file_detection.detect_file(Path(file)) if file is not None else None
    if (
        file is not None
        and detected is not None
        and not (detected.program == file_detection.OWN_PROGRAM and name in detected.commands)
    ):
        return explain_file(file, name, list(tokens)) or error
    if not isinstance(error, validation.UnknownSetting):
        return error
    key = error.key.rpartition(".")[2].replace("-", "_")
    if not name or name == "run" or not foreign_options_module.is_known_name(key):
        return error
    answer = foreign_options_module.translate_options(name, [PeerOption(key, error.value, error.key)])
    prefix = str(error).partition(error.key)[0]
    namer = validation.SettingNamer()
    matches = [setting for setting, _ in validation.iter_settings(error.root) if setting.rpartition(".")[2] == key]
    if matches and not any(translated.settings for translated in answer.words):
        return error
    hint = answer.problem or ", ".join(
        f"{setting}: {yaml_reader.dump_scalar(value)}" for setting, value in answer.settings.items()
    )
    hint = f"write {hint}" if answer.settings and not answer.problem else hint or "take the key out"
    return ConfigError(
        f"{prefix}unknown setting {'; '.join(translated.format_clause(namer) for translated in answer.words)}", hint
    )


def _find_command(error: ConfigError, tokens: Sequence[str]) -> str:
    """Return the command whose settings an error is about; empty if there is none."""
    if isinstance(error, validation.UnknownSetting):
        return next((row.name for row in command_table.COMMANDS.values() if row.import_job_class() is error.root), "")
    names = (" ".join(tokens[start : start + size]) for start in range(len(tokens)) for size in (2, 1))
    return next((name for name in names if name in command_table.COMMANDS), "")


def options_of(name: str) -> list[str]:
    """Return the options of a command."""
    row = command_table.get_command(name)
    keys = [key for key, _ in validation.iter_settings(row.import_job_class())]
    aliases = [alias for names in row.option_aliases.values() for alias in names.split()]
    return [*_CONFIG_OPTIONS, "--dry-run", *aliases, *map(validation.OptionNamer().format_key, keys)]


def parse_line(tokens: Sequence[str], name: str, known: Collection[str]) -> CommandLine:
    """Split the arguments of a command line into known and foreign ones."""
    chain = name.split()
    starts = (index for index in range(len(tokens)) if list(tokens[index : index + len(chain)]) == chain)
    start = next(starts) + len(chain)
    line = CommandLine(name, list(tokens[:start]))
    row = command_table.get_command(name)
    options = {
        validation.OptionNamer().format_key(key): key for key, _ in validation.iter_settings(row.import_job_class())
    }
    options |= {alias: key for key, names in row.option_aliases.items() for alias in names.split()}
    list_settings = {key for key, hint in validation.iter_settings(row.import_job_class()) if _takes_many(hint)}
    remaining = list(tokens[start:])
    while remaining:
        token, values = remaining.pop(0), list[str]()
        option, equals, value = token.partition("=")
        if not token.startswith("-") or not _OPTION_NAME.match(token.lstrip("-")):
            if _is_pair(token) and not row.positional_setting:
                _add_pair(line, token, options)
            else:
                line.known_words.append(token)
            continue
        normalized = option.replace("_", "-")
        takes_one = normalized in options and options[normalized] not in list_settings
        while remaining and (not remaining[0].startswith("-") or not _OPTION_NAME.match(remaining[0].lstrip("-"))):
            if takes_one and (values or equals):
                break
            values.append(remaining.pop(0))
        if normalized in known or option in known:
            line.known_words += [token, *values]
            if option in _CONFIG_OPTIONS:
                line.config_files += [value] if equals else values
            elif normalized in options:
                line.own_settings[options[normalized]] = ([value] if equals else values) or ["true"]
        elif option == "--set":
            for pair in [value] if equals else values:
                _add_pair(line, pair, options)
        else:
            option_value: Any = value if equals else values if len(values) > 1 else values[0] if values else True
            line.foreign_options.append(PeerOption(option.lstrip("-").replace("-", "_"), option_value, option))
    return line


def _takes_many(hint: Any) -> bool:
    return getattr(validation.strip_optional(hint)[0], "__origin__", None) in (list, dict)


def _is_pair(token: str) -> bool:
    key, equals, _ = token.lstrip("+").partition("=")  # Hydra adds keys with +
    return bool(equals) and _OPTION_NAME.fullmatch(key) is not None and not Path(token).exists()


def _add_pair(line: CommandLine, token: str, options: Mapping[str, str]) -> None:
    """Add KEY=VALUE to the line: a setting of this program, or of another one."""
    key, _, value = token.lstrip("+").partition("=")
    option = validation.OptionNamer().format_key(key.replace("-", "_"))
    if option in options:
        line.known_words += [option, value]
    else:
        line.foreign_options.append(PeerOption(key.replace("-", "_"), value, key))


def explain_foreign_options(line: CommandLine, token: str, known: Collection[str], help_hint: str) -> ConfigError:
    """Return the error for a line with unknown options, with the corrected line."""
    given_settings = _read_given_settings(line)
    answer = foreign_options_module.translate_options(line.command, line.foreign_options, given_settings)
    settings: dict[str, Any] = {}
    clauses: list[str] = []
    is_unresolved = False
    by_name = {translated.original_text: translated for translated in answer.words}
    for option in line.foreign_options:
        candidates = _match_option_suffix(option.name, known)
        translation = by_name.get(option.original_text)
        if translation is not None and not (
            candidates and not set(candidates) & set(map(validation.OptionNamer().format_key, translation.settings))
        ):
            suggestion = f"Did you mean {' or '.join(candidates)}?" if candidates else ""
            clauses.append(
                f'"{option.original_text}". {suggestion}'
                if suggestion
                else translation.format_clause(validation.OptionNamer())
            )
            continue
        if len(candidates) == 1:
            settings[candidates[0]] = option.value
        is_unresolved = is_unresolved or len(candidates) != 1
        guess = (
            f" Did you mean {' or '.join(candidates)}?" if candidates else suggest_option(option.original_text, known)
        )
        clauses.append(f'"{option.original_text}".{guess}'.removesuffix("."))
    if not clauses:
        return ConfigError(f"{token} is given as a word; here it is an option", line.format_line())
    if len(clauses) > _MAX_EXPLAINED:
        clauses[_MAX_EXPLAINED:] = [f"and {len(clauses) - _MAX_EXPLAINED} more"]
    hint = help_hint if is_unresolved else answer.problem
    if not hint:
        extra_args = [
            part for key, value in answer.settings.items() for part in _format_setting_words(line.command, key, value)
        ]
        own_args = [part for option, value in settings.items() for part in _format_option_words(option, value)]
        hint = line.format_line([*own_args, *extra_args])
    kind = "option" if line.foreign_options[0].original_text.startswith("-") else "word"
    return ConfigError(f"unknown {kind} {'; '.join(clauses)}".removesuffix("."), hint)


def _read_given_settings(line: CommandLine) -> dict[str, Any]:
    """Return the settings of the line: of its recipes, then of its options.

    Raises:
        ConfigError: a recipe cannot be read, or a value is of the wrong type.
    """
    root = command_table.get_command(line.command).import_job_class()
    hints = dict(validation.iter_settings(root))
    settings: dict[str, Any] = {}
    for file in line.config_files:
        settings |= {
            key: value
            for key, value in file_detection.flatten(shipped_recipes.read_recipe(file).tree).items()
            if key in hints
        }
    for key, values in line.own_settings.items():
        hint, _ = validation.strip_optional(hints[key])
        texts = [validation.UntypedText(value) for value in values]
        value = texts if _takes_many(hint) else texts[0]
        settings[key] = validation.convert_value(value, hints[key], validation.OptionNamer(), tuple(key.split(".")))
    if "batch.seq_len" in hints and settings.get("batch.seq_len") is None:
        positions = model_facts.max_positions(
            model_facts.read_local_config(str(settings.get("model") or settings.get("model.path") or ""))
        )
        if positions is not None:  # the job also uses the model's limit
            settings["batch.seq_len"] = min(DEFAULT_SEQ_LEN, positions)
    return settings


def _match_option_suffix(name: str, known: Collection[str]) -> list[str]:
    """Return the options with this name in a section or at the top level."""
    suffix = name.replace("_", "-")
    return [option for option in known if option.startswith("--") and option.lstrip("-").rpartition(".")[2] == suffix]


def suggest_option(token: str, known: Collection[str]) -> str:
    """Return ` Did you mean ...?` with the options of this name, or the nearest one."""
    matches = _match_option_suffix(token.lstrip("-"), known)
    return (
        f" Did you mean {' or '.join(matches)}?"
        if matches
        else did_you_mean(token.replace("_", "-"), known, _MIN_SIMILARITY)
    )


def _format_option_words(option: str, value: Any) -> list[str]:
    values = value if isinstance(value, list) else [] if value is True else [value]
    return [option, *map(str, values)]


def _format_setting_words(command: str, key: str, value: Any) -> list[str]:
    """Return a setting as command-line arguments."""
    option = validation.OptionNamer().format_key(key)
    if isinstance(value, bool):
        section, _, last = option.removeprefix("--").rpartition(".")
        return [option] if value else [f"--{section}.no-{last}" if section else f"--no-{last}"]
    if isinstance(value, dict):
        return [option, *(f"{name}={item}" for name, item in value.items())]
    if isinstance(value, list):
        return [option, *(map(str, value) if value else ["[]"])]
    if isinstance(value, float):
        text = str(int(value)) if value.is_integer() and abs(value) < 1e15 else str(value)
        return [option, re.sub(r"e([+-])0+(?=\d)", r"e\1", text)]
    return [option, "null" if value is None else str(value)]


def explain_file(file: str, name: str, tokens: list[str]) -> ConfigError | None:
    """Return the error that names the program of a file and the line that runs or converts it; None if unknown.

    Args:
        file: one of the tokens.
        name: the command of the line; empty: none.
        tokens: arguments of the command line.
    """
    detected = file_detection.detect_file(Path(file))
    if detected is None:
        return None
    if detected.program == file_detection.OWN_PROGRAM:
        return _explain_own_recipe(file, name, tokens, detected)
    evidence = ", ".join(detected.evidence[:4])
    if file.endswith(".sh"):
        message = f"{file} is a script of {detected.title} ({evidence})"
    else:
        message = f"{file} holds settings of {detected.title} ({evidence})"
    if detected.program == "deepspeed" and not file.endswith(".sh"):
        command = name or "sft"
        if "parallel.deepspeed" in dict(
            validation.iter_settings(command_table.get_command(command).import_job_class())
        ):
            return ConfigError(
                message, _replace_config_words(tokens, file, name, command, ["--parallel.deepspeed", file])
            )
    if detected.program in _NO_CONVERTER:
        return _explain_arguments_file(file, detected.commands[0], tokens, message)
    if detected.program in (file_detection.ACCELERATE, "transformers") or (
        detected.program == "deepspeed" and not detected.commands
    ):
        return _explain_arguments_file(file, name or "sft", tokens, message)
    new_file = f"{Path(file).stem}-anabatic.yaml"
    command = detected.commands[0] or name or "sft"
    convert_line = shlex.join(["anabatic", "config", f"from-{detected.program}", file])
    config_args = [*(["-c"] if command != "run" else []), new_file]
    run_line = _replace_config_words(tokens, file, name, command, config_args)
    return ConfigError(message, f"{convert_line} > {shlex.quote(new_file)} && {run_line}")


def _explain_own_recipe(
    file: str, name: str, tokens: list[str], detected: file_detection.DetectedFile
) -> ConfigError | None:
    if name in detected.commands:
        config_args = [file] if name == "run" else ["-c", file]
        return ConfigError(
            f"{file} does not belong to an option. Did you mean -c {file}?",
            _replace_config_words(tokens, file, name, name, config_args),
        )
    others = " or ".join(f"`anabatic {command_name}`" for command_name in detected.commands[:3])
    command = detected.commands[0]
    config_args = [file] if command == "run" else ["-c", file]
    exclusion = f", not for `anabatic {name}`" if name else ""
    return ConfigError(
        f"{file} is a recipe for {others}{exclusion}", _replace_config_words([], file, "", command, config_args)
    )


def _explain_arguments_file(file: str, command: str, tokens: list[str], message: str) -> ConfigError:
    """Return the error for a file of arguments, with the equivalent options."""
    tree = file_detection.read_tree(Path(file))
    if "actor_rollout_ref" in tree:
        tree = file_detection.flatten(tree)
    if accelerate_config.is_config(tree):
        tree = accelerate_config.flatten_config(tree)
    if isinstance(entries := tree.get("datasets"), list):  # axolotl's
        files = [item.get("path") for item in entries if isinstance(item, dict)]
        tree = {**tree, "datasets": [str(file) for file in files if file]}
    options = [PeerOption(key.replace("-", "_"), value, key) for key, value in tree.items()]
    answer = foreign_options_module.translate_options(
        command, [item for item in options if foreign_options_module.is_known_name(item.name)]
    )
    if answer.problem:
        return ConfigError(message, answer.problem)
    extra_args = [part for key, value in answer.settings.items() for part in _format_setting_words(command, key, value)]
    return ConfigError(message, _replace_config_words(tokens, file, command, command, extra_args))


def _replace_config_words(tokens: list[str], file: str, name: str, command: str, config_args: Sequence[str]) -> str:
    """Return the line with `-c FILE` replaced; a new line if it is for another command."""
    chain = name.split()
    starts = [index for index in range(len(tokens)) if chain and tokens[index : index + len(chain)] == chain]
    if not starts or name != command:
        before = tokens[: starts[0]] if starts else []  # launch and plan take the command after --
        return shlex.join(["anabatic", *before, *command.split(), *config_args])
    line = list(tokens)
    index = line.index(file)
    first = index - 1 if index and line[index - 1] in _CONFIG_OPTIONS else index
    before, after = line[:first], line[index + 1 :]
    replaces_file = config_args[:1] == ["-c"] or config_args[:1] == [file]
    return shlex.join(
        ["anabatic", *before, *config_args, *after] if replaces_file else ["anabatic", *before, *after, *config_args]
    )
