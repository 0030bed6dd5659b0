"""Messages and hints for command lines that are not understood: what was meant, also by commands of other programs."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from anabatic.cli.parsing.command_line import (
    SWITCH_VALUES,
    MissingValueError,
    RepeatedOptionError,
    SwitchValueError,
    UnknownCommandError,
    UnknownOptionError,
    UnusedWordsError,
    UsageError,
)
from anabatic.cli.usage import usage_hints
from anabatic.config.loading import command_table, common_settings, shipped_recipes, validation
from anabatic.convert import converter, file_detection, peer_tables
from anabatic.core.errors import ConfigError
from anabatic.core.formatting import did_you_mean
from anabatic.core.paths import RunFolder


def translate_usage_error(error: UsageError, tokens: Sequence[str]) -> ConfigError:
    """Return the message and hint for a usage error; `tokens` are all arguments of the command line."""
    if isinstance(error, UnknownCommandError):
        translated = explain_unknown_command(error, tokens)
    else:
        translated = usage_hints.explain_usage_error(error, tokens)
    if translated is not None:
        return translated
    name = error.command
    command = f"anabatic {name}".strip()
    help_command = common_settings.format_help_command(name) if name in command_table.COMMANDS else f"{command} --help"
    hint = f"see `{help_command}`"
    if isinstance(error, UnusedWordsError) and error.words[0].lower() in SWITCH_VALUES:
        hint = "a switch is typed alone, --x or --no-x (in a section --a.no-x), or with its value, --x=false"
    if error.interface.takes_command:
        hint = f"the command to run and its options stand after --; {hint}"
    for error_type, describe in _USAGE_DESCRIBERS:
        if isinstance(error, error_type):
            return ConfigError(describe(error), hint)
    raise AssertionError(f"no description of {type(error).__name__}") from error


def _describe_unknown_option(error: UnknownOptionError) -> str:
    guess = usage_hints.suggest_option(error.option, error.interface.option_names)
    return f'unknown option "{error.option}"{f".{guess}" if guess else ""}'


def _describe_unknown_command(error: UnknownCommandError) -> str:
    if not error.word.strip():
        return "the command is an empty word"
    guess = did_you_mean(error.word, error.known) or f" Commands: {', '.join(error.known)}"
    return f'unknown command "{error.word}".{guess}'


def _describe_unused_words(error: UnusedWordsError) -> str:
    guesses = ((word, _guess_option(word, error)) for word in error.words if word.strip())
    option = next((f"{name} {word}" for word, name in guesses if name), None)
    guess = f" Did you mean {option}?" if option else ""
    words = " ".join(word if word.strip() else shlex.quote(word) for word in error.words)
    return f"{words} does not belong to an option.{guess}"


def _describe_repeated_option(error: RepeatedOptionError) -> str:
    if error.earlier == error.option:
        return f"{error.option} is given twice"
    return f"{error.earlier} and {error.option} are one setting, which is given twice"


def _guess_option(token: str, error: UsageError) -> str:
    """Return the option that a positional argument may belong to; empty if none is likely."""
    name = error.command
    known = (
        {key for key, _ in validation.iter_settings(command_table.get_command(name).import_job_class())}
        if name in command_table.COMMANDS
        else set()
    )
    if token.endswith((".yaml", ".yml")) or token in shipped_recipes.RECIPES:
        return "-c"
    if (Path(token) / "config.json").is_file() or RunFolder(Path(token)).final_model.is_dir():
        return "--model" if "model" in known else ""
    return "--data" if "data.train" in known and Path(token).exists() else ""


_USAGE_DESCRIBERS: tuple[tuple[type, Callable[..., str]], ...] = (
    (UnknownOptionError, _describe_unknown_option),
    (UnknownCommandError, _describe_unknown_command),
    (UnusedWordsError, _describe_unused_words),
    (MissingValueError, lambda error: f"{error.name} needs a value"),
    (RepeatedOptionError, _describe_repeated_option),
    (SwitchValueError, lambda error: f'{error.option} is "{error.value}", expected true or false'),
)


_COMMAND_ALIASES = {
    "finetune": "sft", "fine-tune": "sft", "lora": "sft", "grpo": "rl", "ppo": "rl", "kto": "dpo", "orpo": "dpo",
    "rm": "reward", "generate": "infer", "inference": "infer", "predict": "infer", "evaluate": "eval",
    "tokenize": "tokenizer train", "convert": "export", "upload": "export", "check": "doctor", "smi": "monitor",
    "lm_eval": "eval", "lm-eval": "eval", "webui": "studio", "web-ui": "studio", "board": "studio", "ui": "studio",
}  # fmt: skip
"""Common names that are not in the tables -> command."""
_PROGRAMS = ("swift", "megatron", "llamafactory-cli", "lmf", "vllm", "axolotl")
"""Programs whose first argument is the command."""
_LAUNCHERS = ("torchrun", "deepspeed", "accelerate", "mpirun", "srun", "msrun")


def explain_unknown_command(error: UnknownCommandError, tokens: Sequence[str]) -> ConfigError | None:
    """Return the error with the equivalent of a command of another program, or the command for a lone file."""
    word = error.word
    if error.command or not word.strip():
        return None
    if file_detection.is_recipe_file(word):
        return usage_hints.explain_file(word, "", list(tokens))
    if word in shipped_recipes.RECIPES:
        return ConfigError(f"{word} is a recipe, not a command", shipped_recipes.RECIPES[word].command_line)
    args = [token for token in tokens if token != word]
    file = next((token for token in args if file_detection.is_recipe_file(token)), None)
    if file is not None and (file_error := usage_hints.explain_file(file, "", args)) is not None:
        return file_error
    if word in _LAUNCHERS:
        message = f'unknown command "{word}": processes are started by the commands themselves'
        return ConfigError(message, "anabatic sft --device.nproc 8 ..., on several machines anabatic launch --help")
    if word in _PROGRAMS and args and not args[0].startswith("-"):
        program, word, args = word, args[0], args[1:]
        label = f"{program} {word}"
        if word in command_table.COMMANDS:
            return ConfigError(f'unknown command "{label}": `anabatic {word}` here', _format_our_command(word, args))
    else:
        label = word
    if word in _COMMAND_ALIASES:
        command = _COMMAND_ALIASES[word]
        return ConfigError(f'unknown command "{label}": `anabatic {command}` here', _format_our_command(command, args))
    for peer in ("llamafactory", "swift"):
        for row in peer_tables.load_tables(peer).tables["commands"]:
            if any(name.partition(" ")[2] == word for name in row.theirs):
                return _explain_peer_command(peer, row, label, args)
    return None


def _explain_peer_command(peer: str, row: peer_tables.MappingRow, label: str, args: Sequence[str]) -> ConfigError:
    """Return the error with the equivalent of a command of a table."""
    equivalent = row.here.get("en", "").replace("`", "") or f"anabatic {row.command}"
    note = f" ({row.note['en']})".replace("`", "") if row.note else ""
    message = f'unknown command "{label}" (of {peer_tables.load_tables(peer).title}): {equivalent} here{note}'
    if not row.command:
        return ConfigError(message, "see `anabatic --help`")
    kinds = {
        name: entry
        for entry in peer_tables.load_tables(peer).all_rows()
        if entry.fact == "kind"
        for name in entry.theirs
    }
    command, command_args = row.command, list(args)
    for index, word in enumerate(args):
        option, equals, value = word.partition("=")
        name = option.lstrip("-").replace("-", "_")
        if word.startswith("-") and name in kinds:
            value = value if equals else args[index + 1] if index + 1 < len(args) else ""
            try:
                command = converter.command_for_tree(peer, {name: value})
            except ConfigError as error:
                return ConfigError(f"{message}; {error}".removesuffix("."), error.hint)
            command_args = [
                arg for position, arg in enumerate(args) if position != index and (equals or position != index + 1)
            ]
            break
    return ConfigError(message, _format_our_command(command, command_args))


def _format_our_command(command: str, args: Sequence[str]) -> str:
    """Return the command line of `command` with the converted arguments of the foreign command."""
    if not args:
        return f"see `anabatic {command} --help`"
    tokens = [
        token for index, arg in enumerate(args) for token in (["-c", arg] if _find_lone_recipe(args, index) else [arg])
    ]
    known = usage_hints.options_of(command)
    line = usage_hints.parse_line([*command.split(), *tokens], command, known)
    if not line.foreign_options:
        return line.format_line()
    hint = usage_hints.explain_foreign_options(
        line, line.foreign_options[0].original_text, known, f"see `anabatic {command} --help`"
    ).hint
    return hint or line.format_line()


def _find_lone_recipe(tokens: Sequence[str], index: int) -> bool:
    return tokens[index].endswith((".yaml", ".yml")) and not (index and tokens[index - 1].startswith("-"))
