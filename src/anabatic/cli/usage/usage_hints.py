"""Names of options and files of other programs: what each is called here, and the converter that reads it whole."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from anabatic.cli.parsing.command_line import UsageError, is_option
from anabatic.config.loading import command_table, common_settings, validation
from anabatic.convert import file_detection, foreign_options
from anabatic.core.errors import ConfigError
from anabatic.core.formatting import did_you_mean

CONVERTERS = ("llamafactory", "swift", "deepspeed", "nanochat")
"""Programs that `anabatic config from-...` reads."""
_MAX_EXPLAINED = 6
"""Most options that a message explains."""
_MIN_SIMILARITY = 0.75
"""Similarity from which a name is suggested: a wrong guess is worse than none."""


def explain_option_names(error: UsageError, tokens: Sequence[str], name: str) -> ConfigError | None:
    """Return the error for options that a command does not have, with what the tables call them here.

    Args:
        error: of the command line.
        tokens: all arguments of the command line.
        name: first option or key that is unknown.

    None for commands that run no job: their options are not settings.
    """
    if error.command not in command_table.COMMANDS or error.command == "run":
        return None
    known = set(error.interface.option_names)
    chain = error.command.split()
    start = next(index for index in range(len(tokens)) if list(tokens[index : index + len(chain)]) == chain)
    typed = [token.partition("=")[0] for token in tokens[start:] if is_option(token) or is_pair(token)]
    unknown = [
        word for word in dict.fromkeys([name, *typed]) if word.replace("_", "-") not in known and word != "--set"
    ]
    clauses = [describe_option(error.command, word, known) for word in unknown[:_MAX_EXPLAINED]]
    if len(unknown) > _MAX_EXPLAINED:
        clauses.append(f"and {len(unknown) - _MAX_EXPLAINED} more")
    kind = "option" if name.startswith("-") else "word"
    message = f"unknown {kind} {'; '.join(clauses)}".removesuffix(".")
    return ConfigError(message, _format_converter_hint(error.command, unknown))


def describe_option(command: str, word: str, known: Collection[str]) -> str:
    """Return `"--lr" (of ...): --optim.lr here`, or the option with its name with the options that are like it."""
    name = word.lstrip("+-").replace("-", "_")
    same = [option for option in known if option.startswith("--") and _last_part(option) == name.replace("_", "-")]
    if not same and f"--{name}".replace("_", "-") in known:  # ours, written as KEY=VALUE
        same = [f"--{name}".replace("_", "-")]
    foreign = None if same else foreign_options.find_option(command, name)
    if foreign is not None:
        return f'"{word}" {foreign.format_clause(validation.OptionNamer())}'
    return f'"{word}".{suggest_option(word, known) if not same else _format_guess(same)}'.removesuffix(".")


def suggest_option(word: str, known: Collection[str]) -> str:
    """Return ` Did you mean ...?` with the options of this name in any section, or the nearest one."""
    name = word.lstrip("-").replace("_", "-")
    same = [option for option in known if option.startswith("--") and _last_part(option) == name]
    return _format_guess(same) if same else did_you_mean(word.replace("_", "-"), known, _MIN_SIMILARITY)


def _format_guess(options: Sequence[str]) -> str:
    return f" Did you mean {' or '.join(options)}?"


def _last_part(option: str) -> str:
    return option.lstrip("-").rpartition(".")[2]


def is_pair(token: str) -> bool:
    """Return whether a token is KEY=VALUE and no file."""
    key, equals, _ = token.lstrip("+").partition("=")  # Hydra adds keys with +
    return bool(equals) and key.replace(".", "").replace("-", "_").isidentifier() and not Path(token).exists()


def _format_converter_hint(command: str, words: Iterable[str]) -> str:
    peer = foreign_options.guess_program(word.lstrip("+-").replace("-", "_") for word in words)
    help_command = common_settings.format_help_command(command)
    if peer not in CONVERTERS:
        return f"see `{help_command}`"
    return f"see `{help_command}`; `anabatic config from-{peer} --help` converts a whole command or file"


def explain_misplaced_file(file: str, name: str) -> ConfigError:
    """Return the error for a YAML file in the place of a model or rows, with the program it belongs to."""
    return explain_file(file, name) or ConfigError(
        f"{file} does not belong to an option. Did you mean -c {file}?",
        shlex.join(["anabatic", *name.split(), "-c", file]),
    )


def explain_misread_settings(error: ConfigError, tokens: Sequence[str]) -> ConfigError:
    """Return the error for a file or a key of another program, or `error` itself."""
    if list(tokens[:1]) == ["config"]:
        return error  # the command checks files and reports their errors itself
    name = _find_command(error, tokens)
    files = (token for token in tokens if str(error).startswith(f"{token}:") and file_detection.is_recipe_file(token))
    if (file := next(files, None)) is not None:
        detected = file_detection.detect_file(Path(file))
        is_own = detected is not None and detected.program == file_detection.OWN_PROGRAM and name in detected.commands
        if detected is not None and not is_own:
            return explain_file(file, name) or error
    if not isinstance(error, validation.UnknownSetting) or not name or name == "run":
        return error
    key = error.key.rpartition(".")[2].replace("-", "_")
    foreign = foreign_options.find_option(name, key)
    is_ours = any(_last_part(setting) == key for setting, _ in validation.iter_settings(error.root))
    if foreign is None or (is_ours and not foreign.settings):
        return error
    prefix = str(error).partition(error.key)[0]
    hint = f"write {foreign.settings[0]}" if foreign.settings else "take the key out"
    return ConfigError(
        f'{prefix}unknown setting "{error.key}" {foreign.format_clause(validation.SettingNamer())}', hint
    )


def _find_command(error: ConfigError, tokens: Sequence[str]) -> str:
    """Return the command whose settings an error is about; empty if there is none."""
    if isinstance(error, validation.UnknownSetting):
        return next((row.name for row in command_table.COMMANDS.values() if row.import_job_class() is error.root), "")
    names = (" ".join(tokens[start : start + size]) for start in range(len(tokens)) for size in (2, 1))
    return next((name for name in names if name in command_table.COMMANDS), "")


def explain_file(file: str, name: str) -> ConfigError | None:
    """Return the error that names the program of a file and the line that runs or converts it; None if unknown.

    Args:
        file: name of the file.
        name: the command of the line; empty: none.
    """
    detected = file_detection.detect_file(Path(file))
    if detected is None:
        return None
    if detected.program == file_detection.OWN_PROGRAM:
        return _explain_own_recipe(file, name, detected)
    noun = "is a script" if file.endswith(".sh") else "holds settings"
    message = f"{file} {noun} of {detected.title} ({', '.join(detected.evidence[:4])})"
    if detected.program == "deepspeed" and not file.endswith(".sh") and name:
        settings = dict(validation.iter_settings(command_table.COMMANDS.find_row(name).import_job_class()))
        if "parallel.deepspeed" in settings:
            return ConfigError(message, f"give it as --parallel.deepspeed {shlex.quote(file)}")
    peer = "deepspeed" if detected.program == file_detection.ACCELERATE else detected.program
    if peer not in CONVERTERS:
        command = name or "sft"
        return ConfigError(
            message,
            f"write a recipe: `anabatic config show {command}`; the guide Migration names each setting here",
        )
    new_file = shlex.quote(f"{Path(file).stem}-anabatic.yaml")
    return ConfigError(message, f"{shlex.join(['anabatic', 'config', f'from-{peer}', file])} > {new_file}")


def _explain_own_recipe(file: str, name: str, detected: file_detection.DetectedFile) -> ConfigError:
    command = name if name in detected.commands else detected.commands[0]
    line = shlex.join(["anabatic", *command.split(), *([] if command == "run" else ["-c"]), file])
    if name in detected.commands:
        return ConfigError(f"{file} does not belong to an option. Did you mean -c {file}?", line)
    others = " or ".join(f"`anabatic {command_name}`" for command_name in detected.commands[:3])
    exclusion = f", not for `anabatic {name}`" if name else ""
    return ConfigError(f"{file} is a recipe for {others}{exclusion}", line)
