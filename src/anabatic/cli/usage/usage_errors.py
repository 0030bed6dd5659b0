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
from anabatic.convert import command_finder, file_detection, peer_tables
from anabatic.core.errors import ConfigError
from anabatic.core.formatting import did_you_mean
from anabatic.core.paths import RunFolder


def translate_usage_error(error: UsageError, tokens: Sequence[str]) -> ConfigError:
    """Return the message and hint for a usage error; `tokens` are all arguments of the command line."""
    if isinstance(error, UnknownCommandError):
        translated = explain_unknown_command(error, tokens)
    else:
        translated = explain_job_options(error, tokens)
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


_MOVED_OPTIONS = {("serve", "--runs"): "training runs are shown by another command: anabatic studio FOLDER"}
"""(command, option that it had before) -> hint."""


def explain_job_options(error: UsageError, tokens: Sequence[str]) -> ConfigError | None:
    """Return the error for options, KEY=VALUE words or a file that a command rejects; None without an explanation."""
    if isinstance(error, UnknownOptionError):
        if moved := _MOVED_OPTIONS.get((error.command, error.option)):
            return ConfigError(f'unknown option "{error.option}"', moved)
        return usage_hints.explain_option_names(error, tokens, error.option)
    if not isinstance(error, UnusedWordsError) or error.command not in command_table.COMMANDS:
        return None
    for word in error.words:
        if file_detection.is_recipe_file(word) and (found := usage_hints.explain_file(word, error.command)) is not None:
            return found
    if all(map(usage_hints.is_pair, error.words)):
        return usage_hints.explain_option_names(error, tokens, error.words[0].partition("=")[0])
    return None


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
        {key for key, _ in validation.iter_settings(command_table.COMMANDS.find_row(name).import_job_class())}
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
_PROGRAMS = {
    "swift": "swift", "megatron": "swift", "llamafactory-cli": "llamafactory", "lmf": "llamafactory", "vllm": "",
    "axolotl": "",
}  # fmt: skip
"""Programs whose first argument is the command -> their converter."""
_LAUNCHERS = ("torchrun", "deepspeed", "accelerate", "mpirun", "srun", "msrun")


def explain_unknown_command(error: UnknownCommandError, tokens: Sequence[str]) -> ConfigError | None:
    """Return the error with our name for a command of another program, or the command for a lone file."""
    word = error.word
    if error.command or not word.strip():
        return None
    file = next((token for token in tokens if file_detection.is_recipe_file(token)), None)
    if file is not None and (file_error := usage_hints.explain_file(file, "")) is not None:
        return file_error
    if word in shipped_recipes.RECIPES:
        return ConfigError(f"{word} is a recipe, not a command", shipped_recipes.RECIPES[word].command_line)
    if word in _LAUNCHERS:
        message = f'unknown command "{word}": processes are started by the commands themselves'
        return ConfigError(message, "anabatic sft --device.nproc 8 ..., on several machines anabatic launch --help")
    peer, label = _PROGRAMS.get(word, ""), word
    args = list(tokens[list(tokens).index(word) + 1 :])
    if word in _PROGRAMS and args and not args[0].startswith("-"):
        foreign, word = [word, *args], args[0]
        label = " ".join(foreign[:2])
        if peer and command_finder.find_commands(shlex.join(foreign), peer).calls:
            message = f'unknown command "{label}" (of {peer_tables.load_tables(peer).title})'
            line = shlex.join(["anabatic", "config", f"from-{peer}", shlex.join(foreign)])
            return ConfigError(message, f"{line} > recipe.yaml")
    command = word if word in command_table.COMMANDS else _COMMAND_ALIASES.get(word, "")
    if command:
        return ConfigError(f'unknown command "{label}": `anabatic {command}` here', f"see `anabatic {command} --help`")
    for peer in ("llamafactory", "swift"):
        for row in peer_tables.load_tables(peer).tables["commands"]:
            if any(name.partition(" ")[2] == word for name in row.theirs):
                here = row.here.get("en", "").replace("`", "") or f"anabatic {row.command}"
                message = f'unknown command "{label}" (of {peer_tables.load_tables(peer).title}): {here} here'
                return ConfigError(message, f"see `anabatic {row.command} --help`".replace("  ", " "))
    return None
