"""Report errors to the user, `error:` and `hint:`, one line each, with the equivalent of commands of other programs."""

from __future__ import annotations

import errno
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from cyclopts import (
    CoercionError,
    CycloptsError,
    MissingArgumentError,
    RepeatArgumentError,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
)

from anabatic.cli import usage_hints
from anabatic.config.loading import command_table, shipped_recipes, validation
from anabatic.convert import converter, file_detection, peer_tables
from anabatic.core import log, paths
from anabatic.core.errors import TRACEBACK_HINT, AnabaticError, ConfigError, Failure
from anabatic.core.formatting import did_you_mean
from anabatic.core.paths import RunFolder
from anabatic.core.relaunch import EXIT_INTERRUPTED, EXPLAIN_VARIABLE, REPORTS_VARIABLE
from anabatic.core.stop_signals import SIGNAL_LISTENER, StopSignal

BROKEN_PIPE = 141
"""Exit code 128 + SIGPIPE: the reader of the output has closed the pipe, as `head` does."""
_MAX_CAUSES = 20
_DISK_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def run_with_error_report(call: Callable[[], int], debug: bool) -> int:
    """Run `call`; convert its exceptions to one or two lines on stderr and an exit code.

    Workers of all ranks print their message, because the user cannot know which log to open. If this program's
    launcher started the workers, it collects the messages and prints equal ones once.
    """
    try:
        code = _run_and_report_errors(call, debug)
    except StopSignal as stopped:  # arrived after an error, before signals were held
        code = stopped.exit_code
    if folder := os.environ.get(REPORTS_VARIABLE):
        paths.write_atomic(Path(folder) / f"rank-{log.get_rank()}.code", str(code))
    return code


def _run_and_report_errors(call: Callable[[], int], debug: bool) -> int:
    try:
        return call()
    except KeyboardInterrupt:
        sys.stderr.write("\ninterrupted\n")
        return EXIT_INTERRUPTED
    except StopSignal as stopped:
        log.info(f"{signal.Signals(stopped.number).name} before the first step: there is nothing to save")
        return stopped.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except Exception as error:
        SIGNAL_LISTENER.hold_signals()  # a launcher sends SIGTERM to the others when one worker has failed
        trace = traceback.format_exc()
        user_error = to_user_error(error)
        _write_trace_to_log_files(trace)
        if debug:
            sys.stderr.write(trace)
        if os.environ.get(REPORTS_VARIABLE):
            _print_error(user_error)  # before the slow explanation: a watchdog may end this process meanwhile
        _print_error(user_error, "" if isinstance(error, AnabaticError) else _explain_error(error))
        return user_error.exit_code


def to_user_error(error: Exception) -> AnabaticError:
    """Return `error` as an `AnabaticError` with a hint."""
    if isinstance(error, AnabaticError):
        return error
    if isinstance(error, MemoryError):
        return Failure("not enough memory", "lower batch.micro_batch_tokens, or close other programs")
    if isinstance(error, OSError) and error.filename is not None:
        path = Path(os.fsdecode(error.filename))
        if error.errno in _DISK_ERRNOS:
            return paths.make_write_error(path, error)
        return Failure(f"{path}: {error.strerror or error}", "check the path and its permissions")
    if isinstance(error, OSError) and error.errno in _DISK_ERRNOS:
        hint = "free some space; everything saved before is still whole"
        return Failure(f"cannot write: {error.strerror}", hint)
    text = " ".join(str(error).split()) or "no message"
    return Failure(f"unexpected {type(error).__name__}: {text}", TRACEBACK_HINT)


def _explain_error(error: BaseException) -> str:
    """Return a hint of `anabatic explain` for the messages of `error` and of its causes."""
    if os.environ.get(EXPLAIN_VARIABLE) == "0":
        return ""
    messages: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(messages) < _MAX_CAUSES:
        messages.insert(0, f"{type(cause).__name__}: {cause}")
        cause = cause.__cause__ or cause.__context__
    try:
        from anabatic.doctor import knowledge_base, language
        from anabatic.doctor.explain import diagnosis, rendering

        report = diagnosis.explain_text("\n".join(messages), knowledge_base.load_knowledge())
        return rendering.format_hint(report, language.choose_language(None, os.environ))
    except Exception as explain_error:  # a hint must never replace the error
        return f"hint: `anabatic explain` failed: {' '.join(str(explain_error).split())}"


def _print_error(error: AnabaticError, explanation: str = "") -> None:
    rank = log.get_rank()
    text = f"{error.render()}\n{explanation}" if explanation else error.render()
    if folder := os.environ.get(REPORTS_VARIABLE):
        paths.write_atomic(Path(folder) / f"rank-{rank}.error", text)
        return
    prefix = f"[rank {rank}] " if rank else ""
    sys.stderr.write(f"{prefix}{text}\n")


def _write_trace_to_log_files(trace: str) -> None:
    for handler in log.LOGGER.handlers:
        if isinstance(handler, logging.FileHandler):
            handler.handle(logging.LogRecord(log.LOGGER.name, logging.ERROR, "", 0, trace, None, None))


_COMMANDS_WITH_SEPARATOR = ("anabatic sim", "anabatic launch", "anabatic plan") + tuple(
    f"anabatic bench {kind}" for kind in ("train", "scaling", "compare")
)
"""Commands that take another command after --."""
_BOOLEAN_WORDS = ("true", "false", "yes", "no", "on", "off")
"""Values that users type after a switch."""


def translate_usage_error(error: CycloptsError, tokens: Sequence[str]) -> ConfigError:
    """Translate an error of the CLI library; `tokens` are all arguments of the command line."""
    from anabatic.cli import usage_hints  # slow: they read the tables of other programs
    from anabatic.config.loading import common_settings

    if isinstance(error, UnknownCommandError):
        translated = explain_unknown_command(error, tokens)
    else:
        translated = usage_hints.explain_usage_error(error, tokens)
    if translated is not None:
        return translated
    name = " ".join(error.command_chain or ())
    command = f"anabatic {name}".strip()
    help_command = common_settings.format_help_command(name) if name in command_table.COMMANDS else f"{command} --help"
    hint = f"see `{help_command}`"
    if isinstance(error, UnusedCliTokensError) and (error.unused_tokens or [""])[0].lower() in _BOOLEAN_WORDS:
        hint = "a switch is typed alone, --x or --no-x (in a section --a.no-x), or with its value, --x=false"
    if command in _COMMANDS_WITH_SEPARATOR:
        hint = f"the command to run and its options stand after --; {hint}"
    for error_type, describe in _USAGE_DESCRIBERS:
        if isinstance(error, error_type):
            return ConfigError(describe(error), hint)
    return ConfigError(" ".join(str(error).split()).rstrip("."), hint)


def _describe_unknown_option(error: UnknownOptionError) -> str:
    from anabatic.cli import usage_hints

    option = (error.token.keyword or error.token.value).split("=", 1)[0]
    known = [name for argument in error.argument_collection for name in argument.names]
    return f'unknown option "{option}".{usage_hints.suggest_option(option, known)}'


def _describe_unknown_command(error: UnknownCommandError) -> str:
    token = (error.unused_tokens or [""])[0]
    if token.startswith("-"):
        return f'unknown option "{token}"'
    known = [name for name in error.app or () if not name.startswith("-")]
    guess = did_you_mean(token, known) or f" Commands: {', '.join(known)}"
    return f'unknown command "{token}".{guess}'


def _describe_missing_value(error: MissingArgumentError) -> str:
    name = error.keyword or (error.argument.name if error.argument else "an option")
    return f"{name} needs a value"


def _describe_unused_words(error: UnusedCliTokensError) -> str:
    tokens = list(error.unused_tokens or ())
    option = next((f"{name} {token}" for token in tokens if (name := _guess_option(token, error))), None)
    guess = f" Did you mean {option}?" if option else ""
    return f"{' '.join(tokens)} does not belong to an option.{guess}"


def _guess_option(token: str, error: UnusedCliTokensError) -> str:
    """Return the option that a positional argument may belong to; empty if none is likely."""
    name = " ".join(error.command_chain or ())
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


def _describe_repeated_option(error: RepeatArgumentError) -> str:
    return f"{error.token.keyword} is given twice"


def _describe_bad_value(error: CoercionError) -> str:
    if error.token is None or error.token.keyword is None:
        return " ".join(str(error).split()).rstrip(".")
    return f'{error.token.keyword} is "{error.token.value}", expected true or false'


_USAGE_DESCRIBERS: tuple[tuple[type, Callable[..., str]], ...] = (
    (UnknownOptionError, _describe_unknown_option),
    (UnknownCommandError, _describe_unknown_command),
    (MissingArgumentError, _describe_missing_value),
    (UnusedCliTokensError, _describe_unused_words),
    (RepeatArgumentError, _describe_repeated_option),
    (CoercionError, _describe_bad_value),
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
    word = (error.unused_tokens or [""])[0]
    if error.command_chain:
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
